//! `quoin pool inspect | check | export`: a pool looked into with nothing of Quoin running.
//!
//! They only read. What a start would write (recovery) stays in memory, so a damaged pool can be
//! looked at, and its volumes taken out of it, without being changed.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use quoin_core::{ReplicaGuid, SnapshotId};
use quoin_pool::POOL_FILE;
use quoin_store::{FileDisk, offline};
use serde::Serialize;

use crate::output::{self, Format, Row};
use crate::size::show_size;

#[derive(clap::Args)]
pub struct OfflineOptions {
    /// The pool: its directory, its file or its block device. Nothing may be serving it.
    #[arg(value_name = "DATA")]
    data: PathBuf,
}

#[derive(clap::Args)]
pub struct ExportOptions {
    #[command(flatten)]
    pool: OfflineOptions,
    /// The replica's GUID, as `quoin pool inspect` shows it. Not needed if the pool has one.
    #[arg(long)]
    replica: Option<String>,
    /// A snapshot's id; without it the volume as it is now.
    #[arg(long)]
    snapshot: Option<String>,
    /// The raw image to write; must not exist. Holes stay holes.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

#[derive(Serialize)]
struct ReplicaView {
    guid: String,
    volume: String,
    replica: String,
    size_bytes: u64,
    position: String,
    stable: u64,
    quorum: bool,
    damaged: bool,
    live_bytes: u64,
    snapshots: Vec<String>,
}

impl Row for ReplicaView {
    const HEADER: &'static [&'static str] = &[
        "GUID",
        "VOLUME",
        "SIZE",
        "LIVE",
        "POSITION",
        "QUORUM",
        "DAMAGE NOTED",
        "REPLICA",
        "STABLE",
        "SNAPSHOTS",
    ];
    const NARROW: usize = 7;

    fn cells(&self) -> Vec<String> {
        let yes_no = |flag: bool| (if flag { "yes" } else { "no" }).to_owned();
        vec![
            self.guid.clone(),
            self.volume.clone(),
            show_size(self.size_bytes),
            show_size(self.live_bytes),
            self.position.clone(),
            (if self.quorum { "on" } else { "off" }).to_owned(),
            yes_no(self.damaged),
            self.replica.clone(),
            self.stable.to_string(),
            self.snapshots.join(","),
        ]
    }
}

#[derive(Serialize)]
struct CheckView {
    checked_bytes: u64,
    bad_blocks: Vec<String>,
    damaged: Vec<String>,
}

fn open(data: &Path) -> Result<FileDisk> {
    let path = find(data)?;
    FileDisk::open_read_only(&path).with_context(|| format!("open the pool {}", path.display()))
}

/// The file or device of a pool: itself, or in a pool's directory, or in that of a pool of
/// `quoin dev`, where it lies beside the identity.
fn find(data: &Path) -> Result<PathBuf> {
    if !data.is_dir() {
        return Ok(data.to_owned());
    }
    let places = [data.join(POOL_FILE), data.join("data"), data.join("data").join(POOL_FILE)];
    places.iter().find(|place| place.is_file()).cloned().with_context(|| {
        format!(
            "there is no pool in {}: name the directory or file that --data named",
            data.display()
        )
    })
}

pub fn inspect(options: &OfflineOptions, format: Format) -> Result<()> {
    let found = offline::inspect(open(&options.data)?)?;
    let rows: Vec<ReplicaView> = found
        .replicas
        .iter()
        .map(|r| ReplicaView {
            guid: r.identity.guid.to_string(),
            volume: r.identity.volume.to_string(),
            replica: r.identity.replica.to_string(),
            size_bytes: r.state.volume_blocks * quoin_core::BLOCK_SIZE as u64,
            position: format!("{}:{}", r.state.position.epoch, r.state.position.lsn),
            stable: r.state.stable.0,
            quorum: r.meta.quorum,
            damaged: r.meta.damaged,
            live_bytes: r.stats.live_bytes,
            snapshots: r.snapshots.iter().map(|s| s.id.to_string()).collect(),
        })
        .collect();
    if matches!(format, Format::Table | Format::Wide) {
        output::print_line(&format!(
            "pool {}: {} used of {}, started {} times; what lies in it is read by `quoin pool check`",
            found.pool,
            show_size(found.stats.used_bytes),
            show_size(found.stats.size_bytes),
            found.stats.starts
        ))?;
    }
    output::print_list(format, &rows, "no replicas")
}

pub fn check(options: &OfflineOptions, format: Format) -> Result<()> {
    let report = offline::check(open(&options.data)?, |_| {})?;
    let view = CheckView {
        checked_bytes: report.checked_bytes,
        bad_blocks: report.bad.iter().map(|b| format!("{b:?}")).collect(),
        damaged: report.damaged.iter().map(|(guid, what)| format!("{guid}: {what}")).collect(),
    };
    output::print_one(format, &view, || {
        let verdict = if report.is_sound() { "sound" } else { "damaged" };
        let mut text = format!("{verdict}: {} checked\n", show_size(view.checked_bytes));
        for line in view.damaged.iter().chain(&view.bad_blocks) {
            text.push_str(line);
            text.push('\n');
        }
        text
    })?;
    if !report.is_sound() {
        bail!(
            "the pool is damaged: start it beside its volumes' other replicas and it is repaired, \
             or export what is left with `quoin pool export`"
        );
    }
    Ok(())
}

pub fn export(options: &ExportOptions, format: Format) -> Result<()> {
    let guid = match &options.replica {
        Some(text) => text.parse::<ReplicaGuid>().context("--replica: 32 hex digits are needed")?,
        None => only_replica(&options.pool.data)?,
    };
    let snapshot = options
        .snapshot
        .as_deref()
        .map(|text| text.parse::<SnapshotId>().context("--snapshot: 32 hex digits are needed"))
        .transpose()?;
    let file = std::fs::OpenOptions::new().write(true).create_new(true).open(&options.to).map_err(
        |error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => anyhow!(
                "{} exists already: name another file with --to, or remove it",
                options.to.display()
            ),
            _ => anyhow!("cannot create {} ({error}): mend --to", options.to.display()),
        },
    )?;
    let outcome = offline::export(open(&options.pool.data)?, guid, snapshot, |offset, bytes| {
        file.write_all_at(bytes, offset)
    });
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            // A half-made image must not be taken for a whole one.
            let _ = std::fs::remove_file(&options.to);
            return Err(error).context("export the volume");
        }
    };
    file.set_len(report.size_bytes).context("set the image's size")?;
    file.sync_all().context("sync the image")?;
    let bad = report.bad.len();
    output::print_one(
        format,
        &serde_json::json!({
            "size_bytes": report.size_bytes,
            "data_bytes": report.data_bytes,
            "bad_blocks": report.bad,
        }),
        || {
            format!(
                "{}: {} with {} of data",
                options.to.display(),
                show_size(report.size_bytes),
                show_size(report.data_bytes)
            )
        },
    )?;
    if bad > 0 {
        bail!("{bad} blocks have no good copy in this pool and are holes in the image");
    }
    Ok(())
}

fn only_replica(data: &Path) -> Result<ReplicaGuid> {
    let found = offline::inspect(open(data)?)?;
    match &found.replicas[..] {
        [one] => Ok(one.identity.guid),
        [] => bail!("the pool holds no replica"),
        many => bail!("the pool holds {} replicas: name one with --replica", many.len()),
    }
}
