//! A volume from its client's socket to its pools, over loopback TCP, in one process.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::*;
use bytes::Bytes;
use quoin_identity::{Authority, Grant, Identity, Lifetimes, Role};
use quoin_pool::accept::Belief;
use quoin_pool::shard::Ended;
use quoin_replication::primary::{LiveOptions, ReplicaStanding};
use quoin_store::model::ModelPool;
use quoin_store::{FileDisk, FormatOptions, Pool, PoolOptions};
use quoin_target::dial::Reach;
use quoin_target::shard::{Input, Limits, ReplicaPlace, VolumeUpdate};
use quoin_types::PoolId;
use quoin_types::membership::{Member, Membership};
use quoin_wire::Mode;
use quoin_wire::handshake::ServerSecurity;

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

/// A volume over plain loopback: pools that each hold a replica, and what one target needs.
struct Plain {
    dir: tempfile::TempDir,
    known: Vec<Member>,
    membership: Membership,
    pools: Vec<RunningPool>,
    control: Control,
}

impl Plain {
    /// `replicas` known, the first `running` of them in pools.
    fn new(replicas: u128, cf: u8, running: usize) -> Self {
        let (known, dir) = (members(replicas), tempfile::tempdir().unwrap());
        let membership = membership(&known, cf);
        let pool = |member: &Member| {
            let pool = start("127.0.0.1:0");
            create_replica(&pool, *member, &membership, BLOCKS);
            pool
        };
        let pools = known.iter().take(running).map(pool).collect();
        Self { dir, known, membership, pools, control: Control::default() }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("v.sock")
    }

    fn places(&self) -> Vec<ReplicaPlace> {
        self.known.iter().zip(&self.pools).map(|(m, p)| place(*m, p)).collect()
    }

    fn target(&self) -> RunningTarget {
        plain_target(&self.control, &self.membership)
    }

    /// A target that serves the volume, and where.
    fn open(&self) -> (RunningTarget, PathBuf) {
        let target = self.target();
        target.open(&self.socket(), self.places(), BLOCKS, false);
        (target, self.socket())
    }
}

fn plain_target(control: &Control, membership: &Membership) -> RunningTarget {
    RunningTarget::start(control, membership.clone(), Reach::PlainLoopback, |_, _| Bytes::new())
}

#[test]
fn what_was_written_is_read_back_after_the_target_was_stopped_and_started() {
    let volume = Plain::new(3, 2, 3);
    let (first, socket) = volume.open();
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

    let (second, socket) = volume.open();
    let mut client = Nbd::connect(&socket);
    assert_eq!(client.read(4096, 8192), expected);
    assert_eq!(client.read(1 << 20, 4096), vec![0; 4096]);
    eventually("all are in sync", || {
        second.status().replicas.iter().all(|r| r.standing == ReplicaStanding::InSync)
    });
    assert_eq!(second.status().epoch.0, 2);
    second.stop();
    for pool in volume.pools {
        assert!(matches!(pool.stop(), Ended::Stopped));
    }
}

/// A pool in a file, as a process would have it.
fn start_file(path: &Path, address: &str, security: ServerSecurity, belief: Belief) -> RunningPool {
    let disk = match FileDisk::open(path) {
        Ok(disk) => disk,
        Err(_) => {
            let disk = FileDisk::create(path, 256 << 20, true).unwrap();
            Pool::format(&disk, &FormatOptions::new(PoolId(1))).unwrap();
            disk
        }
    };
    let pool = Pool::open(disk, PoolOptions::default()).unwrap();
    let syncer = pool.syncer();
    RunningPool::start(pool, syncer, address, security, belief)
}

fn standing(target: &RunningTarget, member: Member) -> Option<ReplicaStanding> {
    target.status().replicas.iter().find(|r| r.member == member).map(|r| r.standing)
}

