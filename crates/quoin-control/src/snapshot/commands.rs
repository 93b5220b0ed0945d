//! Commands to targets: what is to be done with volumes that they serve, one small message for each
//! thing, and an answer for each.
//!
//! A command is repeated until its outcome is recorded: a target that does not serve its volume yet
//! does nothing, and one that was restarted has forgotten. So a command must be such that twice is
//! the same as once: it has an id, and its outcome is the same for a repeat.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{
    self as api, CommandOutcome, ConfirmSnapshot, CutPoint, HoldPoint, MakeSnapshot, PulledPart,
    ReleasePoint, RemoveSnapshot, TargetCommand, command_outcome, target_command,
};
use quoin_cluster::records::{
    Cut, Record, RevertPhase, SnapshotPhase, SnapshotRecord, Text, VolumeRecord,
};
use quoin_replication::group_point::{PointAnswer, PointCommand};
use quoin_replication::primary::{PointOutcome, SnapshotOutcome};
use quoin_types::entry::Chain;
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::message::SnapshotHead;
use quoin_types::{Epoch, Lsn, VolumeId};
use tokio::time::Instant;

use super::catalog::{about, too_many};
use super::groups::Groups;
use super::points::Points;
use super::reverts;
use crate::Error;
use crate::state::State;
use crate::state::events::Severity;
use crate::text;
use crate::time::now_ms;
use crate::volume::spec::SIZE_BYTES_MAX;

/// Time after which a command without an outcome is sent again.
const REPEAT_AFTER: Duration = Duration::from_millis(500);
/// The same of a step of a point, for which other volumes hold their answers back.
const REPEAT_STEP_AFTER: Duration = Duration::from_millis(200);
/// Commands that a stream sends in one look.
const COMMANDS_MAX: usize = 256;
/// A target's clock that is ahead by more is not believed.
const AHEAD_MAX_MS: u64 = 24 * 3600 * 1000;
const LSN_MAX: u64 = quoin_types::LSN_MAX.0;

/// Commands and their outcomes.
#[derive(Clone)]
pub struct Commands {
    state: Arc<State>,
    groups: Arc<Groups>,
    points: Arc<Points>,
}

/// Commands of one node, as one stream has sent them.
pub struct CommandStream {
    commands: Commands,
    node: String,
    /// Time of the last sending of each, by the snapshot's record name.
    sent: BTreeMap<String, (SnapshotPhase, Instant)>,
    /// The same of steps of points.
    steps_sent: BTreeMap<(PointId, VolumeId), (PointCommand, Instant)>,
    /// The same of Reverts, by their commands.
    sent_reverts: Sent<(SnapshotId, RevertPhase)>,
    /// The same of parts that are to be read, by their numbers.
    sent_pulls: Sent<u64>,
}

/// Time of the last sending of each command.
struct Sent<K>(BTreeMap<K, Instant>);

impl<K: Ord + Clone> Sent<K> {
    /// Open commands that are to be sent now. Commands that are not open any more are forgotten.
    fn due(&mut self, now: Instant, open: impl Iterator<Item = (K, TargetCommand)>) -> Due {
        let before = std::mem::take(&mut self.0);
        let mut due = Due::default();
        for (key, command) in open.take(COMMANDS_MAX) {
            let last = before.get(&key).copied();
            let last = last.filter(|at| now.duration_since(*at) < REPEAT_AFTER);
            if last.is_none() {
                due.commands.push(command);
            }
            self.0.insert(key, last.unwrap_or(now));
            due.any_open = true;
        }
        due
    }
}

#[derive(Default)]
struct Due {
    commands: Vec<TargetCommand>,
    any_open: bool,
}

impl Commands {
    pub(crate) fn new(state: Arc<State>, groups: Arc<Groups>, points: Arc<Points>) -> Self {
        Self { state, groups, points }
    }

    /// The stream of a node's target.
    pub fn of_node(&self, node: &str) -> CommandStream {
        self.points.follows(node);
        CommandStream {
            commands: self.clone(),
            node: node.to_owned(),
            sent: BTreeMap::new(),
            steps_sent: BTreeMap::new(),
            sent_reverts: Sent(BTreeMap::new()),
            sent_pulls: Sent(BTreeMap::new()),
        }
    }

