//! The records of the metadata ring, and the durable state that they add up to.

use std::collections::{BTreeMap, BTreeSet};

use bytes::{BufMut, Bytes, BytesMut};
use quoin_replication::replica::store::{BootCookie, ReplicaIdentity, ReplicaMeta};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::message::{EPOCH_TABLE_MAX, EpochEnd, SNAPSHOTS_MAX, SnapshotInfo};
use quoin_types::{
    Chain, Epoch, Incarnation, Lsn, Membership, Position, ReplicaGuid, ReplicaId, SnapshotId, View,
    VolumeId,
};

use crate::batch::Stream;
use crate::history::Head;
use crate::node::{Child, LEVEL_MAX, NodeRef};
use crate::tree::Root;

/// GUIDs of deleted replicas that a pool remembers, and the part of its metadata ring that they may
/// take, in percent: of more it forgets some, since a pool that could delete nothing any more, or
/// create nothing, would be of no use.
const RETIRED_MAX: usize = 1 << 16;
const RETIRED_PERCENT: usize = 10;

/// Kind, GUID and length of a record.
const RECORD_HEAD: usize = 1 + 16 + 4;
const SEGMENT_LENGTH: usize = 45;

/// A kind of record that this build does not know: what wrote it was newer.
pub const UNKNOWN_RECORD: Malformed = Malformed("ring record (from a newer version?)");

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
}

impl SegmentState {
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
}

/// Segments that are listed in nodes: a map from units to segments, as of some commit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TableState {
    pub root: Root,
    /// First units of segments that the table has and that are gone.
    pub removed: Vec<u32>,
    /// The counters of live bytes are too high: all is to be counted anew.
    pub too_high: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    Retired(ReplicaGuid),
    Create(ReplicaIdentity),
    /// Its volume is described anew. Written only where that changed; the next whole statement
    /// of the ring has it in [`Record::Create`], as every version reads it.
    Describe(ReplicaGuid, Bytes),
    /// With min(stable, durable) as it was then: the log must reach that far.
    Meta(ReplicaGuid, Box<ReplicaMeta>, Lsn),
    /// Encoded [`Checkpoint`].
    Checkpoint(ReplicaGuid, Bytes),
    LogSegment(ReplicaGuid, SegmentState),
    /// Entries after `keep` in batches before `index` are gone.
    Cut {
        guid: ReplicaGuid,
        index: u64,
        keep: Lsn,
    },
    Delete(ReplicaGuid),
    /// The mark of the pool. Written first when it is raised first: builds of before know no
    /// such record and refuse the pool.
    Mark(u64),
}

/// State of a replica in the ring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DurableReplica {
    pub identity: ReplicaIdentity,
    pub meta: ReplicaMeta,
    pub watermark: Lsn,
    pub checkpoint: Bytes,
    pub log_segments: Vec<SegmentState>,
    pub cuts: Vec<(u64, Lsn)>,
}

/// State of the pool in the ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DurableState {
    pub replicas: BTreeMap<ReplicaGuid, DurableReplica>,
    pub retired: BTreeSet<ReplicaGuid>,
    /// 0: it was never raised.
    pub mark: u64,
}

