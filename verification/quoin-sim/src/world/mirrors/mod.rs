//! Two clusters that mirror a group: two brains (the product's), two stores of records with compare-and-swap,
//! one link, volumes with targets that lose, repeat and delay what they are told, clients, and an orchestrator
//! that promotes, demotes, resyncs and cleans up at any moment.
//!
//! | checker | finds |
//! |---|---|
//! | OnePrimaryPerG | a write under a generation that another cluster began |
//! | NoSecondPrimaryWithoutForce | two sides that may write, where no promotion was forced |
//! | PromoteShowsCompletePoint | a promoted view that is not, block by block, what the source had at the point |
//! | PlannedMoveLosesNothing | an acknowledged write that is not in a view promoted without force |
//! | PointMeansAllMembers | a point told as complete that a member lacks |
//! | FeedOnlyWhileSecondary | a slot taken while the record says otherwise |
//! | LastCommonPinnedBothSides | no point left that both sides hold |
//! | DivergedNeverOverwrittenWithoutForce, LostKeptBeforeRevert | clients' writes that were overwritten and are nowhere else |
//! | RoleNeverGoesBack | a word with an older role or generation than one before |
//! | DigestMatches | a member of the copy cut with another content than its point |
//! | SyncTimeIsTrue | an acknowledged write before the told time that the other side lacks |
//! | CleanupHarmless | a call of a clean-up that changes a copy |
//! | IdleIsFree | points of a group that nobody writes |
//! | SizesFirst | a slot for a copy that is still too small, or a planned promotion to a smaller volume |
//! | ToldTimeIsKept, OrphanShowsCompletePoint | see `managers.rs` |
//! | Liveness | a copy that is not complete again after the last fault |
//! | Bounds | a message that is not decoded, a run without an end |

mod again;
mod checkers;
mod managers;
mod orchestrator;
mod side;
mod volume;

use std::collections::BTreeMap;

use quoin_cluster::mirror::feed::Slot;
use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{
    Action, ClusterId, Event as BrainEvent, Generation, Observed, Order, Record, Role, Stamp,
    Transfer,
};
use quoin_types::ids::{GroupId, PointId, VolumeId};

use self::checkers::Checks;
use self::managers::Managers;
use self::orchestrator::Orchestrator;
use self::side::Side;
use self::volume::{Content, Effect, Tag};
use super::RunOptions;
use crate::Report;
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND, Schedule};
use crate::stats::{Stats, Violation};
use crate::swarm::Swarm;
use crate::trace::Trace;

/// Of the draws for mirrors that are enabled again.
const AGAIN: u64 = 0x6167_6169_6e15;
const GROUP: GroupId = GroupId(1);
/// Time after the last fault within which all must be well again.
const WELL_WITHIN: Instant = 400 * SECOND;
/// Events of one run at most: one with more counts as a run without an end.
const EVENTS_MAX: u64 = 5_000_000;
/// Largest volume of a run, in blocks.
const BLOCKS_MAX: usize = 16;
/// Time at the end in which nobody writes.
const IDLE: Instant = 120 * SECOND;

#[derive(Debug)]
enum MirrorEvent {
    Tick(usize),
    Client(usize),
    Poll(usize, VolumeId),
    Report {
        side: usize,
        mirror: u64,
        volume: VolumeId,
        observed: Box<Observed>,
    },
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
        outcome: StoreOutcome,
    },
    Message(usize, Vec<u8>),
    Order {
        side: usize,
        mirror: u64,
        volume: VolumeId,
        stamp: Stamp,
        order: Order,
    },
    MakePoint {
        side: usize,
        brain: u64,
        stamp: Stamp,
        point: PointId,
        members: Vec<VolumeId>,
    },
    Verdict {
        side: usize,
        brain: u64,
        point: PointId,
        cut_ms: Option<u64>,
    },
    Send(usize, VolumeId, u128, u64),
    Slot(usize, VolumeId, Box<(Slot, Option<(usize, Tag)>)>),
    Sync(usize, VolumeId),
    /// This side is told of a mirror that begins on the other one.
    Introduce(usize, Box<Record>),
    IntroduceAgain(usize),
    Refused(usize),
    PeerHasNone(usize),
    Orchestrate,
    Fault,
    Start(usize),
    LinkBack(usize),
    MirrorBack(usize),
    Calm,
    Idle,
    End,
}

