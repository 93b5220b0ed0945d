//! Records of a cluster in one store and in another: moved, restored from backups, and brought back as old copies.

use crate::common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Cluster, Place, Scratch};
use quoin_testkit::kubernetes_api::KubernetesApi;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::support::etcd::Etcd;
use crate::terms::{Writer, verify};

/// Of controllers, which outlives pauses of a busy host; and of what is killed, which is waited for.
const LEASE: [&str; 2] = ["--lease", "15s/12s/1s"];
const SHORT_LEASE: [&str; 2] = ["--lease", "6s/3s/500ms"];
/// The exit status of a controller whose records are not the cluster's any more.
const SUPERSEDED: i32 = 4;

/// A cluster whose volume is written all the while, and the three stores for its records.
struct Stores {
    etcd: Etcd,
    api: KubernetesApi,
    /// Options that lead to all stores.
    places: Vec<String>,
    socket: String,
    writer: Writer,
    cluster: Cluster,
    /// Files of the engines.
    _scratch: Scratch,
}

impl Stores {
    /// With its records in `store`.
    fn start(name: &str, store: &str) -> Self {
        let scratch = Scratch::new(&format!("engines-{name}"));
        let (etcd, api) = (Etcd::start(&scratch.0.join("etcd")), KubernetesApi::start());
        let token = scratch.0.join("token");
        std::fs::write(&token, "of.the.pod").unwrap();
        let token = token.to_str().unwrap();
        let address = api.address();
        let kubernetes = ["--kubernetes-api", &address, "--kubernetes-namespace", "quoin"];
        let etcd_flags = ["--etcd-endpoints", &etcd.endpoints];
        let places = [&etcd_flags[..], &kubernetes, &["--kubernetes-token", token]].concat();
        let init_flags = [&["--store", store], &places[..]].concat();
        let flags = [&init_flags[..], &LEASE].concat();
        let here = Place::here();
        let mut cluster = Cluster::made_with(name, &here, &init_flags, &flags);
        for pool in ["pool-a", "pool-b", "pool-c"] {
            cluster.pool(&here, pool, &[]);
        }
        cluster.wait_for_pools(3);
        cluster.node(&here, "h1", &[], &[]);
        let (socket, writer) = written(&cluster, "db");
        let places = places.iter().map(ToString::to_string).collect();
        Self { etcd, api, places, socket, writer, cluster, _scratch: scratch }
    }

    fn options<'a>(&'a self, store: &'a str) -> Vec<&'a str> {
        ["--store", store].into_iter().chain(self.places.iter().map(String::as_str)).collect()
    }

    fn run(&mut self, directory: &str, store: &str) {
        let mut arguments: Vec<String> =
            ["controller", "run", "--state"].map(String::from).to_vec();
        arguments.push(self.cluster.path(directory));
        arguments.extend(["--admin-socket".into(), self.cluster.path("run/admin.sock")]);
        arguments.extend(["--listen".into(), self.cluster.controller.clone()]);
        arguments.extend(self.options(store).into_iter().chain(LEASE).map(String::from));
        self.cluster.run(&Place::here(), "controller", arguments);
    }

    fn run_until_it_rules(&mut self, directory: &str, store: &str) {
        self.run(directory, store);
        self.cluster.eventually("the controller rules", || {
            self.cluster.quoin(&["cluster", "info"]).status.success().then_some(())
        });
    }

    fn stop_controller(&mut self) {
        let at = self.cluster.processes.iter().position(|p| p.name == "controller").unwrap();
        self.cluster.processes.remove(at).stop();
    }

    /// A controller of this directory that does not start, and what it says.
    fn refused(&self, directory: &str, store: &str) -> String {
        let state = self.cluster.path(directory);
        let socket = self.cluster.path("run/refused.sock");
        let run = ["controller", "run", "--state", &state, "--admin-socket", &socket];
        let arguments = [&run[..], &["--listen", "none"], &self.options(store)].concat();
        let output = self.cluster.quoin(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(SUPERSEDED), "{said}");
        said
    }

    /// All volumes are there, and a volume is made.
    fn is_whole(&self, volumes: &[&str]) {
        self.cluster.eventually("a volume is made", || {
            let name = volumes.last().unwrap();
            let create = ["volume", "create", name, "--size", "16MiB", "--spread", "pool"];
            self.cluster.quoin(&create).status.success().then_some(())
        });
        assert_eq!(names(&self.cluster), volumes);
        self.cluster.eventually("the node is ordered, and all is well", || {
            let status = self.cluster.quoin(&["status"]);
            status.status.success().then_some(())
        });
        self.writer.assert_progress("the volume is written all the while");
    }
}

