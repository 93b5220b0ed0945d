//! `quoin pool inspect | check | export`: a pool read with nothing of Quoin running.
//!
//! These commands only read. What a start would write (recovery) stays in memory, so a damaged pool
//! can be inspected, and its volumes taken out of it, without being changed.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use quoin_control::salvage::Kept;
use quoin_pool::POOL_FILE;
use quoin_store::offline::ReplicaInspection;
use quoin_store::{BadBlock, FileDisk, offline};
use quoin_types::{BLOCK_SIZE, ReplicaGuid, SnapshotId};
use serde::Serialize;

use crate::output::{self, Format, Row};
use crate::private_file;
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
    /// The replica: its GUID or its id, as `quoin pool inspect -o wide` shows them (the beginning is
    /// enough), or the name of its volume. Not needed if the pool has one.
    #[arg(long)]
    replica: Option<String>,
    /// A snapshot's id (the beginning is enough); without it the volume as it is now.
    #[arg(long)]
    snapshot: Option<String>,
    /// The raw image to write; must not exist. Holes stay holes.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplicaView {
    guid: String,
    /// The volume's name, as the pool received it last; empty: it received none.
    volume: String,
    volume_id: String,
    id: String,
    /// Size of the volume, also where this replica's own log does not have its growth yet.
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
        "VOLUME ID",
        "STABLE",
        "SNAPSHOTS",
    ];
    const NARROW: usize = 7;

    fn cells(&self) -> Vec<String> {
        let yes_no = |flag: bool| (if flag { "yes" } else { "no" }).to_owned();
        vec![
            self.guid.clone(),
            (if self.volume.is_empty() { &self.volume_id } else { &self.volume }).clone(),
            show_size(self.size_bytes),
            show_size(self.live_bytes),
            self.position.clone(),
            (if self.quorum { "on" } else { "off" }).to_owned(),
            yes_no(self.damaged),
            self.id.clone(),
            self.volume_id.clone(),
            self.stable.to_string(),
            self.snapshots.join(","),
        ]
    }
}

/// Result of a check, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckView {
    sound: bool,
    checked_bytes: u64,
    bad: Vec<BadView>,
    /// Bad on media, but nothing is lost with them.
    bad_headers: u32,
    damaged: Vec<DamagedView>,
}

/// Bytes of a volume that have no good copy in this pool.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BadView {
    replica: String,
    offset_bytes: u64,
    length_bytes: u64,
    /// "data", or "map": where these bytes lie in the pool is not known.
    what: &'static str,
}

/// A replica whose log or map cannot be read.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DamagedView {
    replica: String,
    what: &'static str,
}

impl From<&BadBlock> for BadView {
    fn from(bad: &BadBlock) -> Self {
        Self {
            replica: bad.replica.to_string(),
            offset_bytes: bad.lba * BLOCK_SIZE as u64,
            length_bytes: u64::from(bad.blocks) * BLOCK_SIZE as u64,
            what: if bad.blocks == 1 { "data" } else { "map" },
        }
    }
}

impl CheckView {
    fn of(report: &offline::CheckReport) -> Self {
        let damaged = |(guid, what): &(ReplicaGuid, &'static str)| DamagedView {
            replica: guid.to_string(),
            what,
        };
        Self {
            sound: report.is_sound(),
            checked_bytes: report.checked_bytes,
            bad: report.bad.iter().map(BadView::from).collect(),
            bad_headers: report.bad_headers,
            damaged: report.damaged.iter().map(damaged).collect(),
        }
    }

