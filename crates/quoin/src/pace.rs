//! Waiting for what goes on by itself, with how far it is and how long it still takes at its pace.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::signal::unix::{SignalKind, signal};

use crate::client::ClientOptions;
use crate::size::show_size;

/// Intervals between two polls of what is waited for, and between two lines about it.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

/// Window of the pace. Older progress says nothing about the present speed, since rebuilds are
/// paced by clients; a shorter window has too few of the targets' reports.
const WINDOW: Duration = Duration::from_secs(10);
/// Targets report every few seconds, so less than this is no standstill.
const STANDSTILL: Duration = Duration::from_secs(6);

/// Interruption of a wait by Ctrl-C.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: {waits}; it continues by itself, and {again} waits for it again")]
pub struct Interrupted {
    waits: String,
    /// Command that waits on and begins nothing anew.
    again: String,
}

impl Interrupted {
    /// An interruption after which the same command waits for the same thing.
    pub fn new(waits: String) -> Self {
        Self { waits, again: "the same command".to_owned() }
    }

    pub fn with_command(waits: String, again: String) -> Self {
        Self { waits, again }
    }

    /// The error of a wait, with this command in the place of the same one where that would begin
    /// something else.
    pub fn name_command(error: anyhow::Error, again: &str) -> anyhow::Error {
        match error.downcast::<Self>() {
            Ok(interrupted) => Self { again: again.to_owned(), ..interrupted }.into(),
            Err(error) => error,
        }
    }
}

/// Something under way in the cluster, as it was seen last.
pub trait UnderWay {
    fn is_done(&self) -> bool;
    /// All that changes where it moves on, in a form to be compared.
    fn state_text(&self) -> String;
    /// Its parts, each with a name that no other has.
    fn parts(&mut self) -> Vec<Part<'_>>;
    /// Bytes that it has still to go through.
    fn left_bytes(&self) -> u64;
    /// How far it is, in words, ending with `pace`.
    fn progress(&self, pace: &str) -> String;
}

/// A part of it: what it went through, of how much.
pub struct Part<'a> {
    pub name: String,
    pub done_bytes: &'a mut u64,
    pub total_bytes: &'a mut u64,
}

/// Polls until it is done.
///
/// # Errors
/// A poll that fails, no progress for as long as the user waits, or an interruption
/// ([`Interrupted`]): the work goes on all the same, should it move again.
pub async fn follow<U: UnderWay>(
    first: U,
    client: &ClientOptions,
    mut poll: impl AsyncFnMut() -> Result<U>,
) -> Result<U> {
    let mut seen = first;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let began = Instant::now();
    let mut message = None::<Instant>;
    let (mut pace, mut rounds) = (Pace::default(), Rounds::default());
    let (mut state_text, mut moved) = (String::new(), began);
    while !seen.is_done() {
        let now = seen.state_text();
        if now != state_text {
            (state_text, moved) = (now, Instant::now());
        }
        let mut parts = seen.parts();
        let known = parts.iter().map(Seen::of).collect();
        pace.saw(known, began.elapsed());
        rounds.join(&mut parts);
        let text = |pace: &Pace| pace.text(seen.left_bytes());
        if message.is_none_or(|message| message.elapsed() >= REPORT_INTERVAL) {
            eprintln!("{}", seen.progress(&text(&pace)));
            message = Some(Instant::now());
        }
        if moved.elapsed() > client.timeout() {
            bail!(
                "{}; nothing moved for {} s, though it may continue by itself (--timeout waits \
                 longer)",
                seen.progress(&text(&pace)),
                client.timeout
            );
        }
        let next = async {
            tokio::time::sleep(POLL_INTERVAL).await;
            poll().await
        };
        seen = tokio::select! {
            found = next => found?,
            _ = interrupts.recv() => bail!(Interrupted::new(seen.progress(&text(&pace)))),
        };
    }
    Ok(seen)
}

/// A part as seen by one poll.
struct Seen {
    name: String,
    done: u64,
    /// 0: not known yet.
    total: u64,
}

impl Seen {
    fn of(part: &Part) -> Self {
        Self { name: part.name.clone(), done: *part.done_bytes, total: *part.total_bytes }
    }
}

/// Speed at which bytes are gone through lately, of whatever part they are.
#[derive(Default)]
struct Pace {
    /// Bytes that each part had gone through when it was last seen, of how many.
    parts: HashMap<String, (u64, u64)>,
    /// Parts that ended since the first poll.
    ended: u64,
    /// Sum of bytes gone through since the first poll, at each poll of the window that saw more of
    /// them: targets report every few seconds, and between their reports nothing is known.
    sums: VecDeque<(Duration, u64)>,
    moved_at: Option<Duration>,
    began_at: Duration,
    now: Duration,
}

