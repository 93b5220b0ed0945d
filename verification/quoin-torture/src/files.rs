//! A file system on a volume: fio writes and verifies, and at each stop the checker of the file
//! system must find it clean.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cluster::Cluster;

/// Longest round of fio; a longer one counts as stalled.
const ROUND_BUDGET: Duration = Duration::from_secs(240);
const FREE_BUDGET: Duration = Duration::from_secs(120);

pub struct Files {
    volume: String,
    device: String,
    mount: PathBuf,
    xfs: bool,
    mounted: bool,
    fio: Option<(Child, Instant)>,
    pub rounds: u64,
    pub checks: u64,
}

/// Returns whether a volume can be a block device here; otherwise why not.
pub fn possible() -> Result<(), &'static str> {
    if !rustix::process::geteuid().is_root() {
        return Err("no root");
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Err("no /dev/fuse or no loop devices");
    }
    Ok(())
}

impl Files {
    pub fn make(cluster: &Cluster, name: &str, xfs: bool) -> Result<Self> {
        cluster.volume(name, "768MiB", &[])?;
        // A volume that is attached already: the same command prints its device.
        let device = cluster.attach(name, &[])?.trim().to_owned();
        let (program, force) = if xfs { ("mkfs.xfs", "-f") } else { ("mkfs.ext4", "-F") };
        run(Command::new(program).args(["-q", force, &device]))?;
        let mount = cluster.directory.join(format!("mnt-{name}"));
        std::fs::create_dir_all(&mount)?;
        let mut files = Self {
            volume: name.to_owned(),
            device,
            mount,
            xfs,
            mounted: false,
            fio: None,
            rounds: 0,
            checks: 0,
        };
        files.mount()?;
        Ok(files)
    }

    fn mount(&mut self) -> Result<()> {
        run(Command::new("mount").arg(&self.device).arg(&self.mount))?;
        self.mounted = true;
        Ok(())
    }

    fn unmount(&mut self) -> Result<()> {
        if self.mounted {
            run(Command::new("umount").arg(&self.mount))?;
            self.mounted = false;
        }
        Ok(())
    }

    /// Restarts fio when a round has ended; each must have succeeded.
    pub fn tend(&mut self) -> Result<()> {
        if let Some((child, began)) = &mut self.fio {
            let Some(status) = child.try_wait()? else {
                if began.elapsed() > ROUND_BUDGET {
                    bail!("fio on {} stands still", self.device);
                }
                return Ok(());
            };
            self.fio = None;
            if !status.success() {
                bail!("fio on {} ended with {status}: see fio.log", self.mount.display());
            }
            self.rounds += 1;
        }
        let log = std::fs::File::create(self.mount.with_extension("fio.log"))?;
        let child = Command::new("fio")
            .args(["--name=torture", "--rw=randwrite", "--bs=4k-64k", "--size=96m", "--direct=1"])
            .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--fsync=64"])
            // Otherwise fio leaves a file with its state in the working directory.
            .args(["--ioengine=libaio", "--iodepth=8", "--randrepeat=0", "--verify_state_save=0"])
            .arg(format!("--directory={}", self.mount.display()))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start fio")?;
        self.fio = Some((child, Instant::now()));
        Ok(())
    }

    /// Lets fio end, unmounts, checks, mounts again.
    pub fn check(&mut self) -> Result<()> {
        self.end_and_check()?;
        self.mount()
    }

    /// Lets fio end, unmounts, checks, and detaches the volume.
    pub fn leave(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.end_and_check()?;
        let detach = ["volume", "detach", self.volume.as_str()];
        cluster.wait("a volume is detached", |cluster| cluster.command(&detach).map(|_| true))
    }

    /// Attaches the volume again, and mounts it.
    pub fn come_back(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.device = cluster.attach(&self.volume, &[])?.trim().to_owned();
        self.mount()
    }

    /// A program of this machine that has a mount table of its own may have copied the mount: the file system is
    /// at rest once the last copy is gone.
    fn wait_until_free(&self) -> Result<()> {
        use rustix::fs::{Mode, OFlags, open};
        let began = Instant::now();
        while let Err(error) = open(&self.device, OFlags::RDONLY | OFlags::EXCL, Mode::empty()) {
            if began.elapsed() > FREE_BUDGET {
                bail!("{} is in use after its unmount: {error}", self.device);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn end_and_check(&mut self) -> Result<()> {
        if let Some((mut child, _)) = self.fio.take() {
            let began = Instant::now();
            let status = loop {
                match child.try_wait()? {
                    Some(status) => break status,
                    None if began.elapsed() > ROUND_BUDGET => {
                        let _ = child.kill();
                        bail!("fio on {} stands still", self.device);
                    }
                    None => std::thread::sleep(Duration::from_millis(50)),
                }
            };
            if !status.success() {
                bail!("fio on {} ended with {status}: see fio.log", self.mount.display());
            }
            self.rounds += 1;
        }
        self.unmount()?;
        self.wait_until_free()?;
        if self.xfs {
            run(Command::new("xfs_repair").args(["-n", &self.device]))?;
        } else {
            run(Command::new("e2fsck").args(["-fn", &self.device]))?;
        }
        self.checks += 1;
        Ok(())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Some((mut child, _)) = self.fio.take() {
            // Both fail only if it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Err(error) = self.unmount() {
            eprintln!("{error:#}");
        }
    }
}

pub fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        let (out, err) = (output.stdout, output.stderr);
        let (out, err) = (String::from_utf8_lossy(&out), String::from_utf8_lossy(&err));
        bail!("{command:?}: {}: {}{}", output.status, out.trim(), err.trim());
    }
    Ok(())
}
