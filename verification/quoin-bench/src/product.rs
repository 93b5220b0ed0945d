//! A Quoin of the benchmark's own: `quoin dev` in a fresh directory, driven by its commands as by a
//! user.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Class, Error, usage};

pub struct Product {
    quoin: PathBuf,
    dir: PathBuf,
    dev: Child,
}

/// A row of `quoin replica list -o json`, with the fields that are needed here.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Replica {
    pub volume: String,
    pub pool: String,
    pub guid: String,
    pub phase: String,
    pub rebuilt_bytes: u64,
}

impl Product {
    pub fn start(quoin: &Path, dir: &Path) -> Result<Self, Error> {
        Self::start_with(quoin, dir, &[])
    }

    /// Starts one whose volumes become block devices.
    pub fn start_attaching(quoin: &Path, dir: &Path, flags: &[&str]) -> Result<Self, Error> {
        Self::start_as(quoin, dir, &["dev"], flags)
    }

    /// Starts one with further flags of `quoin dev`.
    pub fn start_with(quoin: &Path, dir: &Path, flags: &[&str]) -> Result<Self, Error> {
        Self::start_as(quoin, dir, &["dev", "--no-attach"], flags)
    }

    fn start_as(quoin: &Path, dir: &Path, how: &[&str], flags: &[&str]) -> Result<Self, Error> {
        std::fs::create_dir_all(dir).map_err(Error::io(format!("create {}", dir.display())))?;
        let log = std::fs::File::create(dir.join("dev.log")).map_err(Error::io("create a log"))?;
        let errors = log.try_clone().map_err(Error::io("create a log"))?;
        let dev = Command::new(quoin)
            .args(how)
            .arg("--dir")
            .arg(dir.join("data"))
            // A measurement includes no work that was not requested.
            .args(["--rebalance-at", "off"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(Error::io("start quoin dev"))?;
        let mut product = Self { quoin: quoin.to_owned(), dir: dir.to_owned(), dev };
        let given = flags.iter().position(|flag| *flag == "--pools").map(|at| flags.get(at + 1));
        let pools = given.flatten().and_then(|count| count.parse().ok()).unwrap_or(3);
        let end = Instant::now() + Duration::from_secs(60);
        while product.online("pool") < pools || product.online("node") < 1 {
            let ended = !matches!(product.dev.try_wait(), Ok(None));
            if ended || Instant::now() > end {
                // The file is removed with the directory.
                let said = std::fs::read_to_string(product.dir.join("dev.log")).unwrap_or_default();
                return Err(Error::Failed(format!(
                    "quoin dev did not bring up {pools} pools and a node: {}",
                    said.lines().last().unwrap_or("its log is empty")
                )));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(product)
    }

    /// Runs `quoin ARGS` against this Quoin and returns its output.
    pub fn command(&self, arguments: &[&str]) -> Result<String, Error> {
        self.command_at(&self.path("run/admin.sock"), arguments)
    }

    fn command_at(&self, socket: &Path, arguments: &[&str]) -> Result<String, Error> {
        let output = Command::new(&self.quoin)
            .args(arguments)
            .env("QUOIN_SOCKET", socket)
            .stdin(Stdio::null())
            .output()
            .map_err(Error::io("run quoin"))?;
        if !output.status.success() {
            return Err(Error::Failed(format!(
                "quoin {}: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// As [`Self::command`], against the cluster in a directory of this one.
    pub fn command_of(&self, name: &str, arguments: &[&str]) -> Result<String, Error> {
        self.command_at(&self.path(name).join("run/admin.sock"), arguments)
    }

    /// Returns the metrics of a process, whose address has this name in the settings.
    pub fn metrics_of(&self, setting: &str) -> Result<String, Error> {
        let settings = self.path("dev.json");
        let text = std::fs::read_to_string(&settings).map_err(Error::io("read settings"))?;
        let settings: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| Error::Failed(format!("settings: {error}")))?;
        let address = settings[setting].as_str().unwrap_or_default();
        crate::mirror::page(address).map_err(Error::io(format!("read metrics at {address}")))
    }

    /// Returns the number of pools or nodes that are online.
    pub fn online(&self, what: &str) -> usize {
        let text = self.command(&[what, "list", "-o", "json"]).unwrap_or_default();
        text.matches("Online").count()
    }

    /// Makes a volume and returns its NBD socket.
    pub fn volume(&self, name: &str, class: Class, size_bytes: u64) -> Result<PathBuf, Error> {
        self.volume_with(name, class, size_bytes, 3)
    }

    /// Makes a volume with this many replicas, as above.
    pub fn volume_with(
        &self,
        name: &str,
        class: Class,
        size_bytes: u64,
        replicas: usize,
    ) -> Result<PathBuf, Error> {
        let replicas = replicas.to_string();
        self.volume_by(name, class, size_bytes, &["--replicas", &replicas], &[])
    }

    /// Makes an encrypted volume whose key is in a file, and returns its NBD socket.
    pub fn encrypted_volume(
        &self,
        name: &str,
        key_file: &Path,
        size_bytes: u64,
    ) -> Result<PathBuf, Error> {
        let key_file = key_file.to_string_lossy();
        let key_file = ["--key-file", key_file.as_ref()];
        let made = [&["--encrypt"], &key_file[..]].concat();
        self.volume_by(name, Class::Cache, size_bytes, &made, &key_file)
    }

    /// Makes a volume with these flags, and attaches it with those.
    fn volume_by(
        &self,
        name: &str,
        class: Class,
        size_bytes: u64,
        made: &[&str],
        attached: &[&str],
    ) -> Result<PathBuf, Error> {
        self.create_by(name, class, size_bytes, made)?;
        self.attach_with(name, attached)
    }

    /// Makes a volume with three replicas that is attached nowhere.
    pub fn create(&self, name: &str, class: Class, size_bytes: u64) -> Result<(), Error> {
        self.create_by(name, class, size_bytes, &["--replicas", "3"])
    }

    fn create_by(
        &self,
        name: &str,
        class: Class,
        size_bytes: u64,
        made: &[&str],
    ) -> Result<(), Error> {
        let size = size_bytes.to_string();
        let durability = match class {
            Class::Cache => "cache",
            Class::Media => "media",
        };
        let create = ["volume", "create", name, "--size", &size, "--durability", durability];
        self.command(&[&create, made].concat()).map(drop)
    }

    /// Attaches a volume and returns its NBD socket.
    pub fn attach(&self, name: &str) -> Result<PathBuf, Error> {
        self.attach_with(name, &[])
    }

    fn attach_with(&self, name: &str, flags: &[&str]) -> Result<PathBuf, Error> {
        self.attach_by(&[&["volume", "attach", name, "--nbd"], flags].concat())
    }

    /// Runs a command that attaches a volume, and returns its NBD socket.
    pub fn attach_by(&self, arguments: &[&str]) -> Result<PathBuf, Error> {
        let text = self.command(arguments)?;
        // An NBD URI: nbd+unix:///EXPORT?socket=PATH.
        let socket = text
            .split_once("socket=")
            .map(|(_, rest)| rest.split_whitespace().next().unwrap_or_default().to_owned())
            .ok_or_else(|| Error::Failed(format!("no NBD address in: {}", text.trim())))?;
        Ok(PathBuf::from(socket))
    }

    /// Returns a path below the directory of `quoin dev`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join("data").join(name)
    }

    /// Returns the row of a volume's replica in this pool.
    pub fn replica(&self, volume: &str, pool: &str) -> Result<Replica, Error> {
        self.replicas(volume)?
            .into_iter()
            .find(|r| r.pool == pool)
            .ok_or_else(|| Error::Failed(format!("volume {volume} has no replica in {pool}")))
    }

    /// Returns the rows of all replicas of a volume.
    pub fn replicas(&self, volume: &str) -> Result<Vec<Replica>, Error> {
        Ok(self.all_replicas()?.into_iter().filter(|r| r.volume == volume).collect())
    }

    /// Returns the rows of all volumes' replicas.
    pub fn all_replicas(&self) -> Result<Vec<Replica>, Error> {
        let text = self.command(&["replica", "list", "-o", "json"])?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Failed(format!("quoin replica list: {error}")))
    }

    /// Kills a pool and removes all its data before it is restarted.
    pub fn wipe_pool(&self, pool: &str) -> Result<(), Error> {
        let away = self.take_away(pool)?;
        let held = self.pool_file(pool);
        let gone = if held.is_dir() {
            std::fs::remove_dir_all(&held)
        } else {
            std::fs::remove_file(&held)
        };
        gone.map_err(Error::io(format!("wipe {}", held.display())))?;
        away.give_back()
    }

    /// Returns the path of a pool's file.
    pub fn pool_file(&self, pool: &str) -> PathBuf {
        self.dir.join("data/pools").join(pool).join("data")
    }

    /// Drops a pool's data from the page cache, so that it is read from the disk afterwards.
    pub fn drop_cached(&self, pool: &str) -> Result<(), Error> {
        let path = self.pool_file(pool);
        let failed = || Error::io(format!("drop what is cached of {}", path.display()));
        let file = std::fs::File::open(&path).map_err(failed())?;
        file.sync_all().map_err(failed())?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|error| failed()(error.into()))
    }

    /// Kills a pool, which is not restarted before it is given back.
    pub fn take_away(&self, pool: &str) -> Result<Away, Error> {
        let away = self.hold(pool)?;
        usage::end(&self.pids_of_pool(pool));
        Ok(away)
    }

    /// Kills the process of a role, which is not restarted before it is given back.
    pub fn take_away_role(&self, role: &str) -> Result<Away, Error> {
        let away = self.hold(role)?;
        usage::end(&self.pids_of(role));
        Ok(away)
    }

    fn hold(&self, name: &str) -> Result<Away, Error> {
        self.hold_below("", name)
    }

    /// Keeps a process of the cluster in a directory of this one from being restarted; empty: of this one.
    pub fn hold_below(&self, cluster: &str, name: &str) -> Result<Away, Error> {
        let hold = self.path(cluster).join(format!("run/hold-{name}"));
        std::fs::write(&hold, "").map_err(Error::io(format!("write {}", hold.display())))?;
        Ok(Away { hold })
    }

    /// Returns the process of one pool.
    pub fn pids_of_pool(&self, pool: &str) -> Vec<u32> {
        let word = format!("/pools/{pool}/");
        let is_it = |pid: &u32| usage::command_line(*pid).is_some_and(|line| line.contains(&word));
        self.pids_of("pool").into_iter().filter(is_it).collect()
    }

    /// Returns all of Quoin's processes.
    pub fn pids(&self) -> Vec<u32> {
        usage::family(self.dev.id())
    }

    /// Returns the processes of one role (`pool`, `target`, …), which is their first argument.
    pub fn pids_of(&self, role: &str) -> Vec<u32> {
        let is_role = |pid: &u32| {
            usage::command_line(*pid).is_some_and(|line| line.split(' ').nth(1) == Some(role))
        };
        self.pids().into_iter().filter(is_role).collect()
    }

    pub fn stop(&mut self) {
        if let Ok(pid) = i32::try_from(self.dev.id())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            // The kill fails only if the process has ended already.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(20);
        while matches!(self.dev.try_wait(), Ok(None)) {
            if Instant::now() > end {
                let _ = self.dev.kill();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A process that is not running.
pub struct Away {
    hold: PathBuf,
}

impl Away {
    pub fn give_back(self) -> Result<(), Error> {
        let hold = self.hold;
        std::fs::remove_file(&hold).map_err(Error::io(format!("remove {}", hold.display())))
    }
}

impl Drop for Product {
    /// Removes its pools: the next measurement has the disk's space and the machine's memory for
    /// itself.
    fn drop(&mut self) {
        self.stop();
        // Remaining files are removed with the whole directory.
        let _ = std::fs::remove_dir_all(self.dir.join("data"));
    }
}
