//! Reads the contents of a device before anything is written to it.
//!
//! The rule is that a device is formatted only if it is *proven blank*: no known signature at its
//! place, not one byte other than zero in the first and last mebibyte, and none in what was written
//! of the rest. A Quoin volume reads as zeroes where it was not written, so a fresh one always
//! passes. Where more than 4 MiB were written, or the target does not say what was (it is not asked
//! about a volume above 1 TiB), samples spread over them or over the whole device stand for the
//! rest. Bytes of unknown kind count as a user's data.
//!
//! A format that was interrupted is recognised by [`FORMATTING_MARK`]: `format` writes it into the
//! first block before anything else and replaces it last.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub use quoin_store::contents::{Content, FORMATTING_MARK};
use quoin_store::contents::{content_of_ends, is_zero};

use crate::device_calls::DeviceThread;
use crate::error::Error;
use crate::format::FileSystem;

const SAMPLES: u64 = 1024;
const SAMPLE_BYTES: usize = 4096;
/// Threads that read the samples.
const READERS: usize = 8;

/// Reads the kind of content of `device` (a block device or a file) of `size_bytes`. `written` is
/// called if its ends are blank, for the ranges that may have content.
///
/// # Errors
/// If the device cannot be opened or read.
pub fn content(
    _: &DeviceThread,
    device: &Path,
    size_bytes: u64,
    written: impl FnOnce() -> Option<Vec<Range<u64>>>,
) -> Result<Content, Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let read = |offset: u64, buffer: &mut [u8]| file.read_exact_at(buffer, offset);
    let ends = content_of_ends(size_bytes, read).map_err(Error::io("reading", device))?;
    if ends != Content::Blank {
        return Ok(ends);
    }
    let whole = || std::iter::once(0..size_bytes).collect();
    let samples = samples(&written().unwrap_or_else(whole), size_bytes);
    if samples.is_empty() {
        return Ok(Content::Blank);
    }
    // The kernel would read on behind each sample. Where it does not take the hint it does so.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    let is_blank = |first: usize| {
        let mut sample = [0; SAMPLE_BYTES];
        for offset in samples.iter().skip(first).step_by(READERS) {
            read(*offset, &mut sample)?;
            if !is_zero(&sample) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    // Each read of a volume is a round trip to its target: many are under way at once.
    let outcomes: Vec<std::io::Result<bool>> = std::thread::scope(|scope| {
        let started: Vec<_> =
            (0..READERS).map(|first| scope.spawn(move || is_blank(first))).collect();
        started.into_iter().map(|reader| reader.join().expect("no reader panics")).collect()
    });
    for outcome in outcomes {
        if !outcome.map_err(Error::io("reading", device))? {
            return Ok(Content::Unknown);
        }
    }
    Ok(Content::Blank)
}

/// Describes content that is not the file system that was asked for, and says what a user may do about
/// it. Nothing of that destroys what is there.
pub fn other_content(_: &DeviceThread, content: &Content, device: &Path) -> (String, String) {
    let found = content.words().to_owned();
    let way_out = match content {
        Content::FileSystem(name @ ("ext4" | "xfs")) => format!("request {name}"),
        Content::FileSystem(_) => {
            "attach the volume by hand and mount it there, or request it as a \
             raw block volume"
                .to_owned()
        }
        Content::Unknown => match damaged(device) {
            Some(FileSystem::Ext4) => {
                return (
                    "an ext4 whose superblock is lost, and a copy of it is there".to_owned(),
                    "take a snapshot of the volume, attach it by hand (`quoin volume attach`) and \
                     repair it by `e2fsck -b 32768 -B 4096 DEVICE`"
                        .to_owned(),
                );
            }
            Some(FileSystem::Xfs) => {
                return (
                    "an xfs whose superblock is lost".to_owned(),
                    "take a snapshot of the volume, attach it by hand (`quoin volume attach`) and \
                     repair it by `xfs_repair DEVICE`, which looks for copies"
                        .to_owned(),
                );
            }
            None => "if that is a program's own data, request a raw block volume; else attach the \
                     volume by hand (`quoin volume attach`) and look at it"
                .to_owned(),
        },
        _ => "request it as a raw block volume (volumeMode: Block), or attach it by hand \
              (`quoin volume attach`) and use it with the tools for that"
            .to_owned(),
    };
    (found, way_out)
}

/// The file system whose superblock is gone, and of which other parts are where the tools for it
/// make them with blocks of 4096 bytes. What cannot be read is not there.
fn damaged(device: &Path) -> Option<FileSystem> {
    const EXT4_COPY: u64 = 32768 * 4096;
    let file = File::open(device).ok()?;
    let has = |offset: u64, wanted: &[&[u8]]| {
        let mut found = vec![0; wanted[0].len()];
        file.read_exact_at(&mut found, offset).is_ok() && wanted.contains(&found.as_slice())
    };
    // The magic, and the number of the block group that the copy is in.
    if has(EXT4_COPY + 0x38, &[b"\x53\xef"]) && has(EXT4_COPY + 0x5a, &[b"\x01\0"]) {
        return Some(FileSystem::Ext4);
    }
    // Behind the superblock: headers of the first allocation group with sectors of 4096 bytes, its
    // trees with smaller ones.
    let behind = has(4096, &[b"XAGF", b"AB3B", b"ABTB"]);
    (behind && has(8192, &[b"XAGI", b"AB3C", b"ABTC"])).then_some(FileSystem::Xfs)
}

