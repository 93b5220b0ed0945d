//! Metrics of the attach daemon, for `/metrics`, and the health of its devices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Kind {
    operation: &'static str,
}

/// Buckets from 16 µs to half a minute.
fn duration() -> Histogram {
    Histogram::new(exponential_buckets(16e-6, 2.0, 21))
}

/// State of one volume, as it reports it.
pub(crate) struct VolumeStatus {
    /// Set while its target answers.
    pub connected: bool,
    /// Number of kernel requests that wait for it.
    pub in_flight: u64,
    /// Reason for which all its IO fails, if it does.
    pub dead: Option<String>,
}

type QueryStatus = Arc<dyn Fn() -> VolumeStatus + Send + Sync>;

/// Metrics. Cheap to clone; all clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    requests: [Counter; 4],
    durations: [Histogram; 4],
    read: Counter,
    written: Counter,
    failed: Counter,
    volumes: Gauge,
    connected: Gauge,
    in_flight: Gauge,
    pub(crate) taken_over: Counter,
    pub(crate) holder_up: Gauge,
    status: Arc<Mutex<BTreeMap<String, QueryStatus>>>,
    /// Names of the volumes for people.
    names: Arc<Mutex<BTreeMap<String, String>>>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

/// Request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read { bytes: u64 },
    Write { bytes: u64 },
    Flush,
    Zero,
}

impl Default for Metrics {
    fn default() -> Self {
        let kinds = ["read", "write", "flush", "zero"];
        let mut registry = Registry::with_prefix("quoin_attach");
        let requests = Family::<Kind, Counter>::default();
        let durations =
            Family::<Kind, Histogram>::new_with_constructor(duration as fn() -> Histogram);
        registry.register("requests", "Requests of the kernel answered", requests.clone());
        let help = "From taking a request of the kernel to its answer";
        registry.register_with_unit("request_duration", help, Unit::Seconds, durations.clone());
        let metrics = Self {
            registry: Arc::default(),
            requests: kinds.map(|operation| requests.get_or_create(&Kind { operation }).clone()),
            durations: kinds.map(|operation| durations.get_or_create(&Kind { operation }).clone()),
            read: Counter::default(),
            written: Counter::default(),
            failed: Counter::default(),
            volumes: Gauge::default(),
            connected: Gauge::default(),
            in_flight: Gauge::default(),
            taken_over: Counter::default(),
            holder_up: Gauge::default(),
            status: Arc::default(),
            names: Arc::default(),
        };
        let r = &mut registry;
        r.register_with_unit("read", "Bytes read", Unit::Bytes, metrics.read.clone());
        r.register_with_unit("written", "Bytes written", Unit::Bytes, metrics.written.clone());
        r.register("failed", "Requests answered with an error", metrics.failed.clone());
        r.register("volumes", "Volumes attached", metrics.volumes.clone());
        let help = "Attached volumes whose target answers";
        r.register("volumes_connected", help, metrics.connected.clone());
        let help = "Requests of the kernel that wait for a target";
        r.register("requests_in_flight", help, metrics.in_flight.clone());
        let help = "Volumes taken over from an earlier daemon with their IO waiting";
        r.register("volumes_taken_over", help, metrics.taken_over.clone());
        let help = "1 while a holder keeps the devices for a daemon that dies";
        r.register("holder_up", help, metrics.holder_up.clone());
        Self { registry: Arc::new(registry), ..metrics }
    }
}

impl Metrics {
    /// Renders the text that Prometheus scrapes.
    #[must_use]
    pub fn render(&self) -> String {
        let (mut volumes, mut connected, mut in_flight) = (0, 0, 0);
        for query in self.status().values() {
            let status = query();
            volumes += 1;
            connected += i64::from(status.connected);
            in_flight += i64::try_from(status.in_flight).unwrap_or(i64::MAX);
        }
        self.volumes.set(volumes);
        self.connected.set(connected);
        self.in_flight.set(in_flight);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    /// Checks that every device's target answers.
    ///
    /// # Errors
    /// The volumes whose IO waits.
    pub fn health(&self) -> Result<(), String> {
        let names = self.names().clone();
        let waits = |(volume, query): (&String, &QueryStatus)| {
            let named = names.get(volume).unwrap_or(volume);
            match query() {
                VolumeStatus { dead: Some(why), .. } => Some(format!("volume {named}: {why}")),
                VolumeStatus { connected: true, .. } => None,
                VolumeStatus { in_flight, .. } => Some(format!(
                    "volume {named}: no target serves it on this node, {in_flight} requests \
                     wait"
                )),
            }
        };
        let problems: Vec<_> = self.status().iter().filter_map(waits).collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }

    pub(crate) fn serve(&self, volume: &str, query: QueryStatus) {
        self.status().insert(volume.to_owned(), query);
    }

    pub(crate) fn forget(&self, volume: &str) {
        self.status().remove(volume);
        self.names().remove(volume);
    }

    /// Sets the name for people of a volume that is served.
    pub(crate) fn call(&self, volume: &str, name: &str) {
        if self.status().contains_key(volume) {
            self.names().insert(volume.to_owned(), name.to_owned());
        }
    }

    pub(crate) fn count_reply(&self, kind: RequestKind, took: Duration, is_good: bool) {
        let kind = match kind {
            RequestKind::Read { bytes } => {
                self.read.inc_by(bytes);
                0
            }
            RequestKind::Write { bytes } => {
                self.written.inc_by(bytes);
                1
            }
            RequestKind::Flush => 2,
            RequestKind::Zero => 3,
        };
        self.requests[kind].inc();
        self.durations[kind].observe(took.as_secs_f64());
        if !is_good {
            self.failed.inc();
        }
    }

    fn status(&self) -> MutexGuard<'_, BTreeMap<String, QueryStatus>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn names(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_healthy_while_every_target_replies_and_counts_its_replies() {
        let metrics = Metrics::default();
        assert_eq!(metrics.health(), Ok(()));
        let waits = || VolumeStatus { connected: false, in_flight: 3, dead: None };
        metrics.serve("17", Arc::new(waits));
        metrics.call("17", "db");
        assert!(metrics.health().unwrap_err().contains("volume db: no target"));
        let dead = move || VolumeStatus { dead: Some("served by h2".into()), ..waits() };
        metrics.serve("17", Arc::new(dead));
        assert_eq!(metrics.health(), Err("volume db: served by h2".into()));
        metrics.serve("17", Arc::new(waits));
        metrics.count_reply(RequestKind::Write { bytes: 4096 }, Duration::from_micros(20), true);
        let text = metrics.render();
        for line in [
            "quoin_attach_written_bytes_total 4096",
            "quoin_attach_requests_total{operation=\"write\"} 1",
            "quoin_attach_request_duration_seconds_count{operation=\"write\"} 1",
            "quoin_attach_requests_in_flight 3",
            "quoin_attach_volumes_connected 0",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        metrics.forget("17");
        assert_eq!(metrics.health(), Ok(()));
    }
}
