//! Requests of users for volumes: creation and deletion, attachments, replicas and their places; and the
//! compare-and-swaps of targets.

pub(crate) mod attach;
pub(crate) mod clones;
pub(crate) mod declare;
pub(crate) mod devices;
pub(crate) mod epochs;
pub(crate) mod fencing;
pub(crate) mod hearing;
pub(crate) mod key_slots;
pub(crate) mod modify;
pub(crate) mod network_fences;
pub mod placement;
pub mod policy;
pub(crate) mod reclaim;
pub(crate) mod scale;
pub mod spec;
pub mod topology;
pub(crate) mod verification;
pub(crate) mod volumes;

use std::sync::Arc;

use crate::membership::term::Terms;
use crate::state::State;

/// Parts that serve the requests of users and targets for volumes.
pub struct Parts {
    pub catalog: Arc<volumes::Catalog>,
    pub replicas: scale::Replicas,
    pub attachments: attach::Attachments,
    pub clones: Arc<clones::Clones>,
    pub declarations: declare::Declarations,
    pub key_slots: key_slots::KeySlots,
    pub modifications: modify::Modifications,
    pub network_fences: Arc<network_fences::NetworkFences>,
    pub reclaims: Arc<reclaim::Reclaims>,
    pub epochs: Arc<epochs::Epochs>,
    pub devices: Arc<devices::Devices>,
    pub verifier: Arc<verification::Verifier>,
}

impl Parts {
    pub(crate) fn new(state: &Arc<State>, terms: &Arc<Terms>) -> Self {
        let catalog = Arc::new(volumes::Catalog::new(state.clone()));
        let clones = Arc::new(clones::Clones::new(state.clone()));
        Self {
            replicas: scale::Replicas::new(state.clone()),
            attachments: attach::Attachments::new(state.clone()),
            declarations: declare::Declarations::new(
                state.clone(),
                catalog.clone(),
                clones.clone(),
            ),
            clones,
            key_slots: key_slots::KeySlots::new(state.clone()),
            modifications: modify::Modifications::new(state.clone()),
            network_fences: Arc::new(network_fences::NetworkFences::new(state.clone())),
            reclaims: Arc::new(reclaim::Reclaims::new(state.clone())),
            epochs: Arc::new(epochs::Epochs::new(state.clone(), terms.clone())),
            devices: Arc::new(devices::Devices::new(state.clone())),
            verifier: Arc::new(verification::Verifier::new(state.clone())),
            catalog,
        }
    }
}
