//! A volume as a document: what `quoin apply` takes, and what `quoin volume get --manifest` prints.
//! Snapshots and schedules are declared beside it ([`snapshots`]).
//!
//! Terms are as elsewhere: `spec` is the wanted state; `status` is the present state, and is never
//! read. Fields that a document leaves out stay as they are. An unknown field is refused by its
//! name, since a promise that is silently dropped is broken.

pub mod snapshots;

use anyhow::{Context, Result, bail};
use quoin_api::control::{
    ApplyVolumeRequest, DeclaredReplica, MadeFrom, SnapshotRef, Volume, VolumeSource, VolumeSpec,
};
use quoin_api::volume::{OPTIONS, Values, VolumeOption};
use quoin_types::Epoch;
use serde::{Deserialize, Serialize};
use serde_yaml_ng::{Mapping, Value};

use crate::client::volume_ref;
use crate::size::parse_size;

use snapshots::{ScheduleDocument, SnapshotDocument};

pub const API_VERSION: &str = "quoin/v1";
const KIND: &str = "Volume";
const SNAPSHOT_KIND: &str = "Snapshot";
const SCHEDULE_KIND: &str = "Schedule";
/// Size limit of a document, above any that a user writes.
const BYTES_MAX: usize = 1 << 20;

/// A document of any kind.
#[derive(Clone, Debug)]
pub enum Declared {
    Volume(Box<Document>),
    Snapshot(SnapshotDocument),
    Schedule(ScheduleDocument),
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Document {
    pub api_version: String,
    pub kind: String,
    pub metadata: Metadata,
    pub spec: Spec,
    /// Present state; ignored where a document is applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_yaml_ng::Value>,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    pub name: String,
    /// Version of the volume when it was read: it must not have changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<u64>,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub desired_replication_factor: Option<u32>,
    /// 0: a majority, whatever their number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consistency_factor: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<Replica>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub allow_loss_on_single_failure: bool,
    /// Content that a new volume begins with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// The other fields: options of the volume by their keys.
    #[serde(flatten)]
    pub options: Mapping,
}

/// A snapshot or a volume, by its name or id.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Source {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub snapshot: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub volume: String,
}

impl Source {
    /// # Errors
    /// Neither of them is named, or both.
    fn request(&self) -> Result<VolumeSource> {
        let snapshot = SnapshotRef { id: self.snapshot.clone(), name: self.snapshot.clone() };
        match (self.snapshot.as_str(), self.volume.as_str()) {
            (_, "") if !self.snapshot.is_empty() => {
                Ok(VolumeSource { snapshot: Some(snapshot), ..VolumeSource::default() })
            }
            ("", volume) if !volume.is_empty() => {
                let volume = Some(volume_ref(volume));
                Ok(VolumeSource { volume, ..VolumeSource::default() })
            }
            _ => bail!("spec.source: write a snapshot or a volume, as in source: {{snapshot: s}}"),
        }
    }

    fn of(made: &MadeFrom) -> Self {
        match made.of_volume {
            true => Self { volume: made.volume_id.clone(), ..Self::default() },
            false => Self { snapshot: made.snapshot_id.clone(), ..Self::default() },
        }
    }
}

/// A number of bytes, or words such as 10GiB.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(untagged)]
pub enum Size {
    Bytes(u64),
    Words(String),
}

/// Where a replica is to be.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Replica {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub replica_id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pool: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    phase: String,
    health: String,
    r#use: String,
    replication_factor: u32,
    consistency_factor: u32,
    replica_list: Vec<Known>,
    replicas: Vec<ReplicaStatus>,
    membership_version: u64,
    epoch: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    changing: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    waiting_for: String,
    contract: String,
}

