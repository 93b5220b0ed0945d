//! Hosts that share the volume, for the swarm `sharers`. Each has a client that numbers its changing
//! requests by the product's [`Numbers`], and sends what has no answer again over each new
//! connection. Connections break, with answers on their way and with requests that lie unread at a
//! target; processes of a host start again; hosts are lost, detach and attach again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use quoin_nbd::client::{Keyed, Memory, Numbers, Register, RequestKey};
use quoin_replication::primary::PrimaryEvent;
use quoin_types::ClientId;
use quoin_types::block::{BlockError, Operation, Request, Token};
use quoin_types::client::Origin;

use super::{Event, World};
use crate::content::Tag;
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;
use crate::workload::Draft;

/// Tokens have the number of their connection above their tag.
const TAG_BITS: u32 = 32;

/// The numbers of a host, which outlive its processes.
struct Kept(Arc<Vec<AtomicU64>>);

impl Memory for Kept {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// A connection of a host to a target.
struct Link {
    number: u64,
    target: (usize, u32),
    client: ClientId,
    /// Its client begins with it, and the flush behind that has no answer yet.
    begins: bool,
    /// Requests that were sent and have no answer.
    sent: Vec<Tag>,
}

impl Link {
    fn token(&self, tag: Tag) -> Token {
        self.number << TAG_BITS | u64::from(tag)
    }

    /// Tokens of all that the target may still hold of it.
    fn tokens(&self) -> Vec<Token> {
        let begins = self.begins.then_some(0);
        self.sent.iter().copied().chain(begins).map(|tag| self.token(tag)).collect()
    }
}

/// Requests without an answer, in the order in which they were made.
struct Held {
    tag: Tag,
    queue: usize,
}

struct Host {
    /// `None`: it has detached the volume.
    attachment: Option<u64>,
    memory: Arc<Vec<AtomicU64>>,
    numbers: Numbers,
    link: Option<Link>,
    held: VecDeque<Held>,
    turn: u32,
}

impl Host {
    fn new(attachment: Option<u64>) -> Self {
        let words = (0..Register::WORDS).map(|_| AtomicU64::new(0)).collect();
        let memory = Arc::new(words);
        let numbers = Numbers::new(Register::new(Box::new(Kept(Arc::clone(&memory)))));
        Self { attachment, memory, numbers, link: None, held: VecDeque::new(), turn: 0 }
    }

    /// The next process of the host goes on with what the last one left.
    fn restart(&mut self) {
        let memory = Kept(Arc::clone(&self.memory));
        self.numbers = Numbers::new(Register::new(Box::new(memory)));
        for held in &self.held {
            let key = RequestKey { key: held.tag.into(), offset: 0 };
            self.numbers.resume(held.tag.into(), key);
        }
        self.numbers.forget_left();
    }
}

pub(crate) struct Sharers {
    random: Random,
    hosts: Vec<Host>,
    /// Version of the record: each change of an attachment makes another one.
    version: u64,
    /// Attachments of the version before.
    before: Vec<u64>,
    /// Attachments that each target was told of.
    granted: [Vec<u64>; 2],
    attachments_made: u64,
    connections_made: u64,
    /// Connections that their hosts have given up and their targets have not: by number.
    left: BTreeMap<u64, Link>,
    /// Events that each target's process receives next, in this order, with the life that they are for.
    inbox: [VecDeque<(u32, PrimaryEvent)>; 2],
    /// Of the answers, how many of a hundred break their connection and do not arrive.
    answers_lost: u64,
}

#[derive(Debug)]
pub(crate) enum SharerEvent {
    /// A host without a connection tries to have one.
    Connect { host: usize, turn: u32 },
    /// A target's process receives what is in its inbox.
    Deliver { target: usize },
    /// The owner's target learns which attachments may change the volume.
    Grant,
    /// A host detached and attaches again.
    Attach { host: usize },
    /// Something happens to one of the hosts.
    Trouble,
}

impl Sharers {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let mut random = Random::new(seed ^ 0x7368_6172_6572_7321);
        let count = if swarm == Swarm::Sharers { random.between(2, 3) } else { 0 };
        let hosts = (1..=count).map(|attachment| Host::new(Some(attachment))).collect();
        let answers_lost = random.between(1, 12);
        Self {
            random,
            hosts,
            version: u64::from(count > 0),
            before: Vec::new(),
            granted: Default::default(),
            attachments_made: count,
            connections_made: 0,
            left: BTreeMap::new(),
            inbox: Default::default(),
            answers_lost,
        }
    }

