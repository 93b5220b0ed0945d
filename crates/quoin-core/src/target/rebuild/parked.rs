//! Rebuilds whose receiver went away, and boundaries that no rebuild needs any more.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::{Phase, Target};
use super::{Fed, Lanes, Rebuild, Stage};
use crate::entry::{EntryKind, SharedEntry};
use crate::ids::{Lsn, SnapshotId};
use crate::message::FedSum;
use crate::mutant;
use crate::time::Time;

/// How long a rebuild whose receiver went away is kept for its return.
const PARKED_FOR: Duration = Duration::from_secs(600);

impl Target {
    /// A boundary that no rebuild needs any more is deleted, in every history.
    pub(super) fn end_boundary(&mut self, rebuild: &Rebuild) {
        if let Some((id, _)) = rebuild.boundary
            && matches!(self.phase, Phase::Serving | Phase::Draining { closing: false, .. })
        {
            let kind = EntryKind::DeleteSnapshot { id };
            self.history.append_bare(self.epoch, kind);
        }
    }

    /// A session ended: rebuilds fed from it look for another source; its own is parked, so that
    /// the same shadow can go on when it returns soon.
    pub(in super::super) fn cancel_rebuilds_from(&mut self, index: usize) {
        let member = self.members[index].member;
        if let Some(mut rebuild) = self.members[index].rebuild.take() {
            rebuild.lanes = Lanes::from(0, 0);
            rebuild.feeds = 0;
            self.parked.push((member, rebuild));
        }
        for peer in &mut self.members.peers {
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
    pub(super) fn take_parked(&mut self, now: Time, index: usize) -> Option<Rebuild> {
        let member = self.members[index].member;
        let at = self.parked.iter().position(|(m, _)| *m == member)?;
        let (_, mut rebuild) = self.parked.remove(at);
        let shadow = self.members[index].ack.as_ref().and_then(|a| a.shadow);
        match shadow {
            Some((id, start, cursor))
                if (id, start) == (rebuild.id, rebuild.start)
                    // Behind a cut that may have been lost with the receiver's cache, or at the end
                    // of a view without its cut: which view the cursor is in is not known.
                    && (rebuild.from == rebuild.start
                        || mutant::is("shadow-resumed-behind-a-cut"))
                    && cursor != u64::MAX
                    && rebuild.boundary.is_some()
                    && matches!(rebuild.stage, Stage::Moving | Stage::Beginning) =>
            {
                rebuild.lanes = Lanes::from(cursor, self.history.blocks);
                rebuild.fed = Fed { sum: FedSum::default(), upto: cursor };
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

    /// Parked rebuilds pin a boundary, and with it what is overwritten: they are given up after a
    /// while, and at once where nobody expects their receiver any more.
    pub(super) fn drop_parked(&mut self, now: Time) {
        let mut index = 0;
        while index < self.parked.len() {
            let (member, rebuild) = &self.parked[index];
            let expected = self.members.peers.iter().any(|p| p.member == *member);
            if !expected || now >= rebuild.moved + PARKED_FOR {
                let (_, rebuild) = self.parked.remove(index);
                self.end_boundary(&rebuild);
            } else {
                index += 1;
            }
        }
    }

    pub(in super::super) fn parked_until(&self) -> Option<Time> {
        self.parked.iter().map(|(_, rebuild)| rebuild.moved + PARKED_FOR).min()
    }

    /// Boundaries of rebuilds that an older epoch did not finish. The authority need not have
    /// them: one that was rebuilt itself got none but its own.
    pub(in super::super) fn forget_hidden_snapshots(&mut self) {
        self.parked.clear();
        let theirs = !mutant::is("boundaries-of-others-kept");
        let acks = self.members.peers.iter().filter_map(|p| p.ack.as_deref()).filter(|_| theirs);
        let all = self.history.snapshots.iter().chain(acks.flat_map(|ack| &ack.snapshots));
        let hidden: BTreeSet<SnapshotId> = all.filter(|s| s.hidden).map(|s| s.id).collect();
        self.delete_boundaries(hidden);
    }

    /// The same of a replica that comes later, as far as neither the history nor what it is about
    /// to be fed knows of them.
    pub(in super::super) fn forget_boundaries_of(&mut self, index: usize, keep: Lsn) {
        let Some(ack) = self.members[index].ack.as_deref() else { return };
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
