//! Parts that all replicas of a pool share: disk, free space, metadata ring, node cache,
//! tickets.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use quoin_replication::replica::store::{FetchTicket, IoFault, StoreError, SyncTicket};
use quoin_types::{BLOCK_SIZE, Lsn, ReplicaGuid, SnapshotId, mutant};

use crate::background::recount::{BlockOf, Recount};
use crate::clones::bases::Bases;
use crate::disk::Disk;
use crate::disk::fetch::{Fetches, Key, Looked, Stretch, believes_a_former_use};
use crate::format::batch::{BatchEntry, BatchHeader, HeaderWriter, Stream};
use crate::format::node::{BAD_PLACE, BlockAt, FANOUT, LEAF_BLOCKS, LOST_PLACE, Node, NodeRef};
use crate::format::record::Record;
use crate::format::superblock::{KEEPS_SPACE, Superblock};
use crate::log::memtable_tree::Memtable;
use crate::map::node_cache::Cache;
use crate::map::tree::Nodes;
use crate::metadata::mark::Mark;
use crate::metadata::ring::Ring;
use crate::metadata::state::DurableState;
use crate::metadata::tickets::Tickets;
use crate::space::freed::Freed;
use crate::space::logical::Logical;
use crate::space::segments::{Allocator, Claim, Family};
use crate::space::shares::Shares;

/// Bounds of a pool; plain numbers, chosen by the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolOptions {
    /// Memory for nodes of the maps.
    pub cache_bytes: u64,
    /// Log above the last checkpoints that makes the next one due; bounds the time to recover.
    pub checkpoint_bytes: u64,
    /// Log kept for replicas that lag, of each replica.
    pub log_keep_bytes: u64,
    /// Bytes appended to a segment after which the disk is told to write them out.
    pub write_out_bytes: u64,
    /// Nodes of a map that one step of background work looks at: each may be a read of the disk.
    pub step_nodes: usize,
    /// Segments that changed, of a replica, which a commit states in its record. With more it
    /// writes nodes of the table of segments.
    pub unrecorded_segments: usize,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            cache_bytes: 256 << 20,
            checkpoint_bytes: 256 << 20,
            log_keep_bytes: 64 << 20,
            write_out_bytes: 8 << 20,
            step_nodes: 64,
            unrecorded_segments: 128,
        }
    }
}

/// Block or map node that failed its checksum: to be fetched from a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BadBlock {
    pub replica: ReplicaGuid,
    pub lba: u64,
    /// 1: the bytes of one block, wanted in the same version. More: the map of this stretch.
    pub blocks: u32,
    pub version: Lsn,
    /// The snapshot that shows it; `None`: the live view.
    pub snapshot: Option<SnapshotId>,
}

impl BadBlock {
    pub fn block(replica: ReplicaGuid, lba: u64, version: Lsn) -> Self {
        BadBlock { replica, lba, blocks: 1, version, snapshot: None }
    }

    /// The stretch of the map, one leaf, that this block is in.
    pub fn stretch(replica: ReplicaGuid, lba: u64, newest: Lsn) -> Self {
        let lba = lba & !(LEAF_BLOCKS as u64 - 1);
        let blocks = LEAF_BLOCKS as u32;
        BadBlock { replica, lba, blocks, version: newest, snapshot: None }
    }

    /// The same in a view: that of a snapshot, or live.
    pub fn of(self, snapshot: Option<SnapshotId>) -> Self {
        BadBlock { snapshot, ..self }
    }
}

/// Most that clients leave free on the file system below a pool: for clean-up and map nodes, and
/// for the controller's records where those are on the same file system.
const SPARE_BELOW_BYTES: u64 = 128 << 20;
/// Claimed of each half of the metadata ring and its mirror at an open.
const RING_CLAIM_BYTES: u64 = 8 << 20;
/// Memory of a fold's memtable that is kept for the next one, at most.
const MEMTABLE_KEPT_BYTES: usize = 16 << 20;

pub struct Core<D> {
    pub disk: D,
    pub superblock: Superblock,
    pub options: PoolOptions,
    pub allocator: Allocator,
    pub ring: Ring,
    pub durable: DurableState,
    pub mark: Mark,
    pub cache: Cache,
    /// Snapshots that clones show.
    pub bases: Bases,
    /// Logical places of each replica's blocks. Clones look up those of others.
    pub logical: BTreeMap<ReplicaGuid, Logical>,
    /// Reads of the disk that nobody waits for on this thread.
    pub fetches: Fetches,
    /// Writes in place so far: what was read before one of them may be older.
    pub writes_in_place: u64,
    pub tickets: Tickets,
    /// Sequence number of the newest segment.
    pub sequence: u64,
    pub freed: Freed,
    pub faults: Faults,
    pub buffers: Buffers,
}

