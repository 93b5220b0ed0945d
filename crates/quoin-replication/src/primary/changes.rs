//! Changed ranges between two snapshots, without data: for backups and for copies of a volume that
//! lie elsewhere.
//!
//! A part is read from one in-sync member that holds both snapshots, and answered with the block
//! where the next part begins. So a caller can go on after any interruption, at any target, with
//! any member: both snapshots are fixed, and versions only grow, so each part is the same wherever
//! it is read. Ranges are of whole blocks and in order; what no range names did not change.
//!
//! Only snapshots that are stable are read, and the answer leaves under a live lease like any
//! other.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{Link, Phase, Primary, PrimaryAction};
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::membership::Member;
use quoin_types::message::{Content, ReadView, RequestId, Slot, ToReplica};
use quoin_types::time::Time;

/// Limit of requests under way; the caller repeats what was refused.
const REQUESTS_MAX: usize = 16;
/// Size of one answer of a member. A slot counts as 64 bytes.
const ANSWER_BYTES: u32 = 256 << 10;
/// Time after which a silent member is passed over.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval of looks whether a snapshot is stable.
const STABLE_SOON: Duration = Duration::from_millis(20);
/// Pause before all members are asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Request for a part of the changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangesRequest {
    /// Number chosen by the caller, given back with the answer.
    pub token: u64,
    /// The older snapshot; `None`: everything that is allocated in the newer one.
    pub from: Option<SnapshotId>,
    pub to: SnapshotId,
    /// Block at which the part begins.
    pub cursor: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChangedRange {
    pub lba: u64,
    pub blocks: u64,
    /// The range is a hole in the newer snapshot.
    pub hole: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangesAnswer {
    Part {
        ranges: Vec<ChangedRange>,
        /// Block at which the next part begins; `None`: this is the last one.
        next: Option<u64>,
    },
    /// One of the snapshots does not exist (any more), or they are in the wrong order.
    NoSnapshot,
    /// Too many requests are under way.
    Busy,
}

/// A request that a member is to answer.
struct Asking {
    request: ChangesRequest,
    /// The member that was asked, and when.
    asked: Option<(Member, Time)>,
    tried: Vec<Member>,
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
        let held = self.changes.open.len() + self.changes.ready.len();
        if held >= REQUESTS_MAX {
            if held < 2 * REQUESTS_MAX {
                self.changes.ready.push_back((request.token, ChangesAnswer::Busy));
            }
            return;
        }
        let id = self.incarnations.random();
        let (asked, tried) = (None, Vec::new());
        self.changes.open.insert(id, Asking { request, asked, tried, retry_at: now });
    }

    /// The two LSNs that a request is about, if both snapshots are there.
    fn changes_between(&self, request: &ChangesRequest) -> Option<(Lsn, Lsn, u64)> {
        let to = self.history.snapshot(request.to)?;
        let from = match request.from {
            Some(id) => self.history.snapshot(id)?.lsn,
            None => Lsn::ZERO,
        };
        (from <= to.lsn).then_some((from, to.lsn, to.blocks))
    }

    /// Asks members for what is requested.
    pub(super) fn step_changes(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let ids: Vec<RequestId> = self.changes.open.keys().copied().collect();
        for id in ids {
            let Some(asking) = self.changes.open.get(&id) else { continue };
            let request = asking.request;
            let Some((from, to, _)) = self.changes_between(&request) else {
                self.changes.open.remove(&id);
                self.changes.ready.push_back((request.token, ChangesAnswer::NoSnapshot));
                continue;
            };
            if to > self.commit.stable {
                self.commit.want_sync(to);
                if let Some(asking) = self.changes.open.get_mut(&id) {
                    asking.retry_at = asking.retry_at.max(now + STABLE_SOON);
                }
                continue;
            }
            let silent = asking.asked.filter(|(_, at)| now >= *at + PATIENCE);
            if (asking.asked.is_some() && silent.is_none()) || now < asking.retry_at {
                continue;
            }
            let tried = |m: &Member| {
                asking.tried.contains(m) || silent.is_some_and(|(asked, _)| asked == *m)
            };
            let usable = self.members.peers.iter().position(|p| {
                p.link == Link::Fed
                    && p.knows_points
                    && self.commit.views.counts(p.member)
                    && p.progress.applied >= to
                    && !tried(&p.member)
            });
            let asking = self.changes.open.get_mut(&id).expect("looked at above");
            asking.tried.extend(silent.map(|(member, _)| member));
            asking.asked = None;
            let Some(index) = usable else {
                asking.tried.clear();
                asking.retry_at = now + ASK_AGAIN;
                continue;
            };
            asking.asked = Some((self.members[index].member, now));
            let message = ToReplica::Pull {
                id,
                view: ReadView::Snapshot(request.to),
                from,
                cursor: request.cursor,
                bytes_max: ANSWER_BYTES,
                want_data: false,
            };
            self.send(index, message, actions);
        }
    }

    /// Handles a member's answer. Returns true if it was to a request for changes.
    pub(super) fn on_changes(
        &mut self,
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
        let ranges =
            self.changes_between(&request).filter(|_| !gone).and_then(|(from, to, blocks)| {
                ranges_of(slots, request.cursor, next, (from, to), blocks)
            });
        let asking = self.changes.open.get_mut(&id).expect("looked at above");
        asking.asked = None;
        match ranges {
            Some(ranges) => {
                let next = next.filter(|next| *next > request.cursor);
                self.changes.open.remove(&id);
                let answer = ChangesAnswer::Part { ranges, next };
                self.changes.ready.push_back((request.token, answer));
            }
            // A member that lacks the snapshot, or says what cannot be: another one is asked.
            None => asking.tried.push(member),
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

/// The ranges that slots name; `None`: they cannot be the part that begins at `cursor`.
fn ranges_of(
    slots: &[Slot],
    cursor: u64,
    next: Option<u64>,
    (from, to): (Lsn, Lsn),
    blocks: u64,
) -> Option<Vec<ChangedRange>> {
    if next.is_some_and(|next| next <= cursor) {
        return None;
    }
    let (mut at, mut ranges) = (cursor, Vec::<ChangedRange>::new());
    let end = next.unwrap_or(u64::MAX).min(blocks);
    for slot in slots {
        let hole = match &slot.content {
            Content::Hole => true,
            Content::Data { data, .. } if data.is_empty() => false,
            Content::Data { .. } | Content::Bad => return None,
        };
        let changed = slot.version > from && slot.version <= to;
        if slot.lba < at || !changed || slot.blocks == 0 || slot.lba >= end {
            return None;
        }
        // A hole may reach beyond the end of the view.
        let until = (slot.lba + u64::from(slot.blocks)).min(end);
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

    fn slot(lba: u64, blocks: u32, version: u64, hole: bool) -> Slot {
        let content = match hole {
            true => Content::Hole,
            false => Content::Data { crc: 1, data: Bytes::new() },
        };
        Slot { lba, blocks, version: Lsn(version), content }
    }

    fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
        ChangedRange { lba, blocks, hole }
    }

    #[test]
    fn neighbouring_blocks_are_one_range_and_holes_are_told_apart() {
        let slots = [slot(3, 1, 7, false), slot(4, 1, 8, false), slot(5, 9, 8, true)];
        let found = ranges_of(&slots, 2, None, (Lsn(5), Lsn(9)), 100);
        assert_eq!(found, Some(vec![range(3, 2, false), range(5, 9, true)]));
        let allocated = ranges_of(&slots, 2, None, (Lsn(0), Lsn(9)), 100);
        assert_eq!(allocated, Some(vec![range(3, 2, false)]), "a hole is not allocated");
        let cut = ranges_of(&slots, 2, Some(8), (Lsn(5), Lsn(9)), 100);
        assert_eq!(cut, Some(vec![range(3, 2, false), range(5, 3, true)]));
    }

    #[test]
    fn what_cannot_be_a_part_of_the_changes_is_not_believed() {
        let of = |slots: &[Slot], next| ranges_of(slots, 2, next, (Lsn(5), Lsn(9)), 100);
        assert_eq!(of(&[slot(1, 1, 7, false)], None), None, "before its beginning");
        assert_eq!(of(&[slot(3, 1, 5, false)], None), None, "not changed since");
        assert_eq!(of(&[slot(3, 1, 10, false)], None), None, "written later");
        assert_eq!(of(&[slot(100, 1, 7, false)], None), None, "beyond the end");
        assert_eq!(of(&[slot(4, 1, 7, false), slot(3, 1, 7, false)], None), None, "out of order");
        assert_eq!(of(&[], Some(2)), None, "no progress");
        let bad = Slot { content: Content::Bad, ..slot(3, 1, 7, false) };
        assert_eq!(of(&[bad], None), None, "its map is lost");
    }
}
