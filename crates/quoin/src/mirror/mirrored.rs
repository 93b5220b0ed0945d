//! Mirrored volumes and groups: begin, roles, state, end.

use anyhow::{Result, bail};
use clap::Args;
use quoin_api::control::call_mirror_request::Call;
use quoin_api::control::{
    CallMirrorRequest, EnableMirrorRequest, GetMirrorRequest, ListMirrorsRequest, Mirror,
    MirrorComparison, MirrorRef, VerifyMirrorRequest,
};
use quoin_api::volume::parse_time;
use serde::Serialize;
use std::time::{Duration, Instant};
use tonic::Code;

use crate::client::{ClientOptions, Cluster, refusal};
use crate::events::show_time;
use crate::output::{self, Format, Row, fields};
use crate::pace::{self, Part, UnderWay};
use crate::schedule::Time;
use crate::size::{parse_rate, show_size};

/// Between two requests for what goes on, and between two lines about it.
const AGAIN: Duration = Duration::from_millis(200);
const REPORT_EVERY: Duration = Duration::from_secs(3);
/// Time in which a word of the other side comes.
const HEARD_WITHIN: Duration = Duration::from_secs(3);

#[derive(Args)]
pub struct EnableOptions {
    /// Name or id of a volume or a group.
    of: String,
    /// Name or id of the peer [default: the only one].
    #[arg(long, value_name = "PEER")]
    to: Option<String>,
    /// Time between two points, as in 10s, 5m or 1h: 10 seconds to 30 days.
    #[arg(long, default_value = "60s", value_parser = parse_every)]
    every: Duration,
    /// A promotion with force on the other side has this one step down while both are heard.
    #[arg(long)]
    take_over: bool,
    /// Compression of what is sent: zstd | none.
    #[arg(long, default_value = "zstd", value_parser = ["zstd", "none"])]
    compression: String,
    /// Bytes in a second for all members together, as in 50MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    bandwidth_limit: Option<u64>,
    /// Wait until the copy has everything once.
    #[arg(long)]
    wait: bool,
}

#[derive(Args)]
pub struct OfOptions {
    /// Name or id of the mirrored volume or group.
    pub of: String,
}

#[derive(Args)]
pub struct PromoteOptions {
    /// Name or id of the copy.
    of: String,
    /// Also where the other side is silent: what it acknowledged since the last complete point is lost.
    #[arg(long)]
    force: bool,
    /// Of two sides that both wrote, take this one for the truth.
    #[arg(long, conflicts_with_all = ["force", "at"])]
    accept_diverged: bool,
    /// Point of a copy whose records do not know which one is complete (`quoin mirror points`).
    #[arg(long, value_name = "POINT")]
    at: Option<String>,
}

#[derive(Args)]
pub struct ForceOptions {
    /// Name or id of the mirrored volume or group.
    of: String,
    #[arg(
        long,
        help = "Demote: take it from the nodes that have it attached. Resync: discard what this side \
                        wrote, which is kept in a snapshot lost-…"
    )]
    force: bool,
}

/// A time of ten seconds or longer, in whole seconds.
fn parse_every(text: &str) -> Result<Duration, String> {
    let time = parse_time(text).filter(|time| *time >= Duration::from_secs(10));
    let time = time.filter(|time| time.subsec_millis() == 0);
    time.ok_or_else(|| "not a time of at least 10 seconds, as in 10s, 5m or 1h".to_owned())
}

fn any(of: &str) -> Option<MirrorRef> {
    Some(MirrorRef { any: of.to_owned(), ..MirrorRef::default() })
}

pub async fn enable(
    options: EnableOptions,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let request = EnableMirrorRequest {
        of: any(&options.of),
        peer: options.to.clone().unwrap_or_default(),
        interval_s: options.every.as_secs(),
        may_take_over: options.take_over,
        compression: options.compression.clone(),
        bandwidth_limit: options.bandwidth_limit.unwrap_or(0),
    };
    let mirror = patiently(client, async || cluster.enable_mirror(request.clone()).await).await?;
    let mirror = match options.wait {
        true => wait_for_copy(mirror, cluster, client).await?,
        false => mirror,
    };
    let view = MirrorView::from(mirror);
    output::print_one(format, &view, || {
        format!(
            "{kind} {name} is mirrored to {}, every {}: `quoin mirror status {name}` shows how far it is",
            view.peer,
            Time(view.interval_seconds),
            kind = view.kind,
            name = output::quoted(&view.name),
        )
    })
}

