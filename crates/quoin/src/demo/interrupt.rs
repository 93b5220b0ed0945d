//! Ctrl-C: the demo stops at its next step and leaves nothing behind. A second Ctrl-C only prints
//! that this goes on: a demo that ended at once would leave its mounts to the user.

use anyhow::{Result, bail};
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

const FIRST: &[u8] = b"\ninterrupted: everything is taken down, which takes some seconds\n";
const AGAIN: &[u8] = b"\nstill taking everything down: nothing stays when this ends by itself\n";

/// Catches SIGINT, SIGTERM and SIGHUP for the rest of the process.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler: extern "C" fn(libc::c_int) = note;
        // SAFETY: the handler touches an atomic and calls write, which are async-signal-safe.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

extern "C" fn note(_signal: libc::c_int) {
    let words = if INTERRUPTED.swap(true, Ordering::SeqCst) { AGAIN } else { FIRST };
    // SAFETY: a write of constant bytes; errno is the interrupted code's and is given back to it.
    unsafe {
        let errno = *libc::__errno_location();
        // A failed write is ignored: the demo stops in either case.
        let _ = libc::write(libc::STDOUT_FILENO, words.as_ptr().cast(), words.len());
        *libc::__errno_location() = errno;
    }
}

/// Ends the demo as Ctrl-C does.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// # Errors
/// Once the user pressed Ctrl-C.
pub fn check() -> Result<()> {
    if is_interrupted() {
        bail!("interrupted");
    }
    Ok(())
}
