//! A replica behind a slow link slows nothing, and is reported: by an event, a column and a metric.

use crate::common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::stories::ask;
use common::nbd::Nbd;
use common::{Cluster, Place, eventually, free_port};

/// A link in front of a port: each piece is held for so many milliseconds on its way there.
struct Link {
    address: String,
    delay_ms: Arc<AtomicU64>,
}

impl Link {
    fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let delay_ms = Arc::new(AtomicU64::new(0));
        let delay = delay_ms.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                for stream in [&near, &far] {
                    stream.set_nodelay(true).unwrap();
                }
                let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
                let delay = delay.clone();
                std::thread::spawn(move || carry(near, far, &delay));
                std::thread::spawn(move || carry(back.0, back.1, &AtomicU64::new(0)));
            }
        });
        Self { address, delay_ms }
    }
}

/// Delays without a limit of the rate: each piece is held on its own.
fn carry(mut from: TcpStream, mut to: TcpStream, delay_ms: &AtomicU64) {
    let (pieces, held) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
    let near = from.try_clone().unwrap();
    std::thread::spawn(move || {
        for (due, piece) in held {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = near.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let delay = Duration::from_millis(delay_ms.load(Ordering::Relaxed));
        if pieces.send((Instant::now() + delay, buffer[..length].to_vec())).is_err() {
            break;
        }
    }
}

#[test]
fn a_replica_behind_a_slow_link_is_reported_while_it_is_slow() {
    let http = format!("127.0.0.1:{}", free_port());
    let flags = ["--default-spread", "pool", "--http", &http];
    let mut cluster = Cluster::start("slow", &Place::here(), &flags);
    for name in ["p1", "p2"] {
        cluster.pool(&Place::here(), name, &["--network-only"]);
    }
    let port = free_port();
    let link = Link::to(port);
    let listen = format!("127.0.0.1:{port}");
    let flags = ["--network-only", "--listen", &listen, "--advertise", &link.address];
    cluster.pool(&Place::here(), "p3", &flags);
    let nbd = format!("127.0.0.1:{}", free_port());
    cluster.node(&Place::here(), "n1", &["--nbd-listen", &nbd, "--nbd-plain"], &[]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "64MiB"]);
    cluster.ok(&["volume", "attach", "db", "--nbd=tcp"]);
    let mut volume = Nbd::connect(&nbd, None, "db").unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let writing = std::thread::spawn(move || {
        for round in 0u64.. {
            if over.load(Ordering::Relaxed) {
                break;
            }
            volume.write(round % 1024 * 4096, &[round as u8; 4096]).unwrap();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let reasons = || cluster.ok(&["events"]);
    let slow = |volume: &serde_json::Value| {
        let replicas = volume["replicas"].as_array().cloned().unwrap_or_default();
        let slow = replicas.iter().filter(|replica| replica["slow"] == true);
        slow.map(|replica| replica["pool"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // All of them are equally fast, and the time of a write is known.
    cluster.wait_for_volume("db", "measured", |volume| {
        let replicas = volume["replicas"].as_array().unwrap();
        replicas.iter().all(|replica| replica["writeUs"].as_u64() > Some(0))
    });

    link.delay_ms.store(400, Ordering::Relaxed);
    cluster.wait_for_volume("db", "slow on one pool", |volume| slow(volume) == ["p3"]);
    assert!(reasons().contains("ReplicaSlow"), "{}", reasons());
    assert!(cluster.ok(&["volume", "get", "db"]).contains("slow, writes take"));
    assert!(cluster.ok(&["volume", "list", "-o", "wide"]).contains("SLOW"));
    let line = "quoin_replica_slow{volume=\"db\",pool=\"p3\"} 1";
    eventually("the metric names it", || ask(&http, "/metrics")?.contains(line).then_some(()));

    link.delay_ms.store(0, Ordering::Relaxed);
    cluster.wait_for_volume("db", "as fast as before", |volume| slow(volume).is_empty());
    eventually("it is told", || reasons().contains("ReplicaNoLongerSlow").then_some(()));
    is_over.store(true, Ordering::Relaxed);
    writing.join().unwrap();
}
