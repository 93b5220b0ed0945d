//! Counters of a pool, for `/metrics`.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use quoin_api::control::PoolWear;
use quoin_telemetry::health::Health;

use crate::facts::Space;

#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub sessions: Gauge,
    pub connections_refused: Counter,
    pub log: LogMetrics,
    pub disk: DiskMetrics,
    pub scrub: ScrubMetrics,
    pub space: SpaceMetrics,
    pub reads: Counter,
    pub read_duration: Histogram,
    /// One turn of the pool's thread.
    pub turn: Histogram,
    pub health: Health,
}

#[derive(Clone)]
pub struct LogMetrics {
    pub entries: Counter,
    pub written: Counter,
    pub appends: Counter,
    pub append_duration: Histogram,
}

#[derive(Clone)]
pub struct DiskMetrics {
    pub syncs: Counter,
    pub sync_deliveries: Counter,
    pub sync_duration: Histogram,
    pub fetch_duration: Histogram,
    pub failures: Counter,
    pub refusals: Counter,
    pub stalls: Counter,
}

#[derive(Clone, Default)]
pub struct ScrubMetrics {
    pub runs: Counter,
    pub read: Counter,
    pub found: Counter,
    pub repaired: Counter,
}

#[derive(Clone, Default)]
pub struct SpaceMetrics {
    pub replicas: Gauge,
    pub used: Gauge,
    pub live: Gauge,
    pub capacity: Gauge,
    pub free: Gauge,
}

/// From 2 µs to ten seconds.
fn latency() -> Histogram {
    Histogram::new(exponential_buckets(2e-6, 2.0, 23))
}

/// Turns, in which all replicas of the pool wait: one longer than 20 ms is too long.
fn turns() -> Histogram {
    Histogram::new([
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
        2.0, 5.0, 10.0,
    ])
}

