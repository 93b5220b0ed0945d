//! State that a history's entries leave beside blocks: position, chain, epochs, Views, size.
//!
//! A [`Head`] is a value; the store keeps one for what is folded and one for what is applied,
//! so that cutting the log back is "start again from the folded one".

use quoin_replication::replica::store::StoreError;
use quoin_types::entry::SharedEntry;
use quoin_types::message::{EPOCH_TABLE_MAX, EpochEnd, IncrementEnd, SNAPSHOTS_MAX, SnapshotInfo};
use quoin_types::{Chain, ClientTable, Durability, EntryKind, Lsn, Part, Position, View, mutant};

/// The state of a history after one of its entries, blocks aside.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Head {
    pub position: Position,
    pub chain: Chain,
    pub last_view: Option<(Lsn, View)>,
    pub volume_blocks: u64,
    /// Oldest first, bounded by [`EPOCH_TABLE_MAX`].
    pub epoch_table: Vec<EpochEnd>,
    pub clients: ClientTable,
}

impl Head {
    /// Whether these entries may follow, where so many snapshots exist: the rules that hold for
    /// every store, before anything is written.
    pub fn check_append(
        &self,
        mut snapshots: usize,
        entries: &[SharedEntry],
    ) -> Result<(), StoreError> {
        let rule = |ok: bool, text| if ok { Ok(()) } else { Err(StoreError::Rule(text)) };
        let (mut lsn, mut chain) = (self.position.lsn, self.chain);
        let mut blocks = self.volume_blocks;
        for entry in entries {
            rule(entry.lsn == lsn.next(), "an entry leaves a gap in the log")?;
            rule(entry.chain_after(chain) == entry.chain, "an entry breaks the chain")?;
            rule(entry.check().is_ok(), "an entry is malformed")?;
            let end = entry.lba + u64::from(entry.blocks);
            rule(end <= blocks, "an entry lies outside the volume")?;
            match entry.kind {
                EntryKind::Resize { blocks: new } => blocks = new,
                EntryKind::Snapshot { .. } => snapshots += 1,
                _ => {}
            }
            rule(snapshots <= SNAPSHOTS_MAX, "too many snapshots")?;
            (lsn, chain) = (entry.lsn, entry.chain);
        }
        Ok(())
    }

    /// Moves on to the entry at `position`.
    pub fn apply(
        &mut self,
        position: Position,
        chain: Chain,
        kind: &EntryKind,
        part: Option<&Part>,
    ) {
        self.advance(position, chain);
        self.clients.apply(position.lsn, kind, part);
        match kind {
            EntryKind::Resize { blocks } => self.volume_blocks = *blocks,
            EntryKind::View(view) => self.last_view = Some((position.lsn, (**view).clone())),
            _ => {}
        }
    }

    /// [`Head::apply`] for kinds that change nothing but the position.
    pub fn advance(&mut self, position: Position, chain: Chain) {
        self.position = position;
        self.chain = chain;
        match self.epoch_table.last_mut() {
            Some(row) if row.epoch == position.epoch => {
                row.last = position.lsn;
                row.chain = chain;
            }
            _ => {
                if self.epoch_table.len() == EPOCH_TABLE_MAX {
                    self.epoch_table.remove(0);
                }
                self.epoch_table.push(EpochEnd {
                    epoch: position.epoch,
                    first: position.lsn,
                    last: position.lsn,
                    chain,
                });
            }
        }
    }

    /// Whether entries that follow are acknowledged only when they are durable.
    pub fn is_media(&self) -> bool {
        self.last_view.as_ref().is_some_and(|(_, view)| view.durability == Durability::Media)
    }

    pub fn from_end(end: &IncrementEnd) -> Self {
        let table = &end.epoch_table;
        Head {
            position: end.position,
            chain: end.chain,
            last_view: end.last_view.clone(),
            volume_blocks: end.volume_blocks,
            epoch_table: table[table.len().saturating_sub(EPOCH_TABLE_MAX)..].to_vec(),
            clients: match mutant::is("clients-left-out-of-an-increment") {
                true => ClientTable::default(),
                false => end.clients.clone(),
            },
        }
    }

