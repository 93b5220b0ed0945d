//! A pool's round as its driver does it, by the product's own decisions
//! ([`quoin_replication::pool_host`]): which clock a frame counts from, what a connection may say, and
//! when what belongs to rebuilds is served.

use std::time::Duration;

use quoin_replication::pool_host::access::{OpenSession, takes_bulk};
use quoin_replication::pool_host::copying::{Copying, spare};
use quoin_replication::pool_host::round::Round;
use quoin_replication::replica::ReplicaEvent;
use quoin_types::message::{ReadView, ToReplica};
use quoin_types::{Lsn, Member, SessionKey, Time};

use super::checkers::Observation;
use super::pools::Process;
use super::processes::ProcessEvent;
use super::{Event, World};
use crate::network::ConnectionId;
use crate::schedule::{Instant, MILLISECOND};

/// Time after a stall in which what is read still belongs to the stalled round.
const TAIL: Instant = MILLISECOND;
/// Names the connections of other volumes' rebuilds.
const OTHERS: u64 = 1 << 61;

/// The rounds of one process of a pool.
pub(super) struct Rounds {
    /// The present one, and until when it lasts where it stalled.
    round: Round,
    stalled: Stalled,
    copying: Copying,
    /// A round is planned in which a chunk is served.
    is_planned: bool,
}

/// A round in the middle of which the thread stands still.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stalled {
    No,
    /// It stands still.
    Now,
    /// Messages up to this instant still belong to that round.
    Until(Instant),
}

impl Rounds {
    pub fn begin(local: Time) -> Self {
        Self {
            round: Round::begin(local),
            stalled: Stalled::No,
            copying: Copying::default(),
            is_planned: false,
        }
    }
}

impl World {
    /// The time that frames count from which this pool reads now.
    pub(super) fn receipt(&mut self, pool: usize) -> Time {
        let (now, local) = (self.schedule.now(), self.local(self.pools[pool].host));
        let Some(Process { rounds, .. }) = &mut self.pools[pool].process else { return local };
        match rounds.stalled {
            Stalled::Until(at) if now <= at => {}
            _ => (rounds.stalled, rounds.round) = (Stalled::No, Round::begin(local)),
        }
        rounds.round.receipt(local)
    }

    /// The pool's thread stands still in the middle of a round, which began now.
    pub(super) fn stall_round(&mut self, pool: usize) {
        let local = self.local(self.pools[pool].host);
        if let Some(Process { rounds, .. }) = &mut self.pools[pool].process {
            (rounds.stalled, rounds.round) = (Stalled::Now, Round::begin(local));
        }
    }

    /// It goes on, with what came meanwhile.
    pub(super) fn round_goes_on(&mut self, pool: usize) {
        let now = self.schedule.now();
        if let Some(Process { rounds, .. }) = &mut self.pools[pool].process
            && rounds.stalled == Stalled::Now
        {
            rounds.stalled = Stalled::Until(now + TAIL);
        }
    }

    /// Returns true if the pool takes a bulk connection of this session, as it is asked for
    /// `member`.
    pub(super) fn takes_bulk(&self, pool: usize, session: SessionKey, member: Member) -> bool {
        let open = self.session_at(pool).and_then(|(connection, open)| {
            let own = self.network.connections.get(&connection).filter(|own| own.pool_open)?;
            let connections = self.network.connections.values();
            let of_it = connections.filter(|c| c.pool == pool && c.pool_open && c.bulk.is_some());
            let bulks = of_it.filter(|c| c.session == session).count();
            Some(OpenSession { session: open, claim: self.setup.claim_of(own.member), bulks })
        });
        takes_bulk(session, self.setup.claim_of(member), open)
    }

    /// Queues messages of rebuilds behind those of clients' sessions; returns all others.
    pub(super) fn waits_for_its_turn(
        &mut self,
        pool: usize,
        id: ConnectionId,
        message: ToReplica,
    ) -> Option<ToReplica> {
        let now = self.local(self.pools[pool].host);
        let spare = if message.is_copying() { self.spare_of(pool) } else { 0 };
        let Some(process) = &mut self.pools[pool].process else { return Some(message) };
        match message {
            message if message.is_copying() => process.rounds.copying.wait(id, spare, message),
            ToReplica::Close => {
                process.rounds.copying.forget(id);
                Some(ToReplica::Close)
            }
            message => {
                if let ToReplica::Read { .. } = message {
                    process.rounds.copying.client(now);
                }
                Some(message)
            }
        }
    }

