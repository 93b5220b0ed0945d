//! Work on the replicas of volumes without users.
//!
//! Changes of the replicas need a target, and the document that asks for them has one for every
//! volume at all times. Here a volume that is attached nowhere has none, so one is lent to it for
//! as long as there is something to do: replicas to add, move, replace or take away, one that lags
//! to catch up, one that is damaged to be rebuilt. The node becomes the record's owner without an
//! attachment, and its target lets no client in. Whoever attaches the volume meanwhile takes over
//! at a higher epoch, or goes on with the same target where it is the same node. What is lent reads: by
//! its grant the node changes no content, except where the work is a way back to a snapshot
//! ([`State::is_written`]).
//!
//! It also takes back the leave to write of a node that is late with the replay of a journal
//! ([`replay`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use quoin_cluster::ownership::replay::REPLAY_MAX;
use quoin_cluster::ownership::{lending, replay};
use quoin_cluster::records::VolumeRecord;
use quoin_types::VolumeId;
use tokio::time::Instant;

use crate::Error;
use crate::reconcile::heal::rebuildable;
use crate::reconcile::{LOOK_EVERY, Next, Queue, Reconciler, SETTLES_WITHIN, queue_of_volumes};
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::status::VolumeStatus;
use crate::volume::verification::Verifier;

/// A replica that lags for less may only have been reported at another moment than the others.
const LAGS_FOR: Duration = Duration::from_secs(30);
/// A node whose target has not opened the volume by then is given up for another one.
const OPENS_WITHIN: Duration = Duration::from_secs(30);

/// Within that a target has seen that the volume is not its any more.
const CLOSES_WITHIN: Duration = Duration::from_secs(3);

/// Reconciler that lends targets to volumes that need one, and takes back those that are done.
pub struct Tender {
    state: Arc<State>,
    verifier: Arc<Verifier>,
    queue: Arc<Queue<VolumeId>>,
    memory: Mutex<Memory>,
}

/// Kept between two looks at a volume.
#[derive(Debug, Default)]
struct Memory {
    /// Since when replicas of a volume lag.
    lagging: HashMap<VolumeId, Instant>,
    /// Since when a volume waits for the node that it was given to, or for the one that it was taken
    /// from.
    opening: HashMap<VolumeId, Instant>,
    /// Since when a node may write a volume to replay its journal.
    replaying: HashMap<VolumeId, (String, Instant)>,
}

#[async_trait]
impl Reconciler for Tender {
    type Key = VolumeId;
    const NAME: &'static str = "tend volumes";

    fn queue(&self) -> &Queue<VolumeId> {
        &self.queue
    }

    async fn reconcile(&self, volume: &VolumeId, now: Instant) -> Result<Next, Error> {
        match self.state.check_ruling() {
            Ok(()) => self.look(*volume, now).await,
            Err(_) => Ok(Next::Rest),
        }
    }
}