fn names(cluster: &Cluster) -> Vec<String> {
    let listed = cluster.json(&["volume", "list"]);
    let listed = listed.as_array().unwrap().iter();
    listed.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
}

/// A new volume, and a client that writes it from now on.
fn written(cluster: &Cluster, name: &str) -> (String, Writer) {
    cluster.eventually("the pools have reported", || {
        let create = ["volume", "create", name, "--size", "16MiB", "--spread", "pool"];
        cluster.quoin(&create).status.success().then_some(())
    });
    let run = cluster.path("run");
    let attach = ["volume", "attach", name, "--nbd", "--node", "h1", "--run", &run];
    let uri = cluster.ok(&attach);
    let socket = uri.split("socket=").nth(1).unwrap().to_owned();
    let writer = Writer::start(&socket, 1, Arc::new(Mutex::new(BTreeMap::new())));
    writer.assert_progress("the volume is written");
    (socket, writer)
}

/// Proves that records move through all stores while a client writes, also where the move is killed on its way, and
/// that the former store never rules again.
#[test]
fn records_move_through_all_stores_under_writes_and_a_killed_move_is_completed() {
    let mut stores = Stores::start("moves", "embedded");
    let mut at = "embedded";
    let mut volumes = vec!["db"];
    let state = stores.cluster.path("controller");
    for (to, killed_after, made) in
        [("etcd", 90, "in-etcd"), ("kubernetes", 150, "in-k8s"), ("embedded", 250, "returned")]
    {
        let term = stores.cluster.json(&["cluster", "info"])["term"].as_u64().unwrap();
        stores.stop_controller();
        let command = ["controller", "move-store", "--state", &state, "--to", to];
        let arguments = [&command[..], &stores.options(at), &SHORT_LEASE].concat();
        let mut killed = Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(&arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(killed_after));
        let _ = killed.kill();
        killed.wait().unwrap();
        let moved = stores.cluster.json(&arguments);
        assert!(moved["volumes"].as_u64() == Some(volumes.len() as u64), "{moved}");
        assert!(moved["term"].as_u64().unwrap() > term, "{moved}");
        // Once more: there is nothing to do.
        stores.cluster.ok(&arguments);
        let said = stores.refused("controller", at);
        assert!(said.contains("have moved to") && said.contains(to), "{said}");
        stores.run_until_it_rules("controller", to);
        volumes.push(made);
        stores.is_whole(&volumes);
        let status = stores.cluster.json(&["status"]);
        assert_eq!(status["records"]["store"], to, "{status}");
        assert_eq!(status["records"]["leader"] != "", to != "embedded", "{status}");
        assert!(status["records"]["latencyUs"].as_u64().unwrap() > 0, "{status}");
        at = to;
    }
    let written = stores.writer.end();
    verify(&stores.socket, &written);
}

/// Proves that a backup is restored into each store that controllers share, whatever store it is of, and that its
/// records do not rule before a recovery; and that a controller that was superseded there may start again.
#[test]
fn backups_are_restored_into_each_store_and_do_not_rule_before_a_recovery() {
    let mut stores = Stores::start("restores", "embedded");
    let mut volumes = vec!["db"];
    for (to, made) in [("etcd", "in-etcd"), ("kubernetes", "in-k8s")] {
        let file = stores.cluster.path(&format!("backup-for-{to}"));
        stores.cluster.ok(&["controller", "backup", &file]);
        // The drop kills it.
        stores.cluster.processes.retain(|process| process.name != "controller");
        let name = format!("restored-{to}");
        let state = stores.cluster.path(&name);
        let restore = ["controller", "restore", &file, "--state", &state];
        let restore = [&restore[..], &stores.options(to)].concat();
        let said = stores.cluster.ok(&restore);
        assert!(said.contains(&format!("{} volumes", volumes.len())), "{said}");
        let again = stores.cluster.quoin(&restore);
        let said = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(!again.status.success() && said.contains("--replace"), "{said}");
        stores.cluster.ok(&[&restore[..], &["--replace"]].concat());
        stores.run_until_it_rules(&name, to);
        let info = stores.cluster.json(&["cluster", "info"]);
        assert!(info["recovery"].as_str().unwrap().contains("from a backup"), "{info}");
        stores.writer.assert_progress("the volume is written beside records that do not rule");
        let said = stores.cluster.ok(&["controller", "recover"]);
        assert!(said.contains("the records rule"), "{said}");
        volumes.push(made);
        stores.is_whole(&volumes);
    }
    stores.stop_controller();
    stores.run("restored-etcd", "etcd");
    let ended = stores.cluster.process("controller");
    let ended = common::eventually("the former controller ends", || ended.ended());
    assert_eq!(ended.code(), Some(SUPERSEDED), "{}", stores.cluster.log("controller"));
    let state = stores.cluster.path("restored-etcd");
    let recover = ["controller", "recover", "--state", &state];
    let said = stores.cluster.ok(&[&recover[..], &stores.options("etcd")].concat());
    assert!(said.contains("may start again"), "{said}");
    let written = stores.writer.end();
    verify(&stores.socket, &written);
}

