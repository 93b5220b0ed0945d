//! Rules of a run. A checker receives events as observations and owns the state that it alone reads; it
//! reads everything else from the scene.

mod admissions;
mod assertions;
mod at_rest;
mod durability;
mod fences;
mod limits;
mod processes;
mod rebuilds;
mod retired;
mod terms;

use bytes::Bytes;
use quoin_replication::pool_host::access::Lane;
use quoin_replication::primary::VerifyReport;
use quoin_replication::replica::store::ReplicaIdentity;
use quoin_types::block::BlockError;
use quoin_types::entry::SharedEntry;
use quoin_types::message::{FromReplica, ToReplica};
use quoin_types::{
    Desired, Epoch, Lsn, Member, Membership, ReplicaGuid, SessionKey, Term, Time, View,
};

use super::control::Control;
use super::hosts::Hosts;
use super::operators::Operators;
use super::setup::Setup;
use super::targets::Process;
use super::{PoolHost, TargetHost, World};
use crate::content::Tag;
use crate::history::History;
use crate::lineage::{Broken, Lineage, Path};
use crate::scaleup::Situations;
use crate::schedule::Instant;
use crate::stats::Violation;

/// A connection of a pool: its session, and its number if it is a bulk connection.
pub(crate) type Connected = (SessionKey, Option<u64>);

/// A counted replica before sessions ended in a target's batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostInBatch {
    /// The number of the batch's actions that came before.
    pub before: usize,
    pub member: Member,
    pub applied: Lsn,
    /// Entries up to this one were committed by then.
    pub committed: Lsn,
}

