//! The end of a run: faults have stopped, everything must come back by itself, every block is
//! read once more, and the replicas must be the same. Then everything is trimmed, and all room
//! must come back.

use quoin_types::Lsn;

use super::checkers::Observation;
use super::{Event, World};
use crate::content::SECTORS;
use crate::schedule::{Instant, MILLISECOND, SECOND};
use crate::workload::Draft;

/// Simulated time in which everything has to be in sync again after the last fault.
const RECOVERY_MAX: u64 = 180 * SECOND;
/// The same where points are copied meanwhile.
const COPIED_MAX: u64 = 900 * SECOND;
/// Blocks that are copied, or compared, in a second on the slowest disks with cold caches: a read for each,
/// one after the other, and pauses as long as these or three times so.
const COLD_BLOCKS_PER_SECOND: u64 = 10;
/// Time in which clients write without pauses. After it, while a replica is not in sync, they leave
/// [`REST`] between requests. Writes that fill the window in less time than a member needs for two
/// syncs outrun it for ever where the others are enough for CF: allowed, and no configuration of a
/// product.
const UNRESTED: u64 = RECOVERY_MAX / 2;
const REST: u64 = 250 * MILLISECOND;
/// Simulated time after which abandoned rebuilds have given up what they pinned.
const PARKED_MAX: u64 = 700 * SECOND;
/// Blocks of one read of the last round.
const READ_BLOCKS: u64 = 32;
const TRIM_BLOCKS: u64 = 128;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    #[default]
    Faults,
    /// Clients go on; replicas return.
    Recovering,
    /// Every block is read, then flushed.
    Reading,
    /// No more requests: replicas come to the same end.
    Quiet,
    /// The target compares all replicas.
    Verifying,
    /// Every block is trimmed, then flushed.
    Emptying,
    /// Replicas come to the same end again, and room comes back.
    Empty,
    Done,
}

#[derive(Debug, Default)]
pub(crate) struct Quiesce {
    stage: Stage,
    since: Instant,
    /// A last round: the next block to read or trim, requests to repeat, the flush.
    next_block: u64,
    again: Vec<Draft>,
    flushed: bool,
    /// Queues that were answered since faults stopped.
    resumed: Vec<bool>,
}

impl Quiesce {
    /// Shortest pause of a client between an answer and its next request.
    pub fn rest(&self, now: Instant) -> u64 {
        let rested = self.stage == Stage::Recovering && now - self.since > UNRESTED;
        if rested { REST } else { 0 }
    }

    pub fn done(&self) -> bool {
        self.stage == Stage::Done
    }

    /// Requests follow each other without pause.
    pub fn in_a_hurry(&self, asked: u64, ios_min: u64) -> bool {
        matches!(self.stage, Stage::Reading | Stage::Emptying)
            || (self.stage == Stage::Recovering && asked < 2 * ios_min)
    }

    /// `Some(None)`: whatever the workload draws; `None`: no more.
    pub fn next_draft(&mut self, blocks: u64) -> Option<Option<Draft>> {
        match self.stage {
            Stage::Faults | Stage::Recovering => Some(None),
            Stage::Reading | Stage::Emptying => {
                if let Some(draft) = self.again.pop() {
                    return Some(Some(draft));
                }
                if self.next_block < blocks {
                    let first = self.next_block;
                    let reads = self.stage == Stage::Reading;
                    let most = if reads { READ_BLOCKS } else { TRIM_BLOCKS };
                    let count = most.min(blocks - first);
                    self.next_block += count;
                    let whole = SECTORS as u64;
                    let (sector, sectors) = (first * whole, count * whole);
                    return Some(Some(match reads {
                        true => Draft::Read { sector, sectors },
                        false => Draft::Trim { sector, sectors, fua: false },
                    }));
                }
                if std::mem::replace(&mut self.flushed, true) {
                    return None;
                }
                Some(Some(Draft::Flush))
            }
            Stage::Quiet | Stage::Verifying | Stage::Empty | Stage::Done => None,
        }
    }

