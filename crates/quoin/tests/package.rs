//! The Debian package on a machine of its own: installed, used by its units' own command lines,
//! upgraded under a mounted volume, refused removal while that is mounted, removed and installed
//! again. The machine is an overlay over this one's root file system, with its own network. Needs
//! root.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::{Scratch, can_attach, eventually, have, is_root, signal, skipped};

/// A copy-on-write machine; all that it changes is gone with the test.
struct Machine {
    holder: Child,
    /// The table of mounts and the network of the machine belong to this process.
    pid: u32,
}

const SET_UP: &str = r#"
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t tmpfs none "$1/root/run"
mount -t tmpfs none "$1/root/tmp"
for shared in proc sys dev; do mount --rbind /$shared "$1/root/$shared"; done
ip link set lo up
echo ready
exec chroot "$1/root" sh -c 'read line'
"#;

impl Machine {
    fn new(scratch: &Path) -> Self {
        let base = scratch.join("machine");
        fs::create_dir_all(&base).unwrap();
        let mut holder = Command::new("unshare")
            .args(["--mount", "--net", "sh", "-c", SET_UP, "sh"])
            .arg(&base)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready", "the machine could not be set up");
        // `unshare` without a fork becomes the shell, and that becomes `chroot`.
        let pid = holder.id();
        eventually("the machine's root is in its place", || {
            let root = fs::read_link(format!("/proc/{pid}/root")).ok()?;
            (root != Path::new("/")).then_some(())
        });
        Self { holder, pid }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--mount", "--net", "--root", "--wd=/"]);
        command.arg(program).stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command("sh").args(["-c", line]).output().unwrap()
    }

    fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let said = String::from_utf8_lossy(&output.stderr);
        let printed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(output.status.success(), "{line}: {printed}\n{said}");
        printed
    }

    fn refused(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success(), "{line} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Starts the command line of an installed unit, with its environment files, as systemd would.
    fn start(&self, unit: &str, instance: &str, log: &Path) -> Child {
        let text = self.ok(&format!("cat /lib/systemd/system/{unit}")).replace("%i", instance);
        let values = |key: &str| -> Vec<String> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("{key}=")));
            lines.map(str::to_owned).collect()
        };
        for condition in values("ConditionPathExists") {
            self.ok(&format!("test -e {condition}"));
        }
        for directories in values("RuntimeDirectory") {
            for directory in directories.split(' ') {
                self.ok(&format!("mkdir -p /run/{directory}"));
            }
        }
        let mut environment = BTreeMap::new();
        for file in values("EnvironmentFile") {
            let content = self.ok(&format!("cat {}", file.trim_start_matches('-')));
            for line in content.lines().filter(|line| !line.starts_with('#')) {
                let Some((key, value)) = line.split_once('=') else { continue };
                environment.insert(key.to_owned(), value.trim_matches('"').to_owned());
            }
        }
        let [exec] = &values("ExecStart")[..] else { panic!("{unit} has one command") };
        // `${NAME}` is one word, `$NAME` as many as it holds: the shell's rules but for quotes.
        let line = exec.replace("${", "\"${").replace('}', "}\"");
        let log = fs::File::options().create(true).append(true).open(log).unwrap();
        self.command("sh")
            .args(["-c", &format!("exec {line}")])
            .envs(environment)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Its end ends `read`, and with the last process the mounts go.
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// Units that run, in the order of their start.
struct Units<'a> {
    machine: &'a Machine,
    logs: PathBuf,
    running: Vec<(String, Child)>,
}

impl Units<'_> {
    fn start(&mut self, unit: &str, instance: &str) {
        let child = self.machine.start(unit, instance, &self.logs.join(format!("{unit}.log")));
        self.running.push((unit.to_owned(), child));
    }

    fn stop(&mut self, unit: &str) {
        let index = self.running.iter().position(|(name, _)| name == unit).unwrap();
        let (_, mut child) = self.running.remove(index);
        signal(child.id(), "TERM");
        let status = child.wait().unwrap();
        // As systemd has it: an end by the signal that was asked for is clean.
        assert!(status.success() || status.signal() == Some(15), "{unit}: {status}");
    }
}

