//! Slots of a transfer that are being written, and how far what was written, and what is on stable media,
//! reaches.

use std::collections::{BTreeMap, VecDeque};

use quoin_types::block::Operation;
use quoin_types::mutant;
use quoin_types::{BLOCK_SHIFT, HOLE_BLOCKS_MAX};

use super::SLOTS_MAX;
use super::came::Step;

/// Most requests of a volume that are under way.
pub const REQUESTS_MAX: usize = 32;
/// Weight in bytes of what may be written before it is flushed, and of slots beside their data.
const UNFLUSHED_MAX: usize = 16 << 20;
const SLOTS_WEIGHT: usize = 64 << 10;

/// Blocks before which a transfer is written, and on stable media.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Places {
    pub written_to: u64,
    pub stable_to: u64,
}

/// Slots that count from here on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted<T> {
    pub ticket: T,
    /// Places by then.
    pub places: Places,
    /// They were the last ones, and all is on stable media.
    pub is_end: bool,
}

/// Slots that are being written.
#[derive(Debug)]
struct Writing<T> {
    steps: VecDeque<Step>,
    /// Requests without a reply.
    open: usize,
    /// Block up to which they reach.
    to: u64,
    /// They are the last ones, and written once they are on stable media.
    is_end: bool,
    bytes: usize,
    ticket: T,
}

impl<T> Writing<T> {
    fn is_done(&self) -> bool {
        self.steps.is_empty() && self.open == 0
    }

    /// Takes the next request out.
    fn next(&mut self) -> Option<Operation> {
        let (fua, step) = (false, self.steps.pop_front()?);
        Some(match step {
            Step::Data { lba, data } => {
                Operation::Write { offset: lba << BLOCK_SHIFT, data: data.freeze(), fua }
            }
            Step::Hole { lba, blocks } => {
                let now = blocks.min(HOLE_BLOCKS_MAX.into());
                if now < blocks {
                    self.steps.push_front(Step::Hole { lba: lba + now, blocks: blocks - now });
                }
                Operation::Trim { offset: lba << BLOCK_SHIFT, length: now << BLOCK_SHIFT, fua }
            }
        })
    }
}

/// Flush under way.
#[derive(Clone, Copy, Debug)]
struct Flushing {
    request: u64,
    /// Block up to which everything was written before.
    to: u64,
    is_end: bool,
}

/// A request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failed;

/// Slots in the order in which they came. `T` names slots to the one that they came from.
#[derive(Debug)]
pub struct Window<T> {
    slots: VecDeque<Writing<T>>,
    /// Number of the first of them.
    first: u64,
    /// Number of the slots of each request under way.
    requests: BTreeMap<u64, u64>,
    last_request: u64,
    flush: Option<Flushing>,
    unflushed_bytes: usize,
    places: Places,
}

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self {
            slots: VecDeque::new(),
            first: 0,
            requests: BTreeMap::new(),
            last_request: 0,
            flush: None,
            unflushed_bytes: 0,
            places: Places::default(),
        }
    }
}

impl<T> Window<T> {
    pub fn places(&self) -> Places {
        self.places
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.slots.len() >= SLOTS_MAX
    }

    /// The transfer begins at this block: slots that were written count no more.
    pub fn begin_at(&mut self, from: u64) {
        self.places = Places { written_to: from, stable_to: from };
        self.unflushed_bytes = 0;
    }

    /// Drops what is not written yet. Requests under way count nowhere from here on.
    pub fn drop_slots(&mut self) -> impl Iterator<Item = T> {
        self.first += self.slots.len() as u64;
        self.requests.clear();
        self.flush = None;
        self.slots.drain(..).map(|writing| writing.ticket)
    }

    /// Adds slots that reach up to a block.
    pub fn push(&mut self, steps: VecDeque<Step>, to: u64, is_end: bool, ticket: T) {
        let data = steps.iter().map(|step| match step {
            Step::Data { data, .. } => data.len(),
            Step::Hole { .. } => 0,
        });
        let bytes = SLOTS_WEIGHT + data.sum::<usize>();
        self.slots.push_back(Writing { steps, open: 0, to, is_end, bytes, ticket });
    }

    /// Takes out the first slots if they are written, in their order; the last ones wait for their flush.
    pub fn settle(&mut self) -> Option<Counted<T>> {
        let first = self.slots.front()?;
        if first.is_end && first.is_done() && mutant::is("flush-of-a-transfer-not-waited-for") {
            return self.end(first.to);
        }
        if !first.is_done() || first.is_end {
            return None;
        }
        let done = self.slots.pop_front()?;
        self.first += 1;
        self.unflushed_bytes += done.bytes;
        self.places.written_to = self.places.written_to.max(done.to);
        Some(Counted { ticket: done.ticket, places: self.places, is_end: false })
    }

    /// All up to this block is on stable media, and with it the last slots.
    fn end(&mut self, to: u64) -> Option<Counted<T>> {
        self.places.stable_to = self.places.stable_to.max(to);
        let end = self.slots.pop_front()?;
        self.first += 1;
        self.places.written_to = self.places.written_to.max(end.to);
        Some(Counted { ticket: end.ticket, places: self.places, is_end: true })
    }

