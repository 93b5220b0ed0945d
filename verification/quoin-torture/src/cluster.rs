//! A Quoin of real processes, each on its host, restarted when it ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::disk::SmallDisk;
use crate::network::Network;

pub const POOLS: [&str; 3] = ["pool-a", "pool-b", "pool-c"];
pub const HOSTS: [&str; 6] = ["control", "pool-a", "pool-b", "pool-c", "node", "sharer"];
/// The pool that has a small disk of its own, where possible.
const SMALL_DISK_POOL: &str = "pool-b";
const POOL_CAPACITY: &str = "6GiB";
/// Addresses of the health of the node's process and of the attach process, on their host.
pub const NODE_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7511);
pub const ATTACH_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7512);
const START_BUDGET: Duration = Duration::from_secs(60);
const STOP_BUDGET: Duration = Duration::from_secs(30);

struct Process {
    host: &'static str,
    arguments: Vec<String>,
    /// Binary of its version.
    quoin: PathBuf,
    child: Option<Child>,
}

pub struct Cluster {
    /// Binary of users' commands and of new processes.
    pub quoin: PathBuf,
    pub directory: PathBuf,
    processes: BTreeMap<&'static str, Process>,
    // Dropped after the processes, which use it.
    pub network: Option<Network>,
    pub small_disk: Option<SmallDisk>,
}

impl Cluster {
    /// Makes a cluster and waits until its pools are online. `attach`: with block devices. `shares`:
    /// with the target of another node, where hosts have networks of their own.
    pub fn start(quoin: &Path, directory: &Path, attach: bool, shares: bool) -> Result<Self> {
        let network = Network::make(&HOSTS)?;
        for folder in ["run", "sharer-run", "logs"] {
            std::fs::create_dir_all(directory.join(folder))?;
        }
        let mut cluster = Self {
            quoin: quoin.to_owned(),
            directory: directory.to_owned(),
            processes: BTreeMap::new(),
            network,
            small_disk: None,
        };
        if attach {
            cluster.small_disk = Some(SmallDisk::make(directory, SMALL_DISK_POOL)?);
        }
        let path = |name: &str| directory.join(name).display().to_string();
        let controller = format!("{}:7400", cluster.address("control"));
        cluster.command(&["controller", "init", "--state", &path("controller")])?;
        cluster.add(
            "controller",
            "control",
            &[
                "controller",
                "run",
                "--state",
                &path("controller"),
                "--admin-socket",
                &path("run/admin.sock"),
                "--listen",
                &controller,
                "--default-spread",
                "pool",
            ],
        )?;
        for (index, pool) in (0..).zip(POOLS) {
            let token = cluster.token("pool", pool)?;
            let listen = format!("{}:{}", cluster.address(pool), 7401 + index);
            let data = cluster.pool_file(pool).display().to_string();
            let http = crate::turns::address(index).to_string();
            cluster.add(
                pool,
                pool,
                &[
                    "pool",
                    "run",
                    "--state",
                    &path(pool),
                    "--data",
                    &data,
                    "--capacity",
                    POOL_CAPACITY,
                    "--node",
                    "torture",
                    "--name",
                    pool,
                    "--listen",
                    &listen,
                    "--http",
                    &http,
                    "--controller",
                    &controller,
                    "--join",
                    &token,
                ],
            )?;
        }
        let token = cluster.token("node", "torture")?;
        cluster.add(
            "target",
            "node",
            &[
                "target",
                "--state",
                &path("node"),
                "--run",
                &path("run"),
                "--controller",
                &controller,
                "--name",
                "torture",
                "--join",
                &token,
            ],
        )?;
        if shares && cluster.network.is_some() {
            let token = cluster.token("node", "sharer")?;
            cluster.add(
                "sharer",
                "sharer",
                &[
                    "target",
                    "--state",
                    &path("sharer"),
                    "--run",
                    &path("sharer-run"),
                    "--controller",
                    &controller,
                    "--name",
                    "sharer",
                    "--join",
                    &token,
                ],
            )?;
        }
        // The node's process uses the identity that its target got by the token.
        let certificate = directory.join("node/cert.pem");
        cluster.wait("the target's identity", |_| Ok(certificate.exists()))?;
        std::fs::create_dir_all(directory.join("run/csi"))?;
        let csi = format!("unix://{}", path("run/csi/csi.sock"));
        let mode = if attach { "all" } else { "controller" };
        cluster.add(
            "agent",
            "node",
            &[
                "node",
                "run",
                "--state",
                &path("node"),
                "--run",
                &path("run"),
                "--controller",
                &controller,
                "--csi-endpoint",
                &csi,
                "--mode",
                mode,
                "--http",
                &NODE_HTTP.to_string(),
            ],
        )?;
        if attach {
            cluster.add("holder", "node", &["attach-holder", "--run", &path("run")])?;
            let http = ATTACH_HTTP.to_string();
            cluster.add("attach", "node", &["attach", "--run", &path("run"), "--http", &http])?;
        }
        cluster.wait("three pools online", |c| {
            let pools = c.json(&["pool", "list"])?;
            let online = |pool: &Value| pool["state"] == "Online";
            Ok(pools.as_array().is_some_and(|p| p.iter().filter(|p| online(p)).count() == 3))
        })?;
        let expected = 1 + usize::from(cluster.has("sharer"));
        cluster.wait("the nodes", |c| {
            let nodes = c.json(&["node", "list"])?;
            Ok(nodes.as_array().is_some_and(|nodes| nodes.len() == expected))
        })?;
        Ok(cluster)
    }

