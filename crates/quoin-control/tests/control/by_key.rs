//! Members are identified by their keys, and can be removed permanently.

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::join_client::JoinClient;
use quoin_api::control::*;
use quoin_identity::{Authority, Identity, Lifetimes, Role, join, key_hash_of_request};
use tonic::{Code, Status};

use crate::server::Server;

async fn reports(server: &Server, identity: &Identity) -> Result<(), Status> {
    let channel = identity.channel(&server.address).unwrap();
    let report = NodeReport { node: identity.peer().name.clone(), ..NodeReport::default() };
    AgentClient::new(channel).report_node(report).await.map(drop)
}

fn is_refused(answer: Result<(), Status>, why: &str) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(status.message().contains(why), "{status}");
}

async fn renews(server: &Server, identity: &Identity, csr_der: Vec<u8>) -> Result<(), Status> {
    let channel = identity.channel(&server.address).unwrap();
    JoinClient::new(channel).renew(RenewRequest { csr_der }).await.map(drop)
}

/// Joins with a token for this very name and a key of its own.
async fn takes_the_name(server: &Server, role: Role, name: &str, home: &str) -> Identity {
    let token = server.token(role.as_str(), name, 60).await;
    join(&server.address, &token, role, name, &server.home(home)).await.unwrap()
}

#[tokio::test]
async fn a_node_that_was_replaced_can_do_nothing_with_its_certificate_not_even_renew_it() {
    let server = Server::start().await;
    let first = server.member(Role::Node, "n1").await;
    // An open connection, with a stream on it.
    let channel = first.channel(&server.address).unwrap();
    let mut agent = AgentClient::new(channel);
    let watch = WatchNodeRequest { node: "n1".into() };
    let mut assignments = agent.watch_node(watch).await.unwrap().into_inner();
    assignments.message().await.unwrap().unwrap();

    let second = takes_the_name(&server, Role::Node, "n1", "second").await;
    reports(&server, &second).await.unwrap();
    is_refused(reports(&server, &first).await, "known by another key");
    is_refused(
        renews(&server, &first, first.renewal_request().unwrap()).await,
        "known by another key",
    );
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    is_refused(agent.report_node(report).await.map(drop), "known by another key");
    let ended = assignments.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::PermissionDenied, "{ended}");
    reports(&server, &second).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_removed_node_stays_removed_when_its_name_is_used_again() {
    let server = Server::start().await;
    let first = server.member(Role::Node, "n1").await;
    let leaving = NodeReport { node: "n1".into(), leaving: true, ..NodeReport::default() };
    server.local_agent().report_node(leaving).await.unwrap();
    server
        .admin()
        .remove_node(RemoveNodeRequest { node: "n1".into(), force: false })
        .await
        .unwrap();
    is_refused(reports(&server, &first).await, "was removed");
    let token = server.token("node", "", 60).await;
    let home = server.home("second");
    let second = join(&server.address, &token, Role::Node, "n1", &home).await.unwrap();
    reports(&server, &second).await.unwrap();
    is_refused(reports(&server, &first).await, "known by another key");
    server.stop().await;
}

