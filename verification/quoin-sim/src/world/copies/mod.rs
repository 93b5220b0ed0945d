//! A volume whose points are copied to another cluster: on each side a [`World`] with its real targets, pools
//! and store, under one time. The source's target reads what changed since a base, a mirror sends it, and the
//! copy's target takes it, by the product's rules ([`quoin_cluster::mirror::feeding`],
//! [`quoin_cluster::mirror::sending`]). In place of the two brains, of which `mirrors` are the runs, there is a plain
//! record on each side, whose controllers forget all that is not in it.
//!
//! | checker | finds |
//! |---|---|
//! | CopyIsThePoint | a point told as complete that is not, block by block, that of the source; and a view promoted so |
//! | StableIsStable | blocks told as stable that the copy's pools do not have on media, or with another content |
//! | FedByOrder | slots that are written without an order, or under another one than that which stands |
//! | Linearizable, … | all that a world's own checkers find of either volume, the copy's clients after a promotion among them |
//! | Liveness | a point that is not complete after the last fault |
//!
//! Links are cut, mirrors and controllers die, orders are late and come twice, bytes are changed; and both
//! worlds have the faults of their swarm, so targets are killed and replaced, and power fails.

mod brains;
mod checkers;
mod lines;
mod sender;
mod source;
mod taker;

use std::collections::BTreeMap;

use quoin_cluster::mirror::feeding::FeedOrder;

use self::brains::{Brains, Work};
use self::lines::Line;
use self::sender::Sender;
use self::source::{Offer, Source};
use self::taker::{Taker, Want};
use super::copying::{Copying, Told};
use super::{RunOptions, World};
use crate::Report;
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, SECOND, Schedule};
use crate::stats::{Stats, Violation};
use crate::swarm::Swarm;

const SOURCE: usize = 0;
const COPY: usize = 1;
/// Interval at which controllers look at their records.
const LOOK_EVERY: u64 = 50 * MILLISECOND;
/// Time after the last fault in which all is copied, at most.
const COPIED_WITHIN: u64 = 120 * SECOND;
/// The same where brains decide, which wait for each other.
const WELL_WITHIN: u64 = 500 * SECOND;

#[derive(Debug)]
enum CopyEvent {
    Look(usize),
    /// A word of the source's controller reaches that of the copy.
    Offered(Offer),
    Wanted(Want),
    /// An order reaches a target of a side, in this life.
    Ordered(usize, (usize, u32), Option<FeedOrder>),
    Reported(u64, Box<Told>),
    /// The mirror of a side begins a stream, in this life.
    Stream(usize, u64),
    ToTarget(u64),
    FromTarget(u64),
    /// The next part is asked for again.
    Part(usize, u64),
    Fault,
    LinkBack,
    SenderBack(usize),
    Brain(Box<Work>),
}

/// Counts of a run.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    completed: u64,
    slots: u64,
    streams: u64,
    refused: u64,
    reverts: u64,
    checked: u64,
}

/// A run of a volume and its copy.
pub(crate) struct Copies {
    worlds: [World; 2],
    random: Random,
    schedule: Schedule<CopyEvent>,
    is_linked: bool,
    /// Chance that a message, an order or a report is lost.
    loss_percent: u64,
    /// Typical delay of a message.
    delay_ns: u64,
    /// Blocks of one frame.
    blocks_max: usize,
    /// The copy is promoted while the source goes on, whatever is on its way.
    is_forced: bool,
    senders: [Sender; 2],
    source: Source,
    taker: Taker,
    lines: BTreeMap<u64, Line>,
    /// By side, target, its life and the token of a transfer: blocks before it were seen to be stable.
    stable: BTreeMap<(usize, usize, u32, u128), u64>,
    /// `None`: each side has a plain record.
    brains: Option<Brains>,
    calm_since: Option<Instant>,
    counts: Counts,
}

impl Copies {
    pub fn new(options: RunOptions) -> Self {
        let mut random = Random::new(options.seed ^ 0x636f_7069_6573);
        let blocks = *random.pick(&[8, 24, 64, 160]);
        let seed = |n: u64| options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(n);
        let world = |side: usize| {
            let options = RunOptions { seed: seed(side as u64), ..options };
            World::with(options, Copying::new(side, seed(0), blocks))
        };
        let worlds = [world(SOURCE), world(COPY)];
        let mut schedule = Schedule::default();
        for side in [SOURCE, COPY] {
            schedule.after(random.below(LOOK_EVERY), CopyEvent::Look(side));
        }
        schedule.after(random.between(200, 1500) * MILLISECOND, CopyEvent::Fault);
        let mut copies = Self {
            worlds,
            schedule,
            is_linked: true,
            loss_percent: *random.pick(&[0, 5, 20]),
            blocks_max: *random.pick(&[1, 1, 2, 5, 256]),
            delay_ns: *random.pick(&[MILLISECOND, 5 * MILLISECOND, 40 * MILLISECOND]),
            is_forced: random.percent(25),
            senders: Default::default(),
            source: Source::new(random.between(4, 40)),
            taker: Taker::default(),
            lines: BTreeMap::new(),
            stable: BTreeMap::new(),
            brains: (options.swarm == Swarm::Disasters).then(|| Brains::new(&mut random)),
            calm_since: None,
            counts: Counts::default(),
            random,
        };
        if copies.brains.is_some() {
            copies.begin_brains();
        }
        copies
    }

