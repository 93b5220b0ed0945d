//! Failures of a pool's disk, through its real driver.

mod assigning;
mod connections;
mod health;
mod stalls;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use quoin_reactor::{Reactor, Waker};
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{BootCookie, IoFault, ReplicaIdentity};
use quoin_store::{Disk, FormatOptions, MemoryDisk, Pool, PoolOptions};
use quoin_telemetry::notices::Notices;
use quoin_types::entry::{Entry, EntryKind};
use quoin_types::ids::{Epoch, Incarnation, SessionKey};
use quoin_types::membership::{Member, Membership};
use quoin_types::message::{Content, Failure, FromReplica, OpenAck, Ping, ReadView, ToReplica};
use quoin_types::{Lsn, PoolId, Position, ReplicaGuid, ReplicaId, VolumeId};
use quoin_wire::handshake::{ClientSecurity, ServerSecurity};
use quoin_wire::{Connection, Frame, Hello, ReadOutcome};

use super::*;
use crate::accept::{Acceptor, Belief};
use crate::assignment::{Assignment, Phase, Wanted};
use crate::metrics::Metrics;
use crate::scrub::ScrubPlan;
use crate::shard::Recognition;
use crate::witness::Witness;

const WITNESS_FILE: &str = "witness";
const VOLUME: VolumeId = VolumeId(7);
const MEMBER: Member = Member { id: ReplicaId(1), guid: ReplicaGuid(101) };

fn membership() -> Membership {
    Membership {
        version: 1,
        rf: 1,
        cf: 1,
        drf: 1,
        known: vec![MEMBER],
        retired: vec![],
        formed: true,
    }
}

fn open<D: Disk + Clone>(disk: &D) -> Result<Opened<Pool<D>>, Error> {
    let pool = Pool::open(disk.clone(), PoolOptions::default())
        .map_err(|e| Error::Open { path: "memory".into(), reason: e.to_string() })?;
    Ok(Opened { id: pool.id().to_string(), syncer: pool.syncer(), pool })
}

fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A pool's process, as far as its disk is concerned.
struct Process {
    address: SocketAddr,
    inputs: Sender<Input>,
    waker: Waker,
    stop: watch::Sender<bool>,
    trouble: Arc<Mutex<Option<String>>>,
    counts: Arc<Mutex<PoolCounts>>,
    notices: Notices,
    made: Arc<tokio::sync::Notify>,
    metrics: Metrics,
    thread: JoinHandle<Result<(), Error>>,
}

