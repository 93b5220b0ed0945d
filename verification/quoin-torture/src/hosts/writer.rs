//! A writer that records which of its writes were acknowledged, and the check of a file after a
//! hand-over: each block holds the last acknowledged write or the one that was under way, and
//! nothing else. A write of a fenced host is recognised by its version.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

const BLOCK: usize = 4096;
pub const BLOCKS: u64 = 1024;
/// Versions of one writer; those of the next are all greater.
const VERSIONS: u64 = 1 << 32;

/// A version for each block; 0: zeros.
pub type Content = BTreeMap<u64, u64>;

fn block(run: u64, index: u64, version: u64) -> Vec<u8> {
    if version == 0 {
        return vec![0; BLOCK];
    }
    let words = [run, index, version];
    let mut bytes = Vec::with_capacity(BLOCK);
    while bytes.len() < BLOCK {
        let at = bytes.len() as u64;
        bytes.extend(words.iter().flat_map(|word| (word ^ (at << 40)).to_le_bytes()));
    }
    bytes.truncate(BLOCK);
    bytes
}

#[derive(Default)]
struct Log {
    /// Version of each block by the last acknowledged write.
    content: Content,
    /// The write whose fsync has not returned.
    under_way: Option<(u64, u64)>,
    writes: u64,
    slowest: Duration,
}

/// One writer of one file, on one host.
pub struct Writer {
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<()>>,
}

/// Possible content of the file of a writer.
pub struct Left {
    content: Content,
    under_way: Option<(u64, u64)>,
    pub writes: u64,
    pub slowest: Duration,
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writer {
    /// Continues to write from the file's present content. `generation` differs for each writer.
    pub fn start(path: &Path, run: u64, generation: u64, content: Content) -> Result<Self> {
        let file = File::options().create(true).write(true).truncate(false).open(path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        let log = Arc::new(Mutex::new(Log { content, ..Log::default() }));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stops) = (log.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut version = generation * VERSIONS;
            while !stops.load(Ordering::Relaxed) {
                version += 1;
                let index = version.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (BLOCKS - 1);
                lock(&shared).under_way = Some((index, version));
                let began = Instant::now();
                file.write_all_at(&block(run, index, version), index * BLOCK as u64)?;
                file.sync_all()?;
                let mut log = lock(&shared);
                log.content.insert(index, version);
                log.under_way = None;
                log.writes += 1;
                log.slowest = log.slowest.max(began.elapsed());
                drop(log);
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        Ok(Self { log, stop, thread })
    }

    pub fn writes(&self) -> u64 {
        lock(&self.log).writes
    }

    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until some writes that began after now are acknowledged.
    pub fn flows(&self, budget: Duration) -> Result<()> {
        let (began, before) = (Instant::now(), self.writes());
        while self.writes() < before + 5 {
            ensure!(!self.has_ended(), "the writer got an error");
            ensure!(began.elapsed() < budget, "IO makes no progress for {} s", budget.as_secs());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns the acknowledged writes so far. The writer may continue.
    pub fn left(&self) -> Left {
        let log = lock(&self.log);
        let Log { content, under_way, writes, slowest } = &*log;
        let (content, writes, slowest) = (content.clone(), *writes, *slowest);
        Left { content, under_way: *under_way, writes, slowest }
    }

    /// Ends the writer, which must not have seen an error.
    pub fn finish(self) -> Result<Left> {
        self.stop.store(true, Ordering::Relaxed);
        let log = self.log.clone();
        self.ended()?.context("the writer got an error")?;
        let log = lock(&log);
        let (content, under_way) = (log.content.clone(), log.under_way);
        Ok(Left { content, under_way, writes: log.writes, slowest: log.slowest })
    }

    /// Tells the writer to end at its next return from the kernel.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Returns the result of a writer that has ended, or will.
    pub fn ended(self) -> Result<std::io::Result<()>> {
        self.thread.join().ok().context("the writer panicked")
    }
}

impl Left {
    /// Reads the file after a hand-over; returns its content.
    ///
    /// # Errors
    /// A block holds neither the last acknowledged write nor the one that was under way.
    pub fn judge(&self, path: &PathBuf, run: u64) -> Result<Content> {
        let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let zeros = vec![0; BLOCK];
        let mut found = Content::new();
        for index in 0..BLOCKS {
            let at = index as usize * BLOCK;
            let held = bytes.get(at..at + BLOCK).unwrap_or(&zeros);
            let acknowledged = self.content.get(&index).copied().unwrap_or(0);
            let under_way = self.under_way.filter(|(block, _)| *block == index);
            let allowed = [Some(acknowledged), under_way.map(|(_, version)| version)];
            let is = allowed.into_iter().flatten().find(|v| held == block(run, index, *v));
            let Some(is) = is else {
                let word =
                    |at: usize| u64::from_le_bytes(held[at..at + 8].try_into().unwrap_or([0; 8]));
                bail!(
                    "{}: block {index} was acknowledged with version {acknowledged:#x} (under way: \
                     {under_way:x?}) and begins with {:#x} {:#x} {:#x}",
                    path.display(),
                    word(0),
                    word(8),
                    word(16),
                );
            };
            found.insert(index, is);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_a_fenced_writer_a_lost_one_and_a_damaged_one_are_each_found() {
        let directory = std::env::temp_dir().join(format!("quoin-writer-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("file");
        let writer = Writer::start(&path, 7, 1, Content::new()).unwrap();
        writer.flows(Duration::from_secs(60)).unwrap();
        let left = writer.finish().unwrap();
        let content = left.judge(&path, 7).unwrap();
        let (index, version) = content.iter().find(|(_, version)| **version > 0).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let put = |bytes: &[u8]| file.write_all_at(bytes, index * BLOCK as u64).unwrap();
        for wrong in
            [block(7, *index, version + 1), block(7, *index, 0), block(8, *index, *version)]
        {
            put(&wrong);
            let said = left.judge(&path, 7).unwrap_err().to_string();
            assert!(said.contains(&format!("block {index} was acknowledged")), "{said}");
        }
        let later = Left { under_way: Some((*index, version + 1)), ..left };
        put(&block(7, *index, version + 1));
        later.judge(&path, 7).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
