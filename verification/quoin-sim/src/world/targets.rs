//! The driver of targets: what `quoin-target` does with sockets and timers, here with events.

use std::collections::BTreeMap;

use quoin_replication::primary::{
    Primary, PrimaryAction, PrimaryEvent, PrimaryNote, ReplicaStanding, ReplicaStatus,
    TIMER_DELAY_MIN,
};
use quoin_replication::target_host::orders::Orders;
use quoin_replication::target_host::round::Round;
use quoin_types::block::{BlockError, Payload, Reply};
use quoin_types::entry::SharedEntry;
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{
    BulkKey, EntryKind, Epoch, Incarnation, Member, Membership, Position, SessionKey, Time,
};

use super::checkers::{LostInBatch, Observation};
use super::connections::{Name, name};
use super::copying::Feeds;
use super::limits::Limited;
use super::{Event, World, brief};
use crate::control::Question;
use crate::network::{ConnectionId, Taken, Way};
use crate::schedule::{Instant, MILLISECOND};
use crate::trace::describe;

/// One life of a target process.
pub(crate) struct Process {
    pub target: Primary,
    timer: Option<Time>,
    arm: u32,
    /// The epoch it serves in, once it does.
    pub serving: Option<Epoch>,
    pub has_served: bool,
    /// This open reported that unflushed data may be lost.
    pub tail_lost: bool,
    /// It has sent a Close, and with that given up its lease.
    pub closes: bool,
    pub in_sync: Vec<Member>,
    pub waiting: String,
    /// The size that the controller has sent it.
    pub known_blocks: u64,
    pub grant: Grant,
    /// The newest entry that it has sent.
    pub sent: Position,
    pub(super) sessions: BTreeMap<Name, ConnectionId>,
    /// The round in the middle of which its thread stands still. What it receives had arrived by
    /// then.
    pub(super) stalled: Option<(Round, Instant)>,
    /// `None`: the volume has no limit.
    pub(super) limited: Option<Limited>,
    pub(super) orders: Orders,
    /// `None`: the volume is no copy.
    pub(super) feeds: Option<Feeds>,
}

/// Answers of the control plane to a target.
#[derive(Default)]
pub(crate) struct Grant {
    /// Under which it last asked for an epoch.
    pub incarnation: Incarnation,
    /// The membership that it was granted last.
    pub membership: Membership,
    /// The version of the membership that it was granted or has swapped.
    pub version: u64,
    /// The last swap that it was answered: its version, and the record in the answer.
    pub swapped: Option<(u64, Membership)>,
}

impl Process {
    /// Its round stands still.
    pub fn is_stalled(&self) -> bool {
        self.stalled.is_some()
    }

    /// How far the counted replicas are before this action of its batch.
    fn counted_before(&self, before: usize) -> Vec<LostInBatch> {
        let (committed, _) = self.target.reach();
        let mut replicas = self.target.status().replicas;
        replicas.retain(|replica| replica.standing == ReplicaStanding::InSync);
        let lost = |replica: &ReplicaStatus| LostInBatch {
            before,
            member: replica.member,
            applied: replica.applied,
            committed,
        };
        replicas.iter().map(lost).collect()
    }

    pub(super) fn has_session(&self, session: SessionKey) -> bool {
        self.sessions.contains_key(&name(session, None))
    }

    /// Number of sessions with a connection of their own; bulk connections do not count.
    pub(super) fn own_connections(&self) -> usize {
        self.sessions.keys().filter(|(_, _, bulk)| bulk.is_none()).count()
    }

    /// Returns true if something may be due, though its timer is a moment away.
    pub(super) fn is_due(&self, now: Time) -> bool {
        self.timer.is_some_and(|at| at <= now + TIMER_DELAY_MIN)
    }
}

