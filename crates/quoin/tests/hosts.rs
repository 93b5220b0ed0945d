//! The page on hosts as a user follows it, on machines with a network and a root file system of
//! their own: from nothing to a volume that was moved off a lost host, and the return of that host.
//!
//! A block that is fenced as `console` is run. In it a line `root@HOST:~# COMMAND` is a command on
//! that host, and the lines below it are its output. Words behind `console` are the hosts that the
//! block is run for, one after the other, with the name of the first one replaced. `TOKEN` is the
//! token that was printed last, and a block device is the one that was printed where the page shows
//! it. A file that is shown by `cat` before it exists is made from the shown text. `systemctl` and
//! `scp` are the test's.

use crate::common;
use crate::machines;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{Scratch, eventually};
use machines::{Machine, Switch, build_package};

/// A command of the page, on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    host: String,
    command: String,
    shows: Vec<String>,
    line: usize,
}

/// Returns all commands of the page, in order.
fn steps(page: &str) -> Vec<Step> {
    let mut all = Vec::new();
    let mut block: Option<(Vec<String>, Vec<Step>)> = None;
    for (line, text) in (1..).zip(page.lines()) {
        match (&mut block, text.strip_prefix("```")) {
            (None, Some(fence)) if fence.split(' ').next() == Some("console") => {
                let hosts = fence.split(' ').skip(1).map(str::to_owned).collect();
                block = Some((hosts, Vec::new()));
            }
            (Some(_), Some(_)) => {
                let (hosts, steps) = block.take().unwrap();
                all.extend(repeated(&hosts, &steps));
            }
            (Some((_, steps)), None) => match command(text) {
                Some((host, command)) => {
                    let (host, command) = (host.to_owned(), command.to_owned());
                    steps.push(Step { host, command, shows: Vec::new(), line });
                }
                None => steps.last_mut().expect("a command").shows.push(text.to_owned()),
            },
            (None, _) => {}
        }
    }
    assert!(block.is_none(), "a block is not closed");
    all
}

/// Parses `root@HOST:~# COMMAND`.
fn command(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("root@")?.split_once(":~# ")
}

/// Repeats a block for each host of its list.
fn repeated(hosts: &[String], steps: &[Step]) -> Vec<Step> {
    let Some(first) = hosts.first() else { return steps.to_vec() };
    let of = |host: &String| {
        let named = |text: &String| text.replace(first.as_str(), host);
        steps
            .iter()
            .map(|step| Step {
                host: named(&step.host),
                command: named(&step.command),
                shows: step.shows.iter().map(named).collect(),
                line: step.line,
            })
            .collect::<Vec<_>>()
    };
    hosts.iter().flat_map(of).collect()
}

/// The hosts of the page, and the output of its commands so far.
struct Site {
    machines: BTreeMap<String, Machine>,
    switch: Switch,
    package: PathBuf,
    token: String,
    /// Block devices: by the name on the page.
    devices: BTreeMap<String, String>,
}

impl Site {
    fn new(scratch: &Path) -> Self {
        let package = build_package(&scratch.join("package"), 1);
        let switch = Switch::new();
        let mut machines = BTreeMap::new();
        for number in 1..=4 {
            let machine = Machine::new(scratch, &format!("h{number}"));
            switch.plug(&machine, number);
            machines.insert(machine.name.clone(), machine);
        }
        // These machines use no volumes. The devices that they would see belong to the other
        // machines.
        machines["h1"].hide_devices();
        machines["h4"].hide_devices();
        let (token, devices) = (String::new(), BTreeMap::new());
        let site = Self { machines, switch, package, token, devices };
        site.name_control("10.80.0.1");
        site
    }

    /// Sets the address of the controller's name, on every host.
    fn name_control(&self, address: &str) {
        let names: String = (1..=4).map(|n| format!("10.80.0.{n} h{n}\n")).collect();
        let table = format!("127.0.0.1 localhost\n{names}{address} control\n");
        for machine in self.machines.values() {
            std::fs::write(machine.path("/etc/hosts"), &table).unwrap();
        }
    }

