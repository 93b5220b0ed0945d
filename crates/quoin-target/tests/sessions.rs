//! Sessions played by hand against a real pool: what a grant opens, and how long a lease lasts.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use quoin_identity::{Authority, Expected, Grant, Identity, Lifetimes, Role};
use quoin_pool::accept::Belief;
use quoin_pool::assignment::{Assignment, Fence, Phase, Wanted};
use quoin_pool::shard::Input as PoolInput;
use quoin_replication::replica::store::{BootCookie, IoFault, ReplicaIdentity};
use quoin_store::disk::Syncer as SyncDisk;
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions};
use quoin_types::ids::{Incarnation, SessionKey};
use quoin_types::membership::{Member, Membership};
use quoin_types::message::{Failure, FromReplica, OpenAck, Ping, ToReplica};
use quoin_types::{
    Chain, Entry, EntryKind, Epoch, Lsn, PoolId, Position, ReplicaGuid, ReplicaId, SnapshotId,
    Term, TermId, VolumeId,
};
use quoin_wire::establish::{EstablishError, dial};
use quoin_wire::handshake::{ClientSecurity, ServerSecurity};
use quoin_wire::{Connection, ConnectionKind, Frame, Hello, Mode, ReadOutcome};

const OURS: VolumeId = VolumeId(7);
const OTHERS: VolumeId = VolumeId(8);
const IN_OURS: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(101) };
const IN_OTHERS: Member = Member { id: ReplicaId(2), guid: ReplicaGuid(202) };
const BLOCKS: u64 = 4096;

/// One session, a message at a time.
struct Session {
    connection: Connection,
    key: SessionKey,
}

impl Session {
    fn send(&mut self, message: &ToReplica) {
        self.connection.send_to_replica(self.key, message).unwrap();
        while !self.connection.flush().unwrap() {}
    }

    /// The next message; `None` at the session's end.
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
}

fn key(epoch: u64, nonce: u64) -> SessionKey {
    SessionKey { epoch: Epoch(epoch), incarnation: Incarnation(u128::from(epoch)), nonce }
}

fn open_of(volume: VolumeId, member: Member, lease_ms: u32) -> ToReplica {
    ToReplica::Open {
        volume,
        replica: member.id,
        guid: member.guid,
        membership: membership(&[member], 1),
        lease_ms,
    }
}

/// The assignment of both volumes to a pool, of which ours is fenced.
fn assigned(phase: Phase, fence: Fence) -> PoolInput {
    let wanted = [(OURS, IN_OURS, fence), (OTHERS, IN_OTHERS, Fence::default())];
    let wanted = wanted.map(|(volume, member, fence)| Wanted {
        identity: ReplicaIdentity {
            volume,
            replica: member.id,
            guid: member.guid,
            volume_spec: Bytes::new(),
        },
        blocks: BLOCKS,
        phase,
        source: None,
        flatten: false,
        fence,
        membership: Membership { formed: false, ..membership(&[member], 1) },
    });
    PoolInput::Assign(Assignment(wanted.to_vec()))
}

/// A pool with a replica of each of two volumes.
fn pool_of_both(
    disk: impl Disk + 'static,
    security: ServerSecurity,
    belief: Belief,
) -> RunningPool {
    let pool = Pool::open(disk, PoolOptions::default()).unwrap();
    let syncer = pool.syncer();
    let pool = RunningPool::start(pool, syncer, "127.0.0.1:0", security, belief);
    pool.send(assigned(Phase::Init, Fence::default()));
    eventually("the replicas are created", || pool.state().replicas.len() == 2);
    pool
}

fn formatted() -> MemoryDisk {
    let disk = MemoryDisk::new(256 << 20);
    Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
    disk
}

/// A cluster's authority, a pool that believes grants alone, and who asks.
struct Guarded {
    pool: RunningPool,
    controller: Identity,
    stranger: Identity,
    node: Identity,
    pool_of_stranger: Identity,
    _dir: tempfile::TempDir,
}

