//! The clients: each queue has one request open, tries again after a target's death with a new
//! one, and moves when the volume does.

use std::collections::BTreeMap;

use quoin_replication::primary::PrimaryEvent;
use quoin_types::block::Request;

use super::holes::HOLES_QUEUE;
use super::quiesce::Quiesce;
use super::{Event, World};
use crate::content::{SECTORS, Tag};
use crate::schedule::{MICROSECOND, MILLISECOND};
use crate::workload::{Draft, Workload};

pub(crate) struct Queue {
    pub home: usize,
    pub turn: u32,
    pub open: Option<Tag>,
    /// Requests without pause still to come.
    pub burst: u32,
}

pub(crate) struct Clients {
    pub queues: Vec<Queue>,
    pub workload: Workload,
    /// By the token of an open request, its queue.
    pub tokens: BTreeMap<u64, usize>,
    /// Their last requests, once faults are over.
    pub quiesce: Quiesce,
}

impl Clients {
    pub fn new(count: u64, workload: Workload) -> Self {
        let queue = |_| Queue { home: 0, turn: 0, open: None, burst: 0 };
        let (tokens, quiesce) = (BTreeMap::new(), Quiesce::default());
        Self { queues: (0..count).map(queue).collect(), workload, tokens, quiesce }
    }
}

impl World {
    pub(crate) fn client_turn(&mut self, queue: usize, turn: u32) {
        let home = self.clients.queues[queue].home;
        if self.clients.queues[queue].turn != turn || self.clients.queues[queue].open.is_some() {
            return;
        }
        if self.sharers.is_on() {
            // Its host holds it until it has a connection.
            if let Some(draft) = self.next_draft(queue) {
                self.submit(queue, draft);
            }
            return;
        }
        if self.targets[home].process.is_none() || self.targets[home].paused {
            if self.control.record.owner != home && self.random.percent(20) {
                return self.move_client(queue);
            }
            let delay = self.random.between(5, 100) * MILLISECOND;
            self.schedule.after(delay, Event::Client { queue, turn });
            return;
        }
        if self.operators.snapshots.detaches_clients() || self.operators.copying.is_detached() {
            self.schedule.after(20 * MILLISECOND, Event::Client { queue, turn });
            return;
        }
        let Some(draft) = self.next_draft(queue) else { return };
        let known = self.targets[home].process.as_ref().map_or(0, |p| p.known_blocks);
        if draft.range().is_some_and(|(first, count)| first + count > known * SECTORS as u64) {
            self.clients.quiesce.given_back(draft);
            if self.control.record.owner == home {
                self.send_size_to(home);
            }
            self.next_turn(queue, 50 * MILLISECOND);
            return self.move_client(queue);
        }
        self.submit(queue, draft);
    }

    fn next_draft(&mut self, queue: usize) -> Option<Draft> {
        match self.clients.quiesce.next_draft(self.setup.volume_blocks) {
            last_round @ (Some(Some(_)) | None) => last_round.flatten(),
            Some(None) => Some(self.clients.workload.next(queue, &mut self.random)),
        }
    }

    fn submit(&mut self, queue: usize, draft: Draft) {
        let home = self.clients.queues[queue].home;
        let target = (home, self.targets[home].life);
        let tag = self.checkers.history.invoke(draft, target);
        self.clients.queues[queue].open = Some(tag);
        self.clients.tokens.insert(u64::from(tag), queue);
        self.operators.points.was_issued(tag, self.schedule.now());
        self.trace.line(self.schedule.now(), || {
            format!("client {queue} asks target {home} for op {tag}: {draft:?}")
        });
        if self.sharers.is_on() {
            return self.share_request(queue, tag);
        }
        let operation = draft.operation(self.setup.run, tag);
        let request = Request { token: u64::from(tag), operation, origin: None };
        if let Some(request) = self.admit(home, queue, request) {
            self.feed_target(home, vec![PrimaryEvent::Submit(request)]);
        }
    }

    pub(crate) fn client_answered(&mut self, queue: usize, tag: Tag) {
        if queue == HOLES_QUEUE {
            return self.operators.holes.answered();
        }
        if self.clients.queues[queue].open != Some(tag) {
            return;
        }
        self.trace.line(self.schedule.now(), || format!("client {queue} has its answer to {tag}"));
        self.clients.queues[queue].open = None;
        self.clients.quiesce.answered(queue);
        let asked = self.checkers.history.len() as u64;
        let hurries = self.clients.quiesce.in_a_hurry(asked, self.setup.ios_min);
        let delay = if hurries || self.clients.queues[queue].burst > 0 {
            self.clients.queues[queue].burst = self.clients.queues[queue].burst.saturating_sub(1);
            self.random.below(200 * MICROSECOND)
        } else {
            self.random
                .delay(self.setup.think_ns)
                .max(self.clients.quiesce.rest(self.schedule.now()))
        };
        self.next_turn(queue, delay);
    }

    fn next_turn(&mut self, queue: usize, delay: u64) {
        self.clients.queues[queue].turn += 1;
        let turn = self.clients.queues[queue].turn;
        self.schedule.after(delay, Event::Client { queue, turn });
    }

    /// Abandons the open request of a client, which is never answered now. The client asks anew.
    pub(super) fn abandon(&mut self, queue: usize) {
        if let Some(tag) = self.clients.queues[queue].open.take() {
            self.stats.ios.open += 1;
            self.clients.quiesce.given_back(self.checkers.history.op(tag).draft);
            let delay = self.random.between(1, 300) * MILLISECOND;
            self.next_turn(queue, delay);
        }
    }

    pub(crate) fn clients_lost_target(&mut self, target: usize) {
        if self.sharers.is_on() {
            return self.sharers_leave(target);
        }
        let lost: Vec<usize> = (0..self.clients.queues.len())
            .filter(|q| self.clients.queues[*q].home == target)
            .collect();
        for queue in lost {
            if let Some(tag) = self.clients.queues[queue].open {
                self.clients.tokens.remove(&u64::from(tag));
            }
            self.abandon(queue);
        }
        // Requests of clients that have moved away die with the target too.
        let history = &self.checkers.history;
        let life = self.targets[target].life;
        self.clients
            .tokens
            .retain(|token, _| history.op(*token as u32).targets.last() != Some(&(target, life)));
    }

    /// The client's host is given up: its new one asks the present owner.
    pub(crate) fn move_client(&mut self, queue: usize) {
        let owner = self.control.record.owner;
        if self.sharers.is_on() {
            return self.sharer_moves(queue);
        }
        if self.clients.queues[queue].home == owner {
            return;
        }
        self.forget_waiting(self.clients.queues[queue].home, queue);
        self.clients.queues[queue].home = owner;
        if self.clients.queues[queue].open.is_some() {
            self.abandon(queue);
        } else {
            self.next_turn(queue, MILLISECOND);
        }
    }

    /// Traffic in the middle of which a fault is injected.
    pub(crate) fn burst(&mut self) {
        for queue in 0..self.clients.queues.len() {
            self.clients.queues[queue].burst = self.random.between(5, 40) as u32;
            if self.clients.queues[queue].open.is_none() {
                let delay = self.random.below(MILLISECOND);
                self.next_turn(queue, delay);
            }
        }
    }
}
