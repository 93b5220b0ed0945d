//! Both ends of a stream, between a target that reads a point and one that takes it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use quoin_cluster::mirror::feed::Feed as FeedRules;
use quoin_identity::ClusterId;
use quoin_types::ids::{PointId, SnapshotId, VolumeId};
use quoin_types::message::ChangedRange;
use quoin_types::{BLOCK_SIZE, crc32c};
use quoin_wire::history::{Block, Message, Part, Refused, Taken};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

use super::bandwidth::{Bandwidth, Bucket};
use super::book::Progress;
use super::frame::{Begin, Frame, Packed};
use super::orders::Sending;
use super::receive::{End, Hooks, receive};
use super::send::{Ended, Sender, Sent};
use super::{IN_FLIGHT_MAX, history};
use crate::frame::Raw;
use crate::metrics::Metrics;

pub(super) const TOKEN: u128 = 99;
/// Blocks of a part of the source.
const PART_BLOCKS: u64 = 64;

fn order(size_blocks: u64, compress: bool) -> Sending {
    Sending {
        peer: ClusterId(1),
        group: 2,
        volume: VolumeId(3),
        point: PointId(4),
        base: Some(PointId(5)),
        snapshot: SnapshotId(6),
        since: Some(SnapshotId(7)),
        token: TOKEN,
        from_block: 0,
        compress,
        bandwidth_limit: 0,
        size_blocks,
    }
}

/// Content of a block; every fifth is a hole, and every seventh was not changed.
fn content(lba: u64) -> Option<Bytes> {
    let mut seed = lba * 2 + 1;
    let mut bytes = Vec::with_capacity(BLOCK_SIZE);
    while bytes.len() < BLOCK_SIZE {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend((seed ^ seed >> 29).to_le_bytes());
    }
    // Half of each block is noise, so that compression gains something and not everything.
    bytes[BLOCK_SIZE / 2..].fill(lba as u8);
    (!lba.is_multiple_of(5)).then(|| bytes.into())
}

fn is_changed(lba: u64) -> bool {
    !lba.is_multiple_of(7)
}

async fn put(stream: &mut (impl AsyncWrite + Unpin), message: &Message) -> bool {
    let bytes = history::encode(message).unwrap();
    stream.write_all(&bytes).await.is_ok()
}

/// Target that reads a point of so many blocks.
pub(super) async fn source(mut stream: impl AsyncRead + AsyncWrite + Unpin, size_blocks: u64) {
    let Ok(Message::Wanted(wanted)) = history::read(&mut stream).await else { panic!() };
    assert_eq!((wanted.volume, wanted.to, wanted.want_data), (VolumeId(3), SnapshotId(6), true));
    assert_eq!(wanted.from, Some(SnapshotId(7)));
    let mut cursor = Some(wanted.cursor);
    while let Some(at) = cursor {
        let end = (at + PART_BLOCKS).min(size_blocks);
        let mut part = Part { next: (end < size_blocks).then_some(end), ..Part::default() };
        for lba in (at..end).filter(|lba| is_changed(*lba)) {
            let data = content(lba);
            part.ranges.push(ChangedRange { lba, blocks: 1, hole: data.is_none() });
            part.blocks.extend(data.map(|data| Block { crc: crc32c(&data), data }));
        }
        cursor = part.next;
        if !put(&mut stream, &Message::Part(part)).await {
            return;
        }
    }
}

/// Target of a copy: what it has outlasts its streams.
#[derive(Default)]
pub(super) struct Copy {
    blocks: Mutex<std::collections::BTreeMap<u64, Option<Bytes>>>,
    pub to: AtomicU64,
    pub is_fed: AtomicBool,
    /// Slots that came and that it did not answer yet, and the most of them.
    waiting: AtomicUsize,
    waiting_max: AtomicUsize,
    slow: Option<Duration>,
}