impl Guarded {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority =
            |name: &str| Authority::create(&dir.path().join(name), Lifetimes::default()).unwrap();
        let (ours, theirs) = (authority("ours"), authority("theirs"));
        let issue = |authority: &Authority, role: Role, name: &str| {
            let id = authority.cluster();
            let path = dir.path().join(format!("{id}-{}-{name}", role.as_str()));
            authority.issue_identity(&path, role, name).unwrap()
        };
        let identity = issue(&ours, Role::Pool, "p");
        let config = identity.server_config().unwrap();
        let security = ServerSecurity::Tls { config, least: Mode::Authenticate };
        let pool = pool_of_both(formatted(), security, Belief::Grants(identity));
        Guarded {
            pool,
            controller: issue(&ours, Role::Controller, "c"),
            stranger: issue(&theirs, Role::Controller, "c"),
            node: issue(&ours, Role::Node, "n1"),
            pool_of_stranger: issue(&ours, Role::Pool, "p2"),
            _dir: dir,
        }
    }

    fn dial(
        &self,
        by: &Identity,
        key: SessionKey,
        hello: &Hello,
    ) -> Result<Session, EstablishError> {
        self.dial_as("p", by, key, hello)
    }

    /// Within the host if the pool is looked for by its name, else by the network.
    fn dial_as(
        &self,
        looked_for: &str,
        by: &Identity,
        key: SessionKey,
        hello: &Hello,
    ) -> Result<Session, EstablishError> {
        let security = ClientSecurity::Tls {
            config: by.client_config(Expected::Named(Role::Pool, "p".into())).unwrap(),
            server_name: "quoin".try_into().unwrap(),
            mode: Mode::Authenticate,
        };
        let address = self.pool.address.parse().unwrap();
        let connection = dial(looked_for, address, &security, key, hello)?;
        Ok(Session { connection, key })
    }
}

fn good_grant(key: SessionKey) -> Grant {
    granted_in(Term::default(), key)
}

fn granted_in(term: Term, key: SessionKey) -> Grant {
    let SessionKey { epoch, incarnation, .. } = key;
    Grant { volume: OURS, epoch, incarnation, node: "n1".into(), writes: true, term }
}

#[test]
fn a_grant_opens_nothing_when_any_one_of_its_fields_is_wrong() {
    let guarded = Guarded::new();
    let key = key(1_000, 1);
    let with = |change: fn(&mut Grant)| {
        let mut grant = good_grant(key);
        change(&mut grant);
        guarded.controller.sign_grant(&grant).unwrap()
    };
    let good = with(|_| {});
    let mut forged = good.clone();
    *forged.last_mut().unwrap() ^= 1;
    let (node, pool) = (&guarded.node, &guarded.pool_of_stranger);
    let refused: [(&str, &Identity, Vec<u8>); 10] = [
        ("of another volume", node, with(|g| g.volume = OTHERS)),
        ("of an older epoch", node, with(|g| g.epoch = Epoch(999))),
        ("of a newer epoch", node, with(|g| g.epoch = Epoch(1_001))),
        ("of another incarnation", node, with(|g| g.incarnation = Incarnation(1))),
        ("of another node", node, with(|g| g.node = "n2".into())),
        ("shown by a pool of that name", pool, with(|g| g.node = "p2".into())),
        ("of another cluster", node, guarded.stranger.sign_grant(&good_grant(key)).unwrap()),
        ("signed by a node", node, guarded.node.sign_grant(&good_grant(key)).unwrap()),
        ("with a changed signature", node, forged),
        ("missing", node, Vec::new()),
    ];
    for (what, by, grant) in refused {
        let log = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, grant.into());
        let bulk = Hello { kind: ConnectionKind::Bulk, ..log.clone() };
        for hello in [log, bulk] {
            let refusal = guarded.dial(by, key, &hello).err();
            let refused = matches!(refusal, Some(EstablishError::Refused(_)));
            assert!(refused, "a grant {what}: {refusal:?}");
        }
    }
    let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, good.into());
    let mut session = guarded.dial(node, key, &hello).unwrap();
    session.send(&open_of(OURS, IN_OURS, 500));
    assert!(matches!(session.next(), Some(FromReplica::OpenAck(_))));
}

