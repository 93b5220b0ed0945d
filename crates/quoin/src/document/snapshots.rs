//! Snapshots and schedules as documents.
//!
//! ```yaml
//! apiVersion: quoin/v1
//! kind: Schedule
//! metadata: {name: db-daily}
//! spec: {volume: db, every: 1d, keep: 30, keepFor: 90d}
//! ```

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use quoin_api::control::{
    CreateScheduleRequest, CreateSnapshotRequest, DeleteScheduleRequest, GetScheduleRequest,
    GetSnapshotRequest, GetVolumeRequest, Schedule, Snapshot, SnapshotRef,
};
use serde::{Deserialize, Serialize};

use super::Metadata;
use crate::client::{Cluster, refusal, volume_ref};
use crate::schedule::{Time, parse_interval};

/// Snapshots that a schedule keeps at most.
const KEEP_MAX: u32 = 400;

/// A snapshot that is to exist.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotDocument {
    pub api_version: String,
    pub kind: String,
    pub metadata: Metadata,
    pub spec: SnapshotSpec,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotSpec {
    /// The volume's name or id.
    pub volume: String,
}

/// A schedule that is to exist, with these settings.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScheduleDocument {
    pub api_version: String,
    pub kind: String,
    pub metadata: Metadata,
    pub spec: ScheduleSpec,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScheduleSpec {
    /// The volume's name or id.
    pub volume: String,
    /// Time between two snapshots, as in 1h.
    pub every: String,
    /// Number of its snapshots that are kept; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    /// Time for which a snapshot is kept; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_for: Option<String>,
}

/// Settings of a schedule in seconds and numbers; 0: no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Settings {
    every_s: u64,
    keep: u32,
    keep_for_s: u64,
}

impl ScheduleSpec {
    /// # Errors
    /// A time that is none, or a limit that no schedule has.
    fn settings(&self) -> Result<Settings> {
        let time = |field: &str, text: &str| -> Result<Duration> {
            parse_interval(text).map_err(|rule| anyhow!("spec.{field}: {text:?}: {rule}"))
        };
        let keep_for = self.keep_for.as_deref().map(|text| time("keepFor", text)).transpose()?;
        if self.keep.is_none() && keep_for.is_none() {
            bail!("spec.keep is missing: write how many snapshots are kept, or spec.keepFor");
        }
        if self.keep.is_some_and(|keep| keep == 0 || keep > KEEP_MAX) {
            bail!("spec.keep: a schedule keeps 1 to {KEEP_MAX} snapshots");
        }
        Ok(Settings {
            every_s: time("every", &self.every)?.as_secs(),
            keep: self.keep.unwrap_or(0),
            keep_for_s: keep_for.map_or(0, |time| time.as_secs()),
        })
    }
}

impl Settings {
    /// Differences from a schedule that is there, in words.
    fn differences(&self, from: &Schedule) -> Vec<String> {
        let limit = |seconds: u64| match seconds {
            0 => "no limit".to_owned(),
            seconds => Time(seconds).to_string(),
        };
        let count = |keep: u32| if keep == 0 { "no limit".to_owned() } else { keep.to_string() };
        [
            ("every", Time(from.every_s).to_string(), Time(self.every_s).to_string()),
            ("keep", count(from.keep), count(self.keep)),
            ("keepFor", limit(from.keep_for_s), limit(self.keep_for_s)),
        ]
        .into_iter()
        .filter(|(_, before, after)| before != after)
        .map(|(field, before, after)| format!("{field}: {before} -> {after}"))
        .collect()
    }
}

/// Id of a volume; `None`: it does not exist yet, which another document may change.
async fn id_of(cluster: &mut Cluster, volume: &str) -> Result<Option<String>> {
    let request = GetVolumeRequest { volume: Some(volume_ref(volume)) };
    match cluster.get_volume(request).await {
        Ok(volume) => Ok(Some(volume.into_inner().id)),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(refusal(status)),
    }
}

fn check_volume(found: &str, wanted: Option<&str>, spec: &str, name: &str) -> Result<()> {
    if wanted == Some(found) {
        return Ok(());
    }
    bail!(
        "spec.volume: {name} exists already, and is not of volume {spec}; choose another name, or \
         delete it first"
    )
}

impl SnapshotDocument {
    /// # Errors
    /// A field without a value.
    pub fn check(&self) -> Result<()> {
        check_common(&self.metadata, &self.spec.volume)
    }

    /// Makes the snapshot, or with `dry_run` only says whether it would be made. One that is there
    /// stays: it is the content of the moment at which it was made.
    ///
    /// # Errors
    /// The snapshot of this name is of another volume, or the controller's refusal.
    pub async fn apply(&self, cluster: &mut Cluster, dry_run: bool) -> Result<Vec<String>> {
        let name = self.metadata.name.clone();
        let volume = id_of(cluster, &self.spec.volume).await?;
        if let Some(found) = find_snapshot(cluster, &name).await? {
            check_volume(&found.volume_id, volume.as_deref(), &self.spec.volume, &name)?;
            return Ok(Vec::new());
        }
        if !dry_run {
            let volume = Some(volume_ref(&self.spec.volume));
            let request = CreateSnapshotRequest { volume, name, ..Default::default() };
            cluster.create_snapshot(request).await.map_err(refusal)?;
        }
        Ok(vec![format!("made of volume {}", self.spec.volume)])
    }
}

