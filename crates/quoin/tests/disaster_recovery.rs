//! The runbook as a person follows it: its commands, run in order on two clusters, print what it shows.
//!
//! A command has the prompt of the cluster that it runs on. What only asks, or is refused, is asked again until it
//! prints what the page shows: roles and points follow a command by some seconds. The page says in comments of HTML
//! when the first cluster is lost and when it is back.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use quoin_nbd::client::Client;

use crate::common::dev::Dev;
use crate::common::{Scratch, User};
use crate::mirrors;
use crate::pages::{Shown, commands, run};
use crate::support::block;

const FLAGS: [&str; 6] = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "2GiB"];
/// Silence counts after 30 s, and what was told before may be heard some seconds later.
const BUDGET: Duration = Duration::from_secs(150);
/// Words of commands that are repeated until they print what the page shows.
const ASKING: [&str; 5] = ["status", "points", "peers", "list", "recover"];
/// Heading of the section of calls.
pub const SERVICES: &str = "## The same runbook through the services";
/// Name of a group on the page whose name is lost: a part of its id.
const NAMELESS: &str = "group-2e647a6d";

struct Site {
    dev: Dev,
    second: User,
    home: PathBuf,
    host: String,
    /// Written by the application before its cluster was lost.
    clients: Vec<Client>,
}

impl Site {
    fn start(scratch: &Scratch) -> Self {
        let directory = scratch.cluster();
        let dev = Dev::start(&directory, &FLAGS);
        dev.wait_for_line("A second cluster is up");
        let second = User {
            admin_socket: directory.join("peer/run/admin.sock"),
            logs: directory.join("peer/logs"),
        };
        let home = scratch.0.join("home");
        std::fs::create_dir(&home).unwrap();
        let host = dev.json(&["node", "list"])[0]["name"].as_str().unwrap().to_owned();
        Self { dev, second, home, host, clients: Vec::new() }
    }

    fn user(&self, prompt: &str) -> &User {
        match prompt {
            "first" => &self.dev,
            "second" => &self.second,
            other => panic!("no cluster is called {other:?}"),
        }
    }

    /// Follows what a comment of the page says.
    fn happens(&mut self, what: &str) {
        match what {
            "first is lost" => {
                for volume in ["data", "log"] {
                    let client = self.dev.client(volume);
                    client.write(0, block(0, 1).into(), false).unwrap();
                    client.flush().unwrap();
                    self.clients.push(client);
                }
                mirrors::hold_all(&self.dev.directory, &mirrors::LOST, true);
            }
            "first is back" => {
                mirrors::hold_all(&self.dev.directory, &mirrors::LOST, false);
                self.clients.clear();
            }
            "second is lost" => {
                mirrors::hold_all(&self.peer(), &mirrors::LOST, true);
            }
            "second loses its records" => {
                let state = self.peer().join("controller");
                mirrors::hold_all(&self.peer(), &["controller"], true);
                std::fs::remove_file(state.join("records.redb")).unwrap();
                let state = state.to_str().unwrap();
                self.second.ok(&["controller", "init", "--state", state, "--records-lost"]);
                mirrors::hold_all(&self.peer(), &["controller"], false);
            }
            other => panic!("the page says {other:?}, which nobody does"),
        }
    }

    fn peer(&self) -> PathBuf {
        self.dev.directory.join("peer")
    }

    /// Values of this run in place of those that the page shows.
    fn filled(&self, shown: &Shown, token: &str) -> Shown {
        let mut command = shown.command.replace("quoin-pair-1.…", token);
        for (name, directory) in [("first", &self.dev.directory), ("second", &self.peer())] {
            let settings = std::fs::read(directory.join("dev.json")).unwrap();
            let settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
            let address = settings["controller"]["listen"].as_str().unwrap();
            command = command.replace(&format!("control.{name}.example:7400"), address);
        }
        let mut prints = shown.prints.clone();
        if command.contains(NAMELESS) {
            // The controller of the first cluster may be away.
            let status = self.second.json(&["mirror", "status"]);
            let name = status[0]["name"].as_str().unwrap().to_owned();
            command = command.replace(NAMELESS, &name);
            prints.iter_mut().for_each(|line| *line = line.replace(NAMELESS, &name));
            if let Some(at) = command.find("--at ") {
                let points = self.second.json(&["mirror", "points", &name]);
                command.replace_range(at + 5.., points[0]["id"].as_str().unwrap());
            }
        }
        if let Some(at) = command.find("lost-") {
            let lost =
                self.dev.json(&["mirror", "status", "shop"])["lost"].as_str().unwrap().to_owned();
            let kept = lost.split(", ").next().unwrap();
            command.replace_range(at.., kept);
        }
        Shown { command, prints, ..*shown }
    }

