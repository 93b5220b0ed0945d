//! Filling a range of a file with zeros on a thread of its own, past the page cache.

use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::disk::file::write_all;
use crate::disk::pending_writes::zeros;

/// Bytes of one write: others who write to the file wait for it.
const STEP_BYTES: u64 = 1 << 20;

/// The range that is being filled, if any. Dropping it waits for the write under way, which must
/// not overwrite what the next process writes to the file.
#[derive(Default)]
pub(crate) struct Filling {
    thread: Option<JoinHandle<bool>>,
    stop: Arc<AtomicBool>,
}

impl Filling {
    /// False: one is being filled already, or no thread can be had.
    pub fn begin(&mut self, file: Arc<File>, offset: u64, length: u64) -> bool {
        if self.thread.is_some() {
            return false;
        }
        let stop = self.stop.clone();
        let fill = move || fill(&file, offset, length, &stop);
        let spawned = std::thread::Builder::new().name("fill".into()).spawn(fill);
        self.thread = spawned.ok();
        self.thread.is_some()
    }

    /// Whether all of the range was filled; `None`: it goes on.
    pub fn end(&mut self) -> Option<bool> {
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return None;
        }
        Some(self.thread.take().is_some_and(|thread| thread.join().unwrap_or(false)))
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The outcome has no effect any more.
            let _ = thread.join();
        }
    }
}

fn fill(file: &File, offset: u64, length: u64, stop: &AtomicBool) -> bool {
    let zeros = zeros(usize::MAX);
    let end = offset + length;
    let mut at = offset;
    while at < end {
        let step = STEP_BYTES.min(end - at);
        let parts: Vec<IoSlice<'_>> = (0..step)
            .step_by(zeros.len())
            .map(|from| IoSlice::new(&zeros[..zeros.len().min((step - from) as usize)]))
            .collect();
        if stop.load(Ordering::Relaxed) || write_all(file, at, &parts).is_err() {
            return false;
        }
        at += step;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_range_is_filled_to_its_ends_and_not_beyond_and_one_at_a_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let file = Arc::new(options.open(folder.path().join("file")).expect("a file"));
        let length = (5 << 20) + 8192;
        file.write_all_at(&vec![7; length], 0).expect("a write");
        let mut filling = Filling::default();
        assert_eq!(filling.end(), Some(false), "nothing was begun");
        assert!(filling.begin(file.clone(), 4096, length as u64 - 8192));
        assert!(!filling.begin(file.clone(), 0, 4096), "one at a time");
        let done = loop {
            match filling.end() {
                Some(done) => break done,
                None => std::thread::yield_now(),
            }
        };
        assert!(done);
        let mut found = vec![1; length];
        file.read_exact_at(&mut found, 0).expect("a read");
        let (first, rest) = found.split_at(4096);
        let (middle, last) = rest.split_at(length - 8192);
        assert!(first.iter().chain(last).all(|byte| *byte == 7));
        assert!(middle.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_range_that_cannot_be_written_is_not_said_to_be_filled() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, b"").expect("a file");
        let mut filling = Filling::default();
        assert!(filling.begin(Arc::new(File::open(&path).expect("a file")), 0, 4096));
        while filling.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            std::thread::yield_now();
        }
        assert_eq!(filling.end(), Some(false));
    }
}
