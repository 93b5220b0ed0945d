//! Signs of life of a node's target: by its reports, and by what the volume's pools hear.
//!
//! A node loses its volume only when its time-out has passed without a sign of life. The
//! controller's own connection proves little: where it alone is cut, the target serves on with its
//! pools. So the pools are asked too: a pool says of each replica whether a target's lease lives.
//! As many pools as another target needs to open the volume must say that none does, and have said so
//! for the time-out. A target that those do not hear serves nothing, as it has no quorum without one of
//! them. A lease that other pools report then stops nothing, and is an event: such a pool is mistaken, or
//! its link to the target alone is whole.

use std::time::Duration;

use quoin_types::membership::open_quorum;
use quoin_types::{Time, mutant};

use crate::records::{ReplicaRecord, VolumeRecord};

/// A pool's word on the target of a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Hearing {
    /// The pool does not say.
    #[default]
    Unknown,
    /// A target's lease lives.
    Hears,
    /// No target's lease lives, and since when, where one lived before.
    Silent(Option<Time>),
}

impl Hearing {
    /// This word after the pool's word `before`.
    pub fn after(self, before: Self, now: Time) -> Self {
        match (self, before) {
            (word @ Self::Silent(_), Self::Unknown)
                if mutant::is("first-silence-taken-for-a-long-one") =>
            {
                word
            }
            // A pool whose first word this is may have heard a target a moment ago.
            (Self::Silent(_), Self::Hears | Self::Unknown) => Self::Silent(Some(now)),
            (Self::Silent(_), Self::Silent(since)) => Self::Silent(since),
            (word, _) => word,
        }
    }

    /// This word once the pool reports again that was away ([`was_away`]): silence counts from now on.
    #[must_use]
    pub fn after_a_pause(self, now: Time) -> Self {
        match self {
            Self::Silent(_) => Self::Silent(Some(now)),
            word => word,
        }
    }
}

/// Returns true if a pool that was heard of at `last` was away: a target may have lived and ended meanwhile.
pub fn was_away(last: Time, offline_after: Duration, now: Time) -> bool {
    now.since(last) >= offline_after
}

/// Silence of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Silence {
    /// For how long neither the controller nor enough pools have heard of it.
    pub lasts: Duration,
    /// Pools that say otherwise, in words; empty: none does.
    pub dissent: String,
}

/// Checks that a quorum has not heard of a node for its time-out, so that the volume may be taken from
/// it. `last`: when it reported, or when the controller began to listen. `word`: what the pool of a
/// replica says.
///
/// # Errors
/// Names the pools that heard of it, or says why they are not known.
pub fn check_silent(
    volume: &VolumeRecord,
    last: Time,
    word: impl Fn(&ReplicaRecord) -> Hearing,
    timeout: Duration,
    now: Time,
) -> Result<Silence, String> {
    let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
    let words: Vec<_> = known.map(|replica| (replica.pool.as_str(), word(replica))).collect();
    let needed = match mutant::is("one-silent-pool-is-enough") {
        true => 1,
        false => open_quorum(volume.membership.rf, volume.membership.cf),
    };
    judge(last, &words, needed.into(), timeout, now)
}

