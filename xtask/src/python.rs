//! A Python environment of the project with the gRPC library, for the test clients that are not
//! Rust.
//!
//! It is a virtual environment in the target directory, made from `tests/python/requirements.txt`
//! with the machine's `python3`; nothing is installed into the machine. It is made once: a stamp
//! that holds the requirements proves that it is whole.

use crate::{packages, run};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variable by which the tests find the interpreter.
pub const VARIABLE: &str = "QUOIN_PYTHON";

/// Returns the interpreter of the environment, which is made now if it is not there.
pub fn provide() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE) {
        return Ok(named.into());
    }
    let home = run::target_directory()?.join("python");
    let list = run::workspace_root().join("tests/python/requirements.txt");
    let wanted = std::fs::read_to_string(&list).context("reading the requirements")?;
    let (python, stamp) = (home.join("bin/python"), home.join("stamp"));
    let is_made = std::fs::read_to_string(&stamp).is_ok_and(|made| made == wanted);
    // The machine's Python may have been replaced since.
    if is_made && imports(&python) {
        return Ok(python);
    }
    println!("making a Python environment with gRPC in {}", home.display());
    let _ = std::fs::remove_dir_all(&home);
    let make = || run::check(Command::new("python3").args(["-m", "venv"]).arg(&home));
    // Debian's python3 comes without the module that makes environments.
    make()
        .or_else(|_| {
            packages::install(&["python3-venv"]);
            make()
        })
        .context("python3 with its venv module is needed (Debian: python3-venv)")?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]);
    run::check(install.arg(&list)).context("the Python packages could not be had")?;
    if !imports(&python) {
        bail!("the packages of {} are installed and cannot be imported", list.display());
    }
    std::fs::write(&stamp, wanted).context("noting that it is made")?;
    Ok(python)
}

fn imports(python: &Path) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", "import grpc, grpc_tools.protoc"]);
    command.status().is_ok_and(|status| status.success())
}
