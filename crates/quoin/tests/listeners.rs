//! Every listener of a cluster, and who gets in by it.
//!
//! [`LISTENERS`] names each socket on which some process listens; a listener that is in no row fails the test
//! that looks for them. [`STANDINGS`] names those who come, each with a certificate or without, and what
//! each TLS listener says to it. What a caller of the controller may do, call by call, is held by the tables
//! of `quoin-control` (`api/gate.rs`, `tests/control/access.rs`), and what a grant opens at a pool by
//! `quoin-target/tests/sessions.rs`.

use crate::common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::nbd::{FUA, Nbd, WRITE};
use common::{Cluster, Place, can_attach, eventually, free_port};
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::{ListVolumesRequest, PublishVolumeRequest, VolumeRef};
use quoin_identity::{Authority, Expected, Identity, Lifetimes, Role};
use quoin_nbd::client::{Address, Client, ClientOptions};
use quoin_types::ids::{Epoch, Incarnation, SessionKey};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};
use quoin_wire::handshake::ClientSecurity;
use quoin_wire::{Hello, Mode};
use rustls::ClientConfig;

/// How a listener is guarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Guard {
    /// By the permissions of the socket's file, which is its owner's.
    Mode(u32),
    /// By the kernel's word on the user at the other end: a name without a file.
    SameUser,
    /// By certificates.
    Tls,
    /// By nothing: only on an address that was asked for, and it changes nothing.
    Open,
}

/// Processes, the end of the socket's name (of a port: what it is), and how it is guarded.
const LISTENERS: &[(&str, &str, Guard)] = &[
    ("controller", "run/admin.sock", Guard::Mode(0o600)),
    ("controller", "port", Guard::Tls),
    ("controller", "http", Guard::Open),
    ("p1", "port", Guard::Tls),
    ("p1", "@quoin-data/p1/*", Guard::SameUser),
    ("n1", "nbd/keys.sock", Guard::Mode(0o600)),
    ("n1", "nbd/history.sock", Guard::Mode(0o600)),
    ("n1", "nbd/*.sock", Guard::Mode(0o600)),
    ("n1", "nbd-listen", Guard::Tls),
    ("n2", "nbd/keys.sock", Guard::Mode(0o600)),
    ("n2", "nbd/history.sock", Guard::Mode(0o600)),
    ("n2", "nbd/*.sock", Guard::Mode(0o600)),
    ("n2", "share-listen", Guard::Tls),
    ("n3", "nbd/keys.sock", Guard::Mode(0o600)),
    ("n3", "nbd/history.sock", Guard::Mode(0o600)),
    ("n3", "nbd/*.sock", Guard::Mode(0o600)),
    ("csi", "csi.sock", Guard::Mode(0o660)),
    ("csi", "addons/csi-addons.sock", Guard::Mode(0o660)),
    ("attach", "attach/attach.sock", Guard::Mode(0o600)),
    ("holder", "attach/holder.sock", Guard::Mode(0o600)),
];

/// Error of a change without a number.
const ESTALE: u32 = 116;

/// Answers of TLS listeners.
const IN: &str = "";
const NO_TLS: &str = "*TLS*";
const NO_MEMBER: &str = "no member by the key";
const NOT_SHARED: &str = "may not use that volume";
const BY_PORT: &str = "by this port";
const NOT_FOR: &str = "only that node";
/// A pool has the reason in its log alone: no node, or nothing was granted to it.
const NO_GRANT: &str = "refused the session";