/// An engine goes back to a copy of before a volume was made, and before a restart of the controller.
fn an_old_copy_does_not_rule(
    name: &str,
    store: &str,
    copy: impl FnOnce(&mut Stores),
    put_back: impl FnOnce(&mut Stores),
) {
    let mut stores = Stores::start(name, store);
    stores.stop_controller();
    copy(&mut stores);
    stores.run_until_it_rules("controller", store);
    let (socket, since) = written(&stores.cluster, "since");
    stores.stop_controller();
    put_back(&mut stores);
    stores.run_until_it_rules("controller", store);
    stores.cluster.eventually("the records are recovered", || {
        let listed = stores.cluster.quoin(&["volume", "list", "-o", "json"]);
        let listed = serde_json::from_slice::<serde_json::Value>(&listed.stdout).ok()?;
        (listed.as_array()?.len() == 2).then_some(())
    });
    since.assert_progress("what the old records do not know is written on");
    stores.is_whole(&["db", "since", "then"]);
    verify(&socket, &since.end());
    let written = stores.writer.end();
    verify(&stores.socket, &written);
}

/// Proves that records of an etcd that went back to an older state are recovered by themselves, and no write waits
/// for that.
#[test]
fn old_records_of_a_restored_etcd_are_recovered_by_themselves() {
    let put_back = |stores: &mut Stores| stores.etcd.put_back();
    an_old_copy_does_not_rule("old-etcd", "etcd", |stores| stores.etcd.copy(), put_back);
}

/// Proves the same of records in Kubernetes.
#[test]
fn old_records_of_a_restored_kubernetes_are_recovered_by_themselves() {
    let kept = std::cell::RefCell::new(None);
    let copy = |stores: &mut Stores| drop(kept.replace(Some(stores.api.snapshot())));
    let put_back = |stores: &mut Stores| stores.api.restore(kept.take().unwrap());
    an_old_copy_does_not_rule("old-kubernetes", "kubernetes", copy, put_back);
}

/// Proves that old records of a term that is over end their controller, which says the way out, and that this way
/// leads to the records of now.
#[test]
fn old_records_of_a_former_term_end_their_controller_and_the_way_out_that_is_told_recovers_them() {
    let mut stores = Stores::start("former", "kubernetes");
    stores.stop_controller();
    let copy = stores.api.snapshot();
    // Two rules begin since then.
    for _ in 0..2 {
        stores.run_until_it_rules("controller", "kubernetes");
        stores.cluster.wait_for_pools(3);
        stores.stop_controller();
    }
    stores.run_until_it_rules("controller", "kubernetes");
    let (socket, since) = written(&stores.cluster, "since");
    stores.stop_controller();
    stores.api.restore(copy);
    stores.run("controller", "kubernetes");
    let ended = stores.cluster.process("controller");
    let ended = common::eventually("the controller of old records ends", || ended.ended());
    let log = stores.cluster.log("controller");
    assert_eq!(ended.code(), Some(SUPERSEDED), "{log}");
    assert!(log.contains("quoin controller recover --state"), "{log}");
    let state = stores.cluster.path("controller");
    let recover = ["controller", "recover", "--state", &state];
    stores.cluster.ok(&[&recover[..], &stores.options("kubernetes")].concat());
    stores.cluster.processes.retain(|process| process.name != "controller");
    stores.run_until_it_rules("controller", "kubernetes");
    stores.cluster.eventually("the records are recovered", || {
        stores.cluster.quoin(&["controller", "recover"]).status.success().then_some(())
    });
    since.assert_progress("what the old records do not know is written on");
    stores.is_whole(&["db", "since", "then"]);
    verify(&socket, &since.end());
    let written = stores.writer.end();
    verify(&stores.socket, &written);
}

/// An authority of certificates, with all files in one directory.
struct CertificateAuthority<'a> {
    name: &'a str,
    directory: &'a Path,
    issuer: Issuer<'static, KeyPair>,
}

impl<'a> CertificateAuthority<'a> {
    fn new(name: &'a str, directory: &'a Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let made = Self { name, directory, issuer: Issuer::new(params, key) };
        std::fs::write(made.file("ca"), certificate.pem()).unwrap();
        made
    }

