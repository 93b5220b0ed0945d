//! Cost of making and deleting a volume beside thousands of others, in time, in memory, and in bytes
//! of assignments, over real sockets, with simulated pools that act at once:
//! `cargo run --release -p quoin-control --example beside -- 10000`.

#[allow(dead_code, reason = "tests take the rest")]
#[path = "../tests/control/server.rs"]
mod server;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use prost::Message;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    CreateVolumeRequest, DeleteVolumeRequest, GetVolumeRequest, PoolAssignment, PoolReport,
    ReplicaReport, Spread, VolumeRef, VolumeSpec, WatchNodeRequest, WatchPoolRequest,
};
use server::Server;
use tonic::transport::Channel;

const POOLS: usize = 12;
const NODES: usize = 12;
/// Volumes that are made and deleted in each measurement.
const MEASURED: usize = 100;
/// Made at a time while the others are made.
const AT_A_TIME: usize = 32;
/// Volumes of which the first and the last ones are compared.
const COMPARED: usize = 500;

/// A pool that holds what it is told to.
struct Pool {
    name: String,
    /// GUIDs.
    holds: HashSet<String>,
    /// Since the last report.
    changed: Vec<ReplicaReport>,
    gone: Vec<String>,
    number: u64,
    /// Bytes of assignments that all members received.
    received: Arc<AtomicU64>,
}

impl Pool {
    fn obey(&mut self, assignment: PoolAssignment) {
        for told in assignment.replicas {
            let is_new = matches!(told.phase.as_str(), "Init" | "Recreate");
            let report = |state: &str, quorum| ReplicaReport {
                replica_id: told.replica_id.clone(),
                guid: told.guid.clone(),
                volume_id: told.volume_id.clone(),
                state: state.to_owned(),
                quorum,
                ..ReplicaReport::default()
            };
            if told.phase == "Delete" {
                self.changed.push(report("gone", false));
            } else if is_new && self.holds.insert(told.guid.clone()) {
                self.changed.push(report("created", told.phase == "Init"));
            }
        }
    }

    /// Changes since the last report, all at first.
    fn report(&mut self) -> PoolReport {
        let since = self.number;
        self.number += 1;
        let report = PoolReport {
            number: self.number,
            since,
            pool: self.name.clone(),
            pool_id: format!("{}-1", self.name),
            node: format!("host-of-{}", self.name),
            address: "127.0.0.1:7000".into(),
            capacity_bytes: 1 << 50,
            free_bytes: 1 << 50,
            start_counter: 1,
            start_nonce: 1,
            replicas: std::mem::take(&mut self.changed),
            removed: std::mem::take(&mut self.gone),
            ..PoolReport::default()
        };
        // A deleted replica is reported once.
        let gone = report.replicas.iter().filter(|held| held.state == "gone");
        self.gone = gone.map(|held| held.guid.clone()).collect();
        self.gone.iter().for_each(|guid| {
            self.holds.remove(guid);
        });
        report
    }

    async fn run(mut self, mut agent: AgentClient<Channel>) {
        let asked = WatchPoolRequest { pool: self.name.clone() };
        agent.report_pool(self.report()).await.expect("a first report");
        let mut assignments = agent.watch_pool(asked).await.expect("a stream").into_inner();
        while let Ok(Some(assignment)) = assignments.message().await {
            self.received.fetch_add(assignment.encoded_len() as u64, Ordering::Relaxed);
            self.obey(assignment);
            agent.report_pool(self.report()).await.expect("a report");
        }
    }
}

fn named(name: &str) -> Option<VolumeRef> {
    Some(VolumeRef { id: String::new(), name: name.to_owned() })
}

async fn make(server: &Server, name: String) {
    let mut spec = VolumeSpec { name, size_bytes: 1 << 30, replicas: 3, ..VolumeSpec::default() };
    spec.set_spread(Spread::Pool);
    let asked = CreateVolumeRequest { spec: Some(spec), ..CreateVolumeRequest::default() };
    let made = server.admin().create_volume(asked).await.expect("a volume").into_inner();
    assert_eq!(made.phase, "Ready");
}

