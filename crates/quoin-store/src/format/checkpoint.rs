//! A checkpoint: a replica's map and log as of one moment, the body of a record of the metadata
//! ring.

use bytes::{Bytes, BytesMut};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::message::{EPOCH_TABLE_MAX, EpochEnd, SNAPSHOTS_MAX, SnapshotInfo};
use quoin_types::{Chain, ClientTable, Epoch, Lsn, Position, SnapshotId, View, mutant};
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

use crate::format::batch::Stream;
use crate::format::node::{Child, LEVEL_MAX, RefOnDisk, Root};
use crate::format::{flag, put, read};
use crate::log::history::Head;

/// A segment, in a checkpoint and as the body of a log segment (kind 5). Where it has a logical
/// number, that follows (4).
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | first unit |
/// | 4 | 4 | units |
/// | 8 | 1 | stream, and 128 where it has a logical number |
/// | 9 | 8 | sequence number |
/// | 17 | 4 | blocks written |
/// | 21 | 8 | live bytes |
/// | 29 | 8 | highest LSN |
/// | 37 | 8 | highest batch index |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct SegmentOnDisk {
    unit: U32,
    units: U32,
    stream: u8,
    sequence: U64,
    used_blocks: U32,
    live_bytes: U64,
    last_lsn: U64,
    last_index: U64,
}
const _: () = assert!(size_of::<SegmentOnDisk>() == 45);

/// Flag of a stream: a logical number follows.
pub(super) const IS_LOGICAL: u8 = 128;
/// Bytes of a segment at most.
pub const SEGMENT_LENGTH_MAX: usize = size_of::<SegmentOnDisk>() + size_of::<U32>();

/// A root of the map, in a checkpoint: followed by the version (8) of a hole, or by a
/// [`RefOnDisk`].
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | levels above the leaves |
/// | 1 | 1 | 0: a hole, 1: a node |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct RootOnDisk {
    level: u8,
    is_node: u8,
}
const _: () = assert!(size_of::<RootOnDisk>() == 2);

/// Where a history stands, in a checkpoint: behind the root.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch |
/// | 8 | 8 | LSN |
/// | 16 | 8 | history chain |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct PositionOnDisk {
    epoch: U64,
    lsn: U64,
    chain: U64,
}
const _: () = assert!(size_of::<PositionOnDisk>() == 24);

/// A row of the epoch table.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch |
/// | 8 | 8 | its first LSN |
/// | 16 | 8 | its last LSN |
/// | 24 | 8 | history chain there |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct EpochOnDisk {
    epoch: U64,
    first: U64,
    last: U64,
    chain: U64,
}
const _: () = assert!(size_of::<EpochOnDisk>() == 32);

/// A snapshot; its root follows, then a [`SnapshotEndOnDisk`] and the last View.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 16 | id |
/// | 16 | 8 | LSN |
/// | 24 | 1 | 1: hidden |
/// | 25 | 8 | blocks of the volume |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct SnapshotOnDisk {
    id: U128,
    lsn: U64,
    hidden: u8,
    blocks: U64,
}
const _: () = assert!(size_of::<SnapshotOnDisk>() == 33);

/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch |
/// | 8 | 8 | history chain |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct SnapshotEndOnDisk {
    epoch: U64,
    chain: U64,
}
const _: () = assert!(size_of::<SnapshotEndOnDisk>() == 16);

/// Where the log begins.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | sequence number of the segment |
/// | 8 | 4 | block in the segment |
/// | 12 | 8 | batch index |
/// | 20 | 8 | checksum of the header before |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct LogStartOnDisk {
    sequence: U64,
    offset_blocks: U32,
    index: U64,
    previous: U64,
}
const _: () = assert!(size_of::<LogStartOnDisk>() == 28);

/// The shadow of an increment; root, snapshots and first sequence number (8) follow.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | rebuild id |
/// | 8 | 8 | LSN where it begins |
/// | 16 | 8 | next LBA |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct ShadowOnDisk {
    rebuild: U64,
    from: U64,
    cursor: U64,
}
const _: () = assert!(size_of::<ShadowOnDisk>() == 24);

