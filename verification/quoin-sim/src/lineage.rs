//! The volume's true history, as seen on the wire: which entry followed which.
//!
//! The simulator sees every entry that any target ever sent. From the chains it knows each
//! entry's only possible predecessor, so the history that an epoch starts IO on can be compared,
//! entry by entry, with all that was acknowledged, read and flushed before: losses are found even
//! where no client happens to read the lost block.

use std::collections::{BTreeMap, BTreeSet};

use quoin_types::entry::{Rule, SharedEntry};
use quoin_types::{BLOCK_SIZE, Chain, EntryKind, Epoch, Lsn, Position, SnapshotId};

use crate::content::{self, Tag, Tags, ZERO};
use crate::map::FixedMap;

/// An entry's number in the order in which entries were first seen.
pub type Seen = u32;

struct Record {
    entry: SharedEntry,
    parent: Option<Seen>,
}

/// Invariant that an entry breaks in the history.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken {
    pub invariant: &'static str,
    pub detail: String,
}

#[derive(Default)]
pub struct Lineage {
    records: Vec<Record>,
    by_position: FixedMap<(Epoch, Lsn), Seen>,
    by_lsn: FixedMap<Lsn, Vec<Seen>>,
    /// The entries that carried (a part of) a write's block, oldest first. Merges of sub-block
    /// writes carry older ones again, and so does a write that a later epoch appends anew.
    carried: FixedMap<(Tag, u64), Vec<Seen>>,
    /// Writes of which anything was ever sent.
    sent: BTreeSet<Tag>,
    /// Views by LSN.
    views: BTreeMap<Lsn, Vec<Seen>>,
    /// The history of each epoch so far.
    paths: BTreeMap<Epoch, Path>,
}

/// Epochs whose paths are kept: more than can serve or answer at once.
const PATHS_MAX: usize = 16;

/// One history from the volume's beginning: index LSN - 1.
#[derive(Debug)]
pub struct Path {
    entries: Vec<Seen>,
}

