//! Volumes that an orchestrator uses on one node through the socket of CSI, each with a workload, and damages
//! of that host: its attach process and the holder killed, devices freed, mounts gone, file systems stopped,
//! calls that are killed half-way and orchestrators that never come back.
//!
//! After each damage the orchestrator calls the healer of CSI-Addons as its sidecar does, until the volume is
//! well, and starts the workload again if that had ended: all that was acknowledged must be there. At the end
//! nothing of a volume may be left on the host, by the kernel's tables and by the word of the node itself.

mod csi;
mod left;
mod workload;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;

use crate::cluster::Cluster;
use crate::files::{Files, run};
use csi::{Content, Csi, Volume};
use workload::{Kept, Workload};

/// Longest time until a damaged volume is well again, with all calls for it.
const HEALED_WITHIN: Duration = Duration::from_secs(150);
/// Longest time of one heal by its documents, with some for the call.
const CALL_MAX: Duration = Duration::from_secs(50);
const STOPPED_WITHIN: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(300);
/// Longest time until a volume whose orchestrator never came back is gone from its host.
const LEFT_MAX: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Damage {
    /// The attach process is killed; its holder keeps the devices
    KillAttach,
    /// The holder of devices is killed; the attach process serves on
    KillHolder,
    /// Both are killed together, so every device is gone
    KillDevices,
    /// Mounts of a volume are taken away under its workload
    Unmount,
    /// The kernel stops a file system as after an error, or aborts its journal
    StopFileSystem,
    /// Another program frees the loop device of a volume
    FreeDevice,
    /// A call to stage or publish is killed half-way; its orchestrator ends the use or never comes back
    HalfDone,
}

const ALL: [(Damage, u32); 7] = [
    (Damage::KillAttach, 3),
    (Damage::KillHolder, 2),
    (Damage::KillDevices, 1),
    (Damage::Unmount, 3),
    (Damage::StopFileSystem, 3),
    (Damage::FreeDevice, 3),
    (Damage::HalfDone, 4),
];

/// A call of the orchestrator.
type Call<'a> = dyn Fn() -> Result<()> + Sync + 'a;

/// Draws a damage, of `only` if that names any.
pub fn draw(rng: &mut ChaCha8Rng, only: &[Damage]) -> Result<Damage> {
    let mut all = ALL.to_vec();
    all.retain(|(damage, _)| only.is_empty() || only.contains(damage));
    Ok(all.choose_weighted(rng, |(_, weight)| *weight)?.0)
}

struct Pod {
    volume: Volume,
    workload: Option<Workload>,
    kept: Kept,
}

/// Stable names of devices on the host, to be compared with those at the end: other clusters of this machine
/// share their directory.
pub struct Before(Vec<String>);

impl Before {
    pub fn look() -> Self {
        Self(left::links(|_, target| !target.exists()))
    }
}

pub struct Pods {
    csi: Csi,
    pods: Vec<Pod>,
    directory: PathBuf,
    number: u64,
    pub happened: BTreeMap<Damage, u64>,
    pub heals: u64,
    pub longest_heal: Duration,
    pub writes: u64,
}

impl Pods {
    /// Makes volumes of each kind, in use.
    pub fn start(cluster: &mut Cluster) -> Result<Self> {
        cluster.command(&["node", "set", "torture", "--manages-volumes", "true"])?;
        let directory = cluster.directory.join("pods");
        std::fs::create_dir_all(&directory)?;
        let mut pods = Self {
            csi: Csi::new(&cluster.directory.join("run/csi/csi.sock"), "torture")?,
            pods: Vec::new(),
            directory,
            number: 0,
            happened: BTreeMap::new(),
            heals: 0,
            longest_heal: Duration::ZERO,
            writes: 0,
        };
        for content in [Content::Ext4, Content::Xfs, Content::Block] {
            let volume = pods.make(cluster, &content.name(), content)?;
            let csi = &pods.csi;
            retried(cluster, "a volume is published and staged", || {
                csi.publish_to_node(&volume)?;
                csi.stage(&volume)?;
                csi.publish(&volume)
            })?;
            let workload = Workload::start(&volume, Kept::default())?;
            pods.pods.push(Pod { volume, workload: Some(workload), kept: Kept::default() });
        }
        Ok(pods)
    }