/// Refusals of the disk, and data found bad on it.
#[derive(Default)]
pub struct Faults {
    /// The last sync failed: nothing is written any more.
    pub failed: Option<IoFault>,
    pub bad: Vec<BadBlock>,
    /// Replicas that background work found damaged, and what.
    pub damaged: Vec<(ReplicaGuid, &'static str)>,
}

/// Memory that is kept from call to call, so that IO allocates little.
#[derive(Default)]
pub struct Buffers {
    pub header: Vec<u8>,
    pub found: Vec<BlockAt>,
    pub parts: Vec<IoSlice<'static>>,
    /// An empty memtable that the last fold is done with.
    pub memtable: Memtable,
}

/// The present call lacks what is fetched beside; its ticket is known at its end.
pub const LACKING: StoreError = StoreError::Pending(FetchTicket(0));

impl<D: Disk> Core<D> {
    pub fn check_usable(&self) -> Result<(), StoreError> {
        self.faults.failed.map_or(Ok(()), |fault| Err(StoreError::Io(fault)))
    }

    /// Appends to the metadata ring and applies the record to the durable state.
    pub fn record(&mut self, record: Record) -> Result<(), StoreError> {
        self.record_all([record])
    }

    /// Records several changes at once: after a crash all of them are there, or none.
    pub fn record_all<const N: usize>(&mut self, records: [Record; N]) -> Result<(), StoreError> {
        self.mark.change();
        self.append_records(records)
    }

    /// Appends records that need no further mark: for the record of the mark itself.
    pub fn append_records<const N: usize>(
        &mut self,
        records: [Record; N],
    ) -> Result<(), StoreError> {
        self.check_usable()?;
        let mut bytes = BytesMut::new();
        records.iter().for_each(|record| record.encode(&mut bytes));
        if self.ring.append(&self.disk, &bytes)? {
            records.into_iter().for_each(|record| self.durable.apply(record));
            if self.ring.is_restatement_due() {
                self.restate_ahead();
            }
            return Ok(());
        }
        let before = self.durable.clone();
        records.into_iter().for_each(|record| self.durable.apply(record));
        let written = self.restate();
        if written.is_err() {
            self.durable = before;
        }
        written
    }

    /// Begins to write the whole durable state anew. The records before are written whatever
    /// becomes of it; a disk that refuses it fails.
    fn restate_ahead(&mut self) {
        let (state, with) = (self.durable.encode(), self.tickets.request());
        self.disk_did(|core| core.ring.restate_ahead(&core.disk, &state, with));
    }

    /// Everything up to this ticket is on media.
    pub fn ring_synced(&mut self, ticket: SyncTicket) {
        self.disk_did(|core| core.ring.synced(&core.disk, ticket, || core.tickets.request()));
    }

    fn disk_did(&mut self, work: impl FnOnce(&mut Self) -> Result<(), StoreError>) {
        if let Err(StoreError::Io(fault)) = work(self) {
            self.faults.failed = Some(fault);
        }
    }

    /// Writes the whole durable state anew.
    pub fn restate(&mut self) -> Result<(), StoreError> {
        let state = self.durable.encode();
        let written = self.ring.restate(&self.disk, &state);
        if let Err(StoreError::Io(fault)) = written {
            self.faults.failed = Some(fault);
        }
        written
    }

