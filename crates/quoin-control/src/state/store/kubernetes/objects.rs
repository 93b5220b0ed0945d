//! Objects of Kubernetes as this store writes them: only the fields that it uses.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};

use crate::state::store::{Entry, StoreError};

/// Label of all objects of a cluster.
pub(super) const CLUSTER_LABEL: &str = "quoin.io/cluster";
/// Label of records by the part of their keys before the first slash, so that those of one kind are listed alone.
pub(super) const KIND_LABEL: &str = "quoin.io/kind";
/// Longest value of a record. Kubernetes takes objects of a megabyte and a half.
const VALUE_BYTES_MAX: usize = 256 << 10;
/// Format of [`RecordSpec`].
const FORMAT: u32 = 1;
/// Characters of a record's key that its object's name shows.
const SHOWN: usize = 30;

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    pub name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl Metadata {
    pub fn new(name: String, cluster: &str) -> Self {
        let labels = BTreeMap::from([(CLUSTER_LABEL.to_owned(), cluster.to_owned())]);
        Self { name, resource_version: String::new(), labels }
    }

    pub fn revision(&self) -> Result<u64, StoreError> {
        revision(&self.resource_version)
    }
}

/// Kubernetes calls versions opaque, and promises since 1.35 that they are numbers that grow; those of etcd
/// behind it always were.
pub(super) fn revision(version: &str) -> Result<u64, StoreError> {
    let number = version.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| {
        StoreError::Failed(format!(
            "Kubernetes has a resourceVersion that is no number: {version:?}"
        ))
    })
}

/// The part of a key, or of the beginning of one, that a label has. `None`: it has no such part, or one that is no
/// value of a label.
pub(super) fn kind_of(key: &str) -> Option<&str> {
    let (kind, _) = key.split_once('/')?;
    let is_plain = |b: u8| b.is_ascii_lowercase() || b == b'-';
    let is_value = (1..=63).contains(&kind.len()) && kind.bytes().all(is_plain);
    (is_value && !kind.starts_with('-') && !kind.ends_with('-')).then_some(kind)
}

/// An object of any kind.
#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object<S> {
    #[serde(default)]
    pub api_version: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub metadata: Metadata,
    #[serde(flatten)]
    pub content: S,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct RecordContent {
    pub spec: RecordSpec,
}

#[derive(Serialize, Deserialize, Clone, Debug)]
#[serde(rename_all = "camelCase")]
pub(super) struct RecordSpec {
    format: u32,
    key: String,
    /// In base64.
    value: String,
    /// Number of the rule under which it was written; 0: under none.
    pub rule: i64,
}

pub(super) type Record = Object<RecordContent>;

/// Name of the object that holds a record: readable at its beginning, and unique by what follows.
pub(super) fn record_name(cluster: &str, key: &str) -> String {
    let plain = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let shown: String = key.chars().map(plain).take(SHOWN).collect();
    let hash = digest(&SHA256, key.as_bytes());
    format!("{cluster}-{shown}-{}", hex::encode(&hash.as_ref()[..16]))
}

impl Record {
    /// # Errors
    /// The value is too long.
    pub fn of(
        cluster: &str,
        key: &str,
        expected: u64,
        value: &[u8],
        rule: i64,
    ) -> Result<Self, StoreError> {
        if value.len() > VALUE_BYTES_MAX {
            let (bytes, most) = (value.len(), VALUE_BYTES_MAX);
            let reason = format!("it has {bytes} bytes; in Kubernetes a record has {most} at most");
            return Err(StoreError::Record { key: key.to_owned(), reason });
        }
        let mut metadata = Metadata::new(record_name(cluster, key), cluster);
        if expected > 0 {
            metadata.resource_version = expected.to_string();
        }
        if let Some(kind) = kind_of(key) {
            metadata.labels.insert(KIND_LABEL.to_owned(), kind.to_owned());
        }
        let value = BASE64.encode(value);
        Ok(Self {
            api_version: "quoin.io/v1".to_owned(),
            kind: "Record".to_owned(),
            metadata,
            content: RecordContent {
                spec: RecordSpec { format: FORMAT, key: key.to_owned(), value, rule },
            },
        })
    }

    pub fn key(&self) -> &str {
        &self.content.spec.key
    }

    /// # Errors
    /// Somebody else wrote it.
    pub fn into_entry(self, cluster: &str) -> Result<Entry, StoreError> {
        let revision = self.metadata.revision()?;
        let RecordSpec { format, key, value, .. } = self.content.spec;
        let name = self.metadata.name;
        let foreign = |reason: String| StoreError::Record { key: name.clone(), reason };
        if format != FORMAT {
            return Err(foreign(format!("its format is {format}; this Quoin knows {FORMAT}")));
        }
        if name != record_name(cluster, &key) {
            return Err(foreign(format!("its key is {key:?}, which has another name")));
        }
        let value = BASE64.decode(value).map_err(|error| foreign(error.to_string()))?;
        Ok(Entry { key, revision, value })
    }
}

