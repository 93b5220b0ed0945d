//! Faults of a volume on this host: one judgement for CSI's health, conditions and stats.
//!
//! It looks at the record, at the device and its session as the attach process has them, at whether
//! the target answers, at the mounts as the kernel has them, at the last failure of staging or
//! publishing, and at what the controller says of the volume's use here, where it is known. It changes
//! nothing, and it ends within two seconds: what hangs is given up after a moment and is itself a
//! finding.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::volume_stats::staged_read_only;
use super::{NodeHost, is_of_device, publish};
use crate::attach::{Session, is_frozen};
use crate::error::{Error, Kind};
use crate::mount;
use crate::mountinfo::{self, Mount};
use crate::records::{Access, Record, Staging};

/// Time for an answer of the attach process.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Failed volumes that are remembered.
const FAILURES_MAX: usize = 1024;

/// A kind of finding, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    NotPublishedHere,
    BecameCopy,
    StagingFailed,
    PublishingFailed,
    AttachProcessAway,
    DeviceMissing,
    DeviceDead,
    KeyMissing,
    SessionLost,
    MountMissing,
    MountHangs,
    FileSystemStopped,
    TurnedReadOnly,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: &[Self] = &[
        Self::NotPublishedHere,
        Self::BecameCopy,
        Self::StagingFailed,
        Self::PublishingFailed,
        Self::AttachProcessAway,
        Self::DeviceMissing,
        Self::DeviceDead,
        Self::KeyMissing,
        Self::SessionLost,
        Self::MountMissing,
        Self::MountHangs,
        Self::FileSystemStopped,
        Self::TurnedReadOnly,
    ];

    /// Returns the reason in CamelCase.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotPublishedHere => "NotPublishedHere",
            Self::BecameCopy => "BecameCopy",
            Self::StagingFailed => "StagingFailed",
            Self::PublishingFailed => "PublishingFailed",
            Self::AttachProcessAway => "AttachProcessAway",
            Self::DeviceMissing => "DeviceMissing",
            Self::DeviceDead => "DeviceDead",
            Self::KeyMissing => "KeyMissing",
            Self::SessionLost => "SessionLost",
            Self::MountMissing => "MountMissing",
            Self::MountHangs => "MountHangs",
            Self::FileSystemStopped => "FileSystemStopped",
            Self::TurnedReadOnly => "TurnedReadOnly",
        }
    }

    /// Returns whether reads still work.
    #[must_use]
    pub fn is_degraded(self) -> bool {
        self == Self::TurnedReadOnly
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeFault {
    pub kind: FaultKind,
    pub message: String,
}

/// Word of the controller on the use of a volume on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// The volume is published to this host.
    pub is_published: bool,
    /// Its role in a mirror, where it is a copy of another cluster's volume.
    pub copy: Option<String>,
    /// Its target has no key of it.
    pub waits_for_key: bool,
    /// Another host is to replay the journal of its file system first, or this one was late with that.
    pub replay_is_due: bool,
    pub size_bytes: u64,
    pub block_size: u32,
}

/// Failures of steps.
#[derive(Default)]
pub(super) struct Troubles {
    failures: Mutex<BTreeMap<String, VolumeFault>>,
}

impl Troubles {
    fn failures(&self) -> MutexGuard<'_, BTreeMap<String, VolumeFault>> {
        self.failures.lock().expect("no holder of this lock panics")
    }

    /// Takes in how a step ended.
    pub fn ended(&self, volume: &str, kind: FaultKind, outcome: Result<(), &Error>) {
        let mut failures = self.failures();
        match outcome {
            Ok(()) => {
                failures.remove(volume);
            }
            // The caller's mistake: the volume is as it was.
            Err(error) if !error.is_fault() => {}
            Err(error) if failures.len() < FAILURES_MAX || failures.contains_key(volume) => {
                let message = error.to_string();
                failures.insert(volume.to_owned(), VolumeFault { kind, message });
            }
            Err(_) => {}
        }
    }

    /// A failure of this kind was mended; one of another kind stays.
    pub fn mended(&self, volume: &str, kind: FaultKind) {
        let mut failures = self.failures();
        if failures.get(volume).is_some_and(|failure| failure.kind == kind) {
            failures.remove(volume);
        }
    }

    pub fn forget(&self, volume: &str) {
        self.failures().remove(volume);
    }

    fn of(&self, volume: &str) -> Option<VolumeFault> {
        self.failures().get(volume).cloned()
    }
}

