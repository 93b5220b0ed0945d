//! The copy: what the record of its controller has, and the orders that follow from it, as the brain gives them.

use quoin_cluster::mirror::feeding::FeedOrder;
use quoin_cluster::mirror::{Stamp, Transfer};
use quoin_types::ids::{PointId, SnapshotId};

use super::source::{Offer, snapshot};
use super::{COPY, Copies, CopyEvent};
use crate::schedule::SECOND;
use crate::world::copying::Told;

/// Ids of attempts to go back; those of points lie below.
const FIRST_ATTEMPT: u128 = 1 << 50;

/// Word of the copy's controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Want {
    pub serial: u64,
    pub complete: Option<PointId>,
    /// The transfer that is ordered, its token, and the block at which it goes on.
    pub ordered: Option<(Transfer, u128, u64)>,
}

/// A transfer that is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Receiving {
    pub transfer: Transfer,
    pub token: u128,
    pub cursor: u64,
    /// The view is at the base, and no older order is on its way.
    pub is_begun: bool,
}

/// Record of the copy's controller, and what it was told.
#[derive(Debug, Default)]
pub(super) struct Taker {
    version: u64,
    pub receiving: Option<Receiving>,
    pub complete: Option<PointId>,
    /// The copy is promoted: nothing is taken any more, and the view goes back to the complete point.
    is_promoting: bool,
    /// Words that were said.
    serial: u64,
    /// Not recorded: the last word of the other side, the last report of a target, and whether an order was given.
    offer: Option<Offer>,
    report: Option<(u64, Told)>,
    reports: u64,
    attempts: u128,
}

impl Taker {
    pub fn hears(&mut self, offer: Offer) {
        if self.offer.as_ref().is_none_or(|heard| heard.serial < offer.serial) {
            self.offer = Some(offer);
        }
    }

    fn stamp(&self) -> Stamp {
        Stamp { term: 1, version: self.version }
    }
}

/// The copy as its controller sees it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    stamp: Stamp,
    order: Option<(Transfer, u128)>,
    at: Option<PointId>,
    taken_to: u64,
    stable_to: u64,
    is_fed: bool,
}

impl Copies {
    /// A report of a target comes; one that is late counts nowhere.
    pub(super) fn reported(&mut self, serial: u64, told: Told) {
        if self.taker.report.as_ref().is_none_or(|(last, _)| *last < serial) {
            self.taker.report = Some((serial, told));
        }
    }

    /// The controller dies: what is not recorded is gone, and targets are told of no order.
    pub(super) fn kill_taker(&mut self) {
        (self.taker.offer, self.taker.report) = (None, None);
        self.worlds[COPY].operators.copying.order = None;
        let to = self.owner();
        let due = self.now() + self.delay();
        self.schedule.at(due, CopyEvent::Ordered(COPY, to, None));
        self.say(COPY, || "the copy's controller dies".into());
        // Its records are recovered, say: no transfer counts any more. A cut that is wished for stays so.
        let is_cut = self.taker.receiving.is_some_and(|receiving| {
            self.worlds[COPY].operators.snapshots.knows(snapshot(receiving.transfer.point))
        });
        if !is_cut && self.random.percent(30) {
            self.record(None);
        }
    }

    pub(super) fn look_at_copy(&mut self) {
        if self.worlds[COPY].is_over() || self.worlds[COPY].operators.copying.is_over {
            return;
        }
        self.have_told();
        self.mend_epoch(COPY);
        let is_late = self.is_calm() && self.source.is_done();
        let is_last = is_late && self.taker.complete.is_some() && self.taker.receiving.is_none();
        let is_forced = self.is_forced && self.is_calm() && self.taker.complete.is_some();
        if !self.taker.is_promoting && (is_last || is_forced && self.random.one_in(20)) {
            self.taker.is_promoting = true;
            self.record(None);
        }
        if self.taker.is_promoting {
            return self.promote();
        }
        self.follow_offer();
        self.receive();
        self.drop_points();
        self.taker.serial += 1;
        let begun = self.taker.receiving.filter(|receiving| receiving.is_begun);
        let ordered = begun.map(|r| (r.transfer, r.token, r.cursor));
        let want = Want { serial: self.taker.serial, complete: self.taker.complete, ordered };
        if self.is_linked && !self.is_lost() {
            let due = self.now() + self.delay();
            self.schedule.at(due, CopyEvent::Wanted(want));
        }
    }

