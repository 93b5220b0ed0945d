//! A host that was cut off from everything comes back after its volume went to another one: IO that
//! still waits there ends with an error, and users are told where and why. Before that: no host
//! takes a volume by mistake from a host that uses it. Needs root, /dev/fuse and loop devices.

use crate::common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use bytes::Bytes;
use common::{
    Cluster, Place, can_attach, eventually, free_port, have, isolated_command, run, signal, unmount,
};
use quoin_nbd::client::{Address, Client, ClientOptions};
use serde_json::Value;

/// The processes of one host, with directories of its own.
pub struct Host {
    pub name: &'static str,
    pub run: String,
    /// Health ports of target, attach process and node.
    health: [u16; 3],
}

impl Host {
    pub fn start(cluster: &mut Cluster, name: &'static str) -> Self {
        let (state, run) =
            (cluster.path(&format!("{name}-state")), cluster.path(&format!("{name}-run")));
        let health = [free_port(), free_port(), free_port()];
        let controller = cluster.controller.clone();
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        let http = health.map(|port| format!("127.0.0.1:{port}"));
        let member = ["--state", &state, "--name", name, "--controller", &controller];
        let of_run = ["--run", &run];
        let token = cluster.token("node");
        let target = [&["target", "--join", &token, "--http", &http[0]][..], &member, &of_run];
        cluster.run(&Place::here(), &format!("{name}-target"), words(&target.concat()));
        let joined = Path::new(&state).join("cert.pem");
        eventually("the target joins", || joined.exists().then_some(()));
        let attach = [&["attach", "--http", &http[1]][..], &of_run];
        cluster.run(&Place::here(), &format!("{name}-attach"), words(&attach.concat()));
        let csi = format!("unix://{run}/csi.sock");
        let node = ["node", "run", "--csi-endpoint", &csi, "--http", &http[2]];
        cluster.run(
            &Place::here(),
            &format!("{name}-node"),
            words(&[&node[..], &member, &of_run].concat()),
        );
        let host = Self { name, run, health };
        eventually("the node is online", || (host.state(cluster) == "Online").then_some(()));
        let socket = Path::new(&host.run).join("attach/attach.sock");
        eventually("its attach process listens", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok().then_some(())
        });
        host
    }

    fn state(&self, cluster: &Cluster) -> String {
        let nodes = cluster.json(&["node", "list"]);
        let of_it = nodes.as_array().unwrap().iter().find(|node| node["name"] == self.name);
        of_it.map(|node| node["state"].as_str().unwrap().to_owned()).unwrap_or_default()
    }

    /// Signals target and node, the only processes that communicate with other hosts.
    fn signal(&self, cluster: &mut Cluster, name: &str) {
        for part in ["target", "node"] {
            let process = cluster.process(&format!("{}-{part}", self.name));
            signal(process.pid(), name);
        }
    }

    /// Runs `volume …` on this host, in a mount table without the mounts of `other`.
    fn volume(&self, cluster: &Cluster, other: &Host, arguments: &[&str]) -> Output {
        let script = "umount -l \"$1\"/attach/volumes/* 2>&-; shift; exec \"$0\" volume \"$@\"";
        isolated_command(Path::new(&self.run).parent().unwrap())
            .args(["sh", "-c", script, env!("CARGO_BIN_EXE_quoin"), &other.run])
            .args(arguments)
            .args(["--run", &self.run])
            .env("QUOIN_SOCKET", &cluster.admin_socket)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    fn ok(&self, cluster: &Cluster, other: &Host, arguments: &[&str]) -> String {
        let output = self.volume(cluster, other, arguments);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {printed}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Attaches a volume here, and opens it like a program that uses no device.
    fn client(&self, cluster: &Cluster, other: &Host, volume: &str) -> Client {
        let address = self.ok(cluster, other, &["attach", volume, "--node", self.name, "--nbd"]);
        let socket = PathBuf::from(address.split_once("socket=").unwrap().1);
        eventually("the volume is served here", || {
            Client::connect(ClientOptions::new(Address::Unix(socket.clone()))).ok()
        })
    }

    fn refused(&self, cluster: &Cluster, other: &Host, arguments: &[&str]) -> String {
        let output = self.volume(cluster, other, arguments);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {printed}");
        printed
    }
}

fn healthz(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
    let mut printed = String::new();
    stream.read_to_string(&mut printed).unwrap();
    printed
}

/// Starts a program that writes into the file system and waits until it is on the disk.
fn writer(mount: &Path) -> Child {
    let script =
        format!("exec dd if=/dev/zero of={}/f bs=64k count=16 conv=fsync", mount.display());
    let quiet = Stdio::null;
    Command::new("sh").args(["-c", &script]).stdout(quiet()).stderr(quiet()).spawn().unwrap()
}

fn events(cluster: &Cluster) -> Vec<(String, String)> {
    let reported = cluster.ok(&["events", "-o", "json"]);
    let events: Vec<Value> = serde_json::from_str(&reported).unwrap();
    let text = |event: &Value, key: &str| event[key].as_str().unwrap_or_default().to_owned();
    events.iter().map(|event| (text(event, "reason"), text(event, "message"))).collect()
}

/// Asserts that it is never reported unhealthy from its first attachment to its being online.
fn is_never_ill(cluster: &Cluster) {
    cluster.wait_for_volume("db", "online", |volume| {
        let (health, waits) = (volume["health"].as_str().unwrap(), &volume["waitingFor"]);
        assert!(["Opening", "Online"].contains(&health), "{volume}");
        assert!(!waits.as_str().unwrap().contains("pool"), "{volume}");
        health == "Online" && volume["waitingFor"] == ""
    });
    let reported = events(cluster);
    assert!(!reported.iter().any(|(reason, _)| reason == "VolumeDegraded"), "{reported:?}");
}

#[test]
fn a_host_that_returns_after_its_volume_moved_gets_errors_and_keeps_no_device() {
    if !can_attach() || !have("mkfs.ext4") || !have("unshare") {
        return;
    }
    let mut cluster = Cluster::start("returned", &Place::here(), &[]);
    for name in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), name, &[]);
    }
    let (h1, h2) = (Host::start(&mut cluster, "h1"), Host::start(&mut cluster, "h2"));
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "3"]);
    let device = h1.ok(&cluster, &h2, &["attach", "db", "--node", "h1"]);
    is_never_ill(&cluster);
    let mount = PathBuf::from(cluster.path("mount"));
    std::fs::create_dir(&mount).unwrap();
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, mount.to_str().unwrap()]);

    // No other host takes it away by mistake.
    eventually("its use is known", || {
        let shown = cluster.json(&["volume", "get", "db"]);
        (shown["devices"][0]["inUse"] == true).then_some(())
    });
    for forced in [&[][..], &["--force"]] {
        let printed = h2.refused(&cluster, &h1, &[&["detach", "db"], forced].concat());
        assert!(printed.contains("attached to h1, not to this host"), "{printed}");
        assert!(printed.contains("--node"), "{printed}");
    }
    // A node that does not have it, or does not exist.
    let printed = h2.refused(&cluster, &h1, &["detach", "db", "--node", "h7", "--force"]);
    assert!(
        printed.contains("not attached to node h7") && printed.contains("attached to h1"),
        "{printed}"
    );
    let taking = ["detach", "db", "--node", "h1"];
    let printed = h2.refused(&cluster, &h1, &taking);
    assert!(printed.contains("in use on node h1") && printed.contains("/mount"), "{printed}");
    assert!(printed.contains("--force"), "{printed}");
    let mut fine = writer(&mount);
    assert!(fine.wait().unwrap().success());

    // Cut off, and considered lost.
    h1.signal(&mut cluster, "STOP");
    let mut waits = writer(&mount);
    eventually("the host is missed", || (h1.state(&cluster) == "Offline").then_some(()));
    let printed = h2.refused(&cluster, &h1, &taking);
    assert!(
        printed.contains("node h1 has not reported") && printed.contains("--force"),
        "{printed}"
    );
    h2.ok(&cluster, &h1, &[&taking[..], &["--force"]].concat());
    let reported = events(&cluster);
    let forced = reported.iter().find(|(reason, _)| reason == "VolumeForced").expect("it is told");
    assert!(forced.1.contains("from h1") && forced.1.contains("admin socket"), "{forced:?}");
    let client = h2.client(&cluster, &h1, "db");
    client.write(4096, Bytes::from_static(&[7; 4096]), true).unwrap();
    assert!(waits.try_wait().unwrap().is_none(), "a host that is cut off only waits");

    // The host comes back.
    h1.signal(&mut cluster, "CONT");
    let status = eventually("what waited there ends", || waits.try_wait().unwrap());
    assert!(!status.success(), "its write is lost, and it must know");
    for (part, port) in h1.health.iter().enumerate() {
        eventually("its health says so", || {
            let printed = healthz(*port);
            let is_told = printed.contains("volume db: served by h2 since epoch")
                && printed.contains("mounts here are dead");
            assert!(part < 3);
            is_told.then_some(())
        });
    }
    let shown = cluster.json(&["volume", "get", "db"]);
    let dead = &shown["devices"][0];
    assert_eq!(dead["node"], "h1", "{shown}");
    assert!(dead["dead"].as_str().unwrap().contains("served by h2"), "{shown}");
    assert!(events(&cluster).iter().any(|(reason, _)| reason == "MountsDead"));
    assert_eq!(client.read(4096, 4096).unwrap(), [7; 4096].as_slice());

    // The host releases its own devices, and nothing else.
    let printed = h1.refused(&cluster, &h2, &["detach", "db"]);
    assert!(printed.contains("unmount"), "{printed}");
    unmount(&mount);
    eventually("the device goes by itself", || {
        let shown = cluster.json(&["volume", "get", "db"]);
        let is_left = shown["devices"].as_array().is_some_and(|all| !all.is_empty());
        (!is_left && std::fs::symlink_metadata(&device).is_err()).then_some(())
    });
    assert_eq!(cluster.json(&["volume", "get", "db"])["nodes"], serde_json::json!(["h2"]));
    client.write(8192, Bytes::from_static(&[8; 4096]), true).unwrap();
    eventually("the host is well again", || {
        let well = h1.health.iter().all(|port| healthz(*port).contains("200 OK"));
        well.then_some(())
    });
    assert!(std::fs::symlink_metadata(&device).is_err() || !device.starts_with("/dev/quoin"));
}

