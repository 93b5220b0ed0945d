//! Events in, actions out.

use std::collections::BTreeMap;

use quoin_types::ids::{PointId, VolumeId};
use quoin_types::mutant;
use quoin_types::time::Time;

use super::chain::{Begun, Generation, Relation};
use super::observed::Observed;
use super::record::{Member, Receiving, Record, Role, Stamp, Transfer};
use super::session::{Received, Session};
use super::word::{Message, Offer, Want, Word};
use super::{POINTS_TOLD_MAX, SAY_AGAIN, SILENT_AFTER};

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    Tick,
    Observed(VolumeId, Box<Observed>),
    /// The record was written.
    Stored {
        version: u64,
    },
    /// The record was changed since it was read.
    Changed {
        record: Box<Record>,
        version: u64,
    },
    /// The cuts of a point count.
    PointMade {
        point: PointId,
        cut_ms: u64,
    },
    /// Nothing of a point counts.
    PointBroken {
        point: PointId,
    },
    /// A mirror of this cluster received a frame of the other cluster.
    Heard,
    OwnMirror {
        is_running: bool,
    },
    Message(Vec<u8>),
}

/// Order to one member. All of them may be given again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Takes everything back that was granted, by a higher epoch, and reports this number once an open
    /// quorum of the pools refuses it.
    Fence(u128),
    /// Has pools keep role and generation.
    Keep {
        is_primary: bool,
        begun: Begun,
    },
    /// Order to cut the live view, which takes no writes.
    Cut(PointId),
    Drop(PointId),
    Revert(PointId),
    /// Lends a target that takes the slots of this transfer alone.
    Receive {
        transfer: Transfer,
        token: u128,
        from: u64,
    },
    /// Makes the volume so large, in blocks, unless it is larger.
    Grow(u64),
    /// Takes no slots any more.
    Stop,
    /// Keeps the live view in a snapshot that no transfer touches.
    KeepLost(PointId),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Writes the record if it still has this version.
    Store {
        expected: u64,
        record: Box<Record>,
    },
    Send(Vec<u8>),
    /// Cuts one point over all members, while their clients go on.
    MakePoint {
        stamp: Stamp,
        point: PointId,
        members: Vec<VolumeId>,
    },
    Member {
        volume: VolumeId,
        stamp: Stamp,
        order: Order,
    },
    /// Sends the slots of a member to the other side.
    Ship {
        volume: VolumeId,
        transfer: Transfer,
        token: u128,
        from: u64,
    },
}

/// The brain of one group on one side.
#[derive(Clone, Debug)]
pub struct Brain {
    pub(super) record: Record,
    pub(super) version: u64,
    storing: Option<Record>,
    pub(super) members: BTreeMap<VolumeId, Observed>,
    session: Session,
    pub(super) heard: Option<Word>,
    heard_at: Option<Time>,
    own_mirror_since: Option<Time>,
    /// The last time at which the transfer got on, or the other side said something new.
    pub(super) progress_at: Time,
    said: Option<(Time, Option<Word>)>,
    ordered: Option<(Time, Vec<Action>)>,
    /// The point that this life named, and the time of its cuts once they count.
    pub(super) cut: Option<(PointId, Option<u64>)>,
    pub(super) cursors_at: Time,
    /// The newest moment that was known to be on the other side, and the generation that it is of. The moment
    /// counts in silence too.
    pub(super) synced: Option<(Generation, u64)>,
}

/// The time, and a random number of which at most one id is made.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub time: Time,
    pub wall_ms: u64,
    pub draw: u128,
}

impl Brain {
    /// A brain begins with the record as it is.
    pub fn new(now: Now, record: Record, version: u64) -> Self {
        Self {
            record,
            version,
            storing: None,
            members: BTreeMap::new(),
            session: Session::new((now.draw as u64).max(1)),
            heard: None,
            heard_at: None,
            own_mirror_since: None,
            progress_at: now.time,
            said: None,
            ordered: None,
            cut: None,
            cursors_at: now.time,
            synced: None,
        }
    }

    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The last word of the other side in this life.
    pub fn heard(&self) -> Option<&Word> {
        self.heard.as_ref()
    }

    /// Returns true for the point that this life named, while its cuts may count.
    pub(super) fn has_named(&self, point: PointId) -> bool {
        self.cut.is_some_and(|(named, _)| named == point)
    }

    pub(super) fn is_storing(&self) -> bool {
        self.storing.is_some()
    }

