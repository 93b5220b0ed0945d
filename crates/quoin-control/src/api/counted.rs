//! A request's body, counted while it comes in: bytes and elements of each message.
//!
//! An element of a list takes two bytes on the wire and may take hundreds in memory, so a limit of
//! bytes alone does not limit what a message becomes when it is decoded. Elements are counted as the
//! bytes pass by, before anything is decoded; nothing is kept but the position.
//!
//! A message's bytes are taken from its caller's budget as its length is known, and a message that does
//! not come whole in time is refused: a body that was begun holds no memory for long.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use quoin_identity::Peer;
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;

use super::budgets::{ByteBudget, Reserved};

/// Longest wait for bytes of the budget, and the time between two looks.
const RESERVE_WITHIN: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Limits of one message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub message_bytes_max: usize,
    /// Fields with a length: texts, bytes, messages, and so the elements of every list but numbers.
    pub elements_max: u32,
    /// The same within its replicas and their memberships; 0: these are not looked into.
    pub nested_max: u32,
    /// More than one only where the call is a stream of them.
    pub messages_max: u32,
}

/// The caller's budget, and the time in which a message must have come.
pub(super) struct Allowance {
    /// `None`: of callers whose connections and calls bound them enough.
    pub budget: Option<(ByteBudget, Peer)>,
    /// From the call's begin to the body's end; of a stream from one message's end to the next one's.
    pub message_within: Duration,
}

/// Bytes of the present message, held by its body and until its call is answered.
#[derive(Clone, Default)]
pub(super) struct Held(Arc<Mutex<Option<Reserved>>>);

impl Held {
    fn replace(&self, reserved: Option<Reserved>) {
        let former = {
            let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *held, reserved)
        };
        drop(former);
    }
}

/// A frame that waits until its message's bytes are free.
struct Waiting {
    frame: Frame<Bytes>,
    bytes: u64,
    until: Instant,
    next_look: Pin<Box<Sleep>>,
}

/// `PoolHoldings.replicas`, and the memberships of a `Holding`.
const REPLICAS: u64 = 4;
const MEMBERSHIPS: [u64; 3] = [12, 13, 14];

/// A body whose messages are held against limits.
pub(super) struct Counted {
    inner: Body,
    scan: Scan,
    allowance: Allowance,
    held: Held,
    waiting: Option<Waiting>,
    deadline: Pin<Box<Sleep>>,
}

impl Counted {
    /// Returns the body, and the bytes that are to be held until the call is answered.
    pub(super) fn over(inner: Body, limits: Limits, allowance: Allowance) -> (Body, Held) {
        let held = Held::default();
        let deadline = Box::pin(tokio::time::sleep(allowance.message_within));
        let scan = Scan::new(limits);
        let counted = Self { inner, scan, allowance, held: held.clone(), waiting: None, deadline };
        (Body::new(counted), held)
    }