impl Pace {
    fn saw(&mut self, parts: Vec<Seen>, at: Duration) {
        let mut before = std::mem::take(&mut self.parts);
        // A new part may have made progress before it was first seen; one that begins anew goes
        // through more.
        let mut moved: u64 = 0;
        for Seen { name, done, total } in parts {
            let (then, _) = before.remove(&name).unwrap_or((done, total));
            moved += done.saturating_sub(then);
            self.parts.insert(name, (done, total));
        }
        // Parts that are gone are done.
        let ended = before.len() as u64;
        moved += before.values().map(|(done, total)| total.saturating_sub(*done)).sum::<u64>();
        self.ended += ended;
        let sum = self.sums.back().map_or(0, |(_, sum)| *sum) + moved;
        if self.moved_at.is_none() {
            self.began_at = at;
        }
        if moved > 0 || ended > 0 || self.moved_at.is_none() {
            self.moved_at = Some(at);
        }
        if moved > 0 {
            self.sums.push_back((at, sum));
        }
        self.now = at;
        while self.sums.len() > 2 && self.sums[1].0 + WINDOW <= at {
            self.sums.pop_front();
        }
    }

    /// Bytes a second, once there is a window.
    fn rate(&self) -> Option<f64> {
        let ((since, first), (until, last)) = (self.sums.front()?, self.sums.back()?);
        let elapsed = self.now.saturating_sub(self.began_at);
        (last > first && elapsed >= WINDOW)
            .then(|| (last - first) as f64 / (*until - *since).as_secs_f64())
    }

    /// The pace, and how long it takes at it, in words that follow others; empty where nothing can
    /// be said.
    fn text(&self, left: u64) -> String {
        let still = self.now.saturating_sub(self.moved_at.unwrap_or(self.now));
        if left == 0 {
            return String::new();
        }
        if still >= STANDSTILL {
            return format!("; nothing moved for {}", time(still));
        }
        let Some(rate) = self.rate() else { return self.text_by_parts() };
        let takes = Duration::try_from_secs_f64(left as f64 / rate).unwrap_or(Duration::MAX);
        // Progress since the last report is not in it yet.
        let takes = takes.saturating_sub(still);
        format!("; {}/s, about {} left", show_size(rate as u64), time(takes))
    }

    /// Where parts end before anything is known of their bytes, their number is the pace.
    fn text_by_parts(&self) -> String {
        let elapsed = self.now.saturating_sub(self.began_at);
        if self.ended == 0 || elapsed < WINDOW {
            return String::new();
        }
        let takes = elapsed.mul_f64(self.parts.len() as f64 / self.ended as f64);
        format!("; about {} left", time(takes))
    }
}

/// A rebuild copies what was written meanwhile in further rounds, which each begin at nothing; they
/// are shown as one round, which never goes back.
#[derive(Default)]
struct Rounds {
    /// Bytes of each part: in earlier rounds, and in this one so far.
    parts: HashMap<String, (u64, u64)>,
}

impl Rounds {
    fn join(&mut self, parts: &mut [Part]) {
        for Part { name, done_bytes, total_bytes } in parts {
            let (before, last) = self.parts.entry(name.clone()).or_default();
            if **done_bytes < *last {
                *before += *last;
            }
            *last = **done_bytes;
            **done_bytes += *before;
            if **total_bytes > 0 {
                **total_bytes += *before;
            }
        }
    }
}

