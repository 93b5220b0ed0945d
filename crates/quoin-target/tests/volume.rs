//! A volume from its client's socket to its pools, over loopback TCP, in one process.

#[allow(dead_code)]
mod support;

use bytes::Bytes;
use quoin_core::target::ReplicaStanding;
use quoin_pool::accept::Belief;
use quoin_pool::shard::Ended;
use quoin_store::model::ModelPool;
use quoin_target::dial::Reach;
use quoin_wire::handshake::ServerSecurity;
use support::*;

const BLOCKS: u64 = 4096;

fn start(address: &str) -> RunningPool {
    RunningPool::start(
        ModelPool::new(),
        Box::new(|| Ok(())),
        address,
        ServerSecurity::PlainLoopback,
        Belief::Everybody,
    )
}

#[test]
fn what_was_written_is_read_back_after_the_target_was_stopped_and_started() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let known = members(3);
    let membership = membership(&known, 2);
    let pools: Vec<_> = known
        .iter()
        .map(|m| {
            let pool = start("127.0.0.1:0");
            create_replica(&pool, *m, &membership, BLOCKS);
            pool
        })
        .collect();
    let places = || known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect::<Vec<_>>();
    let control = Control::default();
    let target = || {
        RunningTarget::start(&control, membership.clone(), Reach::PlainLoopback, |_, _| {
            Bytes::new()
        })
    };

    let first = target();
    first.open(&socket, places(), BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    client.write(4096, &[7; 8192]);
    // An unaligned write merges with what is there.
    client.write(4096 + 512, &[9; 512]);
    client.flush();
    let mut expected = vec![7; 8192];
    expected[512..1024].fill(9);
    assert_eq!(client.read(4096, 8192), expected);
    first.stop();
    assert!(!socket.exists());

    let second = target();
    second.open(&socket, places(), BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    assert_eq!(client.read(4096, 8192), expected);
    assert_eq!(client.read(1 << 20, 4096), vec![0; 4096]);
    eventually("all are in sync", || {
        second.status().replicas.iter().all(|r| r.standing == ReplicaStanding::InSync)
    });
    assert_eq!(second.status().epoch.0, 2);
    second.stop();
    for pool in pools {
        assert!(matches!(pool.stop(), Ended::Stopped));
    }
}
