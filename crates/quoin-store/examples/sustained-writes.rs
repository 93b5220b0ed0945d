//! How steadily a disk takes what three pools append, by the way in which it is written.
//!
//! `cargo run --release -p quoin-store --example sustained-writes -- [FOLDER] [MIB] [ROUNDS]`: three
//! threads append to a file each, 128 KiB at a time, and sync at the end.
//!
//! * `kernel`: through the page cache, written out when the kernel likes;
//! * `at-once`: the writer itself begins write-back after each MiB;
//! * `behind`: the pool's way, a thread begins it behind the writer;
//! * `direct`: past the page cache, and `direct-1m` 1 MiB at a time.
//!
//! Figures are printed, nothing is judged: medians of the rounds, which take the ways in turn.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use quoin_store::{Disk, FileDisk};

const WRITE_BYTES: u64 = 128 << 10;
const FILES: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Kernel,
    AtOnce,
    Behind,
    Direct { bytes: u64 },
}

const WAYS: [(&str, Way); 5] = [
    ("kernel", Way::Kernel),
    ("at-once", Way::AtOnce),
    ("behind", Way::Behind),
    ("direct", Way::Direct { bytes: WRITE_BYTES }),
    ("direct-1m", Way::Direct { bytes: 1 << 20 }),
];

/// Figures of one file: time until the last write, time until the sync, and the writes' times.
struct Run {
    written: Duration,
    synced: Duration,
    latencies: Vec<Duration>,
}

/// Bytes at an address that direct IO takes.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(bytes: u64) -> Self {
        let memory: Vec<u8> = (0..bytes + 4096).map(|n| (n * 31 + n / 257) as u8).collect();
        let start = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
        Aligned(memory, start)
    }

    fn bytes(&self, length: u64) -> &[u8] {
        &self.0[self.1..self.1 + length as usize]
    }
}

fn append(path: &Path, size: u64, way: Way) -> Run {
    let disk = FileDisk::create(path, size, true).expect("a file for the benchmark");
    assert!(disk.claim(0, size, 0), "room for the benchmark");
    let step = if let Way::Direct { bytes } = way { bytes } else { WRITE_BYTES };
    let data = Aligned::new(step);
    let direct = matches!(way, Way::Direct { .. }).then(|| {
        let mut options = File::options();
        options.write(true).custom_flags(libc::O_DIRECT);
        options.open(path).expect("a file system with direct IO")
    });
    let buffered = File::options().write(true).open(path).expect("the file");
    let mut latencies = Vec::new();
    let (start, mut begun) = (Instant::now(), 0);
    for offset in (0..size).step_by(step as usize) {
        let before = Instant::now();
        match &direct {
            Some(file) => {
                use std::os::unix::fs::FileExt;
                file.write_all_at(data.bytes(step), offset).expect("a write");
            }
            None => disk.write_at(offset, &[IoSlice::new(data.bytes(step))]).expect("a write"),
        }
        let end = offset + step;
        if way == Way::AtOnce && end - begun >= 1 << 20 {
            // SAFETY: the descriptor is open; the call takes no pointers.
            unsafe {
                let flags = libc::SYNC_FILE_RANGE_WRITE;
                let (from, length) = (begun as i64, (end - begun) as i64);
                libc::sync_file_range(buffered.as_raw_fd(), from, length, flags);
            }
            begun = end;
        }
        if way == Way::Behind && end - begun >= 8 << 20 {
            disk.write_out(begun, end - begun);
            begun = end;
        }
        latencies.push(before.elapsed());
    }
    let written = start.elapsed();
    disk.sync().expect("a sync");
    let synced = start.elapsed();
    drop(disk);
    std::fs::remove_file(path).expect("the benchmark's own file");
    Run { written, synced, latencies }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: u64 = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(512).max(1);
    let rounds: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(5).max(1);
    let mut figures = vec![Vec::new(); WAYS.len()];
    for _ in 0..rounds {
        for ((name, way), figures) in WAYS.iter().zip(&mut figures) {
            let path = |n| folder.join(format!("quoin-{name}-{}-{n}", std::process::id()));
            let files = (0..FILES).map(|n| (path(n), *way));
            let threads: Vec<_> = files
                .map(|(path, way)| std::thread::spawn(move || append(&path, mib << 20, way)))
                .collect();
            let runs: Vec<Run> =
                threads.into_iter().map(|t| t.join().expect("a thread that ends")).collect();
            let slowest = |of: fn(&Run) -> Duration| {
                runs.iter().map(of).max().unwrap_or_default().as_secs_f64()
            };
            let mut latencies: Vec<Duration> =
                runs.iter().flat_map(|run| run.latencies.iter().copied()).collect();
            latencies.sort_unstable();
            let at = |share: f64| {
                let index = (latencies.len() - 1) as f64 * share;
                latencies[index as usize].as_secs_f64() * 1e6
            };
            figures.push([
                mib as f64 / slowest(|run| run.written),
                mib as f64 / slowest(|run| run.synced),
                at(0.5),
                at(0.99),
                at(1.0) / 1e3,
            ]);
        }
    }
    println!("{FILES} files, {mib} MiB each, medians of {rounds} rounds");
    for ((name, _), figures) in WAYS.iter().zip(&figures) {
        let of = |n: usize| median(figures.iter().map(|f: &[f64; 5]| f[n]).collect());
        println!(
            "{name:>9}: {:5.0} MiB/s a file, {:5.0} with the sync; a write {:5.0} us, p99 {:5.0} us, \
             slowest {:5.1} ms",
            of(0),
            of(1),
            of(2),
            of(3),
            of(4)
        );
    }
}
