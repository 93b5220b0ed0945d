//! Certificates of real processes: they renew themselves, outlive the authority that signed them,
//! and decide who may speak on data connections.

#![allow(clippy::duplicate_mod)] // Both helpers stand on the same base.

mod common;
mod support;

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use common::{Cluster, Place, eventually, free_port, nbd};
use quoin_frontend::nbd::client::{Address, Client, ClientOptions};
use quoin_identity::{Expected, Identity, Role, valid_until};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
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

fn goes_on(cluster: &Cluster, load: &Load) {
    load.goes_on_or(100, || cluster.show_logs());
}

fn whole(cluster: &Cluster) {
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

/// Shakes hands as the node of the cluster, as far as the server's certificates.
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

/// When the certificate runs out that a member shows to those who connect now.
fn shown(stream: TcpStream, config: &ClientConfig, protocol: &[u8]) -> SystemTime {
    let tls = handshake(stream, config, protocol).unwrap();
    valid_until(&tls.peer_certificates().unwrap()[0]).unwrap()
}

/// What every member shows at this moment, by its name.
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
    // A CSI node serves nobody on the network; the controller asks for what it has here.
    let csi = Identity::load(Path::new(&cluster.path("csi-node"))).unwrap();
    all.push(("csi-node", csi.validity().1));
    all
}

/// Pools, targets, CSI nodes and the controller renew their certificates
/// themselves before they run out, while IO flows, and new connections are made with new ones.
#[test]
fn every_member_renews_its_certificate_itself_and_io_goes_on_past_two_lives_of_it() {
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
    // Target and CSI process of one node share a certificate; this one has nobody to renew it.
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
    cluster.eventually("the nodes are online", || (online(&cluster, "node") == 2).then_some(()));
    cluster.ok(&["volume", "create", "db", "--size", "8MiB", "--replicas", "3"]);
    let load = Load::start(client(&cluster), 5);
    goes_on(&cluster, &load);
    whole(&cluster);

    let first = all_shown(&cluster, &nbd_address);
    let began = Instant::now();
    while began.elapsed() < life * 2 + Duration::from_secs(2) {
        goes_on(&cluster, &load);
        for (who, until) in all_shown(&cluster, &nbd_address) {
            assert!(until > SystemTime::now(), "the certificate of {who} has run out");
        }
        assert_eq!((online(&cluster, "pool"), online(&cluster, "node")), (3, 2));
        std::thread::sleep(Duration::from_secs(1));
    }
    for ((who, before), (_, now)) in first.iter().zip(all_shown(&cluster, &nbd_address)) {
        assert!(now > *before + life, "{who} renewed too late or never");
    }

    // The connections of before may last; new ones are made with what is new.
    for name in ["p1", "target"] {
        let at = cluster.processes.iter().position(|process| process.name == name).unwrap();
        drop(cluster.processes.remove(at));
        let arguments = restarted(&cluster, name, &nbd_address);
        cluster.run(&here, name, arguments);
        goes_on(&cluster, &load);
        whole(&cluster);
    }
    load.verify();
}

/// The command line of a member that has joined.
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
    if name == "target" {
        arguments.extend(["--nbd-listen".into(), nbd_address.into()]);
    }
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    arguments
}