/// Something that happened, shown to the checkers before the world continues.
#[derive(Debug)]
pub(crate) enum Observation<'a> {
    TargetStarted {
        target: usize,
    },
    /// The control plane has granted an epoch.
    EpochGranted {
        by_former: bool,
        epoch: Epoch,
    },
    /// A target has received the grant that it waits for.
    Granted {
        target: usize,
        membership: &'a Membership,
    },
    /// The control plane has executed a question; how the record was before.
    RecordExecuted {
        before: &'a Membership,
        leaving: &'a [Member],
    },
    /// A person has forced a change, under a new epoch.
    RecordForced {
        retired: &'a [ReplicaGuid],
        epoch: Epoch,
    },
    /// A target is about to ask for a membership; `is_first`: not the same one again.
    SwapAsked {
        target: usize,
        next: &'a Membership,
        is_first: bool,
    },
    /// A target has received how the record is after a swap.
    SwapAnswered {
        target: usize,
        version: u64,
        record: &'a Membership,
    },
    DesiredSent {
        target: usize,
        desired: &'a Desired,
    },
    Opening {
        target: usize,
        epoch: Epoch,
    },
    Dialled {
        target: usize,
        member: Member,
        session: SessionKey,
        is_bulk: bool,
    },
    SessionEnded {
        target: usize,
        session: SessionKey,
    },
    /// A session ended with a replica whose quorum is off, and the target has handled that.
    QuorumOffLost {
        target: usize,
    },
    /// A target's next entry; `is_new`: it has sent none of this position before.
    EntrySent {
        target: usize,
        entry: &'a SharedEntry,
        is_new: bool,
    },
    /// The View of an entry that was observed as sent.
    ViewSent {
        target: usize,
        lsn: Lsn,
        view: &'a View,
    },
    TargetSends {
        target: usize,
        session: SessionKey,
        message: &'a ToReplica,
    },
    TargetReceives {
        target: usize,
        member: Member,
        session: SessionKey,
        is_foreign: bool,
        message: &'a FromReplica,
    },
    /// A target has done what a batch of events asks for. Before: whom it drops in the batch, and
    /// how far counted replicas were before sessions ended in it.
    BatchBegins {
        dropped: Vec<Member>,
        lost: Vec<LostInBatch>,
    },
    ActionBegins {
        index: usize,
    },
    ActionsDone {
        target: usize,
    },
    BatchEnded {
        target: usize,
    },
    Dropped {
        member: Member,
    },
    /// A target waits for something before it opens.
    Waits {
        target: usize,
    },
    NotAdmitted {
        target: usize,
        member: Member,
        too_many: bool,
    },
    ChangeGivenUp {
        target: usize,
        newcomers: &'a [Member],
    },
    /// A target starts IO.
    Starts {
        target: usize,
    },
    /// A target starts IO in an epoch that is older than one that did.
    StartsLate {
        target: usize,
        epoch: Epoch,
    },
    /// A target starts IO in the newest epoch so far.
    StartsNewest {
        target: usize,
        epoch: Epoch,
    },
    /// The history that it starts IO on; `kept`: those of the replicas that a forced change kept.
    HistoryServed {
        target: usize,
        life: u32,
        epoch: Epoch,
        kept: Option<&'a [Path]>,
    },
    /// A target answers, whatever it answers.
    Answers {
        target: usize,
        life: u32,
        tag: Tag,
        is_good: bool,
    },
    Answered {
        target: usize,
        tag: Tag,
        data: &'a [Bytes],
    },
    /// A write of the serving target is acknowledged at this LSN.
    Acknowledged {
        target: usize,
        lsn: Lsn,
    },
    Failed {
        target: usize,
        tag: Tag,
        error: BlockError,
    },
    BlockLost {
        lba: u64,
    },
    /// A pool's process starts with what its replica has promised; zero where it has none.
    PoolStarts {
        pool: usize,
        promised: Epoch,
        has_replica: bool,
    },
    ReplicaMade {
        pool: usize,
    },
    PoolReceives {
        pool: usize,
        session: SessionKey,
        message: &'a ToReplica,
        at: Time,
    },
    /// A pool takes an Open.
    OpenTaken {
        pool: usize,
        session: SessionKey,
    },
    PoolSends {
        pool: usize,
        session: SessionKey,
        message: &'a FromReplica,
    },
    /// A pool has let a session in by a grant of this term.
    LetIn {
        pool: usize,
        term: Term,
    },
    FenceDelivered {
        pool: usize,
        epoch: Epoch,
        at_once: bool,
    },
    /// A pool has received something that is no Append, for the replica that its connection named.
    Claimed {
        pool: usize,
        target: usize,
        member: Member,
        lane: Lane,
        message: &'a ToReplica,
    },
    /// Orders for another volume that name the replica of this one have reached its pool.
    OrderedForAnother {
        pool: usize,
        member: Member,
        held: &'a ReplicaIdentity,
    },
    /// A dial of this volume begins, and waited since `added`.
    DialBegins {
        target: usize,
        pool: usize,
        added: Instant,
        is_over: bool,
    },
    /// A dial of another volume begins, in the target's process.
    NeighbourDials {
        target: usize,
        pool: usize,
    },
    /// A dial of any volume has ended.
    DialEnded {
        target: usize,
        pool: usize,
    },
    /// A pool has served a chunk while one of this volume waited.
    ChunkServed {
        pool: usize,
        is_own: bool,
    },
    /// A client's request came to the limits of a volume.
    LimitAsked {
        target: usize,
        queue: usize,
        token: u64,
    },
    /// It waits for them.
    LimitHeld {
        target: usize,
        at: Time,
    },
    /// A request has passed the limits.
    LimitPassed {
        target: usize,
        at: Time,
        token: u64,
        bytes: u64,
    },
    /// The timer of the limits was due.
    LimitTurn {
        target: usize,
        passed: usize,
    },
    /// A client is gone, and what it waited for.
    LimitForgotten {
        target: usize,
        queue: usize,
    },
    /// A pool has done what an Open asks for; the connections that it has open: their sessions, and
    /// the numbers of bulk connections.
    Connected {
        pool: usize,
        open: &'a [Connected],
    },
    /// No client was attached, and the volume shows a snapshot again.
    Reverted {
        target: usize,
        life: u32,
    },
    /// Every block was read and flushed, and nothing is under way.
    AtRest,
    Verified {
        report: &'a VerifyReport,
    },
    /// Every block was trimmed, and nothing is under way.
    Emptied,
}

/// The world as checkers see it.
pub(crate) struct Scene<'a> {
    pub now: Instant,
    pub setup: &'a Setup,
    pub hosts: &'a Hosts,
    pub control: &'a Control,
    pub operators: &'a Operators,
    pub targets: &'a [TargetHost],
    /// Their storage is read, and nothing else of them changed.
    pub pools: &'a mut [PoolHost],
    /// The newest epoch that ever served.
    pub served_epoch: Epoch,
    pub lineage: &'a Lineage,
    pub history: &'a mut History,
    pub situations: &'a mut Situations,
    /// Observations that a checker derived, to be shown next.
    pub follows: Vec<Observation<'static>>,
}

