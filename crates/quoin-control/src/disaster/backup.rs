//! Backup of all records at one moment in one file, and restore of a cluster from such a file.
//!
//! The file consists of lines of JSON: a header {format, cluster, time, number of records, whether
//! the authority is included}, one line for each record, the authority, and the SHA-256 of all
//! lines before. A restore checks the whole file before it changes anything.
//!
//! **The file contains the authority's private key**, unless the caller leaves it out. Without the
//! key no pool and no node would trust a controller that was made anew elsewhere. A person with the
//! file can become a member of the cluster, so it is available on the admin socket only and written
//! with mode 0600. The controller's own key is not included; the controller gets a new certificate.
//!
//! Records of a restored cluster do not rule before `quoin controller recover`: only the pools know
//! the changes since the backup ([`crate::disaster::salvage`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use quoin_cluster::records::{
    CordonRecord, EventRecord, FenceRecord, GroupRecord, MemberOfCluster, MirrorAddressRecord,
    MirrorRecord, MoveRecord, MoveState, NameRecord, NodeRecord, PeerRecord, PoolRecord, Record,
    RecoveryRecord, RevertRecord, ScheduleRecord, SnapshotName, SnapshotRecord, SupersededRecord,
    TermRecord, Text, TokenRecord, VerifyRecord, VolumeGroupRecord, VolumeRecord, decode, encode,
};
use quoin_identity::{Authority, ClusterId, Lifetimes, make_dir, write_private};
use quoin_types::TermId;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::disaster::offline::{Offline, doubt, mark_of};
use crate::files::{
    AUTHORITY_FILE, RECORDS_FILE, close_to_others, mark_one_of_several, refuse_foreign,
};
use crate::membership::members::Members;
use crate::state::State;
use crate::state::random_id;
use crate::state::store::{Embedded, Entry, Records, SharedOptions, Store, Swap};
use crate::time::now_ms;

const FORMAT: u32 = 1;
const KIND: &str = "quoin-controller-backup";
/// Largest accepted backup: far more than the records of the largest cluster.
pub const BACKUP_BYTES_MAX: u64 = 1 << 30;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Header {
    kind: String,
    format: u32,
    cluster_id: String,
    taken_ms: u64,
    quoin: String,
    records: usize,
    authority: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Line {
    Record { key: String, value: String },
    Authority(String),
    Sha256(String),
}

/// Backup whose whole content was checked.
#[derive(Debug)]
pub struct Backup {
    header: Header,
    records: Vec<(String, Vec<u8>)>,
    authority: Option<String>,
}

fn refuse(why: impl Into<String>) -> Error {
    Error::invalid("backup", why)
}

fn sum(bytes: &[u8]) -> String {
    hex::encode(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes))
}

fn line(out: &mut Vec<u8>, line: &impl Serialize) {
    serde_json::to_writer(&mut *out, line).expect("plain data into memory");
    out.push(b'\n');
}

/// # Errors
/// A record cannot be read, or this version does not know its kind.
fn check_record(key: &str, value: &[u8]) -> Result<(), Error> {
    fn read<R: Record>(value: &[u8]) -> Result<(), String> {
        decode::<R>(value).map(drop)
    }
    type Reader = fn(&[u8]) -> Result<(), String>;
    let kinds: [(&str, Reader); 23] = [
        (VolumeRecord::PREFIX, read::<VolumeRecord>),
        (NameRecord::PREFIX, read::<NameRecord>),
        (PoolRecord::PREFIX, read::<PoolRecord>),
        (NodeRecord::PREFIX, read::<NodeRecord>),
        (CordonRecord::PREFIX, read::<CordonRecord>),
        (VerifyRecord::PREFIX, read::<VerifyRecord>),
        (SnapshotRecord::PREFIX, read::<SnapshotRecord>),
        (SnapshotName::PREFIX, read::<SnapshotName>),
        (ScheduleRecord::PREFIX, read::<ScheduleRecord>),
        (GroupRecord::PREFIX, read::<GroupRecord>),
        (RevertRecord::PREFIX, read::<RevertRecord>),
        (TokenRecord::PREFIX, read::<TokenRecord>),
        (MemberOfCluster::PREFIX, read::<MemberOfCluster>),
        (EventRecord::PREFIX, read::<EventRecord>),
        (RecoveryRecord::PREFIX, read::<RecoveryRecord>),
        (TermRecord::PREFIX, read::<TermRecord>),
        (SupersededRecord::PREFIX, read::<SupersededRecord>),
        (PeerRecord::PREFIX, read::<PeerRecord>),
        (MirrorAddressRecord::PREFIX, read::<MirrorAddressRecord>),
        (MirrorRecord::PREFIX, read::<MirrorRecord>),
        (VolumeGroupRecord::PREFIX, read::<VolumeGroupRecord>),
        (FenceRecord::PREFIX, read::<FenceRecord>),
        (MoveRecord::PREFIX, read::<MoveRecord>),
    ];
    let kind = kinds.iter().find(|(prefix, _)| key.starts_with(prefix));
    let (_, read) = kind.ok_or_else(|| refuse(format!("record {key} is of no known kind")))?;
    read(value).map_err(|why| refuse(format!("record {key}: {why}")))
}

