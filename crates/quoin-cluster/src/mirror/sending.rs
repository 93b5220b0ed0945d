//! The sending end of a transfer: which slots are on their way, and when the next stream begins.

use std::collections::VecDeque;
use std::time::Duration;

use quoin_types::history::{Part, Slots, Taken};
use quoin_types::message::ChangedRange;
use quoin_types::mutant;

use super::feed::Feed;

/// Slots that were sent and are not taken yet, at most.
pub const IN_FLIGHT_MAX: usize = 4;
/// Blocks with data of one frame, at most.
pub const BLOCKS_MAX: usize = 256;
/// Ranges of one frame, at most: the frame stays within its limit.
pub const RANGES_MAX: usize = 8192;
/// Pauses between streams, the first and the longest.
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Interval of the question whether a copy still has what it took. Its target may end before the point is cut, and the
/// next one has what was recorded alone.
pub const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Cuts a part that begins at `place` into slots of `blocks_max` blocks with data at most. The last ones have no
/// digest yet.
pub fn cut(part: Part, mut place: u64, blocks_max: usize) -> Vec<Slots> {
    let blocks_max = blocks_max.clamp(1, BLOCKS_MAX) as u64;
    let mut blocks = part.blocks.into_iter();
    let (mut slots, mut now, mut data) = (Vec::new(), Part::default(), 0);
    let mut left: Vec<ChangedRange> = part.ranges.into_iter().rev().collect();
    while let Some(range) = left.pop() {
        if data == blocks_max || now.ranges.len() == RANGES_MAX {
            now.next = now.ranges.last().map(|range| range.lba + range.blocks);
            let next = now.next.unwrap_or(place);
            slots.push(Slots { place, part: std::mem::take(&mut now), end: None });
            (place, data) = (next, 0);
        }
        let fits = if range.hole { range.blocks } else { range.blocks.min(blocks_max - data) };
        now.ranges.push(ChangedRange { blocks: fits, ..range });
        if !range.hole {
            now.blocks.extend(blocks.by_ref().take(fits as usize));
            data += fits;
        }
        if fits < range.blocks {
            left.push(ChangedRange { lba: range.lba + fits, blocks: range.blocks - fits, ..range });
        }
    }
    now.next = part.next;
    slots.push(Slots { place, part: now, end: None });
    slots
}

/// Returns true if a part goes on where the stream is: behind the cursor, with a block for each that is no hole.
pub fn goes_on(part: &Part, cursor: u64) -> bool {
    let begins_behind = part.ranges.first().is_some_and(|range| range.lba < cursor);
    let goes_back = part.next.is_some_and(|next| next <= cursor);
    !begins_behind && !goes_back && part.has_its_blocks()
}

/// Answer of the other side, as it counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// Blocks before this one were taken.
    To(u64),
    /// Everything is on stable media.
    All,
}

/// Answer that ends a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Wrong {
    #[error("the peer took what was not sent")]
    NotSent,
    #[error("the peer took another end")]
    OtherEnd,
}

/// Slots of one stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Flight {
    digest: u64,
    /// Next blocks of those that are on their way; `None`: they are the last ones.
    nexts: VecDeque<Option<u64>>,
}

impl Flight {
    /// Counts the next slots of the stream, and ends them if they are the last ones.
    pub fn close(&mut self, slots: &mut Slots) {
        self.digest = Feed::digest(self.digest, slots.sum());
        slots.end = slots.part.next.is_none().then_some(self.digest);
    }

    /// Slots whose next ones begin at a block are on their way.
    pub fn sent(&mut self, next: Option<u64>) {
        self.nexts.push_back(next);
    }

    pub fn has_room(&self) -> bool {
        self.nexts.len() < IN_FLIGHT_MAX
    }

    /// Takes an answer.
    ///
    /// # Errors
    /// The answer is to nothing that was sent.
    pub fn taken(&mut self, taken: Taken) -> Result<Heard, Wrong> {
        match (self.nexts.pop_front().ok_or(Wrong::NotSent)?, taken.is_fed) {
            (None, true) => Ok(Heard::All),
            (Some(next), false) => Ok(Heard::To(taken.to.min(next))),
            (None, false) | (Some(_), true) => Err(Wrong::OtherEnd),
        }
    }
}

/// End of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Everything is on stable media on the other side.
    All,
    /// The stream made room for another one, and nothing of it is on its way.
    Paused,
    Failed,
}

/// Time of the next stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Again {
    pub after: Duration,
    /// The reason why the stream ended is worth telling.
    pub is_told: bool,
}

/// Streams of one transfer, one after the other, for as long as it is ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keeping {
    pause: Duration,
    is_done: bool,
}

