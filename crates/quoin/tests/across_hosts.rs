//! Several hosts used as the documents describe: no address is typed twice, commands run on any
//! host, and a volume becomes a device of whichever host is named. Needs root and iproute2.

use crate::common;

use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::{Output, Stdio};

use common::network::Network;
use common::{Cluster, Place, can_attach};
use serde_json::Value;

/// Starts a pool by a user's command line: its listen and advertised addresses are the defaults,
/// except for `more`.
fn pool(cluster: &mut Cluster, place: &Place, name: &str, more: &[&str]) {
    let mut arguments: Vec<String> =
        ["pool", "run", "--name", name, "--node", name].into_iter().map(String::from).collect();
    arguments.extend(["--join".into(), cluster.token("pool")]);
    arguments.extend(["--state".into(), cluster.path(name)]);
    arguments.extend(["--data".into(), cluster.path(&format!("{name}-data"))]);
    arguments.extend(["--capacity".into(), "1GiB".into()]);
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    arguments.extend(more.iter().map(ToString::to_string));
    cluster.run(place, name, arguments);
}

fn named(list: &Value, name: &str) -> Value {
    let all = list.as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| one["name"] == name).unwrap_or_default()
}

fn in_state(cluster: &Cluster, name: &str, state: &str) -> Value {
    cluster.eventually(&format!("pool {name} is {state}"), || {
        Some(named(&cluster.json(&["pool", "list"]), name)).filter(|pool| pool["state"] == state)
    })
}

/// A user on one of the hosts, with an own home and no controller on the host.
struct Admin {
    place: Place,
    home: String,
}

impl Admin {
    fn run(&self, arguments: &[&str], more: &[(&str, &str)]) -> Output {
        let mut command = self.place.command(env!("CARGO_BIN_EXE_quoin"));
        command.args(arguments).stdin(Stdio::null());
        command.env("HOME", &self.home).env_remove("XDG_CONFIG_HOME");
        for unset in ["QUOIN_SOCKET", "QUOIN_CONTEXT", "QUOIN_JOIN_TOKEN", "QUOIN_RUN"] {
            command.env_remove(unset);
        }
        // Addresses of other clusters of this machine, which would be called first.
        let usual = ["/var/lib/quoin-dev/run/admin.sock", "/run/quoin/admin.sock"];
        if usual.iter().any(|socket| Path::new(socket).exists()) {
            command.env("QUOIN_CONTEXT", "far");
        }
        command.envs(more.iter().copied()).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments, &[]);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {printed}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["-o", "json"]].concat())).unwrap()
    }

    fn refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments, &[]);
        assert!(!output.status.success(), "{arguments:?} is taken");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

fn joined(cluster: &Cluster, place: &Place) -> Admin {
    let person = Admin { place: place.clone(), home: cluster.path("home") };
    let token = cluster.token("admin");
    let join = ["cluster", "join", "--role", "admin", "--controller", &cluster.controller];
    let printed =
        person.ok(&[&join[..], &["--token", &token, "--name", "ops", "--context", "far"]].concat());
    assert!(printed.contains("context far") && printed.contains("current"), "{printed}");
    person
}

