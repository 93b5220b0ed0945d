//! Mirrored volumes and groups: the records of this side, and the work that its brain orders.
//!
//! The decisions are those of [`quoin_cluster::mirror`]. [`driver`] gives the brain of each group its events
//! and carries its actions out ([`orders`]); members are told to it as records and reports have them
//! ([`observe`]). Brains speak to each other by mirrors, and so do the controllers that make copies
//! ([`copies`]). [`lag`] counts what the other side has not, and [`comparing`] compares both. All else that is asked of a mirrored volume keeps to [`rules`].

pub(crate) mod calls;
mod comparing;
mod copies;
pub(crate) mod driver;
pub(crate) mod groups;
mod lag;
mod leaving;
mod memory;
pub(crate) mod observe;
mod orders;
mod orphans;
pub(crate) mod recovery;
pub(crate) mod rules;
pub(crate) mod view;

use std::sync::Arc;

use crate::membership::peers::Peers;
use crate::snapshot;
use crate::state::State;
use crate::volume::volumes::Catalog;

/// Beginning of the names of snapshots that keep what a resync discarded.
pub(crate) const LOST: &str = "lost-";

/// Parts of the mirror.
pub struct Parts {
    pub groups: Arc<groups::VolumeGroups>,
    pub driver: Arc<driver::Mirrors>,
}

impl Parts {
    pub(crate) fn new(
        state: &Arc<State>,
        peers: &Arc<Peers>,
        catalog: &Arc<Catalog>,
        snapshots: &snapshot::Parts,
    ) -> Self {
        let groups = Arc::new(groups::VolumeGroups::new(state.clone()));
        let driver = driver::Mirrors::new(state.clone(), peers.clone(), catalog.clone(), snapshots);
        Self { groups, driver: Arc::new(driver) }
    }
}
