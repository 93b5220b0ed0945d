//! The map: a copy-on-write radix tree from LBA to {version, place, checksum}.
//!
//! A [`Root`] is a value of a few bytes: a snapshot is a copy of it. All nodes are on disk;
//! [`update`] writes the changed ones anew and shares the rest. Nodes are read and written
//! through [`Nodes`], so the tree knows nothing of segments.

use std::cmp::Ordering;
use std::sync::Arc;

use quoin_replication::replica::store::StoreError;
use quoin_types::key_map::KeyMap;
use quoin_types::mutant;

use crate::clones::lookup::shows_base;
use crate::format::node::{
    BAD_PLACE, BlockAt, Child, FANOUT, FANOUT_SHIFT, LEAF_BLOCKS, LEAF_SHIFT, LEVEL_MAX,
    LOST_PLACE, Leaf, Node, NodeRef, Root,
};
use crate::replica::may_lack;

/// Where nodes come from and go to.
pub trait Nodes {
    /// `Ok(None)`: the node is damaged.
    fn load(&mut self, level: u8, node: &NodeRef) -> Result<Option<Arc<Node>>, StoreError>;
    /// An update met a damaged node over the LBAs from `base` on. `Ok`: a lost one takes its
    /// place; an error ends the update.
    fn damaged(&mut self, level: u8, base: u64, node: &NodeRef) -> Result<(), StoreError>;
    fn write(&mut self, level: u8, base: u64, node: Arc<Node>) -> Result<NodeRef, StoreError>;
    /// A leaf that nothing else refers to, whatever it holds: to be filled and written.
    fn spare_leaf(&mut self) -> Arc<Node> {
        Arc::new(Node::Leaf(Leaf::hole(0)))
    }
    /// The leaf is not written after all.
    fn not_changed(&mut self, _leaf: Arc<Node>) {}
    /// A data block is no longer at this place in the tree that was updated.
    fn replaced(&mut self, lba: u64, place: u64, version: u64);
    /// A node over the LBAs from `base` on is no longer part of the tree that was updated.
    fn node_replaced(&mut self, level: u8, base: u64, node: &NodeRef);
}

/// Blocks that a node of a level covers.
fn span(level: u8) -> u64 {
    1 << (LEAF_SHIFT + FANOUT_SHIFT * u32::from(level))
}

/// Replacement of a damaged node: every block under it is known to be lost, and can be mended or
/// overwritten one by one.
fn lost(level: u8, newest: u64) -> Node {
    if level == 0 {
        let mut leaf = Leaf::hole(newest);
        leaf.blocks.fill(BlockAt { version: newest, place: LOST_PLACE, crc: 0 });
        return Node::Leaf(leaf);
    }
    Node::Interior(Box::new([lost_child(newest); FANOUT]))
}

/// A node that is known to be lost: none that can be read is ever this long.
fn lost_child(newest: u64) -> Child {
    Child::Node(NodeRef { place: 0, length: u32::MAX, crc: 0, newest })
}

/// Change of a map. Edits are handed over in ascending order and do not overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edit {
    pub lba: u64,
    pub blocks: u32,
    pub change: Change,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Hole {
        version: u64,
    },
    /// Contiguous blocks whose checksums are `crcs[crc_at..]`.
    Data {
        version: u64,
        place: u64,
        crc_at: u32,
    },
    /// The blocks had some content of this version, and where it is is not known.
    Lost {
        version: u64,
    },
    /// Contiguous blocks of a base, only where the base shows: with this version, or that of a change
    /// that went back to it.
    Fill {
        version: u64,
        place: u64,
        crc_at: u32,
    },
    /// The same for a hole of the base.
    FillHole {
        version: u64,
    },
    /// Only where the map still has the block at `from`.
    Move {
        from: u64,
        to: u64,
    },
    /// Write the node again that lies at this byte place, where the map has it. What the node was
    /// written with says in which part of which map it can be: no other is looked at.
    Renew {
        place: u64,
        level: u8,
        newest: u64,
    },
    /// Nothing, but that a node on the way that cannot be read becomes a lost one.
    Reach,
}

impl Edit {
    fn end(&self) -> u64 {
        self.lba + u64::from(self.blocks)
    }

    /// Returns true if the edit needs a look at this node, which is over its LBAs. A node is never
    /// newer than those above it.
    fn concerns(&self, level: u8, node: &NodeRef) -> bool {
        let Change::Renew { place, level: own, newest } = self.change else { return true };
        match own.cmp(&level) {
            Ordering::Less if mutant::is("renewal-passes-over-views-of-its-version") => {
                newest < node.newest
            }
            Ordering::Less => newest <= node.newest,
            Ordering::Equal => place == node.place,
            Ordering::Greater => false,
        }
    }

