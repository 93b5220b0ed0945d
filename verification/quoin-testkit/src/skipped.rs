//! How a test says that this machine does not let it prove what its name says.

use std::fs::OpenOptions;
use std::io::Write;

/// Reports to the test run that the test of this thread proves less than it says, and why.
/// `cargo xtask test` counts it as skipped and not as passed; with `--complete` it is a failure.
pub fn skipped(why: &str) {
    eprintln!("skipped: {why}");
    let Some(file) = std::env::var_os("QUOIN_SKIPPED") else { return };
    let thread = std::thread::current();
    let line = format!("{}: {why}\n", thread.name().unwrap_or("a test"));
    let mut file = OpenOptions::new().append(true).create(true).open(file).expect("the list");
    file.write_all(line.as_bytes()).expect("a line in the list");
}
