//! Targets of detached volumes: one is lent for as long as there is work for it.

use crate::records::VolumeRecord;

/// Lends a target to a volume, takes it back, or gives the volume to another one. `owner`: the node that
/// had it when this was decided. Returns false where the record is another one by now.
pub fn lend(volume: &mut VolumeRecord, owner: Option<&str>, node: Option<&str>) -> bool {
    let as_seen = volume.opened.owner.as_deref() == owner && volume.attachments.is_empty();
    if as_seen && volume.phase.is_kept() {
        volume.opened.owner = node.map(str::to_owned);
    }
    as_seen
}

/// Gives a volume that was taken from its target, as a recovery by hand does, back to the first node
/// that has it attached.
pub fn give_back(volume: &mut VolumeRecord) {
    if volume.opened.owner.is_none() && volume.phase.is_kept() {
        volume.opened.owner = volume.attachments.first().map(|a| a.node.clone());
    }
}
