//! Where a new volume's replicas go.
//!
//! Never two in one pool; with `spread: host` never two on one host. Pools that are offline,
//! failed, outside the asked topology or too full are out, and a refusal says why for each.
//!
//! How space is counted: volumes are thin, so what a pool has given away ("promised", the sum
//! of the sizes of the replicas on it) may exceed what it has. A pool takes a new replica of
//! `size` while its *used* bytes plus `size` stay within 80 % of its capacity: the new volume
//! alone could be filled today. Among those that take it, the one with the most left after all
//! promises (capacity less the larger of promised and used) comes first, then by name.

use std::collections::{BTreeMap, BTreeSet};

use crate::Error;
use crate::records::{Spec, Spread};
use crate::spec::accessible;

/// A pool as placement sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// The failure domain.
    pub host: String,
    pub topology: BTreeMap<String, String>,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// Sum of the sizes of the replicas that are on it by the records.
    pub promised_bytes: u64,
    /// Why it takes nothing now; empty when it does.
    pub unusable: String,
}

impl Candidate {
    /// The largest volume of which it takes a replica.
    pub fn room_bytes(&self) -> u64 {
        let usable = (u128::from(self.capacity_bytes) * 8 / 10) as u64;
        // Whole blocks.
        usable.saturating_sub(self.used_bytes) & !4095
    }

    fn left_bytes(&self) -> i128 {
        i128::from(self.capacity_bytes) - i128::from(self.promised_bytes.max(self.used_bytes))
    }

    fn objection(&self, spec: &Spec, size_bytes: u64) -> Option<String> {
        if !self.unusable.is_empty() {
            return Some(self.unusable.clone());
        }
        if !accessible(&spec.accessible_topology, &self.topology) {
            return Some("outside the asked topology".to_owned());
        }
        (self.room_bytes() < size_bytes)
            .then(|| format!("room for {} of {size_bytes} bytes", self.room_bytes()))
    }
}

/// Chooses a pool for each replica, the best first; the error says what is short and why.
pub fn place(spec: &Spec, size_bytes: u64, pools: &[Candidate]) -> Result<Vec<String>, Error> {
    let mut objections = Vec::new();
    let mut usable: Vec<&Candidate> = Vec::new();
    for pool in pools {
        match pool.objection(spec, size_bytes) {
            Some(objection) => objections.push(format!("{} ({objection})", pool.name)),
            None => usable.push(pool),
        }
    }
    usable.sort_by_key(|pool| (-pool.left_bytes(), pool.name.clone()));
    let wanted = usize::from(spec.replicas);
    let mut hosts = BTreeSet::new();
    let (first_of_host, others): (Vec<_>, Vec<_>) =
        usable.into_iter().partition(|pool| hosts.insert(pool.host.clone()));
    let chosen = match spec.spread {
        Spread::Host => first_of_host,
        // Other hosts first even where it is not demanded.
        Spread::Pool => [first_of_host, others].concat(),
    };
    if chosen.len() >= wanted {
        return Ok(chosen.into_iter().take(wanted).map(|pool| pool.name.clone()).collect());
    }
    let (what, advice) = match spec.spread {
        Spread::Host => (
            "hosts",
            "add a pool on another host, ask for fewer replicas, or accept several replicas on \
             one host with spread: pool",
        ),
        Spread::Pool => ("pools", "add a pool or ask for fewer replicas"),
    };
    let listed = if objections.is_empty() {
        format!("{} pool(s) are known", pools.len())
    } else {
        format!("not usable: {}", objections.join(", "))
    };
    Err(Error::Exhausted(format!(
        "volume {:?}: {wanted} replicas of {size_bytes} bytes need {wanted} {what} with room, {} \
         found; {listed}; {advice}",
        spec.name,
        chosen.len(),
    )))
}

