//! What rebuilds ask of a session: slots that are copied from it, and increments that it takes.
//!
//! Both come by the session's bulk connection, or by its own one from targets that know no other.
//! The two connections are not ordered among each other, so each message says what must hold
//! before it: a Begin which point is stable, a feed how far the shadow is complete, a commit how
//! much was fed. A bulk connection has a number, and nothing is taken from one of a lower number
//! than the newest: what such a one still carries was given up by the target.
//!
//! A Begin may wait for the log below it to be folded. That is done a step at a time, and each
//! step by a timer of its own, so that the driver's thread serves others in between.

use super::refused::Place;
use super::session::{Fault, Session};
use super::store::{ReplicaStore, StoreError};
use super::{ConnectionId, Replica, ReplicaAction, ReplicaNote, UNREADABLE};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

use quoin_types::LSN_MAX;
use quoin_types::ids::{Lsn, Position, SessionKey};
use quoin_types::message::{Failure, FedSum, FromReplica, IncrementEnd, Slot, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Data of one answer about the log or an increment: as much as a target ever asks for, whatever it
/// says, so that none makes a pool hold a whole volume.
pub(super) const ANSWER_BYTES_MAX: u32 = 4 << 20;

/// Between two steps of a Begin: as long as a step took, so that others have the driver's thread
/// half of the time.
const BEGIN_PAUSE: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(200);

/// Messages of a rebuild that wait for its Begin. Only targets that know no bulk connection send
/// any before it is answered: feeds, of which they have four on their way, cuts and a commit.
const BEHIND_BEGIN_MAX: usize = 12;

/// Which of a session's connections a message came by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Own,
    Bulk(ConnectionId),
}

/// A commit that was taken.
#[derive(Clone, Copy)]
struct Commit {
    rebuild: u64,
    /// Where it flipped to, once it has.
    flipped: Option<Position>,
}

/// A Begin that waits for the log below it to be folded.
struct Beginning {
    way: Way,
    rebuild: u64,
    from: Lsn,
    /// What came behind it by the session's own connection.
    behind: VecDeque<ToReplica>,
    /// When its last step began, and how much later the next one is due.
    turn: Option<(Time, Duration)>,
}

#[derive(Default)]
pub(super) struct Copying {
    bulk: Option<ConnectionId>,
    /// Of the newest bulk connection there was.
    number: u64,
    /// Since the shadow was last begun or resumed.
    fed: FedSum,
    commit: Option<Commit>,
    beginning: Option<Beginning>,
}

impl Copying {
    /// Takes the bulk connection, which ends with the session.
    pub fn take_bulk(&mut self) -> Option<ConnectionId> {
        self.bulk.take()
    }

    pub fn flipped(&mut self, rebuild: u64, position: Position) {
        self.commit = Some(Commit { rebuild, flipped: Some(position) });
    }
}

impl Session {
    /// By which of its connections this came; `None`: by none of them.
    pub fn way(&self, connection: ConnectionId, key: SessionKey) -> Option<Way> {
        if self.key != key {
            return None;
        }
        if self.connection == connection {
            return Some(Way::Own);
        }
        let former = mutant::is("former-bulk-connection-heard") && self.copying.number > 0;
        (self.copying.bulk == Some(connection) || former).then_some(Way::Bulk(connection))
    }

    /// A connection says that it is this session's bulk connection. It ends the one before it, and
    /// is ended itself where a later one was there already.
    pub fn open_bulk(
        &mut self,
        connection: ConnectionId,
        number: u64,
        actions: &mut Vec<ReplicaAction>,
    ) {
        if number <= self.copying.number || connection == self.connection {
            return actions.push(ReplicaAction::Disconnect { connection });
        }
        self.copying.number = number;
        if let Some(connection) = self.copying.bulk.replace(connection) {
            actions.push(ReplicaAction::Disconnect { connection });
        }
    }

    /// The connection is over; true if it was the bulk connection, without which the session goes on.
    pub fn lost_bulk(&mut self, connection: ConnectionId) -> bool {
        self.copying.bulk.take_if(|bulk| *bulk == connection).is_some()
    }

    fn answer(&self, way: Way, message: FromReplica, actions: &mut Vec<ReplicaAction>) {
        let connection = match way {
            Way::Own => self.connection,
            Way::Bulk(connection) => connection,
        };
        actions.push(ReplicaAction::Send { connection, session: self.key, message });
    }

