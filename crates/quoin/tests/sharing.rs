//! Several hosts that have one volume at once, and hosts that are lost: each in a network namespace of
//! its own. Needs root and iproute2.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::network::Network;
use common::{Cluster, Place, can_attach, eventually, have, isolated_command, run};
use quoin_nbd::client::{Address, Client, ClientOptions, RequestError};
use quoin_types::block::{Operation, Payload};

const BLOCK: usize = 4096;
/// Time for which nobody hears of a node before its volumes are taken from it.
const NODE_TIMEOUT: Duration = Duration::from_secs(6);
/// Longest lease of a target at a pool, with the share for skewed clocks.
const LEASE: Duration = Duration::from_millis(2500);

/// A host with a target.
pub struct Host {
    pub name: &'static str,
    pub place: Place,
    pub run: String,
}

impl Host {
    pub fn start(cluster: &mut Cluster, place: Place, name: &'static str, flags: &[&str]) -> Self {
        let (state, run) =
            (cluster.path(&format!("{name}-state")), cluster.path(&format!("{name}-run")));
        let token = cluster.token("node");
        let controller = cluster.controller.clone();
        let words = [
            &["target", "--join", &token, "--state", &state, "--run", &run][..],
            &["--name", name, "--controller", &controller],
            flags,
        ];
        let words = words.concat().iter().map(ToString::to_string).collect();
        cluster.run(&place, name, words);
        let host = Self { name, place, run };
        eventually("the node is online", || {
            let nodes = cluster.json(&["node", "list"]);
            let mut nodes = nodes.as_array()?.iter();
            nodes.any(|node| node["name"] == name && node["state"] == "Online").then_some(())
        });
        host
    }

    fn attach(&self, cluster: &Cluster, volume: &str, flags: &[&str]) -> Output {
        let attach = ["volume", "attach", volume, "--node", self.name, "--nbd", "--run", &self.run];
        cluster.quoin(&[&attach[..], flags].concat())
    }

    /// Attaches a volume here and returns the socket of its service.
    pub fn attached(&self, cluster: &Cluster, volume: &str, flags: &[&str]) -> PathBuf {
        let output = self.attach(cluster, volume, flags);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{printed}");
        let uri = String::from_utf8(output.stdout).unwrap();
        PathBuf::from(uri.trim().split_once("socket=").unwrap().1)
    }

    /// Detaches a volume here, in a mount table without the mounts of `other`, as on a host of its own.
    fn detach(&self, cluster: &Cluster, volume: &str, other: &Host) {
        let script = "umount -l \"$1\"/attach/volumes/* 2>&-; shift; exec \"$0\" volume \"$@\"";
        let output = isolated_command(Path::new(&self.run).parent().unwrap())
            .args(["sh", "-c", script, env!("CARGO_BIN_EXE_quoin"), &other.run])
            .args(["detach", volume, "--node", self.name, "--run", &self.run])
            .env("QUOIN_SOCKET", &cluster.admin_socket)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{printed}");
    }

