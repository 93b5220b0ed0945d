//! A copy of a volume that takes the slots of the one transfer that was ordered.
//!
//! [`Feeding`] is what a target has for each volume. It takes orders, streams and slots, and says which requests
//! the volume's state machine is to be given. [`Feed`] says which slots are taken, and [`Window`] what of them is
//! written and what is on stable media: nothing else is told.
//!
//! A new epoch, another order and a request that failed each have the transfer begin anew where its order
//! says. Requests that are under way then are dropped, or have their place in the history already, before all
//! that follow; their replies count nowhere.

mod came;
mod window;

use std::time::Duration;

use quoin_types::Time;
use quoin_types::block::Operation;
use quoin_types::history::{self, Refused, Taken};
use quoin_types::mutant;

pub use came::{Came, Step};
pub use window::{Counted, Failed, Places, REQUESTS_MAX, Window};

use super::feed::{self, Feed};
use super::record::{Stamp, Transfer};
use came::push_hole;

/// Most slots of a volume that are being written.
pub const SLOTS_MAX: usize = 4;
/// Least time between two reports of progress.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// Order to take the slots of a transfer, or of none any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeedOrder {
    /// The transfer and its token.
    pub takes: Option<(Transfer, u128)>,
    /// Block at which the transfer resumes.
    pub from_block: u64,
    /// Place in time: an order with a lower one than the last is late.
    pub stamp: Stamp,
}

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

/// A stream that began: its number, which the target gives, and its first frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    pub number: u64,
    pub feed: history::Feed,
    /// Block at which it begins.
    pub from: u64,
}

/// Volume as it is while slots come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Here {
    pub is_serving: bool,
    pub blocks: u64,
}

/// Step of the volume's state machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// All requests of before are dropped, as far as they have no place in the history.
    Abandon,
    Submit(u64, Operation),
}

/// The order of a volume, and what comes for it. `T` names slots to the one that they came from.
#[derive(Debug)]
pub struct Feeding<T> {
    feed: Feed,
    order: Option<FeedOrder>,
    /// Highest stamp of an order that came.
    seen: Stamp,
    is_read_only: bool,
    /// Number of the last stream, and whether it is open.
    stream: u64,
    is_open: bool,
    window: Window<T>,
    answers: Vec<(T, Result<Taken, Refused>)>,
    /// Requests of before are to be dropped.
    abandons: bool,
    /// There is a report to make: at once, or soon.
    is_changed: bool,
    is_ahead: bool,
    told_at: Time,
}

impl<T> Feeding<T> {
    pub fn new(order: Option<FeedOrder>, is_read_only: bool) -> Self {
        let mut feeding = Self {
            feed: Feed::default(),
            order: None,
            seen: Stamp::default(),
            is_read_only,
            stream: 0,
            is_open: false,
            window: Window::default(),
            answers: Vec::new(),
            abandons: false,
            is_changed: false,
            is_ahead: false,
            told_at: Time::default(),
        };
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
        let Places { written_to, stable_to } = self.window.places();
        self.order.map(|order| FeedProgress {
            order,
            taken_to: written_to,
            stable_to,
            is_fed: self.is_fed(),
        })
    }

    /// The volume is served under another epoch, or not any more: slots that are not on stable media may be lost
    /// with the one under which they were written.
    pub fn not_served(&mut self) {
        if self.order.is_some() {
            self.begin_anew(Refused::NotServed);
        }
    }

    fn is_fed(&self) -> bool {
        self.feed.is_fed() && self.window.is_empty()
    }

    fn taken(&self) -> Taken {
        let Places { written_to, stable_to } = self.window.places();
        Taken { to: written_to, stable_to, is_fed: self.is_fed() }
    }

    /// Has the transfer begin where its order says, and ends the stream for this reason.
    fn begin_anew(&mut self, why: Refused) {
        self.feed.stop();
        let from = self.order.map_or(0, |order| order.from_block);
        self.is_changed |= self.window.places().written_to != from;
        if !mutant::is("place-of-another-transfer-kept") {
            self.window.begin_at(from);
        }
        self.end_stream(why);
    }

