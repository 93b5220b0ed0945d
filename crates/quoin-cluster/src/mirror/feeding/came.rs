//! Slots as they came, made ready to be written.

use std::collections::VecDeque;

use bytes::{BufMut, BytesMut};
use quoin_types::history::{Block, Slots};
use quoin_types::{BLOCK_SIZE, WRITE_BLOCKS_MAX};

/// Most bytes of one write.
const WRITE_BYTES_MAX: usize = WRITE_BLOCKS_MAX as usize * BLOCK_SIZE;

/// Step that makes the content of slots that of the volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    Data { lba: u64, data: BytesMut },
    Hole { lba: u64, blocks: u64 },
}

/// Slots as they came, ready to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Came {
    pub place: u64,
    /// Block at which the next slots begin; `None`: these are the last ones.
    pub next: Option<u64>,
    pub end: Option<u64>,
    /// Sum that came with the bytes, and sum of the bytes that came.
    pub sums: [u32; 2],
    pub steps: VecDeque<Step>,
    /// The steps cover the blocks before it.
    pub covered_to: u64,
}

impl Came {
    /// Makes steps of slots. Where everything is sent, blocks that no range names are holes.
    pub fn of(slots: &Slots, is_everything: bool) -> Self {
        let sum = slots.sum();
        let steps = Steps::of(slots, is_everything).filter(|_| slots.part.check().is_ok());
        let sums = [sum, if steps.is_some() { sum } else { !sum }];
        let Steps { steps, covered_to } = steps.unwrap_or_default();
        Self { place: slots.place, next: slots.part.next, end: slots.end, sums, steps, covered_to }
    }
}

#[derive(Default)]
struct Steps {
    steps: VecDeque<Step>,
    covered_to: u64,
}

impl Steps {
    /// `None`: the blocks are not those of the ranges.
    fn of(slots: &Slots, is_everything: bool) -> Option<Self> {
        let mut made = Self { steps: VecDeque::new(), covered_to: slots.place };
        let mut blocks = slots.part.blocks.iter();
        for range in &slots.part.ranges {
            let end = range.lba.checked_add(range.blocks)?;
            let gap = range.lba.checked_sub(made.covered_to)?;
            if is_everything {
                push_hole(&mut made.steps, made.covered_to, gap);
            }
            match range.hole {
                true => push_hole(&mut made.steps, range.lba, range.blocks),
                false => {
                    for lba in range.lba..end {
                        let left = blocks.len();
                        push_block(&mut made.steps, lba, blocks.next()?, left);
                    }
                }
            }
            made.covered_to = end;
        }
        blocks.next().is_none().then_some(made)
    }
}

/// Adds a hole, to the one before where it follows that.
pub fn push_hole(steps: &mut VecDeque<Step>, lba: u64, blocks: u64) {
    match steps.back_mut() {
        _ if blocks == 0 => {}
        Some(Step::Hole { lba: first, blocks: has }) if *first + *has == lba => *has += blocks,
        _ => steps.push_back(Step::Hole { lba, blocks }),
    }
}

/// Adds a block, to the write before where it follows that and fits.
fn push_block(steps: &mut VecDeque<Step>, lba: u64, block: &Block, blocks_left: usize) {
    if let Some(Step::Data { lba: first, data }) = steps.back_mut()
        && *first + (data.len() / BLOCK_SIZE) as u64 == lba
        && data.len() + block.data.len() <= WRITE_BYTES_MAX
    {
        return data.put_slice(&block.data);
    }
    let bytes = blocks_left.saturating_mul(BLOCK_SIZE).clamp(BLOCK_SIZE, WRITE_BYTES_MAX);
    let mut data = BytesMut::with_capacity(bytes);
    data.put_slice(&block.data);
    steps.push_back(Step::Data { lba, data });
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use quoin_types::crc32c;
    use quoin_types::history::Part;
    use quoin_types::message::ChangedRange;

    use super::*;

    fn block(fill: u8) -> Block {
        let data = Bytes::from(vec![fill; BLOCK_SIZE]);
        Block { crc: crc32c(&data), data }
    }

    fn range(lba: u64, blocks: u64, hole: bool) -> ChangedRange {
        ChangedRange { lba, blocks, hole }
    }

    fn slots(ranges: &[ChangedRange], blocks: usize) -> Slots {
        let blocks = (0..blocks).map(|fill| block(fill as u8)).collect();
        Slots { place: 2, part: Part { ranges: ranges.to_vec(), blocks, next: None }, end: Some(0) }
    }

    /// Kind, first block and number of blocks of each step.
    fn shape(came: &Came) -> Vec<(char, u64, u64)> {
        let shape = |step: &Step| match step {
            Step::Data { lba, data } => ('d', *lba, (data.len() / BLOCK_SIZE) as u64),
            Step::Hole { lba, blocks } => ('h', *lba, *blocks),
        };
        came.steps.iter().map(shape).collect()
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_write_within_its_limit_and_so_are_holes_one_trim() {
        let ranges =
            [range(4, 2, false), range(6, 298, false), range(310, 5, true), range(315, 9, true)];
        let slots = slots(&ranges, 300);
        let changed = Came::of(&slots, false);
        assert_eq!(shape(&changed), [('d', 4, 256), ('d', 260, 44), ('h', 310, 14)]);
        assert_eq!((changed.covered_to, changed.sums), (324, [slots.sum(); 2]));
        let Some(Step::Data { data, .. }) = changed.steps.get(1) else { panic!() };
        assert!(data.chunks(BLOCK_SIZE).zip(0u8..).all(|(block, fill)| block[0] == fill));
        let everything = Came::of(&slots, true);
        let holes = [('h', 2, 2), ('d', 4, 256), ('d', 260, 44), ('h', 304, 20)];
        assert_eq!(shape(&everything), holes);
    }

    #[test]
    fn blocks_that_are_not_those_of_their_ranges_or_checksums_have_no_steps_and_another_sum() {
        let of = |ranges: &[ChangedRange], blocks| slots(ranges, blocks);
        let mut changed = of(&[range(4, 2, false)], 2);
        changed.part.blocks[1].crc ^= 1;
        for slots in [
            changed,
            of(&[range(4, 2, false)], 0),
            of(&[range(4, 2, false)], 1),
            of(&[range(4, 2, false)], 3),
            of(&[range(1, 2, false)], 2),
            of(&[range(4, 2, true), range(5, 1, true)], 0),
            of(&[range(u64::MAX, 2, true)], 0),
            of(&[range(4, u64::MAX / 2, false)], 2),
        ] {
            let came = Came::of(&slots, true);
            assert!(came.steps.is_empty() && came.sums[0] != came.sums[1], "{slots:?}");
        }
    }
}
