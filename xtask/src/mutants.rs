//! `cargo xtask mutants`: builds what hunts broken rules, and hands over to it.
//!
//! With `--code` it is the code that is broken, and not the rules: cargo-mutants changes a
//! function or an operator of the core or of the store's recovery, and the crates' own tests must
//! notice; what they miss the simulator's seeds must find. Some 2,700 such changes take days, so a
//! shard of them is tried; what was caught is remembered in the target directory, and another run
//! of the same shard goes on where the last one was ended.

use crate::run;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::Stdio;

/// Not asked: it needs a block device of the machine.
const LEFT_OUT: &str = "device";

/// The code that is broken with `--code`.
const CODE: [&str; 6] = [
    "crates/quoin-core/src/**/*.rs",
    "crates/quoin-store/src/recover.rs",
    "crates/quoin-store/src/ring.rs",
    "crates/quoin-store/src/records.rs",
    "crates/quoin-store/src/history.rs",
    "crates/quoin-store/src/batch.rs",
];
/// The switches of the other kind of mutants are no product's.
const NOT_CODE: &str = "crates/quoin-core/src/mutant.rs";
/// A sample of about two hundred.
const SHARD: &str = "0/13";
/// Whose tests must notice: first the quick ones, then the simulator's seeds.
const ORACLES: [&[&str]; 2] = [&["quoin-core", "quoin-store"], &["quoin-sim"]];

/// `--code [--shard K/N]`: the sample, resumed; ends with what nothing has noticed.
fn code(arguments: &[String]) -> Result<()> {
    let shard = match arguments {
        [] => SHARD,
        [flag, shard] if flag == "--shard" => shard.as_str(),
        _ => bail!("--code takes --shard K/N and nothing else: K of N equal parts, as in 3/100"),
    };
    let there = run::cargo().args(["mutants", "--version"]).output();
    if !there.is_ok_and(|output| output.status.success()) {
        run::check(run::cargo().args(["install", "--locked", "--quiet", "cargo-mutants"]))?;
    }
    let folder = run::target_directory()?.join(format!("code-mutants-{}", shard.replace('/', "-")));
    std::fs::create_dir_all(&folder)?;
    for oracle in ORACLES {
        let mut cargo = run::cargo();
        cargo.args(["mutants", "--iterate", "--no-shuffle", "--sharding", "round-robin"]);
        // A seed that the change makes hang must not hold up the others for long.
        cargo.args(["--timeout", "300", "--baseline", "skip", "--shard", shard]);
        cargo.arg("--output").arg(&folder).args(["--exclude", NOT_CODE]);
        cargo.args(CODE.iter().flat_map(|file| ["--file", file]));
        cargo.args(oracle.iter().flat_map(|package| ["--test-package", package]));
        let status = cargo.status().context("cannot start `cargo mutants`")?;
        match status.code() {
            // All noticed; some missed; some timed out, which is to be noticed too.
            Some(0) => break,
            Some(2 | 3) => {}
            _ => bail!("`{}` failed ({status})", run::show(&cargo)),
        }
    }
    let missed = std::fs::read_to_string(folder.join("mutants.out/missed.txt")).unwrap_or_default();
    println!("noticed by nothing: {}", missed.lines().count());
    print!("{missed}");
    Ok(())
}

pub fn run(arguments: Vec<String>) -> Result<()> {
    if let Some((flag, rest)) = arguments.split_first()
        && flag == "--code"
    {
        return code(rest);
    }
    let mutants = run::release_binary_with("quoin-sim", "quoin-mutants", &["mutants"])?;
    let alone = arguments.iter().any(|a| a == "--quick" || a == "--help" || a == "-h");
    let mut all = arguments;
    if !alone {
        for binary in test_binaries()? {
            all.extend(["--tests".to_owned(), binary.display().to_string()]);
        }
    }
    run::replace_with(&mutants, all)
}

/// The tests of core and store, with the rules' switches compiled in.
fn test_binaries() -> Result<Vec<PathBuf>> {
    let mut cargo = run::cargo();
    cargo.args(["test", "--no-run", "--tests", "--package", "quoin-core"]);
    cargo.args(["--package", "quoin-store", "--message-format", "json", "--quiet"]);
    cargo.args(["--features", "quoin-core/mutants,quoin-store/mutants"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` failed ({})", run::show(&cargo), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(binaries_in(&text))
}

/// The integration tests among what cargo says that it built.
fn binaries_in(messages: &str) -> Vec<PathBuf> {
    let parsed = messages.lines().filter_map(|l| serde_json::from_str(l).ok());
    let is_test = |message: &serde_json::Value| {
        let target = &message["target"];
        target["kind"][0] == "test" && target["name"] != LEFT_OUT
    };
    let tests = parsed.filter(is_test);
    tests.filter_map(|m: serde_json::Value| m["executable"].as_str().map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_integration_tests_that_were_built_are_taken() {
        let line = |kind: &str, name: &str, file: &str| {
            format!(r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},"executable":{file}}}"#)
        };
        let text = [
            line("test", "damage", "\"/t/damage-1\""),
            line("test", "device", "\"/t/device-1\""),
            line("lib", "quoin-store", "\"/t/quoin_store-1\""),
            line("test", "common", "null"),
            "not json".into(),
        ];
        assert_eq!(binaries_in(&text.join("\n")), [PathBuf::from("/t/damage-1")]);
    }
}