    /// Runs a command of the page.
    fn follow(&mut self, step: &Step) {
        let Step { host, command, shows, line } = step;
        println!("{host}# {command}");
        let mut command = command.replace("_TOKEN=TOKEN ", &format!("_TOKEN={} ", self.token));
        for (shown, device) in &self.devices {
            command = command.replace(shown, device);
        }
        let machine = self.machines.get_mut(host).expect("a host of the page");
        if let Some(file) = command.strip_prefix("cat ") {
            let text = shows.join("\n").replace("=TOKEN", &format!("={}", self.token));
            return machine.write(file, &(text + "\n"));
        }
        if command.starts_with("dpkg -i quoin_") {
            machine.install(&self.package);
            return;
        }
        if let Some(arguments) = command.strip_prefix("systemctl ") {
            return machine.systemctl(&arguments.replace("kill -s KILL", "kill"));
        }
        if let Some(copied) = command.strip_prefix("scp control:") {
            let machine = &self.machines[host];
            let (from, to) = copied.split_once(' ').expect("FROM TO");
            let from = self.machines["h1"].path(from);
            let copied = Command::new("sh")
                .arg("-c")
                .arg(format!("cp {} {}", from.display(), machine.path(to).display()))
                .status();
            assert!(copied.unwrap().success(), "{command}");
            return;
        }
        if command.starts_with("e2fsck -p") {
            // Exit code 1 means that it corrected something, such as replayed journal entries.
            let status = machine.run(&command).status;
            assert!(matches!(status.code(), Some(0 | 1)), "line {line}: {command}: {status}");
            return;
        }
        // A user checks whether all are online before a command that needs them.
        let machine = &self.machines[host];
        let mut last_error = String::new();
        let printed = eventually(&format!("line {line}: {command}"), || {
            let output = machine.run(&command);
            let now = String::from_utf8_lossy(&output.stderr).into_owned();
            if now != last_error {
                println!("{now}");
                last_error = now;
            }
            output.status.success().then_some(output.stdout)
        });
        let printed = String::from_utf8(printed).unwrap().trim().to_owned();
        if command.contains("token create") {
            self.token = printed.lines().last().unwrap().to_owned();
        } else if let Some(device) = shows.first().filter(|shown| shown.starts_with("/dev/")) {
            self.devices.insert(device.clone(), printed);
        }
    }
}

const BLOCK: usize = 4096;
const BLOCKS: u64 = 512;