/// Aim of a command that waits.
#[derive(Clone, Copy)]
enum Goal {
    /// The copy has everything once.
    Copy,
    /// The other side stepped down, and this one has the role.
    TakeOver,
}

/// A mirror that a command waits for, as it was seen last.
struct Awaited {
    goal: Goal,
    mirror: Mirror,
    done_bytes: u64,
    total_bytes: u64,
}

impl Awaited {
    fn of(goal: Goal, mirror: Mirror) -> Self {
        let transfer = mirror.transfer.clone().unwrap_or_default();
        Self { goal, mirror, done_bytes: transfer.done_bytes, total_bytes: transfer.total_bytes }
    }

    fn bytes(&self) -> String {
        format!("{} of {}", show_size(self.done_bytes), show_size(self.total_bytes))
    }
}

impl UnderWay for Awaited {
    fn is_done(&self) -> bool {
        let mirror = &self.mirror;
        match self.goal {
            Goal::Copy => {
                mirror.synced_at.is_some() && mirror.members.iter().all(|member| member.has_base)
            }
            // The last step is the promotion of this side, or the other one ended it.
            Goal::TakeOver => !mirror.takes_over && mirror.role != "promoting",
        }
    }

    fn state_text(&self) -> String {
        let Mirror { role, peer_role, message, members, .. } = &self.mirror;
        let waits: Vec<_> = members.iter().map(|member| &member.waiting_for).collect();
        format!("{role} {peer_role} {message} {waits:?} {}", self.done_bytes)
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let (done_bytes, total_bytes) = (&mut self.done_bytes, &mut self.total_bytes);
        vec![Part { name: self.mirror.name.clone(), done_bytes, total_bytes }]
    }

    fn left_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.done_bytes)
    }

    fn progress(&self, pace: &str) -> String {
        let Mirror { peer, role, peer_role, message, members, .. } = &self.mirror;
        let waits = members.iter().find(|member| !member.waiting_for.is_empty());
        let has_transfer = self.total_bytes > 0;
        match (self.goal, waits) {
            _ if !message.is_empty() => format!("waits: {message}"),
            (Goal::TakeOver, _) if role == "promoting" => {
                "the final point is here, and this side is promoted".to_owned()
            }
            (_, Some(member)) => format!("volume {} waits for {}", member.name, member.waiting_for),
            (Goal::Copy, None) if has_transfer => format!("sent: {}{pace}", self.bytes()),
            (Goal::Copy, None) => "waits for its first point".to_owned(),
            (Goal::TakeOver, None) if has_transfer => {
                format!("a point of {peer} comes: it is at {}{pace}", self.bytes())
            }
            (Goal::TakeOver, None) if peer_role == "primary" => {
                format!("waits for {peer} to step down, which it is asked to")
            }
            (Goal::TakeOver, None) => format!("{peer} stepped down; waits for its final point"),
        }
    }
}

async fn wait_for_copy(
    first: Mirror,
    cluster: &mut Cluster,
    client: &ClientOptions,
) -> Result<Mirror> {
    let group = first.group_id.clone();
    let awaited = |mirror| Awaited::of(Goal::Copy, mirror);
    let poll = async || get(cluster, &group).await.map(awaited);
    Ok(pace::follow(awaited(first), client, poll).await?.mirror)
}

async fn get(cluster: &mut Cluster, of: &str) -> Result<Mirror> {
    let request = GetMirrorRequest { of: any(of) };
    Ok(cluster.get_mirror(request).await.map_err(refusal)?.into_inner())
}

