//! `quoin mirror …`: other clusters, and the volumes and groups that are mirrored to and from them.

mod mirrored;

use anyhow::Result;
use clap::{Args, Subcommand};
use quoin_api::control::call_mirror_request::Call;
use quoin_api::control::{
    InvitePeerRequest, ListPeersRequest, ModifyPeerRequest, PairPeerRequest, Peer,
    RemoveMirrorRequest, UnpairPeerRequest,
};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::listing::RemovedView;
use crate::output::{self, Format, Row};
use crate::schedule::Time;
use crate::size::{number_within, parse_size, show_size};

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
    /// Limits of what a peer may have here: copies, their bytes, and how long its orphans stay.
    #[command(
        after_help = "Examples:\n  quoin mirror quota west                          what it has\n  \
                            quoin mirror quota west --copies 20 --bytes 2TiB\n  \
                            quoin mirror quota west --orphans 7d"
    )]
    Quota(QuotaOptions),
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
    /// Keep a copy of a volume or a group on a peer: points of it are sent there at an interval.
    #[command(after_help = "Examples:\n  quoin mirror enable db --to west --every 10s\n  \
                            quoin mirror enable shop --to west --wait    a group; until the copy is whole")]
    Enable(mirrored::EnableOptions),
    /// All that is mirrored: role, peer, lag, and the loss of a failover at this moment.
    #[command(after_help = "Examples:\n  quoin mirror status\n  quoin mirror status db")]
    Status {
        /// Name or id of a mirrored volume or group [default: all].
        of: Option<String>,
    },
    /// The points that this side holds of a mirrored volume or group.
    Points(mirrored::OfOptions),
    /// Make this side primary. The other one is to be demoted first, or silent (--force).
    #[command(
        after_help = "Examples:\n  quoin mirror promote db            after `quoin mirror demote db` \
                            there\n  quoin mirror promote db --force    where the other side is lost"
    )]
    Promote(mirrored::PromoteOptions),
    /// Make this side a copy: its last state is sent to the other one, which is then promoted.
    #[command(after_help = "Example:\n  quoin mirror demote db")]
    Demote(mirrored::ForceOptions),
    /// Have a copy follow its primary again, and wait until it does.
    #[command(
        after_help = "Example:\n  quoin mirror resync db --force    after a failover, on the old side"
    )]
    Resync(mirrored::ForceOptions),
    /// Compare both sides at a point that they have in common: each reads it and hashes ranges of 1 MiB. The exit
    /// status is 0 where all are equal, and 1 where some differ or the comparison ends early.
    #[command(after_help = "Example:\n  quoin mirror verify db")]
    Verify(mirrored::OfOptions),
    /// Cut no more points for now.
    Pause(mirrored::OfOptions),
    /// Cut points again.
    Resume(mirrored::OfOptions),
    /// End a mirror; the copy stays on the other side, an orphan.
    #[command(after_help = "Example:\n  quoin mirror disable db")]
    Disable(mirrored::OfOptions),
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
pub struct QuotaOptions {
    /// Its name or its cluster's id, as `quoin mirror peers` shows them.
    peer: String,
    /// Most copies that it may have here: 0 to 10000. Orphans count.
    #[arg(long, value_name = "COUNT")]
    copies: Option<u64>,
    /// Most bytes that the volumes of its copies may have together, as in 2TiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bytes: Option<u64>,
    /// Time after which an orphan of it that nobody uses is deleted, as in 7d: a minute to a year, or keep.
    #[arg(long, value_name = "TIME", value_parser = parse_orphans)]
    orphans: Option<u64>,
}

/// Seconds; 0: never.
fn parse_orphans(text: &str) -> Result<u64, String> {
    if text == "keep" {
        return Ok(0);
    }
    let time = quoin_api::volume::parse_time(text).filter(|time| time.as_secs() > 0);
    time.map(|time| time.as_secs()).ok_or_else(|| "not a time as in 7d or 12h, or keep".to_owned())
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
        MirrorCommand::Quota(options) => {
            let request = ModifyPeerRequest {
                peer: options.peer.clone(),
                copies_max: options.copies,
                copies_bytes_max: options.bytes,
                orphans_s: options.orphans,
            };
            let is_change =
                request != ModifyPeerRequest { peer: options.peer.clone(), ..Default::default() };
            let peer = if is_change {
                cluster.modify_peer(request).await.map_err(refusal)?.into_inner()
            } else {
                let peers = cluster.list_peers(ListPeersRequest {}).await.map_err(refusal)?;
                let mut peers = peers.into_inner().peers.into_iter();
                let is_it =
                    |peer: &Peer| peer.name == options.peer || peer.cluster_id == options.peer;
                let found = peers.find(is_it);
                found.ok_or_else(|| anyhow::anyhow!("no peer is called {:?}", options.peer))?
            };
            let view = PeerView::from(peer);
            output::print_one(format, &view, || {
                format!(
                    "{} has {} copies here, and {}; {}",
                    view.name,
                    view.copies_text(),
                    view.bytes_text(),
                    match view.orphans_seconds {
                        0 => "orphans are kept".to_owned(),
                        seconds =>
                            format!("orphans that nobody uses are deleted after {}", Time(seconds)),
                    }
                )
            })
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
        MirrorCommand::Enable(options) => {
            mirrored::enable(options, &mut cluster, client, format).await
        }
        MirrorCommand::Status { of } => mirrored::status(of.as_deref(), &mut cluster, format).await,
        MirrorCommand::Points(options) => mirrored::points(&options.of, &mut cluster, format).await,
        MirrorCommand::Promote(options) => {
            mirrored::promote(options, &mut cluster, client, format).await
        }
        MirrorCommand::Demote(options) => {
            mirrored::demote(options, &mut cluster, client, format).await
        }
        MirrorCommand::Resync(options) => {
            mirrored::resync(options, &mut cluster, client, format).await
        }
        MirrorCommand::Verify(options) => {
            mirrored::verify(&options.of, &mut cluster, client, format).await
        }
        MirrorCommand::Pause(options) => {
            mirrored::plain(&options.of, Call::Pause, &mut cluster, client, format).await
        }
        MirrorCommand::Resume(options) => {
            mirrored::plain(&options.of, Call::Resume, &mut cluster, client, format).await
        }
        MirrorCommand::Disable(options) => {
            mirrored::plain(&options.of, Call::Disable, &mut cluster, client, format).await
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
    copies: u64,
    copies_max: u64,
    copies_bytes: u64,
    copies_bytes_max: u64,
    /// 0: they are kept.
    orphans_seconds: u64,
}

impl PeerView {
    fn copies_text(&self) -> String {
        format!("{} of {}", self.copies, self.copies_max)
    }

    fn bytes_text(&self) -> String {
        format!("{} of {}", show_size(self.copies_bytes), show_size(self.copies_bytes_max))
    }
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
            copies: peer.copies,
            copies_max: peer.copies_max,
            copies_bytes: peer.copies_bytes,
            copies_bytes_max: peer.copies_bytes_max,
            orphans_seconds: peer.orphans_s,
        }
    }
}

impl Row for PeerView {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "CLUSTER",
        "STATE",
        "HEARD",
        "LINK",
        "COPIES",
        "MESSAGE",
        "BYTES",
        "ORPHANS",
        "ADDRESSES",
        "PAIRED",
    ];
    const NARROW: usize = 7;

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
            self.copies_text(),
            self.message.clone(),
            self.bytes_text(),
            match self.orphans_seconds {
                0 => "kept".to_owned(),
                seconds => Time(seconds).to_string(),
            },
            self.addresses.join(", "),
            self.paired_at.clone(),
        ]
    }
}
