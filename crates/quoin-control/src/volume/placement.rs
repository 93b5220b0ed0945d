//! Where a new volume's replicas go.
//!
//! Never two in one pool; with `spread: host` never two on one host; with `spread: rack` or `zone`
//! never two on one host or in one rack or zone, which a segment of the pool's topology names. Pools
//! that are offline, failed, outside the asked topology or too full are out, and a refusal says why
//! for each.
//!
//! How space is counted: volumes are thin, so what a pool has given away ("promised", the sum
//! of the sizes of the replicas on it) may exceed what it has. A pool takes a new replica of
//! `size` while its *used* bytes plus `size` stay within 80 % of its capacity: the new volume
//! alone could be filled today. Among those that take it, the one with the most left after all
//! promises (capacity less the larger of promised and used) comes first, then by name. Pools whose
//! report is due come after all others: they may have gone away a moment ago.

use std::collections::{BTreeMap, BTreeSet};

use quoin_api::volume::{Local, Spread};
use quoin_cluster::records::Spec;

use crate::volume::topology;
use crate::{Error, text};

/// Way out where no pool has the space.
const SMALLER: &str = "make the volume smaller, or add a pool with more room";

/// Way out where pools are full.
const FREE: &str = "free space in the full ones (delete volumes, or give the disk below more room: \
                    `quoin pool list` says which it is), or add a pool";

/// Objection to a pool whose metadata ring is full, with the way out.
const RING_FULL: &str = "RingFull: its metadata ring has no room for another replica; delete replicas \
                         or snapshots there";

/// A pool as placement sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub name: String,
    /// The failure domain.
    pub host: String,
    /// Segments of it and of its node.
    pub topology: BTreeMap<String, String>,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// Sum of the sizes of the replicas that are on it by the records.
    pub promised_bytes: u64,
    /// Why it takes nothing now; empty when it does.
    pub unusable: String,
    /// Why not one byte more can be written into it, as where the disk below it is full; empty:
    /// some can.
    pub full: String,
    /// Its metadata ring has no room for another replica. Those that it holds may grow.
    pub ring_full: bool,
    /// A report of it is due: it may have gone away a moment ago.
    pub silent: bool,
}

impl Candidate {
    /// The largest volume of which it takes a replica.
    pub fn room_bytes(&self) -> u64 {
        if !self.full.is_empty() {
            return 0;
        }
        self.usable_bytes().saturating_sub(self.used_bytes) & !4095
    }

    /// Whole blocks of the part of it that volumes may fill.
    fn usable_bytes(&self) -> u64 {
        (u128::from(self.capacity_bytes) * 8 / 10) as u64 & !4095
    }

    pub(crate) fn segment(&self, key: &str) -> Option<&str> {
        topology::segment(&self.topology, key)
    }

    fn left_bytes(&self) -> i128 {
        i128::from(self.capacity_bytes) - i128::from(self.promised_bytes.max(self.used_bytes))
    }

    fn objection(&self, spec: &Spec, size_bytes: u64) -> Option<String> {
        if !self.unusable.is_empty() {
            return Some(self.unusable.clone());
        }
        if !topology::may_hold(&spec.accessible_topology, &self.topology) {
            return Some("outside the asked topology".to_owned());
        }
        if let Some(key) = spec.options.spread.topology_key()
            && self.segment(key).is_none()
        {
            return Some(format!("it has no segment {key}; start it with --topology {key}=NAME"));
        }
        if !self.full.is_empty() {
            return Some(format!("full: {}", self.full));
        }
        if self.ring_full {
            return Some(RING_FULL.to_owned());
        }
        (self.room_bytes() < size_bytes).then(|| {
            format!("room for {} of {}", text::bytes(self.room_bytes()), text::bytes(size_bytes))
        })
    }
}

/// Failure domains in which replicas are, by a volume's spread: no two replicas share one.
#[derive(Clone, Debug)]
pub(crate) struct Domains<'a> {
    spread: Spread,
    taken: BTreeSet<(&'static str, &'a str)>,
}

impl<'a> Domains<'a> {
    pub(crate) fn new(spread: Spread) -> Self {
        Self { spread, taken: BTreeSet::new() }
    }

