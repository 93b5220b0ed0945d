//! Publication: a staged volume at the paths that workloads see.

use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags};

use super::volume_stats::staged_read_only;
use super::{FaultKind, NodeHost, foreign, is_of_device, resolve};
use crate::error::Error;
use crate::mountinfo::{self, Mount};
use crate::records::{Access, Publication, Record, Staging};
use crate::{device, mount};

/// A staged volume to be published.
#[derive(Debug, Clone)]
pub struct PublishRequest {
    pub volume: String,
    pub staging_path: PathBuf,
    /// Absolute; its parent exists, the path itself is made here.
    pub target: PathBuf,
    pub access: Access,
    pub mode: String,
    pub read_only: bool,
    /// The access mode allows several targets on this node.
    pub several_targets: bool,
    /// Group that the root directory of a writable file system is to belong to.
    pub group: Option<u32>,
}

impl NodeHost {
    /// Mounts or binds a staged volume at a target path.
    ///
    /// # Errors
    /// See [`Error`]; an existing publication stays as it is.
    pub async fn publish(&self, request: &PublishRequest) -> Result<(), Error> {
        let outcome = self.publish_steps(request).await;
        let how = outcome.as_ref().map(drop);
        self.troubles.ended(&request.volume, FaultKind::PublishingFailed, how);
        outcome
    }

    async fn publish_steps(&self, request: &PublishRequest) -> Result<(), Error> {
        let volume = &request.volume;
        let staging_path = resolve(&request.staging_path);
        let target = resolve(&request.target);
        let not_staged = || Error::NotStaged { volume: volume.clone(), path: staging_path.clone() };
        let mut record = self.records.load(volume)?.ok_or_else(not_staged)?;
        let staging = record.staging.clone().ok_or_else(not_staged)?;
        if !staging.complete
            || staging.path != staging_path
            || !self.staging_is_live(volume, &staging).await?
        {
            return Err(not_staged());
        }
        let device = self.attacher.device(volume).await?.ok_or_else(not_staged)?;
        let mounts = mountinfo::read()?;
        // Records still list publications after a reboot, though they are gone.
        record.publications.retain(|present| {
            present.target == target || is_in_place(present, Some(&device), &mounts)
        });
        let wanted = Publication {
            target: target.clone(),
            access: request.access.clone(),
            mode: request.mode.clone(),
            read_only: request.read_only,
        };
        let present = record.publications.iter().find(|present| present.target == target);
        if let Some(present) = present {
            let in_place = is_in_place(present, Some(&device), &mounts);
            if *present != wanted && in_place {
                return Err(Error::PublishedDifferently { volume: volume.clone(), target });
            }
            if *present == wanted && in_place {
                // The call before may have ended between both steps.
                return give_to_group(request, &staging, &target);
            }
        }
        if request.access != staging.access || request.mode != staging.mode {
            return Err(Error::OtherCapability {
                volume: volume.clone(),
                staged: format!("{} {}", staging.access.description(), staging.mode),
                wanted: format!("{} {}", request.access.description(), request.mode),
            });
        }
        for other in record.publications.iter().filter(|other| other.target != target) {
            if !request.several_targets {
                let target = other.target.clone();
                return Err(Error::PublishedElsewhere { volume: volume.clone(), target });
            }
            if request.access == Access::Block && other.read_only != request.read_only {
                return Err(Error::MixedReadOnly { volume: volume.clone() });
            }
        }
        check_target(&target, &request.access, &mounts)?;

        record.publications.retain(|present| present.target != target);
        record.publications.push(wanted);
        self.step("writing the record")?;
        self.records.save(&record)?;
        self.step("making the target")?;
        make_target(&target, &request.access)?;
        self.step("binding")?;
        let source = match request.access {
            Access::Block => {
                device::set_read_only(&device, request.read_only || staging.read_only)?;
                device
            }
            Access::Mount { .. } => staging.path.clone(),
        };
        let read_only = request.read_only;
        let bound = target.clone();
        crate::blocking(move || mount::bind(&source, &bound, read_only)).await?;
        self.step("giving it to its group")?;
        give_to_group(request, &staging, &target)
    }

    /// Undoes a publication. True if anything of it was found and removed.
    ///
    /// # Errors
    /// [`Error::Busy`] while a workload holds it, or what else prevented it.
    pub async fn unpublish(&self, volume: &str, target: &Path) -> Result<bool, Error> {
        let target = resolve(target);
        let record = self.records.load(volume)?;
        let device = self.attacher.device(volume).await?;
        let recorded = record
            .as_ref()
            .is_some_and(|record| record.publications.iter().any(|one| one.target == target));
        let mut removed = recorded;
        self.step("unmounting")?;
        loop {
            let mounts = mountinfo::read()?;
            let Some(present) = mountinfo::at(&mounts, &target) else { break };
            let ours = recorded
                || device.as_ref().is_some_and(|device| {
                    is_of_device(present, device)
                        || device::number(&target) == device::number(device)
                });
            if !ours {
                // A mount of another owner is never removed, nor what lies beneath it.
                return Ok(removed);
            }
            let target = target.clone();
            crate::blocking(move || mount::unmount(&target)).await?;
            removed = true;
        }
        self.step("removing the target")?;
        // A path that no record names and where nothing was mounted is another's.
        if removed {
            remove_target(&target)?;
        }
        self.step("removing the record")?;
        if let Some(mut record) = record
            && recorded
        {
            record.publications.retain(|one| one.target != target);
            self.records.save(&record)?;
        }
        Ok(removed)
    }

