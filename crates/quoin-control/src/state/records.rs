//! The records: what the cluster is meant to be, and the little that must be remembered of
//! what it was. JSON with a format number each, so a later Quoin reads an earlier one's.
//!
//! A volume's record holds its membership, epoch, owner and replicas together, because they
//! change together: a compare-and-swap of one record is the whole of fencing, of a replacement
//! and of an attachment (RF, CF and the known list are never seen half changed). What pools
//! and nodes report each second is not here: it is told anew after any restart.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::str::FromStr;

use quoin_api::volume::VolumeOptions;
use quoin_encryption::Encryption;
use quoin_types::membership::{REPLICAS_MAX, RETIRED_MAX, default_cf};
use quoin_types::{
    Epoch, Incarnation, Member, Membership, ReplicaGuid, ReplicaId, SnapshotId, VolumeId,
};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::state::changes::{Concerned, Nodes};
pub use crate::state::grants::Grants;
pub use crate::state::member_records::{MemberOfCluster, TokenRecord};
use crate::state::table::Index;
use crate::state::volume_index::VolumeIndex;
use crate::time::now_ms;
pub use crate::volume::attach::AttachmentRecord;
use crate::volume::devices::Use;

/// An identifier of the protocol, written as its 32 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Text<T>(pub T);

impl<T: Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Text).map_err(D::Error::custom)
    }
}

/// A kind of record.
pub trait Record: Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static {
    /// Lookup data derived from all records of this kind.
    type Index: Index<Self>;
    /// The first part of its keys, with the slash.
    const PREFIX: &'static str;
    /// The rest of its key.
    fn name(&self) -> String;
    fn key(&self) -> String {
        Self::key_of(&self.name())
    }
    /// Returns true if assignments or a status may differ from those by the record `before`, which
    /// is another one.
    fn is_news(&self, _before: &Self) -> bool {
        true
    }
    /// Pools and nodes whose assignments depend on this record.
    fn concerned(&self) -> Concerned {
        Concerned::Everybody
    }
    /// Pools and nodes whose assignments a change of this record may alter.
    fn concerned_by(before: Option<&Self>, after: Option<&Self>) -> Concerned {
        Concerned::by(before.map(Self::concerned), after.map(Self::concerned))
    }
    /// The volume of which this record says something, where it is a single one.
    fn volume(&self) -> Option<VolumeId> {
        None
    }
    /// The key of the one with this name.
    fn key_of(name: &str) -> String {
        format!("{}{name}", Self::PREFIX)
    }
}

/// The request for a volume, complete: every default is filled in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub name: String,
    pub replicas: u8,
    pub consistency_factor: u8,
    #[serde(flatten)]
    pub options: VolumeOptions,
    pub allow_loss_on_single_failure: bool,
    pub parameters: BTreeMap<String, String>,
    /// Any of these; empty: anywhere.
    pub accessible_topology: Vec<BTreeMap<String, String>>,
    /// `None`: the volume is not encrypted. Holds wrapped keys alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// CSI's mutable parameters, as the volume was made with them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub mutable_parameters: BTreeMap<String, String>,
    /// The options that it was made with, where they were changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_options: Option<Box<VolumeOptions>>,
}

impl Spec {
    /// Replaces the options. A repeated creation is compared with those that it asked for.
    pub(crate) fn change_options(&mut self, options: VolumeOptions) {
        let before = std::mem::replace(&mut self.options, options);
        if before != self.options {
            self.created_options.get_or_insert_with(|| Box::new(before));
        }
    }

    /// As it was made.
    pub(crate) fn as_created(&self) -> Self {
        let created = self.created_options.as_deref().unwrap_or(&self.options);
        Self { options: created.clone(), created_options: None, ..self.clone() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum VolumePhase {
    /// Its first replicas are being created.
    Pending,
    Ready,
    /// Deleted by its user; its replicas are kept for its snapshots.
    Retained,
    Deleting,
}

impl VolumePhase {
    /// Its replicas are made, and are kept as they are to be.
    pub(crate) fn is_kept(self) -> bool {
        matches!(self, Self::Ready | Self::Retained)
    }
}

/// Order to the pool about a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ReplicaPhase {
    /// First creation, quorum on; only while the volume is not formed.
    Init,
    /// As `Init`, with the content of the snapshot that the volume is made from.
    Clone,
    /// Creation under a new GUID, quorum off.
    Recreate,
    /// It was created and must exist.
    Keep,
    Delete,
}

impl ReplicaPhase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Init => "Init",
            Self::Clone => "Clone",
            Self::Recreate => "Recreate",
            Self::Keep => "Keep",
            Self::Delete => "Delete",
        }
    }
}

