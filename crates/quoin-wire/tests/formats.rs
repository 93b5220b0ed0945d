//! The bytes of every message, Hello and Welcome, and of their protection, as they were recorded:
//! this build reads what earlier versions sent, and sends what they read.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::common::{session, through};
use bytes::Bytes;
use quoin_recorded::Recorded;
use quoin_types::entry::{Chain, Entry, EntryKind, Rule, SharedEntry, View};
use quoin_types::ids::{Epoch, Lsn, Position, SnapshotId};
use quoin_types::membership::{Durability, Member, Membership};
use quoin_types::message::*;
use quoin_types::{
    BLOCK_SIZE, ClientId, ClientTable, Origin, Part, ReplicaGuid, ReplicaId, VolumeId, crc32c,
};
use quoin_wire::decode::decode;
use quoin_wire::encode::{self, FrameBuffer};
use quoin_wire::frame::{HEADER_LEN, Header, Limits, WireError};
use quoin_wire::hello::PROTOCOL_MAX;
use quoin_wire::security::{Mode, Opener, SECRET_LEN, Sealer};
use quoin_wire::{Connection, ConnectionKind, Frame, Hello, Welcome};

const RAISE: &str = "PROTOCOL_MAX (or add a bit to FEATURES_KNOWN) in quoin-wire/src/hello.rs";
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

fn recorded() -> Recorded {
    Recorded::current(CRATE, "wire", PROTOCOL_MAX.into(), RAISE)
}

fn member(n: u128) -> Member {
    Member { id: ReplicaId(n), guid: ReplicaGuid(n << 64 | 0x9d) }
}

fn membership() -> Membership {
    Membership {
        version: 4,
        rf: 3,
        cf: 2,
        drf: 4,
        known: (1..4).map(member).collect(),
        retired: vec![ReplicaGuid(0xdead)],
        formed: true,
    }
}

fn view() -> View {
    let rule = |version, rf, cf, last| Rule {
        membership_version: version,
        rf,
        cf,
        known: (1..=last).map(member).collect(),
    };
    View {
        in_sync: vec![member(1), member(3)],
        rule: rule(4, 3, 2, 3),
        joint: Some(rule(5, 4, 3, 4)),
        durability: Durability::Media,
        unflushed_tail_lost: true,
    }
}

fn block(n: u8) -> Bytes {
    Bytes::from(vec![n; BLOCK_SIZE])
}

/// One entry of every kind.
fn entries() -> Vec<SharedEntry> {
    let id = SnapshotId(0x5a);
    let kinds = [
        (EntryKind::Write, 7, 2),
        (EntryKind::Trim, 9, 4000),
        (EntryKind::Zero { no_hole: true }, 11, 3),
        (EntryKind::Snapshot { id, hidden: true }, 0, 0),
        (EntryKind::DeleteSnapshot { id }, 0, 0),
        (EntryKind::Revert { id }, 0, 0),
        (EntryKind::Resize { blocks: 1 << 20 }, 0, 0),
        (EntryKind::View(Box::new(view())), 0, 0),
        (EntryKind::BeginClient { client: ClientId(7) }, 0, 0),
        (EntryKind::Write, 30, 1),
        (EntryKind::EndClient { client: ClientId(7) }, 0, 0),
    ];
    let mut chain = Chain(0xc4a1);
    let entry = |(n, (kind, lba, blocks)): (u64, _)| {
        let data = match kind {
            EntryKind::Write => {
                Bytes::from([block(1), block(2)].concat()).slice(..blocks * BLOCK_SIZE)
            }
            _ => Bytes::new(),
        };
        let at = Position { epoch: Epoch(3), lsn: Lsn(100 + n) };
        // The second write is a part of a client's request.
        let origin = Origin { client: ClientId(7), number: 4, low: 3 };
        let part = (lba == 30).then_some(Part {
            origin,
            end: 30 + u64::from(blocks as u32),
            is_last: true,
        });
        let blocks = blocks as u32;
        let entry = Entry::part_after(chain, at, kind, lba, blocks, data, n == 0, part);
        chain = entry.chain;
        Arc::new(entry)
    };
    (0u64..).zip(kinds).map(entry).collect()
}

