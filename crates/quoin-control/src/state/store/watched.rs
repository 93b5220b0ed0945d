//! A store whose calls are counted and measured.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::latency::Call;
use super::{About, Change, Entry, Latency, Put, Store, StoreError, Swap};

/// How often was written, and how that went last, for the controller's health and metrics.
#[derive(Default, Debug)]
pub struct Writes {
    failed: Mutex<Option<String>>,
    done: AtomicU64,
    latency: Latency,
}

impl Writes {
    /// # Errors
    /// Returns the error of the last write.
    pub fn check(&self) -> Result<(), String> {
        match &*self.failed.lock().expect("no holder of this lock panics") {
            Some(why) => Err(why.clone()),
            None => Ok(()),
        }
    }

    /// Writes since the start: of one record each, or of several events.
    pub fn count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Latency of reads and writes.
    pub fn latency(&self) -> &Latency {
        &self.latency
    }

    fn note<T>(&self, outcome: &Result<T, StoreError>, committed: bool) {
        let commits = u64::from(committed);
        self.done.fetch_add(commits, Ordering::Relaxed);
        let why = outcome.as_ref().err().map(ToString::to_string);
        *self.failed.lock().expect("no holder of this lock panics") = why;
    }
}

/// A store whose failures to write are noted; a later success clears the note.
pub struct Watched {
    inner: Arc<dyn Store>,
    writes: Arc<Writes>,
}

impl Watched {
    pub fn new(inner: Arc<dyn Store>, writes: Arc<Writes>) -> Self {
        Self { inner, writes }
    }
}

#[async_trait]
impl Store for Watched {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.writes.latency.of(Call::Read, self.inner.get(key)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        self.writes.latency.of(Call::Read, self.inner.list(prefix)).await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        let swap = self.inner.compare_and_swap(key, expected, value);
        let outcome = self.writes.latency.of(Call::Write, swap).await;
        self.writes.note(&outcome, matches!(outcome, Ok(Swap::Done(_))));
        outcome
    }

    async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError> {
        let outcome = self.writes.latency.of(Call::Write, self.inner.put_all(records)).await;
        self.writes.note(&outcome, outcome.is_ok());
        outcome
    }

    fn watch(&self) -> broadcast::Receiver<Change> {
        self.inner.watch()
    }

    fn opened_again(&self) -> u64 {
        self.inner.opened_again()
    }

    fn about(&self) -> About {
        self.inner.about()
    }

    fn check_rule(&self) -> Result<(), StoreError> {
        self.inner.check_rule()
    }

    async fn keep_authority(&self, authority: Vec<u8>) -> Result<(), StoreError> {
        self.inner.keep_authority(authority).await
    }
}
