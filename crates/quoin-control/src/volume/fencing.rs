//! Fences: grants of nodes are taken back without the nodes' cooperation.

use std::sync::Arc;

use quoin_types::VolumeId;

use crate::Error;
use crate::state::State;
use crate::state::records::{Text, VolumeRecord};

impl VolumeRecord {
    /// Takes back all earlier grants. This uses up an epoch that is granted to no target: pools
    /// promise it, and refuse opens with earlier grants. An open session may still be closed in a
    /// bounded time, unless `at_once` cuts it. `at_once` uses up an epoch also where none was
    /// granted since the last fence: former versions signed grants for the epoch of a fence itself.
    pub(crate) fn fence(&mut self, at_once: bool, term: Term) -> Result<(), Error> {
        if self.epoch == 0 || (self.fenced == self.epoch && !at_once) {
            return Ok(());
        }
        self.use_up_epoch(Epoch::ZERO, term)?;
        self.incarnation = Text::default();
        (self.fenced, self.fenced_at_once) = (self.epoch, at_once);
        Ok(())
    }

    /// Advances to the next epoch of the term in which the controller rules, above `at_least`.
    pub(crate) fn use_up_epoch(&mut self, at_least: Epoch, term: Term) -> Result<(), Error> {
        let after = self.epoch().max(at_least).0.saturating_add(self.epochs_skipped);
        let Some(next) = term.next_epoch(Epoch(after)) else {
            return Err(Error::Precondition(format!(
                "volume {}: epoch {} is of a later term than this controller's, which is {term}, or \
                 its last one: `quoin controller recover` begins another term",
                self.spec.name,
                Epoch(after)
            )));
        };
        (self.epoch, self.epochs_skipped) = (next.0, 0);
        Ok(())
    }

    /// Whether there is a grant that its holder may still use.
    pub(crate) fn is_granted(&self) -> bool {
        self.fenced < self.epoch
    }

    /// Whether this node may hold the current grant. Records of former versions and recovered
    /// records do not say which node holds the epoch.
    pub(crate) fn may_be_held_by(&self, node: &str) -> bool {
        self.is_granted() && (self.holder.is_empty() || self.holder == node)
    }
}

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
            let owns = volume.owner.as_deref() == Some(node);
            owns || volume.grants.holder == node
        };
        let owned = self.state.volumes_of_node(node);
        let held = self.state.volumes.indexed(|index| index.of_holder(node));
        for volume in owned.iter().chain(&held).filter(|volume| concerned(volume)) {
            let fence = |volume: &mut VolumeRecord| {
                let owns = volume.owner.as_deref() == Some(node);
                if leaves && owns && volume.attachments.is_empty() {
                    volume.owner = None;
                }
                // Records of former versions do not say which node holds the epoch.
                if volume.grants.holder == node || (owns && volume.grants.holder.is_empty()) {
                    volume.fence(true, term)?;
                }
                Ok(())
            };
            self.change_if_there(volume.id.0, fence).await?;
        }
        Ok(())
    }

    /// Takes back the grant of a volume that has no owner: one that was detached by a version that
    /// left the grant, or one of recovered records.
    pub(crate) async fn left_over(&self, volume: &VolumeRecord) -> Result<(), Error> {
        let left_over = |volume: &VolumeRecord| {
            volume.phase.is_kept() && volume.owner.is_none() && volume.is_granted()
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
            volume.owner.as_deref() == Some(node)
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
