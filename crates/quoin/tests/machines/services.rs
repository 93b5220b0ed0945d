//! The service manager of a machine: reads the installed units and does with them what systemd
//! does, as far as Quoin's units need it. Order (`After=`), conditions, environment, directories,
//! `Restart=` and its limit of starts are implemented; sandboxing is not.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::signal;

/// Limit of restarts of systemd, with its interval, where the unit sets no other.
const STARTS_MAX: usize = 5;
const STARTS_WITHIN: Duration = Duration::from_secs(10);
const GENERATED: &str = "/run/systemd/generator";

/// A unit file, with its specifiers replaced.
#[derive(Clone)]
struct Unit {
    name: String,
    text: String,
}

impl Unit {
    fn values(&self, key: &str) -> Vec<String> {
        let lines = self.text.lines().filter_map(|line| line.strip_prefix(&format!("{key}=")));
        lines.map(str::to_owned).collect()
    }

    fn words(&self, key: &str) -> Vec<String> {
        let lines = self.values(key);
        lines.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned).collect()
    }

    fn is(&self, key: &str, value: &str) -> bool {
        self.values(key).iter().any(|one| one == value)
    }
}

/// Decodes `\xHH` as bytes, a dash as a slash.
fn unescape(instance: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = instance.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after.strip_prefix(b"x").and_then(|hex| hex.get(..2));
        let hex = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        rest = match (first, hex) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                &after[3..]
            }
            (b'-', _) => {
                bytes.push(b'/');
                after
            }
            (byte, _) => {
                bytes.push(*byte);
                after
            }
        };
    }
    String::from_utf8(bytes).unwrap()
}

/// A unit that is up: a process that is restarted, or the effect of a command that has ended.
struct Running {
    name: String,
    after: Vec<String>,
    part_of: Vec<String>,
    process: Option<Process>,
}

struct Process {
    state: Arc<Mutex<State>>,
    keeper: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    child: Option<Child>,
    is_ending: bool,
    ended: Option<std::process::ExitStatus>,
}

pub struct Services {
    pid: u32,
    host: String,
    logs: PathBuf,
    running: Vec<Running>,
}

impl Services {
    pub fn new(pid: u32, host: &str, logs: PathBuf) -> Self {
        Self { pid, host: host.into(), logs, running: Vec::new() }
    }

    pub fn systemctl(&mut self, arguments: &str) {
        let words: Vec<&str> = arguments.split_whitespace().collect();
        let (flags, words): (Vec<&str>, Vec<&str>) =
            words.into_iter().partition(|word| word.starts_with('-'));
        let [verb, units @ ..] = &words[..] else { panic!("systemctl {arguments}: no verb") };
        let units: Vec<String> = units
            .iter()
            .flat_map(|unit| self.matching(unit.trim_matches('\'')))
            .map(|unit| if unit.contains('.') { unit } else { format!("{unit}.service") })
            .collect();
        let now = flags.contains(&"--now");
        match *verb {
            "daemon-reload" => self.generate(),
            "enable" => {
                units.iter().for_each(|unit| self.enable(unit));
                self.generate();
                if now {
                    units.iter().for_each(|unit| self.start(unit));
                }
            }
            "disable" => {
                units.iter().for_each(|unit| self.disable(unit));
                if now {
                    units.iter().for_each(|unit| self.stop(unit));
                }
            }
            "start" => units.iter().for_each(|unit| self.start(unit)),
            "stop" => units.iter().for_each(|unit| self.stop(unit)),
            "restart" => units.iter().for_each(|unit| self.restart(unit)),
            "try-restart" => units
                .iter()
                .filter(|unit| self.is_up(unit))
                .cloned()
                .collect::<Vec<_>>()
                .iter()
                .for_each(|unit| self.restart(unit)),
            "kill" => units.iter().for_each(|unit| self.kill(unit)),
            other => panic!("systemctl {other} is not known here"),
        }
    }

    pub fn active(&self) -> Vec<String> {
        self.running.iter().map(|running| running.name.clone()).collect()
    }

    pub fn boot(&mut self) {
        self.generate();
        for unit in self.linked("multi-user.target") {
            self.start(&unit);
        }
    }

