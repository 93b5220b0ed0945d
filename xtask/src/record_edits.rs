//! Edits of a volume's record by the simulator. What the control plane decides is a function of
//! `quoin-cluster`, which the simulator calls: a second implementation would prove itself. So each function
//! of the simulator that writes a field of a record is listed with its purpose, and a new one is a decision
//! and no accident.

use crate::run::workspace_root;
use crate::trace::collect_files;
use anyhow::Result;
use std::collections::BTreeSet;

/// Purpose of writing a record's fields in one function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    /// The world begins with it.
    Setup,
    /// An older copy of the record is in force again, or the records of two terms are made one.
    Restored,
    /// Wish of a person or a program, as the API writes it down.
    Wish,
    /// One rule is broken, to see that it is noticed.
    Mutant,
}

use Purpose::{Mutant, Restored, Setup, Wish};

const SIMULATOR: &str = "verification/quoin-sim/src";

const EDITS: [(&str, &str, Purpose); 15] = [
    ("cluster/records.rs", "change", Wish),
    ("cluster/records.rs", "create_volume", Setup),
    ("control.rs", "desire", Wish),
    ("control.rs", "name", Wish),
    ("control.rs", "new", Setup),
    ("control.rs", "owned_by", Restored),
    ("control.rs", "set_factor", Wish),
    ("control.rs", "set_membership", Restored),
    ("world/control.rs", "asked", Mutant),
    ("world/control.rs", "merge_fork", Restored),
    ("world/faults.rs", "restore_record", Restored),
    ("world/recovery.rs", "desire_what_is_left", Wish),
    ("world/recovery.rs", "remove_destroyed", Wish),
    ("world/terms.rs", "grant_again", Restored),
    ("world/unexpected_peers.rs", "remove_unexpected", Wish),
];

/// Names that the simulator gives to a record as it changes it.
const RECORDS: [&str; 2] = ["volume.", "v."];
/// Fields of a record that decisions own.
const FIELDS: [&str; 10] = [
    "attachments",
    "consistency_factor",
    "discarded",
    "grants",
    "membership",
    "opened",
    "phase",
    "replicas",
    "source",
    "used",
];
/// Ways to write one.
const WRITES: [&str; 8] =
    [" = ", " += ", " -= ", " |= ", ".push(", ".retain(", ".clear()", ".insert("];

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let root = workspace_root().join(SIMULATOR);
    let mut paths = Vec::new();
    collect_files(&root, &mut paths)?;
    let mut found = BTreeSet::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let shown = path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path)?;
        found.extend(editing(&text).into_iter().map(|function| (shown.clone(), function)));
    }
    Ok(compared(&found))
}

fn compared(found: &BTreeSet<(String, String)>) -> Vec<String> {
    let listed: BTreeSet<(&str, &str)> =
        EDITS.iter().map(|(file, name, _)| (*file, *name)).collect();
    let new = found.iter().filter(|(file, name)| !listed.contains(&(file.as_str(), name.as_str())));
    let mut violations: Vec<String> = new
        .map(|(file, name)| {
            format!(
                "{SIMULATOR}/{file}: {name} writes fields of a record: call the function of quoin-cluster \
                 that decides it, or say in xtask/src/record_edits.rs for what it is"
            )
        })
        .collect();
    let has = |file: &str, name: &str| found.contains(&(file.to_owned(), name.to_owned()));
    let gone = EDITS.iter().filter(|(file, name, _)| !has(file, name));
    violations.extend(gone.map(|(file, name, _)| {
        format!("{SIMULATOR}/{file}: {name} writes no record: take it from the list")
    }));
    violations
}

/// Returns the functions outside of tests that write a field of a record.
fn editing(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let mut found = BTreeSet::new();
    let mut function = "";
    for line in code.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        if let Some((_, rest)) = line.split_once("fn ") {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            if end > 0 {
                function = &rest[..end];
            }
        }
        let writes = |statement: &str| {
            let field = RECORDS.iter().find_map(|record| statement.strip_prefix(record));
            let is_owned = field.is_some_and(|field| FIELDS.iter().any(|f| field.starts_with(f)));
            is_owned && WRITES.iter().any(|write| statement.contains(write))
        };
        // The body of a closure on one line is a statement, too.
        if line.split(['|', '{', ';']).map(str::trim).any(writes) || line.contains(".edit(") {
            found.insert(function.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_found_in_statements_and_closures_and_not_in_comments_or_tests() {
        let text = "fn a() {\n    volume.membership.drf = 3;\n}\nfn b() {\n    f(|v| v.replicas.push(r));\n}\n\
                    fn c() {\n    // volume.phase = x;\n    let n = volume.phase == x;\n}\n\
                    fn d() {\n    self.record.edit(change);\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn e() { volume.phase = x; }\n}";
        assert_eq!(editing(text), ["a", "b", "d"].map(str::to_owned).into());
    }

    #[test]
    fn a_function_that_is_not_listed_and_one_that_writes_nothing_are_told() {
        let all: BTreeSet<(String, String)> =
            EDITS.iter().map(|(file, name, _)| ((*file).to_owned(), (*name).to_owned())).collect();
        assert_eq!(compared(&all), Vec::<String>::new());
        let mut other = all.clone();
        other.insert(("new.rs".to_owned(), "decide".to_owned()));
        assert_eq!(compared(&other).len(), 1);
        let (file, name, _) = EDITS[0];
        other.remove(&(file.to_owned(), name.to_owned()));
        assert!(compared(&other)[1].contains("take it from the list"));
    }

    #[test]
    fn the_list_is_that_of_the_tree() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }
}
