//! Small worlds in which few kinds of faults are injected often: what a run of everything reaches in a
//! thousand seeds, one of these reaches in ten.
//!
//! A seed of [`Swarm::Broad`] draws from everything there is. A seed of another swarm draws its
//! world from a [`Shape`]: few blocks, few clients without pauses, short leases, faults that
//! follow each other within fractions of a second, and end as soon. [`Swarm::Few`] takes any few
//! kinds of faults; the others take those after which one part of the protocol must hold.

use crate::faults::FaultKind::*;
use crate::random::Random;
use crate::schedule::{MICROSECOND, MILLISECOND};
use crate::shape::{FaultShape, LoadShape, PoolShape, RoomShape, Shape, TimeShape, Wanted};

/// The distribution that the seeds of a run draw from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Swarm {
    /// Everything.
    #[default]
    Broad,
    /// Two to five kinds of faults, any.
    Few,
    /// Targets that follow each other while older ones live: fencing, leases, recovery.
    Takeovers,
    /// The same with hardly a request: epochs that serve and write nothing.
    Idle,
    /// Members that come and go under owners that come and go.
    Churn,
    /// A control plane that is restored from old copies under living targets.
    Rollbacks,
    /// Targets and replicas that stop in good order, and power cuts after that.
    Closes,
    /// Every replica is lost at once, and the targets live.
    Blackouts,
    /// Power cuts: data on media, and data that is not.
    PowerCuts,
    /// Replicas that are lost and replaced, and a control plane whose answers are.
    Replacements,
    /// Replicas that are added, moved and removed, and CF that is changed, all the time.
    Members,
    /// The same, with replicas that connect unasked, and lists with an entry missing.
    UnexpectedPeers,
    /// More replicas are destroyed than an open can do without, and a person goes on with the rest.
    Recoveries,
    /// Members that fall out of a small window and are copied anew.
    Rebuilds,
    /// The same, with targets that may keep now much, now nothing in memory for them.
    Memory,
    /// Rebuilds of volumes with snapshots that come and go.
    Snapshots,
    /// The same, and snapshots are read part by part meanwhile.
    Exports,
    /// Rot, unreadable disks, disks that are rolled back.
    Damage,
    /// Disks that say they wrote.
    Liars,
    /// Little room, much that is written over and given back.
    Pressure,
    /// Pools without room while caches are lost, and the targets live.
    FullPools,
    /// Full pools of several volumes, which give room back by snapshots that are deleted and by trims; the
    /// volume has snapshots too, and its replicas are moved to pools that join.
    ManyVolumes,
    /// Owners that lose the volume and what they were granted, and live on with it.
    Detaches,
    /// Owners that are cut off, and with them the controller: its record is recovered elsewhere.
    Controllers,
    /// Decisions of a process for many volumes at once: rounds that stand still, hundreds of dials to
    /// a dead host, disks that fail and are put back under a process.
    Hosts,
    /// Volumes with limits of IOs and bytes a second.
    Limits,
    /// Volumes that get very many small holes while a replica is away.
    Holes,
    /// Volumes that are clones of a snapshot, of a source that goes on beside them and goes away.
    Clones,
    /// Hosts that share a volume, and send again what has no answer.
    Sharers,
    /// Several volumes with points over them, whose targets are replaced between any two steps.
    Groups,
    /// Two clusters that mirror a group: everything.
    Mirrors,
    /// The same, with roles that change all the time.
    Failovers,
    /// The same, with records of either side that are restored from old copies.
    Restored,
    /// The same, by managers of orchestrators and what they clean up.
    Orchestrators,
    /// Points of a volume that are copied to another cluster, by real targets and pools on both sides.
    Copies,
    /// The same, with the brains of two clusters, and roles that change.
    Disasters,
    /// Many volumes without a data path: grants, fences, devices, tokens and copies by the records.
    Control,
}

