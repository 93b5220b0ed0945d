//! The clock of a target's round.
//!
//! A round takes what all sockets have, then lets each touched volume answer and send, then writes
//! each touched socket once: replicas first, clients after them, rebuilds last. Answers to clients
//! need a lease that lives as they leave, and what a replica says may lead to answers at once. What
//! comes late in a round may have waited for seconds. So each socket's events count from its reading,
//! and what leaves is held against the time at which reading is over; the time of the round's begin
//! is for latencies alone. A ping is counted from a time before its sending all the same.

use quoin_types::mutant;
use quoin_types::time::Time;

/// One turn of the shard's thread, from its wait on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    began: Time,
}

impl Round {
    pub fn begin(now: Time) -> Self {
        Self { began: now }
    }

    pub fn began(&self) -> Time {
        self.began
    }

    /// The time of what is read, answered or sent at `now`.
    pub fn at(&self, now: Time) -> Time {
        if mutant::is("lease-tested-at-the-rounds-begin") {
            self.began
        } else {
            now.max(self.began)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_late_in_a_round_and_what_leaves_it_count_from_then() {
        let at = Time::from_millis;
        let round = Round::begin(at(1000));
        assert_eq!((round.began(), round.at(at(4000))), (at(1000), at(4000)));
        assert_eq!(round.at(at(900)), at(1000), "time does not go back within a round");
    }
}
