//! Signs of life of a node's target: by its reports, and by what the volume's pools hear.
//!
//! A volume is taken from a node only after nobody has heard of it for the node's time-out. The
//! controller's own connection proves little: where it alone is cut, the target serves on with its
//! pools. So the pools are asked too: a pool says of each replica whether a target's lease lives.
//! As many pools as another target needs to open the volume must say that none does.

use std::time::Duration;

use quoin_types::ReplicaGuid;
use quoin_types::membership::open_quorum;
use tokio::time::Instant;

use crate::state::State;
use crate::state::records::VolumeRecord;

/// A pool's word on the target of a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Hearing {
    /// The pool does not say.
    #[default]
    Unknown,
    /// A target's lease lives.
    Hears,
    /// No target's lease lives, and since when, where one lived before.
    Silent(Option<Instant>),
}

impl Hearing {
    /// This word after the pool's word `before`.
    pub(crate) fn after(self, before: Self, now: Instant) -> Self {
        match (self, before) {
            (Self::Silent(_), Self::Hears) => Self::Silent(Some(now)),
            (Self::Silent(_), Self::Silent(since)) => Self::Silent(since),
            (word, _) => word,
        }
    }
}

/// Checks that nobody has heard of a node for its time-out, so that the volume may be taken from it.
/// Returns for how long.
///
/// # Errors
/// Names the pool that heard of it, or says why that cannot be told.
pub(crate) fn check_silent(
    state: &State,
    volume: &VolumeRecord,
    node: &str,
) -> Result<Duration, String> {
    let observed = state.observed();
    let last = observed.nodes.get(node).map_or(observed.started, |seen| seen.last);
    let word = |pool: &str, guid: &ReplicaGuid| {
        let pool = observed.heard_pool(pool, state.settings.offline_after)?;
        Some(pool.replicas.get(guid)?.hearing)
    };
    let known = volume.replicas.iter().filter(|replica| volume.is_known(replica));
    let words: Vec<_> =
        known.map(|r| (r.pool.as_str(), word(&r.pool, &r.guid.0).unwrap_or_default())).collect();
    let needed = open_quorum(volume.membership.rf, volume.membership.cf);
    judge(last, &words, needed.into(), state.settings.node_timeout, Instant::now())
}

/// Judges by the node's last report and the words of the pools.
fn judge(
    last: Instant,
    words: &[(&str, Hearing)],
    needed: usize,
    timeout: Duration,
    now: Instant,
) -> Result<Duration, String> {
    let mut silence = now.duration_since(last);
    if silence < timeout {
        return Err(format!("it reported {} s ago", silence.as_secs()));
    }
    let mut silent = 0;
    for (pool, word) in words {
        match word {
            Hearing::Unknown => {}
            Hearing::Hears => return Err(format!("pool {pool} hears its target")),
            Hearing::Silent(since) => {
                silent += 1;
                let since = since.map(|since| now.duration_since(since));
                if let Some(since) = since.filter(|since| *since < timeout) {
                    return Err(format!("pool {pool} heard its target {} s ago", since.as_secs()));
                }
                silence = silence.min(since.unwrap_or(silence));
            }
        }
    }
    if silent < needed {
        return Err(format!(
            "{silent} pools of the volume say that they hear no target of it, and {needed} must"
        ));
    }
    Ok(silence)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn ago(now: Instant, s: u64) -> Instant {
        now - Duration::from_secs(s)
    }

    #[tokio::test]
    async fn a_node_is_silent_once_neither_the_controller_nor_a_pool_has_heard_of_it_for_so_long() {
        let now = Instant::now() + Duration::from_secs(3600);
        let silent = Hearing::Silent(None);
        let judged = |last, words: [Hearing; 3]| {
            let pools = ["a", "b", "c"].into_iter().zip(words).collect::<Vec<_>>();
            judge(ago(now, last), &pools, 2, TIMEOUT, now)
        };
        assert_eq!(judged(12, [silent; 3]), Ok(Duration::from_secs(12)));
        assert!(judged(9, [silent; 3]).unwrap_err().contains("9 s ago"));
        // The controller's link alone is cut: the target serves on.
        let heard = judged(60, [silent, Hearing::Hears, silent]).unwrap_err();
        assert_eq!(heard, "pool b hears its target");
        let lately = Hearing::Silent(Some(ago(now, 3)));
        let heard = judged(60, [silent, silent, lately]).unwrap_err();
        assert!(heard.contains("pool c heard its target 3 s ago"), "{heard}");
        let since = Hearing::Silent(Some(ago(now, 11)));
        assert_eq!(judged(60, [since, silent, silent]), Ok(Duration::from_secs(11)));
        // Pools that are away may hear it.
        assert!(judged(60, [silent, Hearing::Unknown, Hearing::Unknown]).is_err());
        assert!(judged(60, [silent, silent, Hearing::Unknown]).is_ok());
    }

    #[tokio::test]
    async fn the_moment_of_the_last_sign_of_life_is_kept_over_reports() {
        let now = Instant::now();
        let ended = Hearing::Silent(None).after(Hearing::Hears, now);
        assert_eq!(ended, Hearing::Silent(Some(now)));
        let later = now + Duration::from_secs(5);
        assert_eq!(Hearing::Silent(None).after(ended, later), ended);
        assert_eq!(Hearing::Hears.after(ended, later), Hearing::Hears);
        assert_eq!(Hearing::Silent(None).after(Hearing::Unknown, now), Hearing::Silent(None));
    }
}