    fn refused(&self, cluster: &Cluster, volume: &str, flags: &[&str]) -> String {
        let output = self.attach(cluster, volume, flags);
        assert!(!output.status.success(), "{} may have it", self.name);
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// Program that uses a volume by a socket, as the attach process does: it holds its IO and sends it
/// again.
pub struct User(Client);

impl User {
    pub fn of(socket: &Path) -> Self {
        let options = ClientOptions::new(Address::Unix(socket.to_owned()));
        Self(eventually("the volume is served", || Client::connect(options.clone()).ok()))
    }

    pub fn begin(&self, operation: Operation) -> mpsc::Receiver<Result<Payload, RequestError>> {
        let (done, answer) = mpsc::channel();
        self.0.submit(operation, Box::new(move |result| drop(done.send(result))));
        answer
    }

    fn answer(&self, operation: Operation) -> Result<Payload, RequestError> {
        self.begin(operation).recv_timeout(Duration::from_secs(60)).expect("an answer")
    }

    fn write(&self, block: u64, byte: u8) -> Result<(), RequestError> {
        let data = Bytes::from(vec![byte; BLOCK]);
        let offset = block * BLOCK as u64;
        self.answer(Operation::Write { offset, data, fua: true }).map(drop)
    }

    fn read(&self, block: u64) -> u8 {
        let read = Operation::Read { offset: block * BLOCK as u64, length: BLOCK as u32 };
        let Payload::Data(parts) = self.answer(read).unwrap() else { panic!("no data") };
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        assert!(bytes.len() == BLOCK && bytes.iter().all(|byte| *byte == bytes[0]));
        bytes[0]
    }
}

/// Writes that go on in the background, one after the other; each is acknowledged, whatever happens.
struct Writes {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<Duration>>,
}

impl Writes {
    fn begin(user: Arc<User>, block: u64) -> Self {
        let (stop, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (ends, counts) = (stop.clone(), count.clone());
        let thread = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !ends.load(Ordering::Relaxed) {
                let began = Instant::now();
                let number = counts.load(Ordering::Relaxed) + 1;
                user.write(block, number as u8).expect("no write fails");
                assert_eq!(user.read(block), number as u8);
                counts.store(number, Ordering::Relaxed);
                longest = longest.max(began.elapsed());
                std::thread::sleep(Duration::from_millis(5));
            }
            longest
        });
        Self { stop, count, thread: Some(thread) }
    }

    /// Waits until writes are acknowledged that began after this call.
    fn go_on(&self) {
        let now = self.count.load(Ordering::Relaxed);
        eventually("writes go on", || (self.count.load(Ordering::Relaxed) > now + 2).then_some(()));
    }

    /// Ends them; returns the longest time that one of them took.
    fn end(mut self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

/// A controller, three pools, and nodes h1, h2, …, on the hosts of a network in this order.
fn cluster(name: &str, network: &Network, hosts: &[&'static str]) -> (Cluster, Vec<Host>) {
    let timeout = format!("{}s", NODE_TIMEOUT.as_secs());
    let flags = ["--default-spread", "pool", "--node-timeout", &timeout];
    let mut cluster = Cluster::start(name, &network.place(0), &flags);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&network.place(1), pool, &[]);
    }
    let hosts = hosts
        .iter()
        .enumerate()
        .map(|(index, &host)| Host::start(&mut cluster, network.place(index + 2), host, &[]));
    let hosts = hosts.collect();
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "3"]);
    (cluster, hosts)
}

/// Proves CSI-ACCESSMODE-04, CSI-ACCESSMODE-05: for the data, through the hosts' targets.
#[test]
fn hosts_share_a_volume_through_leaving_and_the_loss_of_the_one_that_serves_it() {
    let Some(network) = Network::new(&["c", "p", "h1", "h2", "h3"]) else { return };
    let (cluster, hosts) = cluster("sharing", &network, &["h1", "h2", "h3"]);
    let [h1, h2, h3] = hosts.as_slice() else { unreachable!() };
    let shared = ["--share", "multi-writer"];
    let first = User::of(&h1.attached(&cluster, "db", &shared));
    let second = Arc::new(User::of(&h2.attached(&cluster, "db", &shared)));
    first.write(0, 1).unwrap();
    assert_eq!(second.read(0), 1);
    second.write(0, 2).unwrap();
    assert_eq!(first.read(0), 2);

    // A reader is held to reading by the target, and not by its own host alone.
    let reader =
        User::of(&h3.attached(&cluster, "db", &["--share", "multi-writer", "--read-only"]));
    assert_eq!(reader.read(0), 2);
    assert_eq!(reader.write(0, 3), Err(RequestError::Refused(1)), "EPERM");
    assert_eq!(first.read(0), 2);
    let said = h3.refused(&cluster, "db", &[]);
    assert!(said.contains("exists already"), "{said}");
    cluster.ok(&["volume", "detach", "db", "--node", "h3"]);
    let said = h3.refused(&cluster, "db", &[]);
    assert!(said.contains("shares it") && said.contains("node h1"), "{said}");

    // As a virtual machine moves: the other host writes, and the first one leaves.
    let writes = Writes::begin(second.clone(), 7);
    writes.go_on();
    drop(first);
    cluster.ok(&["volume", "detach", "db", "--node", "h1"]);
    writes.go_on();
    let shown = cluster.json(&["volume", "get", "db"]);
    assert_eq!(shown["nodes"], serde_json::json!(["h2"]), "{shown}");
    let longest = writes.end();
    assert!(longest < Duration::from_secs(15), "IO was held for {longest:?}");

    // The host that serves it is lost: its target moves, and the other one's writes go on.
    let first = Arc::new(User::of(&h1.attached(&cluster, "db", &shared)));
    let writes = Writes::begin(first.clone(), 8);
    writes.go_on();
    network.link(3, "down");
    let lost = Instant::now();
    cluster.wait_for_volume("db", "served by the other host", |volume| {
        cluster.ok(&["events"]).contains("TargetMoved") && volume["health"] == "Online"
    });
    writes.go_on();
    println!("writes go on {:?} after the loss", lost.elapsed());
    assert_eq!(first.read(0), 2);
    // It is back: what it holds is sent to the one that serves the volume now.
    let held = second.begin(Operation::Write {
        offset: 9 * BLOCK as u64,
        data: Bytes::from(vec![9; BLOCK]),
        fua: true,
    });
    network.link(3, "up");
    held.recv_timeout(Duration::from_secs(60)).expect("an answer").unwrap();
    assert_eq!(first.read(9), 9);
    let longest = writes.end();
    let bound = LEASE + NODE_TIMEOUT + Duration::from_secs(3);
    println!("the longest write took {longest:?}; the bound is {bound:?} on an idle machine");
}

