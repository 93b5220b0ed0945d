//! Names of volumes, pools, nodes and snapshots for a shell that completes a command.
//!
//! A controller that does not answer soon has no names: a shell must not hang at a tab.

use std::future::Future;
use std::time::Duration;

use anyhow::Result;
use clap::Command;
use clap_complete::{ArgValueCandidates, CompletionCandidate};
use quoin_api::control::{
    ListFencesRequest, ListNodesRequest, ListPoolsRequest, ListSnapshotsRequest,
};

use crate::client::{ClientOptions, Cluster};
use crate::volume;

/// Longest wait for the controller.
const WAIT_MAX: Duration = Duration::from_millis(1500);
/// Most names that a shell is given.
const NAMES_MAX: usize = 1000;

/// Gives the arguments of all commands that name something the names that there are.
pub fn with_names(command: Command) -> Command {
    in_group("", command)
}

/// Same for a command of the group of commands with this name.
fn in_group(group: &str, mut command: Command) -> Command {
    let of = command.get_name().to_owned();
    let inner: Vec<_> =
        command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    for name in inner {
        command = command.mut_subcommand(name, |inner| in_group(&of, inner));
    }
    // One after the other and all of them, as an argument that is changed alone goes to the end.
    command.mut_args(|argument| {
        let shown = argument.get_value_names().and_then(|names| names.first());
        let shown = shown.map_or(argument.get_id().as_str(), |shown| shown.as_str());
        match candidates_of(group, &of, shown) {
            Some(candidates) => argument.add(candidates),
            None => argument,
        }
    })
}

/// The names that stand for an argument that is shown by this word.
fn candidates_of(group: &str, command: &str, shown: &str) -> Option<ArgValueCandidates> {
    let makes_one = matches!(command, "create" | "run");
    let shown = shown.to_ascii_lowercase();
    let is_of_its_group = shown == "name" && !makes_one;
    match if is_of_its_group { group } else { shown.as_str() } {
        "volume" | "volumes" if !makes_one => Some(ArgValueCandidates::new(volumes)),
        "pool" | "pools" => Some(ArgValueCandidates::new(pools)),
        "node" => Some(ArgValueCandidates::new(nodes)),
        "fenced" => Some(ArgValueCandidates::new(fences)),
        "snapshot" if !makes_one => Some(ArgValueCandidates::new(snapshots)),
        _ => None,
    }
}

fn volumes() -> Vec<CompletionCandidate> {
    named(async |cluster| {
        let all = volume::list(cluster, false).await?;
        Ok(all.into_iter().filter_map(|volume| Some(volume.spec?.name)).collect())
    })
}

fn pools() -> Vec<CompletionCandidate> {
    named(async |cluster| {
        let all = cluster.list_pools(ListPoolsRequest {}).await?.into_inner().pools;
        Ok(all.into_iter().map(|pool| pool.name).collect())
    })
}

fn nodes() -> Vec<CompletionCandidate> {
    named(async |cluster| {
        let all = cluster.list_nodes(ListNodesRequest {}).await?.into_inner().nodes;
        Ok(all.into_iter().map(|node| node.name).collect())
    })
}

fn fences() -> Vec<CompletionCandidate> {
    named(async |cluster| {
        let all = cluster.list_fences(ListFencesRequest {}).await?.into_inner().fences;
        Ok(all.into_iter().map(|fence| fence.block).collect())
    })
}

fn snapshots() -> Vec<CompletionCandidate> {
    named(async |cluster| {
        let request = ListSnapshotsRequest::default();
        let all = cluster.list_snapshots(request).await?.into_inner().snapshots;
        Ok(all.into_iter().map(|snapshot| snapshot.name).collect())
    })
}

/// Asks the controller that commands reach without a flag.
fn named(ask: impl AsyncFnOnce(&mut Cluster) -> Result<Vec<String>>) -> Vec<CompletionCandidate> {
    let asked = async {
        let mut cluster = ClientOptions::of_environment().connect().await?;
        ask(&mut cluster).await
    };
    let mut names = within(WAIT_MAX, asked).unwrap_or_default();
    names.sort_unstable();
    names.into_iter().take(NAMES_MAX).map(CompletionCandidate::new).collect()
}

fn within(time: Duration, asked: impl Future<Output = Result<Vec<String>>>) -> Result<Vec<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { tokio::time::timeout(time, asked).await? })
}
