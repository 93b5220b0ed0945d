//! Contents of a disk before the first write to it, recognized by the signatures of other formats.
//!
//! A disk with bytes of unknown kind is taken to hold a user's data.

use std::io;

use quoin_replication::replica::store::IoFault;

use crate::disk::Disk;

/// First bytes of a device whose formatting has begun and has not ended.
pub const FORMATTING_MARK: &[u8; 32] = b"quoin: formatting in progress \x01\n";

const MIB: u64 = 1 << 20;

/// Contents of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Nothing but zeroes, as far as is looked.
    Blank,
    /// A format began here and did not end; nothing of value can be on it.
    Interrupted,
    /// A file system by its kernel name.
    FileSystem(&'static str),
    /// Something else that is known by its signature.
    Other(&'static str),
    /// Bytes of no known kind.
    Unknown,
}

impl Content {
    /// In words, for messages.
    #[must_use]
    pub fn words(&self) -> &'static str {
        match self {
            Self::Blank => "nothing",
            Self::Interrupted => "an interrupted format",
            Self::FileSystem(name) | Self::Other(name) => name,
            Self::Unknown => "data of unknown kind",
        }
    }
}

/// A signature: name, whether it is a file system, byte offset, bytes.
type Signature = (&'static str, bool, usize, &'static [u8]);

