//! Replicas move from pools that fill up to emptier ones, without a request.
//!
//! Which one is [`crate::reconcile::balance`]'s; here is when, and how it goes on. It comes after everything
//! else: nothing moves while a replica is made elsewhere because it is overdue or its pool is
//! drained, or could be now. A volume moves a replica only while it is whole and nothing of it is
//! being changed, and one replica moves at a time in the cluster: no user waits for this work.
//! Between two moves pools have time to say what they use now. A volume whose `replaceAfter` is
//! `off` stays where people put it, and so does a replica that was made in a pool that a user
//! named (by `--pool`, `--to` or a document).
//!
//! A move is that of `quoin replica move`: the old replica counts until the new one is known. Where
//! the new one's pool is lost on the way, or nothing of it comes any further, or another replica of
//! the volume needs to be made elsewhere, the move is given up; and that volume is not moved to that
//! pool again for a while, so that one unreachable pool does not keep all others uneven.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use quoin_api::volume::Local;
use quoin_cluster::records::{Cause, Discarded, ReplicaRecord, VolumePhase, VolumeRecord};
use quoin_types::{ReplicaGuid, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::reconcile::balance::{Movable, Move, Verdict, choose, givers, spread};
use crate::reconcile::heal::Healer;
use crate::reconcile::{LOOK_EVERY, Next, Queue, Reconciler};
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::status::VolumeStatus;
use crate::volume::placement::Candidate;
use crate::volume::policy::{RebalanceAt, ReplaceAfter};
use crate::volume::scale::relocate;

/// At a time, in the whole cluster.
const MOVES_MAX: usize = 1;
/// After the last move, or a start: several reports of every pool.
const REST: Duration = Duration::from_secs(10);
/// Between two looks that find nothing to do.
const PAUSE: Duration = Duration::from_secs(2);
/// Time after which an unreachable new replica is not waited for; the old one is there.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(30);

/// The same for one that is there and has got no further.
const STALLED_AFTER: Duration = Duration::from_secs(600);
/// A move whose newcomer is still not in sync by then never ends: writers outrun it.
const UNENDING_AFTER: Duration = Duration::from_secs(24 * 3600);
/// A volume is not moved again to a pool that it did not get to.
const BARRED_FOR: Duration = Duration::from_secs(3600);

/// State of evening out pools, for metrics.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Balance {
    pub begun: u64,
    pub given_up: u64,
    /// How far the fullest and the emptiest pool are apart, in millionths of their capacities.
    pub spread: u64,
}

/// Evens out how full pools are.
pub struct Balancer {
    state: Arc<State>,
    memory: Mutex<Memory>,
}

/// Kept between two looks.
#[derive(Debug, Default)]
struct Memory {
    balance: Balance,
    /// Nothing is begun before.
    not_before: Option<Instant>,
    /// The fullest pool, and why nothing moves from it.
    blocked: Option<(String, String)>,
    /// The replicas on their way: a volume has one at most.
    reached: HashMap<VolumeId, (ReplicaGuid, Reached)>,
    /// Moves that were given up, until when they are not begun again.
    barred: HashMap<(VolumeId, String), Instant>,
}

/// Looks at the balance of the pools again and again.
pub(crate) struct Evening {
    balancer: Arc<Balancer>,
    healer: Arc<Healer>,
    queue: Queue<()>,
}

impl Evening {
    pub fn new(balancer: Arc<Balancer>, healer: Arc<Healer>) -> Self {
        let queue = Queue::new(1);
        queue.add((), LOOK_EVERY);
        Self { balancer, healer, queue }
    }
}

#[async_trait]
impl Reconciler for Evening {
    type Key = ();
    const NAME: &'static str = "rebalance";

    fn queue(&self) -> &Queue<()> {
        &self.queue
    }

    async fn reconcile(&self, (): &(), now: Instant) -> Result<Next, Error> {
        self.balancer.look(self.healer.is_busy(), now).await?;
        Ok(Next::After(LOOK_EVERY))
    }
}

/// How far a replica on its way has come.
#[derive(Clone, Copy, Debug)]
struct Reached {
    begun: Instant,
    /// Its LSN and bytes, and since when it has them.
    at: (u64, u64),
    since: Instant,
}