    /// The target that the record names reports.
    fn have_told(&mut self) {
        let owner = self.worlds[COPY].control.record.owner;
        let Some(told) = self.worlds[COPY].told(owner).filter(|_| !self.is_lost()) else { return };
        self.taker.reports += 1;
        let mut due = self.now() + self.delay();
        if !self.is_calm() && self.random.percent(5) {
            due += self.random.below(2 * SECOND);
        }
        self.schedule.at(due, CopyEvent::Reported(self.taker.reports, Box::new(told)));
    }

    /// Where a late request took an epoch that nobody opens by, no report counts before the next open. In the end
    /// somebody restarts the target.
    pub(super) fn mend_epoch(&mut self, side: usize) {
        let copy = &self.worlds[side];
        let owner = copy.control.record.owner;
        let serving = copy.targets[owner].process.as_ref().and_then(|process| process.serving);
        let is_behind = serving.is_some_and(|epoch| epoch < copy.control.record.epoch);
        if is_behind && self.is_calm() && self.random.one_in(50) {
            self.worlds[side].kill_target(owner);
        }
    }

    fn holds(&self, point: PointId) -> bool {
        let made = self.worlds[COPY].operators.snapshots.made();
        made.iter().any(|(id, _)| *id == snapshot(point))
    }

    /// The last report of the target that has the volume now, while it serves, as the product reads it
    /// (`quoin-control/src/mirror/observe.rs`).
    fn seen(&self) -> Option<Seen> {
        let record = &self.worlds[COPY].control.record;
        let (_, told) = self.taker.report.as_ref()?;
        let is_it =
            told.target == record.owner && told.status.epoch == record.epoch && told.status.serving;
        let progress = told.progress.filter(|_| is_it)?;
        let snapshots = &self.worlds[COPY].operators.snapshots;
        let cuts = snapshots.made().into_iter().map(|(id, lsn)| (lsn, id));
        let reverted = snapshots.reverted.map(|(id, lsn)| (lsn, id));
        let newest = cuts.chain(reverted).max_by_key(|(lsn, _)| *lsn);
        let content = told.status.content_lsn;
        let at = newest.filter(|(lsn, _)| *lsn >= content && !snapshots.detaches_clients());
        Some(Seen {
            stamp: progress.order.stamp,
            order: progress.order.takes,
            at: at.map(|(_, SnapshotId(id))| PointId(id)),
            taken_to: progress.taken_to,
            stable_to: progress.stable_to,
            is_fed: progress.is_fed,
        })
    }

    /// Records a change of the transfer.
    fn record(&mut self, receiving: Option<Receiving>) {
        self.taker.version += 1;
        self.taker.receiving = receiving;
        let version = self.taker.version;
        self.say(COPY, || format!("record {version}: {receiving:?}"));
    }

    fn follow_offer(&mut self) {
        if let Some(Receiving { transfer, is_begun: true, .. }) = self.taker.receiving
            && self.holds(transfer.point)
        {
            self.taker.complete = Some(transfer.point);
            self.check_complete(transfer.point);
            return self.record(None);
        }
        let Some(transfer) = self.taker.offer.as_ref().and_then(|offer| offer.transfer) else {
            return;
        };
        let is_known = self.taker.receiving.is_some_and(|now| now.transfer == transfer)
            || self.taker.complete.is_some_and(|complete| complete >= transfer.point)
            || transfer.base.is_some_and(|base| !self.holds(base));
        if !is_known {
            let token = self.random.wide();
            self.record(Some(Receiving { transfer, token, cursor: 0, is_begun: false }));
        }
    }

