//! All crashes of a workload: each prefix of its writes to the disk, and many choices and torn
//! parts of the writes that no sync covered, recovered and compared with the in-memory model.
//!
//! At every event of the disk the power goes. What a sync covered is there; of the writes since,
//! the disk may hold any. Where they are few all subsets are tried (up to
//! `QUOIN_CRASH_SUBSETS` writes, 6 if unset), else all, none, each one alone, each one missing and
//! each prefix of them; and the newest one also torn at 512 bytes, its head or its tail there.
//! Each image is opened, compared, and opened once more: a crash right after recovery must end at
//! the same. Of some of them (`QUOIN_CRASH_OPENS` of a hundred, 8 if unset) the recovery itself is
//! crashed in the same way, at every event of what it does to the disk, and of some of these the
//! next recovery too.
//!
//! The result is many thousands of images a workload. `QUOIN_CRASH_IMAGES=0` recovers all; a
//! number recovers so many, spread over all by a fixed rule (200 if unset, so that the tests take
//! seconds). `QUOIN_CRASH_SEEDS` makes more workloads of each kind (2 if unset).

use crate::common;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use crate::common::{
    BLOCKS, GUID, World, flat, format_options, identity, model_of, options, pull_all, read_all,
    sync,
};
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::memory_disk::{DiskEvent, SECTOR_SIZE};
use quoin_store::model::ModelPool;
use quoin_store::{Disk, MemoryDisk, Pool, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{CutHead, ReadView};
use quoin_types::{BLOCK_SIZE, Lsn, ReplicaGuid};
use rand::Rng;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

/// Blocks of an image that is put together; clones share what they have in common.
pub type Blocks = BTreeMap<u64, Arc<[u8]>>;

fn apply(blocks: &mut Blocks, event: &DiskEvent) {
    match event {
        DiskEvent::Sync => {}
        DiskEvent::Write { offset, bytes } => apply_part(blocks, *offset, bytes, 0, bytes.len()),
        DiskEvent::Discard { offset, length } => {
            let gone = offset / BLOCK_SIZE as u64..(offset + length) / BLOCK_SIZE as u64;
            let gone: Vec<u64> = blocks.range(gone).map(|(n, _)| *n).collect();
            gone.iter().for_each(|n| drop(blocks.remove(n)));
        }
    }
}

/// Applies only the bytes `from` to `to` of a write.
fn apply_part(blocks: &mut Blocks, offset: u64, bytes: &[u8], from: usize, to: usize) {
    for (i, chunk) in bytes.chunks(BLOCK_SIZE).enumerate() {
        let (start, number) = (i * BLOCK_SIZE, offset / BLOCK_SIZE as u64 + i as u64);
        let (from, to) = (from.max(start), to.min(start + BLOCK_SIZE));
        if from >= to {
            continue;
        }
        let new: Arc<[u8]> = if to - from == BLOCK_SIZE {
            chunk.into()
        } else {
            let mut mixed = blocks.get(&number).map_or(vec![0; BLOCK_SIZE], |b| b.to_vec());
            mixed[from - start..to - start].copy_from_slice(&chunk[from - start..to - start]);
            mixed.into()
        };
        blocks.insert(number, new);
    }
}

pub fn disk_of(size: u64, blocks: &Blocks) -> MemoryDisk {
    let disk = MemoryDisk::new(size);
    for (number, bytes) in blocks {
        let parts = [std::io::IoSlice::new(bytes)];
        disk.write_at(number * BLOCK_SIZE as u64, &parts).expect("inside the disk");
    }
    disk.sync().expect("a sync");
    disk
}

/// Which images are put together: about `budget` of `total`, spread over them.
struct Sample {
    total: u64,
    budget: u64,
    seen: u64,
}

impl Sample {
    fn takes_next(&mut self) -> bool {
        self.seen += 1;
        let spread = self.seen.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.budget >= self.total || (spread * self.total) >> 32 < self.budget
    }
}

/// Images that the disk may hold: the unsynced events in part, on top of what was synced.
fn images(
    synced: &Blocks,
    unsynced: &[&DiskEvent],
    sample: &mut Sample,
    each: &mut impl FnMut(&Blocks),
) {
    let count = unsynced.len();
    let mut choose = |chosen: &dyn Fn(usize) -> bool| {
        if !sample.takes_next() {
            return;
        }
        let mut blocks = synced.clone();
        let events = unsynced.iter().enumerate().filter(|(i, _)| chosen(*i));
        events.for_each(|(_, event)| apply(&mut blocks, event));
        each(&blocks);
    };
    if count as u64 <= setting("QUOIN_CRASH_SUBSETS", 6) {
        (0..1u64 << count).for_each(|set| choose(&|i| set >> i & 1 == 1));
    } else {
        choose(&|_| true);
        choose(&|_| false);
        for one in 0..count {
            choose(&|i| i != one);
            choose(&|i| i == one);
            choose(&|i| i < one);
        }
    }
    // The newest write torn, with all that came before it or nothing.
    let Some((DiskEvent::Write { offset, bytes }, before)) = unsynced.split_last() else { return };
    let sectors = bytes.len() / SECTOR_SIZE;
    let cuts = (1..sectors).filter(|s| *s < 10 || s % 8 == 0 || s + 1 == sectors);
    for cut in cuts {
        for (with_rest, head) in [(true, true), (true, false), (false, true)] {
            if !sample.takes_next() {
                continue;
            }
            let mut blocks = synced.clone();
            if with_rest {
                before.iter().for_each(|event| apply(&mut blocks, event));
            }
            let cut = cut * SECTOR_SIZE;
            let (from, to) = if head { (0, cut) } else { (cut, bytes.len()) };
            apply_part(&mut blocks, *offset, bytes, from, to);
            each(&blocks);
        }
    }
}

/// Gives the images that crashes at any of `events` may leave.
pub fn crash_everywhere(
    start: &Blocks,
    events: &[DiskEvent],
    mut each: impl FnMut(usize, &Blocks),
) {
    let mut count = Sample { total: 1, budget: 0, seen: 0 };
    walk(start, events, &mut count, &mut |_, _| {});
    let budget = match setting("QUOIN_CRASH_IMAGES", 200) {
        0 => u64::MAX,
        budget => budget,
    };
    walk(start, events, &mut Sample { total: count.seen, budget, seen: 0 }, &mut each);
}

fn walk(
    start: &Blocks,
    events: &[DiskEvent],
    sample: &mut Sample,
    each: &mut impl FnMut(usize, &Blocks),
) {
    let mut synced = start.clone();
    let mut unsynced: Vec<&DiskEvent> = Vec::new();
    for at in 0..=events.len() {
        images(&synced, &unsynced, sample, &mut |image| each(at, image));
        match events.get(at) {
            Some(DiskEvent::Sync) => unsynced.drain(..).for_each(|e| apply(&mut synced, e)),
            Some(event) => unsynced.push(event),
            None => {}
        }
    }
}

pub fn image_of(disk: &MemoryDisk) -> Blocks {
    let read = |number: u64| {
        let mut bytes = vec![0; BLOCK_SIZE];
        disk.read_at(number * BLOCK_SIZE as u64, &mut bytes).expect("inside the disk");
        (number, Arc::<[u8]>::from(bytes))
    };
    let written = disk.written_blocks().into_iter().map(read);
    written.filter(|(_, b)| b.iter().any(|x| *x != 0)).collect()
}

type History = Rc<Vec<SharedEntry>>;

/// State that a crash may leave: no less than `floor`, and a prefix of one of the histories.
#[derive(Clone)]
struct Allowed {
    events: usize,
    floor: u64,
    histories: Vec<History>,
}

impl Allowed {
    fn now(world: &World) -> Self {
        let branches = world.branches.iter().chain([&world.history]);
        Allowed {
            events: world.disk.event_count(),
            floor: world.floor,
            histories: branches.map(|h| Rc::new(h.clone())).collect(),
        }
    }
}

/// Images of a crash in a recovery that are looked at, of each that is crashed.
const IMAGES_OF_AN_OPEN: u64 = 12;
/// Crashes in recoveries, one after the other.
const CRASHES_IN_A_ROW: u32 = 2;

#[derive(Default)]
struct Checker {
    contents: HashMap<(u64, u64), ModelPool>,
    images: u64,
    shorter: u64,
    /// Images that a crash left in the middle of an open, and of an open after such a crash.
    in_opens: [u64; CRASHES_IN_A_ROW as usize],
}

impl Checker {
    /// Opens the image as a start after the crash does, and compares it with the model.
    fn check(&mut self, size: u64, image: &Blocks, allowed: &[&Allowed]) {
        self.images += 1;
        self.check_again(size, image, allowed, CRASHES_IN_A_ROW);
    }

    fn check_again(&mut self, size: u64, image: &Blocks, allowed: &[&Allowed], crashes: u32) {
        let disk = disk_of(size, image);
        disk.record();
        let mut pool = Pool::open(disk.clone(), options()).expect("a pool that opens");
        let mut real = pool.replica(GUID).expect("the replica");
        let state = real.state();
        assert!(!real.meta().damaged, "nothing was damaged");
        let position = state.position.lsn.0;
        let floor = allowed.iter().map(|a| a.floor).min().expect("some moment");
        assert!(position >= floor, "{position} is left, {floor} was durable");
        let histories = allowed.iter().flat_map(|a| &a.histories);
        let history = histories
            .filter(|h| h.len() as u64 >= position)
            .find(|h| position == 0 || h[position as usize - 1].chain == state.chain)
            .expect("a history that was written");
        self.shorter += u64::from(position < history.len() as u64);
        let entries = &history[..position as usize];
        let key = (position, state.chain.0);
        let model = self.contents.entry(key).or_insert_with(|| model_of(entries));
        common::assert_same(&mut real, &mut model.replica(GUID).expect("the model's"));
        drop(pool);
        let events = disk.events();
        // Recovery ended durably: power lost right after it leaves the same.
        disk.power_cut(|| false);
        let mut again = Pool::open(disk, options()).expect("a pool that opens again");
        let again = again.replica(GUID).expect("the replica").state();
        assert_eq!((again.position, again.chain), (state.position, state.chain), "recovered twice");
        let spread = self.images.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57;
        let is_first = crashes == CRASHES_IN_A_ROW;
        if crashes == 0 || (is_first && (spread * 100) >> 7 >= setting("QUOIN_CRASH_OPENS", 8)) {
            return;
        }
        // An open that crashes leaves no less than it was to recover.
        let mut sample = Sample { total: 1, budget: 0, seen: 0 };
        walk(image, &events, &mut sample, &mut |_, _| {});
        let budget = if is_first { IMAGES_OF_AN_OPEN } else { IMAGES_OF_AN_OPEN / 4 };
        let mut sample = Sample { total: sample.seen, budget, seen: 0 };
        walk(image, &events, &mut sample, &mut |_, left| {
            self.in_opens[(CRASHES_IN_A_ROW - crashes) as usize] += 1;
            self.check_again(size, left, allowed, crashes - 1);
        });
    }
}

/// Runs a workload of `steps` steps and crashes it everywhere.
fn enumerate(mut world: World, steps: u32, step: impl Fn(&mut World)) -> Checker {
    let start = image_of(&world.disk);
    world.disk.sync().expect("a sync");
    world.disk.record();
    let mut moments = vec![Allowed::now(&world)];
    for _ in 0..steps {
        step(&mut world);
        moments.push(Allowed::now(&world));
    }
    let events = world.disk.events();
    let mut checker = Checker::default();
    crash_everywhere(&start, &events, |at, image| {
        // The step that a crash fell into may or may not have got as far as it wanted.
        let after = moments.partition_point(|m| m.events < at).min(moments.len() - 1);
        let before = after.saturating_sub(1);
        // Steps that did nothing to the disk still move the floor and the history.
        let until = moments.partition_point(|m| m.events <= at).max(after + 1);
        let allowed: Vec<&Allowed> = moments[before..until.min(moments.len())].iter().collect();
        checker.check(world.disk.size(), image, &allowed);
    });
    checker
}

fn background(world: &mut World, budget: u64) {
    match world.pool().background(budget) {
        Ok(_) | Err(StoreError::Full) => {}
        Err(error) => panic!("{error}"),
    }
}

fn step(world: &mut World) {
    match world.rng.random_range(0..100) {
        0..40 => world.append(),
        40..55 => world.set_stable(),
        55..60 => world.truncate(),
        60..75 => world.begin_sync(),
        75..85 => world.finish_sync(),
        _ => background(world, 1 << 20),
    }
}

fn seeds() -> std::ops::Range<u64> {
    0..setting("QUOIN_CRASH_SEEDS", 2)
}

#[test]
fn every_crash_of_appends_truncations_and_syncs_leaves_what_the_model_allows() {
    for seed in seeds() {
        println!("seed {seed}");
        let checker = enumerate(World::new(seed, 8 << 20), 60, step);
        assert!(checker.images > 150 && checker.shorter > 10, "{} images", checker.images);
        let [once, twice] = checker.in_opens;
        assert!(once > 50 && twice > 50, "{once} crashes in opens, {twice} in the next ones");
    }
}

/// Single blocks over and over in a pool that is nearly full: folds, commits, moved blocks, freed
/// and reused segments.
#[test]
fn every_crash_of_checkpoints_and_clean_up_leaves_what_the_model_allows() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut world = World::new(1000 + seed, 5 << 20);
        // Up to the pressure, without looking.
        for _ in 0..400 {
            step(&mut world);
            if let Some(mut replica) = world.pool.as_mut().expect("open").replica(GUID) {
                let all = replica.state().position.lsn;
                replica.set_stable(all);
            }
        }
        let before = world.pool().stats().used_bytes;
        let checker = enumerate(world, 40, |world| {
            world.append();
            let all = world.pool().replica(GUID).expect("it").state().position.lsn;
            world.pool().replica(GUID).expect("it").set_stable(all);
            world.model.replica(GUID).expect("it").set_stable(all);
            for _ in 0..3 {
                background(world, 2 << 20);
                world.begin_sync();
                world.finish_sync();
            }
        });
        assert!(before > 2 << 20, "the pool was never short of space");
        assert!(checker.images > 100, "{} images", checker.images);
        let [once, twice] = checker.in_opens;
        assert!(once > 50 && twice > 50, "{once} crashes in opens, {twice} in the next ones");
    }
}

