//! `quoin pool|node cordon|drain|uncordon`: pools that take no new replicas, or are emptied.

use anyhow::Result;
use clap::Args;
use quoin_api::control::set_cordon_request::Action;
use quoin_api::control::{CordonStatus, DrainedReplica, GetCordonRequest, SetCordonRequest};
use serde::Serialize;

use crate::client::{ClientOptions, Cluster, refusal};
use crate::output::{self, Format, Row};
use crate::pace::{self, Part, UnderWay};
use crate::size::show_size;

pub const POOL_EXAMPLE: &str = "Each replica is made elsewhere first and counts here until then; \
    one of each volume at a time.\nRefused, with the reason for each volume, where one has \
    nowhere to go or no good copy left.\nIt goes on by itself, also after the controller was \
    restarted.\n\nExamples:\n  quoin pool drain shelf-3 --dry-run    what would be moved, and where\n  \
    quoin pool drain shelf-3 --wait\n  quoin pool uncordon shelf-3           take replicas again";
pub const NODE_EXAMPLE: &str = "As `quoin pool drain`, of all pools on the node. Volumes attached \
    there are named; detaching them is their users'.\n\nExamples:\n  \
    quoin node drain host-3 --dry-run     what would be moved, and where\n  \
    quoin node drain host-3 --wait\n  quoin node uncordon host-3            take replicas again";

#[derive(Args)]
pub struct DrainOptions {
    /// Its name.
    name: String,
    /// Only say what would be moved where, and what would hinder it.
    #[arg(long)]
    dry_run: bool,
    /// Wait until it is empty, and say how far it is; --timeout is for how long nothing may move.
    /// Interrupted, it goes on all the same.
    #[arg(long)]
    wait: bool,
}

/// Object of the command: a pool, or a node with all its pools.
pub enum Scope {
    Pool(String),
    Node(String),
}

impl Scope {
    fn split(&self) -> (String, String) {
        match self {
            Self::Pool(pool) => (pool.clone(), String::new()),
            Self::Node(node) => (String::new(), node.clone()),
        }
    }

    /// Kind and name, as a command takes them.
    fn words(&self) -> (&'static str, &str) {
        match self {
            Self::Pool(pool) => ("pool", pool),
            Self::Node(node) => ("node", node),
        }
    }
}

async fn set(
    cluster: &mut Cluster,
    scope: &Scope,
    action: Action,
    dry_run: bool,
) -> Result<CordonStatus> {
    let (pool, node) = scope.split();
    let request = SetCordonRequest { pool, node, action: action.into(), dry_run };
    Ok(cluster.set_cordon(request).await.map_err(refusal)?.into_inner())
}

pub async fn cordon(scope: Scope, client: &ClientOptions, format: Format) -> Result<()> {
    let status = set(&mut client.connect().await?, &scope, Action::Cordon, false).await?;
    let (kind, name) = scope.words();
    let view = CordonView::of(&scope, status);
    output::print_one(format, &view, || {
        format!("{kind} {name} takes no new replicas; those it has stay ({})", view.replicas.len())
    })
}

pub async fn uncordon(scope: Scope, client: &ClientOptions, format: Format) -> Result<()> {
    let status = set(&mut client.connect().await?, &scope, Action::Uncordon, false).await?;
    let (kind, name) = scope.words();
    let view = CordonView::of(&scope, status);
    output::print_one(format, &view, || match view.state.as_str() {
        "" => format!("{kind} {name} takes new replicas"),
        state => format!("{kind} {name} is still {state}: its node is"),
    })
}

pub async fn drain(
    scope: impl FnOnce(String) -> Scope,
    options: DrainOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let mut cluster = client.connect().await?;
    let scope = scope(options.name);
    let mut status = set(&mut cluster, &scope, Action::Drain, options.dry_run).await?;
    if options.dry_run {
        let view = CordonView::of(&scope, status);
        return match format {
            Format::Json | Format::Yaml => output::print_one(format, &view, String::new),
            _ => output::print_list(format, &view.replicas, "no replica exists there"),
        };
    }
    if options.wait {
        status = follow(&mut cluster, &scope, status, client).await?;
    }
    let view = CordonView::of(&scope, status);
    output::print_one(format, &view, || view.text())
}

/// A drain as it was seen last.
struct Draining<'a> {
    scope: &'a Scope,
    status: CordonStatus,
}

impl UnderWay for Draining<'_> {
    fn is_done(&self) -> bool {
        self.status.state != "draining"
    }

    fn left_bytes(&self) -> u64 {
        self.status.replicas.iter().map(left).sum()
    }

    fn state_text(&self) -> String {
        let part = |r: &DrainedReplica| {
            format!("{} {} {} {} {}", r.volume_id, r.replica_id, r.to, r.state, r.rebuilt_bytes)
        };
        let parts: Vec<_> = self.status.replicas.iter().map(part).collect();
        format!("{} {}", self.status.state, parts.join(", "))
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        fn part(r: &mut DrainedReplica) -> Part<'_> {
            let name = format!("{} {} {}", r.volume_id, r.replica_id, r.to);
            let (done_bytes, total_bytes) = (&mut r.rebuilt_bytes, &mut r.rebuild_total_bytes);
            Part { name, done_bytes, total_bytes }
        }
        self.status.replicas.iter_mut().map(part).collect()
    }

    fn progress(&self, pace: &str) -> String {
        progress(self.scope, &self.status, pace)
    }
}