    /// Snapshots of which this node's target has something to do.
    fn open_at(&self, node: &str) -> Vec<Arc<SnapshotRecord>> {
        if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
            return Vec::new();
        }
        let open: Vec<VolumeId> =
            self.state.snapshots.records.index(|index| index.open().keys().copied().collect());
        let is_served = |id: &VolumeId| {
            let volume = self.state.volumes.get(&id.to_string());
            volume.is_some_and(|volume| is_served_by(&volume, node))
        };
        let here = open.into_iter().filter(is_served);
        // Members of a group are cut together, by the steps of a point.
        let is_alone =
            |s: &Arc<SnapshotRecord>| s.phase != SnapshotPhase::Wished || s.group.is_none();
        here.flat_map(|volume| self.state.snapshots.open_of(volume)).filter(is_alone).collect()
    }

    /// Steps of points that this node's target is to take now.
    fn steps_at(&self, node: &str) -> Vec<(PointId, VolumeId, PointCommand)> {
        if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
            return Vec::new();
        }
        self.points.commands(|volume| {
            let volume = self.state.volumes.get(&volume.to_string());
            volume.is_some_and(|volume| is_served_by(&volume, node))
        })
    }

    /// Has those looked at that a step of a point concerns.
    fn moved(&self, group: GroupId, volumes: &[VolumeId]) {
        volumes.iter().for_each(|volume| self.state.tell_target(*volume));
        self.groups.look_at_group(group);
    }

    /// Takes in the outcome of a step; false: it is none of a point that is under way.
    fn stepped(&self, volume: VolumeId, id: &str, outcome: PointOutcome) -> bool {
        let Ok(point) = id.parse::<PointId>() else { return false };
        let answer = PointAnswer::Step(outcome);
        let moved = self.points.answered(Instant::now(), volume, point, answer);
        if let Some((group, volumes)) = &moved {
            self.moved(*group, volumes);
        }
        moved.is_some()
    }

    /// Takes in what was said of a group's snapshot while it is made; false: it is none.
    fn settled(
        &self,
        snapshot: &SnapshotRecord,
        outcome: SnapshotOutcome,
        size_bytes: u64,
    ) -> bool {
        let Some(Text(group)) = snapshot.group else { return false };
        if snapshot.phase != SnapshotPhase::Wished {
            return false;
        }
        let answer = PointAnswer::Snapshot { id: snapshot.id.0, outcome };
        let (now, volume) = (Instant::now(), snapshot.volume.0);
        let moved = self.points.snapshot_answered(now, volume, group, answer, size_bytes);
        if let Some(volumes) = moved {
            self.moved(group, &volumes);
        }
        true
    }

    /// Takes in the outcome of a command, if the node is the one that serves the volume. Anything
    /// else is not recorded, and the command is sent again.
    pub async fn ended(&self, outcome: &CommandOutcome) -> Result<(), Error> {
        use command_outcome::What;
        self.state.check_ruling()?;
        let volume: VolumeId = crate::fields::id("volume_id", &outcome.volume_id)?;
        let served = self.state.volumes.get(&volume.to_string());
        if !served.is_some_and(|volume| is_served_by(&volume, &outcome.node)) {
            return Ok(());
        }
        match &outcome.what {
            Some(What::SnapshotMade(made)) => self.made(volume, made).await,
            Some(What::SnapshotRemoved(removed)) => {
                reverts::cleared(&self.state, volume, &removed.snapshot_id).await?;
                self.removed(volume, &removed.snapshot_id).await
            }
            Some(What::VolumeReverted(reverted)) => {
                reverts::done(&self.state, volume, &outcome.id, reverted.lsn).await
            }
            Some(What::PointHeld(_)) => {
                self.stepped(volume, &outcome.id, PointOutcome::Held);
                Ok(())
            }
            Some(What::PointCut(cut)) => {
                let snapshot: SnapshotId = crate::fields::id("snapshot_id", &cut.snapshot_id)?;
                check_lsn(cut.lsn)?;
                let (lsn, epoch) = (Lsn(cut.lsn), Epoch(cut.epoch));
                self.stepped(volume, &outcome.id, PointOutcome::Cut { snapshot, lsn, epoch });
                Ok(())
            }
            Some(What::PointReleased(released)) => {
                let unbroken = released.unbroken;
                self.stepped(volume, &outcome.id, PointOutcome::Released { unbroken });
                Ok(())
            }
            Some(What::SnapshotGone(gone)) => {
                if let Some(snapshot) = self.snapshot(volume, &gone.snapshot_id) {
                    self.settled(&snapshot, SnapshotOutcome::Gone, 0);
                }
                Ok(())
            }
            Some(What::Refused(refused)) => {
                let reason = api::command_refused::Reason::TooManySnapshots;
                let step = PointOutcome::TooManySnapshots;
                if refused.reason() == reason && self.stepped(volume, &outcome.id, step) {
                    return Ok(());
                }
                self.refused(volume, &outcome.id, refused).await
            }
            // An outcome of a later version, of a command that this one does not send.
            None => Ok(()),
        }
    }

    /// Takes in a part that a target read, if the node is the one that serves the volume.
    pub fn part(&self, part: PulledPart) -> Result<(), Error> {
        let volume: VolumeId = crate::fields::id("volume_id", &part.volume_id)?;
        let served = self.state.volumes.get(&volume.to_string());
        if served.is_some_and(|volume| is_served_by(&volume, &part.node)) {
            self.state.snapshots.pulls.answered(volume, part);
        }
        Ok(())
    }

    /// The snapshot of this id, if it is of this volume.
    fn snapshot(&self, volume: VolumeId, id: &str) -> Option<Arc<SnapshotRecord>> {
        let found = self.state.snapshots.records.get(id);
        found.filter(|snapshot| snapshot.volume.0 == volume)
    }

    async fn made(&self, volume: VolumeId, made: &api::SnapshotMade) -> Result<(), Error> {
        let Some(snapshot) = self.snapshot(volume, &made.snapshot_id) else { return Ok(()) };
        let cut = cut(&snapshot, made)?;
        let head = made
            .epoch
            .zip(made.chain)
            .map(|(epoch, chain)| SnapshotHead { epoch: Epoch(epoch), chain: Chain(chain) });
        let outcome = SnapshotOutcome::Made { lsn: Lsn(cut.lsn), head };
        if self.settled(&snapshot, outcome, cut.size_bytes) {
            return Ok(());
        }
        let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.made(cut));
        let updated = self.state.snapshots.records.update(&snapshot.name(), change).await?;
        // Points of mirrors come every few seconds.
        let updated = updated.filter(|(snapshot, _)| snapshot.point.is_none());
        if let Some((snapshot, true)) = updated {
            let message = format!(
                "snapshot {:?}: {}, as of LSN {}",
                snapshot.name,
                text::bytes(cut.size_bytes),
                cut.lsn
            );
            let object = about(&snapshot);
            self.state.events.record(Severity::Normal, object, "SnapshotCreated", message);
        }
        Ok(())
    }

    async fn removed(&self, volume: VolumeId, id: &str) -> Result<(), Error> {
        let Some(snapshot) = self.snapshot(volume, id) else { return Ok(()) };
        let is_deleting = |s: &SnapshotRecord| s.phase == SnapshotPhase::Deleting;
        if self.state.snapshots.records.remove(&snapshot.name(), is_deleting).await? {
            self.state.snapshots.free_name(&snapshot).await?;
        }
        Ok(())
    }

    /// The attempt is given up. Its deletion is sent all the same, for a repeat of the command that
    /// is on its way may find a place.
    async fn refused(
        &self,
        volume: VolumeId,
        id: &str,
        refused: &api::CommandRefused,
    ) -> Result<(), Error> {
        if reverts::refused(&self.state, volume, id, refused).await? {
            return Ok(());
        }
        let Some(snapshot) = self.snapshot(volume, id) else { return Ok(()) };
        let reason = match refused.reason() {
            api::command_refused::Reason::TooManySnapshots => {
                too_many(&snapshot.volume_name).to_string()
            }
            _ => refused.message.chars().take(1024).collect(),
        };
        let change = |snapshot: &mut SnapshotRecord| {
            let is_news = snapshot.phase == SnapshotPhase::Wished;
            if is_news {
                snapshot.failure.clone_from(&reason);
                snapshot.remove();
            }
            Ok(is_news)
        };
        let updated = self.state.snapshots.records.update(&snapshot.name(), change).await?;
        if let Some((snapshot, true)) = updated {
            self.state.snapshots.free_name(&snapshot).await?;
            let message = format!("snapshot {:?}: {reason}", snapshot.name);
            let object = about(&snapshot);
            self.state.events.record(Severity::Warning, object, "SnapshotRefused", message);
            self.state.tell_target(volume);
        }
        Ok(())
    }
}

