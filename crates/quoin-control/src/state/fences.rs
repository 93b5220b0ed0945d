//! The fences of the network in force, and the nodes that they cover.

use std::collections::BTreeSet;
use std::sync::Arc;

use quoin_api::control as api;
use quoin_cluster::ownership::network_fences;
use quoin_cluster::records::{FenceRecord, NodeRecord};

use crate::Error;
use crate::state::State;

impl State {
    /// Fences in force, in the order of their blocks' texts.
    pub(crate) fn fences(&self) -> Vec<Arc<FenceRecord>> {
        self.joined.fences.list()
    }

    /// Checks that a node may have volumes and be granted epochs.
    ///
    /// # Errors
    /// Names the fence.
    pub(crate) fn check_not_fenced(&self, node: &str) -> Result<(), Error> {
        let fences = self.fences();
        if fences.is_empty() {
            return Ok(());
        }
        // A fence that names a node covers it also where its record is gone.
        let known = self.nodes.get(node);
        let unknown = || NodeRecord { name: node.to_owned(), ..NodeRecord::default() };
        let node = known.map_or_else(unknown, |node| NodeRecord::clone(&node));
        Ok(network_fences::check_node(fences.iter().map(Arc::as_ref), &node)?)
    }

    pub(crate) fn is_fenced(&self, node: &str) -> bool {
        self.check_not_fenced(node).is_err()
    }

    /// Nodes that a fence covers.
    pub(crate) fn nodes_of_fence(&self, fence: &FenceRecord) -> BTreeSet<String> {
        let nodes = self.nodes.list();
        let covered = nodes.iter().filter(|node: &&Arc<NodeRecord>| fence.covers(node));
        covered.map(|node| node.name.clone()).chain(fence.nodes.iter().cloned()).collect()
    }

    /// Fences as targets are told of them; `None`: there are none.
    pub(crate) fn fences_told(&self) -> Option<api::Fences> {
        let fences = self.fences();
        if fences.is_empty() {
            return None;
        }
        // Nodes come into the record as soon as they report an address in it, and each change of it is told.
        let nodes: BTreeSet<&String> = fences.iter().flat_map(|fence| &fence.nodes).collect();
        let blocks: Vec<String> = fences.iter().map(|fence| fence.block.0.to_string()).collect();
        let nodes: Vec<String> = nodes.into_iter().cloned().collect();
        // A fence that was lifted and made again is another one: clients were let in between.
        let since: Vec<String> = fences.iter().map(|fence| fence.since_ms.to_string()).collect();
        let end = String::new();
        let parts = blocks.iter().chain(&since).chain([&end]);
        let digest = network_fences::digest(parts.chain(&nodes));
        Some(api::Fences { digest, blocks, nodes })
    }

    /// Digest of what targets are told of the fences; 0: there are none.
    pub(crate) fn fences_digest(&self) -> u64 {
        self.fences_told().map_or(0, |told| told.digest)
    }
}
