//! Frames of a target's history socket: what a snapshot of a volume holds, or what changed in it since an
//! older one, as it is stored; and the same into a copy of the volume.
//!
//! A connection is one stream. The client says what it wants ([`Wanted`]), and the target answers with parts
//! ([`Part`]) in the order of their blocks until the last one, or ends the stream with a reason ([`Refused`]).
//! A stream that ended early is gone on with elsewhere, or later, at the block where the next part begins: parts
//! are the same from whatever target they come, as both snapshots are fixed.
//!
//! A stream into a copy begins with [`Feed`], which names the transfer that the target was ordered to take. It
//! is answered with [`Taken`], which says where the stream begins, and so is each of the [`Slots`] that follow, in
//! the order of their blocks, once what it holds is written. The last of them has the digest over all that the stream sent, and its answer says that
//! everything is on stable media.
//!
//! Each block comes with the checksum under which it is stored, and [`Part::check`] holds it against that.
//! Frames have the header and the limits of [`crate::frame`], and the socket is one of the host, for its owner
//! alone: nothing is sealed.

use std::io::{Read, Write};

use bytes::{BufMut, Bytes, BytesMut};
use quoin_types::codec::{Reader, Writer};
pub use quoin_types::history::{Block, Feed, Part, Refused, Slots, Taken, Wanted};
use quoin_types::history::{put_optional, put_part};
use quoin_types::ids::{PointId, SessionKey, SnapshotId, VolumeId};
use quoin_types::message::ChangedRange;
use quoin_types::{BLOCK_SIZE, VOLUME_BLOCKS_MAX};

use crate::decode;
use crate::encode::FrameBuffer;
use crate::frame::{HEADER_LEN, Header, Limits, WireError, kind};

/// Name of the socket in a target's directory of sockets.
pub const SOCKET: &str = "history.sock";

/// Least size of a range in a head.
const RANGE_BYTES: usize = 17;
const CHECKSUM_BYTES: usize = 4;

/// Frame of a stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    Wanted(Wanted),
    Part(Part),
    Feed(Feed),
    Slots(Slots),
    Taken(Taken),
    Refused(Refused),
}

/// # Errors
/// Ranges that lie in no order or in no volume, blocks without a range, no progress.
fn check_order(part: &Part) -> Result<(), WireError> {
    let (mut at, mut data_blocks) = (0u64, 0u64);
    for range in &part.ranges {
        let end = range.lba.checked_add(range.blocks).filter(|end| *end <= VOLUME_BLOCKS_MAX);
        let Some(end) = end.filter(|_| range.blocks > 0 && range.lba >= at) else {
            return Err(WireError::Malformed("range"));
        };
        at = end;
        data_blocks += if range.hole { 0 } else { range.blocks };
    }
    let has = part.blocks.len() as u64;
    if has != data_blocks && has != 0 {
        return Err(WireError::Malformed("blocks of a part"));
    }
    if part.next.is_some_and(|next| next < at || next == 0 || next > VOLUME_BLOCKS_MAX) {
        return Err(WireError::Malformed("next block of a part"));
    }
    Ok(())
}

fn optional(head: &mut Reader) -> Result<Option<u128>, WireError> {
    let is_there = head.bool("history frame")?;
    let id = head.u128("history frame")?;
    match (is_there, id) {
        (true, id) => Ok(Some(id)),
        (false, 0) => Ok(None),
        (false, _) => Err(WireError::Malformed("history frame")),
    }
}