/// A hole, a block, a block without its bytes, and a bad one.
fn slots() -> Vec<Slot> {
    let slot = |lba, blocks, content| Slot { lba, blocks, version: Lsn(90 + lba), content };
    vec![
        slot(1, 500, Content::Hole),
        slot(501, 1, Content::Data { crc: crc32c(&block(5)), data: block(5) }),
        slot(502, 1, Content::Data { crc: 77, data: Bytes::new() }),
        slot(503, 1, Content::Bad),
    ]
}

fn snapshot() -> SnapshotInfo {
    SnapshotInfo { id: SnapshotId(0x5a), lsn: Lsn(103), hidden: true, blocks: 1 << 18 }
}

fn head() -> SnapshotHead {
    SnapshotHead { epoch: Epoch(3), chain: Chain(0xcc) }
}

fn table() -> Vec<EpochEnd> {
    let row = |epoch, first, last, chain| EpochEnd {
        epoch: Epoch(epoch),
        first: Lsn(first),
        last: Lsn(last),
        chain: Chain(chain),
    };
    vec![row(1, 1, 60, 0xaa), row(3, 61, 107, 0xbb)]
}

/// A client of which one request took effect and another one did in part.
fn clients() -> ClientTable {
    let mut table = ClientTable::default();
    table.apply(Lsn(50), &EntryKind::BeginClient { client: ClientId(7) }, None);
    for (number, is_last) in [(11, true), (12, false)] {
        let origin = Origin { client: ClientId(7), number, low: 11 };
        let part = Part { origin, end: 31, is_last };
        table.apply(Lsn(60), &EntryKind::Write, Some(&part));
    }
    table
}

fn end() -> IncrementEnd {
    IncrementEnd {
        position: Position { epoch: Epoch(3), lsn: Lsn(107) },
        chain: Chain(0xbb),
        epoch_table: table(),
        last_view: Some((Lsn(105), view())),
        volume_blocks: 1 << 20,
        snapshots: vec![snapshot()],
        clients: clients(),
    }
}

/// Every message to a replica, under the name of its recorded bytes.
fn to_replica() -> Vec<(&'static str, ToReplica)> {
    let ping = Ping(0x1122_3344_5566);
    let view = ReadView::Snapshot(SnapshotId(0x5a));
    let read = |view, want_data| ToReplica::Read {
        id: 9,
        view,
        lba: 8,
        blocks: 16,
        after: Lsn(100),
        want_data,
        ping,
    };
    let open = ToReplica::Open {
        volume: VolumeId(0xf01),
        replica: ReplicaId(2),
        guid: ReplicaGuid(3),
        membership: membership(),
        lease_ms: 2000,
    };
    let kept = Some(SnapshotId(0x5a));
    let verify = |snapshot| ToReplica::Verify {
        id: 12,
        lba: 8,
        blocks: 504,
        bytes_max: 512 << 10,
        after: Lsn(107),
        repair: true,
        ping,
        snapshot,
    };
    let pull = |want_data| ToReplica::Pull {
        id: 11,
        view,
        from: Lsn(5),
        cursor: 512,
        bytes_max: 1 << 20,
        want_data,
    };
    let head = Box::new(CutHead { head: head(), last_view: end().last_view });
    let cut = ToReplica::IncrementCut { rebuild: 77, snapshot: snapshot(), head };
    let repair = |snapshot| ToReplica::Repair {
        lba: 8,
        version: Lsn(90),
        crc: 77,
        data: block(8),
        snapshot,
    };
    let mend =
        |snapshot| ToReplica::Mend { lba: 1, blocks: 503, at: Lsn(107), slots: slots(), snapshot };
    let append = ToReplica::Append { entries: entries(), stable: Lsn(99), sync: true, ping };
    let feed = ToReplica::IncrementFeed { rebuild: 77, slots: slots(), cursor: 504, after: 7 };
    let fed = FedSum { slots: 4, checksum: 0xfed };
    let commit = ToReplica::IncrementCommit { rebuild: 77, to: Box::new(end()), fed };
    vec![
        ("open", open),
        ("truncate", ToReplica::Truncate { keep: Lsn(98), tip: Lsn(107) }),
        ("append", append),
        ("sync", ToReplica::Sync { lsn: Lsn(107), ping }),
        ("ping", ToReplica::Ping { stable: Lsn(107), ping }),
        ("read-live", read(ReadView::Live, true)),
        ("read-snapshot", read(view, true)),
        ("read-base", read(ReadView::Base, false)),
        ("fetch", ToReplica::Fetch { id: 10, after: Lsn(50), bytes_max: 1 << 20 }),
        ("pull", pull(true)),
        ("pull-without-data", pull(false)),
        ("increment-begin", ToReplica::IncrementBegin { rebuild: 77, from: Lsn(5) }),
        ("increment-feed", feed),
        ("open-bulk", ToReplica::OpenBulk { number: 6 }),
        ("increment-cut", cut),
        ("increment-commit", commit),
        ("repair", repair(None)),
        ("repair-snapshot", repair(kept)),
        ("mend", mend(None)),
        ("mend-snapshot", mend(kept)),
        ("verify", verify(None)),
        ("verify-snapshot", verify(kept)),
        ("close", ToReplica::Close),
    ]
}

