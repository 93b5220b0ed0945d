//! Reverts: a volume goes back to what one of its snapshots holds.
//!
//! Wished here, done by the volume's target, which is told by a command until it has answered. In
//! the volume's history a Revert is a write, recorded by a hidden snapshot under the attempt's own
//! id, so that no target does it twice; the snapshot is removed once the outcome is recorded here.
//!
//! The volume is attached nowhere meanwhile: a client's caches would be of another content.
//! A new wish and a new attachment exclude each other by a lock, and the use that ended before is
//! over, so that no device that is left of it reaches the volume again.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::target_command::What;
use quoin_api::control::{
    self as api, CommandRefused, RemoveSnapshot, RevertTo, SnapshotRef, TargetCommand, VolumeRef,
    command_refused,
};
use quoin_cluster::records::{
    Record, RevertPhase, RevertRecord, SnapshotPhase, VolumePhase, VolumeRecord,
};
use quoin_types::{SnapshotId, VolumeId};

use super::catalog::Snapshots;
use crate::state::events::Severity;
use crate::state::{State, about, random_id};
use crate::time::now_ms;
use crate::{Error, text};

/// Time for which a Revert waits for the removal of the last one's record.
const REMOVAL_TIME: Duration = Duration::from_secs(3);

/// Returns of volumes to snapshots.
pub struct Reverts {
    state: Arc<State>,
    catalog: Arc<Snapshots>,
}

fn is_deleted(volume: &VolumeRecord) -> bool {
    matches!(volume.phase, VolumePhase::Deleting | VolumePhase::Retained)
}

/// # Errors
/// A Revert of the volume is under way, so that nobody may attach it.
pub(crate) fn check_none_under_way(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    match state.snapshots.reverts.get(&volume.id.0.to_string()) {
        // A deleted volume gets no attachment in any case.
        Some(revert) if revert.is_under_way() && !is_deleted(volume) => Err(Error::Busy(format!(
            "volume {:?} goes back to snapshot {:?} (`quoin volume get {}` shows how far it is); \
             attach it afterwards",
            volume.spec.name,
            revert.snapshot_name,
            text::quoted(&volume.spec.name)
        ))),
        _ => Ok(()),
    }
}

impl Reverts {
    pub(crate) fn new(state: Arc<State>, catalog: Arc<Snapshots>) -> Self {
        Self { state, catalog }
    }

