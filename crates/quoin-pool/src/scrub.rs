//! When the pool reads all that it holds, how fast, and how far it is: the schedule of the scrub.
//!
//! A pass begins a period after the last one ended, or when it is asked for. A scheduled pass
//! takes a quarter of its period at most, and never runs slower than [`SLOWEST`], so that a small
//! pool is done in minutes; one that was asked for runs as fast as [`ASKED`]. Where it is lies in
//! a small file beside the pool's identity, so that a restart goes on; without that file, or with
//! one that makes no sense, a pass begins anew: it costs reading, nothing else.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use quoin_store::ScrubAt;
use quoin_types::{ReplicaGuid, Time};

pub const DEFAULT_PERIOD: Duration = Duration::from_secs(7 * 24 * 3600);
/// Of the pool's identity directory.
pub const STATE_FILE: &str = "scrub";

/// Bytes a second.
const SLOWEST: u64 = 1 << 20;
const ASKED: u64 = 256 << 20;
/// Between two writes of the file.
const SAVE_EVERY: Duration = Duration::from_secs(30);

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

/// How a scrub stands, as it is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ScrubState {
    /// The last request that was taken up.
    pub request: u64,
    pub running: bool,
    pub began_s: u64,
    /// 0: none ended yet.
    pub ended_s: u64,
    pub read_bytes: u64,
    /// What the present pass reads in all, about; 0 before the first.
    pub total_bytes: u64,
    /// Bad copies found in the present pass, or in the last one.
    pub found: u64,
}

/// The schedule of one pool.
#[derive(Debug)]
pub struct Scrub {
    plan: ScrubPlan,
    state: ScrubState,
    /// The replica that is read, and where in it.
    at: (ReplicaGuid, ScrubAt),
    asked: bool,
    next_step: Time,
    saved: Time,
}

fn wall_clock_s() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

impl Scrub {
    pub fn new(plan: ScrubPlan) -> Self {
        let text = plan.file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
        let mut scrub = Scrub {
            plan,
            state: ScrubState::default(),
            at: (ReplicaGuid(0), ScrubAt::default()),
            asked: false,
            next_step: Time::ZERO,
            saved: Time::ZERO,
        };
        if scrub.restore(&text.unwrap_or_default()).is_none() {
            // The first pass is due a period after the pool's first start.
            scrub.state = ScrubState { ended_s: wall_clock_s(), ..ScrubState::default() };
            scrub.at = (ReplicaGuid(0), ScrubAt::default());
        }
        scrub
    }

    fn restore(&mut self, text: &str) -> Option<()> {
        let mut words = text.split_whitespace();
        let mut number = || words.next()?.parse::<u64>().ok();
        self.state.request = number()?;
        self.state.began_s = number()?;
        self.state.ended_s = number()?;
        (self.state.read_bytes, self.state.total_bytes) = (number()?, number()?);
        self.state.found = number()?;
        let (stage, cursor, asked) = (number()?, number()?, number()?);
        let guid: ReplicaGuid = words.next()?.parse().ok()?;
        self.state.running = words.next()? == "running";
        self.asked = asked == 1;
        self.at = (guid, ScrubAt { stage: u32::try_from(stage).ok()?, cursor });
        Some(())
    }

    fn save(&mut self, now: Time) {
        self.saved = now;
        let Some(file) = &self.plan.file else { return };
        let ScrubState { request, began_s, ended_s, read_bytes, total_bytes, found, running } =
            self.state;
        let (guid, ScrubAt { stage, cursor }) = self.at;
        let asked = u64::from(self.asked);
        let word = if running { "running" } else { "resting" };
        let text = format!(
            "{request} {began_s} {ended_s} {read_bytes} {total_bytes} {found} {stage} {cursor} \
             {asked} {guid} {word}\n"
        );
        let fresh = file.with_extension("new");
        let written = std::fs::write(&fresh, text).and_then(|()| std::fs::rename(&fresh, file));
        if let Err(error) = written {
            tracing::warn!(path = %file.display(), %error, "cannot remember how far the scrub is");
        }
    }

