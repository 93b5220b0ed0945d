//! The bytes of everything that lies in a pool, as they were recorded: a pool's disk outlives the
//! version that wrote it. (`tests/formats.rs` has whole pools.)

use bytes::{Bytes, BytesMut};
use quoin_recorded::Recorded;
use quoin_replication::replica::store::{BootCookie, ReplicaIdentity, ReplicaMeta};
use quoin_types::codec::Reader;
use quoin_types::entry::Rule;
use quoin_types::message::{EpochEnd, SnapshotInfo};
use quoin_types::{
    Chain, ClientId, ClientTable, Durability, EntryKind, Epoch, Incarnation, Lsn, Member,
    Membership, Origin, Part, PoolId, Position, ReplicaGuid, ReplicaId, SnapshotId, View, VolumeId,
};

use crate::disk::Disk;
use crate::error::PoolError;
use crate::format::batch::{Batch, BatchEntry, BatchHeader, HeaderWriter, Stream};
use crate::format::checkpoint::{
    Checkpoint, LogStart, LogicalState, MovedState, SegmentState, ShadowState, SnapshotState,
    TableState,
};
use crate::format::node::{
    BlockAt, Child, FANOUT, LEAF_BLOCKS, LOST_PLACE, Leaf, Node, NodeRef, Root,
};
use crate::format::record::{Record, UNKNOWN_RECORD};
use crate::format::relatives::{BaseId, BaseState, RelativesState};
use crate::format::segment::{decode_header, segment_header};
use crate::format::superblock::{FORMAT_VERSION, Features, FormatOptions, Superblock};
use crate::log::history::Head;
use crate::metadata::ring::Ring;
use crate::metadata::state::DurableState;
use crate::testing::memory_disk::MemoryDisk;

const RAISE: &str = "FORMAT_VERSION, or an incompat bit, in quoin-store/src/format/superblock.rs (a pool's \
                     superblock is all that tells an older build to keep its hands off)";
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

fn recorded() -> Recorded {
    Recorded::current(CRATE, "store", FORMAT_VERSION.into(), RAISE)
}

fn versions() -> Vec<Recorded> {
    Recorded::all(CRATE, "store", RAISE)
}

fn superblock() -> Superblock {
    let options =
        FormatOptions { unit_blocks: 32, keeps_space: true, ..FormatOptions::new(PoolId(0x9001)) };
    let fit = Superblock::new(12 << 20, &options).expect("a fit pool");
    Superblock { starts: 5, ..fit }
}

fn member(n: u128) -> Member {
    Member { id: ReplicaId(n), guid: ReplicaGuid(n << 64 | 0x9d) }
}

fn view() -> View {
    let rule = |version, last: u8| Rule {
        membership_version: version,
        rf: last,
        cf: 2,
        known: (1..=last.into()).map(member).collect(),
    };
    View {
        in_sync: vec![member(1), member(3)],
        rule: rule(4, 3),
        joint: Some(rule(5, 4)),
        durability: Durability::Media,
        unflushed_tail_lost: true,
    }
}

fn root(n: u64) -> Root {
    let node = NodeRef { place: n << 12, length: 300, crc: 0xc4c, newest: 90 + n };
    Root { level: 1, child: Child::Node(node) }
}

fn segment(unit: u32, stream: Stream) -> SegmentState {
    SegmentState {
        unit,
        units: 8,
        stream,
        sequence: 5 << 32 | u64::from(unit),
        used_blocks: 17,
        live_bytes: 40960,
        last_lsn: 100,
        last_index: 12,
        logical: 0,
    }
}

fn snapshot(id: u128, hidden: bool) -> SnapshotState {
    SnapshotState {
        info: SnapshotInfo { id: SnapshotId(id), lsn: Lsn(80), hidden, blocks: 600 },
        root: root(2),
        position: Position { epoch: Epoch(2), lsn: Lsn(80) },
        chain: Chain(0xabc),
        last_view: hidden.then(|| (Lsn(70), view())),
    }
}

