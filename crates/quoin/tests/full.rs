//! Pools that run full, on real processes: what waits, what is refused, what goes on.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use quoin_core::block::Operation;
use quoin_frontend::nbd::client::{Client, RequestError};
use support::{Dev, Scratch, block, is_online};

const BLOCK: u64 = 4096;
const ENOSPC: u32 = 28;
/// Each pool has 256 MiB, and two volumes of 180 MiB are promised more than that.
const FLAGS: [&str; 3] = ["--no-attach", "--pool-size", "256MiB"];
const PART: u64 = 64;
const PARTS: u64 = 720;
/// What another volume takes of the pools.
const BALLAST_PARTS: u64 = 480;

/// Two volumes, one of them written.
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

/// The events of replicas that were dropped.
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
fn with_enospc_writes_are_refused_while_full_and_taken_again_after_a_trim() {
    let scratch = Scratch::new("enospc");
    let dev = Dev::start(&scratch.cluster(), &FLAGS);
    let client = prepare(&dev, &["--on-full", "enospc"]);
    // On a busy machine one may connect after the volume is open already.
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
    // Acknowledged stays, refused never was, reads, flushes and trims go on.
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
fn with_wait_writes_are_held_while_full_and_go_on_by_themselves_after_a_trim() {
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
    // Less than half of it, so that it fits once half of it is trimmed.
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
