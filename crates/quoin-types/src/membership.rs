//! The replicas that may count: the known list, its factors, and the arithmetic of quorums.

use bytes::{BufMut, BytesMut};

use crate::codec::{Malformed, Reader, Writer};
use crate::entry::{decode_members, encode_members};
use crate::ids::{ReplicaGuid, ReplicaId};
use crate::mutant;

/// One replica, as the known list names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Member {
    pub id: ReplicaId,
    pub guid: ReplicaGuid,
}

/// Durability at which a write is acknowledged: held by the operating systems of CF replicas, or on
/// their media.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Durability {
    #[default]
    Cache,
    Media,
}

/// The control plane's record of a volume's membership, changed only by compare-and-swap.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Membership {
    pub version: u64,
    /// Replication factor; `known.len() <= rf` always (KnownAtMostRF).
    pub rf: u8,
    /// Consistency factor: the number of counted replicas that an acknowledgement needs.
    pub cf: u8,
    /// Desired replication factor.
    pub drf: u8,
    pub known: Vec<Member>,
    /// GUIDs that never come back (RetiredNeverBack); bounded by [`RETIRED_MAX`].
    pub retired: Vec<ReplicaGuid>,
    /// Set once every pool of the first known list has answered "created".
    pub formed: bool,
}

/// The membership that the control plane wants; sent complete with each change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Desired {
    /// Desired replication factor; a value below RF requests no change.
    pub drf: u8,
    /// Consistency factor. 0 selects the default of the formula when RF changes, and otherwise
    /// leaves CF unchanged.
    pub cf: u8,
    pub newcomers: Vec<Newcomer>,
    /// Known replicas that are to leave; RF decreases by one for each.
    pub leaving: Vec<Member>,
    /// Version of the record's membership when this was written; 0: unknown. The control plane
    /// raises the record's version when it removes a newcomer, so a joint View that names this
    /// newcomer never comes to rule.
    pub version: u64,
}

/// A replica that the records name and that is not known yet. With a listed ReplicaId it takes the
/// place of the listed replica (replaced or moved); with another one it is an addition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Newcomer {
    pub member: Member,
    /// Set for a move: the records keep the replica whose place the newcomer takes. The newcomer is
    /// fed while that replica is connected, and that replica stays known until the newcomer is.
    pub beside: bool,
}

impl Desired {
    /// Returns the consistency factor after a change to this RF.
    pub fn cf_of(&self, rf: u8) -> u8 {
        if self.cf == 0 { default_cf(rf) } else { self.cf.min(rf) }
    }

    pub fn newcomer(&self, member: Member) -> Option<&Newcomer> {
        self.newcomers.iter().find(|n| n.member == member)
    }
}

/// Limit of replicas of one volume.
pub const REPLICAS_MAX: usize = 16;
/// Limit of retired GUIDs kept per volume.
pub const RETIRED_MAX: usize = 4096;

/// Default consistency factor: floor(RF/2)+1.
pub fn default_cf(rf: u8) -> u8 {
    rf / 2 + 1
}

/// Number of known replicas that an open needs: max(CF, RF-CF+1).
pub fn open_quorum(rf: u8, cf: u8) -> u8 {
    cf.max(rf - cf + 1)
}

impl Membership {
    pub fn contains(&self, member: Member) -> bool {
        self.known.contains(&member)
    }

    pub fn open_quorum(&self) -> usize {
        usize::from(open_quorum(self.rf, self.cf))
    }

    /// Returns true if the change to the next membership withdraws this newcomer: it was to take
    /// the place of a replica that leaves without a successor. Such a newcomer has no place any
    /// more, and nothing else would remove it from the records.
    pub fn withdraws(&self, next: &Self, newcomer: Member) -> bool {
        let is_listed = |m: &Self| m.known.iter().any(|known| known.id == newcomer.id);
        is_listed(self) && !is_listed(next) && !mutant::is("newcomer-kept-without-a-place")
    }