    /// The LBA behind all that it may change.
    pub fn reach(&self) -> u64 {
        match self.change {
            Change::Renew { level, .. } => self.lba.saturating_add(span(level)),
            _ => self.end(),
        }
    }

    fn renews(&self, node: &NodeRef) -> bool {
        matches!(self.change, Change::Renew { place, .. } if place == node.place)
    }

    /// The LBAs that it is about: the first one, and the one behind the last.
    pub fn stretch(&self) -> (u64, u64) {
        (self.lba, self.end())
    }
}

/// Results for nodes that several views share, so that they go on sharing.
pub type Memo = KeyMap<Child>;

/// Applies the edits and returns the new root; the old one stays valid.
pub fn update(
    nodes: &mut impl Nodes,
    root: Root,
    edits: &[Edit],
    crcs: &[u32],
    memo: Option<&mut Memo>,
) -> Result<Root, StoreError> {
    update_some(nodes, root, edits, crcs, memo, usize::MAX).map(|(root, _)| root)
}

/// Updates a map like `update`, but stops after about `nodes_max` nodes. Returns the root and the
/// LBA below which everything was done, and from which on nothing was. The update can go on there;
/// each call advances by at least one LBA.
pub fn update_some(
    nodes: &mut impl Nodes,
    root: Root,
    edits: &[Edit],
    crcs: &[u32],
    mut memo: Option<&mut Memo>,
    nodes_max: usize,
) -> Result<(Root, Option<u64>), StoreError> {
    let Some(last) = edits.last() else { return Ok((root, None)) };
    let (mut level, mut child) = (root.level, root.child);
    let sets =
        |e: &Edit| !matches!(e.change, Change::Move { .. } | Change::Renew { .. } | Change::Reach);
    let grows = edits.iter().any(sets);
    while grows && last.end() > span(level) {
        if level == LEVEL_MAX {
            return Err(StoreError::Rule("an LBA beyond the largest volume"));
        }
        level += 1;
        if child != Child::EMPTY {
            // A hole of some version covers its old range only.
            let mut children = Box::new([Child::EMPTY; FANOUT]);
            children[0] = child;
            let node = Arc::new(Node::Interior(children));
            child = Child::Node(nodes.write(level, 0, node)?);
        }
    }
    let renews = edits.iter().any(|e| matches!(e.change, Change::Renew { .. }));
    let left = nodes_max;
    let mut walk = Walk { nodes, edits, crcs, renews, left, moved: false, stopped: None };
    let child = walk.update(child, level, 0, 0..edits.len(), &mut memo)?;
    Ok((Root { level, child }, walk.stopped))
}

struct Walk<'a, N> {
    nodes: &'a mut N,
    edits: &'a [Edit],
    crcs: &'a [u32],
    /// True if some edit is a [`Change::Renew`]: a fold compares no places.
    renews: bool,
    /// Nodes that it may still look at.
    left: usize,
    /// Whether some LBA was done.
    moved: bool,
    /// The first LBA that was left for another time.
    stopped: Option<u64>,
}

