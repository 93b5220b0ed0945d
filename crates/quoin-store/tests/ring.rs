//! Rot and refusals in the metadata ring: its last record is there, or the pool is not opened.

use crate::common;
use crate::common::{BLOCKS, GUID, options};
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore};
use quoin_store::{Disk, MemoryDisk, Pool, PoolError, ReplicaPool};
use quoin_types::{Epoch, ReplicaGuid};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Where the blocks of the metadata ring lie, as what they say of themselves: (generation, index,
/// block), each in two places.
fn ring_blocks(disk: &MemoryDisk) -> Vec<(u64, u32, u64)> {
    let mut found = Vec::new();
    for block in disk.written_blocks() {
        let mut bytes = vec![0; 4096];
        disk.read_at(block * 4096, &mut bytes).expect("a read");
        if bytes.starts_with(b"QRNG") {
            let generation = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
            let index = u32::from_le_bytes(bytes[16..20].try_into().expect("4 bytes"));
            found.push((generation, index, block));
        }
    }
    found.sort_unstable();
    found
}

/// A pool whose ring was stated anew, and then a promise was appended to it.
fn promised() -> MemoryDisk {
    let (disk, mut pool) = common::new_pool(8 << 20);
    pool.create(common::identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
    drop(pool);
    let mut pool = Pool::open(disk.clone(), options()).expect("a pool");
    let mut replica = pool.replica(GUID).expect("it");
    let meta = ReplicaMeta { promised: Epoch(9), ..replica.meta().clone() };
    replica.put_meta(meta).expect("a promise");
    pool.request_sync();
    common::sync(&mut pool);
    disk
}

/// A state of before a promise is no state to go on with: a second writer would be let in.
#[test]
fn rot_in_a_ring_that_was_added_to_never_brings_back_what_stood_before() {
    let disk = promised();
    let newest = ring_blocks(&disk).last().expect("a ring").0;
    let of = |wanted: u32| {
        let all = ring_blocks(&disk).into_iter();
        all.filter(move |(generation, index, _)| (*generation, *index) == (newest, wanted))
            .map(|(.., block)| block)
    };
    let promised = |disk: MemoryDisk| {
        Pool::open(disk, options()).map(|mut pool| pool.replica(GUID).expect("it").meta().promised)
    };
    assert_eq!(promised(disk.fork()).ok(), Some(Epoch(9)));
    assert_eq!(of(0).count(), 2);
    // Rot in a single copy.
    for block in of(0) {
        let one = disk.fork();
        one.rot(block * 4096 + 100, 1);
        assert_eq!(promised(one).ok(), Some(Epoch(9)));
    }
    let both = disk.fork();
    of(0).for_each(|block| both.rot(block * 4096 + 100, 1));
    let before = both.writes();
    assert!(matches!(promised(both.clone()), Err(PoolError::MetadataLost)));
    assert_eq!(both.writes(), before, "nothing was changed in it");
}

/// A block of the ring, as what it says of itself, and what it held before.
struct Changed {
    generation: u64,
    index: u32,
    block: u64,
    before: Vec<u8>,
}

impl Changed {
    /// The disk lost the write of this block: it is as before.
    fn put_back(&self, disk: &MemoryDisk) {
        let offset = self.block * 4096;
        disk.write_at(offset, &[std::io::IoSlice::new(&self.before)]).expect("a write");
        disk.sync().expect("a sync");
    }
}

/// A pool, and each block of the ring that a promise and the statement before it changed.
fn changed_by_a_promise() -> (MemoryDisk, Vec<Changed>) {
    let (disk, mut pool) = common::new_pool(8 << 20);
    pool.create(common::identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
    drop(pool);
    // Both halves were in use before.
    for _ in 0..2 {
        drop(Pool::open(disk.clone(), options()).expect("a pool"));
    }
    let read = |disk: &MemoryDisk, block: u64| {
        let mut bytes = vec![0; 4096];
        disk.read_at(block * 4096, &mut bytes).expect("a read");
        bytes
    };
    let former = disk.fork();
    let mut pool = Pool::open(disk.clone(), options()).expect("a pool");
    let mut replica = pool.replica(GUID).expect("it");
    let meta = ReplicaMeta { promised: Epoch(9), ..replica.meta().clone() };
    replica.put_meta(meta).expect("a promise");
    pool.request_sync();
    common::sync(&mut pool);
    let blocks = ring_blocks(&disk).into_iter();
    let changed = blocks.filter_map(|(generation, index, block)| {
        let before = read(&former, block);
        let is_changed = before != read(&disk, block);
        is_changed.then_some(Changed { generation, index, block, before })
    });
    let changed = changed.collect();
    (disk, changed)
}

/// A disk that lost a write shows what was there before, whole and with a good checksum.
#[test]
fn a_write_that_one_copy_of_the_ring_lost_brings_nothing_back() {
    let (disk, changed) = changed_by_a_promise();
    assert!(changed.len() >= 4 && changed.len() % 2 == 0, "both copies of two blocks at least");
    for changed in &changed {
        let one = disk.fork();
        changed.put_back(&one);
        let Changed { generation, index, block, .. } = changed;
        let mut pool = Pool::open(one, options()).expect("the other copy");
        let promised = pool.replica(GUID).expect("it").meta().promised;
        assert_eq!(promised, Epoch(9), "block {index} of generation {generation} at {block}");
    }
}

/// Records behind a state prove that it was there.
#[test]
fn a_state_that_both_copies_of_the_ring_lost_is_missed_where_records_are_behind_it() {
    let (disk, changed) = changed_by_a_promise();
    let first: Vec<&Changed> = changed.iter().filter(|changed| changed.index == 0).collect();
    assert_eq!(first.len(), 2, "one in each copy");
    first.iter().for_each(|changed| changed.put_back(&disk));
    assert!(matches!(Pool::open(disk, options()), Err(PoolError::MetadataLost)));
}

/// A record that cannot be read now may be read later; a record taken for the end is lost for good.
#[test]
fn a_record_of_the_ring_that_one_copy_refuses_and_the_other_lost_is_an_error_and_no_end() {
    let disk = promised();
    let ring = ring_blocks(&disk);
    let (newest, last, _) = *ring.last().expect("a ring");
    let copies: Vec<u64> = ring
        .iter()
        .filter(|(generation, index, _)| (*generation, *index) == (newest, last))
        .map(|(.., block)| *block)
        .collect();
    let [first, second] = copies[..] else { panic!("{copies:?}") };
    for (refused, rotten) in [(first, second), (second, first)] {
        let disk = disk.fork();
        disk.break_block(refused);
        let mut pool = Pool::open(disk.fork(), options()).expect("the other copy");
        assert_eq!(pool.replica(GUID).expect("it").meta().promised, Epoch(9));
        disk.rot(rotten * 4096 + 50, 1);
        assert!(matches!(Pool::open(disk, options()), Err(PoolError::Store(_))));
    }
    // Behind the end nothing was written: a bad sector there proves nothing.
    let disk = disk.fork();
    disk.break_block(first + 1);
    let mut pool = Pool::open(disk, options()).expect("a sound ring");
    assert_eq!(pool.replica(GUID).expect("it").meta().promised, Epoch(9));
}

/// Promises of a replica through many turns of the ring, with power cuts at any moment.
fn promise_and_cut_power(seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (disk, mut pool) = common::new_pool(8 << 20);
    pool.create(common::identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
    pool.request_sync();
    common::sync(&mut pool);
    let (mut promised, mut acknowledged) = (0, 0);
    let mut under_way = None;
    for _ in 0..1500 {
        match random.random_range(0..100) {
            0..10 => match under_way.take() {
                None => {
                    under_way = pool.sync_wanted().map(|ticket| (ticket, promised));
                    disk.sync().expect("a sync");
                }
                Some((ticket, before)) => {
                    pool.sync_finished(ticket, Ok(())).expect("a sync");
                    acknowledged = before;
                }
            },
            10..12 => {
                under_way = None;
                disk.power_cut(|| random.random_bool(0.5));
                pool = Pool::open(disk.clone(), options()).expect("a pool");
                let found = pool.replica(GUID).expect("it").meta().promised.0;
                assert!(
                    (acknowledged..=promised).contains(&found),
                    "epoch {found} of {acknowledged} to {promised}"
                );
                (promised, acknowledged) = (found, found);
            }
            _ => {
                promised += 1;
                let mut replica = pool.replica(GUID).expect("it");
                let meta = ReplicaMeta { promised: Epoch(promised), ..replica.meta().clone() };
                replica.put_meta(meta).expect("a promise");
                pool.request_sync();
            }
        }
    }
}

/// Records that come while the state is written to the other half are in neither half alone.
#[test]
fn no_promise_is_lost_by_a_power_cut_while_the_ring_is_stated_anew() {
    for seed in 0..40 {
        promise_and_cut_power(seed);
    }
}

/// Replicas of a pool whose state takes more than what a disk writes at once.
const MANY: usize = 60;

/// First writes and syncs of an open, among which the state is written anew: few, so that it is cut
/// within, or some more, so that it is whole.
const OPENING_EVENTS: [usize; 2] = [4, 8];

/// Cuts the power, and again within the open that follows.
fn cut_power_within_opens(seed: u64) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (disk, mut pool) = common::new_pool(8 << 20);
    let guid = |number: usize| ReplicaGuid(1 + number as u128);
    for number in 0..MANY {
        pool.create(common::identity(guid(number)), ReplicaMeta::default(), BLOCKS).expect("room");
    }
    common::sync(&mut pool);
    let mut promised = [0; MANY];
    let mut acknowledged = promised;
    for _ in 0..1200 {
        match random.random_range(0..40) {
            0..6 => {
                if let Some(ticket) = pool.sync_wanted() {
                    let result = pool.disk().sync();
                    acknowledged = promised;
                    pool.sync_finished(ticket, result).expect("a sync");
                }
            }
            6 => {
                disk.power_cut(|| random.random_bool(0.5));
                let whole = disk.fork();
                whole.record();
                drop(Pool::open(whole.clone(), options()).expect("nothing is lost of the ring"));
                let events = whole.events();
                let begun =
                    random.random_range(0..=events.len().min(OPENING_EVENTS[seed as usize % 2]));
                common::repeat(&disk, &events[..begun]);
                disk.power_cut(|| random.random_bool(0.5));
                pool = Pool::open(disk.clone(), options()).expect("nothing is lost of the ring");
                for number in 0..MANY {
                    let found = pool.replica(guid(number)).expect("it").meta().promised.0;
                    let may = acknowledged[number]..=promised[number];
                    assert!(may.contains(&found), "epoch {found}, not one of {may:?}");
                    promised[number] = found;
                }
                acknowledged = promised;
            }
            _ => {
                let number = random.random_range(0..MANY);
                promised[number] += 1;
                let mut replica = pool.replica(guid(number)).expect("it");
                let promised = Epoch(promised[number]);
                let meta = ReplicaMeta { promised, ..replica.meta().clone() };
                replica.put_meta(meta).expect("a promise");
                pool.request_sync();
            }
        }
    }
}

/// A switch that the first power cut left half done is undone before the state is written anew: a
/// state that the second one tears is never taken for one that was whole.
#[test]
fn no_ring_is_refused_because_the_power_went_again_while_it_was_opened() {
    for seed in 0..120 {
        cut_power_within_opens(seed);
    }
}
