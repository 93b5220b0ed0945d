//! Changed ranges between two snapshots, with or without data: for backups and for copies of a
//! volume that lie elsewhere.
//!
//! A part is read from one in-sync member that holds both snapshots, and answered with the block
//! where the next part begins. So a caller can go on after any interruption, at any target, with
//! any member: both snapshots are fixed, and versions only grow, so each part is the same wherever
//! it is read. Ranges are of whole blocks and in order; what no range names did not change. Data is
//! as it is stored, and is checked against its checksum; a part ends before a block that its member
//! has no good copy of, and the next part is asked of another member.
//!
//! Changes of the volume itself since a snapshot are told in the same way, for figures of space:
//! without data, and each part as of its moment.
//!
//! Only snapshots that are stable are read, and the answer leaves under a live lease like any
//! other. Data is copied at the pace of a rebuild ([`pace`](super::pace)).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{Link, Phase, Primary, PrimaryAction};
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::membership::Member;
use quoin_types::message::{ChangedRange, Content, ReadView, RequestId, Slot, ToReplica};
use quoin_types::mutant;
use quoin_types::time::Time;

/// Limit of requests under way; the caller repeats what was refused.
const REQUESTS_MAX: usize = 16;
/// The same for those with data, each of which holds an answer of some hundred KiB.
const DATA_REQUESTS_MAX: usize = 4;
/// Size of one answer of a member. A slot counts as 64 bytes.
const ANSWER_BYTES: u32 = 256 << 10;
/// Time after which a silent member is passed over.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval of looks whether a snapshot is stable.
const STABLE_SOON: Duration = Duration::from_millis(20);
/// Pause before all members are asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Shortest wait for the pace of copying.
const PACE_SOON: Duration = Duration::from_millis(1);

/// Request for a part of the changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangesRequest {
    /// Number chosen by the caller, given back with the answer; the same for a repeat.
    pub token: u64,
    /// The older snapshot; `None`: everything that is allocated in the newer one.
    pub from: Option<SnapshotId>,
    /// The newer snapshot; `None`: the volume as it is, of which no data is given.
    pub to: Option<SnapshotId>,
    /// Block at which the part begins.
    pub cursor: u64,
    pub want_data: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangesAnswer {
    Part {
        ranges: Vec<ChangedRange>,
        /// The blocks of the ranges that are no holes, with their bytes as stored, in their order;
        /// empty where no data was wanted.
        slots: Vec<Slot>,
        /// Block at which the next part begins; `None`: this is the last one.
        next: Option<u64>,
    },
    /// One of the snapshots does not exist (any more), or they are in the wrong order.
    NoSnapshot,
    /// No member that can be asked has a good copy of the block at which the part begins.
    Damaged { lba: u64 },
    /// Too many requests are under way.
    Busy,
}

/// History that a request is about.
#[derive(Clone, Copy)]
struct Between {
    from: Lsn,
    to: Lsn,
    /// A member answers that has applied this, and it is stable.
    needed: Lsn,
    /// Size of the newer view.
    blocks: u64,
}

/// A request that a member is to answer.
struct Asking {
    request: ChangesRequest,
    /// The member that was asked, and when.
    asked: Option<(Member, Time)>,
    tried: Vec<Member>,
    /// A member of those has no good copy of the first block.
    is_bad: bool,
    retry_at: Time,
}

#[derive(Default)]
pub(super) struct Changes {
    open: BTreeMap<RequestId, Asking>,
    /// Answers that wait for the lease.
    ready: VecDeque<(u64, ChangesAnswer)>,
}

impl Changes {
    pub fn awaits_answer(&self) -> bool {
        !self.open.is_empty() || !self.ready.is_empty()
    }

    /// Data is to be copied.
    pub fn wants_data(&self) -> bool {
        self.open.values().any(|asking| asking.request.want_data)
    }

    /// A request of this token is under way: the caller repeats those that are not answered.
    fn has(&self, token: u64) -> bool {
        self.open.values().any(|asking| asking.request.token == token)
            || self.ready.iter().any(|(answered, _)| *answered == token)
    }

    /// Too many requests are under way for one more.
    fn is_full(&self, want_data: bool) -> bool {
        let with_data = self.open.values().filter(|asking| asking.request.want_data).count();
        self.open.len() + self.ready.len() >= REQUESTS_MAX
            || (want_data && with_data >= DATA_REQUESTS_MAX)
    }

    /// A session is over: others are asked.
    pub fn lost(&mut self, member: Member) {
        for asking in self.open.values_mut() {
            asking.asked.take_if(|(asked, _)| *asked == member);
        }
    }