/// A write whose answer is lost is sent again, by the target that follows on its host. It took effect
/// before the other host wrote, and must not take effect after it.
#[test]
fn a_write_that_is_sent_again_does_not_undo_what_another_host_wrote_after_it() {
    const H1: usize = 2;
    const H2: usize = 3;
    let Some(network) = Network::new(&["c", "p", "h1", "h2"]) else { return };
    let (mut cluster, hosts) = cluster("repeats", &network, &["h1", "h2"]);
    let [h1, h2] = hosts.as_slice() else { unreachable!() };
    let shared = ["--share", "multi-writer"];
    let first = User::of(&h1.attached(&cluster, "db", &shared));
    let second = User::of(&h2.attached(&cluster, "db", &shared));
    second.write(3, 1).unwrap();
    assert_eq!(first.read(3), 1);

    network.lose("add", H1, H2);
    let data = Bytes::from(vec![0xa; BLOCK]);
    let held = second.begin(Operation::Write { offset: 3 * BLOCK as u64, data, fua: true });
    eventually("it took effect", || (first.read(3) == 0xa).then_some(()));
    first.write(3, 0xb).unwrap();
    first.answer(Operation::Flush).unwrap();
    assert_eq!(first.read(3), 0xb);
    assert!(held.try_recv().is_err(), "its answer is lost");

    network.lose("del", H1, H2);
    common::signal(cluster.process("h2").pid(), "KILL");
    let (state, controller) = (cluster.path("h2-state"), cluster.controller.clone());
    let words = ["target", "--state", &state, "--run", &h2.run, "--name", "h2", "--controller"];
    let words = words.into_iter().chain([controller.as_str()]).map(String::from).collect();
    cluster.run(&h2.place, "h2", words);
    held.recv_timeout(Duration::from_secs(60)).expect("an answer").unwrap();
    assert_eq!((first.read(3), second.read(3)), (0xb, 0xb), "the last write that was answered");
    second.write(3, 0xc).unwrap();
    assert_eq!(first.read(3), 0xc, "the host goes on");
}

/// Writes a block of a device past the host's cache.
fn write_block(device: &str, block: u64, byte: u8, from: &Path) {
    std::fs::write(from, vec![byte; BLOCK]).unwrap();
    let (input, output) = (format!("if={}", from.display()), format!("of={device}"));
    let at = format!("seek={block}");
    let direct = ["bs=4096", "count=1", "oflag=direct", "conv=notrunc", "status=none"];
    run("dd", &[&[input.as_str(), &output, &at][..], &direct].concat());
}

/// Reads a block of a device past the host's cache.
fn read_block(device: &str, block: u64, into: &Path) -> Vec<u8> {
    let (input, output) = (format!("if={device}"), format!("of={}", into.display()));
    let at = format!("skip={block}");
    let direct = ["bs=4096", "count=1", "iflag=direct", "status=none"];
    run("dd", &[&[input.as_str(), &output, &at][..], &direct].concat());
    std::fs::read(into).unwrap()
}