async fn delete(server: &Server, name: &str) {
    let mut admin = server.admin();
    admin.delete_volume(DeleteVolumeRequest { volume: named(name) }).await.expect("deleted");
    while admin.get_volume(GetVolumeRequest { volume: named(name) }).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Mean times to make and to delete one.
async fn measure(server: &Server) -> (Duration, Duration) {
    let began = Instant::now();
    for n in 0..MEASURED {
        make(server, format!("measured-{n}")).await;
    }
    let made = began.elapsed();
    for n in 0..MEASURED {
        delete(server, &format!("measured-{n}")).await;
    }
    (made / MEASURED as u32, (began.elapsed() - made) / MEASURED as u32)
}

#[tokio::main]
async fn main() {
    let others: usize = std::env::args().nth(1).map_or(10_000, |n| n.parse().expect("a number"));
    let server = Server::start().await;
    let received = Arc::new(AtomicU64::new(0));
    for n in 0..POOLS {
        let (name, received) = (format!("p{n}"), received.clone());
        let (holds, number) = (HashSet::new(), 0);
        let (changed, gone) = (Vec::new(), Vec::new());
        let pool = Pool { name, holds, changed, gone, number, received };
        tokio::spawn(pool.run(server.local_agent()));
    }
    for n in 0..NODES {
        let asked = WatchNodeRequest { node: format!("n{n}"), partial: true, ..Default::default() };
        let (mut agent, received) = (server.local_agent(), received.clone());
        tokio::spawn(async move {
            let mut told = agent.watch_node(asked).await.expect("a stream").into_inner();
            while let Ok(Some(assignment)) = told.message().await {
                received.fetch_add(assignment.encoded_len() as u64, Ordering::Relaxed);
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let bytes = || received.load(Ordering::Relaxed);
    let before = bytes();
    let alone = measure(&server).await;
    let alone_bytes = (bytes() - before) / MEASURED as u64;
    println!("beside none: {:?} to make one, {:?} to delete one", alone.0, alone.1);
    let (began, memory) = (Instant::now(), resident_bytes());
    let mut made_at = Vec::new();
    for first in (0..others).step_by(AT_A_TIME) {
        let names = first..(first + AT_A_TIME).min(others);
        futures::future::join_all(names.map(|n| make(&server, format!("other-{n}")))).await;
        made_at.push(began.elapsed());
    }
    println!("{others} others were made in {:?}", began.elapsed());
    let steps = COMPARED.div_ceil(AT_A_TIME);
    if let [.., last] = made_at[..]
        && made_at.len() > 2 * steps
    {
        let (first, rest) = (made_at[steps - 1], last - made_at[made_at.len() - 1 - steps]);
        let times = rest.as_secs_f64() / first.as_secs_f64();
        println!(
            "the first {COMPARED} in {first:?}, the last in {rest:?}: {times:.2} times as long"
        );
    }
    let memory = resident_bytes().saturating_sub(memory) / others.max(1) as u64;
    println!("{:.1} KiB of memory for each, those of the pools included", memory as f64 / 1024.0);
    let before = bytes();
    let beside = measure(&server).await;
    let beside_bytes = (bytes() - before) / MEASURED as u64;
    println!("beside {others}: {:?} to make one, {:?} to delete one", beside.0, beside.1);
    println!(
        "{alone_bytes} bytes of assignments for one beside none, {beside_bytes} beside {others}"
    );
    let times = |(one, other): (Duration, Duration)| other.as_secs_f64() / one.as_secs_f64();
    println!(
        "{:.2} times as long to make one, {:.2} times as long to delete one",
        times((alone.0, beside.0)),
        times((alone.1, beside.1))
    );
}

/// Memory of this process, the simulated pools included.
fn resident_bytes() -> u64 {
    const PAGE: u64 = 4096;
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE
}