impl Copy {
    pub async fn take(&self, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let Ok(Message::Feed(feed)) = history::read(&mut reader).await else { return };
        assert_eq!((feed.point, feed.base), (PointId(4), Some(PointId(5))));
        if feed.token != TOKEN {
            put(&mut writer, &Message::Refused(Refused::NotOrdered)).await;
            return;
        }
        put(&mut writer, &Message::Taken(self.taken())).await;
        let (come, mut comes) = tokio::sync::mpsc::unbounded_channel();
        let read = async {
            while let Ok(Message::Slots(slots)) = history::read(&mut reader).await {
                let waiting = self.waiting.fetch_add(1, Ordering::Relaxed) + 1;
                self.waiting_max.fetch_max(waiting, Ordering::Relaxed);
                come.send(slots).unwrap();
            }
        };
        let write = async {
            let (mut next, mut digest) = (None, 0);
            while let Some(slots) = comes.recv().await {
                if let Some(slow) = self.slow {
                    tokio::time::sleep(slow).await;
                }
                slots.part.check().unwrap();
                let is_next = match next {
                    Some(next) => slots.place == next,
                    None => slots.place <= self.to.load(Ordering::Relaxed),
                };
                assert!(is_next, "slots at {} follow {next:?}", slots.place);
                next = slots.part.next;
                digest = FeedRules::digest(digest, slots.sum());
                self.write(&slots.part);
                if let Some(end) = slots.end {
                    assert_eq!(end, digest);
                    self.is_fed.store(true, Ordering::Relaxed);
                }
                self.to.fetch_max(next.unwrap_or(u64::MAX), Ordering::Relaxed);
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                if !put(&mut writer, &Message::Taken(self.taken())).await {
                    return;
                }
            }
        };
        tokio::select! { () = read => {}, () = write => {} }
        self.waiting.store(0, Ordering::Relaxed);
    }

    pub fn slow() -> Arc<Self> {
        Arc::new(Self { slow: Some(Duration::from_millis(200)), ..Self::default() })
    }

    fn write(&self, part: &Part) {
        let mut data = part.blocks.iter();
        let mut blocks = self.blocks.lock().unwrap();
        for range in &part.ranges {
            for lba in range.lba..range.lba + range.blocks {
                let hole = range.hole;
                blocks.insert(lba, (!hole).then(|| data.next().unwrap().data.clone()));
            }
        }
    }

    /// The target ends, and the next one has nothing.
    pub fn forget(&self) {
        self.blocks.lock().unwrap().clear();
        self.to.store(0, Ordering::Relaxed);
        self.is_fed.store(false, Ordering::Relaxed);
    }

    fn taken(&self) -> Taken {
        let to = self.to.load(Ordering::Relaxed);
        Taken { to, stable_to: to, is_fed: self.is_fed.load(Ordering::Relaxed) }
    }

    pub fn assert_has(&self, size_blocks: u64) {
        let changed: std::collections::BTreeMap<_, _> = (0..size_blocks)
            .filter(|lba| is_changed(*lba))
            .map(|lba| (lba, content(lba)))
            .collect();
        assert!(*self.blocks.lock().unwrap() == changed, "the copy has another content");
    }
}

fn progress() -> Progress {
    Progress::new("volume", "token", 0, Metrics::default())
}

fn no_limit() -> Arc<Bucket> {
    Bandwidth::default().of(2)
}

async fn send(
    order: &Sending,
    progress: &Progress,
    bucket: &Bucket,
    link: impl AsyncRead + AsyncWrite,
) -> Result<Sent, Ended> {
    let sender = Sender { order, progress, bucket, heard: &|| (), is_to_pause: &|| false };
    let size_blocks = order.size_blocks;
    let open = || async move {
        let (one, other) = tokio::io::duplex(64 << 10);
        tokio::spawn(source(other, size_blocks));
        Ok(one)
    };
    sender.run(link, open).await
}

/// The other end: takes streams into a copy.
async fn take(copy: Arc<Copy>, mut link: impl AsyncRead + AsyncWrite + Unpin) -> End {
    let Ok(Frame::Begin(begin)) = Frame::read(&mut link).await else { panic!("no stream") };
    let hooks = Hooks { heard: &|| (), took: &|_| () };
    let open = || async move {
        let (one, other) = tokio::io::duplex(64 << 10);
        tokio::spawn(async move { copy.take(other).await });
        Ok(one)
    };
    receive(link, &begin, open, &hooks, std::future::pending()).await
}

