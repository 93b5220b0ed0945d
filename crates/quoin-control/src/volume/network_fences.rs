//! Requests to fence blocks of addresses, and to lift fences ([`network_fences`]).
//!
//! A fence is answered once it holds: the targets of its nodes acknowledge nothing, by the word of the
//! pools, and the other targets have turned its clients away, by their own word. One that does not
//! answer is cut by the pools too: it would go on under its grant when it is back, before it hears of the
//! fence.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control as api;
use quoin_cluster::ownership::fencing;
use quoin_cluster::ownership::network_fences::{self, FENCES_MAX};
use quoin_cluster::records::{Block, FenceRecord, NodeRecord, Record, Text, VolumeRecord};
use quoin_types::VolumeId;
use tokio::time::Instant;

use crate::Error;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::{now_ms, timestamp};
use crate::volume::hearing;

/// Longest wait of one call for a fence to hold; a repeat waits on.
const HOLDS_WITHIN: Duration = Duration::from_secs(8);
/// Between two looks, beside those at what changed.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Silence after which a target that has not turned the fenced clients away is cut; two of its reports are
/// missing by then.
const AWAY_AFTER: Duration = Duration::from_secs(5);

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

    /// Volumes of which these nodes have something, or their targets may acknowledge something.
    fn volumes_of(&self, nodes: &BTreeSet<String>) -> BTreeSet<Text<VolumeId>> {
        let mut volumes: BTreeSet<_> = nodes
            .iter()
            .flat_map(|node| self.state.volumes_of_node(node))
            .map(|volume| volume.id)
            .collect();
        if !nodes.is_empty() {
            let all = self.state.volumes.list();
            let served = all.iter().filter(|volume| {
                network_fences::last_epoch(volume, |node| nodes.contains(node)).is_some()
            });
            volumes.extend(served.map(|volume| volume.id));
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
            self.cut(id.0, &nodes).await?;
        }
        self.others_turn_away(&nodes).await
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

    /// Checks that targets of these nodes acknowledge nothing of a volume any more.
    async fn cut(&self, id: VolumeId, nodes: &BTreeSet<String>) -> Result<(), Error> {
        let term = self.state.term();
        for is_cut in [false, true] {
            let Some(volume) = self.state.volumes.get(&id.to_string()) else { return Ok(()) };
            let last = network_fences::last_epoch(&volume, |node| nodes.contains(node));
            let Some(last) = last else { return Ok(()) };
            let why = match hearing::check_ended(&self.state, &volume, last) {
                Ok(_) => return Ok(()),
                Err(why) => why,
            };
            if is_cut || !network_fences::is_closing(&volume) {
                return Err(Error::Busy(why));
            }
            let change = |volume: &mut VolumeRecord| Ok(network_fences::cut(volume, term)?);
            match self.state.update_volume(id, change).await {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Checks that each target that may serve clients over the network has turned the fenced clients
    /// away, or acknowledges nothing any more. `fenced`: nodes whose own targets are cut.
    async fn others_turn_away(&self, fenced: &BTreeSet<String>) -> Result<(), Error> {
        let digest = self.state.fences_digest();
        for volume in self.state.volumes.list() {
            let servers: BTreeSet<String> =
                network_fences::servers(&volume).map(|(node, _)| node.to_owned()).collect();
            for node in servers {
                if !fenced.contains(&node) && self.may_let_in(&volume, &node, digest) {
                    self.silence(volume.id.0, &node).await?;
                }
            }
        }
        Ok(())
    }

    /// Returns true if a target of the node may serve the volume to clients over the network which it has not
    /// turned away.
    fn may_let_in(&self, volume: &VolumeRecord, node: &str, digest: u64) -> bool {
        let observed = self.state.observed();
        // A node that is not known by name may be any that has not said so.
        let Some(seen) = observed.nodes.get(node) else { return true };
        match seen.fences_digest {
            Some(carried_out) if carried_out == digest => false,
            Some(_) => !seen.share_address.is_empty() || volume.attachments.len() > 1,
            None => true,
        }
    }

    /// Has a target acknowledge nothing of a volume any more, if it is away: it is granted nothing anew before
    /// it has turned the fenced clients away.
    async fn silence(&self, id: VolumeId, node: &str) -> Result<(), Error> {
        let term = self.state.term();
        for is_cut in [false, true] {
            let Some(volume) = self.state.volumes.get(&id.to_string()) else { return Ok(()) };
            let Some(last) = network_fences::last_epoch(&volume, |server| server == node) else {
                return Ok(());
            };
            if hearing::check_ended(&self.state, &volume, last).is_ok() {
                return Ok(());
            }
            let is_cuttable = volume.is_granted() || network_fences::is_closing(&volume);
            if is_cut || !is_cuttable || !self.is_away(&volume, node) {
                return Err(Error::Busy(format!(
                    "node {node}, which serves volume {}, has not said yet that it turned away the \
                     fenced clients",
                    volume.spec.name
                )));
            }
            let change = |volume: &mut VolumeRecord| {
                fencing::of_node(volume, node, false, term)?;
                Ok(network_fences::cut(volume, term)?)
            };
            match self.state.update_volume(id, change).await {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns true if neither the controller nor a quorum of the pools hears the target: nobody's IO goes on
    /// there, so that nobody is disturbed where it is cut.
    fn is_away(&self, volume: &VolumeRecord, node: &str) -> bool {
        let is_heard = {
            let observed = self.state.observed();
            let last = observed.nodes.get(node).map_or(observed.started, |seen| seen.last);
            last.elapsed() < AWAY_AFTER
        };
        !is_heard && hearing::is_silent(&self.state, volume)
    }
}

fn of_nodes(nodes: &BTreeSet<String>) -> String {
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    match names.is_empty() {
        true => ", in which no node has an address".to_owned(),
        false => format!(", with node {}", names.join(", node ")),
    }
}