/// Calls until there is an answer: what goes on is asked for again, for as long as the user waits.
async fn patiently<T>(
    client: &ClientOptions,
    mut call: impl AsyncFnMut() -> std::result::Result<tonic::Response<T>, tonic::Status>,
) -> Result<T> {
    let began = Instant::now();
    let mut reported = began;
    loop {
        let status = match call().await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        // The other side may have changed its role a moment ago, and its word is on the way.
        let passes = match status.code() {
            Code::Unavailable => began.elapsed() <= client.timeout(),
            Code::Aborted => began.elapsed() <= HEARD_WITHIN,
            _ => false,
        };
        if !passes {
            return Err(refusal(status));
        }
        if reported.elapsed() >= REPORT_EVERY {
            eprintln!("waits: {}", status.message());
            reported = Instant::now();
        }
        tokio::time::sleep(AGAIN).await;
    }
}

pub async fn status(of: Option<&str>, cluster: &mut Cluster, format: Format) -> Result<()> {
    let Some(of) = of else {
        let answer = cluster.list_mirrors(ListMirrorsRequest {}).await;
        let mirrors = answer.map_err(refusal)?.into_inner().mirrors;
        let rows: Vec<_> = mirrors.into_iter().map(MirrorView::from).collect();
        let nothing = "nothing is mirrored: `quoin mirror enable` begins it";
        return output::print_list(format, &rows, nothing);
    };
    let view = MirrorView::from(get(cluster, of).await?);
    output::print_one(format, &view, || view.text())
}

pub async fn points(of: &str, cluster: &mut Cluster, format: Format) -> Result<()> {
    let view = MirrorView::from(get(cluster, of).await?);
    output::print_list(format, &view.points, "it holds no point")
}

pub async fn promote(
    options: PromoteOptions,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let before = get(cluster, &options.of).await?;
    let request = CallMirrorRequest {
        of: any(&options.of),
        call: Call::Promote.into(),
        force: options.force,
        accept_diverged: options.accept_diverged,
        at_point: options.at.clone().unwrap_or_default(),
    };
    let mirror = promoted(&request, cluster, client).await?;
    let view = MirrorView::from(mirror);
    output::print_one(format, &view, || {
        let name = output::quoted(&view.name);
        let loss = match (options.force, MirrorView::from(before).loss()) {
            (true, loss) if !loss.is_empty() => format!("; {loss}"),
            _ => String::new(),
        };
        match view.role.as_str() {
            "off" => format!("{name} is mirrored no more, and an ordinary {} here", view.kind),
            _ => format!("{name} is primary here, in generation {}{loss}", view.generation),
        }
    })
}

/// Promotes, and where the other side is asked to step down for it, waits until that is over.
async fn promoted(
    request: &CallMirrorRequest,
    cluster: &mut Cluster,
    client: &ClientOptions,
) -> Result<Mirror> {
    if !request.force {
        return call(request.clone(), cluster, client).await;
    }
    let of = request.of.as_ref().map(|of| of.any.clone()).unwrap_or_default();
    let began = Instant::now();
    loop {
        // A take-over that is asked for already is followed from the start, not waited for in silence.
        if get(cluster, &of).await?.takes_over {
            let awaited = |mirror| Awaited::of(Goal::TakeOver, mirror);
            let mut poll = async || get(cluster, &of).await.map(awaited);
            pace::follow(poll().await?, client, poll).await?;
            // The role is there, or the answer says why it is not.
            let unforced = CallMirrorRequest { force: false, ..request.clone() };
            return call(unforced, cluster, client).await;
        }
        let status = match cluster.call_mirror(request.clone()).await {
            Ok(answer) => return Ok(answer.into_inner().mirror.unwrap_or_default()),
            Err(status) => status,
        };
        match status.code() {
            Code::Aborted if began.elapsed() < HEARD_WITHIN => tokio::time::sleep(AGAIN).await,
            Code::Aborted | Code::Unavailable if !get(cluster, &of).await?.takes_over => {
                return call(request.clone(), cluster, client).await;
            }
            Code::Aborted | Code::Unavailable => {}
            _ => return Err(refusal(status)),
        }
    }
}

