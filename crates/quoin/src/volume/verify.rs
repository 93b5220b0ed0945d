//! `quoin volume verify` and `repair`: all replicas compared block by block while they are used.

use std::fmt::Write;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use quoin_api::control::{
    Verification, VerifiedReplica, VerifyFinding, VerifyVolumeRequest, Volume,
    verify_volume_request,
};
use serde::Serialize;

use super::replicas::meant;
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::output::{self, Format, fields};
use crate::size::show_size;

/// Exit code where something is bad, differs or is lost.
const FOUND: i32 = 3;
/// Interval between two polls of the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Findings shown to people; programs get all that are remembered.
const SHOWN: usize = 16;

pub const VERIFY_HELP: &str = "Every replica that is in sync reads its blocks from its disk; \
    checksums, versions and\ncontents are compared with the others'. Nothing is changed. It takes \
    a quarter of the time\nat most, goes on where this command is ended (Ctrl-C), and begins anew \
    with its target.\nEnds with 3 where something is bad or differs, or a block changed too often to be compared. A\nreplica \
    that is not in sync is left out, which is told.";
pub const REPAIR_HELP: &str = "Compares as `quoin volume verify` does; what is bad in one replica \
    is replaced by another\none's copy of the same version. Good copies that differ are nobody's \
    to choose between:\n--from names the replica whose copy is to be everybody's, by an ordinary \
    write.\nEnds with 3 where something stays bad.\n\nExample: quoin volume repair db --from pool-a";

#[derive(Args)]
pub struct VerifyOptions {
    /// The volume's name or id.
    volume: String,
    #[command(flatten)]
    follow: Follow,
    /// End the verification, or repair, that is under way.
    #[arg(long)]
    stop: bool,
}

#[derive(Args)]
pub struct RepairOptions {
    /// The volume's name or id.
    volume: String,
    /// Where good copies differ, the pool or the id of the replica whose copy wins.
    #[arg(long, visible_alias = "from-replica", value_name = "REPLICA")]
    from: Option<String>,
    #[command(flatten)]
    follow: Follow,
}

#[derive(Args)]
struct Follow {
    /// Return at once; `quoin volume get` shows how far it is.
    #[arg(long)]
    no_wait: bool,
}

/// Result of comparing all replicas of a volume. Counts are of blocks of 4 KiB; bad and repaired
/// blocks count once for each replica.
#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
pub struct VerificationView {
    /// verify or repair.
    kind: &'static str,
    /// waiting, running, ended, failed or stopped.
    pub state: String,
    message: String,
    began_at: String,
    ended_at: String,
    checked_bytes: u64,
    total_bytes: u64,
    read_bytes: u64,
    bad: u64,
    lost: u64,
    differing: u64,
    repaired: u64,
    unsettled: u64,
    replicas: Vec<VerifiedReplicaView>,
    findings: Vec<FindingView>,
}

#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
struct VerifiedReplicaView {
    replica: String,
    pool: String,
    checked_bytes: u64,
    bad: u64,
    repaired: u64,
    /// Why it was not compared throughout; empty: it was.
    left_out: String,
}

#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
struct FindingView {
    /// bad, lost or differs.
    what: String,
    offset: u64,
    length: u64,
    /// Whose copy is bad.
    replica: String,
    pool: String,
    repaired: bool,
    message: String,
}

impl From<Verification> for VerificationView {
    fn from(v: Verification) -> Self {
        let time = |time: Option<prost_types::Timestamp>| {
            time.map(|time| crate::events::show_time(&time)).unwrap_or_default()
        };
        let replica = |r: VerifiedReplica| VerifiedReplicaView {
            replica: r.replica_id,
            pool: r.pool,
            checked_bytes: r.checked_bytes,
            bad: r.bad,
            repaired: r.repaired,
            left_out: r.left_out,
        };
        let finding = |f: VerifyFinding| FindingView {
            what: f.what,
            offset: f.offset,
            length: f.length,
            replica: f.replica_id,
            pool: f.pool,
            repaired: f.repaired,
            message: f.message,
        };
        Self {
            kind: if v.repair { "repair" } else { "verify" },
            state: v.state,
            message: v.message,
            began_at: time(v.began_at),
            ended_at: time(v.ended_at),
            checked_bytes: v.checked_bytes,
            total_bytes: v.total_bytes,
            read_bytes: v.read_bytes,
            bad: v.bad,
            lost: v.lost,
            differing: v.differing,
            repaired: v.repaired,
            unsettled: v.unsettled,
            replicas: v.replicas.into_iter().map(replica).collect(),
            findings: v.findings.into_iter().map(finding).collect(),
        }
    }
}

