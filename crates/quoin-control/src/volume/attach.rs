//! Requests to attach and detach volumes ([`attachment`]).

use std::sync::Arc;

use quoin_api::control::VolumeRef;
use quoin_cluster::ownership::attachment::{self, Publish};
use quoin_cluster::ownership::liveness::Silence;
use quoin_cluster::ownership::replay;
use quoin_cluster::records::VolumeRecord;

use crate::Error;
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::volume::hearing::{self, check_silent};

/// Which node uses a volume.
pub struct Attachments {
    state: Arc<State>,
}

impl Attachments {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    pub async fn publish(
        &self,
        reference: Option<&VolumeRef>,
        publish: &Publish,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        let node = &publish.node;
        if publish.usage.len() > 4096 {
            return Err(Error::invalid("usage", "at most 4096 bytes"));
        }
        let shown: String = node.chars().take(160).collect();
        let known = self.state.nodes.get(node).ok_or_else(|| Error::missing("node", shown))?;
        let attached = self.attached_to(node, volume.id.0);
        if known.volumes_max != 0 && attached >= known.volumes_max {
            return Err(Error::Exhausted(format!(
                "node {node} has {attached} volumes attached, its limit is {}",
                known.volumes_max
            )));
        }
        crate::mirror::rules::check_publish(&self.state, &volume)?;
        let _fencing = self.state.joined.fencing.read().await;
        self.state.check_not_fenced(node)?;
        let _excluding = self.state.snapshots.reverting.read().await;
        crate::snapshot::reverts::check_none_under_way(&self.state, &volume)?;
        let term = self.state.term();
        let (lost, heard) = match self.lost_holder(&volume, publish) {
            Some(Ok(lost)) => (Some(lost), String::new()),
            Some(Err(heard)) => (None, heard),
            None => (None, String::new()),
        };
        let change = |volume: &mut VolumeRecord| {
            crate::mirror::rules::check_publish(&self.state, volume)?;
            let is_taken = match &lost {
                Some(lost) => attachment::take_over(volume, &lost.node, term)?,
                None => false,
            };
            Ok((attachment::attach(volume, publish, term)?, is_taken))
        };
        let (volume, (new, is_taken)) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::Busy(_)) => {
                let waiting = crate::status::waiting_for(&self.state, &volume);
                let name = &volume.spec.name;
                return Err(Error::Busy(format!("volume {name:?} is not ready: {waiting}")));
            }
            Err(Error::Precondition(why)) => return Err(Error::Precondition(why + &heard)),
            other => other?,
        };
        if let Some(Lost { node: from, silence }) = lost.filter(|_| is_taken) {
            let message = format!(
                "from node {from}, of which nobody has heard for {} s, to node {node}; what uses it \
                 on {from} is dead",
                silence.lasts.as_secs()
            );
            self.state.events.record(Severity::Warning, about(&volume), "VolumeTakenOver", message);
            hearing::tell_dissent(&self.state, &volume, &from, &silence);
        }
        if new {
            crate::status::opening_begins(&self.state, volume.id.0);
            let message = format!("to node {node}");
            self.state.events.record(Severity::Normal, about(&volume), "VolumeAttached", message);
        }
        Ok(volume)
    }

    /// Looks for signs of life of the node that has the volume for itself, where another one wants
    /// it. The inner error says who heard of it.
    fn lost_holder(
        &self,
        volume: &VolumeRecord,
        publish: &Publish,
    ) -> Option<Result<Lost, String>> {
        let node = attachment::holder_in_the_way(volume, publish)?.to_owned();
        let timeout = self.state.settings.node_timeout.as_secs();
        Some(match check_silent(&self.state, volume, &node) {
            Ok(silence) => Ok(Lost { node, silence }),
            Err(why) => Err(format!(
                " (it is taken over once nobody has heard of node {node} for {timeout} s: {why})"
            )),
        })
    }

    /// Detaches from one node, or from all where `node` is empty.
    pub async fn unpublish(&self, reference: Option<&VolumeRef>, node: &str) -> Result<(), Error> {
        self.detach(reference, node, false).await
    }

    /// Detaches like [`Self::unpublish`]. `at_once`: open sessions are cut without time to
    /// close, also where the volume was detached before.
    pub async fn detach(
        &self,
        reference: Option<&VolumeRef>,
        node: &str,
        at_once: bool,
    ) -> Result<(), Error> {
        self.detach_by(reference, node, at_once, None, |_, _| Ok(())).await
    }

    /// Detaches like [`Self::detach`]. `by_force`: name of the caller that takes the volume
    /// from a node which may use it. `check` refuses for a node that it is not to be taken from.
    pub(crate) async fn detach_by(
        &self,
        reference: Option<&VolumeRef>,
        node: &str,
        at_once: bool,
        by_force: Option<&str>,
        check: impl Fn(&VolumeRecord, &str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        // Publications are part of the volume's record, so an unknown volume has none.
        let volume = match self.state.volume(reference) {
            Err(Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| {
            attachment::detach_unused(volume, node, at_once, &check, term)
        };
        let (volume, from_nodes) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(()),
            other => other?,
        };
        if !from_nodes.is_empty() {
            if let Some(who) = by_force {
                self.tell_of_force(&volume, &from_nodes, who);
            }
            let from = if node.is_empty() { "everywhere" } else { node };
            let message = format!("from {from}");
            self.state.events.record(Severity::Normal, about(&volume), "VolumeDetached", message);
        }
        Ok(())
    }

    /// Ends a node's leave to write: it has replayed the journal of the file system. A repeat is
    /// fine.
    ///
    /// # Errors
    /// The volume is not attached to that node.
    pub async fn confirm_replay(
        &self,
        volume: &VolumeRecord,
        node: &str,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| Ok(replay::confirm(volume, node, term)?);
        let (volume, is_news) = self.state.update_volume(volume.id.0, change).await?;
        if is_news {
            let message = format!("by node {node}; it is read-only from now on");
            self.state.events.record(Severity::Normal, about(&volume), "JournalReplayed", message);
        }
        Ok(volume)
    }

    /// Number of volumes attached to a node, without the volume `except`.
    pub(crate) fn attached_to(&self, node: &str, except: quoin_types::VolumeId) -> u32 {
        let here = |volume: &&Arc<VolumeRecord>| {
            volume.id.0 != except && volume.attachments.iter().any(|a| a.node == node)
        };
        self.state.volumes.indexed(|index| index.of_node(node)).iter().filter(here).count() as u32
    }

    /// Records an event with the caller that took a volume by force, and the nodes that lost it.
    fn tell_of_force(&self, volume: &VolumeRecord, nodes: &[String], who: &str) {
        let message = format!("taken from {} by force, by {who}", nodes.join(", "));
        self.state.events.record(Severity::Warning, about(volume), "VolumeForced", message);
    }
}

/// Node that had a volume, and the time for which nobody has heard of it.
struct Lost {
    node: String,
    silence: Silence,
}
