//! Lengths and alphabets of the fields that clients send.
//!
//! Strings hold 128 bytes, maps 4 KiB in all; paths, node ids and secrets have bounds of their own.
//! A longer value is refused as invalid, deletes included, before anything happens.

use std::collections::HashMap;
use std::path::PathBuf;

use tonic::Status;

use crate::refusal::{invalid, missing};

const STRING_BYTES: usize = 128;
const MAP_BYTES: usize = 4096;
/// Secrets of orchestrators are larger than maps may be.
const SECRETS_BYTES: usize = 1 << 20;
const NODE_ID_BYTES: usize = 256;
/// `PATH_MAX` without its terminating zero.
const PATH_BYTES: usize = 4095;

/// Checks a string that may be empty.
pub fn optional(field: &str, value: &str) -> Result<(), Status> {
    if value.len() > STRING_BYTES {
        let why = format!("has {} bytes; {STRING_BYTES} are allowed", value.len());
        return Err(invalid(field, why));
    }
    Ok(())
}

/// Checks a string that may not be empty.
pub fn required(field: &str, value: &str) -> Result<(), Status> {
    if value.is_empty() {
        return Err(missing(field));
    }
    optional(field, value)
}

/// Checks the name of a new object: any Unicode but control characters other than tab, LF and CR.
pub fn name(field: &str, value: &str) -> Result<(), Status> {
    required(field, value)?;
    let banned = |letter: char| matches!(letter, '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\x7f'..='\u{9f}');
    match value.chars().find(|letter| banned(*letter)) {
        Some(letter) => {
            let why = format!("contains the control character U+{:04X}", u32::from(letter));
            Err(invalid(field, why))
        }
        None => Ok(()),
    }
}

/// Checks a node id; empty where the RPC allows that.
pub fn node_id(field: &str, value: &str) -> Result<(), Status> {
    if value.len() > NODE_ID_BYTES {
        let why = format!("has {} bytes; {NODE_ID_BYTES} are allowed", value.len());
        return Err(invalid(field, why));
    }
    Ok(())
}

/// Checks a map of parameters or context.
pub fn map(field: &str, value: &HashMap<String, String>) -> Result<(), Status> {
    let bytes: usize = value.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAP_BYTES {
        return Err(invalid(field, format!("has {bytes} bytes; {MAP_BYTES} are allowed")));
    }
    Ok(())
}

/// Checks a map of secrets. Quoin reads one of them, for encrypted volumes; a caller that sends
/// others, or sends them everywhere, must send a well-formed map. A refused key is not repeated in the message: users confuse keys
/// and values.
pub fn secrets(value: &HashMap<String, String>) -> Result<(), Status> {
    let plain = |key: &String| {
        !key.is_empty()
            && key
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.'))
    };
    if !value.keys().all(plain) {
        let why = "has a key with other characters than letters, digits, '-', '_' and '.'";
        return Err(invalid("secrets", why));
    }
    let bytes: usize = value.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > SECRETS_BYTES {
        return Err(invalid("secrets", format!("has {bytes} bytes; {SECRETS_BYTES} are allowed")));
    }
    Ok(())
}

/// Checks a path that must be present and absolute.
pub fn path(field: &str, value: &str) -> Result<PathBuf, Status> {
    if value.is_empty() {
        return Err(missing(field));
    }
    optional_path(field, value).map(|path| path.expect("not empty"))
}

