//! Remains here of volumes that the records have on this host no more: mounts of an orchestrator that never
//! came back for them.

use std::path::{Path, PathBuf};

use super::NodeHost;
use super::heal::{Stop, is_own};
use super::paths::remove_target;
use crate::device;
use crate::error::Error;
use crate::mountinfo::{self, Mount};
use crate::reconcile::{Kind, Piece};
use crate::records::{Access, Record};

impl NodeHost {
    /// Returns the mounts at paths of the records.
    ///
    /// # Errors
    /// If the directory of the records cannot be read. A record that cannot be read names nothing.
    pub(crate) fn staged_pieces(&self, mounts: &[Mount]) -> Result<Vec<Piece>, Error> {
        let mut pieces = Vec::new();
        for volume in self.records.volumes()? {
            let Ok(Some(record)) = self.records.load(&volume) else { continue };
            let present = places(&record).into_iter().filter(|(path, access)| {
                mountinfo::at(mounts, path).is_some_and(|mount| is_left(mount, access, &volume))
            });
            pieces.extend(present.map(|(path, _)| Piece {
                volume: volume.clone(),
                kind: Kind::Staged,
                path,
                is_used: false,
            }));
        }
        Ok(pieces)
    }

    /// Takes away what is mounted here of a volume, and its device, where that works no more. Nothing is
    /// taken from a process, and the record of a staging that was completed stays: its orchestrator may yet
    /// unstage it. Returns why something stays.
    ///
    /// # Errors
    /// As [`Self::unstage`].
    pub async fn take_down_left(&self, volume: &str) -> Result<Option<String>, Error> {
        let taking = self.take_down_left_steps(volume);
        self.steps.reported(volume, "taking down", taking).await
    }

    async fn take_down_left_steps(&self, volume: &str) -> Result<Option<String>, Error> {
        let Some(record) = self.records.load(volume)? else { return Ok(None) };
        let Some(staging) = record.staging.clone() else { return Ok(None) };
        let session = self.attacher.session(volume).await?;
        if session.device.is_some() && session.dead.is_none() {
            // It was attached again meanwhile.
            return Ok(None);
        }
        let mounts = mountinfo::read()?;
        let is_foreign = |(path, access): &(PathBuf, Access)| {
            mountinfo::at(&mounts, path).is_some_and(|mount| !is_left(mount, access, volume))
        };
        if places(&record).iter().any(is_foreign) {
            return Ok(None);
        }
        let mut did = Vec::new();
        match self.take_down(&record, &staging, session.device.as_deref(), &mut did).await {
            Ok(()) => {}
            Err(Stop::Not(why)) => return Ok(Some(why)),
            Err(Stop::Failed(error)) => return Err(error),
        }
        for publication in &record.publications {
            remove_target(&publication.target)?;
        }
        self.step("detaching")?;
        self.attacher.detach(volume).await?;
        self.step("removing the record")?;
        if !staging.complete && record.publications.is_empty() {
            self.records.save(&Record::new(volume))?;
        }
        tracing::warn!(volume, "not attached to this host any more: its mounts are taken away");
        Ok(None)
    }
}

/// Returns the paths at which a record has mounts.
fn places(record: &Record) -> Vec<(PathBuf, Access)> {
    let targets = record.publications.iter().map(|one| (one.target.clone(), one.access.clone()));
    let staged = record.staging.iter().filter(|staging| staging.access != Access::Block);
    targets.chain(staged.map(|one| (one.path.clone(), one.access.clone()))).collect()
}

/// Returns whether a mount at a recorded path is the one that was made there: its device is bound to the
/// volume's file, or to none any more. A number that another program has by now is its own.
fn is_left(mount: &Mount, access: &Access, volume: &str) -> bool {
    let is_bound_to_another = || {
        let Some(file) = device::backing_file(mount.major, mount.minor) else { return false };
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // A file whose own mount has gone has no path any more.
        file != Path::new("/") && !name.starts_with(volume)
    };
    is_own(mount, access, None) && (*access == Access::Block || !is_bound_to_another())
}
