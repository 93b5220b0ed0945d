//! Reads the contents of a device before anything is written to it.
//!
//! The rule is that a device is formatted only if it is *proven blank*: no known signature at its
//! place, and not one byte other than zero in the first and last mebibyte and in samples spread
//! over the whole of it. A Quoin volume reads as zeroes until it is written, so a fresh one always
//! passes. Bytes of unknown kind count as a user's data.
//!
//! A format that was interrupted is recognised by [`FORMATTING_MARK`]: `format` writes it into the
//! first block before anything else and replaces it last.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub use quoin_store::contents::{Content, FORMATTING_MARK};
use quoin_store::contents::{content_of_ends, is_zero};

use crate::error::Error;

const SAMPLES: u64 = 1024;
const SAMPLE_BYTES: usize = 4096;
/// Threads that read the samples.
const READERS: usize = 8;

/// Reads the kind of content of `device` (a block device or a file) of `size_bytes`.
///
/// # Errors
/// If the device cannot be opened or read.
pub fn content(device: &Path, size_bytes: u64) -> Result<Content, Error> {
    let file = File::open(device).map_err(Error::io("opening", device))?;
    let read = |offset: u64, buffer: &mut [u8]| file.read_exact_at(buffer, offset);
    let ends = content_of_ends(size_bytes, read).map_err(Error::io("reading", device))?;
    if ends != Content::Blank {
        return Ok(ends);
    }
    // The kernel would read on behind each sample. Where it does not take the hint it does so.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    let step = (size_bytes / SAMPLES) & !(SAMPLE_BYTES as u64 - 1);
    let fits = |offset: &u64| *offset > 0 && *offset + SAMPLE_BYTES as u64 <= size_bytes;
    let is_blank = |first: u64| {
        let mut sample = [0; SAMPLE_BYTES];
        for offset in (first..SAMPLES).step_by(READERS).map(|index| index * step).filter(fits) {
            read(offset, &mut sample)?;
            if !is_zero(&sample) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    // Each read of a volume is a round trip to its target: many are under way at once.
    let outcomes: Vec<std::io::Result<bool>> = std::thread::scope(|scope| {
        let started: Vec<_> =
            (0..READERS as u64).map(|first| scope.spawn(move || is_blank(first))).collect();
        started.into_iter().map(|reader| reader.join().expect("no reader panics")).collect()
    });
    for outcome in outcomes {
        if !outcome.map_err(Error::io("reading", device))? {
            return Ok(Content::Unknown);
        }
    }
    Ok(Content::Blank)
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

    #[test]
    fn a_fresh_volume_is_blank() {
        for size_bytes in [4096, MIB, 3 * MIB + 4096, 64 * MIB] {
            let file = file_of(size_bytes, &[]);
            assert_eq!(content(file.path(), size_bytes).unwrap(), Content::Blank);
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
    fn an_interrupted_format_is_distinguished_from_data() {
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
