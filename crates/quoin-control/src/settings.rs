//! Settings of a controller.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use quoin_api::volume::Spread;

use crate::Error;
use crate::volume::policy::{RebalanceAt, ReplaceAfter, Within};

/// Settings of a controller, fixed at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    pub defaults: Defaults,
    /// "authenticate" or "encrypt".
    pub data_security: String,
    /// Time without a report after which a pool or node is offline.
    pub offline_after: Duration,
    /// Time for which nobody may have heard of a node before its volumes are taken from it.
    pub node_timeout: Duration,
    /// Time after which a missing replica is replaced, for volumes without their own setting.
    pub replace_after: ReplaceAfter,
    /// Rebuilds into one pool at a time, counting only those that no user requested.
    pub heals_per_pool: u32,
    /// Action on pools whose disks are failing.
    pub dying_pools: DyingPolicy,
    /// Limits at which a pool's disk counts as failing.
    pub dying_limits: DyingLimits,
    /// Difference of the pools' used shares above which replicas move.
    pub rebalance_at: RebalanceAt,
    /// Most replicas that one volume may have.
    pub replicas_max: u32,
}

/// The cluster's values for fields that a volume leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    pub replicas: u8,
    pub spread: Spread,
}

/// Limits of a disk's errors within a window; a pool that reaches one is called dying.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DyingLimits {
    /// Window; errors before it do not count.
    pub within: Within,
    /// Refusals of the disk. They count only where at least one in `one_in` operations was refused.
    pub errors: u64,
    pub one_in: u64,
    /// Bad copies: a few come with age; many mean a disk that loses data.
    pub bad: u64,
    /// Reads and syncs that took far too long.
    pub stalls: u64,
}

impl Default for DyingLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl DyingLimits {
    pub const DEFAULT: Self =
        Self { within: Within::DEFAULT, errors: 5, one_in: 1000, bad: 100, stalls: 3 };

    /// # Errors
    /// A limit is 0: every pool would reach it without any error.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let all = [self.errors, self.one_in, self.bad, self.stalls];
        if all.contains(&0) {
            return Err(Error::invalid("limits of dying pools", "each is at least 1"));
        }
        Ok(())
    }
}

/// Action on a pool that is dying.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DyingPolicy {
    /// The pool's replicas are made elsewhere.
    #[default]
    Drain,
    /// The pool takes nothing new.
    Cordon,
    /// No action.
    Off,
}

/// Error for a text that is no policy's name.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is none of drain, cordon and off")]
pub struct NotAPolicy(String);

impl FromStr for DyingPolicy {
    type Err = NotAPolicy;

    fn from_str(text: &str) -> Result<Self, NotAPolicy> {
        match text {
            "drain" => Ok(Self::Drain),
            "cordon" => Ok(Self::Cordon),
            "off" => Ok(Self::Off),
            _ => Err(NotAPolicy(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for DyingPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Drain => "drain",
            Self::Cordon => "cordon",
            Self::Off => "off",
        })
    }
}
