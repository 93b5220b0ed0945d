//! The fixed header of a frame, and the limits of everything that follows it.
//!
//! ```text
//! offset  bytes  field (little endian)
//!      0      4  magic "QuoF"
//!      4      1  version of the frame format
//!      5      1  kind
//!      6      2  flags, none defined: must be 0
//!      8      4  length of the head: the message without its blocks
//!     12      4  length of the data: the blocks, a multiple of 4096
//!     16      8  session: epoch
//!     24     16  session: incarnation
//!     40      8  session: nonce
//!     48      4  CRC32C of the head
//!     52      8  reserved, must be 0
//!     60      4  CRC32C of bytes 0..60
//! ```
//! Head and data follow, then, on a protected connection, a tag of 16 bytes. The header is never
//! encrypted, so lengths are known (and refused) before the rest is waited for.

use quoin_types::ids::{Epoch, Incarnation, SessionKey};
use quoin_types::message::{Failure, Takes};
use quoin_types::{BLOCK_SIZE, READ_BLOCKS_MAX, crc32c};

pub const HEADER_LEN: usize = 64;
pub const MAGIC: [u8; 4] = *b"QuoF";
/// Frame format of this build; ranges are negotiated by [`crate::Hello`].
pub const FRAME_VERSION: u8 = 1;

/// Limits of the memory that one frame of a peer may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    pub head_bytes_max: u32,
    pub data_bytes_max: u32,
}

impl Limits {
    /// For sessions: an answer without data for [`quoin_types::STATUS_BLOCKS_MAX`] blocks, and 8
    /// MiB of data.
    pub const SESSION: Limits = Limits { head_bytes_max: 2 << 20, data_bytes_max: 8 << 20 };
    /// For peers that are not identified yet.
    pub const HELLO: Limits = Limits { head_bytes_max: 20 << 10, data_bytes_max: 0 };
}

// The answer to any read fits.
const _: () =
    assert!(READ_BLOCKS_MAX as usize * BLOCK_SIZE <= Limits::SESSION.data_bytes_max as usize);
/// Data size above which an `Append` is sent as several frames.
pub const APPEND_DATA_SPLIT: usize = 2 << 20;
/// Number of entries above which an `Append` is sent as several frames.
pub const APPEND_ENTRIES_SPLIT: usize = 1024;