/// Makes the content of backup files.
pub struct Backups {
    state: Arc<State>,
    members: Arc<Members>,
}

impl Backups {
    pub(crate) fn new(state: Arc<State>, members: Arc<Members>) -> Self {
        Self { state, members }
    }

    /// Content of a backup file.
    pub async fn make(&self, with_authority: bool) -> Result<Vec<u8>, Error> {
        self.state.events.flush().await?;
        // A single listing shows the records of one moment.
        let records = self.state.storage.store.list("").await?;
        let authority = match with_authority {
            true => Some(self.members.authority().export()?),
            false => None,
        };
        let cluster = self.state.identity.cluster();
        content(cluster, records, authority)
    }
}

/// Content of a backup file of these records.
fn content(
    cluster: ClusterId,
    records: Vec<Entry>,
    authority: Option<String>,
) -> Result<Vec<u8>, Error> {
    let mut out = Vec::new();
    let header = Header {
        kind: KIND.to_owned(),
        format: FORMAT,
        cluster_id: cluster.to_string(),
        taken_ms: now_ms(),
        quoin: env!("CARGO_PKG_VERSION").to_owned(),
        records: records.len(),
        authority: authority.is_some(),
    };
    line(&mut out, &header);
    for entry in records {
        let value = String::from_utf8(entry.value);
        let value = value.map_err(|_| refuse(format!("record {} is no text", entry.key)))?;
        line(&mut out, &Line::Record { key: entry.key, value });
    }
    if let Some(authority) = authority {
        line(&mut out, &Line::Authority(authority));
    }
    let sum = sum(&out);
    line(&mut out, &Line::Sha256(sum));
    Ok(out)
}

