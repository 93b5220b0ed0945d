//! Changes of a volume's record that its mirror orders: the role that its pools keep, and fences.

use quoin_types::Term;
use quoin_types::ids::{GroupId, PointId, SnapshotId, VolumeId};

use crate::Refusal;
use crate::mirror::Keepsake;
use crate::ownership::grants::fence;
use crate::records::{Text, VolumeMirror, VolumeRecord};

/// The snapshot of a member that is a point. Ids of points are drawn at random, and so are those of volumes.
pub fn snapshot_of(point: PointId, volume: VolumeId) -> SnapshotId {
    SnapshotId(point.0 ^ volume.0.rotate_left(64))
}

/// The point that a snapshot of a member is, if it is one.
pub fn point_of(snapshot: SnapshotId, volume: VolumeId) -> PointId {
    PointId(snapshot.0 ^ volume.0.rotate_left(64))
}

/// Takes role and generation over, for pools to keep.
pub fn keep(volume: &mut VolumeRecord, group: GroupId, keepsake: Keepsake) {
    let is_kept = |mirror: &VolumeMirror| mirror.group.0 == group && mirror.keepsake() == keepsake;
    if volume.mirror.as_ref().is_some_and(is_kept) {
        return;
    }
    let generation = keepsake.begun.generation;
    let before = volume.mirror.take().filter(|mirror| mirror.group.0 == group);
    let (fence, fenced_epoch, is_fenced) =
        before.map_or_else(Default::default, |m| (m.fence, m.fenced_epoch, m.is_fenced));
    volume.mirror = Some(VolumeMirror {
        group: Text(group),
        is_primary: keepsake.is_primary,
        number: generation.number,
        cluster: Text(generation.cluster),
        claim: Text(PointId(generation.id)),
        at: keepsake.begun.at.map(Text),
        // The generation of the record after this change.
        since_generation: volume.generation + 1,
        fence,
        fenced_epoch,
        is_fenced,
    });
}

/// Takes everything back that was granted: attachments end, and an epoch is used up. A repeat of one fence
/// does nothing. Returns the nodes that lost the volume.
///
/// # Errors
/// As those of [`fence`].
pub fn fence_for(
    volume: &mut VolumeRecord,
    number: u128,
    term: Term,
) -> Result<Vec<String>, Refusal> {
    let Some(mirror) = &volume.mirror else { return Ok(Vec::new()) };
    if mirror.fence.0.0 == number {
        return Ok(Vec::new());
    }
    let nodes = volume.attachments.drain(..).map(|attachment| attachment.node).collect();
    volume.used.end(volume.opened.epoch);
    volume.opened.owner = None;
    // Its target may close it meanwhile: what opens it next waits for no lease then.
    fence(volume, false, term)?;
    let epoch = volume.opened.epoch;
    if let Some(mirror) = &mut volume.mirror {
        (mirror.fence, mirror.fenced_epoch, mirror.is_fenced) =
            (Text(PointId(number)), epoch, false);
    }
    Ok(nodes)
}

/// A target serves the volume at this epoch: an open quorum of its pools has promised it.
pub fn is_opened(volume: &mut VolumeRecord, epoch: u64) {
    if let Some(mirror) = &mut volume.mirror {
        mirror.is_fenced |= mirror.fence.0.0 != 0 && epoch > mirror.fenced_epoch;
    }
}

/// The volume is mirrored no more.
pub fn release(volume: &mut VolumeRecord, group: GroupId) {
    volume.mirror.take_if(|mirror| mirror.group.0 == group);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirror::{Begun, ClusterId, Generation};

    fn keepsake(number: u64) -> Keepsake {
        let generation = Generation { number, cluster: ClusterId(7), id: 9 };
        Keepsake { is_primary: true, begun: Begun { generation, at: Some(PointId(3)) } }
    }

    #[test]
    fn a_role_is_kept_since_the_change_that_named_it_and_a_repeat_changes_nothing() {
        let mut volume = crate::records::recorded::volume();
        keep(&mut volume, GroupId(5), keepsake(1));
        let kept = volume.mirror.clone().unwrap();
        assert_eq!((kept.keepsake(), kept.since_generation), (keepsake(1), 13));
        volume.generation = 20;
        keep(&mut volume, GroupId(5), keepsake(1));
        assert_eq!(volume.mirror, Some(kept));
        keep(&mut volume, GroupId(5), keepsake(2));
        assert_eq!(volume.mirror.as_ref().unwrap().since_generation, 21);
        release(&mut volume, GroupId(6));
        assert!(volume.mirror.is_some());
        release(&mut volume, GroupId(5));
        assert_eq!(volume.mirror, None);
    }

    #[test]
    fn a_fence_ends_every_grant_once_and_counts_when_a_later_epoch_was_opened() {
        let mut volume = crate::records::recorded::volume();
        keep(&mut volume, GroupId(5), keepsake(1));
        let nodes = fence_for(&mut volume, 77, Term::default()).unwrap();
        assert_eq!(nodes, ["node-1"]);
        let fenced = volume.opened.epoch;
        assert!(!volume.is_granted() && volume.opened.owner.is_none());
        assert_eq!(fence_for(&mut volume, 77, Term::default()).unwrap(), Vec::<String>::new());
        assert_eq!(volume.opened.epoch, fenced, "a repeat uses up no epoch");
        is_opened(&mut volume, fenced);
        assert!(!volume.mirror.as_ref().unwrap().is_fenced);
        is_opened(&mut volume, fenced + 1);
        assert!(volume.mirror.as_ref().unwrap().is_fenced);
        fence_for(&mut volume, 78, Term::default()).unwrap();
        assert!(!volume.mirror.as_ref().unwrap().is_fenced, "the next one counts for itself");
    }
}
