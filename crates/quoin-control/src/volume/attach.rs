//! Attachments: which node uses a volume, and so which target may open it.
//!
//! An attachment is one idempotent change of the volume's record. Detaching never waits for the old
//! node: the pools are instructed to refuse the grants that the node may keep
//! ([`VolumeRecord::fence`]). An open session then has a bounded time in which it can be closed
//! cleanly. One node's target serves a volume at a time; other nodes may share it over the network
//! ([`crate::volume::sharing`]).
//!
//! A volume that one node has is not given to another one, unless nobody has heard of the first one
//! for its time-out ([`crate::volume::hearing`]). Then it is taken over at a higher epoch.

use std::sync::Arc;

use quoin_api::control::VolumeRef;
use quoin_types::Term;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::events::Severity;
use crate::state::records::{VolumePhase, VolumeRecord};
use crate::state::{State, about};
use crate::volume::hearing::{self, Silence, check_silent};
use crate::volume::replay::{self, Replay};
use crate::volume::sharing::{self, Sharing};

/// Attachment in a volume's record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttachmentRecord {
    pub node: String,
    pub read_only: bool,
    /// Usage text of the publisher, unchanged.
    pub usage: String,
    /// True if the node is to make a block device of the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
    #[serde(default, skip_serializing_if = "Sharing::is_exclusive")]
    pub sharing: Sharing,
    #[serde(default, skip_serializing_if = "Replay::is_none")]
    pub replay: Replay,
    /// Names the attachment, where others may be beside it: higher than those of all before it; else
    /// 0. Requests of the node are numbered, and it ends with the attachment.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub client: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl AttachmentRecord {
    /// Returns true if the volume is served to the node read-only at present.
    pub(crate) fn writes_nothing(&self) -> bool {
        self.read_only && self.replay != Replay::Due
    }
}

