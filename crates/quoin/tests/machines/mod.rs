//! Machines for tests: each an overlay over this one's root file system, with a name, a network and
//! a service manager of its own. All changes of a machine are removed with the test.
//!
//! The kernel is shared, and with it the loop devices and `/sys/block`. The service manager
//! ([`services`]) reads the installed units as systemd does and runs their commands.

#![allow(dead_code)] // Each test binary uses its part.

mod services;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use crate::common::{FORGET_MOUNTS, can_attach, eventually, have, is_root, skipped};
use services::Services;

const SET_UP: &str = r#"
set -e
hostname "$2"
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t tmpfs none "$1/root/run"
mount -t tmpfs none "$1/root/tmp"
for shared in proc sys dev; do mount --rbind /$shared "$1/root/$shared"; done
mkdir -p /dev/quoin
mount -t tmpfs none "$1/root/dev/quoin"
ip link set lo up
echo ready
exec chroot "$1/root" sh -c 'read line'
"#;

/// Returns whether machines can be made here; prints why not.
pub fn is_supported() -> bool {
    let is_supported =
        is_root() && ["dpkg-deb", "nsenter", "ip"].into_iter().all(have) && can_attach();
    if !is_supported {
        skipped("machines need root, dpkg, util-linux, iproute2, FUSE and loop devices");
    }
    is_supported
}

/// A copy-on-write machine.
pub struct Machine {
    pub name: String,
    holder: Child,
    /// The namespaces of the machine belong to this process.
    pid: u32,
    services: Services,
}

impl Machine {
    /// Makes a machine that is alone; [`Switch::plug`] connects it.
    pub fn new(scratch: &Path, name: &str) -> Self {
        let base = scratch.join(name);
        let logs = scratch.join(format!("{name}-logs"));
        for directory in [&base, &logs] {
            fs::create_dir_all(directory).unwrap();
        }
        let mut command = Command::new("unshare");
        let set_up = format!("{FORGET_MOUNTS}{SET_UP}");
        command.args(["--mount", "--net", "--uts", "sh", "-c", &set_up]).arg(scratch);
        command.arg(&base).arg(name);
        let (holder, pid) = hold(command);
        eventually("the machine's root is in its place", || {
            let root = fs::read_link(format!("/proc/{pid}/root")).ok()?;
            (root != Path::new("/")).then_some(())
        });
        Self { name: name.into(), holder, pid, services: Services::new(pid, name, logs) }
    }

    pub fn run(&self, line: &str) -> Output {
        within(self.pid, "sh").args(["-c", line]).output().unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    #[track_caller]
    pub fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(output.status.success(), "{}# {line}: {printed}\n{errors}", self.name);
        printed
    }

    #[track_caller]
    pub fn refused(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success(), "{}# {line} succeeded", self.name);
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    #[track_caller]
    pub fn eventually_ok(&self, what: &str, line: &str) {
        eventually(what, || self.run(line).status.success().then_some(()));
    }