    fn of(&self, pool: &'a Candidate) -> impl Iterator<Item = (&'static str, &'a str)> {
        let host = (self.spread != Spread::Pool).then_some(("host", pool.host.as_str()));
        let key = self.spread.topology_key();
        let domain = key.and_then(|key| pool.segment(key).map(|value| (key, value)));
        [("pool", pool.name.as_str())].into_iter().chain(host).chain(domain)
    }

    /// Takes the domains of a pool; false where one of them is taken already.
    pub(crate) fn take(&mut self, pool: &'a Candidate) -> bool {
        let is_free = self.taken_by(pool).is_none();
        if is_free {
            self.hold(pool);
        }
        is_free
    }

    /// Notes the domains of a pool that has a replica.
    fn hold(&mut self, pool: &'a Candidate) {
        let own: Vec<_> = self.of(pool).collect();
        self.taken.extend(own);
    }

    /// Kind and name of the domain of a pool that is taken.
    pub(crate) fn taken_by(&self, pool: &'a Candidate) -> Option<(&'static str, &'a str)> {
        self.of(pool).find(|domain| self.taken.contains(domain))
    }
}

/// Domains that a volume's replicas are spread over, in words.
fn domains_in_words(spread: Spread) -> &'static str {
    match spread {
        Spread::Host => "hosts",
        Spread::Pool => "pools",
        Spread::Rack => "racks",
        Spread::Zone => "zones",
    }
}

/// Pools that take a replica, the best first.
pub(crate) fn usable<'a>(
    spec: &Spec,
    size_bytes: u64,
    pools: &'a [Candidate],
) -> Vec<&'a Candidate> {
    let takes = |pool: &&Candidate| pool.objection(spec, size_bytes).is_none();
    let mut usable: Vec<_> = pools.iter().filter(takes).collect();
    sort(spec, &mut usable);
    usable
}

/// Puts the best pools first. A volume that is used where its replicas are keeps to nodes.
fn sort(spec: &Spec, pools: &mut [&Candidate]) {
    let is_far = |pool: &Candidate| {
        spec.options.local == Local::Required
            && (pool.segment(quoin_api::topology::NODE_KEY).is_none()
                || !topology::accessible(&spec.accessible_topology, &pool.topology))
    };
    pools.sort_by_key(|pool| (pool.silent, is_far(pool), -pool.left_bytes(), pool.name.clone()));
}

/// Picks the pools that share no failure domain with those before them; with `spread: pool` the
/// others follow.
fn apart<'a>(
    spread: Spread,
    sorted: Vec<&'a Candidate>,
    hosts_of: &[&'a Candidate],
) -> Vec<&'a Candidate> {
    // Other hosts first even where it is not demanded.
    let strict = if spread == Spread::Pool { Spread::Host } else { spread };
    let mut domains = Domains::new(strict);
    hosts_of.iter().for_each(|pool| domains.hold(pool));
    let (fresh, others): (Vec<_>, Vec<_>) = sorted.into_iter().partition(|p| domains.take(p));
    match spread {
        Spread::Pool => [fresh, others].concat(),
        _ => fresh,
    }
}

