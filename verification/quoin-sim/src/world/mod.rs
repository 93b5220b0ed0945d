//! One run: hosts, their clocks and disks, a network, a control plane, targets, replicas and
//! clients under one scheduler. Everything that happens is an [`Event`]; everything that is drawn
//! is drawn from the seed.

mod bulk;
mod checkers;
mod clients;
mod connections;
mod control;
mod copies;
mod copying;
mod durability;
mod faults;
mod fences;
mod groups;
mod growth;
mod health;
mod holes;
mod hosts;
mod limits;
mod lost_disks;
mod members;
mod memory;
mod mirrors;
mod operators;
mod person;
mod points;
mod pool_rounds;
mod pools;
mod processes;
mod pulls;
mod quiesce;
mod recognition;
mod recovery;
mod setup;
mod sharers;
mod snapshots;
mod targets;
mod terms;
mod unexpected_peers;
mod verification;

use quoin_replication::recognition::PoolCounts;
use quoin_types::message::FromReplica;
use quoin_types::{Member, Time};

use self::checkers::Checkers;
use self::clients::Clients;
use self::control::Control;
use self::faults::Faults;
use self::hosts::Hosts;
use self::operators::Operators;
use self::processes::Processes;
use self::setup::Setup;
use self::sharers::{SharerEvent, Sharers};
use crate::control::{Answer, Question, Record};
use crate::faults::Planned;
use crate::network::{ConnectionId, Network};
use crate::random::Random;
use crate::schedule::{Instant, Schedule};
use crate::stats::{Stats, Violation};
use crate::trace::Trace;

pub(crate) use copies::Copies;
pub(crate) use groups::Groups;
pub(crate) use mirrors::Mirrors;
pub use setup::{FAULTS_MAX, Mutant, RunOptions, StoreKind};

/// Everything that can happen. `life` numbers the lives of a process: events of an older life
/// are void.
#[derive(Debug)]
pub(crate) enum Event {
    StartTarget {
        target: usize,
    },
    StartPool {
        pool: usize,
    },
    Connecting {
        connection: ConnectionId,
    },
    Refused {
        target: usize,
        life: u32,
        connection: ConnectionId,
    },
    ToPool {
        connection: ConnectionId,
    },
    ToTarget {
        connection: ConnectionId,
    },
    /// An end learns that the connection is gone.
    TargetEndLost {
        connection: ConnectionId,
    },
    PoolEndLost {
        connection: ConnectionId,
    },
    TargetTimer {
        target: usize,
        life: u32,
        arm: u32,
    },
    PoolTimer {
        pool: usize,
        life: u32,
        arm: u32,
    },
    SyncDone {
        pool: usize,
        life: u32,
        ticket: quoin_replication::replica::store::SyncTicket,
    },
    /// A read that nobody waits for ends.
    Fetched {
        pool: usize,
        life: u32,
        fetch: quoin_store::disk::fetch::Fetch,
    },
    /// The pool tells the controller how it is, and looks again at what it could not read.
    PoolReport {
        pool: usize,
        life: u32,
    },
    /// The controller hears a report of the pool.
    PoolTold {
        pool: usize,
        life: u32,
        counts: PoolCounts,
    },
    /// The pool hears what the controller makes of its start.
    PoolJudged {
        pool: usize,
        life: u32,
        rolled_back: bool,
        mark: u64,
    },
    PoolWaited {
        pool: usize,
        life: u32,
    },
    PoolWiped {
        pool: usize,
    },
    PoolIdle {
        pool: usize,
        life: u32,
    },
    Asked {
        target: usize,
        life: u32,
        number: u64,
        question: Box<Question>,
    },
    Answered {
        target: usize,
        life: u32,
        number: u64,
        answer: Box<Answer>,
    },
    /// The answer to a swap comes once more, after the next swap was asked for.
    SwappedAgain {
        target: usize,
        life: u32,
        answer: Box<Answer>,
    },
    AnswerTimeout {
        target: usize,
        life: u32,
        number: u64,
        question: Box<Question>,
    },
    Recreate {
        pool: usize,
    },
    SendDesired,
    Operate,
    Recovery,
    Grow,
    LimitMemory,
    /// A pool receives the fence.
    DeliverFence {
        pool: usize,
    },
    FenceNetwork,
    LiftFence,
    EnforceFence,
    Snapshot,
    SendSnapshots,
    Revert,
    SendRevert,
    Pull,
    SendPull,
    SendSize,
    ChangeDurability,
    SendOptions,
    Client {
        queue: usize,
        turn: u32,
    },
    MoveClient {
        queue: usize,
    },
    Fault(Planned),
    /// A fault that lasts comes to its end.
    Mend(Mend),
    FaultsEnd,
    CheckQuiesce,
    Process(processes::ProcessEvent),
    Sharer(SharerEvent),
}

