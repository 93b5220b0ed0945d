//! Entries of a volume's history: the unit of order and of the log on disk.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use crate::client::Part;
use crate::codec::{Malformed, Reader, Writer};
use crate::ids::{ClientId, Epoch, Lsn, Position, ReplicaGuid, ReplicaId, SnapshotId, VolumeId};
use crate::membership::{Durability, Member, REPLICAS_MAX};
use crate::{BLOCK_SIZE, HOLE_BLOCKS_MAX, VOLUME_BLOCKS_MAX, WRITE_BLOCKS_MAX, crc32c};

/// Bytes of every entry in the chain: the chain before it, and its fixed fields.
const CHAIN_HEAD: usize = 45;
/// Blocks of a small write: its chain is computed in a buffer that is cleared in no time.
const SMALL_WRITE_BLOCKS: usize = 16;

/// Running 64-bit checksum over all entry headers so far. Equal (epoch, LSN) must mean equal chain,
/// on every replica of one volume (OneContent).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Chain(pub u64);

impl Chain {
    /// The chain with which the history of a clone begins: of a snapshot of another volume, which has
    /// this chain. All replicas of the clone begin with the same.
    pub fn of_clone(source: VolumeId, snapshot: SnapshotId, lsn: Lsn, chain: Chain) -> Self {
        let mut bytes = [0u8; 48];
        bytes[..16].copy_from_slice(&source.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&snapshot.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&lsn.0.to_le_bytes());
        bytes[40..].copy_from_slice(&chain.0.to_le_bytes());
        Chain(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes))
    }
}

/// The in-sync set, and the rules by which the entries from here on are counted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct View {
    pub in_sync: Vec<Member>,
    pub rule: Rule,
    /// The second rule while a membership change is joint.
    pub joint: Option<Rule>,
    pub durability: Durability,
    /// Set if this open may have lost acknowledged writes that were never flushed
    /// (UnflushedTailMayBeLost). Later Views repeat it until an epoch with IO has followed.
    pub unflushed_tail_lost: bool,
}

/// One membership, as entries are counted under it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rule {
    pub membership_version: u64,
    pub rf: u8,
    pub cf: u8,
    pub known: Vec<Member>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EntryKind {
    Write,
    /// Blocks become holes; storage may be freed.
    Trim,
    /// Blocks read as zeroes; `no_hole` asks to keep them allocated.
    Zero {
        no_hole: bool,
    },
    Snapshot {
        id: SnapshotId,
        /// Set for a snapshot that serves a rebuild or a transfer; users do not see it.
        hidden: bool,
    },
    DeleteSnapshot {
        id: SnapshotId,
    },
    Revert {
        id: SnapshotId,
    },
    Resize {
        blocks: u64,
    },
    View(Box<View>),
    /// A client's requests are known from here on ([`crate::client`]).
    BeginClient {
        client: ClientId,
    },
    /// Requests of the client are refused from here on.
    EndClient {
        client: ClientId,
    },
}

impl EntryKind {
    /// Returns the stable number of the kind, on the wire and on disk. 0 is never used.
    pub fn code(&self) -> u8 {
        match self {
            EntryKind::Write => 1,
            EntryKind::Trim => 2,
            EntryKind::Zero { .. } => 3,
            EntryKind::Snapshot { .. } => 4,
            EntryKind::DeleteSnapshot { .. } => 5,
            EntryKind::Revert { .. } => 6,
            EntryKind::Resize { .. } => 7,
            EntryKind::View(_) => 8,
            EntryKind::BeginClient { .. } => 9,
            EntryKind::EndClient { .. } => 10,
        }
    }

