//! Several volumes at once, each a [`World`] of its own with its pools, targets and faults, under one
//! time; and a coordinator that makes points over them. Its messages are late or lost, targets are
//! replaced between any two steps, and it dies.
//!
//! | checker | finds |
//! |---|---|
//! | GroupCut | a write in one volume's cut whose cause, shown to a client before, another's cut lacks |
//! | HoldBounded | a target that runs and holds its answers longer than the longest hold |
//! | SnapshotSurvives | a cut of a point that counts and is not in its volume's history |
//! | PointsGoOn | a point that does not begin, though the one before it was given up long ago |
//!
//! Whatever any client was shown before a write was issued is taken for a cause of the write.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use quoin_replication::group_point::attempts::Attempts;
use quoin_replication::group_point::{PointAnswer, PointCommand, PointCut, PointVerdict};
use quoin_replication::primary::{PrimaryEvent, SnapshotWish};
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{Position, Time, VolumeId};

use super::{RunOptions, World};
use crate::Report;
use crate::random::Random;
use crate::schedule::{Instant, MILLISECOND, Schedule};
use crate::stats::{Stats, Violation};

/// Interval at which the coordinator says everything again.
const SAY_AGAIN: u64 = 200 * MILLISECOND;
/// Ids of groups' snapshots; those of users lie below.
const FIRST_ID: u128 = 1 << 40;

#[derive(Debug)]
enum GroupEvent {
    Begin,
    Look,
    /// The next message of the coordinator reaches this volume.
    Deliver(usize),
    Answer(usize, Option<PointId>, PointAnswer),
    /// This coordinator dies.
    Die(u64),
}

/// A message to the target of a volume. They arrive in their order.
#[derive(Debug)]
enum Message {
    Command(PointId, PointCommand),
    Delete(SnapshotId),
}

#[derive(Default)]
struct Channel {
    messages: VecDeque<(usize, Message)>,
    last_due: Instant,
}

/// The attempt that the present coordinator waits for.
struct Attempt {
    group: GroupId,
    snapshots: Vec<SnapshotId>,
}

/// Longest time after which an attempt that was left keeps a later one from its volumes.
const LEFT_WITHIN: u64 = 5000 * MILLISECOND;

/// A run of several volumes.
pub(crate) struct Groups {
    pub worlds: Vec<World>,
    random: Random,
    schedule: Schedule<GroupEvent>,
    channels: Vec<Channel>,
    /// All attempts of the present coordinator, also those that it left.
    attempts: Attempts,
    attempt: Option<Attempt>,
    /// Of its own, for what is left: other runs are what they were.
    leaving: Random,
    leave_percent: u64,
    /// Since when an attempt does not begin.
    busy_since: Option<Instant>,
    pub left: u64,
    coordinator: u64,
    attempts_left: u64,
    next_id: u128,
    lossy: u64,
    pub made: u64,
}

fn volume(world: usize) -> VolumeId {
    VolumeId(world as u128 + 1)
}

impl Groups {
    pub fn new(options: RunOptions) -> Self {
        let mut random = Random::new(options.seed ^ 0x6772_6f75_7073);
        let mut leaving = Random::new(options.seed ^ 0x6c65_6176_6500);
        let count = random.between(2, 3);
        let seed = |n: u64| options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(n);
        let world = |n| World::new(RunOptions { seed: seed(n), ..options });
        let worlds: Vec<World> = (0..count).map(world).collect();
        let channels = worlds.iter().map(|_| Channel::default()).collect();
        let mut schedule = Schedule::default();
        schedule.after(random.between(100, 1500) * MILLISECOND, GroupEvent::Begin);
        Self {
            attempts_left: random.between(4, 16),
            lossy: *random.pick(&[0, 2, 10]),
            worlds,
            random,
            schedule,
            channels,
            attempts: Attempts::default(),
            attempt: None,
            leave_percent: if leaving.percent(40) { 30 } else { 0 },
            leaving,
            busy_since: None,
            left: 0,
            coordinator: 0,
            next_id: FIRST_ID,
            made: 0,
        }
    }