#[test]
fn a_pool_that_goes_away_and_returns_catches_up_while_io_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("v.sock");
    let known = members(3);
    let membership = membership(&known, 2);
    let path = |n: usize| dir.path().join(format!("pool-{n}"));
    let plain = |n: usize, address: &str| {
        start_file(&path(n), address, ServerSecurity::PlainLoopback, Belief::Everybody)
    };
    let mut pools: Vec<_> = (0..3).map(|n| plain(n, "127.0.0.1:0")).collect();
    for (member, pool) in known.iter().zip(&pools) {
        create_replica(pool, *member, &membership, BLOCKS);
    }
    let places = known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect();
    let target = plain_target(&Control::default(), &membership);
    target.open(&socket, places, BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    let write = |client: &mut Nbd, from: u64, to: u64| {
        (from..to).for_each(|n| client.write(n * 4096, &[n as u8; 4096]));
    };
    write(&mut client, 0, 50);
    eventually("all are in sync", || {
        known.iter().all(|m| standing(&target, *m) == Some(ReplicaStanding::InSync))
    });

    let gone = pools.remove(2);
    let address = gone.address.clone();
    gone.stop();
    write(&mut client, 50, 150);
    client.flush();
    pools.push(plain(2, &address));
    eventually("the returned one is in sync", || {
        standing(&target, known[2]) == Some(ReplicaStanding::InSync)
    });
    write(&mut client, 150, 160);

    // The entries that it caught up with are served without another one.
    pools.remove(0).stop();
    write(&mut client, 160, 170);
    for n in 0..170 {
        assert_eq!(client.read(n * 4096, 4096), [n as u8; 4096], "block {n}");
    }
    target.stop();
    for pool in pools {
        assert!(matches!(pool.stop(), Ended::Stopped));
    }
}

/// Bytes that are kept of 16 MiB that were written and flushed while one of three pools was away.
fn kept_for_one_that_is_away(catch_up_bytes: usize) -> i64 {
    let volume = Plain::new(3, 2, 2);
    let (control, membership) = (volume.control.clone(), volume.membership.clone());
    let reach = Reach::PlainLoopback;
    let target =
        RunningTarget::start_keeping(catch_up_bytes, &control, membership, reach, |_, _| {
            Bytes::new()
        });
    target.open(&volume.socket(), volume.places(), BLOCKS, false);
    let mut client = Nbd::connect(&volume.socket());
    for n in 0..16 {
        client.write(n << 20, &[n as u8 + 1; 1 << 20]);
        client.flush();
    }
    // Whatever is over the budget now and then is looked at again after a while.
    std::thread::sleep(Duration::from_millis(150));
    client.write(0, &[1; 4096]);
    client.flush();
    let kept = target.metrics.retained.get();
    assert_eq!(client.read(15 << 20, 4096), [16; 4096]);
    target.stop();
    kept
}

#[test]
fn what_is_kept_in_memory_for_replicas_that_are_away_is_as_much_as_the_target_was_told() {
    assert!(kept_for_one_that_is_away(usize::MAX) > 15 << 20);
    let kept = kept_for_one_that_is_away(4 << 20);
    assert!(kept <= 4 << 20, "{kept}");
}

