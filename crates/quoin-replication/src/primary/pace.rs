//! How fast rebuilds may copy beside clients: as fast as the clients' own latency allows.
//!
//! What an IO takes while nothing is copied is the baseline. It is learnt while no rebuild runs,
//! and during one in short pauses of it (*probes*), so that it follows what clients do now and
//! exists where a rebuild begins with the volume's opening. Between probes a rate is paid for each
//! byte copied. Where clients are served so slowly that IO takes more than [`LIMIT_PERCENT`] of the
//! baseline the rate falls in proportion, else it grows. That is judged by what clients got done
//! over about [`MEMORY`]: a disk hiccups however little is copied, and a rate that fell to nothing
//! at each hiccup would never become what clients bear. A volume that lacks a replica may be faster
//! than its users know it; what IO took while it was whole is as good a baseline, up to
//! [`HEALTHY_PERCENT_MAX`] of what it takes now: the sooner the rebuild is over, the less is written
//! meanwhile that it must copy too. It may be slower in a probe as well, since what was copied is
//! still on its way to disks: where clients ask for as much at a time as when the volume was whole
//! that is no new baseline, and IO may take no longer than it does in the probe.
//! The rate is never below [`FLOOR_BYTES_PER_S`], so that every rebuild ends, and
//! without a limit as long as no client asks for anything. A rebuild that does not gain on the
//! writers may take more ([`Pace::step`]).
//!
//! IO is compared by kind (reads, writes, flushed writes; small and large), so that a change of
//! their mix is not taken for a burden. What is not load (IO held for a lost quorum or a full
//! pool) takes longer than [`SAMPLE_MAX`] and is left out.

use std::time::Duration;

use quoin_types::time::Time;

/// What clients' IO may take while a rebuild copies, of what it takes without.
const LIMIT_PERCENT: u64 = 130;
/// What the whole volume's baseline counts at most, of that which is learnt now: clients may by now
/// do other things.
const HEALTHY_PERCENT_MAX: u64 = 125;
/// And at least, where clients do what they did: [`LIMIT_PERCENT`] of it is what IO takes in a probe.
const HEALTHY_PERCENT_MIN: u64 = 77;
/// IO that takes longer than this beside the whole volume's is slow for another reason than a rebuild.
const LEFT_OVER_PERCENT_MAX: u64 = 150;
/// Nothing slows a rebuild down further.
const FLOOR_BYTES_PER_S: u64 = 16 << 20;
/// The rate at which copying begins beside clients.
const START_BYTES_PER_S: u64 = 64 << 20;
/// No limit.
const UNLIMITED: u64 = 1 << 40;
/// Clients that asked for nothing for so long are idle.
const IDLE: Duration = Duration::from_millis(100);
/// A judgement takes so long and so many IOs, or, where those do not come, as long as the second.
const WINDOW: Duration = Duration::from_millis(40);
const WINDOW_MAX: Duration = Duration::from_millis(200);
const SAMPLES_MIN: u64 = 16;
/// How long a judgement counts.
const MEMORY: Duration = Duration::from_millis(320);
/// Clients that are faster for once do not make up for more than this.
const SPEED_MAX: u64 = 1200;
/// Between two probes.
const PROBE_EVERY: Duration = Duration::from_millis(300);
/// What was under way when a probe began still disturbs.
const SETTLE: Duration = Duration::from_millis(4);
const PROBE: Duration = Duration::from_millis(10);
const PROBE_MAX: Duration = Duration::from_millis(60);
/// Copying that may be made up for where a timer came late.
const BURST: Duration = Duration::from_millis(2);
const SAMPLE_MAX: Duration = Duration::from_secs(1);

/// What one chunk holds at most: clients' messages wait behind it on the connection and in a
/// pool's thread.
const CHUNK_BYTES: u32 = 256 << 10;
const CHUNK_BYTES_PACED: u32 = 128 << 10;

