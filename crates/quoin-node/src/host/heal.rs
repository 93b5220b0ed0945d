//! Healing of a staged volume: judged, healed once, judged again.
//!
//! First whatever comes back by itself is waited for: the attach process, which its supervisor starts again,
//! and the target. Then at most one repair is made, by the place of the damage: the publications are bound
//! again; or the file system is mounted anew, checked as before any mount; or the device too is made
//! anew. A record is written before each of these, as in staging, so that a kill after any step is
//! safe.
//!
//! Promises: nothing is discarded and no file system is made; nothing that a process uses is taken from
//! it, and no mount is taken away lazily; no process is ended; no volume is published to this host,
//! and no device is made for one that is not; devices of other hosts that share the volume are left
//! alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quoin_encryption::DataKey;
use tokio::time::Instant;

use super::health::{FaultKind, Standing, VolumeFault, turned_read_only};
use super::paths::{check_target, foreign};
use super::{NodeHost, Purpose, SOCKETS, StageRequest, is_of_device, publish};
use crate::attach::{hand_key, is_frozen, wait_for_socket};
use crate::error::{Error, Kind};
use crate::holders::{self, Use};
use crate::mountinfo::{self, Mount};
use crate::records::{Access, Publication, Record, Staging};
use crate::{device, mount};

/// Longest time of a heal, of all its waits together.
const HEAL_MAX: Duration = Duration::from_secs(30);
/// Longest wait for an attach process that its supervisor starts again, and for a key to be taken.
const PROCESS_MAX: Duration = Duration::from_secs(10);
/// Longest wait for a target.
const TARGET_MAX: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const NO_KEY: &str =
    "its target has no key of it; send the secret \"encryptionKey\" with this call";
/// Answers of the attach process and of the target that are waited for in one look.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Looks for a user, a tenth of a second apart: a program that was just started has the files of its
/// parent for a moment.
const USER_LOOKS: usize = 5;

/// A volume to be healed.
#[derive(Debug, Clone)]
pub struct HealRequest {
    pub volume: String,
    /// `None`: the controller does not answer, so no device can be made.
    pub standing: Option<Standing>,
    /// Key of an encrypted volume; in no record.
    pub key: Option<DataKey>,
}

/// State of a volume after a heal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Healed {
    /// The faults that are left, the worst first.
    pub faults: Vec<VolumeFault>,
    /// Steps that were made.
    pub did: Vec<&'static str>,
    /// Why no more was done, with the way out.
    pub why_not: Option<String>,
}

