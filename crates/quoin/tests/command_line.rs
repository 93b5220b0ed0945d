//! The command line as a user sees it: refusals, their messages and exit codes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

fn quoin(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quoin"))
        .args(arguments)
        // No controller of this machine may answer.
        .env("QUOIN_SOCKET", "/nonexistent/admin.sock")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap()
}

/// Runs a command that must fail with `code`, and returns its message.
fn refused(code: i32, arguments: &[&str]) -> String {
    let output = quoin(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed to stdout");
    said
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let so = (0..600).any(|_| {
        let so = is_so();
        if !so {
            std::thread::sleep(Duration::from_millis(100));
        }
        so
    });
    assert!(so, "never: {what}");
}

/// Process that is killed at the end in every case.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A controller alone, without pools and nodes.
struct Controller {
    scratch: tempfile::TempDir,
    process: Option<Ended>,
}

impl Controller {
    fn new() -> Self {
        let controller = Self { scratch: tempfile::tempdir().unwrap(), process: None };
        let state = controller.path("state");
        let made = quoin(&["controller", "init", "--state", state.to_str().unwrap()]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        controller
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn socket(&self) -> String {
        self.path("admin.sock").display().to_string()
    }

    /// Returns the command line of a controller with the same state and socket.
    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quoin"));
        command.args(["controller", "run", "--listen", "127.0.0.1:0", "--state"]);
        command.arg(self.path("state")).arg("--admin-socket").arg(self.socket());
        command.stdin(Stdio::null());
        command
    }

    /// Starts it and waits until it answers.
    fn start(&mut self, log: impl Fn() -> Stdio) {
        let started = self.command().stdout(log()).stderr(log()).spawn().unwrap();
        self.process = Some(Ended(started));
        let socket = self.socket();
        wait_for("an answer of the controller", || {
            quoin(&["pool", "list", "--socket", &socket]).status.success()
        });
    }

    /// Ends it as kill -9 does.
    fn end(&mut self) {
        self.process = None;
    }
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

/// The log is on a disk that may be full: only its lines are lost.
#[test]
fn a_controller_whose_log_cannot_be_written_goes_on() {
    let mut controller = Controller::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap().into();
    controller.start(full);
    let ended = controller.process.as_mut().unwrap().0.try_wait().unwrap();
    assert_eq!(ended, None);
}

/// A process that watches a cluster must survive a restart of its controller.
#[test]
fn events_are_watched_on_after_the_controller_was_killed_and_started_again() {
    let mut controller = Controller::new();
    controller.start(Stdio::null);
    let seen = controller.path("events");
    let events = || std::fs::read_to_string(&seen).unwrap();
    let has = |what: &str| wait_for(what, || events().contains(what));
    let mut watch = Ended(
        Command::new(env!("CARGO_BIN_EXE_quoin"))
            .args(["events", "-w", "--socket", &controller.socket()])
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&seen).unwrap())
            .stderr(std::fs::File::create(controller.path("said")).unwrap())
            .spawn()
            .unwrap(),
    );
    let socket = controller.socket();
    let token = |role: &str| {
        let made = quoin(&["token", "create", "--role", role, "--socket", &socket]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    };
    token("pool");
    has("for a pool,");
    let before = events();
    controller.end();
    controller.start(Stdio::null);
    token("node");
    has("for a node,");
    let after = events();
    let (old, new) = after.split_at(before.len());
    assert_eq!(old, before);
    assert!(!new.contains("for a pool,"), "told twice: {new}");
    assert_eq!(watch.0.try_wait().unwrap(), None);
    let said = std::fs::read_to_string(controller.path("said")).unwrap();
    assert!(
        said.contains("connection to the controller ended") && said.contains("reachable again"),
        "{said}"
    );
}

#[test]
fn what_is_in_use_already_is_named_with_who_has_it_and_the_way_out() {
    let mut controller = Controller::new();
    controller.start(Stdio::null);
    let other = Controller::new();
    let state = other.path("state").display().to_string();
    let run = |flags: &[&str]| {
        refused(1, &[&["controller", "run", "--state", &state][..], flags].concat())
    };
    let said = run(&["--admin-socket", &controller.socket()]);
    assert!(
        said.contains("another controller serves") && said.contains("--admin-socket"),
        "{said}"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let said = run(&["--admin-socket", &other.socket(), "--listen", &address]);
    let pid = format!("(process {})", std::process::id());
    assert!(said.contains(&address) && said.contains(&pid) && said.contains("--listen"), "{said}");
}

#[test]
fn a_join_that_cannot_be_says_what_is_wrong_with_the_token_or_the_controller() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (to, state) = (path("to"), path("state"));
    let join = |token: &str| {
        let flags = ["--to", &to, "--controller", "127.0.0.1:1", "--join", token];
        refused(1, &[&["cluster", "join"][..], &flags].concat())
    };
    let said = join("xyz");
    assert!(said.contains("begins with quoin-join-1.") && said.contains("token create"), "{said}");
    let made = quoin(&["controller", "init", "--state", &state]);
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    let token = text.split_whitespace().find(|word| word.starts_with("quoin-join-1.")).unwrap();
    let said = join(token);
    assert!(said.contains("127.0.0.1:1") && said.contains("refused"), "{said}");
    assert!(!said.contains("transport error"), "{said}");
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
fn what_does_not_exist_is_named_with_the_list_that_shows_what_does() {
    let mut controller = Controller::new();
    controller.start(Stdio::null);
    let socket = controller.socket();
    for (arguments, list) in [
        // No confirmation is requested to destroy a volume that does not exist.
        (&["volume", "delete", "db"][..], "quoin volume list"),
        (&["volume", "delete", "db", "--yes"], "quoin volume list"),
        (&["volume", "get", "0123456789abcdef0123456789abcdef"], "quoin volume list"),
        (&["replica", "list", "db"], "quoin volume list"),
        (&["events", "--volume", "db"], "quoin volume list"),
        (&["pool", "drain", "shelf"], "quoin pool list"),
        (&["pool", "remove", "shelf"], "quoin pool list"),
        (&["pool", "scrub", "shelf"], "quoin pool list"),
        (&["node", "drain", "host"], "quoin node list"),
        (&["node", "remove", "host"], "quoin node list"),
        (&["token", "revoke", "0123"], "quoin token list"),
    ] {
        let said = refused(1, &[arguments, &["--socket", &socket]].concat());
        assert!(said.contains(list), "{arguments:?}: {said}");
        assert!(!said.contains("--yes"), "{said}");
    }
    let said = refused(1, &["volume", "get", "\u{1b}[31mred", "--socket", &socket]);
    assert!(said.contains("\\u{1b}[31mred") && !said.contains('\u{1b}'), "{said:?}");
}

#[test]
fn help_teaches_the_first_steps() {
    let help = quoin(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(text.contains("quoin volume create db --size 1GiB"), "{text}");
    assert!(quoin(&["version"]).status.success());
}

/// Returns the proposals of a script of `quoin completion bash` for the last of these words.
fn proposed(home: &Path, words: &[&str]) -> Vec<String> {
    let script = "source <(quoin completion bash); COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                  COMP_TYPE=9; _clap_complete_quoin quoin \"${!#}\"; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let binary = Path::new(env!("CARGO_BIN_EXE_quoin")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    let output = Command::new("bash")
        .args(["--norc", "-c", script, "bash"])
        .args(words)
        .env("PATH", path)
        .env("HOME", home)
        .env_remove("XDG_CONFIG_HOME")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_shell_completes_commands_flags_and_names_of_contexts() {
    let home = tempfile::tempdir().unwrap();
    for name in ["near", "far-1", "far-2"] {
        let context = home.path().join(".config/quoin/contexts").join(name);
        std::fs::create_dir_all(&context).unwrap();
        let entry = format!(r#"{{"controller":"{name}:7400"}}"#);
        std::fs::write(context.join("context.json"), entry).unwrap();
    }
    let proposed = |words: &[&str]| proposed(home.path(), words);
    assert!(proposed(&["quoin", "rep"]).contains(&"replica".to_owned()));
    assert_eq!(proposed(&["quoin", "volume", "create", "--repli"]), ["--replicas"]);
    for command in ["use", "show", "remove", "rename"] {
        assert_eq!(proposed(&["quoin", "context", command, "fa"]), ["far-1", "far-2"], "{command}");
    }
    assert_eq!(proposed(&["quoin", "volume", "list", "--context", "n"]), ["near"]);
    for shell in ["zsh", "fish"] {
        let script = quoin(&["completion", shell]);
        assert!(script.status.success());
        assert!(String::from_utf8_lossy(&script.stdout).contains("QUOIN_COMPLETE"));
    }
}

#[test]
fn no_command_and_a_group_without_one_show_their_help_whatever_the_environment_holds() {
    let said = refused(2, &[]);
    assert!(said.contains("Usage: quoin") && said.contains("demo"), "{said}");
    assert!(!said.contains("bench-part"), "{said}");
    let said = refused(2, &["volume"]);
    assert!(said.contains("attach") && said.contains("quoin volume"), "{said}");
}

#[test]
fn a_reader_that_went_away_ends_a_command_quietly() {
    let command = format!("{} completion bash | head -1", env!("CARGO_BIN_EXE_quoin"));
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_negative_size_is_no_unknown_flag_and_a_demo_too_small_is_refused_at_once() {
    let said = refused(2, &["volume", "create", "db", "--size", "-1"]);
    assert!(said.contains("above 0"), "{said}");
    let said = refused(2, &["demo", "--size", "1KiB"]);
    assert!(said.contains("256.0 MiB"), "{said}");
}

#[test]
fn a_socket_that_is_none_and_places_that_do_not_exist_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("letter");
    std::fs::write(&file, "dear").unwrap();
    let path = file.to_str().unwrap();
    assert!(refused(1, &["volume", "list", "--socket", path]).contains("not a socket"));
    let said = refused(1, &["pool", "inspect", directory.path().to_str().unwrap()]);
    assert!(said.contains("no pool in"), "{said}");
    let said = refused(1, &["controller", "init", "--state", directory.path().to_str().unwrap()]);
    assert!(said.contains("letter") && said.contains("empty"), "{said}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "something was made");
    let nowhere = directory.path().join("none/run");
    let said = refused(
        1,
        &[
            "target",
            "--state",
            path,
            "--run",
            nowhere.to_str().unwrap(),
            "--controller",
            "127.0.0.1:1",
        ],
    );
    assert!(said.contains("--run"), "{said}");
    assert!(!directory.path().join("none").exists());
}

#[test]
fn numbers_that_cannot_be_are_refused_in_a_sentence_that_says_what_can() {
    for (arguments, words) in [
        (&["volume", "scale", "db", "--replicas", "0"][..], "at least"),
        (&["volume", "create", "db", "--size", "1GiB", "--iops-limit", "0"], "no limit"),
        (&["volume", "create", "db", "--size", "1GiB", "--replicas", "-1"], "1 to 8 replicas"),
        (&["volume", "create", "db", "--size", "1GiB", "--bandwidth-limit", "0"], "no limit"),
        (&["token", "create", "--role", "pool", "--minutes", "0"], "1440 minutes"),
        (&["dev", "--pools", "0"], "1 to 8 pools"),
        (&["dev", "--pool-size", "0"], "a pool needs a size"),
        (&["volume", "create", "db", "--size", "65PiB"], "64.0 PiB"),
    ] {
        let said = refused(2, arguments);
        assert!(said.contains(words), "{arguments:?}: {said}");
        assert!(!said.contains("is not in"), "{said}");
    }
}

#[test]
fn every_command_prints_for_programs_where_it_is_asked_to() {
    let read = |output: Output| -> serde_json::Value {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let version = read(quoin(&["version", "-o", "json"]));
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    let yaml = quoin(&["version", "-o", "yaml"]).stdout;
    assert!(String::from_utf8_lossy(&yaml).starts_with("version: "));
    let mut controller = Controller::new();
    controller.start(Stdio::null);
    let (socket, file) = (controller.socket(), controller.path("backup").display().to_string());
    let backup = ["controller", "backup", &file, "-o", "json", "--socket", &socket];
    let made = read(quoin(&backup));
    assert!(made["file"] == file.as_str() && made["volumes"] == 0 && made["authority"] == true);
    assert!(made["sizeBytes"].as_u64().unwrap() > 100, "{made}");
    let state = controller.path("other").display().to_string();
    let restored = read(quoin(&["controller", "restore", &file, "--state", &state, "-o", "json"]));
    assert_eq!(restored["clusterId"], made["clusterId"]);
}

#[test]
fn a_backup_where_none_can_be_and_a_restore_of_what_is_none_say_why() {
    let scratch = tempfile::tempdir().unwrap();
    let nowhere = scratch.path().join("none/backup").display().to_string();
    let said = refused(1, &["controller", "backup", &nowhere]);
    assert!(said.contains("there is no directory") && said.contains("/none"), "{said}");
    let letter = scratch.path().join("env.sh");
    std::fs::write(&letter, "export A=1\n").unwrap();
    let (letter, state) = (letter.to_str().unwrap(), scratch.path().join("state"));
    let said = refused(1, &["controller", "restore", letter, "--state", state.to_str().unwrap()]);
    let words = format!("{letter} cannot be restored: this is no backup");
    assert!(said.contains(&words) && said.contains("quoin controller backup"), "{said}");
    assert!(!state.exists());
}

/// clap shows given arguments as if they were required, and the environment gives values invisibly.
#[test]
fn what_the_environment_holds_is_no_part_of_a_usage_line() {
    let said = refused(2, &["volume", "attach"]);
    let usage = said.lines().find(|line| line.starts_with("Usage:")).unwrap();
    assert_eq!(usage, "Usage: quoin volume attach [OPTIONS] <VOLUME>");
}
