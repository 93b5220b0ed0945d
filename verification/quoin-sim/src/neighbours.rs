//! Other volumes of a pool, which fill it and give room back as users do: by snapshots that are deleted
//! and by trims. A full pool refuses writes, and takes these.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore, StoreError};
use quoin_store::{Disk, Pool, ReplicaPool};
use quoin_types::{
    BLOCK_SIZE, Entry, EntryKind, Epoch, Position, ReplicaGuid, SnapshotId, VolumeId,
};

use crate::disk::SimDisk;
use crate::random::Random;

/// GUIDs and volume ids of the neighbours, by number.
const FIRST: u128 = 0x6e65_6967_0000;
const COUNT_MAX: u128 = 1 << 16;
const WRITE_BLOCKS: u32 = 64;
const SNAPSHOTS_MAX: usize = 4;
const SNAPSHOT_PERCENT: u64 = 2;
const TRIM_PERCENT: u64 = 10;
/// Entries in a turn of the pool that give room back, and turns in which a pool without room may refuse one:
/// half a minute.
const RETURNED_A_TURN: u32 = 8;
const REFUSED_MAX: u32 = 12_000;

pub struct Neighbours {
    count: u64,
    random: Random,
    /// Entries by which they give room back.
    returned: VecDeque<Returned>,
    /// How often the next of them was refused.
    refused: u32,
}

impl Neighbours {
    pub fn new(count: u64, random: &mut Random) -> Self {
        Neighbours { count, random: random.fork(), returned: VecDeque::new(), refused: 0 }
    }

    /// Returns true for the replica of a neighbour.
    pub fn has(guid: ReplicaGuid) -> bool {
        (FIRST..FIRST + COUNT_MAX).contains(&guid.0)
    }

    /// Writes until one of them finds no room.
    pub fn fill(&mut self, pool: &mut Pool<SimDisk>) -> Result<(), StoreError> {
        self.returned.clear();
        let blocks = pool.disk().size() / BLOCK_SIZE as u64;
        for guid in (0..self.count).map(guid_of) {
            if pool.replica(guid).is_none() {
                let volume = VolumeId(guid.0);
                let identity = ReplicaIdentity { guid, volume, ..ReplicaIdentity::default() };
                pool.create(identity, ReplicaMeta::default(), blocks)?;
            }
        }
        pool.request_sync();
        let places = blocks / u64::from(WRITE_BLOCKS);
        // More than the pool has room for.
        for _ in 0..2 * places {
            let guid = guid_of(self.random.below(self.count));
            let snapshots = pool.replica(guid).map_or(0, |replica| replica.snapshots().len());
            let appended = if snapshots < SNAPSHOTS_MAX && self.random.percent(SNAPSHOT_PERCENT) {
                let id = SnapshotId(u128::from(self.random.draw()));
                append(pool, guid, EntryKind::Snapshot { id, hidden: false }, 0, 0)
            } else {
                let lba = self.random.below(places) * u64::from(WRITE_BLOCKS);
                let is_trim = self.random.percent(TRIM_PERCENT);
                let kind = if is_trim { EntryKind::Trim } else { EntryKind::Write };
                append(pool, guid, kind, lba, WRITE_BLOCKS)
            };
            match appended {
                Ok(()) => {}
                Err(StoreError::Full) => break,
                Err(error) => return Err(error),
            }
        }
        pool.request_sync();
        Ok(())
    }

    /// Room comes back from here on: by deletions of snapshots, and by trims.
    pub fn begin_to_give_back(&mut self, pool: &mut Pool<SimDisk>) {
        let mut returned = VecDeque::new();
        for guid in (0..self.count).map(guid_of) {
            let Some(replica) = pool.replica(guid) else { continue };
            for snapshot in replica.snapshots() {
                let kind = EntryKind::DeleteSnapshot { id: snapshot.id };
                returned.push_back(Returned { guid, kind, lba: 0, blocks: 0 });
            }
            let blocks = replica.state().volume_blocks;
            for lba in (0..blocks).step_by(WRITE_BLOCKS as usize) {
                let blocks = (blocks - lba).min(u64::from(WRITE_BLOCKS)) as u32;
                returned.push_back(Returned { guid, kind: EntryKind::Trim, lba, blocks });
            }
        }
        (self.returned, self.refused) = (returned, 0);
    }

    pub fn gives_back(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Appends some of these entries, as many as a pool without room takes before its background work and
    /// its syncs go on. Returns one that was refused for too long, and gives up then.
    pub fn give_back(&mut self, pool: &mut Pool<SimDisk>) -> Result<Option<Returned>, StoreError> {
        for _ in 0..RETURNED_A_TURN {
            let Some(entry) = self.returned.front() else { break };
            match entry.append(pool) {
                Ok(()) => {
                    self.returned.pop_front();
                    self.refused = 0;
                    pool.request_sync();
                }
                Err(StoreError::Full) if self.refused < REFUSED_MAX => {
                    self.refused += 1;
                    break;
                }
                Err(StoreError::Full) => {
                    let refused = self.returned.pop_front();
                    self.returned.clear();
                    return Ok(refused);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}

/// An entry of a neighbour that frees room.
pub struct Returned {
    guid: ReplicaGuid,
    kind: EntryKind,
    lba: u64,
    blocks: u32,
}

impl Returned {
    fn append(&self, pool: &mut Pool<SimDisk>) -> Result<(), StoreError> {
        append(pool, self.guid, self.kind.clone(), self.lba, self.blocks)
    }
}

impl std::fmt::Display for Returned {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:?} of {} blocks at {}", self.kind, self.blocks, self.lba)
    }
}

fn guid_of(number: u64) -> ReplicaGuid {
    ReplicaGuid(FIRST + u128::from(number))
}

/// Appends an entry behind what the replica has, which may be less than it once had: power is lost.
fn append(
    pool: &mut Pool<SimDisk>,
    guid: ReplicaGuid,
    kind: EntryKind,
    lba: u64,
    blocks: u32,
) -> Result<(), StoreError> {
    let Some(mut replica) = pool.replica(guid) else { return Ok(()) };
    let state = replica.state();
    let length = if kind == EntryKind::Write { blocks as usize * BLOCK_SIZE } else { 0 };
    let position = Position { epoch: Epoch(1), lsn: state.position.lsn.next() };
    let data = Bytes::from(vec![0x6e; length]);
    let entry = Entry::after(state.chain, position, kind, lba, blocks, data, false);
    replica.append(&[Arc::new(entry)])?;
    replica.set_stable(position.lsn);
    Ok(())
}
