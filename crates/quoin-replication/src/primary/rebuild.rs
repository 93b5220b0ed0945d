//! Increments: they bring a replica that lacks more than the window to a boundary.
//!
//! The boundary B is a hidden snapshot that is appended now; the rebuild waits until it is stable.
//! Where stable cannot move (recovery below CF), B is the source's own base. All slots with
//! `from < version ≤ B`, holes included, go view by view (every retained snapshot in order, then
//! B) from the sources, several at once ([`super::lanes`]), through the target to the receiver's
//! shadow, which flips at the end. Until then the state of the receiver does not change. A base is
//! its source's own: it comes from that source alone, or begins anew.

mod parked;

pub(super) use parked::Rebuilds;

use std::collections::VecDeque;
use std::time::Duration;

use super::lanes::{Chunk, Lanes};
use super::{Link, Peer, Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::BLOCK_SIZE;
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Lsn, Position, SnapshotId};
use quoin_types::membership::Member;
use quoin_types::message::{
    CutHead, FedSum, IncrementEnd, ReadView, RequestId, Slot, SnapshotHead, SnapshotInfo, ToReplica,
};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time without progress after which a rebuild is given a new session. Its bulk connection is
/// established anew before. Nothing else checks whether the session of a replica that is only
/// rebuilt is still alive.
const STALL: Duration = Duration::from_secs(60);
/// Time for the commit: the receiver writes back everything that its kernel still caches of the
/// increment.
const COMMIT_PATIENCE: Duration = Duration::from_secs(600);
/// Limit of chunks on their way to the receiver.
const FEEDS_MAX: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Waits for the boundary to become stable.
    Boundary,
    /// Waits for the bulk connection, and for the receiver to report how far its shadow is
    /// complete.
    Beginning,
    Moving,
    Committing,
}

pub(super) struct Rebuild {
    id: u64,
    /// LSN that the shadow starts from.
    start: Lsn,
    /// Lower bound of the versions to send: `start`, or the last retained snapshot that was sent.
    from: Lsn,
    stage: Stage,
    /// The hidden snapshot; `None`: the source's base.
    boundary: Option<(SnapshotId, Lsn)>,
    /// The state at the boundary, once known.
    end: Option<Box<IncrementEnd>>,
    /// Views still to be sent: a retained snapshot with its description, or the boundary.
    views: VecDeque<(ReadView, Option<SnapshotInfo>)>,
    /// Copying of the first view.
    lanes: Lanes,
    /// The source whose base is the boundary.
    base_source: Option<Member>,
    /// Ends of the views so far.
    cuts: Cuts,
    /// Sources that lack the view, and will not get it.
    without: Vec<Member>,
    feeds: u32,
    fed: Fed,
    /// Set if the receiver is to be asked for the state of its shadow, once that is possible.
    ask: bool,
    moved: Time,
    /// Data copied in this round.
    round_bytes: u64,
}

/// Data sent to the receiver since its shadow was begun or resumed.
#[derive(Default)]
struct Fed {
    sum: FedSum,
    /// End of the data sent, within the present view.
    upto: u64,
}

/// Ends of the views that were sent to a receiver.
#[derive(Default)]
struct Cuts {
    /// LSNs of the snapshots that were cut.
    sent: Vec<Lsn>,
    /// State at the end of the present view, as its source reported it.
    end: Option<Box<IncrementEnd>>,
    /// A view was skipped since the last cut, or the boundary was moved: the receiver's cursor may be of
    /// that one.
    is_cursor_unknown: bool,
}

impl Rebuild {
    /// Handles the loss of the receiver's bulk connection: messages on their way may have arrived
    /// or not.
    pub fn lost_receiver(&mut self) {
        if self.stage == Stage::Moving {
            self.stage = Stage::Beginning;
        }
        self.ask = self.stage != Stage::Boundary;
        self.lanes = Lanes::from(self.fed.upto, 0);
        self.feeds = 0;
    }

