//! Clocks of members that differ from the controller's.
//!
//! Members measure the difference with each call and report it with the next one. It is shown and
//! reported, and decides nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quoin_api::control as api;
use quoin_identity::{ClockDifference, Peer, Role};

use crate::state::State;
use crate::state::events::{Object, Severity};

/// Clocks that are further apart are reported.
const DIFFERS: Duration = Duration::from_secs(5);
/// A difference that was reported longer ago says nothing of the present.
const LASTS: Duration = Duration::from_secs(300);

fn key(role: Role, name: &str) -> String {
    format!("{role}/{name}")
}

/// As `5d`, `3h` or `12s`: a clock that is wrong is wrong by days or by seconds.
struct Apart(u64);

impl std::fmt::Display for Apart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0 / 1000;
        match seconds {
            0..120 => write!(f, "{seconds} s"),
            120..7200 => write!(f, "{} min", seconds / 60),
            7200..172_800 => write!(f, "{} hours", seconds / 3600),
            _ => write!(f, "{} days", seconds / 86_400),
        }
    }
}

struct Told {
    role: Role,
    name: String,
    difference: ClockDifference,
    at: Instant,
    /// An event has reported that it differs.
    differs: bool,
}

/// Differences, by role and name. Members that ask are known by their certificate, so there are no more
/// than members.
pub struct Clocks {
    state: Arc<State>,
    told: Mutex<BTreeMap<String, Told>>,
}

impl Clocks {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, told: Mutex::default() }
    }

    fn told(&self) -> MutexGuard<'_, BTreeMap<String, Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in the difference that a member reported with a request.
    pub(crate) fn heard(&self, peer: &Peer, difference: ClockDifference) {
        if !matches!(peer.role, Role::Pool | Role::Node) {
            return;
        }
        let differs = difference.is_beyond(DIFFERS);
        let turned = {
            let mut told = self.told();
            let (role, name) = (peer.role, peer.name.clone());
            let now = Told { role, name, difference, at: Instant::now(), differs };
            let before = told.insert(key(peer.role, &peer.name), now);
            before.is_some_and(|before| before.differs) != differs
        };
        if !turned {
            return;
        }
        let by = key(peer.role, &peer.name);
        let about = Object::new(peer.role.as_str(), &peer.name, &peer.name);
        let (severity, reason, message) = match differs {
            true => {
                (Severity::Warning, "ClockDiffers", self.words(peer.role, &peer.name, difference))
            }
            false => {
                let message = "its clock agrees with the controller's again".to_owned();
                (Severity::Normal, "ClockAgrees", message)
            }
        };
        self.state.events.record_of(&by, severity, about, reason, message);
    }

    fn words(&self, role: Role, name: &str, difference: ClockDifference) -> String {
        let host = match role {
            Role::Pool => self.state.pools.get(name).map(|pool| pool.node.clone()),
            _ => None,
        };
        let host = host.unwrap_or_else(|| name.to_owned());
        let apart = Apart(difference.ahead_ms.unsigned_abs());
        let word = if difference.ahead_ms < 0 { "behind" } else { "ahead of" };
        format!(
            "the clock of host {host} is {apart} {word} the controller's: set the one that is wrong, and \
             keep both set (NTP)"
        )
    }

    /// The difference of one member, in words; `None`: its clock agrees, or nothing is known.
    pub(crate) fn message(&self, role: Role, name: &str) -> Option<String> {
        let difference = {
            let told = self.told();
            let known = told.get(&key(role, name))?;
            (known.differs && known.at.elapsed() < LASTS).then_some(known.difference)?
        };
        Some(self.words(role, name, difference))
    }

    /// All members whose clocks differ. Where most of those that are heard differ alike, the
    /// controller's is the one that is wrong.
    pub(crate) fn all(&self) -> Vec<api::ClockDiffers> {
        let (heard, differing) = {
            let told = self.told();
            let live: Vec<_> = told.values().filter(|known| known.at.elapsed() < LASTS).collect();
            let differing: Vec<_> = live
                .iter()
                .filter(|known| known.differs)
                .map(|known| (known.role, known.name.clone(), known.difference))
                .collect();
            (live.len(), differing)
        };
        let mut all: Vec<_> = differing
            .iter()
            .map(|(role, name, difference)| api::ClockDiffers {
                member: format!("{role} {name}"),
                ahead_ms: difference.ahead_ms,
                message: self.words(*role, name, *difference),
            })
            .collect();
        let ahead = differing.iter().filter(|(_, _, difference)| difference.ahead_ms > 0).count();
        let most = ahead.max(differing.len() - ahead);
        if heard > 1 && most * 2 > heard {
            all.insert(0, api::ClockDiffers {
                member: "controller".to_owned(),
                ahead_ms: 0,
                message: format!(
                    "{most} of {heard} members differ from the controller in one direction: check the \
                     clock of the controller's own host first"
                ),
            });
        }
        all
    }
}