impl NodeHost {
    /// Judges a volume of this host; `None`: it is not here, and nothing of it has failed here. The
    /// paths are those at which the caller expects it, where it expects any; `standing` is `None` where
    /// the controller does not answer or was not asked.
    ///
    /// # Errors
    /// If its record cannot be read.
    pub async fn health(
        &self,
        volume: &str,
        staging_path: Option<&Path>,
        target: Option<&Path>,
        standing: Option<&Standing>,
    ) -> Result<Option<Vec<VolumeFault>>, Error> {
        let failure = self.troubles.of(volume);
        let record = self.records.load(volume)?;
        let Some((record, staging)) =
            record.and_then(|record| Some((record.clone(), record.staging?)))
        else {
            return Ok(failure.map(|failure| vec![failure]));
        };
        let mut faults: Vec<VolumeFault> = failure.into_iter().collect();
        let mut say = |kind, message| faults.push(VolumeFault { kind, message });
        if let Some(standing) = standing {
            say_standing(standing, &mut say);
        }
        if !staging.complete {
            say(
                FaultKind::StagingFailed,
                format!("staging at {} is not complete", staging.path.display()),
            );
        } else {
            let measured = async {
                match staging.access {
                    Access::Mount { .. } => {
                        self.measure(volume, &staging.path).await?;
                        self.is_shut_down(volume, &staging.path).await
                    }
                    Access::Block => Ok(false),
                }
            };
            let socket = self.nbd_socket(volume);
            // At once, so that all of it takes no longer than the slowest.
            let (session, is_frozen, measured) = tokio::join!(
                tokio::time::timeout(ANSWER_MAX, self.attacher.session(volume)),
                is_frozen(&socket, ANSWER_MAX),
                measured
            );
            match session {
                Ok(Ok(session)) => {
                    let waits_for_key = standing.is_some_and(|standing| standing.waits_for_key);
                    say_session(&session, is_frozen, waits_for_key, &mut say);
                    let mounts = mountinfo::read()?;
                    say_mounts(&record, &staging, session.device.as_deref(), &mounts, &mut say);
                    let paths = [(staging_path, Some(&staging.path)), (target, None)].into_iter();
                    for (expected, staged) in paths {
                        let Some(expected) = expected.map(super::paths::resolve) else { continue };
                        let is_there = staged == Some(&expected)
                            || record.publications.iter().any(|one| one.target == expected);
                        if !is_there {
                            let path = expected.display();
                            say(FaultKind::MountMissing, format!("it is not at {path}"));
                        }
                    }
                }
                Ok(Err(error)) => say(FaultKind::AttachProcessAway, error.to_string()),
                Err(_) => say(
                    FaultKind::AttachProcessAway,
                    format!("the attach process did not answer within {ANSWER_MAX:?}"),
                ),
            }
            match measured {
                Ok(true) => say(
                    FaultKind::FileSystemStopped,
                    format!(
                        "the kernel shut the file system at {} down after an error; see the kernel log",
                        staging.path.display()
                    ),
                ),
                Err(error) if error.kind() == Kind::Unavailable => {
                    say(FaultKind::MountHangs, error.to_string());
                }
                Ok(false) | Err(_) => {}
            }
        }
        Ok(Some(joined(faults)))
    }

    /// Returns whether a file system fails all that it is asked. No flag of its mount says so of an XFS whose
    /// journal was aborted.
    ///
    /// # Errors
    /// [`Error::Waiting`] if it does not answer.
    pub(super) async fn is_shut_down(&self, volume: &str, path: &Path) -> Result<bool, Error> {
        let asked = path.to_owned();
        let looked = move |thread: &_| Ok(mount::is_shut_down(thread, &asked));
        self.calls.look(volume, "looking at its file system", looked).await
    }