/// A replica that counts.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Known {
    replica_id: String,
    replica_guid: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplicaStatus {
    replica_id: String,
    replica_guid: String,
    pool: String,
    node: String,
    phase: String,
    quorum: &'static str,
    position: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rebuild: Option<Rebuild>,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Rebuild {
    done_bytes: u64,
    total_bytes: u64,
}

/// Every document of a text; `from` names it in refusals.
///
/// # Errors
/// A text that is no document, with the field that is wrong.
pub fn read(text: &str, from: &str) -> Result<Vec<Declared>> {
    if text.len() > BYTES_MAX {
        bail!("{from} has {} bytes; documents have at most {BYTES_MAX}", text.len());
    }
    let mut documents = Vec::new();
    for (n, part) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
        let value = serde_yaml_ng::Value::deserialize(part)
            .with_context(|| format!("{from} is not YAML"))?;
        // The text between two separators may be empty.
        if value.is_null() {
            continue;
        }
        let which = || format!("{from}, document {}", n + 1);
        let kind = check_kind(&value).with_context(which)?;
        documents.push(Declared::of_kind(kind, value).with_context(which)?);
    }
    if documents.is_empty() {
        bail!("{from} holds no document; `quoin volume get NAME --manifest` prints one");
    }
    Ok(documents)
}

impl Declared {
    fn of_kind(kind: &str, value: serde_yaml_ng::Value) -> Result<Self> {
        match kind {
            SNAPSHOT_KIND => {
                let document: SnapshotDocument = serde_yaml_ng::from_value(value)?;
                document.check()?;
                Ok(Self::Snapshot(document))
            }
            SCHEDULE_KIND => {
                let document: ScheduleDocument = serde_yaml_ng::from_value(value)?;
                document.check()?;
                Ok(Self::Schedule(document))
            }
            _ => {
                let document: Document = serde_yaml_ng::from_value(value)?;
                document.spec.write_options(&mut VolumeSpec::default())?;
                Ok(Self::Volume(Box::new(document)))
            }
        }
    }
}

/// Checks of which kind a document is, before its fields: another kind has other fields.
fn check_kind(value: &serde_yaml_ng::Value) -> Result<&'static str> {
    let Some(fields) = value.as_mapping() else {
        bail!(
            "not a document but a single value: a document has the fields apiVersion, kind, \
             metadata and spec; `quoin volume get NAME --manifest` prints one"
        );
    };
    let one_of = |field: &str, known: &[&'static str], shown: &str| -> Result<&'static str> {
        let Some(found) = fields.get(field) else {
            bail!("{field} is missing: write {field}: {shown}")
        };
        let Some(known) = known.iter().find(|known| found.as_str() == Some(**known)) else {
            let found = serde_json::to_string(found)?;
            bail!("{field}: {found} is unknown to this Quoin; write {field}: {shown}")
        };
        Ok(*known)
    };
    one_of("apiVersion", &[API_VERSION], API_VERSION)?;
    let kinds = [KIND, SNAPSHOT_KIND, SCHEDULE_KIND];
    let kind = one_of("kind", &kinds, &format!("{KIND}, {SNAPSHOT_KIND} or {SCHEDULE_KIND}"))?;
    let name = fields.get("metadata").and_then(|metadata| metadata.get("name"));
    if name.is_none_or(serde_yaml_ng::Value::is_null) {
        bail!("metadata.name is missing: write the name, as in metadata: {{name: db}}");
    }
    let is_bare = fields.get("spec").is_none_or(serde_yaml_ng::Value::is_null);
    if is_bare && kind != KIND {
        bail!("spec is missing: write of which volume it is, as in spec: {{volume: db}}");
    }
    if is_bare {
        bail!(
            "spec is missing: write what the volume is to be, as in spec: {{size: 10GiB}}; what \
             spec leaves out stays as it is"
        );
    }
    Ok(kind)
}

impl Document {
    /// Request to the controller to make the volume as declared.
    ///
    /// # Errors
    /// A size that is none.
    pub fn request(&self, dry_run: bool) -> Result<ApplyVolumeRequest> {
        let spec = &self.spec;
        let size_bytes = match &spec.size {
            None => 0,
            Some(Size::Bytes(bytes)) => *bytes,
            Some(Size::Words(words)) => {
                parse_size(words).map_err(|rule| anyhow::anyhow!("spec.size: {words:?}: {rule}"))?
            }
        };
        if matches!(spec.desired_replication_factor, Some(0)) {
            bail!(
                "spec.desiredReplicationFactor: at least 1 replica is needed; leave it out to \
                   keep the number"
            );
        }
        let mut declared = VolumeSpec {
            name: self.metadata.name.clone(),
            size_bytes,
            replicas: spec.desired_replication_factor.unwrap_or(0),
            allow_loss_on_single_failure: spec.allow_loss_on_single_failure,
            ..VolumeSpec::default()
        };
        spec.write_options(&mut declared)?;
        let place = |replica: &Replica| DeclaredReplica {
            replica_id: replica.replica_id.to_ascii_lowercase(),
            pool: replica.pool.clone(),
        };
        Ok(ApplyVolumeRequest {
            spec: Some(declared),
            replicas: spec.replicas.iter().map(place).collect(),
            dry_run,
            resource_version: self.metadata.resource_version.unwrap_or(0),
            consistency_factor: spec.consistency_factor,
            source: spec.source.as_ref().map(Source::request).transpose()?,
        })
    }

