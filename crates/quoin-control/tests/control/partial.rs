//! Assignments and reports that change in part: what a change costs, and what is told of it.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::*;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::cluster::Cluster;
use crate::server::Server;

const POOLS: usize = 3;

fn pool(n: usize) -> String {
    format!("p{n}")
}

/// A pool that does what it is told, and reports it.
async fn serve_pool(mut agent: AgentClient<Channel>, name: String) {
    let mut holds = BTreeMap::<String, ReplicaReport>::new();
    let report = |holds: &BTreeMap<String, ReplicaReport>| PoolReport {
        pool: name.clone(),
        pool_id: format!("{name}-1"),
        node: format!("host-of-{name}"),
        address: "127.0.0.1:7000".into(),
        capacity_bytes: 1 << 50,
        free_bytes: 1 << 50,
        start_counter: 1,
        start_nonce: 1,
        replicas: holds.values().cloned().collect(),
        ..PoolReport::default()
    };
    agent.report_pool(report(&holds)).await.unwrap();
    let asked = WatchPoolRequest { pool: name.clone() };
    let mut told = agent.watch_pool(asked).await.unwrap().into_inner();
    while let Ok(Some(assignment)) = told.message().await {
        for told in assignment.replicas {
            let state = |state: &str| ReplicaReport {
                replica_id: told.replica_id.clone(),
                guid: told.guid.clone(),
                volume_id: told.volume_id.clone(),
                state: state.into(),
                quorum: true,
                ..ReplicaReport::default()
            };
            let state = if told.phase == "Delete" { state("gone") } else { state("created") };
            holds.insert(told.guid, state);
        }
        agent.report_pool(report(&holds)).await.unwrap();
    }
}

async fn cluster() -> Server {
    let server = Server::start().await;
    for n in 0..POOLS {
        tokio::spawn(serve_pool(server.local_agent(), pool(n)));
    }
    let node = NodeReport { node: "n1".into(), ..NodeReport::default() };
    server.local_agent().report_node(node).await.unwrap();
    while server.admin().list_pools(ListPoolsRequest {}).await.unwrap().into_inner().pools.len()
        < POOLS
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server
}

fn named(name: &str) -> Option<VolumeRef> {
    Some(VolumeRef { id: String::new(), name: name.into() })
}

async fn make(server: &Server, name: &str) -> Volume {
    make_with(server, name, None).await
}

async fn make_with(server: &Server, name: &str, encryption: Option<Encryption>) -> Volume {
    let spec = VolumeSpec {
        name: name.into(),
        size_bytes: 1 << 20,
        replicas: POOLS as u32,
        encryption,
        ..VolumeSpec::default()
    };
    let asked = CreateVolumeRequest { spec: Some(spec), ..CreateVolumeRequest::default() };
    let made = server.admin().create_volume(asked).await.unwrap().into_inner();
    assert_eq!(made.phase, "Ready");
    let attach = PublishVolumeRequest {
        volume: named(name),
        node: "n1".into(),
        ..PublishVolumeRequest::default()
    };
    server.admin().publish_volume(attach).await.unwrap();
    made
}

async fn watch_pool(server: &Server) -> Streaming<PoolAssignment> {
    let asked = WatchPoolRequest { pool: pool(0) };
    server.local_agent().watch_pool(asked).await.unwrap().into_inner()
}

async fn watch_node(server: &Server) -> Streaming<NodeAssignment> {
    let asked = WatchNodeRequest { node: "n1".into() };
    server.local_agent().watch_node(asked).await.unwrap().into_inner()
}

/// The next message; `None` where nothing more comes for a while.
async fn next<T>(stream: &mut Streaming<T>) -> Option<T> {
    let next = tokio::time::timeout(Duration::from_secs(2), stream.message()).await;
    next.ok().map(|message| message.unwrap().expect("the stream goes on"))
}

/// All messages until one is what is waited for.
async fn until<T: Clone>(stream: &mut Streaming<T>, holds: impl Fn(&T) -> bool) -> Vec<T> {
    let mut all = Vec::new();
    loop {
        let message = tokio::time::timeout(Duration::from_secs(60), stream.message()).await;
        let message = message.expect("it never comes").unwrap().expect("the stream goes on");
        all.push(message.clone());
        if holds(&message) {
            return all;
        }
    }
}

