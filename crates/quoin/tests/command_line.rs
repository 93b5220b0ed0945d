//! The command line as a user meets it: what is refused, in which words, with which exit code.

use std::process::{Command, Output};

fn quoin(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(arguments)
        // No controller of this machine may answer.
        .env("QUOIN_SOCKET", "/nonexistent/admin.sock")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap()
}

/// Runs a command that must fail with `code`, and gives what it said.
fn refused(code: i32, arguments: &[&str]) -> String {
    let output = quoin(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed to stdout");
    said
}

#[test]
fn unknown_flags_and_commands_are_usage_errors_that_name_them() {
    assert!(refused(2, &["volume", "create", "db", "--sise", "1GiB"]).contains("--size"));
    assert!(refused(2, &["volume", "creat", "db"]).contains("create"));
    assert!(refused(2, &["volumes"]).contains("volume"));
    assert!(refused(2, &["volume", "list", "-o", "xml"]).contains("json"));
}

#[test]
fn sizes_of_zero_and_two_to_the_63_are_refused_before_any_controller_is_asked() {
    for (size, words) in [
        ("0", "above 0"),
        ("9223372036854775808", "largest volume"),
        ("ten", "unit"),
        ("-5", "unit"),
    ] {
        let said = refused(2, &["volume", "create", "db", &format!("--size={size}")]);
        assert!(said.contains(words), "{size}: {said}");
        let said = refused(2, &["volume", "resize", "db", &format!("--size={size}")]);
        assert!(said.contains(words), "{size}: {said}");
    }
}

#[test]
fn names_with_control_characters_or_of_no_or_too_many_letters_are_refused() {
    for (name, words) in
        [("a\u{1}b", "U+0001"), ("", "needs a name"), (&*"n".repeat(129), "at most 128")]
    {
        let said = refused(2, &["volume", "create", name, "--size", "1GiB"]);
        assert!(said.contains(words), "{name:?}: {said}");
    }
}

#[test]
fn a_missing_controller_is_named_with_the_way_out() {
    for arguments in [
        &["volume", "list"][..],
        &["volume", "create", "db", "--size", "1GiB"],
        &["pool", "list"],
        &["node", "list"],
        &["replica", "list"],
        &["events"],
        &["cluster", "info"],
        &["token", "create", "--role", "pool"],
    ] {
        let said = refused(1, arguments);
        assert!(said.contains("/nonexistent/admin.sock") && said.contains("quoin dev"), "{said}");
    }
}

#[test]
fn deleting_without_a_terminal_or_a_yes_destroys_nothing_and_says_how() {
    let said = refused(1, &["volume", "delete", "db"]);
    assert!(said.contains("destroys") && said.contains("--yes"), "{said}");
}

#[test]
fn help_teaches_the_first_steps_and_completion_knows_the_commands() {
    let help = quoin(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(text.contains("quoin volume create db --size 1GiB"), "{text}");
    for shell in ["bash", "zsh", "fish"] {
        let script = quoin(&["completion", shell]);
        assert!(script.status.success());
        assert!(String::from_utf8_lossy(&script.stdout).contains("replica"));
    }
    assert!(quoin(&["version"]).status.success());
}