    /// Encodes the fields of the kind beside LBA and length; empty for `Write` and `Trim`.
    pub fn encode_payload(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            EntryKind::Write | EntryKind::Trim => {}
            EntryKind::Zero { no_hole } => out.put_flag(*no_hole),
            EntryKind::Snapshot { id, hidden } => {
                out.put_u128_le(id.0);
                out.put_flag(*hidden);
            }
            EntryKind::DeleteSnapshot { id } | EntryKind::Revert { id } => out.put_u128_le(id.0),
            EntryKind::Resize { blocks } => out.put_u64_le(*blocks),
            EntryKind::View(view) => view.encode(&mut out),
            EntryKind::BeginClient { client } | EntryKind::EndClient { client } => {
                out.put_u128_le(client.0);
            }
        }
        out.freeze()
    }

    pub fn decode(code: u8, payload: Bytes) -> Result<Self, Malformed> {
        let mut r = Reader::new(payload);
        let snapshot = |r: &mut Reader| r.u128("snapshot id").map(SnapshotId);
        let kind = match code {
            1 => EntryKind::Write,
            2 => EntryKind::Trim,
            3 => EntryKind::Zero { no_hole: r.bool("no_hole flag")? },
            4 => EntryKind::Snapshot { id: snapshot(&mut r)?, hidden: r.bool("hidden flag")? },
            5 => EntryKind::DeleteSnapshot { id: snapshot(&mut r)? },
            6 => EntryKind::Revert { id: snapshot(&mut r)? },
            7 => {
                let blocks = r.u64("resize")?;
                if blocks == 0 || blocks > VOLUME_BLOCKS_MAX {
                    return Err(Malformed("resize"));
                }
                EntryKind::Resize { blocks }
            }
            8 => EntryKind::View(Box::new(View::decode(&mut r)?)),
            9 => EntryKind::BeginClient { client: ClientId(r.u128("client")?) },
            10 => EntryKind::EndClient { client: ClientId(r.u128("client")?) },
            _ => return Err(Malformed("entry kind (from a newer version?)")),
        };
        r.end("entry payload")?;
        Ok(kind)
    }

    /// Returns true for kinds that change what a volume's users read.
    pub fn changes_content(&self) -> bool {
        match self {
            EntryKind::Write
            | EntryKind::Trim
            | EntryKind::Zero { .. }
            | EntryKind::Revert { .. } => true,
            EntryKind::Snapshot { .. }
            | EntryKind::DeleteSnapshot { .. }
            | EntryKind::Resize { .. }
            | EntryKind::View(_)
            | EntryKind::BeginClient { .. }
            | EntryKind::EndClient { .. } => false,
        }
    }

    /// Returns true for kinds that a replica makes durable before it answers Applied (R2): Views,
    /// Reverts and Resizes. A snapshot is answered at stable, so its entry waits for no sync.
    pub fn is_durable_first(&self) -> bool {
        matches!(self, EntryKind::View(_) | EntryKind::Revert { .. } | EntryKind::Resize { .. })
    }
}

pub(crate) fn encode_members(members: &[Member], out: &mut BytesMut) {
    out.put_count(members.len());
    for m in members {
        out.put_u128_le(m.id.0);
        out.put_u128_le(m.guid.0);
    }
}

pub(crate) fn decode_members(r: &mut Reader) -> Result<Vec<Member>, Malformed> {
    let n = r.count(32, "members")?;
    if n > REPLICAS_MAX {
        return Err(Malformed("members"));
    }
    (0..n)
        .map(|_| {
            Ok(Member { id: ReplicaId(r.u128("member")?), guid: ReplicaGuid(r.u128("member")?) })
        })
        .collect()
}

impl Rule {
    fn encode(&self, out: &mut BytesMut) {
        out.put_u64_le(self.membership_version);
        out.put_u8(self.rf);
        out.put_u8(self.cf);
        encode_members(&self.known, out);
    }

    fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let rule = Rule {
            membership_version: r.u64("view rule")?,
            rf: r.u8("view rule")?,
            cf: r.u8("view rule")?,
            known: decode_members(r)?,
        };
        if rule.rf == 0 || rule.cf == 0 || rule.cf > rule.rf || rule.known.len() > rule.rf.into() {
            return Err(Malformed("view rule"));
        }
        Ok(rule)
    }
}

