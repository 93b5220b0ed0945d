//! Events for users: a bounded list in which a repeat of an event is counted, not listed.
//!
//! Events outlive the controller but do not need a durable commit each: they are written in the
//! background, so a crash may lose the events of the last second.
//!
//! Events that a member reports or causes have a list of their own, of which no member keeps more
//! than its share: whatever members say, the controller's own events (an admin was removed, a token
//! was made) stay, and so do those of the other members.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quoin_api::control as api;
use quoin_cluster::records::{EventRecord, Record, decode, encode};
use tokio::sync::watch;

use crate::Error;
use crate::state::store::{Entry, Store, StoreError};
use crate::text::plain;
use crate::time::{now_ms, timestamp};

/// Most events of the controller's own that are kept; the oldest are removed first.
pub const EVENTS_MAX: usize = 2048;
/// Most events of members, together. The oldest of the member with the most is removed first.
pub const MEMBERS_EVENTS_MAX: usize = 1024;
/// Events that a member reports at a time, and how long one takes to be free again.
const TOLD_MAX: u32 = 128;
const TOLD_EVERY: Duration = Duration::from_secs(1);
/// Members whose number of recent events is remembered.
const TELLERS_MAX: usize = 4096;
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

/// How many events a member may tell now.
struct Allowance {
    left: u32,
    counted: Instant,
    /// Some were dropped since it had some left.
    is_over: bool,
}

struct Ring {
    events: VecDeque<EventRecord>,
    /// Members' events of these, and the controller's own under the empty name.
    by_reporter: HashMap<String, usize>,
    allowances: HashMap<String, Allowance>,
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
        let mut ring = Ring {
            by_reporter: HashMap::new(),
            allowances: HashMap::new(),
            events,
            next,
            unwritten: BTreeSet::new(),
            unneeded: BTreeSet::new(),
        };
        for event in &ring.events {
            *ring.by_reporter.entry(event.reporter.clone()).or_default() += 1;
        }
        let (ring, latest) = (Mutex::new(ring), watch::channel(next - 1).0);
        Ok(Self { ring, store, latest, flushing: tokio::sync::Mutex::new(()) })
    }

    /// Records an event of the controller's own, or counts it with the event that it repeats.
    pub fn record(&self, severity: Severity, about: Object, reason: &str, message: impl ToString) {
        self.record_of("", severity, about, reason, message);
    }

    /// Records the events that a member reports. Those above its limit are dropped, with one event
    /// that says so.
    pub fn record_told(
        &self,
        reporter: &str,
        severity: Severity,
        about: Object,
        reason: &str,
        message: impl ToString,
    ) {
        let allowed = {
            let mut ring = self.ring.lock().expect("no holder of this lock panics");
            ring.allow(reporter, Instant::now())
        };
        match allowed {
            Allowed::Yes => self.record_of(reporter, severity, about, reason, message),
            Allowed::NoMore => {
                let message = format!(
                    "{reporter} tells more events than are taken in (more than {TOLD_MAX} at a time, \
                     then one a second): some are dropped"
                );
                let member = about_reporter(reporter);
                self.record_of(reporter, Severity::Warning, member, "EventsDropped", message);
            }
            Allowed::StillNot => {}
        }
    }

    /// Records an event that a member causes by its doings, so that it is counted among its own.
    pub fn record_of(
        &self,
        reporter: &str,
        severity: Severity,
        about: Object,
        reason: &str,
        message: impl ToString,
    ) {
        let mut message = plain(&message.to_string());
        let reason = &plain(reason);
        let about = Object { id: plain(&about.id), name: plain(&about.name), ..about };
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
                && event.reason == *reason
                && event.reporter == reporter
                && event.message == message
        });
        let former = same.and_then(|at| ring.remove(at));
        ring.events.push_back(EventRecord {
            sequence,
            time_ms,
            severity: severity.as_str().to_owned(),
            object_kind: about.kind.to_owned(),
            object_id: about.id,
            object_name: about.name,
            reason: reason.clone(),
            message,
            count: former.map_or(1, |former| former.count.saturating_add(1)),
            reporter: reporter.to_owned(),
        });
        *ring.by_reporter.entry(reporter.to_owned()).or_default() += 1;
        ring.unwritten.insert(sequence);
        ring.make_room(reporter.is_empty());
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

fn about_reporter(reporter: &str) -> Object {
    let (kind, name) = reporter.split_once('/').unwrap_or_default();
    let kind = match kind {
        "pool" => "pool",
        "node" => "node",
        _ => "cluster",
    };
    Object::new(kind, name, name)
}

/// Outcome for an event that a member reports.
enum Allowed {
    Yes,
    /// The first that is dropped.
    NoMore,
    StillNot,
}