impl Tender {
    pub(crate) fn new(state: Arc<State>, verifier: Arc<Verifier>) -> Self {
        let queue = queue_of_volumes(&state, SETTLES_WITHIN);
        let filled = queue.clone();
        state.queue_urgent(move |volume| filled.add(volume, Duration::ZERO));
        Self { state, verifier, queue, memory: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().expect("no holder of this lock panics")
    }

    /// Looks at every volume once.
    pub async fn look_at_all(&self, now: Instant) -> Result<(), Error> {
        for volume in self.state.volumes.list() {
            self.reconcile(&volume.id.0, now).await?;
        }
        Ok(())
    }

    async fn look(&self, id: VolumeId, now: Instant) -> Result<Next, Error> {
        let volume = self.state.volumes.get(&id.to_string());
        let Some(volume) = volume.filter(|volume| volume.phase.is_kept()) else {
            let mut memory = self.memory();
            memory.lagging.remove(&id);
            memory.opening.remove(&id);
            memory.replaying.remove(&id);
            return Ok(Next::Rest);
        };
        if !volume.attachments.is_empty() {
            let replays = self.end_late_replay(&volume, now).await?;
            return Ok(match self.give_back(&volume, now).await? {
                Next::Rest if replays => Next::After(LOOK_EVERY),
                next => next,
            });
        }
        self.memory().replaying.remove(&id);
        let status = crate::status::of(&self.state, &volume);
        let work = self.work(&volume, &status, now);
        let next = match volume.opened.owner.is_some() || work.is_some() || self.remembers(id) {
            true => Next::After(LOOK_EVERY),
            false => Next::Rest,
        };
        let owner = volume.opened.owner.as_deref();
        // No fence is recorded between the choice of a node and the record of it.
        let _fencing = self.state.joined.fencing.read().await;
        let node = match (owner, &work) {
            (None, None) => return Ok(next),
            (Some(_), None) => None,
            (None, Some(_)) => self.lender(&volume, &status),
            (Some(_), Some(_)) if !self.is_late(&volume, now) => return Ok(next),
            (Some(_), Some(_)) => self.lender(&volume, &status),
        };
        if node.as_deref() == owner {
            return Ok(next);
        }
        let change = |volume: &mut VolumeRecord| Ok(lending::lend(volume, owner, node.as_deref()));
        let (volume, changed) = match self.state.update_volume(id, change).await {
            Err(Error::NotFound { .. }) => return Ok(Next::Rest),
            other => other?,
        };
        self.memory().opening.remove(&id);
        if let (true, Some(node), Some(work)) = (changed, node, work) {
            self.memory().opening.insert(id, now);
            let message = format!("on node {node}, attached nowhere: {work}");
            self.state.events.record(Severity::Normal, about(&volume), "VolumeTended", message);
        }
        Ok(Next::After(LOOK_EVERY))
    }

    /// Ends the leave of a node that replays a journal for too long. Returns true if a node replays it
    /// still.
    async fn end_late_replay(&self, volume: &VolumeRecord, now: Instant) -> Result<bool, Error> {
        let id = volume.id.0;
        let Some(node) = replay::due(volume) else {
            self.memory().replaying.remove(&id);
            return Ok(false);
        };
        let since = {
            let replaying = &mut self.memory().replaying;
            let known = replaying.get(&id).filter(|(known, _)| known == node);
            let since = known.map_or(now, |(_, since)| *since);
            replaying.insert(id, (node.to_owned(), since));
            since
        };
        if now.duration_since(since) < REPLAY_MAX {
            return Ok(true);
        }
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| Ok(replay::end_late(volume, node, term)?);
        let (volume, is_late) = match self.state.update_volume(id, change).await {
            Err(Error::NotFound { .. }) => return Ok(false),
            other => other?,
        };
        if is_late {
            let next = match replay::due(&volume) {
                Some(next) => format!("node {next} may now"),
                None => "detach it there and attach it again for another try".to_owned(),
            };
            let message = format!(
                "node {node} may not write it any more: it has not replayed the journal within {} s; \
                 {next}",
                REPLAY_MAX.as_secs()
            );
            self.state.events.record(Severity::Warning, about(&volume), "ReplayLate", message);
        }
        Ok(replay::due(&volume).is_some())
    }

    fn remembers(&self, volume: VolumeId) -> bool {
        let memory = self.memory();
        memory.lagging.contains_key(&volume) || memory.opening.contains_key(&volume)
    }

    /// A recovery by hand takes the volume from its target, which closes it; then it is opened anew.
    async fn give_back(&self, volume: &VolumeRecord, now: Instant) -> Result<Next, Error> {
        let id = volume.id.0;
        self.memory().lagging.remove(&id);
        if volume.opened.owner.is_some() {
            self.memory().opening.remove(&id);
            return Ok(Next::Rest);
        }
        let since = *self.memory().opening.entry(id).or_insert(now);
        if now.duration_since(since) < CLOSES_WITHIN {
            return Ok(Next::After(LOOK_EVERY));
        }
        let change = |volume: &mut VolumeRecord| {
            lending::give_back(volume);
            Ok(())
        };
        match self.state.update_volume(id, change).await {
            Err(Error::NotFound { .. }) => {}
            other => drop(other?),
        }
        self.memory().opening.remove(&id);
        Ok(Next::Rest)
    }

    /// Returns the work of a target for the volume; `None`: there is none, or not now.
    fn work(&self, volume: &VolumeRecord, status: &VolumeStatus, now: Instant) -> Option<String> {
        let changing = volume.changing();
        let lags = status.replicas.iter().any(|replica| replica.lags);
        let since = {
            let lagging = &mut self.memory().lagging;
            match lags {
                true => Some(*lagging.entry(volume.id.0).or_insert(now)),
                false => lagging.remove(&volume.id.0).and(None),
            }
        };
        if volume.opened.owner.is_some() {
            // It is there: it stays until all that can be reached has everything.
            let behind = |phase| ["CatchingUp", "Rebuilding", "Creating"].contains(&phase);
            let behind = status.replicas.iter().any(|replica| behind(replica.phase));
            return match !changing.is_empty() || lags || behind {
                true => Some(changing),
                false => self.requested(volume, now),
            };
        }
        rebuildable(volume, status).ok()?;
        if !changing.is_empty() {
            return Some(changing);
        }
        if let Some(requested) = self.requested(volume, now) {
            return Some(requested);
        }
        let long = since.is_some_and(|since| now.duration_since(since) >= LAGS_FOR);
        long.then(|| "a replica lags".to_owned())
    }

    /// Requests of users that need a target.
    fn requested(&self, volume: &VolumeRecord, now: Instant) -> Option<String> {
        let snapshots = || {
            let open = self.state.snapshots.open_of(volume.id.0).len();
            (open > 0).then(|| "its snapshots are made and deleted".to_owned())
        };
        let reverts = || {
            let revert = self.state.snapshots.reverts.get(&volume.id.0.to_string())?;
            let name = &revert.snapshot_name;
            revert.is_open().then(|| format!("it goes back to snapshot {name:?}"))
        };
        let reads = self.state.snapshots.pulls.reads(volume.id.0, now);
        let pulls = || reads.then(|| "its snapshots are read".to_owned());
        let mirror = || crate::mirror::rules::work(&self.state, volume);
        let asked = self.verifier.work(volume).or_else(snapshots).or_else(reverts);
        asked.or_else(pulls).or_else(mirror)
    }

    /// Returns true if the node that the volume was lent to does not open it.
    fn is_late(&self, volume: &VolumeRecord, now: Instant) -> bool {
        let opens = {
            let observed = self.state.observed();
            observed.volumes.get(&volume.id.0).is_some_and(|seen| {
                volume.opened.owner.as_deref() == Some(&seen.node)
                    && seen.epoch == volume.opened.epoch
                    && seen.state != "stopped"
                    && observed.node_online(&seen.node, self.state.settings.offline_after)
            })
        };
        let opening = &mut self.memory().opening;
        if opens {
            opening.remove(&volume.id.0);
            return false;
        }
        let since = *opening.entry(volume.id.0).or_insert(now);
        now.duration_since(since) >= OPENS_WITHIN
    }

    /// The node to open it on: online, not cordoned, with a good replica if there is such a one,
    /// and the least laden.
    fn lender(&self, volume: &VolumeRecord, status: &VolumeStatus) -> Option<String> {
        let state = &self.state;
        let pairs = volume.replicas.iter().zip(&status.replicas);
        let good = pairs.filter(|(_, status)| status.phase == "InSync").map(|(r, _)| &r.pool);
        let hosts: Vec<String> =
            good.filter_map(|pool| state.pools.get(pool).map(|pool| pool.node.clone())).collect();
        let nodes = state.nodes.list();
        let usable = nodes.iter().map(|node| node.name.clone()).filter(|node| {
            // Another one than now, if it is there but does not open it.
            volume.opened.owner.as_ref() != Some(node) && !state.is_fenced(node) && {
                let observed = state.observed();
                crate::reconcile::cordon::of_node(state, &observed, node).is_empty()
                    && observed.node_online(node, state.settings.offline_after)
            }
        });
        let load = |node: &String| state.volumes.index(|index| index.owned(node));
        let best = usable.min_by_key(|node| (!hosts.contains(node), load(node), node.clone()));
        best.or_else(|| volume.opened.owner.clone().filter(|owner| !state.is_fenced(owner)))
    }
}