#[derive(Debug)]
enum StoreOutcome {
    Written(u64),
    Changed(Box<Record>, u64),
}

/// A transfer that a side sends for one member.
#[derive(Clone, Debug)]
struct Stream {
    transfer: Transfer,
    from: u64,
    next: u64,
    digest: u64,
    number: u64,
    last_step: Instant,
}

/// Weights of what is injected.
#[derive(Clone, Copy, Debug)]
struct Settings {
    loss_percent: u64,
    delay_ns: u64,
    forced_percent: u64,
    restores: bool,
    growth_percent: u64,
    calls_every: (u64, u64),
    faults_every: (u64, u64),
    writes_every: u64,
}

/// A run of two clusters.
pub(crate) struct Mirrors {
    random: Random,
    /// Of its own, for sizes: runs without growth are what they were.
    growth: Random,
    /// The same for mirrors that are enabled again.
    again: Random,
    /// The application is deleted, and deployed again, all the time.
    ends_often: bool,
    /// Mirrors that were enabled so far; what was ordered and reported in a former one is carried out by nobody.
    mirrors: u64,
    schedule: Schedule<MirrorEvent>,
    sides: [Side; 2],
    streams: BTreeMap<(usize, VolumeId, u128), Stream>,
    /// Messages from this side to the other one get through.
    link: [bool; 2],
    settings: Settings,
    orchestrator: Orchestrator,
    /// `None`: calls come without an object behind them.
    managers: Option<Managers>,
    checks: Checks,
    is_calm: bool,
    is_idle: bool,
    is_over: bool,
    next_tag: Tag,
    draws: Random,
    trace: Trace,
    stats: Stats,
}

fn volume(member: usize) -> VolumeId {
    VolumeId(member as u128 + 1)
}

pub(super) fn cluster(side: usize) -> ClusterId {
    ClusterId(side as u128 + 0xa)
}

impl Mirrors {
    pub fn new(options: RunOptions) -> Self {
        let mut random = Random::new(options.seed ^ 0x6d69_7272_6f72);
        let mut again = Random::new(options.seed ^ AGAIN);
        let mut growth = Random::new(options.seed ^ 0x0073_697a_66f4);
        let is_roles = matches!(options.swarm, Swarm::Failovers | Swarm::Orchestrators);
        let is_restored = options.swarm == Swarm::Restored;
        let settings = Settings {
            loss_percent: *random.pick(&[0, 2, 10, 30]),
            delay_ns: *random.pick(&[5, 40, 300]) * MILLISECOND,
            forced_percent: if is_roles || random.percent(50) { 40 } else { 0 },
            restores: is_restored || random.percent(15) && options.swarm != Swarm::Orchestrators,
            growth_percent: if growth.percent(30) { 4 } else { 0 },
            calls_every: if is_roles { (2, 12) } else { (5, 60) },
            faults_every: if is_restored { (3, 20) } else { (4, 40) },
            writes_every: *random.pick(&[30, 200, 1500]) * MILLISECOND,
        };
        let members: Vec<VolumeId> = (0..random.between(2, 3) as usize).map(volume).collect();
        let parameters =
            Parameters { interval_s: random.between(1, 6), may_take_over: random.percent(50) };
        let blocks = random.between(3, 10) as usize;
        let primary = Record::primary(GROUP, [cluster(0), cluster(1)], members.clone(), parameters);
        let chain = primary.chain.clone();
        let secondary =
            Record::secondary(GROUP, [cluster(1), cluster(0)], members.clone(), chain, parameters);
        let skew = |random: &mut Random| random.below(100_000_000);
        let sides = [primary, secondary]
            .map(|record| Side::new(record, &members, blocks, skew(&mut random)));
        let mut schedule = Schedule::default();
        for side in 0..2 {
            schedule.after(random.below(200) * MILLISECOND, MirrorEvent::Start(side));
            schedule.after(SECOND, MirrorEvent::Client(side));
            for member in &members {
                schedule.after(random.below(300) * MILLISECOND, MirrorEvent::Poll(side, *member));
            }
        }
        schedule.after(2 * SECOND, MirrorEvent::Orchestrate);
        schedule.after(3 * SECOND, MirrorEvent::Fault);
        let horizon = random.between(60, if is_roles { 400 } else { 300 }) * SECOND;
        schedule.after(horizon, MirrorEvent::Calm);
        let first = Generation { number: 1, cluster: cluster(0), id: 0 };
        let checks = Checks::new(first, members.len(), blocks);
        Self {
            draws: random.fork(),
            random,
            growth,
            ends_often: again.percent(60),
            again,
            mirrors: 1,
            schedule,
            sides,
            streams: BTreeMap::new(),
            link: [true; 2],
            settings,
            orchestrator: Orchestrator::default(),
            managers: (options.swarm == Swarm::Orchestrators).then(Managers::default),
            checks,
            is_calm: false,
            is_idle: false,
            is_over: false,
            next_tag: 0,
            trace: Trace::new(options.trace, options.keep),
            stats: Stats::default(),
        }
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) {
        while !self.is_over && self.checks.violation.is_none() {
            let Some(event) = self.schedule.take() else { break };
            self.stats.events += 1;
            if self.stats.events > EVENTS_MAX {
                let detail = format!("at {} ms, next {event:?}", self.now() / MILLISECOND);
                self.violate("Bounds", detail);
                break;
            }
            self.handle(event);
            self.check_sides();
        }
        self.stats.simulated_ns = self.schedule.now();
    }

