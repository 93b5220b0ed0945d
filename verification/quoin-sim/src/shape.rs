//! Parameters that a small world is drawn from, by subject: its faults, its times, its load, its room.

use crate::faults::FaultKind;
use crate::random::Random;
use crate::schedule::{MICROSECOND, MILLISECOND};

/// Losses that a run may have (`faults::Profile`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    AsDrawn,
    Power,
    Media,
    Liar,
}

/// The pools of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolShape {
    pub disk_bytes: u64,
    /// How often rot hits any page, the store's own included, and not clients' data.
    pub rot_any_percent: u64,
    pub unit_blocks: u32,
    pub cache_bytes: u64,
    pub checkpoint_bytes: u64,
    pub log_keep_bytes: u64,
    /// Other volumes that fill the pools and give room back; 0: none.
    pub neighbours: u64,
}

impl PoolShape {
    pub const TIGHT: PoolShape = PoolShape {
        disk_bytes: 64 << 20,
        rot_any_percent: 20,
        unit_blocks: 512,
        cache_bytes: 64 << 10,
        checkpoint_bytes: 32 << 10,
        log_keep_bytes: 16 << 10,
        neighbours: 0,
    };
}

/// Parameters that a small world is drawn from.
#[derive(Clone, Debug)]
pub struct Shape {
    pub wanted: Wanted,
    /// RF and CF.
    pub factors: &'static [(u8, u8)],
    pub blocks: &'static [u64],
    pub window_bytes: Option<usize>,
    /// Targets have hosts of their own, and reads lean on leases.
    pub apart: bool,
    pub faults: FaultShape,
    pub times: TimeShape,
    pub load: LoadShape,
    pub room: RoomShape,
}

/// Faults of a run.
#[derive(Clone, Copy, Debug)]
pub struct FaultShape {
    /// Kinds with their weights; none: any few.
    pub kinds: &'static [(FaultKind, u32)],
    pub count: (u64, u64),
    pub horizon_ms: (u64, u64),
    /// By how much faults and outages are shorter than in a broad run.
    pub haste: u64,
}

impl FaultShape {
    const SMALL: FaultShape =
        FaultShape { kinds: &[], count: (8, 24), horizon_ms: (3_000, 9_000), haste: 4 };
}

/// Times that the protocol waits, and that disks and networks take.
#[derive(Clone, Copy, Debug)]
pub struct TimeShape {
    pub lease_ms: &'static [u32],
    pub drop_after_ms: (u64, u64),
    pub delay_ns: &'static [u64],
    pub sync_ns: &'static [u64],
}

impl TimeShape {
    const SMALL: TimeShape = TimeShape {
        lease_ms: &[500, 1000],
        drop_after_ms: (150, 1500),
        delay_ns: &[30 * MICROSECOND, 200 * MICROSECOND, MILLISECOND, 5 * MILLISECOND],
        sync_ns: &[100 * MICROSECOND, MILLISECOND, 5 * MILLISECOND],
    };
}

/// Clients and their requests.
#[derive(Clone, Copy, Debug)]
pub struct LoadShape {
    pub clients: (u64, u64),
    pub think_ns: (u64, u64),
    /// Weights of flushes and holes among the requests; 0: as drawn.
    pub flushes: u32,
    pub holes: u32,
    pub fua_percent: u64,
    pub long_blocks: u64,
    pub ios_min: u64,
}

impl LoadShape {
    const SMALL: LoadShape = LoadShape {
        clients: (2, 5),
        think_ns: (MILLISECOND, 15 * MILLISECOND),
        flushes: 0,
        holes: 0,
        fua_percent: 0,
        long_blocks: 8,
        ios_min: 250,
    };
}

/// Room of the pools, and what they do without any.
#[derive(Clone, Copy, Debug)]
pub struct RoomShape {
    pub pool: Option<PoolShape>,
    /// The store in memory: in a full pool it takes no block more, while the real one has what is
    /// left of its segment.
    pub full_to_the_block: bool,
    /// Pools stop for a moment as they refuse entries for room.
    pub stops_without_room: bool,
}

impl RoomShape {
    fn small(random: &mut Random) -> Self {
        Self {
            pool: random.percent(70).then_some(PoolShape::TIGHT),
            full_to_the_block: false,
            stops_without_room: false,
        }
    }
}

impl Shape {
    pub fn small(random: &mut Random) -> Self {
        Self {
            wanted: Wanted::AsDrawn,
            factors: &[(3, 2)],
            blocks: &[4, 8, 16],
            window_bytes: None,
            apart: false,
            faults: FaultShape::SMALL,
            times: TimeShape::SMALL,
            load: LoadShape::SMALL,
            room: RoomShape::small(random),
        }
    }
}
