//! Formats as earlier versions wrote them: bytes that are kept in the tree, one folder a version,
//! and held against what this build writes.
//!
//! A version of Quoin meets what its predecessor wrote: frames of a pool that is updated later, a
//! pool's disk, the controller's records. Tests name a value and give its bytes to
//! [`Recorded::holds`]; it fails where they are not those that were recorded, so no format
//! changes by accident. What was recorded is never changed once a version was released: readers
//! go on reading it ([`Recorded::all`]), and a change is recorded beside it under a new version.
//!
//! `cargo xtask record-formats` writes what is missing. Bytes lie in the tree as lines of hex with
//! repeated lines counted, so a change can be read in a diff.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Variable that `cargo xtask record-formats` sets: `new` writes what was never recorded, `again`
/// replaces what differs.
pub const ENVIRONMENT: &str = "QUOIN_RECORD_FORMATS";

const ROW: usize = 32;

/// Recorded form of one version of one format.
#[derive(Clone, Debug)]
pub struct Recorded {
    folder: PathBuf,
    /// Version to raise on a change, as in "PROTOCOL_MAX in quoin-wire/src/hello.rs".
    raise: &'static str,
}

impl Recorded {
    /// The version that this build writes. `manifest` is the crate's `CARGO_MANIFEST_DIR`.
    pub fn current(manifest: &str, format: &str, version: u64, raise: &'static str) -> Self {
        Self { folder: folder_of(manifest, format).join(version.to_string()), raise }
    }

    /// Every version that was ever recorded, oldest first: this build must read them all.
    ///
    /// # Panics
    /// Where none was.
    pub fn all(manifest: &str, format: &str, raise: &'static str) -> Vec<Self> {
        let parent = folder_of(manifest, format);
        let entries = std::fs::read_dir(&parent);
        let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", parent.display()));
        let mut versions: Vec<u64> =
            entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        versions.sort_unstable();
        assert!(!versions.is_empty(), "{}: nothing was recorded", parent.display());
        let folder = |version: u64| parent.join(version.to_string());
        versions.into_iter().map(|v| Self { folder: folder(v), raise }).collect()
    }

    /// Asserts that these bytes are what was recorded under this name.
    ///
    /// # Panics
    /// Where they are not, with what to do about it.
    pub fn holds(&self, name: &str, bytes: &[u8]) {
        self.holds_text(&format!("{name}.hex"), &dump(bytes));
    }

    /// Does the same as [`Recorded::holds`] for text, which is kept as it is, under its own ending.
    ///
    /// # Panics
    /// Where it is not what was recorded.
    pub fn holds_text(&self, file: &str, text: &str) {
        let path = self.folder.join(file);
        let order = std::env::var(ENVIRONMENT).unwrap_or_default();
        let recorded = std::fs::read_to_string(&path).ok();
        if recorded.as_deref() == Some(text) {
            return;
        }
        if order == "again" || (order == "new" && recorded.is_none()) {
            write(&path, text);
            return;
        }
        let Some(recorded) = recorded else {
            panic!(
                "{}: never recorded. Where this is new, record it: cargo xtask record-formats",
                path.display()
            )
        };
        panic!(
            "{}: this build writes other bytes than were recorded, {}.\n\
             If nobody meant to change the format, undo it: a cluster is updated process by \
             process, and the other side still reads and writes what was recorded.\n\
             If it was meant: raise {}, go on reading (and, towards older peers, writing) the \
             version before, and record the new one beside it: cargo xtask record-formats.\n\
             Only before the first release may what was recorded be replaced: cargo xtask \
             record-formats --again, and CHANGELOG.md says that disks and peers of the build \
             before do not fit.",
            path.display(),
            first_difference(&recorded, text),
            self.raise,
        );
    }

    /// The bytes that were recorded under this name.
    ///
    /// # Panics
    /// Where there are none.
    pub fn read(&self, name: &str) -> Vec<u8> {
        let path = self.folder.join(format!("{name}.hex"));
        let text = self.read_text(&format!("{name}.hex"));
        restore(&text).unwrap_or_else(|line| panic!("{}: line {line} is damaged", path.display()))
    }

