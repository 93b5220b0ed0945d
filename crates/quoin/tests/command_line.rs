//! The command line as a user sees it: refusals, their messages and exit codes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::common::dev::{Dev, Scratch, eventually, signal};

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
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {printed}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed to stdout");
    printed
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
fn unknown_flags_and_commands_are_named_in_usage_errors() {
    assert!(refused(2, &["volume", "create", "db", "--sise", "1GiB"]).contains("--size"));
    assert!(refused(2, &["volume", "creat", "db"]).contains("create"));
    assert!(refused(2, &["volumes"]).contains("volume"));
    assert!(refused(2, &["volume", "list", "-o", "xml"]).contains("json"));
}

#[test]
fn sizes_of_zero_and_two_to_the_63_are_refused_without_a_controller() {
    for (size, words) in [
        ("0", "above 0"),
        ("9223372036854775808", "largest volume"),
        ("ten", "unit"),
        ("-5", "unit"),
    ] {
        let printed = refused(2, &["volume", "create", "db", &format!("--size={size}")]);
        assert!(printed.contains(words), "{size}: {printed}");
        let printed = refused(2, &["volume", "resize", "db", &format!("--size={size}")]);
        assert!(printed.contains(words), "{size}: {printed}");
    }
}

/// The log is on a disk that may be full: only its lines are lost.
#[test]
fn a_controller_whose_log_cannot_be_written_continues() {
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
    let printed = std::fs::read_to_string(controller.path("said")).unwrap();
    assert!(
        printed.contains("connection to the controller ended")
            && printed.contains("reachable again"),
        "{printed}"
    );
}

#[test]
fn an_object_in_use_is_named_with_its_user_and_the_way_out() {
    let mut controller = Controller::new();
    controller.start(Stdio::null);
    let other = Controller::new();
    let state = other.path("state").display().to_string();
    let run = |flags: &[&str]| {
        refused(1, &[&["controller", "run", "--state", &state][..], flags].concat())
    };
    let printed = run(&["--admin-socket", &controller.socket()]);
    assert!(
        printed.contains("another controller serves") && printed.contains("--admin-socket"),
        "{printed}"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let printed = run(&["--admin-socket", &other.socket(), "--listen", &address]);
    let pid = format!("(process {})", std::process::id());
    assert!(
        printed.contains(&address) && printed.contains(&pid) && printed.contains("--listen"),
        "{printed}"
    );
}

#[test]
fn a_failed_join_reports_the_problem_of_the_token_or_the_controller() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (to, state) = (path("to"), path("state"));
    let join = |token: &str| {
        let flags = ["--to", &to, "--controller", "127.0.0.1:1", "--join", token];
        refused(1, &[&["cluster", "join"][..], &flags].concat())
    };
    let printed = join("xyz");
    assert!(
        printed.contains("begins with quoin-join-1.") && printed.contains("token create"),
        "{printed}"
    );
    let made = quoin(&["controller", "init", "--state", &state]);
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    let token = text.split_whitespace().find(|word| word.starts_with("quoin-join-1.")).unwrap();
    let printed = join(token);
    assert!(printed.contains("127.0.0.1:1") && printed.contains("refused"), "{printed}");
    assert!(!printed.contains("transport error"), "{printed}");
}

#[test]
fn names_with_control_characters_or_of_no_or_too_many_letters_are_refused() {
    for (name, words) in
        [("a\u{1}b", "U+0001"), ("", "needs a name"), (&*"n".repeat(129), "at most 128")]
    {
        let printed = refused(2, &["volume", "create", name, "--size", "1GiB"]);
        assert!(printed.contains(words), "{name:?}: {printed}");
    }
}

#[test]
fn a_missing_controller_is_reported_with_the_way_out() {
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
        let printed = refused(1, arguments);
        assert!(
            printed.contains("/nonexistent/admin.sock") && printed.contains("quoin dev"),
            "{printed}"
        );
    }
}

#[test]
fn an_unknown_object_is_refused_with_the_command_that_lists_existing_ones() {
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
        let printed = refused(1, &[arguments, &["--socket", &socket]].concat());
        assert!(printed.contains(list), "{arguments:?}: {printed}");
        assert!(!printed.contains("--yes"), "{printed}");
    }
    let printed = refused(1, &["volume", "get", "\u{1b}[31mred", "--socket", &socket]);
    assert!(printed.contains("\\u{1b}[31mred") && !printed.contains('\u{1b}'), "{printed:?}");
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
    proposed_at(home, None, words)
}

