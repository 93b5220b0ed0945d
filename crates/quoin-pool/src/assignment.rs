//! Replicas that the controller assigns to this pool, and the pool's report of those it holds.
//!
//! [`quoin_replication::pool_host::holdings`] decides what is done with each replica. A replica that no
//! assignment lists is kept and reported: a controller restored from an old backup must not cost
//! data; it says Delete by name.

use bytes::Bytes;
use prost::Message;
use quoin_api::control;
use quoin_identity::convert::{id, membership};
pub use quoin_replication::pool_host::holdings::Phase;
use quoin_replication::recognition::PoolCounts;
use quoin_replication::replica::store::{CloneSource, ReplicaIdentity};
use quoin_types::{
    BLOCK_SIZE, Epoch, Membership, Position, ReplicaGuid, ReplicaId, VOLUME_BLOCKS_MAX, VolumeId,
};

use crate::facts::Space;
use crate::scrub::ScrubState;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    pub identity: ReplicaIdentity,
    pub blocks: u64,
    pub phase: Phase,
    /// The snapshot that a clone begins with.
    pub source: Option<CloneSource>,
    /// It is to take over the blocks that it shares with its source.
    pub flatten: bool,
    pub membership: Membership,
    /// Sessions that are not to be opened any more.
    pub fence: Fence,
}

/// Sessions up to this epoch have lost their grants; zero: none has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fence {
    pub epoch: Epoch,
    /// Open sessions are cut rather than given time to close.
    pub at_once: bool,
}

/// A larger record is not kept; a controller sends none.
const RECORD_BYTES_MAX: usize = 64 << 10;

/// Returns true if what a replica is to keep about its volume is news against what it keeps. A
/// controller with an older record than the one that was told last must not take that away.
pub fn is_news(kept: &[u8], told: &[u8]) -> bool {
    kept != told && generation(told) >= generation(kept)
}

/// Generation of the record in what a replica keeps about its volume; 0: it has none.
pub fn generation(kept: &[u8]) -> u64 {
    control::Keepsake::decode(kept).map_or(0, |keepsake| keepsake.generation)
}

/// Order to give the dead space of a replica back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReclaimOrder {
    pub guid: ReplicaGuid,
    pub request: u64,
}

