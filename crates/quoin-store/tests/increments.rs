//! Rebuild by increments: pulled from one real store, fed to another, cut off at any step.

use std::sync::Arc;

use crate::common::{
    BLOCKS, GUID, World, flat, identity, new_pool, options, pull_all, read_all, sync,
};
use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::{MemoryDisk, Pool, ReplicaPool};
use quoin_types::message::{CutHead, IncrementEnd, ReadView};
use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const COPY: ReplicaGuid = ReplicaGuid(0xc0);

/// The receiver, with what can go wrong with it.
struct Receiver {
    disk: MemoryDisk,
    pool: Option<Pool<MemoryDisk>>,
    rng: ChaCha8Rng,
    interruptions: u32,
}

impl Receiver {
    fn new(seed: u64) -> Self {
        let (disk, mut pool) = new_pool(32 << 20);
        pool.create(identity(COPY), ReplicaMeta::default(), BLOCKS).expect("room");
        pool.request_sync();
        sync(&mut pool);
        let rng = ChaCha8Rng::seed_from_u64(seed);
        Receiver { disk, pool: Some(pool), rng, interruptions: 0 }
    }

    fn pool(&mut self) -> &mut Pool<MemoryDisk> {
        self.pool.as_mut().expect("an open pool")
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut dyn ReplicaStore) -> T) -> T {
        act(&mut self.pool().replica(COPY).expect("the copy"))
    }

    /// Sometimes does background work, sometimes dies; true if it died.
    fn disturb(&mut self) -> bool {
        match self.rng.random_range(0..40) {
            0..8 => {
                self.pool().background(1 << 20).expect("background work");
                false
            }
            8..16 => {
                sync(self.pool());
                false
            }
            16 => {
                self.pool = None;
                self.reopen();
                true
            }
            17 => {
                self.pool = None;
                let rng = &mut self.rng;
                self.disk.power_cut(|| rng.random());
                self.reopen();
                true
            }
            _ => false,
        }
    }

    fn reopen(&mut self) {
        self.interruptions += 1;
        self.pool = Some(Pool::open(self.disk.clone(), options()).expect("a pool"));
    }

    /// Brings the copy from its position to the source's, as the protocol does it.
    fn rebuild(&mut self, source: &mut dyn ReplicaStore, rebuild: u64, from: Lsn) {
        let before = self.with(|s| (s.state(), read_all(s, ReadView::Live, BLOCKS)));
        'again: loop {
            // A shadow that was cut off is begun anew here; resuming has its own test.
            let resumed = self.with(|s| s.shadow());
            let (id, start) = match resumed {
                Some((id, start, _)) if id >= rebuild => (id + 1, start),
                _ => (rebuild, from),
            };
            assert_eq!(start, from);
            self.with(|s| crate::common::begin_increment(s, id, from));
            let snapshots = source.snapshots();
            let mut views: Vec<ReadView> = snapshots
                .iter()
                .filter(|s| s.lsn > from)
                .map(|s| ReadView::Snapshot(s.id))
                .collect();
            views.push(ReadView::Base);
            let mut done = from;
            let mut end: Option<Box<IncrementEnd>> = None;
            for view in views {
                let mut cursor = 0;
                loop {
                    let chunk = source.pull(4, view, done, cursor, 60_000, true).expect("a pull");
                    let chunk = chunk.expect("the view exists");
                    let next = chunk.cursor.unwrap_or(BLOCKS);
                    self.with(|s| s.increment_feed(id, &chunk.slots, next)).expect("fed");
                    // Until the flip the copy stays exactly what it was.
                    if self.disturb() {
                        let now = self.with(|s| (s.state(), read_all(s, ReadView::Live, BLOCKS)));
                        assert_eq!(
                            (now.0.position, flat(&now.1)),
                            (before.0.position, flat(&before.1))
                        );
                        continue 'again;
                    }
                    match chunk.cursor {
                        Some(next) => cursor = next,
                        None => {
                            end = chunk.end;
                            break;
                        }
                    }
                }
                if let ReadView::Snapshot(snapshot) = view {
                    let at = snapshots.iter().position(|s| s.id == snapshot).expect("listed");
                    let (info, head) = (snapshots[at], source.snapshot_heads()[at]);
                    let last_view = end.as_ref().and_then(|end| end.last_view.clone());
                    let head = CutHead { head, last_view };
                    self.with(|s| s.increment_cut(id, info, &head)).expect("a cut");
                    done = info.lsn;
                }
            }
            let end = end.expect("the last view ended");
            self.with(|s| s.increment_prepare(id, &end)).expect("prepared");
            let early = self.with(|s| s.increment_flip(id));
            assert!(matches!(early, Err(StoreError::Rule(_))), "a flip before the sync");
            if self.disturb() {
                continue;
            }
            sync(self.pool());
            self.with(|s| s.increment_flip(id)).expect("the flip");
            self.pool().request_sync();
            sync(self.pool());
            return;
        }
    }

    fn assert_is(&mut self, source: &mut dyn ReplicaStore) {
        let lsn = self.with(|s| s.state().position.lsn);
        assert_eq!(lsn, source.state().base);
        let (_, end) = pull_all(source, ReadView::Base, lsn);
        let state = self.with(|s| s.state());
        assert_eq!((state.position, state.chain), (end.position, end.chain));
        assert_eq!((state.stable, state.base), (lsn, lsn));
        assert_eq!(state.last_view, end.last_view);
        assert_eq!(self.with(|s| s.epoch_table()), end.epoch_table);
        assert_eq!(self.with(|s| s.clients()), end.clients);
        assert_eq!(self.with(|s| s.snapshots()), end.snapshots);
        assert_eq!(self.with(|s| s.snapshot_heads()), source.snapshot_heads());
        let views = end.snapshots.iter().map(|s| ReadView::Snapshot(s.id)).chain([ReadView::Base]);
        for view in views {
            let source = flat(&read_all(source, view, BLOCKS));
            let copy = self.with(|s| flat(&read_all(s, view, BLOCKS)));
            assert!(source == copy, "{view:?} differs");
        }
    }
}