    pub fn is_on(&self) -> bool {
        !self.hosts.is_empty()
    }

    /// 0: the volume is not shared.
    pub fn version(&self) -> u64 {
        self.version
    }

    fn attachments(&self) -> Vec<u64> {
        self.hosts.iter().filter_map(|host| host.attachment).collect()
    }

    fn host_of(&self, queue: usize) -> usize {
        queue % self.hosts.len()
    }
}

impl World {
    /// The record is going to have another list.
    fn attachments_change(&mut self) {
        self.sharers.before = self.sharers.attachments();
        self.sharers.version += 1;
        let options = self.recorded_options();
        self.control.set_options(options);
    }

    pub(super) fn plan_sharers(&mut self) {
        if self.sharers.is_on() {
            for host in 0..self.sharers.hosts.len() {
                self.connect_later(host);
            }
            self.trouble_later();
        }
    }

    pub(super) fn sharer_event(&mut self, event: SharerEvent) {
        match event {
            SharerEvent::Connect { host, turn } => {
                if self.sharers.hosts[host].turn == turn {
                    self.sharer_connects(host);
                }
            }
            SharerEvent::Deliver { target } => self.deliver_inbox(target),
            SharerEvent::Grant => self.grant_sharers(self.control.record.owner),
            SharerEvent::Attach { host } => self.sharer_attaches(host),
            SharerEvent::Trouble => self.sharer_trouble(),
        }
    }

    /// The grant of the hosts for a target that starts, if the volume is shared.
    pub(super) fn grant_to_new_target(&mut self, target: usize) -> Option<PrimaryEvent> {
        if !self.sharers.is_on() {
            return None;
        }
        let is_old = self.sharers.version > 1 && self.sharers.random.percent(40);
        let (attachments, version) = match is_old {
            // The assignment of before; its epoch is granted by the record of now.
            true => (self.sharers.before.clone(), self.sharers.version - 1),
            false => (self.sharers.attachments(), self.sharers.version),
        };
        if is_old {
            let delay = self.sharers.random.between(1, 600) * MILLISECOND;
            self.schedule.after(delay, Event::Sharer(SharerEvent::Grant));
        }
        self.sharers.granted[target].clone_from(&attachments);
        Some(PrimaryEvent::Clients { attachments, version })
    }

    fn grant_sharers(&mut self, target: usize) {
        if self.targets[target].process.is_some() && !self.targets[target].paused {
            let attachments = self.sharers.attachments();
            self.sharers.granted[target].clone_from(&attachments);
            let life = self.targets[target].life;
            let version = self.sharers.version;
            self.enqueue((target, life), vec![PrimaryEvent::Clients { attachments, version }]);
        } else {
            let delay = self.sharers.random.between(10, 200) * MILLISECOND;
            self.schedule.after(delay, Event::Sharer(SharerEvent::Grant));
        }
    }

    /// Events are not given to a target while it does what an earlier one asked for.
    fn enqueue(&mut self, (target, life): (usize, u32), events: Vec<PrimaryEvent>) {
        if events.is_empty() {
            return;
        }
        self.sharers.inbox[target].extend(events.into_iter().map(|event| (life, event)));
        self.schedule.after(0, Event::Sharer(SharerEvent::Deliver { target }));
    }

    fn deliver_inbox(&mut self, target: usize) {
        if self.targets[target].paused {
            let event = Event::Sharer(SharerEvent::Deliver { target });
            return self.schedule.after(5 * MILLISECOND, event);
        }
        let life = self.targets[target].life;
        let all = std::mem::take(&mut self.sharers.inbox[target]);
        let events = all.into_iter().filter(|(of, _)| *of == life).map(|(_, event)| event);
        let events: Vec<PrimaryEvent> = events.collect();
        if !events.is_empty() {
            self.feed_target(target, events);
        }
    }

    /// A client's queue has a request.
    pub(super) fn share_request(&mut self, queue: usize, tag: Tag) {
        let host = self.sharers.host_of(queue);
        self.checkers.history.may_be_sent_again(tag, true);
        self.sharers.hosts[host].held.push_back(Held { tag, queue });
        self.send_held(host);
    }

