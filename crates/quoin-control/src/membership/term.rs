//! The term of this controller, and its end once another one took its place.
//!
//! A recovery of the records begins a term ([`quoin_types::term`]). All answers carry its proof, and all
//! members show the highest term that they heard of with each call, so a controller hears of a higher
//! one with the first call of a member that knows. It ends then, and that is a record: it does not start
//! again until a person lets it begin a term of its own ([`let_recover`]).
//!
//! Records that do not rule claim no term: they order nothing, and are not ended.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use quoin_cluster::records::{Concerned, Record, SupersededRecord, TermRecord, Text, decode};
use quoin_identity::{Peer, Proven};
use quoin_types::term::TermOrder;
use quoin_types::{Term, TermId};
use tokio::sync::watch;

use crate::Error;
use crate::disaster::offline::{Offline, check_is_here, doubt};
use crate::files::RECORDS_FILE;
use crate::state::census::Doubt;
use crate::state::events::{Object, Severity};
use crate::state::store::{Records, Store, StoreError, Swap};
use crate::state::{State, random_id};
use crate::time::now_ms;

/// While it lives a recovery is under way.
pub(crate) struct Recovering<'a>(&'a State);

impl Drop for Recovering<'_> {
    fn drop(&mut self) {
        self.0.term.recovering.store(false, Ordering::Relaxed);
        self.0.announce(&Concerned::Everybody);
    }
}

/// The term of this controller, beside those of others.
pub struct Terms {
    state: Arc<State>,
}

impl Terms {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// The highest one that was proven to this controller, its own included.
    pub(crate) fn highest(&self) -> Term {
        let (own, heard) = (self.state.term(), *self.state.term.heard());
        if heard.number > own.number { heard } else { own }
    }

    /// The proof of the term; the same bytes until the certificate is renewed.
    pub(crate) fn proof(&self) -> Bytes {
        let (term, began) = (self.state.term(), self.state.identity.validity().0);
        let mut signed = self.state.term.signed.lock().expect("no holder of this lock panics");
        if let Some((of, proven)) = &*signed
            && (*of, proven.term) == (began, term)
        {
            return proven.proof.clone();
        }
        match self.state.identity.sign_term(term) {
            Ok(proof) => {
                *signed = Some((began, Proven { term, proof: proof.clone() }));
                proof
            }
            Err(error) => {
                tracing::error!(%error, "the term cannot be proven, so members refuse this controller");
                Bytes::new()
            }
        }
    }

    /// Returns true if what is said is ordered by records that rule.
    pub(crate) fn claims(&self) -> bool {
        self.state.check_ruling().is_ok() && !self.state.term.recovering.load(Ordering::Relaxed)
    }

    /// The term whose controller took this one's place, once one did.
    pub fn superseded(&self) -> watch::Receiver<Option<Term>> {
        self.state.term.end.subscribe()
    }

    /// A member shows the highest term that it heard of. What it cannot prove is nothing.
    pub(crate) async fn hear(&self, proof: &[u8], from: &Peer) -> Result<(), Error> {
        if proof.is_empty() || *proof == *self.proof() {
            return Ok(());
        }
        let heard = match self.state.identity.verify_term(proof) {
            Ok(heard) => heard,
            Err(error) => {
                tracing::debug!(%from, %error, "a term that is not proven");
                return Ok(());
            }
        };
        {
            let mut highest = self.state.term.heard();
            if heard.compare_with(*highest) == TermOrder::Higher
                || heard.number == self.state.term().number
            {
                *highest = heard;
            }
        }
        if !self.claims() {
            return Ok(());
        }
        let own = self.state.term();
        if own.is_ended_by(heard) {
            return self.end(heard, from).await;
        }
        if heard.compare_with(own) == TermOrder::Rival {
            let message = format!(
                "{from} goes by term {heard} of another controller, which began it at the same time, \
                 and refuses this one: end the other, then `quoin controller recover` begins a term \
                 above both"
            );
            let cluster = Object::new("cluster", "", "");
            self.state.events.record(Severity::Error, cluster, "TermRefused", message);
            // An old copy of shared records begins the term again that the newer ones had.
            let is_shared = self.state.storage.store.about().lease.is_some();
            if is_shared && self.state.term.census.doubts(Doubt::Suspected) {
                self.state.announce(&Concerned::Everybody);
            }
        }
        Ok(())
    }