impl Process {
    fn start<D: Disk + Clone + Sync + 'static>(disk: &D, witness: &Path) -> Self {
        Self::recognised(disk, witness, Recognition::Given)
    }

    fn recognised<D: Disk + Clone + Sync + 'static>(
        disk: &D,
        witness: &Path,
        recognition: Recognition,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let reactor = Reactor::new().unwrap();
        let waker = reactor.waker();
        let (inputs, taken) = channel();
        let metrics = Metrics::new("p");
        let acceptor = Acceptor::new(
            listener,
            Some("p"),
            Arc::new(Mutex::new(ServerSecurity::PlainLoopback)),
            Belief::Everybody,
            inputs.clone(),
            waker.clone(),
            metrics.clone(),
        )
        .unwrap();
        let notices = Notices::default();
        let scrub = ScrubPlan::default();
        let counts = Arc::new(Mutex::new(PoolCounts::default()));
        let (kept, counted) = (notices.clone(), metrics.clone());
        let made = Arc::new(tokio::sync::Notify::new());
        let parts = Parts {
            reactor,
            acceptor,
            inputs: taken,
            notices,
            metrics,
            scrub,
            recognition,
            counts: counts.clone(),
            assignment: Assignment::default(),
            witness: Witness::in_places(vec![witness.to_owned()]),
            made: made.clone(),
        };
        let (stop, stopped) = watch::channel(false);
        let trouble = Arc::new(Mutex::new(None));
        let watch = Watch { trouble: trouble.clone(), health: Health::default(), stop: stopped };
        let (disk, sender) = (disk.clone(), inputs.clone());
        let first = open(&disk).unwrap();
        let thread = std::thread::spawn(move || {
            keep_serving(first, &|| open(&disk), parts, &sender, &watch)
        });
        let (notices, metrics) = (kept, counted);
        Process { address, inputs, waker, stop, trouble, counts, notices, metrics, made, thread }
    }

    fn send(&self, input: Input) {
        self.inputs.send(input).unwrap();
        self.waker.wake();
    }

    fn assign(&self, phase: Phase) {
        self.assign_of(VOLUME, phase);
    }

    fn assign_of(&self, volume: VolumeId, phase: Phase) {
        self.send(Input::Assign(Assignment(vec![Wanted {
            identity: ReplicaIdentity {
                volume,
                replica: MEMBER.id,
                guid: MEMBER.guid,
                volume_spec: Bytes::new(),
            },
            blocks: 1024,
            phase,
            source: None,
            flatten: false,
            fence: Default::default(),
            membership: Membership { formed: false, ..membership() },
        }])));
    }

    /// One replica for each member, each of the same volume.
    fn create_replicas(&self, members: &[Member]) {
        let wanted = members.iter().map(|member| Wanted {
            identity: ReplicaIdentity {
                volume: VOLUME,
                replica: member.id,
                guid: member.guid,
                volume_spec: Bytes::new(),
            },
            blocks: 1024,
            phase: Phase::Init,
            source: None,
            flatten: false,
            fence: Default::default(),
            membership: Membership { formed: false, ..membership() },
        });
        self.send(Input::Assign(Assignment(wanted.collect())));
        eventually("the replicas are created", || self.replica_state());
    }

    /// How the pool says that the replica stands; `None` where it says nothing of it.
    fn replica_state(&self) -> Option<&'static str> {
        let (answer, state) = tokio::sync::oneshot::channel();
        self.send(Input::State { all: true, answer });
        let state = state.blocking_recv().ok()?;
        state.replicas.iter().find(|r| r.guid == MEMBER.guid).map(|r| r.state)
    }

    fn create_replica(&self) {
        self.assign(Phase::Init);
        eventually("the replica is created", || self.replica_state());
    }

    /// Opens the replica in `epoch`; `None` if the pool does not let it now.
    fn open_replica(&self, epoch: u64) -> Option<OpenAck> {
        self.session(epoch).map(|(_, ack)| ack)
    }

    fn session(&self, epoch: u64) -> Option<(Session, OpenAck)> {
        Self::session_at(self.address, epoch)
    }

    /// A connection for a session of `epoch`, which opens nothing yet.
    fn dial(address: SocketAddr, epoch: u64) -> Option<Session> {
        Self::dial_to(address, MEMBER, epoch)
    }

    fn dial_to(address: SocketAddr, member: Member, epoch: u64) -> Option<Session> {
        let key = SessionKey {
            epoch: Epoch(epoch),
            incarnation: Incarnation(u128::from(epoch)),
            nonce: 1,
        };
        let hello = Hello::new(VOLUME, member.id, member.guid, Bytes::new());
        let security = ClientSecurity::PlainLoopback;
        let connection = quoin_wire::establish::dial("p", address, &security, key, &hello).ok()?;
        Some(Session { connection, key })
    }

    fn session_at(address: SocketAddr, epoch: u64) -> Option<(Session, OpenAck)> {
        Self::session_of(address, MEMBER, epoch)
    }

    fn session_of(address: SocketAddr, member: Member, epoch: u64) -> Option<(Session, OpenAck)> {
        let mut session = Self::dial_to(address, member, epoch)?;
        session.send(&ToReplica::Open {
            volume: VOLUME,
            replica: member.id,
            guid: member.guid,
            membership: membership(),
            lease_ms: 500,
        });
        match session.next()? {
            FromReplica::OpenAck(ack) => Some((session, *ack)),
            _ => None,
        }
    }

    /// The controller's answer to a report of the present start that told this mark.
    fn judge(&self, rolled_back: bool, mark: u64) {
        let (answer, state) = tokio::sync::oneshot::channel();
        self.send(Input::State { all: true, answer });
        let nonce = state.blocking_recv().unwrap().counts.nonce;
        self.send(Input::Judged { rolled_back, nonce, mark });
    }

    fn wait_for_trouble(&self) {
        eventually("the failure shows", || self.trouble.lock().unwrap().clone());
    }

    fn stop(self) {
        // A thread that was told before may have ended, and takes nothing.
        let _ = self.stop.send(true);
        let _ = self.inputs.send(Input::Shutdown);
        self.waker.wake();
        self.thread.join().unwrap().unwrap();
    }
}

