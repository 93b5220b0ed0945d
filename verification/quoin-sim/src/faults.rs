//! Faults of a run: their kinds, their times, their counters.
//!
//! A run's profile bounds what may fail together, so that every run is one whose outcome the
//! contract promises: power, disks and processes fail anywhere; or data rots and disks are
//! lost in one replica (then the power fails everywhere at once or at that replica only: together
//! with a loss elsewhere it would be more than CF-1 failure domains); or one replica's disk lies
//! about what it wrote, and nothing keeps the others from answering.
//!
//! Some faults are aimed: they wait for a step of the protocol and are injected in the middle of it.

use quoin_replication::Step;

use crate::random::Random;
use crate::schedule::{Instant, SECOND};
use crate::shape::FaultShape;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum FaultKind { $($(#[$doc])* $name),* }

        impl FaultKind {
            pub const ALL: &[FaultKind] = &[$(FaultKind::$name),*];

            pub fn name(self) -> &'static str {
                match self { $(FaultKind::$name => $text),* }
            }
        }
    };
}

kinds! {
    TargetCrash = "target crash",
    ReplicaCrash = "replica crash",
    PowerOne = "power cut, one host",
    PowerSome = "power cut, several hosts",
    PowerAll = "power cut, all hosts",
    Partition = "partition",
    PartitionOneWay = "partition, one way",
    DelayStorm = "delay storm",
    ConnectionCut = "connection cut",
    BulkCut = "bulk connection cut alone",
    BulkSlow = "bulk connection slow alone",
    ClockDrift = "clock drift",
    ClockJump = "clock jump",
    ClockStop = "clock stop",
    TargetPause = "target paused",
    ReplicaPause = "replica paused",
    SlowDisk = "slow disk",
    StuckDisk = "stuck disk",
    DiskWriteError = "disk EIO, write",
    DiskReadError = "disk EIO, read",
    DiskSyncError = "disk EIO, sync",
    Rot = "bit rot",
    LostWrite = "write lost by the disk",
    MisdirectedWrite = "write misdirected by the disk",
    DiskRolledBack = "disk rolled back",
    FullPool = "full pool",
    /// The power fails everywhere, pools are full once they are back, and the owner changes and
    /// changes back meanwhile.
    PowerAllFull = "power cut, full pools, owner changes twice",
    /// The controller names another owner while the old target still runs.
    Failover = "failover, old target alive",
    /// The owner's host is cut off from everybody, and the volume is given to the other one.
    OwnerIsolated = "owner cut off, failover",
    ControlLost = "control plane answers lost",
    ControlLate = "control plane answers late",
    ControlRolledBack = "control plane restored from an old copy",
    SpoiledFrame = "byte changed on the wire",
    /// Everything that an operator may ask for is asked for, several times.
    Operator = "operator retries everything",
    Wipe = "replica wiped",
    TargetShutdown = "target shutdown",
    ReplicaShutdown = "replica shutdown",
    /// A pool's thread stands still in the middle of a round.
    PoolStalls = "round of a pool stands still",
    TargetStalls = "round of a target stands still",
    /// A host drops packets, and hundreds of other volumes dial it.
    BlackHole = "host drops packets, hundreds dial it",
    ReadErrorsApart = "disk EIO, read, twice, weeks apart",
    /// Opens and orders for another volume name this one's replica.
    OrderForAnother = "order for another volume",
}

/// How often each fault was injected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultCounts(pub [u64; FaultKind::ALL.len()]);

impl Default for FaultCounts {
    fn default() -> Self {
        Self([0; FaultKind::ALL.len()])
    }
}

impl FaultCounts {
    pub fn add(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    pub fn merge(&mut self, other: &Self) {
        for (a, b) in self.0.iter_mut().zip(&other.0) {
            *a += b;
        }
    }
}

/// Failures that may occur together in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Profile {
    /// Power, disks' errors, processes, network, clocks.
    Power,
    /// Rot and loss of one replica's disk, with all else that does not touch another's data.
    Media { victim: usize },
    /// One replica's disk says that it wrote and did not, or wrote elsewhere.
    Liar { victim: usize },
}

/// A fault that is to be injected some events after `at`, in the middle of a burst of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Planned {
    pub at: Instant,
    pub kind: FaultKind,
    /// Events that pass between the burst's begin and the fault, at most where it is aimed.
    pub countdown: u64,
    /// The step that it waits for.
    pub aim: Option<Step>,
    /// Its own chance, so that leaving out one fault changes little of the others.
    pub seed: u64,
}

