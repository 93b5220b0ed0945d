//! Requests of rebuilds, served behind those of clients, the most endangered volume first.
//!
//! A chunk of an increment takes the pool's one thread a fraction of a millisecond, to read it or
//! to write it, and clients of other volumes wait behind it; their targets cannot know. So chunks
//! wait in a queue and are served one a round, after all that clients' sessions sent. While
//! clients' IO keeps coming in, the thread then rests from copying [`REST_SHARE`] times as long as
//! the chunk took. Chunks that are read from a volume with fewer spare copies go first; a replica
//! knows from the last View how many its volume has. Every eighth turn is that of who waits longest,
//! so that nobody starves. Within one connection the order stays.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use quoin_types::entry::View;
use quoin_types::message::ToReplica;
use quoin_types::mutant;
use quoin_types::time::Time;

/// How much longer than a chunk took clients have the thread for themselves.
const REST_SHARE: u32 = 1;
/// Clients' IO that came so long ago does not count as coming in.
const CLIENTS_FOR: Duration = Duration::from_millis(20);
/// Chunks of one connection that wait, at most; its oldest are then served at once.
const WAITING_MAX: usize = 8;

/// So often it is the turn of who waits longest: a rebuild that never moves loses its session.
const OLDEST_EVERY: u64 = 8;

/// Copies beyond those that a volume cannot do without, as the last View has it.
pub type Spare = usize;

/// Copies of a volume that it could lose: those that the last View of its replica lists, but for a
/// quorum.
pub fn spare(last_view: Option<&View>) -> Spare {
    last_view.map_or(0, |view| view.in_sync.len().saturating_sub(view.rule.cf.into()))
}

#[derive(Default)]
pub struct Copying {
    waiting: HashMap<u64, VecDeque<ToReplica>>,
    /// The connections that have something waiting: the fewest spares first, then the oldest.
    order: BTreeMap<(Spare, u64), u64>,
    sequence: u64,
    turn: u64,
    rest_until: Time,
    clients_at: Option<Time>,
}

impl Copying {
    /// A client's IO came in.
    pub fn client(&mut self, now: Time) {
        self.clients_at = Some(now);
    }

    /// Takes a message to be served later. One that is given back is the connection's oldest and
    /// has waited for too many others.
    pub fn wait(&mut self, connection: u64, spare: Spare, message: ToReplica) -> Option<ToReplica> {
        let queue = self.waiting.entry(connection).or_default();
        queue.push_back(message);
        if queue.len() == 1 {
            self.sequence += 1;
            self.order.insert((spare, self.sequence), connection);
        }
        if queue.len() > WAITING_MAX { queue.pop_front() } else { None }
    }

    /// Takes the message that is served next, if one is to be served now.
    pub fn next(&mut self, now: Time) -> Option<(u64, ToReplica)> {
        if now < self.rest_until {
            return None;
        }
        self.turn += 1;
        let oldest = self.turn.is_multiple_of(OLDEST_EVERY);
        let first = match oldest && !mutant::is("oldest-chunk-has-no-turn") {
            true => *self.order.keys().min_by_key(|(_, sequence)| *sequence)?,
            false => *self.order.keys().next()?,
        };
        let (spare, connection) = (first.0, self.order.remove(&first)?);
        let queue = self.waiting.get_mut(&connection)?;
        let message = queue.pop_front()?;
        if queue.is_empty() {
            self.waiting.remove(&connection);
        } else {
            // Behind others that are endangered as much.
            self.sequence += 1;
            self.order.insert((spare, self.sequence), connection);
        }
        Some((connection, message))
    }

    /// Records that the last message took so long.
    pub fn served(&mut self, now: Time, took: Duration) {
        if self.clients_at.is_some_and(|at| now < at + CLIENTS_FOR) {
            self.rest_until = now + took + took * REST_SHARE;
        }
    }

    /// The connection is over, or closes: nobody waits for what it asked.
    pub fn forget(&mut self, connection: u64) {
        if self.waiting.remove(&connection).is_some() {
            self.order.retain(|_, waits| *waits != connection);
        }
    }

    /// The connections of which something waits.
    pub fn connections(&self) -> impl Iterator<Item = u64> {
        self.waiting.keys().copied()
    }

    /// How long until something is to be served.
    pub fn due_in(&self, now: Time) -> Option<Duration> {
        (!self.order.is_empty()).then(|| self.rest_until.since(now))
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::Lsn;
    use quoin_types::message::ReadView;

    use super::*;

    fn pull(id: u64) -> ToReplica {
        let (view, from, cursor) = (ReadView::Live, Lsn(0), 0);
        ToReplica::Pull { id, view, from, cursor, bytes_max: 1, want_data: true }
    }

    fn served(copying: &mut Copying) -> Vec<(u64, ToReplica)> {
        std::iter::from_fn(|| copying.next(Time(0))).collect()
    }

    #[test]
    fn the_most_endangered_volume_is_served_first_and_equals_in_turn() {
        let mut copying = Copying::default();
        for (connection, spare) in [(1, 1), (2, 0), (3, 1), (4, 0)] {
            for id in 0..2 {
                assert_eq!(copying.wait(connection, spare, pull(id)), None);
            }
        }
        let order: Vec<u64> = served(&mut copying).into_iter().map(|(from, _)| from).collect();
        assert_eq!(order, [2, 4, 2, 4, 1, 3, 1, 3]);
        assert_eq!(copying.due_in(Time(0)), None);
    }

    #[test]
    fn one_connection_s_messages_stay_in_order_and_never_pile_up() {
        let mut copying = Copying::default();
        let mut got = Vec::new();
        for id in 0..20 {
            got.extend(copying.wait(1, 0, pull(id)));
        }
        assert_eq!(got.len(), 20 - WAITING_MAX);
        got.extend(served(&mut copying).into_iter().map(|(_, message)| message));
        assert_eq!(got, (0..20).map(pull).collect::<Vec<_>>());
    }

    #[test]
    fn beside_clients_the_thread_rests_from_copying_and_without_them_it_does_not() {
        let mut copying = Copying::default();
        let (now, took) = (Time::from_millis(100), Duration::from_millis(1));
        copying.served(now, took);
        copying.wait(1, 0, pull(0));
        assert_eq!(copying.due_in(now), Some(Duration::ZERO));
        copying.client(now);
        copying.served(now, took);
        assert_eq!(copying.next(now), None);
        let due = now + copying.due_in(now).unwrap();
        assert!(due > now + took && copying.next(due).is_some());
        assert_eq!(due, now + took * 2, "clients have the thread as long again");

        // Requests of so long ago are over.
        copying.wait(1, 0, pull(1));
        let later = now + CLIENTS_FOR;
        copying.served(later, took);
        assert_eq!(copying.due_in(later), Some(Duration::ZERO));
    }

    #[test]
    fn what_a_lost_connection_asked_for_is_forgotten() {
        let mut copying = Copying::default();
        copying.wait(1, 0, pull(0));
        copying.wait(2, 0, pull(1));
        copying.forget(1);
        assert_eq!(served(&mut copying), [(2, pull(1))]);
    }
}