    /// The text that was recorded in this file.
    ///
    /// # Panics
    /// Where there is none.
    pub fn read_text(&self, file: &str) -> String {
        let path = self.folder.join(file);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// All that was recorded in files that end so, by name without that ending, in order.
    pub fn names(&self, ending: &str) -> Vec<String> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| {
                Some(entry.ok()?.file_name().to_str()?.strip_suffix(ending)?.into())
            })
            .collect();
        names.sort();
        names
    }
}

fn folder_of(manifest: &str, format: &str) -> PathBuf {
    Path::new(manifest).join("tests/formats").join(format)
}

fn write(path: &Path, text: &str) {
    let folder = path.parent().expect("a file in a folder");
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(path, text));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn first_difference(recorded: &str, now: &str) -> String {
    let differs = recorded.lines().zip(now.lines()).enumerate().find(|(_, (a, b))| a != b);
    match differs {
        Some((n, (was, is))) => format!("in line {}:\n  was {was}\n  is  {is}", n + 1),
        None => format!("{} lines instead of {}", now.lines().count(), recorded.lines().count()),
    }
}

/// Rows of hex; a row that equals the one before is only counted.
fn dump(bytes: &[u8]) -> String {
    let mut out = format!("{} bytes\n", bytes.len());
    let mut rows = bytes.chunks(ROW).peekable();
    while let Some(row) = rows.next() {
        for byte in row {
            write!(out, "{byte:02x}").expect("a string takes everything");
        }
        out.push('\n');
        let mut again = 0;
        while rows.next_if_eq(&row).is_some() {
            again += 1;
        }
        if again > 0 {
            writeln!(out, "* {again}").expect("a string takes everything");
        }
    }
    out
}

/// The bytes of a [`dump`], or the line that makes no sense.
fn restore(text: &str) -> Result<Vec<u8>, usize> {
    let mut lines = text.lines().enumerate();
    let length = lines.next().and_then(|(_, l)| l.strip_suffix(" bytes")?.parse().ok());
    let length: usize = length.ok_or(1usize)?;
    let (mut out, mut row) = (Vec::new(), Vec::new());
    for (n, line) in lines {
        let bad = || n + 1;
        let times = match line.strip_prefix("* ") {
            Some(again) => again.parse().map_err(|_| bad())?,
            None => {
                row.clear();
                for pair in line.as_bytes().chunks(2) {
                    let pair = std::str::from_utf8(pair).map_err(|_| bad())?;
                    row.push(u8::from_str_radix(pair, 16).map_err(|_| bad())?);
                }
                1
            }
        };
        for _ in 0..times {
            out.extend_from_slice(&row);
        }
        if out.len() > length {
            return Err(bad());
        }
    }
    if out.len() == length { Ok(out) } else { Err(text.lines().count()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_down_comes_back_and_rows_that_repeat_are_counted() {
        let zeroes = vec![0u8; 1 << 20];
        let mixed: Vec<u8> = (0..100u8).chain([7; 333]).chain(0..50).collect();
        for bytes in [&[][..], b"a", &zeroes, &mixed] {
            assert_eq!(restore(&dump(bytes)).unwrap(), bytes);
        }
        assert!(dump(&zeroes).len() < 200);
        assert!(restore("2 bytes\nzz\n").is_err() && restore("2 bytes\n00\n* 9\n").is_err());
        assert!(restore("2 bytes\n00\n").is_err() && restore("").is_err());
    }

    #[test]
    fn a_change_is_refused_with_what_to_raise_and_versions_are_found_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = folder.path().to_str().unwrap();
        for version in [10, 9] {
            let recorded = Recorded::current(manifest, "thing", version, "THING_VERSION");
            write(&recorded.folder.join("a.hex"), &dump(b"as it was"));
            recorded.holds("a", b"as it was");
        }
        let all = Recorded::all(manifest, "thing", "THING_VERSION");
        let last: Vec<_> = all.iter().map(|r| r.folder.file_name().unwrap().to_owned()).collect();
        assert_eq!(last, ["9", "10"]);
        assert_eq!(
            (all[0].names(".hex"), all[0].read("a")),
            (vec!["a".into()], b"as it was".into())
        );
        for (name, bytes, said) in [("a", &b"as it is"[..], "THING_VERSION"), ("b", b"", "never")] {
            let refused = std::panic::catch_unwind(|| all[1].holds(name, bytes)).unwrap_err();
            let refused = refused.downcast_ref::<String>().unwrap();
            assert!(refused.contains(said) && refused.contains("record-formats"), "{refused}");
        }
    }
}
