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
use quoin_types::block::{BlockError, Operation, Request, Token};
use quoin_types::ids::Lsn;
use quoin_types::message::Takes;
use quoin_types::time::Time;
use quoin_types::{BLOCK_SIZE, HOLE_BLOCKS_MAX, WRITE_BLOCKS_MAX};

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

/// Room that a request needs in the pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Need {
    pub what: Takes,
    /// Blocks of data, and two for each entry: its header, and what its checksums take there.
    pub blocks: u64,
}

impl Need {
    pub fn of(operation: &Operation) -> Self {
        // A request that waited for IO to start is not checked yet.
        let blocks = extent(operation).map_or(0, |(offset, length)| {
            offset.saturating_add(length).div_ceil(BLOCK) - offset / BLOCK
        });
        let holes = 2 * blocks.div_ceil(u64::from(HOLE_BLOCKS_MAX)).max(1);
        match operation {
            Operation::Write { .. } => Need { what: Takes::Writes, blocks: Need::data(blocks) },
            // Partly zeroed blocks become blocks with data.
            Operation::WriteZeroes { offset, length, .. }
                if offset % BLOCK != 0 || length % BLOCK != 0 =>
            {
                Need { what: Takes::Writes, blocks: 2 * Need::data(1) + holes }
            }
            Operation::Trim { .. } | Operation::WriteZeroes { .. } => {
                Need { what: Takes::Holes, blocks: holes }
            }
            _ => Need { what: Takes::Nothing, blocks: 0 },
        }
    }

    fn data(blocks: u64) -> u64 {
        blocks + 2 * blocks.div_ceil(u64::from(WRITE_BLOCKS_MAX))
    }

    /// Blocks of data for which there is so much room.
    fn data_within(blocks: u64) -> u64 {
        let whole = u64::from(WRITE_BLOCKS_MAX);
        blocks.saturating_sub(2) * whole / (whole + 2)
    }
}

/// Cuts a write behind as many blocks as there is room for. `Err`: all of it fits.
pub(super) fn cut(request: Request, room_blocks: u64) -> Result<(Request, Request), Request> {
    let Request { token, operation, origin } = request;
    let (offset, data, fua) = match operation {
        Operation::Write { offset, data, fua } => (offset, data, fua),
        operation => return Err(Request { token, operation, origin }),
    };
    let end = (offset / BLOCK + Need::data_within(room_blocks)) * BLOCK;
    let length = end.saturating_sub(offset);
    let part = |offset, data| {
        let operation = Operation::Write { offset, data, fua };
        Request { token, operation, origin }
    };
    if length == 0 || length >= data.len() as u64 {
        return Err(part(offset, data));
    }
    let rest = part(end, data.slice(length as usize..));
    Ok((part(offset, data.slice(..length as usize)), rest))
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
    /// Set while trims and zeroes wait for room too.
    pub holes_wait: bool,
    /// Room for what may be sequenced before the next look at it.
    pub budget: Budget,
    /// Rests of writes of which a part was admitted, one of a token.
    rests: Vec<Request>,
}

/// Room in blocks: of data, and one for each entry.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    pub writes: Allowance,
    pub holes: Allowance,
}

/// Room for one kind of requests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Allowance {
    pub left_blocks: u64,
    /// All that may be under way.
    pub share_blocks: u64,
}

impl Allowance {
    /// Returns true if a request that needs so much can be sequenced now, or a good part of it.
    pub fn admits(self, blocks: u64) -> bool {
        blocks <= self.left_blocks || self.is_half_free() && self.left_blocks >= PART_BLOCKS_MIN
    }

    fn is_half_free(self) -> bool {
        self.left_blocks >= self.share_blocks.div_ceil(2)
    }
}

