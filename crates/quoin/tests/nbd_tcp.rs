//! Volumes over NBD on TCP: STARTTLS and client certificates, from real processes, with a client of
//! the tests' own and with foreign ones.

use crate::common;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use common::nbd::{self, FLUSH, FUA, Nbd, TRIM, WRITE, WRITE_ZEROES};
use common::{Cluster, Place, eventually, free_port, have, signal};
use quoin_identity::{Authority, Expected, Identity, Lifetimes, Role};

/// Makes a cluster with three pools and a node whose name is one that every host resolves.
fn cluster(name: &str, flags: &[&str]) -> (Cluster, String) {
    let mut cluster = Cluster::start(name, &Place::here(), &["--default-spread", "pool"]);
    for pool in ["p1", "p2", "p3"] {
        cluster.pool(&Place::here(), pool, &[]);
    }
    let address = format!("127.0.0.1:{}", free_port());
    let mut all = vec!["--nbd-listen", &address];
    all.extend(flags);
    cluster.node(&Place::here(), "localhost", &all, &[]);
    cluster.wait_for_pools(3);
    (cluster, address)
}

/// Returns a client with the certificate in `directory`, the node's own or an admin's, for this
/// node's target.
fn client(directory: &str) -> Arc<rustls::ClientConfig> {
    let identity = Identity::load(Path::new(directory)).unwrap();
    identity.client_config(Expected::Named(Role::Node, "localhost".into())).unwrap()
}

fn admin(cluster: &Cluster) -> String {
    let to = cluster.path("ops");
    let token = cluster.token("admin");
    let join = ["cluster", "join", "--controller", &cluster.controller, "--to", &to];
    cluster.ok(&[&join[..], &["--name", "ops", "--join", &token]].concat());
    // A second time it renews, and needs no token.
    assert!(cluster.ok(&[&join[..], &["--name", "ops"]].concat()).contains("admin ops"));
    to
}

fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

#[test]
fn a_volume_is_used_over_tls_only_by_its_node_and_by_admins() {
    let (cluster, address) = cluster("nbdtls", &[]);
    let ops = admin(&cluster);
    cluster.ok(&["volume", "create", "db 1", "--size", "64MiB"]);
    let uri = cluster.ok(&["volume", "attach", "db 1", "--nbd=tcp"]);
    let port = address.rsplit(':').next().unwrap();
    assert_eq!(uri, format!("nbds://localhost:{port}/db%201"));
    assert_eq!(cluster.json(&["volume", "get", "db 1"])["nbd"][0], uri);

    let mut volume = Nbd::connect(&address, Some(client(&ops)), "db 1").unwrap();
    assert_eq!(volume.size_bytes, 64 << 20);
    essentials(&mut volume);
    let mut own = Nbd::connect(&address, Some(client(&cluster.path("node"))), "db 1").unwrap();
    assert_eq!(own.read(1 << 20, 4096).unwrap(), vec![0x5a; 4096]);

    // A larger volume: visible at once on an open connection, and reported to new ones.
    cluster.ok(&["volume", "resize", "db 1", "--size", "96MiB"]);
    eventually("the new part can be written", || {
        own.call(WRITE, FUA, 80 << 20, 4096, &[7; 4096]).unwrap().ok()
    });
    let mut again = Nbd::connect(&address, Some(client(&ops)), "db 1").unwrap();
    assert_eq!(again.size_bytes, 96 << 20);
    assert_eq!(again.read(80 << 20, 4096).unwrap(), vec![7; 4096]);

    refusals(&cluster, &address);
    foreign_clients(&cluster, port, &ops);
    assert_eq!(own.read(1 << 20, 4096).unwrap(), vec![0x5a; 4096], "IO went on beside all that");
}

/// Connects from an address of the loopback that represents another host, and sends nothing.
fn silent(to: std::net::SocketAddr) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()?;
    bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 9], 0))).ok()?;
    connect(&socket, &to).ok()?;
    Some(socket)
}

#[test]
fn silent_connections_of_a_host_do_not_block_other_clients() {
    let (cluster, address) = cluster("nbdflood", &[]);
    cluster.ok(&["volume", "create", "db", "--size", "16MiB"]);
    cluster.ok(&["volume", "attach", "db", "--nbd=tcp"]);
    let open = || Nbd::connect(&address, Some(client(&cluster.path("node"))), "db");
    eventually("the volume is served", || open().ok());
    let (to, over) = (address.parse().unwrap(), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        let over = &over;
        let flood = scope.spawn(move || {
            let mut held = std::collections::VecDeque::new();
            let mut made = 0;
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                held.extend(silent(to));
                made += 1;
                if held.len() > 200 {
                    held.pop_front();
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            made
        });
        std::thread::sleep(std::time::Duration::from_secs(2));
        let failed: Vec<_> = (0..10).filter_map(|_| open().err()).collect();
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        let made = flood.join().unwrap();
        assert!(failed.is_empty(), "beside {made} silent connections: {failed:?}");
    });
    // All clients of one host come at once when a target has started.
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..40).map(|_| scope.spawn(|| open().map(drop))).collect();
        let failed: Vec<_> = all.into_iter().filter_map(|one| one.join().unwrap().err()).collect();
        assert!(failed.is_empty(), "of 40 clients: {failed:?}");
    });
}