    /// Ends all processes by SIGKILL; none of them is restarted.
    pub fn crash(&mut self) {
        let processes: Vec<Process> =
            self.running.drain(..).filter_map(|running| running.process).collect();
        for process in &processes {
            let mut state = process.state.lock().unwrap();
            state.is_ending = true;
            if let Some(child) = &mut state.child {
                child.kill().unwrap();
            }
        }
        for process in processes {
            process.keeper.join().unwrap();
        }
    }

    /// Ends the test; prints the last lines of each log where it failed.
    pub fn end(&mut self, is_failure: bool) {
        for process in self.running.iter().filter_map(|running| running.process.as_ref()) {
            let mut state = process.state.lock().unwrap_or_else(|broken| broken.into_inner());
            state.is_ending = true;
            if let Some(child) = &mut state.child {
                let _ = child.kill();
            }
        }
        for process in self.running.drain(..).filter_map(|running| running.process) {
            let _ = process.keeper.join();
        }
        for entry in fs::read_dir(&self.logs).into_iter().flatten().flatten() {
            if is_failure {
                let log = fs::read_to_string(entry.path()).unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(12).collect();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
                eprintln!("{} {}:\n{tail}", self.host, entry.file_name().display());
            }
        }
    }

    fn shell(&self, line: &str) -> std::process::Output {
        super::within(self.pid, "sh").args(["-c", line]).output().unwrap()
    }

    fn ok(&self, line: &str) -> String {
        let output = self.shell(line);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}# {line}: {printed}", self.host);
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Returns the units that a pattern matches: those that are up, or the one of this name.
    fn matching(&self, pattern: &str) -> Vec<String> {
        let Some((before, after)) = pattern.split_once('*') else {
            return vec![pattern.to_owned()];
        };
        let fits = |name: &&String| name.starts_with(before) && name.ends_with(after);
        let active = self.active();
        active.iter().filter(fits).cloned().collect()
    }

    fn is_up(&self, unit: &str) -> bool {
        self.running.iter().any(|running| running.name == unit)
    }

    /// Returns a unit; `None`: it is no unit of Quoin's package.
    fn unit(&self, name: &str) -> Option<Unit> {
        let (prefix, suffix) = name.rsplit_once('.')?;
        let (file, instance) = match prefix.split_once('@') {
            Some((template, instance)) => (format!("{template}@.{suffix}"), instance),
            None => (name.to_owned(), ""),
        };
        let output = self.shell(&format!("cat '/lib/systemd/system/{file}'"));
        if !output.status.success() || !file.starts_with("quoin") {
            return None;
        }
        let text = String::from_utf8(output.stdout).unwrap();
        let text = text.replace("%i", instance).replace("%I", &unescape(instance));
        Some(Unit { name: name.to_owned(), text: text.replace("%H", &self.host) })
    }

    fn generate(&self) {
        self.ok(&format!(
            "rm -rf {GENERATED} && mkdir -p {GENERATED} && for generator in \
             /lib/systemd/system-generators/quoin*; do [ ! -e $generator ] || \
             $generator {GENERATED} {GENERATED} {GENERATED}; done"
        ));
    }

    fn enable(&self, name: &str) {
        let unit = self.unit(name).unwrap_or_else(|| panic!("there is no unit {name}"));
        for wanting in unit.words("WantedBy") {
            let directory = format!("/etc/systemd/system/{wanting}.wants");
            self.ok(&format!(
                "mkdir -p {directory} && ln -sf '/lib/systemd/system/{name}' {directory}/"
            ));
        }
    }

    fn disable(&self, name: &str) {
        self.ok(&format!("rm -f /etc/systemd/system/*.wants/'{name}'"));
    }

    /// Returns the entries of `NAME.wants/`, wherever it is.
    fn linked(&self, name: &str) -> Vec<String> {
        let listed = self.ok(&format!(
            "ls /etc/systemd/system/'{name}'.wants {GENERATED}/'{name}'.wants 2>/dev/null | cat"
        ));
        let names = listed.lines().filter(|line| line.starts_with("quoin"));
        names.map(str::to_owned).collect()
    }

