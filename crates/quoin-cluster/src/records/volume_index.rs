//! Lookups over all volumes: by pool, by node, and the bytes that each pool was promised.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;

use quoin_types::ids::GroupId;

use crate::records::{Cause, Index, VolumePhase, VolumeRecord};

/// Names of volumes' records by their holders.
#[derive(Debug, Default)]
pub struct VolumeIndex {
    by_pool: HashMap<String, BTreeSet<String>>,
    by_node: HashMap<String, BTreeSet<String>>,
    by_holder: HashMap<String, BTreeSet<String>>,
    by_mirror: HashMap<GroupId, BTreeSet<String>>,
    /// The sizes of all volumes, once for each replica that the pool has or is to have.
    promised_bytes: HashMap<String, u128>,
    /// Volumes that each node owns.
    owned: HashMap<String, u32>,
    /// Volumes with a replica that is on its way in.
    growing: BTreeSet<String>,
    /// Volumes of which a pool is to remove something.
    shrinking: BTreeSet<String>,
    /// Replicas on their way in that no user requested.
    rebuilds: Rebuilds,
}

/// Replicas on their way in that no user requested.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Rebuilds {
    /// By the pool that takes the new replica.
    to: HashMap<String, u32>,
    /// By the pool of the replica that it follows.
    from: HashMap<String, u32>,
    /// Replicas that move to even out pools, and the others.
    balancing: u32,
    urgent: u32,
}

fn add(counts: &mut HashMap<String, u32>, name: &str, comes: bool) {
    let count = counts.entry(name.to_owned()).or_default();
    *count = if comes { *count + 1 } else { *count - 1 };
    if *count == 0 {
        counts.remove(name);
    }
}

impl Rebuilds {
    pub fn to(&self, pool: &str) -> u32 {
        self.to.get(pool).copied().unwrap_or(0)
    }

    pub fn from(&self, pool: &str) -> u32 {
        self.from.get(pool).copied().unwrap_or(0)
    }

    pub fn balancing(&self) -> u32 {
        self.balancing
    }

    pub fn urgent(&self) -> u32 {
        self.urgent
    }

    fn follow(&mut self, volume: &VolumeRecord, comes: bool) {
        for newcomer in volume.replicas.iter().filter(|replica| !volume.is_known(replica)) {
            let count = match newcomer.cause {
                Cause::Asked => continue,
                Cause::Balance => &mut self.balancing,
                Cause::Healing | Cause::Drain => &mut self.urgent,
            };
            *count = if comes { *count + 1 } else { *count - 1 };
            add(&mut self.to, &newcomer.pool, comes);
            let old = volume.replicas.iter().find(|r| r.id == newcomer.id && volume.is_known(r));
            if let Some(old) = old {
                add(&mut self.from, &old.pool, comes);
            }
        }
    }
}

impl VolumeIndex {
    /// Volumes with a replica in the pool, or one that it is to remove.
    pub fn of_pool(&self, pool: &str) -> Option<&BTreeSet<String>> {
        self.by_pool.get(pool)
    }

    /// Volumes that the node owns or has attached.
    pub fn of_node(&self, node: &str) -> Option<&BTreeSet<String>> {
        self.by_node.get(node)
    }

    /// Volumes whose epoch the node holds, by their records.
    pub fn of_holder(&self, node: &str) -> Option<&BTreeSet<String>> {
        self.by_holder.get(node)
    }

    /// Volumes that name the group as that of their mirror.
    pub fn of_mirror(&self, group: GroupId) -> Option<&BTreeSet<String>> {
        self.by_mirror.get(&group)
    }

    /// Number of volumes that the node owns.
    pub fn owned(&self, node: &str) -> usize {
        self.owned.get(node).map_or(0, |count| *count as usize)
    }

    /// Volumes with a replica that is on its way in.
    pub fn growing(&self) -> &BTreeSet<String> {
        &self.growing
    }

    /// Volumes of which a pool is to remove something.
    pub fn shrinking(&self) -> &BTreeSet<String> {
        &self.shrinking
    }

    pub fn rebuilds(&self) -> &Rebuilds {
        &self.rebuilds
    }