    /// Writes blocks in place.
    pub fn write(&mut self, block: u64, parts: &[IoSlice<'_>]) -> Result<(), StoreError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        self.fetches.forget(block, bytes.div_ceil(BLOCK_SIZE) as u64);
        self.writes_in_place += 1;
        self.disk.write_at(block * BLOCK_SIZE as u64, parts).map_err(StoreError::Io)
    }

    /// These blocks are about to be written for the first time since their unit was taken into use: what
    /// was read of them before, or is being read, is not what they hold.
    pub fn will_append(&mut self, block: u64, blocks: u64) {
        if !believes_a_former_use() {
            self.fetches.forget(block, blocks);
        }
    }

    pub fn read(&self, block: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        self.disk.read_at(block * BLOCK_SIZE as u64, buffer).map_err(StoreError::Io)
    }

    /// Reads blocks. In a call that may wait ([`Fetches::begin`]), [`LACKING`] where the disk does
    /// not have them at hand: they are fetched beside, and the call is made again. It finds them
    /// until it lacks nothing. What was fetched and is not what the caller expects is fetched once more
    /// before the caller has it.
    pub fn read_beside(
        &mut self,
        block: u64,
        buffer: &mut [u8],
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        self.read_or_fetch(block, buffer, false, is_expected)
    }

    /// Reads blocks like `read_beside`, for a caller who keeps them: they are found in one call.
    pub fn take_beside(
        &mut self,
        block: u64,
        buffer: &mut [u8],
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        self.read_or_fetch(block, buffer, true, is_expected)
    }

    fn read_or_fetch(
        &mut self,
        block: u64,
        buffer: &mut [u8],
        is_kept: bool,
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<(), StoreError> {
        if !self.fetches.is_open() {
            return self.read(block, buffer);
        }
        let blocks = buffer.len().div_ceil(BLOCK_SIZE) as u32;
        let key = self.key_of(Stretch { first: block, blocks });
        match self.fetches.look(key, is_kept) {
            Looked::Arrived(bytes) => {
                let bytes = bytes.map_err(StoreError::Io)?;
                if !believes_a_former_use() && !is_expected(&bytes) && self.fetches.doubt(key) {
                    return Err(LACKING);
                }
                buffer.copy_from_slice(&bytes);
                Ok(())
            }
            Looked::Awaited => Err(LACKING),
            Looked::Unknown => {
                let read = self.disk.read_now(block * BLOCK_SIZE as u64, buffer);
                if read.map_err(StoreError::Io)? {
                    return Ok(());
                }
                self.fetches.want(key, false);
                Err(LACKING)
            }
        }
    }

    /// The name of what is read of these blocks in the present use of their unit.
    fn key_of(&self, stretch: Stretch) -> Key {
        let unit = self.superblock.unit_of(stretch.first).filter(|_| !believes_a_former_use());
        Key { stretch, use_number: unit.map_or(0, |unit| self.allocator.uses.number(unit)) }
    }

    /// Reads blocks that are not read again soon.
    pub fn read_once(&self, stretch: Stretch) -> Result<Bytes, StoreError> {
        let read = self.disk.read_once(stretch.first * BLOCK_SIZE as u64, stretch.bytes());
        read.map_err(StoreError::Io)
    }

    /// Reads blocks that are not read again soon, in a call that may wait. They are fetched beside
    /// whatever the disk has at hand, and the caller keeps them: they are found in one call.
    pub fn take_once(
        &mut self,
        stretch: Stretch,
        is_expected: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Bytes, StoreError> {
        let key = self.key_of(stretch);
        match self.fetches.look(key, true) {
            Looked::Arrived(bytes) => {
                let bytes = bytes.map_err(StoreError::Io)?;
                let is_doubted = !believes_a_former_use() && !is_expected(&bytes);
                if is_doubted && self.fetches.doubt(key) { Err(LACKING) } else { Ok(bytes) }
            }
            Looked::Awaited => Err(LACKING),
            Looked::Unknown => {
                self.fetches.want(key, true);
                Err(LACKING)
            }
        }
    }

    /// Reads blocks from the media, whatever the kernel has cached.
    pub fn read_media(&self, block: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        self.disk.read_media(block * BLOCK_SIZE as u64, buffer).map_err(StoreError::Io)
    }

    /// Whether the disk shows at least the superblock, which it has shown before: if not, it is the
    /// disk that fails and not a sector of it.
    pub fn check_readable(&self) -> Result<(), StoreError> {
        let mut bytes = vec![0; BLOCK_SIZE];
        self.read_media(0, &mut bytes)
            .or_else(|_| self.read_media(self.superblock.blocks - 1, &mut bytes))
    }

    /// Units to write to, whose space is there: the file system below may be full long before the
    /// pool is. Clients leave some of it to what must go on, here and elsewhere.
    /// The first one, how many, and whether they were written before, which may be preferred.
    pub fn allocate(
        &mut self,
        large: bool,
        from_reserve: bool,
        warm_first: bool,
    ) -> Option<(u32, u32, bool)> {
        let allocated = self.allocate_units(large, from_reserve, warm_first)?;
        let (unit, units, _) = allocated;
        // What was read there before belongs to another segment, and what is listed of it too.
        self.allocator.uses.begin(unit, units);
        let start = self.superblock.unit_start(unit);
        self.fetches.forget(start, u64::from(units) * u64::from(self.superblock.unit_blocks));
        Some(allocated)
    }

    fn allocate_units(
        &mut self,
        large: bool,
        from_reserve: bool,
        warm_first: bool,
    ) -> Option<(u32, u32, bool)> {
        if warm_first
            && !self.allocator.short_below
            && let Some((unit, units)) = self.allocator.allocate_warm_segment(large)
        {
            return Some((unit, units, true));
        }
        if self.allocator.short_below
            && (from_reserve || self.allocator.sure_units() > 0)
            && let Some(unit) = self.allocator.allocate_warm()
        {
            return Some((unit, 1, true));
        }
        let (unit, units, is_warm) = self.allocator.allocate(large)?;
        let spare = if from_reserve { 0 } else { self.spare_below() };
        if is_warm {
            return Some((unit, units, true));
        }
        let claimed = self.claim(unit, units, spare);
        self.look_below();
        if claimed {
            return Some((unit, units, false));
        }
        self.allocator.give(unit, units);
        (self.allocator.short_below, self.allocator.full_below) = (true, true);
        self.allocator.allocate_warm().map(|unit| (unit, 1, true))
    }

    /// Shares the room for what targets have sequenced among so many replicas.
    pub fn share_among(&mut self, replicas: usize) {
        let (units, unit_blocks) = (self.allocator.units(), self.superblock.unit_blocks);
        self.allocator.shares = Shares::among(replicas, units, unit_blocks);
    }

    /// Whether all space of the pool was taken when it was made.
    pub fn keeps_space(&self) -> bool {
        self.superblock.features.compat & KEEPS_SPACE != 0
    }

    fn claim(&self, unit: u32, units: u32, spare_bytes: u64) -> bool {
        if self.keeps_space() {
            return true;
        }
        let start = self.superblock.unit_start(unit) * BLOCK_SIZE as u64;
        let length = u64::from(units) * u64::from(self.superblock.unit_blocks) * BLOCK_SIZE as u64;
        self.disk.claim(start, length, spare_bytes)
    }

    /// Makes sure of room for the next records: they record what becomes free.
    pub fn claim_ring(&self) {
        if self.keeps_space() {
            return;
        }
        let half = u64::from(self.superblock.ring_blocks / 2);
        for start in self.superblock.rings().into_iter().flat_map(|ring| [ring, ring + half]) {
            let length = (half * BLOCK_SIZE as u64).min(RING_CLAIM_BYTES);
            // If there is no room now, there may be when the record is written.
            let _ = self.disk.claim(start * BLOCK_SIZE as u64, length, 0);
        }
    }

    /// Bytes that clients leave free on the file system below. Below twice that the pool is short.
    fn spare_below(&self) -> u64 {
        SPARE_BELOW_BYTES.min(self.disk.size() / 8)
    }

    /// Checks whether the file system below is full, or has room again.
    pub fn look_below(&mut self) {
        let spare = self.spare_below();
        let room = self.disk.room_below().filter(|_| !self.keeps_space());
        let Some(room) = room else {
            (self.allocator.short_below, self.allocator.full_below) = (false, false);
            return;
        };
        self.allocator.full_below = room < spare;
        // Hysteresis: leaves the short state only at three times the threshold.
        self.allocator.short_below = room < spare * if self.allocator.short_below { 3 } else { 2 };
    }

    /// Whether a node can be read from its media, whatever is cached.
    pub fn is_whole_on_media(&mut self, level: u8, node: &NodeRef) -> Result<bool, StoreError> {
        let block = BLOCK_SIZE as u64;
        let start = node.place / block * block;
        let end = node.place.saturating_add(node.length.into()).next_multiple_of(block);
        self.disk.forget_cached(start, end - start);
        let mut buffer = Vec::new();
        // Nothing keeps what is read here, so a call that is made again finds it again.
        let bytes = read_node(self, node, &mut buffer, false)?;
        Ok(bytes.and_then(|b| Node::decode_checked(level, node, b)).is_some())
    }

    /// Takes the memtable of a fold that is done, for the next one: so folds allocate nothing.
    pub fn keep_memtable(&mut self, mut memtable: Memtable) {
        memtable.clear();
        let bytes = memtable.bytes();
        if bytes <= MEMTABLE_KEPT_BYTES && bytes > self.buffers.memtable.bytes() {
            self.buffers.memtable = memtable;
        }
    }

    /// Forgets what is cached of the blocks that were found, so that the next read is the media's.
    pub fn forget_found(&self) {
        for run in self.buffers.found.chunk_by(|a, b| a.place.checked_add(1) == Some(b.place)) {
            if !matches!(run[0].place, 0 | BAD_PLACE | LOST_PLACE) {
                let (offset, length) = (run[0].place, run.len() as u64);
                let block = BLOCK_SIZE as u64;
                self.disk.forget_cached(offset * block, length * block);
            }
        }
    }

    pub fn note_bad(&mut self, bad: BadBlock) {
        const REMEMBERED: usize = 1024;
        if self.faults.bad.len() < REMEMBERED && !self.faults.bad.contains(&bad) {
            self.faults.bad.push(bad);
        }
    }

    /// The logical places of a replica.
    pub fn logical_of(&mut self, replica: quoin_types::ReplicaGuid) -> &mut Logical {
        let superblock = &self.superblock;
        self.logical.entry(replica).or_insert_with(|| Logical::new(superblock, None))
    }
}

/// Nodes that wait to be written as one batch.
#[derive(Default)]
pub struct NodeBatch {
    /// First block of the batch, its header's.
    start: u64,
    unit: u32,
    bytes: Vec<u8>,
    /// A node that was encoded behind the others and belongs to the next batch.
    next: Vec<u8>,
    /// (byte place, length, level, first LBA, newest version)
    nodes: Vec<(u64, u32, u8, u64, u64)>,
    /// Bytes of all nodes that were ever written by way of it.
    pub written_bytes: u64,
}

/// Nodes whose entries fit in a header of one block.
const NODES_PER_BATCH: usize = 96;
const NODE_BATCH_BYTES: usize = 256 << 10;

/// A tree of nodes of a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tree {
    /// A map: leaves name blocks of the volume.
    Map,
    /// The table of segments: leaves name no blocks.
    Segments,
    /// Where moved blocks lie: leaves name blocks that maps account for.
    Logical,
}

/// Blocks and nodes that other views keep when a map gives them up.
#[derive(Clone, Copy, Default, Debug)]
pub struct Kept {
    /// All up to this version.
    pub through: u64,
    /// All up to a version from an LBA on: what a view keeps that is leaving.
    pub leaving: Option<(u64, u64)>,
}

impl Kept {
    /// Everything is kept.
    pub const ALL: Kept = Kept { through: u64::MAX, leaving: None };

    fn has(&self, lba: u64, version: u64) -> bool {
        let is_leaving = |(through, from)| version <= through && lba >= from;
        version <= self.through || self.leaving.is_some_and(is_leaving)
    }
}

/// A replica's view of [`Nodes`].
pub struct NodeIo<'a, D> {
    pub core: &'a mut Core<D>,
    pub family: &'a mut Family,
    pub batch: &'a mut NodeBatch,
    /// The count that goes on beside an update of the map.
    pub recount: Option<&'a mut Recount>,
    /// Blocks that left the map are counted as dead unless a view keeps them.
    pub kept: Kept,
    /// Nodes that cannot be read are taken as lost: a peer's copy is at hand.
    pub gives_up: bool,
    pub tree: Tree,
}

impl<D: Disk> NodeIo<'_, D> {
    /// Writes the batch out. Without it nodes are held in memory only.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        if self.batch.nodes.is_empty() {
            return Ok(());
        }
        let core = &mut *self.core;
        core.check_usable()?;
        let segment = self
            .family
            .segments
            .busy_mut(self.batch.unit)
            .ok_or(StoreError::Damaged("the segment of new nodes is gone"))?;
        let blocks = self.batch.bytes.len().div_ceil(BLOCK_SIZE);
        let mut writer = HeaderWriter::new(&mut core.buffers.header);
        for (place, length, level, base, newest) in &self.batch.nodes {
            let entry = BatchEntry {
                epoch: *place,
                lsn: *newest,
                lba: *base,
                blocks: *length,
                kind: *level,
                ..BatchEntry::default()
            };
            writer.entry(&entry, std::iter::empty());
        }
        let check = writer.finish(&BatchHeader {
            stream: Stream::Nodes,
            sequence: segment.state.sequence,
            index: segment.next_index,
            previous: segment.previous,
            guid_hash: self.family.guid_hash,
            watermark: 0,
            starts: core.superblock.starts,
            data_blocks: blocks as u32,
            key: 0,
        });
        self.batch.bytes.resize(blocks * BLOCK_SIZE, 0);
        core.will_append(self.batch.start, 1 + blocks as u64);
        let parts = [IoSlice::new(&core.buffers.header), IoSlice::new(&self.batch.bytes)];
        core.disk.write_at(self.batch.start * BLOCK_SIZE as u64, &parts).map_err(StoreError::Io)?;
        segment.state.used_blocks += 1 + blocks as u32;
        segment.next_index += 1;
        segment.previous = check;
        segment.write_out(core);
        self.batch.nodes.clear();
        self.batch.bytes.clear();
        Ok(())
    }
}

