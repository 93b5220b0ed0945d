//! Rebuilds over real sockets: which bulk connections a pool takes, answers that are too long for a
//! frame, and a replica that missed very many holes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use quoin_pool::accept::Belief;
use quoin_replication::primary::{PrimaryConfig, ReplicaStanding};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, ReplicaStore};
use quoin_store::{Disk, FileDisk, FormatOptions, MemoryDisk, Pool, PoolOptions, ReplicaPool};
use quoin_target::dial::Reach;
use quoin_target::shard::{Input, Limits, VolumeSetup};
use quoin_types::block::DeviceInfo;
use quoin_types::ids::{Incarnation, SessionKey};
use quoin_types::membership::{Member, Membership};
use quoin_types::message::{FromReplica, Ping, ReadView, ToReplica};
use quoin_types::{Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid, ReplicaId};
use quoin_wire::establish::dial;
use quoin_wire::handshake::{ClientSecurity, ServerSecurity};
use quoin_wire::{Connection, ConnectionKind, Frame, Hello, ReadOutcome};

const MEMBER: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(101) };
const OTHER: Member = Member { id: ReplicaId(2), guid: ReplicaGuid(102) };
/// 1 GiB, of which most blocks are trimmed one by one.
const BLOCKS: u64 = 1 << 18;
const HOLES: u64 = 200_000;

/// The blocks of the volume, each once and none beside the one before it.
fn scattered() -> impl Iterator<Item = u64> {
    (0..BLOCKS).map(|n| n.wrapping_mul(0x9e37_79b1) % BLOCKS)
}

struct Link {
    connection: Connection,
    key: SessionKey,
}

impl Link {
    fn dial(pool: &RunningPool, kind: ConnectionKind, key: SessionKey, member: Member) -> Self {
        let hello = Hello::new(VOLUME, member.id, member.guid, Bytes::new());
        let hello = Hello { kind, ..hello };
        let address = pool.address.parse().unwrap();
        let connection = dial("p", address, &ClientSecurity::PlainLoopback, key, &hello).unwrap();
        Link { connection, key }
    }

    fn send(&mut self, message: &ToReplica) {
        self.connection.send_to_replica(self.key, message).unwrap();
        while !self.connection.flush().unwrap() {}
    }

    /// The next message; `None` at the connection's end.
    fn next(&mut self) -> Option<FromReplica> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            if let Some(incoming) = self.connection.next_frame().ok()? {
                let Frame::FromReplica(message) = incoming.frame else { return None };
                return Some(message);
            }
            match self.connection.receive() {
                Ok(ReadOutcome::End) if self.connection.buffered_bytes() == 0 => return None,
                Ok(_) => {}
                Err(_) => return None,
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        panic!("no answer");
    }

    /// The session's own connection answers.
    fn check_alive(&mut self, ping: u64) {
        self.send(&ToReplica::Ping { stable: Lsn(0), ping: Ping(ping) });
        loop {
            match self.next().expect("the session goes on") {
                FromReplica::Applied { ping: Ping(answered), .. } if answered == ping => return,
                _ => {}
            }
        }
    }
}

fn key(nonce: u64) -> SessionKey {
    SessionKey { epoch: Epoch(5), incarnation: Incarnation(5), nonce }
}

fn running(pool: Pool<MemoryDisk>) -> RunningPool {
    let syncer = pool.syncer();
    let (security, belief) = (ServerSecurity::PlainLoopback, Belief::Everybody);
    RunningPool::start(pool, syncer, "127.0.0.1:0", security, belief)
}

fn created(pool: &mut Pool<MemoryDisk>, member: Member, blocks: u64) {
    let (replica, guid) = (member.id, member.guid);
    let identity = ReplicaIdentity { volume: VOLUME, replica, guid, volume_spec: Bytes::new() };
    let membership: Membership = membership(&[MEMBER], 1);
    let meta = ReplicaMeta { membership, ..ReplicaMeta::default() };
    pool.create(identity, meta, blocks).unwrap();
    synced(pool);
}

fn synced(pool: &mut Pool<MemoryDisk>) {
    pool.request_sync();
    while let Some(ticket) = pool.sync_wanted() {
        let result = pool.disk().sync();
        pool.sync_finished(ticket, result).expect("a sync");
    }
}

fn formatted(bytes: u64) -> Pool<MemoryDisk> {
    let disk = MemoryDisk::new(bytes);
    Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
    Pool::open(disk, PoolOptions::default()).unwrap()
}

