//! Events for users: a bounded list in which a repeat of an event is counted, not listed.
//!
//! Events outlive the controller but do not need a durable commit each: they are written in the
//! background, so a crash may lose the events of the last second.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_api::control as api;
use tokio::sync::watch;

use crate::Error;
use crate::state::records::{EventRecord, Record, decode, encode};
use crate::state::store::{Entry, Store, StoreError};
use crate::time::{now_ms, timestamp};

/// Most events kept; the oldest are removed first.
pub const EVENTS_MAX: usize = 2048;
const MESSAGE_BYTES_MAX: usize = 1024;
/// Time within which a repeat counts with the former event.
const REPEAT: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Severity {
    Normal,
    Warning,
    Error,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
            Self::Error => "Error",
        }
    }

    /// Severity of an agent's text; an unknown text is a warning.
    pub fn of(text: &str) -> Self {
        match text {
            "Normal" => Self::Normal,
            "Error" => Self::Error,
            _ => Self::Warning,
        }
    }
}

/// Object of an event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Object {
    /// Kind: volume, replica, pool, node or cluster.
    pub kind: &'static str,
    pub id: String,
    pub name: String,
}

impl Object {
    pub fn new(kind: &'static str, id: impl ToString, name: impl ToString) -> Self {
        Self { kind, id: id.to_string(), name: name.to_string() }
    }
}

struct Ring {
    events: VecDeque<EventRecord>,
    next: u64,
    /// Sequences to write, and to delete, at the next flush.
    unwritten: BTreeSet<u64>,
    unneeded: BTreeSet<u64>,
}

/// Events of the cluster.
pub struct Events {
    ring: Mutex<Ring>,
    store: Arc<dyn Store>,
    latest: watch::Sender<u64>,
    flushing: tokio::sync::Mutex<()>,
}

impl Events {
    pub(crate) async fn load(store: Arc<dyn Store>) -> Result<Self, StoreError> {
        let read = |entry: Entry| {
            let read = decode::<EventRecord>(&entry.value);
            read.map_err(|reason| StoreError::Record { key: entry.key, reason })
        };
        // The order of the keys is the order of the sequences.
        let entries = store.list(EventRecord::PREFIX).await?.into_iter();
        let events = entries.map(read).collect::<Result<VecDeque<_>, _>>()?;
        let next = events.back().map_or(0, |event| event.sequence) + 1;
        let ring = Ring { events, next, unwritten: BTreeSet::new(), unneeded: BTreeSet::new() };
        let (ring, latest) = (Mutex::new(ring), watch::channel(next - 1).0);
        Ok(Self { ring, store, latest, flushing: tokio::sync::Mutex::new(()) })
    }

    /// Records an event, or counts it with the event that it repeats.
    pub fn record(&self, severity: Severity, about: Object, reason: &str, message: impl ToString) {
        let mut message = message.to_string();
        if message.len() > MESSAGE_BYTES_MAX {
            let cut = (0..=MESSAGE_BYTES_MAX).rev().find(|at| message.is_char_boundary(*at));
            message.truncate(cut.unwrap_or(0));
        }
        let time_ms = now_ms();
        match severity {
            Severity::Normal => tracing::info!(about.kind, about.name, reason, message),
            _ => tracing::warn!(about.kind, about.name, reason, message),
        }
        let mut ring = self.ring.lock().expect("no holder of this lock panics");
        let sequence = ring.next;
        ring.next += 1;
        let since = time_ms.saturating_sub(REPEAT.as_millis() as u64);
        let same = ring.events.iter().rposition(|event| {
            event.time_ms >= since
                && event.object_id == about.id
                && event.object_kind == about.kind
                && event.reason == reason
                && event.message == message
        });
        let former = same.and_then(|at| ring.events.remove(at));
        if let Some(former) = &former {
            ring.forget(former.sequence);
        }
        ring.events.push_back(EventRecord {
            sequence,
            time_ms,
            severity: severity.as_str().to_owned(),
            object_kind: about.kind.to_owned(),
            object_id: about.id,
            object_name: about.name,
            reason: reason.to_owned(),
            message,
            count: former.map_or(1, |former| former.count.saturating_add(1)),
        });
        ring.unwritten.insert(sequence);
        if ring.events.len() > EVENTS_MAX
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.forget(oldest.sequence);
        }
        drop(ring);
        self.latest.send_replace(sequence);
    }

    /// Events after `sequence`, the newest last.
    pub fn after(&self, sequence: u64) -> Vec<EventRecord> {
        let ring = self.ring.lock().expect("no holder of this lock panics");
        ring.events.iter().filter(|event| event.sequence > sequence).cloned().collect()
    }

    /// Receiver for the sequence of the latest event.
    pub fn latest(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    /// Writes all changes in one commit. After a failure the next call tries again.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        // Flushes run one at a time: a second one could write an event again that the first has
        // removed, and no later flush would remove it.
        let _one_at_a_time = self.flushing.lock().await;
        let (write, remove) = {
            let ring = self.ring.lock().expect("no holder of this lock panics");
            let new = ring.events.iter().filter(|e| ring.unwritten.contains(&e.sequence));
            (new.cloned().collect::<Vec<_>>(), ring.unneeded.clone())
        };
        if write.is_empty() && remove.is_empty() {
            return Ok(());
        }
        let written = write.iter().map(|event| (event.key(), Some(encode(event))));
        let removed = remove.iter().map(|sequence| (EventRecord::key_at(*sequence), None));
        self.store.put_all(written.chain(removed).collect()).await?;
        let mut ring = self.ring.lock().expect("no holder of this lock panics");
        for event in &write {
            ring.unwritten.remove(&event.sequence);
        }
        ring.unneeded.retain(|sequence| !remove.contains(sequence));
        Ok(())
    }
}

