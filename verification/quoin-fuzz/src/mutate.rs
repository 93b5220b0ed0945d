//! Mutations of inputs without guidance by coverage: the usual small damages, several at once.

use rand::Rng;

const LENGTH_MAX: usize = 64 << 10;
/// Lengths and counts are most often wrong at their edges.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// Returns `input` with one to eight damages; `other` provides bytes.
pub fn mutate(rng: &mut impl Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut out = input.to_vec();
    for _ in 0..rng.random_range(1..=8) {
        injure(rng, &mut out, other);
    }
    out.truncate(LENGTH_MAX);
    out
}

fn injure(rng: &mut impl Rng, out: &mut Vec<u8>, other: &[u8]) {
    if out.is_empty() {
        out.extend((0..rng.random_range(1..64)).map(|_| rng.random::<u8>()));
        return;
    }
    let at = rng.random_range(0..out.len());
    match rng.random_range(0..8) {
        0 => out[at] ^= 1 << rng.random_range(0..8),
        1 => out[at] = rng.random(),
        2 => {
            let edge = EDGES[rng.random_range(0..EDGES.len())].to_le_bytes();
            write(out, at, &edge[..1 << rng.random_range(0..4)]);
        }
        3 => {
            let edge = EDGES[rng.random_range(0..EDGES.len())].to_be_bytes();
            let width = 1 << rng.random_range(0..4);
            write(out, at, &edge[8 - width..]);
        }
        4 => out.truncate(at),
        5 => {
            let end = (at + rng.random_range(1..32)).min(out.len());
            out.drain(at..end);
        }
        6 => {
            let end = (at + rng.random_range(1..64)).min(out.len());
            let again = out[at..end].to_vec();
            out.splice(at..at, again);
        }
        _ if !other.is_empty() => {
            let from = rng.random_range(0..other.len());
            let to = (from + rng.random_range(1..64)).min(other.len());
            write(out, at, &other[from..to]);
        }
        _ => {}
    }
}

/// Overwrites present bytes, as far as there are any.
fn write(out: &mut [u8], at: usize, bytes: &[u8]) {
    for (place, byte) in out[at..].iter_mut().zip(bytes) {
        *place = *byte;
    }
}
