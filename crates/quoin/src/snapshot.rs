//! `quoin snapshot …`: make, look at, go back to, compare, export and delete snapshots of volumes.

mod archive;
mod diff;
mod export;
mod group;
mod pull;
mod revert;
mod space;
mod stream;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use quoin_api::control::{
    CreateSnapshotRequest, DeleteSnapshotRequest, GetSnapshotRequest, ListSnapshotsRequest,
    Snapshot, SnapshotRef, Volume, VolumeRef,
};
use serde::Serialize;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

pub use export::Interrupted;
pub use revert::RevertView;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal, volume_ref};
use crate::events::show_time;
use crate::output::{self, Format, Row, fields};
use crate::size::show_size;
use crate::volume::parse_name;

/// Interval between two looks at a snapshot that waits for its cut, and between two lines about it.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
const REPORT_INTERVAL: Duration = Duration::from_secs(3);

#[derive(Subcommand)]
pub enum SnapshotCommand {
    /// Make a snapshot of a volume, attached or not: its content of this moment, which stays as it
    /// is while the volume changes. It is the same on every replica, and takes no space of its own
    /// until the volume is written.
    #[command(after_help = "Examples:\n  quoin snapshot create db --name before-upgrade\n  \
                            quoin snapshot create db    named by the volume and the time\n  \
                            quoin snapshot create --group before-upgrade db log    both at one \
                            point\n\
                            A file system in use is cut as by a power failure; `fsfreeze -f` before, \
                            and `-u` after,\nmakes it clean. quoin schedule makes snapshots at \
                            intervals.")]
    Create(CreateOptions),
    /// One snapshot whole: when it was cut, its size, what it waits for.
    Get {
        /// Its name or id.
        snapshot: String,
    },
    /// All snapshots, or those of one volume, the oldest first.
    #[command(
        visible_alias = "ls",
        after_help = "Example:\n  quoin snapshot list db\n\
                      The snapshots of a volume that was deleted are listed by its id."
    )]
    List {
        /// The volume's name or id.
        volume: Option<String>,
    },
    /// Snapshots of several volumes at one point, which belong together: no volume's has a write
    /// that came after a write which another volume's lacks. `quoin snapshot create --group` makes
    /// them.
    #[command(subcommand)]
    Group(group::GroupCommand),
    /// Make a volume show a snapshot's content again. What was written since is lost, unless another
    /// snapshot has it. The volume's size stays, and so do all snapshots.
    #[command(after_help = revert::HELP)]
    Revert(revert::RevertOptions),
    /// List the ranges of a volume that differ between two of its snapshots, without reading data.
    #[command(after_help = diff::HELP)]
    Diff(diff::DiffOptions),
    /// Show how much data snapshots have, and how much of it only one of them has.
    #[command(after_help = space::HELP)]
    Space(space::SpaceOptions),
    /// Write a snapshot, or what changed in it since another one, into a file.
    #[command(after_help = export::HELP)]
    Export(export::ExportOptions),
    /// Check files that `quoin snapshot export` wrote; needs no cluster.
    #[command(after_help = "Example:\n  quoin snapshot verify db.full db.monday")]
    Verify {
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Make a raw image of files that `quoin snapshot export` wrote: a whole one, and then those of the
    /// changes since, in their order; needs no cluster.
    #[command(after_help = "Example:\n  quoin snapshot unpack db.full db.monday --to db.img")]
    Unpack(archive::UnpackOptions),
    /// Delete a snapshot; what only it has of the volume's former content is lost.
    #[command(
        visible_alias = "rm",
        after_help = "Example:\n  quoin snapshot delete before-upgrade"
    )]
    Delete {
        /// Its name or id.
        snapshot: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
}

#[derive(Args)]
pub struct CreateOptions {
    /// The volume's name or id; several with --group.
    #[arg(required = true)]
    volumes: Vec<String>,
    /// Make snapshots of all these volumes at one point, as the group of this name. Their IO is held
    /// for a moment, in which the targets of all of them cut together.
    #[arg(long, value_name = "NAME", value_parser = parse_own_name, conflicts_with = "name")]
    group: Option<String>,
    /// The snapshot's name, which no other in the cluster has: up to 128 bytes, no control
    /// characters [default: the volume's and the time].
    #[arg(long, value_parser = parse_own_name)]
    name: Option<String>,
    /// Return at once instead of waiting until it is cut.
    #[arg(long)]
    no_wait: bool,
}

