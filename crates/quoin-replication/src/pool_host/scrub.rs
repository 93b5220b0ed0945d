//! When the pool reads all that it holds, how fast, and how far it is: the schedule of the scrub.
//!
//! A pass begins a period after the last one ended, or when it is asked for. A scheduled pass
//! takes a quarter of its period at most, and never runs slower than [`SLOWEST`], so that a small
//! pool is done in minutes; one that was asked for runs as fast as [`ASKED`]. The driver keeps
//! [`Scrub::text`] in a file, so that a restart goes on; without that text, or with one that makes
//! no sense, a pass begins anew: it costs reading, nothing else.

use std::time::Duration;

use quoin_types::ids::ReplicaGuid;
use quoin_types::time::Time;

/// Bytes a second of a scheduled pass at least.
const SLOWEST: u64 = 1 << 20;
/// Bytes a second of a pass that was asked for.
const ASKED: u64 = 256 << 20;
/// Between two writes of the text while a pass goes on.
const SAVE_EVERY: Duration = Duration::from_secs(30);
/// A step that waits for the disk is tried again so late, whatever became of its answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Longest time between two looks at the wall clock, which may be set.
const LOOK_EVERY: Duration = Duration::from_secs(3600);

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
    /// Bytes that the present pass reads in all, about; 0 before the first.
    pub total_bytes: u64,
    /// Bad copies found in the present pass, or in the last one.
    pub found: u64,
}

/// Where a pass goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Place {
    pub replica: ReplicaGuid,
    /// The store's own name of what it reads.
    pub stage: u64,
    pub cursor: u64,
}

/// A moment on the pool's clock, and by the wall clock in seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    pub now: Time,
    pub wall_s: u64,
}

/// The schedule of one pool.
#[derive(Clone, Debug)]
pub struct Scrub {
    /// From the end of a pass to the next one's begin; `None`: only when it is asked for.
    period: Option<Duration>,
    state: ScrubState,
    at: Place,
    asked: bool,
    next_step: Time,
    /// The next step waits for the disk, and is done once that answered.
    waits: bool,
    saved: Time,
    unsaved: bool,
}

