//! Requests that change the volume: split, merged on assigned content where they are unaligned,
//! sequenced, and answered when commit (or stable) reaches them.

use std::collections::BTreeSet;

use bytes::{Bytes, BytesMut};

use super::read::Purpose;
use super::requests::{BLOCK, Merge, Merging, Need, Range, Sequenced, Waiting, extent};
use super::{Phase, Primary, PrimaryAction};
use quoin_types::block::{BlockError, Operation, Request, Token};
use quoin_types::client::{Origin, Part};
use quoin_types::entry::EntryKind;
use quoin_types::ids::Lsn;
use quoin_types::message::Takes;
use quoin_types::mutant;
use quoin_types::time::Time;
use quoin_types::{BLOCK_SHIFT, BLOCK_SIZE, HOLE_BLOCKS_MAX, WRITE_BLOCKS_MAX};

impl Primary {
    pub(super) fn submit(&mut self, now: Time, request: Request, actions: &mut Vec<PrimaryAction>) {
        let token = request.token;
        if self.drain_requested || matches!(self.phase, Phase::Draining { .. }) {
            // The request is neither sequenced nor answered: its client keeps it and tries the next
            // target.
            return;
        }
        if self.phase != Phase::Serving {
            self.opening.past.waits(self.opening.epoch);
            return self.requests.wait_for_window(request);
        }
        if let Err(error) = self.check(&request.operation) {
            return self.refuse(token, error, actions);
        }
        let need = Need::of(&request.operation);
        // A request that took effect needs no room.
        if need.what == Takes::Nothing || self.judge_repeat(&request).is_err() {
            return self.execute(now, request);
        }
        let Some(request) = self.admit_by_room(now, request, need, actions) else { return };
        let waits = self.requests.any(Waiting::Window) || self.window_full();
        if waits || !self.has_room_for(need) {
            return self.requests.wait_for_window(request);
        }
        self.execute_within(now, request, need);
    }

    pub(super) fn is_write(operation: &Operation) -> bool {
        matches!(
            operation,
            Operation::Write { .. } | Operation::Trim { .. } | Operation::WriteZeroes { .. }
        )
    }

    /// Drops those of these requests that have no LSN yet; each is answered, though no client
    /// waits.
    pub(super) fn abandon(
        &mut self,
        now: Time,
        tokens: &[Token],
        actions: &mut Vec<PrimaryAction>,
    ) {
        let tokens: BTreeSet<Token> = tokens.iter().copied().collect();
        let abandoned = self.requests.abandon(&tokens);
        for slot in abandoned.merges {
            self.forget_merge_reads(slot);
        }
        if !self.requests.any(Waiting::Window) {
            self.opening.past.nothing_waits();
        }
        for token in abandoned.tokens {
            self.reply(token, Err(BlockError::Stopped), actions);
        }
        if self.is_running() && self.phase != Phase::Recovering {
            return self.unblock(now);
        }
        self.requests.overlap_to_window();
    }

    /// Answers with an error once there is a lease: under a newer target the reason for the refusal
    /// may not hold any more.
    pub(super) fn refuse(
        &mut self,
        token: Token,
        error: BlockError,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if mutant::is("error-without-a-lease") {
            return self.reply(token, Err(error), actions);
        }
        self.requests.wait_for_lease(token, error);
    }

    /// Fails writes that wait for the window, which will not move (`onQuorumLoss: fail`).
    pub(super) fn fail_backlog(&mut self, error: BlockError, actions: &mut Vec<PrimaryAction>) {
        for request in self.requests.take_window() {
            self.reply(request.token, Err(error), actions);
        }
    }

    /// Accepts waiting requests again as the window allows.
    pub(super) fn take_backlog(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        while self.phase == Phase::Serving
            && self.requests.any(Waiting::Window)
            && !self.window_full()
            && let Some(need) = self.requests.next_need()
            && (self.waits_for_room(need) || self.has_room_for(need))
            && let Some(request) = self.requests.next_in_window()
        {
            match self.check(&request.operation) {
                Ok(()) => {
                    if let Some(request) = self.admit_by_room(now, request, need, actions) {
                        self.execute_within(now, request, need);
                    }
                }
                Err(error) => self.refuse(request.token, error, actions),
            }
        }
    }

