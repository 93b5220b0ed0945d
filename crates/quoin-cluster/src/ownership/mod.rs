//! Ownership of volumes: which node may open a volume, under which epoch, with which replicas.
//!
//! Each function decides one change of one record, which its caller then writes by compare-and-swap:
//!
//! | decision | where |
//! |---|---|
//! | a target acquires an epoch; a target swaps the membership | [`epochs`] |
//! | grants are taken back, epochs are used up | [`grants`] |
//! | whose grants are taken back, and when | [`fencing`] |
//! | which node has the volume | [`attachment`], beside whom [`sharing`], as the first one [`replay`] |
//! | when a node counts as lost | [`liveness`] |
//! | failover of a shared volume's target, and the lent target of a detached volume | [`failover`], [`lending`] |
//! | whether a node uses the volume | [`devices`] |
//! | replicas that join and leave, and the orders for them to a target | [`replicas`] |
//! | what becomes of replicas that pools made, lost or deleted | [`lifecycle`] |
//! | whether a volume may go on with the replicas that are left | [`recovery`] |
//! | what follows from any change | [`change`] |

pub mod attachment;
pub mod change;
pub mod devices;
pub mod epochs;
pub mod failover;
pub mod fencing;
pub mod grants;
pub mod lending;
pub mod lifecycle;
pub mod liveness;
pub mod recovery;
pub mod replay;
pub mod replicas;
pub mod sharing;
