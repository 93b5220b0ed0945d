//! A network that is fenced through the socket of CSI-Addons, and all kinds of writers that may get an
//! acknowledgement: each client keeps a log of its own. Needs root and iproute2.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quoin_api::csi_addons::fence::fence_controller_client::FenceControllerClient;
use quoin_api::csi_addons::fence::{
    Cidr, FenceClusterNetworkRequest, UnfenceClusterNetworkRequest,
};
use quoin_identity::{Expected, Identity, Role};
use quoin_types::block::Operation;
use tonic::Code;
use tonic::transport::Channel;

use crate::common::nbd::{FUA, Nbd, WRITE};
use crate::common::network::Network;
use crate::common::{Cluster, Place, can_attach, eventually, signal};
use crate::sharing::{Host, User};

const BLOCK: usize = 4096;
const PORT: u16 = 7409;
/// Time after which an answer that came before counts as read, on a busy machine.
const READ_WITHIN: Duration = Duration::from_millis(300);

/// When requests were begun and acknowledged, as their client saw it.
#[derive(Default)]
struct Log(Mutex<Vec<(Instant, Instant)>>);

impl Log {
    fn acknowledged(&self, begun: Instant) {
        self.0.lock().unwrap().push((begun, Instant::now()));
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Asserts that nothing was acknowledged after this moment.
    fn ends_at(&self, client: &str, over: Instant) {
        for (begun, answered) in self.0.lock().unwrap().iter() {
            assert!(*begun <= over, "{client}: begun {:?} after the fence held", *begun - over);
            let late = answered.saturating_duration_since(over);
            assert!(late < READ_WITHIN, "{client}: acknowledged {late:?} after the fence held");
        }
    }
}

/// A client that writes without end.
struct Writer {
    client: &'static str,
    log: Arc<Log>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Writer {
    /// `act` does one request; false: it was not acknowledged.
    fn start(
        client: &'static str,
        mut act: impl FnMut(&AtomicBool) -> bool + Send + 'static,
    ) -> Self {
        let (log, stop) = (Arc::<Log>::default(), Arc::<AtomicBool>::default());
        let (keeps, ends) = (log.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let begun = Instant::now();
                match act(&ends) {
                    true => keeps.acknowledged(begun),
                    false => std::thread::sleep(Duration::from_millis(20)),
                }
            }
        });
        Self { client, log, stop, thread }
    }

    /// A program that uses a socket of its host, as the attach process does: it waits for each answer.
    fn by_socket(client: &'static str, user: User) -> Self {
        let mut number = 0;
        Self::start(client, move |ends| {
            number += 1;
            let offset = number % 64 * BLOCK as u64;
            let operation = match number % 2 {
                0 => Operation::Read { offset, length: BLOCK as u32 },
                _ => Operation::Write { offset, data: vec![7; BLOCK].into(), fua: true },
            };
            let answer = user.begin(operation);
            loop {
                match answer.recv_timeout(Duration::from_millis(100)) {
                    Ok(answered) => return answered.is_ok(),
                    Err(_) if ends.load(Ordering::Relaxed) => return false,
                    Err(_) => {}
                }
            }
        })
    }

    /// A program that writes a block device, past the host's cache.
    fn by_device(client: &'static str, device: &str) -> Self {
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let file = OpenOptions::new().write(true).custom_flags(direct).open(device).unwrap();
        let memory = vec![7; 2 * BLOCK];
        let begin = memory.as_ptr().align_offset(BLOCK);
        let mut number = 0;
        Self::start(client, move |_| {
            number += 1;
            file.write_all_at(&memory[begin..begin + BLOCK], number % 64 * BLOCK as u64).is_ok()
        })
    }

    /// An admin's client over TCP, which connects again whenever its connection ends.
    fn by_tcp(client: &'static str, address: String, identity: &str, export: &'static str) -> Self {
        let identity = Identity::load(Path::new(identity)).unwrap();
        let node = Expected::Named(Role::Node, "h2".into());
        let config = identity.client_config(node).unwrap();
        let (mut connection, mut number) = (None, 0);
        Self::start(client, move |_| {
            if connection.is_none() {
                connection = Nbd::connect(&address, Some(config.clone()), export).ok();
            }
            let Some(nbd) = &mut connection else { return false };
            number += 1;
            let written =
                nbd.call(WRITE, FUA, number % 64 * BLOCK as u64, BLOCK as u32, &[7; BLOCK]);
            if !matches!(written, Ok(Ok(()))) {
                connection = None;
                return false;
            }
            true
        })
    }