fn opened(pool: &RunningPool, nonce: u64) -> Link {
    let mut link = Link::dial(pool, ConnectionKind::Log, key(nonce), MEMBER);
    link.send(&ToReplica::Open {
        volume: VOLUME,
        replica: MEMBER.id,
        guid: MEMBER.guid,
        membership: membership(&[MEMBER], 1),
        lease_ms: 1000,
    });
    assert!(matches!(link.next(), Some(FromReplica::OpenAck(_))));
    link
}

fn pull(id: u64, cursor: u64, bytes_max: u32) -> ToReplica {
    ToReplica::Pull { id, view: ReadView::Live, from: Lsn(0), cursor, bytes_max, want_data: true }
}

#[test]
fn a_bulk_connection_is_taken_for_an_open_session_of_its_replica_and_ends_with_it() {
    let mut pool = formatted(256 << 20);
    created(&mut pool, MEMBER, 64);
    created(&mut pool, OTHER, 64);
    let pool = running(pool);
    // No session is open; then another one is, and that of another replica.
    assert_eq!(Link::dial(&pool, ConnectionKind::Bulk, key(1), MEMBER).next(), None);
    let mut session = opened(&pool, 1);
    assert_eq!(Link::dial(&pool, ConnectionKind::Bulk, key(2), MEMBER).next(), None);
    assert_eq!(Link::dial(&pool, ConnectionKind::Bulk, key(1), OTHER).next(), None);
    session.check_alive(1);

    let mut bulk = Link::dial(&pool, ConnectionKind::Bulk, key(1), MEMBER);
    bulk.send(&ToReplica::OpenBulk { number: 3 });
    bulk.send(&pull(7, 0, 4096));
    assert!(matches!(bulk.next(), Some(FromReplica::Pulled { id: 7, .. })));
    // A later one takes its place.
    let mut later = Link::dial(&pool, ConnectionKind::Bulk, key(1), MEMBER);
    later.send(&ToReplica::OpenBulk { number: 4 });
    assert_eq!(bulk.next(), None);
    later.send(&pull(8, 0, 4096));
    assert!(matches!(later.next(), Some(FromReplica::Pulled { id: 8, .. })));
    session.check_alive(2);
    drop(session);
    assert_eq!(later.next(), None);
    pool.stop();
}

#[test]
fn a_bulk_connection_that_carries_anything_else_is_ended_alone() {
    let mut pool = formatted(256 << 20);
    created(&mut pool, MEMBER, 64);
    let pool = running(pool);
    let mut session = opened(&pool, 1);
    let append =
        ToReplica::Append { entries: Vec::new(), stable: Lsn(0), sync: false, ping: Ping(1) };
    let ping = ToReplica::Ping { stable: Lsn(0), ping: Ping(1) };
    for (number, message) in (1..).zip([append, ping, ToReplica::Close]) {
        let mut bulk = Link::dial(&pool, ConnectionKind::Bulk, key(1), MEMBER);
        bulk.send(&ToReplica::OpenBulk { number });
        bulk.send(&message);
        assert_eq!(bulk.next(), None, "{message:?}");
        session.check_alive(number);
    }
    pool.stop();
}

/// 4 MiB of holes by the count of the store are more than a frame may have.
#[test]
fn an_answer_that_no_frame_can_hold_is_a_smaller_one_and_the_session_goes_on() {
    let mut pool = formatted(1 << 30);
    created(&mut pool, MEMBER, BLOCKS);
    let (mut chain, mut lsn) = (Chain(0), Lsn(0));
    let lbas: Vec<u64> = scattered().take(HOLES as usize).collect();
    for batch in lbas.chunks(1000) {
        let mut entries = Vec::new();
        for lba in batch {
            lsn = lsn.next();
            let at = Position { epoch: Epoch(1), lsn };
            let entry = Entry::after(chain, at, EntryKind::Trim, *lba, 1, Bytes::new(), false);
            chain = entry.chain;
            entries.push(Arc::new(entry));
        }
        pool.replica(MEMBER.guid).unwrap().append(&entries).unwrap();
        synced(&mut pool);
    }
    let pool = running(pool);
    let mut session = opened(&pool, 1);
    let mut bulk = Link::dial(&pool, ConnectionKind::Bulk, key(1), MEMBER);
    bulk.send(&ToReplica::OpenBulk { number: 1 });
    let (mut cursor, mut holes) = (0, 0);
    for id in 0.. {
        bulk.send(&pull(id, cursor, 4 << 20));
        let answer = bulk.next().expect("an answer");
        let FromReplica::Pulled { slots, cursor: next, gone: false, .. } = answer else {
            panic!("{answer:?}")
        };
        holes += slots.len() as u64;
        let Some(next) = next else { break };
        assert!(next > cursor);
        cursor = next;
    }
    assert_eq!(holes, HOLES, "none is missing, and none came twice");
    session.check_alive(1);
    pool.stop();
}

