//! The requirements register against the tests: the rows that a test proves, and the open ones.
//!
//! A test proves a row by naming it after the word `Proves` in a comment beside it, as in
//! `/// Proves CSI-PROBE-01.` The register holds binding rows alone, of the levels MUST, MUST NOT,
//! TEST and NOTE. An id that it does not hold is an error: it is a spelling mistake, or an invented
//! requirement.

use crate::run::{self, workspace_root};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct Options {
    /// Only rows of this document, by any part of its name (healer, replica-scaleup, csi-v1.8).
    #[arg(long)]
    source: Option<String>,
    /// List each open row with its text.
    #[arg(long)]
    open: bool,
    /// List each proven row with the places that prove it.
    #[arg(long)]
    proven: bool,
}

const LEVELS: [&str; 4] = ["MUST", "MUST NOT", "TEST", "NOTE"];

/// One row of the register.
#[derive(Debug, PartialEq)]
pub struct Requirement {
    pub id: String,
    pub source: String,
    pub level: String,
    pub text: String,
}

/// Places that name an id: `file:line`.
type Claims = BTreeMap<String, Vec<String>>;

pub fn run(options: &Options) -> Result<()> {
    let register = read_register()?;
    let claims = read_claims()?;
    refuse_unknown(&register, &claims)?;

    let chosen: Vec<_> = register
        .iter()
        .filter(|row| options.source.as_ref().is_none_or(|part| row.source.contains(part.as_str())))
        .collect();
    if chosen.is_empty() {
        let sources: BTreeSet<_> = register.iter().map(|row| row.source.as_str()).collect();
        let sources: Vec<_> = sources.into_iter().collect();
        bail!("no document of that name; the register has {}", sources.join(", "));
    }
    let proven = |row: &Requirement| claims.contains_key(&row.id);
    if options.proven {
        for row in chosen.iter().filter(|row| proven(row)) {
            println!("{:<24} {}", row.id, claims[&row.id].join(" "));
        }
    }
    if options.open {
        for row in chosen.iter().filter(|row| !proven(row)) {
            println!("{:<24} {:<9} {}", row.id, row.level, row.text);
        }
    }
    let mut sources: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for row in &chosen {
        let (named, all) = sources.entry(&row.source).or_default();
        *named += usize::from(proven(row));
        *all += 1;
    }
    println!("{:<42} {:>7} {:>7} {:>7}", "document", "binding", "proven", "open");
    for (source, (named, all)) in &sources {
        println!("{source:<42} {all:>7} {named:>7} {:>7}", all - named);
    }
    let named = chosen.iter().filter(|row| proven(row)).count();
    println!("{:<42} {:>7} {named:>7} {:>7}", "all", chosen.len(), chosen.len() - named);
    Ok(())
}

/// Fails on the first claims that name no row; the lints run it too.
pub fn check_ids() -> Result<()> {
    refuse_unknown(&read_register()?, &read_claims()?)
}

fn refuse_unknown(register: &[Requirement], claims: &Claims) -> Result<()> {
    let ids: BTreeSet<_> = register.iter().map(|row| row.id.as_str()).collect();
    let unknown: Vec<_> = claims
        .iter()
        .filter(|(id, _)| !ids.contains(id.as_str()))
        .map(|(id, places)| format!("{id} ({})", places.join(", ")))
        .collect();
    if !unknown.is_empty() {
        bail!(
            "tests name requirements that docs/requirements.csv does not hold: {}",
            unknown.join("; ")
        );
    }
    Ok(())
}

fn read_register() -> Result<Vec<Requirement>> {
    let path = workspace_root().join("docs/requirements.csv");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    parse_register(&text).with_context(|| format!("parse {}", path.display()))
}

fn parse_register(text: &str) -> Result<Vec<Requirement>> {
    let mut rows = csv_rows(text).into_iter();
    let header = rows.next().context("the register is empty")?;
    if header != ["id", "source", "place", "level", "requirement"] {
        bail!("the register's columns are {header:?}, not id, source, place, level, requirement");
    }
    rows.map(|row| {
        let [id, source, _place, level, text]: [String; 5] =
            row.try_into().map_err(|row| anyhow::anyhow!("a row without five fields: {row:?}"))?;
        if !LEVELS.contains(&level.as_str()) {
            bail!(
                "{id} has the level {level}, which binds nobody: there are {}",
                LEVELS.join(", ")
            );
        }
        Ok(Requirement { id, source, level, text })
    })
    .collect()
}

/// RFC 4180: quoted fields may hold commas, doubled quotes and line ends.
fn csv_rows(text: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut field) = (Vec::new(), Vec::new(), String::new());
    let mut quoted = false;
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => {
                field.push('"');
                letters.next();
            }
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(std::mem::take(&mut field)),
            '\n' if !quoted => {
                row.push(std::mem::take(&mut field));
                rows.push(std::mem::take(&mut row));
            }
            '\r' if !quoted => {}
            other => field.push(other),
        }
    }
    if !field.is_empty() || !row.is_empty() {
        row.push(field);
        rows.push(row);
    }
    rows
}

fn read_claims() -> Result<Claims> {
    let root = workspace_root();
    let mut files = Vec::new();
    for directory in run::CODE_DIRECTORIES {
        collect_files(&root.join(directory), &mut files)?;
    }
    files.sort();
    let mut claims = Claims::new();
    for path in files {
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let shown = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
        for (line, id) in claims_in(&text) {
            claims.entry(id).or_default().push(format!("{shown}:{line}"));
        }
    }
    Ok(claims)
}