impl<N: Nodes> Walk<'_, N> {
    fn update(
        &mut self,
        child: Child,
        level: u8,
        base: u64,
        range: std::ops::Range<usize>,
        memo: &mut Option<&mut Memo>,
    ) -> Result<Child, StoreError> {
        let mut is_lost = false;
        self.left = self.left.saturating_sub(1);
        let old = match child {
            Child::Hole(_) => None,
            Child::Node(node) => {
                if !self.edits[range.clone()].iter().any(|edit| edit.concerns(level, &node)) {
                    return Ok(child);
                }
                // Lost nodes have no place of their own.
                let shared = memo.as_ref().filter(|_| node.place != 0);
                if let Some(known) = shared.and_then(|m| m.get(&node.place)) {
                    return Ok(*known);
                }
                let loaded = match self.nodes.load(level, &node)? {
                    Some(loaded) => loaded,
                    None => {
                        self.nodes.damaged(level, base, &node)?;
                        is_lost = true;
                        Arc::new(lost(level, node.newest))
                    }
                };
                Some((node, loaded))
            }
        };
        let renew = is_lost
            || self.renews
                && old.as_ref().is_some_and(|(node, _)| {
                    self.edits[range.clone()].iter().any(|edit| edit.renews(node))
                });
        let version = if let Child::Hole(version) = child { version } else { 0 };
        let new = if level == 0 {
            let mut node = self.nodes.spare_leaf();
            let leaf = Node::leaf_mut(&mut node).ok_or(StoreError::Rule("a leaf in use"))?;
            match old.as_ref().map(|(_, n)| &**n) {
                Some(Node::Leaf(old)) => leaf.blocks.copy_from_slice(&old.blocks),
                _ => leaf.blocks.fill(BlockAt { version, place: 0, crc: 0 }),
            }
            let (changed, has_data) = self.update_leaf(leaf, base, range);
            self.moved = true;
            let new = match (changed, if has_data { None } else { leaf.as_hole() }) {
                (false, _) if !renew => Some(child),
                (_, Some(version)) => Some(Child::Hole(version)),
                _ => None,
            };
            match new {
                None => Child::Node(self.nodes.write(level, base, node)?),
                Some(new) => {
                    self.nodes.not_changed(node);
                    new
                }
            }
        } else {
            let mut children = match old.as_ref().map(|(_, n)| &**n) {
                Some(Node::Interior(children)) => children.clone(),
                _ => Box::new([Child::Hole(version); FANOUT]),
            };
            let changed = self.update_children(&mut children, level, base, range, memo)?;
            let first = children[0];
            let uniform = matches!(first, Child::Hole(_)) && children.iter().all(|c| *c == first);
            match changed {
                false if !renew => child,
                _ if uniform => first,
                _ => {
                    let node = Arc::new(Node::Interior(children));
                    Child::Node(self.nodes.write(level, base, node)?)
                }
            }
        };
        if let Some((node, _)) = old {
            if new != child {
                self.nodes.node_replaced(level, base, &node);
            }
            if let Some(memo) = memo {
                memo.insert(node.place, new);
            }
        }
        Ok(new)
    }

    fn update_children(
        &mut self,
        children: &mut [Child; FANOUT],
        level: u8,
        base: u64,
        range: std::ops::Range<usize>,
        memo: &mut Option<&mut Memo>,
    ) -> Result<bool, StoreError> {
        let child_span = span(level - 1);
        let mut changed = false;
        let mut at = range.start;
        let mut next_child = 0;
        while at < range.end && next_child < FANOUT {
            let edit = &self.edits[at];
            let index = (edit.lba.saturating_sub(base) / child_span) as usize;
            let index = index.max(next_child);
            if index >= FANOUT {
                break;
            }
            let start = base + index as u64 * child_span;
            let end = start + child_span;
            if self.left == 0 && self.moved {
                self.stopped = Some(edit.lba.max(start));
                break;
            }
            let until = at + self.edits[at..range.end].partition_point(|e| e.lba < end);
            let old = children[index];
            let is_whole = edit.lba <= start && edit.end() >= end;
            let whole = match (edit.change, old) {
                (Change::Hole { version }, Child::Hole(_)) => Some(Child::Hole(version)),
                (Change::FillHole { version }, Child::Hole(0)) => Some(Child::Hole(version)),
                (Change::FillHole { .. }, Child::Hole(_)) => Some(old),
                (Change::Lost { version }, Child::Hole(_)) => Some(lost_child(version)),
                (Change::Lost { version }, Child::Node(node)) if !node.is_possible() => {
                    Some(lost_child(version))
                }
                _ => None,
            };
            let new = match whole.filter(|_| is_whole) {
                Some(new) => {
                    self.moved = true;
                    new
                }
                None => self.update(old, level - 1, start, at..until.max(at + 1), memo)?,
            };
            changed |= new != old;
            children[index] = new;
            if self.stopped.is_some() {
                break;
            }
            next_child = index + 1;
            // The last edit may reach into the next child.
            at = until.max(at + 1);
            if self.edits[at - 1].end() > end {
                at -= 1;
            }
        }
        Ok(changed)
    }

    /// Whether something changed, and whether some block is known to be no hole.
    fn update_leaf(
        &mut self,
        leaf: &mut Leaf,
        base: u64,
        range: std::ops::Range<usize>,
    ) -> (bool, bool) {
        let (mut changed, mut has_data) = (false, false);
        let leaf_end = base + LEAF_BLOCKS as u64;
        for edit in &self.edits[range] {
            let first = edit.lba.max(base);
            for lba in first..edit.end().min(leaf_end) {
                let block = &mut leaf.blocks[(lba - base) as usize];
                let offset = lba - edit.lba;
                let new = match edit.change {
                    Change::Hole { version } => BlockAt { version, place: 0, crc: 0 },
                    Change::Lost { version } => BlockAt { version, place: LOST_PLACE, crc: 0 },
                    Change::Data { version, place, crc_at } => {
                        let crc = self.crcs[crc_at as usize + offset as usize];
                        BlockAt { version, place: place + offset, crc }
                    }
                    Change::Move { from, to } if block.place == from + offset => {
                        block.place = to + offset;
                        (changed, has_data) = (true, true);
                        continue;
                    }
                    Change::Fill { version, place, crc_at } if shows_base(block) => {
                        let crc = self.crcs[crc_at as usize + offset as usize];
                        let version = if block.place == 0 { version } else { block.version };
                        BlockAt { version, place: place + offset, crc }
                    }
                    Change::FillHole { version } if shows_base(block) => {
                        let version = if block.place == 0 { version } else { block.version };
                        BlockAt { version, place: 0, crc: 0 }
                    }
                    Change::Fill { .. }
                    | Change::FillHole { .. }
                    | Change::Move { .. }
                    | Change::Renew { .. }
                    | Change::Reach => continue,
                };
                if block.place != 0 && block.place != new.place {
                    self.nodes.replaced(lba, block.place, block.version);
                }
                changed |= *block != new;
                has_data |= new.place != 0;
                *block = new;
            }
        }
        (changed, has_data)
    }
}

