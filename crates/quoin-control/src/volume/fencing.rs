//! Fences: grants of nodes are taken back without the nodes' cooperation.

use std::sync::Arc;

use quoin_cluster::ownership::{fencing, network_fences};
use quoin_cluster::records::VolumeRecord;
use quoin_types::VolumeId;

use crate::Error;
use crate::state::State;
use crate::volume::hearing::check_ended;

/// Takes grants back.
pub struct Fences {
    state: Arc<State>,
}

impl Fences {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Takes back all grants of a node at once: its sessions are cut. `leaves`: the node also loses
    /// the volumes that were only lent to it.
    pub(crate) async fn node(&self, node: &str, leaves: bool) -> Result<(), Error> {
        let term = self.state.term();
        let owned = self.state.volumes_of_node(node);
        let held = self.state.volumes.indexed(|index| index.of_holder(node));
        for volume in owned.iter().chain(&held).filter(|v| fencing::concerns(v, node)) {
            let fence = |v: &mut VolumeRecord| Ok(fencing::of_node(v, node, leaves, term)?);
            self.change_if_there(volume.id.0, fence).await?;
        }
        Ok(())
    }

    /// Takes back the grant of a volume that has no owner, as recovered records may have one.
    pub(crate) async fn left_over(&self, volume: &VolumeRecord) -> Result<(), Error> {
        if !fencing::is_left_over(volume) {
            return Ok(());
        }
        let term = self.state.term();
        let fence = |volume: &mut VolumeRecord| Ok(fencing::left_over(volume, term)?);
        self.change_if_there(volume.id.0, fence).await
    }

    /// Cuts a target that still uses an epoch that was taken back. The target has missed that its
    /// volume was detached and attached again; it then acquires a new epoch.
    pub(crate) async fn stale(&self, id: VolumeId, node: &str) -> Result<(), Error> {
        let volume = self.state.volumes.get(&id.to_string());
        if volume.is_none_or(|volume| !fencing::is_stale(&volume, node)) {
            return Ok(());
        }
        let term = self.state.term();
        let fence = |volume: &mut VolumeRecord| Ok(fencing::stale(volume, node, term)?);
        self.change_if_there(id, fence).await
    }

    /// Takes down that nothing is acknowledged any more under former grants of a volume, once its pools have
    /// promised so: from then on it counts without them.
    pub(crate) async fn former(&self, volume: &VolumeRecord) -> Result<(), Error> {
        let Some(last) = network_fences::last_former_epoch(volume) else { return Ok(()) };
        let Ok(ended) = check_ended(&self.state, volume, last) else { return Ok(()) };
        let end = |volume: &mut VolumeRecord| {
            volume.grants.end_below(ended.0);
            Ok(())
        };
        self.change_if_there(volume.id.0, end).await
    }

    /// Cuts the sessions of a volume whose deletion was ordered. Returns true once nothing of it is
    /// acknowledged any more: until then its record says whose targets may.
    pub(crate) async fn deleted(&self, volume: &VolumeRecord) -> Result<bool, Error> {
        let term = self.state.term();
        if network_fences::is_deleted_in_use(volume) {
            let cut = |volume: &mut VolumeRecord| Ok(network_fences::cut_deleted(volume, term)?);
            self.change_if_there(volume.id.0, cut).await?;
        }
        let found = self.state.volumes.get(&volume.id.0.to_string());
        let last = found.as_ref().and_then(|found| network_fences::last_epoch(found, |_| true));
        let (Some(volume), Some(last)) = (found, last) else { return Ok(true) };
        Ok(check_ended(&self.state, &volume, last).is_ok())
    }

    async fn change_if_there(
        &self,
        id: VolumeId,
        change: impl FnMut(&mut VolumeRecord) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self.state.update_volume(id, change).await {
            Err(Error::NotFound { .. }) => Ok(()),
            outcome => outcome.map(drop),
        }
    }
}
