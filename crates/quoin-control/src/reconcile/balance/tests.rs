//! Tests of the choice, and of the rule that repeated moves end.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use quoin_api::control::VolumeSpec;
use quoin_api::volume::Spread;
use quoin_cluster::records::{Cause, ReplicaPhase, ReplicaRecord, Text};
use quoin_types::ReplicaId;

use super::*;
use crate::volume::spec::{Defaults, complete};

const GIB: u64 = 1 << 30;

/// Input of the choice: pools, volumes, and the bytes that each replica uses.
#[derive(Clone, Debug)]
struct World {
    pools: Vec<Candidate>,
    volumes: Vec<VolumeRecord>,
    used: BTreeMap<ReplicaGuid, u64>,
    next_guid: u128,
}

impl World {
    /// Makes pools of 100 GiB, each given by its host and by the GiB used beside replicas.
    fn new(pools: &[(&str, u64)]) -> Self {
        let pool = |(n, (host, used)): (usize, &(&str, u64))| Candidate {
            name: format!("p{n}"),
            host: (*host).into(),
            topology: BTreeMap::new(),
            capacity_bytes: 100 * GIB,
            used_bytes: used * GIB,
            promised_bytes: 0,
            unusable: String::new(),
            full: String::new(),
            ring_full: false,
            silent: false,
        };
        let pools = pools.iter().enumerate().map(pool).collect();
        Self { pools, volumes: Vec::new(), used: BTreeMap::new(), next_guid: 0 }
    }

    fn pool(&mut self, name: &str) -> &mut Candidate {
        self.pools.iter_mut().find(|pool| pool.name == name).unwrap()
    }

    /// Adds a volume of `size` GiB, with its replicas given by pool and used GiB.
    fn add(&mut self, spread: Spread, size: u64, replicas: &[(usize, u64)]) {
        let name = format!("v{}", self.volumes.len());
        let asked = VolumeSpec { name, replicas: replicas.len() as u32, ..VolumeSpec::default() };
        let spec = complete(&asked, Defaults { replicas: 3, spread }).unwrap();
        let id = VolumeId(self.volumes.len() as u128);
        let mut volume = VolumeRecord::new(id, spec, size * GIB, 1);
        for (n, (pool, used)) in replicas.iter().enumerate() {
            let pool = format!("p{pool}");
            volume.replicas.push(self.born(ReplicaId(n as u128), &pool, used * GIB));
        }
        self.volumes.push(volume);
    }

    fn born(&mut self, id: ReplicaId, pool: &str, used: u64) -> ReplicaRecord {
        self.next_guid += 1;
        let guid = ReplicaGuid(self.next_guid);
        self.used.insert(guid, used);
        self.pool(pool).used_bytes += used;
        ReplicaRecord {
            id: Text(id),
            guid: Text(guid),
            pool: pool.into(),
            phase: ReplicaPhase::Keep,
            leaving: false,
            placed: false,
            cause: Cause::Asked,
        }
    }

    fn takes(&self, volume: &VolumeRecord) -> u64 {
        volume.replicas.iter().map(|r| self.used[&r.guid.0]).max().unwrap()
    }

    fn choose(&self, at: RebalanceAt) -> Verdict {
        self.choose_of(at, &[])
    }

    fn choose_of(&self, at: RebalanceAt, at_home: &[&str]) -> Verdict {
        self.choose_past(at, at_home, &[])
    }

    /// Chooses with `barred` pools, to which no volume may move.
    fn choose_past(&self, at: RebalanceAt, at_home: &[&str], barred: &[&str]) -> Verdict {
        let movables: Vec<_> = self
            .volumes
            .iter()
            .flat_map(|volume| volume.replicas.iter().map(move |replica| (volume, replica)))
            .map(|(volume, replica)| Movable {
                volume,
                guid: replica.guid.0,
                pool: &replica.pool,
                frees_bytes: self.used[&replica.guid.0],
                takes_bytes: self.takes(volume),
                at_home: at_home.contains(&volume.spec.name.as_str()),
                barred: barred.iter().map(|pool| (*pool).to_owned()).collect(),
            })
            .collect();
        choose(&self.pools, &movables, at)
    }

    /// Carries a move out; the new replica uses this share of the expected bytes.
    fn carry_out(&mut self, chosen: &Move, percent: u64) {
        let at = self.volumes.iter().position(|v| v.id.0 == chosen.volume).unwrap();
        let takes = self.takes(&self.volumes[at]) * percent / 100;
        let n = self.volumes[at].replicas.iter().position(|r| r.guid.0 == chosen.guid).unwrap();
        let old = self.volumes[at].replicas.remove(n);
        assert_eq!(old.pool, chosen.from);
        let used = self.used.remove(&old.guid.0).unwrap();
        self.pool(&old.pool).used_bytes -= used;
        let new = self.born(old.id.0, &chosen.to, takes);
        self.volumes[at].replicas.push(new);
    }