impl VerificationView {
    /// Returns true if all replicas in sync are known to be good and the same now.
    fn is_clean(&self) -> bool {
        let open = (self.bad + self.differing).saturating_sub(self.repaired);
        self.state == "ended" && open == 0 && self.lost == 0 && self.unsettled == 0
    }

    /// A line about it, for `quoin volume get`.
    pub fn sentence(&self) -> String {
        let percent = self.checked_bytes.min(self.total_bytes) * 100 / self.total_bytes.max(1);
        let found = self.found();
        match self.state.as_str() {
            "ended" => format!("{}: {found}", self.ended_at),
            "running" => format!("{} under way, {percent}%: {found}", self.kind),
            "waiting" => format!("{} waits {}", self.kind, self.message),
            "failed" => format!("{}: failed: {}", self.ended_at, self.message),
            _ => format!("{}: stopped at {percent}%: {found}", self.ended_at),
        }
    }

    fn found(&self) -> String {
        let counts = [
            (self.bad, "bad"),
            (self.lost, "lost"),
            (self.differing, "differing"),
            (self.repaired, "repaired"),
            (self.unsettled, "not compared"),
        ];
        let some = counts.iter().filter(|(n, _)| *n > 0);
        let words: Vec<_> = some.map(|(n, word)| format!("{n} {word}")).collect();
        if words.is_empty() { "nothing bad".to_owned() } else { words.join(", ") }
    }

    fn text(&self, name: &str) -> String {
        let compared = self.replicas.iter().filter(|replica| replica.checked_bytes > 0).count();
        let mut text = fields(&[
            ("volume", name.to_owned()),
            ("compared", format!("{} in {compared} replicas", show_size(self.checked_bytes))),
            ("read", show_size(self.read_bytes)),
            ("found", self.found()),
            ("ended", self.ended_at.clone()),
        ]);
        for replica in &self.replicas {
            let left_out = match (replica.left_out.as_str(), replica.checked_bytes) {
                ("", _) => String::new(),
                (why, 0) => format!(", left out: {why}"),
                (why, bytes) => {
                    format!(", compared in {} only: at a time {why}", show_size(bytes))
                }
            };
            if replica.bad > 0 || !left_out.is_empty() {
                let (bad, repaired) = (replica.bad, replica.repaired);
                let _ = writeln!(
                    text,
                    "replica on pool {}: {bad} bad, {repaired} repaired{left_out}",
                    replica.pool
                );
            }
        }
        for finding in self.findings.iter().take(SHOWN) {
            let FindingView { what, offset, length, pool, message, .. } = finding;
            let of = if pool.is_empty() { String::new() } else { format!(" on pool {pool}") };
            let more = if message.is_empty() { String::new() } else { format!(" ({message})") };
            let repaired = if finding.repaired { ", repaired" } else { "" };
            let _ = writeln!(text, "{what}{of}: {length} bytes at offset {offset}{repaired}{more}");
        }
        if let more @ 1.. = self.findings.len().saturating_sub(SHOWN) {
            let _ = writeln!(text, "and {more} more places (-o json shows them)");
        }
        let open = (self.bad + self.differing).saturating_sub(self.repaired);
        let name = output::quoted(name);
        if self.kind == "verify" && open > 0 {
            let _ = writeln!(text, "next: quoin volume repair {name}");
        } else if self.differing > 0 && open > 0 {
            let _ = writeln!(
                text,
                "next: quoin volume repair {name} --from REPLICA, for the replica with the right \
                 data, or quoin replica replace the others"
            );
        }
        text
    }
}

pub async fn verify(
    cluster: &mut Cluster,
    options: VerifyOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let action = match options.stop {
        true => verify_volume_request::Action::Stop,
        false => verify_volume_request::Action::Verify,
    };
    let volume = ask(cluster, &volume, action, String::new()).await?;
    if options.stop {
        let name = volume.spec.map(|spec| spec.name).unwrap_or_default();
        return output::print_line(&format!("volume {name} is no longer being verified"));
    }
    finish(cluster, volume, &options.follow, client, format).await
}