/// Why a replica was made where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Cause {
    /// A user asked for it, or for the volume.
    #[default]
    Asked,
    /// The one whose place it takes was gone for too long.
    Healing,
    /// The pool of the one whose place it takes is being drained.
    Drain,
    /// The pool of the one whose place it takes is much fuller than this one.
    Balance,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaRecord {
    pub id: Text<ReplicaId>,
    /// The incarnation that the pool is to hold. Where the known list does not name it, this is a
    /// newcomer: to take the place of the one known under this id, or as one more. While a
    /// replica moves there are two records with its id.
    pub guid: Text<ReplicaGuid>,
    pub pool: String,
    pub phase: ReplicaPhase,
    /// Known, and named to leave.
    pub leaving: bool,
    /// It was made in a pool that a person named: rebalancing leaves it there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub placed: bool,
    /// Why it was made.
    pub cause: Cause,
}

/// A replica that is not needed any more, until its pool reports that it is gone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Discarded {
    pub id: Text<ReplicaId>,
    pub guid: Text<ReplicaGuid>,
    pub pool: String,
}

impl From<ReplicaRecord> for Discarded {
    fn from(replica: ReplicaRecord) -> Self {
        Self { id: replica.id, guid: replica.guid, pool: replica.pool }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MemberRecord {
    pub id: Text<ReplicaId>,
    pub guid: Text<ReplicaGuid>,
}

/// [`Membership`] as it is written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MembershipRecord {
    pub version: u64,
    pub rf: u8,
    pub cf: u8,
    pub drf: u8,
    pub known: Vec<MemberRecord>,
    pub retired: Vec<Text<ReplicaGuid>>,
    pub formed: bool,
}

impl From<&Membership> for MembershipRecord {
    fn from(membership: &Membership) -> Self {
        let known = membership.known.iter();
        Self {
            version: membership.version,
            rf: membership.rf,
            cf: membership.cf,
            drf: membership.drf,
            known: known.map(|m| MemberRecord { id: Text(m.id), guid: Text(m.guid) }).collect(),
            retired: membership.retired.iter().copied().map(Text).collect(),
            formed: membership.formed,
        }
    }
}

impl From<&MembershipRecord> for Membership {
    fn from(record: &MembershipRecord) -> Self {
        Membership {
            version: record.version,
            rf: record.rf,
            cf: record.cf,
            drf: record.drf,
            known: record.known.iter().map(|m| Member { id: m.id.0, guid: m.guid.0 }).collect(),
            retired: record.retired.iter().map(|guid| guid.0).collect(),
            formed: record.formed,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeRecord {
    pub id: Text<VolumeId>,
    pub spec: Spec,
    pub size_bytes: u64,
    pub phase: VolumePhase,
    pub created_ms: u64,
    pub membership: MembershipRecord,
    pub replicas: Vec<ReplicaRecord>,
    pub discarded: Vec<Discarded>,
    pub attachments: Vec<AttachmentRecord>,
    #[serde(flatten)]
    pub opened: Opened,
    /// The requested factor; 0: by the formula whenever RF changes.
    pub consistency_factor: u8,
    /// When it was last recovered from too few replicas by hand, and so may have lost acknowledged
    /// writes; 0: never.
    pub may_have_lost_ms: u64,
    /// Grows with every change but those that an opening makes; tells which of two copies of a
    /// record is the later one.
    pub generation: u64,
    /// The snapshot that it was made from; `None`: it began empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceRecord>,
    #[serde(flatten)]
    pub grants: Grants,
    #[serde(flatten)]
    pub used: Use,
}

/// The node that may open a volume, and its last open.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// The node whose target may acquire epochs.
    pub owner: Option<String>,
    pub epoch: u64,
    /// Incarnation that acquired `epoch`.
    pub incarnation: Text<Incarnation>,
}

/// The snapshot that a volume was made from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SourceRecord {
    pub volume: Text<VolumeId>,
    pub snapshot: Text<SnapshotId>,
    /// Names at that time.
    pub volume_name: String,
    pub snapshot_name: String,
    /// It was made from the volume, by a snapshot that is for nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub of_volume: bool,
    /// Volumes that were made one from the other up to this one.
    pub depth: u32,
    #[serde(default, skip_serializing_if = "BaseUse::is_in_use")]
    pub base: BaseUse,
}

/// Use that a clone has of the base that its pools keep for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum BaseUse {
    /// It shows the blocks that neither of them wrote.
    #[default]
    InUse,
    /// The same, and its replicas are to take them over.
    Flattening,
    /// None any more. The source is remembered for those who repeat their request.
    Flattened,
}

impl BaseUse {
    fn is_in_use(&self) -> bool {
        *self == Self::InUse
    }
}

impl SourceRecord {
    /// Its snapshot is needed for the clone.
    pub(crate) fn is_needed(&self) -> bool {
        self.base != BaseUse::Flattened
    }
}

/// The largest record that pools are given to keep, and retired GUIDs in it.
pub(crate) const KEEPSAKE_BYTES_MAX: usize = 32 << 10;
const KEEPSAKE_RETIRED_MAX: usize = 64;

/// Retired GUIDs that a record keeps: as many as a membership may have when the next change, which
/// retires all its replicas at most, is made.
pub(crate) const RETIRED_KEPT_MAX: usize = RETIRED_MAX - REPLICAS_MAX;

impl VolumeRecord {
    /// From now on its pools remove its replicas.
    pub(crate) fn begin_deletion(&mut self) {
        self.phase = VolumePhase::Deleting;
        self.replicas.iter_mut().for_each(|replica| replica.phase = ReplicaPhase::Delete);
    }

