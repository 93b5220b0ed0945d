//! The rate of rebuilds beside clients, limited by the clients' own latency.
//!
//! The latency of IO while nothing is copied is the baseline. It is measured while no rebuild runs,
//! and during one in short pauses (*probes*), so that it follows the present load and exists where
//! a rebuild begins with the open. Between probes, copying is limited by a rate. If IO takes more
//! than [`LIMIT_PERCENT`] of the baseline, the rate falls in proportion; otherwise it grows. This
//! is judged by the IO of about [`MEMORY`]: disks have latency spikes however little is copied, and
//! a rate that fell at each spike would never settle at what clients bear.
//!
//! A volume that lacks a replica may be faster than its users are used to. So the latency of the
//! whole volume is as good a baseline, up to [`HEALTHY_PERCENT_MAX`] of the present one: the sooner
//! the rebuild is over, the less is written meanwhile that it must copy too. The volume may also be
//! slower in a probe, since copied data is still on its way to disks. If clients have as many
//! requests under way as when the volume was whole, such a probe sets no new baseline, and IO may
//! take no longer than it does in the probe.
//!
//! The rate is never below [`FLOOR_BYTES_PER_S`], so that every rebuild ends. It is unlimited while
//! clients are idle. A rebuild that does not gain on the writers may take more ([`Pace::step`]).
//!
//! IO is compared by kind (reads, writes, flushed writes; small and large), so that a change of the
//! mix is not mistaken for load. IO held for a lost quorum or a full pool is not load: it takes
//! longer than [`SAMPLE_MAX`] and is left out.

use std::time::Duration;

use quoin_types::time::Time;

/// Limit of the latency of clients' IO while a rebuild copies, in percent of the latency without.
const LIMIT_PERCENT: u64 = 130;
/// Upper bound of the whole volume's baseline, in percent of the present one: the load may have
/// changed by now.
const HEALTHY_PERCENT_MAX: u64 = 125;
/// Lower bound of the same while the load is unchanged: [`LIMIT_PERCENT`] of it is the latency in a
/// probe.
const HEALTHY_PERCENT_MIN: u64 = 77;
/// Latency, in percent of the whole volume's, beyond which IO is slow for another reason than a
/// rebuild.
const LEFT_OVER_PERCENT_MAX: u64 = 150;
/// Lower bound of the rate of a rebuild.
const FLOOR_BYTES_PER_S: u64 = 16 << 20;
/// The rate at which copying begins beside clients.
const START_BYTES_PER_S: u64 = 64 << 20;
/// Rate without a limit.
const UNLIMITED: u64 = 1 << 40;
/// Time without requests after which clients are idle.
const IDLE: Duration = Duration::from_millis(100);
/// Shortest window of one judgement; it also needs [`SAMPLES_MIN`] IOs, or ends at the maximum.
const WINDOW: Duration = Duration::from_millis(40);
const WINDOW_MAX: Duration = Duration::from_millis(200);
const SAMPLES_MIN: u64 = 16;
/// Time over which judgements are averaged.
const MEMORY: Duration = Duration::from_millis(320);
/// Bound on one window's speed, in thousandths: a short fast period makes up for no more.
const SPEED_MAX: u64 = 1200;
/// Time between two probes.
const PROBE_EVERY: Duration = Duration::from_millis(300);
/// Time at the start of a probe for which earlier copying still disturbs.
const SETTLE: Duration = Duration::from_millis(4);
const PROBE: Duration = Duration::from_millis(10);
const PROBE_MAX: Duration = Duration::from_millis(60);
/// Time for which copying may catch up after a late timer.
const BURST: Duration = Duration::from_millis(2);
const SAMPLE_MAX: Duration = Duration::from_secs(1);

/// Limit of one chunk: clients' messages wait behind it on the connection and in a pool's thread.
const CHUNK_BYTES: u32 = 256 << 10;
const CHUNK_BYTES_PACED: u32 = 128 << 10;

/// Limit of small IO.
const SMALL_BYTES: u64 = 16 << 10;

/// Kind of a client's IO; only equal kinds are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    /// Answered when committed.
    Write,
    /// Answered when on media.
    Durable,
}

const KINDS: usize = 6;

fn index(kind: Kind, bytes: u64) -> usize {
    kind as usize * 2 + usize::from(bytes > SMALL_BYTES)
}

#[derive(Clone, Copy, Default)]
struct Sum {
    count: u64,
    total_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// No rebuild copies: all IO is baseline.
    Quiet,
    /// A rebuild pauses for a measurement.
    Probe,
    Copy,
}

