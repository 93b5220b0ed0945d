//! Rule of these records, and its term.

use quoin_cluster::records::{Concerned, RecoveryRecord};
use quoin_types::Term;

use crate::Error;
use crate::state::State;
use crate::state::census::{CENSUS_TIME, Doubt};

impl State {
    /// # Errors
    /// Says what to do, where the records do not rule, or another controller may.
    pub(crate) fn check_ruling(&self) -> Result<(), Error> {
        self.storage.store.check_rule()?;
        match self.recovery_reason() {
            why if why.is_empty() => Ok(()),
            why => Err(Error::Busy(format!(
                "the records do not rule, for {why}: `quoin controller recover` makes them agree with \
                 what the pools hold"
            ))),
        }
    }

    /// Returns true if nodes are ordered by these records: they rule, and the pools have been heard.
    pub(crate) fn orders_nodes(&self) -> bool {
        self.check_ruling().is_ok() && self.term.census.is_over()
    }

    /// Returns why the records do not rule; empty where they do.
    pub fn recovery_reason(&self) -> String {
        if let Some(recovery) = self.term.recovery.get(RecoveryRecord::NAME) {
            return recovery.why.clone();
        }
        match &*self.term.census.doubt().borrow() {
            Doubt::Behind(why) => why.clone(),
            Doubt::None | Doubt::Suspected => String::new(),
        }
    }

    /// From now on pools are heard before nodes are ordered.
    pub(crate) fn begin_census(&self) {
        if self.pools.count() > 0 {
            self.term.census.begin();
        }
    }

    /// A pool told all that it has.
    pub(crate) fn look_at_census(&self) {
        let pools = self.pools.list();
        if self.term.census.ends_with(pools.iter().map(|pool| &pool.name)) {
            self.announce(&Concerned::Everybody);
        }
    }

    /// Ends the census after its time; does nothing after that.
    pub(crate) async fn end_census(&self) {
        tokio::time::sleep(CENSUS_TIME).await;
        if self.term.census.ends_with(std::iter::empty()) {
            self.announce(&Concerned::Everybody);
        }
        std::future::pending().await
    }

    /// Nothing speaks against the records any more.
    pub(crate) fn clear_doubt(&self) {
        self.term.census.clear();
        self.announce(&Concerned::Everybody);
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