    /// Asks a file system for its figures.
    ///
    /// # Errors
    /// [`Error::Waiting`] if it does not answer, or its own error.
    pub(super) async fn measure(&self, volume: &str, path: &Path) -> Result<mount::Figures, Error> {
        let asked = path.to_owned();
        self.calls
            .look(volume, "measuring its file system", move |thread| mount::measure(thread, &asked))
            .await
    }
}

fn say_standing(standing: &Standing, say: &mut impl FnMut(FaultKind, String)) {
    if let Some(role) = &standing.copy {
        let message = format!(
            "it is a copy of another cluster's volume now ({role}): use it there, or promote this one"
        );
        say(FaultKind::BecameCopy, message);
    }
    if !standing.is_published {
        let message = "it is not published to this node any more: its orchestrator publishes it \
                       again, or unpublishes and unstages it here";
        say(FaultKind::NotPublishedHere, message.to_owned());
    }
}

fn say_session(
    session: &Session,
    is_frozen: bool,
    waits_for_key: bool,
    say: &mut impl FnMut(FaultKind, String),
) {
    match &session.device {
        None => say(FaultKind::DeviceMissing, "its block device is gone".to_owned()),
        Some(_) if !session.is_connected && waits_for_key => say(
            FaultKind::KeyMissing,
            "its target has no key of it, so its IO waits; send the secret \"encryptionKey\" with \
             this call, or stage it again with it"
                .to_owned(),
        ),
        Some(device) if !session.is_connected => say(
            FaultKind::SessionLost,
            format!("{} has no session with the target; its IO waits", device.display()),
        ),
        Some(device) if is_frozen => say(
            FaultKind::SessionLost,
            format!(
                "the target of {} takes connections and does not answer; its IO waits",
                device.display()
            ),
        ),
        Some(_) => {}
    }
    if let Some(why) = &session.dead {
        say(FaultKind::DeviceDead, why.clone());
    }
}

fn say_mounts(
    record: &Record,
    staging: &Staging,
    device: Option<&Path>,
    mounts: &[Mount],
    say: &mut impl FnMut(FaultKind, String),
) {
    let path = staging.path.display();
    if let (Access::Mount { .. }, Some(device)) = (&staging.access, device) {
        let mount =
            mountinfo::at(mounts, &staging.path).filter(|mount| is_of_device(mount, device));
        match mount {
            None => say(FaultKind::MountMissing, format!("its mount at {path} is gone")),
            // The kernel makes a file system read-only on errors.
            Some(_) if turned_read_only(staging, mounts) => say(
                FaultKind::TurnedReadOnly,
                format!(
                    "the file system at {path} has become read-only after an error; see the kernel \
                     log"
                ),
            ),
            Some(_) => {}
        }
    }
    for publication in &record.publications {
        if !publish::is_in_place(publication, device, mounts) {
            let target = publication.target.display();
            say(FaultKind::MountMissing, format!("its mount at {target} is gone"));
        } else if !publish::is_restricted(publication, mounts) {
            let target = publication.target.display();
            let message = format!("its mount at {target} takes writes, and is to be read-only");
            say(FaultKind::MountMissing, message);
        }
    }
}

/// Returns whether the file system that is mounted at the staging path takes no writes, and was to take
/// them.
pub(super) fn turned_read_only(staging: &Staging, mounts: &[Mount]) -> bool {
    let was_to = !staging.read_only && !staged_read_only(&staging.access);
    was_to && mountinfo::at(mounts, &staging.path).is_some_and(is_stopped)
}

/// Returns whether a file system takes no writes. Newer kernels leave an ext4 writable by its flags after
/// an error, and say so in words of their own.
pub(super) fn is_stopped(mount: &Mount) -> bool {
    const WORDS: [&str; 3] = ["ro", "emergency_ro", "shutdown"];
    mount.super_options.iter().any(|option| WORDS.contains(&option.as_str()))
}

