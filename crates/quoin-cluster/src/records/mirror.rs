//! The records of mirrored groups, of groups of volumes, and what a volume's record says of its mirror.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;

use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};
use serde::{Deserialize, Serialize};

use crate::mirror;
use crate::mirror::{Begun, ClusterId, Generation, Keepsake, Role};
use crate::records::{Concerned, Index, Record, Text, is_zero};

/// Settings of a mirror, as they were given on this side.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorSettings {
    pub interval_s: u64,
    pub may_take_over: bool,
    /// Content is compressed where that gains.
    pub compresses: bool,
    /// Bytes in a second for all members together; 0: no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bandwidth_limit: u64,
    /// No points are cut.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_paused: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComparisonState {
    Comparing,
    Equal,
    Differs,
    /// It ended early, and says nothing of the rest.
    Failed,
}

/// Range of 1 MiB that is not the same on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DifferingRange {
    pub volume: Text<VolumeId>,
    /// Number of the range in the volume.
    pub range: u64,
}

/// Comparison of points that both sides hold. Volumes are gone through in the order of their ids.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorComparison {
    pub id: Text<PointId>,
    pub state: ComparisonState,
    pub began_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ended_ms: u64,
    /// The newest point that was compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<Text<PointId>>,
    /// Place of the next range: ranges of volumes before it were compared, and those of this one before it.
    pub volume: Text<VolumeId>,
    pub range: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub done_bytes: u64,
    /// Ranges that differ, and the first of them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub differing: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<DifferingRange>,
    /// A former comparison found differences, and no later one has found none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub differed: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub failure: String,
}

impl MirrorComparison {
    /// Most ranges that are remembered.
    pub const RANGES_MAX: usize = 64;

    pub fn begun(id: PointId, began_ms: u64, former: Option<&Self>) -> Self {
        Self {
            id: Text(id),
            state: ComparisonState::Comparing,
            began_ms,
            ended_ms: 0,
            point: None,
            volume: Text(VolumeId(0)),
            range: 0,
            done_bytes: 0,
            differing: 0,
            ranges: Vec::new(),
            differed: former.is_some_and(Self::differs),
            failure: String::new(),
        }
    }

    /// Returns true from when a difference was found until a comparison finds none.
    pub fn differs(&self) -> bool {
        self.state != ComparisonState::Equal && (self.differing > 0 || self.differed)
    }

    pub fn note(&mut self, range: DifferingRange) {
        self.differing += 1;
        if self.ranges.len() < Self::RANGES_MAX {
            self.ranges.push(range);
        }
    }
}

/// A mirrored volume or group. The role is that of the brain's own record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MirrorRecord {
    pub id: Text<GroupId>,
    /// Name of the volume or the group when it was made.
    pub group_name: String,
    /// It is a single volume, whose id is the group's.
    pub is_volume: bool,
    /// Grows with each change of `brain`.
    pub version: u64,
    pub brain: Brain,
    pub settings: MirrorSettings,
    pub created_ms: u64,
    /// The last comparison with the other side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comparison: Option<MirrorComparison>,
    /// Seconds for which controllers that ran have seen it as an orphan.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub orphan_s: u64,
    /// Settings that were asked for on this side; `None`: a copy, whose settings came with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<MirrorSettings>,
    /// Members whose copies the other side has recorded, beside those with a base.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub confirmed: Vec<Text<VolumeId>>,
    /// Copies that an orchestrator of this side deleted: they stay, and it lists them no more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub released: Vec<Text<VolumeId>>,
}

/// Record of the brain, in hex.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Brain(Text<Hex>);

#[derive(Clone, PartialEq, Eq, Debug)]
struct Hex(mirror::Record);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.encode().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Hex {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "the record of a mirror cannot be read".to_owned();
        let digits = text.as_bytes().chunks(2);
        let byte = |pair: &[u8]| {
            let digit = |at: usize| pair.get(at).and_then(|c| char::from(*c).to_digit(16));
            Some((digit(0)? << 4 | digit(1)?) as u8)
        };
        let bytes = digits.map(byte).collect::<Option<Vec<u8>>>().ok_or_else(wrong)?;
        mirror::Record::decode(&bytes).map(Self).map_err(|_| wrong())
    }
}

impl MirrorRecord {
    pub fn new(
        record: mirror::Record,
        (group_name, is_volume): (String, bool),
        settings: MirrorSettings,
        created_ms: u64,
    ) -> Self {
        let id = Text(record.group);
        let brain = Brain(Text(Hex(record)));
        Self {
            id,
            group_name,
            is_volume,
            // Members, and targets that have them open, may have seen orders of a mirror that was ended: those of
            // this one count on from there.
            version: created_ms.max(1),
            brain,
            settings,
            created_ms,
            comparison: None,
            orphan_s: 0,
            given: None,
            confirmed: Vec::new(),
            released: Vec::new(),
        }
    }

