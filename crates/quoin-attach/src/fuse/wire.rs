//! The kernel's FUSE messages (native byte order), as far as one regular file needs them.

pub const MAJOR: u32 = 7;
/// The newest minor version whose fields are used here.
pub const MINOR: u32 = 38;

pub mod opcode {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

pub const INIT_ASYNC_READ: u32 = 1;
pub const INIT_BIG_WRITES: u32 = 1 << 5;
pub const INIT_ASYNC_DIO: u32 = 1 << 15;
pub const INIT_MAX_PAGES: u32 = 1 << 22;
/// The message has a second word of flags.
pub const INIT_EXT: u32 = 1 << 30;
/// In the second word (Linux 6.9): unanswered requests can be sent again.
pub const INIT2_HAS_RESEND: u32 = 1 << 7;

/// Notification to the kernel: it sends all unanswered requests again.
pub const NOTIFY_RESEND: i32 = 7;

pub const OPEN_DIRECT_IO: u32 = 1;
pub const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

pub const FALLOCATE_KEEP_SIZE: u32 = 1;
pub const FALLOCATE_PUNCH_HOLE: u32 = 2;
pub const FALLOCATE_ZERO_RANGE: u32 = 0x10;

pub const IN_HEADER_BYTES: usize = 40;
pub const OUT_HEADER_BYTES: usize = 16;
/// Header and fixed part of a write, before its data.
pub const WRITE_HEADER_BYTES: usize = IN_HEADER_BYTES + 40;

/// The header of every request.
#[derive(Clone, Copy, Debug)]
pub struct InHeader {
    pub opcode: u32,
    pub unique: u64,
}

impl InHeader {
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let length = u32_at(bytes, 0)? as usize;
        if length != bytes.len() || length < IN_HEADER_BYTES {
            return None;
        }
        Some(Self { opcode: u32_at(bytes, 4)?, unique: u64_at(bytes, 8)? })
    }
}

pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The header of an answer; `error` is a positive errno or 0.
pub fn out_header(unique: u64, error: i32, body: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut bytes = [0; OUT_HEADER_BYTES];
    bytes[..4].copy_from_slice(&((OUT_HEADER_BYTES + body) as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&(-error).to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// A notification without a body: the kernel takes the code where an answer has its error.
pub fn notification(code: i32) -> [u8; OUT_HEADER_BYTES] {
    out_header(0, -code, 0)
}

/// Writes integers one after the other, as C lays out structs without padding.
#[derive(Default)]
pub struct Body(pub Vec<u8>);

impl Body {
    pub fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    pub fn zeroes(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }
}