    /// Returns the path of the machine's file for this process.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.pid))
    }

    /// Writes a file that only root reads.
    pub fn write(&self, inside: &str, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(inside);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// Hides the devices of the kernel, which the machines share: for one that uses none.
    pub fn hide_devices(&self) {
        self.ok("mount -t tmpfs none /sys/block");
    }

    /// Makes `systemctl` of the machine a program that records its calls for [`Self::carry_out`],
    /// and makes the machine appear to run systemd.
    pub fn listen_to_scripts(&self) {
        self.ok("mkdir -p /run/systemd/system");
        self.ok("rm -f /usr/bin/systemctl /bin/systemctl");
        self.ok(
            "printf '%s\\n' '#!/bin/sh' 'echo \"$@\" >> /run/systemctl.calls' > /usr/bin/systemctl",
        );
        self.ok("chmod 755 /usr/bin/systemctl");
    }

    /// Carries out the scripts' calls of `systemctl` since the last time, and returns them.
    pub fn carry_out(&mut self) -> Vec<String> {
        let calls = self.ok("cat /run/systemctl.calls 2>/dev/null; rm -f /run/systemctl.calls");
        let calls: Vec<String> = calls.lines().map(str::to_owned).collect();
        for call in &calls {
            self.systemctl(call);
        }
        calls
    }

    /// Runs `systemctl ARGUMENTS` by the service manager of the test.
    pub fn systemctl(&mut self, arguments: &str) {
        self.services.systemctl(arguments);
    }

    /// Returns the units that are up.
    pub fn active(&self) -> Vec<String> {
        self.services.active()
    }

    /// Ends all processes of units at once, as a crash of the host does. No device and no mount of
    /// a volume survives it, and `/run` is empty.
    pub fn crash(&mut self) {
        self.services.crash();
        self.free_devices();
        self.ok("find /run -mindepth 1 -delete");
    }

    /// Unmounts volumes and everything below `/run`, and frees block devices without a server.
    fn free_devices(&self) {
        let listed = self.run("losetup --list --noheadings --output NAME,BACK-FILE").stdout;
        let listed = String::from_utf8_lossy(&listed);
        let devices: Vec<&str> = listed
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(_, file)| file.trim().starts_with("/run/quoin/"))
            .map(|(device, _)| device)
            .collect();
        let mounts = fs::read_to_string(format!("/proc/{}/mounts", self.pid)).unwrap_or_default();
        for mount in mounts.lines().rev() {
            let mut words = mount.split(' ').map(|word| word.replace("\\040", " "));
            let (Some(from), Some(at)) = (words.next(), words.next()) else { continue };
            if devices.contains(&from.as_str()) || at.starts_with("/run/") {
                self.run(&format!("umount --lazy '{at}'"));
            }
        }
        for device in devices {
            self.run(&format!("losetup -d {device}"));
        }
    }

    /// Starts the enabled units.
    pub fn boot(&mut self) {
        self.services.boot();
    }

    /// Installs a package that this process has.
    #[track_caller]
    pub fn install(&self, package: &Path) -> String {
        let mut dpkg = within(self.pid, "sh");
        let package = fs::File::open(package).unwrap();
        let line = "cat > /tmp/quoin.deb && dpkg -i /tmp/quoin.deb && rm /tmp/quoin.deb";
        let output = dpkg.args(["-c", line]).stdin(package).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "dpkg: {printed}");
        printed
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.services.end(std::thread::panicking());
        // The kernel would keep them after the machine.
        self.free_devices();
        // The closed input ends `read`, and with the last process the mounts are gone.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// A bridge in a network namespace of its own; machines are plugged into it.
pub struct Switch {
    holder: Child,
    pid: u32,
}

impl Switch {
    pub fn new() -> Self {
        let mut command = Command::new("unshare");
        let line = "ip link add br0 type bridge && ip link set br0 up && echo ready && read line";
        command.args(["--net", "sh", "-c", line]);
        let (holder, pid) = hold(command);
        Self { holder, pid }
    }

    /// Connects a machine by this address of 10.80.0.0/24.
    pub fn plug(&self, machine: &Machine, host: u8) {
        let (name, pid) = (&machine.name, machine.pid);
        self.ip(&format!("link add {name} type veth peer name eth0 netns {pid}"));
        self.ip(&format!("link set {name} master br0 up"));
        machine.ok(&format!("ip addr add 10.80.0.{host}/24 dev eth0 && ip link set eth0 up"));
    }

    /// Cuts or restores the link of a machine; neither side is informed.
    pub fn link(&self, machine: &Machine, state: &str) {
        self.ip(&format!("link set {} {state}", machine.name));
    }

    fn ip(&self, arguments: &str) {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--net", "ip"]).args(arguments.split(' '));
        let output = command.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "ip {arguments}: {printed}");
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// Starts a process that keeps namespaces until its input ends. `unshare` without a fork becomes
/// the shell, so the pid is that of the process.
fn hold(mut command: Command) -> (Child, u32) {
    let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "ready", "the namespaces could not be set up");
    let pid = holder.id();
    (holder, pid)
}

/// Returns a command in the namespaces of that process.
fn within(pid: u32, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", &pid.to_string(), "--mount", "--net", "--uts", "--root", "--wdns=/"]);
    command.arg(program).stdin(Stdio::null());
    for variable in ["QUOIN_SOCKET", "QUOIN_RUN", "QUOIN_JOIN_TOKEN"] {
        command.env_remove(variable);
    }
    command
}

/// Builds the package in a revision around the binary under test.
pub fn build_package(output: &Path, revision: u32) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let built = Command::new(cargo)
        .current_dir(root)
        .args(["run", "--quiet", "--package", "xtask", "--", "package"])
        .args(["--binary", env!("CARGO_BIN_EXE_quoin"), "--revision", &revision.to_string()])
        .arg("--output")
        .arg(output)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{printed}");
    PathBuf::from(String::from_utf8_lossy(&built.stdout).trim())
}
