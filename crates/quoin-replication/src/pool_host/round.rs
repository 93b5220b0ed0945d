//! The clock of a pool's round.
//!
//! A round takes what all sockets have and works it off one after the other, so what comes late in
//! it may have waited for a disk for seconds. A target counts its lease from the moment it sent a
//! ping. The replica must honour that lease from a moment after the ping's receipt: what was read
//! late in a round was received late.

use quoin_types::mutant;
use quoin_types::time::Time;

/// One turn of the pool's thread, from its wait on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    began: Time,
}

impl Round {
    pub fn begin(now: Time) -> Self {
        Self { began: now }
    }

    /// The time by which timers, syncs and reports of this round count.
    pub fn began(&self) -> Time {
        self.began
    }

    /// The time from which frames renew leases that are read at `now`.
    pub fn receipt(&self, now: Time) -> Time {
        if mutant::is("lease-renewed-from-the-rounds-begin") { self.began } else { now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_late_in_a_round_counts_from_its_reading() {
        let round = Round::begin(Time::from_millis(1000));
        assert_eq!(round.began(), Time::from_millis(1000));
        assert_eq!(round.receipt(Time::from_millis(4000)), Time::from_millis(4000));
    }
}
