//! Snapshots of users: entries like others, so that each is a point of the one history, the same on
//! every replica.
//!
//! The owner of the records repeats a wish until it is answered: a target that does not serve
//! accepts none, and a restarted target has forgotten earlier wishes. A repeated creation or
//! deletion is answered like the first one, once the entry is on media of CF. An id is used once:
//! after a deletion, the same id would name another content.

use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::message::SNAPSHOTS_MAX;

/// Limit of users' snapshots; the rest of a replica's list is for the boundaries of rebuilds.
pub const USER_SNAPSHOTS_MAX: usize = SNAPSHOTS_MAX / 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotWish {
    Make,
    Delete,
}

/// Outcome of a wish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotOutcome {
    /// The snapshot is on media of CF, as of this LSN.
    Made {
        lsn: Lsn,
    },
    Deleted,
    /// The volume has [`USER_SNAPSHOTS_MAX`] snapshots.
    TooMany,
}

/// A wish that was accepted and is not on media yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wished {
    id: SnapshotId,
    wish: SnapshotWish,
    /// LSN of the snapshot, or the LSN that must be on media before its deletion counts.
    lsn: Lsn,
    /// Set if there is no place for it, as far as this target knows.
    too_many: bool,
}

impl Primary {
    pub(super) fn wish_snapshot(&mut self, id: SnapshotId, wish: SnapshotWish) {
        let is_known = self.requests.snapshots.iter().any(|w| (w.id, w.wish) == (id, wish));
        if self.phase != Phase::Serving || self.drain_requested || is_known {
            return;
        }
        let existing = self.history.snapshots.iter().find(|s| s.id == id).copied();
        let mut too_many = false;
        let users = self.history.snapshots.iter().filter(|s| !s.hidden).count();
        let lsn = match (wish, existing) {
            // The boundary of a rebuild belongs to that rebuild alone.
            (_, Some(snapshot)) if snapshot.hidden => return,
            (SnapshotWish::Make, Some(snapshot)) => snapshot.lsn,
            (SnapshotWish::Make, None) if users >= USER_SNAPSHOTS_MAX => {
                too_many = true;
                Lsn::ZERO
            }
            (SnapshotWish::Make, None) => {
                let kind = EntryKind::Snapshot { id, hidden: false };
                self.history.append_bare(self.epoch, kind).lsn
            }
            (SnapshotWish::Delete, Some(_)) => {
                self.history.append_bare(self.epoch, EntryKind::DeleteSnapshot { id }).lsn
            }
            (SnapshotWish::Delete, None) => self.history.last.lsn,
        };
        self.commit.want_sync(lsn);
        self.requests.snapshots.push(Wished { id, wish, lsn, too_many });
    }

    /// Reports the snapshots that are on media now. The caller has checked the lease.
    pub(super) fn tell_snapshots(&mut self, actions: &mut Vec<PrimaryAction>) {
        let stable = self.commit.stable;
        self.requests.snapshots.retain(|wished| {
            let Wished { id, wish, lsn, too_many } = *wished;
            if lsn <= stable {
                let outcome = match wish {
                    SnapshotWish::Make if too_many => SnapshotOutcome::TooMany,
                    SnapshotWish::Make => SnapshotOutcome::Made { lsn },
                    SnapshotWish::Delete => SnapshotOutcome::Deleted,
                };
                actions.push(PrimaryAction::Note(PrimaryNote::Snapshot { id, outcome }));
            }
            lsn > stable
        });
    }
}
