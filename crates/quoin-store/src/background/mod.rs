//! What a pool does beside the requests of its clients.

pub mod checkpoint;
pub mod cleaner;
pub mod difference;
pub mod due_work;
pub mod listing;
pub mod look_ahead;
pub mod maintenance;
pub mod recount;
pub mod relocation;
pub mod repair;
pub mod reverts;
pub mod scheduler;
pub mod scrub;
pub mod segment_data;
