//! A client's read or status request: assembled from the parts that replicas answer, cut to the
//! requested bytes.

use bytes::{Bytes, BytesMut};

use super::read::BLOCK;
use quoin_types::block::{BlockError, Payload, StatusExtent, Token};
use quoin_types::message::{Content, Slot};
use quoin_types::time::Time;
use quoin_types::{BLOCK_SIZE, WRITE_BLOCKS_MAX};

static ZEROES: [u8; WRITE_BLOCKS_MAX as usize * BLOCK_SIZE] =
    [0; WRITE_BLOCKS_MAX as usize * BLOCK_SIZE];

/// A client's request, answered when all parts have arrived.
pub(super) struct Group {
    token: Token,
    offset: u64,
    length: u64,
    is_status: bool,
    parts: Vec<Option<Vec<Slot>>>,
    missing: usize,
    failed: Option<BlockError>,
    pub arrived: Time,
}

impl Group {
    pub fn new(arrived: Time, token: Token, offset: u64, length: u64, is_status: bool) -> Self {
        Self {
            token,
            offset,
            length,
            is_status,
            parts: Vec::new(),
            missing: 0,
            failed: None,
            arrived,
        }
    }

    /// Returns true if data was requested and read.
    pub fn is_read(&self) -> bool {
        !self.is_status && self.failed.is_none()
    }

    pub fn length(&self) -> u64 {
        self.length
    }

    /// Adds a part that the answer waits for; returns its number.
    pub fn expect_part(&mut self) -> usize {
        self.parts.push(None);
        self.missing += 1;
        self.parts.len() - 1
    }

    /// Stores the result of a part. Returns true if no part is missing any more.
    pub fn take_part(&mut self, part: usize, result: Result<Vec<Slot>, BlockError>) -> bool {
        self.missing -= 1;
        match result {
            Ok(slots) => self.parts[part] = Some(slots),
            Err(error) => self.failed = Some(error),
        }
        self.missing == 0
    }

    /// Returns the answer for the client.
    pub fn answer(self) -> (Token, Result<Payload, BlockError>) {
        if let Some(error) = self.failed {
            return (self.token, Err(error));
        }
        let slots = self.parts.into_iter().flatten().flatten();
        let cuts = cut(slots, self.offset, self.length);
        let payload = match self.is_status {
            true => Payload::Status(extents(cuts)),
            false => Payload::Data(chunks(cuts)),
        };
        (self.token, Ok(payload))
    }
}

/// The content of one block, as a merge needs it.
pub(super) fn block(slots: &[Slot]) -> Bytes {
    match slots.first().map(|s| &s.content) {
        Some(Content::Data { data, .. }) => data.clone(),
        _ => Bytes::from_static(&ZEROES[..BLOCK_SIZE]),
    }
}

/// Part of a slot within a request: `skip` bytes into the slot, `length` bytes long.
struct Cut {
    content: Content,
    skip: usize,
    length: u64,
}

/// Cuts the slots to the bytes `[offset, offset + length)`.
fn cut(slots: impl Iterator<Item = Slot>, offset: u64, length: u64) -> impl Iterator<Item = Cut> {
    slots.filter_map(move |slot| {
        let start = slot.lba * BLOCK;
        let stop = start + u64::from(slot.blocks) * BLOCK;
        let (from, to) = (start.max(offset), stop.min(offset + length));
        let skip = (from - start) as usize;
        (from < to).then(|| Cut { content: slot.content, skip, length: to - from })
    })
}

fn chunks(cuts: impl Iterator<Item = Cut>) -> Vec<Bytes> {
    let mut out: Vec<Bytes> = Vec::new();
    for Cut { content, skip, length } in cuts {
        let mut left = length as usize;
        match content {
            Content::Data { data, .. } if data.len() == left => out.push(data),
            Content::Data { data, .. } => out.push(data.slice(skip..skip + left)),
            _ => {
                while left > 0 {
                    let n = left.min(ZEROES.len());
                    out.push(Bytes::from_static(&ZEROES[..n]));
                    left -= n;
                }
            }
        }
    }
    join_small(out)
}

