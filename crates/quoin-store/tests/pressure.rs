//! A full pool keeps its room for Views, promises and deletes; trimmed space comes back.

use crate::common;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::common::{identity, new_pool, options, sync};
use bytes::Bytes;
use quoin_replication::replica::store::{
    CloneSource, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
};
use quoin_store::{Cloned, Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{ReadView, RoomGrant, Takes};
use quoin_types::{
    Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId, VolumeId,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const GUID: ReplicaGuid = ReplicaGuid(0xf);

struct Writer {
    pool: Pool<MemoryDisk>,
    /// The replica that is written to.
    guid: ReplicaGuid,
    chain: Chain,
    lsn: u64,
}

impl Writer {
    fn new(pool_bytes: u64, blocks: u64) -> Self {
        Self::on(new_pool(pool_bytes).1, blocks)
    }

    fn on(mut pool: Pool<MemoryDisk>, blocks: u64) -> Self {
        pool.create(identity(GUID), ReplicaMeta::default(), blocks).expect("room");
        Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 }
    }

    fn entry(&self, kind: EntryKind, lba: u64, blocks: u32) -> Arc<Entry> {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let data = match kind {
            EntryKind::Write => Bytes::from(vec![self.lsn as u8; blocks as usize * 4096]),
            _ => Bytes::new(),
        };
        Arc::new(Entry::after(self.chain, position, kind, lba, blocks, data, false))
    }

    fn append(&mut self, kind: EntryKind, lba: u64, blocks: u32) -> Result<(), StoreError> {
        let entry = self.entry(kind, lba, blocks);
        let mut replica = self.pool.replica(self.guid).expect("it");
        replica.append(std::slice::from_ref(&entry))?;
        (self.chain, self.lsn) = (entry.chain, self.lsn + 1);
        replica.set_stable(entry.lsn);
        Ok(())
    }

    /// All background work there is: what one round frees the next one may write to.
    fn clean_up(&mut self) {
        for _ in 0..4 {
            while self.pool.background_due() != Due::Idle {
                self.pool.background(4 << 20).expect("background work");
            }
            self.pool.settle().expect("recorded");
        }
    }

    /// Work of a driver between two rounds of requests.
    fn housekeeping(&mut self) {
        if self.pool.background_due() > Due::Idle {
            self.pool.background(4 << 20).expect("background work");
        }
        sync(&mut self.pool);
    }

    /// Every block has the content that was written last.
    fn check(&mut self, view: ReadView, last: &[u64]) {
        let mut replica = self.pool.replica(GUID).expect("it");
        let slots = common::read_all(&mut replica, view, last.len() as u64);
        for ((lba, version, data), lsn) in common::flat(&slots).into_iter().zip(last) {
            assert_eq!(version, *lsn, "the version of block {lba}");
            let data = data.expect("no block is a hole");
            assert!(data.iter().all(|b| *b == (lsn - 1) as u8), "the content of block {lba}");
        }
    }
}

#[test]
fn a_full_pool_still_takes_views_promises_and_deletes_and_trim_gives_space_back() {
    let mut writer = Writer::new(8 << 20, 4000);
    let mut lba = 0;
    while writer.append(EntryKind::Write, lba, 8).is_ok() {
        lba += 8;
        assert!(lba < 3990, "the pool never filled up");
    }
    for _ in 0..20 {
        let view = EntryKind::View(Box::new(common::some_view()));
        writer.append(view, 0, 0).expect("a View has room in a full pool");
        let id = quoin_types::SnapshotId(1);
        writer.append(EntryKind::DeleteSnapshot { id }, 0, 0).expect("and so has a delete");
    }
    let mut replica = writer.pool.replica(GUID).expect("it");
    let meta = ReplicaMeta { promised: Epoch(9), ..replica.meta().clone() };
    replica.put_meta(meta).expect("and a promise");
    let free = writer.pool.stats().free_bytes;
    // A delete of the replica gives everything back.
    assert_eq!(writer.pool.delete(GUID), Ok(true));
    sync(&mut writer.pool);
    assert!(writer.pool.stats().free_bytes > free + (5 << 20));
    assert!(writer.pool.create(identity(GUID), ReplicaMeta::default(), 8).is_err());

    let mut writer = Writer::new(8 << 20, 4000);
    for lba in (0..1000).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
    }
    let before = writer.pool.stats().free_bytes;
    writer.append(EntryKind::Trim, 0, 1000).expect("a trim");
    writer.pool.settle().expect("folded");
    for _ in 0..200 {
        writer.pool.background(4 << 20).expect("background work");
        sync(&mut writer.pool);
    }
    let gained = writer.pool.stats().free_bytes - before;
    assert!(gained > 3 << 20, "a trim of 4 MiB gave {gained} bytes back");
}