    /// Builds the next message of the view, and counts its slots.
    fn feed(&mut self, slots: Vec<Slot>, cursor: Option<u64>) -> ToReplica {
        let cursor = cursor.unwrap_or(u64::MAX);
        let after = self.fed.upto;
        self.fed.sum.add(&slots);
        self.fed.upto = cursor;
        ToReplica::IncrementFeed { rebuild: self.id, slots, cursor, after }
    }

    /// Drops the requests to this source; their answers will not come.
    pub fn lost_source(&mut self, source: Member) {
        self.lanes.lost(source);
    }

    /// Returns true if this member is, or may become, a source of the rebuild.
    pub fn may_copy_from(&self, member: Member) -> bool {
        self.stage != Stage::Committing && self.base_source.is_none_or(|source| source == member)
    }

    pub fn round_bytes(&self) -> u64 {
        self.round_bytes
    }

    /// Time of last progress.
    pub fn moved(&self) -> Time {
        self.moved
    }

    /// Returns true if there is something to request from a source.
    fn wants_more(&self) -> bool {
        self.stage == Stage::Moving && !self.views.is_empty()
    }

    /// Bytes done and in total, estimated from the position of the copy in the volume.
    pub fn progress(&self, volume_blocks: u64) -> (u64, u64) {
        let views = self.views.len() as u64;
        let total = volume_blocks * BLOCK_SIZE as u64;
        match self.stage {
            Stage::Boundary => (0, total),
            Stage::Moving | Stage::Beginning if views > 1 => (0, total),
            Stage::Moving | Stage::Beginning => {
                (self.lanes.cursor().min(volume_blocks) * BLOCK_SIZE as u64, total)
            }
            Stage::Committing => (total, total),
        }
    }

    pub fn stage(&self) -> Stage {
        self.stage
    }

    fn boundary(&self) -> Option<Lsn> {
        self.boundary.map(|(_, lsn)| lsn).or(self.end.as_ref().map(|e| e.position.lsn))
    }

    /// Time at which the rebuild counts as dead without progress.
    pub fn dead_at(&self) -> Option<Time> {
        match self.stage {
            Stage::Boundary => None,
            Stage::Moving | Stage::Beginning => Some(self.moved + STALL),
            Stage::Committing => Some(self.moved + COMMIT_PATIENCE),
        }
    }
}

impl Primary {
    pub(super) fn step_rebuilds(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.end_expired(now);
        // Pacing is needed only beside clients that are served and do not wait for this rebuild.
        let clients_matter = self.phase == Phase::Serving && self.commit.held;
        let paced = |p: &&Peer| {
            let wants = p.rebuild.as_ref().is_some_and(Rebuild::wants_more);
            wants && !p.rounds.takes_precedence()
        };
        let paced = self.members.peers.iter().filter(paced).map(|p| p.rounds.patience());
        let pulled = self.changes.wants_data().then_some(1);
        let copying = paced.max().or(pulled).filter(|_| clients_matter);
        let busy = self.replies_wait();
        let (known, views) = (&self.members.membership.known, &self.commit.views);
        self.rebuilds
            .pace
            .step(now, copying, busy, || known.iter().all(|member| views.counts(*member)));
        for index in 0..self.members.len() {
            if self.members[index].link != Link::Rebuilding {
                continue;
            }
            if self.members[index].rebuild.is_none()
                && !self.begin_rebuild(now, index, None, actions)
            {
                continue;
            }
            let settled = self.settled_boundary(self.members[index].member);
            let Some(rebuild) = &mut self.members[index].rebuild else { continue };
            if rebuild.stage == Stage::Boundary
                && rebuild.boundary.is_none_or(|(_, lsn)| lsn <= settled)
            {
                // The boundary is stable, and everything below it can be copied.
                rebuild.moved = now;
                (rebuild.stage, rebuild.ask) = (Stage::Beginning, true);
            }
            self.ask_receiver(now, index, actions);
            self.pull_next(now, index, actions);
            if index >= self.members.len() {
                // The answer of a source ended the epoch.
                return;
            }
        }
    }

