//! A pool on a disk in memory beside the model, driven by a seed.
#![allow(dead_code)]

pub mod family;

use std::io::IoSlice;
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::memory_disk::DiskEvent;
use quoin_store::model::ModelPool;
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{
    BLOCK_SIZE, Chain, ClientId, Durability, Entry, EntryKind, Epoch, Lsn, Origin, Part, PoolId,
    Position, ReplicaGuid, SnapshotId, View, VolumeId,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub const GUID: ReplicaGuid = ReplicaGuid(0xabcd);
pub const BLOCKS: u64 = 600;

pub fn format_options() -> FormatOptions {
    FormatOptions { unit_blocks: 32, ..FormatOptions::new(PoolId(77)) }
}

pub fn identity(guid: ReplicaGuid) -> ReplicaIdentity {
    let volume_spec = Bytes::from_static(b"name: test");
    ReplicaIdentity { guid, volume: VolumeId(5), volume_spec, ..ReplicaIdentity::default() }
}

pub fn options() -> PoolOptions {
    PoolOptions {
        cache_bytes: 1 << 20,
        log_keep_bytes: 64 << 10,
        // Small replicas have a table of segments too.
        unrecorded_segments: 6,
        ..PoolOptions::default()
    }
}

/// Small volumes have few leaves: a step ends between any two of them.
pub fn short_steps() -> PoolOptions {
    PoolOptions { step_nodes: 1, ..options() }
}

/// Breaks the rule that `cargo xtask mutants` named for this run, on this test's thread.
pub fn break_a_rule() {
    #[cfg(feature = "mutants")]
    if let Ok(name) = std::env::var("QUOIN_MUTANT") {
        quoin_types::mutant::set(Some(name.leak()));
    }
}

pub fn new_pool(size: u64) -> (MemoryDisk, Pool<MemoryDisk>) {
    new_pool_with(size, options())
}

pub fn new_pool_with(size: u64, options: PoolOptions) -> (MemoryDisk, Pool<MemoryDisk>) {
    break_a_rule();
    let disk = MemoryDisk::new(size);
    Pool::format(&disk, &format_options()).expect("a fit disk");
    let pool = Pool::open(disk.clone(), options).expect("a fresh pool");
    (disk, pool)
}

pub fn sync<D: Disk>(pool: &mut Pool<D>) {
    while let Some(ticket) = pool.sync_wanted() {
        let result = pool.disk().sync();
        pool.sync_finished(ticket, result).expect("a sync");
    }
}

/// Does to a disk what another one remembers.
pub fn repeat(disk: &MemoryDisk, events: &[DiskEvent]) {
    for event in events {
        match event {
            DiskEvent::Write { offset, bytes } => {
                disk.write_at(*offset, &[IoSlice::new(bytes)]).expect("a write");
            }
            DiskEvent::Discard { offset, length } => disk.discard(*offset, *length),
            DiskEvent::Sync => disk.sync().expect("a sync"),
        }
    }
}

/// Slots split into blocks: (lba, version, data or hole). A bad block has no place here.
pub fn flat(slots: &[Slot]) -> Vec<(u64, u64, Option<Bytes>)> {
    let mut out = Vec::new();
    for slot in slots {
        for lba in slot.lba..slot.lba + u64::from(slot.blocks) {
            let data = match &slot.content {
                Content::Hole => None,
                Content::Data { data, crc } => {
                    assert_eq!(quoin_types::crc32c(data), *crc);
                    Some(data.clone())
                }
                Content::Bad => panic!("a bad block at {lba}"),
            };
            out.push((lba, slot.version.0, data));
        }
    }
    out
}

pub fn read_all(store: &mut dyn ReplicaStore, view: ReadView, blocks: u64) -> Vec<Slot> {
    let mut out = Vec::new();
    let mut lba = 0;
    while lba < blocks {
        let count = (blocks - lba).min(100);
        store.read(view, lba, count as u32, true, &mut out).expect("a read inside the view");
        lba += count;
    }
    out
}

/// Begins an increment, however many steps of folding that takes.
pub fn begin_increment(store: &mut dyn ReplicaStore, rebuild: u64, from: Lsn) {
    let steps = (0..100_000).find(|_| store.increment_begin(rebuild, from).expect("a step"));
    assert!(steps.is_some(), "the fold never ends");
}

/// Everything that both stores must agree on.
pub fn assert_same(real: &mut dyn ReplicaStore, model: &mut dyn ReplicaStore) {
    let (a, b) = (real.state(), model.state());
    assert_eq!((a.position, a.chain), (b.position, b.chain));
    assert_eq!((a.last_view, a.volume_blocks), (b.last_view, b.volume_blocks));
    assert!(a.stable <= a.position.lsn && a.base <= a.stable);
    assert_eq!(real.epoch_table(), model.epoch_table());
    assert_eq!(real.snapshots(), model.snapshots());
    assert_eq!(real.clients(), model.clients());
    let mut views = vec![(ReadView::Live, a.volume_blocks)];
    views.extend(real.snapshots().iter().map(|s| (ReadView::Snapshot(s.id), s.blocks)));
    for (view, blocks) in views {
        let real = flat(&read_all(real, view, blocks));
        let model = flat(&read_all(model, view, blocks));
        for (r, m) in real.iter().zip(&model) {
            assert!(r == m, "{view:?}: block {} has version {}, not {}", r.0, r.1, m.1);
        }
    }
}

/// Pulls a whole view in small chunks.
pub fn pull_all(
    store: &mut dyn ReplicaStore,
    view: ReadView,
    from: Lsn,
) -> (Vec<Slot>, quoin_types::message::IncrementEnd) {
    let (mut cursor, mut slots) = (0, Vec::new());
    loop {
        let chunk = store.pull(9, view, from, cursor, 100_000, true).expect("a pull");
        let chunk = chunk.expect("the view exists");
        slots.extend(chunk.slots);
        match chunk.cursor {
            Some(next) => {
                assert!(next > cursor);
                cursor = next;
            }
            None => return (slots, *chunk.end.expect("the last chunk ends the view")),
        }
    }
}

pub struct World {
    pub rng: ChaCha8Rng,
    pub disk: MemoryDisk,
    pub pool: Option<Pool<MemoryDisk>>,
    pub model: ModelPool,
    /// The history as it is, and older ones that a power cut may bring back.
    pub history: Vec<SharedEntry>,
    pub branches: Vec<Vec<SharedEntry>>,
    /// No power cut may take back more than this.
    pub floor: u64,
    pub begun: Option<(quoin_replication::replica::store::SyncTicket, u64)>,
    pub epoch: u64,
    pub next_snapshot: u128,
    pub full: u64,
    /// The first entry that may be lost with the process, as it waits for a sync.
    pub waits_from: Option<u64>,
}

impl World {
    pub fn new(seed: u64, pool_bytes: u64) -> Self {
        let (disk, mut pool) = new_pool_with(pool_bytes, short_steps());
        pool.create(identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room for a replica");
        pool.request_sync();
        sync(&mut pool);
        World {
            rng: ChaCha8Rng::seed_from_u64(seed),
            disk,
            pool: Some(pool),
            model: model_of(&[]),
            history: Vec::new(),
            branches: Vec::new(),
            floor: 0,
            begun: None,
            epoch: 1,
            next_snapshot: 1,
            full: 0,
            waits_from: None,
        }
    }

    pub fn pool(&mut self) -> &mut Pool<MemoryDisk> {
        self.pool.as_mut().expect("an open pool")
    }

    fn position(&self) -> u64 {
        self.history.len() as u64
    }

    pub fn entry(&mut self, blocks: u64, snapshots: &mut Vec<SnapshotId>) -> Entry {
        let chain = self.history.last().map_or(Chain(0), |e| e.chain);
        let position = Position { epoch: Epoch(self.epoch), lsn: Lsn(self.position() + 1) };
        let length = match self.rng.random_range(0..10) {
            0 => self.rng.random_range(1..=20),
            1..=3 => self.rng.random_range(1..=4),
            _ => 1,
        };
        let lba = self.rng.random_range(0..=blocks - length);
        let hole_length = self.rng.random_range(1..=(blocks - lba).min(300));
        let (kind, lba, length) = match self.rng.random_range(0..40) {
            0 => (EntryKind::Trim, lba, hole_length),
            1 => (EntryKind::Zero { no_hole: self.rng.random() }, lba, length),
            2 if snapshots.len() < 5 => {
                let id = SnapshotId(self.next_snapshot);
                self.next_snapshot += 1;
                snapshots.push(id);
                (EntryKind::Snapshot { id, hidden: self.rng.random() }, 0, 0)
            }
            3 if !snapshots.is_empty() => {
                let id = snapshots.remove(self.rng.random_range(0..snapshots.len()));
                (EntryKind::DeleteSnapshot { id }, 0, 0)
            }
            4 if !snapshots.is_empty() => {
                let id = snapshots[self.rng.random_range(0..snapshots.len())];
                (EntryKind::Revert { id }, 0, 0)
            }
            5 => {
                let media = self.rng.random();
                let durability = if media { Durability::Media } else { Durability::Cache };
                (EntryKind::View(Box::new(View { durability, ..some_view() })), 0, 0)
            }
            6 => (self.client_kind(), 0, 0),
            _ => (EntryKind::Write, lba, length),
        };
        let data = match kind {
            EntryKind::Write => {
                let mut data = vec![0; length as usize * BLOCK_SIZE];
                for block in data.chunks_mut(BLOCK_SIZE) {
                    let word: u64 = self.rng.random();
                    block[..8].copy_from_slice(&word.to_le_bytes());
                }
                Bytes::from(data)
            }
            _ => Bytes::new(),
        };
        let has_range = length > 0 && !matches!(kind, EntryKind::Snapshot { .. });
        let part = has_range.then(|| self.part(lba + length)).flatten();
        Entry::part_after(chain, position, kind, lba, length as u32, data, false, part)
    }

    /// Clients begin and end, now and then one that is not there.
    fn client_kind(&self) -> EntryKind {
        let lsn = self.position() + 1;
        let client = ClientId(u128::from(lsn % 3));
        match lsn % 5 {
            0 => EntryKind::EndClient { client },
            1 => EntryKind::DeleteSnapshot { id: SnapshotId(99_999) },
            _ => EntryKind::BeginClient { client },
        }
    }

    /// The part of a client's request that the next entry is, if it is one: some are of clients that
    /// never began.
    fn part(&self, end: u64) -> Option<Part> {
        let lsn = self.position() + 1;
        let client = ClientId(u128::from(lsn % 4));
        let origin = Origin { client, number: lsn, low: lsn.saturating_sub(9) };
        (lsn % 7 < 4).then_some(Part { origin, end, is_last: !lsn.is_multiple_of(3) })
    }

    pub fn append(&mut self) {
        let model = self.model.replica(GUID).expect("the replica");
        let blocks = model.state().volume_blocks;
        let mut snapshots: Vec<SnapshotId> = model.snapshots().iter().map(|s| s.id).collect();
        let view = model.state().last_view;
        let media = view.is_some_and(|(_, v)| v.durability == Durability::Media);
        let count = [1, 1, 1, 2, 8, 32][self.rng.random_range(0..6)];
        let mut entries = Vec::new();
        let before = self.history.len();
        for _ in 0..count {
            let entry = Arc::new(self.entry(blocks, &mut snapshots));
            self.history.push(entry.clone());
            entries.push(entry);
        }
        let mut real = self.pool.as_mut().expect("open").replica(GUID).expect("the replica");
        let result = real.append(&entries);
        // A full pool may have taken the first of them.
        let taken = real.state().position.lsn.0 as usize - before;
        match result {
            Ok(()) => assert_eq!(taken, count),
            Err(StoreError::Full) => self.full += 1,
            Err(error) => panic!("{error}"),
        }
        let views = entries[..taken].iter().any(|e| matches!(e.kind, EntryKind::View(_)));
        if media || views {
            self.waits_from.get_or_insert(before as u64 + 1);
        }
        self.history.truncate(before + taken);
        let mut model = self.model.replica(GUID).expect("the replica");
        model.append(&entries[..taken]).expect("the model takes it");
    }

    pub fn set_stable(&mut self) {
        let stable = Lsn(self.rng.random_range(0..=self.position()));
        self.pool().replica(GUID).expect("the replica").set_stable(stable);
        self.model.replica(GUID).expect("the replica").set_stable(stable);
    }

    /// Everything that was appended is stable.
    pub fn set_stable_at_the_end(&mut self) {
        let stable = Lsn(self.position());
        self.pool().replica(GUID).expect("the replica").set_stable(stable);
        self.model.replica(GUID).expect("the replica").set_stable(stable);
    }

    pub fn truncate(&mut self) {
        let stable = self.pool().replica(GUID).expect("the replica").state().stable;
        let model_stable = self.model.replica(GUID).expect("the replica").state().stable;
        let least = stable.max(model_stable).0;
        let keep = self.rng.random_range(least..=self.position());
        if stable > Lsn::ZERO {
            let below = Lsn(stable.0 - 1);
            let refused = self.pool().replica(GUID).expect("the replica").truncate(below);
            assert!(matches!(refused, Err(StoreError::Rule(_))));
        }
        self.pool().replica(GUID).expect("the replica").truncate(Lsn(keep)).expect("truncation");
        self.model.replica(GUID).expect("the replica").truncate(Lsn(keep)).expect("truncation");
        self.branches.push(self.history.clone());
        self.history.truncate(keep as usize);
        self.floor = self.floor.min(keep);
        // Entries that were cut away are still in the log before the next ones.
        self.waits_from = self.waits_from.map(|from| from.min(keep + 1));
        if let Some((_, position)) = &mut self.begun {
            *position = (*position).min(keep);
        }
        self.epoch += 1;
    }

    pub fn begin_sync(&mut self) {
        if self.begun.is_none() {
            self.pool().request_sync();
            if let Some(ticket) = self.pool().sync_wanted() {
                // The model of a disk syncs at once; what comes later is in no ticket.
                self.begun = Some((ticket, self.position()));
                self.branches.clear();
                self.disk.sync().expect("a sync");
            }
        }
    }

    pub fn finish_sync(&mut self) {
        if let Some((ticket, position)) = self.begun.take() {
            self.pool().sync_finished(ticket, Ok(())).expect("a sync");
            self.floor = self.floor.max(position);
            self.waits_from = self.waits_from.map(|from| from.max(position + 1));
        }
    }

    pub fn check(&mut self) {
        let mut real = self.pool.as_mut().expect("open").replica(GUID).expect("the replica");
        let mut model = self.model.replica(GUID).expect("the replica");
        assert_same(&mut real, &mut model);
        let damaged = self.pool().replica(GUID).expect("the replica").meta().damaged;
        assert!(!damaged, "nothing was damaged");
    }

    pub fn check_fetch(&mut self) {
        let after = self.rng.random_range(0..=self.position());
        let base = self.pool().replica(GUID).expect("the replica").state().base;
        let found = self.pool().replica(GUID).expect("the replica").fetch(Lsn(after), 100_000);
        match found.expect("a fetch") {
            None => assert!(after < base.0),
            Some(entries) => {
                assert!(after >= base.0);
                let end = after as usize + entries.len();
                assert!(after as usize == self.history.len() || !entries.is_empty());
                let expected = &self.history[after as usize..end];
                // Only whole entries, `fua` aside, which is as it was sent.
                assert!(entries.iter().zip(expected).all(|(a, b)| a == b));
            }
        }
    }

    pub fn check_pull(&mut self) {
        let snapshots = self.pool().replica(GUID).expect("the replica").snapshots();
        let view = match snapshots.get(self.rng.random_range(0..4)) {
            Some(s) => ReadView::Snapshot(s.id),
            None => ReadView::Live,
        };
        let from = Lsn(self.rng.random_range(0..=self.position()));
        let mut real = self.pool.as_mut().expect("open").replica(GUID).expect("the replica");
        let mut model = self.model.replica(GUID).expect("the replica");
        let (a, end_a) = pull_all(&mut real, view, from);
        let (b, end_b) = pull_all(&mut model, view, from);
        assert_eq!(flat(&a), flat(&b));
        assert_eq!(end_a, end_b);
    }

    pub fn process_crash(&mut self) {
        self.pool = None;
        self.begun = None;
        let odds = [0.0, 0.5, 1.0][self.rng.random_range(0..3)];
        let (rng, before) = (&mut self.rng, self.history.len() as u64);
        self.disk.process_crash(|| rng.random_bool(odds));
        self.pool = Some(Pool::open(self.disk.clone(), short_steps()).expect("a pool"));
        let kept = self.pool().replica(GUID).expect("it").state().position.lsn.0;
        let least = self.waits_from.map_or(before, |from| before.min(from - 1));
        assert!((least..=before).contains(&kept), "{kept} of {before}, at least {least}");
        self.after_start();
    }

    pub fn power_cut(&mut self) {
        self.pool = None;
        self.begun = None;
        let odds = [0.0, 0.2, 0.5, 0.9, 1.0][self.rng.random_range(0..5)];
        let rng = &mut self.rng;
        self.disk.power_cut(|| rng.random_bool(odds));
        self.pool = Some(Pool::open(self.disk.clone(), short_steps()).expect("a pool"));
        self.after_start();
    }

    /// Takes over what the real store came back with, if it may have that.
    fn after_start(&mut self) {
        let state = self.pool().replica(GUID).expect("the replica").state();
        let position = state.position.lsn.0;
        assert!(position >= self.floor, "lost {} of {}", position, self.floor);
        let branches = std::mem::take(&mut self.branches);
        let mut all = branches.into_iter().chain([self.history.clone()]).rev();
        let found = all.find(|branch| {
            position == 0
                || branch.get(position as usize - 1).is_some_and(|e| e.chain == state.chain)
        });
        self.history = found.expect("a history that was written");
        self.history.truncate(position as usize);
        self.model = model_of(&self.history);
        self.model.replica(GUID).expect("the replica").set_stable(state.stable);
        // Opening synced everything.
        self.floor = position;
        self.waits_from = None;
        self.epoch += 1;
    }
}

pub fn some_view() -> View {
    View {
        rule: quoin_types::entry::Rule { rf: 3, cf: 2, ..Default::default() },
        ..View::default()
    }
}

/// The model after these entries.
pub fn model_of(entries: &[SharedEntry]) -> ModelPool {
    let mut model = ModelPool::new();
    model.create(identity(GUID), ReplicaMeta::default(), BLOCKS).expect("room in the model");
    model.replica(GUID).expect("the replica").append(entries).expect("a history");
    model
}