/// Chooses a pool for each replica, the best first; the error says what is short and why.
pub fn place(spec: &Spec, size_bytes: u64, pools: &[Candidate]) -> Result<Vec<String>, Error> {
    let objections: Vec<String> = pools
        .iter()
        .filter_map(|pool| {
            pool.objection(spec, size_bytes).map(|why| format!("{} ({why})", pool.name))
        })
        .collect();
    let usable = usable(spec, size_bytes, pools);
    let is_none_usable = usable.is_empty();
    let wanted = usize::from(spec.replicas);
    let spread = spec.options.spread;
    let chosen = apart(spread, usable, &[]);
    if chosen.len() >= wanted {
        return Ok(chosen.into_iter().take(wanted).map(|pool| pool.name.clone()).collect());
    }
    // Where every pool is there and only too small, fewer replicas would not fit either.
    let is_room = |pool: &Candidate| {
        pool.objection(spec, 0).is_none() && pool.objection(spec, size_bytes).is_some()
    };
    let too_small = pools.iter().any(is_room);
    let full = pools.iter().any(|pool| pool.unusable.is_empty() && !pool.full.is_empty());
    let what = domains_in_words(spread);
    let advice = match spread {
        _ if full => FREE,
        _ if too_small && is_none_usable => SMALLER,
        Spread::Host => {
            "add a pool on another host, ask for fewer replicas, or accept several replicas on one \
             host with spread: pool"
        }
        Spread::Pool => "add a pool or ask for fewer replicas",
        Spread::Rack | Spread::Zone => {
            "add a pool in another one, ask for fewer replicas, or accept hosts of one with \
             spread: host"
        }
    };
    let listed = if objections.is_empty() {
        format!("pools known: {}", pools.len())
    } else if too_small {
        format!("not usable: {} (a fifth of each pool is kept free)", objections.join(", "))
    } else {
        format!("not usable: {}", objections.join(", "))
    };
    Err(Error::Exhausted(format!(
        "volume {:?}: {wanted} replicas of {} need {wanted} {what} with room, {} found; {listed}; \
         {advice}",
        spec.name,
        text::bytes(size_bytes),
        chosen.len(),
    )))
}

/// Where a volume's replicas are already.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    /// No new one goes into these.
    pub pools: &'a [&'a str],
    /// Nor, by the volume's spread, onto the hosts or into the racks or zones of these.
    pub hosts_of: &'a [&'a str],
}

/// Chooses pools for `count` more replicas of a volume, those that are `named` where any are.
///
/// # Errors
/// Names the shortage and its reason; for a named pool, why it is not suitable.
pub fn place_beside(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    taken: &Taken,
    count: usize,
    named: &[String],
) -> Result<Vec<String>, Error> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let spread = spec.options.spread;
    let beside: Vec<&Candidate> =
        pools.iter().filter(|pool| taken.hosts_of.contains(&pool.name.as_str())).collect();
    let mut held = Domains::new(spread);
    beside.iter().for_each(|pool| held.hold(pool));
    let objection = |pool: &Candidate| {
        if taken.pools.contains(&pool.name.as_str()) {
            return Some("it holds a replica of the volume".to_owned());
        }
        if let Some((kind, name)) = held.taken_by(pool) {
            let kind = kind.rsplit('/').next().unwrap_or(kind);
            return Some(format!("{kind} {name} holds a replica of the volume"));
        }
        pool.objection(spec, size_bytes)
    };
    for name in named {
        let Some(pool) = pools.iter().find(|pool| pool.name == *name) else {
            return Err(Error::missing("pool", name));
        };
        if let Some(objection) = objection(pool) {
            return Err(Error::Precondition(format!(
                "pool {name:?} cannot take a replica of volume {:?}: {objection}",
                spec.name
            )));
        }
    }
    let wanted = |pool: &&Candidate| named.is_empty() || named.contains(&pool.name);
    let mut usable: Vec<&Candidate> =
        pools.iter().filter(wanted).filter(|pool| objection(pool).is_none()).collect();
    sort(spec, &mut usable);
    let chosen = apart(spread, usable, &beside);
    if chosen.len() >= count {
        return Ok(chosen.into_iter().take(count).map(|pool| pool.name.clone()).collect());
    }
    let objections: Vec<String> = pools
        .iter()
        .filter_map(|pool| objection(pool).map(|why| format!("{} ({why})", pool.name)))
        .collect();
    let listed = match objections.as_slice() {
        [] => String::new(),
        some => format!("; not usable: {}", some.join(", ")),
    };
    let what = format!("other {}", domains_in_words(spread));
    let size = text::bytes(size_bytes);
    let needed = match count {
        1 => format!("1 more replica of {size} needs 1 of the {what} with room"),
        count => format!("{count} more replicas of {size} need {count} {what} with room"),
    };
    Err(Error::Exhausted(format!(
        "volume {:?}: {needed}, {} found{listed}; add a pool",
        spec.name,
        chosen.len()
    )))
}

/// The largest volume of this spec that its pools could hold if they were empty and all there;
/// 0 where they are too few. A larger one can never be had, a smaller one may have to wait.
pub fn largest_possible(spec: &Spec, pools: &[Candidate]) -> u64 {
    smallest_needed(spec, pools, |pool| {
        topology::may_hold(&spec.accessible_topology, &pool.topology).then(|| pool.usable_bytes())
    })
}

