//! Reads that nobody waits for: the disk has next to nothing at hand, and gives the rest later.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use quoin_replication::replica::store::{
    BootCookie, CloneSource, FetchTicket, IoFault, ReplicaIdentity, ReplicaMeta, ReplicaStore,
    StoreError, Upcoming,
};
use quoin_store::disk::Syncer;
use quoin_store::disk::fetch::{Fetch, Owner};
use quoin_store::{
    Cloned, Disk, Due, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool, ScrubAt,
};
use quoin_types::message::{Content, IncrementEnd, ReadView, Slot};
use quoin_types::{
    BLOCK_SIZE, Chain, ClientId, Durability, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid,
    SnapshotId, View, VolumeId, crc32c,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::common::{GUID, break_a_rule, format_options, identity, options, some_view};

/// A disk that has nothing at hand, and counts the reads that were waited for.
#[derive(Clone)]
struct ColdDisk {
    inner: MemoryDisk,
    waited: Arc<AtomicU64>,
    log: Arc<Mutex<Log>>,
    /// It has all at hand for now.
    has_all: Arc<AtomicBool>,
}

/// Blocks that were written past the cache, and how they were read since.
#[derive(Default)]
struct Log {
    written: BTreeSet<u64>,
    /// All blocks that were written since this was cleared.
    last_written: BTreeSet<u64>,
    /// Reads of each through the cache, and past it.
    reads: BTreeMap<u64, (u32, u32)>,
}

fn blocks_of(offset: u64, length: usize) -> Range<u64> {
    offset / BLOCK_SIZE as u64..(offset + length as u64) / BLOCK_SIZE as u64
}

impl ColdDisk {
    fn of(inner: MemoryDisk) -> Self {
        ColdDisk { inner, waited: Arc::default(), log: Arc::default(), has_all: Arc::default() }
    }

    fn note_read(&self, offset: u64, length: usize, is_once: bool) {
        let log = &mut *self.log.lock().expect("no thread died");
        for block in blocks_of(offset, length).filter(|block| log.written.contains(block)) {
            let (cached, once) = log.reads.entry(block).or_default();
            *(if is_once { once } else { cached }) += 1;
        }
    }

    fn note_write(&self, offset: u64, parts: &[IoSlice<'_>], is_past_the_cache: bool) {
        let log = &mut *self.log.lock().expect("no thread died");
        for block in blocks_of(offset, parts.iter().map(|part| part.len()).sum()) {
            log.reads.remove(&block);
            log.last_written.insert(block);
            match is_past_the_cache {
                true => log.written.insert(block),
                false => log.written.remove(&block),
            };
        }
    }
}

impl Disk for ColdDisk {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.note_read(offset, buffer.len(), false);
        self.inner.read_at(offset, buffer)
    }
    fn may_lack(&self) -> bool {
        !self.has_all.load(Ordering::Relaxed)
    }
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        if !self.may_lack() {
            return self.inner.read_at(offset, buffer).map(|()| true);
        }
        self.note_read(offset, buffer.len(), false);
        Ok(false)
    }
    fn fetch(&self, fetch: &Fetch) -> Result<Bytes, IoFault> {
        if fetch.is_once {
            self.note_read(fetch.offset, fetch.length, true);
        }
        self.inner.fetch(fetch)
    }
    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        self.note_write(offset, parts, false);
        self.inner.write_at(offset, parts)
    }
    fn write_with_sync(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        spare: usize,
    ) -> Result<(), IoFault> {
        self.note_write(offset, parts, true);
        self.inner.write_with_sync(offset, parts, spare)
    }
    fn sync(&self) -> Result<(), IoFault> {
        self.inner.sync()
    }
    fn syncer(&self) -> Syncer {
        self.inner.syncer()
    }
    fn write_out(&self, _offset: u64, _length: u64) {}
    fn discard(&self, offset: u64, length: u64) {
        self.inner.discard(offset, length);
    }
    fn cookie(&self) -> BootCookie {
        self.inner.cookie()
    }
}

/// A pool with one volume that is written to and is stable at once.
struct Volume {
    disk: ColdDisk,
    pool: Pool<ColdDisk>,
    chain: Chain,
    lsn: u64,
    /// What each block holds.
    written: BTreeMap<u64, u8>,
}

impl Volume {
    fn new(pool_bytes: u64, blocks: u64, options: PoolOptions) -> Self {
        Self::with(pool_bytes, blocks, options, &format_options())
    }

    fn with(pool_bytes: u64, blocks: u64, options: PoolOptions, format: &FormatOptions) -> Self {
        break_a_rule();
        let disk = ColdDisk::of(MemoryDisk::new(pool_bytes));
        Pool::format(&disk, format).expect("a fit disk");
        let mut pool = Pool::open(disk.clone(), options).expect("a fresh pool");
        pool.create(identity(GUID), ReplicaMeta::default(), blocks).expect("room");
        Volume { disk, pool, chain: Chain(0), lsn: 0, written: BTreeMap::new() }
    }

    fn write(&mut self, lba: u64, byte: u8) -> Result<(), StoreError> {
        self.append(EntryKind::Write, lba, Bytes::from(vec![byte; BLOCK_SIZE]))?;
        self.written.insert(lba, byte);
        Ok(())
    }

    fn append(&mut self, kind: EntryKind, lba: u64, data: Bytes) -> Result<(), StoreError> {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let blocks = (data.len() / BLOCK_SIZE) as u32;
        let entry = Entry::after(self.chain, position, kind, lba, blocks, data, false);
        let (chain, lsn) = (entry.chain, entry.lsn);
        let mut replica = self.pool.replica(GUID).expect("it");
        replica.append(&[Arc::new(entry)])?;
        replica.set_stable(lsn);
        (self.chain, self.lsn) = (chain, lsn.0);
        Ok(())
    }

    fn sync(&mut self) {
        while let Some(ticket) = self.pool.sync_wanted() {
            let result = self.disk.sync();
            self.pool.sync_finished(ticket, result).expect("a sync");
        }
    }

    /// Does all background work that there is; the most reads that it had under way at once.
    fn settle(&mut self) -> usize {
        let mut most = 0;
        for _ in 0..10_000 {
            self.sync();
            let begun = self.begun();
            most = most.max(begun.len());
            if begun.is_empty() && self.pool.background_due() == Due::Idle {
                return most;
            }
            for fetch in begun {
                assert_eq!(self.pool.background_due(), Due::Idle, "it waits for the disk");
                let bytes = self.bytes_of(fetch);
                self.pool.fetched(fetch.id, bytes);
            }
            self.ready();
            self.pool.background(1).expect("background work");
        }
        panic!("it never ends");
    }