    /// Sends what the host holds and has not sent over its connection.
    fn send_held(&mut self, host: usize) {
        let there = &mut self.sharers.hosts[host];
        let Some(link) = &mut there.link else { return };
        let target = link.target;
        let mut events = Vec::new();
        for held in &there.held {
            if link.sent.contains(&held.tag) {
                continue;
            }
            let draft = self.checkers.history.sent_to(held.tag, link.target).draft;
            let mut origin = None;
            if changes(draft) {
                let key = RequestKey { key: held.tag.into(), offset: 0 };
                let keyed = Keyed { key, follows: None };
                let numbered = there.numbers.number(held.tag.into(), Some(keyed));
                let Some((number, low)) = numbered else { continue };
                origin = Some(Origin { client: link.client, number, low });
            }
            let operation = draft.operation(self.setup.run, held.tag);
            let request = Request { token: link.token(held.tag), operation, origin };
            link.sent.push(held.tag);
            events.push(PrimaryEvent::Submit(request));
        }
        self.enqueue(target, events);
    }

    fn connect_later(&mut self, host: usize) {
        let delay = self.sharers.random.between(1, 120) * MILLISECOND;
        self.sharers.hosts[host].turn += 1;
        let turn = self.sharers.hosts[host].turn;
        self.schedule.after(delay, Event::Sharer(SharerEvent::Connect { host, turn }));
    }

    /// A host connects to the target of the owner, as a listener of that one lets it in.
    fn sharer_connects(&mut self, host: usize) {
        let target = self.control.record.owner;
        let life = self.targets[target].life;
        let Some(attachment) = self.sharers.hosts[host].attachment else { return };
        let runs = self.targets[target].process.is_some() && !self.targets[target].paused;
        if !runs || !self.sharers.granted[target].contains(&attachment) {
            // An assignment reaches a target that has become the owner again.
            self.schedule.after(MILLISECOND, Event::Sharer(SharerEvent::Grant));
            return self.connect_later(host);
        }
        let shown = self.sharers.hosts[host].numbers.shown();
        let client = match shown.attachment() == attachment {
            true => shown,
            false => ClientId::of_attachment(attachment, self.sharers.random.draw()),
        };
        let number = self.sharers.connections_made + 1;
        self.sharers.connections_made = number;
        let begins = self.sharers.hosts[host].numbers.take_up(Some(client));
        let link = Link { number, target: (target, life), client, begins, sent: Vec::new() };
        let mut events = self.older_links_end((target, life), attachment);
        if begins {
            events.push(PrimaryEvent::BeginClient { client });
            let (token, operation) = (link.token(0), Operation::Flush);
            events.push(PrimaryEvent::Submit(Request { token, operation, origin: None }));
        }
        self.trace.line(self.schedule.now(), || {
            format!("sharer {host} connects to target {target} as {client:?}, begins: {begins}")
        });
        self.sharers.hosts[host].link = Some(link);
        self.enqueue((target, life), events);
        self.send_held(host);
    }

    /// Requests of older connections of an attachment may have been sent again by the newest one.
    fn older_links_end(&mut self, target: (usize, u32), attachment: u64) -> Vec<PrimaryEvent> {
        let is_older =
            |link: &Link| link.target == target && link.client.attachment() == attachment;
        let all = std::mem::take(&mut self.sharers.left);
        let (older, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(_, link)| is_older(link));
        self.sharers.left = others;
        older.into_values().flat_map(ends_at_target).collect()
    }

    /// The host's connection is gone; its target learns of it now, or by the host's next one, or never.
    fn sharer_disconnects(&mut self, host: usize) {
        let Some(link) = self.sharers.hosts[host].link.take() else { return };
        let (target, life) = link.target;
        self.trace.line(self.schedule.now(), || format!("sharer {host} loses target {target}"));
        let there = &self.targets[target];
        if there.process.is_some() && there.life == life {
            if self.sharers.random.percent(50) {
                self.enqueue((target, life), ends_at_target(link));
            } else {
                self.sharers.left.insert(link.number, link);
            }
        }
        self.connect_later(host);
    }

    /// Connections to a target that ended, or to one that does not own the volume any more.
    pub(super) fn sharers_leave(&mut self, target: usize) {
        let is_there = |host: &Host| host.link.as_ref().is_some_and(|l| l.target.0 == target);
        for host in 0..self.sharers.hosts.len() {
            if is_there(&self.sharers.hosts[host]) {
                self.sharer_disconnects(host);
            }
        }
        if self.targets[target].process.is_none() {
            self.sharers.left.retain(|_, link| link.target.0 != target);
        }
    }

    /// The host of this queue has its connection to the present owner, or none.
    pub(super) fn sharer_moves(&mut self, queue: usize) {
        let host = self.sharers.host_of(queue);
        let owner = self.control.record.owner;
        let link = self.sharers.hosts[host].link.as_ref();
        if link.is_some_and(|link| link.target.0 != owner) {
            self.sharer_disconnects(host);
        }
    }

