//! Ctrl-C: the demo stops at its next step and leaves nothing behind.

use anyhow::{Result, bail};
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Catches SIGINT, SIGTERM and SIGHUP for the rest of the process.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler: extern "C" fn(libc::c_int) = note;
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

pub fn is_wanted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// # Errors
/// Once the person pressed Ctrl-C.
pub fn check() -> Result<()> {
    if is_wanted() {
        bail!("interrupted");
    }
    Ok(())
}
