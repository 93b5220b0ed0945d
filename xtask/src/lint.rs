//! `cargo xtask lint`: every check of the source that runs no product code.

use crate::{house, run, trace};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

#[derive(clap::Args)]
pub struct Options {
    /// Also check licences, advisories and sources with cargo-deny, and that each dependency is
    /// used with cargo-machete (both are built on first use, which takes minutes).
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
        step("dependencies that nothing uses");
        let program = tool("cargo-machete", CARGO_MACHETE)?;
        run::check(Command::new(program).current_dir(run::workspace_root()))?;
    }
    println!("lint: clean");
    Ok(())
}

fn step(name: &str) {
    println!("lint: {name}");
}

/// The version that deny.toml is written for.
const CARGO_DENY: &str = "0.20.2";
const CARGO_MACHETE: &str = "0.9.2";

/// Runs cargo-deny. Checks of the sources alone must pass. Advisories need their database from the
/// network: without it, that check is left out by name.
fn deny() -> Result<()> {
    let program = tool("cargo-deny", CARGO_DENY)?;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        run::check(command.args(arguments).current_dir(run::workspace_root()))
    };
    run(&["check", "--hide-inclusion-graph", "bans", "licenses", "sources"])?;
    if run(&["fetch", "db"]).is_err() {
        println!("\nNOTE: known advisories are NOT CHECKED: their database cannot be fetched\n");
        return Ok(());
    }
    run(&["check", "--disable-fetch", "advisories"])
}

/// Returns a program of crates.io. It is kept in the user's cache, and not in the target directory:
/// building it takes minutes, and a fresh clone need not do it again.
fn tool(name: &str, version: &str) -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(PathBuf::from(home).join(".cache"))
    });
    let cache = cache
        .with_context(|| format!("neither XDG_CACHE_HOME nor HOME says where to keep {name}"))?;
    let home = cache.join("quoin/tools").join(format!("{name}-{version}"));
    let program = home.join("bin").join(name);
    if !program.is_file() {
        println!("lint: building {name} {version} into {}", home.display());
        let mut install = run::cargo();
        install.args(["install", name, "--version", version, "--locked", "--debug"]);
        install.arg("--root").arg(&home).env("CARGO_PROFILE_DEV_DEBUG", "0");
        run::check(&mut install)?;
    }
    Ok(program)
}