/// A stretch that [`next_part`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The leaf that covers these LBAs.
    Leaf { start: u64, node: NodeRef },
    /// A node that covers these LBAs cannot be read.
    Damaged { start: u64, end: u64, newest: u64 },
    /// Range of a single hole.
    Hole { start: u64, end: u64, version: u64 },
}

impl Part {
    pub fn range(&self) -> (u64, u64) {
        match *self {
            Part::Leaf { start, .. } => (start, start + LEAF_BLOCKS as u64),
            Part::Damaged { start, end, .. } | Part::Hole { start, end, .. } => (start, end),
        }
    }
}

/// The first part at or after `cursor` that may hold versions above `from`. Never-written
/// ranges and what the tree does not cover are skipped.
pub fn next_part(
    nodes: &mut impl Nodes,
    root: Root,
    from: u64,
    cursor: u64,
) -> Result<Option<Part>, StoreError> {
    find(nodes, root.child, root.level, 0, from, cursor)
}

fn find(
    nodes: &mut impl Nodes,
    child: Child,
    level: u8,
    start: u64,
    from: u64,
    cursor: u64,
) -> Result<Option<Part>, StoreError> {
    let end = start + span(level);
    if child.newest() <= from || cursor >= end {
        return Ok(None);
    }
    let node = match child {
        Child::Hole(version) => return Ok(Some(Part::Hole { start, end, version })),
        Child::Node(node) => node,
    };
    if level == 0 {
        return Ok(Some(Part::Leaf { start, node }));
    }
    let Some(loaded) = nodes.load(level, &node)? else {
        return Ok(Some(Part::Damaged { start, end, newest: node.newest }));
    };
    let Node::Interior(children) = &*loaded else { return Ok(None) };
    let child_span = span(level - 1);
    let first = (cursor.saturating_sub(start) / child_span) as usize;
    for (index, child) in children.iter().enumerate().skip(first) {
        let child_start = start + index as u64 * child_span;
        if let Some(part) = find(nodes, *child, level - 1, child_start, from, cursor)? {
            return Ok(Some(part));
        }
    }
    Ok(None)
}

/// Place in which a map differs from a later one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Difference {
    Leaf {
        /// Nodes above the leaf that the later map does not have, and under which this is the first
        /// difference.
        above: Vec<NodeRef>,
        /// The first LBA of the leaf.
        start: u64,
        node: NodeRef,
        /// The later map's child in its place.
        later: Child,
    },
    /// A node of one of the two cannot be read.
    Damaged,
}

/// The first leaf at or after `cursor` that may hold versions above `from` and that the later map
/// does not have. Nodes that both maps have are not read. `cursor` is zero or the end of the leaf
/// before.
pub fn next_difference(
    nodes: &mut impl Nodes,
    root: Root,
    later: Root,
    from: u64,
    cursor: u64,
) -> Result<Option<Difference>, StoreError> {
    // A map grows at its top: the smaller one is at the left edge of the larger one.
    let (mut level, mut child) = (later.level, later.child);
    while level > root.level {
        let Child::Node(node) = child else { break };
        let loaded = nodes.load(level, &node)?;
        let Some(Node::Interior(children)) = loaded.as_deref() else {
            return Ok(Some(Difference::Damaged));
        };
        (level, child) = (level - 1, children[0]);
    }
    let mut comparison = Comparison { nodes, later: Root { level, child }, from, cursor };
    comparison.find(root.child, Child::EMPTY, root.level, 0)
}

struct Comparison<'a, N> {
    nodes: &'a mut N,
    later: Root,
    from: u64,
    cursor: u64,
}

