//! Requests of rebuilds within a session: slots that are copied from it, and increments that it
//! receives.
//!
//! Increments use the session's bulk connection, and so do the copies of rebuilds. Between the two connections there is no order, so each message states its precondition: a Begin
//! which point is stable, a feed how far the shadow is complete, a commit how much was fed. A bulk
//! connection has a number. Messages of a connection with a lower number than the newest are
//! ignored: the target has given them up.
//!
//! A Begin may wait until the log below it is merged into the map. Each step of that runs on a
//! timer of its own, so that the driver's thread serves others in between. What a step, a feed, a
//! cut or a commit reads of the map is looked up first, and where the disk does not have it at hand
//! the message waits.

use super::increment_queue::IncrementQueue;
use super::refused::Place;
use super::session::{FETCHES_MAX, Fault, Parked, Session};
use super::store::{FetchTicket, PullChunk, ReplicaStore, StoreError, Upcoming};
use super::{ConnectionId, Replica, ReplicaAction, ReplicaNote, UNREADABLE};
use std::ops::RangeInclusive;
use std::time::Duration;

use quoin_types::LSN_MAX;
use quoin_types::ids::{Lsn, Position, SessionKey};
use quoin_types::message::{
    Failure, FedSum, FromReplica, IncrementEnd, ReadView, RequestId, Slot, ToReplica,
};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Limit of one answer from the log or of an increment. It is the most that a target ever requests;
/// the limit holds for any request, so that none makes a pool hold a whole volume.
pub(super) const ANSWER_BYTES_MAX: u32 = 4 << 20;

/// Pause between two steps of a Begin: as long as the step took, so that others have the driver's
/// thread half of the time.
const BEGIN_PAUSE: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(200);

/// Connection of a session that a message arrived on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Own,
    Bulk(ConnectionId),
}

/// A request for entries of the log or for slots.
#[derive(Clone, Copy)]
pub(super) struct CopyRequest {
    pub way: Way,
    id: RequestId,
    what: Copied,
    bytes_max: u32,
    /// Times that it had to wait for the disk.
    fetches: u8,
}

#[derive(Clone, Copy)]
enum Copied {
    Entries { after: Lsn },
    Slots { view: ReadView, from: Lsn, cursor: u64, want_data: bool },
}

impl CopyRequest {
    fn new(way: Way, id: RequestId, what: Copied, bytes_max: u32) -> Self {
        Self { way, id, what, bytes_max: bytes_max.min(ANSWER_BYTES_MAX), fetches: 0 }
    }

    fn place(&self) -> Place {
        match self.what {
            Copied::Entries { after } => Place::Log(after),
            Copied::Slots { cursor, .. } => Place::Map(cursor),
        }
    }

    fn answer(
        &self,
        session: SessionKey,
        store: &mut dyn ReplicaStore,
    ) -> Result<FromReplica, StoreError> {
        let (id, bytes_max, may_wait) = (self.id, self.bytes_max, self.fetches < FETCHES_MAX);
        match self.what {
            Copied::Entries { after } => {
                let fetched = match may_wait {
                    true => store.try_fetch(after, bytes_max)?,
                    false => store.fetch(after, bytes_max)?,
                };
                let gone = fetched.is_none();
                Ok(FromReplica::Fetched { id, entries: fetched.unwrap_or_default(), gone })
            }
            Copied::Slots { view, from, cursor, want_data } => {
                let nonce = session.nonce;
                let chunk = match may_wait {
                    true => store.try_pull(nonce, view, from, cursor, bytes_max, want_data)?,
                    false => store.pull(nonce, view, from, cursor, bytes_max, want_data)?,
                };
                let gone = chunk.is_none();
                let PullChunk { slots, cursor, end } = chunk.unwrap_or_default();
                Ok(FromReplica::Pulled { id, slots, cursor, end, gone })
            }
        }
    }
}

/// A commit that was accepted.
#[derive(Clone, Copy)]
struct Commit {
    rebuild: u64,
    /// Position after the flip, once it is done.
    flipped: Option<Position>,
}

