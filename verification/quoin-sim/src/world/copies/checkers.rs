//! Promises of a copy, held against the histories of both volumes.

use std::collections::BTreeMap;

use quoin_cluster::mirror::{Record, Role, Transfer};
use quoin_types::Lsn;
use quoin_types::ids::{PointId, SnapshotId};

use super::source::snapshot;
use super::{COPY, Copies, SOURCE};
use crate::content::{Tags, ZERO};
use crate::world::World;

/// Content of each block that was ever written.
pub(super) type Image = BTreeMap<u64, Tags>;

impl World {
    /// Content of the history that is served, up to an LSN.
    fn image(&self, upto: Lsn) -> Option<Image> {
        let lineage = &self.checkers.lineage;
        let path = lineage.path(self.checkers.durability.served_epoch())?;
        let image = lineage.image(self.setup.run, path, upto);
        Some(image.into_iter().map(|(block, (_, tags))| (block, tags)).collect())
    }

    fn image_of(&self, id: SnapshotId) -> Option<Image> {
        let made = self.operators.snapshots.made();
        let (_, lsn) = made.iter().find(|(made, _)| *made == id)?;
        self.image(*lsn)
    }
}

/// The first block before `end` that differs.
fn difference(one: &Image, other: &Image, end: u64) -> Option<(u64, Tags, Tags)> {
    let of = |image: &Image, block| image.get(&block).copied().unwrap_or(ZERO);
    (0..end).map(|block| (block, of(one, block), of(other, block))).find(|(_, a, b)| a != b)
}

impl Copies {
    fn blocks(&self) -> u64 {
        self.worlds[COPY].setup.volume_blocks
    }

    /// A point of the copy counts from here on.
    pub(super) fn check_complete(&mut self, point: PointId) {
        let images = [SOURCE, COPY].map(|side| self.worlds[side].image_of(snapshot(point)));
        let [Some(source), Some(copy)] = images else {
            let detail = format!("{point} is complete, and not on both sides");
            return self.worlds[COPY].violate("CopyIsThePoint", detail);
        };
        self.counts.checked += self.blocks();
        if let Some((block, has, copied)) = difference(&source, &copy, self.blocks()) {
            let detail = format!("{point}: block {block} is {has:?}, and {copied:?} in the copy");
            self.worlds[COPY].violate("CopyIsThePoint", detail);
        }
    }

    /// Clients use the copy from here on: its view is the point.
    pub(super) fn check_promoted(&mut self, point: PointId) {
        let copy = &self.worlds[COPY];
        let (Some(live), Some(cut)) = (copy.image(Lsn(u64::MAX)), copy.image_of(snapshot(point)))
        else {
            let detail = format!("{point} is promoted, and is not there");
            return self.worlds[COPY].violate("CopyIsThePoint", detail);
        };
        if let Some((block, has, shown)) = difference(&cut, &live, self.blocks()) {
            let detail = format!("{point}: block {block} is {has:?}, and {shown:?} is shown");
            self.worlds[COPY].violate("CopyIsThePoint", detail);
        }
    }

    /// A point was made on a side: the source's names its content, and the copy's is the same.
    pub(super) fn check_cut(&mut self, side: usize, point: PointId) {
        let Some(image) = self.worlds[side].image_of(snapshot(point)) else { return };
        let blocks = self.blocks();
        let Some(brains) = &mut self.brains else { return };
        let role = brains.halves[side].stored().role;
        let Some(named) = brains.named.get(&point) else {
            if role.is_primary() || role == Role::Demoting {
                brains.named.insert(point, image);
            }
            return;
        };
        self.counts.checked += blocks;
        if let Some((block, has, copied)) = difference(named, &image, blocks) {
            let detail = format!(
                "{side}: {point} is cut as {role:?}: block {block} is {has:?} at its source, and \
                 {copied:?} here"
            );
            self.worlds[side].violate("DigestMatches", detail);
        }
    }

    pub(super) fn check_recorded(&mut self, side: usize, before: &Record, after: &Record) {
        let Some(brains) = &mut self.brains else { return };
        if after.role == Role::Promoting && before.role != Role::Promoting {
            brains.forced += u64::from(after.claims.is_forced);
        }
        if after.points.complete != before.points.complete && after.role == Role::Secondary {
            self.counts.completed += 1;
            if let Some(point) = after.points.complete
                && self.worlds[side].image_of(snapshot(point)).is_none()
            {
                let detail = format!("{side}: {point} is complete and is not there");
                self.worlds[side].violate("PointMeansAllMembers", detail);
            }
        }
        if after.role == Role::Primary && before.role == Role::Promoting {
            self.check_primary(side, before, after);
        }
    }

