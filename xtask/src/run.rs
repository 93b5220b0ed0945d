//! Starting programs: cargo, the built binaries, tools of the machine.

use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the directory that holds the workspace's Cargo.toml.
pub fn workspace_root() -> PathBuf {
    // xtask's own manifest directory is one below it.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").into()
}

/// Directories of the project's own Rust.
pub const CODE_DIRECTORIES: [&str; 4] = ["crates", "verification", "tests", "xtask"];

/// Returns a path that begins with a crate's name; product crates and those of the proofs have
/// different parents.
pub fn path_in_crates(place: &str) -> PathBuf {
    let in_product = workspace_root().join("crates").join(place);
    if in_product.exists() { in_product } else { workspace_root().join("verification").join(place) }
}

/// Returns the cargo that started this process (so one toolchain builds everything).
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// Returns the command with a table of mounts of its own, where that is possible: a program that copies
/// the machine's table meanwhile gets none of its mounts, and keeps none of them in use.
pub fn with_own_mounts(command: Command) -> Command {
    const OWN: [&str; 4] = ["--mount", "--propagation", "slave", "--"];
    let mut probe = Command::new("unshare");
    probe.args(OWN).arg("true").stdout(Stdio::null()).stderr(Stdio::null());
    if !probe.status().is_ok_and(|status| status.success()) {
        return command;
    }
    let mut own = Command::new("unshare");
    own.args(OWN).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => own.env(name, value),
            None => own.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        own.current_dir(directory);
    }
    own
}

/// Runs to the end; an exit code other than 0 is an error that names the command.
pub fn check(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// Returns the command line as a user would type it.
pub fn show(command: &Command) -> String {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(name).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Builds `binary` of `package` in release and returns its path.
pub fn release_binary(package: &str, binary: &str) -> Result<PathBuf> {
    release_binary_with(package, binary, &[])
}

/// Builds the same with features that no product has.
pub fn release_binary_with(package: &str, binary: &str, features: &[&str]) -> Result<PathBuf> {
    let build = ["build", "--release", "--package", package, "--bin", binary];
    check(cargo().args(build).args(["--features", &features.join(",")]).arg("--quiet"))?;
    Ok(target_directory()?.join("release").join(binary))
}

/// Returns cargo's target directory, wherever the user's configuration puts it.
pub fn target_directory() -> Result<PathBuf> {
    let metadata = metadata()?;
    let directory = metadata["target_directory"].as_str().context("cargo metadata: no target")?;
    Ok(directory.into())
}

/// Returns `cargo metadata` of the workspace's own packages.
pub fn metadata() -> Result<serde_json::Value> {
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .output()
        .context("cannot start `cargo metadata`")?;
    if !output.status.success() {
        bail!("`cargo metadata` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("`cargo metadata` printed no JSON")
}

/// Becomes `program`: signals and the exit code are then its own.
pub fn replace_with(program: &Path, arguments: impl IntoIterator<Item = String>) -> Result<()> {
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_a_command_with_its_own_are_in_no_other_table() {
        if !crate::packages::is_root() {
            return quoin_testkit::skipped("mounts need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let script = "mount -t tmpfs apart \"$0\" && grep -c \" $0 \" /proc/self/mounts";
        let mut shell = Command::new("sh");
        shell.args(["-c", script, path]);
        let output = with_own_mounts(shell).output().unwrap();
        let counted = String::from_utf8_lossy(&output.stdout);
        if counted.is_empty() {
            return quoin_testkit::skipped("this container mounts nothing");
        }
        assert_eq!(counted, "1\n", "{output:?}");
        let here = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!here.contains(path), "{here}");
    }
}
