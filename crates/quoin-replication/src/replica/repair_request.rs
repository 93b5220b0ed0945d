//! Repairs of a replica's copy by another replica's: one block, or the map of a range. Each may wait
//! for the disk: it states the version or the position that it is of, and is refused where that no
//! longer fits.

use super::Repaired;
use super::session::{FETCHES_MAX, Fault, view_of};
use super::store::{ReplicaStore, StoreError, Upcoming};
use quoin_types::Lsn;
use quoin_types::message::{FromReplica, ToReplica, covers};

pub(super) struct RepairRequest {
    message: ToReplica,
    /// Times that it had to wait for the disk.
    pub fetches: u8,
}

impl RepairRequest {
    /// Takes a request whose data are what they are said to be.
    pub fn new(message: ToReplica) -> Result<Self, Fault> {
        match &message {
            ToReplica::Repair { crc, data, .. } => {
                if data.len() != quoin_types::BLOCK_SIZE || quoin_types::crc32c(data) != *crc {
                    return Err(Fault::Protocol("repair data"));
                }
            }
            ToReplica::Mend { lba, blocks, at, slots, .. } => {
                if !covers(slots, *lba, *blocks) || !slots.iter().all(|s| s.is_good(*at)) {
                    return Err(Fault::Protocol("mend data"));
                }
            }
            _ => return Err(Fault::Protocol("no repair")),
        }
        Ok(Self { message, fetches: 0 })
    }

    /// Repairs, and returns the answer. `Pending`: nothing was done yet.
    pub fn carry_out(
        &self,
        applied: Lsn,
        store: &mut dyn ReplicaStore,
    ) -> Result<(FromReplica, Repaired), StoreError> {
        let may_wait = self.fetches < FETCHES_MAX;
        match &self.message {
            ToReplica::Repair { lba, version, crc, data, snapshot } => {
                let (view, lba, version) = (view_of(*snapshot), *lba, *version);
                if may_wait {
                    store.look_ahead(Upcoming::Repair { view, lba })?;
                }
                let done = store.repair(view, lba, version, *crc, data)?;
                let repaired = Repaired { snapshot: *snapshot, lba, whole_map: false, done };
                Ok((FromReplica::Repaired { lba, version, done }, repaired))
            }
            ToReplica::Mend { lba, blocks, at, slots, snapshot } => {
                let (view, lba, blocks) = (view_of(*snapshot), *lba, *blocks);
                // Entries that the source had applied and this replica has not may hide older
                // content.
                let mut done = *at <= applied;
                if done {
                    if may_wait {
                        store.look_ahead(Upcoming::Mend { view, lba, blocks })?;
                    }
                    done = store.mend(view, lba, slots)?;
                }
                let repaired = Repaired { snapshot: *snapshot, lba, whole_map: true, done };
                Ok((FromReplica::Mended { lba, blocks, done }, repaired))
            }
            _ => Err(StoreError::Rule("no repair")),
        }
    }
}