fn term(number: u64, id: u128) -> Term {
    Term { number, id: TermId(id) }
}

impl Guarded {
    /// Dials by a grant of this term.
    fn dial_in(&self, term: Term, key: SessionKey) -> Result<Session, EstablishError> {
        let grant = self.controller.sign_grant(&granted_in(term, key)).unwrap();
        let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, grant.into());
        self.dial(&self.node, key, &hello)
    }
}

#[test]
fn a_grant_of_a_term_that_is_over_opens_nothing_and_its_target_is_shown_the_newer_one() {
    let guarded = Guarded::new();
    let over = [Term::default(), term(1, 7), term(1, 8), term(2, 7), term(3, 8)];
    for (n, newer) in [term(1, 7), term(2, 8), term(3, 7)].into_iter().enumerate() {
        // A pool hears of a term by a grant as well as by its controller.
        let first = key(newer.next_epoch(Epoch(1_000)).unwrap().0 + n as u64, 1);
        let mut session = guarded.dial_in(newer, first).unwrap();
        session.send(&open_of(OURS, IN_OURS, 500));
        assert!(matches!(session.next(), Some(FromReplica::OpenAck(_))), "{newer:?}");
        for former in over.into_iter().filter(|t| t.number <= newer.number && *t != newer) {
            // Its epoch may be as high as it likes.
            let again = key(Epoch(first.epoch.0 + 9_000).0, 2);
            let refusal = guarded.dial_in(former, again).err();
            let Some(EstablishError::FormerTerm(proof)) = refusal else {
                panic!("{former:?} after {newer:?}: {refusal:?}")
            };
            assert_eq!(guarded.node.verify_term(&proof).unwrap(), newer);
        }
        // The same term goes on.
        assert!(guarded.dial_in(newer, key(first.epoch.0, 3)).is_ok());
    }
}

#[test]
fn a_session_that_was_let_in_opens_nothing_once_its_pool_heard_of_a_newer_term() {
    let guarded = Guarded::new();
    let mut former = guarded.dial_in(Term::default(), key(1_000, 1)).unwrap();
    let newer = term(1, 7);
    let _newer = guarded.dial_in(newer, key(newer.floor().0 + 1, 1)).unwrap();
    former.send(&open_of(OURS, IN_OURS, 500));
    let refused = former.next();
    assert!(matches!(refused, Some(FromReplica::Refuse { .. })), "{refused:?}");
    assert_eq!(former.next(), None, "the session goes on");
}

#[test]
fn a_session_of_a_former_term_serves_on_until_the_volume_is_opened_in_the_new_one_and_then_ends() {
    let guarded = Guarded::new();
    let mut former = guarded.dial_in(Term::default(), key(1_000, 1)).unwrap();
    former.send(&open_of(OURS, IN_OURS, 500));
    assert!(matches!(former.next(), Some(FromReplica::OpenAck(_))));
    let newer = term(1, 7);
    let opening = key(newer.next_epoch(Epoch(1_000)).unwrap().0, 1);
    let mut session = guarded.dial_in(newer, opening).unwrap();
    // The pool has heard of the term: what is served is served on.
    former.send(&ToReplica::Ping { stable: Lsn::ZERO, ping: Ping(5) });
    assert!(matches!(former.next(), Some(FromReplica::Applied { ping: Ping(5), .. })));
    session.send(&open_of(OURS, IN_OURS, 500));
    assert!(matches!(session.next(), Some(FromReplica::OpenAck(_))));
    let mut last = former.next();
    while let Some(FromReplica::Applied { .. }) = last {
        last = former.next();
    }
    let ended = matches!(last, None | Some(FromReplica::Refuse { .. } | FromReplica::Failed(_)));
    assert!(ended, "{last:?}");
    // However high the epochs are that a former controller grants: the promise is of the newer term.
    let grant = granted_in(newer, key(1_000_000, 1));
    let hello = Hello::new(
        OURS,
        IN_OURS.id,
        IN_OURS.guid,
        guarded.controller.sign_grant(&grant).unwrap().into(),
    );
    let mut low = guarded.dial(&guarded.node, key(1_000_000, 1), &hello).unwrap();
    low.send(&open_of(OURS, IN_OURS, 500));
    let refused = low.next();
    let promised = opening.epoch;
    assert_eq!(refused, Some(FromReplica::Refuse { promised, failure: Failure::Fenced }));
}

