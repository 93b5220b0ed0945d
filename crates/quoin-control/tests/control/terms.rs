//! Two controllers of one cluster, over real sockets: the records of one were restored elsewhere.

use std::time::Duration;

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_api::control::{
    ListPoolsRequest, PoolAssignment, PoolHoldings, PoolReport, WatchPoolRequest,
};
use quoin_control::Error;
use quoin_control::backup::Backup;
use quoin_control::salvage::{RecoverRecords, Recovered};
use quoin_identity::{Identity, JoinToken, Lifetimes, Role, TermChannel, join};
use quoin_types::{Term, TermId};
use tonic::Code;

use crate::server::Server;

fn agent(member: &Identity, server: &Server) -> AgentClient<TermChannel> {
    AgentClient::new(member.controller(&server.address).unwrap())
}

pub fn report(pool: &str) -> PoolReport {
    PoolReport {
        pool: pool.into(),
        pool_id: "1".repeat(32),
        node: "host".into(),
        address: "127.0.0.1:1".into(),
        capacity_bytes: 1 << 30,
        free_bytes: 1 << 30,
        start_counter: 1,
        ..PoolReport::default()
    }
}

/// Follows a controller as a pool without replicas does, until the test ends.
pub fn follow(pool: &Identity, server: &Server) -> tokio::task::JoinHandle<()> {
    let (pool, agent) = (pool.clone(), agent(pool, server));
    let name = pool.peer().name.clone();
    tokio::spawn(async move {
        let reports = async {
            loop {
                let _ = agent.clone().report_pool(report(&name)).await;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let orders = async {
            loop {
                let request = WatchPoolRequest { pool: name.clone() };
                if let Ok(stream) = agent.clone().watch_pool(request).await {
                    obey(&pool, agent.clone(), stream.into_inner()).await;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::join!(reports, orders);
    })
}

/// Reports its holdings at each request, until the controller is refused or gone.
async fn obey(
    pool: &Identity,
    mut agent: AgentClient<TermChannel>,
    mut orders: tonic::Streaming<PoolAssignment>,
) {
    let mut told = 0;
    while let Ok(Some(message)) = orders.message().await {
        if pool.accept_controller_term(&message.term, !message.does_not_rule).is_err() {
            return;
        }
        if message.holdings_request > told {
            told = message.holdings_request;
            let (pool, request) = (pool.peer().name.clone(), told);
            let holdings = PoolHoldings { pool, request, ..PoolHoldings::default() };
            let _ = agent.report_holdings(futures::stream::iter([holdings])).await;
        }
    }
}

/// Starts another controller, from a backup of this one.
async fn restored(server: &Server) -> Server {
    let backup = server.controller.disaster.backups.make(true).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("controller");
    Backup::parse(&backup).unwrap().restore(&home, false).await.unwrap();
    Server::over(dir, Lifetimes::default(), server.first_token.clone()).await
}

async fn recover(server: &Server) -> Recovered {
    server.controller.disaster.records.recover(&RecoverRecords::default()).await.unwrap()
}

/// Asserts that the controller neither accepts nor lists a token.
async fn joins_nobody(server: &Server, token: &JoinToken) {
    let home = server.home("newcomer");
    let refused = join(&server.address, token, Role::Pool, "p9", &home).await;
    let refused = refused.expect_err("it joins somebody").to_string();
    assert!(refused.contains("unknown, used or expired"), "{refused}");
    let shown = server.controller.membership.members.join_tokens();
    assert!(shown.iter().all(|shown| shown.secret_hash != token.secret_hash()));
}

fn reasons(server: &Server) -> Vec<String> {
    server.controller.state.events().after(0).into_iter().map(|event| event.reason).collect()
}

/// Returns the outcome of a start in the directory of a controller that ended.
async fn reopened(dir: &tempfile::TempDir) -> Result<quoin_control::Controller, Error> {
    let options = quoin_control::Options::new(dir.path().join("controller"));
    loop {
        match quoin_control::open(&options).await {
            // The former controller's connections are of this process, and are not closed yet.
            Err(Error::Store(quoin_control::store::StoreError::Locked { .. })) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            opened => return opened,
        }
    }
}

#[tokio::test]
async fn a_controller_ends_as_soon_as_a_member_shows_a_higher_term_and_stays_ended_until_a_person_decides()
 {
    let first = Server::start().await;
    let pool = first.member(Role::Pool, "p1").await;
    let node = first.member(Role::Node, "n1").await;
    agent(&pool, &first).report_pool(report("p1")).await.unwrap();
    let former_token = first.token("pool", "", 600).await;
    let second = restored(&first).await;
    // Records that do not rule claim nothing: the first one continues, though the pool is connected
    // to both.
    let following = follow(&pool, &second);
    agent(&pool, &first).report_pool(report("p1")).await.unwrap();
    assert_eq!(pool.terms().highest().term, Term::default());
    let recovered = recover(&second).await;
    let term = second.controller.state.term();
    assert_eq!((recovered.term, term.number), (term, 1));
    assert_eq!(pool.terms().highest().term, term, "a pool has heard of it before the records rule");
    assert!(reasons(&second).contains(&"TermBegan".to_owned()));
    // A node that does not know of it is served by the first one, which cannot know.
    assert_eq!(node.terms().highest().term, Term::default());
    // The pool knows, and shows it with its next call.
    let refused = agent(&pool, &first).report_pool(report("p1")).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    assert!(reasons(&first).contains(&"ControllerSuperseded".to_owned()));
    let (ended, dir) = first.ended().await;
    assert!(matches!(ended, Error::Superseded { by, .. } if by == term), "{ended}");
    assert!(ended.to_string().contains("quoin controller recover --state"), "{ended}");
    for _ in 0..2 {
        let again = reopened(&dir).await.err().expect("it starts again");
        assert!(matches!(again, Error::Superseded { by, .. } if by == term), "{again}");
    }
    // A user lets it begin a term of its own.
    let home = dir.path().join("controller");
    assert_eq!(
        quoin_control::let_recover(&home, &quoin_control::Records::Embedded).await.unwrap(),
        term
    );
    let once = quoin_control::let_recover(&home, &quoin_control::Records::Embedded)
        .await
        .unwrap_err()
        .to_string();
    assert!(once.contains("no other controller took the place"), "{once}");
    let token = second.first_token.clone();
    let third = Server::over(dir, Lifetimes::default(), token).await;
    assert!(
        third.controller.state.recovery_reason().contains("term 1"),
        "its records rule at once"
    );
    joins_nobody(&third, &former_token).await;
    following.abort();
    let following = follow(&pool, &third);
    let recovered = recover(&third).await;
    assert_eq!(recovered.term.number, 2, "above what the pool has heard of");
    following.abort();
    agent(&pool, &second).report_pool(report("p1")).await.unwrap_err();
    let (ended, _dir) = second.ended().await;
    assert!(matches!(ended, Error::Superseded { by, .. } if by == recovered.term), "{ended}");
    third.stop().await;
}

/// An old copy of the records does not know of it where one was used or revoked since.
#[tokio::test]
async fn no_join_token_of_before_a_recovery_is_taken_after_it() {
    let first = Server::start().await;
    let (used, revoked) = (first.token("pool", "", 600).await, first.token("", "", 600).await);
    let second = restored(&first).await;
    // Both tokens are used up where the records are, as all members there know.
    join(&first.address, &used, Role::Pool, "p1", &first.home("p1")).await.unwrap();
    first.controller.membership.members.revoke_join_token(&revoked.to_string()).await.unwrap();
    for token in [&used, &revoked, &first.first_token] {
        joins_nobody(&second, token).await;
    }
    let fresh = second.token("pool", "", 600).await;
    recover(&second).await;
    for token in [&used, &revoked, &first.first_token] {
        joins_nobody(&second, token).await;
    }
    join(&second.address, &fresh, Role::Pool, "p2", &second.home("p2")).await.unwrap();

    // Records that were put back by hand rule, because they cannot notice it.
    let unused = second.token("pool", "", 600).await;
    recover(&second).await;
    joins_nobody(&second, &unused).await;
    assert!(reasons(&second).contains(&"JoinTokensEnded".to_owned()));
    second.stop().await;
    first.stop().await;
}

/// A user's context checks terms as members do.
#[tokio::test]
async fn a_command_of_an_admin_who_heard_of_a_newer_term_is_refused_and_ends_the_former_controller()
{
    let first = Server::start().await;
    let admin = first.member(Role::Admin, "ops").await;
    let pool = first.member(Role::Pool, "p1").await;
    agent(&pool, &first).report_pool(report("p1")).await.unwrap();
    let ask = async |server: &Server| {
        let channel = admin.connect(&server.address).await.unwrap();
        ClusterClient::new(channel).list_pools(ListPoolsRequest {}).await
    };
    let second = restored(&first).await;
    let following = follow(&pool, &second);
    recover(&second).await;
    following.abort();
    ask(&first).await.expect("neither of the two has heard of it");
    ask(&second).await.unwrap();
    let term = second.controller.state.term();
    assert_eq!(admin.terms().highest().term, term);
    let refused = ask(&first).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    let (ended, _dir) = first.ended().await;
    assert!(matches!(ended, Error::Superseded { by, .. } if by == term), "{ended}");
    second.stop().await;
}

#[tokio::test]
async fn of_two_controllers_that_begin_one_term_a_pool_believes_the_first_and_a_recovery_settles_it()
 {
    let first = Server::start().await;
    let pool = first.member(Role::Pool, "p1").await;
    let other = first.member(Role::Pool, "p2").await;
    for (pool, name) in [(&pool, "p1"), (&other, "p2")] {
        agent(pool, &first).report_pool(report(name)).await.unwrap();
    }
    let left = restored(&first).await;
    let alone = |without: &str| RecoverRecords {
        without_pools: vec![without.to_owned()],
        ..RecoverRecords::default()
    };
    let at_left = follow(&pool, &left);
    left.controller.disaster.records.recover(&alone("p2")).await.unwrap();
    // Soon after its start, a controller waits for pools to come.
    let right = restored(&first).await;
    let at_right = follow(&other, &right);
    right.controller.disaster.records.recover(&alone("p1")).await.unwrap();
    let (a, b) = (left.controller.state.term(), right.controller.state.term());
    assert!(a.number == 1 && b.number == 1 && a.id != b.id);
    // Neither can give orders to the pool that accepted the other, and neither ends.
    for (pool, server, name) in [(&pool, &right, "p1"), (&other, &left, "p2")] {
        let refused = agent(pool, server).report_pool(report(name)).await.unwrap_err();
        assert!(refused.message().contains("another one began the same term"), "{refused}");
        assert!(reasons(server).contains(&"TermRefused".to_owned()));
    }
    // A recovery at one of them asks both pools all the same, and goes above.
    at_right.abort();
    let both = follow(&other, &left);
    let recovered = recover(&left).await;
    assert_eq!(recovered.term.number, 2);
    assert_eq!(recovered.pools, ["p1", "p2"]);
    for task in [at_left, both] {
        task.abort();
    }
    agent(&other, &right).report_pool(report("p2")).await.unwrap_err();
    let (ended, _dir) = right.ended().await;
    assert!(matches!(ended, Error::Superseded { by, .. } if by == recovered.term), "{ended}");
    first.stop().await;
    left.stop().await;
}

#[tokio::test]
async fn no_member_ends_a_controller_by_a_term_that_no_controller_signed() {
    let server = Server::start().await;
    let pool = server.member(Role::Pool, "p1").await;
    let term = Term { number: 9, id: TermId(9) };
    let stranger = Server::start().await;
    let forged = [
        pool.sign_term(term).unwrap(),
        stranger.controller.state.identity().sign_term(term).unwrap(),
        b"QTM1 and nothing that follows".as_slice().into(),
    ];
    for proof in forged {
        let mut agent = AgentClient::new(pool.channel(&server.address).unwrap());
        let mut request = tonic::Request::new(report("p1"));
        let mut headers = tonic::codegen::http::HeaderMap::new();
        quoin_identity::show_term(&mut headers, &proof);
        let shown = headers.get("quoin-term").unwrap().to_str().unwrap().parse().unwrap();
        request.metadata_mut().insert("quoin-term", shown);
        agent.report_pool(request).await.unwrap();
    }
    assert!(!reasons(&server).contains(&"ControllerSuperseded".to_owned()));
    server.stop().await;
    stranger.stop().await;
}

/// A member refuses every answer of a controller whose term is over, for every method: here of one
/// that knows of nothing newer, and so would answer.
#[tokio::test]
async fn every_answer_of_a_former_term_is_refused_by_a_member_that_heard_of_a_newer_one() {
    use quoin_api::control::join_client::JoinClient;
    use quoin_api::control::{
        AcquireEpochRequest, NodeReport, RenewRequest, SwapMembershipRequest, VolumeReport,
        WatchNodeRequest,
    };
    let server = Server::start().await;
    let (pool, node) =
        (server.member(Role::Pool, "p1").await, server.member(Role::Node, "n1").await);
    let (volume_id, named) = ("1".repeat(32), "n1".to_owned());
    for newer in [false, true] {
        let known = |member: &Identity| {
            if newer {
                // A term without a proof that it could show: the controller would end.
                let term = r#"{"number":1,"id":"05","proof":""}"#;
                std::fs::write(member.dir().join("term.json"), term).unwrap();
            }
            Identity::load(member.dir()).unwrap()
        };
        let (pool, node) = (known(&pool), known(&node));
        let (mut of_pool, mut of_node) = (agent(&pool, &server), agent(&node, &server));
        let epoch = AcquireEpochRequest {
            volume_id: volume_id.clone(),
            node: named.clone(),
            incarnation: volume_id.clone(),
            at_least: 0,
            ..AcquireEpochRequest::default()
        };
        let swap = SwapMembershipRequest {
            volume_id: volume_id.clone(),
            node: named.clone(),
            incarnation: volume_id.clone(),
            ..Default::default()
        };
        let volume = VolumeReport {
            volume_id: volume_id.clone(),
            node: named.clone(),
            ..Default::default()
        };
        let renew = RenewRequest { csr_der: node.renewal_request().unwrap() };
        let mut join = JoinClient::new(node.controller(&server.address).unwrap());
        let answers = [
            ("ReportPool", of_pool.report_pool(report("p1")).await.err()),
            ("WatchPool", of_pool.watch_pool(WatchPoolRequest { pool: "p1".into() }).await.err()),
            (
                "ReportHoldings",
                of_pool
                    .report_holdings(futures::stream::iter([PoolHoldings {
                        pool: "p1".into(),
                        ..PoolHoldings::default()
                    }]))
                    .await
                    .err(),
            ),
            (
                "ReportNode",
                of_node
                    .report_node(NodeReport { node: named.clone(), ..Default::default() })
                    .await
                    .err(),
            ),
            ("WatchNode", of_node.watch_node(WatchNodeRequest { node: named.clone() }).await.err()),
            ("AcquireEpoch", of_node.acquire_epoch(epoch).await.err()),
            ("SwapMembership", of_node.swap_membership(swap).await.err()),
            ("ReportVolume", of_node.report_volume(volume).await.err()),
            ("Renew", join.renew(renew).await.err()),
        ];
        for (call, error) in answers {
            let refused =
                error.as_ref().is_some_and(|status| status.message().contains("term 1 has begun"));
            assert_eq!(refused, newer, "{call}: {error:?}");
        }
    }
    server.stop().await;
}
