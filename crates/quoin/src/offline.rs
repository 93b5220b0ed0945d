//! `quoin pool inspect | check | export`: a pool looked into with nothing of Quoin running.
//!
//! They only read. What a start would write (recovery) stays in memory, so a damaged pool can be
//! looked at, and its volumes taken out of it, without being changed.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use quoin_core::{BLOCK_SIZE, ReplicaGuid, SnapshotId};
use quoin_pool::POOL_FILE;
use quoin_store::{BadBlock, FileDisk, offline};
use serde::Serialize;

use crate::output::{self, Format, Row};
use crate::size::show_size;

#[derive(clap::Args)]
pub struct OfflineOptions {
    /// The pool: its directory, its file or its block device. Nothing may be serving it.
    #[arg(value_name = "DATA")]
    data: PathBuf,
}

#[derive(clap::Args)]
pub struct ExportOptions {
    #[command(flatten)]
    pool: OfflineOptions,
    /// The replica's GUID, as `quoin pool inspect` shows it. Not needed if the pool has one.
    #[arg(long)]
    replica: Option<String>,
    /// A snapshot's id; without it the volume as it is now.
    #[arg(long)]
    snapshot: Option<String>,
    /// The raw image to write; must not exist. Holes stay holes.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

#[derive(Serialize)]
struct ReplicaView {
    guid: String,
    volume: String,
    replica: String,
    size_bytes: u64,
    position: String,
    stable: u64,
    quorum: bool,
    damaged: bool,
    live_bytes: u64,
    snapshots: Vec<String>,
}

impl Row for ReplicaView {
    const HEADER: &'static [&'static str] = &[
        "GUID",
        "VOLUME",
        "SIZE",
        "LIVE",
        "POSITION",
        "QUORUM",
        "DAMAGE NOTED",
        "REPLICA",
        "STABLE",
        "SNAPSHOTS",
    ];
    const NARROW: usize = 7;

    fn cells(&self) -> Vec<String> {
        let yes_no = |flag: bool| (if flag { "yes" } else { "no" }).to_owned();
        vec![
            self.guid.clone(),
            self.volume.clone(),
            show_size(self.size_bytes),
            show_size(self.live_bytes),
            self.position.clone(),
            (if self.quorum { "on" } else { "off" }).to_owned(),
            yes_no(self.damaged),
            self.replica.clone(),
            self.stable.to_string(),
            self.snapshots.join(","),
        ]
    }
}

/// What a check found, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckView {
    sound: bool,
    checked_bytes: u64,
    bad: Vec<BadView>,
    /// Bad on media, but nothing is lost with them.
    bad_headers: u32,
    damaged: Vec<DamagedView>,
}

/// Bytes of a volume that have no good copy in this pool.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BadView {
    replica: String,
    offset_bytes: u64,
    length_bytes: u64,
    /// "data", or "map": where these bytes lie in the pool is not known.
    what: &'static str,
}

/// A replica whose log or map cannot be read.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DamagedView {
    replica: String,
    what: &'static str,
}

impl From<&BadBlock> for BadView {
    fn from(bad: &BadBlock) -> Self {
        Self {
            replica: bad.replica.to_string(),
            offset_bytes: bad.lba * BLOCK_SIZE as u64,
            length_bytes: u64::from(bad.blocks) * BLOCK_SIZE as u64,
            what: if bad.blocks == 1 { "data" } else { "map" },
        }
    }
}

impl CheckView {
    fn of(report: &offline::CheckReport) -> Self {
        let damaged = |(guid, what): &(ReplicaGuid, &'static str)| DamagedView {
            replica: guid.to_string(),
            what,
        };
        Self {
            sound: report.is_sound(),
            checked_bytes: report.checked_bytes,
            bad: report.bad.iter().map(BadView::from).collect(),
            bad_headers: report.bad_headers,
            damaged: report.damaged.iter().map(damaged).collect(),
        }
    }

    /// A sentence a line.
    fn text(&self) -> String {
        let checked = show_size(self.checked_bytes);
        let mut lines = vec![match self.sound {
            true => {
                format!("the pool is sound: {checked} were read and agree with their checksums")
            }
            false => format!("the pool is damaged; {checked} were read"),
        }];
        for DamagedView { replica, what } in &self.damaged {
            lines.push(format!("replica {replica} cannot be read whole; damaged: {what}"));
        }
        for bad in &self.bad {
            let BadView { replica, offset_bytes, length_bytes, what } = bad;
            let why = match *what {
                "map" => "the map that leads to them is bad",
                _ => "their checksum does not fit",
            };
            lines.push(format!(
                "replica {replica}: {} of its volume at byte {offset_bytes} have no good copy here: \
                 {why}",
                show_size(*length_bytes)
            ));
        }
        if self.bad_headers > 0 {
            lines.push(format!(
                "{} headers or nodes are bad on the disk; no block is lost with them",
                self.bad_headers
            ));
        }
        lines.join("\n")
    }
}

fn open(data: &Path) -> Result<FileDisk> {
    let path = find(data)?;
    FileDisk::open_read_only(&path).with_context(|| format!("open the pool {}", path.display()))
}

