//! Two clusters that are peers: pairing, and links that go on through all that changes on either side.

use crate::common;

use common::{Cluster, Place, eventually, free_port, signal};

/// Starts a mirror that listens on this port; it joins where it has no identity yet.
fn mirror(cluster: &mut Cluster, name: &str, port: u16, flags: &[&str]) {
    let state = cluster.path(&format!("mirror-{name}"));
    let is_new = !std::path::Path::new(&state).join("cert.pem").exists();
    let listen = format!("127.0.0.1:{port}");
    let mut arguments = ["mirror", "run", "--name", name, "--state", &state, "--listen", &listen]
        .map(String::from)
        .to_vec();
    arguments.extend(["--controller".into(), cluster.controller.clone()]);
    if is_new {
        arguments.extend(["--join".into(), cluster.token("mirror")]);
    }
    arguments.extend(flags.iter().map(ToString::to_string));
    cluster.run(&Place::here(), name, arguments);
}

fn ended(cluster: &mut Cluster, name: &str) -> common::Process {
    let place = cluster.processes.iter().position(|process| process.name == name).unwrap();
    cluster.processes.remove(place)
}

/// The one peer of a cluster.
fn peer(cluster: &Cluster) -> serde_json::Value {
    let peers = cluster.json(&["mirror", "peers"]);
    let peers = peers.as_array().unwrap();
    assert_eq!(peers.len(), 1, "{peers:?}");
    peers[0].clone()
}

fn linked(cluster: &Cluster, what: &str, holds: impl Fn(&serde_json::Value) -> bool) {
    let is_fresh = |peer: &serde_json::Value| peer["heardMs"].as_u64().is_some_and(|ms| ms < 5000);
    cluster.eventually(what, || {
        let peer = peer(cluster);
        let is_linked = peer["state"] == "linked" && peer["linkAddress"] != "";
        (is_linked && is_fresh(&peer) && holds(&peer)).then_some(())
    });
}

fn reasons(cluster: &Cluster) -> Vec<String> {
    let events = cluster.ok(&["events", "-o", "json"]);
    let events: Vec<serde_json::Value> = serde_json::from_str(&events).unwrap();
    events.iter().map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
}