    /// Runs to the end of both volumes, or to the first violation.
    pub fn run(&mut self) {
        while !self.worlds.iter().any(World::has_failed) {
            let next = |world: &World| world.next_at();
            let running = self.worlds.iter().enumerate().filter(|(_, world)| !world.is_over());
            let first = running.map(|(n, world)| (next(world).unwrap_or(0), n)).min();
            let Some((at, n)) = first else { break };
            match self.schedule.next_at().filter(|own| *own <= at) {
                Some(_) => {
                    if let Some(event) = self.schedule.take() {
                        self.handle(event);
                    }
                }
                None => self.worlds[n].step(),
            }
            self.take_from_worlds();
        }
        // A world that another one's violation stopped is at no end.
        let has_failed = self.worlds.iter().any(World::has_failed);
        let end: fn(&mut World) = if has_failed { World::count } else { World::finish };
        self.worlds.iter_mut().for_each(end);
    }

    fn now(&self) -> Instant {
        let own = self.schedule.now();
        self.worlds.iter().filter(|w| !w.is_over()).map(World::now).max().unwrap_or(own).max(own)
    }

    fn is_calm(&self) -> bool {
        self.calm_since.is_some()
    }

    fn is_lost(&mut self) -> bool {
        !self.is_calm() && self.random.percent(self.loss_percent)
    }

    fn delay(&mut self) -> u64 {
        let typical = if self.is_calm() { MILLISECOND } else { self.delay_ns };
        self.random.delay(typical)
    }

    fn say(&mut self, side: usize, text: impl FnOnce() -> String) {
        let now = self.now();
        self.worlds[side].trace.line(now, text);
    }

    fn handle(&mut self, event: CopyEvent) {
        let now = self.now();
        for world in self.worlds.iter_mut().filter(|world| !world.is_over()) {
            world.wait_until(now);
        }
        match event {
            CopyEvent::Look(side) => {
                self.look(side);
                self.schedule.at(now + LOOK_EVERY, CopyEvent::Look(side));
            }
            CopyEvent::Offered(offer) => self.taker.hears(offer),
            CopyEvent::Wanted(want) => self.source.hears(want),
            CopyEvent::Ordered(side, (target, life), order) => {
                let world = &mut self.worlds[side];
                if !world.is_over() && world.targets[target].life == life {
                    world.order_feed(target, order);
                }
            }
            CopyEvent::Reported(serial, told) => self.reported(serial, *told),
            CopyEvent::Stream(side, life) => self.begin_stream(side, life),
            CopyEvent::ToTarget(line) => self.deliver_to_target(line),
            CopyEvent::FromTarget(line) => self.deliver_from_target(line),
            CopyEvent::Part(side, token) => self.ask_again(side, token),
            CopyEvent::Fault => self.fault(),
            CopyEvent::LinkBack => self.is_linked = true,
            CopyEvent::Brain(work) => self.do_work(*work),
            CopyEvent::SenderBack(side) => self.senders[side].is_up = true,
        }
    }

    fn look(&mut self, side: usize) {
        if self.calm_since.is_none() && self.worlds.iter().all(|world| world.faults.over) {
            self.calm_since = Some(self.now());
            self.is_linked = true;
            self.senders.iter_mut().for_each(|sender| sender.is_up = true);
        }
        let within = if self.brains.is_some() { WELL_WITHIN } else { COPIED_WITHIN };
        if self.calm_since.is_some_and(|since| self.now() > since + within)
            && !self.worlds[COPY].operators.copying.is_over
        {
            if self.brains.is_some() {
                let detail = self.brains_say();
                return self.worlds[COPY].violate("Liveness", detail);
            }
            let detail = format!(
                "no point is complete: {:?}; {:?}; {:?}",
                self.source, self.taker, self.senders
            );
            return self.worlds[COPY].violate("Liveness", detail);
        }
        if self.brains.is_some() {
            return self.look_at_brains(side);
        }
        match side {
            SOURCE => {
                self.look_at_source();
                let ordered = self.wanted();
                let since = ordered.and_then(|(transfer, ..)| transfer.base);
                self.send_on(SOURCE, ordered, since);
            }
            _ => self.look_at_copy(),
        }
    }