    /// Takes a replica off the record that counts nowhere yet; its pool deletes it.
    pub(crate) fn discard(&mut self, at: usize) -> Discarded {
        let gone = Discarded::from(self.replicas.remove(at));
        self.discarded.push(gone.clone());
        gone
    }

    /// Forgets the oldest retired GUIDs beyond [`RETIRED_KEPT_MAX`], as far as their pools said that
    /// what they named is deleted; without it a volume that was replaced often enough could not be
    /// changed any more. What a forgotten one named is gone, and were it back from an old copy of a
    /// disk, the records name it nowhere, so that it counts nowhere.
    pub(crate) fn forget_retired(&mut self) {
        let retired = &mut self.membership.retired;
        let mut surplus = retired.len().saturating_sub(RETIRED_KEPT_MAX);
        if surplus == 0 {
            return;
        }
        let undeleted: HashSet<u128> = self.discarded.iter().map(|d| d.guid.0.0).collect();
        retired.retain(|guid| {
            let stays = surplus == 0 || undeleted.contains(&guid.0.0);
            surplus -= usize::from(!stays);
            stays
        });
    }

    /// Returns the obstacle to any further change where no retired GUID may be forgotten.
    pub(crate) fn is_full_of_retired(&self) -> Option<String> {
        let retired = self.membership.retired.len();
        if retired <= RETIRED_KEPT_MAX || self.changing().is_empty() {
            return None;
        }
        let mut pools: Vec<&str> = self.discarded.iter().map(|d| d.pool.as_str()).collect();
        pools.sort_unstable();
        pools.dedup();
        Some(format!(
            "pool {} to delete replicas that were replaced, of which {retired} are remembered and \
             more cannot be (start the pool, or take it away for good: `quoin pool remove`)",
            pools.join(", ")
        ))
    }

    /// Returns true if a replica that was on its way in `before` is not any more, and is not known
    /// either.
    pub(crate) fn takes_back(&self, before: &Self) -> bool {
        let is_here = |guid| self.replicas.iter().any(|replica| replica.guid == guid);
        let mut newcomers = before.replicas.iter().filter(|replica| !before.is_known(replica));
        self.membership.version == before.membership.version
            && newcomers.any(|newcomer| !is_here(newcomer.guid))
    }