/// A Begin that waits until the log below it is merged into the map.
struct Beginning {
    way: Way,
    rebuild: u64,
    from: Lsn,
    /// Start of its last step, and the pause before the next one.
    turn: Option<(Time, Duration)>,
    /// Ticket that its next step waits for, if it waits for the disk, and how often it had to.
    waits_for: Option<FetchTicket>,
    fetches: u8,
}

#[derive(Default)]
pub(super) struct Copying {
    bulk: Option<ConnectionId>,
    /// Number of the newest bulk connection of the session.
    number: u64,
    /// Sum of everything fed since the shadow was last begun or resumed.
    fed: FedSum,
    commit: Option<Commit>,
    beginning: Option<Beginning>,
    /// Messages that wait for the disk, and those behind them.
    queue: IncrementQueue,
}

impl Copying {
    /// Takes the bulk connection, which ends, and forgets the messages that wait.
    pub fn take_bulk(&mut self) -> Option<ConnectionId> {
        self.queue.clear();
        self.bulk.take()
    }

    /// Number of messages that wait, besides a Begin.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if this message has to wait for others before it.
    fn must_wait(&self, message: &ToReplica) -> bool {
        let is_ordered = matches!(
            message,
            ToReplica::IncrementFeed { .. }
                | ToReplica::IncrementCut { .. }
                | ToReplica::IncrementCommit { .. }
        );
        is_ordered && self.queue.holds()
    }

    pub fn flipped(&mut self, rebuild: u64, position: Position) {
        self.commit = Some(Commit { rebuild, flipped: Some(position) });
    }
}

impl Session {
    /// Returns the connection of the session that this message arrived on; `None`: neither.
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