    /// Bytes that the pool was promised.
    pub fn promised_bytes(&self, pool: &str) -> u64 {
        let bytes = self.promised_bytes.get(pool).copied().unwrap_or(0);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

fn nodes(volume: &VolumeRecord) -> HashSet<&String> {
    volume.opened.owner.iter().chain(volume.attachments.iter().map(|a| &a.node)).collect()
}

fn enter<'a, K: Clone + Eq + Hash + 'a>(
    by: &mut HashMap<K, BTreeSet<String>>,
    holders: impl IntoIterator<Item = &'a K>,
    volume: &str,
) {
    for holder in holders {
        by.entry(holder.clone()).or_default().insert(volume.to_owned());
    }
}

fn leave<'a, K: Eq + Hash + 'a>(
    by: &mut HashMap<K, BTreeSet<String>>,
    holders: impl IntoIterator<Item = &'a K>,
    volume: &str,
) {
    for holder in holders {
        if let Some(volumes) = by.get_mut(holder) {
            volumes.remove(volume);
            if volumes.is_empty() {
                by.remove(holder);
            }
        }
    }
}

fn holder(volume: &VolumeRecord) -> Option<&String> {
    Some(&volume.grants.holder).filter(|holder| !holder.is_empty())
}

fn mirror(volume: &VolumeRecord) -> Option<&GroupId> {
    volume.mirror.as_ref().map(|mirror| &mirror.group.0)
}

fn is_growing(volume: &VolumeRecord) -> bool {
    volume.replicas.iter().any(|replica| !volume.is_known(replica))
}

fn is_shrinking(volume: &VolumeRecord) -> bool {
    volume.phase == VolumePhase::Deleting || !volume.discarded.is_empty()
}

impl VolumeIndex {
    fn remove(&mut self, volume: &VolumeRecord) {
        let name = volume.id.0.to_string();
        leave(&mut self.by_pool, volume.pools(), &name);
        leave(&mut self.by_node, nodes(volume), &name);
        leave(&mut self.by_holder, holder(volume), &name);
        leave(&mut self.by_mirror, mirror(volume), &name);
        for replica in &volume.replicas {
            if let Some(bytes) = self.promised_bytes.get_mut(&replica.pool) {
                *bytes -= u128::from(volume.size_bytes);
                if *bytes == 0 {
                    self.promised_bytes.remove(&replica.pool);
                }
            }
        }
        if let Some(owner) = &volume.opened.owner {
            add(&mut self.owned, owner, false);
        }
        self.growing.remove(&name);
        self.shrinking.remove(&name);
        self.rebuilds.follow(volume, false);
    }

    fn insert(&mut self, volume: &VolumeRecord) {
        let name = volume.id.0.to_string();
        enter(&mut self.by_pool, volume.pools(), &name);
        enter(&mut self.by_node, nodes(volume), &name);
        enter(&mut self.by_holder, holder(volume), &name);
        enter(&mut self.by_mirror, mirror(volume), &name);
        for replica in &volume.replicas {
            let bytes = self.promised_bytes.entry(replica.pool.clone()).or_default();
            *bytes += u128::from(volume.size_bytes);
        }
        if let Some(owner) = &volume.opened.owner {
            add(&mut self.owned, owner, true);
        }
        self.rebuilds.follow(volume, true);
        if is_growing(volume) {
            self.growing.insert(name.clone());
        }
        if is_shrinking(volume) {
            self.shrinking.insert(name);
        }
    }
}

impl Index<VolumeRecord> for VolumeIndex {
    fn follow(&mut self, before: Option<&VolumeRecord>, after: Option<&VolumeRecord>) {
        if let Some(volume) = before {
            self.remove(volume);
        }
        if let Some(volume) = after {
            self.insert(volume);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};

    use super::*;
    use crate::mirror::{Begun, Keepsake};
    use crate::ownership::mirrored;
    use crate::records::{Discarded, MemberRecord, ReplicaPhase, ReplicaRecord, Text};

    /// A volume with a replica in each of `pools`, one that is removed from `gone`, owned by `owner`.
    fn volume(id: u128, size_bytes: u64, pools: &[u8], gone: &[u8], owner: u8) -> VolumeRecord {
        let spec = crate::records::recorded::volume().spec;
        let mut volume = VolumeRecord::new(VolumeId(id), spec, size_bytes, 1);
        volume.replicas = pools
            .iter()
            .map(|pool| ReplicaRecord {
                id: Text(ReplicaId(1)),
                guid: Text(ReplicaGuid(1)),
                pool: pool.to_string(),
                phase: ReplicaPhase::Keep,
                leaving: false,
                placed: false,
                cause: Cause::Asked,
            })
            .collect();
        let discarded = |pool: &u8| Discarded {
            id: Text(ReplicaId(1)),
            guid: Text(ReplicaGuid(1)),
            pool: pool.to_string(),
        };
        volume.discarded = gone.iter().map(discarded).collect();
        volume.opened.owner = (owner > 0).then(|| owner.to_string());
        volume.grants.holder = if owner == 2 { "2".to_owned() } else { String::new() };
        // The first replica is known; the others are on their way in, one in its place.
        let causes = [Cause::Asked, Cause::Healing, Cause::Balance, Cause::Drain];
        for (n, replica) in volume.replicas.iter_mut().enumerate() {
            replica.id = Text(ReplicaId(n as u128 / 2));
            replica.guid = Text(ReplicaGuid(n as u128));
            replica.cause = causes[n % causes.len()];
        }
        let first = volume.replicas.first().map(|first| (first.id, first.guid));
        volume.membership.known =
            first.map(|(id, guid)| MemberRecord { id, guid }).into_iter().collect();
        if owner > 0 {
            let keepsake = Keepsake { is_primary: true, begun: Begun::default() };
            mirrored::keep(&mut volume, GroupId(u128::from(owner)), keepsake);
        }
        volume
    }

    proptest! {
        #[test]
        fn the_index_says_what_a_look_at_all_volumes_would(
            changes in proptest::collection::vec(
                (
                    0u128..6,
                    proptest::option::of((
                        1u64..100,
                        proptest::collection::vec(0u8..4, 0..4),
                        proptest::collection::vec(0u8..4, 0..3),
                        0u8..3,
                    )),
                ),
                0..40,
            ),
        ) {
            let mut index = VolumeIndex::default();
            let mut all: HashMap<u128, VolumeRecord> = HashMap::new();
            for (id, made) in changes {
                let after = made.map(|(size, pools, gone, owner)| volume(id, size, &pools, &gone, owner));
                let before = match after.clone() {
                    Some(after) => all.insert(id, after),
                    None => all.remove(&id),
                };
                index.follow(before.as_ref(), after.as_ref());
            }
            for name in (0..4).map(|n: u8| n.to_string()) {
                let named = |is_it: &dyn Fn(&VolumeRecord) -> bool| -> BTreeSet<String> {
                    let found = all.values().filter(|volume| is_it(volume));
                    found.map(|volume| volume.id.0.to_string()).collect()
                };
                let of_pool = named(&|volume| volume.pools().any(|pool| *pool == name));
                prop_assert_eq!(index.of_pool(&name).cloned().unwrap_or_default(), of_pool);
                let of_node = named(&|volume| volume.opened.owner.as_ref() == Some(&name));
                prop_assert_eq!(index.of_node(&name).cloned().unwrap_or_default(), of_node);
                let in_pool = |volume: &VolumeRecord| {
                    let here = volume.replicas.iter().filter(|replica| replica.pool == name);
                    here.count() as u64 * volume.size_bytes
                };
                prop_assert_eq!(index.promised_bytes(&name), all.values().map(in_pool).sum::<u64>());
                let of_holder = named(&|volume| volume.grants.holder == name);
                prop_assert_eq!(index.of_holder(&name).cloned().unwrap_or_default(), of_holder);
                let group = GroupId(name.parse().unwrap());
                let of_mirror = named(&|volume| {
                    volume.mirror.as_ref().is_some_and(|mirror| mirror.group.0 == group)
                });
                prop_assert_eq!(index.of_mirror(group).cloned().unwrap_or_default(), of_mirror);
                let owned = all.values().filter(|volume| volume.opened.owner.as_ref() == Some(&name));
                prop_assert_eq!(index.owned(&name), owned.count());
                let newcomers = |volume: &VolumeRecord| {
                    let own = |r: &&ReplicaRecord| !volume.is_known(r) && r.cause != Cause::Asked;
                    volume.replicas.iter().filter(own).cloned().collect::<Vec<_>>()
                };
                let to = all.values().flat_map(newcomers).filter(|r| r.pool == name);
                prop_assert_eq!(index.rebuilds().to(&name), to.count() as u32);
                let from = all.values().flat_map(|volume| {
                    let follows = |new: &ReplicaRecord| {
                        let of_it = |r: &&ReplicaRecord| r.id == new.id && volume.is_known(r);
                        volume.replicas.iter().find(of_it).is_some_and(|old| old.pool == name)
                    };
                    newcomers(volume).into_iter().filter(follows).collect::<Vec<_>>()
                });
                prop_assert_eq!(index.rebuilds().from(&name), from.count() as u32);
            }
            let all_new = |is_it: fn(&ReplicaRecord) -> bool| {
                let new = all.values().flat_map(|v| v.replicas.iter().filter(|r| !v.is_known(r)));
                new.filter(|replica| is_it(replica)).count() as u32
            };
            prop_assert_eq!(index.rebuilds().balancing(), all_new(|r| r.cause == Cause::Balance));
            let urgent = all_new(|r| matches!(r.cause, Cause::Healing | Cause::Drain));
            prop_assert_eq!(index.rebuilds().urgent(), urgent);
            let named = |is_it: fn(&VolumeRecord) -> bool| -> BTreeSet<String> {
                let found = all.values().filter(|volume| is_it(volume));
                found.map(|volume| volume.id.0.to_string()).collect()
            };
            prop_assert_eq!(index.growing(), &named(is_growing));
            prop_assert_eq!(index.shrinking(), &named(is_shrinking));
        }
    }
}
