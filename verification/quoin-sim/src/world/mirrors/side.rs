//! One side: its store of records, its brains, its volumes.

use std::collections::{BTreeMap, BTreeSet};

use quoin_cluster::mirror::brain::Now;
use quoin_cluster::mirror::{Brain, Event as BrainEvent, Keepsake, Record, Role, Stamp};
use quoin_types::Time;
use quoin_types::ids::{PointId, VolumeId};

use super::volume::Volume;
use super::{MirrorEvent, Mirrors, StoreOutcome};
use crate::schedule::{Instant, MILLISECOND, SECOND};

pub(super) struct Side {
    /// Bytes of the record, and its version.
    record: Vec<u8>,
    pub version: u64,
    /// Every record that was written, for restores.
    history: Vec<(Vec<u8>, u64)>,
    term: u64,
    /// False: there is no record of the group, and [`Self::stored`] is that of a mirror that is over.
    pub is_recorded: bool,
    /// False: they were deleted.
    pub has_volumes: bool,
    /// Brains that live; the second one has not heard that it was replaced.
    pub brains: Vec<(u64, Brain)>,
    pub is_starting: bool,
    pub volumes: BTreeMap<VolumeId, Volume>,
    pub has_mirror: bool,
    pub making: BTreeSet<(u64, PointId)>,
    skew_ms: u64,
}

impl Side {
    pub fn new(record: Record, members: &[VolumeId], blocks: usize, skew_ms: u64) -> Self {
        let bytes = record.encode();
        let keepsake = record.keepsake();
        let volume = |member: &VolumeId| {
            let mut volume = Volume::new(blocks);
            volume.keepsake = Some(keepsake);
            (*member, volume)
        };
        Self {
            history: vec![(bytes.clone(), 1)],
            record: bytes,
            version: 1,
            term: record.term,
            is_recorded: true,
            has_volumes: true,
            brains: Vec::new(),
            is_starting: true,
            volumes: members.iter().map(volume).collect(),
            has_mirror: true,
            making: BTreeSet::new(),
            skew_ms,
        }
    }

    pub fn wall_ms(&self, now: Instant) -> u64 {
        1_700_000_000_000 + self.skew_ms + now / MILLISECOND
    }

    /// The record as it is stored.
    pub fn stored(&self) -> Record {
        Record::decode(&self.record).expect("what was encoded is decoded")
    }

    /// Puts a record in the place of the present one.
    pub fn put(&mut self, record: &Record) {
        self.record = record.encode();
        self.history.push((self.record.clone(), self.version));
    }

    pub fn brain(&self) -> Option<&Brain> {
        self.brains.first().map(|(_, brain)| brain)
    }

    pub fn is_newest(&self, brain: u64) -> bool {
        self.brains.first().is_some_and(|(number, _)| *number == brain)
    }

    /// A client may write to a member of the mirror.
    pub fn rules(&self) -> bool {
        self.is_recorded && self.volumes.values().any(Volume::is_writable)
    }

    /// Points that all members with a base hold.
    pub fn holds(&self, point: PointId) -> bool {
        let record = self.stored();
        let any = record.members.iter().any(|member| member.has_base);
        let mut counted = record.members.iter().filter(|member| member.has_base || !any);
        counted.all(|member| self.volumes.get(&member.volume).is_some_and(|v| v.holds(point)))
    }

    /// The final point of a demotion whose record had this stamp, and was restored away since.
    pub fn ordered_last(&self, stamp: Stamp) -> Option<PointId> {
        let records = self.history.iter().filter(|(_, version)| *version == stamp.version);
        let mut records = records.filter_map(|(bytes, _)| Record::decode(bytes).ok());
        let is_it = |record: &Record| record.term == stamp.term && record.role == Role::Demoting;
        let record = records.find(|record| stamp.term < self.term && is_it(record))?;
        record.points.last
    }

    /// The newest role and generation that any pool keeps.
    fn kept(&self) -> Option<Keepsake> {
        let rank = |keepsake: &Keepsake| (keepsake.begun.generation, !keepsake.is_primary);
        self.volumes.values().filter_map(|volume| volume.keepsake).max_by_key(rank)
    }
}

impl Mirrors {
    pub(super) fn brain_now(&mut self, side: usize) -> Now {
        let now = self.now();
        Now { time: Time(now), wall_ms: self.sides[side].wall_ms(now), draw: self.draws.wide() }
    }

    pub(super) fn feed_brains(&mut self, side: usize, event: &BrainEvent) {
        let numbers: Vec<u64> = self.sides[side].brains.iter().map(|(number, _)| *number).collect();
        for number in numbers {
            self.feed_brain(side, number, event.clone());
        }
    }