fn from_replica() -> Vec<(&'static str, FromReplica)> {
    let ping = Ping(0x1122_3344_5566);
    let position = Position { epoch: Epoch(3), lsn: Lsn(107) };
    let ack = OpenAck {
        position,
        chain: Chain(0xbb),
        epoch_table: table(),
        stable: Lsn(104),
        durable: Lsn(106),
        base: Lsn(60),
        last_view: Some((Lsn(105), view())),
        continuous: true,
        membership_version: 4,
        quorum: true,
        damaged: false,
        volume_blocks: 1 << 20,
        room: RoomGrant { takes: Takes::Writes, share_blocks: 2298 },
        snapshots: vec![snapshot()],
        shadow: Some((77, Lsn(5), 504)),
        shadow_cut: Some(Lsn(90)),
        heads: vec![head()],
        clients: clients(),
    };
    let empty = OpenAck {
        shadow: None,
        shadow_cut: None,
        last_view: None,
        snapshots: vec![],
        heads: vec![],
        clients: ClientTable::default(),
        ..ack.clone()
    };
    let pulled = |cursor, end: Option<IncrementEnd>| FromReplica::Pulled {
        id: 11,
        slots: slots(),
        cursor,
        end: end.map(Box::new),
        gone: false,
    };
    let fetched = FromReplica::Fetched { id: 10, entries: entries(), gone: false };
    let bad_copy = BadCopy { lba: 8, blocks: 1, version: Lsn(90), snapshot: None };
    let kept_bad = BadCopy { snapshot: Some(SnapshotId(0x5a)), ..bad_copy };
    let begun = FromReplica::IncrementBegun { rebuild: 77, cursor: 504, cut: Lsn(90) };
    let refuse = FromReplica::Refuse { promised: Epoch(9), failure: Failure::Fenced };
    vec![
        ("open-ack", FromReplica::OpenAck(Box::new(ack))),
        ("open-ack-empty", FromReplica::OpenAck(Box::new(empty))),
        ("refuse", refuse),
        ("truncated", FromReplica::Truncated { position, chain: Chain(0xbb) }),
        ("applied", FromReplica::Applied { applied: Lsn(107), durable: Lsn(106), ping }),
        ("data", FromReplica::Data { id: 9, at: Lsn(107), slots: slots(), ping }),
        ("verified", FromReplica::Verified { id: 12, at: Lsn(107), slots: slots(), ping }),
        ("fetched", fetched),
        ("pulled", pulled(Some(504), None)),
        ("pulled-end", pulled(None, Some(end()))),
        ("increment-fed", FromReplica::IncrementFed { rebuild: 77, cursor: 504 }),
        ("increment-begun", begun),
        ("increment-done", FromReplica::IncrementDone { rebuild: 77, position }),
        ("repaired", FromReplica::Repaired { lba: 8, version: Lsn(90), done: true }),
        ("mended", FromReplica::Mended { lba: 1, blocks: 503, done: true }),
        ("no-room", FromReplica::NoRoom { applied: Lsn(101) }),
        ("room", FromReplica::Room(RoomGrant { takes: Takes::Holes, share_blocks: 766 })),
        ("bad-copy", FromReplica::BadCopy(bad_copy)),
        ("bad-copy-snapshot", FromReplica::BadCopy(kept_bad)),
        ("closed", FromReplica::Closed),
        ("failed-unknown", FromReplica::Failed(Failure::Unknown)),
        ("failed-retired", FromReplica::Failed(Failure::Retired)),
        ("failed-full", FromReplica::Failed(Failure::Full)),
        ("failed-io", FromReplica::Failed(Failure::Io)),
        ("failed-damaged", FromReplica::Failed(Failure::Damaged)),
        ("failed-protocol", FromReplica::Failed(Failure::Protocol)),
        ("failed-stopping", FromReplica::Failed(Failure::Stopping)),
    ]
}

