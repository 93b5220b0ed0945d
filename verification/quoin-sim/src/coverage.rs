//! Which faults were injected in the middle of which steps of the protocol.

use std::fmt;

use quoin_replication::Step;

use crate::faults::FaultKind;

/// How often each kind of fault was injected while each step was under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage(Vec<u64>);

impl Default for Coverage {
    fn default() -> Self {
        Self(vec![0; FaultKind::ALL.len() * Step::ALL.len()])
    }
}

impl Coverage {
    fn at(kind: FaultKind, step: Step) -> usize {
        kind as usize * Step::ALL.len() + step as usize
    }

    pub fn add(&mut self, kind: FaultKind, step: Step) {
        self.0[Self::at(kind, step)] += 1;
    }

    pub fn of(&self, kind: FaultKind, step: Step) -> u64 {
        self.0[Self::at(kind, step)]
    }

    pub fn merge(&mut self, other: &Self) {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a += b;
        }
    }

    /// Pairs that were met, and all that there are.
    pub fn pairs(&self) -> (usize, usize) {
        (self.0.iter().filter(|n| **n > 0).count(), self.0.len())
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in Step::ALL {
            let hits = FaultKind::ALL.iter().map(|k| (k.name(), self.of(*k, *step)));
            let never: Vec<&str> = hits.clone().filter(|h| h.1 == 0).map(|h| h.0).collect();
            let kinds = FaultKind::ALL.len() - never.len();
            let faults: u64 = hits.map(|h| h.1).sum();
            writeln!(f, "{:<44} {faults:>8} faults of {kinds:>2} kinds", step.name())?;
            if !never.is_empty() {
                writeln!(f, "    never under: {}", never.join(", "))?;
            }
        }
        let (met, all) = self.pairs();
        writeln!(f, "pairs of fault and step met: {met} of {all}")
    }
}