/// Joins small neighbouring chunks. Many single blocks in one reply cost a vector element each; a
/// join is cheap only for fragments below a block.
fn join_small(chunks: Vec<Bytes>) -> Vec<Bytes> {
    if chunks.len() < 2 || chunks.iter().all(|c| c.len() >= BLOCK_SIZE) {
        return chunks;
    }
    let mut whole = BytesMut::with_capacity(chunks.iter().map(Bytes::len).sum());
    for chunk in chunks {
        whole.extend_from_slice(&chunk);
    }
    vec![whole.freeze()]
}

fn extents(cuts: impl Iterator<Item = Cut>) -> Vec<StatusExtent> {
    let mut out: Vec<StatusExtent> = Vec::new();
    for cut in cuts {
        let hole = matches!(cut.content, Content::Hole);
        match out.last_mut() {
            Some(last) if last.hole == hole => last.length += cut.length,
            _ => out.push(StatusExtent { length: cut.length, hole }),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::crc32c;
    use quoin_types::ids::Lsn;

    fn slot(lba: u64, fill: Option<u8>) -> Slot {
        let content = match fill {
            None => Content::Hole,
            Some(fill) => {
                let data = Bytes::from(vec![fill; BLOCK_SIZE]);
                Content::Data { crc: crc32c(&data), data }
            }
        };
        Slot { lba, blocks: 1, version: Lsn(1), content }
    }

    fn answer(
        offset: u64,
        length: u64,
        status: bool,
        slots: Vec<Slot>,
    ) -> Result<Payload, BlockError> {
        let mut group = Group::new(Time::ZERO, 7, offset, length, status);
        let part = group.expect_part();
        assert!(group.take_part(part, Ok(slots)));
        group.answer().1
    }

    #[test]
    fn a_request_gets_its_own_bytes_of_the_blocks_that_were_read() {
        let slots = vec![slot(1, Some(b'a')), slot(2, None), slot(3, Some(b'c'))];
        let start = 2 * BLOCK - 3;
        let Ok(Payload::Data(chunks)) = answer(start, BLOCK + 5, false, slots.clone()) else {
            panic!("a read is answered with data");
        };
        let got: Vec<u8> = chunks.iter().flatten().copied().collect();
        let wanted = [&b"aaa"[..], &[0; BLOCK_SIZE], b"cc"].concat();
        assert!(got == wanted);

        let Ok(Payload::Status(extents)) = answer(start, BLOCK + 5, true, slots) else {
            panic!("a status request is answered with extents");
        };
        let extents: Vec<_> = extents.iter().map(|e| (e.length, e.hole)).collect();
        assert_eq!(extents, [(3, false), (BLOCK, true), (2, false)]);
    }

    #[test]
    fn an_answer_waits_for_all_parts_and_fails_if_one_of_them_failed() {
        let mut group = Group::new(Time::ZERO, 7, 0, 2 * BLOCK, false);
        let parts = [group.expect_part(), group.expect_part()];
        assert!(!group.take_part(parts[1], Err(BlockError::Damaged)));
        assert!(group.take_part(parts[0], Ok(vec![slot(0, Some(1))])));
        assert_eq!(group.answer().1.err(), Some(BlockError::Damaged));
    }

    #[test]
    fn extents_outside_a_request_are_left_out_and_equal_neighbours_are_merged() {
        let slots = vec![slot(0, None), slot(1, Some(1)), slot(2, Some(2)), slot(3, None)];
        let Ok(Payload::Status(extents)) = answer(BLOCK, 2 * BLOCK, true, slots.clone()) else {
            panic!("a status request is answered with extents");
        };
        let extents: Vec<_> = extents.iter().map(|e| (e.length, e.hole)).collect();
        assert_eq!(extents, [(2 * BLOCK, false)]);
        let Ok(Payload::Data(chunks)) = answer(BLOCK, 2 * BLOCK, false, slots) else {
            panic!("a read is answered with data");
        };
        assert_eq!(chunks.iter().map(Bytes::len).collect::<Vec<_>>(), [BLOCK_SIZE; 2]);
    }

    #[test]
    fn fragments_below_a_block_go_out_as_one_piece() {
        let slots = vec![slot(0, Some(1)), slot(1, Some(2))];
        let Ok(Payload::Data(chunks)) = answer(BLOCK - 3, 7, false, slots) else {
            panic!("a read is answered with data");
        };
        assert_eq!(chunks, [Bytes::from_static(&[1, 1, 1, 2, 2, 2, 2])]);
        assert_eq!(Group::new(Time::ZERO, 7, BLOCK - 3, 7, false).length(), 7);
    }
}