    pub fn report(&self, seed: u64) -> Report {
        let mut stats = self.stats.clone();
        stats.seeds = 1;
        stats.ios.checked = self.checks.checked;
        let violation = self.checks.violation.clone().map(|(rule, detail)| Violation {
            seed,
            rule: rule.into(),
            detail,
        });
        let fingerprint = self.trace.fingerprint();
        Report { stats, violation, fingerprint, lines: self.trace.lines().to_vec() }
    }

    fn now(&self) -> Instant {
        self.schedule.now()
    }

    fn violate(&mut self, rule: &'static str, detail: String) {
        let now = self.now();
        self.trace.line(now, || format!("VIOLATION {rule}: {detail}"));
        self.checks.violation.get_or_insert((rule, detail));
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        let now = self.now();
        self.trace.line(now, text);
    }

    fn delay(&mut self) -> u64 {
        let typical = if self.is_calm { 2 * MILLISECOND } else { self.settings.delay_ns };
        self.random.delay(typical)
    }

    fn is_lost(&mut self) -> bool {
        !self.is_calm && self.random.percent(self.settings.loss_percent)
    }

    fn handle(&mut self, event: MirrorEvent) {
        match event {
            MirrorEvent::Tick(side) => {
                self.feed_brains(side, &BrainEvent::Tick);
                if self.managers.is_some() {
                    self.forget_what_is_over(side);
                }
                self.schedule.after(250 * MILLISECOND, MirrorEvent::Tick(side));
            }
            MirrorEvent::Client(side) => self.client(side),
            MirrorEvent::Poll(side, volume) => {
                self.poll(side, volume);
                let next = self.random.between(200, 700) * MILLISECOND;
                self.schedule.after(next, MirrorEvent::Poll(side, volume));
            }
            MirrorEvent::Report { mirror, .. } | MirrorEvent::Order { mirror, .. }
                if mirror != self.mirrors => {}
            MirrorEvent::Report { side, volume, observed, .. } => {
                self.feed_brains(side, &BrainEvent::Observed(volume, observed));
            }
            MirrorEvent::Store { side, brain, expected, record, is_heard } => {
                self.store(side, brain, expected, *record, is_heard);
            }
            MirrorEvent::Stored { side, brain, outcome } => {
                let event = match outcome {
                    StoreOutcome::Written(version) => BrainEvent::Stored { version },
                    StoreOutcome::Changed(record, version) => {
                        BrainEvent::Changed { record, version }
                    }
                };
                self.feed_brain(side, brain, event);
            }
            MirrorEvent::Message(side, bytes) => {
                if self.sides[side].has_mirror
                    && let Some((number, _)) = self.sides[side].brains.first()
                {
                    let number = *number;
                    self.feed_brain(side, number, BrainEvent::Message(bytes));
                } else if !self.sides[side].is_recorded && self.again.percent(70) {
                    let delay = self.again.below(SECOND);
                    self.schedule.after(delay, MirrorEvent::PeerHasNone(1 - side));
                }
            }
            MirrorEvent::Introduce(side, theirs) => self.introduced(side, &theirs),
            MirrorEvent::IntroduceAgain(side) => self.introduce(side),
            MirrorEvent::Refused(side) => self.refused(side),
            MirrorEvent::PeerHasNone(side) => self.peer_has_none(side),
            MirrorEvent::Order { side, volume, stamp, order, .. } => {
                self.order(side, volume, stamp, order)
            }
            MirrorEvent::MakePoint { side, brain, stamp, point, members } => {
                self.make_point(side, brain, stamp, point, &members);
            }
            MirrorEvent::Verdict { side, brain, point, cut_ms } => {
                let event = match cut_ms {
                    Some(cut_ms) => BrainEvent::PointMade { point, cut_ms },
                    None => BrainEvent::PointBroken { point },
                };
                self.feed_brain(side, brain, event);
            }
            MirrorEvent::Send(side, volume, token, number) => {
                self.send_slot(side, volume, token, number);
            }
            MirrorEvent::Slot(side, volume, slot) => self.slot(side, volume, &slot),
            MirrorEvent::Sync(side, volume) => {
                if let Some(volume) = self.sides[side].volumes.get_mut(&volume) {
                    volume.sync();
                }
            }
            MirrorEvent::Orchestrate => self.orchestrate(),
            MirrorEvent::Fault => self.fault(),
            MirrorEvent::Start(side) => self.start_brain(side),
            MirrorEvent::LinkBack(side) => self.link[side] = true,
            MirrorEvent::MirrorBack(side) => self.set_mirror(side, true),
            MirrorEvent::Calm => self.calm(),
            MirrorEvent::Idle => self.begin_idle(),
            MirrorEvent::End => self.end(),
        }
    }

