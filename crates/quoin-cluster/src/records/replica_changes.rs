//! Changes of a volume's replicas that are under way, as its record says.

use quoin_types::membership::default_cf;

use crate::records::{Cause, ReplicaRecord, VolumeRecord};

impl VolumeRecord {
    /// The consistency factor that a change to this RF ends in.
    pub fn cf_of(&self, rf: u8) -> u8 {
        match self.consistency_factor {
            0 => default_cf(rf),
            factor => factor.min(rf),
        }
    }

    /// The factor that a running target is told: 0 leaves the factor to the formula at a change of
    /// RF.
    pub fn desired_cf(&self) -> u8 {
        let membership = &self.membership;
        // A replica that is asked for and has no pool yet takes RF nowhere.
        let settled = self.replicas.iter().all(|r| self.is_known(r) && !r.leaving);
        match self.consistency_factor {
            0 if settled && membership.cf != default_cf(membership.rf) => default_cf(membership.rf),
            factor => factor,
        }
    }

    /// Returns true if a newcomer is to follow this known replica, which its pool still has.
    pub fn is_followed(&self, replica: &ReplicaRecord) -> bool {
        self.is_known(replica)
            && self.replicas.iter().any(|r| r.id == replica.id && r.guid != replica.guid)
    }

    /// The change of the replicas that is under way, in words; empty: none.
    pub fn changing(&self) -> String {
        let mut parts = Vec::new();
        let count =
            |what: &dyn Fn(&&ReplicaRecord) -> bool| self.replicas.iter().filter(what).count();
        let new = |r: &&ReplicaRecord| !self.is_known(r);
        let listed = |r: &&ReplicaRecord| self.known_guid(r.id.0).is_some();
        let moved = |r: &&ReplicaRecord| {
            new(r) && self.replicas.iter().any(|other| other.id == r.id && self.is_known(other))
        };
        let membership = &self.membership;
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let mut say = |n: usize, what: &str| {
            if n > 0 {
                parts.push(format!("{n} replica{} {what}", plural(n)));
            }
        };
        say(count(&|r| new(r) && !listed(r)), "being added");
        say(count(&|r| moved(r) && r.cause != Cause::Healing), "moving");
        say(count(&|r| moved(r) && r.cause == Cause::Healing), "being replaced");
        say(count(&|r| new(r) && listed(r) && !moved(r)), "being made anew");
        say(count(&|r| r.leaving), "leaving");
        let desired = self.desired_cf();
        if desired != 0 && desired.min(membership.rf) != membership.cf {
            parts.push(format!("consistency factor {} to {desired}", membership.cf));
        }
        parts.join(", ")
    }
}