    fn goes_on(&self) {
        let before = self.log.count();
        eventually(&format!("{} goes on", self.client), || {
            (self.log.count() > before + 3).then_some(())
        });
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

/// An operator that fences through the socket.
struct Operator {
    runtime: tokio::runtime::Runtime,
    addons: Channel,
    blocks: Vec<String>,
}

impl Operator {
    fn cidrs(&self) -> Vec<Cidr> {
        self.blocks.iter().map(|block| Cidr { cidr: block.clone() }).collect()
    }

    /// Fences, asking again as long as the fence does not hold; returns when it did.
    fn fence(&self) -> Instant {
        let mut client = FenceControllerClient::new(self.addons.clone());
        let asked = Instant::now();
        loop {
            let request = FenceClusterNetworkRequest { cidrs: self.cidrs(), ..Default::default() };
            match self.runtime.block_on(client.fence_cluster_network(request)) {
                Ok(_) => break,
                Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
            }
            assert!(asked.elapsed() < Duration::from_secs(90), "the fence never held");
        }
        println!("the fence held after {:?}", asked.elapsed());
        Instant::now()
    }

    fn unfence(&self) {
        let mut client = FenceControllerClient::new(self.addons.clone());
        let request = UnfenceClusterNetworkRequest { cidrs: self.cidrs(), ..Default::default() };
        self.runtime.block_on(client.unfence_cluster_network(request)).unwrap();
    }
}

/// Controller, three pools, the hosts h1 and h2, which serves volumes over TCP, and the socket of CSI-Addons.
fn cluster(network: &Network) -> (Cluster, Host, Host, Operator) {
    let flags = ["--default-spread", "pool", "--node-timeout", "6s"];
    let mut cluster = Cluster::start("fences", &network.place(0), &flags);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&network.place(1), pool, &[]);
    }
    let h1 = Host::start(&mut cluster, network.place(2), "h1", &[]);
    let listen = format!("{}:{PORT}", network.place(3).address);
    let h2 = Host::start(&mut cluster, network.place(3), "h2", &["--nbd-listen", &listen]);
    cluster.wait_for_pools(3);
    let (token, state, run) =
        (cluster.token("node"), cluster.path("c-state"), cluster.path("c-run"));
    let sockets = ["c-csi", "c-addons"].map(|name| {
        std::fs::create_dir(cluster.path(name)).unwrap();
        format!("{}/{name}.sock", cluster.path(name))
    });
    let endpoints = sockets.each_ref().map(|socket| format!("unix://{socket}"));
    let controller = cluster.controller.clone();
    let words = [
        &["node", "run", "--mode", "controller", "--name", "c", "--join", &token][..],
        &["--state", &state, "--run", &run, "--controller", &controller],
        &["--csi-endpoint", &endpoints[0], "--csi-addons-endpoint", &endpoints[1]],
    ];
    let words = words.concat().iter().map(ToString::to_string).collect();
    cluster.run(&Place::here(), "c", words);
    eventually("the socket is there", || {
        std::os::unix::net::UnixStream::connect(&sockets[1]).is_ok().then_some(())
    });
    eventually("its node may fence", || {
        let set = cluster.quoin(&["node", "set", "c", "--manages-volumes", "true"]);
        set.status.success().then_some(())
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let addons = {
        let _context = runtime.enter();
        quoin_identity::unix_channel(Path::new(&sockets[1]))
    };
    // The address of this host, from which the client over TCP comes.
    let here = format!("{}.254/32", network.subnet);
    let blocks = vec![format!("{}/32", h1.place.address), here];
    let operator = Operator { runtime, addons, blocks };
    (cluster, h1, h2, operator)
}

/// Proves ADDONS-FENCE-05, ADDONS-FENCE-11: with writers of every kind, by their own logs.
#[test]
fn nothing_is_acknowledged_to_writers_of_a_fenced_network_once_the_call_is_answered() {
    let Some(network) = Network::new(&["c", "p", "h1", "h2"]) else { return };
    let (mut cluster, h1, h2, operator) = cluster(&network);
    for volume in ["own", "device", "shared", "tcp", "other"] {
        cluster.ok(&["volume", "create", volume, "--size", "16MiB", "--replicas", "3"]);
    }
    let shared = ["--share", "multi-writer"];
    let own = User::of(&h1.attached(&cluster, "own", &[]));
    h2.attached(&cluster, "shared", &shared);
    let sharer = User::of(&h1.attached(&cluster, "shared", &shared));
    h2.attached(&cluster, "tcp", &[]);
    let other = User::of(&h2.attached(&cluster, "other", &[]));
    let (ops, token) = (cluster.path("ops"), cluster.token("admin"));
    let join = ["cluster", "join", "--controller", &cluster.controller, "--to", &ops];
    cluster.ok(&[&join[..], &["--name", "ops", "--join", &token]].concat());
    let mut writers = vec![
        Writer::by_socket("a target on the fenced node", own),
        Writer::by_socket("a node that shares a volume", sharer),
        Writer::by_tcp("a client over TCP", format!("{}:{PORT}", h2.place.address), &ops, "tcp"),
    ];
    if can_attach() {
        let words = ["attach", "--run", &h1.run].map(String::from).to_vec();
        cluster.run(&h1.place, "h1-attach", words);
        let socket = Path::new(&h1.run).join("attach/attach.sock");
        eventually("its attach process listens", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())
        });
        let attach = ["volume", "attach", "device", "--node", "h1", "--run", &h1.run];
        let attached = cluster.json(&attach);
        let device = attached["device"].as_str().unwrap().to_owned();
        writers.push(Writer::by_device("a block device of the fenced node", &device));
    }
    let beside = Writer::by_socket("another node", other);
    let targets = [cluster.process("h1").pid(), cluster.process("h2").pid()];
    // Nobody is stopped; both targets; the fenced node's; the one that serves its clients.
    for stopped in [&[][..], &targets[..], &targets[..1], &targets[1..]] {
        writers.iter().for_each(Writer::goes_on);
        stopped.iter().for_each(|pid| signal(pid, "STOP"));
        let over = operator.fence();
        if !stopped.contains(&targets[1]) {
            beside.goes_on();
        }
        stopped.iter().for_each(|pid| signal(pid, "CONT"));
        beside.goes_on();
        std::thread::sleep(Duration::from_secs(4));
        for writer in &writers {
            writer.log.ends_at(writer.client, over);
        }
        operator.unfence();
    }
    writers.iter().for_each(Writer::goes_on);
    writers.into_iter().for_each(Writer::end);
    beside.end();
    if can_attach() {
        cluster.ok(&["volume", "detach", "device", "--node", "h1", "--run", &h1.run]);
    }
}

