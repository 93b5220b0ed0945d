//! Processes that a volume shares with others: these hold up neither its dials nor its chunks,
//! orders for another volume change nothing of its replicas, and no connection of a former
//! session is kept.

use std::collections::BTreeMap;

use quoin_replication::pool_host::access::Claim;
use quoin_replication::pool_host::holdings::{Phase, Step, step};
use quoin_replication::replica::store::ReplicaIdentity;
use quoin_types::message::ToReplica;
use quoin_types::{Member, VolumeId};

use super::{Broken, Checker, Connected, Observation, Scene, broken};
use crate::schedule::{Instant, SECOND};

/// Longest wait of a dial while no other one is under way at its address.
const HELD_UP_MAX: Instant = SECOND;
/// Most chunks of others served in a row while one of this volume waits.
const OTHERS_SERVED_MAX: u32 = 400;

#[derive(Default)]
pub(crate) struct ProcessRules {
    /// By target and pool, dials of the target's process.
    dials: BTreeMap<(usize, usize), Dials>,
    /// By pool, chunks of other volumes that its process served in a row.
    others_served: BTreeMap<usize, u32>,
    /// By pool, connections that opened a session or joined one, the newest last, and that their
    /// targets did not close.
    opened: BTreeMap<usize, Vec<Connected>>,
}

#[derive(Default)]
struct Dials {
    under_way: usize,
    /// When the last one ended.
    ended: Instant,
}

impl Checker for ProcessRules {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            Observation::TargetStarted { target } => {
                self.dials.retain(|(of, _), _| *of != target);
                Ok(())
            }
            Observation::DialBegins { target, pool, added, is_over } => {
                self.check_dial(scene.now, (target, pool), added, is_over)
            }
            Observation::NeighbourDials { target, pool } => {
                self.dials.entry((target, pool)).or_default().under_way += 1;
                Ok(())
            }
            Observation::DialEnded { target, pool } => {
                let dials = self.dials.entry((target, pool)).or_default();
                (dials.under_way, dials.ended) = (dials.under_way.saturating_sub(1), scene.now);
                Ok(())
            }
            Observation::PoolStarts { pool, .. } => {
                self.others_served.remove(&pool);
                self.opened.remove(&pool);
                Ok(())
            }
            Observation::OpenTaken { pool, session } => {
                self.opened.entry(pool).or_default().push((session, None));
                Ok(())
            }
            Observation::PoolReceives { pool, session, message, .. } => {
                let opened = self.opened.entry(pool).or_default();
                match message {
                    ToReplica::OpenBulk { number } => opened.push((session, Some(*number))),
                    // Its target closes the connections.
                    ToReplica::Close => opened.retain(|(of, _)| *of != session),
                    _ => {}
                }
                Ok(())
            }
            Observation::Connected { pool, open } => {
                let opened = self.opened.entry(pool).or_default();
                opened.retain(|connection| open.contains(connection));
                let newest = opened.iter().rfind(|(_, bulk)| bulk.is_none()).copied();
                let is_former = |connection: &&Connected| {
                    newest.is_some_and(|(session, _)| connection.0 != session)
                };
                if let Some(former) = opened.iter().find(is_former) {
                    let detail =
                        format!("pool {pool} keeps a connection of a former session: {former:?}");
                    return broken("FormerClosed", detail);
                }
                Ok(())
            }
            Observation::ChunkServed { pool, is_own } => self.check_turn(pool, is_own),
            Observation::Claimed { pool, target, member, lane, message } => {
                if !lane.carries(message) || !scene.setup.claim_of(member).allows(message) {
                    let detail =
                        format!("pool {pool} refuses what target {target} sent: {message:?}");
                    return broken("ClaimRules", detail);
                }
                Ok(())
            }
            Observation::OrderedForAnother { pool, member, held } => {
                check_orders(scene, pool, member, held)
            }
            _ => Ok(()),
        }
    }
}

impl ProcessRules {
    fn check_dial(
        &mut self,
        now: Instant,
        (target, pool): (usize, usize),
        added: Instant,
        is_over: bool,
    ) -> Result<(), Broken> {
        let dials = self.dials.entry((target, pool)).or_default();
        let held_up = dials.under_way == 0 && now - added.max(dials.ended) > HELD_UP_MAX;
        dials.under_way += 1;
        if is_over {
            let detail = format!("target {target} dials for a session that is over");
            return broken("DialsApart", detail);
        }
        if held_up {
            let detail = format!("target {target} dials pool {pool} late for others");
            return broken("DialsApart", detail);
        }
        Ok(())
    }

    fn check_turn(&mut self, pool: usize, is_own: bool) -> Result<(), Broken> {
        let others = self.others_served.entry(pool).or_default();
        *others = if is_own { 0 } else { *others + 1 };
        if *others > OTHERS_SERVED_MAX {
            let detail = format!("pool {pool} served {others} chunks of others while one waited");
            return broken("ChunkTurns", detail);
        }
        Ok(())
    }
}

/// No grant for another volume opens the replica, and no assignment for it changes the replica.
fn check_orders(
    scene: &Scene<'_>,
    pool: usize,
    member: Member,
    held: &ReplicaIdentity,
) -> Result<(), Broken> {
    let another = VolumeId(!held.volume.0);
    let claim = Claim { volume: another, ..scene.setup.claim_of(member) };
    let open = ToReplica::Open {
        volume: held.volume,
        replica: held.replica,
        guid: held.guid,
        membership: scene.control.record.membership.clone(),
        lease_ms: scene.setup.config.lease_ms,
    };
    if claim.allows(&open) {
        let detail = format!("pool {pool} opens a replica by a grant for another volume");
        return broken("ClaimRules", detail);
    }
    let wanted = ReplicaIdentity { volume: another, ..held.clone() };
    for phase in [Phase::Init, Phase::Clone, Phase::Recreate, Phase::Keep, Phase::Delete] {
        let done = step(phase, &wanted, Some(held), false);
        if done != Step::OfAnother {
            let detail = format!("pool {pool} does {done:?} to a replica of another volume");
            return broken("HoldingRules", detail);
        }
    }
    Ok(())
}
