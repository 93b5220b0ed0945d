//! Pools that run full, on real processes: waiting, refused and continuing IO.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use quoin_nbd::client::{Client, RequestError};
use quoin_types::block::Operation;
use support::{Dev, Scratch, block, is_online, skipped};

const BLOCK: u64 = 4096;
const ENOSPC: u32 = 28;
/// Each pool has 256 MiB, and two volumes of 180 MiB are promised more than that.
const FLAGS: [&str; 3] = ["--no-attach", "--pool-size", "256MiB"];
const PART: u64 = 64;
const PARTS: u64 = 720;
/// Parts of the pools that another volume takes.
const BALLAST_PARTS: u64 = 480;

/// Makes two volumes, one of them written.
fn prepare(dev: &Dev, flags: &[&str]) -> Client {
    let size = ["--size", "180MiB", "--replicas", "3"];
    dev.ok(&[&["volume", "create", "db"][..], &size, flags].concat());
    dev.ok(&[&["volume", "create", "ballast"][..], &size].concat());
    let ballast = dev.client("ballast");
    for part in 0..BALLAST_PARTS {
        write(&ballast, part, 1).unwrap();
    }
    ballast.flush().unwrap();
    ballast.stop();
    let client = dev.client("db");
    dev.wait_for_volume("db", "online", is_online);
    client
}

/// Returns the events of replicas that were dropped.
fn drops(dev: &Dev) -> Vec<String> {
    let events = dev.ok(&["events"]);
    events.lines().filter(|e| e.contains("ReplicaDropped")).map(str::to_owned).collect()
}

fn write(client: &Client, part: u64, version: u64) -> Result<(), RequestError> {
    let data: Vec<u8> = (0..PART).flat_map(|n| block(part * PART + n, version)).collect();
    client.write(part * PART * BLOCK, Bytes::from(data), false)
}

fn check(client: &Client, part: u64, version: u64) {
    let read = client.read(part * PART * BLOCK, (PART * BLOCK) as u32).unwrap();
    for (n, got) in (0..).zip(read.chunks(BLOCK as usize)) {
        let lba = part * PART + n;
        let good =
            if version == 0 { got.iter().all(|b| *b == 0) } else { got == block(lba, version) };
        assert!(good, "block {lba} is not at version {version}");
    }
}

fn trim(client: &Client, part: u64) {
    let (offset, length) = (part * PART * BLOCK, PART * BLOCK);
    client.call(Operation::Trim { offset, length, fua: false }).unwrap();
}

/// Proves: `onFull: enospc`.
#[test]
fn with_enospc_writes_fail_while_full_and_succeed_after_a_trim() {
    let scratch = Scratch::new("enospc");
    let dev = Dev::start(&scratch.cluster(), &FLAGS);
    let client = prepare(&dev, &["--on-full", "enospc"]);
    // A late replica of a busy machine may connect after the volume is open already.
    let late = drops(&dev);
    let mut written = 0;
    let refusal = loop {
        match write(&client, written, 1) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < PARTS, "a pool of 256 MiB took 300 MiB");
    };
    assert_eq!(refusal, RequestError::Refused(ENOSPC), "after {written} parts");
    assert!(written * PART * BLOCK > 30 << 20, "refused after {written} parts only");
    assert_eq!(write(&client, PARTS - 1, 2), Err(RequestError::Refused(ENOSPC)));
    // Acknowledged data stays, refused data never was; reads, flushes and trims continue.
    (0..written).step_by(37).for_each(|part| check(&client, part, 1));
    check(&client, PARTS - 1, 0);
    client.flush().unwrap();
    dev.wait_for_volume("db", "told as waiting for room", |volume| {
        volume["waitingFor"].as_str().unwrap().contains("room")
    });
    (0..written / 2).for_each(|part| trim(&client, part));
    dev.eventually("there is room again", || write(&client, 0, 3).ok());
    check(&client, 0, 3);
    check(&client, 1, 0);
    (written / 2 + 1..written).step_by(17).for_each(|part| check(&client, part, 1));
    client.stop();
    assert_eq!(drops(&dev), late, "nobody is dropped for a full pool");
    dev.stop();
}

