//! Records of one kind, held in memory beside the store and changed only through it.
//!
//! Every change is a compare-and-swap in the store first; memory follows. A swap that fails
//! hands over the record as it is, so memory can be behind the store (another controller wrote)
//! but a decision can never be made on something that is no longer so.
//!
//! Where the store failed it is not known whether it made the change. The record is read again at once,
//! or else by the controller's tick, and before the next change of this kind.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, RwLock};

use quoin_cluster::records::{Index, Record, decode, encode};

use crate::Error;
use crate::state::changes::Changes;
use crate::state::store::{Entry, Store, StoreError, Swap};

/// A record changes this often at most while one update tries to get in.
const TRIES_MAX: u32 = 32;

type Versioned<R> = (u64, Arc<R>);

/// All records of one kind.
pub(crate) struct Table<R: Record> {
    store: Arc<dyn Store>,
    records: RwLock<Records<R>>,
    /// Records whose last change was not answered, by name, with the revision before it.
    unanswered: Mutex<BTreeMap<String, u64>>,
    changes: Changes,
}

struct Records<R: Record> {
    by_name: BTreeMap<String, Versioned<R>>,
    index: R::Index,
}

impl<R: Record> Table<R> {
    pub async fn load(store: Arc<dyn Store>, changes: Changes) -> Result<Self, StoreError> {
        let mut records: Records<R> =
            Records { by_name: BTreeMap::new(), index: R::Index::default() };
        for entry in store.list(R::PREFIX).await? {
            let record = read::<R>(&entry)?;
            records.index.follow(None, Some(&record));
            records.by_name.insert(record.name(), (entry.revision, Arc::new(record)));
        }
        Ok(Self { store, records: RwLock::new(records), unanswered: Mutex::default(), changes })
    }

    pub fn get(&self, name: &str) -> Option<Arc<R>> {
        self.versioned(name).map(|(_, record)| record)
    }

