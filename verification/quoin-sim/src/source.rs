//! Another volume whose snapshot the volume of a run begins with.
//!
//! Every pool has a replica of it, with the same entries. The volume's replicas are clones of its
//! snapshot. The source goes on on its own in each pool, is overwritten, and may be deleted: nothing
//! of that may ever show in the clone.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{CloneSource, ReplicaIdentity};
use quoin_types::entry::SharedEntry;
use quoin_types::{
    BLOCK_SIZE, Chain, Entry, EntryKind, Epoch, Lsn, Position, ReplicaGuid, SnapshotId, VolumeId,
};

use crate::content::{self, SECTORS, Tag, Tags};
use crate::random::Random;
use crate::swarm::Swarm;

/// Names of the source's writes: no client has made so many.
const FIRST_TAG: Tag = 1 << 30;
const GUID: ReplicaGuid = ReplicaGuid(0x5_0a1c);
const VOLUME: VolumeId = VolumeId(0x5_0a1c);
const SNAPSHOT: SnapshotId = SnapshotId(0x5_0a1c);
/// Longest write of the source.
const WRITE_BLOCKS_MAX: u64 = 8;

/// The source of a run.
#[derive(Clone, Debug)]
pub struct Source {
    pub blocks: u64,
    /// The last one is the snapshot.
    pub entries: Vec<SharedEntry>,
}

impl Source {
    /// `None`: the volume begins empty.
    pub fn draw(seed: u64, swarm: Swarm, blocks: u64) -> Option<Self> {
        if swarm != Swarm::Clones {
            return None;
        }
        let mut random = Random::new(seed ^ 0x636c_6f6e);
        // A clone may be larger than its source.
        let blocks = (blocks / (1 + random.below(2))).max(WRITE_BLOCKS_MAX + 1);
        let mut source = Source { blocks, entries: Vec::new() };
        for n in 0..random.between(4, 24) {
            let length = random.between(1, WRITE_BLOCKS_MAX);
            let lba = random.below(blocks - length);
            let tag = FIRST_TAG + n as Tag;
            let sectors = SECTORS as u64;
            let data = content::make(seed, tag, lba * sectors, length * sectors);
            match random.percent(15) {
                true => source.push(EntryKind::Trim, lba, length as u32, Bytes::new()),
                false => source.push(EntryKind::Write, lba, length as u32, data),
            }
        }
        let kind = EntryKind::Snapshot { id: SNAPSHOT, hidden: false };
        source.push(kind, 0, 0, Bytes::new());
        Some(source)
    }

    fn push(&mut self, kind: EntryKind, lba: u64, blocks: u32, data: Bytes) {
        let (chain, lsn) = self.end();
        let position = Position { epoch: Epoch(1), lsn: lsn.next() };
        let entry = Entry::after(chain, position, kind, lba, blocks, data, false);
        self.entries.push(Arc::new(entry));
    }

    fn end(&self) -> (Chain, Lsn) {
        self.entries.last().map_or((Chain::default(), Lsn::ZERO), |e| (e.chain, e.lsn))
    }

    pub fn identity() -> ReplicaIdentity {
        ReplicaIdentity { volume: VOLUME, guid: GUID, ..ReplicaIdentity::default() }
    }

    pub fn point() -> CloneSource {
        CloneSource { volume: VOLUME, snapshot: SNAPSHOT }
    }

    /// Beginning of the clone's history, as if its entries had been its own: at epoch 0, and the
    /// last one with the chain that the clone has there.
    pub fn as_begun(&self) -> Vec<SharedEntry> {
        let (chain, lsn) = self.end();
        let chain = Chain::of_clone(VOLUME, SNAPSHOT, lsn, chain);
        let begun = |entry: &SharedEntry| {
            let mut entry = Entry { epoch: Epoch::ZERO, ..(**entry).clone() };
            if entry.lsn == lsn {
                // Its snapshot is none of the clone's.
                (entry.kind, entry.chain) = (EntryKind::Trim, chain);
            }
            Arc::new(entry)
        };
        self.entries.iter().map(begun).collect()
    }

    /// The clone's content as it begins.
    pub fn image(&self, run: u64) -> BTreeMap<u64, Tags> {
        let mut image = BTreeMap::new();
        for entry in &self.entries {
            for i in 0..u64::from(entry.blocks) {
                let at = i as usize * BLOCK_SIZE;
                let bytes = entry.data.get(at..at + BLOCK_SIZE);
                let tags = bytes.and_then(|b| content::tags_of_block(run, entry.lba + i, b).ok());
                image.insert(entry.lba + i, tags.unwrap_or(content::ZERO));
            }
        }
        image
    }
}

/// The source's replica in one pool, as it goes on.
#[derive(Clone, Debug)]
pub struct Living {
    blocks: u64,
    chain: Chain,
    lsn: Lsn,
    random: Random,
    /// Turns until it is deleted; 0: it was.
    turns_left: u64,
}

/// Changes of the source in a turn of its pool.
pub enum Turn {
    Nothing,
    Append(SharedEntry),
    Delete,
}

impl Living {
    pub fn new(source: &Source, random: &mut Random) -> Self {
        let (chain, lsn) = source.end();
        // Some are never deleted.
        let turns_left = random.between(1, 4000);
        Living { blocks: source.blocks, chain, lsn, random: random.fork(), turns_left }
    }

    pub fn guid() -> ReplicaGuid {
        GUID
    }

    /// The pool was opened again: the source stands here now.
    pub fn stands_at(&mut self, chain: Chain, lsn: Lsn) {
        (self.chain, self.lsn) = (chain, lsn);
    }

    pub fn turn(&mut self) -> Turn {
        match self.turns_left {
            0 => return Turn::Nothing,
            1 => {
                self.turns_left = 0;
                return Turn::Delete;
            }
            _ => self.turns_left -= 1,
        }
        if !self.random.percent(30) {
            return Turn::Nothing;
        }
        let length = self.random.between(1, WRITE_BLOCKS_MAX);
        let lba = self.random.below(self.blocks - length);
        let (kind, data) = match self.random.below(20) {
            0 => (EntryKind::DeleteSnapshot { id: SNAPSHOT }, None),
            1 => (EntryKind::Trim, None),
            _ => (EntryKind::Write, Some(vec![0x5c; length as usize * BLOCK_SIZE])),
        };
        let (lba, blocks) = match kind {
            EntryKind::DeleteSnapshot { .. } => (0, 0),
            _ => (lba, length as u32),
        };
        let position = Position { epoch: Epoch(1), lsn: self.lsn.next() };
        let data = Bytes::from(data.unwrap_or_default());
        let entry = Entry::after(self.chain, position, kind, lba, blocks, data, false);
        Turn::Append(Arc::new(entry))
    }
}
