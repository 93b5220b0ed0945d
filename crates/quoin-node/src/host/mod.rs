//! One host's volumes: staged, published, measured and grown. Each call is idempotent, and a kill
//! after any step is safe.
//!
//! The order of every change is: write the record (an intent), do the step, continue. After a kill
//! the next call, of either kind, finds the present state by asking the kernel and the attach
//! process, and continues from there. A staging that is refused takes back what it made, as its
//! caller may never call again. Callers ensure that there is one call a volume at a time.

mod heal;
mod health;
mod left;
mod paths;
mod publish;
mod steps;
#[cfg(test)]
mod tests;
mod volume_stats;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use heal::{HealRequest, Healed};
pub use health::{FaultKind, Standing, VolumeFault};
use paths::{existing_directory, foreign, resolve};
pub use publish::PublishRequest;
pub use volume_stats::VolumeStats;

use quoin_encryption::{DataKey, KeySlot, UserKey};

use crate::attach::{AttachRequest, Attacher, hand_key, wait_for_socket, wrap_key};
use crate::device_calls::DeviceCalls;
use crate::error::{Error, Kind};
use crate::format::{self, FileSystem, Image, Job};
use crate::mountinfo::{self, Mount};
use crate::probe::{self, Content};
use crate::records::{Access, Record, Records, Staging};
use crate::tools::Tools;
use crate::{allocation, device, mount, superblock};

/// Directory of the records, below that of the state.
const RECORDS: &str = "volumes";
/// Directory of the sockets of targets, below that of what runs.
const SOCKETS: &str = "nbd";

/// Paths of a node.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Records and format images; private to this node, survives restarts.
    pub state_directory: PathBuf,
    /// Targets listen on `<run>/nbd/<volume id>.sock`.
    pub run_directory: PathBuf,
    /// Longest wait of staging for the target.
    pub target_deadline_ms: u64,
}

/// The volumes of this host; the module's documentation describes the order of their changes.
pub struct NodeHost {
    options: HostOptions,
    records: Records,
    attacher: Arc<dyn Attacher>,
    tools: Tools,
    troubles: health::Troubles,
    calls: DeviceCalls,
    steps: steps::Steps,
    /// Steps until a simulated kill; only tests set it.
    #[cfg(test)]
    steps_left: std::sync::atomic::AtomicUsize,
}

/// A volume to be staged.
#[derive(Debug, Clone)]
pub struct StageRequest {
    pub volume: String,
    /// An existing directory, absolute.
    pub staging_path: PathBuf,
    pub access: Access,
    /// The access mode's name; compared only.
    pub mode: String,
    pub read_only: bool,
    pub size_bytes: u64,
    pub block_size: u32,
    /// Key of an encrypted volume; in no record.
    pub key: Option<DataKey>,
}

/// Reason for which a volume is staged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Use,
    /// [`NodeHost::replay`]: no file system is made, and it is mounted writable to grow alone.
    Replay,
    /// [`NodeHost::heal`]: no file system is made.
    Heal,
}

impl NodeHost {
    /// Returns a host with its own tools.
    ///
    /// # Errors
    /// If the state directory cannot be made.
    pub fn new(options: HostOptions, attacher: Arc<dyn Attacher>) -> Result<Self, Error> {
        Self::with_tools(options, attacher, Tools::of_host())
    }

