//! Admission: one pure function, [`admit`], decides which replicas may connect, and as what.
//!
//! It implements the decision list of the scale-up document (`docs/index.md`) in the order that
//! keeps data safe. Foreign and retired replicas come first, so that they displace nothing; then
//! one replica for each ReplicaId; then the number of replicas; then their identity. Two kinds of
//! refusal mean that too many replicas are connecting. These raise an alarm: a replica was started
//! that should not run.
//!
//! Moves go beyond the list: the records move a replica to another pool. The newcomer carries the
//! ReplicaId of the replica whose place it takes, and is fed while that one serves, so that a move
//! costs no copy. It has a seat of its own ([`Seats::moving`]) and counts nowhere before it is
//! known. From then on the other is retired; so one ReplicaId never counts twice.

use quoin_types::ids::VolumeId;
use quoin_types::membership::{Member, Membership};

/// A replica that asks to be admitted, described by its own report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Applicant {
    pub volume: VolumeId,
    pub member: Member,
    /// The quorum flag of the replica.
    pub quorum: bool,
    /// Set if the replica holds no entry.
    pub empty: bool,
    /// The membership version that the replica has on media.
    pub membership_version: u64,
}

/// A replica that is connected already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connected {
    pub member: Member,
    pub quorum: bool,
}

/// Input of the decision.
#[derive(Clone, Copy, Debug)]
pub struct Seats<'a> {
    pub volume: VolumeId,
    pub membership: &'a Membership,
    /// Desired replication factor in force.
    pub drf: u8,
    pub connected: &'a [Connected],
    /// Newcomers that are fed beside the replica whose place they take.
    pub moving: &'a [Member],
}

/// The decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// On the known list: the replica counts once it has everything.
    Known {
        displaces: Option<Member>,
    },
    /// On the other list: the replica is rebuilt and counts nowhere.
    Unknown {
        displaces: Option<Member>,
    },
    /// On the known list from here on: only while the list has never been complete.
    Forming,
    Rejected(Refusal),
}

/// Reason for which a replica is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    #[error("it belongs to another volume")]
    Foreign,
    #[error("its GUID is retired: it was replaced or removed and misses data written since")]
    Retired,
    #[error("it knows a newer membership than this volume's")]
    NewerMembership,
    #[error("a replica with the same ReplicaId is connected")]
    SameReplica,
    #[error("too many replicas are connecting: all that are desired are known and connected")]
    AllConnected,
    #[error("too many replicas are connecting: as many as are desired are connected")]
    Full,
    #[error("the volume desires no more replicas than it has")]
    NotDesired,
}

impl Refusal {
    /// Returns true for refusals that raise an alarm: more replicas are started than the volume has
    /// room for.
    pub fn is_too_many(self) -> bool {
        matches!(self, Refusal::AllConnected | Refusal::Full)
    }
}

/// Decides on one replica. `seats.connected` does not contain it, unless it reconnects.
pub fn admit(seats: &Seats, applicant: &Applicant) -> Admission {
    use Admission::{Forming, Known, Rejected, Unknown};
    let membership = seats.membership;
    let member = applicant.member;
    if applicant.volume != seats.volume {
        return Rejected(Refusal::Foreign);
    }
    if membership.retired.contains(&member.guid) && !quoin_types::mutant::is("retired-admitted") {
        return Rejected(Refusal::Retired);
    }
    if applicant.membership_version > membership.version {
        return Rejected(Refusal::NewerMembership);
    }
    let known = |m: Member| membership.contains(m);
    let listed = |m: Member| membership.known.iter().any(|k| k.id == m.id);
    let moves = |m: Member| seats.moving.contains(&m);
    // One replica for each ReplicaId; a move is the exception.
    let others = || seats.connected.iter().filter(|c| c.member != member);
    let mut displaces = None;
    if let Some(rival) = others().find(|c| c.member.id == member.id)
        && !moves(member)
        && !moves(rival.member)
    {
        if !known(member) {
            return Rejected(Refusal::SameReplica);
        }
        displaces = Some(rival.member);
    }
    let counted = others().filter(|c| known(c.member)).count();
    let drf = usize::from(seats.drf.max(membership.rf));
    if counted >= drf && !moves(member) {
        return Rejected(Refusal::AllConnected);
    }
    let sitting = others().filter(|c| Some(c.member) != displaces && !moves(c.member)).count();
    let full = sitting >= drf && !quoin_types::mutant::is("let-in-when-full");
    if full && !moves(member) && displaces.is_none() {
        if !listed(member) {
            return Rejected(Refusal::Full);
        }
        let unlisted = |quorum: bool| {
            others().find(|c| !listed(c.member) && c.quorum == quorum).map(|c| c.member)
        };
        displaces = unlisted(false).or_else(|| unlisted(true));
        if displaces.is_none() {
            return Rejected(Refusal::Full);
        }
    }
    if known(member) {
        return Known { displaces };
    }
    if listed(member) {
        return Unknown { displaces };
    }
    if membership.known.len() < usize::from(membership.rf) {
        if !applicant.quorum {
            return Unknown { displaces };
        }
        if !membership.formed && applicant.empty {
            return Forming;
        }
    }
    if membership.rf < seats.drf || quoin_types::mutant::is("let-in-unasked") {
        return Unknown { displaces };
    }
    Rejected(Refusal::NotDesired)
}

#[cfg(test)]
mod tests;