/// A caller, and what is said: by the controller (whether it may list volumes), by a pool to a session
/// without a grant, by n1's port for all that it serves, and by n2's for those who share (asked for the
/// volume that n1 and n3 share, and for the one that n2 has for itself).
const STANDINGS: &[(&str, [&str; 5])] = &[
    ("nobody", ["Unauthenticated", NO_TLS, NO_TLS, NO_TLS, NO_TLS]),
    ("another cluster's admin", [NO_TLS, NO_TLS, NO_TLS, NO_TLS, NO_TLS]),
    ("admin", [IN, NO_GRANT, IN, BY_PORT, BY_PORT]),
    ("admin, removed", ["removed", NO_GRANT, NO_MEMBER, BY_PORT, BY_PORT]),
    ("admin, by another key", ["another key", NO_GRANT, NO_MEMBER, BY_PORT, BY_PORT]),
    ("node n1", [IN, NO_GRANT, IN, IN, NOT_SHARED]),
    ("node n1, by another key", ["another key", NO_GRANT, NO_MEMBER, NOT_SHARED, NOT_SHARED]),
    ("node n2", [IN, NO_GRANT, NOT_SHARED, BY_PORT, BY_PORT]),
    ("node n3", [IN, NO_GRANT, NOT_SHARED, IN, NOT_SHARED]),
    ("node n3, by another key", ["another key", NO_GRANT, NOT_SHARED, NOT_SHARED, NOT_SHARED]),
    ("node n4, which has nothing", [IN, NO_GRANT, NOT_SHARED, NOT_SHARED, NOT_SHARED]),
    ("pool", ["not for pool p1", NO_GRANT, NOT_FOR, NOT_FOR, NOT_FOR]),
    ("controller", ["not for controller", NO_GRANT, NOT_FOR, NOT_FOR, NOT_FOR]),
];

struct Listeners {
    cluster: Cluster,
    pool: String,
    all: String,
    shares: String,
    http: String,
    runtime: tokio::runtime::Runtime,
}

impl Listeners {
    /// Pool p1; n1 with its port for all, n2 with the one for sharers, n3 and the CSI process. Volume
    /// `own` is n1's, `private` n2's, and `shared` all three have, served by n2.
    fn new(test: &str) -> Self {
        let here = Place::here();
        let http = format!("127.0.0.1:{}", free_port());
        let flags = ["--default-spread", "pool", "--http", &http];
        let mut cluster = Cluster::start(test, &here, &flags);
        cluster.pool(&here, "p1", &[]);
        let [all, shares, other] = [(); 3].map(|()| format!("127.0.0.1:{}", free_port()));
        let mut target = |name: &str, flags: &[&str]| {
            let (state, run) = (cluster.path(name), cluster.path(&format!("{name}-run")));
            let (token, controller) = (cluster.token("node"), cluster.controller.clone());
            let words = ["target", "--name", name, "--join", &token, "--controller", &controller];
            let words = [&words[..], &["--state", &state, "--run", &run], flags].concat();
            cluster.run(&here, name, words.iter().map(ToString::to_string).collect());
        };
        target("n1", &["--nbd-listen", &all]);
        target("n2", &["--share-listen", &shares]);
        target("n3", &["--share-listen", &other]);
        let csi = ["node", "run", "--name", "n1", "--mode", "controller", "--state"];
        let csi = csi.into_iter().map(String::from).chain([
            cluster.path("n1"),
            "--run".into(),
            cluster.path("n1-run"),
            "--controller".into(),
            cluster.controller.clone(),
            "--csi-endpoint".into(),
            format!("unix://{}", cluster.path("csi.sock")),
            "--csi-addons-endpoint".into(),
            format!("unix://{}", cluster.path("addons/csi-addons.sock")),
        ]);
        let csi = csi.collect();
        let joined = PathBuf::from(cluster.path("n1/cert.pem"));
        eventually("n1 joins", || joined.exists().then_some(()));
        cluster.run(&here, "csi", csi);
        if can_attach() {
            let run = cluster.path("n1-run");
            let words = ["attach", "--run", &run].map(String::from).to_vec();
            cluster.run(&here, "attach", words);
        }
        cluster.wait_for_pools(1);
        eventually("the nodes are online", || {
            let nodes = cluster.json(&["node", "list"]);
            let online = |node: &&serde_json::Value| node["state"] == "Online";
            (nodes.as_array()?.iter().filter(online).count() == 3).then_some(())
        });
        for name in ["own", "private", "shared"] {
            cluster.ok(&["volume", "create", name, "--size", "8MiB", "--replicas", "1"]);
        }
        let attach = |volume: &str, node: &str, flags: &[&str]| {
            let run = cluster.path(&format!("{node}-run"));
            let words = ["volume", "attach", volume, "--node", node, "--nbd", "--run", &run];
            cluster.ok(&[&words[..], flags].concat());
        };
        attach("own", "n1", &[]);
        attach("private", "n2", &[]);
        for node in ["n2", "n1", "n3"] {
            attach("shared", node, &["--share", "multi-writer"]);
        }
        let pools = cluster.json(&["pool", "list"]);
        let pool = pools[0]["address"].as_str().unwrap().to_owned();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        Self { cluster, pool, all, shares, http, runtime }
    }

