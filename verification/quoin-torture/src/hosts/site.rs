//! The cluster on its hosts: the host of the controller, the mount of each volume, and the steps by
//! which an operator moves them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::host::{Host, Switch, run};
use super::writer::{Content, Left, Writer};

const HOSTS: u8 = 4;
/// The address of the controller, which moves with it.
const CONTROL: &str = "10.78.7.100";
const POOL_CAPACITY: &str = "4GiB";
const VOLUME_SIZE: &str = "128MiB";
pub const FLOW_BUDGET: Duration = Duration::from_secs(90);
pub const HEAL_BUDGET: Duration = Duration::from_secs(240);
/// Time within which a mount of a fenced volume fails its IO; after it its processes are killed.
const STALE_BUDGET: Duration = Duration::from_secs(30);

/// A volume with a file system, mounted on one of the hosts.
pub struct Volume {
    pub name: String,
    /// Host that it is mounted on.
    pub at: usize,
    device: String,
    writer: Option<Writer>,
    /// Content at the last hand-over.
    content: Content,
}

#[derive(Default)]
pub struct Counts {
    pub writes: u64,
    pub hand_overs: u64,
    pub file_system_checks: u64,
    pub longest_pause: Duration,
    /// Mounts of fenced volumes whose IO failed by itself.
    pub stale_mounts_that_failed: u64,
    /// Stale mounts whose attach process had to be killed.
    pub stale_mounts_that_hung: u64,
}

pub struct Site {
    pub volumes: Vec<Volume>,
    // Dropped before the switch that they are plugged into.
    pub hosts: Vec<Host>,
    pub switch: Switch,
    /// Host of the controller that rules.
    pub controller: usize,
    /// Number of controllers so far; each has a directory of its own.
    controllers: u32,
    directory: PathBuf,
    backup: Option<PathBuf>,
    backups: u32,
    seed: u64,
    generations: u64,
    pub counts: Counts,
}

impl Site {
    /// Makes a cluster and waits until all are online.
    pub fn start(quoin: &Path, directory: &Path, seed: u64) -> Result<Self> {
        std::fs::create_dir_all(directory)?;
        let switch = Switch::new()?;
        let hosts = (1..=HOSTS).map(|number| Host::new(number, quoin, directory, &switch));
        let hosts = hosts.collect::<Result<Vec<_>>>()?;
        let mut site = Self {
            volumes: Vec::new(),
            hosts,
            switch,
            controller: 0,
            controllers: 0,
            directory: directory.to_owned(),
            backup: None,
            backups: 0,
            seed,
            generations: 0,
            counts: Counts::default(),
        };
        let state = site.controller_state(0);
        run(Command::new(quoin).args(["controller", "init", "--state", &state]))?;
        site.start_controller(0, &state)?;
        for index in 0..site.hosts.len() {
            site.add_pool(index)?;
            site.add_node(index)?;
        }
        site.wait("pools and nodes online", |site| {
            Ok(["pool", "node"].into_iter().all(|kind| {
                let listed = site.json(&[kind, "list"]).unwrap_or_default();
                let online = |one: &&Value| one["state"] == "Online";
                listed.as_array().is_some_and(|all| all.iter().filter(online).count() == 4)
            }))
        })?;
        Ok(site)
    }

    fn controller_state(&self, host: usize) -> String {
        self.hosts[host].path(&format!("controller-{}", self.controllers))
    }

