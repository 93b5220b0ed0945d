//! Certificates of real processes: they renew themselves, survive a change of the authority that
//! signed them, and authorise peers on data connections.

use crate::common;
use crate::support;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use common::{Cluster, Place, eventually, free_port, nbd};
use quoin_identity::{Authority, Expected, Identity, Lifetimes, Role, valid_until};
use quoin_nbd::client::{Address, Client, ClientOptions};
use rustls::client::ResolvesClientCert;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, SignatureScheme};
use support::load::Load;

const DATA: &[u8] = b"quoin-data/1+encrypt";
const STARTTLS: u32 = 5;

fn client(cluster: &Cluster) -> Client {
    let address = cluster.ok(&["volume", "attach", "db", "--nbd", "--node", "n1"]);
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    eventually("the volume is served", || {
        Client::connect(ClientOptions::new(Address::Unix(socket.clone().into()))).ok()
    })
}

fn assert_progress(cluster: &Cluster, load: &Load) {
    load.assert_progress_or(100, || cluster.show_logs());
}

fn all_in_sync(cluster: &Cluster) {
    cluster.wait_for_volume("db", "whole", |volume| {
        let replicas = volume["replicas"].as_array().unwrap();
        volume["changing"] == "" && replicas.iter().all(|r| r["phase"] == "InSync")
    });
}

fn address_of(cluster: &Cluster, pool: &str) -> String {
    let pools = cluster.json(&["pool", "list"]);
    let pool = pools.as_array().unwrap().iter().find(|p| p["name"] == pool).unwrap();
    pool["address"].as_str().unwrap().to_owned()
}

/// Performs a handshake as the node of the cluster, up to the server's certificates.
fn handshake(
    mut stream: TcpStream,
    config: &ClientConfig,
    protocol: &[u8],
) -> std::io::Result<ClientConnection> {
    let mut config = config.clone();
    if !protocol.is_empty() {
        config.alpn_protocols = vec![protocol.to_vec()];
    }
    let name = ServerName::try_from("quoin").unwrap();
    let mut tls = ClientConnection::new(Arc::new(config), name).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    while tls.is_handshaking() {
        tls.complete_io(&mut stream)?;
    }
    Ok(tls)
}

/// Returns the expiry of the certificate that a member shows to new connections.
fn shown(stream: TcpStream, config: &ClientConfig, protocol: &[u8]) -> SystemTime {
    let tls = handshake(stream, config, protocol).unwrap();
    valid_until(&tls.peer_certificates().unwrap()[0]).unwrap()
}

/// Returns every member's present certificate, by its name.
fn all_shown(cluster: &Cluster, nbd_address: &str) -> Vec<(&'static str, SystemTime)> {
    let node = Identity::load(Path::new(&cluster.path("node"))).unwrap();
    let expecting =
        |role, name: &str| node.client_config(Expected::Named(role, name.into())).unwrap();
    let mut all = Vec::new();
    for pool in ["p1", "p2", "p3"] {
        let stream = TcpStream::connect(address_of(cluster, pool)).unwrap();
        all.push((pool, shown(stream, &expecting(Role::Pool, pool), DATA)));
    }
    let stream = TcpStream::connect(&cluster.controller).unwrap();
    all.push(("controller", shown(stream, &expecting(Role::Controller, "controller"), b"h2")));
    let mut stream = nbd::hello(nbd_address).unwrap();
    assert_eq!(nbd::ask(&mut stream, STARTTLS, &[]).unwrap().0, 1);
    all.push(("target", shown(stream, &expecting(Role::Node, "n1"), b"")));
    // A CSI node serves no port on the network; its directory has its certificate.
    let csi = Identity::load(Path::new(&cluster.path("csi-node"))).unwrap();
    all.push(("csi-node", csi.validity().1));
    all
}

