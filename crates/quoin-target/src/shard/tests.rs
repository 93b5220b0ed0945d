//! A real shard on real sockets, whose rounds the test runs one by one.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use bytes::BytesMut;
use quoin_api::control::MemberKeys;
use quoin_identity::Role;
use quoin_nbd::{Description, Session, TlsPolicy, VolumeExport};
use quoin_replication::primary::{OnFull, OnQuorumLoss, ReadMode};
use quoin_types::block::{BlockError, Operation};

use super::*;
use crate::client::{SharedUse, User};
use crate::dial::Reach;
use crate::standing::Holder;

pub(super) const VOLUME: VolumeId = VolumeId(7);

pub(super) fn shard() -> (Shard, ShardHandle) {
    let (asks, asked) = tokio::sync::mpsc::unbounded_channel();
    // No test reads what the shard asks of the control thread.
    drop(asked);
    let (notices, metrics) = (Notices::default(), Metrics::new(true));
    let dials = Dials::new(Reach::PlainLoopback, metrics.dials.clone());
    Shard::new(&dials, 1 << 20, asks, notices, metrics).unwrap()
}

pub(super) fn setup() -> VolumeSetup {
    let config = PrimaryConfig {
        volume: VOLUME,
        volume_blocks: 64,
        logical_block_size: 512,
        durability: quoin_types::Durability::Cache,
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
        read_only: false,
        lease_ms: 1000,
        open_grace_ms: 500,
        drop_after_ms: 2000,
        window_bytes: 1 << 20,
        sync_bytes: 1 << 20,
        sync_after_ms: 1000,
        local: None,
    };
    VolumeSetup {
        options_version: 0,
        config,
        info: info(),
        since_epoch: 0,
        limits: Limits::default(),
        socket: None,
        is_encrypted: false,
        key: None,
        replicas: Vec::new(),
        desired: Default::default(),
        verify: None,
        client: 0,
        sharers: Vec::new(),
        feed: None,
        seed: 1,
    }
}

fn info() -> DeviceInfo {
    DeviceInfo { name: "db".into(), size_bytes: 64 << 12, block_size: 512, read_only: false }
}

fn one_round(shard: &mut Shard) -> Vec<Ready> {
    let mut ready = Vec::new();
    shard.serve_round(Some(Duration::from_secs(10)), &mut ready).unwrap();
    ready
}

/// A client on the volume's socket that has opened it.
fn opened(shard: &mut Shard, path: &std::path::Path) -> UnixStream {
    let mut client = UnixStream::connect(path).unwrap();
    one_round(shard);
    let mut opening = 3_u32.to_be_bytes().to_vec();
    opening.extend(b"IHAVEOPT");
    // Export by name, and the length of the name.
    opening.extend([1_u32, 2].map(u32::to_be_bytes).concat());
    opening.extend(b"db");
    client.write_all(&opening).unwrap();
    one_round(shard);
    client
}

fn write_request() -> Vec<u8> {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend([0_u16, 1].map(u16::to_be_bytes).concat());
    request.extend([9_u64, 0].map(u64::to_be_bytes).concat());
    request.extend(512_u32.to_be_bytes());
    request.extend([b'o'; 512]);
    request
}

/// A client over TCP that has sent a read, and the other end of its connection.
fn next_client() -> (NewClient, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let socket = listener.accept().unwrap().0;
    socket.set_nonblocking(true).unwrap();
    let (description, numbering) = (Description { since_epoch: 0 }, Default::default());
    let export = VolumeExport { device: info(), description, numbering };
    let limits = quoin_nbd::Limits::default();
    let session = Session::over(Box::new(export), TlsPolicy::Plain, limits);
    let operation = Operation::Read { offset: 0, length: 512 };
    let read = Request { token: 1, operation, origin: None };
    let (input, requests, life) = (BytesMut::new(), vec![read], None);
    (NewClient { socket, session, input, requests, life, user: None, from: None }, there)
}

