//! Changes of a volume's options, and of how many replicas it is to have, in one update of its
//! record: all of a request takes effect, or nothing.
//!
//! The record changes first. The target that has the volume receives the new options with its
//! assignment, and with the grant of any later epoch; it reports the version of those that rule all
//! its IO. Until that report, [`Modifications::wait`] has not seen the change in force, and says
//! what it waits for. A change that was cut off in between is completed by its repeat.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{VolumeRef, VolumeSpec};
use quoin_api::volume::VolumeOption;
use quoin_cluster::records::{VolumePhase, VolumeRecord};
use tokio::time::Instant;

use crate::Error;
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::volume::declare::Said;
use crate::volume::scale::{self, Scale};
use crate::volume::spec::{REPLICAS_HARD_MAX, check_replicas};

/// Time that one request waits for the target.
const IN_FORCE_MAX: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Changes of volumes that exist.
pub struct Modifications {
    state: Arc<State>,
}

impl Modifications {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Changes the record, or with `dry_run` nothing. Returns each change in words.
    pub async fn modify(
        &self,
        reference: Option<&VolumeRef>,
        asked: &VolumeSpec,
        dry_run: bool,
    ) -> Result<(Arc<VolumeRecord>, Vec<String>), Error> {
        let _one_at_a_time = self.state.creating.lock().await;
        let found = self.state.volume(reference)?;
        let known = found.membership.drf.into();
        if asked.replicas > known {
            check_replicas("replicas", asked.replicas, self.state.settings.replicas_max)?;
        }
        let candidates = crate::volume::volumes::candidates(&self.state);
        let change = |volume: &mut VolumeRecord| {
            check_ready(volume)?;
            check_fixed(volume, asked)?;
            let mut said = change_options(volume, asked)?;
            if asked.replicas != 0 && asked.replicas != u32::from(volume.membership.drf) {
                check_replicas("replicas", asked.replicas, REPLICAS_HARD_MAX)?;
                let scale = Scale { replicas: asked.replicas, ..Scale::default() };
                let message = scale::scale(volume, &scale, &candidates)?;
                said.extend(message.map(|message| ("VolumeScaled", message)));
            }
            Ok(said)
        };
        let (volume, said) = if dry_run {
            let mut trial = VolumeRecord::clone(&found);
            let said = change(&mut trial)?;
            (found, said)
        } else {
            self.state.update_volume(found.id.0, change).await?
        };
        for (reason, message) in said.iter().filter(|_| !dry_run) {
            self.state.events.record(Severity::Normal, about(&volume), reason, message);
        }
        Ok((volume, said.into_iter().map(|(_, message)| message).collect()))
    }

    /// Waits for some seconds until the options of this record rule all IO. Returns what is still
    /// waited for; empty: nothing.
    pub async fn wait(&self, changed: &VolumeRecord) -> String {
        let began = Instant::now();
        loop {
            let waits = self.waiting_for(changed);
            if waits.is_empty() || began.elapsed() >= IN_FORCE_MAX {
                return waits;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Returns what the options of this record wait for now; empty: they rule all IO.
    pub fn waiting_for(&self, changed: &VolumeRecord) -> String {
        let volume = self.state.volumes.get(&changed.id.0.to_string());
        let version = self.state.term().version_of(changed.generation);
        let waits = volume.and_then(|volume| self.waits_for(&volume, version));
        waits.unwrap_or_default()
    }

    /// The reason why options of this version wait; `None`: they rule, or nobody has the volume
    /// open. The report of a target that serves by the newest epoch counts alone: all before it are
    /// fenced, and an epoch that is granted later comes with these options.
    fn waits_for(&self, volume: &VolumeRecord, version: u64) -> Option<String> {
        let Some(owner) = volume.opened.owner.as_deref() else {
            return volume
                .is_granted()
                .then(|| "a former owner's grant to be taken back".to_owned());
        };
        let observed = self.state.observed();
        let seen = crate::status::serving(&self.state, &observed, volume);
        match seen {
            Some(seen) if seen.options_version >= version => None,
            Some(seen) if seen.waiting_for.is_empty() => {
                Some(format!("the target on node {owner} to put them in force"))
            }
            Some(seen) => {
                Some(format!("the target on node {owner}, which waits for {}", seen.waiting_for))
            }
            // A target that was cut off from the controller may serve all the same.
            None => Some(format!("a report of the target on node {owner}")),
        }
    }
}

fn check_ready(volume: &VolumeRecord) -> Result<(), Error> {
    match volume.phase {
        VolumePhase::Ready => Ok(()),
        VolumePhase::Pending => Err(Error::Aborted(format!(
            "volume {:?} is being created; try again when it is ready",
            volume.spec.name
        ))),
        VolumePhase::Retained | VolumePhase::Deleting => {
            Err(Error::missing("volume", volume.id.0.to_string()))
        }
    }
}

/// Refuses changes of options that are fixed when a volume is made.
pub(super) fn check_fixed(volume: &VolumeRecord, asked: &VolumeSpec) -> Result<(), Error> {
    match VolumeOption::fixed(asked, &volume.spec.options) {
        None => Ok(()),
        Some((key, has)) => Err(Error::invalid(
            key,
            format!(
                "volume {:?} has {has}, which cannot be changed once it is made",
                volume.spec.name
            ),
        )),
    }
}

/// Changes the options that a request names.
pub(super) fn change_options(
    volume: &mut VolumeRecord,
    asked: &VolumeSpec,
) -> Result<Vec<Said>, Error> {
    let changed = VolumeOption::change(asked, &volume.spec.options);
    let (options, changes) = changed.map_err(|wrong| Error::invalid(wrong.key, wrong.rule))?;
    volume.spec.change_options(options);
    Ok(changes.iter().map(|change| ("VolumeChanged", change.to_string())).collect())
}