#[test]
fn a_grant_for_one_volume_opens_no_replica_of_another() {
    let guarded = Guarded::new();
    let member = |id: Member, guid: Member| Member { id: id.id, guid: guid.guid };
    let cases = [
        ("volume", OURS, IN_OURS, OTHERS, IN_OURS),
        ("replica", OURS, IN_OURS, OURS, member(IN_OTHERS, IN_OURS)),
        ("guid", OURS, IN_OURS, OURS, member(IN_OURS, IN_OTHERS)),
        ("all but the guid", OURS, member(IN_OURS, IN_OTHERS), OTHERS, IN_OTHERS),
        ("volume, with all that the Hello could name", OURS, IN_OTHERS, OTHERS, IN_OTHERS),
        (
            "none, and the Hello names a replica that is another volume's",
            OURS,
            IN_OTHERS,
            OURS,
            IN_OTHERS,
        ),
    ];
    for (n, (differs, volume, member, opened, opened_member)) in (1..).zip(cases) {
        let key = key(1_000, n);
        let grant = guarded.controller.sign_grant(&good_grant(key)).unwrap();
        let hello = Hello::new(volume, member.id, member.guid, grant.into());
        let mut session = guarded.dial(&guarded.node, key, &hello).unwrap();
        session.send(&open_of(opened, opened_member, 500));
        let answer = session.next();
        let failure = match answer {
            Some(FromReplica::Refuse { failure, promised: Epoch::ZERO }) => failure,
            other => panic!("an Open that differs in {differs}: {other:?}"),
        };
        assert!(matches!(failure, Failure::Protocol | Failure::Unknown), "{differs}: {failure}");
        assert_eq!(session.next(), None, "the session goes on");
    }
    let state = guarded.pool.state();
    assert!(state.replicas.iter().all(|r| r.state == "created"), "one was opened");
}

#[test]
fn a_grant_that_reads_opens_a_replica_and_changes_nothing_in_it() {
    let guarded = Guarded::new();
    let next = |epoch: Epoch, position: Position, chain: Chain, kind| {
        let at = Position { epoch, lsn: position.lsn.next() };
        let (blocks, data) = match kind {
            EntryKind::Write => (1, Bytes::from(vec![7; 4096])),
            EntryKind::Trim | EntryKind::Zero { .. } => (1, Bytes::new()),
            _ => (0, Bytes::new()),
        };
        Entry::after(chain, at, kind, 0, blocks, data, false)
    };
    let id = SnapshotId(3);
    let kinds = [
        (EntryKind::Write, false),
        (EntryKind::Trim, false),
        (EntryKind::Zero { no_hole: false }, false),
        (EntryKind::Revert { id }, false),
        (EntryKind::Snapshot { id, hidden: false }, true),
    ];
    let cases = kinds
        .into_iter()
        .flat_map(|(kind, reads)| [(kind.clone(), reads, false), (kind, true, true)]);
    for (n, (kind, is_taken, writes)) in (1..).zip(cases) {
        if writes && matches!(kind, EntryKind::Revert { .. }) {
            // The replica has no such snapshot.
            continue;
        }
        let key = key(1_000 + n, n);
        let grant = Grant { writes, ..good_grant(key) };
        let grant = guarded.controller.sign_grant(&grant).unwrap();
        let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, grant.into());
        let mut session = guarded.dial(&guarded.node, key, &hello).unwrap();
        session.send(&open_of(OURS, IN_OURS, 500));
        let Some(FromReplica::OpenAck(ack)) = session.next() else { panic!("{kind:?} {writes}") };
        let (keep, tip) = (ack.position.lsn, ack.position.lsn);
        session.send(&ToReplica::Truncate { keep, tip });
        assert!(matches!(session.next(), Some(FromReplica::Truncated { .. })));
        let entry = next(key.epoch, ack.position, ack.chain, kind.clone());
        let (entries, lsn) = (vec![Arc::new(entry)], ack.position.lsn.next());
        session.send(&ToReplica::Append { entries, stable: Lsn::ZERO, sync: true, ping: Ping(1) });
        let taken = loop {
            match session.next() {
                Some(FromReplica::Applied { applied, .. }) if applied >= lsn => break true,
                Some(FromReplica::Refuse { failure, .. }) => {
                    assert_eq!(failure, Failure::Protocol);
                    break false;
                }
                Some(_) => {}
                None => break false,
            }
        };
        assert_eq!(taken, is_taken, "{kind:?} by a grant that writes: {writes}");
    }
}

