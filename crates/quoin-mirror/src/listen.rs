//! The port at which mirrors of peers are let in.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use quoin_identity::{Caller, IncomingLimits, Member, PeerStream, serve_incoming};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tonic::transport::server::Connected;

use crate::frame::{FRAME_BYTES_MAX, Frame, Raw, kind};
use crate::link::exchange;
use crate::stream::{self, STREAMS_A_PEER_MAX};
use crate::{Error, Shared};

/// Time for the first frame of a connection.
const FIRST_WITHIN: Duration = Duration::from_secs(10);

/// A mirror of a peer has a link or two here, and as many streams as one may send; strangers share few places, a quarter of them for each address.
fn limits() -> IncomingLimits {
    IncomingLimits {
        connections_max: 256,
        connections_a_member_max: 8 + 2 * STREAMS_A_PEER_MAX,
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
            links.spawn(async move { serve_one(&shared, stream, &member).await });
        }
    })
}

/// Serves a connection: its first frame decides what it is.
async fn serve_one(shared: &Shared, mut stream: PeerStream, member: &Member) {
    let peer = member.peer.cluster;
    let is_trusted = || shared.trusted.still_trusts(&member.peer, &member.key_hash);
    let first = timeout(FIRST_WITHIN, Raw::read(&mut stream, FRAME_BYTES_MAX)).await;
    let Ok(Ok(first)) = first else {
        tracing::debug!(%peer, "a connection of a peer said nothing that can be read");
        return;
    };
    // Trust may have ended since the handshake.
    if !is_trusted() {
        return;
    }
    if first.kind == kind::BEGIN {
        match stream::frame::Frame::of(first) {
            Ok(stream::frame::Frame::Begin(begin)) => {
                stream::take::serve(shared, stream, peer, begin, is_trusted).await;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%peer, %error, "a stream of a peer cannot be read"),
        }
        return;
    }
    let place = shared.outbox.link(peer, false);
    match Frame::of(first) {
        Ok(frame) => {
            place.heard();
            shared.hear(peer, frame);
        }
        Err(error) => {
            tracing::debug!(%peer, %error, "a link of a peer cannot be read");
            return;
        }
    }
    let take = |frame| shared.hear(peer, frame);
    let why = exchange(stream, shared.own.subscribe(), place, is_trusted, take).await;
    tracing::debug!(%peer, why, "a link of a peer ended");
}