/// IO up to here is small.
const SMALL_BYTES: u64 = 16 << 10;

/// What a client's IO is compared with.
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
    /// Nothing is to be copied: all IO is baseline.
    Quiet,
    /// Something is to be copied and waits.
    Probe,
    Copy,
}

pub(super) struct Pace {
    mode: Mode,
    /// 0: not known.
    baseline_ns: [u64; KINDS],
    /// The same, when the volume was whole last.
    healthy_ns: [u64; KINDS],
    /// Requests under way at a time then, in thousandths.
    healthy_depth: u64,
    /// IO answered since.
    since: Time,
    /// IO that arrived since: before, the mode was another one.
    arrived_since: Time,
    sums: [Sum; KINDS],
    /// Copied since.
    moved_bytes: u64,
    bytes_per_s: u64,
    /// What clients got done of late beside what they did alone, in thousandths.
    speed: u64,
    limit_percent: u64,
    /// The rate when clients were last there.
    last_bytes_per_s: u64,
    /// Nothing is copied before.
    next_at: Time,
    probe_at: Time,
    /// When a client last waited for something.
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

    /// A client's IO that arrived then was answered now.
    pub fn answered(&mut self, now: Time, arrived: Time, kind: Kind, bytes: u64) {
        self.busy_at = Some(now);
        let took = now.since(arrived);
        if now >= self.since && arrived >= self.arrived_since && took <= SAMPLE_MAX {
            let sum = &mut self.sums[index(kind, bytes)];
            sum.count += 1;
            sum.total_ns += took.as_nanos() as u64;
        }
    }

    /// Once a batch. `copying`: something is to be copied beside clients, and clients' IO may take
    /// so many times what is usual beside it; `busy`: one of them waits for something; `whole`: no
    /// replica is away or behind.
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
                // Clients came: at once as slow as beside those that were there last.
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

    /// What is to be asked for at a time.
    pub fn chunk_bytes(&self) -> u32 {
        if self.bytes_per_s == UNLIMITED { CHUNK_BYTES } else { CHUNK_BYTES_PACED }
    }

    pub fn copied(&mut self, now: Time, bytes: u64) {
        self.moved_bytes += bytes;
        let cost_ns = (bytes * 1000 / (self.bytes_per_s >> 20).max(1)).min(1 << 40);
        let from = Time(self.next_at.0.max(now.0.saturating_sub(BURST.as_nanos() as u64)));
        self.next_at = from + Duration::from_nanos(cost_ns);
    }

    /// When to look again though nothing happens; only while something is to be copied.
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

    /// How many requests of clients were under way at a time, in thousandths.
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

    /// What was under way when the mode changed says nothing of either.
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

    /// Slowly, as a probe is short and what else the hosts do is not even; what a rebuild leaves
    /// behind (its receiver's disk writes back) must not become what is expected.
    fn learn(&mut self) {
        for (baseline, sum) in self.baseline_ns.iter_mut().zip(self.sums) {
            let Some(mean) = sum.total_ns.checked_div(sum.count) else { continue };
            *baseline = match *baseline {
                0 => mean,
                known if mean < known / 2 => (known + mean) / 2,
                // One hiccup in a probe must not be what clients are held to for seconds.
                known => (known * 7 + mean.min(2 * known)) / 8,
            };
        }
    }

    /// Whether clients ask for about as much at a time as when the volume was whole.
    fn has_healthy_depth(&self, now: Time) -> bool {
        let whole = self.healthy_depth;
        (whole * 3 / 4..=whole * 4 / 3).contains(&self.depth(now))
    }

    /// How fast clients are served now beside the baseline, in thousandths; nothing where no such
    /// IO is known.
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
            // Of what was really copied: a rate that was never reached says nothing.
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

/// Where IO takes just as long as it may, in thousandths of the speed without copying.
fn allowed_speed(limit_percent: u64) -> u64 {
    100_000 / limit_percent
}

#[cfg(test)]
mod tests;
