//! Metrics of the CSI plugin for `/metrics`: calls by method and gRPC code, and their duration.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use quoin_telemetry::health::Health;
use tower::{Layer, Service};

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Call {
    method: String,
    code: i32,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Method {
    method: String,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, EncodeLabelSet)]
struct Heal {
    outcome: &'static str,
}

/// Returns buckets from a tenth of a millisecond to a minute and a half.
fn duration() -> Histogram {
    Histogram::new(exponential_buckets(1e-4, 2.0, 20))
}

/// Metrics of the process. Cheap to clone; all clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    calls: Family<Call, Counter>,
    durations: Family<Method, Histogram>,
    heals: Family<Heal, Counter>,
    controller_up: Gauge,
    /// Faults of this node.
    pub health: Health,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("quoin_node");
        let calls = Family::<Call, Counter>::default();
        registry.register(
            "calls",
            "Calls of CSI and CSI-Addons by method and gRPC code",
            calls.clone(),
        );
        let durations =
            Family::<Method, Histogram>::new_with_constructor(duration as fn() -> Histogram);
        let help = "Duration of calls of CSI and CSI-Addons";
        registry.register_with_unit("call_duration", help, Unit::Seconds, durations.clone());
        let heals = Family::<Heal, Counter>::default();
        let help = "Heals of volumes on this node: well afterwards, or with something left";
        registry.register("heals", help, heals.clone());
        let controller_up = Gauge::default();
        let help = "1 while the controller accepts the reports of this node";
        registry.register("controller_up", help, controller_up.clone());
        let health = Health::starting(&["controller"]);
        Self { registry: Arc::new(registry), calls, durations, heals, controller_up, health }
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

    /// Records whether this node reaches the controller; the text has the reason if not.
    pub(crate) fn record_report(&self, problem: Option<String>) {
        self.controller_up.set(i64::from(problem.is_none()));
        self.health.set("controller", problem);
    }

    /// Records a heal that did something.
    pub(crate) fn record_heal(&self, is_well: bool) {
        let outcome = if is_well { "well" } else { "left" };
        self.heals.get_or_create(&Heal { outcome }).inc();
    }

    fn called(&self, path: &str, code: i32, began: Instant) {
        // Calls of methods that do not exist must not make new series.
        const UNIMPLEMENTED: i32 = 12;
        let is_served = path.starts_with("/csi.v1.") || crate::addons::has(path);
        let named = match path {
            // CSI has a call of the same name.
            "/identity.Identity/Probe" => Some("CSIAddonsProbe"),
            _ => path.rsplit('/').next().filter(|_| is_served),
        };
        let method = match named {
            Some(method) if code != UNIMPLEMENTED => method.to_owned(),
            _ => "other".to_owned(),
        };
        self.calls.get_or_create(&Call { method: method.clone(), code }).inc();
        let seconds = began.elapsed().as_secs_f64();
        self.durations.get_or_create(&Method { method }).observe(seconds);
    }
}

/// Counts the calls of the service below it.
#[derive(Clone)]
pub struct Counting<S> {
    inner: S,
    metrics: Metrics,
}

impl<S> Layer<S> for Metrics {
    type Service = Counting<S>;
    fn layer(&self, inner: S) -> Counting<S> {
        Counting { inner, metrics: self.clone() }
    }
}

type Answer<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl<S, B, R> Service<http::Request<B>> for Counting<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<R>;
    type Error = S::Error;
    type Future = Answer<Self::Response, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let (began, metrics) = (Instant::now(), self.metrics.clone());
        let path = request.uri().path().to_owned();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = answer.await?;
            // A refusal has its status in the headers; a success has it at the end.
            let status = response.headers().get("grpc-status");
            let code = status.and_then(|status| status.to_str().ok()?.parse().ok()).unwrap_or(0);
            metrics.called(&path, code, began);
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_and_code_and_unknown_methods_as_other() {
        let metrics = Metrics::default();
        metrics.called("/csi.v1.Node/NodeStageVolume", 9, Instant::now());
        metrics.called("/csi.v1.Node/Invented", 12, Instant::now());
        metrics.called("/elsewhere/Probe", 0, Instant::now());
        metrics.called("/healer.HealerNode/NodeHealer", 5, Instant::now());
        metrics.called("/identity.Identity/Probe", 0, Instant::now());
        let text = metrics.render();
        let staged = r#"quoin_node_calls_total{method="NodeStageVolume",code="9"} 1"#;
        assert!(text.contains(staged), "{text}");
        assert!(text.contains(r#"method="other",code="12"} 1"#), "{text}");
        assert!(text.contains(r#"method="NodeHealer",code="5"} 1"#), "{text}");
        assert!(text.contains(r#"method="CSIAddonsProbe",code="0"} 1"#), "{text}");
        assert!(!text.contains("Invented") && !text.contains(r#""Probe""#), "{text}");
        assert!(text.contains("quoin_node_call_duration_seconds_count"), "{text}");
    }
}
