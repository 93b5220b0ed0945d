//! Requests of clients that change the volume, each in the one place where it waits.
//!
//! A request without an LSN waits for the window, for room, for the merge of its own edges or for a
//! merge that it overlaps. A request with an LSN waits for commit or stable; a refusal waits for
//! the lease. Each event that ends the wait of many requests at once (their client left, the quorum
//! is lost, a new epoch has other LSNs) is one method here. Reads wait in [`read`](super::read).

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;

use super::slab::Slab;
use super::snapshots::{Reverting, Wished};
use quoin_types::BLOCK_SIZE;
use quoin_types::block::{BlockError, Operation, Request, Token};
use quoin_types::ids::Lsn;
use quoin_types::time::Time;

pub(super) const BLOCK: u64 = BLOCK_SIZE as u64;

/// Reason for which a request waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waiting {
    /// IO has not started, or the window is full.
    Window,
    /// Too few counted members have room.
    Room,
    /// The content of its edge blocks is being read.
    Merge,
    /// A merge of the same blocks is under way.
    Overlap,
    Commit,
    Stable,
    /// The request was refused; the answer needs a lease.
    Lease,
}

/// Blocks that overlap a byte range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Range {
    pub first: u64,
    pub end: u64,
}

impl Range {
    pub fn of(operation: &Operation) -> Option<Range> {
        let (offset, length) = extent(operation)?;
        Some(Range { first: offset / BLOCK, end: (offset + length).div_ceil(BLOCK) })
    }

    fn meets(self, other: Range) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// Offset and length in bytes.
pub(super) fn extent(operation: &Operation) -> Option<(u64, u64)> {
    match operation {
        Operation::Read { offset, length } => Some((*offset, u64::from(*length))),
        Operation::Write { offset, data, .. } => Some((*offset, data.len() as u64)),
        Operation::Trim { offset, length, .. }
        | Operation::WriteZeroes { offset, length, .. }
        | Operation::Status { offset, length } => Some((*offset, *length)),
        Operation::Flush => None,
    }
}

/// A write or flush that has its LSN.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequenced {
    pub lsn: Lsn,
    pub token: Token,
    pub arrived: Time,
    /// Size in bytes; 0 if its latency is not a measure of the load.
    pub bytes: u64,
}

impl Sequenced {
    pub fn unmeasured(lsn: Lsn, token: Token) -> Self {
        Self { lsn, token, arrived: Time::ZERO, bytes: 0 }
    }
}

/// A write whose edges are parts of blocks, with the edge content read so far.
pub(super) struct Merge {
    pub request: Request,
    pub range: Range,
    /// Content of the first and the last block, where it is needed.
    pub head: Option<Bytes>,
    pub tail: Option<Bytes>,
    /// Number of edges that have not been read.
    pub reads: u32,
}

/// State of a merge after the read of one of its edges.
pub(super) enum Merging {
    Incomplete,
    Complete(Merge),
    Failed(Token, BlockError),
}

/// Requests that were dropped without an LSN, and the merges among them.
#[derive(Default)]
pub(super) struct Abandoned {
    pub tokens: Vec<Token>,
    pub merges: Vec<usize>,
}

#[derive(Default)]
pub(super) struct Requests {
    window: VecDeque<Request>,
    room: VecDeque<Request>,
    merges: Slab<Merge>,
    overlap: VecDeque<Request>,
    /// Requests in the order of their LSNs, like `stable`.
    commit: VecDeque<Sequenced>,
    stable: VecDeque<Sequenced>,
    refused: Vec<(Token, BlockError)>,
    /// User snapshots that were made or deleted and are not reported yet.
    pub snapshots: Vec<Wished>,
    /// Reverts that are not reported yet.
    pub reverts: Vec<Reverting>,
    /// Start of the present shortage of room.
    pub short_since: Option<Time>,
}

impl Requests {
    /// Queues a request. Merges and answers have methods of their own.
    pub fn wait_for_window(&mut self, request: Request) {
        self.window.push_back(request);
    }

    pub fn wait_for_room(&mut self, request: Request) {
        self.room.push_back(request);
    }

    pub fn wait_for_overlap(&mut self, request: Request) {
        self.overlap.push_back(request);
    }

