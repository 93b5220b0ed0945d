//! Nodes of the map and their encodings.
//!
//! A leaf covers 256 blocks: for each, the version (LSN), the place (a block number of the pool;
//! 0: a hole) and the CRC32C. An interior node has 128 children, each a node or a hole that
//! spans the child's whole range; a child's slot carries place, length, checksum and newest
//! version, so that a walk for "changed since" skips what is older.

use std::sync::Arc;

use quoin_types::crc32c;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::format::take;

pub const LEAF_SHIFT: u32 = 8;
pub const LEAF_BLOCKS: usize = 1 << LEAF_SHIFT;
pub const FANOUT_SHIFT: u32 = 7;
pub const FANOUT: usize = 1 << FANOUT_SHIFT;
/// No encoded node is longer.
pub const NODE_LENGTH_MAX: usize = 8 + LEAF_BLOCKS * size_of::<BlockOnDisk>();
/// Levels above the leaves that 2^44 blocks need.
pub const LEVEL_MAX: u8 = 6;

/// The first byte of a node: a leaf of 256 [`BlockOnDisk`].
const DENSE: u8 = 1;
/// The first byte of a node: a leaf of runs, each a [`RunOnDisk`] and what it says.
const RUNS: u8 = 2;
/// The first byte of a node: an interior one, of [`SlotOnDisk`] and what each says.
const INTERIOR: u8 = 3;

/// A block of a dense leaf.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | version |
/// | 8 | 8 | place; 0: a hole |
/// | 16 | 4 | CRC32C |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct BlockOnDisk {
    version: U64,
    place: U64,
    crc: U32,
}
const _: () = assert!(size_of::<BlockOnDisk>() == 20);

/// A run of blocks. Where it is of data the place of the first one follows (8), then a CRC32C (4)
/// for each.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | blocks − 1 |
/// | 1 | 1 | 1: data, 0: a hole |
/// | 2 | 8 | version |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RunOnDisk {
    blocks_less_one: u8,
    is_data: u8,
    version: U64,
}
const _: () = assert!(size_of::<RunOnDisk>() == 10);

/// A child of an interior node that was written: followed by the version (8) of a hole, or by a
/// [`RefOnDisk`].
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | index |
/// | 1 | 1 | 0: a hole, 1: a node |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SlotOnDisk {
    index: u8,
    is_node: u8,
}
const _: () = assert!(size_of::<SlotOnDisk>() == 2);

/// A reference to a node.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | place, in bytes |
/// | 8 | 4 | length; 2³² − 1: the node is lost |
/// | 12 | 4 | CRC32C |
/// | 16 | 8 | newest version inside |
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RefOnDisk {
    place: U64,
    length: U32,
    crc: U32,
    newest: U64,
}
const _: () = assert!(size_of::<RefOnDisk>() == 24);

impl From<NodeRef> for RefOnDisk {
    fn from(node: NodeRef) -> Self {
        RefOnDisk {
            place: node.place.into(),
            length: node.length.into(),
            crc: node.crc.into(),
            newest: node.newest.into(),
        }
    }
}

impl From<RefOnDisk> for NodeRef {
    fn from(raw: RefOnDisk) -> Self {
        NodeRef {
            place: raw.place.get(),
            length: raw.length.get(),
            crc: raw.crc.get(),
            newest: raw.newest.get(),
        }
    }
}

/// State of a block in a map.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockAt {
    pub version: u64,
    /// 0: a hole. [`BAD_PLACE`]: the map is damaged here.
    pub place: u64,
    pub crc: u32,
}

pub const BAD_PLACE: u64 = u64::MAX;
/// The place of a block in a leaf that took the place of a damaged one: what it held is unknown.
pub const LOST_PLACE: u64 = u64::MAX - 1;
/// The place of a block whose content is that of the replica's base, with a version of its own.
pub const BASE_PLACE: u64 = u64::MAX - 2;
/// The place of a block of a clone that was never written, where its base, which shows elsewhere, does
/// not say so: the map of the base is damaged there, and a peer knows.
pub const HOLE_PLACE: u64 = u64::MAX - 3;

/// A version of the map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root {
    /// Levels above the leaves.
    pub level: u8,
    pub child: Child,
}

impl Default for Root {
    fn default() -> Self {
        Root { level: 0, child: Child::EMPTY }
    }
}

/// Where a node lies and what it must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct NodeRef {
    /// Byte offset in the pool.
    pub place: u64,
    pub length: u32,
    pub crc: u32,
    /// The newest version inside.
    pub newest: u64,
}