fn requests(shard: &Shard, kind: &str) -> u64 {
    let text = shard.reports.metrics.render();
    let start = format!("quoin_target_requests_total{{operation=\"{kind}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().parse().unwrap()
}

#[test]
fn a_request_on_the_socket_of_a_volume_is_submitted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let (mut shard, _handle) = shard();
    shard.open(now(), VolumeSetup { socket: Some(path.clone()), ..setup() });
    let mut client = opened(&mut shard, &path);
    client.write_all(&write_request()).unwrap();
    one_round(&mut shard);
    assert_eq!(requests(&shard, "write"), 1);
}

#[test]
fn waits_poll_while_few_requests_are_under_way_and_not_beside_many() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let (mut shard, _handle) = shard();
    shard.open(now(), VolumeSetup { socket: Some(path.clone()), ..setup() });
    let mut client = opened(&mut shard, &path);
    // No replica is there, so none of them is answered.
    client.write_all(&write_request().repeat(POLLED_REQUESTS - 1)).unwrap();
    one_round(&mut shard);
    assert!(shard.open_requests == POLLED_REQUESTS - 1 && shard.sources.reactor.polls());
    client.write_all(&write_request()).unwrap();
    one_round(&mut shard);
    assert!(shard.open_requests == POLLED_REQUESTS && !shard.sources.reactor.polls());
    // All are abandoned with their client.
    drop(client);
    one_round(&mut shard);
    shard.event(now(), VOLUME, PrimaryEvent::Shutdown);
    shard.finish_round();
    assert!(shard.open_requests == 0 && shard.sources.reactor.polls(), "{}", shard.open_requests);
}

/// The next client may have been acknowledged a write that a late one of the former client would
/// undo.
#[test]
fn unread_requests_of_a_broken_connection_are_dropped_before_the_next_client_is_taken() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let (mut shard, handle) = shard();
    shard.open(now(), VolumeSetup { socket: Some(path.clone()), ..setup() });
    let mut former = opened(&mut shard, &path);
    let volume = &shard.volumes[&VOLUME];
    let former_key = volume.export.clients()[0];
    former.write_all(&write_request()).unwrap();
    drop(former);
    let (next, _there) = next_client();
    handle.send(Input::Client(VOLUME, Box::new(next)));

    // Both are in one round: the end of the one, the arrival of the other.
    let ready = one_round(&mut shard);
    assert!(ready.iter().any(|ready| ready.key == former_key && ready.broken));
    assert_eq!(requests(&shard, "read"), 1, "the next client was not taken in this round");
    assert_eq!(requests(&shard, "write"), 0, "a late write of the former client was submitted");
    let clients = shard.volumes[&VOLUME].export.clients();
    assert!(clients.len() == 1 && clients[0] != former_key, "{clients:?}");
}

/// The standing of one who came over TLS.
fn user(role: Role, name: &str, key_hash: &str, shares: Option<bool>) -> Option<User> {
    let holder = Holder { role, name: name.into(), key_hash: key_hash.into() };
    let shares = shares.map(|read_only| SharedUse { read_only, client: 0 });
    Some(User { holder, shares })
}

/// Has these clients open the volume; returns the other ends of their connections.
fn with_users(shard: &mut Shard, users: &[Option<User>]) -> Vec<TcpStream> {
    let ends = users.iter().map(|user| {
        let (client, there) = next_client();
        shard.adopt(now(), VOLUME, NewClient { user: user.clone(), ..client });
        there
    });
    ends.collect()
}

fn keys_of(role: &str, name: &str, key_hash: &str) -> MemberKeys {
    MemberKeys { role: role.into(), name: name.into(), key_hashes: vec![key_hash.into()] }
}

/// Clients that are still connected, by the hashes of their keys; `-`: one who showed none.
fn connected(shard: &Shard) -> Vec<String> {
    let clients = shard.volumes[&VOLUME].export.clients();
    let keys = clients.iter().filter_map(|key| match shard.sources.slots.get(key) {
        Some(Slot::Client(client)) => Some(match &client.user {
            Some(user) => user.holder.key_hash.clone(),
            None => "-".to_owned(),
        }),
        _ => None,
    });
    keys.collect()
}

