//! When the pool's thread does background work, and for how long at a time.
//!
//! A step of the store's is bounded work and says nothing of time: a node may be in memory, or on
//! a slow disk. So steps are done one by one until their time is over. A turn takes so much longer
//! by them, and by the last step at most.

use std::time::Duration;

use quoin_types::time::Time;

/// Time that steps are begun in between two looks at the sockets.
const TURN: Duration = Duration::from_millis(2);
/// The same where clients are refused unless it goes on: what a turn takes in must not outgrow
/// what is done for it.
const URGENT_TURN: Duration = Duration::from_millis(10);
/// Beside clients who never pause, relaxed work takes one part of so many: what they overwrite
/// would pile up for as long as they go on.
const RELAXED_PART: u32 = 8;
/// Between attempts at background work that found nothing it could do.
const REST: Duration = Duration::from_millis(20);
/// Between attempts at background work that failed for a reason that is not the disk's.
const FAILED_REST: Duration = Duration::from_secs(10);
/// Time after which a read of the disk that background work waits for counts as one that never ends.
/// A disk that is merely busy answers before.
pub const HUNG_AFTER: Duration = Duration::from_secs(60);
/// Time without input after which relaxed background work is done without a rest.
pub const QUIET: Duration = Duration::from_millis(2);

/// How much background work is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    Idle,
    /// In pauses of the clients.
    Relaxed,
    Soon,
    /// Clients' next writes depend on it.
    Urgent,
}

/// Outcome of steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    WentOn,
    /// There was nothing that could be done, for want of room too.
    NothingToDo,
    Failed,
}

/// The rests between turns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Background {
    /// No work before this.
    rest_until: Time,
    /// Before this, relaxed work waits for a pause of the clients.
    relaxed_from: Time,
    /// Since when the next step waits for the disk.
    waits_from: Option<Time>,
}

impl Background {
    /// How long steps may be begun now. `quiet`: nothing came in for [`QUIET`].
    pub fn turn(&self, now: Time, urgency: Urgency, quiet: bool) -> Option<Duration> {
        if now < self.rest_until {
            return None;
        }
        match urgency {
            Urgency::Idle => None,
            Urgency::Relaxed if !quiet && now < self.relaxed_from => None,
            Urgency::Relaxed | Urgency::Soon => Some(TURN),
            Urgency::Urgent => Some(URGENT_TURN),
        }
    }

    /// The steps of a turn that began at `now` took `took` and ended at `ended`.
    pub fn stepped(&mut self, now: Time, ended: Time, took: Duration, outcome: Outcome) {
        self.relaxed_from = ended + took * (RELAXED_PART - 1);
        match outcome {
            Outcome::WentOn => {}
            Outcome::NothingToDo => self.rest_until = now + REST,
            Outcome::Failed => self.rest_until = now + FAILED_REST,
        }
    }

    /// Whether the next step, which `waits` for reads of the disk or not, has waited for too long: it is
    /// to be given up, so that other work goes on. Said once of each wait.
    pub fn hangs(&mut self, now: Time, waits: bool) -> bool {
        if !waits {
            self.waits_from = None;
            return false;
        }
        let from = *self.waits_from.get_or_insert(now);
        let hangs = now.since(from) >= HUNG_AFTER;
        if hangs {
            self.waits_from = None;
        }
        hangs
    }

    /// How long until a step that waits has waited for too long.
    pub fn hung_in(&self, now: Time) -> Option<Duration> {
        self.waits_from.map(|from| (from + HUNG_AFTER).since(now))
    }

    /// A sync ended, or reads for background work did: what is on media or in memory now may be
    /// what it waited for.
    pub fn disk_answered(&mut self, now: Time) {
        self.rest_until = now;
        self.waits_from = None;
    }

    /// How long until there may be something to do.
    pub fn due_in(&self, now: Time, urgency: Urgency) -> Option<Duration> {
        let rest = self.rest_until.since(now);
        match urgency {
            Urgency::Idle => None,
            Urgency::Relaxed => Some(QUIET.max(rest)),
            Urgency::Soon | Urgency::Urgent => Some(rest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(1_000_000_000);

    #[test]
    fn relaxed_work_waits_for_a_pause_or_takes_its_part() {
        let mut background = Background::default();
        let took = Duration::from_millis(2);
        assert_eq!(background.turn(NOW, Urgency::Idle, true), None);
        assert_eq!(background.turn(NOW, Urgency::Relaxed, false), Some(TURN));
        background.stepped(NOW, NOW + took, took, Outcome::WentOn);
        let soon = NOW + took;
        assert_eq!(background.turn(soon, Urgency::Relaxed, false), None);
        assert_eq!(background.turn(soon, Urgency::Relaxed, true), Some(TURN));
        assert_eq!(background.turn(soon, Urgency::Soon, false), Some(TURN));
        assert_eq!(background.turn(soon, Urgency::Urgent, false), Some(URGENT_TURN));
        let later = soon + took * (RELAXED_PART - 1);
        assert_eq!(background.turn(later, Urgency::Relaxed, false), Some(TURN));
        assert_eq!(background.due_in(soon, Urgency::Relaxed), Some(QUIET));
        assert_eq!(background.due_in(soon, Urgency::Soon), Some(Duration::ZERO));
        assert_eq!(background.due_in(soon, Urgency::Idle), None);
    }

    #[test]
    fn a_step_whose_read_never_ends_is_given_up_and_one_that_is_answered_is_not() {
        let mut background = Background::default();
        assert!(!background.hangs(NOW, true));
        let almost = NOW + HUNG_AFTER - Duration::from_secs(1);
        assert!(!background.hangs(almost, true));
        assert_eq!(background.hung_in(almost), Some(Duration::from_secs(1)));
        background.disk_answered(almost);
        assert!(!background.hangs(NOW + HUNG_AFTER, true), "another step waits since now");
        assert!(background.hangs(NOW + HUNG_AFTER * 2, true));
        assert_eq!(background.hung_in(NOW + HUNG_AFTER * 2), None);
        assert!(!background.hangs(NOW + HUNG_AFTER * 3, false));
    }

    #[test]
    fn work_that_cannot_be_done_rests_until_its_time_or_a_sync() {
        for (outcome, rest) in [(Outcome::NothingToDo, REST), (Outcome::Failed, FAILED_REST)] {
            let mut background = Background::default();
            background.stepped(NOW, NOW, Duration::ZERO, outcome);
            assert_eq!(background.due_in(NOW, Urgency::Urgent), Some(rest));
            assert_eq!(background.turn(NOW, Urgency::Urgent, true), None);
            assert_eq!(background.turn(NOW + rest, Urgency::Urgent, true), Some(URGENT_TURN));
            background.disk_answered(NOW);
            assert_eq!(background.turn(NOW, Urgency::Urgent, true), Some(URGENT_TURN));
        }
    }
}