/// Judges by the node's last report and the words of the pools.
fn judge(
    last: Time,
    words: &[(&str, Hearing)],
    needed: usize,
    timeout: Duration,
    now: Time,
) -> Result<Silence, String> {
    let mut lasts = now.since(last);
    if lasts < timeout {
        return Err(format!("it reported {} s ago", lasts.as_secs()));
    }
    let (mut silences, mut dissent) = (Vec::new(), Vec::new());
    for (pool, word) in words {
        match word {
            Hearing::Unknown => {}
            Hearing::Hears => dissent.push(format!("pool {pool} hears its target")),
            Hearing::Silent(since) => match since.map(|since| now.since(since)) {
                Some(since) if since < timeout => {
                    dissent.push(format!("pool {pool} heard its target {} s ago", since.as_secs()));
                }
                since => silences.push(since),
            },
        }
    }
    if silences.len() < needed && !dissent.is_empty() {
        return Err(dissent.join(", "));
    }
    if silences.len() < needed {
        return Err(format!(
            "{} pools of the volume say that they hear no target of it, and {needed} must",
            silences.len()
        ));
    }
    // So long has a quorum been silent: the longest silences count.
    silences.sort_by_key(|since| std::cmp::Reverse(since.unwrap_or(Duration::MAX)));
    let counted = silences.into_iter().take(needed).flatten();
    lasts = counted.fold(lasts, Duration::min);
    Ok(Silence { lasts, dissent: dissent.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_the_end_of_a_pause_in_which_the_pool_was_not_heard_of() {
        let (long_ago, now) = (Time::from_millis(1), Time::from_millis(60_000));
        for since in [None, Some(long_ago)] {
            let paused = Hearing::Silent(since).after_a_pause(now);
            assert_eq!(Hearing::Silent(None).after(paused, now), Hearing::Silent(Some(now)));
        }
        assert_eq!(Hearing::Hears.after_a_pause(now), Hearing::Hears);
        assert_eq!(Hearing::Unknown.after_a_pause(now), Hearing::Unknown);
    }

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn ago(now: Time, s: u64) -> Time {
        now - Duration::from_secs(s)
    }

    #[test]
    fn a_node_is_silent_once_neither_the_controller_nor_a_pool_has_heard_of_it_for_so_long() {
        let now = Time::from_millis(3_600_000);
        let silent = Hearing::Silent(None);
        let judged = |last, words: [Hearing; 3]| {
            let pools = ["a", "b", "c"].into_iter().zip(words).collect::<Vec<_>>();
            judge(ago(now, last), &pools, 2, TIMEOUT, now)
        };
        let silence = |s, dissent: &str| {
            Ok(Silence { lasts: Duration::from_secs(s), dissent: dissent.to_owned() })
        };
        assert_eq!(judged(12, [silent; 3]), silence(12, ""));
        assert!(judged(9, [silent; 3]).unwrap_err().contains("9 s ago"));
        // The controller's link alone is cut: the target serves on.
        let heard = judged(60, [silent, Hearing::Hears, Hearing::Hears]).unwrap_err();
        assert_eq!(heard, "pool b hears its target, pool c hears its target");
        let lately = Hearing::Silent(Some(ago(now, 3)));
        let heard = judged(60, [silent, lately, lately]).unwrap_err();
        assert!(heard.contains("pool c heard its target 3 s ago"), "{heard}");
        let heard = judged(60, [silent, Hearing::Hears, Hearing::Unknown]).unwrap_err();
        assert_eq!(heard, "pool b hears its target");
        let since = Hearing::Silent(Some(ago(now, 11)));
        assert_eq!(judged(60, [since, since, silent]), silence(11, ""));
        assert_eq!(judged(60, [since, silent, silent]), silence(60, ""), "two are enough");
        // One pool stops nothing that a quorum says, for ever or for a while, and is named.
        let dissent = judged(60, [silent, Hearing::Hears, silent]);
        assert_eq!(dissent, silence(60, "pool b hears its target"));
        let dissent = judged(60, [lately, silent, since]);
        assert_eq!(dissent, silence(11, "pool a heard its target 3 s ago"));
        // Pools that are away may hear it.
        assert!(judged(60, [silent, Hearing::Unknown, Hearing::Unknown]).is_err());
        assert!(judged(60, [silent, silent, Hearing::Unknown]).is_ok());
    }

    #[test]
    fn the_moment_of_the_last_sign_of_life_is_kept_over_reports() {
        let now = Time::from_millis(3_600_000);
        let ended = Hearing::Silent(None).after(Hearing::Hears, now);
        assert_eq!(ended, Hearing::Silent(Some(now)));
        let later = now + Duration::from_secs(5);
        assert_eq!(Hearing::Silent(None).after(ended, later), ended);
        assert_eq!(Hearing::Hears.after(ended, later), Hearing::Hears);
    }

    #[test]
    fn a_pool_that_says_for_the_first_time_that_it_hears_nothing_is_silent_from_then_on() {
        let now = Time::from_millis(3_600_000);
        let first = Hearing::Silent(None).after(Hearing::Unknown, ago(now, 3));
        assert_eq!(first, Hearing::Silent(Some(ago(now, 3))));
        let words = [("a", first), ("b", first), ("c", Hearing::Unknown)];
        assert!(judge(ago(now, 60), &words, 2, TIMEOUT, now).is_err());
    }
}
