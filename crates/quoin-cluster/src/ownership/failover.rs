//! Targets of volumes that several nodes have move away from a node that is lost.
//!
//! The node that is lost keeps its attachment: its orchestrator has not given it up. The target goes
//! to another node that has the volume, at a higher epoch. A volume that one node alone has waits for
//! its orchestrator, who publishes it elsewhere.

use quoin_types::Term;

use crate::Refusal;
use crate::ownership::grants::fence;
use crate::ownership::replay;
use crate::records::VolumeRecord;

/// Returns true if the target of the volume is on the node, and another node has the volume.
pub fn is_due(volume: &VolumeRecord, node: &str) -> bool {
    volume.opened.owner.as_deref() == Some(node) && volume.attachments.len() > 1
}

/// The node that the target goes to: the first other one that is online.
pub fn next_node<'a>(
    volume: &'a VolumeRecord,
    node: &str,
    is_online: impl Fn(&str) -> bool,
) -> Option<&'a str> {
    let others = volume.attachments.iter().map(|a| a.node.as_str());
    others.filter(|other| *other != node).find(|other| is_online(other))
}

/// Moves the target from a node that is lost to another one that has the volume; false where the record
/// is another one by now.
///
/// # Errors
/// As those of [`fence`].
pub fn move_target(
    volume: &mut VolumeRecord,
    node: &str,
    next: &str,
    term: Term,
) -> Result<bool, Refusal> {
    let is_there = volume.attachments.iter().any(|a| a.node == next);
    if volume.opened.owner.as_deref() != Some(node) || !is_there || !volume.phase.is_kept() {
        return Ok(false);
    }
    volume.opened.owner = Some(next.to_owned());
    replay::take_from(&mut volume.attachments, node);
    fence(volume, true, term)?;
    Ok(true)
}