    fn check(&self, operation: &Operation) -> Result<(), BlockError> {
        if self.config.read_only && Self::is_write(operation) {
            return Err(BlockError::ReadOnly);
        }
        let Some((offset, length)) = extent(operation) else { return Ok(()) };
        let size = self.volume_blocks() << BLOCK_SHIFT;
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(BlockError::OutOfRange);
        }
        let unit = u64::from(self.config.logical_block_size);
        if offset % unit != 0 || length % unit != 0 {
            return Err(BlockError::Misaligned);
        }
        Ok(())
    }

    /// Returns true if the window is full: entries that CF has not yet applied stay within the
    /// window, and those not yet on media within a multiple of it, as all of them are kept. Further
    /// requests are pushed back.
    fn window_full(&self) -> bool {
        if self.rebuilds.holds_writes_back() {
            return true;
        }
        let unstable = self.config.window_bytes.max(self.config.sync_bytes).saturating_mul(4);
        self.history.weight_after(self.commit.lsn) > self.config.window_bytes
            || self.history.weight_after(self.commit.stable) > unstable
    }

    pub(super) fn execute(&mut self, now: Time, request: Request) {
        let token = request.token;
        if extent(&request.operation).is_some_and(|(_, length)| length == 0) {
            return self.answer_nothing(token);
        }
        let from = match self.judge_repeat(&request) {
            Ok(from) => from,
            Err(answered) => return self.answer_repeat(&request, answered),
        };
        if Self::is_write(&request.operation)
            && let Some(range) = Range::of(&request.operation)
            && self.requests.overlaps(range)
        {
            return self.requests.wait_for_overlap(request);
        }
        match request.operation {
            Operation::Read { offset, length } => self.read(now, token, offset, length),
            Operation::Status { offset, length } => self.block_status(now, token, offset, length),
            Operation::Flush => self.flush_request(token),
            Operation::Write { offset, ref data, fua } => {
                let aligned = offset % BLOCK == 0 && data.len() % BLOCK_SIZE == 0;
                if !aligned {
                    return self.merge(now, request);
                }
                let first = offset / BLOCK;
                let parts = self.parts(&request, from, first + data.len() as u64 / BLOCK);
                let lsn = self.append_write(first, data, fua, &parts);
                let bytes = data.len() as u64;
                self.answer_at(Sequenced { lsn, token, arrived: now, bytes }, fua);
            }
            Operation::Trim { offset, length, fua } => {
                // A trim is a hint: parts of blocks at its edges are ignored.
                let (first, end) = (offset.div_ceil(BLOCK), (offset + length) / BLOCK);
                if first >= end {
                    return self.answer_nothing(token);
                }
                let parts = self.parts(&request, from, end);
                let lsn = self.append_hole(&EntryKind::Trim, first, end, fua, &parts);
                self.answer_at(Sequenced::unmeasured(lsn, token), fua);
            }
            Operation::WriteZeroes { offset, length, fua, no_hole } => {
                if offset % BLOCK != 0 || length % BLOCK != 0 {
                    return self.merge(now, request);
                }
                let (first, end) = (offset / BLOCK, (offset + length) / BLOCK);
                let parts = self.parts(&request, from, end);
                let lsn = self.append_hole(&EntryKind::Zero { no_hole }, first, end, fua, &parts);
                self.answer_at(Sequenced::unmeasured(lsn, token), fua);
            }
        }
    }

    fn flush_request(&mut self, token: Token) {
        let lsn = self.history.last.lsn;
        self.commit.want_sync(lsn);
        if mutant::is("flush-at-applied") {
            return self.requests.wait_for_commit(Sequenced::unmeasured(lsn, token));
        }
        self.requests.wait_for_stable(Sequenced::unmeasured(lsn, token));
    }

    /// Answers a request without effect. It waits all the same: no reply of any kind leaves without
    /// a live lease.
    fn answer_nothing(&mut self, token: Token) {
        self.requests.wait_for_commit(Sequenced::unmeasured(self.history.last.lsn, token));
    }

    pub(super) fn answer_at(&mut self, waiting: Sequenced, fua: bool) {
        if let Some(rest) = self.requests.take_rest(waiting.token) {
            // It is answered with its last part.
            return self.requests.rest_to_window(rest);
        }
        let media = self.is_media() && !mutant::is("media-acknowledged-at-commit");
        if fua || media {
            self.requests.wait_for_stable(waiting);
        } else {
            self.requests.wait_for_commit(waiting);
        }
    }

    /// Sequences whole blocks; the bytes are shared, never copied. Returns the last LSN.
    fn append_write(&mut self, first: u64, data: &Bytes, fua: bool, parts: &Parts) -> Lsn {
        let step = WRITE_BLOCKS_MAX as usize * BLOCK_SIZE;
        let (epoch, mut lsn) = (self.opening.epoch, self.history.last.lsn);
        let done = parts.from.saturating_sub(first).min(data.len() as u64 / BLOCK);
        let mut lba = first + done;
        for at in ((done * BLOCK) as usize..data.len()).step_by(step) {
            let bytes = data.slice(at..(at + step).min(data.len()));
            let blocks = (bytes.len() / BLOCK_SIZE) as u32;
            let part = parts.part(lba + u64::from(blocks));
            let kind = EntryKind::Write;
            lsn = self.history.append_part(epoch, kind, lba, blocks, bytes, fua, part).lsn;
            lba += u64::from(blocks);
        }
        lsn
    }

    fn append_hole(
        &mut self,
        kind: &EntryKind,
        first: u64,
        end: u64,
        fua: bool,
        parts: &Parts,
    ) -> Lsn {
        let (epoch, mut lsn) = (self.opening.epoch, self.history.last.lsn);
        let mut lba = first.max(parts.from);
        while lba < end {
            let blocks = (end - lba).min(HOLE_BLOCKS_MAX.into()) as u32;
            let part = parts.part(lba + u64::from(blocks));
            let (kind, none) = (kind.clone(), Bytes::new());
            lsn = self.history.append_part(epoch, kind, lba, blocks, none, fua, part).lsn;
            lba += u64::from(blocks);
        }
        lsn
    }

    /// Reads the blocks at the edges; the rest of the write waits for them.
    fn merge(&mut self, now: Time, request: Request) {
        let Some((offset, length)) = extent(&request.operation) else { return };
        let Some(range) = Range::of(&request.operation) else { return };
        let need_head = offset % BLOCK != 0;
        let need_tail =
            (offset + length) % BLOCK != 0 && (range.end - 1 != range.first || !need_head);
        let reads = u32::from(need_head) + u32::from(need_tail);
        let merge = Merge { request, range, head: None, tail: None, reads };
        let slot = self.requests.wait_for_merge(merge);
        if need_head {
            self.read_for_merge(now, Purpose::Merge { slot, tail: false }, range.first);
        }
        if need_tail {
            self.read_for_merge(now, Purpose::Merge { slot, tail: true }, range.end - 1);
        }
    }

    /// Handles the content of an edge block that arrived (or cannot be read).
    pub(super) fn merge_read(
        &mut self,
        now: Time,
        slot: usize,
        tail: bool,
        block: Result<Bytes, BlockError>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        match self.requests.edge_read(slot, tail, block) {
            None | Some(Merging::Incomplete) => return,
            Some(Merging::Failed(token, error)) => {
                self.forget_merge_reads(slot);
                self.requests.take_rest(token);
                self.reply(token, Err(error), actions);
            }
            Some(Merging::Complete(merge)) => self.append_merged(merge),
        }
        self.unblock(now);
    }

    fn append_merged(&mut self, merge: Merge) {
        let token = merge.request.token;
        let Range { first, end } = merge.range;
        let from = match self.judge_repeat(&merge.request) {
            Ok(from) => from,
            Err(answered) => return self.answer_repeat(&merge.request, answered),
        };
        let parts = self.parts(&merge.request, from, end);
        let (lsn, fua) = match merge.request.operation {
            Operation::Write { offset, data, fua } => {
                let mut whole = BytesMut::zeroed(((end - first) as usize) * BLOCK_SIZE);
                fill_edges(&mut whole, merge.head, merge.tail);
                let at = (offset - first * BLOCK) as usize;
                whole[at..at + data.len()].copy_from_slice(&data);
                (self.append_write(first, &whole.freeze(), fua, &parts), fua)
            }
            Operation::WriteZeroes { offset, length, fua, no_hole } => {
                let mut first = first;
                let mut end = end;
                let mut lsn = self.history.last.lsn;
                let zero_end = offset + length;
                let single = end - first == 1;
                if let Some(head) = merge.head {
                    let at = (offset % BLOCK) as usize;
                    let to = if single { at + length as usize } else { BLOCK_SIZE };
                    lsn = self.append_write(first, &zeroed(&head, at, to), fua, &parts);
                    first += 1;
                }
                end -= u64::from(merge.tail.is_some());
                if first < end {
                    let kind = EntryKind::Zero { no_hole };
                    lsn = self.append_hole(&kind, first, end, fua, &parts);
                }
                if let Some(tail) = merge.tail {
                    let to = (zero_end % BLOCK) as usize;
                    lsn = self.append_write(end, &zeroed(&tail, 0, to), fua, &parts);
                }
                (lsn, fua)
            }
            _ => return,
        };
        self.answer_at(Sequenced::unmeasured(lsn, token), fua);
    }

    /// `from`: as [`Primary::judge_repeat`] returns it.
    fn parts(&self, request: &Request, from: u64, end: u64) -> Parts {
        let has_rest = self.requests.has_rest(request.token);
        Parts { origin: request.origin, from, end, has_rest }
    }

    /// Submits requests that waited behind a merge, in their order.
    fn unblock(&mut self, now: Time) {
        for request in self.requests.take_overlap() {
            self.execute(now, request);
        }
    }
}

/// The entries that one request becomes, or the part of it that was admitted.
struct Parts {
    origin: Option<Origin>,
    /// Blocks of the request below this one took effect before.
    from: u64,
    /// The block behind its last entry.
    end: u64,
    /// The rest of the request comes behind it.
    has_rest: bool,
}

impl Parts {
    /// The part of the request that an entry is which ends before this block.
    fn part(&self, end: u64) -> Option<Part> {
        let is_last = end == self.end && !self.has_rest;
        self.origin.map(|origin| Part { origin, end, is_last })
    }
}

fn fill_edges(whole: &mut BytesMut, head: Option<Bytes>, tail: Option<Bytes>) {
    if let Some(head) = head {
        whole[..BLOCK_SIZE].copy_from_slice(&head);
    }
    if let Some(tail) = tail {
        let at = whole.len() - BLOCK_SIZE;
        whole[at..].copy_from_slice(&tail);
    }
}

fn zeroed(block: &Bytes, from: usize, to: usize) -> Bytes {
    let mut copy = BytesMut::from(&block[..]);
    copy[from..to].fill(0);
    copy.freeze()
}
