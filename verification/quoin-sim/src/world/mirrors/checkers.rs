//! Promises of a mirror, held against the run.

use std::collections::BTreeMap;

use quoin_cluster::mirror::brain::Now;
use quoin_cluster::mirror::word::Message;
use quoin_cluster::mirror::{Generation, Member, Record, Role, Stamp};
use quoin_types::Time;
use quoin_types::ids::{PointId, VolumeId};

use super::side::Side;
use super::volume::{Content, Tag, is_same};
use super::{Mirrors, cluster, volume};

/// An acknowledged write.
#[derive(Clone, Copy, Debug)]
struct Acknowledged {
    volume: VolumeId,
    block: usize,
    tag: Tag,
    wall_ms: u64,
    generation: Generation,
}

#[derive(Default)]
pub(super) struct Checks {
    pub violation: Option<(&'static str, String)>,
    /// Content of each point at its source.
    points: BTreeMap<PointId, BTreeMap<VolumeId, Content>>,
    /// Acknowledged writes of each generation, on top of the content that it began with.
    truth: BTreeMap<Generation, BTreeMap<VolumeId, Content>>,
    acknowledged: Vec<Acknowledged>,
    /// The highest generation and role that each side said.
    said: [(u64, Option<Generation>, u8); 2],
    pub forced: u64,
    pub restores: u64,
    pub promotions: u64,
    pub completions: u64,
    pub slots: u64,
    pub points_made: u64,
    pub checked: u64,
    had_common: bool,
    pub idle_since: Option<(u64, u64)>,
    pub resyncs: u64,
    streams: u64,
    pub take_overs: u64,
    /// Newest time that was told while a generation ruled.
    told: BTreeMap<Generation, u64>,
}

impl Checks {
    pub fn next_stream(&mut self) -> u64 {
        self.streams += 1;
        self.streams
    }

    pub fn content(&self, point: PointId, volume: VolumeId) -> Option<&Content> {
        self.points.get(&point)?.get(&volume)
    }

    /// A side that has a record of another mirror says anything of it.
    pub fn forget_said(&mut self, side: usize) {
        self.said[side] = (0, None, 0);
    }

    pub fn told_ms(&self, generation: Generation) -> Option<u64> {
        self.told.get(&generation).copied()
    }

    /// A write of a generation that was acknowledged before this time, and is in none of these views.
    pub fn lacking(
        &self,
        generation: Generation,
        before_ms: u64,
        shown: &BTreeMap<VolumeId, Content>,
    ) -> Option<(VolumeId, usize, Tag)> {
        let counts =
            |write: &&Acknowledged| write.generation == generation && write.wall_ms < before_ms;
        let lacks = |write: &&Acknowledged| {
            let live = shown.get(&write.volume);
            live.is_some_and(|live| live.get(write.block).is_none_or(|has| *has < write.tag))
        };
        let found = self.acknowledged.iter().filter(counts).find(lacks)?;
        Some((found.volume, found.block, found.tag))
    }

    pub fn new(first: Generation, members: usize, blocks: usize) -> Self {
        let truth = (0..members).map(|member| (volume(member), vec![0; blocks])).collect();
        Self { truth: BTreeMap::from([(first, truth)]), ..Self::default() }
    }
}

impl Mirrors {
    pub(super) fn check_write(
        &mut self,
        side: usize,
        volume: VolumeId,
        (block, tag): (usize, Tag),
        wall_ms: u64,
    ) {
        if !self.sides[side].is_recorded {
            return;
        }
        let record = self.sides[side].stored();
        let generation = record.chain.top().generation;
        // Records may be restored meanwhile: pools know better.
        let kept = self.sides[side].volumes[&volume].keepsake;
        let generation = kept.map_or(generation, |kept| kept.begun.generation);
        if generation.cluster != cluster(side) {
            self.violate("OnePrimaryPerG", format!("{side} writes under {generation:?}"));
        }
        let truth = self.checks.truth.entry(generation).or_default();
        if let Some(content) = truth.get_mut(&volume) {
            content.resize(content.len().max(block + 1), 0);
            content[block] = tag;
        }
        self.checks.checked += 1;
        let write = Acknowledged { volume, block, tag, wall_ms, generation };
        self.checks.acknowledged.push(write);
        let rules = |side: usize| self.sides[side].rules();
        if self.checks.forced == 0 && rules(0) && rules(1) {
            self.violate("NoSecondPrimaryWithoutForce", format!("{side} writes beside the other"));
        }
    }