    fn authority(&self, lifetimes: Lifetimes) -> Authority {
        Authority::load(Path::new(&self.cluster.path("controller")), lifetimes).unwrap()
    }

    /// A certificate that verifies, with a key that is no member's.
    fn forged(&self, role: Role, name: &str) -> Identity {
        let directory = PathBuf::from(self.cluster.path(&format!("forged-{role}-{name}")));
        match directory.exists() {
            true => Identity::load(&directory).unwrap(),
            false => {
                let authority = self.authority(Lifetimes::default());
                authority.issue_identity(&directory, role, name).unwrap()
            }
        }
    }

    fn member(&self, directory: &str) -> Identity {
        Identity::load(Path::new(&self.cluster.path(directory))).unwrap()
    }

    /// Joins as a new member, with a token for this name, which takes it from another key.
    fn join(&self, role: Role, name: &str, directory: &str) -> Identity {
        let words = ["token", "create", "--role", role.as_str(), "--name", name];
        let token = self.cluster.ok(&words).parse().unwrap();
        let to = PathBuf::from(self.cluster.path(directory));
        let joining = quoin_identity::join(&self.cluster.controller, &token, role, name, &to);
        self.runtime.block_on(joining).unwrap()
    }

    /// The answer of the listener of a volume; an empty text: it is open.
    fn nbd(&self, address: &str, identity: Option<&Identity>, node: &str, volume: &str) -> String {
        match self.open(address, identity, node, volume) {
            Ok(mut open) => {
                assert_eq!(open.read(0, 4096).unwrap().len(), 4096);
                IN.to_owned()
            }
            Err(refused) => refused,
        }
    }

    fn open(
        &self,
        address: &str,
        identity: Option<&Identity>,
        node: &str,
        volume: &str,
    ) -> Result<Nbd, String> {
        let expected = Expected::Named(Role::Node, node.to_owned());
        let config = match identity {
            Some(identity) => identity.client_config(expected).unwrap(),
            None => self.without_certificate(),
        };
        Nbd::connect(address, Some(config), volume)
    }

    /// A client that shows nothing, and takes any server.
    fn without_certificate(&self) -> Arc<ClientConfig> {
        let mut roots = rustls::RootCertStore::empty();
        let authorities = std::fs::read_to_string(self.cluster.path("n1/ca.pem")).unwrap();
        use rustls::pki_types::pem::PemObject;
        let certificates =
            rustls::pki_types::CertificateDer::pem_slice_iter(authorities.as_bytes());
        certificates.for_each(|certificate| roots.add(certificate.unwrap()).unwrap());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(config)
    }