pub async fn demote(
    options: ForceOptions,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let request = CallMirrorRequest {
        of: any(&options.of),
        call: Call::Demote.into(),
        force: options.force,
        ..CallMirrorRequest::default()
    };
    let view = MirrorView::from(call(request, cluster, client).await?);
    output::print_one(format, &view, || {
        format!(
            "{} is a copy from now on: promote it on {} (`quoin mirror promote`), which has everything \
             once the final point is there",
            output::quoted(&view.name),
            view.peer
        )
    })
}

pub async fn resync(
    options: ForceOptions,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let began = Instant::now();
    let mut reported = began;
    loop {
        let request = CallMirrorRequest {
            of: any(&options.of),
            call: Call::Resync.into(),
            force: options.force,
            ..CallMirrorRequest::default()
        };
        let answer = cluster.call_mirror(request).await;
        let why = match answer {
            Ok(answer) => {
                let answer = answer.into_inner();
                let view = MirrorView::from(answer.mirror.unwrap_or_default());
                if answer.ready {
                    return output::print_one(format, &view, || {
                        format!("{} follows {}", output::quoted(&view.name), view.peer)
                    });
                }
                if view.role == "diverged" && !options.force {
                    bail!(
                        "{} diverged: both sides wrote since the last common point. `quoin mirror resync {} \
                         --force` follows the other side, and keeps what this one wrote in a snapshot",
                        options.of,
                        output::quoted(&options.of)
                    );
                }
                match view.message.as_str() {
                    "" => format!("it is {} here", view.role),
                    message => message.to_owned(),
                }
            }
            Err(status) if status.code() == Code::Unavailable => status.message().to_owned(),
            Err(status) => return Err(refusal(status)),
        };
        if began.elapsed() > client.timeout() {
            bail!("{} does not follow its primary yet: {why}; ask again", options.of);
        }
        if reported.elapsed() >= REPORT_EVERY {
            eprintln!("waits: {why}");
            reported = Instant::now();
        }
        tokio::time::sleep(AGAIN).await;
    }
}

pub async fn plain(
    of: &str,
    what: Call,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let request =
        CallMirrorRequest { of: any(of), call: what.into(), ..CallMirrorRequest::default() };
    let view = MirrorView::from(call(request, cluster, client).await?);
    output::print_one(format, &view, || {
        let name = output::quoted(&view.name);
        match what {
            Call::Pause => {
                format!("no more points of {name} are cut until `quoin mirror resume {name}`")
            }
            Call::Resume => format!("points of {name} are cut again"),
            _ if view.role == "orphan" => {
                format!("{name} is an orphan, whose mirror was ended: promote it, or delete it")
            }
            _ if ["secondary", "diverged"].contains(&view.role.as_str()) => {
                format!("{name} is a copy: its mirror is ended on {}", view.peer)
            }
            _ => format!("{name} is mirrored no more; its copy on {} stays, an orphan", view.peer),
        }
    })
}

/// Exit code of a comparison that found differences.
const DIFFERS: i32 = 1;

/// A comparison that is under way, as it was seen last.
struct Comparing {
    peer: String,
    found: MirrorComparison,
}

impl Comparing {
    fn of(mirror: Mirror) -> Self {
        Self { peer: mirror.peer, found: mirror.comparison.unwrap_or_default() }
    }
}

impl UnderWay for Comparing {
    fn is_done(&self) -> bool {
        self.found.state != "comparing"
    }

    fn state_text(&self) -> String {
        format!("{} {}", self.found.state, self.found.done_bytes)
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let MirrorComparison { done_bytes, total_bytes, .. } = &mut self.found;
        vec![Part { name: self.peer.clone(), done_bytes, total_bytes }]
    }

    fn left_bytes(&self) -> u64 {
        self.found.total_bytes.saturating_sub(self.found.done_bytes)
    }

    fn progress(&self, pace: &str) -> String {
        let MirrorComparison { done_bytes, total_bytes, differing, .. } = &self.found;
        let differing = match differing {
            0 => String::new(),
            count => format!(", of which {count} MiB differ"),
        };
        let (done, total) = (show_size(*done_bytes), show_size(*total_bytes));
        format!("compared with {}: {done} of {total}{differing}{pace}", self.peer)
    }
}