/// A client that trims an idle volume writes nothing that would make a fold due.
#[test]
fn trimmed_space_of_a_resting_replica_is_free_again_without_further_writes() {
    let mut writer = Writer::new(64 << 20, 4000);
    for lba in (0..4000).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
    }
    let rest = |writer: &mut Writer| {
        for _ in 0..200 {
            writer.housekeeping();
        }
        assert_eq!(writer.pool.background_due(), Due::Idle, "it does not come to rest");
        writer.pool.stats().used_bytes
    };
    let full = rest(&mut writer);
    // All that it takes is an entry without data.
    writer.append(EntryKind::Trim, 0, 3600).expect("a trim");
    let used = rest(&mut writer);
    assert!(used < full / 4, "{used} of {full} are still used after a trim of nine tenths");
    let mut replica = writer.pool.replica(GUID).expect("it");
    let slots = common::read_all(&mut replica, ReadView::Live, 4000);
    let (gone, kept) = (0..3600, 3600..4000);
    for (lba, _, data) in common::flat(&slots) {
        assert!(!gone.contains(&lba) || data.is_none(), "block {lba} is no hole");
        assert!(!kept.contains(&lba) || data.is_some(), "block {lba} is lost");
    }
}

/// Clean-up by itself leaves segments alone of which less than half is dead while space is plenty.
#[test]
fn what_is_dead_of_a_replica_is_given_back_where_that_is_asked_for_though_space_is_plenty() {
    const LIVE: u64 = 8192;
    let mut writer = Writer::new(256 << 20, LIVE);
    let mut last = vec![0; LIVE as usize];
    for lba in (0..LIVE).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
        last[lba as usize..][..8].fill(writer.lsn);
        writer.housekeeping();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for _ in 0..LIVE / 8 {
        let lba = rng.random_range(0..LIVE / 4) * 4;
        writer.append(EntryKind::Write, lba, 4).expect("room");
        last[lba as usize..][..4].fill(writer.lsn);
        writer.housekeeping();
    }
    let rest = |writer: &mut Writer| {
        for _ in 0..400 {
            writer.housekeeping();
        }
        assert_eq!(writer.pool.background_due(), Due::Idle, "it does not come to rest");
        writer.pool.replica_stats(GUID).expect("it")
    };
    let before = rest(&mut writer);
    let dead =
        |stats: quoin_store::ReplicaStats| 100 - (stats.live_bytes * 100 / stats.allocated_bytes);
    assert!(dead(before) > 20, "{before:?}: the test has nothing to give back");
    assert!(!writer.pool.is_reclaiming(GUID));
    writer.pool.reclaim(GUID);
    assert!(writer.pool.is_reclaiming(GUID));
    let mut rounds = 0;
    while writer.pool.is_reclaiming(GUID) {
        writer.housekeeping();
        rounds += 1;
        assert!(rounds < 2000, "it does not end");
    }
    writer.pool.end_reclaim(GUID);
    let after = rest(&mut writer);
    println!("{before:?} became {after:?} in {rounds} rounds");
    assert!(after.allocated_bytes < before.allocated_bytes - (4 << 20), "{before:?} {after:?}");
    // Open segments and those of nodes stay as they are.
    assert!(dead(after) < 20, "{after:?}");
    writer.check(ReadView::Live, &last);
    // Again there is next to nothing to do, and of a replica that is not there nothing at all.
    writer.pool.reclaim(GUID);
    for _ in 0..50 {
        writer.housekeeping();
    }
    assert!(!writer.pool.is_reclaiming(GUID));
    writer.pool.reclaim(ReplicaGuid(0x77));
    assert!(!writer.pool.is_reclaiming(ReplicaGuid(0x77)));
}

/// Counted twice, a segment looks fuller than one that is worth emptying, and its room is lost.
/// Found by the simulator's check of the space in use once everything was trimmed.
#[test]
fn a_restart_counts_no_block_of_the_log_twice() {
    let (disk, pool) = new_pool(8 << 20);
    let mut writer = Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 };
    writer.pool.create(identity(GUID), ReplicaMeta::default(), 4000).expect("room");
    for lba in (0..80).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
    }
    // These stay in the log: they are above stable as the state is recorded.
    for lba in (80..400).step_by(8) {
        let entry = writer.entry(EntryKind::Write, lba, 8);
        let mut replica = writer.pool.replica(GUID).expect("it");
        replica.append(std::slice::from_ref(&entry)).expect("room");
        (writer.chain, writer.lsn) = (entry.chain, writer.lsn + 1);
    }
    writer.pool.settle().expect("folded up to stable and recorded");
    let live = |pool: &Pool<MemoryDisk>| pool.replica_stats(GUID).expect("it").live_bytes;
    let before = live(&writer.pool);
    assert!(before >= 400 * 4096, "{before}");
    drop(writer);
    let pool = Pool::open(disk, common::options()).expect("a sound pool");
    assert_eq!(live(&pool), before);
}

