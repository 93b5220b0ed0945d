//! State of what this mirror sends, as the controller is told.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quoin_api::control::MirrorSent;

use crate::metrics::Metrics;

/// State of one transfer.
#[derive(Debug)]
pub struct Progress {
    volume_id: String,
    token: String,
    /// Blocks before it were taken: the next stream begins there.
    cursor: AtomicU64,
    next_block: AtomicU64,
    content_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    message: Mutex<String>,
    metrics: Metrics,
}

impl Progress {
    pub fn new(volume_id: &str, token: &str, from_block: u64, metrics: Metrics) -> Self {
        Self {
            volume_id: volume_id.to_owned(),
            token: token.to_owned(),
            cursor: from_block.into(),
            next_block: from_block.into(),
            content_bytes: 0.into(),
            wire_bytes: 0.into(),
            message: Mutex::default(),
            metrics,
        }
    }

    pub fn cursor(&self) -> u64 {
        self.cursor.load(Ordering::Relaxed)
    }

    /// A stream begins at this block, which may lie before that of a former one.
    pub fn begun(&self, block: u64) {
        self.cursor.store(block, Ordering::Relaxed);
        self.next_block.store(block, Ordering::Relaxed);
        self.says(String::new());
    }

    pub fn sent(&self, next_block: u64, content_bytes: u64, wire_bytes: u64) {
        self.next_block.store(next_block, Ordering::Relaxed);
        self.content_bytes.fetch_add(content_bytes, Ordering::Relaxed);
        self.wire_bytes.fetch_add(wire_bytes, Ordering::Relaxed);
        self.metrics.sent_bytes.inc_by(content_bytes);
        self.metrics.wire_bytes.inc_by(wire_bytes);
    }

    /// The blocks before this one were taken.
    pub fn taken(&self, block: u64) {
        self.cursor.fetch_max(block, Ordering::Relaxed);
    }

    /// Sets the reason why it does not go on; empty: it does.
    pub fn says(&self, message: String) {
        *self.message.lock().unwrap_or_else(PoisonError::into_inner) = message;
    }

    pub fn message(&self) -> String {
        self.message.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn wire_bytes(&self) -> u64 {
        self.wire_bytes.load(Ordering::Relaxed)
    }

    fn told(&self) -> MirrorSent {
        MirrorSent {
            volume_id: self.volume_id.clone(),
            token: self.token.clone(),
            next_block: self.next_block.load(Ordering::Relaxed),
            content_bytes: self.content_bytes.load(Ordering::Relaxed),
            wire_bytes: self.wire_bytes(),
            message: self.message().chars().take(400).collect(),
        }
    }
}

/// All transfers of this mirror, by volume and token as the controller writes them.
#[derive(Default, Debug)]
pub struct Book(Mutex<BTreeMap<(String, String), Arc<Progress>>>);

impl Book {
    /// Notes a transfer, in place of one of the same volume and token.
    pub fn open(&self, progress: Progress) -> Arc<Progress> {
        let key = (progress.volume_id.clone(), progress.token.clone());
        let progress = Arc::new(progress);
        self.lock().insert(key, progress.clone());
        progress
    }

    /// Forgets the transfers that are not ordered any more.
    pub fn keep(&self, is_ordered: impl Fn(&str, &str) -> bool) {
        self.lock().retain(|(volume, token), _| is_ordered(volume, token));
    }

    /// Report to the controller.
    pub fn report(&self) -> Vec<MirrorSent> {
        self.lock().values().map(|progress| progress.told()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, String), Arc<Progress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
