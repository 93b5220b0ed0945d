//! The model's pool: many of its replicas behind the surface of the real one.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use quoin_replication::replica::store::{
    BootCookie, IoFault, ReplicaIdentity, ReplicaMeta, StoreError, SyncTicket,
};
use quoin_types::ReplicaGuid;

use super::{ModelHandle, ModelReplica, SlowReads};
use crate::api::{CloneSource, Cloned, Due, ReplicaPool};
use crate::metadata::tickets::Tickets;

/// A pool of models: the same surface as the real pool, and a switch for the power.
#[derive(Default)]
pub struct ModelPool {
    replicas: BTreeMap<ReplicaGuid, ModelReplica>,
    retired: BTreeSet<ReplicaGuid>,
    tickets: Tickets,
    /// Reads that need not be waited for wait while this is on; the driver says when they are over.
    pub slow_reads: SlowReads,
    boot: u128,
    failed: Option<IoFault>,
}

impl ModelPool {
    pub fn new() -> Self {
        Self::default()
    }

    /// The process died: only what was volatile is gone.
    pub fn restart(&mut self) {
        self.tickets.finish(None);
        for replica in self.replicas.values_mut() {
            replica.pins.clear();
            replica.syncing = (0, 0);
        }
    }

    /// The power failed: for each replica, `survives(n)` says how many of `n` unsynced
    /// operations (asked for the log, then for the small state) reached the media.
    /// Replicas created or deleted since the last sync stay created or deleted.
    pub fn power_cut(&mut self, mut survives: impl FnMut(usize) -> usize) {
        self.boot += 1;
        self.failed = None;
        self.restart();
        for replica in self.replicas.values_mut() {
            let operations = survives(replica.operations.len()).min(replica.operations.len());
            let metas = survives(replica.metas.len()).min(replica.metas.len());
            replica.make_durable(operations, metas);
            replica.operations.clear();
            replica.metas.clear();
            replica.now = replica.durable.clone();
            replica.meta = replica.durable_meta.clone();
        }
    }
}

impl ReplicaPool for ModelPool {
    type Handle<'a> = ModelHandle<'a>;

    fn replicas(&self) -> Vec<ReplicaGuid> {
        self.replicas.keys().copied().collect()
    }

    fn replica(&mut self, guid: ReplicaGuid) -> Option<ModelHandle<'_>> {
        let replica = self.replicas.get_mut(&guid)?;
        let (tickets, slow_reads) = (&mut self.tickets, &mut self.slow_reads);
        Some(ModelHandle { replica, tickets, slow_reads })
    }

    fn create(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
    ) -> Result<(), StoreError> {
        let guid = identity.guid;
        if self.retired.contains(&guid) || self.replicas.contains_key(&guid) {
            return Err(StoreError::Rule("a GUID is born once"));
        }
        self.replicas.insert(guid, ModelReplica::new(identity, meta, blocks));
        Ok(())
    }

    fn create_clone(
        &mut self,
        identity: ReplicaIdentity,
        meta: ReplicaMeta,
        blocks: u64,
        source: &CloneSource,
    ) -> Result<Cloned, StoreError> {
        let guid = identity.guid;
        if self.retired.contains(&guid) || self.replicas.contains_key(&guid) {
            return Err(StoreError::Rule("a GUID is born once"));
        }
        let mut of_volume = self.replicas.values().filter(|r| r.identity.volume == source.volume);
        let first = of_volume.find_map(|replica| replica.clone_of(source, blocks));
        let first = first.ok_or(StoreError::Rule("a clone is made where its snapshot is"))?;
        self.replicas.insert(guid, ModelReplica::begun_with(identity, meta, first));
        Ok(Cloned::Made)
    }

    fn flatten(&mut self, _guid: ReplicaGuid) {}

    fn is_clone(&self, _guid: ReplicaGuid) -> bool {
        false
    }

    fn describe(&mut self, guid: ReplicaGuid, volume_spec: Bytes) -> Result<(), StoreError> {
        let replica = self.replicas.get_mut(&guid);
        let replica = replica.ok_or(StoreError::Rule("what is described must exist"))?;
        replica.identity.volume_spec = volume_spec;
        Ok(())
    }

    fn delete(&mut self, guid: ReplicaGuid) -> Result<bool, StoreError> {
        let found = self.replicas.remove(&guid).is_some();
        if found {
            self.retired.insert(guid);
        }
        Ok(found)
    }

    fn is_retired(&self, guid: ReplicaGuid) -> bool {
        self.retired.contains(&guid)
    }

    fn retired(&self) -> Vec<ReplicaGuid> {
        self.retired.iter().copied().collect()
    }

    fn request_sync(&mut self) -> SyncTicket {
        self.tickets.request()
    }

    fn sync_wanted(&mut self) -> Option<SyncTicket> {
        let ticket = self.tickets.begin()?;
        for replica in self.replicas.values_mut() {
            replica.syncing = (replica.operations.len(), replica.metas.len());
        }
        Some(ticket)
    }

    fn sync_finished(
        &mut self,
        ticket: SyncTicket,
        result: Result<(), IoFault>,
    ) -> Result<(), StoreError> {
        self.tickets.finish(result.is_ok().then_some(ticket));
        if let Err(fault) = result {
            self.failed = Some(fault);
        }
        if self.failed.is_none() {
            for replica in self.replicas.values_mut() {
                let (operations, metas) = std::mem::take(&mut replica.syncing);
                replica.make_durable(operations, metas);
            }
        }
        result.map_err(StoreError::Io)
    }

    fn take_served(&mut self) -> Vec<ReplicaGuid> {
        self.tickets.take_served()
    }

    fn background(&mut self, _budget_bytes: u64) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn background_due(&self) -> Due {
        Due::Idle
    }

    fn cookie(&self) -> BootCookie {
        BootCookie(self.boot + 1)
    }
}