    /// Begins the shadow by the bulk connection, or asks for the state of the shadow and of its
    /// commit.
    fn ask_receiver(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) {
        let peer = &mut self.members[index];
        let carries = peer.bulk.carries();
        let Some(rebuild) = peer.rebuild.as_mut().filter(|r| r.ask && carries) else { return };
        rebuild.ask = false;
        let begin = ToReplica::IncrementBegin { rebuild: rebuild.id, from: rebuild.start };
        self.send_copying(now, index, true, begin, actions);
    }

    /// Handles the answer to a begin: the receiver's shadow is complete up to `cursor` within the
    /// view that it was being fed.
    pub(super) fn on_increment_begun(
        &mut self,
        now: Time,
        index: usize,
        id: u64,
        cursor: u64,
        cut: Lsn,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(mut rebuild) = self.members[index].rebuild.take_if(|r| r.id == id) else { return };
        if rebuild.ask || !matches!(rebuild.stage, Stage::Beginning | Stage::Committing) {
            self.members[index].rebuild = Some(rebuild);
            return;
        }
        if !self.resume(&mut rebuild, cut, cursor) {
            return self.end_boundary(&rebuild);
        }
        rebuild.stage = Stage::Moving;
        rebuild.moved = now;
        let is_whole = rebuild.lanes.cursor() == u64::MAX;
        self.members[index].rebuild = Some(rebuild);
        if is_whole {
            // All of the view was fed, but the message that ends it was lost.
            self.end_view(now, index, actions);
        }
    }

    /// Goes on where the receiver's shadow stands: complete up to the snapshot at `cut`, and in the
    /// next view that it was fed up to `cursor`. Returns false if the shadow is none of this
    /// rebuild's.
    fn resume(&self, rebuild: &mut Rebuild, cut: Lsn, cursor: u64) -> bool {
        let believed = mutant::is("shadow-resumed-behind-a-cut");
        let cut = if believed { rebuild.from } else { cut };
        if cut != rebuild.start && !rebuild.cuts.sent.contains(&cut) && !believed {
            return false;
        }
        // The view that followed that cut, which the cursor is in.
        let of = |view: &(ReadView, Option<SnapshotInfo>)| view.1.map(|snapshot| snapshot.lsn);
        let lost_cut = rebuild.cuts.sent.iter().copied().find(|sent| *sent > cut);
        let was_in = lost_cut.or(rebuild.views.front().and_then(of));
        if lost_cut.is_some() && rebuild.base_source.is_some() {
            // Its views are known only as far as they are still to be sent.
            return false;
        }
        if lost_cut.is_none() && !rebuild.cuts.is_cursor_unknown && cursor > rebuild.fed.upto {
            // It cannot be complete beyond what it was ever fed.
            return false;
        }
        rebuild.cuts.sent.retain(|sent| *sent <= cut);
        rebuild.from = cut;
        if rebuild.base_source.is_none() {
            rebuild.views = self.views_after(cut, rebuild.boundary);
        }
        let is_known = lost_cut.is_some() || !rebuild.cuts.is_cursor_unknown;
        let is_same = rebuild.views.front().is_some_and(|view| of(view) == was_in);
        rebuild.cuts.is_cursor_unknown = !(is_known && is_same);
        let from = if is_known && is_same { cursor } else { 0 };
        rebuild.cuts.end = None;
        rebuild.lanes = Lanes::from(from, self.history.blocks);
        rebuild.fed = Fed { sum: FedSum::default(), upto: cursor };
        true
    }

    /// Views to send to a receiver that is complete up to `from`: each snapshot that is kept, and
    /// the boundary.
    fn views_after(
        &self,
        from: Lsn,
        boundary: Option<(SnapshotId, Lsn)>,
    ) -> VecDeque<(ReadView, Option<SnapshotInfo>)> {
        let upto = boundary.map_or(Lsn::ZERO, |(_, lsn)| lsn);
        let kept = self.kept_snapshots();
        let kept = kept.into_iter().filter(|s| s.lsn > from && s.lsn <= upto);
        let views = kept.map(|s| (ReadView::Snapshot(s.id), Some(s)));
        views.chain(boundary.map(|(id, _)| (ReadView::Snapshot(id), None))).collect()
    }

