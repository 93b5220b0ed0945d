//! Faults of a running cluster: corrupted bytes, a stop in the middle of work, a new authority
//! under load, noise on every port.

use crate::common::dev as running;

use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use quoin_nbd::client::{Address, Client, ClientOptions, RequestError};

use crate::support::blocks_of;
use running::{Dev, Scratch, eventually, is_online, signal};

const BLOCK: u64 = 4096;

/// Returns a block with unique content.
fn block(number: u64) -> Bytes {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..BLOCK / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect::<Vec<_>>().into()
}

/// Flips a byte of every copy of `block` that a pool's file holds; returns their number.
fn damage(path: &Path, block: &[u8]) -> usize {
    let copies = blocks_of(path, |found| found.starts_with(&block[..64]).then_some(found[100]));
    let file = File::options().write(true).open(path).unwrap();
    for (offset, byte) in &copies {
        file.write_all_at(&[!byte], offset + 100).unwrap();
    }
    copies.len()
}

/// Returns whether a pool's file holds a copy of `block` with every byte of it.
fn contains_block(path: &Path, block: &[u8]) -> bool {
    !blocks_of(path, |found| (found == block).then_some(())).is_empty()
}

fn pool_file(dev: &Dev, pool: &str) -> std::path::PathBuf {
    dev.directory.join("pools").join(pool).join("data")
}

#[test]
fn a_damaged_block_is_read_from_another_replica_repaired_and_reported() {
    let scratch = Scratch::new("day-of-rot");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let client = dev.client("db");
    dev.wait_for_volume("db", "online", is_online);
    for number in 0..64 {
        client.write(number * BLOCK, block(number), false).unwrap();
    }
    client.flush().unwrap();

    for pool in ["pool-a", "pool-b"] {
        assert!(damage(&pool_file(&dev, pool), &block(7)) > 0, "{pool} does not hold the block");
    }
    eventually("the rot is found, repaired and told", || {
        assert_eq!(client.read(7 * BLOCK, BLOCK as u32).unwrap(), block(7), "wrong bytes");
        let events = dev.ok(&["events", "--volume", "db"]);
        let reported = |line: &str| {
            line.contains("BadBlock") && line.contains("block 7 ") && line.contains("repaired from")
        };
        events.lines().any(reported).then_some(())
    });
    // A copy that no read reached is found by a scrub.
    for pool in ["pool-a", "pool-b"] {
        dev.ok(&["pool", "scrub", pool, "--wait"]);
        eventually("a whole copy is in the file again", || {
            contains_block(&pool_file(&dev, pool), &block(7)).then_some(())
        });
    }

    for pool in ["pool-a", "pool-b", "pool-c"] {
        assert!(damage(&pool_file(&dev, pool), &block(9)) > 0, "{pool} does not hold the block");
    }
    let error = client.read(9 * BLOCK, BLOCK as u32).unwrap_err();
    assert_eq!(error, RequestError::Refused(5), "an IO error is the one right answer");
    eventually("the loss is told", || {
        dev.ok(&["events", "--volume", "db"]).contains("BlockLost").then_some(())
    });
    // The block's neighbours are whole, and a write makes it whole.
    assert_eq!(client.read(8 * BLOCK, BLOCK as u32).unwrap(), block(8));
    client.write(9 * BLOCK, block(109), false).unwrap();
    assert_eq!(client.read(9 * BLOCK, BLOCK as u32).unwrap(), block(109));
    client.stop();
    dev.stop();
}

#[test]
fn a_stop_during_writes_keeps_all_flushed_data() {
    let scratch = Scratch::new("stop");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let address = dev.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    let flushed = Arc::new(AtomicU64::new(0));
    let writer = {
        let flushed = flushed.clone();
        let options = ClientOptions {
            // The stop ends the connection, and with it the writer.
            reconnect: false,
            ..ClientOptions::new(Address::Unix(socket.into()))
        };
        std::thread::spawn(move || {
            let client = Client::connect(options).unwrap();
            for number in 0.. {
                let offset = number % 8192 * BLOCK;
                let written = client.write(offset, block(number), false);
                if written.and_then(|()| client.flush()).is_err() {
                    return;
                }
                flushed.store(number + 1, Ordering::SeqCst);
            }
        })
    };
    eventually("the writer is at work", || (flushed.load(Ordering::SeqCst) > 50).then_some(()));
    signal(dev.child.id(), "TERM");
    dev.ended();
    writer.join().unwrap();

    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    dev.wait_for_volume("db", "online after a stop under load", is_online);
    let client = dev.client("db");
    let flushed = flushed.load(Ordering::SeqCst);
    for number in flushed.saturating_sub(8192)..flushed {
        let read = client.read(number % 8192 * BLOCK, BLOCK as u32).unwrap();
        // The write after the last flush may have overwritten the oldest.
        assert!(read == block(number) || read == block(number + 8192), "block {number}");
    }
    client.stop();
    dev.stop();
}

