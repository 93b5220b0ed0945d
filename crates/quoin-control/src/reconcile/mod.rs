//! Work that makes the cluster follow its records, without a request.

pub(crate) mod balance;
pub(crate) mod cordon;
pub mod dying;
pub(crate) mod heal;
pub(crate) mod lifecycle;
pub(crate) mod reach;
pub(crate) mod rebalance;
pub(crate) mod tending;
