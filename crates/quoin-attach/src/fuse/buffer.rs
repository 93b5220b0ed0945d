//! Memory for the messages of the kernel.
//!
//! A message is sent only once. If the process is killed while the kernel must first allocate
//! memory for one, the kernel fails the request instead of sending it to the next process. So all
//! of the memory is allocated from the beginning. It is no huge page that is assembled later, and
//! it is not shared with a child, after which the first write of each page would copy it.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

pub(super) struct Buffer {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it owns its memory, as a `Vec<u8>` does.
unsafe impl Send for Buffer {}

impl Buffer {
    pub(super) fn new(length: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was just made with this length and has no other owner.
        unsafe {
            // Advice only: without it the failure is merely less likely.
            libc::madvise(start, length, libc::MADV_DONTFORK);
            libc::madvise(start, length, libc::MADV_NOHUGEPAGE);
            // Writing makes the kernel allocate the pages.
            std::ptr::write_bytes(start.cast::<u8>(), 0xff, length);
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped and written over this length for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and no slice of it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_of_the_buffer_are_resident_before_its_use() {
        const PAGE: usize = 4096;
        let buffer = Buffer::new(64 * PAGE + 80).unwrap();
        let mut pages = [0u8; 65];
        // SAFETY: the range is the buffer's mapping, with one byte of the answer for each page.
        let result = unsafe {
            libc::mincore(buffer.as_ptr().cast_mut().cast(), buffer.len(), pages.as_mut_ptr())
        };
        assert_eq!(result, 0);
        assert!(pages.iter().all(|page| page & 1 == 1), "{pages:?}");
    }
}