impl World {
    pub(crate) fn start_target(&mut self, target: usize) {
        let host = self.targets[target].host;
        let owns = self.control.record.owner == target || self.control.terms.asks_former(target);
        let wanted = owns && self.hosts.powered[host];
        if self.targets[target].process.is_some() || !wanted {
            return;
        }
        let now = self.local(host);
        let seed = self.random.draw();
        let options = self.recorded_options();
        self.targets[target].life += 1;
        let life = self.targets[target].life;
        self.trace.line(self.schedule.now(), || format!("target {target} starts (life {life})"));
        self.targets[target].process = Some(Process {
            target: Primary::new(now, self.setup.config.clone(), seed),
            timer: None,
            arm: 0,
            serving: None,
            has_served: false,
            tail_lost: false,
            closes: false,
            in_sync: Vec::new(),
            waiting: String::new(),
            known_blocks: self.setup.config.volume_blocks,
            grant: Grant::default(),
            sent: Position::default(),
            sessions: BTreeMap::new(),
            stalled: None,
            limited: self.limited(now),
            orders: Orders::new(options),
            feeds: self.operators.copying.feeds(),
        });
        self.observe(&Observation::TargetStarted { target });
        self.dials_begin(target);
        let desired = self.control.desired();
        let events = [PrimaryEvent::Options(options), PrimaryEvent::Timer, desired];
        let events = events.into_iter().chain(self.memory_limit(target));
        let events: Vec<PrimaryEvent> = events.chain(self.grant_to_new_target(target)).collect();
        self.feed_target(target, events);
    }

    /// The process ends at once; its peers learn of it as their networks let them.
    pub(crate) fn kill_target(&mut self, target: usize) {
        if self.targets[target].process.take().is_none() {
            return;
        }
        self.trace.line(self.schedule.now(), || format!("target {target} is dead"));
        self.targets[target].paused = false;
        self.dials_end(target);
        let host = self.targets[target].host;
        let ids: Vec<ConnectionId> = self
            .network
            .connections
            .iter()
            .filter(|(_, c)| c.target == target && c.target_open)
            .map(|(id, _)| *id)
            .collect();
        let polite = self.hosts.powered[host];
        for id in ids {
            self.end_of_target_dies(id, polite);
        }
        self.clients_lost_target(target);
        let delay = self.random.between(50, 1500) * MILLISECOND;
        self.schedule.after(delay, Event::StartTarget { target });
    }

    /// Gives events to the target in one batch and does what it asks.
    pub(crate) fn feed_target(&mut self, target: usize, events: Vec<PrimaryEvent>) {
        let now = self.local(self.targets[target].host);
        if self.targets[target].process.is_none() {
            return;
        }
        for event in &events {
            if let PrimaryEvent::Desired(desired) = event {
                self.observe(&Observation::DesiredSent { target, desired });
            }
        }
        let Some(process) = &mut self.targets[target].process else { return };
        let round = process.stalled.take().map_or(Round::begin(now), |(round, _)| round);
        let mut actions = Vec::new();
        let mut lost = Vec::new();
        for event in events {
            if ends_a_session(&event) {
                lost.extend(process.counted_before(actions.len()));
            }
            process.target.on(round.at(now), event, &mut actions);
        }
        while let Some(event) = process.next_of_feed() {
            process.target.on(round.at(now), event, &mut actions);
        }
        // Here what all events brought is committed, and sessions end whose peers are silent for too
        // long.
        let at_end = process.counted_before(actions.len());
        process.target.flush(round.at(now), &mut actions);
        let (committed, _) = process.target.reach();
        lost.extend(at_end.into_iter().map(|lost| LostInBatch { committed, ..lost }));
        let dropped = |action: &PrimaryAction| match action {
            PrimaryAction::Note(PrimaryNote::Dropped { member, .. }) => Some(*member),
            _ => None,
        };
        let dropped = actions.iter().filter_map(dropped).collect();
        self.observe(&Observation::BatchBegins { dropped, lost });
        for (index, action) in actions.into_iter().enumerate() {
            self.observe(&Observation::ActionBegins { index });
            self.target_action(target, action);
        }
        self.observe(&Observation::ActionsDone { target });
        self.observe(&Observation::BatchEnded { target });
        self.feed_goes_on(target);
    }