    pub fn due(&self) -> Option<Time> {
        let due = |asking: &Asking| asking.asked.map_or(asking.retry_at, |(_, at)| at + PATIENCE);
        self.open.values().map(due).min()
    }
}

impl Primary {
    pub(super) fn ask_changes(&mut self, now: Time, request: ChangesRequest) {
        if self.phase != Phase::Serving || self.drain_requested {
            // Like other requests: the caller asks the next target.
            return;
        }
        if self.changes.has(request.token) {
            return;
        }
        if self.changes.is_full(request.want_data) {
            if self.changes.ready.len() < REQUESTS_MAX {
                self.changes.ready.push_back((request.token, ChangesAnswer::Busy));
            }
            return;
        }
        let id = self.opening.incarnations.random();
        let asking =
            Asking { request, asked: None, tried: Vec::new(), is_bad: false, retry_at: now };
        self.changes.open.insert(id, asking);
    }

    /// History that a request is about, if its snapshots are there.
    fn changes_between(&self, request: &ChangesRequest) -> Option<Between> {
        let from = match request.from {
            Some(id) => self.history.snapshot(id)?.lsn,
            None => Lsn::ZERO,
        };
        let Some(to) = request.to else {
            let (to, blocks) = (Lsn(u64::MAX), self.volume_blocks());
            return (!request.want_data).then_some(Between { from, to, needed: from, blocks });
        };
        let to = self.history.snapshot(to)?;
        let between = Between { from, to: to.lsn, needed: to.lsn, blocks: to.blocks };
        (from <= to.lsn).then_some(between)
    }

    /// Asks members for what is requested. Returns true if an answer waits for the lease.
    pub(super) fn step_changes(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) -> bool {
        let ids: Vec<RequestId> = self.changes.open.keys().copied().collect();
        for id in ids {
            let Some(asking) = self.changes.open.get(&id) else { continue };
            let request = asking.request;
            let Some(Between { from, needed, .. }) = self.changes_between(&request) else {
                self.changes.open.remove(&id);
                self.changes.ready.push_back((request.token, ChangesAnswer::NoSnapshot));
                continue;
            };
            if needed > self.commit.stable && !mutant::is("changes-before-stable") {
                self.commit.want_sync(needed);
                if let Some(asking) = self.changes.open.get_mut(&id) {
                    asking.retry_at = asking.retry_at.max(now + STABLE_SOON);
                }
                continue;
            }
            let silent = asking.asked.filter(|(_, at)| now >= *at + PATIENCE);
            if (asking.asked.is_some() && silent.is_none()) || now < asking.retry_at {
                continue;
            }
            if request.want_data && self.commit.held && !self.rebuilds.pace.may_copy(now) {
                let due = self.rebuilds.pace.due(now).unwrap_or(now).max(now + PACE_SOON);
                let asking = self.changes.open.get_mut(&id).expect("looked at above");
                asking.tried.extend(silent.map(|(member, _)| member));
                (asking.asked, asking.retry_at) = (None, due);
                continue;
            }
            let asking = &self.changes.open[&id];
            let tried = |m: &Member| {
                asking.tried.contains(m) || silent.is_some_and(|(asked, _)| asked == *m)
            };
            let usable = self.members.peers.iter().position(|p| {
                p.link == Link::Fed
                    && self.commit.views.counts(p.member)
                    && p.progress.applied >= needed
                    && !tried(&p.member)
            });
            let asking = self.changes.open.get_mut(&id).expect("looked at above");
            asking.tried.extend(silent.map(|(member, _)| member));
            asking.asked = None;
            let Some(index) = usable else {
                if asking.is_bad {
                    let lba = request.cursor;
                    self.changes.open.remove(&id);
                    self.changes.ready.push_back((request.token, ChangesAnswer::Damaged { lba }));
                    continue;
                }
                asking.tried.clear();
                asking.retry_at = now + ASK_AGAIN;
                continue;
            };
            asking.asked = Some((self.members[index].member, now));
            let want_data = request.want_data;
            let message = ToReplica::Pull {
                id,
                view: request.to.map_or(ReadView::Live, ReadView::Snapshot),
                from,
                cursor: request.cursor,
                bytes_max: match want_data {
                    true => self.rebuilds.pace.chunk_bytes(),
                    false => ANSWER_BYTES,
                },
                want_data,
            };
            self.send(index, message, actions);
        }
        !self.changes.ready.is_empty()
    }

