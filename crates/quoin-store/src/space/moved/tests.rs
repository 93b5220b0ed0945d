use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaStore};
use quoin_types::message::{Content, ReadView};
use quoin_types::{BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, SnapshotId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::format::node::Node;
use crate::format::superblock::{MOVED_BLOCKS, Superblock};
use crate::map::tree::Nodes;
use crate::{Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};

const BLOCKS: u64 = 1200;

fn options() -> PoolOptions {
    PoolOptions {
        cache_bytes: 0,
        log_keep_bytes: 0,
        unrecorded_segments: 4,
        ..PoolOptions::default()
    }
}

fn open(disk: &MemoryDisk) -> Pool<MemoryDisk> {
    Pool::open(disk.clone(), options()).expect("a pool")
}

/// A replica, what was written last to each block of it, and of its snapshots.
struct Writer {
    pool: Pool<MemoryDisk>,
    chain: Chain,
    lsn: u64,
    last: Vec<u64>,
    snapshots: Vec<(SnapshotId, Vec<u64>)>,
}

impl Writer {
    fn new(pool_bytes: u64) -> Self {
        let disk = MemoryDisk::new(pool_bytes);
        let format = FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(1)) };
        Pool::format(&disk, &format).expect("a fit disk");
        let mut pool = open(&disk);
        let (identity, meta) = Default::default();
        pool.create(identity, meta, BLOCKS).expect("room");
        let last = vec![0; BLOCKS as usize];
        Writer { pool, chain: Chain(0), lsn: 0, last, snapshots: Vec::new() }
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) {
        self.lsn += 1;
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn) };
        let data = match kind {
            EntryKind::Write => vec![self.lsn as u8; blocks as usize * BLOCK_SIZE],
            _ => Vec::new(),
        };
        let written = &mut self.last[lba as usize..][..blocks as usize];
        match &kind {
            EntryKind::Write => written.fill(self.lsn),
            EntryKind::Trim => written.fill(0),
            EntryKind::Snapshot { id, .. } => self.snapshots.push((*id, self.last.clone())),
            EntryKind::DeleteSnapshot { id } => self.snapshots.retain(|(other, _)| other != id),
            EntryKind::Revert { id } => {
                let kept = self.snapshots.iter().find(|(other, _)| other == id);
                self.last = kept.expect("it is there").1.clone();
            }
            _ => {}
        }
        let entry = Entry::after(self.chain, position, kind, lba, blocks, Bytes::from(data), false);
        self.chain = entry.chain;
        let mut replica = self.pool.replica(Default::default()).expect("it");
        replica.append(&[Arc::new(entry)]).expect("room");
        replica.set_stable(Lsn(self.lsn));
    }

    fn snapshot(&mut self) {
        let id = SnapshotId(self.lsn.into());
        self.append(EntryKind::Snapshot { id, hidden: false }, 0, 0);
    }

    /// Writes every block, then some again with a snapshot in between.
    fn fill(&mut self) {
        for lba in (0..BLOCKS).step_by(8) {
            self.append(EntryKind::Write, lba, 8);
        }
        self.snapshot();
        for n in 0..200 {
            self.append(EntryKind::Write, n * 7 % BLOCKS, 1);
        }
        self.pool.settle().expect("recorded");
    }

    fn work(&mut self) {
        for _ in 0..3 {
            while self.pool.background_due() != Due::Idle {
                self.pool.background(4 << 20).expect("background work");
            }
            self.pool.settle().expect("recorded");
        }
    }

    fn parts(&mut self) -> (&mut Core<MemoryDisk>, &mut Replica) {
        let guid = ReplicaIdentity::default().guid;
        let Pool { core, replicas, .. } = &mut self.pool;
        (core, replicas.get_mut(&guid).expect("it"))
    }

    /// Empties one segment, without a record of it.
    fn empty(&mut self, segment: SegmentState) {
        self.pool.touch(ReplicaIdentity::default().guid);
        let (core, replica) = self.parts();
        assert_eq!(replica.begin_clean(core, segment), Ok(true), "its headers are whole");
        while !replica.step_clean(core).expect("a step") {}
    }

    fn victims(&mut self, stream: Stream) -> Vec<SegmentState> {
        let (_, replica) = self.parts();
        replica.victims().filter(|s| s.stream == stream).collect()
    }

    /// Blocks that cannot be read; none has other contents than were written to it.
    fn bad(&mut self) -> usize {
        let live = (ReadView::Live, self.last.clone());
        let snapshots = self.snapshots.iter();
        let views = snapshots.map(|(id, last)| (ReadView::Snapshot(*id), last.clone()));
        let views: Vec<_> = views.chain([live]).collect();
        let (mut bad, mut replica) = (0, self.pool.replica(Default::default()).expect("it"));
        for (view, last) in views {
            for (lba, lsn) in (0..).zip(last) {
                let mut slots = Vec::new();
                replica.read(view, lba, 1, true, &mut slots).expect("a read");
                match &slots[0].content {
                    Content::Bad => bad += 1,
                    Content::Hole => assert_eq!(lsn, 0, "block {lba} of {view:?}"),
                    Content::Data { data, .. } => {
                        // A Revert gives it a later version.
                        assert!(slots[0].version.0 >= lsn, "block {lba} of {view:?}");
                        assert!(data.iter().all(|byte| *byte == lsn as u8), "block {lba}");
                    }
                }
            }
        }
        bad
    }

    /// No name of a block that is at home has another meaning in the table.
    fn check_names(&mut self) {
        let (core, replica) = self.parts();
        let groups = Groups::of(&core.superblock);
        let segments: Vec<SegmentState> = replica.family.segments.iter().collect();
        let root = replica.family.moved.root;
        let mut io = replica.moved_io(core);
        for s in segments.iter().filter(|s| s.stream != Stream::Nodes) {
            for unit in s.unit..s.unit + s.units {
                let is_free = io.are_free(root, groups.keys(s.generation, unit));
                assert_eq!(is_free, Ok(true), "names of unit {unit} mean two places");
            }
        }
    }
}