    /// Returns a volume that was never opened, without replicas.
    pub(crate) fn new(id: VolumeId, spec: Spec, size_bytes: u64) -> Self {
        let (rf, cf) = (spec.replicas, spec.consistency_factor);
        Self {
            id: Text(id),
            consistency_factor: if cf == default_cf(rf) { 0 } else { cf },
            spec,
            size_bytes,
            phase: VolumePhase::Pending,
            created_ms: now_ms(),
            membership: MembershipRecord {
                version: 0,
                rf,
                cf,
                drf: rf,
                known: Vec::new(),
                retired: Vec::new(),
                formed: false,
            },
            replicas: Vec::new(),
            discarded: Vec::new(),
            attachments: Vec::new(),
            opened: Opened::default(),
            may_have_lost_ms: 0,
            generation: 0,
            source: None,
            grants: Grants::default(),
            used: Use::default(),
        }
    }

    /// Without what an opening changes, which pools know themselves.
    pub(crate) fn unopened(&self) -> Self {
        Self { opened: Opened::default(), grants: Grants::default(), ..self.clone() }
    }

    /// Returns true if they differ in more than by openings.
    pub(crate) fn differs(&self, other: &Self) -> bool {
        let opened =
            Self { opened: self.opened.clone(), grants: self.grants.clone(), ..other.clone() };
        *self != opened
    }

    /// The record as pools keep it beside its replicas; empty where it is too large for that.
    pub(crate) fn keepsake(&self) -> Vec<u8> {
        let mut kept = self.unopened();
        let retired = &mut kept.membership.retired;
        // The older ones are in every replica's own copy of the membership.
        retired.drain(..retired.len().saturating_sub(KEEPSAKE_RETIRED_MAX));
        Some(encode(&kept)).filter(|bytes| bytes.len() <= KEEPSAKE_BYTES_MAX).unwrap_or_default()
    }

    /// The pools that hold a replica of it, or are to remove one; some of them twice.
    pub(crate) fn pools(&self) -> impl Iterator<Item = &String> {
        let held = self.replicas.iter().map(|replica| &replica.pool);
        held.chain(self.discarded.iter().map(|discarded| &discarded.pool))
    }

    pub fn epoch(&self) -> Epoch {
        Epoch(self.opened.epoch)
    }

    /// The known incarnation under this replica's id.
    pub fn known_guid(&self, id: ReplicaId) -> Option<ReplicaGuid> {
        self.membership.known.iter().find(|m| m.id.0 == id).map(|m| m.guid.0)
    }

    /// Returns true if a replica record stands for a known replica, not for a candidate.
    pub fn is_known(&self, replica: &ReplicaRecord) -> bool {
        self.known_guid(replica.id.0) == Some(replica.guid.0)
    }
}

impl Record for VolumeRecord {
    type Index = VolumeIndex;
    const PREFIX: &'static str = "volume/";
    fn name(&self) -> String {
        self.id.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        let nodes = self.opened.owner.iter().chain(self.attachments.iter().map(|a| &a.node));
        let nodes = Nodes::These(nodes.cloned().collect());
        Concerned::Some { pools: self.pools().cloned().collect(), nodes }
    }
    fn concerned_by(before: Option<&Self>, after: Option<&Self>) -> Concerned {
        let concerned = Concerned::by(before.map(Self::concerned), after.map(Self::concerned));
        let uses = |volume: Option<&Self>| volume.map(|v| (v.opened.epoch, v.used.clone()));
        // Any node may have a device of a volume that is served elsewhere by now.
        match uses(before) == uses(after) || before.is_none() {
            true => concerned,
            false => concerned.and(Concerned::all_nodes()),
        }
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.id.0)
    }
}

/// Makes a volume's name its own: created before the volume, removed after it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NameRecord {
    pub volume_name: String,
    pub volume_id: Text<VolumeId>,
}