    fn controller(&self, identity: Option<&Identity>) -> String {
        self.runtime.block_on(async {
            let channel = match identity {
                Some(identity) => identity.channel(&self.cluster.controller).unwrap(),
                None => {
                    let token = self.cluster.token("node").parse().unwrap();
                    let address = &self.cluster.controller;
                    quoin_identity::newcomer_channel(address, &token).await.unwrap()
                }
            };
            let mut cluster = ClusterClient::new(channel);
            match cluster.list_volumes(ListVolumesRequest::default()).await {
                Ok(_) => IN.to_owned(),
                Err(status) => format!("{:?} {}", status.code(), status.message()),
            }
        })
    }

    /// The answer of a pool to a session for which nothing was granted.
    fn pool(&self, identity: Option<&Identity>) -> String {
        let config = match identity {
            Some(identity) => {
                identity.client_config(Expected::Named(Role::Pool, "p1".into())).unwrap()
            }
            None => self.without_certificate(),
        };
        let security = ClientSecurity::Tls {
            config,
            server_name: "quoin".try_into().unwrap(),
            mode: Mode::Encrypt,
        };
        let session = SessionKey { epoch: Epoch(1), incarnation: Incarnation(1), nonce: 1 };
        let hello = Hello::new(VolumeId(1), ReplicaId(1), ReplicaGuid(1), bytes::Bytes::new());
        let address = self.pool.parse().unwrap();
        match quoin_wire::establish::dial("nobody", address, &security, session, &hello) {
            Ok(_) => IN.to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// Sockets on which processes of this cluster listen: process, name (of a port: its address), and
    /// the path of the file.
    fn listeners(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        let (unix, ports) = (listening_unix(), listening_ports());
        for process in &self.cluster.processes {
            for (pid, name) in [(process.pid(), process.name.clone())]
                .into_iter()
                .chain(children(process.pid()).into_iter().map(|pid| (pid, "holder".to_owned())))
            {
                for inode in sockets_of(pid) {
                    let listens = unix.get(&inode).or_else(|| ports.get(&inode));
                    found.extend(listens.map(|listens| (name.clone(), listens.clone())));
                }
            }
        }
        found
    }
}

/// Inodes of the sockets of a process.
fn sockets_of(pid: u32) -> BTreeSet<u64> {
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
        return BTreeSet::new();
    };
    let links = descriptors.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let inode =
        |link: PathBuf| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    links.filter_map(inode).collect()
}

fn children(pid: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let listed = listed.unwrap_or_default();
    listed.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The name that a socket has by now: it is bound under another one, and renamed once it is guarded.
fn final_name(bound: &str) -> String {
    let Some(rest) = bound.strip_suffix(".new") else { return bound.to_owned() };
    let stem = rest.rsplit_once('.').filter(|(_, pid)| pid.bytes().all(|b| b.is_ascii_digit()));
    format!("{}.sock", stem.map_or(rest, |(stem, _)| stem))
}

/// Listening unix sockets: their inodes and names; an abstract one begins with `@`.
fn listening_unix() -> BTreeMap<u64, String> {
    const LISTENS: &str = "00010000";
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let listens = words.get(3) == Some(&LISTENS);
        Some((words.get(6)?.parse().ok()?, final_name(words.get(7)?))).filter(|_| listens)
    };
    table.lines().filter_map(row).collect()
}

/// Listening TCP sockets: their inodes and ports.
fn listening_ports() -> BTreeMap<u64, String> {
    const LISTENS: &str = "0A";
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let tables = tables.map(Result::unwrap_or_default).concat();
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port = u16::from_str_radix(words.get(1)?.rsplit_once(':')?.1, 16).ok()?;
        let listens = words.get(3) == Some(&LISTENS);
        Some((words.get(9)?.parse().ok()?, format!(":{port}"))).filter(|_| listens)
    };
    tables.lines().filter_map(row).collect()
}

/// Returns true if a name is meant by a row: equal at the end, where `*` stands for anything.
fn is_meant(row: &str, name: &str) -> bool {
    match row.split_once('*') {
        None => name.ends_with(row),
        Some((before, after)) => {
            let directory = name.rsplit_once('/').map_or("", |(directory, _)| directory);
            name.ends_with(after) && directory.ends_with(before.trim_end_matches('/'))
        }
    }
}

