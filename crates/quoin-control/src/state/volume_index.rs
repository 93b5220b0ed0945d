//! Lookups over all volumes: by pool, by node, and the bytes that each pool was promised.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::state::records::VolumeRecord;
use crate::state::table::Index;

/// Names of volumes' records by their holders.
#[derive(Debug, Default)]
pub struct VolumeIndex {
    by_pool: HashMap<String, BTreeSet<String>>,
    by_node: HashMap<String, BTreeSet<String>>,
    /// The sizes of all volumes, once for each replica that the pool has or is to have.
    promised_bytes: HashMap<String, u128>,
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

    /// Bytes that the pool was promised.
    pub fn promised_bytes(&self, pool: &str) -> u64 {
        let bytes = self.promised_bytes.get(pool).copied().unwrap_or(0);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

fn nodes(volume: &VolumeRecord) -> HashSet<&String> {
    volume.owner.iter().chain(volume.attachments.iter().map(|a| &a.node)).collect()
}

fn enter<'a>(
    by: &mut HashMap<String, BTreeSet<String>>,
    holders: impl IntoIterator<Item = &'a String>,
    volume: &str,
) {
    for holder in holders {
        by.entry(holder.clone()).or_default().insert(volume.to_owned());
    }
}

fn leave<'a>(
    by: &mut HashMap<String, BTreeSet<String>>,
    holders: impl IntoIterator<Item = &'a String>,
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

impl Index<VolumeRecord> for VolumeIndex {
    fn follow(&mut self, before: Option<&VolumeRecord>, after: Option<&VolumeRecord>) {
        if let Some(volume) = before {
            let name = volume.id.0.to_string();
            leave(&mut self.by_pool, volume.pools(), &name);
            leave(&mut self.by_node, nodes(volume), &name);
            for replica in &volume.replicas {
                if let Some(bytes) = self.promised_bytes.get_mut(&replica.pool) {
                    *bytes -= u128::from(volume.size_bytes);
                }
            }
        }
        if let Some(volume) = after {
            let name = volume.id.0.to_string();
            enter(&mut self.by_pool, volume.pools(), &name);
            enter(&mut self.by_node, nodes(volume), &name);
            for replica in &volume.replicas {
                let bytes = self.promised_bytes.entry(replica.pool.clone()).or_default();
                *bytes += u128::from(volume.size_bytes);
            }
        }
        self.promised_bytes.retain(|_, bytes| *bytes > 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};

    use super::*;
    use crate::state::records::{Cause, Discarded, ReplicaPhase, ReplicaRecord, Text};
    use crate::volume::spec::{self, Defaults};

    /// A volume with a replica in each of `pools`, one that is removed from `gone`, owned by `owner`.
    fn volume(id: u128, size_bytes: u64, pools: &[u8], gone: &[u8], owner: u8) -> VolumeRecord {
        let asked = quoin_api::control::VolumeSpec { name: "v".into(), ..Default::default() };
        let defaults = Defaults { replicas: 3, spread: quoin_api::volume::Spread::Pool };
        let spec = spec::complete(&asked, defaults).unwrap();
        let mut volume = VolumeRecord::new(VolumeId(id), spec, size_bytes);
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
        volume.owner = (owner > 0).then(|| owner.to_string());
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
                let of_node = named(&|volume| volume.owner.as_ref() == Some(&name));
                prop_assert_eq!(index.of_node(&name).cloned().unwrap_or_default(), of_node);
                let in_pool = |volume: &VolumeRecord| {
                    let here = volume.replicas.iter().filter(|replica| replica.pool == name);
                    here.count() as u64 * volume.size_bytes
                };
                prop_assert_eq!(index.promised_bytes(&name), all.values().map(in_pool).sum::<u64>());
            }
        }
    }
}
