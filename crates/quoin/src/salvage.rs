//! `quoin controller backup|restore|recover|move-store`: the records kept elsewhere, brought back, made to
//! agree with what the pools hold, and moved to another store.

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use prost_types::Timestamp;
use quoin_api::control::{
    BackupRequest, FoundReplica, RecoverRecordsRequest, RecoverRecordsResponse, RecoveredVolume,
};
use quoin_control::backup::{BACKUP_BYTES_MAX, Backup};
use quoin_control::{Records, kept_backups};
use quoin_identity::{Lifetimes, write_private};
use quoin_types::Epoch;
use serde::Serialize;
use std::path::{Path, PathBuf};

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::output::{self, Format, Row};
use crate::roles::{RecordsOptions, StoreKind};
use crate::size::show_size;

#[derive(Args)]
pub struct BackupOptions {
    /// The file to write; must not exist.
    #[arg(required_unless_present = "into")]
    file: Option<PathBuf>,
    /// Write a file named after the time into this directory instead, for runs by a timer.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "file")]
    into: Option<PathBuf>,
    /// Keep so many backups in that directory, the newest, and delete older ones.
    #[arg(long, value_name = "NUMBER", requires = "into",
          value_parser = clap::value_parser!(u32).range(1..))]
    keep: Option<u32>,
    /// Leave the cluster's authority out. Such a backup is restored only where `authority.json` of
    /// the controller is.
    #[arg(long)]
    without_authority: bool,
}

#[derive(Args)]
pub struct RestoreOptions {
    /// The backup. It is checked whole first.
    file: PathBuf,
    /// The controller's directory: missing, empty, or with its authority left.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Put records that are there aside, into that directory.
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    records: RecordsOptions,
}

#[derive(Args)]
pub struct RecoverOptions {
    /// Say what each pool holds and what would be written, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// A pool that is away, to go on without, once for each. What only it holds is found by another
    /// recovery once it is back.
    #[arg(long, value_name = "POOL")]
    without: Vec<String>,
    /// Delete copies that count for no volume: replaced, moved, given up, or of volumes that were
    /// deleted.
    #[arg(long)]
    discard_left_over: bool,
    /// The directory of a controller that ended as another one took its place: let it start again.
    /// Its records do not rule then, until `recover` is run at it. End the other one first.
    #[arg(long, value_name = "DIRECTORY",
          conflicts_with_all = ["dry_run", "without", "discard_left_over"])]
    state: Option<PathBuf>,
    #[command(flatten)]
    records: RecordsOptions,
}

#[derive(Args)]
pub struct MoveStoreOptions {
    /// The directory of a controller of the cluster.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Where the records are to lie; `--store` says where they lie now.
    #[arg(long, value_enum, value_name = "STORE")]
    to: StoreKind,
    #[command(flatten)]
    records: RecordsOptions,
}

/// Content of a backup, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BackupView {
    file: String,
    cluster_id: String,
    volumes: usize,
    size_bytes: u64,
    /// True if the authority's private key is in it.
    authority: bool,
    /// Older backups that went (`--keep`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deleted: Vec<String>,
}

/// Result of a restore.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RestoredView {
    cluster_id: String,
    state: String,
    taken_at: String,
    volumes: usize,
    /// Where the former records are; empty: there were none.
    former_records: String,
}

/// Refuses a place where no backup can be, before the controller is asked for all of it.
fn check_place(file: &Path) -> Result<()> {
    let shown = file.display();
    if file.exists() {
        bail!("{shown} exists already, and a backup is never overwritten: name another file");
    }
    // The parent of a mere name is "".
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    if !directory.is_dir() {
        bail!(
            "{shown} cannot be written: there is no directory {}; a backup is written into one that \
             exists: make it, or name another",
            directory.display()
        );
    }
    Ok(())
}

