//! The port at which mirrors of peers are let in.

use std::future::Future;
use std::sync::Arc;

use futures::StreamExt;
use quoin_identity::{Caller, IncomingLimits, serve_incoming};
use tokio::net::TcpListener;
use tonic::transport::server::Connected;

use crate::link::exchange;
use crate::{Error, Shared};

/// A peer has a link or two here; strangers share few places, a quarter of them for each address.
fn limits() -> IncomingLimits {
    IncomingLimits {
        connections_max: 256,
        connections_a_member_max: 8,
        newcomers_max: 0,
        unauthenticated_max: 128,
        handshakes_max: 32,
        ..IncomingLimits::default()
    }
}

/// Lets mirrors of peers in, for ever.
pub(crate) fn serve(
    shared: Arc<Shared>,
    listener: TcpListener,
) -> Result<impl Future<Output = ()> + Send, Error> {
    let config = shared.identity.foreign_server_config(&shared.trusted)?;
    Ok(async move {
        let mut incoming = std::pin::pin!(serve_incoming(listener, config, limits()));
        let mut links = tokio::task::JoinSet::new();
        while let Some(accepted) = incoming.next().await {
            while links.try_join_next().is_some() {}
            let Ok(stream) = accepted else { continue };
            let Caller::Member(member) = stream.connect_info().caller else { continue };
            let shared = shared.clone();
            links.spawn(async move {
                let peer = member.peer.cluster;
                let is_trusted = || shared.trusted.still_trusts(&member.peer, &member.key_hash);
                let take = |frame| shared.hear(peer, frame);
                let place = shared.outbox.link(peer, false);
                let why = exchange(stream, shared.own.subscribe(), place, is_trusted, take).await;
                tracing::debug!(%peer, why, "a link of a peer ended");
            });
        }
    })
}
