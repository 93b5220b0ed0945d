//! The term of this controller by its records, and those that it heard of.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use quoin_cluster::records::{RecoveryRecord, SupersededRecord, TermRecord};
use quoin_identity::Proven;
use quoin_types::Term;
use tokio::sync::watch;

use crate::Error;
use crate::state::census::Census;
use crate::state::changes::Changes;
use crate::state::store::{Store, StoreError};
use crate::state::table::Table;

/// The controller's term by its records, whether these rule, and the terms that it heard of.
pub(crate) struct OwnTerm {
    pub(crate) records: Table<TermRecord>,
    pub(crate) ended: Table<SupersededRecord>,
    /// There while the records do not rule.
    pub(crate) recovery: Table<RecoveryRecord>,
    /// The highest one that a member proved.
    pub(crate) heard: Mutex<Term>,
    /// Proof by the certificate that began at that time.
    pub(crate) signed: Mutex<Option<(SystemTime, Proven)>>,
    /// A recovery is under way: pools are asked although they may know a higher term.
    pub(crate) recovering: AtomicBool,
    pub(crate) end: watch::Sender<Option<Term>>,
    pub(crate) census: Census,
}

impl OwnTerm {
    pub async fn load(store: Arc<dyn Store>, changes: Changes) -> Result<Self, StoreError> {
        let ended = Table::<SupersededRecord>::load(store.clone(), changes.clone()).await?;
        let end = ended.get(SupersededRecord::NAME).map(|record| record.by());
        Ok(Self {
            records: Table::load(store.clone(), changes.clone()).await?,
            recovery: Table::load(store, changes).await?,
            ended,
            heard: Mutex::default(),
            signed: Mutex::default(),
            recovering: AtomicBool::new(false),
            end: watch::channel(end).0,
            census: Census::default(),
        })
    }

    pub fn now(&self) -> Term {
        self.records.get(TermRecord::NAME).map(|record| record.term()).unwrap_or_default()
    }

    pub async fn read_unanswered(&self) -> Result<(), Error> {
        self.records.read_unanswered().await?;
        self.recovery.read_unanswered().await?;
        self.ended.read_unanswered().await
    }

    /// Returns the term of the controller that took this one's place.
    pub fn ended_by(&self) -> Option<Term> {
        *self.end.borrow()
    }

    pub fn heard(&self) -> std::sync::MutexGuard<'_, Term> {
        self.heard.lock().expect("no holder of this lock panics")
    }
}