#[test]
fn pools_report_reachable_addresses_and_an_unreachable_pool_is_reported() {
    let Some(network) = Network::new(&["c", "p1", "p2", "p3"]) else { return };
    let mut cluster = Cluster::start("addresses", &network.place(0), &[]);
    for (index, name) in [(1, "p1"), (2, "p2")] {
        pool(&mut cluster, &network.place(index), name, &[]);
        let found = in_state(&cluster, name, "Online");
        assert_eq!(found["address"], format!("{}:7401", network.place(index).address));
    }
    cluster.ok(&["volume", "create", "db", "--size", "16MiB", "--replicas", "2"]);

    // One pool with an address that no host has, and one that only its own host could reach.
    let nowhere = format!("{}:7401", network.place(3).address.replace(".4", ".99"));
    pool(&mut cluster, &network.place(3), "p3", &["--advertise", &nowhere]);
    let found = in_state(&cluster, "p3", "Unreachable");
    let why = found["message"].as_str().unwrap();
    assert!(why.contains(&nowhere), "{why}");
    pool(&mut cluster, &network.place(0), "p0", &["--listen", "127.0.0.1:0"]);
    let found = in_state(&cluster, "p0", "Unreachable");
    let why = found["message"].as_str().unwrap();
    assert!(why.contains("loopback") && why.contains("--advertise"), "{why}");
    let refused =
        cluster.quoin(&["volume", "create", "more", "--size", "16MiB", "--replicas", "3"]);
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("unreachable") && refused.contains(&nowhere), "{refused}");
    let events = cluster.ok(&["events"]);
    assert!(events.contains("PoolUnreachable"), "{events}");

    // A pool that held a replica, and whose address is unreachable after a restart.
    let p2 = cluster.processes.iter().position(|process| process.name == "p2").unwrap();
    cluster.processes.remove(p2).stop();
    pool(&mut cluster, &network.place(2), "p2", &["--advertise", &nowhere]);
    in_state(&cluster, "p2", "Unreachable");
    cluster.wait_for_volume("db", "waiting for what is out of reach", |volume| {
        let waits = volume["waitingFor"].as_str().unwrap_or_default();
        waits.contains(&nowhere) && volume["health"] == "Faulted"
    });
    let p2 = cluster.processes.iter().position(|process| process.name == "p2").unwrap();
    cluster.processes.remove(p2).stop();
    pool(&mut cluster, &network.place(2), "p2", &[]);
    in_state(&cluster, "p2", "Online");
    cluster.wait_for_volume("db", "whole", |volume| volume["health"] == "Online");

    // The port belongs to another process.
    let mut second = network.place(2).command(env!("CARGO_BIN_EXE_quoin"));
    second.args(["pool", "run", "--name", "p9", "--state", &cluster.path("p9")]);
    second.args(["--data", &cluster.path("p9-data"), "--capacity", "1GiB"]);
    second
        .args(["--controller", &cluster.controller])
        .env("QUOIN_JOIN_TOKEN", cluster.token("pool"));
    let refused = String::from_utf8(second.output().unwrap().stderr).unwrap();
    assert!(refused.contains("7401") && refused.contains("--listen"), "{refused}");
    let wildcard = cluster.quoin(&[
        "pool",
        "run",
        "--state",
        "x",
        "--data",
        "x",
        "--controller",
        "c:1",
        "--advertise",
        "0.0.0.0:7401",
    ]);
    let refused = String::from_utf8_lossy(&wildcard.stderr).into_owned();
    assert!(refused.contains("leads nowhere"), "{refused}");
}

#[test]
fn commands_run_on_any_host_by_a_context_until_its_admin_is_removed() {
    let Some(network) = Network::new(&["c", "p1", "h"]) else { return };
    let mut cluster = Cluster::start("contexts", &network.place(0), &[]);
    pool(&mut cluster, &network.place(1), "p1", &[]);
    in_state(&cluster, "p1", "Online");
    let stranger = Admin { place: network.place(2), home: cluster.path("strangers-home") };
    let refused = stranger.refused(&["--socket", &cluster.controller, "volume", "list"]);
    assert!(refused.contains("quoin cluster join") && refused.contains(&cluster.controller));
    let refused = stranger.refused(&["--context", "far", "volume", "list"]);
    assert!(refused.contains("no context far") && refused.contains("quoin cluster join"));

    let person = joined(&cluster, &network.place(2));
    person.ok(&[
        "volume",
        "create",
        "db",
        "--size",
        "16MiB",
        "--replicas",
        "1",
        "--allow-loss-on-single-failure",
    ]);
    assert_eq!(person.json(&["volume", "list"])[0]["name"], "db");
    assert_eq!(named(&person.json(&["pool", "list"]), "p1")["state"], "Online");
    assert!(person.ok(&["events"]).contains("VolumeCreated"));
    assert!(!person.ok(&["token", "create", "--role", "pool"]).is_empty());
    assert_eq!(
        person.json(&["cluster", "info"])["clusterId"],
        cluster.json(&["cluster", "info"])["clusterId"]
    );
    // An address instead of a socket finds the context that leads there.
    person.ok(&["--socket", &cluster.controller, "volume", "get", "db"]);
    // The authority's key is issued on the controller's host, and nowhere else.
    let backup = cluster.path("backup");
    let refused = person.refused(&["controller", "backup", &backup]);
    assert!(refused.contains("ops"), "{refused}");
    person.ok(&["controller", "backup", &backup, "--without-authority"]);

    let shown = person.json(&["context", "show"]);
    assert_eq!((&shown["name"], &shown["admin"]), (&"far".into(), &"ops".into()));
    assert_eq!(shown["controller"], cluster.controller);
    // The same again renews, and another controller under that name is refused.
    person.ok(&["cluster", "join", "--controller", &cluster.controller, "--context", "far"]);
    let refused =
        person.refused(&["cluster", "join", "--controller", "other:7400", "--context", "far"]);
    assert!(refused.contains("context remove far"), "{refused}");
    person.ok(&["context", "rename", "far", "near"]);
    assert_eq!(person.json(&["context", "list"])[0]["name"], "near");
    person.ok(&["--context", "near", "volume", "list"]);
    cluster.ok(&["admin", "remove", "ops"]);
    let refused = person.refused(&["--context", "near", "volume", "list"]);
    assert!(refused.contains("removed"), "{refused}");
    person.ok(&["context", "remove", "near"]);
    assert_eq!(person.json(&["context", "list"]), Value::Array(Vec::new()));
    let key = Path::new(&person.home).join(".config/quoin/contexts/near/key.pem");
    assert!(!key.exists());
}