/// A whole stream; returns how both ends ended.
async fn stream(
    order: &Sending,
    progress: &Progress,
    bucket: &Bucket,
    copy: &Arc<Copy>,
) -> (Result<Sent, Ended>, End) {
    let (one, other) = tokio::io::duplex(64 << 10);
    tokio::join!(send(order, progress, bucket, one), take(copy.clone(), other))
}

#[tokio::test]
async fn a_copy_has_the_content_of_the_point_plain_and_compressed() {
    let mut wire = Vec::new();
    for compress in [false, true] {
        let (order, progress, copy) = (order(1000, compress), progress(), Arc::default());
        let ended = stream(&order, &progress, &no_limit(), &copy).await;
        assert_eq!(ended, (Ok(Sent::All), End::Fed));
        copy.assert_has(1000);
        wire.push(progress.wire_bytes());
        let again = stream(&order, &progress, &no_limit(), &copy).await;
        assert_eq!(again, (Ok(Sent::All), End::Fed), "nothing is sent to one that has it");
        assert_eq!(progress.wire_bytes(), wire[wire.len() - 1]);
    }
    let changed = (0..1000).filter(|lba| is_changed(*lba) && content(*lba).is_some()).count();
    let (plain, compressed) = (wire[0] as usize, wire[1] as usize);
    assert!(plain < changed * BLOCK_SIZE * 102 / 100, "{plain} bytes of {changed} blocks");
    assert!(compressed < plain * 6 / 10, "{compressed} of {plain}");
}

#[tokio::test]
async fn unix_sockets_of_targets_and_an_empty_point_do() {
    let directory = tempfile::tempdir().unwrap();
    let of = |name: &str| directory.path().join(name);
    let listeners = [of("source"), of("copy")].map(|path| UnixListener::bind(path).unwrap());
    let [from, to] = listeners;
    let copy = Arc::new(Copy::default());
    let taker = copy.clone();
    let targets = tokio::spawn(async move {
        let reading = async { source(from.accept().await.unwrap().0, 1).await };
        let taking = async { taker.take(to.accept().await.unwrap().0).await };
        tokio::join!(reading, taking)
    });
    let (order, progress) = (order(1, true), progress());
    let bucket = no_limit();
    let (one, mut other) = tokio::io::duplex(1 << 20);
    let sender = Sender {
        order: &order,
        progress: &progress,
        bucket: &bucket,
        heard: &|| (),
        is_to_pause: &|| false,
    };
    let receiving = async {
        let Ok(Frame::Begin(begin)) = Frame::read(&mut other).await else { panic!() };
        let hooks = Hooks { heard: &|| (), took: &|_| () };
        let open = || UnixStream::connect(of("copy"));
        receive(other, &begin, open, &hooks, std::future::pending()).await
    };
    let sending = sender.run(one, || UnixStream::connect(of("source")));
    assert_eq!(tokio::join!(sending, receiving), (Ok(Sent::All), End::Fed));
    targets.await.unwrap();
    copy.assert_has(1);
    assert!(copy.blocks.lock().unwrap().is_empty());
}

/// Passes bytes until so many went to the copy.
async fn cut_after(bytes: usize, near: DuplexStream, far: DuplexStream) {
    let (mut from_near, mut to_near) = tokio::io::split(near);
    let (mut from_far, mut to_far) = tokio::io::split(far);
    let there = async {
        let mut some = tokio::io::AsyncReadExt::take(&mut from_near, bytes as u64);
        tokio::io::copy(&mut some, &mut to_far).await
    };
    let back = tokio::io::copy(&mut from_far, &mut to_near);
    tokio::select! { _ = there => {}, _ = back => {} }
}

