//! Looks at a device before anything is written to it: what is on it, if anything at all.
//!
//! The rule is that a device is formatted only if it is *proven blank*: no known signature at
//! its place, and not one byte other than zero in the first and last mebibyte and in samples
//! spread over the whole of it. A Quoin volume reads as zeroes until it is written, so a fresh
//! one always passes. Whatever holds bytes of unknown kind is somebody's data.
//!
//! A format that was interrupted is told apart by [`FORMATTING_MARK`]: `format` puts it into
//! the first block before it writes anything else and replaces it last.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::error::Error;

/// First bytes of a device whose formatting has begun and has not ended.
pub const FORMATTING_MARK: &[u8; 32] = b"quoin: formatting in progress \x01\n";

const MIB: u64 = 1 << 20;
const SAMPLES: u64 = 1024;
const SAMPLE_BYTES: usize = 4096;

/// What a device holds.
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

/// Reads what is on `device` (a block device or a file) of `size_bytes`.
///
/// # Errors
/// If the device cannot be opened or read.
pub fn content(device: &Path, size_bytes: u64) -> Result<Content, Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let head_bytes = usize::try_from(size_bytes.min(MIB)).expect("a mebibyte fits");
    let head = read(&file, device, 0, head_bytes)?;
    let from_head = content_of_head(&head);
    if from_head != Content::Blank {
        return Ok(from_head);
    }
    let tail = size_bytes.saturating_sub(MIB);
    if tail > 0 && !is_zero(&read(&file, device, tail, head_bytes)?) {
        return Ok(Content::Unknown);
    }
    let step = (size_bytes / SAMPLES) & !(SAMPLE_BYTES as u64 - 1);
    if step > 0 {
        for index in 1..SAMPLES {
            let offset = index * step;
            if offset + SAMPLE_BYTES as u64 <= size_bytes
                && !is_zero(&read(&file, device, offset, SAMPLE_BYTES)?)
            {
                return Ok(Content::Unknown);
            }
        }
    }
    Ok(Content::Blank)
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

fn read(file: &File, device: &Path, offset: u64, bytes: usize) -> Result<Vec<u8>, Error> {
    let mut buffer = vec![0; bytes];
    file.read_exact_at(&mut buffer, offset).map_err(Error::io("reading", device))?;
    Ok(buffer)
}

fn is_zero(bytes: &[u8]) -> bool {
    // In chunks, so that the compiler compares words and an early difference ends it.
    bytes.chunks(4096).all(|chunk| chunk.iter().fold(0, |sum, byte| sum | byte) == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file_of(size_bytes: u64, writes: &[(u64, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size_bytes).unwrap();
        for (offset, bytes) in writes {
            file.as_file().write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    #[test]
    fn a_fresh_volume_is_blank() {
        for size_bytes in [4096, MIB, 3 * MIB + 4096, 64 * MIB] {
            let file = file_of(size_bytes, &[]);
            assert_eq!(content(file.path(), size_bytes).unwrap(), Content::Blank);
        }
    }

    #[test]
    fn every_known_signature_is_named_and_none_is_blank() {
        for (name, _, offset, bytes) in SIGNATURES {
            let mut head = vec![0; 1 << 20];
            head[*offset..offset + bytes.len()].copy_from_slice(bytes);
            let found = content_of_head(&head);
            assert_eq!(found.words(), *name);
        }
    }

    #[test]
    fn bytes_at_the_end_or_in_the_middle_make_a_device_not_blank() {
        let size_bytes = 64 * MIB;
        let last = file_of(size_bytes, &[(size_bytes - 1, b"x")]);
        assert_eq!(content(last.path(), size_bytes).unwrap(), Content::Unknown);
        let middle = file_of(size_bytes, &[(32 * MIB, b"x")]);
        assert_eq!(content(middle.path(), size_bytes).unwrap(), Content::Unknown);
    }

    #[test]
    fn an_interrupted_format_is_told_from_data() {
        let file = file_of(8 * MIB, &[(0, FORMATTING_MARK), (MIB, b"half a file system")]);
        assert_eq!(content(file.path(), 8 * MIB).unwrap(), Content::Interrupted);
    }

    proptest! {
        #[test]
        fn no_head_makes_the_probe_panic_and_only_zeroes_are_blank(
            head in proptest::collection::vec(any::<u8>(), 0..5000),
        ) {
            let blank = content_of_head(&head) == Content::Blank;
            prop_assert_eq!(blank, head.iter().all(|byte| *byte == 0));
        }
    }
}