fn is_served_by(volume: &VolumeRecord, node: &str) -> bool {
    volume.phase.is_kept() && volume.opened.owner.as_deref() == Some(node)
}

fn check_lsn(lsn: u64) -> Result<(), Error> {
    match lsn {
        1..=LSN_MAX => Ok(()),
        lsn => Err(Error::invalid("lsn", format!("{lsn} is out of range"))),
    }
}

/// The cut as it is recorded. What a target reports is bounded, not believed.
fn cut(snapshot: &SnapshotRecord, made: &api::SnapshotMade) -> Result<Cut, Error> {
    check_lsn(made.lsn)?;
    if made.size_bytes > SIZE_BYTES_MAX {
        return Err(Error::invalid("size_bytes", format!("{} is out of range", made.size_bytes)));
    }
    let told_ms = made.cut_at.as_ref().map_or(0, |at| {
        let seconds_ms = u64::try_from(at.seconds).unwrap_or(0).saturating_mul(1000);
        seconds_ms.saturating_add(u64::try_from(at.nanos).unwrap_or(0) / 1_000_000)
    });
    // A target that was restarted in between does not know it: then it is that of the wish.
    // It cannot have been cut before it was wished for.
    let is_told = told_ms >= snapshot.wished_ms.saturating_sub(AHEAD_MAX_MS)
        && told_ms > 0
        && told_ms <= now_ms().saturating_add(AHEAD_MAX_MS);
    Ok(Cut {
        lsn: made.lsn,
        epoch: made.epoch.unwrap_or(0),
        chain: made.chain.unwrap_or(0),
        at_ms: if is_told { told_ms } else { snapshot.wished_ms },
        size_bytes: made.size_bytes,
    })
}