    fn client(&mut self, side: usize) {
        let members: Vec<VolumeId> = self.sides[side].volumes.keys().copied().collect();
        let volume = *self.random.pick(&members);
        if !self.is_idle && self.runs_at(side) {
            self.publish(side, volume);
            self.client_write(side, volume);
        }
        let next = self.random.delay(self.settings.writes_every);
        self.schedule.after(next, MirrorEvent::Client(side));
    }

    fn client_write(&mut self, side: usize, volume: VolumeId) {
        let now = self.now();
        let wall_ms = self.sides[side].wall_ms(now);
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        if !target.is_writable() {
            return;
        }
        self.next_tag += 1;
        if self.growth.percent(self.settings.growth_percent) && target.live.len() < BLOCKS_MAX {
            target.grow(target.live.len() + 1);
            self.check_grown(side, volume);
        }
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        let (block, tag) = (self.random.index(target.live.len()), self.next_tag);
        target.write(block, tag);
        self.stats.ios.checked += 1;
        self.say(|| format!("{side}: {volume:?} block {block} gets {tag}"));
        self.check_write(side, volume, (block, tag), wall_ms);
    }

    fn poll(&mut self, side: usize, volume: VolumeId) {
        let now = self.now();
        let wall_ms = self.sides[side].wall_ms(now);
        let lost = self.is_lost();
        let delay = self.delay();
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        let observed = target.report(wall_ms);
        if !lost {
            let (mirror, observed) = (self.mirrors, Box::new(observed));
            let event = MirrorEvent::Report { side, mirror, volume, observed };
            self.schedule.after(delay, event);
        }
    }

