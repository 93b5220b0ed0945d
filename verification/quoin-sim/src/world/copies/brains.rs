//! Two brains over real volumes: their records, their orders, and what they are told, as
//! `quoin-control/src/mirror` has it (`observe.rs`, `orders.rs`, `driver.rs`).

use std::collections::{BTreeMap, BTreeSet};

use quoin_cluster::mirror::answers::{Answer, Call};
use quoin_cluster::mirror::brain::Now;
use quoin_cluster::mirror::feeding::FeedOrder;
use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{
    Action, Brain, ClusterId, Event, Keepsake, Observed, Order, Record, Role, Stamp, Transfer,
};
use quoin_types::ids::{GroupId, PointId, SnapshotId, VolumeId};
use quoin_types::{Epoch, Time};

use super::source::snapshot;
use super::{COPY, Copies, CopyEvent, SOURCE};
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::world::copying::Told;
use crate::world::person::{self, Person};

const GROUP: GroupId = GroupId(1);
const MEMBER: VolumeId = VolumeId(1);
/// A transfer that is not ordered again for so long is not sent any more.
const SHIPPED_FOR: u64 = 3 * SECOND;

/// Work of a brain that takes time.
#[derive(Debug)]
pub(super) enum Work {
    Start(usize),
    Store {
        side: usize,
        brain: u64,
        expected: u64,
        record: Box<Record>,
        is_heard: bool,
    },
    Stored {
        side: usize,
        brain: u64,
        event: Event,
    },
    Message(usize, Vec<u8>),
    Order(usize, u64, Stamp, Order),
    MakePoint {
        side: usize,
        brain: u64,
        point: PointId,
    },
    /// Pools report the role that they keep.
    Kept(usize, Keepsake),
    Orchestrate,
    MirrorBack(usize),
}

/// One side: its store of records, its brains, and what they were told.
pub(super) struct Half {
    record: Vec<u8>,
    version: u64,
    /// Every record that was written, for restores.
    history: Vec<(Vec<u8>, u64)>,
    term: u64,
    /// Brains that live; the second one has not heard that it was replaced.
    brains: Vec<(u64, Brain)>,
    is_starting: bool,
    pub has_mirror: bool,
    /// Of the last orders that were carried out.
    stamp: Stamp,
    serial: u64,
    told: Option<(Told, u64)>,
    keepsake: Option<Keepsake>,
    making: Option<(u64, PointId)>,
    /// Points that were seen to be made.
    pub known: BTreeSet<PointId>,
    lost: Option<PointId>,
    ship: Option<((Transfer, u128, u64), Instant)>,
    attempts: u128,
    /// The last epoch in which a target had leave to write.
    written: Epoch,
    skew_ms: u64,
}

impl Half {
    fn new(record: &Record, skew_ms: u64) -> Self {
        let bytes = record.encode();
        Self {
            history: vec![(bytes.clone(), 1)],
            record: bytes,
            version: 1,
            term: record.term,
            brains: Vec::new(),
            is_starting: true,
            has_mirror: true,
            stamp: Stamp::default(),
            serial: 0,
            told: None,
            keepsake: Some(record.keepsake()),
            making: None,
            known: BTreeSet::new(),
            lost: None,
            ship: None,
            attempts: 0,
            written: Epoch::ZERO,
            skew_ms,
        }
    }

    /// The record as it is stored.
    pub fn stored(&self) -> Record {
        Record::decode(&self.record).expect("what was encoded is decoded")
    }
}

/// Both sides, and those who call them.
pub(super) struct Brains {
    pub halves: [Half; 2],
    draws: Random,
    restores: bool,
    forced_percent: u64,
    pub forced: u64,
    pub restored: u64,
    pub promotions: u64,
    /// The point of each side's promotion that no client has seen yet.
    pub unseen: [Option<PointId>; 2],
    /// Content of each point at its source.
    pub named: BTreeMap<PointId, super::checkers::Image>,
    goal: Option<(usize, bool, u64)>,
    /// Clients rest, so that a point has all.
    pub is_frozen: bool,
    person_at: Instant,
}

fn cluster(side: usize) -> ClusterId {
    ClusterId(side as u128 + 0xa)
}

