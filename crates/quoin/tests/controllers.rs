//! Two controllers with their records in etcd or in Kubernetes: one of them rules, and the other one takes its place.

use crate::common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{Cluster, Place, Process, User, eventually, free_port, signal};
use quoin_testkit::kubernetes_api::KubernetesApi;

use crate::support::etcd::Etcd;
use crate::terms::{Writer, verify};

const LEASE: [&str; 2] = ["--lease", "5s/3s/500ms"];

/// Two controllers, whose one rules.
struct Two {
    cluster: Cluster,
    addresses: [String; 2],
    users: [User; 2],
    flags: Vec<String>,
}

impl Two {
    fn start(name: &str, store: &[&str]) -> Self {
        let flags = [store, &LEASE].concat();
        let mut cluster = Cluster::made_with(name, &Place::here(), store, &flags);
        let first = cluster.controller.clone();
        let second = format!("127.0.0.1:{}", free_port());
        let state = cluster.path("second");
        let made = cluster.ok(&[&["controller", "init", "--state", &state], store].concat());
        assert!(made.contains("another controller"), "{made}");
        cluster.controller = format!("{first},{second}");
        let logs = cluster.scratch.0.clone();
        let sockets = ["run/admin.sock", "run2/admin.sock"];
        std::fs::create_dir_all(cluster.path("run2")).unwrap();
        let users = sockets.map(|socket| User {
            admin_socket: cluster.scratch.0.join(socket),
            logs: logs.clone(),
        });
        let flags = flags.iter().map(ToString::to_string).collect();
        let mut two = Self { cluster, addresses: [first, second], users, flags };
        two.run(1);
        two
    }

    fn name(place: usize) -> &'static str {
        ["controller", "second"][place]
    }

    fn run(&mut self, place: usize) {
        let (name, socket) = (Self::name(place), &self.users[place].admin_socket);
        let socket = socket.to_str().unwrap().to_owned();
        let mut arguments: Vec<String> = ["controller", "run", "--state"].map(String::from).into();
        arguments.push(self.cluster.path(name));
        arguments.extend(["--admin-socket".into(), socket, "--listen".into()]);
        arguments.push(self.addresses[place].clone());
        arguments.extend(self.flags.clone());
        self.cluster.run(&Place::here(), name, arguments);
    }

    fn take(&mut self, place: usize) -> Process {
        let processes = &mut self.cluster.processes;
        let at = processes.iter().position(|process| process.name == Self::name(place)).unwrap();
        processes.remove(at)
    }

    /// Ends a controller, and returns how long it took until the other one answered.
    fn end(&mut self, place: usize, name: &str) -> Duration {
        let mut process = self.take(place);
        signal(process.pid(), name);
        let began = Instant::now();
        let other = &self.users[1 - place];
        eventually("the other controller rules", || other.rules().then_some(()));
        let took = began.elapsed();
        eventually("it has ended", || process.ended());
        took
    }
}

impl User {
    fn rules(&self) -> bool {
        self.quoin(&["cluster", "info"]).status.success()
    }

    fn term(&self) -> u64 {
        self.json(&["cluster", "info"])["term"].as_u64().unwrap()
    }
}

/// Proves that a controller that ends, and one that is killed, is followed by the other one, in a term of its own,
/// that members turn to it, and that no write of a client fails or waits for it.
#[test]
fn a_controller_that_is_lost_is_followed_by_the_other_one_and_no_write_waits_for_it() {
    let scratch = common::Scratch::new("controllers-etcd");
    let etcd = Etcd::start(&scratch.0);
    let mut two = Two::start("controllers", &etcd.flags());
    a_lost_controller_is_followed(&mut two);
}