    /// Another mirror begins with what its primary shows; nothing of the former one counts.
    pub(super) fn check_begun(&mut self, side: usize, record: &Record) {
        let generation = record.chain.top().generation;
        let shown = self.sides[side].volumes.iter();
        let shown = shown.map(|(volume, target)| (*volume, target.live.clone())).collect();
        if self.checks.truth.insert(generation, shown).is_some() {
            self.violate("OnePrimaryPerG", format!("{side}: {generation:?} begins a second time"));
        }
        self.checks.forget_said(side);
        (self.checks.forced, self.checks.had_common) = (0, false);
    }

    /// A volume has another size for its clients from here on.
    pub(super) fn check_grown(&mut self, side: usize, volume: VolumeId) {
        let target = &self.sides[side].volumes[&volume];
        let (size, kept) = (target.live.len(), target.keepsake);
        let generation = kept.map(|kept| kept.begun.generation);
        let truth = generation.and_then(|generation| self.checks.truth.get_mut(&generation));
        if let Some(content) = truth.and_then(|truth| truth.get_mut(&volume)) {
            content.resize(size.max(content.len()), 0);
        }
    }

    pub(super) fn check_named(
        &mut self,
        side: usize,
        point: PointId,
        contents: Vec<(VolumeId, Content)>,
    ) {
        let contents = contents.into_iter().collect();
        let before = self.checks.points.insert(point, contents);
        let after = &self.checks.points[&point];
        if before.is_some_and(|before| before != *after) {
            self.violate("DigestMatches", format!("{side}: {point:?} names two contents"));
        }
    }

    /// A member is cut: the final point of a demotion, or a point of a copy.
    pub(super) fn check_cut(
        &mut self,
        side: usize,
        volume: VolumeId,
        stamp: Stamp,
        point: PointId,
    ) {
        let role = self.sides[side].stored().role;
        let live = self.sides[side].volumes[&volume].live.clone();
        // The cut of a demotion that a restore undid may come late: it was ordered under the term before.
        let is_undone = self.sides[side].ordered_last(stamp) == Some(point);
        if role == Role::Demoting || is_undone {
            let of = self.checks.points.entry(point).or_default();
            of.insert(volume, live);
            return;
        }
        let Some(content) = self.checks.points.get(&point).and_then(|of| of.get(&volume)) else {
            return self
                .violate("DigestMatches", format!("{side}: {point:?} of {volume:?} is no point"));
        };
        if !is_same(content, &live) {
            let detail = format!("{side}: {volume:?} at {point:?} is {live:?}, not {content:?}");
            self.violate("DigestMatches", detail);
        }
    }

    /// The live view was overwritten: what clients wrote is elsewhere, or a person discarded it.
    pub(super) fn check_overwritten(&mut self, side: usize, volume: VolumeId, former: &Content) {
        let Some(target) = self.sides[side].volumes.get_mut(&volume) else { return };
        if !std::mem::replace(&mut target.is_written, false) {
            return;
        }
        let target = &self.sides[side].volumes[&volume];
        let is_it = |content: &Content| is_same(content, former);
        let is_lost_kept = target.lost.as_ref().is_some_and(|(_, kept)| is_it(kept));
        let peer = &self.sides[1 - side].volumes[&volume];
        let is_there = peer.points.iter().any(|(_, content)| is_it(content));
        let record = self.sides[side].stored();
        let is_in_chain = record.chain.all().iter().filter_map(|begun| begun.at).any(|point| {
            self.checks.points.get(&point).and_then(|of| of.get(&volume)).is_some_and(is_it)
        });
        let is_held = target.points.iter().any(|(_, content)| is_it(content));
        if is_lost_kept || is_there || is_in_chain || is_held && record.role == Role::Promoting {
            return;
        }
        let rule = if record.role == Role::Resyncing {
            "LostKeptBeforeRevert"
        } else {
            "DivergedNeverOverwrittenWithoutForce"
        };
        self.violate(rule, format!("{side}: {volume:?} showed {former:?} as {:?}", record.role));
    }

