//! Increments: how a replica that lacks more than the window is brought to a boundary.
//!
//! The boundary B is a hidden snapshot appended now and waited for until it is stable; where
//! stable cannot move (recovery below CF), it is the source's own base. All slots with
//! `from < version ≤ B`, holes included, go view by view (every retained snapshot in order, then
//! B) from the sources, several at once ([`super::lanes`]), through the target to the receiver's
//! shadow, which flips at the end. Until then the receiver stays what it was. A base is its
//! source's own: it comes from that one alone, or begins anew.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::lanes::{Chunk, Lanes};
use super::{Link, Peer, Phase, Target, TargetAction, TargetNote};
use crate::BLOCK_SIZE;
use crate::entry::{EntryKind, SharedEntry};
use crate::ids::{Lsn, Position, SnapshotId};
use crate::membership::Member;
use crate::message::{IncrementEnd, Ping, ReadView, RequestId, Slot, SnapshotInfo, ToReplica};
use crate::mutant;
use crate::time::Time;

/// A rebuild that does not move for so long is given a new session.
const STALL: Duration = Duration::from_secs(20);
/// The receiver writes back all that its kernel still caches of the increment.
const COMMIT_PATIENCE: Duration = Duration::from_secs(600);
/// How long a rebuild whose receiver went away is kept for its return.
const PARKED_FOR: Duration = Duration::from_secs(600);
/// Chunks on their way to the receiver.
const FEEDS_MAX: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Waits for the boundary to become stable.
    Boundary,
    Moving,
    Committing,
}

pub(super) struct Rebuild {
    id: u64,
    /// Where the shadow starts.
    start: Lsn,
    /// The same, or the last retained snapshot that was sent: what is above is to be sent.
    from: Lsn,
    stage: Stage,
    /// The hidden snapshot; `None`: the source's base.
    boundary: Option<(SnapshotId, Lsn)>,
    /// The state at the boundary, once known.
    end: Option<Box<IncrementEnd>>,
    /// What is still to be sent: a retained snapshot with its description, or the boundary.
    views: VecDeque<(ReadView, Option<SnapshotInfo>)>,
    /// How the first of them is copied.
    lanes: Lanes,
    /// The one whose base it is to be.
    base_source: Option<Member>,
    /// Sources that have not got what is to be pulled, and will not get it.
    without: Vec<Member>,
    feeds: u32,
    moved: Time,
    /// Data that was copied in this round.
    round_bytes: u64,
}

impl Rebuild {
    pub fn round_bytes(&self) -> u64 {
        self.round_bytes
    }

    /// When something came of it last.
    pub fn moved(&self) -> Time {
        self.moved
    }

    /// There is something to ask a source for.
    fn wants_more(&self) -> bool {
        self.stage == Stage::Moving && !self.views.is_empty()
    }

    /// Bytes done and in all, as far as the walk over the volume tells.
    pub fn progress(&self, volume_blocks: u64) -> (u64, u64) {
        let views = self.views.len() as u64;
        let total = volume_blocks * BLOCK_SIZE as u64;
        match self.stage {
            Stage::Boundary => (0, total),
            Stage::Moving if views > 1 => (0, total),
            Stage::Moving => (self.lanes.cursor().min(volume_blocks) * BLOCK_SIZE as u64, total),
            Stage::Committing => (total, total),
        }
    }

    pub fn stage(&self) -> Stage {
        self.stage
    }

    fn boundary(&self) -> Option<Lsn> {
        self.boundary.map(|(_, lsn)| lsn).or(self.end.as_ref().map(|e| e.position.lsn))
    }

    /// When the rebuild counts as dead unless something moves.
    pub fn dead_at(&self) -> Option<Time> {
        match self.stage {
            Stage::Boundary => None,
            Stage::Moving => Some(self.moved + STALL),
            Stage::Committing => Some(self.moved + COMMIT_PATIENCE),
        }
    }
}

