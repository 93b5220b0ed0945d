//! Structures on disk, byte by byte: nothing outside this room writes or reads offsets.
//!
//! Each structure is a type whose size is asserted and whose fields are little-endian and without
//! alignment, headed by its table of `docs/store.md`.

pub mod batch;
pub mod checkpoint;
pub mod node;
pub mod record;
#[cfg(test)]
mod recorded;
pub mod relatives;
pub mod ring_block;
pub mod segment;
pub mod superblock;
pub mod table;

use bytes::{BufMut, BytesMut};
use quoin_types::codec::Malformed;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Takes a structure of a fixed size from a [`quoin_types::codec::Reader`].
macro_rules! read {
    ($reader:expr, $structure:ty, $what:expr) => {{
        let bytes = $reader.array::<{ size_of::<$structure>() }>($what)?;
        let structure: $structure = zerocopy::transmute!(bytes);
        structure
    }};
}
use read;

/// Takes a structure from the front of `rest`.
fn take<'a, T>(rest: &mut &'a [u8]) -> Option<&'a T>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let (taken, behind) = T::ref_from_prefix(rest).ok()?;
    *rest = behind;
    Some(taken)
}

fn put(out: &mut BytesMut, part: &(impl IntoBytes + Immutable)) {
    out.put_slice(part.as_bytes());
}

fn flag(byte: u8, what: &'static str) -> Result<bool, Malformed> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed(what)),
    }
}