/// Writes some history and folds all of it, so that the base is the position.
fn write(world: &mut World, batches: u32) {
    for _ in 0..batches {
        world.append();
    }
    let position = Lsn(world.history.len() as u64);
    world.pool().replica(GUID).expect("it").set_stable(position);
    world.model.replica(GUID).expect("it").set_stable(position);
    world.pool().settle().expect("folded");
    assert_eq!(world.pool().replica(GUID).expect("it").state().base, position);
}

/// Proves: rebuilds flip atomically, hold every version, hole and snapshot, and survive crashes.
#[test]
fn a_copy_rebuilt_through_crashes_is_the_source_snapshots_and_holes_included() {
    let mut interruptions = 0;
    for seed in 0..60 {
        println!("seed {seed}");
        let mut world = World::new(seed, 32 << 20);
        let mut receiver = Receiver::new(seed);
        let mut from = Lsn::ZERO;
        for round in 1..4u64 {
            write(&mut world, 30);
            let mut source = world.pool.as_mut().expect("open").replica(GUID).expect("it");
            receiver.rebuild(&mut source, round * 1000, from);
            receiver.assert_is(&mut source);
            receiver.pool = None;
            receiver.disk.power_cut(|| false);
            receiver.reopen();
            receiver.assert_is(&mut source);
            from = receiver.with(|s| s.state().position.lsn);
        }
        interruptions += receiver.interruptions;
    }
    assert!(interruptions > 120, "the test hardly disturbed anything: {interruptions}");
}

/// Appends one entry of each of these kinds, to the model as well.
fn append(world: &mut World, kinds: impl Iterator<Item = EntryKind>) {
    let before = world.history.len();
    for kind in kinds {
        let last = world.history.last();
        let chain = last.map_or(Chain(0), |entry| entry.chain);
        let position = Position { epoch: Epoch(1), lsn: Lsn(world.history.len() as u64 + 1) };
        let (lba, data) = match kind {
            EntryKind::Write => {
                let bytes = std::array::from_fn::<u8, 16, _>(|_| world.rng.random()).repeat(256);
                (world.rng.random_range(0..BLOCKS), Bytes::from(bytes))
            }
            _ => (0, Bytes::new()),
        };
        let blocks = u32::from(!data.is_empty());
        let entry = Entry::after(chain, position, kind, lba, blocks, data, false);
        world.history.push(Arc::new(entry));
    }
    let entries = &world.history[before..];
    let pool = world.pool.as_mut().expect("open");
    pool.replica(GUID).expect("it").append(entries).expect("room");
    world.model.replica(GUID).expect("it").append(entries).expect("the model takes it");
}

/// Continues the work of a pool beside a replica that pulls from it.
fn go_on(world: &mut World) {
    let count = world.rng.random_range(1..40);
    append(world, (0..count).map(|_| EntryKind::Write));
    match world.rng.random_range(0..4) {
        0 => world.set_stable(),
        1 => world.set_stable_at_the_end(),
        _ => {}
    }
    for _ in 0..4 {
        world.pool().background(1 << 20).expect("background work");
        sync(world.pool());
    }
}

