//! Replicas that take writes much later than the others of their volume.
//!
//! A slow replica does not slow the volume while enough others answer, so it would remain unnoticed
//! until it is needed. The comparison uses the smoothed time from sending entries to their
//! acknowledgement as applied. A replica is slow relative to the others, not to a fixed limit, so
//! that a volume whose replicas are all far away has none.

use std::time::Duration;

use super::peer::Link;
use super::{Primary, PrimaryAction, PrimaryNote};
use quoin_types::ids::Lsn;
use quoin_types::membership::Member;
use quoin_types::message::Ping;
use quoin_types::time::Time;

/// Divisor of the moving average: the weight of a new sample is one part in this many.
const SMOOTHING: u32 = 16;
/// Samples before an average is compared.
const SAMPLES_MIN: u32 = 16;
/// Limit of replicas kept here; more than a volume ever has at a time.
const MEMBERS_MAX: usize = 32;
/// Interval of the comparison, while anything is written.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time for which a replica must be slow, or as fast as the others, before a report.
const LASTS: Duration = Duration::from_secs(10);
/// Slow: later than the others by this factor and by this much.
const FACTOR: u32 = 4;
const MORE: Duration = Duration::from_millis(20);
/// Slow no longer: within this factor and this much.
const FACTOR_BACK: u32 = 2;
const MORE_BACK: Duration = Duration::from_millis(10);

/// One replica.
#[derive(Clone, Debug)]
struct Watched {
    member: Member,
    took: Duration,
    samples: u32,
    /// Set if it answered since the last comparison.
    fresh: bool,
    slow: bool,
    /// Time since which its state differs from `slow`.
    turns_since: Option<Time>,
}

/// A replica that became slow, or is slow no longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Turn {
    pub member: Member,
    pub slow: bool,
    pub took: Duration,
    /// Latency of the others.
    pub others: Duration,
}

/// The replicas of one volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Slowness {
    members: Vec<Watched>,
    next_look: Time,
}

impl Slowness {
    /// Records that a replica applied entries after this time.
    pub fn applied(&mut self, member: Member, took: Duration) {
        match self.members.iter_mut().find(|known| known.member == member) {
            Some(known) => {
                known.took = (known.took * (SMOOTHING - 1) + took) / SMOOTHING;
                known.samples = known.samples.saturating_add(1);
                known.fresh = true;
            }
            None => {
                if self.members.len() >= MEMBERS_MAX {
                    self.members.remove(0);
                }
                self.members.push(Watched {
                    member,
                    took,
                    samples: 1,
                    fresh: true,
                    slow: false,
                    turns_since: None,
                });
            }
        }
    }

    /// Forgets a replica whose session is over: its latency is no evidence for the next session.
    pub fn forget(&mut self, member: Member) {
        self.members.retain(|known| known.member != member);
    }

    /// Returns the average time of a replica, and whether it is slow; `None`: unknown.
    pub fn of(&self, member: Member) -> Option<(Duration, bool)> {
        let known = self.members.iter().find(|known| known.member == member)?;
        (known.samples >= SAMPLES_MIN).then_some((known.took, known.slow))
    }

    /// Compares the replicas, if that is due.
    pub fn look(&mut self, now: Time) -> Vec<Turn> {
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + LOOK_EVERY;
        let known: Vec<(Member, Duration)> = self
            .members
            .iter()
            .filter(|known| known.fresh && known.samples >= SAMPLES_MIN)
            .map(|known| (known.member, known.took))
            .collect();
        let mut turns = Vec::new();
        for watched in &mut self.members {
            let compared = known.iter().any(|(member, _)| *member == watched.member);
            let others = others_of(&known, watched.member);
            watched.fresh = false;
            // Without new samples there is no change of state, in either direction.
            let (true, Some(others)) = (compared, others) else {
                watched.turns_since = None;
                continue;
            };
            let turns_now = match watched.slow {
                false => watched.took >= others * FACTOR + MORE,
                true => watched.took <= others * FACTOR_BACK + MORE_BACK,
            };
            if !turns_now {
                watched.turns_since = None;
            } else if now >= *watched.turns_since.get_or_insert(now) + LASTS {
                watched.slow = !watched.slow;
                watched.turns_since = None;
                let Watched { member, slow, took, .. } = *watched;
                turns.push(Turn { member, slow, took, others });
            }
        }
        turns
    }
}

