//! Layout of a pool, and the superblock that describes it.
//!
//! ```text
//! block 0,1   superblock, a ring of two          | S-2,S-1     the same at the other end
//! block 2..   metadata ring (two halves)         | ..S-2       its mirror
//! between     units of equal size; a segment is one unit or eight aligned ones
//! ```

use std::mem::offset_of;

use quoin_replication::replica::store::StoreError;
use quoin_types::{BLOCK_SIZE, PoolId};
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::disk::Disk;
use crate::error::PoolError;

/// `QUOINPL1`: the first bytes of every superblock.
pub const SUPERBLOCK_MAGIC: [u8; 8] = *b"QUOINPL1";
/// Readers refuse any other one. Version 1 was that of builds before the first release.
pub const FORMAT_VERSION: u32 = 2;
/// Units of a large segment.
pub const LARGE_UNITS: u32 = 8;
/// The name of the block checksum in the superblock: CRC32C.
const CHECKSUM_CRC32C: u32 = 1;
const SUPERBLOCKS: u64 = 2;
const SMALLEST_POOL_UNITS: u64 = 16;

/// A superblock on disk, followed by zeros up to the block's end.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | `QUOINPL1` |
/// | 8 | 4 | format version; a reader refuses any other one |
/// | 12 | 4 | block checksum: 1 = CRC32C |
/// | 16, 24, 32 | 8 each | feature words compat, ro-compat, incompat |
/// | 40 | 16 | pool id |
/// | 56 | 8 | blocks of the pool |
/// | 64 | 4 | blocks of a unit |
/// | 68 | 4 | blocks of one copy of the metadata ring |
/// | 72 | 8 | how often the pool was opened |
/// | 80 | 12 | zero |
/// | 92 | 4 | CRC32C of what is before |
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OnDisk {
    magic: [u8; 8],
    version: U32,
    checksum: U32,
    features: FeatureWords,
    pool: U128,
    blocks: U64,
    unit_blocks: U32,
    ring_blocks: U32,
    starts: U64,
    zero: [u8; 12],
    crc: U32,
}
const _: () = assert!(size_of::<OnDisk>() == 96);

impl OnDisk {
    fn crc(&self) -> u32 {
        quoin_types::crc32c(&self.as_bytes()[..offset_of!(OnDisk, crc)])
    }
}

/// The feature words, as superblocks and segment headers have them.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FeatureWords {
    compat: U64,
    ro_compat: U64,
    incompat: U64,
}
const _: () = assert!(size_of::<FeatureWords>() == 24);

impl From<Features> for FeatureWords {
    fn from(features: Features) -> Self {
        FeatureWords {
            compat: features.compat.into(),
            ro_compat: features.ro_compat.into(),
            incompat: features.incompat.into(),
        }
    }
}

impl From<FeatureWords> for Features {
    fn from(words: FeatureWords) -> Self {
        Features {
            compat: words.compat.get(),
            ro_compat: words.ro_compat.get(),
            incompat: words.incompat.get(),
        }
    }
}

/// Feature words: an unknown bit in `incompat` or `ro_compat` refuses to open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Features {
    /// [`KEEPS_SPACE`]
    pub compat: u64,
    pub ro_compat: u64,
    pub incompat: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Superblock {
    pub pool: PoolId,
    pub features: Features,
    /// Blocks of the whole pool.
    pub blocks: u64,
    pub unit_blocks: u32,
    /// Blocks of one copy of the metadata ring, both halves.
    pub ring_blocks: u32,
    /// How often the pool was opened: also known to the control plane, which so notices a disk
    /// that was rolled back.
    pub starts: u64,
}

/// The shape of a pool to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FormatOptions {
    pub pool: PoolId,
    /// Blocks of a small segment; a large one is eight of them. 0: 4 MiB, or more where the pool
    /// would have too many units. Entries must fit in a small segment, so a pool for entries of
    /// 1 MiB needs at least 512.
    pub unit_blocks: u32,
    /// Make a pool over whatever lies there.
    pub overwrite: bool,
    /// The disk has all its space and is to keep it: nothing is given back to a file system.
    pub keeps_space: bool,
}

/// A compatible feature, see [`FormatOptions::keeps_space`].
pub const KEEPS_SPACE: u64 = 1;
/// Incompatible features that this build knows. There are none: all that a pool has belongs to its
/// format version.
const KNOWN_INCOMPAT: u64 = 0;
const UNIT_BLOCKS_MAX: u32 = 1 << 16;
/// Blocks of a unit unless the pool is made otherwise.
const UNIT_BLOCKS: u32 = 1024;
/// Units of a pool unless it is made otherwise: a segment takes up to 100 bytes of memory, where many
/// replicas share a page of the table, and a start reads each leaf of it. That is 8 TiB of units of
/// 4 MiB.
const UNITS_MAX: u64 = 1 << 21;