impl NodeRef {
    /// Whether a node can be of this length; that of one that is known to be lost is not.
    pub fn is_possible(&self) -> bool {
        self.length as usize <= NODE_LENGTH_MAX
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Child {
    /// The whole range is one hole of this version; 0: never written.
    Hole(u64),
    Node(NodeRef),
}

impl Child {
    pub const EMPTY: Child = Child::Hole(0);

    pub fn newest(&self) -> u64 {
        match self {
            Child::Hole(lsn) => *lsn,
            Child::Node(node) => node.newest,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Side by side: a read looks at one of them, which memory then brings at once.
    pub blocks: [BlockAt; LEAF_BLOCKS],
}

impl Leaf {
    pub fn hole(lsn: u64) -> Box<Self> {
        Box::new(Leaf { blocks: [BlockAt { version: lsn, place: 0, crc: 0 }; LEAF_BLOCKS] })
    }

    /// The one version that all blocks are holes of.
    pub fn as_hole(&self) -> Option<u64> {
        let lsn = self.blocks[0].version;
        let uniform = self.blocks.iter().all(|b| b.place == 0 && b.version == lsn);
        uniform.then_some(lsn)
    }

    /// Whether block `i` continues the run of block `i - 1`.
    fn continues(&self, i: usize) -> bool {
        let (before, block) = (&self.blocks[i - 1], &self.blocks[i]);
        block.version == before.version
            && match before.place {
                0 => block.place == 0,
                // A lost block is a run of its own.
                place => block.place < LOST_PLACE && block.place == place.wrapping_add(1),
            }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    Leaf(Box<Leaf>),
    Interior(Box<[Child; FANOUT]>),
}

impl Node {
    pub fn newest(&self) -> u64 {
        match self {
            Node::Leaf(leaf) => leaf.blocks.iter().map(|b| b.version).max().unwrap_or(0),
            Node::Interior(children) => children.iter().map(Child::newest).max().unwrap_or(0),
        }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Node::Leaf(leaf) => encode_leaf(leaf, out),
            Node::Interior(children) => {
                out.reserve(1 + FANOUT * 26);
                out.push(INTERIOR);
                for (index, child) in (0u8..).zip(children.iter()) {
                    match child {
                        Child::Hole(0) => {}
                        Child::Hole(lsn) => {
                            put(out, &SlotOnDisk { index, is_node: 0 });
                            put(out, &U64::new(*lsn));
                        }
                        Child::Node(node) => {
                            put(out, &SlotOnDisk { index, is_node: 1 });
                            put(out, &RefOnDisk::from(*node));
                        }
                    }
                }
            }
        }
    }

    /// `None`: not the encoding of a node of this level.
    pub fn decode(level: u8, bytes: &[u8]) -> Option<Node> {
        let (kind, rest) = bytes.split_first()?;
        match (level, *kind) {
            (0, _) => {
                let mut leaf = Leaf::hole(0);
                leaf.decode(bytes).then_some(Node::Leaf(leaf))
            }
            (1.., INTERIOR) => decode_interior(rest),
            _ => None,
        }
    }

    /// Decodes what was read at `node`, if it is what the parent says it must be.
    pub fn decode_checked(level: u8, node: &NodeRef, bytes: &[u8]) -> Option<Node> {
        (crc32c(bytes) == node.crc).then(|| Node::decode(level, bytes)).flatten()
    }

    /// Decodes like [`Node::decode_checked`], where it can into a leaf that nothing refers to.
    pub fn decode_shared(
        level: u8,
        node: &NodeRef,
        bytes: &[u8],
        spare: Option<Arc<Node>>,
    ) -> Option<Arc<Node>> {
        let Some(mut spare) = spare.filter(|_| level == 0) else {
            return Node::decode_checked(level, node, bytes).map(Arc::new);
        };
        if crc32c(bytes) != node.crc {
            return None;
        }
        Node::leaf_mut(&mut spare)?.decode(bytes).then_some(spare)
    }

    /// A leaf that nothing else refers to, to be changed.
    pub fn leaf_mut(node: &mut Arc<Node>) -> Option<&mut Leaf> {
        match Arc::get_mut(node)? {
            Node::Leaf(leaf) => Some(leaf),
            Node::Interior(_) => None,
        }
    }
}

fn put(out: &mut Vec<u8>, part: &(impl IntoBytes + Immutable)) {
    out.extend_from_slice(part.as_bytes());
}

fn encode_leaf(leaf: &Leaf, out: &mut Vec<u8>) {
    // The shorter encoding is known before anything is written.
    let mut starts = [0u64; LEAF_BLOCKS / 64];
    let mut length = 1;
    for (i, block) in leaf.blocks.iter().enumerate() {
        let is_data = block.place != 0;
        if i == 0 || !leaf.continues(i) {
            starts[i / 64] |= 1 << (i % 64);
            length += if is_data { 18 } else { 10 };
        }
        length += if is_data { 4 } else { 0 };
    }
    if length > 1 + LEAF_BLOCKS * 20 {
        out.reserve(1 + LEAF_BLOCKS * 20);
        out.push(DENSE);
        for block in &leaf.blocks {
            let mut row = [0; 20];
            row[..8].copy_from_slice(&block.version.to_le_bytes());
            row[8..16].copy_from_slice(&block.place.to_le_bytes());
            row[16..].copy_from_slice(&block.crc.to_le_bytes());
            out.extend_from_slice(&row);
        }
        return;
    }
    out.reserve(length);
    out.push(RUNS);
    let mut at = 0;
    while at < LEAF_BLOCKS {
        let end = next_start(&starts, at + 1);
        let BlockAt { version, place, .. } = leaf.blocks[at];
        let (blocks_less_one, is_data) = ((end - at - 1) as u8, u8::from(place != 0));
        put(out, &RunOnDisk { blocks_less_one, is_data, version: version.into() });
        if place != 0 {
            put(out, &U64::new(place));
            for block in &leaf.blocks[at..end] {
                put(out, &U32::new(block.crc));
            }
        }
        at = end;
    }
}

/// The first bit from `at` on that is set, or the leaf's end.
fn next_start(starts: &[u64; LEAF_BLOCKS / 64], at: usize) -> usize {
    let mut word = at / 64;
    let Some(first) = starts.get(word) else { return LEAF_BLOCKS };
    let mut bits = first & (u64::MAX << (at % 64));
    while bits == 0 {
        word += 1;
        let Some(next) = starts.get(word) else { return LEAF_BLOCKS };
        bits = *next;
    }
    word * 64 + bits.trailing_zeros() as usize
}

impl Leaf {
    /// Takes over what is encoded; false: it is no leaf, and this one is of no meaning.
    fn decode(&mut self, bytes: &[u8]) -> bool {
        let decoded = match bytes.split_first() {
            Some((&DENSE, rest)) => self.decode_dense(rest),
            Some((&RUNS, rest)) => self.decode_runs(rest),
            _ => None,
        };
        decoded.is_some()
    }

    fn decode_dense(&mut self, bytes: &[u8]) -> Option<()> {
        let raw = <[BlockOnDisk; LEAF_BLOCKS]>::ref_from_bytes(bytes).ok()?;
        for (block, raw) in self.blocks.iter_mut().zip(raw) {
            let (version, place) = (raw.version.get(), raw.place.get());
            *block = BlockAt { version, place, crc: raw.crc.get() };
        }
        Some(())
    }

    fn decode_runs(&mut self, bytes: &[u8]) -> Option<()> {
        let mut rest = bytes;
        let mut at = 0;
        while at < LEAF_BLOCKS {
            let raw = take::<RunOnDisk>(&mut rest)?;
            let length = usize::from(raw.blocks_less_one) + 1;
            let version = raw.version.get();
            let run = self.blocks.get_mut(at..at + length)?;
            run.fill(BlockAt { version, place: 0, crc: 0 });
            if raw.is_data == 1 {
                let place = take::<U64>(&mut rest)?.get();
                for (offset, block) in (0u64..).zip(run) {
                    block.place = place.checked_add(offset)?;
                    block.crc = take::<U32>(&mut rest)?.get();
                }
            }
            at += length;
        }
        rest.is_empty().then_some(())
    }
}

fn decode_interior(bytes: &[u8]) -> Option<Node> {
    let mut rest = bytes;
    let mut children = Box::new([Child::EMPTY; FANOUT]);
    while !rest.is_empty() {
        let raw = take::<SlotOnDisk>(&mut rest)?;
        let slot = children.get_mut(usize::from(raw.index))?;
        *slot = match raw.is_node {
            0 => Child::Hole(take::<U64>(&mut rest)?.get()),
            1 => Child::Node((*take::<RefOnDisk>(&mut rest)?).into()),
            _ => return None,
        };
    }
    Some(Node::Interior(children))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn leaves_survive_their_encoding_and_never_outgrow_the_dense_one(
            runs in prop::collection::vec((1usize..40, 0u64..3, 0u64..50), 1..60),
        ) {
            let mut leaf = Leaf::hole(0);
            let mut at = 0;
            for (length, lsn, place) in runs {
                for i in at..(at + length).min(LEAF_BLOCKS) {
                    leaf.blocks[i].version = lsn;
                    leaf.blocks[i].place = if place == 0 { 0 } else { place + (i - at) as u64 };
                    leaf.blocks[i].crc = if place == 0 { 0 } else { i as u32 };
                }
                at = (at + length).min(LEAF_BLOCKS);
            }
            let node = Node::Leaf(leaf);
            let mut bytes = Vec::new();
            node.encode(&mut bytes);
            prop_assert!(bytes.len() <= NODE_LENGTH_MAX);
            prop_assert_eq!(Node::decode(0, &bytes), Some(node));
            prop_assert_eq!(Node::decode(1, &bytes), None);
        }

        #[test]
        fn garbage_never_panics(level in 0u8..2, bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
            let _ = Node::decode(level, &bytes);
        }
    }

    #[test]
    fn a_sequential_leaf_takes_one_run() {
        let mut leaf = Leaf::hole(7);
        for i in 0..LEAF_BLOCKS {
            leaf.blocks[i].place = 100 + i as u64;
        }
        let mut bytes = Vec::new();
        Node::Leaf(leaf).encode(&mut bytes);
        assert_eq!(bytes.len(), 1 + 2 + 8 + 8 + 4 * LEAF_BLOCKS);
    }
}