/// Returns the offsets of samples that are spread over these ranges: all that they have, where that
/// are no more than [`SAMPLES`].
fn samples(ranges: &[Range<u64>], size_bytes: u64) -> Vec<u64> {
    let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    let sample_bytes = SAMPLE_BYTES as u64;
    let step = (bytes / SAMPLES).next_multiple_of(sample_bytes).max(sample_bytes);
    let fits = |offset: &u64| *offset + sample_bytes <= size_bytes;
    let of = |range: &Range<u64>| range.clone().step_by(step as usize);
    ranges.iter().flat_map(of).filter(fits).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use quoin_store::contents::content_of_head;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file_of(size_bytes: u64, writes: &[(u64, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size_bytes).unwrap();
        for (offset, bytes) in writes {
            file.as_file().write_all_at(bytes, *offset).unwrap();
        }
        file
    }

    fn content_of(file: &Path, size_bytes: u64, written: Option<Vec<Range<u64>>>) -> Content {
        DeviceThread::of_test(|thread| content(thread, file, size_bytes, || written).unwrap())
    }

    #[test]
    fn a_fresh_volume_is_blank() {
        for size_bytes in [4096, MIB, 3 * MIB + 4096, 64 * MIB] {
            let file = file_of(size_bytes, &[]);
            assert_eq!(content_of(file.path(), size_bytes, None), Content::Blank);
        }
    }

    #[test]
    fn bytes_at_the_end_or_in_the_middle_make_a_device_not_blank() {
        let size_bytes = 64 * MIB;
        let last = file_of(size_bytes, &[(size_bytes - 1, b"x")]);
        assert_eq!(content_of(last.path(), size_bytes, None), Content::Unknown);
        let middle = file_of(size_bytes, &[(32 * MIB, b"x")]);
        assert_eq!(content_of(middle.path(), size_bytes, None), Content::Unknown);
    }

    #[test]
    fn every_written_block_is_read_and_no_other() {
        let size_bytes = 64 * MIB;
        // No sample of the whole device is there.
        let at = 32 * MIB + 8192;
        let file = file_of(size_bytes, &[(at + 4095, b"x")]);
        let content = |written: &[Range<u64>]| {
            let written = written.to_vec();
            content_of(file.path(), size_bytes, Some(written))
        };
        assert_eq!(content(&[2 * MIB..2 * MIB + 4096, at - 4096..at + 4096]), Content::Unknown);
        assert_eq!(content(&[2 * MIB..3 * MIB, at - 4096..at]), Content::Blank);
        assert_eq!(content(&[]), Content::Blank);
        let last = file_of(size_bytes, &[(size_bytes - 1, b"x")]);
        let ends = content_of(last.path(), size_bytes, Some(Vec::new()));
        assert_eq!(ends, Content::Unknown, "the ends are read in any case");
    }

    #[test]
    fn an_interrupted_format_is_distinguished_from_data() {
        let file = file_of(8 * MIB, &[(0, FORMATTING_MARK), (MIB, b"half a file system")]);
        assert_eq!(content_of(file.path(), 8 * MIB, None), Content::Interrupted);
    }

    /// Of content that fits the samples none is passed over.
    #[test]
    fn every_block_of_what_was_written_is_a_sample_up_to_the_limit_and_the_end_of_the_device() {
        let block = SAMPLE_BYTES as u64;
        let most = SAMPLES * block;
        let size_bytes = 64 * MIB;
        let of = |ranges: &[(u64, u64)]| -> Vec<Range<u64>> {
            ranges.iter().map(|(begin, end)| *begin..*end).collect()
        };
        for (ranges, count) in [
            (&[][..], 0),
            (&[(0, block)], 1),
            (&[(size_bytes - block, size_bytes)], 1),
            (&[(0, most)], SAMPLES),
            (&[(0, most - block)], SAMPLES - 1),
            (&[(size_bytes - most, size_bytes)], SAMPLES),
            (&[(0, block), (2 * block, 3 * block), (size_bytes - block, size_bytes)], 3),
        ] {
            let ranges = of(ranges);
            let found = samples(&ranges, size_bytes);
            let expected: Vec<u64> =
                ranges.iter().flat_map(|range| range.clone().step_by(SAMPLE_BYTES)).collect();
            assert_eq!(found, expected, "{ranges:?}");
            assert_eq!(found.len() as u64, count);
        }
        // One block more: samples spread over it, and no more of them.
        let spread = samples(&of(&[(0, most + block)]), size_bytes);
        assert!(spread.len() as u64 <= SAMPLES && spread.len() as u64 > SAMPLES / 4);
        let whole = samples(&of(&[(0, size_bytes)]), size_bytes);
        assert_eq!(whole.len() as u64, SAMPLES);
        assert!(whole.iter().all(|at| at + block <= size_bytes));
        // A device that does not end with a sample.
        let odd = samples(&of(&[(0, 3 * block + 512)]), 3 * block + 512);
        assert_eq!(odd, [0, block, 2 * block]);
    }

    #[test]
    fn a_byte_in_any_block_that_was_written_makes_a_device_not_blank() {
        let size_bytes = 16 * MIB;
        let begin = 2 * MIB;
        // Among as many blocks as there are readers, and at the ends of their shares.
        for blocks in [1, READERS as u64, READERS as u64 + 1, SAMPLES] {
            for at in [0, blocks / 2, blocks - 1] {
                let file = file_of(size_bytes, &[(begin + at * 4096 + 4095, b"x")]);
                let written = Some(std::iter::once(begin..begin + blocks * 4096).collect());
                let found = content_of(file.path(), size_bytes, written);
                assert_eq!(found, Content::Unknown, "{at} of {blocks}");
            }
        }
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
