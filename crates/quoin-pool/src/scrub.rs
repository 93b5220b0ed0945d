//! The pool's scrub: its schedule ([`quoin_replication::pool_host::scrub`]), the wall clock, and the
//! small file beside the pool's identity from which a restart goes on.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

pub use quoin_replication::pool_host::scrub::ScrubState;
use quoin_replication::pool_host::scrub::{Moment, Place, Scrub as Schedule};
use quoin_types::Time;

pub const DEFAULT_PERIOD: Duration = Duration::from_secs(7 * 24 * 3600);
/// File in the pool's identity directory.
pub const STATE_FILE: &str = "scrub";

/// How the pool is scrubbed.
#[derive(Clone, Debug)]
pub struct ScrubPlan {
    /// From the end of a pass to the next one's begin; `None`: only when it is asked for.
    pub period: Option<Duration>,
    /// Remembers how far a pass is; `None`: nothing does.
    pub file: Option<PathBuf>,
}

impl Default for ScrubPlan {
    fn default() -> Self {
        ScrubPlan { period: Some(DEFAULT_PERIOD), file: None }
    }
}

/// The schedule of one pool, and the file that remembers it.
#[derive(Debug)]
pub struct Scrub {
    schedule: Schedule,
    file: Option<PathBuf>,
}

fn moment(now: Time) -> Moment {
    Moment { now, wall_s: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()) }
}

impl Scrub {
    pub fn new(plan: ScrubPlan) -> Self {
        let text = plan.file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        let wall_s = moment(Time::ZERO).wall_s;
        let schedule = Schedule::new(wall_s, plan.period, &text.unwrap_or_default());
        Scrub { schedule, file: plan.file }
    }

    fn save(&mut self) {
        if !self.schedule.take_unsaved() {
            return;
        }
        let Some(file) = &self.file else { return };
        let fresh = file.with_extension("new");
        let written = std::fs::write(&fresh, self.schedule.text())
            .and_then(|()| std::fs::rename(&fresh, file));
        if let Err(error) = written {
            tracing::warn!(path = %file.display(), %error, "cannot remember how far the scrub is");
        }
    }

    pub fn state(&self) -> ScrubState {
        self.schedule.state()
    }

    /// See [`Schedule::ask`].
    pub fn ask(&mut self, now: Time, request: u64, used_bytes: u64) -> bool {
        let begins = self.schedule.ask(moment(now), request, used_bytes);
        self.save();
        begins
    }

    pub fn due_in(&self, now: Time) -> Option<Duration> {
        self.schedule.due_in(moment(now))
    }

    /// See [`Schedule::step`].
    pub fn step(&mut self, now: Time, used_bytes: u64) -> Option<Place> {
        let place = self.schedule.step(moment(now), used_bytes);
        self.save();
        place
    }

    /// See [`Schedule::stepped`].
    pub fn stepped(&mut self, now: Time, took: Duration, read_bytes: u64, next: Place) {
        self.schedule.stepped(now, took, read_bytes, next);
        self.save();
    }

    pub fn postpone(&mut self, now: Time, by: Duration) {
        self.schedule.postpone(now, by);
    }

    /// See [`Schedule::wait`].
    pub fn wait(&mut self, now: Time) {
        self.schedule.wait(now);
    }

    /// See [`Schedule::answered`].
    pub fn answered(&mut self, now: Time) {
        self.schedule.answered(now);
    }

    pub fn found(&mut self, now: Time, count: u64) {
        self.schedule.found(now, count);
        self.save();
    }

    /// The pass has read everything.
    pub fn ended(&mut self, now: Time) -> ScrubState {
        let state = self.schedule.ended(moment(now));
        self.save();
        state
    }

    /// The pool is going down: the next start goes on here.
    pub fn stop(&mut self, now: Time) {
        self.schedule.stop(now);
        self.save();
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::ReplicaGuid;

    use super::*;

    const START: Time = Time(1_000_000_000);

    #[test]
    fn a_pass_goes_on_where_it_was_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("scrub");
        let plan = || ScrubPlan { file: Some(file.clone()), ..ScrubPlan::default() };
        let mut scrub = Scrub::new(plan());
        assert_eq!(scrub.step(START, 1 << 30), None, "the first pass is due in a period");
        assert!(scrub.ask(START, 3, 1 << 30));
        let at = Place { replica: ReplicaGuid(9), stage: 2, cursor: 77 };
        scrub.stepped(START, Duration::ZERO, 5 << 20, at);
        scrub.found(START, 2);
        scrub.stop(START);
        let mut again = Scrub::new(plan());
        assert_eq!(again.state(), scrub.state());
        assert_eq!(again.step(START, 1 << 30), Some(at));
        std::fs::write(&file, "garbage").unwrap();
        assert!(!Scrub::new(plan()).state().running);
    }
}