/// A client that ended in part of a request, and one that has done nothing.
fn clients() -> ClientTable {
    let mut table = ClientTable::default();
    for client in [7, 9].map(ClientId) {
        table.apply(Lsn(50), &EntryKind::BeginClient { client }, None);
    }
    let origin = Origin { client: ClientId(7), number: 12, low: 11 };
    let part = Part { origin, end: 31, is_last: false };
    table.apply(Lsn(60), &EntryKind::Write, Some(&part));
    table
}

fn checkpoint() -> Checkpoint {
    let row = |epoch, first, last| EpochEnd {
        epoch: Epoch(epoch),
        first: Lsn(first),
        last: Lsn(last),
        chain: Chain(last),
    };
    Checkpoint {
        root: root(1),
        head: Head {
            position: Position { epoch: Epoch(3), lsn: Lsn(95) },
            chain: Chain(95),
            last_view: Some((Lsn(70), view())),
            volume_blocks: 600,
            epoch_table: vec![row(1, 1, 40), row(3, 41, 95)],
            clients: clients(),
        },
        stable: Lsn(95),
        snapshots: vec![snapshot(1, false), snapshot(2, true)],
        log: LogStart { sequence: 5 << 32 | 1, offset_blocks: 3, index: 9, previous: 0xfeed },
        segments: vec![segment(0, Stream::Nodes), segment(8, Stream::Moved)],
        sequence: 5 << 32 | 9,
        shadow: Some(ShadowState {
            rebuild: 77,
            from: Lsn(60),
            cursor: 256,
            root: Root { level: 0, child: Child::Hole(60) },
            snapshots: vec![snapshot(2, false)],
            first_sequence: 5 << 32,
        }),
        table: None,
        logical: None,
    }
}

fn with_table() -> Checkpoint {
    let table = TableState { root: root(4), removed: vec![3, 16], too_high: true };
    Checkpoint { table: Some(table), ..checkpoint() }
}

/// Of a replica whose segments have logical numbers, with and without a table.
fn with_logical(before: Checkpoint) -> Checkpoint {
    let segments = vec![segment(0, Stream::Nodes), numbered()];
    let moved = [(7, 300, 0xc1c), (9, 0, 0)];
    let moved = moved.map(|(block, place, crc)| MovedState { block, place, crc }).to_vec();
    let logical = Some(LogicalState { root: root(5), next: 90, moved });
    Checkpoint { logical, segments, ..before }
}

fn numbered() -> SegmentState {
    SegmentState { logical: 77, ..segment(8, Stream::Moved) }
}

fn meta() -> ReplicaMeta {
    let membership = Membership {
        version: 4,
        rf: 3,
        cf: 2,
        drf: 4,
        known: (1..4).map(member).collect(),
        retired: vec![ReplicaGuid(0xdead)],
        formed: true,
    };
    ReplicaMeta {
        promised: Epoch(3),
        promised_incarnation: Incarnation(0x19),
        session_open: true,
        lease_ms: 2000,
        membership,
        quorum: true,
        damaged: true,
        cookie: BootCookie(0xb007),
        closed_continuous: true,
    }
}

/// Records of every kind, each under the name that its bytes are kept by.
fn records() -> Vec<(&'static str, Record)> {
    let guid = ReplicaGuid(0xa);
    let identity = ReplicaIdentity {
        volume: VolumeId(0xf01),
        replica: ReplicaId(2),
        guid,
        volume_spec: Bytes::from_static(b"name: db"),
    };
    let empty = Record::Meta(guid, Box::default(), Lsn(0));
    vec![
        ("ring-1-retired", Record::Retired(guid)),
        ("ring-2-create", Record::Create(identity)),
        ("ring-3-meta", Record::Meta(guid, Box::new(meta()), Lsn(95))),
        ("ring-3-meta-empty", empty),
        ("ring-4-checkpoint", Record::Checkpoint(guid, checkpoint().encode())),
        ("ring-4-checkpoint-empty", Record::Checkpoint(guid, Checkpoint::default().encode())),
        ("ring-4-checkpoint-table", Record::Checkpoint(guid, with_table().encode())),
        (
            "ring-4-checkpoint-logical",
            Record::Checkpoint(guid, with_logical(checkpoint()).encode()),
        ),
        (
            "ring-4-checkpoint-logical-table",
            Record::Checkpoint(guid, with_logical(with_table()).encode()),
        ),
        ("ring-5-log-segment-logical", Record::LogSegment(guid, numbered())),
        ("ring-5-log-segment", Record::LogSegment(guid, segment(16, Stream::Log))),
        ("ring-6-cut", Record::Cut { guid, index: 12, keep: Lsn(99) }),
        ("ring-7-delete", Record::Delete(guid)),
        ("ring-8-describe", Record::Describe(guid, Bytes::from_static(b"name: db, larger"))),
        ("ring-9-mark", Record::Mark(7)),
        ("ring-10-relatives", Record::Relatives(guid, relatives().encode())),
        ("ring-10-relatives-remnant", Record::Relatives(guid, remnant().encode())),
    ]
}