/// The least that a part of a request is admitted for.
const PART_BLOCKS_MIN: u64 = 8;

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

    fn take_room(&mut self) -> VecDeque<Request> {
        std::mem::take(&mut self.room)
    }

    /// Takes the writes that wait for room; trims and zeroes wait on.
    pub fn take_writes_for_room(&mut self) -> VecDeque<Request> {
        let is_write = |r: &Request| Need::of(&r.operation).what == Takes::Writes;
        let (writes, holes) = self.take_room().into_iter().partition(is_write);
        self.room = holes;
        writes
    }

    pub fn take_overlap(&mut self) -> VecDeque<Request> {
        std::mem::take(&mut self.overlap)
    }

    pub fn take_refused(&mut self) -> Vec<(Token, BlockError)> {
        std::mem::take(&mut self.refused)
    }

    /// Takes the room of a request that is to be sequenced.
    pub fn spend(&mut self, blocks: u64) {
        let Budget { writes, holes } = &mut self.budget;
        for allowance in [writes, holes] {
            allowance.left_blocks = allowance.left_blocks.saturating_sub(blocks);
        }
    }

    /// Room that requests have which were admitted and have no LSN yet.
    pub fn admitted_blocks(&self) -> u64 {
        if !self.merging() {
            return 0;
        }
        let merges = self.merges.iter().map(|(_, merge)| &merge.request);
        merges.chain(&self.overlap).map(|request| Need::of(&request.operation).blocks).sum()
    }

    /// Room that is needed by the next request that waits for the window.
    pub fn next_need(&self) -> Option<Need> {
        self.window.front().map(|request| Need::of(&request.operation))
    }

    /// Keeps the rest of a write until its first part has its LSN.
    pub fn keep_rest(&mut self, rest: Request) {
        self.rests.push(rest);
    }

    /// Returns true if a part of a write was admitted, and its rest comes behind it.
    pub fn has_rest(&self, token: Token) -> bool {
        self.rests.iter().any(|rest| rest.token == token)
    }

    /// The rest of a write of which a part was admitted.
    pub fn take_rest(&mut self, token: Token) -> Option<Request> {
        let at = self.rests.iter().position(|rest| rest.token == token)?;
        Some(self.rests.swap_remove(at))
    }

    /// Queues the rest of a write before anything newer.
    pub fn rest_to_window(&mut self, rest: Request) {
        self.window.push_front(rest);
    }

    /// Returns true if a request that waits for room leaves no data behind.
    pub fn holes_wait_for_room(&self) -> bool {
        self.room.iter().any(|request| Need::of(&request.operation).what == Takes::Holes)
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
        let rests = self.rests.iter().filter(|rest| is_gone(rest)).map(|rest| rest.token);
        abandoned.tokens.extend(rests);
        self.rests.retain(|rest| !is_gone(rest));
        let refused = self.refused.iter().map(|(token, _)| *token);
        abandoned.tokens.extend(refused.filter(|token| tokens.contains(token)));
        self.refused.retain(|(token, _)| !tokens.contains(token));
        // A write of which a part is elsewhere is answered once.
        let mut seen = BTreeSet::new();
        abandoned.tokens.retain(|token| seen.insert(*token));
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

    #[test]
    fn what_leaves_data_behind_needs_room_for_it_and_holes_for_their_entries_alone() {
        let zeroes =
            |offset, length| Operation::WriteZeroes { offset, length, fua: false, no_hole: false };
        let write = |offset, blocks| {
            let data = Bytes::from(vec![1; blocks * BLOCK_SIZE]);
            Operation::Write { offset, data, fua: false }
        };
        let need = |what, blocks| Need { what, blocks };
        for (operation, expected) in [
            (write(0, 1), need(Takes::Writes, 3)),
            (write(0, 256), need(Takes::Writes, 258)),
            (write(512, 256), need(Takes::Writes, 257 + 4)),
            (zeroes(BLOCK - 512, BLOCK + 512), need(Takes::Writes, 8)),
            (zeroes(BLOCK, 3 * BLOCK), need(Takes::Holes, 2)),
            (Operation::Trim { offset: 512, length: 4 << 30, fua: false }, need(Takes::Holes, 10)),
            (Operation::Flush, need(Takes::Nothing, 0)),
            (Operation::Read { offset: 0, length: 512 }, need(Takes::Nothing, 0)),
            (zeroes(u64::MAX - 511, 512), need(Takes::Writes, 8)),
        ] {
            assert_eq!(Need::of(&operation), expected, "{operation:?}");
        }
    }

    #[test]
    fn a_write_is_cut_where_its_first_part_fits_and_no_byte_is_lost() {
        for (offset, length, room) in
            [(0, 100 * BLOCK, 24), (512, 100 * BLOCK, 24), (3 * BLOCK + 100, 600 * BLOCK, 300)]
        {
            let bytes: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            let data = Bytes::from(bytes.clone());
            let operation = Operation::Write { offset, data, fua: true };
            let (part, rest) = cut(Request { token: 7, operation, origin: None }, room).unwrap();
            assert!(Need::of(&part.operation).blocks <= room);
            let (Operation::Write { offset: at, data: first, fua: true }, 7) =
                (part.operation, part.token)
            else {
                panic!("it is a write of the same client")
            };
            let (Operation::Write { offset: next, data: second, fua: true }, 7) =
                (rest.operation, rest.token)
            else {
                panic!("it is a write of the same client")
            };
            assert_eq!((at, next), (offset, offset + first.len() as u64));
            assert_eq!([&first[..], &second[..]].concat(), bytes);
            assert_eq!(next % BLOCK, 0, "no block is read for the cut");
        }
        assert_eq!(cut(write(1, 0), 24).err().map(|whole| whole.token), Some(1));
    }
}
