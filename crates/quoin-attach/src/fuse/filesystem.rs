//! The kernel's messages about one file: a state machine from messages to block operations and from
//! their results to answers, without I/O.

use std::collections::HashMap;
use std::time::Instant;

use bytes::Bytes;
use quoin_types::block::{Operation, Payload};

use super::wire::{
    Body, FALLOCATE_KEEP_SIZE, FALLOCATE_PUNCH_HOLE, FALLOCATE_ZERO_RANGE, IN_HEADER_BYTES,
    INIT_ASYNC_DIO, INIT_ASYNC_READ, INIT_BIG_WRITES, INIT_EXT, INIT_MAX_PAGES, INIT2_HAS_RESEND,
    InHeader, MAJOR, MINOR, OPEN_DIRECT_IO, OPEN_PARALLEL_DIRECT_WRITES, WRITE_HEADER_BYTES,
    opcode, out_header, u32_at, u64_at,
};
use crate::metrics::{Metrics, RequestKind};
use quoin_nbd::client::{RequestError, RequestKey};

/// Largest read or write that the kernel may send.
pub const IO_BYTES_MAX: usize = 1 << 20;
/// Limit of requests that the kernel keeps in flight in the background (all direct IO of a loop
/// device).
const BACKGROUND_MAX: u16 = 512;
/// Largest piece of a zeroing: NBD lengths have 32 bits.
const ZERO_BYTES_MAX: u64 = 1 << 30;
const PAGE_BYTES: usize = 4096;

/// Result of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An answer to be written to the kernel.
    Answer(Answer),
    /// An operation to submit; its result is passed to [`Filesystem::complete`] with the same
    /// token.
    Submit {
        token: u64,
        operation: Operation,
    },
    Nothing,
}

/// One answer: a header and its data, to be written to the kernel in one call.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub head: Bytes,
    pub data: Vec<Bytes>,
}

/// One mounted volume.
pub struct Filesystem {
    size_bytes: u64,
    block_size: u32,
    read_only: bool,
    next_token: u64,
    pending: HashMap<u64, Pending>,
    metrics: Metrics,
    /// Start of this turn.
    now: Instant,
    resends: bool,
    /// Offset that the last process reached of zeroings that are sent again, by key.
    reached: HashMap<u64, u64>,
}

/// Flag of a request that the kernel sends again.
const RESENT: u64 = 1 << 63;

#[derive(Debug)]
struct Pending {
    unique: u64,
    kind: Kind,
    request_kind: RequestKind,
    received: Instant,
}

#[derive(Debug)]
enum Kind {
    Read,
    Write {
        length: u32,
    },
    Sync,
    /// Zeroing continues with the next piece once one is done.
    Zero {
        offset: u64,
        left: u64,
        no_hole: bool,
    },
}

impl Filesystem {
    pub fn new(size_bytes: u64, block_size: u32, read_only: bool) -> Self {
        Self {
            size_bytes,
            block_size,
            read_only,
            next_token: 0,
            pending: HashMap::new(),
            metrics: Metrics::default(),
            now: Instant::now(),
            resends: false,
            reached: HashMap::new(),
        }
    }

    /// Goes on with zeroings of the last process where it was, until all were sent again.
    pub fn go_on_at(&mut self, reached: HashMap<u64, u64>) {
        self.reached = reached;
    }

    /// The key by which the next process knows an operation that was submitted.
    pub fn key(&self, token: u64, operation: &Operation) -> Option<RequestKey> {
        let key = self.pending.get(&token)?.unique & !RESENT;
        match operation {
            Operation::Write { offset, .. } | Operation::WriteZeroes { offset, .. } => {
                Some(RequestKey { key, offset: *offset })
            }
            _ => None,
        }
    }

    /// Sets the metrics that count from now on.
    #[must_use]
    pub fn with_metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// Begins a turn: messages and answers in it are timed by this.
    pub fn begin_turn(&mut self, now: Instant) {
        self.now = now;
    }