/// Time in words, as exact as an estimate is.
fn time(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{} s", seconds.max(1)),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds @ 172_800..31_536_000 => format!("{} days", seconds / 86_400),
        _ => "over a year".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn second(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    fn part(name: &str, mib: u64) -> Seen {
        Seen { name: name.to_owned(), done: mib * MIB, total: 0 }
    }

    #[test]
    fn parts_that_end_are_progress_even_without_known_bytes() {
        let mut pace = Pace::default();
        let left = |from: u64| (from..25).map(|n| part(&n.to_string(), 0)).collect();
        for n in 0..=20 {
            pace.saw(left(n), second(n));
            let text = pace.text(MIB);
            assert!(!text.contains("nothing moved"), "{text} after {n} s");
        }
        assert_eq!(pace.text(MIB), "; about 5 s left");
        // The rest of a part that ended counts as gone through.
        let mut pace = Pace::default();
        for n in 0..=10 {
            let known = |n| Seen { total: 8 * MIB, ..part(&format!("p{n}"), 0) };
            pace.saw(vec![known(n)], second(n));
        }
        let text = pace.text(80 * MIB);
        assert!(text.starts_with("; 8.") && text.contains("MiB/s"), "{text}");
    }

    #[test]
    fn rate_and_time_left_are_computed_from_recent_progress() {
        let mut pace = Pace::default();
        // Progress before the first poll is no pace.
        pace.saw(vec![part("a", 500)], second(0));
        assert_eq!(pace.text(MIB), "");
        for n in 1..=9 {
            pace.saw(vec![part("a", 500 + 10 * n)], second(n));
            assert_eq!(pace.text(MIB), "", "nothing is promised before there is a window");
        }
        pace.saw(vec![part("a", 600)], second(10));
        assert_eq!(pace.text(100 * MIB), "; 10.0 MiB/s, about 10 s left");
        // Clients take their part: after a while only the slower pace counts.
        for n in 11..=20 {
            pace.saw(vec![part("a", 600 + n - 10)], second(n));
        }
        assert_eq!(pace.text(600 * MIB), "; 1.0 MiB/s, about 10 min left");
        assert_eq!(pace.text(0), "", "nothing is left to go through");
    }

    /// Targets report every few seconds: what was gone through comes in steps.
    #[test]
    fn between_two_reports_the_rate_stays_and_the_time_left_grows_shorter() {
        let mut pace = Pace::default();
        for poll in 0..=160 {
            let at = Duration::from_millis(250 * poll);
            let reported = at.as_secs() / 5 * 5;
            pace.saw(vec![part("a", 8 * reported)], at);
            let text = pace.text(8 * (60 - reported) * MIB);
            if at >= WINDOW {
                // Cut to whole seconds, on either side of one.
                let left = second(60) - at;
                let near =
                    [0, 5].map(|more| time(left.saturating_sub(Duration::from_millis(more))));
                let message = near.map(|left| format!("; 8.0 MiB/s, about {left} left"));
                assert!(message.contains(&text), "{text} at {at:?}, {message:?}");
            }
        }
    }

    #[test]
    fn parts_that_begin_end_or_restart_do_not_distort_the_rate() {
        let mut pace = Pace::default();
        pace.saw(vec![part("a", 0), part("b", 0)], second(0));
        pace.saw(vec![part("a", 50), part("b", 50)], second(5));
        // Part a is done; part c was on its way already.
        pace.saw(vec![part("b", 150), part("c", 900)], second(10));
        assert_eq!(pace.text(200 * MIB), "; 20.0 MiB/s, about 10 s left");
        pace.saw(vec![part("b", 0), part("c", 920)], second(11));
        assert_eq!(pace.text(200 * MIB), "; 20.0 MiB/s, about 10 s left");
    }

    #[test]
    fn without_progress_the_duration_is_reported_and_no_time_left() {
        let mut pace = Pace::default();
        for n in 0..=5 {
            pace.saw(vec![part("a", 7)], second(n));
            assert_eq!(pace.text(MIB), "");
        }
        pace.saw(vec![part("a", 7)], second(6));
        assert_eq!(pace.text(MIB), "; nothing moved for 6 s");
        pace.saw(vec![part("a", 7)], second(600));
        assert_eq!(pace.text(MIB), "; nothing moved for 10 min");
        pace.saw(vec![part("a", 8)], second(601));
        pace.saw(vec![part("a", 9)], second(612));
        let text = pace.text(u64::MAX);
        assert!(text.ends_with("about over a year left"), "{text}");
    }

    /// Progress of one part, and its total.
    struct Steps {
        done: u64,
        total: u64,
    }

    impl UnderWay for Steps {
        fn is_done(&self) -> bool {
            self.done == self.total
        }
        fn state_text(&self) -> String {
            self.done.to_string()
        }
        fn parts(&mut self) -> Vec<Part<'_>> {
            let Self { done, total } = self;
            vec![Part { name: String::new(), done_bytes: done, total_bytes: total }]
        }
        fn left_bytes(&self) -> u64 {
            self.total - self.done
        }
        fn progress(&self, pace: &str) -> String {
            format!("{} of {} steps{pace}", self.done, self.total)
        }
    }

    fn steps(done: u64) -> Steps {
        Steps { done, total: 8 }
    }

    fn patience(timeout: u64) -> ClientOptions {
        ClientOptions { socket: None, context: None, timeout, run: None }
    }

    #[tokio::test]
    async fn a_wait_lasts_while_there_is_progress_and_otherwise_until_the_timeout() {
        let client = patience(1);
        let began = Instant::now();
        let mut polls = 0;
        // Each step is sooner than the user's patience ends, all of them are later.
        let moves = follow(steps(0), &client, async || {
            polls += 1;
            Ok(steps(polls))
        });
        assert_eq!(moves.await.unwrap().done, 8);
        assert!(began.elapsed() > client.timeout());
        let never = follow(steps(5), &patience(0), async || Ok(steps(5))).await;
        let text = never.err().unwrap().to_string();
        assert!(
            text.contains("5 of 8 steps; nothing moved") && text.contains("--timeout"),
            "{text}"
        );
    }

    #[test]
    fn a_further_round_of_a_rebuild_continues_from_the_last_one() {
        let mut rounds = Rounds::default();
        let mut shown = 0;
        for (done, total) in [(0, 100), (90, 100), (100, 100), (0, 0), (0, 20), (15, 20), (3, 7)] {
            let (mut now, mut of) = (done, total);
            let part = Part { name: "a".into(), done_bytes: &mut now, total_bytes: &mut of };
            rounds.join(&mut [part]);
            assert!(now >= shown, "{now} after {shown}");
            assert!(total == 0 || of - now == total - done, "as much is left: {now} of {of}");
            shown = now;
        }
        assert_eq!(shown, 118);
    }
}