pub async fn backup(options: &BackupOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let file = match (&options.file, &options.into) {
        (Some(file), _) => file.clone(),
        (None, Some(directory)) => kept_backups::new_file(directory, now_seconds()),
        (None, None) => bail!("name the file to write, or a directory by --into"),
    };
    check_place(&file)?;
    let mut cluster = client.connect().await?;
    let request = BackupRequest { without_authority: options.without_authority };
    let mut pieces = cluster.backup(request).await.map_err(refusal)?.into_inner();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.message().await.map_err(refusal)? {
        bytes.extend(piece.data);
        if bytes.len() as u64 > BACKUP_BYTES_MAX {
            bail!("the backup is larger than {}", show_size(BACKUP_BYTES_MAX));
        }
    }
    // Data that cannot be restored is no backup.
    let backup = Backup::parse(&bytes).context("check what the controller sent")?;
    write_private(&file, &bytes)?;
    let old = match (&options.into, options.keep) {
        (Some(directory), Some(keep)) => kept_backups::rotate(directory, keep as usize)?,
        _ => Vec::new(),
    };
    let view = BackupView {
        file: file.display().to_string(),
        deleted: old.iter().map(|path| path.display().to_string()).collect(),
        cluster_id: backup.cluster_id().to_owned(),
        volumes: backup.volumes(),
        size_bytes: bytes.len() as u64,
        authority: backup.has_authority(),
    };
    let key = match view.authority {
        true => "with the authority's private key: keep it as you keep that",
        false => "without the authority",
    };
    output::print_one(format, &view, || {
        let BackupView { file, cluster_id, volumes, size_bytes, .. } = &view;
        let size = show_size(*size_bytes);
        let mut shown = format!("{file}: {volumes} volumes of cluster {cluster_id}, {size}, {key}");
        for old in &view.deleted {
            shown.push_str(&format!("\n{old}: deleted (--keep)"));
        }
        shown
    })
}

fn now_seconds() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

pub async fn restore(options: RestoreOptions, format: Format) -> Result<()> {
    let path = options.file.display();
    let size = std::fs::metadata(&options.file).with_context(|| format!("open {path}"))?.len();
    if size > BACKUP_BYTES_MAX {
        bail!("{path} is not a backup: it is larger than {}", show_size(BACKUP_BYTES_MAX));
    }
    let bytes = std::fs::read(&options.file).with_context(|| format!("read {path}"))?;
    let backup = Backup::parse(&bytes).map_err(|error| match error {
        quoin_control::Error::Invalid { rule, .. } => anyhow!(
            "{path} cannot be restored: {rule}. A backup is a file that `quoin controller backup` \
             wrote"
        ),
        other => anyhow!(other).context(format!("check {path}")),
    })?;
    let state = options.state.display();
    let restored = match options.records.records()? {
        Records::Embedded => backup.restore(&options.state, options.replace).await,
        Records::Shared(shared) => {
            backup.restore_shared(&options.state, &shared, options.replace).await
        }
    };
    let aside = match restored {
        Err(quoin_control::Error::AlreadyInitialised(dir)) => {
            return Err(anyhow!(
                "{} holds the records of a cluster: name another directory, or put them aside with \
                 --replace",
                dir.display()
            ));
        }
        restored => restored.with_context(|| format!("restore {path} into {state}"))?,
    };
    let taken_s = (backup.taken_ms() / 1000) as i64;
    let view = RestoredView {
        cluster_id: backup.cluster_id().to_owned(),
        state: state.to_string(),
        taken_at: show_time(&Timestamp { seconds: taken_s, nanos: 0 }),
        volumes: backup.volumes(),
        former_records: aside.map(|aside| aside.display().to_string()).unwrap_or_default(),
    };
    output::print_one(format, &view, || {
        let RestoredView { cluster_id, state, taken_at, volumes, former_records } = &view;
        let aside = match former_records.as_str() {
            "" => String::new(),
            aside => format!("\nThe former records are in {aside}"),
        };
        format!(
            "cluster {cluster_id} is restored in {state}, as of {taken_at}: {volumes} volumes{aside}\n\
             next: start the controller, then quoin controller recover --dry-run\nUntil then nobody \
             is told anything by these records, and what is served is served on"
        )
    })
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct VolumeFound {
    name: String,
    id: String,
    outcome: String,
    /// Membership version: before, and now.
    version_before: u64,
    version: u64,
    epoch_before: u64,
    epoch: u64,
    replication_factor: u32,
    needed: u32,
    answered: u32,
    message: String,
    replicas: Vec<ReplicaFound>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplicaFound {
    pool: String,
    id: String,
    guid: String,
    standing: String,
    promised_epoch: u64,
    position: String,
    version: u64,
    message: String,
}

#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Found {
    volumes: Vec<VolumeFound>,
    pools: Vec<String>,
    missing_pools: Vec<String>,
    done: bool,
    /// Term in which the records rule.
    term: u64,
}

impl From<FoundReplica> for ReplicaFound {
    fn from(found: FoundReplica) -> Self {
        Self {
            pool: found.pool,
            id: found.replica_id,
            guid: found.guid,
            standing: found.standing,
            promised_epoch: found.promised_epoch,
            position: format!("{}:{}", Epoch(found.position_epoch), found.position_lsn),
            version: found.membership_version,
            message: found.message,
        }
    }
}

impl From<RecoveredVolume> for VolumeFound {
    fn from(found: RecoveredVolume) -> Self {
        Self {
            name: found.name,
            id: found.volume_id,
            outcome: found.outcome,
            version_before: found.version_before,
            version: found.membership_version,
            epoch_before: found.epoch_before,
            epoch: found.epoch,
            replication_factor: found.rf,
            needed: found.needed,
            answered: found.answered,
            message: found.message,
            replicas: found.replicas.into_iter().map(ReplicaFound::from).collect(),
        }
    }
}

impl From<RecoverRecordsResponse> for Found {
    fn from(found: RecoverRecordsResponse) -> Self {
        Self {
            volumes: found.volumes.into_iter().map(VolumeFound::from).collect(),
            pools: found.pools,
            missing_pools: found.missing_pools,
            done: found.done,
            term: found.term,
        }
    }
}

/// A controller that may start again.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct LetRecoverView {
    state: String,
    /// Term of the controller that took its place.
    superseded_by_term: u64,
}

