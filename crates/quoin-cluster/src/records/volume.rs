//! The record of a volume.

use std::collections::HashSet;

use quoin_types::membership::{REPLICAS_MAX, RETIRED_MAX, default_cf};
use quoin_types::{Epoch, Incarnation, ReplicaGuid, ReplicaId, SnapshotId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::records::{
    AttachmentRecord, Concerned, Discarded, Grants, MembershipRecord, Nodes, Record, ReplicaPhase,
    ReplicaRecord, Spec, Text, Use, VolumeIndex, VolumeMirror, encode,
};

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
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Ready | Self::Retained)
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
    /// `None`: it is not mirrored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<VolumeMirror>,
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
    pub fn is_needed(&self) -> bool {
        self.base != BaseUse::Flattened
    }
}

/// The largest record that pools are given to keep, and retired GUIDs in it.
pub const KEEPSAKE_BYTES_MAX: usize = 32 << 10;
const KEEPSAKE_RETIRED_MAX: usize = 64;

/// Retired GUIDs that a record keeps: as many as a membership may have when the next change, which
/// retires all its replicas at most, is made.
pub const RETIRED_KEPT_MAX: usize = RETIRED_MAX - REPLICAS_MAX;

impl VolumeRecord {
    /// From now on its pools remove its replicas.
    pub fn begin_deletion(&mut self) {
        self.phase = VolumePhase::Deleting;
        self.replicas.iter_mut().for_each(|replica| replica.phase = ReplicaPhase::Delete);
    }

    /// Takes a replica off the record that counts nowhere yet; its pool deletes it.
    pub fn discard(&mut self, at: usize) -> Discarded {
        let gone = Discarded::from(self.replicas.remove(at));
        self.discarded.push(gone.clone());
        gone
    }

    /// Forgets the oldest retired GUIDs beyond [`RETIRED_KEPT_MAX`], as far as their pools said that
    /// what they named is deleted; without it a volume that was replaced often enough could not be
    /// changed any more. What a forgotten one named is gone, and were it back from an old copy of a
    /// disk, the records name it nowhere, so that it counts nowhere.
    pub fn forget_retired(&mut self) {
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
    pub fn is_full_of_retired(&self) -> Option<String> {
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
    pub fn takes_back(&self, before: &Self) -> bool {
        let is_here = |guid| self.replicas.iter().any(|replica| replica.guid == guid);
        let mut newcomers = before.replicas.iter().filter(|replica| !before.is_known(replica));
        self.membership.version == before.membership.version
            && newcomers.any(|newcomer| !is_here(newcomer.guid))
    }

    /// Returns a volume that was never opened, without replicas.
    pub fn new(id: VolumeId, spec: Spec, size_bytes: u64, created_ms: u64) -> Self {
        let (rf, cf) = (spec.replicas, spec.consistency_factor);
        Self {
            id: Text(id),
            consistency_factor: if cf == default_cf(rf) { 0 } else { cf },
            spec,
            size_bytes,
            phase: VolumePhase::Pending,
            created_ms,
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
            // It was never written.
            grants: Grants { written: Some(0), ..Grants::default() },
            used: Use::default(),
            mirror: None,
        }
    }

    /// Without what an opening changes, which pools know themselves.
    pub fn unopened(&self) -> Self {
        Self { opened: Opened::default(), grants: Grants::default(), ..self.clone() }
    }

    /// Returns true if they differ in more than by openings.
    pub fn differs(&self, other: &Self) -> bool {
        let opened =
            Self { opened: self.opened.clone(), grants: self.grants.clone(), ..other.clone() };
        *self != opened
    }

    /// The record as pools keep it beside its replicas; empty where it is too large for that.
    pub fn keepsake(&self) -> Vec<u8> {
        let mut kept = self.unopened();
        let retired = &mut kept.membership.retired;
        // The older ones are in every replica's own copy of the membership.
        retired.drain(..retired.len().saturating_sub(KEEPSAKE_RETIRED_MAX));
        Some(encode(&kept)).filter(|bytes| bytes.len() <= KEEPSAKE_BYTES_MAX).unwrap_or_default()
    }

    /// The pools that hold a replica of it, or are to remove one; some of them twice.
    pub fn pools(&self) -> impl Iterator<Item = &String> {
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
