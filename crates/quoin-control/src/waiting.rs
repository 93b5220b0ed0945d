//! Answers of a controller on its admin socket while another one rules.

use std::convert::Infallible;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tonic::Status;
use tonic::transport::Server;
use tower::service_fn;

use quoin_identity::unix_incoming;

/// Calls at a time on one connection.
const CALLS_MAX: u32 = 16;

/// Refuses each call, and names who rules. Never ends by itself.
pub(crate) async fn refuse_calls(admin: UnixListener, ruler: watch::Receiver<String>) {
    let refuse = service_fn(move |_: hyper::Request<_>| {
        let status = Status::failed_precondition(why(&ruler.borrow()));
        async move { Ok::<_, Infallible>(status.into_http::<tonic::body::Body>()) }
    });
    let served = Server::builder()
        .max_concurrent_streams(CALLS_MAX)
        .serve_with_incoming(refuse, unix_incoming(admin))
        .await;
    if let Err(error) = served {
        tracing::warn!(%error, "nobody is told who rules");
    }
    std::future::pending().await
}

fn why(ruler: &str) -> String {
    match ruler {
        "" => "this controller waits for its turn, and does not know yet who rules: its records do not answer"
            .to_owned(),
        ruler => format!(
            "controller {ruler} rules: ask that one; this one takes its place once it has ended"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_who_rules() {
        assert!(why("c-1").contains("controller c-1 rules"));
        assert!(why("").contains("does not know yet"));
    }
}
