//! Pools and nodes that join and leave by command line, and their refusals.

use crate::common;

use std::process::{Command, Output, Stdio};

use common::{Cluster, Place, eventually, have, is_root, skipped};

/// Runs a command that ends by itself; the cluster's processes are not waited for.
fn refused(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.quoin(arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {printed}");
    printed
}

/// Returns `quoin pool run` with the arguments of every pool.
fn pool_run<'a>(
    cluster: &'a Cluster,
    state: &'a str,
    data: &'a str,
    more: &[&'a str],
) -> Vec<&'a str> {
    let mut arguments = vec!["pool", "run", "--state", state, "--data", data];
    arguments.extend(["--controller", &cluster.controller, "--listen", "127.0.0.1:0"]);
    arguments.extend(more);
    arguments
}

#[test]
fn a_refused_pool_uses_no_token_and_leaves_nothing_incomplete() {
    let cluster = Cluster::start("refuse", &Place::here(), &[]);
    let token = cluster.token("pool");
    let (state, data) = (cluster.path("p1"), cluster.path("data"));
    let with_token = ["--join", &token, "--name", "p1"];

    let printed = refused(&cluster, &pool_run(&cluster, &state, &data, &with_token));
    assert!(printed.contains("--capacity"), "{printed}");
    let full: Vec<_> = with_token.iter().copied().chain(["--capacity", "1GiB"]).collect();
    std::fs::create_dir(&data).unwrap();
    std::fs::write(format!("{data}/letter"), "dear").unwrap();
    let printed = refused(&cluster, &pool_run(&cluster, &state, &data, &full));
    assert!(printed.contains("letter") && printed.contains("--data"), "{printed}");
    assert!(!std::path::Path::new(&state).exists(), "an identity was half made");
    assert_eq!(std::fs::read_dir(&data).unwrap().count(), 1, "a pool was half made");

    // A token for another name: nothing stays either.
    let named = cluster.ok(&["token", "create", "--role", "pool", "--name", "p9"]);
    let other = cluster.path("other");
    let wrong = ["--join", &named, "--name", "p1", "--capacity", "1GiB"];
    let printed = refused(&cluster, &pool_run(&cluster, &state, &other, &wrong));
    assert!(printed.contains("p9"), "{printed}");
    assert!(!std::path::Path::new(&state).exists(), "a key is left");

    // A port in use.
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let mut arguments = pool_run(&cluster, &state, &other, &full);
    let listen = arguments.iter().position(|word| *word == "127.0.0.1:0").unwrap();
    arguments[listen] = &address;
    let printed = refused(&cluster, &arguments);
    assert!(printed.contains(&address) && printed.contains("--listen"), "{printed}");
    let error = printed.lines().find(|line| line.contains(&address)).unwrap();
    assert!(error.matches("os error").count() <= 1, "{printed}");

    // A disk that may not be written.
    if is_root() {
        let frozen = cluster.path("frozen");
        std::fs::create_dir(&frozen).unwrap();
        let tmpfs = |flags: &[&str]| {
            let done = Command::new("mount").args(flags).arg(&frozen).status().unwrap();
            assert!(done.success());
        };
        tmpfs(&["-t", "tmpfs", "-o", "ro", "none"]);
        let identified = ["--capacity", "1GiB", "--name", "p1"];
        let printed = cluster.quoin(&pool_run(&cluster, &state, &frozen, &identified));
        let done = Command::new("umount").arg(&frozen).status().unwrap();
        assert!(done.success());
        let printed = String::from_utf8_lossy(&printed.stderr).into_owned();
        assert!(printed.contains("read-write"), "{printed}");
    }
}