/// Connections arrive at one listener, whichever shard serves their volume.
#[test]
fn clients_over_tls_reach_volumes_of_every_shard_and_again_after_the_target_died() {
    let (mut cluster, address) = cluster("nbdshards", &["--shards", "3"]);
    let ops = admin(&cluster);
    assert_eq!(shards(cluster.process("target").pid()), 3);
    let volumes = ["v1", "v2", "v3", "v4", "v5", "v6"];
    for name in volumes {
        cluster.ok(&["volume", "create", name, "--size", "16MiB"]);
        cluster.ok(&["volume", "attach", name, "--nbd=tcp"]);
    }
    let open = |name: &str| Nbd::connect(&address, Some(client(&ops)), name).unwrap();
    // Several of each, all at the same time; each has bytes that only it writes.
    let mut connections: Vec<(u8, Nbd)> =
        volumes.iter().chain(&volumes).zip(1..).map(|(name, byte)| (byte, open(name))).collect();
    let at = |byte: u8| u64::from(byte) * 8192;
    for (byte, connection) in &mut connections {
        let written = connection.call(WRITE, FUA, at(*byte), 4096, &[*byte; 4096]).unwrap();
        assert_eq!(written, Ok(()));
    }
    for (byte, connection) in &mut connections {
        assert_eq!(connection.read(at(*byte), 4096).unwrap(), vec![*byte; 4096]);
    }

    let target = cluster.process("target");
    let pid = target.pid();
    signal(pid, "KILL");
    eventually("the target is gone", || (!target.is_alive()).then_some(()));
    drop(connections);
    let arguments = ["target", "--shards", "3", "--nbd-listen", &address, "--name", "localhost"];
    let mut arguments: Vec<String> = arguments.map(String::from).into();
    arguments.extend(["--state".into(), cluster.path("node"), "--run".into(), cluster.path("run")]);
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    cluster.run(&Place::here(), "next-target", arguments);
    for (name, byte) in volumes.iter().chain(&volumes).zip(1u8..) {
        let mut connection = eventually("the volume is served again", || {
            Nbd::connect(&address, Some(client(&ops)), name).ok()
        });
        assert_eq!(connection.read(at(byte), 4096).unwrap(), vec![byte; 4096], "{name}");
    }
}

/// Returns how many threads of a target serve volumes.
fn shards(pid: u32) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.starts_with("shard-"))).count()
}

/// Checks what every client relies on, through TLS and a quorum of real pools.
fn essentials(volume: &mut Nbd) {
    volume.write(0, &vec![1; 4 << 20]).unwrap();
    assert_eq!(volume.call(WRITE, FUA, 1 << 20, 4096, &[0x5a; 4096]).unwrap(), Ok(()));
    assert_eq!(volume.call(FLUSH, 0, 0, 0, &[]).unwrap(), Ok(()));
    assert_eq!(volume.call(TRIM, 0, 2 << 20, 1 << 20, &[]).unwrap(), Ok(()));
    assert_eq!(volume.call(WRITE_ZEROES, FUA, 512 << 10, 64 << 10, &[]).unwrap(), Ok(()));
    assert_eq!(volume.read(1 << 20, 4096).unwrap(), vec![0x5a; 4096]);
    assert_eq!(volume.read(2 << 20, 1 << 20).unwrap(), vec![0; 1 << 20]);
    assert_eq!(volume.read(512 << 10, 64 << 10).unwrap(), vec![0; 64 << 10]);
    assert_eq!(volume.read((512 << 10) - 4096, 4096).unwrap(), vec![1; 4096]);
    // Data (0), then the trimmed hole (3: hole and zero), then data again.
    let extents = volume.status(1 << 20, 3 << 20).unwrap();
    assert_eq!(extents, [(1 << 20, 0), (1 << 20, 3), (1 << 20, 0)]);
    let beyond = volume.call(WRITE, 0, 64 << 20, 4096, &[0; 4096]).unwrap();
    assert_eq!(beyond, Err(28), "beyond the end there is no space");
}

