//! `cargo xtask mutants`: builds the program that hunts broken rules, and becomes it.

use crate::run;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::Stdio;

pub fn run(arguments: Vec<String>) -> Result<()> {
    if let Some((flag, rest)) = arguments.split_first()
        && flag == "--code"
    {
        return crate::code_mutants::run(rest);
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

/// Crate whose decisions are tested inside of it.
const CLUSTER: &str = "quoin_cluster";

/// Builds the tests of core, store and cluster, with the rules' switches compiled in.
fn test_binaries() -> Result<Vec<PathBuf>> {
    let mut cargo = run::cargo();
    cargo.args(["test", "--no-run", "--tests", "--package", "quoin-replication"]);
    cargo.args(["--package", "quoin-store", "--package", "quoin-cluster"]);
    cargo.args(["--message-format", "json", "--quiet", "--features"]);
    cargo.arg("quoin-replication/mutants,quoin-store/mutants,quoin-cluster/mutants");
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` failed ({})", run::show(&cargo), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(binaries_in(&text))
}

/// Returns the integration tests, and the cluster's own, among the built files in cargo's messages.
fn binaries_in(messages: &str) -> Vec<PathBuf> {
    let parsed = messages.lines().filter_map(|l| serde_json::from_str(l).ok());
    let is_test = |message: &serde_json::Value| {
        message["target"]["kind"][0] == "test" || message["target"]["name"] == CLUSTER
    };
    let tests = parsed.filter(is_test);
    tests.filter_map(|m: serde_json::Value| m["executable"].as_str().map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_integration_tests_and_those_of_the_cluster_are_taken_where_they_were_built() {
        let line = |kind: &str, name: &str, file: &str| {
            format!(r#"{{"target":{{"kind":["{kind}"],"name":"{name}"}},"executable":{file}}}"#)
        };
        let text = [
            line("test", "damage", "\"/t/damage-1\""),
            line("bin", "quoin", "\"/t/quoin-1\""),
            line("lib", "quoin-store", "\"/t/quoin_store-1\""),
            line("lib", "quoin_cluster", "\"/t/quoin_cluster-1\""),
            line("lib", "quoin_cluster", "null"),
            line("test", "common", "null"),
            "not json".into(),
        ];
        let taken = ["/t/damage-1", "/t/quoin_cluster-1"].map(PathBuf::from);
        assert_eq!(binaries_in(&text.join("\n")), taken);
    }
}
