//! Pools, controllers and epochs keep to their terms.

use std::collections::BTreeMap;

use quoin_types::message::FromReplica;
use quoin_types::{Epoch, SessionKey, Term};

use super::{Broken, Checker, Observation, Scene, broken};

#[derive(Default)]
pub(crate) struct TermRules {
    /// By term, the lowest and the highest epoch that it granted.
    granted: BTreeMap<u64, (Epoch, Epoch)>,
    /// By pool, incarnation and nonce, the highest term that the pool knew as it took the Open.
    opened: BTreeMap<(usize, u128, u64), Term>,
    /// The newest term in which IO was served.
    served: Term,
}

/// Returns true if a term is refused where this one was known before.
fn is_over(term: Term, highest: Term) -> bool {
    term.number < highest.number || (term.number == highest.number && term.id != highest.id)
}

impl Checker for TermRules {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        let terms = &scene.control.terms;
        if !terms.is_on() {
            return Ok(());
        }
        match *seen {
            Observation::EpochGranted { by_former, epoch } => {
                self.check_grant(scene, by_former, epoch)
            }
            Observation::LetIn { pool, term } => {
                let highest = terms.highest_at(pool);
                if is_over(term, highest) {
                    let detail =
                        format!("pool {pool} lets {term:?} in after it heard of {highest:?}");
                    return broken("TermRules", detail);
                }
                Ok(())
            }
            Observation::OpenTaken { pool, session } => {
                let key = (pool, session.incarnation.0, session.nonce);
                self.opened.insert(key, terms.highest_at(pool));
                Ok(())
            }
            Observation::PoolSends { pool, session, message: FromReplica::OpenAck(_) } => {
                self.check_open(scene, pool, session)
            }
            Observation::StartsNewest { target, epoch } => self.check_start(scene, target, epoch),
            _ => Ok(()),
        }
    }
}

impl TermRules {
    /// An epoch is of the term of the controller that granted it, and apart from all others.
    fn check_grant(
        &mut self,
        scene: &Scene<'_>,
        by_former: bool,
        epoch: Epoch,
    ) -> Result<(), Broken> {
        let term = scene.control.term_of(by_former);
        let (low, high) = self.granted.entry(term.number).or_insert((epoch, epoch));
        (*low, *high) = ((*low).min(epoch), (*high).max(epoch));
        let mut last = Epoch::ZERO;
        for (number, (low, high)) in &self.granted {
            if *low <= last {
                let detail = format!("term {number} granted epoch {low}, one before it {last}");
                return broken("TermsApart", detail);
            }
            last = *high;
        }
        if by_former && scene.control.terms.is_former_informed() {
            let detail = format!("term {term} grants epoch {epoch} after it heard of a higher one");
            return broken("TermRules", detail);
        }
        Ok(())
    }

    /// Nothing is opened by a grant of a term below what the pool ever knew.
    fn check_open(
        &self,
        scene: &Scene<'_>,
        pool: usize,
        session: SessionKey,
    ) -> Result<(), Broken> {
        let key = (pool, session.incarnation.0, session.nonce);
        let Some(highest) = self.opened.get(&key).copied() else { return Ok(()) };
        let grant = scene.control.terms.grant_of(session.incarnation);
        if is_over(grant, highest) {
            let epoch = session.epoch;
            let detail = format!(
                "pool {pool} opened epoch {epoch} by a grant of {grant:?} after it heard of {highest:?}"
            );
            return broken("TermRules", detail);
        }
        Ok(())
    }

    /// A target that serves does so in no term before one that served, nor in its rival.
    fn check_start(
        &mut self,
        scene: &Scene<'_>,
        target: usize,
        epoch: Epoch,
    ) -> Result<(), Broken> {
        let Some(process) = scene.process(target) else { return Ok(()) };
        let term = scene.control.terms.grant_of(process.grant.incarnation);
        let served = self.served;
        if is_over(term, served) {
            let detail = format!("epoch {epoch} of {term:?} serves after {served:?} did");
            return broken("TermRules", detail);
        }
        self.served = term;
        Ok(())
    }
}