#[test]
fn every_crash_of_making_a_pool_leaves_none_or_an_empty_one() {
    let size = 4 << 20;
    let disk = MemoryDisk::new(size);
    disk.record();
    Pool::format(&disk, &format_options()).expect("a fit disk");
    let mut none = 0;
    let events = disk.events();
    let last = events.len();
    assert!(Pool::open(disk.fork(), options()).is_ok(), "a pool that was made is there");
    crash_everywhere(&Blocks::new(), &events, |at, i| {
        match Pool::open(disk_of(size, i), options()) {
            Ok(pool) => {
                assert!(pool.replicas().is_empty() && pool.starts() >= 1);
            }
            Err(_) => {
                assert!(at < last, "a pool that was made is there");
                none += 1;
                // A half-made pool can be made anew.
                let anew = quoin_store::FormatOptions { overwrite: true, ..format_options() };
                let disk = disk_of(size, i);
                Pool::format(&disk, &anew).expect("made over what was half-made");
                Pool::open(disk, options()).expect("a pool");
            }
        }
    });
    assert!(none > 10, "{none} images of no pool");
}

#[test]
fn every_crash_of_creating_and_deleting_a_replica_leaves_all_of_it_or_nothing() {
    let (disk, mut pool) = common::new_pool(4 << 20);
    let start = image_of(&disk);
    disk.record();
    let guid = |n: u128| ReplicaGuid(100 + n);
    let mut durable = Vec::new();
    for n in 0..4 {
        pool.create(identity(guid(n)), ReplicaMeta::default(), 64).expect("room");
        pool.request_sync();
        sync(&mut pool);
        durable.push((disk.event_count(), guid(n), true));
        if n % 2 == 1 {
            assert!(pool.delete(guid(n)).expect("room"));
            pool.request_sync();
            sync(&mut pool);
            durable.push((disk.event_count(), guid(n), false));
        }
    }
    let mut seen = 0;
    crash_everywhere(&start, &disk.events(), |at, image| {
        let mut pool = Pool::open(disk_of(disk.size(), image), options()).expect("a pool");
        for n in 0..4 {
            let word = durable.iter().rfind(|(by, g, _)| *by <= at && *g == guid(n));
            let (there, retired) = (pool.replica(guid(n)).is_some(), pool.is_retired(guid(n)));
            assert!(!(there && retired), "a deleted GUID never comes back");
            match word {
                Some((_, _, false)) => assert!(!there && retired, "the delete was durable"),
                Some((_, _, true)) => assert!(there || retired, "the creation was durable"),
                None => {}
            }
            if let Some(replica) = pool.replica(guid(n)) {
                let state = replica.state();
                assert_eq!((state.position.lsn, state.volume_blocks), (Lsn::ZERO, 64));
                assert_eq!(replica.identity(), &identity(guid(n)), "whole, or not at all");
                seen += 1;
            }
        }
    });
    assert!(seen > 20);
}

