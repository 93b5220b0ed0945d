//! Nodes of the map and their encodings.
//!
//! A leaf covers 256 blocks: for each, the version (LSN), the place (a block number of the pool;
//! 0: a hole) and the CRC32C. An interior node has 128 children, each a node or a hole that
//! spans the child's whole range; a child's slot carries place, length, checksum and newest
//! version, so that a walk for "changed since" skips what is older.

use std::sync::Arc;

use quoin_types::crc32c;

use crate::tree::{BlockAt, LOST_PLACE};

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
                out.reserve(1 + FANOUT * 26);
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

pub fn encode_ref(node: &NodeRef, out: &mut Vec<u8>) {
    out.extend_from_slice(&node.place.to_le_bytes());
    out.extend_from_slice(&node.length.to_le_bytes());
    out.extend_from_slice(&node.crc.to_le_bytes());
    out.extend_from_slice(&node.newest.to_le_bytes());
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
        let mut head = [0; 18];
        (head[0], head[1]) = ((end - at - 1) as u8, u8::from(place != 0));
        head[2..10].copy_from_slice(&version.to_le_bytes());
        head[10..].copy_from_slice(&place.to_le_bytes());
        out.extend_from_slice(if place == 0 { &head[..10] } else { &head });
        if place != 0 {
            for block in &leaf.blocks[at..end] {
                out.extend_from_slice(&block.crc.to_le_bytes());
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
        let (rows, rest) = bytes.as_chunks::<20>();
        if rows.len() != LEAF_BLOCKS || !rest.is_empty() {
            return None;
        }
        for (block, row) in self.blocks.iter_mut().zip(rows) {
            let mut cursor = Cursor(row);
            *block = BlockAt { version: cursor.u64()?, place: cursor.u64()?, crc: cursor.u32()? };
        }
        Some(())
    }

    fn decode_runs(&mut self, bytes: &[u8]) -> Option<()> {
        let mut cursor = Cursor(bytes);
        let mut at = 0;
        while at < LEAF_BLOCKS {
            let length = usize::from(cursor.u8()?) + 1;
            let is_data = cursor.u8()? == 1;
            let version = cursor.u64()?;
            let run = self.blocks.get_mut(at..at + length)?;
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
        cursor.0.is_empty().then_some(())
    }
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
