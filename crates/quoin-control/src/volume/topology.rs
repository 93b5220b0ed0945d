//! Topology of a volume: where its replicas go by a request, and where the volume is used.
//!
//! Every node reaches every volume over the network, so topology is about the places of replicas. A
//! request allows topologies (requisite) and has an order of them (preferred). Of a volume that is used
//! anywhere (`local: any` and `preferred`) both are a wish: an orchestrator lists the topologies that it
//! knows nodes in, and pools are elsewhere too. Of a pinned volume the topologies that were chosen are
//! recorded and never change, since an orchestrator binds users of the volume to them; a replica that
//! is made anew later goes into one of them.
//!
//! The volume spans as many topologies as it has replicas where the request's topologies name what
//! its replicas are kept apart by: racks, zones, or nodes of a volume that is used where its replicas
//! are. So does one whose replicas are kept apart by hosts and that is used anywhere, where the list has a zone
//! for each replica: it outlives a zone then. All others span as few as possible.
//!
//! A segment `quoin.io/node` binds users and not replicas: a replica that is lost with its node is
//! made anew on another one.

use std::collections::{BTreeMap, BTreeSet};

use quoin_api::control::{self as api, VolumeSpec};
use quoin_api::topology::{CLUSTER_KEY, NODE_KEY, ZONE_KEY};
use quoin_api::volume::{Local, Spread};
use quoin_cluster::records::{PoolRecord, Spec, VolumeRecord};

use crate::Error;
use crate::state::State;
use crate::volume::placement::{self, Candidate, Domains};
use crate::volume::volumes;

/// Segments by their keys.
pub type Segments = BTreeMap<String, String>;

const TOPOLOGIES_MAX: usize = 256;
const TOPOLOGY_BYTES_MAX: usize = 4096;

/// Returns the value of a segment; keys fold case.
pub(crate) fn segment<'a>(segments: &'a Segments, key: &str) -> Option<&'a str> {
    let found = segments.iter().find(|(known, _)| known.eq_ignore_ascii_case(key));
    found.map(|(_, value)| value.as_str())
}

/// Returns true if all segments of `part` are among those of `whole`.
fn is_within(whole: &Segments, part: &Segments) -> bool {
    part.iter().all(|(key, value)| segment(whole, key) == Some(value))
}

/// Returns true if a member with these segments satisfies any of the topologies.
pub fn accessible(wanted: &[Segments], has: &Segments) -> bool {
    wanted.is_empty() || wanted.iter().any(|one| is_within(has, one))
}

/// Returns true if a pool with these segments may hold a replica of a volume of these topologies.
pub(crate) fn may_hold(wanted: &[Segments], has: &Segments) -> bool {
    wanted.is_empty() || wanted.iter().any(|one| is_within(has, &without_node(one)))
}

pub(crate) fn without_node(segments: &Segments) -> Segments {
    let others = segments.iter().filter(|(key, _)| !key.eq_ignore_ascii_case(NODE_KEY));
    others.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Segments of a pool: its own, else those of its node, which it is on.
pub(crate) fn of_pool(state: &State, pool: &PoolRecord) -> Segments {
    let mut segments = pool.topology.clone();
    let Some(node) = state.nodes.get(&pool.node) else { return segments };
    for (key, value) in &node.topology {
        if segment(&segments, key).is_none() {
            segments.insert(key.clone(), value.clone());
        }
    }
    segments.insert(NODE_KEY.to_owned(), node.name.clone());
    segments
}

/// Takes topologies out of a message. The cluster's own segment of early versions restricts nothing.
///
/// # Errors
/// There are too many, or one is too large.
pub(crate) fn read(field: &'static str, asked: &[api::Topology]) -> Result<Vec<Segments>, Error> {
    let bytes =
        |t: &api::Topology| t.segments.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
    if asked.len() > TOPOLOGIES_MAX || asked.iter().any(|t| bytes(t) > TOPOLOGY_BYTES_MAX) {
        let rule = format!("at most {TOPOLOGIES_MAX}, each at most {TOPOLOGY_BYTES_MAX} bytes");
        return Err(Error::invalid(field, rule));
    }
    let segments = |one: &api::Topology| {
        let own = one.segments.iter().filter(|(key, _)| !key.eq_ignore_ascii_case(CLUSTER_KEY));
        own.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    Ok(asked.iter().map(segments).collect())
}

/// Topologies that a request allows and prefers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Requirement {
    /// The volume must be usable in one of these; empty: anywhere.
    requisite: Vec<Segments>,
    /// They are tried in this order, before the others.
    preferred: Vec<Segments>,
    /// Node that the volume is made for.
    near: Option<String>,
    /// Replicas and users are bound to what is listed.
    is_pinned: bool,
}

/// Pools of a new volume's replicas, and the topologies that it has from then on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placed {
    pub pools: Vec<String>,
    pub topology: Vec<Segments>,
    /// Pools whose replicas stay where they are: users of the volume are bound to them.
    pub kept: Vec<String>,
}