/// Up to the flip the copy is what it was, then it is the source: at no crash anything between.
#[test]
fn every_crash_of_an_increment_leaves_the_copy_before_it_or_after_it() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut source = World::new(500 + seed, 32 << 20);
        (0..60).for_each(|_| source.append());
        let (disk, mut pool) = common::new_pool(16 << 20);
        pool.create(identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room");
        pool.request_sync();
        sync(&mut pool);
        let start = image_of(&disk);
        disk.record();

        let all = source.pool().replica(GUID).expect("it").state().position.lsn;
        source.pool().replica(GUID).expect("it").set_stable(all);
        while source.pool().background(1 << 20).expect("background work") {
            sync(source.pool());
        }
        source.pool().settle().expect("a checkpoint of everything");
        let mut from = source.pool().replica(GUID).expect("it");
        let snapshots = from.snapshots();
        let mut to = pool.replica(GUID).expect("the copy");
        to.increment_begin(1, Lsn::ZERO).expect("a start");
        let mut done = Lsn::ZERO;
        for info in &snapshots {
            let (slots, _) = pull_all(&mut from, ReadView::Snapshot(info.id), done);
            to.increment_feed(1, &slots, BLOCKS).expect("fed");
            to.increment_cut(1, *info, &CutHead::default()).expect("a cut");
            done = info.lsn;
        }
        let (slots, end) = pull_all(&mut from, ReadView::Base, done);
        to.increment_feed(1, &slots, BLOCKS).expect("fed");
        to.increment_prepare(1, &end).expect("prepared");
        sync_all(&mut pool);
        let flipped_from = disk.event_count();
        pool.replica(GUID).expect("the copy").increment_flip(1).expect("the flip");
        sync_all(&mut pool);
        let flipped_by = disk.event_count();
        while pool.background(1 << 20).expect("background work") {
            sync(&mut pool);
        }
        sync_all(&mut pool);

        let (mut before, mut after) = (0, 0);
        let expected = flat(&read_all(&mut from, ReadView::Base, BLOCKS));
        crash_everywhere(&start, &disk.events(), |at, image| {
            let mut pool = Pool::open(disk_of(disk.size(), image), options()).expect("a pool");
            let mut copy = pool.replica(GUID).expect("the copy");
            assert!(!copy.meta().damaged);
            let position = copy.state().position.lsn;
            if position == Lsn::ZERO {
                assert!(at < flipped_by, "the flip was durable");
                let slots = flat(&read_all(&mut copy, ReadView::Live, BLOCKS));
                assert!(slots.iter().all(|(_, version, data)| *version == 0 && data.is_none()));
                assert!(copy.snapshots().is_empty());
                before += 1;
                return;
            }
            assert!(at > flipped_from, "visible before the flip");
            assert_eq!(position, end.position.lsn);
            assert_eq!(copy.snapshots(), snapshots);
            assert!(flat(&read_all(&mut copy, ReadView::Live, BLOCKS)) == expected);
            after += 1;
        });
        assert!(before > 10 && after > 1, "{before} before, {after} after");
    }
}

