//! Kinship of a replica with clones, the body of a record of the metadata ring.
//!
//! A clone shows the blocks of a snapshot of another replica of its pool where it has none of its
//! own: that snapshot is its base. A replica keeps its bases as long as a clone needs them, also
//! when the snapshot, or the replica itself, was deleted.

use bytes::{Bytes, BytesMut};
use quoin_types::codec::{Malformed, Reader, Writer};
use quoin_types::message::SNAPSHOTS_MAX;
use quoin_types::{ReplicaGuid, SnapshotId};
use zerocopy::little_endian::{U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

use crate::format::checkpoint::{decode_root, encode_root};
use crate::format::node::Root;
use crate::format::{put, read};

/// The name of a base.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 16 | GUID of the replica that keeps it |
/// | 16 | 16 | id of the snapshot |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct BaseIdOnDisk {
    replica: U128,
    snapshot: U128,
}
const _: () = assert!(size_of::<BaseIdOnDisk>() == 32);

/// A base that a replica keeps; a byte follows that is 1 where it has a base itself, then that
/// one's [`BaseIdOnDisk`], then the root of its map.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 16 | id of the snapshot |
/// | 16 | 8 | LSN |
/// | 24 | 8 | blocks of the volume |
#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct BaseOnDisk {
    snapshot: U128,
    lsn: U64,
    blocks: U64,
}
const _: () = assert!(size_of::<BaseOnDisk>() == 32);

/// A snapshot of a replica of the same pool, kept for clones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BaseId {
    pub replica: ReplicaGuid,
    pub snapshot: SnapshotId,
}

/// A base as its replica keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BaseState {
    pub snapshot: SnapshotId,
    /// No block of it has a higher version.
    pub lsn: u64,
    pub blocks: u64,
    /// The base of the replica, which shows where this one has no block of its own.
    pub parent: Option<BaseId>,
    pub root: Root,
}

/// A replica's place among its relatives: a flag and its base, a byte that is 1 where nothing but
/// bases is left of it, and a count with so many bases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RelativesState {
    /// The base that a clone shows where it has no block of its own.
    pub base: Option<BaseId>,
    /// The replica was deleted, and nothing but its bases is left.
    pub is_remnant: bool,
    /// The bases that it keeps for clones.
    pub bases: Vec<BaseState>,
}

fn encode_id(id: Option<BaseId>, out: &mut BytesMut) {
    out.put_flag(id.is_some());
    if let Some(id) = id {
        let (replica, snapshot) = (id.replica.0.into(), id.snapshot.0.into());
        put(out, &BaseIdOnDisk { replica, snapshot });
    }
}

fn decode_id(r: &mut Reader) -> Result<Option<BaseId>, Malformed> {
    if !r.bool("base")? {
        return Ok(None);
    }
    let raw = read!(r, BaseIdOnDisk, "base");
    let (replica, snapshot) = (raw.replica.get(), raw.snapshot.get());
    Ok(Some(BaseId { replica: ReplicaGuid(replica), snapshot: SnapshotId(snapshot) }))
}

impl RelativesState {
    /// Whether there is nothing to record.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Empty where the replica has no relatives.
    pub fn encode(&self) -> Bytes {
        if self.is_empty() {
            return Bytes::new();
        }
        let mut out = BytesMut::new();
        encode_id(self.base, &mut out);
        out.put_flag(self.is_remnant);
        out.put_count(self.bases.len());
        for base in &self.bases {
            let (lsn, blocks) = (base.lsn.into(), base.blocks.into());
            put(&mut out, &BaseOnDisk { snapshot: base.snapshot.0.into(), lsn, blocks });
            encode_id(base.parent, &mut out);
            encode_root(&base.root, &mut out);
        }
        out.freeze()
    }

    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let r = &mut Reader::new(bytes);
        let (base, is_remnant) = (decode_id(r)?, r.bool("relatives")?);
        let count = r.count(size_of::<BaseOnDisk>(), "bases")?;
        if count > SNAPSHOTS_MAX {
            return Err(Malformed("bases"));
        }
        let mut bases = Vec::with_capacity(count);
        for _ in 0..count {
            let raw = read!(r, BaseOnDisk, "base");
            bases.push(BaseState {
                snapshot: SnapshotId(raw.snapshot.get()),
                lsn: raw.lsn.get(),
                blocks: raw.blocks.get(),
                parent: decode_id(r)?,
                root: decode_root(r)?,
            });
        }
        r.end("relatives")?;
        Ok(RelativesState { base, is_remnant, bases })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::node::{Child, NodeRef};

    fn state() -> RelativesState {
        let id = |n| BaseId { replica: ReplicaGuid(n), snapshot: SnapshotId(n << 64) };
        let node = NodeRef { place: 3 << 12, length: 300, crc: 0xc4c, newest: 70 };
        let base = |n: u128, parent, root| BaseState {
            snapshot: SnapshotId(n),
            lsn: 70,
            blocks: 600,
            parent,
            root,
        };
        RelativesState {
            base: Some(id(7)),
            is_remnant: true,
            bases: vec![
                base(1, Some(id(7)), Root { level: 1, child: Child::Node(node) }),
                base(2, None, Root::default()),
            ],
        }
    }

    #[test]
    fn relatives_come_back_as_they_were_recorded_and_none_take_no_room() {
        assert_eq!(RelativesState::decode(state().encode()), Ok(state()));
        assert!(RelativesState::default().encode().is_empty());
        assert_eq!(RelativesState::decode(Bytes::new()), Ok(RelativesState::default()));
    }

    #[test]
    fn relatives_that_end_early_or_go_on_too_long_are_refused() {
        let bytes = state().encode();
        for length in 1..bytes.len() {
            assert!(RelativesState::decode(bytes.slice(..length)).is_err(), "{length} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(RelativesState::decode(longer.into()).is_err());
    }
}