#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct SecretContent {
    #[serde(default)]
    pub data: BTreeMap<String, String>,
}

pub(super) type Secret = Object<SecretContent>;

const AUTHORITY: &str = "authority.json";

impl Secret {
    pub fn of(cluster: &str, authority: &[u8]) -> Self {
        let data = BTreeMap::from([(AUTHORITY.to_owned(), BASE64.encode(authority))]);
        Self {
            api_version: "v1".to_owned(),
            kind: "Secret".to_owned(),
            metadata: Metadata::new(secret_name(cluster), cluster),
            content: SecretContent { data },
        }
    }

    pub fn authority(&self) -> Result<Vec<u8>, StoreError> {
        let name = &self.metadata.name;
        let decoded = self.content.data.get(AUTHORITY).and_then(|data| BASE64.decode(data).ok());
        decoded.ok_or_else(|| StoreError::Failed(format!("Secret {name} has no {AUTHORITY}")))
    }
}

pub(super) fn secret_name(cluster: &str) -> String {
    format!("{cluster}-authority")
}

#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct LeaseContent {
    #[serde(default)]
    pub spec: LeaseSpec,
}

#[derive(Serialize, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct LeaseSpec {
    /// Empty: nobody.
    pub holder_identity: Option<String>,
    pub lease_duration_seconds: Option<i32>,
    pub acquire_time: Option<String>,
    pub renew_time: Option<String>,
    pub lease_transitions: Option<i32>,
}

pub(super) type Lease = Object<LeaseContent>;

/// A page of objects.
#[derive(Deserialize)]
pub(super) struct List<T> {
    #[serde(default)]
    pub metadata: ListMetadata,
    #[serde(default = "Vec::new")]
    pub items: Vec<T>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ListMetadata {
    pub resource_version: String,
    #[serde(rename = "continue")]
    pub go_on: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_records_are_names_of_kubernetes_and_differ_with_their_keys() {
        let keys = ["volume/3f", "volume/3F", "volume-3f", "event/00/é", "", &"long".repeat(100)];
        let names: Vec<_> = keys.iter().map(|key| record_name("quoin", key)).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(name.len() <= 253 && name.starts_with("quoin-"), "{name}");
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(name.chars().all(is_plain) && !name.ends_with('-'), "{name}");
            assert!(!names[..i].contains(name), "{name}");
        }
    }

    #[test]
    fn an_object_that_somebody_else_wrote_is_refused_by_name() {
        let mut record = Record::of("quoin", "volume/1", 0, b"bytes", 7).unwrap();
        record.metadata.resource_version = "12".to_owned();
        let entry = record.clone().into_entry("quoin").unwrap();
        assert_eq!(
            (entry.key.as_str(), entry.revision, &entry.value[..]),
            ("volume/1", 12, &b"bytes"[..])
        );
        let mut renamed = record.clone();
        renamed.metadata.name = record_name("quoin", "volume/2");
        let mut newer = record.clone();
        newer.content.spec.format = 2;
        let mut spoiled = record.clone();
        spoiled.content.spec.value = "no base64".to_owned();
        for foreign in [renamed, newer, spoiled] {
            let why = foreign.into_entry("quoin").unwrap_err().to_string();
            assert!(why.contains("quoin-volume-"), "{why}");
        }
        record.metadata.resource_version = "abc".to_owned();
        assert!(record.into_entry("quoin").unwrap_err().to_string().contains("no number"));
    }

    #[test]
    fn a_record_has_its_kind_as_a_label_where_that_is_a_value_of_one() {
        let kinds = ["volume/1", "group-snapshot/", "volume", "/1", "-a/1", "a-/1", "Volume/1"];
        let found = kinds.map(kind_of);
        assert_eq!(found, [Some("volume"), Some("group-snapshot"), None, None, None, None, None]);
        let record = Record::of("quoin", "volume/1", 0, &[], 0).unwrap();
        assert_eq!(record.metadata.labels[KIND_LABEL], "volume");
    }

    #[test]
    fn a_value_has_256_kib_at_most() {
        let most = vec![1; VALUE_BYTES_MAX];
        assert!(Record::of("quoin", "volume/1", 0, &most, 0).is_ok());
        let more = vec![1; VALUE_BYTES_MAX + 1];
        let why = Record::of("quoin", "volume/1", 0, &more, 0).unwrap_err().to_string();
        assert!(why.contains("volume/1") && why.contains("262144 at most"), "{why}");
    }
}