#[test]
fn connections_end_when_the_keys_that_opened_them_count_no_more_and_others_stay() {
    let (mut shard, handle) = shard();
    let sharer = |keys: &[&str]| Sharer {
        node: "n2".into(),
        read_only: false,
        key_hashes: keys.iter().map(ToString::to_string).collect(),
        client: 0,
    };
    shard.open(now(), VolumeSetup { sharers: vec![sharer(&["s", "s-next"])], ..setup() });
    let users = [
        None,
        user(Role::Admin, "ops", "a", None),
        user(Role::Admin, "removed", "r", None),
        user(Role::Node, "n1", "own", None),
        user(Role::Node, "n2", "s", Some(false)),
    ];
    let _there = with_users(&mut shard, &users);
    assert_eq!(connected(&shard), ["-", "a", "r", "own", "s"]);
    let openers = [keys_of("admin", "ops", "a"), keys_of("node", "n1", "own")];
    handle.send(Input::Openers(Openers::of(&openers)));
    one_round(&mut shard);
    assert_eq!(connected(&shard), ["-", "a", "own", "s"], "sharers go by their volume's list");
    handle.send(Input::Openers(Openers::of(&[
        keys_of("admin", "ops", "next"),
        keys_of("node", "n1", "own"),
    ])));
    one_round(&mut shard);
    assert_eq!(connected(&shard), ["-", "own", "s"]);
    shard.let_in(now(), VOLUME, 0, vec![sharer(&["s-next"])], 1);
    assert_eq!(connected(&shard), ["-", "own"]);
    // The former key does not come in again, nor does it end the connection of the next one.
    let _there = with_users(&mut shard, &[user(Role::Node, "n2", "s-next", Some(false))]);
    let _other = with_users(&mut shard, &[user(Role::Node, "n2", "s", Some(false))]);
    assert_eq!(connected(&shard), ["-", "own", "s-next"]);
}

#[test]
fn a_volume_that_becomes_read_only_keeps_no_client_that_was_told_otherwise() {
    let (mut shard, _handle) = shard();
    let sharer =
        Sharer { node: "n2".into(), read_only: false, key_hashes: vec!["s".into()], client: 0 };
    shard.open(now(), VolumeSetup { sharers: vec![sharer.clone()], ..setup() });
    let users =
        [None, user(Role::Node, "n1", "own", None), user(Role::Node, "n2", "s", Some(false))];
    let _there = with_users(&mut shard, &users);
    let update = |read_only| VolumeUpdate {
        volume: VOLUME,
        socket: None,
        key: None,
        read_only,
        client: 0,
        since_epoch: 0,
        size_bytes: 0,
        limits: Limits::default(),
        options: live_options(),
        replicas: Vec::new(),
        desired: Default::default(),
        verify: None,
        sharers: vec![sharer.clone()],
        feed: None,
    };
    shard.update(now(), update(false));
    assert_eq!(connected(&shard), ["-", "own", "s"]);
    shard.update(now(), update(true));
    assert_eq!(connected(&shard), ["s"], "the other node writes on");
}

fn live_options() -> LiveOptions {
    let config = setup().config;
    LiveOptions {
        version: 0,
        durability: config.durability,
        on_quorum_loss: config.on_quorum_loss,
        on_full: config.on_full,
        reads: config.reads,
    }
}

