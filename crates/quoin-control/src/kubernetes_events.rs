//! Events of Kubernetes: events of volumes, replicas, pools and nodes are told at the claims, persistent volumes and nodes
//! that they concern, so that `kubectl describe` shows them.
//!
//! Each event becomes an object whose name is of its sequence, so one that is sent again is the same. Events of before this
//! controller ruled are not told. Where the API is away, events wait in the list that they are kept in, and the oldest go.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use prost_types::Timestamp;
use quoin_cluster::records::EventRecord;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::kubernetes_api::{Api, ApiError, ApiOptions, JSON};
use crate::state::State;

/// Namespace of events about objects that are in none.
const NO_NAMESPACE: &str = "default";
/// Pause after a failure.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Time in which nothing is looked for.
const IDLE: Duration = Duration::from_secs(3600);
const ASK_WITHIN: Duration = Duration::from_secs(10);
/// UIDs that are remembered.
const UIDS_MAX: usize = 4096;
/// Limits of the API.
const REASON_BYTES_MAX: usize = 128;
const MESSAGE_BYTES_MAX: usize = 1024;

/// An object of Kubernetes that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Regarding {
    kind: &'static str,
    /// Empty: it is in none.
    namespace: String,
    name: String,
}

impl Regarding {
    fn new(kind: &'static str, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn path(&self) -> String {
        let Self { kind, namespace, name } = self;
        match *kind {
            "PersistentVolumeClaim" => {
                format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
            }
            "PersistentVolume" => format!("/api/v1/persistentvolumes/{name}"),
            _ => format!("/api/v1/nodes/{name}"),
        }
    }
}

/// Claim and persistent volume of a volume, where its orchestrator told both parts of their names.
fn of_claim(claim: &BTreeMap<String, String>) -> Vec<Regarding> {
    let named = |key: &str| claim.get(key).map(String::as_str).filter(|name| is_name(name));
    let mut found = Vec::new();
    if let (Some(namespace), Some(name)) = (named("pvc/namespace"), named("pvc/name")) {
        found.push(Regarding::new("PersistentVolumeClaim", namespace, name));
    }
    if let Some(name) = named("pv/name") {
        found.push(Regarding::new("PersistentVolume", "", name));
    }
    found
}

/// Names that may be a part of a path alone: a caller of CSI says what claims are called.
fn is_name(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_of_name) && !name.contains("..")
}

/// Repeats of an event are told at their first, second, fourth … time.
fn is_to_be_told(event: &EventRecord) -> bool {
    event.count.is_power_of_two()
}

/// The object of the API, of an event about an object with this UID.
fn object(event: &EventRecord, regarding: &Regarding, uid: &str) -> Value {
    let namespace = namespace_of(regarding);
    let at = timestamp_text(event.time_ms);
    let kind = regarding.kind.to_ascii_lowercase();
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": format!("quoin-{kind}-{:016x}-{:x}", event.sequence, event.time_ms),
            "namespace": namespace,
        },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": regarding.kind,
            "namespace": regarding.namespace,
            "name": regarding.name,
            "uid": uid,
        },
        "reason": cut(&event.reason, REASON_BYTES_MAX),
        "message": cut(&event.message, MESSAGE_BYTES_MAX),
        "type": if event.severity == "Normal" { "Normal" } else { "Warning" },
        "source": { "component": "quoin" },
        "reportingComponent": "quoin.io/controller",
        "reportingInstance": "quoin",
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": event.count,
    })
}

fn namespace_of(regarding: &Regarding) -> &str {
    match regarding.namespace.as_str() {
        "" => NO_NAMESPACE,
        namespace => namespace,
    }
}

