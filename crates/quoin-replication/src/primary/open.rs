//! From an epoch to IO: the six steps of an open (`docs/replication.md`, "Opening a volume").

use std::time::Duration;

use super::bulk::Bulk;
use super::quorum::{self, rules_of};
use super::refusals::Judged;
use super::requests::Waiting;
use super::serve::PATIENCE;
use super::verdict::Verdict;
use super::{History, Link, Peer, Phase, Primary, PrimaryAction, PrimaryNote, WaitReason};
use quoin_types::EPOCH_MAX;
use quoin_types::entry::{Chain, EntryKind, Rule, SharedEntry, View};
use quoin_types::ids::{Epoch, Lsn, Position, SessionKey};
use quoin_types::membership::{Member, Membership};
use quoin_types::message::{Failure, OpenAck, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time that an open which could only continue by giving up unflushed data waits for the rest of K.
const UNFLUSHED_GRACE: Duration = Duration::from_secs(10);
const FETCH_BYTES: u32 = 4 << 20;

impl Primary {
    /// Step 1. Every attempt takes a new incarnation and a new epoch.
    pub(super) fn acquire(&mut self, actions: &mut Vec<PrimaryAction>) {
        self.opening.incarnations.begin_next();
        if mutant::is("epoch-reused") {
            self.opening.incarnations.repeat(self.config.volume.0);
        }
        self.phase = Phase::Acquiring;
        actions.push(PrimaryAction::AcquireEpoch {
            incarnation: self.opening.incarnations.current(),
            at_least: self.opening.refusals.at_least(),
        });
    }

    pub(super) fn rest(&mut self, now: Time) {
        let chance = self.opening.incarnations.random();
        self.phase = Phase::Resting { until: now + self.opening.pause(chance) };
    }

    /// Gives up this epoch and starts again; entries that were sequenced but not committed are
    /// kept.
    pub(super) fn reopen(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        for peer in &self.members.peers {
            if peer.link != Link::Down {
                actions.push(PrimaryAction::Disconnect { session: self.key(peer.nonce) });
            }
        }
        if matches!(self.phase, Phase::Serving | Phase::Draining { .. }) {
            // Everything above stable is still in memory: even the loss of every cache at once
            // loses nothing that this target acknowledged. What was never shown is not owed: a
            // disk that failed may have dropped it.
            let owed = self.shown();
            self.reads.owed = self.reads.owed.max(owed);
            self.opening.keep(&self.history, self.commit.stable, owed);
        }
        self.members.peers.clear();
        self.history.drop_entries();
        self.change.reset();
        self.requests.snapshots.clear();
        self.requests.reverts.clear();
        self.forget_changes();
        self.break_hold(actions);
        self.commit.end_epoch();
        self.reads_wait_for_reopen();
        self.rest(now);
    }

    /// Step 2: open all of K.
    pub(super) fn granted(
        &mut self,
        now: Time,
        epoch: Epoch,
        membership: Membership,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if let Err(rule) = membership.check() {
            self.wait_for(WaitReason::UnsoundMembership(rule), actions);
            return self.rest(now);
        }
        if epoch <= self.opening.epoch {
            self.wait_for(WaitReason::UsedEpoch, actions);
            self.opening.refusals.ask_above(self.opening.epoch);
            return self.rest(now);
        }
        let judged = self.opening.refusals.judge(now, self.opening.epoch, epoch);
        self.opening.epoch = epoch;
        if self.requests.any(Waiting::Window) {
            self.opening.past.waits(epoch);
        }
        if judged == Judged::AskAgain {
            self.wait_for(WaitReason::OlderGrant, actions);
            return self.rest(now);
        }
        if !membership.formed {
            self.wait_for(WaitReason::NotFormed, actions);
            return self.rest(now);
        }
        // Findings of an earlier attempt are determined again.
        self.opening.unflushed_tail_lost = false;
        actions.push(PrimaryAction::Note(PrimaryNote::Opening { epoch }));
        self.opening.granted = super::status::without_retired(&membership);
        self.members.open(now, self.config.volume, membership);
        self.phase = Phase::Opening { quorum_at: None, unflushed_since: None };
        self.opening.begin(now);
    }

    pub(super) fn connected(
        &mut self,
        now: Time,
        session: SessionKey,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(index) = self.peer_of(session) else {
            return actions.push(PrimaryAction::Disconnect { session });
        };
        let peer = &mut self.members[index];
        if peer.link != Link::Connecting {
            return;
        }
        peer.bulk = Bulk::default();
        peer.link = Link::Opening;
        peer.since = now;
        let message = ToReplica::Open {
            volume: self.config.volume,
            replica: peer.member.id,
            guid: peer.member.guid,
            membership: self.members.membership.clone(),
            lease_ms: self.config.lease_ms,
        };
        self.send(index, message, actions);
    }

    pub(super) fn on_refused(
        &mut self,
        now: Time,
        index: usize,
        promised: Epoch,
        failure: Failure,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if promised > EPOCH_MAX {
            // Accepting it would leave the record no epoch to grant.
            return self.shut_out(now, index, "an impossible epoch", actions);
        }
        if failure == Failure::Fenced && promised >= self.opening.epoch {
            if !self.opening.refusals.hear(now, self.members[index].member, promised) {
                return self.shut_out(now, index, "PromiseMonotone", actions);
            }
            actions.push(PrimaryAction::Note(PrimaryNote::Fenced { by: promised }));
            // The present owner of the volume may continue; the record decides which node that is.
            return self.reopen(now, actions);
        }
        let reason = match failure {
            Failure::Unknown => "its pool no longer has it",
            Failure::Retired => "it is retired",
            Failure::Full => "its pool has no room for its records",
            _ => "its pool refused it",
        };
        let member = self.members[index].member;
        actions.push(PrimaryAction::Note(PrimaryNote::Dropped { member, reason }));
        // No replica that could report a newer target may be left: only the record can tell.
        let gone = matches!(failure, Failure::Unknown | Failure::Retired);
        if gone && self.is_long_without(index, now) {
            self.commit.quorum_lost = None;
            return self.reopen(now, actions);
        }
        self.hang_up(now, index, actions);
    }

    /// Returns true if a known replica is unavailable, and there has been no quorum for long.
    fn is_long_without(&self, index: usize, now: Time) -> bool {
        let long = self.commit.is_lost_for(now, PATIENCE);
        long && self.phase == Phase::Serving
            && self.members.membership.contains(self.members[index].member)
    }

    /// Handles a replica that has heard of a newer term. The record of that term may grant this
    /// very epoch anew, or has granted another one. While CF others know of no newer term, IO
    /// continues with them; otherwise only the record can tell.
    pub(super) fn on_former_term(
        &mut self,
        now: Time,
        index: usize,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if mutant::is("former-term-waited-out") {
            return self.peer_lost(now, index, actions);
        }
        if self.is_long_without(index, now) {
            self.commit.quorum_lost = None;
            return self.reopen(now, actions);
        }
        self.peer_lost(now, index, actions);
        self.turned_away(now, actions);
    }

    pub(super) fn on_open_ack(
        &mut self,
        now: Time,
        index: usize,
        ack: Box<OpenAck>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let peer = &mut self.members[index];
        if peer.link != Link::Opening {
            return;
        }
        if let Err(what) = ack.check(self.opening.epoch) {
            return self.shut_out(now, index, what, actions);
        }
        peer.link = Link::Answered;
        peer.room.report(ack.room);
        peer.ack = Some(ack);
        if matches!(self.phase, Phase::Serving | Phase::Draining { .. } | Phase::Recovering) {
            self.begin_feeding(now, index, actions);
        }
    }

    /// Steps 2 to 5, evaluated whenever their inputs may have changed.
    pub(super) fn consider_open(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let Phase::Opening { quorum_at, unflushed_since } = self.phase else { return };
        match self.verdict() {
            Verdict::Behind(durable_version) => {
                actions
                    .push(PrimaryAction::Note(PrimaryNote::ControlPlaneBehind { durable_version }));
                self.wait_for(WaitReason::RecordBehind, actions);
                self.opening.pause_longest();
                self.reopen(now, actions);
            }
            Verdict::Wait(reason) => self.wait_to_open(reason, now, actions),
            Verdict::MayHaveChanged(silent) => {
                let reason = WaitReason::JointMembers { silent: silent.len() };
                self.wait_to_open(reason, now, actions);
            }
            Verdict::Unflushed => {
                let since = unflushed_since.unwrap_or(now);
                self.phase = Phase::Opening { quorum_at, unflushed_since: Some(since) };
                if now < since + UNFLUSHED_GRACE && !self.all_answered() {
                    return self.wait_for(WaitReason::AllAnswers, actions);
                }
                self.opening.unflushed_tail_lost = true;
                actions.push(PrimaryAction::Note(PrimaryNote::UnflushedTailMayBeLost));
                if let Some(authority) = self.authority() {
                    self.recover_from(now, authority, actions);
                }
            }
            Verdict::Go { authority } => {
                let since = quorum_at.unwrap_or(now);
                self.phase = Phase::Opening { quorum_at: Some(since), unflushed_since: None };
                let grace = Duration::from_millis(self.config.open_grace_ms.into());
                if self.all_answered() || now >= since + grace {
                    self.recover_from(now, authority, actions);
                }
            }
        }
    }

    /// Waits: evaluates again once the record has advanced, or when the answers are overdue.
    fn wait_to_open(&mut self, reason: WaitReason, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.phase = Phase::Opening { quorum_at: None, unflushed_since: None };
        self.wait_for(reason, actions);
        self.open_joint_members(now);
        let gone_on = self.members.desired.version > self.members.membership.version;
        if (gone_on || now >= self.open_waits_until()) && !mutant::is("record-not-asked-again") {
            self.reopen(now, actions);
        }
    }

    pub(super) fn open_deadline(&self) -> Option<Time> {
        let Phase::Opening { quorum_at, unflushed_since } = self.phase else { return None };
        let grace = Duration::from_millis(self.config.open_grace_ms.into());
        let waits = unflushed_since.map(|s| s + UNFLUSHED_GRACE).or(quorum_at.map(|q| q + grace));
        Some(waits.unwrap_or_else(|| self.open_waits_until()))
    }

    fn open_waits_until(&self) -> Time {
        let answers = self.members.peers.iter().any(|p| p.link == Link::Opening);
        self.opening.gives_up_at(answers)
    }

    /// Step 5: takes the authority's history and reads from its log what others lack.
    fn recover_from(&mut self, now: Time, authority: usize, actions: &mut Vec<PrimaryAction>) {
        let ack = self.members[authority].ack.clone().expect("a voter has answered");
        self.history = History::of(&ack);
        if ack.volume_blocks == 0 {
            self.history.blocks = self.config.volume_blocks;
        }
        // The mark is repeated while no epoch with IO has followed the marked View.
        if let Some((lsn, view)) = &ack.last_view
            && view.unflushed_tail_lost
            && *lsn == ack.position.lsn
            && !self.opening.unflushed_tail_lost
        {
            self.opening.unflushed_tail_lost = true;
            actions.push(PrimaryAction::Note(PrimaryNote::UnflushedTailMayBeLost));
        }
        let theirs = ack.position.epoch;
        if !mutant::is("overtaken-target-writes-again") && self.opening.past.is_overtaken_by(theirs)
        {
            // Another target has been the writer since. Requests that still wait here are older,
            // and must never overwrite what was written there. Only a new target may continue.
            actions.push(PrimaryAction::Note(PrimaryNote::Fenced { by: theirs }));
            return self.stop(actions);
        }
        if self.opening.is_commit_missing(&self.history) {
            let member = self.members[authority].member;
            let invariant = "CommitSurvives";
            actions.push(PrimaryAction::Note(PrimaryNote::InvariantRefused { member, invariant }));
            return self.stop(actions);
        }
        let mut fetch_after = ack.position.lsn;
        let (mut by_entries, mut by_increments) = (Vec::new(), 0);
        for index in 0..self.members.len() {
            let Some(theirs) = self.members[index].ack.as_deref() else { continue };
            let Ok(keep) = self.history.common_prefix(theirs) else { continue };
            let known = self.members.membership.contains(self.members[index].member);
            let voter = known && theirs.quorum && !theirs.damaged;
            if keep >= ack.base {
                fetch_after = fetch_after.min(keep);
                by_entries.extend(voter.then_some(keep));
            } else {
                by_increments += usize::from(voter);
            }
        }
        by_entries.sort_unstable_by(|a, b| b.cmp(a));
        let needed = by_entries.get(usize::from(self.members.membership.cf) - 1);
        self.opening.fetch_floor = needed.copied().unwrap_or(ack.base);
        if needed.is_none() && by_increments > 0 {
            // IO cannot start without a replica that gets the authority's base first: the entries
            // that follow the base must be available for it.
            fetch_after = fetch_after.min(ack.base);
        }
        self.phase = Phase::Fetching { authority: self.members[authority].member };
        self.opening.answer_by = now + PATIENCE;
        if fetch_after == ack.position.lsn {
            return self.first_view(now, actions);
        }
        let message = ToReplica::Fetch { id: 0, after: fetch_after, bytes_max: FETCH_BYTES };
        self.send(authority, message, actions);
    }

    pub(super) fn on_fetched(
        &mut self,
        now: Time,
        index: usize,
        entries: Vec<SharedEntry>,
        gone: bool,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Phase::Fetching { authority } = self.phase else { return };
        if self.members[index].member != authority {
            return;
        }
        if gone {
            // Its base has advanced since it answered: a new open sees the present base.
            return self.reopen(now, actions);
        }
        if entries.is_empty() {
            return self.shut_out(now, index, "the authority's log ends too early", actions);
        }
        if let Err(invariant) = self.history.take_fetched(entries) {
            return self.shut_out(now, index, invariant, actions);
        }
        // Entries that only members need which IO does not wait for are kept within the window:
        // those members get the rest by increments.
        self.history.trim_to_weight(self.config.window_bytes, self.opening.fetch_floor);
        self.opening.answer_by = now + PATIENCE;
        let reached = self.history.fetched_to().unwrap_or_default();
        if reached < self.history.last.lsn {
            let message = ToReplica::Fetch { id: 0, after: reached, bytes_max: FETCH_BYTES };
            return self.send(index, message, actions);
        }
        self.first_view(now, actions);
    }

    /// Step 6: the View of those that will be fed. Entries before it are committed again once it is
    /// durable on CF of them.
    fn first_view(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let held_from = self.history.first();
        let mut by_entries = Vec::new();
        let mut by_increments = Vec::new();
        for peer in &self.members.peers {
            let Some(ack) = peer.ack.as_deref().filter(|_| peer.link == Link::Answered) else {
                continue;
            };
            if !ack.quorum || ack.damaged || !self.members.membership.contains(peer.member) {
                continue;
            }
            match self.history.common_prefix(ack) {
                Ok(keep) if keep.next() >= held_from => by_entries.push(peer.member),
                Ok(_) => by_increments.push(peer.member),
                Err(_) => {}
            }
        }
        // Replicas that lack entries which exist only as a base are needed in the set only if CF is
        // not reached without them; they count from their flip on.
        let mut in_sync = by_entries;
        while in_sync.len() < usize::from(self.members.membership.cf)
            && let Some(member) = by_increments.pop()
        {
            in_sync.push(member);
        }
        if in_sync.len() < usize::from(self.members.membership.cf) {
            self.wait_for(WaitReason::SharedHistory, actions);
            return self.reopen(now, actions);
        }
        self.phase = Phase::Recovering;
        self.opening.answer_by = now + PATIENCE;
        self.opening.past.appends(self.opening.epoch);
        let first = self.history.last.lsn.next();
        self.append_view(in_sync, None);
        self.commit.first_view = first;
        for index in 0..self.members.len() {
            // A replica that proves to have another history may end this attempt.
            if self.phase == Phase::Recovering && self.members[index].link == Link::Answered {
                self.begin_feeding(now, index, actions);
            }
        }
    }

    /// Returns true if another open may start IO where this one waits for a replica that lacks what exists
    /// as a base only: as many as are needed are fed by entries, some of which came after the first View
    /// was made, or no base leads there, as where an entry behind all bases goes back to a snapshot that was
    /// deleted since. Bases move on, and the next open sees them.
    pub(super) fn waits_in_vain(&self) -> bool {
        let is_fed = |p: &Peer| {
            p.link == Link::Fed
                && self.members.membership.contains(p.member)
                && p.ack.as_ref().is_some_and(|ack| ack.quorum && !ack.damaged)
        };
        let fed = quorum::count(&self.members.peers, is_fed);
        let is_rebuilding = |p: &Peer| p.link == Link::Rebuilding;
        let (mut waiting, mut rebuilt) = (false, false);
        for peer in self.members.peers.iter().filter(|peer| is_rebuilding(peer)) {
            waiting |= peer.rebuild.is_none() && self.commit.views.counts(peer.member);
            rebuilt |= peer.rebuild.is_some();
        }
        let has_no_base = waiting && !rebuilt;
        self.phase == Phase::Recovering
            && self.commit.views.short(&self.members.peers)
            && (has_no_base || fed >= usize::from(self.members.membership.cf))
    }

    /// Appends a View of the newest rule with this in-sync set.
    pub(super) fn append_view(&mut self, in_sync: Vec<Member>, joint: Option<Rule>) {
        let view = View {
            in_sync,
            rule: self.members.rule(),
            joint,
            durability: self.config.durability,
            unflushed_tail_lost: self.opening.unflushed_tail_lost
                && self.phase == Phase::Recovering,
        };
        // A View under one rule would end the other, which a swap on its way may still bring into
        // force.
        assert!(view.joint.is_some() || self.change.joint().is_none(), "JointUntilKnown");
        for rule in rules_of(&view) {
            assert!(rule.known.len() <= usize::from(rule.rf), "KnownAtMostRF");
        }
        let kind = EntryKind::View(Box::new(view.clone()));
        let entry = self.history.append_bare(self.opening.epoch, kind);
        self.commit.views.pending.push_back((entry.lsn, view));
    }

    /// Cuts a replica that answered to the common prefix, then feeds it.
    pub(super) fn begin_feeding(
        &mut self,
        now: Time,
        index: usize,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let peer = &self.members[index];
        let Some(ack) = peer.ack.as_deref() else { return };
        if ack.membership_version > self.members.membership.version {
            if self.change.is_swapping() || !self.members.membership.contains(peer.member) {
                // The replica was made known by our own swap, whose answer is still on its way, or
                // by that of a newer target, which will fence this one.
                return self.hang_up(now, index, actions);
            }
            // Its promise allows this epoch, so no newer target taught it that version: the record
            // that granted the epoch is an older copy than the one with the change.
            let durable_version = ack.membership_version;
            actions.push(PrimaryAction::Note(PrimaryNote::ControlPlaneBehind { durable_version }));
            return self.shut_out(now, index, "MembershipMonotone", actions);
        }
        let common = match (self.history.common_prefix(ack), peer.lasting.parts_at) {
            (Ok(common), Some(parts_at)) => Ok(common.min(parts_at)),
            (Err("OneContent"), Some(parts_at)) => Ok(parts_at.min(ack.position.lsn)),
            (common, _) => common,
        };
        let (keep, reached) = match common {
            // Nothing of the replica counts until all of it was replaced, so nothing is cut either.
            _ if ack.damaged => (ack.position.lsn, Lsn::ZERO),
            Ok(keep) if keep < ack.stable => (Lsn::ZERO, Lsn::ZERO),
            Ok(keep) => (keep, keep),
            // The cut is requested and never executed (R3): the replica reports itself damaged,
            // does not vote any more, and is rebuilt from nothing when it is opened again.
            Err("StableNeverCut") => (Lsn::ZERO, Lsn::ZERO),
            Err(_) => {
                let parts_in = self.history.newest_common_epoch(ack);
                return self.of_another_history(now, index, parts_in, actions);
            }
        };
        let tip = if self.phase == Phase::Recovering {
            Lsn(self.commit.first_view.0 - 1)
        } else {
            self.history.last.lsn
        };
        if self.phase == Phase::Serving {
            self.forget_boundaries_of(index, keep);
        }
        let peer = &mut self.members[index];
        peer.link = Link::Truncating;
        peer.since = now;
        peer.progress.tip = tip;
        peer.progress.next = keep.next();
        peer.progress.applied = reached;
        peer.progress.durable = reached.min(ack_durable(peer));
        self.send(index, ToReplica::Truncate { keep, tip }, actions);
    }

    pub(super) fn on_truncated(
        &mut self,
        now: Time,
        index: usize,
        position: Position,
        chain: Chain,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let held_from = self.history.first();
        let peer = &mut self.members[index];
        if peer.link != Link::Truncating {
            return;
        }
        if position.lsn.0.checked_add(1) != Some(peer.progress.next.0) {
            return self.shut_out(now, index, "PrefixAlways", actions);
        }
        let damaged = peer.ack.as_ref().is_some_and(|a| a.damaged);
        let follows = self.history.may_follow(position.lsn, chain);
        if !damaged && !follows && !mutant::is("chain-of-a-cut-not-compared") {
            return self.of_another_history(now, index, position.lsn, actions);
        }
        peer.progress.durable = peer.progress.applied;
        if peer.progress.next >= held_from && !damaged {
            peer.link = Link::Fed;
        } else {
            peer.link = Link::Rebuilding;
        }
        self.progress(now, actions);
    }

    /// Handles a replica that holds another entry at `lsn`, under an epoch of this history: the
    /// epoch's number was used twice, by a control plane that had lost the first use. While IO is
    /// served the history is that of a quorum: the replica is cut back to before that epoch when it
    /// reconnects, and further where that is not enough. Below its stable it reports itself damaged
    /// and is rebuilt. An open cuts nothing for this: no replica can tell yet which of the two
    /// histories holds what was acknowledged.
    fn of_another_history(
        &mut self,
        now: Time,
        index: usize,
        lsn: Lsn,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if self.phase == Phase::Serving {
            self.members[index].lasting.parts_at = Some(self.history.before_epoch_of(lsn));
        }
        self.shut_out(now, index, "OneContent", actions);
    }

    /// Starts IO. The first View is active: everything before it is committed again.
    pub(super) fn start_serving(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.phase = Phase::Serving;
        self.opening.succeeded();
        self.options.shown = Lsn::ZERO;
        self.wait_no_longer(actions);
        let at = self.history.last;
        actions.push(PrimaryAction::Note(PrimaryNote::Serving { epoch: self.opening.epoch, at }));
        self.note_in_sync(actions);
        let may_write = !self.config.read_only;
        let epoch = self.opening.epoch;
        let rewritten = self.opening.rewrite_orphans(epoch, may_write, &mut self.history);
        self.requests.renumber(|lsn| rewritten.find(lsn));
        self.reads.owed = rewritten.find(self.reads.owed);
        // Growth comes before requests that waited: they know the volume in its present size.
        if !mutant::is("grown-behind-the-backlog") {
            self.grow();
        }
        self.clients_at_start(actions);
        self.forget_hidden_snapshots();
        // Requests of the older epoch must find all entries that may have been acknowledged.
        self.reads_after_reopen();
        let all =
            if self.requests.any(Waiting::Stable) { self.history.last.lsn } else { Lsn::ZERO };
        self.commit.want_sync_only(all);
        self.opening.past.nothing_waits();
        for request in self.requests.take_window() {
            self.submit(now, request, actions);
        }
    }

    pub(super) fn note_in_sync(&self, actions: &mut Vec<PrimaryAction>) {
        if let Some((_, view)) = &self.commit.views.active {
            let members = view.in_sync.clone();
            actions.push(PrimaryAction::Note(PrimaryNote::InSync { members }));
        }
    }
}

fn ack_durable(peer: &Peer) -> Lsn {
    peer.ack.as_ref().map_or(Lsn::ZERO, |a| a.durable)
}
