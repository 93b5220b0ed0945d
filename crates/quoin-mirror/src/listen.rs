//! The port at which mirrors of peers are let in.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quoin_identity::{ClusterId, foreign};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::frame::Frame;
use crate::link::exchange;
use crate::{Error, Shared};

/// Connections that have not shown whose they are yet.
const HANDSHAKES_MAX: usize = 64;
/// Connections of one peer.
const LINKS_MAX: usize = 8;
/// Pause after the system refused a connection, as where descriptors are short.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections by peer.
#[derive(Default)]
struct Links(Mutex<HashMap<u128, usize>>);

impl Links {
    fn take(self: &Arc<Self>, peer: ClusterId) -> Option<Place> {
        let mut links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = links.entry(peer.0).or_default();
        (*count < LINKS_MAX).then(|| {
            *count += 1;
            Place { links: self.clone(), peer }
        })
    }
}

struct Place {
    links: Arc<Links>,
    peer: ClusterId,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut links = self.links.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = links.get_mut(&self.peer.0) {
            *count -= 1;
            if *count == 0 {
                links.remove(&self.peer.0);
            }
        }
    }
}

/// Lets mirrors of peers in, for ever.
pub(crate) fn serve(
    shared: Arc<Shared>,
    listener: TcpListener,
) -> Result<impl Future<Output = ()> + Send, Error> {
    let config = shared.identity.foreign_server_config(&shared.trusted)?;
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let links = Arc::new(Links::default());
    Ok(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let Ok(place) = handshakes.clone().acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let (shared, config, links) = (shared.clone(), config.clone(), links.clone());
            connections.spawn(async move {
                let accepted = foreign::accept(stream, config).await;
                drop(place);
                let (stream, holder, key) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::debug!(%error, "a stranger was not let in");
                        return;
                    }
                };
                let peer = holder.cluster;
                let Some(_place) = links.take(peer) else {
                    tracing::warn!(%peer, "a peer has {LINKS_MAX} connections already");
                    return;
                };
                let is_trusted = || shared.trusted.still_trusts(&holder, &key);
                let take = |frame| {
                    shared.contacts.heard(peer);
                    if let Frame::Hello(said) = frame {
                        shared.contacts.said(peer, said);
                    }
                };
                let why = exchange(stream, shared.own.subscribe(), is_trusted, take).await;
                tracing::debug!(%peer, why, "a connection of a peer ended");
            });
        }
    })
}