impl Target {
    pub(super) fn step_rebuilds(&mut self, now: Time, actions: &mut Vec<TargetAction>) {
        self.drop_parked(now);
        // Where writers wait for it, or nobody is served yet, it is in nobody's way.
        let clients_matter = self.phase == Phase::Serving && self.held;
        let paced = |p: &&Peer| {
            let wants = p.rebuild.as_ref().is_some_and(Rebuild::wants_more);
            wants && !p.rounds.takes_precedence()
        };
        let paced = self.peers.iter().filter(paced).map(|p| p.rounds.patience());
        let copying = paced.max().filter(|_| clients_matter);
        let busy = self.replies_wait();
        let (known, views) = (&self.membership.known, &self.views);
        self.pace.step(now, copying, busy, || known.iter().all(|member| views.counts(*member)));
        for index in 0..self.peers.len() {
            if self.peers[index].link != Link::Rebuilding {
                continue;
            }
            if self.peers[index].rebuild.is_none() && !self.begin_rebuild(now, index, None, actions)
            {
                continue;
            }
            let settled = self.settled_boundary(self.peers[index].member);
            let Some(rebuild) = &mut self.peers[index].rebuild else { continue };
            if rebuild.stage == Stage::Boundary
                && rebuild.boundary.is_none_or(|(_, lsn)| lsn <= settled)
            {
                rebuild.stage = Stage::Moving;
                rebuild.moved = now;
                let (rebuild, from) = (rebuild.id, rebuild.start);
                // No more than `from`: told of a later one, it would fold its base beyond the
                // point that the shadow starts from.
                self.send(index, ToReplica::Ping { stable: from, ping: Ping(now.0) }, actions);
                self.send(index, ToReplica::IncrementBegin { rebuild, from }, actions);
            }
            self.pull_next(now, index, actions);
            if index >= self.peers.len() {
                // The epoch ended by what a source said.
                return;
            }
        }
    }

    /// Up to where the boundary of `receiver` may be. Where stable cannot move because this rebuild
    /// is what it waits for, that is what CF - 1 counted members have on media: once the receiver
    /// flipped, CF have it, and no open can go on without all of them. (A receiver that does not
    /// count is no such copy: the others could open without its sources, with a history that
    /// its base has left behind. Should the receiver be dropped meanwhile, whoever opens without it
    /// has heard of that View, which is behind the boundary, from a holder.) Where fewer than
    /// CF - 1 are left to rebuild from, what all of them have must do, or nothing would ever move:
    /// should they be lost before a second receiver has it, an open without them finds a receiver
    /// whose base is ahead, and rebuilds it again.
    fn settled_boundary(&self, receiver: Member) -> Lsn {
        if mutant::is("boundary-not-stable") {
            return self.history.last.lsn;
        }
        if !self.views.counts(receiver) || !self.views.short(&self.peers) {
            return self.stable;
        }
        let fed = self.peers.iter().filter(|p| p.link == Link::Fed && self.views.counts(p.member));
        let mut durable: Vec<Lsn> = fed.map(|p| p.durable).collect();
        durable.sort_unstable_by(|a, b| b.cmp(a));
        durable.truncate(self.views.consistency_factor().saturating_sub(1).max(1));
        durable.last().copied().unwrap_or_default().max(self.stable)
    }

    /// Chooses the boundary, or whose base it is: not that of `without`. False: not possible now.
    fn begin_rebuild(
        &mut self,
        now: Time,
        index: usize,
        without: Option<Member>,
        actions: &mut Vec<TargetAction>,
    ) -> bool {
        let recovering = self.phase == Phase::Recovering;
        let peer = &self.peers[index];
        let member = peer.member;
        // A member of the in-sync set without which there are too few: fed inside that set.
        let needed = self.views.counts(member) && self.views.short(&self.peers);
        if !recovering && !self.views.pending.is_empty() && !needed {
            // Catch-up by increments starts only once the View without it is active.
            return false;
        }
        if recovering && !self.views.counts(member) {
            return false;
        }
        let damaged = peer.ack.as_ref().is_some_and(|a| a.damaged);
        // Never above what the receiver may treat as settled: it is told stable just before.
        let settled = self.stable.max(peer.ack.as_ref().map_or(Lsn::ZERO, |a| a.stable));
        let from = match damaged {
            true => Lsn::ZERO,
            false if mutant::is("increment-from-above") => settled.max(peer.applied),
            false => peer.applied.min(settled),
        };
        if let Some(rebuild) = self.take_parked(now, index) {
            self.peers[index].rebuild = Some(rebuild);
            return true;
        }
        let base = recovering.then(|| self.base_source(without));
        if base == Some(None) {
            return false;
        }
        let base = base.flatten();
        let id = self.random();
        let mut views: VecDeque<_> = VecDeque::new();
        let mut boundary = None;
        let mut end = None;
        let carried = |_: &&SnapshotInfo| !mutant::is("snapshot-missing-on-a-rebuilt-replica");
        let visible: Vec<SnapshotInfo> =
            self.history.snapshots.iter().filter(|s| !s.hidden && carried(s)).copied().collect();
        if recovering {
            views.push_back((ReadView::Base, None));
        } else {
            if !self.held && !needed {
                return false;
            }
            let high = self.random();
            let snapshot = SnapshotId(u128::from(high) << 64 | u128::from(id));
            let kind = EntryKind::Snapshot { id: snapshot, hidden: true };
            let entry = self.history.append_bare(self.epoch, kind);
            self.sync_wanted = self.sync_wanted.max(entry.lsn);
            boundary = Some((snapshot, entry.lsn));
            end = Some(Box::new(self.history.end(visible.clone())));
            views.push_back((ReadView::Snapshot(snapshot), None));
        }
        // Those above a base come with the entries that follow it.
        let upto = match base {
            Some((_, base)) if !mutant::is("snapshots-behind-a-base-sent-with-it") => base,
            _ => self.history.last.lsn,
        };
        for snapshot in visible.into_iter().rev().filter(|s| s.lsn > from && s.lsn <= upto) {
            views.push_front((ReadView::Snapshot(snapshot.id), Some(snapshot)));
        }
        actions.push(TargetAction::Note(TargetNote::Rebuilding {
            member,
            done_bytes: 0,
            total_bytes: self.history.blocks * BLOCK_SIZE as u64,
        }));
        self.peers[index].rebuild = Some(Rebuild {
            id,
            start: from,
            from,
            stage: Stage::Boundary,
            boundary,
            end,
            views,
            lanes: Lanes::from(0, self.history.blocks),
            base_source: base.map(|(source, _)| source),
            without: Vec::new(),
            feeds: 0,
            moved: now,
            round_bytes: 0,
        });
        self.peers[index].rounds.begin(self.history.weight());
        true
    }

