//! Streams: the content of one volume's point, from the mirror beside its target to the mirror beside the
//! copy's target.
//!
//! A stream has a connection of its own, which its first frame tells from a link. The sender says what it has
//! ([`frame::Begin`]); the receiver lets it in where its own controller ordered just that, and opens the copy
//! by the target of its host. Then slots go one way ([`send`]), and what was taken is told the other way
//! ([`receive`]). Few slots are on their way at a time. A stream that broke is gone on with where nothing is
//! missing.

mod bandwidth;
mod book;
pub mod frame;
mod history;
pub mod keep;
mod orders;
mod pack;
mod places;
mod receive;
mod send;
pub mod take;

#[cfg(test)]
mod between_clusters;
#[cfg(test)]
mod tests;

use std::time::Duration;

use quoin_cluster::mirror::sending::IN_FLIGHT_MAX;

pub use bandwidth::Bandwidth;
pub use book::Book;
pub use places::{Places, STREAMS_A_PEER_MAX};
pub use take::Open;

/// Silence after which a stream is ended.
const SILENT_MAX: Duration = Duration::from_secs(60);
/// Time for the answer to a stream's first frame, in which a target opens a volume.
const BEGUN_WITHIN: Duration = Duration::from_secs(30);
/// Time for the other side, or a target, to take a frame.
const WRITTEN_WITHIN: Duration = Duration::from_secs(60);
