//! A process that is started, restarted when it ends, and stopped on request.
//!
//! A supervisor that is killed takes its children along, so that nothing runs unwatched. The
//! attach process alone outlives it: below file systems in use it holds their IO until the next
//! supervisor, which adopts it, has started the rest again.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::layout::Layout;

/// Delay of the first restart: short, since a process that ran well and was killed is needed.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A process that ran this long counts as well started.
const RAN_WELL: Duration = Duration::from_secs(10);
/// A clean shutdown drains IO first; after this it is killed and the next start recovers.
const STOP_BUDGET: Duration = Duration::from_secs(30);
/// Waits longer than this are reported.
const SILENCE: Duration = Duration::from_secs(2);
/// After a kill -9; only the kernel can hold a process longer than this.
const KILL_BUDGET: Duration = Duration::from_secs(5);
/// A process that ends this often in a row, soon after its start, counts as unable to start.
const FAILED_STARTS_MAX: u32 = 5;
/// A log is begun anew, its predecessor kept, when it is longer than this at a start.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// A process to start.
#[derive(Clone)]
pub struct Process {
    /// Unique in one `quoin dev`: "controller", "pool-a", "target" …
    pub name: String,
    /// Arguments for this same binary.
    pub arguments: Vec<String>,
    /// True if it goes on when this supervisor is killed.
    pub outlives: bool,
}

/// A process under a keeper.
enum Running {
    Child(Child),
    /// Started by a supervisor that is gone.
    Adopted {
        pid: Pid,
        ended: AsyncFd<OwnedFd>,
    },
}

impl Running {
    fn pid(&self) -> Option<Pid> {
        match self {
            Self::Child(child) => child.id().and_then(|pid| Pid::from_raw(pid as i32)),
            Self::Adopted { pid, .. } => Some(*pid),
        }
    }

    /// Waits for its end; the exit status is known for children only.
    async fn wait(&mut self) -> Result<Option<ExitStatus>> {
        match self {
            Self::Child(child) => Ok(Some(child.wait().await.context("wait for a child")?)),
            Self::Adopted { ended, .. } => {
                // A pidfd becomes readable when its process ends, and stays so.
                let _ended = ended.readable().await.context("wait for an adopted process")?;
                Ok(None)
            }
        }
    }
}