fn weight(kind: FaultKind, profile: Profile, clocks_stop: bool) -> u32 {
    use FaultKind as F;
    let media = matches!(profile, Profile::Media { .. });
    if let Profile::Liar { .. } = profile {
        return match kind {
            F::TargetCrash | F::LostWrite | F::MisdirectedWrite => 10,
            F::ReplicaCrash | F::PowerOne | F::Rot | F::TargetPause | F::TargetShutdown => 5,
            F::ClockDrift | F::ClockJump | F::Operator => 2,
            _ => 0,
        };
    }
    match kind {
        F::TargetCrash | F::ReplicaCrash => 10,
        F::PowerOne => 8,
        F::PowerAll => 5,
        F::PowerSome | F::DiskWriteError | F::DiskSyncError if media => 0,
        F::PowerSome | F::DiskWriteError | F::DiskSyncError => 4,
        F::DiskReadError => 3,
        F::Partition | F::PartitionOneWay | F::ConnectionCut => 8,
        F::DelayStorm | F::SlowDisk | F::BulkCut | F::BulkSlow => 4,
        F::ClockDrift => 3,
        // A lease cannot be right on clocks that stop; `reads: confirmed` is made for them.
        F::ClockStop if !clocks_stop => 0,
        F::ClockJump | F::ClockStop => 3,
        F::TargetPause | F::ReplicaPause => 6,
        F::Rot if media => 10,
        F::Wipe if media => 8,
        F::DiskRolledBack if media => 6,
        F::Rot | F::Wipe | F::DiskRolledBack => 0,
        F::LostWrite | F::MisdirectedWrite => 0,
        F::StuckDisk | F::ControlRolledBack | F::SpoiledFrame | F::Operator => 4,
        F::FullPool => 3,
        F::Failover => 10,
        // A partition and a failover come together often enough; swarms aim at it.
        F::OwnerIsolated => 0,
        F::PowerAllFull => 0,
        F::ControlLost | F::ControlLate => 4,
        F::TargetShutdown | F::ReplicaShutdown => 4,
        // Of the swarm `hosts`.
        F::PoolStalls | F::TargetStalls | F::BlackHole => 0,
        F::ReadErrorsApart | F::OrderForAnother => 0,
    }
}

/// The faults of one run, by time.
pub fn plan(
    profile: Profile,
    clocks_stop: bool,
    horizon: Instant,
    shape: Option<&FaultShape>,
    random: &mut Random,
) -> Vec<Planned> {
    let mut weights: Vec<u32> =
        FaultKind::ALL.iter().map(|k| weight(*k, profile, clocks_stop)).collect();
    let mut count = random.between(5, 20);
    let mut patience = 6000;
    if let Some(shape) = shape {
        narrow(&mut weights, shape.kinds, random);
        count = random.between(shape.count.0, shape.count.1);
        patience = 600;
    }
    let mut planned: Vec<Planned> = (0..count)
        .map(|_| Planned {
            at: random.between(SECOND / 10, horizon),
            kind: FaultKind::ALL[random.weighted(&weights)],
            countdown: if random.percent(70) { random.below(300) } else { random.below(patience) },
            aim: random.percent(40).then(|| *random.pick(Step::ALL)),
            seed: random.draw(),
        })
        .collect();
    // Faults in company find more than faults alone.
    for i in 1..planned.len() {
        let (company, within) = if shape.is_some() { (60, 8) } else { (35, 2) };
        if random.percent(company) {
            planned[i].at = planned[i - 1].at + random.below(SECOND / within);
        }
    }
    planned.sort_by_key(|p| p.at);
    planned
}

/// Kinds that are injected in their swarms alone.
const OF_SWARMS: [FaultKind; 7] = [
    FaultKind::OwnerIsolated,
    FaultKind::PowerAllFull,
    FaultKind::PoolStalls,
    FaultKind::TargetStalls,
    FaultKind::BlackHole,
    FaultKind::ReadErrorsApart,
    FaultKind::OrderForAnother,
];

/// Leaves the kinds of a swarm, with its weights; or any few of those that this profile allows.
/// Limits the weights to some kinds; the profile's exclusions stay.
fn narrow(weights: &mut [u32], kinds: &[(FaultKind, u32)], random: &mut Random) {
    if kinds.is_empty() {
        let allowed: Vec<usize> = (0..weights.len()).filter(|k| weights[*k] > 0).collect();
        let few = random.between(2, 5);
        let chosen: Vec<usize> = (0..few).map(|_| *random.pick(&allowed)).collect();
        for (kind, weight) in weights.iter_mut().enumerate() {
            *weight = u32::from(chosen.contains(&kind));
        }
        return;
    }
    for (kind, weight) in weights.iter_mut().enumerate() {
        let wanted = kinds.iter().find(|(k, _)| *k as usize == kind).map_or(0, |(_, w)| *w);
        let allowed = *weight > 0 || OF_SWARMS.contains(&FaultKind::ALL[kind]);
        *weight = if allowed { wanted } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm::Swarm;

    #[test]
    fn every_kind_of_fault_is_planned_by_some_seed_and_none_against_its_profile() {
        let mut counts = FaultCounts::default();
        for seed in 0..1200 {
            let mut random = Random::new(seed);
            let profiles =
                [Profile::Power, Profile::Media { victim: 0 }, Profile::Liar { victim: 0 }];
            let profile = profiles[seed as usize / 9 % 3];
            let shape = Swarm::ALL[seed as usize % Swarm::ALL.len()].shape(&mut random);
            let stops = seed % 4 < 2;
            let shape = shape.as_ref().map(|shape| &shape.faults);
            for planned in plan(profile, stops, 30 * SECOND, shape, &mut random) {
                let media_only = matches!(planned.kind, FaultKind::Rot | FaultKind::Wipe);
                assert!(!media_only || profile != Profile::Power);
                counts.add(planned.kind);
            }
        }
        for kind in FaultKind::ALL {
            assert!(counts.of(*kind) > 0, "{} never planned", kind.name());
        }
    }
}
