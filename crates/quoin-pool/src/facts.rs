//! What a pool tells of itself beside holding replicas: space, and how often it was opened.

use quoin_core::ReplicaGuid;
use quoin_store::BadBlock;

/// Space, as a pool reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// What clients may still fill.
    pub free_bytes: u64,
}

/// What a pool tells beside holding replicas.
pub trait PoolFacts {
    fn space(&self) -> Space;
    /// Bytes that this replica takes.
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64;
    /// Times the pool was opened.
    fn start_counter(&self) -> u64;
    /// Blocks found bad since the last call.
    fn take_bad_blocks(&mut self) -> Vec<BadBlock>;
    /// Replicas that background work found damaged since the last call, and what of them.
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)>;
}

/// The reference model holds its replicas in memory: it has no size and is opened once.
impl PoolFacts for quoin_store::model::ModelPool {
    fn space(&self) -> Space {
        Space::default()
    }
    fn replica_bytes(&self, _guid: ReplicaGuid) -> u64 {
        0
    }
    fn start_counter(&self) -> u64 {
        1
    }
    fn take_bad_blocks(&mut self) -> Vec<BadBlock> {
        Vec::new()
    }
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)> {
        Vec::new()
    }
}

impl<D: quoin_store::Disk> PoolFacts for quoin_store::Pool<D> {
    fn space(&self) -> Space {
        let stats = self.stats();
        Space {
            capacity_bytes: stats.size_bytes,
            used_bytes: stats.used_bytes,
            free_bytes: stats.free_bytes,
        }
    }
    fn replica_bytes(&self, guid: ReplicaGuid) -> u64 {
        self.replica_stats(guid).map_or(0, |stats| stats.allocated_bytes)
    }
    fn start_counter(&self) -> u64 {
        self.starts()
    }
    fn take_bad_blocks(&mut self) -> Vec<BadBlock> {
        self.take_bad_blocks()
    }
    fn take_damaged(&mut self) -> Vec<(ReplicaGuid, &'static str)> {
        self.take_damaged()
    }
}