/// Blocks of a unit of a pool of so many blocks.
fn unit_blocks_of(blocks: u64) -> u32 {
    let mut unit_blocks = UNIT_BLOCKS;
    while blocks / u64::from(unit_blocks) > UNITS_MAX && unit_blocks < UNIT_BLOCKS_MAX {
        unit_blocks *= 2;
    }
    unit_blocks
}

impl FormatOptions {
    pub fn new(pool: PoolId) -> Self {
        Self { pool, unit_blocks: 0, overwrite: false, keeps_space: false }
    }

    /// Whether a pool of this shape can be made of so many bytes.
    pub fn check(&self, size: u64) -> Result<(), PoolError> {
        Superblock::new(size, self).map(drop)
    }
}

impl Superblock {
    pub fn new(size: u64, options: &FormatOptions) -> Result<Self, PoolError> {
        let blocks = size / BLOCK_SIZE as u64;
        let unit_blocks = match options.unit_blocks {
            0 => unit_blocks_of(blocks),
            unit_blocks => unit_blocks,
        };
        let (least_unit, most_unit) = (16, UNIT_BLOCKS_MAX);
        if !(least_unit..=most_unit).contains(&unit_blocks) {
            return Err(PoolError::Unfit("a segment must have 16 to 65536 blocks"));
        }
        let ring_blocks = (blocks / 512).clamp(128, 65536) as u32 & !1;
        let superblock = Superblock {
            pool: options.pool,
            features: Features {
                compat: if options.keeps_space { KEEPS_SPACE } else { 0 },
                ..Features::default()
            },
            blocks,
            unit_blocks,
            ring_blocks,
            starts: 0,
        };
        let needed = 2 * (SUPERBLOCKS + u64::from(ring_blocks))
            + SMALLEST_POOL_UNITS * u64::from(unit_blocks);
        if blocks < needed {
            return Err(PoolError::TooSmall {
                size_bytes: size,
                needed_bytes: needed * BLOCK_SIZE as u64,
            });
        }
        Ok(superblock)
    }

    /// First blocks of the metadata ring and of its mirror.
    pub fn rings(&self) -> [u64; 2] {
        [SUPERBLOCKS, self.blocks - SUPERBLOCKS - u64::from(self.ring_blocks)]
    }

    pub fn segments_start(&self) -> u64 {
        SUPERBLOCKS + u64::from(self.ring_blocks)
    }

    pub fn units(&self) -> u32 {
        let room = self.blocks - 2 * self.segments_start();
        u32::try_from(room / u64::from(self.unit_blocks)).unwrap_or(u32::MAX - 1)
    }

    pub fn unit_start(&self, unit: u32) -> u64 {
        self.segments_start() + u64::from(unit) * u64::from(self.unit_blocks)
    }

    /// The unit a block lies in, if it lies in one.
    pub fn unit_of(&self, block: u64) -> Option<u32> {
        let unit = block.checked_sub(self.segments_start())? / u64::from(self.unit_blocks);
        u32::try_from(unit).ok().filter(|u| *u < self.units())
    }

    pub fn encode(&self) -> [u8; BLOCK_SIZE] {
        let mut raw = OnDisk {
            magic: SUPERBLOCK_MAGIC,
            version: FORMAT_VERSION.into(),
            checksum: CHECKSUM_CRC32C.into(),
            features: self.features.into(),
            pool: self.pool.0.into(),
            blocks: self.blocks.into(),
            unit_blocks: self.unit_blocks.into(),
            ring_blocks: self.ring_blocks.into(),
            starts: self.starts.into(),
            zero: [0; 12],
            crc: U32::ZERO,
        };
        raw.crc = raw.crc().into();
        let mut out = [0; BLOCK_SIZE];
        out[..size_of::<OnDisk>()].copy_from_slice(raw.as_bytes());
        out
    }