#[test]
fn every_socket_on_which_a_process_listens_is_a_listener_of_the_table_and_guarded_as_that_says() {
    let listeners = Listeners::new("listeners");
    let port = |address: &str| format!(":{}", address.rsplit_once(':').unwrap().1);
    let named = [
        ("controller", listeners.cluster.controller.as_str(), "port"),
        ("controller", &listeners.http, "http"),
        ("p1", &listeners.pool, "port"),
        ("n1", &listeners.all, "nbd-listen"),
        ("n2", &listeners.shares, "share-listen"),
    ];
    eventually("all are open", || listeners.listeners().len().ge(&12).then_some(()));
    let user = rustix::process::geteuid().as_raw();
    let mut seen = BTreeSet::new();
    for (process, name) in listeners.listeners() {
        let known = named.iter().find(|(of, at, _)| *of == process && port(at) == name);
        let shown = known.map_or(name.as_str(), |(_, _, what)| what);
        let row = LISTENERS.iter().position(|(of, row, _)| *of == process && is_meant(row, shown));
        let row =
            row.unwrap_or_else(|| panic!("{process} listens on {name}: no row has this listener"));
        seen.insert(row);
        match LISTENERS[row].2 {
            Guard::Mode(mode) => {
                let meta = std::fs::metadata(&name).unwrap();
                assert_eq!(meta.permissions().mode() & 0o777, mode, "{process} {name}");
                assert_eq!(meta.uid(), user, "{process} {name}");
                for above in Path::new(&name).ancestors().skip(1).take(1) {
                    let meta = std::fs::metadata(above).unwrap();
                    assert_eq!(meta.permissions().mode() & 0o022, 0, "{}", above.display());
                }
            }
            Guard::SameUser => assert!(name.starts_with('@'), "{name}"),
            Guard::Tls | Guard::Open => assert!(name.starts_with(':'), "{name}"),
        }
    }
    for (row, listener) in LISTENERS.iter().enumerate() {
        let needs_devices = ["attach", "holder"].contains(&listener.0);
        assert!(seen.contains(&row) || needs_devices, "{listener:?} is not there: {seen:?}");
    }
}

#[test]
fn each_standing_gets_in_by_the_listeners_that_are_its_own_and_leaves_when_it_is_over() {
    let listeners = Listeners::new("standings");
    let (ops, leaves) =
        (listeners.join(Role::Admin, "ops", "ops"), listeners.join(Role::Admin, "b", "b"));
    let nothing = listeners.join(Role::Node, "n4", "n4");
    listeners.cluster.ok(&["admin", "remove", "b"]);
    let elsewhere = tempfile::tempdir().unwrap();
    let other = Authority::create(&elsewhere.path().join("ca"), Lifetimes::default()).unwrap();
    let other = other.issue_identity(&elsewhere.path().join("ops"), Role::Admin, "ops").unwrap();
    let who = |standing: &str| match standing {
        "nobody" => None,
        "another cluster's admin" => Some(other.clone()),
        "admin" => Some(ops.clone()),
        "admin, removed" => Some(leaves.clone()),
        "admin, by another key" => Some(listeners.forged(Role::Admin, "ops")),
        "node n1" => Some(listeners.member("n1")),
        "node n1, by another key" => Some(listeners.forged(Role::Node, "n1")),
        "node n2" => Some(listeners.member("n2")),
        "node n3" => Some(listeners.member("n3")),
        "node n3, by another key" => Some(listeners.forged(Role::Node, "n3")),
        "node n4, which has nothing" => Some(nothing.clone()),
        "pool" => Some(listeners.member("p1")),
        "controller" => Some(listeners.forged(Role::Controller, "controller")),
        other => panic!("{other}"),
    };
    let asked = |standing: &str| {
        let identity = who(standing);
        let identity = identity.as_ref();
        [
            ("the controller", listeners.controller(identity)),
            ("a pool", listeners.pool(identity)),
            ("n1's port for all", listeners.nbd(&listeners.all, identity, "n1", "own")),
            ("n2's port for sharers", listeners.nbd(&listeners.shares, identity, "n2", "shared")),
            (
                "the same, for another volume",
                listeners.nbd(&listeners.shares, identity, "n2", "private"),
            ),
        ]
    };
    // The targets have heard of those who joined, and of the one who left.
    eventually("n1 knows its admins", || (asked("admin")[2].1 == IN).then_some(()));
    eventually("n1 knows who left", || (asked("admin, removed")[2].1 != IN).then_some(()));
    for (standing, expected) in STANDINGS {
        for ((listener, said), expected) in asked(standing).into_iter().zip(expected) {
            let is_so = match *expected {
                IN => said == IN,
                NO_TLS => said != IN && !said.contains("may not"),
                text => said.contains(text),
            };
            assert!(is_so, "{standing}: {listener} says {said:?}, and {expected:?} was expected");
        }
    }
    connected_when_it_ends(&listeners, &ops);
}

