//! `cargo xtask demo`: builds Quoin in release and becomes `quoin demo`, so that Ctrl-C and
//! the exit code are the demo's own.

use crate::{packages, run};
use anyhow::Result;

/// Arguments after `demo` go to `quoin demo` as they are: `cargo xtask demo dr` loses a cluster.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub fn run(options: Options) -> Result<()> {
    let asks_for_help = options.arguments.iter().any(|word| word == "--help" || word == "-h");
    // The story of two clusters mounts nothing.
    let mounts = !options.arguments.iter().any(|word| word == "dr");
    if mounts && !asks_for_help {
        packages::provide(&[&packages::EXT4, &packages::FUSE])?;
    }
    println!("building Quoin (release)");
    let quoin = run::release_binary("quoin", "quoin")?;
    run::replace_with(&quoin, ["demo".to_string()].into_iter().chain(options.arguments))
}