/// A segment that the table of segments has and that is gone.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | first unit |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct RemovedOnDisk {
    unit: U32,
}
const _: () = assert!(size_of::<RemovedOnDisk>() == 4);

/// A segment as the records know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentState {
    pub unit: u32,
    pub units: u32,
    pub stream: Stream,
    pub sequence: u64,
    /// Blocks written, the segment's header included.
    pub used_blocks: u32,
    /// Estimate for choosing what to clean; never trusted for freeing.
    pub live_bytes: u64,
    /// Highest LSN and batch index of a log segment.
    pub last_lsn: u64,
    pub last_index: u64,
    /// Number of its first unit among the logical places of its replica
    /// ([`crate::space::logical`]); 0: leaves name its blocks by where they lie.
    pub logical: u32,
}

impl SegmentState {
    /// Bytes that it takes in a record.
    pub fn encoded_len(&self) -> usize {
        SEGMENT_LENGTH_MAX - if self.logical == 0 { size_of::<U32>() } else { 0 }
    }

    pub(super) fn encode(&self, out: &mut BytesMut) {
        put(out, &SegmentOnDisk::from(*self));
        if self.logical != 0 {
            put(out, &U32::new(self.logical));
        }
    }

    pub(super) fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let raw = read!(r, SegmentOnDisk, "segment");
        let logical = match raw.stream & IS_LOGICAL {
            0 => 0,
            _ => r.u32("segment")?,
        };
        if (raw.stream & IS_LOGICAL != 0) != (logical != 0) {
            return Err(Malformed("segment"));
        }
        Ok(SegmentState { logical, ..raw.decoded()? })
    }

    /// Recorded form. Live data is counted in whole blocks (nodes are not), so one byte more
    /// marks a count that is too high: a view went away and all is to be counted anew.
    pub fn recorded(self, too_high: bool) -> Self {
        let mark = u64::from(too_high && self.stream != Stream::Nodes);
        SegmentState { live_bytes: self.live_bytes | mark, ..self }
    }

    /// The state that was recorded so, and whether it said that its count is too high.
    pub fn counted(self) -> (Self, bool) {
        let too_high = self.stream != Stream::Nodes && self.live_bytes & 1 == 1;
        let live_bytes = self.live_bytes - u64::from(too_high);
        (SegmentState { live_bytes, ..self }, too_high)
    }
}

/// A view that is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotState {
    pub info: SnapshotInfo,
    pub root: Root,
    pub position: Position,
    pub chain: Chain,
    pub last_view: Option<(Lsn, View)>,
}

/// Where the log's first batch above the folded map is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogStart {
    /// 0: the log has no segment yet.
    pub sequence: u64,
    pub offset_blocks: u32,
    pub index: u64,
    pub previous: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShadowState {
    pub rebuild: u64,
    pub from: Lsn,
    pub cursor: u64,
    pub root: Root,
    pub snapshots: Vec<SnapshotState>,
    /// Segments with an older sequence number hold nothing of the shadow's own.
    pub first_sequence: u64,
}

/// A replica's map and log as of one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checkpoint {
    pub root: Root,
    pub head: Head,
    pub stable: Lsn,
    pub snapshots: Vec<SnapshotState>,
    pub log: LogStart,
    /// All of them or, where there is a table, those that it does not have.
    pub segments: Vec<SegmentState>,
    /// Log segments with a greater sequence number were opened later.
    pub sequence: u64,
    pub shadow: Option<ShadowState>,
    pub table: Option<TableState>,
    pub logical: Option<LogicalState>,
}

/// Logical places of a replica ([`crate::space::logical`]) as of some commit.
///
/// In a checkpoint it follows the shadow: a flag (1) and, where that is set, the root, the next number
/// (4), a count and so many [`MovedOnDisk`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogicalState {
    /// Map from logical blocks to where clean-up moved them.
    pub root: Root,
    /// The first number that was not given to a segment.
    pub next: u32,
    /// Moved blocks that the map lacks, since there was no room for its nodes.
    pub moved: Vec<MovedState>,
}