/// Clients that are connected when their standing ends: removed, replaced, expired; and others, who stay.
fn connected_when_it_ends(listeners: &Listeners, ops: &Identity) {
    let (n1, n3) = (listeners.member("n1"), listeners.member("n3"));
    let mut own = listeners.open(&listeners.all, Some(&n1), "n1", "own").unwrap();
    let mut admin = listeners.open(&listeners.all, Some(ops), "n1", "own").unwrap();
    let mut sharer = listeners.open(&listeners.shares, Some(&n3), "n2", "shared").unwrap();
    let block = [7; 4096];
    for open in [&mut own, &mut admin] {
        assert_eq!(open.call(WRITE, FUA, 0, 4096, &block).unwrap(), Ok(()));
    }
    // A client that does not number its requests changes nothing that hosts share.
    assert_eq!(sharer.call(WRITE, FUA, 0, 4096, &block).unwrap(), Err(ESTALE));
    let ends = |what: &str, open: &mut Nbd| {
        let since = Instant::now();
        eventually(what, || open.read(0, 4096).is_err().then_some(()));
        println!("{what}: after {:?}", since.elapsed());
    };

    // The same key, with a certificate that runs out.
    let brief = PathBuf::from(listeners.cluster.path("brief"));
    std::fs::create_dir_all(&brief).unwrap();
    std::fs::copy(listeners.cluster.path("n1/key.pem"), brief.join("key.pem")).unwrap();
    let lifetimes = Lifetimes { holder: Duration::from_secs(6), ..Lifetimes::default() };
    let brief = listeners.authority(lifetimes).issue_identity(&brief, Role::Node, "n1").unwrap();
    let mut expires = listeners.open(&listeners.all, Some(&brief), "n1", "own").unwrap();
    assert_eq!(expires.read(0, 4096).unwrap(), block);
    ends("the certificate runs out", &mut expires);
    // Certificates count whole seconds.
    eventually("nor does it open again", || {
        listeners.open(&listeners.all, Some(&brief), "n1", "own").is_err().then_some(())
    });
    assert_eq!(own.read(0, 4096).unwrap(), block, "a certificate of the same key stays");

    listeners.cluster.ok(&["admin", "remove", "ops"]);
    ends("the admin is removed", &mut admin);
    assert!(listeners.nbd(&listeners.all, Some(ops), "n1", "own").contains(NO_MEMBER));
    assert_eq!(own.read(0, 4096).unwrap(), block, "others stay");

    // Another key under the name of a node that shares a volume.
    let next = listeners.join(Role::Node, "n3", "n3-next");
    ends("the node is replaced", &mut sharer);
    let mut sharer = eventually("its next key gets in", || {
        listeners.open(&listeners.shares, Some(&next), "n2", "shared").ok()
    });
    assert!(listeners.nbd(&listeners.shares, Some(&n3), "n2", "shared").contains(NOT_SHARED));
    assert_eq!(
        sharer.read(0, 4096).unwrap(),
        [0; 4096],
        "the former key ended the member's connection"
    );

    listeners.cluster.ok(&["volume", "detach", "shared", "--node", "n3"]);
    ends("the node has the volume no more", &mut sharer);
    listeners.cluster.ok(&["node", "remove", "n3", "--force"]);
    assert!(listeners.controller(Some(&next)).contains("removed"));
    assert!(listeners.nbd(&listeners.shares, Some(&next), "n2", "shared").contains(NOT_SHARED));
    assert_eq!(own.read(0, 4096).unwrap(), block);
}

