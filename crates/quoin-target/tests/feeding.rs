//! A copy that is fed over a stream, on pools that keep what was written.

use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use quoin_cluster::mirror::feed::Feed as Brain;
use quoin_cluster::mirror::record::{Stamp, Transfer};
use quoin_encryption::{Encryption, UserKey};
use quoin_pool::accept::Belief;
use quoin_replication::primary::{ChangesAnswer, ChangesRequest, LiveOptions};
use quoin_store::model::ModelPool;
use quoin_target::assignment::FeedOrder;
use quoin_target::dial::Reach;
use quoin_target::history::Pull;
use quoin_target::shard::{FeedProgress, Input, Limits, VolumeSetup, VolumeUpdate};
use quoin_types::block::DeviceInfo;
use quoin_types::ids::PointId;
use quoin_types::membership::{Member, Membership};
use quoin_types::message::ChangedRange;
use quoin_types::{BLOCK_SIZE, crc32c};
use quoin_wire::WireError;
use quoin_wire::handshake::ServerSecurity;
use quoin_wire::history::{Block, Feed, Message, Part, Refused, Slots, Taken};

use crate::support::*;

const BLOCKS: u64 = 4096;

struct Copy {
    dir: tempfile::TempDir,
    known: Vec<Member>,
    membership: Membership,
    pools: Vec<RunningPool>,
    control: Control,
}

impl Copy {
    fn new() -> Self {
        let (known, dir) = (members(3), tempfile::tempdir().unwrap());
        let membership = membership(&known, 2);
        let pool = |member: &Member| {
            let (belief, security) = (Belief::Everybody, ServerSecurity::PlainLoopback);
            let sync = Box::new(|| Ok(()));
            let pool = RunningPool::start(ModelPool::new(), sync, "127.0.0.1:0", security, belief);
            create_replica(&pool, *member, &membership, BLOCKS);
            pool
        };
        let pools = known.iter().map(pool).collect();
        Self { dir, known, membership, pools, control: Control::default() }
    }

    fn target(&self) -> RunningTarget {
        let sign = |_, _| Bytes::new();
        RunningTarget::start(&self.control, self.membership.clone(), Reach::PlainLoopback, sign)
    }

    fn setup(&self, feed: Option<FeedOrder>) -> VolumeSetup {
        VolumeSetup {
            config: config(BLOCKS, false),
            info: DeviceInfo {
                name: "db".into(),
                size_bytes: BLOCKS * 4096,
                block_size: 4096,
                read_only: false,
            },
            since_epoch: 0,
            limits: Limits::default(),
            options_version: 0,
            socket: None,
            is_encrypted: true,
            key: None,
            replicas: self.known.iter().zip(&self.pools).map(|(m, p)| place(*m, p)).collect(),
            desired: Default::default(),
            verify: None,
            client: 0,
            sharers: Vec::new(),
            feed,
            seed: std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        }
    }

    /// A lent target that has this order.
    fn lent(&self, feed: Option<FeedOrder>) -> RunningTarget {
        let target = self.target();
        target.handle.send(Input::Open(Box::new(self.setup(feed))));
        eventually("it serves", || target.status().serving);
        target
    }

    fn update(&self, target: &RunningTarget, feed: Option<FeedOrder>) {
        let setup = self.setup(feed);
        target.handle.send(Input::Update(Box::new(VolumeUpdate {
            volume: VOLUME,
            socket: None,
            key: None,
            read_only: false,
            since_epoch: 0,
            size_bytes: BLOCKS * 4096,
            limits: Limits::default(),
            options: LiveOptions::of(&setup.config, 0),
            replicas: setup.replicas,
            desired: Default::default(),
            verify: None,
            client: 0,
            sharers: Vec::new(),
            feed,
        })));
    }

    /// A client of a target that serves the volume as if it were not encrypted.
    fn as_stored(&self) -> (RunningTarget, Nbd) {
        let target = self.target();
        let socket = self.dir.path().join("v.sock");
        target.open(&socket, self.setup(None).replicas, BLOCKS, false);
        let client = Nbd::connect(&socket);
        (target, client)
    }
}

