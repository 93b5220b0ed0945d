//! The list of seeds that once found something: every test run repeats them, and a run of fresh
//! seeds adds the ones that it finds.
//!
//! A line is `STORE SWARM SEED: FINDING`; `#` begins a comment. The list lies in the source tree,
//! so that a finding is handed in together with its mend.

use std::fmt;
use std::io::Write;
use std::path::Path;

use crate::{Report, RunOptions, StoreKind, Swarm, run};

/// The list as it was when this program was built.
pub const LIST: &str = include_str!("../kept-seeds.txt");

/// One seed, with all that its run depends on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeptSeed {
    pub store: StoreKind,
    pub swarm: Swarm,
    pub seed: u64,
    /// The defect or the false alarm that the seed once found.
    pub finding: String,
}

#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    #[error("line {line} of the kept seeds is not `STORE SWARM SEED: FINDING`: {text}")]
    Line { line: usize, text: String },
    #[error("the kept seeds are written to {path}: {source}")]
    Write { path: String, source: std::io::Error },
}

impl KeptSeed {
    /// All seeds of a list.
    pub fn parse(list: &str) -> Result<Vec<Self>, KeptError> {
        let lines = list.lines().enumerate();
        let seeds = lines.filter(|(_, text)| !text.is_empty() && !text.starts_with('#'));
        seeds
            .map(|(index, text)| {
                Self::parse_line(text)
                    .ok_or_else(|| KeptError::Line { line: index + 1, text: text.to_owned() })
            })
            .collect()
    }

    fn parse_line(text: &str) -> Option<Self> {
        let (key, finding) = text.split_once(": ")?;
        let [store, swarm, seed] = key.split(' ').collect::<Vec<_>>()[..] else { return None };
        Some(Self {
            store: StoreKind::named(store)?,
            swarm: Swarm::named(swarm)?,
            seed: seed.parse().ok()?,
            finding: finding.to_owned(),
        })
    }

    /// Runs the seed again.
    pub fn run(&self) -> Report {
        let Self { store, swarm, seed, .. } = *self;
        run(RunOptions { seed, store, swarm, ..RunOptions::default() })
    }

    /// Adds the seed to the end of the list in `path`, which is made where it is not there.
    pub fn append_to(&self, path: &Path) -> Result<(), KeptError> {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        file.and_then(|mut file| writeln!(file, "{self}"))
            .map_err(|source| KeptError::Write { path: path.display().to_string(), source })
    }
}

impl fmt::Display for KeptSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let finding = self.finding.lines().next().unwrap_or_default();
        write!(f, "{} {} {}: {finding}", self.store.name(), self.swarm.name(), self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_survives_its_line() {
        let seed = KeptSeed {
            store: StoreKind::Real,
            swarm: Swarm::PowerCuts,
            seed: 4_294_967_295,
            finding: "CommitSurvives: entry 7: gone".into(),
        };
        assert_eq!(KeptSeed::parse(&format!("# comment\n\n{seed}\n")).unwrap(), [seed]);
    }

    #[test]
    fn a_line_of_another_form_is_refused_with_its_number() {
        let lines =
            ["real broad 7", "real broad x: y", "real nothing 7: y", "disk broad 7: y", "7: y"];
        for wrong in lines {
            let error = KeptSeed::parse(&format!("# comment\n{wrong}\n")).unwrap_err();
            assert!(error.to_string().contains("line 2 "), "{error}");
            assert!(error.to_string().contains(wrong), "{error}");
        }
    }
}
