//! The Replication service over a real controller, and brains of a second cluster.

use std::collections::HashMap;
use std::time::Duration;

use quoin_api::csi::*;
use quoin_api::csi_addons::replication::controller_client::ControllerClient as Client;
use quoin_api::csi_addons::replication::get_volume_replication_info_response::Status as State;
use quoin_api::csi_addons::replication::replication_destination::Type as Destination;
use quoin_api::csi_addons::replication::replication_source::*;
use quoin_api::csi_addons::replication::*;
use quoin_cluster::mirror::record::Points;
use quoin_cluster::mirror::{Record, Role};
use quoin_csi::{Callers, Mode};
use quoin_types::ids::PointId;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::common::peer::{Answers, Mirrors, Peer};
use crate::common::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rpc {
    Enable,
    Disable,
    Promote,
    Demote,
    Resync,
    Info,
}

use Rpc::*;

const ALL: [Rpc; 6] = [Enable, Disable, Promote, Demote, Resync, Info];
/// Calls that change something.
const CHANGES: [Rpc; 5] = [Enable, Disable, Promote, Demote, Resync];

#[derive(Clone, Default)]
struct Asked {
    volume_id: String,
    replication_source: Option<ReplicationSource>,
    replication_id: String,
    parameters: HashMap<String, String>,
    secrets: HashMap<String, String>,
    force: bool,
    timeout: Option<Duration>,
}

/// Source as clients of the first edition name it.
fn by_id(id: &str) -> Asked {
    Asked { volume_id: id.to_owned(), ..Default::default() }
}

/// Source as clients of 2026 name it.
fn by_source(source: ReplicationSource) -> Asked {
    Asked { replication_source: Some(source), ..Default::default() }
}

