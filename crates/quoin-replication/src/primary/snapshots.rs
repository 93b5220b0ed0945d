//! Snapshots of users: entries like others, so that each is a point of the one history, the same on
//! every replica. And Reverts to them, which are writes like others.
//!
//! The owner of the records repeats a wish until it is answered: a target that does not serve
//! accepts none, and a restarted target has forgotten earlier wishes. A repeated creation or
//! deletion is answered like the first one, once the entry is on media of CF. An id is used once:
//! after a deletion, the same id would name another content.
//!
//! A Revert that was done must not be done again after clients have written: each is recorded in
//! the history itself, by a hidden snapshot of the attempt's own id behind it. Where that exists,
//! the Revert before it is part of the history, whatever target asks.

use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::message::{SNAPSHOTS_MAX, SnapshotHead};
use quoin_types::mutant;

/// Limit of users' snapshots; the rest of a replica's list is for the boundaries of rebuilds and
/// for the records of Reverts.
pub const USER_SNAPSHOTS_MAX: usize = SNAPSHOTS_MAX / 2;
/// Limit of all snapshots at which no Revert begins.
const REVERTS_BELOW: usize = SNAPSHOTS_MAX / 4 * 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotWish {
    Make,
    Delete,
    /// Say whether it is there, and on media of CF.
    Confirm,
}

/// Outcome of a wish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotOutcome {
    /// The snapshot is on media of CF, as of this LSN. `head`: epoch and chain of the history
    /// there, where the authority's log or map still had it.
    Made {
        lsn: Lsn,
        head: Option<SnapshotHead>,
    },
    Deleted,
    /// There is no such snapshot, after [`SnapshotWish::Confirm`].
    Gone,
    /// The volume has [`USER_SNAPSHOTS_MAX`] snapshots.
    TooMany,
}

/// Outcome of a Revert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RevertOutcome {
    /// The volume shows the snapshot's content as of this LSN, on media of CF.
    Done { lsn: Lsn, head: Option<SnapshotHead> },
    /// There is no such snapshot.
    NoSnapshot,
    /// The volume has too many snapshots to record the Revert.
    TooMany,
}

/// A wish that was accepted and is not on media yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wished {
    id: SnapshotId,
    wish: SnapshotWish,
    /// LSN that must be on media before the outcome counts.
    lsn: Lsn,
    outcome: SnapshotOutcome,
}

/// A Revert whose outcome is not on media yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reverting {
    attempt: SnapshotId,
    lsn: Lsn,
    outcome: RevertOutcome,
}

impl Primary {
    pub(super) fn wish_snapshot(&mut self, id: SnapshotId, wish: SnapshotWish) {
        let is_known = self.requests.snapshots.iter().any(|w| (w.id, w.wish) == (id, wish));
        // The boundary of a rebuild belongs to that rebuild alone.
        if self.phase != Phase::Serving || self.drain_requested || is_known || id.is_of_boundary() {
            return;
        }
        let existing = self.history.snapshot(id).copied();
        let last = self.history.last.lsn;
        let users = self.history.snapshots.iter().filter(|s| !s.hidden).count();
        let (lsn, outcome) = match (wish, existing) {
            (SnapshotWish::Make | SnapshotWish::Confirm, Some(snapshot)) => {
                (snapshot.lsn, self.made(id, snapshot.lsn))
            }
            (SnapshotWish::Make, None) if users >= USER_SNAPSHOTS_MAX => {
                (Lsn::ZERO, SnapshotOutcome::TooMany)
            }
            (SnapshotWish::Make, None) => {
                let kind = EntryKind::Snapshot { id, hidden: false };
                let lsn = self.history.append_bare(self.opening.epoch, kind).lsn;
                (lsn, self.made(id, lsn))
            }
            (SnapshotWish::Delete, Some(_)) if self.goes_back_to(id) => return,
            (SnapshotWish::Delete, Some(_)) => {
                let kind = EntryKind::DeleteSnapshot { id };
                (self.history.append_bare(self.opening.epoch, kind).lsn, SnapshotOutcome::Deleted)
            }
            (SnapshotWish::Confirm, None) => (last, SnapshotOutcome::Gone),
            (SnapshotWish::Delete, None) => (last, SnapshotOutcome::Deleted),
        };
        self.commit.want_sync(lsn);
        self.requests.snapshots.push(Wished { id, wish, lsn, outcome });
    }

