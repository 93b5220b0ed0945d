//! Replicas at rest: all hold the same, that of the one history and of its snapshots; a verification
//! finds what rot may have hit, all of it; and what was trimmed gives its room back.

use std::collections::BTreeMap;

use quoin_replication::primary::{ChangedRange, ChangesAnswer, VerifyReport};
use quoin_types::message::{Content, ReadView, Slot};
use quoin_types::{BLOCK_SIZE, Lsn, ReplicaGuid};

use super::{Broken, Checker, Observation, Scene, broken};
use crate::content::{self, Tags};

/// Segments that a replica writes to: clients' blocks, moved ones, nodes of its map.
const OPEN_UNITS: u64 = 3;
/// Blocks of one read.
const READ_BLOCKS: usize = 256;

/// By block, its content and the LSN that put it there.
type Image = BTreeMap<u64, (Lsn, Tags)>;

#[derive(Default)]
pub(crate) struct AtRest {
    /// By replica, the version of each block that is stable there.
    versions: BTreeMap<ReplicaGuid, Vec<Lsn>>,
}

impl Checker for AtRest {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match seen {
            Observation::Reverted { .. } => self.check_versions(scene),
            Observation::AtRest => {
                self.check_versions(scene)?;
                check_identical(scene)?;
                check_snapshots(scene)?;
                check_pulls(scene)
            }
            Observation::Verified { report } => check_verification(scene, report),
            Observation::Emptied => {
                self.check_versions(scene)?;
                check_identical(scene)?;
                check_space(scene)
            }
            _ => Ok(()),
        }
    }
}

impl AtRest {
    /// No block's version ever falls below one that was stable: all that asks what changed since a
    /// point leans on that. Stable is what enough replicas have on media. One that loses its cache may
    /// lack it: its history then ends before it, and the replica is not in sync until it is fed again.
    fn check_versions(&mut self, scene: &mut Scene<'_>) -> Result<(), Broken> {
        let blocks = scene.setup.volume_blocks;
        for pool in scene.known_pools() {
            if scene.may_be_damaged(pool) {
                continue;
            }
            let guid = scene.pools[pool].member.guid;
            let has_lost = scene.pools[pool].cache_lost;
            let (mut slots, mut read) = (Vec::new(), Ok(()));
            let (mut stable, mut last) = (Lsn::ZERO, Lsn::ZERO);
            scene.pools[pool].storage.with(guid, &mut |store| {
                let state = store.state();
                (stable, last) = (state.stable, state.position.lsn);
                for lba in (0..blocks).step_by(READ_BLOCKS) {
                    let count = (blocks - lba).min(READ_BLOCKS as u64) as u32;
                    if read.is_ok() {
                        read = store.read(ReadView::Live, lba, count, false, &mut slots);
                    }
                }
            });
            if read.is_err() {
                continue;
            }
            let before = self.versions.entry(guid).or_default();
            before.resize(blocks as usize, Lsn::ZERO);
            for slot in &slots {
                for block in slot.lba..slot.lba + u64::from(slot.blocks) {
                    let known = &mut before[block as usize];
                    if has_lost && last < *known {
                        continue;
                    }
                    if slot.version < *known {
                        let detail = format!(
                            "block {block} of pool {pool} was of version {known} and stable, and \
                             is of version {}",
                            slot.version
                        );
                        return broken("VersionsMonotone", detail);
                    }
                    if slot.version <= stable {
                        *known = slot.version;
                    }
                }
            }
        }
        Ok(())
    }
}

/// All replicas that are in sync hold the same slots, and those of the one history.
fn check_identical(scene: &mut Scene<'_>) -> Result<(), Broken> {
    let Some(path) = scene.lineage.path(scene.served_epoch) else { return Ok(()) };
    let image = scene.lineage.image(scene.setup.run, path, Lsn(u64::MAX));
    for pool in scene.known_pools() {
        check_held(scene, pool, ReadView::Live, &image)?;
    }
    Ok(())
}