    fn file(&self, what: &str) -> String {
        self.directory.join(format!("{}-{what}.pem", self.name)).to_str().unwrap().to_owned()
    }

    /// Files of a certificate of this host, and its key.
    fn issue(&self, holder: &str) -> [String; 2] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = [self.file(holder), self.file(&format!("{holder}-key"))];
        std::fs::write(&files[0], certificate.pem()).unwrap();
        std::fs::write(&files[1], key.serialize_pem()).unwrap();
        files
    }
}

/// Proves that all members of etcd are reached by TLS with a client certificate, and that a certificate of another
/// authority is refused on either side, with the way out.
#[test]
fn etcd_is_reached_by_tls_and_certificates_of_others_are_refused_with_the_way_out() {
    let scratch = Scratch::new("etcd-tls");
    let own = CertificateAuthority::new("own", &scratch.0);
    let other = CertificateAuthority::new("other", &scratch.0);
    let (server, client, stranger) =
        (own.issue("server"), own.issue("client"), other.issue("stranger"));
    let ca = own.file("ca");
    let options = ["--cert-file", &server[0], "--key-file", &server[1], "--client-cert-auth"];
    let options = [&options[..], &["--trusted-ca-file", &ca]].concat();
    let options: Vec<String> = options.iter().map(ToString::to_string).collect();
    let mut etcd = Etcd::start_with(&scratch.0.join("etcd"), "https", &options);
    let endpoints = etcd.endpoints.clone();
    let flags = |ca: &str, holder: &[String; 2]| -> Vec<String> {
        let place = ["--store", "etcd", "--etcd-endpoints", &endpoints, "--etcd-ca", ca];
        let certificate = ["--etcd-certificate", &holder[0], "--etcd-key", &holder[1]];
        [&place[..], &certificate, &LEASE].concat().iter().map(ToString::to_string).collect()
    };
    let right = flags(&ca, &client);
    let right: Vec<&str> = right.iter().map(String::as_str).collect();
    let cluster = Cluster::made_with("tls", &Place::here(), &right, &right);
    let refused = |ca: &str, holder: &[String; 2]| {
        let state = cluster.path("refused");
        let flags = flags(ca, holder);
        let flags = flags.iter().map(String::as_str);
        let init = ["controller", "init", "--state", &state];
        let output = cluster.quoin(&init.into_iter().chain(flags).collect::<Vec<_>>());
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = refused(&other.file("ca"), &client);
    assert!(said.contains("UnknownIssuer") && said.contains("--etcd-ca"), "{said}");
    let said = refused(&ca, &stranger);
    assert!(said.contains("--etcd-certificate"), "{said}");
    // Whichever member was asked goes: the next one is reached.
    for member in 0..3 {
        etcd.kill(member);
        cluster.eventually("the next member is asked", || {
            cluster.quoin(&["token", "create", "--role", "pool"]).status.success().then_some(())
        });
        etcd.run(member);
        etcd.wait_until_healthy();
    }
    let status = cluster.quoin(&["status", "-o", "json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert!(status["records"]["place"].as_str().unwrap().starts_with("https://"), "{status}");
}

/// Documents of new volumes.
fn documents(from: usize, count: usize) -> String {
    let document = |number| {
        format!(
            "apiVersion: quoin/v1\nkind: Volume\nmetadata:\n  name: v{number}\nspec:\n  size: 1MiB\n  spread: pool\n"
        )
    };
    (from..from + count).map(document).collect::<Vec<_>>().join("---\n")
}

/// Proves that volumes are made in etcd and in Kubernetes in no more than three times the time that they
/// take where the records are in a file.
#[test]
fn volumes_are_made_in_shared_stores_in_no_more_than_three_times_the_time_of_a_file() {
    const ROUNDS: usize = 2;
    const VOLUMES: usize = 20;
    let stores = ["embedded", "etcd", "kubernetes"];
    let clusters = stores.map(|store| Stores::start(&format!("making-{store}"), store));
    let mut took = [Duration::ZERO; 3];
    // In turns, so that whatever else the host does is shared.
    for round in 0..ROUNDS {
        for (stores, took) in clusters.iter().zip(&mut took) {
            let file = stores.cluster.path(&format!("round-{round}.yaml"));
            std::fs::write(&file, documents(round * VOLUMES, VOLUMES)).unwrap();
            let began = Instant::now();
            stores.cluster.ok(&["apply", "--file", &file]);
            *took += began.elapsed();
        }
    }
    println!("{} volumes: {stores:?} in {took:?}", ROUNDS * VOLUMES);
    for (stores, shared) in stores.iter().zip(took).skip(1) {
        assert!(shared <= 3 * took[0], "{stores}: {shared:?}, and in a file {:?}", took[0]);
    }
}