    /// A sentence a line.
    fn text(&self) -> String {
        let checked = show_size(self.checked_bytes);
        let mut lines = vec![match self.sound {
            true => {
                format!("the pool is sound: {checked} were read and agree with their checksums")
            }
            false => format!("the pool is damaged; {checked} were read"),
        }];
        for DamagedView { replica, what } in &self.damaged {
            lines.push(format!("replica {replica} cannot be read completely; damaged: {what}"));
        }
        for bad in &self.bad {
            let BadView { replica, offset_bytes, length_bytes, what } = bad;
            let why = match *what {
                "map" => "the map that leads to them is bad",
                _ => "their checksum does not fit",
            };
            lines.push(format!(
                "replica {replica}: {} of its volume at byte {offset_bytes} have no good copy here: \
                 {why}",
                show_size(*length_bytes)
            ));
        }
        if self.bad_headers > 0 {
            lines.push(format!(
                "{} headers or nodes are bad on the disk; no block is lost with them",
                self.bad_headers
            ));
        }
        lines.join("\n")
    }
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

fn shown(options: &OfflineOptions) -> String {
    options.data.display().to_string()
}

fn spec_of(replica: &ReplicaInspection) -> Kept {
    Kept::of(replica.identity.volume, &replica.identity.volume_spec)
}

/// The volume's size. A replica's own log receives a growth when a target next opens the volume;
/// the record that its pool received has it before.
fn size_of(replica: &ReplicaInspection) -> u64 {
    let own = replica.state.volume_blocks * BLOCK_SIZE as u64;
    own.max(spec_of(replica).size_bytes)
}

impl From<&ReplicaInspection> for ReplicaView {
    fn from(replica: &ReplicaInspection) -> Self {
        let ReplicaInspection { identity, state, meta, .. } = replica;
        Self {
            guid: identity.guid.to_string(),
            volume: spec_of(replica).name,
            volume_id: identity.volume.to_string(),
            id: identity.replica.to_string(),
            size_bytes: size_of(replica),
            position: format!("{}:{}", state.position.epoch, state.position.lsn),
            stable: state.stable.0,
            quorum: meta.quorum,
            damaged: meta.damaged,
            live_bytes: replica.stats.live_bytes,
            snapshots: replica.snapshots.iter().map(|s| s.id.to_string()).collect(),
        }
    }
}

pub fn inspect(options: &OfflineOptions, format: Format) -> Result<()> {
    let found = offline::inspect(open(&options.data)?).with_context(|| shown(options))?;
    let rows: Vec<_> = found.replicas.iter().map(ReplicaView::from).collect();
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
    let report = offline::check(open(&options.data)?, |_| {}).with_context(|| shown(options))?;
    let view = CheckView::of(&report);
    output::print_one(format, &view, || view.text())?;
    if !report.is_sound() {
        bail!(
            "the pool is damaged: start it beside its volumes' other replicas and it is repaired, \
             or export what is left with `quoin pool export`"
        );
    }
    Ok(())
}

/// Result of an export, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExportView {
    file: String,
    size_bytes: u64,
    data_bytes: u64,
    /// LBAs of blocks that have no good copy here.
    bad_blocks: Vec<u64>,
}

pub fn export(options: &ExportOptions, format: Format) -> Result<()> {
    let found = offline::inspect(open(&options.pool.data)?)?.replicas;
    let replica = match &options.replica {
        Some(named) => find_replica(&found, named)?,
        None => match &found[..] {
            [one] => one,
            [] => bail!("the pool holds no replica"),
            many => bail!(
                "the pool holds {} replicas: name one with --replica; it holds {}",
                many.len(),
                listed(many)
            ),
        },
    };
    let guid = replica.identity.guid;
    let named = options.snapshot.as_deref();
    let snapshot = named.map(|named| find_snapshot(replica, named)).transpose()?;
    let file = private_file::create_new(&options.to).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => anyhow!(
            "{} exists already: name another file with --to, or remove it",
            options.to.display()
        ),
        _ => anyhow!("cannot create {} ({error}): correct --to", options.to.display()),
    })?;
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
    // Growth of the volume that this replica's log does not have yet reads as zeroes.
    let size_bytes = match snapshot {
        Some(_) => report.size_bytes,
        None => report.size_bytes.max(size_of(replica)),
    };
    file.set_len(size_bytes).context("set the image's size")?;
    file.sync_all().context("sync the image")?;
    let bad = report.bad.len();
    let view = ExportView {
        file: options.to.display().to_string(),
        size_bytes,
        data_bytes: report.data_bytes,
        bad_blocks: report.bad,
    };
    output::print_one(format, &view, || {
        let (size, data) = (show_size(view.size_bytes), show_size(view.data_bytes));
        format!("{}: {size} with {data} of data", view.file)
    })?;
    if bad > 0 {
        bail!("{bad} blocks have no good copy in this pool and are holes in the image");
    }
    Ok(())
}

/// Fewer digits mean a replica by chance.
const PREFIX_MIN: usize = 4;

/// Replicas as a refusal names them.
fn listed(replicas: &[ReplicaInspection]) -> String {
    let one = |replica: &ReplicaInspection| {
        let (guid, name) = (replica.identity.guid, spec_of(replica).name);
        let volume = if name.is_empty() { replica.identity.volume.to_string() } else { name };
        format!("{guid} of volume {volume}")
    };
    replicas.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The replica that a user names by its volume's name, or by the beginning of its GUID, its id or
/// its volume's id.
fn find_replica<'a>(
    replicas: &'a [ReplicaInspection],
    named: &str,
) -> Result<&'a ReplicaInspection> {
    let lower = named.to_ascii_lowercase();
    let begins = |id: String| lower.len() >= PREFIX_MIN && id.starts_with(&lower);
    let is_meant = |replica: &&ReplicaInspection| {
        let identity = &replica.identity;
        spec_of(replica).name == named
            || begins(identity.guid.to_string())
            || begins(identity.replica.to_string())
            || begins(identity.volume.to_string())
    };
    let found: Vec<_> = replicas.iter().filter(is_meant).collect();
    match found[..] {
        [one] => Ok(one),
        [] if replicas.is_empty() => bail!("--replica {named}: the pool holds no replica"),
        [] => bail!(
            "--replica {named}: no replica in this pool has that GUID, id or volume name (of an id \
             {PREFIX_MIN} digits at least); it holds {}",
            listed(replicas)
        ),
        _ => bail!(
            "--replica {named} matches {} replicas: give more digits of one; it holds {}",
            found.len(),
            listed(replicas)
        ),
    }
}