fn cut(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// Another attempt would end alike: it was told before, its namespace goes, or the API takes no such object. Rights may
/// still be given, and a busy server asks to be asked later.
fn is_final(error: &ApiError) -> bool {
    match error {
        ApiError::Refused { status: 403, message, .. } => message.contains("being terminated"),
        ApiError::Refused { status, .. } => {
            (400..500).contains(status) && ![401, 429].contains(status)
        }
        _ => false,
    }
}

/// A time as the API writes it, to the second.
fn timestamp_text(ms: u64) -> String {
    Timestamp { seconds: (ms / 1000) as i64, nanos: 0 }.to_string()
}

/// Tells events to the API.
pub(crate) struct KubernetesEvents {
    api: Api,
    state: Arc<State>,
    uids: HashMap<Regarding, String>,
}

impl KubernetesEvents {
    pub(crate) fn new(options: ApiOptions, state: Arc<State>) -> Self {
        Self { api: Api::new(options), state, uids: HashMap::new() }
    }

    /// Tells each event from now on, until `shutdown` is true.
    pub(crate) async fn keep_told(mut self, mut shutdown: watch::Receiver<bool>) {
        let mut latest = self.state.events.latest();
        let mut told = *latest.borrow_and_update();
        // Empty: all is well.
        let mut problem = String::new();
        loop {
            let pause = match self.tell_after(&mut told).await {
                Ok(()) => {
                    if !problem.is_empty() {
                        tracing::info!("events are told to Kubernetes again");
                        problem.clear();
                    }
                    IDLE
                }
                Err(error) => {
                    let error = error.to_string();
                    if error != problem {
                        tracing::warn!(error, "events are not told to Kubernetes");
                        problem = error;
                    }
                    AGAIN_AFTER
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The sender lives as long as the state, which this has.
                _ = latest.changed(), if problem.is_empty() => drop(latest.borrow_and_update()),
                _ = shutdown.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Tells the events after one of this sequence, which moves on with each.
    async fn tell_after(&mut self, told: &mut u64) -> Result<(), ApiError> {
        for event in self.state.events.after(*told) {
            if is_to_be_told(&event) {
                for regarding in self.regarding(&event) {
                    self.tell(&event, &regarding).await?;
                }
            }
            *told = event.sequence;
        }
        Ok(())
    }

    /// Objects of Kubernetes that an event concerns; none for a volume without a claim.
    fn regarding(&self, event: &EventRecord) -> Vec<Regarding> {
        let node = |name: &str| match is_name(name) {
            true => vec![Regarding::new("Node", "", name)],
            false => Vec::new(),
        };
        match event.object_kind.as_str() {
            "volume" | "replica" => {
                let by_id = self.state.volumes.get(&event.object_id);
                let by_name = || {
                    let name = self.state.names.get(&event.object_name)?;
                    self.state.volumes.get(&name.volume_id.0.to_string())
                };
                by_id.or_else(by_name).map_or_else(Vec::new, |volume| of_claim(&volume.spec.claim))
            }
            "pool" => {
                let pool = self.state.pools.get(&event.object_name);
                pool.map_or_else(Vec::new, |pool| node(&pool.node))
            }
            "node" => node(&event.object_name),
            _ => Vec::new(),
        }
    }

    async fn tell(&mut self, event: &EventRecord, regarding: &Regarding) -> Result<(), ApiError> {
        let Some(uid) = self.uid(regarding).await? else { return Ok(()) };
        let path = format!("/api/v1/namespaces/{}/events", namespace_of(regarding));
        let object = object(event, regarding, &uid);
        match self.api.call(Method::POST, &path, JSON, &object).await {
            Err(error) if is_final(&error) => {
                tracing::debug!(%error, "an event is not told to Kubernetes");
                Ok(())
            }
            told => told.map(drop),
        }
    }

    /// UID of an object, by which `kubectl describe` finds its events; `None`: there is no such object.
    async fn uid(&mut self, regarding: &Regarding) -> Result<Option<String>, ApiError> {
        if let Some(uid) = self.uids.get(regarding) {
            return Ok(Some(uid.clone()));
        }
        let path = regarding.path();
        let asked = self.api.call_within(ASK_WITHIN, Method::GET, &path, JSON, String::new());
        let found = match asked.await {
            Err(ApiError::Refused { status: 404, .. }) => return Ok(None),
            found => serde_json::from_slice::<Value>(&found?).unwrap_or_default(),
        };
        let Some(uid) = found["metadata"]["uid"].as_str() else { return Ok(None) };
        if self.uids.len() >= UIDS_MAX {
            self.uids.clear();
        }
        self.uids.insert(regarding.clone(), uid.to_owned());
        Ok(Some(uid.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(named: &[(&str, &str)]) -> BTreeMap<String, String> {
        named.iter().map(|(key, name)| ((*key).to_owned(), (*name).to_owned())).collect()
    }

    #[test]
    fn a_volume_has_the_claim_and_the_persistent_volume_that_are_named_whole() {
        let whole = [("pvc/namespace", "shop"), ("pvc/name", "orders"), ("pv/name", "pvc-1")];
        let found = of_claim(&claim(&whole));
        let paths: Vec<_> = found.iter().map(Regarding::path).collect();
        assert_eq!(
            paths,
            [
                "/api/v1/namespaces/shop/persistentvolumeclaims/orders",
                "/api/v1/persistentvolumes/pvc-1"
            ]
        );
        assert!(of_claim(&claim(&[("pvc/name", "orders")])).is_empty());
        for hostile in ["", "../x", "a/b", "a?b=c", "a..b", "a b", "ä", &"a".repeat(254)] {
            assert!(of_claim(&claim(&[("pv/name", hostile)])).is_empty(), "{hostile:?}");
        }
    }

    #[test]
    fn refusals_that_no_later_attempt_changes_are_final() {
        let refused = |status, message: &str| {
            let (method, path) = (Method::POST, String::new());
            is_final(&ApiError::Refused { method, path, status, message: message.to_owned() })
        };
        for status in [400, 404, 409, 422] {
            assert!(refused(status, ""), "{status}");
        }
        for status in [401, 403, 429, 500, 503] {
            assert!(!refused(status, "events is forbidden"), "{status}");
        }
        assert!(refused(
            403,
            "unable to create new content in namespace shop because it is being terminated"
        ));
        assert!(!is_final(&ApiError::Late));
    }

    #[test]
    fn an_event_is_written_as_the_api_wants_it() {
        let event = EventRecord {
            sequence: 17,
            time_ms: 1_700_000_000_123,
            severity: "Error".to_owned(),
            object_kind: "volume".to_owned(),
            object_id: String::new(),
            object_name: String::new(),
            reason: "VolumeFaulted".to_owned(),
            message: "ä".repeat(600),
            count: 4,
            reporter: String::new(),
        };
        let written = object(&event, &Regarding::new("PersistentVolume", "", "pvc-1"), "u");
        assert_eq!(written["metadata"]["namespace"], "default");
        assert_eq!(written["type"], "Warning");
        assert_eq!(written["lastTimestamp"], "2023-11-14T22:13:20Z");
        assert_eq!(written["message"].as_str().unwrap().len(), MESSAGE_BYTES_MAX);
        assert_eq!(written["involvedObject"]["uid"], "u");
        assert!(is_to_be_told(&event));
        assert!(!is_to_be_told(&EventRecord { count: 3, ..event }));
    }
}