    /// Queues a merge; returns its slot.
    pub fn wait_for_merge(&mut self, merge: Merge) -> usize {
        self.merges.insert(merge)
    }

    pub fn wait_for_commit(&mut self, sequenced: Sequenced) {
        insert(&mut self.commit, sequenced);
    }

    pub fn wait_for_stable(&mut self, sequenced: Sequenced) {
        insert(&mut self.stable, sequenced);
    }

    pub fn wait_for_lease(&mut self, token: Token, error: BlockError) {
        self.refused.push((token, error));
    }

    /// Makes every answer that waits for commit wait for stable.
    pub fn commit_to_stable(&mut self) {
        self.stable.append(&mut self.commit);
        self.stable.make_contiguous().sort_by_key(|waiting| waiting.lsn);
    }

    /// Returns true if any request waits for this reason.
    pub fn any(&self, waiting: Waiting) -> bool {
        !match waiting {
            Waiting::Window => self.window.is_empty(),
            Waiting::Room => self.room.is_empty(),
            Waiting::Merge => self.merges.is_empty(),
            Waiting::Overlap => self.overlap.is_empty(),
            Waiting::Commit => self.commit.is_empty(),
            Waiting::Stable => self.stable.is_empty(),
            Waiting::Lease => self.refused.is_empty(),
        }
    }

    /// Returns true if an accepted request has no LSN yet.
    pub fn merging(&self) -> bool {
        self.any(Waiting::Merge) || self.any(Waiting::Overlap)
    }

    /// Returns true if an answer waits for commit, stable or the lease.
    pub fn awaits_answer(&self) -> bool {
        let states = [Waiting::Commit, Waiting::Stable, Waiting::Lease];
        states.into_iter().any(|waiting| self.any(waiting))
            || !self.snapshots.is_empty()
            || !self.reverts.is_empty()
    }

    /// Returns true if no request of a client waits for anything.
    pub fn is_idle(&self) -> bool {
        let sequenced = [Waiting::Commit, Waiting::Stable, Waiting::Lease];
        let others = [Waiting::Window, Waiting::Room, Waiting::Merge, Waiting::Overlap];
        !sequenced.into_iter().chain(others).any(|waiting| self.any(waiting))
    }

    /// Returns true if a request for these blocks must wait for a merge.
    pub fn overlaps(&self, range: Range) -> bool {
        self.merges.iter().any(|(_, m)| m.range.meets(range))
            || self.overlap.iter().any(|r| Range::of(&r.operation).is_some_and(|b| b.meets(range)))
    }

    /// Returns true if a merge, or a request behind one, covers this block.
    pub fn touches(&self, lba: u64) -> bool {
        self.overlaps(Range { first: lba, end: lba + 1 })
    }

    /// Handles an edge block of a merge that was read, or cannot be. `None`: the merge was
    /// abandoned.
    pub fn edge_read(
        &mut self,
        slot: usize,
        tail: bool,
        block: Result<Bytes, BlockError>,
    ) -> Option<Merging> {
        let merge = self.merges.get_mut(slot)?;
        let block = match block {
            Ok(block) => block,
            Err(error) => {
                let token = merge.request.token;
                self.merges.take(slot);
                return Some(Merging::Failed(token, error));
            }
        };
        if tail {
            merge.tail = Some(block);
        } else {
            merge.head = Some(block);
        }
        merge.reads -= 1;
        if merge.reads > 0 {
            return Some(Merging::Incomplete);
        }
        self.merges.take(slot).map(Merging::Complete)
    }

    /// The next request that waits for the window.
    pub fn next_in_window(&mut self) -> Option<Request> {
        self.window.pop_front()
    }

    pub fn take_window(&mut self) -> VecDeque<Request> {
        std::mem::take(&mut self.window)
    }

    pub fn take_room(&mut self) -> VecDeque<Request> {
        std::mem::take(&mut self.room)
    }

    pub fn take_overlap(&mut self) -> VecDeque<Request> {
        std::mem::take(&mut self.overlap)
    }

    pub fn take_refused(&mut self) -> Vec<(Token, BlockError)> {
        std::mem::take(&mut self.refused)
    }

    /// Moves the requests that waited for room before those that wait for the window.
    pub fn room_to_window(&mut self) {
        for request in self.take_room().into_iter().rev() {
            self.window.push_front(request);
        }
    }