/// Waits until the processes of a supervisor that was killed have ended: the kernel has signalled
/// them, and until then they have their files and ports. `going_on`: the process that is to stay.
pub async fn await_the_last(layout: &Layout, going_on: Option<Pid>) {
    let Ok(text) = std::fs::read(layout.processes()) else { return };
    let pids: BTreeMap<String, i32> = serde_json::from_slice(&text).unwrap_or_default();
    let root = layout.root().as_os_str().as_encoded_bytes().to_owned();
    // The number may be another program's by now.
    let is_ours = |pid: &Pid| {
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        line.is_ok_and(|line| line.windows(root.len()).any(|part| part == root))
    };
    let pids = pids.into_values().filter_map(Pid::from_raw);
    let last: Vec<Pid> = pids.filter(|pid| Some(*pid) != going_on && is_ours(pid)).collect();
    let (began, mut is_told) = (Instant::now(), false);
    while last.iter().any(is_ours) && began.elapsed() < STOP_BUDGET {
        if !is_told && began.elapsed() > SILENCE {
            is_told = true;
            super::print_line(
                "waiting: processes of the last `quoin dev`, which was killed, are ending",
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The process that listens on a socket, if one does.
pub async fn listener_of(socket: &Path) -> Option<Pid> {
    let stream = tokio::net::UnixStream::connect(socket).await.ok()?;
    stream.peer_cred().ok()?.pid().and_then(Pid::from_raw)
}

/// The pids of all children, mirrored into a file.
#[derive(Clone)]
pub struct Roster {
    path: PathBuf,
    pids: Arc<Mutex<BTreeMap<String, i32>>>,
}

impl Roster {
    pub fn new(layout: &Layout) -> Self {
        Self { path: layout.processes(), pids: Arc::default() }
    }

    fn set(&self, name: &str, pid: Option<Pid>) {
        let pid = pid.map(|pid| pid.as_raw_nonzero().get());
        let mut pids = self.pids.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match pid {
            Some(pid) => pids.insert(name.into(), pid),
            None => pids.remove(name),
        };
        // People and the demo read it; nothing depends on it, so a full disk is no reason to stop.
        let beside = self.path.with_extension("json.new");
        if let Ok(text) = serde_json::to_vec_pretty(&*pids)
            && std::fs::write(&beside, text).is_ok()
        {
            let _ = std::fs::rename(&beside, &self.path);
        }
    }
}

/// Keeps one process running until [`Keeper::stop`].
pub struct Keeper {
    pub name: String,
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<()>>,
    /// Number of ends soon after a start, in a row.
    failed_starts: Rc<Cell<u32>>,
}

impl Keeper {
    /// Starts the process. Must be called on a thread that runs as long as the supervisor: the
    /// kernel ends children with the thread that started them.
    ///
    /// # Errors
    /// A log that cannot be written, or a binary that cannot be started.
    pub fn start(process: Process, layout: Layout, roster: Roster) -> Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let child = Running::Child(spawn(&process, &layout)?);
        Ok(Self::over(process, child, layout, roster, stop, stopped))
    }

    /// Keeps a process that a killed supervisor has left running.
    pub fn adopt(process: Process, pid: Pid, layout: Layout, roster: Roster) -> Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let ended = pidfd_open(pid, PidfdFlags::NONBLOCK).context("watch a process")?;
        // SAFETY: an owned descriptor stays the same one, and open, for as long as it lives.
        let ended = unsafe { AsyncFd::register(ended) }.context("watch a process")?;
        let running = Running::Adopted { pid, ended };
        Ok(Self::over(process, running, layout, roster, stop, stopped))
    }

    fn over(
        process: Process,
        running: Running,
        layout: Layout,
        roster: Roster,
        stop: watch::Sender<bool>,
        stopped: watch::Receiver<bool>,
    ) -> Self {
        roster.set(&process.name, running.pid());
        let name = process.name.clone();
        let failed_starts = Rc::new(Cell::new(0));
        let failed = failed_starts.clone();
        let task =
            tokio::task::spawn_local(keep(process, running, layout, roster, stopped, failed));
        Self { name, stop, task, failed_starts }
    }

    /// Returns true if it ends so soon after each start that trying on is of no use.
    pub fn cannot_start(&self) -> bool {
        self.failed_starts.get() >= FAILED_STARTS_MAX
    }

    /// Returns true if it gave up (the process cannot be started at all).
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Ends the process and does not start it again; [`Keeper::stop`] is still to be called.
    pub fn request_stop(&self) {
        let _ = self.stop.send(true);
    }

    /// Returns true if [`Keeper::request_stop`] was called.
    pub fn was_asked_to_stop(&self) -> bool {
        *self.stop.borrow()
    }

    /// Ends the process by SIGTERM and waits; kills it if it does not drain in time.
    pub async fn stop(self) -> Result<()> {
        let _ = self.stop.send(true);
        self.task.await.context("the supervisor task failed")?
    }
}

async fn keep(
    process: Process,
    mut child: Running,
    layout: Layout,
    roster: Roster,
    mut stopped: watch::Receiver<bool>,
    failed_starts: Rc<Cell<u32>>,
) -> Result<()> {
    let name = process.name.clone();
    let mut backoff = BACKOFF_FIRST;
    loop {
        let began = Instant::now();
        let status = tokio::select! {
            status = child.wait() => status?,
            _ = stopped.changed() => {
                let outcome = end(&name, &mut child, &layout.log(&name)).await;
                roster.set(&name, None);
                return outcome;
            }
        };
        roster.set(&name, None);
        // A process that ended by a signal had started.
        let failed = began.elapsed() < RAN_WELL && status.is_some_and(|s| s.signal().is_none());
        failed_starts.set(if failed { failed_starts.get() + 1 } else { 0 });
        backoff = if began.elapsed() >= RAN_WELL {
            BACKOFF_FIRST
        } else {
            (backoff * 2).min(BACKOFF_MAX)
        };
        let (status, log) = (show_status(status), layout.log(&name));
        match failed_starts.get() {
            // Restarts go on: the obstacle may pass.
            FAILED_STARTS_MAX => super::print_line(&format!(
                "{name} ended ({status}) at its last {FAILED_STARTS_MAX} starts; it is restarted \
                 every {} s without further messages until it stays up, its log is {}",
                BACKOFF_MAX.as_secs(),
                log.display()
            )),
            failed if failed > FAILED_STARTS_MAX => {}
            _ => super::print_line(&format!(
                "{name} ended ({status}); starting it again in {:.1} s, its log is {}",
                backoff.as_secs_f64(),
                log.display()
            )),
        }
        tokio::select! {
            () = wait_to_start(&layout, &name, backoff) => {}
            _ = stopped.changed() => return Ok(()),
        }
        // Devices that a holder keeps only wait for the next attach process.
        if process.outlives && quoin_attach::holder::held_at(&layout.holder_socket()).is_empty() {
            super::report_dead_mounts(&layout)?;
        }
        child = Running::Child(spawn(&process, &layout)?);
        roster.set(&name, child.pid());
    }
}

/// Waits for the back-off, and then while a hold file keeps the process from being started.
async fn wait_to_start(layout: &Layout, name: &str, backoff: Duration) {
    tokio::time::sleep(backoff).await;
    let hold = layout.hold(name);
    while hold.exists() {
        tokio::time::sleep(BACKOFF_FIRST).await;
    }
}

fn spawn(process: &Process, layout: &Layout) -> Result<Child> {
    let log = open_log(layout, &process.name)?;
    let binary = std::env::current_exe().context("find this program's own file")?;
    // A binary replaced while it runs shows as "(deleted)"; /proc still leads to it.
    let binary = if binary.exists() { binary } else { "/proc/self/exe".into() };
    let mut command = Command::new(binary);
    command
        .args(&process.arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("share a log")?)
        .stderr(log)
        // Ctrl-C is for the supervisor alone: it ends its children in their right order.
        .process_group(0)
        .kill_on_drop(!process.outlives);
    let death_signal = (!process.outlives).then_some(Signal::TERM);
    // SAFETY: prctl is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(death_signal)?;
            Ok(())
        });
    }
    command.spawn().with_context(|| format!("cannot start {}", process.name))
}