    fn make(&self, cluster: &mut Cluster, name: &str, content: Content) -> Result<Volume> {
        let size = if content == Content::Xfs { "320MiB" } else { "64MiB" };
        let create = ["volume", "create", name, "--size", size, "--replicas", "3"];
        cluster.wait("a volume is made", |cluster| {
            Ok(cluster.command(&["volume", "get", name]).is_ok()
                || cluster.command(&create).is_ok())
        })?;
        let id =
            cluster.json(&["volume", "get", name])?["id"].as_str().context("its id")?.to_owned();
        Volume::new(id, name, content, &self.directory)
    }

    /// Checks that no workload has failed.
    pub fn check(&self) -> Result<()> {
        for pod in &self.pods {
            if let Some(workload) = &pod.workload {
                workload.check().with_context(|| format!("the workload of {}", pod.volume.name))?;
            }
        }
        Ok(())
    }

    /// Waits until each workload has written.
    pub fn flows(&self, budget: Duration) -> Result<()> {
        for pod in &self.pods {
            let Some(workload) = &pod.workload else { continue };
            workload.flows(budget).with_context(|| pod.volume.name.clone())?;
        }
        Ok(())
    }

    /// Damages the host, and has it healed.
    pub fn happen(
        &mut self,
        damage: Damage,
        cluster: &mut Cluster,
        files: &mut [Files],
        rng: &mut ChaCha8Rng,
    ) -> Result<()> {
        *self.happened.entry(damage).or_default() += 1;
        let pause = Duration::from_millis(rng.random_range(0..3000));
        let any = rng.random_range(0..self.pods.len());
        let mounted = rng.random_range(0..2);
        match damage {
            Damage::KillAttach => {
                cluster.signal("attach", Signal::KILL)?;
                std::thread::sleep(pause);
                cluster.tend()?;
                self.all_well(cluster)
            }
            Damage::KillHolder => {
                cluster.signal("holder", Signal::KILL)?;
                std::thread::sleep(pause);
                cluster.tend()?;
                wait_for_holder(cluster)
            }
            Damage::KillDevices => self.kill_devices(cluster, files, pause),
            Damage::Unmount => {
                let volume = &self.pods[mounted].volume;
                unmount_lazily(&volume.target)?;
                if rng.random() {
                    unmount_lazily(&volume.staging)?;
                }
                self.well(cluster, mounted)?;
                // The workload goes on in the mount that it has, as a container does.
                self.pods[mounted].check_flow()?;
                self.restart(mounted)
            }
            Damage::StopFileSystem => self.stop_file_system(cluster, mounted),
            Damage::FreeDevice => {
                self.end_workload(any)?;
                let volume = &self.pods[any].volume;
                unmount_lazily(&volume.target)?;
                if volume.content != Content::Block {
                    unmount_lazily(&volume.staging)?;
                }
                for device in
                    left::loop_devices(&cluster.directory.join("run/attach/volumes"), &volume.id)
                {
                    run(Command::new("losetup").arg("-d").arg(device))?;
                }
                self.well(cluster, any)?;
                self.begin_workload(any)
            }
            Damage::HalfDone => self.half_done(cluster, rng),
        }
    }

    fn kill_devices(
        &mut self,
        cluster: &mut Cluster,
        files: &mut [Files],
        pause: Duration,
    ) -> Result<()> {
        // Users of devices that nobody heals are in order before.
        files.iter_mut().try_for_each(|files| files.leave(cluster))?;
        cluster.signal("holder", Signal::KILL)?;
        cluster.signal("attach", Signal::KILL)?;
        // The devices fail all IO, and each workload ends with that.
        for pod in 0..self.pods.len() {
            let workload = self.pods[pod].workload.take().context("a workload")?;
            self.pods[pod].kept = workload.ended(HEALED_WITHIN)?.0;
        }
        std::thread::sleep(pause);
        cluster.tend()?;
        for pod in 0..self.pods.len() {
            self.well(cluster, pod)?;
            self.begin_workload(pod)?;
        }
        files.iter_mut().try_for_each(|files| files.come_back(cluster))
    }