fn hello() -> Hello {
    Hello {
        protocol_min: 1,
        protocol_max: 1,
        features_required: 0,
        features_optional: 6,
        kind: ConnectionKind::Log,
        volume: VolumeId(0xf01),
        replica: ReplicaId(2),
        guid: ReplicaGuid(3),
        grant: Bytes::from_static(b"signed"),
    }
}

fn bytes_of(frame: &FrameBuffer) -> Vec<u8> {
    let mut bytes = frame.head.to_vec();
    frame.data.iter().for_each(|data| bytes.extend_from_slice(data));
    bytes
}

/// Every frame, with its meaning.
fn frames() -> Vec<(&'static str, Vec<u8>, Frame)> {
    let mut buffer = FrameBuffer::default();
    let mut all = Vec::new();
    for (name, message) in to_replica() {
        let mut frames = Vec::new();
        let emit = |frame: &FrameBuffer| frames.push(bytes_of(frame));
        encode::to_replica(session(), &message, &mut buffer, emit).unwrap();
        assert_eq!(frames.len(), 1, "{name} is one frame");
        all.push((name, frames.remove(0), Frame::ToReplica(message)));
    }
    for (name, message) in from_replica() {
        encode::from_replica(session(), &message, &mut buffer).unwrap();
        all.push((name, bytes_of(&buffer), Frame::FromReplica(message)));
    }
    let bulk = Hello { kind: ConnectionKind::Bulk, ..hello() };
    for (name, hello) in [("hello", hello()), ("hello-bulk", bulk)] {
        encode::hello(session(), &hello, &mut buffer).unwrap();
        all.push((name, bytes_of(&buffer), Frame::Hello(hello)));
    }
    let welcome = Welcome { protocol: 1, features: 2, ..Welcome::default() };
    let term = Bytes::from_static(b"a term");
    let newer = Welcome { protocol: 1, features: 2, term };
    for (name, welcome) in [("welcome", welcome), ("welcome-term", newer)] {
        encode::welcome(session(), &welcome, &mut buffer).unwrap();
        all.push((name, bytes_of(&buffer), Frame::Welcome(welcome)));
    }
    all
}

fn parse(bytes: &[u8]) -> Result<Frame, WireError> {
    let header = Header::decode(bytes[..HEADER_LEN].try_into().unwrap(), &Limits::SESSION)?;
    let incoming = decode(&header, Bytes::copy_from_slice(bytes))?;
    assert_eq!(incoming.session, session());
    Ok(incoming.frame)
}

/// The kind in a header, so that the list above cannot miss one that exists on the wire.
fn kind_of(bytes: &[u8]) -> u8 {
    bytes[5]
}

#[test]
fn every_message_has_the_bytes_that_were_recorded() {
    for (name, bytes, _) in frames() {
        recorded().holds(name, &bytes);
    }
}