impl Backup {
    /// Reads a backup and checks its whole content.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let text = std::str::from_utf8(bytes).map_err(|_| refuse("this is no backup"))?;
        let first = text.lines().next().unwrap_or_default();
        let header: Header =
            serde_json::from_str(first).map_err(|_| refuse("this is no backup"))?;
        if header.kind != KIND {
            return Err(refuse("this is no backup of a controller"));
        }
        if header.format > FORMAT {
            let found = header.format;
            let rule = format!("format {found} is of a newer Quoin; restore it with that one");
            return Err(refuse(rule));
        }
        let torn = || refuse("the file is cut off or was changed: take another backup");
        let before = text.trim_end_matches('\n').rfind('\n').ok_or_else(torn)? + 1;
        match serde_json::from_str(&text[before..]) {
            Ok(Line::Sha256(told)) if told == sum(&bytes[..before]) => {}
            _ => return Err(torn()),
        }
        let mut backup = Self { header, records: Vec::new(), authority: None };
        for read in text[..before].lines().skip(1).map(serde_json::from_str) {
            match read.map_err(|_| torn())? {
                Line::Record { key, value } => {
                    check_record(&key, value.as_bytes())?;
                    backup.records.push((key, value.into_bytes()));
                }
                Line::Authority(authority) => backup.authority = Some(authority),
                Line::Sha256(_) => return Err(torn()),
            }
        }
        let Header { records, authority, .. } = backup.header;
        if backup.records.len() != records || backup.authority.is_some() != authority {
            return Err(torn());
        }
        Ok(backup)
    }

    pub fn cluster_id(&self) -> &str {
        &self.header.cluster_id
    }

    /// Time of the backup, in milliseconds since 1970.
    pub fn taken_ms(&self) -> u64 {
        self.header.taken_ms
    }

    pub fn volumes(&self) -> usize {
        self.records.iter().filter(|(key, _)| key.starts_with(VolumeRecord::PREFIX)).count()
    }

    pub fn has_authority(&self) -> bool {
        self.header.authority
    }

    /// Restores the cluster in `dir`; its records do not rule yet. With `replace`, existing records
    /// are renamed, and their new path is returned.
    ///
    /// # Errors
    /// `dir` holds other files, another cluster, or records (without `replace`), or is in use.
    /// Nothing is changed then.
    pub async fn restore(&self, dir: &Path, replace: bool) -> Result<Option<PathBuf>, Error> {
        refuse_foreign(dir)?;
        let records = dir.join(RECORDS_FILE);
        let failed = |source| Error::File { path: dir.to_owned(), source };
        let there = records.exists();
        if there && !replace {
            return Err(Error::AlreadyInitialised(dir.to_owned()));
        }
        if there && !records.metadata().is_ok_and(|meta| meta.len() == 0) {
            match Embedded::open(&records) {
                // Dropping the store releases its lock. A damaged store is to be replaced.
                Ok(_) | Err(crate::state::store::StoreError::Damaged { .. }) => {}
                Err(used) => return Err(used.into()),
            }
        }
        let own = match Authority::load(dir, Lifetimes::default()) {
            Err(quoin_identity::Error::NotJoined { .. }) => None,
            loaded => Some(loaded?),
        };
        match (&own, &self.authority) {
            (Some(own), _) if own.cluster().to_string() != self.header.cluster_id => {
                return Err(refuse(format!(
                    "it is of cluster {}, and {} holds the authority of cluster {}",
                    self.header.cluster_id,
                    dir.display(),
                    own.cluster()
                )));
            }
            // The authority in `dir` stays: it may have been rotated since, and is never older.
            (Some(_), _) | (None, Some(_)) => {}
            (None, None) => return Err(left_out(dir)),
        }
        // Private mode, because the directory will hold the cluster's private key.
        make_dir(dir)?;
        let making = doubted_records(dir, &self.records, "they come from a backup").await?;
        if let (None, Some(authority)) = (&own, &self.authority) {
            write_private(&dir.join(AUTHORITY_FILE), authority.as_bytes())?;
            Authority::load(dir, Lifetimes::default())?;
        }
        let aside = there.then(|| dir.join(format!("{RECORDS_FILE}.replaced-{}", now_ms())));
        if let Some(aside) = &aside {
            std::fs::rename(&records, aside).map_err(failed)?;
        }
        // Last step, because a directory with records counts as a cluster.
        std::fs::rename(&making, &records).map_err(failed)?;
        std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        Ok(aside)
    }
}

/// Records and authority that go where controllers share them.
struct Arriving<'a> {
    dir: &'a Path,
    place: String,
    backup: &'a Backup,
    replace: bool,
}

impl Backup {
    /// Restores the cluster in an engine, with `dir` as the directory of a controller of it; its records do not rule
    /// yet. With `replace`, existing records are written into a backup file first, whose path is returned.
    ///
    /// # Errors
    /// A controller rules there, or it holds another cluster, or records (without `replace`). Nothing is changed then.
    pub async fn restore_shared(
        &self,
        dir: &Path,
        options: &SharedOptions,
        replace: bool,
    ) -> Result<Option<PathBuf>, Error> {
        refuse_foreign(dir)?;
        let held = Offline::take(&Records::Shared(options.clone()), dir).await?;
        let arriving = Arriving { dir, place: options.place(), backup: self, replace };
        let restored = arriving.put_into(&held).await;
        held.release().await;
        let aside = restored?;
        close_to_others(dir)?;
        mark_one_of_several(dir, options)?;
        Ok(aside)
    }
}