/// Every pair of rights that a sharer may have before and after a change, with the way back.
#[test]
fn a_sharer_with_another_right_connects_anew_and_the_former_right_lets_nobody_in() {
    let right = |read_only, client| Some((read_only, client));
    let rights = [None, right(true, 0), right(false, 0), right(false, 4), right(false, 6)];
    let sharers = |right: Option<(bool, u64)>| -> Vec<Sharer> {
        let sharer = right.map(|(read_only, client)| Sharer {
            node: "n2".into(),
            read_only,
            key_hashes: vec!["s".into()],
            client,
        });
        let other =
            Sharer { node: "n3".into(), read_only: true, key_hashes: vec!["o".into()], client: 0 };
        sharer.into_iter().chain([other]).collect()
    };
    let user_of = |right: Option<(bool, u64)>| {
        let (read_only, client) = right.unwrap_or((false, 0));
        let holder = Holder { role: Role::Node, name: "n2".into(), key_hash: "s".into() };
        Some(User { holder, shares: Some(SharedUse { read_only, client }) })
    };
    let (mut shard, _handle) = shard();
    shard.open(now(), setup());
    let mut version = 1;
    for before in rights {
        for after in rights {
            version += 2;
            shard.let_in(now(), VOLUME, 0, sharers(before), version);
            let _there = with_users(&mut shard, &[user_of(before)]);
            let _other = with_users(&mut shard, &[user(Role::Node, "n3", "o", Some(true))]);
            let is_in = |shard: &Shard| connected(shard).contains(&"s".to_owned());
            assert_eq!(is_in(&shard), before.is_some(), "{before:?}");
            shard.let_in(now(), VOLUME, 0, sharers(after), version + 1);
            let stays = before.is_some() && before == after;
            assert_eq!(is_in(&shard), stays, "{before:?} and then {after:?}");
            assert!(connected(&shard).contains(&"o".to_owned()), "the other one is not concerned");
            // A client of the former right comes late, and one of the present right comes.
            let late = before.map(|_| user_of(before));
            let _late = with_users(&mut shard, late.as_slice());
            assert_eq!(is_in(&shard), stays, "{before:?} and then {after:?}");
            let _there = with_users(&mut shard, &[user_of(after)]);
            assert_eq!(is_in(&shard), after.is_some(), "{before:?} and then {after:?}");
            shard.let_in(now(), VOLUME, 0, Vec::new(), version + 1);
            assert_eq!(connected(&shard), [""; 0]);
        }
    }
}

#[test]
fn clients_are_fenced_by_their_address_and_by_the_name_of_their_node() {
    let (mut shard, handle) = shard();
    let sharer =
        Sharer { node: "n2".into(), read_only: false, key_hashes: vec!["s".into()], client: 0 };
    shard.open(now(), VolumeSetup { sharers: vec![sharer], ..setup() });
    let come = [
        (None, None),
        (user(Role::Admin, "ops", "near", None), Some("192.0.2.1")),
        (user(Role::Admin, "ops", "far", None), Some("198.51.100.1")),
        (user(Role::Node, "n1", "own", None), Some("198.51.100.2")),
        (user(Role::Node, "n2", "s", Some(false)), Some("198.51.100.3")),
    ];
    let mut there = Vec::new();
    for (user, from) in come {
        let (client, end) = next_client();
        let from = from.map(|from| from.parse().unwrap());
        shard.adopt(now(), VOLUME, NewClient { user, from, ..client });
        there.push(end);
    }
    let mut fence = |blocks: &[&str], nodes: &[&str]| {
        let all = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let told = quoin_api::control::Fences { digest: 1, blocks: all(blocks), nodes: all(nodes) };
        let (done, mut is_done) = tokio::sync::oneshot::channel();
        handle.send(Input::Fences(Fences::of(&told), done));
        one_round(&mut shard);
        is_done.try_recv().expect("it is told once it is done");
        connected(&shard)
    };
    assert_eq!(fence(&["203.0.113.0/24"], &["n9"]), ["-", "near", "far", "own", "s"]);
    assert_eq!(fence(&["192.0.2.1/32"], &[]), ["-", "far", "own", "s"]);
    assert_eq!(fence(&[], &["n2"]), ["-", "far", "own"]);
    assert_eq!(fence(&[], &["n1", "ops"]), ["-", "far"], "an admin is no node");
    assert_eq!(fence(&["0.0.0.0/0"], &[]), ["-"], "a client of this host");
}

#[test]
fn a_volume_takes_as_many_clients_as_are_allowed_and_one_more_when_one_has_gone() {
    let (mut shard, _handle) = shard();
    shard.open(now(), setup());
    let mut there = with_users(&mut shard, &vec![None; 63]);
    assert_eq!(connected(&shard).len(), 63);
    there.extend(with_users(&mut shard, &[None]));
    assert_eq!(connected(&shard).len(), 64);
    let _refused = with_users(&mut shard, &[None, None]);
    assert_eq!(connected(&shard).len(), 64);
    drop(there.pop());
    one_round(&mut shard);
    assert_eq!(connected(&shard).len(), 63);
    let _next = with_users(&mut shard, &[None, None]);
    assert_eq!(connected(&shard).len(), 64);
}

