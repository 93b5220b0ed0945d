//! What one volume of a group tells of itself ([`super::groups`]): its targets' answers to steps of
//! points, and what its clients asked and were shown, by the time that all volumes share.

use std::collections::{BTreeMap, BTreeSet};

use quoin_replication::group_point::PointAnswer;
use quoin_replication::primary::{HOLD_MS_MAX, PointOutcome, PrimaryNote};
use quoin_types::ids::PointId;

use super::World;
use crate::content::{SECTORS, Tag};
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::swarm::Swarm;
use crate::workload::Draft;

/// Time beyond the longest hold after which one is taken for endless. Clocks drift less.
const SLACK: u64 = SECOND;
/// A target that comes out of a pause acts within this time.
const ACTS_WITHIN: u64 = 500 * MILLISECOND;

/// A hold that a target has told of.
#[derive(Clone, Copy, Debug)]
struct Held {
    target: usize,
    life: u32,
    point: PointId,
    since: Instant,
    /// Since when it is overdue at a target that runs.
    overdue_since: Option<Instant>,
}

/// Part of a run with groups; without them nothing is kept.
#[derive(Default)]
pub(crate) struct Points {
    is_on: bool,
    /// Answers that are not on their way to the coordinator yet.
    pub answers: Vec<(Option<PointId>, PointAnswer)>,
    /// When each write was issued.
    pub issued: BTreeMap<Tag, Instant>,
    /// When an effect was first shown: a block's write was answered, or a read showed it.
    shown: BTreeMap<(Tag, u64), Instant>,
    held: Vec<Held>,
}

impl Points {
    pub fn draw(swarm: Swarm) -> Self {
        Self { is_on: swarm == Swarm::Groups, ..Self::default() }
    }

    pub fn was_issued(&mut self, tag: Tag, now: Instant) {
        if self.is_on {
            self.issued.insert(tag, now);
        }
    }

    /// Effects that were shown before this instant.
    pub fn shown_before(&self, at: Instant) -> impl Iterator<Item = (Tag, u64)> {
        let before = self.shown.iter().filter(move |(_, shown)| **shown < at);
        before.map(|(effect, _)| *effect)
    }
}

impl World {
    /// A request was answered well.
    pub(crate) fn effect_shown(&mut self, tag: Tag) {
        if !self.operators.points.is_on {
            return;
        }
        let (now, op) = (self.schedule.now(), self.checkers.history.op(tag));
        let whole = SECTORS as u64;
        let effects: BTreeSet<(Tag, u64)> = match op.draft {
            Draft::Write { sector, sectors, .. } => {
                (sector / whole..(sector + sectors).div_ceil(whole)).map(|b| (tag, b)).collect()
            }
            Draft::Read { sector, .. } => {
                let seen = op.seen.iter().enumerate().filter(|(_, tag)| **tag != 0);
                seen.map(|(n, tag)| (*tag, (sector + n as u64) / whole)).collect()
            }
            _ => return,
        };
        for effect in effects {
            self.operators.points.shown.entry(effect).or_insert(now);
        }
    }

    /// Takes note of what a target says of points and of snapshots.
    pub(crate) fn point_noted(&mut self, target: usize, life: u32, note: &PrimaryNote) {
        let since = self.schedule.now();
        let points = &mut self.operators.points;
        if !points.is_on {
            return;
        }
        match *note {
            PrimaryNote::Point { point, outcome } => {
                let is_it = |held: &Held| (held.target, held.point) == (target, point);
                match outcome {
                    PointOutcome::Held if !points.held.iter().any(is_it) => {
                        let overdue_since = None;
                        points.held.push(Held { target, life, point, since, overdue_since });
                    }
                    PointOutcome::Released { .. } => points.held.retain(|held| !is_it(held)),
                    _ => {}
                }
                points.answers.push((Some(point), PointAnswer::Step(outcome)));
            }
            PrimaryNote::Snapshot { id, outcome } => {
                points.answers.push((None, PointAnswer::Snapshot { id, outcome }));
            }
            _ => {}
        }
    }

    /// HoldBounded: a target that runs ends each hold in time.
    pub(crate) fn check_holds(&mut self) {
        let now = self.schedule.now();
        let mut endless = None;
        let targets = &self.targets;
        self.operators.points.held.retain_mut(|held| {
            let host = &targets[held.target];
            if host.life != held.life || host.process.is_none() {
                return false;
            }
            let most = u64::from(HOLD_MS_MAX) * MILLISECOND + SLACK;
            let stands = host.paused || host.process.as_ref().is_some_and(|p| p.is_stalled());
            if stands || now < held.since + most {
                held.overdue_since = None;
                return true;
            }
            let since = *held.overdue_since.get_or_insert(now);
            if now - since > ACTS_WITHIN {
                endless = Some(*held);
            }
            true
        });
        if let Some(held) = endless {
            self.violate("HoldBounded", format!("{held:?} did not end"));
        }
    }
}
