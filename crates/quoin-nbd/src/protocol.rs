//! Constants and wire shapes of the NBD protocol (all integers big-endian), from its public
//! specification.

use quoin_types::block::BlockError;

pub const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, the server's and (with the same values) the client's.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub const FLAG_NO_ZEROES: u16 = 2;

pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    /// Of this product: the client numbers its changing requests (`docs/nbd.md`). Its data is the
    /// name of the export (length and bytes) and the id of the client, 16 bytes; 0: it has none yet.
    pub const CLIENT: u32 = u32::from_be_bytes(*b"QUO\x01");
    /// Of this project alone: 32 bytes by which a client proves that it has the key of an encrypted
    /// volume. It is answered by ACK whatever they are, and reveals nothing.
    pub const PROVE_KEY: u32 = u32::from_be_bytes(*b"QKEY");
}

/// Types of option replies; the high bit marks an error.
pub mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// The id of the client, in answer to [`super::option::CLIENT`].
    pub const CLIENT: u32 = super::option::CLIENT;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_POLICY: u32 = 0x8000_0002;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
}

pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod export {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;

    pub const FLAG_FUA: u16 = 1;
    pub const FLAG_NO_HOLE: u16 = 1 << 1;
    pub const FLAG_DF: u16 = 1 << 2;
    pub const FLAG_REQ_ONE: u16 = 1 << 3;
    pub const FLAG_FAST_ZERO: u16 = 1 << 4;
}

pub mod chunk {
    pub const FLAG_DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 0x8001;
    pub const ERROR_OFFSET: u16 = 0x8002;
}

pub mod error {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
    /// Of numbered requests alone: their client is over.
    pub const STALE: u32 = 116;
}

pub const BASE_ALLOCATION: &str = "base:allocation";
/// The id that the session uses for `base:allocation`.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// State flags of `base:allocation`.
pub const STATE_HOLE: u32 = 1;
pub const STATE_ZERO: u32 = 2;

/// Limit of the payload of one request; the protocol lets clients assume this value.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Block size that the session recommends for best performance.
pub const PREFERRED_BLOCK_SIZE: u32 = 4096;
/// Limit of names and texts in the protocol.
pub const STRING_BYTES_MAX: usize = 4096;

pub const REQUEST_HEADER_BYTES: usize = 28;
/// Bytes that follow the header of a changing request of a client that numbers them: the number, and
/// the lowest number without an answer.
pub const NUMBER_BYTES: usize = 16;
pub const SIMPLE_REPLY_BYTES: usize = 16;
pub const CHUNK_HEADER_BYTES: usize = 20;

/// The header of a request in the transmission phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
}

impl RequestHeader {
    /// Returns true if the request changes the volume, so that clients may number it.
    pub fn changes(&self) -> bool {
        matches!(self.command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
    }

    pub fn encode(&self) -> [u8; REQUEST_HEADER_BYTES] {
        let mut bytes = [0; REQUEST_HEADER_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    /// Decodes a header. `None`: the magic is wrong, so the rest of the stream cannot be parsed.
    pub fn decode(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Option<Self> {
        if be32(bytes, 0) != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: be16(bytes, 4),
            command: be16(bytes, 6),
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            length: be32(bytes, 24),
        })
    }
}

/// Reads at `at`; the caller has checked that `bytes` is long enough.
pub fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads at `at`; the caller has checked that `bytes` is long enough.
pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads at `at`; the caller has checked that `bytes` is long enough.
pub fn be64(bytes: &[u8], at: usize) -> u64 {
    (u64::from(be32(bytes, at)) << 32) | u64::from(be32(bytes, at + 4))
}

/// Returns the protocol's number for the reason of a failure. `writes`: a write beyond the end is a
/// lack of space; any other request beyond it is invalid.
pub fn error_number(error: BlockError, writes: bool) -> u32 {
    match error {
        BlockError::OutOfRange if writes => error::NOSPC,
        BlockError::OutOfRange | BlockError::Misaligned => error::INVAL,
        BlockError::Damaged | BlockError::NoQuorum => error::IO,
        BlockError::NoSpace => error::NOSPC,
        BlockError::ReadOnly => error::PERM,
        BlockError::Stopped => error::SHUTDOWN,
        BlockError::NoClient | BlockError::OutOfWindow => error::STALE,
    }
}
