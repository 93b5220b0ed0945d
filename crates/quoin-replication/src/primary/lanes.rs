//! One view of an increment, copied from several sources at once.
//!
//! The view is divided into stretches. Each stretch (a *lane*) requests its chunks from one source
//! after the other, so that no two lanes wait for the same source. The receiver is fed in order,
//! since its shadow is complete up to one cursor: chunks of the first lane are forwarded as they
//! arrive; those of the others wait for their turn, a chunk beyond [`WAITING_BYTES_MAX`] for each
//! lane at most. So a slow source delays its own stretch and, when their room is used up, the
//! others. A source that is gone or bad is replaced at the point it had reached.

use std::collections::VecDeque;

use quoin_types::BLOCK_SIZE;
use quoin_types::membership::Member;
use quoin_types::message::{Content, RequestId, Slot};

/// Limit of data of one lane that waits for the lanes before it.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Size of a stretch: about four chunks, estimated from the density of the last one.
const STRETCH_BLOCKS_MIN: u64 = 128;
const STRETCH_BLOCKS_MAX: u64 = 1 << 16;
const CHUNKS_A_STRETCH: u64 = 4;
/// More lanes have no benefit: the receiver is fed by one connection.
const LANES_MAX: usize = 4;

/// Answer of a source.
pub(super) struct Chunk {
    pub slots: Vec<Slot>,
    /// The next LBA; `None`: the view ends here.
    pub cursor: Option<u64>,
}

impl Chunk {
    pub fn bytes(&self) -> usize {
        self.slots.iter().filter(|s| matches!(s.content, Content::Data { .. })).count() * BLOCK_SIZE
    }

    /// Memory of a waiting chunk, including the slots of holes.
    fn weight(&self) -> usize {
        self.bytes() + self.slots.len() * size_of::<Slot>()
    }

    /// Returns true if the chunk matches its request: slots in order, at or after `from` and before
    /// its cursor.
    fn fits(&self, from: u64) -> bool {
        let mut at = from;
        let ascending = self.slots.iter().all(|slot| {
            let follows = slot.lba >= at;
            at = slot.lba + u64::from(slot.blocks);
            follows
        });
        ascending && self.cursor.is_none_or(|cursor| cursor > from && cursor >= at)
    }
}

/// A stretch of the view: requested up to `cursor`, complete at `end`.
struct Lane {
    cursor: u64,
    end: u64,
    asked: Option<(RequestId, Member)>,
    /// Sources whose copy of the next part is unusable.
    bad: Vec<Member>,
    waiting: VecDeque<Chunk>,
    waiting_bytes: usize,
}

impl Lane {
    fn is_complete(&self) -> bool {
        self.cursor >= self.end
    }
}

pub(super) struct Lanes {
    /// Size of the volume: nothing lies beyond.
    blocks: u64,
    /// Lanes in the order of their stretches, which are contiguous.
    lanes: VecDeque<Lane>,
    /// Start of the unassigned stretches; `None`: there are none.
    rest: Option<u64>,
    stretch_blocks: u64,
    fed: u64,
}

impl Lanes {
    /// Lanes for a view of a volume of `blocks` that is complete up to `cursor`.
    pub fn from(cursor: u64, blocks: u64) -> Self {
        let (rest, stretch_blocks) = (Some(cursor), STRETCH_BLOCKS_MIN);
        Self { blocks, lanes: VecDeque::new(), rest, stretch_blocks, fed: cursor }
    }

    /// LBA up to which everything was taken.
    pub fn cursor(&self) -> u64 {
        self.fed
    }

    pub fn has_asked(&self, id: RequestId) -> bool {
        self.lane_that_asked(id).is_some()
    }

