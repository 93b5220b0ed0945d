//! Clean-up: what is still needed of a segment is moved out of it, and the segment is free.
//!
//! Which blocks are needed is asked of the views that are kept (the live map, snapshots, pins,
//! a shadow), never of a counter: counters only choose the victim. Blocks keep the names that
//! leaves have for them, so no view changes: where they lie now is noted in the table of moved
//! blocks ([`crate::space::moved`]). Where a unit has next to no block left under its names, these
//! get new ones in all views, which go on sharing nodes. Nodes are moved by writing them anew.
//! Everything is done in steps of about a megabyte.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, mutant};

use crate::background::block_moves::{Candidate, scarce};
use crate::background::kept_views::{Breaks, KeptViews};
use crate::background::node_moves::{NodeMove, NodeMoves};
use crate::background::segment_data::SegmentData;
use crate::core::Core;
use crate::disk::Disk;
use crate::format::batch::{Batch, Stream, header_blocks};
use crate::format::checkpoint::SegmentState;
use crate::format::logical::{self, LogicalPlace, MovedGroup};
use crate::format::node::Root;
use crate::map::tree::{self, Edit, Memo};
use crate::replica::{Replica, may_lack};

/// Blocks looked at in one step.
const BLOCKS_A_STEP: usize = 256;
/// Look-ups of blocks in views in one step, where each block has to be looked for in many; a group
/// is looked for as a whole.
const LOOK_UPS_A_STEP: usize = 4096;
/// Groups that wait to be noted in the table of moved blocks.
const GROUPS_PENDING_MAX: usize = 64;

/// Where groups lie once their copies count.
type Groups = BTreeMap<u64, Option<MovedGroup>>;

/// A segment that is being emptied.
pub struct CleanJob {
    unit: u32,
    blocks: Vec<Candidate>,
    nodes: NodeMoves,
    done: usize,
    /// Units of whose names so little is left that it gets new ones.
    pub(super) renamed: BTreeSet<(u16, u32)>,
    /// Groups that were written here first. While the segment is there their names mean it, so they
    /// are noted all at once, in the step that gives the segment up.
    pub(super) from_home: Groups,
    /// Groups that were moved here before.
    pub(super) moved_again: Groups,
    pub(super) data: SegmentData,
}

impl CleanJob {
    /// Whether it made copies that the table of moved blocks does not have yet.
    pub fn has_copies(&self) -> bool {
        self.from_home.values().chain(self.moved_again.values()).any(Option::is_some)
    }

    /// The blocks of the next step. A group moves as a whole.
    fn next_part(&self, views: &KeptViews) -> Range<usize> {
        let most = (LOOK_UPS_A_STEP / views.asked_max()).clamp(1, BLOCKS_A_STEP);
        let mut end = (self.done + most).min(self.blocks.len());
        while let Some(next) = self.blocks.get(end)
            && end > self.done
            && next.key == self.blocks[end - 1].key
        {
            end += 1;
        }
        self.done..end
    }

    /// Something was written in place: what was read before may be older.
    pub fn read_again(&mut self) {
        self.data.read_again();
    }
}

impl Replica {
    /// Whether none of its segments may be emptied now.
    pub fn is_clean_blocked(&self) -> bool {
        self.maintenance.checkpoint.is_some() || self.is_prepared()
    }

