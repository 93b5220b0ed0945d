//! A host: a network, a mount table and a host name of its own, and the processes that run there.
//!
//! The kernel and the file system are shared, so each host has its directories and sees no block
//! devices but through its own attach process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

const STOP_BUDGET: Duration = Duration::from_secs(30);

/// A bridge in a network namespace of its own.
pub struct Switch {
    holder: Holder,
}

/// A process that keeps namespaces alive until its input ends.
struct Holder(Child);

impl Holder {
    fn new(kinds: &[&str], script: &str) -> Result<Self> {
        let script = format!("set -e; {script}; echo ready; read line");
        let mut child = Command::new("unshare")
            .args(kinds)
            .args(["sh", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start unshare")?;
        let mut line = String::new();
        let output = child.stdout.take().context("the holder's output")?;
        BufReader::new(output).read_line(&mut line)?;
        let holder = Self(child);
        match line.trim() {
            "ready" => Ok(holder),
            _ => bail!("the namespaces of a host cannot be set up: {script}"),
        }
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The wait fails only where the holder has ended.
        let _ = self.0.wait();
    }
}

impl Switch {
    pub fn new() -> Result<Self> {
        let script = "ip link add br0 type bridge && ip link set br0 up";
        Ok(Self { holder: Holder::new(&["--net"], script)? })
    }

    fn ip(&self, arguments: &str) -> Result<()> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder.pid().to_string(), "--net", "ip"]);
        run(command.args(arguments.split(' '))).map(drop)
    }

    /// Drops all packets from and to this host. The host observes only silence.
    pub fn cut(&self, host: &Host) -> Result<()> {
        self.ip(&format!("link set {} down", host.name))
    }

    pub fn heal(&self, host: &Host) -> Result<()> {
        self.ip(&format!("link set {} up", host.name))
    }
}

struct Process {
    arguments: Vec<String>,
    child: Option<Child>,
}

pub struct Host {
    pub name: String,
    pub address: String,
    /// Directory of all files of the host.
    pub directory: PathBuf,
    holder: Holder,
    quoin: PathBuf,
    logs: PathBuf,
    processes: BTreeMap<&'static str, Process>,
}

impl Host {
    pub fn new(number: u8, quoin: &Path, under: &Path, switch: &Switch) -> Result<Self> {
        let name = format!("h{number}");
        let directory = under.join(&name);
        let logs = under.join("logs");
        for made in [&directory.join("run/csi"), &directory.join("mnt"), &logs] {
            std::fs::create_dir_all(made)?;
        }
        // Each host has stable device names of its own.
        let script = format!(
            "hostname {name}; ip link set lo up; mkdir -p /dev/quoin; mount -t tmpfs none /dev/quoin"
        );
        let holder = Holder::new(&["--mount", "--net", "--uts"], &script)?;
        let host = Self {
            address: format!("10.78.7.{number}"),
            directory,
            holder,
            quoin: quoin.to_owned(),
            logs,
            processes: BTreeMap::new(),
            name,
        };
        let (name, pid) = (&host.name, host.holder.pid());
        switch.ip(&format!("link add {name} type veth peer name eth0 netns {pid}"))?;
        switch.ip(&format!("link set {name} master br0 up"))?;
        host.ip(&format!("addr add {}/24 dev eth0", host.address))?;
        host.ip("link set eth0 up")?;
        Ok(host)
    }