async fn let_recover(state: &Path, records: RecordsOptions, format: Format) -> Result<()> {
    let shown = state.display().to_string();
    let by = quoin_control::let_recover(state, &records.records()?)
        .await
        .with_context(|| format!("let the controller in {shown} start again"))?;
    let view = LetRecoverView { state: shown, superseded_by_term: by.number };
    output::print_one(format, &view, || {
        format!(
            "the controller in {} may start again; its records do not rule\nnext: end the controller \
             of term {by}, start this one, then quoin controller recover --dry-run",
            view.state
        )
    })
}

/// Records in another store.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MovedView {
    cluster_id: String,
    from: String,
    to: String,
    volumes: usize,
    term: u64,
}

pub async fn move_store(options: MoveStoreOptions, format: Format) -> Result<()> {
    let MoveStoreOptions { state, to, records } = options;
    let (from, to) = (records.clone().records()?, records.records_in(to)?);
    let moved = quoin_control::move_records(&state, &from, &to, Lifetimes::default())
        .await
        .context("move the records")?;
    let view = MovedView {
        cluster_id: moved.cluster.to_string(),
        from: moved.from,
        to: moved.to,
        volumes: moved.volumes,
        term: moved.term,
    };
    output::print_one(format, &view, || {
        let MovedView { cluster_id, from, to, volumes, term } = &view;
        format!(
            "the records of cluster {cluster_id}, {volumes} volumes, moved from {from} to {to}: they rule there in \
             term {term}\nnext: start the controllers with --store and its options for {to}\nThe former copy \
             rules no more; it holds the authority's private key still"
        )
    })
}

/// A line of the table: what one pool reports of a volume, or a volume that no pool reports.
struct Line<'a>(&'a VolumeFound, Option<&'a ReplicaFound>);

impl Line<'_> {
    fn cells(&self) -> Vec<String> {
        let Line(volume, replica) = self;
        let column = |text: fn(&ReplicaFound) -> String| replica.map(text).unwrap_or_default();
        let version = match (volume.version_before, volume.version) {
            (0, now) => now.to_string(),
            (before, now) if before == now => now.to_string(),
            (before, now) => format!("{before} -> {now}"),
        };
        vec![
            volume.name.clone(),
            column(|r| r.pool.clone()),
            column(|r| r.standing.clone()),
            column(|r| Epoch(r.promised_epoch).to_string()),
            column(|r| r.position.clone()),
            column(|r| r.version.to_string()),
            volume.outcome.clone(),
            version,
            column(|r| r.message.clone()),
        ]
    }
}

#[derive(Serialize)]
struct LineRow(Vec<String>);

impl Row for LineRow {
    const HEADER: &'static [&'static str] = &[
        "VOLUME",
        "POOL",
        "HOLDS",
        "PROMISED",
        "POSITION",
        "KNOWS",
        "RECORD",
        "MEMBERSHIP",
        "MESSAGE",
    ];
    const NARROW: usize = 9;

    fn cells(&self) -> Vec<String> {
        self.0.clone()
    }
}