/// Proves: `onFull: wait`.
#[test]
fn with_wait_writes_wait_while_full_and_continue_after_a_trim() {
    let scratch = Scratch::new("wait");
    let dev = Dev::start(&scratch.cluster(), &FLAGS);
    let client = Arc::new(prepare(&dev, &[]));
    let written = Arc::new(AtomicU64::new(0));
    let goal = Arc::new(AtomicU64::new(PARTS));
    let writer = {
        let (client, written, goal) = (client.clone(), written.clone(), goal.clone());
        std::thread::spawn(move || {
            while written.load(Ordering::Relaxed) < goal.load(Ordering::Relaxed) {
                write(&client, written.load(Ordering::Relaxed), 1).expect("held, never refused");
                written.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    dev.wait_for_volume("db", "told as waiting for room", |volume| {
        volume["waitingFor"].as_str().unwrap().contains("room")
    });
    let full = written.load(Ordering::Relaxed);
    assert!(full * PART * BLOCK > 30 << 20, "held after {full} parts only");
    // The size is less than half of it, so that it fits once half of it is trimmed.
    let end = full + full / 4;
    goal.store(end, Ordering::Relaxed);
    assert!(!writer.is_finished());
    check(&client, 3, 1);
    assert!(dev.ok(&["events"]).contains("room"));
    (0..full / 2).for_each(|part| trim(&client, part));
    writer.join().unwrap();
    (full / 2 + 1..end).step_by(17).for_each(|part| check(&client, part, 1));
    check(&client, 5, 0);
    dev.wait_for_volume("db", "whole, and waiting for nothing", |volume| {
        volume["health"] == "Online" && volume["waitingFor"] == ""
    });
    Arc::into_inner(client).unwrap().stop();
    dev.stop();
}

/// Blocks that are written over stay for the snapshot, until the pools are full. Many requests wait then; deleting
/// the snapshot, as the documents say, lets all of them go on.
#[test]
fn writes_that_wait_for_room_go_on_once_a_snapshot_is_deleted() {
    const FIRST: u64 = 400;
    const ALL: u64 = 640;
    let scratch = Scratch::new("kept");
    let dev = Dev::start(&scratch.cluster(), &FLAGS);
    dev.ok(&["volume", "create", "db", "--size", "200MiB", "--replicas", "3"]);
    let client = Arc::new(dev.client("db"));
    dev.wait_for_volume("db", "online", is_online);
    (0..FIRST).for_each(|part| write(&client, part, 1).unwrap());
    client.flush().unwrap();
    dev.ok(&["snapshot", "create", "db", "--name", "before"]);
    let next = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..16)
        .map(|_| {
            let (client, next) = (client.clone(), next.clone());
            std::thread::spawn(move || {
                loop {
                    let part = next.fetch_add(1, Ordering::Relaxed);
                    if part >= ALL {
                        return;
                    }
                    write(&client, part, 2).expect("held, never refused");
                }
            })
        })
        .collect();
    dev.wait_for_volume("db", "told as waiting for room", |volume| {
        volume["waitingFor"].as_str().unwrap().contains("room")
    });
    assert!(next.load(Ordering::Relaxed) < ALL, "pools of 256 MiB took 260 MiB");
    dev.ok(&["snapshot", "delete", "before", "--yes"]);
    for writer in writers {
        writer.join().unwrap();
    }
    client.flush().unwrap();
    (0..ALL).step_by(7).for_each(|part| check(&client, part, 2));
    dev.wait_for_volume("db", "whole, and waiting for nothing", |volume| {
        volume["health"] == "Online" && volume["waitingFor"] == ""
    });
    Arc::into_inner(client).unwrap().stop();
    dev.stop();
}

/// The disk below a sparse pool may be full long before the pool is.
#[test]
fn a_full_disk_under_the_pools_is_reported_and_freed_space_resumes_writes() {
    if !rustix::process::geteuid().is_root() {
        return skipped("a small disk needs root to be mounted");
    }
    let scratch = Scratch::new("below");
    let disk = SmallDisk::mount(&scratch.cluster(), "800m");
    let filler = disk.0.join("filler");
    let dev = Dev::start(&disk.0.join("quoin"), &["--no-attach", "--pool-size", "512MiB"]);
    dev.ok(&["volume", "create", "db", "--size", "400MiB", "--on-full", "enospc"]);
    let client = dev.client("db");
    dev.wait_for_volume("db", "online", is_online);
    write(&client, 0, 1).unwrap();
    // Other files fill it up to the last byte.
    let zeroes = vec![0; 1 << 20];
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &zeroes).is_ok() {}
    // All pools: a write before two have reported to the target is on its way, and waits for space.
    dev.eventually("the pools say why they take no more", || {
        let pools = dev.json(&["pool", "list"]);
        let reports = |pool: &serde_json::Value| {
            pool["message"].as_str().unwrap_or_default().contains("the disk under the pool is full")
        };
        pools.as_array().unwrap().iter().all(reports).then_some(())
    });
    let refused = dev.eventually("writes are refused", || {
        let part = (1..PARTS).find_map(|part| write(&client, part, 1).err());
        part.filter(|refusal| *refusal == RequestError::Refused(ENOSPC))
    });
    assert_eq!(refused, RequestError::Refused(ENOSPC));
    check(&client, 0, 1);
    client.flush().unwrap();
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    dev.eventually("there is room again", || write(&client, 1, 2).ok());
    check(&client, 1, 2);
    client.stop();
    dev.stop();
}

/// A small file system of the test's own.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(at: &std::path::Path, size: &str) -> Self {
        std::fs::create_dir_all(at).unwrap();
        support::run(
            "mount",
            &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", at.to_str().unwrap()],
        );
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A lazy unmount: a failed test's processes may still use it.
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
