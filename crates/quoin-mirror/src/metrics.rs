//! Metrics of the mirror for `/metrics`.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
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
    pub(crate) sent_bytes: Counter,
    pub(crate) wire_bytes: Counter,
    pub(crate) taken_bytes: Counter,
    streams: Gauge,
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
        let [sent_bytes, wire_bytes, taken_bytes] = [(); 3].map(|()| Counter::default());
        let help = "Content of volumes that was sent to peers";
        registry.register_with_unit("sent", help, Unit::Bytes, sent_bytes.clone());
        let help = "Bytes of that on the wire, compressed where it gains something";
        registry.register_with_unit("wire", help, Unit::Bytes, wire_bytes.clone());
        let help = "Content of volumes that was taken from peers";
        registry.register_with_unit("taken", help, Unit::Bytes, taken_bytes.clone());
        let streams = Gauge::default();
        let help = "Streams to and from peers that are open";
        registry.register("streams", help, streams.clone());
        Self {
            registry: Arc::new(registry),
            heard,
            linked,
            sent_bytes,
            wire_bytes,
            taken_bytes,
            streams,
            health: Health::starting(&["controller"]),
        }
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

    /// A stream is open until it is dropped.
    pub(crate) fn stream(&self) -> OpenStream {
        self.streams.inc();
        OpenStream(self.streams.clone())
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

/// One of the open streams.
pub(crate) struct OpenStream(Gauge);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.dec();
    }
}
