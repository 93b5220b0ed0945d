//! Fences: grants of nodes are taken back without the nodes' cooperation.

use std::sync::Arc;

use quoin_types::VolumeId;

use crate::Error;
use crate::state::State;
use crate::state::records::VolumeRecord;

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
        let concerned = |volume: &VolumeRecord| {
            let owns = volume.opened.owner.as_deref() == Some(node);
            owns || volume.grants.holder == node
        };
        let owned = self.state.volumes_of_node(node);
        let held = self.state.volumes.indexed(|index| index.of_holder(node));
        for volume in owned.iter().chain(&held).filter(|volume| concerned(volume)) {
            let fence = |volume: &mut VolumeRecord| {
                let owns = volume.opened.owner.as_deref() == Some(node);
                if leaves && owns && volume.attachments.is_empty() {
                    volume.opened.owner = None;
                }
                // Recovered records do not say which node holds the epoch.
                if volume.grants.holder == node || (owns && volume.grants.holder.is_empty()) {
                    volume.fence(true, term)?;
                }
                Ok(())
            };
            self.change_if_there(volume.id.0, fence).await?;
        }
        Ok(())
    }

    /// Takes back the grant of a volume that has no owner, as recovered records may have one.
    pub(crate) async fn left_over(&self, volume: &VolumeRecord) -> Result<(), Error> {
        let left_over = |volume: &VolumeRecord| {
            volume.phase.is_kept() && volume.opened.owner.is_none() && volume.is_granted()
        };
        if !left_over(volume) {
            return Ok(());
        }
        let term = self.state.term();
        let fence = |volume: &mut VolumeRecord| {
            if left_over(volume) {
                volume.fence(false, term)?;
            }
            Ok(())
        };
        self.change_if_there(volume.id.0, fence).await
    }

    /// Cuts a target that still uses an epoch that was taken back. The target has missed that its
    /// volume was detached and attached again; it then acquires a new epoch.
    pub(crate) async fn stale(&self, id: VolumeId, node: &str) -> Result<(), Error> {
        let term = self.state.term();
        let stale = |volume: &VolumeRecord| {
            volume.opened.owner.as_deref() == Some(node)
                && volume.grants.holder == node
                && !volume.is_granted()
        };
        let is_open = |volume: &VolumeRecord| stale(volume) && !volume.grants.fenced_at_once;
        if self.state.volumes.get(&id.to_string()).is_none_or(|volume| !is_open(&volume)) {
            return Ok(());
        }
        let fence = |volume: &mut VolumeRecord| {
            if is_open(volume) {
                volume.fence(true, term)?;
            }
            Ok(())
        };
        self.change_if_there(id, fence).await
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