    /// Snapshots that a rebuilt replica has too: all but the boundaries of rebuilds.
    fn kept_snapshots(&self) -> Vec<SnapshotInfo> {
        let carried = |_: &&SnapshotInfo| !mutant::is("snapshot-missing-on-a-rebuilt-replica");
        let snapshots = self.history.snapshots.iter();
        snapshots.filter(|s| !s.is_boundary() && carried(s)).copied().collect()
    }

    /// Appends the boundary of a rebuild, and describes the state there.
    fn append_boundary(&mut self, id: u64) -> ((SnapshotId, Lsn), Box<IncrementEnd>) {
        let id = SnapshotId::of_boundary(id);
        let kind = EntryKind::Snapshot { id, hidden: true };
        let entry = self.history.append_bare(self.opening.epoch, kind);
        self.commit.want_sync(entry.lsn);
        ((id, entry.lsn), Box::new(self.history.end(self.kept_snapshots())))
    }

    /// Returns true if an entry after `after` goes back to a snapshot that is deleted by now: a
    /// replica that lacks it cannot follow.
    fn has_lost_revert(&self, after: Lsn) -> bool {
        self.history.after(after).any(|entry| match entry.kind {
            EntryKind::Revert { id } => self.history.snapshot(id).is_none(),
            _ => false,
        })
    }

    /// Skips views whose snapshots were deleted: the next one covers them from the same LSN on. The
    /// shadow stays. Returns false if the rebuild is begun anew.
    fn skip_deleted_views(&mut self, index: usize) -> bool {
        let blocks = self.history.blocks;
        while let Some(rebuild) = &mut self.members[index].rebuild
            && let Some((_, Some(snapshot))) = rebuild.views.front()
            && self.history.snapshot(snapshot.id).is_none()
        {
            if mutant::is("deleted-view-restarts-a-rebuild") {
                let rebuild = self.members[index].rebuild.take().expect("looked at above");
                self.end_boundary(&rebuild);
                return false;
            }
            rebuild.cuts.is_cursor_unknown = !mutant::is("cursor-of-a-skipped-view-believed");
            rebuild.cuts.end = None;
            rebuild.views.pop_front();
            rebuild.lanes = Lanes::from(0, blocks);
            rebuild.without.clear();
        }
        true
    }

    /// Gives a rebuild a boundary behind all entries so far; its shadow stays. One that copies a base
    /// is begun anew.
    fn move_boundary(&mut self, index: usize) {
        let Some(mut rebuild) = self.members[index].rebuild.take() else { return };
        self.end_boundary(&rebuild);
        if rebuild.base_source.is_some() || self.phase != Phase::Serving {
            return;
        }
        let random = self.opening.incarnations.random();
        let (boundary, end) = self.append_boundary(random);
        (rebuild.boundary, rebuild.end) = (Some(boundary), Some(end));
        rebuild.views = self.views_after(rebuild.from, rebuild.boundary);
        rebuild.lanes = Lanes::from(0, self.history.blocks);
        rebuild.without.clear();
        rebuild.stage = Stage::Boundary;
        // The receiver's cursor is of the former boundary, which it has all of.
        rebuild.cuts.is_cursor_unknown = !mutant::is("cursor-of-a-moved-boundary-believed");
        self.members[index].rebuild = Some(rebuild);
    }

