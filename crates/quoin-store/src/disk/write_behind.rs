//! Writing out what was appended, on a thread of its own.
//!
//! The kernel lets written pages lie until they are many or old, then writes all of them and has
//! writers wait meanwhile. A disk that begins earlier is never idle beside a writer, and the next
//! sync finds little. The call that begins waits for a place in the device's queue, and the thread
//! that serves clients must not.
//!
//! The kernel is only told to begin. Waiting for the end by `sync_file_range` would take an error of
//! the write-back that no sync has reported yet, and the next life of the pool would not be told of
//! it. So the pages that are under way are counted with `cachestat`, which reports no errors.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are begun in one call.
const STEP_BYTES: u64 = 8 << 20;
/// Bytes that are under way at once, about: a sync or a read waits behind them.
const UNDER_WAY_BYTES_MAX: u64 = 64 << 20;
/// Ranges that wait; of more the kernel writes the oldest out in its own time.
const RANGES_MAX: usize = 1024;
/// Time between two looks at what is under way.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// A disk that takes longer over so few bytes is left to the kernel.
const WAIT_MAX: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Waiting {
    ranges: VecDeque<Range<u64>>,
    is_closed: bool,
}

impl Waiting {
    fn add(&mut self, range: Range<u64>) {
        match self.ranges.back_mut().filter(|last| last.end == range.start) {
            Some(last) => last.end = range.end,
            None => self.ranges.push_back(range),
        }
        if self.ranges.len() > RANGES_MAX {
            self.ranges.pop_front();
        }
    }

    fn next(&mut self) -> Option<Range<u64>> {
        let first = self.ranges.front_mut()?;
        let step = first.start..first.end.min(first.start.saturating_add(STEP_BYTES));
        first.start = step.end;
        if first.is_empty() {
            self.ranges.pop_front();
        }
        Some(step)
    }
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next range to begin; waits for one. `None`: the queue is closed.
    fn next(&self) -> Option<Range<u64>> {
        let mut waiting = self.waiting();
        loop {
            if waiting.is_closed {
                return None;
            }
            if let Some(range) = waiting.next() {
                return Some(range);
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Ranges of a file on their way to the disk. What waits when it is dropped is left to the kernel.
#[derive(Default)]
pub(crate) struct WriteBehind {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl WriteBehind {
    /// Has a range written out soon. Nothing is promised: without a thread nothing is done.
    pub fn add(&mut self, file: &File, range: Range<u64>) {
        if self.thread.is_none() {
            let Ok(file) = file.try_clone() else { return };
            let queue = self.queue.clone();
            let work =
                move || run(&queue, |range| begin(&file, range), |range| is_out(&file, range));
            self.thread = std::thread::Builder::new().name("write-behind".into()).spawn(work).ok();
        }
        if self.thread.is_some() {
            self.queue.waiting().add(range);
            self.queue.changed.notify_one();
        }
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.queue.waiting().is_closed = true;
        self.queue.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It promised nothing, so its outcome has no effect.
            let _ = thread.join();
        }
    }
}

/// Begins range after range, and waits for the oldest ones while too much is under way.
/// `is_out`: whether a range is written; `None`: that is not known.
fn run(
    queue: &Queue,
    mut begin: impl FnMut(&Range<u64>),
    mut is_out: impl FnMut(&Range<u64>) -> Option<bool>,
) {
    let (mut under_way, mut bytes) = (VecDeque::new(), 0);
    while let Some(range) = queue.next() {
        begin(&range);
        bytes += range.end - range.start;
        under_way.push_back(range);
        while bytes > UNDER_WAY_BYTES_MAX
            && let Some(oldest) = under_way.pop_front()
        {
            let began = Instant::now();
            while is_out(&oldest) == Some(false) && began.elapsed() < WAIT_MAX {
                std::thread::sleep(LOOK_EVERY);
            }
            bytes -= oldest.end - oldest.start;
        }
    }
}

fn begin(file: &File, range: &Range<u64>) {
    let length = (range.end - range.start).try_into();
    let (Ok(offset), Ok(length)) = (range.start.try_into(), length) else { return };
    // SAFETY: the descriptor is open as long as `file`; the call takes no pointers. It only begins
    // write-back, so its result is of no consequence.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, length, libc::SYNC_FILE_RANGE_WRITE);
    }
}

/// Number of the system call `cachestat` (Linux 6.5), the same on every architecture.
const CACHESTAT: libc::c_long = 451;

/// Range of a file, as `cachestat` takes it.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// Pages of such a range in the cache.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    under_write_back: u64,
    evicted: u64,
    recently_evicted: u64,
}

fn cached(file: &File, range: &Range<u64>) -> Option<Cachestat> {
    let asked = CachestatRange { offset: range.start, length: range.end - range.start };
    let mut found = Cachestat::default();
    // SAFETY: the descriptor is open as long as `file`, and the kernel reads and writes no more than
    // the two structures, which have its layout and outlive the call.
    let result =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut found, 0) };
    (result == 0).then_some(found)
}