    pub(super) fn feed_brain(&mut self, side: usize, number: u64, event: BrainEvent) {
        let now = self.brain_now(side);
        let brains = &mut self.sides[side].brains;
        let Some((_, brain)) = brains.iter_mut().find(|(other, _)| *other == number) else {
            return;
        };
        let mut actions = Vec::new();
        brain.on(now, event, &mut actions);
        self.act(side, number, actions);
    }

    pub(super) fn store(
        &mut self,
        side: usize,
        brain: u64,
        expected: u64,
        record: Record,
        is_heard: bool,
    ) {
        let before = self.sides[side].stored();
        let to = &mut self.sides[side];
        // The former store of a controller whose records were restored elsewhere is no one's.
        if record.term != to.term || !to.is_recorded {
            return;
        }
        let outcome = if to.version == expected {
            to.version += 1;
            to.record = record.encode();
            to.history.push((to.record.clone(), to.version));
            StoreOutcome::Written(to.version)
        } else {
            StoreOutcome::Changed(Box::new(before.clone()), to.version)
        };
        if let StoreOutcome::Written(version) = outcome {
            self.trace.mix(version, side as u64);
            let role = record.role;
            self.say(|| {
                format!(
                    "{side}: record {version} {role:?} top {:?} {:?} {:?} {:?} unsure {}",
                    record.chain.top(),
                    record.points,
                    record.receiving.as_ref().map(|r| (r.transfer, r.is_begun, r.cursors.clone())),
                    record.claims,
                    record.is_unsure,
                )
            });
            self.check_recorded(side, &before, &record);
            // Every other process that works on the record is told of its change.
            let others: Vec<u64> = self.sides[side].brains.iter().map(|(n, _)| *n).collect();
            for other in others.into_iter().filter(|other| *other != brain) {
                let outcome = StoreOutcome::Changed(Box::new(record.clone()), version);
                let delay = self.random.below(2 * SECOND);
                self.schedule.after(delay, MirrorEvent::Stored { side, brain: other, outcome });
            }
        }
        if is_heard {
            let delay = self.random.below(20 * MILLISECOND);
            self.schedule.after(delay, MirrorEvent::Stored { side, brain, outcome });
        } else {
            // Its answer is lost, and with it the process that waits for it.
            self.kill_brain(side);
        }
    }

    pub(super) fn kill_brain(&mut self, side: usize) {
        self.sides[side].brains.clear();
        self.plan_start(side);
        self.say(|| format!("{side}: the brain is killed"));
    }

    fn plan_start(&mut self, side: usize) {
        if !self.sides[side].is_starting {
            self.sides[side].is_starting = true;
            let delay = if self.is_calm { SECOND } else { self.random.below(15 * SECOND) };
            self.schedule.after(delay, MirrorEvent::Start(side));
        }
    }

    pub(super) fn start_brain(&mut self, side: usize) {
        let now = self.brain_now(side);
        let is_first = now.time.0 < SECOND;
        let to = &mut self.sides[side];
        to.is_starting = false;
        if !to.is_recorded {
            return;
        }
        let brain = Brain::new(now, to.stored(), to.version);
        // At most two at once.
        to.brains.truncate(1);
        let number = now.draw as u64;
        to.brains.insert(0, (number, brain));
        let is_running = to.has_mirror;
        self.say(|| format!("{side}: a brain begins"));
        self.feed_brain(side, number, BrainEvent::OwnMirror { is_running });
        if is_first {
            self.schedule.after(MILLISECOND, MirrorEvent::Tick(side));
        }
    }

    pub(super) fn set_mirror(&mut self, side: usize, is_running: bool) {
        self.sides[side].has_mirror = is_running;
        self.feed_brains(side, &BrainEvent::OwnMirror { is_running });
    }

    /// Older records are put in place of the present ones and recovered: a new term rules.
    pub(super) fn restore(&mut self, side: usize) {
        let to = &mut self.sides[side];
        let back = self.random.index(to.history.len().min(40));
        let (bytes, version) = to.history[to.history.len() - 1 - back].clone();
        let Some(kept) = to.kept() else { return };
        let Ok(older) = Record::decode(&bytes) else { return };
        to.term += 1;
        let record = older.recovered(kept, to.term);
        to.version = version;
        to.record = record.encode();
        to.history.push((to.record.clone(), version));
        to.brains.clear();
        self.checks.restores += 1;
        self.say(|| {
            format!(
                "{side}: records of {back} changes ago are recovered: {:?} {:?}",
                record.role, record.points
            )
        });
        self.plan_start(side);
    }
}
