//! Slots of an answer: runs of them are one, and those of a verification have no bytes.

use bytes::Bytes;
use quoin_types::message::{Content, Slot};

/// Adds a slot, joining holes of one version.
pub(crate) fn push_slot(out: &mut Vec<Slot>, slot: Slot) {
    if let Some(last) = out.last_mut()
        && last.content == Content::Hole
        && slot.content == Content::Hole
        && last.version == slot.version
        && last.lba + u64::from(last.blocks) == slot.lba
        && let Some(blocks) = last.blocks.checked_add(slot.blocks)
    {
        last.blocks = blocks;
        return;
    }
    out.push(slot);
}

/// Reduces a slot to what a verification reports: the copy's checksum, without the bytes.
pub(crate) fn without_bytes(slot: &mut Slot) {
    if let Content::Data { data, .. } = &mut slot.content {
        *data = Bytes::new();
    }
}
