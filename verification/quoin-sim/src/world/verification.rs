//! The verification at rest.

use quoin_replication::primary::{PrimaryEvent, VerifyOrder};

use super::World;
use super::checkers::Observation;

impl World {
    /// Has the target compare all replicas, once; true when that was done.
    pub(crate) fn verified(&mut self) -> bool {
        let owner = self.control.record.owner;
        let Some(process) = &self.targets[owner].process else { return false };
        match process.target.status().verify {
            None => {
                let order = VerifyOrder { request: 1, repair: false, from: None };
                self.feed_target(owner, vec![PrimaryEvent::Verify(Some(order))]);
                false
            }
            Some(report) if report.ended => {
                self.observe(&Observation::Verified { report: &report });
                true
            }
            Some(_) => false,
        }
    }
}