    /// A client's IO came in.
    pub(super) fn note_client(&mut self, pool: usize) {
        let now = self.local(self.pools[pool].host);
        if let Some(process) = &mut self.pools[pool].process {
            process.rounds.copying.client(now);
        }
    }

    fn spare_of(&mut self, pool: usize) -> usize {
        let here = &mut self.pools[pool];
        let mut copies = 0;
        here.storage.with(here.member.guid, &mut |store| {
            copies = spare(store.state().last_view.as_ref().map(|(_, view)| view));
        });
        copies
    }

    /// Returns the waiting messages where serving them takes the pool no time and no others wait beside
    /// them.
    pub(super) fn served_at_once(&mut self, pool: usize) -> Vec<ReplicaEvent> {
        if self.processes.on {
            self.plan_copying(pool, Duration::ZERO);
            return Vec::new();
        }
        std::iter::from_fn(|| self.next_chunk(pool, Duration::ZERO)).collect()
    }

    /// The chunk whose turn it is, if it is one of this volume; it takes the pool so long.
    fn next_chunk(&mut self, pool: usize, took: Duration) -> Option<ReplicaEvent> {
        let now = self.local(self.pools[pool].host);
        let process = self.pools[pool].process.as_mut()?;
        let (connection, message) = process.rounds.copying.next(now)?;
        process.rounds.copying.served(now, took);
        let session = self.network.connections.get(&connection)?.session;
        Some(ReplicaEvent::Message { connection, session, message })
    }

    /// Forgets the requests of a connection that is gone.
    pub(super) fn forget_chunks(&mut self, pool: usize, id: ConnectionId) {
        if let Some(process) = self.pools.get_mut(pool).and_then(|p| p.process.as_mut()) {
            process.rounds.copying.forget(id);
        }
    }

    /// A round of the pool is planned in which a chunk is served, where one of this volume waits.
    fn plan_copying(&mut self, pool: usize, at_least: Duration) {
        self.others_wait(pool);
        let (now, life) = (self.local(self.pools[pool].host), self.pools[pool].life);
        let Some(process) = &mut self.pools[pool].process else { return };
        let waits = process.rounds.copying.connections().any(|connection| connection < OTHERS);
        let Some(due) =
            process.rounds.copying.due_in(now).filter(|_| waits && !process.rounds.is_planned)
        else {
            return;
        };
        process.rounds.is_planned = true;
        let delay = due.max(at_least).as_nanos() as Instant;
        self.schedule.after(delay, Event::Process(ProcessEvent::Copy { pool, life }));
    }

    /// One chunk is served: this volume's, or one of the other volumes that are rebuilt from here.
    pub(super) fn copy(&mut self, pool: usize, life: u32) {
        if self.pools[pool].life != life {
            return;
        }
        let took = Duration::from_nanos(self.processes.chunk_takes());
        if self.pools[pool].paused {
            let again = Event::Process(ProcessEvent::Copy { pool, life });
            return self.schedule.after(MILLISECOND, again);
        }
        let Some(process) = &mut self.pools[pool].process else { return };
        process.rounds.is_planned = false;
        let chunk = self.next_chunk(pool, took);
        self.observe(&Observation::ChunkServed { pool, is_own: chunk.is_some() });
        if let Some(event) = chunk {
            let at = self.receipt(pool);
            self.feed_pool_at(pool, at, vec![event]);
        }
        if self.pools[pool].life == life {
            self.plan_copying(pool, took);
        }
    }

    /// Chunks that other volumes ask of a pool, of which each has one waiting at any time. They are
    /// as endangered as a volume can be.
    fn others_wait(&mut self, pool: usize) {
        let rebuilt = if self.faults.over { 0 } else { self.processes.rebuilt };
        let Some(process) = &mut self.pools[pool].process else { return };
        for other in OTHERS..OTHERS + rebuilt {
            if !process.rounds.copying.connections().any(|connection| connection == other) {
                let (view, from, cursor) = (ReadView::Live, Lsn(0), 0);
                let pull =
                    ToReplica::Pull { id: 0, view, from, cursor, bytes_max: 1, want_data: true };
                // One alone is never too many of its connection.
                let _ = process.rounds.copying.wait(other, 0, pull);
            }
        }
    }
}