fn progress(target: &RunningTarget) -> Option<FeedProgress> {
    let (answer, status) = tokio::sync::oneshot::channel();
    target.handle.send(Input::Status(answer));
    status.blocking_recv().unwrap().pop().unwrap().feed
}

fn order(base: Option<PointId>, version: u64) -> FeedOrder {
    let transfer = Transfer { point: PointId(2), base };
    FeedOrder { takes: Some((transfer, 9)), from_block: 0, stamp: Stamp { term: 1, version } }
}

fn block(fill: u8) -> Block {
    let data = Bytes::from(vec![fill; BLOCK_SIZE]);
    Block { crc: crc32c(&data), data }
}

/// The end of a stream that a mirror has.
struct Mirror {
    socket: UnixStream,
    digest: u64,
    serving: JoinHandle<Result<(), WireError>>,
}

impl Mirror {
    fn begin(target: &RunningTarget, order: FeedOrder) -> (Self, Message) {
        let (Transfer { point, base }, token) = order.takes.unwrap();
        let feed = Feed { volume: VOLUME, point, base, token };
        let (socket, mut theirs) = UnixStream::pair().unwrap();
        let handle = target.handle.clone();
        let serving = std::thread::spawn(move || {
            let tell = |input| handle.send(Input::Feed(VOLUME, input));
            quoin_target::feed::take(&mut theirs, feed, &tell)
        });
        let mut mirror = Self { socket, digest: 0, serving };
        let answer = mirror.answer();
        (mirror, answer)
    }

    fn begun(target: &RunningTarget, order: FeedOrder) -> Self {
        let (mirror, answer) = Self::begin(target, order);
        assert!(matches!(answer, Message::Taken(_)), "{answer:?}");
        mirror
    }

    fn answer(&mut self) -> Message {
        Message::read(&mut self.socket).unwrap().unwrap()
    }

    fn taken(&mut self) -> Taken {
        match self.answer() {
            Message::Taken(taken) => taken,
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, place: u64, next: Option<u64>, ranges: &[ChangedRange], fills: &[u8]) {
        let blocks = fills.iter().map(|fill| block(*fill)).collect();
        let part = Part { ranges: ranges.to_vec(), blocks, next };
        let mut slots = Slots { place, part, end: None };
        self.digest = Brain::digest(self.digest, slots.sum());
        slots.end = next.is_none().then_some(self.digest);
        Message::Slots(slots).write(&mut self.socket).unwrap();
    }
}

fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
    ChangedRange { lba, blocks, hole }
}

#[test]
fn a_volume_whose_key_is_not_here_is_fed_with_what_is_stored_and_holes_read_as_zeroes() {
    let copy = Copy::new();
    let (former, mut client) = copy.as_stored();
    for lba in [5, 1000, 2000, 3000] {
        client.write(lba * 4096, &[0xee; 4096]);
    }
    drop(client);
    let written = former.status().content_lsn;
    former.stop();

    let everything = order(None, 1);
    let target = copy.lent(Some(everything));
    let opened = target.status();
    assert_eq!(opened.content_lsn, written, "its first views changed nothing");
    assert!(opened.last.lsn > written, "each has a record of its own");
    let mut mirror = Mirror::begun(&target, everything);
    let many: Vec<u8> = (0..600).map(|n| n as u8).collect();
    mirror.send(0, Some(10), &[range(1, 2, false)], &[7, 8]);
    mirror.send(10, Some(2001), &[range(100, 600, false), range(2000, 1, true)], &many);
    mirror.send(2001, None, &[range(BLOCKS - 1, 1, false)], &[9]);
    let answers = [(); 3].map(|()| mirror.taken());
    assert_eq!(answers.map(|taken| taken.to), [10, 2001, BLOCKS]);
    assert_eq!(answers.map(|taken| taken.is_fed), [false, false, true]);
    assert!(mirror.serving.join().unwrap().is_ok());
    let told = progress(&target).unwrap();
    let (taken_to, stable_to) = (BLOCKS, BLOCKS);
    assert_eq!(told, FeedProgress { order: everything, taken_to, stable_to, is_fed: true });
    let status = target.status();
    assert!(status.stable >= status.content_lsn && status.content_lsn > opened.content_lsn);
    let (_, answer) = Mirror::begin(&target, everything);
    assert_eq!(answer, Message::Taken(Taken { to: BLOCKS, stable_to: BLOCKS, is_fed: true }));
    target.stop();

    let (target, mut client) = copy.as_stored();
    let mut expected = vec![0u8; BLOCKS as usize];
    (expected[1], expected[2], expected[BLOCKS as usize - 1]) = (7, 8, 9);
    expected[100..700].copy_from_slice(&many);
    for (lba, fill) in (0..).zip(&expected) {
        assert_eq!(client.read(lba * 4096, 4096), [*fill; 4096], "{lba}");
    }
    target.stop();
}

