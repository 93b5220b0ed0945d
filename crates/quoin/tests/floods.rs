//! Peers that flood what they reach, never read their answers, or hold connections idle: their cost
//! in memory and descriptors is limited, and the volume continues.

use crate::common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use common::{Cluster, Place, eventually, free_port, signal};

const MIB: u64 = 1 << 20;
const READ: u16 = 0;
const WRITE: u16 = 1;
/// Length of each request.
const LENGTH: u32 = 1 << 20;
const VOLUME_MIB: u64 = 64;

/// Returns a line of `/proc/PID/status` in kilobytes, as bytes.
fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// A client of the block protocol that sends anything.
struct Raw {
    stream: UnixStream,
    cookie: u64,
}

impl Raw {
    /// Connects and completes the negotiation in its shortest form.
    fn connect(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        // No zeroes after the size; the export of the socket's volume by the empty name.
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        stream.read_exact(&mut [0; 10]).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(250))).unwrap();
        Self { stream, cookie: 0 }
    }

    /// Sends one request; false if it is not accepted for a while, as nothing before it is
    /// answered.
    fn send(&mut self, kind: u16, offset: u64, data: &[u8]) -> bool {
        self.cookie += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(LENGTH.to_be_bytes());
        request.extend(data);
        match self.stream.write_all(&request) {
            Ok(()) => true,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Reads the answers to so many writes.
    fn answered(&mut self, writes: u64) {
        for _ in 0..writes {
            let mut answer = [0; 16];
            self.stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer[4..8], [0; 4], "a write failed");
        }
    }
}

struct World {
    cluster: Cluster,
    socket: std::path::PathBuf,
    /// Consoles of every role.
    consoles: Vec<String>,
}

fn world(name: &str) -> World {
    let consoles: Vec<String> = (0..6).map(|_| format!("127.0.0.1:{}", free_port())).collect();
    let flags = ["--default-spread", "pool", "--http", &consoles[0]];
    let mut cluster = Cluster::start(name, &Place::here(), &flags);
    for (name, console) in ["p1", "p2", "p3"].into_iter().zip(&consoles[1..]) {
        cluster.pool(&Place::here(), name, &["--http", console]);
    }
    cluster.node(&Place::here(), "n1", &["--http", &consoles[4]], &["--http", &consoles[5]]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", &format!("{VOLUME_MIB}MiB")]);
    let address = cluster.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1.into();
    World { cluster, socket, consoles }
}

/// Writes the volume once and waits for it.
fn fill(socket: &Path) {
    let mut client = Raw::connect(socket);
    let data = vec![7; LENGTH as usize];
    for at in 0..VOLUME_MIB {
        assert!(client.send(WRITE, at * MIB, &data));
        client.answered(1);
    }
}

/// Proves: limits on every queue; back-pressure.
#[test]
fn clients_that_read_no_replies_or_write_to_a_full_volume_are_throttled() {
    let World { mut cluster, socket, .. } = world("greedy");
    fill(&socket);
    let target = cluster.process("target").pid();
    let before = memory(target);

    // A replica that hangs: the entries that it lacks are not kept for it without bound.
    let pools: Vec<u32> = ["p1", "p2", "p3"].map(|name| cluster.process(name).pid()).to_vec();
    signal(pools[0], "STOP");
    (0..8).for_each(|_| fill(&socket));
    let held = memory(target).saturating_sub(before);
    println!("{} MiB for a replica that lacks {} MiB", held / MIB, 8 * VOLUME_MIB);
    assert!(held < 256 * MIB, "{held} bytes");

    // Writes without a quorum wait with their writer.
    signal(pools[1], "STOP");
    let before = memory(target);
    let mut writer = Raw::connect(&socket);
    let data = vec![9; LENGTH as usize];
    let sent = (0..1024).take_while(|n| writer.send(WRITE, n % VOLUME_MIB * MIB, &data)).count();
    let held = memory(target).saturating_sub(before);
    println!("{sent} of 1024 writes were taken without a quorum, {} MiB are held", held / MIB);
    assert!(sent < 512 && held < 512 * MIB, "{sent} writes, {held} bytes");
    pools[..2].iter().for_each(|pid| signal(pid, "CONT"));
    writer.answered(sent as u64);
    fill(&socket);

    // Readers that never read: each requests 4 GiB, unless the server stops reading from it.
    let mut greedy: Vec<Raw> = (0..16).map(|_| Raw::connect(&socket)).collect();
    let before = memory(target);
    for client in &mut greedy {
        let taken = (0..4096).take_while(|n| client.send(READ, n % VOLUME_MIB * MIB, &[])).count();
        println!("{taken} requests were taken of one that reads no answers");
    }
    let held = memory(target).saturating_sub(before);
    println!("{} MiB for {} clients that read no answers", held / MIB, greedy.len());
    assert!(held < 400 * MIB, "{held} bytes");
    // No other client is delayed by them.
    fill(&socket);
}

/// Opens connections without purpose: silence, noise, parts of other protocols.
fn flood(address: &str, connections: usize) -> Vec<TcpStream> {
    let greetings: [&[u8]; 5] = [
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHo",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xff\x04\0\0\0\0\0",
        &[0xff; 4096],
    ];
    let connect = |n: usize| {
        let mut stream = TcpStream::connect(address).ok()?;
        stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
        // The connection may have been closed at once.
        let _ = stream.write_all(greetings[n % greetings.len()]);
        Some(stream)
    };
    (0..connections).filter_map(connect).collect()
}

/// Proves: a port scanner's garbage on every port, limits on all that a peer can grow.
#[test]
fn hundreds_of_connections_cost_few_descriptors_and_little_memory() {
    let World { mut cluster, socket, consoles } = world("many");
    fill(&socket);
    let pools = cluster.json(&["pool", "list"]);
    let of = |name: &str| pools.as_array().unwrap().iter().find(|p| p["name"] == name).unwrap();
    let mut ports = vec![("controller", cluster.controller.clone())];
    for name in ["p1", "p2", "p3"] {
        ports.push((name, of(name)["address"].as_str().unwrap().to_owned()));
    }
    let names = ["controller", "p1", "p2", "p3", "target", "node"];
    ports.extend(names.iter().copied().zip(consoles));
    let pids = names.map(|name| (name, cluster.process(name).pid()));
    let before = pids.map(|(_, pid)| (descriptors(pid), memory(pid)));
    let held: Vec<_> = ports.iter().map(|(_, address)| flood(address, 300)).collect();
    for ((name, pid), (files, bytes)) in pids.iter().zip(before) {
        let more = descriptors(*pid).saturating_sub(files);
        let grown = memory(*pid).saturating_sub(bytes);
        println!("{name}: {more} descriptors and {} MiB more", grown / MIB);
        // At most two ports, each with a bounded number of places.
        assert!(more < 400 && grown < 64 * MIB, "{name}: {more} descriptors, {grown} bytes");
    }
    fill(&socket);
    cluster.ok(&["volume", "get", "db"]);
    drop(held);
    for ((name, pid), (files, _)) in pids.iter().zip(before) {
        eventually(&format!("{name} has closed what was held"), || {
            (descriptors(*pid) < files + 16).then_some(())
        });
    }
    // All clients are answered again.
    for (name, address) in &ports[4..] {
        eventually(&format!("the console of {name} answers"), || {
            let mut stream = TcpStream::connect(address).ok()?;
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                .ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            answer.starts_with("HTTP/1.1 200").then_some(())
        });
    }
}
