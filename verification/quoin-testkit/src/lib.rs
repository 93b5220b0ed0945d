//! Helpers that tests of several crates share: never part of a product.
//!
//! * [`skipped`] says that this machine does not let a test prove what its name says.
//! * [`attempts_while_processes_start`] outwaits copies of descriptors in processes that start.
//! * [`nbd_server`] is a volume in memory behind the real NBD session, on a unix socket.
//! * [`kubernetes_api`] speaks the rules of Kubernetes' API for the objects that Quoin keeps there.

pub mod kubernetes_api;
pub mod nbd_server;
mod skipped;
mod starting;

pub use skipped::skipped;
pub use starting::attempts_while_processes_start;

/// Returns true if a tool is there; says so where it is not, because the test then proves nothing.
pub fn have(tool: &str) -> bool {
    let found = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(tool).is_file())
    });
    if !found {
        skipped(&format!("{tool} is not installed"));
    }
    found
}