fn base_id(n: u128) -> BaseId {
    BaseId { replica: ReplicaGuid(n), snapshot: SnapshotId(n << 64 | 0x5a) }
}

/// Of a clone that has clones.
fn relatives() -> RelativesState {
    let root = checkpoint().root;
    let snapshot = SnapshotId(0x5b);
    let kept = BaseState { snapshot, lsn: 93, blocks: 4096, parent: Some(base_id(0xc)), root };
    let first = BaseState { snapshot: SnapshotId(0x5c), lsn: 41, parent: None, ..kept };
    RelativesState { base: Some(base_id(0xc)), is_remnant: false, bases: vec![kept, first] }
}

fn remnant() -> RelativesState {
    let bases = relatives().bases.split_off(1);
    RelativesState { base: None, is_remnant: true, bases }
}

#[test]
fn every_record_of_the_ring_has_the_bytes_that_were_recorded_and_every_version_is_read() {
    let here = records();
    for (name, record) in &here {
        let mut out = BytesMut::new();
        record.encode(&mut out);
        recorded().holds(name, &out);
        assert_eq!(Some(&*out[0].to_string()), name.split('-').nth(1), "{name}");
    }
    for version in versions() {
        for name in version.names(".hex").iter().filter(|name| name.starts_with("ring-")) {
            let mut reader = Reader::new(version.read(name).into());
            let read = Record::decode(&mut reader).unwrap_or_else(|e| panic!("{name}: {e}"));
            let (_, meant) = here.iter().find(|(n, _)| n == name).expect("a record of this name");
            assert_eq!(&read, meant, "{name}");
            if let Record::Relatives(_, bytes) = &read {
                let meant = if name.ends_with("remnant") { remnant() } else { relatives() };
                assert_eq!(RelativesState::decode(bytes.clone()), Ok(meant), "{name}");
            }
            if let Record::Checkpoint(_, bytes) = read {
                let meant = match name.rsplit('-').next() {
                    Some("empty") => Checkpoint::default(),
                    Some("table") if name.contains("logical") => with_logical(with_table()),
                    Some("table") => with_table(),
                    Some("logical") => with_logical(checkpoint()),
                    _ => checkpoint(),
                };
                assert_eq!(Checkpoint::decode(bytes), Ok(meant), "{name}");
            }
        }
    }
    // The next number is the first that is not known, so none is missing above.
    let unknown = |code: u8| {
        let bytes = [&[code][..], &[0; 20]].concat();
        Record::decode(&mut Reader::new(bytes.into())) == Err(UNKNOWN_RECORD)
    };
    assert!((1..=10).all(|code| !unknown(code)) && unknown(11));
}