    /// Returns the next request, with its number.
    pub fn next_request(&mut self) -> Option<(u64, Operation)> {
        let number = self.last_request + 1;
        if self.flush.is_none() {
            let end = self.slots.front().filter(|first| first.is_done() && first.is_end);
            let end = end.map(|end| end.to);
            if end.is_some() || self.unflushed_bytes >= UNFLUSHED_MAX {
                self.last_request = number;
                self.unflushed_bytes = 0;
                let written_to = self.places.written_to;
                let to = end.unwrap_or(written_to).max(written_to);
                self.flush = Some(Flushing { request: number, to, is_end: end.is_some() });
                return Some((number, Operation::Flush));
            }
        }
        if self.requests.len() >= REQUESTS_MAX {
            return None;
        }
        let (of, writing) =
            (self.first..).zip(&mut self.slots).find(|(_, writing)| !writing.steps.is_empty())?;
        let operation = writing.next()?;
        writing.open += 1;
        self.last_request = number;
        self.requests.insert(number, of);
        Some((number, operation))
    }

    /// Takes the reply to a request; one of before slots were dropped counts nowhere. Returns the last slots once
    /// they count.
    ///
    /// # Errors
    /// A request that counts has failed.
    pub fn replied(&mut self, request: u64, is_ok: bool) -> Result<Option<Counted<T>>, Failed> {
        if let Some(flush) = self.flush.take_if(|flush| flush.request == request) {
            return match (is_ok, flush.is_end) {
                (false, _) => Err(Failed),
                (true, true) => Ok(self.end(flush.to)),
                (true, false) => {
                    self.places.stable_to = self.places.stable_to.max(flush.to);
                    Ok(None)
                }
            };
        }
        let Some(of) = self.requests.remove(&request) else { return Ok(None) };
        if !is_ok {
            return Err(Failed);
        }
        let index = of.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(writing) = index.and_then(|index| self.slots.get_mut(index)) {
            writing.open = writing.open.saturating_sub(1);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A volume that knows of each block whether it was written, and whether a flush came after that.
    #[derive(Default)]
    struct Model {
        under_way: Vec<(u64, Operation)>,
        written: BTreeSet<u64>,
        stable: BTreeSet<u64>,
        /// Blocks that were written as a flush began.
        flushing: BTreeSet<u64>,
    }

    impl Model {
        fn submit(&mut self, window: &mut Window<u64>) {
            while let Some((number, operation)) = window.next_request() {
                if operation == Operation::Flush {
                    self.flushing.clone_from(&self.written);
                }
                self.under_way.push((number, operation));
            }
        }

        /// Replies to one request. Returns the last slots once they count.
        fn reply(&mut self, window: &mut Window<u64>, index: usize) -> Option<Counted<u64>> {
            let (number, operation) = self.under_way.remove(index);
            match operation {
                Operation::Flush => self.stable.extend(&self.flushing),
                Operation::Trim { offset, .. } => {
                    self.written.insert(offset >> BLOCK_SHIFT);
                }
                _ => {}
            }
            window.replied(number, true).unwrap()
        }
    }

    fn one(lba: u64) -> VecDeque<Step> {
        [Step::Hole { lba, blocks: 1 }].into()
    }

    proptest! {
        /// Slots have a block each; some end the transfer there, some are dropped and come again.
        #[test]
        fn places_are_those_of_a_volume_that_counts_each_block(
            steps in prop::collection::vec((0u8..12, any::<usize>()), 1..200), begins in 0u64..9,
        ) {
            let (mut window, mut model) = (Window::default(), Model::default());
            window.begin_at(begins);
            // Blocks before it were on stable media before.
            let all = |blocks: &BTreeSet<u64>, to: u64| (begins..to).all(|lba| blocks.contains(&lba));
            let (mut next, mut has_end) = (begins, false);
            for (step, which) in steps {
                let mut counted = Vec::new();
                match step {
                    0..3 if !window.is_full() && !has_end => {
                        has_end = step == 0 && which.is_multiple_of(4);
                        window.push(one(next), next + 1, has_end, next);
                        next += 1;
                    }
                    3..5 => model.submit(&mut window),
                    5..11 => {
                        if let Some(index) = which.checked_rem(model.under_way.len()) {
                            counted.extend(model.reply(&mut window, index));
                        }
                    }
                    11 => {
                        let dropped: Vec<u64> = window.drop_slots().collect();
                        prop_assert_eq!(dropped.len() as u64, next - window.places().written_to);
                        model.under_way.clear();
                        (next, has_end) = (window.places().written_to, false);
                    }
                    _ => {}
                }
                counted.extend(std::iter::from_fn(|| window.settle()));
                for counted in counted {
                    prop_assert_eq!(counted.places.written_to, counted.ticket + 1);
                    prop_assert_eq!(counted.is_end, has_end && counted.ticket + 1 == next);
                    prop_assert!(!counted.is_end || all(&model.stable, next));
                    has_end &= !counted.is_end;
                }
                let Places { written_to, stable_to } = window.places();
                prop_assert!(stable_to <= written_to && window.len() <= SLOTS_MAX);
                prop_assert!(all(&model.written, written_to) && all(&model.stable, stable_to));
            }
        }
    }
}