    /// Records that a volume is to go back to a snapshot, or finds the Revert of this id, under way or
    /// over. It is not done yet when this returns: see [`Self::ended`].
    ///
    /// # Errors
    /// The volume is attached, or goes back already, or the snapshot is not its own, or the id is of
    /// something else.
    pub async fn begin(
        &self,
        volume: Option<&VolumeRef>,
        snapshot: Option<&SnapshotRef>,
        attempt: SnapshotId,
    ) -> Result<Arc<RevertRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let volume = self.state.volume(volume)?;
        // Its snapshot may be deleted by now, and the volume be attached.
        if let Some(begun) = begun(&self.state, volume.id.0, attempt)? {
            return Ok(begun);
        }
        crate::mirror::rules::check_change(&self.state, &volume)?;
        let snapshot = self.catalog.get(snapshot)?;
        let (name, of) = (&volume.spec.name, snapshot.volume);
        match volume.phase {
            VolumePhase::Ready => {}
            VolumePhase::Pending => {
                return Err(Error::Busy(format!("volume {name:?} is not ready")));
            }
            VolumePhase::Deleting | VolumePhase::Retained => {
                return Err(Error::missing("volume", name.clone()));
            }
        }
        if of != volume.id {
            return Err(Error::invalid(
                "snapshot",
                format!(
                    "{:?} is of volume {:?}, and volume {name:?} can only go back to its own \
                     (`quoin snapshot list {}`)",
                    snapshot.name,
                    snapshot.volume_name,
                    text::quoted(name)
                ),
            ));
        }
        if snapshot.phase == SnapshotPhase::Wished {
            return Err(Error::Busy(format!("snapshot {:?} is not cut yet", snapshot.name)));
        }
        let wished = RevertRecord::wished(&snapshot, attempt, now_ms());
        self.last_is_removed(&wished.name()).await;
        let revert = wish(&self.state, wished).await?;
        self.state.tell_target(volume.id.0);
        Ok(revert)
    }

    /// Waits, for a moment at most, until the record of the last Revert in the history is removed.
    async fn last_is_removed(&self, name: &str) {
        let mut changes = self.state.changes();
        let removed = async {
            loop {
                let last = self.state.snapshots.reverts.get(name);
                let ends = last.is_some_and(|last| last.is_open() && !last.is_under_way());
                if !ends || changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // The caller looks again with the lock held.
        let _ = tokio::time::timeout(REMOVAL_TIME, removed).await;
    }

    /// Waits until a Revert is over, at most so long; returns it as it is then.
    ///
    /// # Errors
    /// The volume is gone, or another Revert took the place of this one.
    pub async fn ended(
        &self,
        revert: Arc<RevertRecord>,
        within: Duration,
    ) -> Result<Arc<RevertRecord>, Error> {
        let mut changes = self.state.changes();
        let now = || {
            let found = self.state.snapshots.reverts.get(&revert.name());
            let same = found.filter(|found| found.attempt == revert.attempt);
            same.ok_or_else(|| Error::missing("revert", revert.attempt.0.to_string()))
        };
        let waiting = async {
            loop {
                let found = now()?;
                if !found.is_under_way() || changes.changed().await.is_err() {
                    return Ok(found);
                }
            }
        };
        match tokio::time::timeout(within, waiting).await {
            Ok(ended) => ended,
            Err(_) => now(),
        }
    }

    /// The Revert of this id, if it is the last one of the volume.
    ///
    /// # Errors
    /// There is no such volume, or no such Revert of it.
    pub fn get(
        &self,
        volume: Option<&VolumeRef>,
        attempt: SnapshotId,
    ) -> Result<Arc<RevertRecord>, Error> {
        self.state.check_ruling()?;
        let volume = self.state.volume(volume)?;
        let found = begun(&self.state, volume.id.0, attempt)?;
        found.ok_or_else(|| Error::missing("revert", attempt.to_string()))
    }
}

/// The id that a caller drew for a Revert.
pub(crate) fn attempt(id: &str) -> Result<SnapshotId, Error> {
    let drawn = id.parse().ok().filter(|drawn| *drawn != SnapshotId(0));
    let rule = "32 hex digits, drawn by the caller for this Revert: a repeat with the same id begins no \
                second one";
    drawn.ok_or_else(|| Error::invalid("id", rule))
}

/// The Revert of this id, if it is the last one of the volume.
///
/// # Errors
/// It was followed by another one.
fn begun(
    state: &State,
    volume: VolumeId,
    attempt: SnapshotId,
) -> Result<Option<Arc<RevertRecord>>, Error> {
    let last = state.snapshots.reverts.get(&volume.to_string());
    if let Some(last) = &last
        && last.former.iter().any(|former| former.0 == attempt)
    {
        return Err(Error::Precondition(format!(
            "Revert {attempt} of the volume is over, and a later one followed it, to snapshot {:?}: to \
             go back once more, begin a new one",
            last.snapshot_name
        )));
    }
    Ok(last.filter(|last| last.attempt.0 == attempt))
}

/// Checks that an id that was drawn for a Revert is of nothing else: its hidden snapshot is removed
/// under it.
fn check_unused(state: &State, attempt: SnapshotId) -> Result<(), Error> {
    let is_snapshot = state.snapshots.records.get(&attempt.to_string()).is_some();
    let of_another = state.snapshots.reverts.index(|index| index.volume_of(attempt)).is_some();
    if is_snapshot || of_another {
        let rule =
            format!("{attempt} is of a snapshot or of another volume's Revert: draw another one");
        return Err(Error::invalid("id", rule));
    }
    Ok(())
}

/// Records a Revert, or finds it.
async fn wish(state: &State, wished: RevertRecord) -> Result<Arc<RevertRecord>, Error> {
    let _excluding = state.snapshots.reverting.write().await;
    let tables = &state.snapshots;
    let name = wished.name();
    if let Some(begun) = begun(state, wished.volume.0, wished.attempt.0)? {
        return Ok(begun);
    }
    check_unused(state, wished.attempt.0)?;
    if let Some(last) = tables.reverts.get(&name).filter(|last| last.is_open()) {
        return Err(Error::Busy(match last.is_under_way() {
            true => format!(
                "the volume goes back to snapshot {:?} (`quoin snapshot revert {} --id {}` waits for \
                 it); try again afterwards",
                last.snapshot_name, last.volume.0, last.attempt.0
            ),
            false => "the volume's last Revert ends in a moment; try again".to_owned(),
        }));
    }
    // The next attachment begins a new use, on whatever node.
    let end_use = |volume: &mut VolumeRecord| {
        if let Some(attachment) = volume.attachments.first() {
            let rule = format!(
                "volume {:?} is attached to node {}: a volume goes back to a snapshot only while \
                 nobody uses it; detach it first",
                volume.spec.name, attachment.node
            );
            return Err(Error::Precondition(rule));
        }
        volume.used.end(volume.opened.epoch);
        Ok(())
    };
    state.update_volume(wished.volume.0, end_use).await?;
    match tables.reverts.create(wished.clone()).await? {
        Ok(created) => return Ok(created),
        Err(found) if found.is_open() => {
            return Err(Error::Busy("another Revert was begun; try again".to_owned()));
        }
        Err(_) => {}
    }
    let replace = |last: &mut RevertRecord| {
        if last.is_open() {
            return Err(Error::Busy("another Revert was begun; try again".to_owned()));
        }
        last.replace_by(&wished);
        Ok(())
    };
    let replaced = tables.reverts.update(&name, replace).await?;
    let gone = || Error::Busy("the last Revert was removed; try again".to_owned());
    replaced.map(|(revert, ())| revert).ok_or_else(gone)
}

/// Has a volume that is kept for its snapshots alone show the newest of them, so that what was
/// written since takes no space.
pub(super) async fn show_newest(state: &State, id: VolumeId) -> Result<(), Error> {
    let volume = state.volumes.get(&id.to_string());
    if volume.is_none_or(|volume| volume.phase != VolumePhase::Retained) {
        return Ok(());
    }
    let kept = state.snapshots.of_volume(id).into_iter().filter(|snapshot| snapshot.is_kept());
    let Some(newest) = kept.max_by_key(|snapshot| snapshot.cut.map(|cut| cut.lsn)) else {
        return Ok(());
    };
    let last = state.snapshots.reverts.get(&id.to_string());
    if last.is_some_and(|last| last.is_open() || last.trims && last.snapshot == newest.id) {
        return Ok(());
    }
    let attempt = SnapshotId(random_id());
    let wished = RevertRecord { trims: true, ..RevertRecord::wished(&newest, attempt, now_ms()) };
    match wish(state, wished).await {
        // Something came between, and the end of that brings the volume here again.
        Err(Error::Busy(_) | Error::Precondition(_) | Error::NotFound { .. }) => Ok(()),
        other => other.map(|_| state.tell_target(id)),
    }
}

/// Records a Revert that a mirror orders, and has its target told.
///
/// # Errors
/// Another one is under way, or the volume is attached.
pub(crate) async fn wish_by_mirror(state: &State, wished: RevertRecord) -> Result<(), Error> {
    let volume = wished.volume.0;
    wish(state, wished).await?;
    state.tell_target(volume);
    Ok(())
}

/// The Revert of a volume that an outcome names.
fn named(state: &State, volume: VolumeId, attempt: &str) -> Option<Arc<RevertRecord>> {
    let found = state.snapshots.reverts.get(&volume.to_string());
    found.filter(|revert| revert.attempt.0.to_string() == attempt)
}

/// The target of the volume did it.
pub(super) async fn done(
    state: &State,
    volume: VolumeId,
    attempt: &str,
    lsn: u64,
) -> Result<(), Error> {
    let Some(revert) = named(state, volume, attempt) else { return Ok(()) };
    if lsn == 0 || lsn > quoin_types::LSN_MAX.0 {
        return Err(Error::invalid("lsn", format!("{lsn} is out of range")));
    }
    let change =
        |found: &mut RevertRecord| Ok(found.attempt == revert.attempt && found.done(lsn, now_ms()));
    let updated = state.snapshots.reverts.update(&revert.name(), change).await?;
    if let Some((revert, true)) = updated {
        let (reason, message) = match revert.trims {
            true => {
                ("RetainedTrimmed", format!("to its newest snapshot, {:?}", revert.snapshot_name))
            }
            false => {
                let message = format!("to snapshot {:?}, as of LSN {lsn}", revert.snapshot_name);
                ("VolumeReverted", message)
            }
        };
        tell(state, volume, Severity::Normal, reason, message);
        state.tell_target(volume);
    }
    Ok(())
}

/// The target of the volume refused it; false: the outcome is of no Revert.
pub(super) async fn refused(
    state: &State,
    volume: VolumeId,
    attempt: &str,
    refused: &CommandRefused,
) -> Result<bool, Error> {
    let Some(revert) = named(state, volume, attempt) else { return Ok(false) };
    // An id of a snapshot is used once, so one that is gone never comes back.
    let for_good = refused.reason() == command_refused::Reason::NoSnapshot;
    let failure: String = match for_good {
        true => format!("snapshot {:?} was deleted meanwhile", revert.snapshot_name),
        false => refused.message.chars().take(1024).collect(),
    };
    let change = |found: &mut RevertRecord| {
        Ok(found.attempt == revert.attempt && found.refused(&failure, for_good, now_ms()))
    };
    let updated = state.snapshots.reverts.update(&revert.name(), change).await?;
    if let Some((revert, true)) = updated {
        if !revert.is_under_way() {
            tell_of_failure(state, volume, &revert);
        }
        state.tell_target(volume);
    }
    Ok(true)
}

/// The hidden snapshot of an attempt is gone.
pub(super) async fn cleared(state: &State, volume: VolumeId, attempt: &str) -> Result<(), Error> {
    let Some(revert) = named(state, volume, attempt) else { return Ok(()) };
    let change =
        |found: &mut RevertRecord| Ok(found.attempt == revert.attempt && found.cleared(now_ms()));
    let updated = state.snapshots.reverts.update(&revert.name(), change).await?;
    if let Some((revert, true)) = updated {
        tell_of_failure(state, volume, &revert);
    }
    Ok(())
}

fn tell_of_failure(state: &State, volume: VolumeId, revert: &RevertRecord) {
    let message = format!("to snapshot {:?}: {}", revert.snapshot_name, revert.failure);
    tell(state, volume, Severity::Warning, "VolumeRevertFailed", message);
}

fn tell(state: &State, volume: VolumeId, severity: Severity, reason: &str, message: String) {
    if let Some(volume) = state.volumes.get(&volume.to_string()) {
        state.events.record(severity, about(&volume), reason, message);
    }
}

/// Gives up all Reverts that are under way, after the records were restored.
pub(crate) async fn give_up_all(state: &State) -> Result<(), Error> {
    let failure = "the records were restored while it was under way, and whether the volume shows the \
                   snapshot is not known: look at its content";
    for revert in state.snapshots.reverts.list() {
        let change = |revert: &mut RevertRecord| Ok(revert.give_up(failure, now_ms()));
        let updated = state.snapshots.reverts.update(&revert.name(), change).await?;
        if let Some((revert, true)) = updated {
            tell_of_failure(state, revert.volume.0, &revert);
        }
    }
    Ok(())
}

/// Reverts of which the target of a volume has something to do, of the volumes that `is_served`.
pub(super) fn open(
    state: &State,
    is_served: impl Fn(&VolumeRecord) -> bool,
) -> Vec<Arc<RevertRecord>> {
    let open = state.snapshots.reverts.indexed(|index| Some(index.open()));
    let here = |revert: &Arc<RevertRecord>| {
        let volume = state.volumes.get(&revert.volume.0.to_string());
        // A Revert waits while the volume is attached.
        volume.is_some_and(|volume| {
            is_served(&volume)
                && (!revert.is_under_way()
                    || (volume.attachments.is_empty() && volume.phase.is_kept()))
        })
    };
    open.into_iter().filter(here).collect()
}

/// The command that a Revert asks for.
pub(super) fn command(revert: &RevertRecord, term: &[u8]) -> TargetCommand {
    let attempt = revert.attempt.0.to_string();
    let what = match revert.phase {
        RevertPhase::Wished => {
            What::RevertTo(RevertTo { snapshot_id: revert.snapshot.0.to_string() })
        }
        _ => What::RemoveSnapshot(RemoveSnapshot { snapshot_id: attempt.clone() }),
    };
    TargetCommand {
        id: attempt,
        volume_id: revert.volume.0.to_string(),
        term: term.to_vec(),
        what: Some(what),
    }
}

/// A Revert as users see it.
pub(crate) fn view(state: &State, revert: &RevertRecord) -> api::Revert {
    use crate::time::timestamp;
    let volume = state.volumes.get(&revert.volume.0.to_string());
    let phase = match revert.phase {
        RevertPhase::Wished | RevertPhase::Failing => "Wished",
        RevertPhase::Done => "Done",
        RevertPhase::Failed => "Failed",
    };
    api::Revert {
        id: revert.attempt.0.to_string(),
        volume_id: revert.volume.0.to_string(),
        volume_name: volume.as_ref().map(|v| v.spec.name.clone()).unwrap_or_default(),
        snapshot_id: revert.snapshot.0.to_string(),
        snapshot_name: revert.snapshot_name.clone(),
        phase: phase.to_owned(),
        waiting_for: match revert.is_under_way() {
            true => super::view::waiting_for(state, volume.as_deref()),
            false => String::new(),
        },
        message: revert.failure.clone(),
        wished_at: Some(timestamp(revert.wished_ms)),
        ended_at: (revert.ended_ms > 0).then(|| timestamp(revert.ended_ms)),
        lsn: revert.lsn,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::examples::revert;

    #[test]
    fn a_revert_is_told_until_it_is_answered_and_then_the_removal_of_its_record() {
        let mut record = revert(7, 9);
        let told = command(&record, b"term");
        assert_eq!(told.id, SnapshotId(9).to_string());
        assert!(matches!(told.what, Some(What::RevertTo(_))));
        record.done(12, 5);
        let told = command(&record, b"term");
        let removed = RemoveSnapshot { snapshot_id: SnapshotId(9).to_string() };
        assert_eq!(told.what, Some(What::RemoveSnapshot(removed)));
    }
}
