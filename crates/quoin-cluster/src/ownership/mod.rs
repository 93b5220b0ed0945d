//! Ownership of volumes: which node may open a volume, under which epoch, with which replicas.
//!
//! Each function decides one change of one record, which its caller then writes by compare-and-swap:
//!
//! | decision | function |
//! |---|---|
//! | a target is granted an epoch | [`epochs::acquire`] |
//! | a target swaps the membership, also where it did so already | [`epochs::swap`] |
//! | grants are taken back: a record does so | [`grants::fence`]; whose and when: [`fencing`], and after each change [`change::complete`] |
//! | grants are taken back: each pool refuses them once it has its orders | `Replica::fence` (`quoin-replication/src/replica/fence.rs`) |
//! | nothing is granted to a node in a fenced block, and a fence holds | [`network_fences::of_node`], [`network_fences::check_ended`] |
//! | a node attaches a volume, alone or beside others | [`attachment::attach`], [`sharing::check_beside`] |
//! | a node detaches; a volume is taken from a node that is lost | [`attachment::detach`], [`attachment::take_over`] |
//! | a node counts as lost | [`liveness::check_silent`] |
//! | the device of a volume on a node is out of use | [`devices::check_unused`] |
//! | the target of a shared volume moves; a detached volume has a lent target | [`failover::is_due`], [`failover::next_node`], [`lending::lend`] |
//! | which node replays a file system's journal (a write that is sent again is the core's: `ClientTable::judge`) | [`replay::of_new`], [`replay::take_from`], [`replay::hand_on`]; [`replay::confirm`] |
//! | a replica joins, leaves, is discarded; the last copy does not leave | [`replicas::newcomer`], [`replicas::leave`], [`replicas::discard`] |
//! | what becomes of replicas that pools made, lost or deleted | [`lifecycle::step`] |
//! | a volume that lost replicas goes on with the others | [`recovery::check`], [`recovery::reduce`] |
//!
//! Join tokens are [`crate::tokens`]; records that are made from pools are [`crate::records_rebuild`].

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
pub mod mirrored;
pub mod network_fences;
pub mod recovery;
pub mod replay;
pub mod replicas;
pub mod sharing;