pub(super) struct Pace {
    mode: Mode,
    /// Baseline latency; 0: unknown.
    baseline_ns: [u64; KINDS],
    /// Baseline when the volume was last whole.
    healthy_ns: [u64; KINDS],
    /// Requests under way at once when the volume was last whole, in thousandths.
    healthy_depth: u64,
    /// Start of the window: IO answered since then is counted.
    since: Time,
    /// Start of the mode: IO that arrived earlier is not counted.
    arrived_since: Time,
    sums: [Sum; KINDS],
    /// Bytes copied in this window.
    moved_bytes: u64,
    bytes_per_s: u64,
    /// Recent speed of clients relative to the baseline, in thousandths.
    speed: u64,
    limit_percent: u64,
    /// Rate when clients were last active.
    last_bytes_per_s: u64,
    /// Time before which nothing is copied.
    next_at: Time,
    probe_at: Time,
    /// Time at which a client last waited for something.
    busy_at: Option<Time>,
}

impl Pace {
    pub fn new() -> Self {
        Self {
            mode: Mode::Quiet,
            baseline_ns: [0; KINDS],
            healthy_ns: [0; KINDS],
            healthy_depth: 0,
            since: Time::ZERO,
            arrived_since: Time::ZERO,
            sums: [Sum::default(); KINDS],
            moved_bytes: 0,
            bytes_per_s: UNLIMITED,
            speed: allowed_speed(LIMIT_PERCENT),
            limit_percent: LIMIT_PERCENT,
            last_bytes_per_s: START_BYTES_PER_S,
            next_at: Time::ZERO,
            probe_at: Time::ZERO,
            busy_at: None,
        }
    }

    /// Counts an IO of a client: it arrived at `arrived` and is answered now.
    pub fn answered(&mut self, now: Time, arrived: Time, kind: Kind, bytes: u64) {
        self.busy_at = Some(now);
        let took = now.since(arrived);
        if now >= self.since && arrived >= self.arrived_since && took <= SAMPLE_MAX {
            let sum = &mut self.sums[index(kind, bytes)];
            sum.count += 1;
            sum.total_ns += took.as_nanos() as u64;
        }
    }

    /// Called once for each batch. `copying`: a rebuild wants to copy beside clients, and the
    /// latency of clients' IO may be this many times its usual limit; `busy`: a client waits for
    /// something; `whole`: no replica is away or behind.
    pub fn step(
        &mut self,
        now: Time,
        copying: Option<u64>,
        busy: bool,
        whole: impl FnOnce() -> bool,
    ) {
        if let Some(times) = copying {
            self.limit_percent = LIMIT_PERCENT * times;
        }
        let copying = copying.is_some();
        if busy {
            self.busy_at = Some(now);
        }
        let idle = self.busy_at.is_none_or(|at| now >= at + IDLE);
        if !copying {
            if self.mode != Mode::Quiet {
                (self.mode, self.bytes_per_s) = (Mode::Quiet, UNLIMITED);
                self.begin_mode(now);
            } else if now >= self.since + WINDOW_MAX {
                self.learn();
                if whole() {
                    self.healthy_ns = self.baseline_ns;
                    self.healthy_depth = self.depth(now);
                }
                self.begin(now);
            }
            return;
        }
        match self.mode {
            Mode::Quiet => {
                self.learn();
                self.next_at = now;
                self.copy(now);
                if !idle {
                    self.bytes_per_s = self.last_bytes_per_s;
                    if self.baseline_ns.iter().all(|ns| *ns == 0) {
                        self.probe(now);
                    }
                }
            }
            Mode::Probe if idle => self.copy(now),
            Mode::Probe => {
                let enough = now >= self.since + PROBE && self.samples() >= SAMPLES_MIN;
                if enough || now >= self.since + PROBE_MAX {
                    self.learn();
                    self.copy(now);
                }
            }
            Mode::Copy if idle => {
                (self.bytes_per_s, self.next_at) = (UNLIMITED, now);
                self.begin(now);
            }
            Mode::Copy if self.bytes_per_s == UNLIMITED => {
                // Clients are back: the rate returns at once to the one of the last clients.
                self.bytes_per_s = self.last_bytes_per_s;
                self.next_at = now;
                self.probe(now);
            }
            Mode::Copy => {
                let enough = now >= self.since + WINDOW && self.samples() >= SAMPLES_MIN;
                if enough || now >= self.since + WINDOW_MAX {
                    self.judge(now);
                    self.begin(now);
                }
                if now >= self.probe_at {
                    self.probe(now);
                }
            }
        }
    }

    pub fn may_copy(&self, now: Time) -> bool {
        self.mode != Mode::Probe && now >= self.next_at
    }

    /// Bytes of one request to a source.
    pub fn chunk_bytes(&self) -> u32 {
        if self.bytes_per_s == UNLIMITED { CHUNK_BYTES } else { CHUNK_BYTES_PACED }
    }

    pub fn copied(&mut self, now: Time, bytes: u64) {
        self.moved_bytes += bytes;
        let cost_ns = (bytes * 1000 / (self.bytes_per_s >> 20).max(1)).min(1 << 40);
        let from = Time(self.next_at.0.max(now.0.saturating_sub(BURST.as_nanos() as u64)));
        self.next_at = from + Duration::from_nanos(cost_ns);
    }

