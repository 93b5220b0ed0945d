//! Links to the peers, which the mirror that leads keeps: one to each, to any of the peer's mirrors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{MirrorAssignment, PeerIntroduction};
use quoin_identity::{ClusterId, foreign};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Shared;
use crate::link::exchange;

/// Pauses between attempts, the first and the longest.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Keeps the links that are assigned, for ever.
pub(crate) async fn keep_links(shared: Arc<Shared>) {
    let mut assignments = shared.assignment.subscribe();
    let mut links = JoinSet::new();
    let mut running = BTreeMap::new();
    loop {
        let assigned = assignments.borrow_and_update().clone();
        let wanted = peers(&assigned);
        running.retain(|peer, task: &mut tokio::task::AbortHandle| {
            let stays = assigned.leads && wanted.contains_key(peer);
            if !stays {
                task.abort();
                shared.contacts.unlinked(ClusterId(*peer), String::new());
            }
            stays
        });
        if assigned.leads {
            for peer in wanted.into_keys() {
                running
                    .entry(peer)
                    .or_insert_with(|| links.spawn(keep_link(shared.clone(), ClusterId(peer))));
            }
        }
        // Tasks that have ended.
        while links.try_join_next().is_some() {}
        if assignments.changed().await.is_err() {
            return;
        }
    }
}

pub(crate) fn peers(assigned: &MirrorAssignment) -> BTreeMap<u128, &PeerIntroduction> {
    let parsed = |peer: &PeerIntroduction| peer.cluster_id.parse::<ClusterId>().ok();
    assigned.peers.iter().filter_map(|peer| Some((parsed(peer)?.0, peer))).collect()
}

/// Links to a peer again and again, by the addresses that are known then.
async fn keep_link(shared: Arc<Shared>, peer: ClusterId) {
    let mut pause = PAUSE;
    loop {
        let addresses = {
            let assigned = shared.assignment.borrow();
            peers(&assigned).get(&peer.0).map(|peer| peer.addresses.clone()).unwrap_or_default()
        };
        let mut why = Vec::new();
        for address in &addresses {
            match link_to(&shared, peer, address).await {
                // It was one: the next attempt is the first again.
                Ok(ended) => {
                    shared.contacts.unlinked(peer, format!("{address}: {ended}"));
                    pause = PAUSE;
                    // The addresses may be others by now.
                    why.clear();
                    break;
                }
                Err(error) => why.push(format!("{address}: {error}")),
            }
        }
        if !why.is_empty() {
            shared.contacts.unlinked(peer, why.join("; "));
        }
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Keeps a link until it ends. Returns why.
///
/// # Errors
/// The reason why there was none.
async fn link_to(shared: &Shared, peer: ClusterId, address: &str) -> Result<String, String> {
    let config = shared.identity.foreign_client_config(&shared.trusted, peer);
    let config = config.map_err(|error| error.to_string())?;
    let connected = foreign::connect(address, config).await;
    let (stream, holder, key) = connected.map_err(|error| error.to_string())?;
    let is_trusted = || shared.trusted.still_trusts(&holder, &key);
    let mut is_linked = false;
    let take = |frame| {
        // The other side refuses a stranger after the handshake: only a frame proves that it did not.
        if !is_linked {
            is_linked = true;
            shared.contacts.linked(peer, address);
        }
        shared.hear(peer, frame);
    };
    let place = shared.outbox.link(peer, true);
    let ended = exchange(stream, shared.own.subscribe(), place, is_trusted, take).await;
    match is_linked {
        true => Ok(ended),
        false => Err(format!(
            "{ended}; where this stays, the peer does not know this cluster: see `quoin mirror peers` there"
        )),
    }
}