    /// Passes on what came, and asks for more of it.
    fn pull_next(&mut self, now: Time, index: usize, actions: &mut Vec<TargetAction>) {
        if !self.feed_next(now, index, actions) {
            return;
        }
        let unpaced = self.peers[index].rounds.takes_precedence()
            || self.phase != Phase::Serving
            || !self.held;
        loop {
            let Some(rebuild) = &self.peers[index].rebuild else { return };
            let waits = rebuild.stage != Stage::Moving || rebuild.feeds >= FEEDS_MAX;
            if waits || (!unpaced && !self.pace.may_copy(now)) {
                return;
            }
            let Some((view, _)) = rebuild.views.front().copied() else { return };
            let sources = self.sources_of(rebuild, view);
            let id = self.random();
            let rebuild = self.peers[index].rebuild.as_mut().expect("looked at above");
            let Some((source, cursor)) = rebuild.lanes.ask(id, &sources) else { break };
            let (from, bytes_max) = (rebuild.from, self.pace.chunk_bytes());
            let asked = self.peers.iter().position(|p| p.member == source);
            let message = ToReplica::Pull { id, view, from, cursor, bytes_max };
            self.send(asked.expect("it is a source"), message, actions);
        }
        if self.is_boundary_lost(index) {
            // Another one is chosen in the next step.
            let rebuild = self.peers[index].rebuild.take().expect("looked at above");
            return self.end_boundary(&rebuild);
        }
        let rebuild = self.peers[index].rebuild.as_mut().expect("looked at above");
        // Every source was bad somewhere: start over with all of them, at a slower pace.
        if now.since(rebuild.moved) > Duration::from_secs(5) {
            rebuild.lanes.forgive();
        }
    }

    /// Who can be asked for a part of `view`: first those that answer the fewest reads.
    fn sources_of(&self, rebuild: &Rebuild, view: ReadView) -> Vec<Member> {
        let needed = rebuild.boundary().unwrap_or_default();
        let mut sources: Vec<&Peer> = self
            .peers
            .iter()
            .filter(|p| p.link == Link::Fed && self.views.counts(p.member))
            .filter(|p| view != ReadView::Base || rebuild.base_source == Some(p.member))
            .filter(|p| p.applied >= needed && !rebuild.without.contains(&p.member))
            .collect();
        sources.sort_by_key(|p| p.reads);
        sources.into_iter().map(|p| p.member).collect()
    }