    pub fn answered(&mut self, queue: usize) {
        if let Some(resumed) = self.resumed.get_mut(queue) {
            *resumed = true;
        }
    }

    pub fn given_back(&mut self, draft: Draft) {
        let last = match draft {
            Draft::Read { .. } => self.stage == Stage::Reading,
            Draft::Trim { .. } => self.stage == Stage::Emptying,
            Draft::Flush => matches!(self.stage, Stage::Reading | Stage::Emptying),
            Draft::Write { .. } | Draft::Zero { .. } => false,
        };
        if last {
            self.again.push(draft);
        }
    }

    fn begin_round(&mut self, stage: Stage, now: Instant) {
        (self.stage, self.since) = (stage, now);
        (self.next_block, self.flushed) = (0, false);
    }
}

impl World {
    pub(crate) fn faults_end(&mut self) {
        self.faults.end();
        self.mend_all();
        self.remove_unexpected();
        self.clients.quiesce.stage = Stage::Recovering;
        self.clients.quiesce.since = self.now();
        self.clients.quiesce.resumed = vec![false; self.clients.queues.len()];
        self.trace.line(self.schedule.now(), || "no more faults".into());
        self.schedule.after(100 * MILLISECOND, Event::CheckQuiesce);
    }

    pub(crate) fn check_quiesce(&mut self) {
        let now = self.now();
        let waited = now - self.clients.quiesce.since;
        let stage = self.clients.quiesce.stage;
        match stage {
            Stage::Recovering if self.recovered().is_ok() => self.begin_round(Stage::Reading),
            Stage::Reading | Stage::Emptying
                if self.clients.quiesce.flushed
                    && self.clients.queues.iter().all(|q| q.open.is_none()) =>
            {
                let quiet = if stage == Stage::Reading { Stage::Quiet } else { Stage::Empty };
                (self.clients.quiesce.stage, self.clients.quiesce.since) = (quiet, now);
            }
            Stage::Quiet if self.at_rest().is_ok() && waited > SECOND => {
                self.observe(&Observation::AtRest);
                (self.clients.quiesce.stage, self.clients.quiesce.since) = (Stage::Verifying, now);
            }
            Stage::Verifying if self.verified() => {
                self.delete_snapshots();
                self.begin_round(Stage::Emptying);
            }
            Stage::Empty if self.is_empty().is_ok() && waited > SECOND => {
                self.observe(&Observation::Emptied);
                self.clients.quiesce.stage = Stage::Done;
                return;
            }
            Stage::Empty if waited < PARKED_MAX => {}
            _ if waited > self.stage_max(stage) => {
                let why = match stage {
                    Stage::Recovering => self.recovered().err(),
                    Stage::Quiet => self.at_rest().err(),
                    Stage::Empty => self.is_empty().err(),
                    _ => None,
                };
                let why = why.unwrap_or_else(|| "requests stay open".into());
                let owner = self.control.record.owner;
                let process = self.targets[owner].process.as_ref();
                let words = process.map_or_else(
                    || "its target does not run".into(),
                    |p| format!("its target waits for {:?}; {:?}", p.waiting, p.target.status()),
                );
                self.violate("Liveness", format!("{why}; {words}"));
                return;
            }
            _ => {}
        }
        self.schedule.after(100 * MILLISECOND, Event::CheckQuiesce);
    }

    /// Simulated time that a stage may take: more where all of a volume is copied, or compared, from cold
    /// disks.
    fn stage_max(&self, stage: Stage) -> u64 {
        if self.operators.copying.is_on() {
            // Two sides wait for each other, and for people.
            return COPIED_MAX;
        }
        let reads_all = matches!(stage, Stage::Recovering | Stage::Verifying);
        match reads_all && self.setup.is_cold() {
            true => RECOVERY_MAX.max(self.setup.volume_blocks * SECOND / COLD_BLOCKS_PER_SECOND),
            false => RECOVERY_MAX,
        }
    }