#[test]
fn pools_and_nodes_join_by_token_and_leave_when_unused() {
    let mut cluster = Cluster::start("members", &Place::here(), &["--default-spread", "pool"]);
    let place = Place::here();
    for name in ["p1", "p2"] {
        cluster.pool(&place, name, &[]);
    }
    cluster.wait_for_pools(2);
    cluster.node(&place, "n1", &[], &[]);
    for (name, words) in [("p1", "serving"), ("target", "serving"), ("controller", "serving")] {
        eventually("it says that it serves", || cluster.log(name).contains(words).then_some(()));
    }
    let tokens = cluster.json(&["token", "list"]);
    let used = |who: &str| tokens.as_array().unwrap().iter().any(|token| token["usedBy"] == who);
    assert!(used("pool/p1") && used("node/n1"), "{tokens}");

    cluster.ok(&["volume", "create", "db", "--size", "64MiB", "--replicas", "2"]);
    assert!(refused(&cluster, &["pool", "remove", "p2"]).contains("--wait"));
    assert!(refused(&cluster, &["node", "remove", "n1"]).contains("online"));
    assert!(refused(&cluster, &["pool", "remove", "p7"]).contains("does not exist"));

    let at = cluster.processes.iter().position(|process| process.name == "p2").unwrap();
    cluster.processes.remove(at).stop();
    eventually("its end is noticed, and what needs it is named", || {
        refused(&cluster, &["pool", "remove", "p2"]).contains("db").then_some(())
    });
    cluster.ok(&["volume", "delete", "db", "--yes", "--timeout", "1"]);
    cluster.ok(&["pool", "remove", "p2"]);
    assert_eq!(cluster.json(&["pool", "list"]).as_array().unwrap().len(), 1);
    eventually("the volume is gone with the pool that it waited for", || {
        cluster.ok(&["volume", "list"]).contains("no volumes").then_some(())
    });

    // The removed pool's certificate is still valid, and gives it no rights.
    let (state, data) = (cluster.path("p2"), cluster.path("p2-data"));
    let arguments = pool_run(&cluster, &state, &data, &["--name", "p2"]);
    let arguments = arguments.into_iter().map(String::from).collect();
    cluster.run(&place, "p2-again", arguments);
    // The pool ends, with the reason and a status after which a supervisor does not restart it.
    let status = eventually("it ends", || cluster.process("p2-again").ended());
    assert_eq!(status.code(), Some(78));
    assert!(cluster.log("p2-again").contains("was removed"));
    assert_eq!(cluster.json(&["pool", "list"]).as_array().unwrap().len(), 1);

    // The loss of a controller is logged once, and its return is logged.
    let at = cluster.processes.iter().position(|process| process.name == "controller").unwrap();
    cluster.processes.remove(at).stop();
    for name in ["p1", "target"] {
        eventually("it misses the controller", || {
            cluster.log(name).contains("no answer from the controller").then_some(())
        });
    }
}

/// A loop device over a file, freed at the end.
struct Device(String);

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_raw_device_becomes_a_pool_only_if_it_is_blank_and_requested() {
    if !is_root() || !have("losetup") {
        return skipped("a loop device needs root and losetup");
    }
    let mut cluster = Cluster::start("raw", &Place::here(), &[]);
    let file = cluster.path("disk");
    std::fs::File::create(&file).unwrap().set_len(256 << 20).unwrap();
    let made = output("losetup", &["-f", "--show", &file]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let device = Device(String::from_utf8(made.stdout).unwrap().trim().into());
    let (state, token) = (cluster.path("p1"), cluster.token("pool"));
    let plain = ["--name", "p1", "--join", &token];
    let printed = refused(&cluster, &pool_run(&cluster, &state, &device.0, &plain));
    assert!(printed.contains("--format"), "{printed}");

    // The refusal used no token.
    let format = ["--name", "p1", "--format", "--join", &token];
    let arguments = pool_run(&cluster, &state, &device.0, &format);
    let arguments = arguments.into_iter().map(String::from).collect();
    cluster.run(&Place::here(), "p1", arguments);
    cluster.wait_for_pools(1);
    cluster.ok(&["volume", "create", "db", "--size", "1MiB", "--replicas", "1"]);
    let at = cluster.processes.iter().position(|process| process.name == "p1").unwrap();
    cluster.processes.remove(at).stop();
    let phase = cluster.json(&["replica", "list"])[0]["phase"].clone();
    assert_eq!(phase, "Offline", "its pool said that it was leaving");
    let found = cluster.ok(&["pool", "inspect", &device.0]);
    assert!(found.contains("1.0 MiB"), "{found}");
    assert!(cluster.ok(&["pool", "check", &device.0]).contains("sound"));
    // A second --format does not touch the present content.
    let arguments = pool_run(&cluster, &state, &device.0, &format[..3]);
    let arguments = arguments.into_iter().map(String::from).collect();
    cluster.run(&Place::here(), "p1", arguments);
    cluster.eventually("its replica is there again", || {
        let replicas = cluster.json(&["replica", "list"]);
        (replicas[0]["phase"] == "InSync").then_some(())
    });
    let at = cluster.processes.iter().position(|process| process.name == "p1").unwrap();
    cluster.processes.remove(at).stop();
}