    pub fn versioned(&self, name: &str) -> Option<Versioned<R>> {
        self.records.read().expect("no holder of this lock panics").by_name.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn list(&self) -> Vec<Arc<R>> {
        let records = self.records.read().expect("no holder of this lock panics");
        records.by_name.values().map(|(_, record)| record.clone()).collect()
    }

    pub fn count(&self) -> usize {
        self.records.read().expect("no holder of this lock panics").by_name.len()
    }

    /// Up to `count` of those that `is_listed`, whose names come after `after`.
    pub fn page_of(
        &self,
        after: &str,
        count: usize,
        is_listed: impl Fn(&R) -> bool,
    ) -> Vec<Arc<R>> {
        use std::ops::Bound;
        let records = self.records.read().expect("no holder of this lock panics");
        let from = (Bound::Excluded(after), Bound::Unbounded);
        let listed = records.by_name.range::<str, _>(from).map(|(_, (_, record))| record);
        listed.filter(|record| is_listed(record)).take(count).cloned().collect()
    }

    /// Creates the record; the one that is there already where there is one.
    pub async fn create(&self, record: R) -> Result<Result<Arc<R>, Arc<R>>, Error> {
        let name = record.name();
        match self.swap(&name, 0, Some(encode(&record))).await? {
            Swap::Done(revision) => {
                let record = Arc::new(record);
                self.remember(&name, revision, Some(record.clone()));
                Ok(Ok(record))
            }
            Swap::Conflict(found) => {
                let found = self.take(&name, found)?;
                // A record cannot conflict with nothing when none was expected.
                found.map(Err).ok_or_else(|| contended::<R>(&name).into())
            }
        }
    }

    /// Changes the record by `change`, which sees the latest one and may refuse, and may run
    /// several times. An unchanged record is not written. `None` where there is no record.
    pub async fn update<T>(
        &self,
        name: &str,
        mut change: impl FnMut(&mut R) -> Result<T, Error>,
    ) -> Result<Option<(Arc<R>, T)>, Error> {
        self.read_unanswered().await?;
        for _ in 0..TRIES_MAX {
            let Some((revision, before)) = self.versioned(name) else { return Ok(None) };
            let mut after = R::clone(&before);
            let value = change(&mut after)?;
            if after == *before {
                return Ok(Some((before, value)));
            }
            let written = Some(encode(&after));
            match self.swap(name, revision, written).await? {
                Swap::Done(revision) => {
                    let after = Arc::new(after);
                    self.remember(name, revision, Some(after.clone()));
                    return Ok(Some((after, value)));
                }
                Swap::Conflict(found) => {
                    self.take(name, found)?;
                }
            }
        }
        Err(contended::<R>(name).into())
    }

    /// Deletes the record if it is still the one that `agree` accepts.
    pub async fn remove(&self, name: &str, agree: impl Fn(&R) -> bool) -> Result<bool, Error> {
        self.read_unanswered().await?;
        for _ in 0..TRIES_MAX {
            let Some((revision, record)) = self.versioned(name) else { return Ok(true) };
            if !agree(&record) {
                return Ok(false);
            }
            match self.swap(name, revision, None).await? {
                Swap::Done(revision) => {
                    self.remember(name, revision, None);
                    return Ok(true);
                }
                Swap::Conflict(found) => {
                    self.take(name, found)?;
                }
            }
        }
        Err(contended::<R>(name).into())
    }

    async fn swap(
        &self,
        name: &str,
        revision: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        let outcome = self.store.compare_and_swap(&R::key_of(name), revision, value).await;
        if outcome.is_err() {
            self.unanswered().insert(name.to_owned(), revision);
            // Where the store fails still, it is read later.
            let _ = self.read_unanswered().await;
        }
        outcome
    }

    fn unanswered(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, u64>> {
        self.unanswered.lock().expect("no holder of this lock panics")
    }

    /// Reads those records again of which the last change was not answered.
    pub async fn read_unanswered(&self) -> Result<(), Error> {
        let unanswered = self.unanswered().clone();
        for (name, revision) in unanswered {
            let found = self.store.get(&R::key_of(&name)).await?;
            // Another change may have been made, and answered, since it was read.
            let is_known = self.versioned(&name).is_some_and(|(known, _)| known == revision);
            if found.is_some() || is_known {
                self.take(&name, found)?;
            }
            self.unanswered().remove(&name);
        }
        Ok(())
    }

    fn take(&self, name: &str, found: Option<Entry>) -> Result<Option<Arc<R>>, Error> {
        let Some(entry) = found else {
            self.remember(name, u64::MAX, None);
            return Ok(None);
        };
        let record = Arc::new(read::<R>(&entry)?);
        self.remember(name, entry.revision, Some(record.clone()));
        Ok(Some(record))
    }

    /// Answers of the store may overtake one another; the highest revision is the last.
    fn remember(&self, name: &str, revision: u64, record: Option<Arc<R>>) {
        let mut records = self.records.write().expect("no holder of this lock panics");
        if records.by_name.get(name).is_some_and(|(known, _)| *known > revision) {
            return;
        }
        let before = match record.clone() {
            Some(record) => records.by_name.insert(name.to_owned(), (revision, record)),
            None => records.by_name.remove(name),
        };
        let before = before.map(|(_, before)| before);
        records.index.follow(before.as_deref(), record.as_deref());
        drop(records);
        let is_news = match (&before, &record) {
            (Some(before), Some(after)) => after.is_news(before),
            _ => true,
        };
        if is_news {
            let (before, after) = (before.as_deref(), record.as_deref());
            let volume = after.or(before).and_then(Record::volume);
            self.changes.wake(&R::concerned_by(before, after), volume);
        }
    }

    /// Reads the index.
    pub fn index<T>(&self, read: impl FnOnce(&R::Index) -> T) -> T {
        read(&self.records.read().expect("no holder of this lock panics").index)
    }

    /// The records whose names the index gives.
    pub fn indexed<'a, N>(&'a self, names: impl FnOnce(&R::Index) -> Option<&N>) -> Vec<Arc<R>>
    where
        for<'n> &'n N: IntoIterator<Item = &'n String>,
        N: 'a,
    {
        let records = self.records.read().expect("no holder of this lock panics");
        let names = names(&records.index).into_iter().flatten();
        let found = names.filter_map(|name| records.by_name.get(name));
        found.map(|(_, record)| record.clone()).collect()
    }
}

fn contended<R: Record>(name: &str) -> StoreError {
    StoreError::Contended { key: R::key_of(name), tries: TRIES_MAX }
}

fn read<R: Record>(entry: &Entry) -> Result<R, StoreError> {
    decode(&entry.value).map_err(|reason| StoreError::Record { key: entry.key.clone(), reason })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::sync::broadcast;

    use super::*;
    use crate::state::store::{Change, Embedded, Put};
    use quoin_cluster::records::PoolRecord;

    /// A store that makes changes without answering them, and may not be readable meanwhile.
    struct Mute {
        inner: Embedded,
        answers: AtomicBool,
        reads: AtomicBool,
    }

    #[async_trait::async_trait]
    impl Store for Mute {
        async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
            match self.reads.load(Ordering::SeqCst) {
                true => self.inner.get(key).await,
                false => Err(StoreError::Failed("no read".into())),
            }
        }

        async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
            self.inner.list(prefix).await
        }