    fn begin_round(&mut self, stage: Stage) {
        self.clients.quiesce.begin_round(stage, self.schedule.now());
        for queue in 0..self.clients.queues.len() {
            let turn = self.clients.queues[queue].turn;
            self.schedule.after(0, Event::Client { queue, turn });
        }
    }

    /// At rest, and no boundary of a rebuild keeps what was overwritten.
    fn is_empty(&mut self) -> Result<(), String> {
        self.operators.snapshots.settled()?;
        self.at_rest()?;
        for pool in self.known_pools() {
            if self.pools[pool].process.as_ref().is_some_and(|process| process.syncing) {
                return Err(format!("pool {pool} is in the middle of a sync"));
            }
            let guid = self.pools[pool].member.guid;
            let mut kept = Vec::new();
            self.pools[pool].storage.with(guid, &mut |store| kept = store.snapshots());
            if let Some(snapshot) = kept.first() {
                return Err(format!("pool {pool} keeps {snapshot:?}"));
            }
        }
        Ok(())
    }

    /// IO goes on for every client, enough was asked, every replica is in sync.
    fn recovered(&self) -> Result<(), String> {
        self.operators.copying.settled()?;
        let owner = self.control.record.owner;
        let Some(process) = &self.targets[owner].process else {
            return Err("the owner's target does not run".into());
        };
        if process.serving.is_none() {
            return Err("the owner's target does not serve".into());
        }
        if let Some(queue) = self.clients.quiesce.resumed.iter().position(|r| !r) {
            return Err(format!("client {queue} was not answered since the faults stopped"));
        }
        if let Some(member) =
            self.control.record.membership.known.iter().find(|m| !process.in_sync.contains(m))
        {
            return Err(format!("replica {} is not in sync", member.id));
        }
        self.control.desired_reached()?;
        let (has, wanted) = (self.setup.volume_blocks, self.setup.config.volume_blocks);
        if has < wanted {
            return Err(format!("the volume has {has} blocks and is to have {wanted}"));
        }
        if self.known_pools().len() < self.control.record.membership.known.len() {
            return Err("a pool does not hold its known replica".into());
        }
        let answered =
            self.checkers.history.len() as u64 - self.stats.ios.open - self.stats.ios.failed;
        if answered < self.setup.ios_min + self.clients.queues.len() as u64 {
            return Err("not enough was asked yet".into());
        }
        // Where a late request took an epoch that nobody opens by, no report counts before the next open.
        if self.control.record.epoch <= self.checkers.durability.served_epoch() {
            self.operators.durability.settled()?;
        }
        self.operators.pulls.settled()?;
        self.operators.snapshots.settled()
    }

    /// Pools that run and hold a known replica.
    fn known_pools(&self) -> Vec<usize> {
        super::known_pools(&self.control.record, &self.pools)
    }

    /// Every replica holds everything, knows that it is stable, and nothing is under way.
    fn at_rest(&mut self) -> Result<(), String> {
        let mut positions = Vec::new();
        for pool in self.known_pools() {
            let guid = self.pools[pool].member.guid;
            let mut found = None;
            self.pools[pool].storage.with(guid, &mut |store| {
                let state = store.state();
                found = Some((state.position, state.chain, state.stable));
            });
            let process = self.pools[pool].process.as_ref();
            if !process.is_some_and(super::pools::Process::is_continuous) {
                return Err(format!("pool {pool} is in sync and never continuous again"));
            }
            positions.push(found.ok_or_else(|| format!("pool {pool} has no replica"))?);
        }
        if positions.windows(2).any(|w| (w[0].0, w[0].1) != (w[1].0, w[1].1)) {
            return Err(format!("replicas stay at different positions: {positions:?}"));
        }
        if let Some((position, ..)) = positions.iter().find(|p| p.2 != p.0.lsn) {
            let stable: Vec<Lsn> = positions.iter().map(|p| p.2).collect();
            return Err(format!("stable never reaches {:?}: {stable:?}", position.lsn));
        }
        Ok(())
    }
}