/// The largest volume of this spec that [`place`] would take; 0 where it takes none.
pub fn largest(spec: &Spec, pools: &[Candidate]) -> u64 {
    let mut room: Vec<(&str, u64)> = pools
        .iter()
        .filter(|pool| pool.objection(spec, 0).is_none())
        .map(|pool| (pool.host.as_str(), pool.room_bytes()))
        .collect();
    room.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    if spec.spread == Spread::Host {
        let mut hosts = BTreeSet::new();
        room.retain(|(host, _)| hosts.insert(*host));
    }
    room.get(usize::from(spec.replicas).saturating_sub(1)).map_or(0, |(_, bytes)| *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Defaults, complete};
    use proptest::prelude::*;
    use quoin_proto::control::VolumeSpec;

    const GIB: u64 = 1 << 30;

    fn spec(replicas: u32, spread: Spread) -> Spec {
        let asked = VolumeSpec { name: "v".into(), replicas, ..VolumeSpec::default() };
        complete(&asked, Defaults { replicas: 3, spread }).unwrap()
    }

    fn pool(name: &str, host: &str, used: u64) -> Candidate {
        Candidate {
            name: name.into(),
            host: host.into(),
            topology: BTreeMap::new(),
            capacity_bytes: 10 * GIB,
            used_bytes: used,
            promised_bytes: 0,
            unusable: String::new(),
        }
    }

    #[test]
    fn too_few_hosts_are_refused_with_the_reason_and_the_way_out() {
        let pools = [pool("a", "h1", 0), pool("b", "h1", 0), pool("c", "h2", 0)];
        let error = place(&spec(3, Spread::Host), GIB, &pools).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        let text = error.to_string();
        assert!(text.contains("need 3 hosts") && text.contains("2 found"), "{text}");
        assert!(text.contains("spread: pool"), "{text}");
        assert_eq!(place(&spec(3, Spread::Pool), GIB, &pools).unwrap(), ["a", "c", "b"]);
    }

    #[test]
    fn offline_full_and_far_pools_are_named_with_what_is_wrong() {
        let mut offline = pool("a", "h1", 0);
        offline.unusable = "offline".into();
        let full = pool("b", "h2", 9 * GIB);
        let pools = [offline, full, pool("c", "h3", 0)];
        let text = place(&spec(2, Spread::Host), GIB, &pools).unwrap_err().to_string();
        assert!(text.contains("a (offline)") && text.contains("b (room for 0 of"), "{text}");
    }

    #[test]
    fn the_most_free_space_after_all_promises_comes_first() {
        let mut promised = pool("a", "h1", 0);
        promised.promised_bytes = 9 * GIB;
        let pools = [promised, pool("b", "h2", GIB), pool("c", "h3", 0)];
        assert_eq!(place(&spec(2, Spread::Host), GIB, &pools).unwrap(), ["c", "b"]);
    }

    proptest! {
        #[test]
        fn a_placement_never_doubles_a_pool_or_a_host_and_agrees_with_largest(
            hosts in proptest::collection::vec(0u8..4, 0..8),
            used in proptest::collection::vec(0u64..11, 8),
            replicas in 1u32..5,
            by_host: bool,
            size in 1u64..12,
        ) {
            let spread = if by_host { Spread::Host } else { Spread::Pool };
            let pools: Vec<_> = hosts.iter().zip(&used).enumerate()
                .map(|(n, (host, used))| pool(&format!("p{n}"), &format!("h{host}"), used * GIB))
                .collect();
            let spec = spec(replicas, spread);
            let size = size * GIB;
            match place(&spec, size, &pools) {
                Ok(chosen) => {
                    let names: BTreeSet<_> = chosen.iter().collect();
                    prop_assert_eq!(names.len(), replicas as usize);
                    let host = |name: &str| pools.iter().find(|p| p.name == name).unwrap().host.clone();
                    let different: BTreeSet<_> = chosen.iter().map(|name| host(name)).collect();
                    prop_assert!(!by_host || different.len() == chosen.len());
                    prop_assert!(largest(&spec, &pools) >= size);
                }
                Err(_) => prop_assert!(largest(&spec, &pools) < size),
            }
        }
    }
}