/// Joins the findings of a kind; the worst kind first.
fn joined(faults: Vec<VolumeFault>) -> Vec<VolumeFault> {
    let mut by_kind: BTreeMap<FaultKind, Vec<String>> = BTreeMap::new();
    for VolumeFault { kind, message } in faults {
        let messages = by_kind.entry(kind).or_default();
        if !messages.contains(&message) {
            messages.push(message);
        }
    }
    let fault = |(kind, messages): (FaultKind, Vec<String>)| VolumeFault {
        kind,
        message: messages.join("; "),
    };
    by_kind.into_iter().map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_is_a_finding_until_it_succeeds_and_a_callers_mistake_is_none() {
        let troubles = Troubles::default();
        let failed = Error::Attach("no device".to_owned());
        troubles.ended("v", FaultKind::StagingFailed, Err(&failed));
        let found = troubles.of("v").unwrap();
        assert_eq!((found.kind, found.message.as_str()), (FaultKind::StagingFailed, "no device"));
        let mistake = Error::NotStaged { volume: "w".into(), path: "/x".into() };
        troubles.ended("w", FaultKind::PublishingFailed, Err(&mistake));
        assert_eq!(troubles.of("w"), None);
        troubles.ended("v", FaultKind::StagingFailed, Ok(()));
        assert_eq!(troubles.of("v"), None);
        for n in 0..2 * FAILURES_MAX {
            troubles.ended(&n.to_string(), FaultKind::StagingFailed, Err(&failed));
        }
        assert_eq!(troubles.failures().len(), FAILURES_MAX);
    }

    #[test]
    fn findings_of_one_kind_are_one_and_none_hides_another() {
        let fault = |kind, message: &str| VolumeFault { kind, message: message.to_owned() };
        let faults = joined(vec![
            fault(FaultKind::MountMissing, "a"),
            fault(FaultKind::DeviceMissing, "gone"),
            fault(FaultKind::MountMissing, "b"),
            fault(FaultKind::MountMissing, "a"),
        ]);
        assert_eq!(
            faults,
            [fault(FaultKind::DeviceMissing, "gone"), fault(FaultKind::MountMissing, "a; b")]
        );
    }

    #[test]
    fn a_device_without_its_session_and_a_dead_one_are_findings() {
        let mut found = Vec::new();
        let session = Session {
            device: Some("/dev/loop7".into()),
            is_connected: false,
            dead: Some("served by h2".into()),
        };
        say_session(&session, false, false, &mut |kind, message| found.push((kind, message)));
        let kinds: Vec<_> = found.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [FaultKind::SessionLost, FaultKind::DeviceDead]);
        assert!(found[0].1.contains("/dev/loop7"));
    }

    #[test]
    fn a_target_that_does_not_answer_is_a_finding_and_one_without_its_key_another() {
        let kinds = |session: Session, is_frozen, waits_for_key| {
            let mut found = Vec::new();
            say_session(&session, is_frozen, waits_for_key, &mut |kind, _| found.push(kind));
            found
        };
        let session =
            |is_connected| Session { device: Some("/dev/loop7".into()), is_connected, dead: None };
        assert_eq!(kinds(session(true), true, false), [FaultKind::SessionLost]);
        assert_eq!(kinds(session(true), false, true), [], "the attach process has handed it");
        assert_eq!(kinds(session(false), false, true), [FaultKind::KeyMissing]);
        let none = Session::default();
        assert_eq!(kinds(none, true, true), [FaultKind::DeviceMissing]);
    }

    #[test]
    fn what_the_controller_says_of_the_use_here_is_a_finding() {
        let kinds = |standing: &Standing| {
            let mut found = Vec::new();
            say_standing(standing, &mut |kind, _| found.push(kind));
            found
        };
        let used = Standing { is_published: true, ..Standing::default() };
        assert_eq!(kinds(&used), []);
        assert_eq!(kinds(&Standing::default()), [FaultKind::NotPublishedHere]);
        let copy = Standing { copy: Some("secondary".into()), ..used };
        assert_eq!(kinds(&copy), [FaultKind::BecameCopy]);
    }
}
