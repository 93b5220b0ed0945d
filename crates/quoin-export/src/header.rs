//! The header: of which snapshot a file is.
//!
//! | offset | length | content |
//! |---|---|---|
//! | 0 | 8 | `QUOINEXP` |
//! | 8 | 4 | format, little endian |
//! | 12 | 4 | length of the description |
//! | 16 | 4 | CRC32C of the description |
//! | 20 | 4 | CRC32C of the 20 bytes before |
//! | 24 | | the description, JSON |

use std::io::{Read, Write};

use quoin_types::crc32c;
use serde::{Deserialize, Serialize};

use crate::{BLOCK_BYTES, Error, FORMAT};

const MAGIC: &[u8; 8] = b"QUOINEXP";
pub(crate) const FIXED_BYTES: usize = 24;
/// Limit of the description; key slots take the most of it.
const DESCRIPTION_BYTES_MAX: usize = 256 << 10;
/// Limit of a volume's size.
const SIZE_BYTES_MAX: u64 = 1 << 60;

/// A snapshot that a file is about.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Point {
    pub snapshot: String,
    pub snapshot_id: String,
    /// Place in the volume's history.
    pub lsn: u64,
    /// RFC 3339.
    pub cut_at: String,
}

/// Description of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    pub volume: String,
    pub volume_id: String,
    #[serde(flatten)]
    pub point: Point,
    /// The records are what changed since this snapshot; absent: they are all that is allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Point>,
    /// Size of the volume at the snapshot.
    pub size_bytes: u64,
    /// The bytes are ciphertext under the volume's data key. Its wrapped keys are here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<serde_json::Value>,
}

impl Header {
    /// # Errors
    /// A size that no volume has, or a snapshot that is not older.
    fn check(&self) -> Result<(), Error> {
        if self.size_bytes > SIZE_BYTES_MAX || !self.size_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(Error::Header(format!("its size, {}, is no volume's", self.size_bytes)));
        }
        match &self.since {
            Some(since) if since.lsn >= self.point.lsn => {
                Err(Error::Header("it is said to be of changes since a later snapshot".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Writes the header; returns its length.
    ///
    /// # Errors
    /// The writer's, or a header that nobody could read.
    pub(crate) fn write(&self, out: &mut impl Write) -> Result<u64, Error> {
        self.check()?;
        let description = serde_json::to_vec(self).expect("plain data into memory");
        if description.len() > DESCRIPTION_BYTES_MAX {
            return Err(Error::Header(format!(
                "its description has {} bytes; {DESCRIPTION_BYTES_MAX} are allowed",
                description.len()
            )));
        }
        let mut fixed = MAGIC.to_vec();
        fixed.extend(FORMAT.to_le_bytes());
        fixed.extend((description.len() as u32).to_le_bytes());
        fixed.extend(crc32c(&description).to_le_bytes());
        fixed.extend(crc32c(&fixed).to_le_bytes());
        out.write_all(&fixed)?;
        out.write_all(&description)?;
        Ok((FIXED_BYTES + description.len()) as u64)
    }

    /// Reads a header; returns its length too.
    ///
    /// # Errors
    /// It is none, or of a later format, or damaged.
    pub(crate) fn read(input: &mut impl Read) -> Result<(Self, u64), Error> {
        let mut fixed = [0; FIXED_BYTES];
        let filled = fill(input, &mut fixed)?;
        if filled < fixed.len() {
            // Even the first bytes of an export may be all that there is.
            let shown = filled.min(MAGIC.len());
            return Err(match MAGIC.starts_with(&fixed[..shown]) {
                true => Error::CutOff { at: filled as u64 },
                false => Error::Foreign,
            });
        }
        let number =
            |at: usize| u32::from_le_bytes(fixed[at..at + 4].try_into().expect("four bytes"));
        if &fixed[..8] != MAGIC {
            return Err(Error::Foreign);
        }
        if crc32c(&fixed[..20]) != number(20) {
            return Err(Error::Damaged { at: 0, what: "the header's checksum does not fit" });
        }
        if number(8) != FORMAT {
            return Err(Error::Newer(number(8)));
        }
        let length = number(12) as usize;
        if length > DESCRIPTION_BYTES_MAX {
            return Err(Error::Damaged { at: 12, what: "a description that is too long" });
        }
        let mut description = vec![0; length];
        let read = fill(input, &mut description)?;
        let end = (FIXED_BYTES + length) as u64;
        if read < length {
            return Err(Error::CutOff { at: (FIXED_BYTES + read) as u64 });
        }
        if crc32c(&description) != number(16) {
            return Err(Error::Damaged { at: 24, what: "the description's checksum does not fit" });
        }
        let header: Self = serde_json::from_slice(&description)
            .map_err(|error| Error::Header(format!("its description cannot be read: {error}")))?;
        header.check()?;
        Ok((header, end))
    }
}

/// Reads until the buffer is full or the input ends; returns how much that is.
pub(crate) fn fill(input: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
