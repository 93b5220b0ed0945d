//! Volumes whose replicas are on a host that drops packets, beside one that has all it needs.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use quoin_pool::accept::Belief;
use quoin_replication::primary::PrimaryConfig;
use quoin_store::model::ModelPool;
use quoin_target::dial::Reach;
use quoin_target::shard::{Input, Limits, ReplicaPlace, VolumeSetup};
use quoin_types::VolumeId;
use quoin_types::block::DeviceInfo;
use quoin_wire::handshake::ServerSecurity;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

const BLOCKS: u64 = 4096;
const VOLUMES: u64 = 150;

/// A listener whose queue is full: nobody who connects is answered.
fn black_hole() -> (TcpListener, Vec<rustix::fd::OwnedFd>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let fill = |_| {
        let flags = SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        let _ = rustix::net::connect(&socket, &address);
        socket
    };
    let filling = (0..4).map(fill).collect();
    (listener, filling)
}

#[test]
fn volumes_of_a_host_that_drops_packets_keep_no_other_volume_from_its_replica() {
    let (known, dir) = (members(1), tempfile::tempdir().unwrap());
    let membership = membership(&known, 1);
    let security = ServerSecurity::PlainLoopback;
    let pool = RunningPool::start(
        ModelPool::new(),
        Box::new(|| Ok(())),
        "127.0.0.1:0",
        security,
        Belief::Everybody,
    );
    create_replica(&pool, known[0], &membership, BLOCKS);
    let (hole, _filling) = black_hole();
    let control = Control::default();
    let target =
        RunningTarget::start(&control, membership, Reach::PlainLoopback, |_, _| Bytes::new());
    let address = hole.local_addr().unwrap().to_string();
    for n in 0..VOLUMES {
        target.handle.send(Input::Open(Box::new(VolumeSetup {
            config: PrimaryConfig {
                volume: VolumeId(1_000 + u128::from(n)),
                ..config(BLOCKS, false)
            },
            info: DeviceInfo {
                name: format!("v{n}"),
                size_bytes: BLOCKS * 4096,
                block_size: 512,
                read_only: false,
            },
            since_epoch: 0,
            limits: Limits::default(),
            options_version: 0,
            socket: None,
            is_encrypted: false,
            key: None,
            replicas: vec![ReplicaPlace {
                member: known[0],
                pool: "away".into(),
                address: address.clone(),
            }],
            desired: Default::default(),
            verify: None,
            client: 0,
            sharers: Vec::new(),
            feed: None,
            seed: n,
        })));
    }
    // Long enough for each of them to give its first session up and to begin another one.
    eventually("all are dialled", || target.metrics.dials.get() >= VOLUMES as i64);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(12) {
        let dials = target.metrics.dials.get();
        // A dial that cannot be called back any more for each volume, at the very most.
        assert!(dials <= VOLUMES as i64 + 4, "{dials} dials for {VOLUMES} volumes");
        std::thread::sleep(Duration::from_millis(20));
    }
    let socket = dir.path().join("v.sock");
    target.open(&socket, vec![place(known[0], &pool)], BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    client.write(0, &[7; 4096]);
    assert_eq!(client.read(0, 4096), [7; 4096]);
    drop(target);
    pool.stop();
}