impl<N: Nodes> Comparison<'_, N> {
    fn find(
        &mut self,
        child: Child,
        later: Child,
        level: u8,
        start: u64,
    ) -> Result<Option<Difference>, StoreError> {
        let is_its_top = level == self.later.level && start == 0;
        let later = if is_its_top { self.later.child } else { later };
        let Child::Node(node) = child else { return Ok(None) };
        let is_seen = self.cursor >= start + span(level);
        if is_seen || node.newest <= self.from || child == later || !node.is_possible() {
            return Ok(None);
        }
        if level == 0 {
            return Ok(Some(Difference::Leaf { above: Vec::new(), start, node, later }));
        }
        let own = self.nodes.load(level, &node)?;
        let others = match later {
            Child::Node(later) if later.is_possible() => self.nodes.load(level, &later)?,
            _ => Some(Arc::new(Node::Interior(Box::new([later; FANOUT])))),
        };
        let (Some(Node::Interior(own)), Some(Node::Interior(others))) =
            (own.as_deref(), others.as_deref())
        else {
            return Ok(Some(Difference::Damaged));
        };
        let child_span = span(level - 1);
        let first = (self.cursor.saturating_sub(start) / child_span) as usize;
        for (index, (child, later)) in own.iter().zip(others.iter()).enumerate().skip(first) {
            let child_start = start + index as u64 * child_span;
            let mut found = self.find(*child, *later, level - 1, child_start)?;
            if let Some(Difference::Leaf { above, .. }) = &mut found
                && start >= self.cursor
            {
                above.push(node);
            }
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// State in the map of `out.len()` blocks from `lba` on.
pub fn blocks(
    nodes: &mut impl Nodes,
    root: Root,
    lba: u64,
    out: &mut [BlockAt],
) -> Result<(), StoreError> {
    let (mut done, mut lacking) = (0, Ok(()));
    while done < out.len() {
        let at = lba + done as u64;
        let leaf_start = at & !(LEAF_BLOCKS as u64 - 1);
        let count = ((leaf_start + LEAF_BLOCKS as u64 - at) as usize).min(out.len() - done);
        let out = &mut out[done..done + count];
        done += count;
        let found = match descend(nodes, root, at) {
            // What the other leaves lack is fetched at the same time.
            Err(error @ StoreError::Pending(_)) => {
                lacking = Err(error);
                continue;
            }
            found => found?,
        };
        match found {
            Found::Hole(version) => out.fill(BlockAt { version, place: 0, crc: 0 }),
            Found::Damaged(version) => out.fill(BlockAt { version, place: BAD_PLACE, crc: 0 }),
            Found::Leaf(node) => {
                let Node::Leaf(leaf) = &*node else { return Err(StoreError::Damaged("a leaf")) };
                let first = (at - leaf_start) as usize;
                out.copy_from_slice(&leaf.blocks[first..first + count]);
            }
        }
    }
    lacking
}

/// Looks at the nodes that an update of these stretches reads, `(first LBA, the one behind its
/// last)` in ascending order, and finds all that is lacking of them at once. No more than about
/// `nodes_max` leaves are looked at.
pub fn look_ahead(
    nodes: &mut impl Nodes,
    root: Root,
    stretches: impl Iterator<Item = (u64, u64)>,
    nodes_max: usize,
) -> Result<(), StoreError> {
    let (mut lacking, mut at, mut left) = (Ok(()), 0, nodes_max);
    for (start, end) in stretches {
        at = at.max(start);
        while at < end {
            if left == 0 {
                return lacking;
            }
            left -= 1;
            let (until, looked) = reach(nodes, root, at);
            lacking = lacking.and(looked);
            at = until;
        }
    }
    lacking
}

/// Looks at the nodes that a walk from `cursor` on reads of the next `parts_max` parts, and at their
/// leaves if it reads these too.
pub fn look_ahead_of_walk(
    nodes: &mut impl Nodes,
    root: Root,
    from: u64,
    mut cursor: u64,
    parts_max: usize,
    reads_leaves: bool,
) -> Result<(), StoreError> {
    let mut lacking = Ok(());
    for _ in 0..parts_max.max(1) {
        // Which leaves there are is not known without the node above them.
        let Some(part) = next_part(nodes, root, from, cursor)? else { break };
        cursor = part.range().1;
        if let Part::Leaf { node, .. } = part
            && reads_leaves
        {
            lacking = lacking.and(may_lack(nodes.load(0, &node).map(drop))?);
        }
    }
    lacking
}

/// Looks at the nodes that these renewals read, and finds all that is lacking of them at once.
pub fn look_ahead_of_renewals(
    nodes: &mut impl Nodes,
    root: Root,
    edits: &[Edit],
) -> Result<(), StoreError> {
    look_below(nodes, root.child, root.level, 0, edits)
}

fn look_below(
    nodes: &mut impl Nodes,
    child: Child,
    level: u8,
    base: u64,
    edits: &[Edit],
) -> Result<(), StoreError> {
    let Child::Node(node) = child else { return Ok(()) };
    if !edits.iter().any(|edit| edit.concerns(level, &node)) {
        return Ok(());
    }
    let Some(loaded) = nodes.load(level, &node)? else { return Ok(()) };
    let (Node::Interior(children), Some(below)) = (&*loaded, level.checked_sub(1)) else {
        return Ok(());
    };
    let (mut lacking, mut rest) = (Ok(()), edits);
    while let Some(edit) = rest.first() {
        let index = (edit.lba.saturating_sub(base) / span(below)) as usize;
        let Some(child) = children.get(index) else { break };
        let start = base + index as u64 * span(below);
        let count = rest.partition_point(|edit| edit.lba < start + span(below)).max(1);
        let looked = look_below(nodes, *child, below, start, &rest[..count]);
        lacking = lacking.and(looked);
        rest = &rest[count..];
    }
    lacking
}

/// Looks at the nodes that lead to an LBA, and says where the stretch ends about which the last of
/// them tells.
fn reach(nodes: &mut impl Nodes, root: Root, lba: u64) -> (u64, Result<(), StoreError>) {
    let (mut child, mut level) = (root.child, root.level);
    if lba >= span(level) {
        return (u64::MAX, Ok(()));
    }
    loop {
        let end = (lba & !(span(level) - 1)) + span(level);
        let Child::Node(node) = child else { return (end, Ok(())) };
        let loaded = match nodes.load(level, &node) {
            Ok(Some(loaded)) => loaded,
            Ok(None) => return (end, Ok(())),
            Err(error) => return (end, Err(error)),
        };
        let Node::Interior(children) = &*loaded else { return (end, Ok(())) };
        let Some(below) = level.checked_sub(1) else { return (end, Ok(())) };
        level = below;
        child = children[(lba / span(level)) as usize % FANOUT];
    }
}

/// The nodes from the root to the leaf over an LBA, each with its level and first LBA.
pub fn path(
    nodes: &mut impl Nodes,
    root: Root,
    lba: u64,
) -> Result<Vec<(u8, u64, NodeRef)>, StoreError> {
    let (mut child, mut level, mut path) = (root.child, root.level, Vec::new());
    while let Child::Node(node) = child {
        path.push((level, lba & !(span(level) - 1), node));
        let Some(below) = level.checked_sub(1) else { break };
        let Some(loaded) = nodes.load(level, &node)? else { break };
        let Node::Interior(children) = &*loaded else { break };
        level = below;
        child = children[(lba / span(level)) as usize % FANOUT];
    }
    Ok(path)
}

enum Found {
    Hole(u64),
    Leaf(Arc<Node>),
    Damaged(u64),
}

fn descend(nodes: &mut impl Nodes, root: Root, lba: u64) -> Result<Found, StoreError> {
    let (mut child, mut level) = (root.child, root.level);
    if lba >= span(level) {
        return Ok(Found::Hole(0));
    }
    loop {
        let node = match child {
            Child::Hole(version) => return Ok(Found::Hole(version)),
            Child::Node(node) => node,
        };
        let Some(loaded) = nodes.load(level, &node)? else {
            return Ok(Found::Damaged(node.newest));
        };
        match &*loaded {
            Node::Leaf(_) => return Ok(Found::Leaf(loaded)),
            Node::Interior(children) => {
                level = level.saturating_sub(1);
                child = children[(lba / span(level)) as usize % FANOUT];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Default)]
    struct InMemory {
        nodes: Vec<Arc<Node>>,
        replaced: Vec<u64>,
        damaged: Vec<u64>,
        loaded: usize,
    }

    impl Nodes for InMemory {
        fn load(&mut self, _: u8, node: &NodeRef) -> Result<Option<Arc<Node>>, StoreError> {
            self.loaded += 1;
            Ok(self.nodes.get(node.place as usize).cloned())
        }
        fn damaged(&mut self, _: u8, base: u64, _: &NodeRef) -> Result<(), StoreError> {
            self.damaged.push(base);
            Ok(())
        }
        fn write(&mut self, _: u8, _: u64, node: Arc<Node>) -> Result<NodeRef, StoreError> {
            let newest = node.newest();
            self.nodes.push(node);
            let place = self.nodes.len() as u64 - 1;
            Ok(NodeRef { place, length: 1, crc: 0, newest })
        }
        fn replaced(&mut self, _: u64, place: u64, _: u64) {
            self.replaced.push(place);
        }
        fn node_replaced(&mut self, _: u8, _: u64, _: &NodeRef) {}
    }

    fn edits() -> impl Strategy<Value = Vec<(u64, u32, bool)>> {
        prop::collection::vec((0u64..200_000, 1u32..70_000, any::<bool>()), 1..12)
    }

    /// Random ranges made disjoint and ascending.
    fn disjoint(mut raw: Vec<(u64, u32, bool)>) -> Vec<(u64, u32, bool)> {
        raw.sort_unstable();
        let mut end = 0;
        raw.retain(|(lba, blocks, _)| {
            let fits = *lba >= end;
            if fits {
                end = lba + u64::from(*blocks);
            }
            fits
        });
        raw
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn the_tree_says_what_a_plain_map_says(rounds in prop::collection::vec(edits(), 1..6)) {
            let mut nodes = InMemory::default();
            let (mut root, mut plain) = (Root::default(), BTreeMap::<u64, (u64, u64)>::new());
            let mut old = Vec::new();
            let crcs = vec![5u32; 70_000];
            for (round, raw) in rounds.into_iter().enumerate() {
                let version = round as u64 + 1;
                old.push((root, plain.clone()));
                let mut batch = Vec::new();
                for (lba, blocks, hole) in disjoint(raw) {
                    let blocks = if hole { blocks } else { blocks.min(600) };
                    let place = (version << 32) + lba + 1;
                    let change = if hole {
                        Change::Hole { version }
                    } else {
                        Change::Data { version, place, crc_at: 0 }
                    };
                    batch.push(Edit { lba, blocks, change });
                    for i in 0..u64::from(blocks) {
                        plain.insert(lba + i, (version, if hole { 0 } else { place + i }));
                    }
                }
                root = update(&mut nodes, root, &batch, &crcs, None).expect("an update");
            }
            old.push((root, plain));
            for (version, (root, plain)) in old.iter().enumerate() {
                let mut found = vec![BlockAt::default(); 1000];
                for start in (0..300_000u64).step_by(1000) {
                    blocks(&mut nodes, *root, start, &mut found).expect("a walk");
                    for (lba, block) in (start..).zip(&found) {
                        let expected = plain.get(&lba).copied().unwrap_or((0, 0));
                        prop_assert_eq!((block.version, block.place), expected, "at {}", lba);
                    }
                }
                // "Changed since" finds every newer version.
                let from = version.saturating_sub(2) as u64;
                let (mut cursor, mut seen) = (0, 0usize);
                while let Some(part) = next_part(&mut nodes, *root, from, cursor).expect("a walk") {
                    let (start, end) = part.range();
                    seen += plain.range(start.max(cursor)..end).filter(|(_, v)| v.0 > from).count();
                    cursor = end;
                }
                prop_assert_eq!(seen, plain.values().filter(|v| v.0 > from).count());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn an_update_in_parts_is_the_update_at_once(
            rounds in prop::collection::vec((edits(), 1usize..6), 1..5),
        ) {
            let (mut once, mut in_parts) = (InMemory::default(), InMemory::default());
            let (mut whole, mut root) = (Root::default(), Root::default());
            let crcs = vec![5u32; 70_000];
            for ((raw, nodes_max), version) in rounds.into_iter().zip(1u64..) {
                let edit = |(lba, blocks, hole): (u64, u32, bool)| {
                    let blocks = if hole { blocks } else { blocks.min(600) };
                    let place = (version << 32) + lba + 1;
                    let change = match hole {
                        true => Change::Hole { version },
                        false => Change::Data { version, place, crc_at: 0 },
                    };
                    Edit { lba, blocks, change }
                };
                let all: Vec<Edit> = disjoint(raw).into_iter().map(edit).collect();
                whole = update(&mut once, whole, &all, &crcs, None).expect("an update");
                let mut rest = all;
                loop {
                    let before = in_parts.loaded;
                    let (new, stopped) =
                        update_some(&mut in_parts, root, &rest, &crcs, None, nodes_max)
                            .expect("an update");
                    root = new;
                    // The way down to the first leaf, and the siblings on the way back.
                    let loaded = in_parts.loaded - before;
                    prop_assert!(loaded <= nodes_max + usize::from(LEVEL_MAX), "{} nodes", loaded);
                    let Some(at) = stopped else { break };
                    let left = rest.iter().filter(|edit| edit.end() > at).map(|edit| {
                        let done = at.saturating_sub(edit.lba);
                        let change = match edit.change {
                            Change::Data { version, place, crc_at } => {
                                Change::Data { version, place: place + done, crc_at }
                            }
                            other => other,
                        };
                        let blocks = edit.blocks - done as u32;
                        Edit { lba: edit.lba + done, blocks, change }
                    });
                    let left: Vec<Edit> = left.collect();
                    let size = |edits: &[Edit]| edits.iter().map(|e| u64::from(e.blocks)).sum::<u64>();
                    prop_assert!(size(&left) < size(&rest), "it came no further");
                    rest = left;
                }
            }
            let (mut a, mut b) = (vec![BlockAt::default(); 1000], vec![BlockAt::default(); 1000]);
            for start in (0..300_000u64).step_by(1000) {
                blocks(&mut once, whole, start, &mut a).expect("a walk");
                blocks(&mut in_parts, root, start, &mut b).expect("a walk");
                prop_assert_eq!(&a, &b);
            }
            once.replaced.sort_unstable();
            in_parts.replaced.sort_unstable();
            prop_assert_eq!(once.replaced, in_parts.replaced, "each block is given up once");
        }
    }

    #[test]
    fn views_that_share_a_leaf_share_it_still_after_its_blocks_moved() {
        let mut nodes = InMemory::default();
        let write = |lba: u64, version, place| Edit {
            lba,
            blocks: 1,
            change: Change::Data { version, place, crc_at: 0 },
        };
        let first = [write(5, 1, 50), write(40_000, 1, 51)];
        let one = update(&mut nodes, Root::default(), &first, &[0], None).expect("an update");
        let two = update(&mut nodes, one, &[write(40_000, 2, 52)], &[0], None).expect("an update");
        let moves = [Edit { lba: 5, blocks: 1, change: Change::Move { from: 50, to: 90 } }];
        let mut memo = Memo::default();
        let mut moved = |root| update(&mut nodes, root, &moves, &[], Some(&mut memo));
        let (one, two) = (moved(one).expect("an update"), moved(two).expect("an update"));
        let mut leaf = |root| next_part(&mut nodes, root, 0, 0).expect("a walk");
        assert_eq!(leaf(one), leaf(two));
        let mut found = [BlockAt::default()];
        blocks(&mut nodes, two, 5, &mut found).expect("a walk");
        assert_eq!((found[0].place, found[0].version), (90, 1));
    }

    /// A hundred views, each with one block of each of 600 leaves newer than in the one before.
    fn views(nodes: &mut InMemory) -> Vec<Root> {
        let mut root = Root::default();
        let view = |version| {
            let write = |leaf| Edit {
                lba: leaf * LEAF_BLOCKS as u64 + version % LEAF_BLOCKS as u64,
                blocks: 1,
                change: Change::Data { version, place: version * 1000 + leaf, crc_at: 0 },
            };
            let edits: Vec<Edit> = (0..600).map(write).collect();
            root = update(nodes, root, &edits, &[0], None).expect("an update");
            root
        };
        (1..=100).map(view).collect()
    }

    #[test]
    fn a_renewal_changes_every_view_that_has_the_node_and_reads_no_leaf_of_another_one() {
        let mut nodes = InMemory::default();
        // Place 0 is that of no node.
        let unused = Arc::new(Node::Leaf(Leaf::hole(0)));
        nodes.write(0, 0, unused).expect("a place");
        let old = views(&mut nodes);
        let contents = |nodes: &mut InMemory, root| {
            let mut all = vec![BlockAt::default(); 600 * LEAF_BLOCKS];
            blocks(nodes, root, 0, &mut all).expect("a walk");
            all
        };
        let mut seen = 0;
        for at in [0usize, 1, 50, 98, 99] {
            // As of a segment of nodes: all on the way to some leaves.
            let paths = [0u64, 1, 255, 256, 599].map(|leaf| leaf * LEAF_BLOCKS as u64);
            let paths = paths.map(|lba| path(&mut nodes, old[at], lba).expect("a path"));
            let mut found = paths.concat();
            found.sort_by_key(|(level, base, _)| (*base, *level));
            found.dedup();
            let renewal = |(level, lba, node): (u8, u64, NodeRef)| {
                let change = Change::Renew { place: node.place, level, newest: node.newest };
                Edit { lba, blocks: 1, change }
            };
            let edits: Vec<Edit> = found.into_iter().map(renewal).collect();
            assert_eq!(edits.len(), 5 + 4 + 1, "leaves, nodes above them, the root");

            let before = nodes.loaded;
            for root in &old {
                look_ahead_of_renewals(&mut nodes, *root, &edits).expect("at hand");
            }
            let looked = nodes.loaded - before;
            let mut memo = Memo::default();
            let new: Vec<Root> = old
                .iter()
                .map(|root| update(&mut nodes, *root, &edits, &[], Some(&mut memo)))
                .collect::<Result<_, _>>()
                .expect("an update");
            let loaded = nodes.loaded - before - looked;
            let views_since = old.len() - at;
            let most = 5 + views_since * (4 + 1);
            assert!(looked <= most && loaded <= most, "{looked} and {loaded} of {most}");

            for (number, (old, new)) in old.iter().zip(&new).enumerate() {
                assert_eq!(old != new, number == at, "view {number}");
            }
            for lba in [0u64, 1, 255, 256, 599].map(|leaf| leaf * LEAF_BLOCKS as u64) {
                for (_, _, node) in path(&mut nodes, new[at], lba).expect("a path") {
                    assert!(
                        edits.iter().all(|edit| !edit.renews(&node)),
                        "{node:?} is there still"
                    );
                    seen += 1;
                }
            }
            let was = contents(&mut nodes, old[at]);
            assert_eq!(contents(&mut nodes, new[at]), was);
        }
        assert_eq!(seen, 5 * 5 * 3);
    }
}
