//! Blocks of a segment on their way out of it: which copies of them count, which of them some view
//! shows, and under which names they go on.

use std::collections::{BTreeMap, BTreeSet};

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, Lsn, mutant};

use crate::background::cleaner::CleanJob;
use crate::background::kept_views::KeptViews;
use crate::background::relocation::MovedBlock;
use crate::core::{BadBlock, Core, NodeIo};
use crate::disk::Disk;
use crate::format::checkpoint::SegmentState;
use crate::format::logical::{LogicalPlace, MovedGroup};
use crate::format::node::{BAD_PLACE, BlockAt, LEAF_BLOCKS, LOST_PLACE};
use crate::format::superblock::Superblock;
use crate::map::tree::{self, Change, Edit};
use crate::replica::{Replica, Source};

/// Divisor: of a unit of whose names no more than this part is left, and no more than one block,
/// the blocks get new names. So the table is a small part of what it is about, whatever clients do.
const RENAMED_PART: u32 = 64;

/// A block that was found in the segment.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub lba: u64,
    pub version: u64,
    pub place: u64,
    pub crc: u32,
    /// The name that leaves have for it, and its group.
    pub logical: u64,
    pub key: u64,
    pub number: u32,
    /// It was written here first.
    pub is_at_home: bool,
}

impl Candidate {
    /// The unit in which it was written first, by generation.
    fn home(&self, superblock: &Superblock) -> Option<(u16, u32)> {
        let name = LogicalPlace::decode(self.logical)?;
        Some((name.generation, superblock.unit_of(name.block)?))
    }
}

impl Replica {
    /// Which of these blocks some view shows.
    fn live_of<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        views: &KeptViews,
        candidates: &[Candidate],
    ) -> Result<Vec<Candidate>, StoreError> {
        let mut io = self.io(core);
        let (mut live, mut lost) = (Vec::new(), Vec::new());
        for candidate in candidates {
            if mutant::is("moved-block-overwrites-a-newer-one")
                || io.shows(views, candidate, &mut lost)?
            {
                live.push(*candidate);
            }
        }
        if lost.is_empty() {
            return Ok(live);
        }
        // Where the blocks lay is lost with a rotten node; one that cannot be read ends the job.
        lost.sort_unstable();
        lost.dedup();
        let change = Change::Renew { node: u64::MAX };
        let lost: Vec<Edit> = lost.into_iter().map(|lba| Edit { lba, blocks: 1, change }).collect();
        self.update_views(core, &lost, &[])?;
        let views = self.kept_views(core);
        self.live_of(core, &views, candidates)
    }

    /// Those of these blocks that count: others were moved on since. Where the table lost its entry,
    /// one copy of the group counts, as one name never meant two contents while it was taken.
    fn current_of<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        candidates: &[Candidate],
        job: &CleanJob,
    ) -> Result<Vec<Candidate>, StoreError> {
        let mut current = Vec::new();
        let mut copied: BTreeSet<u64> = job
            .moved_again
            .iter()
            .filter(|(_, group)| group.is_some())
            .map(|(key, _)| *key)
            .collect();
        // The groups follow each other, and each copy of one ascends.
        let is_same_copy = |a: &Candidate, b: &Candidate| {
            a.is_at_home == b.is_at_home && a.key == b.key && a.number < b.number
        };
        for copy in candidates.chunk_by(is_same_copy) {
            let first = &copy[0];
            if first.is_at_home {
                current.extend_from_slice(copy);
                continue;
            }
            let Some(group) = self.group_or_lost(core, first.key)? else { continue };
            if group.place == LOST_PLACE && copied.insert(first.key) {
                current.extend_from_slice(copy);
            } else {
                let counts = |c: &&Candidate| group.place_of(c.number) == Some(c.place);
                current.extend(copy.iter().filter(counts));
            }
        }
        Ok(current)
    }

    /// Copies what is live of these blocks, which are whole groups. `Ok(false)`: the disk refuses to
    /// read one of them, so none is moved. What cannot be read now is perhaps good, and a copy of
    /// nothing would take its place for ever.
    pub(super) fn move_blocks<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        views: &KeptViews,
        part: &[Candidate],
        job: &mut CleanJob,
    ) -> Result<bool, StoreError> {
        let current = self.current_of(core, part, job)?;
        let live = self.live_of(core, views, &current)?;
        let superblock = core.superblock;
        let is_renamed = |candidate: &Candidate| {
            let home = candidate.home(&superblock);
            home.is_some_and(|home| job.renamed.contains(&home))
                || mutant::is("moved-block-overwrites-a-newer-one")
        };
        let mut blocks = Vec::with_capacity(live.len());
        for candidate in &live {
            let Ok(bytes) = job.data.block(core, candidate.place) else { return Ok(false) };
            if quoin_types::crc32c(&bytes) != candidate.crc {
                // The block moves with its checksum, so it stays bad until a peer repairs it.
                self.note_bad_place(core, candidate.lba, candidate.place)?;
            }
            let Candidate { lba, version, crc, .. } = *candidate;
            let logical = if is_renamed(candidate) { 0 } else { candidate.logical };
            blocks.push(MovedBlock { lba, version, crc, bytes, logical });
        }
        let places = self.write_moved(core, &blocks, true)?;
        // A group of which nothing is left has no entry any more. A lost one stays: what it says of
        // other copies is not known.
        let mut last = None;
        for candidate in current.iter().filter(|candidate| !candidate.is_at_home) {
            let key = candidate.key;
            if last != Some(key) && self.io(core).group(key)?.is_some_and(|g| g.place != LOST_PLACE)
            {
                job.moved_again.entry(key).or_insert(None);
            }
            last = Some(key);
        }
        let mut renamed = Vec::new();
        for (candidate, place) in live.iter().zip(places) {
            if is_renamed(candidate) {
                renamed.push((*candidate, place));
                continue;
            }
            let groups = match candidate.is_at_home {
                true => &mut job.from_home,
                false => &mut job.moved_again,
            };
            let group = groups.entry(candidate.key).or_default();
            let group = group.get_or_insert(MovedGroup { blocks: 0, place });
            if mutant::is("moved-group-forgets-a-block") && group.blocks.count_ones() == 1 {
                continue;
            }
            if place != group.place + u64::from(group.blocks.count_ones())
                || group.blocks >> candidate.number != 0
            {
                return Err(StoreError::Damaged("a group of moved blocks"));
            }
            group.blocks |= 1 << candidate.number;
        }
        self.rename(core, renamed)?;
        Ok(true)
    }

    /// Gives blocks the names of the places where their copies lie, in every view.
    fn rename<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        mut renamed: Vec<(Candidate, u64)>,
    ) -> Result<(), StoreError> {
        renamed.sort_unstable_by_key(|(from, _)| (from.lba, from.version));
        let crcs: Vec<u32> = renamed.iter().map(|(from, _)| from.crc).collect();
        let superblock = core.superblock;
        let edits = renamed.iter().enumerate().map(|(i, (from, to))| {
            let unit = self.family.sub_live(&superblock, from.place, BLOCK_SIZE as u64);
            if let (Some(unit), Some(recount)) = (unit, &mut self.count.job) {
                recount.gone(unit, from.place, from.lba, from.version, BLOCK_SIZE as u64);
            }
            let to = self.family.logical(&superblock, *to);
            let change = match mutant::is("moved-block-overwrites-a-newer-one") {
                true => Change::Data { version: from.version, place: to, crc_at: i as u32 },
                false => Change::Move { from: from.logical, to },
            };
            Edit { lba: from.lba, blocks: 1, change }
        });
        let mut moves: Vec<Edit> = edits.collect();
        // Two versions of one block need two passes: edits of a pass do not overlap.
        while !moves.is_empty() {
            let (mut pass, mut later) = (Vec::<Edit>::new(), Vec::new());
            for edit in moves {
                match pass.last() {
                    Some(last) if last.lba == edit.lba => later.push(edit),
                    _ => pass.push(edit),
                }
            }
            self.update_views(core, &pass, &crcs)?;
            moves = later;
        }
        Ok(())
    }

    /// Notes a block as bad in a view that shows this place: the live one if it does.
    fn note_bad_place<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        lba: u64,
        place: u64,
    ) -> Result<(), StoreError> {
        let snapshots: Vec<_> =
            self.folded.snapshots.iter().map(|s| (Source::Root(s.root), Some(s.info.id))).collect();
        for (source, id) in std::iter::once((Source::Live, None)).chain(snapshots) {
            self.find(core, &source, lba, 1)?;
            if let Some(block) = core.found.first().filter(|block| block.place == place) {
                let version = Lsn(block.version);
                core.note_bad(BadBlock::block(self.identity.guid, lba, version).of(id));
                break;
            }
        }
        Ok(())
    }
}

