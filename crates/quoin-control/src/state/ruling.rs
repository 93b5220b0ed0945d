//! Rule of these records, and its term.

use quoin_cluster::records::RecoveryRecord;
use quoin_types::Term;

use crate::Error;
use crate::state::State;

impl State {
    /// # Errors
    /// Says what to do, where the records do not rule, or another controller may.
    pub(crate) fn check_ruling(&self) -> Result<(), Error> {
        self.storage.store.check_rule()?;
        match self.term.recovery.get(RecoveryRecord::NAME) {
            None => Ok(()),
            Some(recovery) => Err(Error::Busy(format!(
                "the records do not rule, for {}: `quoin controller recover` makes them agree with \
                 what the pools hold",
                recovery.why
            ))),
        }
    }

    /// Returns why the records do not rule; empty where they do.
    pub fn recovery_reason(&self) -> String {
        let recovery = self.term.recovery.get(RecoveryRecord::NAME);
        recovery.map(|recovery| recovery.why.clone()).unwrap_or_default()
    }

    /// Returns the term in which this controller rules, or did.
    pub fn term(&self) -> Term {
        self.term.now()
    }

    /// # Errors
    /// Where another controller took this one's place.
    pub(crate) fn check_term(&self) -> Result<(), Error> {
        match self.term.ended_by() {
            None => Ok(()),
            Some(by) => Err(Error::Superseded { term: self.term(), by }),
        }
    }
}