#[test]
fn superblock_ring_block_and_segment_header_have_the_bytes_that_were_recorded() {
    let superblock = superblock();
    recorded().holds("superblock", &superblock.encode());
    let header = segment_header(&superblock, ReplicaGuid(0xa), &segment(8, Stream::Moved));
    recorded().holds("segment-header", &header);
    let header = segment_header(&superblock, ReplicaGuid(0xa), &numbered());
    recorded().holds("segment-header-logical", &header);
    let known = SegmentState { used_blocks: 1, live_bytes: 0, last_lsn: 0, ..numbered() };
    let known = SegmentState { last_index: 0, ..known };
    assert_eq!(decode_header(&superblock, ReplicaGuid(0xa), 8, &header), Some(known));
    for bit in 0..97 * 8 {
        let mut rotten = header.clone();
        rotten[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(decode_header(&superblock, ReplicaGuid(0xa), 8, &rotten), None, "bit {bit}");
    }
    // A record that takes two blocks, behind one that takes one.
    let disk = MemoryDisk::new(12 << 20);
    let mut ring = Ring::format(&disk, &superblock).expect("a ring");
    ring.restate(&disk, &DurableState::default().encode()).expect("room");
    assert!(ring.append(&disk, &[0x77; 5000]).expect("a write"));
    // Generation 1 lies in the second half.
    let half = u64::from(superblock.ring_blocks / 2);
    // Another state in the other half: this one ends with a note of it.
    ring.restate(&disk, &DurableState::default().encode()).expect("room");
    let mut blocks = vec![0; 4 * 4096];
    disk.read_at((superblock.rings()[0] + half) * 4096, &mut blocks).expect("a read");
    recorded().holds("half-of-the-ring-with-its-note", &blocks);
    for version in versions() {
        let read = Superblock::decode(&version.read("superblock")).expect("of a known version");
        assert_eq!(read, Some(superblock));
        let disk = MemoryDisk::new(12 << 20);
        let at = (superblock.rings()[1] + half) * 4096;
        let noted = version.read("half-of-the-ring-with-its-note");
        let (records, note) = noted.split_at(3 * 4096);
        disk.write_at(at, &[std::io::IoSlice::new(records)]).expect("a write");
        let (_, found) = Ring::open(&disk, &superblock).expect("the mirror");
        assert_eq!(found, [Bytes::new(), Bytes::from(vec![0x77; 5000])]);
        disk.write_at(at + 3 * 4096, &[std::io::IoSlice::new(note)]).expect("a write");
        let opened = Ring::open(&disk, &superblock).map(drop);
        assert!(matches!(opened, Err(PoolError::MetadataLost)), "the half that took over is gone");
        // The fields that recovery looks at.
        let header = version.read("segment-header");
        assert_eq!((&header[..8], header[12]), (&b"QUOINSEG"[..], 8));
    }
}

#[test]
fn the_length_of_a_whole_statement_is_told_without_making_it() {
    let mut state = DurableState::default();
    assert_eq!(state.encoded_len(), state.encode().len());
    for guid in [0xa, 0xb, 0xc].map(ReplicaGuid) {
        let volume_spec = Bytes::from(vec![7; guid.0 as usize]);
        state.apply(Record::Create(ReplicaIdentity { guid, volume_spec, ..Default::default() }));
        assert_eq!(state.encoded_len(), state.encode().len());
    }
    for (_, record) in records().into_iter().filter(|(_, r)| !matches!(r, Record::Delete(_))) {
        state.apply(record);
        assert_eq!(state.encoded_len(), state.encode().len());
    }
    state.apply(Record::Delete(ReplicaGuid(0xb)));
    assert_eq!(state.encoded_len(), state.encode().len());
}

fn batch_entries(stream: Stream) -> Vec<(BatchEntry<'static>, Vec<u32>)> {
    let entry = |n: u64, kind: u8, payload: &'static [u8]| BatchEntry {
        epoch: 3,
        lsn: 95 + n,
        lba: 7 * n,
        blocks: 2,
        kind,
        flags: u8::from(n == 1),
        chain: 0xc0 + n,
        payload,
        crcs: &[],
    };
    match stream {
        Stream::Nodes => vec![(BatchEntry { blocks: 300, ..entry(1, 2, &[]) }, vec![])],
        _ => vec![
            (entry(1, 1, &[]), vec![11, 12]),
            (entry(2, 2, &[]), vec![]),
            (entry(3, 3, &[1]), vec![]),
            (BatchEntry { lba: 0, blocks: 0, ..entry(4, 7, &[9, 0, 0, 0, 0, 0, 0, 0]) }, vec![]),
        ],
    }
}

