//! A readable line for each thing that happens, and a fingerprint of the whole run.

use quoin_types::EntryKind;
use quoin_types::message::ToReplica;

use crate::schedule::Instant;

pub struct Trace {
    print: bool,
    keep: bool,
    lines: Vec<(Instant, String)>,
    fingerprint: u64,
}

impl Trace {
    pub fn new(print: bool, keep: bool) -> Self {
        Self { print, keep, lines: Vec::new(), fingerprint: 0 }
    }

    pub fn is_on(&self) -> bool {
        self.print || self.keep
    }

    /// Returns the lines that were kept.
    pub fn lines(&self) -> &[(Instant, String)] {
        &self.lines
    }

    pub fn line(&mut self, now: Instant, text: impl FnOnce() -> String) {
        if !self.is_on() {
            return;
        }
        let text = text();
        if self.print {
            println!("{:>13.6} {text}", now as f64 / 1e9);
        }
        if self.keep {
            self.lines.push((now, text));
        }
    }

    /// Adds to the fingerprint: equal for equal runs.
    pub fn mix(&mut self, a: u64, b: u64) {
        let mixed = self.fingerprint.rotate_left(5) ^ a ^ b.rotate_left(32);
        self.fingerprint = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

/// One line for a message, short enough to read in a trace.
pub(crate) fn describe(message: &ToReplica) -> String {
    match message {
        ToReplica::Open { lease_ms, membership, .. } => {
            format!("Open, membership {}, lease {lease_ms} ms", membership.version)
        }
        ToReplica::Append { entries, stable, sync, .. } => {
            let which = match (entries.first(), entries.last()) {
                (Some(a), Some(b)) => format!("{}/{}..{}", b.epoch, a.lsn, b.lsn),
                _ => "nothing".into(),
            };
            let kinds: Vec<String> = entries
                .iter()
                .take(4)
                .map(|e| match &e.kind {
                    EntryKind::View(view) => {
                        let ids: Vec<u128> = view.in_sync.iter().map(|m| m.id.0 & 0xff).collect();
                        format!("View{ids:?}")
                    }
                    kind => format!("{kind:?} {}+{}", e.lba, e.blocks),
                })
                .collect();
            let sync = if *sync { ", sync" } else { "" };
            format!("Append {which} ({}), stable {stable}{sync}", kinds.join(", "))
        }
        ToReplica::IncrementFeed { slots, cursor, .. } => {
            format!("IncrementFeed {} slots to {cursor}", slots.len())
        }
        ToReplica::IncrementCommit { to, .. } => format!("IncrementCommit to {:?}", to.position),
        ToReplica::Repair { lba, version, .. } => format!("Repair {lba} at {version}"),
        other => format!("{other:?}"),
    }
}
