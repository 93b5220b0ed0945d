//! Members of the cluster: join tokens, certificates, keys, removals, the controller's term, and peers.

pub(crate) mod admission;
pub(crate) mod clocks;
pub(crate) mod kubernetes;
pub(crate) mod members;
pub(crate) mod peers;
pub(crate) mod removal;
pub(crate) mod term;

use std::sync::{Arc, OnceLock};

use quoin_identity::Authority;

use crate::reconcile;
use crate::state::State;

/// Members of the cluster.
pub struct Parts {
    pub terms: Arc<term::Terms>,
    pub admission: Arc<admission::Admission>,
    pub clocks: Arc<clocks::Clocks>,
    pub members: Arc<members::Members>,
    pub peers: Arc<peers::Peers>,
    /// Empty: pods are not admitted by their service accounts.
    pub(crate) kubernetes: OnceLock<Arc<kubernetes::Kubernetes>>,
}

impl Parts {
    pub(crate) fn new(state: &Arc<State>, authority: Authority) -> Self {
        let admission = Arc::new(admission::Admission::new(state.clone()));
        let members = members::Members::new(state.clone(), authority, admission.clone());
        let (terms, members) = (Arc::new(term::Terms::new(state.clone())), Arc::new(members));
        let clocks = Arc::new(clocks::Clocks::new(state.clone()));
        let peers = peers::Peers::new(state.clone(), members.clone(), admission.clone());
        let (peers, kubernetes) = (Arc::new(peers), OnceLock::new());
        Self { terms, admission, clocks, members, peers, kubernetes }
    }

    /// Removals, which also end the work on what is removed.
    pub(crate) fn removals(
        &self,
        state: &Arc<State>,
        work: &reconcile::Parts,
    ) -> removal::Removals {
        removal::Removals::new(
            state.clone(),
            work.lifecycle.clone(),
            work.absence.clone(),
            work.dying.clone(),
            self.admission.clone(),
        )
    }
}