    pub fn copy(
        &mut self,
        way: Way,
        message: ToReplica,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        if let Some(beginning) = &mut self.copying.beginning
            && way == Way::Own
            && beginning.way == Way::Own
            && !matches!(message, ToReplica::Pull { .. } | ToReplica::IncrementBegin { .. })
        {
            if beginning.behind.len() == BEHIND_BEGIN_MAX {
                return Err(Fault::Protocol("too much behind the beginning of an increment"));
            }
            beginning.behind.push_back(message);
            return Ok(());
        }
        match message {
            ToReplica::Pull { id, view, from, cursor, bytes_max } => {
                let bytes_max = bytes_max.min(ANSWER_BYTES_MAX);
                let chunk = store.pull(self.key.nonce, view, from, cursor, bytes_max)?;
                let gone = chunk.is_none();
                let chunk = chunk.unwrap_or_default();
                let (slots, cursor, end) = (chunk.slots, chunk.cursor, chunk.end);
                self.answer(way, FromReplica::Pulled { id, slots, cursor, end, gone }, actions);
            }
            ToReplica::IncrementBegin { rebuild, from } => {
                self.begin(way, rebuild, from, store, actions)?;
            }
            ToReplica::IncrementFeed { rebuild, slots, cursor, after } => {
                self.feed(rebuild, &slots, cursor, after, store)?;
                self.answer(way, FromReplica::IncrementFed { rebuild, cursor }, actions);
            }
            ToReplica::IncrementCut { rebuild, snapshot } => {
                store.increment_cut(rebuild, snapshot)?;
            }
            ToReplica::IncrementCommit { rebuild, to, fed } => {
                self.commit(rebuild, &to, fed, store, actions)?;
                if let Way::Bulk(_) = way {
                    // It has come: what is waited for now is the flip.
                    let cursor = u64::MAX;
                    self.answer(way, FromReplica::IncrementFed { rebuild, cursor }, actions);
                }
            }
            _ => return Err(Fault::Protocol("no part of a rebuild on a bulk connection")),
        }
        Ok(())
    }

    fn begin(
        &mut self,
        way: Way,
        rebuild: u64,
        from: Lsn,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        if !self.is_fed() {
            return Err(Fault::Protocol("increment before truncate"));
        }
        if let Way::Own = way {
            return self.begin_step(Beginning::new(way, rebuild, from), store, actions);
        }
        match self.copying.commit {
            // The target lost the connection that the commit went by, and asks what became of it.
            Some(commit) if commit.rebuild == rebuild => {
                let cursor = u64::MAX;
                self.answer(way, FromReplica::IncrementFed { rebuild, cursor }, actions);
                if let Some(position) = commit.flipped {
                    self.send(FromReplica::IncrementDone { rebuild, position }, actions);
                }
                return Ok(());
            }
            Some(Commit { flipped: None, .. }) => {
                return Err(Fault::Protocol("an increment that begins within another one's flip"));
            }
            _ => {}
        }
        self.set_stable(from, store);
        self.begin_step(Beginning::new(way, rebuild, from), store, actions)
    }

    /// Goes on with the Begin that waits, if one does.
    pub fn go_on_beginning(
        &mut self,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        match self.copying.beginning.take() {
            Some(beginning) if !self.is_closing() => self.begin_step(beginning, store, actions),
            _ => Ok(()),
        }
    }

    fn begin_step(
        &mut self,
        beginning: Beginning,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let Beginning { way, rebuild, from, .. } = beginning;
        if !store.increment_begin(rebuild, from)? {
            self.copying.beginning = Some(beginning);
            return Ok(());
        }
        self.copying.beginning = None;
        if let Way::Bulk(_) = way {
            self.copying.fed = FedSum::default();
            let cursor = store.shadow().map_or(0, |(.., cursor)| cursor);
            self.answer(way, FromReplica::IncrementBegun { rebuild, cursor }, actions);
        }
        for message in beginning.behind {
            self.copy(way, message, store, actions)?;
        }
        Ok(())
    }

    fn feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
        after: Option<u64>,
        store: &mut dyn ReplicaStore,
    ) -> Result<(), Fault> {
        if !slots.iter().all(|slot| slot.is_good(LSN_MAX)) {
            return Err(Fault::Protocol("a bad slot in an increment"));
        }
        if let Some(after) = after {
            let at = store.shadow().map(|(of, _, cursor)| (of, cursor));
            if at != Some((rebuild, after)) && !mutant::is("feeds-not-held-together") {
                return Err(Fault::Protocol("IncrementAtomic"));
            }
            self.copying.fed.add(slots);
        }
        Ok(store.increment_feed(rebuild, slots, cursor)?)
    }

    fn commit(
        &mut self,
        rebuild: u64,
        to: &IncrementEnd,
        fed: Option<FedSum>,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        to.check(self.key.epoch).map_err(Fault::Protocol)?;
        if let Some(fed) = fed {
            let whole = store.shadow().is_some_and(|(of, _, at)| (of, at) == (rebuild, u64::MAX));
            if (!whole || fed != self.copying.fed) && !mutant::is("feeds-not-held-together") {
                return Err(Fault::Protocol("IncrementAtomic"));
            }
            self.copying.commit = Some(Commit { rebuild, flipped: None });
        }
        if mutant::is("flip-told-before-it-is-made") {
            let position = to.position;
            self.send(FromReplica::IncrementDone { rebuild, position }, actions);
        }
        self.prepare(rebuild, to, store)
    }
}

