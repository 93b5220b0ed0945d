//! The records: what the cluster is meant to be, and the little that must be remembered of
//! what it was. JSON with a format number each, so a later Quoin reads an earlier one's.
//!
//! A volume's record holds its membership, epoch, owner and replicas together, because they
//! change together: a compare-and-swap of one record is the whole of fencing, of a replacement
//! and of an attachment (RF, CF and the known list are never seen half changed). What pools
//! and nodes report each second is not here: it is told anew after any restart.

mod attachment;
mod concerned;
mod event;
mod fence;
mod grants;
mod group;
mod member;
mod membership;
mod mirror;
mod node;
mod peer;
mod pool;
#[cfg(test)]
pub(crate) mod recorded;
mod replica;
mod replica_changes;
mod revert;
mod schedule;
mod snapshot;
mod spec;
mod term;
mod used;
mod verification;
mod volume;
mod volume_index;

use std::fmt::Display;
use std::str::FromStr;

use quoin_types::VolumeId;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use attachment::{AttachmentRecord, Replay, Sharing};
pub use concerned::{Concerned, Nodes};
pub use event::EventRecord;
pub use fence::{Block, FenceRecord, NoBlock};
pub use grants::{ANY_NODE, Grants};
pub use group::{GroupIndex, GroupMember, GroupPhase, GroupRecord};
pub use member::{MemberOfCluster, TokenRecord};
pub use membership::{MemberRecord, MembershipRecord};
pub use mirror::{
    ComparisonState, DifferingRange, GroupClaim, MirrorComparison, MirrorIndex, MirrorRecord,
    MirrorSettings, VolumeGroupIndex, VolumeGroupRecord, VolumeMirror,
};
pub use node::NodeRecord;
pub use peer::{Introduction, MirrorAddressRecord, PeerLimits, PeerRecord};
pub use pool::{CordonRecord, PoolRecord};
pub use replica::{Cause, Discarded, ReplicaPhase, ReplicaRecord};
pub use revert::{RevertIndex, RevertPhase, RevertRecord};
pub use schedule::{ScheduleIndex, ScheduleRecord};
pub use snapshot::{Cut, SnapshotIndex, SnapshotName, SnapshotPhase, SnapshotRecord};
pub use spec::Spec;
pub use term::{MoveRecord, MoveState, RecoveryRecord, SupersededRecord, TermRecord};
pub use used::Use;
pub use verification::{FindingRecord, ReplicaResult, VerifyCounts, VerifyRecord, VerifyState};
pub use volume::{
    BaseUse, KEEPSAKE_BYTES_MAX, NameRecord, Opened, RETIRED_KEPT_MAX, SourceRecord, VolumePhase,
    VolumeRecord,
};
pub use volume_index::{Rebuilds, VolumeIndex};

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

/// Lookup data derived from all records of a kind, so that a reader need not visit them all.
pub trait Index<R>: Default + Send + Sync {
    /// A record was made (`before` is `None`), changed or removed (`after` is `None`).
    fn follow(&mut self, before: Option<&R>, after: Option<&R>);
}

impl<R> Index<R> for () {
    fn follow(&mut self, _: Option<&R>, _: Option<&R>) {}
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

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Any other format is refused; format 1 was that of builds before the first release. It is raised where a build that does not know of a change would do
/// harm: with a field whose absence means something else than what the builds before did, with a
/// new value of an enumeration, with a new meaning. A field that may be absent is added with a
/// default; a build that does not know it loses it with its next change of that record.
pub const FORMAT: u32 = 2;

#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    format: u32,
    record: T,
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

pub fn encode<R: Record>(record: &R) -> Vec<u8> {
    serde_json::to_vec(&Envelope { format: FORMAT, record }).expect("records are plain data")
}

pub fn decode<R: Record>(bytes: &[u8]) -> Result<R, String> {
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