    /// Everything that a brain says is done: late, twice, or never.
    fn act(&mut self, side: usize, brain: u64, actions: Vec<Action>) {
        for action in actions {
            let delay = self.delay();
            let is_lost = self.is_lost();
            let is_twice = !self.is_calm && self.random.percent(5);
            match action {
                Action::Store { expected, record } => {
                    let is_heard = !self.random.percent(if self.is_calm { 0 } else { 3 });
                    let event = MirrorEvent::Store { side, brain, expected, record, is_heard };
                    self.schedule.after(self.random.below(30 * MILLISECOND), event);
                }
                // Mirrors are connected to the newest controller.
                Action::Send(bytes) if self.sides[side].is_newest(brain) => {
                    self.send(side, bytes, delay, is_lost, is_twice);
                }
                Action::Send(_) => {}
                Action::MakePoint { stamp, point, members } => {
                    if !is_lost && self.sides[side].making.insert((brain, point)) {
                        let event = MirrorEvent::MakePoint { side, brain, stamp, point, members };
                        self.schedule.after(delay, event);
                    }
                }
                Action::Member { volume, stamp, order } => {
                    let mirror = self.mirrors;
                    let event = || MirrorEvent::Order { side, mirror, volume, stamp, order };
                    if is_twice {
                        let late = delay + self.random.below(20 * SECOND);
                        self.schedule.after(late, event());
                    }
                    if !is_lost {
                        self.schedule.after(delay, event());
                    }
                }
                Action::Ship { volume, transfer, token, from } => {
                    self.ship(side, volume, transfer, token, from);
                }
            }
        }
    }

    fn send(&mut self, side: usize, bytes: Vec<u8>, delay: u64, is_lost: bool, is_twice: bool) {
        self.check_message(side, &bytes);
        let gets_through = self.sides[side].has_mirror && self.link[side];
        if is_lost || !gets_through {
            return;
        }
        self.stats.messages.sent += 1;
        if is_twice {
            let late = delay + self.random.below(60 * SECOND);
            self.schedule.after(late, MirrorEvent::Message(1 - side, bytes.clone()));
        }
        self.schedule.after(delay, MirrorEvent::Message(1 - side, bytes));
    }

    fn order(&mut self, side: usize, volume: VolumeId, stamp: Stamp, order: Order) {
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        let effect = target.obey(stamp, order);
        if effect != Effect::Nothing || matches!(order, Order::Fence(_) | Order::Drop(_)) {
            self.say(|| format!("{side}: {volume:?} {stamp:?} {order:?}"));
        }
        match effect {
            Effect::Nothing | Effect::Kept(_) | Effect::BehindTheEnd => {}
            Effect::Overwrote(former) => self.check_overwritten(side, volume, &former),
            Effect::Cut(point) => self.check_cut(side, volume, stamp, point),
        }
        self.poll(side, volume);
    }

    fn make_point(
        &mut self,
        side: usize,
        brain: u64,
        stamp: Stamp,
        point: PointId,
        members: &[VolumeId],
    ) {
        // The process that had it made lives, or its record does.
        if !self.sides[side].brains.iter().any(|(number, _)| *number == brain) && self.mirrors > 1 {
            return;
        }
        let now = self.now();
        let cut_ms = self.sides[side].wall_ms(now);
        let is_broken = !self.is_calm && self.random.percent(15);
        let mut contents = Vec::new();
        for (n, member) in members.iter().enumerate() {
            let Some(target) = self.sides[side].volumes.get_mut(member) else { return };
            // A target that has seen a later order takes none of an earlier one.
            if !target.hears(stamp) {
                return;
            }
            if is_broken && n > 0 && self.random.percent(50) {
                break;
            }
            if is_broken {
                // A hold that ended: a client wrote between two cuts.
                self.client_write(side, *member);
            }
            let Some(target) = self.sides[side].volumes.get_mut(member) else { return };
            target.cut(point);
            contents.push((*member, target.live.clone()));
        }
        self.checks.points_made += 1;
        self.say(|| format!("{side}: {point:?} is cut, broken {is_broken}"));
        if !is_broken {
            self.check_named(side, point, contents);
        }
        let verdict = (!is_broken).then_some(cut_ms);
        let delay = self.delay();
        self.schedule.after(delay, MirrorEvent::Verdict { side, brain, point, cut_ms: verdict });
        for member in members {
            self.poll(side, *member);
        }
    }

