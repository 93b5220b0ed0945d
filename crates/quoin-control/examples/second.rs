//! The cost of a second to a controller of 2,000 volumes on 30 pools, half of them in use: `cargo
//! run --release -p quoin-control --example second`.

#[allow(dead_code, reason = "tests take the rest")]
#[path = "../tests/control/cluster.rs"]
mod cluster;

use cluster::{Cluster, spec};
use quoin_api::control::VolumeSpec;
use quoin_control::{Cordoning, Scope};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    const VOLUMES: usize = 2000;
    let mut cluster = Cluster::of(30).await;
    for n in 0..VOLUMES {
        let asked = VolumeSpec { size_bytes: 4 << 20, ..spec(&format!("v{n}")) };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
    }
    cluster.settle().await.unwrap();
    for n in 0..VOLUMES / 2 {
        let name = format!("v{n}");
        let volume = cluster.attach(&name, "n1").await.unwrap();
        cluster.open_volume(volume.id.0, "n1", n as u128 + 1).await;
        let guids: Vec<_> = volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
        let states: Vec<_> = guids.iter().map(|guid| (guid.as_str(), "in-sync")).collect();
        cluster.serving(&name, &states).await;
    }
    let controller = &cluster.controller;
    for _ in 0..5 {
        let began = std::time::Instant::now();
        controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
        let healed = began.elapsed();
        controller.work.tender.look_at_all(tokio::time::Instant::now()).await.unwrap();
        let tended = began.elapsed();
        controller.work.lifecycle.reconcile_all().await.unwrap();
        println!(
            "heal {healed:?}, tend {:?}, reconcile {:?}",
            tended - healed,
            began.elapsed() - tended
        );
    }
    let pool = Scope::Pool("p1".into());
    controller.work.cordons.set(&pool, Cordoning::Drain, false).await.unwrap();
    for _ in 0..5 {
        let began = std::time::Instant::now();
        controller.work.healer.look_at_all(tokio::time::Instant::now()).await.unwrap();
        println!("while a pool is drained: heal {:?}", began.elapsed());
    }
}