/// A repair that was not made, or not to its end.
pub(super) enum Stop {
    /// No fault of the host: in words, with the way out.
    Not(String),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl NodeHost {
    /// Heals a volume of this host as far as that is possible. `None`: it is not here.
    ///
    /// # Errors
    /// [`Error::WrongKey`], or if its record cannot be read. A heal that fails otherwise is told in the
    /// answer.
    pub async fn heal(&self, request: &HealRequest) -> Result<Option<Healed>, Error> {
        let standing = request.standing.as_ref();
        let judge = || self.health(&request.volume, None, None, standing);
        let Some(faults) = judge().await? else { return Ok(None) };
        if faults.is_empty() {
            return Ok(Some(Healed::default()));
        }
        let mut did = Vec::new();
        let healing = self.heal_steps(request, faults, &mut did);
        let healing = tokio::time::timeout(HEAL_MAX, healing);
        let outcome = self.steps.reported(&request.volume, "healing", healing).await;
        let why_not = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(Stop::Not(why))) => Some(why),
            Ok(Err(Stop::Failed(error))) if error.kind() == Kind::Unauthenticated => {
                return Err(error);
            }
            Ok(Err(Stop::Failed(error))) => Some(error.to_string()),
            Err(_) => Some(format!(
                "healing has not ended within {} s; call again, it goes on where it was",
                HEAL_MAX.as_secs()
            )),
        };
        let faults = judge().await?.unwrap_or_default();
        Ok(Some(Healed { faults, did, why_not }))
    }

    async fn heal_steps(
        &self,
        request: &HealRequest,
        faults: Vec<VolumeFault>,
        did: &mut Vec<&'static str>,
    ) -> Result<(), Stop> {
        let has = |kind| faults.iter().any(|fault: &VolumeFault| fault.kind == kind);
        // Neither is this host's to change.
        if has(FaultKind::BecameCopy) || has(FaultKind::NotPublishedHere) {
            return Err(Stop::Not("that is not this node's to change".to_owned()));
        }
        let volume = &request.volume;
        if has(FaultKind::AttachProcessAway) {
            self.step("waiting for the attach process")?;
            self.wait_for_attach_process(volume).await?;
            did.push("waited for the attach process");
        }
        let session = self.attacher.session(volume).await?;
        if session.device.is_some() && session.dead.is_none() {
            let waits_for_key = request.standing.as_ref().is_some_and(|one| one.waits_for_key);
            if let Some(key) = request.key.as_ref().filter(|_| waits_for_key) {
                self.step("handing the key to the target")?;
                self.hand(volume, key, PROCESS_MAX).await?;
                did.push("handed its key to the target");
            }
            if waits_for_key && request.key.is_none() {
                return Err(Stop::Not(NO_KEY.to_owned()));
            }
            if !self.answers(volume).await {
                self.step("waiting for the target")?;
                self.wait_for_target(volume).await?;
                did.push("waited for the target");
            }
        }
        self.repair(request, did).await
    }

    async fn wait_for_attach_process(&self, volume: &str) -> Result<(), Stop> {
        let until = Instant::now() + PROCESS_MAX;
        loop {
            let asked = tokio::time::timeout(ANSWER_MAX, self.attacher.session(volume)).await;
            match asked {
                Ok(Ok(_)) => return Ok(()),
                _ if Instant::now() < until => tokio::time::sleep(LOOK_EVERY).await,
                _ => {
                    let waited_s = PROCESS_MAX.as_secs();
                    return Err(Stop::Not(format!(
                        "the attach process is not back within {waited_s} s; start `quoin attach` \
                         on this node"
                    )));
                }
            }
        }
    }

    /// Returns whether IO of the volume's device gets to the target, as far as the session tells.
    async fn answers(&self, volume: &str) -> bool {
        let socket = self.nbd_socket(volume);
        let (session, is_frozen) = tokio::join!(
            tokio::time::timeout(ANSWER_MAX, self.attacher.session(volume)),
            is_frozen(&socket, ANSWER_MAX)
        );
        matches!(session, Ok(Ok(session)) if session.is_connected) && !is_frozen
    }

    async fn wait_for_target(&self, volume: &str) -> Result<(), Stop> {
        let until = Instant::now() + TARGET_MAX;
        while !self.answers(volume).await {
            if Instant::now() >= until {
                let waited_s = TARGET_MAX.as_secs();
                return Err(Stop::Not(format!(
                    "its target was waited for {waited_s} s, and its IO goes on by itself once the \
                     target is back; `quoin volume doctor` says what that waits for"
                )));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }

    async fn hand(&self, volume: &str, key: &DataKey, within: Duration) -> Result<(), Error> {
        let sockets = self.options.run_directory.join(SOCKETS);
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        hand_key(volume, &sockets, key, within_ms).await
    }

    /// Makes the one repair that the state of the volume asks for.
    async fn repair(&self, request: &HealRequest, did: &mut Vec<&'static str>) -> Result<(), Stop> {
        let volume = &request.volume;
        let Some(record) = self.records.load(volume)? else { return Ok(()) };
        let Some(staging) = record.staging.clone() else { return Ok(()) };
        let session = self.attacher.session(volume).await?;
        let device = session.device.filter(|_| session.dead.is_none());
        let is_dead = session.dead.is_some();
        let mounts = mountinfo::read()?;
        let is_shut_down = match staging.access {
            Access::Mount { .. } => self.is_shut_down(volume, &staging.path).await?,
            Access::Block => false,
        };
        let is_live = match (&staging.access, &device) {
            (_, None) => false,
            (Access::Block, Some(_)) => staging.complete,
            (Access::Mount { .. }, Some(device)) => {
                // A heal that was killed left its mount with the record of one that is not complete.
                mountinfo::at(&mounts, &staging.path)
                    .is_some_and(|present| is_of_device(present, device))
                    && !turned_read_only(&staging, &mounts)
                    && !is_shut_down
            }
        };
        if is_live && let Some(device) = &device {
            let record =
                if staging.complete { record } else { self.complete(volume)?.unwrap_or(record) };
            return self.bind_again(&record, &staging, device, did).await;
        }
        if device.is_none() {
            Self::may_make_device(request, &staging)?;
            // Nothing is taken away before a device can be made in its place.
            self.prepare_target(request).await?;
        }
        self.take_down(&record, &staging, device.as_deref(), did).await?;
        if is_dead {
            self.step("removing the dead device")?;
            self.attacher.detach(volume).await?;
        }
        let device = self.stage_again(request, &staging, device, did).await?;
        let record = self.records.load(volume)?.unwrap_or(record);
        self.bind_again(&record, &staging, &device, did).await
    }

    /// Checks that the controller wants a device of the volume on this host.
    fn may_make_device(request: &HealRequest, staging: &Staging) -> Result<(), Stop> {
        let Some(standing) = &request.standing else {
            return Err(Stop::Not(
                "its device has to be made anew, and the controller, which says for whom, does not \
                 answer; call again when it does"
                    .to_owned(),
            ));
        };
        if standing.replay_is_due && staging.access != Access::Block {
            return Err(Stop::Not(
                "the journal of its file system is to be replayed first; unstage and stage it"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Waits for a target that serves the volume, and hands its key to it.
    async fn prepare_target(&self, request: &HealRequest) -> Result<(), Stop> {
        let volume = &request.volume;
        self.step("waiting for the target")?;
        if let Some(key) = &request.key {
            self.hand(volume, key, PROCESS_MAX).await?;
        } else if request.standing.as_ref().is_some_and(|standing| standing.waits_for_key) {
            return Err(Stop::Not(NO_KEY.to_owned()));
        }
        let within_ms = u64::try_from(TARGET_MAX.as_millis()).unwrap_or(u64::MAX);
        wait_for_socket(volume, &self.nbd_socket(volume), within_ms).await?;
        Ok(())
    }

    /// Takes the mounts of the volume away, if no process uses them. What was taken away is put back where one
    /// of them is in use.
    pub(super) async fn take_down(
        &self,
        record: &Record,
        staging: &Staging,
        device: Option<&Path>,
        did: &mut Vec<&'static str>,
    ) -> Result<(), Stop> {
        let volume = &record.volume;
        self.step("asking who uses it")?;
        let mounts = mountinfo::read()?;
        let own = own_mounts(record, staging, device, &mounts)?;
        if let Some(user) = self.user(volume, staging, &own, device).await? {
            return Err(Stop::Not(in_use(&user)));
        }
        if own.is_empty() {
            return Ok(());
        }
        let unfinished = Staging { complete: false, ..staging.clone() };
        self.records.save(&Record { staging: Some(unfinished), ..record.clone() })?;
        self.step("unmounting")?;
        for (index, path) in own.iter().enumerate() {
            let Err(error) = self.unmount(volume, path).await else { continue };
            // The staging path comes last, so what was taken away can be bound to it again.
            self.put_back(record, staging, &own[..index]).await;
            self.records.save(record)?;
            return Err(match error {
                Error::Busy { path } => {
                    Stop::Not(in_use(&format!("a process at {}", path.display())))
                }
                other => Stop::Failed(other),
            });
        }
        did.push("unmounted it");
        Ok(())
    }

    /// Binds the staging path at targets again that were just unmounted.
    async fn put_back(&self, record: &Record, staging: &Staging, targets: &[PathBuf]) {
        let is_gone = |one: &&Publication| targets.contains(&one.target);
        for publication in record.publications.iter().filter(is_gone) {
            if publication.access == Access::Block {
                // Its device is gone: the node in /dev is bound anew by the next heal.
                continue;
            }
            let (from, to) = (staging.path.clone(), publication.target.clone());
            let read_only = publication.read_only;
            let bound = self.calls.change(&record.volume, "binding its target", move |thread| {
                mount::bind(thread, &from, &to)?;
                if read_only { mount::protect(thread, &to) } else { Ok(()) }
            });
            if let Err(error) = bound.await {
                let target = publication.target.display();
                tracing::error!(volume = record.volume, %target, %error, "cannot be put back");
            }
        }
    }

    /// Returns who uses the mounts, or the nodes of a block volume, in words.
    async fn user(
        &self,
        volume: &str,
        staging: &Staging,
        own: &[PathBuf],
        device: Option<&Path>,
    ) -> Result<Option<String>, Error> {
        let mounts = mountinfo::read()?;
        let mut searched = Vec::new();
        match &staging.access {
            Access::Mount { .. } => {
                let present = own.iter().filter_map(|path| mountinfo::at(&mounts, path));
                searched.extend(
                    present.map(|mount| Use::FileSystem { major: mount.major, minor: mount.minor }),
                );
            }
            Access::Block => {
                let nodes = own.iter().map(PathBuf::as_path).chain(device);
                let numbers = nodes.filter_map(device::major_minor);
                searched.extend(numbers.map(|(major, minor)| Use::Device { major, minor }));
            }
        }
        searched.dedup();
        for one in searched {
            let mut found = None;
            for look in 0..USER_LOOKS {
                if look > 0 {
                    tokio::time::sleep(LOOK_EVERY / 2).await;
                }
                let paths = own.to_vec();
                let looked = move |thread: &_| Ok(holders::user_of(thread, one, &paths));
                found = self.calls.look(volume, "asking who uses it", looked).await?;
                if found.is_none() {
                    break;
                }
            }
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Makes the device, where there is none, and mounts the file system; returns the device.
    async fn stage_again(
        &self,
        request: &HealRequest,
        staging: &Staging,
        device: Option<PathBuf>,
        did: &mut Vec<&'static str>,
    ) -> Result<PathBuf, Stop> {
        let volume = &request.volume;
        let standing = request.standing.clone().unwrap_or_default();
        let size_bytes = match &device {
            Some(device) => device::size_bytes(device)?,
            None => standing.size_bytes,
        };
        let wanted = StageRequest {
            volume: volume.clone(),
            staging_path: staging.path.clone(),
            access: staging.access.clone(),
            mode: staging.mode.clone(),
            read_only: staging.read_only,
            size_bytes,
            block_size: standing.block_size,
            key: request.key.clone(),
        };
        let device = match device {
            Some(device) => device,
            None => {
                let socket = self.nbd_socket(volume);
                self.step("attaching")?;
                let device = self.attach(&wanted, socket).await?;
                did.push("made its device anew");
                device
            }
        };
        if !wanted.read_only {
            self.set_writable(volume, &device).await?;
        }
        if let Access::Mount { .. } = staging.access {
            self.step("mounting")?;
            self.mount_again(&wanted, &device, did).await?;
            did.push("checked and mounted its file system");
        }
        self.step("completing the record")?;
        self.complete(volume)?;
        Ok(device)
    }

    /// Records that staging is complete; returns the record.
    fn complete(&self, volume: &str) -> Result<Option<Record>, Error> {
        let Some(mut record) = self.records.load(volume)? else { return Ok(None) };
        if let Some(staging) = &mut record.staging {
            staging.complete = true;
        }
        self.records.save(&record)?;
        self.troubles.mended(volume, FaultKind::StagingFailed);
        Ok(Some(record))
    }

    /// Mounts the file system at the staging path; one that needs a person to repair it is mounted
    /// read-only, so that it can be read as before.
    async fn mount_again(
        &self,
        wanted: &StageRequest,
        device: &Path,
        did: &mut Vec<&'static str>,
    ) -> Result<(), Stop> {
        let path = &wanted.staging_path;
        let mounted = self.mount_staging(wanted, Purpose::Heal, device, path, None).await;
        let Err(damaged @ Error::Damaged { .. }) = mounted else { return Ok(mounted?) };
        let readable = StageRequest { read_only: true, ..wanted.clone() };
        let mounted = self.mount_staging(&readable, Purpose::Heal, device, path, None).await;
        if let Err(error) = mounted {
            let volume = &wanted.volume;
            tracing::warn!(volume, %error, "a damaged file system cannot be read either");
            return Err(Stop::Failed(damaged));
        }
        if let Some(record) = self.complete(&wanted.volume)?
            && let Some(staging) = record.staging.clone()
        {
            self.bind_again(&record, &staging, device, did).await?;
        }
        Err(Stop::Failed(damaged))
    }

    /// Binds the publications of the record that the kernel does not show.
    async fn bind_again(
        &self,
        record: &Record,
        staging: &Staging,
        device: &Path,
        did: &mut Vec<&'static str>,
    ) -> Result<(), Stop> {
        let volume = &record.volume;
        for publication in &record.publications {
            let mounts = mountinfo::read()?;
            if publish::is_in_place(publication, Some(device), &mounts) {
                self.restrict(volume, staging, publication, device).await?;
                continue;
            }
            if let Some(present) = mountinfo::at(&mounts, &publication.target) {
                if !is_own(present, &publication.access, Some(device)) {
                    return Err(Stop::Failed(foreign(present)));
                }
                let stale = [publication.target.clone()];
                if let Some(user) = self.user(volume, staging, &stale, None).await? {
                    return Err(Stop::Not(in_use(&user)));
                }
                self.step("unmounting a stale target")?;
                self.unmount(volume, &publication.target).await.map_err(|error| match error {
                    Error::Busy { path } => {
                        Stop::Not(in_use(&format!("a process at {}", path.display())))
                    }
                    other => Stop::Failed(other),
                })?;
            }
            check_target(&publication.target, &publication.access, &mountinfo::read()?)?;
            self.bind_publication(volume, staging, publication, device).await?;
            did.push("bound it to its target again");
            self.troubles.mended(volume, FaultKind::PublishingFailed);
        }
        Ok(())
    }
}

/// Returns the paths at which mounts of the volume are to be taken away: its targets, the staging path
/// last.
///
/// # Errors
/// [`Error::ForeignMount`] where another mount is at one of them.
fn own_mounts(
    record: &Record,
    staging: &Staging,
    device: Option<&Path>,
    mounts: &[Mount],
) -> Result<Vec<PathBuf>, Error> {
    let targets = record.publications.iter().map(|one| (&one.target, &one.access));
    let staged = match &staging.access {
        Access::Mount { .. } => Some((&staging.path, &staging.access)),
        Access::Block => None,
    };
    let mut own = Vec::new();
    for (path, access) in targets.chain(staged) {
        for present in mounts.iter().filter(|mount| mount.mount_point == *path) {
            if !is_own(present, access, device) {
                return Err(foreign(present));
            }
            own.push(path.clone());
        }
    }
    Ok(own)
}

/// Returns whether a mount at a recorded path is of the kind that was recorded: of the device, or of a device that
/// the attach process may have made, as the former one may be gone and its number another's by now. Nothing is asked
/// of the mount itself, whose server may be away.
pub(super) fn is_own(present: &Mount, access: &Access, device: Option<&Path>) -> bool {
    match access {
        Access::Mount { file_system, .. } => {
            let is_made_here = device.is_some_and(|device| is_of_device(present, device))
                || present.source.starts_with("/dev/loop");
            present.fs_type == file_system.name() && is_made_here
        }
        Access::Block => device::is_of_nodes(present),
    }
}

fn in_use(user: &str) -> String {
    format!(
        "{user}, and nothing is taken from a process; restart the workload that uses it, and call \
         again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FileSystem;

    fn mounted() -> Access {
        Access::Mount { file_system: FileSystem::Xfs, flags: Vec::new() }
    }

    fn staging(access: Access) -> Staging {
        Staging {
            path: "/stage".into(),
            access,
            mode: "SINGLE_NODE_WRITER".into(),
            read_only: false,
            complete: true,
        }
    }

    #[test]
    fn a_device_is_made_for_whom_the_controller_has_it_and_not_before_a_replay() {
        let may = |standing: Option<Standing>, access: Access| {
            let request = HealRequest { volume: "v".into(), standing, key: None };
            match NodeHost::may_make_device(&request, &staging(access)) {
                Ok(()) => None,
                Err(Stop::Not(why)) => Some(why),
                Err(Stop::Failed(error)) => panic!("{error}"),
            }
        };
        let standing = |replay_is_due| {
            Some(Standing { is_published: true, replay_is_due, ..Standing::default() })
        };
        for access in [mounted(), Access::Block] {
            assert_eq!(may(standing(false), access.clone()), None);
            assert!(may(None, access).unwrap().contains("controller"));
        }
        assert!(may(standing(true), mounted()).unwrap().contains("journal"));
        assert_eq!(may(standing(true), Access::Block), None, "it has no journal");
    }

    #[test]
    fn mounts_are_taken_away_from_the_last_to_the_first_and_none_of_another() {
        let mount = |at: &str, fs_type: &str, source: &str| Mount {
            id: 2,
            parent: 1,
            major: 7,
            minor: 4095,
            root: "/".into(),
            mount_point: at.into(),
            peer_group: None,
            masters: Vec::new(),
            options: Vec::new(),
            fs_type: fs_type.into(),
            source: source.into(),
            super_options: Vec::new(),
        };
        let publication = |target: &str| Publication {
            target: target.into(),
            access: mounted(),
            mode: String::new(),
            read_only: false,
        };
        let record = Record {
            publications: vec![publication("/pods/a"), publication("/pods/b")],
            ..Record::new("v")
        };
        let of = |mounts: &[Mount]| own_mounts(&record, &staging(mounted()), None, mounts);
        let loops = |at: &str| mount(at, "xfs", "/dev/loop7");
        let (stage, a, b) = (loops("/stage"), loops("/pods/a"), loops("/pods/b"));
        let paths = |mounts: &[Mount]| {
            let found = of(mounts).unwrap().into_iter();
            found.map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(paths(&[stage.clone(), a.clone(), b.clone()]), ["/pods/a", "/pods/b", "/stage"]);
        // One above the other: both go.
        assert_eq!(paths(&[stage.clone(), a.clone(), a.clone()]), ["/pods/a", "/pods/a", "/stage"]);
        assert_eq!(paths(&[]), [""; 0]);
        assert_eq!(paths(&[loops("/elsewhere")]), [""; 0]);
        for foreign in [
            mount("/stage", "ext4", "/dev/loop7"),
            mount("/pods/b", "xfs", "/dev/sda1"),
            mount("/pods/a", "tmpfs", "none"),
        ] {
            let refused = of(&[stage.clone(), a.clone(), foreign.clone()]).unwrap_err();
            assert!(matches!(refused, Error::ForeignMount { .. }), "{foreign:?}");
        }
    }
}