    /// Segments that may be cleaned now, by a look at all: closed, and no part of the log that is
    /// kept. What [`crate::space::segment_table`] knows is compared with it.
    #[cfg(any(test, debug_assertions))]
    pub fn victims(&self) -> impl Iterator<Item = SegmentState> + '_ {
        let first_needed = self.log_start().index;
        let blocked = self.is_clean_blocked();
        self.family
            .segments
            .iter()
            .filter(move |s| !blocked && !self.family.open.contains(&Some(s.unit)))
            .filter(|s| !self.family.segments.is_aside(s.unit))
            .filter(move |s| {
                s.stream != Stream::Log
                    || s.last_index < first_needed
                    || mutant::is("cleaned-above-stable")
            })
    }

    /// Begins to empty a segment. `Ok(false)`: its headers cannot be read, so it stays.
    pub fn begin_clean<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        segment: SegmentState,
    ) -> Result<bool, StoreError> {
        self.merge_shadow(core)?;
        self.io(core).flush()?;
        let alone = self.shadow.as_ref().is_some_and(|s| s.owns_alone(segment.sequence));
        if alone && segment.stream != Stream::Nodes {
            // Its flip forgets the table of moved blocks.
            return Ok(false);
        }
        let superblock = core.superblock;
        let start = superblock.unit_start(segment.unit);
        // Such a log was written past the cache.
        let uncached = self.family.log_waits && segment.stream == Stream::Log;
        let range = start..start + u64::from(segment.used_blocks);
        let data = SegmentData::new(uncached.then_some(range));
        let (mut blocks, mut nodes) = (Vec::<Candidate>::new(), Vec::new());
        let groups = logical::Groups::of(&superblock);
        let generation = segment.generation;
        let complete = walk(core, &segment, self.family.guid_hash, |start, batch| {
            let mut place = start + u64::from(batch.header_blocks);
            for entry in batch.entries() {
                if segment.stream == Stream::Nodes {
                    let (place, newest) = (entry.epoch, entry.lsn);
                    let (base, level) = (entry.lba, entry.kind);
                    nodes.push(NodeMove { place, base, level, newest });
                    continue;
                }
                for (i, crc) in entry.crcs().enumerate() {
                    let (lba, version) = (entry.lba + i as u64, entry.lsn);
                    let kept = (segment.stream == Stream::Moved && entry.epoch != 0)
                        .then(|| LogicalPlace::decode(entry.epoch))
                        .flatten();
                    let name = kept.unwrap_or(LogicalPlace { generation, block: place });
                    if let Some((key, number)) = groups.key(name) {
                        blocks.push(Candidate {
                            lba,
                            version,
                            place,
                            crc,
                            logical: name.encode(),
                            key,
                            number,
                            is_at_home: kept.is_none(),
                        });
                    }
                    place += 1;
                }
            }
        })?;
        if complete {
            let nodes = NodeMoves::new(nodes);
            let renamed = scarce(&superblock, &segment, &blocks);
            let (from_home, moved_again) = Default::default();
            let (unit, done) = (segment.unit, 0);
            let job = CleanJob { unit, blocks, nodes, done, renamed, from_home, moved_again, data };
            self.maintenance.clean = Some(job);
        }
        Ok(complete)
    }

    /// Cleans on; true once the segment is empty and waits for the next commit to be free.
    pub fn step_clean<D: Disk>(&mut self, core: &mut Core<D>) -> Result<bool, StoreError> {
        let Some(mut job) = self.maintenance.clean.take() else { return Ok(true) };
        self.merge_shadow(core)?;
        if !job.blocks.is_empty() {
            let views = self.kept_views(core);
            let part = job.next_part(&views);
            job.done = part.end;
            let part = job.blocks[part].to_vec();
            if !self.move_blocks(core, &views, &part, &mut job)? {
                // The disk may give them another time, after the next commit: the segment stays.
                self.family.segments.set_aside(job.unit);
                self.maintenance.clean = Some(job);
                self.abandon_clean(core);
                return Ok(true);
            }
            job.data.step_is_done();
            if job.moved_again.len() >= GROUPS_PENDING_MAX {
                self.note_moved_again(core, &mut job)?;
            }
        }
        if job.done < job.blocks.len() || !self.step_nodes(core, &mut job.nodes)? {
            self.maintenance.clean = Some(job);
            return Ok(false);
        }
        self.note_moved_again(core, &mut job)?;
        self.note_moved(core, std::mem::take(&mut job.from_home).into_iter())?;
        #[cfg(debug_assertions)]
        self.check_no_node_is_left(core, job.unit)?;
        if let Some(segment) = self.family.segments.remove(job.unit) {
            self.maintenance.pending_free.push((job.unit, segment.units));
            if mutant::is("former-places-freed-before-the-table") {
                core.freed.add(0, job.unit, segment.units);
                self.maintenance.pending_free.pop();
                core.release(0);
            }
        }
        self.maintenance.dirty = true;
        Ok(true)
    }

    /// Compares what was found of the nodes with a look at all views, where these are small.
    #[cfg(debug_assertions)]
    fn check_no_node_is_left<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        unit: u32,
    ) -> Result<(), StoreError> {
        const FEW_BLOCKS: u64 = 1 << 17;
        let views = 2 + self.folded.snapshots.len() as u64;
        let segment = self.family.segments.next_from(unit).filter(|s| s.unit == unit);
        let Some(segment) = segment.filter(|s| s.stream == Stream::Nodes) else { return Ok(()) };
        if self.head.volume_blocks * views <= FEW_BLOCKS {
            let blocks = u64::from(segment.units) * u64::from(core.superblock.unit_blocks);
            let start = core.superblock.unit_start(unit);
            let bytes = start * BLOCK_SIZE as u64..(start + blocks) * BLOCK_SIZE as u64;
            assert!(self.has_no_node_in(core, &bytes)?, "a view has a node of a segment that goes");
        }
        Ok(())
    }

    /// Looks at what the next step of a clean-up reads: nodes first, then the blocks that it moves.
    pub fn look_ahead_of_moves<D: Disk>(&mut self, core: &mut Core<D>) -> Result<(), StoreError> {
        let Some(mut job) = self.maintenance.clean.take() else { return Ok(()) };
        let looked = match job.blocks.is_empty() {
            true => self.look_ahead_of_nodes(core, &mut job.nodes),
            false => self.look_ahead_of_blocks(core, &mut job),
        };
        self.maintenance.clean = Some(job);
        looked
    }

    fn look_ahead_of_blocks<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        job: &mut CleanJob,
    ) -> Result<(), StoreError> {
        let (views, mut lacking) = (self.kept_views(core), Ok(()));
        for candidate in &job.blocks[job.next_part(&views)] {
            let io = &mut self.io(core);
            let found = io.is_current(candidate).and_then(|is_current| match is_current {
                true => io.shows(&views, candidate, &mut Vec::new()),
                false => Ok(false),
            });
            match found {
                Ok(true) => {
                    let looked = job.data.look_ahead(core, candidate.place);
                    lacking = lacking.and(may_lack(looked)?);
                }
                Ok(false) => {}
                Err(error @ StoreError::Pending(_)) => lacking = Err(error),
                Err(error) => return Err(error),
            }
        }
        lacking
    }

    /// Notes groups whose blocks had been moved into the segment before: the table tells which copy
    /// counts, so the segment may keep others.
    fn note_moved_again<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        job: &mut CleanJob,
    ) -> Result<(), StoreError> {
        let groups = std::mem::take(&mut job.moved_again);
        let blocks = groups.values().flatten().map(|group| u64::from(group.blocks.count_ones()));
        let bytes = blocks.sum::<u64>() * BLOCK_SIZE as u64;
        self.note_moved(core, groups.into_iter())?;
        self.family.segments.sub_live(job.unit, bytes);
        self.maintenance.dirty = true;
        Ok(())
    }

    /// Gives up emptying a segment. Copies that were made of it and not noted count for nothing.
    pub fn abandon_clean<D: Disk>(&mut self, core: &Core<D>) {
        let Some(job) = self.maintenance.clean.take() else { return };
        for group in job.from_home.values().chain(job.moved_again.values()).flatten() {
            let bytes = u64::from(group.blocks.count_ones()) * BLOCK_SIZE as u64;
            let unit = self.family.sub_live(&core.superblock, group.place, bytes);
            if let (Some(unit), Some(recount)) = (unit, &mut self.count.job) {
                recount.counter_lowered(unit, group.place, bytes);
            }
        }
    }

    /// Every view that must survive.
    pub(super) fn kept_views<D: Disk>(&self, core: &Core<D>) -> KeptViews {
        if mutant::is("views-forgotten-by-clean-up") {
            return KeptViews::live_alone(self.folded.root);
        }
        let snapshots = self.folded.snapshots.iter().map(|s| (s.info.lsn.0, s.root));
        let mut snapshots: Vec<(u64, Root)> = snapshots.collect();
        snapshots.sort_unstable_by_key(|(newest, _)| *newest);
        let mut others: Vec<Root> = Vec::new();
        if !mutant::is("pinned-base-forgotten-by-clean-up") {
            // A flip may have come between.
            others.extend(self.pins.values().map(|pin| pin.root));
        }
        if !mutant::is("bases-forgotten-by-clean-up") {
            // Their snapshots may be gone.
            others.extend(core.bases.of(self.identity.guid).map(|(_, base)| base.root));
        }
        others.extend(self.shadow.iter().flat_map(|shadow| shadow.roots()));
        let none = Breaks::default();
        let breaks = match mutant::is("breaks-of-the-history-forgotten") {
            true => &none,
            false => &self.family.moved.breaks,
        };
        KeptViews::new(snapshots, self.folded.root, breaks, others)
    }

    fn views_mut(&mut self) -> Vec<&mut Root> {
        let mut views: Vec<&mut Root> =
            self.folded.snapshots.iter_mut().map(|s| &mut s.root).collect();
        views.extend(self.pins.values_mut().map(|p| &mut p.root));
        views.push(&mut self.folded.root);
        if let Some(shadow) = &mut self.shadow {
            views.extend(shadow.roots_mut());
        }
        views
    }

    /// Writes nodes anew, wherever they are shared.
    pub fn renew<D: Disk>(&mut self, core: &mut Core<D>, nodes: &[Edit]) -> Result<(), StoreError> {
        self.update_views(core, nodes, &[])?;
        self.renew_moved(core, nodes)?;
        self.renew_table(core, nodes)
    }

    /// Applies the edits to all views, or to none.
    pub(crate) fn update_views<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        edits: &[Edit],
        crcs: &[u32],
    ) -> Result<(), StoreError> {
        let mut memo = Memo::default();
        let guid = self.identity.guid;
        let mut old: Vec<Root> = self.views_mut().into_iter().map(|r| *r).collect();
        let own = old.len();
        old.extend(core.bases.of(guid).map(|(_, base)| base.root));
        let mut new = Vec::with_capacity(old.len());
        let mut io = self.io(core);
        // All views give the node up together, so none keeps it alive.
        io.kept_through = 0;
        for root in old {
            new.push(tree::update(&mut io, root, edits, crcs, Some(&mut memo))?);
        }
        let bases = new.split_off(own);
        self.replace_bases(core, bases.into_iter())?;
        for (root, new) in self.views_mut().into_iter().zip(new) {
            *root = new;
        }
        Ok(())
    }
}