impl<D: Disk> Nodes for NodeIo<'_, D> {
    fn load(&mut self, level: u8, node: &NodeRef) -> Result<Option<Arc<Node>>, StoreError> {
        if let Some(cached) = self.core.cache.get(node.place) {
            return Ok(Some(cached));
        }
        let pending_start = (self.batch.start + 1) * BLOCK_SIZE as u64;
        let in_batch = node.place.checked_sub(pending_start).map(|at| at as usize);
        let mut buffer = std::mem::take(&mut self.core.cache.buffer);
        let bytes = match in_batch.filter(|at| *at < self.batch.bytes.len()) {
            Some(at) => Ok(self.batch.bytes.get(at..at + node.length as usize)),
            None => read_node(self.core, node, &mut buffer, true),
        };
        let loaded = bytes.map(|bytes| {
            let bytes = bytes?;
            let mut node = *node;
            if mutant::is("node-checksum-not-checked") {
                node.crc = quoin_types::crc32c(bytes);
            }
            let spare = (level == 0).then(|| self.core.cache.spare_leaf());
            Node::decode_shared(level, &node, bytes, spare)
        });
        self.core.cache.buffer = buffer;
        let Some(loaded) = loaded? else { return Ok(None) };
        self.core.cache.insert(node.place, loaded.clone());
        Ok(Some(loaded))
    }

    fn write(&mut self, level: u8, base: u64, node: Arc<Node>) -> Result<NodeRef, StoreError> {
        // Encoded where it is written from; where it does not fit in there, it goes to the next
        // batch.
        let at = self.batch.bytes.len();
        node.encode(&mut self.batch.bytes);
        let end = self.batch.bytes.len();
        let unit_bytes = (self.core.superblock.unit_blocks as usize - 2) * BLOCK_SIZE;
        let limit = NODE_BATCH_BYTES.min(unit_bytes);
        let full = self.batch.nodes.len() == NODES_PER_BATCH || end > limit;
        let after = end.div_ceil(BLOCK_SIZE) as u32 + 1;
        let room = self.family.room(&self.core.superblock, Stream::Nodes);
        if full || (!self.batch.nodes.is_empty() && after > room) {
            self.batch.next.clear();
            self.batch.next.extend_from_slice(&self.batch.bytes[at..]);
            self.batch.bytes.truncate(at);
            self.flush()?;
            self.batch.bytes.extend_from_slice(&self.batch.next);
        }
        let length = end - at;
        if self.batch.nodes.is_empty() {
            let needed = 1 + length.div_ceil(BLOCK_SIZE) as u32;
            let segment = self.family.segment_for(self.core, Stream::Nodes, needed, Claim::Reserve);
            let state = match segment {
                Ok(segment) => segment.state,
                Err(error) => {
                    self.batch.bytes.clear();
                    return Err(error);
                }
            };
            self.batch.unit = state.unit;
            self.batch.start =
                self.core.superblock.unit_start(state.unit) + u64::from(state.used_blocks);
        }
        let at = self.batch.bytes.len() - length;
        let place = (self.batch.start + 1) * BLOCK_SIZE as u64 + at as u64;
        let (length, newest) = (length as u32, node.newest());
        let crc = quoin_types::crc32c(&self.batch.bytes[at..]);
        self.batch.nodes.push((place, length, level, base, newest));
        self.batch.written_bytes += u64::from(length);
        self.family.add_live(self.core, place / BLOCK_SIZE as u64, length.into());
        self.core.cache.insert(place, node);
        Ok(NodeRef { place, length, crc, newest })
    }

    fn spare_leaf(&mut self) -> Arc<Node> {
        self.core.cache.spare_leaf()
    }

    fn not_changed(&mut self, node: Arc<Node>) {
        self.core.cache.recycle(node);
    }

    fn damaged(&mut self, level: u8, base: u64, node: &NodeRef) -> Result<(), StoreError> {
        if self.tree == Tree::Segments {
            return Err(StoreError::Damaged("the table of segments"));
        }
        // For a high node only the first stretches: the others are found when these are mended.
        let stretches = match level {
            // Blocks of the volume under a lost leaf of logical places are found as they are read.
            _ if self.tree != Tree::Map => 0,
            0 => 1,
            _ => FANOUT as u64,
        };
        for lba in (0..stretches).map(|leaf| base + leaf * LEAF_BLOCKS as u64) {
            self.core.note_bad(BadBlock::stretch(self.family.guid, lba, Lsn(node.newest)));
        }
        // Rot does not pass, and what is known to be lost can be mended. A read error may pass:
        // nothing is given up for it unless a peer's copy is at hand.
        let mut is_unreadable = || -> Result<bool, StoreError> {
            Ok(read_node(self.core, node, &mut Vec::new(), true)?.is_none())
        };
        let unreadable = !self.gives_up && node.is_possible() && is_unreadable()?;
        if !unreadable {
            return Ok(());
        }
        Err(StoreError::Io(IoFault { operation: "read", offset: node.place, errno: EIO }))
    }

    fn replaced(&mut self, lba: u64, place: u64, version: u64) {
        if self.tree != Tree::Map || mutant::is("trim-frees-nothing") {
            return;
        }
        if !self.kept.has(lba, version) {
            let bytes = BLOCK_SIZE as u64;
            let held = self.family.sub_live(self.core, place, bytes);
            if let (Some((unit, block)), Some(recount)) = (held, &mut self.recount) {
                let block = block.map_or(BlockOf::Moved(place), BlockOf::At);
                recount.counter_lowered(unit, block, bytes);
                recount.gone(unit, block, lba, version, bytes);
            }
        }
    }

    fn node_replaced(&mut self, level: u8, base: u64, node: &NodeRef) {
        if self.tree != Tree::Map || !self.kept.has(base, node.newest) {
            let (block, bytes) = (node.place / BLOCK_SIZE as u64, node.length.into());
            let held = self.family.sub_live(self.core, block, bytes);
            if let (Some((unit, _)), Some(recount)) = (held, &mut self.recount) {
                let block = BlockOf::At(block);
                recount.counter_lowered(unit, block, bytes);
                // Nodes above the leaves are not counted.
                match self.tree {
                    _ if level > 0 => {}
                    Tree::Map => recount.gone(unit, block, base, node.newest, bytes),
                    tree => recount.gone_beside(tree, unit, block, base, bytes),
                }
            }
        }
    }
}

