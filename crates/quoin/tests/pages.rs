//! Pages as a user follows them: their commands, run in order on a cluster of its own, print what
//! the page shows.
//!
//! A block that is fenced as `console` is run, one that is fenced without a word is only read. In
//! it a line that begins with `$ ` is a command for a shell, and the lines up to the next one are
//! its output, or, where they begin with `error:`, its message as it fails. Of a command that waits
//! only the end is compared, since the number of its progress lines is a matter of time. `…`
//! matches anything within a line, and alone in a line any number of lines. Values that differ from
//! run to run (ids, times, sizes, the host's name) need not be the same. A file that is shown by
//! `cat` before it exists is made from the shown text.

use crate::support;

use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use support::{Dev, Scratch, block};

const BLOCK: u64 = 4096;
/// 24 MiB.
const BLOCKS: u64 = 6144;

/// A command and its output on the page.
pub struct Shown {
    /// The words before it.
    pub prompt: &'static str,
    pub command: String,
    pub prints: Vec<String>,
    pub line: usize,
}

/// The commands of a page, each with the prompt before it.
pub fn commands(page: &str, prompts: &[&'static str]) -> Vec<Shown> {
    let mut found: Vec<Shown> = Vec::new();
    let (mut is_fenced, mut is_run) = (false, false);
    for (line, text) in (1..).zip(page.lines()) {
        if let Some(word) = text.strip_prefix("```") {
            (is_fenced, is_run) = (!is_fenced, !is_fenced && word == "console");
        } else if let (true, Some(prompt)) =
            (is_run, prompts.iter().find(|p| text.starts_with(**p)))
        {
            let command = text[prompt.len()..].to_owned();
            found.push(Shown { prompt, command, prints: Vec::new(), line });
        } else if is_run {
            found.last_mut().expect("a block begins with a command").prints.push(text.to_owned());
        }
    }
    assert!(!is_fenced, "a block is not closed");
    found
}

/// Returns a line without values that differ from run to run, and with one space between two words.
fn normal(line: &str, host: &str) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let is_number = |word: &str| word.parse::<f64>().is_ok();
    let is_id = |word: &str| word.len() == 32 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let is_time = |word: &str| word.len() == 20 && word.ends_with('Z') && word.contains("T");
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut out: Vec<String> = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        let unit = words.get(at + 1).map_or("", |next| next.trim_end_matches([',', ';', ':']));
        let before = words.get(at.wrapping_sub(1)).copied().unwrap_or_default();
        at += 1;
        out.push(match *word {
            number if is_number(number) && UNITS.contains(&unit) => {
                at += 1;
                "SIZE".to_owned()
            }
            number if is_number(number) && before == "resourceVersion:" => "NUMBER".to_owned(),
            id if is_id(id) || (id.ends_with('…') && id.chars().count() == 5) => "ID".to_owned(),
            time if is_time(time) => "TIME".to_owned(),
            name if name.trim_matches(['"', ',', ':']) == host => name.replace(host, "vm"),
            other => other.to_owned(),
        });
    }
    out.join(" ")
}

/// Returns whether a line matches the shown one, with `…` for anything.
fn fits(shown: &str, line: &str) -> bool {
    let mut parts = shown.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Returns whether these lines match the shown ones, with a line of `…` for any number of them.
fn all_fit(shown: &[String], lines: &[String]) -> bool {
    match shown {
        [] => lines.is_empty(),
        [any, rest @ ..] if any.trim() == "…" => {
            (0..=lines.len()).any(|skipped| all_fit(rest, &lines[skipped..]))
        }
        [first, rest @ ..] => {
            lines.first().is_some_and(|line| fits(first, line)) && all_fit(rest, &lines[1..])
        }
    }
}

/// Runs a command on the cluster of this socket, and compares what it prints, once `also` has taken out of both
/// what else differs from run to run. Returns its output.
pub fn run(
    socket: &Path,
    directory: &Path,
    host: &str,
    shown: &Shown,
    also: impl Fn(&str) -> String,
) -> Result<String, String> {
    let Shown { command, prints, .. } = shown;
    if let Some(file) = command.strip_prefix("cat ").map(|file| directory.join(file))
        && !file.exists()
    {
        std::fs::write(file, prints.join("\n") + "\n").unwrap();
    }
    let programs = Path::new(env!("CARGO_BIN_EXE_quoin")).parent().unwrap().to_str().unwrap();
    let output = Command::new("sh")
        .args(["-c", command])
        .current_dir(directory)
        .env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()))
        .env("QUOIN_SOCKET", socket)
        .env_remove("QUOIN_JOIN_TOKEN")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    let fails = prints.first().is_some_and(|line| line.starts_with("error:"));
    let all = if fails { &errors } else { &printed };
    let plain = |line: &str| also(&normal(line, host));
    let lines: Vec<String> = all.lines().map(plain).collect();
    let mut wanted: Vec<String> = prints.iter().map(|line| plain(line)).collect();
    if command.contains("--wait") && !fails {
        // Earlier lines are its progress.
        let progress = wanted.len().saturating_sub(lines.len());
        for line in wanted.drain(..progress) {
            let subject: Vec<&str> = line.splitn(3, ' ').collect();
            if !(subject[0] == "volume" || subject[0] == "pool") || !subject[1].ends_with(':') {
                return Err(format!("{line:?} is not what a command says of its progress"));
            }
        }
    }
    let ended = output.status.code();
    // Exit code 3 means that something would change.
    let differs = command.starts_with("quoin diff") && ended == Some(3);
    let as_shown = if fails { ended == Some(1) } else { ended == Some(0) || differs };
    if as_shown && all_fit(&wanted, &lines) {
        return Ok(printed);
    }
    Err(format!(
        "it ended with {ended:?} and printed:\n{printed}{errors}and not:\n{}",
        prints.join("\n")
    ))
}