/// Whether nothing of a range is on its way to the disk; `None`: this kernel does not tell.
fn is_out(file: &File, range: &Range<u64>) -> Option<bool> {
    cached(file, range).map(|found| found.under_write_back == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::os::unix::fs::FileExt;

    fn queue(ranges: &[Range<u64>]) -> Queue {
        let queue = Queue::default();
        ranges.iter().for_each(|range| queue.waiting().add(range.clone()));
        queue
    }

    #[test]
    fn neighbours_are_written_out_together_in_steps_and_no_more_ranges_wait_than_the_bound() {
        let mib = 1 << 20;
        let queue = queue(&[0..5 * mib, 5 * mib..20 * mib, 30 * mib..31 * mib]);
        let mut taken = Vec::new();
        while !queue.waiting().ranges.is_empty() {
            taken.extend(queue.next());
        }
        let steps = [0..8 * mib, 8 * mib..16 * mib, 16 * mib..20 * mib, 30 * mib..31 * mib];
        assert_eq!(taken, steps);
        for n in 0..2 * RANGES_MAX as u64 {
            queue.waiting().add(2 * n..2 * n + 1);
        }
        assert_eq!(queue.waiting().ranges.len(), RANGES_MAX);
        assert_eq!(queue.next(), Some(2 * RANGES_MAX as u64..2 * RANGES_MAX as u64 + 1));
    }

    #[test]
    fn no_more_is_under_way_at_once_than_the_bound_and_one_step() {
        let all = 64 * STEP_BYTES;
        let queue = queue(std::slice::from_ref(&(0..all)));
        let (begun, out, most) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let looks = RefCell::new(0);
        run(
            &queue,
            |range| {
                begun.set(begun.get() + range.end - range.start);
                most.set(most.get().max(begun.get() - out.get()));
                if begun.get() == all {
                    queue.waiting().is_closed = true;
                }
            },
            |range| {
                // Each is out at the third look.
                *looks.borrow_mut() += 1;
                let is_out = *looks.borrow() % 3 == 0;
                if is_out {
                    out.set(out.get() + range.end - range.start);
                }
                Some(is_out)
            },
        );
        assert_eq!(begun.get(), all);
        assert!(most.get() <= UNDER_WAY_BYTES_MAX + STEP_BYTES, "{} under way", most.get());
        assert!(out.get() >= all - UNDER_WAY_BYTES_MAX - STEP_BYTES);
    }

    #[test]
    fn what_was_added_reaches_the_disk_without_a_sync() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = options.open(folder.path().join("file")).expect("a file");
        let length = 24 << 20;
        file.write_all_at(&vec![7; length], 0).expect("a write");
        let range = 0..length as u64;
        let in_memory = rustix::fs::fstatfs(&file).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC);
        let Some(before) = cached(&file, &range).filter(|_| !in_memory) else {
            // This kernel or this file system does not show what is written.
            return;
        };
        assert!(before.cached > 0);
        let mut behind = WriteBehind::default();
        behind.add(&file, range.clone());
        let began = Instant::now();
        let is_clean = || cached(&file, &range).is_some_and(|s| s.dirty + s.under_write_back == 0);
        while !is_clean() {
            // The kernel begins by itself after 30 s.
            assert!(began.elapsed() < Duration::from_secs(20), "nothing was written out");
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
