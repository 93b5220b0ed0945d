//! Attachments: which node uses a volume, and so which target may open it.
//!
//! An attachment is one idempotent change of the volume's record. Detaching never waits for the old
//! node: the pools are instructed to refuse the grants that the node may keep
//! ([`VolumeRecord::fence`]). An open session then has a bounded time in which it can be closed
//! cleanly. A volume is served on one node at a time.

use std::sync::Arc;

use quoin_api::control::VolumeRef;
use quoin_types::Term;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::events::Severity;
use crate::state::records::{VolumePhase, VolumeRecord};
use crate::state::{State, about};

/// Attachment in a volume's record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AttachmentRecord {
    pub node: String,
    pub read_only: bool,
    /// Usage text of the publisher, unchanged.
    pub usage: String,
    /// Whether the node is to make a block device of the volume.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub device: bool,
}

/// Request of a publisher.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Publish {
    pub node: String,
    pub read_only: bool,
    /// Whether the publisher would share the volume with other nodes.
    pub multi_node: bool,
    pub usage: String,
    /// Whether the node is to make a block device of the volume.
    pub device: bool,
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
        let change = |volume: &mut VolumeRecord| attach(volume, publish, term);
        let (volume, new) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::Busy(_)) => {
                let waiting = crate::status::waiting_for(&self.state, &volume);
                let name = &volume.spec.name;
                return Err(Error::Busy(format!("volume {name:?} is not ready: {waiting}")));
            }
            other => other?,
        };
        if new {
            crate::status::opening_begins(&self.state, volume.id.0);
            let message = format!("to node {node}");
            self.state.events.record(Severity::Normal, about(&volume), "VolumeAttached", message);
        }
        Ok(volume)
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
            let before = volume.attachments.clone();
            volume.attachments.retain(|a| !node.is_empty() && a.node != node);
            if volume.owner.as_deref().is_some_and(|owner| node.is_empty() || owner == node) {
                volume.owner = volume.attachments.first().map(|a| a.node.clone());
            }
            if at_once && volume.owner.is_none() {
                volume.fence(true, term)?;
            }
            let gone = before.into_iter().filter(|a| !volume.attachments.contains(a));
            Ok(gone.map(|attachment| attachment.node).collect::<Vec<_>>())
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

/// Returns true where the attachment is new.
fn attach(volume: &mut VolumeRecord, publish: &Publish, term: Term) -> Result<bool, Error> {
    match volume.phase {
        VolumePhase::Ready => {}
        VolumePhase::Pending => return Err(Error::Busy(String::new())),
        VolumePhase::Deleting | VolumePhase::Retained => {
            return Err(Error::missing("volume", volume.id.0.to_string()));
        }
    }
    let wanted = AttachmentRecord {
        node: publish.node.clone(),
        read_only: publish.read_only,
        usage: publish.usage.clone(),
        device: publish.device,
    };
    if let Some(has) = volume.attachments.iter_mut().find(|a| a.node == publish.node) {
        // A later request may add a device. A request without one does not remove it.
        let with_device = has.device || wanted.device;
        if (AttachmentRecord { device: wanted.device, ..has.clone() }) == wanted {
            has.device = with_device;
            return Ok(false);
        }
        let name = format!("{} on node {}", volume.spec.name, publish.node);
        let difference = match has.read_only == wanted.read_only {
            true => "usage; detach it first",
            false => "read-only setting; detach it first",
        };
        return Err(Error::Exists { what: "attachment", name, difference: difference.to_owned() });
    }
    if let Some(other) = volume.attachments.first() {
        let advice = if publish.multi_node {
            "a volume is served on one node at a time"
        } else {
            "a second node would be a second writer"
        };
        return Err(Error::Precondition(format!(
            "volume {:?} is attached to node {}, {advice}; detach it there first",
            volume.spec.name, other.node
        )));
    }
    volume.attachments.push(wanted);
    volume.owner = Some(publish.node.clone());
    if volume.used.by != publish.node {
        // A target that was lent to the volume keeps its epoch, and the use begins with that epoch.
        // A target of any other node must lose the epoch.
        let is_lent = volume.is_granted() && volume.grants.holder == publish.node;
        if !is_lent {
            volume.fence(false, term)?;
        }
        let since_epoch = volume.epoch + u64::from(!is_lent);
        volume.used.begin(&publish.node, since_epoch);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Volume that `holder` has opened under epoch 7; the last use is another node's.
    fn opened(holder: &str) -> VolumeRecord {
        let mut volume = crate::state::recorded::volume();
        (volume.epoch, volume.grants.epochs_skipped, volume.grants.fenced) = (7, 0, 0);
        (volume.owner, volume.grants.holder) = (Some("h2".to_owned()), holder.to_owned());
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
            (volume.epoch, volume.grants.fenced, volume.used.since_of("h2"))
        };
        assert_eq!(attached("h2"), (7, 0, 7), "it goes on with the target that was lent to it");
        assert_eq!(attached("h3"), (8, 8, 9));
        // Records that were recovered from the pools do not say which node has the epoch.
        assert_eq!(attached(""), (8, 8, 9));
        let mut taken_back = opened("h1");
        taken_back.fence(false, Term::default()).unwrap();
        attach(&mut taken_back, &publish, Term::default()).unwrap();
        assert_eq!((taken_back.epoch, taken_back.used.since_of("h2")), (8, 9));
    }
}