/// Proves: every command that the page on replicas shows to be run prints the shown output.
#[test]
fn the_page_on_replicas_is_followed_command_by_command_and_prints_what_it_shows() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/replicas.md");
    let page = std::fs::read_to_string(page).unwrap();
    let shown = commands(&page, &["$ "]);
    for word in
        ["scale", "move", "replace", "remove", "drain", "cordon", "uncordon", "edit", "diff"]
    {
        let is_run = shown.iter().any(|shown| shown.command.contains(&format!("{word} ")));
        assert!(is_run, "{word} is not among what is run");
    }
    let scratch = Scratch::new("page");
    let flags = ["--no-attach", "--pools", "4", "--pool-size", "512MiB", "--replace-after", "off"];
    assert!(page.contains(&format!("`quoin dev {}`", flags.join(" "))), "the page says how");
    let dev = Dev::start(&scratch.cluster(), &flags);
    let nodes = dev.json(&["node", "list"]);
    let host = nodes[0]["name"].as_str().unwrap().to_owned();
    let directory = scratch.0.join("home");
    std::fs::create_dir(&directory).unwrap();
    for one in &shown {
        println!("$ {}", one.command);
        if let Err(wrong) = run(&dev.admin_socket, &directory, &host, one, str::to_owned) {
            dev.show_logs();
            panic!("docs/replicas.md, line {}: {}: {wrong}", one.line, one.command);
        }
        if one.command.contains("volume create db") {
            let client = dev.client("db");
            for first in (0..BLOCKS).step_by(256) {
                let data: Vec<u8> = (first..first + 256).flat_map(|lba| block(lba, 1)).collect();
                client.write(first * BLOCK, Bytes::from(data), false).unwrap();
            }
            client.flush().unwrap();
            client.stop();
        }
    }
    dev.stop();
}

/// Proves: every command that the page on snapshots shows to be run prints the shown output.
#[test]
fn the_page_on_snapshots_is_followed_command_by_command_and_prints_what_it_shows() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/snapshots.md");
    let page = std::fs::read_to_string(page).unwrap();
    let shown = commands(&page, &["$ "]);
    let verbs = ["create", "get", "list", "delete"];
    let of_both = ["snapshot", "schedule"].into_iter().flat_map(|noun| verbs.map(|v| (noun, v)));
    let of_snapshots =
        ["diff", "space", "export", "verify", "unpack", "revert"].map(|v| ("snapshot", v));
    for (noun, verb) in of_both.chain(of_snapshots) {
        let named = format!("quoin {noun} {verb}");
        assert!(page.contains(&named), "{named} is not on the page");
    }
    let scratch = Scratch::new("page-snapshots");
    let flags = ["--no-attach", "--pool-size", "256MiB"];
    assert!(page.contains(&format!("`quoin dev {}`", flags.join(" "))), "the page says how");
    let dev = Dev::start(&scratch.cluster(), &flags);
    let nodes = dev.json(&["node", "list"]);
    let host = nodes[0]["name"].as_str().unwrap().to_owned();
    let directory = scratch.0.join("home");
    std::fs::create_dir(&directory).unwrap();
    for one in &shown {
        println!("$ {}", one.command);
        if let Err(wrong) = run(&dev.admin_socket, &directory, &host, one, str::to_owned) {
            dev.show_logs();
            panic!("docs/snapshots.md, line {}: {}: {wrong}", one.line, one.command);
        }
    }
    dev.stop();
}

#[test]
fn the_output_of_a_page_is_compared_except_for_varying_values() {
    let same = |shown: &str, printed: &str| {
        let lines =
            |text: &str| text.lines().map(|line| normal(line, "here")).collect::<Vec<String>>();
        all_fit(&lines(shown), &lines(printed))
    };
    assert!(same("a  9.5 MiB in vm\n…\nend", "a 10 KiB in here\nb\nc\nend"));
    assert!(same("…\nend", "end") && !same("…\nend", "end\nand more"));
    assert!(same("left with …; add", "left with 1 of 2; add") && !same("with …; add", "with; ad"));
    assert!(
        same("id: 3f0c…", "id: 3f0c0011223344556677889900aabbcc") && !same("id: 3f0c…", "id: -")
    );
    assert!(!same("2 replicas", "3 replicas") && !same("pool-a", "pool-b") && !same("a\nb", "a"));
}
