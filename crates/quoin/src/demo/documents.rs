//! Files that are written once and verified after every step.

use anyhow::{Context, Result, bail};
use std::sync::Arc;

use super::surface::{PAGE_BYTES, Pages, Surface, fill};

const COUNT_OF_PAGES: usize = 16;

/// Bytes of one document.
pub const DOCUMENT_BYTES: u64 = 4 << 20;

/// A file, or a region of the volume, with content that only it has.
pub struct Document {
    pub name: String,
    pub surface: Arc<dyn Surface>,
    pub seed: u64,
}

impl Document {
    fn steps() -> impl Iterator<Item = u64> {
        (0..DOCUMENT_BYTES).step_by(COUNT_OF_PAGES * PAGE_BYTES)
    }

    /// # Errors
    /// Refusal of the volume.
    pub fn write(&self) -> Result<()> {
        let mut pages = Pages::new(COUNT_OF_PAGES);
        for offset in Self::steps() {
            fill(pages.bytes_mut(), self.seed, offset, 0);
            self.surface.write(offset, &pages).with_context(|| self.name.clone())?;
        }
        self.surface.flush().with_context(|| self.name.clone())
    }

    /// Reads it from the volume, past this host's cache, and compares every byte. Gives the
    /// CRC32C of what was read.
    ///
    /// # Errors
    /// The first place that differs.
    pub fn verify(&self) -> Result<u32> {
        let (mut pages, mut expected) = (Pages::new(COUNT_OF_PAGES), Pages::new(COUNT_OF_PAGES));
        let mut checksum = 0;
        for offset in Self::steps() {
            self.surface.read(offset, &mut pages).with_context(|| self.name.clone())?;
            fill(expected.bytes_mut(), self.seed, offset, 0);
            if pages.bytes() != expected.bytes() {
                bail!("{} is damaged at byte {offset} or within the 64 KiB behind it", self.name);
            }
            // A checksum over the pieces' checksums: short enough to show to a person.
            checksum = quoin_types::crc32c(pages.bytes()) ^ u32::rotate_left(checksum, 1);
        }
        Ok(checksum)
    }
}