/// A sync that began before the flip makes nothing of the flip durable, so what the flip gives up
/// must outlive its end: else the next writes land in what the state before it still needs.
#[test]
fn every_crash_behind_a_flip_that_a_sync_was_under_way_for_leaves_a_whole_copy() {
    const OTHER: ReplicaGuid = ReplicaGuid(0x07e4);
    for seed in seeds() {
        println!("seed {seed}");
        let mut old = World::new(700 + seed, 16 << 20);
        (0..40).for_each(|_| old.append());
        let mut source = World::new(800 + seed, 32 << 20);
        (0..90).for_each(|_| source.append());
        source.set_stable_at_the_end();
        source.pool().settle().expect("a checkpoint of everything");
        let mut from = source.pool().replica(GUID).expect("it");
        let (slots, mut end) = pull_all(&mut from, ReadView::Base, Lsn::ZERO);
        end.snapshots.clear();
        let new = flat(&read_all(&mut from, ReadView::Base, BLOCKS));

        let (disk, mut pool) = common::new_pool(16 << 20);
        for guid in [GUID, OTHER] {
            pool.create(identity(guid), ReplicaMeta::default(), BLOCKS).expect("room");
        }
        let mut copy = pool.replica(GUID).expect("the copy");
        copy.append(&old.history).expect("room");
        copy.set_stable(Lsn(old.history.len() as u64));
        pool.settle().expect("recorded");
        let before = flat(&read_all(&mut pool.replica(GUID).expect("it"), ReadView::Live, BLOCKS));
        let mut copy = pool.replica(GUID).expect("the copy");
        copy.increment_begin(1, Lsn::ZERO).expect("a start");
        copy.increment_feed(1, &slots, BLOCKS).expect("fed");
        copy.increment_prepare(1, &end).expect("prepared");
        sync_all(&mut pool);
        let start = image_of(&disk);
        disk.record();
        pool.request_sync();
        let under_way = pool.sync_wanted().expect("a sync");
        disk.sync().expect("a sync");
        pool.replica(GUID).expect("the copy").increment_flip(1).expect("the flip");
        pool.sync_finished(under_way, Ok(())).expect("a sync");
        // Into what is free now.
        let mut other = pool.replica(OTHER).expect("the other one");
        other.append(&source.history[..60.min(source.history.len())]).expect("room");
        let unsynced = disk.event_count();
        let free = pool.stats().free_bytes;
        sync_all(&mut pool);
        sync_all(&mut pool);
        let gained = pool.stats().free_bytes.saturating_sub(free);

        let mut seen = [0, 0];
        crash_everywhere(&start, &disk.events(), |at, image| {
            let mut pool = Pool::open(disk_of(disk.size(), image), options()).expect("a pool");
            let mut copy = pool.replica(GUID).expect("the copy");
            assert!(!copy.meta().damaged);
            let is_new = copy.state().position == end.position;
            assert!(is_new || at <= unsynced, "the flip was durable");
            let expected = if is_new { &new } else { &before };
            assert!(flat(&read_all(&mut copy, ReadView::Live, BLOCKS)) == *expected);
            seen[usize::from(is_new)] += 1;
        });
        assert!(seen.iter().all(|n| *n > 5), "{seen:?} before and after the flip");
        assert!(gained > 0, "the old state is given up in the end");
    }
}

fn sync_all(pool: &mut Pool<MemoryDisk>) {
    pool.request_sync();
    sync(pool);
}