/// Batches of entries that a truncation took away kept the log from moving on, until entries had
/// the same LSNs again. Found by the simulator's check of the space in use after a full trim.
#[test]
fn what_a_truncation_took_away_gives_its_room_back_though_its_lsns_never_come_again() {
    for restarts in [false, true] {
        let (disk, pool) = new_pool(16 << 20);
        let mut writer = Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 };
        writer.pool.create(identity(GUID), ReplicaMeta::default(), 4000).expect("room");
        writer.append(EntryKind::Write, 0, 8).expect("room");
        let (chain, keep) = (writer.chain, writer.lsn);
        let above_stable = |writer: &mut Writer, lba| {
            let entry = writer.entry(EntryKind::Write, lba, 8);
            let mut replica = writer.pool.replica(GUID).expect("it");
            replica.append(std::slice::from_ref(&entry)).expect("room");
            (writer.chain, writer.lsn) = (entry.chain, writer.lsn + 1);
        };
        for lba in (0..1200).step_by(8) {
            above_stable(&mut writer, lba);
        }
        let long = writer.pool.stats().used_bytes;
        assert!(long > 4 << 20, "{long}");
        writer.pool.replica(GUID).expect("it").truncate(Lsn(keep)).expect("above stable");
        (writer.chain, writer.lsn) = (chain, keep);
        above_stable(&mut writer, 0);
        sync(&mut writer.pool);
        if restarts {
            // The open finds the same batches, and knows of the truncation.
            writer.pool = Pool::open(disk, common::options()).expect("a sound pool");
        }
        writer.append(EntryKind::Trim, 0, 4000).expect("a trim");
        for _ in 0..4 {
            writer.pool.settle().expect("folded and recorded");
            while writer.pool.background_due() != Due::Idle {
                writer.pool.background(4 << 20).expect("background work");
            }
        }
        let used = writer.pool.stats().used_bytes;
        assert!(used < long / 2, "{used} of {long}, restarts: {restarts}");
    }
}

/// The need of a replica to count anew was forgotten with the process. Found by the simulator's
/// check of the space in use once everything was trimmed.
#[test]
fn the_room_of_a_view_that_went_away_just_before_a_crash_comes_back_after_it() {
    let (disk, pool) = new_pool(16 << 20);
    let mut writer = Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 };
    writer.pool.create(identity(GUID), ReplicaMeta::default(), 4000).expect("room");
    for lba in (0..1200).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room");
    }
    let id = quoin_types::SnapshotId(1);
    writer.append(EntryKind::Snapshot { id, hidden: true }, 0, 0).expect("room");
    writer.pool.settle().expect("folded and recorded");
    writer.append(EntryKind::Trim, 0, 4000).expect("a trim");
    writer.pool.settle().expect("folded and recorded");
    let long = writer.pool.stats().used_bytes;
    writer.append(EntryKind::DeleteSnapshot { id }, 0, 0).expect("a delete");
    writer.pool.settle().expect("folded and recorded");
    writer.pool = Pool::open(disk, common::options()).expect("a sound pool");
    writer.clean_up();
    let used = writer.pool.stats().used_bytes;
    assert!(used < long / 4, "{used} of {long}");
}

/// The need to count anew was recorded by the next commit alone. Found by the simulator's check of
/// the space in use once everything was trimmed.
#[test]
fn the_room_of_log_that_a_rebuild_replaced_comes_back_though_the_pool_dies_after_the_flip() {
    common::break_a_rule();
    let begun = |pool| {
        let mut writer = Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 };
        writer.pool.create(identity(GUID), ReplicaMeta::default(), 4000).expect("room");
        writer.append(EntryKind::Write, 0, 8).expect("room");
        writer.pool.settle().expect("folded and recorded");
        writer
    };
    let mut source = begun(new_pool(16 << 20).1);
    let from = Lsn(source.lsn);
    source.append(EntryKind::Trim, 0, 4000).expect("a trim");
    source.pool.settle().expect("folded and recorded");
    let mut replica = source.pool.replica(GUID).expect("it");
    let (slots, end) = common::pull_all(&mut replica, ReadView::Base, from);

    let (disk, pool) = new_pool(16 << 20);
    let mut writer = begun(pool);
    for lba in (0..1200).step_by(8) {
        let entry = writer.entry(EntryKind::Write, lba, 8);
        let mut copy = writer.pool.replica(GUID).expect("it");
        copy.append(std::slice::from_ref(&entry)).expect("room");
        (writer.chain, writer.lsn) = (entry.chain, writer.lsn + 1);
    }
    sync(&mut writer.pool);
    let long = writer.pool.stats().used_bytes;
    let mut copy = writer.pool.replica(GUID).expect("it");
    common::begin_increment(&mut copy, 1, from);
    copy.increment_feed(1, &slots, 4000).expect("fed");
    copy.increment_prepare(1, &end).expect("prepared");
    sync(&mut writer.pool);
    writer.pool.replica(GUID).expect("it").increment_flip(1).expect("the flip");
    writer.pool = Pool::open(disk, common::options()).expect("a sound pool");
    writer.clean_up();
    let used = writer.pool.stats().used_bytes;
    assert!(used < long / 4, "{used} of {long}");
}

/// Overwrites single blocks of a pool that is `live` full, with the background work that a
/// driver does after each; returns blocks written to the disk for each block overwritten.
fn overwrites(pool_bytes: u64, live: u64, writes: u64) -> f64 {
    let mut writer = Writer::new(pool_bytes, live);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut last = vec![0; live as usize];
    for lba in 0..live {
        writer.append(EntryKind::Write, lba, 1).expect("the first fill");
        last[lba as usize] = writer.lsn;
        writer.housekeeping();
    }
    let before = writer.pool.disk().written_bytes();
    for done in 0..writes {
        let lba = rng.random_range(0..live);
        let appended = writer.append(EntryKind::Write, lba, 1);
        assert!(appended.is_ok(), "{appended:?} after {done}: {:?}", writer.pool.stats());
        last[lba as usize] = writer.lsn;
        writer.housekeeping();
    }
    let written = writer.pool.disk().written_bytes() - before;

    // All that is left to do comes to an end, and everything is there, now and after a start.
    let mut rounds = 0;
    while writer.pool.background_due() > Due::Idle {
        writer.housekeeping();
        rounds += 1;
        assert!(rounds < 10_000, "background work does not end: {:?}", writer.pool.stats());
    }
    let disk = writer.pool.disk().clone();
    writer.check(ReadView::Live, &last);
    writer.pool = Pool::open(disk, common::options()).expect("a pool");
    writer.check(ReadView::Live, &last);
    written as f64 / 4096.0 / writes as f64
}