fn find_snapshot(replica: &ReplicaInspection, named: &str) -> Result<SnapshotId> {
    let lower = named.to_ascii_lowercase();
    let begins = |id: &SnapshotId| lower.len() >= PREFIX_MIN && id.to_string().starts_with(&lower);
    let ids = || replica.snapshots.iter().map(|snapshot| snapshot.id);
    let found: Vec<_> = ids().filter(begins).collect();
    match found[..] {
        [one] => Ok(one),
        [] => {
            let held: Vec<_> = ids().map(|id| id.to_string()).collect();
            let held = if held.is_empty() { "none".to_owned() } else { held.join(", ") };
            bail!("--snapshot {named}: the replica has no such snapshot; it has {held}")
        }
        _ => bail!("--snapshot {named} matches several ids: give more digits"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use quoin_api::control::VolumeSpec;
    use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, StoreState};
    use quoin_store::ReplicaStats;
    use quoin_store::offline::CheckReport;
    use quoin_types::{Lsn, VolumeId};

    fn replica(guid: &str, id: &str, name: &str) -> ReplicaInspection {
        let spec = VolumeSpec { name: name.into(), ..VolumeSpec::default() };
        ReplicaInspection {
            identity: ReplicaIdentity {
                volume: VolumeId(7),
                replica: id.parse().unwrap(),
                guid: guid.parse().unwrap(),
                volume_spec: spec.encode_to_vec().into(),
            },
            meta: ReplicaMeta::default(),
            state: StoreState::default(),
            snapshots: Vec::new(),
            stats: ReplicaStats::default(),
            shadow: None,
        }
    }

    #[test]
    fn a_replica_is_named_by_volume_or_by_an_unambiguous_prefix_of_guid_or_id() {
        let (a, b) = ("aabb01", "aabb02");
        let long = |text: &str| format!("{text:0<32}");
        let all = [replica(&long(a), &long("cc01"), "db"), replica(&long(b), &long("cc02"), "log")];
        let guid = |named: &str| find_replica(&all, named).map(|r| r.identity.guid.to_string());
        for named in ["db", "aabb01", "AABB01", "cc01", &long(a)] {
            assert_eq!(guid(named).unwrap(), long(a), "{named}");
        }
        assert_eq!(guid("cc02").unwrap(), long(b));
        let message = guid("aabb").unwrap_err().to_string();
        assert!(message.contains("2 replicas") && message.contains("of volume log"), "{message}");
        // Too few digits, or digits of no replica.
        for named in ["1", "aab", "ddee", ""] {
            let message = guid(named).unwrap_err().to_string();
            assert!(
                message.contains("no replica in this pool") && message.contains(&long(b)),
                "{message}"
            );
        }
        let message = find_snapshot(&all[0], "7").unwrap_err().to_string();
        assert!(message.contains("it has none"), "{message}");
    }

    #[test]
    fn the_result_of_a_check_is_printed_as_text_and_as_fields() {
        let sound = CheckReport { checked_bytes: 5 << 20, ..CheckReport::default() };
        let text = CheckView::of(&sound).text();
        assert!(text.contains("sound") && text.contains("5.0 MiB"), "{text}");
        let report = CheckReport {
            bad: vec![BadBlock::block(ReplicaGuid(7), 3, Lsn(9))],
            bad_headers: 2,
            damaged: vec![(ReplicaGuid(8), "an entry of the log")],
            ..sound
        };
        let view = CheckView::of(&report);
        let text = view.text();
        assert!(!text.contains("BadBlock") && !text.contains("Lsn"), "{text}");
        assert!(text.contains("4.0 KiB of its volume at byte 12288"), "{text}");
        assert!(
            text.contains("damaged: an entry of the log") && text.contains("2 headers"),
            "{text}"
        );
        let json = serde_json::to_value(&view).unwrap();
        assert_eq!(
            (&json["sound"], &json["bad"][0]["offsetBytes"]),
            (&false.into(), &12288.into())
        );
        assert_eq!(json["damaged"][0]["replica"], ReplicaGuid(8).to_string());
    }
}
