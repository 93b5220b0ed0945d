//! Starting programs: cargo, the built binaries, tools of the machine.

use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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