fn header(stream: Stream, data_blocks: u32) -> BatchHeader {
    BatchHeader {
        stream,
        sequence: 5 << 32 | 1,
        index: 12,
        previous: 0xfeed,
        guid_hash: 0xbeef,
        watermark: 90,
        starts: 5,
        data_blocks,
        key: 0,
    }
}

#[test]
fn batch_headers_have_the_bytes_that_were_recorded_and_every_version_is_read() {
    for (name, stream, data_blocks) in [
        ("batch-log", Stream::Log, 2),
        ("batch-moved", Stream::Moved, 2),
        ("batch-nodes", Stream::Nodes, 1),
    ] {
        let mut out = Vec::new();
        let mut writer = HeaderWriter::new(&mut out);
        let entries = batch_entries(stream);
        for (entry, crcs) in &entries {
            writer.entry(entry, crcs.iter().copied());
        }
        writer.finish(&header(stream, data_blocks));
        recorded().holds(name, &out);
        for version in versions() {
            let bytes = version.read(name);
            let batch = Batch::parse(&bytes).unwrap_or_else(|| panic!("{name} is not read"));
            assert_eq!(batch.header, header(stream, data_blocks));
            let read: Vec<BatchEntry<'_>> = batch.entries().collect();
            assert_eq!(read.len(), entries.len());
            for (read, (entry, crcs)) in read.iter().zip(&entries) {
                let crcs: Vec<u8> = crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect();
                assert_eq!(read, &BatchEntry { crcs: &crcs, ..entry.clone() }, "{name}");
            }
        }
    }
}

#[test]
fn nodes_of_the_map_have_the_bytes_that_were_recorded_and_every_version_is_read() {
    let mut runs = Leaf::hole(7);
    for (n, block) in runs.blocks[10..60].iter_mut().enumerate() {
        *block = BlockAt { version: 9, place: 500 + n as u64, crc: n as u32 };
    }
    runs.blocks[70] = BlockAt { version: 8, place: LOST_PLACE, crc: 0 };
    let mut dense = Leaf::hole(0);
    for (n, block) in (0..LEAF_BLOCKS as u64).zip(&mut dense.blocks) {
        *block = BlockAt { version: n * 3, place: 9000 - 2 * n, crc: n as u32 };
    }
    let mut children = Box::new([Child::EMPTY; FANOUT]);
    children[1] = Child::Hole(5);
    let Child::Node(node) = root(3).child else { unreachable!("root() is a node") };
    children[2] = Child::Node(node);
    children[FANOUT - 1] = Child::Node(NodeRef { length: u32::MAX, ..node });
    for (name, level, node) in [
        ("node-leaf-runs", 0, Node::Leaf(runs)),
        ("node-leaf-dense", 0, Node::Leaf(dense)),
        ("node-interior", 1, Node::Interior(children)),
    ] {
        let mut out = Vec::new();
        node.encode(&mut out);
        recorded().holds(name, &out);
        for version in versions() {
            assert_eq!(Node::decode(level, &version.read(name)), Some(node.clone()), "{name}");
        }
    }
}

/// The features in a superblock decide what an older or newer build may do with the pool.
#[test]
fn a_pool_with_unknown_compatible_features_is_opened_and_they_are_kept() {
    let later = Superblock {
        features: Features { compat: 1 << 40, ..Features::default() },
        ..superblock()
    };
    let disk = MemoryDisk::new(12 << 20);
    later.write(&disk).expect("a write");
    assert_eq!(Superblock::read(&disk).expect("a pool").features.compat, 1 << 40);
    for bit in 0..64 {
        for word in [0, 1] {
            let features = match word {
                0 => Features { incompat: 1 << bit, ..Features::default() },
                _ => Features { ro_compat: 1 << bit, ..Features::default() },
            };
            Superblock { features, ..superblock() }.write(&disk).expect("a write");
            let refused = Superblock::read(&disk).expect_err("unknown features").to_string();
            assert!(refused.contains("newer Quoin"), "{refused}");
        }
    }
}
