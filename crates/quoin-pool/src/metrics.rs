//! What a pool counts, for `/metrics`.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub sessions: Gauge,
    pub connections_refused: Counter,
    pub entries: Counter,
    pub written: Counter,
    pub appends: Counter,
    pub reads: Counter,
    pub syncs: Counter,
    pub disk_failures: Counter,
    pub replicas: Gauge,
    pub used: Gauge,
    pub capacity: Gauge,
}

impl Metrics {
    pub fn new(pool: &str) -> Self {
        let labels = [("pool".into(), pool.to_owned().into())];
        let mut registry = Registry::with_prefix_and_labels("quoin_pool", labels.into_iter());
        let metrics = Metrics {
            registry: Arc::new(Registry::default()),
            sessions: Gauge::default(),
            connections_refused: Counter::default(),
            entries: Counter::default(),
            written: Counter::default(),
            appends: Counter::default(),
            reads: Counter::default(),
            syncs: Counter::default(),
            disk_failures: Counter::default(),
            replicas: Gauge::default(),
            used: Gauge::default(),
            capacity: Gauge::default(),
        };
        let r = &mut registry;
        r.register("sessions", "Sessions of targets open now", metrics.sessions.clone());
        r.register(
            "connections_refused",
            "Data connections that were not let in",
            metrics.connections_refused.clone(),
        );
        r.register("entries", "Log entries taken", metrics.entries.clone());
        let bytes = metrics.written.clone();
        r.register_with_unit("written", "Bytes of client data taken", Unit::Bytes, bytes);
        r.register("appends", "Batches appended to a log", metrics.appends.clone());
        r.register("reads", "Reads answered", metrics.reads.clone());
        r.register("syncs", "Group syncs of the disk", metrics.syncs.clone());
        r.register(
            "disk_failures",
            "Times the disk failed and the pool was opened anew",
            metrics.disk_failures.clone(),
        );
        r.register("replicas", "Replicas held", metrics.replicas.clone());
        r.register_with_unit("used", "Space in use", Unit::Bytes, metrics.used.clone());
        r.register_with_unit("capacity", "Size of the pool", Unit::Bytes, metrics.capacity.clone());
        Metrics { registry: Arc::new(registry), ..metrics }
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
    fn what_is_counted_is_in_the_text_under_its_name_and_unit() {
        let metrics = Metrics::new("p1");
        metrics.written.inc_by(4096);
        let text = metrics.render();
        assert!(text.contains("quoin_pool_written_bytes_total{pool=\"p1\"} 4096"), "{text}");
    }
}