impl Ring {
    fn forget(&mut self, sequence: u64) {
        self.unwritten.remove(&sequence);
        self.unneeded.insert(sequence);
    }
}

impl From<EventRecord> for api::Event {
    fn from(event: EventRecord) -> Self {
        debug_assert!(!event.name().is_empty());
        api::Event {
            sequence: event.sequence,
            time: Some(timestamp(event.time_ms)),
            severity: event.severity,
            object_kind: event.object_kind,
            object_id: event.object_id,
            object_name: event.object_name,
            reason: event.reason,
            message: event.message,
            count: event.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::store::Embedded;

    async fn open(dir: &tempfile::TempDir) -> Events {
        let store = Embedded::open(&dir.path().join("records.redb")).unwrap();
        Events::load(Arc::new(store)).await.unwrap()
    }

    #[tokio::test]
    async fn a_repeat_is_counted_and_moves_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(&dir).await;
        let pool = |name: &str| Object::new("pool", name, name);
        events.record(Severity::Warning, pool("a"), "PoolOffline", "gone");
        events.record(Severity::Warning, pool("b"), "PoolOffline", "gone");
        events.record(Severity::Warning, pool("a"), "PoolOffline", "gone");
        let list = events.after(0);
        let shown: Vec<_> = list.iter().map(|e| (e.object_name.as_str(), e.count)).collect();
        assert_eq!(shown, [("b", 1), ("a", 2)]);
        assert_eq!(*events.latest().borrow(), list[1].sequence);
    }

    #[tokio::test]
    async fn events_outlive_the_controller_and_sequences_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(&dir).await;
        for n in 0..5 {
            events.record(Severity::Normal, Object::new("cluster", "", ""), "Tick", n);
        }
        events.record(Severity::Normal, Object::new("cluster", "", ""), "Tick", 0);
        events.flush().await.unwrap();
        let before = events.after(0);
        drop(events);
        let events = open(&dir).await;
        assert_eq!(events.after(0), before);
        events.record(Severity::Normal, Object::new("cluster", "", ""), "Tick", "new");
        assert!(events.after(before[4].sequence).len() == 1);
    }

    #[tokio::test]
    async fn however_many_are_new_and_however_many_go_it_is_one_commit() {
        let dir = tempfile::tempdir().unwrap();
        let embedded = Embedded::open(&dir.path().join("records.redb")).unwrap();
        let writes = Arc::new(crate::state::store::Writes::default());
        let store = crate::state::store::Watched::new(Arc::new(embedded), writes.clone());
        let events = Events::load(Arc::new(store)).await.unwrap();
        for round in 0..3 {
            for n in 0..EVENTS_MAX {
                events.record(Severity::Normal, Object::new("pool", n, n), "Tick", round);
            }
            events.flush().await.unwrap();
            assert_eq!(writes.count(), round + 1);
            events.flush().await.unwrap();
            assert_eq!(writes.count(), round + 1, "nothing is new");
        }
        let before = events.after(0);
        assert_eq!(before.len(), EVENTS_MAX);
        drop(events);
        assert_eq!(open(&dir).await.after(0), before);
    }

    #[tokio::test]
    async fn there_are_never_more_than_the_limit_and_messages_are_cut_at_a_character() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(&dir).await;
        for n in 0..EVENTS_MAX + 10 {
            events.record(Severity::Normal, Object::new("pool", n, n), "Tick", "ä".repeat(1000));
        }
        let list = events.after(0);
        assert_eq!(list.len(), EVENTS_MAX);
        assert!(list.iter().all(|event| event.message.len() <= MESSAGE_BYTES_MAX));
        assert_eq!(list[0].object_id, "10");
    }
}
