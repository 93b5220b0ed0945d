//! The named invariants of the protocol: each that docs/replication.md promises is listed in
//! ARCHITECTURE.md with the places that assert it, and each such place does so by that name, in
//! code that is in release builds.

use crate::run::{self, workspace_root};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// File that promises the names, and the heading of their table.
const PROMISED: (&str, &str) = ("docs/replication.md", "## Invariants");
/// File that lists the assertions of each, and the heading.
const MAPPED: (&str, &str) = ("ARCHITECTURE.md", "## Named invariants");

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let root = workspace_root();
    let read = |path: &str| {
        std::fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"))
    };
    let promised = rows(&read(PROMISED.0)?, PROMISED.1)?;
    let mapped = rows(&read(MAPPED.0)?, MAPPED.1)?;
    let code = |place: &str| {
        let text = std::fs::read_to_string(run::path_in_crates(place)).ok()?;
        let is_test = Path::new(place).components().any(|part| part.as_os_str() == "tests");
        (!is_test).then(|| released(&text))
    };
    Ok(compare(&promised, &mapped, code))
}

/// Returns the rows of the table below a heading: names to the rest of their row.
fn rows(text: &str, heading: &str) -> Result<BTreeMap<String, String>> {
    let mut lines = text.lines().skip_while(|line| *line != heading).skip(1);
    let table = lines.by_ref().take_while(|line| !line.starts_with("## "));
    let mut rows = BTreeMap::new();
    for row in table.filter_map(|line| line.strip_prefix("| **")) {
        let (names, rest) = row.split_once("**").context("a row without the end of its names")?;
        for name in names.split(", ") {
            rows.insert(name.to_owned(), rest.to_owned());
        }
    }
    if rows.is_empty() {
        bail!("no table of invariants under `{heading}`");
    }
    Ok(rows)
}

fn compare(
    promised: &BTreeMap<String, String>,
    mapped: &BTreeMap<String, String>,
    code: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let mut violations = Vec::new();
    for name in promised.keys().filter(|name| !mapped.contains_key(*name)) {
        violations.push(format!("{} promises {name}, {} lacks it", PROMISED.0, MAPPED.0));
    }
    for (name, places) in mapped {
        if !promised.contains_key(name) {
            violations.push(format!("{} names {name}, {} lacks it", MAPPED.0, PROMISED.0));
        }
        let places: Vec<&str> = places.split('`').skip(1).step_by(2).collect();
        if places.is_empty() {
            violations.push(format!("{}: nothing asserts {name}", MAPPED.0));
        }
        for place in places {
            if !code(place).is_some_and(|code| names(&code, name)) {
                violations.push(format!("{place} does not assert {name} by name"));
            }
        }
    }
    violations
}

/// Returns the code of a file that release builds have: no comments, no tests, no debug assertions.
fn released(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.filter(|line| !line.contains("debug_assert")).collect::<Vec<_>>().join("\n")
}

/// Returns whether a string of this code has the name as a separate word.
fn names(code: &str, name: &str) -> bool {
    let strings = code.split('"').skip(1).step_by(2);
    strings.flat_map(|text| text.split(|c: char| !c.is_alphanumeric())).any(|word| word == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_invariant_that_the_protocol_names_is_asserted_by_name_where_the_map_says_so() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_name_without_a_place_and_a_place_without_the_name_are_found() {
        let table = |text: &str| rows(&format!("## X\n\n{text}\n## Y\n| **No** | |"), "## X");
        let promised = table("| **One, Two** | always |\n| **Three** | always |").unwrap();
        let mapped = table("| **One** | `a.rs`, `b.rs` |\n| **Two** | the reader |").unwrap();
        let code = |place: &str| match place {
            "a.rs" => Some(released("assert!(ok, \"One\");\n")),
            "b.rs" => Some(released(
                "// \"One\"\ndebug_assert!(ok, \"One\");\nassert!(ok, \"OneMore\");\n\
                 #[cfg(test)]\nassert!(ok, \"One\");\n",
            )),
            _ => None,
        };
        let found = compare(&promised, &mapped, code);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].contains("promises Three"));
        assert!(found[1].contains("b.rs does not assert One"));
        assert!(found[2].contains("nothing asserts Two"));
        assert!(table("nothing here").is_err());
    }
}