/// A snapshot as `-o json` has it; sizes in bytes, times in RFC 3339.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotView {
    pub name: String,
    pub id: String,
    pub volume: String,
    pub volume_id: String,
    /// True if the volume is deleted, and its snapshots are kept.
    pub volume_deleted: bool,
    pub phase: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waiting_for: String,
    /// Empty: not cut yet.
    pub cut_at: String,
    pub size_bytes: u64,
    pub lsn: u64,
    /// The schedule that made it; empty: a user or an orchestrator did.
    pub schedule: String,
    /// The group snapshot that it is a member of; empty: it stands alone.
    pub group: String,
}

impl From<Snapshot> for SnapshotView {
    fn from(snapshot: Snapshot) -> Self {
        Self {
            name: snapshot.name,
            id: snapshot.id,
            volume: snapshot.volume_name,
            volume_id: snapshot.volume_id,
            volume_deleted: snapshot.volume_deleted,
            phase: snapshot.phase,
            waiting_for: snapshot.waiting_for,
            cut_at: snapshot.cut_at.as_ref().map(show_time).unwrap_or_default(),
            size_bytes: snapshot.size_bytes,
            lsn: snapshot.lsn,
            schedule: snapshot.schedule,
            group: snapshot.group_name.unwrap_or_default(),
        }
    }
}

impl SnapshotView {
    fn volume(&self) -> String {
        let deleted = if self.volume_deleted { " (deleted)" } else { "" };
        format!("{}{deleted}", self.volume)
    }

    fn size(&self) -> String {
        if self.size_bytes == 0 { String::new() } else { show_size(self.size_bytes) }
    }

    fn text(&self) -> String {
        fields(&[
            ("name", self.name.clone()),
            ("id", self.id.clone()),
            ("volume", self.volume()),
            ("volume id", self.volume_id.clone()),
            ("phase", self.phase.clone()),
            ("waits for", self.waiting_for.clone()),
            ("cut", self.cut_at.clone()),
            ("size", self.size()),
            ("LSN", if self.lsn == 0 { String::new() } else { self.lsn.to_string() }),
            ("schedule", self.schedule.clone()),
            ("group", self.group.clone()),
        ])
    }
}

impl Row for SnapshotView {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "VOLUME",
        "CUT",
        "SIZE",
        "PHASE",
        "WAITS FOR",
        "SCHEDULE",
        "LSN",
        "ID",
        "VOLUME ID",
    ];
    const NARROW: usize = 6;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.volume(),
            self.cut_at.clone(),
            self.size(),
            self.phase.clone(),
            self.waiting_for.clone(),
            self.schedule.clone(),
            self.lsn.to_string(),
            self.id.clone(),
            self.volume_id.clone(),
        ]
    }
}

/// A snapshot that is gone.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeletedView {
    snapshot: String,
    id: String,
    state: &'static str,
}

