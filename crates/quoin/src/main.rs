//! The `quoin` binary: every role of the system, the commands that people use, and `quoin dev`.
//!
//! Flags are parsed here and nowhere else; each role is a crate with plain `Options` and a
//! `run`. Commands talk to the controller's admin socket ([`client`]) and print through
//! [`output`]; `quoin dev` ([`dev`]) supervises one process a role.

mod cli;
mod client;
mod demo;
mod dev;
mod events;
mod listing;
mod offline;
mod output;
mod roles;
mod size;
mod volume;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = cli::Cli::parse();
    match arguments.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
