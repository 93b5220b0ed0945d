//! State of a target and its replicas, for reports.

use std::time::Duration;

use super::verdict::Verdict;
use super::verify::VerifyReport;
use super::{Link, Phase, Primary, WaitReason};
use quoin_types::ids::{Epoch, Lsn, Position, SnapshotId};
use quoin_types::membership::{Desired, Member, Membership};
use quoin_types::message::SnapshotInfo;

/// State of a replica, for status reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaStanding {
    Disconnected,
    Opening,
    CatchingUp,
    Rebuilding,
    InSync,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicaStatus {
    pub member: Member,
    pub standing: ReplicaStanding,
    pub applied: Lsn,
    pub durable: Lsn,
    pub rebuilt_bytes: u64,
    pub rebuild_total_bytes: u64,
    /// Average time to apply a write; `None`: unknown.
    pub write_took: Option<Duration>,
    /// Set if that is much longer than the others take.
    pub slow: bool,
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct PrimaryStatus {
    pub epoch: Epoch,
    pub serving: bool,
    pub stopped: bool,
    pub waiting: String,
    /// Kind of the wait; empty: none.
    pub waiting_kind: &'static str,
    /// The membership that was granted with the epoch, without the retired.
    pub granted: Membership,
    /// The membership in force, without the retired.
    pub membership: Membership,
    /// Version of the options in force: no target answers by older ones any more. 0: not known, as it
    /// does not serve.
    pub options_version: u64,
    /// The newest desired membership that it received.
    pub desired: Desired,
    /// Replicas that the open waits for: they may know of a change of membership that the record
    /// lacks.
    pub silent: Vec<Member>,
    pub last: Position,
    /// No entry behind it changed the content; 0: the volume does not serve.
    pub content_lsn: Lsn,
    pub commit: Lsn,
    pub stable: Lsn,
    pub volume_blocks: u64,
    pub replicas: Vec<ReplicaStatus>,
    /// The verification under way, or the last one.
    pub verify: Option<VerifyReport>,
}

/// Copies a membership without its retired GUIDs: a status is made often, and there may be
/// thousands of them.
pub(super) fn without_retired(membership: &Membership) -> Membership {
    let Membership { version, rf, cf, drf, formed, .. } = *membership;
    Membership {
        version,
        rf,
        cf,
        drf,
        known: membership.known.clone(),
        retired: Vec::new(),
        formed,
    }
}

impl Primary {
    /// Returns a user's snapshot, if the volume has it.
    pub fn snapshot(&self, id: SnapshotId) -> Option<SnapshotInfo> {
        self.history.snapshots.iter().find(|s| s.id == id && !s.hidden).copied()
    }

    fn silent(&self) -> Vec<Member> {
        match self.verdict() {
            Verdict::MayHaveChanged(silent) => silent,
            _ => Vec::new(),
        }
    }

    pub fn status(&self) -> PrimaryStatus {
        let replicas = self.members.peers.iter().map(|peer| {
            let (rebuilt_bytes, rebuild_total_bytes) =
                peer.rebuild.as_ref().map_or((0, 0), |r| r.progress(self.history.blocks));
            let writes = self.members.slow.of(peer.member);
            ReplicaStatus {
                member: peer.member,
                standing: match peer.link {
                    Link::Down | Link::Connecting => ReplicaStanding::Disconnected,
                    Link::Opening | Link::Answered | Link::Truncating => ReplicaStanding::Opening,
                    Link::Rebuilding => ReplicaStanding::Rebuilding,
                    Link::Fed if self.commit.views.counts(peer.member) => ReplicaStanding::InSync,
                    Link::Fed => ReplicaStanding::CatchingUp,
                },
                applied: peer.progress.applied,
                durable: peer.progress.durable,
                rebuilt_bytes,
                rebuild_total_bytes,
                write_took: writes.map(|(took, _)| took),
                slow: writes.is_some_and(|(_, slow)| slow),
            }
        });
        PrimaryStatus {
            epoch: self.opening.epoch,
            serving: self.phase == Phase::Serving,
            stopped: self.phase == Phase::Stopped,
            waiting: self
                .announced
                .waits_for()
                .map(|reason| reason.to_string())
                .unwrap_or_default(),
            waiting_kind: self.announced.waits_for().map_or("", WaitReason::kind),
            options_version: self.options_in_force(),
            granted: self.opening.granted.clone(),
            membership: without_retired(&self.members.membership),
            desired: self.members.desired.clone(),
            silent: match self.phase {
                Phase::Opening { .. } => self.silent(),
                _ => Vec::new(),
            },
            last: self.history.last,
            content_lsn: match self.phase {
                Phase::Serving => self.history.content,
                _ => Lsn::ZERO,
            },
            commit: self.commit.lsn,
            stable: self.commit.stable,
            volume_blocks: self.history.blocks,
            replicas: replicas.collect(),
            verify: self.verify_report(),
        }
    }
}
