//! The demo's own `quoin dev`, and the harm it does to it.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{interrupt, print_error, print_line};
use crate::dev::layout::Layout;

const START_BUDGET: Duration = Duration::from_secs(120);
/// Pools of the demo: one more than the volume has replicas, for a replica to be added and moved
/// to.
pub const POOL_NAMES: [&str; 4] = ["pool-a", "pool-b", "pool-c", "pool-d"];
const STOP_BUDGET: Duration = Duration::from_secs(90);

/// Arguments of a `quoin dev`, and the words by which it reports that all of it is up.
struct Manner {
    arguments: Vec<String>,
    ready: &'static str,
    /// The ends of its processes are shown to the user.
    tells_of_ends: bool,
}

impl Manner {
    fn alone(attach: bool) -> Self {
        let count = POOL_NAMES.len().to_string();
        let mut arguments = words(&["--pools", &count, "--node-timeout", "5s"]);
        if !attach {
            arguments.push("--no-attach".to_owned());
        }
        Self { arguments, ready: "Quoin is up", tells_of_ends: true }
    }

    fn pair() -> Self {
        let arguments = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "1GiB"];
        Self { arguments: words(&arguments), ready: "A second cluster is up", tells_of_ends: false }
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// A running `quoin dev`; dropping it stops it cleanly, which unmounts and detaches all.
pub struct DevCluster {
    pub layout: Layout,
    child: Option<Child>,
}

impl DevCluster {
    /// Starts it and waits until all its parts are up.
    pub fn start(directory: &Path, attach: bool) -> Result<Self> {
        Self::start_unless(interrupt::check, directory, &Manner::alone(attach))
    }

    /// Starts two clusters that are paired, and waits until their mirrors hear each other.
    pub fn start_pair(directory: &Path) -> Result<Self> {
        Self::start_unless(interrupt::check, directory, &Manner::pair())
    }

    /// Starts it after [`DevCluster::crash`]. Ctrl-C waits until it is up: only this start finds
    /// and removes the mounts and devices that the crash left behind.
    pub fn start_again(directory: &Path, attach: bool) -> Result<Self> {
        Self::start_unless(|| Ok(()), directory, &Manner::alone(attach))
    }