/// A disk whose next writes take a second each.
struct SlowDisk {
    inner: MemoryDisk,
    slow: Arc<AtomicU32>,
}

impl Disk for SlowDisk {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.inner.read_at(offset, buffer)
    }
    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault> {
        let take = |left: u32| left.checked_sub(1);
        if self.slow.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok() {
            std::thread::sleep(Duration::from_secs(1));
        }
        self.inner.write_at(offset, parts)
    }
    fn sync(&self) -> Result<(), IoFault> {
        self.inner.sync()
    }
    fn syncer(&self) -> SyncDisk {
        self.inner.syncer()
    }
    fn write_out(&self, offset: u64, length: u64) {
        self.inner.write_out(offset, length);
    }
    fn discard(&self, offset: u64, length: u64) {
        self.inner.discard(offset, length);
    }
    fn cookie(&self) -> BootCookie {
        self.inner.cookie()
    }
}

fn open(
    pool: &RunningPool,
    volume: VolumeId,
    member: Member,
    key: SessionKey,
    lease_ms: u32,
) -> (Session, OpenAck) {
    let hello = Hello::new(volume, member.id, member.guid, Bytes::new());
    let address = pool.address.parse().unwrap();
    let connection = dial("p", address, &ClientSecurity::PlainLoopback, key, &hello).unwrap();
    let mut session = Session { connection, key };
    session.send(&open_of(volume, member, lease_ms));
    match session.next() {
        Some(FromReplica::OpenAck(ack)) => (session, *ack),
        other => panic!("{other:?}"),
    }
}

/// Appends one block after `at`; the position and chain that it makes.
fn append(session: &mut Session, at: Position, chain: Chain) -> (Position, Chain) {
    let at = Position { epoch: session.key.epoch, lsn: at.lsn.next() };
    let data = Bytes::from(vec![7; 4096]);
    let entry = Entry::after(chain, at, EntryKind::Write, 0, 1, data, false);
    let chain = entry.chain;
    let (entries, stable) = (vec![Arc::new(entry)], Lsn::ZERO);
    session.send(&ToReplica::Append { entries, stable, sync: false, ping: Ping(0) });
    (at, chain)
}

/// Waits for the answer to a ping.
fn answered(session: &mut Session, wanted: Ping) {
    loop {
        match session.next() {
            Some(FromReplica::Applied { ping, .. }) if ping == wanted => return,
            Some(_) => {}
            None => panic!("the session ended"),
        }
    }
}