#[test]
fn a_pool_at_seventy_percent_takes_overwrites_for_ever() {
    // 55 segments of 30 packed blocks: the smallest pools have the least room for clean-up.
    let written = overwrites(8 << 20, 1200, 20_000);
    println!("small pool at 68 %: {written:.1} blocks written for each block overwritten");
    assert!(written < 20.0, "{written:.1} blocks written for each block overwritten");
}

#[test]
fn a_pool_whose_live_data_are_three_quarters_of_it_refuses_no_overwrite() {
    // 247 segments of 32 blocks.
    let written = overwrites(32 << 20, 247 * 32 * 3 / 4, 20_000);
    println!("pool at 75 %: {written:.1} blocks written for each block overwritten");
    assert!(written < 30.0, "{written:.1} blocks written for each block overwritten");
}

/// Overwrites single blocks of a volume in a pool of units of 256 KiB, with a snapshot after each
/// `between` of them and the oldest of more than `kept` deleted. Returns blocks written to the disk for
/// each block overwritten, once there are so many snapshots.
fn overwrites_beside(kept: usize, live: u64, pool_blocks: u64, between: u64, writes: u64) -> f64 {
    let disk = MemoryDisk::new(pool_blocks * 4096);
    let shape = FormatOptions { unit_blocks: 64, ..common::format_options() };
    Pool::format(&disk, &shape).expect("a fit disk");
    let options = PoolOptions { cache_bytes: 16 << 20, ..options() };
    let mut writer = Writer::on(Pool::open(disk, options).expect("a pool"), live);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for lba in 0..live {
        writer.append(EntryKind::Write, lba, 1).expect("the first fill");
        writer.housekeeping();
    }
    let (mut snapshots, mut next, mut before) = (std::collections::VecDeque::new(), 1, 0);
    let warm_up = between * kept as u64 * 2;
    for done in 0..warm_up + writes {
        if done == warm_up {
            before = writer.pool.disk().written_bytes();
        }
        if kept > 0 && done.is_multiple_of(between) {
            let id = SnapshotId(next);
            next += 1;
            writer.append(EntryKind::Snapshot { id, hidden: false }, 0, 0).expect("room");
            snapshots.push_back(id);
            if snapshots.len() > kept {
                let id = snapshots.pop_front().expect("one");
                writer.append(EntryKind::DeleteSnapshot { id }, 0, 0).expect("room");
            }
        }
        let lba = rng.random_range(0..live);
        let appended = writer.append(EntryKind::Write, lba, 1);
        assert!(appended.is_ok(), "{appended:?} after {done}: {:?}", writer.pool.stats());
        writer.housekeeping();
    }
    let written = writer.pool.disk().written_bytes() - before;
    written as f64 / 4096.0 / writes as f64
}

/// Moved blocks keep their names, so no leaf of a snapshot is written anew for them.
#[test]
fn rotating_snapshots_at_most_double_what_an_overwrite_costs_in_a_pool_as_full() {
    let without = overwrites_beside(0, 9600, 14_000, 1, 20_000);
    // Forty snapshots keep some 2,400 blocks and 1,200 of leaves beside 6,000 live ones.
    let beside = overwrites_beside(40, 6000, 14_000, 60, 20_000);
    println!("{without:.1} blocks written for one without snapshots, {beside:.1} beside 40");
    assert!(beside <= 2.0 * without, "{beside:.1} beside forty snapshots, {without:.1} without");
}

/// A volume that waits for room overwrites nothing, so that no block would die and it would wait for ever.
#[test]
fn a_pool_of_which_most_is_live_is_not_short_while_its_blocks_are_overwritten() {
    const POOL_BLOCKS: u64 = 64 << 10;
    let disk = MemoryDisk::new(POOL_BLOCKS * 4096);
    let shape = FormatOptions { unit_blocks: 512, ..common::format_options() };
    Pool::format(&disk, &shape).expect("a fit disk");
    let pool = Pool::open(disk, PoolOptions::default()).expect("a pool");
    let stats = pool.stats();
    let live = (stats.size_bytes - stats.reserve_bytes) / 4096 * 91 / 100;
    let mut writer = Writer::on(pool, live);
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for lba in (0..live).step_by(16) {
        writer.append(EntryKind::Write, lba, (live - lba).min(16) as u32).expect("room");
        writer.housekeeping();
    }
    for done in 0..30_000 {
        let lba = rng.random_range(0..live);
        writer.append(EntryKind::Write, lba, 1).expect("room");
        writer.housekeeping();
        assert!(!writer.pool.is_short(false), "short after {done}: {:?}", writer.pool.stats());
    }
    // Nor does it stay so once nothing more is gained.
    writer.clean_up();
    let free = writer.pool.stats().free_bytes as f64 / (POOL_BLOCKS * 4096) as f64;
    println!("{:.1} % are free", free * 100.0);
    assert!(!writer.pool.is_short(true), "{free:.3} of the pool are free");
}

