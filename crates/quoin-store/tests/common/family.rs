//! A pool of several volumes, clones of each other among them, beside the model.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{
    CloneSource, ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError,
};
use quoin_store::model::ModelPool;
use quoin_store::{Cloned, Due, MemoryDisk, Pool, ReplicaPool};
use quoin_types::message::ReadView;
use quoin_types::{
    BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId, VolumeId,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{
    BLOCKS, assert_same, begin_increment, flat, identity, new_pool_with, pull_all, read_all,
    short_steps, sync,
};

/// Where the history of a replica ends, and a digest of all that it shows there.
pub type State = (Lsn, Chain, u64);

pub fn state_of(store: &mut dyn ReplicaStore) -> State {
    let state = store.state();
    let mut digest = DefaultHasher::new();
    let snapshots = store.snapshots();
    let mut views = vec![(ReadView::Live, state.volume_blocks)];
    views.extend(snapshots.iter().map(|s| (ReadView::Snapshot(s.id), s.blocks)));
    for (view, blocks) in views {
        let shown = flat(&read_all(store, view, blocks));
        let written = shown.iter().filter(|(_, version, _)| *version > 0);
        (format!("{view:?}"), blocks).hash(&mut digest);
        for (lba, version, data) in written {
            (lba, version, data.as_deref().map(quoin_types::crc32c)).hash(&mut digest);
        }
    }
    (state.position.lsn, state.chain, digest.finish())
}

pub fn of(volume: u128) -> ReplicaIdentity {
    ReplicaIdentity { volume: VolumeId(volume), ..identity(ReplicaGuid(volume)) }
}

/// A pool of several volumes beside the model. Volume n has the replica with GUID n.
pub struct Family {
    pub rng: ChaCha8Rng,
    pub disk: MemoryDisk,
    pub pool: Option<Pool<MemoryDisk>>,
    pub model: ModelPool,
    pub members: Vec<u128>,
    pub next: u128,
    pub made: u32,
    /// What each volume showed after each of its entries, where a test asks for it.
    pub states: Option<BTreeMap<u128, Vec<State>>>,
}

impl Family {
    pub fn new(seed: u64, pool_bytes: u64) -> Self {
        let (disk, mut pool) = new_pool_with(pool_bytes, short_steps());
        let mut model = ModelPool::new();
        pool.create(of(1), ReplicaMeta::default(), BLOCKS).expect("room");
        model.create(of(1), ReplicaMeta::default(), BLOCKS).expect("room");
        let rng = ChaCha8Rng::seed_from_u64(seed);
        Family {
            rng,
            disk,
            pool: Some(pool),
            model,
            members: vec![1],
            next: 2,
            made: 0,
            states: None,
        }
    }

    pub fn pool(&mut self) -> &mut Pool<MemoryDisk> {
        self.pool.as_mut().expect("an open pool")
    }

    pub fn any(&mut self) -> u128 {
        self.members[self.rng.random_range(0..self.members.len())]
    }

    /// Appends an entry to both; false: the pool is full.
    pub fn append(&mut self, volume: u128, kind: EntryKind, lba: u64, blocks: u32) -> bool {
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
        self.note(volume);
        true
    }

    fn note(&mut self, volume: u128) {
        if let Some(states) = &mut self.states {
            let mut model = self.model.replica(ReplicaGuid(volume)).expect("it");
            states.entry(volume).or_default().push(state_of(&mut model));
        }
    }

    /// Notes from now on what each volume shows.
    pub fn remember(&mut self) {
        self.states = Some(BTreeMap::new());
        self.members.clone().into_iter().for_each(|member| self.note(member));
    }

    pub fn write_some(&mut self, volume: u128) {
        let blocks = self.model.replica(ReplicaGuid(volume)).expect("it").state().volume_blocks;
        let length = self.rng.random_range(1..=12u64);
        let lba = self.rng.random_range(0..=blocks - length);
        let kind = match self.rng.random_range(0..8) {
            0 => EntryKind::Trim,
            _ => EntryKind::Write,
        };
        self.append(volume, kind, lba, length as u32);
    }

    pub fn snapshots(&mut self, volume: u128) -> Vec<SnapshotId> {
        let model = self.model.replica(ReplicaGuid(volume)).expect("it");
        model.snapshots().iter().map(|s| s.id).collect()
    }

    pub fn snapshot(&mut self, volume: u128) -> Option<SnapshotId> {
        let id = SnapshotId(1000 + self.next);
        self.next += 1;
        self.append(volume, EntryKind::Snapshot { id, hidden: false }, 0, 0).then_some(id)
    }

    /// Makes a clone of a snapshot, of so many blocks more; `None`: there is no room for it.
    pub fn clone_of(&mut self, volume: u128, snapshot: SnapshotId, more: u64) -> Option<u128> {
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
                    self.note(clone);
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

    pub fn work(&mut self) {
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

    pub fn delete(&mut self, volume: u128) {
        let guid = ReplicaGuid(volume);
        assert!(self.pool().delete(guid).expect("room"));
        assert!(self.model.delete(guid).expect("room"));
        self.members.retain(|member| *member != volume);
        assert!(self.pool().is_retired(guid) && self.pool().replica(guid).is_none());
        assert!(!self.pool().replicas().contains(&guid));
    }

    /// Has a clone take over all blocks of its base, with writes in between.
    pub fn flatten(&mut self, volume: u128) -> bool {
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
    pub fn restart(&mut self) {
        self.pool().request_sync();
        sync(self.pool());
        self.pool = None;
        self.disk.power_cut(|| false);
        self.pool = Some(Pool::open(self.disk.clone(), short_steps()).expect("a pool"));
    }

    /// All replicas are what the model says.
    pub fn check(&mut self) {
        for member in self.members.clone() {
            let guid = ReplicaGuid(member);
            let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
            assert!(!real.meta().damaged);
            assert_same(&mut real, &mut self.model.replica(guid).expect("it"));
        }
        assert_eq!(self.pool().take_damaged(), vec![]);
        assert_eq!(self.pool().take_bad_blocks(), vec![]);
    }

    pub fn check_pull(&mut self, volume: u128, from: Lsn) {
        let guid = ReplicaGuid(volume);
        let mut real = self.pool.as_mut().expect("open").replica(guid).expect("it");
        let mut model = self.model.replica(guid).expect("it");
        let (a, end) = pull_all(&mut real, ReadView::Live, from);
        let (b, other_end) = pull_all(&mut model, ReadView::Live, from);
        assert_eq!(flat(&a), flat(&b));
        assert_eq!(end, other_end);
    }

    /// A replica gets all of its content anew, as of a rebuild from nothing. Its snapshots are gone.
    pub fn rebuild(&mut self, volume: u128, rebuild: u64) {
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
