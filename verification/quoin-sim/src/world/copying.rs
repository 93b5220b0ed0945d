//! Part of a volume in the copying of points between two clusters ([`super::copies`]): what its targets do
//! beside serving it, as the product's shard does.

use std::collections::BTreeSet;

use quoin_cluster::mirror::feeding::{Came, FeedOrder, FeedProgress, Feeding, Here, Next, Stream};
use quoin_replication::primary::{ChangesAnswer, PrimaryEvent, PrimaryNote, PrimaryStatus};
use quoin_types::block::{Reply, Request, Token};
use quoin_types::history::{self, Refused, Taken};

use super::checkers::Observation;
use super::targets::Process;
use super::{Event, World};
use crate::content::Tag;
use crate::schedule::MILLISECOND;

/// Tokens of requests that write slots; those of clients lie below.
const FIRST_TOKEN: Token = 1 << 40;
/// Tags of a copy's own clients lie behind it.
const FIRST_TAG: Tag = 1 << 24;

/// Line that slots came by.
pub(crate) type Ticket = u64;

/// Without it nothing of this happens to a volume.
#[derive(Default)]
pub(crate) struct Copying {
    /// Number that contents name, and size of the volume.
    shared: Option<(u64, u64)>,
    first_tag: Tag,
    /// Clients may use the volume.
    pub is_attached: bool,
    /// Nothing is copied any more: the run comes to its end.
    pub is_over: bool,
    /// The order in the assignment of a target that begins.
    pub order: Option<FeedOrder>,
    pub answers: Vec<(Ticket, Result<Taken, Refused>)>,
    pub parts: Vec<(u64, ChangesAnswer)>,
    /// Requests that wrote slots: the target, and the order that it has.
    pub submitted: Vec<(usize, Option<FeedOrder>)>,
}

impl Copying {
    /// The volume of one side; clients use that of the first one.
    pub fn new(side: usize, run: u64, volume_blocks: u64) -> Self {
        let first_tag = side as Tag * FIRST_TAG;
        Self {
            shared: Some((run, volume_blocks)),
            first_tag,
            is_attached: side == 0,
            ..Self::default()
        }
    }

    pub fn run(&self) -> Option<u64> {
        self.shared.map(|(run, _)| run)
    }

    pub fn volume_blocks(&self) -> Option<u64> {
        self.shared.map(|(_, blocks)| blocks)
    }

    pub fn first_tag(&self) -> Tag {
        self.first_tag
    }

    pub fn is_on(&self) -> bool {
        self.shared.is_some()
    }

    /// Clients do not use a copy.
    pub fn is_detached(&self) -> bool {
        self.is_on() && !self.is_attached
    }

    /// Succeeds once copying has ended.
    pub fn settled(&self) -> Result<(), String> {
        match !self.is_on() || self.is_over {
            true => Ok(()),
            false => Err("points are still copied".to_owned()),
        }
    }

    /// The part of a target that begins; `None`: nothing is copied.
    pub fn feeds(&self) -> Option<Feeds> {
        let feeding = || Feeding::new(self.order, false);
        self.is_on().then(|| Feeds {
            feeding: feeding(),
            open: BTreeSet::new(),
            goes_on: false,
            submitted: Vec::new(),
        })
    }
}

/// Slots that a target writes.
pub(crate) struct Feeds {
    pub feeding: Feeding<Ticket>,
    /// Requests without a reply.
    open: BTreeSet<Token>,
    /// A reply or a note came in this round.
    goes_on: bool,
    /// Order under which each request was submitted.
    submitted: Vec<Option<FeedOrder>>,
}

/// Report of a target.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub target: usize,
    pub progress: Option<FeedProgress>,
    pub status: PrimaryStatus,
}

impl Process {
    /// The next event that slots make of the volume's state machine.
    pub(super) fn next_of_feed(&mut self) -> Option<PrimaryEvent> {
        let feeds = self.feeds.as_mut()?;
        Some(match feeds.feeding.next(self.target.is_serving())? {
            Next::Abandon => PrimaryEvent::Abandon(feeds.open.iter().copied().collect()),
            Next::Submit(number, operation) => {
                let token = FIRST_TOKEN + number;
                feeds.open.insert(token);
                feeds.submitted.push(feeds.feeding.progress().map(|progress| progress.order));
                PrimaryEvent::Submit(Request { token, operation, origin: None })
            }
        })
    }

