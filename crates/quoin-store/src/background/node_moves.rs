//! Nodes of a segment that is emptied are written anew, in one view after the other.
//!
//! A node is in the first view that can hold its newest version and in those that follow it, up to
//! the one in which it was replaced. So each is looked for there, by the rules of
//! [`crate::background::kept_views`], and not in every view: the cost follows the views that show
//! it. Views that share a node go on sharing it. Leaves that do not move are not read.

use quoin_replication::replica::store::StoreError;
use quoin_types::mutant;

use crate::core::{Core, NodeIo};
use crate::disk::Disk;
use crate::format::node::Root;
use crate::map::tree::{self, Change, Edit, Memo, Nodes, Renewal};
use crate::replica::{Replica, may_lack};

/// Nodes that are looked for together.
const NODES_TOGETHER: usize = 256;

/// A node that is in the segment.
#[derive(Clone, Copy)]
pub struct NodeMove {
    pub place: u64,
    /// The first LBA that it is about.
    pub base: u64,
    pub level: u8,
    pub newest: u64,
}

/// Nodes of a segment on their way out of it.
#[derive(Default)]
pub struct NodeMoves {
    /// Those that were not looked for yet, the next ones at the end.
    rest: Vec<NodeMove>,
    now: Option<Together>,
}

/// Nodes that are looked for together.
struct Together {
    edits: Vec<Edit>,
    levels: Vec<u8>,
    newest: Vec<u64>,
    /// The nodes that the last view shows in which they were looked for, and those that were looked
    /// for at all.
    shown: Vec<bool>,
    asked: Vec<bool>,
    memo: Memo,
    /// Views that can hold no newer version than this were looked at.
    done: Option<u64>,
}

impl NodeMoves {
    pub fn new(mut nodes: Vec<NodeMove>) -> Self {
        nodes.sort_unstable_by_key(|node| std::cmp::Reverse(node.base));
        NodeMoves { rest: nodes, now: None }
    }

    fn next_together(&mut self) -> Option<&mut Together> {
        if self.now.is_none() && !self.rest.is_empty() {
            let from = self.rest.len().saturating_sub(NODES_TOGETHER);
            let mut nodes = self.rest.split_off(from);
            nodes.reverse();
            let edit = |node: &NodeMove| Edit {
                lba: node.base,
                blocks: 1,
                change: Change::Renew { node: node.place },
            };
            self.now = Some(Together {
                edits: nodes.iter().map(edit).collect(),
                levels: nodes.iter().map(|node| node.level).collect(),
                newest: nodes.iter().map(|node| node.newest).collect(),
                shown: vec![false; nodes.len()],
                asked: vec![false; nodes.len()],
                memo: Memo::default(),
                done: None,
            });
        }
        self.now.as_mut()
    }
}

/// A view of the history.
#[derive(Clone, Copy)]
pub struct HistoryView {
    pub root: Root,
    /// The newest version that it can hold.
    pub newest: u64,
    /// It may show what the views before it do not.
    pub is_behind_a_break: bool,
}

impl Together {
    /// The next view in which some of the nodes have to be looked for, and these.
    fn next_view(&self, history: &[HistoryView]) -> Option<(HistoryView, Vec<usize>)> {
        let left = history.iter().filter(|view| self.done.is_none_or(|done| view.newest > done));
        left.map(|view| (*view, self.wanted_in(view))).find(|(_, wanted)| !wanted.is_empty())
    }

    fn wanted_in(&self, view: &HistoryView) -> Vec<usize> {
        let shown =
            |i: usize| self.shown[i] && !mutant::is("nodes-moved-in-their-first-view-alone");
        let is_wanted = |i: &usize| {
            self.newest[*i] <= view.newest
                && (!self.asked[*i] || shown(*i) || view.is_behind_a_break)
        };
        (0..self.edits.len()).filter(is_wanted).collect()
    }

    /// Writes the nodes anew that this map has, of those that are wanted.
    fn renew(
        &mut self,
        nodes: &mut impl Nodes,
        root: Root,
        wanted: &[usize],
    ) -> Result<Root, StoreError> {
        let edits: Vec<Edit> = wanted.iter().map(|i| self.edits[*i]).collect();
        let levels: Vec<u8> = wanted.iter().map(|i| self.levels[*i]).collect();
        let mut shown: Vec<bool> = wanted.iter().map(|i| self.shown[*i]).collect();
        let renewal = Renewal { levels: &levels, shown: &mut shown };
        let renewed = tree::renew(nodes, root, &edits, &mut self.memo, renewal)?;
        for (i, shown) in wanted.iter().zip(shown) {
            (self.asked[*i], self.shown[*i]) = (true, shown);
        }
        Ok(renewed)
    }
}

impl Replica {
    /// The views of the history in its order, the live map last.
    fn history(&self) -> Vec<HistoryView> {
        let snapshots = self.folded.snapshots.iter().map(|s| (s.info.lsn.0, s.root));
        let mut views: Vec<(u64, Root)> = snapshots.collect();
        views.sort_by_key(|(newest, _)| *newest);
        views.push((u64::MAX, self.folded.root));
        let breaks = self.family.moved.breaks.lsns();
        let mut before = 0;
        let each = views.into_iter().map(|(newest, root)| {
            let first = breaks.partition_point(|lsn| *lsn <= before);
            let is_behind_a_break = breaks.get(first).is_some_and(|lsn| *lsn <= newest);
            before = newest;
            HistoryView { root, newest, is_behind_a_break }
        });
        each.collect()
    }

