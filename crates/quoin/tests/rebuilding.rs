//! Rebuilds on a disk that is slow enough to be observed: the progress that `--wait` prints, and
//! the bytes copied where the pool dies in the middle.

use crate::support;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use support::stories::*;
use support::{Dev, block};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;

/// Fills a volume `db` of three replicas in four pools; returns the pool without a replica.
fn filled(dev: &Dev, mib: u64) -> String {
    let size = format!("{mib}MiB");
    dev.ok(&["volume", "create", "db", "--size", &size, "--replicas", "3"]);
    let client = dev.client("db");
    for first in (0..mib * MIB / BLOCK).step_by(256) {
        let data: Vec<u8> = (first..first + 256).flat_map(|lba| block(lba, 1)).collect();
        client.write(first * BLOCK, Bytes::from(data), false).unwrap();
    }
    client.flush().unwrap();
    client.stop();
    dev.wait_for_volume("db", "whole", all_in_sync);
    let taken: Vec<String> = known(dev).into_iter().map(|(pool, ..)| pool).collect();
    let pools = ["pool-a", "pool-b", "pool-c", "pool-d"];
    pools.into_iter().find(|pool| !taken.contains(&(*pool).to_owned())).unwrap().to_owned()
}

/// A pool whose file has a bounded rate: its process is stopped in between.
struct Slow {
    end: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

fn allocated_bytes(file: &PathBuf) -> u64 {
    std::fs::metadata(file).map_or(0, |data| data.blocks() * 512)
}

impl Slow {
    fn down(dev: &Dev, pool: &str, bytes_per_s: u64) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let (ended, file) = (end.clone(), dev.pool_file(pool));
        let pid = Pid::from_raw(dev.pid(pool).unwrap() as i32).unwrap();
        let thread = std::thread::spawn(move || {
            let (began, before) = (Instant::now(), allocated_bytes(&file));
            while !ended.load(Ordering::Relaxed) {
                let grown = allocated_bytes(&file).saturating_sub(before);
                let due = Duration::from_secs_f64(grown as f64 / bytes_per_s as f64);
                let early = due.saturating_sub(began.elapsed());
                if early > Duration::from_millis(20) {
                    // A long stop would count as an absence.
                    let _ = kill_process(pid, Signal::STOP);
                    std::thread::sleep(early.min(Duration::from_millis(500)));
                    let _ = kill_process(pid, Signal::CONT);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { end, thread }
    }

    /// Lets the pool run at full speed from here on.
    fn end(self) {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// Parses a size as printed for users.
fn size(text: &str) -> f64 {
    let (number, unit) = text.trim().split_once(' ').unwrap_or_else(|| panic!("{text:?}"));
    let powers = ["B", "KiB", "MiB", "GiB"];
    let power =
        powers.iter().position(|power| *power == unit).unwrap_or_else(|| panic!("{text:?}"));
    number.parse::<f64>().unwrap_or_else(|_| panic!("{text:?}")) * 1024f64.powi(power as i32)
}

/// Values of one progress line about the only pool that is rebuilt: bytes gone through, their
/// total, and, where printed, bytes a second and remaining seconds.
struct Line {
    done: f64,
    total: f64,
    pace: Option<(f64, f64)>,
}

fn read_line(line: &str, pool: &str) -> Option<Line> {
    let rest = line.split_once(&format!("; pool {pool}: "))?.1;
    let (done, rest) = rest.split_once(" of ")?;
    let (total, rest) = rest.split_once(" gone through")?;
    let pace = rest.split_once("/s, about ").map(|(rate, rest)| {
        let takes = rest.split_once(" s left").unwrap_or_else(|| panic!("{line}")).0;
        (size(rate.trim_start_matches("; ")), takes.parse().unwrap())
    });
    Some(Line { done: size(done), total: size(total), pace })
}

/// Proves: a user who waits sees progress, speed and remaining time, and all three are right.
#[test]
fn a_waiting_command_reports_progress_rate_and_time_left() {
    const RATE: u64 = 8 * MIB;
    let (_scratch, dev) = cluster("waiting", "4");
    let pool = filled(&dev, 192);
    let slow = Slow::down(&dev, &pool, RATE);
    let began = Instant::now();
    let child = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(["volume", "scale", "db", "--replicas", "4", "--wait"])
        .env("QUOIN_SOCKET", &dev.admin_socket)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = child;
    let errors = std::io::BufReader::new(child.stderr.take().unwrap());
    let printed: Vec<(Duration, String)> = std::io::BufRead::lines(errors)
        .map(|line| (began.elapsed(), line.unwrap()))
        .inspect(|(at, line)| println!("{at:?} {line}"))
        .collect();
    let output = child.wait_with_output().unwrap();
    let took = began.elapsed();
    slow.end();
    assert!(output.status.success(), "{printed:?}");
    let last = String::from_utf8_lossy(&output.stdout);
    assert_eq!(last.trim(), "volume db has 4 replicas; writes need 3 of them");

    // The record may say that the replica is added before its pool reports again.
    let is_first = |line: &str| line.starts_with("volume db: 1 replica being added");
    assert!(printed.first().is_some_and(|(_, line)| is_first(line)), "{printed:?}");
    let mut after = printed.iter().map(|(_, line)| line.as_str());
    let caught_up = after.find(|line| !is_first(line));
    assert!(
        caught_up.into_iter().chain(after).all(|l| l.starts_with("volume db: replicas catch up;")),
        "{printed:?}"
    );
    let lines: Vec<(Duration, Line)> =
        printed.iter().filter_map(|(at, line)| Some((*at, read_line(line, &pool)?))).collect();
    assert!(lines.len() >= 6, "{printed:?}");
    for pair in lines.windows(2) {
        assert!(pair[0].1.done <= pair[1].1.done, "it went back: {printed:?}");
    }
    assert!(lines.iter().all(|(_, line)| line.done <= line.total), "{printed:?}");
    let paced: Vec<(Duration, f64, f64)> = lines
        .iter()
        .filter_map(|(at, line)| line.pace.map(|(rate, left)| (*at, rate, left)))
        .collect();
    assert!(paced.len() >= 2, "no line says how fast it goes: {printed:?}");
    for (at, rate, left) in paced {
        let so = rate / RATE as f64;
        assert!((0.4..2.5).contains(&so), "{rate} bytes a second at {at:?}: {printed:?}");
        let truly = took.saturating_sub(at).as_secs_f64();
        assert!(
            (left - truly).abs() <= truly / 2.0 + 6.0,
            "{left} s, and it took {truly} s: {printed:?}"
        );
    }
    dev.stop();
}

/// Proves: a rebuild whose pool dies in the middle continues from there, and moves at most 1.2
/// times the necessary bytes.
#[test]
fn a_rebuild_whose_pool_is_killed_copies_only_the_missing_data() {
    // A fifth is more than a pool copies between two of its checkpoints.
    const MIB_OF_DATA: u64 = 192;
    let (scratch, dev) = cluster("midway", "4");
    let pool = filled(&dev, MIB_OF_DATA);
    let slow = Slow::down(&dev, &pool, 16 * MIB);
    let before = allocated_bytes(&dev.pool_file(&pool));
    let wait = ["volume", "scale", "db", "--replicas", "4", "--wait"];
    let mut waiting = Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(wait)
        .env("QUOIN_SOCKET", &dev.admin_socket)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = std::io::BufReader::new(waiting.stderr.take().unwrap());
    std::io::BufRead::read_line(&mut errors, &mut String::new()).unwrap();
    kill_process(Pid::from_child(&waiting), Signal::INT).unwrap();
    let printed = std::io::read_to_string(errors).unwrap();
    assert_eq!(waiting.wait().unwrap().code(), Some(130), "{printed}");
    assert!(printed.contains("error: interrupted: volume db: 1 replica being added"), "{printed}");
    assert!(printed.contains("it continues by itself"), "{printed}");
    dev.eventually("more than half of it is there", || {
        let grown = allocated_bytes(&dev.pool_file(&pool)).saturating_sub(before);
        (grown > MIB_OF_DATA * MIB * 6 / 10).then_some(())
    });
    slow.end();
    dev.kill(&pool);
    assert_eq!(factors(&dev.json(&["volume", "get", "db"])), [3, 2, 4], "it was in the middle");
    dev.wait_for_volume("db", "whole", |volume| {
        all_in_sync(volume) && factors(volume) == [4, 3, 4]
    });
    let metrics = ask_target(&dev, "/metrics").expect("the target answers");
    let name = "quoin_target_rebuild_moved_bytes_total ";
    let moved = metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let moved: u64 = moved.trim().parse().unwrap();
    let needed = MIB_OF_DATA * MIB;
    println!("{moved} bytes were copied of {needed}");
    assert!(moved >= needed, "{moved} bytes were copied of {needed}");
    assert!(moved * 10 <= needed * 12, "{moved} bytes were copied of {needed}");
    let reported = events(&dev, "ReplicaRebuilt");
    assert!(!reported.is_empty(), "how much was copied is told");
    compare(&scratch, dev, 4);
}