/// `errno` of a medium that cannot be read.
const EIO: i32 = 5;

/// The bytes of a node; `None` where its reference is nonsense or its blocks cannot be read.
fn read_node<'b, D: Disk>(
    core: &mut Core<D>,
    node: &NodeRef,
    buffer: &'b mut Vec<u8>,
    is_kept: bool,
) -> Result<Option<&'b [u8]>, StoreError> {
    let block = BLOCK_SIZE as u64;
    let length = node.length as usize;
    let Some(end) = node.place.checked_add(length as u64).filter(|e| *e <= core.disk.size()) else {
        return Ok(None);
    };
    if !node.is_possible() {
        return Ok(None);
    }
    let first = node.place / block;
    let start = (node.place % block) as usize;
    buffer.resize(((end.div_ceil(block) - first) * block) as usize, 0);
    let is_node = |bytes: &[u8]| {
        let bytes = bytes.get(start..start + length);
        bytes.is_some_and(|bytes| quoin_types::crc32c(bytes) == node.crc)
    };
    match core.read_or_fetch(first, buffer, is_kept, &is_node) {
        Ok(()) => {}
        Err(StoreError::Io(IoFault { errno: EIO, .. })) => return Ok(None),
        Err(error) => return Err(error),
    }
    Ok(buffer.get(start..start + length))
}