impl Message {
    fn encode(&self, frame: &mut FrameBuffer) -> Result<(), WireError> {
        frame.start();
        let out = &mut frame.head;
        let kind = match self {
            Message::Wanted(wanted) => {
                out.put_u128_le(wanted.volume.0);
                put_optional(out, wanted.from.map(|id| id.0));
                out.put_u128_le(wanted.to.0);
                out.put_u64_le(wanted.cursor);
                out.put_flag(wanted.want_data);
                kind::HISTORY_WANTED
            }
            Message::Part(part) => {
                put_part(out, part);
                frame.data.extend(part.blocks.iter().map(|block| block.data.clone()));
                kind::HISTORY_PART
            }
            Message::Feed(feed) => {
                out.put_u128_le(feed.volume.0);
                out.put_u128_le(feed.point.0);
                put_optional(out, feed.base.map(|id| id.0));
                out.put_u128_le(feed.token);
                kind::HISTORY_FEED
            }
            Message::Slots(slots) => {
                out.put_u64_le(slots.place);
                put_optional(out, slots.end.map(u128::from));
                put_part(out, &slots.part);
                frame.data.extend(slots.part.blocks.iter().map(|block| block.data.clone()));
                kind::HISTORY_SLOTS
            }
            Message::Taken(taken) => {
                out.put_u64_le(taken.to);
                out.put_u64_le(taken.stable_to);
                out.put_flag(taken.is_fed);
                kind::HISTORY_TAKEN
            }
            Message::Refused(refused) => {
                let (code, lba) = match refused {
                    Refused::NotServed => (1, 0),
                    Refused::NoSnapshot => (2, 0),
                    Refused::Damaged { lba } => (3, *lba),
                    Refused::Busy => (4, 0),
                    Refused::NotOrdered => (5, 0),
                    Refused::OutOfOrder => (6, 0),
                    Refused::Changed => (7, 0),
                    Refused::Failed => (8, 0),
                };
                out.put_u8(code);
                out.put_u64_le(lba);
                kind::HISTORY_REFUSED
            }
        };
        frame.finish(SessionKey::default(), kind)
    }

    /// Decodes a whole frame whose header is `header`. Blocks are slices of it.
    ///
    /// # Errors
    /// The frame is none of this socket.
    pub fn decode(header: &Header, frame: Bytes) -> Result<Self, WireError> {
        let (mut head, mut data) = decode::parts(header, &frame)?;
        let message = match header.kind {
            kind::HISTORY_WANTED => Message::Wanted(Wanted {
                volume: VolumeId(head.u128("history frame")?),
                from: optional(&mut head)?.map(SnapshotId),
                to: SnapshotId(head.u128("history frame")?),
                cursor: head.u64("history frame")?,
                want_data: head.bool("history frame")?,
            }),
            kind::HISTORY_PART => Message::Part(part(&mut head, &mut data)?),
            kind::HISTORY_FEED => Message::Feed(Feed {
                volume: VolumeId(head.u128("history frame")?),
                point: PointId(head.u128("history frame")?),
                base: optional(&mut head)?.map(PointId),
                token: head.u128("history frame")?,
            }),
            kind::HISTORY_SLOTS => {
                let place = head.u64("history frame")?;
                let end = optional(&mut head)?.map(u64::try_from).transpose();
                let end = end.map_err(|_| WireError::Malformed("digest of a stream"))?;
                let part = part(&mut head, &mut data)?;
                let begins = part.ranges.first().is_none_or(|range| range.lba >= place);
                let goes_on = part.next.is_none_or(|next| next > place);
                if !begins || !goes_on || part.next.is_some() == end.is_some() {
                    return Err(WireError::Malformed("slots"));
                }
                Message::Slots(Slots { place, part, end })
            }
            kind::HISTORY_TAKEN => Message::Taken(Taken {
                to: head.u64("history frame")?,
                stable_to: head.u64("history frame")?,
                is_fed: head.bool("history frame")?,
            }),
            kind::HISTORY_REFUSED => {
                let (code, lba) = (head.u8("history frame")?, head.u64("history frame")?);
                Message::Refused(match (code, lba) {
                    (1, 0) => Refused::NotServed,
                    (2, 0) => Refused::NoSnapshot,
                    (3, lba) => Refused::Damaged { lba },
                    (4, 0) => Refused::Busy,
                    (5, 0) => Refused::NotOrdered,
                    (6, 0) => Refused::OutOfOrder,
                    (7, 0) => Refused::Changed,
                    (8, 0) => Refused::Failed,
                    _ => return Err(WireError::Malformed("history frame")),
                })
            }
            other => return Err(WireError::Kind(other)),
        };
        head.end("head")?;
        match data.is_empty() {
            true => Ok(message),
            false => Err(WireError::Malformed("data length")),
        }
    }