#[test]
fn a_snapshot_is_pulled_as_it_was_while_writes_folds_and_clean_up_go_on_beneath_it() {
    let mut chunks = 0;
    for seed in 0..12 {
        let mut world = World::new(seed, 24 << 20);
        (0..150).for_each(|_| go_on(&mut world));
        let made = SnapshotId(5);
        append(&mut world, [EntryKind::Snapshot { id: made, hidden: false }].into_iter());
        let view = ReadView::Snapshot(made);
        let from = Lsn(world.rng.random_range(0..world.history.len() as u64));
        let expected = pull_all(&mut world.model.replica(GUID).expect("it"), view, from);
        let (mut cursor, mut slots) = (0, Vec::new());
        let end = loop {
            let mut source = world.pool().replica(GUID).expect("it");
            let chunk = source.pull(7, view, from, cursor, 30_000, true).expect("a pull");
            let chunk = chunk.expect("the snapshot is there");
            slots.extend(chunk.slots);
            chunks += 1;
            match chunk.cursor {
                Some(next) => cursor = next,
                None => break chunk.end.expect("the last chunk ends the view"),
            }
            go_on(&mut world);
        };
        assert_eq!(flat(&slots), flat(&expected.0), "seed {seed}");
        assert_eq!(*end, expected.1, "seed {seed}");
    }
    assert!(chunks > 400, "{chunks} chunks");
}

/// A base that is being sent is no view of the replica's own: only the transfer holds on to it.
#[test]
fn a_pinned_base_is_pulled_as_it_was_though_every_segment_was_emptied_meanwhile() {
    for seed in 0..6 {
        let mut world = World::new(900 + seed, 12 << 20);
        append(&mut world, (0..900).map(|_| EntryKind::Write));
        world.set_stable_at_the_end();
        world.pool().settle().expect("folded");
        let mut source = world.pool().replica(GUID).expect("it");
        let expected = flat(&read_all(&mut source, ReadView::Base, BLOCKS));
        let chunk = source.pull(7, ReadView::Base, Lsn::ZERO, 0, 600_000, true).expect("a pull");
        let chunk = chunk.expect("the base is there");
        let (mut cursor, mut slots) = (chunk.cursor.expect("more to come"), chunk.slots);
        let held = world.pool().replica_stats(GUID).expect("it").allocated_bytes;
        let mut moved = 0;
        for _ in 0..60 {
            append(&mut world, (0..40).map(|_| EntryKind::Write));
            world.set_stable_at_the_end();
            let before = world.disk.written_bytes();
            while world.pool().background(1 << 20).expect("background work") {
                sync(world.pool());
            }
            sync(world.pool());
            moved += world.disk.written_bytes() - before;
        }
        assert!(moved > held, "{moved} bytes were moved of {held}");
        loop {
            let mut source = world.pool().replica(GUID).expect("it");
            let chunk = source.pull(7, ReadView::Base, Lsn::ZERO, cursor, 200_000, true);
            let chunk = chunk.expect("a pull").expect("the pin");
            slots.extend(chunk.slots);
            match chunk.cursor {
                Some(next) => cursor = next,
                None => break,
            }
        }
        let written = expected.into_iter().filter(|(_, version, _)| *version > 0);
        assert!(flat(&slots) == written.collect::<Vec<_>>(), "seed {seed}");
    }
}

#[test]
fn an_interrupted_shadow_resumes_where_its_last_commit_stood() {
    let mut world = World::new(3, 32 << 20);
    write(&mut world, 60);
    let mut source = world.pool.as_mut().expect("open").replica(GUID).expect("it");
    let mut receiver = Receiver::new(3);
    receiver.with(|s| s.increment_begin(7, Lsn::ZERO)).expect("a start");
    let chunk =
        source.pull(1, ReadView::Base, Lsn::ZERO, 0, 200_000, true).expect("a pull").expect("it");
    let cursor = chunk.cursor.expect("more to come");
    receiver.with(|s| s.increment_feed(7, &chunk.slots, cursor)).expect("fed");
    while receiver.pool().background(1 << 20).expect("background work") {}
    sync(receiver.pool());
    receiver.pool = None;
    receiver.disk.power_cut(|| false);
    receiver.reopen();
    assert_eq!(receiver.with(|s| s.shadow()), Some((7, Lsn::ZERO, cursor)));
    receiver.with(|s| s.increment_begin(7, Lsn::ZERO)).expect("the same one");
    let (mut cursor, mut end) = (cursor, None);
    while end.is_none() {
        let chunk = source.pull(1, ReadView::Base, Lsn::ZERO, cursor, 200_000, true);
        let chunk = chunk.expect("a pull").expect("the pin");
        cursor = chunk.cursor.unwrap_or(BLOCKS);
        receiver.with(|s| s.increment_feed(7, &chunk.slots, cursor)).expect("fed");
        end = chunk.end;
    }
    // Snapshots are not the matter here.
    let mut end = *end.expect("the end");
    end.snapshots.clear();
    receiver.with(|s| s.increment_prepare(7, &end)).expect("prepared");
    sync(receiver.pool());
    receiver.with(|s| s.increment_flip(7)).expect("the flip");
    let copy = receiver.with(|s| flat(&read_all(s, ReadView::Live, BLOCKS)));
    assert!(copy == flat(&read_all(&mut source, ReadView::Base, BLOCKS)));
}

