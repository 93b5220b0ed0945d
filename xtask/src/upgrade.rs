//! `cargo xtask upgrade --from v0.1.0`: builds an earlier version, and brings a cluster of it to
//! this one process by process, under IO that is checked, and back. It begins with the first revision
//! whose disk format this tree reads.

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
        None => {
            let commit = commit(options.from.as_deref())?;
            check_format(&commit)?;
            build(&commit)?
        }
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

/// The file that has the version of a pool's format.
const SUPERBLOCK: &str = "crates/quoin-store/src/format/superblock.rs";

/// Returns the format version of pools that a revision's source states.
fn format_of(source: &str) -> Option<u32> {
    let stated = source.lines().find_map(|l| l.strip_prefix("pub const FORMAT_VERSION: u32 = "))?;
    stated.strip_suffix(';')?.parse().ok()
}

/// Refuses a revision whose pools this one does not read.
fn check_format(commit: &str) -> Result<()> {
    let here = std::fs::read_to_string(run::workspace_root().join(SUPERBLOCK))?;
    let here = format_of(&here).context("this tree states no FORMAT_VERSION")?;
    let there = git(&["show", &format!("{commit}:{SUPERBLOCK}")]).ok();
    check_versions(commit, there.as_deref().and_then(format_of), here)
}

fn check_versions(commit: &str, there: Option<u32>, here: u32) -> Result<()> {
    // Version 1 was that of builds before the first release.
    if there.is_none_or(|there| there < 2) {
        bail!(
            "{commit} writes pools of a format from before version 2, and this tree reads format \
             {here}: name a later revision. Data of such a pool is taken out by the quoin that \
             wrote it (`quoin pool export`)"
        );
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_before_the_first_edition_are_refused_with_both_formats() {
        for there in [None, Some(1)] {
            let refused = check_versions("abc", there, 3).unwrap_err().to_string();
            assert!(refused.contains("before version 2"), "{refused}");
            assert!(refused.contains("format 3") && refused.contains("quoin pool export"));
        }
        check_versions("abc", Some(2), 3).unwrap();
        let here = std::fs::read_to_string(run::workspace_root().join(SUPERBLOCK)).unwrap();
        assert!(format_of(&here).is_some_and(|version| version >= 2));
        assert_eq!(format_of("pub const FORMAT_VERSION: u32 = 1;"), Some(1));
    }
}
