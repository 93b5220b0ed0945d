//! Circles of modules: modules that name each other, directly or by way of others, can be understood only
//! together. So the largest circle of a crate is bounded; the cluster core has none.
//!
//! A module names another one by a path that begins with `crate` or `super`. What a parent re-exports of its
//! children does not count, nor do tests.

use crate::run::workspace_root;
use crate::trace::collect_files;
use anyhow::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Sources of a crate, and how many modules its largest circle may have.
const BOUNDS: [(&str, usize); 2] =
    [("crates/quoin-cluster/src", 1), ("crates/quoin-control/src", 25)];

/// Path of a module below its crate: one name for each level.
type Module = Vec<String>;

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let mut violations = Vec::new();
    for (source, bound) in BOUNDS {
        let root = workspace_root().join(source);
        let mut paths = Vec::new();
        collect_files(&root, &mut paths)?;
        let mut files = BTreeMap::new();
        for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
            let inside = path.strip_prefix(&root).unwrap_or(path);
            files.insert(module_of(inside), std::fs::read_to_string(path)?);
        }
        violations.extend(beyond(&files, bound).map(|told| format!("{source}: {told}")));
    }
    Ok(violations)
}

/// Returns the largest circle in words if it has more modules than the bound.
fn beyond(files: &BTreeMap<Module, String>, bound: usize) -> Option<String> {
    let circle = largest_circle(&graph(files));
    let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
    (circle.len() > bound).then(|| {
        let few = names.len();
        format!(
            "{few} modules name each other in a circle, at most {bound} may: {}",
            names.join(", ")
        )
    })
}

fn module_of(path: &Path) -> Module {
    let whole = path.with_extension("");
    let mut names: Module = whole.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    names.pop_if(|last| last == "mod" || last == "lib");
    names
}

