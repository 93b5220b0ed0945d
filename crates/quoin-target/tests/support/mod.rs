//! A small cluster in one process: pools and a target over loopback TCP, a scripted control
//! plane, and a blocking NBD client.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quoin_pool::accept::{Acceptor, Belief};
use quoin_pool::assignment::{Assignment, Phase, PoolState, Wanted};
use quoin_pool::facts::PoolFacts;
use quoin_pool::scrub::ScrubPlan;
use quoin_pool::shard::{Ended, Input as PoolInput, Parts, Recognition, Shard as PoolShard};
use quoin_pool::syncer::Syncer;
use quoin_pool::witness::Witness;
use quoin_reactor::{Reactor, Waker};
use quoin_replication::primary::{OnFull, OnQuorumLoss, PrimaryConfig, PrimaryStatus, ReadMode};
use quoin_replication::replica::store::ReplicaIdentity;
use quoin_store::ReplicaPool;
use quoin_store::disk::Syncer as SyncDisk;
use quoin_target::dial::{Dials, Reach};
use quoin_target::metrics::Metrics;
use quoin_target::shard::{
    Ask, Grant, Input, Limits, ReplicaPlace, Shard, ShardHandle, VolumeSetup,
};
use quoin_telemetry::notices::Notices;
use quoin_types::block::DeviceInfo;
use quoin_types::ids::Epoch;
use quoin_types::membership::{Durability, Member, Membership};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};
use quoin_wire::handshake::ServerSecurity;

pub const VOLUME: VolumeId = VolumeId(7);

/// Waits for something that must come; the bound is far above what it takes.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// One running pool.
pub struct RunningPool {
    pub address: String,
    pub inputs: Sender<PoolInput>,
    pub waker: Waker,
    pub metrics: quoin_pool::metrics::Metrics,
    thread: JoinHandle<Ended>,
}

impl RunningPool {
    /// `address`: of an earlier life, or 127.0.0.1:0.
    pub fn start<P: ReplicaPool + PoolFacts + Send + 'static>(
        pool: P,
        disk: SyncDisk,
        address: &str,
        security: ServerSecurity,
        belief: Belief,
    ) -> Self {
        let start = Instant::now();
        let listener = loop {
            match TcpListener::bind(address) {
                Ok(listener) => break listener,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
            }
        };
        let address = listener.local_addr().unwrap().to_string();
        let reactor = Reactor::new().unwrap();
        let (sender, inputs) = channel();
        let metrics = quoin_pool::metrics::Metrics::new("p");
        let waker = reactor.waker();
        let security = Arc::new(Mutex::new(security));
        let acceptor = Acceptor::new(
            listener,
            Some("p"),
            security,
            belief,
            sender.clone(),
            waker.clone(),
            metrics.clone(),
        )
        .unwrap();
        let counted = metrics.clone();
        let syncer = Syncer::start(disk, sender.clone(), waker.clone()).unwrap();
        let (notices, scrub) = (Notices::default(), ScrubPlan::default());
        let mut parts = Parts {
            reactor,
            acceptor,
            inputs,
            notices,
            metrics,
            scrub,
            recognition: Recognition::Given,
            counts: Default::default(),
            assignment: Assignment::default(),
            witness: Witness::in_places(Vec::new()),
            made: Arc::default(),
        };
        let thread =
            std::thread::spawn(move || PoolShard::new(pool, &mut parts, syncer).unwrap().run());
        RunningPool { address, inputs: sender, waker, metrics: counted, thread }
    }

    pub fn send(&self, input: PoolInput) {
        self.inputs.send(input).unwrap();
        self.waker.wake();
    }

    pub fn state(&self) -> PoolState {
        let (answer, state) = tokio::sync::oneshot::channel();
        self.send(PoolInput::State { all: true, answer });
        state.blocking_recv().unwrap()
    }

    pub fn stop(self) -> Ended {
        self.send(PoolInput::Shutdown);
        self.thread.join().unwrap()
    }
}

pub fn members(n: u128) -> Vec<Member> {
    (1..=n).map(|i| Member { id: ReplicaId(i), guid: ReplicaGuid(100 + i) }).collect()
}

pub fn membership(known: &[Member], cf: u8) -> Membership {
    Membership {
        version: 1,
        rf: known.len() as u8,
        cf,
        drf: known.len() as u8,
        known: known.to_vec(),
        retired: vec![],
        formed: true,
    }
}

pub fn create_replica(pool: &RunningPool, member: Member, membership: &Membership, blocks: u64) {
    pool.send(PoolInput::Assign(Assignment(vec![Wanted {
        identity: ReplicaIdentity {
            volume: VOLUME,
            replica: member.id,
            guid: member.guid,
            volume_spec: Bytes::new(),
        },
        blocks,
        phase: Phase::Init,
        source: None,
        flatten: false,
        fence: Default::default(),
        membership: Membership { formed: false, ..membership.clone() },
    }])));
    eventually("the replica is created", || {
        pool.state().replicas.iter().any(|r| r.guid == member.guid)
    });
}

/// Grants epochs as the controller would, from memory.
#[derive(Clone, Default)]
pub struct Control {
    epochs: Arc<Mutex<HashMap<VolumeId, u64>>>,
    pub stopped: Arc<Mutex<Vec<VolumeId>>>,
}

pub struct RunningTarget {
    pub handle: ShardHandle,
    pub notices: Notices,
    pub metrics: Metrics,
    thread: JoinHandle<std::io::Result<()>>,
}

impl RunningTarget {
    pub fn start(
        control: &Control,
        membership: Membership,
        reach: Reach,
        sign: impl Fn(quoin_types::Incarnation, Epoch) -> Bytes + Send + 'static,
    ) -> Self {
        Self::start_keeping(usize::MAX, control, membership, reach, sign)
    }