    /// `Ok(None)`: no superblock of ours, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, PoolError> {
        let Ok((raw, _)) = OnDisk::ref_from_prefix(bytes) else { return Ok(None) };
        if raw.magic != SUPERBLOCK_MAGIC || raw.crc() != raw.crc.get() {
            return Ok(None);
        }
        let (version, features) = (raw.version.get(), Features::from(raw.features));
        let unknown = features.incompat & !KNOWN_INCOMPAT | features.ro_compat;
        if version < FORMAT_VERSION {
            return Err(PoolError::Older { version });
        }
        if version > FORMAT_VERSION || raw.checksum.get() != CHECKSUM_CRC32C || unknown != 0 {
            return Err(PoolError::Newer { version });
        }
        let superblock = Superblock {
            pool: PoolId(raw.pool.get()),
            features,
            blocks: raw.blocks.get(),
            unit_blocks: raw.unit_blocks.get(),
            ring_blocks: raw.ring_blocks.get(),
            starts: raw.starts.get(),
        };
        let (ring, unit) = (u64::from(superblock.ring_blocks), superblock.unit_blocks);
        let sane = (16..=UNIT_BLOCKS_MAX).contains(&unit)
            && ring >= 2
            && ring.is_multiple_of(2)
            && superblock.blocks > 2 * (SUPERBLOCKS + ring) + u64::from(unit)
            && superblock.blocks < 1 << 50;
        Ok(sane.then_some(superblock))
    }

    /// Writes the copies of this start: one slot of the ring of two, at both ends.
    pub fn write<D: Disk>(&self, disk: &D) -> Result<(), StoreError> {
        self.places().try_for_each(|block| self.write_to(disk, block))
    }

    /// Where the copies of this start are.
    pub fn places(&self) -> impl Iterator<Item = u64> + use<> {
        let slot = self.starts % SUPERBLOCKS;
        [slot, self.blocks - SUPERBLOCKS + slot].into_iter()
    }

    fn write_to<D: Disk>(&self, disk: &D, block: u64) -> Result<(), StoreError> {
        let bytes = self.encode();
        let part = std::io::IoSlice::new(&bytes);
        disk.write_at(block * BLOCK_SIZE as u64, &[part]).map_err(StoreError::Io)
    }

    /// The newest superblock of either end. A copy that contradicts the disk's size is no copy. A
    /// slot that the disk refuses to read at both ends may hold the newest.
    pub fn read<D: Disk>(disk: &D) -> Result<Self, PoolError> {
        let blocks = disk.size() / BLOCK_SIZE as u64;
        if blocks < 2 * SUPERBLOCKS {
            return Err(PoolError::Foreign);
        }
        let mut newest: Option<Superblock> = None;
        let mut buffer = vec![0; BLOCK_SIZE];
        for slot in 0..SUPERBLOCKS {
            let mut shown = false;
            for (block, is_last) in [(slot, false), (blocks - SUPERBLOCKS + slot, true)] {
                match disk.read_at(block * BLOCK_SIZE as u64, &mut buffer) {
                    Err(fault) if is_last && !shown => return Err(fault.into()),
                    Err(_) => continue,
                    Ok(()) => shown = true,
                }
                if let Some(found) = Self::decode(&buffer)?
                    && newest.is_none_or(|n| found.starts > n.starts)
                {
                    newest = Some(found);
                }
            }
        }
        match newest {
            None => Err(PoolError::Foreign),
            Some(found) if found.blocks > blocks => Err(PoolError::Truncated {
                size_bytes: disk.size(),
                expected_bytes: found.blocks * BLOCK_SIZE as u64,
            }),
            Some(found) => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDisk;

    #[test]
    fn a_superblock_is_found_while_one_copy_is_left() {
        let disk = MemoryDisk::new(128 << 20);
        let mut superblock =
            Superblock::new(disk.size(), &FormatOptions::new(PoolId(7))).expect("a fit pool");
        for starts in 0..3 {
            superblock.starts = starts;
            superblock.write(&disk).expect("a write");
        }
        assert_eq!(Superblock::read(&disk).expect("a pool"), superblock);
        disk.rot(40, 1);
        assert_eq!(Superblock::read(&disk).expect("the other end"), superblock);
        disk.rot(disk.size() - 2 * 4096 + 90, 0x80);
        superblock.starts = 1;
        assert_eq!(Superblock::read(&disk).expect("the start before"), superblock);
    }

    #[test]
    fn other_peoples_disks_and_newer_formats_are_refused_by_name() {
        let disk = MemoryDisk::new(128 << 20);
        assert!(matches!(Superblock::read(&disk), Err(PoolError::Foreign)));
        let mut superblock =
            Superblock::new(disk.size(), &FormatOptions::new(PoolId(7))).expect("a fit pool");
        superblock.features.incompat = 4;
        superblock.write(&disk).expect("a write");
        assert!(matches!(Superblock::read(&disk), Err(PoolError::Newer { .. })));
        superblock.features.incompat = 0;
        for (version, texts) in [
            (FORMAT_VERSION - 1, ["format 1", "format 2", "quoin pool export"]),
            (FORMAT_VERSION + 1, ["format 3", "format 2", "newer Quoin"]),
        ] {
            let mut block = superblock.encode();
            block[8..12].copy_from_slice(&version.to_le_bytes());
            let crc = quoin_types::crc32c(&block[..92]);
            block[92..96].copy_from_slice(&crc.to_le_bytes());
            for place in superblock.places() {
                let part = std::io::IoSlice::new(&block);
                disk.write_at(place * BLOCK_SIZE as u64, &[part]).expect("a write");
            }
            let refused = Superblock::read(&disk).expect_err("another version").to_string();
            assert!(texts.iter().all(|text| refused.contains(text)), "{refused}");
        }
        let small = Superblock::new(1 << 20, &FormatOptions::new(PoolId(7)));
        assert!(matches!(small, Err(PoolError::TooSmall { .. })));
    }
}