/// Checks a path that may be empty, and is absolute otherwise.
pub fn optional_path(field: &str, value: &str) -> Result<Option<PathBuf>, Status> {
    if value.is_empty() {
        return Ok(None);
    }
    if value.len() > PATH_BYTES {
        let why = format!("has {} bytes; the system allows {PATH_BYTES}", value.len());
        return Err(invalid(field, why));
    }
    if !value.starts_with('/') {
        return Err(invalid(field, "is not an absolute path"));
    }
    if value.contains('\0') {
        return Err(invalid(field, "contains a NUL byte"));
    }
    let path = PathBuf::from(value);
    if path.components().any(|part| part == std::path::Component::ParentDir) {
        return Err(invalid(field, "contains '..'; write the path without it"));
    }
    if path.file_name().is_none() {
        return Err(invalid(field, "is the root directory"));
    }
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    fn refused(outcome: Result<(), Status>) {
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(!status.message().is_empty());
    }

    /// Proves CSI-SIZE-02, CSI-CREATEVOLUME-14: the rule itself.
    #[test]
    fn a_string_of_128_bytes_is_accepted_and_one_of_129_is_not() {
        optional("f", &"x".repeat(128)).unwrap();
        refused(optional("f", &"x".repeat(129)));
        name("name", &"ü".repeat(64)).unwrap();
        refused(name("name", &format!("{}x", "ü".repeat(64))));
        refused(name("name", ""));
        node_id("node_id", &"n".repeat(256)).unwrap();
        refused(node_id("node_id", &"n".repeat(257)));
    }

    /// Proves CSI-SIZE-03: the rule itself.
    #[test]
    fn a_map_of_4096_bytes_is_accepted_and_a_larger_one_is_not() {
        let mut value = HashMap::from([("k".repeat(96), "v".repeat(4000))]);
        map("parameters", &value).unwrap();
        value.insert("x".to_owned(), String::new());
        refused(map("parameters", &value));
    }

    /// Proves CSI-CREATEVOLUME-12, CSI-CREATEVOLUME-13: for every character.
    #[test]
    fn exactly_the_banned_characters_are_refused_in_names() {
        for letter in '\0'..=char::MAX {
            let code = u32::from(letter);
            let banned = matches!(code, 0..=8 | 0xb | 0xc | 0xe..=0x1f | 0x7f..=0x9f);
            assert_eq!(name("name", &format!("a{letter}b")).is_err(), banned, "U+{code:04X}");
        }
    }

    /// Proves CSI-SECRET-02, CSI-SECRET-01: a malformed key is refused and not repeated.
    #[test]
    fn keys_of_secrets_have_an_alphabet_and_are_never_printed() {
        let of = |key: &str| HashMap::from([(key.to_owned(), "hunter2".to_owned())]);
        secrets(&of("user.name-1_A")).unwrap();
        for key in ["", "pass word", "a/b", "ü", "hunter2\n"] {
            let status = secrets(&of(key)).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(!status.message().contains("hunter2"));
        }
        secrets(&HashMap::from([("k".to_owned(), "x".repeat(100_000))])).unwrap();
    }

    #[test]
    fn paths_are_absolute_plain_and_as_long_as_the_system_allows() {
        path("p", &format!("/{}", "x".repeat(127))).unwrap();
        path("p", &format!("/{}", "x/".repeat(2000))).unwrap();
        for bad in
            ["", "relative", "./x", "/", "/a/../b", "/a\0b", &format!("/{}", "x".repeat(4096))]
        {
            refused(path("p", bad).map(drop));
        }
        assert_eq!(optional_path("p", "").unwrap(), None);
    }

    /// Each check with its limit: a value of that length, and the length that is still taken.
    #[test]
    fn every_field_is_taken_at_its_limit_and_refused_one_byte_beyond_it() {
        type Check = fn(usize) -> Result<(), Status>;
        let of_map = |bytes: usize| -> HashMap<String, String> {
            // In two pairs, as the sum counts.
            [("k".to_owned(), "v".repeat(10)), ("l".repeat(5), "w".repeat(bytes - 16))].into()
        };
        let rows: [(&str, usize, Check); 8] = [
            ("an optional string", 128, |bytes| optional("f", &"x".repeat(bytes))),
            ("a required string", 128, |bytes| required("f", &"x".repeat(bytes))),
            ("a name", 128, |bytes| name("f", &"x".repeat(bytes))),
            ("a node id", 256, |bytes| node_id("f", &"x".repeat(bytes))),
            ("a path", 4095, |bytes| path("f", &format!("/{}", "x".repeat(bytes - 1))).map(drop)),
            ("an optional path", 4095, |bytes| {
                optional_path("f", &format!("/{}", "x".repeat(bytes - 1))).map(drop)
            }),
            ("a map", 4096, |_| Ok(())),
            ("secrets", 1 << 20, |_| Ok(())),
        ];
        for (what, limit, check) in rows {
            for (bytes, is_taken) in [(limit - 1, true), (limit, true), (limit + 1, false)] {
                let outcome = match what {
                    "a map" => map("f", &of_map(bytes)),
                    "secrets" => secrets(&of_map(bytes)),
                    _ => check(bytes),
                };
                assert_eq!(outcome.is_ok(), is_taken, "{what} of {bytes} bytes");
                if let Err(status) = outcome {
                    assert_eq!(status.code(), Code::InvalidArgument, "{what}");
                }
            }
        }
        for empty in [required("f", ""), name("f", ""), path("f", "").map(drop)] {
            assert_eq!(empty.unwrap_err().code(), Code::InvalidArgument);
        }
        for empty in [optional("f", ""), node_id("f", ""), optional_path("f", "").map(drop)] {
            empty.unwrap();
        }
        for whole in ["/a", "/a/", "/a/.", "/a//b"] {
            path("p", whole).unwrap();
        }
        for root in ["/", "//", "/.", "/..", "/a/.."] {
            refused(path("p", root).map(drop));
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_checks_panic(text: String) {
            let _ = name("n", &text);
            let _ = path("p", &text);
            let _ = secrets(&HashMap::from([(text.clone(), text)]));
        }
    }
}