pub async fn recover(
    options: RecoverOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    if let Some(state) = &options.state {
        return let_recover(state, options.records, format).await;
    }
    let mut cluster = client.connect().await?;
    let request = RecoverRecordsRequest {
        dry_run: options.dry_run,
        without_pools: options.without,
        discard_left_over: options.discard_left_over,
    };
    let found = cluster.recover_records(request).await.map_err(refusal)?.into_inner();
    let found = Found::from(found);
    if !matches!(format, Format::Table | Format::Wide) {
        output::print_one(format, &found, String::new)?;
    } else {
        let lines = found.volumes.iter().flat_map(|volume| {
            let none = volume.replicas.is_empty().then_some(Line(volume, None));
            volume.replicas.iter().map(|replica| Line(volume, Some(replica))).chain(none)
        });
        let rows: Vec<_> = lines.map(|line| LineRow(line.cells())).collect();
        output::print_list(format, &rows, "no volumes")?;
        output::print_line(&summary(&found, options.dry_run))?;
    }
    match left_open(&found) {
        Some(reason) => bail!(reason),
        None => Ok(()),
    }
}

/// Why a recovery is not over, or a dry run foretells nothing.
fn left_open(found: &Found) -> Option<String> {
    let undecided = found.volumes.iter().filter(|v| v.outcome == "undecided").count();
    if !found.done && found.pools.is_empty() && !found.missing_pools.is_empty() {
        return Some(
            "no pool answers, so nothing is known of what pools hold: start them, wait until \
             `quoin pool list` shows them Online, and run this again"
                .to_owned(),
        );
    }
    let reason =
        || format!("{undecided} volumes are undecided: the lines above say what each needs");
    (undecided > 0).then(reason)
}

fn summary(found: &Found, dry_run: bool) -> String {
    let mut text = String::new();
    for volume in found.volumes.iter().filter(|volume| !volume.message.is_empty()) {
        text += &format!("volume {}: {}\n", volume.name, volume.message);
    }
    let count = |outcome: &&str| found.volumes.iter().filter(|v| v.outcome == *outcome).count();
    let counts = [
        ("as-recorded", "as recorded"),
        ("created", "created"),
        ("updated", "brought up to date"),
        ("deleted", "found deleted"),
        ("left-over", "left over"),
        ("undecided", "undecided"),
    ];
    let counts: Vec<_> = counts
        .iter()
        .filter(|(outcome, _)| count(outcome) > 0)
        .map(|(outcome, words)| format!("{} {words}", count(outcome)))
        .collect();
    let counts = if counts.is_empty() { "none".to_owned() } else { counts.join(", ") };
    let (all, pools) = (found.volumes.len(), found.pools.len());
    text += &format!("{all} volumes in {pools} pools: {counts}");
    if !found.missing_pools.is_empty() {
        text += &format!("\npools that do not answer: {}", found.missing_pools.join(", "));
    }
    match dry_run {
        true => text += "\nnothing was written; without --dry-run it is",
        false => text += &format!("\nthe records rule, in term {}", found.term),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_that_heard_no_pool_or_left_a_volume_undecided_does_not_end_well() {
        let volume = |outcome: &str| VolumeFound { outcome: outcome.into(), ..Default::default() };
        let found = |pools: &[&str], missing: &[&str], outcome: &str| Found {
            volumes: vec![volume(outcome)],
            pools: pools.iter().map(|p| (*p).to_owned()).collect(),
            missing_pools: missing.iter().map(|p| (*p).to_owned()).collect(),
            ..Default::default()
        };
        let no_pool = left_open(&found(&[], &["p1"], "as-recorded")).unwrap();
        assert!(no_pool.contains("no pool answers") && no_pool.contains("pool list"), "{no_pool}");
        let undecided = left_open(&found(&["p1"], &["p2"], "undecided")).unwrap();
        assert!(undecided.contains("1 volumes are undecided"), "{undecided}");
        assert_eq!(left_open(&found(&["p1"], &["p2"], "as-recorded")), None);
        assert_eq!(left_open(&found(&[], &[], "as-recorded")), None, "a cluster without pools");
    }

    #[test]
    fn an_impossible_backup_path_is_refused_with_the_directory_and_the_rule() {
        let scratch = tempfile::tempdir().unwrap();
        let there = scratch.path().join("there");
        check_place(&there).unwrap();
        check_place(Path::new("surely-no-such-backup-here")).unwrap();
        std::fs::write(&there, "").unwrap();
        let message = check_place(&there).unwrap_err().to_string();
        assert!(message.contains("exists already"), "{message}");
        for none in [scratch.path().join("none/backup"), there.join("backup")] {
            let message = check_place(&none).unwrap_err().to_string();
            let directory = none.parent().unwrap().display().to_string();
            assert!(message.contains(&format!("no directory {directory}")), "{message}");
        }
    }
}