/// Bytes that the pool and the node are sent for one more volume beside so many.
async fn bytes_of_one_beside(volumes: usize) -> (usize, usize) {
    let server = cluster().await;
    for n in 0..volumes {
        make(&server, &format!("v{n}")).await;
    }
    let (mut of_pool, mut of_node) = (watch_pool(&server).await, watch_node(&server).await);
    let whole = next(&mut of_pool).await.unwrap();
    assert_eq!((whole.partial, whole.replicas.len()), (false, volumes));
    let whole = next(&mut of_node).await.unwrap();
    assert_eq!((whole.partial, whole.complete, whole.targets.len()), (false, true, volumes));
    let id = make(&server, "one-more").await.id;
    let is_of_it = |r: &ReplicaAssignment| r.volume_id == id;
    let told =
        until(&mut of_pool, |m| m.replicas.iter().any(|r| is_of_it(r) && r.phase == "Keep")).await;
    assert!(told.iter().all(|m| m.partial && m.replicas.iter().all(is_of_it)), "{told:?}");
    // The record that the pool keeps of the volume comes with it.
    assert!(told.iter().any(|m| m.replicas.iter().any(|r| !r.record.is_empty())));
    let pool_bytes = told.iter().map(Message::encoded_len).max().unwrap();
    let told = until(&mut of_node, |m| m.targets.iter().any(|t| t.volume_id == id)).await;
    assert!(told.iter().all(|m| m.partial && m.targets.len() <= 1), "{told:?}");
    let node_bytes = told.iter().map(Message::encoded_len).max().unwrap();
    server.stop().await;
    (pool_bytes, node_bytes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_of_one_change_do_not_grow_with_the_number_of_volumes() {
    let (few, many) = (bytes_of_one_beside(10).await, bytes_of_one_beside(300).await);
    // Numbers in them may have another digit.
    let is_alike = |few: usize, many: usize| many <= few + 100;
    assert!(is_alike(few.0, many.0) && is_alike(few.1, many.1), "{few:?} and {many:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_is_named_and_a_stream_that_begins_anew_is_told_the_whole() {
    let server = cluster().await;
    for name in ["stays", "goes"] {
        make(&server, name).await;
    }
    let (mut of_pool, mut of_node) = (watch_pool(&server).await, watch_node(&server).await);
    let whole = next(&mut of_pool).await.unwrap();
    assert_eq!(whole.replicas.len(), 2);
    assert_eq!(next(&mut of_node).await.unwrap().targets.len(), 2);
    let asked = GetVolumeRequest { volume: named("goes") };
    let gone = server.admin().get_volume(asked).await.unwrap().into_inner();
    let guid = gone.replicas.iter().find(|r| r.pool == pool(0)).unwrap().guid.clone();

    let detach =
        UnpublishVolumeRequest { volume: named("goes"), node: "n1".into(), ..Default::default() };
    server.admin().unpublish_volume(detach).await.unwrap();
    let told = until(&mut of_node, |m| !m.removed.is_empty()).await;
    let last = told.last().unwrap();
    assert_eq!((last.partial, last.complete, &last.removed), (true, false, &vec![gone.id.clone()]));
    let delete = DeleteVolumeRequest { volume: named("goes") };
    server.admin().delete_volume(delete).await.unwrap();
    let told = until(&mut of_pool, |m| !m.removed.is_empty()).await;
    let deletes = |r: &ReplicaAssignment| r.guid == guid && r.phase == "Delete";
    assert!(told.iter().any(|m| m.replicas.iter().any(deletes)), "it was ordered before");
    assert_eq!(told.last().unwrap().removed, [guid]);
    assert!(told.iter().all(|m| m.partial && !m.complete));
    assert!(next(&mut of_pool).await.is_none(), "nothing else changed");

    let (mut of_pool, mut of_node) = (watch_pool(&server).await, watch_node(&server).await);
    let whole = next(&mut of_pool).await.unwrap();
    assert_eq!((whole.partial, whole.replicas.len()), (false, 1));
    let whole = next(&mut of_node).await.unwrap();
    assert_eq!((whole.partial, whole.complete, whole.targets.len()), (false, true, 1));
    server.stop().await;
}

#[tokio::test]
async fn a_report_of_changes_builds_on_the_one_that_was_taken_and_else_the_whole_is_asked_for() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    let whole = |cluster: &Cluster, number| {
        let pool = cluster.pools.iter().find(|pool| pool.name == "p1").unwrap();
        PoolReport { number, ..pool.report() }
    };
    let change = |cluster: &Cluster, number, since| PoolReport {
        since,
        replicas: Vec::new(),
        ..whole(cluster, number)
    };
    let taken = async |cluster: &Cluster, report: PoolReport| {
        cluster.controller.reports.pool(&report).await.unwrap()
    };
    let guid = volume.replicas.iter().find(|r| r.pool == "p1").unwrap().guid;
    assert_eq!(
        taken(&cluster, change(&cluster, 6, 5)).await,
        0,
        "nothing was told by a number yet"
    );
    assert_eq!(taken(&cluster, whole(&cluster, 7)).await, 7);
    assert_eq!(taken(&cluster, change(&cluster, 8, 7)).await, 8);
    let removed = vec![guid.0.to_string()];
    let odd = PoolReport { removed: removed.clone(), ..change(&cluster, 10, 9) };
    assert_eq!(taken(&cluster, odd).await, 0);
    assert_eq!(taken(&cluster, change(&cluster, 11, 10)).await, 0);
    assert_eq!(cluster.shown("db").health, "Online", "what was told before is kept");
    assert_eq!(taken(&cluster, whole(&cluster, 12)).await, 12);
    let gone = ReplicaReport { state: "gone".into(), ..whole(&cluster, 0).replicas[0].clone() };
    assert_eq!(gone.guid, removed[0]);
    let lost = PoolReport { replicas: vec![gone], ..change(&cluster, 13, 12) };
    assert_eq!(taken(&cluster, lost).await, 13);
    let made_anew = cluster.volume("db").replicas.iter().find(|r| r.pool == "p1").unwrap().guid;
    assert_ne!(made_anew, guid, "a loss is acted on");
    // A replica that is merely not there any more is not known to be lost.
    let removes = PoolReport { removed, ..change(&cluster, 14, 13) };
    assert_eq!(taken(&cluster, removes).await, 14);
    cluster.restart().await;
    assert_eq!(taken(&cluster, change(&cluster, 15, 14)).await, 0, "another process");
}
