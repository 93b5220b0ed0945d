//! Content of snapshots as it travels: the parts in which a target reads it, and the slots in which a copy of
//! the volume takes it. The frames are those of `quoin-wire`.

use bytes::{BufMut, Bytes, BytesMut};

use crate::codec::Writer;
use crate::crc32c;
use crate::ids::{PointId, SnapshotId, VolumeId};
use crate::message::ChangedRange;

/// Content that a client wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    pub volume: VolumeId,
    /// The older snapshot; `None`: everything that is allocated in the newer one.
    pub from: Option<SnapshotId>,
    pub to: SnapshotId,
    /// Block at which the stream begins.
    pub cursor: u64,
    pub want_data: bool,
}

/// Block with the checksum under which it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    pub crc: u32,
    pub data: Bytes,
}

/// Next ranges of a stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Part {
    pub ranges: Vec<ChangedRange>,
    /// The blocks of the ranges that are no holes, in their order; empty where no data is wanted.
    pub blocks: Vec<Block>,
    /// Block at which the next part begins; `None`: this is the last one.
    pub next: Option<u64>,
}

/// Begin of a stream into a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Feed {
    pub volume: VolumeId,
    pub point: PointId,
    /// `None`: everything is sent.
    pub base: Option<PointId>,
    /// That of the order.
    pub token: u128,
}

/// Content of the blocks from a place on, up to that of the next slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Slots {
    /// Block at which they begin.
    pub place: u64,
    pub part: Part,
    /// With the last ones: the digest over the sums of all slots of the stream.
    pub end: Option<u64>,
}

/// State of a transfer into a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// Blocks before this one were taken, and blocks before the other one are on stable media.
    pub to: u64,
    pub stable_to: u64,
    /// The end came, and everything is on stable media.
    pub is_fed: bool,
}

/// Reason that ends a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    #[error("the volume is not served here")]
    NotServed,
    #[error("there is no such snapshot, or the two are in the wrong order")]
    NoSnapshot,
    #[error("no replica that can be asked has a good copy of block {lba}")]
    Damaged { lba: u64 },
    #[error("too many streams are open here")]
    Busy,
    #[error("no transfer is ordered with this token")]
    NotOrdered,
    #[error("slots are missing, or come again")]
    OutOfOrder,
    #[error("the bytes of a slot, or the digest over all of them, are not those that were sent")]
    Changed,
    #[error("the volume does not take them: it has no quorum or no room, or is fenced")]
    Failed,
}

/// Bytes of a block are not those of its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a block has another checksum")]
pub struct WrongChecksum;

impl Slots {
    /// Sum over the places, the ranges and the checksums: with those, over everything.
    pub fn sum(&self) -> u32 {
        let mut head = BytesMut::with_capacity(64 + 4 * self.part.blocks.len());
        head.put_u64_le(self.place);
        put_part(&mut head, &self.part);
        crc32c(&head)
    }
}

impl Part {
    /// Checks every block against its checksum.
    ///
    /// # Errors
    /// Bytes were changed on their way.
    pub fn check(&self) -> Result<(), WrongChecksum> {
        match self.blocks.iter().all(|block| crc32c(&block.data) == block.crc) {
            true => Ok(()),
            false => Err(WrongChecksum),
        }
    }

    /// Returns true if there is a block for each that is no hole.
    pub fn has_its_blocks(&self) -> bool {
        let data = self.ranges.iter().filter(|range| !range.hole).map(|range| range.blocks);
        data.fold(0, u64::saturating_add) == self.blocks.len() as u64
    }
}

/// Writes an id that may be none.
pub fn put_optional(out: &mut BytesMut, id: Option<u128>) {
    out.put_flag(id.is_some());
    out.put_u128_le(id.unwrap_or(0));
}

/// Writes a part, without the bytes of its blocks.
pub fn put_part(out: &mut BytesMut, part: &Part) {
    out.put_count(part.ranges.len());
    for range in &part.ranges {
        out.put_u64_le(range.lba);
        out.put_u64_le(range.blocks);
        out.put_flag(range.hole);
    }
    out.put_count(part.blocks.len());
    part.blocks.iter().for_each(|block| out.put_u32_le(block.crc));
    put_optional(out, part.next.map(u128::from));
}