/// A virtual machine moves so: its disk becomes a device of the other host, the machine goes on
/// there, and the first host lets go.
#[test]
fn a_disk_moves_between_the_devices_of_two_hosts_while_it_is_written() {
    if !can_attach() || !have("unshare") {
        return;
    }
    let Some(network) = Network::new(&["c", "p", "h1", "h2"]) else { return };
    let (mut cluster, hosts) = cluster("moving", &network, &["h1", "h2"]);
    for host in &hosts {
        let words = ["attach", "--run", &host.run].map(String::from).to_vec();
        cluster.run(&host.place, &format!("{}-attach", host.name), words);
        let socket = Path::new(&host.run).join("attach/attach.sock");
        eventually("its attach process listens", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())
        });
    }
    let device = |host: &Host| {
        let attach = ["volume", "attach", "db", "--share", "multi-writer", "--node", host.name];
        let attached = cluster.json(&[&attach[..], &["--run", &host.run]].concat());
        attached["device"].as_str().unwrap().to_owned()
    };
    let [file, other] = ["in", "out"].map(|name| PathBuf::from(cluster.path(name)));
    let source = device(&hosts[0]);
    for block in 0..8 {
        write_block(&source, block, block as u8 + 1, &file);
    }
    let destination = device(&hosts[1]);
    assert_ne!(source, destination);
    for block in 0..8 {
        assert_eq!(read_block(&destination, block, &other), vec![block as u8 + 1; BLOCK]);
    }
    // The machine runs on the second host from here on.
    let stop = Arc::<AtomicBool>::default();
    let (ends, to, from) = (stop.clone(), destination.clone(), file.clone());
    let writer = std::thread::spawn(move || {
        let mut count = 0_u64;
        while !ends.load(Ordering::Relaxed) {
            write_block(&to, 8 + count % 64, count as u8, &from);
            count += 1;
        }
        count
    });
    hosts[0].detach(&cluster, "db", &hosts[1]);
    cluster.wait_for_volume("db", "served by the second host", |volume| {
        volume["nodes"] == serde_json::json!(["h2"]) && volume["health"] == "Online"
    });
    std::thread::sleep(Duration::from_secs(1));
    stop.store(true, Ordering::Relaxed);
    let count = writer.join().unwrap();
    assert!(count > 2, "{count} writes");
    for last in count.saturating_sub(2)..count {
        assert_eq!(read_block(&destination, 8 + last % 64, &other), vec![last as u8; BLOCK]);
    }
    for block in 0..8 {
        assert_eq!(read_block(&destination, block, &other), vec![block as u8 + 1; BLOCK]);
    }
    hosts[1].detach(&cluster, "db", &hosts[0]);
}

/// Proves CSI-CTRLPUBLISH-28: with real hosts.
#[test]
fn a_volume_goes_to_another_host_by_itself_once_nobody_hears_of_its_own_and_never_before() {
    let Some(network) = Network::new(&["c", "p", "h1", "h2"]) else { return };
    let (cluster, hosts) = cluster("lost-host", &network, &["h1", "h2"]);
    let [h1, h2] = hosts.as_slice() else { unreachable!() };
    let user = Arc::new(User::of(&h1.attached(&cluster, "db", &[])));
    user.write(0, 1).unwrap();
    let said = h2.refused(&cluster, "db", &[]);
    assert!(said.contains("node h1") && said.contains("it reported"), "{said}");

    // The way to the controller alone is cut: the volume is idle, and pools hear its target.
    let route = |action: &str| {
        let mut command = h1.place.command("ip");
        let to = format!("{}/32", network.place(0).address);
        assert!(command.args(["route", action, "blackhole", &to]).status().unwrap().success());
    };
    route("add");
    std::thread::sleep(NODE_TIMEOUT + Duration::from_secs(6));
    let said = h2.refused(&cluster, "db", &[]);
    assert!(said.contains("hears its target"), "{said}");
    user.write(1, 2).unwrap();
    route("del");

    network.link(2, "down");
    let lost = Instant::now();
    eventually("it is given to the other host", || {
        h2.attach(&cluster, "db", &[]).status.success().then_some(())
    });
    assert!(lost.elapsed() >= NODE_TIMEOUT - Duration::from_secs(2), "{:?}", lost.elapsed());
    println!("taken over {:?} after the loss", lost.elapsed());
    let other = User::of(&h2.attached(&cluster, "db", &[]));
    assert_eq!(other.read(0), 1);
    other.write(0, 5).unwrap();
    let events = cluster.ok(&["events"]);
    assert!(events.contains("VolumeTakenOver") && events.contains("h1"), "{events}");
    // The host that is back reaches nothing of it.
    let late =
        user.begin(Operation::Write { offset: 0, data: Bytes::from(vec![7; BLOCK]), fua: true });
    network.link(2, "up");
    std::thread::sleep(Duration::from_secs(3));
    assert!(!matches!(late.try_recv(), Ok(Ok(_))), "a write of the lost host is acknowledged");
    assert_eq!(other.read(0), 5);
}