/// A target's end of a session.
struct Session {
    connection: Connection,
    key: SessionKey,
}

impl Session {
    fn send(&mut self, message: &ToReplica) {
        self.connection.send_to_replica(self.key, message).unwrap();
        self.connection.flush().unwrap();
    }

    /// The next message; `None` at the session's end.
    fn next(&mut self) -> Option<FromReplica> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            let outcome = self.connection.receive().ok()?;
            if let Some(incoming) = self.connection.next_frame().ok()? {
                return match incoming.frame {
                    Frame::FromReplica(message) => Some(message),
                    _ => None,
                };
            }
            if outcome == ReadOutcome::End {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("neither an answer nor an end");
    }

    /// Begins to be fed after what the replica holds.
    fn feed(&mut self, ack: &OpenAck) {
        let keep = ack.position.lsn;
        self.send(&ToReplica::Truncate { keep, tip: keep });
        while !matches!(self.next().expect("it is fed"), FromReplica::Truncated { .. }) {}
    }

    /// The next write, synced at once.
    fn append(&mut self, ack: &OpenAck, lba: u64) -> Lsn {
        let position = Position { epoch: self.key.epoch, lsn: ack.position.lsn.next() };
        let data = Bytes::from(vec![7; 4096]);
        let entry = Entry::after(ack.chain, position, EntryKind::Write, lba, 1, data, false);
        let stable = ack.stable;
        let entries = vec![Arc::new(entry)];
        self.send(&ToReplica::Append { entries, stable, sync: true, ping: Ping(5) });
        position.lsn
    }
}

/// A disk whose next read, write or sync can be told to fail, once.
#[derive(Clone)]
struct FailingDisk {
    inner: MemoryDisk,
    next: Arc<Mutex<Option<&'static str>>>,
    /// Syncs wait for this.
    gate: Arc<Mutex<()>>,
}

impl FailingDisk {
    fn new() -> Self {
        FailingDisk { inner: new_disk(), next: Arc::default(), gate: Arc::default() }
    }

    fn fail_next(&self, operation: &'static str) {
        *self.next.lock().unwrap() = Some(operation);
    }

    fn has_failed(&self) -> bool {
        self.next.lock().unwrap().is_none()
    }

    fn pass(&self, operation: &'static str, offset: u64) -> Result<(), IoFault> {
        match self.next.lock().unwrap().take_if(|next| *next == operation) {
            Some(_) => Err(IoFault { operation, offset, errno: 5 }),
            None => Ok(()),
        }
    }
}

