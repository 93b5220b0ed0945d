//! Nodes of the map and their encodings.
//!
//! A leaf covers 256 blocks: for each, the version (LSN), the place (a block number of the pool;
//! 0: a hole) and the CRC32C. An interior node has 128 children, each a node or a hole that
//! spans the child's whole range; a child's slot carries place, length, checksum and newest
//! version, so that a walk for "changed since" skips what is older.

use quoin_types::crc32c;

use crate::map::tree::{BlockAt, LOST_PLACE};

pub const LEAF_SHIFT: u32 = 8;
pub const LEAF_BLOCKS: usize = 1 << LEAF_SHIFT;
pub const FANOUT_SHIFT: u32 = 7;
pub const FANOUT: usize = 1 << FANOUT_SHIFT;
/// No encoded node is longer.
pub const NODE_LENGTH_MAX: usize = 8 + LEAF_BLOCKS * 20;
/// Levels above the leaves that 2^44 blocks need.
pub const LEVEL_MAX: u8 = 6;

const DENSE: u8 = 1;
const RUNS: u8 = 2;
const INTERIOR: u8 = 3;

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
                out.push(INTERIOR);
                for (i, child) in children.iter().enumerate() {
                    match child {
                        Child::Hole(0) => {}
                        Child::Hole(lsn) => {
                            out.extend_from_slice(&[i as u8, 0]);
                            out.extend_from_slice(&lsn.to_le_bytes());
                        }
                        Child::Node(node) => {
                            out.extend_from_slice(&[i as u8, 1]);
                            encode_ref(node, out);
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
            (0, DENSE) => decode_dense(rest),
            (0, RUNS) => decode_runs(rest),
            (1.., INTERIOR) => decode_interior(rest),
            _ => None,
        }
    }

    /// Decodes what was read at `node`, if it is what the parent says it must be.
    pub fn decode_checked(level: u8, node: &NodeRef, bytes: &[u8]) -> Option<Node> {
        (crc32c(bytes) == node.crc).then(|| Node::decode(level, bytes)).flatten()
    }
}

pub fn encode_ref(node: &NodeRef, out: &mut Vec<u8>) {
    out.extend_from_slice(&node.place.to_le_bytes());
    out.extend_from_slice(&node.length.to_le_bytes());
    out.extend_from_slice(&node.crc.to_le_bytes());
    out.extend_from_slice(&node.newest.to_le_bytes());
}

fn encode_leaf(leaf: &Leaf, out: &mut Vec<u8>) {
    let start = out.len();
    out.push(RUNS);
    let mut at = 0;
    while at < LEAF_BLOCKS {
        let length = 1 + (at + 1..LEAF_BLOCKS).take_while(|i| leaf.continues(*i)).count();
        let BlockAt { version, place, .. } = leaf.blocks[at];
        out.extend_from_slice(&[(length - 1) as u8, u8::from(place != 0)]);
        out.extend_from_slice(&version.to_le_bytes());
        if place != 0 {
            out.extend_from_slice(&place.to_le_bytes());
            for block in &leaf.blocks[at..at + length] {
                out.extend_from_slice(&block.crc.to_le_bytes());
            }
        }
        at += length;
    }
    if out.len() - start > 1 + LEAF_BLOCKS * 20 {
        out.truncate(start);
        out.push(DENSE);
        for block in &leaf.blocks {
            out.extend_from_slice(&block.version.to_le_bytes());
            out.extend_from_slice(&block.place.to_le_bytes());
            out.extend_from_slice(&block.crc.to_le_bytes());
        }
    }
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|a| a[0])
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

fn decode_dense(bytes: &[u8]) -> Option<Node> {
    let mut cursor = Cursor(bytes);
    let mut leaf = Leaf::hole(0);
    for i in 0..LEAF_BLOCKS {
        leaf.blocks[i].version = cursor.u64()?;
        leaf.blocks[i].place = cursor.u64()?;
        leaf.blocks[i].crc = cursor.u32()?;
    }
    cursor.0.is_empty().then_some(Node::Leaf(leaf))
}

fn decode_runs(bytes: &[u8]) -> Option<Node> {
    let mut cursor = Cursor(bytes);
    let mut leaf = Leaf::hole(0);
    let mut at = 0;
    while at < LEAF_BLOCKS {
        let length = usize::from(cursor.u8()?) + 1;
        let is_data = cursor.u8()? == 1;
        let version = cursor.u64()?;
        let run = leaf.blocks.get_mut(at..at + length)?;
        run.fill(BlockAt { version, place: 0, crc: 0 });
        if is_data {
            let place = cursor.u64()?;
            for (offset, block) in run.iter_mut().enumerate() {
                block.place = place.checked_add(offset as u64)?;
                block.crc = cursor.u32()?;
            }
        }
        at += length;
    }
    cursor.0.is_empty().then_some(Node::Leaf(leaf))
}

fn decode_interior(bytes: &[u8]) -> Option<Node> {
    let mut cursor = Cursor(bytes);
    let mut children = Box::new([Child::EMPTY; FANOUT]);
    while !cursor.0.is_empty() {
        let slot = children.get_mut(usize::from(cursor.u8()?))?;
        *slot = match cursor.u8()? {
            0 => Child::Hole(cursor.u64()?),
            1 => Child::Node(NodeRef {
                place: cursor.u64()?,
                length: cursor.u32()?,
                crc: cursor.u32()?,
                newest: cursor.u64()?,
            }),
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
