//! Hosts with addresses of their own: network namespaces on a bridge. Needs root and iproute2.

use std::collections::BTreeSet;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Place, have, is_root, skipped};

fn ip(arguments: &str) -> Output {
    Command::new("ip").args(arguments.split(' ')).output().unwrap()
}

fn ip_ok(arguments: &str) {
    let output = ip(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "ip {arguments}: {printed}");
}

/// Most networks that one process of tests has at a time.
const NETWORKS_MAX: u32 = 8;
/// Numbers of the present networks.
static NUMBERS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// A bridge on this host and one namespace a host, removed with the test in every case.
pub struct Network {
    id: u32,
    bridge: String,
    names: Vec<String>,
    pub subnet: String,
}

impl Network {
    /// Makes a network; `None` where namespaces are not possible, with a printed reason.
    pub fn new(hosts: &[&str]) -> Option<Self> {
        if !is_root() || !have("ip") {
            skipped("network namespaces need root and iproute2");
            return None;
        }
        let mut numbers = NUMBERS.lock().unwrap();
        let number = (0..NETWORKS_MAX).find(|n| numbers.insert(*n)).expect("so many networks");
        drop(numbers);
        let id = std::process::id() % 1_250 * NETWORKS_MAX + number;
        let bridge = format!("qb{id}");
        let probe = ip(&format!("link add {bridge} type bridge"));
        if !probe.status.success() {
            NUMBERS.lock().unwrap().remove(&number);
            let why = String::from_utf8_lossy(&probe.stderr).into_owned();
            skipped(&format!("no bridge can be made here: {why}"));
            return None;
        }
        // The drop cleans up from here on, at whatever stage.
        let mut network = Self {
            id,
            bridge,
            names: Vec::new(),
            subnet: format!("10.{}.{}", 64 + id % 128, id / 128),
        };
        ip_ok(&format!("addr add {}.254/24 dev {}", network.subnet, network.bridge));
        ip_ok(&format!("link set {} up", network.bridge));
        for (index, host) in hosts.iter().enumerate() {
            let name = format!("qt{id}-{host}");
            ip_ok(&format!("netns add {name}"));
            network.names.push(name.clone());
            let (outer, inner) = (format!("qv{id}-{index}"), format!("qi{id}-{index}"));
            ip_ok(&format!("link add {outer} type veth peer name {inner}"));
            ip_ok(&format!("link set {outer} master {} up", network.bridge));
            ip_ok(&format!("link set {inner} netns {name}"));
            let address = format!("{}.{}", network.subnet, index + 1);
            ip_ok(&format!("-n {name} addr add {address}/24 dev {inner}"));
            ip_ok(&format!("-n {name} link set {inner} up"));
            ip_ok(&format!("-n {name} link set lo up"));
        }
        Some(network)
    }

    pub fn place(&self, index: usize) -> Place {
        Place {
            namespace: Some(self.names[index].clone()),
            address: format!("{}.{}", self.subnet, index + 1),
        }
    }

    /// Loses what a host sends to another one, or no longer (`add`, `del`); the way back is open.
    pub fn lose(&self, change: &str, from: usize, to: usize) {
        let (name, address) = (&self.names[from], format!("{}.{}", self.subnet, to + 1));
        ip_ok(&format!("-n {name} route {change} blackhole {address}/32"));
    }

    /// Cuts or restores the link of a host; neither side is informed.
    pub fn link(&self, index: usize, state: &str) {
        ip_ok(&format!("link set qv{}-{index} {state}", self.id));
    }
}

/// A namespace with a loopback of its own, where packets of one direction of a connection can be swallowed: neither
/// end hears of it. Removed with the test in every case.
pub struct Loopback {
    name: String,
}

impl Loopback {
    /// Makes one; `None` where namespaces are not possible.
    pub fn new() -> Option<Self> {
        if !is_root() || !have("ip") {
            return None;
        }
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ql{}-{number}", std::process::id());
        if !ip(&format!("netns add {name}")).status.success() {
            return None;
        }
        let made = Self { name };
        made.ip_ok("link set lo up");
        // Rules for single connections come before the table of own addresses.
        made.ip_ok("rule add pref 100 lookup local");
        made.ip_ok("rule del pref 0");
        Some(made)
    }

    fn ip_ok(&self, arguments: &str) {
        ip_ok(&format!("-n {} {arguments}", self.name));
    }

    pub fn place(&self) -> Place {
        Place { namespace: Some(self.name.clone()), ..Place::here() }
    }

    /// Swallows TCP packets from (`sport`) or to (`dport`) a port, or no longer (`add`, `del`).
    pub fn swallow(&self, change: &str, side: &str, port: u16) {
        self.ip_ok(&format!("rule {change} pref 10 ipproto tcp {side} {port} blackhole"));
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.name));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The kernel ends a namespace some time later; the next network of this number must not meet
        // a link of this one.
        for (index, name) in self.names.iter().enumerate() {
            ip(&format!("link del qv{}-{index}", self.id));
            ip(&format!("netns del {name}"));
        }
        ip(&format!("link del {}", self.bridge));
        NUMBERS.lock().unwrap().remove(&(self.id % NETWORKS_MAX));
    }
}