    /// Registers a connection as this session's bulk connection. The previous one ends; if a later
    /// one exists already, this one ends.
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
        self.copying.queue.clear();
        if let Some(connection) = self.copying.bulk.replace(connection) {
            actions.push(ReplicaAction::Disconnect { connection });
        }
    }

    /// Handles the end of a connection. Returns true if it was the bulk connection, without which
    /// the session continues.
    pub fn lost_bulk(&mut self, connection: ConnectionId) -> bool {
        let lost = self.copying.bulk.take_if(|bulk| *bulk == connection).is_some();
        if lost {
            self.copying.queue.clear();
        }
        lost
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
        let is_increment = message.is_copying() && !matches!(message, ToReplica::Pull { .. });
        if way == Way::Own && is_increment {
            return Err(Fault::Protocol("a part of an increment on the session's own connection"));
        }
        if self.copying.must_wait(&message) {
            return self.copying.queue.push(way, message);
        }
        match message {
            ToReplica::Pull { id, view, from, cursor, bytes_max, want_data } => {
                let what = Copied::Slots { view, from, cursor, want_data };
                self.check_waiting()?;
                self.answer_copy(CopyRequest::new(way, id, what, bytes_max), store, actions)?;
            }
            ToReplica::Fetch { id, after, bytes_max } if way == Way::Own => {
                let what = Copied::Entries { after };
                self.check_waiting()?;
                self.answer_copy(CopyRequest::new(way, id, what, bytes_max), store, actions)?;
            }
            ToReplica::IncrementBegin { rebuild, from } => {
                // It begins with what was handled until now, and says how much that is.
                self.copying.queue.clear();
                self.begin(way, rebuild, from, store, actions)?;
            }
            message @ (ToReplica::IncrementFeed { .. }
            | ToReplica::IncrementCut { .. }
            | ToReplica::IncrementCommit { .. }) => {
                self.go_on_with_increment(way, message, 0, store, actions)?;
            }
            _ => return Err(Fault::Protocol("no part of a rebuild on a bulk connection")),
        }
        Ok(())
    }

    /// Handles a feed, a cut or a commit, or keeps it until the disk has given what it lacks.
    fn go_on_with_increment(
        &mut self,
        way: Way,
        message: ToReplica,
        fetches: u8,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let upcoming = match &message {
            ToReplica::IncrementFeed { slots, .. } => Upcoming::Feed { slots },
            _ => Upcoming::Merge,
        };
        if fetches < FETCHES_MAX
            && let Err(StoreError::Pending(ticket)) = store.look_ahead(upcoming)
        {
            self.copying.queue.wait(ticket, fetches + 1, way, message);
            return Ok(());
        }
        match message {
            ToReplica::IncrementFeed { rebuild, slots, cursor, after } => {
                self.feed(rebuild, &slots, cursor, after, store)?;
                self.answer(way, FromReplica::IncrementFed { rebuild, cursor }, actions);
            }
            ToReplica::IncrementCut { rebuild, snapshot, head } => {
                let head = if mutant::is("cut-without-its-head") { Box::default() } else { head };
                store.increment_cut(rebuild, snapshot, &head)?;
            }
            ToReplica::IncrementCommit { rebuild, to, fed } => {
                self.commit(rebuild, &to, fed, store, actions)?;
                // The message has arrived: the rebuild now waits for the flip.
                let cursor = u64::MAX;
                self.answer(way, FromReplica::IncrementFed { rebuild, cursor }, actions);
            }
            _ => return Err(Fault::Protocol("no part of an increment")),
        }
        Ok(())
    }

    /// Goes on with what waited for this, and with what waited behind it. `None`: nothing of an
    /// increment waited for it.
    fn increment_fetched(
        &mut self,
        ticket: FetchTicket,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Option<Result<(), Fault>> {
        if let Some(mut beginning) =
            self.copying.beginning.take_if(|beginning| beginning.waits_for == Some(ticket))
        {
            (beginning.waits_for, beginning.turn) = (None, None);
            return Some(self.begin_step(beginning, store, actions));
        }
        let (way, message, fetches) = self.copying.queue.fetched(ticket)?;
        let handled = self.go_on_with_increment(way, message, fetches, store, actions);
        Some(handled.and_then(|()| self.go_on_behind(store, actions)))
    }

    /// Handles the messages whose turn it is now.
    fn go_on_behind(
        &mut self,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        while let Some((way, message)) = self.copying.queue.next() {
            self.go_on_with_increment(way, message, 0, store, actions)?;
        }
        Ok(())
    }

    /// Answers a request, or parks it until the disk has given what it lacks.
    fn answer_copy(
        &mut self,
        mut request: CopyRequest,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        match request.answer(self.key, store) {
            Ok(message) => self.answer(request.way, message, actions),
            Err(StoreError::Pending(ticket)) => {
                request.fetches += 1;
                self.park(ticket, Parked::Copy(request));
            }
            Err(error) => return Err(error.into()),
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
        match self.copying.commit {
            // The target lost the connection that carried the commit, and asks for its outcome.
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

    /// Continues the Begin that waits, if there is one.
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
        mut beginning: Beginning,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        let Beginning { way, rebuild, from, .. } = beginning;
        if beginning.fetches < FETCHES_MAX
            && let Err(StoreError::Pending(ticket)) = store.look_ahead(Upcoming::Begin { from })
        {
            beginning.waits_for = Some(ticket);
            beginning.fetches += 1;
            self.copying.beginning = Some(beginning);
            return Ok(());
        }
        beginning.fetches = 0;
        if !store.increment_begin(rebuild, from)? {
            self.copying.beginning = Some(beginning);
            return Ok(());
        }
        self.copying.beginning = None;
        self.copying.fed = FedSum::default();
        let cursor = store.shadow().map_or(0, |(.., cursor)| cursor);
        let cut = store.shadow_cut().unwrap_or(from);
        self.answer(way, FromReplica::IncrementBegun { rebuild, cursor, cut }, actions);
        Ok(())
    }

    fn feed(
        &mut self,
        rebuild: u64,
        slots: &[Slot],
        cursor: u64,
        after: u64,
        store: &mut dyn ReplicaStore,
    ) -> Result<(), Fault> {
        if !slots.iter().all(|slot| slot.is_good(LSN_MAX)) {
            return Err(Fault::Protocol("a bad slot in an increment"));
        }
        let at = store.shadow().map(|(of, _, cursor)| (of, cursor));
        if at != Some((rebuild, after)) && !mutant::is("feeds-not-held-together") {
            return Err(Fault::Protocol("IncrementAtomic"));
        }
        self.copying.fed.add(slots);
        Ok(store.increment_feed(rebuild, slots, cursor)?)
    }

    fn commit(
        &mut self,
        rebuild: u64,
        to: &IncrementEnd,
        fed: FedSum,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) -> Result<(), Fault> {
        to.check(self.key.epoch).map_err(Fault::Protocol)?;
        let whole = store.shadow().is_some_and(|(of, _, at)| (of, at) == (rebuild, u64::MAX));
        if (!whole || fed != self.copying.fed) && !mutant::is("feeds-not-held-together") {
            return Err(Fault::Protocol("IncrementAtomic"));
        }
        self.copying.commit = Some(Commit { rebuild, flipped: None });
        if mutant::is("flip-told-before-it-is-made") {
            let position = to.position;
            self.send(FromReplica::IncrementDone { rebuild, position }, actions);
        }
        self.prepare(rebuild, to, store)
    }
}

impl Beginning {
    fn new(way: Way, rebuild: u64, from: Lsn) -> Self {
        Self { way, rebuild, from, turn: None, waits_for: None, fetches: 0 }
    }

    /// Returns the time of its next step; `None` if that waits for the disk.
    fn due(&self) -> Option<Time> {
        let (at, pause) = self.turn.filter(|_| self.waits_for.is_none())?;
        Some(at + pause)
    }

    /// Records a step that began at `now` and is done. The next one is due after a pause.
    fn stepped(&mut self, now: Time) {
        let took = self.turn.map(|(at, pause)| now.since(at).saturating_sub(pause));
        let (least, most) = BEGIN_PAUSE.into_inner();
        self.turn = Some((now, took.unwrap_or(least).clamp(least, most)));
    }
}

impl Replica {
    /// Runs the next step of a Begin that waits, if it is due.
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

    /// Records that a message was handled without a refused read. While a Begin waits, its steps so
    /// far are no evidence that the disk reads: the unreadable part may lie ahead.
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

    /// Accepts a bulk connection for the session that is open, and for no other.
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

    /// Handles a request of a rebuild. It renews no lease: no target relies on that, and a message
    /// that was queued for long would keep a newer target out for as long again.
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
            // Close used the other connection, and has overtaken this message.
            return;
        }
        let is_pull = matches!(message, ToReplica::Pull { .. });
        let (place, parked) = (Place::of(&message), session.parked());
        match session.copy(way, message, store, actions) {
            // Nothing was read yet.
            Ok(()) if session.parked() > parked => {}
            Ok(()) => self.copied(now, place, actions),
            // The replica is fed, and perhaps counted: that continues, whatever a rebuild
            // requested.
            Err(fault) if is_pull => self.fail_pull(now, place, fault, store, actions),
            Err(fault) => self.fail(now, place, fault, store, actions),
        }
    }

    /// Makes a request again whose reads have come. It renews no lease: its message did.
    pub(super) fn on_fetched(
        &mut self,
        now: Time,
        ticket: FetchTicket,
        store: &mut dyn ReplicaStore,
        actions: &mut Vec<ReplicaAction>,
    ) {
        let Some(session) = &mut self.session else { return };
        if session.is_closing() {
            return;
        }
        match session.take_parked(ticket) {
            None => match session.increment_fetched(ticket, store, actions) {
                None => {}
                Some(Ok(()))
                    if session.copying.waiting() > 0 && session.copying.beginning.is_none() => {}
                Some(Ok(())) => self.copied(now, Place::Shadow, actions),
                Some(Err(fault)) => self.fail(now, Place::Shadow, fault, store, actions),
            },
            Some(Parked::Repair(request)) => {
                if let Err(fault) = session.repair(request, store, actions) {
                    self.fail(now, Place::Elsewhere, fault, store, actions);
                }
            }
            Some(Parked::Read(read)) => {
                if let Err(fault) = session.read(read, store, actions) {
                    self.fail(now, Place::Elsewhere, fault, store, actions);
                }
            }
            Some(Parked::Copy(request)) => {
                let (place, parked) = (request.place(), session.parked());
                match (session.answer_copy(request, store, actions), request.way) {
                    (Ok(()), _) if session.parked() > parked => {}
                    (Ok(()), _) => self.copied(now, place, actions),
                    (Err(fault), Way::Bulk(_)) => self.fail_pull(now, place, fault, store, actions),
                    (Err(fault), Way::Own) => self.fail(now, place, fault, store, actions),
                }
            }
        }
    }

    /// Ends the bulk connection after a pull that failed, unless the replica itself has failed.
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