pub async fn verify(
    of: &str,
    cluster: &mut Cluster,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let request = VerifyMirrorRequest { of: any(of) };
    let first = cluster.verify_mirror(request).await.map_err(refusal)?.into_inner();
    let (group, name, peer) = (first.group_id.clone(), first.name.clone(), first.peer.clone());
    let poll = async || get(cluster, &group).await.map(Comparing::of);
    let found = pace::follow(Comparing::of(first), client, poll).await?.found;
    let view = ComparisonView::from(found);
    if view.state == "failed" {
        bail!("{name} could not be compared with {peer}: {}", view.failure);
    }
    output::print_one(format, &view, || view.text(&name, &peer))?;
    match view.state.as_str() {
        "equal" => Ok(()),
        _ => std::process::exit(DIFFERS),
    }
}

/// A comparison as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ComparisonView {
    state: String,
    began_at: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    ended_at: String,
    point: String,
    done_bytes: u64,
    total_bytes: u64,
    differing_ranges: u64,
    ranges: Vec<DifferingView>,
    #[serde(skip_serializing_if = "String::is_empty")]
    failure: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DifferingView {
    volume: String,
    volume_id: String,
    offset: u64,
    length: u64,
}

impl From<MirrorComparison> for ComparisonView {
    fn from(found: MirrorComparison) -> Self {
        let shown =
            |time: Option<prost_types::Timestamp>| time.as_ref().map(show_time).unwrap_or_default();
        let range = |range: quoin_api::control::DifferingRange| DifferingView {
            volume: range.volume,
            volume_id: range.volume_id,
            offset: range.offset,
            length: range.length,
        };
        Self {
            state: found.state,
            began_at: shown(found.began_at),
            ended_at: shown(found.ended_at),
            point: found.point,
            done_bytes: found.done_bytes,
            total_bytes: found.total_bytes,
            differing_ranges: found.differing,
            ranges: found.ranges.into_iter().map(range).collect(),
            failure: found.failure,
        }
    }
}

impl ComparisonView {
    fn text(&self, name: &str, peer: &str) -> String {
        let done = show_size(self.done_bytes);
        if self.state == "equal" {
            let name = output::quoted(name);
            return format!("{name} is equal here and on {peer}: {done} were compared");
        }
        let mut text = format!(
            "{} is not the same here and on {peer}: {} of 1 MiB of the {done} that were compared differ",
            output::quoted(name),
            match self.differing_ranges {
                1 => "1 range".to_owned(),
                count => format!("{count} ranges"),
            },
        );
        for range in &self.ranges {
            text += &format!("\n  volume {} at {}", range.volume, show_size(range.offset));
        }
        let more = self.differing_ranges.saturating_sub(self.ranges.len() as u64);
        if more > 0 {
            text += &format!("\n  and {more} more");
        }
        text + "\nnext: `quoin volume doctor` has the way out"
    }

    /// One line, for the state of the mirror.
    fn summary(&self) -> String {
        match self.state.as_str() {
            "comparing" => {
                let (done, total) = (show_size(self.done_bytes), show_size(self.total_bytes));
                format!("is going on, at {done} of {total}")
            }
            "equal" => format!("both sides are equal, as of {}", self.ended_at),
            "differs" => format!(
                "{} of 1 MiB differ, as of {}: `quoin volume doctor`",
                match self.differing_ranges {
                    1 => "1 range".to_owned(),
                    count => format!("{count} ranges"),
                },
                self.ended_at
            ),
            _ => format!("ended early at {}: {}", self.ended_at, self.failure),
        }
    }
}

async fn call(
    request: CallMirrorRequest,
    cluster: &mut Cluster,
    client: &ClientOptions,
) -> Result<Mirror> {
    let answer = patiently(client, async || cluster.call_mirror(request.clone()).await).await?;
    Ok(answer.mirror.unwrap_or_default())
}

