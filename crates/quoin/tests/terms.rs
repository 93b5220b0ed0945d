//! Two controllers of one cluster: a host is cut off with the controller on it, the records are
//! recovered on another host, and the first one comes back with all that ran there.

use crate::common;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::network::Network;
use common::{Cluster, Place, User, eventually};
use quoin_nbd::client::{Address, Client, ClientOptions};

pub const BLOCKS: u64 = 256;
/// The exit status of a controller that another one has superseded.
const SUPERSEDED: i32 = 4;

/// The address at which members find their controller, like a name in DNS: it leads to one host,
/// and then to another.
struct Name {
    address: SocketAddr,
    leads_to: Arc<Mutex<String>>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Name {
    fn new(address: &str, leads_to: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let name = Self {
            address: listener.local_addr().unwrap(),
            leads_to: Arc::new(Mutex::new(leads_to.to_owned())),
            open: Arc::default(),
        };
        let (leads_to, open) = (name.leads_to.clone(), name.open.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let to: SocketAddr = leads_to.lock().unwrap().parse().unwrap();
                let (open, mut both) = (open.clone(), [near.try_clone().unwrap(), near]);
                std::thread::spawn(move || {
                    let far = TcpStream::connect_timeout(&to, Duration::from_secs(1));
                    let Ok(far) = far else { return };
                    open.lock()
                        .unwrap()
                        .extend([both[0].try_clone(), far.try_clone()].map(Result::unwrap));
                    let mut far = [far.try_clone().unwrap(), far];
                    let ([from_near, to_near], [to_far, from_far]) = (&mut both, &mut far);
                    std::thread::scope(|scope| {
                        scope.spawn(|| std::io::copy(from_near, to_far).map(drop));
                        let _ = std::io::copy(from_far, to_near);
                        let _ = to_near.shutdown(std::net::Shutdown::Both);
                    });
                });
            }
        });
        name
    }

    fn move_to(&self, leads_to: &str) {
        leads_to.clone_into(&mut self.leads_to.lock().unwrap());
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Number of the last acknowledged write, by block.
pub type Written = Arc<Mutex<BTreeMap<u64, u64>>>;

/// A client that writes and flushes one block after the other.
pub struct Writer {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    written: Written,
    thread: std::thread::JoinHandle<()>,
}

fn content(number: u64) -> Bytes {
    let mut block = vec![number as u8; 4096];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block.into()
}

impl Writer {
    pub fn start(socket: &str, from: u64, written: Written) -> Self {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let options = ClientOptions::new(Address::Unix(socket.into()));
        let client = eventually("the volume is served", || Client::connect(options.clone()).ok());
        let (stopped, count, noted) = (stop.clone(), acknowledged.clone(), written.clone());
        let thread = std::thread::spawn(move || {
            for number in from.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let block = number % BLOCKS;
                if client.write(block * 4096, content(number), true).is_err() {
                    break;
                }
                noted.lock().unwrap().insert(block, number);
                count.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
            client.stop();
        });
        Self { stop, acknowledged, written, thread }
    }

    pub fn count(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    pub fn assert_progress(&self, what: &str) {
        let before = self.count();
        eventually(what, || {
            assert!(!self.thread.is_finished(), "{what}: the client got an error");
            (self.count() > before + 50).then_some(())
        });
    }

    pub fn end(self) -> BTreeMap<u64, u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.written.lock().unwrap().clone()
    }
}

pub fn verify(socket: &str, written: &BTreeMap<u64, u64>) {
    let options = ClientOptions::new(Address::Unix(socket.into()));
    let client = eventually("the volume is served", || Client::connect(options.clone()).ok());
    for (block, number) in written {
        let read = client.read(block * 4096, 4096).unwrap();
        let found = u64::from_le_bytes(read[..8].try_into().unwrap());
        assert!(read == content(*number), "block {block} was acknowledged as {number}, is {found}");
    }
    client.stop();
}

fn arguments(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn run_controller(cluster: &mut Cluster, place: &Place, name: &str, state: &str, run: &str) {
    let (state, socket) = (cluster.path(state), cluster.path(&format!("{run}/admin.sock")));
    let listen = format!("{}:7400", place.address);
    let arguments = arguments(&[
        "controller",
        "run",
        "--state",
        &state,
        "--admin-socket",
        &socket,
        "--listen",
        &listen,
    ]);
    cluster.run(place, name, arguments);
}

/// Starts another node than [`Cluster::node`]'s, with directories of its own.
fn run_node(cluster: &mut Cluster, place: &Place, name: &str, controller: &str, token: &str) {
    let (state, run) =
        (cluster.path(&format!("{name}-state")), cluster.path(&format!("{name}-run")));
    std::fs::create_dir_all(&run).unwrap();
    let member = ["--state", &state, "--run", &run, "--name", name, "--controller", controller];
    let target = [&["target", "--join", token][..], &member].concat();
    cluster.run(place, &format!("{name}-target"), arguments(&target));
    let certificate = format!("{state}/cert.pem");
    cluster.eventually("the target joins", || {
        std::path::Path::new(&certificate).exists().then_some(())
    });
    let csi = format!("unix://{}", cluster.path(&format!("{name}.sock")));
    let node =
        [&["node", "run", "--mode", "controller", "--csi-endpoint", &csi][..], &member].concat();
    cluster.run(place, &format!("{name}-node"), arguments(&node));
}

fn attach(user: &User, cluster: &Cluster, node: &str) -> String {
    let run = cluster.path(&format!("{node}-run"));
    let uri = user.ok(&["volume", "attach", "db", "--nbd", "--node", node, "--run", &run]);
    uri.split_once("socket=").unwrap().1.to_owned()
}

fn epoch(user: &User) -> u64 {
    user.json(&["volume", "get", "db"])["epoch"].as_u64().unwrap()
}

fn reasons(user: &User) -> Vec<String> {
    let events = user.ok(&["events", "-o", "json"]);
    let events: Vec<serde_json::Value> = serde_json::from_str(&events).unwrap();
    events.iter().map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_superseded_controller_that_returns_ends_without_effect() {
    let Some(network) = Network::new(&["c", "p1", "p2", "p3", "d"]) else { return };
    let (old_host, new_host) = (network.place(0), network.place(4));
    let old = format!("{}:7400", old_host.address);
    let new = format!("{}:7400", new_host.address);
    let mut cluster = Cluster::start("terms", &old_host, &[]);
    let name = Name::new(&format!("{}.254", network.subnet), &old);
    cluster.controller = name.address.to_string();
    for (index, pool) in [(1, "p1"), (2, "p2"), (3, "p3")] {
        cluster.pool(&network.place(index), pool, &[]);
    }
    // The node on the controller's host calls that one by its address, wherever the name leads.
    let token = cluster.token("node");
    run_node(&mut cluster, &old_host, "n1", &old, &token);
    let token = cluster.token("node");
    let by_name = cluster.controller.clone();
    run_node(&mut cluster, &new_host, "n2", &by_name, &token);
    cluster.wait_for_pools(3);
    eventually("both nodes are online", || {
        let nodes = cluster.json(&["node", "list"]);
        let nodes = nodes.as_array()?;
        (nodes.iter().filter(|n| n["state"] == "Online").count() == 2).then_some(())
    });
    cluster.ok(&["volume", "create", "db", "--size", "8MiB"]);
    let stale_socket = attach(&cluster, &cluster, "n1");
    let stale = Writer::start(&stale_socket, 0, Written::default());
    stale.assert_progress("the first IO");
    let backup = cluster.path("backup");
    cluster.ok(&["controller", "backup", &backup]);

    // The host is cut off, and appears lost. All processes on it continue.
    network.link(0, "down");
    let state = cluster.path("controller2");
    cluster.ok(&["controller", "restore", &backup, "--state", &state]);
    let run = cluster.path("run2");
    std::fs::create_dir_all(&run).unwrap();
    run_controller(&mut cluster, &new_host, "controller2", "controller2", "run2");
    name.move_to(&new);
    let user =
        User { admin_socket: format!("{run}/admin.sock").into(), logs: cluster.logs.clone() };
    eventually("the new controller answers", || {
        user.quoin(&["cluster", "info"]).status.success().then_some(())
    });
    let printed = eventually("the records are recovered", || {
        let output = user.quoin(&["controller", "recover"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    });
    assert!(printed.contains("the records rule"), "{printed}");
    user.ok(&["volume", "detach", "db", "--node", "n1", "--force"]);
    let socket = attach(&user, &cluster, "n2");
    let before = eventually("the stale client has had its last answer", || {
        let count = stale.count();
        std::thread::sleep(Duration::from_secs(1));
        (stale.count() == count).then_some(count)
    });
    let acknowledged = stale.written.lock().unwrap().clone();
    verify(&socket, &acknowledged);
    let written: Written = Arc::new(Mutex::new(acknowledged));
    let writer = Writer::start(&socket, 1_000_000, written);
    writer.assert_progress("the volume in its new place");
    eventually("it is whole", || {
        (user.json(&["volume", "get", "db"])["health"] == "Online").then_some(())
    });
    let opened = epoch(&user);

    network.link(0, "up");
    let ended = eventually("the old controller ends", || cluster.process("controller").ended());
    assert_eq!(ended.code(), Some(SUPERSEDED), "{}", cluster.log("controller"));
    let printed = cluster.log("controller");
    assert!(
        printed.contains("term 1 has begun") && printed.contains("ControllerSuperseded"),
        "{printed}"
    );
    writer.assert_progress("the volume beside what came back");
    // The controller stays ended, and reports why, until a user lets it begin a term of its own.
    run_controller(&mut cluster, &old_host, "again", "controller", "run");
    let ended = eventually("it does not start", || cluster.process("again").ended());
    assert_eq!(ended.code(), Some(SUPERSEDED), "{}", cluster.log("again"));
    assert!(cluster.log("again").contains("term 1 has begun"), "{}", cluster.log("again"));
    eventually("pools tell whom they refused", || {
        reasons(&user).contains(&"TermRefused".to_owned()).then_some(())
    });
    writer.assert_progress("the volume to the end");
    assert_eq!(epoch(&user), opened, "nothing made the new target open the volume again");
    assert_eq!(stale.count(), before, "a write of the host that was cut off was acknowledged");
    let written = writer.end();
    verify(&socket, &written);
    eventually("it is whole at the end", || {
        (user.json(&["volume", "get", "db"])["health"] == "Online").then_some(())
    });
    let info = user.json(&["cluster", "info"]);
    assert_eq!(info["term"], 1);
    stale.stop.store(true, Ordering::Relaxed);
    let state = cluster.path("controller");
    let printed = cluster.ok(&["controller", "recover", "--state", &state]);
    assert!(printed.contains("may start again") && printed.contains("term 1"), "{printed}");
    let once = cluster.quoin(&["controller", "recover", "--state", &state]);
    let printed = String::from_utf8_lossy(&once.stderr).into_owned();
    assert!(!once.status.success() && printed.contains("no other controller"), "{printed}");
}
