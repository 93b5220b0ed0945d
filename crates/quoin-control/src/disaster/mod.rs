//! Backups of the records, and recovery where records or replicas were lost.

pub mod backup;
pub mod kept_backups;
pub(crate) mod moving;
pub(crate) mod offline;
pub(crate) mod recovery;
pub mod salvage;
pub(crate) mod scheduled_backup;

use std::sync::Arc;

use crate::membership;
use crate::reconcile::lifecycle::Lifecycle;
use crate::state::State;

/// Backups and recoveries.
pub struct Parts {
    /// Recovery of the records from what the pools hold.
    pub records: salvage::Recoveries,
    /// Recovery of a volume by a person.
    pub volumes: recovery::ForcedRecovery,
    pub backups: backup::Backups,
    /// Answers of pools while they are asked for all that they keep.
    pub salvage: Arc<salvage::Salvage>,
}

impl Parts {
    pub(crate) fn new(
        state: &Arc<State>,
        members: &membership::Parts,
        lifecycle: &Arc<Lifecycle>,
    ) -> Self {
        let salvage = Arc::new(salvage::Salvage::default());
        let records = salvage::Recoveries::new(
            state.clone(),
            lifecycle.clone(),
            members.terms.clone(),
            members.members.clone(),
            salvage.clone(),
        );
        let volumes = recovery::ForcedRecovery::new(state.clone());
        let backups = backup::Backups::new(state.clone(), members.members.clone());
        Self { records, volumes, backups, salvage }
    }
}