fn refusals(cluster: &Cluster, address: &str) {
    // STARTTLS is the only option that is answered in the clear.
    let mut clear = nbd::hello(address).unwrap();
    let (kind, _) = nbd::ask(&mut clear, 3, &[]).unwrap();
    assert_eq!(kind, 0x8000_0005, "LIST before TLS");
    assert!(Nbd::connect(address, None, "db 1").err().unwrap().contains("TLS"));

    // Members of other roles, and other nodes, get a refusal that names them.
    let token = cluster.token("node");
    for (role, name) in [("pool", "p1"), ("node", "n2")] {
        let directory = cluster.path(name);
        if role == "node" {
            let join = quoin_identity::JoinRequest {
                controller: cluster.controller.clone(),
                token: token.parse().unwrap(),
                role: Role::Node,
                name: name.into(),
            };
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let join = quoin_identity::load_or_join(Path::new(&directory), Some(&join));
            runtime.block_on(join).unwrap();
        }
        let refused = Nbd::connect(address, Some(client(&directory)), "db 1").err().unwrap();
        assert!(refused.contains(&format!("{role} {name}")), "{refused}");
    }

    // A certificate of the same names from another authority opens nothing.
    let stranger = tempfile::tempdir().unwrap();
    let authority = Authority::create(&stranger.path().join("ca"), Lifetimes::default()).unwrap();
    let mine = stranger.path().join("ops");
    authority.issue_identity(&mine, Role::Admin, "ops").unwrap();
    assert!(Nbd::connect(address, Some(client(mine.to_str().unwrap())), "db 1").is_err());

    let ops = Some(client(&cluster.path("ops")));
    let unknown = Nbd::connect(address, ops.clone(), "nothing").err().unwrap();
    assert!(unknown.contains("no export"), "{unknown}");
    assert!(Nbd::connect(address, ops, "").err().unwrap().contains("by name"));
}

/// Runs libnbd and QEMU, where they are installed, with the certificates as `cluster join` left
/// them.
fn foreign_clients(cluster: &Cluster, port: &str, ops: &str) {
    let uri = format!("nbds://localhost:{port}/db%201?tls-certificates={ops}");
    if have("nbdinfo") {
        let output = run(Command::new("nbdinfo").args(["--json", &uri]));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["TLS"], true, "{json}");
        assert_eq!(json["exports"][0]["export-size"], 96 << 20);
        let listed = run(Command::new("nbdinfo").args(["--list", &uri]));
        assert!(String::from_utf8_lossy(&listed.stdout).contains("db 1"));
        let nameless = cluster.path("node");
        let refused = Command::new("nbdinfo")
            .arg(format!("nbds://localhost:{port}/db%201?tls-certificates={nameless}"))
            .output()
            .unwrap();
        assert!(!refused.status.success(), "a client without a certificate got in");
    }
    if have("nbdcopy") {
        let (image, back) = (cluster.path("image"), cluster.path("back"));
        let bytes: Vec<u8> = (0..96 << 20).map(|at| (at / 4096 % 251) as u8).collect();
        std::fs::write(&image, &bytes).unwrap();
        run(Command::new("nbdcopy").args(["--flush", &image, &uri]));
        run(Command::new("nbdcopy").args([&uri, &back]));
        assert!(std::fs::read(&back).unwrap() == bytes, "nbdcopy read back something else");
        Nbd::connect(&format!("127.0.0.1:{port}"), Some(client(ops)), "db 1")
            .unwrap()
            .write(1 << 20, &[0x5a; 4096])
            .unwrap();
    }
    if have("qemu-img") {
        let credentials = format!("tls-creds-x509,id=t,endpoint=client,dir={ops}");
        let options = format!("driver=nbd,host=localhost,port={port},export=db 1,tls-creds=t");
        let output = run(Command::new("qemu-img").args([
            "info",
            "--output=json",
            "--object",
            &credentials,
            "--image-opts",
            &options,
        ]));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["virtual-size"], 96 << 20, "{json}");
    }
}

#[test]
fn plain_nbd_is_opened_only_on_the_loopback_and_on_request() {
    let (cluster, address) = cluster("nbdplain", &["--nbd-plain"]);
    cluster.ok(&["volume", "create", "db", "--size", "64MiB"]);
    assert_eq!(cluster.ok(&["volume", "attach", "db", "--nbd=tcp"]), format!("nbd://{address}/db"));
    let mut volume = Nbd::connect(&address, None, "db").unwrap();
    essentials(&mut volume);

    let target = |flags: &[&str]| {
        let (state, run) = (cluster.path("node"), cluster.path("other-run"));
        let mut arguments = vec!["target", "--state", &state, "--run", &run];
        arguments.extend(["--controller", &cluster.controller]);
        arguments.extend(flags);
        let output = cluster.quoin(&arguments);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let printed = target(&["--nbd-listen", "0.0.0.0:0", "--nbd-plain"]);
    assert!(printed.contains("0.0.0.0:0") && printed.contains("only loopback"), "{printed}");
    let printed = target(&["--nbd-listen", &address, "--nbd-plain"]);
    assert!(printed.contains(&address) && printed.contains("--nbd-listen"), "{printed}");
}
