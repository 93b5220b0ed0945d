//! Clones beside the model: what they show, through writes, clean-up, deletes in every order,
//! rebuilds and restarts.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{
    CloneSource, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
};
use quoin_store::model::ModelPool;
use quoin_store::{Cloned, Disk, Due, MemoryDisk, Pool, ReplicaPool, ScrubAt};
use quoin_types::message::{Content, ReadView};
use quoin_types::{
    BLOCK_SIZE, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId, VolumeId,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{
    BLOCKS, assert_same, begin_increment, flat, identity, new_pool_with, pull_all, read_all,
    short_steps, sync,
};

fn of(volume: u128) -> ReplicaIdentity {
    ReplicaIdentity { volume: VolumeId(volume), ..identity(ReplicaGuid(volume)) }
}

/// A pool of several volumes beside the model. Volume n has the replica with GUID n.
struct Herd {
    rng: ChaCha8Rng,
    disk: MemoryDisk,
    pool: Option<Pool<MemoryDisk>>,
    model: ModelPool,
    members: Vec<u128>,
    next: u128,
    made: u32,
}

impl Herd {
    fn new(seed: u64, pool_bytes: u64) -> Self {
        let (disk, mut pool) = new_pool_with(pool_bytes, short_steps());
        let mut model = ModelPool::new();
        pool.create(of(1), ReplicaMeta::default(), BLOCKS).expect("room");
        model.create(of(1), ReplicaMeta::default(), BLOCKS).expect("room");
        let rng = ChaCha8Rng::seed_from_u64(seed);
        Herd { rng, disk, pool: Some(pool), model, members: vec![1], next: 2, made: 0 }
    }

    fn pool(&mut self) -> &mut Pool<MemoryDisk> {
        self.pool.as_mut().expect("an open pool")
    }

    fn any(&mut self) -> u128 {
        self.members[self.rng.random_range(0..self.members.len())]
    }

    /// Appends an entry to both; false: the pool is full.
    fn append(&mut self, volume: u128, kind: EntryKind, lba: u64, blocks: u32) -> bool {
        let guid = ReplicaGuid(volume);
        let mut model = self.model.replica(guid).expect("it");
        let state = model.state();
        let length = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
        let mut data = vec![0; length];
        for block in data.chunks_mut(BLOCK_SIZE) {
            block[..8].copy_from_slice(&self.rng.random::<u64>().to_le_bytes());
        }
        let position = Position { epoch: Epoch(1), lsn: state.position.lsn.next() };
        let data = Bytes::from(data);
        let entry = Entry::after(state.chain, position, kind, lba, blocks, data, false);
        let entries = [Arc::new(entry)];
        let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
        match real.append(&entries) {
            Ok(()) => {}
            Err(StoreError::Full) => return false,
            Err(error) => panic!("{error}"),
        }
        real.set_stable(position.lsn);
        model.append(&entries).expect("the model takes it");
        model.set_stable(position.lsn);
        true
    }

    fn write_some(&mut self, volume: u128) {
        let blocks = self.model.replica(ReplicaGuid(volume)).expect("it").state().volume_blocks;
        let length = self.rng.random_range(1..=12u64);
        let lba = self.rng.random_range(0..=blocks - length);
        let kind = match self.rng.random_range(0..8) {
            0 => EntryKind::Trim,
            _ => EntryKind::Write,
        };
        self.append(volume, kind, lba, length as u32);
    }

    fn snapshots(&mut self, volume: u128) -> Vec<SnapshotId> {
        let model = self.model.replica(ReplicaGuid(volume)).expect("it");
        model.snapshots().iter().map(|s| s.id).collect()
    }

    fn snapshot(&mut self, volume: u128) -> Option<SnapshotId> {
        let id = SnapshotId(1000 + self.next);
        self.next += 1;
        self.append(volume, EntryKind::Snapshot { id, hidden: false }, 0, 0).then_some(id)
    }

    /// Makes a clone of a snapshot, of so many blocks more; `None`: there is no room for it.
    fn clone_of(&mut self, volume: u128, snapshot: SnapshotId, more: u64) -> Option<u128> {
        let source = CloneSource { volume: VolumeId(volume), snapshot };
        let model = self.model.replica(ReplicaGuid(volume)).expect("it");
        let info = model.snapshots().into_iter().find(|s| s.id == snapshot).expect("it");
        let (clone, blocks) = (self.next, info.blocks + more);
        self.next += 1;
        for _ in 0..50 {
            let pool = self.pool.as_mut().expect("open");
            match pool.create_clone(of(clone), ReplicaMeta::default(), blocks, &source) {
                Ok(Cloned::Made) => {
                    let meta = ReplicaMeta::default();
                    let made = self.model.create_clone(of(clone), meta, blocks, &source);
                    assert_eq!(made, Ok(Cloned::Made));
                    self.members.push(clone);
                    self.made += 1;
                    return Some(clone);
                }
                Ok(Cloned::NotYet) => self.work(),
                Err(StoreError::Full | StoreError::RingFull) => return None,
                Err(StoreError::Rule(rule)) if rule.contains("too deep") => return None,
                Err(error) => panic!("{error}"),
            }
        }
        None
    }

    fn work(&mut self) {
        for _ in 0..200 {
            let pool = self.pool.as_mut().expect("open");
            match pool.background(1 << 20) {
                Ok(_) | Err(StoreError::Full) => {}
                Err(error) => panic!("{error}"),
            }
            sync(pool);
            if pool.background_due() == Due::Idle {
                break;
            }
        }
    }

    fn delete(&mut self, volume: u128) {
        let guid = ReplicaGuid(volume);
        assert!(self.pool().delete(guid).expect("room"));
        assert!(self.model.delete(guid).expect("room"));
        self.members.retain(|member| *member != volume);
        assert!(self.pool().is_retired(guid) && self.pool().replica(guid).is_none());
        assert!(!self.pool().replicas().contains(&guid));
    }

    /// Has a clone take over all blocks of its base, with writes in between.
    fn flatten(&mut self, volume: u128) -> bool {
        let guid = ReplicaGuid(volume);
        for _ in 0..400 {
            self.pool().flatten(guid);
            self.work();
            if !self.pool().is_clone(guid) {
                return true;
            }
            if self.rng.random_range(0..8) == 0 {
                self.write_some(volume);
            }
            if self.rng.random_range(0..40) == 0 {
                self.restart();
            }
        }
        false
    }

    /// Everything is on media, and the power goes.
    fn restart(&mut self) {
        self.pool().request_sync();
        sync(self.pool());
        self.pool = None;
        self.disk.power_cut(|| false);
        self.pool = Some(Pool::open(self.disk.clone(), short_steps()).expect("a pool"));
    }

    /// All replicas are what the model says.
    fn check(&mut self) {
        for member in self.members.clone() {
            let guid = ReplicaGuid(member);
            let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
            assert!(!real.meta().damaged);
            assert_same(&mut real, &mut self.model.replica(guid).expect("it"));
        }
        assert_eq!(self.pool().take_damaged(), vec![]);
        assert_eq!(self.pool().take_bad_blocks(), vec![]);
    }

    fn check_pull(&mut self, volume: u128, from: Lsn) {
        let guid = ReplicaGuid(volume);
        let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
        let mut model = self.model.replica(guid).expect("it");
        let (a, end) = pull_all(&mut real, ReadView::Live, from);
        let (b, other_end) = pull_all(&mut model, ReadView::Live, from);
        assert_eq!(flat(&a), flat(&b));
        assert_eq!(end, other_end);
    }

    /// A replica gets all of its content anew, as of a rebuild from nothing. Its snapshots are gone.
    fn rebuild(&mut self, volume: u128, rebuild: u64) {
        for id in self.snapshots(volume) {
            if !self.append(volume, EntryKind::DeleteSnapshot { id }, 0, 0) {
                return;
            }
        }
        let guid = ReplicaGuid(volume);
        let mut model = self.model.replica(guid).expect("it");
        let (slots, end) = pull_all(&mut model, ReadView::Live, Lsn::ZERO);
        let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
        begin_increment(&mut real, rebuild, Lsn::ZERO);
        for slots in slots.chunks(64) {
            match real.increment_feed(rebuild, slots, BLOCKS) {
                Ok(()) => {}
                // It is given up with the next entry.
                Err(StoreError::Full) => return,
                Err(error) => panic!("{error}"),
            }
        }
        real.increment_prepare(rebuild, &end).expect("prepared");
        self.pool().request_sync();
        sync(self.pool());
        let guid = ReplicaGuid(volume);
        self.pool().replica(guid).expect("it").increment_flip(rebuild).expect("the flip");
    }
}

#[test]
fn a_clone_shows_its_snapshot_and_each_goes_its_own_way_from_there() {
    let mut herd = Herd::new(1, 32 << 20);
    for _ in 0..60 {
        herd.write_some(1);
    }
    let snapshot = herd.snapshot(1).expect("room");
    herd.write_some(1);
    let used = herd.pool().stats().used_bytes;
    let clone = herd.clone_of(1, snapshot, 100).expect("room");
    herd.check();
    let stats = herd.pool().replica_stats(ReplicaGuid(clone)).expect("it");
    assert_eq!((stats.allocated_bytes, stats.live_bytes), (0, 0), "nothing was copied");
    assert!(herd.pool().stats().used_bytes <= used + (1 << 20));
    let state = herd.pool().replica(ReplicaGuid(clone)).expect("it").state();
    let info = herd.model.replica(ReplicaGuid(1)).expect("it").snapshots()[0];
    let begins = Position { epoch: Epoch::ZERO, lsn: info.lsn };
    assert_eq!((state.position, state.stable, state.base), (begins, info.lsn, info.lsn));
    assert_eq!(state.volume_blocks, info.blocks + 100);
    for _ in 0..60 {
        herd.write_some(1);
        herd.write_some(clone);
    }
    herd.work();
    herd.check();
    for from in [0, info.lsn.0, info.lsn.0 + 20] {
        herd.check_pull(clone, Lsn(from));
    }
    herd.restart();
    herd.check();
}

#[test]
fn a_clone_is_refused_where_its_snapshot_is_not_and_where_it_would_be_smaller() {
    let mut herd = Herd::new(2, 16 << 20);
    herd.write_some(1);
    let snapshot = herd.snapshot(1).expect("room");
    herd.work();
    let refused = |herd: &mut Herd, volume: u128, snapshot, blocks| {
        let source = CloneSource { volume: VolumeId(volume), snapshot };
        let made = herd.pool().create_clone(of(9), ReplicaMeta::default(), blocks, &source);
        made.expect_err("refused").to_string()
    };
    let where_it_is = "where its snapshot is";
    assert!(refused(&mut herd, 1, SnapshotId(5), BLOCKS).contains(where_it_is));
    assert!(refused(&mut herd, 2, snapshot, BLOCKS).contains(where_it_is));
    let clone = herd.clone_of(1, snapshot, 0).expect("room");
    assert!(refused(&mut herd, 1, snapshot, BLOCKS - 1).contains("the size of its snapshot"));
    let source = CloneSource { volume: VolumeId(1), snapshot };
    let twice = herd.pool().create_clone(of(clone), ReplicaMeta::default(), BLOCKS, &source);
    assert_eq!(twice, Err(StoreError::Rule("a GUID is born once")));
    herd.delete(clone);
    let again = herd.pool().create_clone(of(clone), ReplicaMeta::default(), BLOCKS, &source);
    assert_eq!(again, Err(StoreError::Rule("a GUID is born once")));
}

#[test]
fn clones_of_clones_are_refused_before_a_look_up_takes_too_many_steps() {
    let mut herd = Herd::new(3, 32 << 20);
    let mut last = 1;
    for deep in 0.. {
        herd.write_some(last);
        let snapshot = herd.snapshot(last).expect("room");
        match herd.clone_of(last, snapshot, 0) {
            Some(clone) => last = clone,
            None => {
                assert!((8..20).contains(&deep), "{deep}");
                break;
            }
        }
        herd.check();
    }
    herd.restart();
    herd.check();
}

/// The last one gives all space back, in whatever order a source, its snapshot and its clones go.
#[test]
fn a_family_is_deleted_in_any_order_and_gives_all_its_space_back() {
    for seed in 0..24 {
        println!("seed {seed}");
        let mut herd = Herd::new(100 + seed, 32 << 20);
        for _ in 0..40 {
            herd.write_some(1);
        }
        let first = herd.snapshot(1).expect("room");
        let clone = herd.clone_of(1, first, 0).expect("room");
        for _ in 0..20 {
            herd.write_some(clone);
        }
        let second = herd.snapshot(clone).expect("room");
        let of_clone = herd.clone_of(clone, second, 50).expect("room");
        herd.write_some(of_clone);
        let other = herd.clone_of(1, first, 0).expect("room");
        herd.write_some(other);
        let mut steps = vec![
            (1, Some(first)),
            (clone, Some(second)),
            (1, None),
            (clone, None),
            (of_clone, None),
            (other, None),
        ];
        while !steps.is_empty() {
            let (volume, snapshot) = steps.remove(herd.rng.random_range(0..steps.len()));
            match snapshot {
                _ if !herd.members.contains(&volume) => {}
                Some(id) => drop(herd.append(volume, EntryKind::DeleteSnapshot { id }, 0, 0)),
                None => herd.delete(volume),
            }
            if herd.rng.random() {
                herd.work();
            }
            if herd.rng.random() {
                herd.restart();
            }
            herd.check();
        }
        herd.work();
        herd.restart();
        herd.work();
        assert_eq!(herd.pool().stats().used_bytes, 0, "space that nobody has");
    }
}

/// Proves: no view of any member names a free segment, and a clone stays what its
/// snapshot was, beside clean-up in a pool that is nearly full.
#[test]
fn families_equal_the_model_through_clean_up_deletes_rebuilds_and_restarts() {
    let (mut made, mut full) = (0, 0);
    for seed in 0..30 {
        println!("seed {seed}");
        let mut herd = Herd::new(seed, 12 << 20);
        let mut rebuilds = 0;
        for _ in 0..250 {
            let member = herd.any();
            match herd.rng.random_range(0..100) {
                0..62 => {
                    for _ in 0..4 {
                        herd.write_some(member);
                    }
                }
                62..68 if herd.snapshots(member).len() < 3 => drop(herd.snapshot(member)),
                68..71 => {
                    if let Some(id) = herd.snapshots(member).first().copied() {
                        herd.append(member, EntryKind::DeleteSnapshot { id }, 0, 0);
                    }
                }
                71..74 => {
                    if let Some(id) = herd.snapshots(member).last().copied() {
                        herd.append(member, EntryKind::Revert { id }, 0, 0);
                    }
                }
                74..80 if herd.members.len() < 6 => {
                    if let Some(id) = herd.snapshots(member).first().copied() {
                        let more = herd.rng.random_range(0..3) * 100;
                        herd.clone_of(member, id, more);
                    }
                }
                80..83 if herd.members.len() > 1 => herd.delete(member),
                83..86 => {
                    rebuilds += 1;
                    herd.rebuild(member, rebuilds);
                }
                86..87 => drop(herd.flatten(member)),
                87..90 => {
                    let from = herd.rng.random_range(0..40);
                    herd.check_pull(member, Lsn(from));
                }
                90..94 => herd.restart(),
                _ => herd.work(),
            }
            if herd.pool().stats().free_bytes == 0 {
                full += 1;
                herd.work();
            }
        }
        herd.work();
        herd.check();
        herd.restart();
        herd.check();
        made += herd.made;
    }
    assert!(made > 60, "{made} clones: the test is too easy");
    assert!(full > 0, "the pool was never full: the test is too easy");
}

/// Clean-up moves blocks that only a clone shows, and the clone follows.
#[test]
fn blocks_that_only_a_clone_shows_are_moved_and_stay() {
    let mut herd = Herd::new(7, 16 << 20);
    for lba in (0..BLOCKS).step_by(10) {
        herd.append(1, EntryKind::Write, lba, 10);
    }
    let snapshot = herd.snapshot(1).expect("room");
    let clone = herd.clone_of(1, snapshot, 0).expect("room");
    herd.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
    // The source gives all of it up, the clone most of it.
    for lba in (0..BLOCKS).step_by(10) {
        herd.append(1, EntryKind::Write, lba, 10);
        herd.append(clone, EntryKind::Trim, lba, 1);
    }
    for round in 0..20 {
        for lba in (round..BLOCKS - 1).step_by(7) {
            herd.append(1, EntryKind::Write, lba, 1);
        }
        herd.work();
    }
    herd.check();
    herd.delete(1);
    herd.work();
    herd.check();
    herd.restart();
    herd.check();
}

/// A clone that took over its base outlives all loss of its source, and gives the base up.
#[test]
fn a_flattened_clone_shares_nothing_and_shows_what_it_showed() {
    let mut herd = Herd::new(17, 32 << 20);
    for _ in 0..40 {
        herd.write_some(1);
    }
    let snapshot = herd.snapshot(1).expect("room");
    let clone = herd.clone_of(1, snapshot, 100).expect("room");
    for _ in 0..10 {
        herd.write_some(clone);
    }
    let kept = herd.snapshot(clone).expect("room");
    for _ in 0..10 {
        herd.write_some(clone);
    }
    // A Revert notes blocks as the base's.
    herd.append(clone, EntryKind::Revert { id: kept }, 0, 0);
    let second = herd.clone_of(clone, kept, 0).expect("room");
    herd.work();
    assert!(herd.pool().is_clone(ReplicaGuid(clone)) && !herd.pool().is_clone(ReplicaGuid(1)));
    herd.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
    herd.delete(1);
    assert!(herd.flatten(clone), "it is never done");
    herd.check();
    for from in [0, 30, 60] {
        herd.check_pull(clone, Lsn(from));
    }
    herd.work();
    herd.restart();
    herd.check();
    assert!(!herd.pool().is_clone(ReplicaGuid(clone)));
    let stats = [clone, second].map(|n| herd.pool().replica_stats(ReplicaGuid(n)).expect("it"));
    let own: u64 = stats.iter().map(|stats| stats.allocated_bytes).sum();
    assert_eq!(herd.pool().stats().used_bytes, own, "its source's blocks are gone");
    assert!(herd.flatten(second));
    herd.delete(clone);
    herd.work();
    herd.check();
    herd.restart();
    herd.check();
}

/// At every crash the clone shows what it did, with its base or without.
#[test]
fn every_crash_of_a_flatten_leaves_what_the_clone_showed() {
    use crate::crash_enumeration::{crash_everywhere, disk_of, image_of};
    let mut herd = Herd::new(19, 8 << 20);
    for _ in 0..20 {
        herd.write_some(1);
    }
    let snapshot = herd.snapshot(1).expect("room");
    let clone = herd.clone_of(1, snapshot, 0).expect("room");
    for _ in 0..5 {
        herd.write_some(clone);
    }
    herd.work();
    herd.delete(1);
    herd.restart();
    herd.work();
    let guid = ReplicaGuid(clone);
    let mut model = herd.model.replica(guid).expect("it");
    let content = flat(&read_all(&mut model, ReadView::Live, BLOCKS));
    let start = image_of(&herd.disk);
    herd.disk.record();
    herd.pool().flatten(guid);
    for _ in 0..20 {
        herd.work();
    }
    assert!(!herd.pool().is_clone(guid));
    let mut seen = [0, 0];
    crash_everywhere(&start, &herd.disk.events(), |_, image| {
        let disk = disk_of(herd.disk.size(), image);
        let mut pool = Pool::open(disk, short_steps()).expect("a pool");
        seen[usize::from(pool.is_clone(guid))] += 1;
        let mut replica = pool.replica(guid).expect("it");
        assert!(!replica.meta().damaged);
        assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
        pool.flatten(guid);
        for _ in 0..60 {
            pool.background(1 << 20).expect("background work");
            sync(&mut pool);
        }
        let mut replica = pool.replica(guid).expect("it");
        assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
    });
    assert!(seen.iter().all(|n| *n > 5), "{seen:?} without and with its base");
}

fn damaged_disk(disk: &MemoryDisk, change: impl Fn(&mut [u8]) -> bool) -> MemoryDisk {
    let copy = disk.fork();
    let mut changed = 0;
    for number in disk.written_blocks() {
        let mut bytes = vec![0; BLOCK_SIZE];
        disk.read_at(number * BLOCK_SIZE as u64, &mut bytes).expect("inside the disk");
        if change(&mut bytes) {
            let parts = [std::io::IoSlice::new(&bytes)];
            copy.write_at(number * BLOCK_SIZE as u64, &parts).expect("inside the disk");
            changed += 1;
        }
    }
    assert!(changed > 0, "nothing was damaged");
    copy.sync().expect("a sync");
    copy
}

/// A block that a clone shares is repaired where it lies, for all that show it.
#[test]
fn a_rotten_block_of_a_base_is_bad_in_the_clone_and_repaired_for_all_relatives() {
    let mut herd = Herd::new(9, 16 << 20);
    herd.append(1, EntryKind::Write, 5, 1);
    let snapshot = herd.snapshot(1).expect("room");
    let clone = herd.clone_of(1, snapshot, 0).expect("room");
    let second = herd.clone_of(1, snapshot, 0).expect("room");
    let guid = ReplicaGuid(clone);
    let read = |pool: &mut Pool<MemoryDisk>, guid| {
        let mut replica = pool.replica(guid).expect("it");
        read_all(&mut replica, ReadView::Live, 8)
    };
    let good = read(herd.pool(), guid);
    let wanted = good.iter().find(|slot| slot.lba == 5).expect("it").clone();
    let Content::Data { crc, data } = wanted.content.clone() else { panic!("a hole") };
    herd.restart();
    herd.pool = None;
    let rotten = damaged_disk(&herd.disk, |bytes| {
        let is_it = bytes == &data[..];
        if is_it {
            bytes[100] ^= 1;
        }
        is_it
    });
    let mut pool = Pool::open(rotten, short_steps()).expect("a pool");
    let bad = read(&mut pool, guid);
    assert!(bad.iter().any(|slot| slot.lba == 5 && slot.content == Content::Bad));
    let noted = pool.take_bad_blocks();
    assert!(noted.iter().any(|b| (b.replica, b.lba, b.blocks) == (guid, 5, 1)), "{noted:?}");
    let mut replica = pool.replica(guid).expect("it");
    assert_eq!(replica.repair(ReadView::Live, 5, wanted.version, crc, &data), Ok(true));
    for guid in [guid, ReplicaGuid(second), ReplicaGuid(1)] {
        assert_eq!(flat(&read(&mut pool, guid)), flat(&good));
    }
}

/// Nobody else reads what only clones show.
#[test]
fn a_rotten_block_that_only_a_clone_shows_is_found_by_its_scrub() {
    let mut herd = Herd::new(13, 16 << 20);
    herd.append(1, EntryKind::Write, 5, 1);
    herd.append(1, EntryKind::Write, 300, 1);
    let snapshot = herd.snapshot(1).expect("room");
    let clone = herd.clone_of(1, snapshot, 0).expect("room");
    let guid = ReplicaGuid(clone);
    let mut replica = herd.pool().replica(guid).expect("it");
    let good = read_all(&mut replica, ReadView::Live, BLOCKS);
    let wanted = good.iter().find(|slot| slot.lba == 300).expect("it").clone();
    let Content::Data { data, .. } = wanted.content.clone() else { panic!("a hole") };
    let scrubbed = |pool: &mut Pool<MemoryDisk>| {
        let mut at = Some(ScrubAt::default());
        while let Some(from) = at {
            at = pool.scrub(guid, from, 1 << 20).expect("a scrub").next;
        }
        pool.take_bad_blocks()
    };
    let flip = |bytes: &mut [u8]| {
        let is_it = bytes == &data[..];
        bytes[9] ^= u8::from(is_it);
        is_it
    };
    for is_deleted in [false, true] {
        if is_deleted {
            herd.delete(1);
        }
        herd.restart();
        let mut pool = Pool::open(damaged_disk(&herd.disk, flip), short_steps()).expect("a pool");
        let found: Vec<u64> = scrubbed(&mut pool).iter().map(|bad| bad.lba).collect();
        // While its source is there, that one's scrub finds it.
        assert_eq!(found, if is_deleted { vec![300] } else { vec![] });
    }
}

/// What is read of all images of a crash around a clone's creation and deletion.
#[test]
fn every_crash_of_making_and_deleting_a_clone_leaves_it_whole_or_not_at_all() {
    use crate::crash_enumeration::{crash_everywhere, disk_of, image_of};
    for with_commit in [false, true] {
        let mut herd = Herd::new(11, 8 << 20);
        for _ in 0..20 {
            herd.write_some(1);
        }
        let snapshot = herd.snapshot(1).expect("room");
        herd.work();
        herd.restart();
        herd.work();
        if with_commit {
            // A record of the source is on its way while the clone is made.
            for _ in 0..10 {
                herd.write_some(1);
            }
        }
        let expected = |herd: &mut Herd, volume: u128, view| {
            let mut model = herd.model.replica(ReplicaGuid(volume)).expect("it");
            flat(&read_all(&mut model, view, BLOCKS))
        };
        let content = expected(&mut herd, 1, ReadView::Snapshot(snapshot));
        let start = image_of(&herd.disk);
        herd.disk.record();
        if with_commit {
            let mut replica = herd.pool().replica(ReplicaGuid(1)).expect("it");
            replica.request_sync();
            herd.pool().background(1 << 20).expect("background work");
        }
        let clone = herd.clone_of(1, snapshot, 0).expect("room");
        herd.pool().request_sync();
        sync(herd.pool());
        let made_by = herd.disk.event_count();
        herd.work();
        // Its source goes at once, then its own snapshot's clone, then all.
        herd.append(1, EntryKind::DeleteSnapshot { id: snapshot }, 0, 0);
        herd.delete(1);
        herd.pool().request_sync();
        sync(herd.pool());
        let source_gone_by = herd.disk.event_count();
        herd.work();
        let deleted_from = herd.disk.event_count();
        herd.delete(clone);
        herd.pool().request_sync();
        sync(herd.pool());
        let deleted_by = herd.disk.event_count();
        herd.work();
        let mut seen = BTreeMap::<&str, u32>::new();
        crash_everywhere(&start, &herd.disk.events(), |at, image| {
            let disk = disk_of(herd.disk.size(), image);
            let mut pool = Pool::open(disk.clone(), short_steps()).expect("a pool");
            let is_there = pool.replica(ReplicaGuid(clone)).is_some();
            assert!(!(is_there && pool.is_retired(ReplicaGuid(clone))));
            let source = pool.replica(ReplicaGuid(1)).is_some();
            assert!(!source || at <= source_gone_by, "the deletion was durable");
            if let Some(mut replica) = pool.replica(ReplicaGuid(clone)) {
                assert!(at <= deleted_by, "the deletion was durable");
                assert!(!replica.meta().damaged);
                assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
                *seen.entry(if source { "with" } else { "without" }).or_default() += 1;
            } else {
                assert!(at <= made_by || at >= deleted_from, "the creation was durable");
                *seen.entry("none").or_default() += 1;
            }
            // What is done next goes on from there.
            for _ in 0..30 {
                pool.background(1 << 20).expect("background work");
                sync(&mut pool);
            }
            if let Some(mut replica) = pool.replica(ReplicaGuid(clone)) {
                assert!(flat(&read_all(&mut replica, ReadView::Live, BLOCKS)) == content);
            }
            if !is_there && !source {
                assert_eq!(pool.stats().used_bytes, 0, "space that nobody has");
            }
        });
        assert!(seen.len() == 3 && seen.values().all(|n| *n > 5), "{seen:?}");
    }
}