    /// A target's reply to a host: the request that it answers, if it arrives there.
    pub(super) fn sharer_hears(
        &mut self,
        token: Token,
        error: Option<BlockError>,
    ) -> Option<(usize, Tag)> {
        let number = token >> TAG_BITS;
        let tag = token as Tag;
        let is_it = |host: &Host| host.link.as_ref().is_some_and(|l| l.number == number);
        // Others are of connections that are gone.
        let host = self.sharers.hosts.iter().position(is_it)?;
        let there = &mut self.sharers.hosts[host];
        let link = there.link.as_mut().expect("it has one");
        if tag == 0 {
            if !std::mem::replace(&mut link.begins, false) {
                self.violate("OneReply", format!("token {token} was answered twice"));
                return None;
            }
            match error {
                None => there.numbers.has_begun(),
                Some(_) => self.sharer_disconnects(host),
            }
            self.send_held(host);
            return None;
        }
        let Some(at) = link.sent.iter().position(|sent| *sent == tag) else {
            self.violate("OneReply", format!("token {token} was answered twice"));
            return None;
        };
        link.sent.remove(at);
        let is_lost = self.sharers.random.percent(self.sharers.answers_lost) && !self.faults.over;
        if error == Some(BlockError::Stopped) || is_lost {
            self.sharer_disconnects(host);
            return None;
        }
        let held = there.held.iter().position(|held| held.tag == tag)?;
        let queue = there.held.remove(held)?.queue;
        there.numbers.release(tag.into());
        self.checkers.history.may_be_sent_again(tag, false);
        // A number may be free for one that waits.
        self.send_held(host);
        Some((queue, tag))
    }

    /// The target does not let a client begin: its attachment is not granted there.
    pub(super) fn sharer_refused(&mut self, client: ClientId) {
        let is_it = |host: &Host| host.link.as_ref().is_some_and(|l| l.client == client);
        if let Some(host) = self.sharers.hosts.iter().position(is_it) {
            self.sharer_disconnects(host);
        }
    }

    fn trouble_later(&mut self) {
        let delay = self.sharers.random.between(100, 1500) * MILLISECOND;
        self.schedule.after(delay, Event::Sharer(SharerEvent::Trouble));
    }

    fn sharer_trouble(&mut self) {
        if self.faults.over {
            return;
        }
        let host = self.sharers.random.index(self.sharers.hosts.len());
        match self.sharers.random.below(6) {
            0..=2 => self.sharer_disconnects(host),
            3 => {
                self.sharer_disconnects(host);
                self.sharers.hosts[host].restart();
            }
            4 => {
                // The host is lost, and another instance of its processes begins.
                let attachment = self.sharers.hosts[host].attachment;
                self.sharer_ends(host, attachment);
            }
            _ => {
                self.attachments_change();
                self.sharer_ends(host, None);
                self.schedule.after(0, Event::Sharer(SharerEvent::Grant));
                let delay = self.sharers.random.between(1, 800) * MILLISECOND;
                self.schedule.after(delay, Event::Sharer(SharerEvent::Attach { host }));
            }
        }
        self.trouble_later();
    }

    /// The client of a host ends, and its requests are not sent again.
    fn sharer_ends(&mut self, host: usize, attachment: Option<u64>) {
        self.sharer_disconnects(host);
        let there = &mut self.sharers.hosts[host];
        let (turn, held) = (there.turn, std::mem::take(&mut there.held));
        *there = Host { turn, ..Host::new(attachment) };
        for Held { tag, queue } in held {
            self.checkers.history.may_be_sent_again(tag, false);
            self.abandon(queue);
        }
        self.connect_later(host);
    }

    fn sharer_attaches(&mut self, host: usize) {
        if self.sharers.hosts[host].attachment.is_none() {
            self.attachments_change();
            self.sharers.attachments_made += 1;
            self.sharers.hosts[host].attachment = Some(self.sharers.attachments_made);
            self.schedule.after(0, Event::Sharer(SharerEvent::Grant));
            self.connect_later(host);
        }
    }
}

/// Events by which a target's process ends a connection.
fn ends_at_target(link: Link) -> Vec<PrimaryEvent> {
    let abandoned = PrimaryEvent::Abandon(link.tokens());
    let forgotten = PrimaryEvent::ForgetClient { client: link.client };
    let begins = link.begins;
    std::iter::once(abandoned).chain(begins.then_some(forgotten)).collect()
}

fn changes(draft: Draft) -> bool {
    matches!(draft, Draft::Write { .. } | Draft::Trim { .. } | Draft::Zero { .. })
}
