//! A copy of a volume that takes the slots of the one transfer that was ordered.
//!
//! Slots become requests of the state machine as they are: past the encryption, as the bytes are stored ones,
//! and past the limits of clients. [`Feed`] says which slots are taken, and this part what of them is written
//! and what is on stable media: nothing else is told.
//!
//! A new epoch, another order and a request that failed each have the transfer begin anew where its order
//! says. Requests that are under way then are dropped, or have their place in the history already, before all
//! that follow; their replies count nowhere.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use quoin_cluster::mirror::feed::{self, Feed};
use quoin_cluster::mirror::record::{Stamp, Transfer};
use quoin_replication::primary::{PrimaryAction, PrimaryEvent, PrimaryNote};
use quoin_types::block::{Operation, Request};
use quoin_types::{BLOCK_SHIFT, HOLE_BLOCKS_MAX, Time, VolumeId};
use quoin_wire::history::{self, Refused, Taken};

use super::{Shard, Volume};
use crate::assignment::FeedOrder;
use crate::feed::{Answer, Came, FeedInput, SLOTS_MAX, Step, Stream, push_hole};
use crate::tokens::Origin;

/// Key that stands for the transfer where others are those of clients; no source has it.
pub(super) const CLIENT: u64 = u64::MAX;
/// Most requests of a volume that are under way.
const REQUESTS_MAX: usize = 32;
/// Weight in bytes of what may be written before it is flushed, and of slots beside their data.
const UNFLUSHED_MAX: usize = 16 << 20;
const SLOTS_WEIGHT: usize = 64 << 10;
/// Least time between two reports of progress.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// How far a transfer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeedProgress {
    pub order: FeedOrder,
    /// Blocks before it are written.
    pub taken_to: u64,
    /// Blocks before it are on stable media.
    pub stable_to: u64,
    pub is_fed: bool,
}

/// Volume as it is while slots come.
#[derive(Clone, Copy)]
struct Here {
    is_serving: bool,
    blocks: u64,
}

/// Slots that are being written.
struct Writing {
    steps: VecDeque<Step>,
    /// Requests without a reply.
    open: usize,
    /// Block up to which they reach.
    to: u64,
    /// They are the last ones, and written once they are on stable media.
    is_end: bool,
    bytes: usize,
    answer: Answer,
}

impl Writing {
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
struct Flushing {
    request: u64,
    /// Block up to which everything was written before.
    to: u64,
    is_end: bool,
}

/// The order of a volume, and what comes for it.
#[derive(Default)]
pub(super) struct Feeding {
    feed: Feed,
    order: Option<FeedOrder>,
    /// Highest stamp of an order that came.
    seen: Stamp,
    is_read_only: bool,
    /// Number of the last stream, and whether it goes on.
    stream: u64,
    is_open: bool,
    /// Slots in the order in which they came, and the number of the first of them.
    slots: VecDeque<Writing>,
    first: u64,
    /// Number of the slots of each request under way.
    requests: BTreeMap<u64, u64>,
    last_request: u64,
    flush: Option<Flushing>,
    unflushed_bytes: usize,
    written_to: u64,
    stable_to: u64,
    /// Requests of before are to be dropped.
    abandons: bool,
    /// There is a report to make: at once, or soon.
    is_changed: bool,
    is_ahead: bool,
    told_at: Time,
}

impl Feeding {
    pub fn new(order: Option<FeedOrder>, is_read_only: bool) -> Self {
        let mut feeding = Self::default();
        feeding.order(order, is_read_only);
        feeding
    }

    /// Takes the order that holds now; one that is late changes nothing.
    pub fn order(&mut self, order: Option<FeedOrder>, is_read_only: bool) {
        self.is_read_only = is_read_only;
        if let Some(order) = &order {
            if order.stamp < self.seen {
                return;
            }
            self.seen = order.stamp;
        }
        if self.order == order {
            return;
        }
        self.is_changed = true;
        let takes = |order: FeedOrder| order.takes;
        let is_same = self.order.and_then(takes) == order.and_then(takes);
        self.order = order;
        if !is_same {
            self.begin_anew(Refused::NotOrdered);
        }
    }

    pub fn progress(&self) -> Option<FeedProgress> {
        self.order.map(|order| FeedProgress {
            order,
            taken_to: self.written_to,
            stable_to: self.stable_to,
            is_fed: self.is_fed(),
        })
    }

    /// Slots that are not on stable media may be lost with the epoch under which they were written.
    fn note(&mut self, note: &PrimaryNote) -> bool {
        let is_other_epoch = matches!(
            note,
            PrimaryNote::Opening { .. }
                | PrimaryNote::Serving { .. }
                | PrimaryNote::Fenced { .. }
                | PrimaryNote::Stopped
        );
        if is_other_epoch {
            self.not_served();
        }
        is_other_epoch
    }

