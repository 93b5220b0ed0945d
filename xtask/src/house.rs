//! The rules of the tree that no compiler checks: the dependencies between crates, how much one type
//! owns, that no unfinished work counts as finished, and that every test file is part of a program.

use crate::device_calls;
use crate::invariants;
use crate::methods;
use crate::module_circles;
use crate::record_edits;
use crate::run::{self, workspace_root};
use crate::test_files;
use crate::trace::collect_files;
use crate::wall_clock;
use anyhow::{Context, Result, bail};
use std::path::Path;

/// The crates from the bottom up. A crate may use those of lower layers only, so a cycle or a step
/// upwards (storage that knows CSI, a core that knows sockets) cannot creep in.
const LAYERS: [&[&str]; 11] = [
    &["quoin-types", "quoin-api", "quoin-telemetry", "quoin-model", "quoin-recorded"],
    &["quoin-replication", "quoin-reactor", "quoin-nbd", "quoin-encryption", "quoin-export"],
    &["quoin-cluster", "quoin-wire", "quoin-store"],
    &["quoin-identity", "quoin-attach", "quoin-testkit"],
    &["quoin-control", "quoin-node"],
    &["quoin-target", "quoin-pool", "quoin-mirror"],
    &["quoin-csi"],
    &["quoin-bench"],
    &["quoin-sim", "quoin-fuzz"],
    &["quoin-torture"],
    &["quoin"],
];

/// Crates whose whole list of Quoin crates is fixed, stricter than their layer.
const EXACT: [(&str, &[&str]); 12] = [
    ("quoin-types", &[]),
    ("quoin-replication", &["quoin-types"]),
    // The wrapped keys of a volume are part of its record.
    ("quoin-cluster", &["quoin-types", "quoin-api", "quoin-encryption"]),
    ("quoin-api", &[]),
    ("quoin-telemetry", &[]),
    ("quoin-nbd", &["quoin-types"]),
    ("quoin-export", &["quoin-types"]),
    // The simulator's verdict counts because nothing but the real core and store is under it, and
    // the numbers of clients' requests. (The command that hunts mutants runs the model as well.)
    (
        "quoin-sim",
        &[
            "quoin-types",
            "quoin-replication",
            "quoin-api",
            "quoin-cluster",
            "quoin-nbd",
            "quoin-store",
            "quoin-wire",
            "quoin-model",
        ],
    ),
    // The model is the protocol written a second time: it must contain nothing of the first.
    ("quoin-model", &[]),
    ("quoin-store", &["quoin-types", "quoin-replication"]),
    ("quoin-recorded", &[]),
    ("xtask", &[]),
];

/// The crates of the core, and the libraries of crates.io that each may use: none that does I/O, keeps
/// time or starts threads. Records are written as JSON.
const PURE: [(&str, &[&str]); 3] = [
    ("quoin-types", &["bytes", "crc-fast", "thiserror"]),
    ("quoin-replication", &["bytes", "crc-fast", "thiserror"]),
    ("quoin-cluster", &["bytes", "serde", "serde_json", "thiserror"]),
];

/// Names that the core must not use: it receives time, IO and chance.
const CORE_FORBIDDEN: [&str; 12] = [
    "std::fs",
    "std::net",
    "std::thread",
    "std::process",
    "std::env",
    "Instant::now",
    "SystemTime",
    "async fn",
    "async_trait",
    "tokio",
    "mpsc",
    "rand::",
];

/// Words of an earlier dialect, and the field's own (docs/glossary.md).
const BANNED_WORDS: [(&str, &str); 5] = [
    ("door", "listener, admission"),
    ("guest", "pending client"),
    ("limbo", "pending free"),
    ("vouch", "record of a clean stop; promise"),
    ("doubtful", "disk failed"),
];

/// Openings of a sentence that name nothing: a comment begins with the noun that it is about.
const OPENINGS: [&str; 6] = ["What", "Who", "Whoever", "Whether", "One that", "Those"];
/// The store's comments are older than that rule, and are not held to it.
const OLDER_COMMENTS: &str = "crates/quoin-store";

/// Fields of one type where state is to be owned by parts: files stay small because types are.
const FIELDS_MAX: usize = 17;
pub const PARTED: [&str; 4] = [
    "crates/quoin-replication/src",
    "crates/quoin-store/src",
    "crates/quoin-cluster/src",
    "crates/quoin-control/src",
];

