//! The load generator: one NBD connection, a fixed number of requests in flight, a fixed time.
//!
//! It is the same for the floor and for Quoin, and as light as possible: requests are queued and
//! sent with one write per wake-up, replies are read as they arrive.

use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Error, nbd};

/// Time limit of runs that end after a count of requests.
const NO_LIMIT: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    Random,
    Sequential,
    /// One block of each MiB, in turn: a leaf of a pool's map each.
    Sparse,
    /// Random, and each write is flushed: it counts once its flush is answered.
    Commit,
}

/// Range of which [`Pattern::Sparse`] takes one block.
const SPARSE_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Writes of a hundred requests; the others are reads.
    pub writes_percent: u64,
    pub pattern: Pattern,
    pub block_bytes: u32,
    pub depth: usize,
    pub time: Duration,
}

/// Result of a run: completed requests, their latencies, the time in all.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub requests: u64,
    pub seconds: f64,
    /// Sorted.
    latencies_ns: Vec<u32>,
    gaps: Vec<Gap>,
}

/// Time without an answer, counted from the beginning of a run.
#[derive(Clone, Debug)]
struct Gap {
    from: Duration,
    to: Duration,
}

/// Shorter ones are not kept.
const GAP_MIN: Duration = Duration::from_millis(1);

impl Outcome {
    pub fn per_second(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    /// Returns the longest time without an answer that has a part in this span of a run; zero: none
    /// was as long as a millisecond.
    pub fn longest_gap(&self, span: &Range<Duration>) -> Duration {
        let within = |gap: &&Gap| gap.from < span.end && gap.to > span.start;
        let lengths = self.gaps.iter().filter(within).map(|gap| gap.to - gap.from);
        lengths.max().unwrap_or_default()
    }

    /// Returns a run's result from the latencies of its requests.
    pub fn of(time: Duration, mut latencies_ns: Vec<u32>) -> Self {
        latencies_ns.sort_unstable();
        let (requests, seconds) = (latencies_ns.len() as u64, time.as_secs_f64());
        Self { requests, seconds, latencies_ns, gaps: Vec::new() }
    }

    /// Merges parts that ran at the same time into one.
    pub fn merge_beside(parts: Vec<Self>) -> Self {
        let seconds = parts.iter().map(|part| part.seconds).fold(0.0, f64::max);
        Self { seconds, ..Self::merge(parts) }
    }

    /// Merges all parts, one after the other, into one.
    pub fn merge(parts: Vec<Self>) -> Self {
        let (latencies_ns, gaps) = (Vec::new(), Vec::new());
        let mut all = Self { requests: 0, seconds: 0.0, latencies_ns, gaps };
        for part in parts {
            all.requests += part.requests;
            all.seconds += part.seconds;
            all.latencies_ns.extend(part.latencies_ns);
        }
        all.latencies_ns.sort_unstable();
        all
    }

    /// Returns the latency in microseconds below which this share of the requests stayed.
    pub fn percentile_us(&self, share: f64) -> f64 {
        let Some(last) = self.latencies_ns.len().checked_sub(1) else { return 0.0 };
        let index = ((last as f64) * share).round() as usize;
        f64::from(self.latencies_ns[index.min(last)]) / 1000.0
    }
}

pub struct Generator {
    stream: UnixStream,
    size_bytes: u64,
    random: u64,
    sequential: u64,
    data: Vec<u8>,
}

impl Generator {
    pub fn connect(socket: &Path) -> Result<Self, Error> {
        let mut stream = UnixStream::connect(socket)
            .map_err(Error::io(format!("connect to {}", socket.display())))?;
        let size_bytes = nbd::negotiate(&mut stream)
            .map_err(|error| Error::Failed(format!("{}: {error}", socket.display())))?;
        // The data is neither compressible nor uniform.
        let mut random = 0x5eed;
        let data = (0..(1 << 20)).map(|_| next(&mut random) as u8).collect();
        Ok(Self { stream, size_bytes, random, sequential: 0, data })
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Writes the whole device once, in blocks of this size.
    pub fn fill(&mut self, block_bytes: u32) -> Result<(), Error> {
        self.write_over(Pattern::Sequential, block_bytes)
    }

    /// Writes as much as the device holds, at random positions: the resulting log is that of a
    /// volume in use and not of a new one.
    pub fn wear_in(&mut self) -> Result<(), Error> {
        self.write_over(Pattern::Random, 4096)
    }

    /// Reads a random block; waits for as long as it takes.
    pub fn read_one(&mut self) -> Result<(), Error> {
        let (pattern, time) = (Pattern::Random, NO_LIMIT);
        let load = Load { writes_percent: 0, pattern, block_bytes: 4096, depth: 1, time };
        match self.drive(load, Some(1))?.requests {
            1 => Ok(()),
            _ => Err(Error::Failed("a read was not answered".into())),
        }
    }

    fn write_over(&mut self, pattern: Pattern, block_bytes: u32) -> Result<(), Error> {
        self.sequential = 0;
        let load = Load { writes_percent: 100, pattern, block_bytes, depth: 32, time: NO_LIMIT };
        self.drive(load, Some(self.size_bytes / u64::from(block_bytes)))?;
        self.flush()
    }

    /// Writes so many bytes without a pause, and flushes them. The time includes the flush.
    pub fn sustain(&mut self, load: Load, bytes: u64) -> Result<Outcome, Error> {
        self.sequential = 0;
        let start = Instant::now();
        let load = Load { time: NO_LIMIT, ..load };
        let mut outcome = self.drive(load, Some(bytes / u64::from(load.block_bytes)))?;
        self.flush()?;
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// Writes the device's first bytes anew, and flushes them.
    pub fn write_first(&mut self, bytes: u64, block_bytes: u32) -> Result<(), Error> {
        self.sequential = 0;
        let (pattern, time) = (Pattern::Sequential, NO_LIMIT);
        let load = Load { writes_percent: 100, pattern, block_bytes, depth: 32, time };
        self.drive(load, Some(bytes / u64::from(block_bytes)))?;
        self.flush()
    }

    /// Writes a block of each MiB of the device's first bytes, and flushes them.
    pub fn touch_first_mib(&mut self, bytes: u64) -> Result<(), Error> {
        self.touch(true, bytes / SPARSE_BYTES)
    }

    /// Reads or writes a block of each MiB, all of them so many times, and flushes the writes.
    pub fn touch_each_mib(&mut self, write: bool, times: u64) -> Result<(), Error> {
        self.touch(write, self.size_bytes / SPARSE_BYTES * times)
    }

    fn touch(&mut self, write: bool, blocks: u64) -> Result<(), Error> {
        self.sequential = 0;
        let (pattern, time) = (Pattern::Sparse, NO_LIMIT);
        let writes_percent = if write { 100 } else { 0 };
        let load = Load { writes_percent, pattern, block_bytes: 4096, depth: 32, time };
        self.drive(load, Some(blocks))?;
        self.flush()
    }

    pub fn flush(&mut self) -> Result<(), Error> {
        let request = nbd::Request { command: nbd::FLUSH, handle: 0, offset: 0, length: 0 };
        nbd::ask(&mut self.stream, &request, &[])
    }

    pub fn run(&mut self, load: Load) -> Result<Outcome, Error> {
        self.sequential = 0;
        self.drive(load, None)
    }

    fn next_offset(&mut self, load: &Load) -> u64 {
        let block = u64::from(load.block_bytes);
        let blocks = self.size_bytes / block;
        match load.pattern {
            Pattern::Random | Pattern::Commit => next(&mut self.random) % blocks * block,
            Pattern::Sequential => {
                let at = self.sequential % blocks * block;
                self.sequential += 1;
                at
            }
            Pattern::Sparse => {
                let at = self.sequential * SPARSE_BYTES % self.size_bytes;
                self.sequential += 1;
                at
            }
        }
    }

    fn drive(&mut self, load: Load, count: Option<u64>) -> Result<Outcome, Error> {
        self.stream.set_nonblocking(true).map_err(Error::io("socket"))?;
        let outcome = self.drive_nonblocking(load, count);
        self.stream.set_nonblocking(false).map_err(Error::io("socket"))?;
        outcome
    }

    fn drive_nonblocking(&mut self, load: Load, count: Option<u64>) -> Result<Outcome, Error> {
        let start = Instant::now();
        let end = start + load.time;
        let count = count.unwrap_or(u64::MAX);
        let mut sent_at = vec![start; load.depth];
        let mut free: Vec<usize> = (0..load.depth).rev().collect();
        let mut latencies = Vec::with_capacity(1 << 20);
        let mut gaps = Vec::new();
        let mut issued = 0u64;
        let mut done = 0u64;
        let mut output: Vec<u8> = Vec::new();
        let mut written = 0;
        let mut input = vec![0u8; 4 << 20];
        let (mut have, mut stopped) = (0, false);
        let payload = load.block_bytes as usize;
        let mut answer_bytes = vec![0; load.depth];
        let (commits, mut is_flushed) = (load.pattern == Pattern::Commit, vec![false; load.depth]);
        let mut last = start;
        loop {
            let now = Instant::now();
            stopped |= now >= end || issued >= count;
            while !stopped && issued < count && free.last().is_some() {
                let slot = free.pop().expect("looked at above");
                let offset = self.next_offset(&load);
                let write = match load.writes_percent {
                    0 => false,
                    100 => true,
                    percent => (next(&mut self.random) >> 32) % 100 < percent,
                };
                let (command, answered) =
                    if write { (nbd::WRITE, 0) } else { (nbd::READ, payload) };
                let handle = slot as u64;
                nbd::Request { command, handle, offset, length: load.block_bytes }
                    .encode(&mut output);
                if write {
                    let from = (next(&mut self.random) as usize) % (self.data.len() - payload + 1);
                    output.extend_from_slice(&self.data[from..from + payload]);
                }
                (sent_at[slot], answer_bytes[slot]) = (now, nbd::REPLY_LEN + answered);
                issued += 1;
            }
            while written < output.len() {
                match (&self.stream).write(&output[written..]) {
                    Ok(n) => written += n,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => return Err(Error::io("send requests")(e)),
                }
            }
            if written == output.len() {
                output.clear();
                written = 0;
            }
            if done == issued && stopped {
                break;
            }
            self.wait(written < output.len())?;
            match (&self.stream).read(&mut input[have..]) {
                Ok(0) => return Err(Error::Failed("the server closed the connection".into())),
                Ok(n) => have += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(e) => return Err(Error::io("read replies")(e)),
            }
            let now = Instant::now();
            let mut at = 0;
            while have - at >= nbd::REPLY_LEN {
                let slot = nbd::decode_reply(&input[at..])? as usize;
                let (Some(sent), Some(bytes)) = (sent_at.get(slot), answer_bytes.get(slot)) else {
                    let unasked = "the server answered a request that was never sent";
                    return Err(Error::Failed(unasked.into()));
                };
                if have - at < *bytes {
                    break;
                }
                at += bytes;
                if commits && !is_flushed[slot] {
                    is_flushed[slot] = true;
                    let (command, handle) = (nbd::FLUSH, slot as u64);
                    nbd::Request { command, handle, offset: 0, length: 0 }.encode(&mut output);
                    continue;
                }
                is_flushed[slot] = false;
                latencies.push(u32::try_from((now - *sent).as_nanos()).unwrap_or(u32::MAX));
                free.push(slot);
                done += 1;
            }
            input.copy_within(at..have, 0);
            have -= at;
            if now - last >= GAP_MIN {
                gaps.push(Gap { from: last - start, to: now - start });
            }
            last = now;
        }
        latencies.sort_unstable();
        let seconds = (last - start).as_secs_f64();
        Ok(Outcome { requests: done, seconds, latencies_ns: latencies, gaps })
    }

    fn wait(&self, to_write: bool) -> Result<(), Error> {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut flags = PollFlags::IN;
        if to_write {
            flags |= PollFlags::OUT;
        }
        let timeout = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
        match poll(&mut [PollFd::new(&self.stream, flags)], Some(&timeout)) {
            Ok(0) => Err(Error::Failed("the server did not answer for 30 seconds".into())),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("poll")(e.into())),
        }
    }
}

/// xorshift64*.
pub fn next(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}