fn block(index: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![(index ^ version) as u8; BLOCK];
    bytes[..8].copy_from_slice(&index.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Writes a file block by block, with an fsync after each, and records which ones are acknowledged.
struct Writer {
    acknowledged: Arc<Mutex<BTreeMap<u64, u64>>>,
    count: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<std::io::Result<()>>,
}

impl Writer {
    fn start(path: PathBuf, first_version: u64) -> Self {
        let (acknowledged, count) = (Arc::<Mutex<BTreeMap<_, _>>>::default(), Arc::default());
        let stop = Arc::new(AtomicBool::new(false));
        let (log, counter, ends) = (acknowledged.clone(), Arc::clone(&count), stop.clone());
        let thread = std::thread::spawn(move || {
            let file = File::options().create(true).write(true).truncate(false).open(path)?;
            let mut version = first_version;
            while !ends.load(Ordering::Relaxed) {
                let index = version * 31 % BLOCKS;
                file.write_all_at(&block(index, version), index * BLOCK as u64)?;
                file.sync_all()?;
                log.lock().unwrap().insert(index, version);
                AtomicU64::fetch_add(&counter, 1, Ordering::Relaxed);
                version += 1;
            }
            Ok(())
        });
        Self { acknowledged, count, stop, thread }
    }

    fn wait_for_writes(&self, count: u64) {
        eventually("the writer goes on", || {
            assert!(!self.thread.is_finished(), "the writer ended");
            (self.count.load(Ordering::Relaxed) >= count).then_some(())
        });
    }

    fn acknowledged(&self) -> BTreeMap<u64, u64> {
        self.acknowledged.lock().unwrap().clone()
    }
}

/// Asserts that every acknowledged block is there, in that version or a later one.
fn verify(path: &Path, acknowledged: &BTreeMap<u64, u64>) {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    for (index, version) in acknowledged {
        let at = *index as usize * BLOCK;
        let found = bytes.get(at..at + BLOCK).unwrap_or_else(|| panic!("block {index} is missing"));
        let there = u64::from_le_bytes(found[8..16].try_into().unwrap());
        assert!(there >= *version, "block {index} is of version {there}, not of {version}");
        assert_eq!(found, block(*index, there), "block {index} is damaged");
    }
}

/// Proves: the commands of the page on hosts bring a cluster up from nothing, and move a volume off
/// a lost host with every acknowledged byte; nothing that the lost host does later reaches the
/// volume.
#[test]
fn the_page_on_hosts_is_followed_to_a_volume_that_survives_its_host() {
    if !machines::is_supported() {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/hosts.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (before, after) = page.split_once("### A host is lost").expect("the section");
    let (lost, after) = after.split_once("### A host is back").expect("the section");
    let (back, moved) = after.split_once("### The controller's host is lost").expect("the section");
    let scratch = Scratch::new("hosts");
    let mut site = Site::new(&scratch.0);
    steps(before).iter().for_each(|step| site.follow(step));
    let db = |site: &Site, host: &str| site.machines[host].path("/srv/db/file");

    let first = Writer::start(db(&site, "h2"), 1);
    first.wait_for_writes(200);
    site.switch.link(&site.machines["h2"], "down");
    steps(lost).iter().for_each(|step| site.follow(step));
    let acknowledged = first.acknowledged();
    verify(&db(&site, "h3"), &acknowledged);

    // The next one writes other versions of the same blocks, while the former one still runs.
    let second = Writer::start(db(&site, "h3"), 1_000_000);
    second.wait_for_writes(50);
    site.switch.link(&site.machines["h2"], "up");
    let count = second.count.load(Ordering::Relaxed);
    second.wait_for_writes(count + 200);
    eventually("all replicas are in sync again", || {
        let listed = site.machines["h1"].ok("quoin replica list db -o json");
        let replicas: serde_json::Value = serde_json::from_str(&listed).unwrap();
        let phases = replicas.as_array()?.iter().map(|replica| replica["phase"] == "InSync");
        phases.clone().all(|is| is).then_some(()).filter(|()| phases.count() == 3)
    });
    steps(back).iter().for_each(|step| site.follow(step));
    eventually("the former writer ended", || first.thread.is_finished().then_some(()));
    assert!(first.thread.join().unwrap().is_err(), "the former host's writes ended well");

    // The backup is older than the volume. Its writer continues all the time.
    site.switch.link(&site.machines["h1"], "down");
    site.machines.get_mut("h1").unwrap().crash();
    let count = second.count.load(Ordering::Relaxed);
    second.wait_for_writes(count + 20);
    site.name_control("10.80.0.4");
    steps(moved).iter().for_each(|step| site.follow(step));
    let used = site.machines["h4"].ok("quoin volume get db -o json");
    let used: serde_json::Value = serde_json::from_str(&used).unwrap();
    assert_eq!(used["nodes"], serde_json::json!(["h3"]), "{used}");
    let count = second.count.load(Ordering::Relaxed);
    second.wait_for_writes(count + 20);

    second.stop.store(true, Ordering::Relaxed);
    let written = second.acknowledged();
    second.thread.join().unwrap().unwrap();
    let h3 = &site.machines["h3"];
    let device = site.devices["/dev/quoin/db"].clone();
    h3.eventually_ok("no process has a file of it open", "umount /srv/db");
    h3.ok(&format!("e2fsck -fn {device}"));
    h3.ok(&format!("mount {device} /srv/db"));
    verify(&db(&site, "h3"), &acknowledged);
    verify(&db(&site, "h3"), &written);
    site.machines["h4"].ok("quoin volume verify db");
    h3.eventually_ok("no process has a file of it open", "umount /srv/db");
    site.machines["h4"].ok("quoin volume detach db --node h3");
}

#[test]
fn blocks_of_the_page_are_read_as_commands_of_their_hosts() {
    let page = "text\n```console h2 h3\nroot@h1:~# make a token\nTOKEN\nroot@h2:~# cat /a\nNAME=h2\n```\n\
                ```\nnot run\n```\n```console\nroot@h1:~# last\n```\n";
    let found = steps(page);
    let short: Vec<String> =
        found.iter().map(|s| format!("{} {} {}", s.host, s.command, s.shows.join(","))).collect();
    assert_eq!(
        short,
        [
            "h1 make a token TOKEN",
            "h2 cat /a NAME=h2",
            "h1 make a token TOKEN",
            "h3 cat /a NAME=h3",
            "h1 last "
        ]
    );
}
