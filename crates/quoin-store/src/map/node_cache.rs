//! Decoded nodes of the map in memory, by their places.

use std::collections::VecDeque;
use std::sync::Arc;

use quoin_types::key_map::KeyMap;

use crate::format::node::{Leaf, NODE_LENGTH_MAX, Node};

/// Leaves that left the cache and are kept for new ones: as many as a step of a fold writes.
const SPARE_LEAVES: usize = 64;

/// Memory of the longest node, with its places in the cache.
const NODE_BYTES: u64 = NODE_LENGTH_MAX as u64 + 128;
/// Nodes that are kept however small the cache is: a leaf, and the one above it.
const NODES_MIN: u64 = 2;

/// Decoded nodes by place, bounded; the second chance decides who goes. A place that is reused
/// is overwritten here when its new node is written, so nothing stale is ever found.
pub struct Cache {
    nodes: KeyMap<(Arc<Node>, bool)>,
    queue: VecDeque<u64>,
    nodes_max: usize,
    /// Leaves that nothing refers to, whatever they hold: their memory is used again, the one
    /// first that was used last.
    spare: Vec<Arc<Node>>,
    /// Bytes of the node that was read last, kept from one to the next.
    pub buffer: Vec<u8>,
}

impl Cache {
    pub fn new(bytes: u64) -> Self {
        let nodes_max = (bytes / NODE_BYTES).max(NODES_MIN) as usize;
        Cache {
            nodes: KeyMap::default(),
            queue: VecDeque::new(),
            nodes_max,
            spare: Vec::new(),
            buffer: Vec::new(),
        }
    }

    pub fn get(&mut self, place: u64) -> Option<Arc<Node>> {
        let (node, used) = self.nodes.get_mut(&place)?;
        *used = true;
        Some(node.clone())
    }

    pub fn insert(&mut self, place: u64, node: Arc<Node>) {
        while self.nodes.len() >= self.nodes_max
            && let Some(oldest) = self.queue.pop_front()
        {
            match self.nodes.get_mut(&oldest) {
                Some((_, used)) if *used => {
                    *used = false;
                    self.queue.push_back(oldest);
                }
                _ => {
                    if let Some((node, _)) = self.nodes.remove(&oldest) {
                        self.recycle(node);
                    }
                }
            }
        }
        match self.nodes.insert(place, (node, false)) {
            None => self.queue.push_back(place),
            Some((node, _)) => self.recycle(node),
        }
    }

    /// Takes the memory of a leaf that is needed no more.
    pub fn recycle(&mut self, mut node: Arc<Node>) {
        if self.spare.len() < SPARE_LEAVES && is_free_leaf(&mut node) {
            self.spare.push(node);
        }
    }

    /// A leaf that nothing else refers to. What it holds is of no meaning.
    pub fn spare_leaf(&mut self) -> Arc<Node> {
        self.spare.pop().unwrap_or_else(|| Arc::new(Node::Leaf(Leaf::hole(0))))
    }
}

fn is_free_leaf(node: &mut Arc<Node>) -> bool {
    Arc::get_mut(node).is_some_and(|node| matches!(node, Node::Leaf(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_that_left_the_cache_serves_again_once_nobody_reads_it() {
        let mut cache = Cache::new(16 * NODE_BYTES);
        for place in 0..16 {
            let node = cache.spare_leaf();
            cache.insert(place, node);
        }
        let read = cache.get(2).expect("it is cached");
        cache.get(1).expect("it is cached");
        for place in 16..19 {
            let node = cache.spare_leaf();
            cache.insert(place, node);
        }
        assert!(cache.get(0).is_none() && cache.get(1).is_some(), "the second chance");
        for place in 19..60 {
            let node = cache.spare_leaf();
            assert!(!Arc::ptr_eq(&node, &read), "a leaf that is read was given out");
            cache.insert(place, node);
            assert_eq!(cache.nodes.len(), 16);
        }
        assert!(cache.get(2).is_none());
        let spare = cache.spare.len();
        cache.recycle(read.clone());
        assert_eq!(cache.spare.len(), spare, "it is read still");
        cache.recycle(read);
        assert_eq!(cache.spare.len(), spare + 1);
    }
}