/// Overwrites single blocks of `clones` of one image in turn, each within `own` blocks of its own that
/// lie all over the image. Returns blocks written to the disk for each block overwritten, once each of
/// those was written about twice, and the share of the pool that is live then.
fn overwrites_of_clones(clones: u64, image: u64, own: u64, pool_blocks: u64) -> (f64, f64) {
    let disk = MemoryDisk::new(pool_blocks * 4096);
    Pool::format(&disk, &common::format_options()).expect("a fit disk");
    let options = PoolOptions { cache_bytes: 16 << 20, ..options() };
    let mut writer = Writer::on(Pool::open(disk, options).expect("a pool"), image);
    for lba in (0..image).step_by(4) {
        writer.append(EntryKind::Write, lba, 4).expect("the first fill");
        writer.housekeeping();
    }
    let snapshot = SnapshotId(1);
    let kind = EntryKind::Snapshot { id: snapshot, hidden: false };
    writer.append(kind, 0, 0).expect("room");
    let source = CloneSource { volume: identity(GUID).volume, snapshot };
    let guids: Vec<_> =
        (1..=clones).map(|number| ReplicaGuid(GUID.0 + u128::from(number))).collect();
    for guid in &guids {
        let of = ReplicaIdentity { volume: VolumeId(guid.0), ..identity(*guid) };
        let make = |pool: &mut Pool<MemoryDisk>| {
            pool.create_clone(of.clone(), ReplicaMeta::default(), image, &source).expect("room")
        };
        while make(&mut writer.pool) == Cloned::NotYet {
            writer.housekeeping();
        }
    }
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (mut before, writes) = (0, 2 * clones * own);
    for done in 0..2 * writes {
        if done == writes {
            before = writer.pool.disk().written_bytes();
        }
        writer.guid = guids[rng.random_range(0..guids.len())];
        let state = writer.pool.replica(writer.guid).expect("it").state();
        (writer.chain, writer.lsn) = (state.chain, state.position.lsn.0);
        let lba = rng.random_range(0..own) * (image / own) + writer.guid.0 as u64 % (image / own);
        // A target waits where the pool takes no writes for a moment.
        let appended = (0..100).find_map(|_| {
            let appended = writer.append(EntryKind::Write, lba, 1);
            writer.housekeeping();
            appended.ok()
        });
        assert!(appended.is_some(), "no room after {done}: {:?}", writer.pool.stats());
    }
    let written = writer.pool.disk().written_bytes() - before;
    let members = guids.into_iter().chain([GUID]);
    let stats = members.filter_map(|guid| writer.pool.replica_stats(guid));
    let live: u64 = stats.map(|stats| stats.live_bytes).sum();
    let live = live as f64 / writer.pool.stats().size_bytes as f64;
    (written as f64 / 4096.0 / writes as f64, live)
}

/// A hundred logs that are open, and each clone's leaves, leave no room for more that is live.
#[test]
fn a_hundred_clones_at_most_double_what_an_overwrite_costs_in_a_pool_as_full() {
    const POOL_BLOCKS: u64 = 60_000;
    let (beside, live) = overwrites_of_clones(100, 36_000, 60, POOL_BLOCKS);
    let live_blocks = (POOL_BLOCKS as f64 * live) as u64;
    let without = overwrites_beside(0, live_blocks, POOL_BLOCKS, 1, 20_000);
    println!(
        "{without:.1} blocks written for one of a volume, {beside:.1} of a clone, {live:.2} live"
    );
    assert!(live > 0.7, "{live:.2} of the pool are live");
    assert!(beside <= 2.0 * without, "{beside:.1} of a clone, {without:.1} of a volume");
}

#[test]
fn a_pool_with_room_to_spare_does_not_sprawl() {
    // 4 MiB of data in a pool of 128 MiB, overwritten forty times.
    let (live, writes) = (1024u64, 40_960);
    let mut writer = Writer::new(128 << 20, live);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut most_used, mut most_log) = (0, 0);
    for done in 0..writes {
        writer.append(EntryKind::Write, rng.random_range(0..live), 1).expect("a write");
        writer.housekeeping();
        let stats = writer.pool.stats();
        // A single block in the log has a header of its own.
        most_log = most_log.max(2 * stats.log_bytes);
        if done > writes / 4 {
            most_used = most_used.max(stats.used_bytes);
        }
    }
    let bound = 3 * live * 4096 + most_log;
    println!("{most_used} bytes used at most, {most_log} of them log; the bound is {bound}");
    assert!(most_used < bound, "{most_used} bytes used, {most_log} of them log");
}