#[test]
fn a_volume_becomes_a_device_of_a_named_host_without_csi() {
    // `/dev/quoin` is one directory for all tests of this kernel: the name is this test's own.
    if !can_attach() {
        return;
    }
    let Some(network) = Network::new(&["c", "p1", "n1", "n2"]) else { return };
    let mut cluster = Cluster::start("elsewhere", &network.place(0), &[]);
    pool(&mut cluster, &network.place(1), "p1", &[]);
    in_state(&cluster, "p1", "Online");
    let person = joined(&cluster, &network.place(3));
    person.ok(&[
        "volume",
        "create",
        "lent",
        "--size",
        "16MiB",
        "--replicas",
        "1",
        "--allow-loss-on-single-failure",
    ]);
    let refused = person.refused(&["volume", "attach", "lent"]);
    assert!(refused.contains("quoin target") && !refused.contains("node run"), "{refused}");

    let run = cluster.path("n1-run");
    let mut target: Vec<String> = ["target", "--name", "n1"].map(String::from).to_vec();
    target.extend(["--state".into(), cluster.path("n1"), "--run".into(), run.clone()]);
    target.extend(["--controller".into(), cluster.controller.clone()]);
    target.extend(["--join".into(), cluster.token("node")]);
    cluster.run(&network.place(2), "target", target);
    cluster.eventually("the node is one without CSI", || {
        let node = named(&cluster.json(&["node", "list"]), "n1");
        let address = network.place(2).address;
        (node["state"] == "Online" && node["address"] == address).then_some(())
    });

    // The node's host makes no devices yet: the command names the missing part, and continues
    // later.
    let attach = ["volume", "attach", "lent", "--node", "n1"];
    let refused = person.refused(&[&attach[..], &["--timeout", "3"]].concat());
    assert!(refused.contains("quoin attach") && refused.contains("n1"), "{refused}");
    let arguments = ["attach", "--run", &run].map(String::from).to_vec();
    cluster.run(&network.place(2), "attach", arguments);
    let device = person.ok(&attach);
    let kind = std::fs::metadata(&device).unwrap().file_type();
    assert!(kind.is_block_device(), "{device}");
    assert_eq!(person.ok(&attach), device, "a second time it is the same");
    let shown = person.ok(&["volume", "get", "lent"]);
    assert!(shown.contains(&format!("{device} on node n1")), "{shown}");
    let mut file = std::fs::File::options().write(true).open(&device).unwrap();
    file.write_all(&[7; 4096]).unwrap();
    file.sync_all().unwrap();
    drop(file);

    // The command on the host itself calls its own attach process, with no node named.
    let there = Admin { place: network.place(2), home: person.home.clone() };
    assert_eq!(there.ok(&["volume", "attach", "lent", "--run", &run]), device);

    // The device is removed with the attachment, and the data is there on the next one.
    unpublish(&cluster);
    cluster.eventually("the device is gone", || {
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
        (!mounts.contains(&run)).then_some(())
    });
    let device = person.ok(&attach);
    let mut bytes = [0; 4096];
    std::fs::File::open(&device).unwrap().read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
    there.ok(&["volume", "detach", "lent", "--run", &run]);
}

/// Unpublishes the volume as the command on another host does. The command itself reads the devices
/// of this kernel, which the hosts of this test share.
fn unpublish(cluster: &Cluster) {
    use quoin_api::control::cluster_client::ClusterClient;
    use quoin_api::control::{UnpublishVolumeRequest, VolumeRef};
    let volume = Some(VolumeRef { id: String::new(), name: "lent".into() });
    let request = UnpublishVolumeRequest { volume, ..UnpublishVolumeRequest::default() };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let channel = quoin_identity::unix_channel(&cluster.scratch.0.join("run/admin.sock"));
        ClusterClient::new(channel).unpublish_volume(request).await.unwrap();
    });
}
