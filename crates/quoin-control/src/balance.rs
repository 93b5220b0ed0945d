//! Which replica moves from a full pool to an emptier one, if any: a pure choice.
//!
//! What counts is what is *used*, as a share of each pool's capacity. Volumes are thin, so what was
//! promised says when a pool could be full and not that it is; a pool whose blocks are used up
//! stops the writes of all its volumes, whatever was promised elsewhere. So a replica counts with
//! what it holds. What is promised is not forgotten: the new place must be one that placement
//! would choose for a new replica of that size ([`crate::placement`]), so no move leads to where
//! the volume could not be filled today.
//!
//! It moves from the fullest pool to the emptiest that may take one of its replicas, where they are
//! further apart than the policy lets them be. Of several replicas the one goes that evens out
//! most, so that few are moved. Two things keep replicas from going to and fro: pools must be
//! apart by the whole of what the policy lets them before anything moves, and after a move the
//! taker is ahead of the giver by at most half of that. With them every move lowers one sum over
//! all pools, of used × share ([`Filling::weight`]), by at least what moved × half of the policy's
//! distance: so however often it is done, it ends.

use std::cmp::Reverse;

use quoin_types::{ReplicaGuid, VolumeId};

use crate::placement::{Candidate, Taken, place_beside};
use crate::policy::RebalanceAt;
use crate::records::VolumeRecord;

/// Shares are counted in millionths.
const WHOLE: i128 = 1_000_000;
/// Pools must come closer by so much, or it is not worth a change of membership: a thousandth.
const WORTH: i128 = WHOLE / 1000;

/// A pool by what is used of it.
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

    /// What moves lower in sum.
    #[cfg(test)]
    fn weight(self) -> f64 {
        (self.used_bytes as f64).powi(2) / self.capacity_bytes as f64
    }
}

/// A replica that could be elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Movable<'a> {
    pub volume: &'a VolumeRecord,
    pub guid: ReplicaGuid,
    pub pool: &'a str,
    /// What its pool has more without it.
    pub frees_bytes: u64,
    /// What it will take where it is made anew: at most what any replica of the volume uses.
    pub takes_bytes: u64,
    /// The volume is used on its host, where reads need no network.
    pub at_home: bool,
    /// Pools that it did not get to lately.
    pub barred: Vec<String>,
}

/// What is to be done, or why nothing is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The pools are as even as the policy asks for.
    Even,
    Moves(Move),
    /// They are further apart, and no replica may move or would even them out.
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
    /// Of the two pools, as they are.
    pub from_percent: u8,
    pub to_percent: u8,
}

fn percent(filling: Filling) -> u8 {
    (filling.share() * 100 / WHOLE).clamp(0, 100) as u8
}

/// How far the fullest of these pools and the emptiest that takes something are apart, in
/// millionths.
pub(crate) fn spread(pools: &[Candidate]) -> u64 {
    let usable = by_share(pools);
    let (Some(emptiest), Some(fullest)) = (usable.first(), usable.last()) else { return 0 };
    u64::try_from(Filling::of(fullest).share() - Filling::of(emptiest).share()).unwrap_or(0)
}

/// Those that give and take, the emptiest first. What is in pools that are cordoned, drained or
/// away is a person's, or healing's.
fn by_share(pools: &[Candidate]) -> Vec<&Candidate> {
    let is_usable = |pool: &&Candidate| pool.capacity_bytes > 0 && pool.unusable.is_empty();
    let mut usable: Vec<_> = pools.iter().filter(is_usable).collect();
    usable.sort_by_key(|pool| (Filling::of(pool).share(), &pool.name));
    usable
}

/// The one move that comes next.
pub(crate) fn choose(pools: &[Candidate], movables: &[Movable], at: RebalanceAt) -> Verdict {
    let Some(apart) = at.percent().map(|percent| i128::from(percent) * WHOLE / 100) else {
        return Verdict::Even;
    };
    let usable = by_share(pools);
    let is_apart = |from: &Candidate, to: &Candidate| {
        Filling::of(from).share() - Filling::of(to).share() > apart
    };
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

/// By how much the move lowers the sum over all pools; `None` where it is not worth it, or would
/// call for the way back.
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

/// Whether the rules of new replicas let it be there.
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