/// Pools, targets, CSI nodes and the controller renew their certificates
/// themselves before they run out, while IO flows, and new connections are made with new ones.
#[test]
fn every_member_renews_its_certificate_and_io_continues_beyond_two_lifetimes() {
    const LIFE_S: u64 = 24;
    let life = Duration::from_secs(LIFE_S);
    let flag = ["--certificate-lifetime-s", &LIFE_S.to_string()];
    let here = Place::here();
    let flags = [&flag[..], &["--default-spread", "pool"]].concat();
    let mut cluster = Cluster::made_with("renew", &here, &flag, &flags);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&here, pool, &["--network-only"]);
    }
    let nbd_address = format!("127.0.0.1:{}", free_port());
    cluster.node(&here, "n1", &["--nbd-listen", &nbd_address], &[]);
    // Target and CSI process of one node share a certificate; this one has no process that renews
    // it.
    let token = cluster.token("node");
    let (state, endpoint) = (cluster.path("csi-node"), cluster.path("csi-node.sock"));
    let endpoint = format!("unix://{endpoint}");
    let arguments = ["node", "run", "--name", "n2", "--mode", "controller", "--join", &token]
        .into_iter()
        .chain(["--state", &state, "--csi-endpoint", &endpoint, "--run", &state])
        .chain(["--controller", &cluster.controller])
        .map(String::from)
        .collect();
    cluster.run(&here, "csi-node", arguments);
    cluster.wait_for_pools(3);
    let online = |cluster: &Cluster, kind: &str| {
        let members = cluster.json(&[kind, "list"]);
        members.as_array().unwrap().iter().filter(|member| member["state"] == "Online").count()
    };
    // A process of CSI in controller mode is no node.
    cluster.eventually("the node is online", || (online(&cluster, "node") == 1).then_some(()));
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(client(&cluster), 5);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);

    let first = all_shown(&cluster, &nbd_address);
    // Every certificate renewed from now on is of a new authority, and the former one's time is
    // short.
    cluster.ok(&["cluster", "rotate-authority"]);
    let began = Instant::now();
    while began.elapsed() < life * 2 + Duration::from_secs(2) {
        assert_progress(&cluster, &load);
        for (who, until) in all_shown(&cluster, &nbd_address) {
            assert!(until > SystemTime::now(), "the certificate of {who} has run out");
        }
        assert_eq!((online(&cluster, "pool"), online(&cluster, "node")), (3, 1));
        std::thread::sleep(Duration::from_secs(1));
    }
    for ((who, before), (_, now)) in first.iter().zip(all_shown(&cluster, &nbd_address)) {
        assert!(now > *before + life, "{who} renewed too late or never");
    }

    assert!(cluster.ok(&["events"]).contains("AuthorityRetired"));
    // Earlier connections may last; new ones are made with new certificates.
    for name in ["p1", "target"] {
        let at = cluster.processes.iter().position(|process| process.name == name).unwrap();
        drop(cluster.processes.remove(at));
        let arguments = restarted(&cluster, name, &nbd_address);
        cluster.run(&here, name, arguments);
        assert_progress(&cluster, &load);
        all_in_sync(&cluster);
    }
    load.verify();
}

/// A cluster that was off for longer than its certificates' lifetime comes back with new tokens,
/// and until then each member names the one that it needs.
#[test]
fn a_member_with_an_expired_certificate_reports_it_and_joins_again() {
    const LIFE_S: &str = "10";
    let (here, flag) = (Place::here(), ["--certificate-lifetime-s", LIFE_S]);
    let mut cluster = Cluster::made_with("slept", &here, &flag, &flag);
    cluster.pool(&here, "p1", &["--network-only"]);
    cluster.node(&here, "n1", &[], &[]);
    cluster.wait_for_pools(1);
    let (ops, token) = (cluster.path("ops"), cluster.token("admin"));
    let controller = cluster.controller.clone();
    let admin = ["cluster", "join", "--controller", &controller, "--to", &ops];
    cluster.ok(&[&admin[..], &["--name", "ops", "--join", &token]].concat());
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "1"]);
    let before = client(&cluster);
    let written = bytes::Bytes::from(support::block(3, 1));
    before.write(3 * 4096, written.clone(), true).unwrap();
    before.stop();
    for name in ["target", "node", "p1"] {
        let at = cluster.processes.iter().position(|process| process.name == name).unwrap();
        cluster.processes.remove(at).stop();
    }
    let ran_out = |directory: &str| {
        Identity::load(Path::new(&cluster.path(directory))).unwrap().has_run_out()
    };
    for directory in ["p1", "node", "ops"] {
        eventually("its certificate runs out", || ran_out(directory).then_some(()));
    }
    // The controller counts whole seconds: in the last one it still renews.
    std::thread::sleep(Duration::from_secs(2));

    cluster.run(&here, "p1", restarted(&cluster, "p1", ""));
    cluster.eventually("it says what it needs", || {
        cluster.log("p1").contains("quoin token create --role pool --name p1").then_some(())
    });
    let at = cluster.processes.iter().position(|process| process.name == "p1").unwrap();
    cluster.processes.remove(at).stop();
    let printed = cluster.quoin(&[&admin[..], &["--name", "ops"]].concat());
    let printed = String::from_utf8_lossy(&printed.stderr).into_owned();
    assert!(printed.contains("quoin token create --role admin"), "{printed}");

    // Its name is unchanged.
    for (name, role) in [("p1", "pool"), ("target", "node")] {
        let token = cluster.token(role);
        let mut arguments = restarted(&cluster, name, "");
        arguments.extend(["--join".into(), token]);
        cluster.run(&here, name, arguments);
    }
    let token = cluster.token("admin");
    cluster.ok(&[&admin[..], &["--join", &token]].concat());
    all_in_sync(&cluster);
    let after = client(&cluster);
    assert_eq!(after.read(3 * 4096, 4096).unwrap(), written);
    after.stop();
}

