//! Limits of a volume: they hold within a burst of a second's worth, nothing waits without need,
//! requests keep their order, and no turn of the timer is for nothing.

use std::collections::{BTreeMap, VecDeque};

use quoin_types::Time;

use super::{Broken, Checker, Observation, Scene, broken};

/// IOs and bytes are counted in billionths, so that a nanosecond counts.
const UNIT: u128 = 1_000_000_000;

/// By target, what its process let pass and what waits there.
#[derive(Default)]
pub(crate) struct LimitRules {
    targets: BTreeMap<usize, Passed>,
}

#[derive(Default)]
struct Passed {
    at: Time,
    ios: Used,
    bytes: Used,
    /// Waiting requests: the client's queue, and the token.
    waiting: VecDeque<(usize, u64)>,
}

/// How much more passed than the limit's rate allows in the time since.
#[derive(Default)]
struct Used(u128);

impl Used {
    fn decay(&mut self, per_s: u64, elapsed_ns: u128) {
        self.0 = self.0.saturating_sub(u128::from(per_s) * elapsed_ns);
    }

    /// Returns true if a second's worth is used up.
    fn is_used_up(&self, per_s: u64) -> bool {
        per_s > 0 && self.0 >= u128::from(per_s) * UNIT
    }

    fn add(&mut self, amount: u64) {
        self.0 += u128::from(amount) * UNIT;
    }
}

impl Checker for LimitRules {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        let limits = scene.operators.limits.limits();
        match *seen {
            Observation::TargetStarted { target } => {
                let host = scene.targets[target].host;
                self.targets.insert(target, Passed { at: scene.local(host), ..Passed::default() });
                Ok(())
            }
            Observation::LimitAsked { target, queue, token } => {
                self.of(target).waiting.push_back((queue, token));
                Ok(())
            }
            Observation::LimitForgotten { target, queue } => {
                self.of(target).waiting.retain(|(of, _)| *of != queue);
                Ok(())
            }
            Observation::LimitTurn { target, passed: 0 } => broken(
                "LimitTurns",
                format!("target {target} wakes for its limits and lets nothing pass"),
            ),
            Observation::LimitHeld { target, at } => {
                let passed = self.of(target);
                passed.decay(limits.ios_per_s, limits.bytes_per_s, at);
                let used_up = passed.ios.is_used_up(limits.ios_per_s)
                    || passed.bytes.is_used_up(limits.bytes_per_s);
                if passed.waiting.len() == 1 && !used_up {
                    return broken("LimitsHold", format!("target {target} delays without need"));
                }
                Ok(())
            }
            Observation::LimitPassed { target, at, token, bytes } => {
                let passed = self.of(target);
                passed.decay(limits.ios_per_s, limits.bytes_per_s, at);
                if passed.waiting.pop_front().is_none_or(|(_, first)| first != token) {
                    let detail = format!("request {token} of target {target} overtakes others");
                    return broken("LimitsHold", detail);
                }
                if passed.ios.is_used_up(limits.ios_per_s)
                    || passed.bytes.is_used_up(limits.bytes_per_s)
                {
                    let detail = format!("request {token} of target {target} is over the limits");
                    return broken("LimitsHold", detail);
                }
                passed.ios.add(1);
                passed.bytes.add(bytes);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl LimitRules {
    fn of(&mut self, target: usize) -> &mut Passed {
        self.targets.entry(target).or_default()
    }
}

impl Passed {
    fn decay(&mut self, ios_per_s: u64, bytes_per_s: u64, now: Time) {
        let elapsed_ns = now.since(self.at).as_nanos();
        self.ios.decay(ios_per_s, elapsed_ns);
        self.bytes.decay(bytes_per_s, elapsed_ns);
        self.at = self.at.max(now);
    }
}