impl DurableState {
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Retired(guid) => {
                self.retired.insert(guid);
            }
            Record::Create(identity) => {
                let replica = DurableReplica {
                    meta: ReplicaMeta::default(),
                    watermark: Lsn::ZERO,
                    checkpoint: Checkpoint::default().encode(),
                    log_segments: Vec::new(),
                    cuts: Vec::new(),
                    identity,
                };
                self.replicas.insert(replica.identity.guid, replica);
            }
            Record::Delete(guid) => {
                self.replicas.remove(&guid);
                self.retired.insert(guid);
            }
            Record::Mark(mark) => self.mark = self.mark.max(mark),
            Record::Describe(guid, spec) => self.with(guid, |r| r.identity.volume_spec = spec),
            Record::Meta(guid, meta, watermark) => self.with(guid, |r| {
                r.meta = *meta;
                r.watermark = watermark;
            }),
            Record::Checkpoint(guid, bytes) => self.with(guid, |r| {
                if let Ok(checkpoint) = Checkpoint::decode(bytes.clone()) {
                    r.log_segments.retain(|s| s.sequence > checkpoint.sequence);
                    r.cuts.retain(|(index, _)| *index > checkpoint.log.index);
                }
                r.checkpoint = bytes;
            }),
            Record::LogSegment(guid, segment) => self.with(guid, |r| r.log_segments.push(segment)),
            Record::Cut { guid, index, keep } => self.with(guid, |r| {
                // A later cut that goes deeper makes an earlier one needless.
                r.cuts.retain(|(_, k)| *k < keep);
                r.cuts.push((index, keep));
            }),
        }
    }

    /// Makes room for one more deleted replica among those that are remembered. Which of them is
    /// forgotten is as good as chance, as GUIDs are.
    pub fn make_room_for_deleted(&mut self, guid: ReplicaGuid, ring_bytes: usize) {
        let most = (ring_bytes / 100 * RETIRED_PERCENT / RECORD_HEAD).clamp(1, RETIRED_MAX);
        while self.retired.len() >= most
            && let Some(other) = self.retired.range(guid..).next().or(self.retired.first()).copied()
        {
            self.retired.remove(&other);
        }
    }

    fn with(&mut self, guid: ReplicaGuid, change: impl FnOnce(&mut DurableReplica)) {
        if let Some(replica) = self.replicas.get_mut(&guid) {
            change(replica);
        }
    }

    /// The records that make this state from nothing.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = BytesMut::new();
        if self.mark != 0 {
            Record::Mark(self.mark).encode(&mut out);
        }
        for guid in &self.retired {
            Record::Retired(*guid).encode(&mut out);
        }
        for (guid, replica) in &self.replicas {
            Record::Create(replica.identity.clone()).encode(&mut out);
            Record::Meta(*guid, Box::new(replica.meta.clone()), replica.watermark).encode(&mut out);
            Record::Checkpoint(*guid, replica.checkpoint.clone()).encode(&mut out);
            for segment in &replica.log_segments {
                Record::LogSegment(*guid, *segment).encode(&mut out);
            }
            for (index, keep) in &replica.cuts {
                Record::Cut { guid: *guid, index: *index, keep: *keep }.encode(&mut out);
            }
        }
        out.to_vec()
    }

    /// How long [`DurableState::encode`] is. Asked with every change of a replica, so nothing
    /// long is copied for it.
    pub fn encoded_len(&self) -> usize {
        let mut meta = BytesMut::new();
        let of = |replica: &DurableReplica| {
            meta.clear();
            encode_meta(&replica.meta, &mut meta);
            let identity = 2 * 16 + 4 + replica.identity.volume_spec.len();
            let bodies = identity + meta.len() + 8 + replica.checkpoint.len();
            let segments = replica.log_segments.len() * (RECORD_HEAD + SEGMENT_LENGTH);
            3 * RECORD_HEAD + bodies + segments + replica.cuts.len() * (RECORD_HEAD + 16)
        };
        let mark = if self.mark == 0 { 0 } else { RECORD_HEAD + 8 };
        mark + self.retired.len() * RECORD_HEAD + self.replicas.values().map(of).sum::<usize>()
    }

    pub fn decode(records: Vec<Bytes>) -> Result<Self, Malformed> {
        let mut state = DurableState::default();
        for bytes in records {
            let mut reader = Reader::new(bytes);
            while reader.remaining() > 0 {
                state.apply(Record::decode(&mut reader)?);
            }
        }
        Ok(state)
    }
}

impl Record {
    /// Kind, guid, length, body.
    pub fn encode(&self, out: &mut BytesMut) {
        let mut body = BytesMut::new();
        let (code, guid) = match self {
            Record::Retired(guid) => (1, guid),
            Record::Create(identity) => {
                body.put_u128_le(identity.volume.0);
                body.put_u128_le(identity.replica.0);
                body.put_blob(&identity.volume_spec);
                (2, &identity.guid)
            }
            Record::Meta(guid, meta, watermark) => {
                encode_meta(meta, &mut body);
                body.put_u64_le(watermark.0);
                (3, guid)
            }
            Record::Checkpoint(guid, bytes) => {
                body.put_slice(bytes);
                (4, guid)
            }
            Record::LogSegment(guid, segment) => {
                encode_segment(segment, &mut body);
                (5, guid)
            }
            Record::Cut { guid, index, keep } => {
                body.put_u64_le(*index);
                body.put_u64_le(keep.0);
                (6, guid)
            }
            Record::Delete(guid) => (7, guid),
            Record::Describe(guid, spec) => {
                body.put_slice(spec);
                (8, guid)
            }
            Record::Mark(mark) => {
                body.put_u64_le(*mark);
                (9, &ReplicaGuid::default())
            }
        };
        out.put_u8(code);
        out.put_u128_le(guid.0);
        out.put_blob(&body);
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let code = r.u8("ring record")?;
        let guid = ReplicaGuid(r.u128("ring record")?);
        let mut body = Reader::new(r.bytes("ring record")?);
        let r = &mut body;
        let record = match code {
            1 => Record::Retired(guid),
            2 => Record::Create(ReplicaIdentity {
                guid,
                volume: VolumeId(r.u128("identity")?),
                replica: ReplicaId(r.u128("identity")?),
                volume_spec: r.bytes("volume spec")?,
            }),
            3 => Record::Meta(guid, Box::new(decode_meta(r)?), Lsn(r.u64("watermark")?)),
            4 => Record::Checkpoint(guid, r.take(r.remaining(), "checkpoint")?),
            5 => Record::LogSegment(guid, decode_segment(r)?),
            6 => Record::Cut { guid, index: r.u64("cut")?, keep: Lsn(r.u64("cut")?) },
            7 => Record::Delete(guid),
            8 => Record::Describe(guid, r.take(r.remaining(), "volume spec")?),
            9 => Record::Mark(r.u64("mark")?),
            _ => return Err(UNKNOWN_RECORD),
        };
        r.end("ring record")?;
        Ok(record)
    }
}