impl View {
    pub fn encode(&self, out: &mut BytesMut) {
        encode_members(&self.in_sync, out);
        self.rule.encode(out);
        out.put_flag(self.joint.is_some());
        if let Some(joint) = &self.joint {
            joint.encode(out);
        }
        out.put_u8(match self.durability {
            Durability::Cache => 0,
            Durability::Media => 1,
        });
        out.put_flag(self.unflushed_tail_lost);
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        Ok(View {
            in_sync: decode_members(r)?,
            rule: Rule::decode(r)?,
            joint: if r.bool("joint flag")? { Some(Rule::decode(r)?) } else { None },
            durability: match r.u8("durability")? {
                0 => Durability::Cache,
                1 => Durability::Media,
                _ => return Err(Malformed("durability")),
            },
            unflushed_tail_lost: r.bool("view mark")?,
        })
    }
}

/// One entry. Sends, the window and the log share it without copying: see [`SharedEntry`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub epoch: Epoch,
    pub lsn: Lsn,
    pub kind: EntryKind,
    /// First internal block; 0 for kinds without a range.
    pub lba: u64,
    /// Length in internal blocks; 0 for kinds without a range.
    pub blocks: u32,
    /// CRC32C of each block of a `Write`; empty otherwise.
    pub crcs: Vec<u32>,
    /// Exactly `blocks * 4096` bytes for a `Write`; empty otherwise.
    pub data: Bytes,
    /// The history chain up to and including this entry.
    pub chain: Chain,
    /// The entry is durable before Applied (a client's FUA).
    pub fua: bool,
    /// The request that a `Write`, `Trim` or `Zero` is of, if its client numbers them.
    pub part: Option<Part>,
}

pub type SharedEntry = Arc<Entry>;

impl Entry {
    /// Flags of an entry, on the wire and on disk.
    pub const FLAG_FUA: u8 = 1;
    pub const FLAG_PART: u8 = 2;

    pub fn flags(&self) -> u8 {
        let part = if self.part.is_some() { Self::FLAG_PART } else { 0 };
        if self.fua { Self::FLAG_FUA | part } else { part }
    }

    /// Builds the entry that follows `previous`, with its checksums and chain.
    pub fn after(
        previous: Chain,
        position: Position,
        kind: EntryKind,
        lba: u64,
        blocks: u32,
        data: Bytes,
        fua: bool,
    ) -> Self {
        Self::part_after(previous, position, kind, lba, blocks, data, fua, None)
    }

    /// Builds the entry that follows `previous`, as a part of a client's request.
    #[allow(clippy::too_many_arguments)]
    pub fn part_after(
        previous: Chain,
        position: Position,
        kind: EntryKind,
        lba: u64,
        blocks: u32,
        data: Bytes,
        fua: bool,
        part: Option<Part>,
    ) -> Self {
        let crcs = data.chunks_exact(BLOCK_SIZE).map(crc32c).collect();
        let mut entry = Entry {
            epoch: position.epoch,
            lsn: position.lsn,
            kind,
            lba,
            blocks,
            crcs,
            data,
            chain: Chain(0),
            fua,
            part,
        };
        entry.chain = entry.chain_after(previous);
        entry
    }

    pub fn position(&self) -> Position {
        Position { epoch: self.epoch, lsn: self.lsn }
    }