    fn ship(&mut self, side: usize, volume: VolumeId, transfer: Transfer, token: u128, from: u64) {
        let now = self.now();
        let key = (side, volume, token);
        let is_fresh =
            self.streams.get(&key).is_some_and(|stream| now < stream.last_step + 3 * SECOND);
        if is_fresh {
            return;
        }
        let number = self.checks.next_stream();
        let stream = Stream { transfer, from, next: from, digest: 0, number, last_step: now };
        self.streams.insert(key, stream);
        self.schedule.after(MILLISECOND, MirrorEvent::Send(side, volume, token, number));
    }

    /// Sends one slot of a transfer, and the next one later.
    fn send_slot(&mut self, side: usize, volume: VolumeId, token: u128, number: u64) {
        let key = (side, volume, token);
        let now = self.now();
        let Some(stream) = self.streams.get(&key).filter(|s| s.number == number).cloned() else {
            return;
        };
        let Some(target) = self.sides[side].volumes.get(&volume) else { return };
        let Some(to) = target.content(stream.transfer.point).cloned() else { return };
        let base = stream.transfer.base.and_then(|base| target.content(base).cloned());
        if stream.transfer.base.is_some() && base.is_none() || !self.sides[side].has_mirror {
            return;
        }
        let base: Content = base.unwrap_or_else(|| vec![Tag::MAX; to.len()]);
        // The end is a slot of its own, behind the last block: a stream that goes on there has it again.
        let block = (stream.next as usize).min(to.len());
        let is_last = block == to.len();
        let sum = to.get(block).map_or(0, |tag| tag.wrapping_mul(31).wrapping_add(block as u32));
        let digest = quoin_cluster::mirror::feed::Feed::digest(stream.digest, sum);
        let is_damaged = !is_last && !self.is_calm && self.random.one_in(200);
        let slot = Slot {
            transfer: self.told_transfer(side, stream.transfer),
            token,
            stream: stream.number,
            from: stream.from,
            place: stream.next,
            span: 1,
            sums: [sum, if is_damaged { sum ^ 1 } else { sum }],
            end: is_last.then_some(digest),
        };
        // Blocks behind the end of the base are holes there.
        let in_base = base.get(block).copied().unwrap_or(0);
        let write = to.get(block).filter(|tag| in_base != **tag).map(|tag| {
            let tag = if is_damaged { *tag ^ 0x4000_0000 } else { *tag };
            (block, tag)
        });
        if let Some(stream) = self.streams.get_mut(&key) {
            stream.next += 1;
            stream.digest = digest;
            stream.last_step = now;
        }
        let delay = self.delay();
        if self.link[side] && !self.is_lost() {
            let boxed = Box::new((slot, write));
            if !self.is_calm && self.random.percent(3) {
                let late = delay + self.random.below(30 * SECOND);
                self.schedule.after(late, MirrorEvent::Slot(1 - side, volume, boxed.clone()));
            }
            self.schedule.after(delay, MirrorEvent::Slot(1 - side, volume, boxed));
        }
        if !is_last {
            let next = delay + self.random.below(50 * MILLISECOND);
            self.schedule.after(next, MirrorEvent::Send(side, volume, token, number));
        }
    }

    /// The transfer as the order of the receiver names it: a joining member is sent whole under the same name.
    fn told_transfer(&self, side: usize, transfer: Transfer) -> Transfer {
        let heard = self.sides[side].brain().and_then(|brain| brain.heard());
        let want = heard.and_then(|word| word.want.as_ref()).map(|want| want.transfer);
        want.filter(|want| want.point == transfer.point).unwrap_or(transfer)
    }