    /// Moves the requests that waited behind a merge before those that wait for IO to start.
    pub fn overlap_to_window(&mut self) {
        for request in self.take_overlap().into_iter().rev() {
            self.window.push_front(request);
        }
    }

    /// The next request whose LSN is committed.
    pub fn next_committed(&mut self, commit: Lsn) -> Option<Sequenced> {
        self.commit.pop_front_if(|waiting| waiting.lsn <= commit)
    }

    /// The next request whose LSN is stable.
    pub fn next_stable(&mut self, stable: Lsn) -> Option<Sequenced> {
        self.stable.pop_front_if(|waiting| waiting.lsn <= stable)
    }

    /// Drops those of these requests that have no LSN.
    pub fn abandon(&mut self, tokens: &BTreeSet<Token>) -> Abandoned {
        let is_gone = |request: &Request| tokens.contains(&request.token);
        let mut abandoned = Abandoned::default();
        for slot in self.merges.indices() {
            if self.merges.get(slot).is_some_and(|merge| is_gone(&merge.request)) {
                abandoned.tokens.extend(self.merges.take(slot).map(|merge| merge.request.token));
                abandoned.merges.push(slot);
            }
        }
        for queue in [&mut self.window, &mut self.room, &mut self.overlap] {
            abandoned.tokens.extend(queue.iter().filter(|r| is_gone(r)).map(|r| r.token));
            queue.retain(|request| !is_gone(request));
        }
        let refused = self.refused.iter().map(|(token, _)| *token);
        abandoned.tokens.extend(refused.filter(|token| tokens.contains(token)));
        self.refused.retain(|(token, _)| !tokens.contains(token));
        abandoned
    }

    /// Ends every answer that waits for commit, stable or the lease.
    pub fn fail_answers(&mut self) -> Vec<Token> {
        let sequenced = self.commit.drain(..).chain(self.stable.drain(..)).map(|w| w.token);
        sequenced.chain(self.refused.drain(..).map(|(token, _)| token)).collect()
    }

    /// Renumbers requests that a new epoch sequenced again: `find` gives the new LSN of an old one.
    pub fn renumber(&mut self, find: impl Fn(Lsn) -> Lsn) {
        for waiting in self.commit.iter_mut().chain(&mut self.stable) {
            waiting.lsn = find(waiting.lsn);
        }
    }
}