    /// Writes the frame.
    ///
    /// # Errors
    /// It is longer than a frame may be, or the stream fails.
    pub fn write(&self, stream: &mut impl Write) -> Result<(), WireError> {
        let mut frame = FrameBuffer::default();
        self.encode(&mut frame)?;
        let failed = |source| WireError::Io { operation: "write to the stream", source };
        let mut bytes = frame.head.to_vec();
        frame.data.iter().for_each(|block| bytes.extend_from_slice(block));
        stream.write_all(&bytes).map_err(failed)
    }

    /// Reads the next frame; `None`: the other side ended the stream between two frames. It takes memory for
    /// what the header names, within [`Limits::SESSION`].
    ///
    /// # Errors
    /// A frame that is none of this socket, or a failure of the stream.
    pub fn read(stream: &mut impl Read) -> Result<Option<Self>, WireError> {
        let failed = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => WireError::Closed,
            _ => WireError::Io { operation: "read from the stream", source },
        };
        let mut begin = [0; HEADER_LEN];
        let mut has = 0;
        while has < HEADER_LEN {
            match stream.read(&mut begin[has..]) {
                Ok(0) if has == 0 => return Ok(None),
                Ok(0) => return Err(WireError::Closed),
                Ok(read) => has += read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let header = Header::decode(&begin, &Limits::SESSION)?;
        let mut frame = BytesMut::zeroed(header.frame_len());
        frame[..HEADER_LEN].copy_from_slice(&begin);
        stream.read_exact(&mut frame[HEADER_LEN..]).map_err(failed)?;
        Self::decode(&header, frame.freeze()).map(Some)
    }
}

fn part(head: &mut Reader, data: &mut Bytes) -> Result<Part, WireError> {
    let count = head.count(RANGE_BYTES, "ranges")?;
    let mut ranges = Vec::with_capacity(count);
    for _ in 0..count {
        let (lba, blocks) = (head.u64("range")?, head.u64("range")?);
        ranges.push(ChangedRange { lba, blocks, hole: head.bool("range")? });
    }
    let count = head.count(CHECKSUM_BYTES, "checksums")?;
    if count.checked_mul(BLOCK_SIZE) != Some(data.len()) {
        return Err(WireError::Malformed("data length"));
    }
    let crcs = head.u32s(count, "checksums")?;
    let blocks = crcs.into_iter().map(|crc| Block { crc, data: data.split_to(BLOCK_SIZE) });
    let blocks = blocks.collect();
    let next = optional(head)?.map(u64::try_from).transpose();
    let next = next.map_err(|_| WireError::Malformed("next block of a part"))?;
    let part = Part { ranges, blocks, next };
    check_order(&part)?;
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use quoin_types::crc32c;

    fn block(fill: u8) -> Block {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    }

    fn a_part() -> Part {
        Part {
            ranges: vec![
                ChangedRange { lba: 3, blocks: 2, hole: false },
                ChangedRange { lba: 5, blocks: 9, hole: true },
                ChangedRange { lba: 20, blocks: 1, hole: false },
            ],
            blocks: vec![block(1), block(2), block(3)],
            next: Some(21),
        }
    }

    fn wanted() -> Wanted {
        Wanted {
            volume: VolumeId(7),
            from: Some(SnapshotId(8)),
            to: SnapshotId(9),
            cursor: 10,
            want_data: true,
        }
    }

    fn feed() -> Feed {
        Feed { volume: VolumeId(7), point: PointId(8), base: Some(PointId(6)), token: 5 }
    }

    fn slots() -> Slots {
        Slots { place: 3, part: a_part(), end: None }
    }

    fn written(message: &Message) -> Vec<u8> {
        let mut bytes = Vec::new();
        message.write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn each_frame_is_read_as_it_was_written_and_the_end_of_a_stream_is_none() {
        let told = Part { blocks: Vec::new(), next: None, ..a_part() };
        let refusals = [
            Refused::NotServed,
            Refused::NoSnapshot,
            Refused::Damaged { lba: 5 },
            Refused::Busy,
            Refused::NotOrdered,
            Refused::OutOfOrder,
            Refused::Changed,
            Refused::Failed,
        ];
        let mut messages = vec![
            Message::Wanted(wanted()),
            Message::Wanted(Wanted { from: None, want_data: false, ..wanted() }),
            Message::Part(a_part()),
            Message::Part(told),
            Message::Part(Part::default()),
            Message::Feed(feed()),
            Message::Feed(Feed { base: None, ..feed() }),
            Message::Slots(slots()),
            Message::Slots(Slots {
                part: Part { next: None, ..a_part() },
                end: Some(7),
                ..slots()
            }),
            Message::Taken(Taken { to: 9, stable_to: 4, is_fed: false }),
        ];
        messages.extend(refusals.map(Message::Refused));
        let bytes: Vec<u8> = messages.iter().flat_map(written).collect();
        let mut stream = &bytes[..];
        for message in messages {
            assert_eq!(Message::read(&mut stream).unwrap(), Some(message));
        }
        assert_eq!(Message::read(&mut stream).unwrap(), None);
    }

    #[test]
    fn a_block_that_was_changed_on_its_way_and_a_frame_that_is_cut_are_errors() {
        let mut bytes = written(&Message::Part(a_part()));
        *bytes.last_mut().unwrap() ^= 1;
        let Some(Message::Part(part)) = Message::read(&mut &bytes[..]).unwrap() else { panic!() };
        assert!(part.check().is_err() && a_part().check().is_ok());
        for cut in [1, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 5, bytes.len() - 1] {
            assert!(Message::read(&mut &bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_part_that_cannot_be_is_refused() {
        let range = |lba, blocks| ChangedRange { lba, blocks, hole: true };
        let of = |ranges: Vec<ChangedRange>, next| Part { ranges, blocks: Vec::new(), next };
        for wrong in [
            of(vec![range(5, 0)], None),
            of(vec![range(5, 2), range(6, 1)], None),
            of(vec![range(VOLUME_BLOCKS_MAX, 1)], None),
            of(vec![range(u64::MAX, 2)], None),
            of(vec![range(5, 2)], Some(6)),
            of(vec![], Some(0)),
            of(vec![], Some(VOLUME_BLOCKS_MAX + 1)),
            Part { blocks: vec![block(1)], ..a_part() },
        ] {
            let bytes = written(&Message::Part(wrong.clone()));
            assert!(Message::read(&mut &bytes[..]).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn slots_that_go_back_or_have_no_end_are_refused_and_their_sum_is_over_everything() {
        let last = Part { next: None, ..a_part() };
        for wrong in [
            Slots { place: 4, ..slots() },
            Slots {
                place: 21,
                part: Part { ranges: vec![], blocks: vec![], next: Some(21) },
                end: None,
            },
            Slots { end: Some(1), ..slots() },
            Slots { part: last, ..slots() },
        ] {
            let bytes = written(&Message::Slots(wrong.clone()));
            assert!(Message::read(&mut &bytes[..]).is_err(), "{wrong:?}");
        }
        let mut other = slots();
        other.part.blocks[0] = block(9);
        assert_ne!(other.sum(), slots().sum());
        assert_ne!(Slots { place: 2, ..slots() }.sum(), slots().sum());
    }

    proptest! {
        #[test]
        fn no_bytes_of_the_other_side_make_it_panic(
            kind in 140u8..150, head: Vec<u8>, blocks in 0usize..3,
        ) {
            let mut frame = FrameBuffer::default();
            frame.start();
            frame.head.put_slice(&head);
            frame.data.extend((0..blocks).map(|_| block(1).data));
            frame.finish(SessionKey::default(), kind).unwrap();
            let mut bytes = frame.head.to_vec();
            frame.data.iter().for_each(|block| bytes.extend_from_slice(block));
            let _ = Message::read(&mut &bytes[..]);
        }
    }
}
