//! Work on the replicas of volumes that nobody uses.
//!
//! Changes of the replicas need a target, and the document that asks for them has one for every
//! volume at all times. Here a volume that is attached nowhere has none, so one is lent to it for
//! as long as there is something to do: replicas to add, move, replace or take away, one that lags
//! to catch up, one that is damaged to be rebuilt. The node becomes the record's owner without an
//! attachment, and its target lets no client in. Whoever attaches the volume meanwhile takes over
//! at a higher epoch, or goes on with the same target where it is the same node.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::Error;
use crate::controller::{Controller, about};
use crate::reconcile::heal::rebuildable;
use crate::state::events::Severity;
use crate::state::records::{VolumePhase, VolumeRecord};
use crate::status::{Standing, VolumeStatus};

/// A replica that lags for less may only have been reported at another moment than the others.
const LAGS_FOR: Duration = Duration::from_secs(30);
/// A node whose target has not opened the volume by then is given up for another one.
const OPENS_WITHIN: Duration = Duration::from_secs(30);

/// Within that a target has seen that the volume is not its any more.
const CLOSES_WITHIN: Duration = Duration::from_secs(3);

impl Controller {
    /// Lends targets to volumes that need one, and takes back those that are done; called every
    /// second.
    pub async fn tend_unused(&self) -> Result<(), Error> {
        self.tend_unused_at(Instant::now()).await
    }

    /// [`Self::tend_unused`] at a time of the caller's.
    pub async fn tend_unused_at(&self, now: Instant) -> Result<(), Error> {
        self.tend_unused_of(&self.standings(), now).await
    }

    pub(crate) async fn tend_unused_of(
        &self,
        ready: &[Standing],
        now: Instant,
    ) -> Result<(), Error> {
        if self.check_ruling().is_err() {
            return Ok(());
        }
        let mut load = HashMap::<String, usize>::new();
        let volumes = self.volumes.list();
        for owner in volumes.iter().filter_map(|volume| volume.owner.clone()) {
            *load.entry(owner).or_default() += 1;
        }
        {
            let looks = &mut self.observed().looks;
            let exists = |id| volumes.iter().any(|volume| volume.id.0 == id);
            looks.lagging.retain(|id, _| exists(*id));
            looks.opening.retain(|id, _| exists(*id));
        }
        self.give_back(&volumes, now).await?;
        let unused = |standing: &&Standing| standing.volume.attachments.is_empty();
        for Standing { volume, status } in ready.iter().filter(unused) {
            let work = self.work(volume, status, now);
            let owner = volume.owner.as_deref();
            let next = match (owner, &work) {
                (None, None) => continue,
                (Some(_), None) => None,
                (None, Some(_)) => self.lender(volume, status, &load),
                (Some(_), Some(_)) if !self.is_late(volume, now) => continue,
                (Some(_), Some(_)) => self.lender(volume, status, &load),
            };
            if next.as_deref() == owner {
                continue;
            }
            let change = |volume: &mut VolumeRecord| {
                let as_seen = volume.owner.as_deref() == owner && volume.attachments.is_empty();
                if as_seen && volume.phase == VolumePhase::Ready {
                    volume.owner.clone_from(&next);
                }
                Ok(as_seen)
            };
            let (volume, changed) = match self.update_volume(volume.id.0, change).await {
                Err(Error::NotFound { .. }) => continue,
                other => other?,
            };
            self.observed().looks.opening.remove(&volume.id.0);
            if let (true, Some(node), Some(work)) = (changed, next, work) {
                *load.entry(node.clone()).or_default() += 1;
                self.observed().looks.opening.insert(volume.id.0, now);
                let message = format!("on node {node}, attached nowhere: {work}");
                self.events.record(Severity::Normal, about(&volume), "VolumeTended", message);
            }
        }
        Ok(())
    }