    /// The document of a volume as it is; applied, it changes nothing.
    pub fn of(volume: Volume) -> Result<Self> {
        let spec = volume.spec.clone().unwrap_or_default();
        let membership = volume.membership.clone().unwrap_or_default();
        let mut replicas: Vec<Replica> = Vec::new();
        for replica in &volume.replicas {
            // A moving replica is listed where its newcomer is; a leaving one is not listed.
            let follows = volume
                .replicas
                .iter()
                .any(|other| other.replica_id == replica.replica_id && !other.known);
            if replica.known && (replica.leaving || follows) {
                continue;
            }
            replicas.push(Replica {
                replica_id: replica.replica_id.clone(),
                pool: replica.pool.clone(),
            });
        }
        let document = Self {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            metadata: Metadata {
                name: spec.name.clone(),
                resource_version: Some(volume.resource_version),
            },
            spec: Spec {
                size: Some(size_words(volume.size_bytes)),
                desired_replication_factor: Some(membership.drf),
                consistency_factor: Some(volume.desired_consistency_factor),
                replicas,
                allow_loss_on_single_failure: spec.allow_loss_on_single_failure,
                source: volume.made_from.as_ref().map(Source::of),
                options: options(&spec),
            },
            status: Some(serde_yaml_ng::to_value(status(volume))?),
        };
        Ok(document)
    }
}

impl Spec {
    /// # Errors
    /// A field that is no option, or a value that is none of its.
    fn write_options(&self, message: &mut VolumeSpec) -> Result<()> {
        for (key, value) in &self.options {
            let key = key.as_str().context("spec: a field whose name is not text")?;
            let Some(option) = VolumeOption::find(key).filter(|option| option.key == key) else {
                let known: Vec<_> = OPTIONS.iter().map(|option| option.key).collect();
                bail!("spec.{key} is not known; options are {}", known.join(", "));
            };
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(number) => number.to_string(),
                // An empty field leaves the option as it is.
                Value::Null => continue,
                _ => bail!("spec.{key}: not a single value, write one of: {}", option.values),
            };
            // A limit of 0 is none.
            if text == "0" && matches!(option.values, Values::Rate { .. }) {
                continue;
            }
            let taken = option.set(message, &text);
            taken.map_err(|rule| anyhow::anyhow!("spec.{key}: {rule}"))?;
        }
        Ok(())
    }
}

/// The options that a volume has, as a document writes them.
fn options(spec: &VolumeSpec) -> Mapping {
    let value = |option: &VolumeOption, given: String| {
        let number = given.parse::<u64>().ok().filter(|_| option.key != "replaceAfter");
        number.map_or(Value::String(given), Value::from)
    };
    let given = OPTIONS.iter().filter_map(|o| Some((o.key.into(), value(o, o.given(spec)?))));
    given.collect()
}

fn status(volume: Volume) -> Status {
    let membership = volume.membership.unwrap_or_default();
    let known = membership.known.into_iter();
    let replica = |replica: quoin_api::control::Replica| ReplicaStatus {
        position: format!("{}.{}", Epoch(replica.position_epoch), replica.position_lsn),
        rebuild: (replica.rebuild_total_bytes > 0 && replica.phase == "Rebuilding").then_some(
            Rebuild { done_bytes: replica.rebuilt_bytes, total_bytes: replica.rebuild_total_bytes },
        ),
        quorum: if replica.quorum { "on" } else { "off" },
        replica_id: replica.replica_id,
        replica_guid: replica.guid,
        pool: replica.pool,
        node: replica.node,
        phase: replica.phase,
        message: replica.message,
    };
    Status {
        phase: volume.phase,
        health: volume.health,
        r#use: volume.r#use,
        replication_factor: membership.rf,
        consistency_factor: membership.cf,
        replica_list: known
            .map(|m| Known { replica_id: m.replica_id, replica_guid: m.guid })
            .collect(),
        replicas: volume.replicas.into_iter().map(replica).collect(),
        membership_version: membership.version,
        epoch: volume.epoch,
        changing: volume.changing,
        waiting_for: volume.waiting_for,
        contract: volume.contract,
    }
}

