//! A client that verifies its writes, for as long as the test needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_nbd::client::Client;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{BUDGET, Dev, block};

const BLOCK: u64 = 4096;
/// Blocks of the volume, which has 8 MiB at least.
const BLOCKS: u64 = 2048;
const WRITERS: u64 = 4;

/// Writers that each own a part of the volume and know the right content of every block of it.
pub struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    writers: Vec<std::thread::JoinHandle<Vec<u64>>>,
    client: Arc<Client>,
}

impl Load {
    pub fn start(client: Client, seed: u64) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = Arc::new(client);
        let writers = (0..WRITERS)
            .map(|writer| {
                let (stop, done, client) = (stop.clone(), done.clone(), client.clone());
                std::thread::spawn(move || work(&client, writer, seed, &stop, &done))
            })
            .collect();
        Load { stop, done, writers, client }
    }

    /// Returns how many operations are done so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits until so many more operations are done.
    pub fn assert_progress(&self, dev: &Dev, operations: u64) {
        self.assert_progress_or(operations, || dev.show_logs());
    }

    /// Waits as [`Self::assert_progress`] does, where the processes are not those of a [`Dev`].
    pub fn assert_progress_or(&self, operations: u64, show_logs: impl Fn()) {
        let (from, began) = (self.done.load(Ordering::Relaxed), Instant::now());
        while self.done.load(Ordering::Relaxed) < from + operations {
            if began.elapsed() > BUDGET || self.writers.iter().any(|w| w.is_finished()) {
                show_logs();
                panic!(
                    "IO does not go on: {} operations",
                    self.done.load(Ordering::Relaxed) - from
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it and reads everything once more: no write was lost, none undone.
    pub fn verify(self) {
        self.stop.store(true, Ordering::Relaxed);
        for (writer, handle) in (0..).zip(self.writers) {
            let versions = handle.join().expect("a writer saw what it must not see");
            for (n, version) in (0..).zip(versions) {
                expect(&self.client, n * WRITERS + writer, version);
            }
        }
        assert!(self.done.load(Ordering::Relaxed) > 100);
        Arc::into_inner(self.client).unwrap().stop();
    }
}

fn expect(client: &Client, lba: u64, version: u64) {
    let read = client.read(lba * BLOCK, BLOCK as u32).unwrap();
    let good = match version {
        0 => read.iter().all(|b| *b == 0),
        version => read == block(lba, version),
    };
    assert!(good, "block {lba} is not at version {version}: {:?}", &read[..24]);
}

fn work(client: &Client, writer: u64, seed: u64, stop: &AtomicBool, done: &AtomicU64) -> Vec<u64> {
    let mut random = StdRng::seed_from_u64(seed ^ (writer << 32));
    let mut versions = vec![0; (BLOCKS / WRITERS) as usize];
    while !stop.load(Ordering::Relaxed) {
        let n = random.random_range(0..versions.len());
        let lba = n as u64 * WRITERS + writer;
        match random.random_range(0..10) {
            0..6 => {
                versions[n] += 1;
                let data = Bytes::from(block(lba, versions[n]));
                let fua = random.random_range(0..20) == 0;
                client.write(lba * BLOCK, data, fua).expect("a write is never refused");
            }
            6..9 => expect(client, lba, versions[n]),
            _ => client.flush().expect("a flush is never refused"),
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    versions
}