#[test]
fn an_encrypted_volume_is_in_the_clear_for_no_node_that_has_not_shown_its_key() {
    let listeners = Listeners::new("listener-keys");
    let key = listeners.cluster.path("user-key");
    std::fs::write(&key, "correct horse battery staple").unwrap();
    let encrypted = ["--replicas", "1", "--encrypt", "--key-file", &key];
    listeners
        .cluster
        .ok(&[&["volume", "create", "enc", "--size", "8MiB"], &encrypted[..]].concat());
    let run = |node: &str| listeners.cluster.path(&format!("{node}-run"));
    let attach = |node: &str| {
        let words = ["volume", "attach", "enc", "--node", node, "--nbd", "--share", "multi-writer"];
        listeners.cluster.ok(&[&words[..], &["--run", &run(node), "--key-file", &key]].concat())
    };
    attach("n2");
    // As an orchestrator does, before anybody has a key there.
    let admin = PathBuf::from(listeners.cluster.path("run/admin.sock"));
    let published = listeners.runtime.block_on(async {
        let volume = VolumeRef { id: String::new(), name: "enc".into() };
        let asked = PublishVolumeRequest {
            volume: Some(volume),
            node: "n3".into(),
            sharing: "multi-writer".into(),
            ..Default::default()
        };
        ClusterClient::new(quoin_identity::unix_channel(&admin)).publish_volume(asked).await
    });
    let id = published.unwrap().into_inner().volume_id;
    let n3 = listeners.member("n3");
    eventually("n2 shares it with n3", || {
        // It is listed for those alone who have shown the key.
        let said = listeners.nbd(&listeners.shares, Some(&n3), "n2", "enc");
        assert!(said.contains("has not proven the key"), "{said}");
        let nodes = listeners.cluster.json(&["volume", "get", "enc"])["nodes"].clone();
        nodes.as_array().is_some_and(|nodes| nodes.len() == 2).then_some(())
    });
    let socket = Path::new(&run("n3")).join(format!("nbd/{id}.sock"));
    std::thread::sleep(Duration::from_secs(3));
    assert!(!socket.exists(), "n3's target leads to it and has no key");
    assert!(
        listeners.nbd(&listeners.shares, Some(&n3), "n2", "enc").contains("has not proven the key")
    );

    listeners.cluster.ok(&["volume", "detach", "enc", "--node", "n3"]);
    attach("n3");
    let open = |socket: &Path| {
        let options = ClientOptions::new(Address::Unix(socket.to_owned()));
        eventually("the volume is served", || Client::connect(options.clone()).ok())
    };
    let there = Path::new(&run("n2")).join(format!("nbd/{id}.sock"));
    let (first, second) = (open(&there), open(&socket));
    first.write(4096, vec![5; 4096].into(), true).unwrap();
    assert_eq!(second.read(4096, 4096).unwrap(), vec![5; 4096]);
    // The proof of n3's target opens nothing to others.
    assert!(
        listeners.nbd(&listeners.shares, Some(&n3), "n2", "enc").contains("has not proven the key")
    );
}