fn encode_meta(meta: &ReplicaMeta, out: &mut BytesMut) {
    out.put_u64_le(meta.promised.0);
    out.put_u128_le(meta.promised_incarnation.0);
    out.put_flag(meta.session_open);
    out.put_u32_le(meta.lease_ms);
    // A replica that has not received a membership yet has none to check.
    out.put_flag(meta.membership != Membership::default());
    if meta.membership != Membership::default() {
        meta.membership.encode(out);
    }
    out.put_flag(meta.quorum);
    out.put_flag(meta.damaged);
    out.put_u128_le(meta.cookie.0);
    out.put_flag(meta.closed_continuous);
}

fn decode_meta(r: &mut Reader) -> Result<ReplicaMeta, Malformed> {
    Ok(ReplicaMeta {
        promised: Epoch(r.u64("meta")?),
        promised_incarnation: Incarnation(r.u128("meta")?),
        session_open: r.bool("meta")?,
        lease_ms: r.u32("meta")?,
        membership: match r.bool("meta")? {
            true => Membership::decode(r)?,
            false => Membership::default(),
        },
        quorum: r.bool("meta")?,
        damaged: r.bool("meta")?,
        cookie: BootCookie(r.u128("meta")?),
        closed_continuous: r.bool("meta")?,
    })
}

fn encode_segment(segment: &SegmentState, out: &mut BytesMut) {
    out.put_u32_le(segment.unit);
    out.put_u32_le(segment.units);
    out.put_u8(segment.stream as u8);
    out.put_u64_le(segment.sequence);
    out.put_u32_le(segment.used_blocks);
    out.put_u64_le(segment.live_bytes);
    out.put_u64_le(segment.last_lsn);
    out.put_u64_le(segment.last_index);
}

fn decode_segment(r: &mut Reader) -> Result<SegmentState, Malformed> {
    Ok(SegmentState {
        unit: r.u32("segment")?,
        units: r.u32("segment")?,
        stream: Stream::from_code(r.u8("segment")?).ok_or(Malformed("segment"))?,
        sequence: r.u64("segment")?,
        used_blocks: r.u32("segment")?,
        live_bytes: r.u64("segment")?,
        last_lsn: r.u64("segment")?,
        last_index: r.u64("segment")?,
    })
}

fn encode_root(root: &Root, out: &mut BytesMut) {
    out.put_u8(root.level);
    match root.child {
        Child::Hole(version) => {
            out.put_u8(0);
            out.put_u64_le(version);
        }
        Child::Node(node) => {
            out.put_u8(1);
            out.put_u64_le(node.place);
            out.put_u32_le(node.length);
            out.put_u32_le(node.crc);
            out.put_u64_le(node.newest);
        }
    }
}

fn decode_root(r: &mut Reader) -> Result<Root, Malformed> {
    let level = r.u8("root")?;
    let child = match r.u8("root")? {
        0 => Child::Hole(r.u64("root")?),
        1 => Child::Node(NodeRef {
            place: r.u64("root")?,
            length: r.u32("root")?,
            crc: r.u32("root")?,
            newest: r.u64("root")?,
        }),
        _ => return Err(Malformed("root")),
    };
    if level > LEVEL_MAX { Err(Malformed("root")) } else { Ok(Root { level, child }) }
}

fn encode_view(view: &Option<(Lsn, View)>, out: &mut BytesMut) {
    out.put_flag(view.is_some());
    if let Some((lsn, view)) = view {
        out.put_u64_le(lsn.0);
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
        out.put_u128_le(s.info.id.0);
        out.put_u64_le(s.info.lsn.0);
        out.put_flag(s.info.hidden);
        out.put_u64_le(s.info.blocks);
        encode_root(&s.root, out);
        out.put_u64_le(s.position.epoch.0);
        out.put_u64_le(s.chain.0);
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
            let info = SnapshotInfo {
                id: SnapshotId(r.u128("snapshot")?),
                lsn: Lsn(r.u64("snapshot")?),
                hidden: r.bool("snapshot")?,
                blocks: r.u64("snapshot")?,
            };
            Ok(SnapshotState {
                root: decode_root(r)?,
                position: Position { epoch: Epoch(r.u64("snapshot")?), lsn: info.lsn },
                chain: Chain(r.u64("snapshot")?),
                last_view: decode_view(r)?,
                info,
            })
        })
        .collect()
}