#[test]
fn a_stream_goes_on_where_the_last_one_broke_also_at_another_target() {
    let copy = Copy::new();
    let base = Some(PointId(1));
    let target = copy.lent(Some(order(base, 1)));
    let mut mirror = Mirror::begun(&target, order(base, 1));
    mirror.send(0, Some(10), &[range(1, 2, false)], &[7, 8]);
    assert_eq!(mirror.taken().to, 10);
    mirror.send(10, Some(20), &[range(11, 1, false)], &[3]);
    drop(mirror.socket);
    // It may have met the end of the stream with an answer in its hands.
    let _ = mirror.serving.join().unwrap();
    eventually("what came is written", || progress(&target).unwrap().taken_to == 20);
    let (mut mirror, answer) = Mirror::begin(&target, order(base, 1));
    assert_eq!(answer, Message::Taken(Taken { to: 20, stable_to: 0, is_fed: false }));
    mirror.send(20, None, &[], &[]);
    assert!(mirror.taken().is_fed);
    target.stop();

    // Another use begins where its order says.
    let again = FeedOrder { from_block: 20, ..order(base, 2) };
    let target = copy.lent(Some(again));
    let mut mirror = Mirror::begun(&target, again);
    mirror.send(20, None, &[], &[]);
    assert_eq!(mirror.taken(), Taken { to: BLOCKS, stable_to: BLOCKS, is_fed: true });
    target.stop();
}

#[test]
fn nothing_is_fed_that_is_not_ordered_and_an_order_that_ends_ends_its_stream() {
    let copy = Copy::new();
    let base = Some(PointId(1));
    let target = copy.lent(None);
    let refused = |order: FeedOrder| match Mirror::begin(&target, order).1 {
        Message::Refused(refused) => refused,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(order(base, 1)), Refused::NotOrdered);
    copy.update(&target, Some(order(base, 5)));
    let wrong = order(base, 5).takes.map(|(transfer, _)| (transfer, 8));
    assert_eq!(refused(FeedOrder { takes: wrong, ..order(base, 5) }), Refused::NotOrdered);
    assert_eq!(refused(order(None, 5)), Refused::NotOrdered);
    let mut mirror = Mirror::begun(&target, order(base, 5));
    // A late order takes nothing away.
    copy.update(&target, Some(order(None, 4)));
    mirror.send(0, Some(10), &[range(1, 1, false)], &[7]);
    assert_eq!(mirror.taken().to, 10);
    copy.update(&target, None);
    eventually("it is ended", || progress(&target).is_none());
    mirror.send(10, Some(11), &[], &[]);
    assert_eq!(mirror.answer(), Message::Refused(Refused::NotOrdered));
    target.stop();
    let gone = copy.target();
    let (_, answer) = Mirror::begin(&gone, order(base, 5));
    assert_eq!(answer, Message::Refused(Refused::NotServed), "there is no such volume");
    gone.stop();
}

