//! The members of a `quoin dev`: how they join, join again, and are ended.

use anyhow::Result;
use quoin_api::control::{CreateJoinTokenRequest, GetClusterInfoRequest, ListPoolsRequest};
use quoin_identity::{Identity, Role};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use super::keeper::Keeper;
use super::layout::Layout;
use super::settings::{PoolSettings, Settings};
use super::{print_line, processes};
use crate::client::{self, Cluster, refusal};

/// Interval between two checks for pools that were removed and certificates that expired.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Gives a certificate, by a token as on any other host, to a member that has none or whose own
/// expired while all of it was off.
pub async fn join(
    cluster: &mut Cluster,
    settings: &Settings,
    role: Role,
    name: &str,
    directory: &Path,
) -> Result<()> {
    if Identity::load(directory).is_ok_and(|identity| !identity.has_run_out()) {
        return Ok(());
    }
    let request = CreateJoinTokenRequest {
        role: role.to_string(),
        ttl_s: 300,
        name: name.into(),
        // The one node serves CSI's controller service as well.
        manages_volumes: role == Role::Node,
    };
    let token = cluster.create_join_token(request).await.map_err(refusal)?.into_inner().token;
    processes::join(settings, role, name, directory, &token).await
}

/// The pools that are still part of the cluster, or are yet to join it: a removed pool may do
/// nothing any more, and would only fail for ever.
pub async fn pools_to_start<'a>(
    cluster: &mut Cluster,
    layout: &Layout,
    settings: &'a Settings,
) -> Result<Vec<&'a PoolSettings>> {
    let known = cluster.list_pools(ListPoolsRequest {}).await.map_err(refusal)?.into_inner().pools;
    let about = cluster.get_cluster_info(GetClusterInfoRequest {}).await.map_err(refusal)?;
    // Records that were lost name no pool, and are made again from what all of them hold.
    if known.is_empty() || !about.into_inner().recovery.is_empty() {
        return Ok(settings.pools.iter().collect());
    }
    let mut pools = Vec::new();
    for pool in &settings.pools {
        let directory = layout.pool(&pool.name);
        // A pool's data are made after it joined, and then it reports at once.
        let was_there = Identity::load(&directory).is_ok() && layout.pool_data(&pool.name).exists();
        if was_there && !known.iter().any(|known| known.name == pool.name) {
            report_removed_pool(layout, &pool.name, "is not started");
            continue;
        }
        pools.push(pool);
    }
    Ok(pools)
}

fn report_removed_pool(layout: &Layout, pool: &str, what: &str) {
    print_line(&format!(
        "{pool} was removed from the cluster and {what}; delete {} to have a new, empty pool of \
         that name at the next start",
        layout.pool(pool).display()
    ));
}

/// Handles pools that users remove while this runs, and members whose certificates expired.
pub async fn watch_members(layout: &Layout, settings: &Settings, keepers: &[Keeper]) -> Infallible {
    let mut refused = BTreeSet::new();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let Ok(mut cluster) = client::connect(&layout.admin_socket()).await else { continue };
        // The controller may be away for a moment: the next check is soon.
        let _ = end_removed_pools(&mut cluster, layout, keepers).await;
        for keeper in keepers.iter().filter(|keeper| !keeper.was_asked_to_stop()) {
            let (role, directory) = match &*keeper.name {
                "node" => (Role::Node, layout.node()),
                name if is_pool(keeper) => (Role::Pool, layout.pool(name)),
                _ => continue,
            };
            let name = if role == Role::Node { &settings.node } else { &keeper.name };
            if !Identity::load(&directory).is_ok_and(|identity| identity.has_run_out()) {
                continue;
            }
            // Running members renew in time; a suspended one may not, and reports that for ever.
            let line = match join(&mut cluster, settings, role, name, &directory).await {
                Ok(()) => {
                    refused.remove(&keeper.name);
                    format!(
                        "the certificate of {} had run out while this machine slept; it has a new \
                         one",
                        keeper.name
                    )
                }
                Err(_) if !refused.insert(keeper.name.clone()) => continue,
                Err(error) => format!(
                    "the certificate of {} has run out, and it gets no new one yet: {error:#}",
                    keeper.name
                ),
            };
            print_line(&line);
        }
    }
}

fn is_pool(keeper: &Keeper) -> bool {
    keeper.name.starts_with("pool-")
}

/// Ends pools that were removed: they may do nothing any more, and would be started for ever.
async fn end_removed_pools(
    cluster: &mut Cluster,
    layout: &Layout,
    keepers: &[Keeper],
) -> Result<(), tonic::Status> {
    let pools = cluster.list_pools(ListPoolsRequest {}).await?.into_inner().pools;
    let about = cluster.get_cluster_info(GetClusterInfoRequest {}).await?.into_inner();
    // Records that were lost name no pool, and are made again from what all of them hold.
    if pools.is_empty() || !about.recovery.is_empty() {
        return Ok(());
    }
    // All of them were online before this began.
    for keeper in keepers.iter().filter(|keeper| is_pool(keeper) && !keeper.was_asked_to_stop()) {
        if !pools.iter().any(|pool| pool.name == keeper.name) {
            keeper.request_stop();
            report_removed_pool(layout, &keeper.name, "is ended");
        }
    }
    Ok(())
}