impl Placed {
    fn new(pools: Vec<String>, topology: Vec<Segments>) -> Self {
        Self { pools, topology, kept: Vec::new() }
    }
}

impl Requirement {
    /// Reads the topologies of a request for a volume.
    ///
    /// # Errors
    /// There are too many, or one is too large.
    pub fn of(asked: &VolumeSpec, local: Local) -> Result<Self, Error> {
        let requisite = read("accessibleTopology", &asked.accessible_topology)?;
        let preferred = read("preferredTopology", &asked.preferred_topology)?;
        let mut nodes = preferred.iter().chain(&requisite).map(|one| segment(one, NODE_KEY));
        let near = nodes.next().flatten().map(str::to_owned);
        // Every node reaches a volume whose replicas are anywhere.
        let reached = |one: Segments| match local {
            Local::Required => one,
            Local::Any | Local::Preferred | Local::Pinned => without_node(&one),
        };
        let requisite = distinct(requisite.into_iter().map(reached));
        let preferred = distinct(preferred.into_iter().map(reached));
        let is_anywhere = |one: &Segments| one.is_empty();
        let somewhere = |list: Vec<Segments>| -> Vec<_> {
            list.into_iter().filter(|one| !is_anywhere(one)).collect()
        };
        if matches!(local, Local::Any | Local::Preferred) {
            let order = distinct(preferred.into_iter().chain(requisite));
            return Ok(Self {
                requisite: Vec::new(),
                preferred: somewhere(order),
                near,
                is_pinned: false,
            });
        }
        Ok(Self {
            requisite: if requisite.iter().any(is_anywhere) { Vec::new() } else { requisite },
            preferred: somewhere(preferred),
            near,
            is_pinned: true,
        })
    }

    fn in_order(&self) -> Vec<&Segments> {
        let mut order: Vec<&Segments> = Vec::new();
        for one in self.preferred.iter().chain(&self.requisite) {
            if !order.contains(&one) {
                order.push(one);
            }
        }
        order
    }

    /// Key by which each topology takes one replica; `None`: the volume spans as few as possible.
    fn spanned_key(&self, spec: &Spec) -> Option<&'static str> {
        let order = self.in_order();
        let has = |key: &&'static str| {
            !order.is_empty() && order.iter().all(|one| segment(one, key).is_some())
        };
        let node = (spec.options.local == Local::Required).then_some(NODE_KEY);
        node.filter(has).or_else(|| spec.options.spread.topology_key().filter(has))
    }

    /// Returns true if a volume of these topologies is usable where a request for a snapshot of it
    /// asks.
    ///
    /// # Errors
    /// There are too many topologies, or one is too large.
    pub(crate) fn allows(asked: &[api::Topology], spec: &Spec) -> Result<bool, Error> {
        let asked = VolumeSpec { accessible_topology: asked.to_vec(), ..VolumeSpec::default() };
        let wanted = Self::of(&asked, spec.options.local)?;
        let has = &spec.accessible_topology;
        Ok(has.is_empty() || is_met(&wanted.requisite, has))
    }

    /// Returns true if a volume that exists satisfies this.
    pub(crate) fn is_met_by(&self, state: &State, volume: &VolumeRecord) -> bool {
        let has = &volume.spec.accessible_topology;
        if self.requisite.is_empty() || is_met(&self.requisite, has) {
            return true;
        }
        has.is_empty()
            && volume.replicas.iter().all(|replica| {
                let pool = state.pools.get(&replica.pool);
                pool.is_none_or(|pool| may_hold(&self.requisite, &of_pool(state, &pool)))
            })
    }
}

/// Returns true if one of the requisite topologies lies within those of a volume, or contains one
/// of them.
fn is_met(requisite: &[Segments], has: &[Segments]) -> bool {
    let meets = |one: &Segments| has.iter().any(|h| is_within(one, h) || is_within(h, one));
    requisite.is_empty() || requisite.iter().any(meets)
}