impl Memory {
    /// Why this replica will not arrive, if so.
    fn hopeless(
        &mut self,
        volume: VolumeId,
        guid: ReplicaGuid,
        at: (u64, u64),
        now: Instant,
    ) -> Option<String> {
        let new = (guid, Reached { begun: now, at, since: now });
        let known = self.reached.entry(volume).or_insert(new);
        if known.0 != guid {
            *known = new;
        }
        let seen = &mut known.1;
        if seen.at != at {
            (seen.at, seen.since) = (at, now);
        }
        let (stalled, taken) = (now.duration_since(seen.since), now.duration_since(seen.begun));
        if stalled >= STALLED_AFTER {
            Some(format!("it has got no further for {} s", stalled.as_secs()))
        } else if taken >= UNENDING_AFTER {
            Some(format!("it is not in sync after {} h", taken.as_secs() / 3600))
        } else {
            None
        }
    }
}

impl Balancer {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().expect("no holder of this lock panics")
    }

    /// Forgets how far a replica of the volume is.
    pub(crate) fn forget(&self, volume: VolumeId) {
        self.memory().reached.remove(&volume);
    }

    pub fn counts(&self) -> Balance {
        self.memory().balance
    }

    /// Begins one move where the pools are too uneven. `healing`: something more urgent waits.
    pub(crate) async fn look(&self, healing: bool, now: Instant) -> Result<(), Error> {
        let state = &self.state;
        if state.check_ruling().is_err() {
            return Ok(());
        }
        let at = state.settings.rebalance_at;
        let busy = healing || self.is_making_elsewhere() || self.is_deleting();
        {
            let mut memory = self.memory();
            if busy {
                memory.not_before = Some(now + REST);
                return Ok(());
            }
            let not_before = memory.not_before.get_or_insert(now + REST);
            if now < *not_before {
                return Ok(());
            }
            *not_before = now + PAUSE;
        }
        let _one_at_a_time = state.creating.lock().await;
        let candidates = crate::volume::volumes::candidates(state);
        // The volumes are looked at only where the pools are uneven.
        let verdict = match choose(&candidates, &[], at) {
            Verdict::Even => Verdict::Even,
            _ => {
                let standings = self.standings(givers(&candidates, at));
                choose(&candidates, &self.movables(&standings, now), at)
            }
        };
        let apart = spread(&candidates);
        self.memory().balance.spread = apart;
        match verdict {
            Verdict::Even => self.memory().blocked = None,
            Verdict::Blocked { fullest, emptiest } => self.blocked(fullest, &emptiest),
            Verdict::Moves(chosen) => {
                self.memory().blocked = None;
                self.begin_move(&chosen, &candidates).await?;
            }
        }
        Ok(())
    }

    /// Returns true if replicas move without a request: as many as allowed, or more urgent ones.
    fn is_making_elsewhere(&self) -> bool {
        self.state.volumes.index(|index| {
            let rebuilds = index.rebuilds();
            rebuilds.urgent() > 0 || rebuilds.balancing() as usize >= MOVES_MAX
        })
    }

    /// Returns true if what pools say they use is to become less.
    fn is_deleting(&self) -> bool {
        let shrinking = self.state.volumes.indexed(|index| Some(index.shrinking()));
        let observed = self.state.observed();
        let after = self.state.settings.offline_after;
        shrinking.iter().any(|volume| {
            let there = |d: &Discarded| observed.online_pool(&d.pool, after).is_some();
            let held = |r: &ReplicaRecord| observed.online_pool(&r.pool, after).is_some();
            volume.discarded.iter().any(there)
                || (volume.phase == VolumePhase::Deleting && volume.replicas.iter().any(held))
        })
    }

    /// How the volumes stand that have a replica in one of these pools, as far as they are ready.
    fn standings(&self, pools: HashSet<String>) -> Vec<Standing> {
        let volumes = self.state.volumes_of_pools(&pools).into_iter();
        let ready = volumes.filter(|volume| volume.phase.is_kept());
        let standing = |volume: Arc<VolumeRecord>| Standing {
            status: crate::status::of(&self.state, &volume),
            volume,
        };
        ready.map(standing).collect()
    }

    /// Replicas that may move: of volumes that are whole and at rest.
    fn movables<'a>(&self, ready: &'a [Standing], now: Instant) -> Vec<Movable<'a>> {
        let hosts: BTreeMap<String, String> =
            self.state.pools.list().iter().map(|p| (p.name.clone(), p.node.clone())).collect();
        let barred = {
            let barred = &mut self.memory().barred;
            barred.retain(|_, until| *until > now);
            barred.keys().cloned().collect::<Vec<_>>()
        };
        let observed = self.state.observed();
        let used = |replica: &ReplicaRecord| {
            let pool = observed.pools.get(&replica.pool)?;
            Some(pool.replicas.get(&replica.guid.0)?.used_bytes)
        };
        let mut movables = Vec::new();
        // The users of such a volume are bound to the nodes that have replicas.
        let is_bound = |standing: &&Standing| standing.volume.spec.options.local == Local::Required;
        let still = ready.iter().filter(|standing| self.is_still(standing) && !is_bound(standing));
        for Standing { volume, status } in still {
            let Some(all) = volume.replicas.iter().map(used).collect::<Option<Vec<_>>>() else {
                continue;
            };
            let takes_bytes = all.iter().copied().max().unwrap_or_default();
            debug_assert_eq!(status.replicas.len(), all.len());
            let both = volume.replicas.iter().zip(all);
            for (replica, frees_bytes) in both.filter(|(replica, _)| !replica.placed) {
                let host = hosts.get(&replica.pool);
                let users = volume.attachments.iter().map(|a| &a.node);
                let barred = barred.iter().filter(|(id, _)| *id == volume.id.0);
                movables.push(Movable {
                    volume,
                    guid: replica.guid.0,
                    pool: &replica.pool,
                    frees_bytes,
                    takes_bytes,
                    at_home: users.into_iter().any(|node| Some(node) == host),
                    barred: barred.map(|(_, pool)| pool.clone()).collect(),
                });
            }
        }
        movables
    }

    /// Returns true if a volume is whole, nothing of it is being changed, and its policy lets it
    /// move.
    fn is_still(&self, Standing { volume, status }: &Standing) -> bool {
        self.state.replace_after(volume) != ReplaceAfter::Never
            && status.health == "Online"
            && status.replicas.iter().all(|r| r.known && r.phase == "InSync" && r.bad_blocks == 0)
            && is_unchanging(volume)
    }

    async fn begin_move(&self, chosen: &Move, candidates: &[Candidate]) -> Result<(), Error> {
        let change = |volume: &mut VolumeRecord| {
            if !is_unchanging(volume) || !volume.replicas.iter().any(|r| r.guid.0 == chosen.guid) {
                return Ok(None);
            }
            match relocate(volume, chosen.guid, &chosen.to, candidates, Cause::Balance) {
                Err(Error::Exhausted(_) | Error::Precondition(_)) => Ok(None),
                other => other.map(Some),
            }
        };
        let (volume, begun) = match self.state.update_volume(chosen.volume, change).await {
            Err(Error::NotFound { .. }) => return Ok(()),
            other => other?,
        };
        let Some((old, _)) = begun else { return Ok(()) };
        self.memory().balance.begun += 1;
        let Move { from, to, from_percent, to_percent, .. } = chosen;
        let message = format!(
            "pool {from} is {from_percent}% full and pool {to} {to_percent}%, pools may be {} apart: \
             it moves to pool {to}",
            self.state.settings.rebalance_at
        );
        let object = Object::new("replica", old.id.0, &volume.spec.name);
        self.state.events.record(Severity::Normal, object, "ReplicaRebalances", message);
        Ok(())
    }

    /// Says once of a pool that nothing can be done about it.
    fn blocked(&self, fullest: String, emptiest: &str) {
        let why = format!(
            "fuller than pool {emptiest} by more than {}, and no replica can be moved that would \
             even them out",
            self.state.settings.rebalance_at
        );
        // Which pool is the emptiest may change with every look.
        let now = Some((fullest.clone(), why.clone()));
        let before = std::mem::replace(&mut self.memory().blocked, now);
        if before.is_some_and(|(pool, _)| pool == fullest) {
            return;
        }
        let id =
            self.state.pools.get(&fullest).map(|pool| pool.pool_id.clone()).unwrap_or_default();
        let object = Object::new("pool", id, &fullest);
        self.state.events.record(Severity::Normal, object, "RebalanceWaits", why);
    }

    /// Drops moves that must not be in the way, or that lead nowhere any more; whether there was
    /// one. `missed`: for how long replicas are gone. `urgent`: replicas that should be elsewhere
    /// for another reason.
    pub(crate) async fn give_up_move(
        &self,
        volume: &Arc<VolumeRecord>,
        missed: &HashMap<ReplicaGuid, Duration>,
        urgent: &HashSet<ReplicaGuid>,
        now: Instant,
    ) -> Result<bool, Error> {
        let moves = |volume: &VolumeRecord, replica: &ReplicaRecord| {
            replica.cause == Cause::Balance && !volume.is_known(replica)
        };
        let Some(newcomer) = volume.replicas.iter().find(|r| moves(volume, r)) else {
            self.forget(volume.id.0);
            return Ok(false);
        };
        let known = |guid: &ReplicaGuid| {
            let found = volume.replicas.iter().find(|r| r.guid.0 == *guid);
            found.is_some_and(|r| volume.is_known(r) && r.id != newcomer.id)
        };
        let hopeless = {
            let observed = self.state.observed();
            let seen = observed.volumes.get(&volume.id.0);
            let seen = seen.and_then(|seen| seen.replicas.get(&newcomer.guid.0));
            let reached = seen.map_or((0, 0), |seen| (seen.applied_lsn, seen.rebuilt_bytes));
            drop(observed);
            self.memory().hopeless(volume.id.0, newcomer.guid.0, reached, now)
        };
        let gone = missed.get(&newcomer.guid.0).is_some_and(|gone| *gone >= GIVEN_UP_AFTER);
        let (why, bars) = if gone {
            (format!("pool {} is away", newcomer.pool), true)
        } else if let Some(why) = hopeless {
            (why, true)
        } else if urgent.iter().any(known) {
            ("another replica of the volume must be made elsewhere first".to_owned(), false)
        } else {
            return Ok(false);
        };
        let guid = newcomer.guid;
        let change = |volume: &mut VolumeRecord| {
            let at = volume.replicas.iter().position(|r| r.guid == guid && moves(volume, r));
            Ok(at.map(|at| volume.discard(at)))
        };
        let (volume, gone) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(true),
            other => other?,
        };
        if let Some(gone) = gone {
            {
                let mut memory = self.memory();
                memory.balance.given_up += 1;
                if bars {
                    memory.barred.insert((volume.id.0, gone.pool.clone()), now + BARRED_FOR);
                }
            }
            let object = Object::new("replica", gone.id.0, &volume.spec.name);
            let message = format!("it stays where it is and does not go to {}: {why}", gone.pool);
            self.state.events.record(Severity::Normal, object, "RebalanceGivenUp", message);
        }
        Ok(true)
    }

    /// Returns the reason for or against evening out each pool, in words, by name.
    pub(crate) fn words(&self) -> BTreeMap<String, String> {
        let mut words = BTreeMap::new();
        for volume in self.state.volumes.indexed(|index| Some(index.growing())) {
            let name = &volume.spec.name;
            for new in volume.replicas.iter().filter(|r| r.cause == Cause::Balance) {
                let old = volume.replicas.iter().find(|r| r.id == new.id && volume.is_known(r));
                let Some(old) = old.filter(|old| old.guid != new.guid) else { continue };
                words.insert(
                    old.pool.clone(),
                    format!("rebalancing: volume {name} moves to {}", new.pool),
                );
                words.insert(
                    new.pool.clone(),
                    format!("rebalancing: volume {name} comes from {}", old.pool),
                );
            }
        }
        if let Some((pool, why)) = self.memory().blocked.clone()
            && self.state.settings.rebalance_at != RebalanceAt::Never
        {
            words.entry(pool).or_insert(why);
        }
        words
    }
}

/// A volume, and how it stands.
struct Standing {
    volume: Arc<VolumeRecord>,
    status: VolumeStatus,
}

fn is_unchanging(volume: &VolumeRecord) -> bool {
    volume.phase.is_kept()
        && volume.discarded.is_empty()
        && volume.changing().is_empty()
        && volume.replicas.iter().all(|replica| volume.is_known(replica))
        && volume.membership.rf == volume.membership.drf
}