    /// Runs to the end of every volume, or to the first violation.
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
                None => {
                    self.worlds[n].step();
                    self.worlds[n].check_holds();
                    self.take_answers(n);
                }
            }
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

    fn time(&self) -> Time {
        Time(self.now())
    }

    /// No more points from here on: a volume is on its way to its end.
    fn is_late(&self) -> bool {
        self.worlds.iter().any(|world| world.faults.over)
    }

    fn delay(&mut self) -> u64 {
        let typical = *self.random.pick(&[MILLISECOND, 4 * MILLISECOND, 15 * MILLISECOND]);
        self.random.delay(typical)
    }

    fn handle(&mut self, event: GroupEvent) {
        match event {
            GroupEvent::Begin => self.begin(),
            GroupEvent::Look => self.look(),
            GroupEvent::Deliver(world) => self.deliver(world),
            GroupEvent::Answer(world, point, answer) => {
                let (time, volume) = (self.time(), volume(world));
                let waited = self.attempt.as_ref().map(|attempt| attempt.group);
                let counts = match point {
                    Some(point) => self.attempts.answered(time, volume, point, answer).is_some(),
                    None => waited.is_some_and(|group| {
                        self.attempts.snapshot_answered(time, volume, group, answer)
                    }),
                };
                if counts {
                    self.go_on();
                }
            }
            GroupEvent::Die(coordinator) if coordinator == self.coordinator => self.die(),
            GroupEvent::Die(_) => {}
        }
    }

    fn begin(&mut self) {
        if self.attempt.is_some() || self.attempts_left == 0 || self.is_late() {
            return;
        }
        self.attempts_left -= 1;
        let ids = self.next_id..self.next_id + self.worlds.len() as u128;
        self.next_id = ids.end;
        let snapshots: Vec<SnapshotId> = ids.map(SnapshotId).collect();
        let members = snapshots.iter().enumerate().map(|(n, id)| (volume(n), *id)).collect();
        let hold_ms = *self.random.pick(&[50, 500, 1000, 5000]);
        let point = PointId(self.random.wide());
        let group = GroupId(point.0);
        let (now, time) = (self.now(), self.time());
        if !self.attempts.begin(time, group, point, hold_ms, members) {
            return self.wait_for_the_left(now);
        }
        self.busy_since = None;
        self.attempt = Some(Attempt { group, snapshots });
        self.coordinator += 1;
        if self.random.percent(25) {
            let delay = self.random.below(60 * MILLISECOND);
            self.schedule.after(delay, GroupEvent::Die(self.coordinator));
        }
        self.go_on();
        self.schedule.after(SAY_AGAIN, GroupEvent::Look);
    }

    /// PointsGoOn: an attempt that was left ends by itself.
    fn wait_for_the_left(&mut self, now: Instant) {
        let since = *self.busy_since.get_or_insert(now);
        if now.saturating_sub(since) > LEFT_WITHIN {
            let detail = format!("no point begins for {} ms", (now - since) / MILLISECOND);
            return self.worlds[0].violate("PointsGoOn", detail);
        }
        self.attempts_left += 1;
        self.say_commands();
        self.schedule.after(SAY_AGAIN, GroupEvent::Begin);
    }

    fn look(&mut self) {
        let time = self.time();
        let is_late = self.is_late();
        let Some(attempt) = &self.attempt else { return };
        let group = attempt.group;
        if is_late {
            self.attempts.give_up(time, group);
        } else if self.leaving.percent(self.leave_percent) {
            // Its owner has gone on to something else, as a mirror that is demoted.
            self.left += 1;
            self.attempts.leave(time, group);
            return self.end();
        }
        self.go_on();
        if self.attempt.is_some() {
            self.schedule.after(SAY_AGAIN, GroupEvent::Look);
        }
    }

    fn say_commands(&mut self) {
        let commands: Vec<_> = self.attempts.commands().collect();
        for (point, volume, command) in commands {
            self.send(volume.0 as usize - 1, Message::Command(point, command));
        }
    }

    /// Says what is to be done now, or ends the attempt.
    fn go_on(&mut self) {
        let time = self.time();
        let Some(attempt) = &self.attempt else { return };
        let group = attempt.group;
        let verdict = self.attempts.verdict(time, group);
        if verdict.is_some() {
            self.attempts.forget(group);
        }
        match verdict {
            None => self.say_commands(),
            Some(PointVerdict::Broken(_)) => self.end(),
            Some(PointVerdict::Made(cuts)) => {
                self.made += 1;
                self.attempt = None;
                self.check_cut(&cuts);
                for (world, cut) in self.worlds.iter_mut().zip(&cuts) {
                    world.operators.snapshots.was_cut(cut.snapshot, cut.lsn);
                }
                self.plan_next();
            }
        }
    }

    /// Has the snapshots of an attempt deleted that does not count.
    fn end(&mut self) {
        let Some(attempt) = self.attempt.take() else { return };
        for (world, snapshot) in attempt.snapshots.into_iter().enumerate() {
            self.send(world, Message::Delete(snapshot));
        }
        self.plan_next();
    }

    fn plan_next(&mut self) {
        let delay = self.random.between(5, 700) * MILLISECOND;
        self.schedule.after(delay, GroupEvent::Begin);
    }

    /// The next coordinator finds the snapshots of the attempt in the records, and no more.
    fn die(&mut self) {
        self.attempts = Attempts::default();
        self.end();
    }

    fn send(&mut self, world: usize, message: Message) {
        let is_lost = matches!(message, Message::Command(..)) && self.random.percent(self.lossy);
        if is_lost {
            return;
        }
        let due = self.now() + self.delay();
        let owner = self.worlds[world].control.record.owner;
        let channel = &mut self.channels[world];
        channel.last_due = due.max(channel.last_due);
        let due = channel.last_due;
        channel.messages.push_back((owner, message));
        self.schedule.at(due, GroupEvent::Deliver(world));
    }

    fn deliver(&mut self, n: usize) {
        let Some((target, message)) = self.channels[n].messages.pop_front() else { return };
        let now = self.now();
        let world = &mut self.worlds[n];
        if world.is_over() {
            return;
        }
        world.wait_until(now);
        match message {
            Message::Delete(snapshot) => world.delete_snapshot(snapshot),
            Message::Command(point, command) => {
                let host = &world.targets[target];
                if host.process.is_none() || host.paused {
                    return;
                }
                let event = match (command.wish(), command) {
                    (Some(wish), _) => PrimaryEvent::Point { point, wish },
                    (None, PointCommand::Confirm { snapshot: id }) => {
                        PrimaryEvent::Snapshot { id, wish: SnapshotWish::Confirm }
                    }
                    (None, _) => return,
                };
                world.feed_target(target, vec![event]);
                self.take_answers(n);
            }
        }
    }

    /// Takes the answers of a volume's targets on their way.
    fn take_answers(&mut self, world: usize) {
        for (point, answer) in std::mem::take(&mut self.worlds[world].operators.points.answers) {
            if !self.random.percent(self.lossy) {
                let due = self.now() + self.delay();
                self.schedule.at(due, GroupEvent::Answer(world, point, answer));
            }
        }
    }

    /// GroupCut: whatever a client was shown before a write of one cut was issued is in the others.
    fn check_cut(&mut self, cuts: &[PointCut]) {
        if cuts.len() != self.worlds.len() {
            let detail = format!("{} of {} volumes are cut", cuts.len(), self.worlds.len());
            return self.worlds[0].violate("GroupCut", detail);
        }
        // Unflushed data may be lost by contract, with what was shown of it.
        if self.worlds.iter().any(|world| world.checkers.durability.tails_lost() > 0) {
            return;
        }
        let mut paths = Vec::new();
        for (world, cut) in self.worlds.iter_mut().zip(cuts) {
            let at = Position { epoch: cut.epoch, lsn: cut.lsn };
            let lineage = &world.checkers.lineage;
            let is_it = |path: &crate::lineage::Path| {
                lineage.snapshots(path).contains(&(cut.snapshot, cut.lsn))
            };
            let Some(path) = lineage.path_at(at).filter(is_it) else {
                let detail = format!("{cut:?} is in no history that was ever sent");
                return world.violate("SnapshotSurvives", detail);
            };
            paths.push(path);
        }
        let mut last_issued = BTreeMap::new();
        for (n, (world, path)) in self.worlds.iter().zip(&paths).enumerate() {
            let writes: BTreeSet<_> = world.checkers.lineage.writes_on(world.setup.run, path);
            let issued = |tag| world.operators.points.issued.get(&tag).map(|at| (*at, tag));
            if let Some(last) = writes.into_iter().filter_map(issued).max() {
                last_issued.insert(n, last);
            }
        }
        let mut lacking = None;
        for (effect_in, (at, effect)) in &last_issued {
            for (n, (world, path)) in self.worlds.iter().zip(&paths).enumerate() {
                let lineage = &world.checkers.lineage;
                let lacks =
                    |(tag, block): &(u32, u64)| lineage.carrier_on(path, *tag, *block).is_none();
                let cause = world.operators.points.shown_before(*at).find(lacks);
                if let (Some((cause, block)), true) = (cause, n != *effect_in) {
                    lacking = Some((
                        n,
                        format!(
                            "write {effect} of volume {effect_in} is cut, and write {cause} of volume {n}, \
                         block {block}, was shown before it was issued and is not"
                        ),
                    ));
                }
            }
        }
        if let Some((n, detail)) = lacking {
            self.worlds[n].violate("GroupCut", detail);
        }
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
        stats.operators.points += self.made;
        let violation = self.worlds.iter().find_map(|world| world.checkers.violation.clone());
        let violation = violation.map(|violation| Violation { seed, ..violation });
        let lines = self.worlds.iter().flat_map(|world| world.trace.lines().iter().cloned());
        let mut lines: Vec<_> = lines.collect();
        lines.sort_by_key(|(at, _)| *at);
        Report { stats, violation, fingerprint: fingerprint ^ self.made, lines }
    }
}

impl World {
    /// Time moves on to an instant at which nothing of this volume happens.
    pub(crate) fn wait_until(&mut self, at: Instant) {
        self.schedule.move_to(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm::Swarm;

    #[test]
    fn points_are_made_over_volumes_whose_targets_are_replaced() {
        let (mut made, mut left) = (0, 0);
        for seed in 1..=12 {
            let options = RunOptions {
                seed,
                store: super::super::StoreKind::Model,
                swarm: Swarm::Groups,
                ..RunOptions::default()
            };
            let mut groups = Groups::new(options);
            groups.run();
            let report = groups.report(seed);
            assert_eq!(report.violation, None);
            (made, left) = (made + groups.made, left + groups.left);
        }
        assert!(left > 2, "only {left} attempts were left");
        assert!(made > 12, "only {made} points were made");
        assert!(made < 12 * 16, "none was ever broken");
    }
}
