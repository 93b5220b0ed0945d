//! The end of a role: within a bound after it was asked to, whatever hangs.
//!
//! A role that is asked to stop has much to wait for: volumes that drain, disks that sync, calls
//! under way, threads of its runtime. Each has a limit where it is waited for, and this module has
//! the last one. It receives the signals on a thread and a runtime of its own, so that nothing
//! which blocks the role's threads blocks the end. What a process leaves behind at its end is what
//! a crash would leave, and is taken care of by the next start.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Time from the signal to the end of the process. Supervisors have more patience (`quoin dev`
/// 30 s, Kubernetes 30 s, systemd 90 s).
pub const WITHIN: Duration = Duration::from_secs(20);
/// Time for work on other threads that a role which has ended left behind.
const LEFT_BEHIND_MAX: Duration = Duration::from_secs(1);
/// The thread of this module.
const THREAD: &str = "signals";

/// Becomes true at SIGTERM or SIGINT; the process ends `within` from then on.
pub fn on_signal(within: Duration) -> Result<watch::Receiver<bool>> {
    let (stop, shutdown) = watch::channel(false);
    let (armed, is_armed) = mpsc::channel();
    let handle = move || {
        let (runtime, terminate, interrupt) = match arm() {
            Ok(signals) => signals,
            // Received below.
            Err(error) => return drop(armed.send(Err(error))),
        };
        let _ = armed.send(Ok(()));
        runtime.block_on(wait_for_signal(terminate, interrupt));
        tracing::info!("asked to stop");
        stop.send_replace(true);
        std::thread::sleep(within);
        let waits_for = threads();
        tracing::error!(
            within_s = within.as_secs(),
            waits_for,
            "the shutdown took too long; \
                                                                 ending now"
        );
        // Not `exit`, which runs handlers that other parts of the process registered for its end.
        // SAFETY: it takes a number, and ends this process.
        unsafe { libc::_exit(1) }
    };
    std::thread::Builder::new().name(THREAD.into()).spawn(handle).context("handle signals")?;
    is_armed.recv().context("handle signals")?.context("handle signals")?;
    Ok(shutdown)
}

fn arm() -> std::io::Result<(Runtime, Signal, Signal)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let inside = runtime.enter();
    let signals = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    drop(inside);
    Ok((runtime, signals.0, signals.1))
}

async fn wait_for_signal(mut terminate: Signal, mut interrupt: Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Ends the runtime of a role that has ended. Threads in a system call or in foreign code cannot be
/// stopped; they end with the process.
pub fn shut_down_runtime(runtime: Runtime) {
    runtime.shutdown_timeout(LEFT_BEHIND_MAX);
    let left = threads();
    if !left.is_empty() {
        tracing::info!(left, "ended without waiting for these threads");
    }
}

/// The names of this process's threads but for the first one and this module's, with how many there
/// are of each.
fn threads() -> String {
    let own = std::process::id().to_string();
    let mut names = BTreeMap::<String, usize>::new();
    for thread in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        // A thread that has just ended has no name any more.
        let Ok(name) = std::fs::read_to_string(thread.path().join("comm")) else { continue };
        if thread.file_name().to_string_lossy() != own && name.trim() != THREAD {
            *names.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    let words = |(name, count)| match count {
        1 => name,
        count => format!("{count} x {name}"),
    };
    names.into_iter().map(words).collect::<Vec<_>>().join(", ")
}