    /// A side is promoted: it shows its point, and without force all that was acknowledged.
    fn check_primary(&mut self, side: usize, before: &Record, after: &Record) {
        let Some(brains) = &mut self.brains else { return };
        brains.promotions += 1;
        brains.unseen[side] = after.chain.top().at;
        let named = after.chain.top().at.and_then(|point| brains.named.get(&point).cloned());
        let (Some(live), Some(named)) = (self.worlds[side].image(Lsn(u64::MAX)), named) else {
            let detail = format!("{side}: {:?} is no point", after.chain.top());
            return self.worlds[side].violate("PromoteShowsCompletePoint", detail);
        };
        self.counts.checked += self.blocks();
        if let Some((block, has, shown)) = difference(&named, &live, self.blocks()) {
            let detail = format!(
                "{side}: {:?}: block {block} is {has:?}, and {shown:?} is shown",
                after.chain.top()
            );
            return self.worlds[side].violate("PromoteShowsCompletePoint", detail);
        }
        let is_own = before.chain.top().generation.cluster == after.cluster;
        if before.claims.is_forced || is_own {
            return;
        }
        let Some(former) = self.worlds[1 - side].image(Lsn(u64::MAX)) else { return };
        if let Some((block, had, shown)) = difference(&former, &live, self.blocks()) {
            let detail = format!("{side}: block {block} was {had:?}, and is {shown:?}");
            self.worlds[side].violate("PlannedMoveLosesNothing", detail);
        }
    }

    /// Clients begin to use a side that was promoted: it shows its point yet.
    pub(super) fn check_published(&mut self, side: usize) {
        let Some(brains) = &mut self.brains else { return };
        let Some(point) = brains.unseen[side].take() else { return };
        let named = brains.named.get(&point).cloned();
        let (Some(live), Some(named)) = (self.worlds[side].image(Lsn(u64::MAX)), named) else {
            return;
        };
        if let Some((block, has, shown)) = difference(&named, &live, self.blocks()) {
            let detail = format!(
                "{side}: {point}: block {block} is {has:?}, and {shown:?} is shown to the first client"
            );
            self.worlds[side].violate("PromoteShowsCompletePoint", detail);
        }
    }

    pub(super) fn check_sides(&mut self) {
        let is_used = self
            .worlds
            .iter()
            .all(|world| world.operators.copying.is_attached && !world.operators.copying.is_over);
        let is_planned =
            self.brains.as_ref().is_some_and(|brains| brains.forced == 0 && brains.restored == 0);
        if is_used && is_planned {
            self.worlds[COPY].violate("NoSecondPrimaryWithoutForce", "clients use both sides");
        }
    }

    /// Returns true if the complete point of the copy is all that the primary shows.
    pub(super) fn has_all(&mut self, primary: usize, complete: PointId) -> bool {
        let live = self.worlds[primary].image(Lsn(u64::MAX));
        let copy = self.worlds[1 - primary].image_of(snapshot(complete));
        let (Some(live), Some(copy)) = (live, copy) else { return false };
        difference(&live, &copy, self.blocks()).is_none()
    }

    /// Checks what targets of copies wrote, and what they say of it.
    pub(super) fn check_feeds(&mut self) {
        for side in [SOURCE, COPY] {
            let submitted = std::mem::take(&mut self.worlds[side].operators.copying.submitted);
            let ordered = self.ordered(side);
            for (target, order) in &submitted {
                let takes = order.and_then(|order| order.takes);
                let is_other =
                    ordered.is_some_and(|(transfer, token)| takes != Some((transfer, token)));
                if takes.is_none() || self.serves(side, *target) && is_other {
                    let detail = format!(
                        "target {target} of {side} writes slots under {order:?}, and {ordered:?} is recorded"
                    );
                    return self.worlds[side].violate("FedByOrder", detail);
                }
            }
            for target in 0..self.worlds[side].targets.len() {
                self.check_stable(side, target);
            }
        }
    }

    /// The transfer that a side takes by its record.
    fn ordered(&self, side: usize) -> Option<(Transfer, u128)> {
        let Some(brains) = &self.brains else {
            let receiving = self.taker.receiving.filter(|now| now.is_begun && side == COPY);
            return receiving.map(|now| (now.transfer, now.token));
        };
        let receiving = brains.halves[side].stored().receiving;
        receiving.filter(|now| now.is_begun).map(|now| (now.transfer, now.token))
    }

    /// Returns true if a target serves the newest epoch.
    fn serves(&self, side: usize, target: usize) -> bool {
        let copy = &self.worlds[side];
        let process = copy.targets[target].process.as_ref();
        let newest = copy.checkers.durability.served_epoch();
        process.is_some_and(|process| process.serving == Some(newest))
    }

    /// Blocks that count as stable are on media, and as they are at the point.
    fn check_stable(&mut self, side: usize, target: usize) {
        if !self.serves(side, target) {
            return;
        }
        let Some(told) = self.worlds[side].told(target) else { return };
        let Some(progress) = told.progress else { return };
        let Some((Transfer { point, .. }, token)) = progress.order.takes else { return };
        let key = (side, target, self.worlds[side].targets[target].life, token);
        let stable_to = progress.stable_to;
        let before = self.stable.insert(key, stable_to).unwrap_or(0);
        let is_current = self.ordered(side).is_some_and(|(_, now)| now == token);
        if stable_to <= before || !is_current {
            return;
        }
        let Some(expected) = self.worlds[1 - side].image_of(snapshot(point)) else { return };
        let Some(stable) = self.worlds[side].image(told.status.stable) else { return };
        self.counts.checked += stable_to;
        if let Some((block, has, found)) = difference(&expected, &stable, stable_to) {
            let detail = format!(
                "target {target} of {side} says that blocks of {point} before {stable_to} are stable: \
                 block {block} is {found:?} there up to LSN {}, not {has:?}",
                told.status.stable
            );
            self.worlds[side].violate("StableIsStable", detail);
        }
    }
}