/// Marks of unfinished work; written in halves so that this file passes its own check.
const UNFINISHED: [&str; 6] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("#[ig", "nore"),
];

/// The one file of the CSI services that chooses a code for a refusal.
const REFUSALS: &str = "crates/quoin-csi/src/refusal.rs";
/// Expressions that make a status.
const CODES: [&str; 11] = [
    "invalid_argument",
    "failed_precondition",
    "not_found",
    "already_exists",
    "aborted",
    "out_of_range",
    "unimplemented",
    "resource_exhausted",
    "unavailable",
    "internal",
    "new",
];

/// Checks every rule of this module; all violations in one error.
pub fn check() -> Result<()> {
    let mut violations = dependency_violations()?;
    violations.extend(core_violations()?);
    violations.extend(file_violations()?);
    violations.extend(refusal_violations()?);
    violations.extend(device_calls::violations()?);
    violations.extend(invariants::violations()?);
    violations.extend(methods::violations()?);
    violations.extend(module_circles::violations()?);
    violations.extend(record_edits::violations()?);
    violations.extend(test_files::violations()?);
    violations.extend(wall_clock::violations()?);
    if !violations.is_empty() {
        bail!("rules of the tree are broken:\n  {}", violations.join("\n  "));
    }
    Ok(())
}

fn dependency_violations() -> Result<Vec<String>> {
    let metadata = run::metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut violations = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        // Tests may use anything; shipped crates may not.
        let shipped: Vec<&str> = package["dependencies"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .filter(|dependency| dependency["kind"].is_null())
            .filter_map(|dependency| dependency["name"].as_str())
            .collect();
        violations.extend(violations_of(name, &shipped));
    }
    Ok(violations)
}

fn violations_of(name: &str, uses: &[&str]) -> Vec<String> {
    let layer_of = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    let own_layer = layer_of(name);
    if own_layer.is_none() && name != "xtask" {
        return vec![format!("{name} has no layer: give it one in xtask/src/house.rs")];
    }
    let mut violations = Vec::new();
    for used in uses.iter().filter(|used| used.starts_with("quoin")) {
        let points_down = match (own_layer, layer_of(used)) {
            (Some(own), Some(other)) => other < own,
            _ => false,
        };
        if !points_down {
            violations.push(format!("{name} uses {used}, which does not lie below it"));
        }
        if let Some((_, allowed)) = EXACT.iter().find(|(exact, _)| exact == &name)
            && !allowed.contains(used)
        {
            violations.push(format!("{name} uses {used}; it may use {allowed:?} only"));
        }
    }
    if let Some((_, libraries)) = PURE.iter().find(|(pure, _)| *pure == name) {
        for used in
            uses.iter().filter(|used| !used.starts_with("quoin") && !libraries.contains(used))
        {
            violations.push(format!("{name} uses {used}; it may use {libraries:?} only"));
        }
    }
    violations
}

/// Checks that the core's own source, tests left out, uses nothing from outside.
fn core_violations() -> Result<Vec<String>> {
    let mut files = Vec::new();
    for (pure, _) in PURE {
        collect_files(&workspace_root().join(format!("crates/{pure}/src")), &mut files)?;
    }
    let mut violations = Vec::new();
    for path in files {
        let is_test = path.components().any(|part| {
            let part = part.as_os_str().to_string_lossy();
            part == "tests" || part.ends_with("tests.rs") || part.ends_with("test.rs")
        });
        if is_test {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (index, line) in shipped.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for forbidden in CORE_FORBIDDEN.iter().filter(|name| code.contains(**name)) {
                violations.push(format!("{}: the core uses {forbidden}", place(&path, index + 1)));
            }
        }
    }
    Ok(violations)
}

fn file_violations() -> Result<Vec<String>> {
    let root = workspace_root();
    let mut files = Vec::new();
    for directory in run::CODE_DIRECTORIES {
        collect_files(&root.join(directory), &mut files)?;
    }
    let mut violations = Vec::new();
    for path in files {
        violations.extend(violations_in(&path, &std::fs::read_to_string(&path)?));
    }
    Ok(violations)
}

