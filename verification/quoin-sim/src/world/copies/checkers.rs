//! Promises of a copy, held against the histories of both volumes.

use std::collections::BTreeMap;

use quoin_cluster::mirror::Transfer;
use quoin_types::Lsn;
use quoin_types::ids::{PointId, SnapshotId};

use super::source::snapshot;
use super::taker::Receiving;
use super::{COPY, Copies, SOURCE};
use crate::content::{Tags, ZERO};
use crate::world::World;

/// Content of each block that was ever written.
type Image = BTreeMap<u64, Tags>;

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

    /// Checks what targets of the copy wrote, and what they say of it.
    pub(super) fn check_feeds(&mut self) {
        let submitted = std::mem::take(&mut self.worlds[COPY].operators.copying.submitted);
        for (target, order) in &submitted {
            let takes = order.and_then(|order| order.takes);
            let ordered = self.taker.receiving.filter(|receiving| receiving.is_begun);
            let is_other = |now: &Receiving| takes != Some((now.transfer, now.token));
            if takes.is_none() || self.serves(*target) && ordered.as_ref().is_some_and(is_other) {
                let detail = format!(
                    "target {target} writes slots under {order:?}, and {ordered:?} is recorded"
                );
                return self.worlds[COPY].violate("FedByOrder", detail);
            }
        }
        for target in 0..self.worlds[COPY].targets.len() {
            self.check_stable(target);
        }
    }

    /// Returns true if a target serves the newest epoch.
    fn serves(&self, target: usize) -> bool {
        let copy = &self.worlds[COPY];
        let process = copy.targets[target].process.as_ref();
        let newest = copy.checkers.durability.served_epoch();
        process.is_some_and(|process| process.serving == Some(newest))
    }

    /// Blocks that count as stable are on media, and as they are at the point.
    fn check_stable(&mut self, target: usize) {
        if !self.serves(target) {
            return;
        }
        let Some(told) = self.worlds[COPY].told(target) else { return };
        let Some(progress) = told.progress else { return };
        let Some((Transfer { point, .. }, token)) = progress.order.takes else { return };
        let key = (target, self.worlds[COPY].targets[target].life, token);
        let stable_to = progress.stable_to;
        let before = self.stable.insert(key, stable_to).unwrap_or(0);
        let is_current = self.taker.receiving.is_some_and(|now| now.token == token && now.is_begun);
        if stable_to <= before || !is_current {
            return;
        }
        let Some(expected) = self.worlds[SOURCE].image_of(snapshot(point)) else { return };
        let Some(stable) = self.worlds[COPY].image(told.status.stable) else { return };
        self.counts.checked += stable_to;
        if let Some((block, has, found)) = difference(&expected, &stable, stable_to) {
            let detail = format!(
                "target {target} says that blocks of {point} before {stable_to} are stable: block \
                 {block} is {found:?} there up to LSN {}, not {has:?}",
                told.status.stable
            );
            self.worlds[COPY].violate("StableIsStable", detail);
        }
    }
}
