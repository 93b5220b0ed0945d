//! Holds: this volume's part in a point over several volumes.
//!
//! While a point is held, no write and no flush is answered, and no read that shows an entry which a
//! write of that time made: so no client acts on an effect that comes after this volume's cut before
//! all the other volumes are cut too. Writes are sequenced and replicated meanwhile, and answered
//! together when the hold ends.
//!
//! A hold ends when its coordinator releases it, by itself at its deadline, and with the epoch. Only a
//! release within the deadline and under a live lease is *unbroken*: then this target, and no other
//! one, has answered for the volume from the hold's beginning to its end, and it has answered nothing.
//!
//! Everything here may be said twice: a repeat is answered as the first time.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Phase, Primary, PrimaryAction, PrimaryNote, USER_SNAPSHOTS_MAX};
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Epoch, Lsn, PointId, SnapshotId};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Longest time for which a target holds its answers back.
pub const HOLD_MS_MAX: u32 = 5000;
/// Holds whose end is remembered, for repeats.
const ENDED_MAX: usize = 16;

/// One step of a point, as its coordinator wishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PointWish {
    /// Hold all answers back for so long at most, and never longer than [`HOLD_MS_MAX`]. A repeat
    /// does not make the time longer.
    Hold { for_ms: u32 },
    /// Make this snapshot, while the point is held.
    Cut { snapshot: SnapshotId },
    /// Answer again.
    Release,
}

/// Outcome of a step of a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PointOutcome {
    /// Nothing is answered from here on.
    Held,
    /// The snapshot has its place in the history, which is not on media yet.
    Cut { snapshot: SnapshotId, lsn: Lsn, epoch: Epoch },
    /// The snapshot cannot be made, and waiting does not help.
    TooManySnapshots,
    /// The point is not held any more, or never was. `unbroken`: it was cut, and nothing was answered
    /// from its hold to its release.
    Released { unbroken: bool },
}

/// A point that is held now.
#[derive(Clone, Copy, Debug)]
struct Hold {
    point: PointId,
    until: Time,
    /// Entries up to here were on media of CF when it began: they may be shown.
    shown: Lsn,
    cut: Option<(SnapshotId, Lsn)>,
    /// The coordinator wants it to end; it waits for the lease.
    releasing: bool,
}

#[derive(Default)]
pub(super) struct Holds {
    current: Option<Hold>,
    /// The last ones that ended, and whether they were unbroken.
    ended: VecDeque<(PointId, bool)>,
}

impl Holds {
    pub fn is_holding(&self) -> bool {
        self.current.is_some()
    }

    /// LSN up to which the history may be shown to clients; `settled`: the same without a hold.
    pub fn shown(&self, settled: Lsn) -> Lsn {
        match self.current {
            Some(hold) if !mutant::is("reads-while-held") => settled.min(hold.shown),
            _ => settled,
        }
    }

    /// Time at which the present hold ends by itself.
    pub fn due(&self) -> Option<Time> {
        self.current.map(|hold| hold.until).filter(|_| !mutant::is("held-without-end"))
    }

    fn outcome_of_ended(&self, point: PointId) -> Option<PointOutcome> {
        let ended = self.ended.iter().find(|(ended, _)| *ended == point);
        ended.map(|(_, unbroken)| PointOutcome::Released { unbroken: *unbroken })
    }

    /// The hold of this point.
    fn of(&mut self, point: PointId) -> Option<&mut Hold> {
        self.current.as_mut().filter(|hold| hold.point == point)
    }

    fn end(&mut self, unbroken: bool) -> Option<(PointId, PointOutcome)> {
        let hold = self.current.take()?;
        if self.ended.len() >= ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back((hold.point, unbroken));
        Some((hold.point, PointOutcome::Released { unbroken }))
    }
}

fn note(point: PointId, outcome: PointOutcome) -> PrimaryAction {
    PrimaryAction::Note(PrimaryNote::Point { point, outcome })
}

