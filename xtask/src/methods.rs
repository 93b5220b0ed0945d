//! Places of methods: a type of the core, the store or the control plane has its methods in the folder that
//! declares it, or in one inside. Other work on it is functions of a module of its own, which take it as an
//! argument. A type at a crate's root has its methods at the root.

use crate::house::PARTED;
use crate::run::workspace_root;
use crate::trace::collect_files;
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let mut violations = Vec::new();
    for part in PARTED {
        let source = workspace_root().join(part);
        let mut paths = Vec::new();
        collect_files(&source, &mut paths)?;
        let mut files = Vec::new();
        for path in paths {
            let text = std::fs::read_to_string(&path)?;
            let inside = path.strip_prefix(&source).unwrap_or(&path).to_path_buf();
            files.push((inside, text));
        }
        let found = violations_in(&files);
        violations.extend(found.into_iter().map(|found| format!("{part}/{found}")));
    }
    Ok(violations)
}

/// Checks the files of one crate, with their paths below its root.
fn violations_in(files: &[(PathBuf, String)]) -> Vec<String> {
    let mut homes: BTreeMap<&str, BTreeSet<&Path>> = BTreeMap::new();
    for (path, text) in files {
        for name in text.lines().filter_map(declared) {
            homes.entry(name).or_default().insert(folder(path));
        }
    }
    let mut violations = Vec::new();
    for (path, text) in files {
        for (index, line) in text.lines().enumerate() {
            let Some((name, homes)) = extended(line).and_then(|name| homes.get_key_value(name))
            else {
                continue;
            };
            let is_home = |home: &&Path| {
                let is_root = home.as_os_str().is_empty();
                folder(path) == *home || !is_root && path.starts_with(home)
            };
            if !homes.iter().any(is_home) {
                let at = format!("{}:{}", path.display(), index + 1);
                violations.push(format!("{at}: methods of {name}, which another folder declares"));
            }
        }
    }
    violations
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// Returns the type that a line declares.
fn declared(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub"));
    let is_type = matches!(words.next(), Some("struct" | "enum" | "union"));
    is_type.then(|| words.next()).flatten().map(name_of)
}

/// Returns the type whose own methods a line begins. An implementation of a trait is none.
fn extended(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("impl")?;
    let mut deep = 0;
    let end = rest.char_indices().find(|(_, letter)| {
        deep += i32::from(*letter == '<') - i32::from(*letter == '>');
        deep == 0 && *letter == ' '
    })?;
    let named = &rest[end.0 + 1..];
    (rest.starts_with([' ', '<']) && !named.contains(" for ")).then(|| {
        let path = named.split(['<', ' ']).next().unwrap_or(named);
        name_of(path.rsplit("::").next().unwrap_or(path))
    })
}

fn name_of(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_has_its_methods_in_its_folder() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn methods_in_another_folder_are_found() {
        let file = |path: &str, text: &str| (PathBuf::from(path), text.to_owned());
        let found = |path: &str, text: &str| {
            let parts = "pub(crate) struct Part<'a, T: Copy> {\nenum Way { A }\nimpl Way {\n";
            violations_in(&[
                file("replica/mod.rs", parts),
                file("pool.rs", "pub struct Pool;"),
                file(path, text),
            ])
        };
        let far = "background/work.rs";
        let is_one = |text: &str| found(far, text).len() == 1;
        assert!(is_one("impl<'a, T: Into<Option<u8>>> Part<'a, T> {"), "generics");
        assert!(is_one("impl Way {") && is_one("    impl Pool {"), "the root's too");
        assert!(is_one("impl crate::replica::Way {"), "a path");
        assert!(found(far, "impl Iterator for Way {\nimpl Foreign {\nimplicit Way").is_empty());
        assert!(found("replica/deep/work.rs", "impl Way {").is_empty(), "a folder inside");
        assert!(found("other.rs", "impl Pool {").is_empty(), "the root itself");
        let twice = "struct Way;\nimpl Way {";
        assert!(found(far, twice).is_empty(), "a type of the same name");
    }
}