    /// Time of the next step if no event occurs; only while a rebuild wants to copy.
    pub fn due(&self, now: Time) -> Option<Time> {
        match self.mode {
            Mode::Quiet => None,
            Mode::Probe => Some(self.since + PROBE_MAX),
            Mode::Copy => (now < self.next_at).then_some(self.next_at),
        }
    }

    fn samples(&self) -> u64 {
        self.sums.iter().map(|sum| sum.count).sum()
    }

    /// Average number of client requests under way at once, in thousandths.
    fn depth(&self, now: Time) -> u64 {
        let total_ns: u64 = self.sums.iter().map(|sum| sum.total_ns).sum();
        let took_us = now.since(self.since).as_micros() as u64;
        total_ns.checked_div(took_us).unwrap_or(0)
    }

    fn begin(&mut self, now: Time) {
        self.since = now;
        self.sums = [Sum::default(); KINDS];
        self.moved_bytes = 0;
    }

    /// Begins a mode. IO that is under way at the change counts for neither mode.
    fn begin_mode(&mut self, now: Time) {
        self.arrived_since = now;
        self.begin(now);
    }

    fn copy(&mut self, now: Time) {
        self.mode = Mode::Copy;
        self.probe_at = now + PROBE_EVERY;
        self.begin_mode(now);
    }

    fn probe(&mut self, now: Time) {
        self.mode = Mode::Probe;
        self.begin_mode(now + SETTLE);
    }

    /// Updates the baselines. The update is slow: a probe is short and the load of the hosts is
    /// uneven. The after-effects of a rebuild (its receiver's disk writes back) must not become the
    /// baseline.
    fn learn(&mut self) {
        for (baseline, sum) in self.baseline_ns.iter_mut().zip(self.sums) {
            let Some(mean) = sum.total_ns.checked_div(sum.count) else { continue };
            *baseline = match *baseline {
                0 => mean,
                known if mean < known / 2 => (known + mean) / 2,
                // A single latency spike in a probe must not set the clients' limit for seconds.
                known => (known * 7 + mean.min(2 * known)) / 8,
            };
        }
    }

    /// Returns true if clients have about as many requests under way as when the volume was whole.
    fn has_healthy_depth(&self, now: Time) -> bool {
        let whole = self.healthy_depth;
        (whole * 3 / 4..=whole * 4 / 3).contains(&self.depth(now))
    }

    /// Speed at which clients are served relative to the baseline, in thousandths; `None` if no IO
    /// has a baseline.
    fn speed_now(&self, now: Time) -> Option<u64> {
        let (mut took, mut expected) = (0u128, 0u128);
        let same_depth = self.has_healthy_depth(now);
        for ((now, healthy), sum) in self.baseline_ns.iter().zip(self.healthy_ns).zip(self.sums) {
            if *now > 0 {
                let left_over = same_depth && *now * 100 <= healthy * LEFT_OVER_PERCENT_MAX;
                let least = if left_over { now * HEALTHY_PERCENT_MIN / 100 } else { *now };
                let baseline = healthy.clamp(least, now * HEALTHY_PERCENT_MAX / 100);
                took += u128::from(sum.total_ns);
                expected += u128::from(sum.count) * u128::from(baseline);
            }
        }
        (expected * 1000).checked_div(took).map(|speed| (speed as u64).min(SPEED_MAX))
    }

    fn judge(&mut self, now: Time) {
        let Some(speed_now) = self.speed_now(now) else { return };
        let (allowed, rate) = (allowed_speed(self.limit_percent), self.bytes_per_s);
        let took = now.since(self.since).min(MEMORY / 2).as_micros() as u64;
        let memory = MEMORY.as_micros() as u64;
        self.speed = (self.speed * (memory - took) + speed_now * took) / memory;
        let micros = now.since(self.since).as_micros().max(1) as u64;
        let achieved = self.moved_bytes.saturating_mul(1_000_000) / micros;
        self.bytes_per_s = if self.speed.max(speed_now) < allowed {
            // The rate falls from the rate really reached: a rate that was never reached is no
            // evidence.
            let reached = rate.min(achieved.saturating_mul(2));
            let down = (reached * self.speed / allowed).max(reached * 3 / 4);
            down.max(FLOOR_BYTES_PER_S)
        } else if self.speed.min(speed_now) >= allowed && achieved >= rate / 2 {
            let up = rate * self.speed / allowed;
            up.min(rate + rate / 8).min(UNLIMITED / 2)
        } else {
            rate
        };
        self.last_bytes_per_s = self.bytes_per_s;
    }
}

/// Speed at which IO just meets its limit, in thousandths of the speed without copying.
fn allowed_speed(limit_percent: u64) -> u64 {
    100_000 / limit_percent
}

#[cfg(test)]
mod tests;