    fn start(&mut self, name: &str) {
        let mut wanted: BTreeMap<String, Unit> = BTreeMap::new();
        let mut waiting = vec![name.to_owned()];
        while let Some(next) = waiting.pop() {
            if wanted.contains_key(&next) {
                continue;
            }
            let Some(unit) = self.unit(&next) else { continue };
            let is_met = |path: &str| self.shell(&format!("test -e '{path}'")).status.success();
            // Of those with a bar before their path one is enough.
            let conditions = unit.values("ConditionPathExists");
            let (either, all): (Vec<&str>, Vec<&str>) =
                conditions.iter().map(String::as_str).partition(|path| path.starts_with('|'));
            let is_met_by_one = either.is_empty() || either.iter().any(|path| is_met(&path[1..]));
            if !is_met_by_one || !all.iter().all(|path| is_met(path)) {
                continue;
            }
            waiting.extend(unit.words("Wants").into_iter().chain(unit.words("Requires")));
            waiting.extend(self.linked(&next));
            wanted.insert(next, unit);
        }
        assert!(wanted.contains_key(name), "{name} is no unit here, or a condition does not hold");
        while !wanted.is_empty() {
            let is_next =
                |unit: &&Unit| unit.words("After").iter().all(|after| !wanted.contains_key(after));
            let next = wanted.values().find(is_next).expect("the order has no circle").clone();
            wanted.remove(&next.name);
            if !self.is_up(&next.name) {
                self.launch(&next);
            }
        }
    }

    fn launch(&mut self, unit: &Unit) {
        for (key, root) in [("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")] {
            for directory in unit.words(key) {
                self.ok(&format!("mkdir -p {root}/{directory}"));
            }
        }
        // A service that is started once and stays: it is retried in the background where it fails.
        let process = unit.name.ends_with(".service").then(|| self.keep(unit));
        self.running.push(Running {
            name: unit.name.clone(),
            after: unit.words("After"),
            part_of: unit.words("PartOf"),
            process,
        });
    }

    /// Starts the command of a unit, in its environment.
    fn spawn(&self, unit: &Unit) -> Child {
        let [exec] = &unit.values("ExecStart")[..] else { panic!("{} has one command", unit.name) };
        spawn(self.pid, unit, exec, &self.logs)
    }

    /// Starts a process and restarts it whenever it ends.
    fn keep(&self, unit: &Unit) -> Process {
        let first = self.spawn(unit);
        let state = Arc::new(Mutex::new(State { child: Some(first), ..State::default() }));
        let (pid, unit, logs, shared) = (self.pid, unit.clone(), self.logs.clone(), state.clone());
        let keeper = std::thread::spawn(move || {
            let mut starts = vec![Instant::now()];
            let pause = unit.values("RestartSec").first().map_or(Duration::ZERO, |text| span(text));
            loop {
                std::thread::sleep(Duration::from_millis(20));
                let mut state = shared.lock().unwrap();
                let Some(status) = state.child.as_mut().and_then(|c| c.try_wait().unwrap()) else {
                    continue;
                };
                state.child = None;
                let is_final = |code: i32| unit.is("RestartPreventExitStatus", &code.to_string());
                let again = !status.code().is_some_and(is_final) && unit.is("Restart", "always")
                    || (unit.is("Restart", "on-failure") && !status.success());
                if state.is_ending || !again {
                    state.ended = Some(status);
                    return;
                }
                drop(state);
                std::thread::sleep(pause);
                starts.retain(|start| start.elapsed() < STARTS_WITHIN);
                let is_limited = !unit.is("StartLimitIntervalSec", "0");
                assert!(
                    !is_limited || starts.len() < STARTS_MAX,
                    "systemd gives {} up: it was started too often",
                    unit.name
                );
                let mut state = shared.lock().unwrap();
                if state.is_ending {
                    // The unit was stopped between two starts.
                    return;
                }
                starts.push(Instant::now());
                let [exec] = &unit.values("ExecStart")[..] else { unreachable!() };
                state.child = Some(spawn(pid, &unit, exec, &logs));
            }
        });
        Process { state, keeper }
    }

