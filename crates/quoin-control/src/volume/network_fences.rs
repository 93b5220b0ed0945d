//! Requests to fence blocks of addresses, and to lift fences ([`network_fences`]).
//!
//! A fence is answered once it holds: the targets of its nodes acknowledge nothing, by the word of the
//! pools, and the other targets have turned its clients away, by their own word.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control as api;
use quoin_cluster::ownership::liveness::Hearing;
use quoin_cluster::ownership::network_fences::{self, FENCES_MAX, Promised};
use quoin_cluster::records::{
    Block, FenceRecord, NodeRecord, Record, ReplicaRecord, Text, VolumeRecord,
};
use quoin_replication::replica::LEASE_MS;
use quoin_types::VolumeId;
use tokio::time::Instant;

use crate::Error;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::{self, now_ms, timestamp};
use crate::volume::hearing::check_silent;

/// Longest wait of one call for a fence to hold; a repeat waits on.
const HOLDS_WITHIN: Duration = Duration::from_secs(8);
/// Between two looks, beside those at what changed.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const LEASE: Duration = Duration::from_millis(LEASE_MS as u64);

/// Fences and lifts fences.
pub struct NetworkFences {
    state: Arc<State>,
}

/// Reads the blocks of a request.
fn blocks(given: &[String]) -> Result<BTreeSet<Block>, Error> {
    if given.is_empty() {
        return Err(Error::invalid("blocks", "at least one block is needed, as ADDRESS/LENGTH"));
    }
    if given.len() > FENCES_MAX {
        return Err(Error::invalid("blocks", format!("at most {FENCES_MAX}")));
    }
    let block = |text: &String| {
        text.parse().map_err(|rule| {
            let shown: String = text.chars().take(64).collect();
            Error::invalid("blocks", format!("{shown:?} is {rule}"))
        })
    };
    given.iter().map(block).collect()
}

fn cluster() -> Object {
    Object::new("cluster", "", "")
}

impl NetworkFences {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Fences blocks, and waits until that holds.
    ///
    /// # Errors
    /// A text that is no block; nothing is fenced then. [`Error::Busy`] where it does not hold yet.
    pub async fn add(&self, given: &[String]) -> Result<(), Error> {
        self.add_within(HOLDS_WITHIN, given).await
    }

    /// Fences blocks like [`Self::add`], and waits for so long at most.
    ///
    /// # Errors
    /// As those of [`Self::add`].
    pub async fn add_within(&self, wait: Duration, given: &[String]) -> Result<(), Error> {
        let blocks = blocks(given)?;
        self.state.check_ruling()?;
        self.state.check_term()?;
        self.record(&blocks).await?;
        let until = Instant::now() + wait;
        let mut changes = self.state.changes();
        loop {
            changes.mark_unchanged();
            let waits_for = match self.enforce(&blocks).await {
                Ok(()) => return Ok(()),
                Err(Error::Busy(why)) => why,
                Err(error) => return Err(error),
            };
            if Instant::now() >= until {
                let way = "nothing is lost, and the fence stays: ask again";
                return Err(Error::Busy(format!(
                    "the fence does not hold yet: {waits_for}; {way}"
                )));
            }
            // Silence is no event.
            let _ = tokio::time::timeout(LOOK_EVERY, changes.changed()).await;
        }
    }

    /// Lifts the fences of exactly these blocks.
    ///
    /// # Errors
    /// A text that is no block; no fence is lifted then.
    pub async fn remove(&self, given: &[String]) -> Result<(), Error> {
        let blocks = blocks(given)?;
        self.state.check_ruling()?;
        self.state.check_term()?;
        for block in blocks {
            let name = block.to_string();
            let Some(fence) = self.state.joined.fences.get(&name) else { continue };
            let nodes = self.state.nodes_of_fence(&fence);
            self.state.joined.fences.remove(&name, |_| true).await?;
            let message = format!("block {block}{}", of_nodes(&nodes));
            self.state.events.record(Severity::Normal, cluster(), "FenceRemoved", message);
        }
        Ok(())
    }

    /// All fences in force.
    pub fn list(&self) -> Vec<api::Fence> {
        let shown = |fence: &Arc<FenceRecord>| api::Fence {
            block: fence.block.0.to_string(),
            since: Some(timestamp(fence.since_ms)),
            nodes: self.state.nodes_of_fence(fence).into_iter().collect(),
        };
        self.state.fences().iter().map(shown).collect()
    }

    /// Fences a node that has come to an address in a fenced block.
    pub(crate) async fn node_has_addresses(&self, node: &NodeRecord) -> Result<(), Error> {
        for fence in self.state.fences() {
            if !fence.covers(node) {
                continue;
            }
            if !fence.nodes.contains(&node.name) {
                let _alone = self.state.joined.fencing.write().await;
                let volumes = self.volumes_of(&[node.name.clone()].into());
                let change = |fence: &mut FenceRecord| {
                    fence.nodes.insert(node.name.clone());
                    fence.volumes.extend(volumes.iter().copied());
                    Ok(())
                };
                self.state.joined.fences.update(&Record::name(&*fence), change).await?;
            }
            // At each report: a controller may have died before it was through.
            self.take_back(&[node.name.clone()].into()).await?;
        }
        Ok(())
    }

