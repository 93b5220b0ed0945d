//! A process that has no descriptor left: its loops rest, and who waits is let in later.
//!
//! One test, since the limit is of the whole process.

#[allow(dead_code)]
mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::Bytes;
use quoin_pool::accept::Belief;
use quoin_store::model::ModelPool;
use quoin_target::dial::Reach;
use quoin_wire::handshake::ServerSecurity;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use support::*;

const BLOCKS: u64 = 4096;
const LOOK: Duration = Duration::from_secs(2);

/// Every descriptor that this process may have yet.
fn exhaust() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// Time of all processors that this process had.
fn cpu() -> Duration {
    let t = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// How often the loop of the pool has gone round.
fn rounds(metrics: &quoin_pool::metrics::Metrics) -> u64 {
    let text = metrics.render();
    let count = text.lines().find_map(|l| l.strip_prefix("quoin_pool_turn_seconds_count"));
    count.and_then(|c| c.split_whitespace().last()).unwrap().parse().unwrap()
}

/// A socket that is made while there are descriptors, to be connected when there are none.
fn unconnected(family: AddressFamily) -> OwnedFd {
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn loops_rest_while_there_is_no_descriptor_and_let_those_in_who_waited() {
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let (known, dir) = (members(1), tempfile::tempdir().unwrap());
    let membership = membership(&known, 1);
    let pool = RunningPool::start(
        ModelPool::new(),
        Box::new(|| Ok(())),
        "127.0.0.1:0",
        ServerSecurity::PlainLoopback,
        Belief::Everybody,
    );
    create_replica(&pool, known[0], &membership, BLOCKS);
    let control = Control::default();
    let target =
        RunningTarget::start(&control, membership, Reach::PlainLoopback, |_, _| Bytes::new());
    let socket = dir.path().join("v.sock");
    target.open(&socket, vec![place(known[0], &pool)], BLOCKS, false);
    Nbd::connect(&socket).write(0, &[7; 4096]);

    let (to_pool, to_target) = (unconnected(AddressFamily::INET), unconnected(AddressFamily::UNIX));
    let address: std::net::SocketAddr = pool.address.parse().unwrap();
    let taken = exhaust();
    rustix::net::connect(&to_pool, &address).unwrap();
    rustix::net::connect(&to_target, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
    let (before, began) = (rounds(&pool.metrics), cpu());
    std::thread::sleep(LOOK);
    let (went_round, worked) = (rounds(&pool.metrics) - before, cpu() - began);
    assert!(went_round < 200, "the pool's loop went round {went_round} times for nothing");
    assert!(worked < LOOK / 2, "{worked:?} of work within {LOOK:?}");

    drop(taken);
    // The pool hears the one who waited: it is in a handshake until that one is given up.
    drop(to_pool);
    let mut greeting = [0; 18];
    rustix::io::read(&to_target, &mut greeting[..]).unwrap();
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    assert_eq!(Nbd::connect(&socket).read(0, 4096), [7; 4096]);
    eventually("the pool took the one who waited", || pool.metrics.connections_refused.get() == 1);
    target.stop();
    pool.stop();
}