/// The host's own state proves nothing about the volume's present user: its attach process may not
/// answer, and may not have been informed yet.
#[test]
fn a_detach_on_one_host_does_not_detach_another_host() {
    if !can_attach() || !have("unshare") {
        return;
    }
    let mut cluster = Cluster::start("lets-go", &Place::here(), &[]);
    for name in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), name, &[]);
    }
    let (h1, h2) = (Host::start(&mut cluster, "h1"), Host::start(&mut cluster, "h2"));
    cluster.wait_for_pools(3);
    for volume in ["idle", "stuck"] {
        cluster.ok(&["volume", "create", volume, "--size", "64MiB", "--replicas", "3"]);
        h1.ok(&cluster, &h2, &["attach", volume, "--node", "h1"]);
    }
    // The host is no longer informed.
    h1.signal(&mut cluster, "STOP");
    eventually("the host is missed", || (h1.state(&cluster) == "Offline").then_some(()));
    let clients = ["idle", "stuck"].map(|volume| {
        h2.ok(&cluster, &h1, &["detach", volume, "--node", "h1", "--force"]);
        h2.client(&cluster, &h1, volume)
    });
    let stays = |cluster: &Cluster, volume: &str, printed: &str| {
        assert!(printed.contains("stays attached to h2"), "{printed}");
        let shown = cluster.json(&["volume", "get", volume]);
        assert_eq!(shown["nodes"], serde_json::json!(["h2"]));
        assert!(
            !events(cluster)
                .iter()
                .any(|(reason, why)| { reason == "VolumeForced" && why.contains("from h2") })
        );
    };
    let printed = h1.ok(&cluster, &h2, &["detach", "idle"]);
    stays(&cluster, "idle", &printed);

    let attach = cluster.process("h1-attach").pid();
    signal(attach, "STOP");
    let printed = h1.ok(&cluster, &h2, &["detach", "stuck", "--force"]);
    stays(&cluster, "stuck", &printed);
    for client in &clients {
        client.write(4096, Bytes::from_static(&[7; 4096]), true).unwrap();
    }
    signal(attach, "CONT");
    h1.signal(&mut cluster, "CONT");
}
