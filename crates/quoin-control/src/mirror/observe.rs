//! Members of a mirrored group, as the brain is told of them.

use quoin_cluster::mirror::{Observed, Stamp, Transfer};
use quoin_cluster::ownership::mirrored::snapshot_of;
use quoin_cluster::records::{
    Cut, RevertPhase, SnapshotPhase, SnapshotRecord, VolumeMirror, VolumeRecord,
};
use quoin_types::BLOCK_SIZE;
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};

use crate::state::State;
use crate::state::observed::{ReplicaState, VolumeSeen};
use crate::time::now_ms;

/// Returns true if an open quorum of the volume's pools keeps the role that its record has.
pub(crate) fn pools_keep(state: &State, volume: &VolumeRecord) -> bool {
    let Some(mirror) = &volume.mirror else { return false };
    let observed = state.observed();
    let keeps = |replica: &&quoin_cluster::records::ReplicaRecord| {
        let pool = observed.heard_pool(&replica.pool, state.settings.offline_after);
        let seen = pool.and_then(|pool| pool.replicas.get(&replica.guid.0));
        volume.is_known(replica)
            && seen.is_some_and(|seen| {
                seen.state == ReplicaState::Present
                    && seen.record_generation >= mirror.since_generation
            })
    };
    let membership = &volume.membership;
    let needed = quoin_types::membership::open_quorum(membership.rf, membership.cf);
    volume.replicas.iter().filter(keeps).count() >= usize::from(needed)
}

/// Points of a mirror that a volume holds, the oldest cut first.
pub(crate) fn points(state: &State, volume: VolumeId) -> Vec<(PointId, Cut)> {
    let all = state.snapshots.of_volume(volume);
    let held = |s: &std::sync::Arc<SnapshotRecord>| {
        let point = s.point?.0;
        // The snapshot that keeps the loss of a resync has another id, and is a user's.
        let is_point = snapshot_of(point, volume) == s.id.0 && s.phase == SnapshotPhase::Ready;
        is_point.then_some((point, s.cut?))
    };
    let mut points: Vec<_> = all.iter().filter_map(held).collect();
    points.sort_by_key(|(_, cut)| cut.lsn);
    points
}

/// The last report of the target that has the volume now, while it serves.
fn served(state: &State, volume: &VolumeRecord) -> Option<VolumeSeen> {
    let observed = state.observed();
    let seen = observed.volumes.get(&volume.id.0)?;
    let is_it = volume.opened.owner.as_deref() == Some(&seen.node)
        && seen.epoch == volume.opened.epoch
        && volume.is_granted()
        && seen.state == "serving"
        && observed.node_online(&seen.node, state.settings.offline_after);
    is_it.then(|| seen.clone())
}

/// The epoch at which a target serves the volume now.
pub(super) fn serving_epoch(state: &State, volume: &VolumeRecord) -> Option<u64> {
    served(state, volume).map(|seen| seen.epoch)
}

/// The point whose content the live view has. A target that serves knows where the content was changed last;
/// beside that nobody was given leave to change it since the cut.
fn at(
    state: &State,
    volume: &VolumeRecord,
    points: &[(PointId, Cut)],
    seen: Option<&VolumeSeen>,
) -> Option<PointId> {
    let revert = state.snapshots.reverts.get(&volume.id.0.to_string());
    if revert.as_ref().is_some_and(|revert| revert.is_under_way()) {
        return None;
    }
    let reverted = revert.filter(|revert| revert.phase == RevertPhase::Done).and_then(|revert| {
        let to =
            |(point, _): &&(PointId, Cut)| snapshot_of(*point, volume.id.0) == revert.snapshot.0;
        points.iter().find(to).map(|(point, _)| (revert.lsn, *point))
    });
    let cuts = points.iter().map(|(point, cut)| (cut.lsn, *point));
    let newest = cuts.chain(reverted).max_by_key(|(lsn, _)| *lsn);
    if let Some(seen) = seen.filter(|seen| seen.content.lsn != 0)
        && let Some((lsn, point)) = newest
        && lsn >= seen.content.lsn
    {
        return Some(point);
    }
    let (point, cut) = points.last()?;
    let is_untouched = volume.grants.written.is_some_and(|written| cut.epoch > written);
    is_untouched.then_some(*point)
}

/// `serial`: that of this report; `stamp`: of the last orders that were carried out here.
pub(super) fn observe(
    state: &State,
    group: GroupId,
    volume: &VolumeRecord,
    (serial, stamp): (u64, Stamp),
) -> Observed {
    let now = now_ms();
    let seen = served(state, volume);
    let points = points(state, volume.id.0);
    let mirror = volume.mirror.as_ref().filter(|mirror| mirror.group.0 == group);
    let keepsake = mirror.filter(|_| pools_keep(state, volume)).map(VolumeMirror::keepsake);
    let feed = seen.as_ref().and_then(|seen| seen.content.feed.clone());
    let order = feed.as_ref().and_then(|feed| feed.order.clone());
    // Without a target there is nobody whom a late order could reach. One that does not serve, or says
    // nothing of an order, may not have heard of the present one.
    let told = order.as_ref().map(|o| Stamp { term: o.term, version: o.version });
    let is_ordered = state.mirrored.feed(volume.id.0).is_some();
    let stamp = match (&volume.opened.owner, told) {
        (Some(_), Some(told)) => stamp.min(told),
        (Some(_), None) if is_ordered && volume.attachments.is_empty() => Stamp::default(),
        _ => stamp,
    };
    let transfer = order.filter(|order| !order.token.is_empty()).and_then(|order| {
        let point = order.point_id.parse().ok()?;
        let base = order.base_id.parse().ok();
        let token = order.token.parse::<PointId>().ok()?;
        Some((Transfer { point, base }, token.0))
    });
    let feed = feed.filter(|_| transfer.is_some()).unwrap_or_default();
    Observed {
        serial,
        // Detached, nobody changes it at this moment; a target says how it was after its last report but one.
        seen_ms: match (&seen, &volume.opened.owner) {
            (Some(seen), _) => seen.content.after_ms,
            (None, None) => now,
            (None, Some(_)) => 0,
        },
        stamp,
        blocks: volume.size_bytes.div_ceil(BLOCK_SIZE as u64),
        at: at(state, volume, &points, seen.as_ref()),
        points: points.into_iter().map(|(point, _)| point).collect(),
        fenced: mirror.filter(|mirror| mirror.is_fenced).map_or(0, |mirror| mirror.fence.0.0),
        order: transfer,
        taken_to: feed.taken_to,
        stable_to: feed.stable_to,
        is_fed: feed.fed,
        keepsake,
        lost: lost(state, volume),
        is_published: !volume.attachments.is_empty(),
    }
}

/// The snapshot that keeps what the last resync discarded, once it is cut.
fn lost(state: &State, volume: &VolumeRecord) -> Option<PointId> {
    let lost = state.mirrored.of(volume)?.brain().lost?;
    let kept = state.snapshots.records.get(&snapshot_of(lost, volume.id.0).to_string())?;
    (kept.point.is_none() && kept.is_kept()).then_some(lost)
}
