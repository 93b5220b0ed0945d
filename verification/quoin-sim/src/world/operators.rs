//! People who change a volume or its surroundings while everything else goes on. Each draws from a
//! chance of its own, so that runs without it stay what they were.

use super::copying::Copying;
use super::durability::DurabilityChanges;
use super::growth::Growth;
use super::holes::Holes;
use super::limits::VolumeLimits;
use super::members::Members;
use super::memory::Memory;
use super::points::Points;
use super::pulls::Pulls;
use super::recovery::Recovery;
use super::snapshots::Snapshots;

pub(crate) struct Operators {
    pub members: Members,
    pub recovery: Recovery,
    pub growth: Growth,
    pub memory: Memory,
    pub snapshots: Snapshots,
    pub points: Points,
    pub pulls: Pulls,
    pub limits: VolumeLimits,
    pub holes: Holes,
    pub durability: DurabilityChanges,
    pub copying: Copying,
}
