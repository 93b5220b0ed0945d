//! Roles that are stopped while something that they wait for hangs: each ends within its bound all
//! the same, and reports what it did not wait for.

use crate::common;
use crate::support::faulty;

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use common::{Cluster, Place, eventually, signal, skipped};
use faulty::FaultyDisk;
use quoin_api::csi::NodeUnstageVolumeRequest;
use quoin_api::csi::node_client::NodeClient;
use quoin_nbd::client::{Address, Client, ClientOptions};

/// A role has 20 s for its end; a machine under load needs longer for the rest.
const BOUND: Duration = Duration::from_secs(50);
/// Hangs last longer than that.
const HANGS: Duration = Duration::from_secs(70);

/// Returns whether it has ended, apart from a thread that the kernel holds in a system call.
fn has_exited(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

fn ends(cluster: &mut Cluster, name: &str) {
    let pid = cluster.process(name).pid();
    let requested = Instant::now();
    signal(pid, "TERM");
    while !has_exited(pid) {
        if requested.elapsed() > BOUND {
            let log = cluster.log(name);
            panic!("{name} has not ended after {BOUND:?}: {log}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_target_with_hanging_pools_ends_within_its_bound_during_a_write() {
    let mut cluster = Cluster::start("endtarget", &Place::here(), &["--default-spread", "pool"]);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), pool, &[]);
    }
    cluster.node(&Place::here(), "n1", &[], &[]);
    cluster.wait_for_pools(3);
    cluster.ok(&["volume", "create", "db", "--size", "16MiB"]);
    let address = cluster.ok(&["volume", "attach", "db", "--nbd"]);
    let socket = address.split_once("socket=").unwrap().1.to_owned();
    let options =
        ClientOptions { reconnect: false, ..ClientOptions::new(Address::Unix(socket.into())) };
    let client = Client::connect(options).unwrap();
    client.write(0, vec![7; 4096].into(), false).unwrap();
    for pool in ["p1", "p2"] {
        signal(cluster.process(pool).pid(), "STOP");
    }
    let writer =
        std::thread::spawn(move || client.write(4096, vec![8; 4096].into(), false).is_ok());
    std::thread::sleep(Duration::from_secs(3));
    ends(&mut cluster, "target");
    assert!(!writer.join().unwrap(), "a write without a majority was acknowledged");
}

#[test]
fn a_pool_with_a_hanging_disk_ends_within_its_bound_with_a_report() {
    if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
        return skipped("needs root and /dev/fuse");
    }
    let mut cluster = Cluster::start("endpool", &Place::here(), &[]);
    let (below, path) = (cluster.scratch.0.join("below"), cluster.scratch.0.join("disk"));
    std::fs::File::create(&below).unwrap().set_len(1 << 30).unwrap();
    let disk = FaultyDisk::serve(&path, &below);
    let data = path.to_str().unwrap().to_owned();
    let token = cluster.token("pool");
    let mut arguments: Vec<String> =
        ["pool", "run", "--name", "p1", "--format", "--listen", "127.0.0.1:0"]
            .map(String::from)
            .into();
    arguments.extend(["--state".into(), cluster.path("p1"), "--data".into(), data]);
    arguments.extend(["--controller".into(), cluster.controller.clone(), "--join".into(), token]);
    cluster.run(&Place::here(), "p1", arguments);
    cluster.wait_for_pools(1);
    // The stop needs syncs.
    disk.stall_a_sync(HANGS);
    ends(&mut cluster, "p1");
    let log = cluster.log("p1");
    assert!(log.contains("took too long") && log.contains("disk"), "{log}");
}

#[test]
fn a_node_with_a_hanging_attach_process_ends_within_its_bound_with_a_report() {
    let mut cluster = Cluster::start("endnode", &Place::here(), &[]);
    cluster.node(&Place::here(), "n1", &[], &[]);
    // The listener accepts connections, and never answers.
    std::fs::create_dir_all(cluster.path("run/attach")).unwrap();
    let _hung = UnixListener::bind(cluster.path("run/attach/attach.sock")).unwrap();
    let mut arguments: Vec<String> = ["node", "run", "--mode", "all"].map(String::from).into();
    arguments.extend(["--state".into(), cluster.path("node"), "--run".into(), cluster.path("run")]);
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    arguments.push("--csi-endpoint".into());
    arguments.push(format!("unix://{}", cluster.path("all.sock")));
    cluster.run(&Place::here(), "all", arguments);
    let socket = cluster.scratch.0.join("all.sock");
    eventually("the node serves", || socket.exists().then_some(()));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let channel = {
        let _context = runtime.enter();
        quoin_identity::unix_channel(&socket)
    };
    let request = NodeUnstageVolumeRequest {
        volume_id: "0123456789abcdef0123456789abcdef".into(),
        staging_target_path: cluster.path("stage"),
    };
    let call = runtime
        .spawn(async move { NodeClient::new(channel).node_unstage_volume(request).await.is_ok() });
    std::thread::sleep(Duration::from_secs(2));
    assert!(!call.is_finished(), "it waits for the attach process");
    ends(&mut cluster, "all");
    let log = cluster.log("all");
    assert!(log.contains("took too long"), "{log}");
}