/// Proves: a given-up rebuild costs no space.
#[test]
fn the_space_of_an_abandoned_shadow_comes_back() {
    let mut world = World::new(5, 32 << 20);
    write(&mut world, 60);
    let mut source = world.pool.as_mut().expect("open").replica(GUID).expect("it");
    let (slots, _) = pull_all(&mut source, ReadView::Base, Lsn::ZERO);
    let mut receiver = Receiver::new(5);
    let free = receiver.pool().stats().free_bytes;
    for rebuild in 0..20 {
        receiver.with(|s| s.increment_begin(rebuild, Lsn::ZERO)).expect("a start");
        receiver.with(|s| s.increment_feed(rebuild, &slots, BLOCKS)).expect("fed");
        for _ in 0..40 {
            receiver.pool().background(8 << 20).expect("background work");
            sync(receiver.pool());
        }
    }
    let used = free - receiver.pool().stats().free_bytes;
    assert!(used < 3 * 600 * 4096, "{used} bytes for one shadow of {} blocks", BLOCKS);
}

/// Its replica came back soon enough to be fed by entries, so no other increment takes its place.
#[test]
fn an_entry_ends_a_shadow_and_gives_its_space_back() {
    an_entry_ends_it(false);
}

/// The session was cut between the increment's end and the flip.
#[test]
fn an_entry_ends_a_prepared_shadow_too_and_no_flip_goes_back_behind_it() {
    an_entry_ends_it(true);
}

fn an_entry_ends_it(prepared: bool) {
    let mut world = World::new(5, 32 << 20);
    write(&mut world, 60);
    let first = world.history[0].clone();
    let mut source = world.pool.as_mut().expect("open").replica(GUID).expect("it");
    let (slots, mut end) = pull_all(&mut source, ReadView::Base, Lsn::ZERO);
    end.snapshots.clear();
    let mut receiver = Receiver::new(5);
    let settle = |receiver: &mut Receiver| {
        for _ in 0..40 {
            receiver.pool().background(8 << 20).expect("background work");
            sync(receiver.pool());
        }
    };
    settle(&mut receiver);
    let free = receiver.pool().stats().free_bytes;
    receiver.with(|s| s.increment_begin(7, Lsn::ZERO)).expect("a start");
    receiver.with(|s| s.increment_feed(7, &slots, BLOCKS)).expect("fed");
    if prepared {
        receiver.with(|s| s.increment_prepare(7, &end)).expect("complete");
    }
    settle(&mut receiver);
    let held = free - receiver.pool().stats().free_bytes;
    receiver.with(|s| s.append(&[first])).expect("an entry");
    assert_eq!(receiver.with(|s| s.shadow()), None);
    let refused = receiver.with(|s| s.increment_flip(7));
    assert!(matches!(refused, Err(StoreError::Rule(_))), "{refused:?}");
    receiver.with(|s| s.set_stable(Lsn(1)));
    settle(&mut receiver);
    receiver.pool().settle().expect("settled");
    assert_eq!(receiver.with(|s| s.state().base), Lsn(1), "the log is folded again");
    let left = free - receiver.pool().stats().free_bytes;
    assert!(left < held, "{left} bytes are used after it, {held} were with it");
}

#[test]
fn an_increment_that_starts_above_stable_or_lacks_a_snapshot_is_refused() {
    let mut world = World::new(9, 32 << 20);
    write(&mut world, 10);
    let above = Lsn(world.history.len() as u64 + 1);
    let mut replica = world.pool.as_mut().expect("open").replica(GUID).expect("it");
    let refused = replica.increment_begin(1, above);
    assert!(matches!(refused, Err(StoreError::Rule(_))), "{refused:?}");
    let (_, mut end) = pull_all(&mut replica, ReadView::Base, Lsn::ZERO);
    let mut receiver = Receiver::new(9);
    receiver.with(|s| s.increment_begin(2, Lsn::ZERO)).expect("a start");
    end.snapshots = vec![quoin_types::message::SnapshotInfo {
        id: quoin_types::SnapshotId(1),
        lsn: Lsn(1),
        hidden: false,
        blocks: BLOCKS,
    }];
    let refused = receiver.with(|s| s.increment_prepare(2, &end));
    assert!(matches!(refused, Err(StoreError::Rule(_))), "{refused:?}");
}
