//! Pools that run full: what is sequenced fits, and what waits for room has no LSN.
//!
//! An entry that has its LSN is owed to every replica, and all that follows waits behind it. So a
//! write of a client is sequenced only where CF counted members of every rule have room for it
//! ([`RoomGrant`]): each pool reports the share that a replica may have under way, keeps that much for
//! each of its replicas, and tells that it grants no more before anything of it is used. What waits
//! has no LSN (`onFull: wait`), or is refused once the cleaner had time to work ([`GRACE`],
//! `enospc`), and everything else goes past it: reads, flushes, trims, zeroes, snapshots and their
//! deletion, Views. A member that has no grant, as its pool alone is full, is owed entries that may
//! find no room: they wait in the target and are sent again, no session ends for this, and it
//! falls out of sync like any that lags.

use std::time::Duration;

use super::peer::Peer;
use super::quorum;
use super::requests::{Allowance, Budget, Need, Waiting, cut};
use super::{Link, Primary, PrimaryAction, WaitReason};
use crate::primary::OnFull;
use quoin_types::BLOCK_SIZE;
use quoin_types::block::{BlockError, Request};
use quoin_types::ids::Lsn;
use quoin_types::message::{RoomGrant, Takes};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time before writes are refused: the cleaner cannot free what is not on media yet.
const GRACE: Duration = Duration::from_secs(3);
/// Pause before entries that found no room are sent again.
const OFFER_AGAIN: Duration = Duration::from_millis(500);
/// Share of trims and zeroes where writes have none: these come out of the pool's reserve.
const HOLES_SHARE_BLOCKS: u64 = 32;

impl Primary {
    pub(super) fn on_room(&mut self, index: usize, granted: RoomGrant) {
        self.members[index].room.report(granted);
        self.look_at_room();
    }

    /// Looks what may be sequenced until the next look: what CF counted members of every rule have
    /// left of their shares.
    fn look_at_room(&mut self) {
        let admitted = self.requests.admitted_blocks();
        let writes = self.allowance(Takes::Writes);
        // Where writes are taken, so are trims and zeroes.
        let holes = if writes.share_blocks > 0 { writes } else { self.allowance(Takes::Holes) };
        self.requests.budget = Budget { writes, holes };
        self.requests.spend(admitted);
    }

    fn allowance(&self, what: Takes) -> Allowance {
        let share = |p: &Peer| {
            let share = u64::from(p.room.share_of(what)?);
            let is_of_reserve = what == Takes::Holes && p.room.share_of(Takes::Writes).is_none();
            Some(if is_of_reserve { share.min(HOLES_SHARE_BLOCKS) } else { share })
        };
        let left = |p: &Peer| {
            if mutant::is("sequenced-beyond-the-share") {
                return share(p);
            }
            // LSNs have no gaps: as many entries, each with a header at most a block long.
            let entries =
                self.history.last.lsn.0 - p.progress.applied.0.min(self.history.last.lsn.0);
            let weight = self.history.weight_after(p.progress.applied) as u64;
            let used = entries + weight.div_ceil(BLOCK_SIZE as u64);
            Some(share(p)?.saturating_sub(used))
        };
        let peers = &self.members.peers;
        Allowance {
            left_blocks: quorum::reached(&self.commit.views, peers, left).unwrap_or(0),
            share_blocks: quorum::reached(&self.commit.views, peers, share).unwrap_or(0),
        }
    }

    /// Returns true if a request that needs so much is not held back for room. It may have to wait
    /// for its place in the room there is.
    pub(super) fn has_room_for(&self, need: Need) -> bool {
        match need.what {
            Takes::Nothing => true,
            Takes::Holes => self.requests.budget.holes.admits(need.blocks),
            Takes::Writes => self.requests.budget.writes.admits(need.blocks),
        }
    }

    /// Sequences a request, or as much of it as there is room for; the rest comes next.
    pub(super) fn execute_within(&mut self, now: Time, request: Request, need: Need) {
        let mut request = request;
        if need.what == Takes::Writes && need.blocks > self.requests.budget.writes.left_blocks {
            request = match cut(request, self.requests.budget.writes.left_blocks) {
                Ok((part, rest)) => {
                    self.requests.keep_rest(rest);
                    part
                }
                Err(whole) => whole,
            };
            self.requests.spend(Need::of(&request.operation).blocks);
        } else {
            self.requests.spend(need.blocks);
        }
        self.execute(now, request);
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

    /// Queues a request that has to wait for room, or answers it. `Some`: it can proceed.
    pub(super) fn admit_by_room(
        &mut self,
        now: Time,
        request: Request,
        need: Need,
        actions: &mut Vec<PrimaryAction>,
    ) -> Option<Request> {
        if !self.waits_for_room(need) {
            return Some(request);
        }
        if need.what == Takes::Writes && self.refuses_for_room(now) {
            self.refuse(request.token, BlockError::NoSpace, actions);
        } else {
            self.requests.wait_for_room(request);
        }
        None
    }

    /// Returns true if the pools take no request of this kind.
    pub(super) fn waits_for_room(&self, need: Need) -> bool {
        match need.what {
            Takes::Nothing => false,
            Takes::Holes => {
                self.requests.holes_wait
                    || mutant::is("holes-behind-writes") && self.requests.any(Waiting::Room)
            }
            Takes::Writes => {
                self.requests.short_since.is_some() || self.requests.any(Waiting::Room)
            }
        }
    }

    fn refuses_for_room(&self, now: Time) -> bool {
        self.config.on_full == OnFull::NoSpace
            && self.requests.short_since.is_some_and(|since| now >= since + GRACE)
    }

    /// Called once for each batch: checks for room, and decides on requests that wait for it.
    pub(super) fn mind_room(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.look_at_room();
        if !self.commit.is_short_of(Takes::Writes, &self.members.peers) {
            self.requests.holes_wait = false;
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
        self.requests.holes_wait = self.commit.is_short_of(Takes::Holes, &self.members.peers);
        if !self.requests.holes_wait && self.requests.holes_wait_for_room() {
            // They pass those that wait on.
            self.requests.room_to_window();
        }
        if self.commit.stable < self.history.last.lsn {
            // Entries on media can be merged into the map, and merged entries can be cleaned.
            self.commit.want_sync(self.history.last.lsn);
        }
        if self.refuses_for_room(now) {
            for request in self.requests.take_writes_for_room() {
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