impl Swarm {
    pub const ALL: &[Swarm] = &[
        Swarm::Broad,
        Swarm::Few,
        Swarm::Takeovers,
        Swarm::Idle,
        Swarm::Churn,
        Swarm::Rollbacks,
        Swarm::Closes,
        Swarm::Blackouts,
        Swarm::PowerCuts,
        Swarm::Replacements,
        Swarm::Members,
        Swarm::UnexpectedPeers,
        Swarm::Recoveries,
        Swarm::Rebuilds,
        Swarm::Memory,
        Swarm::Snapshots,
        Swarm::Exports,
        Swarm::Damage,
        Swarm::Liars,
        Swarm::Pressure,
        Swarm::FullPools,
        Swarm::ManyVolumes,
        Swarm::Detaches,
        Swarm::Controllers,
        Swarm::Hosts,
        Swarm::Limits,
        Swarm::Holes,
        Swarm::Clones,
        Swarm::Sharers,
        Swarm::Groups,
        Swarm::Mirrors,
        Swarm::Failovers,
        Swarm::Restored,
        Swarm::Orchestrators,
        Swarm::Copies,
        Swarm::Disasters,
        Swarm::Control,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Swarm::Broad => "broad",
            Swarm::Few => "few",
            Swarm::Takeovers => "takeovers",
            Swarm::Idle => "idle",
            Swarm::Churn => "churn",
            Swarm::Rollbacks => "rollbacks",
            Swarm::Closes => "closes",
            Swarm::Blackouts => "blackouts",
            Swarm::PowerCuts => "power-cuts",
            Swarm::Replacements => "replacements",
            Swarm::Members => "members",
            Swarm::UnexpectedPeers => "unexpected-peers",
            Swarm::Recoveries => "recoveries",
            Swarm::Rebuilds => "rebuilds",
            Swarm::Memory => "memory",
            Swarm::Snapshots => "snapshots",
            Swarm::Exports => "exports",
            Swarm::Damage => "damage",
            Swarm::Liars => "liars",
            Swarm::Pressure => "pressure",
            Swarm::FullPools => "full-pools",
            Swarm::ManyVolumes => "many-volumes",
            Swarm::Detaches => "detaches",
            Swarm::Controllers => "controllers",
            Swarm::Hosts => "hosts",
            Swarm::Limits => "limits",
            Swarm::Holes => "holes",
            Swarm::Clones => "clones",
            Swarm::Sharers => "sharers",
            Swarm::Groups => "groups",
            Swarm::Mirrors => "mirrors",
            Swarm::Failovers => "failovers",
            Swarm::Restored => "restored",
            Swarm::Orchestrators => "orchestrators",
            Swarm::Copies => "copies",
            Swarm::Disasters => "disasters",
            Swarm::Control => "control",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|swarm| swarm.name() == name)
    }

    /// Returns true for the worlds of two clusters, which have no shape: nothing of a volume's own world is
    /// in them.
    pub fn is_mirrored(self) -> bool {
        matches!(self, Swarm::Mirrors | Swarm::Failovers | Swarm::Restored | Swarm::Orchestrators)
    }

    /// `None`: no shape, everything as it is drawn.
    pub fn shape(self, random: &mut Random) -> Option<Shape> {
        let small = Shape::small(random);
        Some(match self {
            Swarm::Broad
            | Swarm::Control
            | Swarm::Mirrors
            | Swarm::Failovers
            | Swarm::Restored
            | Swarm::Orchestrators => return None,
            Swarm::Few => Shape { factors: &[(3, 2), (3, 2), (2, 2), (3, 1), (4, 3)], ..small },
            Swarm::Takeovers => Shape {
                wanted: Wanted::Power,
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (OwnerIsolated, 20),
                        (Failover, 10),
                        (TargetPause, 8),
                        (DelayStorm, 10),
                        (PartitionOneWay, 6),
                        (Partition, 3),
                        (ReplicaCrash, 6),
                        (ConnectionCut, 4),
                        (ControlLate, 4),
                        (ClockDrift, 4),
                        (TargetCrash, 3),
                        (PowerSome, 8),
                    ],
                    ..small.faults
                },
                times: TimeShape {
                    lease_ms: &[500, 500, 1000],
                    delay_ns: &[200 * MICROSECOND, 5 * MILLISECOND, 5 * MILLISECOND],
                    ..small.times
                },
                ..small
            },
            Swarm::Sharers => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (2, 2), (3, 1), (4, 3)],
                window_bytes: random.percent(50).then_some(256 << 10),
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (TargetCrash, 14),
                        (Failover, 12),
                        (OwnerIsolated, 10),
                        (TargetPause, 8),
                        (TargetShutdown, 5),
                        (ReplicaCrash, 8),
                        (ReplicaPause, 6),
                        (DelayStorm, 5),
                        (Partition, 4),
                        (PartitionOneWay, 4),
                        (ConnectionCut, 6),
                        (PowerOne, 5),
                        (PowerSome, 4),
                        (PowerAll, 3),
                    ],
                    ..small.faults
                },
                times: TimeShape { lease_ms: &[500, 1000], ..small.times },
                load: LoadShape {
                    clients: (3, 8),
                    think_ns: (MILLISECOND, 20 * MILLISECOND),
                    holes: 4,
                    ..small.load
                },
                ..small
            },
            Swarm::Groups => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (2, 2)],
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (Failover, 16),
                        (OwnerIsolated, 10),
                        (TargetCrash, 6),
                        (TargetPause, 8),
                        (TargetShutdown, 4),
                        (DelayStorm, 6),
                        (Partition, 4),
                        (PartitionOneWay, 4),
                        (ReplicaCrash, 6),
                        (ConnectionCut, 6),
                        (ControlLate, 4),
                    ],
                    count: (4, 14),
                    horizon_ms: (4_000, 10_000),
                    ..small.faults
                },
                times: TimeShape { lease_ms: &[500, 1000], ..small.times },
                load: LoadShape { clients: (2, 4), ..small.load },
                ..small
            },
            Swarm::Copies => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (2, 2), (3, 1)],
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (Failover, 12),
                        (OwnerIsolated, 10),
                        (TargetCrash, 14),
                        (TargetPause, 6),
                        (TargetShutdown, 4),
                        (DelayStorm, 4),
                        (Partition, 4),
                        (PartitionOneWay, 4),
                        (ReplicaCrash, 8),
                        (ConnectionCut, 8),
                        (ControlLate, 3),
                        (PowerOne, 5),
                        (PowerSome, 8),
                        (PowerAll, 8),
                        (SlowDisk, 4),
                    ],
                    count: (4, 14),
                    horizon_ms: (6_000, 16_000),
                    ..small.faults
                },
                times: TimeShape {
                    lease_ms: &[500, 1000],
                    sync_ns: &[MILLISECOND, 5 * MILLISECOND, 30 * MILLISECOND],
                    ..small.times
                },
                load: LoadShape {
                    clients: (1, 3),
                    think_ns: (5 * MILLISECOND, 120 * MILLISECOND),
                    holes: 6,
                    ios_min: 60,
                    ..small.load
                },
                ..small
            },
            Swarm::Disasters => {
                let copies = Swarm::Copies.shape(random)?;
                Shape {
                    faults: FaultShape {
                        count: (6, 24),
                        horizon_ms: (30_000, 120_000),
                        ..copies.faults
                    },
                    load: LoadShape {
                        think_ns: (30 * MILLISECOND, 400 * MILLISECOND),
                        ..copies.load
                    },
                    ..copies
                }
            }
            Swarm::Detaches => Shape {
                wanted: Wanted::Power,
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (Failover, 30),
                        (ConnectionCut, 12),
                        (ReplicaCrash, 8),
                        (TargetShutdown, 8),
                        (ControlLate, 6),
                        (ControlLost, 3),
                        (OwnerIsolated, 6),
                        (Partition, 4),
                        (TargetPause, 4),
                        (PowerOne, 4),
                        (PowerSome, 3),
                    ],
                    ..small.faults
                },
                times: TimeShape { lease_ms: &[500, 1000], ..small.times },
                ..small
            },
            Swarm::Controllers => Shape {
                wanted: Wanted::Power,
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (OwnerIsolated, 24),
                        (Failover, 20),
                        (TargetCrash, 8),
                        (TargetPause, 6),
                        (ReplicaCrash, 12),
                        (Partition, 6),
                        (PartitionOneWay, 6),
                        (ConnectionCut, 8),
                        (ControlLate, 4),
                        (PowerOne, 4),
                        (PowerSome, 3),
                    ],
                    ..small.faults
                },
                times: TimeShape { lease_ms: &[500, 1000], ..small.times },
                ..small
            },
            Swarm::Hosts => Shape {
                factors: &[(3, 2), (3, 2), (3, 1), (5, 3), (4, 3)],
                blocks: &[16, 64],
                window_bytes: Some(256 << 10),
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (PoolStalls, 16),
                        (TargetStalls, 10),
                        (BlackHole, 8),
                        (ReadErrorsApart, 10),
                        (OrderForAnother, 3),
                        (Failover, 14),
                        (OwnerIsolated, 10),
                        (TargetCrash, 6),
                        (ReplicaCrash, 8),
                        (ReplicaPause, 6),
                        (DiskSyncError, 14),
                        (DiskWriteError, 4),
                        (DiskRolledBack, 24),
                        (Rot, 6),
                        (ConnectionCut, 4),
                        (BulkCut, 3),
                        (PowerSome, 3),
                    ],
                    ..small.faults
                },
                times: TimeShape {
                    sync_ns: &[MILLISECOND, 5 * MILLISECOND, 30 * MILLISECOND],
                    lease_ms: &[500, 1000],
                    drop_after_ms: (100, 600),
                    ..small.times
                },
                ..small
            },
            Swarm::Idle => Shape {
                wanted: Wanted::Power,
                faults: FaultShape {
                    kinds: &[
                        (TargetCrash, 20),
                        (Failover, 8),
                        (OwnerIsolated, 6),
                        (ReplicaCrash, 15),
                        (ReplicaPause, 12),
                        (Partition, 8),
                        (PowerOne, 5),
                    ],
                    count: (16, 32),
                    horizon_ms: (6_000, 15_000),
                    ..small.faults
                },
                load: LoadShape {
                    think_ns: (300 * MILLISECOND, 900 * MILLISECOND),
                    ios_min: 30,
                    ..small.load
                },
                ..small
            },
            Swarm::Churn => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (4, 3), (2, 1)],
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (ReplicaPause, 10),
                        (ReplicaCrash, 8),
                        (Partition, 12),
                        (PartitionOneWay, 10),
                        (OwnerIsolated, 12),
                        (Failover, 6),
                        (TargetCrash, 8),
                        (PowerSome, 6),
                        (PowerOne, 4),
                        (ConnectionCut, 5),
                        (BulkCut, 4),
                        (BulkSlow, 3),
                    ],
                    count: (16, 32),
                    horizon_ms: (6_000, 15_000),
                    ..small.faults
                },
                times: TimeShape {
                    lease_ms: &[500, 1000, 2000],
                    drop_after_ms: (80, 300),
                    ..small.times
                },
                load: LoadShape { think_ns: (3 * MILLISECOND, 60 * MILLISECOND), ..small.load },
                ..small
            },
            Swarm::Rollbacks => Shape {
                wanted: Wanted::Power,
                faults: FaultShape {
                    kinds: &[
                        (ControlRolledBack, 20),
                        (Failover, 14),
                        (OwnerIsolated, 8),
                        (TargetCrash, 8),
                        (TargetPause, 8),
                        (ReplicaCrash, 4),
                        (ControlLate, 6),
                        (ControlLost, 4),
                    ],
                    ..small.faults
                },
                ..small
            },
            Swarm::Closes => Shape {
                wanted: Wanted::Power,
                faults: FaultShape {
                    kinds: &[
                        (TargetShutdown, 20),
                        (ReplicaShutdown, 6),
                        (PowerOne, 12),
                        (PowerSome, 10),
                        (PowerAll, 6),
                        (ReplicaCrash, 6),
                        (SlowDisk, 8),
                        (StuckDisk, 14),
                        (ConnectionCut, 6),
                        (Failover, 5),
                    ],
                    count: (16, 32),
                    horizon_ms: (12_000, 25_000),
                    haste: 2,
                },
                times: TimeShape { sync_ns: &[MILLISECOND, 30 * MILLISECOND], ..small.times },
                ..small
            },
            Swarm::Blackouts => Shape {
                wanted: Wanted::Power,
                blocks: &[4, 8],
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (PowerAll, 12),
                        (PowerSome, 12),
                        (Partition, 8),
                        (PartitionOneWay, 6),
                        (ConnectionCut, 10),
                        (ReplicaCrash, 10),
                        (OwnerIsolated, 6),
                        (SlowDisk, 5),
                    ],
                    ..small.faults
                },
                load: LoadShape {
                    clients: (3, 8),
                    think_ns: (MILLISECOND, 4 * MILLISECOND),
                    ..small.load
                },
                ..small
            },
            Swarm::FullPools => {
                let blackouts = Swarm::Blackouts.shape(random)?;
                Shape {
                    faults: FaultShape {
                        kinds: &[
                            (PowerAllFull, 20),
                            (FullPool, 6),
                            (ReplicaPause, 6),
                            (DelayStorm, 3),
                            (ConnectionCut, 2),
                            (ReplicaCrash, 2),
                        ],
                        ..blackouts.faults
                    },
                    times: TimeShape {
                        sync_ns: &[30 * MILLISECOND, 60 * MILLISECOND],
                        ..blackouts.times
                    },
                    room: RoomShape {
                        full_to_the_block: true,
                        stops_without_room: true,
                        ..blackouts.room
                    },
                    ..blackouts
                }
            }
            Swarm::ManyVolumes => {
                let full = Swarm::FullPools.shape(random)?;
                Shape {
                    blocks: &[64, 256],
                    faults: FaultShape {
                        kinds: &[
                            (FullPool, 20),
                            (PowerAllFull, 6),
                            (ReplicaCrash, 8),
                            (TargetCrash, 6),
                            (ReplicaPause, 4),
                            (ConnectionCut, 3),
                            (PowerSome, 4),
                            (Failover, 3),
                        ],
                        ..full.faults
                    },
                    load: LoadShape { holes: 8, long_blocks: 64, ..full.load },
                    room: RoomShape {
                        pool: Some(PoolShape {
                            disk_bytes: 24 << 20,
                            unit_blocks: 128,
                            neighbours: 3,
                            ..PoolShape::TIGHT
                        }),
                        full_to_the_block: false,
                        ..full.room
                    },
                    ..full
                }
            }
            Swarm::PowerCuts => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (3, 2), (2, 2), (3, 1)],
                apart: random.percent(50),
                faults: FaultShape {
                    kinds: &[
                        (PowerAll, 12),
                        (PowerSome, 10),
                        (PowerOne, 10),
                        (TargetCrash, 8),
                        (ReplicaCrash, 4),
                        (SlowDisk, 8),
                        (StuckDisk, 3),
                        (DiskSyncError, 4),
                        (DiskWriteError, 2),
                        (TargetShutdown, 4),
                        (ReplicaShutdown, 3),
                        (Failover, 4),
                        (ConnectionCut, 3),
                    ],
                    ..small.faults
                },
                times: TimeShape {
                    sync_ns: &[MILLISECOND, 5 * MILLISECOND, 30 * MILLISECOND],
                    ..small.times
                },
                load: LoadShape { flushes: 15, fua_percent: 20, ..small.load },
                ..small
            },
            Swarm::Replacements => Shape {
                wanted: Wanted::Media,
                factors: &[(3, 2), (3, 2), (4, 3)],
                faults: FaultShape {
                    kinds: &[
                        (Wipe, 20),
                        (ControlLost, 10),
                        (ControlLate, 6),
                        (ControlRolledBack, 10),
                        (TargetCrash, 8),
                        (Failover, 8),
                        (OwnerIsolated, 4),
                        (Operator, 6),
                        (ReplicaPause, 4),
                        (ReplicaCrash, 6),
                        (PartitionOneWay, 3),
                        (DiskRolledBack, 2),
                    ],
                    horizon_ms: (6_000, 14_000),
                    ..small.faults
                },
                ..small
            },
            Swarm::Members => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (1, 1), (2, 2), (4, 3), (3, 1)],
                faults: FaultShape {
                    kinds: &[
                        (ControlLost, 12),
                        (ControlLate, 8),
                        (ControlRolledBack, 4),
                        (TargetCrash, 12),
                        (Failover, 8),
                        (OwnerIsolated, 6),
                        (TargetPause, 4),
                        (ReplicaCrash, 10),
                        (ReplicaPause, 6),
                        (PowerSome, 6),
                        (PowerOne, 4),
                        (PartitionOneWay, 4),
                        (ConnectionCut, 4),
                        (BulkCut, 4),
                        (BulkSlow, 3),
                    ],
                    horizon_ms: (6_000, 14_000),
                    ..small.faults
                },
                ..small
            },
            Swarm::UnexpectedPeers => Shape {
                wanted: Wanted::Media,
                factors: &[(3, 2), (3, 2), (4, 3), (5, 3)],
                faults: FaultShape {
                    kinds: &[
                        (Wipe, 20),
                        (ReplicaCrash, 12),
                        (PartitionOneWay, 6),
                        (ConnectionCut, 6),
                        (PowerOne, 4),
                        (TargetCrash, 6),
                        (Failover, 4),
                        (ControlLost, 6),
                        (ControlLate, 4),
                    ],
                    horizon_ms: (6_000, 14_000),
                    ..small.faults
                },
                ..small
            },
            Swarm::Recoveries => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (2, 2), (3, 1), (4, 3), (5, 2), (5, 2), (5, 2)],
                apart: true,
                faults: FaultShape {
                    kinds: &[
                        (OwnerIsolated, 14),
                        (TargetCrash, 8),
                        (Failover, 8),
                        (ControlLost, 6),
                        (ControlLate, 8),
                        (TargetPause, 6),
                        (ReplicaCrash, 10),
                        (ReplicaPause, 6),
                        (PowerOne, 4),
                        (PartitionOneWay, 6),
                        (Partition, 4),
                        (ConnectionCut, 4),
                    ],
                    horizon_ms: (6_000, 14_000),
                    ..small.faults
                },
                ..small
            },
            Swarm::Memory => Swarm::Rebuilds.shape(random)?,
            Swarm::Limits => Shape {
                wanted: Wanted::Power,
                factors: &[(3, 2), (3, 2), (2, 2), (3, 1)],
                faults: FaultShape {
                    kinds: &[
                        (TargetCrash, 14),
                        (TargetPause, 14),
                        (Failover, 10),
                        (OwnerIsolated, 6),
                        (ClockDrift, 6),
                        (ReplicaCrash, 8),
                        (ConnectionCut, 6),
                        (Partition, 4),
                        (PowerOne, 4),
                        (SlowDisk, 4),
                    ],
                    count: (6, 16),
                    ..small.faults
                },
                load: LoadShape {
                    think_ns: (MILLISECOND, 60 * MILLISECOND),
                    clients: (2, 8),
                    ..small.load
                },
                ..small
            },
            Swarm::Holes => {
                let rebuilds = Swarm::Rebuilds.shape(random)?;
                Shape {
                    faults: FaultShape {
                        kinds: &[
                            (ReplicaCrash, 10),
                            (BulkCut, 10),
                            (BulkSlow, 6),
                            (ConnectionCut, 6),
                            (ReplicaPause, 6),
                            (SlowDisk, 4),
                            (PowerOne, 6),
                            (TargetCrash, 3),
                            (Failover, 2),
                        ],
                        count: (4, 12),
                        ..rebuilds.faults
                    },
                    room: RoomShape {
                        pool: Some(PoolShape {
                            disk_bytes: 512 << 20,
                            cache_bytes: 4 << 20,
                            checkpoint_bytes: 1 << 20,
                            log_keep_bytes: 256 << 10,
                            ..PoolShape::TIGHT
                        }),
                        ..rebuilds.room
                    },
                    ..rebuilds
                }
            }
            Swarm::Snapshots | Swarm::Exports => {
                let rebuilds = Swarm::Rebuilds.shape(random)?;
                Shape { factors: &[(3, 2), (3, 2), (2, 2), (4, 3), (3, 1)], ..rebuilds }
            }
            Swarm::Clones => {
                let rebuilds = Swarm::Rebuilds.shape(random)?;
                Shape {
                    factors: &[(3, 2), (3, 2), (2, 2), (4, 3), (3, 1)],
                    room: RoomShape { pool: Some(PoolShape::TIGHT), ..rebuilds.room },
                    ..rebuilds
                }
            }
            Swarm::Rebuilds => Shape {
                wanted: Wanted::Power,
                blocks: &[32, 64, 128],
                // Little more than all clients have on their way.
                window_bytes: Some(256 << 10),
                faults: FaultShape {
                    kinds: &[
                        (ReplicaPause, 12),
                        (ReplicaCrash, 10),
                        (PowerSome, 8),
                        (Partition, 6),
                        (PartitionOneWay, 6),
                        (ConnectionCut, 8),
                        (BulkCut, 8),
                        (BulkSlow, 6),
                        (PowerOne, 8),
                        (PowerAll, 3),
                        (TargetCrash, 6),
                        (Failover, 4),
                        (SlowDisk, 4),
                        (StuckDisk, 4),
                    ],
                    horizon_ms: (5_000, 12_000),
                    ..small.faults
                },
                times: TimeShape { drop_after_ms: (100, 500), ..small.times },
                ..small
            },
            Swarm::Damage => Shape {
                wanted: Wanted::Media,
                factors: &[(3, 2), (3, 2), (4, 3)],
                blocks: &[8, 16, 64],
                faults: FaultShape {
                    kinds: &[
                        (Rot, 20),
                        (DiskReadError, 8),
                        (ReplicaCrash, 6),
                        (PowerOne, 6),
                        (ConnectionCut, 5),
                        (PartitionOneWay, 3),
                        (Wipe, 3),
                        (DiskRolledBack, 8),
                        (TargetCrash, 5),
                        (ReplicaPause, 4),
                    ],
                    ..small.faults
                },
                room: RoomShape {
                    pool: Some(PoolShape {
                        rot_any_percent: *random.pick(&[5, 20, 60]),
                        ..PoolShape::TIGHT
                    }),
                    ..small.room
                },
                ..small
            },
            Swarm::Liars => Shape {
                wanted: Wanted::Liar,
                faults: FaultShape {
                    kinds: &[
                        (LostWrite, 12),
                        (MisdirectedWrite, 12),
                        (ReplicaCrash, 8),
                        (PowerOne, 6),
                        (TargetCrash, 4),
                    ],
                    ..small.faults
                },
                ..small
            },
            Swarm::Pressure => Shape {
                wanted: Wanted::Power,
                blocks: &[64, 256],
                faults: FaultShape {
                    kinds: &[
                        (FullPool, 8),
                        (PowerSome, 8),
                        (PowerOne, 8),
                        (PowerAll, 6),
                        (ReplicaCrash, 8),
                        (TargetCrash, 3),
                        (DiskReadError, 3),
                    ],
                    ..small.faults
                },
                load: LoadShape { holes: 12, long_blocks: 64, ..small.load },
                room: RoomShape {
                    pool: Some(PoolShape {
                        disk_bytes: 14 << 20,
                        unit_blocks: 128,
                        ..PoolShape::TIGHT
                    }),
                    ..small.room
                },
                ..small
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swarm_is_found_by_its_name() {
        for swarm in Swarm::ALL {
            assert_eq!(Swarm::named(swarm.name()), Some(*swarm));
            // A broad run draws from everything; two clusters, and the control plane alone, have no
            // data path.
            let has_no_shape =
                matches!(swarm, Swarm::Broad | Swarm::Control) || swarm.is_mirrored();
            assert_eq!(swarm.shape(&mut Random::new(1)).is_none(), has_no_shape);
        }
        assert_eq!(Swarm::named("no such"), None);
    }
}
