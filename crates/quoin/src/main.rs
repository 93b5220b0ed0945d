//! The `quoin` binary: every role of the system and the commands that people use.
//!
//! Flags are parsed here and nowhere else; each role is a crate with plain `Options` and a
//! `run`. Commands talk to the controller's admin socket ([`client`]) and print through
//! [`output`].

mod cli;
mod client;
mod events;
mod listing;
mod output;
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