    pub fn brain(&self) -> &mirror::Record {
        &self.brain.0.0.0
    }

    /// Takes the brain's change over, if the record has the version that it was made from.
    pub fn change(&mut self, expected: u64, record: mirror::Record) -> bool {
        let is_it = self.version == expected;
        if is_it {
            self.version += 1;
            self.brain = Brain(Text(Hex(record)));
        }
        is_it
    }

    pub fn role(&self) -> Role {
        self.brain().role
    }

    /// Returns true once the other side is known to have this member under its id.
    pub fn is_confirmed(&self, member: &mirror::Member) -> bool {
        let is_told = self.confirmed.contains(&Text(member.volume));
        self.role().is_copy() || self.role() == Role::Orphan || member.has_base || is_told
    }
}

impl Record for MirrorRecord {
    type Index = MirrorIndex;
    const PREFIX: &'static str = "mirror/";
    fn name(&self) -> String {
        self.id.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

/// Names of mirrors' records by their members.
#[derive(Debug, Default)]
pub struct MirrorIndex {
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
}

impl MirrorIndex {
    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }
}

impl Index<MirrorRecord> for MirrorIndex {
    fn follow(&mut self, before: Option<&MirrorRecord>, after: Option<&MirrorRecord>) {
        for (record, is_there) in [(before, false), (after, true)] {
            let Some(record) = record else { continue };
            for member in &record.brain().members {
                follow(&mut self.by_volume, member.volume, record.name(), is_there);
            }
        }
    }
}

fn follow<K: Eq + std::hash::Hash>(
    map: &mut HashMap<K, BTreeSet<String>>,
    key: K,
    name: String,
    is_there: bool,
) {
    let names = map.entry(key);
    match (is_there, names) {
        (true, names) => drop(names.or_default().insert(name)),
        (false, std::collections::hash_map::Entry::Occupied(mut names)) => {
            names.get_mut().remove(&name);
            if names.get().is_empty() {
                names.remove();
            }
        }
        (false, _) => {}
    }
}

/// Role and generation of a volume in its mirror, which its pools keep with its record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeMirror {
    pub group: Text<GroupId>,
    pub is_primary: bool,
    /// Generation in which it has this role.
    pub number: u64,
    pub cluster: Text<ClusterId>,
    pub claim: Text<PointId>,
    /// Point that the generation began at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Text<PointId>>,
    /// Generation of the volume's record since which it says so.
    pub since_generation: u64,
    /// The last fence that the mirror asked for, and the epoch that it used up. 0: none.
    #[serde(default)]
    pub fence: Text<PointId>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fenced_epoch: u64,
    /// A target has opened it above that epoch since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_fenced: bool,
}

impl VolumeMirror {
    pub fn keepsake(&self) -> Keepsake {
        let Self { number, cluster, claim, at, .. } = self;
        let generation = Generation { number: *number, cluster: cluster.0, id: claim.0.0 };
        let begun = Begun { generation, at: at.map(|at| at.0) };
        Keepsake { is_primary: self.is_primary, begun }
    }
}

/// A named set of volumes, which is mirrored as one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VolumeGroupRecord {
    pub id: Text<GroupId>,
    pub group_name: String,
    pub members: Vec<Text<VolumeId>>,
    pub created_ms: u64,
    /// How an orchestrator of this cluster asked for it; `None`: none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<GroupClaim>,
}

/// The request by which an orchestrator has a group: a repeat is known by the name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupClaim {
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prefix: String,
}

impl GroupClaim {
    /// Name of the group, as people see it.
    pub fn shown(&self) -> String {
        format!("{}{}", self.prefix, self.name)
    }
}

impl VolumeGroupRecord {
    pub fn new(
        id: GroupId,
        group_name: impl Into<String>,
        members: Vec<Text<VolumeId>>,
        created_ms: u64,
    ) -> Self {
        Self { id: Text(id), group_name: group_name.into(), members, created_ms, claim: None }
    }
}

impl Record for VolumeGroupRecord {
    type Index = VolumeGroupIndex;
    const PREFIX: &'static str = "volume-group/";
    fn name(&self) -> String {
        self.id.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
}

/// Names of the records of groups by their own names and by their members.
#[derive(Debug, Default)]
pub struct VolumeGroupIndex {
    by_name: HashMap<String, BTreeSet<String>>,
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
}

impl VolumeGroupIndex {
    pub fn named(&self, name: &str) -> Option<&BTreeSet<String>> {
        self.by_name.get(name)
    }

    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }
}

impl Index<VolumeGroupRecord> for VolumeGroupIndex {
    fn follow(&mut self, before: Option<&VolumeGroupRecord>, after: Option<&VolumeGroupRecord>) {
        for (record, is_there) in [(before, false), (after, true)] {
            let Some(record) = record else { continue };
            follow(&mut self.by_name, record.group_name.clone(), record.name(), is_there);
            for member in &record.members {
                follow(&mut self.by_volume, member.0, record.name(), is_there);
            }
        }
    }
}