pub async fn run(command: SnapshotCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let command = match command {
        SnapshotCommand::Verify { files } => return archive::verify(&files, format),
        SnapshotCommand::Unpack(options) => return archive::unpack(&options, format),
        command => command,
    };
    let mut cluster = client.connect().await?;
    match command {
        SnapshotCommand::Verify { .. } | SnapshotCommand::Unpack(_) => {
            unreachable!("they need no cluster")
        }
        SnapshotCommand::Create(CreateOptions { volumes, group: Some(group), no_wait, .. }) => {
            group::create(&mut cluster, group, &volumes, no_wait, client, format).await
        }
        SnapshotCommand::Revert(options) => {
            revert::run(&mut cluster, options, client, format).await
        }
        SnapshotCommand::Diff(options) => diff::run(&mut cluster, &options, client, format).await,
        SnapshotCommand::Space(options) => space::run(&mut cluster, &options, client, format).await,
        SnapshotCommand::Export(options) => {
            export::run(&mut cluster, &options, client, format).await
        }
        SnapshotCommand::Create(options) => create(&mut cluster, options, client, format).await,
        SnapshotCommand::Group(command) => group::run(command, &mut cluster, format).await,
        SnapshotCommand::Get { snapshot } => {
            let view = SnapshotView::from(get(&mut cluster, &snapshot).await?);
            output::print_one(format, &view, || view.text())
        }
        SnapshotCommand::List { volume } => {
            let of = match &volume {
                Some(volume) => Some(id_ref(&get_volume(&mut cluster, volume).await?.id)),
                None => None,
            };
            let mut rows: Vec<_> =
                list(&mut cluster, of).await?.into_iter().map(SnapshotView::from).collect();
            // A snapshot that is not cut yet is the newest.
            let age = |row: &SnapshotView| (row.cut_at.is_empty(), row.cut_at.clone(), row.lsn);
            rows.sort_by_key(|row| (row.volume.clone(), age(row), row.name.clone()));
            let nothing = match &volume {
                Some(volume) => format!(
                    "no snapshots of volume {}: make one with `quoin snapshot create {}`",
                    output::plain(volume),
                    output::quoted(volume)
                ),
                None => "no snapshots: make one with `quoin snapshot create VOLUME`".to_owned(),
            };
            output::print_list(format, &rows, &nothing)
        }
        SnapshotCommand::Delete { snapshot, yes } => {
            let found = get(&mut cluster, &snapshot).await?;
            if !yes {
                confirm_delete(&found)?;
            }
            // By now the id may be of no snapshot, and must not be taken for a name.
            let snapshot = Some(SnapshotRef { id: found.id.clone(), name: String::new() });
            cluster.delete_snapshot(DeleteSnapshotRequest { snapshot }).await.map_err(refusal)?;
            let view = DeletedView { snapshot: found.name, id: found.id, state: "deleted" };
            output::print_one(format, &view, || {
                format!("snapshot {} is deleted; its space becomes free by itself", view.snapshot)
            })
        }
    }
}

async fn create(
    cluster: &mut Cluster,
    options: CreateOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let [volume] = &options.volumes[..] else {
        bail!(
            "{} volumes are named: with --group NAME they get snapshots at one point; without it, one \
             command makes a snapshot of one volume",
            options.volumes.len()
        );
    };
    let volume = get_volume(cluster, volume).await?;
    let volume_name = volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let name = options.name.unwrap_or_else(|| name_by_time(&volume_name));
    let request = CreateSnapshotRequest {
        volume: Some(id_ref(&volume.id)),
        name: name.clone(),
        ..Default::default()
    };
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    // The controller waits some seconds itself, which is enough unless the volume waits too.
    let mut snapshot = cluster.create_snapshot(request).await.map_err(refusal)?.into_inner();
    let began = Instant::now();
    let mut reported = None::<Instant>;
    while !options.no_wait && snapshot.phase == "Wished" {
        if reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            eprintln!("snapshot {name} waits for {}", snapshot.waiting_for);
            reported = Some(Instant::now());
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "snapshot {name} is not cut after {} s; it waits for {}. It is made as soon as that \
                 is there: watch it with `quoin snapshot get {}`, or give it up with `quoin snapshot \
                 delete {}`",
                client.timeout,
                snapshot.waiting_for,
                output::quoted(&name),
                output::quoted(&name)
            );
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => bail!(crate::pace::Interrupted::new(format!(
                "snapshot {name} waits for {}", snapshot.waiting_for
            ))),
        }
        snapshot = match get(cluster, &snapshot.id).await {
            Ok(snapshot) => snapshot,
            Err(_) => bail!("snapshot {name} was given up: `quoin events` has the reason"),
        };
    }
    let view = SnapshotView::from(snapshot);
    output::print_one(format, &view, || match view.phase.as_str() {
        "Wished" => format!(
            "snapshot {} of volume {} is asked for, and waits for {}",
            view.name, view.volume, view.waiting_for
        ),
        _ => format!(
            "snapshot {} of volume {} is made: {}, as of {}",
            view.name,
            view.volume,
            show_size(view.size_bytes),
            view.cut_at
        ),
    })
}