    fn target_action(&mut self, target: usize, action: PrimaryAction) {
        let life = self.targets[target].life;
        let now = self.schedule.now();
        match action {
            PrimaryAction::AcquireEpoch { incarnation, at_least } => {
                if let Some(process) = &mut self.targets[target].process {
                    process.grant.incarnation = incarnation;
                }
                let question = Question::Acquire { incarnation, at_least };
                self.ask(target, question);
            }
            PrimaryAction::SwapMembership { epoch, version, next } => {
                self.trace.line(now, || format!("target {target} swaps membership: {next:?}"));
                self.swap_asked(target, &next);
                let incarnation = self.targets[target].process.as_ref();
                let incarnation = incarnation.map(|p| p.grant.incarnation).unwrap_or_default();
                self.ask(target, Question::Swap { epoch, incarnation, version, next });
            }
            PrimaryAction::Connect { member, session } => {
                self.connect(target, member, session, None);
            }
            PrimaryAction::ConnectBulk { member, bulk } => {
                self.connect(target, member, bulk.session, Some(bulk.number));
            }
            PrimaryAction::Disconnect { session } => {
                self.observe(&Observation::SessionEnded { target, session });
                self.target_hangs_up(target, |of| of.session == session);
            }
            PrimaryAction::DisconnectBulk { bulk } => {
                let number = Some(bulk.number);
                self.target_hangs_up(target, |of| of.session == bulk.session && of.bulk == number);
            }
            PrimaryAction::Send { session, message } => {
                self.target_sends(target, session, None, message);
            }
            PrimaryAction::SendBulk { bulk, message } => {
                self.target_sends(target, bulk.session, Some(bulk.number), message);
            }
            PrimaryAction::Reply(reply) => self.target_replies(target, life, reply),
            PrimaryAction::Changes { token, answer } if self.operators.copying.is_on() => {
                self.operators.copying.parts.push((token, answer));
            }
            PrimaryAction::Changes { token, answer } => self.pulled(token, answer),
            PrimaryAction::Timer { at } => {
                if let Some(process) = &mut self.targets[target].process {
                    process.timer = at;
                    process.arm += 1;
                }
                self.plan_target_timer(target);
            }
            PrimaryAction::Note(note) => self.target_note(target, life, note),
            PrimaryAction::Stopped => {
                if let Some(process) = &mut self.targets[target].process {
                    process.serving = None;
                }
                // The driver's process ends after this batch.
                self.kill_target(target);
            }
        }
    }

    fn swap_asked(&mut self, target: usize, next: &Membership) {
        let assertions = &self.checkers.assertions;
        let process = self.targets[target].process.as_ref();
        let is_first = process.is_some_and(|p| assertions.is_first_swap(target, p, next));
        self.observe(&Observation::SwapAsked { target, next, is_first });
    }

    pub(crate) fn plan_target_timer(&mut self, target: usize) {
        let host = self.targets[target].host;
        let life = self.targets[target].life;
        let Some(process) = &self.targets[target].process else { return };
        let (Some(at), arm) = (process.timer, process.arm) else { return };
        if let Some(at) = self.hosts.clocks[host].global(at, self.schedule.now()) {
            self.schedule.at(at, Event::TargetTimer { target, life, arm });
        }
    }

    pub(crate) fn target_timer(&mut self, target: usize, life: u32, arm: u32) {
        let host = self.targets[target].host;
        let local = self.local(host);
        if self.targets[target].life != life || self.targets[target].paused {
            return;
        }
        let Some(process) = &mut self.targets[target].process else { return };
        if process.arm != arm {
            return;
        }
        match process.timer {
            Some(at) if at <= local => {
                process.timer = None;
                self.feed_target(target, vec![PrimaryEvent::Timer]);
            }
            Some(_) => self.plan_target_timer(target),
            None => {}
        }
    }