/// Returns the banned words of a line, also as parts of names. This file, which lists them, has
/// them in quotes.
fn banned_in(line: &str) -> Vec<(&'static str, &'static str)> {
    let mut parts: Vec<String> = Vec::new();
    let mut last = ' ';
    for letter in line.chars() {
        let begins = !last.is_alphabetic() || (letter.is_uppercase() && last.is_lowercase());
        if letter.is_alphabetic() && begins {
            parts.push(String::new());
        }
        if let Some(part) = parts.last_mut().filter(|_| letter.is_alphabetic()) {
            part.extend(letter.to_lowercase());
        }
        last = letter;
    }
    let is_in = |word: &str| {
        let endings = ["", "s", "ed", "es"];
        let same = |part: &String| endings.iter().any(|end| *part == format!("{word}{end}"));
        parts.iter().any(same) && !line.contains(&format!("\"{word}\""))
    };
    BANNED_WORDS.iter().copied().filter(|(word, _)| is_in(word)).collect()
}

/// Returns how a line of a comment begins, where that is one of [`OPENINGS`]. Within a sentence none
/// of them has a capital.
fn opening_of(line: &str) -> Option<&'static str> {
    let comment = line.trim_start().strip_prefix("//")?;
    let text = comment.strip_prefix(['/', '!']).unwrap_or(comment).trim_start();
    let begins = |opening: &&str| {
        let rest = text.strip_prefix(*opening);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
    };
    OPENINGS.iter().copied().find(begins)
}

/// Checks that codes of the CSI services are chosen in one place.
fn refusal_violations() -> Result<Vec<String>> {
    let root = workspace_root();
    let mut files = Vec::new();
    collect_files(&root.join("crates/quoin-csi/src"), &mut files)?;
    let mut violations = Vec::new();
    for path in files.into_iter().filter(|path| *path != root.join(REFUSALS)) {
        let text = std::fs::read_to_string(&path)?;
        let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (index, line) in shipped.lines().enumerate() {
            if CODES.iter().any(|code| line.contains(&format!("Status::{code}("))) {
                violations.push(format!(
                    "{}: chooses a code; {REFUSALS} alone does",
                    place(&path, index + 1)
                ));
            }
        }
    }
    Ok(violations)
}

/// Returns the lines at which code begins in a comment of documentation that is Rust by its mark, or by none:
/// `cargo xtask test` builds no such tests, which would cost every run a pass over all crates.
fn doc_tests_in(text: &str) -> Vec<usize> {
    let (mut lines, mut is_open) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let fence = comment.and_then(|comment| comment.trim_start().strip_prefix("```"));
        let Some(language) = fence else { continue };
        let is_other = ["text", "yaml", "json", "toml", "sh"].contains(&language.trim());
        if !is_open && !is_other {
            lines.push(index + 1);
        }
        is_open = !is_open;
    }
    lines
}

fn violations_in(path: &Path, text: &str) -> Vec<String> {
    let (mut violations, root) = (Vec::new(), workspace_root());
    for line in doc_tests_in(text) {
        let at = place(path, line);
        violations.push(format!(
            "{at}: code in a comment is run by nothing: name its language (text), or make it a test"
        ));
    }
    for (name, line, fields) in structs_in(text) {
        if fields > FIELDS_MAX && PARTED.iter().any(|part| path.starts_with(root.join(part))) {
            violations.push(format!(
                "{}: {name} has {fields} fields (at most {FIELDS_MAX}): which parts of it own them?",
                place(path, line)
            ));
        }
    }
    for (index, line) in text.lines().enumerate() {
        for mark in UNFINISHED.iter().filter(|mark| line.contains(**mark)) {
            violations.push(format!("{}: `{mark}`", place(path, index + 1)));
        }
        let is_held = !path.starts_with(root.join(OLDER_COMMENTS));
        if let Some(opening) = opening_of(line).filter(|_| is_held) {
            let at = place(path, index + 1);
            violations
                .push(format!("{at}: a comment begins with `{opening}` and not with its noun"));
        }
        for (word, instead) in banned_in(line) {
            let at = place(path, index + 1);
            violations.push(format!("{at}: `{word}` is no word of this project: {instead}"));
        }
    }
    violations
}