    fn not_served(&mut self) {
        if self.order.is_some() {
            self.begin_anew(Refused::NotServed);
        }
    }

    fn is_fed(&self) -> bool {
        self.feed.is_fed() && self.slots.is_empty()
    }

    fn taken(&self) -> Taken {
        let (to, stable_to) = (self.written_to, self.stable_to);
        Taken { to, stable_to, is_fed: self.is_fed() }
    }

    /// Has the transfer begin where its order says, and ends the stream for this reason.
    fn begin_anew(&mut self, why: Refused) {
        self.feed.stop();
        let from = self.order.map_or(0, |order| order.from_block);
        self.is_changed |= self.written_to != from;
        (self.written_to, self.stable_to, self.unflushed_bytes) = (from, from, 0);
        self.end_stream(why);
    }

    /// Drops what is not written yet.
    fn end_stream(&mut self, why: Refused) {
        for writing in self.slots.drain(..) {
            self.first += 1;
            let _ = writing.answer.try_send(Err(why));
        }
        self.requests.clear();
        self.flush = None;
        self.abandons = true;
        self.is_open = false;
        if let Some((transfer, token)) = self.order.and_then(|order| order.takes) {
            self.feed = Feed::default();
            self.feed.order(transfer, token, self.written_to);
        }
    }

    fn fail(&mut self) {
        self.begin_anew(Refused::Failed);
    }

    /// Begins a stream; returns its number.
    fn begin(&mut self, here: Here, feed: &history::Feed) -> Result<(u64, Taken), Refused> {
        self.check(here, feed)?;
        if !self.slots.is_empty() {
            // They come again, as they count nowhere yet.
            self.end_stream(Refused::OutOfOrder);
        }
        self.stream += 1;
        self.is_open = true;
        Ok((self.stream, self.taken()))
    }

    fn check(&self, here: Here, feed: &history::Feed) -> Result<(), Refused> {
        if !here.is_serving || self.is_read_only {
            return Err(Refused::NotServed);
        }
        let transfer = Transfer { point: feed.point, base: feed.base };
        match self.feed.ordered() {
            Some(ordered) if ordered == (transfer, feed.token) => Ok(()),
            _ => Err(Refused::NotOrdered),
        }
    }

    /// Takes slots, which are answered once they are written.
    fn take(&mut self, here: Here, stream: &Stream, came: Came, answer: Answer) {
        match self.judge(here, stream, &came) {
            Ok(to) => {
                let Came { mut steps, covered_to, end, .. } = came;
                if stream.feed.base.is_none() {
                    push_hole(&mut steps, covered_to, to.saturating_sub(covered_to));
                }
                let data = steps.iter().map(|step| match step {
                    Step::Data { data, .. } => data.len(),
                    Step::Hole { .. } => 0,
                });
                let bytes = SLOTS_WEIGHT + data.sum::<usize>();
                let is_end = end.is_some();
                self.slots.push_back(Writing { steps, open: 0, to, is_end, bytes, answer });
                self.settle();
            }
            Err(refused) => {
                let _ = answer.try_send(Err(refused));
            }
        }
    }

    /// Returns the block up to which the slots reach.
    fn judge(&mut self, here: Here, stream: &Stream, came: &Came) -> Result<u64, Refused> {
        self.check(here, &stream.feed)?;
        if self.slots.len() >= SLOTS_MAX {
            return Err(Refused::Busy);
        }
        let is_beyond = came.next.unwrap_or(0).max(came.place).max(came.covered_to) > here.blocks
            || came.next.is_some_and(|next| next < came.covered_to);
        if !self.is_open || stream.number != self.stream || is_beyond {
            return Err(Refused::OutOfOrder);
        }
        // The last ones may be empty, behind the last block.
        let next = came.next.unwrap_or(here.blocks.max(came.place + 1));
        let history::Feed { point, base, token, .. } = stream.feed;
        let from = stream.from;
        let slot = feed::Slot {
            transfer: Transfer { point, base },
            token,
            stream: stream.number,
            from,
            place: came.place,
            span: next.saturating_sub(came.place),
            sums: came.sums,
            end: came.end,
        };
        match self.feed.take(&slot) {
            Ok(_) => Ok(next.min(here.blocks)),
            Err(feed::Refused::NotOrdered) => Err(Refused::NotOrdered),
            Err(feed::Refused::OutOfOrder) => Err(Refused::OutOfOrder),
            Err(feed::Refused::WrongSum) => Err(Refused::Changed),
            Err(feed::Refused::WrongDigest) => {
                // It is not known which of the slots of the stream are wrong.
                self.begin_anew(Refused::Changed);
                Err(Refused::Changed)
            }
        }
    }