/// All replicas list the snapshots of the history, and hold what it held then.
fn check_snapshots(scene: &mut Scene<'_>) -> Result<(), Broken> {
    let Some(path) = scene.lineage.path(scene.served_epoch) else { return Ok(()) };
    let listed = scene.lineage.snapshots(path);
    let images = listed.iter().map(|(_, lsn)| scene.lineage.image(scene.setup.run, path, *lsn));
    let images: Vec<Image> = images.collect();
    if let Some(detail) = scene.operators.snapshots.differs_from(&listed) {
        return broken("SnapshotSurvives", detail);
    }
    for pool in scene.known_pools() {
        let guid = scene.pools[pool].member.guid;
        let mut found = Vec::new();
        scene.pools[pool].storage.with(guid, &mut |store| {
            let users = store.snapshots().into_iter().filter(|s| !s.hidden);
            found = users.map(|s| (s.id, s.lsn)).collect();
        });
        if found != listed {
            let detail = format!("pool {pool} lists {found:?} and the history {listed:?}");
            return broken("SnapshotSurvives", detail);
        }
        for ((id, _), image) in listed.iter().zip(&images) {
            // Nobody grows a volume of these worlds.
            check_held(scene, pool, ReadView::Snapshot(*id), image)?;
        }
    }
    Ok(())
}

/// Every part of a snapshot that was answered names what changed, all of it and nothing else, and has
/// the bytes that the history had then.
fn check_pulls(scene: &mut Scene<'_>) -> Result<(), Broken> {
    let Some(path) = scene.lineage.path(scene.served_epoch) else { return Ok(()) };
    let mut images = BTreeMap::<Lsn, Image>::new();
    for (asked, answer) in scene.operators.pulls.answered() {
        let ChangesAnswer::Part { ranges, slots, next } = answer else { continue };
        if asked.request.to.is_none() {
            // Of a moment that the history does not know.
            continue;
        }
        let image = images
            .entry(asked.to)
            .or_insert_with(|| scene.lineage.image(scene.setup.run, path, asked.to));
        let (request, from) = (&asked.request, asked.from);
        let end = next.unwrap_or(scene.setup.volume_blocks);
        for block in request.cursor..end {
            let (version, tags) = image.get(&block).copied().unwrap_or_default();
            let within = |r: &&ChangedRange| r.lba <= block && block < r.lba + r.blocks;
            let named = ranges.iter().find(within).map(|range| range.hole);
            let data = slots.iter().find(|slot| slot.lba == block).map(|slot| &slot.content);
            // A block that was written with zeroes may be kept as one, or as a hole.
            let may_be_hole = tags == content::ZERO;
            let is_right = match named {
                _ if version <= from => named.is_none(),
                None => may_be_hole && from == Lsn::ZERO,
                Some(true) => may_be_hole && from > Lsn::ZERO,
                Some(false) if !request.want_data => true,
                Some(false) => matches!(data, Some(Content::Data { data, .. })
                    if content::tags_of_block(scene.setup.run, block, data) == Ok(tags)),
            };
            if !is_right {
                let detail = format!(
                    "{request:?}: block {block} of LSN {version} is answered as {named:?} (hole)                      with {data:?}"
                );
                return broken("SnapshotComplete", detail);
            }
        }
    }
    Ok(())
}

/// Compares what a pool holds of a view with what the history had then.
fn check_held(
    scene: &mut Scene<'_>,
    pool: usize,
    view: ReadView,
    image: &Image,
) -> Result<(), Broken> {
    let blocks = scene.setup.volume_blocks;
    let guid = scene.pools[pool].member.guid;
    let mut slots = Vec::new();
    let mut result = Ok(());
    scene.pools[pool].storage.with(guid, &mut |store| {
        let mut lba = 0;
        while lba < blocks && result.is_ok() {
            let count = (blocks - lba).min(READ_BLOCKS as u64) as u32;
            result = store.read(view, lba, count, true, &mut slots);
            lba += u64::from(count);
        }
    });
    if let Err(error) = result {
        let detail = format!("{view:?} of pool {pool} cannot be read at rest: {error}");
        return broken("Identical", detail);
    }
    let mut lost = Vec::new();
    for slot in &slots {
        lost.extend(differences(scene, pool, slot, image));
    }
    let Some((rule, first)) = lost.first() else { return Ok(()) };
    let count = lost.len();
    broken(rule, format!("{view:?} of pool {pool} at rest, {count} blocks differ: {first}"))
}