    /// Drops what is not written yet.
    fn end_stream(&mut self, why: Refused) {
        let is_kept =
            why == Refused::NotOrdered && mutant::is("slots-written-under-an-ended-order");
        if !is_kept {
            self.answers.extend(self.window.drop_slots().map(|ticket| (ticket, Err(why))));
            self.abandons = true;
        }
        self.is_open = false;
        if let Some((transfer, token)) = self.order.and_then(|order| order.takes) {
            self.feed = Feed::default();
            self.feed.order(transfer, token, self.window.places().written_to);
        }
    }

    /// Begins a stream; returns its number.
    ///
    /// # Errors
    /// The stream is not ordered, or the volume takes none.
    pub fn begin(&mut self, here: Here, feed: &history::Feed) -> Result<(u64, Taken), Refused> {
        self.check(here, feed)?;
        if !self.window.is_empty() {
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

    /// Takes slots, which are answered once they are written ([`Feeding::answers`]).
    pub fn take(&mut self, here: Here, stream: &Stream, came: Came, ticket: T) {
        match self.judge(here, stream, &came) {
            Ok(to) => {
                let Came { mut steps, covered_to, end, .. } = came;
                if stream.feed.base.is_none() {
                    push_hole(&mut steps, covered_to, to.saturating_sub(covered_to));
                }
                self.window.push(steps, to, end.is_some(), ticket);
                self.settle();
            }
            Err(refused) => self.answers.push((ticket, Err(refused))),
        }
    }

    /// Returns the block up to which the slots reach.
    fn judge(&mut self, here: Here, stream: &Stream, came: &Came) -> Result<u64, Refused> {
        self.check(here, &stream.feed)?;
        if self.window.is_full() {
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
        let slot = feed::Slot {
            transfer: Transfer { point, base },
            token,
            stream: stream.number,
            from: stream.from,
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

    /// Answers slots that are written, in their order.
    fn settle(&mut self) {
        while let Some(counted) = self.window.settle() {
            self.count(counted);
        }
    }

    fn count(&mut self, counted: Counted<T>) {
        if counted.is_end {
            self.is_changed = true;
            self.is_open = false;
        }
        let Places { written_to, stable_to } = counted.places;
        let taken = Taken { to: written_to, stable_to, is_fed: counted.is_end };
        self.answers.push((counted.ticket, Ok(taken)));
    }

    /// Takes out the answers to slots, in the order in which they were decided.
    pub fn answers(&mut self) -> Vec<(T, Result<Taken, Refused>)> {
        std::mem::take(&mut self.answers)
    }

    /// Returns the next step of the volume's state machine; `None`: no more for now.
    pub fn next(&mut self, is_serving: bool) -> Option<Next> {
        if std::mem::take(&mut self.abandons) {
            return Some(Next::Abandon);
        }
        if !is_serving {
            // Streams are told at once.
            if self.is_open {
                self.not_served();
            }
            return None;
        }
        self.window.next_request().map(|(number, operation)| Next::Submit(number, operation))
    }

    /// Takes the reply to a request; one of before it began anew counts nowhere.
    pub fn replied(&mut self, request: u64, is_ok: bool) {
        let stable_to = self.window.places().stable_to;
        match self.window.replied(request, is_ok) {
            Ok(counted) => {
                self.is_ahead |= self.window.places().stable_to > stable_to;
                counted.into_iter().for_each(|counted| self.count(counted));
                self.settle();
            }
            Err(Failed) => self.begin_anew(Refused::Failed),
        }
    }

    /// Returns true if it is time for a report.
    pub fn is_news(&mut self, now: Time) -> bool {
        let is_due = self.is_ahead && now.since(self.told_at) >= TOLD_EVERY;
        if !self.is_changed && !is_due {
            return false;
        }
        (self.is_changed, self.is_ahead, self.told_at) = (false, false, now);
        true
    }
}

#[cfg(test)]
mod tests;