/// Errors that end a connection.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("the peer does not speak Quoin's data protocol (wrong magic)")]
    Magic,
    #[error("the peer ended the secure connection with a TLS alert: it refused our certificate")]
    Refused,
    #[error("frame format version {0} is unknown; this build speaks version {FRAME_VERSION}")]
    Version(u8),
    #[error("frame kind {0} is unknown")]
    Kind(u8),
    #[error("a frame failed the checksum of its {0}")]
    Checksum(&'static str),
    #[error("a frame of {head} + {data} bytes is over the limit of {head_max} + {data_max}")]
    TooLong { head: u32, data: u32, head_max: u32, data_max: u32 },
    #[error("malformed {0}")]
    Malformed(&'static str),
    #[error("a frame failed its authentication tag")]
    Tag,
    #[error("the peer closed the connection")]
    Closed,
    #[error("{operation}: {source}")]
    Io { operation: &'static str, source: std::io::Error },
}

impl From<quoin_types::codec::Malformed> for WireError {
    fn from(malformed: quoin_types::codec::Malformed) -> Self {
        WireError::Malformed(malformed.0)
    }
}

impl From<quoin_types::history::WrongChecksum> for WireError {
    fn from(_: quoin_types::history::WrongChecksum) -> Self {
        WireError::Checksum("block")
    }
}

/// The header, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub kind: u8,
    pub head_len: u32,
    pub data_len: u32,
    pub session: SessionKey,
    pub head_crc: u32,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0u8; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = FRAME_VERSION;
        out[5] = self.kind;
        out[8..12].copy_from_slice(&self.head_len.to_le_bytes());
        out[12..16].copy_from_slice(&self.data_len.to_le_bytes());
        out[16..24].copy_from_slice(&self.session.epoch.0.to_le_bytes());
        out[24..40].copy_from_slice(&self.session.incarnation.0.to_le_bytes());
        out[40..48].copy_from_slice(&self.session.nonce.to_le_bytes());
        out[48..52].copy_from_slice(&self.head_crc.to_le_bytes());
        let crc = crc32c(&out[..60]);
        out[60..64].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8; HEADER_LEN], limits: &Limits) -> Result<Self, WireError> {
        if bytes[0..4] != MAGIC {
            // A TLS alert record in place of the first frame: the peer refused the handshake after
            // this side had already finished its half.
            return Err(if bytes[0] == 0x15 && bytes[1] == 3 {
                WireError::Refused
            } else {
                WireError::Magic
            });
        }
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if u32_at(60) != crc32c(&bytes[..60]) {
            return Err(WireError::Checksum("header"));
        }
        if bytes[4] != FRAME_VERSION {
            return Err(WireError::Version(bytes[4]));
        }
        if bytes[6..8] != [0; 2] || bytes[52..60] != [0; 8] {
            return Err(WireError::Malformed("reserved header bytes"));
        }
        let header = Header {
            kind: bytes[5],
            head_len: u32_at(8),
            data_len: u32_at(12),
            session: SessionKey {
                epoch: Epoch(u64_at(16)),
                incarnation: Incarnation(u128::from_le_bytes(
                    bytes[24..40].try_into().expect("16 bytes"),
                )),
                nonce: u64_at(40),
            },
            head_crc: u32_at(48),
        };
        if header.head_len > limits.head_bytes_max || header.data_len > limits.data_bytes_max {
            return Err(WireError::TooLong {
                head: header.head_len,
                data: header.data_len,
                head_max: limits.head_bytes_max,
                data_max: limits.data_bytes_max,
            });
        }
        if !(header.data_len as usize).is_multiple_of(BLOCK_SIZE) {
            return Err(WireError::Malformed("data length"));
        }
        Ok(header)
    }

    /// Length of header, head and data, without a tag.
    pub fn frame_len(&self) -> usize {
        HEADER_LEN + self.head_len as usize + self.data_len as usize
    }
}

/// The stable numbers of the kinds. 0 is never used.
pub mod kind {
    pub const OPEN: u8 = 1;
    pub const TRUNCATE: u8 = 2;
    pub const APPEND: u8 = 3;
    pub const SYNC: u8 = 4;
    pub const PING: u8 = 5;
    pub const READ: u8 = 6;
    pub const FETCH: u8 = 7;
    pub const PULL: u8 = 8;
    pub const INCREMENT_BEGIN: u8 = 9;
    pub const INCREMENT_FEED: u8 = 10;
    pub const INCREMENT_CUT: u8 = 11;
    pub const INCREMENT_COMMIT: u8 = 12;
    pub const REPAIR: u8 = 13;
    pub const CLOSE: u8 = 14;
    pub const MEND: u8 = 15;
    pub const VERIFY: u8 = 16;
    pub const OPEN_BULK: u8 = 17;

    pub const OPEN_ACK: u8 = 65;
    pub const REFUSE: u8 = 66;
    pub const TRUNCATED: u8 = 67;
    pub const APPLIED: u8 = 68;
    pub const DATA: u8 = 69;
    pub const FETCHED: u8 = 70;
    pub const PULLED: u8 = 71;
    pub const INCREMENT_FED: u8 = 72;
    pub const INCREMENT_DONE: u8 = 73;
    pub const REPAIRED: u8 = 74;
    pub const CLOSED: u8 = 75;
    pub const FAILED: u8 = 76;
    pub const BAD_COPY: u8 = 77;
    pub const MENDED: u8 = 78;
    pub const NO_ROOM: u8 = 79;
    pub const ROOM: u8 = 80;
    pub const VERIFIED: u8 = 81;
    pub const INCREMENT_BEGUN: u8 = 82;

    pub const HELLO: u8 = 128;
    pub const WELCOME: u8 = 129;

    pub const HISTORY_WANTED: u8 = 144;
    pub const HISTORY_PART: u8 = 145;
    pub const HISTORY_REFUSED: u8 = 146;
    pub const HISTORY_FEED: u8 = 147;
    pub const HISTORY_SLOTS: u8 = 148;
    pub const HISTORY_TAKEN: u8 = 149;
}