/// Proposals of a shell where commands talk to the controller behind this socket.
fn proposed_at(home: &Path, socket: Option<&Path>, words: &[&str]) -> Vec<String> {
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
        .envs(socket.map(|socket| ("QUOIN_SOCKET", socket)))
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
fn a_shell_completes_names_of_volumes_and_pools_and_one_page_shows_the_cluster() {
    let scratch = Scratch::new("names");
    let dev = Dev::start(&scratch.cluster(), &["--no-attach"]);
    for name in ["archive-1", "archive-2", "db"] {
        dev.ok(&["volume", "create", name, "--size", "16MiB"]);
    }
    let socket = dev.directory.join("run/admin.sock");
    let proposed = |words: &[&str]| proposed_at(&scratch.0, Some(&socket), words);
    assert_eq!(proposed(&["quoin", "volume", "get", "ar"]), ["archive-1", "archive-2"]);
    assert_eq!(proposed(&["quoin", "volume", "resize", "d"]), ["db"]);
    assert_eq!(proposed(&["quoin", "pool", "drain", "pool-b"]), ["pool-b"]);
    assert!(!proposed(&["quoin", "volume", "create", "ar"]).contains(&"archive-1".to_owned()));

    let page = eventually("all is well", || {
        let page = dev.quoin(&["status", "-o", "json"]);
        let page: serde_json::Value = serde_json::from_slice(&page.stdout).unwrap();
        (page["well"] == true).then_some(page)
    });
    assert_eq!(
        (&page["pools"]["count"], &page["volumes"]["well"]),
        (&3.into(), &3.into()),
        "{page}"
    );
    let pool = dev.pid("pool-c").unwrap();
    signal(pool, "STOP");
    eventually("a pool is away", || {
        let page = dev.quoin(&["status"]);
        let text = String::from_utf8_lossy(&page.stdout).into_owned();
        let is_told = page.status.code() == Some(3) && text.contains("pool-c: Offline");
        is_told.then_some(())
    });
    signal(pool, "CONT");
    let events = dev.json(&["events"]);
    assert!(events.as_array().is_some_and(|all| all.len() > 3), "{events}");
    dev.stop();
}

#[test]
fn a_missing_command_shows_the_help_in_any_environment() {
    let printed = refused(2, &[]);
    assert!(printed.contains("Usage: quoin") && printed.contains("demo"), "{printed}");
    assert!(!printed.contains("bench-part"), "{printed}");
    let printed = refused(2, &["volume"]);
    assert!(printed.contains("attach") && printed.contains("quoin volume"), "{printed}");
}

#[test]
fn a_command_ends_without_an_error_when_its_reader_is_gone() {
    let command = format!("{} completion bash | head -1", env!("CARGO_BIN_EXE_quoin"));
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_negative_size_is_not_parsed_as_a_flag_and_a_small_demo_is_refused() {
    let printed = refused(2, &["volume", "create", "db", "--size", "-1"]);
    assert!(printed.contains("above 0"), "{printed}");
    let printed = refused(2, &["demo", "--size", "1KiB"]);
    assert!(printed.contains("256.0 MiB"), "{printed}");
}

#[test]
fn wrong_sockets_and_missing_directories_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("letter");
    std::fs::write(&file, "dear").unwrap();
    let path = file.to_str().unwrap();
    assert!(refused(1, &["volume", "list", "--socket", path]).contains("not a socket"));
    let printed = refused(1, &["pool", "inspect", directory.path().to_str().unwrap()]);
    assert!(printed.contains("no pool in"), "{printed}");
    let printed =
        refused(1, &["controller", "init", "--state", directory.path().to_str().unwrap()]);
    assert!(printed.contains("letter") && printed.contains("empty"), "{printed}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "something was made");
    let nowhere = directory.path().join("none/run");
    let printed = refused(
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
    assert!(printed.contains("--run"), "{printed}");
    assert!(!directory.path().join("none").exists());
}

#[test]
fn invalid_numbers_are_refused_with_the_valid_range() {
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
        let printed = refused(2, arguments);
        assert!(printed.contains(words), "{arguments:?}: {printed}");
        assert!(!printed.contains("is not in"), "{printed}");
    }
}

#[test]
fn every_command_prints_machine_readable_output_on_request() {
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
fn impossible_backups_and_restores_are_refused_with_the_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let nowhere = scratch.path().join("none/backup").display().to_string();
    let printed = refused(1, &["controller", "backup", &nowhere]);
    assert!(printed.contains("there is no directory") && printed.contains("/none"), "{printed}");
    let letter = scratch.path().join("env.sh");
    std::fs::write(&letter, "export A=1\n").unwrap();
    let (letter, state) = (letter.to_str().unwrap(), scratch.path().join("state"));
    let printed =
        refused(1, &["controller", "restore", letter, "--state", state.to_str().unwrap()]);
    let words = format!("{letter} cannot be restored: this is no backup");
    assert!(printed.contains(&words) && printed.contains("quoin controller backup"), "{printed}");
    assert!(!state.exists());
}

/// clap shows given arguments as if they were required, and the environment gives values invisibly.
#[test]
fn a_usage_line_has_no_values_of_the_environment() {
    let printed = refused(2, &["volume", "attach"]);
    let usage = printed.lines().find(|line| line.starts_with("Usage:")).unwrap();
    assert_eq!(usage, "Usage: quoin volume attach [OPTIONS] <VOLUME>");
}
