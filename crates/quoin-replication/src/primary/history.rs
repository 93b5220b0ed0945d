//! The volume's history as its target knows it: its end, its epochs, and the tail of entries that a
//! replica may still need.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use quoin_types::client::{ClientTable, Judged, Part};
use quoin_types::entry::{Chain, Entry, EntryKind, SharedEntry, View};
use quoin_types::ids::{Epoch, Lsn, Position, SnapshotId};
use quoin_types::message::{
    EPOCH_TABLE_MAX, EpochEnd, IncrementEnd, OpenAck, SnapshotHead, SnapshotInfo,
};
use quoin_types::mutant;

#[derive(Default)]
pub(super) struct History {
    /// Entries without gaps, ending at `last`; each with the total weight of all entries up to it.
    entries: VecDeque<(u64, SharedEntry)>,
    weight: u64,
    pub last: Position,
    pub chain: Chain,
    /// No entry behind it changed the content. The history of before an open counts as a change.
    pub content: Lsn,
    epochs: Vec<EpochEnd>,
    pub snapshots: Vec<SnapshotInfo>,
    /// Heads of these snapshots, as far as the authority reported them.
    heads: BTreeMap<SnapshotId, SnapshotHead>,
    pub blocks: u64,
    pub last_view: Option<(Lsn, View)>,
    /// Clients that number their requests, as of the last entry.
    pub clients: ClientTable,
}

/// Heads of the snapshots that a replica reports, as far as it knows them.
fn heads_of(replica: &OpenAck) -> BTreeMap<SnapshotId, SnapshotHead> {
    let ids = replica.snapshots.iter().map(|s| s.id);
    let known = |(_, head): &(SnapshotId, SnapshotHead)| head.epoch > Epoch::ZERO;
    ids.zip(replica.heads.iter().copied()).filter(known).collect()
}

/// The same clients, of which nothing took effect, for the mutant.
fn begun_anew(clients: &ClientTable) -> ClientTable {
    let mut anew = ClientTable::default();
    for client in clients.clients() {
        anew.apply(Lsn::ZERO, &EntryKind::BeginClient { client }, None);
    }
    anew
}

impl History {
    /// An empty history, before an authority is known.
    pub fn empty(blocks: u64) -> Self {
        Self { blocks, ..Self::default() }
    }

    /// The history that the authority holds, without entries yet.
    pub fn of(authority: &OpenAck) -> Self {
        Self {
            entries: VecDeque::new(),
            weight: 0,
            last: authority.position,
            chain: authority.chain,
            content: authority.position.lsn,
            epochs: authority.epoch_table.clone(),
            snapshots: authority.snapshots.clone(),
            heads: heads_of(authority),
            blocks: authority.volume_blocks,
            last_view: authority.last_view.clone(),
            clients: match mutant::is("requests-forgotten-at-a-takeover") {
                true => begun_anew(&authority.clients),
                false => authority.clients.clone(),
            },
        }
    }

    /// First LSN whose entry is held; `last + 1` if none is.
    pub fn first(&self) -> Lsn {
        self.entries.front().map_or(self.last.lsn.next(), |(_, e)| e.lsn)
    }

    pub fn get(&self, lsn: Lsn) -> Option<&SharedEntry> {
        let index = lsn.0.checked_sub(self.first().0)?;
        self.entries.get(usize::try_from(index).ok()?).map(|(_, e)| e)
    }

    /// Entries after `after` that are held, in order.
    pub fn after(&self, after: Lsn) -> impl Iterator<Item = &SharedEntry> {
        let skip = (after.0 + 1).saturating_sub(self.first().0);
        self.entries.range((skip as usize).min(self.entries.len())..).map(|(_, e)| e)
    }

    /// Total weight of all entries ever appended here: it only grows.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Weight in bytes of the held entries after `after`.
    pub fn weight_after(&self, after: Lsn) -> usize {
        let before = match self.get(after) {
            Some(_) => self.entries[(after.0 - self.first().0) as usize].0,
            None if after >= self.last.lsn => self.weight,
            None => self.entries.front().map_or(self.weight, |(w, e)| w - e.weight() as u64),
        };
        (self.weight - before) as usize
    }

    /// Appends the next entry, of a kind that covers no blocks.
    pub fn append_bare(&mut self, epoch: Epoch, kind: EntryKind) -> SharedEntry {
        self.append(epoch, kind, 0, 0, Bytes::new(), false)
    }