impl Scrub {
    /// `text`: what [`Scrub::text`] gave last, if anything is left of it.
    pub fn new(wall_s: u64, period: Option<Duration>, text: &str) -> Self {
        let mut scrub = Scrub {
            period,
            state: ScrubState::default(),
            at: Place::default(),
            asked: false,
            next_step: Time::ZERO,
            waits: false,
            saved: Time::ZERO,
            unsaved: false,
        };
        if scrub.restore(text).is_none() {
            // The first pass is due a period after the pool's first start.
            scrub.state = ScrubState { ended_s: wall_s, ..ScrubState::default() };
            scrub.at = Place::default();
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
        let replica: ReplicaGuid = words.next()?.parse().ok()?;
        self.state.running = words.next()? == "running";
        self.asked = asked == 1;
        self.at = Place { replica, stage, cursor };
        Some(())
    }

    /// All that a restart needs.
    pub fn text(&self) -> String {
        let ScrubState { request, began_s, ended_s, read_bytes, total_bytes, found, running } =
            self.state;
        let Place { replica, stage, cursor } = self.at;
        let asked = u64::from(self.asked);
        let word = if running { "running" } else { "resting" };
        format!(
            "{request} {began_s} {ended_s} {read_bytes} {total_bytes} {found} {stage} {cursor} \
             {asked} {replica} {word}\n"
        )
    }

    /// Returns true if the text is to be written; true once.
    #[must_use]
    pub fn take_unsaved(&mut self) -> bool {
        std::mem::take(&mut self.unsaved)
    }

    fn save(&mut self, now: Time) {
        (self.saved, self.unsaved) = (now, true);
    }

    pub fn state(&self) -> ScrubState {
        self.state
    }

    /// Takes a request up; a number that was seen asks for nothing. True if a pass begins or is
    /// hurried.
    pub fn ask(&mut self, at: Moment, request: u64, used_bytes: u64) -> bool {
        if request <= self.state.request {
            return false;
        }
        self.state.request = request;
        self.asked = true;
        // Blocks that a scheduled pass has read already may have rotted since.
        self.begin(at, used_bytes);
        true
    }

    fn begin(&mut self, at: Moment, used_bytes: u64) {
        self.at = Place::default();
        self.state = ScrubState {
            running: true,
            began_s: at.wall_s,
            read_bytes: 0,
            total_bytes: used_bytes,
            found: 0,
            ..self.state
        };
        self.next_step = at.now;
        self.save(at.now);
    }

    /// A pass that ended at a time that lies ahead ended by a clock that was wrong: the next one is
    /// not put off for as long.
    fn due_s(&self, at: Moment) -> Option<u64> {
        Some(self.state.ended_s.min(at.wall_s).saturating_add(self.period?.as_secs()))
    }

    /// How long until a step is due; `None`: no pass is planned.
    pub fn due_in(&self, at: Moment) -> Option<Duration> {
        let next_step = self.next_step.since(at.now);
        if self.state.running {
            return Some(next_step);
        }
        let left = Duration::from_secs(self.due_s(at)?.saturating_sub(at.wall_s));
        Some(left.min(LOOK_EVERY).max(next_step))
    }

    /// Returns the place to read now: the replica to go on with and where, or those after it from
    /// the start.
    pub fn step(&mut self, at: Moment, used_bytes: u64) -> Option<Place> {
        if !self.state.running && self.state.ended_s > at.wall_s {
            self.state.ended_s = at.wall_s;
            self.save(at.now);
        }
        if self.due_in(at)? > Duration::ZERO {
            return None;
        }
        if !self.state.running {
            if at.wall_s < self.due_s(at)? {
                return None;
            }
            self.begin(at, used_bytes);
        }
        Some(self.at)
    }

    /// A step is done and took so long; `next`: where the next one goes on.
    pub fn stepped(&mut self, now: Time, took: Duration, read_bytes: u64, next: Place) {
        self.at = next;
        self.state.read_bytes += read_bytes;
        self.state.total_bytes = self.state.total_bytes.max(self.state.read_bytes);
        let quarter_s = self.period.map_or(u64::MAX, |p| (p.as_secs() / 4).max(1));
        let rate = match self.asked {
            true => ASKED,
            false => SLOWEST.max(self.state.total_bytes / quarter_s),
        };
        // Clients have three quarters of the shard at least.
        let pause = Duration::from_nanos(read_bytes.saturating_mul(1_000_000_000) / rate);
        self.waits = false;
        self.next_step = now + pause.max(took * 3);
        if now.since(self.saved) >= SAVE_EVERY {
            self.save(now);
        }
    }

    /// The step cannot be done now.
    pub fn postpone(&mut self, now: Time, by: Duration) {
        self.waits = false;
        self.next_step = now + by;
    }

    /// The step waits for the disk.
    pub fn wait(&mut self, now: Time) {
        self.waits = true;
        self.next_step = now + ANSWER_MAX;
    }

    /// The disk answered: a step that waits for it is due.
    pub fn answered(&mut self, now: Time) {
        if std::mem::take(&mut self.waits) {
            self.next_step = now;
        }
    }

    pub fn found(&mut self, now: Time, count: u64) {
        if self.state.running && count > 0 {
            self.state.found += count;
            self.save(now);
        }
    }

    /// The pass has read everything.
    pub fn ended(&mut self, at: Moment) -> ScrubState {
        self.state.running = false;
        self.state.ended_s = at.wall_s;
        self.state.total_bytes = self.state.read_bytes;
        self.asked = false;
        self.at = Place::default();
        self.save(at.now);
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

    const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
    const WALL_S: u64 = 1_700_000_000;
    const START: Moment = Moment { now: Time(1_000_000_000), wall_s: WALL_S };

    fn weekly() -> Scrub {
        Scrub::new(WALL_S, Some(WEEK), "")
    }

    #[test]
    fn a_new_pool_rests_for_a_period_and_a_request_begins_a_pass_once() {
        let mut scrub = weekly();
        assert_eq!(scrub.step(START, 1 << 30), None);
        assert!(scrub.due_in(START).unwrap() > Duration::from_secs(60));
        assert!(scrub.ask(START, 1, 1 << 30));
        assert!(!scrub.ask(START, 1, 1 << 30), "the same request again");
        assert!(scrub.step(START, 1 << 30).is_some());
        scrub.ended(START);
        assert_eq!(scrub.step(START, 1 << 30), None);
        let later = Moment { wall_s: WALL_S + WEEK.as_secs(), ..START };
        assert!(scrub.step(later, 1 << 30).is_some(), "a period has passed");
        assert_eq!(Scrub::new(WALL_S, None, "").due_in(START), None);
    }

    #[test]
    fn a_pass_that_ended_by_a_clock_that_was_ahead_puts_the_next_one_off_by_no_more_than_a_period()
    {
        let mut scrub = weekly();
        scrub.ask(START, 1, 1 << 30);
        let ahead = Moment { wall_s: WALL_S + 50 * WEEK.as_secs(), ..START };
        scrub.ended(ahead);
        // The clock is right again, also after a restart.
        let mut scrub = Scrub::new(WALL_S, Some(WEEK), &scrub.text());
        assert_eq!(scrub.step(START, 1 << 30), None);
        assert_eq!(scrub.due_in(START), Some(LOOK_EVERY));
        let later = Moment { wall_s: WALL_S + WEEK.as_secs(), ..START };
        assert!(scrub.step(later, 1 << 30).is_some(), "a period has passed");
    }

    #[test]
    fn a_pass_goes_on_where_it_was_after_a_restart_and_garbage_begins_anew() {
        let mut scrub = weekly();
        scrub.ask(START, 3, 1 << 30);
        let at = Place { replica: ReplicaGuid(9), stage: 2, cursor: 77 };
        scrub.stepped(START.now, Duration::ZERO, 5 << 20, at);
        scrub.found(START.now, 2);
        assert!(scrub.take_unsaved());
        scrub.stop(START.now);
        assert!(scrub.take_unsaved() && !scrub.take_unsaved());
        let mut again = Scrub::new(WALL_S, Some(WEEK), &scrub.text());
        assert_eq!(again.state(), scrub.state());
        assert_eq!(again.step(START, 1 << 30), Some(at));
        assert!(!again.ask(START, 3, 1 << 30), "that one is under way");
        for garbage in ["", "1 2 3", "x 1 2 3 4 5 6 7 8 9", "\u{0}"] {
            let fresh = Scrub::new(WALL_S, Some(WEEK), garbage);
            assert!(!fresh.state().running && fresh.state().request == 0, "{garbage:?}");
        }
    }

    #[test]
    fn the_text_is_written_now_and_then_while_a_pass_goes_on() {
        let mut scrub = weekly();
        scrub.ask(START, 1, 1 << 30);
        assert!(scrub.take_unsaved());
        scrub.stepped(START.now + SAVE_EVERY / 2, Duration::ZERO, 1, Place::default());
        assert!(!scrub.take_unsaved());
        scrub.stepped(START.now + SAVE_EVERY, Duration::ZERO, 1, Place::default());
        assert!(scrub.take_unsaved());
    }

    #[test]
    fn a_pass_counts_what_it_reads_and_tells_when_it_began_and_ended() {
        let mut scrub = weekly();
        scrub.ask(START, 1, 3 << 20);
        for _ in 0..2 {
            scrub.stepped(START.now, Duration::ZERO, 1 << 20, Place::default());
        }
        let state = scrub.state();
        assert_eq!((state.read_bytes, state.total_bytes), (2 << 20, 3 << 20));
        scrub.stepped(START.now, Duration::ZERO, 2 << 20, Place::default());
        assert_eq!(scrub.state().total_bytes, 4 << 20, "more than was there at its begin");
        let ended = scrub.ended(Moment { wall_s: WALL_S + 5, ..START });
        assert_eq!((ended.began_s, ended.ended_s), (WALL_S, WALL_S + 5));
        assert_eq!((ended.read_bytes, ended.total_bytes), (4 << 20, 4 << 20));
    }

    #[test]
    fn a_step_that_waits_for_the_disk_is_due_with_its_answer_and_at_the_latest_after_a_while() {
        let mut scrub = weekly();
        scrub.ask(START, 1, 1 << 30);
        scrub.answered(START.now);
        scrub.wait(START.now);
        assert_eq!(scrub.due_in(START), Some(ANSWER_MAX));
        scrub.answered(START.now);
        assert_eq!(scrub.due_in(START), Some(Duration::ZERO));
        scrub.stepped(START.now, Duration::ZERO, 256 << 20, Place::default());
        scrub.answered(START.now);
        assert_eq!(scrub.due_in(START), Some(Duration::from_secs(1)), "no step waits for it");
    }

    #[test]
    fn a_scheduled_pass_takes_a_quarter_of_its_period() {
        let mut scrub = Scrub::new(0, Some(Duration::from_secs(9)), "");
        let at = scrub.step(START, 1 << 30).unwrap();
        scrub.stepped(START.now, Duration::ZERO, 1 << 20, at);
        // 512 MiB a second: two seconds are the quarter in whole ones.
        assert_eq!(scrub.due_in(START), Some(Duration::from_nanos(1_953_125)));
    }

    #[test]
    fn a_scheduled_pass_is_slow_and_a_requested_one_is_not_but_leaves_the_shard_to_clients() {
        let pause = |asked: bool, took_ms: u64| {
            let mut scrub = Scrub::new(0, Some(Duration::from_secs(1)), "");
            if asked {
                scrub.ask(START, 1, 1 << 20);
            }
            let at = scrub.step(START, 1 << 20).unwrap();
            scrub.stepped(START.now, Duration::from_millis(took_ms), 1 << 20, at);
            scrub.due_in(START).unwrap()
        };
        assert_eq!(pause(false, 0), Duration::from_secs(1));
        assert!(pause(true, 0) < Duration::from_millis(10));
        assert_eq!(pause(true, 100), Duration::from_millis(300));
    }
}