    /// Returns the chain that this entry must carry after an entry with chain `previous`. `fua` is
    /// not included: it concerns the answer, not the content.
    pub fn chain_after(&self, previous: Chain) -> Chain {
        let mut head = [0u8; CHAIN_HEAD];
        head[..8].copy_from_slice(&previous.0.to_le_bytes());
        head[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        head[16..24].copy_from_slice(&self.lsn.0.to_le_bytes());
        head[24..32].copy_from_slice(&self.lba.to_le_bytes());
        head[32..36].copy_from_slice(&self.blocks.to_le_bytes());
        head[36] = self.kind.code();
        if matches!(self.kind, EntryKind::Write | EntryKind::Trim) && self.part.is_none() {
            // One pass over one contiguous buffer: a checksum fed in parts costs several times as
            // much.
            if self.crcs.len() <= SMALL_WRITE_BLOCKS {
                let mut bytes = [0u8; CHAIN_HEAD + 4 * SMALL_WRITE_BLOCKS];
                return self.chain_in(&head, &mut bytes);
            }
            if self.crcs.len() <= WRITE_BLOCKS_MAX as usize {
                let mut bytes = [0u8; CHAIN_HEAD + 4 * WRITE_BLOCKS_MAX as usize];
                return self.chain_in(&head, &mut bytes);
            }
        }
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        digest.update(&head);
        for crc in &self.crcs {
            digest.update(&crc.to_le_bytes());
        }
        if !matches!(self.kind, EntryKind::Write | EntryKind::Trim) {
            digest.update(&self.kind.encode_payload());
        }
        if let Some(part) = &self.part {
            digest.update(&part.to_bytes());
        }
        Chain(digest.finalize())
    }

    /// Computes the chain of a write or trim in a buffer with room for its checksums.
    fn chain_in(&self, head: &[u8; CHAIN_HEAD], bytes: &mut [u8]) -> Chain {
        bytes[..CHAIN_HEAD].copy_from_slice(head);
        for (to, crc) in bytes[CHAIN_HEAD..].chunks_exact_mut(4).zip(&self.crcs) {
            to.copy_from_slice(&crc.to_le_bytes());
        }
        let bytes = &bytes[..CHAIN_HEAD + 4 * self.crcs.len()];
        Chain(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes))
    }

    /// Returns true if the entry may change blocks of `[lba, lba + blocks)`. A Revert may change
    /// any block.
    pub fn overlaps(&self, lba: u64, blocks: u64) -> bool {
        if matches!(self.kind, EntryKind::Revert { .. }) && blocks > 0 {
            return true;
        }
        self.blocks > 0 && self.lba < lba + blocks && lba < self.lba + u64::from(self.blocks)
    }

    /// Checks the shape that every entry from a peer or a disk must have. Checksums of data are
    /// checked separately.
    pub fn check(&self) -> Result<(), Malformed> {
        let (range_max, data_blocks) = match self.kind {
            EntryKind::Write => (WRITE_BLOCKS_MAX, self.blocks as usize),
            EntryKind::Trim | EntryKind::Zero { .. } => (HOLE_BLOCKS_MAX, 0),
            _ => (0, 0),
        };
        if self.blocks > range_max || (range_max > 0 && self.blocks == 0) {
            return Err(Malformed("entry length"));
        }
        if self.lba > VOLUME_BLOCKS_MAX || self.lba + u64::from(self.blocks) > VOLUME_BLOCKS_MAX {
            return Err(Malformed("entry LBA"));
        }
        if self.data.len() != data_blocks * BLOCK_SIZE || self.crcs.len() != data_blocks {
            return Err(Malformed("entry data"));
        }
        let end = self.lba + u64::from(self.blocks);
        if self.part.is_some_and(|part| range_max == 0 || part.end != end) {
            return Err(Malformed("entry of a client's request"));
        }
        Ok(())
    }

    /// Verifies the data against the block checksums of the entry.
    pub fn data_is_good(&self) -> bool {
        self.data.chunks_exact(BLOCK_SIZE).map(crc32c).eq(self.crcs.iter().copied())
    }

    /// Bytes counted for the entry in limits of a window or a frame.
    pub fn weight(&self) -> usize {
        self.data.len() + self.crcs.len() * 4 + 128
    }
}