/// Keeps a queue in the order of its LSNs. Only a request that is sent again is not its last.
fn insert(queue: &mut VecDeque<Sequenced>, sequenced: Sequenced) {
    let at = match queue.back() {
        Some(last) if last.lsn > sequenced.lsn => {
            queue.partition_point(|waiting| waiting.lsn <= sequenced.lsn)
        }
        _ => queue.len(),
    };
    queue.insert(at, sequenced);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(token: Token, offset: u64) -> Request {
        let data = Bytes::from_static(&[1; 512]);
        let operation = Operation::Write { offset, data, fua: false };
        Request { token, operation, origin: None }
    }

    fn merge(token: Token, offset: u64, reads: u32) -> Merge {
        let request = write(token, offset);
        let range = Range::of(&request.operation).unwrap();
        Merge { request, range, head: None, tail: None, reads }
    }

    /// One request in every place, with the number of its place.
    fn requests() -> Requests {
        let mut requests = Requests::default();
        requests.wait_for_window(write(1, 0));
        requests.wait_for_room(write(2, 0));
        requests.wait_for_merge(merge(3, 0, 1));
        requests.wait_for_overlap(write(4, 0));
        requests.wait_for_commit(Sequenced::unmeasured(Lsn(5), 5));
        requests.wait_for_stable(Sequenced::unmeasured(Lsn(6), 6));
        requests.wait_for_lease(7, BlockError::OutOfRange);
        requests
    }

    const ALL: [Waiting; 7] = [
        Waiting::Window,
        Waiting::Room,
        Waiting::Merge,
        Waiting::Overlap,
        Waiting::Commit,
        Waiting::Stable,
        Waiting::Lease,
    ];

    #[test]
    fn ranges_meet_where_they_share_a_block() {
        let range = |first, end| Range { first, end };
        let one = range(4, 6);
        for other in [range(0, 5), range(5, 9), range(4, 6), range(0, 9), range(5, 6)] {
            assert!(one.meets(other) && other.meets(one), "{other:?}");
        }
        for other in [range(0, 4), range(6, 9)] {
            assert!(!one.meets(other) && !other.meets(one), "{other:?}");
        }
    }

    #[test]
    fn abandoned_requests_leave_every_place_but_those_of_sequenced_ones() {
        let mut requests = requests();
        let kept = requests.abandon(&BTreeSet::from([8]));
        assert!(kept.tokens.is_empty() && ALL.iter().all(|w| requests.any(*w)));
        let abandoned = requests.abandon(&(1..8).collect());
        assert_eq!((abandoned.tokens, abandoned.merges), (vec![3, 1, 2, 4, 7], vec![0]));
        let left = ALL.into_iter().filter(|w| requests.any(*w)).collect::<Vec<_>>();
        assert_eq!(left, [Waiting::Commit, Waiting::Stable]);
    }

    #[test]
    fn failed_answers_are_those_of_sequenced_and_refused_requests() {
        let mut requests = requests();
        assert_eq!(requests.fail_answers(), [5, 6, 7]);
        assert!(!requests.awaits_answer() && requests.merging());
        assert!(requests.any(Waiting::Window) && requests.any(Waiting::Room));
    }

    #[test]
    fn requests_that_waited_for_room_or_a_merge_go_before_those_that_wait_for_the_window() {
        let mut requests = requests();
        requests.wait_for_room(write(8, 0));
        requests.room_to_window();
        requests.overlap_to_window();
        let order: Vec<Token> = requests.take_window().into_iter().map(|r| r.token).collect();
        assert_eq!(order, [4, 2, 8, 1]);
    }

    #[test]
    fn answers_wait_until_their_lsn_is_reached_and_follow_a_new_number() {
        let mut requests = requests();
        assert!(requests.next_committed(Lsn(4)).is_none());
        requests.renumber(|lsn| Lsn(lsn.0 + 10));
        assert!(requests.next_committed(Lsn(14)).is_none());
        assert_eq!(requests.next_committed(Lsn(15)).map(|w| w.token), Some(5));
        assert!(requests.next_stable(Lsn(15)).is_none());
        assert_eq!(requests.next_stable(Lsn(16)).map(|w| w.token), Some(6));
    }

    #[test]
    fn answers_moved_from_commit_to_stable_come_in_the_order_of_their_lsns() {
        let mut requests = Requests::default();
        for (lsn, token) in [(1, 1), (4, 4), (5, 5)] {
            requests.wait_for_commit(Sequenced::unmeasured(Lsn(lsn), token));
        }
        for (lsn, token) in [(3, 3), (5, 6)] {
            requests.wait_for_stable(Sequenced::unmeasured(Lsn(lsn), token));
        }
        requests.commit_to_stable();
        assert!(!requests.any(Waiting::Commit) && requests.next_committed(Lsn(9)).is_none());
        let mut order = Vec::new();
        while let Some(next) = requests.next_stable(Lsn(4)) {
            order.push(next.token);
        }
        assert_eq!(order, [1, 3, 4]);
        assert!(requests.next_stable(Lsn(5)).is_some() && requests.next_stable(Lsn(5)).is_some());
    }

    #[test]
    fn a_merge_is_complete_with_its_last_edge_and_over_with_one_that_cannot_be_read() {
        let mut requests = Requests::default();
        let both = requests.wait_for_merge(merge(1, BLOCK - 256, 2));
        assert!(requests.touches(0) && requests.touches(1) && !requests.touches(2));
        let block = || Ok(Bytes::from_static(&[7; BLOCK_SIZE]));
        assert!(matches!(requests.edge_read(both, true, block()), Some(Merging::Incomplete)));
        let Some(Merging::Complete(whole)) = requests.edge_read(both, false, block()) else {
            panic!("both edges were read");
        };
        assert!(whole.head.is_some() && whole.tail.is_some() && !requests.merging());
        let bad = requests.wait_for_merge(merge(2, 256, 2));
        let failed = requests.edge_read(bad, false, Err(BlockError::Damaged));
        assert!(matches!(failed, Some(Merging::Failed(2, BlockError::Damaged))));
        assert!(requests.edge_read(bad, true, block()).is_none(), "it is over");
    }
}
