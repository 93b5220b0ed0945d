//! Rounds of a rebuild: measures whether they gain on the writers.
//!
//! Writes of clients during a round are copied in the next round, each block once however often it
//! was written. A round gains if it copied at most three quarters of what the round before it
//! copied: so every round leaves less than it found. After a round that did not gain, clients' IO
//! may take twice as long beside the rebuild as otherwise. After [`STUBBORN`] such rounds in a row
//! the rebuild takes precedence: it is no longer paced, and the writers are held back so far that
//! the next round must gain. They may write half of what the rebuild copies, and a share of the
//! catch-up limit ([`Primary::catch_up_bytes`]). The rest then shrinks with each round until it
//! fits that limit and plain entries end the rebuild.
//!
//! This is no guarantee: if writers fill the limit faster than an increment's syncs take, a round
//! that gains is followed by rounds that do not, and the hold-back may be used up. This is the one
//! place where a replica that is no part of any quorum slows the volume, so it has bounds. A
//! replica without progress holds back no writer, and no hold-back lasts longer than [`HOLD`] of
//! [`HOLD`] and [`REST`]. A replica that is slower than that stays out of sync.

use std::time::Duration;

use super::{Link, Primary};
use quoin_types::time::Time;

/// Limit of rounds in a row that did not gain.
const STUBBORN: u32 = 2;
const HOLD: Duration = Duration::from_secs(5);
const REST: Duration = Duration::from_secs(25);
/// Writers are not held back for a rebuild that made no progress for this long.
const STILL: Duration = Duration::from_millis(500);

/// Time after a return for which a replica must not be lost to the same writers.
const SETTLED: Duration = Duration::from_secs(10);

/// A replica's increments since it was last in sync.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Rounds {
    count: u32,
    pub moved_bytes: u64,
    told_bytes: u64,
    /// Total bytes written when the last round began.
    mark: u64,
    /// Total bytes copied when the last round began.
    moved_mark: u64,
    /// Bytes that the last round but this one copied.
    copied_before: u64,
    /// Number of rounds in a row that did not gain.
    stubborn: u32,
    held_since: Option<Time>,
    in_sync_since: Option<Time>,
}

impl Rounds {
    /// Begins the next round; `written`: total bytes ever written.
    pub fn begin(&mut self, written: u64) {
        if self.count > 0 {
            let copied = self.moved_bytes.saturating_sub(self.moved_mark);
            if self.count > 1 {
                let gained = copied <= self.copied_before / 4 * 3;
                self.stubborn = if gained { 0 } else { self.stubborn + 1 };
            }
            self.copied_before = copied;
        }
        self.count += 1;
        self.moved_mark = self.moved_bytes;
        self.mark = written;
    }

    /// Returns bytes copied and rounds; each byte is reported once.
    pub fn tell(&mut self) -> (u64, u32) {
        let before = std::mem::replace(&mut self.told_bytes, self.moved_bytes);
        (self.moved_bytes - before, self.count)
    }

    /// Factor by which clients' IO may take longer beside this rebuild than beside others.
    pub fn patience(&self) -> u64 {
        1 + u64::from(self.stubborn)
    }

    pub fn takes_precedence(&self) -> bool {
        self.stubborn >= STUBBORN
    }

    /// Returns true if writers are too far ahead for the round to gain: they may be ahead by a
    /// share of the catch-up limit and half of what this round `copied`. All in bytes.
    fn is_outrun(&self, written: u64, catch_up: u64, copied: u64) -> bool {
        written.saturating_sub(self.mark) > catch_up * 3 / 4 + copied / 2
    }
}

impl Primary {
    /// Called once for each batch: decides whether writers are held back, and until when at most.
    pub(super) fn mind_rounds(&mut self, now: Time) {
        self.rebuilds.release_writes();
        let written = self.history.weight();
        let window = self.config.window_bytes as u64;
        let catch_up = self.catch_up_bytes() as u64;
        for index in 0..self.members.len() {
            let counts = self.commit.views.counts(self.members[index].member);
            let peer = &mut self.members[index];
            if counts && peer.link == Link::Fed {
                let since = *peer.rounds.in_sync_since.get_or_insert(now);
                if !peer.rounds.takes_precedence() || now >= since + SETTLED {
                    peer.rounds = Rounds::default();
                }
            } else {
                peer.rounds.in_sync_since = None;
            }
            if !peer.rounds.takes_precedence() || now < peer.lasting.return_at {
                continue;
            }
            let (too_far, moved) = match (&peer.rebuild, peer.link) {
                (Some(rebuild), Link::Rebuilding) => {
                    let copied = rebuild.round_bytes();
                    (peer.rounds.is_outrun(written, catch_up, copied), rebuild.moved())
                }
                // The limit that lets the replica return at once, or stay.
                (_, Link::Fed) => {
                    let allowed = if counts { window / 2 } else { window / 4 };
                    let behind = self.history.weight_after(peer.progress.applied) as u64;
                    (behind > allowed, peer.progress.behind_since.unwrap_or(now))
                }
                _ => continue,
            };
            if !too_far || now >= moved + STILL {
                continue;
            }
            let since = *peer.rounds.held_since.get_or_insert(now);
            if now >= since + HOLD + REST {
                peer.rounds.held_since = Some(now);
            }
            let since = peer.rounds.held_since.unwrap_or(now);
            if now < since + HOLD {
                let until = (moved + STILL).min(since + HOLD);
                self.rebuilds.hold_writes_back(until);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a round that copies this much, and begins another one.
    fn round(rounds: &mut Rounds, copies: u64) -> u64 {
        rounds.moved_bytes += copies;
        rounds.begin(0);
        assert_eq!(rounds.takes_precedence(), rounds.patience() > 2);
        rounds.patience()
    }

    #[test]
    fn rounds_that_shrink_by_a_quarter_never_take_precedence_and_others_do_after_two() {
        let mut rounds = Rounds::default();
        rounds.begin(0);
        for copies in [4000, 3000, 2248, 1684] {
            assert_eq!(round(&mut rounds, copies), 1, "{copies}");
        }
        assert_eq!(round(&mut rounds, 1264), 2);
        assert_eq!(round(&mut rounds, 948), 1, "it gained");
        assert_eq!(round(&mut rounds, 900), 2);
        assert_eq!(round(&mut rounds, 900), 3);
        assert_eq!(round(&mut rounds, 300), 1);
    }

    #[test]
    fn writers_may_be_ahead_by_three_quarters_of_the_catch_up_and_half_of_what_was_copied() {
        let mut rounds = Rounds::default();
        rounds.begin(1000);
        for (copied, most) in [(0, 1300), (200, 1400), (2000, 2300)] {
            assert!(!rounds.is_outrun(most, 400, copied), "{copied}");
            assert!(rounds.is_outrun(most + 1, 400, copied), "{copied}");
        }
    }
}