#[test]
fn bytes_that_were_changed_and_slots_behind_the_end_are_refused_and_not_written() {
    let copy = Copy::new();
    let base = Some(PointId(1));
    let target = copy.lent(Some(order(base, 1)));
    let before = target.status().content_lsn;
    let send = |slots: Slots| {
        let mut mirror = Mirror::begun(&target, order(base, 1));
        Message::Slots(slots).write(&mut mirror.socket).unwrap();
        mirror.answer()
    };
    let part =
        |lba, block, next| Part { ranges: vec![range(lba, 1, false)], blocks: vec![block], next };
    let changed = Block { crc: 1, ..block(1) };
    let slots = |part| Slots { place: 0, part, end: None };
    let answer = send(slots(part(3, changed, Some(9))));
    assert_eq!(answer, Message::Refused(Refused::Changed));
    let answer = send(slots(part(BLOCKS, block(1), Some(BLOCKS + 1))));
    assert_eq!(answer, Message::Refused(Refused::OutOfOrder));
    let answer = send(Slots { place: 5, part: part(5, block(1), Some(9)), end: None });
    assert_eq!(answer, Message::Refused(Refused::OutOfOrder));
    let answer = send(Slots { place: 0, part: part(5, block(1), None), end: Some(1) });
    assert_eq!(answer, Message::Refused(Refused::Changed));
    assert_eq!(target.status().content_lsn, before);
    target.stop();
}

#[test]
fn a_volume_that_lost_its_pools_answers_neither_streams_nor_pulls_as_if_it_had_them() {
    let mut copy = Copy::new();
    let base = Some(PointId(1));
    let target = copy.lent(Some(order(base, 1)));
    let mut mirror = Mirror::begun(&target, order(base, 1));
    mirror.send(0, Some(10), &[range(1, 1, false)], &[7]);
    assert_eq!(mirror.taken().to, 10);
    copy.pools.drain(..).for_each(|pool| drop(pool.stop()));
    mirror.send(10, Some(20), &[range(11, 1, false)], &[7]);
    mirror.socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(!matches!(Message::read(&mut mirror.socket), Ok(Some(Message::Taken(_)))));
    assert!(progress(&target).unwrap().taken_to <= 10);
    let never = copy.target();
    never.handle.send(Input::Open(Box::new(copy.setup(Some(order(base, 1))))));
    let (_, answer) = Mirror::begin(&never, order(base, 1));
    assert_eq!(answer, Message::Refused(Refused::NotServed));
    let (answer, part) = std::sync::mpsc::sync_channel::<ChangesAnswer>(1);
    let request = ChangesRequest { token: 1, from: None, to: None, cursor: 0, want_data: false };
    never.handle.send(Input::Pull(VOLUME, Pull { request, answer }));
    let answered = part.recv_timeout(Duration::from_secs(10));
    assert_eq!(answered, Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
    never.handle.send(Input::Shutdown);
    target.handle.send(Input::Shutdown);
}

#[test]
fn a_volume_with_its_key_here_takes_stored_bytes_as_they_are() {
    let copy = Copy::new();
    let user = UserKey::parse("ab".repeat(32).as_bytes()).unwrap();
    let key = Encryption::create(&user, "a").unwrap().unlock(&user).unwrap().key;
    let target = copy.target();
    let base = Some(PointId(1));
    let setup = VolumeSetup { key: Some(key), ..copy.setup(Some(order(base, 1))) };
    target.handle.send(Input::Open(Box::new(setup)));
    eventually("it serves", || target.status().serving);
    let mut mirror = Mirror::begun(&target, order(base, 1));
    mirror.send(0, None, &[range(3, 1, false)], &[5]);
    assert!(mirror.taken().is_fed);
    target.stop();
    let (target, mut client) = copy.as_stored();
    assert_eq!(client.read(3 * 4096, 4096), [5; 4096]);
    target.stop();
}