    fn weight(&self) -> f64 {
        self.pools.iter().map(|pool| Filling::of(pool).weight()).sum()
    }

    fn fullest(&self) -> i128 {
        self.pools.iter().map(|pool| Filling::of(pool).share()).max().unwrap()
    }

    fn is_legal(&self) -> bool {
        self.volumes.iter().all(|volume| {
            let pools: BTreeSet<_> = volume.replicas.iter().map(|r| &r.pool).collect();
            let host = |pool: &str| &self.pools.iter().find(|p| p.name == pool).unwrap().host;
            let hosts: BTreeSet<_> = pools.iter().map(|pool| host(pool)).collect();
            pools.len() == volume.replicas.len()
                && (volume.spec.options.spread == Spread::Pool
                    || hosts.len() == volume.replicas.len())
        })
    }
}

fn moved(verdict: Verdict) -> Move {
    match verdict {
        Verdict::Moves(chosen) => chosen,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pools_that_are_even_enough_are_let_alone_and_off_is_a_policy() {
    let mut world = World::new(&[("a", 0), ("b", 0)]);
    world.add(Spread::Pool, 10, &[(0, 10)]);
    world.add(Spread::Pool, 10, &[(0, 10)]);
    assert_eq!(world.choose(RebalanceAt::Apart(20)), Verdict::Even, "20 points are not more");
    world.pool("p0").used_bytes += GIB;
    let chosen = moved(world.choose(RebalanceAt::Apart(20)));
    assert_eq!((chosen.from.as_str(), chosen.to.as_str()), ("p0", "p1"));
    assert_eq!((chosen.from_percent, chosen.to_percent), (21, 0));
    assert_eq!(world.choose(RebalanceAt::Never), Verdict::Even);
}

#[test]
fn used_space_counts_and_promised_space_only_limits_the_destinations() {
    let mut world = World::new(&[("a", 0), ("b", 0), ("c", 0)]);
    // p0 has many promised bytes and almost no used ones.
    world.add(Spread::Pool, 70, &[(0, 1)]);
    assert_eq!(world.choose(RebalanceAt::DEFAULT), Verdict::Even);
    // The replica that would move uses little, but could grow beyond the room of p1.
    let mut world = World::new(&[("a", 30), ("b", 15)]);
    world.add(Spread::Pool, 70, &[(0, 10)]);
    let blocked = world.choose(RebalanceAt::DEFAULT);
    assert!(matches!(blocked, Verdict::Blocked { .. }), "{blocked:?}");
    world.volumes[0].size_bytes = 60 * GIB;
    moved(world.choose(RebalanceAt::DEFAULT));
}

#[test]
fn no_two_replicas_come_into_one_pool_or_one_host_and_the_next_emptiest_pool_is_taken() {
    let mut world = World::new(&[("a", 40), ("b", 0), ("b", 5), ("c", 10)]);
    // The volume's other replica is in p1, the emptiest pool.
    world.add(Spread::Pool, 10, &[(0, 10), (1, 1)]);
    assert_eq!(moved(world.choose(RebalanceAt::DEFAULT)).to, "p2");
    world.volumes[0].spec.options.spread = Spread::Host;
    assert_eq!(moved(world.choose(RebalanceAt::DEFAULT)).to, "p3");
    world.pool("p3").unusable = "cordoned".into();
    let blocked = Verdict::Blocked { fullest: "p0".into(), emptiest: "p1".into() };
    assert_eq!(world.choose(RebalanceAt::DEFAULT), blocked);
}

#[test]
fn a_pool_that_a_volume_did_not_get_to_is_passed_over() {
    let mut world = World::new(&[("a", 0), ("b", 0), ("c", 1)]);
    world.add(Spread::Pool, 10, &[(0, 50)]);
    world.add(Spread::Pool, 10, &[(0, 20)]);
    assert_eq!(moved(world.choose(RebalanceAt::DEFAULT)).to, "p1");
    assert_eq!(moved(world.choose_past(RebalanceAt::DEFAULT, &[], &["p1"])).to, "p2");
    let nowhere = world.choose_past(RebalanceAt::DEFAULT, &[], &["p1", "p2"]);
    assert!(matches!(nowhere, Verdict::Blocked { .. }), "{nowhere:?}");
}

#[test]
fn the_replica_goes_that_evens_out_most_and_one_that_is_used_where_it_is_goes_last() {
    let mut world = World::new(&[("a", 0), ("b", 0)]);
    for used in [5, 20, 10, 45] {
        world.add(Spread::Pool, 10, &[(0, used)]);
    }
    let guid = |world: &World, n: usize| world.volumes[n].replicas[0].guid.0;
    // The pools have 80 and 0. Moving 45 leaves 35 and 45, moving 20 leaves 60 and 20.
    assert_eq!(moved(world.choose(RebalanceAt::DEFAULT)).guid, guid(&world, 3));
    let at_home = world.choose_of(RebalanceAt::DEFAULT, &["v3"]);
    assert_eq!(moved(at_home).guid, guid(&world, 1));
    let at_home = world.choose_of(RebalanceAt::DEFAULT, &["v0", "v1", "v2", "v3"]);
    assert_eq!(moved(at_home).guid, guid(&world, 3));
}

#[test]
fn a_replica_that_would_only_change_which_pool_is_the_full_one_stays() {
    let mut world = World::new(&[("a", 10), ("b", 0)]);
    world.add(Spread::Pool, 60, &[(0, 60)]);
    assert!(matches!(world.choose(RebalanceAt::DEFAULT), Verdict::Blocked { .. }));
}

fn worlds() -> impl Strategy<Value = World> {
    let pools = proptest::collection::vec((0u8..4, 20u64..200, 0u64..10, 0u8..8), 2..7);
    let volume = (any::<bool>(), proptest::collection::vec((any::<u8>(), 0u64..30), 1..4));
    (pools, proptest::collection::vec(volume, 0..25)).prop_map(|(pools, volumes)| {
        let hosts = ["a", "b", "c", "d"];
        let shapes: Vec<_> = pools.iter().map(|p| (hosts[usize::from(p.0)], p.2)).collect();
        let mut world = World::new(&shapes);
        for (at, (_, capacity, _, cordoned)) in pools.iter().enumerate() {
            world.pools[at].capacity_bytes = capacity * GIB;
            if *cordoned == 0 {
                world.pools[at].unusable = "cordoned".into();
            }
        }
        for (by_host, replicas) in volumes {
            let spread = if by_host { Spread::Host } else { Spread::Pool };
            let mut places: Vec<(usize, u64)> = Vec::new();
            for (at, used) in replicas {
                let at = usize::from(at) % world.pools.len();
                let host = |at: usize| &world.pools[at].host;
                let free =
                    |taken: &(usize, u64)| taken.0 != at && !(by_host && host(taken.0) == host(at));
                if places.iter().all(free) {
                    places.push((at, used));
                }
            }
            world.add(spread, 10, &places);
        }
        world
    })
}

proptest! {
    /// Every move keeps the rules and lowers one sum, no pool gets fuller than the fullest was, and
    /// the moves end. All this holds for any content of the pools, also if new copies are smaller.
    #[test]
    fn done_again_and_again_it_ends_and_every_move_makes_the_pools_more_even(
        mut world in worlds(),
        percents in proptest::collection::vec(50u64..=100, 1..20),
        at in 5u8..60,
    ) {
        prop_assert!(world.is_legal());
        let mut moves = 0;
        while let Verdict::Moves(chosen) = world.choose(RebalanceAt::Apart(at)) {
            let (weight, fullest) = (world.weight(), world.fullest());
            let taken_by_none = world.pool(&chosen.to).unusable.is_empty();
            prop_assert!(taken_by_none && world.pool(&chosen.from).unusable.is_empty());
            world.carry_out(&chosen, percents[moves % percents.len()]);
            prop_assert!(world.weight() < weight, "{chosen:?}");
            prop_assert!(world.fullest() <= fullest, "{chosen:?}");
            prop_assert!(world.is_legal(), "{chosen:?}");
            moves += 1;
            prop_assert!(moves < 1000, "no end");
        }
    }

    /// Small replicas without placement limits are moved until all pools are even.
    #[test]
    fn pools_whose_replicas_may_go_anywhere_end_up_even(
        places in proptest::collection::vec((0usize..4, 1u64..4), 1..60),
    ) {
        let mut world = World::new(&[("a", 0), ("b", 0), ("c", 0), ("d", 0)]);
        for (pool, used) in places {
            world.add(Spread::Pool, 4, &[(pool, used)]);
        }
        let mut moves = 0;
        let end = loop {
            match world.choose(RebalanceAt::DEFAULT) {
                Verdict::Moves(chosen) => world.carry_out(&chosen, 100),
                other => break other,
            }
            moves += 1;
            prop_assert!(moves < 1000, "no end");
        };
        // Placement may refuse the move where the destinations are too full for a new replica.
        let is_full = world.pools.iter().all(|pool| pool.used_bytes > 75 * GIB);
        prop_assert!(end == Verdict::Even || is_full, "{end:?}");
    }
}