    /// Returns the publication or staging of the volume at exactly this path.
    pub(super) fn path_use(&self, volume: &str, path: &Path) -> Result<(Record, PathUse), Error> {
        let path = resolve(path);
        let missing = || Error::NotPresent { volume: volume.to_owned(), path: path.clone() };
        let record = self.records.load(volume)?.ok_or_else(missing)?;
        let staging = record.staging.clone().ok_or_else(missing)?;
        let published = record.publications.iter().find(|one| one.target == path).cloned();
        let path_use = match published {
            Some(one) => PathUse { path, access: one.access },
            None if staging.path == path => PathUse { path, access: staging.access },
            None => return Err(missing()),
        };
        Ok((record, path_use))
    }
}

/// Location of a volume on this node.
pub(super) struct PathUse {
    pub path: PathBuf,
    pub access: Access,
}

/// Returns whether the kernel shows the volume at the publication's target.
pub(super) fn is_in_place(
    publication: &Publication,
    device: Option<&Path>,
    mounts: &[Mount],
) -> bool {
    let Some(present) = mountinfo::at(mounts, &publication.target) else { return false };
    match (&publication.access, device) {
        // A mount at a recorded target counts while the device is unknown: refusing to unstage is
        // safer than unmounting a workload's data.
        (_, None) => true,
        (Access::Mount { .. }, Some(device)) => is_of_device(present, device),
        (Access::Block, Some(device)) => device::number(&publication.target)
            .is_some_and(|number| device::number(device) == Some(number)),
    }
}

/// Gives the root directory of a writable file system to the group that the request names, with the
/// right to write, and has new files belong to that group. What lies below is its owner's.
fn give_to_group(request: &PublishRequest, staging: &Staging, target: &Path) -> Result<(), Error> {
    /// Read, write and search for the group; new entries inherit it.
    const GROUP_MODE: u32 = 0o2070;
    let is_mount = matches!(request.access, Access::Mount { .. });
    let Some(group) = request.group.filter(|_| is_mount) else { return Ok(()) };
    if request.read_only || staging.read_only || staged_read_only(&staging.access) {
        return Ok(());
    }
    let failed = |errno: rustix::io::Errno| Error::io("giving to a group", target)(errno.into());
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(target, flags, Mode::empty()).map_err(failed)?;
    rustix::fs::fchown(&root, None, Some(Gid::from_raw(group))).map_err(failed)?;
    let mode = rustix::fs::fstat(&root).map_err(failed)?.st_mode & 0o7777;
    rustix::fs::fchmod(&root, Mode::from_raw_mode(mode | GROUP_MODE)).map_err(failed)
}

fn check_target(target: &Path, access: &Access, mounts: &[Mount]) -> Result<(), Error> {
    let refuse = |why| Err(Error::Path { path: target.to_owned(), why });
    if let Some(present) = mountinfo::at(mounts, target) {
        return Err(foreign(present));
    }
    if !target.parent().is_some_and(Path::is_dir) {
        return refuse("its parent directory does not exist; the caller creates it");
    }
    match (std::fs::symlink_metadata(target), access) {
        (Err(error), _) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        (Err(error), _) => Err(Error::io("looking at", target)(error)),
        (Ok(present), Access::Mount { .. }) if !present.is_dir() => {
            refuse("already exists and is not a directory")
        }
        (Ok(present), Access::Block) if !present.is_file() => {
            refuse("already exists and is not a regular file")
        }
        (Ok(_), _) => Ok(()),
    }
}

fn make_target(target: &Path, access: &Access) -> Result<(), Error> {
    let result = match access {
        Access::Mount { .. } => std::fs::create_dir(target),
        Access::Block => std::fs::File::create_new(target).map(drop),
    };
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::io("creating", target)(error))
        }
        _ => Ok(()),
    }
}

/// Removes an empty directory or an empty file, never anything that holds data.
fn remove_target(target: &Path) -> Result<(), Error> {
    let metadata = match std::fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io("looking at", target)(error)),
    };
    let result = if metadata.is_dir() {
        std::fs::remove_dir(target)
    } else if metadata.is_file() && metadata.len() == 0 {
        std::fs::remove_file(target)
    } else {
        Ok(())
    };
    result.map_err(Error::io("removing", target))
}