    /// Returns the forced change (`docs/replication.md`): the known replicas that are kept become
    /// the whole list. The others are retired, and so are the `silent` ones, which may know of a
    /// change that this record lacks. The version skips the one under which that change may have
    /// ruled.
    ///
    /// The replica that holds the most is not known. So the first open must hear all of those that
    /// are kept, which CF equal to RF enforces; the target then changes CF to the desired one.
    #[must_use]
    pub fn reduced_to(&self, keep: impl Fn(&Member) -> bool, silent: &[ReplicaGuid]) -> Self {
        let (known, dropped): (Vec<Member>, Vec<Member>) = self.known.iter().partition(|m| keep(m));
        let is_listed = |guid: &ReplicaGuid| self.known.iter().any(|m| m.guid == *guid);
        let unlisted = silent.iter().copied().filter(|guid| !is_listed(guid));
        let is_waited_for = silent.iter().any(|guid| !known.iter().any(|m| m.guid == *guid));
        let mut retired = self.retired.clone();
        retired.extend(dropped.iter().map(|m| m.guid).chain(unlisted));
        let rf = known.len() as u8;
        let loses = mutant::is("recovery-opens-without-some");
        let cf = if loses { default_cf(rf) } else { rf };
        let version = self.version + 1 + u64::from(is_waited_for);
        Self { version, rf, cf, known, retired, ..self.clone() }
    }

    pub fn encode(&self, out: &mut BytesMut) {
        out.put_u64_le(self.version);
        out.put_slice(&[self.rf, self.cf, self.drf]);
        encode_members(&self.known, out);
        out.put_count(self.retired.len());
        for guid in &self.retired {
            out.put_u128_le(guid.0);
        }
        out.put_flag(self.formed);
    }

    pub fn decode(r: &mut Reader) -> Result<Self, Malformed> {
        let membership = Membership {
            version: r.u64("membership")?,
            rf: r.u8("membership")?,
            cf: r.u8("membership")?,
            drf: r.u8("membership")?,
            known: decode_members(r)?,
            retired: (0..r.count(16, "retired")?)
                .map(|_| r.u128("retired").map(ReplicaGuid))
                .collect::<Result<_, _>>()?,
            formed: r.bool("formed flag")?,
        };
        membership.check().map_err(Malformed)?;
        Ok(membership)
    }

    /// Checks the rules that every stored or received membership must satisfy; the error names the
    /// rule.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.rf == 0 || usize::from(self.rf) > REPLICAS_MAX {
            return Err("replication factor must be between 1 and 16");
        }
        if self.cf == 0 || self.cf > self.rf {
            return Err("consistency factor must be between 1 and the replication factor");
        }
        if self.known.len() > usize::from(self.rf) {
            return Err("more known replicas than the replication factor (KnownAtMostRF)");
        }
        if self.retired.len() > RETIRED_MAX {
            return Err("too many retired replicas");
        }
        for (i, a) in self.known.iter().enumerate() {
            if self.retired.contains(&a.guid) {
                return Err("a retired replica is listed as known (RetiredNeverBack)");
            }
            if self.known[..i].iter().any(|b| a.id == b.id || a.guid == b.guid) {
                return Err("a replica is listed twice");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_consistency_factor_is_half_rounded_down_plus_one() {
        assert_eq!([1, 2, 3, 4, 5].map(default_cf), [1, 2, 2, 3, 3]);
    }

    #[test]
    fn after_a_forced_change_an_open_needs_all_kept_replicas_and_dropped_ones_are_retired() {
        let member = |n: u128| Member { id: ReplicaId(n), guid: ReplicaGuid(n + 100) };
        let known: Vec<Member> = (1..=5).map(member).collect();
        let now = Membership { version: 7, rf: 5, cf: 2, drf: 5, known, ..Membership::default() };
        let next = now.reduced_to(|m| m.id.0 <= 3, &[]);
        assert_eq!((next.version, next.rf, next.drf, next.open_quorum()), (8, 3, 5, 3));
        assert_eq!(next.known, [1, 2, 3].map(member));
        assert_eq!(next.retired, [104, 105].map(ReplicaGuid));
        // A newcomer that is waited for, beside a replica that is dropped and one that is kept.
        let next = now.reduced_to(|m| m.id.0 <= 3, &[104, 106, 101].map(ReplicaGuid));
        assert_eq!(next.version, 9);
        assert_eq!(next.retired, [104, 105, 106].map(ReplicaGuid));
        next.check().unwrap();
    }

    #[test]
    fn every_open_quorum_intersects_every_acknowledgement_quorum() {
        for rf in 1..=16 {
            for cf in 1..=rf {
                let oq = open_quorum(rf, cf);
                assert!(oq + cf > rf && oq >= cf && oq <= rf);
            }
        }
    }
}