impl Drop for Units<'_> {
    fn drop(&mut self) {
        for (unit, mut child) in self.running.drain(..).rev() {
            if std::thread::panicking() {
                let log = fs::read_to_string(self.logs.join(format!("{unit}.log")));
                let log = log.unwrap_or_default();
                let tail: Vec<_> = log.lines().rev().take(10).collect();
                eprintln!("{unit}:\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Builds the package in a revision around the binary under test.
fn build(output: &Path, revision: u32) -> PathBuf {
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
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    PathBuf::from(String::from_utf8_lossy(&built.stdout).trim())
}

#[test]
fn a_host_installs_uses_upgrades_removes_and_installs_the_package_again() {
    if !is_root() || !have("dpkg-deb") || !have("nsenter") || !have("ip") || !can_attach() {
        return skipped("the package's machine needs root, dpkg, iproute2, FUSE and loop devices");
    }
    let scratch = Scratch::new("package");
    let packages = scratch.0.join("packages");
    let (first, second) = (build(&packages, 1), build(&packages, 2));
    let machine = Machine::new(&scratch.0);
    let install = |package: &Path| {
        let mut dpkg = machine.command("sh");
        let package = fs::File::open(package).unwrap();
        let line = "cat > /tmp/quoin.deb && dpkg -i /tmp/quoin.deb";
        let output = dpkg.args(["-c", line]).stdin(package).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "dpkg: {said}");
    };
    install(&first);
    assert!(machine.ok("quoin version").contains(env!("CARGO_PKG_VERSION")));
    if machine.run("command -v systemd-analyze").status.success() {
        let said = machine.ok("systemd-analyze verify /lib/systemd/system/quoin* 2>&1");
        assert!(!said.contains("quoin"), "{said}");
    }

    // A host that is everything: controller, one pool, a node.
    let logs = scratch.0.join("logs");
    fs::create_dir_all(&logs).unwrap();
    let mut units = Units { machine: &machine, logs, running: Vec::new() };
    machine.ok("quoin controller init --state /var/lib/quoin/controller");
    units.start("quoin-controller.service", "");
    eventually("the controller answers", || {
        machine.run("quoin cluster info").status.success().then_some(())
    });
    let configure = |example: &str, to: &str, role: &str, options: &str| {
        let token = machine.ok(&format!("quoin token create --role {role}"));
        machine.ok(&format!(
            "umask 077; sed -e 's/^NAME=.*/NAME=host-a/' -e 's/^CONTROLLER=.*/CONTROLLER=127.0.0.1:7400/' \
             -e 's/^QUOIN_JOIN_TOKEN=.*/QUOIN_JOIN_TOKEN={token}/' -e 's|^OPTIONS=.*|OPTIONS=\"{options}\"|' \
             /usr/share/doc/quoin/{example} > /etc/quoin/{to}"
        ));
    };
    let pool = "--capacity 1GiB --listen 127.0.0.1:7401 --node host-a";
    configure("pool.conf.example", "pool-a.conf", "pool", pool);
    configure("node.conf.example", "node.conf", "node", "");
    let node = ["quoin-target.service", "quoin-attach-holder.service", "quoin-attach.service"];
    let start_all = |units: &mut Units<'_>| {
        units.start("quoin-pool@.service", "a");
        for unit in node {
            units.start(unit, "");
        }
        eventually("the node has joined", || {
            machine.run("test -e /var/lib/quoin/node/cert.pem").status.success().then_some(())
        });
        units.start("quoin-node.service", "");
        eventually("the pool is online", || {
            machine.ok("quoin pool list").contains("Online").then_some(())
        });
        eventually("the node is online", || {
            machine.ok("quoin node list").contains("Online").then_some(())
        });
    };
    start_all(&mut units);
    machine.ok("quoin volume create db --size 64MiB --replicas 1");
    let attach = "quoin volume attach db --node host-a";
    let device = machine.ok(attach);
    machine.ok(&format!("mkfs.ext4 -q {device} && mkdir /srv/db && mount {device} /srv/db"));
    machine.ok("echo before > /srv/db/file && sync /srv/db/file");

    // The timer's command, three times with two kept.
    machine.ok("install -d -m 0700 /var/lib/quoin/backups");
    for _ in 0..3 {
        machine.ok("quoin controller backup --into /var/lib/quoin/backups --keep 2");
        machine.ok("sleep 1.1");
    }
    assert_eq!(machine.ok("ls /var/lib/quoin/backups | wc -l"), "2");

    // The upgrade: everything but the holder is restarted under the mounted volume.
    install(&second);
    assert!(machine.ok("dpkg-query -W quoin").ends_with("-2"));
    for (unit, instance) in [
        ("quoin-controller.service", ""),
        ("quoin-pool@.service", "a"),
        ("quoin-target.service", ""),
        ("quoin-attach.service", ""),
        ("quoin-node.service", ""),
    ] {
        units.stop(unit);
        units.start(unit, instance);
    }
    machine.ok("echo after >> /srv/db/file && sync /srv/db/file");
    assert_eq!(machine.ok("cat /srv/db/file"), "before\nafter");

    // A mounted volume keeps the package.
    let said = machine.refused("dpkg -r quoin");
    assert!(said.contains(&format!("{device} is mounted")), "{said}");
    machine.ok("quoin volume list");
    machine.ok("umount /srv/db && quoin volume detach db");
    for unit in ["quoin-node.service", "quoin-attach.service", "quoin-attach-holder.service"] {
        units.stop(unit);
    }
    for unit in ["quoin-target.service", "quoin-pool@.service", "quoin-controller.service"] {
        units.stop(unit);
    }
    machine.ok("dpkg -r quoin");
    assert!(!machine.run("quoin version").status.success());
    machine.ok("test -e /var/lib/quoin/controller/records.redb");

    // All that the package served is there again with it.
    install(&second);
    units.start("quoin-controller.service", "");
    eventually("the controller answers", || {
        machine.run("quoin cluster info").status.success().then_some(())
    });
    start_all(&mut units);
    let device = machine.ok(attach);
    machine.ok(&format!("mount {device} /srv/db"));
    assert_eq!(machine.ok("cat /srv/db/file"), "before\nafter");
    machine.ok("umount /srv/db && quoin volume detach db");
    drop(units);
    let said = machine.ok("dpkg -P quoin");
    assert!(said.contains("/var/lib/quoin"), "{said}");
    machine.ok("test ! -e /etc/quoin && test -e /var/lib/quoin/controller/records.redb");
}