fn roots(replica: &Replica) -> Vec<Root> {
    let snapshots = replica.folded.snapshots.iter().map(|s| s.root);
    snapshots.chain([replica.folded.root]).collect()
}

#[test]
fn blocks_that_move_again_and_again_change_no_view() {
    let mut writer = Writer::new(32 << 20);
    writer.fill();
    let before = roots(writer.parts().1);
    let mut emptied = 0;
    for round in 0..4 {
        let stream = if round == 0 { Stream::Log } else { Stream::Moved };
        for segment in writer.victims(stream) {
            writer.empty(segment);
            emptied += 1;
        }
        // Later a block may be the last one under the names of its unit, and gets a new one.
        assert!(round > 0 || before == roots(writer.parts().1), "a view changed");
        assert_eq!(writer.bad(), 0);
        writer.pool.settle().expect("recorded");
        let disk = writer.pool.disk().clone();
        disk.power_cut(|| false);
        writer.pool = open(&disk);
        assert_eq!(writer.bad(), 0, "after a start in round {round}");
        writer.check_names();
    }
    assert!(emptied > 100, "{emptied} segments");
    let image = writer.pool.disk().fork();
    assert_eq!(Superblock::read(&image).expect("a pool").features.incompat & MOVED_BLOCKS, 2);
    let report = crate::offline::check(image, |_| ()).expect("a check");
    assert!(report.is_sound(), "{report:?}");
}

/// Empties every segment that holds blocks, twice, and records that.
fn empty_all(writer: &mut Writer) {
    for stream in [Stream::Log, Stream::Moved, Stream::Moved] {
        for segment in writer.victims(stream) {
            writer.empty(segment);
        }
        writer.pool.settle().expect("recorded");
    }
}

#[test]
fn what_a_revert_brought_back_outlives_its_snapshot_while_a_later_one_does_not_show_it() {
    for starts in [false, true] {
        let mut writer = Writer::new(32 << 20);
        writer.fill();
        writer.snapshot();
        let (id, _) = writer.snapshots[0].clone();
        writer.append(EntryKind::Revert { id }, 0, 0);
        writer.append(EntryKind::DeleteSnapshot { id }, 0, 0);
        writer.pool.settle().expect("folded");
        if starts {
            // No block was moved yet, so no record says where the history breaks.
            writer.pool = open(&writer.pool.disk().clone());
        }
        empty_all(&mut writer);
        assert_eq!(writer.bad(), 0, "starts: {starts}");
        let moved = &writer.parts().1.family.moved;
        assert!(!moved.is_empty() && moved.breaks.lsns().len() == 1, "{:?}", moved.breaks);
        writer.pool = open(&writer.pool.disk().clone());
        empty_all(&mut writer);
        assert_eq!(writer.bad(), 0, "after a start");
        writer.append(EntryKind::Trim, 0, 1);
        let (id, _) = writer.snapshots[0].clone();
        writer.append(EntryKind::DeleteSnapshot { id }, 0, 0);
        writer.pool.settle().expect("folded");
        assert_eq!(writer.parts().1.family.moved.breaks.lsns(), [0; 0], "no view is before it");
    }
}

