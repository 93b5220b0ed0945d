//! The file of an exported snapshot: its whole content, or what changed in it since another one.
//!
//! A file is a header and records in the order of their offsets, and ends with a record that has
//! the sums of all others. Each record has a checksum of its own, so a file that was cut off is
//! whole up to its last record, and an export goes on from there ([`scan`], [`Writer::resume`]). A file
//! without its end is never taken for a whole one.
//!
//! Nothing here opens a file: readers and writers are given. What is read is hostile: lengths have
//! limits, offsets an order, and nothing is taken whose checksum does not fit.

mod header;
mod reader;
mod record;
mod writer;

pub use header::{Header, Point};
pub use reader::{Reader, Scan, scan};
pub use record::{DATA_BYTES_MAX, Record, Totals};
pub use writer::Writer;

/// Blocks are the unit of all offsets and lengths.
pub const BLOCK_BYTES: u64 = quoin_types::BLOCK_SIZE as u64;

/// Why a file cannot be read, or not be written further.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("it is no exported snapshot of Quoin: it begins otherwise")]
    Foreign,
    #[error("it is of format {0}, and this version reads format {FORMAT}: use a newer Quoin")]
    Newer(u32),
    /// The file ends before its last record does.
    #[error("it ends at byte {at}, before the export was complete: run the export again")]
    CutOff { at: u64 },
    #[error("it is damaged at byte {at}: {what}")]
    Damaged { at: u64, what: &'static str },
    #[error("{0}")]
    Header(String),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The only format so far.
pub const FORMAT: u32 = 1;

#[cfg(test)]
mod tests;