    /// The end of an increment to this state; `snapshots` are those that exist now.
    pub fn increment_end(&self, snapshots: impl Iterator<Item = SnapshotInfo>) -> IncrementEnd {
        IncrementEnd {
            position: self.position,
            chain: self.chain,
            epoch_table: self.epoch_table.clone(),
            last_view: self.last_view.clone(),
            volume_blocks: self.volume_blocks,
            snapshots: snapshots.filter(|s| s.lsn <= self.position.lsn).collect(),
            clients: self.clients.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use quoin_types::{BLOCK_SIZE, Entry, Epoch, SnapshotId};

    #[test]
    fn the_epoch_table_keeps_the_newest_epochs_with_their_first_and_last_lsn() {
        let mut head = Head::default();
        for i in 1..=1000u64 {
            let position = Position { epoch: Epoch(1 + i / 3), lsn: Lsn(i) };
            head.advance(position, Chain(i));
        }
        assert_eq!(head.epoch_table.len(), EPOCH_TABLE_MAX);
        let last = head.epoch_table.last().expect("a full table");
        assert_eq!((last.epoch, last.first, last.last), (Epoch(334), Lsn(999), Lsn(1000)));
        assert!(head.epoch_table.windows(2).all(|w| w[0].last.next() == w[1].first));
    }

    const SNAPSHOT: EntryKind = EntryKind::Snapshot { id: SnapshotId(1), hidden: false };

    fn entry(after: Chain, lsn: u64, kind: EntryKind, lba: u64, blocks: u32) -> Entry {
        let bytes = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
        let position = Position { epoch: Epoch(3), lsn: Lsn(lsn) };
        Entry::after(after, position, kind, lba, blocks, Bytes::from(vec![1; bytes]), false)
    }

    fn refused(entries: &[Entry], snapshots: usize) -> String {
        let position = Position { epoch: Epoch(3), lsn: Lsn(9) };
        let head = Head { position, chain: Chain(77), volume_blocks: 64, ..Head::default() };
        let entries: Vec<_> = entries.iter().cloned().map(SharedEntry::new).collect();
        head.check_append(snapshots, &entries).map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn only_what_continues_a_history_and_lies_in_its_volume_may_follow() {
        let write = |lba, blocks| entry(Chain(77), 10, EntryKind::Write, lba, blocks);
        let first = write(60, 4);
        let next = |kind, lba| entry(first.chain, 11, kind, lba, u32::from(lba > 0));
        let grown = next(EntryKind::Resize { blocks: 65 }, 0);
        let behind = entry(grown.chain, 12, EntryKind::Trim, 64, 1);
        assert_eq!(refused(&[], SNAPSHOTS_MAX), "");
        assert_eq!(refused(&[first.clone(), next(EntryKind::Trim, 63)], 0), "");
        assert_eq!(refused(&[first.clone(), next(SNAPSHOT, 0)], SNAPSHOTS_MAX - 1), "");
        assert_eq!(refused(&[first.clone(), grown, behind], 0), "");

        let said = |entries: &[Entry], snapshots, what: &str| {
            let error = refused(entries, snapshots);
            assert!(error.contains(what), "{what}: {error}");
        };
        said(&[entry(Chain(77), 11, EntryKind::Write, 0, 1)], 0, "leaves a gap");
        said(&[entry(Chain(78), 10, EntryKind::Write, 0, 1)], 0, "breaks the chain");
        said(&[write(61, 4)], 0, "outside the volume");
        said(&[first.clone(), next(EntryKind::Trim, 64)], 0, "outside the volume");
        said(&[first.clone(), next(SNAPSHOT, 0)], SNAPSHOTS_MAX, "too many snapshots");
        said(&[entry(Chain(77), 10, EntryKind::Trim, 3, 0)], 0, "malformed");
    }
}