impl Record for NameRecord {
    type Index = ();
    const PREFIX: &'static str = "volume-name/";
    fn name(&self) -> String {
        self.volume_name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Nobody
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolRecord {
    pub name: String,
    /// Which storage this is; another one under the same name has lost all its replicas.
    pub pool_id: String,
    pub node: String,
    pub address: String,
    pub topology: BTreeMap<String, String>,
    /// The highest seen; a lower one means that an older state of the disk came back.
    pub start_counter: u64,
    /// Nonce of the start with that counter; 0: not reported. Another one means the same.
    pub start_nonce: u64,
    /// Start before that one, and its nonce; 0: none is known. A report with them is late.
    pub former_start: u64,
    pub former_nonce: u64,
    /// The highest mark that it told: a count that moves with what it promises and acknowledges.
    pub mark: u64,
    pub rolled_back: bool,
    /// Grows with every request for a scrub.
    pub scrub_request: u64,
}

impl Record for PoolRecord {
    type Index = ();
    const PREFIX: &'static str = "pool/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn is_news(&self, before: &Self) -> bool {
        *before != PoolRecord { mark: before.mark, ..self.clone() }
    }
    fn concerned(&self) -> Concerned {
        // Nodes are told its address.
        Concerned::Some { pools: [self.name.clone()].into(), nodes: Nodes::All }
    }
}

/// That a pool, or all pools of a node, take nothing new; apart from the pool's and the node's
/// own records, which follow what these report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CordonRecord {
    /// "pool" or "node".
    pub kind: String,
    pub holder: String,
    /// Its replicas move away.
    pub drain: bool,
    /// That it was empty was told.
    pub told: bool,
    pub since_ms: u64,
    /// Why the pool's disk is taken to be failing; empty: it is not.
    pub dying: String,
}

impl Record for CordonRecord {
    type Index = ();
    const PREFIX: &'static str = "cordon/";
    fn name(&self) -> String {
        Self::name_of(&self.kind, &self.holder)
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

impl CordonRecord {
    pub(crate) fn name_of(kind: &str, holder: &str) -> String {
        format!("{kind}/{holder}")
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: String,
    pub address: String,
    pub topology: BTreeMap<String, String>,
    /// 0: no limit.
    pub volumes_max: u32,
    pub version: String,
}

impl Record for NodeRecord {
    type Index = ();
    const PREFIX: &'static str = "node/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

/// That the records were lost or come from an old copy: until they agree with what the pools hold,
/// no member gets an order by them.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecoveryRecord {
    /// In words, as in "they were lost".
    pub why: String,
    pub since_ms: u64,
}

impl RecoveryRecord {
    /// There is one at most.
    pub const NAME: &'static str = "records";
}

impl Record for RecoveryRecord {
    type Index = ();
    const PREFIX: &'static str = "recovery/";
    fn name(&self) -> String {
        Self::NAME.to_owned()
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EventRecord {
    pub sequence: u64,
    pub time_ms: u64,
    pub severity: String,
    pub object_kind: String,
    pub object_id: String,
    pub object_name: String,
    pub reason: String,
    pub message: String,
    pub count: u32,
    /// Member whose words or doings it is of, such as "pool/p1"; empty: the controller's own.
    pub reporter: String,
}

impl Record for EventRecord {
    type Index = ();
    const PREFIX: &'static str = "event/";
    fn name(&self) -> String {
        Self::name_at(self.sequence)
    }
}

impl EventRecord {
    fn name_at(sequence: u64) -> String {
        format!("{sequence:016x}")
    }

    pub(crate) fn key_at(sequence: u64) -> String {
        Self::key_of(&Self::name_at(sequence))
    }
}

/// Any other format is refused; format 1 was that of builds before the first release. It is raised where a build that does not know of a change would do
/// harm: with a field whose absence means something else than what the builds before did, with a
/// new value of an enumeration, with a new meaning. A field that may be absent is added with a
/// default; a build that does not know it loses it with its next change of that record.
pub(crate) const FORMAT: u32 = 2;

#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    format: u32,
    record: T,
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

pub(crate) fn encode<R: Record>(record: &R) -> Vec<u8> {
    serde_json::to_vec(&Envelope { format: FORMAT, record }).expect("records are plain data")
}

pub(crate) fn decode<R: Record>(bytes: &[u8]) -> Result<R, String> {
    let FormatOnly { format } = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if format > FORMAT {
        return Err(format!(
            "it is of format {format}, written by a newer Quoin than this one, which reads format \
             {FORMAT}; start that one"
        ));
    }
    if format < FORMAT {
        return Err(format!(
            "it is of format {format}, from before the first release, and this Quoin reads format \
             {FORMAT} alone. Nothing was changed. Take the data of the volumes out of their pools \
             with the quoin that wrote it (`quoin pool export`), then make the cluster again in an \
             empty state directory"
        ));
    }
    let envelope: Envelope<R> = serde_json::from_slice(bytes)
        .map_err(|e| format!("{e}; if a newer Quoin wrote it, start that one"))?;
    Ok(envelope.record)
}