    fn lane_that_asked(&self, id: RequestId) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.asked.is_some_and(|(asked, _)| asked == id))
    }

    /// Chooses which of `sources` (the preferred ones first) is asked next, and from which LBA.
    pub fn ask(&mut self, id: RequestId, sources: &[Member]) -> Option<(Member, u64)> {
        let free: Vec<Member> = sources.iter().copied().filter(|s| !self.is_busy(*s)).collect();
        for (at, lane) in self.lanes.iter_mut().enumerate() {
            let has_room = at == 0 || lane.waiting_bytes < WAITING_BYTES_MAX;
            if lane.asked.is_none() && !lane.is_complete() && has_room {
                // The first lane may be the last one to be waited for: it uses any source that is
                // free.
                let Some(source) = free.iter().find(|s| !lane.bad.contains(s)) else { continue };
                lane.asked = Some((id, *source));
                return Some((*source, lane.cursor));
            }
        }
        let (rest, source) = (self.rest?, *free.first()?);
        // The first lane may have to ask a source beyond all blocks whether the view ends there.
        if self.lanes.len() >= LANES_MAX || (!self.lanes.is_empty() && rest >= self.blocks) {
            return None;
        }
        let end = rest.saturating_add(self.stretch_blocks);
        self.rest = Some(end);
        self.lanes.push_back(Lane {
            cursor: rest,
            end,
            asked: Some((id, source)),
            bad: Vec::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
        });
        Some((source, rest))
    }

    fn is_busy(&self, source: Member) -> bool {
        self.lanes.iter().any(|lane| lane.asked.is_some_and(|(_, asked)| asked == source))
    }

    /// Accepts an answer. False: it makes no progress, and another source is to be asked.
    pub fn answered(&mut self, id: RequestId, mut chunk: Chunk) -> bool {
        let Some(at) = self.lane_that_asked(id) else { return false };
        let lane = &mut self.lanes[at];
        if !chunk.fits(lane.cursor) {
            self.refused(id);
            return false;
        }
        lane.asked = None;
        lane.bad.clear();
        if let Some(cursor) = chunk.cursor {
            let dense = (cursor - lane.cursor).saturating_mul(CHUNKS_A_STRETCH);
            let (half, twice) = (self.stretch_blocks / 2, self.stretch_blocks * 2);
            let next = dense.clamp(half, twice);
            self.stretch_blocks = next.clamp(STRETCH_BLOCKS_MIN, STRETCH_BLOCKS_MAX);
        }
        lane.cursor = chunk.cursor.unwrap_or(u64::MAX);
        if at + 1 < self.lanes.len() && chunk.cursor.is_some() {
            // Slots beyond the end belong to another lane.
            let lane = &mut self.lanes[at];
            cut(&mut chunk.slots, lane.end);
            lane.cursor = lane.cursor.min(lane.end);
            chunk.cursor = Some(lane.cursor);
        } else if let Some(cursor) = chunk.cursor {
            let lane = &mut self.lanes[at];
            lane.end = lane.end.max(cursor);
            self.rest = self.rest.map(|rest| rest.max(lane.end));
        } else {
            // The view ends here for every source.
            self.lanes.truncate(at + 1);
            self.lanes[at].end = u64::MAX;
            self.rest = None;
        }
        let lane = &mut self.lanes[at];
        lane.waiting_bytes += chunk.weight();
        lane.waiting.push_back(chunk);
        true
    }

    /// Marks a source that cannot serve its request.
    pub fn refused(&mut self, id: RequestId) {
        if let Some(at) = self.lane_that_asked(id)
            && let Some((_, source)) = self.lanes[at].asked.take()
        {
            self.lanes[at].bad.push(source);
        }
    }

    /// Marks a source that is gone.
    pub fn lost(&mut self, source: Member) {
        for lane in &mut self.lanes {
            if lane.asked.is_some_and(|(_, asked)| asked == source) {
                lane.asked = None;
            }
        }
    }

    /// Allows every source again for all requests.
    pub fn forgive(&mut self) {
        for lane in &mut self.lanes {
            lane.bad.clear();
        }
    }

    /// The next chunk in order, once it has arrived.
    pub fn take(&mut self) -> Option<Chunk> {
        loop {
            let first = self.lanes.front_mut()?;
            if let Some(chunk) = first.waiting.pop_front() {
                first.waiting_bytes -= chunk.weight();
                self.fed = chunk.cursor.unwrap_or(u64::MAX);
                return Some(chunk);
            }
            if !first.is_complete() {
                return None;
            }
            self.lanes.pop_front();
        }
    }
}

/// Removes slots at or beyond `end`; a hole that crosses it is cut.
fn cut(slots: &mut Vec<Slot>, end: u64) {
    slots.retain(|slot| slot.lba < end);
    for slot in slots {
        if let Ok(blocks) = u32::try_from(end - slot.lba) {
            slot.blocks = slot.blocks.min(blocks);
        }
    }
}

#[cfg(test)]
mod tests;