impl Primary {
    pub(super) fn wish_point(
        &mut self,
        now: Time,
        point: PointId,
        wish: PointWish,
        actions: &mut Vec<PrimaryAction>,
    ) {
        self.end_hold_in_time(now, actions);
        if let Some(outcome) = self.holds.outcome_of_ended(point) {
            return actions.push(note(point, outcome));
        }
        match wish {
            PointWish::Hold { for_ms } => self.hold(now, point, for_ms, actions),
            PointWish::Cut { snapshot } => self.cut(point, snapshot, actions),
            PointWish::Release => match self.holds.of(point) {
                Some(hold) => hold.releasing = true,
                None => actions.push(note(point, PointOutcome::Released { unbroken: false })),
            },
        }
    }

    fn hold(&mut self, now: Time, point: PointId, for_ms: u32, actions: &mut Vec<PrimaryAction>) {
        // A target that does not serve answers nothing in any case, and is asked again. Another
        // point waits for the end of the present one, which is near.
        if self.phase != Phase::Serving || self.drain_requested {
            return;
        }
        if let Some(hold) = self.holds.current {
            if hold.point == point {
                actions.push(note(point, PointOutcome::Held));
            }
            return;
        }
        let longest = if mutant::is("held-without-end") { u32::MAX } else { HOLD_MS_MAX };
        let until = now + Duration::from_millis(for_ms.min(longest).into());
        let (shown, cut) = (self.commit.stable, None);
        self.holds.current = Some(Hold { point, until, shown, cut, releasing: false });
        actions.push(note(point, PointOutcome::Held));
    }

    fn cut(&mut self, point: PointId, snapshot: SnapshotId, actions: &mut Vec<PrimaryAction>) {
        let unheld = mutant::is("cut-without-a-hold") && self.phase == Phase::Serving;
        let cut = match self.holds.of(point) {
            Some(hold) => hold.cut,
            None if unheld => None,
            None => return actions.push(note(point, PointOutcome::Released { unbroken: false })),
        };
        let epoch = self.opening.epoch;
        if let Some((made, lsn)) = cut {
            // Another snapshot of the same point would be another content.
            if made == snapshot {
                actions.push(note(point, PointOutcome::Cut { snapshot, lsn, epoch }));
            }
            return;
        }
        if snapshot.is_of_boundary() || self.history.snapshot(snapshot).is_some() {
            // Its id names a content already, so it is not this point's.
            return;
        }
        let users = self.history.snapshots.iter().filter(|s| !s.hidden).count();
        if users >= USER_SNAPSHOTS_MAX {
            return actions.push(note(point, PointOutcome::TooManySnapshots));
        }
        let kind = EntryKind::Snapshot { id: snapshot, hidden: false };
        let lsn = self.history.append_bare(epoch, kind).lsn;
        self.commit.want_sync(lsn);
        if let Some(hold) = self.holds.of(point) {
            hold.cut = Some((snapshot, lsn));
        }
        actions.push(note(point, PointOutcome::Cut { snapshot, lsn, epoch }));
    }

    /// Ends a hold whose time is over. Its waiting answers leave with the next ones.
    pub(super) fn end_hold_in_time(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        if self.holds.due().is_some_and(|until| now >= until)
            && let Some((point, outcome)) = self.holds.end(false)
        {
            actions.push(note(point, outcome));
        }
    }

    /// Ends the hold with the epoch, or with the service: another target may answer from here on.
    pub(super) fn break_hold(&mut self, actions: &mut Vec<PrimaryAction>) {
        if mutant::is("hold-outlives-its-epoch") {
            return;
        }
        if let Some((point, outcome)) = self.holds.end(false) {
            actions.push(note(point, outcome));
        }
    }

    /// Ends the hold if its coordinator wants that. The caller has checked the lease. Returns true if
    /// it ended: then the answers that it held back are no measure of the load.
    pub(super) fn release_hold(&mut self, actions: &mut Vec<PrimaryAction>) -> bool {
        let Some(hold) = self.holds.current.filter(|hold| hold.releasing) else { return false };
        if let Some((point, outcome)) = self.holds.end(hold.cut.is_some()) {
            actions.push(note(point, outcome));
        }
        true
    }
}