#[test]
fn a_replica_that_takes_connections_and_never_answers_does_not_hold_up_the_volume() {
    let volume = Plain::new(3, 2, 2);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut places = volume.places();
    let mut third = places[0].clone();
    third.member = volume.known[2];
    third.address = silent.local_addr().unwrap().to_string();
    places.push(third);
    let (target, socket) = (volume.target(), volume.socket());
    target.open(&socket, places, BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    client.write(0, &[5; 4096]);
    client.flush();
    assert_eq!(client.read(0, 4096), [5; 4096]);
    assert_eq!(standing(&target, volume.known[2]), Some(ReplicaStanding::Disconnected));
    target.stop();
}

#[test]
fn a_request_that_comes_in_pieces_waits_for_its_rest_and_holds_up_nobody_else() {
    let volume = Plain::new(1, 1, 1);
    let (target, socket) = volume.open();
    let mut slow = Nbd::connect(&socket);
    let mut other = Nbd::connect(&socket);
    slow.write(0, &[1; 4096]);
    slow.send(0, 1, 0, 8192, &[2; 100]);
    for n in 1..20 {
        other.write(n * 4096, &[3; 4096]);
    }
    slow.send_rest(&[2; 8092]);
    assert_eq!(slow.reply().1, 0);
    assert_eq!(other.read(0, 8192), [2; 8192]);
    target.stop();
}

/// Its write waits for the volume's open, which a second pool ends: by then nobody wants it.
#[test]
fn limits_and_durability_of_an_open_volume_change_with_its_next_assignment() {
    let volume = Plain::new(3, 2, 3);
    let (target, socket) = volume.open();
    let mut client = Nbd::connect(&socket);
    client.write(0, &[1; 4096]);
    let assign = |version: u64, media: bool, limits: Limits| {
        let config = config(BLOCKS, media);
        target.handle.send(Input::Update(Box::new(VolumeUpdate {
            volume: config.volume,
            socket: Some(socket.clone()),
            read_only: false,
            since_epoch: 0,
            size_bytes: BLOCKS * 4096,
            key: None,
            limits,
            options: LiveOptions::of(&config, version),
            replicas: volume.places(),
            desired: Default::default(),
            verify: None,
            client: 0,
            sharers: Vec::new(),
            feed: None,
        })));
        eventually("the options are in force", || target.status().options_version == version);
    };
    assign(1, true, Limits { ios_per_s: 10, bytes_per_s: 0 });
    let began = Instant::now();
    for n in 0..25 {
        client.write(n * 4096, &[2; 4096]);
    }
    let limited = began.elapsed();
    assert!(limited > Duration::from_millis(1200), "{limited:?}");
    let status = target.status();
    assert_eq!(status.stable, status.last.lsn, "on media before it is acknowledged");
    assign(2, false, Limits::default());
    let began = Instant::now();
    for n in 0..25 {
        client.write(n * 4096, &[3; 4096]);
    }
    assert!(began.elapsed() < limited, "{:?} after {limited:?}", began.elapsed());
    // An older assignment that comes late takes nothing back.
    let config = config(BLOCKS, true);
    target.handle.send(Input::Update(Box::new(VolumeUpdate {
        volume: config.volume,
        socket: Some(socket.clone()),
        read_only: false,
        since_epoch: 0,
        size_bytes: BLOCKS * 4096,
        key: None,
        limits: Limits::default(),
        options: LiveOptions::of(&config, 1),
        replicas: volume.places(),
        desired: Default::default(),
        verify: None,
        client: 0,
        sharers: Vec::new(),
        feed: None,
    })));
    client.write(0, &[4; 4096]);
    assert_eq!(target.status().options_version, 2);
    drop(client);
    target.stop();
}

#[test]
fn a_client_that_is_gone_leaves_no_write_behind_for_those_who_come_after_it() {
    let volume = Plain::new(2, 2, 2);
    let Plain { known, membership, control, dir, mut pools } = volume;
    let places = known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect();
    let away = pools.remove(1);
    let address = away.address.clone();
    away.stop();
    let (target, socket) = (plain_target(&control, &membership), dir.path().join("v.sock"));
    target.open(&socket, places, BLOCKS, false);
    let (mut gone, mut stays) = (Nbd::connect(&socket), Nbd::connect(&socket));
    gone.send(0, 1, 0, 4096, &[1; 4096]);
    stays.send(0, 1, 4096, 4096, &[2; 4096]);
    std::thread::sleep(Duration::from_millis(300));
    drop(gone);
    std::thread::sleep(Duration::from_millis(300));
    let back = start(&address);
    create_replica(&back, known[1], &membership, BLOCKS);
    assert_eq!(stays.reply().1, 0);
    assert_eq!(stays.read(0, 8192), [[0; 4096], [2; 4096]].concat());
    target.stop();
}

#[test]
fn a_volume_with_limits_slows_its_clients_and_gives_them_no_error() {
    let volume = Plain::new(1, 1, 1);
    let (target, socket) = (volume.target(), volume.socket());
    let limits = Limits { ios_per_s: 20, bytes_per_s: 1 << 20 };
    target.open_limited(&socket, volume.places(), BLOCKS, false, limits);
    let mut client = Nbd::connect(&socket);
    client.write(0, &[1; 4096]);
    let began = Instant::now();
    for n in 1..45 {
        client.write(n * 4096, &[2; 4096]);
    }
    // 20 at once and 24 at 20 a second.
    assert!(began.elapsed() >= Duration::from_millis(1000), "{:?}", began.elapsed());
    // One client goes in the middle of it; the other is served on.
    let mut gone = Nbd::connect(&socket);
    for _ in 0..5 {
        gone.send(0, 1, 0, 4096, &[3; 4096]);
    }
    drop(gone);
    client.write(0, &[4; 4096]);
    assert_eq!(client.read(0, 4096), [4; 4096]);
    target.stop();
}

#[test]
fn a_client_that_is_gone_leaves_no_write_behind_that_its_volumes_limits_held_back() {
    let volume = Plain::new(1, 1, 1);
    let (target, socket) = (volume.target(), volume.socket());
    let limits = Limits { ios_per_s: 1, bytes_per_s: 0 };
    target.open_limited(&socket, volume.places(), BLOCKS, false, limits);
    let (mut gone, mut stays) = (Nbd::connect(&socket), Nbd::connect(&socket));
    // The first one goes at once, the others one a second.
    for n in 0..6 {
        gone.send(0, 1, n * 4096, 4096, &[1; 4096]);
    }
    assert_eq!(gone.reply().1, 0);
    drop(gone);
    eventually("it is noticed that the client is gone", || {
        target.metrics.clients.connected.get() == 1
    });
    // It has its turn after what waits already.
    let is_untouched = stays.read(5 * 4096, 4096) == [0; 4096];
    assert!(is_untouched, "a write of a client that was gone came");
    target.stop();
}

struct Cluster {
    dir: tempfile::TempDir,
    authority: Authority,
    controller: Identity,
}

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), Lifetimes::default()).unwrap();
        let controller = authority
            .issue_identity(&dir.path().join("controller"), Role::Controller, "c")
            .unwrap();
        Cluster { dir, authority, controller }
    }

    fn identity(&self, role: Role, name: &str) -> Identity {
        let dir = self.dir.path().join(format!("{}-{name}", role.as_str()));
        self.authority.issue_identity(&dir, role, name).unwrap()
    }

    fn pools(&self, known: &[Member], least: Mode) -> Vec<RunningPool> {
        let identity = self.identity(Role::Pool, "p");
        let membership = membership(known, 2);
        let start = |(n, member): (usize, &Member)| {
            let security = ServerSecurity::Tls { config: identity.server_config().unwrap(), least };
            let path = self.dir.path().join(format!("pool-{n}"));
            let belief = Belief::Grants(identity.clone());
            let pool = start_file(&path, "127.0.0.1:0", security, belief);
            create_replica(&pool, *member, &membership, BLOCKS);
            pool
        };
        known.iter().enumerate().map(start).collect()
    }

    /// A target on `node` whose grants are made out to `granted`.
    fn target(&self, known: &[Member], mode: Mode, node: &str, granted: &str) -> RunningTarget {
        let (controller, granted) = (self.controller.clone(), granted.to_owned());
        let reach = Reach::Tls { identity: self.identity(Role::Node, node), mode };
        RunningTarget::start(&Control::default(), membership(known, 2), reach, move |i, epoch| {
            let (node, term) = (granted.clone(), Default::default());
            let grant = Grant { volume: VOLUME, epoch, incarnation: i, node, writes: true, term };
            controller.sign_grant(&grant).unwrap().into()
        })
    }
}

