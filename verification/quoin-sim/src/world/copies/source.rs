//! The source: its points, as the record of its controller has them.

use quoin_cluster::mirror::Transfer;
use quoin_types::ids::{PointId, SnapshotId};

use super::taker::Want;
use super::{Copies, CopyEvent, SOURCE};

/// Ids of points, and of the snapshots that they are.
const FIRST_POINT: u128 = 1 << 40;

pub(super) fn snapshot(point: PointId) -> SnapshotId {
    SnapshotId(point.0)
}

/// Word of the source's controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Offer {
    pub serial: u64,
    pub transfer: Option<Transfer>,
    /// Points that may be the base of an offer yet.
    pub kept: Vec<PointId>,
}

/// Record of the source's controller, and what it was told.
#[derive(Debug)]
pub(super) struct Source {
    points_left: u64,
    named: u128,
    cutting: Option<PointId>,
    offered: Option<Transfer>,
    /// Points that both sides hold, the newest last.
    common: Vec<PointId>,
    serial: u64,
    /// Not recorded.
    heard: Option<Want>,
}

impl Source {
    pub fn new(points_left: u64) -> Self {
        let (offered, common, heard) = (None, Vec::new(), None);
        Self { points_left, named: FIRST_POINT, cutting: None, offered, common, serial: 0, heard }
    }

    pub fn hears(&mut self, want: Want) {
        if self.heard.as_ref().is_none_or(|heard| heard.serial < want.serial) {
            self.heard = Some(want);
        }
    }

    /// Its controller dies.
    pub fn forgets(&mut self) {
        self.heard = None;
    }

    /// The last point was copied, and no other one is to come.
    pub fn is_done(&self) -> bool {
        self.points_left == 0 && self.offered.is_none() && self.cutting.is_none()
    }
}

impl Copies {
    pub(super) fn look_at_source(&mut self) {
        if self.worlds[SOURCE].is_over() {
            return;
        }
        let made: Vec<SnapshotId> =
            self.worlds[SOURCE].operators.snapshots.made().iter().map(|(id, _)| *id).collect();
        let is_made = |point: PointId| made.contains(&snapshot(point));
        if let Some(complete) = self.source.heard.as_ref().and_then(|heard| heard.complete)
            && is_made(complete)
            && self.source.common.last().is_none_or(|last| *last < complete)
        {
            self.source.common.push(complete);
            self.source.offered.take_if(|offered| offered.point == complete);
            self.counts.completed += 1;
            // The one before stays for an offer whose base it is.
            if self.source.common.len() > 2 {
                let dropped = self.source.common.remove(0);
                self.worlds[SOURCE].delete_snapshot(snapshot(dropped));
            }
        }
        if let Some(point) = self.source.cutting.filter(|point| is_made(*point)) {
            self.source.cutting = None;
            let base = self.choose_base();
            self.source.offered = Some(Transfer { point, base });
        }
        let is_last = self.is_calm() && self.source.points_left > 1;
        if is_last {
            self.source.points_left = 1;
        }
        if self.source.offered.is_none()
            && self.source.cutting.is_none()
            && self.source.points_left > u64::from(!self.is_calm())
        {
            self.source.points_left -= 1;
            self.source.named += 1;
            let point = PointId(self.source.named);
            self.source.cutting = Some(point);
            self.worlds[SOURCE].wish_for_snapshot(snapshot(point));
        }
        self.source.serial += 1;
        let (serial, transfer) = (self.source.serial, self.source.offered);
        let offer = Offer { serial, transfer, kept: self.source.common.clone() };
        if self.is_linked && !self.is_lost() {
            let due = self.now() + self.delay();
            self.schedule.at(due, CopyEvent::Offered(offer));
        }
    }

    /// The transfer that the copy is ready to take.
    pub(super) fn wanted(&self) -> Option<(Transfer, u128, u64)> {
        let heard = self.source.heard.as_ref().and_then(|heard| heard.ordered);
        heard.filter(|(transfer, ..)| Some(*transfer) == self.source.offered)
    }

    fn choose_base(&mut self) -> Option<PointId> {
        let common = self.source.common.clone();
        match self.random.below(10) {
            0 => None,
            1 | 2 => common.first().copied(),
            _ => common.last().copied(),
        }
    }
}