        async fn compare_and_swap(
            &self,
            key: &str,
            expected: u64,
            value: Option<Vec<u8>>,
        ) -> Result<Swap, StoreError> {
            let done = self.inner.compare_and_swap(key, expected, value).await;
            match self.answers.load(Ordering::SeqCst) {
                true => done,
                false => Err(StoreError::Failed("no answer".into())),
            }
        }

        async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError> {
            self.inner.put_all(records).await
        }

        fn watch(&self) -> broadcast::Receiver<Change> {
            self.inner.watch()
        }
    }

    fn pool(name: &str) -> PoolRecord {
        PoolRecord {
            name: name.into(),
            pool_id: "id".into(),
            node: "h1".into(),
            address: "h1:1".into(),
            topology: Default::default(),
            start_counter: 1,
            start_nonce: 2,
            former_start: 0,
            former_nonce: 0,
            mark: 3,
            rolled_back: false,
            scrub_request: 0,
        }
    }

    #[tokio::test]
    async fn what_became_of_a_change_without_an_answer_is_read_at_once_or_as_soon_as_that_is_possible()
     {
        for reads in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let inner = Embedded::open(&dir.path().join("records.redb")).unwrap();
            let (answers, readable) = (AtomicBool::new(true), AtomicBool::new(true));
            let store = Arc::new(Mute { inner, answers, reads: readable });
            let table = Table::<PoolRecord>::load(store.clone(), Changes::default()).await.unwrap();
            for name in ["changed", "removed"] {
                table.create(pool(name)).await.unwrap().unwrap();
            }
            store.answers.store(false, Ordering::SeqCst);
            store.reads.store(reads, Ordering::SeqCst);
            table.create(pool("created")).await.unwrap_err();
            let more = |pool: &mut PoolRecord| {
                pool.mark += 1;
                Ok(())
            };
            table.update("changed", more).await.unwrap_err();
            table.remove("removed", |_| true).await.unwrap_err();
            store.reads.store(true, Ordering::SeqCst);
            // Each was asked for once where nothing could be read between.
            table.read_unanswered().await.unwrap();
            let known: Vec<_> = table.list().iter().map(|p| (p.name.clone(), p.mark)).collect();
            let expected: &[(&str, u64)] = match reads {
                true => &[("changed", 4), ("created", 3)],
                // A change was not begun as long as it was not known what became of the one before.
                false => &[("changed", 3), ("created", 3), ("removed", 3)],
            };
            let expected: Vec<_> = expected.iter().map(|(n, m)| ((*n).to_owned(), *m)).collect();
            assert_eq!(known, expected);
            store.answers.store(true, Ordering::SeqCst);
            assert!(table.update("created", more).await.unwrap().is_some());
        }
    }

    #[test]
    fn a_new_mark_of_a_pool_wakes_no_stream_and_other_news_of_it_do() {
        let before = pool("p1");
        let marked = PoolRecord { mark: 9, ..before.clone() };
        assert!(!marked.is_news(&before) && !before.is_news(&before));
        let topology = [("zone".to_owned(), "a".to_owned())].into();
        for after in [
            PoolRecord { pool_id: "other".into(), ..marked.clone() },
            PoolRecord { address: "h1:2".into(), ..marked.clone() },
            PoolRecord { topology, ..marked.clone() },
            PoolRecord { start_counter: 2, ..marked.clone() },
            PoolRecord { start_nonce: 5, ..marked.clone() },
            PoolRecord { rolled_back: true, ..marked.clone() },
            PoolRecord { scrub_request: 1, ..marked.clone() },
        ] {
            assert!(after.is_news(&before), "{after:?}");
        }
    }
}