/// Its numbers are for `/metrics`.
impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    pub fn new(pool: &str) -> Self {
        let labels = [("pool".into(), pool.to_owned().into())];
        let mut registry = Registry::with_prefix_and_labels("quoin_pool", labels.into_iter());
        let metrics = Metrics {
            registry: Arc::new(Registry::default()),
            sessions: Gauge::default(),
            connections_refused: Counter::default(),
            log: LogMetrics {
                entries: Counter::default(),
                written: Counter::default(),
                appends: Counter::default(),
                append_duration: latency(),
            },
            disk: DiskMetrics {
                syncs: Counter::default(),
                sync_deliveries: Counter::default(),
                sync_duration: latency(),
                fetch_duration: latency(),
                failures: Counter::default(),
                refusals: Counter::default(),
                stalls: Counter::default(),
            },
            scrub: ScrubMetrics::default(),
            space: SpaceMetrics::default(),
            reads: Counter::default(),
            read_duration: latency(),
            turn: turns(),
            health: Health::starting(&["controller"]),
        };
        let r = &mut registry;
        r.register("sessions", "Sessions of targets open now", metrics.sessions.clone());
        r.register(
            "connections_refused",
            "Data connections that were not let in",
            metrics.connections_refused.clone(),
        );
        r.register("entries", "Log entries taken", metrics.log.entries.clone());
        let bytes = metrics.log.written.clone();
        r.register_with_unit("written", "Bytes of client data taken", Unit::Bytes, bytes);
        r.register("appends", "Batches appended to a log", metrics.log.appends.clone());
        r.register("reads", "Reads answered", metrics.reads.clone());
        r.register("syncs", "Group syncs of the disk", metrics.disk.syncs.clone());
        r.register(
            "sync_deliveries",
            "Replicas that were told of a group sync they waited for",
            metrics.disk.sync_deliveries.clone(),
        );
        r.register(
            "disk_failures",
            "Times the disk failed and the pool was opened anew",
            metrics.disk.failures.clone(),
        );
        r.register(
            "disk_refusals",
            "Operations that the disk refused, but for want of room",
            metrics.disk.refusals.clone(),
        );
        r.register("stalls", "Reads and syncs that took far too long", metrics.disk.stalls.clone());
        r.register("scrubs", "Scrubs that read the whole pool", metrics.scrub.runs.clone());
        let bytes = metrics.scrub.read.clone();
        r.register_with_unit("scrubbed", "Bytes read by scrubs", Unit::Bytes, bytes);
        r.register(
            "bad_copies_found",
            "Blocks, stretches of a map, headers and metadata that failed their checksums",
            metrics.scrub.found.clone(),
        );
        r.register(
            "bad_copies_repaired",
            "Blocks and stretches that another replica's copy replaced",
            metrics.scrub.repaired.clone(),
        );
        r.register("replicas", "Replicas held", metrics.space.replicas.clone());
        r.register_with_unit("used", "Space in use", Unit::Bytes, metrics.space.used.clone());
        r.register_with_unit(
            "capacity",
            "Size of the pool",
            Unit::Bytes,
            metrics.space.capacity.clone(),
        );
        let live = metrics.space.live.clone();
        let help = "About how much of the used space volumes and snapshots need";
        r.register_with_unit("live", help, Unit::Bytes, live);
        let free = metrics.space.free.clone();
        r.register_with_unit("free", "Space that clients may still fill", Unit::Bytes, free);
        for (name, help, histogram) in [
            ("append_duration", "Taking one batch into a log", &metrics.log.append_duration),
            ("sync_duration", "One group sync of the disk", &metrics.disk.sync_duration),
            (
                "read_duration",
                "Answering one read, or finding that it has to wait for the disk",
                &metrics.read_duration,
            ),
            (
                "fetch_duration",
                "One read of the disk, beside the pool's thread, of what no cache had",
                &metrics.disk.fetch_duration,
            ),
            (
                "turn",
                "One turn of the pool's thread, in which nobody else is served",
                &metrics.turn,
            ),
        ] {
            r.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        Metrics { registry: Arc::new(registry), ..metrics }
    }

    /// Returns the work of the disk since this process began.
    pub fn wear(&self) -> PoolWear {
        let operations = self.log.appends.get() + self.reads.get() + self.disk.syncs.get();
        PoolWear {
            operations,
            errors: self.disk.refusals.get(),
            bad: self.scrub.found.get(),
            stalls: self.disk.stalls.get(),
        }
    }

    /// How full the pool is; a full one is not well, since writes wait for it.
    pub fn filled(&self, space: Space, live_bytes: u64) {
        let bytes = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.space.used.set(bytes(space.used_bytes));
        self.space.live.set(bytes(live_bytes));
        self.space.capacity.set(bytes(space.capacity_bytes));
        self.space.free.set(bytes(space.free_bytes));
        let is_full = space.capacity_bytes > 0 && space.free_bytes == 0;
        let problem = "full: writes wait until a volume here is trimmed or deleted";
        self.health.set("space", is_full.then(|| problem.to_owned()));
    }

    /// The text that Prometheus scrapes.
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
    fn counters_are_in_the_text_under_their_name_and_unit() {
        let metrics = Metrics::new("p1");
        metrics.log.written.inc_by(4096);
        metrics.scrub.read.inc_by(512);
        metrics.turn.observe(0.015);
        let text = metrics.render();
        assert!(text.contains("quoin_pool_written_bytes_total{pool=\"p1\"} 4096"), "{text}");
        assert!(text.contains("quoin_pool_scrubbed_bytes_total{pool=\"p1\"} 512"), "{text}");
        assert!(text.contains("quoin_pool_sync_duration_seconds_count{pool=\"p1\"} 0"), "{text}");
        let turn = |le, n| format!("quoin_pool_turn_seconds_bucket{{pool=\"p1\",le=\"{le}\"}} {n}");
        assert!(text.contains(&turn("0.01", 0)) && text.contains(&turn("0.02", 1)), "{text}");
    }

    #[test]
    fn metrics_are_shown_by_their_name_alone() {
        assert_eq!(format!("{:?}", Metrics::new("p1")), "Metrics");
    }

    #[test]
    fn a_full_pool_is_not_well_until_there_is_space_again() {
        let metrics = Metrics::new("p1");
        metrics.health.set("controller", None);
        let space = |free_bytes| Space { capacity_bytes: 100, used_bytes: 60, free_bytes };
        metrics.filled(space(0), 50);
        assert!(metrics.health.check().unwrap_err().contains("full"));
        metrics.filled(space(40), 50);
        assert_eq!(metrics.health.check(), Ok(()));
    }
}
