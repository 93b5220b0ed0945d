//! Metrics of a target for `/metrics`.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use quoin_api::control::ServedElsewhere;
use quoin_replication::primary::ReplicaStanding;
use quoin_telemetry::health::Health;
use quoin_types::block::{Operation, Reply, Request};

use crate::volume_metrics::{Counts, Standing, VolumeMetrics};

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Kind {
    operation: &'static str,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct State {
    state: &'static str,
}

/// Returns buckets from 16 µs to half a minute.
fn latency() -> Histogram {
    Histogram::new(exponential_buckets(16e-6, 2.0, 21))
}

/// Counters of every shard together; cheap to clone, no lock in the path of a request.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// `None`: they are switched off.
    by_volume: Option<VolumeMetrics>,
    pub volumes: Gauge,
    pub clients: ClientMetrics,
    /// Bytes kept by all shards, for replicas that are away or behind and until all is on media.
    pub retained: Gauge,
    replicas: Family<State, Gauge>,
    replicas_slow: Gauge,
    /// Connections to replicas that are being made or wait for their turn.
    pub dials: Gauge,
    waiting: Gauge,
    rebuilt: Gauge,
    to_rebuild: Gauge,
    pub moved: Counter,
    /// Data of snapshots that was read for others.
    pub pulled: Counter,
    pub health: Health,
}

/// Clients over NBD and what they ask for.
#[derive(Clone)]
pub struct ClientMetrics {
    pub connected: Gauge,
    refused: Counter,
    /// Of each kind of request, in the order of [`KINDS`].
    requests: [Counter; 6],
    latency: [Histogram; 6],
    read: Counter,
    written: Counter,
    failed: Counter,
}

/// Kinds of requests.
pub const KINDS: [&str; 6] = ["read", "write", "flush", "trim", "write_zeroes", "status"];

impl ClientMetrics {
    fn registered(registry: &mut Registry) -> Self {
        let connected = Gauge::default();
        registry.register("clients", "Connections of clients", connected.clone());
        let by_kind = Family::<Kind, Counter>::default();
        let requests = KINDS.map(|operation| by_kind.get_or_create(&Kind { operation }).clone());
        registry.register("requests", "Requests taken", by_kind);
        let (read, written, failed) = (Counter::default(), Counter::default(), Counter::default());
        registry.register_with_unit("read", "Bytes asked for", Unit::Bytes, read.clone());
        registry.register_with_unit("written", "Bytes to write", Unit::Bytes, written.clone());
        registry.register("failed", "Requests answered with an error", failed.clone());
        let refused = Counter::default();
        let help = "Connections over TCP that were turned away before they opened a volume";
        registry.register("clients_refused", help, refused.clone());
        let latencies =
            Family::<Kind, Histogram>::new_with_constructor(latency as fn() -> Histogram);
        let latency = KINDS.map(|operation| latencies.get_or_create(&Kind { operation }).clone());
        let help = "From taking a request to its reply";
        registry.register_with_unit("request_duration", help, Unit::Seconds, latencies);
        Self { connected, refused, requests, latency, read, written, failed }
    }

    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Counts a request, also among those of its volume; its kind is passed back with its reply.
    pub fn requested(&self, request: &Request, of_volume: &mut Counts) -> u8 {
        let (kind, read_bytes, written_bytes) = match &request.operation {
            Operation::Read { length, .. } => (0, u64::from(*length), 0),
            Operation::Write { data, .. } => (1, 0, data.len() as u64),
            Operation::Flush => (2, 0, 0),
            Operation::Trim { .. } => (3, 0, 0),
            Operation::WriteZeroes { .. } => (4, 0, 0),
            Operation::Status { .. } => (5, 0, 0),
        };
        self.read.inc_by(read_bytes);
        self.written.inc_by(written_bytes);
        self.requests[usize::from(kind)].inc();
        of_volume.requested(kind, read_bytes, written_bytes);
        kind
    }

    pub fn replied(&self, reply: &Reply, kind: u8, took: Duration, of_volume: &mut Counts) {
        if let Some(latency) = self.latency.get(usize::from(kind)) {
            latency.observe(took.as_secs_f64());
        }
        of_volume.replied(kind, took, reply.result.is_err());
        if reply.result.is_err() {
            self.failed.inc();
        }
    }
}

