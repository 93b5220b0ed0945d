//! Memory of one life of the controller, beside the records: questions and answers of comparisons, and orphans.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::{HashesAsked, HashesTold};
use quoin_types::ids::GroupId;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// Question of a peer.
pub(super) struct Asked {
    pub peer: String,
    pub group: GroupId,
    pub question: HashesAsked,
}

/// Comparisons and answers of this life.
#[derive(Default)]
pub(super) struct Comparisons {
    pub asked: Mutex<VecDeque<Asked>>,
    pub answers: Mutex<HashMap<u128, oneshot::Sender<HashesTold>>>,
    /// Bytes that were compared, where that is more than the record says.
    pub done: Mutex<HashMap<GroupId, u64>>,
    pub news: Notify,
}

/// Orphan as this life has seen it.
pub(super) struct Seen {
    pub since: Instant,
    /// Time of before that.
    pub before: Duration,
    pub recorded: Duration,
    pub is_told: bool,
}

/// Orphans of this life.
#[derive(Default)]
pub(super) struct Orphans(Mutex<HashMap<GroupId, Seen>>);

impl Orphans {
    pub fn lock(&self) -> MutexGuard<'_, HashMap<GroupId, Seen>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    pub fn forget(&self, group: GroupId) {
        self.lock().remove(&group);
    }
}
