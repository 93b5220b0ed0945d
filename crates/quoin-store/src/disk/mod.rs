//! The store's whole world: one preallocated file or block device.
//!
//! Everything the store reads or writes goes through [`Disk`], which is synchronous and has no
//! clock, so a simulated disk makes the store deterministic. Offsets and lengths are multiples
//! of [`BLOCK_SIZE`](quoin_types::BLOCK_SIZE) unless said otherwise.

mod aligned_memory;
pub mod cache_identity;
pub mod contents;
pub mod fetch;
pub mod file;
mod fill;
mod pending_writes;
pub mod read_buffer;
pub mod read_ring;
mod write_behind;

use std::io::IoSlice;
use std::sync::Arc;

use bytes::Bytes;
use quoin_replication::replica::store::{BootCookie, IoFault};

use crate::disk::fetch::Fetch;
use crate::disk::read_ring::ReadRing;

/// Makes all writes that returned before the call durable. Runs on another thread than the disk.
pub type Syncer = Box<dyn FnMut() -> Result<(), IoFault> + Send>;

/// Makes reads as [`Disk::fetch`] on other threads than the disk's.
pub type Reader = Arc<dyn Fn(&Fetch) -> Result<Bytes, IoFault> + Send + Sync>;

/// Outcome of a look at the file below an open disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Medium {
    Whole,
    /// The file is shorter than the disk: what lay there is lost.
    Cut,
    /// The file is whole, and its name leads to it no more: it was moved, deleted or replaced.
    Nameless,
}

pub trait Disk: Send {
    /// Size in bytes, a multiple of the block size; fixed while the disk is open.
    fn size(&self) -> u64;

    /// Looks whether the file below was cut, or has lost its name, since the disk was opened.
    fn medium(&self) -> Medium {
        Medium::Whole
    }

    /// Fills `buffer` or fails.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault>;

    /// Reads as `read_at` what is at hand. `Ok(false)`: the medium would have to be waited for, and
    /// what `buffer` holds is of no meaning; a [`Disk::reader`] can read it.
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, IoFault> {
        self.read_at(offset, buffer).map(|()| true)
    }

    /// Whether [`Disk::read_now`] may ever lack something.
    fn may_lack(&self) -> bool {
        false
    }

    /// A handle that reads from other threads what [`Disk::read_now`] does not have at hand. `None`:
    /// all is at hand, always.
    fn reader(&self) -> Option<Reader> {
        None
    }

    /// Makes the reads of [`Disk::reader`] without other threads. The error says why the disk or the
    /// system has no such way.
    fn read_ring(&self) -> std::io::Result<ReadRing> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Makes a read that the pool's thread does not wait for.
    fn fetch(&self, fetch: &Fetch) -> Result<Bytes, IoFault> {
        match fetch.is_once {
            true => self.read_once(fetch.offset, fetch.length),
            false => whole(self, fetch.offset, fetch.length),
        }
    }

    /// Reads as `read_at`, but bytes that are not read again soon and need no room in a cache.
    fn read_once(&self, offset: u64, length: usize) -> Result<Bytes, IoFault> {
        whole(self, offset, length)
    }

    /// Reads as `read_at`, but from the media, whatever the kernel has cached. A failed sync leaves
    /// pages that read well and are on no medium; a start finds them with this read.
    fn read_media(&self, offset: u64, buffer: &mut [u8]) -> Result<(), IoFault> {
        self.read_at(offset, buffer)
    }

    /// Writes all of `parts`, one after the other. When it returns the kernel holds the bytes.
    fn write_at(&self, offset: u64, parts: &[IoSlice<'_>]) -> Result<(), IoFault>;

    /// Takes `parts` as a write that the next sync makes, and makes durable. Reads see it at once,
    /// but until that sync only this process holds it. So the write may not be acknowledged before
    /// that sync is done, and that sync reports its errors. A disk may as well make it at once.
    /// A range that waits like this is not written in another way before that sync.
    ///
    /// `spare`: so many bytes behind the write hold nothing yet, and the disk may fill them with
    /// zeros on its way, so that a file system need not find space for the next small write. What
    /// is written there in the meantime or later stays.
    fn write_with_sync(
        &self,
        offset: u64,
        parts: &[IoSlice<'_>],
        _spare: usize,
    ) -> Result<(), IoFault> {
        self.write_at(offset, parts)
    }

    /// Makes all writes that returned durable. Blocks; drivers use [`Disk::syncer`].
    fn sync(&self) -> Result<(), IoFault>;

    /// A handle that syncs from another thread.
    fn syncer(&self) -> Syncer;

    /// Has the range written out soon, by another thread. Nothing is promised, and nothing waits.
    fn write_out(&self, offset: u64, length: u64);

    /// Forgets what is cached of the range and is on media already, so that the next read shows
    /// the media. Nothing is promised.
    fn forget_cached(&self, _offset: u64, _length: u64) {}

    /// The range is not needed any more: gives its space back where the disk can. What it reads
    /// as afterwards is not defined; failures are of no consequence.
    fn discard(&self, offset: u64, length: u64);

    /// Whether [`Disk::discard`] gives space back.
    fn gives_back(&self) -> bool {
        true
    }

    /// The first place from `offset` on that takes space of what is below; `None`: there is none,
    /// or that is not known.
    fn next_space(&self, _offset: u64) -> Option<u64> {
        None
    }

    /// Takes the space for a range that is about to be written for the first time, where the disk
    /// shares what is below it with others: `false` where less than `spare_bytes` would be left
    /// for them, or it has no room at all. What was claimed can be written.
    fn claim(&self, _offset: u64, _length: u64, _spare_bytes: u64) -> bool {
        true
    }

    /// Whether a first write to a place costs more than later ones, because what is below notes it
    /// down.
    fn notes_space(&self) -> bool {
        false
    }

    /// Begins to fill a range with zeros, on another thread. Nothing else is written there before
    /// [`Disk::made_ready`] says that it is done, and one range is filled at a time. False: it
    /// was not begun.
    fn make_ready(&self, _offset: u64, _length: u64) -> bool {
        false
    }

    /// How the last [`Disk::make_ready`] went; `None`: it goes on.
    fn made_ready(&self) -> Option<bool> {
        Some(false)
    }

    /// Bytes free below the disk, for it and others; `None`: all of its space is its own.
    fn room_below(&self) -> Option<u64> {
        None
    }

    /// Stays equal exactly as long as everything written is still there without a sync.
    fn cookie(&self) -> BootCookie;
}

/// Reads as [`Disk::read_at`] into memory of its own.
fn whole<D: Disk + ?Sized>(disk: &D, offset: u64, length: usize) -> Result<Bytes, IoFault> {
    let mut bytes = vec![0; length];
    disk.read_at(offset, &mut bytes)?;
    Ok(bytes.into())
}