#[test]
fn a_lease_lasts_from_the_receipt_of_what_renews_it_however_long_the_round_was() {
    const LEASE_MS: u32 = 2000;
    let slow = Arc::new(AtomicU32::new(0));
    let disk = SlowDisk { inner: formatted(), slow: slow.clone() };
    let pool = pool_of_both(disk, ServerSecurity::PlainLoopback, Belief::Everybody);
    let (mut busy, ack) = open(&pool, OTHERS, IN_OTHERS, key(1, 1), LEASE_MS);
    let (mut quiet, _) = open(&pool, OURS, IN_OURS, key(1, 2), LEASE_MS);
    busy.send(&ToReplica::Truncate { keep: Lsn::ZERO, tip: Lsn::ZERO });
    assert!(matches!(busy.next(), Some(FromReplica::Truncated { .. })));
    // The segment is begun before, so that the slow writes are those of the entries.
    let (at, chain) = append(&mut busy, ack.position, ack.chain);
    busy.send(&ToReplica::Ping { ping: Ping(1), stable: Lsn::ZERO });
    answered(&mut busy, Ping(1));

    // The first slow write keeps the pool's thread until both sockets are readable in one round;
    // the second makes that round long, and what renews the lease is read behind it.
    slow.store(2, Ordering::SeqCst);
    let (at, chain) = append(&mut busy, at, chain);
    std::thread::sleep(Duration::from_millis(300));
    append(&mut busy, at, chain);
    quiet.send(&ToReplica::Ping { ping: Ping(2), stable: Lsn::ZERO });
    std::thread::sleep(Duration::from_millis(1200));
    let renewed = Instant::now();
    quiet.send(&ToReplica::Ping { ping: Ping(3), stable: Lsn::ZERO });
    answered(&mut quiet, Ping(3));
    // The target trusts its lease for 0.95 L from the sending: nobody else is let in before.
    let _newer = open(&pool, OURS, IN_OURS, key(2, 1), LEASE_MS);
    let took = renewed.elapsed();
    assert!(took >= Duration::from_millis(1900), "another one was let in after {took:?}");
}

/// Connects from an address of the loopback that stands for another host, and says nothing.
fn silent(from: [u8; 4], to: std::net::SocketAddr) -> Option<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::bind(&socket, &std::net::SocketAddr::from((from, 0))).ok()?;
    rustix::net::connect(&socket, &to).ok()?;
    Some(socket)
}