impl Brains {
    pub fn new(random: &mut Random) -> Self {
        let parameters =
            Parameters { interval_s: random.between(1, 3), may_take_over: random.percent(50) };
        let (members, ids) = (vec![MEMBER], [cluster(SOURCE), cluster(COPY)]);
        let primary = Record::primary(GROUP, ids, members.clone(), parameters);
        let (chain, ids) = (primary.chain.clone(), [cluster(COPY), cluster(SOURCE)]);
        let secondary = Record::secondary(GROUP, ids, members, chain, parameters);
        let mut skew = || random.below(100_000_000);
        let halves = [Half::new(&primary, skew()), Half::new(&secondary, skew())];
        Self {
            halves,
            draws: random.fork(),
            restores: random.percent(20),
            forced_percent: if random.percent(50) { 40 } else { 0 },
            forced: 0,
            restored: 0,
            promotions: 0,
            unseen: [None; 2],
            named: BTreeMap::new(),
            goal: None,
            is_frozen: false,
            person_at: 0,
        }
    }
}

impl Person for Copies {
    fn asks(&mut self, side: usize, call: Call) -> Option<Answer> {
        self.call(side, call)
    }

    fn picks(&mut self) -> usize {
        self.random.index(2)
    }
}

impl Copies {
    fn half(&mut self, side: usize) -> &mut Half {
        &mut self.brains.as_mut().expect("a run with brains").halves[side]
    }

    fn stored(&self, side: usize) -> Record {
        self.brains.as_ref().expect("a run with brains").halves[side].stored()
    }

    fn work(&mut self, delay: u64, work: Work) {
        let due = self.now() + delay;
        self.schedule.at(due, CopyEvent::Brain(Box::new(work)));
    }

    /// Both volumes are mirrored from here on, and the copy is lent to a target.
    pub(super) fn begin_brains(&mut self) {
        for side in [SOURCE, COPY] {
            let keepsake = self.stored(side).keepsake();
            let record = &mut self.worlds[side].control.record;
            record.keep(GROUP, keepsake);
            if side == COPY {
                record.fence_for(1, 0);
            }
            let delay = self.random.below(200) * MILLISECOND;
            self.work(delay, Work::Start(side));
        }
        self.work(4 * SECOND, Work::Orchestrate);
    }

    fn brain_now(&mut self, side: usize) -> Now {
        let now = self.now();
        let brains = self.brains.as_mut().expect("a run with brains");
        let wall_ms = 1_700_000_000_000 + brains.halves[side].skew_ms + now / MILLISECOND;
        Now { time: Time(now), wall_ms, draw: brains.draws.wide().max(1) }
    }

    pub(super) fn do_work(&mut self, work: Work) {
        match work {
            Work::Start(side) => self.start_brain(side),
            Work::Store { side, brain, expected, record, is_heard } => {
                self.store(side, brain, expected, *record, is_heard);
            }
            Work::Stored { side, brain, event } => self.feed_brain(side, brain, event),
            Work::Message(side, bytes) => {
                let half = self.half(side);
                if let Some(number) =
                    half.brains.first().map(|(n, _)| *n).filter(|_| half.has_mirror)
                {
                    self.feed_brain(side, number, Event::Message(bytes));
                }
            }
            Work::Order(side, term, stamp, order) => {
                if self.half(side).term == term {
                    self.obey(side, stamp, order);
                }
            }
            Work::MakePoint { side, brain, point } => {
                let is_other = self.half(side).making.is_some_and(|(_, making)| making == point);
                if !is_other && self.stored(side).points.cutting == Some(point) {
                    self.half(side).making = Some((brain, point));
                    self.worlds[side].wish_for_snapshot(snapshot(point));
                }
            }
            Work::Kept(side, keepsake) => self.half(side).keepsake = Some(keepsake),
            Work::Orchestrate => self.orchestrate(),
            Work::MirrorBack(side) => self.set_mirror(side, true),
        }
    }

    fn feed_brains(&mut self, side: usize, event: &Event) {
        let numbers: Vec<u64> = self.half(side).brains.iter().map(|(n, _)| *n).collect();
        for number in numbers {
            self.feed_brain(side, number, event.clone());
        }
    }

    fn feed_brain(&mut self, side: usize, number: u64, event: Event) {
        let now = self.brain_now(side);
        let half = self.half(side);
        let Some((_, brain)) = half.brains.iter_mut().find(|(n, _)| *n == number) else { return };
        let mut actions = Vec::new();
        brain.on(now, event, &mut actions);
        self.act(side, number, actions);
    }

