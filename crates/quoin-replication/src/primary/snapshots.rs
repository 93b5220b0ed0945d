//! Snapshots that users make: entries like others, so that each is a point of the one history, on
//! every replica the same.
//!
//! Whoever keeps the records says a wish until it is answered: a target that does not serve takes
//! none, and one that starts again knows nothing of what was wished before. Making one that exists
//! and deleting one that does not are answered like the first time, once the entry is on media of
//! CF. An id is used once: deleted, it would be made anew with another content.

use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::message::SNAPSHOTS_MAX;

/// Those of users; the rest of what a replica may list is for the boundaries of rebuilds.
pub const USER_SNAPSHOTS_MAX: usize = SNAPSHOTS_MAX / 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotWish {
    Make,
    Delete,
}

/// What became of a wish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotOutcome {
    /// It is on media of CF, as of this LSN.
    Made {
        lsn: Lsn,
    },
    Deleted,
    /// There are [`USER_SNAPSHOTS_MAX`].
    TooMany,
}

/// One that was taken up and is not on media yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wished {
    id: SnapshotId,
    wish: SnapshotWish,
    /// Where the snapshot is, or what must be on media before its deletion counts.
    lsn: Lsn,
    /// There is no place for it, as far as this target knows.
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
            // The boundary of a rebuild is nobody else's.
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

    /// Tells of what is on media now. The caller has looked at the lease.
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