    /// Handles a member's answer. Returns true if it was to a request for changes.
    pub(super) fn on_changes(
        &mut self,
        now: Time,
        index: usize,
        id: RequestId,
        slots: &[Slot],
        next: Option<u64>,
        gone: bool,
    ) -> bool {
        let member = self.members[index].member;
        let Some(asking) = self.changes.open.get(&id) else { return false };
        if asking.asked.is_none_or(|(asked, _)| asked != member) {
            return true;
        }
        let request = asking.request;
        let between = self.changes_between(&request).filter(|_| !gone);
        let taken = between.map_or(Taken::Wrong, |between| take(slots, &request, next, between));
        let asking = self.changes.open.get_mut(&id).expect("looked at above");
        asking.asked = None;
        match taken {
            Taken::Part(answer) => {
                self.changes.open.remove(&id);
                self.changes.ready.push_back((request.token, answer));
            }
            // A member that lacks the snapshot or the block, or says what cannot be: another one is
            // asked.
            Taken::Bad | Taken::Wrong => {
                asking.is_bad |= taken == Taken::Bad;
                asking.tried.push(member);
            }
        }
        if request.want_data {
            let bytes: usize = slots.iter().map(bytes_of).sum();
            self.rebuilds.pace.copied(now, bytes as u64);
        }
        true
    }

    /// Answers what is ready. The caller has checked the lease.
    pub(super) fn tell_changes(&mut self, actions: &mut Vec<PrimaryAction>) {
        for (token, answer) in std::mem::take(&mut self.changes.ready) {
            actions.push(PrimaryAction::Changes { token, answer });
        }
    }

    /// Ends all requests: they are of an epoch that is over, and asked again.
    pub(super) fn forget_changes(&mut self) {
        self.changes = Changes::default();
    }
}

fn bytes_of(slot: &Slot) -> usize {
    match &slot.content {
        Content::Data { data, .. } => data.len(),
        Content::Hole | Content::Bad => 0,
    }
}

/// A member's slots, as an answer to a request.
#[derive(PartialEq, Eq, Debug)]
enum Taken {
    Part(ChangesAnswer),
    /// The member has no good copy of the first block.
    Bad,
    /// They cannot be the part that was requested.
    Wrong,
}

/// Makes an answer of a member's slots; it ends before the first block that is bad there.
fn take(slots: &[Slot], request: &ChangesRequest, next: Option<u64>, between: Between) -> Taken {
    let (mut slots, mut next) = (slots, next);
    let is_bad = |slot: &Slot| match &slot.content {
        Content::Bad => true,
        Content::Data { .. } => request.want_data && !slot.is_good(between.to),
        Content::Hole => false,
    };
    if let Some(bad) = slots.iter().position(is_bad) {
        let lba = slots[bad].lba;
        if lba <= request.cursor {
            return Taken::Bad;
        }
        slots = &slots[..bad];
        if !mutant::is("changes-beyond-a-bad-block") {
            next = Some(lba);
        }
    }
    let Some(ranges) = ranges_of(slots, request, next, between) else {
        return Taken::Wrong;
    };
    let is_data = |slot: &&Slot| request.want_data && matches!(slot.content, Content::Data { .. });
    let slots = slots.iter().filter(is_data).cloned().collect();
    Taken::Part(ChangesAnswer::Part {
        ranges,
        slots,
        next: next.filter(|next| *next < between.blocks),
    })
}