    fn target_sends(
        &mut self,
        target: usize,
        session: SessionKey,
        bulk: Option<u64>,
        message: ToReplica,
    ) {
        let now = self.schedule.now();
        let Some(process) = &self.targets[target].process else { return };
        let Some(id) = process.sessions.get(&name(session, bulk)).copied() else { return };
        if let ToReplica::Append { entries, .. } = &message {
            for entry in entries {
                self.entry_sent(target, entry);
            }
        }
        self.observe(&Observation::TargetSends { target, session, message: &message });
        if matches!(message, ToReplica::Close)
            && let Some(process) = &mut self.targets[target].process
        {
            process.closes = true;
        }
        if self.trace.is_on() {
            let pool = self.network.connections.get(&id).map_or(usize::MAX, |c| c.pool);
            let text = describe(&message);
            let arrow = if bulk.is_some() { "=>" } else { "->" };
            self.trace.line(now, || format!("  target {target} {arrow} pool {pool}: {text}"));
        }
        match self.network.send_to_pool(now, id, session, &message) {
            Ok(Some(due)) => self.schedule.at(due, Event::ToPool { connection: id }),
            Ok(None) => {}
            Err(error) => {
                let text = describe(&message);
                self.violate("Wire", format!("target {target} cannot say {text}: {error}"));
            }
        }
    }

    fn entry_sent(&mut self, target: usize, entry: &SharedEntry) {
        let Some(process) = &mut self.targets[target].process else { return };
        // A new epoch may begin below what was sent, and lost, in the one before.
        let position = entry.position();
        let is_new = position > process.sent;
        process.sent = process.sent.max(position);
        self.observe(&Observation::EntrySent { target, entry, is_new });
        if let EntryKind::View(view) = &entry.kind {
            self.observe(&Observation::ViewSent { target, lsn: entry.lsn, view });
        }
        if let Err(broken) = self.checkers.lineage.observe(self.setup.run, entry) {
            self.violate(broken.invariant, broken.detail);
        }
    }

    /// Everything that is due at this target, from all its connections, in one batch.
    pub(crate) fn deliver_to_target(&mut self, id: ConnectionId) {
        self.deliver_arrived(id, None);
    }

    /// The same; `by`: what had arrived then, whatever became of the network since.
    pub(super) fn deliver_arrived(&mut self, id: ConnectionId, by: Option<Instant>) {
        let now = self.schedule.now();
        let Some(connection) = self.network.connections.get(&id) else { return };
        let (target, life) = (connection.target, connection.target_life);
        if self.targets[target].life != life || self.targets[target].paused {
            return;
        }
        let Some(process) = &self.targets[target].process else { return };
        let ids: Vec<ConnectionId> = process.sessions.values().copied().collect();
        let to = self.targets[target].host;
        let mut events = Vec::new();
        let mut ended = Vec::new();
        for id in ids {
            let Some(connection) = self.network.connections.get(&id) else { continue };
            let pool = connection.pool;
            let Some(there) = self.pools.get(pool) else { continue };
            let from = there.host;
            let deaf = connection.to_target.deaf || !connection.target_open;
            if deaf || (by.is_none() && self.network.is_blocked(from, to)) {
                continue;
            }
            let (member, is_foreign) = (connection.member, there.is_foreign);
            let bulk = connection.bulk;
            let first = events.len();
            let taken = loop {
                let each = |session, message| {
                    events.push(match bulk {
                        None => PrimaryEvent::Message { session, message },
                        Some(number) => {
                            let bulk = BulkKey { session, number };
                            PrimaryEvent::BulkMessage { bulk, message }
                        }
                    });
                };
                match self.network.take_for_target(by.unwrap_or(now), id, each) {
                    Taken::Some => {}
                    taken => break taken,
                }
            };
            for event in &events[first..] {
                let PrimaryEvent::Message { session, message } = event else {
                    if let PrimaryEvent::BulkMessage { message, .. } = event {
                        let text = brief(message);
                        self.trace
                            .line(now, || format!("  pool {pool} => target {target}: {text}"));
                    }
                    continue;
                };
                let session = *session;
                let seen =
                    Observation::TargetReceives { target, member, session, is_foreign, message };
                self.observe(&seen);
                self.trace
                    .line(now, || format!("  pool {pool} -> target {target}: {}", brief(message)));
            }
            match taken {
                Taken::End => ended.push((id, false)),
                Taken::Refused => ended.push((id, true)),
                Taken::Nothing | Taken::Some => {}
            }
        }
        if !events.is_empty() {
            self.feed_target(target, events);
        }
        for (id, refused) in ended {
            if refused {
                let stream = self.network.connections.get(&id).map(|c| &c.to_target);
                let why = stream.filter(|s| !s.spoiled).map(|s| s.receiver.refusal());
                if let Some(why) = why {
                    let detail = format!("target {target} refuses what a pool sent: {why}");
                    self.violate("Wire", detail);
                }
                if let Some(due) = self.network.send_end(now, Way::ToPool, id) {
                    self.schedule.at(due, Event::ToPool { connection: id });
                }
            }
            self.target_end_lost(id);
        }
    }