    fn try_read(&mut self, lba: u64, blocks: u32) -> Result<Vec<Slot>, FetchTicket> {
        let mut slots = Vec::new();
        let mut replica = self.pool.replica(GUID).expect("it");
        match replica.try_read(ReadView::Live, lba, blocks, true, &mut slots) {
            Ok(()) => Ok(slots),
            Err(StoreError::Pending(ticket)) => {
                assert_eq!(slots, [], "what it has is no answer");
                Err(ticket)
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The bytes that the disk has for a read now.
    fn bytes_of(&self, fetch: Fetch) -> Result<Bytes, IoFault> {
        self.disk.fetch(&fetch)
    }

    fn begun(&mut self) -> Vec<Fetch> {
        std::iter::from_fn(|| self.pool.next_fetch()).collect()
    }

    fn ready(&mut self) -> Vec<(Owner, FetchTicket)> {
        std::iter::from_fn(|| self.pool.take_fetched()).collect()
    }

    /// Compares an answer with what was written.
    fn check(&self, lba: u64, blocks: u32, slots: &[Slot]) {
        let mut at = lba;
        for slot in slots {
            for lba in slot.lba..slot.lba + u64::from(slot.blocks) {
                assert_eq!(lba, at);
                at += 1;
                let held = match &slot.content {
                    Content::Data { data, .. } => Some(data[0]),
                    Content::Hole => None,
                    Content::Bad => panic!("block {lba} is bad: these are not its bytes"),
                };
                assert_eq!(held, self.written.get(&lba).copied(), "block {lba}");
            }
        }
        assert_eq!(at, lba + u64::from(blocks));
    }
}

#[test]
fn cold_reads_are_under_way_together_and_none_is_waited_for() {
    let mut volume = Volume::new(64 << 20, 32 << 10, options());
    // Each in a leaf of its own.
    let lbas: Vec<u64> = (0..32).map(|n| n * 1000).collect();
    for lba in &lbas {
        volume.write(*lba, *lba as u8 | 1).expect("room");
    }
    volume.settle();
    volume.pool.settle().expect("folded");
    // Opened anew, no node of the map is in memory.
    volume.pool = Pool::open(volume.disk.clone(), options()).expect("it opens");
    let waited = volume.disk.waited.load(Ordering::Relaxed);
    let mut waiting: BTreeMap<FetchTicket, u64> = BTreeMap::new();
    for lba in &lbas {
        waiting.insert(volume.try_read(*lba, 1).expect_err("nothing is at hand"), *lba);
    }
    let (mut rounds, mut most) = (0, 0);
    while !waiting.is_empty() {
        rounds += 1;
        let begun = volume.begun();
        most = most.max(begun.len());
        assert!(!begun.is_empty(), "{} reads wait for nothing", waiting.len());
        for fetch in begun {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        for (owner, ticket) in volume.ready() {
            assert_eq!(owner, Owner::Sessions(GUID));
            let lba = waiting.remove(&ticket).expect("it is made again once");
            match volume.try_read(lba, 1) {
                Ok(slots) => volume.check(lba, 1, &slots),
                Err(ticket) => drop(waiting.insert(ticket, lba)),
            }
        }
    }
    assert_eq!(most, lbas.len(), "as many at once as there are reads");
    assert!(rounds <= 4, "{rounds} rounds for a map of three levels");
    assert_eq!(volume.disk.waited.load(Ordering::Relaxed), waited);
}

/// Does one call of a scrub or a verification and, where it waits for the disk, fetches what it lacks; `None`: it is to
/// be made again.
fn scrubbed<T>(
    volume: &mut Volume,
    mut call: impl FnMut(&mut Pool<ColdDisk>) -> Result<T, StoreError>,
) -> Option<T> {
    match call(&mut volume.pool) {
        Ok(done) => return Some(done),
        Err(StoreError::Pending(_)) => {}
        Err(error) => panic!("{error}"),
    }
    loop {
        let begun = volume.begun();
        assert!(!begun.is_empty(), "it waits for nothing");
        for fetch in begun {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        if !volume.ready().is_empty() {
            return None;
        }
    }
}

#[test]
fn a_scrub_and_a_verification_of_all_that_a_pool_holds_wait_for_no_read_and_find_what_is_bad() {
    let mut volume = Volume::new(64 << 20, 32 << 10, options());
    for turn in 0..3 {
        for lba in (0..300).map(|block| block * 37 + turn) {
            volume.write(lba, (lba % 250) as u8 + 1).expect("room");
        }
        volume.settle();
        if turn < 2 {
            volume.pool.settle().expect("folded");
        }
    }
    volume.pool = Pool::open(volume.disk.clone(), options()).expect("it opens");
    // Of a block in the map and of one in the log the media have other bytes than were written.
    let (folded, logged) = (37 * 100 + 1, 37 * 200 + 2);
    for lba in [folded, logged] {
        let held = [(lba % 250) as u8 + 1; BLOCK_SIZE];
        for block in volume.disk.inner.written_blocks() {
            let mut bytes = vec![0; BLOCK_SIZE];
            volume.disk.inner.read_at(block * BLOCK_SIZE as u64, &mut bytes).expect("a read");
            if bytes == held {
                volume.disk.inner.rot(block * BLOCK_SIZE as u64 + 9, 1);
            }
        }
    }
    let waited = volume.disk.waited.load(Ordering::Relaxed);
    let (mut at, mut calls) = (Some(ScrubAt::default()), 0);
    while let Some(from) = at {
        calls += 1;
        assert!(calls < 1000, "it never ends: {from:?}");
        if let Some(done) = scrubbed(&mut volume, |pool| pool.try_scrub(GUID, from, 1 << 20)) {
            assert_eq!(done.headers, 0, "{from:?}");
            at = done.next;
        }
    }
    let bad: BTreeSet<u64> = volume.pool.take_bad_blocks().iter().map(|bad| bad.lba).collect();
    assert!(bad.contains(&folded) && bad.contains(&logged), "{bad:?}");
    let alike = |lba: &u64| [folded % 250, logged % 250].contains(&(lba % 250));
    assert!(bad.iter().all(alike), "{bad:?}");

    let mut verified = Vec::new();
    while verified.is_empty() {
        let (live, all, note) = (ReadView::Live, 4 << 20, true);
        let mut call = |pool: &mut Pool<ColdDisk>| {
            let mut replica = pool.replica(GUID).expect("it");
            replica.try_verify(live, 0, 32 << 10, all, note, &mut verified)
        };
        scrubbed(&mut volume, &mut call);
    }
    let noted: BTreeSet<u64> = volume.pool.take_bad_blocks().iter().map(|bad| bad.lba).collect();
    assert_eq!(noted, bad);

    let (mut metadata, mut ended) = (None, false);
    while !ended {
        if let Some(done) = scrubbed(&mut volume, |pool| pool.try_scrub_metadata(metadata)) {
            assert_eq!(done.bad, 0);
            (metadata, ended) = (done.next, done.next.is_none());
        }
    }
    assert_eq!(volume.disk.waited.load(Ordering::Relaxed), waited, "reads that were waited for");
    // The second copy of the superblock, and the first block of the ring in use.
    let blocks = volume.disk.size() / BLOCK_SIZE as u64;
    let starts = volume.pool.starts();
    volume.disk.inner.rot((blocks - 2 + starts % 2) * BLOCK_SIZE as u64 + 20, 4);
    let (mut metadata, mut bad) = (None, 0);
    for _ in 0..100 {
        let Some(done) = scrubbed(&mut volume, |pool| pool.try_scrub_metadata(metadata)) else {
            continue;
        };
        bad += done.bad;
        metadata = done.next;
        if metadata.is_none() {
            break;
        }
    }
    assert_eq!((metadata, bad), (None, 1));
}

#[test]
fn a_verification_finds_what_rotted_after_one_before_it_was_given_up_or_had_the_pool_wait() {
    for is_given_up in [true, false] {
        let mut volume = Volume::new(64 << 20, 32 << 10, options());
        for lba in 0..40 {
            volume.write(lba, 7).expect("room");
        }
        volume.settle();
        let verify = |pool: &mut Pool<ColdDisk>| {
            let (mut replica, mut found) = (pool.replica(GUID).expect("it"), Vec::new());
            let verified = replica.try_verify(ReadView::Live, 0, 40, 1 << 20, false, &mut found);
            verified.map(|()| found.iter().filter(|s| s.content == Content::Bad).count())
        };
        assert_eq!(scrubbed(&mut volume, verify), None, "it waits");
        let mut replica = volume.pool.replica(GUID).expect("it");
        match is_given_up {
            true => replica.unpin(1),
            false => replica
                .verify(ReadView::Live, 0, 40, 1 << 20, false, &mut Vec::new())
                .expect("it is read"),
        }
        let held = [7; BLOCK_SIZE];
        for block in volume.disk.inner.written_blocks() {
            let mut bytes = vec![0; BLOCK_SIZE];
            volume.disk.inner.read_at(block * BLOCK_SIZE as u64, &mut bytes).expect("a read");
            if bytes == held {
                volume.disk.inner.rot(block * BLOCK_SIZE as u64 + 9, 1);
            }
        }
        let bad = (0..20).find_map(|_| scrubbed(&mut volume, verify));
        assert_eq!(bad, Some(40), "given up: {is_given_up}");
    }
}

#[test]
fn a_verification_fetches_about_as_much_as_it_was_asked_for() {
    let mut volume = Volume::new(64 << 20, 32 << 10, options());
    for lba in 0..1000 {
        volume.write(lba, 7).expect("room");
    }
    volume.settle();
    let (limit, mut fetched) = (64 * BLOCK_SIZE, 0);
    let call = |pool: &mut Pool<ColdDisk>| {
        let mut replica = pool.replica(GUID).expect("it");
        replica.try_verify(ReadView::Live, 0, 1000, limit as u32, false, &mut Vec::new())
    };
    while let Err(error) = call(&mut volume.pool) {
        assert!(matches!(error, StoreError::Pending(_)), "{error}");
        loop {
            let begun = volume.begun();
            if begun.is_empty() {
                break;
            }
            for fetch in begun {
                fetched += fetch.length;
                let bytes = volume.bytes_of(fetch);
                volume.pool.fetched(fetch.id, bytes);
            }
        }
        volume.ready();
    }
    assert!(fetched > 0 && fetched <= 2 * limit, "{fetched} bytes for {limit}");
}

#[test]
fn a_fold_over_a_map_that_is_in_no_cache_waits_for_no_read() {
    let mut volume = Volume::new(64 << 20, 32 << 10, options());
    for turn in 0..3 {
        for lba in (0..128).map(|leaf| leaf * 256 + turn) {
            volume.write(lba, turn as u8 + 1).expect("room");
        }
        volume.settle();
        volume.pool.settle().expect("folded");
        volume.pool = Pool::open(volume.disk.clone(), options()).expect("it opens");
    }
    // More log than is kept, so that it is folded.
    for lba in (0..128).map(|leaf| leaf * 256) {
        volume.write(lba, 9).expect("room");
    }
    let keep = PoolOptions { checkpoint_bytes: 64 << 10, ..options() };
    volume.pool = Pool::open(volume.disk.clone(), keep).expect("it opens");
    volume.pool.replica(GUID).expect("it").set_stable(Lsn(volume.lsn));
    let base = |volume: &mut Volume| volume.pool.replica(GUID).expect("it").state().base;
    let before = base(&mut volume);
    let waited = volume.disk.waited.load(Ordering::Relaxed);
    let (mut most, mut looks) = (0, 0);
    while base(&mut volume) == before {
        let begun = volume.begun();
        (most, looks) = (most.max(begun.len()), looks + usize::from(!begun.is_empty()));
        for fetch in begun {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        volume.ready();
        assert!(volume.pool.background_due() != Due::Idle, "nothing folds it");
        volume.pool.background(1).expect("background work");
    }
    // Some forty of the 113 nodes lie in one block. A step looks at 64.
    assert!(most >= 3 && looks <= 6, "{most} reads at once, {looks} times");
    assert_eq!(volume.disk.waited.load(Ordering::Relaxed), waited);
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, 600, true, &mut slots).expect("a read");
    volume.check(0, 600, &slots);
}

/// Leaves of the volumes below, each with blocks of its own.
const COLD_LEAVES: u64 = 128;

/// Every kind of entry. The match has each kind: a new one belongs into the list too.
fn every_kind() -> Vec<EntryKind> {
    let (first, other) = (SnapshotId(1), SnapshotId(3));
    let all = vec![
        EntryKind::Write,
        EntryKind::Trim,
        EntryKind::Zero { no_hole: false },
        EntryKind::Snapshot { id: other, hidden: false },
        EntryKind::DeleteSnapshot { id: first },
        EntryKind::Revert { id: first },
        EntryKind::Resize { blocks: COLD_LEAVES * 256 + 256 },
        EntryKind::View(Box::new(some_view())),
        EntryKind::BeginClient { client: ClientId(1) },
        EntryKind::EndClient { client: ClientId(1) },
    ];
    let number = |kind: &EntryKind| match kind {
        EntryKind::Write => 1,
        EntryKind::Trim => 2,
        EntryKind::Zero { .. } => 3,
        EntryKind::Snapshot { .. } => 4,
        EntryKind::DeleteSnapshot { .. } => 5,
        EntryKind::Revert { .. } => 6,
        EntryKind::Resize { .. } => 7,
        EntryKind::View(_) => 8,
        EntryKind::BeginClient { .. } => 9,
        EntryKind::EndClient { .. } => 10,
    };
    assert!(all.iter().map(number).eq(1..=10));
    all
}

impl Volume {
    fn append_of(&mut self, kind: EntryKind, lba: u64, blocks: u32) -> Result<(), StoreError> {
        let position = Position { epoch: Epoch(1), lsn: Lsn(self.lsn + 1) };
        let is_write = kind == EntryKind::Write;
        let data =
            vec![position.lsn.0 as u8; if is_write { blocks as usize * BLOCK_SIZE } else { 0 }];
        let entry = Entry::after(self.chain, position, kind, lba, blocks, Bytes::from(data), false);
        let (chain, lsn) = (entry.chain, entry.lsn);
        let mut replica = self.pool.replica(GUID).expect("it");
        replica.append(&[Arc::new(entry)])?;
        replica.set_stable(lsn);
        (self.chain, self.lsn) = (chain, lsn.0);
        for lba in lba..lba + u64::from(blocks) {
            match is_write {
                true => drop(self.written.insert(lba, lsn.0 as u8)),
                false => drop(self.written.remove(&lba)),
            }
        }
        Ok(())
    }

    /// Opens the pool anew: no node is in memory, and a fold is due soon.
    fn reopen(&mut self, options: PoolOptions) {
        self.sync();
        self.pool = Pool::open(self.disk.clone(), options).expect("it opens");
        self.pool.replica(GUID).expect("it").set_stable(Lsn(self.lsn));
    }

    fn waited(&self) -> u64 {
        self.disk.waited.load(Ordering::Relaxed)
    }

    fn check_all(&mut self, blocks: u64) {
        let mut slots = Vec::new();
        let mut replica = self.pool.replica(GUID).expect("it");
        replica.read(ReadView::Live, 0, blocks as u32, true, &mut slots).expect("a read");
        self.check(0, blocks as u32, &slots);
    }
}

/// What a step reads stays in memory until it is done.
fn folding_soon() -> PoolOptions {
    let cache_bytes = 64 << 20;
    PoolOptions { cache_bytes, checkpoint_bytes: 64 << 10, log_keep_bytes: 0, ..options() }
}

/// A volume with two snapshots, whose leaves differ from each to the next; and what it held at the first.
fn volume_with_snapshots() -> (Volume, BTreeMap<u64, u8>) {
    let mut volume = Volume::new(64 << 20, COLD_LEAVES * 256, options());
    let each = || (0..COLD_LEAVES).map(|leaf| leaf * 256);
    each().for_each(|lba| volume.append_of(EntryKind::Write, lba, 2).expect("room"));
    let kind = EntryKind::Snapshot { id: SnapshotId(1), hidden: false };
    volume.append_of(kind, 0, 0).expect("room");
    let first = volume.written.clone();
    each().for_each(|lba| volume.append_of(EntryKind::Write, lba + 1, 2).expect("room"));
    let kind = EntryKind::Snapshot { id: SnapshotId(2), hidden: false };
    volume.append_of(kind, 0, 0).expect("room");
    each().for_each(|lba| volume.append_of(EntryKind::Trim, lba, 1).expect("room"));
    volume.settle();
    volume.pool.settle().expect("folded");
    volume.settle();
    (volume, first)
}

#[test]
fn no_kind_of_entry_is_folded_by_reads_that_the_pools_thread_waits_for() {
    for kind in every_kind() {
        let (mut volume, first) = volume_with_snapshots();
        volume.reopen(folding_soon());
        let waited = volume.waited();
        match &kind {
            EntryKind::Write | EntryKind::Trim | EntryKind::Zero { .. } => {
                for leaf in 0..COLD_LEAVES {
                    volume.append_of(kind.clone(), leaf * 256, 3).expect("room");
                }
            }
            _ => volume.append_of(kind.clone(), 0, 0).expect("room"),
        }
        if let EntryKind::Revert { .. } = kind {
            volume.written = first;
        }
        let special = volume.lsn;
        for leaf in 0..COLD_LEAVES {
            volume.append_of(EntryKind::Write, leaf * 256 + 9, 1).expect("room");
        }
        volume.settle();
        let base = volume.pool.replica(GUID).expect("it").state().base;
        assert!(base.0 >= special, "{kind:?} is not folded");
        assert_eq!(volume.waited() - waited, 0, "reads that were waited for: {kind:?}");
        volume.check_all(COLD_LEAVES * 256);
    }
}

/// Maps of the replica and of its snapshots, the map of moved blocks, the table of segments, and those that
/// are compared and counted: all of them are cold, again and again.
#[test]
fn no_work_on_any_tree_reads_on_the_pools_thread() {
    const BLOCKS: u64 = 64 * 256;
    for seed in 0..4 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut volume = Volume::new(24 << 20, BLOCKS, folding_soon());
        let (mut snapshots, mut next, mut waited) = (BTreeMap::new(), 1, 0);
        for turn in 0..4_000_u32 {
            // Few blocks of each leaf, so that segments die in part and what is left is moved.
            let lba = random.random_range(0..64) * 256 + random.random_range(0..24);
            let kind = match random.random_range(0..1000) {
                0..8 if snapshots.len() < 4 => {
                    let id = SnapshotId(next);
                    next += 1;
                    snapshots.insert(id, volume.written.clone());
                    EntryKind::Snapshot { id, hidden: false }
                }
                8..16 if !snapshots.is_empty() => {
                    let id = *snapshots.keys().next().expect("one");
                    snapshots.remove(&id);
                    EntryKind::DeleteSnapshot { id }
                }
                16..22 if !snapshots.is_empty() => {
                    let at = random.random_range(0..snapshots.len());
                    let (id, held) = snapshots.iter().nth(at).expect("one");
                    volume.written = held.clone();
                    EntryKind::Revert { id: *id }
                }
                22..200 => EntryKind::Trim,
                _ => EntryKind::Write,
            };
            let has_range = matches!(kind, EntryKind::Write | EntryKind::Trim);
            let (lba, blocks) = if has_range { (lba, 1) } else { (0, 0) };
            match volume.append_of(kind, lba, blocks) {
                Ok(()) => {}
                Err(error) => panic!("seed {seed}, turn {turn}: {error}"),
            }
            if turn % 50 == 49 {
                volume.settle();
            }
            if turn % 1000 == 999 {
                volume.settle();
                assert!(
                    turn < 1000 || volume.waited() == waited,
                    "seed {seed}: before turn {turn}"
                );
                volume.reopen(folding_soon());
                waited = volume.waited();
                volume.settle();
                assert_eq!(volume.waited() - waited, 0, "seed {seed}: after an open, turn {turn}");
                volume.check_all(BLOCKS);
                waited = volume.waited();
            }
        }
    }
}

/// The cache has room for little more than one step: what a commit writes again of the table of segments
/// left it long ago.
#[test]
fn a_commit_fetches_what_it_reads_of_the_table_of_segments() {
    let options = PoolOptions {
        cache_bytes: 512 << 10,
        checkpoint_bytes: 64 << 10,
        log_keep_bytes: 0,
        unrecorded_segments: 0,
        ..options()
    };
    let mut volume = Volume::new(192 << 20, 32 << 10, options);
    let append = |volume: &mut Volume, blocks: Range<u64>| {
        for lba in blocks.step_by(16) {
            volume.append_of(EntryKind::Write, lba, 16).expect("room");
            if lba % 64 == 0 {
                volume.settle();
            }
        }
        volume.settle();
    };
    // Several hundred segments: several leaves of the table.
    append(&mut volume, 0..24_000);
    let waited = volume.waited();
    append(&mut volume, 24_000..24_512);
    assert_eq!(volume.waited() - waited, 0, "reads of commits that were waited for");
}

#[test]
fn a_clone_is_flattened_and_scrubbed_over_cold_maps_without_reads_on_the_pools_thread() {
    let (mut volume, _) = volume_with_snapshots();
    let clone = ReplicaGuid(0xc10e);
    let volume_id = identity(GUID).volume;
    let source = CloneSource { volume: volume_id, snapshot: SnapshotId(2) };
    let of_clone = ReplicaIdentity { volume: VolumeId(6), ..identity(clone) };
    for _ in 0..20 {
        let (identity, meta) = (of_clone.clone(), ReplicaMeta::default());
        let blocks = COLD_LEAVES * 256 + 256;
        match volume.pool.create_clone(identity, meta, blocks, &source).expect("room") {
            Cloned::Made => break,
            Cloned::NotYet => volume.settle(),
        };
    }
    volume.settle();
    volume.reopen(folding_soon());
    let waited = volume.waited();
    let (mut at, mut calls) = (Some(ScrubAt::default()), 0);
    while let Some(from) = at {
        calls += 1;
        assert!(calls < 2000, "it never ends: {from:?}");
        if let Some(done) = scrubbed(&mut volume, |pool| pool.try_scrub(clone, from, 1 << 20)) {
            at = done.next;
        }
    }
    assert_eq!(volume.waited() - waited, 0, "reads of a scrub that were waited for");
    volume.pool.flatten(clone);
    for _ in 0..10 {
        volume.settle();
    }
    assert!(!volume.pool.is_clone(clone), "it is flattened");
    assert_eq!(volume.waited() - waited, 0, "reads of a flattening that were waited for");
}

/// The disk answers one read never. The other replica's log has to be folded all the same.
#[test]
fn a_read_that_never_ends_keeps_one_replica_from_its_background_work_and_no_other() {
    let (mut volume, _) = volume_with_snapshots();
    volume.reopen(folding_soon());
    for leaf in 0..COLD_LEAVES {
        volume.append_of(EntryKind::Write, leaf * 256 + 9, 1).expect("room");
    }
    let mut hung = Vec::new();
    for _ in 0..100 {
        volume.sync();
        volume.pool.background(1).expect("background work");
        hung.extend(volume.begun());
        if volume.pool.background_waits() {
            break;
        }
    }
    assert!(volume.pool.background_waits() && !hung.is_empty(), "its nodes are cold");
    let other = ReplicaGuid(7);
    let of_other = ReplicaIdentity { volume: VolumeId(6), ..identity(other) };
    volume.pool.create(of_other, ReplicaMeta::default(), 600).expect("room");
    let mut chain = Chain(0);
    for lsn in 1..100 {
        let position = Position { epoch: Epoch(1), lsn: Lsn(lsn) };
        let data = Bytes::from(vec![3; BLOCK_SIZE]);
        let entry = Entry::after(chain, position, EntryKind::Write, lsn, 1, data, false);
        chain = entry.chain;
        let mut replica = volume.pool.replica(other).expect("it");
        replica.append(&[Arc::new(entry)]).expect("room");
        replica.set_stable(Lsn(lsn));
    }
    assert_eq!(volume.pool.background_due(), Due::Idle, "nothing is done while it waits");
    assert_eq!(volume.pool.give_up_background_wait(), Some(GUID));
    assert_eq!(volume.pool.give_up_background_wait(), None);
    for _ in 0..1000 {
        volume.sync();
        for fetch in volume.begun() {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        volume.ready();
        volume.pool.background(1).expect("background work");
    }
    let base = |volume: &mut Volume, guid| volume.pool.replica(guid).expect("it").state().base;
    assert!(base(&mut volume, other) > Lsn(0), "the other one's log is folded");
    let before = base(&mut volume, GUID);
    // Its late answer has no receiver.
    for fetch in hung {
        let bytes = volume.bytes_of(fetch);
        volume.pool.fetched(fetch.id, bytes);
    }
    assert!(volume.ready().is_empty(), "what was given up is made again");
    volume.pool.look_again();
    volume.settle();
    assert!(base(&mut volume, GUID) > before, "it goes on after another look");
    volume.check_all(COLD_LEAVES * 256);
}

/// Looks ahead of this work until the disk has given all that it lacks; how often it lacked something.
fn look_ahead(volume: &mut Volume, upcoming: Upcoming<'_>) -> usize {
    let looked = |pool: &mut Pool<ColdDisk>| {
        let mut replica = pool.replica(GUID).expect("it");
        replica.look_ahead(upcoming)
    };
    (0..100).find(|_| scrubbed(volume, looked).is_some()).expect("a map has few levels")
}

/// A rebuild brings a block of each leaf, and its replica has next to no node in memory.
#[test]
fn an_increment_and_repairs_over_a_map_that_is_in_no_cache_wait_for_no_read() {
    const LEAVES: u64 = 120;
    let mut volume = Volume::new(64 << 20, LEAVES * 256, options());
    for turn in 0..2 {
        for leaf in 0..LEAVES {
            volume.write(leaf * 256 + turn, turn as u8 + 1).expect("room");
        }
        volume.settle();
        if turn == 0 {
            volume.pool.settle().expect("folded");
        }
    }
    volume.pool = Pool::open(volume.disk.clone(), options()).expect("it opens");
    let from = Lsn(volume.lsn);
    volume.pool.replica(GUID).expect("it").set_stable(from);
    let before = volume.disk.waited.load(Ordering::Relaxed);
    let waited = |volume: &Volume| volume.disk.waited.load(Ordering::Relaxed) - before;

    let (view, lba) = (ReadView::Live, 40 * 256);
    let lacked = look_ahead(&mut volume, Upcoming::Repair { view, lba });
    assert!(lacked > 0, "the repair had its nodes at hand");
    let mut replica = volume.pool.replica(GUID).expect("it");
    let other = Bytes::from(vec![7; BLOCK_SIZE]);
    assert_eq!(replica.repair(view, lba, Lsn(1), crc32c(&other), &other), Ok(false));
    let (lba, blocks) = (90 * 256 - 8, 16);
    let lacked = look_ahead(&mut volume, Upcoming::Mend { view, lba, blocks });
    assert!(lacked > 0, "the mend had its nodes at hand");
    let mut replica = volume.pool.replica(GUID).expect("it");
    let hole = Slot { lba, blocks, version: from, content: Content::Hole };
    assert_eq!(replica.mend(view, lba, &[hole]), Ok(true), "nothing is lost there");
    assert_eq!(waited(&volume), 0);

    let (mut lacked, mut steps) = (0, 0);
    loop {
        lacked += look_ahead(&mut volume, Upcoming::Begin { from });
        steps += 1;
        assert!(steps < 1000, "it never begins");
        let mut replica = volume.pool.replica(GUID).expect("it");
        if replica.increment_begin(1, from).expect("a step") {
            break;
        }
    }
    assert!(lacked > 0, "the fold had its nodes at hand");
    assert_eq!(waited(&volume), 0, "reads that a begin waited for");

    // Opened anew, the shadow's map is in no cache either.
    volume.settle();
    volume.pool = Pool::open(volume.disk.clone(), options()).expect("it opens");
    volume.pool.replica(GUID).expect("it").set_stable(from);
    assert!(volume.pool.replica(GUID).expect("it").increment_begin(1, from).expect("resumed"));
    let before = volume.disk.waited.load(Ordering::Relaxed);
    let waited = |volume: &Volume| volume.disk.waited.load(Ordering::Relaxed) - before;
    let version = Lsn(from.0 + 1);
    let slot = |leaf| Slot { lba: leaf * 256 + 7, blocks: 1, version, content: Content::Hole };
    let slots: Vec<Slot> = (0..LEAVES).map(slot).collect();
    let mut lacked = 0;
    for part in slots.chunks(50) {
        lacked += look_ahead(&mut volume, Upcoming::Feed { slots: part });
        let cursor = part.last().expect("a part").lba + 1;
        let mut replica = volume.pool.replica(GUID).expect("it");
        replica.increment_feed(1, part, cursor).expect("fed");
    }
    assert!(lacked > 0, "the feeds had their nodes at hand");
    assert_eq!(waited(&volume), 0, "reads that feeds waited for");
    lacked = look_ahead(&mut volume, Upcoming::Merge);
    assert!(lacked > 0, "the rest had its nodes at hand");
    let mut replica = volume.pool.replica(GUID).expect("it");
    let (epoch_table, snapshots) = (Vec::new(), Vec::new());
    let end = IncrementEnd {
        position: Position { epoch: Epoch(1), lsn: version },
        chain: Chain(7),
        epoch_table,
        last_view: None,
        volume_blocks: LEAVES * 256,
        snapshots,
        clients: Default::default(),
    };
    replica.increment_prepare(1, &end).expect("prepared");
    assert_eq!(waited(&volume), 0, "reads that the end waited for");
    volume.sync();
    volume.pool.replica(GUID).expect("it").increment_flip(1).expect("the flip");
    let mut found = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 256, 8, true, &mut found).expect("a read");
    let of = |lba| found.iter().find(|slot| slot.lba == lba).map(|slot| slot.version);
    assert_eq!(of(256 + 7), Some(version));
    volume.check(256, 8, &found);
}

#[test]
fn a_read_of_many_places_has_all_that_it_lacks_fetched_at_once() {
    let mut volume = Volume::new(64 << 20, 32 << 10, options());
    for lba in (0..600).step_by(20) {
        volume.write(lba, 7).expect("room");
    }
    volume.settle();
    volume.pool.settle().expect("folded");
    // The nodes are in memory; the blocks lie apart, thirty in three leaves.
    volume.try_read(0, 600).expect_err("no block is at hand");
    let begun = volume.begun();
    assert_eq!(begun.len(), 30);
    let (last, others) = begun.split_last().expect("some");
    for fetch in others {
        let bytes = volume.bytes_of(*fetch);
        volume.pool.fetched(fetch.id, bytes);
        assert_eq!(volume.ready(), [], "it is made again once all is there");
    }
    let fault = IoFault { operation: "read", offset: last.offset, errno: 5 };
    volume.pool.fetched(last.id, Err(fault));
    assert_eq!(volume.ready().len(), 1);
    let slots = volume.try_read(0, 600).expect("all is there");
    let bad = slots.iter().filter(|slot| slot.content == Content::Bad).count();
    assert_eq!(bad, 1, "one block that cannot be read is one bad block");
    assert_eq!(volume.pool.take_bad_blocks().len(), 1);
}

/// The volume is overwritten all the time, so its pool uses each unit again and again; reads take
/// their time, and most bytes were read long before they are told.
#[test]
fn a_place_that_is_used_again_is_never_answered_with_bytes_that_it_held_before() {
    for seed in 0..6 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // Next to no node stays in memory, so they are fetched too.
        let cache_bytes = if seed % 2 == 0 { 0 } else { 1 << 20 };
        let mut volume = Volume::new(8 << 20, 600, PoolOptions { cache_bytes, ..options() });
        let mut under_way: Vec<(Fetch, Result<Bytes, IoFault>)> = Vec::new();
        let mut waiting: BTreeMap<FetchTicket, (u64, u32)> = BTreeMap::new();
        let (mut answers, mut cold) = (0, 0);
        for turn in 0..6_000u32 {
            let lba = random.random_range(0..600);
            match volume.write(lba, turn as u8) {
                Ok(()) | Err(StoreError::Full) => {}
                Err(error) => panic!("{error}"),
            }
            for _ in 0..3 {
                match volume.pool.background(1) {
                    Ok(_) | Err(StoreError::Full) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            if random.random_bool(0.3) {
                volume.sync();
            }
            if random.random_bool(0.2) && waiting.len() < 16 {
                let (lba, blocks) = (random.random_range(0..590), random.random_range(1..10));
                match volume.try_read(lba, blocks) {
                    Ok(slots) => volume.check(lba, blocks, &slots),
                    Err(ticket) => drop(waiting.insert(ticket, (lba, blocks))),
                }
                cold += 1;
            }
            for fetch in volume.begun() {
                let bytes = volume.bytes_of(fetch);
                under_way.push((fetch, bytes));
            }
            if random.random_bool(0.2) && !under_way.is_empty() {
                let at = random.random_range(0..under_way.len());
                let (fetch, early) = under_way.swap_remove(at);
                let bytes = if random.random_bool(0.7) { early } else { volume.bytes_of(fetch) };
                volume.pool.fetched(fetch.id, bytes);
            }
            for (_, ticket) in volume.ready() {
                let Some((lba, blocks)) = waiting.remove(&ticket) else { continue };
                match volume.try_read(lba, blocks) {
                    Ok(slots) => {
                        volume.check(lba, blocks, &slots);
                        answers += 1;
                    }
                    Err(ticket) => drop(waiting.insert(ticket, (lba, blocks))),
                }
            }
        }
        assert!(answers > 50 && cold > answers, "seed {seed}: {answers} answers, {cold} reads");
        let bad = volume.pool.take_bad_blocks();
        assert!(bad.is_empty(), "seed {seed}: found bad: {bad:?}");
    }
}

/// More reads are wanted than may be under way. The volume is overwritten meanwhile, so that units of
/// those that are only listed are used again. They are read before the new segments are filled.
#[test]
fn a_read_that_was_only_listed_when_its_unit_was_used_again_gives_nothing_to_the_new_use() {
    for (seed, is_emptied) in [(1, false), (2, false), (3, true), (4, true)] {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut volume = Volume::new(8 << 20, 600, options());
        for lba in 0..600 {
            volume.write(lba, random.random()).expect("room");
        }
        volume.settle();
        volume.pool.settle().expect("folded");
        let (mut stale, mut rewritten) = (BTreeSet::new(), 0);
        for turn in 0..3_000_u32 {
            let is_cold = turn % 200 < 2;
            volume.disk.has_all.store(!is_cold, Ordering::Relaxed);
            if turn % 200 == 0 {
                // Many more than are begun; their callers find their blocks elsewhere later.
                for lba in 0..600 {
                    let _ = volume.try_read(lba, 1);
                }
            }
            if turn % 200 == 100 {
                stale.clear();
                loop {
                    let begun = volume.begun();
                    if begun.is_empty() {
                        break;
                    }
                    for fetch in begun {
                        let bytes = volume.bytes_of(fetch);
                        volume.pool.fetched(fetch.id, bytes);
                        stale.extend(blocks_of(fetch.offset, fetch.length));
                    }
                }
                volume.ready();
                volume.disk.log.lock().expect("no thread died").last_written.clear();
            }
            match volume.write(random.random_range(0..600), random.random()) {
                Ok(()) | Err(StoreError::Full) => {}
                Err(error) => panic!("{error}"),
            }
            for _ in 0..3 {
                match volume.pool.background(1) {
                    Ok(_) | Err(StoreError::Full) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            volume.sync();
            if turn % 200 == 199 {
                let log = volume.disk.log.lock().expect("no thread died");
                rewritten += log.last_written.intersection(&stale).count();
                drop(log);
                volume.disk.has_all.store(false, Ordering::Relaxed);
                if is_emptied {
                    volume.settle();
                }
                for lba in 0..600 {
                    // What it finds without the disk is what the place holds now.
                    if let Ok(slots) = volume.try_read(lba, 1) {
                        volume.check(lba, 1, &slots);
                    }
                }
                let mut slots = Vec::new();
                let mut replica = volume.pool.replica(GUID).expect("it");
                replica.read(ReadView::Live, 0, 600, true, &mut slots).expect("a read");
                volume.check(0, 600, &slots);
                assert_eq!(volume.pool.take_bad_blocks(), [], "seed {seed}, turn {turn}");
            }
        }
        assert!(
            rewritten > 100,
            "seed {seed}: {rewritten} places were written after they were read"
        );
    }
}

/// The medium has other bytes than were written. Where they came from is no matter.
#[test]
fn a_segment_with_a_block_that_its_checksum_does_not_fit_stays_until_the_block_is_repaired() {
    let mut volume = media_volume_to_clean();
    let lsn = Lsn(1 + MENDED + 1);
    let data = Bytes::from(vec![volume.written[&MENDED]; BLOCK_SIZE]);
    let holds_it = |volume: &Volume| -> Vec<u64> {
        let blocks = volume.disk.inner.written_blocks().into_iter();
        let is_it = |block: &u64| {
            let mut bytes = vec![0; BLOCK_SIZE];
            let offset = block * BLOCK_SIZE as u64;
            volume.disk.inner.read_at(offset, &mut bytes).expect("a read");
            bytes[..99] == data[..99] && bytes[100..] == data[100..]
        };
        blocks.filter(is_it).collect()
    };
    let at = holds_it(&volume);
    volume.disk.inner.rot(at[0] * BLOCK_SIZE as u64 + 99, 1);
    volume.settle();
    assert_eq!(holds_it(&volume), at, "its bytes were moved");
    let bad = volume.pool.take_bad_blocks();
    assert_eq!(bad.iter().map(|bad| bad.lba).collect::<Vec<_>>(), [MENDED]);

    let mut replica = volume.pool.replica(GUID).expect("it");
    assert_eq!(replica.repair(ReadView::Live, MENDED, lsn, crc32c(&data), &data), Ok(true));
    let used = volume.pool.stats().used_bytes;
    // Segments are tried again after a commit.
    volume.write(3000, 9).expect("room");
    volume.sync();
    volume.pool.settle().expect("recorded");
    volume.settle();
    assert!(volume.pool.stats().used_bytes < used, "it is sound, and is not emptied");
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, 1000, true, &mut slots).expect("a read");
    volume.check(0, 1000, &slots);
}

/// Block that no other one is equal to; it is not overwritten.
const MENDED: u64 = 27;

/// A volume under durability `media` with segments of four pieces, most of whose log is dead.
fn media_volume_to_clean() -> Volume {
    let format = FormatOptions { unit_blocks: 256, ..format_options() };
    let mut volume = Volume::with(64 << 20, 4096, options(), &format);
    let view = View { durability: Durability::Media, ..some_view() };
    volume.append(EntryKind::View(Box::new(view)), 0, Bytes::new()).expect("room");
    for lba in 0..1000 {
        let byte = if lba == MENDED { 251 } else { 1 + (lba % 100) as u8 };
        volume.write(lba, byte).expect("room");
    }
    for lba in (0..1000).filter(|lba| lba % 20 != 7) {
        volume.write(lba, 101 + (lba % 100) as u8).expect("room");
    }
    // Where the last segment is closed.
    for lba in 2000..2200 {
        volume.write(lba, 250).expect("room");
    }
    volume.sync();
    volume.pool.settle().expect("folded");
    volume
}

/// Does all background work that there is, with none of its reads waited for. Compares the log's reads
/// with what is expected of each block: reads through the cache, and past it.
fn empty_past_the_cache(volume: &mut Volume, expected: impl Fn((u32, u32)) -> bool) {
    volume.disk.log.lock().expect("no thread died").reads.clear();
    let waited = volume.disk.waited.load(Ordering::Relaxed);
    let used = volume.pool.stats().used_bytes;
    volume.settle();
    assert!(volume.pool.stats().used_bytes < used, "segments were emptied");
    assert_eq!(volume.disk.waited.load(Ordering::Relaxed), waited);
    let log = volume.disk.log.lock().expect("no thread died");
    let other = log.reads.iter().find(|(_, reads)| !expected(**reads));
    assert_eq!(other, None, "a block and its reads through the cache and past it");
}

#[test]
fn a_log_that_was_written_past_the_cache_is_emptied_by_one_read_of_each_block_past_it() {
    let mut volume = media_volume_to_clean();
    empty_past_the_cache(&mut volume, |reads| reads == (0, 1));
    let read = volume.disk.log.lock().expect("no thread died").reads.len();
    assert!(read > 7 * 256, "{read} blocks of seven segments");
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, 1000, true, &mut slots).expect("a read");
    volume.check(0, 1000, &slots);
}

#[test]
fn a_block_that_is_mended_while_its_segment_is_emptied_is_moved_as_mended() {
    let mut volume = media_volume_to_clean();
    // Behind the View.
    let lsn = Lsn(1 + MENDED + 1);
    let data = Bytes::from(vec![volume.written[&MENDED]; BLOCK_SIZE]);
    let rotten = volume.disk.inner.written_blocks().into_iter().find(|block| {
        let mut bytes = vec![0; BLOCK_SIZE];
        let offset = block * BLOCK_SIZE as u64;
        volume.disk.inner.read_at(offset, &mut bytes).expect("a read");
        bytes == data
    });
    let rotten = rotten.expect("it is on the disk");
    volume.disk.inner.rot(rotten * BLOCK_SIZE as u64 + 99, 1);
    let is_read = |volume: &Volume| {
        let log = volume.disk.log.lock().expect("no thread died");
        log.reads.contains_key(&rotten)
    };
    volume.disk.log.lock().expect("no thread died").reads.clear();
    while !is_read(&volume) {
        assert_ne!(volume.pool.background_due(), Due::Idle, "the segment is not emptied");
        volume.sync();
        volume.pool.background(1).expect("background work");
        for fetch in volume.begun() {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        volume.ready();
    }
    // It takes what was read.
    volume.pool.background(1).expect("background work");
    let mut replica = volume.pool.replica(GUID).expect("it");
    let crc = quoin_types::crc32c(&data);
    assert_eq!(replica.repair(ReadView::Live, MENDED, lsn, crc, &data), Ok(true));
    volume.settle();
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, 1000, true, &mut slots).expect("a read");
    volume.check(0, 1000, &slots);
}

/// A volume under durability `media` with two segments of 16 MiB, of which every twentieth write is left, and
/// some of another one; and the blocks that were written.
fn media_volume_with_large_segments(options: PoolOptions) -> (Volume, u32) {
    const BLOCKS: u64 = 64;
    let format = FormatOptions { unit_blocks: 4096, ..format_options() };
    let mut volume = Volume::with(512 << 20, 1 << 20, options, &format);
    let view = View { durability: Durability::Media, ..some_view() };
    volume.append(EntryKind::View(Box::new(view)), 0, Bytes::new()).expect("room");
    let write = |volume: &mut Volume, n: u64, byte: u8| {
        let data = Bytes::from(vec![byte; BLOCKS as usize * BLOCK_SIZE]);
        volume.append(EntryKind::Write, n * BLOCKS, data).expect("room");
        volume.written.extend((n * BLOCKS..(n + 1) * BLOCKS).map(|lba| (lba, byte)));
    };
    (0..130).for_each(|n| write(&mut volume, n, n as u8 + 1));
    (0..130).filter(|n| n % 20 != 7).for_each(|n| write(&mut volume, n, n as u8 + 101));
    volume.sync();
    volume.pool.settle().expect("folded");
    (volume, 130 * BLOCKS as u32)
}

#[test]
fn a_segment_that_is_larger_than_what_is_kept_of_one_is_emptied_through_a_window() {
    let (mut volume, blocks) = media_volume_with_large_segments(options());
    // Once for the headers, and once more where it is moved.
    empty_past_the_cache(&mut volume, |(cached, once)| cached == 0 && (1..=2).contains(&once));
    let read = volume.disk.log.lock().expect("no thread died").reads.len();
    assert!(read > 8000, "{read} blocks of two segments");
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, blocks, true, &mut slots).expect("a read");
    volume.check(0, blocks, &slots);
}

/// A fold is due before anything is emptied. Each began the list of the segment anew.
#[test]
fn a_large_segment_is_emptied_though_a_fold_is_due_whenever_some_of_its_headers_were_read() {
    let options = PoolOptions { checkpoint_bytes: 1, log_keep_bytes: 0, ..options() };
    let (mut volume, blocks) = media_volume_with_large_segments(options);
    let used = volume.pool.stats().used_bytes;
    let (mut folds, far) = (0, 1 << 19);
    for _ in 0..20_000 {
        if volume.pool.stats().used_bytes < used {
            break;
        }
        volume.sync();
        let begun = volume.begun();
        if !begun.is_empty() {
            volume.write(far, 1).expect("room");
            folds += 1;
        }
        for fetch in begun {
            let bytes = volume.bytes_of(fetch);
            volume.pool.fetched(fetch.id, bytes);
        }
        volume.ready();
        volume.pool.background(1).expect("background work");
    }
    assert!(volume.pool.stats().used_bytes < used, "nothing was emptied beside {folds} folds");
    assert!(folds > 20, "{folds} folds came between");
    volume.settle();
    let mut slots = Vec::new();
    let mut replica = volume.pool.replica(GUID).expect("it");
    replica.read(ReadView::Live, 0, blocks, true, &mut slots).expect("a read");
    volume.check(0, blocks, &slots);
}
