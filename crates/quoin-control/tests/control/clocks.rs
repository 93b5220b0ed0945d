//! Clocks that were ahead, and are right again.

use std::time::{Duration, SystemTime};

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    GetClusterInfoRequest, ListPoolsRequest, NodeReport, PoolReport, RemoveAdminRequest,
};
use quoin_identity::{Authority, Identity, Lifetimes, Role};
use tonic::Code;

use crate::server::Server;

const AHEAD: Duration = Duration::from_secs(25 * 86_400);

/// Gives an identity a certificate that the controller would have issued by a clock that is ahead.
fn make_early(authority: &Authority, identity: &Identity) {
    let request = identity.renewal_request().unwrap();
    let then = SystemTime::now() + AHEAD;
    identity.install(&authority.issue_at(&request, identity.peer(), then).unwrap()).unwrap();
}

#[tokio::test]
async fn a_member_whose_certificate_is_not_valid_yet_gets_another_and_does_nothing_else_before() {
    let server = Server::start().await;
    let authority = Authority::load(&server.home("controller"), Lifetimes::default()).unwrap();
    let node = server.member(Role::Node, "n1").await;
    let report = || NodeReport { node: "n1".into(), ..NodeReport::default() };
    make_early(&authority, &node);
    let channel = node.channel(&server.address).unwrap();
    let refused = AgentClient::new(channel).report_node(report()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert!(refused.message().contains("is not valid before"), "{refused}");

    let (stop, shutdown) = tokio::sync::watch::channel(false);
    let renewing = tokio::spawn({
        let (node, address) = (node.clone(), server.address.clone());
        async move { node.keep_renewed(address, shutdown).await }
    });
    for _ in 0..600 {
        if node.not_valid_yet().is_none() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(node.not_valid_yet(), None);
    let channel = node.channel(&server.address).unwrap();
    AgentClient::new(channel).report_node(report()).await.unwrap();
    stop.send_replace(true);
    renewing.await.unwrap();

    // Its key is as good as ever, and no better: a member that was removed gets none.
    let removed = server.member(Role::Admin, "a1").await;
    make_early(&authority, &removed);
    let asked = RemoveAdminRequest { admin: "a1".into() };
    server.admin().remove_admin(asked).await.unwrap();
    let refused = removed.renew(&server.address).await.unwrap_err().to_string();
    assert!(refused.contains("removed"), "{refused}");
    assert!(removed.not_valid_yet().is_some());
    server.stop().await;
}

#[tokio::test]
async fn a_controller_whose_certificate_is_not_valid_yet_makes_itself_another() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("controller");
    quoin_control::init(&dir, Lifetimes::default()).await.unwrap();
    let authority = Authority::load(&dir, Lifetimes::default()).unwrap();
    let own = Identity::load(&dir.join("identity")).unwrap();
    make_early(&authority, &own);
    assert!(own.not_valid_yet().is_some());
    let controller = quoin_control::open(&quoin_control::Options::new(&dir)).await.unwrap();
    own.reload().unwrap();
    assert_eq!(own.not_valid_yet(), None);
    let events = controller.state.events().after(0);
    let told = events.iter().find(|event| event.reason == "ClockWasAhead").expect("it is told");
    assert!(told.message.contains("check this host's clock"), "{}", told.message);
}

#[tokio::test]
async fn a_clock_that_differs_is_an_event_and_is_told_with_its_host_until_it_agrees() {
    let server = Server::start().await;
    let pool = server.member(Role::Pool, "p1").await;
    let report = || PoolReport {
        pool: "p1".into(),
        pool_id: "7".repeat(32),
        node: "h1".into(),
        address: "127.0.0.1:7401".into(),
        capacity_bytes: 1 << 30,
        free_bytes: 1 << 30,
        start_counter: 1,
        ..PoolReport::default()
    };
    let ahead = |mut request: tonic::Request<()>| {
        let value = "2160000000/3".parse().unwrap();
        request.metadata_mut().insert("quoin-clock-ahead-ms", value);
        Ok(request)
    };
    let channel = pool.channel(&server.address).unwrap();
    let mut agent = AgentClient::with_interceptor(channel, ahead);
    for _ in 0..3 {
        agent.report_pool(report()).await.unwrap();
    }
    let clocks = async || {
        let info = server.admin().get_cluster_info(GetClusterInfoRequest {}).await.unwrap();
        info.into_inner().clocks
    };
    let told = clocks().await;
    assert_eq!((told.len(), told[0].member.as_str()), (1, "pool p1"));
    assert_eq!(told[0].ahead_ms, 2_160_000_000);
    assert!(told[0].message.contains("host h1 is 25 days ahead of"), "{}", told[0].message);
    let pools = server.admin().list_pools(ListPoolsRequest::default()).await.unwrap().into_inner();
    assert!(pools.pools[0].message.contains("host h1 is 25 days ahead"), "{:?}", pools.pools[0]);
    let count = |reason: &str| {
        let events = server.controller.state.events().after(0);
        events.iter().filter(|event| event.reason == reason).count()
    };
    assert_eq!((count("ClockDiffers"), count("ClockAgrees")), (1, 0));

    // The member measures by itself, with the answer of its first call.
    let mut agent = AgentClient::new(pool.controller(&server.address).unwrap());
    agent.report_pool(report()).await.unwrap();
    let measured = pool.clock_difference().expect("an answer shows the time");
    assert!(!measured.is_beyond(Duration::from_secs(5)), "{measured:?}");
    agent.report_pool(report()).await.unwrap();
    assert_eq!((count("ClockDiffers"), count("ClockAgrees")), (1, 1));
    assert!(clocks().await.is_empty());
    server.stop().await;
}