impl Disk for FailingDisk {
    fn size(&self) -> u64 {
        self.inner.size()
    }
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.pass("read", offset)?;
        self.inner.read_at(offset, buffer)
    }
    fn write_at(&self, offset: u64, parts: &[std::io::IoSlice<'_>]) -> Result<(), IoFault> {
        self.pass("write", offset)?;
        self.inner.write_at(offset, parts)
    }
    fn sync(&self) -> Result<(), IoFault> {
        self.pass("sync", 0)?;
        self.inner.sync()
    }
    fn syncer(&self) -> SyncDisk {
        let (disk, mut inner) = (self.clone(), self.inner.syncer());
        Box::new(move || {
            let _open = disk.gate.lock().unwrap();
            disk.pass("sync", 0).and_then(|()| inner())
        })
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

fn new_disk() -> MemoryDisk {
    let disk = MemoryDisk::new(256 << 20);
    Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
    disk
}

/// A process whose replica claims to be continuous, and whose disk fails then.
fn fail(disk: &MemoryDisk, witness: &Path) -> Process {
    let process = Process::start(disk, witness);
    process.create_replica();
    assert!(process.open_replica(1).unwrap().continuous);
    disk.fail_after(Some(0));
    assert_eq!(process.open_replica(2), None, "nothing is promised on a failing disk");
    process.wait_for_trouble();
    process
}

#[test]
fn after_a_disk_error_no_replica_of_the_reopened_pool_claims_to_be_continuous() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, witness) = (new_disk(), dir.path().join(WITNESS_FILE));
    let process = fail(&disk, &witness);
    disk.fail_after(None);
    let mut epoch = 2;
    let ack = eventually("the mended pool answers", || {
        epoch += 1;
        process.open_replica(epoch)
    });
    assert!(!ack.continuous);
    assert_eq!(*process.trouble.lock().unwrap(), None);
    process.stop();
    // On media, too: the next process finds the witness of this one.
    assert!(witness.exists());
    let process = Process::start(&disk, &witness);
    assert!(!process.open_replica(epoch + 1).unwrap().continuous);
    process.stop();
}

#[test]
fn a_replica_whose_deletion_the_disk_refused_is_deleted_in_the_next_life_and_told_gone_only_then() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join(WITNESS_FILE);
    let disk = FailingDisk::new();
    let process = Process::start(&disk, &witness);
    process.create_replica();
    disk.fail_next("sync");
    let gate = disk.gate.lock().unwrap();
    process.assign(Phase::Delete);
    assert_ne!(process.replica_state(), Some("gone"), "told before it is on media");
    drop(gate);
    // It was asked for once, in the life before.
    eventually("it is gone", || (process.replica_state()? == "gone").then_some(()));
    assert!(disk.has_failed());
    process.stop();
    // Nothing is left for the process after it, which is told nothing.
    let process = Process::start(&disk, &witness);
    assert_eq!(process.replica_state(), None);
    process.stop();
}

/// Results of the failed life are late: a good sync of it says nothing of what the next one wrote.
#[test]
fn a_good_sync_that_ends_after_its_pool_failed_makes_nothing_durable_in_the_next_life() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FailingDisk::new();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replica();
    // The number of the late one is far ahead of the next life's.
    for epoch in 1..=6 {
        process.session(epoch).unwrap();
    }
    let (mut session, ack) = process.session(7).unwrap();
    session.feed(&ack);
    let gate = disk.gate.lock().unwrap();
    let before = process.metrics.disk.syncs.get();
    session.append(&ack, 3);
    eventually("a sync is under way", || (process.metrics.disk.syncs.get() > before).then_some(()));
    disk.fail_next("write");
    let open = opening(&process, 8);
    eventually("a write failed", || disk.has_failed().then_some(()));
    drop(gate);
    process.wait_for_trouble();
    drop((session, open.join()));
    let gate = eventually("the next life begins with its syncs held up", || {
        let gate = disk.gate.lock().unwrap();
        process.trouble.lock().unwrap().is_none().then_some(gate)
    });
    process.assign(Phase::Delete);
    for _ in 0..20 {
        assert_ne!(process.replica_state(), Some("gone"), "told before it is on media");
    }
    drop(gate);
    eventually("it is gone", || (process.replica_state()? == "gone").then_some(()));
    process.stop();
}

