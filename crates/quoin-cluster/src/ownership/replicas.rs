//! Replicas of a volume that come and leave, and what its target is told of them.

use quoin_types::{Desired, Member, Newcomer, ReplicaId};

use crate::Refusal;
use crate::records::{Cause, ReplicaPhase, ReplicaRecord, Text, VolumePhase, VolumeRecord};

/// The desired membership as the target of the volume is told it. A target cannot rebuild a newcomer
/// that its pool has not made yet.
pub fn desired(volume: &VolumeRecord) -> Desired {
    let made = volume.replicas.iter().filter(|r| r.phase == ReplicaPhase::Keep);
    let (known, new): (Vec<_>, Vec<_>) = made.partition(|replica| volume.is_known(replica));
    let newcomer = |r: &&ReplicaRecord| Newcomer {
        member: r.member(),
        beside: volume.replicas.iter().any(|other| other.id == r.id && volume.is_known(other)),
    };
    Desired {
        drf: volume.membership.drf,
        cf: volume.desired_cf(),
        newcomers: new.iter().map(newcomer).collect(),
        leaving: known.iter().filter(|r| r.leaving).map(|r| r.member()).collect(),
        version: volume.membership.version,
    }
}

/// Checks that the replicas of the volume can be changed.
///
/// # Errors
/// It is not there yet, or not any more.
pub fn check_ready(volume: &VolumeRecord) -> Result<(), Refusal> {
    match volume.phase {
        VolumePhase::Ready | VolumePhase::Retained => Ok(()),
        VolumePhase::Pending => Err(Refusal::Busy(format!(
            "volume {:?} is being created; try again when it is ready",
            volume.spec.name
        ))),
        VolumePhase::Deleting => Err(Refusal::missing("volume", volume.id.0.to_string())),
    }
}

/// A replica that is to be made in a pool.
pub fn newcomer(member: Member, pool: String, cause: Cause, placed: bool) -> ReplicaRecord {
    let (id, guid) = (Text(member.id), Text(member.guid));
    ReplicaRecord { id, guid, pool, phase: ReplicaPhase::Recreate, leaving: false, placed, cause }
}

/// Gives up a newcomer; its pool deletes it. A copy under another id has the same GUID.
pub fn discard(volume: &mut VolumeRecord, newcomer: Member) {
    if let Some(at) = volume.replicas.iter().position(|replica| replica.member() == newcomer) {
        volume.discard(at);
    }
}

/// Names replicas that are to leave: RF and DRF fall by each. A newcomer that is not known yet is
/// given up at once. Returns words; `None`: nothing changes.
///
/// # Refusals
/// Nothing would be left, or not all that stay are in sync.
pub fn leave(
    volume: &mut VolumeRecord,
    ids: &[ReplicaId],
    in_sync: &[ReplicaId],
) -> Result<Option<String>, Refusal> {
    check_ready(volume)?;
    let name = volume.spec.name.clone();
    let mut said = Vec::new();
    for id in ids {
        let here: Vec<ReplicaRecord> =
            volume.replicas.iter().filter(|r| r.id.0 == *id).cloned().collect();
        if here.is_empty() {
            return Err(Refusal::missing("replica", format!("{id} of volume {name:?}")));
        }
        if here.iter().any(|r| r.leaving) {
            continue;
        }
        // A newcomer counts nowhere: it is given up.
        let (known, newcomers): (Vec<_>, Vec<_>) =
            here.iter().cloned().partition(|r| volume.is_known(r));
        for newcomer in newcomers {
            discard(volume, newcomer.member());
        }
        if known.is_empty() && volume.known_guid(*id).is_some() {
            // Lost in its pool, and what was to come in its place is given up with it: the known
            // entry leaves all the same, named by the GUID that is on the list.
            let lost = here[0].clone();
            let guid = volume.known_guid(*id).map_or(lost.guid, Text);
            volume.replicas.push(ReplicaRecord { guid, phase: ReplicaPhase::Keep, ..lost });
        }
        for replica in volume.replicas.iter_mut().filter(|r| r.id.0 == *id) {
            replica.leaving = true;
        }
        volume.membership.drf = volume.membership.drf.saturating_sub(1);
        let (pool, what) = (&here[0].pool, if known.is_empty() { "given up" } else { "leaves" });
        said.push(format!("replica {id} on pool {pool} {what}"));
    }
    if said.is_empty() {
        return Ok(None);
    }
    let leaving = |id: ReplicaId| volume.replicas.iter().any(|r| r.id.0 == id && r.leaving);
    let stay: Vec<ReplicaId> =
        volume.membership.known.iter().map(|m| m.id.0).filter(|id| !leaving(*id)).collect();
    if stay.is_empty() {
        return Err(Refusal::Precondition(format!(
            "volume {name:?} would have no replica left; to be rid of it, delete it"
        )));
    }
    let some_known_leave = stay.len() < volume.membership.known.len();
    let behind: Vec<String> =
        stay.iter().filter(|id| !in_sync.contains(id)).map(ToString::to_string).collect();
    if some_known_leave && !behind.is_empty() {
        return Err(Refusal::Precondition(format!(
            "replicas of volume {name:?} leave only while all that stay are in sync; not in sync: \
             {}",
            behind.join(", ")
        )));
    }
    volume.membership.drf = volume.membership.drf.max(stay.len() as u8);
    Ok(Some(format!("{}; {} stay", said.join(", "), stay.len())))
}