/// The largest volume of this spec that its pools take now; 0 where they are too few.
pub fn largest_now(spec: &Spec, pools: &[Candidate]) -> u64 {
    let room = |pool: &Candidate| pool.objection(spec, 0).is_none().then(|| pool.room_bytes());
    smallest_needed(spec, pools, room)
}

/// Refuses a size that these pools can never hold, however empty they are.
///
/// # Errors
/// [`Error::OutOfRange`] with the largest size that they can.
pub fn check_possible(spec: &Spec, size_bytes: u64, pools: &[Candidate]) -> Result<(), Error> {
    // A pool that has told nothing yet may be of any size.
    let unknown = pools.iter().any(|pool| pool.capacity_bytes == 0);
    let largest = largest_possible(spec, pools);
    if unknown || largest == 0 || size_bytes <= largest {
        return Ok(());
    }
    Err(Error::OutOfRange(format!(
        "volume {:?}: {} are more than its {} pools could hold if they were empty (a fifth of each \
         is kept free); {} is the largest size that is possible",
        spec.name,
        text::bytes(size_bytes),
        spec.replicas,
        text::bytes(largest)
    )))
}

/// Returns the least value of a measure among the best pools for each replica; the measure may leave
/// pools out.
fn smallest_needed(
    spec: &Spec,
    pools: &[Candidate],
    measure: impl Fn(&Candidate) -> Option<u64>,
) -> u64 {
    let mut domains = Domains::new(spec.options.spread);
    let key = spec.options.spread.topology_key();
    let mut room: Vec<(&Candidate, u64)> = pools
        .iter()
        .filter(|pool| key.is_none_or(|key| pool.segment(key).is_some()))
        .filter_map(|pool| measure(pool).map(|bytes| (pool, bytes)))
        .collect();
    room.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    room.retain(|(pool, _)| domains.take(pool));
    room.get(usize::from(spec.replicas).saturating_sub(1)).map_or(0, |(_, bytes)| *bytes)
}