    fn act(&mut self, side: usize, brain: u64, actions: Vec<Action>) {
        let now = self.now();
        let is_newest = self.half(side).brains.first().is_some_and(|(n, _)| *n == brain);
        for action in actions {
            let (delay, is_lost) = (self.delay(), self.is_lost());
            match action {
                Action::Store { expected, record } => {
                    let is_heard = self.is_calm() || !self.random.percent(2);
                    self.work(delay, Work::Store { side, brain, expected, record, is_heard });
                }
                Action::Send(bytes) => {
                    let gets_through = self.half(side).has_mirror && self.is_linked;
                    if is_newest && gets_through && !is_lost {
                        if !self.is_calm() && self.random.percent(4) {
                            let late = delay + self.random.below(20 * SECOND);
                            self.work(late, Work::Message(1 - side, bytes.clone()));
                        }
                        self.work(delay, Work::Message(1 - side, bytes));
                    }
                }
                Action::MakePoint { point, .. } => {
                    self.work(delay, Work::MakePoint { side, brain, point });
                }
                Action::Member { stamp, order, .. } => {
                    let term = self.half(side).term;
                    if !is_lost {
                        self.work(delay, Work::Order(side, term, stamp, order));
                    }
                }
                Action::Ship { transfer, token, from, .. } if is_newest => {
                    self.half(side).ship = Some(((transfer, token, from), now));
                }
                Action::Ship { .. } => {}
            }
        }
    }

    fn store(&mut self, side: usize, brain: u64, expected: u64, record: Record, is_heard: bool) {
        let before = self.stored(side);
        let half = self.half(side);
        if record.term != half.term {
            return;
        }
        let event = if half.version == expected {
            half.version += 1;
            half.record = record.encode();
            half.history.push((half.record.clone(), half.version));
            let version = half.version;
            let others: Vec<u64> =
                half.brains.iter().map(|(n, _)| *n).filter(|n| *n != brain).collect();
            for other in others {
                let event = Event::Changed { record: Box::new(record.clone()), version };
                let delay = self.random.below(SECOND);
                self.work(delay, Work::Stored { side, brain: other, event });
            }
            self.say(side, || {
                let (role, receiving) = (record.role, &record.receiving);
                format!("record {version} of {side}: {role:?} {:?} {receiving:?}", record.points)
            });
            self.check_recorded(side, &before, &record);
            Event::Stored { version }
        } else {
            Event::Changed { record: Box::new(before), version: half.version }
        };
        if is_heard {
            let delay = self.random.below(20 * MILLISECOND);
            self.work(delay, Work::Stored { side, brain, event });
        } else {
            self.kill_brain(side);
        }
    }

    pub(super) fn kill_brain(&mut self, side: usize) {
        let half = self.half(side);
        half.brains.clear();
        (half.making, half.told) = (None, None);
        self.worlds[side].operators.copying.order = None;
        let owner = self.worlds[side].control.record.owner;
        let to = (owner, self.worlds[side].targets[owner].life);
        let due = self.now() + self.delay();
        self.schedule.at(due, CopyEvent::Ordered(side, to, None));
        self.say(side, || format!("the brain of {side} is killed"));
        self.plan_start(side);
    }

    fn plan_start(&mut self, side: usize) {
        let delay = if self.is_calm() { SECOND } else { self.random.below(8 * SECOND) };
        if !std::mem::replace(&mut self.half(side).is_starting, true) {
            self.work(delay, Work::Start(side));
        }
    }

    pub(super) fn start_brain(&mut self, side: usize) {
        let now = self.brain_now(side);
        let half = self.half(side);
        half.is_starting = false;
        half.stamp = Stamp::default();
        let brain = Brain::new(now, half.stored(), half.version);
        half.brains.truncate(1);
        half.brains.insert(0, (now.draw as u64, brain));
        let is_running = half.has_mirror;
        self.feed_brain(side, now.draw as u64, Event::OwnMirror { is_running });
    }

    pub(super) fn set_mirror(&mut self, side: usize, is_running: bool) {
        self.half(side).has_mirror = is_running;
        self.senders[side].is_up = is_running;
        self.feed_brains(side, &Event::OwnMirror { is_running });
    }

