//! Moves the targets of shared volumes away from nodes that are lost or fenced ([`failover`]).

use std::sync::Arc;

use quoin_cluster::ownership::failover;
use quoin_cluster::records::VolumeRecord;

use crate::Error;
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::volume::hearing::{self, check_silent};

/// Moves targets away from nodes that are lost or fenced.
pub struct Failover {
    state: Arc<State>,
}

impl Failover {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Moves each target that is due.
    pub async fn look(&self) -> Result<(), Error> {
        if self.state.check_ruling().is_err() {
            return Ok(());
        }
        for node in self.silent_nodes() {
            for volume in self.state.volumes_of_node(&node) {
                if failover::is_due(&volume, &node)
                    && let Ok(silence) = check_silent(&self.state, &volume, &node)
                {
                    let lasts = silence.lasts.as_secs();
                    let why = format!("of which nobody has heard for {lasts} s");
                    if let Some(volume) = self.move_from(&volume, &node, &why).await? {
                        hearing::tell_dissent(&self.state, &volume, &node, &silence);
                    }
                }
            }
        }
        for node in self.state.fences().iter().flat_map(|f| self.state.nodes_of_fence(f)) {
            for volume in self.state.volumes_of_node(&node) {
                if failover::is_due(&volume, &node) {
                    self.move_from(&volume, &node, "which is fenced").await?;
                }
            }
        }
        Ok(())
    }

    /// Nodes that have not reported for their time-out.
    fn silent_nodes(&self) -> Vec<String> {
        let timeout = self.state.settings.node_timeout;
        let observed = self.state.observed();
        let last = |node: &str| observed.nodes.get(node).map_or(observed.started, |seen| seen.last);
        let nodes = self.state.nodes.list();
        let names = nodes.iter().map(|node| node.name.clone());
        names.filter(|node| last(node).elapsed() >= timeout).collect()
    }

    /// Moves the target of a volume to another node that has it. Returns the volume where it was moved.
    async fn move_from(
        &self,
        volume: &VolumeRecord,
        node: &str,
        why: &str,
    ) -> Result<Option<Arc<VolumeRecord>>, Error> {
        // No fence is recorded between the choice of a node and the record of it.
        let _fencing = self.state.joined.fencing.read().await;
        let next = {
            let after = self.state.settings.offline_after;
            let is_online = |node: &str| {
                let is_online = self.state.observed().node_online(node, after);
                is_online && !self.state.is_fenced(node)
            };
            failover::next_node(volume, node, is_online).map(str::to_owned)
        };
        let Some(next) = next else { return Ok(None) };
        let term = self.state.term();
        let change =
            |volume: &mut VolumeRecord| Ok(failover::move_target(volume, node, &next, term)?);
        let (volume, moved) = match self.state.update_volume(volume.id.0, change).await {
            Err(Error::NotFound { .. }) => return Ok(None),
            other => other?,
        };
        if moved {
            crate::status::opening_begins(&self.state, volume.id.0);
            let message = format!("from node {node}, {why}, to node {next}");
            self.state.events.record(Severity::Warning, about(&volume), "TargetMoved", message);
        }
        Ok(moved.then_some(volume))
    }
}