    fn address(&self, host: &str) -> String {
        self.network.as_ref().map_or("127.0.0.1".into(), |network| network.address(host))
    }

    fn token(&mut self, role: &str, name: &str) -> Result<String> {
        self.wait("the controller", |c| Ok(c.command(&["cluster", "info"]).is_ok()))?;
        let made = self.json(&["token", "create", "--role", role, "--name", name])?;
        Ok(made["token"].as_str().context("a token")?.to_owned())
    }

    fn add(&mut self, name: &'static str, host: &'static str, arguments: &[&str]) -> Result<()> {
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let quoin = self.quoin.clone();
        self.processes.insert(name, Process { host, arguments, quoin, child: None });
        self.ensure(name)
    }

    /// Starts the process if it does not run.
    fn ensure(&mut self, name: &str) -> Result<()> {
        let process = self.processes.get_mut(name).context("a process of this name")?;
        if let Some(child) = &mut process.child
            && child.try_wait()?.is_none()
        {
            return Ok(());
        }
        let path = self.directory.join(format!("logs/{name}.log"));
        let log = File::options().create(true).append(true).open(path)?;
        let mut command = match &self.network {
            Some(network) => {
                let mut command = Command::new("nsenter");
                let namespace = network.namespace(process.host);
                command.arg(format!("--net=/run/netns/{namespace}")).arg(&process.quoin);
                command
            }
            None => Command::new(&process.quoin),
        };
        command.args(&process.arguments).stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        process.child = Some(command.spawn().with_context(|| format!("start {name}"))?);
        Ok(())
    }

    /// Restarts every process that has ended.
    pub fn tend(&mut self) -> Result<()> {
        let names: Vec<_> = self.processes.keys().copied().collect();
        names.into_iter().try_for_each(|name| self.ensure(name))
    }

    pub fn signal(&mut self, name: &str, signal: Signal) -> Result<()> {
        let process = self.processes.get_mut(name).context("a process of this name")?;
        let Some(child) = &mut process.child else { return Ok(()) };
        if child.try_wait()?.is_none() {
            kill_process(Pid::from_child(child), signal)?;
        }
        if signal == Signal::KILL {
            child.wait()?;
        }
        Ok(())
    }

    /// Stops a process as for an update, and starts the binary that replaces it.
    pub fn replace(&mut self, name: &str, quoin: &Path) -> Result<()> {
        self.end(name, Signal::TERM)?;
        let process = self.processes.get_mut(name).context("a process of this name")?;
        process.quoin = quoin.to_owned();
        self.ensure(name)
    }

    /// Stops these together, and restarts them when the last one has ended: a target takes some
    /// seconds to end where the pools of its volumes are away.
    pub fn restart(&mut self, names: &[&str]) -> Result<()> {
        for name in names {
            self.signal(name, Signal::TERM)?;
        }
        for name in names {
            self.end(name, Signal::TERM)?;
        }
        self.tend()
    }