    /// Older records of the mirror are put in place of the present ones and recovered: a new term rules.
    fn restore(&mut self, side: usize) {
        let half = self.half(side);
        let (length, kept) = (half.history.len(), half.keepsake);
        let back = self.random.index(length.min(20));
        let half = self.half(side);
        let (bytes, version) = half.history[length - 1 - back].clone();
        let (Some(kept), Ok(older)) = (kept, Record::decode(&bytes)) else { return };
        half.term += 1;
        let record = older.recovered(kept, half.term);
        (half.version, half.record) = (version, record.encode());
        half.history.push((half.record.clone(), version));
        self.say(side, || format!("records of {side} of {back} changes ago are recovered"));
        self.brains.as_mut().expect("a run with brains").restored += 1;
        self.kill_brain(side);
    }

    /// Carries an order out, unless a later one was.
    fn obey(&mut self, side: usize, stamp: Stamp, order: Order) {
        if self.half(side).stamp > stamp {
            return;
        }
        self.half(side).stamp = stamp;
        match order {
            Order::Fence(number) => self.fence_for(side, number),
            Order::Keep { is_primary, begun } => {
                let keepsake = Keepsake { is_primary, begun };
                self.worlds[side].control.record.keep(GROUP, keepsake);
                let delay = self.random.below(SECOND);
                self.work(delay, Work::Kept(side, keepsake));
            }
            Order::Cut(point) => self.worlds[side].wish_for_snapshot(snapshot(point)),
            Order::Drop(point) => {
                if self.points(side).iter().any(|(held, _)| *held == point) {
                    self.worlds[side].delete_snapshot(snapshot(point));
                }
            }
            Order::Revert(point) => self.revert(side, point),
            Order::Receive { transfer, token, from } => {
                self.give(side, Some((transfer, token)), from, stamp);
            }
            Order::Stop => self.give(side, None, 0, stamp),
            Order::Grow(_) => {}
            Order::KeepLost(point) => {
                self.half(side).lost = Some(point);
                self.worlds[side].wish_for_snapshot(snapshot(point));
            }
        }
    }

    /// Where clients have the volume, slots are ordered or it goes back, its target has leave to write.
    fn note_leave(&mut self, side: usize) {
        let world = &self.worlds[side];
        let copying = &world.operators.copying;
        let has_leave = copying.is_attached
            || copying.order.is_some_and(|order| order.takes.is_some())
            || world.operators.snapshots.detaches_clients();
        let epoch = world.control.record.epoch;
        if has_leave {
            self.half(side).written = epoch;
        }
    }

    fn give(&mut self, side: usize, takes: Option<(Transfer, u128)>, from: u64, stamp: Stamp) {
        let order = Some(FeedOrder { takes, from_block: from, stamp });
        if self.worlds[side].operators.copying.order != order {
            self.tell_order(side, order);
        }
    }

    fn tell_order(&mut self, side: usize, order: Option<FeedOrder>) {
        self.note_leave(side);
        self.worlds[side].operators.copying.order = order;
        for target in 0..self.worlds[side].targets.len() {
            let to = (target, self.worlds[side].targets[target].life);
            let due = self.now() + self.delay();
            self.schedule.at(due, CopyEvent::Ordered(side, to, order));
        }
    }

    /// Everything is taken back, and a target is lent: on the other host, or anew on the same one.
    fn fence_for(&mut self, side: usize, number: u128) {
        self.note_leave(side);
        let world = &mut self.worlds[side];
        let old = world.control.record.owner;
        let host = if self.random.percent(50) { 1 - old } else { old };
        if !world.control.record.fence_for(number, host) {
            return;
        }
        world.operators.copying.is_attached = false;
        if host == old {
            world.kill_target(old);
        }
        world.start_soon(host);
        self.say(side, || format!("{side} is fenced by {number}"));
    }

    fn revert(&mut self, side: usize, point: PointId) {
        let is_there = self.points(side).iter().any(|(held, _)| *held == point);
        if !is_there || self.worlds[side].operators.snapshots.detaches_clients() {
            return;
        }
        self.counts.reverts += 1;
        let half = self.half(side);
        half.attempts += 1;
        let attempt = SnapshotId((side as u128 + 1) << 50 | half.attempts);
        self.say(side, || format!("{side} goes back to {point}"));
        self.worlds[side].wish_for_revert(snapshot(point), attempt);
    }