impl ScheduleDocument {
    /// # Errors
    /// A field without a value, or with one that no schedule has.
    pub fn check(&self) -> Result<()> {
        check_common(&self.metadata, &self.spec.volume)?;
        self.spec.settings().map(drop)
    }

    /// Makes the schedule as declared, or with `dry_run` only says what would change. One with other
    /// settings is made anew; its snapshots stay its own, and it runs from now on.
    ///
    /// # Errors
    /// The schedule of this name is of another volume, or the controller's refusal.
    pub async fn apply(&self, cluster: &mut Cluster, dry_run: bool) -> Result<Vec<String>> {
        let name = self.metadata.name.clone();
        let settings = self.spec.settings()?;
        let volume = id_of(cluster, &self.spec.volume).await?;
        let found = find_schedule(cluster, &name).await?;
        let changes = match &found {
            Some(found) => {
                check_volume(&found.volume_id, volume.as_deref(), &self.spec.volume, &name)?;
                settings.differences(found)
            }
            None => vec![format!("made for volume {}", self.spec.volume)],
        };
        if dry_run || changes.is_empty() {
            return Ok(changes);
        }
        if found.is_some() {
            let request = DeleteScheduleRequest { name: name.clone() };
            cluster.delete_schedule(request).await.map_err(refusal)?;
        }
        let Settings { every_s, keep, keep_for_s } = settings;
        let volume = Some(volume_ref(&self.spec.volume));
        let request = CreateScheduleRequest { volume, name, every_s, keep, keep_for_s };
        let created = cluster.create_schedule(request).await.map_err(refusal);
        created.with_context(|| match found {
            Some(_) => "the former schedule of this name is deleted; apply the document again",
            None => "it is not made",
        })?;
        Ok(changes)
    }
}

fn check_common(metadata: &Metadata, volume: &str) -> Result<()> {
    if metadata.name.is_empty() {
        bail!("metadata.name is empty: write a name");
    }
    if metadata.resource_version.is_some() {
        bail!("metadata.resourceVersion: only volumes have one; leave it out");
    }
    if volume.is_empty() {
        bail!("spec.volume is empty: write the volume's name");
    }
    Ok(())
}

async fn find_snapshot(cluster: &mut Cluster, name: &str) -> Result<Option<Snapshot>> {
    let snapshot = Some(SnapshotRef { id: String::new(), name: name.to_owned() });
    match cluster.get_snapshot(GetSnapshotRequest { snapshot }).await {
        Ok(found) => Ok(Some(found.into_inner())),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(refusal(status)),
    }
}

async fn find_schedule(cluster: &mut Cluster, name: &str) -> Result<Option<Schedule>> {
    match cluster.get_schedule(GetScheduleRequest { name: name.to_owned() }).await {
        Ok(found) => Ok(Some(found.into_inner())),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(refusal(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(every: &str, keep: Option<u32>, keep_for: Option<&str>) -> ScheduleSpec {
        ScheduleSpec {
            volume: "db".into(),
            every: every.into(),
            keep,
            keep_for: keep_for.map(str::to_owned),
        }
    }

    #[test]
    fn a_schedule_says_which_field_is_wrong_and_what_it_may_be() {
        let refused = |spec: ScheduleSpec| spec.settings().unwrap_err().to_string();
        assert!(refused(spec("1 h", Some(2), None)).contains("spec.every"));
        assert!(refused(spec("1h", None, None)).contains("spec.keepFor"));
        assert!(refused(spec("1h", None, Some("soon"))).contains("spec.keepFor"));
        for keep in [0, KEEP_MAX + 1] {
            assert!(refused(spec("1h", Some(keep), None)).contains("spec.keep"));
        }
    }

    #[test]
    fn only_the_settings_that_differ_are_changes() {
        let settings = spec("1h", Some(24), Some("7d")).settings().unwrap();
        let there =
            Schedule { every_s: 3600, keep: 24, keep_for_s: 604_800, ..Schedule::default() };
        assert!(settings.differences(&there).is_empty());
        let other = Schedule { every_s: 7200, keep_for_s: 0, ..there };
        let changes = settings.differences(&other);
        assert_eq!(changes, ["every: 2h -> 1h", "keepFor: no limit -> 7d"]);
    }

    #[test]
    fn a_name_that_belongs_to_another_volume_s_is_refused() {
        assert!(check_volume("f01", Some("f01"), "db", "s").is_ok());
        for wanted in [None, Some("f02")] {
            let refused = check_volume("f01", wanted, "db", "s").unwrap_err().to_string();
            assert!(refused.contains("spec.volume"), "{refused}");
        }
    }
}