    /// Maps of all views beside the history.
    fn others<D: Disk>(&mut self, core: &Core<D>) -> Vec<Root> {
        let mut others: Vec<Root> = self.others_mut().into_iter().map(|root| *root).collect();
        others.extend(core.bases.of(self.identity.guid).map(|(_, base)| base.root));
        others
    }

    /// Views of transfers and increments.
    fn others_mut(&mut self) -> Vec<&mut Root> {
        let mut others: Vec<&mut Root> = self.pins.values_mut().map(|p| &mut p.root).collect();
        if let Some(shadow) = &mut self.shadow {
            others.extend(shadow.roots_mut());
        }
        others
    }

    /// All views give a node up together, so none keeps it alive.
    fn io_of_all_views<'a, D: Disk>(&'a mut self, core: &'a mut Core<D>) -> NodeIo<'a, D> {
        NodeIo { kept_through: 0, ..self.io(core) }
    }

    fn replace_root(&mut self, view: &HistoryView, renewed: Root) {
        let snapshots = self.folded.snapshots.iter_mut();
        let snapshots = snapshots.filter(|s| s.info.lsn.0 == view.newest).map(|s| &mut s.root);
        let live = (view.newest == u64::MAX).then_some(&mut self.folded.root);
        let roots = snapshots.chain(live).filter(|root| **root == view.root);
        roots.for_each(|root| *root = renewed);
    }

    /// Looks for some of the nodes in the next view; true once all were looked for in all.
    pub fn step_nodes<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        moves: &mut NodeMoves,
    ) -> Result<bool, StoreError> {
        let Some(now) = moves.next_together() else { return Ok(true) };
        let history = self.history();
        if let Some((view, wanted)) = now.next_view(&history) {
            for view in history.iter().filter(|other| other.newest == view.newest) {
                let renewed = now.renew(&mut self.io_of_all_views(core), view.root, &wanted)?;
                self.replace_root(view, renewed);
            }
            now.done = Some(view.newest);
            if view.newest < u64::MAX {
                return Ok(false);
            }
        }
        let all: Vec<usize> = (0..now.edits.len()).collect();
        let mut renewed = Vec::new();
        for root in self.others(core) {
            renewed.push(now.renew(&mut self.io_of_all_views(core), root, &all)?);
        }
        let mut renewed = renewed.into_iter();
        for (root, renewed) in self.others_mut().into_iter().zip(&mut renewed) {
            *root = renewed;
        }
        self.replace_bases(core, renewed)?;
        let edits = std::mem::take(&mut now.edits);
        moves.now = None;
        self.renew_moved(core, &edits)?;
        self.renew_table(core, &edits)?;
        Ok(moves.rest.is_empty())
    }

    /// Looks at what the next step reads.
    pub fn look_ahead_of_nodes<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        moves: &mut NodeMoves,
    ) -> Result<(), StoreError> {
        let Some(now) = moves.next_together() else { return Ok(()) };
        let (mut roots, mut wanted) = (Vec::new(), (0..now.edits.len()).collect());
        let mut is_last = true;
        if let Some((view, of_view)) = now.next_view(&self.history()) {
            roots.push(view.root);
            is_last = view.newest == u64::MAX;
            if !is_last {
                wanted = of_view;
            }
        }
        if is_last {
            roots.extend(self.others(core));
            roots.push(self.family.moved.root);
        }
        let (mut io, mut lacking) = (self.io(core), Ok(()));
        for root in roots {
            for i in &wanted {
                let (edit, level) = (&now.edits[*i], now.levels[*i]);
                let found = match tree::node_at(&mut io, root, level, edit.lba) {
                    Err(error @ StoreError::Pending(_)) => {
                        lacking = Err(error);
                        continue;
                    }
                    found => found?,
                };
                if let Some(node) = found.filter(|n| edit.change == Change::Renew { node: n.place })
                {
                    lacking = lacking.and(may_lack(io.load(level, &node).map(drop))?);
                }
            }
        }
        lacking
    }

    /// Whether no view has a node in these bytes of the pool. Looks at all of them.
    #[cfg(debug_assertions)]
    pub fn has_no_node_in<D: Disk>(
        &mut self,
        core: &mut Core<D>,
        bytes: &std::ops::Range<u64>,
    ) -> Result<bool, StoreError> {
        let mut roots: Vec<Root> = self.history().iter().map(|view| view.root).collect();
        roots.extend(self.others(core));
        for root in roots {
            let mut at = 0;
            while let Some(part) = tree::next_part(&mut self.io(core), root, 0, at)? {
                at = part.range().1;
                let path = tree::path(&mut self.io(core), root, part.range().0)?;
                if path.iter().any(|(_, _, node)| bytes.contains(&node.place)) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}