#[test]
fn a_preallocated_pool_keeps_its_space_and_a_sparse_one_gives_it_back() {
    for keeps_space in [false, true] {
        let disk = MemoryDisk::new(32 << 20);
        let format = FormatOptions { keeps_space, ..common::format_options() };
        Pool::format(&disk, &format).expect("a pool");
        // Known after the next start as well, by which the pool was made long ago.
        drop(Pool::open(disk.clone(), PoolOptions::default()).expect("a pool"));
        let pool = Pool::open(disk.clone(), PoolOptions::default()).expect("a pool");
        let mut writer = Writer::on(pool, 4000);
        for lba in (0..4000).step_by(4) {
            writer.append(EntryKind::Write, lba, 4).expect("room");
            writer.housekeeping();
        }
        let written = disk.written_blocks();
        writer.append(EntryKind::Trim, 0, 4000).expect("room");
        for lba in 0..2000 {
            writer.append(EntryKind::Write, lba % 64, 1).expect("room");
            writer.housekeeping();
        }
        let still: BTreeSet<u64> = disk.written_blocks().into_iter().collect();
        let given_back = written.iter().filter(|block| !still.contains(block)).count();
        assert_eq!(given_back == 0, keeps_space, "{given_back} blocks were given back");
    }
}

#[test]
fn background_work_in_a_pool_filled_to_the_brim_ends_and_trims_revive_it() {
    let mut writer = Writer::new(8 << 20, 4000);
    let mut lba = 0;
    while writer.append(EntryKind::Write, lba, 4).is_ok() {
        writer.housekeeping();
        lba += 4;
    }
    let mut rounds = 0;
    // Space that clean-up still gains is filled again, until there is nothing to gain.
    loop {
        while writer.pool.background_due() > Due::Idle {
            writer.housekeeping();
            rounds += 1;
            assert!(rounds < 2_000, "work without end: {:?}", writer.pool.stats());
        }
        if writer.append(EntryKind::Write, lba, 4).is_err() {
            break;
        }
        lba += 4;
    }
    let filled = lba as f64 * 4096.0 / writer.pool.stats().size_bytes as f64;
    println!("filled to {:.0} % in {rounds} more rounds", filled * 100.0);
    assert!(filled > 0.75, "{filled} of the pool could be filled");
    let written = writer.pool.disk().written_bytes();
    for _ in 0..100 {
        writer.housekeeping();
        assert_eq!(writer.append(EntryKind::Write, 0, 4), Err(StoreError::Full));
    }
    assert_eq!(writer.pool.disk().written_bytes(), written, "a pool at rest writes nothing");

    let trims = 40;
    for at in 0..trims {
        let blocks = lba / 2 / trims;
        let trimmed = writer.append(EntryKind::Trim, at * blocks, blocks as u32);
        trimmed.expect("a full pool takes trims");
    }
    while writer.pool.background_due() > Due::Idle {
        writer.housekeeping();
    }
    for lba in 0..lba / 8 {
        writer.append(EntryKind::Write, lba, 1).expect("trimmed space");
        writer.housekeeping();
    }
}

#[test]
fn snapshots_that_come_and_go_under_pressure_give_their_space_back() {
    let live = 2000;
    let mut writer = Writer::new(32 << 20, live);
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut last = vec![0; live as usize];
    let mut kept = std::collections::VecDeque::new();
    let mut most = 0;
    for done in 0..20_000u64 {
        if done >= live && done % 1000 == 0 {
            let id = quoin_types::SnapshotId(done.into());
            writer.append(EntryKind::Snapshot { id, hidden: false }, 0, 0).expect("a snapshot");
            kept.push_back((id, last.clone()));
            // Two of them hold what was overwritten since: about as much again as is live.
            if kept.len() > 2
                && let Some((id, _)) = kept.pop_front()
            {
                writer.append(EntryKind::DeleteSnapshot { id }, 0, 0).expect("a delete");
            }
        }
        let lba = if done < live { done } else { rng.random_range(0..live) };
        let appended = writer.append(EntryKind::Write, lba, 1);
        assert!(appended.is_ok(), "{appended:?} after {done}: {:?}", writer.pool.stats());
        last[lba as usize] = writer.lsn;
        writer.housekeeping();
        most = most.max(writer.pool.stats().used_bytes * 100 / writer.pool.stats().size_bytes);
    }
    assert!(most > 80, "no pressure: {most} % used at most");
    writer.check(ReadView::Live, &last);
    for (id, then) in &kept {
        writer.check(ReadView::Snapshot(*id), then);
    }
    let disk = writer.pool.disk().clone();
    writer.pool = Pool::open(disk, common::options()).expect("a pool");
    writer.check(ReadView::Live, &last);
    for (id, then) in &kept {
        writer.check(ReadView::Snapshot(*id), then);
    }
}

#[test]
fn clean_up_leaves_alone_what_the_disk_refuses_to_read_for_a_while() {
    let live = 1200;
    let mut writer = Writer::new(8 << 20, live);
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut last = vec![0; live as usize];
    for round in 0..4000u64 {
        let lba = if round < live { round } else { rng.random_range(0..live) };
        if writer.append(EntryKind::Write, lba, 1) == Err(StoreError::Full) {
            // What could not be read was not emptied. There is room once it is tried again.
            writer.pool.look_again();
            writer.clean_up();
            writer.append(EntryKind::Write, lba, 1).expect("room");
        }
        last[lba as usize] = writer.lsn;
        if round % 3 == 0 && round > 2000 {
            writer.pool.disk().fail_reads(true);
            for _ in 0..4 {
                // A failed step is allowed; a loss of unreadable data is not.
                let _ = writer.pool.background(1 << 20);
            }
            writer.pool.disk().fail_reads(false);
            sync(&mut writer.pool);
        } else {
            writer.housekeeping();
        }
    }
    writer.check(ReadView::Live, &last);
}