#[derive(Debug, Clone)]
pub(crate) enum Mend {
    Unblock(Vec<(usize, usize)>),
    Storm,
    BulkStorm,
    ResumeTarget(usize),
    ResumePool(usize),
    Disk(usize),
    Clock(usize),
    ControlPlane,
    ControlRecord,
    KillTarget { target: usize, life: u32 },
    KillPool { pool: usize, life: u32 },
    Cut(ConnectionId),
}

pub(crate) struct TargetHost {
    pub host: usize,
    pub life: u32,
    pub process: Option<targets::Process>,
    pub paused: bool,
}

pub(crate) struct PoolHost {
    pub host: usize,
    pub life: u32,
    pub storage: Box<dyn crate::storage::Storage>,
    /// The replica that the pool holds now.
    pub member: Member,
    /// It lost the replica that the record names, and has not made another one yet.
    pub gone: bool,
    pub process: Option<pools::Process>,
    pub paused: bool,
    pub outage: crate::storage::Outage,
    pub slow: u64,
    /// Since when what it holds may be less than it applied; for the check of reported losses.
    pub cache_lost: bool,
    /// Its process has ended with all on media, and has recorded a clean stop.
    pub ended_in_order: bool,
    /// Its disk has refused to read at some time.
    pub reads_failed: bool,
    /// Its disk has rotted or lied.
    pub hurt: bool,
    /// The replica whose disk was put back to an older image.
    pub rolled_back: Option<quoin_types::ReplicaGuid>,
    /// Its replica is of another volume.
    pub is_foreign: bool,
    /// Syncs begin and do not end.
    pub stuck: bool,
    pub starts: recognition::Starts,
}

/// All that a run consists of. A part owns its fields; what spans parts is a method of `World`, in
/// the file of its subject.
pub(crate) struct World {
    pub setup: Setup,
    pub random: Random,
    pub schedule: Schedule<Event>,
    pub stats: Stats,
    pub trace: Trace,
    pub hosts: Hosts,
    pub network: Network,
    pub control: Control,
    pub targets: Vec<TargetHost>,
    pub pools: Vec<PoolHost>,
    pub processes: Processes,
    pub clients: Clients,
    pub sharers: Sharers,
    pub operators: Operators,
    pub faults: Faults,
    pub checkers: Checkers,
}

impl World {
    pub fn now(&self) -> Instant {
        self.schedule.now()
    }

    pub fn local(&self, host: usize) -> Time {
        self.hosts.local(host, self.now())
    }

    pub fn violate(&mut self, rule: &str, detail: impl Into<String>) {
        if self.checkers.violation.is_none() {
            let detail = detail.into();
            self.trace.line(self.schedule.now(), || format!("VIOLATION {rule}: {detail}"));
            self.checkers.violation =
                Some(Violation { seed: self.setup.seed, rule: rule.into(), detail });
        }
    }

    /// Runs to the end; the violation, if there was one, is in `self`.
    pub fn run(&mut self) {
        while !self.is_over() {
            self.step();
        }
        self.finish();
    }

    pub fn has_failed(&self) -> bool {
        self.checkers.violation.is_some()
    }

    pub fn is_over(&self) -> bool {
        self.has_failed() || self.clients.quiesce.done()
    }

    /// Time of the next event.
    pub fn next_at(&self) -> Option<Instant> {
        self.schedule.next_at()
    }

    /// Lets the next event happen.
    pub fn step(&mut self) {
        let Some(event) = self.schedule.take() else {
            return self.violate("Liveness", "nothing is going to happen any more");
        };
        self.stats.events += 1;
        if self.stats.events > setup::EVENTS_MAX {
            return self.violate("Liveness", "more events than any run needs: a message loop?");
        }
        self.trace.mix(self.schedule.now(), self.stats.events);
        self.handle(event);
        if self.faults.is_any_armed() {
            self.count_down();
        }
    }

    /// Checks the end, and counts.
    pub fn finish(&mut self) {
        if self.checkers.violation.is_none() {
            self.check_end();
        }
        self.count();
    }