#[test]
fn a_stretch_that_was_mended_in_one_view_outlives_clean_up_though_others_have_it_elsewhere() {
    let mut writer = Writer::new(32 << 20);
    writer.fill();
    let disk = writer.pool.disk().clone();
    disk.power_cut(|| true);
    let mut peer = open(&disk.fork());
    let (core, replica) = writer.parts();
    let root = replica.folded.root;
    let path = tree::path(&mut replica.io(core), root, 0).expect("a path");
    let (_, _, leaf) = *path.iter().find(|(level, ..)| *level == 0).expect("a leaf");
    disk.rot(leaf.place + u64::from(leaf.length) / 2, 0x10);
    writer.pool = open(&disk);
    assert_eq!(writer.bad(), LEAF_BLOCKS, "the live map has a leaf of its own");
    let mut slots = Vec::new();
    let mut peer = peer.replica(Default::default()).expect("it");
    peer.read(ReadView::Live, 0, LEAF_BLOCKS as u32, true, &mut slots).expect("a read");
    let mut replica = writer.pool.replica(Default::default()).expect("it");
    assert_eq!(replica.mend(ReadView::Live, 0, &slots), Ok(true));
    assert_eq!(writer.bad(), 0);
    writer.pool.settle().expect("recorded");
    empty_all(&mut writer);
    assert_eq!(writer.bad(), 0);
}

#[test]
fn names_are_taken_until_all_of_their_blocks_are_dead_and_free_again_then() {
    let mut writer = Writer::new(12 << 20);
    writer.fill();
    let mut generations = std::collections::BTreeSet::new();
    for n in 0..6000 {
        // Every fourth block stays where clean-up puts it.
        let lba = n * 7919 % BLOCKS;
        if !lba.is_multiple_of(4) {
            writer.append(EntryKind::Write, lba, 1);
        }
        if n % 50 == 0 {
            writer.work();
            writer.check_names();
            let (_, replica) = writer.parts();
            generations.extend(replica.family.segments.iter().map(|s| s.generation));
        }
    }
    assert!(generations.len() > 1, "no unit had names that were taken");
    assert_eq!(writer.bad(), 0);
    assert!(writer.parts().1.family.moved.root.child != Child::EMPTY, "nothing was moved");
    let (id, _) = writer.snapshots[0].clone();
    writer.append(EntryKind::DeleteSnapshot { id }, 0, 0);
    writer.append(EntryKind::Trim, 0, BLOCKS as u32);
    (0..4).for_each(|_| writer.work());
    for stream in [Stream::Moved, Stream::Log] {
        for segment in writer.victims(stream) {
            writer.empty(segment);
        }
    }
    // The open segment alone may have copies still.
    let (core, replica) = writer.parts();
    replica.family.close(Stream::Moved);
    let rest: Vec<_> = replica.victims().filter(|s| s.stream == Stream::Moved).collect();
    for segment in rest {
        assert_eq!(replica.begin_clean(core, segment), Ok(true));
        while !replica.step_clean(core).expect("a step") {}
    }
    let mut at = 0;
    while let Some(part) = replica.next_of_moved(core, at).expect("a walk") {
        let Part::Leaf { node, .. } = part else { panic!("{part:?}") };
        let leaf = replica.moved_io(core).load(0, &node).expect("a read").expect("a whole node");
        let Node::Leaf(leaf) = &*leaf else { panic!("a leaf") };
        assert!(leaf.blocks.iter().all(|entry| entry.place == 0), "an entry of nothing");
        at = part.range().1;
    }
}

#[test]
fn a_rotten_node_of_the_table_shows_no_wrong_block_and_its_entries_are_made_again() {
    let mut writer = Writer::new(32 << 20);
    writer.fill();
    for _ in 0..2 {
        for stream in [Stream::Log, Stream::Moved] {
            for segment in writer.victims(stream) {
                writer.empty(segment);
            }
        }
    }
    writer.pool.settle().expect("recorded");
    let disk = writer.pool.disk().clone();
    disk.power_cut(|| true);
    let (core, replica) = writer.parts();
    let (root, mut io) = (replica.family.moved.root, replica.moved_io(core));
    let nodes = tree::path(&mut io, root, 0).expect("a path");
    assert!(!nodes.is_empty());
    for (level, _, node) in nodes {
        let image = disk.fork();
        image.rot(node.place + u64::from(node.length) / 2, 0x10);
        writer.pool = open(&image);
        let bad = writer.bad();
        assert!(bad > 0, "the node of level {level} is not needed");
        let report = crate::offline::check(image.fork(), |_| ()).expect("a check");
        assert!(!report.is_sound(), "level {level}");
        // Copies say under which names they were moved.
        for segment in writer.victims(Stream::Moved) {
            writer.empty(segment);
        }
        writer.pool.settle().expect("recorded");
        let left = writer.bad();
        assert!(left < bad / 4, "{left} of {bad} are bad still, level {level}");
        writer.pool = open(&image);
        assert_eq!(writer.bad(), left, "after a start");
    }
}