#[test]
fn a_replica_is_not_deleted_by_an_order_for_another_volume_with_its_guid() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, witness) = (new_disk(), dir.path().join(WITNESS_FILE));
    let process = Process::start(&disk, &witness);
    process.create_replica();
    process.assign_of(VolumeId(!VOLUME.0), Phase::Delete);
    assert_eq!(process.replica_state(), Some("created"), "nothing is told gone");
    let told = process.notices.take();
    assert!(told.iter().any(|notice| notice.reason == "ReplicaOfAnother"), "{told:?}");
    assert!(process.open_replica(1).is_some());
    process.assign(Phase::Delete);
    eventually("it is gone", || (process.replica_state()? == "gone").then_some(()));
    process.stop();
}

#[test]
fn a_process_that_ends_with_its_disk_failed_leaves_no_witness_to_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, witness) = (new_disk(), dir.path().join(WITNESS_FILE));
    let process = Process::start(&disk, &witness);
    assert!(witness.exists());
    process.stop();
    fail(&disk, &witness).stop();
    assert!(!witness.exists());
    disk.fail_after(None);
    let process = Process::start(&disk, &witness);
    assert!(!process.open_replica(3).unwrap().continuous);
    process.stop();
    assert!(witness.exists());
}

#[test]
fn a_process_that_is_killed_leaves_its_caches_to_the_next_one_where_a_witness_could_be_kept() {
    for kept in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let name = if kept { WITNESS_FILE } else { "gone/witness" };
        let (disk, witness) = (new_disk(), dir.path().join(name));
        let process = Process::start(&disk, &witness);
        process.create_replica();
        let (mut session, ack) = process.session(1).unwrap();
        session.feed(&ack);
        // Nothing of the end of a process comes to the copy, as after a kill.
        let copy = disk.fork();
        let next = Process::start(&copy, &witness);
        assert_eq!(next.open_replica(2).unwrap().continuous, kept);
        next.stop();
        drop(session);
        process.stop();
    }
}

#[test]
fn a_pool_that_is_merely_restarted_stays_continuous() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, witness) = (new_disk(), dir.path().join(WITNESS_FILE));
    let process = Process::start(&disk, &witness);
    process.create_replica();
    assert!(process.open_replica(1).unwrap().continuous);
    process.stop();
    let process = Process::start(&disk, &witness);
    assert!(process.open_replica(2).unwrap().continuous);
    process.stop();
}

/// A target that loses its session dials again at once.
#[test]
fn who_comes_while_a_pool_stops_is_not_let_in_and_its_replicas_stay_continuous() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join(WITNESS_FILE);
    let disk = FailingDisk::new();
    let process = Process::start(&disk, &witness);
    process.create_replica();
    let (mut session, ack) = process.session(1).unwrap();
    session.feed(&ack);
    let gate = disk.gate.lock().unwrap();
    process.send(Input::Shutdown);
    while session.next().is_some() {}
    let coming = opening(&process, 2);
    std::thread::sleep(Duration::from_millis(200));
    drop(gate);
    process.stop();
    assert!(coming.join().unwrap().is_none());
    disk.inner.power_cut(|| false);
    let process = Process::start(&disk, &witness);
    assert!(process.open_replica(3).unwrap().continuous);
    process.stop();
}