    fn start_unless(
        given_up: impl Fn() -> Result<()>,
        directory: &Path,
        manner: &Manner,
    ) -> Result<Self> {
        let binary = std::env::current_exe().context("find this program's own file")?;
        let mut command = Command::new(binary);
        command.args(["dev", "--dir"]).arg(directory).args(&manner.arguments);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            // Ctrl-C is for the demo: it stops the cluster in its own order.
            .process_group(0)
            .spawn()
            .context("start `quoin dev`")?;
        let output = child.stdout.take().context("no output to read")?;
        let (ready, is_ready) = mpsc::channel();
        let (words, tells_of_ends) = (manner.ready, manner.tells_of_ends);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if line.starts_with(words) {
                    let _ = ready.send(());
                }
                if tells_of_ends && line.contains(" ended (") {
                    print_line(&format!("          quoin dev: {line}"));
                }
            }
        });
        let layout = Layout::at(directory);
        let mut cluster = Self { layout, child: Some(child) };
        let began = Instant::now();
        loop {
            given_up()?;
            if is_ready.recv_timeout(Duration::from_millis(50)).is_ok() {
                return Ok(cluster);
            }
            if let Some(child) = &mut cluster.child
                && let Some(status) = child.try_wait()?
            {
                cluster.child = None;
                bail!("`quoin dev` ended while starting ({status})");
            }
            if began.elapsed() > START_BUDGET {
                bail!("`quoin dev` did not come up within {} s", START_BUDGET.as_secs());
            }
        }
    }

    /// Runs `quoin ARGUMENTS` against it, as a user would; gives up at Ctrl-C.
    pub fn command(&self, arguments: &[&str]) -> Result<()> {
        command(&self.layout, arguments).map(|_| ())
    }

    fn processes(&self) -> Result<BTreeMap<String, i32>> {
        let path = self.layout.processes();
        let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// The process of that name, waiting for it while it is being restarted.
    pub fn pid(&self, name: &str) -> Result<Pid> {
        let began = Instant::now();
        loop {
            if let Some(pid) = self.processes()?.get(name).and_then(|pid| Pid::from_raw(*pid)) {
                return Ok(pid);
            }
            interrupt::check()?;
            if began.elapsed() > START_BUDGET {
                bail!("there is no process `{name}`");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `kill -9` of several at the same moment; waits until another process has each name.
    pub fn kill(&self, names: &[&str]) -> Result<()> {
        let pids: Vec<_> = names.iter().map(|name| self.pid(name)).collect::<Result<_>>()?;
        for pid in &pids {
            kill_process(*pid, Signal::KILL).context("kill -9")?;
        }
        for (name, old) in names.iter().zip(&pids) {
            self.wait_until_noticed(name, *old)?;
            self.pid(name)?;
        }
        Ok(())
    }

    /// Ctrl-C waits so long: a supervisor that is stopped before it has noticed the end of a process
    /// would take it for a failed stop.
    fn wait_until_noticed(&self, name: &str, old: Pid) -> Result<()> {
        let began = Instant::now();
        while self.processes()?.get(name) == Some(&old.as_raw_nonzero().get()) {
            if began.elapsed() > START_BUDGET {
                bail!("{name} was killed and is not started again");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// `kill -9` of one; `meanwhile` runs while it is down and cannot come back.
    pub fn kill_and_hold(&self, name: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        let outcome = self.hold(&[name]).and_then(|()| meanwhile());
        let released = self.release(&[name]);
        outcome.and(released)
    }

    /// `kill -9` of several at the same moment, none of which comes back before [`Self::release`].
    pub fn hold(&self, names: &[&str]) -> Result<()> {
        let pids: Vec<_> = names.iter().map(|name| self.pid(name)).collect::<Result<_>>()?;
        for name in names {
            let hold = self.layout.hold(name);
            std::fs::write(&hold, "").with_context(|| format!("write {}", hold.display()))?;
        }
        for pid in &pids {
            kill_process(*pid, Signal::KILL).context("kill -9")?;
        }
        for (name, pid) in names.iter().zip(pids) {
            wait_until_gone(pid)?;
            self.wait_until_noticed(name, pid)?;
        }
        Ok(())
    }

    /// Has held processes started again.
    pub fn release(&self, names: &[&str]) -> Result<()> {
        for name in names {
            let hold = self.layout.hold(name);
            std::fs::remove_file(&hold).with_context(|| format!("remove {}", hold.display()))?;
        }
        Ok(())
    }

    /// Simulates power loss of the host: kills all processes at once, the supervisor included.
    pub fn crash(mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let supervisor = Pid::from_child(&child);
        // Stopped first, so that it starts nothing again while its children fall.
        kill_process(supervisor, Signal::STOP)?;
        let pids: Vec<_> = self.processes()?.into_values().filter_map(Pid::from_raw).collect();
        for pid in &pids {
            // A process may have ended already: that is the wanted state.
            let _ = kill_process(*pid, Signal::KILL);
        }
        kill_process(supervisor, Signal::KILL)?;
        child.wait()?;
        pids.into_iter().try_for_each(wait_until_gone)
    }

    /// The clean way: SIGTERM, then everything is unmounted, detached and drained.
    pub fn stop(mut self) -> Result<()> {
        self.stop_child()
    }

    fn stop_child(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        let began = Instant::now();
        let mut is_forced = false;
        loop {
            // The stop waits for users of the mount; the demo's own application has ended by now.
            if began.elapsed() > STOP_BUDGET / 2 && !is_forced {
                is_forced = true;
                let _ = kill_process(Pid::from_child(&child), Signal::TERM);
            }
            if let Some(status) = child.try_wait()? {
                // A supervisor that ends by the signal itself had not started anything yet.
                let by_signal =
                    [Some(libc::SIGTERM), Some(libc::SIGINT)].contains(&status.signal());
                if !status.success() && !by_signal {
                    bail!("`quoin dev` did not stop cleanly ({status})");
                }
                return Ok(());
            }
            if began.elapsed() > STOP_BUDGET {
                child.kill()?;
                child.wait()?;
                bail!("`quoin dev` did not stop within {} s", STOP_BUDGET.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for DevCluster {
    fn drop(&mut self) {
        if let Err(error) = self.stop_child() {
            print_error(&format!("stopping the demo's cluster: {error:#}"));
        }
    }
}

/// Runs `quoin ARGUMENTS` against a cluster, as a user would, and gives what it printed; gives up at Ctrl-C.
///
/// # Errors
/// The message of the command, where it fails.
pub fn command(layout: &Layout, arguments: &[&str]) -> Result<String> {
    let binary = std::env::current_exe().context("find this program's own file")?;
    let mut child = Command::new(binary)
        .args(arguments)
        .env("QUOIN_SOCKET", layout.admin_socket())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("run quoin")?;
    while child.try_wait()?.is_none() {
        if interrupt::is_interrupted() {
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("quoin {}: {}", arguments.join(" "), message.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn wait_until_gone(pid: Pid) -> Result<()> {
    let began = Instant::now();
    // A zombie of another parent answers to signal 0 until it is waited for; its parent does.
    while rustix::process::test_kill_process(pid).is_ok() && !is_zombie(pid) {
        if began.elapsed() > Duration::from_secs(10) {
            bail!("process {} survives kill -9", pid.as_raw_nonzero());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_zombie(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // "pid (name) state …": the name may hold anything, so look behind its last parenthesis.
    stat.ok()
        .and_then(|stat| stat.rsplit_once(") ").map(|(_, rest)| rest.starts_with('Z')))
        .unwrap_or(true)
}