fn command(snapshot: &SnapshotRecord, term: &[u8]) -> TargetCommand {
    let snapshot_id = snapshot.id.0.to_string();
    let what = match snapshot.phase {
        SnapshotPhase::Wished => {
            target_command::What::MakeSnapshot(MakeSnapshot { snapshot_id: snapshot_id.clone() })
        }
        _ => {
            let snapshot_id = snapshot_id.clone();
            target_command::What::RemoveSnapshot(RemoveSnapshot { snapshot_id })
        }
    };
    TargetCommand {
        id: snapshot_id,
        volume_id: snapshot.volume.0.to_string(),
        term: term.to_vec(),
        what: Some(what),
    }
}

fn step(point: PointId, volume: VolumeId, step: PointCommand, term: &[u8]) -> TargetCommand {
    use target_command::What;
    let (id, what) = match step {
        PointCommand::Hold { for_ms } => (point.to_string(), What::HoldPoint(HoldPoint { for_ms })),
        PointCommand::Cut { snapshot } => {
            let snapshot_id = snapshot.to_string();
            (point.to_string(), What::CutPoint(CutPoint { snapshot_id }))
        }
        PointCommand::Release => (point.to_string(), What::ReleasePoint(ReleasePoint {})),
        PointCommand::Confirm { snapshot } => {
            let snapshot_id = snapshot.to_string();
            (snapshot_id.clone(), What::ConfirmSnapshot(ConfirmSnapshot { snapshot_id }))
        }
    };
    TargetCommand { id, volume_id: volume.to_string(), term: term.to_vec(), what: Some(what) }
}

impl CommandStream {
    /// Steps of points to send now, and the time after which to look again.
    fn steps(&mut self, now: Instant, term: &[u8]) -> (Vec<TargetCommand>, Option<Duration>) {
        let due = self.commands.steps_at(&self.node);
        let is_due = |key: &(PointId, VolumeId)| due.iter().any(|(p, v, _)| (*p, *v) == *key);
        self.steps_sent.retain(|key, _| is_due(key));
        let mut commands = Vec::new();
        for (point, volume, what) in &due {
            let sent = self.steps_sent.get(&(*point, *volume));
            let is_sent = sent.is_some_and(|(before, at)| {
                before == what && now.duration_since(*at) < REPEAT_STEP_AFTER
            });
            if !is_sent {
                self.steps_sent.insert((*point, *volume), (*what, now));
                commands.push(step(*point, *volume, *what, term));
            }
        }
        (commands, (!due.is_empty()).then_some(REPEAT_STEP_AFTER))
    }