/// Returns every port that the cluster listens on.
fn ports(dev: &Dev) -> Vec<String> {
    let settings = std::fs::read(dev.directory.join("dev.json")).unwrap();
    let mut settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
    // No process serves the ports that were chosen for a part that does not run.
    let parts =
        [("attach", &["attach_http"][..]), ("mirror", &["mirror_listen", "mirror_http"][..])];
    for (part, chosen) in parts {
        if dev.pid(part).is_none() {
            let settings = settings.as_object_mut().unwrap();
            chosen.iter().for_each(|name| drop(settings.remove(*name)));
        }
    }
    let mut ports = Vec::new();
    let mut open = vec![&settings];
    while let Some(value) = open.pop() {
        match value {
            serde_json::Value::Object(fields) => open.extend(fields.values()),
            serde_json::Value::Array(items) => open.extend(items),
            serde_json::Value::String(text) if text.starts_with("127.0.0.1:") => {
                ports.push(text.clone());
            }
            _ => {}
        }
    }
    ports
}

/// Returns the resident memory, in MiB.
fn memory_mib(pid: i64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

#[test]
fn io_has_no_error_through_a_rotation_port_noise_and_restarts_of_all_parts() {
    let scratch = Scratch::new("load");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    dev.ok(&["volume", "create", "db", "--size", "64MiB"]);
    let client = dev.client("db");
    dev.wait_for_volume("db", "online", is_online);
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let load = {
        let (stop, written) = (stop.clone(), written.clone());
        std::thread::spawn(move || {
            for number in 0.. {
                let offset = number % 4096 * BLOCK;
                client.write(offset, block(number), number % 16 == 0).unwrap();
                assert_eq!(client.read(offset, BLOCK as u32).unwrap(), block(number));
                written.store(number, Ordering::SeqCst);
                if stop.load(Ordering::SeqCst) {
                    return client.stop();
                }
            }
        })
    };
    let flows = |what: &str| {
        let before = written.load(Ordering::SeqCst);
        eventually(what, || {
            assert!(!load.is_finished(), "the application got an error");
            (written.load(Ordering::SeqCst) > before + 20).then_some(())
        });
    };
    flows("IO begins");

    assert!(dev.ok(&["cluster", "rotate-authority"]).contains("authority"));
    flows("IO goes on under a new authority");
    let again = dev.quoin(&["cluster", "rotate-authority"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("already being rotated"));

    for port in ports(&dev) {
        let mut noise = TcpStream::connect(&port).unwrap();
        noise.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        // A server that closes the connection is right.
        let _ = noise.write_all(b"\x16\x03\x01\xff\xff GET / HTTP/9\r\n\r\n");
        let _ = noise.write_all(&block(1));
    }
    flows("IO goes on under noise on every port");

    // Each part comes back with a certificate of one authority among peers of the other.
    for name in ["pool-a", "target", "controller", "pool-b"] {
        let old = dev.pid(name).unwrap();
        signal(old, "KILL");
        eventually("it is started again", || {
            dev.pid(name).is_some_and(|pid| pid != old).then_some(())
        });
        flows("IO goes on");
        dev.wait_for_volume("db", "online again", is_online);
    }
    stop.store(true, Ordering::SeqCst);
    load.join().unwrap();

    for pool in ["pool-a", "pool-b", "pool-c"] {
        let used = memory_mib(dev.pid(pool).unwrap());
        assert!(used <= 300, "{pool} takes {used} MiB");
    }
    let yaml = dev.ok(&["volume", "list", "-o", "yaml"]);
    let yaml: serde_json::Value = serde_yaml_ng::from_str(&yaml).unwrap();
    assert_eq!(yaml[0]["name"], "db");
    assert_eq!(yaml[0]["sizeBytes"], 64 << 20);
    dev.stop();
}
