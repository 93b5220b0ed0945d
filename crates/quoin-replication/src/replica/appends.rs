//! Joining: consecutive `Append`s of one connection become one batch of the store.

use quoin_types::Lsn;
use quoin_types::entry::SharedEntry;
use quoin_types::message::{Ping, ToReplica};
use quoin_types::mutant;

/// Size from which no further entries are joined.
const BYTES_MAX: usize = 4 << 20;

/// The parts of one `Append`.
pub struct Append {
    pub entries: Vec<SharedEntry>,
    pub stable: Lsn,
    pub sync: bool,
    pub ping: Ping,
}

/// Consecutive `Append`s that are being joined.
///
/// Only an `Append` that continues the one before is joined to it. A primary steps back when a pool
/// has no room: it sends entries again, after later ones that were on their way. If the repeated
/// ones were joined to those, they would be dropped with them, and would not be sent again.
#[derive(Default)]
pub struct Appends {
    joined: Option<Append>,
    bytes: usize,
}

impl Appends {
    /// Adds an `Append`. Returns the joined one before it, if this one does not continue it or if
    /// it is large enough for one batch.
    #[must_use]
    pub fn add(&mut self, next: Append) -> Option<ToReplica> {
        let joins = self.bytes < BYTES_MAX && self.is_continued_by(&next);
        let before = if joins { None } else { self.take() };
        self.bytes += next.entries.iter().map(|entry| entry.weight()).sum::<usize>();
        match &mut self.joined {
            None => self.joined = Some(next),
            Some(joined) => {
                joined.entries.extend(next.entries);
                joined.stable = joined.stable.max(next.stable);
                joined.sync |= next.sync;
                joined.ping = joined.ping.max(next.ping);
            }
        }
        before
    }

    fn is_continued_by(&self, next: &Append) -> bool {
        let last = self.joined.as_ref().and_then(|joined| joined.entries.last());
        match (last, next.entries.first()) {
            (Some(last), Some(first)) => {
                first.lsn == last.lsn.next() || mutant::is("appends-joined-over-a-gap")
            }
            _ => true,
        }
    }

    pub fn take(&mut self) -> Option<ToReplica> {
        self.bytes = 0;
        let Append { entries, stable, sync, ping } = self.joined.take()?;
        Some(ToReplica::Append { entries, stable, sync, ping })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use quoin_types::entry::{Chain, Entry, EntryKind};
    use quoin_types::{Epoch, Position};
    use std::sync::Arc;

    fn append(lsns: std::ops::RangeInclusive<u64>, ping: u64) -> Append {
        let entry = |lsn| {
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let (kind, data) = (EntryKind::Trim, Bytes::new());
            Arc::new(Entry::after(Chain::default(), position, kind, 0, 1, data, false))
        };
        let entries = lsns.map(entry).collect();
        Append { entries, stable: Lsn(ping), sync: ping == 2, ping: Ping(ping) }
    }

    fn lsns(message: Option<ToReplica>) -> Option<Vec<u64>> {
        match message? {
            ToReplica::Append { entries, .. } => Some(entries.iter().map(|e| e.lsn.0).collect()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn appends_that_continue_each_other_are_joined_with_the_newest_stable_and_ping() {
        let mut appends = Appends::default();
        assert!(appends.take().is_none());
        for (range, ping) in [(5..=6, 1), (7..=7, 3), (8..=9, 2)] {
            assert!(appends.add(append(range, ping)).is_none());
        }
        let none = Append { entries: Vec::new(), stable: Lsn(0), sync: false, ping: Ping(9) };
        assert!(appends.add(none).is_none(), "one without entries leaves no gap");
        let Some(ToReplica::Append { entries, stable, sync, ping }) = appends.take() else {
            panic!("they are one")
        };
        assert_eq!(entries.iter().map(|e| e.lsn.0).collect::<Vec<_>>(), [5, 6, 7, 8, 9]);
        assert_eq!((stable, sync, ping), (Lsn(3), true, Ping(9)));
        assert!(appends.take().is_none());
    }

    #[test]
    fn an_append_behind_a_gap_begins_another_batch() {
        let mut appends = Appends::default();
        assert!(appends.add(append(5..=6, 1)).is_none());
        assert_eq!(lsns(appends.add(append(1..=4, 2))), Some(vec![5, 6]), "an offer of before");
        assert!(appends.add(append(5..=6, 3)).is_none());
        assert_eq!(lsns(appends.add(append(9..=9, 4))), Some(vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(lsns(appends.take()), Some(vec![9]));
    }

    #[test]
    fn no_append_is_joined_to_one_that_is_large_enough_for_a_batch() {
        let position = Position { epoch: Epoch(1), lsn: Lsn(2) };
        let data = Bytes::from(vec![1; BYTES_MAX]);
        let blocks = (BYTES_MAX / quoin_types::BLOCK_SIZE) as u32;
        let chain = Chain::default();
        let big = Entry::after(chain, position, EntryKind::Write, 0, blocks, data, false);
        let entries = vec![Arc::new(big)];
        let big = Append { entries, stable: Lsn(0), sync: false, ping: Ping(1) };
        let mut appends = Appends::default();
        assert!(appends.add(append(1..=1, 1)).is_none());
        assert!(appends.add(big).is_none());
        assert_eq!(lsns(appends.add(append(3..=3, 1))), Some(vec![1, 2]));
        assert!(appends.add(append(4..=4, 1)).is_none(), "the next batch is a small one");
        assert_eq!(lsns(appends.take()), Some(vec![3, 4]));
    }
}