    fn receive(&mut self) {
        let Some(receiving) = self.taker.receiving else { return };
        let Receiving { transfer, token, cursor, is_begun } = receiving;
        let stamp = self.taker.stamp();
        let own = Some((transfer, token));
        let seen = self.seen();
        if !is_begun {
            let Some(seen) = seen.filter(|seen| seen.order.is_none()) else {
                return self.order(None);
            };
            let is_at = transfer.base.is_none() || seen.at == transfer.base;
            if seen.stamp < stamp {
                self.order(None);
            } else if is_at {
                self.record(Some(Receiving { is_begun: true, ..receiving }));
            }
            if let Some(base) = transfer.base.filter(|_| !is_at) {
                self.go_back(base);
            }
            return;
        }
        let Some(seen) = seen else { return self.order(own) };
        if seen.order != own {
            return self.order(own);
        }
        if seen.is_fed && seen.stable_to >= seen.taken_to {
            self.worlds[COPY].wish_for_snapshot(snapshot(transfer.point));
        } else if seen.stable_to > cursor && self.random.percent(30) {
            self.record(Some(Receiving { cursor: seen.stable_to, ..receiving }));
        }
    }

    /// Gives the order that holds now; some come again, late.
    fn order(&mut self, takes: Option<(Transfer, u128)>) {
        let from_block = self.taker.receiving.map_or(0, |receiving| receiving.cursor);
        let order = Some(FeedOrder { takes, from_block, stamp: self.taker.stamp() });
        self.worlds[COPY].operators.copying.order = order;
        let to = self.owner();
        let due = self.now() + self.delay();
        if !self.is_lost() {
            self.schedule.at(due, CopyEvent::Ordered(COPY, to, order));
        }
        if !self.is_calm() && self.random.percent(10) {
            let late = due + self.random.below(3 * SECOND);
            self.schedule.at(late, CopyEvent::Ordered(COPY, to, order));
        }
    }

    /// The target that the record names, in its present life: its next one begins with the newest order.
    fn owner(&self) -> (usize, u32) {
        let owner = self.worlds[COPY].control.record.owner;
        (owner, self.worlds[COPY].targets[owner].life)
    }

    fn go_back(&mut self, point: PointId) {
        if self.worlds[COPY].operators.snapshots.detaches_clients() {
            return;
        }
        self.taker.attempts += 1;
        self.counts.reverts += 1;
        let attempt = SnapshotId(FIRST_ATTEMPT + self.taker.attempts);
        self.say(COPY, || format!("the copy goes back to {point}"));
        self.worlds[COPY].wish_for_revert(snapshot(point), attempt);
    }

    /// Points that the other side needs no more are dropped.
    fn drop_points(&mut self) {
        let Some(offer) = &self.taker.offer else { return };
        let Some(oldest) = offer.kept.first().copied() else { return };
        let made = self.worlds[COPY].operators.snapshots.made();
        let needed = self.taker.receiving.and_then(|receiving| receiving.transfer.base);
        for (id, _) in made {
            let point = PointId(id.0);
            if point < oldest && Some(point) != needed && Some(point) != self.taker.complete {
                self.worlds[COPY].delete_snapshot(id);
            }
        }
    }

    /// The view goes back to the complete point, and clients use it.
    fn promote(&mut self) {
        let Some(complete) = self.taker.complete else { return };
        let stamp = self.taker.stamp();
        match self.seen() {
            Some(seen) if seen.order.is_none() && seen.stamp >= stamp => {
                if seen.at == Some(complete) {
                    self.check_promoted(complete);
                    self.worlds[COPY].attach_copy();
                    self.worlds.iter_mut().for_each(|w| w.operators.copying.is_over = true);
                } else {
                    self.go_back(complete);
                }
            }
            _ => self.order(None),
        }
    }
}
