//! Pools that run full: writes that are accepted, that wait, or that are refused.
//!
//! An entry that has its LSN is owed to every replica, so room is checked *before* a write is
//! sequenced. Pools report early that they are short. While fewer than CF counted members have
//! room, writes that need any are held back (`onFull: wait`) or, after the cleaner had time to work
//! ([`GRACE`]), refused (`enospc`). Reads, trims, flushes and zeroes continue. Entries that were
//! sequenced but find no room in a pool wait in the target and are sent again: nothing is
//! reordered, nothing acknowledged is lost, and no session ends for it. A member whose pool alone
//! is full falls out of sync like any that lags; below CF no member is dropped.

use std::time::Duration;

use super::requests::Waiting;
use super::{Link, Primary, PrimaryAction, WaitReason};
use crate::primary::OnFull;
use quoin_types::BLOCK_SIZE;
use quoin_types::block::{BlockError, Operation, Request};
use quoin_types::ids::Lsn;
use quoin_types::time::Time;

/// Time before writes are refused: the cleaner cannot free what is not on media yet.
const GRACE: Duration = Duration::from_secs(3);
/// Pause before entries that found no room are sent again.
const OFFER_AGAIN: Duration = Duration::from_millis(500);

impl Primary {
    pub(super) fn on_room(&mut self, index: usize, short: bool) {
        self.members[index].room.report(short);
    }

    /// Handles a replica that did not accept the entries after `applied`.
    pub(super) fn on_no_room(
        &mut self,
        now: Time,
        index: usize,
        applied: Lsn,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let peer = &mut self.members[index];
        if peer.link != Link::Fed {
            return;
        }
        if applied < peer.progress.applied || applied >= peer.progress.next {
            return self.shut_out(now, index, "OnlyCounted", actions);
        }
        // This message does not acknowledge `applied`: it does not confirm entries that wait for a
        // sync in the pool.
        peer.progress.next = applied.next();
        // A sync that was requested for more covered less.
        peer.progress.sync_asked = peer.progress.sync_asked.min(applied);
        peer.room.ran_out(now + OFFER_AGAIN);
        self.read_from_others(index);
    }

    /// Returns true if the request stores bytes that no trim could replace.
    fn needs_room(operation: &Operation) -> bool {
        match operation {
            Operation::Write { .. } => true,
            // Partly zeroed blocks become blocks with data.
            Operation::WriteZeroes { offset, length, .. } => {
                let block = BLOCK_SIZE as u64;
                offset % block != 0 || length % block != 0
            }
            _ => false,
        }
    }

    /// Queues a request that has to wait for room, or answers it. `Some`: it can proceed.
    pub(super) fn admit_by_room(
        &mut self,
        now: Time,
        request: Request,
        actions: &mut Vec<PrimaryAction>,
    ) -> Option<Request> {
        let waits = self.requests.short_since.is_some() || self.requests.any(Waiting::Room);
        if !waits || !Self::needs_room(&request.operation) {
            return Some(request);
        }
        if self.refuses_for_room(now) {
            self.refuse(request.token, BlockError::NoSpace, actions);
        } else {
            self.requests.wait_for_room(request);
        }
        None
    }

    fn refuses_for_room(&self, now: Time) -> bool {
        self.config.on_full == OnFull::NoSpace
            && self.requests.short_since.is_some_and(|since| now >= since + GRACE)
    }

    /// Called once for each batch: checks for room, and decides on requests that wait for it.
    pub(super) fn mind_room(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if !self.commit.short_of_room(&self.members.peers) {
            if self.requests.short_since.take().is_some() {
                // Members that the shortage delayed are not late: the first with room must not oust
                // the rest.
                for peer in &mut self.members.peers {
                    peer.progress.behind_since = peer.progress.behind_since.map(|_| now);
                }
            }
            if self.announced.waits_for() == Some(WaitReason::Room) {
                self.wait_no_longer(actions);
            }
            // Waiting requests come in their order, before anything newer.
            self.requests.room_to_window();
            return;
        }
        self.requests.short_since.get_or_insert(now);
        if self.commit.stable < self.history.last.lsn {
            // Entries on media can be merged into the map, and merged entries can be cleaned.
            self.commit.want_sync(self.history.last.lsn);
        }
        if self.refuses_for_room(now) {
            for request in self.requests.take_room() {
                self.refuse(request.token, BlockError::NoSpace, actions);
            }
        }
        if self.commit.held {
            self.wait_for(WaitReason::Room, actions);
        }
    }

    /// Time at which [`Primary::mind_room`] or an offer has something to do.
    pub(super) fn room_due(&self) -> Option<Time> {
        let offers = self.members.peers.iter().filter_map(|p| p.room.full_until);
        let refusal = self
            .requests
            .short_since
            .filter(|_| self.config.on_full == OnFull::NoSpace)
            .filter(|_| self.requests.any(Waiting::Room))
            .map(|since| since + GRACE);
        offers.chain(refusal).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn what_leaves_data_behind_needs_room_and_holes_need_none() {
        let block = BLOCK_SIZE as u64;
        let zeroes =
            |offset, length| Operation::WriteZeroes { offset, length, fua: false, no_hole: false };
        let data = Bytes::from_static(&[1; BLOCK_SIZE]);
        let needs = [
            Operation::Write { offset: 0, data, fua: false },
            zeroes(block - 512, block + 512),
            zeroes(block, block + 512),
        ];
        assert!(needs.iter().all(Primary::needs_room));
        let none = [
            zeroes(block, 3 * block),
            Operation::Trim { offset: 512, length: block, fua: false },
            Operation::Flush,
            Operation::Read { offset: 0, length: 512 },
        ];
        assert!(!none.iter().any(Primary::needs_room));
    }
}
