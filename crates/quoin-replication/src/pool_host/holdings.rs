//! Steps of a pool for one replica of its assignment.
//!
//! **A GUID is born once**: a replica is created only where its volume is formed or it is made anew,
//! and never under a GUID that was deleted here. A replica that no assignment lists is kept. One
//! that is listed under another volume or another replica's id is left as it is: an order that was
//! meant for something else must cost no data.

use quoin_types::mutant;

use crate::replica::store::ReplicaIdentity;

/// Wish of the controller for a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Create if missing, quorum on: the volume is being formed.
    Init,
    /// Create if missing, quorum on, with the content of a snapshot: the volume is being formed.
    Clone,
    /// Create if missing, quorum off: to be rebuilt.
    Recreate,
    Keep,
    Delete,
}

/// Step for a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// `quorum`: it counts at once.
    Create {
        quorum: bool,
    },
    /// As `Create`, with the content of a snapshot; counts at once.
    Clone,
    /// It is there, and keeps what its volume is by now.
    Describe,
    Delete,
    /// It is not here, and that is reported.
    Absent,
    /// Another replica has this GUID: nothing of this order is done to it.
    OfAnother,
}

/// `held`: the replica that the pool has under this GUID; `retired`: one was deleted here under it.
pub fn step(
    phase: Phase,
    wanted: &ReplicaIdentity,
    held: Option<&ReplicaIdentity>,
    retired: bool,
) -> Step {
    let Some(held) = held else {
        return match phase {
            Phase::Init if !retired => Step::Create { quorum: true },
            Phase::Clone if !retired => Step::Clone,
            Phase::Recreate if !retired => Step::Create { quorum: false },
            _ => Step::Absent,
        };
    };
    let same = (held.volume, held.replica) == (wanted.volume, wanted.replica);
    match phase {
        _ if !same && !mutant::is("deleted-by-guid-alone") => Step::OfAnother,
        Phase::Delete => Step::Delete,
        Phase::Init | Phase::Clone | Phase::Recreate | Phase::Keep => Step::Describe,
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};

    use super::*;

    const PHASES: [Phase; 5] =
        [Phase::Init, Phase::Clone, Phase::Recreate, Phase::Keep, Phase::Delete];

    fn identity(volume: u128, replica: u128) -> ReplicaIdentity {
        ReplicaIdentity {
            volume: VolumeId(volume),
            replica: ReplicaId(replica),
            guid: ReplicaGuid(3),
            ..ReplicaIdentity::default()
        }
    }

    #[test]
    fn a_guid_is_born_once_and_only_where_it_is_to_be() {
        let wanted = identity(1, 2);
        let missing = |phase, retired| step(phase, &wanted, None, retired);
        assert_eq!(missing(Phase::Init, false), Step::Create { quorum: true });
        assert_eq!(missing(Phase::Clone, false), Step::Clone);
        assert_eq!(missing(Phase::Recreate, false), Step::Create { quorum: false });
        assert_eq!(missing(Phase::Keep, false), Step::Absent);
        assert_eq!(missing(Phase::Delete, false), Step::Absent);
        for phase in PHASES {
            assert_eq!(missing(phase, true), Step::Absent, "{phase:?}");
        }
    }

    #[test]
    fn what_is_held_is_described_or_deleted() {
        let held = identity(1, 2);
        for phase in [Phase::Init, Phase::Clone, Phase::Recreate, Phase::Keep] {
            assert_eq!(step(phase, &identity(1, 2), Some(&held), false), Step::Describe);
        }
        assert_eq!(step(Phase::Delete, &identity(1, 2), Some(&held), false), Step::Delete);
    }

    #[test]
    fn an_order_for_another_volume_or_replica_is_not_carried_out_by_its_guid() {
        let held = identity(1, 2);
        for other in [identity(9, 2), identity(1, 9)] {
            for phase in PHASES {
                assert_eq!(step(phase, &other, Some(&held), false), Step::OfAnother, "{phase:?}");
            }
        }
    }
}