fn refused(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.quoin(arguments);
    assert!(!output.status.success(), "{arguments:?} was not refused");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn two_clusters_pair_by_a_token_that_works_for_one_of_them_and_once_more_for_the_same() {
    let here = Place::here();
    let [east, west, third] =
        ["pair-east", "pair-west", "pair-third"].map(|name| Cluster::start(name, &here, &[]));
    let away = format!("127.0.0.1:{}", free_port());
    let invite = ["mirror", "invite", "--name", "west", "--address", &away];
    // The first address leads nowhere.
    let token = east.ok(&[&invite[..], &["--address", &east.controller]].concat());
    let wrong = refused(&west, &["mirror", "pair", "quoin-pair-1.nonsense"]);
    assert!(wrong.contains("token"), "{wrong}");
    let itself = refused(&east, &["mirror", "pair", &token]);
    assert!(itself.contains("this cluster itself"), "{itself}");
    let nowhere = east.ok(&invite);
    let unreached = refused(&west, &["mirror", "pair", &nowhere]);
    assert!(unreached.contains(&away) && unreached.contains("same token"), "{unreached}");

    west.ok(&["mirror", "pair", "--name", "east", &token]);
    west.ok(&["mirror", "pair", &token]);
    assert_eq!(peer(&west)["name"], "east", "a repeat changes no name");
    assert_eq!(peer(&east)["name"], "west");
    assert_eq!(peer(&east)["state"], "no mirror here");
    let taken = refused(&third, &["mirror", "pair", &token]);
    assert!(taken.contains("unknown, used or expired"), "{taken}");
    assert_eq!(third.json(&["mirror", "peers"]).as_array().unwrap().len(), 0);
    // Nobody joins with such a token, and no member's token pairs.
    let listed = east.json(&["token", "list"]);
    let of_peers = |token: &&serde_json::Value| token["role"] == "peer";
    assert_eq!(listed.as_array().unwrap().iter().filter(of_peers).count(), 2);
    let member = refused(&west, &["mirror", "pair", &east.token("mirror")]);
    assert!(member.contains("quoin-pair-1"), "{member}");

    let back = peer(&east)["clusterId"].as_str().unwrap()[..12].to_owned();
    east.ok(&["mirror", "unpair", &back]);
    let used = refused(&west, &["mirror", "pair", &token]);
    assert!(used.contains("unknown, used or expired"), "a used token brings nobody back: {used}");
    let unknown = refused(&east, &["mirror", "unpair", "west"]);
    assert!(unknown.contains("does not exist"), "{unknown}");
    assert!(reasons(&east).contains(&"PeerUnpaired".to_owned()));
}

#[test]
fn links_of_peers_go_on_through_killed_mirrors_new_addresses_and_new_authorities() {
    let here = Place::here();
    let mut east = Cluster::start("peers-east", &here, &[]);
    let mut west = Cluster::start("peers-west", &here, &[]);
    mirror(&mut east, "m1", free_port(), &[]);
    mirror(&mut west, "m1", free_port(), &[]);
    // A pairing before the mirrors have said where they are is made again.
    west.eventually("each side knows where the other's mirror is", || {
        let invite = ["mirror", "invite", "--name", "west", "--address", &east.controller];
        west.ok(&["mirror", "pair", "--name", "east", &east.ok(&invite)]);
        let known = [&east, &west].map(|side| peer(side)["addresses"].as_array().unwrap().len());
        (known == [1, 1]).then_some(())
    });
    linked(&east, "east hears west", |_| true);
    linked(&west, "west hears east", |_| true);

    // Another mirror takes over where the first is killed.
    mirror(&mut west, "m2", free_port(), &[]);
    linked(&east, "both mirrors of the west are known", |peer| {
        peer["addresses"].as_array().unwrap().len() == 2 && peer["keys"] == 2
    });
    drop(ended(&mut west, "m1"));
    linked(&west, "m2 leads", |peer| peer["linkMirror"] == "m2");
    west.ok(&["mirror", "remove", "m1"]);
    linked(&east, "the key and the address of the removed one are forgotten", |peer| {
        peer["addresses"].as_array().unwrap().len() == 1 && peer["keys"] == 1
    });
    linked(&east, "east has a link to m2", |peer| {
        peer["addresses"].as_array().unwrap().contains(&peer["linkAddress"])
    });

    // A mirror that moves is found again by itself.
    let port = free_port();
    ended(&mut west, "m2").stop();
    mirror(&mut west, "m2", port, &[]);
    let moved = format!("127.0.0.1:{port}");
    linked(&east, "the new address is known and used", |peer| peer["linkAddress"] == *moved);

    // An authority is changed over with links up, and a link that is made anew is trusted too.
    west.ok(&["cluster", "rotate-authority"]);
    linked(&east, "the link stays", |_| true);
    let first = ended(&mut west, "m2");
    signal(first.pid(), "KILL");
    drop(first);
    mirror(&mut west, "m2", port, &[]);
    linked(&east, "a new link is made", |_| true);
    eventually("the change is an event", || {
        reasons(&east).contains(&"PeerChanged".to_owned()).then_some(())
    });

    // A restart of the controllers forgets no peer and no address.
    for side in [&mut east, &mut west] {
        let controller = ended(side, "controller");
        signal(controller.pid(), "KILL");
        drop(controller);
        let (state, socket) = (side.path("controller"), side.path("run/admin.sock"));
        let mut arguments = ["controller", "run", "--state", &state, "--admin-socket", &socket]
            .map(String::from)
            .to_vec();
        arguments.extend(["--listen".into(), side.controller.clone()]);
        side.run(&here, "controller", arguments);
        side.eventually("the controller answers", || {
            side.quoin(&["cluster", "info"]).status.success().then_some(())
        });
    }
    linked(&east, "east hears west again", |_| true);
    linked(&west, "west hears east again", |_| true);

    // A former peer is cut off at once.
    east.ok(&["mirror", "unpair", "west"]);
    west.eventually("east is not heard any more", || {
        let heard = peer(&west)["heardMs"].as_u64().unwrap();
        (heard > 6000).then_some(())
    });
    let message = peer(&west)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("does not know this cluster"), "{message}");
    ended(&mut west, "m2").stop();
    west.eventually("no mirror runs", || (peer(&west)["state"] == "no mirror here").then_some(()));
}