    /// Appends the next entry. The caller holds the epoch.
    pub fn append(
        &mut self,
        epoch: Epoch,
        kind: EntryKind,
        lba: u64,
        blocks: u32,
        data: Bytes,
        fua: bool,
    ) -> SharedEntry {
        self.append_part(epoch, kind, lba, blocks, data, fua, None)
    }

    /// Appends the next entry, as a part of a client's request.
    #[allow(clippy::too_many_arguments)]
    pub fn append_part(
        &mut self,
        epoch: Epoch,
        kind: EntryKind,
        lba: u64,
        blocks: u32,
        data: Bytes,
        fua: bool,
        part: Option<Part>,
    ) -> SharedEntry {
        assert!(epoch >= self.last.epoch, "PromiseMonotone");
        if let Some(part) = &part {
            let is_repeat = matches!(self.clients.judge(&part.origin), Judged::Executed(_));
            assert!(!is_repeat || mutant::is("repeat-done-again"), "RepeatOnce");
        }
        let position = Position { epoch, lsn: self.last.lsn.next() };
        let entry = Entry::part_after(self.chain, position, kind, lba, blocks, data, fua, part);
        let entry = SharedEntry::new(entry);
        self.clients.apply(entry.lsn, &entry.kind, entry.part.as_ref());
        if entry.kind.changes_content() {
            self.content = entry.lsn;
        }
        match &entry.kind {
            EntryKind::View(view) => self.last_view = Some((entry.lsn, (**view).clone())),
            EntryKind::Resize { blocks } => self.blocks = *blocks,
            EntryKind::Snapshot { id, hidden } => {
                let (lsn, blocks) = (entry.lsn, self.blocks);
                self.snapshots.push(SnapshotInfo { id: *id, lsn, hidden: *hidden, blocks });
                self.heads.insert(*id, SnapshotHead { epoch, chain: entry.chain });
            }
            EntryKind::DeleteSnapshot { id } => {
                self.snapshots.retain(|s| s.id != *id);
                self.heads.remove(id);
            }
            // A Revert changes blocks only: the volume never shrinks.
            EntryKind::Revert { .. }
            | EntryKind::Write
            | EntryKind::Trim
            | EntryKind::Zero { .. }
            | EntryKind::BeginClient { .. }
            | EntryKind::EndClient { .. } => {}
        }
        self.last = position;
        self.chain = entry.chain;
        match self.epochs.last_mut() {
            Some(row) if row.epoch == epoch => {
                row.last = entry.lsn;
                row.chain = entry.chain;
            }
            _ => {
                if self.epochs.len() == EPOCH_TABLE_MAX {
                    self.epochs.remove(0);
                }
                let (first, last) = (entry.lsn, entry.lsn);
                self.epochs.push(EpochEnd { epoch, first, last, chain: entry.chain });
            }
        }
        self.weight += entry.weight() as u64;
        self.entries.push_back((self.weight, entry.clone()));
        entry
    }

