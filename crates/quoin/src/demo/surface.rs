//! Where the demo's bytes go: files of a mounted volume, or the volume itself over NBD.
//!
//! Files are opened past the page cache, so that each read comes from the volume and not from
//! this host's memory.

use anyhow::{Context, Result, bail};
use quoin_nbd::client::Client;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// Alignment of addresses, offsets and lengths that direct IO requires.
pub const PAGE_BYTES: usize = 4096;

/// Storage of fixed size, written and read by whole pages.
pub trait Surface: Send + Sync {
    fn write(&self, offset: u64, pages: &Pages) -> Result<()>;
    fn read(&self, offset: u64, pages: &mut Pages) -> Result<()>;
    fn flush(&self) -> Result<()>;
}

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

/// A buffer whose memory lies as direct IO wants it.
#[derive(Clone)]
pub struct Pages(Vec<Page>);

impl Pages {
    pub fn new(count: usize) -> Self {
        Self(vec![Page([0; PAGE_BYTES]); count])
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.as_flattened_bytes()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let length = self.0.len() * PAGE_BYTES;
        // SAFETY: pages are plain bytes without padding, one behind the other.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), length) }
    }
}

trait Flattened {
    fn as_flattened_bytes(&self) -> &[u8];
}

impl Flattened for Vec<Page> {
    fn as_flattened_bytes(&self) -> &[u8] {
        // SAFETY: pages are plain bytes without padding, one behind the other.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len() * PAGE_BYTES) }
    }
}

/// A file of a mounted volume.
pub struct DirectFile(File);

impl DirectFile {
    pub fn create(path: &Path) -> Result<Self> {
        Self::open_with(path, true)
    }

    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, false)
    }

    fn open_with(path: &Path, create: bool) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .with_context(|| format!("open {}", path.display()))?;
        Ok(Self(file))
    }
}

impl Surface for DirectFile {
    fn write(&self, offset: u64, pages: &Pages) -> Result<()> {
        self.0.write_all_at(pages.bytes(), offset).context("write")
    }
    fn read(&self, offset: u64, pages: &mut Pages) -> Result<()> {
        self.0.read_exact_at(pages.bytes_mut(), offset).context("read")
    }
    fn flush(&self) -> Result<()> {
        self.0.sync_data().context("fdatasync")
    }
}

/// A part of a volume, over NBD.
pub struct Region {
    pub client: Arc<Client>,
    pub start: u64,
}

impl Surface for Region {
    fn write(&self, offset: u64, pages: &Pages) -> Result<()> {
        let data = bytes::Bytes::copy_from_slice(pages.bytes());
        self.client.write(self.start + offset, data, false).context("write")
    }
    fn read(&self, offset: u64, pages: &mut Pages) -> Result<()> {
        let wanted = pages.bytes_mut();
        let data = self.client.read(self.start + offset, wanted.len() as u32).context("read")?;
        if data.len() != wanted.len() {
            bail!("read {} bytes instead of {}", data.len(), wanted.len());
        }
        wanted.copy_from_slice(&data);
        Ok(())
    }
    fn flush(&self) -> Result<()> {
        self.client.flush().context("flush")
    }
}

/// Content that says where and when it was written, so that a wrong, old or misplaced page
/// cannot pass for the right one.
pub fn fill(bytes: &mut [u8], seed: u64, place: u64, version: u64) {
    let mut state = seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.rotate_left(32);
    for word in bytes.as_chunks_mut::<8>().0 {
        // splitmix64: cheap, and no two pages share a run of words.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = (mixed ^ (mixed >> 31)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_places_or_versions_have_the_same_content() {
        let page = |seed, place, version| {
            let mut bytes = vec![0; PAGE_BYTES];
            fill(&mut bytes, seed, place, version);
            bytes
        };
        let all = [page(1, 0, 1), page(1, 1, 1), page(1, 0, 2), page(2, 0, 1)];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| other != one));
        }
        assert_eq!(page(1, 0, 1), page(1, 0, 1));
    }

    #[test]
    fn pages_are_aligned_for_direct_io() {
        let mut pages = Pages::new(3);
        assert_eq!(pages.bytes().as_ptr() as usize % PAGE_BYTES, 0);
        pages.bytes_mut()[2 * PAGE_BYTES] = 7;
        assert_eq!(pages.bytes()[2 * PAGE_BYTES], 7);
        assert_eq!(pages.bytes().len(), 3 * PAGE_BYTES);
    }
}