    /// Answers of targets go on their way, and progress is checked.
    fn take_from_worlds(&mut self) {
        for side in [SOURCE, COPY] {
            let copying = &mut self.worlds[side].operators.copying;
            let answers = std::mem::take(&mut copying.answers);
            let parts = std::mem::take(&mut copying.parts);
            for (line, answer) in answers {
                self.answered(side, line, answer);
            }
            for (token, answer) in parts {
                self.part_came(side, token, answer);
            }
        }
        self.check_feeds();
    }

    fn fault(&mut self) {
        if self.is_calm() || self.worlds.iter().any(|world| world.faults.over) {
            return;
        }
        if self.brains.is_some() {
            return self.brain_fault();
        }
        match self.random.below(5) {
            0 => {
                self.is_linked = false;
                let back = self.random.between(20, 2500) * MILLISECOND;
                self.cut_lines();
                self.schedule.after(back, CopyEvent::LinkBack);
            }
            1 => {
                self.kill_sender(SOURCE);
                let back = self.random.between(50, 1500) * MILLISECOND;
                self.schedule.after(back, CopyEvent::SenderBack(SOURCE));
            }
            // The mirror of the copy, which only passes on.
            2 => self.cut_lines(),
            3 => self.source.forgets(),
            _ => self.kill_taker(),
        }
        let next = self.random.between(100, 1500) * MILLISECOND;
        self.schedule.after(next, CopyEvent::Fault);
    }

    /// The report of the whole, under the seed of the run.
    pub fn report(&self, seed: u64) -> Report {
        let mut stats = Stats::default();
        let mut fingerprint = 0u64;
        for world in &self.worlds {
            stats.merge(&world.stats);
            fingerprint = fingerprint.rotate_left(17) ^ world.trace.fingerprint();
        }
        stats.seeds = 1;
        stats.operators.points += self.counts.completed;
        stats.operators.pulls += self.counts.streams;
        let violation = self.worlds.iter().find_map(|world| world.checkers.violation.clone());
        let violation = violation.map(|violation| Violation { seed, ..violation });
        let lines = self.worlds.iter().flat_map(|world| world.trace.lines().iter().cloned());
        let mut lines: Vec<_> = lines.collect();
        lines.sort_by_key(|(at, _)| *at);
        let fingerprint = fingerprint ^ self.counts.slots ^ self.counts.completed << 32;
        Report { stats, violation, fingerprint, lines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::StoreKind;

    fn options(seed: u64) -> RunOptions {
        let (store, swarm) = (StoreKind::Model, Swarm::Copies);
        RunOptions { seed, store, swarm, ..RunOptions::default() }
    }

    #[test]
    fn points_are_copied_by_real_targets_through_cuts_deaths_and_replacements() {
        let mut counts = Counts::default();
        for seed in 1..=10 {
            let mut copies = Copies::new(options(seed));
            copies.run();
            assert_eq!(copies.report(seed).violation, None);
            counts.completed += copies.counts.completed;
            counts.slots += copies.counts.slots;
            counts.streams += copies.counts.streams;
            counts.refused += copies.counts.refused;
            counts.reverts += copies.counts.reverts;
            counts.checked += copies.counts.checked;
        }
        assert!(counts.completed > 20 && counts.slots > 200 && counts.reverts > 5, "{counts:?}");
        assert!(counts.refused > 20 && counts.checked > 100, "{counts:?}");
    }

    #[test]
    fn brains_promote_and_copy_real_volumes_both_ways() {
        let (mut promotions, mut completed, mut forced) = (0, 0, 0);
        for seed in 1..=8 {
            let mut copies = Copies::new(RunOptions { swarm: Swarm::Disasters, ..options(seed) });
            copies.run();
            assert_eq!(copies.report(seed).violation, None);
            let brains = copies.brains.as_ref().unwrap();
            (promotions, forced) = (promotions + brains.promotions, forced + brains.forced);
            completed += copies.counts.completed;
        }
        assert!(promotions > 8 && completed > 60, "{promotions} {completed} {forced}");
    }

    #[test]
    fn a_seed_of_a_volume_and_its_copy_gives_the_same_run_again() {
        let of = |seed| {
            let report = crate::run(options(seed));
            (report.fingerprint, report.stats.events)
        };
        assert_eq!(of(5), of(5));
        assert_ne!(of(5), of(6));
    }
}
