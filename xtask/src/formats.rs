//! `cargo xtask record-formats`: records the bytes that this build writes to disks, peers and the
//! controller's store, for the tests that compare every later build with them.

use anyhow::{Result, bail};
use clap::Args;
use std::process::Command;

use crate::run;

#[derive(Args)]
pub struct Options {
    /// Replace differing ones too; only before the first release
    #[arg(long)]
    again: bool,
}

/// Variable that `quoin-recorded` reads.
const ENVIRONMENT: &str = "QUOIN_RECORD_FORMATS";

pub fn run(options: &Options) -> Result<()> {
    if options.again && is_released()? {
        bail!(
            "there is a release: disks, peers and records of that version are out there. Raise \
             the version that the failing test names, and record the new one beside the old one \
             (without --again)"
        );
    }
    let order = if options.again { "again" } else { "new" };
    let integration = ["--exclude", "quoin", "--test", "*", "--", "formats::"];
    for arguments in [&integration[..], &["--lib", "--", "recorded"]] {
        let mut cargo = run::cargo();
        run::check(cargo.args(["test", "--workspace"]).args(arguments).env(ENVIRONMENT, order))?;
    }
    println!("recorded; `git status crates/*/tests/formats` shows what is new");
    Ok(())
}

/// Returns whether any version was tagged.
fn is_released() -> Result<bool> {
    let root = run::workspace_root();
    let tags = Command::new("git").current_dir(root).args(["tag", "--list", "v*"]).output()?;
    if !tags.status.success() {
        bail!("git cannot say which versions were released");
    }
    Ok(!tags.stdout.trim_ascii().is_empty())
}