fn volume(id: &str) -> ReplicationSource {
    let source = VolumeSource { volume_id: id.to_owned() };
    ReplicationSource { r#type: Some(Type::Volume(source)) }
}

fn group(id: &str) -> ReplicationSource {
    let source = VolumeGroupSource { volume_group_id: id.to_owned() };
    ReplicationSource { r#type: Some(Type::Volumegroup(source)) }
}

fn snapshot(id: &str) -> ReplicationSource {
    let source = VolumeSnapshotSource { volume_snapshot_id: id.to_owned() };
    ReplicationSource { r#type: Some(Type::Volumesnapshot(source)) }
}

/// Makes a call; true: it says that a copy is ready.
async fn ask(client: &Client<Channel>, rpc: Rpc, asked: Asked) -> Result<Response<bool>, Status> {
    let mut client = client.clone();
    let Asked { volume_id, replication_source, replication_id, parameters, secrets, .. } = asked;
    let force = asked.force;
    macro_rules! call {
        ($method:ident, $message:ident { $($field:ident),* }) => {{
            let message = $message { volume_id, replication_source, replication_id, secrets, $($field),* };
            let mut request = Request::new(message);
            if let Some(timeout) = asked.timeout {
                request.set_timeout(timeout);
            }
            client.$method(request).await
        }};
    }
    Ok(match rpc {
        Enable => call!(enable_volume_replication, EnableVolumeReplicationRequest { parameters })?
            .map(|_| false),
        Disable => {
            call!(disable_volume_replication, DisableVolumeReplicationRequest { parameters })?
                .map(|_| false)
        }
        Promote => {
            call!(promote_volume, PromoteVolumeRequest { parameters, force })?.map(|_| false)
        }
        Demote => call!(demote_volume, DemoteVolumeRequest { parameters, force })?.map(|_| false),
        Resync => call!(resync_volume, ResyncVolumeRequest { parameters, force })?
            .map(|found| found.ready),
        Info => {
            drop(parameters);
            call!(get_volume_replication_info, GetVolumeReplicationInfoRequest {})?.map(|_| false)
        }
    })
}

async fn destination(
    client: &Client<Channel>,
    source: Option<ReplicationSource>,
    secrets: HashMap<String, String>,
) -> Result<Destination, Status> {
    let request = GetReplicationDestinationInfoRequest { secrets, replication_source: source };
    let answer = client.clone().get_replication_destination_info(request).await?;
    Ok(answer.into_inner().replication_destination.unwrap().r#type.unwrap())
}

#[track_caller]
fn assert_code(rpc: Rpc, what: &str, answer: &Result<Response<bool>, Status>, expected: Code) {
    assert_eq!(code(answer), expected, "{rpc:?}: {what}: {answer:?}");
}

const SECRET: &str = "hunter2-of-a-caller";

fn secrets() -> HashMap<String, String> {
    map(&[("passphrase", SECRET)])
}

/// Proves REPL-VOLID-01, REPL-SOURCE-01, REPL-SOURCE-02, REPL-SOURCE-03, REPL-SOURCE-04, REPL-SOURCE-05,
/// REPL-SOURCE-06, REPL-SECRET-01, REPL-ENABLE-03, REPL-ENABLE-07, REPL-ENABLE-11, REPL-ENABLE-12, REPL-DISABLE-03,
/// REPL-DISABLE-07, REPL-DISABLE-11, REPL-DISABLE-12, REPL-PROMOTE-03, REPL-PROMOTE-07, REPL-PROMOTE-13,
/// REPL-PROMOTE-14, REPL-PROMOTE-15, REPL-DEMOTE-03, REPL-DEMOTE-07, REPL-DEMOTE-12, REPL-DEMOTE-13,
/// REPL-DEMOTE-14, REPL-RESYNC-03, REPL-RESYNC-07, REPL-RESYNC-13, REPL-RESYNC-14, REPL-RESYNC-15, REPL-INFO-03,
/// REPL-INFO-06, REPL-INFO-13, REPL-INFO-14, REPL-INFO-15, REPL-DEST-02, REPL-DEST-03, REPL-DEST-04,
/// REPL1-ENABLE-01, REPL1-ENABLE-04, REPL1-ENABLE-05, REPL1-DISABLE-01, REPL1-DISABLE-04, REPL1-DISABLE-05,
/// REPL1-PROMOTE-01, REPL1-PROMOTE-05, REPL1-PROMOTE-06, REPL1-PROMOTE-07, REPL1-DEMOTE-01, REPL1-DEMOTE-05,
/// REPL1-DEMOTE-06, REPL1-DEMOTE-07, REPL1-RESYNC-01, REPL1-RESYNC-05, REPL1-RESYNC-06, REPL1-RESYNC-07.
#[tokio::test]
async fn a_call_that_does_not_name_one_source_is_refused_and_one_that_does_is_understood() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut world = World::start().await;
    let client = Client::new(world.addons.clone());
    let db = world.create("db", 64 * MIB).await.volume_id;
    let other = world.create("other", 64 * MIB).await.volume_id;
    let strange = "0123456789abcdef0123456789abcdef";
    let none = ReplicationSource { r#type: None };
    let with = |asked: Asked, volume_id: &str| Asked { volume_id: volume_id.to_owned(), ..asked };
    let named = |asked: Asked, id: &str| Asked { replication_id: id.to_owned(), ..asked };
    let wrong = [
        ("no source", Asked::default()),
        ("a source without a kind", by_source(none.clone())),
        ("a source without a kind beside an id", with(by_source(none.clone()), &db)),
        ("a volume without an id", by_source(volume(""))),
        ("a group without an id", by_source(group(""))),
        ("a snapshot without an id", by_source(snapshot(""))),
        ("a snapshot", by_source(snapshot(strange))),
        ("two volumes", with(by_source(volume(&other)), &db)),
        ("a volume and a group", with(by_source(group(strange)), &db)),
        ("a volume and a snapshot", with(by_source(snapshot(strange)), &db)),
        ("another replication", named(by_id(&db), &other)),
        ("another replication of a source", named(by_source(volume(&db)), "x")),
        ("a long id", by_id(&"x".repeat(129))),
    ];
    let unknown = [
        ("an unknown volume", by_id(UNKNOWN)),
        ("an unknown volume of the form of ids", by_id(strange)),
        ("an unknown volume as a source", by_source(volume(strange))),
        ("an unknown group", by_source(group(strange))),
        ("an unknown group of a strange form", by_source(group(UNKNOWN))),
    ];
    let right = [
        ("the first edition", by_id(&db)),
        ("2026", by_source(volume(&db))),
        ("both", with(by_source(volume(&db)), &db)),
        ("a replication", named(by_id(&db), &db)),
    ];
    for rpc in ALL {
        for (what, asked) in &wrong {
            let asked = Asked { secrets: secrets(), ..asked.clone() };
            let answer = ask(&client, rpc, asked).await;
            assert_code(rpc, what, &answer, Code::InvalidArgument);
            if what.starts_with("a snapshot without") {
                continue;
            }
            if *what == "a snapshot" {
                let why = answer.unwrap_err();
                assert!(why.message().contains("snapshots are not replicated"), "{why}");
            }
        }
        for (what, asked) in &unknown {
            let answer = ask(&client, rpc, asked.clone()).await;
            assert_code(rpc, what, &answer, Code::NotFound);
        }
        let expected = if rpc == Disable { Code::Ok } else { Code::FailedPrecondition };
        let class = map(&[("schedulingInterval", "1m"), ("mirroringMode", "snapshot")]);
        for (what, asked) in &right {
            for (parameters, secrets) in
                [(HashMap::new(), HashMap::new()), (class.clone(), secrets())]
            {
                let answer =
                    ask(&client, rpc, Asked { parameters, secrets, ..asked.clone() }).await;
                assert_code(rpc, what, &answer, expected);
            }
        }
        let bad = [("schedulingInterval", "0m"), ("mirroringMode", "journal"), ("unheardOf", "x")];
        for pair in bad.iter().filter(|_| rpc != Info) {
            let asked = Asked { parameters: map(&[*pair]), ..by_id(&db) };
            assert_code(rpc, pair.0, &ask(&client, rpc, asked).await, Code::InvalidArgument);
        }
    }
    for (source, expected) in [
        (None, Code::InvalidArgument),
        (Some(none), Code::InvalidArgument),
        (Some(volume("")), Code::InvalidArgument),
        (Some(group("")), Code::InvalidArgument),
        (Some(snapshot(strange)), Code::InvalidArgument),
        (Some(volume(strange)), Code::NotFound),
        (Some(group(UNKNOWN)), Code::NotFound),
        (Some(volume(&db)), Code::FailedPrecondition),
    ] {
        let refused = destination(&client, source.clone(), secrets()).await.unwrap_err();
        assert_eq!(refused.code(), expected, "{source:?}");
        assert!(!refused.message().contains(SECRET));
    }
    let volumes = world.cluster.volumes().await;
    assert_eq!(volumes.len(), 2);
    assert!(volumes.iter().all(|volume| volume.mirror.is_none()), "a refusal has no effect");
    let asked = EnableVolumeReplicationRequest { secrets: secrets(), ..Default::default() };
    assert!(!format!("{asked:?}").contains(SECRET));
    let last = ask(&client, Promote, Asked { secrets: secrets(), ..by_id(&db) }).await;
    assert_code(Promote, "not replicated", &last, Code::FailedPrecondition);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("PromoteVolume"), "the log has entries");
    assert!(!text.contains(SECRET));
}

/// Proves REPL-PROMOTE-17, REPL-DEMOTE-16, REPL-RESYNC-17, REPL-INFO-17, REPL-DEST-01, REPL1-DEMOTE-09,
/// REPL1-RESYNC-09, REPL1-PROMOTE-09.
#[tokio::test]
async fn a_process_in_node_mode_serves_no_replication() {
    let world = World::start_in(Mode::NODE).await;
    let client = Client::new(world.addons.clone());
    for rpc in ALL {
        let answer = ask(&client, rpc, Asked::default()).await;
        assert_code(rpc, "before any argument is read", &answer, Code::Unimplemented);
    }
    let refused = destination(&client, None, HashMap::new()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    let told = ["VOLUME_REPLICATION", "GET_REPLICATION_DESTINATION_INFO"];
    let node = crate::addons::capabilities(&world.addons).await;
    assert!(told.iter().all(|one| !node.iter().any(|kind| kind == one)), "{node:?}");
    let world = World::start_in(Mode::CONTROLLER).await;
    let controller = crate::addons::capabilities(&world.addons).await;
    assert!(told.iter().all(|one| controller.iter().any(|kind| kind == one)), "{controller:?}");
}

/// Proves REPL-ENABLE-14, REPL-DISABLE-14, REPL-PROMOTE-18, REPL-DEMOTE-17, REPL-RESYNC-18, REPL-INFO-18,
/// REPL-DEST-10, REPL1-ENABLE-07, REPL1-DISABLE-07, REPL1-DEMOTE-10, REPL1-RESYNC-10, REPL1-SECRET-01,
/// REPL1-PROMOTE-10.
#[tokio::test]
async fn a_deployment_that_demands_secrets_is_called_with_those_that_authenticate_alone() {
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("callers.yaml");
    // Of the token "token-of-the-maker".
    let digest = "d4a26405d4dcb879fe866f60cfe43b346a3cdd8b555ef5854210ed3abb3ebdc4";
    let text = format!("callers:\n- name: dr\n  tokenSha256: {digest}\n  may: ['*']\n");
    std::fs::write(&list, text).unwrap();
    let world = World::start_with(Mode::ALL, Callers::read(&list).unwrap()).await;
    let client = Client::new(world.addons.clone());
    let token = |token: &str| map(&[(quoin_csi::CALLER_TOKEN, token)]);
    let strange = "0123456789abcdef0123456789abcdef";
    for asked in [by_id(strange), by_source(volume(strange))] {
        for rpc in ALL {
            for secrets in [HashMap::new(), secrets(), token("token-of-nobody-here")] {
                let answer = ask(&client, rpc, Asked { secrets, ..asked.clone() }).await;
                assert_code(rpc, "a stranger", &answer, Code::Unauthenticated);
                assert!(!answer.unwrap_err().message().contains("nobody-here"));
            }
            let secrets = token("token-of-the-maker");
            let answer = ask(&client, rpc, Asked { secrets, ..asked.clone() }).await;
            assert_code(rpc, "a caller that is known", &answer, Code::NotFound);
        }
    }
    let refused = destination(&client, Some(volume(strange)), HashMap::new()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let refused = destination(&client, Some(volume(strange)), token("token-of-the-maker")).await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
}

/// Proves REPL-ENABLE-15, REPL-DISABLE-15, REPL-PROMOTE-19, REPL-DEMOTE-18, REPL-RESYNC-19, REPL-INFO-19,
/// REPL1-ENABLE-08, REPL1-DISABLE-08, REPL1-DEMOTE-11, REPL1-RESYNC-11, REPL1-PROMOTE-11.
#[tokio::test]
async fn a_failure_of_no_row_is_unknown_and_an_unreachable_controller_unavailable() {
    let mut world = World::start().await;
    let client = Client::new(world.addons.clone());
    let db = world.create("db", 64 * MIB).await.volume_id;
    world.stop_control().await;
    for rpc in ALL {
        for asked in [by_id(&db), by_source(volume(&db))] {
            let answer = ask(&client, rpc, asked).await;
            assert_code(rpc, "the controller is away", &answer, Code::Unavailable);
        }
    }
    let _broken = broken_control(&world.path("run/admin.sock"));
    for rpc in ALL {
        for asked in [by_id(&db), by_source(volume(&db))] {
            // The channel may have to connect again.
            let mut answer = ask(&client, rpc, asked.clone()).await;
            for _ in 0..100 {
                if !answer.as_ref().is_err_and(|why| why.code() == Code::Unavailable) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
                answer = ask(&client, rpc, asked.clone()).await;
            }
            assert_code(rpc, "the controller fails", &answer, Code::Unknown);
        }
    }
}

/// Ends with the test.
struct Broken(tokio::task::JoinHandle<()>);

impl Drop for Broken {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Clone)]
struct Fails;

impl tower::Service<http::Request<tonic::body::Body>> for Fails {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<tonic::body::Body>) -> Self::Future {
        std::future::ready(Ok(Status::internal("a fault of the controller").into_http()))
    }
}

/// A controller that fails whatever is asked.
fn broken_control(socket: &std::path::Path) -> Broken {
    let _ = std::fs::remove_file(socket);
    let listener = tokio::net::UnixListener::bind(socket).unwrap();
    let connections = tokio_stream::wrappers::UnixListenerStream::new(listener);
    let served = tonic::transport::Server::builder()
        .layer(tower::layer::layer_fn(|_| Fails))
        .add_routes(tonic::service::Routes::default())
        .serve_with_incoming(connections);
    Broken(tokio::spawn(async move { drop(served.await) }))
}

/// Waits until an answer has a code.
async fn until(client: &Client<Channel>, rpc: Rpc, asked: Asked, expected: Code) {
    let end = tokio::time::Instant::now() + Duration::from_secs(40);
    while tokio::time::Instant::now() < end {
        let answer = ask(client, rpc, asked.clone()).await;
        if code(&answer) == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{rpc:?} has never {expected:?}: {:?}", ask(client, rpc, asked).await);
}

/// Proves REPL-GENERAL-03, REPL-GENERAL-04, REPL-ENABLE-16, REPL-ENABLE-17, REPL-ENABLE-18, REPL-INFO-20,
/// REPL-DEST-05, REPL-DEST-06, REPL1-GENERAL-01, REPL1-ENABLE-01, REPL1-ENABLE-04, REPL1-ENABLE-05.
#[tokio::test]
async fn a_volume_is_enabled_once_the_peer_has_its_copy_and_one_call_at_a_time_works_on_it() {
    let mut world = World::start().await;
    world.cluster.keeps_records.store(true, std::sync::atomic::Ordering::Relaxed);
    let client = Client::new(world.addons.clone());
    let db = world.create("db", 64 * MIB).await.volume_id;
    let class = |interval: &str| map(&[("schedulingInterval", interval), ("peer", "west")]);
    let enable = || Asked { parameters: class("1m"), ..by_id(&db) };
    let unpaired = ask(&client, Enable, enable()).await;
    assert_code(Enable, "no peer is paired", &unpaired, Code::FailedPrecondition);
    let empty = ask(&client, Enable, by_id("")).await;
    assert_code(Enable, "an empty id", &empty, Code::InvalidArgument);
    assert_code(Enable, "unknown", &ask(&client, Enable, by_id(UNKNOWN)).await, Code::NotFound);

    let cluster_id = world.cluster.cluster_id().await;
    world.stop_control().await;
    world.cluster.put(Mirrors::of(&cluster_id).into_records()).await;
    world.start_control().await;
    until(&client, Disable, by_id(&db), Code::Ok).await;
    let unheard = ask(&client, Enable, enable()).await;
    assert_code(Enable, "the peer was not heard", &unheard, Code::FailedPrecondition);
    let peer = Peer::start(&world.cluster, NODE);
    peer.answers(Answers::Refuses);
    let heard_by = tokio::time::Instant::now() + Duration::from_secs(30);
    let refused = loop {
        // Until its mirror is heard.
        assert!(tokio::time::Instant::now() < heard_by, "the peer is never heard");
        let answer = ask(&client, Enable, enable()).await;
        assert_code(Enable, "the peer refuses", &answer, Code::FailedPrecondition);
        let why = answer.unwrap_err();
        if !why.message().contains("no mirror of the peer was heard") {
            break why;
        }
    };
    assert!(refused.message().contains("there is no room"), "{refused}");
    until(&client, Promote, by_id(&db), Code::FailedPrecondition).await;
    let source = || Some(volume(&db));
    let none = destination(&client, source(), HashMap::new()).await.unwrap_err();
    assert_eq!(none.code(), Code::FailedPrecondition, "a refusal leaves nothing behind");

    // The peer knows that the first try is over, and does not answer to the next one: that goes on behind its
    // caller.
    peer.answers(Answers::Nothing);
    until(&client, Disable, by_id(&db), Code::Ok).await;
    let hasty = Asked { timeout: Some(Duration::from_secs(1)), ..enable() };
    until(&client, Enable, hasty, Code::DeadlineExceeded).await;
    for asked in [by_id(&db), by_source(volume(&db))] {
        for rpc in CHANGES {
            let answer = ask(&client, rpc, asked.clone()).await;
            assert_code(rpc, "another call is under way", &answer, Code::Aborted);
        }
        let nothing = ask(&client, Info, asked).await;
        assert_code(Info, "nothing is complete there", &nothing, Code::NotFound);
    }
    let request = DeleteVolumeRequest { volume_id: db.clone(), ..Default::default() };
    let deleted = world.controller.delete_volume(request).await.unwrap_err();
    assert_eq!(deleted.code(), Code::Aborted, "its replication changes: {deleted}");
    assert!(deleted.message().contains("replication of volume"), "{deleted}");
    let unknown = destination(&client, source(), HashMap::new()).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unavailable, "the peer has confirmed nothing: {unknown}");
    peer.answers(Answers::Copies);
    until(&client, Enable, enable(), Code::Ok).await;
    assert_eq!(peer.role(&db), Some(Role::Secondary));
    let there = destination(&client, source(), HashMap::new()).await.unwrap();
    let expected = replication_destination::VolumeDestination { volume_id: db.clone() };
    assert_eq!(there, Destination::Volume(expected));

    // Again, as a client of either edition, at the same time and with the peer away.
    peer.is_heard(false);
    for asked in [enable(), Asked { parameters: class("60s"), ..by_source(volume(&db)) }] {
        assert_code(Enable, "a repeat", &ask(&client, Enable, asked).await, Code::Ok);
    }
    let many = (0..4).map(|_| ask(&client, Enable, enable()));
    for answer in futures::future::join_all(many).await {
        assert!(matches!(code(&answer), Code::Ok | Code::Aborted), "{answer:?}");
    }
    for (other, expected) in [
        (class("2m"), Code::InvalidArgument),
        (map(&[("onLivePeer", "takeOver")]), Code::InvalidArgument),
        // A minute is what a class without an interval has.
        (HashMap::new(), Code::Ok),
    ] {
        let answer = ask(&client, Enable, Asked { parameters: other, ..by_id(&db) }).await;
        assert_code(Enable, "other parameters", &answer, expected);
    }
    let still = destination(&client, source(), HashMap::new()).await.unwrap();
    assert_eq!(still, there, "also with the peer away");
    assert_code(Promote, "primary already", &ask(&client, Promote, by_id(&db)).await, Code::Ok);
}

/// Cells of a role: each call, whether it is forced, and its code.
type Cells = [(Rpc, bool, Code)];

/// Asks one after the other: one call at a time works on a source. No answer says that a copy is ready.
async fn assert_cells(client: &Client<Channel>, source: &ReplicationSource, cells: &Cells) {
    for (rpc, force, expected) in cells {
        let asked = Asked { force: *force, ..by_source(source.clone()) };
        let answer = ask(client, *rpc, asked).await;
        assert_code(*rpc, &format!("force={force} {source:?}"), &answer, *expected);
        if let Ok(ready) = answer {
            assert!(!ready.into_inner(), "{rpc:?} of {source:?} is ready");
        }
    }
}

const COPY: &Cells = &[
    (Enable, false, Code::Ok),
    (Disable, false, Code::Ok),
    (Demote, false, Code::Ok),
    (Demote, true, Code::Ok),
    (Resync, false, Code::Ok),
    (Info, false, Code::FailedPrecondition),
];

const ORPHAN: &Cells = &[
    (Enable, false, Code::FailedPrecondition),
    (Disable, false, Code::Ok),
    (Demote, false, Code::Ok),
    (Resync, false, Code::FailedPrecondition),
    (Info, false, Code::FailedPrecondition),
];

/// Sides of a second cluster for each volume and group of the first one.
struct Sides {
    world: World,
    client: Client<Channel>,
    peer: Peer,
    ids: HashMap<&'static str, String>,
}

impl Sides {
    async fn start() -> Self {
        let mut world = World::start().await;
        world.cluster.keeps_records.store(true, std::sync::atomic::Ordering::Relaxed);
        let mut ids = HashMap::new();
        for name in
            ["primary", "synced", "copy", "taken", "demoted", "diverged", "orphan", "left", "right"]
        {
            ids.insert(name, world.create(name, 64 * MIB).await.volume_id);
        }
        ids.insert("group", "00000000000000000000000000000a77".to_owned());
        let cluster_id = world.cluster.cluster_id().await;
        world.stop_control().await;
        let mut mirrors = Mirrors::of(&cluster_id);
        let mut sides = Vec::new();
        for (name, role, theirs) in [
            ("primary", Role::Primary, Role::Secondary),
            ("synced", Role::Primary, Role::Secondary),
            ("copy", Role::Secondary, Role::Primary),
            ("taken", Role::Secondary, Role::Primary),
            ("demoted", Role::Secondary, Role::Primary),
            ("diverged", Role::Diverged, Role::Primary),
            ("orphan", Role::Orphan, Role::Off),
        ] {
            let id = ids[name].as_str();
            let mut here = mirrors.brain(id, &[id], role, false);
            let mut there = mirrors.brain(id, &[id], theirs, true);
            let last = PointId(0x1a57);
            match name {
                "synced" => {
                    here.points = Points {
                        common: Some(PointId(5)),
                        common_cut_ms: 1_700_000_000_123,
                        ..Points::default()
                    };
                }
                "taken" => {
                    here.parameters.may_take_over = true;
                    there.parameters.may_take_over = true;
                }
                "demoted" => {
                    // The peer was primary, and its final point is on its way.
                    there.role = Role::Secondary;
                    there.points =
                        Points { last: Some(last), offered: Some(last), ..Points::default() };
                }
                _ => {}
            }
            mirrors.put(&world.cluster, here, None).await;
            if theirs != Role::Off {
                let points = if name == "demoted" { vec![last] } else { Vec::new() };
                sides.push((id.to_owned(), there, points));
            }
        }
        let members = [ids["left"].as_str(), ids["right"].as_str()];
        let here = mirrors.brain(&ids["group"], &members, Role::Secondary, false);
        let there: Record = mirrors.brain(&ids["group"], &members, Role::Primary, true);
        mirrors.put(&world.cluster, here, Some("shop")).await;
        sides.push((ids["group"].clone(), there, Vec::new()));
        world.cluster.put(mirrors.into_records()).await;
        world.start_control().await;
        let peer = Peer::start(&world.cluster, NODE);
        peer.is_heard(false);
        for (id, record, points) in sides {
            peer.has(&id, record, points);
        }
        let client = Client::new(world.addons.clone());
        let synced = by_id(&ids["synced"]);
        until(&client, Promote, synced, Code::Ok).await;
        Self { world, client, peer, ids }
    }

    fn volume(&self, name: &str) -> ReplicationSource {
        volume(&self.ids[name])
    }
}

/// Cells of the table of answers that need no data of the volumes. Roles that change with data are in the tests of two
/// real clusters.
///
/// Proves REPL-ENABLE-16, REPL-DISABLE-16, REPL-PROMOTE-20, REPL-PROMOTE-21, REPL1-PROMOTE-12, REPL-RESYNC-20, REPL-RESYNC-21,
/// REPL-INFO-12, REPL-INFO-20, REPL-INFO-21, REPL-DEST-06, REPL-DEST-07, REPL-DEST-09, REPL-COPY-02, REPL-COPY-03,
/// REPL-COPY-04, REPL-COPY-06, REPL1-RESYNC-12.
#[tokio::test]
async fn every_role_answers_as_the_table_says() {
    let mut sides = Sides::start().await;
    let client = sides.client.clone();
    let copy = sides.volume("copy");

    // Silent for less than 30 s.
    let early = [false, true].map(|force| {
        let (client, of) = (&client, if force { "copy" } else { "taken" });
        ask(client, Promote, Asked { force, ..by_source(sides.volume(of)) })
    });
    for answer in futures::future::join_all(early).await {
        assert_code(Promote, "silent for some seconds", &answer, Code::Unavailable);
    }

    sides.peer.is_heard(true);
    for name in ["copy", "group"] {
        let source = if name == "group" { group(&sides.ids[name]) } else { sides.volume(name) };
        until(&client, Promote, by_source(source.clone()), Code::Aborted).await;
        assert_cells(&client, &source, COPY).await;
        let cells = [(Promote, false, Code::Aborted), (Promote, true, Code::Aborted)];
        assert_cells(&client, &source, &cells).await;
        assert_cells(&client, &source, COPY).await;
    }
    // With `takeOver` on both sides a live primary is asked to step down by force alone.
    let taken = sides.volume("taken");
    until(&client, Promote, by_source(taken.clone()), Code::FailedPrecondition).await;
    let refused = ask(&client, Promote, by_id(&sides.ids["taken"])).await;
    assert_code(Promote, "by volume_id alone", &refused, Code::FailedPrecondition);
    assert_cells(&client, &taken, &[(Info, false, Code::FailedPrecondition)]).await;
    let copied = destination(&client, Some(taken.clone()), HashMap::new()).await;
    assert!(copied.is_ok(), "its role stays: {copied:?}");

    // Asked for on this side first, then compared.
    let with = |interval: &str, asked: Asked| Asked {
        parameters: map(&[("schedulingInterval", interval)]),
        ..asked
    };
    let asked = with("5m", by_source(sides.volume("taken")));
    assert_code(Enable, "first", &ask(&client, Enable, asked.clone()).await, Code::Ok);
    assert_code(Enable, "again", &ask(&client, Enable, asked.clone()).await, Code::Ok);
    let other = ask(&client, Enable, with("6m", asked.clone())).await;
    assert_code(Enable, "others", &other, Code::InvalidArgument);

    let enabled = Asked {
        parameters: map(&[("onLivePeer", "takeOver")]),
        ..by_source(sides.volume("demoted"))
    };
    assert_code(Enable, "a copy", &ask(&client, Enable, enabled).await, Code::Ok);
    // The final point is on its way: force does not help either.
    let waits = [(Promote, false, Code::Unavailable), (Promote, true, Code::Unavailable)];
    let demoted = sides.volume("demoted");
    assert_cells(&client, &demoted, &waits).await;
    assert_cells(&client, &demoted, &[(Demote, false, Code::Ok), (Disable, false, Code::Ok)]).await;

    let diverged = sides.volume("diverged");
    assert_cells(&client, &diverged, COPY).await;
    let forced = [
        (Promote, false, Code::Aborted),
        (Promote, true, Code::Aborted),
        (Resync, false, Code::Ok),
    ];
    assert_cells(&client, &diverged, &forced).await;
    for turn in 0.. {
        let volumes = sides.world.cluster.volumes().await;
        let found = volumes.iter().find(|volume| volume.id == sides.ids["diverged"]).unwrap();
        if found.conditions.iter().any(|condition| condition.reason == "MirrorDiverged") {
            break;
        }
        assert!(turn < 200, "no condition says that it diverged: {found:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_cells(&client, &sides.volume("orphan"), ORPHAN).await;

    for name in ["copy", "demoted", "diverged", "orphan", "primary"] {
        let found = destination(&client, Some(sides.volume(name)), HashMap::new()).await;
        if name == "primary" {
            // The peer has a copy, which it says once it is heard.
            until_destination(&client, sides.volume(name)).await;
            continue;
        }
        let volume_id = sides.ids[name].clone();
        let expected =
            Destination::Volume(replication_destination::VolumeDestination { volume_id });
        assert_eq!(found.unwrap(), expected, "{name}");
    }
    let found = destination(&client, Some(group(&sides.ids["group"])), HashMap::new()).await;
    let Destination::Volumegroup(found) = found.unwrap() else { panic!("it is no group") };
    assert_eq!(found.volume_group_id, sides.ids["group"]);
    let same = |name: &str| (sides.ids[name].clone(), sides.ids[name].clone());
    assert_eq!(found.volume_ids, HashMap::from([same("left"), same("right")]));
    // A member alone is not what is replicated.
    for rpc in [Promote, Demote, Resync, Info] {
        let answer = ask(&client, rpc, by_source(sides.volume("left"))).await;
        assert_code(rpc, "a member", &answer, Code::FailedPrecondition);
        assert!(answer.unwrap_err().message().contains(&sides.ids["group"]));
    }

    copies_belong_to_their_mirror(&mut sides).await;
    a_primary_is_left_by_its_orchestrator_alone(&mut sides).await;

    // Silent for 30 s, and no complete point is here.
    sides.peer.is_heard(false);
    tokio::time::sleep(Duration::from_secs(31)).await;
    let late = [("copy", false), ("demoted", true)]
        .map(|(of, force)| ask(&client, Promote, Asked { force, ..by_source(sides.volume(of)) }));
    for answer in futures::future::join_all(late).await {
        assert_code(Promote, "nothing whole is here", &answer, Code::Unavailable);
    }
    assert_cells(&client, &copy, COPY).await;
    let orphan = Asked { force: false, ..by_source(sides.volume("orphan")) };
    assert_code(Promote, "an orphan", &ask(&client, Promote, orphan.clone()).await, Code::Ok);
    let answer = ask(&client, Demote, orphan).await;
    assert_code(Demote, "it is an ordinary volume", &answer, Code::FailedPrecondition);
}

/// Proves REPL-DEST-08.
#[tokio::test]
async fn the_destination_of_the_largest_group_names_every_member() {
    let mut world = World::start().await;
    let mut ids = Vec::new();
    for number in 0..128 {
        ids.push(world.create(&format!("v{number}"), 64 * MIB).await.volume_id);
    }
    let members: Vec<&str> = ids.iter().map(String::as_str).collect();
    let group_id = "00000000000000000000000000000b16";
    let cluster_id = world.cluster.cluster_id().await;
    world.stop_control().await;
    let mut mirrors = Mirrors::of(&cluster_id);
    let copy = mirrors.brain(group_id, &members, Role::Secondary, false);
    mirrors.put(&world.cluster, copy, Some("large")).await;
    world.cluster.put(mirrors.into_records()).await;
    world.start_control().await;
    let client = Client::new(world.addons.clone());
    until_destination(&client, group(group_id)).await;
    let found = destination(&client, Some(group(group_id)), HashMap::new()).await.unwrap();
    let Destination::Volumegroup(found) = found else { panic!("it is no group") };
    let expected: HashMap<_, _> = ids.iter().map(|id| (id.clone(), id.clone())).collect();
    assert_eq!(found.volume_ids, expected);
    assert!(
        found.volume_ids.iter().map(|(id, there)| id.len() + there.len()).sum::<usize>() > 4096
    );
}

async fn until_destination(client: &Client<Channel>, source: ReplicationSource) {
    for _ in 0..200 {
        match destination(client, Some(source.clone()), HashMap::new()).await {
            Ok(_) => return,
            Err(why) => assert_eq!(why.code(), Code::Unavailable, "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the other side has never confirmed {source:?}");
}

/// Calls of an orchestrator on a copy.
async fn copies_belong_to_their_mirror(sides: &mut Sides) {
    let id = sides.ids["copy"].clone();
    let controller = &mut sides.world.controller;
    for (capability, readonly) in [
        (writer(), false),
        (writer(), true),
        (block_capability(volume_capability::access_mode::Mode::SingleNodeWriter), false),
        (block_capability(volume_capability::access_mode::Mode::MultiNodeReaderOnly), true),
    ] {
        let request = ControllerPublishVolumeRequest {
            volume_id: id.clone(),
            node_id: NODE.into(),
            volume_capability: Some(capability),
            readonly,
            ..Default::default()
        };
        let answer = controller.controller_publish_volume(request).await;
        assert_eq!(code(&answer), Code::FailedPrecondition);
        assert!(answer.unwrap_err().message().contains("copy"));
    }
    let request = CreateSnapshotRequest {
        source_volume_id: id.clone(),
        name: "s".into(),
        ..Default::default()
    };
    assert_eq!(code(&controller.create_snapshot(request).await), Code::FailedPrecondition);
    let request = ControllerExpandVolumeRequest {
        volume_id: id.clone(),
        capacity_range: Some(range(128 * MIB, 0)),
        ..Default::default()
    };
    assert_eq!(code(&controller.controller_expand_volume(request).await), Code::FailedPrecondition);

    // Deleted here, it stays, and is listed again once it is enabled.
    let listed =
        async |controller: &mut quoin_api::csi::controller_client::ControllerClient<Channel>| {
            let listed = controller.list_volumes(ListVolumesRequest::default()).await.unwrap();
            let entries = listed.into_inner().entries;
            entries.iter().any(|entry| entry.volume.as_ref().unwrap().volume_id == id)
        };
    assert!(listed(controller).await);
    for _ in 0..2 {
        let request = DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() };
        controller.delete_volume(request).await.unwrap();
    }
    assert!(!listed(controller).await);
    let request = ControllerGetVolumeRequest { volume_id: id.clone() };
    controller.controller_get_volume(request).await.unwrap();
    assert_cells(&sides.client, &volume(&id), COPY).await;
    assert!(listed(&mut sides.world.controller).await, "it was enabled again");
    let diverged =
        DeleteVolumeRequest { volume_id: sides.ids["diverged"].clone(), ..Default::default() };
    sides.world.controller.delete_volume(diverged).await.unwrap();
    let answer = ask(&sides.client, Promote, by_source(sides.volume("diverged"))).await;
    assert_code(Promote, "it is diverged still", &answer, Code::Aborted);

    use quoin_api::csi_addons::volumegroup as groups;
    let mut client = groups::controller_client::ControllerClient::new(sides.world.addons.clone());
    let volume_group_id = sides.ids["group"].clone();
    let request = groups::ModifyVolumeGroupMembershipRequest {
        volume_group_id: volume_group_id.clone(),
        ..Default::default()
    };
    let kept = client.modify_volume_group_membership(request).await.unwrap().into_inner();
    assert_eq!(kept.volume_group.unwrap().volumes.len(), 2);
    let request = groups::DeleteVolumeGroupRequest {
        volume_group_id: volume_group_id.clone(),
        ..Default::default()
    };
    client.delete_volume_group(request).await.unwrap();
    let request = groups::ControllerGetVolumeGroupRequest { volume_group_id, ..Default::default() };
    let kept = client.controller_get_volume_group(request).await.unwrap().into_inner();
    assert_eq!(kept.volume_group.unwrap().volumes.len(), 2);
    // A mirrored group of these members is the one that is asked for.
    let request = groups::CreateVolumeGroupRequest {
        name: "vgr-1".into(),
        volume_ids: vec![sides.ids["right"].clone(), sides.ids["left"].clone()],
        ..Default::default()
    };
    for _ in 0..2 {
        let made = client.create_volume_group(request.clone()).await.unwrap().into_inner();
        assert_eq!(made.volume_group.unwrap().volume_group_id, sides.ids["group"]);
    }
}

/// Calls on a primary, of which one with the peer away ends the replication.
async fn a_primary_is_left_by_its_orchestrator_alone(sides: &mut Sides) {
    let (client, primary) = (sides.client.clone(), sides.volume("primary"));
    let id = sides.ids["primary"].clone();
    let cells = [
        (Enable, false, Code::Ok),
        (Promote, false, Code::Ok),
        (Promote, true, Code::Ok),
        (Resync, false, Code::FailedPrecondition),
        (Resync, true, Code::FailedPrecondition),
        (Info, false, Code::NotFound),
    ];
    assert_cells(&client, &primary, &cells).await;
    let request = GetVolumeReplicationInfoRequest {
        volume_id: sides.ids["synced"].clone(),
        ..Default::default()
    };
    let told = client.clone().get_volume_replication_info(request).await.unwrap().into_inner();
    let at = told.last_sync_time.unwrap();
    assert_eq!((at.seconds, at.nanos / 1_000_000), (1_700_000_000, 123));
    assert!(told.last_sync_bytes >= 0 && told.last_sync_duration.is_none());
    assert_eq!(told.status(), State::Degraded, "that was long ago");

    let request = DeleteVolumeRequest { volume_id: id.clone(), ..Default::default() };
    let answer = sides.world.controller.delete_volume(request.clone()).await;
    assert_eq!(code(&answer), Code::FailedPrecondition);
    let publish = ControllerPublishVolumeRequest {
        volume_id: id.clone(),
        node_id: NODE.into(),
        volume_capability: Some(writer()),
        ..Default::default()
    };
    sides.world.controller.controller_publish_volume(publish).await.unwrap();
    let published = ask(&client, Demote, by_source(primary.clone())).await;
    assert_code(Demote, "it is published", &published, Code::FailedPrecondition);
    assert_cells(&client, &primary, &cells[..3]).await;

    // At the same time: the order of the calls is one of those that are possible, and there is one primary.
    let many = [Promote, Enable, Promote, Resync].map(|rpc| ask(&client, rpc, by_id(&id)));
    for answer in futures::future::join_all(many).await {
        assert_ne!(code(&answer), Code::Unknown, "{answer:?}");
    }
    assert_cells(&client, &primary, &cells[..3]).await;

    sides.peer.is_heard(false);
    for asked in [by_id(&id), by_source(primary.clone())] {
        assert_code(Disable, "the peer is away", &ask(&client, Disable, asked).await, Code::Ok);
    }
    assert_cells(&client, &primary, &[(Promote, false, Code::FailedPrecondition)]).await;
    let found = destination(&client, Some(primary), HashMap::new()).await;
    assert_eq!(found.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(sides.peer.role(&id), Some(Role::Secondary), "it does not know yet");
    sides.peer.is_heard(true);
    for _ in 0..400 {
        if sides.peer.role(&id) == Some(Role::Orphan) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(sides.peer.role(&id), Some(Role::Orphan));
    let unpublish = ControllerUnpublishVolumeRequest {
        volume_id: id.clone(),
        node_id: NODE.into(),
        ..Default::default()
    };
    sides.world.controller.controller_unpublish_volume(unpublish).await.unwrap();
    sides.world.controller.delete_volume(request).await.unwrap();
}