/// Name for a snapshot that a user gave none.
fn name_by_time(volume: &str) -> String {
    let now = prost_types::Timestamp::from(SystemTime::now());
    let time = show_time(&now).replace(['-', ':'], "");
    // Names have at most 128 bytes.
    let end = (0..=100.min(volume.len())).rev().find(|at| volume.is_char_boundary(*at));
    format!("{}-{time}", &volume[..end.unwrap_or(0)])
}

/// A name that is given, and not left to be drawn.
pub fn parse_own_name(text: &str) -> Result<String, String> {
    match text {
        "" => Err("an empty name: give one, or leave the flag out".to_owned()),
        text => parse_name(text),
    }
}

/// A snapshot as users name it: 32 hex digits are an id, anything else is a name.
fn snapshot_ref(text: &str) -> SnapshotRef {
    let VolumeRef { id, name } = volume_ref(text);
    SnapshotRef { id, name }
}

pub(crate) async fn get(cluster: &mut Cluster, name: &str) -> Result<Snapshot> {
    let request = GetSnapshotRequest { snapshot: Some(snapshot_ref(name)) };
    match cluster.get_snapshot(request).await {
        Ok(snapshot) => Ok(snapshot.into_inner()),
        Err(status) if status.code() == tonic::Code::NotFound => bail!(
            "there is no snapshot `{}`: `quoin snapshot list` shows those that exist",
            output::plain(name)
        ),
        Err(status) => Err(refusal(status)),
    }
}

/// The snapshot of this name or id, of this volume.
async fn get_of(cluster: &mut Cluster, volume: &Volume, name: &str) -> Result<Snapshot> {
    let snapshot = get(cluster, name).await?;
    if snapshot.volume_id != volume.id {
        let volume_name = volume.spec.as_ref().map_or(volume.id.as_str(), |spec| &spec.name);
        bail!(
            "snapshot {} is of volume {}, not of {}: `quoin snapshot list {}` shows its own",
            output::plain(&snapshot.name),
            output::plain(&snapshot.volume_name),
            output::plain(volume_name),
            output::quoted(volume_name)
        );
    }
    Ok(snapshot)
}

/// Every snapshot, page by page.
async fn list(cluster: &mut Cluster, volume: Option<VolumeRef>) -> Result<Vec<Snapshot>> {
    let mut snapshots = Vec::new();
    let mut starting_token = String::new();
    loop {
        let request = ListSnapshotsRequest {
            volume: volume.clone(),
            max_entries: 0,
            starting_token,
            cut_only: false,
        };
        let page = cluster.list_snapshots(request).await.map_err(refusal)?.into_inner();
        snapshots.extend(page.snapshots);
        if page.next_token.is_empty() {
            return Ok(snapshots);
        }
        starting_token = page.next_token;
    }
}

/// A snapshot is lost only after its name was typed, or with --yes in a script.
fn confirm_delete(snapshot: &Snapshot) -> Result<()> {
    let name = output::plain(&snapshot.name);
    if !std::io::stdin().is_terminal() {
        bail!(
            "deleting destroys what only snapshot `{name}` has: add --yes to do it without the \
             question"
        );
    }
    print!(
        "This destroys snapshot {name} of volume {}. Type its name to continue: ",
        output::plain(&snapshot.volume_name)
    );
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() != snapshot.name {
        bail!("not deleted: that was not its name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_by_time_is_one_that_a_snapshot_may_have() {
        let name = name_by_time("db");
        assert!(name.starts_with("db-2") && name.ends_with('Z') && name.len() == 19, "{name}");
        for long in ["x".repeat(128), "ü".repeat(64)] {
            let name = name_by_time(&long);
            assert!(parse_name(&name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_snapshot_of_a_volume_that_is_deleted_says_so() {
        let view = SnapshotView::from(Snapshot {
            name: "s".into(),
            volume_name: "db".into(),
            phase: "Ready".into(),
            volume_deleted: true,
            size_bytes: 1 << 30,
            ..Snapshot::default()
        });
        assert!(view.text().contains("db (deleted)") && view.text().contains("GiB"));
        assert_eq!(view.cells().len(), SnapshotView::HEADER.len());
    }
}