/// Proves: a failed fdatasync or write ends the replica's session, is never retried for truth and
/// never acknowledged, and is told. The disk is well again at once: a second try would succeed.
#[test]
fn a_write_whose_sync_or_append_failed_is_never_acknowledged_and_never_tried_again() {
    for operation in ["sync", "write"] {
        let dir = tempfile::tempdir().unwrap();
        let witness = dir.path().join(WITNESS_FILE);
        let disk = FailingDisk::new();
        let process = Process::start(&disk, &witness);
        process.create_replica();
        let (mut session, ack) = process.session(1).unwrap();
        session.feed(&ack);
        disk.fail_next(operation);
        let lsn = session.append(&ack, 3);
        let mut said = Vec::new();
        while let Some(message) = session.next() {
            match &message {
                FromReplica::Applied { applied, durable, .. } => {
                    assert!(*durable < lsn, "{operation}: acknowledged as durable");
                    assert!(operation == "sync" || *applied < lsn, "acknowledged as applied");
                }
                FromReplica::Failed(failure) => assert_eq!(*failure, Failure::Io),
                other => panic!("{other:?}"),
            }
            said.push(message);
        }
        assert!(
            disk.has_failed() && matches!(said.last(), Some(FromReplica::Failed(_))),
            "{said:?}"
        );
        let mut epoch = 1;
        let ack = eventually("the pool was opened anew", || {
            epoch += 1;
            process.open_replica(epoch)
        });
        assert!(!ack.continuous, "{operation}: what the disk dropped is unknown");
        let told = process.notices.take();
        assert!(told.iter().any(|n| n.reason == "DiskFailed"), "{told:?}");
        let wear = process.metrics.wear();
        assert_eq!(wear.errors, 1, "{operation}: one refusal, however many noticed it");
        assert!(wear.operations > 0 && wear.stalls == 0, "{wear:?}");
        process.stop();
    }
}

/// One sector that cannot be read is one bad block, which others answer; the disk goes on.
#[test]
fn a_read_error_costs_the_block_and_not_the_pool() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FailingDisk::new();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    process.create_replica();
    let (mut session, ack) = process.session(1).unwrap();
    session.feed(&ack);
    let after = session.append(&ack, 3);
    let mut read = |id: u64| {
        let (view, ping) = (ReadView::Live, Ping(9));
        session.send(&ToReplica::Read {
            id,
            view,
            lba: 3,
            blocks: 1,
            after,
            want_data: true,
            ping,
        });
        loop {
            match session.next().expect("the session goes on") {
                FromReplica::Data { slots, .. } => return slots[0].content.clone(),
                FromReplica::Applied { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    };
    assert!(matches!(read(1), Content::Data { .. }));
    disk.fail_next("read");
    let first = read(2);
    assert!(disk.has_failed());
    // The block alone was tried once more, and could be read.
    assert!(matches!(first, Content::Data { .. } | Content::Bad), "{first:?}");
    assert!(matches!(read(3), Content::Data { .. }));
    assert_eq!(*process.trouble.lock().unwrap(), None);
    process.stop();
}

/// A target that tries to open the replica, beside the test.
fn opening(process: &Process, epoch: u64) -> JoinHandle<Option<(Session, OpenAck)>> {
    let address = process.address;
    std::thread::spawn(move || Process::session_at(address, epoch))
}

#[test]
fn a_start_serves_once_it_is_recognised_and_an_older_state_of_the_disk_never_does() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join(WITNESS_FILE);
    let disk = MemoryDisk::new(128 << 20);
    Pool::format(&disk, &FormatOptions::new(PoolId(3))).unwrap();
    let process = Process::recognised(&disk, &witness, Recognition::Awaited);
    process.create_replica();
    let waiting = opening(&process, 1);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished(), "the controller may know more");
    process.judge(false, 0);
    let (mut session, _) = waiting.join().unwrap().expect("it is recognised");

    process.judge(true, 0);
    assert!(session.next().is_none(), "its sessions end");
    let again = opening(&process, 2);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!again.is_finished(), "nobody gets in");
    process.judge(false, 0);
    assert!(again.join().unwrap().is_some(), "the controller took it back");
    process.stop();
}

