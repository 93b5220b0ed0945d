//! An orchestrator, its managers and its clean-up; and the faults.

use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::{Action, Role};
use quoin_types::ids::VolumeId;

use super::volume::Volume;
use super::{MirrorEvent, Mirrors};
use crate::schedule::SECOND;
use crate::world::person::{self, Person};

/// Goal of a manager, who asks for it again and again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Orchestrator {
    /// The side that is to be primary, and whether with force.
    goal: Option<(usize, bool)>,
    tries: u64,
}

impl Person for Mirrors {
    fn asks(&mut self, side: usize, call: Call) -> Option<Answer> {
        self.call(side, call)
    }

    fn picks(&mut self) -> usize {
        self.random.index(2)
    }
}

impl Mirrors {
    pub(super) fn call(&mut self, side: usize, call: Call) -> Option<Answer> {
        let now = self.brain_now(side);
        // Two managers may ask two processes.
        let which = self.random.index(self.sides[side].brains.len().max(1));
        let to = &mut self.sides[side];
        let (number, brain) = to.brains.get_mut(which)?;
        let (number, role) = (*number, brain.record().role);
        let mut actions = Vec::new();
        let answer = brain.call(now, call, &mut actions);
        self.say(|| format!("{side}: {call:?} as {role:?} -> {answer:?}"));
        let is_clean_up = matches!(
            call,
            Call::Disable | Call::Delete(_) | Call::RemoveMembers | Call::DeleteGroup
        );
        let stores = actions.iter().any(|action| matches!(action, Action::Store { .. }));
        let is_ok = matches!(answer, Answer::Ok | Answer::NotYet);
        if is_clean_up && role.is_copy() && (stores || !is_ok) {
            self.violate("CleanupHarmless", format!("{side}: {call:?} of a {role:?}: {answer:?}"));
        }
        self.act(side, number, actions);
        Some(answer)
    }

    pub(super) fn publish(&mut self, side: usize, volume: VolumeId) {
        // The answer of the process whose records are the stored ones counts.
        let to = &mut self.sides[side];
        if !to.is_recorded && to.has_volumes {
            // An ordinary volume.
            return to.volumes.get_mut(&volume).into_iter().for_each(Volume::publish);
        }
        let now = self.brain_now(side);
        let to = &mut self.sides[side];
        let (stored, version) = (to.stored(), to.version);
        let Some((_, brain)) = to.brains.first_mut() else { return };
        let is_current = brain.record() == &stored;
        let answer = brain.call(now, Call::Publish(volume), &mut Vec::new());
        // An attachment is a change of the volume's record, which a demotion changes first.
        let may = is_current && answer == Answer::Ok && stored.role == Role::Primary && version > 0;
        if let Some(target) = to.volumes.get_mut(&volume).filter(|_| may) {
            target.publish();
        }
    }

    pub(super) fn orchestrate(&mut self) {
        for side in 0..2 {
            self.check_sync_time(side);
        }
        if self.is_calm {
            let records = [self.sides[0].stored(), self.sides[1].stored()];
            person::decide(self, &records);
            self.end_application();
            self.schedule.after(3 * SECOND, MirrorEvent::Orchestrate);
            return;
        }
        if self.managers.is_some() {
            return self.turns();
        }
        let side = self.random.index(2);
        match self.random.below(10) {
            0..=3 => self.manage(),
            4..=6 => self.clean_up(side),
            7 => {
                self.call(side, Call::Resync { force: true });
            }
            8 => {
                let force = self.random.percent(50);
                self.call(side, Call::Demote { force });
            }
            _ => {
                let force = self.random.percent(self.settings.forced_percent);
                self.call(side, Call::Promote { force });
            }
        }
        let (low, high) = self.settings.calls_every;
        let next = self.random.between(low * SECOND / 4, high * SECOND / 4);
        self.schedule.after(next, MirrorEvent::Orchestrate);
    }

    /// A relocation or a failover, as a manager drives it: until the goal is there, or it is given up.
    fn manage(&mut self) {
        let (to, force) = match self.orchestrator.goal {
            Some(goal) => goal,
            None => {
                let force = self.random.percent(self.settings.forced_percent);
                (self.random.index(2), force)
            }
        };
        self.orchestrator.goal = Some((to, force));
        self.orchestrator.tries += 1;
        if !force {
            self.call(1 - to, Call::Demote { force: true });
        }
        let answer = self.call(to, Call::Promote { force });
        if answer == Some(Answer::Ok) || self.orchestrator.tries > 12 {
            self.orchestrator = Orchestrator::default();
            self.clean_up(1 - to);
        }
    }

    /// The calls of a clean-up, in any order and more than once.
    pub(super) fn clean_up(&mut self, side: usize) {
        let role = self.sides[side].stored().role;
        // A disaster-recovery orchestrator cleans up the side that it left.
        if !role.is_copy() {
            return;
        }
        let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
        for _ in 0..self.random.between(1, 6) {
            let volume = *self.random.pick(&members);
            let calls =
                [Call::Disable, Call::Delete(volume), Call::RemoveMembers, Call::DeleteGroup];
            let call = *self.random.pick(&calls);
            self.call(side, call);
        }
    }

    pub(super) fn fault(&mut self) {
        if self.is_calm {
            return;
        }
        let side = self.random.index(2);
        match self.random.below(if self.settings.restores { 12 } else { 8 }) {
            0 => self.kill_brain(side),
            1 | 2 => {
                self.link[side] = false;
                if self.random.percent(50) {
                    self.link[1 - side] = false;
                }
                let back = self.random.between(1, 90) * SECOND;
                self.say(|| format!("the link of {side} is cut"));
                (0..2).for_each(|side| self.schedule.after(back, MirrorEvent::LinkBack(side)));
            }
            3 => {
                self.set_mirror(side, false);
                let back = self.random.between(1, 50) * SECOND;
                self.schedule.after(back, MirrorEvent::MirrorBack(side));
            }
            4 | 5 => {
                let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
                let volume = *self.random.pick(&members);
                let keeps = self.random.percent(30);
                if let Some(target) = self.sides[side].volumes.get_mut(&volume) {
                    target.kill_target(keeps);
                }
                self.say(|| format!("{side}: the target of {volume:?} is killed"));
            }
            6 | 7 => self.start_brain(side),
            _ => self.restore(side),
        }
        let (low, high) = self.settings.faults_every;
        let next = self.random.between(low * SECOND, high * SECOND);
        self.schedule.after(next, MirrorEvent::Fault);
    }
}
