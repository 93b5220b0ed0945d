//! Records by which no controller rules meanwhile: those of the embedded store by the lock on their file, those that
//! controllers share by the lease.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use quoin_cluster::records::{
    MoveRecord, MoveState, Record, RecoveryRecord, SupersededRecord, decode, encode,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::Error;
use crate::files::RECORDS_FILE;
use crate::state::store::{
    Embedded, LeaseTimes, Put, Records, Rule, SharedStore, Store, StoreError, keep_ruling, release,
};
use crate::time::now_ms;

/// Beyond the time that a lease lasts it is waited for so much longer.
const LEASE_SLACK: Duration = Duration::from_secs(3);
/// Records of one write.
const PUTS: usize = 200;

/// Records that are held.
pub(crate) struct Offline {
    pub(crate) store: Arc<dyn Store>,
    leased: Option<Leased>,
}

struct Leased {
    store: Arc<dyn SharedStore>,
    rule: Rule,
    renewing: JoinHandle<()>,
}

impl Offline {
    /// Opens the records of a file.
    pub fn of_file(path: &Path) -> Result<Self, Error> {
        Ok(Self { store: Arc::new(Embedded::open(path)?), leased: None })
    }

    /// Takes the records, where no controller rules by them. The lease of one that was killed is waited for.
    ///
    /// # Errors
    /// A controller rules by them.
    pub async fn take(records: &Records, dir: &Path) -> Result<Self, Error> {
        let options = match records {
            Records::Embedded => return Self::of_file(&dir.join(RECORDS_FILE)),
            Records::Shared(options) => options,
        };
        let store = options.open()?;
        let rule = lease(&*store, options.times, &options.place()).await?;
        let (renewed, by) = (store.clone(), rule.clone());
        let renewing = tokio::spawn(async move { keep_ruling(&*renewed, &by).await });
        Ok(Self { store: store.clone(), leased: Some(Leased { store, rule, renewing }) })
    }

    /// The store, where controllers share it.
    pub fn shared(&self) -> Option<&Arc<dyn SharedStore>> {
        self.leased.as_ref().map(|leased| &leased.store)
    }

    /// Lets controllers rule by them again.
    pub async fn release(self) {
        if let Some(Leased { store, rule, renewing }) = self.leased {
            renewing.abort();
            release(&*store, &rule).await;
        }
    }

    /// Writes these, and deletes all others but those of `kept`.
    pub async fn replace_all(&self, records: Vec<Put>, kept: &[String]) -> Result<(), Error> {
        let new: BTreeSet<&String> = records.iter().map(|(key, _)| key).chain(kept).collect();
        let found = self.store.list("").await?;
        let gone = found.into_iter().filter(|entry| !new.contains(&entry.key));
        let gone: Vec<Put> = gone.map(|entry| (entry.key, None)).collect();
        for puts in [gone, records] {
            for some in puts.chunks(PUTS) {
                self.store.put_all(some.to_vec()).await?;
            }
        }
        Ok(())
    }
}

async fn lease(store: &dyn SharedStore, times: LeaseTimes, place: &str) -> Result<Rule, Error> {
    let deadline = Instant::now() + times.lasts + LEASE_SLACK;
    loop {
        match store.stand().await? {
            Ok(rule) => return Ok(rule),
            Err(other) if Instant::now() >= deadline => {
                return Err(Error::Precondition(format!(
                    "controller {other} rules by the records in {place}: end it first, and all that wait for \
                     its place"
                )));
            }
            Err(_) => tokio::time::sleep(store.look_every()).await,
        }
    }
}

/// The record, with its key, that says that the records do not rule.
pub(crate) fn doubt(why: &str) -> Put {
    let record = RecoveryRecord { why: why.to_owned(), since_ms: now_ms() };
    (record.key(), Some(encode(&record)))
}

/// One record, where it is there.
pub(crate) async fn read_one<R: Record>(store: &dyn Store, name: &str) -> Result<Option<R>, Error> {
    let key = R::key_of(name);
    let Some(entry) = store.get(&key).await? else { return Ok(None) };
    let read = decode(&entry.value).map_err(|reason| StoreError::Record { key, reason })?;
    Ok(Some(read))
}

pub(crate) async fn mark_of(store: &dyn Store) -> Result<Option<MoveRecord>, Error> {
    read_one(store, MoveRecord::NAME).await
}

/// # Errors
/// The records are being made here, or the cluster's have moved.
pub(crate) async fn check_is_here(store: &dyn Store) -> Result<(), Error> {
    match mark_of(store).await? {
        None => Ok(()),
        Some(mark) => Err(refusal(mark)),
    }
}

pub(crate) fn refusal(mark: MoveRecord) -> Error {
    match mark.state {
        MoveState::Filling => Error::RecordsUnfinished { from: mark.place },
        MoveState::Moved => Error::RecordsMoved { to: mark.place, term: mark.number },
    }
}

/// # Errors
/// Another controller took the place of the one of these records.
pub(crate) async fn check_not_superseded(store: &dyn Store) -> Result<(), Error> {
    let ended: Option<SupersededRecord> = read_one(store, SupersededRecord::NAME).await?;
    match ended {
        None => Ok(()),
        Some(ended) => Err(Error::Precondition(format!(
            "a controller of term {} took the place of the one of these records: they are old",
            ended.by()
        ))),
    }
}