#[test]
fn a_volume_is_served_over_authenticated_and_over_encrypted_connections() {
    let cluster = Cluster::new();
    let known = members(3);
    let pools = cluster.pools(&known, Mode::Authenticate);
    for (mode, byte) in [(Mode::Authenticate, 1), (Mode::Encrypt, 2)] {
        let socket = cluster.dir.path().join(format!("{byte}.sock"));
        let target = cluster.target(&known, mode, "n1", "n1");
        // The second target's epochs begin anew in its control plane: it learns the higher one.
        let places = known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect();
        target.open(&socket, places, BLOCKS, true);
        let mut client = Nbd::connect(&socket);
        client.write(0, &[byte; 65536]);
        assert_eq!(client.read(0, 65536), [byte; 65536]);
        target.stop();
    }
}

#[test]
fn a_node_with_another_nodes_grant_is_not_believed_and_garbage_disturbs_nobody() {
    let cluster = Cluster::new();
    let known = members(3);
    let pools = cluster.pools(&known, Mode::Authenticate);
    let places = || known.iter().zip(&pools).map(|(m, p)| place(*m, p)).collect::<Vec<_>>();
    let thief_socket = cluster.dir.path().join("thief.sock");
    let thief = cluster.target(&known, Mode::Authenticate, "n2", "n1");
    thief.open(&thief_socket, places(), BLOCKS, false);
    eventually("the thief is turned away", || {
        thief.notices.take().iter().any(|n| n.reason == "PoolUnreachable")
    });
    assert!(pools.iter().all(|p| p.state().replicas.iter().all(|r| r.state == "created")));

    let garbage =
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 5000], &[0x16, 3, 3, 0xff, 0xff], b"\x16"];
    let _held: Vec<TcpStream> = garbage
        .iter()
        .cycle()
        .take(40)
        .map(|garbage| {
            let mut tcp = TcpStream::connect(&pools[0].address).unwrap();
            // The pool may have closed it already.
            let _ = tcp.write_all(garbage);
            tcp
        })
        .collect();
    let socket = cluster.dir.path().join("v.sock");
    let owner = cluster.target(&known, Mode::Authenticate, "n1", "n1");
    owner.open(&socket, places(), BLOCKS, false);
    let mut client = Nbd::connect(&socket);
    client.write(8192, &[3; 4096]);
    assert_eq!(client.read(8192, 4096), [3; 4096]);
    assert!(!thief.status().serving);
    owner.stop();
}