    /// Counts slots that are written, in their order.
    fn settle(&mut self) {
        while self.slots.front().is_some_and(|first| first.is_done() && !first.is_end)
            && let Some(done) = self.slots.pop_front()
        {
            self.first += 1;
            self.unflushed_bytes += done.bytes;
            self.written_to = self.written_to.max(done.to);
            let _ = done.answer.try_send(Ok(self.taken()));
        }
    }

    /// Returns the next request, with its number.
    fn next_request(&mut self) -> Option<(u64, Operation)> {
        let number = self.last_request + 1;
        if self.flush.is_none() {
            let end = self.slots.front().filter(|first| first.is_done() && first.is_end);
            let end = end.map(|end| end.to);
            if end.is_some() || self.unflushed_bytes >= UNFLUSHED_MAX {
                self.last_request = number;
                self.unflushed_bytes = 0;
                let to = end.unwrap_or(self.written_to).max(self.written_to);
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

    /// Takes the reply to a request; one of before it began anew counts nowhere.
    pub fn replied(&mut self, request: u64, is_ok: bool) {
        if let Some(flush) = self.flush.take_if(|flush| flush.request == request) {
            if !is_ok {
                return self.fail();
            }
            self.is_ahead |= flush.to > self.stable_to;
            self.stable_to = self.stable_to.max(flush.to);
            if flush.is_end
                && let Some(end) = self.slots.pop_front()
            {
                self.first += 1;
                self.written_to = self.written_to.max(end.to);
                self.is_changed = true;
                self.is_open = false;
                let _ = end.answer.try_send(Ok(self.taken()));
            }
            return;
        }
        let Some(of) = self.requests.remove(&request) else { return };
        if !is_ok {
            return self.fail();
        }
        let index = of.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some(writing) = index.and_then(|index| self.slots.get_mut(index)) {
            writing.open = writing.open.saturating_sub(1);
        }
        self.settle();
    }

    /// Returns true if it is time for a report.
    fn is_news(&mut self, now: Time) -> bool {
        let is_due = self.is_ahead && now.since(self.told_at) >= TOLD_EVERY;
        if !self.is_changed && !is_due {
            return false;
        }
        (self.is_changed, self.is_ahead, self.told_at) = (false, false, now);
        true
    }
}

impl Volume {
    /// Submits what the transfer has ready. Returns true if there is something to report.
    pub(super) fn feed_on(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) -> bool {
        if std::mem::take(&mut self.feeding.abandons) {
            let former = self.export.tokens.of(CLIENT);
            if !former.is_empty() {
                self.target.on(now, PrimaryEvent::Abandon(former), actions);
            }
        }
        if !self.target.is_serving() {
            // Streams are told at once.
            if self.feeding.is_open {
                self.feeding.not_served();
            }
            return self.feeding.is_news(now);
        }
        while let Some((number, operation)) = self.feeding.next_request() {
            let origin = Origin { client: CLIENT, token: number, kind: 0, came: now, offset: 0 };
            let token = self.export.tokens.issue(origin);
            let request = Request { token, operation, origin: None };
            self.target.on(now, PrimaryEvent::Submit(request), actions);
        }
        self.feeding.is_news(now)
    }

    fn here(&self) -> Here {
        Here { is_serving: self.target.is_serving(), blocks: self.target.volume_blocks() }
    }
}

impl Shard {
    /// Takes what a stream into a copy asks for. Dropped, its answer says that the volume is not served here.
    pub(super) fn feed(&mut self, id: VolumeId, input: FeedInput) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        let here = volume.here();
        match input {
            FeedInput::Begin(feed, answer) => {
                let _ = answer.try_send(volume.feeding.begin(here, &feed));
            }
            FeedInput::Slots(stream, came, answer) => {
                volume.feeding.take(here, &stream, *came, answer);
            }
        }
        self.touch(id);
    }

    /// Takes the order that holds now.
    pub(super) fn order_feed(&mut self, id: VolumeId, order: Option<FeedOrder>, read_only: bool) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        volume.feeding.order(order, read_only);
        self.touch(id);
    }

    pub(super) fn note_feed(&mut self, id: VolumeId, note: &PrimaryNote) {
        let Some(volume) = self.volumes.get_mut(&id) else { return };
        if volume.feeding.note(note) {
            self.touch(id);
        }
    }
}

#[cfg(test)]
mod tests;
