//! The records of the metadata ring. A payload of the ring is a list of them.

use bytes::{BufMut, Bytes, BytesMut};
use quoin_replication::replica::store::{BootCookie, ReplicaIdentity, ReplicaMeta};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::{Epoch, Incarnation, Lsn, Membership, ReplicaGuid, ReplicaId, VolumeId};
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

use crate::format::checkpoint::{SEGMENT_LENGTH_MAX, SegmentState};
use crate::format::{flag, put, read};

/// The head of a record; its body follows.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | kind |
/// | 1 | 16 | GUID of the replica |
/// | 17 | 4 | bytes of the body |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct RecordOnDisk {
    kind: u8,
    guid: U128,
    length: U32,
}
const _: () = assert!(size_of::<RecordOnDisk>() == 21);

/// Bytes of a record beside its body.
pub const RECORD_HEAD: usize = size_of::<RecordOnDisk>();

/// The body of a creation (kind 2); the volume's description follows, a length (4) and its bytes.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 16 | volume id |
/// | 16 | 16 | replica id |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct IdentityOnDisk {
    volume: U128,
    replica: U128,
}
const _: () = assert!(size_of::<IdentityOnDisk>() == 32);

/// The body of a meta record (kind 3) up to the membership, which follows where there is one.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | promised epoch |
/// | 8 | 16 | promised incarnation |
/// | 24 | 1 | 1: a session is open |
/// | 25 | 4 | lease, in milliseconds |
/// | 29 | 1 | 1: a membership follows |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct PromiseOnDisk {
    promised: U64,
    incarnation: U128,
    session_open: u8,
    lease_ms: U32,
    has_membership: u8,
}
const _: () = assert!(size_of::<PromiseOnDisk>() == 30);

/// Fields behind the membership in a meta record; then min(stable, durable) (8).
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | 1: counts for quorum |
/// | 1 | 1 | 1: damaged |
/// | 2 | 16 | boot cookie |
/// | 18 | 1 | 1: closed while continuous |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StandingOnDisk {
    quorum: u8,
    damaged: u8,
    cookie: U128,
    closed_continuous: u8,
}
const _: () = assert!(size_of::<StandingOnDisk>() == 19);

/// The body of a cut (kind 6).
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | batch index |
/// | 8 | 8 | LSN above which entries in batches before the index are gone |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct CutOnDisk {
    index: U64,
    keep: U64,
}
const _: () = assert!(size_of::<CutOnDisk>() == 16);

/// A kind of record that this build does not know: what wrote it was newer.
pub const UNKNOWN_RECORD: Malformed = Malformed("ring record (from a newer version?)");

/// A change of the durable state.
///
/// | kind | body |
/// |---|---|
/// | 1 retired | none: this GUID was deleted here and never comes back |
/// | 2 create | [`IdentityOnDisk`], the volume's description |
/// | 3 meta | [`PromiseOnDisk`], membership, [`StandingOnDisk`], watermark |
/// | 4 checkpoint | root, [`PositionOnDisk`], last View, size, epoch table, stable, snapshots, [`LogStartOnDisk`], segments, highest sequence number, shadow |
/// | 5 log segment | [`SegmentState`] |
/// | 6 cut | [`CutOnDisk`] |
/// | 7 delete | none |
/// | 8 describe | the volume's description, in place of that of its creation |
/// | 9 mark | the mark of the pool (8); its GUID is zero |
/// | 10 relatives | [`crate::format::relatives::RelativesState`]; empty: it has none |
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    Retired(ReplicaGuid),
    Create(ReplicaIdentity),
    /// Its volume is described anew. Written only where that changed; the next whole statement
    /// of the ring has it in [`Record::Create`].
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
    /// The mark of the pool. Written first when it is raised first.
    Mark(u64),
    /// Its place among clones. Written first for the first clone of a pool.
    Relatives(ReplicaGuid, Bytes),
}

/// Bytes of a creation's body.
pub fn identity_length(identity: &ReplicaIdentity) -> usize {
    size_of::<IdentityOnDisk>() + size_of::<U32>() + identity.volume_spec.len()
}

/// Bytes of a log segment's record at most.
pub const LOG_SEGMENT_LENGTH_MAX: usize = RECORD_HEAD + SEGMENT_LENGTH_MAX;
/// Bytes of a cut's record.
pub const CUT_LENGTH: usize = RECORD_HEAD + size_of::<CutOnDisk>();
/// Bytes of a mark's record.
pub const MARK_LENGTH: usize = RECORD_HEAD + size_of::<U64>();

impl Record {
    fn guid(&self) -> ReplicaGuid {
        match self {
            Record::Create(identity) => identity.guid,
            Record::Mark(_) => ReplicaGuid::default(),
            Record::Retired(guid)
            | Record::Meta(guid, ..)
            | Record::Checkpoint(guid, _)
            | Record::LogSegment(guid, _)
            | Record::Cut { guid, .. }
            | Record::Delete(guid)
            | Record::Relatives(guid, _)
            | Record::Describe(guid, _) => *guid,
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Record::Retired(_) => 1,
            Record::Create(_) => 2,
            Record::Meta(..) => 3,
            Record::Checkpoint(..) => 4,
            Record::LogSegment(..) => 5,
            Record::Cut { .. } => 6,
            Record::Delete(_) => 7,
            Record::Describe(..) => 8,
            Record::Mark(_) => 9,
            Record::Relatives(..) => 10,
        }
    }

