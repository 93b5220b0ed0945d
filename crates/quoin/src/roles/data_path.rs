//! Settings of the kernel for the processes that data passes through.
//!
//! A host that is short of memory writes its dirty pages back, and those of a volume's file system
//! come through the attach process, a target and perhaps a pool on the same host. None of them may
//! wait for that writeback in order to get memory, or none makes progress (`docs/operating.md`,
//! "Where memory is short").

use std::io;

use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;

/// To be called before the first thread starts: threads inherit what is asked of the kernel.
///
/// Where rights are missing the process works all the same. The attach process reports it for its
/// host, since writeback goes through Quoin only where there are block devices; the others report
/// it in their debug logs.
pub fn prepare(part: Part) {
    // Needs CAP_SYS_RESOURCE; without it the kernel treats this process as any other.
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        let message = "Quoin's processes may wait for their own volumes where memory is short: \
                       run them as root, or give them CAP_SYS_RESOURCE";
        match part {
            Part::Attach => tracing::info!(%error, "{message}"),
            Part::Other => tracing::debug!(%error, "{message}"),
        }
    }
    if let Err(error) = lock_memory() {
        let message = "memory cannot be locked, and volumes may stall where it is short: allow it \
                       with CAP_IPC_LOCK or LimitMEMLOCK=infinity";
        match part {
            Part::Attach => tracing::info!(%error, "{message}"),
            Part::Other => tracing::debug!(%error, "{message}"),
        }
    }
}

/// For a process that hears the keys of users: they get into no core dump, and none into swap where it has
/// the right to lock memory.
pub fn keep_secrets() {
    quoin_encryption::forbid_dumps();
    if let Err(error) = lock_memory() {
        let message = "memory cannot be locked, and a key may reach swap: allow it with \
                       CAP_IPC_LOCK or LimitMEMLOCK=infinity";
        tracing::debug!(%error, "{message}");
    }
}

/// Process that asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Attach,
    Other,
}

/// Keeps what the process has touched in memory.
fn lock_memory() -> io::Result<()> {
    // Locked up to a limit, a process is refused memory at that limit, and ends.
    let everything = Rlimit { current: None, maximum: None };
    let no_limit = rustix::process::setrlimit(Resource::Memlock, everything).is_ok();
    let held = rustix::thread::capabilities(None)?.effective;
    if !no_limit && !held.contains(CapabilitySet::IPC_LOCK) {
        return Err(rustix::io::Errno::PERM.into());
    }
    // Locked only when touched: otherwise every thread's whole stack would be filled in.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    Ok(rustix::mm::mlockall(flags)?)
}