/// A mirror as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MirrorView {
    name: String,
    kind: String,
    id: String,
    peer: String,
    peer_cluster_id: String,
    role: String,
    generation: u64,
    peer_role: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    health: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    synced_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lag_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lag_bytes: Option<u64>,
    lag_bytes_are_least: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    lag_bytes_counted_ms_ago: Option<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    interval_seconds: u64,
    paused: bool,
    may_take_over: bool,
    takes_over: bool,
    compression: String,
    bandwidth_limit: u64,
    members: Vec<MemberView>,
    points: Vec<PointView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer: Option<TransferView>,
    unsure: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    lost: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    comparison: Option<ComparisonView>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MemberView {
    name: String,
    volume_id: String,
    has_base: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    waiting_for: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PointView {
    id: String,
    cut_at: String,
    is: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lag_bytes: Option<u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TransferView {
    point: String,
    base: String,
    done_bytes: u64,
    total_bytes: u64,
}

impl From<Mirror> for MirrorView {
    fn from(mirror: Mirror) -> Self {
        let shown =
            |time: Option<prost_types::Timestamp>| time.as_ref().map(show_time).unwrap_or_default();
        Self {
            name: mirror.name,
            kind: mirror.kind,
            id: mirror.group_id,
            peer: if mirror.peer.is_empty() { mirror.peer_cluster_id.clone() } else { mirror.peer },
            peer_cluster_id: mirror.peer_cluster_id,
            role: mirror.role,
            generation: mirror.generation,
            peer_role: mirror.peer_role,
            health: mirror.health,
            synced_at: shown(mirror.synced_at),
            lag_ms: mirror.lag_ms,
            lag_bytes: mirror.lag_bytes,
            lag_bytes_are_least: mirror.lag_is_least,
            lag_bytes_counted_ms_ago: mirror.lag_bytes.map(|_| mirror.lag_counted_ms),
            message: mirror.message,
            interval_seconds: mirror.interval_s,
            paused: mirror.paused,
            may_take_over: mirror.may_take_over,
            takes_over: mirror.takes_over,
            compression: mirror.compression,
            bandwidth_limit: mirror.bandwidth_limit,
            members: mirror
                .members
                .into_iter()
                .map(|member| MemberView {
                    name: member.name,
                    volume_id: member.volume_id,
                    has_base: member.has_base,
                    waiting_for: member.waiting_for,
                })
                .collect(),
            points: mirror
                .points
                .into_iter()
                .map(|point| PointView {
                    id: point.id,
                    cut_at: shown(point.cut_at),
                    is: point.is,
                    lag_bytes: point.lag_bytes,
                })
                .collect(),
            transfer: mirror.transfer.map(|transfer| TransferView {
                point: transfer.point,
                base: transfer.base,
                done_bytes: transfer.done_bytes,
                total_bytes: transfer.total_bytes,
            }),
            unsure: mirror.unsure,
            lost: mirror.lost,
            comparison: mirror.comparison.map(ComparisonView::from),
        }
    }
}

impl MirrorView {
    fn lag(&self) -> String {
        let Some(lag_ms) = self.lag_ms else { return String::new() };
        format!("{:.1} s", lag_ms as f64 / 1000.0)
    }

    /// Bytes that the other side has not; empty: not known.
    fn bytes(&self) -> Option<String> {
        let least = if self.lag_bytes_are_least { "at least " } else { "" };
        Some(format!("{least}{}", show_size(self.lag_bytes?)))
    }

    fn behind(&self) -> String {
        let is_final = self.points.iter().any(|point| point.is.contains("last"));
        let is_told = ["primary", "secondary"].contains(&self.role.as_str()) && !is_final;
        let (Some(bytes), Some(ago)) = (self.bytes(), self.lag_bytes_counted_ms_ago) else {
            let is_told = is_told && !self.synced_at.is_empty();
            return if is_told { "not counted since then yet".to_owned() } else { String::new() };
        };
        let whose = if self.role == "primary" { "" } else { &format!("{} ", self.peer) };
        format!("{bytes}, as {whose}counted {:.1} s ago", ago as f64 / 1000.0)
    }

    /// Loss of a failover at this moment, in words.
    fn loss(&self) -> String {
        let bytes = self.bytes().filter(|_| self.lag_bytes != Some(0));
        let bytes = bytes.map(|bytes| format!(": {bytes} and what came since")).unwrap_or_default();
        match (self.role.as_str(), self.synced_at.as_str()) {
            ("secondary", _) if self.points.iter().any(|point| point.is.contains("last")) => {
                format!(
                    "nothing is lost: this side was demoted, and {} gets its final point",
                    self.peer
                )
            }
            ("secondary", "") if self.points.iter().any(|point| point.is.contains("complete")) => {
                format!(
                    "what was acknowledged on {} since its last point; of when that is, is not known",
                    self.peer
                )
            }
            ("secondary", "") if self.unsure => {
                format!("of which point it has all is not known until {} is heard", self.peer)
            }
            ("secondary", "") => "no point is complete here: nothing can be promoted".to_owned(),
            ("secondary", at) => {
                format!("what was acknowledged on {} after {at} is not here{bytes}", self.peer)
            }
            ("primary", at) if !at.is_empty() => {
                format!("what was acknowledged here after {at} is not on {}{bytes}", self.peer)
            }
            _ => String::new(),
        }
    }

    fn text(&self) -> String {
        let transfer = self.transfer.as_ref().map(|transfer| {
            let kind = if transfer.base.is_empty() { "everything" } else { "what changed" };
            let (done, total) = (show_size(transfer.done_bytes), show_size(transfer.total_bytes));
            format!("{kind}, at {done} of {total}")
        });
        let peer_role = match self.peer_role.as_str() {
            "" => "not heard yet".to_owned(),
            role => role.to_owned(),
        };
        let member = |member: &MemberView| match (member.has_base, member.waiting_for.as_str()) {
            (_, why) if !why.is_empty() => format!("{} (waits for {why})", member.name),
            (true, _) => member.name.clone(),
            (false, _) if self.unsure => member.name.clone(),
            (false, _) => format!("{} (not copied yet)", member.name),
        };
        let paused = if self.paused { ", paused" } else { "" };
        fields(&[
            ("Name", self.name.clone()),
            ("Kind", self.kind.clone()),
            ("Role", format!("{}, in generation {}", self.role, self.generation)),
            ("Peer", format!("{} ({peer_role})", self.peer)),
            ("Health", self.health.clone()),
            (
                if self.role == "primary" { "Synced at" } else { "Last point" },
                self.synced_at.clone(),
            ),
            (if self.role == "primary" { "Lag" } else { "Its age" }, self.lag()),
            ("Behind", self.behind()),
            ("A failover now", self.loss()),
            ("Every", format!("{}{paused}", Time(self.interval_seconds))),
            ("Transfer", transfer.unwrap_or_default()),
            ("Members", self.members.iter().map(member).collect::<Vec<_>>().join(", ")),
            ("Lost", self.lost.clone()),
            (
                "Comparison",
                self.comparison.as_ref().map(ComparisonView::summary).unwrap_or_default(),
            ),
            ("Message", self.message.clone()),
        ])
    }
}

impl Row for MirrorView {
    const HEADER: &'static [&'static str] =
        &["NAME", "ROLE", "PEER", "HEALTH", "LAG", "MESSAGE", "BEHIND", "SYNCED", "EVERY", "ID"];
    const NARROW: usize = 6;

    fn cells(&self) -> Vec<String> {
        let lag = if self.lag_ms.is_none() { "-".to_owned() } else { self.lag() };
        let health = if self.health.is_empty() { "-" } else { &self.health };
        vec![
            self.name.clone(),
            self.role.clone(),
            self.peer.clone(),
            health.to_owned(),
            lag,
            self.message.clone(),
            self.bytes().unwrap_or_else(|| "-".to_owned()),
            self.synced_at.clone(),
            Time(self.interval_seconds).to_string(),
            self.id.clone(),
        ]
    }
}

impl Row for PointView {
    const HEADER: &'static [&'static str] = &["POINT", "CUT", "IS", "BEHIND"];
    const NARROW: usize = 4;

    fn cells(&self) -> Vec<String> {
        let behind = self.lag_bytes.map_or_else(|| "-".to_owned(), show_size);
        vec![self.id.clone(), self.cut_at.clone(), self.is.clone(), behind]
    }
}