    /// Upper bound of the boundary of `receiver`.
    ///
    /// If stable cannot move because it waits for this rebuild, the bound is what CF - 1 counted
    /// members have on media: once the receiver flipped, CF have it, and no open can succeed
    /// without one of them. (A receiver that does not count is no such copy: the others could open
    /// without its sources, with a history that its base has left behind. If the receiver is
    /// dropped meanwhile, every open without it has heard of that View, which follows the boundary,
    /// from a holder.)
    ///
    /// If fewer than CF - 1 are left to rebuild from, the bound is what all of them have, or the
    /// rebuild would never proceed. If they are lost before a second receiver has it, an open
    /// without them finds a receiver whose base is ahead, and rebuilds it again.
    fn settled_boundary(&self, receiver: Member) -> Lsn {
        if mutant::is("boundary-not-stable") {
            return self.history.last.lsn;
        }
        if !self.commit.views.counts(receiver) || !self.commit.views.short(&self.members.peers) {
            return self.commit.stable;
        }
        let fed = self
            .members
            .peers
            .iter()
            .filter(|p| p.link == Link::Fed && self.commit.views.counts(p.member));
        let mut durable: Vec<Lsn> = fed.map(|p| p.progress.durable).collect();
        durable.sort_unstable_by(|a, b| b.cmp(a));
        durable.truncate(self.commit.views.consistency_factor().saturating_sub(1).max(1));
        durable.last().copied().unwrap_or_default().max(self.commit.stable)
    }

    /// Chooses the boundary, or the member whose base it is, other than `without`. Returns false if
    /// neither is possible now.
    fn begin_rebuild(
        &mut self,
        now: Time,
        index: usize,
        without: Option<Member>,
        actions: &mut Vec<PrimaryAction>,
    ) -> bool {
        let recovering = self.phase == Phase::Recovering;
        let peer = &self.members[index];
        let member = peer.member;
        // A member of the in-sync set without which there are too few is fed inside that set.
        let needed =
            self.commit.views.counts(member) && self.commit.views.short(&self.members.peers);
        if !recovering && !self.commit.views.pending.is_empty() && !needed {
            // Catch-up by increments starts only once the View without the member is active.
            return false;
        }
        if recovering && !self.commit.views.counts(member) {
            return false;
        }
        let damaged = peer.ack.as_ref().is_some_and(|a| a.damaged);
        // Never above what the receiver may treat as settled: stable is sent to it just before.
        let settled = self.commit.stable.max(peer.ack.as_ref().map_or(Lsn::ZERO, |a| a.stable));
        let from = match damaged {
            true => Lsn::ZERO,
            false if mutant::is("increment-from-above") => settled.max(peer.progress.applied),
            false => peer.progress.applied.min(settled),
        };
        if let Some(rebuild) = self.take_parked(now, index) {
            self.members[index].rebuild = Some(rebuild);
            return true;
        }
        let base = recovering.then(|| self.base_source(without));
        if base == Some(None) {
            return false;
        }
        let base = base.flatten();
        let id = self.opening.incarnations.random();
        let mut views: VecDeque<_> = VecDeque::new();
        let mut boundary = None;
        let mut end = None;
        if let Some((_, base)) = base {
            // Snapshots above a base arrive with the entries that follow it.
            let upto = match mutant::is("snapshots-behind-a-base-sent-with-it") {
                true => self.history.last.lsn,
                false => base,
            };
            let kept = self.kept_snapshots().into_iter();
            let kept = kept.filter(|s| s.lsn > from && s.lsn <= upto);
            views.extend(kept.map(|s| (ReadView::Snapshot(s.id), Some(s))));
            views.push_back((ReadView::Base, None));
        } else {
            if !self.commit.held && !needed {
                return false;
            }
            let (appended, state) = self.append_boundary(id);
            (boundary, end) = (Some(appended), Some(state));
            views = self.views_after(from, boundary);
        }
        actions.push(PrimaryAction::Note(PrimaryNote::Rebuilding {
            member,
            done_bytes: 0,
            total_bytes: self.history.blocks * BLOCK_SIZE as u64,
        }));
        self.members[index].rebuild = Some(Rebuild {
            id,
            start: from,
            from,
            stage: Stage::Boundary,
            boundary,
            end,
            views,
            lanes: Lanes::from(0, self.history.blocks),
            base_source: base.map(|(source, _)| source),
            cuts: Cuts::default(),
            without: Vec::new(),
            feeds: 0,
            fed: Fed::default(),
            ask: false,
            moved: now,
            round_bytes: 0,
        });
        self.members[index].rounds.begin(self.history.weight());
        true
    }

