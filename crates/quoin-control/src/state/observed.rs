//! Reports of pools, nodes and targets about themselves; kept in memory and reported anew after a
//! restart of either side.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{FeedProgress, GoesBy, Scrub};
use quoin_cluster::ownership::devices::DeviceSeen;
pub use quoin_cluster::ownership::lifecycle::ReplicaState;
use quoin_cluster::ownership::liveness::Hearing;
use quoin_types::{Epoch, Position, ReplicaGuid, Time, VolumeId};
use tokio::time::Instant;

use crate::state::reach::Reach;
use crate::time;

#[derive(Clone, PartialEq, Debug)]
pub struct ReplicaSeen {
    pub volume: VolumeId,
    pub state: ReplicaState,
    pub quorum: bool,
    pub position: Position,
    pub used_bytes: u64,
    /// Known to be bad and not repaired yet.
    pub bad_blocks: u64,
    pub repaired: u64,
    /// Life of a target's lease on it.
    pub hearing: Hearing,
    /// It shares blocks with the source that it was made from.
    pub is_clone: bool,
    /// Generation of the volume's record that the pool keeps; 0: none.
    pub record_generation: u64,
    /// The highest epoch that it has promised, and since when it says so.
    pub promised: Epoch,
    pub promised_since: Time,
    /// Since when it says that no session is open; `None`: one is, or it does not say.
    pub closed_since: Option<Time>,
    /// Number of the order to give space back that was carried out last.
    pub reclaimed: u64,
}

impl ReplicaSeen {
    /// Facts that ask for a reaction where it changes.
    fn standing(&self) -> (ReplicaState, bool, bool) {
        (self.state, self.quorum, self.is_clone)
    }

    /// This report after the one before.
    pub fn after(self, before: Option<&Self>, now: Instant) -> Self {
        let hearing = before.map(|before| before.hearing).unwrap_or_default();
        // A pool that removed the replica promises nothing any more, also where it had said of no promise before.
        let is_gone = |seen: &Self| seen.state == ReplicaState::Gone;
        let is_same = |one: &&Self| one.promised == self.promised && is_gone(one) == is_gone(&self);
        let same = before.filter(is_same);
        let promised_since = same.map_or(time::of(now), |before| before.promised_since);
        let closed_before = before.and_then(|before| before.closed_since);
        let closed_since = self.closed_since.map(|_| closed_before.unwrap_or(time::of(now)));
        let hearing = self.hearing.after(hearing, time::of(now));
        Self { hearing, promised_since, closed_since, ..self }
    }
}

#[derive(Clone, Debug)]
pub struct PoolSeen {
    pub last: Instant,
    pub leaving: bool,
    pub error: String,
    /// Reason why it takes no more while it serves on.
    pub warning: String,
    /// It takes no further replica, whatever space it has.
    pub ring_full: bool,
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    /// Part of them that volumes and snapshots need.
    pub live_bytes: u64,
    pub free_bytes: u64,
    pub replicas: HashMap<ReplicaGuid, ReplicaSeen>,
    pub scrub: Scrub,
    /// Number of the report by which all of this is known; 0: none.
    pub report: u64,
}

impl PoolSeen {
    /// It was away.
    pub fn pause(&mut self, now: Instant) {
        for replica in self.replicas.values_mut() {
            replica.hearing = replica.hearing.after_a_pause(time::of(now));
        }
    }

    /// Takes in what changed. Returns the volumes as [`Self::differing`] does.
    pub fn change(
        &mut self,
        listed: HashMap<ReplicaGuid, ReplicaSeen>,
        removed: &[ReplicaGuid],
    ) -> HashSet<VolumeId> {
        let mut volumes = HashSet::new();
        for (guid, replica) in listed {
            let replica = replica.after(self.replicas.get(&guid), self.last);
            let (volume, now) = (replica.volume, replica.standing());
            let before = self.replicas.insert(guid, replica);
            if before.is_none_or(|before| before.standing() != now) {
                volumes.insert(volume);
            }
        }
        volumes.extend(removed.iter().filter_map(|guid| Some(self.replicas.remove(guid)?.volume)));
        volumes
    }

    /// Positions move with every write; only what exists or not asks for a reaction.
    /// The volumes of which it holds something else than `other` did.
    pub fn differing(&self, other: &Self) -> HashSet<VolumeId> {
        let differs = |one: &Self, other: &Self| {
            let differs = |(guid, replica): &(&ReplicaGuid, &ReplicaSeen)| {
                let other = other.replicas.get(guid);
                other.is_none_or(|other| other.standing() != replica.standing())
            };
            one.replicas.iter().filter(differs).map(|(_, replica)| replica.volume).collect()
        };
        let mut volumes: HashSet<_> = differs(self, other);
        volumes.extend::<HashSet<_>>(differs(other, self));
        volumes
    }
}

#[derive(Clone, Debug)]
pub struct NodeSeen {
    pub last: Instant,
    pub leaving: bool,
    /// Devices of volumes there, as it said last; `None`: it did not say.
    pub devices: Option<DevicesSeen>,
    /// Where other nodes reach the volumes that its target serves; empty: nowhere.
    pub share_address: String,
    /// Digest of the fences that its target has carried out; 0: of none. `None`: its target has not reported.
    pub fences_digest: Option<u64>,
}

/// All devices of a node at one moment.
#[derive(Clone, Debug)]
pub struct DevicesSeen {
    pub told: Instant,
    pub all: Vec<DeviceSeen>,
}

impl NodeSeen {
    pub fn devices(&self) -> &[DeviceSeen] {
        self.devices.as_ref().map_or(&[], |seen| &seen.all)
    }
}

