//! Runs a program so that nothing of it is left when it is over.
//!
//! As root the program has namespaces of its own for processes and mounts: everything that it
//! started and mounted ends with it. Otherwise it has a process group, which is killed as a whole.
//! A process that does not end by SIGKILL waits in the kernel: most likely for an answer of a FUSE
//! mount whose server is that same process. Such a connection is aborted, as `umount -f` does.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const MEMORY_KIB: u64 = 8 << 20;
const POLL: Duration = Duration::from_millis(5);
/// Time within which a killed process must end.
const END: Duration = Duration::from_secs(10);

pub struct Program<'a> {
    /// Name for messages.
    pub name: &'a str,
    pub path: &'a Path,
    pub arguments: &'a [String],
    pub folder: PathBuf,
    pub variables: Vec<(&'static str, String)>,
    pub cpu: Duration,
    pub wall: Duration,
}

pub struct Output {
    pub text: String,
    pub ending: Ending,
}

#[derive(Debug, PartialEq)]
pub enum Ending {
    Success,
    Failure(String),
    /// The program used up its time, of the CPU or of the clock.
    Late,
}

/// True if this process may make the namespaces.
static HAS_NAMESPACES: LazyLock<bool> = LazyLock::new(|| {
    let mut unshare = Command::new("unshare");
    unshare.args(NAMESPACES).arg("true").stderr(Stdio::null());
    unshare.status().is_ok_and(|status| status.success())
});
const NAMESPACES: [&str; 4] = ["--mount", "--pid", "--fork", "--mount-proc"];

impl Program<'_> {
    /// Runs the program. `scratch` is its temporary directory, made for it and removed afterwards.
    pub fn run(&self, scratch: &Path) -> Result<Output> {
        std::fs::create_dir_all(scratch)?;
        // A file and no pipe: a process that does not end cannot block the reader.
        let printed = scratch.join("printed");
        let mut child = self.command(scratch)?.stdout(std::fs::File::create(&printed)?).spawn()?;
        let start = Instant::now();
        let ending = loop {
            match child.try_wait()? {
                Some(status) => break ending(status),
                None if start.elapsed() > self.wall => {
                    self.end(&mut child);
                    break Ending::Late;
                }
                None => std::thread::sleep(POLL),
            }
        };
        let text = String::from_utf8_lossy(&std::fs::read(&printed)?).into_owned();
        free_loop_devices(scratch);
        // Files that a process without end holds there may stay.
        let _ = std::fs::remove_dir_all(scratch);
        Ok(Output { text, ending })
    }

    fn command(&self, scratch: &Path) -> Result<Command> {
        let program = self.path.to_str().context("a path of UTF-8")?;
        // The shell stays: as the first process of its namespace it adopts orphans.
        let limited = format!(
            "ulimit -t {}; ulimit -v {MEMORY_KIB}; \"$@\"; exit $?",
            self.cpu.as_secs().max(1)
        );
        let shell = ["sh", "-c", &limited, "sh", program];
        let mut command = if *HAS_NAMESPACES {
            let mut unshare = Command::new("unshare");
            unshare.args(NAMESPACES).arg("--kill-child").args(shell);
            unshare
        } else {
            let mut sh = Command::new(shell[0]);
            sh.args(&shell[1..]);
            sh
        };
        command.args(self.arguments).current_dir(&self.folder).process_group(0);
        command.stdin(Stdio::null()).stderr(Stdio::null()).env("TMPDIR", scratch);
        command.envs(self.variables.iter().map(|(key, value)| (key, value)));
        Ok(command)
    }

    fn end(&self, child: &mut Child) {
        let connections = connections_within(child);
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        if has_ended(child) {
            return;
        }
        let process = child.id();
        eprintln!("{}: process {process} does not end after SIGKILL", self.name);
        for connection in &connections {
            eprintln!("{}: FUSE connection {connection} is aborted", self.name);
            abort(*connection);
        }
        if !has_ended(child) {
            eprintln!("{}: process {process} is left behind", self.name);
        }
    }
}

/// Frees loop devices, which end with no process and no namespace.
fn free_loop_devices(scratch: &Path) {
    for device in std::fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file"));
        if file.is_ok_and(|file| Path::new(&file).starts_with(scratch)) {
            let path = Path::new("/dev").join(device.file_name());
            let _ = Command::new("losetup").arg("--detach").arg(path).status();
        }
    }
}

