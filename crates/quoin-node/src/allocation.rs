//! Ranges of a volume that have content, as its target knows them.

use std::ops::Range;
use std::path::Path;

use quoin_nbd::client::{Address, Client, ClientOptions};
use quoin_types::block::{Operation, Payload};

/// Bytes of one request; the protocol's lengths have 32 bits.
const REQUEST_BYTES: u64 = 1 << 31;
/// Limit of the volumes that are asked about: for the answer a pool goes through its whole map.
const VOLUME_BYTES_MAX: u64 = 1 << 40;
/// Limit of the ranges that are kept.
const RANGES_MAX: usize = 1 << 16;

/// Asks the target that listens on `socket` which ranges of its volume were written and not trimmed;
/// all others read as zeroes. `None`: it does not say, or the volume is too large or has too many.
pub fn written(socket: &Path, size_bytes: u64) -> Option<Vec<Range<u64>>> {
    ask(socket, size_bytes, RANGES_MAX)
}

/// Returns whether the target says that no block has content. One with content is found by the first
/// request whose range has any, which is the first of all where there is a file system.
pub fn is_unwritten(socket: &Path, size_bytes: u64) -> bool {
    ask(socket, size_bytes, 0).is_some()
}

/// Returns the ranges with content, if they are no more than `ranges_max`.
fn ask(socket: &Path, size_bytes: u64, ranges_max: usize) -> Option<Vec<Range<u64>>> {
    if size_bytes > VOLUME_BYTES_MAX {
        return None;
    }
    let address = Address::Unix(socket.to_owned());
    let options = ClientOptions { reconnect: false, ..ClientOptions::new(address) };
    let client = Client::connect(options).ok()?;
    let mut written = Vec::new();
    for offset in (0..size_bytes).step_by(REQUEST_BYTES as usize) {
        let end = size_bytes.min(offset + REQUEST_BYTES);
        let asked = Operation::Status { offset, length: end - offset };
        let Ok(Payload::Status(extents)) = client.call(asked) else { return None };
        let mut at = offset;
        for extent in extents {
            let extent_end = at.checked_add(extent.length).filter(|told| *told <= end)?;
            if !extent.hole {
                written.push(at..extent_end);
            }
            at = extent_end;
        }
        if at != end || written.len() > ranges_max {
            return None;
        }
    }
    client.stop();
    Some(written)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use quoin_testkit::nbd_server::{Server, ServerOptions, Volume, volume};

    use super::*;

    const BLOCK: u64 = 4096;
    const SIZE: u64 = 64 * BLOCK;

    fn write(volume: &Volume, lba: u64, blocks: u64) {
        let data = vec![1; (blocks * BLOCK) as usize].into();
        let write = Operation::Write { offset: lba * BLOCK, data, fua: false };
        volume.lock().unwrap().apply(&write).unwrap();
    }

    #[test]
    fn every_block_with_content_is_told_up_to_the_last_one() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("v.sock");
        let blocks = SIZE / BLOCK;
        for ranges in [
            vec![],
            vec![(0, 1)],
            vec![(blocks - 1, 1)],
            vec![(0, blocks)],
            vec![(0, 1), (2, 3), (31, 2), (blocks - 1, 1)],
        ] {
            let volume = volume(SIZE as usize);
            ranges.iter().for_each(|(lba, blocks)| write(&volume, *lba, *blocks));
            let _server = Server::start(&socket, volume, ServerOptions::default());
            let expected: Vec<_> =
                ranges.iter().map(|(lba, blocks)| lba * BLOCK..(lba + blocks) * BLOCK).collect();
            assert_eq!(written(&socket, SIZE), Some(expected), "{ranges:?}");
            assert_eq!(is_unwritten(&socket, SIZE), ranges.is_empty(), "{ranges:?}");
            for (max, is_told) in [(ranges.len(), true), (ranges.len().wrapping_sub(1), false)] {
                let is_told = is_told || ranges.is_empty();
                assert_eq!(ask(&socket, SIZE, max).is_some(), is_told, "at most {max}");
            }
        }
        // A server that does not answer, or has another size, says nothing.
        assert_eq!(written(&socket, SIZE), None);
        let small = volume((SIZE / 2) as usize);
        let _server = Server::start(&socket, small, ServerOptions::default());
        assert_eq!((written(&socket, SIZE), is_unwritten(&socket, SIZE)), (None, false));
        assert_eq!(written(&socket, SIZE / 2), Some(Vec::new()));
    }

    /// A pool goes through its whole map for an answer.
    #[test]
    fn a_volume_is_asked_about_up_to_the_largest_size_and_not_beyond_it() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("v.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        std::thread::spawn(move || {
            while let Ok((_ended, _)) = listener.accept() {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        for (size_bytes, is_asked) in
            [(VOLUME_BYTES_MAX, true), (VOLUME_BYTES_MAX + BLOCK, false), (u64::MAX, false)]
        {
            let before = asked.load(Ordering::SeqCst);
            assert_eq!(written(&socket, size_bytes), None);
            assert_eq!(asked.load(Ordering::SeqCst) > before, is_asked, "{size_bytes}");
        }
    }
}