/// Returns the number of certificates in a file of an identity.
fn count(cluster: &Cluster, file: &str) -> usize {
    let text = std::fs::read_to_string(cluster.path(file)).unwrap();
    text.matches("BEGIN CERTIFICATE").count()
}

#[test]
fn replicas_move_under_load_from_pools_of_a_former_authority() {
    let here = Place::here();
    let mut cluster = Cluster::start("rotate", &here, &["--replace-after", "off"]);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&here, pool, &["--network-only"]);
    }
    cluster.node(&here, "n1", &[], &[]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(client(&cluster), 7);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);

    // The former authority's fingerprint is in this token.
    let earlier = cluster.token("pool");
    cluster.ok(&["cluster", "rotate-authority"]);
    assert_progress(&cluster, &load);
    cluster.pool_by(&here, "p4", &earlier, &["--network-only"]);
    cluster.pool(&here, "p5", &["--network-only"]);
    cluster.wait_for_pools(5);
    for (from, to) in [("p1", "p4"), ("p2", "p5")] {
        cluster.ok(&["replica", "move", "db", from, "--to", to, "--wait", "--timeout", "170"]);
        assert_progress(&cluster, &load);
        all_in_sync(&cluster);
    }
    // No member renewed meanwhile: certificates of two authorities did meet.
    for member in ["p1", "p3", "node"] {
        assert_eq!(count(&cluster, &format!("{member}/ca.pem")), 1, "{member}");
        assert_eq!(count(&cluster, &format!("{member}/cert.pem")), 1, "{member}");
    }
    for newcomer in ["p4", "p5"] {
        assert_eq!(count(&cluster, &format!("{newcomer}/ca.pem")), 2, "{newcomer}");
        assert_eq!(count(&cluster, &format!("{newcomer}/cert.pem")), 2, "with a cross certificate");
    }

    // A target of the former authority starts anew among them, and the new ones have the whole
    // volume.
    let at = cluster.processes.iter().position(|process| process.name == "target").unwrap();
    drop(cluster.processes.remove(at));
    let arguments = restarted(&cluster, "target", "");
    cluster.run(&here, "target", arguments);
    assert_progress(&cluster, &load);
    all_in_sync(&cluster);
    assert_eq!(count(&cluster, "node/ca.pem"), 1);
    let at = cluster.processes.iter().position(|process| process.name == "p3").unwrap();
    drop(cluster.processes.remove(at));
    assert_progress(&cluster, &load);
    load.verify();
}