/// A moved block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedState {
    /// The logical block.
    pub block: u64,
    /// 0: it stands for nothing any more.
    pub place: u64,
    pub crc: u32,
}

/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | logical block |
/// | 8 | 8 | place; 0: none |
/// | 16 | 4 | CRC32C of the block |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct MovedOnDisk {
    block: U64,
    place: U64,
    crc: U32,
}
const _: () = assert!(size_of::<MovedOnDisk>() == 20);

/// Segments that are listed in nodes: a map from units to segments, as of some commit.
///
/// In a checkpoint it follows the logical places: a flag (1) and, where that is set, the root, a count
/// and so many [`RemovedOnDisk`], then a byte that is 1 where the counters are too high.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TableState {
    pub root: Root,
    /// First units of segments that the table has and that are gone.
    pub removed: Vec<u32>,
    /// The counters of live bytes are too high: all is to be counted anew.
    pub too_high: bool,
}

impl From<SegmentState> for SegmentOnDisk {
    fn from(segment: SegmentState) -> Self {
        SegmentOnDisk {
            unit: segment.unit.into(),
            units: segment.units.into(),
            stream: segment.stream as u8 | if segment.logical == 0 { 0 } else { IS_LOGICAL },
            sequence: segment.sequence.into(),
            used_blocks: segment.used_blocks.into(),
            live_bytes: segment.live_bytes.into(),
            last_lsn: segment.last_lsn.into(),
            last_index: segment.last_index.into(),
        }
    }
}

impl SegmentOnDisk {
    fn decoded(&self) -> Result<SegmentState, Malformed> {
        Ok(SegmentState {
            unit: self.unit.get(),
            units: self.units.get(),
            stream: Stream::from_code(self.stream & !IS_LOGICAL).ok_or(Malformed("segment"))?,
            sequence: self.sequence.get(),
            used_blocks: self.used_blocks.get(),
            live_bytes: self.live_bytes.get(),
            last_lsn: self.last_lsn.get(),
            last_index: self.last_index.get(),
            logical: 0,
        })
    }
}

pub(super) fn encode_root(root: &Root, out: &mut BytesMut) {
    let is_node = matches!(root.child, Child::Node(_)).into();
    put(out, &RootOnDisk { level: root.level, is_node });
    match root.child {
        Child::Hole(version) => put(out, &U64::new(version)),
        Child::Node(node) => put(out, &RefOnDisk::from(node)),
    }
}

pub(super) fn decode_root(r: &mut Reader) -> Result<Root, Malformed> {
    let RootOnDisk { level, is_node } = read!(r, RootOnDisk, "root");
    let child = match is_node {
        0 => Child::Hole(r.u64("root")?),
        1 => Child::Node(read!(r, RefOnDisk, "root").into()),
        _ => return Err(Malformed("root")),
    };
    if level > LEVEL_MAX { Err(Malformed("root")) } else { Ok(Root { level, child }) }
}

fn encode_view(view: &Option<(Lsn, View)>, out: &mut BytesMut) {
    out.put_flag(view.is_some());
    if let Some((lsn, view)) = view {
        put(out, &U64::new(lsn.0));
        view.encode(out);
    }
}

fn decode_view(r: &mut Reader) -> Result<Option<(Lsn, View)>, Malformed> {
    Ok(match r.bool("view")? {
        true => Some((Lsn(r.u64("view")?), View::decode(r)?)),
        false => None,
    })
}

fn encode_snapshots(snapshots: &[SnapshotState], out: &mut BytesMut) {
    out.put_count(snapshots.len());
    for s in snapshots {
        put(
            out,
            &SnapshotOnDisk {
                id: s.info.id.0.into(),
                lsn: s.info.lsn.0.into(),
                hidden: s.info.hidden.into(),
                blocks: s.info.blocks.into(),
            },
        );
        encode_root(&s.root, out);
        let (epoch, chain) = (s.position.epoch.0.into(), s.chain.0.into());
        put(out, &SnapshotEndOnDisk { epoch, chain });
        encode_view(&s.last_view, out);
    }
}