    fn stop(&mut self, name: &str) {
        // No effect where it is not up.
        let is_stopped =
            |running: &Running| running.name == name || running.part_of.iter().any(|of| of == name);
        let mut names: Vec<String> =
            self.running.iter().filter(|r| is_stopped(r)).map(|r| r.name.clone()).collect();
        // Units stop in the reverse order of their start.
        while !names.is_empty() {
            let set: BTreeSet<&String> = names.iter().collect();
            let is_last = |one: &&String| {
                let others = self.running.iter().filter(|r| set.contains(&r.name));
                others.into_iter().all(|other| !other.after.contains(one))
            };
            let last = names.iter().find(is_last).expect("the order has no circle").clone();
            names.retain(|one| *one != last);
            self.stop_one(&last);
        }
    }

    fn stop_one(&mut self, name: &str) {
        let index = self.running.iter().position(|running| running.name == name).unwrap();
        let Some(process) = self.running.remove(index).process else { return };
        {
            let mut state = process.state.lock().unwrap();
            state.is_ending = true;
            if let Some(child) = &state.child {
                signal(child.id(), "TERM");
            }
        }
        process.keeper.join().unwrap();
        let ended = process.state.lock().unwrap().ended;
        // systemd considers an end by the requested signal clean.
        let is_clean = ended.is_none_or(|status| status.success() || status.signal() == Some(15));
        assert!(is_clean, "{} {name}: {ended:?}", self.host);
    }

    fn restart(&mut self, name: &str) {
        let members: Vec<String> = self
            .running
            .iter()
            .filter(|r| r.part_of.iter().any(|of| of == name))
            .map(|r| r.name.clone())
            .collect();
        if self.is_up(name) {
            self.stop(name);
        }
        self.start(name);
        for member in members {
            if !self.is_up(&member) {
                self.start(&member);
            }
        }
    }

    /// Sends SIGKILL to its process, which is restarted.
    fn kill(&mut self, name: &str) {
        let running = self.running.iter().find(|running| running.name == name).unwrap();
        let mut state = running.process.as_ref().unwrap().state.lock().unwrap();
        if let Some(child) = &mut state.child {
            child.kill().unwrap();
        }
    }
}

/// Starts a command line of a unit. `${NAME}` is one word, `$NAME` as many as it holds: the shell's
/// rules except for quotes.
fn spawn(pid: u32, unit: &Unit, exec: &str, logs: &std::path::Path) -> Child {
    let mut environment = BTreeMap::new();
    let mut set = |line: &str| {
        let Some((key, value)) = line.split_once('=') else { return };
        environment.insert(key.trim().to_owned(), value.trim_matches('"').to_owned());
    };
    unit.words("Environment").iter().for_each(|word| set(word));
    for file in unit.values("EnvironmentFile") {
        let path = format!("/proc/{pid}/root{}", file.trim_start_matches('-'));
        let Ok(content) = fs::read_to_string(&path) else {
            assert!(file.starts_with('-'), "{}: no {file}", unit.name);
            continue;
        };
        content.lines().filter(|line| !line.starts_with(['#', ';'])).for_each(&mut set);
    }
    for variable in unit.words("UnsetEnvironment") {
        environment.remove(&variable);
    }
    let line = exec.replace("${", "\"${").replace('}', "}\"");
    let log = logs.join(format!("{}.log", unit.name));
    let log = fs::File::options().create(true).append(true).open(log).unwrap();
    let mut command = super::within(pid, "sh");
    command.args(["-c", &format!("exec {line}")]);
    command.envs(environment).stdout(log.try_clone().unwrap()).stderr(log);
    // SAFETY: `prctl` with these arguments is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            // A test that is killed takes its processes along.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    command.spawn().unwrap()
}

/// A span of time as units have it: seconds, or milliseconds with their unit.
fn span(text: &str) -> Duration {
    match text.strip_suffix("ms") {
        Some(milliseconds) => Duration::from_millis(milliseconds.parse().unwrap()),
        None => Duration::from_secs(text.parse().unwrap()),
    }
}
