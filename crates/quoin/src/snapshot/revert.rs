//! `quoin snapshot revert`: a volume goes back to one of its snapshots.

use anyhow::{Result, bail};
use quoin_api::control::{Revert, RevertVolumeRequest, Snapshot, SnapshotRef};
use quoin_types::SnapshotId;
use serde::Serialize;
use std::io::{BufRead, IsTerminal, Write};
use std::time::Instant;

use super::{POLL_INTERVAL, REPORT_INTERVAL, get};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, unanswered};
use crate::events::show_time;
use crate::output::{self, Format};

pub const HELP: &str = "Example:\n  quoin snapshot create db --name before-revert\n  \
                        quoin volume detach db\n  quoin snapshot revert db before-upgrade\n\
                        Nobody may have the volume attached, and nobody can attach it until it is \
                        done.\nA snapshot of the volume as it is now makes the Revert one that can be \
                        taken back.\nEach run begins a Revert with an id of its own, which it prints. \
                        Interrupted, or without an answer, wait for that one:\n  \
                        quoin snapshot revert db --id ID";

#[derive(clap::Args)]
pub struct RevertOptions {
    /// The volume's name or id.
    volume: String,
    /// The snapshot's name or id.
    #[arg(required_unless_present = "id", conflicts_with = "id")]
    snapshot: Option<String>,
    /// Wait for the Revert of this id, which was begun before, and begin none.
    #[arg(long)]
    id: Option<SnapshotId>,
    /// Do not ask.
    #[arg(long, short)]
    yes: bool,
}

/// A Revert as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RevertView {
    pub id: String,
    pub volume: String,
    pub volume_id: String,
    pub snapshot: String,
    pub snapshot_id: String,
    /// Wished | Done | Failed
    pub phase: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waiting_for: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Empty: under way.
    pub ended_at: String,
    pub lsn: u64,
}

impl From<Revert> for RevertView {
    fn from(revert: Revert) -> Self {
        Self {
            id: revert.id,
            volume: revert.volume_name,
            volume_id: revert.volume_id,
            snapshot: revert.snapshot_name,
            snapshot_id: revert.snapshot_id,
            phase: revert.phase,
            waiting_for: revert.waiting_for,
            message: revert.message,
            ended_at: revert.ended_at.as_ref().map(show_time).unwrap_or_default(),
            lsn: revert.lsn,
        }
    }
}

impl RevertView {
    /// One line, as `quoin volume get` shows the last one.
    pub fn line(&self) -> String {
        let Self { snapshot, ended_at, waiting_for, message, .. } = self;
        match self.phase.as_str() {
            "Done" => format!("to snapshot {snapshot}, at {ended_at}"),
            "Failed" => format!("to snapshot {snapshot} failed: {message}"),
            _ => format!("to snapshot {snapshot} waits for {waiting_for}"),
        }
    }
}

pub async fn run(
    cluster: &mut Cluster,
    options: RevertOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let name = volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let mut request =
        RevertVolumeRequest { volume: Some(id_ref(&volume.id)), ..RevertVolumeRequest::default() };
    match (options.id, options.snapshot) {
        (Some(id), _) => (request.id, request.wait_only) = (id.to_string(), true),
        (None, snapshot) => {
            let snapshot = get(cluster, &snapshot.unwrap_or_default()).await?;
            if !options.yes {
                confirm(&name, &snapshot)?;
            }
            request.id = SnapshotId(rand::random()).to_string();
            eprintln!(
                "volume {name} is to go back to snapshot {}, by Revert {}",
                snapshot.name, request.id
            );
            request.snapshot = Some(SnapshotRef { id: snapshot.id, name: String::new() });
        }
    }
    let again = format!("`quoin snapshot revert {} --id {}`", output::quoted(&name), request.id);
    // Another Revert would undo what is written after the first one.
    let lost = format!("If the Revert was begun, it goes on: {again} waits for it");
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let began = Instant::now();
    let mut reported = None::<Instant>;
    let revert = loop {
        let revert = tokio::select! {
            revert = cluster.revert_volume(request.clone()) => {
                revert.map_err(|status| unanswered(status, &lost))?.into_inner()
            }
            _ = interrupts.recv() => bail!(crate::pace::Interrupted::with_command(
                format!("Revert {} of volume {name}", request.id), again
            )),
        };
        if revert.phase != "Wished" {
            break revert;
        }
        request.wait_only = true;
        if reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            eprintln!("volume {name} goes back, and waits for {}", revert.waiting_for);
            reported = Some(Instant::now());
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "volume {name} does not show snapshot {} after {} s; it waits for {}, and goes back \
                 as soon as that is there: {again} waits on, and `quoin volume get {}` shows it",
                revert.snapshot_name,
                client.timeout,
                revert.waiting_for,
                output::quoted(&name)
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    let view = RevertView::from(revert);
    if view.phase == "Failed" {
        bail!("volume {name} stays as it is: {}", view.message);
    }
    // The snapshot may be deleted by now.
    let snapshot = get(cluster, &view.snapshot_id).await.ok();
    output::print_one(format, &view, || {
        let cut_at = snapshot.and_then(|snapshot| snapshot.cut_at);
        let cut = cut_at.as_ref().map(|at| format!(": its content as of {}", show_time(at)));
        format!("volume {name} shows snapshot {} again{}", view.snapshot, cut.unwrap_or_default())
    })
}

/// Newer content is lost only after the volume's name was typed, or with --yes in a script.
fn confirm(volume: &str, snapshot: &Snapshot) -> Result<()> {
    let (volume, name) = (output::plain(volume), output::plain(&snapshot.name));
    if !std::io::stdin().is_terminal() {
        bail!(
            "going back destroys what was written to volume `{volume}` since snapshot `{name}`, unless \
             another snapshot has it: add --yes to do it without the question"
        );
    }
    print!(
        "This destroys what was written to volume {volume} since snapshot {name}, unless another \
         snapshot has it. Type the volume's name to continue: "
    );
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() != volume {
        bail!("not done: that was not its name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_revert_of_a_volume_is_one_line_whatever_became_of_it() {
        let of = |phase: &str| {
            let revert = Revert {
                snapshot_name: "s".into(),
                phase: phase.into(),
                waiting_for: "a node".into(),
                message: "it was deleted".into(),
                ..Revert::default()
            };
            RevertView::from(revert).line()
        };
        assert!(of("Done").starts_with("to snapshot s, at"));
        assert!(of("Failed").ends_with("failed: it was deleted"));
        assert!(of("Wished").ends_with("waits for a node"));
    }
}
