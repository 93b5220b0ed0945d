//! Messages between the processes of a cluster and the controller: each recorded field, value and
//! call is still there under its number, so that processes of two versions understand each other.
//! Additions are free.

use std::collections::BTreeSet;

use quoin_recorded::Recorded;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const RAISE: &str = "nothing: take a new number for what is new, and keep the old one readable";

/// Returns one line for each field, value and call: its place, its number, its type.
fn facts(proto: &str) -> BTreeSet<String> {
    let text: String = proto
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join(" ");
    let (mut facts, mut within, mut statement) = (BTreeSet::new(), Vec::new(), String::new());
    for c in text.chars() {
        match c {
            '{' => {
                let words: Vec<&str> = statement.split_whitespace().collect();
                let name = words.get(1).copied().unwrap_or_default();
                // A call with options, or a field with them, has its braces too.
                if words.first() == Some(&"rpc") {
                    facts.insert(format!("{} {}", within.join("."), words.join(" ")));
                }
                within.push(name.to_owned());
                statement.clear();
            }
            '}' => {
                within.pop();
                statement.clear();
            }
            ';' => {
                let said = statement.split('[').next().unwrap_or_default();
                let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
                let is_fact =
                    !within.is_empty() && (said.contains('=') || said.starts_with("rpc "));
                if is_fact && !said.starts_with("option ") {
                    facts.insert(format!("{} {said}", within.join(".")));
                }
                statement.clear();
            }
            c => statement.push(c),
        }
    }
    facts
}

#[test]
fn every_message_and_call_that_was_recorded_is_still_understood() {
    let here = facts(include_str!("../proto/control.proto"));
    assert!(here.len() > 100, "{here:?}");
    let recorded = Recorded::current(CRATE, "control", 1, RAISE);
    let text = here.iter().map(|fact| format!("{fact}\n")).collect::<String>();
    if !recorded.names(".txt").contains(&"proto".to_owned()) {
        recorded.holds_text("proto.txt", &text);
    }
    let before = recorded.read_text("proto.txt");
    if before.lines().any(|fact| !here.contains(fact)) {
        // Compares with the recording, or records the present text where that was requested.
        recorded.holds_text("proto.txt", &text);
    }
}

#[test]
fn a_field_that_moved_or_changed_its_type_is_noticed() {
    let proto = "package q; message A { string a = 1; // a\n repeated B b = 2 [deprecated = true];
        oneof c { int32 d = 3; } } service S { rpc Get(A) returns (stream A); }";
    let said: Vec<String> = facts(proto).into_iter().collect();
    let meant = ["A repeated B b = 2", "A string a = 1", "A.c int32 d = 3"];
    assert_eq!(&said[..3], meant);
    assert_eq!(said[3], "S rpc Get(A) returns (stream A)");
    assert_ne!(facts(proto), facts(&proto.replace("d = 3", "d = 4")));
}