    /// Gives a frame on once the bytes of the message that it begins are taken.
    fn poll_waiting(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(mut waiting) = self.waiting.take() else { return Poll::Pending };
        let Some((budget, caller)) = &self.allowance.budget else {
            return Poll::Ready(Some(Ok(waiting.frame)));
        };
        loop {
            if let Some(reserved) = budget.take(caller, waiting.bytes) {
                self.held.replace(Some(reserved));
                return Poll::Ready(Some(Ok(waiting.frame)));
            }
            let now = Instant::now();
            if now >= waiting.until {
                let text = format!(
                    "{caller} has too many bytes under way for a message of {}: it sends again once \
                     others are answered",
                    waiting.bytes
                );
                return Poll::Ready(Some(Err(Status::resource_exhausted(text))));
            }
            if waiting.next_look.as_mut().poll(cx).is_pending() {
                self.waiting = Some(waiting);
                return Poll::Pending;
            }
            waiting.next_look.as_mut().reset(now + LOOK_AGAIN);
        }
    }
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.waiting.is_some() {
            return self.poll_waiting(cx);
        }
        if self.deadline.as_mut().poll(cx).is_ready() {
            self.held.replace(None);
            let within_s = self.allowance.message_within.as_secs();
            let text = format!("the message did not come whole within {within_s} s");
            return Poll::Ready(Some(Err(Status::deadline_exceeded(text))));
        }
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        let Poll::Ready(Some(Ok(frame))) = polled else { return polled };
        let Some(data) = frame.data_ref() else { return Poll::Ready(Some(Ok(frame))) };
        if let Err(status) = self.scan.take(data) {
            return Poll::Ready(Some(Err(status)));
        }
        if self.scan.is_between() && self.scan.limits.messages_max > 1 {
            let next = Instant::now() + self.allowance.message_within;
            self.deadline.as_mut().reset(next);
        }
        let bytes = std::mem::take(&mut self.scan.begun_bytes);
        if bytes == 0 || self.allowance.budget.is_none() {
            return Poll::Ready(Some(Ok(frame)));
        }
        // The former message of a stream was taken out of the body before this one is asked for.
        self.held.replace(None);
        let until = Instant::now() + RESERVE_WITHIN;
        let next_look = Box::pin(tokio::time::sleep(LOOK_AGAIN));
        self.waiting = Some(Waiting { frame, bytes, until, next_look });
        self.poll_waiting(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[derive(Clone, Copy)]
enum At {
    /// Within the five bytes before a message: a flag and a length.
    Header {
        taken: u8,
        length: u32,
    },
    Tag(Varint),
    Number,
    Length {
        field: u64,
        length: Varint,
    },
    /// Within what is not looked into.
    Skip {
        left: u64,
    },
}

#[derive(Clone, Copy, Default)]
struct Varint {
    value: u64,
    bits: u32,
}

impl Varint {
    /// True once it is whole.
    fn add(&mut self, byte: u8) -> bool {
        if self.bits < 64 {
            self.value |= u64::from(byte & 0x7f) << self.bits;
        }
        self.bits = (self.bits + 7).min(70);
        byte & 0x80 == 0
    }
}

struct Scan {
    limits: Limits,
    at: At,
    /// Bytes left of the message and of each message within that is looked into.
    open: Vec<u64>,
    elements: u32,
    nested: u32,
    messages: u32,
    /// Bytes of the messages that began since this was taken.
    begun_bytes: u64,
}

impl Scan {
    /// Returns whether the last message is whole, and the next one has not begun.
    fn is_between(&self) -> bool {
        self.open.is_empty() && matches!(self.at, At::Header { taken: 0, .. })
    }

    fn new(limits: Limits) -> Self {
        let at = At::Header { taken: 0, length: 0 };
        Self { limits, at, open: Vec::new(), elements: 0, nested: 0, messages: 0, begun_bytes: 0 }
    }

    fn take(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while let Some((&byte, rest)) = data.split_first() {
            if let At::Skip { left } = self.at {
                let skipped = left.min(data.len() as u64);
                data = &data[skipped as usize..];
                self.passed(skipped);
                self.at = At::Skip { left: left - skipped };
            } else {
                data = rest;
                self.step(byte)?;
            }
            self.settle();
        }
        Ok(())
    }

    /// Bytes of the message went by.
    fn passed(&mut self, bytes: u64) {
        self.open.iter_mut().for_each(|left| *left -= bytes);
    }

    /// Leaves what is over.
    fn settle(&mut self) {
        if let At::Skip { left: 0 } = self.at {
            self.at = At::Tag(Varint::default());
        }
        let was_open = !self.open.is_empty();
        while self.open.last() == Some(&0) {
            self.open.pop();
            self.at = At::Tag(Varint::default());
        }
        if was_open && self.open.is_empty() {
            self.at = At::Header { taken: 0, length: 0 };
        }
    }

    fn step(&mut self, byte: u8) -> Result<(), Status> {
        if !self.open.is_empty() {
            self.passed(1);
        }
        match &mut self.at {
            At::Header { taken: 0, length } => self.at = At::Header { taken: 1, length: *length },
            At::Header { taken, length } => {
                *length = *length << 8 | u32::from(byte);
                *taken += 1;
                if *taken == 5 {
                    let length = *length;
                    self.begin(length)?;
                }
            }
            At::Tag(tag) => {
                if tag.add(byte) {
                    let (field, kind) = (tag.value >> 3, tag.value & 7);
                    self.at = match kind {
                        0 => At::Number,
                        1 => self.skip(8),
                        2 => At::Length { field, length: Varint::default() },
                        5 => self.skip(4),
                        // The decoder refuses it.
                        _ => self.skip(u64::MAX),
                    };
                }
            }
            At::Number => {
                if byte & 0x80 == 0 {
                    self.at = At::Tag(Varint::default());
                }
            }
            At::Length { field, length } => {
                if length.add(byte) {
                    let (field, length) = (*field, length.value);
                    self.element(field, length)?;
                }
            }
            At::Skip { .. } => unreachable!("skipped by the caller"),
        }
        Ok(())
    }

    fn begin(&mut self, length: u32) -> Result<(), Status> {
        let most = self.limits.message_bytes_max;
        if length as usize > most {
            let text =
                format!("a message of {length} bytes is too large, at most {most} are taken");
            return Err(Status::out_of_range(text));
        }
        if self.messages == self.limits.messages_max {
            return Err(Status::invalid_argument("the call takes one message"));
        }
        self.messages += 1;
        self.begun_bytes += u64::from(length);
        (self.elements, self.nested) = (0, 0);
        if length == 0 {
            self.at = At::Header { taken: 0, length: 0 };
        } else {
            self.at = At::Tag(Varint::default());
            self.open.push(length.into());
        }
        Ok(())
    }

    fn element(&mut self, field: u64, length: u64) -> Result<(), Status> {
        let depth = self.open.len();
        let (count, most) = match depth {
            1 => (&mut self.elements, self.limits.elements_max),
            _ => (&mut self.nested, self.limits.nested_max),
        };
        *count += 1;
        if *count > most {
            let text = format!("a message has too many elements, at most {most} are taken");
            return Err(Status::resource_exhausted(text));
        }
        let is_looked_into = self.limits.nested_max > 0
            && match depth {
                1 => field == REPLICAS,
                2 => MEMBERSHIPS.contains(&field),
                _ => false,
            };
        let left = self.open.last().copied().unwrap_or_default();
        if is_looked_into {
            // A field that claims more than its message has is refused by the decoder.
            self.open.push(length.min(left));
            self.at = At::Tag(Varint::default());
        } else {
            self.at = self.skip(length);
        }
        Ok(())
    }

    fn skip(&self, bytes: u64) -> At {
        At::Skip { left: bytes.min(self.open.last().copied().unwrap_or_default()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;
    use quoin_api::control::{
        Holding, Member, Membership, PoolHoldings, PoolReport, ReplicaReport,
    };
    use tonic::Code;

    const LIMITS: Limits = Limits {
        message_bytes_max: 1 << 20,
        elements_max: 10,
        nested_max: 40,
        messages_max: u32::MAX,
    };

    fn framed(messages: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.push(0);
            bytes.extend((message.len() as u32).to_be_bytes());
            bytes.extend(message);
        }
        bytes
    }

    fn scanned(bytes: &[u8], piece: usize) -> Result<(), Code> {
        let mut scan = Scan::new(LIMITS);
        bytes.chunks(piece).try_for_each(|piece| scan.take(piece)).map_err(|status| status.code())
    }

    fn report(replicas: usize) -> Vec<u8> {
        let replicas = vec![ReplicaReport::default(); replicas];
        PoolReport { replicas, start_counter: 300, ..PoolReport::default() }.encode_to_vec()
    }

    fn holdings(replicas: usize, known: usize) -> Vec<u8> {
        let text = "7".repeat(32);
        let member = Member { replica_id: text.clone(), guid: text.clone() };
        let membership =
            Membership { known: vec![member; known], version: 7, ..Default::default() };
        let holding = Holding { membership: Some(membership), guid: text, ..Holding::default() };
        PoolHoldings { replicas: vec![holding; replicas], ..PoolHoldings::default() }
            .encode_to_vec()
    }

    #[test]
    fn elements_are_counted_in_each_message_by_itself_however_the_bytes_are_cut() {
        for piece in [1, 2, 3, 7, 1 << 20] {
            let told = |messages: &[Vec<u8>]| scanned(&framed(messages), piece);
            assert_eq!(told(&[report(10), report(10), Vec::new(), report(10)]), Ok(()));
            assert_eq!(told(&[report(11)]), Err(Code::ResourceExhausted));
            assert_eq!(told(&[report(10), report(11)]), Err(Code::ResourceExhausted));
            // Nine replicas, each with a GUID and a membership of two members.
            assert_eq!(told(&[holdings(9, 2)]), Ok(()));
            assert_eq!(told(&[holdings(9, 3)]), Err(Code::ResourceExhausted));
            assert_eq!(told(&[holdings(1, 38), holdings(1, 38)]), Ok(()));
            assert_eq!(told(&[holdings(1, 39)]), Err(Code::ResourceExhausted));
        }
    }

    #[test]
    fn a_second_message_is_refused_where_the_call_takes_one() {
        let mut scan = Scan::new(Limits { messages_max: 1, ..LIMITS });
        scan.take(&framed(&[report(3)])).unwrap();
        assert!(scan.is_between() && scan.begun_bytes == report(3).len() as u64);
        let refused = scan.take(&framed(&[report(3)])).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }

    #[test]
    fn a_message_that_says_it_is_too_large_is_refused_before_it_comes() {
        let mut header = vec![0];
        header.extend(((1u32 << 20) + 1).to_be_bytes());
        assert_eq!(scanned(&header, 5), Err(Code::OutOfRange));
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_their_pieces_make_no_difference(
            mut bytes in prop::collection::vec(any::<u8>(), 0..400),
            piece in 1usize..50,
        ) {
            // Short messages, so that what is within is looked at.
            for at in [0, 1, 2, 3] {
                if let Some(byte) = bytes.get_mut(at) { *byte = 0 }
            }
            prop_assert_eq!(scanned(&bytes, piece), scanned(&bytes, 1));
        }
    }
}