    /// Returns true if the kernel, which reports it in its first message, can send unanswered
    /// requests again.
    pub fn resends(&self) -> bool {
        self.resends
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Number of operations requested so far.
    pub fn submitted(&self) -> u64 {
        self.next_token
    }

    /// Sets the size. The kernel gets it when it next reads the attributes, which it never caches.
    pub fn resize(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
    }

    /// Handles one whole message of the kernel.
    pub fn message(&mut self, bytes: &[u8]) -> Outcome {
        let Some(header) = InHeader::decode(bytes) else { return Outcome::Nothing };
        let unique = header.unique;
        match self.judge(header, bytes) {
            Some(Ok(outcome)) => outcome,
            Some(Err(errno)) => Outcome::Answer(refusal(unique, errno)),
            None => Outcome::Answer(refusal(unique, libc::EIO)),
        }
    }

    /// Handles the result of an operation that [`Outcome::Submit`] requested.
    pub fn complete(&mut self, token: u64, result: Result<Payload, RequestError>) -> Outcome {
        let Some(pending) = self.pending.remove(&token) else { return Outcome::Nothing };
        let unique = pending.unique;
        let is_last = !matches!(pending.kind, Kind::Zero { left, .. } if left > 0);
        if is_last || result.is_err() {
            let took = self.now.saturating_duration_since(pending.received);
            self.metrics.count_reply(pending.request_kind, took, result.is_ok());
        }
        let payload = match result {
            Ok(payload) => payload,
            Err(error) => return Outcome::Answer(refusal(unique, error.errno())),
        };
        Outcome::Answer(match (pending.kind, payload) {
            (Kind::Read, Payload::Data(data)) => {
                let length = data.iter().map(Bytes::len).sum();
                Answer { head: Bytes::copy_from_slice(&out_header(unique, 0, length)), data }
            }
            (Kind::Read, _) => refusal(unique, libc::EIO),
            (Kind::Write { length }, _) => answer(unique, Body::default().u32(length).u32(0)),
            (Kind::Zero { offset, left, no_hole }, _) if left > 0 => {
                return self.zero(unique, offset, left, no_hole);
            }
            (Kind::Sync | Kind::Zero { .. }, _) => answer(unique, Body::default()),
        })
    }

    /// Decides on a message. `None`: it is too short for its own fields.
    fn judge(&mut self, header: InHeader, bytes: &[u8]) -> Option<Result<Outcome, i32>> {
        let unique = header.unique;
        let body = &bytes[IN_HEADER_BYTES..];
        Some(Ok(match header.opcode {
            opcode::INIT => {
                let flags = u32_at(body, 12)?;
                self.resends = flags & INIT_EXT != 0
                    && u32_at(body, 16).is_some_and(|more| more & INIT2_HAS_RESEND != 0);
                Outcome::Answer(init(unique, u32_at(body, 0)?, flags))
            }
            opcode::GETATTR | opcode::SETATTR => {
                // Attributes cannot be set through the file of a volume; the answer has the present
                // ones.
                let attributes = Body::default().u64(0).u32(0).u32(0);
                Outcome::Answer(answer(unique, self.attributes(attributes)))
            }
            opcode::OPEN => {
                let flags = OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES;
                Outcome::Answer(answer(unique, Body::default().u64(0).u32(flags).u32(0)))
            }
            opcode::READ => {
                let (offset, length) = (u64_at(body, 8)?, u32_at(body, 16)?);
                let length = u64::from(length).min(self.size_bytes.saturating_sub(offset)) as u32;
                if length == 0 {
                    return Some(Ok(Outcome::Answer(answer(unique, Body::default()))));
                }
                self.submit(unique, Kind::Read, Operation::Read { offset, length })
            }
            opcode::WRITE => {
                let (offset, length) = (u64_at(body, 8)?, u32_at(body, 16)?);
                let data = bytes.get(WRITE_HEADER_BYTES..)?;
                if data.len() != length as usize {
                    return None;
                }
                let end = offset.checked_add(u64::from(length))?;
                if self.read_only {
                    return Some(Err(libc::EROFS));
                }
                if end > self.size_bytes {
                    return Some(Err(libc::ENOSPC));
                }
                // The message's buffer is used for the next one, and a write must be kept until it
                // is answered (it may have to be sent again): this is the one copy on this path.
                let data = Bytes::copy_from_slice(data);
                let write = Operation::Write { offset, data, fua: false };
                self.submit(unique, Kind::Write { length }, write)
            }
            opcode::FSYNC => self.submit(unique, Kind::Sync, Operation::Flush),
            opcode::FALLOCATE => {
                let (offset, length) = (u64_at(body, 8)?, u64_at(body, 16)?);
                return Some(self.fallocate(unique, offset, length, u32_at(body, 24)?));
            }
            opcode::STATFS => {
                let blocks = self.size_bytes / u64::from(self.block_size);
                let counts = Body::default().u64(blocks).u64(0).u64(0).u64(1).u64(0);
                let sizes = counts.u32(self.block_size).u32(255).u32(self.block_size);
                Outcome::Answer(answer(unique, sizes.zeroes(4 + 24)))
            }
            opcode::RELEASE | opcode::DESTROY => Outcome::Answer(answer(unique, Body::default())),
            // None of these wants an answer. A request that is on its way is not cancelled.
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Outcome::Nothing,
            _ => return Some(Err(libc::ENOSYS)),
        }))
    }

    /// Punching a hole is a trim that promises zeroes (the loop driver requests both in this way);
    /// zeroing a range keeps it allocated.
    fn fallocate(
        &mut self,
        unique: u64,
        offset: u64,
        length: u64,
        mode: u32,
    ) -> Result<Outcome, i32> {
        let no_hole = match mode & !FALLOCATE_KEEP_SIZE {
            FALLOCATE_PUNCH_HOLE => false,
            FALLOCATE_ZERO_RANGE => true,
            _ => return Err(libc::EOPNOTSUPP),
        };
        if self.read_only {
            return Err(libc::EROFS);
        }
        let end = offset.checked_add(length).ok_or(libc::EFBIG)?.min(self.size_bytes);
        match end.checked_sub(offset) {
            None | Some(0) => Ok(Outcome::Answer(answer(unique, Body::default()))),
            Some(left) => {
                // Pieces that were done before must not be done again: another host may have written there.
                let done = self.reached.remove(&(unique & !RESENT));
                let done = done.and_then(|at| at.checked_sub(offset)).filter(|done| *done < left);
                let done = done.unwrap_or(0);
                Ok(self.zero(unique, offset + done, left - done, no_hole))
            }
        }
    }

    fn zero(&mut self, unique: u64, offset: u64, left: u64, no_hole: bool) -> Outcome {
        let length = left.min(ZERO_BYTES_MAX);
        let rest = Kind::Zero { offset: offset + length, left: left - length, no_hole };
        self.submit(unique, rest, Operation::WriteZeroes { offset, length, fua: false, no_hole })
    }

    fn submit(&mut self, unique: u64, kind: Kind, operation: Operation) -> Outcome {
        self.next_token += 1;
        let request_kind = match &operation {
            Operation::Read { length, .. } => RequestKind::Read { bytes: u64::from(*length) },
            Operation::Write { data, .. } => RequestKind::Write { bytes: data.len() as u64 },
            Operation::Flush => RequestKind::Flush,
            _ => RequestKind::Zero,
        };
        self.pending
            .insert(self.next_token, Pending { unique, kind, request_kind, received: self.now });
        Outcome::Submit { token: self.next_token, operation }
    }

    fn attributes(&self, body: Body) -> Body {
        let mode = libc::S_IFREG | if self.read_only { 0o400 } else { 0o600 };
        body.u64(1)
            .u64(self.size_bytes)
            .u64(self.size_bytes / 512)
            .zeroes(3 * 8 + 3 * 4)
            .u32(mode)
            .u32(1)
            .zeroes(3 * 4)
            .u32(self.block_size)
            .u32(0)
    }
}

fn init(unique: u64, major: u32, flags: u32) -> Answer {
    if major != MAJOR {
        // A newer kernel asks again in the version of this answer.
        return answer(unique, Body::default().u32(MAJOR).u32(MINOR).zeroes(56));
    }
    let wanted = INIT_ASYNC_READ | INIT_BIG_WRITES | INIT_ASYNC_DIO | INIT_MAX_PAGES;
    let body = Body::default()
        .u32(MAJOR)
        .u32(MINOR)
        .u32(0)
        .u32(flags & wanted)
        .u16(BACKGROUND_MAX)
        .u16(BACKGROUND_MAX * 3 / 4)
        .u32(IO_BYTES_MAX as u32)
        .u32(1)
        .u16((IO_BYTES_MAX / PAGE_BYTES) as u16)
        .u16(0)
        .zeroes(4 + 28);
    answer(unique, body)
}

fn answer(unique: u64, body: Body) -> Answer {
    let mut head = out_header(unique, 0, body.0.len()).to_vec();
    head.extend(body.0);
    Answer { head: head.into(), data: Vec::new() }
}

fn refusal(unique: u64, errno: i32) -> Answer {
    Answer { head: Bytes::copy_from_slice(&out_header(unique, errno, 0)), data: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::super::wire::OUT_HEADER_BYTES;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn message(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((IN_HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(unique.to_ne_bytes());
        bytes.resize(IN_HEADER_BYTES, 0);
        bytes.extend(body);
        bytes
    }

    fn io(offset: u64, length: u32, data: &[u8]) -> Vec<u8> {
        let mut body = Body::default().u64(0).u64(offset).u32(length).zeroes(20).0;
        body.extend(data);
        body
    }

    fn fallocate(offset: u64, length: u64, mode: u32) -> Vec<u8> {
        Body::default().u64(0).u64(offset).u64(length).u32(mode).u32(0).0
    }

    fn errno(outcome: &Outcome) -> i32 {
        let Outcome::Answer(answer) = outcome else { panic!("no answer: {outcome:?}") };
        -(u32_at(&answer.head, 4).unwrap() as i32)
    }

    fn submitted(outcome: Outcome) -> (u64, Operation) {
        let Outcome::Submit { token, operation } = outcome else { panic!("{outcome:?}") };
        (token, operation)
    }

    #[test]
    fn a_fuse_write_becomes_a_write_and_its_reply_has_its_length() {
        let mut filesystem = Filesystem::new(MIB, 4096, false);
        let data = [9; 4096];
        let outcome = filesystem.message(&message(opcode::WRITE, 7, &io(8192, 4096, &data)));
        let (token, operation) = submitted(outcome);
        let data = Bytes::copy_from_slice(&data);
        assert_eq!(operation, Operation::Write { offset: 8192, data, fua: false });
        let Outcome::Answer(answer) = filesystem.complete(token, Ok(Payload::None)) else {
            panic!("no answer")
        };
        assert_eq!(u64_at(&answer.head, 8), Some(7));
        assert_eq!(u32_at(&answer.head, 16), Some(4096));
    }

    #[test]
    fn resend_support_is_read_from_the_init_message() {
        let hello = |flags: u32, more: u32| {
            let body = Body::default().u32(MAJOR).u32(45).u32(0).u32(flags).u32(more).zeroes(44).0;
            let mut filesystem = Filesystem::new(MIB, 4096, false);
            filesystem.message(&message(opcode::INIT, 1, &body));
            filesystem.resends()
        };
        assert!(hello(INIT_EXT, INIT2_HAS_RESEND));
        assert!(!hello(INIT_EXT, 0));
        assert!(!hello(0, INIT2_HAS_RESEND), "the second flag word is ignored without INIT_EXT");
    }

    #[test]
    fn the_init_reply_has_the_version_and_the_limits_of_requests() {
        let answer = |major: u32| {
            let body = Body::default().u32(major).u32(45).u32(0).u32(u32::MAX).zeroes(48).0;
            let first = message(opcode::INIT, 1, &body);
            match Filesystem::new(MIB, 4096, false).message(&first) {
                Outcome::Answer(answer) => answer.head,
                other => panic!("no answer: {other:?}"),
            }
        };
        let head = answer(MAJOR);
        // Offsets after the header of 16 bytes.
        let words = |at: usize| u32_at(&head, 16 + at).unwrap();
        assert_eq!((words(0), words(4), words(8)), (MAJOR, MINOR, 0));
        assert_eq!(words(12), INIT_ASYNC_READ | INIT_BIG_WRITES | INIT_ASYNC_DIO | INIT_MAX_PAGES);
        let halves = |at: usize| u16::from_ne_bytes([head[16 + at], head[17 + at]]);
        assert_eq!((halves(16), halves(18)), (512, 384), "max_background, congestion_threshold");
        assert_eq!((words(20), words(24), halves(28)), (1 << 20, 1, 256));
        assert_eq!(head.len(), 16 + 64);

        let other = answer(MAJOR + 1);
        assert_eq!(
            u32_at(&other, 16),
            Some(MAJOR),
            "the kernel negotiates again with this version"
        );
        assert_eq!(
            other[20..].iter().filter(|byte| **byte != 0).count(),
            1,
            "only the minor version differs"
        );
    }

    #[test]
    fn reads_stop_at_the_end_of_the_volume() {
        let mut filesystem = Filesystem::new(MIB, 4096, false);
        let read = message(opcode::READ, 1, &io(MIB - 4096, 65536, &[]));
        let (_, operation) = submitted(filesystem.message(&read));
        assert_eq!(operation, Operation::Read { offset: MIB - 4096, length: 4096 });
        let beyond = filesystem.message(&message(opcode::READ, 1, &io(u64::MAX, 4096, &[])));
        assert_eq!(errno(&beyond), 0);
    }

    #[test]
    fn a_long_hole_is_punched_in_pieces_and_replied_to_once() {
        let mut filesystem = Filesystem::new(5 << 30, 4096, false);
        let mode = FALLOCATE_PUNCH_HOLE | FALLOCATE_KEEP_SIZE;
        let punch = message(opcode::FALLOCATE, 3, &fallocate(4096, u64::MAX / 2, mode));
        let mut outcome = filesystem.message(&punch);
        let (mut at, mut pieces) = (4096, 0);
        while let Outcome::Submit { token, operation } = outcome {
            let Operation::WriteZeroes { offset, length, no_hole: false, .. } = operation else {
                panic!("{operation:?}")
            };
            assert_eq!(offset, at);
            at += length;
            pieces += 1;
            outcome = filesystem.complete(token, Ok(Payload::None));
        }
        assert_eq!(errno(&outcome), 0);
        assert_eq!((at, pieces), (5 << 30, 5));
    }

    #[test]
    fn a_zeroing_that_is_sent_again_goes_on_where_the_last_process_was() {
        const PIECE: u64 = 1 << 30;
        let mode = FALLOCATE_PUNCH_HOLE | FALLOCATE_KEEP_SIZE;
        let punch = message(opcode::FALLOCATE, 4 | RESENT, &fallocate(0, 3 * PIECE, mode));
        let mut filesystem = Filesystem::new(5 << 30, 4096, false);
        filesystem.go_on_at(HashMap::from([(4, 2 * PIECE)]));
        let (token, operation) = submitted(filesystem.message(&punch));
        let key = RequestKey { key: 4, offset: 2 * PIECE };
        assert_eq!(filesystem.key(token, &operation), Some(key));
        let rest =
            Operation::WriteZeroes { offset: 2 * PIECE, length: PIECE, fua: false, no_hole: false };
        assert_eq!(operation, rest);
        let outcome = filesystem.complete(token, Ok(Payload::None));
        assert_eq!(errno(&outcome), 0);
        let (_, operation) = submitted(filesystem.message(&punch));
        assert!(matches!(operation, Operation::WriteZeroes { offset: 0, .. }), "{operation:?}");
    }

    #[test]
    fn operations_that_a_file_of_fixed_size_lacks_are_refused() {
        let mut writable = Filesystem::new(MIB, 4096, false);
        let beyond = message(opcode::WRITE, 1, &io(MIB, 512, &[0; 512]));
        assert_eq!(errno(&writable.message(&beyond)), libc::ENOSPC);
        let grow = message(opcode::FALLOCATE, 1, &fallocate(0, 4096, 0));
        assert_eq!(errno(&writable.message(&grow)), libc::EOPNOTSUPP);
        assert_eq!(errno(&writable.message(&message(1, 1, b"name\0"))), libc::ENOSYS);

        let mut read_only = Filesystem::new(MIB, 4096, true);
        let write = message(opcode::WRITE, 1, &io(0, 512, &[0; 512]));
        assert_eq!(errno(&read_only.message(&write)), libc::EROFS);
        let punch = message(opcode::FALLOCATE, 1, &fallocate(0, 4096, FALLOCATE_PUNCH_HOLE));
        assert_eq!(errno(&read_only.message(&punch)), libc::EROFS);
    }

    const LARGEST: u64 = u64::MAX;

    /// Each with the operation that is submitted; `None`: the answer is that nothing is there.
    #[test]
    fn a_read_is_of_what_is_before_the_end_wherever_it_begins_and_ends() {
        for (offset, length, wanted) in [
            (0, 0, None),
            (0, 1, Some(1)),
            (0, IO_BYTES_MAX as u32, Some(MIB as u32)),
            (MIB - 4096, 4095, Some(4095)),
            (MIB - 4096, 4096, Some(4096)),
            (MIB - 4096, 4097, Some(4096)),
            (MIB - 1, 1, Some(1)),
            (MIB - 1, u32::MAX, Some(1)),
            (MIB, 1, None),
            (MIB + 1, 1, None),
            (LARGEST, u32::MAX, None),
        ] {
            let mut filesystem = Filesystem::new(MIB, 4096, true);
            let outcome = filesystem.message(&message(opcode::READ, 9, &io(offset, length, &[])));
            let wanted = wanted.map(|length| Operation::Read { offset, length });
            match outcome {
                Outcome::Submit { operation, .. } => assert_eq!(Some(operation), wanted),
                Outcome::Answer(empty) => {
                    assert_eq!(wanted, None, "{offset}+{length}");
                    assert_eq!(empty.head[..], out_header(9, 0, 0));
                }
                Outcome::Nothing => panic!("{offset}+{length} has no answer"),
            }
        }
    }

    #[test]
    fn a_write_is_taken_up_to_the_last_byte_and_refused_with_one_more() {
        for (offset, length, wanted) in [
            (0, 1, 0),
            (0, 0, 0),
            (MIB - 4096, 4095, 0),
            (MIB - 4096, 4096, 0),
            (MIB - 4096, 4097, libc::ENOSPC),
            (MIB - 1, 1, 0),
            (MIB - 1, 2, libc::ENOSPC),
            (MIB, 0, 0),
            (MIB, 1, libc::ENOSPC),
            (LARGEST - 1, 1, libc::ENOSPC),
            (LARGEST, 1, libc::EIO),
        ] {
            let data = vec![3; length as usize];
            let sent = message(opcode::WRITE, 1, &io(offset, length, &data));
            let outcome = Filesystem::new(MIB, 4096, false).message(&sent);
            match outcome {
                Outcome::Submit { operation, .. } => {
                    let write = Operation::Write { offset, data: data.into(), fua: false };
                    assert_eq!((operation, wanted), (write, 0), "{offset}+{length}");
                }
                refused => assert_eq!(errno(&refused), wanted, "{offset}+{length}"),
            }
            let refused = Filesystem::new(MIB, 4096, true).message(&sent);
            let wanted = if offset == LARGEST { libc::EIO } else { libc::EROFS };
            assert_eq!(errno(&refused), wanted, "{offset}+{length} where it may only be read");
        }
        // A volume that has grown takes what it refused, and one more byte still not.
        let mut grown = Filesystem::new(MIB, 4096, false);
        grown.resize(2 * MIB);
        let end = |offset| message(opcode::WRITE, 1, &io(offset, 2, &[0; 2]));
        submitted(grown.message(&end(2 * MIB - 2)));
        assert_eq!(errno(&grown.message(&end(2 * MIB - 1))), libc::ENOSPC);
        // The data of a message must be as long as it says.
        for length in [1, 3] {
            let other = message(opcode::WRITE, 1, &io(0, length, &[0; 2]));
            assert_eq!(errno(&grown.message(&other)), libc::EIO, "{length} of 2");
        }
    }

    #[test]
    fn a_range_is_zeroed_up_to_the_end_in_the_way_that_its_mode_says() {
        let (hole, zero) = (FALLOCATE_PUNCH_HOLE, FALLOCATE_ZERO_RANGE);
        let size = 2 * ZERO_BYTES_MAX;
        for (offset, length, mode, wanted) in [
            (0, 1, hole | FALLOCATE_KEEP_SIZE, Ok(Some((1, false)))),
            (0, 1, zero | FALLOCATE_KEEP_SIZE, Ok(Some((1, true)))),
            (0, 1, hole, Ok(Some((1, false)))),
            (0, 1, zero, Ok(Some((1, true)))),
            (0, 0, hole, Ok(None)),
            (0, ZERO_BYTES_MAX - 1, hole, Ok(Some((ZERO_BYTES_MAX - 1, false)))),
            (0, ZERO_BYTES_MAX, hole, Ok(Some((ZERO_BYTES_MAX, false)))),
            (0, ZERO_BYTES_MAX + 1, hole, Ok(Some((ZERO_BYTES_MAX, false)))),
            (size - 1, 1, hole, Ok(Some((1, false)))),
            (size - 1, 2, hole, Ok(Some((1, false)))),
            (size, 1, hole, Ok(None)),
            (size + 1, 1, zero, Ok(None)),
            (LARGEST, 0, hole, Ok(None)),
            (LARGEST, 1, hole, Err(libc::EFBIG)),
            (0, 1, 0, Err(libc::EOPNOTSUPP)),
            (0, 1, FALLOCATE_KEEP_SIZE, Err(libc::EOPNOTSUPP)),
            (0, 1, hole | zero, Err(libc::EOPNOTSUPP)),
            (0, 1, hole | 8, Err(libc::EOPNOTSUPP)),
        ] {
            let sent = message(opcode::FALLOCATE, 1, &fallocate(offset, length, mode));
            let outcome = Filesystem::new(size, 4096, false).message(&sent);
            match wanted {
                Ok(Some((length, no_hole))) => {
                    let zeroes = Operation::WriteZeroes { offset, length, fua: false, no_hole };
                    assert_eq!(submitted(outcome).1, zeroes);
                }
                Ok(None) => assert_eq!(errno(&outcome), 0, "{offset}+{length}"),
                Err(wanted) => assert_eq!(errno(&outcome), wanted, "{offset}+{length}, {mode:#x}"),
            }
        }
    }

    #[test]
    fn a_zeroing_whose_piece_fails_ends_with_that_error_and_writes_no_more() {
        let mut filesystem = Filesystem::new(4 * ZERO_BYTES_MAX, 4096, false);
        let body = fallocate(0, 3 * ZERO_BYTES_MAX, FALLOCATE_PUNCH_HOLE);
        let punch = filesystem.message(&message(opcode::FALLOCATE, 3, &body));
        let (first, _) = submitted(punch);
        let (second, _) = submitted(filesystem.complete(first, Ok(Payload::None)));
        let error = RequestError::Refused(libc::ENOSPC as u32);
        assert_eq!(errno(&filesystem.complete(second, Err(error))), libc::ENOSPC);
        assert_eq!((filesystem.submitted(), filesystem.pending.len()), (2, 0));
        // A result that comes twice, or of no operation, has no answer.
        for token in [second, 99] {
            assert_eq!(filesystem.complete(token, Ok(Payload::None)), Outcome::Nothing);
        }
    }

    #[test]
    fn the_file_has_the_size_of_its_volume_and_a_mode_that_says_if_it_may_be_written() {
        for (read_only, mode) in [(false, 0o100_600), (true, 0o100_400)] {
            let mut filesystem = Filesystem::new(MIB, 4096, read_only);
            for (opcode, size) in
                [(opcode::GETATTR, MIB), (opcode::SETATTR, MIB), (opcode::GETATTR, MIB + 4096)]
            {
                filesystem.resize(size);
                let Outcome::Answer(answer) = filesystem.message(&message(opcode, 5, &[0; 88]))
                else {
                    panic!("no answer")
                };
                let body = &answer.head[OUT_HEADER_BYTES..];
                assert_eq!((body.len(), u64_at(body, 0), u32_at(body, 8)), (104, Some(0), Some(0)));
                let attributes = &body[16..];
                let numbers = [0, 8, 16].map(|at| u64_at(attributes, at).unwrap());
                assert_eq!(numbers, [1, size, size / 512]);
                let words = [60, 64, 80].map(|at| u32_at(attributes, at).unwrap());
                assert_eq!(words, [mode, 1, 4096], "mode, links, block size");
            }
        }
        let counts = Filesystem::new(MIB, 512, false).message(&message(opcode::STATFS, 5, &[]));
        let Outcome::Answer(answer) = counts else { panic!("no answer") };
        let body = &answer.head[OUT_HEADER_BYTES..];
        assert_eq!((body.len(), u64_at(body, 0), u64_at(body, 8)), (80, Some(2048), Some(0)));
        assert_eq!((u32_at(body, 40), u32_at(body, 48)), (Some(512), Some(512)));
        let mut filesystem = Filesystem::new(MIB, 512, false);
        let Outcome::Answer(answer) = filesystem.message(&message(opcode::OPEN, 5, &[0; 8])) else {
            panic!("no answer")
        };
        let flags = u32_at(&answer.head, OUT_HEADER_BYTES + 8);
        assert_eq!(flags, Some(OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES));
        let (_, flush) = submitted(filesystem.message(&message(opcode::FSYNC, 5, &[0; 16])));
        assert_eq!(flush, Operation::Flush);
        for without in [opcode::FORGET, opcode::BATCH_FORGET, opcode::INTERRUPT] {
            let outcome = filesystem.message(&message(without, 5, &[0; 16]));
            assert_eq!(outcome, Outcome::Nothing, "{without} wants no answer");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_message_makes_it_panic(
            opcode in 0u32..60,
            body in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..120),
            cut in 0usize..160,
        ) {
            let mut filesystem = Filesystem::new(MIB, 4096, false);
            let mut bytes = message(opcode, 1, &body);
            filesystem.message(&bytes);
            bytes.truncate(cut);
            filesystem.message(&bytes);
        }
    }
}