impl Primary {
    /// Handles a replica's report of the applied LSN, with the time of the newest entries that it
    /// received.
    pub(super) fn compare_writes(
        &mut self,
        now: Time,
        index: usize,
        applied: Lsn,
        ping: Ping,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let peer = &self.members[index];
        // Entries that follow others of the same session measure its recovery.
        let is_measured = peer.link == Link::Fed && self.commit.views.counts(peer.member);
        if !is_measured || applied <= peer.progress.applied || ping.0 == 0 {
            return;
        }
        self.members.slow.applied(peer.member, now.since(Time(ping.0)));
        for Turn { member, slow, took, others } in self.members.slow.look(now) {
            actions.push(PrimaryAction::Note(match slow {
                true => PrimaryNote::Slow { member, took, others },
                false => PrimaryNote::NoLongerSlow { member, took },
            }));
        }
    }
}

/// Median of the others' latency, the lower one of two.
fn others_of(known: &[(Member, Duration)], member: Member) -> Option<Duration> {
    let mut others: Vec<Duration> =
        known.iter().filter(|(other, _)| *other != member).map(|(_, took)| *took).collect();
    others.sort_unstable();
    others.get(others.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};

    fn member(n: u128) -> Member {
        Member { id: ReplicaId(n), guid: ReplicaGuid(n) }
    }

    /// Writes for so many seconds, 20 a second; the latency of each replica is in milliseconds.
    struct Volume {
        slowness: Slowness,
        now: Time,
    }

    impl Volume {
        fn new() -> Self {
            Self { slowness: Slowness::default(), now: Time::from_millis(1) }
        }

        fn writes(&mut self, seconds: u64, took_ms: &[(u128, u64)]) -> Vec<(u128, bool)> {
            let mut turns = Vec::new();
            for _ in 0..seconds * 20 {
                self.now = self.now + Duration::from_millis(50);
                for (n, took) in took_ms {
                    self.slowness.applied(member(*n), Duration::from_millis(*took));
                }
                let found = self.slowness.look(self.now);
                turns.extend(found.iter().map(|turn| (turn.member.id.0, turn.slow)));
            }
            turns
        }
    }

    #[test]
    fn a_replica_that_stays_far_behind_is_reported_once_and_again_when_it_catches_up() {
        let mut volume = Volume::new();
        assert!(volume.writes(30, &[(1, 2), (2, 3), (3, 2)]).is_empty());
        assert_eq!(volume.writes(60, &[(1, 2), (2, 3), (3, 100)]), [(3, true)]);
        assert!(volume.slowness.of(member(3)).unwrap().1);
        assert!(!volume.slowness.of(member(1)).unwrap().1);
        assert_eq!(volume.writes(60, &[(1, 2), (2, 3), (3, 2)]), [(3, false)]);
    }

    #[test]
    fn a_short_delay_is_not_reported_and_neither_is_one_between_slow_and_fast() {
        let mut volume = Volume::new();
        volume.writes(30, &[(1, 2), (2, 3), (3, 2)]);
        assert!(volume.writes(5, &[(1, 2), (2, 3), (3, 100)]).is_empty());
        assert!(volume.writes(60, &[(1, 2), (2, 3), (3, 2)]).is_empty());
        assert!(volume.writes(60, &[(1, 2), (2, 3), (3, 18)]).is_empty());
        volume.writes(60, &[(1, 2), (2, 3), (3, 100)]);
        // Hysteresis: not late enough to become slow, and not fast enough to end it.
        assert!(volume.writes(60, &[(1, 2), (2, 3), (3, 18)]).is_empty());
    }

    #[test]
    fn replicas_that_are_all_far_away_are_not_slow_and_of_two_the_later_one_is() {
        let mut volume = Volume::new();
        assert!(volume.writes(60, &[(1, 200), (2, 210), (3, 205)]).is_empty());
        let mut pair = Volume::new();
        assert_eq!(pair.writes(60, &[(1, 2), (2, 80)]), [(2, true)]);
        let mut most = Volume::new();
        assert_eq!(most.writes(60, &[(1, 2), (2, 80), (3, 80)]), [(2, true), (3, true)]);
        let mut alone = Volume::new();
        assert!(alone.writes(60, &[(1, 500)]).is_empty());
    }

    #[test]
    fn a_replica_that_answers_nothing_or_begins_a_new_session_is_not_judged_by_old_samples() {
        let mut volume = Volume::new();
        volume.writes(60, &[(1, 2), (2, 3), (3, 100)]);
        volume.slowness.forget(member(3));
        assert_eq!(volume.slowness.of(member(3)), None);
        assert!(volume.writes(60, &[(1, 2), (2, 3)]).is_empty());
        assert!(volume.writes(5, &[(1, 2), (2, 3), (3, 100)]).is_empty(), "it lasts first");
    }
}
