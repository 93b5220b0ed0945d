//! Reports of targets beside the volumes that they serve: heartbeats, devices, slow replicas.

use quoin_api::control::{NodeReport, ReplicaProgress, TargetReport};
use quoin_control::Publish;
use tonic::Code;

use crate::cluster::{Cluster, by_name};

fn report(node: &str) -> TargetReport {
    TargetReport {
        node: node.into(),
        address: "10.0.0.9".into(),
        version: "0.1.0".into(),
        ..TargetReport::default()
    }
}

#[tokio::test]
async fn a_target_alone_makes_its_host_a_node_and_takes_nothing_from_what_csi_tells_of_it() {
    let mut cluster = Cluster::new().await;
    cluster.create("db").await;
    cluster.controller.reports.target(&report("n9")).await.unwrap();
    cluster.attach("db", "n9").await.unwrap();
    let shown = |name: &str| {
        let nodes = cluster.controller.status.nodes();
        nodes.into_iter().find(|node| node.name == name).unwrap()
    };
    assert_eq!((shown("n9").state.as_str(), shown("n9").attached), ("Online", 1));
    let topology = [("zone".to_owned(), "west".to_owned())];
    let csi = NodeReport {
        node: "n9".into(),
        topology: topology.clone().into(),
        volumes_max: 7,
        ..NodeReport::default()
    };
    cluster.controller.reports.node(&csi).await.unwrap();
    cluster.controller.reports.target(&report("n9")).await.unwrap();
    let node = shown("n9");
    let own = ("quoin.io/node".to_owned(), "n9".to_owned());
    assert_eq!((node.volumes_max, node.topology), (7, topology.into_iter().chain([own]).collect()));
    assert_eq!(node.address, "10.0.0.9", "CSI knows no address");
    let wrong = TargetReport { node: "no name".into(), ..report("n9") };
    assert_eq!(
        cluster.controller.reports.target(&wrong).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn a_device_may_be_asked_for_later_and_is_told_with_the_attachment_as_its_target_says() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    let ask = Publish { node: "n1".into(), device: true, ..Publish::default() };
    for _ in 0..2 {
        cluster.controller.volumes.attachments.publish(by_name("db").as_ref(), &ask).await.unwrap();
    }
    // Requested without one again, as the host itself does, it stays.
    cluster.attach("db", "n1").await.unwrap();
    assert!(cluster.controller.assignments.of_node("n1").targets[0].device);
    cluster.open_volume(volume.id.0, "n1", 1).await;
    let told = async |device: &str, message: &str, refused| {
        cluster
            .reports("db", "serving", |report| {
                report.device = device.into();
                report.device_message = message.into();
                report.device_refused = refused;
            })
            .await;
        cluster.shown("db").attachments.remove(0)
    };
    let waits = told("", "no `quoin attach` serves there", false).await;
    assert!(waits.device.is_empty() && waits.device_message.contains("quoin attach"));
    assert!(told("", "there is no /dev/fuse", true).await.device_refused);
    assert_eq!(told("/dev/loop3", "", false).await.device, "/dev/loop3");
    // File systems are made on the device that it names.
    for hostile in ["loop3", "/dev/loop3\n/dev/sda", "/dev/loop3 /dev/sda"] {
        let report = quoin_api::control::VolumeReport {
            device: hostile.into(),
            ..cluster.report_of("db", "serving")
        };
        let refused = cluster.controller.reports.volume(&report).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{hostile:?}");
    }
}

#[tokio::test]
async fn a_replica_that_its_target_calls_slow_is_shown_with_what_a_write_takes_there() {
    let mut cluster = Cluster::new().await;
    let volume = cluster.create("db").await;
    cluster.attach("db", "n1").await.unwrap();
    cluster.open_volume(volume.id.0, "n1", 1).await;
    let slow = volume.replicas[1].guid.0.to_string();
    let replicas = volume.replicas.iter().map(|replica| ReplicaProgress {
        guid: replica.guid.0.to_string(),
        state: "in-sync".into(),
        write_us: if replica.guid.0.to_string() == slow { 104_000 } else { 2_000 },
        slow: replica.guid.0.to_string() == slow,
        ..ReplicaProgress::default()
    });
    let replicas: Vec<_> = replicas.collect();
    cluster.reports("db", "serving", |report| report.replicas = replicas).await;
    for replica in cluster.shown("db").replicas {
        assert_eq!(replica.slow, replica.guid == slow);
        assert_eq!(replica.write_us, if replica.slow { 104_000 } else { 2_000 });
    }
}
