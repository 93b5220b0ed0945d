//! A disk that is restored to an older state, on real processes.

use crate::support;

use std::time::Duration;

use bytes::Bytes;
use quoin_nbd::client::Client;
use support::{Dev, Scratch, block, signal};

const BLOCK: u64 = 4096;

/// The image is of before the last start: its pool counts up to the same number as that one did.
/// Two of three replicas are there, which would be enough to open the volume, but one of them is of
/// that image and the other was away.
#[test]
fn an_older_state_of_a_pools_disk_serves_no_client_and_no_old_data_is_read() {
    let scratch = Scratch::new("rolledback");
    let flags = ["--no-attach", "--pool-size", "256MiB", "--replace-after", "off"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    dev.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let client = dev.client("db");
    client.write(0, Bytes::from(block(0, 1)), true).unwrap();
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let file = dev.pool_file("pool-b");
    dev.stop();
    let image = scratch.0.join("image");
    std::fs::copy(&file, &image).unwrap();

    let dev = Dev::start(&scratch.cluster(), &flags);
    let client = dev.client("db");
    write_without_pool_c(&dev, client);
    kill_all(dev);
    std::fs::copy(&image, &file).unwrap();
    nothing_older_is_read(&scratch, &flags);
}

/// The image is of the present life of the pool: it counts its starts on like any restart. Its
/// replica was closed in order then, and the boot is the same, so nothing in the image itself shows
/// that it lacks data acknowledged since.
#[test]
fn a_restored_image_of_a_pool_serves_no_client_and_no_old_data_is_read() {
    let scratch = Scratch::new("present-life");
    let flags = ["--no-attach", "--pool-size", "256MiB", "--replace-after", "off"];
    let dev = Dev::start(&scratch.cluster(), &flags);
    let create = ["volume", "create", "db", "--size", "64MiB", "--replicas", "3"];
    dev.ok(&[&create[..], &["--durability", "media"]].concat());
    let client = dev.client("db");
    client.write(0, Bytes::from(block(0, 1)), true).unwrap();
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
    let file = dev.pool_file("pool-b");
    let image = scratch.0.join("image");
    std::fs::copy(&file, &image).unwrap();

    let client = dev.client("db");
    write_without_pool_c(&dev, client);
    // Marks are raised and reported with the pool's reports.
    std::thread::sleep(Duration::from_secs(9));
    kill_all(dev);
    std::fs::copy(&image, &file).unwrap();
    nothing_older_is_read(&scratch, &flags);
}

/// Writes the second version of a block to two of three pools; then detaches the volume.
fn write_without_pool_c(dev: &Dev, client: Client) {
    dev.wait_for_volume("db", "whole", |volume| {
        volume["replicas"].as_array().unwrap().iter().all(|r| r["phase"] == "InSync")
    });
    let away = dev.pid("pool-c").unwrap();
    signal(away, "STOP");
    client.write(0, Bytes::from(block(0, 2)), true).unwrap();
    client.stop();
    dev.ok(&["volume", "detach", "db"]);
}

fn kill_all(dev: Dev) {
    signal(dev.child.id(), "KILL");
    for pid in dev.processes().values().filter_map(serde_json::Value::as_i64) {
        signal(pid, "KILL");
    }
}

/// Checks that the pool whose disk was restored is recognised, and that a read waits for one with
/// the second version.
fn nothing_older_is_read(scratch: &Scratch, flags: &[&str]) {
    let dev = Dev::start(&scratch.cluster(), flags);
    let hanging = dev.pid("pool-a").unwrap();
    signal(hanging, "STOP");
    dev.eventually("it is found out", || {
        dev.ok(&["events"]).contains("PoolRolledBack").then_some(())
    });
    let client = dev.client("db");
    let reading = std::thread::spawn(move || client.read(0, BLOCK as u32).unwrap());
    std::thread::sleep(Duration::from_secs(4));
    assert!(!reading.is_finished(), "read from replicas that lack what was acknowledged");
    signal(hanging, "CONT");
    dev.eventually("the read goes on", || reading.is_finished().then_some(()));
    assert!(reading.join().unwrap() == block(0, 2), "the second version was acknowledged");
    dev.ok(&["volume", "detach", "db"]);
    dev.stop();
}