fn distinct(all: impl Iterator<Item = Segments>) -> Vec<Segments> {
    let mut distinct: Vec<Segments> = Vec::new();
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

/// Chooses a pool for each replica of a new volume, and the topologies that it has.
///
/// # Errors
/// Names the shortage and its reason.
pub fn place(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    wanted: &Requirement,
    named: &[String],
) -> Result<Placed, Error> {
    let mut placed = match wanted.spanned_key(spec) {
        _ if named.is_empty() && outlives_zones(spec, wanted) => {
            match over_zones(spec, size_bytes, pools, wanted) {
                Ok(placed) => placed,
                Err(_) => within_few(spec, size_bytes, pools, wanted)?,
            }
        }
        Some(key) if named.is_empty() => span(spec, size_bytes, pools, wanted, key)?,
        _ if named.is_empty() => within_few(spec, size_bytes, pools, wanted)?,
        _ => {
            let spec = Spec { accessible_topology: wanted.requisite.clone(), ..spec.clone() };
            let pools = volumes::choose(&spec, size_bytes, pools, named)?;
            Placed::new(pools, spec.accessible_topology)
        }
    };
    if !wanted.is_pinned {
        placed.topology.clear();
    }
    match spec.options.local {
        Local::Any | Local::Pinned => {}
        Local::Preferred => {
            let is_near = |pool: &&Candidate| {
                wanted.near.is_some() && pool.segment(NODE_KEY) == wanted.near.as_deref()
            };
            let near = pools.iter().filter(is_near).map(|pool| pool.name.clone());
            placed.kept = near.filter(|name| placed.pools.contains(name)).collect();
        }
        Local::Required => {
            placed.topology = nodes_of(spec, &placed, pools)?;
            placed.kept = placed.pools.clone();
        }
    }
    Ok(placed)
}

/// Returns true if a volume that is used anywhere, with its replicas on hosts of their own, is to have each in
/// another zone: the request lists a zone for each.
fn outlives_zones(spec: &Spec, wanted: &Requirement) -> bool {
    let zones: BTreeSet<_> =
        wanted.preferred.iter().filter_map(|one| segment(one, ZONE_KEY)).collect();
    !wanted.is_pinned
        && spec.options.spread == Spread::Host
        && zones.len() >= usize::from(spec.replicas)
}

/// Puts each replica into another zone, the listed ones first.
fn over_zones(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    wanted: &Requirement,
) -> Result<Placed, Error> {
    let mut spec = Spec { accessible_topology: Vec::new(), ..spec.clone() };
    spec.options.spread = Spread::Zone;
    if spec.options.local == Local::Preferred {
        let pools = place_near(&spec, size_bytes, pools, wanted)?;
        return Ok(Placed::new(pools, Vec::new()));
    }
    span(&spec, size_bytes, pools, wanted, ZONE_KEY)
}

/// Puts one replica into each topology, in their order.
fn span(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    wanted: &Requirement,
    key: &'static str,
) -> Result<Placed, Error> {
    let anywhere = Spec { accessible_topology: Vec::new(), ..spec.clone() };
    let usable = placement::usable(&anywhere, size_bytes, pools);
    let mut domains = Domains::new(spec.options.spread);
    let count = usize::from(spec.replicas);
    let (mut chosen, mut used): (Vec<&Candidate>, Vec<Segments>) = (Vec::new(), Vec::new());
    for one in wanted.in_order() {
        if chosen.len() == count {
            break;
        }
        let mut here = usable.iter().copied().filter(|pool| is_within(&pool.topology, one));
        if let Some(pool) = here.find(|pool| domains.take(pool)) {
            chosen.push(pool);
            used.push(one.clone());
        }
    }
    let are_all_used = wanted.requisite.iter().all(|one| used.contains(one));
    if wanted.requisite.is_empty() || are_all_used {
        for pool in usable.iter().copied() {
            if chosen.len() < count && domains.take(pool) {
                chosen.push(pool);
                let of = |value: &str| Segments::from([(key.to_owned(), value.to_owned())]);
                used.extend(pool.segment(key).map(of));
            }
        }
    }
    if chosen.len() == count {
        let pools = chosen.iter().map(|pool| pool.name.clone()).collect();
        return Ok(Placed::new(pools, distinct(used.into_iter())));
    }
    let asked = Spec { accessible_topology: wanted.requisite.clone(), ..spec.clone() };
    // It names what is wrong with each pool.
    placement::place(&asked, size_bytes, pools)?;
    Err(Error::Exhausted(format!(
        "volume {:?}: {count} replicas are to be in {count} of the asked topologies, each by another \
         {key}, and only {} of these have a pool with room; ask for more topologies or fewer replicas",
        spec.name,
        chosen.len()
    )))
}

/// Puts all replicas into the first topology that takes them, or into as few as possible.
fn within_few(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    wanted: &Requirement,
) -> Result<Placed, Error> {
    let within = |topologies: &[&Segments]| {
        let accessible_topology = topologies.iter().map(|one| (*one).clone()).collect();
        let spec = Spec { accessible_topology, ..spec.clone() };
        place_near(&spec, size_bytes, pools, wanted)
    };
    let order = wanted.in_order();
    for one in &order {
        if let Ok(pools) = within(&[*one]) {
            return Ok(Placed::new(pools, vec![(*one).clone()]));
        }
    }
    for few in 2..=order.len() {
        let Ok(chosen) = within(&order[..few]) else { continue };
        let holds = |one: &&&Segments| {
            let here = |pool: &&Candidate| chosen.contains(&pool.name);
            pools.iter().filter(here).any(|pool| is_within(&pool.topology, &without_node(one)))
        };
        let topology = order[..few].iter().filter(holds).map(|one| (*one).clone()).collect();
        return Ok(Placed::new(chosen, topology));
    }
    let requisite: Vec<_> = wanted.requisite.iter().collect();
    Ok(Placed::new(within(&requisite)?, wanted.requisite.clone()))
}

/// Chooses pools, one of them on the node that the volume is made for where it is to be near.
fn place_near(
    spec: &Spec,
    size_bytes: u64,
    pools: &[Candidate],
    wanted: &Requirement,
) -> Result<Vec<String>, Error> {
    if spec.options.local == Local::Preferred && wanted.near.is_some() {
        let is_near = |pool: &&&Candidate| pool.segment(NODE_KEY) == wanted.near.as_deref();
        for pool in placement::usable(spec, size_bytes, pools).iter().filter(is_near) {
            let named = [pool.name.clone()];
            if let Ok(chosen) = volumes::choose(spec, size_bytes, pools, &named) {
                return Ok(chosen);
            }
        }
    }
    placement::place(spec, size_bytes, pools)
}

/// Has a new volume have replicas in more pools. Where its users are bound to its replicas, they are
/// bound to these too.
///
/// # Errors
/// None of the pools is on a node that uses volumes.
pub(crate) fn bind(
    spec: &Spec,
    placed: &mut Placed,
    others: &[String],
    pools: &[Candidate],
) -> Result<(), Error> {
    if spec.options.local == Local::Required {
        let mut all = placed.clone();
        all.pools.extend_from_slice(others);
        placed.topology = nodes_of(spec, &all, pools)?;
        placed.kept = all.pools;
    }
    Ok(())
}

/// Topologies of a volume that is used where its replicas are: a node each.
fn nodes_of(spec: &Spec, placed: &Placed, pools: &[Candidate]) -> Result<Vec<Segments>, Error> {
    let topology_of = |pool: &Candidate| {
        let node = pool.segment(NODE_KEY)?;
        let wider = placed.topology.iter().find(|one| is_within(&pool.topology, one));
        let mut segments = wider.cloned().unwrap_or_default();
        segments.insert(NODE_KEY.to_owned(), node.to_owned());
        Some(segments)
    };
    let of_name = |name: &String| pools.iter().find(|pool| pool.name == *name);
    let nodes = distinct(placed.pools.iter().filter_map(of_name).filter_map(topology_of));
    if nodes.is_empty() {
        return Err(Error::Exhausted(format!(
            "volume {:?}: local: required needs a pool with room on a node that uses volumes, and none \
             of pools {} is on one; start `quoin node run` there, or ask for local: preferred",
            spec.name,
            placed.pools.join(", ")
        )));
    }
    Ok(nodes)
}

/// Bytes that volumes of this spec could still be promised, and the largest that one can have now. Of
/// a volume that is used anywhere all pools count, whichever topology is asked about; of another one a
/// replica is in the asked topology.
///
/// The scheduler of Kubernetes compares a claim with the latter alone, so that is what a request is
/// granted now and not what empty pools could hold.
pub fn capacity(spec: &Spec, pools: &[Candidate], wanted: &Requirement) -> (u64, u64) {
    let measure = |spec: &Spec, pools: &[Candidate]| {
        (placement::unpromised(spec, pools), placement::largest_now(spec, pools))
    };
    if !wanted.is_pinned {
        return measure(&Spec { accessible_topology: Vec::new(), ..spec.clone() }, pools);
    }
    if wanted.spanned_key(spec).is_none() {
        let spec = Spec { accessible_topology: wanted.requisite.clone(), ..spec.clone() };
        return measure(&spec, pools);
    }
    let here: Vec<Candidate> =
        pools.iter().filter(|p| accessible(&wanted.requisite, &p.topology)).cloned().collect();
    let anywhere = Spec { accessible_topology: Vec::new(), ..spec.clone() };
    let mut one = Spec { replicas: 1, ..anywhere.clone() };
    one.options.spread = Spread::Pool;
    let (whole, part) = (measure(&anywhere, pools), measure(&one, &here));
    (whole.0.min(part.0), whole.1.min(part.1))
}

#[cfg(test)]
mod tests;