#[test]
fn hosts_that_connect_without_end_and_say_nothing_keep_no_target_from_its_pool() {
    let guarded = Guarded::new();
    let address: std::net::SocketAddr = guarded.pool.address.parse().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for host in [[127, 0, 0, 8], [127, 0, 0, 9]] {
            let over = &over;
            scope.spawn(move || {
                let mut held = VecDeque::new();
                while !over.load(Ordering::SeqCst) {
                    held.extend(silent(host, address));
                    if held.len() > 200 {
                        held.pop_front();
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        let refused = || guarded.pool.metrics.connections_refused.get();
        eventually("they have what they get", || refused() > 100);
        for n in 1..=20 {
            let key = key(1_000, n);
            let grant = guarded.controller.sign_grant(&good_grant(key)).unwrap();
            let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, grant.into());
            let opened = guarded.dial_as("by the network", &guarded.node, key, &hello);
            if let Err(error) = &opened {
                over.store(true, Ordering::SeqCst);
                panic!("attempt {n}: {error}");
            }
        }
        over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn sessions_that_open_nothing_are_limited_in_number_and_time_and_those_that_did_stay() {
    let security = ServerSecurity::PlainLoopback;
    let pool = pool_of_both(formatted(), security, Belief::Everybody);
    let dialled = |n: u64| {
        let (key, address) = (key(1_000, n), pool.address.parse().unwrap());
        let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, Bytes::new());
        let security = ClientSecurity::PlainLoopback;
        let connection = dial("by the network", address, &security, key, &hello).unwrap();
        Session { connection, key }
    };
    let mut opened = dialled(1);
    opened.send(&open_of(OURS, IN_OURS, 500));
    assert!(matches!(opened.next(), Some(FromReplica::OpenAck(_))));
    let mut idle: Vec<Session> = (2..200).map(dialled).collect();
    let ended = |idle: &mut Vec<Session>| {
        let at_end = |s: &mut Session| matches!(s.connection.receive(), Ok(ReadOutcome::End));
        idle.iter_mut().filter_map(|s| at_end(s).then_some(())).count()
    };
    let refused = || pool.metrics.connections_refused.get();
    eventually("those beyond a quarter of the places are refused", || refused() == 198 - 128);
    eventually("the others are closed when their time is over", || ended(&mut idle) == 198);
    let ping = Ping(77);
    opened.send(&ToReplica::Ping { stable: Lsn(0), ping });
    answered(&mut opened, ping);
    pool.stop();
}

fn refused(pool: &RunningPool, key: SessionKey) -> (Epoch, Failure) {
    let hello = Hello::new(OURS, IN_OURS.id, IN_OURS.guid, Bytes::new());
    let address = pool.address.parse().unwrap();
    let connection = dial("p", address, &ClientSecurity::PlainLoopback, key, &hello).unwrap();
    let mut session = Session { connection, key };
    session.send(&open_of(OURS, IN_OURS, 500));
    match session.next() {
        Some(FromReplica::Refuse { promised, failure }) => (promised, failure),
        other => panic!("a grant that was taken back was answered {other:?}"),
    }
}

fn fence(epoch: u64, at_once: bool) -> Fence {
    Fence { epoch: Epoch(epoch), at_once }
}

#[test]
fn a_grant_that_was_kept_opens_nothing_after_the_detach_nor_after_a_restart_of_the_pool() {
    let disk = formatted();
    let pool = pool_of_both(disk.clone(), ServerSecurity::PlainLoopback, Belief::Everybody);
    let (mut session, _) = open(&pool, OURS, IN_OURS, key(5, 1), 500);
    session.send(&ToReplica::Close);
    assert_eq!(session.next(), Some(FromReplica::Closed));
    pool.send(assigned(Phase::Keep, fence(6, false)));
    assert_eq!(refused(&pool, key(5, 2)), (Epoch(6), Failure::Fenced));
    pool.stop();

    // With no word of the controller since its start.
    let again = Pool::open(disk, PoolOptions::default()).unwrap();
    let (syncer, security) = (again.syncer(), ServerSecurity::PlainLoopback);
    let pool = RunningPool::start(again, syncer, "127.0.0.1:0", security, Belief::Everybody);
    assert_eq!(refused(&pool, key(5, 3)), (Epoch(6), Failure::Fenced));
    let (_, ack) = open(&pool, OURS, IN_OURS, key(7, 1), 500);
    assert!(ack.continuous, "what was closed before the detach was told is complete");
}

#[test]
fn a_detach_lets_an_open_session_write_sync_and_close_and_a_removal_cuts_it() {
    for at_once in [false, true] {
        let disk = formatted();
        let pool = pool_of_both(disk, ServerSecurity::PlainLoopback, Belief::Everybody);
        let (mut session, ack) = open(&pool, OURS, IN_OURS, key(5, 1), 500);
        session.send(&ToReplica::Truncate { keep: Lsn::ZERO, tip: Lsn::ZERO });
        assert!(matches!(session.next(), Some(FromReplica::Truncated { .. })));
        pool.send(assigned(Phase::Keep, fence(6, at_once)));
        assert_eq!(refused(&pool, key(5, 2)), (Epoch(6), Failure::Fenced));
        if at_once {
            // Messages that it was sent before are still on their way.
            while let Some(message) = session.next() {
                assert!(matches!(message, FromReplica::Applied { .. }), "{message:?}");
            }
            continue;
        }
        append(&mut session, ack.position, ack.chain);
        session.send(&ToReplica::Sync { lsn: Lsn(1), ping: Ping(1) });
        answered(&mut session, Ping(1));
        session.send(&ToReplica::Close);
        loop {
            match session.next() {
                Some(FromReplica::Closed) => break,
                Some(_) => {}
                None => panic!("the session was cut"),
            }
        }
        let (_, ack) = open(&pool, OURS, IN_OURS, key(7, 1), 500);
        assert_eq!((ack.position.lsn, ack.durable, ack.continuous), (Lsn(1), Lsn(1), true));
    }
}
