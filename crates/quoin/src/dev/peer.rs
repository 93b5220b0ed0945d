//! The second cluster of `quoin dev --peer`, and its pairing with the first one.

use anyhow::{Result, bail};
use quoin_api::control::{
    GetClusterInfoRequest, InvitePeerRequest, ListPeersRequest, PairPeerRequest,
};
use std::time::{Duration, Instant};

use super::keeper::Keeper;
use super::layout::Layout;
use super::settings::Settings;
use super::{START_BUDGET, print_line, processes};
use crate::client::{self, Cluster, refusal};

/// Names of the two clusters for each other.
pub const HERE: &str = "first";
pub const THERE: &str = "second";
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Between two pairings.
const AGAIN: Duration = Duration::from_secs(2);

/// Pairs both clusters, unless they are, and waits until their mirrors hear each other.
///
/// # Errors
/// The second cluster does not start.
pub async fn pair(
    cluster: &mut Cluster,
    layout: &Layout,
    keepers: &[Keeper],
    began: Instant,
) -> Result<()> {
    let socket = Layout::at(&layout.peer()).admin_socket();
    let mut last = None::<Instant>;
    loop {
        let hopeless = |keeper: &&Keeper| {
            keeper.name == processes::PEER && (keeper.has_ended() || keeper.cannot_start())
        };
        if began.elapsed() > 2 * START_BUDGET || keepers.iter().any(|k| hopeless(&k)) {
            let log = layout.log(processes::PEER);
            bail!("the second cluster does not start: its log is {}", log.display());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        let Ok(mut second) = client::connect(&socket).await else { continue };
        if second.get_cluster_info(GetClusterInfoRequest {}).await.is_err() {
            continue;
        }
        if last.is_none_or(|last| last.elapsed() > AGAIN)
            && !(knows(cluster).await? && knows(&mut second).await?)
        {
            introduce(cluster, &mut second, layout).await?;
            last = Some(Instant::now());
        }
        if hears(cluster).await? && hears(&mut second).await? {
            return Ok(());
        }
    }
}

async fn hears(cluster: &mut Cluster) -> Result<bool> {
    let answer = cluster.list_peers(ListPeersRequest {}).await.map_err(refusal)?;
    Ok(answer.into_inner().peers.iter().any(|peer| peer.heard_ms.is_some_and(|ms| ms < 10_000)))
}

/// Returns true if the addresses of the peer's mirrors are known: a pairing of before its mirrors said where
/// they are is made again.
async fn knows(cluster: &mut Cluster) -> Result<bool> {
    let answer = cluster.list_peers(ListPeersRequest {}).await.map_err(refusal)?;
    Ok(answer.into_inner().peers.iter().any(|peer| !peer.addresses.is_empty()))
}

async fn introduce(first: &mut Cluster, second: &mut Cluster, layout: &Layout) -> Result<()> {
    let Ok(text) = std::fs::read(Layout::at(&layout.peer()).settings()) else { return Ok(()) };
    let Ok(settings) = serde_json::from_slice::<Settings>(&text) else { return Ok(()) };
    let request = InvitePeerRequest {
        name: HERE.to_owned(),
        ttl_s: 300,
        addresses: vec![settings.controller.listen.to_string()],
    };
    let invitation = second.invite_peer(request).await.map_err(refusal)?.into_inner();
    let request = PairPeerRequest { token: invitation.token, name: THERE.to_owned() };
    // The second controller may be starting still: it is tried again.
    let _ = first.pair_peer(request).await;
    Ok(())
}

/// Says how the second cluster is reached.
pub fn greet(layout: &Layout) {
    let second = Layout::at(&layout.peer());
    print_line(&format!(
        "\nA second cluster is up, paired with this one, which it calls {HERE:?}; here it is called \
         {THERE:?}.\n  admin  {}\n  quoin mirror enable db --to {THERE} --every 10s\n  \
         quoin --socket {} mirror status db",
        second.admin_socket().display(),
        second.admin_socket().display(),
    ));
}