/// The structs of a source file: name, line, number of fields.
fn structs_in(text: &str) -> Vec<(&str, usize, usize)> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let words = line.trim_end_matches('{').split_whitespace();
        let mut words = words.skip_while(|word| word.starts_with("pub"));
        if words.next() != Some("struct") || !line.ends_with('{') || line.starts_with(' ') {
            continue;
        }
        let Some(name) = words.next() else { continue };
        let body = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "}");
        let is_field = |line: &&str| {
            let field = line.strip_prefix("    ").unwrap_or_default();
            let is_outer = !field.starts_with([' ', '/', '#', ')', ']', '>']);
            is_outer && field.contains(": ")
        };
        found.push((name, index + 1, body.filter(is_field).count()));
    }
    found
}

fn place(path: &Path, line: usize) -> String {
    let shown = path.strip_prefix(workspace_root()).unwrap_or(path);
    format!("{}:{line}", shown.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_in_a_comment_names_a_language_that_is_not_rust() {
        let fence = "```";
        let text = format!(
            "//! {fence}text\n//! a\n//! {fence}\n/// {fence}\n/// b();\n/// {fence}\n/// {fence}rust\n/// {fence}\n"
        );
        assert_eq!(doc_tests_in(&text), [4, 7]);
    }

    #[test]
    fn dependencies_between_the_crates_point_down_only() {
        assert_eq!(dependency_violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn banned_words_are_found_as_parts_of_names_and_not_inside_other_words() {
        let found =
            |line: &str| banned_in(line).into_iter().map(|(word, _)| word).collect::<Vec<_>>();
        assert_eq!(found("let doors = DoorError::from(guest_of(self));"), ["door", "guest"]);
        assert_eq!(found("// vouched for"), ["vouch"]);
        assert!(found("outdoor voucher, indoors, guesting").is_empty());
    }

    #[test]
    fn a_comment_that_begins_without_its_noun_is_found() {
        assert_eq!(opening_of("    /// Whether it is there."), Some("Whether"));
        assert_eq!(opening_of("//! Those that came."), Some("Those"));
        assert_eq!(opening_of("// One that came"), Some("One that"));
        for sound in ["/// Whole blocks.", "// One of them", "// a place: what it is", "let a = 1;"]
        {
            assert_eq!(opening_of(sound), None, "{sound}");
        }
    }

    #[test]
    fn codes_of_the_csi_services_are_chosen_in_one_file() {
        assert_eq!(refusal_violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn the_core_uses_nothing_of_the_outside() {
        assert_eq!(core_violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn no_file_is_unfinished_and_no_type_owns_too_much_and_either_would_be_found() {
        assert_eq!(file_violations().unwrap(), Vec::<String>::new());
        let mark = format!("// {} later", UNFINISHED[0]);
        assert_eq!(violations_in(Path::new("a.rs"), &mark).len(), 1);
        let store = workspace_root().join("crates/quoin-store/src/a.rs");
        let of = |fields: usize| {
            let fields: String =
                (0..fields).map(|n| format!("    /// It: n.\n    f{n}: u8,\n")).collect();
            format!("/// A type.\npub(crate) struct Large<'a> {{\n{fields}}}\n")
        };
        let found = violations_in(&store, &of(FIELDS_MAX + 1)).concat();
        assert!(found.contains("a.rs:2: Large<'a> has 18 fields"), "{found}");
        assert!(violations_in(&store, &of(FIELDS_MAX)).is_empty());
        assert!(violations_in(Path::new("options.rs"), &of(FIELDS_MAX + 1)).is_empty());
    }

    #[test]
    fn a_step_upwards_a_stranger_and_a_library_in_the_core_are_each_found() {
        let found = |name, uses: &[&str]| violations_of(name, uses).join("; ");
        assert!(found("quoin-store", &["quoin-csi"]).contains("does not lie below"));
        assert!(found("quoin-pool", &["quoin-target"]).contains("does not lie below"));
        assert!(found("quoin-sim", &["quoin-pool"]).contains("may use"));
        assert!(found("quoin-replication", &["tokio"]).contains("quoin-replication uses tokio"));
        assert!(found("quoin-cluster", &["tokio"]).contains("quoin-cluster uses tokio"));
        assert!(found("quoin-cluster", &["quoin-replication"]).contains("may use"));
        assert!(found("quoin-novel", &[]).contains("no layer"));
        assert!(found("quoin-target", &["quoin-replication", "quoin-wire", "tokio"]).is_empty());
    }
}