/// Size as a user writes it, where that is exact.
fn size_words(bytes: u64) -> Size {
    for (unit, name) in [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
    {
        if bytes != 0 && bytes.is_multiple_of(unit) {
            return Size::Words(format!("{}{name}", bytes / unit));
        }
    }
    Size::Bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "apiVersion: quoin/v1\nkind: Volume\nmetadata: {name: db}\n";

    fn volume(declared: Declared) -> Document {
        match declared {
            Declared::Volume(document) => *document,
            other => panic!("{other:?}"),
        }
    }

    fn one(spec: &str) -> Result<Document> {
        let read = read(&format!("{SMALL}spec: {spec}\n"), "db.yaml");
        read.map(|mut documents| volume(documents.remove(0)))
    }

    #[test]
    fn a_source_is_a_snapshot_or_a_volume_and_not_both() {
        let source = |text: &str| one(text).and_then(|document| document.request(false));
        let snapshot = source("{source: {snapshot: s}}").unwrap().source.unwrap();
        assert_eq!(snapshot.snapshot.unwrap().name, "s");
        let volume = source("{source: {volume: db}}").unwrap().source.unwrap();
        assert_eq!(volume.volume.unwrap().name, "db");
        assert!(source("{size: 1GiB}").unwrap().source.is_none());
        for wrong in ["{source: {snapshot: s, volume: db}}", "{source: {}}", "{source: {disk: d}}"]
        {
            let error = format!("{:#}", source(wrong).unwrap_err());
            assert!(error.contains("source") || error.contains("disk"), "{error}");
        }
    }

    #[test]
    fn snapshots_and_schedules_are_kinds_of_their_own_with_fields_of_their_own() {
        let text = |kind: &str, spec: &str| {
            format!("apiVersion: quoin/v1\nkind: {kind}\nmetadata: {{name: s}}\nspec: {spec}\n")
        };
        let one =
            |kind: &str, spec: &str| read(&text(kind, spec), "x").map(|mut all| all.remove(0));
        let snapshot = one("Snapshot", "{volume: db}").unwrap();
        assert!(matches!(snapshot, Declared::Snapshot(document) if document.spec.volume == "db"));
        let schedule = one("Schedule", "{volume: db, every: 1h, keep: 24}").unwrap();
        assert!(matches!(schedule, Declared::Schedule(document) if document.spec.keep == Some(24)));
        for (kind, spec, words) in [
            ("Snapshot", "{volume: db, size: 1GiB}", "size"),
            ("Snapshot", "{}", "volume"),
            ("Snapshot", "", "spec: {volume: db}"),
            ("Schedule", "{volume: db, keep: 3}", "every"),
            ("Schedule", "{volume: db, every: soon, keep: 3}", "spec.every"),
            ("Schedule", "{volume: '', every: 1h, keep: 3}", "spec.volume"),
        ] {
            let refused = format!("{:#}", one(kind, spec).unwrap_err());
            assert!(refused.contains(words) && refused.contains("x, document 1"), "{refused}");
        }
    }

    #[test]
    fn a_wrong_kind_is_reported_before_missing_fields() {
        let refused = |text: &str| format!("{:#}", read(text, "db.yaml").unwrap_err());
        for (text, words) in [
            ("kind: Pod\napiVersion: v1\n", ["apiVersion: \"v1\"", "write apiVersion: quoin/v1"]),
            ("kind: Pod\napiVersion: quoin/v1\n", ["kind: \"Pod\"", "write kind: Volume"]),
            ("kind: Volume\n", ["apiVersion is missing", "quoin/v1"]),
            ("apiVersion: quoin/v1\nkind: 7\n", ["kind: 7", "Volume"]),
            ("apiVersion: quoin/v1\nkind: Volume\nspec: {}\n", ["metadata.name is missing", "db"]),
            (SMALL, ["spec is missing", "spec: {size: 10GiB}"]),
            ("just words\n", ["not a document", "--manifest"]),
        ] {
            let message = refused(text);
            assert!(words.iter().all(|word| message.contains(word)), "{text}: {message}");
            assert!(message.starts_with("db.yaml, document 1"), "{message}");
        }
    }

    #[test]
    fn a_document_changes_only_the_fields_that_it_has() {
        let document = one("{size: 10GiB, desiredReplicationFactor: 3, replicas: [{pool: a}]}");
        let request = document.unwrap().request(true).unwrap();
        let spec = request.spec.unwrap();
        assert_eq!((spec.name.as_str(), spec.size_bytes, spec.replicas), ("db", 10 << 30, 3));
        assert_eq!(request.replicas[0].pool, "a");
        assert!(request.dry_run && request.consistency_factor.is_none());
        assert_eq!(spec.durability(), quoin_api::control::Durability::Unspecified);
        assert_eq!(
            one("{size: 4096}").unwrap().request(false).unwrap().spec.unwrap().size_bytes,
            4096
        );
    }

    /// Proves SCALE-CONF-06, SCALE-ID-06.
    #[test]
    fn a_printed_volume_is_parsed_to_its_present_state() {
        let spec = VolumeSpec { name: "db".into(), block_size: 4096, ..VolumeSpec::default() };
        let replica = |id: &str, pool: &str, known, leaving| quoin_api::control::Replica {
            replica_id: id.into(),
            pool: pool.into(),
            guid: format!("guid-{pool}"),
            known,
            leaving,
            ..Default::default()
        };
        let member = quoin_api::control::Member { replica_id: "r1".into(), guid: "g1".into() };
        let membership = quoin_api::control::Membership {
            rf: 2,
            cf: 2,
            drf: 3,
            known: vec![member],
            ..Default::default()
        };
        let shown = Volume {
            spec: Some(spec),
            size_bytes: 3 << 30,
            membership: Some(membership),
            resource_version: 7,
            replicas: vec![
                replica("r1", "a", true, false),
                replica("r2", "b", true, true),
                replica("r2", "c", false, false),
                replica("r3", "d", true, true),
            ],
            ..Volume::default()
        };
        let text = serde_yaml_ng::to_string(&Document::of(shown).unwrap()).unwrap();
        for words in ["size: 3GiB", "desiredReplicationFactor: 3", "replicaGuid: g1", "quorum: "] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let request = volume(read(&text, "db.yaml").unwrap().remove(0)).request(false).unwrap();
        let places: Vec<_> =
            request.replicas.iter().map(|r| (r.replica_id.as_str(), r.pool.as_str())).collect();
        assert_eq!(places, [("r1", "a"), ("r2", "c")], "where each is to be");
        assert_eq!(request.resource_version, 7);
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        for (spec, words) in [
            ("{replicationFactor: 3}", "replicationFactor"),
            ("{replicas: [{node: a}]}", "node"),
            ("{durability: maybe}", "maybe"),
            ("{desiredReplicationFactor: many}", "many"),
        ] {
            let refusal = format!("{:#}", one(spec).unwrap_err());
            assert!(refusal.contains(words) && refusal.contains("db.yaml"), "{refusal}");
        }
        let size = one("{size: much}").unwrap().request(false).unwrap_err().to_string();
        assert!(size.contains("spec.size"), "{size}");
        let none = one("{desiredReplicationFactor: 0}").unwrap().request(false).unwrap_err();
        assert!(none.to_string().contains("desiredReplicationFactor"));
        let kind = SMALL.replace("Volume", "Disk") + "spec: {}";
        assert!(format!("{:#}", read(&kind, "x").unwrap_err()).contains("\"Disk\""));
        assert!(read("", "x").unwrap_err().to_string().contains("no document"));
        assert!(read("a: [", "x").unwrap_err().to_string().contains("not YAML"));
    }

    #[test]
    fn a_file_may_hold_several_documents_and_json_is_accepted() {
        let text =
            format!("---\n{SMALL}spec: {{}}\n---\n{}", SMALL.replace("db", "log") + "spec: {}");
        let names: Vec<_> =
            read(&text, "x").unwrap().into_iter().map(|d| volume(d).metadata.name).collect();
        assert_eq!(names, ["db", "log"]);
        let json = r#"{"apiVersion":"quoin/v1","kind":"Volume","metadata":{"name":"j"},"spec":{}}"#;
        assert_eq!(volume(read(json, "x").unwrap().remove(0)).metadata.name, "j");
    }
}