/// The ranges that slots name; `None`: they cannot be the part that was requested.
fn ranges_of(
    slots: &[Slot],
    request: &ChangesRequest,
    next: Option<u64>,
    Between { from, to, blocks, .. }: Between,
) -> Option<Vec<ChangedRange>> {
    let cursor = request.cursor;
    if next.is_some_and(|next| next <= cursor) {
        return None;
    }
    let (mut at, mut ranges) = (cursor, Vec::<ChangedRange>::new());
    let end = next.unwrap_or(u64::MAX).min(blocks);
    for slot in slots {
        let hole = match &slot.content {
            Content::Hole => true,
            Content::Data { data, .. } if data.is_empty() != request.want_data => false,
            Content::Data { .. } | Content::Bad => return None,
        };
        let changed = slot.version > from && slot.version <= to;
        let is_whole = slot.blocks > 0 && (hole || slot.blocks == 1);
        if slot.lba < at || !changed || !is_whole || slot.lba >= end {
            return None;
        }
        // A hole may reach beyond the end of the view.
        let until = slot.lba.saturating_add(slot.blocks.into()).min(end);
        at = until;
        if from == Lsn::ZERO && hole {
            // Not allocated.
            continue;
        }
        match ranges.last_mut() {
            Some(last) if last.hole == hole && last.lba + last.blocks == slot.lba => {
                last.blocks += until - slot.lba;
            }
            _ => ranges.push(ChangedRange { lba: slot.lba, blocks: until - slot.lba, hole }),
        }
    }
    Some(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use quoin_types::BLOCK_SIZE;

    fn slot(lba: u64, blocks: u32, version: u64, hole: bool) -> Slot {
        let content = match hole {
            true => Content::Hole,
            false => Content::Data { crc: 1, data: Bytes::new() },
        };
        Slot { lba, blocks, version: Lsn(version), content }
    }

    fn stored(lba: u64, version: u64) -> Slot {
        let data = Bytes::from(vec![lba as u8; BLOCK_SIZE]);
        let content = Content::Data { crc: quoin_types::crc32c(&data), data };
        Slot { lba, blocks: 1, version: Lsn(version), content }
    }

    fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
        ChangedRange { lba, blocks, hole }
    }

    fn request(want_data: bool) -> ChangesRequest {
        let (from, to) = (None, Some(SnapshotId(1)));
        ChangesRequest { token: 1, from, to, cursor: 2, want_data }
    }

    fn between(from: u64) -> Between {
        Between { from: Lsn(from), to: Lsn(9), needed: Lsn(9), blocks: 100 }
    }

    #[test]
    fn neighbouring_blocks_are_one_range_and_holes_are_told_apart() {
        let slots = [slot(3, 1, 7, false), slot(4, 1, 8, false), slot(5, 9, 8, true)];
        let of = |next, from| ranges_of(&slots, &request(false), next, between(from));
        assert_eq!(of(None, 5), Some(vec![range(3, 2, false), range(5, 9, true)]));
        assert_eq!(of(None, 0), Some(vec![range(3, 2, false)]), "a hole is not allocated");
        assert_eq!(of(Some(8), 5), Some(vec![range(3, 2, false), range(5, 3, true)]));
    }

    #[test]
    fn what_cannot_be_a_part_of_the_changes_is_not_believed() {
        let of = |slots: &[Slot], next| {
            let taken = take(slots, &request(false), next, between(5));
            matches!(taken, Taken::Part(_)).then_some(())
        };
        assert_eq!(of(&[slot(1, 1, 7, false)], None), None, "before its beginning");
        assert_eq!(of(&[slot(3, 1, 5, false)], None), None, "not changed since");
        assert_eq!(of(&[slot(3, 1, 10, false)], None), None, "written later");
        assert_eq!(of(&[slot(100, 1, 7, false)], None), None, "beyond the end");
        assert_eq!(of(&[slot(4, 1, 7, false), slot(3, 1, 7, false)], None), None, "out of order");
        assert_eq!(of(&[slot(3, 2, 7, false)], None), None, "data of two blocks");
        assert_eq!(of(&[slot(3, u32::MAX, 7, true)], None), Some(()), "cut at the end");
        assert_eq!(of(&[], Some(2)), None, "no progress");
        assert_eq!(of(&[stored(3, 7)], None), None, "data that nobody wanted");
    }

    #[test]
    fn a_part_ends_before_a_block_without_a_good_copy_and_none_begins_with_one() {
        let of = |slots: &[Slot]| take(slots, &request(true), None, between(5));
        let mut rotten = stored(4, 7);
        let Content::Data { crc, .. } = &mut rotten.content else { unreachable!() };
        *crc ^= 1;
        let slots = [stored(3, 7), rotten.clone(), stored(5, 7)];
        let (ranges, good) = (vec![range(3, 1, false)], vec![stored(3, 7)]);
        let part = ChangesAnswer::Part { ranges, slots: good, next: Some(4) };
        assert_eq!(of(&slots), Taken::Part(part));
        // The blocks before it are known not to have changed.
        let part = ChangesAnswer::Part { ranges: vec![], slots: vec![], next: Some(4) };
        assert_eq!(of(&slots[1..]), Taken::Part(part));
        rotten.lba = 2;
        assert_eq!(of(&[rotten, stored(3, 7)]), Taken::Bad);
        let lost = Slot { content: Content::Bad, ..stored(2, 7) };
        assert_eq!(of(&[lost]), Taken::Bad, "its map is lost");
    }

    #[test]
    fn data_without_bytes_is_no_answer_where_data_was_wanted() {
        let taken = take(&[slot(3, 1, 7, false)], &request(true), None, between(5));
        let part = ChangesAnswer::Part { ranges: vec![], slots: vec![], next: Some(3) };
        assert_eq!(taken, Taken::Part(part), "it is a bad copy");
    }
}