/// The stable numbers of failures on the wire.
pub(crate) const FAILURES: [(u8, Failure); 8] = [
    (1, Failure::Fenced),
    (2, Failure::Unknown),
    (3, Failure::Retired),
    (4, Failure::Full),
    (5, Failure::Io),
    (6, Failure::Damaged),
    (7, Failure::Protocol),
    (8, Failure::Stopping),
];

pub(crate) const TAKES: [(u8, Takes); 3] =
    [(0, Takes::Nothing), (1, Takes::Holes), (2, Takes::Writes)];

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            kind: kind::APPEND,
            head_len: 100,
            data_len: 8192,
            session: SessionKey { epoch: Epoch(7), incarnation: Incarnation(9), nonce: 11 },
            head_crc: 0xdead_beef,
        }
    }

    #[test]
    fn a_header_decodes_to_what_was_encoded() {
        assert_eq!(Header::decode(&header().encode(), &Limits::SESSION).unwrap(), header());
    }

    #[test]
    fn every_single_bit_flip_of_a_header_is_refused() {
        for bit in 0..HEADER_LEN * 8 {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes, &Limits::SESSION).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_over_the_limit_are_refused_before_the_content_arrives() {
        let mut long = header();
        long.head_len = Limits::SESSION.head_bytes_max + 1;
        let refused = Header::decode(&long.encode(), &Limits::SESSION);
        assert!(matches!(refused, Err(WireError::TooLong { .. })));
        let mut long = header();
        long.data_len = u32::MAX;
        let refused = Header::decode(&long.encode(), &Limits::SESSION);
        assert!(matches!(refused, Err(WireError::TooLong { .. })));
    }

    /// The checksum is good, so that each wrong field is tested by itself.
    #[test]
    fn a_header_with_any_one_field_wrong_is_refused_by_the_rule_of_that_field() {
        let (max, limits) = (Limits::SESSION, Limits::SESSION);
        let at_most =
            Header { head_len: max.head_bytes_max, data_len: max.data_bytes_max, ..header() };
        assert_eq!(Header::decode(&at_most.encode(), &limits).unwrap(), at_most);
        type Matches = fn(&WireError) -> bool;
        let rows: [(&str, usize, &[u8], Matches); 9] = [
            ("magic", 0, b"QuoG", |e| matches!(e, WireError::Magic)),
            ("alert of another protocol", 0, &[0x15, 2], |e| matches!(e, WireError::Magic)),
            ("version", 4, &[FRAME_VERSION + 1], |e| matches!(e, WireError::Version(2))),
            ("flags", 6, &[1], |e| matches!(e, WireError::Malformed("reserved header bytes"))),
            ("flags", 7, &[1], |e| matches!(e, WireError::Malformed("reserved header bytes"))),
            ("reserved", 52, &[1], |e| matches!(e, WireError::Malformed("reserved header bytes"))),
            ("reserved", 59, &[1], |e| matches!(e, WireError::Malformed("reserved header bytes"))),
            ("data length", 12, &[1], |e| matches!(e, WireError::Malformed("data length"))),
            ("head length", 8, &[0xff; 4], |e| matches!(e, WireError::TooLong { .. })),
        ];
        for (what, at, wrong, matches) in rows {
            let mut bytes = header().encode();
            bytes[at..at + wrong.len()].copy_from_slice(wrong);
            let crc = crc32c(&bytes[..60]);
            bytes[60..].copy_from_slice(&crc.to_le_bytes());
            let refusal = Header::decode(&bytes, &limits).unwrap_err();
            assert!(matches(&refusal), "{what} at {at}: {refusal}");
        }
        let mut bytes = header().encode();
        bytes[63] ^= 1;
        let refusal = Header::decode(&bytes, &limits).unwrap_err();
        assert!(matches!(refusal, WireError::Checksum("header")), "{refusal}");
    }

    #[test]
    fn a_tls_alert_in_place_of_a_frame_is_reported_as_a_refused_certificate() {
        let mut bytes = [0u8; HEADER_LEN];
        bytes[..7].copy_from_slice(&[0x15, 3, 3, 0, 2, 2, 48]);
        assert!(matches!(Header::decode(&bytes, &Limits::SESSION), Err(WireError::Refused)));
    }
}