    fn target_note(&mut self, target: usize, life: u32, note: PrimaryNote) {
        self.trace.line(self.schedule.now(), || format!("target {target} notes: {note:?}"));
        self.point_noted(target, life, &note);
        self.feed_noted(target, &note);
        let Some(process) = &mut self.targets[target].process else { return };
        match note {
            PrimaryNote::Opening { epoch } => {
                process.serving = None;
                process.tail_lost = false;
                self.observe(&Observation::Opening { target, epoch });
            }
            PrimaryNote::UnflushedTailMayBeLost => process.tail_lost = true,
            PrimaryNote::Serving { epoch, .. } => {
                process.serving = Some(epoch);
                process.has_served = true;
                self.observe(&Observation::Starts { target });
                self.target_starts(target, life, epoch);
            }
            PrimaryNote::Waiting(text) => {
                process.waiting = text;
                self.observe(&Observation::Waits { target });
            }
            PrimaryNote::NotAdmitted { member, refusal } => {
                let too_many = refusal.is_too_many();
                self.observe(&Observation::NotAdmitted { target, member, too_many });
                self.refill(member);
            }
            PrimaryNote::InSync { members } => {
                process.in_sync.clone_from(&members);
                self.note_in_sync(&members);
            }
            PrimaryNote::Dropped { member, .. } => {
                self.observe(&Observation::Dropped { member });
                self.stats.replicas.drops += 1;
            }
            PrimaryNote::Rebuilt { .. } => self.stats.replicas.rebuilds += 1,
            PrimaryNote::Changed { .. } => self.stats.operators.changes_made += 1,
            PrimaryNote::ChangeGivenUp { newcomers } => {
                self.stats.operators.changes_given_up += 1;
                self.observe(&Observation::ChangeGivenUp { target, newcomers: &newcomers });
            }
            PrimaryNote::BadBlock { repaired: true, .. } => self.stats.replicas.repairs += 1,
            // Where an old record rules, a late answer may show that it does; and a new replica may
            // know of a swap before the target that asked for it does.
            PrimaryNote::InvariantRefused { invariant: "MembershipMonotone", .. }
                if self.control.rolled_back
                    || process.grant.version < self.control.record.membership.version => {}
            // Above an old copy of the record each of its replicas has promised more, again and again.
            PrimaryNote::InvariantRefused { invariant: "PromiseMonotone", .. }
                if self.control.rolled_back => {}
            // It knows what was given up; it ends, and another takes its place.
            PrimaryNote::InvariantRefused { invariant: "CommitSurvives", .. }
                if self.operators.recovery.cf_before().is_some() => {}
            PrimaryNote::InvariantRefused { member, invariant } => {
                self.violate(invariant, format!("target {target} refused {member:?}"));
            }
            PrimaryNote::Snapshot { id, outcome } => {
                if let Err(detail) = self.operators.snapshots.answered(id, outcome) {
                    self.violate("SnapshotSurvives", detail);
                }
            }
            PrimaryNote::Reverted { attempt, outcome } => {
                self.revert_ended(target, attempt, outcome);
            }
            PrimaryNote::ClientRefused { client } => self.sharer_refused(client),
            PrimaryNote::BlockLost { lba } => self.observe(&Observation::BlockLost { lba }),
            // A target that was granted under an old copy may say so when the newest is back, and
            // one whose grant came late when the record has gone on since.
            PrimaryNote::ControlPlaneBehind { durable_version }
                if !self.control.rolled_back
                    && durable_version > self.control.record.membership.version =>
            {
                self.violate("MembershipMonotone", "the control plane has not gone back");
            }
            _ => {}
        }
    }