    pub fn state(&self) -> ScrubState {
        self.state
    }

    /// Takes a request up; a number that was seen asks for nothing. True if a pass begins or is
    /// hurried.
    pub fn ask(&mut self, now: Time, request: u64, used_bytes: u64) -> bool {
        if request <= self.state.request {
            return false;
        }
        self.state.request = request;
        self.asked = true;
        // What a scheduled pass has read already may have rotted since.
        self.begin(now, used_bytes);
        true
    }

    fn begin(&mut self, now: Time, used_bytes: u64) {
        self.at = (ReplicaGuid(0), ScrubAt::default());
        self.state = ScrubState {
            running: true,
            began_s: wall_clock_s(),
            read_bytes: 0,
            total_bytes: used_bytes,
            found: 0,
            ..self.state
        };
        self.next_step = now;
        self.save(now);
    }

    /// How long until a step is due; `None`: no pass is planned.
    pub fn due_in(&self, now: Time) -> Option<Duration> {
        if self.state.running {
            return Some(self.next_step.since(now));
        }
        let due_s = self.state.ended_s.saturating_add(self.plan.period?.as_secs());
        // A look now and then: the wall clock may be set.
        let left = Duration::from_secs(due_s.saturating_sub(wall_clock_s()));
        Some(left.min(Duration::from_secs(3600)).max(self.next_step.since(now)))
    }

    /// What to read now: the replica to go on with and where, or those after it from the start.
    pub fn step(&mut self, now: Time, used_bytes: u64) -> Option<(ReplicaGuid, ScrubAt)> {
        if self.due_in(now)? > Duration::ZERO {
            return None;
        }
        if !self.state.running {
            let due_s = self.state.ended_s.saturating_add(self.plan.period?.as_secs());
            if wall_clock_s() < due_s {
                return None;
            }
            self.begin(now, used_bytes);
        }
        Some(self.at)
    }

    /// A step is done and took so long; `next`: where the next one goes on.
    pub fn stepped(
        &mut self,
        now: Time,
        took: Duration,
        read_bytes: u64,
        next: (ReplicaGuid, ScrubAt),
    ) {
        self.at = next;
        self.state.read_bytes += read_bytes;
        self.state.total_bytes = self.state.total_bytes.max(self.state.read_bytes);
        let quarter_s = self.plan.period.map_or(u64::MAX, |p| (p.as_secs() / 4).max(1));
        let rate = match self.asked {
            true => ASKED,
            false => SLOWEST.max(self.state.total_bytes / quarter_s),
        };
        // Clients have three quarters of the shard at least.
        let pause = Duration::from_nanos(read_bytes.saturating_mul(1_000_000_000) / rate);
        self.next_step = now + pause.max(took * 3);
        if now.since(self.saved) >= SAVE_EVERY {
            self.save(now);
        }
    }

    /// The step cannot be done now.
    pub fn postpone(&mut self, now: Time, by: Duration) {
        self.next_step = now + by;
    }

    pub fn found(&mut self, now: Time, count: u64) {
        if self.state.running && count > 0 {
            self.state.found += count;
            self.save(now);
        }
    }

    /// The pass has read everything.
    pub fn ended(&mut self, now: Time) -> ScrubState {
        self.state.running = false;
        self.state.ended_s = wall_clock_s();
        self.state.total_bytes = self.state.read_bytes;
        self.asked = false;
        self.at = (ReplicaGuid(0), ScrubAt::default());
        self.save(now);
        self.state
    }

