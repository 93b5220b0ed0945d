//! Attachments: which node uses a volume, and so which target may open it.
//!
//! An attachment is one idempotent change of the volume's record. Detaching never waits for the old
//! node: the pools are instructed to refuse the grants that the node may keep
//! ([`fence`]). An open session then has a bounded time in which it can be closed
//! cleanly. One node's target serves a volume at a time; other nodes may share it over the network
//! ([`sharing`]).
//!
//! The node of an attachment keeps its volume until it counts as lost: its time-out has passed without a
//! sign of life ([`crate::ownership::liveness`]). Another node then takes the volume over at a higher epoch.

use quoin_types::{Term, mutant};

use crate::Refusal;
use crate::ownership::grants::{fence, fence_last_writer};
use crate::ownership::{replay, sharing};
use crate::records::{AttachmentRecord, Sharing, VolumePhase, VolumeRecord};

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

/// The node that has the volume for itself, where another one wants it: it may be lost.
pub fn holder_in_the_way<'a>(volume: &'a VolumeRecord, publish: &Publish) -> Option<&'a str> {
    let [holder] = volume.attachments.as_slice() else { return None };
    let is_in_the_way = holder.node != publish.node && holder.sharing.is_exclusive();
    is_in_the_way.then_some(holder.node.as_str())
}

/// Takes a volume from the node that has it alone and is lost; false where it has it no more.
///
/// # Errors
/// As those of [`fence`].
pub fn take_over(volume: &mut VolumeRecord, node: &str, term: Term) -> Result<bool, Refusal> {
    let is_held = matches!(volume.attachments.as_slice(), [one] if one.node == node);
    if is_held {
        volume.attachments.clear();
        volume.opened.owner = None;
        fence(volume, true, term)?;
    }
    Ok(is_held)
}

/// Detaches from one node, or from all where `node` is empty. `at_once`: open sessions are cut without
/// time to close, also where the volume was detached before. Returns the nodes that lost it.
///
/// # Errors
/// As those of [`fence`].
pub fn detach(
    volume: &mut VolumeRecord,
    node: &str,
    at_once: bool,
    term: Term,
) -> Result<Vec<String>, Refusal> {
    let (before, had_writers) = (volume.attachments.clone(), volume.has_writers());
    volume.attachments.retain(|a| !node.is_empty() && a.node != node);
    replay::hand_on(&mut volume.attachments);
    if volume.opened.owner.as_deref().is_some_and(|owner| node.is_empty() || owner == node) {
        volume.opened.owner = volume.attachments.first().map(|a| a.node.clone());
    }
    // The target of another node that shares it may hold requests of one that has lost it.
    let is_shared = before.iter().any(|a| !a.sharing.is_exclusive());
    if at_once && (volume.opened.owner.is_none() || is_shared) {
        fence(volume, true, term)?;
    }
    fence_last_writer(volume, had_writers, false, term)?;
    let stays = |node: &String| volume.attachments.iter().any(|a| a.node == *node);
    let nodes = before.into_iter().map(|attachment| attachment.node);
    Ok(nodes.filter(|node| !stays(node)).collect())
}

/// Attaches the volume to a node. Returns true where the attachment is new.
///
/// # Refusals
/// The volume is not ready, the node has it in another way, or others are in the way.
pub fn attach(volume: &mut VolumeRecord, publish: &Publish, term: Term) -> Result<bool, Refusal> {
    match volume.phase {
        VolumePhase::Ready => {}
        VolumePhase::Pending => return Err(Refusal::Busy(String::new())),
        VolumePhase::Deleting | VolumePhase::Retained => {
            return Err(Refusal::missing("volume", volume.id.0.to_string()));
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
        return Err(Refusal::Exists {
            what: "attachment",
            name,
            difference: difference.to_owned(),
        });
    }
    sharing::check_beside(volume, &wanted)?;
    let is_first = volume.attachments.is_empty();
    volume.attachments.push(wanted);
    if !is_first {
        return Ok(true);
    }
    volume.opened.owner = Some(publish.node.clone());
    let is_shared = !publish.sharing.is_exclusive();
    let is_of = match is_shared {
        true => volume.used.is_shared(),
        false => volume.used.by == publish.node,
    };
    let goes_on = is_of && !volume.used.unproven;
    if !goes_on {
        // A target that was lent to the volume keeps its epoch, and the use begins with that epoch.
        // A target of any other node must lose the epoch.
        let is_lent = volume.is_granted() && volume.grants.holder == publish.node;
        if !is_lent {
            fence(volume, false, term)?;
        }
        let is_another = !is_lent || mutant::is("use-begins-with-an-epoch-of-nobody");
        let epoch = volume.opened.epoch;
        // The next one that can be granted. It says in which term the use began.
        let next = term.next_epoch(volume.epoch()).map_or(epoch + 1, |next| next.0);
        let since_epoch = if is_another { next } else { epoch };
        match is_shared {
            true => volume.used.begin_shared(since_epoch, epoch),
            false => volume.used.begin(&publish.node, since_epoch, epoch),
        }
    }
    Ok(true)
}

/// Detaches like [`detach`], from nodes that do not use the volume. `check` refuses for one of them. It
/// is asked for the record that is changed: an earlier one may lack a node that was attached since.
///
/// # Errors
/// As those of [`fence`] and of `check`.
pub fn detach_unused<E: From<Refusal>>(
    volume: &mut VolumeRecord,
    node: &str,
    at_once: bool,
    check: impl Fn(&VolumeRecord, &str) -> Result<(), E>,
    term: Term,
) -> Result<Vec<String>, E> {
    let nodes = volume.attachments.iter().map(|attachment| attachment.node.as_str());
    let is_meant = |on: &&str| node.is_empty() || *on == node;
    for on in nodes.filter(is_meant).filter(|_| !mutant::is("devices-not-looked-at")) {
        check(volume, on)?;
    }
    Ok(detach(volume, node, at_once, term)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_that_is_meant_is_checked_and_a_volume_that_one_uses_stays_with_all() {
        let in_use = |volume: &VolumeRecord, on: &str| match on {
            "node-1" => Err(Refusal::Busy(volume.spec.name.clone())),
            _ => Ok(()),
        };
        let mut volume = crate::records::recorded::volume();
        let before = volume.clone();
        assert!(before.attachments.iter().any(|attachment| attachment.node == "node-1"));
        for node in ["", "node-1"] {
            assert!(detach_unused(&mut volume, node, false, in_use, Term::default()).is_err());
            assert_eq!(volume, before);
        }
        assert!(detach_unused(&mut volume, "node-9", false, in_use, Term::default()).is_ok());
    }

    /// Volume that `holder` has opened under epoch 7; the last use is another node's.
    fn opened(holder: &str) -> VolumeRecord {
        let mut volume = crate::records::recorded::volume();
        (volume.opened.epoch, volume.grants.epochs_skipped, volume.grants.fenced) = (7, 0, 0);
        (volume.opened.owner, volume.grants.holder) = (Some("h2".to_owned()), holder.to_owned());
        volume.attachments.clear();
        volume.used.begin("h1", 3, 2);
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
        fence(&mut taken_back, false, Term::default()).unwrap();
        attach(&mut taken_back, &publish, Term::default()).unwrap();
        assert_eq!((taken_back.opened.epoch, taken_back.used.since_of("h2")), (8, 9));
    }
}