#[test]
fn a_pool_that_filled_up_while_its_disk_refused_reads_gives_room_again_by_itself() {
    let live = 400;
    let mut writer = Writer::new(8 << 20, live);
    writer.pool.disk().fail_reads(true);
    let full = (0..20_000u64).find(|round| {
        let full = writer.append(EntryKind::Write, round % live, 1).is_err();
        for _ in 0..4 {
            let _ = writer.pool.background(1 << 20);
        }
        sync(&mut writer.pool);
        full
    });
    assert!(full.is_some(), "nothing could be emptied, and it never filled up");
    writer.pool.disk().fail_reads(false);
    let room = (0..200).any(|_| {
        writer.pool.look_again();
        let _ = writer.pool.background(1 << 20);
        sync(&mut writer.pool);
        writer.append(EntryKind::Write, 0, 1).is_ok()
    });
    assert!(room, "{:?}", writer.pool.stats());
}

/// The file system below a sparse file may be full long before the pool is.
#[test]
fn what_is_full_below_a_pool_makes_it_full_and_not_broken_and_trims_revive_it() {
    let (disk, pool) = new_pool(8 << 20);
    let mut writer = Writer { pool, guid: GUID, chain: Chain(0), lsn: 0 };
    writer.pool.create(identity(GUID), ReplicaMeta::default(), 4000).expect("room");
    disk.set_room_below(Some(5 << 20));
    let (mut lba, mut short_from) = (0, None);
    let refusal = loop {
        if writer.pool.room(RoomGrant::UNBOUNDED).takes < Takes::Writes {
            short_from.get_or_insert(lba);
        }
        match writer.append(EntryKind::Write, lba, 8) {
            Ok(()) => lba += 8,
            Err(refusal) => break refusal,
        }
        assert!(lba < 1100, "more was taken than what is left to others allows");
        writer.housekeeping();
    };
    assert_eq!(refusal, StoreError::Full);
    assert!(writer.pool.is_short_below());
    // What was on its way then is taken: the share of a replica is half a unit here.
    assert!(short_from.is_some_and(|from| from + 8 <= lba), "{short_from:?} of {lba}");
    (0..200).for_each(|_| writer.housekeeping());
    assert!(writer.pool.is_short(false));
    for _ in 0..20 {
        let view = EntryKind::View(Box::new(common::some_view()));
        writer.append(view, 0, 0).expect("a View has room all the same");
    }
    writer.append(EntryKind::Trim, 0, lba as u32 / 2).expect("and so has a trim");
    writer.pool.settle().expect("folded");
    (0..200).for_each(|_| writer.housekeeping());
    writer.pool.look_below();
    assert!(!writer.pool.is_short(true));
    for lba in (0..lba / 4).step_by(8) {
        writer.append(EntryKind::Write, lba, 8).expect("room again");
        writer.housekeeping();
    }
    // The room of others came back as well: all of the pool can be used.
    disk.set_room_below(None);
    writer.pool.look_below();
    assert!(!writer.pool.is_short_below());
}

/// An open waits for the entries that another replica has and this one lacks; only what is stable
/// makes room, and nothing becomes stable before the open is done.
#[test]
fn a_pool_full_of_what_is_not_stable_takes_what_others_hold_already_and_trims_after_it() {
    let mut writer = Writer::new(8 << 20, 4000);
    let unstable = |writer: &mut Writer, kind: EntryKind, blocks| {
        let entry = writer.entry(kind, 0, blocks);
        let mut replica = writer.pool.replica(GUID).expect("it");
        replica.append(std::slice::from_ref(&entry))?;
        (writer.chain, writer.lsn) = (entry.chain, writer.lsn + 1);
        Ok(())
    };
    while unstable(&mut writer, EntryKind::Write, 8) == Ok(()) {
        assert!(writer.lsn < 500, "the pool never filled up");
    }
    (0..50).for_each(|_| writer.housekeeping());
    assert_eq!(unstable(&mut writer, EntryKind::Write, 8), Err(StoreError::Full));

    // The entries are of epoch 1.
    writer.pool.replica(GUID).expect("it").owe_before(Epoch(2));
    let before = writer.lsn;
    while unstable(&mut writer, EntryKind::Write, 8) == Ok(()) {}
    let taken = (writer.lsn - before) * 8 * 4096;
    // A quarter of the reserve, and at least two units of 128 KiB.
    assert!((128 << 10..=384 << 10).contains(&taken), "{taken} bytes were taken");
    for _ in 0..20 {
        unstable(&mut writer, EntryKind::Trim, 8).expect("a trim has room still");
    }
    // Entries that are not owed find no room.
    writer.pool.replica(GUID).expect("it").owe_before(Epoch(1));
    assert_eq!(unstable(&mut writer, EntryKind::Write, 1), Err(StoreError::Full));

    // The open is done: all of it is stable, and the room is there again.
    let end = Lsn(writer.lsn);
    writer.pool.replica(GUID).expect("it").set_stable(end);
    (0..200).for_each(|_| writer.housekeeping());
    assert!(!writer.pool.is_short(true));
    for _ in 0..100 {
        writer.append(EntryKind::Write, 0, 8).expect("room again");
        writer.housekeeping();
    }
}

