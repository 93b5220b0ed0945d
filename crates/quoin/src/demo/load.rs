//! The application of the demo: writers and readers that never stop, check every byte they
//! read, and feel every pause.

use anyhow::{Result, bail};
use rand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::surface::{PAGE_BYTES, Pages, Surface, fill};

/// Pages that one worker owns; small enough that it reads what it wrote before.
pub const WORKER_PAGES: u64 = 2048;

/// State that the workers share.
#[derive(Default)]
struct Pulse {
    stop: AtomicBool,
    /// No caller checks any more whether all that was written is there.
    abandoned: AtomicBool,
    operations: Vec<AtomicU64>,
    slowest_us: AtomicU64,
    problems: Mutex<Vec<String>>,
}

/// Running workers.
pub struct Load {
    pulse: Arc<Pulse>,
    workers: Vec<JoinHandle<()>>,
}

/// Operations and longest pause since the previous step.
#[derive(Debug)]
pub struct Reading {
    pub operations: u64,
    /// The longest time that any one operation took, as the application felt it.
    pub pause: Duration,
}

impl Load {
    /// Starts one worker for each surface; each surface has [`WORKER_PAGES`] pages of its own.
    pub fn start(surfaces: Vec<Arc<dyn Surface>>) -> Self {
        let operations = surfaces.iter().map(|_| AtomicU64::new(0)).collect();
        let pulse = Arc::new(Pulse { operations, ..Pulse::default() });
        let workers = surfaces
            .into_iter()
            .enumerate()
            .map(|(index, surface)| {
                let pulse = Arc::clone(&pulse);
                std::thread::spawn(move || {
                    if let Err(error) = work(index, &*surface, &pulse) {
                        pulse.problem(format!("worker {index}: {error:#}"));
                    }
                })
            })
            .collect();
        Self { pulse, workers }
    }