/// Keys and entries of the table.
fn entries(writer: &mut Writer) -> Vec<(u64, MovedGroup)> {
    let (core, replica) = writer.parts();
    let (mut at, mut found) = (0, Vec::new());
    while let Some(part) = replica.next_of_moved(core, at).expect("a walk") {
        let mut entries = [BlockAt::default(); LEAF_BLOCKS];
        let (root, (start, end)) = (replica.family.moved.root, part.range());
        tree::blocks(&mut replica.moved_io(core), root, start, &mut entries).expect("a read");
        found.extend((start..).zip(entries).filter_map(|(k, e)| Some((k, MovedGroup::of(&e)?))));
        at = end;
    }
    found
}

/// Its checksums are right: somebody made it so, or a defect did.
#[test]
fn a_table_that_says_nonsense_shows_no_wrong_block_and_makes_nothing_panic() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for round in 0..12 {
        let mut writer = Writer::new(32 << 20);
        writer.fill();
        empty_all(&mut writer);
        let known = entries(&mut writer);
        assert!(known.len() > 20, "{} groups were moved", known.len());
        let mut groups = std::collections::BTreeMap::new();
        for (key, group) in &known {
            let place = match rng.random_range(0..6) {
                0 => rng.random(),
                1 => rng.random_range(0..9000),
                2 => LOST_PLACE - rng.random_range(0..70),
                3 => known[rng.random_range(0..known.len())].1.place,
                _ => group.place,
            };
            let blocks = if rng.random_bool(0.5) { rng.random() } else { group.blocks };
            let key = if rng.random_bool(0.8) { *key } else { key + rng.random_range(0..99999) };
            groups.insert(key, Some(MovedGroup { blocks, place: place.max(1) }));
        }
        let (core, replica) = writer.parts();
        replica.note_moved(core, groups.into_iter()).expect("noted");
        replica.maintenance.dirty = true;
        writer.pool.touch(ReplicaIdentity::default().guid);
        writer.pool.settle().expect("recorded");
        for starts in 0..2 {
            assert!(writer.bad() > 0, "round {round}");
            for stream in [Stream::Log, Stream::Moved] {
                for segment in writer.victims(stream) {
                    let (core, replica) = writer.parts();
                    let begun = replica.begin_clean(core, segment);
                    while begun == Ok(true) && replica.step_clean(core) == Ok(false) {}
                }
            }
            writer.pool.touch(ReplicaIdentity::default().guid);
            writer.pool.settle().expect("recorded");
            writer.pool = open(&writer.pool.disk().clone());
            let report = crate::offline::check(writer.pool.disk().fork(), |_| ());
            assert!(!report.expect("a check").is_sound(), "{starts} starts, round {round}");
        }
        for n in 0..300 {
            writer.append(EntryKind::Write, n * 31 % BLOCKS, 1);
        }
        writer.work();
        writer.bad();
    }
}

/// Counters of the segments that hold blocks.
fn counters(replica: &Replica) -> Vec<(u32, u64)> {
    let segments = replica.family.segments.iter();
    let of_blocks = segments.filter(|s| s.stream != Stream::Nodes);
    of_blocks.map(|s| (s.unit, s.live_bytes)).collect()
}

#[test]
fn what_goes_with_a_deleted_snapshot_is_taken_off_the_counters_as_a_count_of_all_would() {
    let mut writer = Writer::new(32 << 20);
    writer.fill();
    for n in 0..900u64 {
        let lba = n * 31 % BLOCKS;
        match n % 40 {
            7 => writer.append(EntryKind::Trim, lba.min(BLOCKS - 30), 30),
            _ => writer.append(EntryKind::Write, lba.min(BLOCKS - 2), 2),
        }
        if n % 60 == 0 {
            writer.snapshot();
        }
        if n % 110 == 80 {
            // One snapshot twice: the same blocks get other versions.
            let (id, _) = writer.snapshots[writer.snapshots.len() / 2];
            writer.append(EntryKind::Revert { id }, 0, 0);
            writer.append(EntryKind::Revert { id }, 0, 0);
        }
        if n % 100 == 50 {
            // The oldest one, the newest one, one between.
            let count = writer.snapshots.len();
            let (id, _) = writer.snapshots[[0, count - 1, count / 2][(n / 100 % 3) as usize]];
            writer.append(EntryKind::DeleteSnapshot { id }, 0, 0);
        }
        if n % 30 == 0 {
            writer.work();
        }
        if n % 90 == 0 {
            writer.pool.settle().expect("folded");
            let (core, replica) = writer.parts();
            assert!(!replica.count.is_too_high(), "a view that went made a count due");
            let kept = counters(replica);
            replica.count.begin_anew();
            while !replica.step_recount(core).expect("a step") {}
            assert_eq!(kept, counters(replica), "after {n}");
            writer.pool.touch(ReplicaIdentity::default().guid);
        }
    }
    assert_eq!(writer.bad(), 0);
}