    /// Records the fences: from here on nothing is granted to their nodes.
    async fn record(&self, blocks: &BTreeSet<Block>) -> Result<(), Error> {
        let _alone = self.state.joined.fencing.write().await;
        let known = |block: &&Block| self.state.joined.fences.get(&block.to_string()).is_some();
        let new: Vec<&Block> = blocks.iter().filter(|block| !known(block)).collect();
        if self.state.joined.fences.count() + new.len() > FENCES_MAX {
            return Err(Error::Exhausted(format!(
                "{FENCES_MAX} blocks are the most that are fenced at once: fence a larger one \
                 instead, or lift some (`quoin fence remove`)"
            )));
        }
        for block in new {
            let mut fence = FenceRecord {
                block: Text(*block),
                since_ms: now_ms(),
                nodes: BTreeSet::new(),
                volumes: BTreeSet::new(),
            };
            fence.nodes = self.state.nodes_of_fence(&fence);
            fence.volumes = self.volumes_of(&fence.nodes);
            let message = format!("block {block}{}", of_nodes(&fence.nodes));
            if self.state.joined.fences.create(fence).await?.is_ok() {
                self.state.events.record(Severity::Warning, cluster(), "FenceAdded", message);
            }
        }
        Ok(())
    }

    /// Volumes that these nodes may write at present.
    fn volumes_of(&self, nodes: &BTreeSet<String>) -> BTreeSet<Text<VolumeId>> {
        let mut volumes = BTreeSet::new();
        for node in nodes {
            let held = self.state.volumes.indexed(|index| index.of_holder(node));
            let used = self.state.volumes_of_node(node);
            volumes.extend(held.iter().chain(&used).map(|volume| volume.id));
        }
        volumes
    }

    /// Does what is left to do for fences, and checks that they hold.
    ///
    /// # Errors
    /// [`Error::Busy`]: they do not hold yet.
    async fn enforce(&self, blocks: &BTreeSet<Block>) -> Result<(), Error> {
        let fences: Vec<_> =
            self.state.fences().into_iter().filter(|f| blocks.contains(&f.block.0)).collect();
        if fences.len() < blocks.len() {
            return Err(Error::Aborted("a fence was lifted while it was made".to_owned()));
        }
        let nodes: BTreeSet<String> =
            fences.iter().flat_map(|fence| self.state.nodes_of_fence(fence)).collect();
        self.take_back(&nodes).await?;
        let listed: BTreeSet<_> = fences.iter().flat_map(|fence| fence.volumes.clone()).collect();
        for id in listed {
            self.cut(id.0).await?;
        }
        self.others_turn_away().await
    }

    /// Takes back what the nodes were granted.
    async fn take_back(&self, nodes: &BTreeSet<String>) -> Result<(), Error> {
        let term = self.state.term();
        for node in nodes {
            let owned = self.state.volumes_of_node(node);
            let held = self.state.volumes.indexed(|index| index.of_holder(node));
            let due = owned.iter().chain(&held).filter(|v| network_fences::is_due(v, node));
            for volume in due {
                let change =
                    |volume: &mut VolumeRecord| Ok(network_fences::take_back(volume, node, term)?);
                match self.state.update_volume(volume.id.0, change).await {
                    Ok(_) | Err(Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Checks that nothing is acknowledged any more by targets that had a volume when it was fenced.
    async fn cut(&self, id: VolumeId) -> Result<(), Error> {
        let Some(volume) = self.state.volumes.get(&id.to_string()) else { return Ok(()) };
        let Some(holder) = network_fences::holder(&volume) else { return Ok(()) };
        if volume.is_granted() && self.state.is_fenced(holder) {
            let name = &volume.spec.name;
            return Err(Error::Busy(format!("the grant of volume {name} is not taken back yet")));
        }
        if network_fences::is_closing(&volume) {
            let term = self.state.term();
            let change = |volume: &mut VolumeRecord| Ok(network_fences::cut(volume, term)?);
            drop(self.state.update_volume(id, change).await?);
        }
        let Some(volume) = self.state.volumes.get(&id.to_string()) else { return Ok(()) };
        let checked = {
            let observed = self.state.observed();
            let word = |replica: &ReplicaRecord| {
                let pool = observed.heard_pool(&replica.pool, self.state.settings.offline_after)?;
                let seen = pool.replicas.get(&replica.guid.0)?;
                let is_silent = matches!(seen.hearing, Hearing::Silent(_));
                Some(Promised { epoch: seen.promised, since: seen.promised_since, is_silent })
            };
            network_fences::check_cut(&volume, word, LEASE, time::now())
        };
        checked.map_err(Error::Busy)
    }

    /// Checks that each target that may serve clients over the network has turned the fenced clients
    /// away.
    async fn others_turn_away(&self) -> Result<(), Error> {
        let digest = self.state.fences_digest();
        let mut asked = BTreeSet::new();
        for volume in self.state.volumes.list() {
            let Some(node) = network_fences::holder(&volume).filter(|_| volume.is_granted()) else {
                continue;
            };
            if self.state.is_fenced(node) || !asked.insert(node.to_owned()) {
                continue;
            }
            let has_turned_away = {
                let observed = self.state.observed();
                observed.nodes.get(node).is_some_and(|seen| seen.fences_digest == digest)
            };
            if !has_turned_away && check_silent(&self.state, &volume, node).is_err() {
                return Err(Error::Busy(format!(
                    "node {node}, which serves volume {}, has not said yet that it turned away the \
                     fenced clients",
                    volume.spec.name
                )));
            }
        }
        Ok(())
    }
}

fn of_nodes(nodes: &BTreeSet<String>) -> String {
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    match names.is_empty() {
        true => ", in which no node has an address".to_owned(),
        false => format!(", with node {}", names.join(", node ")),
    }
}