/// A target's report of the replicas of a volume.
#[derive(Clone, PartialEq, Debug)]
pub struct Progress {
    pub state: String,
    pub applied_lsn: u64,
    pub rebuilt_bytes: u64,
    pub rebuild_total_bytes: u64,
    /// Average time to apply a write, in microseconds; 0: not known.
    pub write_us: u64,
    pub slow: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub struct VolumeSeen {
    pub node: String,
    pub epoch: u64,
    pub state: String,
    pub waiting_for: String,
    /// Where it is served over TCP; empty: nowhere.
    pub nbd_uri: String,
    pub replicas: HashMap<ReplicaGuid, Progress>,
    /// It waits to open for these, which may know of a change that the record lacks.
    pub silent: Vec<ReplicaGuid>,
    /// The membership that it went by when it said this.
    pub membership_version: u64,
    /// Configuration that it was given and holds; `None`: it did not report it.
    pub goes_by: Option<Arc<GoesBy>>,
    pub device: DeviceMade,
    /// Version of the options that rule all its IO; 0: it does not report it.
    pub options_version: u64,
    /// Kind of the wait, in the words of [`quoin_api::control::VolumeReport`].
    pub waiting_kind: String,
    pub content: ContentSeen,
}

/// A target's report of a volume's content, for its mirror.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ContentSeen {
    /// No entry behind this LSN changed the content; 0: not known.
    pub lsn: u64,
    /// Wall clock, in ms, when its last report but this one had come: it was written after that.
    pub after_ms: u64,
    /// Wall clock when this report came.
    pub told_ms: u64,
    /// The transfer that it takes, as it was ordered, and how far it is.
    pub feed: Option<FeedProgress>,
}

/// The block device that its node made of it, where one was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceMade {
    pub path: String,
    pub message: String,
    pub refused: bool,
}

impl VolumeSeen {
    /// Returns true if more than progress differs from what it said `before`.
    pub fn differs(&self, before: &Self) -> bool {
        let states = |seen: &Self| {
            let states = seen.replicas.iter().map(|(guid, r)| (*guid, r.state.clone()));
            states.collect::<HashMap<_, _>>()
        };
        let ruled = |seen: &Self| (seen.options_version, seen.waiting_kind.clone());
        ruled(self) != ruled(before)
            || (&self.node, self.epoch, &self.state, &self.silent, self.membership_version)
                != (
                    &before.node,
                    before.epoch,
                    &before.state,
                    &before.silent,
                    before.membership_version,
                )
            || states(self) != states(before)
    }

    /// Returns true if the target serves with every replica that it goes by.
    pub fn is_whole(&self) -> bool {
        let mut all = self.replicas.values();
        self.state == "serving"
            && !self.replicas.is_empty()
            && all.all(|replica| replica.state == "in-sync")
    }
}

/// All of it.
pub struct Observed {
    pub started: Instant,
    pub pools: BTreeMap<String, PoolSeen>,
    pub nodes: BTreeMap<String, NodeSeen>,
    pub volumes: HashMap<VolumeId, VolumeSeen>,
    /// Volumes that were served under the membership and the epoch of their record since this
    /// controller started, which an old copy of the record would not be.
    pub confirmed: HashSet<VolumeId>,
    /// Volumes whose records were found to be an old copy, announced once.
    pub behind: HashSet<VolumeId>,
    /// Which pools are reached where they say they are.
    pub reach: Reach,
    /// When targets began to open volumes.
    pub openings: HashMap<VolumeId, Instant>,
}

impl Observed {
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
            pools: BTreeMap::new(),
            nodes: BTreeMap::new(),
            volumes: HashMap::new(),
            confirmed: HashSet::new(),
            behind: HashSet::new(),
            reach: Reach::default(),
            openings: HashMap::new(),
        }
    }

    /// The pool, if it is heard of, well, and reached where it says it is.
    pub fn online_pool(&self, name: &str, offline_after: Duration) -> Option<&PoolSeen> {
        let starting = self.starting(offline_after);
        self.heard_pool(name, offline_after)
            .filter(|_| self.reach.why_not(name, starting).is_none())
    }

    /// The pool, if it is heard of and well, whether or not it is reached.
    pub fn heard_pool(&self, name: &str, offline_after: Duration) -> Option<&PoolSeen> {
        let alive = |seen: &&PoolSeen| !seen.leaving && seen.last.elapsed() < offline_after;
        self.pools.get(name).filter(alive).filter(|seen| seen.error.is_empty())
    }

    /// Why a pool that is heard of is of no use; `None`: it is, or it is not heard of.
    pub fn unreachable(&self, name: &str, offline_after: Duration) -> Option<&str> {
        self.heard_pool(name, offline_after)?;
        self.reach.why_not(name, self.starting(offline_after))
    }

    pub fn node_online(&self, name: &str, offline_after: Duration) -> bool {
        let seen = self.nodes.get(name);
        seen.is_some_and(|seen| !seen.leaving && seen.last.elapsed() < offline_after)
    }

    /// Takes a sign of life of a node in; what is known of its devices stays.
    pub fn node_lives(&mut self, name: &str) {
        let seen = self.nodes.entry(name.to_owned());
        let now = Instant::now();
        seen.and_modify(|seen| (seen.last, seen.leaving) = (now, false)).or_insert(NodeSeen {
            last: now,
            leaving: false,
            devices: None,
            share_address: String::new(),
            fences_digest: None,
        });
    }

    /// Soon after a start nothing can be said about who has not spoken yet.
    pub fn starting(&self, offline_after: Duration) -> bool {
        self.started.elapsed() < offline_after
    }
}
