//! Limits of a volume, for the swarm `limits`: the target's process delays requests by the product's
//! code ([`quoin_replication::target_host::throttle`]).

use quoin_replication::primary::PrimaryEvent;
use quoin_replication::target_host::throttle::{Limits, Throttle, bytes_of};
use quoin_types::Time;
use quoin_types::block::Request;

use super::checkers::Observation;
use super::processes::ProcessEvent;
use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

/// The limits that a user has set.
#[derive(Default)]
pub(crate) struct VolumeLimits {
    limits: Limits,
}

impl VolumeLimits {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        if swarm != Swarm::Limits {
            return Self::default();
        }
        let mut random = Random::new(seed ^ 0x6c69_6d69_7473);
        let which = random.below(3);
        let ios_per_s = if which == 1 { 0 } else { random.between(20, 200) };
        let bytes_per_s = if which == 0 { 0 } else { random.between(128 << 10, 2 << 20) };
        Self { limits: Limits { ios_per_s, bytes_per_s } }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }
}

/// The throttle of one life of a target process.
pub(crate) struct Limited {
    throttle: Throttle,
    /// Number of the timer that counts.
    arm: u32,
}

impl World {
    /// `None` where the volume has no limit.
    pub(super) fn limited(&self, now: Time) -> Option<Limited> {
        let throttle = Throttle::new(now, self.operators.limits.limits)?;
        Some(Limited { throttle, arm: 0 })
    }

    /// Returns a client's request if the limits let it pass now.
    pub(super) fn admit(
        &mut self,
        target: usize,
        queue: usize,
        request: Request,
    ) -> Option<Request> {
        let now = self.local(self.targets[target].host);
        let process = self.targets[target].process.as_mut();
        let Some(limited) = process.and_then(|process| process.limited.as_mut()) else {
            return Some(request);
        };
        let token = request.token;
        let passed = limited.throttle.admit(now, queue as u64, request);
        self.observe(&Observation::LimitAsked { target, queue, token });
        match &passed {
            Some(request) => self.observe_passed(target, now, request),
            None => self.observe(&Observation::LimitHeld { target, at: now }),
        }
        self.plan_release(target);
        passed
    }

    fn observe_passed(&mut self, target: usize, at: Time, request: &Request) {
        let (token, bytes) = (request.token, bytes_of(&request.operation));
        self.observe(&Observation::LimitPassed { target, at, token, bytes });
    }

    /// A client has left the target, and with it what it waited for.
    pub(super) fn forget_waiting(&mut self, target: usize, queue: usize) {
        let process = self.targets[target].process.as_mut();
        let Some(limited) = process.and_then(|process| process.limited.as_mut()) else { return };
        limited.throttle.forget(queue as u64);
        self.observe(&Observation::LimitForgotten { target, queue });
        self.plan_release(target);
    }

    fn plan_release(&mut self, target: usize) {
        let (host, life) = (self.targets[target].host, self.targets[target].life);
        let process = self.targets[target].process.as_mut();
        let Some(limited) = process.and_then(|process| process.limited.as_mut()) else { return };
        limited.arm += 1;
        let (due, arm) = (limited.throttle.due(), limited.arm);
        let now = self.schedule.now();
        if let Some(at) = due.and_then(|due| self.hosts.clocks[host].global(due, now)) {
            let release = ProcessEvent::Release { target, life, arm };
            self.schedule.at(at, Event::Process(release));
        }
    }

    /// The timer of the limits: what waited long enough passes.
    pub(super) fn release(&mut self, target: usize, life: u32, arm: u32) {
        let now = self.local(self.targets[target].host);
        let here = &mut self.targets[target];
        let paused = here.paused;
        let process = here.process.as_mut().filter(|_| here.life == life);
        let Some(limited) = process.and_then(|process| process.limited.as_mut()) else { return };
        if limited.arm != arm {
            return;
        }
        if paused {
            let release = Event::Process(ProcessEvent::Release { target, life, arm });
            return self.schedule.after(5 * MILLISECOND, release);
        }
        if limited.throttle.due().is_some_and(|due| due > now) {
            return self.plan_release(target);
        }
        let mut passed = Vec::new();
        while let Some((_, request)) = limited.throttle.next(now) {
            passed.push(request);
        }
        self.observe(&Observation::LimitTurn { target, passed: passed.len() });
        for request in &passed {
            self.observe_passed(target, now, request);
        }
        self.plan_release(target);
        self.feed_target(target, passed.into_iter().map(PrimaryEvent::Submit).collect());
    }
}