    /// Ends a process that may be paused, by force where it does not obey.
    fn end(&mut self, name: &str, signal: Signal) -> Result<()> {
        let process = self.processes.get_mut(name).context("a process of this name")?;
        let Some(mut child) = process.child.take() else { return Ok(()) };
        let pid = Pid::from_child(&child);
        // Both fail only if it has ended already.
        let _ = kill_process(pid, Signal::CONT);
        let _ = kill_process(pid, signal);
        let began = Instant::now();
        while child.try_wait()?.is_none() {
            if began.elapsed() > STOP_BUDGET {
                let _ = child.kill();
                child.wait()?;
                bail!("{name} does not end within {} s", STOP_BUDGET.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Returns whether the process is a part of this cluster.
    pub fn has(&self, name: &str) -> bool {
        self.processes.contains_key(name)
    }

    /// Returns the file of a pool.
    pub fn pool_file(&self, pool: &str) -> PathBuf {
        let small = self.small_disk.as_ref().filter(|_| pool == SMALL_DISK_POOL);
        small.map_or(&self.directory, |disk| &disk.mount).join(format!("{pool}.data"))
    }

    /// Attaches a volume to the other node too, and returns the socket there.
    pub fn share(&mut self, name: &str, id: &str) -> Result<PathBuf> {
        let run = self.directory.join("sharer-run");
        let at = run.display().to_string();
        let attach = ["volume", "attach", name, "--share", "multi-writer", "--nbd"];
        self.command(&[&attach[..], &["--node", "sharer", "--run", &at]].concat())?;
        let socket = run.join(format!("nbd/{id}.sock"));
        self.wait("the socket of the other node", |_| Ok(socket.exists()))?;
        Ok(socket)
    }

    /// Attaches a volume to the node, and returns its address there. A target that was given no processor for
    /// the time of a lease ends its connections: a user makes the command again.
    pub fn attach(&self, name: &str, how: &[&str]) -> Result<String> {
        let (began, arguments) = (Instant::now(), [&["volume", "attach", name], how].concat());
        loop {
            match self.command(&arguments) {
                Err(_) if began.elapsed() < START_BUDGET => {
                    std::thread::sleep(Duration::from_millis(200));
                }
                attached => return attached,
            }
        }
    }

    /// Makes a volume, attaches it, and returns its id.
    pub fn volume(&self, name: &str, size: &str, how: &[&str]) -> Result<String> {
        self.command(&[
            "volume",
            "create",
            name,
            "--size",
            size,
            "--replicas",
            "3",
            "--block-size",
            "512",
        ])?;
        self.attach(name, how)?;
        let volume = self.json(&["volume", "get", name])?;
        Ok(volume["id"].as_str().context("the volume's id")?.to_owned())
    }

    /// Returns a text of the replicas that are not in sync; empty: all are.
    pub fn unhealed(&self) -> Result<String> {
        let replicas = self.json(&["replica", "list"])?;
        let all = replicas.as_array().context("a list of replicas")?;
        let behind = |r: &&Value| r["phase"] != "InSync";
        let words = |r: &Value| format!("{}/{}: {}", r["volume"], r["pool"], r["phase"]);
        Ok(all.iter().filter(behind).map(words).collect::<Vec<_>>().join(", "))
    }

    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.command(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("quoin {}", arguments.join(" ")))
    }

    /// Runs `quoin ARGUMENTS` against this cluster.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.quoin)
            .args(arguments)
            .env("QUOIN_SOCKET", self.directory.join("run/admin.sock"))
            .stdin(Stdio::null())
            .output()
            .context("run quoin")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("quoin {}: {}", arguments.join(" "), said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits until `done`, and keeps processes up; its errors meanwhile are not final.
    pub fn wait(&mut self, what: &str, done: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        self.wait_for(what, START_BUDGET, done)
    }

    pub fn wait_for(
        &mut self,
        what: &str,
        budget: Duration,
        done: impl Fn(&Self) -> Result<bool>,
    ) -> Result<()> {
        let began = Instant::now();
        loop {
            let outcome = done(self);
            if matches!(outcome, Ok(true)) {
                return Ok(());
            }
            if began.elapsed() > budget {
                let why = outcome.err().map(|error| format!(": {error:#}")).unwrap_or_default();
                bail!("{what}: not within {} s{why}", budget.as_secs());
            }
            self.tend()?;
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Sends SIGTERM to all, front to back, and kills those that do not obey.
    pub fn stop(&mut self) {
        // The holder ends before attach, which would leave it devices in use.
        for name in [
            "agent",
            "holder",
            "attach",
            "target",
            "sharer",
            "pool-a",
            "pool-b",
            "pool-c",
            "controller",
        ] {
            if self.has(name)
                && let Err(error) = self.end(name, Signal::TERM)
            {
                eprintln!("{error:#}");
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop();
    }
}
