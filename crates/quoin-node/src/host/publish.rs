//! Publication: a staged volume at the paths that workloads see.

use std::path::{Path, PathBuf};

use super::heal::is_own;
use super::paths::{check_target, foreign, make_target, remove_target, resolve};
use super::volume_stats::staged_read_only;
use super::{FaultKind, NodeHost, is_of_device};
use crate::error::Error;
use crate::mountinfo::{self, Mount};
use crate::records::{Access, Publication, Record, Staging};
use crate::{device, group, mount};

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
        let publishing = self.publish_steps(request);
        let outcome = self.steps.reported(&request.volume, "publishing", publishing).await;
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
                // The call before may have ended between two steps.
                self.restrict(volume, &staging, &wanted, &device).await?;
                return self.give_to_group(request, &staging, &target).await;
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
        record.publications.push(wanted.clone());
        self.step("writing the record")?;
        self.records.save(&record)?;
        self.bind_publication(volume, &staging, &wanted, &device).await?;
        self.step("giving it to its group")?;
        self.give_to_group(request, &staging, &target).await
    }

    /// Makes the target, and binds the staging path or the device to it.
    pub(super) async fn bind_publication(
        &self,
        volume: &str,
        staging: &Staging,
        publication: &Publication,
        device: &Path,
    ) -> Result<(), Error> {
        let Publication { target, access, .. } = publication.clone();
        self.step("making the target")?;
        make_target(&target, &access)?;
        self.step("binding")?;
        let is_block = access == Access::Block;
        let source = if is_block { device.to_owned() } else { staging.path.clone() };
        if is_block {
            self.switch_device(volume, staging, publication, device).await?;
            self.step("binding the device")?;
        }
        self.calls
            .change(volume, "binding its target", move |thread| {
                mount::bind(thread, &source, &target)
            })
            .await?;
        self.step("restricting the target")?;
        self.restrict(volume, staging, publication, device).await
    }

    /// Makes what is in place at a target as read-only as it is meant to be. A call that ended half-way leaves
    /// a target that takes writes.
    pub(super) async fn restrict(
        &self,
        volume: &str,
        staging: &Staging,
        publication: &Publication,
        device: &Path,
    ) -> Result<(), Error> {
        if publication.access == Access::Block {
            self.switch_device(volume, staging, publication, device).await?;
        }
        if is_restricted(publication, &mountinfo::read()?) {
            return Ok(());
        }
        let target = publication.target.clone();
        self.calls
            .change(volume, "restricting its target", move |thread| mount::protect(thread, &target))
            .await
    }

    /// Sets the switch of a block volume's device, which is one for all of its targets.
    async fn switch_device(
        &self,
        volume: &str,
        staging: &Staging,
        publication: &Publication,
        device: &Path,
    ) -> Result<(), Error> {
        let read_only = publication.read_only || staging.read_only;
        let device = device.to_owned();
        self.calls
            .change(volume, "setting the switch of its device", move |thread| {
                device::set_read_only(thread, &device, read_only)
            })
            .await
    }

    /// Gives the root directory of a writable file system to the group that the request names.
    async fn give_to_group(
        &self,
        request: &PublishRequest,
        staging: &Staging,
        target: &Path,
    ) -> Result<(), Error> {
        let is_mount = matches!(request.access, Access::Mount { .. });
        let Some(group) = request.group.filter(|_| is_mount) else { return Ok(()) };
        if request.read_only || staging.read_only || staged_read_only(&staging.access) {
            return Ok(());
        }
        let target = target.to_owned();
        self.calls
            .change(&request.volume, "giving it to its group", move |thread| {
                group::give(thread, &target, group)
            })
            .await
    }

    /// Undoes a publication. True if anything of it was found and removed.
    ///
    /// # Errors
    /// [`Error::Busy`] while a workload holds it, or what else prevented it.
    pub async fn unpublish(&self, volume: &str, target: &Path) -> Result<bool, Error> {
        let unpublishing = self.unpublish_steps(volume, target);
        self.steps.reported(volume, "unpublishing", unpublishing).await
    }

    async fn unpublish_steps(&self, volume: &str, target: &Path) -> Result<bool, Error> {
        let target = resolve(target);
        let record = self.records.load(volume)?;
        let device = self.attacher.device(volume).await?;
        let publications = record.as_ref().map_or(&[][..], |record| &record.publications);
        let recorded = publications.iter().find(|one| one.target == target).cloned();
        let mut removed = recorded.is_some();
        self.step("unmounting")?;
        loop {
            let mounts = mountinfo::read()?;
            let Some(present) = mountinfo::at(&mounts, &target) else { break };
            let is_of = |device: &PathBuf| {
                is_of_device(present, device) || device::is_node_at(present, device)
            };
            // Its device may be another one by now.
            let was_made_here = |one: &Publication| is_own(present, &one.access, device.as_deref());
            if !device.as_ref().is_some_and(is_of) && !recorded.as_ref().is_some_and(was_made_here)
            {
                // A mount of another owner is never removed, nor is it passed over where the volume's own
                // may be beneath it.
                return if recorded.is_some() { Err(foreign(present)) } else { Ok(removed) };
            }
            self.unmount(volume, &target).await?;
            removed = true;
        }
        self.step("removing the target")?;
        // A path that no record names and where nothing was mounted is another's.
        if removed {
            remove_target(&target)?;
        }
        self.step("removing the record")?;
        if let Some(mut record) = record
            && recorded.is_some()
        {
            record.publications.retain(|one| one.target != target);
            self.records.save(&record)?;
        }
        Ok(removed)
    }

    /// Checks that the records have the volume staged or published at exactly this path.
    ///
    /// # Errors
    /// [`Error::NotPresent`] if it is not, or its record cannot be read.
    pub fn check_place(&self, volume: &str, path: &Path) -> Result<(), Error> {
        self.path_use(volume, path).map(drop)
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

/// Returns whether the target takes no writes, where it is to take none.
pub(super) fn is_restricted(publication: &Publication, mounts: &[Mount]) -> bool {
    let is_read_only = |mount: &Mount| mount.options.iter().any(|option| option == "ro");
    !publication.read_only || mountinfo::at(mounts, &publication.target).is_none_or(is_read_only)
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
    mountinfo::at(mounts, &publication.target)
        .is_some_and(|present| is_published(publication, device, present))
}

/// Returns whether the volume is at the publication's target, though another mount may be above it.
pub(super) fn is_at_target(
    publication: &Publication,
    device: Option<&Path>,
    mounts: &[Mount],
) -> bool {
    let mut there = mounts.iter().filter(|mount| mount.mount_point == publication.target);
    there.any(|present| {
        is_published(publication, device, present)
            || device.is_some_and(|device| device::is_named_node(present, device))
    })
}

fn is_published(publication: &Publication, device: Option<&Path>, present: &Mount) -> bool {
    match (&publication.access, device) {
        // A mount at a recorded target counts while the device is unknown: refusing to unstage is
        // safer than unmounting a workload's data.
        (_, None) => true,
        (Access::Mount { .. }, Some(device)) => is_of_device(present, device),
        (Access::Block, Some(device)) => device::is_node_at(present, device),
    }
}
