//! System calls on files that this process serves itself, made in a child process.
//!
//! A process that makes such a call waits for itself. If it is killed before it answers, the kernel
//! keeps its thread waiting, so neither its descriptors nor its lock are released: no other process
//! can take over, and only an abort of the connection ends the wait. If it is killed a moment
//! earlier, the loop driver takes the interrupted call for a size of 0. A child has neither
//! problem: it waits for the process that serves next.

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Runs `act` in a child and waits for it; an error of the child is returned as an errno.
///
/// # Safety
/// Other threads may hold any lock at the moment of the fork: `act` must only make system calls,
/// and neither allocate nor panic. No descriptor but the standard ones is open in the child.
pub(crate) unsafe fn in_child(act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let mut every = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are filled by these calls before they are read.
    unsafe {
        libc::sigfillset(every.as_mut_ptr());
        // The child keeps them blocked: this process's handlers are not for it.
        libc::pthread_sigmask(libc::SIG_BLOCK, every.as_ptr(), before.as_mut_ptr());
    }
    // SAFETY: the child makes system calls only, by this function's own condition.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: nothing in the child uses a descriptor of this process, and it ends here. If they
        // stayed open, they would hold the dead daemon's lock.
        unsafe {
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
            let errno = match act() {
                Ok(()) => 0,
                Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
            };
            libc::_exit(errno);
        }
    }
    let forked = if child < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: `before` was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    forked?;
    let mut status = 0;
    // SAFETY: the child belongs to this process, and no other code waits for it.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    match libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)) {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("the child process of this system call was killed")),
    }
}

/// Makes the kernel query a file's size; `ERANGE` if the size differs.
pub(crate) fn check_file_size(path: &Path, size_bytes: u64) -> io::Result<()> {
    let path = c_string(path)?;
    let act = || {
        let mut found = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the string and the buffer are valid for the call.
        check(unsafe { libc::stat(path.as_ptr(), found.as_mut_ptr()) })?;
        // SAFETY: the call succeeded, so it has filled the buffer.
        let found = unsafe { found.assume_init() };
        if found.st_size as u64 == size_bytes {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ERANGE))
        }
    };
    // SAFETY: one system call and a comparison.
    unsafe { in_child(act) }
}

/// Opens a path in the child, where it is never closed.
pub(crate) fn open(path: &CStr, flags: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: the string is valid for the call.
    check(unsafe { libc::open(path.as_ptr(), flags) })
}

pub(crate) fn c_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_a_file_is_checked_and_an_error_is_returned() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert_eq!(check_file_size(&path, 5).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        std::fs::write(&path, "hello").unwrap();
        check_file_size(&path, 5).unwrap();
        assert_eq!(check_file_size(&path, 4096).unwrap_err().raw_os_error(), Some(libc::ERANGE));
    }

    #[test]
    fn the_child_has_no_descriptor_of_its_parent_open() {
        use std::os::fd::AsRawFd;
        let kept = std::fs::File::open("/proc/self/exe").unwrap();
        let descriptor = kept.as_raw_fd();
        // SAFETY: one system call.
        let outcome =
            unsafe { in_child(|| check(libc::fcntl(descriptor, libc::F_GETFD)).map(drop)) };
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
