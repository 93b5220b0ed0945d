//! Work done once for each batch: progress, messages, drops and returns of members, timers.

use std::time::Duration;

use super::pace::Kind;
use super::quorum::{self, Views, rules_of};
use super::requests::{Sequenced, Waiting};
use super::{Link, Peer, Phase, Primary, PrimaryAction, PrimaryNote, WaitReason};
use crate::primary::{OnQuorumLoss, ReadMode};
use quoin_types::block::{BlockError, Payload};
use quoin_types::entry::EntryKind;
use quoin_types::ids::Lsn;
use quoin_types::membership::Member;
use quoin_types::message::{Ping, Takes, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Size of one Append, and limit of bytes in flight to one replica.
const APPEND_BYTES: usize = 1 << 20;
const IN_FLIGHT_BYTES: usize = 8 << 20;
/// Time after which a silent control plane or replica (beside leases) is asked again.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Shortest time that a member dropped for slowness stays out, so that Views do not flap.
const RETURN_AFTER: Duration = Duration::from_secs(5);
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);
impl Primary {
    /// Carries out everything that the events since the last call lead to. Called after each batch.
    pub fn flush(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            Phase::Stopped => return,
            Phase::Serving if self.drain_requested => {
                self.phase = Phase::Draining { closing: false, until: now + DRAIN_PATIENCE };
            }
            Phase::Serving | Phase::Draining { .. } => {}
            _ if self.drain_requested => return self.stop(actions),
            Phase::Resting { until } if now >= until => {
                self.acquire(actions);
                self.opening.answer_by = now + PATIENCE;
            }
            Phase::Acquiring if now >= self.opening.answer_by => {
                self.wait_for(WaitReason::Grant, actions);
                self.rest(now);
            }
            Phase::Fetching { .. } if now >= self.opening.answer_by => self.reopen(now, actions),
            Phase::Recovering if now >= self.opening.answer_by && self.waits_in_vain() => {
                self.reopen(now, actions);
            }
            _ => {}
        }
        match self.phase {
            Phase::Serving => self.end_hold_in_time(now, actions),
            _ => self.break_hold(actions),
        }
        self.reopen_for_quorum(now, actions);
        self.hang_up_silent(now, actions);
        self.connect_due(now, actions);
        self.consider_open(now, actions);
        if self.is_running() {
            self.progress(now, actions);
            if self.phase == Phase::Serving {
                self.mind_room(now, actions);
                self.mind_rounds(now);
                self.take_backlog(now, actions);
                if self.requests.any(Waiting::Lease) {
                    self.release(now, actions);
                }
                self.step_options();
                self.step_change(now, actions);
                self.step_verify(now, actions);
            }
            if !self.is_closing() {
                if self.phase != Phase::Recovering {
                    self.reconsider_views(now, actions);
                }
                self.step_rebuilds(now, actions);
                self.step_bulk(now, actions);
                if self.phase == Phase::Serving {
                    // The pace was stepped with the rebuilds.
                    if self.step_changes(now, actions) {
                        self.release(now, actions);
                    }
                }
                self.send_entries(now, actions);
            }
            self.step_drain(now, actions);
            if !self.is_closing() {
                self.ask_syncs(now, actions);
                if self.phase != Phase::Recovering && self.ask_reads(now, actions) {
                    self.release(now, actions);
                }
                self.send_pings(now, actions);
                self.trim_history(now, actions);
            }
        }
        self.set_timer(now, actions);
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Recovering | Phase::Serving | Phase::Draining { .. })
    }

    /// Returns true if Close was sent: the lease is given up and nothing more may be sent.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Draining { closing: true, .. })
    }

    fn connect_due(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let connecting = matches!(
            self.phase,
            Phase::Opening { .. }
                | Phase::Fetching { .. }
                | Phase::Recovering
                | Phase::Serving
                | Phase::Draining { closing: false, .. }
        );
        if !connecting {
            return;
        }
        for index in self.members.connect_due(now) {
            let (member, session) =
                (self.members[index].member, self.key(self.members[index].nonce));
            actions.push(PrimaryAction::Connect { member, session });
        }
    }

    /// Ends silent sessions; a partition ends no connection by itself.
    fn hang_up_silent(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let mut index = 0;
        while index < self.members.len() {
            if self.silent_at(index).is_some_and(|at| at <= now) {
                self.hang_up(now, index, actions);
            }
            index += 1;
        }
    }

    /// Time at which the session with this replica counts as dead unless a message arrives.
    pub(super) fn silent_at(&self, index: usize) -> Option<Time> {
        let peer = &self.members[index];
        let lease = crate::replica::granted_lease(self.config.lease_ms);
        match peer.link {
            // A restarted replica waits out leases of up to the longest allowed.
            Link::Opening => Some(peer.since + lease + Duration::from_secs(30)),
            Link::Connecting | Link::Truncating => Some(peer.since + PATIENCE),
            Link::Fed => {
                let age = Duration::from_millis(self.config.drop_after_ms.into());
                let unanswered = peer.lease.unanswered_since.map(|t| t + age.max(PATIENCE / 2));
                // No member is dropped before the first View: a replica whose disk hangs, though it
                // answers, must not delay the open indefinitely.
                let hung = peer.progress.behind_since.filter(|_| self.phase == Phase::Recovering);
                [unanswered, hung.map(|t| t + age.max(PATIENCE * 2))].into_iter().flatten().min()
            }
            Link::Rebuilding => peer.rebuild.as_ref().and_then(super::rebuild::Rebuild::dead_at),
            Link::Down | Link::Answered => None,
        }
    }

    pub(super) fn on_applied(
        &mut self,
        now: Time,
        index: usize,
        applied: Lsn,
        durable: Lsn,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let last = self.history.last.lsn;
        let peer = &mut self.members[index];
        if peer.link != Link::Fed {
            return;
        }
        if applied >= peer.progress.next || durable >= peer.progress.next {
            return self.shut_out(now, index, "OnlyCounted", actions);
        }
        peer.has_reached(now, applied, durable, last);
    }

    /// Advances commit, stable and Views, then sends the replies that are now allowed.
    pub(super) fn progress(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if !self.is_running() {
            return;
        }
        loop {
            if self.commit.views.activate(&self.members.peers) {
                if self.phase == Phase::Recovering {
                    self.commit.start();
                    self.start_serving(now, actions);
                } else {
                    self.note_in_sync(actions);
                }
                continue;
            }
            break;
        }
        if self.phase == Phase::Recovering {
            return;
        }
        self.commit.advance(now, &self.members.peers, self.history.last.lsn);
        if self.commit.held {
            self.commit.quorum_lost = None;
            if self.announced.waits_for().is_some_and(WaitReason::is_quorum) {
                self.wait_no_longer(actions);
            }
        } else {
            self.below_quorum(now, actions);
        }
        self.release(now, actions);
    }

    /// Handles fewer than CF counted replicas: nothing is acknowledged. Requests wait or fail, as
    /// the volume's option says.
    fn below_quorum(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let since = *self.commit.quorum_lost.get_or_insert(now);
        if let Some(reason) = self.commit.short_of(&self.members.peers) {
            self.wait_for(reason, actions);
        } else if now >= since + PATIENCE / 5 {
            // After a change of rules the quorum needs a replica that is behind; it catches up
            // within milliseconds.
            self.wait_for(WaitReason::CatchUp, actions);
        }
        let grace = Duration::from_millis(self.config.lease_ms.into());
        let fails = self.config.on_quorum_loss == OnQuorumLoss::Fail && !self.holds.is_holding();
        if fails && now >= since + grace {
            for token in self.requests.fail_answers() {
                self.reply(token, Err(BlockError::NoQuorum), actions);
            }
            self.fail_reads(now, BlockError::NoQuorum, actions);
            self.fail_backlog(BlockError::NoQuorum, actions);
        }
    }

    /// Reopens if fewer than CF counted members were present for long, while an open would find
    /// enough known replicas. An open can bring back a replica that lacks more than the window,
    /// which counting cannot.
    fn reopen_for_quorum(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let long = self.commit.is_lost_for(now, PATIENCE);
        if self.phase != Phase::Serving || !long {
            return;
        }
        let usable = |p: &Peer| {
            p.is_live()
                && self.members.membership.contains(p.member)
                && p.ack.as_ref().is_some_and(|ack| ack.quorum && !ack.damaged)
        };
        let live = quorum::count(&self.members.peers, usable);
        let holds = |p: &Peer| p.link == Link::Fed && self.commit.views.counts(p.member);
        let counted = quorum::count(&self.members.peers, |p| usable(p) && holds(p));
        if live > counted && live >= self.members.membership.open_quorum() {
            self.commit.quorum_lost = None;
            self.reopen(now, actions);
        }
    }

    pub(super) fn lease_until(&self) -> Option<Time> {
        self.commit.lease_until(&self.members.peers, self.config.lease_ms)
    }

    /// Returns true if a reply may leave at this time. A driver asks again where it took long over one.
    pub fn holds_lease(&self, now: Time) -> bool {
        self.lease_until().is_some_and(|until| now < until)
    }

    /// Sends replies. No reply of any kind leaves without a live lease, and none while commit is
    /// not held.
    fn release(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let held = self.commit.held || mutant::is("return-not-held");
        if !self.replies_wait() || !held || self.is_closing() {
            return;
        }
        if !self.holds_lease(now) && !mutant::is("reply-without-a-lease") {
            return;
        }
        quorum::assert_answerable(
            &self.commit.views,
            &self.members.peers,
            self.commit.lsn,
            now,
            self.config.lease_ms,
        );
        let just_released = self.release_hold(actions);
        if !self.holds.is_holding() || mutant::is("writes-answered-while-held") {
            self.answer_writes(now, !just_released, actions);
        }
        self.tell_snapshots(actions);
        self.tell_changes(actions);
        let confirmed = match self.config.reads {
            ReadMode::Confirmed => {
                quorum::reached(&self.commit.views, &self.members.peers, |p| p.lease.answered)
            }
            ReadMode::Leased => None,
        };
        self.release_reads(now, confirmed, actions);
    }

    /// Answers all writes and flushes that may be. `is_measure`: their latency is one of the load.
    fn answer_writes(&mut self, now: Time, is_measure: bool, actions: &mut Vec<PrimaryAction>) {
        for (token, error) in self.requests.take_refused() {
            self.reply(token, Err(error), actions);
        }
        while let Some(w) = self.requests.next_committed(self.commit.lsn) {
            if is_measure {
                self.measured(now, w, Kind::Write);
            }
            self.reply(w.token, Ok(Payload::None), actions);
        }
        while let Some(w) = self.requests.next_stable(self.commit.stable) {
            if is_measure {
                self.measured(now, w, Kind::Durable);
            }
            self.reply(w.token, Ok(Payload::None), actions);
        }
    }

    fn measured(&mut self, now: Time, waiting: Sequenced, kind: Kind) {
        if waiting.bytes > 0 {
            self.rebuilds.pace.answered(now, waiting.arrived, kind, waiting.bytes);
        }
    }

    pub(super) fn replies_wait(&self) -> bool {
        // A hold needs the lease when it ends.
        self.requests.awaits_answer()
            || !self.reads.is_empty()
            || self.changes.awaits_answer()
            || self.holds.is_holding()
    }

    fn send_entries(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let last = self.history.last.lsn;
        let sync_each = self.is_media();
        for index in 0..self.members.len() {
            if self.members[index].room.full_until.is_some_and(|until| now < until) {
                continue;
            }
            let offer = self.members[index].room.full_until.is_some();
            while self.members[index].link == Link::Fed && self.members[index].progress.next <= last
            {
                let peer = &self.members[index];
                let in_flight = self.history.weight_after(peer.progress.applied)
                    - self.history.weight_after(Lsn(peer.progress.next.0 - 1));
                if in_flight > IN_FLIGHT_BYTES {
                    break;
                }
                let mut bytes = 0;
                let mut entries = Vec::new();
                for entry in self.history.after(Lsn(peer.progress.next.0 - 1)) {
                    if bytes > 0 && bytes + entry.weight() > APPEND_BYTES {
                        break;
                    }
                    bytes += entry.weight();
                    entries.push(entry.clone());
                }
                let Some(end) = entries.last().map(|e| e.lsn) else { break };
                if mutant::is("page-changed-between-sends") && index % 2 == 1 {
                    entries = entries.iter().map(changed).collect();
                }
                let sync = sync_each && entries.iter().any(|e| !e.kind.is_durable_first());
                let stable = self.commit.stable;
                let peer = &mut self.members[index];
                peer.progress.next = end.next();
                peer.progress.stable_told = stable;
                peer.progress.behind_since.get_or_insert(now);
                peer.lease.sent_ping(now);
                let message = ToReplica::Append { entries, stable, sync, ping: Ping(now.0) };
                self.send(index, message, actions);
                if offer {
                    // One entry tests whether there is room; the replica reports if there is none.
                    self.members[index].room.full_until = None;
                    break;
                }
            }
        }
    }

    /// Requests syncs: for flushes, and automatically some time or bytes after the first entry
    /// above stable.
    fn ask_syncs(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let last = self.history.last.lsn;
        let after = Duration::from_millis(self.config.sync_after_ms.into());
        let is_much = self.history.weight_after(self.commit.stable) >= self.config.sync_bytes;
        let Some(wanted) = self.commit.sync_due(now, last, after, is_much) else { return };
        for index in 0..self.members.len() {
            let peer = &mut self.members[index];
            // One without room does not take the rest before some of what it has is stable and folded.
            let lsn = match peer.room.stuck && !mutant::is("full-replica-not-synced") {
                true => wanted.min(Lsn(peer.progress.next.0.saturating_sub(1))),
                false => wanted,
            };
            if peer.link == Link::Fed
                && peer.progress.next > lsn
                && peer.progress.sync_asked < lsn
                && peer.progress.durable < lsn
            {
                peer.progress.sync_asked = lsn;
                peer.lease.sent_ping(now);
                self.send(index, ToReplica::Sync { lsn, ping: Ping(now.0) }, actions);
            }
        }
    }

    pub(super) fn ping_interval(&self) -> Duration {
        Duration::from_millis(u64::from(self.config.lease_ms) / 8)
    }

    /// Returns true if the lease is renewed when it is half over.
    pub(super) fn wants_lease(&self) -> bool {
        let is_kept = self.members.keeps_lease && !mutant::is("idle-lease-not-kept");
        is_kept || self.replies_wait()
    }

    /// Sends pings. The lease is renewed only while something waits for it, or the driver asks for it;
    /// an idle volume sends nothing. Some time after stable has reached the last entry, one frame
    /// notifies each replica.
    fn send_pings(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let half = Duration::from_millis(u64::from(self.config.lease_ms) / 2);
        let renew =
            self.wants_lease() && self.lease_until().is_none_or(|until| now + half >= until);
        let settled = self.commit.tell_at(&self.members.peers).is_some_and(|at| now >= at);
        let interval = self.ping_interval();
        let stable = self.commit.stable;
        for index in 0..self.members.len() {
            let counts = self.commit.views.counts(self.members[index].member);
            let tell = settled && self.members[index].lacks_word_of(self.commit.stable);
            let peer = &mut self.members[index];
            if peer.link != Link::Fed {
                continue;
            }
            let renew = renew && counts && now >= peer.lease.ping_sent + interval;
            if renew || tell || std::mem::take(&mut peer.lease.ping_due) {
                peer.lease.ping_due = false;
                peer.progress.stable_told = stable;
                peer.lease.sent_ping(now);
                self.send(index, ToReplica::Ping { stable, ping: Ping(now.0) }, actions);
            }
        }
    }

    /// Returns the reason to drop a member of the in-sync set, if there is one.
    fn drop_reason(&self, peer: &Peer, now: Time) -> Option<&'static str> {
        let drop_after = Duration::from_millis(self.config.drop_after_ms.into());
        if peer.link != Link::Fed {
            Some("it is not connected")
        } else if peer.progress.behind_since.is_some_and(|t| now >= t + drop_after)
            && peer.progress.applied < self.history.last.lsn
        {
            Some(if peer.room.share_of(Takes::Writes).is_none() {
                "its pool is full"
            } else {
                "it made no progress for too long"
            })
        } else if self.history.weight_after(peer.progress.applied) > self.config.window_bytes {
            Some("it is too far behind")
        } else {
            None
        }
    }

    /// Returns true if a member outside the in-sync set has caught up and may return.
    fn may_return(&self, peer: &Peer, now: Time) -> bool {
        peer.link == Link::Fed
            && peer.progress.applied >= peer.progress.tip
            && now >= peer.lasting.return_at
            && self.history.weight_after(peer.progress.applied) <= self.config.window_bytes / 4
            && (self.members.membership.contains(peer.member)
                || self.change.joint().is_some_and(|rule| rule.known.contains(&peer.member)))
    }

    /// Drops members that are gone or slow while CF remain, and readmits those that caught up.
    fn reconsider_views(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let Some(newest) = self.commit.views.newest() else { return };
        let newest_at = self.commit.views.newest_at();
        let is_member = |p: &Peer| newest.in_sync.contains(&p.member);
        // A member that came back without its cache and holds everything up to its return becomes
        // continuous by a View that follows. Without that View the next open would count it as
        // lost.
        let renew = self.members.peers.iter().any(|p| {
            let lost_cache = p.ack.as_ref().is_some_and(|ack| !ack.continuous);
            is_member(p)
                && p.link == Link::Fed
                && lost_cache
                && !mutant::is("returned-never-continuous")
                && p.progress.applied >= p.progress.tip
                && newest_at <= p.progress.tip
        });
        let settled = !renew
            && self.members.peers.iter().all(|p| {
                if is_member(p) {
                    self.drop_reason(p, now).is_none()
                } else {
                    !self.may_return(p, now)
                }
            });
        if settled {
            return;
        }
        let mut in_sync: Vec<Member> = Vec::new();
        let mut dropped: Vec<(Member, &'static str)> = Vec::new();
        let mut returned = false;
        for peer in &self.members.peers {
            if is_member(peer) {
                match self.drop_reason(peer, now) {
                    Some(reason) => dropped.push((peer.member, reason)),
                    None => in_sync.push(peer.member),
                }
            } else if self.may_return(peer, now) {
                in_sync.push(peer.member);
                returned = true;
            }
        }
        let enough = rules_of(newest).all(|rule| {
            in_sync.iter().filter(|m| rule.known.contains(m)).count() >= usize::from(rule.cf)
        });
        if !enough && !mutant::is("dropped-below-cf") {
            // Dropping would leave fewer than CF: writes are pushed back instead. Returns still
            // count.
            in_sync.extend(dropped.drain(..).map(|(member, _)| member));
        }
        if dropped.is_empty() && !returned && !renew {
            return;
        }
        // A second View follows a pending one only if that one cannot become active.
        if let Some((_, pending)) = self.commit.views.pending.back()
            && (Views::can_activate(pending, &self.members.peers)
                || mutant::is("stuck-view-not-passed"))
        {
            return;
        }
        for (member, reason) in dropped {
            actions.push(PrimaryAction::Note(PrimaryNote::Dropped { member, reason }));
            if let Some(peer) = self.members.peers.iter_mut().find(|p| p.member == member)
                && peer.link == Link::Fed
            {
                peer.lasting.return_at = now + RETURN_AFTER;
            }
        }
        let joint = self.change.joint();
        self.append_view(in_sync, joint);
    }

    /// Grows a volume that is smaller than its record says.
    pub(super) fn grow(&mut self) {
        let blocks = self.config.volume_blocks;
        if blocks > self.history.blocks {
            let kind = EntryKind::Resize { blocks };
            self.history.append_bare(self.opening.epoch, kind);
        }
    }

    /// Shuts down: accepted requests are finished and synced, then sessions are closed.
    fn step_drain(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let Phase::Draining { closing, until } = self.phase else { return };
        if closing {
            if now >= until || self.members.peers.iter().all(|p| p.link == Link::Down) {
                self.stop(actions);
            }
            return;
        }
        let last = self.history.last.lsn;
        self.commit.want_sync(last);
        let busy = self.replies_wait() || self.requests.merging();
        let unsynced =
            self.members.peers.iter().any(|p| p.link == Link::Fed && p.progress.durable < last);
        if (busy || unsynced || self.commit.stable < last) && now < until {
            return;
        }
        self.phase = Phase::Draining { closing: true, until: now + DRAIN_PATIENCE };
        for index in 0..self.members.len() {
            if self.members[index].link == Link::Fed {
                self.end_bulk(index, actions);
                self.send(index, ToReplica::Close, actions);
            } else if self.members[index].link != Link::Down {
                let session = self.key(self.members[index].nonce);
                actions.push(PrimaryAction::Disconnect { session });
                self.members[index].down(now);
            }
        }
    }
}

/// The entry with the later content of the client's page, for the mutant.
fn changed(entry: &quoin_types::entry::SharedEntry) -> quoin_types::entry::SharedEntry {
    let mut copy = quoin_types::Entry::clone(entry);
    let mut data = bytes::BytesMut::from(&copy.data[..]);
    if let Some(byte) = data.first_mut() {
        *byte ^= 1;
    }
    copy.data = data.freeze();
    quoin_types::entry::SharedEntry::new(copy)
}
