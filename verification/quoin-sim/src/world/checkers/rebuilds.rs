//! Chunks of rebuilds: each is bounded by what was asked for, holes included, and goes on behind
//! where it began.

use std::collections::BTreeMap;

use quoin_types::message::{Content, FromReplica, Slot, ToReplica};
use quoin_types::{BLOCK_SIZE, SessionKey};

use super::{Broken, Checker, Observation, Scene, broken};
use crate::world::setup::StoreKind;

/// Bytes that a slot takes of a chunk beside its data, as the store counts it.
const SLOT_BYTES: usize = 64;
/// A chunk is over when it is full, so that its last slot may be beyond the bound.
const OVERSHOOT: usize = BLOCK_SIZE + SLOT_BYTES;

type Request = (usize, u128, u64, u64);

fn request(pool: usize, session: SessionKey, id: u64) -> Request {
    (pool, session.incarnation.0, session.nonce, id)
}

#[derive(Default)]
pub(crate) struct RebuildRules {
    /// By pool, incarnation and nonce of the session, and request: the cursor and the bytes that were
    /// asked for.
    asked: BTreeMap<Request, (u64, u32)>,
}

impl Checker for RebuildRules {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            Observation::PoolStarts { pool, .. } => {
                self.asked.retain(|(of, ..), _| *of != pool);
                Ok(())
            }
            Observation::PoolReceives { pool, session, message, .. } => {
                if let ToReplica::Pull { id, cursor, bytes_max, .. } = message {
                    self.asked.insert(request(pool, session, *id), (*cursor, *bytes_max));
                }
                Ok(())
            }
            Observation::PoolSends {
                pool,
                session,
                message: FromReplica::Pulled { id, slots, cursor, gone, .. },
            } => {
                let Some(asked) = self.asked.remove(&request(pool, session, *id)) else {
                    return Ok(());
                };
                if !gone && cursor.is_some_and(|next| next <= asked.0) {
                    let detail = format!("a chunk of pool {pool} ends where it began");
                    return broken("ChunksMove", detail);
                }
                let bound = asked.1 as usize + OVERSHOOT;
                let size = size_of(slots);
                // The store's model counts otherwise.
                if scene.setup.store == StoreKind::Real && size > bound {
                    let detail = format!(
                        "a chunk of pool {pool} has {} slots, {size} bytes of {bound}",
                        slots.len()
                    );
                    return broken("ChunksBounded", detail);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn size_of(slots: &[Slot]) -> usize {
    // A request without data is answered by checksums alone.
    let data = |slot: &Slot| match &slot.content {
        Content::Data { data, .. } => data.len(),
        _ => 0,
    };
    slots.iter().map(|slot| SLOT_BYTES + data(slot)).sum()
}