/// How many bytes volumes of this spec could have in all before more is promised than there is:
/// the largest total that can be cut so that no volume has two replicas in one failure domain.
pub fn unpromised(spec: &Spec, pools: &[Candidate]) -> u64 {
    let mut domains: BTreeMap<&str, u64> = BTreeMap::new();
    for pool in pools.iter().filter(|pool| pool.objection(spec, 0).is_none()) {
        let spread = spec.options.spread;
        let domain = match (spread, spread.topology_key().and_then(|key| pool.segment(key))) {
            (Spread::Pool, _) => &pool.name,
            (_, Some(domain)) => domain,
            (_, None) => &pool.host,
        };
        let taken = pool.promised_bytes.max(pool.used_bytes);
        let left = domains.entry(domain).or_default();
        *left = left.saturating_add(pool.usable_bytes().saturating_sub(taken));
    }
    let replicas = u128::from(spec.replicas.max(1));
    let sum = |cap: u64| domains.values().map(|left| u128::from(*left.min(&cap))).sum::<u128>();
    // A total of t fits if each domain gives at most t and all together give every replica.
    let (mut fits, mut beyond) = (0_u64, (sum(u64::MAX) / replicas) as u64 + 1);
    while beyond - fits > 1 {
        let total = fits + (beyond - fits) / 2;
        match sum(total) >= replicas * u128::from(total) {
            true => fits = total,
            false => beyond = total,
        }
    }
    fits & !4095
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::spec::{Defaults, complete};
    use proptest::prelude::*;
    use quoin_api::control::VolumeSpec;

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
            full: String::new(),
            ring_full: false,
            silent: false,
        }
    }

    /// The largest volume of this spec that [`place`] would take; 0 where it takes none.
    fn largest(spec: &Spec, pools: &[Candidate]) -> u64 {
        let room = |pool: &Candidate| pool.objection(spec, 0).is_none().then(|| pool.room_bytes());
        smallest_needed(spec, pools, room)
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
        let small = [full.clone(), Candidate { name: "d".into(), ..full.clone() }];
        let refusal = place(&spec(2, Spread::Pool), GIB, &small).unwrap_err().to_string();
        assert!(refusal.ends_with(SMALLER) && refusal.contains("a fifth"), "{refusal}");
        let pools = [offline, full, pool("c", "h3", 0)];
        let text = place(&spec(2, Spread::Host), GIB, &pools).unwrap_err().to_string();
        assert!(
            text.contains("a (offline)") && text.contains("b (room for 0 bytes of 1 GiB"),
            "{text}"
        );
    }

    #[test]
    fn pools_without_a_free_byte_take_nothing_whatever_their_size_and_are_named_with_the_way_out() {
        let full = |name: &str| {
            let why = "the disk below it is full".into();
            Candidate { full: why, ..pool(name, name, 0) }
        };
        let pools = [full("a"), full("b"), pool("c", "c", 0)];
        for spread in [Spread::Host, Spread::Pool] {
            let error = place(&spec(2, spread), 1 << 20, &pools).unwrap_err();
            assert_eq!(error.code(), tonic::Code::ResourceExhausted);
            let text = error.to_string();
            assert!(text.contains("a (full: the disk below it is full), b (full"), "{text}");
            assert!(text.ends_with(FREE) && text.contains("1 found"), "{text}");
        }
        assert_eq!(place(&spec(1, Spread::Pool), 1 << 20, &pools).unwrap(), ["c"]);
        assert_eq!(pools[0].room_bytes(), 0);
    }

    /// Its pool would refuse the replica, and the volume wait for it without end.
    #[test]
    fn a_pool_whose_metadata_ring_is_full_gets_no_replica_and_is_named_with_the_way_out() {
        let full = Candidate { ring_full: true, ..pool("a", "a", 0) };
        let pools = [full, pool("b", "b", 8 * GIB), pool("c", "c", 9 * GIB)];
        let spec = spec(2, Spread::Host);
        let error = place(&spec, GIB, &pools).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        let text = error.to_string();
        let reason = "a (RingFull: its metadata ring has no room for another replica; delete";
        assert!(text.contains(reason) && text.contains("0 found"), "{text}");
        assert_eq!(place(&spec, 0, &pools).unwrap(), ["b", "c"]);
        let taken = Taken { pools: &["b"], hosts_of: &["b"] };
        let beside = |named: &[String]| place_beside(&spec, 0, &pools, &taken, 1, named);
        assert_eq!(beside(&[]).unwrap(), ["c"]);
        let error = beside(&["a".to_owned()]).unwrap_err();
        assert_eq!(error.code(), tonic::Code::FailedPrecondition);
        assert!(error.to_string().contains("RingFull"), "{error}");
        // No volume can be promised what would have to lie there.
        assert_eq!(unpromised(&spec, &pools[..2]), 0);
        // The replicas that it holds may grow.
        assert!(pools[0].room_bytes() > 0);
    }

    /// A pool on a host of its own, in a rack and a zone.
    fn stands(name: &str, rack: &str, zone: &str) -> Candidate {
        let segments =
            [(quoin_api::topology::RACK_KEY, rack), (quoin_api::topology::ZONE_KEY, zone)];
        let given = segments.into_iter().filter(|(_, value)| !value.is_empty());
        let topology = given.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Candidate { topology, ..pool(name, &format!("host-{name}"), 0) }
    }

    #[test]
    fn replicas_that_are_spread_over_racks_or_zones_share_none_and_pools_without_one_say_so() {
        let pools = [
            stands("a", "r1", "west"),
            stands("b", "r1", "west"),
            stands("c", "r2", "west"),
            stands("d", "r3", "east"),
            stands("e", "", "north"),
        ];
        let racks = spec(3, Spread::Rack);
        assert_eq!(place(&racks, GIB, &pools).unwrap(), ["a", "c", "d"]);
        assert_eq!(place(&spec(3, Spread::Zone), GIB, &pools).unwrap(), ["a", "d", "e"]);
        let refused = place(&spec(4, Spread::Rack), GIB, &pools).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        let text = refused.to_string();
        assert!(text.contains("need 4 racks") && text.contains("3 found"), "{text}");
        assert!(text.contains("e (it has no segment quoin.io/rack"), "{text}");
        let taken = Taken { pools: &["a", "c", "d"], hosts_of: &["c", "d"] };
        assert_eq!(place_beside(&racks, GIB, &pools, &taken, 1, &[]).unwrap(), ["b"]);
        let named = ["b".to_owned()];
        let taken = Taken { pools: &["a", "c"], hosts_of: &["a", "c"] };
        let refused = place_beside(&racks, GIB, &pools, &taken, 1, &named).unwrap_err().to_string();
        assert!(refused.contains("rack r1 holds a replica"), "{refused}");
        assert_eq!(unpromised(&spec(3, Spread::Zone), &pools), 8 * GIB);
        assert_eq!(largest_possible(&spec(4, Spread::Zone), &pools), 0);
    }

    #[test]
    fn the_most_free_space_after_all_promises_comes_first() {
        let mut promised = pool("a", "h1", 0);
        promised.promised_bytes = 9 * GIB;
        let pools = [promised, pool("b", "h2", GIB), pool("c", "h3", 0)];
        assert_eq!(place(&spec(2, Spread::Host), GIB, &pools).unwrap(), ["c", "b"]);
    }

    #[test]
    fn a_pool_that_fell_silent_is_the_last_choice_and_still_one() {
        let silent = Candidate { silent: true, ..pool("a", "h1", 0) };
        let pools = [silent, pool("b", "h2", GIB), pool("c", "h3", 2 * GIB)];
        assert_eq!(place(&spec(2, Spread::Host), GIB, &pools).unwrap(), ["b", "c"]);
        assert_eq!(place(&spec(3, Spread::Host), GIB, &pools).unwrap(), ["b", "c", "a"]);
        let spec = spec(2, Spread::Host);
        let beside = |taken: &[&str]| {
            let taken = Taken { pools: taken, hosts_of: taken };
            place_beside(&spec, GIB, &pools, &taken, 1, &[]).unwrap()
        };
        assert_eq!((beside(&["b"]), beside(&["b", "c"])), (vec!["c".into()], vec!["a".into()]));
    }

    #[test]
    fn a_size_that_empty_pools_could_not_hold_is_never_possible_and_a_smaller_one_may_wait() {
        let pools = [pool("a", "h1", 9 * GIB), pool("b", "h2", 9 * GIB)];
        let spec = spec(2, Spread::Host);
        let largest = largest_possible(&spec, &pools);
        assert_eq!(largest, 8 * GIB);
        assert!(place(&spec, largest, &pools).is_err());
        check_possible(&spec, largest, &pools).unwrap();
        let error = check_possible(&spec, largest + 4096, &pools).unwrap_err();
        assert_eq!(error.code(), tonic::Code::OutOfRange);
        assert!(error.to_string().contains("8 GiB is the largest"), "{error}");
        let mut unheard = pool("c", "h3", 0);
        unheard.capacity_bytes = 0;
        let pools = [pools[0].clone(), pools[1].clone(), unheard];
        check_possible(&spec, largest + 4096, &pools).unwrap();
    }

    #[test]
    fn space_left_to_promise_falls_with_replicas_and_with_promises() {
        let mut pools = [pool("a", "h1", 0), pool("b", "h2", 0), pool("c", "h3", 0)];
        let left = |replicas, pools: &[Candidate]| unpromised(&spec(replicas, Spread::Host), pools);
        assert_eq!([1, 2, 3].map(|replicas| left(replicas, &pools)), [24 * GIB, 12 * GIB, 8 * GIB]);
        pools[0].promised_bytes = 6 * GIB;
        assert_eq!([1, 2, 3].map(|replicas| left(replicas, &pools)), [18 * GIB, 9 * GIB, 2 * GIB]);
        pools[0].promised_bytes = 60 * GIB;
        assert_eq!([2, 3, 4].map(|replicas| left(replicas, &pools)), [8 * GIB, 0, 0]);
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
                    prop_assert!(check_possible(&spec, size, &pools).is_ok());
                }
                Err(_) => prop_assert!(largest(&spec, &pools) < size),
            }
        }
    }
}