    fn follow(&self, prompt: &str, shown: &Shown) -> Result<String, String> {
        let words: Vec<&str> = shown.command.split_whitespace().collect();
        let asks = ASKING.iter().any(|word| words.get(2) == Some(word));
        let is_refused = shown.prints.first().is_some_and(|line| line.starts_with("error:"));
        // A controller of a cluster that is back takes its time.
        let again = asks || is_refused;
        let began = Instant::now();
        loop {
            let outcome =
                run(&self.user(prompt).admin_socket, &self.home, &self.host, shown, normal);
            if outcome.is_ok() || !again || began.elapsed() > BUDGET {
                return outcome;
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

/// Ages in seconds and names of lost snapshots differ from run to run.
fn normal(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let mut out: Vec<String> = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let is_age = word.contains('.') && word.parse::<f64>().is_ok();
        out.push(match *word {
            _ if is_age && words.get(at + 1) == Some(&"s") => "AGE".to_owned(),
            name if name.starts_with("lost-") => "LOST".to_owned(),
            other => other.to_owned(),
        });
    }
    out.join(" ")
}

/// Proves: every command of the runbook prints the shown output, on the cluster that its prompt names.
#[test]
fn the_runbook_is_followed_command_by_command_on_two_clusters_of_which_one_is_lost() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/disaster-recovery.md");
    let page = std::fs::read_to_string(page).unwrap();
    // Calls of orchestrators are another test's, and their section has no command.
    let (start, rest) = page.split_once(SERVICES).unwrap();
    let (calls, rest) = rest.split_once("\n## ").unwrap();
    let blank = "\n".repeat(SERVICES.lines().count() + calls.lines().count());
    let page = format!("{start}{blank}## {rest}");
    assert!(page.contains(&format!("`quoin dev {}`", FLAGS.join(" "))), "the page says how");
    let shown = commands(&page, &["first$ ", "second$ "]);
    for verb in [
        "enable", "status", "points", "peers", "promote", "demote", "resync", "pause", "resume",
        "disable", "unpair", "invite", "pair", "verify",
    ] {
        let named = format!("quoin mirror {verb}");
        assert!(shown.iter().any(|shown| shown.command.contains(&named)), "{named} is not run");
    }
    let comments = (1..).zip(page.lines()).filter_map(|(line, text)| {
        Some((line, text.strip_prefix("<!-- ")?.strip_suffix(" -->")?.to_owned()))
    });
    let mut comments = comments.peekable();

    let scratch = Scratch::new("runbook");
    let mut site = Site::start(&scratch);
    let mut token = String::new();
    let began = Instant::now();
    for one in &shown {
        while let Some((_, what)) = comments.next_if(|(line, _)| *line < one.line) {
            println!("{:5.1} s  {what}", began.elapsed().as_secs_f64());
            site.happens(&what);
        }
        let one = site.filled(one, &token);
        let prompt = one.prompt.trim_end_matches("$ ");
        println!("{:5.1} s  {prompt}$ {}", began.elapsed().as_secs_f64(), one.command);
        match site.follow(prompt, &one) {
            Ok(printed) if one.command.contains("mirror invite") => {
                token = printed.trim().to_owned();
            }
            Ok(_) => {}
            Err(wrong) => {
                site.user(prompt).show_logs();
                panic!("docs/disaster-recovery.md, line {}: {}: {wrong}", one.line, one.command);
            }
        }
    }
    assert!(comments.next().is_none(), "something happens after the last command");
    site.dev.stop();
}