#[tokio::test]
async fn a_stream_that_is_cut_goes_on_at_its_cursor_and_sends_little_again() {
    const SIZE: u64 = 40_000;
    let (order, copy) = (order(SIZE, false), Arc::<Copy>::default());
    let whole = progress();
    let ended = stream(&order, &whole, &no_limit(), &Arc::default()).await;
    assert_eq!(ended.0, Ok(Sent::All));
    let (progress, bucket) = (progress(), no_limit());
    for cut in 0..10 {
        let (one, near) = tokio::io::duplex(64 << 10);
        let (far, other) = tokio::io::duplex(64 << 10);
        let part = whole.wire_bytes() as usize / 12 + cut * 1000;
        let ended = tokio::join!(
            send(&order, &progress, &bucket, one),
            take(copy.clone(), other),
            cut_after(part, near, far),
        );
        assert!(matches!(ended.0, Err(Ended::Lost(_))), "{ended:?}");
    }
    let ended = stream(&order, &progress, &no_limit(), &copy).await;
    assert_eq!(ended, (Ok(Sent::All), End::Fed));
    copy.assert_has(SIZE);
    let (sent, needed) = (progress.wire_bytes(), whole.wire_bytes());
    assert!(sent <= needed + needed / 10, "{sent} bytes where {needed} would do");
}

#[tokio::test]
async fn a_copy_that_lost_its_place_is_sent_from_where_it_is() {
    let (order, copy) = (order(1000, false), Arc::<Copy>::default());
    let ahead = Progress::new("volume", "token", 640, Metrics::default());
    let ended = stream(&order, &ahead, &no_limit(), &copy).await;
    assert_eq!(ended, (Ok(Sent::All), End::Fed));
    copy.assert_has(1000);
}

#[tokio::test]
async fn a_wrong_token_is_refused_with_words() {
    let wrong = Sending { token: 1, ..order(10, false) };
    let (sent, taken) = stream(&wrong, &progress(), &no_limit(), &Arc::default()).await;
    let why = "not here: no transfer is ordered with this token".to_owned();
    assert_eq!((sent, taken), (Err(Ended::Refused(why.clone())), End::Refused(why)));
}

#[tokio::test(start_paused = true)]
async fn a_slow_taker_bounds_what_is_on_its_way() {
    let slow = Some(Duration::from_millis(50));
    let copy = Arc::new(Copy { slow, ..Copy::default() });
    let ended = stream(&order(2000, false), &progress(), &no_limit(), &copy).await;
    assert_eq!(ended, (Ok(Sent::All), End::Fed));
    copy.assert_has(2000);
    let waiting_max = copy.waiting_max.load(Ordering::Relaxed);
    assert!((2..=IN_FLIGHT_MAX).contains(&waiting_max), "{waiting_max} were on their way");
}

#[tokio::test(start_paused = true)]
async fn two_members_of_a_group_keep_to_its_limit_together() {
    let bandwidth = Bandwidth::default();
    bandwidth.set(&[(2, 1_000_000)].into());
    let (first, second) = (progress(), progress());
    let (order, bucket) = (order(1000, false), bandwidth.of(2));
    let begun = Instant::now();
    let (one, other) = (Arc::default(), Arc::default());
    let ended = tokio::join!(
        stream(&order, &first, &bucket, &one),
        stream(&order, &second, &bucket, &other)
    );
    assert_eq!((ended.0.0, ended.1.0), (Ok(Sent::All), Ok(Sent::All)));
    let sent = (first.wire_bytes() + second.wire_bytes()) as f64;
    let rate = sent / begun.elapsed().as_secs_f64();
    assert!((900_000.0..1_100_000.0).contains(&rate), "{rate} bytes a second");
}