fn open_log(layout: &Layout, name: &str) -> Result<File> {
    let path = layout.log(name);
    if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
        std::fs::rename(&path, path.with_extension("log.old")).context("rename an old log")?;
    }
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot write {}", path.display()))
}

async fn end(name: &str, child: &mut Running, log: &Path) -> Result<()> {
    let Some(pid) = child.pid() else { return Ok(()) };
    let _ = kill_process(pid, Signal::TERM);
    // A suspended process handles SIGTERM only once it continues.
    let _ = kill_process(pid, Signal::CONT);
    match tokio::time::timeout(STOP_BUDGET, child.wait()).await {
        Ok(status) => {
            if let Some(status) = status?
                && !status.success()
                && status.signal() != Some(15)
            {
                bail!(
                    "{name} did not stop cleanly ({}): {}",
                    show_status(Some(status)),
                    super::last_line(log)
                );
            }
            Ok(())
        }
        Err(_) => {
            kill_process(pid, Signal::KILL).context("kill a process")?;
            if tokio::time::timeout(KILL_BUDGET, child.wait()).await.is_err() {
                bail!(
                    "{name} (process {pid}) was killed and is held by the kernel, in IO that is \
                     not answered"
                );
            }
            bail!(
                "{name} did not stop within {} s and was killed; the next start recovers",
                STOP_BUDGET.as_secs()
            )
        }
    }
}

fn show_status(status: Option<ExitStatus>) -> String {
    let Some(status) = status else { return "it was adopted".into() };
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("signal {signal}"),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => "no status".into(),
    }
}