fn a_lost_controller_is_followed(two: &mut Two) {
    let here = Place::here();
    for pool in ["pool-a", "pool-b", "pool-c"] {
        two.cluster.pool(&here, pool, &[]);
    }
    two.cluster.wait_for_pools(3);
    two.cluster.node(&here, "h1", &[], &[]);
    let create = ["volume", "create", "db", "--size", "16MiB", "--spread", "pool"];
    two.users[0].ok(&create);
    let run = two.cluster.path("run");
    let attach = ["volume", "attach", "db", "--nbd", "--node", "h1", "--run", &run];
    let uri = two.users[0].ok(&attach);
    let socket = uri.split("socket=").nth(1).unwrap().to_owned();
    let writer = Writer::start(&socket, 1, Arc::new(Mutex::new(BTreeMap::new())));
    writer.assert_progress("the volume is written");
    let first_term = two.users[0].term();
    let refused = two.users[1].quoin(&["cluster", "info"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("rules: ask that one"), "{said}");

    let took = two.end(0, "TERM");
    println!("after SIGTERM the other controller ruled in {took:?}");
    assert!(took < Duration::from_secs(4), "it does not wait for the lease: {took:?}");
    assert_eq!(two.users[1].term(), first_term + 1);
    writer.assert_progress("writes go on without the first controller");
    eventually("members turn to it, and it places a volume", || {
        let create = ["volume", "create", "second", "--size", "16MiB", "--spread", "pool"];
        two.users[1].quoin(&create).status.success().then_some(())
    });
    eventually("the node reports to it", || {
        let nodes = two.users[1].json(&["node", "list"]);
        nodes.as_array()?.iter().all(|node| node["state"] == "Online").then_some(())
    });

    two.run(0);
    let took = two.end(1, "KILL");
    println!("after kill -9 the other controller ruled in {took:?}");
    assert_eq!(two.users[0].term(), first_term + 2);
    let listed = two.users[0].json(&["volume", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 2, "what was acknowledged is there: {listed}");
    writer.assert_progress("writes go on without the second controller");
    two.users[0].ok(&["volume", "delete", "second", "--yes"]);
    let written = writer.end();
    verify(&socket, &written);
}

/// Proves that a member of etcd that is lost is replaced by the next one, and that without a majority a controller
/// answers questions and changes nothing, while clients write on.
#[test]
fn without_a_majority_of_etcd_questions_are_answered_and_nothing_changes() {
    let scratch = common::Scratch::new("controllers-cut-etcd");
    let mut etcd = Etcd::start(&scratch.0);
    let mut two = Two::start("controllers-cut", &etcd.flags());
    let here = Place::here();
    for pool in ["pool-a", "pool-b", "pool-c"] {
        two.cluster.pool(&here, pool, &[]);
    }
    two.cluster.wait_for_pools(3);
    let (user, other) = (&two.users[0], &two.users[1]);
    let create_by = |user: &User, name: &str| {
        user.quoin(&[
            "volume",
            "create",
            name,
            "--size",
            "16MiB",
            "--spread",
            "pool",
            "--timeout",
            "5",
        ])
    };
    let create = |name: &str| create_by(user, name);
    assert!(create("one").status.success());
    // The member that is asked first goes.
    etcd.kill(0);
    eventually("the next member is asked", || create("two").status.success().then_some(()));
    etcd.signal(1, "STOP");
    eventually("changes are refused", || {
        let refused = create("three");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        (!refused.status.success() && (said.contains("lease") || said.contains("etcd")))
            .then_some(())
    });
    let listed = user.json(&["pool", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 3, "questions are answered");
    etcd.signal(1, "CONT");
    etcd.run(0);
    // The lease was over, so members were sent on: the other controller rules, and the first one has ended.
    eventually("a controller rules, and makes a volume", || {
        [user, other].iter().any(|user| create_by(user, "four").status.success()).then_some(())
    });
}

/// Proves the same with the records in Kubernetes' API, which loses answers and is away for a while, and that a
/// controller whose records somebody else changes ends and is followed by one that reads them anew.
#[test]
fn records_in_kubernetes_have_one_controller_that_rules_and_no_change_by_others_goes_unseen() {
    let scratch = common::Scratch::new("controllers-kubernetes");
    let api = KubernetesApi::start();
    let (token, address) = (scratch.0.join("token"), api.address());
    std::fs::write(&token, "of.the.pod").unwrap();
    let place = ["--kubernetes-api", &address, "--kubernetes-namespace", "quoin"];
    let caller = ["--kubernetes-token", token.to_str().unwrap()];
    let flags = [&["--store", "kubernetes"], &place[..], &caller].concat();
    let mut two = Two::start("controllers-k8s", &flags);
    a_lost_controller_is_followed(&mut two);
    two.run(1);

    let create = |name: &str| {
        let size = ["--size", "16MiB", "--spread", "pool", "--timeout", "5"];
        let outcome = two.users[0].quoin(&[&["volume", "create", name], &size[..]].concat());
        outcome.status.success()
    };
    // The change is made though its answer is lost: it is not made twice, and not forgotten.
    api.lose_answers(1);
    create("third");
    eventually("the volume is there once", || create("third").then_some(()));
    let names = || {
        let listed = two.users[0].json(&["volume", "list"]);
        let listed = listed.as_array().unwrap().clone();
        listed.iter().map(|volume| volume["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["db", "third"]);
    api.set_away(true);
    eventually("nothing changes while the API is away", || (!create("fourth")).then_some(()));
    assert_eq!(names(), ["db", "third"], "questions are answered");
    api.set_away(false);
    eventually("a controller rules again", || {
        two.users
            .iter()
            .any(|user| user.rules() && user.quoin(&["volume", "get", "third"]).status.success())
            .then_some(())
    });

    let ruler = usize::from(!two.users[0].rules());
    let changed = api.names("records").into_iter().find(|name| name.contains("volume")).unwrap();
    let mut object = api.object("records", &changed).unwrap();
    object["spec"]["rule"] = serde_json::json!(1_000_000);
    api.change("records", &changed, Some(object));
    let mut former = two.take(ruler);
    eventually("the controller that ruled has ended", || former.ended());
    let log = two.users[0].log(Two::name(ruler));
    assert!(log.contains("was changed by somebody else"), "{log}");
    eventually("the other one rules", || two.users[1 - ruler].rules().then_some(()));
    let get = two.users[1 - ruler].json(&["volume", "get", "third"]);
    assert_eq!(get["name"], "third", "{get}");
}