/// The numbers are for `/metrics` only.
impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    /// Returns metrics, by volume too unless these are switched off.
    pub fn new(has_volumes: bool) -> Self {
        let mut registry = Registry::with_prefix("quoin_target");
        let by_volume = has_volumes.then(VolumeMetrics::default);
        if let Some(by_volume) = &by_volume {
            registry.register_collector(Box::new(by_volume.clone()));
        }
        let (volumes, retained) = (Gauge::default(), Gauge::default());
        registry.register("volumes", "Volumes served here", volumes.clone());
        let clients = ClientMetrics::registered(&mut registry);
        let help = "Entries kept in memory: not on media yet, or for replicas away or behind";
        registry.register_with_unit("retained", help, Unit::Bytes, retained.clone());
        let replicas = Family::<State, Gauge>::default();
        registry.register("replicas", "Replicas of the volumes served here", replicas.clone());
        let replicas_slow = Gauge::default();
        let help = "Replicas that take writes much later than the others of their volume";
        registry.register("replicas_slow", help, replicas_slow.clone());
        let dials = Gauge::default();
        let help = "Connections to replicas that are being made or wait for their turn";
        registry.register("dials", help, dials.clone());
        let (waiting, rebuilt, to_rebuild) = (Gauge::default(), Gauge::default(), Gauge::default());
        registry.register("volumes_waiting", "Volumes whose IO waits", waiting.clone());
        let help = "Copied so far by the rebuilds that are under way";
        registry.register_with_unit("rebuilt", help, Unit::Bytes, rebuilt.clone());
        let help = "What the rebuilds under way copy in all";
        registry.register_with_unit("rebuild", help, Unit::Bytes, to_rebuild.clone());
        let moved = Counter::default();
        let help = "Data that rebuilds copied, counted as each is complete";
        registry.register_with_unit("rebuild_moved", help, Unit::Bytes, moved.clone());
        let pulled = Counter::default();
        let help = "Data of snapshots that was read for exports";
        registry.register_with_unit("snapshot_read", help, Unit::Bytes, pulled.clone());
        let registry = Arc::new(registry);
        let health = Health::starting(&["controller"]);
        Metrics {
            registry,
            by_volume,
            volumes,
            clients,
            retained,
            replicas,
            replicas_slow,
            dials,
            waiting,
            rebuilt,
            to_rebuild,
            moved,
            pulled,
            health,
        }
    }

    /// Sets the state of the volumes; requested of the shards with each report.
    pub fn stand(&self, volumes: &[Standing]) {
        if let Some(by_volume) = &self.by_volume {
            by_volume.replace(volumes);
        }
        let replicas = || volumes.iter().flat_map(|volume| &volume.status.replicas);
        for (state, standings) in [
            ("in_sync", &[ReplicaStanding::InSync][..]),
            ("catching_up", &[ReplicaStanding::CatchingUp, ReplicaStanding::Opening]),
            ("rebuilding", &[ReplicaStanding::Rebuilding]),
            ("disconnected", &[ReplicaStanding::Disconnected]),
        ] {
            let count = replicas().filter(|replica| standings.contains(&replica.standing)).count();
            self.replicas.get_or_create(&State { state }).set(count as i64);
        }
        self.replicas_slow.set(replicas().filter(|replica| replica.slow).count() as i64);
        let rebuilding = || replicas().filter(|r| r.standing == ReplicaStanding::Rebuilding);
        let bytes = |sum: u64| i64::try_from(sum).unwrap_or(i64::MAX);
        self.rebuilt.set(bytes(rebuilding().map(|replica| replica.rebuilt_bytes).sum()));
        self.to_rebuild.set(bytes(rebuilding().map(|replica| replica.rebuild_total_bytes).sum()));
        let waiting = volumes.iter().filter(|volume| !volume.status.waiting.is_empty());
        self.waiting.set(waiting.clone().count() as i64);
        let problem = |volume: &Standing| {
            (volume.name.clone(), format!("IO waits for {}", volume.status.waiting))
        };
        self.health.replace("volume ", waiting.map(problem));
    }

    /// Sets what is left on this host of volumes that are not attached to it.
    pub fn left_over(&self, left: Vec<(String, String)>) {
        self.health.replace("left of volume ", left);
    }

    /// Sets the volumes that other nodes serve, and of which this host still has devices.
    pub fn lost(&self, served: &[ServedElsewhere]) {
        let problem = |served: &ServedElsewhere| {
            let ServedElsewhere { name, node, since_epoch, .. } = served;
            let since_epoch = quoin_types::Epoch(*since_epoch);
            let why = format!("served by {node} since epoch {since_epoch}; mounts here are dead");
            (name.clone(), why)
        };
        self.health.replace("devices of volume ", served.iter().map(problem));
    }

    /// Returns the text that Prometheus scrapes.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_are_refused_are_counted() {
        let metrics = Metrics::new(true);
        metrics.clients.refused();
        metrics.clients.refused();
        assert_eq!(metrics.clients.refused.get(), 2);
    }

    #[test]
    fn requests_are_counted_by_their_kind() {
        let metrics = Metrics::new(true);
        let request = Request {
            token: 1,
            operation: Operation::Read { offset: 0, length: 4096 },
            origin: None,
        };
        let mut of_volume = Counts::default();
        let kind = metrics.clients.requested(&request, &mut of_volume);
        let reply = Reply { token: 1, result: Err(quoin_types::block::BlockError::Damaged) };
        metrics.clients.replied(&reply, kind, Duration::from_micros(100), &mut of_volume);
        let text = metrics.render();
        assert!(text.contains("quoin_target_requests_total{operation=\"read\"} 1"), "{text}");
        assert!(text.contains("quoin_target_read_bytes_total 4096"), "{text}");
        let latency = "quoin_target_request_duration_seconds_count{operation=\"read\"} 1";
        assert!(text.contains(latency), "{text}");
        assert!(text.contains("quoin_target_failed_total 1"), "{text}");
    }
}