impl Arriving<'_> {
    async fn put_into(&self, held: &Offline) -> Result<Option<PathBuf>, Error> {
        let shared = held.shared().expect("an engine that controllers share");
        let (kept, there) = (shared.authority().await?, held.store.list("").await?);
        let authority = self.authority(kept.as_deref())?;
        let mark = mark_of(&*held.store).await?;
        let is_cut_short = mark.is_some_and(|mark| mark.state == MoveState::Filling);
        let is_over_others = !there.is_empty() && !is_cut_short;
        if is_over_others && !self.replace {
            return Err(Error::Precondition(format!(
                "{} holds the records of a cluster: put them aside with --replace",
                self.place
            )));
        }
        make_dir(self.dir)?;
        let aside = self.dir.join(format!("records.replaced-{}", now_ms()));
        if is_over_others {
            let cluster = authority.cluster();
            let former = kept.as_ref().map(|_| authority.export()).transpose()?;
            write_private(&aside, &content(cluster, there, former)?)?;
        }
        let filling = MoveRecord {
            state: MoveState::Filling,
            id: Text(TermId(random_id())),
            number: 0,
            place: "a backup".to_owned(),
            since_ms: now_ms(),
        };
        let doubt = doubt("they come from a backup");
        let marks = [filling.key(), doubt.0.clone()];
        held.store.put_all(vec![(filling.key(), Some(encode(&filling))), doubt]).await?;
        if kept.is_none() && !shared.create_authority(authority.export()?.as_bytes()).await? {
            return Err(refuse("another cluster was made there meanwhile"));
        }
        let records = kept_records(&self.backup.records);
        let records = records.map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
        held.replace_all(records, &marks).await?;
        Authority::import(self.dir, authority.export()?.as_bytes(), Lifetimes::default())?;
        held.store.put_all(vec![(filling.key(), None)]).await?;
        Ok(is_over_others.then_some(aside))
    }

    /// The authority of the engine, which may have been rotated since; else that of the directory, or of the backup.
    fn authority(&self, kept: Option<&[u8]>) -> Result<Authority, Error> {
        let lifetimes = Lifetimes::default();
        let own = match Authority::load(self.dir, lifetimes) {
            Err(quoin_identity::Error::NotJoined { .. }) => None,
            loaded => Some(loaded?),
        };
        let authority = match (kept, own, &self.backup.authority) {
            (Some(kept), _, _) => Authority::parse(kept, lifetimes)?,
            (None, Some(own), _) => own,
            (None, None, Some(told)) => Authority::parse(told.as_bytes(), lifetimes)?,
            (None, None, None) => return Err(left_out(self.dir)),
        };
        match authority.cluster().to_string() == self.backup.header.cluster_id {
            true => Ok(authority),
            false => Err(refuse(format!(
                "it is of cluster {}, and {} or {} has the authority of cluster {}",
                self.backup.header.cluster_id,
                self.place,
                self.dir.display(),
                authority.cluster()
            ))),
        }
    }
}

fn left_out(dir: &Path) -> Error {
    refuse(format!(
        "the cluster's authority was left out of it: put {AUTHORITY_FILE} of the former controller into {} \
         first",
        dir.display()
    ))
}

/// Records of a backup that are restored.
fn kept_records(records: &[(String, Vec<u8>)]) -> impl Iterator<Item = &(String, Vec<u8>)> {
    // The record of a superseded term is about the former controller: this one begins its own term. So is what
    // is said of the place of the records. Tokens are left out, because some may have been used or revoked since
    // the backup.
    let left_out =
        [SupersededRecord::PREFIX, TokenRecord::PREFIX, MoveRecord::PREFIX, RecoveryRecord::PREFIX];
    records.iter().filter(move |(key, _)| !left_out.iter().any(|prefix| key.starts_with(prefix)))
}

/// Path of the records while a restore makes them. A restore that was cut short leaves this file:
/// the cluster is not a new one.
pub(crate) fn records_in_making(dir: &Path) -> PathBuf {
    dir.join(format!(".{RECORDS_FILE}.making"))
}

/// Makes records that do not rule, in a temporary file in `dir`. So the records file never exists
/// without the mark that its records do not rule.
pub(crate) async fn doubted_records(
    dir: &Path,
    records: &[(String, Vec<u8>)],
    why: &str,
) -> Result<PathBuf, Error> {
    let making = records_in_making(dir);
    let _ = std::fs::remove_file(&making);
    let made = write_records(&making, records, why).await;
    if made.is_err() {
        let _ = std::fs::remove_file(&making);
    }
    made.map(|()| making)
}

async fn write_records(path: &Path, records: &[(String, Vec<u8>)], why: &str) -> Result<(), Error> {
    let store = Embedded::open(path)?;
    let (key, value) = doubt(why);
    let mark = (key, value.expect("a record that is written"));
    for (key, value) in kept_records(records).chain([&mark]) {
        match store.compare_and_swap(key, 0, Some(value.clone())).await? {
            Swap::Done(_) => {}
            Swap::Conflict(_) => return Err(refuse(format!("record {key} is there twice"))),
        }
    }
    Ok(())
}
