//! State that all rebuilds of a volume share: their pace, the entries kept for them, rebuilds whose
//! receiver is gone, and boundaries that no rebuild needs any more.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::pace::Pace;
use super::super::{Phase, Primary};
use super::{Lanes, Rebuild, Stage};
use quoin_types::entry::{EntryKind, SharedEntry};
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::membership::Member;
use quoin_types::message::SnapshotInfo;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time that a rebuild whose receiver is gone is kept for its return.
const PARKED_FOR: Duration = Duration::from_secs(600);

pub(in super::super) struct Rebuilds {
    /// Rebuilds whose receiver is gone.
    parked: Vec<(Member, Rebuild)>,
    pub pace: Pace,
    /// Time until which writes are held back for a rebuild that does not gain on them.
    held_back: Option<Time>,
    /// Limit of the entries kept for replicas that are away or behind, in bytes.
    pub retain_bytes_max: usize,
}

impl Rebuilds {
    pub fn new() -> Self {
        Self {
            parked: Vec::new(),
            pace: Pace::new(),
            held_back: None,
            retain_bytes_max: usize::MAX,
        }
    }

    fn park(&mut self, member: Member, mut rebuild: Rebuild) {
        rebuild.lanes = Lanes::from(0, 0);
        rebuild.feeds = 0;
        self.parked.push((member, rebuild));
    }

    fn take(&mut self, member: Member) -> Option<Rebuild> {
        let at = self.parked.iter().position(|(m, _)| *m == member)?;
        Some(self.parked.remove(at).1)
    }

    /// Takes the rebuilds that are to be given up: after a while, or at once if their receiver is
    /// not `expected` any more.
    fn take_expired(&mut self, now: Time, expected: impl Fn(Member) -> bool) -> Vec<Rebuild> {
        let is_over = |(member, rebuild): &mut (Member, Rebuild)| {
            !expected(*member) || now >= rebuild.moved + PARKED_FOR
        };
        self.parked.extract_if(.., is_over).map(|(_, rebuild)| rebuild).collect()
    }

    /// Holds writes back until this time at most.
    pub fn hold_writes_back(&mut self, until: Time) {
        self.held_back = Some(self.held_back.map_or(until, |other| other.max(until)));
    }

    pub fn release_writes(&mut self) {
        self.held_back = None;
    }

    pub fn holds_writes_back(&self) -> bool {
        self.held_back.is_some()
    }

    /// Time of the next step if no event occurs.
    pub fn due(&self, now: Time) -> Option<Time> {
        let parked = self.parked.iter().map(|(_, rebuild)| rebuild.moved + PARKED_FOR).min();
        [parked, self.pace.due(now), self.held_back].into_iter().flatten().min()
    }
}

impl Primary {
    /// Deletes a boundary that no rebuild needs any more, in every history.
    pub(super) fn end_boundary(&mut self, rebuild: &Rebuild) {
        if let Some((id, _)) = rebuild.boundary
            && matches!(self.phase, Phase::Serving | Phase::Draining { closing: false, .. })
        {
            let kind = EntryKind::DeleteSnapshot { id };
            self.history.append_bare(self.opening.epoch, kind);
        }
    }

    /// Handles the end of a session. Rebuilds fed from it choose another source. Its own rebuild is
    /// parked, so that the same shadow can continue if the receiver returns soon.
    pub(in super::super) fn cancel_rebuilds_from(&mut self, index: usize) {
        let member = self.members[index].member;
        if let Some(rebuild) = self.members[index].rebuild.take() {
            self.rebuilds.park(member, rebuild);
        }
        for peer in &mut self.members.peers {
            if let Some(rebuild) = &mut peer.rebuild {
                rebuild.lanes.lost(member);
            }
            // The base of this source ended with its session.
            peer.rebuild.take_if(|rebuild| {
                rebuild.base_source == Some(member) && rebuild.stage != Stage::Committing
            });
        }
    }