impl Default for Keeping {
    fn default() -> Self {
        Self { pause: PAUSE, is_done: false }
    }
}

impl Keeping {
    /// The copy had everything when it was asked last.
    pub fn is_done(&self) -> bool {
        self.is_done
    }

    /// A stream ended. `moved`: the copy took something; `has_all`: everything was taken at some time.
    pub fn ended(&mut self, how: Ended, moved: bool, has_all: bool) -> Again {
        match how {
            Ended::All => {
                *self = Self { is_done: true, ..Self::default() };
                let after =
                    if mutant::is("copy-not-asked-again") { Duration::MAX } else { ASK_AGAIN };
                return Again { after, is_told: false };
            }
            Ended::Paused => {
                *self = Self::default();
                return Again { after: Duration::ZERO, is_told: false };
            }
            Ended::Failed => {}
        }
        // The peer may have cut the point, and takes nothing more.
        let is_told = !(self.is_done && has_all);
        self.is_done &= !is_told;
        let after = if moved { PAUSE } else { self.pause };
        self.pause = (after * 2).min(PAUSE_MAX);
        Again { after, is_told }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(to: u64, is_fed: bool) -> Taken {
        Taken { to, stable_to: 0, is_fed }
    }

    #[test]
    fn answers_count_for_what_was_sent_in_its_order_and_the_end_for_the_last_slots_alone() {
        let mut flight = Flight::default();
        assert_eq!(flight.taken(taken(1, false)), Err(Wrong::NotSent));
        [Some(4), Some(6), None].into_iter().for_each(|next| flight.sent(next));
        assert_eq!(flight.taken(taken(9, false)), Ok(Heard::To(4)), "no more than was sent");
        assert_eq!(flight.clone().taken(taken(6, true)), Err(Wrong::OtherEnd));
        assert_eq!(flight.taken(taken(6, false)), Ok(Heard::To(6)));
        assert_eq!(flight.clone().taken(taken(8, false)), Err(Wrong::OtherEnd));
        assert_eq!(flight.taken(taken(8, true)), Ok(Heard::All));
        assert_eq!(flight.taken(taken(8, true)), Err(Wrong::NotSent));
        (0..IN_FLIGHT_MAX as u64).for_each(|next| {
            assert!(flight.has_room());
            flight.sent(Some(next));
        });
        assert!(!flight.has_room());
    }

    #[test]
    fn the_last_slots_have_the_digest_over_all_sums_of_the_stream() {
        let part = |next| Part { next, ..Part::default() };
        let mut slots = [(0, Some(3)), (3, Some(5)), (5, None)].map(|(place, next)| Slots {
            place,
            part: part(next),
            end: None,
        });
        let mut flight = Flight::default();
        slots.iter_mut().for_each(|slots| flight.close(slots));
        let digest = slots.iter().fold(0, |digest, slots| Feed::digest(digest, slots.sum()));
        assert_eq!(slots.map(|slots| slots.end), [None, None, Some(digest)]);
    }

    #[test]
    fn a_part_goes_on_behind_the_cursor_with_the_blocks_of_its_ranges() {
        let range = |lba, hole| ChangedRange { lba, blocks: 1, hole };
        let part = |range, next| Part { ranges: vec![range], blocks: Vec::new(), next };
        assert!(goes_on(&part(range(5, true), Some(6)), 5));
        assert!(goes_on(&part(range(5, true), None), 5));
        assert!(!goes_on(&part(range(4, true), None), 5));
        assert!(!goes_on(&part(range(5, true), Some(5)), 5));
        assert!(!goes_on(&part(range(5, false), None), 5), "a block is missing");
    }

    #[test]
    fn a_copy_that_has_all_is_asked_again_and_pauses_grow_while_nothing_is_taken() {
        let again = |millis, is_told| Again { after: Duration::from_millis(millis), is_told };
        let mut keeping = Keeping::default();
        for millis in [500, 1000, 2000, 4000, 5000, 5000] {
            assert_eq!(keeping.ended(Ended::Failed, false, false), again(millis, true));
        }
        assert_eq!(keeping.ended(Ended::Failed, true, false), again(500, true));
        assert_eq!(keeping.ended(Ended::Failed, false, false), again(1000, true));
        assert_eq!(keeping.ended(Ended::Paused, false, false), again(0, false));
        assert_eq!(keeping.ended(Ended::All, true, true), again(2000, false));
        assert!(keeping.is_done());
        // The point may be cut: nothing of that is told.
        assert_eq!(keeping.ended(Ended::Failed, false, true), again(500, false));
        assert!(keeping.is_done());
        // A stream began before the end again.
        assert_eq!(keeping.ended(Ended::Failed, true, false), again(500, true));
        assert!(!keeping.is_done());
    }
}