    pub fn on(&mut self, now: Now, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Tick => {}
            Event::Observed(volume, observed) => self.observe(now, volume, *observed),
            Event::Stored { version } => {
                if let Some(record) = self.storing.take() {
                    self.record = record;
                    self.version = version;
                }
            }
            Event::Changed { record, version } => {
                let known = (self.record.term, self.version);
                // A change that was overtaken by what is known says nothing.
                if (record.term, version) > known {
                    self.storing = None;
                    self.cut = None;
                    // The life that wrote it may have heard a newer word.
                    if !mutant::is("word-of-before-another-life-believed") {
                        self.heard = None;
                    }
                    self.record = *record;
                    self.version = version;
                }
            }
            Event::PointMade { point, cut_ms } => {
                if self.cut.is_some_and(|(named, _)| named == point) {
                    self.cut = Some((point, Some(cut_ms)));
                }
            }
            Event::PointBroken { point } => {
                if self.is_cutting(point) {
                    self.cut = None;
                }
            }
            Event::Heard => self.heard_at = Some(now.time),
            Event::OwnMirror { is_running } => {
                let since = self.own_mirror_since.unwrap_or(now.time);
                self.own_mirror_since = is_running.then_some(since);
            }
            Event::Message(bytes) => self.receive(now, &bytes),
        }
        self.note_synced(now);
        self.go_on(now, out);
    }

    /// Says what is to be done as the record is: first its next change, and the orders only without one.
    pub(super) fn go_on(&mut self, now: Now, out: &mut Vec<Action>) {
        if self.storing.is_none() {
            match self.next_record(now) {
                Some(record) => self.store(record, out),
                None => self.order(now, out),
            }
        }
        self.say(now, out);
    }

    /// Says what members are to do where that is new, and again after a while.
    fn order(&mut self, now: Now, out: &mut Vec<Action>) {
        let mut orders = Vec::new();
        self.orders(&mut orders);
        let is_said =
            |(at, said): &(Time, Vec<Action>)| *said == orders && now.time.since(*at) < SAY_AGAIN;
        if !self.ordered.as_ref().is_some_and(is_said) {
            out.extend(orders.iter().cloned());
            self.ordered = Some((now.time, orders));
        }
    }

    pub(super) fn store(&mut self, record: Record, out: &mut Vec<Action>) {
        if record.points.cutting != self.record.points.cutting {
            self.cut = record.points.cutting.map(|point| (point, None));
        }
        let record = Box::new(record);
        out.push(Action::Store { expected: self.version, record: record.clone() });
        self.storing = Some(*record);
    }

    fn observe(&mut self, now: Now, volume: VolumeId, observed: Observed) {
        let known = self.members.get(&volume);
        if known.is_some_and(|known| known.serial >= observed.serial) {
            return;
        }
        if known.is_none_or(|known| known.stable_to != observed.stable_to) {
            self.progress_at = now.time;
        }
        self.members.insert(volume, observed);
    }

    fn receive(&mut self, now: Now, bytes: &[u8]) {
        let Ok(message) = Message::decode(bytes) else { return };
        if message.group != self.record.group {
            return;
        }
        match self.session.receive(message.header, (now.draw >> 64) as u64) {
            Received::Late => {}
            Received::Challenged => self.said = None,
            Received::Counts => {
                self.heard_at = Some(now.time);
                if let Some(word) = message.word {
                    if self.heard.as_ref() != Some(&word) {
                        self.progress_at = now.time;
                    }
                    self.heard = Some(word);
                }
            }
        }
    }

    fn say(&mut self, now: Now, out: &mut Vec<Action>) {
        let word = self.word();
        let is_new = match &self.said {
            None => true,
            Some((at, said)) => *said != word || now.time.since(*at) >= SAY_AGAIN,
        };
        if is_new {
            let header = self.session.send();
            let message = Message { group: self.record.group, header, word: word.clone() };
            out.push(Action::Send(message.encode()));
            self.said = Some((now.time, word));
        }
    }

    /// The word of this side, as the stored record has it.
    fn word(&self) -> Option<Word> {
        let record = &self.record;
        let is_at_rest = !matches!(record.role, Role::Demoting | Role::Promoting);
        let is_kept = record.role == Role::Off || self.pools_have_it();
        if !is_at_rest || !is_kept && !mutant::is("role-told-before-its-pools-have-it") {
            return None;
        }
        let mut held = self.held();
        held.drain(..held.len().saturating_sub(POINTS_TOLD_MAX));
        let mut yielded = record.claims.yielded;
        if mutant::is("claim-not-recorded-by-the-yielder") {
            yielded = yielded.or(self.heard.as_ref().and_then(|word| word.claim));
        }
        Some(Word {
            role: record.role,
            chain: record.chain.clone(),
            members: record.members.clone(),
            held,
            offer: self.offer(),
            want: record
                .receiving
                .as_ref()
                .filter(|receiving| receiving.is_begun)
                .map(|r| self.want(r)),
            complete: record.points.complete,
            common: record.points.common,
            last: record.points.last,
            claim: record.claims.own,
            yielded,
            asks_step_down: record.asks_step_down,
            resync: record.lost.filter(|_| record.role == Role::Resyncing),
            heard_resync: self
                .heard
                .as_ref()
                .and_then(|word| word.resync)
                .filter(|_| record.role == Role::Primary),
            parameters: record.parameters,
        })
    }

    fn offer(&self) -> Option<Offer> {
        let points = &self.record.points;
        let word = self.heard.as_ref()?;
        let point = points.offered.filter(|point| word.complete != Some(*point))?;
        if !self.holds(point) {
            return None;
        }
        let is_same = self.record.chain.relation(&word.chain) == Relation::Same;
        if !is_same || !self.record.is_own() || self.record.is_unsure {
            return None;
        }
        let both = |base: &&PointId| word.held.contains(base) && **base != point;
        let base = self.held().iter().rev().find(both).copied();
        // A report that has the point was written after its cut: the sizes are those of the cut, or larger.
        let size = |member: &Member| self.members.get(&member.volume).map(|seen| seen.blocks);
        let blocks = self.record.members.iter().map(size).collect::<Option<Vec<u64>>>()?;
        let transfer = Transfer { point, base };
        Some(Offer { transfer, cut_ms: points.offered_cut_ms, blocks })
    }

    /// Members that a point must have: those with a base, or all where none has one yet.
    pub(super) fn counted(&self) -> impl Iterator<Item = VolumeId> + '_ {
        let members = &self.record.members;
        let any = members.iter().any(|member| member.has_base);
        members.iter().filter(move |member| member.has_base || !any).map(|member| member.volume)
    }

    /// Returns true if every counted member reported, and this of it.
    pub(super) fn all(&self, is: impl Fn(&Observed) -> bool) -> bool {
        self.counted().all(|volume| self.members.get(&volume).is_some_and(&is))
    }

    /// Returns true if every member reported this of it, one that joins too: its first transfer is waited for,
    /// as the next one would begin it anew.
    pub(super) fn every(&self, is: impl Fn(&Observed) -> bool) -> bool {
        let seen = |member: &Member| self.members.get(&member.volume);
        self.record.members.iter().all(|member| seen(member).is_some_and(&is))
    }

    /// Members of which there is a report.
    pub(super) fn reported(&self) -> impl Iterator<Item = &Observed> {
        self.record.members.iter().filter_map(|member| self.members.get(&member.volume))
    }

    /// Points that every counted member holds, in the order of their cuts.
    pub(super) fn held(&self) -> Vec<PointId> {
        let Some(first) = self.counted().next().and_then(|volume| self.members.get(&volume)) else {
            return Vec::new();
        };
        first.points.iter().copied().filter(|point| self.holds(*point)).collect()
    }

    pub(super) fn holds(&self, point: PointId) -> bool {
        self.all(|member| member.holds(point))
    }

    pub(super) fn is_at(&self, point: PointId) -> bool {
        self.all(|member| member.at == Some(point))
    }

    /// Nothing was written since the last common point.
    pub fn is_idle(&self) -> bool {
        let has_base = self.record.members.iter().all(|member| member.has_base);
        has_base && self.record.points.common.is_some_and(|common| self.is_at(common))
    }

    pub(super) fn pools_have_it(&self) -> bool {
        let keepsake = self.record.keepsake();
        self.all(|member| member.keepsake == Some(keepsake))
    }

    /// The point is named by this life, and has no verdict yet. Its cut is begun, and its verdict counts, only then: one
    /// that is made already is on its way to the other side.
    pub fn is_cutting(&self, point: PointId) -> bool {
        self.cut == Some((point, None))
    }

    /// The newest point that both sides hold.
    pub(super) fn newest_of_both(&self) -> Option<PointId> {
        let word = self.heard.as_ref()?;
        self.held().into_iter().rev().find(|point| word.held.contains(point))
    }

    /// The other side is primary and knows of the resync, so it does not discard its own side meanwhile.
    pub(super) fn may_discard(&self) -> bool {
        let is_heard = |word: &Word| {
            let is_known = word.heard_resync.is_some() && word.heard_resync == self.record.lost;
            word.role == Role::Primary && is_known
        };
        self.heard.as_ref().is_some_and(is_heard)
            || mutant::is("resync-beside-a-resync") && self.heard.is_some()
    }

    /// No mirror of the other cluster was heard, though one of this cluster could have.
    pub fn is_silent(&self, now: Time) -> bool {
        if mutant::is("silence-of-the-own-mirror-taken-for-the-peers") {
            return self.heard_at.is_none_or(|at| now.since(at) >= SILENT_AFTER);
        }
        let Some(since) = self.own_mirror_since else { return false };
        let last = self.heard_at.map_or(since, |at| at.max(since));
        now.since(last) >= SILENT_AFTER
    }

    /// Places where the members' streams begin: their cursors, or what their targets have where that is less. A
    /// target takes no stream that begins behind what it has.
    fn want(&self, receiving: &Receiving) -> Want {
        let own = Some(receiving.order());
        let from = |(member, cursor): (&Member, &u64)| {
            let seen = self.members.get(&member.volume).filter(|seen| seen.order == own);
            let is_at_cursor = mutant::is("stream-begins-behind-what-its-target-has");
            seen.filter(|_| !is_at_cursor).map_or(*cursor, |seen| seen.taken_to.min(*cursor))
        };
        Want {
            transfer: receiving.transfer,
            token: receiving.token,
            cursors: self.record.members.iter().zip(&receiving.cursors).map(from).collect(),
        }
    }

    pub(super) fn has_own_mirror(&self) -> bool {
        self.own_mirror_since.is_some()
    }
}