/// Collects the Rust and Python files below `directory`, without build output.
pub fn collect_files(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !directory.is_dir() {
        return Ok(());
    }
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            // Cargo's own mark decides and not the name: a module may be called `target`.
            let is_build_output = path.join("CACHEDIR.TAG").exists();
            if !is_build_output && !name.starts_with('.') && name != "__pycache__" {
                collect_files(&path, files)?;
            }
        } else if name.ends_with(".rs") || name.ends_with(".py") {
            files.push(path);
        }
    }
    Ok(())
}

/// Returns the ids claimed in one file, with their line. Only comment lines count; a claim
/// continues over line ends for as long as the line before ends with a comma.
fn claims_in(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut goes_on = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let is_comment =
            line.starts_with("//") || line.starts_with('#') || line.starts_with("\"\"\"");
        let claim = match line.split_once("Proves ") {
            Some((_, claim)) if is_comment || line.starts_with("Proves ") => claim,
            _ if goes_on && is_comment => line.trim_start_matches(['/', '#', '!', ' ']),
            _ => {
                goes_on = false;
                continue;
            }
        };
        let mut rest = claim;
        loop {
            let end = rest
                .find(|letter: char| {
                    !(letter.is_ascii_uppercase() || letter.is_ascii_digit() || letter == '-')
                })
                .unwrap_or(rest.len());
            let id = &rest[..end];
            if !id.contains('-') || !id.ends_with(|letter: char| letter.is_ascii_digit()) {
                break;
            }
            found.push((index + 1, id.to_string()));
            rest = rest[end..].trim_start();
            match rest.strip_prefix(',').or_else(|| rest.strip_prefix("and ")) {
                Some(next) => rest = next.trim_start().trim_start_matches("and ").trim_start(),
                None => break,
            }
        }
        goes_on = line.ends_with(',');
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_register_of_the_project_is_read_whole() {
        let register = read_register().unwrap();
        assert_eq!(register.len(), 810);
        let ids: BTreeSet<_> = register.iter().map(|row| &row.id).collect();
        assert_eq!(ids.len(), register.len(), "an id stands twice");
    }

    /// Proves SCALE-GRAD-01.
    #[test]
    fn every_case_of_the_testcases_of_the_replica_scale_up_is_named_by_a_test_of_real_processes() {
        let (register, claims) = (read_register().unwrap(), read_claims().unwrap());
        let cases: Vec<_> =
            register.iter().filter(|row| row.id.starts_with("SCALE-TEST-")).collect();
        assert_eq!(cases.len(), 12);
        for case in cases {
            let places = claims.get(&case.id).into_iter().flatten();
            let real = places.filter(|place| place.starts_with("crates/quoin/tests/"));
            assert!(real.count() > 0, "no test of processes names {}: {}", case.id, case.text);
        }
    }

    #[test]
    fn every_module_is_read_whatever_its_name_and_build_output_is_not() {
        let root = workspace_root();
        let mut found = Vec::new();
        for directory in run::CODE_DIRECTORIES {
            collect_files(&root.join(directory), &mut found).unwrap();
        }
        let target = root.join("crates/quoin-target/src/lib.rs");
        assert!(found.contains(&target), "a module called target is a module like others");

        let directory = tempfile::tempdir().unwrap();
        let built = directory.path().join("target/debug");
        std::fs::create_dir_all(&built).unwrap();
        std::fs::write(built.join("made.rs"), "").unwrap();
        std::fs::write(directory.path().join("target/CACHEDIR.TAG"), "").unwrap();
        std::fs::write(directory.path().join("own.rs"), "").unwrap();
        let mut found = Vec::new();
        collect_files(directory.path(), &mut found).unwrap();
        assert_eq!(found, [directory.path().join("own.rs")]);
    }

    #[test]
    fn quoted_fields_hold_commas_quotes_and_line_ends() {
        let rows = csv_rows("a,\"b, \"\"c\"\"\nd\",e\r\n1,2,3");
        assert_eq!(rows, [vec!["a", "b, \"c\"\nd", "e"], vec!["1", "2", "3"]]);
    }

    #[test]
    fn claims_are_read_from_comments_only_and_over_line_ends() {
        let word = "Proves";
        let text = format!(
            "/// {word} CSI-PROBE-01, CSI-PROBE-02,\n/// REPL1-ERR-03.\nlet x = \"{word} CSI-NOT-01\";\n\
             # {word} HEAL-REQ-01 and HEAL-REQ-02.\n//! {word} nothing in particular\n"
        );
        let found: Vec<_> =
            claims_in(&text).into_iter().map(|(line, id)| format!("{line} {id}")).collect();
        assert_eq!(
            found,
            [
                "1 CSI-PROBE-01",
                "1 CSI-PROBE-02",
                "2 REPL1-ERR-03",
                "4 HEAL-REQ-01",
                "4 HEAL-REQ-02"
            ]
        );
    }

    #[test]
    fn a_row_that_binds_nobody_is_refused() {
        let row =
            |level: &str| format!("id,source,place,level,requirement\nA-1,a.txt,1,{level},b\n");
        assert_eq!(parse_register(&row("MUST NOT")).unwrap().len(), 1);
        let message = parse_register(&row("MAY")).unwrap_err().to_string();
        assert!(message.contains("A-1") && message.contains("MAY"), "{message}");
    }

    #[test]
    fn an_id_that_the_register_does_not_hold_is_refused_by_name_and_place() {
        let register = read_register().unwrap();
        let claims = Claims::from([("CSI-NOWHERE-99".to_string(), vec!["a.rs:7".to_string()])]);
        let message = refuse_unknown(&register, &claims).unwrap_err().to_string();
        assert!(message.contains("CSI-NOWHERE-99") && message.contains("a.rs:7"), "{message}");
        assert!(refuse_unknown(&register, &Claims::new()).is_ok());
    }
}
