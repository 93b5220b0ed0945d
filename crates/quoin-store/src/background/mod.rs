//! What a pool does beside the requests of its clients.

mod block_moves;
pub mod checkpoint;
pub mod cleaner;
pub mod deleted_views;
pub mod due_work;
pub mod kept_views;
pub mod look_ahead;
pub mod maintenance;
pub mod node_moves;
pub mod recount;
pub mod relocation;
pub mod reverts;
pub mod scheduler;
pub mod scrub;
mod segment_data;
