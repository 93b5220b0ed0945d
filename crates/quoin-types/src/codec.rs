//! Little-endian encoding of the few structures that exist both on the wire and on disk.
//!
//! [`Reader`] never panics and never allocates more than its input justifies: lengths are checked
//! against the bytes that are left before anything is reserved.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Error: the input is shorter than its own fields announce, or contradicts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed {0}")]
pub struct Malformed(pub &'static str);

pub struct Reader {
    bytes: Bytes,
}

impl Reader {
    pub fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len()
    }

    /// Takes `n` bytes without copying.
    pub fn take(&mut self, n: usize, what: &'static str) -> Result<Bytes, Malformed> {
        if n > self.bytes.len() {
            return Err(Malformed(what));
        }
        Ok(self.bytes.split_to(n))
    }

    /// Takes `N` bytes.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        // `take` is not used here: it shares the buffer, which costs more than the copy.
        let array = *self.bytes.first_chunk::<N>().ok_or(Malformed(what))?;
        self.bytes.advance(N);
        Ok(array)
    }

    /// Takes `n` numbers.
    pub fn u32s(&mut self, n: usize, what: &'static str) -> Result<Vec<u32>, Malformed> {
        let length = n.saturating_mul(4);
        let bytes = self.bytes.get(..length).ok_or(Malformed(what))?;
        let numbers = bytes
            .chunks_exact(4)
            .map(|c| u32::from_le_bytes(c.try_into().expect("4 bytes")))
            .collect();
        self.bytes.advance(length);
        Ok(numbers)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        Ok(self.array::<1>(what)?[0])
    }
    pub fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        self.array(what).map(u16::from_le_bytes)
    }
    pub fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        self.array(what).map(u32::from_le_bytes)
    }
    pub fn u64(&mut self, what: &'static str) -> Result<u64, Malformed> {
        self.array(what).map(u64::from_le_bytes)
    }
    pub fn u128(&mut self, what: &'static str) -> Result<u128, Malformed> {
        self.array(what).map(u128::from_le_bytes)
    }
    pub fn bool(&mut self, what: &'static str) -> Result<bool, Malformed> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed(what)),
        }
    }

    /// Reads a `u32` count of items that have at least `item_len` bytes each.
    pub fn count(&mut self, item_len: usize, what: &'static str) -> Result<usize, Malformed> {
        let n = self.u32(what)? as usize;
        if n.saturating_mul(item_len.max(1)) > self.bytes.len() {
            return Err(Malformed(what));
        }
        Ok(n)
    }

    /// Reads a `u32` length and that many bytes.
    pub fn bytes(&mut self, what: &'static str) -> Result<Bytes, Malformed> {
        let n = self.count(1, what)?;
        if n == 0 {
            return Ok(Bytes::new());
        }
        self.take(n, what)
    }

    pub fn end(&self, what: &'static str) -> Result<(), Malformed> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Malformed(what)) }
    }
}

/// Counterpart of [`Reader`]; writes into any `BytesMut`.
pub trait Writer {
    fn put_flag(&mut self, flag: bool);
    fn put_count(&mut self, count: usize);
    fn put_blob(&mut self, blob: &[u8]);
}

impl Writer for BytesMut {
    fn put_flag(&mut self, flag: bool) {
        self.put_u8(u8::from(flag));
    }
    fn put_count(&mut self, count: usize) {
        self.put_u32_le(u32::try_from(count).expect("bounded by the protocol's limits"));
    }
    fn put_blob(&mut self, blob: &[u8]) {
        self.put_count(blob.len());
        self.put_slice(blob);
    }
}