    pub(super) fn check_recorded(&mut self, side: usize, before: &Record, after: &Record) {
        if after.role == Role::Promoting && before.role != Role::Promoting {
            self.checks.forced += u64::from(after.claims.is_forced);
        }
        if after.role == Role::Primary && before.role == Role::Promoting {
            self.check_promoted(side, before, after);
        }
        if before.role == Role::Resyncing && after.role == Role::Secondary {
            self.checks.resyncs += 1;
            // The side discarded its own generation.
            self.checks.said[side] = (0, None, 0);
        }
        self.check_ended(side, before, after);
        self.checks.take_overs +=
            u64::from(after.role == Role::Demoting && before.role == Role::Primary);
        if after.points.complete != before.points.complete
            && after.role == Role::Secondary
            && let Some(point) = after.points.complete
        {
            self.checks.completions += 1;
            self.checks.had_common = true;
            if !self.sides[side].holds(point) {
                self.violate(
                    "PointMeansAllMembers",
                    format!("{side}: {point:?} is not held by all"),
                );
            }
            let joined = |member: &&Member| member.has_base;
            let lacks = after
                .members
                .iter()
                .filter(joined)
                .find(|member| !self.sides[side].volumes[&member.volume].holds(point));
            if let Some(member) = lacks.copied() {
                self.violate("PointMeansAllMembers", format!("{side}: {member:?} lacks {point:?}"));
            }
        }
    }

    fn check_promoted(&mut self, side: usize, before: &Record, after: &Record) {
        self.checks.promotions += 1;
        let begun = after.chain.top();
        let Some(point) = begun.at else {
            return self.violate("PromoteShowsCompletePoint", format!("{side}: no point"));
        };
        if self.checks.truth.contains_key(&begun.generation) {
            let detail = format!("{side}: {:?} begins a second time", begun.generation);
            // A restore may have undone a beginning that nobody heard of.
            if self.checks.restores == 0 {
                return self.violate("OnePrimaryPerG", detail);
            }
        }
        let mut shown = BTreeMap::new();
        for member in after.members.iter().filter(|member| member.has_base) {
            let live = self.sides[side].volumes[&member.volume].live.clone();
            let promised = self.checks.points.get(&point).and_then(|of| of.get(&member.volume));
            let is_shown = |promised: &Content| is_same(promised, &live);
            if !promised.is_some_and(is_shown) {
                let detail = format!(
                    "{side}: {:?} shows {live:?}, {point:?} is {promised:?}",
                    member.volume
                );
                return self.violate("PromoteShowsCompletePoint", detail);
            }
            shown.insert(member.volume, live);
        }
        self.check_told(side, before.chain.top().generation, &shown);
        if !before.claims.is_forced {
            let former = before.chain.top().generation;
            let truth = &self.checks.truth[&former];
            let is_shown = |volume, live| truth.get(volume).is_some_and(|all| is_same(all, live));
            let lacks = shown.iter().find(|(volume, live)| !is_shown(*volume, *live));
            if let Some((volume, live)) = lacks {
                let detail = format!(
                    "{side}: {volume:?} shows {live:?}, acknowledged {:?}",
                    truth.get(volume)
                );
                return self.violate("PlannedMoveLosesNothing", detail);
            }
            let size = |volume| truth.get(volume).map_or(0, Vec::len);
            if let Some((volume, live)) = shown.iter().find(|(v, live)| live.len() < size(v)) {
                let detail = format!(
                    "{side}: {volume:?} has {} blocks, and had {}",
                    live.len(),
                    size(volume)
                );
                return self.violate("SizesFirst", detail);
            }
        }
        for (volume, target) in &self.sides[side].volumes {
            shown.entry(*volume).or_insert_with(|| target.live.clone());
        }
        self.checks.truth.insert(begun.generation, shown);
    }

    pub(super) fn check_message(&mut self, side: usize, bytes: &[u8]) {
        let Ok(message) = Message::decode(bytes) else {
            return self.violate("Bounds", format!("{side}: a message is not decoded"));
        };
        let Some(word) = message.word else { return };
        if let Some(point) = word.complete.filter(|_| word.role == Role::Secondary)
            && !self.sides[side].holds(point)
            && self.checks.restores == 0
        {
            self.violate("PointMeansAllMembers", format!("{side}: tells of {point:?}"));
        }
        let generation = word.chain.top().generation;
        let rank = u8::from(word.role != Role::Primary);
        let (number, before, former) = self.checks.said[side];
        let is_back = generation.number < number || before == Some(generation) && rank < former;
        if is_back {
            let detail = format!("{side}: {:?} in {generation:?} after {before:?}", word.role);
            self.violate("RoleNeverGoesBack", detail);
        }
        self.checks.said[side] = (generation.number, Some(generation), rank);
    }