impl<D: Disk> NodeIo<'_, D> {
    /// Whether this copy of a block may be the one that counts, as far as can be read.
    pub(super) fn is_current(&mut self, candidate: &Candidate) -> Result<bool, StoreError> {
        if candidate.is_at_home {
            return Ok(true);
        }
        Ok(self.group(candidate.key)?.is_some_and(|group| {
            group.place >= LOST_PLACE || group.place_of(candidate.number) == Some(candidate.place)
        }))
    }

    /// Whether some view shows a block. Leaves on the way that are damaged are noted by their LBAs.
    pub(super) fn shows(
        &mut self,
        views: &KeptViews,
        candidate: &Candidate,
        damaged: &mut Vec<u64>,
    ) -> Result<bool, StoreError> {
        let mut question = views.ask(candidate.version);
        while let Some(root) = question.next_view() {
            let mut found = [BlockAt::default()];
            tree::blocks(self, root, candidate.lba, &mut found)?;
            // A Revert shows the block under its own version.
            match found[0].place {
                place if place == candidate.logical => return Ok(true),
                BAD_PLACE => damaged.push(candidate.lba & !(LEAF_BLOCKS as u64 - 1)),
                LOST_PLACE => {}
                _ => question.decided(),
            }
        }
        Ok(false)
    }
}

/// Units of whose names so few blocks are left in a segment that they get new ones.
pub(super) fn scarce(
    superblock: &Superblock,
    segment: &SegmentState,
    blocks: &[Candidate],
) -> BTreeSet<(u16, u32)> {
    let least = (superblock.unit_blocks / RENAMED_PART).max(2) as usize;
    let least = if mutant::is("moved-blocks-renamed") { usize::MAX } else { least };
    let mut counts = BTreeMap::<(u16, u32), usize>::new();
    for home in blocks.iter().filter_map(|block| block.home(superblock)) {
        *counts.entry(home).or_default() += 1;
    }
    // Of what was written here first most is dead: the counter tells about how much is not.
    let live = (segment.live_bytes / BLOCK_SIZE as u64) as usize;
    if blocks.iter().all(|block| block.is_at_home) && live < least {
        return counts.into_keys().collect();
    }
    counts.into_iter().filter(|(_, count)| *count < least).map(|(home, _)| home).collect()
}