/// A pool deletes any number of replicas in the course of time.
#[test]
fn a_pool_of_which_thousands_of_replicas_were_deleted_still_makes_and_deletes_others() {
    let (disk, mut pool) = new_pool(32 << 20);
    // Spread evenly, like real GUIDs, which are random.
    let guid =
        |n: u128| ReplicaGuid((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
    for n in 0..6000 {
        pool.create(identity(guid(n)), ReplicaMeta::default(), 600).expect("room");
        assert_eq!(pool.delete(guid(n)), Ok(true));
        pool.request_sync();
        sync(&mut pool);
    }
    let again = |pool: &mut Pool<MemoryDisk>| {
        assert!(pool.is_retired(guid(5999)));
        pool.create(identity(guid(5999)), ReplicaMeta::default(), 600)
    };
    assert!(matches!(again(&mut pool), Err(StoreError::Rule(_))), "a GUID is born once");
    let recent = (5900..6000).filter(|n| pool.is_retired(guid(*n))).count();
    assert!(recent > 80, "it forgets the old rather than the new: {recent} of the last 100");
    drop(pool);
    let mut pool = Pool::open(disk, common::options()).expect("a pool");
    assert!(matches!(again(&mut pool), Err(StoreError::Rule(_))), "nor in the next life");
}

/// A metadata ring that is too small for the records of its replicas keeps its last state: no
/// space is lost over it, and the records are written once there is room.
#[test]
fn a_full_metadata_ring_holds_a_commit_up_and_loses_nothing() {
    let (disk, mut pool) = new_pool(32 << 20);
    let guids: Vec<ReplicaGuid> = (1..=6).map(ReplicaGuid).collect();
    let mut last = Lsn::ZERO;
    for guid in &guids {
        pool.create(identity(*guid), ReplicaMeta::default(), 64).expect("room");
        let (mut chain, mut entries) = (Chain::default(), Vec::<SharedEntry>::new());
        for n in 1..=1000 {
            let position = Position { epoch: Epoch(1), lsn: Lsn(n) };
            let id = SnapshotId(u128::from(n));
            let kind = EntryKind::Snapshot { id, hidden: false };
            let entry = Entry::after(chain, position, kind, 0, 0, Bytes::new(), false);
            (chain, last) = (entry.chain, entry.lsn);
            entries.push(entry.into());
        }
        let mut replica = pool.replica(*guid).expect("it");
        replica.append(&entries).expect("room");
        replica.set_stable(last);
    }
    pool.request_sync();
    sync(&mut pool);
    pool.settle().expect("what is not recorded now is recorded later");
    let recorded = |disk: &MemoryDisk| {
        let mut pool = Pool::open(disk.fork(), options()).expect("a pool");
        let states = guids.iter().filter_map(|g| pool.replica(*g).map(|r| r.state()));
        let states: Vec<_> = states.collect();
        assert!(states.iter().all(|s| s.position.lsn == last), "nothing is lost");
        states.iter().filter(|s| s.base == last).count()
    };
    let before = recorded(&disk);
    assert!((1..guids.len()).contains(&before), "the ring had room for {before}");
    for guid in &guids[..4] {
        assert!(pool.delete(*guid).expect("room for that"));
    }
    pool.look_again();
    let mut rounds = 0;
    while pool.background_due() != Due::Idle && rounds < 100 {
        pool.background(1 << 20).expect("work");
        pool.request_sync();
        sync(&mut pool);
        rounds += 1;
    }
    assert!(rounds < 100, "the work ends");
    assert_eq!(recorded(&disk), 2, "both that are left");
}

/// A pool with room for data and none for records says which of the two it lacks: otherwise an
/// operator looks for the wrong thing.
#[test]
fn a_pool_whose_metadata_ring_is_full_says_so_and_takes_replicas_again_after_a_delete() {
    let (_, mut pool) = new_pool(64 << 20);
    let described =
        |n: u128| ReplicaIdentity { volume_spec: vec![7; 8000].into(), ..identity(ReplicaGuid(n)) };
    let mut made = 0;
    let refusal = loop {
        match pool.create(described(made + 1), ReplicaMeta::default(), 64) {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refusal, StoreError::RingFull);
    assert!(refusal.is_lack_of_room() && refusal.to_string().contains("metadata ring"));
    let small = |n: u128| ReplicaIdentity {
        volume_spec: Bytes::new(),
        ..identity(ReplicaGuid(1 << 64 | n))
    };
    let refused = (0..100).find_map(|n| pool.create(small(n), ReplicaMeta::default(), 64).err());
    assert_eq!(refused, Some(StoreError::RingFull));
    assert!(pool.is_ring_full(), "{made} replicas and a few more");
    let stats = pool.stats();
    assert!(stats.free_bytes > stats.size_bytes / 2, "there is room for data: {stats:?}");
    let larger = vec![7; 80_000];
    assert_eq!(pool.describe(ReplicaGuid(1), larger.into()), Err(StoreError::RingFull));
    // What is there goes on.
    let mut replica = pool.replica(ReplicaGuid(1)).expect("it");
    let meta = ReplicaMeta { promised: Epoch(9), ..replica.meta().clone() };
    replica.put_meta(meta).expect("a promise");
    assert_eq!(pool.delete(ReplicaGuid(1)), Ok(true));
    assert!(!pool.is_ring_full());
    pool.create(described(made + 1), ReplicaMeta::default(), 64).expect("room again");
}
