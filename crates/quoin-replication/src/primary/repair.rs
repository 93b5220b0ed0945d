//! Repair: a member that finds its own copy bad gets another member's, for a block or a range of
//! its map.
//!
//! The copy is read like a client's read, from a member that was not found bad, and is never
//! returned to a client. Nothing in the target waits for it: a member whose repair failed asks
//! again.

use super::peer::{Link, Peer};
use super::read::{Purpose, Read};
use super::{Phase, Primary, PrimaryAction};
use quoin_types::BLOCK_SIZE;
use quoin_types::ids::SnapshotId;
use quoin_types::membership::Member;
use quoin_types::message::{BadCopy, Content, Slot, ToReplica};
use quoin_types::time::Time;

/// Limit of repairs under way for one member; it asks again for the others.
const REPAIRS_MAX: usize = 16;

impl Primary {
    /// Sends the good block to a member whose copy was bad, for the same version only.
    pub(super) fn repair(
        &mut self,
        member: Member,
        snapshot: Option<SnapshotId>,
        lba: u64,
        slots: &[Slot],
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(slot) = slots.iter().find(|s| s.lba == lba) else { return };
        let Content::Data { crc, data } = &slot.content else { return };
        let Some(index) = self.members.peers.iter().position(|p| p.member == member && p.is_live())
        else {
            return;
        };
        if data.len() == BLOCK_SIZE {
            let (version, crc, data) = (slot.version, *crc, data.clone());
            self.send(index, ToReplica::Repair { lba, version, crc, data, snapshot }, actions);
        }
    }

    /// Handles a member that found its own copy bad: another member's is read for it, and never
    /// returned to a client.
    pub(super) fn on_bad_copy(
        &mut self,
        now: Time,
        from: usize,
        copy: BadCopy,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let size = match copy.snapshot.map(|id| self.history.snapshot(id)) {
            None => self.history.blocks,
            Some(Some(snapshot)) => snapshot.blocks,
            // It was deleted meanwhile: nothing is left to repair.
            Some(None) => return,
        };
        let possible = (1..=BadCopy::BLOCKS_MAX).contains(&copy.blocks)
            && copy.lba < size
            && copy.version <= self.history.last.lsn;
        if !possible {
            return self.shut_out(now, from, "a bad copy of what cannot be", actions);
        }
        let member = self.members[from].member;
        if self.members[from].link != Link::Fed || self.phase != Phase::Serving {
            return;
        }
        let of_it =
            |r: &&Read| matches!(r.purpose, Purpose::Repair { member: m, .. } if m == member);
        let reads = self.reads.open.iter().map(|(_, read)| read);
        let of_view = |r: &Read| match r.purpose {
            Purpose::Repair { snapshot, .. } => snapshot,
            _ => None,
        };
        let under_way: Vec<_> = reads.filter(of_it).map(|r| (of_view(r), r.lba)).collect();
        if under_way.len() >= REPAIRS_MAX || under_way.contains(&(copy.snapshot, copy.lba)) {
            return;
        }
        let (whole_map, snapshot) = (copy.blocks > 1, copy.snapshot);
        let purpose = Purpose::Repair { member, whole_map, snapshot };
        let blocks = (size - copy.lba).min(copy.blocks.into()) as u32;
        let index = self.start_read(now, purpose, copy.lba, blocks, true);
        if let Some(read) = self.reads.open.get_mut(index) {
            read.tried.push(member);
            read.bad.push((member, copy.lba, copy.version));
        }
    }

    /// Sends a member the slots of a range whose map it lost.
    pub(super) fn mend(&self, member: Member, mend: ToReplica, actions: &mut Vec<PrimaryAction>) {
        let fed = |p: &Peer| p.member == member && p.link == Link::Fed;
        if let Some(index) = self.members.peers.iter().position(fed) {
            self.send(index, mend, actions);
        }
    }
}