    /// Points that a volume holds, the oldest cut first.
    fn points(&self, side: usize) -> Vec<(PointId, quoin_types::Lsn)> {
        let lost = self.brains.as_ref().and_then(|brains| brains.halves[side].lost);
        let made = self.worlds[side].operators.snapshots.made().into_iter();
        let mut points: Vec<_> = made
            .map(|(id, lsn)| (PointId(id.0), lsn))
            .filter(|(point, _)| Some(*point) != lost)
            .collect();
        points.sort_by_key(|(_, lsn)| *lsn);
        points
    }

    /// The member as the controller sees it.
    fn observe_member(&mut self, side: usize) -> Observed {
        let points = self.points(side);
        let now = self.brain_now(side);
        let world = &self.worlds[side];
        let record = &world.control.record;
        let brains = self.brains.as_ref().expect("a run with brains");
        let half = &brains.halves[side];
        let is_served = |told: &&(Told, u64)| {
            told.0.target == record.owner
                && told.0.status.epoch == record.epoch
                && told.0.status.serving
        };
        let told = half.told.as_ref().filter(is_served);
        let order = told.and_then(|(told, _)| told.progress);
        let stamp = match order {
            Some(progress) => half.stamp.min(progress.order.stamp),
            None if world.operators.copying.order.is_some()
                && !world.operators.copying.is_attached =>
            {
                Stamp::default()
            }
            None => half.stamp,
        };
        let snapshots = &world.operators.snapshots;
        let cuts = points.iter().map(|(point, lsn)| (*lsn, *point));
        let reverted = snapshots.reverted.map(|(id, lsn)| (lsn, PointId(id.0)));
        let is_held = |(_, point): &(_, PointId)| points.iter().any(|(held, _)| held == point);
        let newest = cuts.chain(reverted.filter(is_held)).max_by_key(|(lsn, _)| *lsn);
        let content = told.map(|(told, _)| told.status.content_lsn);
        let is_at = |(lsn, _): &(quoin_types::Lsn, _)| {
            content.is_some_and(|content| content.0 != 0 && *lsn >= content)
        };
        let at = newest.filter(|newest| is_at(newest)).map(|(_, point)| point);
        // Nobody was given leave to write since the last cut.
        let last = points.last().map(|(point, _)| *point);
        let untouched = last.filter(|point| {
            snapshots.epochs.get(&snapshot(*point)).is_some_and(|cut| *cut > half.written)
        });
        let at = at.or(untouched).filter(|_| !snapshots.detaches_clients());
        let takes = order.and_then(|progress| progress.order.takes);
        let progress = order.filter(|_| takes.is_some());
        let made: BTreeSet<SnapshotId> = snapshots.made().into_iter().map(|(id, _)| id).collect();
        Observed {
            serial: half.serial,
            seen_ms: told.map_or(0, |(_, wall_ms)| *wall_ms).min(now.wall_ms),
            stamp,
            blocks: world.setup.volume_blocks,
            at,
            points: points.iter().map(|(point, _)| *point).collect(),
            fenced: record.fenced(),
            order: takes,
            taken_to: progress.map_or(0, |progress| progress.taken_to),
            stable_to: progress.map_or(0, |progress| progress.stable_to),
            is_fed: progress.is_some_and(|progress| progress.is_fed),
            keepsake: half.keepsake.filter(|kept| Some(*kept) == record.keepsake()),
            lost: half.lost.filter(|lost| made.contains(&snapshot(*lost))),
            is_published: world.operators.copying.is_attached,
        }
    }

    pub(super) fn look_at_brains(&mut self, side: usize) {
        if self.worlds[side].is_over() || self.worlds[side].operators.copying.is_over {
            return;
        }
        let wall_ms = self.brain_now(side).wall_ms;
        let owner = self.worlds[side].control.record.owner;
        if self.is_calm() || self.random.percent(60) {
            let told = self.worlds[side].told(owner);
            self.half(side).told = told.map(|told| (told, wall_ms));
        }
        if let Some((told, _)) = self.half(side).told.clone()
            && told.status.serving
            && told.target == owner
        {
            self.worlds[side].control.record.is_opened(told.status.epoch);
        }
        self.mend_epoch(side);
        self.note_leave(side);
        // An assignment is told until its target has it.
        let order = self.worlds[side].operators.copying.order;
        let has_other = |(told, _): &(Told, u64)| told.progress.map(|it| it.order) != order;
        if self.half(side).told.as_ref().is_some_and(has_other) && self.random.percent(10) {
            self.tell_order(side, order);
        }
        self.see_points(side);
        self.half(side).serial += 1;
        let observed = self.observe_member(side);
        self.feed_brains(side, &Event::Observed(MEMBER, Box::new(observed)));
        self.feed_brains(side, &Event::Tick);
        self.publish(side);
        let now = self.now();
        let ship = self.half(side).ship.filter(|(_, at)| now < at + SHIPPED_FOR);
        let ship = ship.map(|(ship, _)| ship);
        let since = ship.and_then(|(transfer, ..)| transfer.base);
        let ship =
            ship.map(|(transfer, token, from)| (self.told_transfer(side, transfer), token, from));
        self.send_on(side, ship, since);
        self.check_sides();
        if side == SOURCE && self.is_calm() {
            self.come_to_an_end();
        }
    }