    fn start_controller(&mut self, host: usize, state: &str) -> Result<()> {
        self.hosts[host].ip(&format!("addr add {CONTROL}/24 dev eth0"))?;
        // Neighbour entries are flushed, as an announcement of the address from elsewhere would do.
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            self.hosts[other].ip("neigh flush dev eth0")?;
        }
        let socket = self.hosts[host].path("run/admin.sock");
        self.hosts[host].add(
            "controller",
            &[
                "controller",
                "run",
                "--state",
                state,
                "--admin-socket",
                &socket,
                "--listen",
                "0.0.0.0:7400",
            ],
        )?;
        self.controller = host;
        self.wait("the controller", |site| Ok(site.command(&["cluster", "info"]).is_ok()))
    }

    fn token(&self, role: &str, name: &str) -> Result<String> {
        let made = self.json(&["token", "create", "--role", role, "--name", name])?;
        Ok(made["token"].as_str().context("a token")?.to_owned())
    }

    fn add_pool(&mut self, index: usize) -> Result<()> {
        let host = &self.hosts[index];
        let (name, data) = (format!("pool-{}", host.name), host.path("pool.data"));
        let (state, advertise) = (host.path("pool"), format!("{}:7401", host.address));
        let (token, node) = (self.token("pool", &name)?, host.name.clone());
        let controller = format!("{CONTROL}:7400");
        self.hosts[index].add(
            "pool",
            &[
                "pool",
                "run",
                "--state",
                &state,
                "--data",
                &data,
                "--capacity",
                POOL_CAPACITY,
                "--node",
                &node,
                "--name",
                &name,
                "--listen",
                "0.0.0.0:7401",
                "--advertise",
                &advertise,
                "--controller",
                &controller,
                "--join",
                &token,
            ],
        )
    }

    fn add_node(&mut self, index: usize) -> Result<()> {
        let host = &self.hosts[index];
        let (state, directory, name) = (host.path("node"), host.path("run"), host.name.clone());
        let token = self.token("node", &name)?;
        let controller = format!("{CONTROL}:7400");
        let member = ["--state", &state, "--run", &directory, "--controller", &controller];
        let joins = ["--name", &name, "--join", &token];
        self.hosts[index].add("target", &[&["target"][..], &member, &joins].concat())?;
        // The node's process uses the identity that its target got by the token.
        let certificate = self.hosts[index].directory.join("node/cert.pem");
        self.wait("the target's identity", |_| Ok(certificate.exists()))?;
        let host = &mut self.hosts[index];
        let csi = format!("unix://{}", host.path("run/csi/csi.sock"));
        host.add("node", &[&["node", "run", "--csi-endpoint", &csi][..], &member].concat())?;
        host.add("holder", &["attach-holder", "--run", &directory])?;
        host.add("attach", &["attach", "--run", &directory])
    }

    pub fn socket(&self) -> String {
        self.hosts[self.controller].path("run/admin.sock")
    }

    /// Runs a command on the controller's host.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        self.hosts[self.controller].quoin(&self.socket(), arguments)
    }

    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.command(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("quoin {}", arguments.join(" ")))
    }

    /// Returns whether controllers of this version have terms, by which an overtaken one ends.
    pub fn has_terms(&self) -> bool {
        self.json(&["cluster", "info"]).is_ok_and(|info| !info["term"].is_null())
    }

    fn tend(&mut self) -> Result<()> {
        self.hosts.iter_mut().try_for_each(Host::tend)
    }

    /// Waits until `done`, with processes kept up; its errors meanwhile are not final.
    pub fn wait(&mut self, what: &str, done: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        loop {
            let outcome = done(self);
            if matches!(outcome, Ok(true)) {
                return Ok(());
            }
            if began.elapsed() > HEAL_BUDGET {
                let why = outcome.err().map(|error| format!(": {error:#}")).unwrap_or_default();
                bail!("{what}: not within {} s{why}", HEAL_BUDGET.as_secs());
            }
            self.tend()?;
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until all replicas are in sync and every writer writes.
    pub fn heal(&mut self) -> Result<()> {
        self.wait("all replicas in sync", |site| {
            let replicas = site.json(&["replica", "list"])?;
            let all = replicas.as_array().context("a list of replicas")?;
            let behind = all.iter().filter(|replica| replica["phase"] != "InSync");
            let words = |r: &Value| format!("{}/{}: {}", r["volume"], r["pool"], r["phase"]);
            let behind: Vec<String> = behind.map(words).collect();
            if behind.is_empty() { Ok(true) } else { bail!("{}", behind.join(", ")) }
        })?;
        self.flows()
    }

    pub fn flows(&self) -> Result<()> {
        self.volumes.iter().try_for_each(|volume| {
            let writer = volume.writer.as_ref().context("a writer")?;
            writer.flows(FLOW_BUDGET).with_context(|| volume.name.clone())
        })
    }

    /// Makes a volume with a file system on a host, and its writer.
    pub fn make_volume(&mut self, name: &str, at: usize) -> Result<()> {
        self.command(&["volume", "create", name, "--size", VOLUME_SIZE, "--replicas", "3"])?;
        let device = self.attach(name, at)?;
        run(self.hosts[at].command("mkfs.ext4").args(["-q", "-F", &device]))?;
        let volume =
            Volume { name: name.into(), at, device, writer: None, content: Content::new() };
        self.volumes.push(volume);
        self.mount(self.volumes.len() - 1)?;
        self.write(self.volumes.len() - 1)
    }

    fn attach(&mut self, name: &str, at: usize) -> Result<String> {
        let (began, socket) = (Instant::now(), self.socket());
        loop {
            let host = &self.hosts[at];
            let (node, directory) = (host.name.clone(), host.path("run"));
            let attached = host
                .quoin(&socket, &["volume", "attach", name, "--node", &node, "--run", &directory]);
            match attached {
                Err(error) if began.elapsed() > HEAL_BUDGET => return Err(error),
                Err(_) => {
                    self.tend()?;
                    std::thread::sleep(Duration::from_millis(200));
                }
                device => return device,
            }
        }
    }

    fn detach(&mut self, volume: usize, from: usize, force: bool) -> Result<()> {
        let (name, node) = (self.volumes[volume].name.clone(), self.hosts[from].name.clone());
        let mut arguments = vec!["volume", "detach", &name, "--node", &node];
        if force && self.command(&["volume", "detach", "--help"])?.contains("--force") {
            arguments.push("--force");
        }
        self.command(&arguments).map(drop)
    }

    /// Returns the mount point of a volume on a host.
    fn mount_point(&self, volume: usize, at: usize) -> String {
        self.hosts[at].path(&format!("mnt/{}", self.volumes[volume].name))
    }

    fn file(&self, volume: usize, at: usize) -> PathBuf {
        self.hosts[at].seen(&format!("mnt/{}/file", self.volumes[volume].name))
    }

    fn mount(&mut self, volume: usize) -> Result<()> {
        let (at, device) = (self.volumes[volume].at, self.volumes[volume].device.clone());
        let point = self.mount_point(volume, at);
        std::fs::create_dir_all(&point)?;
        run(self.hosts[at].command("mount").args([&device, &point])).map(drop)
    }

    fn unmount(&self, volume: usize, at: usize) -> Result<()> {
        run(self.hosts[at].command("umount").arg(self.mount_point(volume, at))).map(drop)
    }

    fn write(&mut self, volume: usize) -> Result<()> {
        self.generations += 1;
        let path = self.file(volume, self.volumes[volume].at);
        let (seed, generation) = (self.seed, self.generations);
        let one = &mut self.volumes[volume];
        one.writer = Some(Writer::start(&path, seed, generation, one.content.clone())?);
        Ok(())
    }

    /// Moves a volume to a host while it is attached nowhere, and checks its content.
    fn take_over(&mut self, volume: usize, left: &Left, to: usize, is_clean: bool) -> Result<()> {
        self.counts.writes += left.writes;
        self.counts.longest_pause = self.counts.longest_pause.max(left.slowest);
        let name = self.volumes[volume].name.clone();
        let device = self.attach(&name, to)?;
        if !is_clean {
            // The journal is replayed; exit code 1 means that it was.
            let mut command = self.hosts[to].command("e2fsck");
            let status = command.args(["-p", &device]).output()?.status;
            ensure!(matches!(status.code(), Some(0 | 1)), "e2fsck -p of {name}: {status}");
        }
        run(self.hosts[to].command("e2fsck").args(["-fn", &device]))
            .with_context(|| format!("{name} on {}", self.hosts[to].name))?;
        self.counts.file_system_checks += 1;
        let one = &mut self.volumes[volume];
        (one.at, one.device) = (to, device);
        self.mount(volume)?;
        let content = left.judge(&self.file(volume, to), self.seed)?;
        self.counts.hand_overs += 1;
        self.volumes[volume].content = content;
        self.write(volume)
    }

    /// Moves a volume in the ordinary way: unmounted here, attached there.
    pub fn move_volume(&mut self, volume: usize, to: usize) -> Result<()> {
        let from = self.volumes[volume].at;
        let left = self.volumes[volume].writer.take().context("a writer")?.finish()?;
        self.unmount(volume, from)?;
        let (name, socket) = (self.volumes[volume].name.clone(), self.socket());
        let (node, directory) = (self.hosts[from].name.clone(), self.hosts[from].path("run"));
        let arguments = ["volume", "detach", &name, "--node", &node, "--run", &directory];
        self.hosts[from].quoin(&socket, &arguments)?;
        self.take_over(volume, &left, to, true)
    }

    /// Moves a volume off a host that does not answer. The writer there continues as far as it can.
    pub fn fail_over(&mut self, volume: usize, to: usize) -> Result<Stale> {
        let from = self.volumes[volume].at;
        let writer = self.volumes[volume].writer.take().context("a writer")?;
        self.detach(volume, from, true)?;
        // Acknowledgements from here on would be false.
        let left = writer.left();
        self.take_over(volume, &left, to, false)?;
        ensure!(
            writer.writes() == left.writes,
            "{} writes on {} were acknowledged after {} was detached from it",
            writer.writes() - left.writes,
            self.hosts[from].name,
            self.volumes[volume].name
        );
        Ok(Stale { volume, at: from, writer })
    }

    /// Clears the mount that a lost host still has after its return.
    pub fn clear(&mut self, stale: Stale) -> Result<()> {
        let Stale { volume, at, writer } = stale;
        writer.stop();
        let began = Instant::now();
        while !writer.has_ended() && began.elapsed() < STALE_BUDGET {
            std::thread::sleep(Duration::from_millis(50));
        }
        if writer.has_ended() {
            self.counts.stale_mounts_that_failed += 1;
        } else {
            self.counts.stale_mounts_that_hung += 1;
            // Other volumes on that host lose their devices as well.
            let others: Vec<usize> =
                (0..self.volumes.len()).filter(|other| self.volumes[*other].at == at).collect();
            let moved = others.into_iter().map(|other| {
                let to = (at + 1) % self.hosts.len();
                self.move_volume(other, to)
            });
            moved.collect::<Result<()>>()?;
            self.hosts[at].kill(&["holder", "attach"])?;
        }
        // Its last call returned an error, or the one before the stop did not.
        let _ = writer.ended()?;
        self.unmount(volume, at)?;
        self.hosts[at].tend()
    }

    /// Kills all processes of a host; the mounts on it are dead.
    pub fn crash(&mut self, at: usize) -> Result<Vec<(usize, Left)>> {
        self.hosts[at].crash()?;
        let mut lost = Vec::new();
        for volume in (0..self.volumes.len())
            .filter(|volume| self.volumes[*volume].at == at)
            .collect::<Vec<_>>()
        {
            let writer = self.volumes[volume].writer.take().context("a writer")?;
            let began = Instant::now();
            while !writer.has_ended() {
                ensure!(began.elapsed() < FLOW_BUDGET, "a dead device does not fail its IO");
                std::thread::sleep(Duration::from_millis(20));
            }
            let left = writer.left();
            ensure!(writer.ended()?.is_err(), "a writer ended without an error");
            self.unmount(volume, at)?;
            lost.push((volume, left));
        }
        Ok(lost)
    }

    /// Attaches a volume after a crash, elsewhere or on the same host.
    pub fn recover_volume(&mut self, volume: usize, left: &Left, to: usize) -> Result<()> {
        let from = self.volumes[volume].at;
        if from != to {
            self.detach(volume, from, true)?;
        }
        self.take_over(volume, left, to, false)
    }

    /// Backs up the present records.
    pub fn back_up(&mut self) -> Result<()> {
        self.backups += 1;
        let file = self.directory.join(format!("backup-{}", self.backups));
        self.command(&["controller", "backup", &file.display().to_string()])?;
        if let Some(former) = self.backup.replace(file) {
            std::fs::remove_file(former)?;
        }
        Ok(())
    }

    /// Restores the records on another host, without the pools of hosts that are cut off.
    pub fn move_controller(&mut self, to: usize, without: &[usize]) -> Result<()> {
        self.controllers += 1;
        let state = self.controller_state(to);
        let backup = self.backup.clone().context("a backup")?.display().to_string();
        let socket = self.hosts[to].path("run/admin.sock");
        self.hosts[to].quoin(&socket, &["controller", "restore", &backup, "--state", &state])?;
        self.start_controller(to, &state)?;
        self.recover(without)
    }

    /// Makes the records agree with the pools' holdings.
    pub fn recover(&mut self, without: &[usize]) -> Result<()> {
        let pools: Vec<String> =
            without.iter().map(|host| format!("pool-{}", self.hosts[*host].name)).collect();
        let mut arguments = vec!["controller", "recover"];
        pools.iter().for_each(|pool| arguments.extend(["--without", pool]));
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        self.wait("the records rule", move |site| {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            site.command(&arguments).map(|_| true)
        })
    }

    /// Removes the controller's address from a host that lost the right to it.
    pub fn retire_controller(&mut self, at: usize) -> Result<()> {
        self.hosts[at].forget("controller")?;
        self.hosts[at].ip(&format!("addr del {CONTROL}/24 dev eth0"))?;
        // Neighbours may have learnt the address from the former host.
        for other in (0..self.hosts.len()).filter(|other| *other != self.controller) {
            self.hosts[other].ip("neigh flush dev eth0")?;
        }
        Ok(())
    }

    /// Unmounts all, checks every file system once more, and has all replicas compared.
    pub fn end(&mut self) -> Result<()> {
        for volume in 0..self.volumes.len() {
            self.move_volume(volume, self.volumes[volume].at)?;
            let left = self.volumes[volume].writer.take().context("a writer")?.finish()?;
            left.judge(&self.file(volume, self.volumes[volume].at), self.seed)?;
            let name = self.volumes[volume].name.clone();
            self.command(&["volume", "verify", &name])?;
            self.unmount(volume, self.volumes[volume].at)?;
            let at = self.volumes[volume].at;
            let (socket, directory) = (self.socket(), self.hosts[at].path("run"));
            self.hosts[at].quoin(&socket, &["volume", "detach", &name, "--run", &directory])?;
        }
        self.volumes.clear();
        Ok(())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // After a failure: dead devices release the writers, and the mounts with them.
        for volume in 0..self.volumes.len() {
            let at = self.volumes[volume].at;
            if let Some(writer) = &self.volumes[volume].writer {
                writer.stop();
            }
            // The commands fail where nothing is mounted.
            let _ = self.hosts[at].kill(&["holder", "attach"]);
            let _ = self.unmount(volume, at);
        }
    }
}

/// A mount on a host that the volume was taken from.
pub struct Stale {
    volume: usize,
    at: usize,
    writer: Writer,
}