    /// The pool is going down: the next start goes on here.
    pub fn stop(&mut self, now: Time) {
        if self.state.running {
            self.save(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Time(1_000_000_000);

    fn plan(file: &std::path::Path) -> ScrubPlan {
        ScrubPlan { file: Some(file.to_owned()), ..ScrubPlan::default() }
    }

    #[test]
    fn a_new_pool_rests_for_a_period_and_a_request_begins_a_pass_once() {
        let mut scrub = Scrub::new(ScrubPlan::default());
        assert_eq!(scrub.step(START, 1 << 30), None);
        assert!(scrub.due_in(START).unwrap() > Duration::from_secs(60));
        assert!(scrub.ask(START, 1, 1 << 30));
        assert!(!scrub.ask(START, 1, 1 << 30), "the same request again");
        assert!(scrub.step(START, 1 << 30).is_some());
        scrub.ended(START);
        assert_eq!(scrub.step(START, 1 << 30), None);
        let never = ScrubPlan { period: None, file: None };
        assert_eq!(Scrub::new(never).due_in(START), None);
    }

    #[test]
    fn a_pass_goes_on_where_it_was_after_a_restart_and_garbage_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("scrub");
        let mut scrub = Scrub::new(plan(&file));
        scrub.ask(START, 3, 1 << 30);
        let at = (ReplicaGuid(9), ScrubAt { stage: 2, cursor: 77 });
        scrub.stepped(START, Duration::ZERO, 5 << 20, at);
        scrub.found(START, 2);
        scrub.stop(START);
        let mut again = Scrub::new(plan(&file));
        assert_eq!(again.state(), scrub.state());
        assert_eq!(again.step(START, 1 << 30), Some(at));
        assert!(!again.ask(START, 3, 1 << 30), "that one is under way");
        for garbage in ["", "1 2 3", "x 1 2 3 4 5 6 7 8 9", "\u{0}"] {
            std::fs::write(&file, garbage).unwrap();
            let fresh = Scrub::new(plan(&file));
            assert!(!fresh.state().running && fresh.state().request == 0, "{garbage:?}");
        }
    }

    #[test]
    fn a_pass_counts_what_it_reads_and_tells_when_it_began_and_ended() {
        let wall_clock_s = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let before_s = wall_clock_s();
        let mut scrub = Scrub::new(ScrubPlan::default());
        scrub.ask(START, 1, 3 << 20);
        for _ in 0..2 {
            scrub.stepped(START, Duration::ZERO, 1 << 20, (ReplicaGuid(1), ScrubAt::default()));
        }
        let state = scrub.state();
        assert_eq!((state.read_bytes, state.total_bytes), (2 << 20, 3 << 20));
        scrub.stepped(START, Duration::ZERO, 2 << 20, (ReplicaGuid(1), ScrubAt::default()));
        assert_eq!(scrub.state().total_bytes, 4 << 20, "more than was there at its begin");
        let ended = scrub.ended(START);
        assert!((before_s..=wall_clock_s()).contains(&ended.began_s), "{ended:?}");
        assert!((ended.began_s..=wall_clock_s()).contains(&ended.ended_s), "{ended:?}");
        assert_eq!((ended.read_bytes, ended.total_bytes), (4 << 20, 4 << 20));
    }

    #[test]
    fn a_scheduled_pass_takes_a_quarter_of_its_period() {
        let period = Some(Duration::from_secs(9));
        let mut scrub = Scrub::new(ScrubPlan { period, file: None });
        scrub.state.ended_s = 0;
        let at = scrub.step(START, 1 << 30).unwrap();
        scrub.stepped(START, Duration::ZERO, 1 << 20, at);
        // 512 MiB a second: two seconds are the quarter in whole ones.
        assert_eq!(scrub.due_in(START), Some(Duration::from_nanos(1_953_125)));
    }

    #[test]
    fn a_scheduled_pass_is_slow_and_a_requested_one_is_not_but_leaves_the_shard_to_clients() {
        let pause = |asked: bool, took_ms: u64| {
            let period = Some(Duration::from_secs(1));
            let mut scrub = Scrub::new(ScrubPlan { period, file: None });
            scrub.state.ended_s = 0;
            if asked {
                scrub.ask(START, 1, 1 << 20);
            }
            let at = scrub.step(START, 1 << 20).unwrap();
            scrub.stepped(START, Duration::from_millis(took_ms), 1 << 20, at);
            scrub.due_in(START).unwrap()
        };
        assert_eq!(pause(false, 0), Duration::from_secs(1));
        assert!(pause(true, 0) < Duration::from_millis(10));
        assert_eq!(pause(true, 100), Duration::from_millis(300));
    }
}