    fn stop_file_system(&mut self, cluster: &mut Cluster, pod: usize) -> Result<()> {
        let Volume { id, content, target, .. } = &self.pods[pod].volume;
        match content {
            Content::Xfs => {
                let mut command = Command::new("xfs_io");
                run(command.args(["-x", "-c", "shutdown"]).arg(target))?;
            }
            _ => {
                let devices = left::loop_devices(&cluster.directory.join("run/attach/volumes"), id);
                let device = devices.first().and_then(|device| device.file_name());
                let name = device.context("the device of a mounted volume")?;
                let trigger = Path::new("/sys/fs/ext4").join(name).join("trigger_fs_error");
                std::fs::write(trigger, "1").context("stop an ext4")?;
            }
        }
        let workload = self.pods[pod].workload.take().context("a workload")?;
        self.pods[pod].kept = workload.ended(HEALED_WITHIN)?.0;
        self.well(cluster, pod)?;
        self.begin_workload(pod)
    }

    /// Stages and publishes another volume while the node's process is killed, and ends its use, or leaves it
    /// as it is and takes the volume from the node.
    fn half_done(&mut self, cluster: &mut Cluster, rng: &mut ChaCha8Rng) -> Result<()> {
        self.number += 1;
        let content = if rng.random() { Content::Ext4 } else { Content::Block };
        let name = format!("half-{}", self.number);
        let volume = self.make(cluster, &name, content)?;
        let csi = &self.csi;
        retried(cluster, "a volume is published to the node", || csi.publish_to_node(&volume))?;
        let killed = |cluster: &mut Cluster, after_ms: u64, call: &Call| {
            csi.begin(call, || {
                std::thread::sleep(Duration::from_millis(after_ms));
                cluster.signal("agent", Signal::KILL)
            })?;
            cluster.tend()
        };
        killed(cluster, rng.random_range(0..400), &|| csi.stage(&volume))?;
        match rng.random_range(0..3) {
            // It goes on, and is killed once more.
            0 => {
                retried(cluster, "staging goes on", || csi.stage(&volume))?;
                killed(cluster, rng.random_range(0..100), &|| csi.publish(&volume))?;
                retried(cluster, "publishing goes on", || csi.publish(&volume))?;
                retried(cluster, "it is unpublished", || csi.unpublish(&volume))?;
                retried(cluster, "it is unstaged", || csi.unstage(&volume))?;
            }
            1 => retried(cluster, "it is unstaged", || csi.unstage(&volume))?,
            // The orchestrator never comes back to this node.
            _ => {}
        }
        retried(cluster, "it is taken from the node", || csi.take_from_node(&volume))?;
        cluster.wait_for("nothing is left of it", LEFT_MAX, |cluster| {
            let left = left::of_volume(&cluster.directory, &volume)?;
            if left.is_empty() { Ok(true) } else { bail!("{}", left.join(", ")) }
        })?;
        cluster.wait("it is deleted", |cluster| {
            cluster.command(&["volume", "delete", &name, "--yes"]).map(|_| true)
        })
    }

    fn all_well(&mut self, cluster: &mut Cluster) -> Result<()> {
        (0..self.pods.len()).try_for_each(|pod| self.well(cluster, pod))
    }