#[tokio::test]
async fn a_renewal_for_another_key_counts_from_that_keys_first_call_and_ends_the_former_one() {
    let server = Server::start().await;
    let first = server.member(Role::Node, "n1").await;
    // Another key of the same name, as by a member that changes its own.
    let lost = Authority::load(&server.home("controller"), Lifetimes::default()).unwrap();
    let next = lost.issue_identity(&server.home("next"), Role::Node, "n1").unwrap();
    is_refused(reports(&server, &next).await, "known by another key");
    let csr_der = next.renewal_request().unwrap();
    assert_ne!(
        key_hash_of_request(&csr_der).unwrap(),
        key_hash_of_request(&first.renewal_request().unwrap()).unwrap()
    );
    renews(&server, &first, csr_der).await.unwrap();
    // The answer may have been lost, so the present key is valid until the next one is used.
    reports(&server, &first).await.unwrap();
    reports(&server, &next).await.unwrap();
    is_refused(reports(&server, &first).await, "known by another key");
    reports(&server, &next).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_member_whose_key_no_record_has_is_known_by_the_key_of_its_first_call() {
    let server = Server::start().await;
    let authority = Authority::load(&server.home("controller"), Lifetimes::default()).unwrap();
    let own = authority.issue_identity(&server.home("own"), Role::Node, "n1").unwrap();
    let other = authority.issue_identity(&server.home("other"), Role::Node, "n1").unwrap();
    reports(&server, &own).await.unwrap();
    is_refused(reports(&server, &other).await, "known by another key");
    reports(&server, &own).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn an_admin_that_is_removed_governs_nothing_any_more_and_its_streams_end() {
    let server = Server::start().await;
    let stolen = server.member(Role::Admin, "ops").await;
    let other = server.member(Role::Admin, "ci").await;
    let mut admin = ClusterClient::new(stolen.channel(&server.address).unwrap());
    let listed = admin.list_admins(ListAdminsRequest {}).await.unwrap().into_inner().admins;
    let mut names: Vec<_> = listed.iter().map(|admin| admin.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["ci", "ops"]);
    assert!(listed.iter().all(|admin| admin.key_hash.len() == 64 && admin.joined_at.is_some()));
    let follow = WatchEventsRequest { follow: true, ..WatchEventsRequest::default() };
    let mut events = admin.watch_events(follow).await.unwrap().into_inner();

    let remove = |name: &str| RemoveAdminRequest { admin: name.into() };
    let mut governing = ClusterClient::new(other.channel(&server.address).unwrap());
    let unknown = governing.remove_admin(remove("nobody")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
    assert!(unknown.message().contains("quoin admin list"), "{unknown}");
    governing.remove_admin(remove("ops")).await.unwrap();
    let token = admin.create_join_token(CreateJoinTokenRequest::default()).await.map(drop);
    is_refused(token, "was removed");
    is_refused(renews(&server, &stolen, stolen.renewal_request().unwrap()).await, "was removed");
    let ended = loop {
        match events.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(ended.code(), Code::PermissionDenied, "{ended}");
    assert_eq!(server.controller.membership.admission.admins().len(), 1);

    let again = server.token("admin", "", 60).await;
    join(&server.address, &again, Role::Admin, "ops", &server.home("ops-2")).await.unwrap();
    let token = admin.create_join_token(CreateJoinTokenRequest::default()).await.map(drop);
    is_refused(token, "known by another key");
    server.stop().await;
}

#[tokio::test]
async fn an_authority_that_is_replaced_at_once_ends_every_certificate_until_its_holder_joins_again()
{
    let server = Server::start().await;
    let node = server.member(Role::Node, "n1").await;
    let admin = server.member(Role::Admin, "ops").await;
    let unused = server.token("pool", "", 60).await;
    let mut standing = AgentClient::new(node.channel(&server.address).unwrap());
    let report = NodeReport { node: "n1".into(), ..NodeReport::default() };
    standing.report_node(report.clone()).await.unwrap();

    let mut governing = ClusterClient::new(admin.channel(&server.address).unwrap());
    let authority = async |server: &Server| {
        let info = server.admin().get_cluster_info(GetClusterInfoRequest {}).await.unwrap();
        info.into_inner().authority
    };
    let former = authority(&server).await;
    let at_once = |at_once: &str| RotateAuthorityRequest { at_once: at_once.to_owned() };
    for malformed in ["x", &former[1..], &"ä".repeat(32)] {
        let refused = governing.rotate_authority(at_once(malformed)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains("quoin cluster info"), "{refused}");
    }
    let told = governing.rotate_authority(at_once(&former)).await.unwrap().into_inner().message;
    assert!(told.contains("quoin token create") && told.contains("cert.pem"), "{told}");

    is_refused(standing.report_node(report).await.map(drop), "authority that was replaced");
    let fresh = reports(&server, &node).await.unwrap_err();
    assert!(matches!(fresh.code(), Code::Unavailable | Code::Unknown), "{fresh}");
    let home = server.home("p1");
    join(&server.address, &unused, Role::Pool, "p1", &home).await.unwrap_err();
    assert!(server.controller.membership.members.join_tokens().is_empty());

    // The way in the message: a new token, the certificate removed, the key kept.
    let token = server.token("node", "n1", 60).await;
    let home = node.dir().to_owned();
    std::fs::remove_file(home.join("cert.pem")).unwrap();
    let again = join(&server.address, &token, Role::Node, "n1", &home).await.unwrap();
    reports(&server, &again).await.unwrap();
    // The answer was lost, and the request is sent again.
    let present = authority(&server).await;
    let kept = server.token("pool", "", 60).await;
    let told =
        server.admin().rotate_authority(at_once(&former)).await.unwrap().into_inner().message;
    assert!(told.contains("nothing was changed") && told.contains(&present), "{told}");
    assert_eq!(authority(&server).await, present);
    reports(&server, &again).await.unwrap();
    join(&server.address, &kept, Role::Pool, "p1", &server.home("p2")).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn of_two_that_join_with_one_token_the_one_that_is_refused_leaves_its_name_free() {
    let server = Server::start().await;
    let token = server.token("node", "", 60).await;
    let attempt = |name: &'static str| {
        let (address, home, token) = (server.address.clone(), server.home(name), token.clone());
        async move { join(&address, &token, Role::Node, name, &home).await }
    };
    let (one, two) = tokio::join!(attempt("n1"), attempt("n2"));
    let loser = match (&one, &two) {
        (Ok(_), Err(_)) => "n2",
        (Err(_), Ok(_)) => "n1",
        other => panic!("{other:?}"),
    };
    let token = server.token("node", "", 60).await;
    let home = server.home("again");
    join(&server.address, &token, Role::Node, loser, &home).await.unwrap();

    // A name that is taken does not use the token up.
    let token = server.token("node", "", 60).await;
    let home = server.home("thief");
    join(&server.address, &token, Role::Node, "n1", &home).await.unwrap_err();
    join(&server.address, &token, Role::Node, "n3", &server.home("n3")).await.unwrap();
    server.stop().await;
}