    /// The transfer as the order of the receiver names it.
    fn told_transfer(&mut self, side: usize, transfer: Transfer) -> Transfer {
        let brain = self.half(side).brains.first();
        let want = brain.and_then(|(_, brain)| brain.heard()?.want.as_ref());
        want.map(|want| want.transfer)
            .filter(|want| want.point == transfer.point)
            .unwrap_or(transfer)
    }

    fn see_points(&mut self, side: usize) {
        for (point, _) in self.points(side) {
            if self.half(side).known.insert(point) {
                self.check_cut(side, point);
            }
            if let Some((brain, _)) = self.half(side).making.take_if(|(_, making)| *making == point)
            {
                let cut_ms = self.brain_now(side).wall_ms;
                let event = Event::PointMade { point, cut_ms };
                let delay = self.delay();
                self.work(delay, Work::Stored { side, brain, event });
            }
        }
        // Its record has gone on: nobody waits for it.
        let cutting = self.stored(side).points.cutting;
        self.half(side).making.take_if(|(_, making)| Some(*making) != cutting);
    }

    fn publish(&mut self, side: usize) {
        let now = self.brain_now(side);
        let is_frozen = self.brains.as_ref().is_some_and(|brains| brains.is_frozen);
        if self.worlds[side].operators.copying.is_attached || is_frozen {
            return;
        }
        let half = self.half(side);
        let stored = half.stored();
        let Some((_, brain)) = half.brains.first_mut() else { return };
        let is_current = brain.record() == &stored;
        let answer = brain.call(now, Call::Publish(MEMBER), &mut Vec::new());
        if is_current && answer == Answer::Ok && stored.role == Role::Primary {
            self.say(side, || format!("clients use {side}"));
            self.check_published(side);
            self.worlds[side].attach_copy();
            // The assignment of a volume that clients have names no order.
            self.tell_order(side, None);
        }
    }

    fn call(&mut self, side: usize, call: Call) -> Option<Answer> {
        let now = self.brain_now(side);
        let count = self.half(side).brains.len().max(1);
        let which = self.random.index(count);
        let (number, brain) = self.half(side).brains.get_mut(which)?;
        let (number, mut actions) = (*number, Vec::new());
        let answer = brain.call(now, call, &mut actions);
        self.say(side, || format!("{side}: {call:?} -> {answer:?}"));
        self.act(side, number, actions);
        Some(answer)
    }

    fn orchestrate(&mut self) {
        if self.is_calm() {
            return;
        }
        let side = self.random.index(2);
        let forced_percent = self.brains.as_ref().map_or(0, |brains| brains.forced_percent);
        match self.random.below(8) {
            0..=3 => self.manage(forced_percent),
            4 | 5 => {
                for call in [Call::Disable, Call::Delete(MEMBER), Call::DeleteGroup] {
                    if self.stored(side).role.is_copy() {
                        self.call(side, call);
                    }
                }
            }
            6 => {
                self.call(side, Call::Resync { force: true });
            }
            _ => {
                let force = self.random.percent(forced_percent);
                self.call(side, Call::Promote { force });
            }
        }
        let next = self.random.between(500, 5000) * MILLISECOND;
        self.work(next, Work::Orchestrate);
    }