/// Signatures within the first mebibyte. Those of containers come first, as a LUKS or LVM
/// header may be followed by remains of an older file system.
const SIGNATURES: &[Signature] = &[
    ("LUKS", false, 0, b"LUKS\xba\xbe"),
    ("an LVM physical volume", false, 24, b"LVM2 001"),
    ("an LVM physical volume", false, 512 + 24, b"LVM2 001"),
    ("a GPT partition table", false, 512, b"EFI PART"),
    ("a GPT partition table", false, 4096, b"EFI PART"),
    ("bcache", false, 4096 + 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    ("a Linux RAID member", false, 4096, b"\xfc\x4e\x2b\xa9"),
    ("xfs", true, 0, b"XFSB"),
    ("ext4", true, 0x438, b"\x53\xef"),
    ("btrfs", true, 0x1_0040, b"_BHRfS_M"),
    ("f2fs", true, 0x400, b"\x10\x20\xf5\xf2"),
    ("reiserfs", true, 0x1_0034, b"ReIsEr"),
    ("reiserfs", true, 0x2034, b"ReIsEr"),
    ("gfs2", true, 0x1_0000, b"\x01\x16\x19\x70\0\0\0\x01"),
    ("ufs", true, 0x1_055c, b"\x19\x01\x54\x19"),
    ("ufs", true, 0x1_055c, b"\x19\x54\x01\x19"),
    ("ufs", true, 0x255c, b"\x54\x19\x01\0"),
    ("ufs", true, 0x255c, b"\0\x01\x19\x54"),
    ("nilfs2", true, 0x406, b"\x34\x34"),
    ("bcachefs", true, 4096 + 24, b"\xc6\x85\x73\xf6\x6c\xe9\x90\xa9"),
    ("a Quoin pool", false, 0, b"QUOINPL1"),
    ("a Quoin pool", false, 4096, b"QUOINPL1"),
    ("jfs", true, 0x8000, b"JFS1"),
    ("ntfs", true, 3, b"NTFS    "),
    ("exfat", true, 3, b"EXFAT   "),
    ("vfat", true, 0x52, b"FAT32   "),
    ("vfat", true, 0x36, b"FAT16   "),
    ("squashfs", true, 0, b"hsqs"),
    ("erofs", true, 0x400, b"\xe2\xe1\xf5\xe0"),
    ("iso9660", true, 0x8001, b"CD001"),
    ("swap", false, 4096 - 10, b"SWAPSPACE2"),
    ("a ZFS member", false, 0x2_0000, b"\x0c\xb1\xba\x00"),
    ("a ZFS member", false, 0x2_0000, b"\x00\x00\x00\x00\x00\xba\xb1\x0c"),
    ("a partition table", false, 510, b"\x55\xaa"),
];

/// A signature near the end: name, how its place follows from the size of the device, bytes.
type EndSignature = (&'static str, fn(u64) -> Option<u64>, &'static [u8]);

const END_SIGNATURES: &[EndSignature] = &[
    ("a GPT partition table", |size| size.checked_sub(512), b"EFI PART"),
    ("a GPT partition table", |size| size.checked_sub(4096), b"EFI PART"),
    // Metadata 1.0: 8 KiB before the end, rounded down to 4 KiB.
    ("a Linux RAID member", |size| Some(size.checked_sub(8192)? & !4095), b"\xfc\x4e\x2b\xa9"),
    // Metadata 0.90: the last whole 64 KiB, and that in the other byte order.
    ("a Linux RAID member", |size| (size & !0xffff).checked_sub(0x1_0000), b"\xfc\x4e\x2b\xa9"),
    ("a Linux RAID member", |size| (size & !0xffff).checked_sub(0x1_0000), b"\xa9\x2b\x4e\xfc"),
    ("an Intel RAID member", |size| size.checked_sub(1024), b"Intel Raid ISM Cfg. Sig. "),
    ("a DDF RAID member", |size| size.checked_sub(512), b"\xde\x11\xde\x11"),
    ("a Quoin pool", |size| (size & !4095).checked_sub(4096), b"QUOINPL1"),
    ("a Quoin pool", |size| (size & !4095).checked_sub(8192), b"QUOINPL1"),
];

/// Contents of the first and the last mebibyte of a disk of `size_bytes`, as `read` reads them.
///
/// # Errors
/// Errors of `read`.
pub fn content_of_ends(
    size_bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<Content> {
    let length = size_bytes.min(MIB);
    let mut part = vec![0; length as usize];
    read(0, &mut part)?;
    let head = content_of_head(&part);
    if !matches!(head, Content::Blank | Content::Unknown) {
        return Ok(head);
    }
    let start = size_bytes - length;
    read(start, &mut part)?;
    for (name, place, bytes) in END_SIGNATURES {
        let at = place(size_bytes).and_then(|at| at.checked_sub(start));
        if at.is_some_and(|at| part[at as usize..].starts_with(bytes)) {
            return Ok(Content::Other(name));
        }
    }
    Ok(if head == Content::Blank && is_zero(&part) { Content::Blank } else { Content::Unknown })
}

/// Contents of the first and the last mebibyte of a disk.
///
/// # Errors
/// Where it cannot be read.
pub fn content_of<D: Disk>(disk: &D) -> Result<Content, IoFault> {
    let mut refused = None;
    let read = |offset: u64, buffer: &mut [u8]| {
        disk.read_at(offset, buffer).map_err(|fault| {
            refused = Some(fault);
            io::Error::from_raw_os_error(fault.errno)
        })
    };
    let found = content_of_ends(disk.size(), read);
    let fault = IoFault { operation: "read", offset: 0, errno: 0 };
    found.map_err(|_| refused.unwrap_or(fault))
}

/// Judges the first mebibyte (or less, of a smaller device).
#[must_use]
pub fn content_of_head(head: &[u8]) -> Content {
    if head.starts_with(FORMATTING_MARK) {
        return Content::Interrupted;
    }
    for (name, is_file_system, offset, bytes) in SIGNATURES {
        if head.get(*offset..offset + bytes.len()) == Some(bytes) {
            // The kernel mounts ext2 and ext3 with the ext4 driver, so one name serves all.
            return if *is_file_system { Content::FileSystem(name) } else { Content::Other(name) };
        }
    }
    if is_zero(head) { Content::Blank } else { Content::Unknown }
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // In chunks, so that the compiler compares words and an early difference ends it.
    bytes.chunks(4096).all(|chunk| chunk.iter().fold(0, |sum, byte| sum | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(size_bytes: u64, written: &[(u64, &[u8])]) -> Content {
        let mut disk = vec![0; size_bytes as usize];
        for (at, bytes) in written {
            disk[*at as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        let read = |at: u64, out: &mut [u8]| {
            out.copy_from_slice(&disk[at as usize..][..out.len()]);
            Ok(())
        };
        content_of_ends(size_bytes, read).expect("memory can be read")
    }

    #[test]
    fn every_known_signature_is_named_and_none_is_blank() {
        for (name, _, offset, bytes) in SIGNATURES {
            assert_eq!(found(3 << 20, &[(*offset as u64, bytes)]).words(), *name);
        }
        for size in [3 << 20, (3 << 20) + 512, (5 << 20) + 4096 + 512] {
            for (name, place, bytes) in END_SIGNATURES {
                let at = place(size).expect("it is large enough");
                assert_eq!(found(size, &[(at, bytes)]).words(), *name, "of {size}");
            }
        }
    }

    #[test]
    fn bytes_of_no_known_kind_at_either_end_are_data_and_small_disks_are_read_within_bounds() {
        let size = 4 << 20;
        assert_eq!(found(size, &[]), Content::Blank);
        for at in [0, (1 << 20) - 1, size - (1 << 20), size - 1] {
            assert_eq!(found(size, &[(at, b"x")]), Content::Unknown, "at {at}");
        }
        for size in [0, 1, 511, 512, 4095, 4096, 8192, 65536, 65537] {
            assert_eq!(found(size, &[]), Content::Blank, "of {size}");
        }
    }
}