    /// Accepts entries that the authority sent. They must continue the entries accepted before, and
    /// in the end reach `last`. The error names the part that does not fit.
    pub fn take_fetched(&mut self, entries: Vec<SharedEntry>) -> Result<(), &'static str> {
        for entry in entries {
            if entry.check().is_err() || !entry.data_is_good() || entry.lsn > self.last.lsn {
                return Err("an entry from the authority fails its checks");
            }
            if let Some((_, before)) = self.entries.back()
                && (entry.lsn != before.lsn.next()
                    || entry.chain != entry.chain_after(before.chain))
            {
                return Err("OneContent");
            }
            if entry.lsn == self.last.lsn && entry.chain != self.chain {
                return Err("OneContent");
            }
            self.weight += entry.weight() as u64;
            self.entries.push_back((self.weight, entry));
        }
        Ok(())
    }

    /// LSN up to which fetched entries reach; `None` before the first.
    pub fn fetched_to(&self) -> Option<Lsn> {
        self.entries.back().map(|(_, e)| e.lsn)
    }

    /// Drops entries ≤ `keep_after`.
    pub fn trim(&mut self, keep_after: Lsn) {
        while self.entries.front().is_some_and(|(_, e)| e.lsn <= keep_after) {
            self.entries.pop_front();
        }
    }

    /// Drops the oldest entries ≤ `floor` above this weight, but never the newest one.
    pub fn trim_to_weight(&mut self, weight_max: usize, floor: Lsn) {
        while self.entries.len() > 1
            && let Some((upto, oldest)) = self.entries.front()
            && oldest.lsn <= floor
            && self.weight - upto + oldest.weight() as u64 > weight_max as u64
        {
            self.entries.pop_front();
        }
    }

    pub fn drop_entries(&mut self) {
        self.entries.clear();
    }

    /// Returns true if an entry with this epoch and LSN is part of this history.
    pub fn holds(&self, position: Position) -> bool {
        position.lsn == Lsn::ZERO
            || self.epochs.iter().any(|row| {
                row.epoch == position.epoch && row.first <= position.lsn && position.lsn <= row.last
            })
    }

    /// Returns true if the table still reaches back to this epoch, so that `holds` can be trusted.
    pub fn knows(&self, epoch: Epoch) -> bool {
        self.epochs.len() < EPOCH_TABLE_MAX || self.epochs.first().is_some_and(|r| r.epoch <= epoch)
    }

    pub fn snapshot(&self, id: SnapshotId) -> Option<&SnapshotInfo> {
        self.snapshots.iter().find(|s| s.id == id)
    }

    /// Epoch and chain at a snapshot. The authority's report may lack them.
    pub fn head_of(&self, id: SnapshotId) -> Option<SnapshotHead> {
        self.heads.get(&id).copied()
    }

    /// Last LSN that a replica and this history have in common. Everything ≤ its stable is common,
    /// by StableSurvives; above it equal (epoch, LSN) means equal content (OneContent).
    pub fn common_prefix(&self, replica: &OpenAck) -> Result<Lsn, &'static str> {
        let mut common = Lsn::ZERO;
        for theirs in replica.epoch_table.iter().rev() {
            let Some(ours) = self.epochs.iter().find(|row| row.epoch == theirs.epoch) else {
                continue;
            };
            if ours.last == theirs.last && ours.chain != theirs.chain {
                return Err("OneContent");
            }
            common = ours.last.min(theirs.last);
            break;
        }
        if self.epochs.len() == EPOCH_TABLE_MAX || replica.epoch_table.len() == EPOCH_TABLE_MAX {
            // Older epochs were dropped from a table: the replica's stable is common in any case.
            common = common.max(replica.stable.min(self.last.lsn));
        }
        if common < replica.stable { Err("StableNeverCut") } else { Ok(common) }
    }

    /// The last entry here of the newest epoch that a replica has entries of too.
    pub fn newest_common_epoch(&self, replica: &OpenAck) -> Lsn {
        let theirs = |row: &&EpochEnd| replica.epoch_table.iter().any(|r| r.epoch == row.epoch);
        self.epochs.iter().rev().find(theirs).map_or(Lsn::ZERO, |row| row.last)
    }

    /// Returns true if this history may continue a replica that ends at `keep` with this chain. It
    /// may also if neither that end nor the entry after it is known any more.
    pub fn may_follow(&self, keep: Lsn, chain: Chain) -> bool {
        let known = if keep == Lsn::ZERO {
            Some(Chain::default())
        } else if keep == self.last.lsn {
            Some(self.chain)
        } else {
            self.epochs.iter().find(|row| row.last == keep).map(|row| row.chain)
        };
        let next = self.get(keep.next());
        known.is_none_or(|own| own == chain)
            && next.is_none_or(|entry| entry.chain == entry.chain_after(chain))
    }

    /// End of the entries of older epochs, before the epoch of the entry at `lsn`.
    pub fn before_epoch_of(&self, lsn: Lsn) -> Lsn {
        let row = self.epochs.iter().find(|row| row.first <= lsn && lsn <= row.last);
        row.map_or(Lsn::ZERO, |row| Lsn(row.first.0 - 1))
    }

    /// The state of a replica that has everything up to now.
    pub fn end(&self, snapshots: Vec<SnapshotInfo>) -> IncrementEnd {
        IncrementEnd {
            position: self.last,
            chain: self.chain,
            epoch_table: self.epochs.clone(),
            last_view: self.last_view.clone(),
            volume_blocks: self.blocks,
            snapshots,
            clients: self.clients.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::{BLOCK_SIZE, Entry};

    /// The report of an authority of three entries, and the entries.
    fn told() -> (OpenAck, Vec<Entry>) {
        let mut chain = Chain::default();
        let entries: Vec<Entry> = (1..=3)
            .map(|lsn| {
                let position = Position { epoch: Epoch(4), lsn: Lsn(lsn) };
                let data = Bytes::from(vec![lsn as u8; BLOCK_SIZE]);
                let entry = Entry::after(chain, position, EntryKind::Write, lsn, 1, data, false);
                chain = entry.chain;
                entry
            })
            .collect();
        let (epoch, last) = (Epoch(4), Lsn(3));
        let ack = OpenAck {
            position: Position { epoch, lsn: last },
            chain,
            epoch_table: vec![EpochEnd { epoch, first: Lsn(1), last, chain }],
            stable: Lsn(0),
            durable: last,
            base: Lsn(0),
            last_view: None,
            continuous: true,
            membership_version: 1,
            quorum: true,
            damaged: false,
            volume_blocks: 64,
            room: quoin_types::message::RoomGrant::UNBOUNDED,
            snapshots: Vec::new(),
            shadow: None,
            shadow_cut: None,
            heads: Vec::new(),
            clients: ClientTable::default(),
        };
        (ack, entries)
    }

    fn shared(entries: &[Entry]) -> Vec<SharedEntry> {
        entries.iter().cloned().map(SharedEntry::new).collect()
    }

    #[test]
    fn only_the_entries_that_the_authority_answered_with_are_taken_from_it() {
        let (ack, good) = told();
        let mut history = History::of(&ack);
        assert_eq!(history.take_fetched(shared(&good[..1])), Ok(()));
        assert_eq!(history.take_fetched(shared(&good[1..])), Ok(()));
        assert_eq!(history.fetched_to(), Some(Lsn(3)));
        assert_eq!(history.weight_after(Lsn(1)), 2 * good[0].weight());

        let with = |change: &dyn Fn(&mut Vec<Entry>)| {
            let mut entries = good.clone();
            change(&mut entries);
            History::of(&ack).take_fetched(shared(&entries)).is_err()
        };
        assert!(!with(&|_| ()));
        assert!(with(&|e| e[1].data = Bytes::from(vec![9; BLOCK_SIZE])), "other data");
        assert!(with(&|e| e[1].blocks = 0), "of no length");
        assert!(with(&|e| drop(e.remove(1))), "a gap");
        assert!(with(&|e| e[1].lba = 9), "of another history");
        let trim = |after: &Entry| {
            let position = Position { epoch: Epoch(4), lsn: after.lsn.next() };
            Entry::after(after.chain, position, EntryKind::Trim, 0, 1, Bytes::new(), false)
        };
        assert!(with(&|e| e[2] = trim(&e[1])), "of another end");
        assert!(with(&|e| e.push(trim(&e[2]))), "beyond its end");
    }

    #[test]
    fn a_full_table_of_epochs_answers_for_no_epoch_before_its_first() {
        let (ack, _) = told();
        assert!(History::of(&ack).knows(Epoch(1)), "nothing fell out of it yet");
        let row = |n: u64| EpochEnd {
            epoch: Epoch(10 + n),
            first: Lsn(n + 1),
            last: Lsn(n + 1),
            chain: Chain::default(),
        };
        let epoch_table = (0..EPOCH_TABLE_MAX as u64).map(row).collect();
        let full = History::of(&OpenAck { epoch_table, ..ack });
        let knows = [9, 10, 11].map(|epoch| full.knows(Epoch(epoch)));
        assert_eq!(knows, [false, true, true]);
    }

    #[test]
    fn the_content_changed_last_with_an_entry_that_changes_it_or_before_the_open() {
        let (ack, _) = told();
        let mut history = History::of(&ack);
        assert_eq!(history.content, Lsn(3), "what the entries before the open did is not known");
        let epoch = Epoch(5);
        let id = SnapshotId(7);
        let snapshot = EntryKind::Snapshot { id, hidden: false };
        for kind in [snapshot, EntryKind::Resize { blocks: 99 }, EntryKind::DeleteSnapshot { id }] {
            history.append_bare(epoch, kind);
            assert_eq!(history.content, Lsn(3));
        }
        let hole = |history: &mut History, kind| {
            history.append(epoch, kind, 0, 1, Bytes::new(), false).lsn
        };
        let data = Bytes::from(vec![1; BLOCK_SIZE]);
        assert_eq!(history.append(epoch, EntryKind::Write, 0, 1, data, false).lsn, Lsn(7));
        assert_eq!(history.content, Lsn(7));
        for kind in [EntryKind::Trim, EntryKind::Zero { no_hole: false }] {
            let lsn = hole(&mut history, kind);
            assert_eq!(history.content, lsn);
        }
        let lsn = history.append_bare(epoch, EntryKind::Revert { id }).lsn;
        assert_eq!(history.content, lsn);
    }

    #[test]
    fn before_anything_is_known_a_volume_is_as_large_as_its_record_says() {
        assert_eq!(History::empty(64).blocks, 64);
    }
}
