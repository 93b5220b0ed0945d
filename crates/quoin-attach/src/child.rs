//! System calls on files that this process serves itself, made in a child process.
//!
//! A process that makes such a call waits for itself. If it is killed before it answers, the kernel
//! keeps its thread waiting, so neither its descriptors nor its lock are released: no other process
//! can take over, and only an abort of the connection ends the wait. If it is killed a moment
//! earlier, the loop driver takes the interrupted call for a size of 0. A child has neither
//! problem: it waits for the process that serves next.
//!
//! An open or a close of a device may wait as long as the IO of its volume does: another program that
//! closes it keeps the kernel's lock until all it wrote is answered. So a child that takes long is
//! given up. One file has one such child at most, and a later call waits for that one first.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Longest wait for a child.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Children that were given up, by the file that they work on.
static GIVEN_UP: Mutex<BTreeMap<PathBuf, Child>> = Mutex::new(BTreeMap::new());

/// Runs `act` on the file `on` in a child and waits for it; an error of the child is returned as an
/// errno. `ETIMEDOUT`: the child waits for the IO of the file, or an earlier one does.
///
/// # Safety
/// Other threads may hold any lock at the moment of the fork: `act` must only make system calls,
/// and neither allocate nor panic. No descriptor but the standard ones is open in the child.
pub(crate) unsafe fn in_child(on: &Path, act: impl FnOnce() -> io::Result<u64>) -> io::Result<u64> {
    let until = Instant::now() + WAIT_MAX;
    let timed_out = || io::Error::from_raw_os_error(libc::ETIMEDOUT);
    let former = given_up().remove(on);
    if let Some(mut former) = former
        && former.end(until)?.is_none()
    {
        given_up().insert(on.to_owned(), former);
        return Err(timed_out());
    }
    // SAFETY: this function's own condition.
    let mut child = unsafe { Child::start(act)? };
    match child.end(until)? {
        Some(0) => Ok(child.answer.word().load(Ordering::Acquire)),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => {
            given_up().insert(on.to_owned(), child);
            Err(timed_out())
        }
    }
}

fn given_up() -> std::sync::MutexGuard<'static, BTreeMap<PathBuf, Child>> {
    GIVEN_UP.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Child {
    process: libc::pid_t,
    /// Readable once the process has ended.
    ended: OwnedFd,
    answer: Answer,
}

impl Child {
    /// # Safety
    /// As of [`in_child`].
    unsafe fn start(act: impl FnOnce() -> io::Result<u64>) -> io::Result<Self> {
        let answer = Answer::new()?;
        let mut every = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are filled by these calls before they are read.
        unsafe {
            libc::sigfillset(every.as_mut_ptr());
            // The child keeps them blocked: this process's handlers are not for it.
            libc::pthread_sigmask(libc::SIG_BLOCK, every.as_ptr(), before.as_mut_ptr());
        }
        // SAFETY: the child makes system calls only, by this function's own condition.
        let process = unsafe { libc::fork() };
        if process == 0 {
            // SAFETY: nothing in the child uses a descriptor of this process, and it ends here. If they
            // stayed open, they would hold the dead daemon's lock.
            unsafe {
                libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
                let errno = match act() {
                    Ok(value) => {
                        answer.word().store(value, Ordering::Release);
                        0
                    }
                    Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
                };
                libc::_exit(errno);
            }
        }
        let forked = if process < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        // SAFETY: `before` was filled above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
        forked?;
        // SAFETY: a system call about a child that is not waited for yet; the descriptor is new.
        let ended = unsafe {
            let ended = libc::syscall(libc::SYS_pidfd_open, process, 0);
            check(i32::try_from(ended).unwrap_or(-1)).map(|fd| OwnedFd::from_raw_fd(fd))
        };
        match ended {
            Ok(ended) => Ok(Self { process, ended, answer }),
            Err(error) => {
                // SAFETY: one system call. The child is not needed, and is not waited for.
                unsafe { libc::kill(process, libc::SIGKILL) };
                Err(error)
            }
        }
    }

    /// Waits until `until` and returns its errno; `None`: it has not ended.
    fn end(&mut self, until: Instant) -> io::Result<Option<i32>> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.ended, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut status = 0;
        // SAFETY: the child belongs to this process, and no other code waits for it.
        while unsafe { libc::waitpid(self.process, &mut status, 0) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        match libc::WIFEXITED(status) {
            true => Ok(Some(libc::WEXITSTATUS(status))),
            false => Err(io::Error::other("the child process of this system call was killed")),
        }
    }
}

/// A number that a child tells its parent, in memory that both have.
struct Answer(NonNull<AtomicU64>);

// SAFETY: it owns its mapping, and the word is atomic.
unsafe impl Send for Answer {}

impl Answer {
    fn new() -> io::Result<Self> {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), size_of::<AtomicU64>(), access, kind, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast()).map(Self).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped, aligned to a page, and zero at first, for as long as `self` lives.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        // SAFETY: mapped with this length, and no reference to it outlives `self`.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<AtomicU64>()) };
    }
}

/// Makes the kernel query a file's size; `ERANGE` if the size differs.
pub(crate) fn check_file_size(path: &Path, size_bytes: u64) -> io::Result<()> {
    let text = c_string(path)?;
    let act = || {
        let mut found = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the string and the buffer are valid for the call.
        check(unsafe { libc::stat(text.as_ptr(), found.as_mut_ptr()) })?;
        // SAFETY: the call succeeded, so it has filled the buffer.
        let found = unsafe { found.assume_init() };
        if found.st_size as u64 == size_bytes {
            Ok(0)
        } else {
            Err(io::Error::from_raw_os_error(libc::ERANGE))
        }
    };
    // SAFETY: one system call and a comparison.
    unsafe { in_child(path, act) }.map(drop)
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
        let outcome = unsafe {
            in_child(Path::new("/proc/self/exe"), || {
                check(libc::fcntl(descriptor, libc::F_GETFD)).map(|_| 0)
            })
        };
        assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_child_that_takes_long_is_given_up_and_the_next_call_waits_for_it_first() {
        let file = Path::new("/of/this/test");
        let sleeps = |milliseconds: u64| {
            // SAFETY: one system call in the child.
            let slept = unsafe {
                in_child(file, || {
                    libc::usleep(milliseconds as u32 * 1000);
                    Ok(milliseconds)
                })
            };
            slept.map_err(|error| error.raw_os_error())
        };
        assert_eq!(sleeps(1), Ok(1));
        let began = Instant::now();
        assert_eq!(sleeps(4_000), Err(Some(libc::ETIMEDOUT)));
        assert!(began.elapsed() < Duration::from_millis(3_900), "{:?}", began.elapsed());
        assert_eq!(sleeps(2), Ok(2));
        assert!(began.elapsed() >= Duration::from_secs(4), "two work on the file at once");
        assert!(given_up().is_empty());
    }
}