    /// A recovery by hand takes the volume from its target, which closes it; then it is opened anew.
    async fn give_back(&self, volumes: &[Arc<VolumeRecord>], now: Instant) -> Result<(), Error> {
        let taken = |volume: &&Arc<VolumeRecord>| {
            volume.owner.is_none()
                && volume.phase == VolumePhase::Ready
                && !volume.attachments.is_empty()
        };
        for volume in volumes.iter().filter(taken) {
            let since = *self.observed().looks.opening.entry(volume.id.0).or_insert(now);
            if now.duration_since(since) < CLOSES_WITHIN {
                continue;
            }
            let change = |volume: &mut VolumeRecord| {
                if volume.owner.is_none() && volume.phase == VolumePhase::Ready {
                    volume.owner = volume.attachments.first().map(|a| a.node.clone());
                }
                Ok(())
            };
            match self.update_volume(volume.id.0, change).await {
                Err(Error::NotFound { .. }) => {}
                other => drop(other?),
            }
            self.observed().looks.opening.remove(&volume.id.0);
        }
        Ok(())
    }

    /// What a target could do for the volume; `None`: nothing, or not now.
    fn work(&self, volume: &VolumeRecord, status: &VolumeStatus, now: Instant) -> Option<String> {
        let changing = volume.changing();
        let lags = status.replicas.iter().any(|replica| replica.lags);
        let since = {
            let lagging = &mut self.observed().looks.lagging;
            match lags {
                true => Some(*lagging.entry(volume.id.0).or_insert(now)),
                false => lagging.remove(&volume.id.0).and(None),
            }
        };
        if volume.owner.is_some() {
            // It is there: it stays until all that can be reached has everything.
            let behind = |phase| ["CatchingUp", "Rebuilding", "Creating"].contains(&phase);
            let behind = status.replicas.iter().any(|replica| behind(replica.phase));
            let verify = self.verify_work(volume);
            return match !changing.is_empty() || lags || behind {
                true => Some(changing),
                false => verify,
            };
        }
        rebuildable(volume, status).ok()?;
        if !changing.is_empty() {
            return Some(changing);
        }
        if let Some(verify) = self.verify_work(volume) {
            return Some(verify);
        }
        let long = since.is_some_and(|since| now.duration_since(since) >= LAGS_FOR);
        long.then(|| "a replica lags".to_owned())
    }

    /// Whether the node that the volume was lent to does not open it.
    fn is_late(&self, volume: &VolumeRecord, now: Instant) -> bool {
        let mut observed = self.observed();
        let opens = observed.volumes.get(&volume.id.0).is_some_and(|seen| {
            volume.owner.as_deref() == Some(&seen.node)
                && seen.epoch == volume.epoch
                && seen.state != "stopped"
                && observed.node_online(&seen.node, self.settings.offline_after)
        });
        if opens {
            observed.looks.opening.remove(&volume.id.0);
            return false;
        }
        let since = *observed.looks.opening.entry(volume.id.0).or_insert(now);
        now.duration_since(since) >= OPENS_WITHIN
    }

    /// The node to open it on: online, not cordoned, with a good replica if there is such a one,
    /// and the least laden.
    fn lender(
        &self,
        volume: &VolumeRecord,
        status: &VolumeStatus,
        load: &HashMap<String, usize>,
    ) -> Option<String> {
        let pairs = volume.replicas.iter().zip(&status.replicas);
        let good = pairs.filter(|(_, status)| status.phase == "InSync").map(|(r, _)| &r.pool);
        let hosts: Vec<String> =
            good.filter_map(|pool| self.pools.get(pool).map(|pool| pool.node.clone())).collect();
        let nodes = self.nodes.list();
        let usable = nodes.iter().map(|node| node.name.clone()).filter(|node| {
            // Another one than now, if it is there but does not open it.
            volume.owner.as_ref() != Some(node)
                && self.cordon_of_node(node).is_empty()
                && self.observed().node_online(node, self.settings.offline_after)
        });
        let best = usable.min_by_key(|node| {
            (!hosts.contains(node), load.get(node).copied().unwrap_or(0), node.clone())
        });
        best.or_else(|| volume.owner.clone())
    }
}
