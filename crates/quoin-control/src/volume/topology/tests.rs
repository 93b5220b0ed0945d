use proptest::prelude::*;
use quoin_api::topology::{RACK_KEY, ZONE_KEY};
use tonic::Code;

use super::*;
use crate::volume::spec::{Defaults, complete};

fn messages(topologies: &[Segments]) -> Vec<api::Topology> {
    let message = |one: &Segments| api::Topology { segments: one.clone().into_iter().collect() };
    topologies.iter().map(message).collect()
}

const GIB: u64 = 1 << 30;

fn segments(pairs: &[(&str, &str)]) -> Segments {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn zone(value: &str) -> Segments {
    segments(&[(ZONE_KEY, value)])
}

fn node(value: &str) -> Segments {
    segments(&[(NODE_KEY, value)])
}

/// An empty pool on a host of its own that is a node.
fn pool(name: &str, pairs: &[(&str, &str)]) -> Candidate {
    let host = format!("host-{name}");
    let mut topology = segments(pairs);
    topology.insert(NODE_KEY.to_owned(), host.clone());
    Candidate {
        name: name.to_owned(),
        host,
        topology,
        capacity_bytes: 10 * GIB,
        used_bytes: 0,
        promised_bytes: 0,
        unusable: String::new(),
        full: String::new(),
        silent: false,
        ring_full: false,
    }
}

/// Two pools in each of these zones: `z2-1`, `z2-2`, ….
fn zones(names: &[&str]) -> Vec<Candidate> {
    let both = |zone: &&str| [1, 2].map(|n| pool(&format!("{zone}-{n}"), &[(ZONE_KEY, zone)]));
    names.iter().flat_map(both).collect()
}

/// A request for replicas of so many, by their spread and locality.
#[derive(Clone)]
struct Ask {
    replicas: u32,
    spread: Spread,
    local: Local,
    requisite: Vec<Segments>,
    preferred: Vec<Segments>,
}

impl Ask {
    fn new(replicas: u32, spread: Spread) -> Self {
        Self { replicas, spread, local: Local::Pinned, requisite: vec![], preferred: vec![] }
    }

    fn within(self, requisite: &[Segments]) -> Self {
        Self { requisite: requisite.to_vec(), ..self }
    }

    fn preferring(self, preferred: &[Segments]) -> Self {
        Self { preferred: preferred.to_vec(), ..self }
    }

    fn local(self, local: Local) -> Self {
        Self { local, ..self }
    }

    fn message(&self) -> VolumeSpec {
        VolumeSpec {
            name: "v".into(),
            replicas: self.replicas,
            local: self.local.to_string(),
            accessible_topology: messages(&self.requisite),
            preferred_topology: messages(&self.preferred),
            ..VolumeSpec::default()
        }
    }

    fn spec(&self) -> (Spec, Requirement) {
        let asked = self.message();
        let defaults = Defaults { replicas: 3, spread: self.spread };
        (complete(&asked, defaults).unwrap(), Requirement::of(&asked, self.local).unwrap())
    }

    fn place(&self, pools: &[Candidate]) -> Result<Placed, Error> {
        let (spec, wanted) = self.spec();
        place(&spec, GIB, pools, &wanted, &[])
    }

    /// Topologies that a volume gets.
    fn topology(&self, pools: &[Candidate]) -> Vec<Segments> {
        self.place(pools).unwrap().topology
    }

    fn code(&self, pools: &[Candidate]) -> Code {
        self.place(pools).unwrap_err().code()
    }
}

fn close(mut pools: Vec<Candidate>, zone: &str) -> Vec<Candidate> {
    let there = pools.iter_mut().filter(|pool| pool.segment(ZONE_KEY) == Some(zone));
    there.for_each(|pool| pool.unusable = "offline".into());
    pools
}

/// Proves CSI-TOPOLOGY-08: one topology is wanted.
#[test]
fn the_preferred_topologies_are_tried_in_their_order_and_then_the_other_requisite_ones() {
    let pools = zones(&["z2", "z3", "z4", "z5"]);
    let two = Ask::new(2, Spread::Host);
    let ask = two.clone().within(&[zone("z2"), zone("z3")]).preferring(&[zone("z3")]);
    assert_eq!(ask.topology(&pools), [zone("z3")]);
    assert_eq!(ask.topology(&close(pools.clone(), "z3")), [zone("z2")]);
    let all = [zone("z2"), zone("z3"), zone("z4"), zone("z5")];
    let ask = two.within(&all).preferring(&[zone("z4"), zone("z2")]);
    let mut left = pools;
    for (expected, fails) in [("z4", "z4"), ("z2", "z2"), ("z3", "z3"), ("z5", "z5")] {
        assert_eq!(ask.topology(&left), [zone(expected)]);
        left = close(left, fails);
    }
    assert_eq!(ask.code(&left), Code::ResourceExhausted);
}

/// Proves CSI-TOPOLOGY-05, CSI-TOPOLOGY-06: two topologies are wanted.
#[test]
fn replicas_that_are_spread_over_zones_take_distinct_ones_of_the_list_in_its_order() {
    let pools = zones(&["z2", "z3", "z4", "z5"]);
    let all = [zone("z2"), zone("z3"), zone("z4"), zone("z5")];
    let ask = Ask::new(2, Spread::Zone).within(&all).preferring(&[zone("z5"), zone("z3")]);
    assert_eq!(ask.topology(&pools), [zone("z5"), zone("z3")]);
    let with_z5 = ask.topology(&close(pools.clone(), "z3"));
    assert_eq!(with_z5, [zone("z5"), zone("z2")]);
    let with_z3 = ask.topology(&close(pools.clone(), "z5"));
    assert_eq!(with_z3, [zone("z3"), zone("z2")]);
    let neither = close(close(pools.clone(), "z5"), "z3");
    assert_eq!(ask.topology(&neither), [zone("z2"), zone("z4")]);
    assert_eq!(ask.code(&close(neither, "z2")), Code::ResourceExhausted);
    // As many as are listed: all of them.
    let ask = Ask::new(2, Spread::Zone).within(&[zone("z2"), zone("z4")]);
    assert_eq!(ask.topology(&pools), [zone("z2"), zone("z4")]);
    assert_eq!(ask.code(&close(pools, "z4")), Code::ResourceExhausted);
}

/// Proves CSI-TOPOLOGY-07.
#[test]
fn more_zones_than_are_listed_are_all_of_the_list_and_distinct_others() {
    let pools = zones(&["z1", "z2", "z3"]);
    let ask = Ask::new(3, Spread::Zone).within(&[zone("z3")]);
    let topology = ask.topology(&pools);
    assert_eq!(topology, [zone("z3"), zone("z1"), zone("z2")]);
    assert_eq!(ask.code(&close(pools.clone(), "z3")), Code::ResourceExhausted);
    assert_eq!(ask.code(&close(pools, "z1")), Code::ResourceExhausted);
}

#[test]
fn without_a_requisite_list_any_topology_will_do_where_no_preferred_one_does() {
    let pools = zones(&["z1", "z2"]);
    let ask = Ask::new(2, Spread::Host).preferring(&[zone("z2")]);
    assert_eq!(ask.topology(&pools), [zone("z2")]);
    let placed = ask.place(&close(pools.clone(), "z2")).unwrap();
    assert_eq!((placed.pools.len(), placed.topology), (2, vec![]));
    let unasked = Ask::new(2, Spread::Host).place(&pools).unwrap();
    assert_eq!(unasked.topology, Vec::<Segments>::new(), "every node reaches it");
    let ask = Ask::new(2, Spread::Zone).preferring(&[zone("z9")]);
    assert_eq!(ask.topology(&pools), [zone("z1"), zone("z2")]);
}

/// Proves CSI-TOPOLOGY-02, CSI-TOPOLOGY-03, CSI-TOPOLOGY-12.
#[test]
fn replicas_lie_in_as_few_of_the_listed_topologies_as_hold_them_and_nowhere_else() {
    let pools = zones(&["z1", "z2", "z3"]);
    let ask = Ask::new(3, Spread::Host).within(&[zone("z3"), zone("z1")]);
    let placed = ask.place(&pools).unwrap();
    assert_eq!(placed.topology, [zone("z3"), zone("z1")], "neither holds three alone");
    assert!(placed.pools.iter().all(|pool| !pool.starts_with("z2")), "{placed:?}");
    let far = Ask::new(1, Spread::Host).within(&[zone("z9")]);
    assert_eq!(far.code(&pools), Code::ResourceExhausted);
    assert!(far.place(&pools).unwrap_err().to_string().contains("outside the asked topology"));
    // A segment of the node restricts nothing: each one reaches the volume.
    let of_node = segments(&[(NODE_KEY, "host-z1-1"), (ZONE_KEY, "z1")]);
    let ask = Ask::new(2, Spread::Host).within(&[of_node, node("host-z2-1")]);
    assert_eq!(ask.topology(&pools), Vec::<Segments>::new());
}

/// The provisioner of Kubernetes lists the topologies of all nodes that it knows, and binds users of the volume to the
/// answer.
#[test]
fn a_volume_that_is_used_anywhere_binds_nobody_and_takes_what_is_listed_for_a_wish() {
    let pools = zones(&["za", "zb", "zc"]);
    let any = |replicas, spread| Ask::new(replicas, spread).local(Local::Any);
    let zones_of = |placed: &Placed| {
        let zone = |name: &String| name.split('-').next().unwrap().to_owned();
        placed.pools.iter().map(zone).collect::<Vec<_>>()
    };
    let all = [zone("za"), zone("zb"), zone("zc")];
    let placed = any(3, Spread::Host).within(&all).preferring(&[zone("zb")]).place(&pools).unwrap();
    assert_eq!(zones_of(&placed), ["zb", "za", "zc"], "a zone for each replica, the best first");
    assert_eq!(placed.topology, Vec::<Segments>::new());
    // The Node of zc is gone from Kubernetes, and its pools are not.
    let placed = any(3, Spread::Zone).within(&all[..2]).place(&pools).unwrap();
    assert_eq!(zones_of(&placed), ["za", "zb", "zc"]);
    let placed = any(5, Spread::Host).within(&all[..2]).place(&pools).unwrap();
    assert_eq!(placed.pools.len(), 5, "storage-only hosts count");
    // Only the first user's topology is asked for, as with strict topology: a wish as well.
    let placed = any(2, Spread::Host).within(&all[2..]).place(&pools).unwrap();
    assert_eq!(zones_of(&placed), ["zc", "zc"]);
    let placed = any(3, Spread::Host).within(&[zone("nowhere")]).place(&pools).unwrap();
    assert_eq!((placed.pools.len(), placed.topology.len()), (3, 0));
    // Zones with one host each do not keep replicas on hosts of their own from being had.
    let placed = any(3, Spread::Host).within(&all).place(&close(pools.clone(), "zc")).unwrap();
    assert_eq!(placed.pools.len(), 3);
    let of_node = segments(&[(NODE_KEY, "host-zc-2"), (ZONE_KEY, "zc")]);
    let near = any(3, Spread::Host).local(Local::Preferred).within(&all).preferring(&[of_node]);
    let mut near = near;
    near.requisite = vec![];
    let placed = near.place(&pools).unwrap();
    assert_eq!((placed.pools[0].as_str(), placed.topology.len()), ("zc-2", 0));
}

/// volumebinding of Kubernetes' scheduler: a node is out where no object of the class and its topology has a limit
/// of that size, and the limit is maximumVolumeSize where that is set, else the capacity.
fn scheduler_places(ask: &Ask, pools: &[Candidate], node: &Segments, size_bytes: u64) -> bool {
    let of_node = Ask { requisite: vec![node.clone()], preferred: vec![], ..ask.clone() };
    let (spec, wanted) = of_node.spec();
    let (_, maximum_volume_size) = capacity(&spec, pools, &wanted);
    maximum_volume_size >= size_bytes
}

#[test]
fn the_scheduler_takes_the_nodes_on_which_a_volume_can_be_made_and_no_others() {
    // Three nodes, each in a zone of its own, as in most clouds: one pool a zone.
    let of = |zone: &str| pool(zone, &[(ZONE_KEY, zone)]);
    let mut pools = vec![of("za"), of("zb"), of("zc")];
    let node = |zone: &str| segments(&[(NODE_KEY, &format!("host-{zone}")), (ZONE_KEY, zone)]);
    let default = Ask::new(3, Spread::Host).local(Local::Any);
    for zone in ["za", "zb", "zc"] {
        assert!(scheduler_places(&default, &pools, &node(zone), GIB), "{zone}");
    }
    // A pool with 148 MiB left takes no volume of 1 GiB that is to be there.
    let local = Ask::new(1, Spread::Host).local(Local::Required);
    pools[0].used_bytes = 8 * GIB - (148 << 20);
    assert!(!scheduler_places(&local, &pools, &node("za"), GIB));
    assert!(scheduler_places(&local, &pools, &node("za"), 148 << 20));
    assert!(scheduler_places(&local, &pools, &node("zb"), GIB));
    assert!(!scheduler_places(&default, &pools, &node("zb"), GIB), "three replicas need za too");
    pools[1].unusable = "offline".into();
    assert!(!scheduler_places(&local, &pools, &node("zb"), GIB));
    // A size that the scheduler grants is made, and one block more is not.
    let (spec, wanted) = default.spec();
    pools[1].unusable.clear();
    let largest = capacity(&spec, &pools, &wanted).1;
    assert!(place(&spec, largest, &pools, &wanted, &[]).is_ok());
    assert!(place(&spec, largest + 4096, &pools, &wanted, &[]).is_err());
}

#[test]
fn racks_are_spanned_as_zones_are() {
    let place = |name: &str, rack: &str| pool(name, &[(RACK_KEY, rack), (ZONE_KEY, "west")]);
    let pools = [place("a", "r1"), place("b", "r1"), place("c", "r2"), place("d", "r3")];
    let asked = ["r3", "r1"].map(|rack| segments(&[(RACK_KEY, rack), (ZONE_KEY, "west")]));
    let placed = Ask::new(2, Spread::Rack).within(&asked).place(&pools).unwrap();
    assert_eq!((placed.pools, placed.topology), (vec!["d".into(), "a".into()], asked.to_vec()));
    // All replicas within one zone, in racks of their own.
    let placed = Ask::new(3, Spread::Rack).within(&[zone("west")]).place(&pools).unwrap();
    assert_eq!((placed.pools.len(), placed.topology), (3, vec![zone("west")]));
}

#[test]
fn a_local_volume_has_a_replica_on_each_of_its_nodes_in_the_order_that_was_asked() {
    let pools = zones(&["z1", "z2"]);
    let of_node = |host: &str, of: &str| segments(&[(NODE_KEY, host), (ZONE_KEY, of)]);
    let all = [
        of_node("host-z2-2", "z2"),
        of_node("host-z1-1", "z1"),
        of_node("host-z1-2", "z1"),
        of_node("host-z2-1", "z2"),
    ];
    let required = Ask::new(2, Spread::Host).within(&all).preferring(&all[..1]);
    let required = required.local(Local::Required);
    let placed = required.place(&pools).unwrap();
    assert_eq!(placed.pools, ["z2-2", "z1-1"]);
    assert_eq!((placed.topology.as_slice(), &placed.kept), (&all[..2], &placed.pools));
    // More replicas than nodes are listed: the others are elsewhere.
    let one = Ask::new(3, Spread::Host).within(&[node("host-z1-2")]).local(Local::Required);
    let placed = one.place(&pools).unwrap();
    assert_eq!((placed.pools[0].as_str(), &placed.topology[0]), ("z1-2", &node("host-z1-2")));
    assert_eq!(placed.topology.len(), 3);
    let full: Vec<_> =
        pools.iter().cloned().map(|pool| Candidate { full: "full".into(), ..pool }).collect();
    assert_eq!(one.code(&full), Code::ResourceExhausted);
    // A request that names no node gets nodes that were chosen.
    let placed = Ask::new(2, Spread::Host).within(&[zone("z2")]).local(Local::Required);
    let topology = placed.topology(&pools);
    assert_eq!(topology, [of_node("host-z2-1", "z2"), of_node("host-z2-2", "z2")]);
    let bare = pools.iter().cloned().map(|mut pool| {
        pool.topology.remove(NODE_KEY);
        pool
    });
    let bare: Vec<_> = bare.collect();
    let refused = Ask::new(2, Spread::Host).local(Local::Required).place(&bare).unwrap_err();
    assert!(refused.to_string().contains("quoin node run"), "{refused}");
}

#[test]
fn a_replica_goes_to_the_node_that_the_volume_is_made_for_where_it_is_preferred_and_has_room() {
    let mut pools = zones(&["z1", "z2"]);
    // Others have more room.
    pools.iter_mut().filter(|p| p.name == "z2-2").for_each(|p| p.promised_bytes = 5 * GIB);
    let all = ["host-z2-2", "host-z1-1", "host-z1-2"].map(node);
    let ask = Ask::new(2, Spread::Host).within(&all).preferring(&all[..1]);
    assert!(!ask.place(&pools).unwrap().pools.contains(&"z2-2".to_owned()));
    let near = ask.local(Local::Preferred);
    let placed = near.place(&pools).unwrap();
    assert_eq!(
        (placed.pools[0].as_str(), placed.kept.as_slice()),
        ("z2-2", &["z2-2".to_owned()][..])
    );
    assert_eq!(placed.topology, Vec::<Segments>::new(), "every node may use it");
    pools.iter_mut().filter(|p| p.name == "z2-2").for_each(|p| p.full = "full".into());
    let placed = near.place(&pools).unwrap();
    assert!(placed.kept.is_empty() && placed.pools.len() == 2);
}

#[test]
fn a_lost_replica_of_a_local_volume_may_be_made_anew_on_another_node_and_not_in_another_zone() {
    let has = [segments(&[(NODE_KEY, "h1"), (ZONE_KEY, "west")])];
    assert!(may_hold(&has, &segments(&[(NODE_KEY, "h2"), (ZONE_KEY, "west")])));
    assert!(!may_hold(&has, &segments(&[(NODE_KEY, "h2"), (ZONE_KEY, "east")])));
    assert!(may_hold(&[node("h1")], &node("h2")) && !accessible(&[node("h1")], &node("h2")));
}

#[test]
fn the_cluster_segment_of_early_versions_restricts_nothing() {
    let cluster = segments(&[("quoin.io/cluster", "another")]);
    let ask = Ask::new(2, Spread::Host).within(&[cluster]);
    assert_eq!(ask.topology(&zones(&["z1"])), Vec::<Segments>::new());
}

#[test]
fn capacity_counts_the_asked_topology_alone_and_for_one_replica_where_others_go_elsewhere() {
    let pools = zones(&["z1", "z2", "z3"]);
    let of = |ask: &Ask| {
        let (spec, wanted) = ask.spec();
        capacity(&spec, &pools, &wanted)
    };
    let in_zone = Ask::new(2, Spread::Host).within(&[zone("z1")]);
    assert_eq!(of(&in_zone), (8 * GIB, 8 * GIB));
    let spread = Ask::new(3, Spread::Zone).within(&[zone("z1")]);
    assert_eq!(of(&spread), (16 * GIB, 8 * GIB), "one replica is in z1");
    let local = Ask::new(3, Spread::Host).within(&[node("host-z1-1")]).local(Local::Required);
    assert_eq!(of(&local), (8 * GIB, 8 * GIB), "one replica is on the node");
    assert_eq!(of(&Ask::new(1, Spread::Host).within(&[zone("z9")])), (0, 0));
}

#[test]
fn any_one_topology_suffices_and_keys_fold_case() {
    let has = segments(&[("Zone", "a"), ("rack", "1")]);
    assert!(accessible(&[], &has));
    assert!(accessible(&[segments(&[("zone", "b")]), segments(&[("zone", "a")])], &has));
    assert!(!accessible(&[segments(&[("zone", "a"), ("rack", "2")])], &has));
    assert!(is_met(&[zone("a")], &[zone("a"), zone("b")]));
    assert!(is_met(&[segments(&[(ZONE_KEY, "a"), (NODE_KEY, "h")])], &[zone("a")]));
    assert!(!is_met(&[zone("c")], &[zone("a"), zone("b")]));
}

proptest! {
    #[test]
    fn a_placement_keeps_to_the_list_and_to_the_spread_whatever_is_asked(
        replicas in 1_u32..4,
        spread in prop_oneof![Just(Spread::Host), Just(Spread::Pool), Just(Spread::Zone)],
        local in prop_oneof![Just(Local::Any), Just(Local::Pinned), Just(Local::Preferred), Just(Local::Required)],
        listed in proptest::sample::subsequence(vec!["z1", "z2", "z3", "z4"], 0..4),
        closed in proptest::sample::subsequence(vec!["z1", "z2", "z3", "z4"], 0..2),
    ) {
        let mut pools = zones(&["z1", "z2", "z3", "z4"]);
        for zone in closed {
            pools = close(pools, zone);
        }
        let requisite: Vec<_> = listed.iter().map(|name| zone(name)).collect();
        let ask = Ask::new(replicas, spread).within(&requisite).local(local);
        if let Ok(placed) = ask.place(&pools) {
            let chosen: Vec<_> = placed.pools.iter().map(|name| {
                pools.iter().find(|pool| pool.name == *name).unwrap()
            }).collect();
            prop_assert_eq!(chosen.len(), replicas as usize);
            let is_listed = |pool: &&&Candidate| accessible(&requisite, &pool.topology);
            let inside = chosen.iter().filter(is_listed).count();
            let spans_more = spread == Spread::Zone && replicas as usize > listed.len();
            let is_wish = matches!(local, Local::Any | Local::Preferred);
            prop_assert!(!is_wish || placed.topology.is_empty());
            prop_assert!(
                is_wish || inside == chosen.len() || (spans_more && inside == listed.len())
            );
            let distinct: std::collections::BTreeSet<_> =
                chosen.iter().map(|pool| pool.segment(ZONE_KEY)).collect();
            prop_assert!(spread != Spread::Zone || distinct.len() == chosen.len());
            prop_assert!(chosen.iter().all(|pool| pool.unusable.is_empty()));
            // Each user that is bound to the topologies finds a replica in one of them.
            for one in &placed.topology {
                prop_assert!(chosen.iter().any(|pool| is_within(&pool.topology, one)));
            }
        }
    }
}
