//! Reads that the disk refuses: the limit of attempts before the data counts as lost.
//!
//! A refused read loses nothing, and may be transient. A permanent one is as good as lost data, and
//! must not keep others waiting. The time counts only within a series of consecutive attempts: two
//! short errors a month apart are no evidence for the time between them.

use std::time::Duration;

use quoin_types::ids::Lsn;
use quoin_types::message::ToReplica;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time for which the disk may refuse reads that sessions need before the replica counts as
/// damaged.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longest gap between two attempts of one series. A target that opens again waits 10 s at most,
/// and the longest lease of the one before it takes 31.5 s.
const GAP: Duration = Duration::from_secs(60);
/// Least number of refusals in one series.
const ATTEMPTS: u32 = 3;

/// Part of the disk that a message makes the replica read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// The log, from an LSN on.
    Log(Lsn),
    /// The map, from an LBA on.
    Map(u64),
    /// The state that an increment is merged with.
    Shadow,
    /// Other reads, which are no evidence for the disk: most are served from memory, and an
    /// unreadable block is answered as a bad copy.
    Elsewhere,
}

impl Place {
    pub fn of(message: &ToReplica) -> Self {
        match message {
            ToReplica::Fetch { after, .. } => Place::Log(*after),
            ToReplica::Pull { cursor, .. } => Place::Map(*cursor),
            ToReplica::IncrementBegin { .. }
            | ToReplica::IncrementFeed { .. }
            | ToReplica::IncrementCommit { .. } => Place::Shadow,
            _ => Place::Elsewhere,
        }
    }

    /// Returns true if a successful read here only leads to the refused one.
    fn is_before(self, refused: Place) -> bool {
        match (self, refused) {
            (Place::Log(read), Place::Log(refused)) => read < refused,
            (Place::Map(read), Place::Map(refused)) => read < refused,
            _ => false,
        }
    }
}

/// Series of consecutive attempts, all of them refused.
struct Row {
    place: Place,
    since: Time,
    last: Time,
    attempts: u32,
}

#[derive(Default)]
pub(super) struct RefusedReads(Option<Row>);

impl RefusedReads {
    /// Counts a refused read. Returns true if the unreadable data counts as lost.
    pub fn refused(&mut self, now: Time, place: Place) -> bool {
        let follows =
            |row: &Row| now <= row.last + GAP || mutant::is("refused-reads-at-any-distance");
        let fresh = Row { place, since: now, last: now, attempts: 0 };
        let row = self.0.take().filter(follows).unwrap_or(fresh);
        let row = Row { place, last: now, attempts: row.attempts + 1, ..row };
        let enough = row.attempts >= ATTEMPTS || mutant::is("refused-reads-at-any-distance");
        let lost = enough && now >= row.since + PATIENCE;
        self.0 = Some(row);
        lost
    }

    /// Records a successful read.
    pub fn answered(&mut self, place: Place) {
        if place != Place::Elsewhere {
            self.0.take_if(|row| !place.is_before(row.place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place::Log(Lsn(7));

    /// Results of refusals at these seconds.
    fn said(at_s: &[u64]) -> Vec<bool> {
        let mut reads = RefusedReads::default();
        at_s.iter().map(|s| reads.refused(Time::from_millis(s * 1000), PLACE)).collect()
    }

    #[test]
    fn a_disk_that_refuses_all_attempts_of_a_long_series_counts_as_lost() {
        assert_eq!(said(&[0, 1, 14, 15]), [false, false, false, true]);
        assert_eq!(said(&[0, 50, 100]), [false, false, true], "behind leases of the longest kind");
    }

    #[test]
    fn refusals_that_are_far_apart_or_few_are_no_series() {
        let month = 30 * 24 * 3600;
        assert_eq!(said(&[0, month, 2 * month, 3 * month]), [false; 4]);
        assert_eq!(said(&[0, 61, 122]), [false; 3]);
        assert_eq!(said(&[0, 20]), [false; 2]);
        assert_eq!(
            said(&[0, 1, month, month + 14, month + 15]),
            [false, false, false, false, true]
        );
    }

    #[test]
    fn a_successful_read_ends_the_series_unless_it_only_leads_to_the_refused_one() {
        let ends = |refused: Place, answered: Place| {
            let mut reads = RefusedReads::default();
            for s in 0..20 {
                reads.answered(answered);
                if reads.refused(Time::from_millis(s * 1000), refused) {
                    return false;
                }
            }
            true
        };
        assert!(ends(Place::Log(Lsn(7)), Place::Log(Lsn(7))));
        assert!(ends(Place::Log(Lsn(7)), Place::Log(Lsn(8))));
        assert!(!ends(Place::Log(Lsn(7)), Place::Log(Lsn(6))), "the part of the log before it");
        assert!(ends(Place::Map(7), Place::Map(9)));
        assert!(!ends(Place::Map(7), Place::Map(0)));
        assert!(ends(Place::Shadow, Place::Shadow));
        assert!(ends(Place::Map(7), Place::Shadow));
        assert!(!ends(Place::Log(Lsn(7)), Place::Elsewhere), "a ping reads nothing");
    }
}
