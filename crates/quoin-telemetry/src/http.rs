//! `/metrics` and `/healthz` of a role, over plain HTTP.
//!
//! A role provides two functions: one renders its metrics in the Prometheus text format, the other
//! one returns its health. `/healthz` answers 200 with `{"status":"ok"}`, or 503 with the status
//! `unhealthy` and the `reason`. There is no authentication, so the server listens on loopback
//! unless an operator chooses another address. It shows figures only: no file names, no keys, and
//! no operation that changes anything.
//!
//! The server runs in the process of its role, whose files and memory it must not use up: the
//! number of connections, the size of a request and the time for both are limited.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The content type of the Prometheus text format with OpenMetrics extensions.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Limit of simultaneous connections; one more is closed at once. A scraper and a probe need one
/// each.
const CONNECTIONS_MAX: usize = 64;
/// Time limit for the head of a request.
const HEAD_MAX: Duration = Duration::from_secs(5);
/// Time limit of a connection: a client that continues connects again, so none holds a place
/// permanently.
const CONNECTION_MAX: Duration = Duration::from_secs(60);
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// Content of both pages. Both functions are called for each request, so they must be cheap and
/// must not block.
#[derive(Clone)]
pub struct Source {
    metrics: Arc<dyn Fn() -> String + Send + Sync>,
    health: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

impl Source {
    /// `metrics` renders the text format; `health` returns the reason why the role is unhealthy.
    pub fn new(
        metrics: impl Fn() -> String + Send + Sync + 'static,
        health: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { metrics: Arc::new(metrics), health: Arc::new(health) }
    }
}

/// Reason for which the pages are not served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address} for metrics ({source}): choose another --http address")]
    Listen { address: SocketAddr, source: std::io::Error },
}

/// Binds the address; port 0 selects any.
///
/// # Errors
/// [`Error::Listen`] names the address, most often because it is in use.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })
}

/// Serves until `shutdown` becomes true, or its sender is gone; answers under way end with it.
pub async fn serve(listener: TcpListener, source: Source, mut shutdown: watch::Receiver<bool>) {
    let router = router(source);
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = shutdown.wait_for(|ends| *ends) => return,
            accepted = listener.accept() => accepted,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, _)) if connections.len() < CONNECTIONS_MAX => {
                connections.spawn(converse(stream, router.clone()));
            }
            Ok((_, address)) => {
                tracing::debug!(%address, "too many connections for metrics; the new one is \
                                           closed");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn converse(stream: TcpStream, router: Router) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_MAX).max_buf_size(HEAD_BYTES_MAX);
    let service = TowerToHyperService::new(router);
    let conversation = server.serve_connection(TokioIo::new(stream), service);
    if let Ok(Err(error)) = tokio::time::timeout(CONNECTION_MAX, conversation).await {
        tracing::debug!(%error, "a connection for metrics ended");
    }
}

fn router(source: Source) -> Router {
    Router::new().route("/metrics", get(metrics)).route("/healthz", get(health)).with_state(source)
}

async fn metrics(State(source): State<Source>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], (source.metrics)())
}

async fn health(State(source): State<Source>) -> impl IntoResponse {
    let (code, body) = match (source.health)() {
        Ok(()) => (StatusCode::OK, serde_json::json!({ "status": "ok" })),
        Err(reason) => {
            let body = serde_json::json!({ "status": "unhealthy", "reason": reason });
            (StatusCode::SERVICE_UNAVAILABLE, body)
        }
    };
    (code, [(header::CONTENT_TYPE, "application/json")], format!("{body}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn request(address: SocketAddr, text: &[u8]) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(text).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    async fn get(address: SocketAddr, path: &str) -> String {
        let text = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        request(address, text.as_bytes()).await
    }

    #[tokio::test]
    async fn metrics_and_health_are_rendered_for_each_request_and_garbage_is_refused() {
        static HEALTHY: AtomicBool = AtomicBool::new(true);
        let source = Source::new(
            || "quoin_volumes 7\n# EOF\n".into(),
            || HEALTHY.load(Ordering::SeqCst).then_some(()).ok_or_else(|| "no disk".to_string()),
        );
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, shutdown) = watch::channel(false);
        let server = tokio::spawn(serve(listener, source, shutdown));

        let _ = request(address, b"\x16\x03\x01\x00\xff\x00\r\n\r\n").await;
        let answer = get(address, "/metrics").await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("quoin_volumes 7"),
            "{answer}"
        );
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        HEALTHY.store(false, Ordering::SeqCst);
        let answer = get(address, "/healthz").await;
        assert!(
            answer.starts_with("HTTP/1.1 503") && answer.contains(r#""reason":"no disk""#),
            "{answer}"
        );
        assert!(get(address, "/secrets").await.starts_with("HTTP/1.1 404"));

        end.send(true).unwrap();
        server.await.unwrap();
    }

    /// More connections than there are places, each silent, with half a head or with an endless
    /// one.
    #[tokio::test]
    async fn silent_connections_are_closed_and_later_ones_are_served() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_end, shutdown) = watch::channel(false);
        let source = Source::new(|| "# EOF\n".into(), || Ok(()));
        tokio::spawn(serve(listener, source, shutdown));
        let endless = "GET / HTTP/1.1\r\nA: ".to_owned() + &"x".repeat(4 * HEAD_BYTES_MAX);
        let mut held = Vec::new();
        for greeting in ["", "GET /metrics HTTP/1.1\r\nHo", &endless] {
            for _ in 0..CONNECTIONS_MAX {
                let mut stream = TcpStream::connect(address).await.unwrap();
                // The connection may have been closed at once.
                let _ = stream.write_all(greeting.as_bytes()).await;
                held.push(stream);
            }
        }
        let mut refused = 0;
        for stream in &mut held {
            // Each ends from the other side, with or without an answer.
            let mut response = Vec::new();
            let _ = stream.read_to_end(&mut response).await;
            refused += usize::from(response.is_empty());
        }
        assert!(refused > 0, "no connection was refused");
        assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn an_address_in_use_is_reported_with_the_way_out() {
        let first = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = first.local_addr().unwrap();
        let message = listen(address).await.unwrap_err().to_string();
        assert!(message.contains(&address.to_string()) && message.contains("--http"), "{message}");
    }
}