    /// IO starts: in the newest epoch so far, or in one that another has overtaken.
    fn target_starts(&mut self, target: usize, life: u32, epoch: Epoch) {
        self.stats.opens.servings += 1;
        if epoch < self.checkers.durability.served_epoch() {
            self.observe(&Observation::StartsLate { target, epoch });
            return;
        }
        self.observe(&Observation::StartsNewest { target, epoch });
        self.merge_fork(target);
        let forced = self.operators.recovery.takes_effect(epoch);
        let kept = forced.map(|forced| self.held_by_kept(&forced));
        let kept = kept.as_deref();
        self.observe(&Observation::HistoryServed { target, life, epoch, kept });
    }

    /// A replica in the in-sync set that calls itself continuous again holds all that it should.
    /// A listed one that has not been fed since its outage does not.
    fn note_in_sync(&mut self, members: &[Member]) {
        for pool in &mut self.pools {
            let is_continuous =
                pool.process.as_ref().is_some_and(super::pools::Process::is_continuous);
            if members.contains(&pool.member) && is_continuous {
                pool.cache_lost = false;
            }
        }
    }

    fn target_replies(&mut self, target: usize, life: u32, reply: Reply) {
        if self.feed_replied(target, &reply) {
            return;
        }
        let Reply { token, result } = reply;
        let heard = match self.sharers.is_on() {
            true => {
                let tag = token as u32;
                let leaned = !matches!(result, Err(BlockError::NoQuorum | BlockError::Stopped));
                if tag != 0 && leaned {
                    let is_good = result.is_ok();
                    self.observe(&Observation::Answers { target, life, tag, is_good });
                }
                self.sharer_hears(token, result.as_ref().err().copied())
            }
            false => self.clients.tokens.remove(&token).map(|queue| (queue, token as u32)),
        };
        let Some((queue, tag)) = heard else {
            if !self.sharers.is_on() {
                self.violate("OneReply", format!("token {token} was answered twice"));
            }
            return;
        };
        match result {
            Ok(payload) => {
                let data = match payload {
                    Payload::Data(chunks) => chunks,
                    _ => Vec::new(),
                };
                self.observe(&Observation::Answers { target, life, tag, is_good: true });
                self.observe(&Observation::Answered { target, tag, data: &data });
                self.effect_shown(tag);
            }
            Err(error) => {
                self.stats.ios.failed += 1;
                if error == BlockError::OutOfRange || error == BlockError::Misaligned {
                    self.violate("Requests", format!("a good request was refused: {error}"));
                }
                // Without a quorum there is no lease, and a request that is not wanted is answered without one.
                if !matches!(error, BlockError::NoQuorum | BlockError::Stopped) {
                    self.observe(&Observation::Answers { target, life, tag, is_good: false });
                }
                self.observe(&Observation::Failed { target, tag, error });
            }
        }
        self.client_answered(queue, tag);
    }
}

fn ends_a_session(event: &PrimaryEvent) -> bool {
    let ends = |message: &FromReplica| {
        matches!(message, FromReplica::Failed(_) | FromReplica::Closed | FromReplica::Refuse { .. })
    };
    match event {
        PrimaryEvent::Disconnected { .. } => true,
        PrimaryEvent::Message { message, .. } => ends(message),
        _ => false,
    }
}