fn decode_snapshots(r: &mut Reader) -> Result<Vec<SnapshotState>, Malformed> {
    let count = r.count(40, "snapshots")?;
    if count > SNAPSHOTS_MAX {
        return Err(Malformed("snapshots"));
    }
    (0..count)
        .map(|_| {
            let raw = read!(r, SnapshotOnDisk, "snapshot");
            let info = SnapshotInfo {
                id: SnapshotId(raw.id.get()),
                lsn: Lsn(raw.lsn.get()),
                hidden: flag(raw.hidden, "snapshot")?,
                blocks: raw.blocks.get(),
            };
            let root = decode_root(r)?;
            let end = read!(r, SnapshotEndOnDisk, "snapshot");
            Ok(SnapshotState {
                root,
                position: Position { epoch: Epoch(end.epoch.get()), lsn: info.lsn },
                chain: Chain(end.chain.get()),
                last_view: decode_view(r)?,
                info,
            })
        })
        .collect()
}

impl From<LogStart> for LogStartOnDisk {
    fn from(start: LogStart) -> Self {
        LogStartOnDisk {
            sequence: start.sequence.into(),
            offset_blocks: start.offset_blocks.into(),
            index: start.index.into(),
            previous: start.previous.into(),
        }
    }
}

impl From<LogStartOnDisk> for LogStart {
    fn from(raw: LogStartOnDisk) -> Self {
        LogStart {
            sequence: raw.sequence.get(),
            offset_blocks: raw.offset_blocks.get(),
            index: raw.index.get(),
            previous: raw.previous.get(),
        }
    }
}

fn encode_head(head: &Head, out: &mut BytesMut) {
    put(
        out,
        &PositionOnDisk {
            epoch: head.position.epoch.0.into(),
            lsn: head.position.lsn.0.into(),
            chain: head.chain.0.into(),
        },
    );
    encode_view(&head.last_view, out);
    put(out, &U64::new(head.volume_blocks));
    out.put_count(head.epoch_table.len());
    for row in &head.epoch_table {
        put(
            out,
            &EpochOnDisk {
                epoch: row.epoch.0.into(),
                first: row.first.0.into(),
                last: row.last.0.into(),
                chain: row.chain.0.into(),
            },
        );
    }
    match mutant::is("clients-left-out-of-the-checkpoint") {
        true => ClientTable::default().encode(out),
        false => head.clients.encode(out),
    }
}

fn decode_head(r: &mut Reader) -> Result<Head, Malformed> {
    let raw = read!(r, PositionOnDisk, "checkpoint");
    Ok(Head {
        position: Position { epoch: Epoch(raw.epoch.get()), lsn: Lsn(raw.lsn.get()) },
        chain: Chain(raw.chain.get()),
        last_view: decode_view(r)?,
        volume_blocks: r.u64("checkpoint")?,
        epoch_table: decode_epochs(r)?,
        clients: ClientTable::decode(r)?,
    })
}

fn decode_epochs(r: &mut Reader) -> Result<Vec<EpochEnd>, Malformed> {
    let count = r.count(size_of::<EpochOnDisk>(), "epoch table")?;
    if count > EPOCH_TABLE_MAX {
        return Err(Malformed("epoch table"));
    }
    (0..count)
        .map(|_| {
            let raw = read!(r, EpochOnDisk, "epoch table");
            Ok(EpochEnd {
                epoch: Epoch(raw.epoch.get()),
                first: Lsn(raw.first.get()),
                last: Lsn(raw.last.get()),
                chain: Chain(raw.chain.get()),
            })
        })
        .collect()
}

