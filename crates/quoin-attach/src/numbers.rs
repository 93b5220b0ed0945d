//! The memory in which a device's requests have their numbers: it outlives the daemon with the
//! kernel's side of the device, at the holder.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use quoin_nbd::client::{Memory, Register};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, memfd_create};

const LENGTH: usize = Register::WORDS * size_of::<AtomicU64>();

/// Makes the memory of a new device. All of it is allocated at once, as writing to it must not fail.
pub(crate) fn create() -> io::Result<OwnedFd> {
    let memory = memfd_create("quoin-numbers", MemfdFlags::CLOEXEC)?;
    fallocate(&memory, FallocateFlags::empty(), 0, LENGTH as u64)?;
    Ok(memory)
}

/// Maps it into this process.
pub(crate) fn register(memory: &OwnedFd) -> io::Result<Register> {
    if fstat(memory)?.st_size < LENGTH as i64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too little memory for numbers"));
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at a place that the kernel chooses, within the length of the file.
    let start = unsafe {
        let (nowhere, fd) = (std::ptr::null_mut(), memory.as_raw_fd());
        libc::mmap(nowhere, LENGTH, access, libc::MAP_SHARED, fd, 0)
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    Ok(Register::new(Box::new(Mapping { start })))
}

struct Mapping {
    start: NonNull<AtomicU64>,
}

// SAFETY: it owns its mapping, and its words are atomic.
unsafe impl Send for Mapping {}

impl Memory for Mapping {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped over this length, aligned to pages, for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), Register::WORDS) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and no slice of it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use quoin_nbd::client::RequestKey;
    use quoin_types::ClientId;

    use super::*;

    #[test]
    fn numbers_outlive_the_process_that_gave_them_with_the_descriptor() {
        let memory = create().unwrap();
        let mut first = register(&memory).unwrap();
        first.begin(ClientId(7));
        first.has_begun();
        let key = RequestKey { key: 5, offset: 4096 };
        assert_eq!(first.number(Some(key), None), Some(0));
        std::mem::forget(first);
        let mut second = register(&memory.try_clone().unwrap()).unwrap();
        assert_eq!((second.client(), second.resume(key)), (Some(ClientId(7)), Some(0)));
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let memory = memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
        assert!(register(&memory).is_err());
    }
}
