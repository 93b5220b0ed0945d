//! Fences: grants of nodes are taken back without the nodes' cooperation.

use quoin_types::Term;

use crate::Refusal;
use crate::ownership::grants::fence;
use crate::records::VolumeRecord;

/// Returns true if a node owns the volume or may hold its grant.
pub fn concerns(volume: &VolumeRecord, node: &str) -> bool {
    volume.opened.owner.as_deref() == Some(node) || volume.grants.holder == node
}

/// Takes back the grant of a node at once: its sessions are cut. `leaves`: the node also loses the
/// volume where it was only lent to it.
///
/// # Errors
/// As those of [`fence`].
pub fn of_node(
    volume: &mut VolumeRecord,
    node: &str,
    leaves: bool,
    term: Term,
) -> Result<(), Refusal> {
    let owns = volume.opened.owner.as_deref() == Some(node);
    if leaves && owns && volume.attachments.is_empty() {
        volume.opened.owner = None;
    }
    // Recovered records do not say which node holds the epoch.
    if volume.grants.holder == node || (owns && volume.grants.holder.is_empty()) {
        fence(volume, true, term)?;
    }
    Ok(())
}

/// Returns true if the volume has a grant and no owner, as recovered records may have one.
pub fn is_left_over(volume: &VolumeRecord) -> bool {
    volume.phase.is_kept() && volume.opened.owner.is_none() && volume.is_granted()
}

/// Takes back a grant that [`is_left_over`].
///
/// # Errors
/// As those of [`fence`].
pub fn left_over(volume: &mut VolumeRecord, term: Term) -> Result<(), Refusal> {
    match is_left_over(volume) {
        true => fence(volume, false, term),
        false => Ok(()),
    }
}

/// Returns true if the node's target may still use an epoch that was taken back. It has missed that its
/// volume was detached and attached again.
pub fn is_stale(volume: &VolumeRecord, node: &str) -> bool {
    volume.opened.owner.as_deref() == Some(node)
        && volume.grants.holder == node
        && !volume.is_granted()
        && !volume.grants.fenced_at_once
}

/// Cuts a target whose epoch [`is_stale`]; it then acquires a new one.
///
/// # Errors
/// As those of [`fence`].
pub fn stale(volume: &mut VolumeRecord, node: &str, term: Term) -> Result<(), Refusal> {
    match is_stale(volume, node) {
        true => fence(volume, true, term),
        false => Ok(()),
    }
}