/// All bytes between a pool and its peers, as the network sees them.
struct RecordingRelay {
    address: String,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl RecordingRelay {
    fn to(pool: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let all = seen.clone();
        std::thread::spawn(move || {
            for caller in listener.incoming().map_while(Result::ok) {
                let Ok(pool) = TcpStream::connect(&pool) else { continue };
                let back = (pool.try_clone().unwrap(), caller.try_clone().unwrap());
                for (from, to) in [(caller, pool), back] {
                    let seen = all.clone();
                    std::thread::spawn(move || pass(from, to, &seen));
                }
            }
        });
        Self { address, seen }
    }

    fn shows(&self, bytes: &[u8]) -> bool {
        self.seen.lock().unwrap().windows(bytes.len()).any(|window| window == bytes)
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        seen.lock().unwrap().extend(&buffer[..length]);
        if to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Shows no certificate.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// Returns why a pool refuses such a connection; `None`: it does not.
fn turned_away(address: &str, config: &ClientConfig, protocol: &[u8]) -> Option<String> {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut tls = match handshake(stream.try_clone().unwrap(), config, protocol) {
        Ok(tls) => tls,
        Err(error) => return Some(error.to_string()),
    };
    // A client of TLS 1.3 learns only after its handshake whether its certificate was accepted.
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    match tls.complete_io(&mut stream) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => Some(error.to_string()),
        Ok(_) => None,
    }
}

/// Writes and reads a volume on one pool, in a cluster with this protection of data connections;
/// returns whether the network saw the data.
fn is_seen_on_the_network(security: &str) -> bool {
    let here = Place::here();
    let mut cluster = Cluster::start(security, &here, &["--data-security", security]);
    let listen = format!("127.0.0.1:{}", free_port());
    let relay = RecordingRelay::to(listen.clone());
    cluster.pool(
        &here,
        "p1",
        &["--network-only", "--listen", &listen, "--advertise", &relay.address],
    );
    cluster.node(&here, "n1", &[], &[]);
    cluster.wait_for_pools(1);
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "1"]);
    let client = client(&cluster);
    let secret: Vec<u8> =
        (0u32..1024).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_be_bytes()).collect();
    client.write(0, secret.clone().into(), true).unwrap();
    assert_eq!(client.read(0, 4096).unwrap(), secret);
    assert!(relay.seen.lock().unwrap().len() > 2 * secret.len(), "another way was taken");

    let node = Identity::load(Path::new(&cluster.path("node"))).unwrap();
    let known = node.client_config(Expected::Named(Role::Pool, "p1".into())).unwrap();
    assert_eq!(turned_away(&listen, &known, DATA), None);
    let reading = turned_away(&listen, &known, b"quoin-data/1+authenticate");
    assert_eq!(reading.is_some(), security == "encrypt", "{reading:?}");
    let mut unknown = ClientConfig::clone(&known);
    unknown.client_auth_cert_resolver = Arc::new(NoCertificate);
    let printed = turned_away(&listen, &unknown, DATA).expect("it came in without a certificate");
    assert!(printed.contains("CertificateRequired"), "{printed}");
    let stranger = tempfile::tempdir().unwrap();
    let authority = Authority::create(&stranger.path().join("ca"), Lifetimes::default()).unwrap();
    let other = authority.issue_identity(&stranger.path().join("n1"), Role::Node, "n1").unwrap();
    let other = other.client_config(Expected::Role(Role::Pool)).unwrap();
    unknown.client_auth_cert_resolver = other.client_auth_cert_resolver.clone();
    let printed = turned_away(&listen, &unknown, DATA).expect("another cluster's node came in");
    assert!(printed.contains("UnknownCA") || printed.contains("DecryptError"), "{printed}");
    assert_eq!(client.read(0, 4096).unwrap(), secret);
    client.stop();
    relay.shows(&secret[..64])
}

#[test]
fn data_connections_are_authenticated_and_readable_only_where_configured() {
    assert!(is_seen_on_the_network("authenticate"));
    assert!(!is_seen_on_the_network("encrypt"));
}

/// Returns the command line of a member that has joined.
fn restarted(cluster: &Cluster, name: &str, nbd_address: &str) -> Vec<String> {
    let path = |name: &str| cluster.path(name);
    let mut arguments: Vec<String> = match name {
        "target" => {
            vec!["target".into(), "--state".into(), path("node"), "--run".into(), path("run")]
        }
        pool => ["pool", "run", "--network-only", "--node", pool, "--listen", "127.0.0.1:0"]
            .into_iter()
            .map(String::from)
            .chain(["--state".into(), path(pool), "--data".into(), path(&format!("{pool}-data"))])
            .collect(),
    };
    if name == "target" && !nbd_address.is_empty() {
        arguments.extend(["--nbd-listen".into(), nbd_address.into()]);
    }
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    arguments
}

#[test]
fn an_authority_is_replaced_at_once_only_when_told_and_an_admin_joins_again_by_the_same_command() {
    let cluster = Cluster::start("at-once", &Place::here(), &[]);
    let directory = cluster.path("admin");
    let join = |token: &str| {
        let member = ["--controller", &cluster.controller, "--name", "ops", "--token", token];
        let whole = [&["cluster", "join", "--role", "admin", "--to", &directory][..], &member];
        cluster.ok(&whole.concat())
    };
    let first = cluster.token("admin");
    join(&first);
    let certificate = || std::fs::read(Path::new(&directory).join("cert.pem")).unwrap();
    let before = certificate();
    let authority = || cluster.json(&["cluster", "info"])["authority"].as_str().unwrap().to_owned();
    let former = authority();
    let refused = cluster.quoin(&["cluster", "rotate-authority", "--at-once", &former]);
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && printed.contains("--yes"), "{printed}");
    assert_eq!(authority(), former, "nothing was changed");
    cluster.ok(&["cluster", "rotate-authority", "--at-once", &former, "--yes"]);
    assert_ne!(authority(), former);
    join(&cluster.token("admin"));
    assert_ne!(certificate(), before);
    // The certificate is good from now on: it is renewed without a token.
    let renewed = [
        &["cluster", "join", "--role", "admin", "--to", &directory][..],
        &["--controller", &cluster.controller, "--name", "ops"],
    ];
    cluster.ok(&renewed.concat());
}