/// Returns for each module those that it names.
fn graph(files: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeSet<Module>> {
    let tests = test_modules(files);
    let is_test = |module: &Module| (1..=module.len()).any(|n| tests.contains(&module[..n]));
    let product = || files.keys().filter(|module| !is_test(module));
    let modules: BTreeSet<&Module> = product().collect();
    let named_by = |module: &Module| {
        let mut named = BTreeSet::new();
        for path in paths(module, &tokens(&files[module])) {
            let found = (1..=path.len()).rev().map(|n| path[..n].to_vec());
            named.extend(found.into_iter().find(|found| modules.contains(found)));
        }
        named.remove(module);
        named
    };
    product().map(|module| (module.clone(), named_by(module))).collect()
}

/// Returns the modules that are declared for tests alone.
fn test_modules(files: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut tests = BTreeSet::new();
    for (module, text) in files {
        let mut lines = text.lines().map(str::trim);
        while let Some(line) = lines.next() {
            if line != "#[cfg(test)]" {
                continue;
            }
            let declared = lines.next().and_then(|line| line.strip_suffix(';'));
            if let Some((_, name)) = declared.and_then(|line| line.rsplit_once("mod ")) {
                tests.insert([module.as_slice(), &[name.to_owned()]].concat());
            }
        }
    }
    tests
}

/// Returns names, `::` and single characters of the code outside of comments and tests.
fn tokens(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let mut tokens = Vec::new();
    for line in code.lines() {
        let mut rest = line.split("//").next().unwrap_or_default();
        while let Some(first) = rest.chars().next() {
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            let length = if is_name(first) {
                rest.find(|c| !is_name(c)).unwrap_or(rest.len())
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            let (token, after) = rest.split_at(length);
            if !token.trim().is_empty() {
                tokens.push(token);
            }
            rest = after;
        }
    }
    tokens
}

/// Returns the paths below the crate's root that a module's code names.
fn paths(module: &Module, tokens: &[&str]) -> Vec<Module> {
    let mut found = Vec::new();
    let mut at = 0;
    while at + 1 < tokens.len() {
        let begins = tokens[at + 1] == "::" && (at == 0 || tokens[at - 1] != "::");
        let mut base = match tokens[at] {
            "crate" if begins => Vec::new(),
            "super" if begins => module.clone(),
            _ => {
                at += 1;
                continue;
            }
        };
        if tokens[at] == "super" {
            base.pop();
        }
        at = read_tree(tokens, at + 2, &base, &mut found);
    }
    found
}

/// Reads what follows a path's `::`: a name, or several in braces. Returns the place behind it.
fn read_tree(tokens: &[&str], mut at: usize, base: &Module, found: &mut Vec<Module>) -> usize {
    let is = |at: usize, token: &str| tokens.get(at) == Some(&token);
    if is(at, "{") {
        at += 1;
        while at < tokens.len() && !is(at, "}") {
            at = read_tree(tokens, at, base, found);
            if is(at, "as") {
                at += 2;
            }
            if is(at, ",") {
                at += 1;
            } else if !is(at, "}") {
                return at;
            }
        }
        return at + 1;
    }
    let Some(name) = tokens.get(at) else { return at };
    let mut path = base.clone();
    match *name {
        "super" => drop(path.pop()),
        "self" => {}
        name => path.push(name.to_owned()),
    }
    if is(at + 1, "::") {
        return read_tree(tokens, at + 2, &path, found);
    }
    found.push(path);
    at + 1
}

/// Returns the most modules that all reach each other.
fn largest_circle(graph: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Module> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> =
        graph.keys().map(|module| (module, reach(graph, module))).collect();
    let circle = |module: &Module| -> Vec<Module> {
        let both = |other: &&&Module| reached[**other].contains(module) || **other == module;
        let mut circle: Vec<Module> =
            reached[module].iter().filter(both).map(|other| (*other).clone()).collect();
        if circle.is_empty() {
            circle.push(module.clone());
        }
        circle
    };
    graph.keys().map(circle).max_by_key(Vec::len).unwrap_or_default()
}

/// Returns the modules that one reaches; itself by a circle only.
fn reach<'a>(
    graph: &'a BTreeMap<Module, BTreeSet<Module>>,
    from: &'a Module,
) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&Module> = graph[from].iter().collect();
    while let Some(module) = open.pop() {
        if reached.insert(module) {
            open.extend(&graph[module]);
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> BTreeMap<Module, String> {
        let file = |(path, text): &(&str, &str)| (module_of(Path::new(path)), (*text).to_owned());
        list.iter().map(file).collect()
    }

    #[test]
    fn a_circle_is_found_over_braces_over_super_and_over_calls() {
        let tree = files(&[
            ("lib.rs", "pub mod a;\npub mod b;\nuse a::A;"),
            ("a/mod.rs", "pub mod inner;\nuse crate::{\n    b::{self, B},\n    other,\n};"),
            ("a/inner.rs", "use super::super::a::A;"),
            ("b.rs", "fn f() { crate::c::g() }"),
            ("c.rs", "use super::a::inner as x;"),
            ("other.rs", "// use crate::a;\n#[cfg(test)]\nmod tests { use crate::a; }"),
        ]);
        let circle = largest_circle(&graph(&tree));
        let names: Vec<String> = circle.iter().map(|module| module.join("::")).collect();
        assert_eq!(names, ["a", "a::inner", "b", "c"]);
        assert!(beyond(&tree, 3).unwrap().contains("a, a::inner, b, c"));
        assert_eq!(beyond(&tree, 4), None);
    }

    #[test]
    fn modules_for_tests_and_modules_without_a_circle_are_none() {
        let tree = files(&[
            ("a.rs", "#[cfg(test)]\nmod examples;\nuse crate::b::B;"),
            ("a/examples.rs", "use super::A;"),
            ("b.rs", "#[cfg(test)]\npub(crate) mod recorded;"),
            ("b/recorded.rs", "use crate::a;"),
        ]);
        assert_eq!(largest_circle(&graph(&tree)).len(), 1);
        assert_eq!(beyond(&tree, 1), None);
    }

    #[test]
    fn the_bounds_hold() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }
}