#[test]
fn a_replica_that_missed_very_many_holes_is_rebuilt_while_clients_write_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let known = members(3);
    let membership = membership(&known, 2);
    let start = |n: usize, address: &str| {
        let path = dir.path().join(format!("pool-{n}"));
        let disk = FileDisk::open(&path).unwrap_or_else(|_| {
            let disk = FileDisk::create(&path, 2 << 30, true).unwrap();
            Pool::format(&disk, &FormatOptions::new(PoolId(n as u128 + 1))).unwrap();
            disk
        });
        let pool = Pool::open(disk, PoolOptions::default()).unwrap();
        let syncer = pool.syncer();
        RunningPool::start(pool, syncer, address, ServerSecurity::PlainLoopback, Belief::Everybody)
    };
    let mut pools: Vec<_> = (0..3).map(|n| start(n, "127.0.0.1:0")).collect();
    for (member, pool) in known.iter().zip(&pools) {
        create_replica(pool, *member, &membership, BLOCKS);
    }
    let places = known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect();
    // The log is kept for next to nothing, so what is missed is copied.
    let target = RunningTarget::start_keeping(
        1 << 20,
        &Control::default(),
        membership,
        Reach::PlainLoopback,
        |_, _| Bytes::new(),
    );
    let name = "db".into();
    let size_bytes = BLOCKS * 4096;
    target.handle.send(Input::Open(Box::new(VolumeSetup {
        config: PrimaryConfig { window_bytes: 1 << 20, ..config(BLOCKS, false) },
        info: DeviceInfo { name, size_bytes, block_size: 512, read_only: false },
        since_epoch: 0,
        limits: Limits::default(),
        options_version: 0,
        socket: Some(socket.clone()),
        is_encrypted: false,
        key: None,
        replicas: places,
        desired: Default::default(),
        verify: None,
        client: 0,
        sharers: Vec::new(),
        feed: None,
        seed: 1,
    })));
    let mut client = Nbd::connect(&socket);
    client.write(0, &[1; 4096]);
    let standings = || -> Vec<ReplicaStanding> {
        let status = target.status();
        let of = |m: &Member| status.replicas.iter().find(|r| r.member == *m).unwrap().standing;
        known.iter().map(of).collect()
    };
    let in_sync = [ReplicaStanding::InSync; 3];
    eventually("all are in sync", || standings() == in_sync);
    let gone = pools.remove(2);
    let address = gone.address.clone();
    gone.stop();
    let lbas: Vec<u64> = scattered().take(HOLES as usize).collect();
    for batch in lbas.chunks(64) {
        for lba in batch {
            client.send(0, 4, lba * 4096, 4096, &[]);
        }
        for _ in batch {
            assert_eq!(client.reply().1, 0);
        }
    }
    client.flush();
    let mut written = 0u64;
    let mut slowest = |client: &mut Nbd, many: u64| {
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..many {
            let began = Instant::now();
            client.write(written % 64 * 4096, &[2; 4096]);
            times.push(began.elapsed());
            written += 1;
        }
        times.sort();
        (times[times.len() / 2], times[times.len() - 1])
    };
    let (before, _) = slowest(&mut client, 200);
    pools.push(start(2, &address));
    let began = Instant::now();
    let (mut medians, mut worst) = (Vec::new(), Duration::ZERO);
    while standings() != in_sync {
        assert!(began.elapsed() < Duration::from_secs(25), "never in sync: {:?}", standings());
        // While clients are idle a rebuild is not paced, and asks for the most at a time.
        std::thread::sleep(Duration::from_millis(100));
        // Neither source loses its session for what is copied from it.
        assert_eq!(standings()[..2], in_sync[..2]);
        let (median, most) = slowest(&mut client, 20);
        medians.push(median);
        worst = worst.max(most);
    }
    medians.sort();
    let during = medians.get(medians.len() / 2).copied().unwrap_or_default();
    println!("a write took {before:?} before and {during:?} beside it, {worst:?} at most");
    // It tells writers that go on from writers that stand still while sessions are made anew.
    assert!(during < before * 20 + Duration::from_millis(50), "{before:?} {during:?}");
    assert!(worst < Duration::from_secs(2), "{worst:?}");
    target.stop();
}
