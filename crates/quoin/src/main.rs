//! The `quoin` binary: every role of the system, the commands that people use, and `quoin dev`.
//!
//! Flags are parsed here and nowhere else; each role is a crate with plain `Options` and a
//! `run`. Commands talk to the controller's admin socket ([`client`]) and print through
//! [`output`]; `quoin dev` ([`dev`]) supervises one process a role.

mod admins;
mod cli;
mod client;
mod completion;
mod contexts;
mod cordon;
mod declare;
mod demo;
mod dev;
mod document;
mod events;
mod fence;
mod group;
mod host;
mod kubectl;
mod listing;
mod manual;
mod mirror;
mod offline;
mod output;
mod pace;
mod preflight;
mod private_file;
mod roles;
mod salvage;
mod schedule;
mod scrub;
mod size;
mod snapshot;
mod status;
mod support_bundle;
mod target;
mod tokens;
mod volume;

use std::io::Write;
use std::process::ExitCode;

/// Allocator of every role: the data path takes and frees buffers all the time, which the system's one gives back to
/// the kernel and faults in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code that shells use for a command that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// Exit code of a controller whose place another one took, or whose records are elsewhere: a supervisor must not
/// start it again.
const SUPERSEDED: u8 = 4;

/// Exit code of a pool or a node that was removed from its cluster: started again, it would end
/// again, so a supervisor is to leave it (EX_CONFIG; of systemd, `RestartPreventExitStatus=78`).
const REMOVED: u8 = 78;

fn is_removed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(quoin_pool::Error::Removed(_)))
        || matches!(error.downcast_ref(), Some(quoin_target::Error::Removed(_)))
        || matches!(error.downcast_ref(), Some(quoin_csi::Error::Removed(_)))
}

fn main() -> ExitCode {
    let ended = match kubectl::is_plugin() {
        true => kubectl::run(),
        false => {
            cli::complete();
            cli::parse().run()
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A failed write to stderr is no reason to panic.
            let _ = writeln!(std::io::stderr(), "error: {}", output::sentence(&error));
            match error.downcast_ref::<quoin_control::Error>() {
                Some(
                    quoin_control::Error::Superseded { .. }
                    | quoin_control::Error::RecordsMoved { .. },
                ) => SUPERSEDED.into(),
                _ if error.is::<pace::Interrupted>() || error.is::<snapshot::Interrupted>() => {
                    INTERRUPTED.into()
                }
                _ if is_removed(&error) => REMOVED.into(),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