/// Reads a segment's batches in order. False: one of its headers is bad.
pub fn walk<D: Disk>(
    core: &Core<D>,
    segment: &SegmentState,
    guid_hash: u64,
    mut each: impl FnMut(u64, &Batch<'_>),
) -> Result<bool, StoreError> {
    let start = core.superblock.unit_start(segment.unit);
    let mut at = 1;
    while at < segment.used_blocks {
        let Some(bytes) = read_header(core, start + u64::from(at), segment.used_blocks - at)?
        else {
            return Ok(false);
        };
        let Some(batch) = Batch::parse(&bytes) else { return Ok(false) };
        let header = batch.header;
        let own = (header.sequence, header.guid_hash, header.stream);
        if own != (segment.sequence, guid_hash, segment.stream) {
            return Ok(false);
        }
        each(start + u64::from(at), &batch);
        at = at.saturating_add(batch.blocks());
    }
    Ok(true)
}

/// The blocks of the header that starts at `block`, if one does within `room` blocks and can be
/// read.
pub fn read_header<D: Disk>(
    core: &Core<D>,
    block: u64,
    room: u32,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut header = None;
    readable(header_at(core, block, room).map(|found| header = found))?;
    Ok(header)
}

/// Returns the header as `read_header` does, but reports a read that the disk refuses.
pub fn header_at<D: Disk>(
    core: &Core<D>,
    block: u64,
    room: u32,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut bytes = vec![0; BLOCK_SIZE];
    core.read(block, &mut bytes)?;
    let Some(count) = header_blocks(&bytes).filter(|count| *count <= room as usize) else {
        return Ok(None);
    };
    if count > 1 {
        bytes.resize(count * BLOCK_SIZE, 0);
        core.read(block + 1, &mut bytes[BLOCK_SIZE..])?;
    }
    Ok(Some(bytes))
}

/// An unreadable sector is as good as a rotten one. Which error says that it is the sector and not
/// the way to it depends on how it was read: beside the page cache the medium's own is given.
pub fn readable(read: Result<(), StoreError>) -> Result<bool, StoreError> {
    const OF_THE_MEDIUM: [i32; 4] = [libc::EIO, libc::ENODATA, libc::EREMOTEIO, libc::EILSEQ];
    match read {
        Ok(()) => Ok(true),
        Err(StoreError::Io(fault)) if OF_THE_MEDIUM.contains(&fault.errno) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
    use quoin_types::message::ReadView;
    use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position};

    use crate::{Disk, Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

    /// A sector that is never read again had the pool try for ever, with a sync each time.
    #[test]
    fn a_segment_of_which_a_part_cannot_be_read_is_left_in_peace_and_counted_as_it_is() {
        let disk = MemoryDisk::new(64 << 20);
        let mut format = FormatOptions::new(PoolId(1));
        // Emptied in more than one step.
        format.unit_blocks = 2 * super::BLOCKS_A_STEP as u32;
        Pool::format(&disk, &format).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a fresh pool");
        let guid = ReplicaIdentity::default().guid;
        pool.create(ReplicaIdentity::default(), ReplicaMeta::default(), 4000).expect("room");

        let (mut chain, mut lsn) = (Chain(0), 0);
        let mut append = |pool: &mut Pool<MemoryDisk>, kind, lba, blocks: u32| {
            lsn += 1;
            let length = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
            let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
            let data = Bytes::from(vec![lsn as u8; length]);
            let entry = Arc::new(Entry::after(chain, position, kind, lba, blocks, data, false));
            chain = entry.chain;
            let mut replica = pool.replica(guid).expect("it");
            replica.append(&[entry]).expect("room");
            replica.set_stable(Lsn(lsn));
        };
        // Two segments of log. Of the first one 20 blocks are left at its beginning and 20 behind.
        for n in 0..10 {
            append(&mut pool, EntryKind::Write, n * 100, 100);
        }
        append(&mut pool, EntryKind::Trim, 20, 430);
        append(&mut pool, EntryKind::Trim, 470, 30);
        let replica = pool.replicas.get_mut(&guid).expect("it");
        replica.find(&mut pool.core, &crate::replica::Source::Live, 460, 1).expect("found");
        disk.break_block(pool.core.found[0].place);
        pool.settle().expect("folded and recorded");

        for _ in 0..50 {
            while pool.background_due() != Due::Idle {
                pool.background(1).expect("background work");
            }
            let Some(ticket) = pool.sync_wanted() else { break };
            let result = disk.sync();
            pool.sync_finished(ticket, result).expect("a sync");
        }
        assert_eq!((pool.background_due(), pool.sync_wanted()), (Due::Idle, None), "no rest");
        let live = pool.replica_stats(guid).expect("it").live_bytes / BLOCK_SIZE as u64;
        assert!((540..550).contains(&live), "{live} of 540 blocks and some nodes are live");

        let (used, good) = (pool.stats().used_bytes, Bytes::from(vec![5; BLOCK_SIZE]));
        let mut replica = pool.replica(guid).expect("it");
        let crc = quoin_types::crc32c(&good);
        assert_eq!(
            replica.repair(ReadView::Live, 460, Lsn(5), crc, &good),
            Ok(true),
            "from another replica"
        );
        append(&mut pool, EntryKind::Trim, 2000, 1);
        for _ in 0..4 {
            pool.settle().expect("recorded");
            while pool.background_due() != Due::Idle {
                pool.background(1).expect("background work");
            }
        }
        assert!(pool.stats().used_bytes < used, "it can be read, and is not emptied");
    }
}