    /// Returns true if a Revert to this snapshot is not stable yet. A replica that lacks the snapshot cannot
    /// follow the Revert; once it is deleted, only a base behind the Revert leads past it, and no base is
    /// above stable.
    fn goes_back_to(&self, snapshot: SnapshotId) -> bool {
        let mut behind = self.history.after(self.commit.stable);
        behind.any(|entry| matches!(entry.kind, EntryKind::Revert { id } if id == snapshot))
            && !mutant::is("snapshot-of-an-unstable-revert-deleted")
    }

    fn made(&self, id: SnapshotId, lsn: Lsn) -> SnapshotOutcome {
        SnapshotOutcome::Made { lsn, head: self.history.head_of(id) }
    }

    /// Accepts a Revert, once nothing of a client is under way and everything before is stable: so
    /// at most one is ever above stable.
    pub(super) fn wish_revert(&mut self, snapshot: SnapshotId, attempt: SnapshotId) {
        let is_known = self.requests.reverts.iter().any(|r| r.attempt == attempt);
        if self.phase != Phase::Serving
            || self.drain_requested
            || is_known
            || attempt.is_of_boundary()
            // Its effect is one that a client could see.
            || self.holds.is_holding()
        {
            return;
        }
        let last = self.history.last.lsn;
        let recorded = self.history.snapshot(attempt);
        if recorded.is_some_and(|s| !s.hidden) {
            // The id of a user's snapshot is that of no attempt.
            return;
        }
        let done = recorded.map(|s| s.lsn);
        let is_there = self.history.snapshot(snapshot).is_some_and(|s| !s.is_boundary());
        let (lsn, outcome) = match done.filter(|_| !mutant::is("revert-done-again")) {
            Some(lsn) => (lsn, self.reverted(attempt, lsn)),
            None if !is_there => (last, RevertOutcome::NoSnapshot),
            None if self.history.snapshots.len() >= REVERTS_BELOW => (last, RevertOutcome::TooMany),
            None => {
                if !self.requests.is_idle() || !self.reads.is_empty() {
                    return;
                }
                if self.commit.stable < last {
                    return self.commit.want_sync(last);
                }
                self.history.append_bare(self.opening.epoch, EntryKind::Revert { id: snapshot });
                let kind = EntryKind::Snapshot { id: attempt, hidden: true };
                let lsn = self.history.append_bare(self.opening.epoch, kind).lsn;
                (lsn, self.reverted(attempt, lsn))
            }
        };
        self.commit.want_sync(lsn);
        self.requests.reverts.push(Reverting { attempt, lsn, outcome });
    }

    fn reverted(&self, attempt: SnapshotId, lsn: Lsn) -> RevertOutcome {
        RevertOutcome::Done { lsn, head: self.history.head_of(attempt) }
    }

    /// Reports the outcomes that are on media now. The caller has checked the lease.
    pub(super) fn tell_snapshots(&mut self, actions: &mut Vec<PrimaryAction>) {
        let stable = match mutant::is("snapshot-answered-before-stable") {
            true => self.history.last.lsn,
            false => self.commit.stable,
        };
        self.requests.snapshots.retain(|wished| {
            let Wished { id, lsn, outcome, .. } = *wished;
            if lsn <= stable {
                actions.push(PrimaryAction::Note(PrimaryNote::Snapshot { id, outcome }));
            }
            lsn > stable
        });
        self.requests.reverts.retain(|reverting| {
            let Reverting { attempt, lsn, outcome } = *reverting;
            if lsn <= stable {
                actions.push(PrimaryAction::Note(PrimaryNote::Reverted { attempt, outcome }));
            }
            lsn > stable
        });
    }
}
