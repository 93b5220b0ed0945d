//! Metrics of the mirror for `/metrics`.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use quoin_api::control::PeerContact;
use quoin_telemetry::health::Health;

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Peer {
    cluster: String,
}

/// Metrics of the process. Cheap to clone; all clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    heard: Family<Peer, Gauge>,
    linked: Family<Peer, Gauge>,
    /// Faults of this mirror.
    pub health: Health,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("quoin_mirror");
        let (heard, linked) = (Family::<Peer, Gauge>::default(), Family::<Peer, Gauge>::default());
        let help = "Time since a mirror of the peer was heard by this one";
        registry.register_with_unit("peer_heard", help, Unit::Seconds, heard.clone());
        let help = "1 while this mirror has a link to the peer";
        registry.register("peer_linked", help, linked.clone());
        let health = Health::starting(&["controller"]);
        Self { registry: Arc::new(registry), heard, linked, health }
    }
}

impl Metrics {
    /// Returns the text that Prometheus scrapes.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    /// Shows what is known of the peers now, and nothing of those of before.
    pub(crate) fn show(&self, peers: &[PeerContact]) {
        self.heard.clear();
        self.linked.clear();
        for contact in peers {
            let peer = Peer { cluster: contact.cluster_id.clone() };
            if let Some(ms) = contact.heard_ms {
                self.heard.get_or_create(&peer).set(i64::try_from(ms / 1000).unwrap_or(i64::MAX));
            }
            self.linked.get_or_create(&peer).set((!contact.linked_to.is_empty()).into());
        }
    }
}