#[test]
fn a_person_fences_lists_and_lifts_blocks_and_is_told_which_text_is_none() {
    let cluster = Cluster::start("fence-commands", &Place::here(), &[]);
    assert_eq!(cluster.json(&["fence", "list"]), serde_json::json!([]));
    assert!(cluster.ok(&["fence", "list"]).contains("no block is fenced"));
    let added = cluster.ok(&["fence", "add", "192.0.2.7/24", "2001:db8::/64"]);
    assert_eq!(added, "blocks 192.0.2.7/24, 2001:db8::/64: fenced");
    cluster.ok(&["fence", "add", "192.0.2.0/24"]);
    let listed = cluster.json(&["fence", "list"]);
    let blocks: Vec<_> = listed.as_array().unwrap().iter().map(|f| f["block"].clone()).collect();
    assert_eq!(blocks, ["192.0.2.0/24", "2001:db8::/64"]);
    assert_eq!(listed[0]["nodes"], serde_json::json!([]));
    assert!(cluster.ok(&["fence", "list"]).starts_with("BLOCK"));
    for words in [["fence", "add", "192.0.2.7"], ["fence", "remove", "2001:db8::/129"]] {
        let output = cluster.quoin(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("192.0.2.7/32"), "{said}");
    }
    let lifted = cluster.ok(&["fence", "remove", "192.0.2.0/24"]);
    assert_eq!(lifted, "block 192.0.2.0/24: not fenced any more");
    assert_eq!(cluster.json(&["fence", "ls"])[0]["block"], "2001:db8::/64");
    let events = cluster.ok(&["events"]);
    assert!(events.contains("FenceAdded") && events.contains("FenceRemoved"), "{events}");
    assert_eq!(cluster.quoin(&["fence", "add"]).status.code(), Some(2), "a block is missing");
}
