//! `quoin mirror invite|pair|peers|unpair|run`: other clusters, with which this one exchanges volumes.

use anyhow::Result;
use clap::{Args, Subcommand};
use quoin_api::control::{
    InvitePeerRequest, ListPeersRequest, PairPeerRequest, Peer, RemoveMirrorRequest,
    UnpairPeerRequest,
};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::listing::RemovedView;
use crate::output::{self, Format, Row};
use crate::size::number_within;

/// Digits of a cluster's id in a table.
const ID_DIGITS: usize = 12;

#[derive(Subcommand)]
pub enum MirrorCommand {
    /// A token with which one other cluster becomes a peer of this one.
    ///
    /// It is for `quoin mirror pair` on the other side. From then on the mirrors of both clusters trust
    /// each other, and nobody else of either does.
    #[command(after_help = "Example:\n  \
        quoin mirror invite --name west --address control.east.example:7400     in the east\n  \
        quoin mirror pair --name east TOKEN                                     in the west")]
    Invite(InviteOptions),
    /// Make this cluster and the one that made the token peers. Again with the same token, it goes on
    /// where it was interrupted.
    #[command(after_help = "Example:\n  QUOIN_PAIR_TOKEN=… quoin mirror pair --name east")]
    Pair(PairOptions),
    /// The peers: when they were heard last, and by which link.
    #[command(visible_alias = "ls")]
    Peers,
    /// Trust a peer no more. Its record there stays until that side unpairs too.
    #[command(after_help = "Example:\n  quoin mirror unpair west")]
    Unpair {
        /// Its name or its cluster's id, as `quoin mirror peers` shows them.
        peer: String,
    },
    /// Take a mirror of this cluster out of it: its certificate is no longer accepted, here or by peers.
    #[command(visible_alias = "rm", after_help = "Example:\n  quoin mirror remove host-3")]
    Remove {
        /// Its name, as it joined.
        mirror: String,
    },
    /// Link this cluster to its peers: one process beside each target.
    Run(Box<crate::roles::MirrorOptions>),
}

#[derive(Args)]
pub struct InviteOptions {
    /// Where the other cluster's controller reaches this one's. Several times: they are tried in turn.
    #[arg(long = "address", value_name = "HOST:PORT", required = true)]
    addresses: Vec<String>,
    /// Name of the other cluster here [default: the beginning of its id].
    #[arg(long)]
    name: Option<String>,
    /// Minutes until the token expires.
    #[arg(long, default_value_t = 60, allow_hyphen_values = true,
          value_parser = number_within::<u32>(1..=1440,
          "a token is valid for 1 to 1440 minutes (a day): whoever has it becomes a peer"))]
    minutes: u32,
}

#[derive(Args)]
pub struct PairOptions {
    /// The token of `quoin mirror invite`. Better in the environment than on the command line, which
    /// everybody can read.
    #[arg(env = "QUOIN_PAIR_TOKEN", hide_env_values = true)]
    token: String,
    /// Name of the other cluster here [default: the beginning of its id].
    #[arg(long)]
    name: Option<String>,
}

pub async fn run(command: MirrorCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    match command {
        MirrorCommand::Invite(options) => {
            let request = InvitePeerRequest {
                name: options.name.unwrap_or_default(),
                ttl_s: options.minutes * 60,
                addresses: options.addresses,
            };
            let invitation = cluster.invite_peer(request).await.map_err(refusal)?.into_inner();
            let expires_at = invitation.expires_at.as_ref().map(show_time).unwrap_or_default();
            let view = InvitationView { token: invitation.token, expires_at };
            // The bare token, so that a script can take it as it is.
            output::print_one(format, &view, || view.token.clone())
        }
        MirrorCommand::Pair(options) => {
            let request =
                PairPeerRequest { token: options.token, name: options.name.unwrap_or_default() };
            let peer = cluster.pair_peer(request).await.map_err(refusal)?.into_inner();
            let view = PeerView::from(peer);
            output::print_one(format, &view, || {
                format!(
                    "cluster {} is a peer, called {}: `quoin mirror peers` shows when its mirrors are \
                     heard",
                    view.cluster_id, view.name
                )
            })
        }
        MirrorCommand::Peers => {
            let request = ListPeersRequest {};
            let peers = cluster.list_peers(request).await.map_err(refusal)?.into_inner().peers;
            let rows: Vec<_> = peers.into_iter().map(PeerView::from).collect();
            let nothing = "no peers: `quoin mirror invite` makes a token for one";
            output::print_list(format, &rows, nothing)
        }
        MirrorCommand::Unpair { peer } => {
            let request = UnpairPeerRequest { peer };
            let answer = cluster.unpair_peer(request).await.map_err(refusal)?.into_inner();
            let peer = answer.peer.unwrap_or_default();
            let view = RemovedView { kind: "peer", name: &peer.name, state: "unpaired" };
            output::print_one(format, &view, || {
                format!(
                    "peer {} is trusted no more; `quoin mirror unpair` there ends its side",
                    peer.name
                )
            })
        }
        MirrorCommand::Remove { mirror } => {
            let request = RemoveMirrorRequest { mirror: mirror.clone() };
            cluster.remove_mirror(request).await.map_err(refusal)?;
            let view = RemovedView { kind: "mirror", name: &mirror, state: "removed" };
            output::print_one(format, &view, || {
                format!("mirror {mirror} is removed: its certificate is no longer accepted")
            })
        }
        MirrorCommand::Run(_) => unreachable!("it is a role, and runs without a client"),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InvitationView {
    token: String,
    expires_at: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PeerView {
    name: String,
    cluster_id: String,
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    heard_ms: Option<u64>,
    link_mirror: String,
    link_address: String,
    addresses: Vec<String>,
    keys: u32,
    paired_at: String,
    message: String,
}

impl From<Peer> for PeerView {
    fn from(peer: Peer) -> Self {
        Self {
            name: peer.name,
            cluster_id: peer.cluster_id,
            state: peer.state,
            heard_ms: peer.heard_ms,
            link_mirror: peer.link_mirror,
            link_address: peer.link_address,
            addresses: peer.addresses,
            keys: peer.keys,
            paired_at: peer.paired_at.as_ref().map(show_time).unwrap_or_default(),
            message: peer.message,
        }
    }
}

impl Row for PeerView {
    const HEADER: &'static [&'static str] =
        &["NAME", "CLUSTER", "STATE", "HEARD", "LINK", "MESSAGE", "ADDRESSES", "PAIRED"];
    const NARROW: usize = 6;

    fn cells(&self) -> Vec<String> {
        let heard = self.heard_ms.map(|ms| format!("{} s ago", ms / 1000));
        let link = match self.link_address.as_str() {
            "" => "-".to_owned(),
            address => format!("{} to {address}", self.link_mirror),
        };
        vec![
            self.name.clone(),
            self.cluster_id.get(..ID_DIGITS).unwrap_or(&self.cluster_id).to_owned(),
            self.state.clone(),
            heard.unwrap_or_else(|| "never".to_owned()),
            link,
            self.message.clone(),
            self.addresses.join(", "),
            self.paired_at.clone(),
        ]
    }
}