    async fn end(&self, by: Term, from: &Peer) -> Result<(), Error> {
        let record = SupersededRecord {
            number: by.number,
            id: Text(by.id),
            told_by: from.to_string(),
            since_ms: now_ms(),
        };
        // Before it is told: it must not come back by a start.
        let written = self.state.term.ended.create(record).await;
        if self.state.term.end.send_if_modified(|end| end.replace(by).is_none()) {
            let message = format!(
                "{from} has heard of term {by}: the records were recovered elsewhere, and this \
                 controller, of term {}, ends",
                self.state.term()
            );
            let cluster = Object::new("cluster", "", "");
            self.state.events.record(Severity::Error, cluster, "ControllerSuperseded", message);
            self.state.events.flush().await?;
        }
        written.map(drop)
    }

    /// Until the answer is dropped pools are asked whatever they think of this term.
    pub(crate) fn begin_recovering(&self) -> Recovering<'_> {
        self.state.term.recovering.store(true, Ordering::Relaxed);
        Recovering(&self.state)
    }

    /// Returns true if a member heard of a term that this one is not above.
    pub(crate) fn is_overtaken(&self) -> bool {
        let (own, heard) = (self.state.term(), *self.state.term.heard());
        heard != own && heard.number >= own.number && heard != Term::default()
    }

    /// Begins a term above all that were heard of. It is a record before a member is told.
    pub(crate) async fn begin(&self) -> Result<Term, Error> {
        let heard = [self.state.term(), *self.state.term.heard()];
        let number = Term::next_number(heard).ok_or_else(|| {
            Error::Precondition("no term is left: every number has been used".to_owned())
        })?;
        let term = Term { number, id: TermId(random_id()) };
        let record = TermRecord { number, id: Text(term.id), since_ms: now_ms() };
        if self.state.term.records.create(record.clone()).await?.is_err() {
            let replace = |found: &mut TermRecord| {
                *found = record.clone();
                Ok(())
            };
            self.state.term.records.update(TermRecord::NAME, replace).await?;
        }
        self.state.announce(&Concerned::Everybody);
        Ok(term)
    }
}

/// Lets a controller that was superseded start again: its records do not rule until they agree with
/// what the pools hold, in a term of its own. Gives the term that ended it.
///
/// # Errors
/// Where it was not superseded, or runs, or its records have moved.
pub async fn let_recover(dir: &Path, records: &Records) -> Result<Term, Error> {
    if matches!(records, Records::Embedded) && !dir.join(RECORDS_FILE).exists() {
        return Err(Error::NotInitialised(dir.to_owned()));
    }
    let held = Offline::take(records, dir).await?;
    let outcome = let_recover_in(dir, &*held.store).await;
    held.release().await;
    outcome
}

async fn let_recover_in(dir: &Path, store: &dyn Store) -> Result<Term, Error> {
    check_is_here(store).await?;
    let key = SupersededRecord::key_of(SupersededRecord::NAME);
    let Some(entry) = store.get(&key).await? else {
        return Err(Error::Precondition(format!(
            "no other controller took the place of the one in {}: start it, and run `quoin controller \
             recover` without --state",
            dir.display()
        )));
    };
    let unreadable = |reason| StoreError::Record { key: key.clone(), reason };
    let by = decode::<SupersededRecord>(&entry.value).map_err(unreadable)?.by();
    // The doubt first: a crash in between leaves a controller that is ended still.
    store.put_all(vec![doubt(&format!("a controller of term {by} took its place"))]).await?;
    match store.compare_and_swap(&key, entry.revision, None).await? {
        Swap::Done(_) => Ok(by),
        Swap::Conflict(_) => Err(StoreError::Contended { key, tries: 1 }.into()),
    }
}