    /// Forwards chunks that have arrived, and requests more.
    fn pull_next(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) {
        if !self.feed_next(now, index, actions) || !self.skip_deleted_views(index) {
            return;
        }
        let unpaced = self.members[index].rounds.takes_precedence()
            || self.phase != Phase::Serving
            || !self.commit.held;
        loop {
            let Some(rebuild) = &self.members[index].rebuild else { return };
            let waits = rebuild.stage != Stage::Moving || rebuild.feeds >= FEEDS_MAX;
            if waits || (!unpaced && !self.rebuilds.pace.may_copy(now)) {
                return;
            }
            let Some((view, _)) = rebuild.views.front().copied() else { return };
            let sources = self.sources_of(rebuild, view);
            let id = self.opening.incarnations.random();
            let rebuild = self.members[index].rebuild.as_mut().expect("looked at above");
            let Some((source, cursor)) = rebuild.lanes.ask(id, &sources) else { break };
            let (from, bytes_max) = (rebuild.from, self.rebuilds.pace.chunk_bytes());
            let asked = self.members.position(source);
            let want_data = true;
            let message = ToReplica::Pull { id, view, from, cursor, bytes_max, want_data };
            let asked = asked.expect("it is a source");
            self.send_copying(now, asked, true, message, actions);
        }
        if self.is_boundary_lost(index) {
            // Another boundary is chosen in the next step.
            let rebuild = self.members[index].rebuild.take().expect("looked at above");
            return self.end_boundary(&rebuild);
        }
        let rebuild = self.members[index].rebuild.as_mut().expect("looked at above");
        // Every source was bad somewhere: the copy retries all of them, at a slower pace.
        if now.since(rebuild.moved) > Duration::from_secs(5) {
            rebuild.lanes.forgive();
        }
    }

    /// Members that can be asked for a part of `view`, those with the fewest open reads first.
    fn sources_of(&self, rebuild: &Rebuild, view: ReadView) -> Vec<Member> {
        let needed = rebuild.boundary().unwrap_or_default();
        let mut sources: Vec<&Peer> = self
            .members
            .peers
            .iter()
            .filter(|p| {
                p.link == Link::Fed && self.commit.views.counts(p.member) && p.bulk.carries()
            })
            .filter(|p| view != ReadView::Base || rebuild.base_source == Some(p.member))
            .filter(|p| p.progress.applied >= needed && !rebuild.without.contains(&p.member))
            .collect();
        sources.sort_by_key(|p| p.reads.open);
        sources.into_iter().map(|p| p.member).collect()
    }

    /// Chooses a member whose base a replica can be brought to, and returns the base's LSN. A base
    /// is usable only if the entries that follow it are available. A source provides one at a time.
    fn base_source(&self, without: Option<Member>) -> Option<(Member, Lsn)> {
        let first = self.history.first();
        let moving = self.members.peers.iter().filter_map(|p| p.rebuild.as_ref());
        let taken: Vec<Member> =
            moving.filter(|r| r.stage != Stage::Committing).filter_map(|r| r.base_source).collect();
        self.members
            .peers
            .iter()
            .filter(|p| p.link == Link::Fed && self.commit.views.counts(p.member))
            .filter(|p| !taken.contains(&p.member) && without != Some(p.member))
            .filter_map(|p| p.ack.as_deref().map(|ack| (p, ack.base)))
            .filter(|(_, base)| base.next() >= first && !self.has_lost_revert(*base))
            .min_by_key(|(p, _)| p.reads.open)
            .map(|(p, base)| (p.member, base))
    }