    /// Calls the healer until the volume is well.
    fn well(&mut self, cluster: &mut Cluster, pod: usize) -> Result<()> {
        let volume = &self.pods[pod].volume;
        let began = Instant::now();
        loop {
            cluster.tend()?;
            let asked = Instant::now();
            let told = self.csi.heal(volume);
            ensure!(asked.elapsed() < CALL_MAX, "a call of the healer took {:?}", asked.elapsed());
            let why = match told {
                Ok(None) => break,
                Ok(Some(why)) => why,
                Err(error) => format!("{error:#}"),
            };
            if began.elapsed() > HEALED_WITHIN {
                bail!("{} is not healed: {why}", volume.name);
            }
            std::thread::sleep(AGAIN);
        }
        self.heals += 1;
        self.longest_heal = self.longest_heal.max(began.elapsed());
        Ok(())
    }

    fn end_workload(&mut self, pod: usize) -> Result<()> {
        let workload = self.pods[pod].workload.take().context("a workload")?;
        let (kept, outcome) = workload.stop(HEALED_WITHIN)?;
        self.pods[pod].kept = kept;
        outcome.with_context(|| format!("the workload of {}", self.pods[pod].volume.name))
    }

    /// Checks what was acknowledged, and begins to write again.
    fn begin_workload(&mut self, pod: usize) -> Result<()> {
        let pod = &mut self.pods[pod];
        let name = &pod.volume.name;
        pod.kept.verify(&pod.volume).with_context(|| format!("LOST on {name}"))?;
        self.writes = self.writes.max(pod.kept.acknowledged());
        pod.workload = Some(Workload::start(&pod.volume, pod.kept)?);
        Ok(())
    }

    fn restart(&mut self, pod: usize) -> Result<()> {
        self.end_workload(pod)?;
        self.begin_workload(pod)
    }

    /// Ends the use of all volumes, after a last check, and makes sure that nothing of any volume is left.
    pub fn end(&mut self, cluster: &mut Cluster) -> Result<()> {
        self.writes = 0;
        for pod in 0..self.pods.len() {
            self.end_workload(pod)?;
            let pod = &self.pods[pod];
            pod.kept.verify(&pod.volume).with_context(|| format!("LOST on {}", pod.volume.name))?;
            self.writes += pod.kept.acknowledged();
            let (csi, volume) = (&self.csi, &pod.volume);
            retried(cluster, "a volume's use ends", || {
                csi.unpublish(volume)?;
                csi.unstage(volume)?;
                csi.take_from_node(volume)
            })?;
        }
        self.pods.clear();
        Ok(())
    }
}

impl Pod {
    fn check_flow(&self) -> Result<()> {
        let workload = self.workload.as_ref().context("a workload")?;
        workload.flows(HEALED_WITHIN).with_context(|| self.volume.name.clone())
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        // After a failure: what is mounted would keep the directory. The commands fail where nothing is.
        for pod in &mut self.pods {
            if let Some(workload) = pod.workload.take() {
                let _ = workload.stop(STOPPED_WITHIN);
            }
            let _ = unmount_lazily(&pod.volume.target);
            let _ = unmount_lazily(&pod.volume.staging);
        }
    }
}

/// Waits until nothing of any volume is left on the host.
pub fn nothing_is_left(cluster: &mut Cluster, before: &Before) -> Result<()> {
    cluster.wait_for("nothing is left on the host", LEFT_MAX, |cluster| {
        let mut left = left::of_all(cluster)?;
        left.retain(|one| !before.0.contains(one));
        if left.is_empty() { Ok(true) } else { bail!("{}", left.join(", ")) }
    })
}

fn unmount_lazily(path: &Path) -> Result<()> {
    run(Command::new("umount").arg("-l").arg(path))
}

/// A call that is made again until it succeeds, with processes kept up.
fn retried(cluster: &mut Cluster, what: &str, call: impl Fn() -> Result<()>) -> Result<()> {
    cluster.wait_for(what, HEALED_WITHIN, |_| call().map(|()| true))
}

/// Waits until the holder has the devices: until then another death of the attach process takes them along.
fn wait_for_holder(cluster: &mut Cluster) -> Result<()> {
    cluster.wait("the holder keeps the devices", left::is_held)
}