    /// After each event.
    pub(super) fn check_sides(&mut self) {
        if self.checks.had_common && !self.is_ended() {
            let mut points =
                self.sides[0].volumes[&volume(0)].points.iter().map(|(point, _)| *point);
            let is_common = points.any(|point| self.sides.iter().all(|side| side.holds(point)));
            if !is_common {
                self.violate("LastCommonPinnedBothSides", "no point is held by both".into());
            }
        }
        if self.checks.forced == 0 && self.sides.iter().all(Side::rules) {
            self.violate("NoSecondPrimaryWithoutForce", "both sides may write".into());
        }
    }

    /// SyncTimeIsTrue: all that was acknowledged before the told time is in a point that the other side has.
    pub(super) fn check_sync_time(&mut self, side: usize) {
        let now = self.now();
        let now = Now { time: Time(now), wall_ms: self.sides[side].wall_ms(now), draw: 0 };
        let Some(brain) = self.sides[side].brain() else { return };
        let Some(synced_ms) = brain.synced_ms(now) else { return };
        let generation = brain.record().chain.top().generation;
        if generation.cluster != cluster(side) || brain.record().role != Role::Primary {
            return;
        }
        let peer = &self.sides[1 - side];
        let mut newest: BTreeMap<(VolumeId, usize), Tag> = BTreeMap::new();
        for write in &self.checks.acknowledged {
            if write.generation == generation && write.wall_ms < synced_ms {
                newest.insert((write.volume, write.block), write.tag);
            }
        }
        let lacks = newest.into_iter().find(|((volume, block), tag)| {
            let points = &peer.volumes[volume].points;
            let has_it = |content: &Content| content.get(*block).is_some_and(|has| has >= tag);
            !points.iter().any(|(point, content)| has_it(content) && peer.holds(*point))
        });
        self.checks.checked += 1;
        if let Some(((volume, block), tag)) = lacks {
            let detail = format!("{side}: told {synced_ms}, {volume:?} block {block} lacks {tag}");
            return self.violate("SyncTimeIsTrue", detail);
        }
        // Records that are restored do not know what was told.
        if self.checks.restores == 0 {
            let told = self.checks.told.entry(generation).or_default();
            *told = (*told).max(synced_ms);
        }
    }

    /// Liveness: one side is primary, and the other one has all that it shows.
    pub(super) fn check_well(&mut self) {
        let records = [self.sides[0].stored(), self.sides[1].stored()];
        if self.is_ended() {
            if records.iter().any(|record| record.role != Role::Off) {
                let roles = [records[0].role, records[1].role];
                self.violate("Liveness", format!("the application is deleted: {roles:?}"));
            }
            return;
        }
        let primary = records.iter().position(|record| record.role == Role::Primary);
        let state = || {
            let shown = records.iter().map(|record| {
                format!(
                    "{:?} {:?} top {:?} {:?} unsure {}",
                    record.role,
                    record.points,
                    record.chain.top(),
                    record.receiving,
                    record.is_unsure
                )
            });
            shown.collect::<Vec<_>>().join(" | ")
        };
        let Some(primary) = primary.filter(|p| records[1 - p].role == Role::Secondary) else {
            let detail = state();
            return self.violate("Liveness", detail);
        };
        let copy = &records[1 - primary];
        let is_whole = copy.points.complete.is_some_and(|complete| {
            let of = self.checks.points.get(&complete);
            self.sides[primary].volumes.iter().all(|(volume, target)| {
                let content = of.and_then(|of| of.get(volume));
                content.is_some_and(|content| is_same(content, &target.live))
            })
        });
        if !is_whole || copy.receiving.is_some() {
            let detail = state();
            self.violate("Liveness", detail);
        }
    }

    /// IdleIsFree: nothing is cut and nothing is sent for a group that nobody writes, and the told time goes on.
    pub(super) fn check_idle(&mut self) {
        let Some((points, slots)) = self.checks.idle_since else { return };
        if (self.checks.points_made, self.checks.slots) != (points, slots) {
            let made = self.checks.points_made - points;
            self.violate("IdleIsFree", format!("{made} points were cut"));
        }
        let Some(primary) = self.sides.iter().position(|side| side.stored().role == Role::Primary)
        else {
            return;
        };
        let at = self.now();
        let now = Now { time: Time(at), wall_ms: self.sides[primary].wall_ms(at), draw: 0 };
        let synced = self.sides[primary].brain().and_then(|brain| brain.synced_ms(now));
        if synced.is_none_or(|synced| synced + 5000 < now.wall_ms) {
            self.violate("IdleIsFree", format!("{synced:?} is told at {}", now.wall_ms));
        }
    }
}