#[tokio::test]
async fn a_stream_that_makes_room_loses_nothing_of_what_is_on_its_way() {
    let (order, progress, copy) = (order(2000, false), progress(), Arc::<Copy>::default());
    let mut streams = 0;
    loop {
        streams += 1;
        let (one, other) = tokio::io::duplex(64 << 10);
        let begun = progress.wire_bytes();
        let sender = Sender {
            order: &order,
            progress: &progress,
            bucket: &no_limit(),
            heard: &|| (),
            is_to_pause: &|| progress.wire_bytes() > begun + (1 << 20),
        };
        let open = || async {
            let (one, other) = tokio::io::duplex(64 << 10);
            tokio::spawn(source(other, 2000));
            Ok(one)
        };
        match tokio::join!(sender.run(one, open), take(copy.clone(), other)).0 {
            Ok(Sent::Paused) => assert_eq!(progress.cursor(), copy.to.load(Ordering::Relaxed)),
            ended => break assert_eq!(ended, Ok(Sent::All)),
        }
    }
    copy.assert_has(2000);
    assert!((3..9).contains(&streams), "{streams} streams");
    let changed = copy.blocks.lock().unwrap().values().flatten().count();
    assert!((progress.wire_bytes() as usize) < changed * BLOCK_SIZE * 102 / 100);
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_sends_rubbish_or_nothing_is_ended_with_words() {
    async fn told(frames: Vec<Vec<u8>>) -> (String, End) {
        let (mut one, other) = tokio::io::duplex(1 << 20);
        let begin = Begin {
            group: 2,
            volume: VolumeId(3),
            point: PointId(4),
            base: Some(PointId(5)),
            token: TOKEN,
        };
        let sending = async {
            Frame::Begin(begin).write(&mut one).await.unwrap();
            assert_eq!(Frame::read(&mut one).await.unwrap(), Frame::Taken(Taken::default()));
            for frame in frames {
                one.write_all(&frame).await.unwrap();
            }
            match Frame::read(&mut one).await {
                Ok(Frame::Refused(why)) => why,
                other => format!("{other:?}"),
            }
        };
        tokio::join!(sending, take(Arc::default(), other))
    }
    let (why, end) = told(Vec::new()).await;
    assert_eq!((why.as_str(), end), ("nothing came for 60 s", End::Refused(why.clone())));
    let ping = Raw::encode(crate::frame::kind::PING, &[], 100).unwrap();
    assert!(matches!(told(vec![ping]).await.1, End::Lost(_)));
    let bytes = Bytes::from(vec![7; 500]);
    let rubbish = Packed { is_zstd: true, raw_length: 500, bytes };
    let (why, _) = told(vec![Frame::Slots(rubbish).encode().unwrap()]).await;
    assert!(why.starts_with("compressed slots that cannot be read"), "{why}");
    let (why, _) = told(vec![Frame::Taken(Taken::default()).encode().unwrap()]).await;
    assert_eq!(why, "a frame out of turn");
}

#[tokio::test]
async fn a_target_that_refuses_to_read_ends_the_stream_with_its_words() {
    let (one, other) = tokio::io::duplex(1 << 20);
    let (order, progress, bucket) = (order(10, false), progress(), no_limit());
    let sender = Sender {
        order: &order,
        progress: &progress,
        bucket: &bucket,
        heard: &|| (),
        is_to_pause: &|| false,
    };
    let open = || async {
        let (one, mut other) = tokio::io::duplex(1 << 20);
        put(&mut other, &Message::Refused(Refused::Damaged { lba: 7 })).await;
        tokio::spawn(async move { history::read(&mut other).await });
        Ok(one)
    };
    let (sent, _) = tokio::join!(sender.run(one, open), take(Arc::default(), other));
    let why = "no replica that can be asked has a good copy of block 7".to_owned();
    assert_eq!(sent, Err(Ended::Source(why)));
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_order_ends_is_ended_with_words() {
    let (one, mut other) = tokio::io::duplex(64 << 10);
    let (order, progress, bucket) = (order(100_000, false), progress(), no_limit());
    let slow = Some(Duration::from_millis(500));
    let copy = Arc::new(Copy { slow, ..Copy::default() });
    let receiving = async {
        let Ok(Frame::Begin(begin)) = Frame::read(&mut other).await else { panic!() };
        let hooks = Hooks { heard: &|| (), took: &|_| () };
        let open = || async move {
            let (one, other) = tokio::io::duplex(64 << 10);
            tokio::spawn(async move { copy.take(other).await });
            Ok(one)
        };
        let stopped = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            "it is over".to_owned()
        };
        receive(other, &begin, open, &hooks, stopped).await
    };
    let (sent, taken) = tokio::join!(send(&order, &progress, &bucket, one), receiving);
    assert_eq!(taken, End::Refused("it is over".to_owned()));
    assert_eq!(sent, Err(Ended::Refused("it is over".to_owned())));
    assert!(progress.cursor() > 0);
}
