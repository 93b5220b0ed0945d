//! Snapshots after the records were lost or restored: what the pools hold decides.
//!
//! Attempts that were under way are given up ([`super::catalog::give_up_attempts`]). Of a volume that
//! an open quorum of its replicas told of, snapshots without a record get one again, under a name
//! made of their id, so that they are seen, and keep the volume when it is deleted; records of
//! snapshots that no replica has are removed. A volume that its user had deleted, and that they keep,
//! is out of users' sight again.

use std::collections::{BTreeMap, HashMap, HashSet};

use quoin_cluster::ownership::mirrored::point_of;
use quoin_cluster::records::{
    Cut, Record, SnapshotName, SnapshotPhase, SnapshotRecord, Text, VolumePhase, VolumeRecord,
};
use quoin_cluster::records_rebuild::{Finding, Held};
use quoin_types::ids::SnapshotId;
use quoin_types::{BLOCK_SIZE, ReplicaGuid, VolumeId};

use super::catalog::about;
use crate::Error;
use crate::disaster::salvage::Told;
use crate::state::events::Severity;
use crate::state::{State, about as about_volume};
use crate::time::now_ms;

/// A snapshot that a replica holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FoundSnapshot {
    pub id: SnapshotId,
    pub lsn: u64,
    pub blocks: u64,
}

/// Snapshots of each replica whose pool told of them.
pub type FoundSnapshots = HashMap<ReplicaGuid, Vec<FoundSnapshot>>;

/// Lists of a volume's snapshots by the replicas that count: the furthest one's, and all ids.
fn lists<'a>(
    finding: &'a Finding,
    told: &'a BTreeMap<String, Told>,
) -> Option<(&'a [FoundSnapshot], HashSet<SnapshotId>)> {
    if finding.needed == 0 || finding.answered < finding.needed {
        return None;
    }
    let of = |held: &Held| told.get(&held.pool)?.snapshots.get(&held.member.guid);
    let known = finding.standings.iter().filter(|(_, standing)| *standing == "known");
    let counting =
        known.map(|(held, _)| held).filter(|held| held.trusted && held.quorum && !held.damaged);
    let mut all = HashSet::new();
    let mut furthest = None::<(&Held, &Vec<FoundSnapshot>)>;
    for held in counting {
        let list = of(held)?;
        all.extend(list.iter().map(|found| found.id));
        if furthest.is_none_or(|(best, _)| held.position > best.position) {
            furthest = Some((held, list));
        }
    }
    furthest.map(|(_, list)| (list.as_slice(), all))
}

/// Makes the records of snapshots agree with what the pools told. The records do not rule yet.
pub(crate) async fn agree<'a>(
    state: &State,
    findings: impl Iterator<Item = &'a Finding>,
    told: &BTreeMap<String, Told>,
) -> Result<(), Error> {
    let _changing = state.snapshots.changing.lock().await;
    for finding in findings {
        let volume = state.volumes.get(&finding.volume.to_string());
        let Some(volume) = volume.filter(|volume| volume.phase.is_kept()) else { continue };
        if let Some((list, all)) = lists(finding, told) {
            for found in list {
                adopt(state, &volume, &finding.name, found).await?;
            }
            forget_gone(state, finding.volume, &all).await?;
        }
        if finding.was_retained && volume.phase == VolumePhase::Ready {
            retain(state, &volume, &finding.name).await?;
        }
    }
    Ok(())
}

/// Takes a volume out of users' sight that one of them had deleted, under the name that it had then.
/// Without a snapshot in the records nothing would keep it: such a one stays in sight.
async fn retain(state: &State, volume: &VolumeRecord, name: &str) -> Result<(), Error> {
    if !state.snapshots.keeps(volume.id.0) {
        return Ok(());
    }
    crate::volume::volumes::free_name(state, volume).await?;
    let change = |volume: &mut VolumeRecord| {
        let was_shown = volume.phase == VolumePhase::Ready;
        if was_shown {
            volume.phase = VolumePhase::Retained;
            name.clone_into(&mut volume.spec.name);
            volume.generation += 1;
        }
        Ok(was_shown)
    };
    let updated = state.volumes.update(&volume.id.0.to_string(), change).await?;
    if let Some((volume, true)) = updated {
        let message = "it was deleted before the records were lost, and is kept for its snapshots";
        state.events.record(Severity::Normal, about_volume(&volume), "VolumeRetained", message);
    }
    Ok(())
}

async fn adopt(
    state: &State,
    volume: &VolumeRecord,
    volume_name: &str,
    found: &FoundSnapshot,
) -> Result<(), Error> {
    let id = found.id.to_string();
    if state.snapshots.records.get(&id).is_some() {
        return Ok(());
    }
    let is_copy = volume.mirror.as_ref().is_some_and(|mirror| !mirror.is_primary);
    let short = format!("found-{}", &id[..8]);
    let name = if state.snapshots.named(&short).is_none() { short } else { format!("found-{id}") };
    let named = SnapshotName { snapshot_name: name.clone(), snapshot_id: Text(found.id) };
    if state.snapshots.names.create(named.clone()).await?.is_err() {
        let take = |record: &mut SnapshotName| {
            record.clone_from(&named);
            Ok(())
        };
        state.snapshots.names.update(&name, take).await?;
    }
    let now_ms = now_ms();
    let record = SnapshotRecord {
        id: Text(found.id),
        name,
        volume: volume.id,
        volume_name: volume_name.to_owned(),
        phase: SnapshotPhase::Ready,
        wished_ms: now_ms,
        cut: Some(Cut {
            lsn: found.lsn,
            epoch: 0,
            chain: 0,
            // Pools do not know it.
            at_ms: now_ms,
            size_bytes: found.blocks.saturating_mul(BLOCK_SIZE as u64),
        }),
        schedule: String::new(),
        // Pools do not know it either.
        group: None,
        failure: String::new(),
        used_by: Vec::new(),
        made_for: String::new(),
        // Nobody but its mirror cuts a copy.
        point: is_copy.then(|| Text(point_of(found.id, volume.id.0))),
    };
    if let Ok(record) = state.snapshots.records.create(record).await? {
        let message = format!(
            "snapshot {:?}, as of LSN {}: the pools hold it, and the records had no name and no time \
             of it; delete it, or keep it under this name",
            record.name, found.lsn
        );
        state.events.record(Severity::Warning, about(&record), "SnapshotFound", message);
    }
    Ok(())
}

async fn forget_gone(
    state: &State,
    volume: VolumeId,
    held: &HashSet<SnapshotId>,
) -> Result<(), Error> {
    for snapshot in state.snapshots.of_volume(volume) {
        let is_gone = snapshot.phase == SnapshotPhase::Ready && !held.contains(&snapshot.id.0);
        if !is_gone || !state.snapshots.records.remove(&snapshot.name(), |_| true).await? {
            continue;
        }
        state.snapshots.free_name(&snapshot).await?;
        let message = format!(
            "snapshot {:?}: no replica has it; it was deleted after the records were backed up",
            snapshot.name
        );
        state.events.record(Severity::Warning, about(&snapshot), "SnapshotGone", message);
    }
    Ok(())
}