impl Scene<'_> {
    pub fn process(&self, target: usize) -> Option<&Process> {
        self.targets[target].process.as_ref()
    }

    pub fn local(&self, host: usize) -> Time {
        self.hosts.local(host, self.now)
    }

    /// How many must hold what is acknowledged, by the newest record.
    pub fn cf_in_force(&self) -> usize {
        let ruling = usize::from(self.control.record.membership.cf);
        let backup = self.control.backup.as_ref();
        let kept = backup.map(|record| usize::from(record.membership.cf));
        let before = self.operators.recovery.cf_before();
        kept.into_iter().chain(before).fold(ruling, usize::min)
    }

    /// Returns true if the disks of a whole in-sync set have failed reads. Rot spoils one replica
    /// only, and others hold the block.
    pub fn may_be_unreadable(&self) -> bool {
        self.targets.iter().filter_map(|t| t.process.as_ref()).any(|process| {
            process
                .in_sync
                .iter()
                .all(|member| self.pools.iter().any(|p| p.member == *member && p.reads_failed))
        })
    }

    pub fn may_be_damaged(&self, pool: usize) -> bool {
        self.setup.may_be_damaged(pool)
    }

    /// Pools that run and hold a known replica.
    pub fn known_pools(&self) -> Vec<usize> {
        super::known_pools(&self.control.record, self.pools)
    }
}

/// Holds a run to some of its rules.
pub(crate) trait Checker {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken>;

    /// The run is over.
    fn at_end(&mut self, _scene: &mut Scene<'_>) -> Result<(), Broken> {
        Ok(())
    }
}

fn broken(invariant: &'static str, detail: impl Into<String>) -> Result<(), Broken> {
    Err(Broken { invariant, detail: detail.into() })
}

/// The checkers, and what they read of the run so far.
#[derive(Default)]
pub(crate) struct Checkers {
    pub violation: Option<Violation>,
    pub history: History,
    pub lineage: Lineage,
    pub situations: Situations,
    pub durability: durability::Durability,
    pub assertions: assertions::Assertions,
    pub admissions: admissions::Admissions,
    at_rest: at_rest::AtRest,
    fences: fences::FenceRules,
    former_targets: fences::FormerTargets,
    limits: limits::LimitRules,
    processes: processes::ProcessRules,
    rebuilds: rebuilds::RebuildRules,
    retired: retired::Retired,
    terms: terms::TermRules,
}

impl World {
    /// Shows the checkers what happens. The first rule that is broken is the violation.
    pub(crate) fn observe(&mut self, seen: &Observation<'_>) {
        let follows = self.check(|checker, scene| checker.on(scene, seen));
        for seen in follows {
            self.observe(&seen);
        }
    }

    /// The run is over: what remains is checked.
    pub(super) fn check_end(&mut self) {
        self.check(|checker, scene| checker.at_end(scene));
    }

    fn check(
        &mut self,
        mut each: impl FnMut(&mut dyn Checker, &mut Scene<'_>) -> Result<(), Broken>,
    ) -> Vec<Observation<'static>> {
        let Checkers {
            violation: _,
            history,
            lineage,
            situations,
            durability,
            assertions,
            admissions,
            at_rest,
            fences,
            former_targets,
            limits,
            processes,
            rebuilds,
            retired,
            terms,
        } = &mut self.checkers;
        let mut scene = Scene {
            now: self.schedule.now(),
            setup: &self.setup,
            hosts: &self.hosts,
            control: &self.control,
            operators: &self.operators,
            targets: &self.targets,
            pools: &mut self.pools,
            served_epoch: durability.served_epoch(),
            lineage,
            history,
            situations,
            follows: Vec::new(),
        };
        let all: [&mut dyn Checker; 11] = [
            durability,
            assertions,
            fences,
            former_targets,
            terms,
            admissions,
            retired,
            at_rest,
            processes,
            limits,
            rebuilds,
        ];
        let failed = all.into_iter().find_map(|checker| each(checker, &mut scene).err());
        let follows = scene.follows;
        match failed {
            Some(broken) => {
                self.violate(broken.invariant, broken.detail);
                Vec::new()
            }
            None => follows,
        }
    }
}