/// Blocks of a slot that are not as in the image: the rule that each breaks, and how.
fn differences(
    scene: &Scene<'_>,
    pool: usize,
    slot: &Slot,
    image: &Image,
) -> Vec<(&'static str, String)> {
    let mut lost = Vec::new();
    for block in slot.lba..slot.lba + u64::from(slot.blocks) {
        let expected = image.get(&block).copied().unwrap_or_default();
        let found = match &slot.content {
            Content::Hole => Ok(content::ZERO),
            Content::Data { data, .. } => {
                debug_assert_eq!(data.len(), BLOCK_SIZE);
                content::tags_of_block(scene.setup.run, block, data).map_err(Some)
            }
            Content::Bad => Err(None),
        };
        // Rot in blocks that were not read since is found by the next read or scrub.
        if found == Err(None) && scene.may_be_damaged(pool) {
            continue;
        }
        if found != Ok(expected.1) || slot.version != expected.0 {
            let rule = match found == Ok(expected.1) && slot.content == Content::Hole {
                true => "HolesHaveVersions",
                false => "Identical",
            };
            let what = format!(
                "block {block}: {found:?} of LSN {} instead of {:?} of LSN {}",
                slot.version, expected.1, expected.0
            );
            lost.push((rule, what));
        }
    }
    lost
}

/// All replicas agree, and what a verification finds bad is what rot may have hit.
fn check_verification(scene: &mut Scene<'_>, report: &VerifyReport) -> Result<(), Broken> {
    let is_whole = report.failed.is_empty()
        && (report.checked_blocks, report.unsettled) == (scene.setup.volume_blocks, 0);
    if !is_whole || report.differing > 0 {
        return broken("VerifyAgrees", format!("at rest: {report:?}"));
    }
    if report.lost > 0 && !scene.may_be_unreadable() {
        return broken("VerifyAgrees", format!("no good copy is left: {report:?}"));
    }
    for pool in scene.known_pools() {
        let member = scene.pools[pool].member;
        let Some(seen) = report.members.iter().find(|seen| seen.member == member) else {
            return broken("VerifyAgrees", format!("pool {pool} was never asked"));
        };
        let (found, left_out) = (seen.bad, seen.left_out);
        if found > 0 && !scene.may_be_damaged(pool) {
            let detail = format!("pool {pool} has {found} bad blocks, and no rot hit it");
            return broken("VerifyFindsRot", detail);
        }
        let is_bad = bad_blocks(scene, pool);
        if is_bad > found && left_out.is_empty() {
            let detail = format!("pool {pool} has {is_bad} bad blocks, {found} were found");
            return broken("VerifyFindsRot", detail);
        }
    }
    Ok(())
}

/// Blocks of the live view that cannot be read well now.
fn bad_blocks(scene: &mut Scene<'_>, pool: usize) -> u64 {
    let (guid, blocks) = (scene.pools[pool].member.guid, scene.setup.volume_blocks);
    let mut bad = 0;
    scene.pools[pool].storage.with(guid, &mut |store| {
        for lba in (0..blocks).step_by(READ_BLOCKS) {
            let (mut slots, count) = (Vec::new(), (blocks - lba).min(READ_BLOCKS as u64) as u32);
            if store.read(ReadView::Live, lba, count, true, &mut slots).is_ok() {
                let bad_ones = slots.iter().filter(|slot| slot.content == Content::Bad);
                bad += bad_ones.map(|slot| u64::from(slot.blocks)).sum::<u64>();
            }
        }
    });
    bad
}

/// Nothing is live any more but the map that says so: all room is free again, but for the segments
/// that are being written to.
fn check_space(scene: &mut Scene<'_>) -> Result<(), Broken> {
    for pool in scene.known_pools() {
        if scene.may_be_damaged(pool) {
            continue;
        }
        let emptied = scene.pools[pool].member.guid;
        let space = match scene.pools[pool].storage.space_at_rest(emptied) {
            Ok(Some(space)) => space,
            Ok(None) => continue,
            Err(error) => {
                let detail = format!("pool {pool} cannot be cleaned up at rest: {error}");
                return broken("SpaceReturns", detail);
            }
        };
        let most = OPEN_UNITS * space.replicas * space.unit_bytes + space.left_bytes;
        if space.used_bytes != space.allocated_bytes || space.used_bytes > most {
            return broken("SpaceReturns", format!("pool {pool} was emptied: {space:?}"));
        }
    }
    Ok(())
}