    /// Takes over the counts of the parts.
    pub fn count(&mut self) {
        self.stats.seeds = 1;
        self.stats.simulated_ns = self.now();
        self.stats.ios.checked = self.checkers.history.checked;
        self.stats.opens.tails_lost = self.checkers.durability.tails_lost();
        self.stats.situations = self.checkers.situations;
        self.stats.ios.undecided = self.checkers.history.undecided;
        self.stats.messages = self.network.counts;
        for pool in &self.pools {
            self.stats.disks.merge(&pool.storage.counts());
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::StartTarget { target } => self.start_target(target),
            Event::StartPool { pool } => self.start_pool(pool),
            Event::Connecting { connection } => self.connecting(connection),
            Event::Refused { target, life, connection } => self.refused(target, life, connection),
            Event::ToPool { connection } => self.deliver_to_pool(connection),
            Event::ToTarget { connection } => self.deliver_to_target(connection),
            Event::TargetEndLost { connection } => self.target_end_lost(connection),
            Event::PoolEndLost { connection } => self.pool_end_lost(connection),
            Event::TargetTimer { target, life, arm } => self.target_timer(target, life, arm),
            Event::PoolTimer { pool, life, arm } => self.pool_timer(pool, life, arm),
            Event::SyncDone { pool, life, ticket } => self.sync_done(pool, life, ticket),
            Event::Fetched { pool, life, fetch } => self.fetched(pool, life, fetch),
            Event::PoolReport { pool, life } => self.pool_report(pool, life),
            Event::PoolTold { pool, life, counts } => self.pool_told(pool, life, counts),
            Event::PoolJudged { pool, life, rolled_back, mark } => {
                self.pool_judged(pool, life, rolled_back, mark);
            }
            Event::PoolWaited { pool, life } => self.pool_waited(pool, life),
            Event::PoolWiped { pool } => self.pool_wiped(pool),
            Event::PoolIdle { pool, life } => self.pool_idle(pool, life),
            Event::Asked { target, life, number, question } => {
                self.asked(target, life, number, &question);
            }
            Event::Answered { target, life, number, answer } => {
                self.answered(target, life, number, *answer);
            }
            Event::SwappedAgain { target, life, answer } => {
                self.swapped_again(target, life, *answer);
            }
            Event::AnswerTimeout { target, life, number, question } => {
                self.answer_timeout(target, life, number, &question);
            }
            Event::Recreate { pool } => self.recreate(pool),
            Event::SendDesired => self.send_desired(),
            Event::Operate => self.operate(),
            Event::Recovery => self.recovery(),
            Event::Grow => self.grow(),
            Event::LimitMemory => self.limit_memory(),
            Event::DeliverFence { pool } => self.deliver_fence(pool),
            Event::FenceNetwork => self.fence_network(),
            Event::LiftFence => self.lift_fence(),
            Event::EnforceFence => self.enforce_fence(),
            Event::Snapshot => self.request_snapshot(),
            Event::SendSnapshots => self.send_snapshots(),
            Event::Revert => self.request_revert(),
            Event::SendRevert => self.send_revert(),
            Event::Pull => self.request_pull(),
            Event::SendPull => self.send_pull(),
            Event::SendSize => self.send_size(),
            Event::ChangeDurability => self.change_durability(),
            Event::SendOptions => self.send_options(),
            Event::Client { queue, turn } => self.client_turn(queue, turn),
            Event::MoveClient { queue } => self.move_client(queue),
            Event::Fault(planned) => self.arm(planned),
            Event::Mend(mend) => self.mend(mend),
            Event::FaultsEnd => self.faults_end(),
            Event::CheckQuiesce => self.check_quiesce(),
            Event::Process(event) => self.process_event(event),
            Event::Sharer(event) => self.sharer_event(event),
        }
    }

    pub(crate) fn pool_of(&self, member: Member) -> Option<usize> {
        let exact = self.pools.iter().position(|p| p.member == member);
        exact.or_else(|| self.pools.iter().position(|p| p.member.id == member.id))
    }
}

/// Pools that run and hold a replica that the record knows.
fn known_pools(record: &Record, pools: &[PoolHost]) -> Vec<usize> {
    let known = &record.membership.known;
    let holds = |p: &&PoolHost| !p.gone && p.process.is_some() && known.contains(&p.member);
    pools.iter().enumerate().filter(|(_, p)| holds(p)).map(|(at, _)| at).collect()
}

/// One line for a message, short enough to read in a trace.
pub(crate) fn brief(message: &FromReplica) -> String {
    match message {
        FromReplica::OpenAck(ack) => format!(
            "OpenAck at {}/{} stable {} durable {} base {}{}{}",
            ack.position.epoch,
            ack.position.lsn,
            ack.stable,
            ack.durable,
            ack.base,
            if ack.continuous { " continuous" } else { "" },
            if ack.quorum { "" } else { " quorum off" },
        ),
        FromReplica::Data { id, at, slots, .. } => {
            format!("Data #{id} at {at}, {} slots", slots.len())
        }
        FromReplica::Fetched { entries, gone, .. } => {
            format!("Fetched {} entries{}", entries.len(), if *gone { ", gone" } else { "" })
        }
        FromReplica::Pulled { slots, cursor, gone, .. } => {
            format!(
                "Pulled {} slots to {cursor:?}{}",
                slots.len(),
                if *gone { ", gone" } else { "" }
            )
        }
        other => format!("{other:?}"),
    }
}