    /// Resumes an interrupted rebuild at the state that the receiver's shadow reports.
    pub(super) fn take_parked(&mut self, now: Time, index: usize) -> Option<Rebuild> {
        let member = self.members[index].member;
        let mut rebuild = self.rebuilds.take(member)?;
        let ack = self.members[index].ack.as_ref();
        let (shadow, cut) = (ack.and_then(|a| a.shadow), ack.and_then(|a| a.shadow_cut));
        match shadow.zip(cut) {
            Some(((id, start, cursor), cut))
                if (id, start) == (rebuild.id, rebuild.start)
                    && rebuild
                        .boundary
                        .is_some_and(|(id, _)| self.history.snapshot(id).is_some())
                    && matches!(rebuild.stage, Stage::Moving | Stage::Beginning)
                    && self.resume(&mut rebuild, cut, cursor) =>
            {
                rebuild.ask = false;
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

    /// Ends parked rebuilds after some time: each pins a boundary, and with it blocks that were
    /// overwritten since.
    pub(super) fn end_expired(&mut self, now: Time) {
        let expected = |member| self.members.get(member).is_some();
        for rebuild in self.rebuilds.take_expired(now, expected) {
            self.end_boundary(&rebuild);
        }
    }

    /// Deletes boundaries of rebuilds that an older epoch did not finish. The authority need not
    /// have them: an authority that was rebuilt itself has none but its own. Other hidden snapshots
    /// have an owner, who deletes them.
    pub(in super::super) fn forget_hidden_snapshots(&mut self) {
        self.rebuilds.parked.clear();
        let theirs = !mutant::is("boundaries-of-others-kept");
        let acks = self.members.peers.iter().filter_map(|p| p.ack.as_deref()).filter(|_| theirs);
        let all = self.history.snapshots.iter().chain(acks.flat_map(|ack| &ack.snapshots));
        let every = mutant::is("hidden-snapshots-all-deleted-at-an-open");
        let is_boundary = |s: &&SnapshotInfo| s.is_boundary() || (every && s.hidden);
        let hidden: BTreeSet<SnapshotId> = all.filter(is_boundary).map(|s| s.id).collect();
        self.delete_boundaries(hidden);
    }

    /// Deletes boundaries of a replica that connects later, unless the history or the entries that
    /// it is about to be fed know of them.
    pub(in super::super) fn forget_boundaries_of(&mut self, index: usize, keep: Lsn) {
        let Some(ack) = self.members[index].ack.as_deref() else { return };
        let known = |id: SnapshotId| {
            let deletes = |e: &SharedEntry| e.kind == EntryKind::DeleteSnapshot { id };
            let history = &self.history;
            history.snapshots.iter().any(|s| s.id == id) || history.after(keep).any(deletes)
        };
        let kept = ack.snapshots.iter().filter(|s| s.is_boundary() && s.lsn <= keep);
        let stale = kept.map(|s| s.id).filter(|id| !known(*id)).collect();
        self.delete_boundaries(stale);
    }

    fn delete_boundaries(&mut self, boundaries: BTreeSet<SnapshotId>) {
        for id in boundaries {
            let kind = EntryKind::DeleteSnapshot { id };
            self.history.append_bare(self.opening.epoch, kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cuts, Fed, VecDeque};
    use super::*;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};

    fn member(id: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(id) }
    }

    fn at(s: u64) -> Time {
        Time::from_millis(s * 1000)
    }

    fn rebuild(id: u64, moved: Time) -> Rebuild {
        Rebuild {
            id,
            start: Lsn::ZERO,
            from: Lsn::ZERO,
            stage: Stage::Moving,
            boundary: None,
            end: None,
            views: VecDeque::new(),
            lanes: Lanes::from(0, 64),
            base_source: None,
            cuts: Cuts::default(),
            without: Vec::new(),
            feeds: 3,
            fed: Fed::default(),
            ask: false,
            moved,
            round_bytes: 0,
        }
    }

    #[test]
    fn a_parked_rebuild_waits_for_its_receiver_for_a_while_and_not_where_it_is_not_expected() {
        let mut rebuilds = Rebuilds::new();
        for id in 1..=3 {
            rebuilds.park(member(id.into()), rebuild(id, at(id)));
        }
        assert_eq!(rebuilds.due(at(5)), Some(at(1) + PARKED_FOR));
        let over = rebuilds.take_expired(at(5), |m| m != member(2));
        assert_eq!(over.iter().map(|r| r.id).collect::<Vec<_>>(), [2]);
        let over = rebuilds.take_expired(at(1) + PARKED_FOR, |_| true);
        assert_eq!(over.iter().map(|r| r.id).collect::<Vec<_>>(), [1]);
        let back = rebuilds.take(member(3)).unwrap();
        assert_eq!((back.id, back.feeds), (3, 0), "nothing is on its way to it");
        assert!(rebuilds.take(member(3)).is_none());
    }

    #[test]
    fn writes_are_held_back_until_the_last_rebuild_that_asks_for_it_lets_go() {
        let mut rebuilds = Rebuilds::new();
        assert!(!rebuilds.holds_writes_back());
        rebuilds.hold_writes_back(at(9));
        rebuilds.hold_writes_back(at(7));
        assert_eq!((rebuilds.holds_writes_back(), rebuilds.due(at(5))), (true, Some(at(9))));
        rebuilds.release_writes();
        assert_eq!((rebuilds.holds_writes_back(), rebuilds.due(at(5))), (false, None));
    }
}
