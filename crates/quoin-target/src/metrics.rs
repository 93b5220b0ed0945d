//! What a target counts, for `/metrics`.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use quoin_core::block::{Operation, Reply, Request};

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Kind {
    operation: &'static str,
}

/// Counters of every shard together; cheap to clone, no lock on the way of a request.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub volumes: Gauge,
    pub clients: Gauge,
    requests: [Counter; 6],
    read: Counter,
    written: Counter,
    failed: Counter,
    clients_refused: Counter,
}

impl Metrics {
    pub fn new() -> Self {
        let kinds = ["read", "write", "flush", "trim", "write_zeroes", "status"];
        let by_kind = Family::<Kind, Counter>::default();
        let requests = kinds.map(|operation| by_kind.get_or_create(&Kind { operation }).clone());
        let mut registry = Registry::with_prefix("quoin_target");
        let (volumes, clients) = (Gauge::default(), Gauge::default());
        let (read, written, failed) = (Counter::default(), Counter::default(), Counter::default());
        registry.register("volumes", "Volumes served here", volumes.clone());
        registry.register("clients", "Connections of clients", clients.clone());
        registry.register("requests", "Requests taken", by_kind);
        registry.register_with_unit("read", "Bytes asked for", Unit::Bytes, read.clone());
        registry.register_with_unit("written", "Bytes to write", Unit::Bytes, written.clone());
        registry.register("failed", "Requests answered with an error", failed.clone());
        let clients_refused = Counter::default();
        let help = "Connections over TCP that were turned away before they opened a volume";
        registry.register("clients_refused", help, clients_refused.clone());
        let registry = Arc::new(registry);
        Metrics { registry, volumes, clients, requests, read, written, failed, clients_refused }
    }

    pub fn requested(&self, request: &Request) {
        let kind = match &request.operation {
            Operation::Read { length, .. } => {
                self.read.inc_by(u64::from(*length));
                0
            }
            Operation::Write { data, .. } => {
                self.written.inc_by(data.len() as u64);
                1
            }
            Operation::Flush => 2,
            Operation::Trim { .. } => 3,
            Operation::WriteZeroes { .. } => 4,
            Operation::Status { .. } => 5,
        };
        self.requests[kind].inc();
    }

    pub fn replied(&self, reply: &Reply) {
        if reply.result.is_err() {
            self.failed.inc();
        }
    }

    pub fn refused_client(&self) {
        self.clients_refused.inc();
    }

    /// The text that Prometheus scrapes.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_their_kind() {
        let metrics = Metrics::new();
        metrics.requested(&Request {
            token: 1,
            operation: Operation::Read { offset: 0, length: 4096 },
        });
        let text = metrics.render();
        assert!(text.contains("quoin_target_requests_total{operation=\"read\"} 1"), "{text}");
        assert!(text.contains("quoin_target_read_bytes_total 4096"), "{text}");
    }
}
