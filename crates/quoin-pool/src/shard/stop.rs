//! The end of a process that was asked to stop: a first sync puts all that was applied on media, then
//! the replicas record a clean stop, and a second one is for that. Neither is waited for without end.

use std::time::Duration;

use quoin_replication::replica::store::SyncTicket;
use quoin_types::Time;

/// How long a stopping pool waits for its last sync and for answers to be taken.
const STOP_MAX: Duration = Duration::from_secs(10);

/// Next step of a stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StopStep {
    Waits,
    /// Another sync is to be asked for, and named by [`Stop::records`].
    Records,
    Ended,
}

#[derive(Default)]
pub(super) struct Stop {
    /// The sync that is waited for, and the end of all waiting.
    waits: Option<(SyncTicket, Time)>,
    /// The replicas know that all they applied is on media.
    is_recorded: bool,
}

impl Stop {
    pub(super) fn begin(&mut self, now: Time, ticket: SyncTicket) {
        self.waits = Some((ticket, now + STOP_MAX));
    }

    pub(super) fn has_begun(&self) -> bool {
        self.waits.is_some()
    }

    pub(super) fn due_in(&self, now: Time) -> Option<Duration> {
        self.waits.map(|(_, deadline)| deadline.since(now))
    }

    /// `all_taken`: peers have taken all answers.
    pub(super) fn step(
        &self,
        now: Time,
        is_synced: impl Fn(SyncTicket) -> bool,
        all_taken: bool,
    ) -> StopStep {
        match self.waits {
            None => StopStep::Waits,
            Some((_, deadline)) if now >= deadline => StopStep::Ended,
            Some((ticket, _)) if !is_synced(ticket) => StopStep::Waits,
            Some(_) if !self.is_recorded => StopStep::Records,
            Some(_) if all_taken => StopStep::Ended,
            Some(_) => StopStep::Waits,
        }
    }

    /// The replicas record a clean stop, which this sync is for.
    pub(super) fn records(&mut self, ticket: SyncTicket) {
        self.is_recorded = true;
        if let Some((waits, _)) = &mut self.waits {
            *waits = ticket;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    #[test]
    fn a_stop_ends_after_a_second_sync_and_once_all_answers_are_taken() {
        let mut stop = Stop::default();
        assert_eq!(stop.step(at(1), |_| true, true), StopStep::Waits, "nobody asked for it");
        stop.begin(at(1), SyncTicket(5));
        let until = |done: u64| move |ticket: SyncTicket| ticket.0 <= done;
        assert_eq!(stop.step(at(2), until(4), true), StopStep::Waits);
        assert_eq!(stop.step(at(2), until(5), false), StopStep::Records);
        stop.records(SyncTicket(6));
        assert_eq!(stop.step(at(3), until(5), true), StopStep::Waits);
        assert_eq!(stop.step(at(3), until(6), false), StopStep::Waits);
        assert_eq!(stop.step(at(3), until(6), true), StopStep::Ended);
    }

    #[test]
    fn a_disk_that_never_answers_holds_up_a_stop_for_a_bounded_time() {
        let mut stop = Stop::default();
        stop.begin(at(1), SyncTicket(5));
        assert_eq!(stop.due_in(at(1)), Some(STOP_MAX));
        assert_eq!(stop.step(at(1) + STOP_MAX, |_| false, false), StopStep::Ended);
    }
}