    /// Whose base a replica can be brought to, and where that is. It is of use only if the entries
    /// that follow it are at hand, and a source keeps one at a time.
    fn base_source(&self, without: Option<Member>) -> Option<(Member, Lsn)> {
        let first = self.history.first();
        let moving = self.peers.iter().filter_map(|p| p.rebuild.as_ref());
        let taken: Vec<Member> =
            moving.filter(|r| r.stage != Stage::Committing).filter_map(|r| r.base_source).collect();
        self.peers
            .iter()
            .filter(|p| p.link == Link::Fed && self.views.counts(p.member))
            .filter(|p| !taken.contains(&p.member) && without != Some(p.member))
            .filter_map(|p| p.ack.as_deref().map(|ack| (p, ack.base)))
            .filter(|(_, base)| base.next() >= first)
            .min_by_key(|(p, _)| p.reads)
            .map(|(p, base)| (p.member, base))
    }

    /// Whether no source has the boundary any more: one that was rebuilt itself while this rebuild
    /// was parked got no boundary but its own.
    fn is_boundary_lost(&self, index: usize) -> bool {
        let Some(rebuild) = &self.peers[index].rebuild else { return false };
        let mut sources =
            self.peers.iter().filter(|p| p.link == Link::Fed && self.views.counts(p.member));
        rebuild.boundary.is_some()
            && !rebuild.without.is_empty()
            && sources.all(|p| rebuild.without.contains(&p.member))
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn on_pulled(
        &mut self,
        now: Time,
        from: usize,
        id: RequestId,
        slots: Vec<Slot>,
        cursor: Option<u64>,
        end: Option<Box<IncrementEnd>>,
        gone: bool,
        actions: &mut Vec<TargetAction>,
    ) {
        let source = self.peers[from].member;
        let asked = |p: &Peer| p.rebuild.as_ref().is_some_and(|r| r.lanes.has_asked(id));
        let Some(index) = self.peers.iter().position(asked) else { return };
        let last = self.history.last.lsn;
        let peer = &mut self.peers[index];
        let rebuild = peer.rebuild.as_mut().expect("found above");
        // A hole of no version would not replace an older block: nothing is sent of what was never
        // written.
        let unversioned = slots.iter().any(|slot| slot.version == Lsn::ZERO);
        if unversioned {
            let invariant = "HolesHaveVersions";
            actions.push(TargetAction::Note(TargetNote::InvariantRefused {
                member: source,
                invariant,
            }));
        }
        let is_good = !gone && !unversioned && slots.iter().all(|s| s.is_good(last));
        let chunk = Chunk { slots, cursor };
        let bytes = chunk.bytes() as u64;
        if !is_good {
            rebuild.lanes.refused(id);
        }
        if gone {
            rebuild.without.push(source);
        }
        if !is_good || !rebuild.lanes.answered(id, chunk) {
            // This copy cannot serve: another is asked for the same part. A base begins anew with
            // another one's, if there is one; one that is gone was its session's.
            let is_base = rebuild.base_source.is_some() && rebuild.views.len() == 1;
            if is_base && (gone || self.base_source(Some(source)).is_some()) {
                self.peers[index].rebuild = None;
                self.begin_rebuild(now, index, (!gone).then_some(source), actions);
                return;
            }
            return self.pull_next(now, index, actions);
        }
        rebuild.moved = now;
        if rebuild.base_source.is_some() && rebuild.views.len() == 1 && cursor.is_none() {
            rebuild.end = end;
            if self.base_has_moved_on(index, from) {
                self.peers[index].rebuild = None;
                return;
            }
        }
        let peer = &mut self.peers[index];
        // What is not paced must not be paid for by what is.
        if !peer.rounds.takes_precedence() {
            self.pace.copied(now, bytes);
        }
        self.pull_next(now, index, actions);
    }

    /// Learns where a base is, which is where its source had folded its map to as it was pinned:
    /// whether that is behind snapshots that it was not known to be behind.
    fn base_has_moved_on(&mut self, index: usize, source: usize) -> bool {
        let end = self.peers[index].rebuild.as_ref().and_then(|r| r.end.as_ref());
        let Some(now) = end.map(|end| end.position.lsn) else { return false };
        let Some(ack) = self.peers[source].ack.as_deref_mut() else { return false };
        let before = ack.base;
        ack.base = before.max(now);
        self.history.snapshots.iter().any(|s| !s.hidden && s.lsn > before && s.lsn <= now)
    }

    /// Passes on what came from the sources, as far as it is in order and the receiver keeps up.
    /// False: what came cannot be true. Its source was shut out, which may have ended the epoch.
    fn feed_next(&mut self, now: Time, index: usize, actions: &mut Vec<TargetAction>) -> bool {
        loop {
            let peer = &mut self.peers[index];
            let Some(rebuild) = &mut peer.rebuild else { return true };
            if rebuild.stage != Stage::Moving || rebuild.feeds >= FEEDS_MAX {
                return true;
            }
            let Some(chunk) = rebuild.lanes.take() else { return true };
            let bytes = chunk.bytes() as u64;
            let Chunk { slots, cursor } = chunk;
            rebuild.round_bytes += bytes;
            peer.rounds.moved_bytes += bytes;
            rebuild.feeds += 1;
            let (id, upto) = (rebuild.id, cursor.unwrap_or(u64::MAX));
            let feed = ToReplica::IncrementFeed { rebuild: id, slots, cursor: upto };
            self.send(index, feed, actions);
            if cursor.is_none() && !self.end_view(now, index, actions) {
                return false;
            }
        }
    }

    /// A view was fed as a whole: the next one begins, or the increment ends. False: its state
    /// cannot be true.
    fn end_view(&mut self, now: Time, index: usize, actions: &mut Vec<TargetAction>) -> bool {
        let rebuild = self.peers[index].rebuild.as_mut().expect("it is being fed");
        let (_, snapshot) = rebuild.views.pop_front().expect("a view was being pulled");
        rebuild.lanes = Lanes::from(0, self.history.blocks);
        let (id, from, base_source) = (rebuild.id, rebuild.from, rebuild.base_source);
        let message = match snapshot {
            Some(snapshot) => {
                rebuild.from = rebuild.from.max(snapshot.lsn);
                ToReplica::IncrementCut { rebuild: id, snapshot }
            }
            None => {
                let end = rebuild.end.clone();
                let fits = |end: &IncrementEnd| {
                    end.check(self.epoch).is_ok()
                        && self.history.holds(end.position)
                        && end.position.lsn >= from
                };
                let Some(mut to) = end.filter(|end| fits(end)) else {
                    let liar = self.peers.iter().position(|p| Some(p.member) == base_source);
                    self.shut_out(now, liar.unwrap_or(index), "PrefixAlways", actions);
                    return false;
                };
                // Boundaries of other rebuilds are not sent, so they do not exist there.
                to.snapshots.retain(|s| !s.hidden || s.lsn == to.position.lsn);
                let rebuild = self.peers[index].rebuild.as_mut().expect("it is being fed");
                rebuild.end = Some(to.clone());
                rebuild.stage = Stage::Committing;
                ToReplica::IncrementCommit { rebuild: id, to }
            }
        };
        self.send(index, message, actions);
        true
    }

    pub(super) fn on_increment_fed(&mut self, index: usize, rebuild: u64, _cursor: u64) {
        if let Some(r) = &mut self.peers[index].rebuild
            && r.id == rebuild
        {
            r.feeds = r.feeds.saturating_sub(1);
        }
    }

    pub(super) fn on_increment_done(
        &mut self,
        now: Time,
        index: usize,
        rebuild: u64,
        position: Position,
        actions: &mut Vec<TargetAction>,
    ) {
        let held_from = self.history.first();
        let peer = &mut self.peers[index];
        let Some(r) = peer.rebuild.take_if(|r| r.id == rebuild) else { return };
        if r.end.as_ref().is_none_or(|end| end.position != position) {
            return self.shut_out(now, index, "IncrementAtomic", actions);
        }
        let member = peer.member;
        peer.applied = position.lsn;
        peer.durable = position.lsn;
        peer.next = position.lsn.next();
        peer.behind_since = None;
        // Views that came as part of the increment taught it nothing; the next one does.
        peer.tip = position.lsn;
        if let Some(ack) = &mut peer.ack {
            ack.continuous &= !ack.damaged;
            ack.damaged = false;
            // A flip settles all of it: the next increment starts from here, not from before.
            ack.stable = position.lsn;
        }
        if peer.next >= held_from {
            peer.link = Link::Fed;
            let (moved_bytes, rounds) = peer.rounds.tell();
            actions.push(TargetAction::Note(TargetNote::Rebuilt { member, moved_bytes, rounds }));
        }
        self.end_boundary(&r);
        self.progress(now, actions);
    }

    /// A boundary that no rebuild needs any more is deleted, in every history.
    fn end_boundary(&mut self, rebuild: &Rebuild) {
        if let Some((id, _)) = rebuild.boundary
            && matches!(self.phase, Phase::Serving | Phase::Draining { closing: false, .. })
        {
            let kind = EntryKind::DeleteSnapshot { id };
            self.history.append_bare(self.epoch, kind);
        }
    }

    /// A session ended: rebuilds fed from it look for another source; its own is parked, so that
    /// the same shadow can go on when it returns soon.
    pub(super) fn cancel_rebuilds_from(&mut self, index: usize) {
        let member = self.peers[index].member;
        if let Some(mut rebuild) = self.peers[index].rebuild.take() {
            rebuild.lanes = Lanes::from(0, 0);
            rebuild.feeds = 0;
            self.parked.push((member, rebuild));
        }
        for peer in &mut self.peers {
            if let Some(rebuild) = &mut peer.rebuild {
                rebuild.lanes.lost(member);
            }
            // Its base went with its session.
            peer.rebuild.take_if(|rebuild| {
                rebuild.base_source == Some(member) && rebuild.stage != Stage::Committing
            });
        }
    }

    /// Continues an interrupted rebuild where the receiver's shadow says it stands.
    fn take_parked(&mut self, now: Time, index: usize) -> Option<Rebuild> {
        let member = self.peers[index].member;
        let at = self.parked.iter().position(|(m, _)| *m == member)?;
        let (_, mut rebuild) = self.parked.remove(at);
        let shadow = self.peers[index].ack.as_ref().and_then(|a| a.shadow);
        match shadow {
            Some((id, start, cursor))
                if (id, start) == (rebuild.id, rebuild.start)
                    // Behind a cut that may have been lost with the receiver's cache, or at the end
                    // of a view without its cut: which view the cursor is in is not known.
                    && (rebuild.from == rebuild.start
                        || mutant::is("shadow-resumed-behind-a-cut"))
                    && cursor != u64::MAX
                    && rebuild.boundary.is_some()
                    && rebuild.stage == Stage::Moving =>
            {
                rebuild.lanes = Lanes::from(cursor, self.history.blocks);
                rebuild.stage = Stage::Boundary;
                rebuild.moved = now;
                Some(rebuild)
            }
            _ => {
                self.end_boundary(&rebuild);
                None
            }
        }
    }

    /// Parked rebuilds pin a boundary, and with it what is overwritten: they are given up after a
    /// while, and at once where nobody expects their receiver any more.
    fn drop_parked(&mut self, now: Time) {
        let mut index = 0;
        while index < self.parked.len() {
            let (member, rebuild) = &self.parked[index];
            let expected = self.peers.iter().any(|p| p.member == *member);
            if !expected || now >= rebuild.moved + PARKED_FOR {
                let (_, rebuild) = self.parked.remove(index);
                self.end_boundary(&rebuild);
            } else {
                index += 1;
            }
        }
    }

    pub(super) fn parked_until(&self) -> Option<Time> {
        self.parked.iter().map(|(_, rebuild)| rebuild.moved + PARKED_FOR).min()
    }

    /// Boundaries of rebuilds that an older epoch did not finish. The authority need not have
    /// them: one that was rebuilt itself got none but its own.
    pub(super) fn forget_hidden_snapshots(&mut self) {
        self.parked.clear();
        let theirs = !mutant::is("boundaries-of-others-kept");
        let acks = self.peers.iter().filter_map(|p| p.ack.as_deref()).filter(|_| theirs);
        let all = self.history.snapshots.iter().chain(acks.flat_map(|ack| &ack.snapshots));
        let hidden: BTreeSet<SnapshotId> = all.filter(|s| s.hidden).map(|s| s.id).collect();
        self.delete_boundaries(hidden);
    }

    /// The same of a replica that comes later, as far as neither the history nor what it is about
    /// to be fed knows of them.
    pub(super) fn forget_boundaries_of(&mut self, index: usize, keep: Lsn) {
        let Some(ack) = self.peers[index].ack.as_deref() else { return };
        let known = |id: SnapshotId| {
            let deletes = |e: &SharedEntry| e.kind == EntryKind::DeleteSnapshot { id };
            let history = &self.history;
            history.snapshots.iter().any(|s| s.id == id) || history.after(keep).any(deletes)
        };
        let kept = ack.snapshots.iter().filter(|s| s.hidden && s.lsn <= keep);
        let stale = kept.map(|s| s.id).filter(|id| !known(*id)).collect();
        self.delete_boundaries(stale);
    }

    fn delete_boundaries(&mut self, boundaries: BTreeSet<SnapshotId>) {
        for id in boundaries {
            let kind = EntryKind::DeleteSnapshot { id };
            self.history.append_bare(self.epoch, kind);
        }
    }
}
