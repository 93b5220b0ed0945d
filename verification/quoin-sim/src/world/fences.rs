//! A control plane that takes back what a target was granted when its host loses the volume, in the
//! swarms `detaches` and `controllers`. Pools are told so late, each by itself, and again whenever they start; the target
//! that lost the volume lives on, and comes back with the grant that it has.

use std::collections::BTreeMap;

use quoin_replication::replica::{FENCED_SESSION, ReplicaEvent};
use quoin_types::message::FromReplica;
use quoin_types::{Epoch, Incarnation, SessionKey, Time};

use super::{Event, World};
use crate::random::Random;
use crate::schedule::MILLISECOND;
use crate::swarm::Swarm;

pub(crate) struct Fences {
    random: Random,
    on: bool,
    /// The control plane is at times of a version that takes nothing back.
    may_be_old: bool,
    /// What pools are told now.
    word: Option<Word>,
    /// By GUID, what its replica was told, and when by its own clock.
    heard: BTreeMap<u128, (Word, Time)>,
}

#[derive(Clone, Copy)]
struct Word {
    epoch: Epoch,
    at_once: bool,
}

impl Fences {
    pub fn draw(seed: u64, swarm: Swarm) -> Self {
        let random = Random::new(seed ^ 0x6665_6e63_6573);
        let on = matches!(swarm, Swarm::Detaches | Swarm::Controllers);
        let may_be_old = swarm == Swarm::Detaches;
        Self { random, on, may_be_old, word: None, heard: BTreeMap::new() }
    }
}

impl World {
    /// The volume is another host's from now on. An epoch is used up that no target is granted.
    pub(crate) fn fence_former_owner(&mut self) {
        if !self.fences.on || self.record.epoch == Epoch::ZERO {
            return;
        }
        if self.fences.may_be_old && self.fences.random.percent(20) {
            return;
        }
        let Some(next) = self.record.term.next_epoch(self.record.epoch) else { return };
        self.record.epoch = next;
        self.record.incarnation = Incarnation(0);
        let (epoch, at_once) = (self.record.epoch, self.fences.random.percent(50));
        self.fences.word = Some(Word { epoch, at_once });
        self.trace.line(self.schedule.now(), || format!("all up to epoch {epoch} is taken back"));
        for pool in 0..self.pools.len() {
            self.plan_fence(pool, 1500);
        }
    }

    fn plan_fence(&mut self, pool: usize, within_ms: u64) {
        let delay = self.fences.random.between(1, within_ms) * MILLISECOND;
        self.schedule.after(delay, Event::TellFence { pool });
    }

    /// A pool that starts hears of it again; until then it goes by what it has on its disk.
    pub(crate) fn fences_after_start(&mut self, pool: usize) {
        if !self.fences.on {
            return;
        }
        let here = &mut self.pools[pool];
        let mut promised = Epoch::ZERO;
        here.storage.with(here.member.guid, &mut |store| promised = store.meta().promised);
        let guid = here.member.guid.0;
        self.fences.heard.retain(|heard, (word, _)| *heard != guid || word.epoch <= promised);
        if self.fences.word.is_some() {
            self.plan_fence(pool, 400);
        }
    }

    pub(crate) fn tell_fence(&mut self, pool: usize) {
        let Some(Word { epoch, at_once }) = self.fences.word else { return };
        if self.pools[pool].paused {
            return self.plan_fence(pool, 50);
        }
        let here = &self.pools[pool];
        if here.process.is_none() || here.gone {
            return;
        }
        let (guid, now) = (here.member.guid.0, self.local(here.host));
        self.pool_hears(pool, self.record.term);
        if !self.orders(pool, self.record.term) {
            // Its reports are heard by a controller that it believes, once one rules there.
            return self.plan_fence(pool, 1500);
        }
        self.feed_pool(pool, vec![ReplicaEvent::Fence { epoch, at_once }]);
        let heard = self.fences.heard.entry(guid).or_insert((Word { epoch, at_once }, now));
        if heard.0.epoch < epoch {
            *heard = (Word { epoch, at_once }, now);
        }
        self.stats.fences += 1;
    }

    /// Nothing is opened by a grant that was taken back, and what was open ends in its time.
    pub(crate) fn check_fenced(&mut self, pool: usize, session: SessionKey, message: &FromReplica) {
        let here = &self.pools[pool];
        let Some((word, since)) = self.fences.heard.get(&here.member.guid.0).copied() else {
            return;
        };
        // An epoch is used up for the word: where a session has that number, a rival granted it.
        let is_another = session.epoch == word.epoch && self.is_of_a_rival(session);
        if session.epoch > word.epoch || is_another {
            return;
        }
        let is_over = word.at_once || self.local(here.host) > since + FENCED_SESSION;
        let what = match message {
            FromReplica::OpenAck(_) => "opened",
            FromReplica::Refuse { .. } | FromReplica::Failed(_) => return,
            _ if is_over => "served",
            _ => return,
        };
        let detail = format!(
            "pool {pool} {what} epoch {} after all up to {} was taken back",
            session.epoch, word.epoch
        );
        self.violate("TakenBack", detail);
    }
}