/// Polls until the pool or node is empty.
async fn follow(
    cluster: &mut Cluster,
    scope: &Scope,
    status: CordonStatus,
    client: &ClientOptions,
) -> Result<CordonStatus> {
    let poll = async || {
        let (pool, node) = scope.split();
        let request = GetCordonRequest { pool, node };
        let status = cluster.get_cordon(request).await.map_err(refusal)?.into_inner();
        Ok(Draining { scope, status })
    };
    Ok(pace::follow(Draining { scope, status }, client, poll).await?.status)
}

/// Bytes to copy before the replica is elsewhere; its used bytes while the rebuild reports no
/// total.
fn left(replica: &DrainedReplica) -> u64 {
    match replica.rebuild_total_bytes {
        0 => replica.used_bytes,
        total => total.saturating_sub(replica.rebuilt_bytes),
    }
}

fn progress(scope: &Scope, status: &CordonStatus, pace: &str) -> String {
    let (kind, name) = scope.words();
    let count = |state: &str| status.replicas.iter().filter(|r| r.state == state).count();
    let count_words = match status.replicas.len() {
        1 => "1 replica".to_owned(),
        many => format!("{many} replicas"),
    };
    let bytes = show_size(status.replicas.iter().map(left).sum());
    let mut text = format!("{kind} {name}: {count_words} and {bytes} left");
    for (state, words) in [("moving", "moving"), ("waits", "waiting"), ("stuck", "stuck")] {
        if count(state) > 0 {
            text += &format!(", {} {words}", count(state));
        }
    }
    text += pace;
    if let Some(stuck) = status.replicas.iter().find(|r| r.state == "stuck") {
        text += &format!("; volume {}: {}", stuck.volume_name, stuck.message);
    }
    text
}

/// A cordon as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CordonView {
    kind: &'static str,
    name: String,
    /// cordoned, draining or drained; empty: it takes new replicas.
    state: String,
    pools: Vec<String>,
    /// Replicas that are still there.
    replicas: Vec<DrainedView>,
    attached: Vec<String>,
}

impl CordonView {
    fn of(scope: &Scope, status: CordonStatus) -> Self {
        let (kind, name) = scope.words();
        Self {
            kind,
            name: name.into(),
            state: status.state,
            pools: status.pools,
            replicas: status.replicas.into_iter().map(DrainedView::from).collect(),
            attached: status.attached,
        }
    }

    fn text(&self) -> String {
        let Self { kind, name, .. } = self;
        let mut text = match self.state.as_str() {
            "drained" => format!("{kind} {name} is drained: it holds no replica"),
            _ => format!(
                "{kind} {name} is being drained: {} replicas left\nnext: quoin {kind} drain {} \
                 --wait   (how far it is)",
                self.replicas.len(),
                output::quoted(name)
            ),
        };
        if !self.attached.is_empty() {
            text += &format!(
                "\nvolumes are attached there and serve on: {}; detach them before the node goes",
                self.attached.join(", ")
            );
        }
        text
    }
}

/// A replica that is to move away.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DrainedView {
    volume: String,
    volume_id: String,
    replica: String,
    pool: String,
    to: String,
    state: String,
    /// State of the volume if the pool is lost now.
    without: String,
    message: String,
    used_bytes: u64,
    rebuilt_bytes: u64,
    rebuild_total_bytes: u64,
}

impl From<DrainedReplica> for DrainedView {
    fn from(replica: DrainedReplica) -> Self {
        Self {
            volume: replica.volume_name,
            volume_id: replica.volume_id,
            replica: replica.replica_id,
            pool: replica.pool,
            to: replica.to,
            state: replica.state,
            without: replica.without,
            message: replica.message,
            used_bytes: replica.used_bytes,
            rebuilt_bytes: replica.rebuilt_bytes,
            rebuild_total_bytes: replica.rebuild_total_bytes,
        }
    }
}

impl Row for DrainedView {
    const HEADER: &'static [&'static str] =
        &["VOLUME", "POOL", "TO", "STATE", "USED", "WITHOUT IT", "MESSAGE", "REPLICA"];
    const NARROW: usize = 7;

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.clone(),
            self.pool.clone(),
            self.to.clone(),
            self.state.clone(),
            show_size(self.used_bytes),
            self.without.clone(),
            self.message.clone(),
            self.replica.clone(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_replicas_by_state_and_names_obstacles() {
        let replica = |state: &str, message: &str| DrainedReplica {
            volume_name: "db".into(),
            state: state.into(),
            message: message.into(),
            used_bytes: 7,
            ..DrainedReplica::default()
        };
        let status = CordonStatus {
            replicas: vec![
                replica("moving", ""),
                replica("stuck", "no room"),
                replica("waits", ""),
            ],
            ..CordonStatus::default()
        };
        let text = progress(&Scope::Pool("a".into()), &status, "; 1.0 MiB/s, about 4 s left");
        assert_eq!(
            text,
            "pool a: 3 replicas and 21 B left, 1 moving, 1 waiting, 1 stuck; 1.0 MiB/s, about 4 s \
             left; volume db: no room"
        );
        let half =
            DrainedReplica { rebuilt_bytes: 60, rebuild_total_bytes: 100, ..replica("", "") };
        assert_eq!((left(&half), left(&replica("", ""))), (40, 7));
    }
}
