//! `/metrics` and `/healthz` of a role, over plain HTTP.
//!
//! A role hands over two functions: one renders its metrics in the Prometheus text format, one
//! says whether it is well. `/healthz` answers 200 with `{"status":"ok"}`, or 503 with the status
//! `unhealthy` and the `reason`. This crate knows neither storage nor the control plane. There is no
//! authentication, so it listens on loopback unless an operator says otherwise, and it shows
//! figures only: no names of files, no keys, nothing that changes anything.

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// The content type of the Prometheus text format with OpenMetrics extensions.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a role shows of itself. Both are called for each request, so they must be cheap and
/// must not wait.
#[derive(Clone)]
pub struct Source {
    metrics: Arc<dyn Fn() -> String + Send + Sync>,
    health: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
}

impl Source {
    /// `metrics` renders the text format; `health` gives the reason why the role is unwell.
    pub fn new(
        metrics: impl Fn() -> String + Send + Sync + 'static,
        health: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { metrics: Arc::new(metrics), health: Arc::new(health) }
    }
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {address} for metrics ({source}): choose another --http address")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("serving metrics ended: {0}")]
    Serve(#[from] std::io::Error),
}

/// Takes the address; port 0 takes any.
///
/// # Errors
/// [`Error::Listen`] names the address, most often because it is in use.
pub async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })
}

/// Serves until `shutdown` becomes true.
///
/// # Errors
/// [`Error::Serve`] if the listener fails.
pub async fn serve(
    listener: TcpListener,
    source: Source,
    mut shutdown: watch::Receiver<bool>,
) -> Result<(), Error> {
    let ended = async move {
        // A sender that is gone counts as a shutdown.
        let _ = shutdown.wait_for(|ends| *ends).await;
    };
    axum::serve(listener, router(source)).with_graceful_shutdown(ended).await?;
    Ok(())
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
    async fn metrics_and_health_are_asked_anew_each_time_and_garbage_harms_nobody() {
        static WELL: AtomicBool = AtomicBool::new(true);
        let source = Source::new(
            || "quoin_volumes 7\n# EOF\n".into(),
            || WELL.load(Ordering::SeqCst).then_some(()).ok_or_else(|| "no disk".to_string()),
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
        WELL.store(false, Ordering::SeqCst);
        let answer = get(address, "/healthz").await;
        assert!(
            answer.starts_with("HTTP/1.1 503") && answer.contains(r#""reason":"no disk""#),
            "{answer}"
        );
        assert!(get(address, "/secrets").await.starts_with("HTTP/1.1 404"));

        end.send(true).unwrap();
        server.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_address_in_use_is_named_with_the_way_out() {
        let first = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = first.local_addr().unwrap();
        let message = listen(address).await.unwrap_err().to_string();
        assert!(message.contains(&address.to_string()) && message.contains("--http"), "{message}");
    }
}
