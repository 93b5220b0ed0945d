//! Tokens that are revoked, and pools and nodes that are removed permanently.

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::*;
use quoin_control::is_initialised;
use quoin_identity::{Lifetimes, Role, join};
use tonic::Code;

use crate::cluster::{Cluster, by_name};
use crate::server::Server;

#[tokio::test]
async fn a_pool_leaves_only_when_it_is_away_and_no_volume_needs_it() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    let online = cluster.controller.removals.pool("p1", false).await.unwrap_err();
    assert_eq!(online.code(), Code::FailedPrecondition);
    assert!(online.to_string().contains("online"), "{online}");

    cluster.goes("p1").await;
    let needed = cluster.controller.removals.pool("p1", false).await.unwrap_err();
    assert_eq!(needed.code(), Code::FailedPrecondition);
    assert!(needed.to_string().contains("\"db\""), "{needed}");

    // A volume that is to be deleted waits for the pool, and goes with it.
    cluster.controller.volumes.catalog.delete(by_name("db").as_ref()).await.unwrap();
    cluster.settle().await.unwrap();
    assert_eq!(cluster.store.keys("volume/").len(), 1, "it waits for p1");
    cluster.controller.removals.pool("p1", false).await.unwrap();
    assert_eq!(cluster.store.keys("volume/").len(), 0);
    let names: Vec<_> =
        cluster.controller.status.pools().into_iter().map(|pool| pool.name).collect();
    assert_eq!(names, ["p2", "p3"]);
    let again = cluster.controller.removals.pool("p1", false).await.unwrap_err();
    assert_eq!(again.code(), Code::NotFound);
    cluster.restart().await;
    assert_eq!(cluster.controller.status.pools().len(), 2, "it is gone for good");
}

#[tokio::test]
async fn a_node_leaves_only_when_it_is_away_and_has_nothing_attached() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let last_words = NodeReport { node: "n1".into(), leaving: true, ..NodeReport::default() };
    cluster.controller.reports.node(&last_words).await.unwrap();
    let attached = cluster.controller.removals.node("n1", false).await.unwrap_err();
    assert!(attached.to_string().contains("\"db\""), "{attached}");
    cluster.controller.volumes.attachments.unpublish(by_name("db").as_ref(), "n1").await.unwrap();
    let online = cluster.controller.removals.node("n2", false).await.unwrap_err();
    assert!(online.to_string().contains("online"), "{online}");
    cluster.controller.removals.node("n1", false).await.unwrap();
    assert_eq!(cluster.controller.status.nodes().len(), 1);
    // With force, the word that its processes have ended is taken.
    cluster.controller.removals.node("n2", true).await.unwrap();
    assert!(cluster.controller.status.nodes().is_empty());
}

#[tokio::test]
async fn who_was_removed_may_do_nothing_and_his_name_is_free_for_another_key() {
    let server = Server::start().await;
    let old = server.member(Role::Pool, "p1").await;
    let report = PoolReport { pool: "p1".into(), node: "h1".into(), ..PoolReport::default() };
    let mut agent = AgentClient::new(old.channel(&server.address).unwrap());
    let leaving = PoolReport { leaving: true, ..report.clone() };
    agent.report_pool(leaving).await.unwrap();
    let mut admin = server.admin();
    admin.remove_pool(RemovePoolRequest { pool: "p1".into(), force: false }).await.unwrap();
    let refused = agent.report_pool(report.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("was removed"), "{}", refused.message());
    let renewal = old.renew(&server.address).await.unwrap_err();
    assert!(renewal.to_string().contains("was removed"), "{renewal}");
    assert!(server.controller.status.pools().is_empty(), "it did not come back");

    let token = server.token("pool", "", 60).await;
    let new = join(&server.address, &token, Role::Pool, "p1", &server.home("new")).await.unwrap();
    let mut agent = AgentClient::new(new.channel(&server.address).unwrap());
    agent.report_pool(report).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn tokens_are_listed_without_their_secret_and_a_revoked_one_lets_nobody_in() {
    let server = Server::start().await;
    let (kept, ended) = (server.token("node", "n7", 60).await, server.token("pool", "", 60).await);
    let mut admin = server.admin();
    let listed = |admin: &mut cluster_client::ClusterClient<_>| {
        let mut admin = admin.clone();
        async move {
            admin.list_join_tokens(ListJoinTokensRequest {}).await.unwrap().into_inner().tokens
        }
    };
    let tokens = listed(&mut admin).await;
    // The first one was made with the cluster.
    assert_eq!(tokens.len(), 3);
    let known = tokens.iter().find(|token| token.name == "n7").unwrap();
    assert_eq!((known.role.as_str(), known.used_by.as_str()), ("node", ""));
    assert!(!kept.to_string().contains(&known.id), "an id is no part of the token");

    let revoke = RevokeJoinTokenRequest { token: ended.to_string() };
    admin.revoke_join_token(revoke.clone()).await.unwrap();
    assert_eq!(admin.revoke_join_token(revoke).await.unwrap_err().code(), Code::NotFound);
    let home = server.home("late");
    let late = join(&server.address, &ended, Role::Pool, "late", &home).await.unwrap_err();
    assert!(late.to_string().contains("quoin token create"), "{late}");
    assert!(!home.exists(), "a refusal leaves a key behind");

    join(&server.address, &kept, Role::Node, "n7", &server.home("n7")).await.unwrap();
    let tokens = listed(&mut admin).await;
    let known = tokens.iter().find(|token| token.name == "n7").unwrap();
    assert_eq!(known.used_by, "node/n7");
    let by_id = RevokeJoinTokenRequest { token: known.id.clone() };
    admin.revoke_join_token(by_id).await.unwrap();
    for vague in ["", "0"] {
        let vague = RevokeJoinTokenRequest { token: vague.into() };
        assert_eq!(admin.revoke_join_token(vague).await.unwrap_err().code(), Code::NotFound);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_cluster_is_made_in_no_directory_of_somebody_else() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("passwd"), "x").unwrap();
    let refused = quoin_control::init(dir.path(), Lifetimes::default()).await.unwrap_err();
    assert!(refused.to_string().contains("passwd"), "{refused}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "something was made");
    std::fs::remove_file(dir.path().join("passwd")).unwrap();
    quoin_control::init(dir.path(), Lifetimes::default()).await.unwrap();
    // A directory that a crash left half made is completed.
    std::fs::remove_file(dir.path().join("records.redb")).unwrap();
    quoin_control::init(dir.path(), Lifetimes::default()).await.unwrap();
    assert!(is_initialised(dir.path()));
}