impl Checkpoint {
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        let out = &mut out;
        encode_root(&self.root, out);
        encode_head(&self.head, out);
        put(out, &U64::new(self.stable.0));
        encode_snapshots(&self.snapshots, out);
        put(out, &LogStartOnDisk::from(self.log));
        out.put_count(self.segments.len());
        self.segments.iter().for_each(|segment| segment.encode(out));
        put(out, &U64::new(self.sequence));
        out.put_flag(self.shadow.is_some());
        if let Some(shadow) = &self.shadow {
            encode_shadow(shadow, out);
        }
        out.put_flag(self.logical.is_some());
        if let Some(logical) = &self.logical {
            encode_root(&logical.root, out);
            put(out, &U32::new(logical.next));
            out.put_count(logical.moved.len());
            for MovedState { block, place, crc } in &logical.moved {
                let (block, place, crc) = ((*block).into(), (*place).into(), (*crc).into());
                put(out, &MovedOnDisk { block, place, crc });
            }
        }
        out.put_flag(self.table.is_some());
        if let Some(table) = &self.table {
            encode_table(table, out);
        }
        std::mem::take(out).freeze()
    }

    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        let r = &mut Reader::new(bytes);
        let checkpoint = Checkpoint {
            root: decode_root(r)?,
            head: decode_head(r)?,
            stable: Lsn(r.u64("checkpoint")?),
            snapshots: decode_snapshots(r)?,
            log: read!(r, LogStartOnDisk, "log start").into(),
            segments: (0..r.count(size_of::<SegmentOnDisk>(), "segments")?)
                .map(|_| SegmentState::decode(r))
                .collect::<Result<_, _>>()?,
            sequence: r.u64("checkpoint")?,
            shadow: match r.bool("shadow")? {
                false => None,
                true => Some(decode_shadow(r)?),
            },
            logical: match r.bool("logical places")? {
                false => None,
                true => Some(decode_logical(r)?),
            },
            table: match r.bool("segment table")? {
                false => None,
                true => Some(decode_table(r)?),
            },
        };
        r.end("checkpoint")?;
        Ok(checkpoint)
    }
}

fn encode_shadow(shadow: &ShadowState, out: &mut BytesMut) {
    put(
        out,
        &ShadowOnDisk {
            rebuild: shadow.rebuild.into(),
            from: shadow.from.0.into(),
            cursor: shadow.cursor.into(),
        },
    );
    encode_root(&shadow.root, out);
    encode_snapshots(&shadow.snapshots, out);
    put(out, &U64::new(shadow.first_sequence));
}

fn decode_shadow(r: &mut Reader) -> Result<ShadowState, Malformed> {
    let raw = read!(r, ShadowOnDisk, "shadow");
    Ok(ShadowState {
        rebuild: raw.rebuild.get(),
        from: Lsn(raw.from.get()),
        cursor: raw.cursor.get(),
        root: decode_root(r)?,
        snapshots: decode_snapshots(r)?,
        first_sequence: r.u64("shadow")?,
    })
}

fn decode_logical(r: &mut Reader) -> Result<LogicalState, Malformed> {
    let (root, next) = (decode_root(r)?, r.u32("logical places")?);
    let moved = (0..r.count(size_of::<MovedOnDisk>(), "moved blocks")?).map(|_| {
        let raw = read!(r, MovedOnDisk, "moved blocks");
        Ok(MovedState { block: raw.block.get(), place: raw.place.get(), crc: raw.crc.get() })
    });
    Ok(LogicalState { root, next, moved: moved.collect::<Result<_, _>>()? })
}

fn encode_table(table: &TableState, out: &mut BytesMut) {
    encode_root(&table.root, out);
    out.put_count(table.removed.len());
    for unit in &table.removed {
        put(out, &RemovedOnDisk { unit: (*unit).into() });
    }
    out.put_flag(table.too_high);
}

fn decode_table(r: &mut Reader) -> Result<TableState, Malformed> {
    Ok(TableState {
        root: decode_root(r)?,
        removed: (0..r.count(size_of::<RemovedOnDisk>(), "removed segments")?)
            .map(|_| Ok(read!(r, RemovedOnDisk, "removed segments").unit.get()))
            .collect::<Result<_, _>>()?,
        too_high: r.bool("segment table")?,
    })
}
