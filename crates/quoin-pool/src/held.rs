//! All that a pool keeps about its replicas, as the controller is told it when records have to be
//! made from pools: no other source contradicts the pools, so nothing is left out or made up.

use quoin_api::control::{self, Holding, PoolHoldings};
use quoin_identity::convert::{member_messages, membership_message};
use quoin_replication::replica::store::{ReplicaIdentity, ReplicaMeta, StoreState};
use quoin_types::entry::Rule;
use quoin_types::message::SnapshotInfo;
use quoin_types::{Incarnation, Membership, ReplicaGuid};

/// One replica with everything durable about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Held {
    pub identity: ReplicaIdentity,
    pub meta: ReplicaMeta,
    pub state: StoreState,
    /// Snapshots of users.
    pub snapshots: Vec<SnapshotInfo>,
}

/// Replicas that a pool holds, and those that were deleted there.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Holdings {
    pub replicas: Vec<Held>,
    pub deleted: Vec<ReplicaGuid>,
}

/// Replicas in one message: small enough for the largest of them.
const REPLICAS_A_PIECE: usize = 64;
/// GUIDs in one message.
const DELETED_A_PIECE: usize = 1 << 14;

impl Holdings {
    /// All of it as messages of bounded size; at least one.
    pub fn pieces(&self, pool: &str, pool_id: &str, request: u64) -> Vec<PoolHoldings> {
        let piece = || PoolHoldings {
            pool: pool.to_owned(),
            request,
            pool_id: pool_id.to_owned(),
            ..PoolHoldings::default()
        };
        let mut pieces = vec![piece()];
        for replicas in self.replicas.chunks(REPLICAS_A_PIECE) {
            let replicas = replicas.iter().map(Held::message).collect();
            pieces.push(PoolHoldings { replicas, ..piece() });
        }
        for deleted in self.deleted.chunks(DELETED_A_PIECE) {
            let deleted = deleted.iter().flat_map(|guid| guid.0.to_le_bytes()).collect();
            pieces.push(PoolHoldings { deleted, ..piece() });
        }
        pieces
    }
}

impl Held {
    fn message(&self) -> Holding {
        let Self { identity, meta, state, snapshots } = self;
        let view = state.last_view.as_ref().map(|(_, view)| view);
        let known = meta.membership != Membership::default();
        Holding {
            volume_id: identity.volume.to_string(),
            replica_id: identity.replica.to_string(),
            guid: identity.guid.to_string(),
            quorum: meta.quorum,
            damaged: meta.damaged,
            promised_epoch: meta.promised.0,
            promised_incarnation: match meta.promised_incarnation {
                Incarnation(0) => String::new(),
                incarnation => incarnation.to_string(),
            },
            position_epoch: state.position.epoch.0,
            position_lsn: state.position.lsn.0,
            blocks: state.volume_blocks,
            spec: identity.volume_spec.to_vec(),
            membership: known.then(|| membership_message(&meta.membership)),
            view: view.map(|view| rule(&view.rule)),
            joint: view.and_then(|view| view.joint.as_ref()).map(rule),
            snapshots: snapshots.iter().flat_map(snapshot).collect(),
        }
    }
}

fn snapshot(snapshot: &SnapshotInfo) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&snapshot.id.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&snapshot.lsn.0.to_le_bytes());
    bytes[24..].copy_from_slice(&snapshot.blocks.to_le_bytes());
    bytes
}

fn rule(rule: &Rule) -> control::Membership {
    control::Membership {
        version: rule.membership_version,
        rf: rule.rf.into(),
        cf: rule.cf.into(),
        known: member_messages(&rule.known),
        ..control::Membership::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::ids::SnapshotId;
    use quoin_types::{Epoch, Lsn, Member, Position, ReplicaId, View, VolumeId};

    #[test]
    fn everything_that_is_held_is_told_in_pieces_of_bounded_size() {
        let member = Member { id: ReplicaId(2), guid: ReplicaGuid(3) };
        let rule = Rule { membership_version: 4, rf: 1, cf: 1, known: vec![member] };
        let view = View { rule: rule.clone(), joint: Some(rule), ..View::default() };
        let held = Held {
            identity: ReplicaIdentity {
                volume: VolumeId(1),
                replica: ReplicaId(2),
                guid: ReplicaGuid(3),
                volume_spec: b"spec"[..].into(),
            },
            meta: ReplicaMeta { promised: Epoch(9), quorum: true, ..ReplicaMeta::default() },
            state: StoreState {
                position: Position { epoch: Epoch(8), lsn: Lsn(7) },
                last_view: Some((Lsn(6), view)),
                volume_blocks: 5,
                ..StoreState::default()
            },
            snapshots: vec![SnapshotInfo {
                id: SnapshotId(0x5a),
                lsn: Lsn(4),
                hidden: false,
                blocks: 3,
            }],
        };
        let deleted: Vec<_> = (0..40_000u128).map(ReplicaGuid).collect();
        let holdings = Holdings { replicas: vec![held; 150], deleted };
        let pieces = holdings.pieces("pool-a", "id", 11);
        assert!(pieces.iter().all(|p| (p.pool.as_str(), p.request) == ("pool-a", 11)));
        assert!(pieces.iter().all(|p| p.replicas.len() <= 64 && p.deleted.len() <= 1 << 18));
        let told: Vec<_> = pieces.iter().flat_map(|p| &p.replicas).collect();
        assert_eq!(told.len(), 150);
        assert_eq!((told[0].promised_epoch, told[0].position_lsn, told[0].blocks), (9, 7, 5));
        assert_eq!(told[0].snapshots.len(), 32);
        assert_eq!((told[0].snapshots[0], told[0].snapshots[16]), (0x5a, 4));
        assert_eq!(told[0].joint.as_ref().unwrap().known[0].guid, ReplicaGuid(3).to_string());
        assert!(told[0].membership.is_none() && told[0].promised_incarnation.is_empty());
        assert_eq!(pieces.iter().map(|p| p.deleted.len()).sum::<usize>(), 40_000 * 16);
        assert_eq!(Holdings::default().pieces("pool-a", "id", 1).len(), 1, "nothing is told too");
    }
}
