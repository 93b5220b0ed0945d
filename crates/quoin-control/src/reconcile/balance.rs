//! Choice of the replica that moves from a full pool to an emptier one, if any: a pure function.
//!
//! Pools are compared by *used* bytes, as a share of each pool's capacity. Volumes are thin, so
//! promised bytes say when a pool could be full, not that it is full. A pool whose blocks are used
//! up stops the writes of all its volumes, whatever is promised elsewhere. So a replica counts with
//! the bytes that it holds. Promised bytes limit the destination: placement must accept a new
//! replica of that size there ([`crate::volume::placement`]), so no move leads to a pool where the volume
//! could not be filled today.
//!
//! A replica moves from the fullest pool to the emptiest pool that may take one of its replicas.
//! The replica that evens out most goes first, so that few are moved. Two rules prevent moves to
//! and fro. Before a move, the shares of the two pools must differ by more than the policy's
//! distance. After it, the destination is fuller than the source by at most half of that distance.
//! Thus every move lowers one sum over all pools, of used × share ([`Filling::weight`]), by
//! at least moved bytes × half of the policy's distance. So moves end, however often this runs.

use std::cmp::Reverse;
use std::collections::HashSet;

use quoin_cluster::records::VolumeRecord;
use quoin_types::{ReplicaGuid, VolumeId};

use crate::volume::placement::{Candidate, Taken, place_beside};
use crate::volume::policy::RebalanceAt;

/// Share of a full pool: shares are in millionths.
const WHOLE: i128 = 1_000_000;
/// Least decrease of the pools' distance that is worth a change of membership: a thousandth.
const WORTH: i128 = WHOLE / 1000;

/// Used bytes and capacity of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Filling {
    used_bytes: u64,
    capacity_bytes: u64,
}

impl Filling {
    fn of(pool: &Candidate) -> Self {
        Self { used_bytes: pool.used_bytes, capacity_bytes: pool.capacity_bytes }
    }

    fn share(self) -> i128 {
        match self.capacity_bytes {
            0 => 0,
            capacity => i128::from(self.used_bytes) * WHOLE / i128::from(capacity),
        }
    }

    fn without(self, bytes: u64) -> Self {
        Self { used_bytes: self.used_bytes.saturating_sub(bytes), ..self }
    }

    fn with(self, bytes: u64) -> Self {
        Self { used_bytes: self.used_bytes.saturating_add(bytes), ..self }
    }

    /// Part of a pool in the sum that every move lowers.
    #[cfg(test)]
    fn weight(self) -> f64 {
        (self.used_bytes as f64).powi(2) / self.capacity_bytes as f64
    }
}

/// Replica that may be moved.
#[derive(Clone, Debug)]
pub(crate) struct Movable<'a> {
    pub volume: &'a VolumeRecord,
    pub guid: ReplicaGuid,
    pub pool: &'a str,
    /// Bytes that become free in its pool when it leaves.
    pub frees_bytes: u64,
    /// Bytes that the new replica will use: at most as many as any replica of the volume.
    pub takes_bytes: u64,
    /// The volume is used on the replica's host, where reads need no network.
    pub at_home: bool,
    /// Pools to which a move of the volume failed lately.
    pub barred: Vec<String>,
}

