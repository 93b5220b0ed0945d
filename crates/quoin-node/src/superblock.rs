//! Reads the size of a file system from its superblock, to decide whether it must grow.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::device_calls::DeviceThread;
use crate::error::Error;

/// Returns the bytes that the file system on `device` spans; `u64::MAX` for an unknown file system,
/// which is never grown.
///
/// # Errors
/// If the device cannot be read.
pub fn file_system_bytes(_: &DeviceThread, device: &Path) -> Result<u64, Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let mut head = vec![0; 4096];
    file.read_exact_at(&mut head, 0).map_err(Error::io("reading", device))?;
    Ok(bytes_of(&head).unwrap_or(u64::MAX))
}

/// Returns whether an ext4 on `device` has its journal on another device, which its superblock names by
/// a number of this host: the kernel and e2fsck would open, and write, whatever has that number.
///
/// # Errors
/// If the device cannot be read.
pub fn names_another_device(_: &DeviceThread, device: &Path) -> Result<bool, Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let mut head = vec![0; 4096];
    file.read_exact_at(&mut head, 0).map_err(Error::io("reading", device))?;
    Ok(has_external_journal(&head))
}

fn has_external_journal(head: &[u8]) -> bool {
    const HAS_JOURNAL: u32 = 4;
    let at = |offset: usize| {
        let bytes = head.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_le_bytes)
    };
    let is_ext4 = head.get(0x438..0x43a) == Some(b"\x53\xef");
    let has_inode = at(0x4e0) != 0;
    is_ext4 && at(0x45c) & HAS_JOURNAL != 0 && (!has_inode || at(0x4e4) != 0)
}

fn bytes_of(head: &[u8]) -> Option<u64> {
    let at = |offset: usize| head.get(offset..offset + 4)?.try_into().ok();
    if head.get(..4)? == b"XFSB" {
        let block_size = u64::from(u32::from_be_bytes(at(4)?));
        let high = u64::from(u32::from_be_bytes(at(8)?));
        let low = u64::from(u32::from_be_bytes(at(12)?));
        return (high << 32 | low).checked_mul(block_size);
    }
    if head.get(0x438..0x43a)? == b"\x53\xef" {
        let low = u64::from(u32::from_le_bytes(at(0x404)?));
        let log_block_size = u32::from_le_bytes(at(0x418)?);
        // Feature 0x80: the block count has an upper half.
        let is_64_bit = u32::from_le_bytes(at(0x460)?) & 0x80 != 0;
        let high = if is_64_bit { u64::from(u32::from_le_bytes(at(0x550)?)) } else { 0 };
        let block_size = 1024_u64.checked_shl(log_block_size).filter(|size| *size <= 65536)?;
        return (high << 32 | low).checked_mul(block_size);
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_size_is_read_from_ext4_and_xfs_superblocks() {
        let mut ext4 = vec![0; 4096];
        ext4[0x438..0x43a].copy_from_slice(b"\x53\xef");
        ext4[0x404..0x408].copy_from_slice(&262_144_u32.to_le_bytes());
        ext4[0x418..0x41c].copy_from_slice(&2_u32.to_le_bytes());
        assert_eq!(bytes_of(&ext4), Some(1 << 30));
        let mut xfs = vec![0; 4096];
        xfs[..4].copy_from_slice(b"XFSB");
        xfs[4..8].copy_from_slice(&4096_u32.to_be_bytes());
        xfs[8..16].copy_from_slice(&262_144_u64.to_be_bytes());
        assert_eq!(bytes_of(&xfs), Some(1 << 30));
        assert_eq!(bytes_of(&vec![0; 4096]), None);
    }

    /// Sizes beyond 32 bits of blocks, and fields that say nothing sensible.
    #[test]
    fn the_upper_half_of_a_size_counts_where_the_superblock_says_that_there_is_one() {
        let ext4 = |low: u32, log: u32, incompatible: u32, high: u32| {
            let mut head = vec![0; 4096];
            head[0x438..0x43a].copy_from_slice(b"\x53\xef");
            for (at, value) in [(0x404, low), (0x418, log), (0x460, incompatible), (0x550, high)] {
                head[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            bytes_of(&head)
        };
        assert_eq!(ext4(7, 2, 0x80, 1), Some(((1 << 32) + 7) << 12));
        assert_eq!(ext4(7, 2, 0x80, 0), Some(7 << 12));
        assert_eq!(ext4(7, 2, 0x7f, 1), Some(7 << 12), "without the feature it means nothing");
        assert_eq!((ext4(9, 0, 0, 0), ext4(9, 6, 0, 0)), (Some(9 << 10), Some(9 << 16)));
        assert_eq!(
            (ext4(9, 7, 0, 0), ext4(9, 64, 0, 0), ext4(9, u32::MAX, 0, 0)),
            (None, None, None)
        );
        assert_eq!(ext4(1, 6, 0x80, u32::MAX), None, "more than a size can be");
        let xfs = |block: u32, high: u32, low: u32| {
            let mut head = vec![0; 4096];
            head[..4].copy_from_slice(b"XFSB");
            for (at, value) in [(4, block), (8, high), (12, low)] {
                head[at..at + 4].copy_from_slice(&value.to_be_bytes());
            }
            bytes_of(&head)
        };
        assert_eq!(xfs(4096, 1, 7), Some(((1 << 32) + 7) << 12));
        assert_eq!(xfs(512, 0, 7), Some(7 << 9));
        assert_eq!(xfs(u32::MAX, u32::MAX, 1), None);
    }

    #[test]
    fn an_ext4_whose_journal_is_elsewhere_is_recognised() {
        let ext4 = |compatible: u32, inode: u32, device: u32| {
            let mut head = vec![0; 4096];
            head[0x438..0x43a].copy_from_slice(b"\x53\xef");
            for (at, value) in [(0x45c, compatible), (0x4e0, inode), (0x4e4, device)] {
                head[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            has_external_journal(&head)
        };
        assert!(!ext4(4, 8, 0) && !ext4(0, 0, 0));
        assert!(ext4(4, 0, 0x700) && ext4(4, 8, 0x700) && ext4(4, 0, 0));
        assert!(!has_external_journal(&[0; 4096]) && !has_external_journal(b""));
    }

    proptest! {
        #[test]
        fn no_superblock_makes_the_reader_panic(
            mut head in proptest::collection::vec(any::<u8>(), 1400..1500), is_xfs: bool,
        ) {
            if is_xfs {
                head[..4].copy_from_slice(b"XFSB");
            } else {
                head[0x438..0x43a].copy_from_slice(b"\x53\xef");
            }
            let _ = bytes_of(&head);
        }
    }
}
