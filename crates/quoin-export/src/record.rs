//! Records: stretches of the snapshot, and the end.
//!
//! | offset | length | content |
//! |---|---|---|
//! | 0 | 4 | kind, little endian: 1 data, 2 hole, 3 end |
//! | 4 | 4 | CRC32C of the data; 0 for a hole; of the end: the sum over all records before it, which for each is the CRC32C of the sum so far (4 bytes) and the first 24 bytes of the record |
//! | 8 | 8 | offset; of the end: number of records before it |
//! | 16 | 8 | length; of the end: bytes of data in them |
//! | 24 | 4 | CRC32C of the 24 bytes before |
//! | 28 | | the data |

use quoin_types::crc32c;

use crate::{BLOCK_BYTES, Error};

pub(crate) const RECORD_BYTES: usize = 28;
/// Limit of the data of one record.
pub const DATA_BYTES_MAX: usize = 1 << 20;

const SUMMED_BYTES: usize = RECORD_BYTES - 4;
const DATA: u32 = 1;
const HOLE: u32 = 2;
const END: u32 = 3;

/// A stretch of the snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    Data {
        offset: u64,
        data: Vec<u8>,
    },
    /// It reads as zeroes.
    Hole {
        offset: u64,
        length: u64,
    },
}

impl Record {
    /// Offsets of its begin and its end.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Record::Data { offset, data } => (*offset, *offset + data.len() as u64),
            Record::Hole { offset, length } => (*offset, *offset + length),
        }
    }
}

/// Sums over records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    pub records: u64,
    pub data_bytes: u64,
    pub hole_bytes: u64,
    /// End of the last record within the snapshot.
    pub reached: u64,
    /// CRC32C over the records' heads, each taken in with the sum so far before it.
    sum: u32,
}

/// The fixed part of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Head {
    kind: u32,
    sum: u32,
    offset: u64,
    length: u64,
}

/// Content behind a head.
pub(crate) enum Follows {
    Data { offset: u64, length: usize, sum: u32 },
    Hole { offset: u64, length: u64 },
    End,
}

impl Head {
    pub fn of(record: &Record) -> Self {
        match record {
            Record::Data { offset, data } => {
                Self { kind: DATA, sum: crc32c(data), offset: *offset, length: data.len() as u64 }
            }
            Record::Hole { offset, length } => {
                Self { kind: HOLE, sum: 0, offset: *offset, length: *length }
            }
        }
    }

    pub fn end(totals: &Totals) -> Self {
        Self { kind: END, sum: totals.sum, offset: totals.records, length: totals.data_bytes }
    }

    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.sum.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        let sum = crc32c(&bytes[..SUMMED_BYTES]);
        bytes[SUMMED_BYTES..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// # Errors
    /// The checksum does not fit; `at` is the record's place in the file.
    pub fn decode(bytes: &[u8; RECORD_BYTES], at: u64) -> Result<Self, Error> {
        let small =
            |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let large =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if crc32c(&bytes[..SUMMED_BYTES]) != small(SUMMED_BYTES) {
            return Err(Error::Damaged { at, what: "a record's checksum does not fit" });
        }
        Ok(Self { kind: small(0), sum: small(4), offset: large(8), length: large(16) })
    }

    /// Checks the record against those before it, in a snapshot of this size.
    ///
    /// # Errors
    /// It cannot follow them.
    pub fn follows(&self, totals: &Totals, size_bytes: u64, at: u64) -> Result<Follows, Error> {
        let wrong = |what| Err(Error::Damaged { at, what });
        if self.kind == END {
            return match *self == Self::end(totals) {
                true => Ok(Follows::End),
                false => wrong("records are missing, or are there twice"),
            };
        }
        if self.kind != DATA && self.kind != HOLE {
            return wrong("a record of no known kind");
        }
        let whole = |number: u64| number.is_multiple_of(BLOCK_BYTES);
        let end = self.offset.checked_add(self.length);
        if self.length == 0 || !whole(self.offset) || !whole(self.length) {
            return wrong("a record of no whole blocks");
        }
        if self.offset < totals.reached || end.is_none_or(|end| end > size_bytes) {
            return wrong("a record out of order");
        }
        if self.kind == HOLE {
            return Ok(Follows::Hole { offset: self.offset, length: self.length });
        }
        match usize::try_from(self.length).ok().filter(|length| *length <= DATA_BYTES_MAX) {
            Some(length) => Ok(Follows::Data { offset: self.offset, length, sum: self.sum }),
            None => wrong("a record that is too long"),
        }
    }
}

impl Totals {
    /// Takes a record in.
    pub(crate) fn add(&mut self, head: &Head) {
        let mut summed = self.sum.to_le_bytes().to_vec();
        summed.extend(&head.encode()[..SUMMED_BYTES]);
        self.sum = crc32c(&summed);
        self.records += 1;
        self.reached = head.offset + head.length;
        match head.kind {
            DATA => self.data_bytes += head.length,
            _ => self.hole_bytes += head.length,
        }
    }
}