impl Path {
    fn contains(&self, lineage: &Lineage, seen: Seen) -> bool {
        let lsn = lineage.records[seen as usize].entry.lsn.0 as usize;
        self.entries.get(lsn.wrapping_sub(1)) == Some(&seen)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl Lineage {
    pub fn len(&self) -> usize {
        self.records.len()
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Learns of an entry on the wire. `run` is the run's number for the contents.
    pub fn observe(&mut self, run: u64, entry: &SharedEntry) -> Result<(), Broken> {
        let key = (entry.epoch, entry.lsn);
        if let Some(seen) = self.by_position.get(&key) {
            let known = &self.records[*seen as usize].entry;
            if known.chain == entry.chain {
                return Ok(());
            }
            return Err(Broken {
                invariant: "OneContent",
                detail: format!(
                    "epoch {} LSN {} was sent as {:?} and as {:?}",
                    entry.epoch, entry.lsn, known.kind, entry.kind
                ),
            });
        }
        let parent = if entry.lsn == Lsn(1) {
            (entry.chain_after(Chain::default()) == entry.chain).then_some(None)
        } else {
            let before = Lsn(entry.lsn.0.wrapping_sub(1));
            let candidates = self.by_lsn.get(&before).into_iter().flatten();
            candidates
                .rev()
                .find(|c| {
                    let candidate = &self.records[**c as usize].entry;
                    candidate.epoch <= entry.epoch
                        && entry.chain_after(candidate.chain) == entry.chain
                })
                .map(|c| Some(*c))
        };
        let Some(parent) = parent else {
            return Err(Broken {
                invariant: "PrefixAlways",
                detail: format!(
                    "epoch {} LSN {} ({:?}) follows no entry that was ever sent",
                    entry.epoch, entry.lsn, entry.kind
                ),
            });
        };
        self.check_joint(entry, parent)?;
        self.add(run, entry, parent)
    }

    /// Takes in what the history begins with, before anything was sent: of a volume that is made from
    /// another one.
    pub fn begin_with(&mut self, run: u64, entries: &[SharedEntry]) -> Result<(), Broken> {
        for (at, entry) in entries.iter().enumerate() {
            self.add(run, entry, (at as Seen).checked_sub(1))?;
        }
        Ok(())
    }

    fn add(&mut self, run: u64, entry: &SharedEntry, parent: Option<Seen>) -> Result<(), Broken> {
        let key = (entry.epoch, entry.lsn);
        let seen = self.records.len() as Seen;
        if entry.kind == EntryKind::Write {
            for (i, bytes) in entry.data.chunks(BLOCK_SIZE).enumerate() {
                let block = entry.lba + i as u64;
                let tags = content::tags_of_block(run, block, bytes).map_err(|wrong| Broken {
                    invariant: "SameBytesEverywhere",
                    detail: format!("entry {} carries wrong bytes: {wrong:?}", entry.lsn),
                })?;
                let mut before = 0;
                for tag in tags.into_iter().filter(|t| *t != 0) {
                    if tag != before {
                        let carriers = self.carried.entry((tag, block)).or_default();
                        if carriers.last() != Some(&seen) {
                            carriers.push(seen);
                            self.sent.insert(tag);
                        }
                        before = tag;
                    }
                }
            }
        }
        self.records.push(Record { entry: entry.clone(), parent });
        self.by_position.insert(key, seen);
        self.by_lsn.entry(entry.lsn).or_default().push(seen);
        if matches!(entry.kind, EntryKind::View(_)) {
            self.views.entry(entry.lsn).or_default().push(seen);
        }
        match self.paths.get_mut(&entry.epoch) {
            Some(path) if path.entries.last().copied() == parent => path.entries.push(seen),
            _ => {
                let path = self.path_to(seen);
                self.paths.insert(entry.epoch, path);
                if self.paths.len() > PATHS_MAX {
                    self.paths.pop_first();
                }
            }
        }
        Ok(())
    }

    /// Within an epoch one list of known replicas follows another only by way of a View under both.
    fn check_joint(&self, entry: &SharedEntry, parent: Option<Seen>) -> Result<(), Broken> {
        let EntryKind::View(view) = &entry.kind else { return Ok(()) };
        let mut at = parent;
        while let Some(seen) = at {
            let record = &self.records[seen as usize];
            if record.entry.epoch != entry.epoch {
                break;
            }
            at = record.parent;
            let EntryKind::View(before) = &record.entry.kind else { continue };
            let now = &view.rule.known;
            let is_from = |rule: &Rule| rule.known == *now;
            // A removal begins only while all that stay are in sync.
            let shrinks = |joint: &&Rule| joint.known.len() < now.len();
            if before.joint.is_none()
                && let Some(joint) = view.joint.as_ref().filter(shrinks)
                && let Some(away) = joint.known.iter().find(|m| !view.in_sync.contains(m))
            {
                return Err(Broken {
                    invariant: "NamedSurvivors",
                    detail: format!("{away:?} stays and is not in sync as others leave"),
                });
            }
            if std::iter::once(&before.rule).chain(&before.joint).any(is_from) {
                break;
            }
            return Err(Broken {
                invariant: "JointUntilKnown",
                detail: format!(
                    "the View at {}/{} counts {now:?}, the one before {:?}",
                    entry.epoch, entry.lsn, before.rule.known
                ),
            });
        }
        Ok(())
    }

    pub fn was_sent(&self, tag: Tag) -> bool {
        self.sent.contains(&tag)
    }

    /// The history of `epoch` as far as it was sent.
    pub fn path(&self, epoch: Epoch) -> Option<&Path> {
        self.paths.get(&epoch)
    }

    /// The history that ends in the entry at this position, if it was ever sent.
    pub fn path_at(&self, at: Position) -> Option<Path> {
        self.by_position.get(&(at.epoch, at.lsn)).map(|seen| self.path_to(*seen))
    }

    pub fn is_on(&self, path: &Path, seen: Seen) -> bool {
        path.contains(self, seen)
    }

    /// A View of the path after `low` and up to `high`.
    pub fn view_between(&self, path: &Path, low: Lsn, high: Lsn) -> Option<Lsn> {
        let within = self.views.range(low.next()..=high.max(low.next()));
        let on_path = |seen: &Seen| path.contains(self, *seen);
        within
            .filter(|(lsn, _)| **lsn <= high)
            .find(|(_, v)| v.iter().any(on_path))
            .map(|(l, _)| *l)
    }

    /// The first entry of the path that carries this write's part of this block.
    pub fn carrier_on(&self, path: &Path, tag: Tag, block: u64) -> Option<Seen> {
        let carriers = self.carried.get(&(tag, block))?;
        carriers.iter().copied().find(|seen| path.contains(self, *seen))
    }

    /// The first entry of this epoch on the path: its View.
    pub fn first_of(&self, path: &Path, epoch: Epoch) -> Option<Seen> {
        let of_it = |seen: &&Seen| self.records[**seen as usize].entry.epoch == epoch;
        path.entries.iter().rev().skip_while(|s| !of_it(s)).take_while(of_it).last().copied()
    }

    pub fn entry(&self, seen: Seen) -> &SharedEntry {
        &self.records[seen as usize].entry
    }

    fn path_to(&self, last: Seen) -> Path {
        let mut entries = Vec::new();
        let mut at = Some(last);
        while let Some(seen) = at {
            entries.push(seen);
            at = self.records[seen as usize].parent;
        }
        entries.reverse();
        Path { entries }
    }

    /// Returns the contents of each block that was ever written on `path` after `upto`, with the LSN
    /// of their entry.
    pub fn image(&self, run: u64, path: &Path, upto: Lsn) -> BTreeMap<u64, (Lsn, Tags)> {
        let mut image = BTreeMap::new();
        // Contents of each snapshot that a later Revert goes back to.
        let reverts = |entry: &&SharedEntry| match entry.kind {
            EntryKind::Revert { id } => Some(id),
            _ => None,
        };
        let wanted: BTreeSet<SnapshotId> =
            self.entries_of(path).filter_map(|entry| reverts(&entry)).collect();
        let mut kept: BTreeMap<SnapshotId, (Lsn, BTreeMap<_, _>)> = BTreeMap::new();
        for entry in self.entries_of(path).take_while(|entry| entry.lsn <= upto) {
            match &entry.kind {
                EntryKind::Snapshot { id, .. } if wanted.contains(id) => {
                    kept.insert(*id, (entry.lsn, image.clone()));
                }
                EntryKind::Revert { id } => {
                    let Some((since, then)) = kept.get(id) else { continue };
                    let changed = image.iter_mut().filter(|(_, (version, _))| version > since);
                    for (block, held) in changed {
                        *held = (entry.lsn, then.get(block).map_or(ZERO, |(_, tags)| *tags));
                    }
                }
                _ => {}
            }
            for i in 0..u64::from(entry.blocks) {
                let block = entry.lba + i;
                let tags = if entry.kind == EntryKind::Write {
                    let at = i as usize * BLOCK_SIZE;
                    let bytes = &entry.data[at..at + BLOCK_SIZE];
                    content::tags_of_block(run, block, bytes).unwrap_or(ZERO)
                } else {
                    ZERO
                };
                image.insert(block, (entry.lsn, tags));
            }
        }
        image
    }

    /// The snapshots of users that a history ends with, oldest first.
    pub fn snapshots(&self, path: &Path) -> Vec<(SnapshotId, Lsn)> {
        let mut there = Vec::new();
        for entry in self.entries_of(path) {
            match &entry.kind {
                EntryKind::Snapshot { id, hidden: false } => there.push((*id, entry.lsn)),
                EntryKind::DeleteSnapshot { id } => there.retain(|(other, _)| other != id),
                _ => {}
            }
        }
        there
    }

    /// Writes of which a history carries anything.
    pub fn writes_on(&self, run: u64, path: &Path) -> BTreeSet<Tag> {
        let mut writes = BTreeSet::new();
        for entry in self.entries_of(path).filter(|entry| entry.kind == EntryKind::Write) {
            for (i, bytes) in entry.data.chunks(BLOCK_SIZE).enumerate() {
                let tags = content::tags_of_block(run, entry.lba + i as u64, bytes);
                writes.extend(tags.unwrap_or(ZERO).into_iter().filter(|tag| *tag != 0));
            }
        }
        writes
    }

    fn entries_of<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = &'a SharedEntry> {
        path.entries.iter().map(|seen| &self.records[*seen as usize].entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use quoin_types::{Entry, Member, ReplicaGuid, ReplicaId, View};
    use std::sync::Arc;

    fn write(previous: Chain, epoch: u64, lsn: u64, tag: Tag) -> SharedEntry {
        let position = Position { epoch: Epoch(epoch), lsn: Lsn(lsn) };
        let data = content::make(1, tag, 8, 8);
        Arc::new(Entry::after(previous, position, EntryKind::Write, 1, 1, data, false))
    }

    #[test]
    fn a_history_that_leaves_out_an_entry_does_not_contain_it() {
        let mut lineage = Lineage::default();
        let a = write(Chain::default(), 1, 1, 1);
        let b = write(a.chain, 1, 2, 2);
        let other = write(a.chain, 2, 2, 3);
        for entry in [&a, &b, &other] {
            lineage.observe(1, entry).unwrap();
        }
        let path = lineage.path(Epoch(2)).unwrap();
        assert!(lineage.carrier_on(path, 1, 1).is_some());
        assert!(lineage.carrier_on(path, 2, 1).is_none());
        assert!(lineage.carrier_on(lineage.path(Epoch(1)).unwrap(), 2, 1).is_some());
        assert_eq!(lineage.image(1, path, Lsn(2))[&1], (Lsn(2), [3; 8]));
    }

    #[test]
    fn two_contents_at_one_position_break_one_content() {
        let mut lineage = Lineage::default();
        lineage.observe(1, &write(Chain::default(), 1, 1, 1)).unwrap();
        let broken = lineage.observe(1, &write(Chain::default(), 1, 1, 2)).unwrap_err();
        assert_eq!(broken.invariant, "OneContent");
    }

    #[test]
    fn an_entry_that_follows_nothing_breaks_prefix_always() {
        let mut lineage = Lineage::default();
        lineage.observe(1, &write(Chain::default(), 1, 1, 1)).unwrap();
        let broken = lineage.observe(1, &write(Chain(77), 1, 2, 2)).unwrap_err();
        assert_eq!(broken.invariant, "PrefixAlways");
    }

    #[test]
    fn a_view_under_an_exchanged_list_without_one_under_both_breaks_joint_until_known() {
        let member = |n: u128| Member { id: ReplicaId(n % 10), guid: ReplicaGuid(n) };
        let rule = |known: [u128; 2]| Rule { known: known.map(member).into(), ..Rule::default() };
        let view = |previous: Chain, lsn, now: Rule, joint: Option<Rule>| {
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let kind = EntryKind::View(Box::new(View { rule: now, joint, ..View::default() }));
            Arc::new(Entry::after(previous, position, kind, 0, 0, Bytes::new(), false))
        };
        let (old, new) = (rule([1, 2]), rule([1, 12]));
        let mut lineage = Lineage::default();
        let first = view(Chain::default(), 1, old.clone(), None);
        let joint = view(first.chain, 2, old.clone(), Some(new.clone()));
        let adopted = view(joint.chain, 3, new.clone(), None);
        for entry in [&first, &joint, &adopted] {
            lineage.observe(1, entry).unwrap();
        }
        let broken = lineage.observe(1, &view(adopted.chain, 4, old, None)).unwrap_err();
        assert_eq!(broken.invariant, "JointUntilKnown");
    }

    #[test]
    fn damaged_bytes_in_an_entry_are_seen() {
        let mut lineage = Lineage::default();
        let mut entry = (*write(Chain::default(), 1, 1, 1)).clone();
        entry.data = Bytes::from(vec![7; 4096]);
        entry.crcs = entry.data.chunks(4096).map(quoin_types::crc32c).collect();
        entry.chain = entry.chain_after(Chain::default());
        let broken = lineage.observe(1, &Arc::new(entry)).unwrap_err();
        assert_eq!(broken.invariant, "SameBytesEverywhere");
    }
}