    /// Returns a host whose tools are searched for elsewhere.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_tools(
        options: HostOptions,
        attacher: Arc<dyn Attacher>,
        tools: Tools,
    ) -> Result<Self, Error> {
        let records = Records::open(options.state_directory.join(RECORDS))?;
        Ok(Self {
            options,
            records,
            attacher,
            tools,
            troubles: health::Troubles::default(),
            calls: DeviceCalls::default(),
            steps: steps::Steps::default(),
            #[cfg(test)]
            steps_left: std::sync::atomic::AtomicUsize::new(usize::MAX),
        })
    }

    /// Returns the tools of this host, so that missing ones can be reported early.
    #[must_use]
    pub fn tools(&self) -> &Tools {
        &self.tools
    }

    /// Returns whether this node has any record of the volume.
    ///
    /// # Errors
    /// If its record cannot be read.
    pub fn has_record(&self, volume: &str) -> Result<bool, Error> {
        Ok(self.records.load(volume)?.is_some())
    }

    /// Returns what a call on the volume is doing now, in words; `None`: none is under way.
    #[must_use]
    pub fn progress(&self, volume: &str) -> Option<String> {
        let (what, step) = self.steps.of(volume)?;
        Some(format!("{what} is at \"{step}\""))
    }

    /// Makes the volume ready for publication: device, file system, mount at the staging path.
    ///
    /// # Errors
    /// See [`Error`]; a later call continues where this one ended.
    pub async fn stage(&self, request: &StageRequest) -> Result<(), Error> {
        self.stage_for(request, Purpose::Use).await
    }

    async fn stage_for(&self, request: &StageRequest, purpose: Purpose) -> Result<(), Error> {
        let staging = self.stage_or_nothing(request, purpose);
        let outcome = self.steps.reported(&request.volume, "staging", staging).await;
        let how = outcome.as_ref().map(drop);
        self.troubles.ended(&request.volume, FaultKind::StagingFailed, how);
        outcome
    }

    /// Replays the journal of a volume's file system, and grows it to its volume, before the staging
    /// of `request`, which is read-only: through a device that takes no writes none is replayed. Makes
    /// no file system. Nothing of the volume is on this host afterwards.
    ///
    /// # Errors
    /// As [`Self::stage`].
    pub async fn replay(&self, request: &StageRequest) -> Result<(), Error> {
        let record = self.records.load(&request.volume)?;
        if let Some(present) = record.and_then(|record| record.staging)
            && present.read_only
            && present.complete
            && self.staging_is_live(&request.volume, &present).await?
        {
            // It is staged read-only, so its journal was replayed before.
            return Ok(());
        }
        let writable = StageRequest { read_only: false, ..request.clone() };
        self.stage_for(&writable, Purpose::Replay).await?;
        self.unstage(&request.volume, &request.staging_path).await?;
        Ok(())
    }

    /// Stages, and leaves nothing of a staging that is refused. One that may be repeated with success
    /// keeps what it has.
    async fn stage_or_nothing(
        &self,
        request: &StageRequest,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let volume = &request.volume;
        let before = self.attacher.device(volume).await;
        let outcome = self.stage_steps(request, purpose).await;
        let Err(error) = &outcome else { return outcome };
        let is_killed = matches!(error, Error::Stopped(_));
        // A device that was there before is another call's, or of pods that have the volume.
        if is_killed || error.kind() == Kind::Unavailable || !matches!(before, Ok(None)) {
            return outcome;
        }
        if let Err(error) = self.take_back(request).await {
            tracing::warn!(volume, %error, "what a refused staging made is still here");
        }
        outcome
    }

    async fn take_back(&self, request: &StageRequest) -> Result<(), Error> {
        let volume = &request.volume;
        let Some(device) = self.attacher.device(volume).await? else {
            return self.forget_staging(volume);
        };
        let path = resolve(&request.staging_path);
        if let Some(present) = mountinfo::at(&mountinfo::read()?, &path)
            && is_of_device(present, &device)
        {
            self.unmount(volume, &path).await?;
        }
        self.attacher.detach(volume).await?;
        self.forget_staging(volume)
    }

    fn forget_staging(&self, volume: &str) -> Result<(), Error> {
        match self.records.load(volume)? {
            Some(record) if record.staging.as_ref().is_some_and(|staging| !staging.complete) => {
                self.records.save(&Record { staging: None, ..record })
            }
            _ => Ok(()),
        }
    }

    async fn stage_steps(&self, request: &StageRequest, purpose: Purpose) -> Result<(), Error> {
        let volume = &request.volume;
        let path = existing_directory(&request.staging_path)?;
        let wanted = Staging {
            path: path.clone(),
            access: request.access.clone(),
            mode: request.mode.clone(),
            read_only: request.read_only,
            complete: false,
        };
        let mut record = self.records.load(volume)?.unwrap_or_else(|| Record::new(volume));
        if let Some(present) = record.staging.clone() {
            let mut live = self.staging_is_live(volume, &present).await?;
            // A mount of an earlier use is still in the mount table, but all its IO fails.
            if live && let Some(why) = self.attacher.dead(volume).await? {
                if let Access::Mount { .. } = present.access {
                    let volume = volume.clone();
                    return Err(Error::DeadStaging { volume, path: present.path, why });
                }
                live = false;
            }
            if live && present.path != path {
                return Err(Error::StagedElsewhere { volume: volume.clone(), path: present.path });
            }
            let same = Staging { complete: false, ..present.clone() } == wanted;
            if live && !same {
                return Err(Error::StagedDifferently { volume: volume.clone(), path });
            }
            if live && present.complete {
                return Ok(());
            }
            if !same {
                // An unfinished attempt; its device may be of another kind.
                self.attacher.detach(volume).await?;
            }
        }
        record.staging = Some(wanted);
        self.step("writing the record")?;
        self.records.save(&record)?;

        self.step("waiting for the target")?;
        if let Some(key) = &request.key {
            let sockets = self.options.run_directory.join(SOCKETS);
            hand_key(volume, &sockets, key, self.options.target_deadline_ms).await?;
        }
        let nbd_socket = self.nbd_socket(volume);
        wait_for_socket(volume, &nbd_socket, self.options.target_deadline_ms).await?;
        self.step("attaching, and making the file system of a new volume")?;
        let (device, image) =
            tokio::join!(self.attach(request, nbd_socket), self.early_image(request, purpose));
        let device = device?;
        if !request.read_only {
            // A loop device keeps this switch across its users, so it may have the wrong setting.
            self.set_writable(volume, &device).await?;
        }
        self.step("mounting")?;
        self.mount_staging(request, purpose, &device, &path, image).await?;
        self.step("completing the record")?;
        if let Some(staging) = &mut record.staging {
            staging.complete = true;
        }
        self.records.save(&record)
    }

    /// Has the target of this node wrap a volume's key for another key of a user. `None`: it does not have
    /// the volume's key.
    ///
    /// # Errors
    /// The target could not do it.
    pub async fn wrap_key(
        &self,
        volume: &str,
        user: &UserKey,
        slot: &str,
    ) -> Result<Option<KeySlot>, Error> {
        wrap_key(volume, &self.options.run_directory.join(SOCKETS), user, slot).await
    }

    /// Returns the socket on which the target of this node serves a volume.
    fn nbd_socket(&self, volume: &str) -> PathBuf {
        self.options.run_directory.join(SOCKETS).join(format!("{volume}.sock"))
    }

    async fn attach(&self, request: &StageRequest, nbd_socket: PathBuf) -> Result<PathBuf, Error> {
        let request = AttachRequest {
            volume: request.volume.clone(),
            nbd_socket,
            size_bytes: request.size_bytes,
            block_size: request.block_size,
            read_only: request.read_only,
            key: request.key.clone(),
        };
        self.attacher.attach(&request).await
    }

    /// Makes the file system of a volume that was never written, while its device is made.
    async fn early_image(
        &self,
        request: &StageRequest,
        purpose: Purpose,
    ) -> Option<Result<Image, Error>> {
        let Access::Mount { file_system, .. } = &request.access else { return None };
        if request.read_only || purpose != Purpose::Use {
            return None;
        }
        let (socket, size_bytes) = (self.nbd_socket(&request.volume), request.size_bytes);
        let asked = self.calls.look(&request.volume, "asking what was written", move |_| {
            Ok(allocation::is_unwritten(&socket, size_bytes))
        });
        let is_new = asked.await.ok()?;
        if is_new { Some(self.image(request, *file_system, size_bytes).await) } else { None }
    }

    async fn image(
        &self,
        request: &StageRequest,
        file_system: FileSystem,
        size_bytes: u64,
    ) -> Result<Image, Error> {
        let scratch = self.options.state_directory.join("scratch");
        let job = Job {
            volume: &request.volume,
            size_bytes,
            block_size: request.block_size,
            scratch: &scratch,
        };
        Image::make(&self.tools, job, file_system).await
    }

    /// Mounts the file system of a volume, if that is what is asked for, and makes one on a blank
    /// device: the one of `image`, if that was made before.
    async fn mount_staging(
        &self,
        request: &StageRequest,
        purpose: Purpose,
        device: &Path,
        path: &Path,
        image: Option<Result<Image, Error>>,
    ) -> Result<(), Error> {
        let Access::Mount { file_system, flags } = &request.access else { return Ok(()) };
        let file_system = *file_system;
        let volume = &request.volume;
        let parsed =
            mount::parse_flags(flags).map_err(|_| Error::MountFlag { volume: volume.clone() })?;
        let size_bytes = device::size_bytes(device)?;
        let grows_mounted = async || -> Result<bool, Error> {
            if request.read_only || file_system != FileSystem::Xfs {
                return Ok(false);
            }
            Ok(self.file_system_bytes(volume, device).await? < size_bytes)
        };
        if let Some(present) = mountinfo::at(&mountinfo::read()?, path) {
            if !is_of_device(present, device) {
                return Err(foreign(present));
            }
            // An earlier call may have ended before the growth.
            if grows_mounted().await? {
                self.grow(volume, device, Some(path), file_system).await?;
            }
            return Ok(());
        }
        self.step("reading the device")?;
        let content = {
            let (device, socket) = (device.to_owned(), self.nbd_socket(volume));
            // An image was made only of a volume that had nothing, of which nothing was written since.
            let is_new = image.is_some();
            let written = move || match is_new {
                true => Some(Vec::new()),
                false => allocation::written(&socket, size_bytes),
            };
            let probing = move |thread: &_| probe::content(thread, &device, size_bytes, written);
            self.calls.change(volume, "reading what its device holds", probing).await?
        };
        match &content {
            Content::Blank | Content::Interrupted => {
                if purpose == Purpose::Heal {
                    return Err(Error::NoFileSystem { volume: volume.clone() });
                }
                if request.read_only || purpose == Purpose::Replay {
                    return Err(Error::EmptyReadOnly { volume: volume.clone() });
                }
                self.step("formatting")?;
                // The tool is there before the mark is: without it a blank device stays blank.
                let image = match image {
                    Some(made) if request.size_bytes == size_bytes => made?,
                    _ => self.image(request, file_system, size_bytes).await?,
                };
                let (device, was_interrupted) =
                    (device.to_owned(), content == Content::Interrupted);
                self.calls
                    .change(volume, "writing its new file system", move |thread| {
                        image.write_to(thread, &device, was_interrupted)
                    })
                    .await?;
            }
            Content::FileSystem(name) if *name == file_system.name() => {}
            other => {
                let (other, device) = (other.clone(), device.to_owned());
                let looked = move |thread: &_| Ok(probe::other_content(thread, &other, &device));
                let what = "reading what its device holds";
                let (found, way_out) = self.calls.change(volume, what, looked).await?;
                let (volume, wanted) = (volume.clone(), file_system.name().to_owned());
                return Err(Error::OtherContent { volume, found, wanted, way_out });
            }
        }
        let is_new = matches!(content, Content::Blank | Content::Interrupted);
        let looked = {
            let device = device.to_owned();
            move |thread: &_| {
                let names_another = superblock::names_another_device(thread, &device)?;
                Ok((names_another, device::is_held(thread, &device)?))
            }
        };
        let what = "reading its superblock";
        let (has_external_journal, is_held) = self.calls.change(volume, what, looked).await?;
        if has_external_journal {
            return Err(Error::ExternalJournal { volume: volume.clone() });
        }
        // A pod may still have a mount of a staging that was lost: that file system was checked before
        // it was mounted, is mounted again, and grows mounted.
        if !request.read_only && !is_new && !is_held {
            self.step("checking")?;
            // The volume may have grown while it was staged nowhere. Unmounted, ext4 requires a
            // full check first, and no capability.
            let grows = file_system == FileSystem::Ext4
                && self.file_system_bytes(volume, device).await? < size_bytes;
            self.check(volume, device, file_system, grows).await?;
            if grows {
                self.step("growing unmounted")?;
                self.grow(volume, device, None, file_system).await?;
            }
        }
        self.step("mounting the file system")?;
        let grows_mounted = match is_held {
            true => {
                !request.read_only && self.file_system_bytes(volume, device).await? < size_bytes
            }
            false => grows_mounted().await?,
        };
        // Mounted read-only on a device that takes writes, a file system replays its journal, and no
        // file changes.
        let read_only = request.read_only || purpose == Purpose::Replay && !grows_mounted;
        {
            let (name, device, path) = (volume.clone(), device.to_owned(), path.to_owned());
            self.calls
                .change(volume, "mounting its file system", move |thread| {
                    let at = &path;
                    mount::mount_device(thread, &name, &device, at, file_system, &parsed, read_only)
                })
                .await?;
        }
        self.step("growing")?;
        if grows_mounted {
            self.grow(volume, device, Some(path), file_system).await?;
        }
        Ok(())
    }

    async fn set_writable(&self, volume: &str, device: &Path) -> Result<(), Error> {
        let device = device.to_owned();
        let set = move |thread: &_| device::set_read_only(thread, &device, false);
        self.calls.change(volume, "making its device writable", set).await
    }

    async fn unmount(&self, volume: &str, path: &Path) -> Result<(), Error> {
        let path = path.to_owned();
        self.calls
            .change(volume, "unmounting its file system", move |thread| {
                mount::unmount(thread, &path)
            })
            .await
    }

    async fn file_system_bytes(&self, volume: &str, device: &Path) -> Result<u64, Error> {
        let device = device.to_owned();
        self.calls
            .change(volume, "reading the size of its file system", move |thread| {
                superblock::file_system_bytes(thread, &device)
            })
            .await
    }

    async fn check(
        &self,
        volume: &str,
        device: &Path,
        file_system: FileSystem,
        thoroughly: bool,
    ) -> Result<(), Error> {
        let (tools, name, device) = (self.tools.clone(), volume.to_owned(), device.to_owned());
        let check =
            async move { format::check(&tools, &name, &device, file_system, thoroughly).await };
        self.calls.program(volume, "checking its file system", check).await
    }

    async fn grow(
        &self,
        volume: &str,
        device: &Path,
        mounted_at: Option<&Path>,
        file_system: FileSystem,
    ) -> Result<(), Error> {
        let (tools, name, device) = (self.tools.clone(), volume.to_owned(), device.to_owned());
        let mounted_at = mounted_at.map(Path::to_owned);
        let growth = async move {
            format::grow(&tools, &name, &device, mounted_at.as_deref(), file_system).await
        };
        self.calls.program(volume, "growing its file system", growth).await
    }

    /// Undoes staging. True if anything of the volume was found and removed.
    ///
    /// # Errors
    /// [`Error::StillPublished`] (and nothing is touched), or what prevented it.
    pub async fn unstage(&self, volume: &str, staging_path: &Path) -> Result<bool, Error> {
        let unstaging = self.unstage_steps(volume, staging_path);
        self.steps.reported(volume, "unstaging", unstaging).await
    }

    async fn unstage_steps(&self, volume: &str, staging_path: &Path) -> Result<bool, Error> {
        let path = resolve(staging_path);
        let record = self.records.load(volume)?;
        let device = self.attacher.device(volume).await?;
        let mounts = mountinfo::read()?;
        if let Some(record) = &record {
            for publication in &record.publications {
                if publish::is_at_target(publication, device.as_deref(), &mounts) {
                    let target = publication.target.clone();
                    return Err(Error::StillPublished { volume: volume.to_owned(), target });
                }
            }
        }
        let staged_here = record
            .as_ref()
            .and_then(|record| record.staging.as_ref())
            .is_none_or(|staging| staging.path == path);
        if !staged_here {
            return Ok(false);
        }
        if let Some(device) = &device {
            // Includes mounts that no record names, for example a bind mount by hand.
            let other = mounts
                .iter()
                .find(|mount| is_of_device(mount, device) && mount.mount_point != path);
            if let Some(other) = other {
                let target = other.mount_point.clone();
                return Err(Error::StillPublished { volume: volume.to_owned(), target });
            }
        }
        let mut removed = record.is_some() || device.is_some();
        self.step("unmounting")?;
        let staging = record.as_ref().and_then(|record| record.staging.as_ref());
        loop {
            let mounts = mountinfo::read()?;
            let is_ours = |present: &Mount| match (&device, staging) {
                (Some(device), _) => is_of_device(present, device),
                (None, Some(staging)) => heal::is_own(present, &staging.access, None),
                (None, None) => false,
            };
            let Some(present) = mountinfo::at(&mounts, &path) else { break };
            if !is_ours(present) {
                // A mount of another owner is never removed, nor what lies beneath it.
                if mounts.iter().any(|mount| mount.mount_point == path && is_ours(mount)) {
                    return Err(foreign(present));
                }
                break;
            }
            self.unmount(volume, &path).await?;
            removed = true;
        }
        self.step("detaching")?;
        if let Some(device) = &device
            && record.as_ref().is_some_and(|one| {
                one.staging.as_ref().is_some_and(|staging| staging.access == Access::Block)
            })
        {
            // The device goes back to the host, which may give it to any user.
            self.set_writable(volume, device).await?;
        }
        self.attacher.detach(volume).await?;
        self.step("removing the record")?;
        if record.is_some() {
            self.records.save(&Record::new(volume))?;
        }
        self.troubles.forget(volume);
        Ok(removed)
    }

    /// Returns whether a staging is still in place, as the kernel and the attach process report.
    async fn staging_is_live(&self, volume: &str, staging: &Staging) -> Result<bool, Error> {
        let device = self.attacher.device(volume).await?;
        Ok(match (&staging.access, device) {
            (_, None) => false,
            (Access::Block, Some(_)) => staging.complete,
            (Access::Mount { .. }, Some(device)) => {
                mountinfo::at(&mountinfo::read()?, &staging.path)
                    .is_some_and(|present| is_of_device(present, &device))
            }
        })
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)]
    fn step(&self, name: &'static str) -> Result<(), Error> {
        steps::begin(name);
        Ok(())
    }

    #[cfg(test)]
    fn step(&self, name: &'static str) -> Result<(), Error> {
        use std::sync::atomic::Ordering;
        steps::begin(name);
        if self.steps_left.load(Ordering::Relaxed) == 0 {
            return Err(Error::Stopped(name));
        }
        self.steps_left.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns where the host with this state directory has a volume staged, by its record.
///
/// # Errors
/// If there is a record and it cannot be read.
pub fn staged_at(state_directory: &Path, volume: &str) -> Result<Option<PathBuf>, Error> {
    let record = Records::within(state_directory.join(RECORDS)).load(volume)?;
    Ok(record.and_then(|record| record.staging).map(|staging| staging.path))
}

/// Returns whether a mount is of the file system on that device.
pub(crate) fn is_of_device(mount: &Mount, device: &Path) -> bool {
    device::major_minor(device) == Some((mount.major, mount.minor))
}