pub async fn repair(
    cluster: &mut Cluster,
    options: RepairOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let from: Vec<String> = options.from.into_iter().collect();
    let from = meant(cluster, &volume, &from).await?.pop().unwrap_or_default();
    let volume = ask(cluster, &volume, verify_volume_request::Action::Repair, from).await?;
    finish(cluster, volume, &options.follow, client, format).await
}

async fn ask(
    cluster: &mut Cluster,
    volume: &Volume,
    action: verify_volume_request::Action,
    from_replica_id: String,
) -> Result<Volume> {
    let volume = Some(id_ref(&volume.id));
    let request = VerifyVolumeRequest { volume, action: action.into(), from_replica_id };
    Ok(cluster.verify_volume(request).await.map_err(refusal)?.into_inner())
}

async fn finish(
    cluster: &mut Cluster,
    volume: Volume,
    how: &Follow,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let name = volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    if how.no_wait {
        let shown = output::quoted(&name);
        return output::print_line(&format!(
            "the replicas of volume {name} are being compared\nnext: quoin volume get {shown}   \
             (how far it is, and what was found)"
        ));
    }
    let view = VerificationView::from(follow(cluster, volume, &name, client).await?);
    output::print_one(format, &view, || view.text(&name))?;
    match view.state.as_str() {
        "failed" => bail!("volume {name} could not be verified: {}", view.message),
        "stopped" => bail!("the verification of volume {name} was stopped"),
        _ if view.is_clean() => Ok(()),
        _ => std::process::exit(FOUND),
    }
}

/// Waits for its end; a verification that reports nothing for long is not waited for.
async fn follow(
    cluster: &mut Cluster,
    volume: Volume,
    name: &str,
    client: &ClientOptions,
) -> Result<Verification> {
    let style = "{spinner} {bytes} of {total_bytes} at {bytes_per_sec}, {eta} left {msg}";
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?);
    let (id, mut volume) = (volume.id.clone(), volume);
    let mut heard = tokio::time::Instant::now();
    let mut last = Verification::default();
    let wanted = volume.verification.as_ref().map_or(0, |v| v.request);
    loop {
        let now = volume.verification.take().unwrap_or_default();
        if now.request > wanted {
            bail!("volume {name}: another verification was begun meanwhile");
        }
        if !["waiting", "running"].contains(&now.state.as_str()) {
            bar.finish_and_clear();
            return Ok(now);
        }
        bar.set_length(now.total_bytes);
        bar.set_position(now.checked_bytes);
        bar.set_message(match now.state.as_str() {
            "waiting" => format!("(waits {})", now.message),
            _ => String::new(),
        });
        if now != last {
            (last, heard) = (now, tokio::time::Instant::now());
        }
        if heard.elapsed() > client.timeout() {
            bar.finish_and_clear();
            let waits = if last.message.is_empty() { "" } else { ": it waits " };
            bail!(
                "volume {name}: nothing has moved for {} s{waits}{}; it continues by itself \
                 (--timeout waits longer, `quoin volume get` shows how far it is)",
                client.timeout,
                last.message
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        volume = get_volume(cluster, &id).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(bad: u64, repaired: u64, lost: u64) -> VerificationView {
        let finding = VerifyFinding {
            what: "bad".into(),
            offset: 8192,
            length: 4096,
            pool: "pool-b".into(),
            ..VerifyFinding::default()
        };
        VerificationView::from(Verification {
            state: "ended".into(),
            repair: repaired > 0,
            bad,
            repaired,
            lost,
            checked_bytes: 1 << 20,
            total_bytes: 1 << 20,
            findings: (0..bad).map(|_| finding.clone()).collect(),
            ..Verification::default()
        })
    }

    #[test]
    fn a_report_is_clean_without_damage_or_with_all_damage_repaired() {
        assert!(view(0, 0, 0).is_clean() && view(3, 3, 0).is_clean());
        assert!(!view(3, 2, 0).is_clean() && !view(0, 0, 1).is_clean());
        let running = VerificationView { state: "running".into(), ..view(0, 0, 0) };
        assert!(!running.is_clean());
    }

    #[test]
    fn a_report_names_the_damage_its_place_and_the_remedy() {
        let text = view(20, 0, 0).text("db");
        assert!(text.contains("bad on pool pool-b: 4096 bytes at offset 8192"), "{text}");
        assert!(text.contains("and 4 more places"), "{text}");
        assert!(text.contains("next: quoin volume repair db"), "{text}");
        assert!(view(0, 0, 0).text("db").contains("nothing bad"));
    }
}
