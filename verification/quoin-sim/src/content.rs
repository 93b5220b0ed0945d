//! Contents of the simulated clients' writes. Each 512-byte sector names its write and its place, so
//! that a read identifies the writes that it saw.

use bytes::{Bytes, BytesMut};
use quoin_types::BLOCK_SIZE;

/// The logical sector of the smallest write.
pub const SECTOR: usize = 512;
pub const SECTORS: usize = BLOCK_SIZE / SECTOR;

/// Names a write within a run; 0 is "zeroes".
pub type Tag = u32;
/// Tags of the eight sectors of a block.
pub type Tags = [Tag; SECTORS];

pub const ZERO: Tags = [0; SECTORS];

/// Bytes that belong to no write at this place: damage, another place's data, or a torn sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongBytes {
    pub sector: u64,
    /// Tag and place that the sector names; `None`: it names none.
    pub names: Option<(Tag, u64)>,
}

fn word(run: u64, tag: Tag, sector: u64) -> u64 {
    (run ^ (u64::from(tag) << 32) ^ sector).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

fn fill(run: u64, tag: Tag, sector: u64, out: &mut [u8]) {
    out[..8].copy_from_slice(&u64::from(tag).to_le_bytes());
    out[8..16].copy_from_slice(&sector.to_le_bytes());
    let filler = &mut out[16..];
    filler[..8].copy_from_slice(&word(run, tag, sector).to_le_bytes());
    let mut done = 8;
    while done < filler.len() {
        let next = done.min(filler.len() - done);
        filler.copy_within(..next, done);
        done += next;
    }
}

/// The bytes that write `tag` puts at `[first_sector, first_sector + sectors)`.
pub fn make(run: u64, tag: Tag, first_sector: u64, sectors: u64) -> Bytes {
    let mut bytes = BytesMut::zeroed(sectors as usize * SECTOR);
    for (i, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        fill(run, tag, first_sector + i as u64, sector);
    }
    bytes.freeze()
}

/// Returns true if all words of `bytes` are this one: the first is, and each is like the one before
/// it. Every byte that is ever read goes through here, and two slices are compared at once.
fn holds(bytes: &[u8], word: [u8; 8]) -> bool {
    bytes[..8] == word && bytes[8..] == bytes[..bytes.len() - 8]
}

/// Which write one sector is of.
pub fn tag_of(run: u64, sector: u64, bytes: &[u8]) -> Result<Tag, WrongBytes> {
    if bytes.len() == SECTOR {
        let head = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (tag, place) = (head(0), head(8));
        if tag == 0 && holds(bytes, [0; 8]) {
            return Ok(0);
        }
        if let Ok(tag) = Tag::try_from(tag) {
            let filler = word(run, tag, sector).to_le_bytes();
            if tag != 0 && place == sector && holds(&bytes[16..], filler) {
                return Ok(tag);
            }
            return Err(WrongBytes { sector, names: Some((tag, place)) });
        }
    }
    Err(WrongBytes { sector, names: None })
}

/// The tags of one whole block.
pub fn tags_of_block(run: u64, block: u64, bytes: &[u8]) -> Result<Tags, WrongBytes> {
    let mut tags = ZERO;
    let first = block * SECTORS as u64;
    for (i, sector) in bytes.chunks(SECTOR).enumerate() {
        tags[i] = tag_of(run, first + i as u64, sector)?;
    }
    Ok(tags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_names_its_write_and_its_place() {
        let bytes = make(9, 77, 16, 8);
        assert_eq!(tags_of_block(9, 2, &bytes), Ok([77; 8]));
        assert!(tags_of_block(9, 3, &bytes).is_err(), "another place");
        assert!(tags_of_block(8, 2, &bytes).is_err(), "another run");
        assert_eq!(tags_of_block(9, 2, &[0; 4096]), Ok(ZERO));
    }

    #[test]
    fn one_flipped_bit_anywhere_is_seen() {
        let good = make(9, 77, 16, 1);
        for bit in 0..SECTOR * 8 {
            let mut bad = good.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(tag_of(9, 16, &bad) != Ok(77), "bit {bit}");
        }
    }
}