    pub fn encode(&self, out: &mut BytesMut) {
        let mut body = BytesMut::new();
        match self {
            Record::Retired(_) | Record::Delete(_) => {}
            Record::Create(identity) => {
                let (volume, replica) = (identity.volume.0.into(), identity.replica.0.into());
                put(&mut body, &IdentityOnDisk { volume, replica });
                body.put_blob(&identity.volume_spec);
            }
            Record::Meta(_, meta, watermark) => {
                encode_meta(meta, *watermark, &mut body);
            }
            Record::Checkpoint(_, bytes)
            | Record::Describe(_, bytes)
            | Record::Relatives(_, bytes) => body.put_slice(bytes),
            Record::LogSegment(_, segment) => segment.encode(&mut body),
            Record::Cut { index, keep, .. } => {
                put(&mut body, &CutOnDisk { index: (*index).into(), keep: keep.0.into() });
            }
            Record::Mark(mark) => put(&mut body, &U64::new(*mark)),
        }
        let length = u32::try_from(body.len()).expect("bounded by the protocol's limits");
        let (kind, guid) = (self.kind(), self.guid().0.into());
        put(out, &RecordOnDisk { kind, guid, length: length.into() });
        out.put_slice(&body);
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let head = read!(r, RecordOnDisk, "ring record");
        let guid = ReplicaGuid(head.guid.get());
        let mut body = Reader::new(r.take(head.length.get() as usize, "ring record")?);
        let r = &mut body;
        let record = match head.kind {
            1 => Record::Retired(guid),
            2 => {
                let raw = read!(r, IdentityOnDisk, "identity");
                Record::Create(ReplicaIdentity {
                    guid,
                    volume: VolumeId(raw.volume.get()),
                    replica: ReplicaId(raw.replica.get()),
                    volume_spec: r.bytes("volume spec")?,
                })
            }
            3 => {
                let (meta, watermark) = decode_meta(r)?;
                Record::Meta(guid, Box::new(meta), watermark)
            }
            4 => Record::Checkpoint(guid, r.take(r.remaining(), "checkpoint")?),
            5 => Record::LogSegment(guid, SegmentState::decode(r)?),
            6 => {
                let raw = read!(r, CutOnDisk, "cut");
                Record::Cut { guid, index: raw.index.get(), keep: Lsn(raw.keep.get()) }
            }
            7 => Record::Delete(guid),
            8 => Record::Describe(guid, r.take(r.remaining(), "volume spec")?),
            9 => Record::Mark(r.u64("mark")?),
            10 => Record::Relatives(guid, r.take(r.remaining(), "relatives")?),
            _ => return Err(UNKNOWN_RECORD),
        };
        r.end("ring record")?;
        Ok(record)
    }
}

/// The body of a meta record.
pub fn encode_meta(meta: &ReplicaMeta, watermark: Lsn, out: &mut BytesMut) {
    // A replica that has not received a membership yet has none to check.
    let has_membership = meta.membership != Membership::default();
    put(
        out,
        &PromiseOnDisk {
            promised: meta.promised.0.into(),
            incarnation: meta.promised_incarnation.0.into(),
            session_open: meta.session_open.into(),
            lease_ms: meta.lease_ms.into(),
            has_membership: has_membership.into(),
        },
    );
    if has_membership {
        meta.membership.encode(out);
    }
    put(
        out,
        &StandingOnDisk {
            quorum: meta.quorum.into(),
            damaged: meta.damaged.into(),
            cookie: meta.cookie.0.into(),
            closed_continuous: meta.closed_continuous.into(),
        },
    );
    put(out, &U64::new(watermark.0));
}

fn decode_meta(r: &mut Reader) -> Result<(ReplicaMeta, Lsn), Malformed> {
    let promise = read!(r, PromiseOnDisk, "meta");
    let membership = match flag(promise.has_membership, "meta")? {
        true => Membership::decode(r)?,
        false => Membership::default(),
    };
    let standing = read!(r, StandingOnDisk, "meta");
    let meta = ReplicaMeta {
        promised: Epoch(promise.promised.get()),
        promised_incarnation: Incarnation(promise.incarnation.get()),
        session_open: flag(promise.session_open, "meta")?,
        lease_ms: promise.lease_ms.get(),
        membership,
        quorum: flag(standing.quorum, "meta")?,
        damaged: flag(standing.damaged, "meta")?,
        cookie: BootCookie(standing.cookie.get()),
        closed_continuous: flag(standing.closed_continuous, "meta")?,
    };
    Ok((meta, Lsn(r.u64("watermark")?)))
}