    /// Returns a command on this host.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder.pid().to_string(), "--mount", "--net", "--uts"]);
        command.arg("--").arg(program).stdin(Stdio::null());
        command
    }

    pub fn ip(&self, arguments: &str) -> Result<()> {
        run(self.command("ip").args(arguments.split(' '))).map(drop)
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Returns the path of the host's file for this process, through the host's mount table.
    pub fn seen(&self, name: &str) -> PathBuf {
        let below = self.directory.join(name);
        PathBuf::from(format!("/proc/{}/root{}", self.holder.pid(), below.display()))
    }

    /// Runs `quoin` on this host as users do. The devices of other hosts are hidden from it.
    pub fn quoin(&self, socket: &str, arguments: &[&str]) -> Result<String> {
        let mut command = self.command("unshare");
        let script = "mount -t tmpfs none /sys/block && exec \"$@\"";
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&self.quoin).args(arguments);
        run(command.env("QUOIN_SOCKET", socket).env_remove("QUOIN_JOIN_TOKEN"))
            .with_context(|| format!("quoin {} on {}", arguments.join(" "), self.name))
    }

    /// Adds a process and starts it.
    pub fn add(&mut self, role: &'static str, arguments: &[&str]) -> Result<()> {
        let arguments = arguments.iter().map(ToString::to_string).collect();
        self.processes.insert(role, Process { arguments, child: None });
        self.ensure(role)
    }

    pub fn is_running(&mut self, role: &str) -> Result<bool> {
        let Some(process) = self.processes.get_mut(role) else { return Ok(false) };
        Ok(match &mut process.child {
            Some(child) => child.try_wait()?.is_none(),
            None => false,
        })
    }

    /// Starts all processes of the host that do not run, as its service manager does.
    pub fn tend(&mut self) -> Result<()> {
        let roles: Vec<_> = self.processes.keys().copied().collect();
        roles.into_iter().try_for_each(|role| self.ensure(role))
    }

    fn ensure(&mut self, role: &str) -> Result<()> {
        if self.is_running(role)? {
            return Ok(());
        }
        let log = self.logs.join(format!("{}-{role}.log", self.name));
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = self.command(&self.quoin);
        let process = self.processes.get_mut(role).context("a process of this name")?;
        command.args(&process.arguments).stdout(log.try_clone()?).stderr(log);
        // SAFETY: `prctl` with these arguments is async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        process.child = Some(command.spawn().with_context(|| format!("start {role}"))?);
        Ok(())
    }

    /// Kills these processes together; [`Self::tend`] starts them again.
    pub fn kill(&mut self, roles: &[&str]) -> Result<()> {
        let mut killed = Vec::new();
        for (role, process) in &mut self.processes {
            if roles.contains(role)
                && let Some(mut child) = process.child.take()
            {
                // The kill fails only where the process has ended.
                let _ = child.kill();
                killed.push(child);
            }
        }
        killed.iter_mut().try_for_each(|child| Ok(child.wait().map(drop)?))
    }

    pub fn crash(&mut self) -> Result<()> {
        let roles: Vec<_> = self.processes.keys().copied().collect();
        self.kill(&roles)
    }

    /// Removes a process from the host; it is killed where it runs.
    pub fn forget(&mut self, role: &'static str) -> Result<()> {
        self.kill(&[role])?;
        self.processes.remove(role);
        Ok(())
    }

    /// Sends SIGTERM to all, front to back. The holder goes before attach, which would leave it
    /// devices.
    pub fn stop(&mut self) {
        for role in ["node", "holder", "attach", "target", "pool", "controller"] {
            let Some(process) = self.processes.get_mut(role) else { continue };
            let Some(mut child) = process.child.take() else { continue };
            // Both fail only where the process has ended.
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
            let began = Instant::now();
            while child.try_wait().is_ok_and(|status| status.is_none()) {
                if began.elapsed() > STOP_BUDGET {
                    eprintln!("{} {role} does not end", self.name);
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl Host {
    /// Unmounts and frees everything that the kernel would keep after the host, as after a failure.
    fn free_devices(&self) {
        let script = format!(
            "losetup --list --noheadings --output NAME,BACK-FILE | grep ' {}/' | \
             while read -r device file; do umount --lazy $device; losetup -d $device; done",
            self.directory.display()
        );
        // Nothing is left where no step failed.
        let _ = self.command("sh").args(["-c", &script]).stderr(Stdio::null()).status();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
        self.free_devices();
    }
}

/// Runs a command that must succeed, and returns its output.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        let (out, err) = (output.stdout, output.stderr);
        let (out, err) = (String::from_utf8_lossy(&out), String::from_utf8_lossy(&err));
        bail!("{:?}: {}: {}{}", command.get_program(), output.status, out.trim(), err.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