/// Request of a publisher.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Publish {
    pub node: String,
    pub read_only: bool,
    /// How the publisher shares the volume with other nodes.
    pub sharing: Sharing,
    pub usage: String,
    /// True if the node is to make a block device of the volume.
    pub device: bool,
    /// True if the node replays a journal before it mounts the volume read-only.
    pub replays: bool,
}

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
        let _excluding = self.state.snapshots.reverting.read().await;
        crate::snapshot::reverts::check_none_under_way(&self.state, &volume)?;
        let term = self.state.term();
        let (lost, heard) = match self.lost_holder(&volume, publish) {
            Some(Ok(lost)) => (Some(lost), String::new()),
            Some(Err(heard)) => (None, heard),
            None => (None, String::new()),
        };
        let change = |volume: &mut VolumeRecord| {
            let taken_from = lost.as_ref().filter(|lost| take_over(volume, &lost.node));
            if taken_from.is_some() {
                volume.fence(true, term)?;
            }
            Ok((attach(volume, publish, term)?, taken_from.is_some()))
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
        let [holder] = volume.attachments.as_slice() else { return None };
        if holder.node == publish.node || !holder.sharing.is_exclusive() {
            return None;
        }
        let node = holder.node.clone();
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
        self.detach_by(reference, node, at_once, None).await
    }

    /// Detaches like [`Self::detach`]. `by_force`: name of the caller that takes the volume
    /// from a node which may use it.
    pub(crate) async fn detach_by(
        &self,
        reference: Option<&VolumeRef>,
        node: &str,
        at_once: bool,
        by_force: Option<&str>,
    ) -> Result<(), Error> {
        // Publications are part of the volume's record, so an unknown volume has none.
        let volume = match self.state.volume(reference) {
            Err(Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| {
            let (before, had_writers) = (volume.attachments.clone(), volume.has_writers());
            volume.attachments.retain(|a| !node.is_empty() && a.node != node);
            replay::hand_on(&mut volume.attachments);
            if volume.opened.owner.as_deref().is_some_and(|owner| node.is_empty() || owner == node)
            {
                volume.opened.owner = volume.attachments.first().map(|a| a.node.clone());
            }
            // The target of another node that shares it may hold requests of one that has lost it.
            let is_shared = before.iter().any(|a| !a.sharing.is_exclusive());
            if at_once && (volume.opened.owner.is_none() || is_shared) {
                volume.fence(true, term)?;
            }
            volume.fence_last_writer(had_writers, false, term)?;
            let stays = |node: &String| volume.attachments.iter().any(|a| a.node == *node);
            let nodes = before.into_iter().map(|attachment| attachment.node);
            Ok(nodes.filter(|node| !stays(node)).collect::<Vec<_>>())
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
        let change = |volume: &mut VolumeRecord| {
            let had_writers = volume.has_writers();
            let is_news = replay::confirm(volume, node)?;
            volume.fence_last_writer(had_writers, false, term)?;
            Ok(is_news)
        };
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

/// Takes a volume from the node that has it alone; false where it has it no more.
fn take_over(volume: &mut VolumeRecord, node: &str) -> bool {
    let is_held = matches!(volume.attachments.as_slice(), [one] if one.node == node);
    if is_held {
        volume.attachments.clear();
        volume.opened.owner = None;
    }
    is_held
}

/// Returns true where the attachment is new.
fn attach(volume: &mut VolumeRecord, publish: &Publish, term: Term) -> Result<bool, Error> {
    match volume.phase {
        VolumePhase::Ready => {}
        VolumePhase::Pending => return Err(Error::Busy(String::new())),
        VolumePhase::Deleting | VolumePhase::Retained => {
            return Err(Error::missing("volume", volume.id.0.to_string()));
        }
    }
    let read_only = publish.read_only || publish.sharing == Sharing::ReadOnly;
    let wanted = AttachmentRecord {
        node: publish.node.clone(),
        read_only,
        usage: publish.usage.clone(),
        device: publish.device,
        sharing: publish.sharing,
        replay: replay::of_new(volume, publish.sharing, read_only && publish.replays),
        // The version of the record that names it first.
        client: match publish.sharing.is_exclusive() {
            true => 0,
            false => term.version_of(volume.generation + 1),
        },
    };
    if let Some(has) = volume.attachments.iter_mut().find(|a| a.node == publish.node) {
        // A later request may add a device. A request without one does not remove it.
        let with_device = has.device || wanted.device;
        let AttachmentRecord { device, replay, client, .. } = wanted;
        if (AttachmentRecord { device, replay, client, ..has.clone() }) == wanted {
            has.device = with_device;
            return Ok(false);
        }
        let name = format!("{} on node {}", volume.spec.name, publish.node);
        let difference = match has.read_only == wanted.read_only {
            true if has.sharing != wanted.sharing => "sharing; detach it first",
            true => "usage; detach it first",
            false => "read-only setting; detach it first",
        };
        return Err(Error::Exists { what: "attachment", name, difference: difference.to_owned() });
    }
    sharing::check_beside(volume, &wanted)?;
    let is_first = volume.attachments.is_empty();
    volume.attachments.push(wanted);
    if !is_first {
        return Ok(true);
    }
    volume.opened.owner = Some(publish.node.clone());
    let is_shared = !publish.sharing.is_exclusive();
    let goes_on = match is_shared {
        true => volume.used.is_shared(),
        false => volume.used.by == publish.node,
    };
    if !goes_on {
        // A target that was lent to the volume keeps its epoch, and the use begins with that epoch.
        // A target of any other node must lose the epoch.
        let is_lent = volume.is_granted() && volume.grants.holder == publish.node;
        if !is_lent {
            volume.fence(false, term)?;
        }
        let since_epoch = volume.opened.epoch + u64::from(!is_lent);
        match is_shared {
            true => volume.used.begin_shared(since_epoch),
            false => volume.used.begin(&publish.node, since_epoch),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Volume that `holder` has opened under epoch 7; the last use is another node's.
    fn opened(holder: &str) -> VolumeRecord {
        let mut volume = crate::state::recorded::volume();
        (volume.opened.epoch, volume.grants.epochs_skipped, volume.grants.fenced) = (7, 0, 0);
        (volume.opened.owner, volume.grants.holder) = (Some("h2".to_owned()), holder.to_owned());
        volume.attachments.clear();
        volume.used.begin("h1", 3);
        volume
    }

    #[test]
    fn a_use_begins_with_the_epoch_that_its_node_has_and_else_above_all_that_anybody_has() {
        let publish = Publish { node: "h2".to_owned(), ..Publish::default() };
        let attached = |holder: &str| {
            let mut volume = opened(holder);
            assert!(attach(&mut volume, &publish, Term::default()).unwrap());
            (volume.opened.epoch, volume.grants.fenced, volume.used.since_of("h2"))
        };
        assert_eq!(attached("h2"), (7, 0, 7), "it goes on with the target that was lent to it");
        assert_eq!(attached("h3"), (8, 8, 9));
        // Records that were recovered from the pools do not say which node has the epoch.
        assert_eq!(attached(""), (8, 8, 9));
        let mut taken_back = opened("h1");
        taken_back.fence(false, Term::default()).unwrap();
        attach(&mut taken_back, &publish, Term::default()).unwrap();
        assert_eq!((taken_back.opened.epoch, taken_back.used.since_of("h2")), (8, 9));
    }
}