impl ReclaimOrder {
    /// Reads the orders of a message. One that cannot be read is of no replica here.
    pub fn all(message: &control::PoolAssignment) -> Vec<Self> {
        let order = |order: &control::ReclaimOrder| {
            let guid = id("guid", &order.guid).ok()?;
            Some(Self { guid, request: order.request })
        };
        message.reclaims.iter().filter_map(order).filter(|order| order.request != 0).collect()
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Assignment(pub Vec<Wanted>);

/// Difference between two assignments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AssignmentChange {
    /// Replicas that are new or other than before.
    pub wanted: Vec<Wanted>,
    /// Replicas that are not assigned any more. They are kept until a deletion is ordered.
    pub removed: Vec<ReplicaGuid>,
}

/// One replica as reported.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaState {
    pub volume: VolumeId,
    pub replica: ReplicaId,
    pub guid: ReplicaGuid,
    /// created | open | closed | gone | damaged
    pub state: &'static str,
    pub quorum: bool,
    pub position: Position,
    pub stable: u64,
    pub used_bytes: u64,
    /// Known to be bad and not repaired yet.
    pub bad_blocks: u64,
    /// Bad copies that were replaced since the pool was opened.
    pub repaired: u64,
    /// It shares blocks with the source that it was made from.
    pub is_clone: bool,
    /// A target's lease on it lives.
    pub hears_target: bool,
    /// Generation of the record of its volume that is on media; 0: none.
    pub record_generation: u64,
    /// The highest epoch that it has promised, which is on media.
    pub promised: Epoch,
    /// The order to give space back that was carried out last.
    pub reclaimed: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PoolState {
    pub space: Space,
    /// Part of the used bytes that volumes and snapshots need.
    pub live_bytes: u64,
    /// Reason why it takes no more, or why its data are not there for long, and the way out; empty: there is none.
    pub warning: &'static str,
    /// The metadata ring has no room for another replica.
    pub ring_full: bool,
    /// Counts by which the controller recognises an older state of the disk.
    pub counts: PoolCounts,
    /// The next mark is on its way to the media: there will be a report to make.
    pub mark_rises: bool,
    /// A replica is being made, which takes moments: there will be a report to make.
    pub is_making: bool,
    pub scrub: ScrubState,
    pub replicas: Vec<ReplicaState>,
    /// Replicas that are not listed are as they were told last.
    pub is_partial: bool,
}

fn wanted(message: &control::ReplicaAssignment) -> Result<Wanted, String> {
    let phase = match message.phase.as_str() {
        "Init" => Phase::Init,
        "Clone" => Phase::Clone,
        "Recreate" => Phase::Recreate,
        "Keep" => Phase::Keep,
        "Delete" => Phase::Delete,
        other => return Err(format!("phase {other:?} is not known to this version")),
    };
    let source = match (&message.source, phase) {
        (Some(source), Phase::Clone) => Some(CloneSource {
            volume: id("volume of the source", &source.volume_id)?,
            snapshot: id("snapshot", &source.snapshot_id)?,
        }),
        // Without it the replica would begin empty, and count.
        (None, Phase::Clone) => return Err("the source of the clone is missing".into()),
        _ => None,
    };
    let blocks = message.size_bytes.div_ceil(BLOCK_SIZE as u64);
    if phase != Phase::Delete && !(1..=VOLUME_BLOCKS_MAX).contains(&blocks) {
        return Err(format!("a size of {} bytes is out of range", message.size_bytes));
    }
    let mut spec = message.volume_spec.as_ref().map(Message::encode_to_vec).unwrap_or_default();
    if !message.record.is_empty() && message.record.len() <= RECORD_BYTES_MAX {
        let (record, generation) = (message.record.clone(), message.generation);
        // Two messages one after the other are one message with the fields of both.
        spec.extend(control::Keepsake { record, generation }.encode_to_vec());
    }
    Ok(Wanted {
        identity: ReplicaIdentity {
            volume: id("volume", &message.volume_id)?,
            replica: id("replica", &message.replica_id)?,
            guid: id("guid", &message.guid)?,
            volume_spec: Bytes::from(spec),
        },
        blocks,
        phase,
        source,
        flatten: message.flatten,
        membership: match &message.membership {
            Some(m) => membership(m)?,
            None if phase == Phase::Delete => Membership::default(),
            None => return Err("the membership is missing".into()),
        },
        fence: Fence { epoch: Epoch(message.fence_epoch), at_once: message.fence_at_once },
    })
}

impl Assignment {
    /// Replicas that cannot be understood are left out, each with its reason: the others go on.
    pub fn from_message(message: &control::PoolAssignment) -> (Self, Vec<String>) {
        let (mut taken, mut refused) = (Vec::new(), Vec::new());
        for replica in &message.replicas {
            match wanted(replica) {
                Ok(wanted) => taken.push(wanted),
                Err(reason) => refused
                    .push(format!("replica {} of {}: {reason}", replica.guid, replica.volume_id)),
            }
        }
        (Assignment(taken), refused)
    }
}

impl AssignmentChange {
    /// See [`Assignment::from_message`]: a former assignment of a replica does not hold any more once
    /// a later one for it cannot be understood.
    pub fn from_message(message: &control::PoolAssignment) -> (Self, Vec<String>) {
        let (taken, mut refused) = Assignment::from_message(message);
        let mut removed = Vec::new();
        for guid in &message.removed {
            match id("guid", guid) {
                Ok(guid) => removed.push(guid),
                Err(reason) => refused.push(format!("removed replica: {reason}")),
            }
        }
        let is_taken = |guid: &ReplicaGuid| taken.0.iter().any(|w| w.identity.guid == *guid);
        let named = message.replicas.iter().filter_map(|replica| id("guid", &replica.guid).ok());
        removed.extend(named.filter(|guid| !is_taken(guid)));
        (Self { wanted: taken.0, removed }, refused)
    }
}

impl Assignment {
    /// Takes a change in.
    pub fn apply(&mut self, change: &AssignmentChange) {
        let is_same = |one: &Wanted, other: &Wanted| one.identity.guid == other.identity.guid;
        if !change.removed.is_empty() {
            self.0.retain(|wanted| !change.removed.contains(&wanted.identity.guid));
        }
        for wanted in &change.wanted {
            match self.0.iter_mut().find(|known| is_same(known, wanted)) {
                Some(known) => known.clone_from(wanted),
                None => self.0.push(wanted.clone()),
            }
        }
    }
}

impl ReplicaState {
    pub fn to_message(&self) -> control::ReplicaReport {
        control::ReplicaReport {
            replica_id: self.replica.to_string(),
            guid: self.guid.to_string(),
            volume_id: self.volume.to_string(),
            state: self.state.into(),
            quorum: self.quorum,
            position_epoch: self.position.epoch.0,
            position_lsn: self.position.lsn.0,
            stable_lsn: self.stable,
            used_bytes: self.used_bytes,
            bad_blocks: self.bad_blocks,
            repaired: self.repaired,
            is_clone: self.is_clone,
            hearing: match self.hears_target {
                true => control::replica_report::Hearing::Hears.into(),
                false => control::replica_report::Hearing::Silent.into(),
            },
            record_generation: self.record_generation,
            promised_epoch: self.promised.0,
            reclaimed: self.reclaimed,
        }
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::SnapshotId;

    use super::*;

    fn message() -> control::ReplicaAssignment {
        control::ReplicaAssignment {
            volume_id: VolumeId(1).to_string(),
            replica_id: ReplicaId(2).to_string(),
            guid: ReplicaGuid(3).to_string(),
            size_bytes: 1 << 20,
            phase: "Init".into(),
            membership: Some(control::Membership {
                version: 1,
                rf: 3,
                cf: 2,
                drf: 3,
                known: vec![control::Member {
                    replica_id: ReplicaId(2).to_string(),
                    guid: ReplicaGuid(3).to_string(),
                }],
                retired: vec![],
                formed: false,
            }),
            volume_spec: None,
            ..Default::default()
        }
    }

    #[test]
    fn an_assignment_comes_through_in_the_cores_types() {
        let (assignment, refused) = Assignment::from_message(&control::PoolAssignment {
            replicas: vec![message()],
            ..Default::default()
        });
        assert_eq!(refused, Vec::<String>::new());
        let wanted = &assignment.0[0];
        assert_eq!((wanted.identity.guid, wanted.blocks), (ReplicaGuid(3), 256));
        assert_eq!(wanted.membership.known[0].id, ReplicaId(2));
        assert_eq!(wanted.fence, Fence::default());
        let source = control::CloneSource {
            volume_id: VolumeId(9).to_string(),
            snapshot_id: SnapshotId(8).to_string(),
        };
        let clone = control::ReplicaAssignment {
            phase: "Clone".into(),
            source: Some(source.clone()),
            ..message()
        };
        let clone = super::wanted(&clone).unwrap();
        let of = CloneSource { volume: VolumeId(9), snapshot: SnapshotId(8) };
        assert_eq!((clone.phase, clone.source), (Phase::Clone, Some(of)));
        let kept =
            control::ReplicaAssignment { phase: "Keep".into(), source: Some(source), ..message() };
        assert_eq!(super::wanted(&kept).unwrap().source, None, "it was made before");
        let fenced =
            control::ReplicaAssignment { fence_epoch: 7, fence_at_once: true, ..message() };
        let fenced = super::wanted(&fenced).unwrap().fence;
        assert_eq!(fenced, Fence { epoch: Epoch(7), at_once: true });
    }

    #[test]
    fn an_older_record_does_not_take_the_place_of_a_newer_one() {
        let told = |generation, record: &[u8]| {
            let name = control::VolumeSpec { name: "db".into(), ..Default::default() };
            let message = control::ReplicaAssignment {
                volume_spec: Some(name),
                record: record.to_vec(),
                generation,
                ..message()
            };
            wanted(&message).unwrap().identity.volume_spec
        };
        let (second, third) = (told(2, b"two"), told(3, b"three"));
        assert!(is_news(&second, &third) && !is_news(&third, &second) && !is_news(&third, &third));
        assert!(is_news(&told(2, b"2"), &second), "the same number says nothing of its age");
        let none = told(0, b"");
        assert!(is_news(&none, &second) && !is_news(&second, &none));
        let kept = control::VolumeSpec::decode(&third[..]).unwrap();
        assert_eq!(kept.name, "db", "who knows of no record reads the spec as ever");
        assert_eq!(control::Keepsake::decode(&third[..]).unwrap().record, b"three");
    }

    #[test]
    fn changes_lead_to_the_same_as_whole_lists() {
        let named = |guid: u128, phase: &str| control::ReplicaAssignment {
            guid: ReplicaGuid(guid).to_string(),
            phase: phase.into(),
            ..message()
        };
        let whole = |replicas: &[control::ReplicaAssignment]| {
            let replicas = replicas.to_vec();
            let message = control::PoolAssignment { replicas, ..Default::default() };
            Assignment::from_message(&message).0
        };
        let mut assignment = whole(&[named(3, "Init"), named(4, "Keep"), named(5, "Keep")]);
        let (change, refused) = AssignmentChange::from_message(&control::PoolAssignment {
            replicas: vec![named(3, "Keep"), named(6, "Recreate"), named(5, "Dance")],
            removed: vec![ReplicaGuid(4).to_string(), "xyz".into()],
            partial: true,
            ..Default::default()
        });
        assert_eq!(refused.len(), 2, "{refused:?}");
        assignment.apply(&change);
        assert_eq!(assignment, whole(&[named(3, "Keep"), named(6, "Recreate")]));
    }

    #[test]
    fn one_replica_that_cannot_be_understood_does_not_hold_up_the_others() {
        let odd = [
            control::ReplicaAssignment { phase: "Dance".into(), ..message() },
            control::ReplicaAssignment { guid: "xyz".into(), ..message() },
            control::ReplicaAssignment { size_bytes: u64::MAX, ..message() },
            control::ReplicaAssignment { size_bytes: 0, ..message() },
            control::ReplicaAssignment { membership: None, ..message() },
            control::ReplicaAssignment { phase: "Clone".into(), ..message() },
        ];
        for odd in odd {
            let (assignment, refused) = Assignment::from_message(&control::PoolAssignment {
                replicas: vec![odd, message()],
                ..Default::default()
            });
            assert_eq!((assignment.0.len(), refused.len()), (1, 1), "{refused:?}");
        }
    }
}