    /// Returns true if no source has the boundary any more: a source that was rebuilt itself while
    /// this rebuild was parked has no boundary but its own.
    fn is_boundary_lost(&self, index: usize) -> bool {
        let Some(rebuild) = &self.members[index].rebuild else { return false };
        let mut sources = self
            .members
            .peers
            .iter()
            .filter(|p| p.link == Link::Fed && self.commit.views.counts(p.member));
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
        actions: &mut Vec<PrimaryAction>,
    ) {
        let source = self.members[from].member;
        let asked = |p: &Peer| p.rebuild.as_ref().is_some_and(|r| r.lanes.has_asked(id));
        let Some(index) = self.members.peers.iter().position(asked) else { return };
        let last = self.history.last.lsn;
        let peer = &mut self.members[index];
        let rebuild = peer.rebuild.as_mut().expect("found above");
        // A hole without a version would not replace an older block: blocks never written are not
        // sent.
        let unversioned = slots.iter().any(|slot| slot.version == Lsn::ZERO);
        if unversioned {
            let invariant = "HolesHaveVersions";
            actions.push(PrimaryAction::Note(PrimaryNote::InvariantRefused {
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
            // This copy is unusable: another source is asked for the same part. A base begins anew
            // with another source's, if there is one; a base that is gone belonged to its session.
            let is_base = rebuild.base_source.is_some() && rebuild.views.len() == 1;
            if is_base && (gone || self.base_source(Some(source)).is_some()) {
                self.members[index].rebuild = None;
                self.begin_rebuild(now, index, (!gone).then_some(source), actions);
                return;
            }
            return self.pull_next(now, index, actions);
        }
        rebuild.moved = now;
        if rebuild.views.len() > 1 && cursor.is_none() {
            rebuild.cuts.end = end;
        } else if rebuild.base_source.is_some() && cursor.is_none() {
            rebuild.end = end;
            if self.base_has_moved_on(index, from) {
                self.members[index].rebuild = None;
                return;
            }
        }
        let peer = &mut self.members[index];
        // Unpaced copying must not be charged to paced rebuilds.
        if !peer.rounds.takes_precedence() {
            self.rebuilds.pace.copied(now, bytes);
        }
        self.pull_next(now, index, actions);
    }

    /// Records the position of a base, which is where its source's map was when the base was
    /// pinned. Returns true if the base passed snapshots that it was not known to include.
    fn base_has_moved_on(&mut self, index: usize, source: usize) -> bool {
        let end = self.members[index].rebuild.as_ref().and_then(|r| r.end.as_ref());
        let Some(now) = end.map(|end| end.position.lsn) else { return false };
        let Some(ack) = self.members[source].ack.as_deref_mut() else { return false };
        let before = ack.base;
        ack.base = before.max(now);
        self.history.snapshots.iter().any(|s| !s.is_boundary() && s.lsn > before && s.lsn <= now)
    }

    /// Forwards chunks from the sources, as far as they are in order and the receiver keeps up.
    /// Returns false if a chunk cannot be true. Its source was shut out, which may have ended the
    /// epoch.
    fn feed_next(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) -> bool {
        loop {
            let peer = &mut self.members[index];
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
            let feed = rebuild.feed(slots, cursor);
            if !mutant::is("feed-swallowed") || cursor.is_none() {
                self.send_copying(now, index, true, feed, actions);
            }
            if cursor.is_none() && !self.end_view(now, index, actions) {
                return false;
            }
        }
    }

    /// Ends a view that was fed completely: the next one begins, or the increment ends. Returns
    /// false if the state of its end cannot be true.
    fn end_view(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) -> bool {
        let peer = &mut self.members[index];
        let rebuild = peer.rebuild.as_mut().expect("it is being fed");
        let (_, snapshot) = *rebuild.views.front().expect("a view was being pulled");
        rebuild.lanes = Lanes::from(0, self.history.blocks);
        let (id, from, base_source) = (rebuild.id, rebuild.from, rebuild.base_source);
        let fed = rebuild.fed.sum;
        let message = match snapshot {
            Some(snapshot) => {
                rebuild.views.pop_front();
                rebuild.fed.upto = 0;
                rebuild.from = rebuild.from.max(snapshot.lsn);
                rebuild.cuts.sent.push(snapshot.lsn);
                rebuild.cuts.is_cursor_unknown = false;
                let end = rebuild.cuts.end.take().filter(|end| end.position.lsn == snapshot.lsn);
                let head = Box::new(self.cut_head(snapshot.id, end));
                ToReplica::IncrementCut { rebuild: id, snapshot, head }
            }
            None => {
                let end = rebuild.end.clone();
                let position = end.as_ref().map(|end| end.position.lsn);
                if position.is_some_and(|lsn| self.has_lost_revert(lsn)) {
                    self.move_boundary(index);
                    return true;
                }
                let fits = |end: &IncrementEnd| {
                    end.check(self.opening.epoch).is_ok()
                        && self.history.holds(end.position)
                        && end.position.lsn >= from
                };
                let Some(mut to) = end.filter(|end| fits(end)) else {
                    let liar =
                        self.members.peers.iter().position(|p| Some(p.member) == base_source);
                    self.shut_out(now, liar.unwrap_or(index), "PrefixAlways", actions);
                    return false;
                };
                // Boundaries of other rebuilds are not sent, so they do not exist at the receiver;
                // nor do snapshots that were deleted before it was their turn.
                let rebuild = self.members[index].rebuild.as_mut().expect("it is being fed");
                let (start, cuts) = (rebuild.start, &rebuild.cuts.sent);
                let is_there = |lsn: Lsn| lsn <= start || cuts.contains(&lsn);
                let position = to.position.lsn;
                let exists = |id| self.history.snapshot(id).is_some();
                to.snapshots.retain(|s| {
                    s.lsn == position || !s.is_boundary() && (is_there(s.lsn) || exists(s.id))
                });
                rebuild.end = Some(to.clone());
                rebuild.stage = Stage::Committing;
                ToReplica::IncrementCommit { rebuild: id, to, fed }
            }
        };
        let answered = snapshot.is_none();
        self.send_copying(now, index, answered, message, actions);
        true
    }

    /// Head of the history at a snapshot: as the history says, or as the source does.
    fn cut_head(&self, id: SnapshotId, end: Option<Box<IncrementEnd>>) -> CutHead {
        let reported = end.as_ref();
        let reported = reported.map(|e| SnapshotHead { epoch: e.position.epoch, chain: e.chain });
        let head = self.history.head_of(id).or(reported).unwrap_or_default();
        CutHead { head, last_view: end.and_then(|end| end.last_view) }
    }

    pub(super) fn on_increment_fed(&mut self, index: usize, rebuild: u64, _cursor: u64) {
        if let Some(r) = &mut self.members[index].rebuild
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
        actions: &mut Vec<PrimaryAction>,
    ) {
        let held_from = self.history.first();
        let peer = &mut self.members[index];
        let Some(r) = peer.rebuild.take_if(|r| r.id == rebuild) else { return };
        if r.end.as_ref().is_none_or(|end| end.position != position) {
            return self.shut_out(now, index, "IncrementAtomic", actions);
        }
        let member = peer.member;
        peer.progress.applied = position.lsn;
        peer.progress.durable = position.lsn;
        peer.progress.next = position.lsn.next();
        peer.progress.behind_since = None;
        // Views inside the increment did not change the replica's state; the next one does.
        peer.progress.tip = position.lsn;
        if let Some(ack) = &mut peer.ack {
            ack.continuous &= !ack.damaged;
            ack.damaged = false;
            // The flip makes all of it stable: the next increment starts from here, not from
            // before.
            ack.stable = position.lsn;
        }
        if peer.progress.next >= held_from {
            peer.link = Link::Fed;
            let (moved_bytes, rounds) = peer.rounds.tell();
            actions.push(PrimaryAction::Note(PrimaryNote::Rebuilt { member, moved_bytes, rounds }));
        }
        self.end_boundary(&r);
        self.progress(now, actions);
    }
}