    /// Commands to send now, and the time after which to look again; `None`: after a change.
    pub fn next(&mut self, now: Instant, term: &[u8]) -> (Vec<TargetCommand>, Option<Duration>) {
        let open = self.commands.open_at(&self.node);
        let names: std::collections::BTreeSet<String> =
            open.iter().map(|snapshot| snapshot.name()).collect();
        self.sent.retain(|name, _| names.contains(name));
        let (mut commands, steps_pause) = self.steps(now, term);
        let most = commands.len() + COMMANDS_MAX;
        for snapshot in &open {
            let name = snapshot.name();
            let is_sent = self.sent.get(&name).is_some_and(|(phase, at)| {
                *phase == snapshot.phase && now.duration_since(*at) < REPEAT_AFTER
            });
            if !is_sent && commands.len() < most {
                self.sent.insert(name, (snapshot.phase, now));
                commands.push(command(snapshot, term));
            }
        }
        let others = self.others(now, term);
        commands.extend(others.commands);
        (commands, steps_pause.or((!open.is_empty() || others.any_open).then_some(REPEAT_AFTER)))
    }
}

impl CommandStream {
    /// The same for Reverts, and for parts of snapshots that are to be read.
    fn others(&mut self, now: Instant, term: &[u8]) -> Due {
        let state = &self.commands.state;
        if state.check_ruling().is_err() || state.check_term().is_err() {
            return Due::default();
        }
        let reverts = reverts::open(state, |volume| is_served_by(volume, &self.node));
        let reverts = reverts.iter().map(|revert| {
            let key = (revert.attempt.0, revert.phase);
            (key, reverts::command(revert, term))
        });
        let mut due = self.sent_reverts.due(now, reverts);
        let is_served = |id: VolumeId| {
            let volume = state.volumes.get(&id.to_string());
            volume.is_some_and(|volume| is_served_by(&volume, &self.node))
        };
        let pulls = state.snapshots.pulls.commands(term, is_served);
        let pulls = self.sent_pulls.due(now, pulls.into_iter());
        due.commands.extend(pulls.commands);
        due.any_open |= pulls.any_open;
        due
    }

    /// Counter that rises with each part of a snapshot that is to be read: then it is to be looked
    /// again.
    pub fn begun(&self) -> tokio::sync::watch::Receiver<u64> {
        self.commands.state.snapshots.pulls.begun()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::examples::snapshot;

    #[test]
    fn what_a_target_cannot_have_cut_is_refused_and_its_clock_is_bounded() {
        let made = |lsn, size_bytes, seconds| api::SnapshotMade {
            lsn,
            size_bytes,
            cut_at: Some(prost_types::Timestamp { seconds, nanos: 5_000_000 }),
            ..Default::default()
        };
        let record = snapshot(1, 7);
        assert!(cut(&record, &made(0, 4096, 1)).is_err());
        assert!(cut(&record, &made(u64::MAX, 4096, 1)).is_err());
        assert!(cut(&record, &made(1, u64::MAX, 1)).is_err());
        assert_eq!(cut(&record, &made(1, 4096, 1_700_000_001)).unwrap().at_ms, 1_700_000_001_005);
        for wrong in [i64::MAX, i64::MIN, 0, 1_600_000_000] {
            let at = cut(&record, &made(1, 4096, wrong)).unwrap().at_ms;
            assert_eq!(at, record.wished_ms, "{wrong}");
        }
    }

    #[test]
    fn a_command_has_the_id_of_its_snapshot_and_says_what_its_phase_asks_for() {
        let mut record = snapshot(1, 7);
        let make = command(&record, b"term");
        assert_eq!(make.id, record.name());
        assert!(matches!(make.what, Some(target_command::What::MakeSnapshot(_))));
        record.remove();
        let remove = command(&record, b"term");
        assert_eq!(remove.id, make.id);
        assert!(matches!(remove.what, Some(target_command::What::RemoveSnapshot(_))));
    }
}
