//! Flags that say where a node or pool stands.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use quoin_api::topology::{LABELS_BYTES_MAX, parse_labels, parse_segment};
use std::io::Read;

#[derive(Args, Clone, Debug, Default)]
pub struct TopologyOptions {
    /// Where it stands, as in quoin.io/zone=west or quoin.io/rack=r1; may be repeated. A pool has
    /// the segments of its node where it has none of its own.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_segment)]
    topology: Vec<(String, String)>,
    /// Take segments from a file of labels too, a line each (KEY=VALUE): those under quoin.io/, and
    /// topology.kubernetes.io/zone and region. A flag holds against the file.
    #[arg(long, value_name = "FILE")]
    topology_file: Option<PathBuf>,
}

impl TopologyOptions {
    /// The segments by their keys.
    pub fn segments(&self) -> Result<BTreeMap<String, String>> {
        let mut segments = BTreeMap::new();
        for (key, value) in &self.topology {
            if let Some(other) = segments.insert(key.clone(), value.clone()) {
                bail!("--topology gives {key} twice, as {other} and {value}; keep one");
            }
        }
        let Some(path) = &self.topology_file else { return Ok(segments) };
        let shown = path.display();
        let mut text = String::new();
        let file = std::fs::File::open(path);
        let file = file.with_context(|| format!("--topology-file {shown} cannot be opened"))?;
        file.take(LABELS_BYTES_MAX as u64 + 1)
            .read_to_string(&mut text)
            .with_context(|| format!("--topology-file {shown} cannot be read"))?;
        let labels = parse_labels(&text);
        let labels = labels.map_err(|rule| anyhow::anyhow!("--topology-file {shown}: {rule}"))?;
        for (key, value) in labels {
            segments.entry(key).or_insert(value);
        }
        Ok(segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        topology: TopologyOptions,
    }

    #[test]
    fn segments_come_from_flags_and_a_file_of_labels_and_a_flag_holds_against_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("labels");
        std::fs::write(&path, "topology.kubernetes.io/zone=\"west\"\nquoin.io/rack=r1\na=b\n")
            .unwrap();
        let file = path.to_str().unwrap();
        let of = |flags: &[&str]| {
            let line = Line::try_parse_from([&["run"], flags].concat());
            line.map_err(anyhow::Error::from).and_then(|line| line.topology.segments())
        };
        let segments = of(&["--topology", "quoin.io/rack=r2", "--topology-file", file]).unwrap();
        let shown: Vec<_> = segments.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(shown, ["quoin.io/rack=r2", "quoin.io/zone=west"]);
        let twice = ["--topology", "quoin.io/rack=a", "--topology", "quoin.io/rack=b"];
        assert!(of(&twice).unwrap_err().to_string().contains("twice"));
        let wrong = of(&["--topology", "zone=west"]).unwrap_err().to_string();
        assert!(wrong.contains("--topology") && wrong.contains("quoin.io/zone"), "{wrong}");
        let absent = of(&["--topology-file", "/nowhere/labels"]).unwrap_err().to_string();
        assert!(absent.contains("/nowhere/labels"), "{absent}");
    }
}