impl Checkpoint {
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        let out = &mut out;
        encode_root(&self.root, out);
        out.put_u64_le(self.head.position.epoch.0);
        out.put_u64_le(self.head.position.lsn.0);
        out.put_u64_le(self.head.chain.0);
        encode_view(&self.head.last_view, out);
        out.put_u64_le(self.head.volume_blocks);
        out.put_count(self.head.epoch_table.len());
        for row in &self.head.epoch_table {
            out.put_u64_le(row.epoch.0);
            out.put_u64_le(row.first.0);
            out.put_u64_le(row.last.0);
            out.put_u64_le(row.chain.0);
        }
        out.put_u64_le(self.stable.0);
        encode_snapshots(&self.snapshots, out);
        out.put_u64_le(self.log.sequence);
        out.put_u32_le(self.log.offset_blocks);
        out.put_u64_le(self.log.index);
        out.put_u64_le(self.log.previous);
        out.put_count(self.segments.len());
        for segment in &self.segments {
            encode_segment(segment, out);
        }
        out.put_u64_le(self.sequence);
        out.put_flag(self.shadow.is_some());
        if let Some(shadow) = &self.shadow {
            out.put_u64_le(shadow.rebuild);
            out.put_u64_le(shadow.from.0);
            out.put_u64_le(shadow.cursor);
            encode_root(&shadow.root, out);
            encode_snapshots(&shadow.snapshots, out);
            out.put_u64_le(shadow.first_sequence);
        }
        // Only where there is one: an older form of the record ends here.
        if let Some(table) = &self.table {
            encode_root(&table.root, out);
            out.put_count(table.removed.len());
            table.removed.iter().for_each(|unit| out.put_u32_le(*unit));
            out.put_flag(table.too_high);
        }
        std::mem::take(out).freeze()
    }

    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        let r = &mut Reader::new(bytes);
        let checkpoint = Checkpoint {
            root: decode_root(r)?,
            head: Head {
                position: Position {
                    epoch: Epoch(r.u64("checkpoint")?),
                    lsn: Lsn(r.u64("checkpoint")?),
                },
                chain: Chain(r.u64("checkpoint")?),
                last_view: decode_view(r)?,
                volume_blocks: r.u64("checkpoint")?,
                epoch_table: decode_epochs(r)?,
            },
            stable: Lsn(r.u64("checkpoint")?),
            snapshots: decode_snapshots(r)?,
            log: LogStart {
                sequence: r.u64("log start")?,
                offset_blocks: r.u32("log start")?,
                index: r.u64("log start")?,
                previous: r.u64("log start")?,
            },
            segments: (0..r.count(SEGMENT_LENGTH, "segments")?)
                .map(|_| decode_segment(r))
                .collect::<Result<_, _>>()?,
            sequence: r.u64("checkpoint")?,
            shadow: match r.bool("shadow")? {
                false => None,
                true => Some(ShadowState {
                    rebuild: r.u64("shadow")?,
                    from: Lsn(r.u64("shadow")?),
                    cursor: r.u64("shadow")?,
                    root: decode_root(r)?,
                    snapshots: decode_snapshots(r)?,
                    first_sequence: r.u64("shadow")?,
                }),
            },
            table: match r.remaining() {
                0 => None,
                _ => Some(TableState {
                    root: decode_root(r)?,
                    removed: (0..r.count(4, "removed segments")?)
                        .map(|_| r.u32("removed segments"))
                        .collect::<Result<_, _>>()?,
                    too_high: r.bool("segment table")?,
                }),
            },
        };
        r.end("checkpoint")?;
        Ok(checkpoint)
    }
}

fn decode_epochs(r: &mut Reader) -> Result<Vec<EpochEnd>, Malformed> {
    let count = r.count(32, "epoch table")?;
    if count > EPOCH_TABLE_MAX {
        return Err(Malformed("epoch table"));
    }
    (0..count)
        .map(|_| {
            Ok(EpochEnd {
                epoch: Epoch(r.u64("epoch table")?),
                first: Lsn(r.u64("epoch table")?),
                last: Lsn(r.u64("epoch table")?),
                chain: Chain(r.u64("epoch table")?),
            })
        })
        .collect()
}