impl Beginning {
    fn new(way: Way, rebuild: u64, from: Lsn) -> Self {
        Self { way, rebuild, from, behind: VecDeque::new(), turn: None }
    }

    fn due(&self) -> Option<Time> {
        self.turn.map(|(at, pause)| at + pause)
    }

    /// A step was begun at `now`, and done. The next one is due after a pause.
    fn stepped(&mut self, now: Time) {
        let took = self.turn.map(|(at, pause)| now.since(at).saturating_sub(pause));
        let (least, most) = BEGIN_PAUSE.into_inner();
        self.turn = Some((now, took.unwrap_or(least).clamp(least, most)));
    }
}

impl Replica {
    /// Does the next step of a Begin that waits, if that is due.
    pub(super) fn go_on_beginning(
        &mut self,
        now: Time,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(session) = &mut self.session else { return };
        let Some(due) = session.copying.beginning.as_ref().and_then(Beginning::due) else { return };
        if now < due {
            return self.wake(due, actions);
        }
        match session.go_on_beginning(store, actions) {
            Ok(()) => {
                if let Some(beginning) = &mut session.copying.beginning {
                    beginning.stepped(now);
                }
                self.copied(now, Place::Shadow, actions);
            }
            Err(fault) => self.fail(now, Place::Shadow, fault, store, actions),
        }
    }

    /// A message was taken. While a Begin waits, its steps so far say nothing of the disk: what that
    /// refuses to read may lie ahead.
    pub(super) fn copied(&mut self, now: Time, place: Place, actions: &mut Vec<ReplicaAction>) {
        let beginning = self.session.as_mut().and_then(|s| s.copying.beginning.as_mut());
        let due = beginning.map(|beginning| {
            if beginning.turn.is_none() {
                beginning.stepped(now);
            }
            beginning.due()
        });
        if due.is_none() || place != Place::Shadow {
            self.refused_reads.answered(place);
        }
        if let Some(due) = due.flatten() {
            self.wake(due, actions);
        }
    }

    /// A bulk connection is taken for the session that is open, and for no other.
    pub(super) fn on_open_bulk(
        &mut self,
        connection: ConnectionId,
        key: SessionKey,
        number: u64,
        actions: &mut Vec<ReplicaAction>,
    ) {
        match &mut self.session {
            Some(session) if session.key == key && !session.is_closing() => {
                session.open_bulk(connection, number, actions);
            }
            _ => actions.push(ReplicaAction::Disconnect { connection }),
        }
    }

    /// What rebuilds ask. It renews no lease: no target counts on that, and what waits in a queue
    /// for long would keep a newer one out for as long again.
    pub(super) fn on_bulk(
        &mut self,
        now: Time,
        way: Way,
        message: ToReplica,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(session) = &mut self.session else { return };
        if session.is_closing() {
            // Close went another way, and has overtaken this.
            return;
        }
        let is_pull = matches!(message, ToReplica::Pull { .. });
        let place = Place::of(&message);
        match session.copy(way, message, store, actions) {
            Ok(()) => self.copied(now, place, actions),
            // It is fed, and perhaps counted: that goes on, whatever a rebuild asked for.
            Err(fault) if is_pull => self.fail_pull(now, place, fault, store, actions),
            Err(fault) => self.fail(now, place, fault, store, actions),
        }
    }

    /// A pull that failed ends the bulk connection, unless the replica itself has failed.
    fn fail_pull(
        &mut self,
        now: Time,
        place: Place,
        fault: Fault,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let failure = match &fault {
            Fault::Store(error) if error.is_refused_read() => {
                if self.refused_reads.refused(now, place) {
                    return self.damaged(UNREADABLE, store, actions);
                }
                actions.push(ReplicaAction::Note(ReplicaNote::Unreadable(*error)));
                Failure::Io
            }
            Fault::Store(StoreError::Rule(what)) | Fault::Protocol(what) => {
                actions.push(ReplicaAction::Note(ReplicaNote::InvariantRefused(what)));
                Failure::Protocol
            }
            _ => return self.fail(now, place, fault, store, actions),
        };
        let Some(session) = &mut self.session else { return };
        let key = session.key;
        if let Some(connection) = session.copying.take_bulk() {
            let message = FromReplica::Failed(failure);
            actions.push(ReplicaAction::Send { connection, session: key, message });
            actions.push(ReplicaAction::Disconnect { connection });
        }
    }
}