#[test]
fn recorded_messages_of_every_version_decode_to_their_former_meaning() {
    let here = frames();
    for version in Recorded::all(CRATE, "wire", RAISE) {
        for name in version.names(".hex") {
            if name.starts_with("sealed") {
                continue;
            }
            let said = parse(&version.read(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let meant = here.iter().find(|(known, ..)| *known == name);
            let (_, _, meant) = meant.unwrap_or_else(|| panic!("{name} is sent no more"));
            assert_eq!(&said, meant, "{name}");
        }
    }
}

#[test]
fn every_kind_of_message_that_can_be_decoded_is_recorded() {
    let mut recorded: Vec<u8> = frames().iter().map(|(_, bytes, _)| kind_of(bytes)).collect();
    recorded.sort_unstable();
    recorded.dedup();
    // A kind is known if an empty message of it is refused for any other reason than its number.
    let known = (0..=u8::MAX).filter(|kind| {
        let header =
            Header { kind: *kind, head_len: 0, data_len: 0, session: session(), head_crc: 0 };
        let frame = Bytes::copy_from_slice(&header.encode());
        !matches!(decode(&header, frame), Err(WireError::Kind(_)))
    });
    assert_eq!(recorded, known.collect::<Vec<u8>>());
}

#[test]
fn a_hello_and_a_welcome_of_a_later_version_may_have_more_fields() {
    for (name, bytes, meant) in frames() {
        let mut longer = bytes.clone();
        longer.splice(longer.len().., *b"more of it");
        let mut header =
            Header::decode(bytes[..HEADER_LEN].try_into().unwrap(), &Limits::SESSION).unwrap();
        header.head_len += 10;
        header.head_crc = crc32c(&longer[HEADER_LEN..][..header.head_len as usize]);
        longer[..HEADER_LEN].copy_from_slice(&header.encode());
        let handshake = matches!(meant, Frame::Hello(_) | Frame::Welcome(_));
        match parse(&longer) {
            Ok(said) => assert!(handshake && said == meant, "{name}"),
            Err(_) => assert!(!handshake, "{name}"),
        }
    }
}

#[test]
fn a_frame_of_another_frame_format_is_refused_with_both_versions() {
    let mut bytes = frames()[0].1.clone();
    bytes[4] = 9;
    let crc = crc32c(&bytes[..60]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    let refused = parse(&bytes).unwrap_err().to_string();
    assert!(refused.contains("version 9") && refused.contains("speaks version 1"), "{refused}");
}

/// Bytes on the socket of a protected connection.
fn sealed(mode: Mode) -> Vec<u8> {
    use std::io::Read as _;
    let (here, mut there) = UnixStream::pair().unwrap();
    here.set_nonblocking(true).unwrap();
    let secret = std::array::from_fn::<u8, SECRET_LEN, _>(|n| n as u8 * 7);
    let mut connection =
        Connection::new(OwnedFd::from(here), Sealer::new(mode, secret), Opener::plain());
    for _ in 0..2 {
        connection.send_to_replica(session(), &ToReplica::Close).unwrap();
    }
    assert!(connection.flush().unwrap());
    drop(connection);
    let mut bytes = Vec::new();
    there.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn protected_frames_equal_the_recorded_ones_and_open_on_the_other_side() {
    for (name, mode) in
        [("sealed-encrypt", Mode::Encrypt), ("sealed-authenticate", Mode::Authenticate)]
    {
        recorded().holds(name, &sealed(mode));
        for version in Recorded::all(CRATE, "wire", RAISE) {
            use std::io::Write as _;
            let (mut here, there) = UnixStream::pair().unwrap();
            here.write_all(&version.read(name)).unwrap();
            there.set_nonblocking(true).unwrap();
            let secret = std::array::from_fn::<u8, SECRET_LEN, _>(|n| n as u8 * 7);
            let opener = Opener::new(mode, secret);
            let mut to = Connection::new(OwnedFd::from(there), Sealer::plain(), opener);
            here.set_nonblocking(true).unwrap();
            let mut from = Connection::new(OwnedFd::from(here), Sealer::plain(), Opener::plain());
            let close = Frame::ToReplica(ToReplica::Close);
            assert_eq!(through(&mut from, &mut to), [close.clone(), close], "{name}");
        }
    }
}
