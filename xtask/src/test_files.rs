//! The test files of each crate: one that no `mod` line reaches is never compiled, and nobody would
//! notice that its tests are gone.

use crate::run::{CODE_DIRECTORIES, workspace_root};
use crate::trace::collect_files;
use anyhow::Result;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let root = workspace_root();
    let mut violations = Vec::new();
    let mut manifests = vec![root.join("xtask")];
    for directory in CODE_DIRECTORIES {
        let Ok(entries) = std::fs::read_dir(root.join(directory)) else { continue };
        manifests.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    for package in manifests.iter().filter(|path| path.join("Cargo.toml").is_file()) {
        for path in unreached(package)? {
            let shown = path.strip_prefix(&root).unwrap_or(&path);
            violations.push(format!("{}: no test program has it as a module", shown.display()));
        }
    }
    Ok(violations)
}

/// Returns the files below a package's `tests` that none of its test programs contains.
fn unreached(package: &Path) -> Result<Vec<PathBuf>> {
    let manifest = std::fs::read_to_string(package.join("Cargo.toml"))?;
    let mut files = Vec::new();
    collect_files(&package.join("tests"), &mut files)?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let mut waiting = programs(package, &manifest, &files);
    let mut reached = BTreeSet::new();
    while let Some(file) = waiting.pop() {
        if reached.insert(file.clone()) {
            let text = std::fs::read_to_string(&file)?;
            waiting.extend(modules(&file, &text).into_iter().filter(|path| path.is_file()));
        }
    }
    files.retain(|path| !reached.contains(path));
    files.sort();
    Ok(files)
}

/// Returns the root files of a package's test programs: those that the manifest names, and with
/// `autotests` those that cargo finds.
fn programs(package: &Path, manifest: &str, files: &[PathBuf]) -> Vec<PathBuf> {
    let named = manifest.lines().filter_map(|line| line.strip_prefix("path = \"tests/"));
    let named = named.filter_map(|rest| rest.strip_suffix('"'));
    let mut roots: Vec<PathBuf> = named.map(|rest| package.join("tests").join(rest)).collect();
    if !manifest.lines().any(|line| line == "autotests = false") {
        let tests = package.join("tests");
        let is_root = |path: &&PathBuf| {
            let above = path.parent();
            let is_main = path.file_name().is_some_and(|name| name == "main.rs");
            above == Some(&tests) || (is_main && above.and_then(Path::parent) == Some(&tests))
        };
        roots.extend(files.iter().filter(is_root).cloned());
    }
    roots
}

/// Returns where the modules that a file declares may lie.
fn modules(file: &Path, text: &str) -> Vec<PathBuf> {
    let here = file.parent().unwrap_or(Path::new(""));
    let stem = file.file_stem().unwrap_or_default();
    let owns_folder = stem == "main" || stem == "mod" || stem == "lib";
    let mut found = Vec::new();
    let mut path = None;
    for line in text.lines().map(str::trim) {
        if let Some(given) = line.strip_prefix("#[path = \"") {
            path = given.strip_suffix("\"]");
            continue;
        }
        let declared = line.strip_suffix(';').and_then(|line| line.split_once("mod "));
        let is_public = |before: &str| before.is_empty() || before.starts_with("pub");
        let Some((_, name)) = declared.filter(|(before, _)| is_public(before)) else { continue };
        if let Some(path) = path.take() {
            found.push(here.join(path));
            continue;
        }
        // A root of cargo's own has its modules beside it whatever its name is.
        let folders = match owns_folder {
            true => vec![here.to_owned()],
            false => vec![here.join(stem), here.to_owned()],
        };
        for folder in folders {
            found.extend([folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")]);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_of_tests_is_part_of_a_test_program() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_test_file_that_no_program_names_is_found() {
        let package = std::env::temp_dir().join(format!("xtask-tests-{}", std::process::id()));
        let tests = package.join("tests");
        let write = |path: &str, text: &str| {
            let path = tests.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("main.rs", "mod common;\nmod a;\n");
        write("common/mod.rs", "pub mod deep;\n");
        write("common/deep.rs", "");
        write("a.rs", "mod below;\n");
        write("a/below.rs", "");
        write("lost.rs", "mod below;\n");
        write("lost/below.rs", "");
        let names = |manifest: &str| {
            std::fs::write(package.join("Cargo.toml"), manifest).unwrap();
            let found = unreached(&package).unwrap();
            let shown = found.iter().map(|path| path.strip_prefix(&tests).unwrap());
            shown.map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        let one = "autotests = false\n\n[[test]]\nname = \"x\"\npath = \"tests/main.rs\"\n";
        assert_eq!(names(one), ["lost/below.rs", "lost.rs"]);
        assert_eq!(names("[package]\n"), [""; 0]);
        std::fs::remove_dir_all(&package).unwrap();
    }
}