    fn here(&self) -> Here {
        Here { is_serving: self.target.is_serving(), blocks: self.target.volume_blocks() }
    }
}

impl World {
    /// The copy is promoted: clients begin with what it shows.
    pub(crate) fn attach_copy(&mut self) {
        self.operators.copying.is_attached = true;
        let target = self.control.record.owner;
        let life = self.targets[target].life;
        self.observe(&Observation::Reverted { target, life });
        for queue in 0..self.clients.queues.len() {
            let delay = self.random.below(500) * MILLISECOND;
            self.schedule.after(delay, Event::MoveClient { queue });
        }
    }

    /// A target begins on a host that the volume was lent to.
    pub(crate) fn start_soon(&mut self, target: usize) {
        let delay = self.random.between(1, 500) * MILLISECOND;
        self.schedule.after(delay, Event::StartTarget { target });
    }

    /// Returns true if the target can be reached now.
    pub(crate) fn has_target(&self, target: usize) -> bool {
        self.targets[target].process.is_some() && !self.targets[target].paused
    }

    /// The controller's order reaches a target.
    pub(crate) fn order_feed(&mut self, target: usize, order: Option<FeedOrder>) {
        if self.has_target(target)
            && let Some(feeds) = self.feeds_of(target)
        {
            feeds.feeding.order(order, false);
            self.feed_target(target, Vec::new());
        }
    }

    fn feeds_of(&mut self, target: usize) -> Option<&mut Feeds> {
        self.targets[target].process.as_mut()?.feeds.as_mut()
    }

    pub(crate) fn begin_feed(
        &mut self,
        target: usize,
        feed: &history::Feed,
    ) -> Result<(u64, Taken), Refused> {
        let process = self.targets[target].process.as_mut().ok_or(Refused::NotServed)?;
        let here = process.here();
        let feeds = process.feeds.as_mut().ok_or(Refused::NotServed)?;
        let begun = feeds.feeding.begin(here, feed);
        self.feed_target(target, Vec::new());
        begun
    }

    pub(crate) fn take_slots(
        &mut self,
        target: usize,
        stream: &Stream,
        came: Came,
        ticket: Ticket,
    ) {
        let Some(process) = self.targets[target].process.as_mut() else { return };
        let here = process.here();
        let Some(feeds) = process.feeds.as_mut() else { return };
        feeds.feeding.take(here, stream, came, ticket);
        self.feed_target(target, Vec::new());
    }

    /// Report of a target as it is now.
    pub(crate) fn told(&self, target: usize) -> Option<Told> {
        let process = self.targets[target].process.as_ref().filter(|_| self.has_target(target))?;
        let progress = process.feeds.as_ref().and_then(|feeds| feeds.feeding.progress());
        Some(Told { target, progress, status: process.target.status() })
    }

    /// Takes the reply to a request that wrote slots; returns false if the request was another one.
    pub(super) fn feed_replied(&mut self, target: usize, reply: &Reply) -> bool {
        let Some(number) = reply.token.checked_sub(FIRST_TOKEN) else { return false };
        let Some(feeds) = self.feeds_of(target) else { return false };
        if !feeds.open.remove(&reply.token) {
            let detail = format!("token {} of slots was answered twice", reply.token);
            self.violate("OneReply", detail);
            return true;
        }
        feeds.feeding.replied(number, reply.result.is_ok());
        feeds.goes_on = true;
        true
    }

    pub(super) fn feed_noted(&mut self, target: usize, note: &PrimaryNote) {
        if let Some(feeds) = self.feeds_of(target).filter(|_| note.is_of_another_epoch()) {
            feeds.feeding.not_served();
            feeds.goes_on = true;
        }
    }

    /// A round of a target ends: answers go to their lines, and what replies made ready is submitted.
    pub(super) fn feed_goes_on(&mut self, target: usize) {
        let Some(feeds) = self.feeds_of(target) else { return };
        let answers = feeds.feeding.answers();
        let goes_on = std::mem::take(&mut feeds.goes_on);
        let submitted = std::mem::take(&mut feeds.submitted);
        let copying = &mut self.operators.copying;
        copying.answers.extend(answers);
        copying.submitted.extend(submitted.into_iter().map(|order| (target, order)));
        if goes_on {
            self.feed_target(target, Vec::new());
        }
    }
}
