//! `cargo xtask lint`: everything about the source that can be checked without running it.

use crate::{house, run, trace};
use anyhow::Result;

#[derive(clap::Args)]
pub struct Options {
    /// Also check licences, advisories and sources with cargo-deny (built on first use, which
    /// takes minutes).
    #[arg(long)]
    deny: bool,
}

pub fn run(options: &Options) -> Result<()> {
    step("format");
    run::check(run::cargo().args(["fmt", "--all", "--check"]))?;
    step("rules of the tree");
    house::check()?;
    step("requirements named by tests");
    trace::check_ids()?;
    step("clippy");
    let clippy = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    run::check(run::cargo().args(clippy))?;
    if options.deny {
        step("licences, advisories, sources");
        deny()?;
    }
    println!("lint: clean");
    Ok(())
}

fn step(name: &str) {
    println!("lint: {name}");
}

/// cargo-deny lives in the target directory: it is this project's tool, not the user's.
fn deny() -> Result<()> {
    let tools = run::target_directory()?.join("tools");
    let program = tools.join("bin/cargo-deny");
    if !program.is_file() {
        println!("lint: building cargo-deny into {}", tools.display());
        run::check(run::cargo().args(["install", "cargo-deny", "--locked", "--root"]).arg(&tools))?;
    }
    let mut command = std::process::Command::new(program);
    run::check(command.arg("check").current_dir(run::workspace_root()))
}