/// Next move, or the reason why there is none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The pools are as even as the policy requires.
    Even,
    Moves(Move),
    /// The pools are further apart, and no replica may move or would even them out.
    Blocked {
        fullest: String,
        emptiest: String,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Move {
    pub volume: VolumeId,
    pub guid: ReplicaGuid,
    pub from: String,
    pub to: String,
    /// Used shares of the two pools before the move.
    pub from_percent: u8,
    pub to_percent: u8,
}

fn percent(filling: Filling) -> u8 {
    (filling.share() * 100 / WHOLE).clamp(0, 100) as u8
}

/// Distance of the fullest and the emptiest usable pool, in millionths.
pub(crate) fn spread(pools: &[Candidate]) -> u64 {
    let usable = by_share(pools);
    let (Some(emptiest), Some(fullest)) = (usable.first(), usable.last()) else { return 0 };
    u64::try_from(Filling::of(fullest).share() - Filling::of(emptiest).share()).unwrap_or(0)
}

/// Pools that give and take replicas, the emptiest first. Pools that are cordoned, drained or
/// offline are left to the operator or to self-healing.
fn by_share(pools: &[Candidate]) -> Vec<&Candidate> {
    let is_usable = |pool: &&Candidate| pool.capacity_bytes > 0 && pool.unusable.is_empty();
    let mut usable: Vec<_> = pools.iter().filter(is_usable).collect();
    usable.sort_by_key(|pool| (Filling::of(pool).share(), &pool.name));
    usable
}

/// Pools that are fuller than another one by more than the policy's distance.
pub(crate) fn givers(pools: &[Candidate], at: RebalanceAt) -> HashSet<String> {
    let (usable, apart) = (by_share(pools), apart(at));
    let (Some(emptiest), Some(apart)) = (usable.first(), apart) else { return HashSet::new() };
    let gives = |pool: &&&Candidate| is_apart(pool, emptiest, apart);
    usable.iter().filter(gives).map(|pool| pool.name.clone()).collect()
}

/// The policy's distance, in millionths.
fn apart(at: RebalanceAt) -> Option<i128> {
    at.percent().map(|percent| i128::from(percent) * WHOLE / 100)
}

fn is_apart(from: &Candidate, to: &Candidate, apart: i128) -> bool {
    Filling::of(from).share() - Filling::of(to).share() > apart
}

/// Chooses the next move.
pub(crate) fn choose(pools: &[Candidate], movables: &[Movable], at: RebalanceAt) -> Verdict {
    let Some(apart) = apart(at) else { return Verdict::Even };
    let usable = by_share(pools);
    let is_apart = |from: &Candidate, to: &Candidate| is_apart(from, to, apart);
    let (Some(emptiest), Some(fullest)) = (usable.first(), usable.last()) else {
        return Verdict::Even;
    };
    if !is_apart(fullest, emptiest) {
        return Verdict::Even;
    }
    for from in usable.iter().rev() {
        for to in usable.iter().filter(|to| is_apart(from, to)) {
            let here = movables.iter().filter(|movable| movable.pool == from.name);
            let mut gains: Vec<_> = here
                .filter_map(|movable| Some((gain(from, to, movable, apart)?, movable)))
                .collect();
            gains.sort_by_key(|(gain, m)| (m.at_home, Reverse(*gain), m.guid));
            if let Some((_, movable)) = gains.into_iter().find(|(_, m)| fits(m, to, pools)) {
                return Verdict::Moves(Move {
                    volume: movable.volume.id.0,
                    guid: movable.guid,
                    from: from.name.clone(),
                    to: to.name.clone(),
                    from_percent: percent(Filling::of(from)),
                    to_percent: percent(Filling::of(to)),
                });
            }
        }
    }
    Verdict::Blocked { fullest: fullest.name.clone(), emptiest: emptiest.name.clone() }
}

/// Amount by which a move lowers the sum over all pools. `None` where the move is not worth it, or
/// would cause a move back.
fn gain(from: &Candidate, to: &Candidate, movable: &Movable, apart: i128) -> Option<i128> {
    let (from, to) = (Filling::of(from), Filling::of(to));
    let (left, filled) = (from.without(movable.frees_bytes), to.with(movable.takes_bytes));
    let before = from.share() - to.share();
    let after = left.share() - filled.share();
    let lowers = i128::from(movable.frees_bytes) * (from.share() + left.share())
        - i128::from(movable.takes_bytes) * (to.share() + filled.share());
    let is_worth_it = after >= -apart / 2
        && before - after.abs() >= WORTH
        && filled.share() <= from.share()
        && lowers >= i128::from(movable.frees_bytes) * apart / 2;
    is_worth_it.then_some(lowers)
}

/// Returns true if the rules of new replicas allow the replica in this pool.
fn fits(movable: &Movable, to: &Candidate, pools: &[Candidate]) -> bool {
    let Movable { volume, guid, barred, .. } = movable;
    if barred.contains(&to.name) {
        return false;
    }
    let replicas = &volume.replicas;
    let all: Vec<&str> = replicas.iter().map(|replica| replica.pool.as_str()).collect();
    let others: Vec<&str> =
        replicas.iter().filter(|r| r.guid.0 != *guid).map(|r| r.pool.as_str()).collect();
    let taken = Taken { pools: &all, hosts_of: &others };
    let named = [to.name.clone()];
    place_beside(&volume.spec, volume.size_bytes, pools, &taken, 1, &named).is_ok()
}

#[cfg(test)]
mod tests;