    /// A relocation or a failover, as a manager drives it: until the goal is there, or it is given up.
    fn manage(&mut self, forced_percent: u64) {
        let goal = self.brains.as_mut().expect("a run with brains").goal.take();
        let (to, force, tries) =
            goal.unwrap_or_else(|| (self.random.index(2), self.random.percent(forced_percent), 0));
        if !force {
            self.call(1 - to, Call::Demote { force: true });
        }
        let answer = self.call(to, Call::Promote { force });
        if answer != Some(Answer::Ok) && tries < 12 {
            self.brains.as_mut().expect("a run with brains").goal = Some((to, force, tries + 1));
        }
    }

    pub(super) fn brain_fault(&mut self) {
        let side = self.random.index(2);
        let restores = self.brains.as_ref().is_some_and(|brains| brains.restores);
        match self.random.below(if restores { 8 } else { 7 }) {
            0 | 1 => {
                self.is_linked = false;
                self.cut_lines();
                let longest = *self.random.pick(&[2, 2, 60]);
                let back = self.random.between(20, longest * 1000) * MILLISECOND;
                let due = self.now() + back;
                self.schedule.at(due, CopyEvent::LinkBack);
            }
            2 => {
                self.kill_sender(side);
                self.set_mirror(side, false);
                let back = self.random.between(50, 9000) * MILLISECOND;
                self.work(back, Work::MirrorBack(side));
            }
            3 | 4 => self.cut_lines(),
            5 => self.kill_brain(side),
            6 => self.start_brain(side),
            _ => self.restore(side),
        }
        let due = self.now() + self.random.between(300, 6000) * MILLISECOND;
        self.schedule.at(due, CopyEvent::Fault);
    }

    /// Clients rest once one side is primary and the other one follows it; the run ends once that has all.
    fn come_to_an_end(&mut self) {
        let now = self.now();
        let brains = self.brains.as_mut().expect("a run with brains");
        if now > brains.person_at + 3 * SECOND {
            brains.person_at = now;
            for side in [SOURCE, COPY] {
                if !self.half(side).has_mirror {
                    self.set_mirror(side, true);
                }
                self.half(side).brains.truncate(1);
                if self.half(side).brains.is_empty() {
                    self.plan_start(side);
                }
            }
            let records = [self.stored(SOURCE), self.stored(COPY)];
            person::decide(self, &records);
        }
        let records = [self.stored(SOURCE), self.stored(COPY)];
        let Some(primary) = records.iter().position(|record| record.role == Role::Primary) else {
            return;
        };
        let copy = &records[1 - primary];
        let is_followed = copy.role == Role::Secondary
            && copy.chain.top() == records[primary].chain.top()
            && self.calm_since.is_some_and(|since| now > since + 20 * SECOND);
        let is_attached = self.worlds[primary].operators.copying.is_attached;
        let brains = self.brains.as_mut().expect("a run with brains");
        if is_followed && is_attached && !brains.is_frozen {
            brains.is_frozen = true;
            self.worlds[primary].operators.copying.is_attached = false;
            return;
        }
        let is_rested =
            self.worlds[primary].clients.queues.iter().all(|queue| queue.open.is_none());
        if let Some(complete) = copy.points.complete.filter(|_| is_followed && is_rested)
            && self.brains.as_ref().is_some_and(|brains| brains.is_frozen)
            && copy.receiving.is_none()
            && self.has_all(primary, complete)
        {
            self.lines.clear();
            self.say(primary, || "all is copied".into());
            for side in [SOURCE, COPY] {
                self.end_line(side);
                self.worlds[side].operators.copying.is_over = true;
            }
            self.worlds[primary].operators.copying.is_attached = true;
            self.worlds[1 - primary].attach_copy();
        }
    }

    /// Words for a run that does not come to its end.
    pub(super) fn brains_say(&self) -> String {
        let say = |side: usize| {
            let record = self.stored(side);
            let brains = self.brains.as_ref().expect("a run with brains");
            let (half, volume) = (&brains.halves[side], &self.worlds[side].control.record);
            let told = half.told.as_ref().map(|(told, _)| {
                (told.target, told.status.serving, told.status.epoch, told.progress)
            });
            format!(
                "{:?} {:?} {:?} {:?} unsure {} fence {}; owner {} epoch {} fenced {} told {told:?} \
                 keepsake {:?}",
                record.role,
                record.points,
                record.receiving,
                record.claims,
                record.is_unsure,
                record.fence,
                volume.owner,
                volume.epoch,
                volume.fenced(),
                half.keepsake,
            )
        };
        format!("{} | {}", say(SOURCE), say(COPY))
    }
}
