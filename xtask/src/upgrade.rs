//! `cargo xtask upgrade --from v0.1.0`: builds an earlier version, and brings a cluster of it to
//! this one process by process, under IO that is checked, and back.

use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{packages, run};

#[derive(Args)]
pub struct Options {
    /// The earlier version: a tag or any commit [default: the newest tag v*]
    #[arg(long, value_name = "REVISION")]
    from: Option<String>,
    /// Its binary, where it is built already
    #[arg(long, value_name = "FILE")]
    old_binary: Option<PathBuf>,
    /// For `quoin-torture`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub fn run(options: Options) -> Result<()> {
    packages::provide(&[&packages::EXT4, &packages::XFS, &packages::FUSE, &packages::FIO])?;
    packages::provide(&[&packages::IPROUTE])?;
    let older = match options.old_binary {
        Some(binary) => binary,
        None => build(&commit(options.from.as_deref())?)?,
    };
    let newer = run::release_binary("quoin", "quoin")?;
    let torture = run::release_binary("quoin-torture", "quoin-torture")?;
    let shown = |path: &Path| path.display().to_string();
    let versions =
        ["--quoin".to_owned(), shown(&newer), "--upgrade-from".to_owned(), shown(&older)];
    run::replace_with(&torture, versions.into_iter().chain(options.arguments))
}

fn git(arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("git");
    command.current_dir(run::workspace_root()).args(arguments);
    let output = command.output().context("cannot start git")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}`: {}", run::show(&command), said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn commit(from: Option<&str>) -> Result<String> {
    let revision = match from {
        Some(revision) => revision.to_owned(),
        None => git(&["describe", "--tags", "--abbrev=0", "--match", "v*"])
            .context("there is no version before this one; name a commit: --from COMMIT")?,
    };
    git(&["rev-parse", "--verify", &format!("{revision}^{{commit}}")])
}

/// Returns the binary of that commit, built once and kept in the target directory.
fn build(commit: &str) -> Result<PathBuf> {
    let kept = run::target_directory()?.join("upgrade");
    let binary = kept.join(format!("quoin-{commit}"));
    if binary.exists() {
        return Ok(binary);
    }
    let (tree, target) = (kept.join("tree"), kept.join("build"));
    let tree_text = tree.display().to_string();
    if tree.exists() {
        git(&["worktree", "remove", "--force", &tree_text])?;
    }
    println!("upgrade: building {commit}");
    git(&["worktree", "add", "--quiet", "--detach", &tree_text, commit])?;
    let built =
        run::check(run::cargo().current_dir(&tree).env("CARGO_TARGET_DIR", &target).args([
            "build",
            "--release",
            "--package",
            "quoin",
            "--bin",
            "quoin",
            "--quiet",
        ]));
    git(&["worktree", "remove", "--force", &tree_text])?;
    built?;
    std::fs::rename(target.join("release/quoin"), &binary)
        .with_context(|| format!("keep {}", binary.display()))?;
    Ok(binary)
}