/// The disk may have been put back while it failed.
#[test]
fn a_pool_that_is_opened_anew_in_its_process_serves_once_that_start_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let (disk, witness) = (new_disk(), dir.path().join(WITNESS_FILE));
    let process = Process::recognised(&disk, &witness, Recognition::Awaited);
    process.create_replica();
    process.judge(false, 0);
    assert!(process.open_replica(1).is_some());
    let former = process.counts.lock().unwrap().nonce;
    disk.fail_after(Some(0));
    assert_eq!(process.open_replica(2), None, "nothing is promised on a failing disk");
    process.wait_for_trouble();
    disk.fail_after(None);
    eventually("it is opened anew", || process.replica_state());
    let address = process.address;
    let waiting = std::thread::spawn(move || Process::dial(address, 3));
    // An answer that was on its way since before the failure is about another start.
    process.send(Input::Judged { rolled_back: false, nonce: former, mark: 0 });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished(), "the controller may know more");
    process.judge(false, 0);
    assert!(waiting.join().unwrap().is_some(), "it is recognised");
    process.stop();
}

#[test]
fn where_no_controller_answers_a_start_serves_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join(WITNESS_FILE);
    let disk = MemoryDisk::new(128 << 20);
    Pool::format(&disk, &FormatOptions::new(PoolId(3))).unwrap();
    let process = Process::recognised(&disk, &witness, Recognition::Awaited);
    process.create_replica();
    let began = Instant::now();
    eventually("it serves", || process.open_replica(1));
    assert!(began.elapsed() >= Duration::from_secs(2), "the controller was not waited for");
    process.stop();
}

fn mark(process: &Process) -> u64 {
    let (answer, state) = tokio::sync::oneshot::channel();
    process.send(Input::State { all: true, answer });
    state.blocking_recv().unwrap().counts.mark
}

#[test]
fn the_mark_rises_after_promises_where_the_controller_knows_it_and_with_an_orderly_end() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join(WITNESS_FILE);
    let disk = MemoryDisk::new(128 << 20);
    Pool::format(&disk, &FormatOptions::new(PoolId(3))).unwrap();
    let process = Process::start(&disk, &witness);
    process.create_replica();
    for epoch in 1..4 {
        process.open_replica(epoch).unwrap();
        assert_eq!(mark(&process), 0, "no controller has heard of mark 0");
    }
    process.judge(true, 0);
    process.judge(false, 0);
    eventually("the mark rises", || (mark(&process) == 1).then_some(()));
    process.judge(false, 1);
    std::thread::sleep(Duration::from_millis(100));
    process.open_replica(4).unwrap();
    let counts = process.counts.clone();
    process.stop();
    let last = *counts.lock().unwrap();
    assert_eq!(last.mark, 2, "its end covers what it promised last");
    assert_eq!(open(&disk).unwrap().pool.mark(), 2);

    // A disk that was put back cannot count up to what the controller knows.
    for _ in 0..3 {
        let process = Process::start(&disk, &witness);
        eventually("it is opened", || process.open_replica(9).or(process.open_replica(10)));
        assert_eq!(mark(&process), 2);
        process.stop();
    }
    assert_eq!(open(&disk).unwrap().pool.mark(), 2);
}

/// Replicas that no target has open hear of a change of the room as they are opened.
#[test]
fn a_replica_that_was_not_open_as_the_room_changed_is_opened_with_the_present_one() {
    let folder = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), folder.path());
    process.create_replicas(&[MEMBER]);
    let (session, alone) = process.session(1).expect("it opens");
    drop(session);
    let member = |n: u128| Member { id: ReplicaId(1000 + n), guid: ReplicaGuid(1000 + n) };
    let members: Vec<_> = std::iter::once(MEMBER).chain((0..40).map(member)).collect();
    process.create_replicas(&members);
    let of = |member: Member| {
        eventually("it opens", || Process::session_of(process.address, member, 2)).1.room
    };
    let (of_the_first, of_the_last) = (of(MEMBER), of(members[40]));
    assert!(of_the_last.share_blocks < alone.room.share_blocks);
    assert_eq!(of_the_first, of_the_last);
    process.stop();
}