fn update(shard: &mut Shard, change: impl FnOnce(&mut VolumeUpdate)) {
    let mut update = VolumeUpdate {
        volume: VOLUME,
        socket: None,
        key: None,
        read_only: false,
        client: 0,
        since_epoch: 0,
        size_bytes: 0,
        limits: Limits::default(),
        options: live_options(),
        replicas: Vec::new(),
        desired: Default::default(),
        verify: None,
        sharers: Vec::new(),
        feed: None,
    };
    change(&mut update);
    shard.update(now(), update);
}

#[test]
fn a_volume_grows_below_its_clients_and_never_shrinks() {
    let (mut shard, _handle) = shard();
    shard.open(now(), setup());
    let _there = with_users(&mut shard, &[None]);
    let size = 64 << 12;
    let mut told = |size_bytes: u64| {
        update(&mut shard, |update| update.size_bytes = size_bytes);
        let export = &shard.volumes[&VOLUME].export;
        let Some(Slot::Client(_)) = shard.sources.slots.get(&export.clients()[0]) else { panic!() };
        export.info.size_bytes
    };
    for (size_bytes, is) in [
        (0, size),
        (size - 4096, size),
        (size, size),
        (size + 4096, size + 4096),
        (size + 4095, size + 4096),
        (size, size + 4096),
        (2 * size, 2 * size),
    ] {
        assert_eq!(told(size_bytes), is, "{size_bytes}");
    }
}

/// The key goes with its use: whoever had the volume open by it is gone before the volume is locked.
#[test]
fn a_volume_whose_key_was_taken_away_has_neither_its_clients_nor_a_socket() {
    let user = quoin_encryption::UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
    let encryption = quoin_encryption::Encryption::create(&user, "a").unwrap();
    let key = encryption.unlock(&user).unwrap().key;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let (mut shard, _handle) = shard();
    shard.open(now(), VolumeSetup { is_encrypted: true, ..setup() });
    let _refused = with_users(&mut shard, &[None]);
    assert_eq!(connected(&shard), [""; 0], "it has no key");
    for _ in 0..2 {
        update(&mut shard, |update| {
            (update.socket, update.key) = (Some(path.clone()), Some(key.clone()));
        });
        assert!(path.exists());
        let _there = with_users(&mut shard, &[None]);
        let _here = opened(&mut shard, &path);
        assert_eq!(connected(&shard), ["-", "-"]);
        update(&mut shard, |_| {});
        assert_eq!(connected(&shard), [""; 0]);
        assert!(!path.exists() && shard.volumes[&VOLUME].sealing.is_locked());
        let _late = with_users(&mut shard, &[None]);
        assert_eq!(connected(&shard), [""; 0]);
    }
}

#[test]
fn an_answer_for_a_client_that_has_gone_is_given_to_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let (mut shard, _handle) = shard();
    shard.open(now(), VolumeSetup { socket: Some(path.clone()), ..setup() });
    let mut former = opened(&mut shard, &path);
    former.write_all(&write_request()).unwrap();
    one_round(&mut shard);
    let tokens = shard.volumes[&VOLUME].export.tokens.open();
    assert_eq!(tokens, 1);
    drop(former);
    one_round(&mut shard);
    let mut next = opened(&mut shard, &path);
    next.set_nonblocking(true).unwrap();
    std::io::Read::read(&mut next, &mut [0; 256]).unwrap();
    // The state machine answers what the first client asked.
    for token in [0, 1, u64::MAX] {
        let reply = quoin_types::block::Reply { token, result: Err(BlockError::Stopped) };
        shard.reply(VOLUME, reply);
    }
    shard.finish_round();
    let left = std::io::Read::read(&mut next, &mut [0; 256]);
    assert_eq!(left.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}