/// The file or device of a pool: itself, or in a pool's directory, or in that of a pool of
/// `quoin dev`, where it lies beside the identity.
fn find(data: &Path) -> Result<PathBuf> {
    if !data.is_dir() {
        return Ok(data.to_owned());
    }
    let places = [data.join(POOL_FILE), data.join("data"), data.join("data").join(POOL_FILE)];
    places.iter().find(|place| place.is_file()).cloned().with_context(|| {
        format!(
            "there is no pool in {}: name the directory or file that --data named",
            data.display()
        )
    })
}

pub fn inspect(options: &OfflineOptions, format: Format) -> Result<()> {
    let found = offline::inspect(open(&options.data)?)?;
    let rows: Vec<ReplicaView> = found
        .replicas
        .iter()
        .map(|r| ReplicaView {
            guid: r.identity.guid.to_string(),
            volume: r.identity.volume.to_string(),
            replica: r.identity.replica.to_string(),
            size_bytes: r.state.volume_blocks * quoin_core::BLOCK_SIZE as u64,
            position: format!("{}:{}", r.state.position.epoch, r.state.position.lsn),
            stable: r.state.stable.0,
            quorum: r.meta.quorum,
            damaged: r.meta.damaged,
            live_bytes: r.stats.live_bytes,
            snapshots: r.snapshots.iter().map(|s| s.id.to_string()).collect(),
        })
        .collect();
    if matches!(format, Format::Table | Format::Wide) {
        output::print_line(&format!(
            "pool {}: {} used of {}, started {} times; what lies in it is read by `quoin pool check`",
            found.pool,
            show_size(found.stats.used_bytes),
            show_size(found.stats.size_bytes),
            found.stats.starts
        ))?;
    }
    output::print_list(format, &rows, "no replicas")
}

pub fn check(options: &OfflineOptions, format: Format) -> Result<()> {
    let report = offline::check(open(&options.data)?, |_| {})?;
    let view = CheckView::of(&report);
    output::print_one(format, &view, || view.text())?;
    if !report.is_sound() {
        bail!(
            "the pool is damaged: start it beside its volumes' other replicas and it is repaired, \
             or export what is left with `quoin pool export`"
        );
    }
    Ok(())
}

pub fn export(options: &ExportOptions, format: Format) -> Result<()> {
    let guid = match &options.replica {
        Some(text) => text.parse::<ReplicaGuid>().context("--replica: 32 hex digits are needed")?,
        None => only_replica(&options.pool.data)?,
    };
    let snapshot = options
        .snapshot
        .as_deref()
        .map(|text| text.parse::<SnapshotId>().context("--snapshot: 32 hex digits are needed"))
        .transpose()?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&options.to).map_err(
        |error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => anyhow!(
                "{} exists already: name another file with --to, or remove it",
                options.to.display()
            ),
            _ => anyhow!("cannot create {} ({error}): mend --to", options.to.display()),
        },
    )?;
    let outcome = offline::export(open(&options.pool.data)?, guid, snapshot, |offset, bytes| {
        file.write_all_at(bytes, offset)
    });
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            // A half-made image must not be taken for a whole one.
            let _ = std::fs::remove_file(&options.to);
            return Err(error).context("export the volume");
        }
    };
    file.set_len(report.size_bytes).context("set the image's size")?;
    file.sync_all().context("sync the image")?;
    let bad = report.bad.len();
    output::print_one(
        format,
        &serde_json::json!({
            "size_bytes": report.size_bytes,
            "data_bytes": report.data_bytes,
            "bad_blocks": report.bad,
        }),
        || {
            format!(
                "{}: {} with {} of data",
                options.to.display(),
                show_size(report.size_bytes),
                show_size(report.data_bytes)
            )
        },
    )?;
    if bad > 0 {
        bail!("{bad} blocks have no good copy in this pool and are holes in the image");
    }
    Ok(())
}

fn only_replica(data: &Path) -> Result<ReplicaGuid> {
    let found = offline::inspect(open(data)?)?;
    match &found.replicas[..] {
        [one] => Ok(one.identity.guid),
        [] => bail!("the pool holds no replica"),
        many => bail!("the pool holds {} replicas: name one with --replica", many.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_core::Lsn;
    use quoin_store::offline::CheckReport;

    #[test]
    fn what_a_check_found_is_told_in_sentences_and_as_fields() {
        let sound = CheckReport { checked_bytes: 5 << 20, ..CheckReport::default() };
        let text = CheckView::of(&sound).text();
        assert!(text.contains("sound") && text.contains("5.0 MiB"), "{text}");
        let report = CheckReport {
            bad: vec![BadBlock::block(ReplicaGuid(7), 3, Lsn(9))],
            bad_headers: 2,
            damaged: vec![(ReplicaGuid(8), "an entry of the log")],
            ..sound
        };
        let view = CheckView::of(&report);
        let text = view.text();
        assert!(!text.contains("BadBlock") && !text.contains("Lsn"), "{text}");
        assert!(text.contains("4.0 KiB of its volume at byte 12288"), "{text}");
        assert!(
            text.contains("damaged: an entry of the log") && text.contains("2 headers"),
            "{text}"
        );
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(
            (&json["sound"], &json["bad"][0]["offsetBytes"]),
            (&false.into(), &12288.into())
        );
        assert_eq!(json["damaged"][0]["replica"], ReplicaGuid(8).to_string());
    }
}
