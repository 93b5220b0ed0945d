//! A program that writes on a volume without end, and what it was told to have there.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::csi::{Content, Volume};

/// Files, or blocks of a block volume, that are kept; older ones are overwritten or deleted.
const KEPT: u64 = 48;
const BYTES: usize = 4096;
const SECTOR: usize = 512;
const PAUSE: Duration = Duration::from_millis(5);

/// Number of the last write that was acknowledged.
#[derive(Clone, Copy, Default, Debug)]
pub struct Kept(u64);

#[derive(Default)]
struct Shared {
    acknowledged: AtomicU64,
    stop: AtomicBool,
    has_ended: AtomicBool,
}

pub struct Workload {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<()>>,
}

/// Content of the write of a number.
fn content(number: u64) -> Vec<u8> {
    let sector = |at: u64| ((number << 8) | at).to_le_bytes().repeat(SECTOR / 8);
    (0..(BYTES / SECTOR) as u64).flat_map(sector).collect()
}

impl Workload {
    /// Goes on behind what is kept.
    pub fn start(volume: &Volume, kept: Kept) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        shared.acknowledged.store(kept.0, Ordering::SeqCst);
        // The write that was begun and not acknowledged is made again.
        let first = kept.0 + 1;
        // Opened before the thread begins, so that what it writes is on the volume in every case.
        let is_block = volume.content == Content::Block;
        let place = File::options().read(true).write(is_block).open(&volume.target);
        let place = place.with_context(|| format!("open {}", volume.target.display()))?;
        let own = shared.clone();
        let thread = std::thread::spawn(move || {
            let outcome = write_on(&own, &place, is_block, first);
            drop(place);
            own.has_ended.store(true, Ordering::SeqCst);
            outcome
        });
        Ok(Self { shared, thread })
    }

    /// # Errors
    /// It has ended.
    pub fn check(&self) -> Result<()> {
        match self.shared.has_ended.load(Ordering::SeqCst) {
            true => bail!("it ended behind {}", self.shared.acknowledged.load(Ordering::SeqCst)),
            false => Ok(()),
        }
    }

    pub fn flows(&self, budget: Duration) -> Result<()> {
        let (began, before) = (Instant::now(), self.shared.acknowledged.load(Ordering::SeqCst));
        while self.shared.acknowledged.load(Ordering::SeqCst) < before + 3 {
            self.check()?;
            ensure!(began.elapsed() < budget, "no write is acknowledged for {budget:?}");
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Stops it, and returns what is kept and how it ended.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(self, within: Duration) -> Result<(Kept, Result<()>)> {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.ended(within)
    }

    /// Waits until it has ended by itself.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn ended(self, within: Duration) -> Result<(Kept, Result<()>)> {
        let began = Instant::now();
        while !self.thread.is_finished() {
            ensure!(began.elapsed() < within, "a workload does not end within {within:?}");
            std::thread::sleep(PAUSE);
        }
        let outcome = self.thread.join().ok().context("the thread of a workload")?;
        Ok((Kept(self.shared.acknowledged.load(Ordering::SeqCst)), outcome))
    }
}

/// Writes until it is stopped, or a write fails.
fn write_on(shared: &Shared, place: &File, is_block: bool, first: u64) -> Result<()> {
    // By the open directory: whatever is mounted over it, or taken away, it stays on the volume.
    let directory = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
    let path = |number: u64| directory.join(number.to_string());
    for number in first.. {
        if shared.stop.load(Ordering::SeqCst) {
            break;
        }
        let bytes = content(number);
        if is_block {
            place.write_all_at(&bytes, number % KEPT * BYTES as u64)?;
            place.sync_all()?;
        } else {
            let mut file = File::create(path(number))?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            drop(file);
            rustix::fs::fsync(place)?;
        }
        shared.acknowledged.store(number, Ordering::SeqCst);
        if !is_block && number > KEPT {
            // It may be gone, where the one before was never acknowledged.
            let _ = std::fs::remove_file(path(number - KEPT));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

impl Kept {
    pub fn acknowledged(&self) -> u64 {
        self.0
    }

    /// Checks that all is there that was acknowledged and not overwritten or deleted since.
    ///
    /// # Errors
    /// Names the write that is lost.
    pub fn verify(&self, volume: &Volume) -> Result<()> {
        // The write after the last one that was acknowledged may have been under way.
        let first = (self.0 + 2).saturating_sub(KEPT).max(1);
        let is_block = volume.content == Content::Block;
        let device = match is_block {
            true => Some(File::open(&volume.target)?),
            false => None,
        };
        for number in first..=self.0 {
            let mut bytes = Vec::new();
            match &device {
                Some(device) => {
                    bytes.resize(BYTES, 0);
                    device.read_exact_at(&mut bytes, number % KEPT * BYTES as u64)?;
                }
                None => {
                    let path = volume.target.join(number.to_string());
                    let read = File::open(&path).and_then(|mut file| file.read_to_end(&mut bytes));
                    read.with_context(|| path.display().to_string())?;
                }
            }
            ensure!(bytes == content(number), "write {number} has other bytes");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_was_acknowledged_and_is_not_there_is_found() {
        let directory = std::env::temp_dir().join(format!("quoin-workload-{}", std::process::id()));
        for kind in [Content::Ext4, Content::Block] {
            std::fs::create_dir_all(&directory).unwrap();
            let mut volume = Volume::new("1".into(), "v", kind, &directory).unwrap();
            if kind == Content::Block {
                volume.target = directory.join("device");
                let device = File::create(&volume.target).unwrap();
                device.set_len(KEPT * BYTES as u64).unwrap();
            } else {
                std::fs::create_dir_all(&volume.target).unwrap();
            }
            let mut kept = Kept::default();
            for _ in 0..2 {
                let workload = Workload::start(&volume, kept).unwrap();
                workload.flows(Duration::from_secs(30)).unwrap();
                let (after, outcome) = workload.stop(Duration::from_secs(30)).unwrap();
                outcome.unwrap();
                assert!(after.acknowledged() >= kept.acknowledged() + 3);
                kept = after;
                kept.verify(&volume).unwrap();
            }
            Kept(kept.0 + 1).verify(&volume).unwrap_err();
            std::fs::remove_dir_all(&directory).unwrap();
        }
    }
}
