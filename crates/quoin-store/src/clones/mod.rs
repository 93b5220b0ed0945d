//! Clones: replicas that show a snapshot of another replica of their pool where they have no block
//! of their own.
//!
//! A clone begins with an empty map. Where its map never got a block, the **base** shows: the map of
//! the snapshot from which it was made. So a clone costs one record, and blocks that nobody changed
//! are held once. A base belongs to the replica of its snapshot and to its segments. That replica
//! keeps it beside its snapshots as a view of its own, and clean-up treats it as one. So a block of a
//! base is live by the same question as any other, and no segment has two owners.
//!
//! A base is kept until the last clone that shows it is gone, whatever becomes of the snapshot: it
//! is deleted, its replica is rebuilt with other segments, or the replica is deleted. Of a deleted
//! replica that has bases a **remnant** stays, which is in no list and holds nothing but them.
//!
//! Versions of a base are not above its snapshot's LSN, and a clone's history begins there. So
//! versions only grow in a clone too, and everything that asks for what changed since some LSN is
//! right without a rule of its own.

pub mod bases;
pub mod creation;
pub mod flatten;
pub mod lookup;

use crate::format::relatives::BaseId;

/// A replica's place among its relatives.
#[derive(Clone, Copy, Default)]
pub struct Relatives {
    /// The base that shows where the replica's own map never got a block.
    pub base: Option<BaseId>,
    /// The highest LSN of the bases that the replica keeps for clones; 0: it keeps none. Blocks of
    /// older versions may be shown by one of them.
    pub kept_through: u64,
    /// The replica was deleted, and nothing but its bases is left.
    pub is_remnant: bool,
}