    fn slot(&mut self, side: usize, volume: VolumeId, slot: &(Slot, Option<(usize, Tag)>)) {
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        let Some(effect) = target.take(&slot.0, slot.1) else { return };
        let now = self.schedule.now();
        self.trace.line(now, || format!("{side}: {volume:?} takes {:?} {:?}", slot.0, slot.1));
        self.checks.slots += 1;
        let role = self.sides[side].stored().role;
        if matches!(role, Role::Primary | Role::Demoting | Role::Off) {
            self.violate("FeedOnlyWhileSecondary", format!("{side} is {role:?}"));
        }
        match effect {
            Effect::Overwrote(former) => self.check_overwritten(side, volume, &former),
            Effect::BehindTheEnd => {
                let detail = format!("{side}: {volume:?} is too small for {:?}", slot.1);
                self.violate("SizesFirst", detail);
            }
            Effect::Nothing | Effect::Cut(_) | Effect::Kept(_) => {}
        }
        let delay = self.random.below(2 * SECOND);
        self.schedule.after(delay, MirrorEvent::Sync(side, volume));
        if slot.0.end.is_some() {
            self.poll(side, volume);
        }
    }

    fn calm(&mut self) {
        self.is_calm = true;
        self.link = [true; 2];
        for side in 0..2 {
            self.set_mirror(side, true);
            self.sides[side].brains.truncate(1);
            if self.sides[side].brains.is_empty() && !self.sides[side].is_starting {
                self.start_brain(side);
            }
        }
        self.say(|| "calm".into());
        self.schedule.after(WELL_WITHIN, MirrorEvent::Idle);
    }

    fn begin_idle(&mut self) {
        self.is_idle = true;
        self.schedule.after(60 * SECOND, MirrorEvent::End);
    }

    fn end(&mut self) {
        if self.checks.idle_since.is_none() {
            self.check_well();
            self.checks.idle_since = Some((self.checks.points_made, self.checks.slots));
            self.schedule.after(IDLE, MirrorEvent::End);
            return;
        }
        self.check_idle();
        self.is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_mirrored_promoted_and_resynced_through_faults_and_restores() {
        for (swarm, is_restored) in
            [(Swarm::Mirrors, false), (Swarm::Failovers, false), (Swarm::Restored, true)]
        {
            let mut sums = [0; 5];
            for seed in 1..=8 {
                let options = RunOptions { seed, swarm, ..RunOptions::default() };
                let mut mirrors = Mirrors::new(options);
                mirrors.run();
                assert_eq!(mirrors.report(seed).violation, None);
                let checks = &mirrors.checks;
                let each = [
                    checks.promotions,
                    checks.completions,
                    checks.slots,
                    checks.checked,
                    checks.restores,
                ];
                sums.iter_mut().zip(each).for_each(|(sum, each)| *sum += each);
            }
            let [promotions, completions, slots, checked, restores] = sums;
            assert!(promotions > 4 && completions > 40 && slots > 400, "{swarm:?}: {sums:?}");
            assert!(checked > 1000 && (restores > 0 || !is_restored), "{swarm:?}: {sums:?}");
        }
    }

    #[test]
    fn managers_move_an_application_to_and_fro_delete_it_and_deploy_it_again_through_faults() {
        let (mut moves, mut orphans, mut promotions, mut again) = (0, 0, 0, [0; 2]);
        for seed in 1..=24 {
            let swarm = Swarm::Orchestrators;
            let options = RunOptions { seed, swarm, ..RunOptions::default() };
            let mut mirrors = Mirrors::new(options);
            mirrors.run();
            assert_eq!(mirrors.report(seed).violation, None);
            let managers = mirrors.managers.as_ref().unwrap();
            (moves, orphans) = (moves + managers.moves, orphans + managers.orphans);
            promotions += mirrors.checks.promotions;
            again.iter_mut().zip(managers.again_from).for_each(|(sum, each)| *sum += each);
        }
        assert!(moves > 60 && orphans > 2 && promotions > 40, "{moves} {orphans} {promotions}");
        assert!(again[0] > 0 && again[1] > 0, "{again:?}");
    }

    #[test]
    fn a_seed_of_two_clusters_gives_the_same_run_again() {
        let of = |seed| {
            let options = RunOptions { seed, swarm: Swarm::Restored, ..RunOptions::default() };
            let mut mirrors = Mirrors::new(options);
            mirrors.run();
            let report = mirrors.report(seed);
            (report.fingerprint, report.stats.events)
        };
        assert_eq!(of(5), of(5));
        assert_ne!(of(5), of(6));
    }
}