    /// Waits until every worker has finished some operations that began after now.
    ///
    /// # Errors
    /// The first problem that a worker met, or no progress within `budget`.
    pub fn flows_again(&self, budget: Duration) -> Result<()> {
        let before = self.pulse.counts();
        let began = Instant::now();
        loop {
            self.check()?;
            // A worker may have had one operation under way, but not three.
            if before.iter().zip(self.pulse.counts()).all(|(before, now)| now >= before + 3) {
                return Ok(());
            }
            if began.elapsed() > budget {
                bail!("IO makes no progress for {} s", budget.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// # Errors
    /// The first problem that a worker met: the application must see none.
    pub fn check(&self) -> Result<()> {
        match self.pulse.lock().first() {
            None => Ok(()),
            Some(problem) => bail!("the application got an error: {problem}"),
        }
    }

    /// Reads and resets the slowest operation.
    pub fn read(&self, since: u64) -> Reading {
        Reading {
            operations: self.operations() - since,
            pause: Duration::from_micros(self.pulse.slowest_us.swap(0, Ordering::SeqCst)),
        }
    }

    pub fn operations(&self) -> u64 {
        self.pulse.counts().iter().sum()
    }

    /// Ends the workers once each has checked all its pages.
    ///
    /// # Errors
    /// The first problem that a worker met.
    pub fn finish(mut self) -> Result<()> {
        self.join();
        self.check()
    }

    fn join(&mut self) {
        self.pulse.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                self.pulse.problem("a worker panicked".into());
            }
        }
    }
}

impl Drop for Load {
    /// The workers hold files open: nothing can be unmounted before they are gone.
    fn drop(&mut self) {
        self.pulse.abandoned.store(true, Ordering::SeqCst);
        self.join();
    }
}

impl Pulse {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.problems.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn problem(&self, problem: String) {
        self.lock().push(problem);
    }

    fn counts(&self) -> Vec<u64> {
        self.operations.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }
}

fn work(index: usize, surface: &dyn Surface, pulse: &Pulse) -> Result<()> {
    let seed = index as u64 + 1;
    // 0: never written. A page is known to hold exactly its newest version, since one worker
    // has one operation under way.
    let mut versions = vec![0u64; WORKER_PAGES as usize];
    let mut random = rand::rng();
    let (mut page, mut expected) = (Pages::new(1), Pages::new(1));
    while !pulse.stop.load(Ordering::SeqCst) {
        let place = random.random_range(0..WORKER_PAGES);
        let version = versions[place as usize];
        let began = Instant::now();
        match random.random_range(0..100) {
            0 => surface.flush()?,
            1..60 => {
                fill(page.bytes_mut(), seed, place, version + 1);
                surface.write(place * PAGE_BYTES as u64, &page)?;
                versions[place as usize] = version + 1;
            }
            _ if version > 0 => {
                check_page(surface, seed, place, version, &mut page, &mut expected)?
            }
            _ => continue,
        }
        let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        pulse.slowest_us.fetch_max(took, Ordering::SeqCst);
        pulse.operations[index].fetch_add(1, Ordering::SeqCst);
    }
    for (place, version) in versions.iter().enumerate().filter(|(_, version)| **version > 0) {
        if pulse.abandoned.load(Ordering::SeqCst) {
            return Ok(());
        }
        check_page(surface, seed, place as u64, *version, &mut page, &mut expected)?;
    }
    surface.flush()
}

fn check_page(
    surface: &dyn Surface,
    seed: u64,
    place: u64,
    version: u64,
    page: &mut Pages,
    expected: &mut Pages,
) -> Result<()> {
    surface.read(place * PAGE_BYTES as u64, page)?;
    fill(expected.bytes_mut(), seed, place, version);
    if page.bytes() != expected.bytes() {
        bail!("page {place} does not hold its version {version}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that answers late, fails, or forgets a write on request.
    #[derive(Default)]
    struct Memory {
        bytes: Mutex<Vec<u8>>,
        slow: AtomicBool,
        fails: AtomicBool,
        forgets: AtomicBool,
    }

    impl Memory {
        fn new() -> Arc<Self> {
            let bytes = Mutex::new(vec![0; WORKER_PAGES as usize * PAGE_BYTES]);
            Arc::new(Self { bytes, ..Self::default() })
        }
        fn range(offset: u64) -> std::ops::Range<usize> {
            offset as usize..offset as usize + PAGE_BYTES
        }
    }

    impl Surface for Memory {
        fn write(&self, offset: u64, pages: &Pages) -> Result<()> {
            if self.slow.swap(false, Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(40));
            }
            if self.fails.load(Ordering::SeqCst) {
                bail!("EIO");
            }
            if !self.forgets.load(Ordering::SeqCst) {
                self.bytes.lock().unwrap()[Self::range(offset)].copy_from_slice(pages.bytes());
            }
            Ok(())
        }
        fn read(&self, offset: u64, pages: &mut Pages) -> Result<()> {
            pages.bytes_mut().copy_from_slice(&self.bytes.lock().unwrap()[Self::range(offset)]);
            Ok(())
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_pause_is_measured_and_a_healthy_volume_has_no_error() {
        let memory = Memory::new();
        let load = Load::start(vec![memory.clone()]);
        load.flows_again(Duration::from_secs(20)).unwrap();
        load.read(0);
        memory.slow.store(true, Ordering::SeqCst);
        load.flows_again(Duration::from_secs(20)).unwrap();
        while memory.slow.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        load.flows_again(Duration::from_secs(20)).unwrap();
        assert!(load.read(0).pause >= Duration::from_millis(40));
        load.finish().unwrap();
    }

    #[test]
    fn an_error_and_a_lost_write_are_both_found() {
        for lost in [false, true] {
            let memory = Memory::new();
            let load = Load::start(vec![memory.clone()]);
            load.flows_again(Duration::from_secs(20)).unwrap();
            let harm = if lost { &memory.forgets } else { &memory.fails };
            harm.store(true, Ordering::SeqCst);
            while load.flows_again(Duration::from_secs(20)).is_ok() {}
            let words = if lost { "does not hold its version" } else { "EIO" };
            let message = load.finish().unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
