//! Authentication, authorisation, and the limits against a hostile network.

use std::time::{Duration, SystemTime};

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::join_client::JoinClient;
use quoin_api::control::*;
use quoin_identity::{
    Authority, Error, Identity, JoinToken, Lifetimes, Role, join, newcomer_channel,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Channel;

use crate::server::Server;

/// Answers to each kind of call of one caller: allowed or the refusal.
struct Answers {
    look: Code,
    manage: Code,
    govern: Code,
    /// A backup with the authority's private key in it.
    take_the_key: Code,
    act_as_p1: Code,
    act_as_n1: Code,
    acquire_as_n1: Code,
    join: Code,
    renew: Code,
}

fn code<T>(answer: Result<T, tonic::Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// Asserts a refusal in the handshake, which a caller sees as a broken connection.
fn refused<T>(answer: Result<T, tonic::Status>) {
    let code = code(answer);
    assert!(matches!(code, Code::Unavailable | Code::Unknown), "{code:?}");
}

async fn ask(channel: Channel) -> Answers {
    let mut cluster = ClusterClient::new(channel.clone());
    let mut agent = AgentClient::new(channel.clone());
    let mut joining = JoinClient::new(channel);
    let volume_id = "0".repeat(32);
    let p1 = PoolReport { pool: "p1".into(), node: "n1".into(), ..PoolReport::default() };
    let n1 = NodeReport { node: "n1".into(), ..NodeReport::default() };
    let acquire = AcquireEpochRequest {
        volume_id: volume_id.clone(),
        node: "n1".into(),
        incarnation: "1".repeat(32),
        at_least: 0,
        ..AcquireEpochRequest::default()
    };
    Answers {
        look: code(cluster.list_volumes(ListVolumesRequest::default()).await),
        manage: code(
            cluster
                .delete_volume(DeleteVolumeRequest {
                    volume: Some(VolumeRef { id: volume_id, name: String::new() }),
                })
                .await,
        ),
        govern: {
            let made = code(cluster.create_join_token(CreateJoinTokenRequest::default()).await);
            let keyless = BackupRequest { without_authority: true };
            assert_eq!(code(cluster.backup(keyless).await), made);
            made
        },
        take_the_key: code(cluster.backup(BackupRequest::default()).await),
        act_as_p1: {
            let watch = WatchPoolRequest { pool: "p1".into() };
            let watched = code(agent.watch_pool(watch).await);
            let reported = code(agent.report_pool(p1).await);
            assert_eq!(watched, reported);
            let holdings = PoolHoldings { pool: "p1".into(), ..PoolHoldings::default() };
            let told = futures::stream::iter([holdings]);
            // A pool that may report was not asked to.
            let refused = if reported == Code::Ok { Code::FailedPrecondition } else { reported };
            assert_eq!(code(agent.report_holdings(told).await), refused);
            reported
        },
        act_as_n1: {
            let watch = WatchNodeRequest { node: "n1".into() };
            let watched = code(agent.watch_node(watch).await);
            let reported = code(agent.report_node(n1).await);
            assert_eq!(watched, reported);
            reported
        },
        acquire_as_n1: code(agent.acquire_epoch(acquire).await),
        join: code(joining.join(JoinRequest::default()).await),
        renew: code(joining.renew(RenewRequest::default()).await),
    }
}

#[tokio::test]
async fn every_caller_may_do_what_the_table_says_and_nothing_else() {
    use Code::{InvalidArgument, Ok, PermissionDenied as No, Unauthenticated as Nobody};
    let server = Server::start().await;
    let channel = |identity: Identity| identity.channel(&server.address).unwrap();
    let token = server.token("", "", 60).await;
    let newcomer = newcomer_channel(&server.address, &token).await.unwrap();
    let local = quoin_identity::unix_channel(&server.home("controller/admin.sock"));
    // Joining with no token and renewing with no request get as far as the arguments.
    let table = [
        ("local", local, [Ok, Ok, Ok, Ok, Ok, Ok, No, No]),
        (
            "admin",
            channel(server.member(Role::Admin, "a1").await),
            [Ok, Ok, Ok, No, No, No, No, InvalidArgument],
        ),
        (
            "node n1",
            channel(server.manager("n1").await),
            [Ok, Ok, No, No, Ok, Ok, No, InvalidArgument],
        ),
        (
            "node n2",
            channel(server.member(Role::Node, "n2").await),
            [Ok, No, No, No, No, No, No, InvalidArgument],
        ),
        (
            "pool p1",
            channel(server.member(Role::Pool, "p1").await),
            [No, No, No, Ok, No, No, No, InvalidArgument],
        ),
        (
            "pool n1",
            channel(server.member(Role::Pool, "n1").await),
            [No, No, No, No, No, No, No, InvalidArgument],
        ),
        (
            "mirror n1",
            channel(server.member(Role::Mirror, "n1").await),
            [No, No, No, No, No, No, No, InvalidArgument],
        ),
        (
            "newcomer",
            newcomer,
            [Nobody, Nobody, Nobody, Nobody, Nobody, Nobody, InvalidArgument, Nobody],
        ),
    ];
    for (who, channel, expected) in table {
        let got = ask(channel).await;
        assert_eq!(got.take_the_key == Ok, who == "local", "{who}");
        let got = [
            got.look,
            got.manage,
            got.govern,
            got.act_as_p1,
            got.act_as_n1,
            got.acquire_as_n1,
            got.join,
            got.renew,
        ];
        assert_eq!(got, expected, "{who}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_node_without_leave_to_manage_sees_only_what_is_attached_to_it() {
    let server = Server::with(Lifetimes::default()).await;
    let node = server.member(Role::Node, "n1").await;
    let channel = node.channel(&server.address).unwrap();
    let answers = ask(channel.clone()).await;
    assert_eq!((answers.look, answers.manage), (Code::Ok, Code::PermissionDenied));

    let mut local = server.local_agent();
    for n in 1..=3 {
        let report = PoolReport {
            pool: format!("p{n}"),
            pool_id: format!("id{n}"),
            node: format!("h{n}"),
            capacity_bytes: 1 << 40,
            free_bytes: 1 << 40,
            ..PoolReport::default()
        };
        local.report_pool(report).await.unwrap();
    }
    let mut admin = server.admin();
    let mut ids = Vec::new();
    for name in ["mine", "other"] {
        let spec = VolumeSpec { name: name.into(), size_bytes: 1 << 30, ..Default::default() };
        let spec = Some(spec);
        let mut creating = admin.clone();
        let created = tokio::spawn(async move {
            creating.create_volume(CreateVolumeRequest { spec, ..Default::default() }).await
        });
        // The pools report while the creation waits for them.
        while !created.is_finished() {
            for n in 1..=3 {
                let told = server.controller.assignments.of_pool(&format!("p{n}")).replicas;
                let report = PoolReport {
                    pool: format!("p{n}"),
                    pool_id: format!("id{n}"),
                    node: format!("h{n}"),
                    capacity_bytes: 1 << 40,
                    free_bytes: 1 << 40,
                    replicas: told
                        .into_iter()
                        .map(|told| ReplicaReport {
                            replica_id: told.replica_id,
                            guid: told.guid,
                            volume_id: told.volume_id,
                            state: "created".into(),
                            ..ReplicaReport::default()
                        })
                        .collect(),
                    ..PoolReport::default()
                };
                local.report_pool(report).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let volume = created.await.unwrap().unwrap().into_inner();
        assert_eq!(volume.phase, "Ready", "{}", volume.waiting_for);
        ids.push(volume.id);
    }
    let publish = PublishVolumeRequest {
        volume: Some(VolumeRef { id: ids[0].clone(), name: String::new() }),
        node: "n1".into(),
        ..PublishVolumeRequest::default()
    };
    admin.publish_volume(publish.clone()).await.unwrap();
    let mut cluster = ClusterClient::new(channel.clone());
    let listed = cluster.list_volumes(ListVolumesRequest::default()).await.unwrap().into_inner();
    assert_eq!(listed.volumes.iter().map(|v| v.id.as_str()).collect::<Vec<_>>(), [&ids[0]]);
    let get = |id: &String| GetVolumeRequest {
        volume: Some(VolumeRef { id: id.clone(), name: String::new() }),
    };
    assert_eq!(code(cluster.get_volume(get(&ids[0])).await), Code::Ok);
    assert_eq!(code(cluster.get_volume(get(&ids[1])).await), Code::NotFound);
    // An invisible volume is answered like one that does not exist: not even its id is revealed.
    let named = |name: &str| GetVolumeRequest {
        volume: Some(VolumeRef { id: String::new(), name: name.into() }),
    };
    let hidden = cluster.get_volume(named("other")).await.unwrap_err();
    let nowhere = cluster.get_volume(named("nothing")).await.unwrap_err();
    assert_eq!(hidden.message().replace("other", "nothing"), nowhere.message());
    // Events of this node are not attributed to it either.
    let event = |id: &String, reason: &str| AgentEvent {
        severity: "Error".into(),
        volume_id: id.clone(),
        reason: reason.into(),
        ..AgentEvent::default()
    };
    let events = vec![event(&ids[0], "OfMine"), event(&ids[1], "OfAnother")];
    let report = NodeReport { node: "n1".into(), events, ..NodeReport::default() };
    AgentClient::new(channel.clone()).report_node(report).await.unwrap();
    let told = server.controller.state.events().after(0);
    let about = |reason: &str| {
        let event = told.iter().find(|event| event.reason == reason).unwrap();
        (event.object_kind.clone(), event.object_name.clone())
    };
    assert_eq!(about("OfMine"), ("volume".into(), "mine".into()));
    assert_eq!(about("OfAnother"), ("node".into(), "n1".into()));
    let refused = cluster.publish_volume(publish.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("quoin node set n1 --manages-volumes true"), "{refused}");
    let itself = SetNodeRequest { node: "n1".into(), manages_volumes: true };
    assert_eq!(code(cluster.set_node(itself.clone()).await), Code::PermissionDenied);
    // An epoch is granted only for volumes that the node owns.
    let mut agent = AgentClient::new(channel);
    let acquire = |id: &String| AcquireEpochRequest {
        volume_id: id.clone(),
        node: "n1".into(),
        incarnation: "1".repeat(32),
        at_least: 0,
        ..AcquireEpochRequest::default()
    };
    use acquire_epoch_response::Outcome;
    let mine = agent.acquire_epoch(acquire(&ids[0])).await.unwrap().into_inner();
    assert_eq!(mine.outcome(), Outcome::Granted);
    let grant = node.verify_grant(&mine.grant).unwrap();
    assert_eq!((grant.epoch.0, grant.node.as_str()), (mine.epoch, "n1"));
    let other = agent.acquire_epoch(acquire(&ids[1])).await.unwrap().into_inner();
    assert_eq!((other.outcome(), other.grant.len()), (Outcome::NotOwner, 0));
    // A caller with the right allows it.
    admin.set_node(itself.clone()).await.unwrap();
    assert_eq!(code(cluster.get_volume(get(&ids[1])).await), Code::Ok);
    assert_eq!(code(cluster.publish_volume(publish).await), Code::Ok);
    admin.set_node(SetNodeRequest { manages_volumes: false, ..itself }).await.unwrap();
    assert_eq!(code(cluster.get_volume(get(&ids[1])).await), Code::NotFound);
    let nobody = SetNodeRequest { node: "n5".into(), manages_volumes: true };
    assert_eq!(code(admin.set_node(nobody).await), Code::NotFound);

    tokens_tell_nothing_of_others(&server, &ids).await;
    // A cordon that it requests does not reveal the places of other volumes either.
    let report = NodeReport { node: "n2".into(), ..NodeReport::default() };
    local.report_node(report).await.unwrap();
    let elsewhere = PublishVolumeRequest {
        volume: Some(VolumeRef { id: ids[1].clone(), name: String::new() }),
        node: "n2".into(),
        ..PublishVolumeRequest::default()
    };
    admin.publish_volume(elsewhere).await.unwrap();
    let pool = GetCordonRequest { pool: "p1".into(), node: String::new() };
    let user = GetCordonRequest { pool: String::new(), node: "n2".into() };
    let all = admin.get_cordon(pool.clone()).await.unwrap().into_inner();
    assert_eq!(all.replicas.len(), 2);
    assert_eq!(admin.get_cordon(user.clone()).await.unwrap().into_inner().attached, ["other"]);
    let seen = cluster.get_cordon(pool).await.unwrap().into_inner();
    assert_eq!(seen.replicas.iter().map(|r| &r.volume_id).collect::<Vec<_>>(), [&ids[0]]);
    assert!(cluster.get_cordon(user).await.unwrap().into_inner().attached.is_empty());
    server.stop().await;
}

/// Walks every list of a node that has nothing attached, an entry a page: neither an entry nor a token
/// names what is out of its sight.
async fn tokens_tell_nothing_of_others(server: &Server, volumes: &[String]) {
    let mut admin = server.admin();
    for id in volumes {
        let volume = Some(VolumeRef { id: id.clone(), name: String::new() });
        let (name, volumes) = (format!("s-{id}"), volume.clone().into_iter().collect());
        let asked = CreateSnapshotRequest { volume, name: name.clone(), ..Default::default() };
        // No target cuts them: they are wished for, and listed.
        let _ =
            tokio::time::timeout(Duration::from_millis(300), admin.create_snapshot(asked)).await;
        let asked = CreateGroupSnapshotRequest { name, volumes };
        let creating = admin.create_group_snapshot(asked);
        let _ = tokio::time::timeout(Duration::from_millis(300), creating).await;
    }
    let stranger = server.member(Role::Node, "stranger").await;
    let mut stranger = ClusterClient::new(stranger.channel(&server.address).unwrap());
    for (cluster, expected) in [(&mut admin, volumes.len()), (&mut stranger, 0)] {
        for include_deleting in [false, true] {
            let asked =
                ListVolumesRequest { max_entries: 1, include_deleting, ..Default::default() };
            let page = cluster.list_volumes(asked).await.unwrap().into_inner();
            assert_eq!(page.volumes.len(), expected.min(1));
            assert_eq!(page.next_token.is_empty(), expected < 2, "{}", page.next_token);
        }
        let asked = ListSnapshotsRequest { max_entries: 1, ..Default::default() };
        let page = cluster.list_snapshots(asked).await.unwrap().into_inner();
        assert_eq!(page.snapshots.len(), expected.min(1));
        assert_eq!(page.next_token.is_empty(), expected < 2, "{}", page.next_token);
        let asked = ListGroupSnapshotsRequest { max_entries: 1, ..Default::default() };
        let page = cluster.list_group_snapshots(asked).await.unwrap().into_inner();
        assert_eq!(page.groups.len(), expected.min(1));
        assert_eq!(page.next.is_empty(), expected == 0, "{}", page.next);
        // A volume that is out of sight is no other one than one that does not exist.
        for (id, there) in [(volumes[0].clone(), expected > 0), ("9".repeat(32), false)] {
            let volume = Some(VolumeRef { id, name: String::new() });
            let listed = cluster.list_schedules(ListSchedulesRequest { volume }).await;
            assert_eq!(code(listed), if there { Code::Ok } else { Code::NotFound });
        }
    }
}

#[tokio::test]
async fn a_token_is_good_for_one_key_of_its_role_and_name_until_it_expires() {
    let server = Server::start().await;
    let attempt = |token: JoinToken, role: Role, name: &'static str, home: &'static str| {
        let (address, dir) = (server.address.clone(), server.home(home));
        async move { join(&address, &token, role, name, &dir).await.map_err(|e| e.to_string()) }
    };
    // The token that `init` made is for a pool or a node, once.
    let first = server.first_token.clone();
    let error = attempt(first.clone(), Role::Admin, "a1", "a1").await.unwrap_err();
    assert!(error.contains("PermissionDenied") || error.contains("is for a"), "{error}");
    let error = attempt(first.clone(), Role::Mirror, "m1", "m1").await.unwrap_err();
    assert!(error.contains("for a pool or a node, not a mirror"), "{error}");
    attempt(first.clone(), Role::Pool, "p1", "p1").await.unwrap();
    let error = attempt(first.clone(), Role::Pool, "p2", "p2").await.unwrap_err();
    assert!(error.contains("unknown, used or expired"), "{error}");
    // The same key may join again: its answer could have been lost.
    std::fs::remove_file(server.home("p1").join("cert.pem")).unwrap();
    attempt(first.clone(), Role::Pool, "p1", "p1").await.unwrap();
    let error = attempt(first, Role::Pool, "p1", "p1").await.unwrap_err();
    assert!(error.contains("already holds an identity"), "{error}");

    let token = server.token("node", "n7", 60).await;
    let error = attempt(token.clone(), Role::Pool, "n7", "x1").await.unwrap_err();
    assert!(error.contains("for a node, not a pool"), "{error}");
    let error = attempt(token.clone(), Role::Node, "n8", "x2").await.unwrap_err();
    assert!(error.contains("\"n7\" only"), "{error}");
    attempt(token, Role::Node, "n7", "n7").await.unwrap();

    let token = server.token("mirror", "", 60).await;
    let error = attempt(token.clone(), Role::Node, "m1", "x3").await.unwrap_err();
    assert!(error.contains("for a mirror, not a node"), "{error}");
    attempt(token, Role::Mirror, "m1", "m1").await.unwrap();

    // A name is not taken over, unless a token was made to do just that.
    let token = server.token("pool", "", 60).await;
    let error = attempt(token, Role::Pool, "p1", "thief").await.unwrap_err();
    assert!(error.contains("exists already"), "{error}");
    let token = server.token("pool", "p1", 60).await;
    attempt(token, Role::Pool, "p1", "successor").await.unwrap();

    let token = server.token("pool", "", 1).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let error = attempt(token, Role::Pool, "p9", "p9").await.unwrap_err();
    assert!(error.contains("unknown, used or expired"), "{error}");
    let unknown = JoinToken::generate(server.first_token.cluster, server.first_token.fingerprint);
    let error = attempt(unknown, Role::Pool, "p9", "p9").await.unwrap_err();
    assert!(error.contains("unknown, used or expired"), "{error}");
    server.stop().await;
}

#[tokio::test]
async fn a_used_token_that_is_sent_again_undoes_no_removal_and_no_replacement() {
    let server = Server::start().await;
    let attempt = |token: JoinToken, role: Role, name: &'static str, home: &'static str| {
        let (address, dir) = (server.address.clone(), server.home(home));
        async move {
            // The key stays, and the answer is as good as lost.
            let _ = std::fs::remove_file(dir.join("cert.pem"));
            join(&address, &token, role, name, &dir).await.map_err(|e| e.to_string())
        }
    };
    let first = server.token("node", "n1", 60).await;
    attempt(first.clone(), Role::Node, "n1", "former").await.unwrap();
    attempt(first.clone(), Role::Node, "n1", "former").await.unwrap();
    let second = server.token("node", "n1", 60).await;
    let successor = attempt(second.clone(), Role::Node, "n1", "successor").await.unwrap();
    let error = attempt(first, Role::Node, "n1", "former").await.unwrap_err();
    assert!(error.contains("unknown, used or expired"), "{error}");
    reported(&server, &successor).await;

    let token = server.token("admin", "ops", 60).await;
    attempt(token.clone(), Role::Admin, "ops", "ops").await.unwrap();
    let other = server.token("admin", "ci", 60).await;
    attempt(other, Role::Admin, "ci", "ci").await.unwrap();
    let members = &server.controller.membership.members;
    let before = members.join_tokens().len();
    server.admin().remove_admin(RemoveAdminRequest { admin: "ops".into() }).await.unwrap();
    assert_eq!(members.join_tokens().len(), before - 1, "the token that it used ends with it");
    let error = attempt(token, Role::Admin, "ops", "ops").await.unwrap_err();
    assert!(error.contains("unknown, used or expired"), "{error}");
    let admins = server.controller.membership.admission.admins();
    assert_eq!(admins.iter().map(|admin| &admin.holder).collect::<Vec<_>>(), ["ci"]);
    server.stop().await;
}

async fn reported(server: &Server, node: &Identity) {
    let mut agent = AgentClient::new(node.channel(&server.address).unwrap());
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    agent.report_node(report).await.unwrap();
}

#[tokio::test]
async fn a_newcomer_gives_its_token_to_the_controller_that_made_it_and_to_no_other() {
    let (ours, theirs) = (Server::start().await, Server::start().await);
    let token = ours.token("pool", "", 60).await;
    let home = ours.home("p1");
    let error = join(&theirs.address, &token, Role::Pool, "p1", &home).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    join(&ours.address, &token, Role::Pool, "p1", &home).await.unwrap();
    ours.stop().await;
    theirs.stop().await;
}

#[tokio::test]
async fn foreign_and_expired_certificates_do_not_get_in() {
    let server = Server::start().await;
    let (foreign_dir, brief_dir) = (server.home("foreign"), server.home("brief"));
    let foreign = Authority::create(&foreign_dir, Lifetimes::default()).unwrap();
    let foreign = foreign.issue_identity(&foreign_dir.join("n1"), Role::Node, "n1").unwrap();
    let channel = foreign.channel(&server.address).unwrap();
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    refused(AgentClient::new(channel).report_node(report.clone()).await);

    // Issued by the right authority, but expired.
    let brief = Lifetimes { holder: Duration::from_secs(1), ..Lifetimes::default() };
    let authority = Authority::load(&server.home("controller"), brief).unwrap();
    let node = authority.issue_identity(&brief_dir, Role::Node, "n1").unwrap();
    while node.validity().1 + Duration::from_secs(1) > SystemTime::now() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let channel = node.channel(&server.address).unwrap();
    refused(AgentClient::new(channel).report_node(report).await);
    server.stop().await;
}

#[tokio::test]
async fn garbage_on_the_port_harms_nobody() {
    let server = Server::start().await;
    let node = server.member(Role::Node, "n1").await;
    let mut silent = Vec::new();
    let garbage: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0x16, 0x03, 0x01, 0xff, 0xff, 0x01],
        &[0; 4096],
        &[0xff; 70_000],
    ];
    for bytes in garbage.iter().cycle().take(100) {
        let mut tcp = TcpStream::connect(&server.address).await.unwrap();
        let _ = tcp.write_all(bytes).await;
        silent.push(tcp);
        silent.push(TcpStream::connect(&server.address).await.unwrap());
        if silent.len() > 60 {
            silent.drain(..30);
        }
    }
    let mut agent = AgentClient::new(node.channel(&server.address).unwrap());
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    agent.report_node(report.clone()).await.unwrap();
    // Malformed input of a newcomer, and far too large input.
    let token = server.token("", "", 60).await;
    let newcomer = newcomer_channel(&server.address, &token).await.unwrap();
    let mut joining = JoinClient::new(newcomer);
    for csr_der in [Vec::new(), vec![0x30; 100], vec![0; 60_000], vec![0; 1 << 20]] {
        let request = JoinRequest {
            token: token.to_string(),
            csr_der,
            role: "pool".into(),
            name: "p1".into(),
        };
        assert_ne!(code(joining.join(request).await), Code::Ok);
    }
    let mut huge = report.clone();
    huge.events = vec![AgentEvent { message: "x".repeat(1 << 20), ..AgentEvent::default() }; 20];
    assert_eq!(code(agent.report_node(huge).await), Code::OutOfRange);
    agent.report_node(report).await.unwrap();
    let mut cut_off = silent.pop().unwrap();
    drop(silent);
    let waiting = tokio::time::timeout(Duration::from_secs(15), cut_off.read(&mut [0])).await;
    assert!(waiting.is_ok(), "who says nothing is cut off");
    server.stop().await;
}

#[tokio::test]
async fn a_member_renews_itself_while_connected_and_outlives_its_first_certificate() {
    let lifetimes = Lifetimes { holder: Duration::from_secs(6), ..Lifetimes::default() };
    let server = Server::with(lifetimes).await;
    let node = server.member(Role::Node, "n1").await;
    let (_, first_end) = node.validity();
    let (stop, shutdown) = tokio::sync::watch::channel(false);
    let renewing = tokio::spawn({
        let (node, address) = (node.clone(), server.address.clone());
        async move { node.keep_renewed(address, shutdown).await }
    });
    let mut agent = AgentClient::new(node.channel(&server.address).unwrap());
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    let mut failures = 0;
    while SystemTime::now() < first_end + Duration::from_secs(1) {
        failures = match agent.report_node(report.clone()).await {
            Ok(_) => 0,
            Err(status) => {
                // The connection of the first certificate ends with it, perhaps in the middle of a
                // call (a broken pipe is Unknown); the next call is on a new one.
                let cut = matches!(status.code(), Code::Unavailable | Code::Unknown);
                assert!(cut, "{status}");
                failures + 1
            }
        };
        assert!(failures < 100, "a connection must come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(node.validity().1 > first_end);
    stop.send_replace(true);
    renewing.await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn the_authority_is_rotated_with_members_connected_old_ones_renewing_and_new_ones_joining() {
    let server = Server::start().await;
    let old = server.member(Role::Node, "n1").await;
    let token_of_before = server.token("pool", "", 60).await;
    let mut agent = AgentClient::new(old.channel(&server.address).unwrap());
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    agent.report_node(report.clone()).await.unwrap();
    server.admin().rotate_authority(RotateAuthorityRequest::default()).await.unwrap();
    agent.report_node(report.clone()).await.unwrap();
    // A new connection with the old certificate, to the controller's new one.
    let mut again = AgentClient::new(old.channel(&server.address).unwrap());
    again.report_node(report.clone()).await.unwrap();
    // An earlier token names the former authority.
    let home = server.home("p1");
    join(&server.address, &token_of_before, Role::Pool, "p1", &home).await.unwrap();
    let new = server.member(Role::Node, "n2").await;
    old.renew(&server.address).await.unwrap();
    for (identity, name) in [(&old, "n1"), (&new, "n2")] {
        let mut agent = AgentClient::new(identity.channel(&server.address).unwrap());
        agent.report_node(NodeReport { node: name.into(), ..report.clone() }).await.unwrap();
    }
    let twice =
        server.admin().rotate_authority(RotateAuthorityRequest::default()).await.unwrap_err();
    assert_eq!(twice.code(), Code::FailedPrecondition);
    server.stop().await;
}

#[tokio::test]
async fn assignments_and_events_come_as_they_change_and_a_shutdown_ends_them() {
    let server = Server::start().await;
    let node = server.member(Role::Node, "n1").await;
    let mut agent = AgentClient::new(node.channel(&server.address).unwrap());
    let watch = WatchNodeRequest { node: "n1".into() };
    let mut assignments = agent.watch_node(watch).await.unwrap().into_inner();
    let first = assignments.message().await.unwrap().unwrap();
    assert!(first.complete && first.targets.is_empty());
    let follow = WatchEventsRequest { follow: true, ..WatchEventsRequest::default() };
    let mut events = server.admin().watch_events(follow).await.unwrap().into_inner();
    let mut seen = Vec::new();
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    agent.report_node(report).await.unwrap();
    while !seen.contains(&"NodeAdded".to_owned()) {
        seen.push(events.message().await.unwrap().unwrap().reason);
    }
    assert!(seen.contains(&"Joined".to_owned()));
    server.stop().await;
    assert!(!matches!(assignments.message().await, Ok(Some(_))));
}

#[tokio::test]
async fn a_controller_says_what_is_wrong_with_its_directory_socket_or_port() {
    use quoin_control::{Options, init, run};
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("c");
    let (_down, shutdown) = tokio::sync::watch::channel(false);
    let fails = |options: Options| {
        let shutdown = shutdown.clone();
        async move { run(options, shutdown).await.unwrap_err().to_string() }
    };
    let error = fails(Options::new(&home)).await;
    assert!(error.contains("quoin controller init"), "{error}");
    init(&home, Lifetimes::default()).await.unwrap();
    let error = init(&home, Lifetimes::default()).await.unwrap_err().to_string();
    assert!(error.contains("never overwritten"), "{error}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let error = fails(Options { listen: Some(listen), ..Options::new(&home) }).await;
    assert!(error.contains(&listen.to_string()), "{error}");
    let options = Options { data_security: "none".into(), ..Options::new(&home) };
    assert!(fails(options).await.contains("neither authenticate nor encrypt"));
    // A file that is not a socket is not removed; the socket of a dead process is.
    let options = Options::new(&home);
    std::fs::remove_file(&options.admin_socket).ok();
    std::fs::write(&options.admin_socket, "precious").unwrap();
    let error = fails(options.clone()).await;
    assert!(error.contains("admin.sock"), "{error}");
    std::fs::remove_file(&options.admin_socket).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&options.admin_socket).unwrap());
    let (down, shutdown) = tokio::sync::watch::channel(false);
    let metrics = options.metrics.clone();
    let running = tokio::spawn(run(options.clone(), shutdown));
    let mut client = ClusterClient::new(quoin_identity::unix_channel(&options.admin_socket));
    while client.get_cluster_info(GetClusterInfoRequest {}).await.is_err() {
        assert!(!running.is_finished());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&options.admin_socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(metrics.health().is_ok() && metrics.render().contains("quoin_controller_up 1"));
    let error = fails(Options::new(&home)).await;
    assert!(error.contains("another process has the records open"), "{error}");
    down.send_replace(true);
    running.await.unwrap().unwrap();
    assert!(!options.admin_socket.exists());
    assert!(metrics.health().is_err());
}