impl Ring {
    fn allow(&mut self, reporter: &str, now: Instant) -> Allowed {
        if self.allowances.len() >= TELLERS_MAX && !self.allowances.contains_key(reporter) {
            let whole = TOLD_EVERY * TOLD_MAX;
            self.allowances.retain(|_, known| now.duration_since(known.counted) < whole);
        }
        if self.allowances.len() >= TELLERS_MAX && !self.allowances.contains_key(reporter) {
            return Allowed::StillNot;
        }
        let fresh = Allowance { left: TOLD_MAX, counted: now, is_over: false };
        let known = self.allowances.entry(reporter.to_owned()).or_insert(fresh);
        let passed = now.duration_since(known.counted).as_millis() / TOLD_EVERY.as_millis();
        if passed > 0 {
            let passed = u32::try_from(passed).unwrap_or(u32::MAX);
            known.left = known.left.saturating_add(passed).min(TOLD_MAX);
            known.counted = now;
        }
        if known.left > 0 {
            known.left -= 1;
            // Reported again only after it had been quiet.
            known.is_over &= known.left < TOLD_MAX / 2;
            return Allowed::Yes;
        }
        match std::mem::replace(&mut known.is_over, true) {
            false => Allowed::NoMore,
            true => Allowed::StillNot,
        }
    }

    /// Removes the oldest event that is one too many, of the controller's own or of the members'.
    fn make_room(&mut self, own: bool) {
        let of_own = self.by_reporter.get("").copied().unwrap_or(0);
        let victim = if own {
            (of_own > EVENTS_MAX).then(String::new)
        } else if self.events.len() - of_own > MEMBERS_EVENTS_MAX {
            let members = self.by_reporter.iter().filter(|(reporter, _)| !reporter.is_empty());
            members.max_by_key(|(_, count)| **count).map(|(reporter, _)| reporter.clone())
        } else {
            None
        };
        let Some(victim) = victim else { return };
        if let Some(at) = self.events.iter().position(|event| event.reporter == victim) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) -> Option<EventRecord> {
        let event = self.events.remove(at)?;
        if let Some(count) = self.by_reporter.get_mut(&event.reporter) {
            *count -= 1;
            if *count == 0 {
                self.by_reporter.remove(&event.reporter);
            }
        }
        self.forget(event.sequence);
        Some(event)
    }

    fn forget(&mut self, sequence: u64) {
        self.unwritten.remove(&sequence);
        self.unneeded.insert(sequence);
    }
}

/// The message of an event.
pub(crate) fn message(event: EventRecord) -> api::Event {
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
    async fn no_member_pushes_out_events_of_the_controller_or_of_other_members() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(&dir).await;
        let node = |n: usize| Object::new("node", n, n);
        events.record(Severity::Normal, node(0), "AdminRemoved", "admin root");
        events.record_told("node/n2", Severity::Warning, node(2), "DiskSlow", "of another member");
        for n in 0..10_000 {
            events.record_told("node/n4", Severity::Normal, node(4), "Flood", n);
            events.record_of("pool/p9", Severity::Normal, node(9), "PoolReplaced", n);
        }
        let list = events.after(0);
        let of = |reason: &str| list.iter().filter(|event| event.reason == reason).count();
        assert_eq!((of("AdminRemoved"), of("DiskSlow"), of("EventsDropped")), (1, 1, 1));
        // Few are reported; the ones that are caused take what the other members leave.
        assert!(of("Flood") <= TOLD_MAX as usize + 60, "{}", of("Flood"));
        assert_eq!(list.len(), 1 + MEMBERS_EVENTS_MAX);
        // The same after a restart.
        events.flush().await.unwrap();
        drop(events);
        let events = open(&dir).await;
        assert_eq!(events.after(0), list);
        for n in 0..EVENTS_MAX + 1 {
            events.record(Severity::Normal, node(0), "Tick", n);
        }
        let list = events.after(0);
        assert_eq!(list.len(), EVENTS_MAX + MEMBERS_EVENTS_MAX);
        assert!(!list.iter().any(|event| event.reason == "AdminRemoved"), "the oldest of its own");
    }

    #[tokio::test]
    async fn text_of_others_is_written_out_where_it_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let events = open(&dir).await;
        let about = Object::new("node", "a\u{1b}[2J", "n\n4");
        events.record_told("node/n4", Severity::Normal, about, "R\u{7}", "x\n2026 AdminRemoved");
        let event = events.after(0).remove(0);
        let all = [event.object_id, event.object_name, event.reason, event.message].concat();
        assert!(!all.chars().any(char::is_control), "{all}");
        assert!(all.contains("x\\n2026"), "{all}");
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