    /// Starts a target that may keep so much for replicas that are away or behind.
    pub fn start_keeping(
        catch_up_bytes: usize,
        control: &Control,
        membership: Membership,
        reach: Reach,
        sign: impl Fn(quoin_types::Incarnation, Epoch) -> Bytes + Send + 'static,
    ) -> Self {
        let metrics = Metrics::new(true);
        let (asks, mut asked) = tokio::sync::mpsc::unbounded_channel();
        let notices = Notices::default();
        let dials = Dials::new(reach, metrics.dials.clone());
        let shard = Shard::new(&dials, catch_up_bytes, asks, notices.clone(), metrics.clone());
        let (shard, handle) = shard.unwrap();
        let (answers, control) = (handle.clone(), control.clone());
        std::thread::spawn(move || {
            while let Some(ask) = asked.blocking_recv() {
                match ask {
                    Ask::Epoch { volume, incarnation, at_least } => {
                        let mut epochs = control.epochs.lock().unwrap();
                        let epoch = epochs.entry(volume).or_default();
                        *epoch = (*epoch).max(at_least.0) + 1;
                        let grant = Grant::Given {
                            epoch: Epoch(*epoch),
                            membership: membership.clone(),
                            bytes: sign(incarnation, Epoch(*epoch)),
                            options: None,
                        };
                        answers.send(Input::Granted(volume, incarnation, grant));
                    }
                    Ask::Stopped { volume, .. } => control.stopped.lock().unwrap().push(volume),
                    Ask::Swap { .. } | Ask::Changed | Ask::Answered { .. } => {}
                    Ask::Reverted { .. } | Ask::Pulled { .. } | Ask::Stepped { .. } => {}
                }
            }
        });
        let thread = std::thread::spawn(move || shard.run());
        RunningTarget { handle, notices, metrics, thread }
    }

    pub fn open(&self, socket: &Path, places: Vec<ReplicaPlace>, blocks: u64, media: bool) {
        self.open_limited(socket, places, blocks, media, Limits::default());
    }

    pub fn open_limited(
        &self,
        socket: &Path,
        places: Vec<ReplicaPlace>,
        blocks: u64,
        media: bool,
        limits: Limits,
    ) {
        self.handle.send(Input::Open(Box::new(VolumeSetup {
            config: config(blocks, media),
            info: DeviceInfo {
                name: "db".into(),
                size_bytes: blocks * 4096,
                block_size: 512,
                read_only: false,
            },
            since_epoch: 0,
            limits,
            options_version: 0,
            socket: Some(socket.to_owned()),
            is_encrypted: false,
            key: None,
            replicas: places,
            desired: Default::default(),
            verify: None,
            client: 0,
            sharers: Vec::new(),
            feed: None,
            seed: Instant::now().elapsed().as_nanos() as u64
                ^ std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        })));
    }

    pub fn status(&self) -> PrimaryStatus {
        let (answer, status) = tokio::sync::oneshot::channel();
        self.handle.send(Input::Status(answer));
        status.blocking_recv().unwrap().pop().unwrap().status
    }

    pub fn stop(self) {
        self.handle.send(Input::Shutdown);
        self.thread.join().unwrap().unwrap();
    }
}

pub fn config(blocks: u64, media: bool) -> PrimaryConfig {
    PrimaryConfig {
        volume: VOLUME,
        volume_blocks: blocks,
        logical_block_size: 512,
        durability: if media { Durability::Media } else { Durability::Cache },
        on_quorum_loss: OnQuorumLoss::Wait,
        on_full: OnFull::Wait,
        reads: ReadMode::Leased,
        read_only: false,
        lease_ms: 1000,
        open_grace_ms: 500,
        drop_after_ms: 2000,
        window_bytes: 64 << 20,
        sync_bytes: 64 << 20,
        sync_after_ms: 1000,
        local: None,
    }
}

/// A blocking NBD client, one request at a time.
pub struct Nbd {
    socket: UnixStream,
    cookie: u64,
}

impl Nbd {
    pub fn connect(path: &PathBuf) -> Self {
        let start = Instant::now();
        let mut socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle, no zeroes; EXPORT_NAME with an empty name.
        socket.write_all(&3u32.to_be_bytes()).unwrap();
        socket.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        let mut export = [0; 10];
        socket.read_exact(&mut export).unwrap();
        Nbd { socket, cookie: 0 }
    }

    pub fn send(&mut self, flags: u16, kind: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        self.cookie += 1;
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend(0x2560_9513u32.to_be_bytes());
        request.extend(flags.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(data);
        self.socket.write_all(&request).unwrap();
        self.cookie
    }

    /// Data of a request whose start was sent.
    pub fn send_rest(&mut self, data: &[u8]) {
        self.socket.write_all(data).unwrap();
    }

    /// The cookie and error of the next simple reply; read data is read by the caller.
    pub fn reply(&mut self) -> (u64, u32) {
        let mut reply = [0; 16];
        self.socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        (
            u64::from_be_bytes(reply[8..16].try_into().unwrap()),
            u32::from_be_bytes(reply[4..8].try_into().unwrap()),
        )
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.send(0, 1, offset, data.len() as u32, data);
        assert_eq!(self.reply().1, 0);
    }

    pub fn flush(&mut self) {
        self.send(0, 3, 0, 0, &[]);
        assert_eq!(self.reply().1, 0);
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.send(0, 0, offset, length, &[]);
        assert_eq!(self.reply().1, 0);
        let mut data = vec![0; length as usize];
        self.socket.read_exact(&mut data).unwrap();
        data
    }
}

pub fn place(member: Member, pool: &RunningPool) -> ReplicaPlace {
    ReplicaPlace { member, pool: "p".into(), address: pool.address.clone() }
}