fn has_ended(child: &mut Child) -> bool {
    let start = Instant::now();
    while start.elapsed() < END {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        std::thread::sleep(POLL);
    }
    false
}

fn ending(status: ExitStatus) -> Ending {
    // The shell adds 128: SIGKILL and SIGXCPU are the limit of CPU time.
    match (status.code(), status.signal()) {
        (Some(0), _) => Ending::Success,
        (Some(137 | 152), _) | (_, Some(9 | 24)) => Ending::Late,
        _ => Ending::Failure(status.to_string()),
    }
}

/// Returns the FUSE connections that processes in the program's namespaces have mounted, and this
/// one has not.
fn connections_within(child: &Child) -> BTreeSet<u32> {
    let namespace = |path: String| std::fs::read_link(path).ok();
    let Some(within) = namespace(format!("/proc/{}/ns/pid_for_children", child.id())) else {
        return BTreeSet::new();
    };
    let own = connections(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default());
    if namespace("/proc/self/ns/pid".into()).as_ref() == Some(&within) {
        return BTreeSet::new();
    }
    let mut found = BTreeSet::new();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if std::fs::read_link(process.path().join("ns/pid")).is_ok_and(|there| there == within) {
            let mounts = std::fs::read_to_string(process.path().join("mountinfo"));
            found.extend(connections(&mounts.unwrap_or_default()));
        }
    }
    &found - &own
}

/// Returns the minor device numbers of the FUSE mounts in a table of `/proc/PID/mountinfo`: the
/// kernel names a connection by that.
fn connections(mounts: &str) -> BTreeSet<u32> {
    let minor = |line: &str| {
        let (place, kind) = line.split_once(" - ")?;
        let is_fuse = kind.split(' ').next()?.starts_with("fuse") && !kind.starts_with("fusectl");
        let device = place.split(' ').nth(2).filter(|_| is_fuse)?;
        device.split_once(':')?.1.parse().ok()
    };
    mounts.lines().filter_map(minor).collect()
}

fn abort(connection: u32) {
    const CONTROL: &str = "/sys/fs/fuse/connections";
    let write = format!(
        "mount -t fusectl none {CONTROL} 2>/dev/null; echo 1 >{CONTROL}/{connection}/abort"
    );
    let _ = Command::new("unshare").args(["--mount", "sh", "-c", &write]).status();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, wall: Duration) -> Output {
        let arguments = ["-c".to_owned(), script.to_owned()];
        let scratch = tempfile::tempdir().unwrap();
        let program = Program {
            name: "a script",
            path: Path::new("/bin/sh"),
            arguments: &arguments,
            folder: "/".into(),
            variables: vec![("SAID", "aloud".into())],
            cpu: Duration::from_secs(5),
            wall,
        };
        program.run(&scratch.path().join("of-the-script")).unwrap()
    }

    #[test]
    fn a_program_says_what_it_printed_and_how_it_ended() {
        let soon = Duration::from_secs(20);
        let output = run("echo $SAID; test -d \"$TMPDIR\"", soon);
        assert_eq!((output.text.as_str(), output.ending), ("aloud\n", Ending::Success));
        assert!(matches!(run("exit 3", soon).ending, Ending::Failure(_)));
        assert_eq!(run("kill -XCPU $$", soon).ending, Ending::Late);
    }

    #[test]
    fn a_program_that_is_late_is_ended_with_what_it_started() {
        let start = Instant::now();
        let output = run("sleep 100 & sleep 100", Duration::from_millis(200));
        assert_eq!(output.ending, Ending::Late);
        assert!(start.elapsed() < END, "{:?}", start.elapsed());
    }

    #[test]
    fn a_fuse_connection_is_named_by_the_device_of_its_mount() {
        let table = "22 1 0:20 / / rw shared:1 - ext4 /dev/vda rw\n\
                     90 1 0:50 / /mnt/a rw - fuse.quoin quoin:db rw\n\
                     91 1 0:51 / /mnt/b rw shared:9 - fuse x rw\n\
                     92 1 0:52 / /sys/fs/fuse/connections rw - fusectl none rw\n\
                     nonsense\n";
        assert_eq!(connections(table), BTreeSet::from([50, 51]));
    }
}
