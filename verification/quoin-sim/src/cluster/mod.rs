//! A control plane with many volumes, nodes and pools and no data path, for the swarm `control`:
//! everything that decides who may open a volume, driven through `quoin-cluster`.
//!
//! Orchestrators and the controller's own tasks observe at one moment and change the record at a later
//! one, so they race each other; nodes and pools hear and report when their links let them; the records
//! go back to an older copy at times, and a recovery follows. What truly happened is kept apart
//! ([`truth`]), and each decision is held against it.

mod liars;
mod members;
mod records;
mod recovery;
mod truth;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quoin_cluster::ownership::attachment::Publish;
use quoin_cluster::ownership::epochs::{Acquire, MembershipSwap};
use quoin_cluster::ownership::liveness::Hearing;
use quoin_cluster::records::{Discarded, RecoveryRecord, ReplicaRecord, TokenRecord, VolumeRecord};
use quoin_types::{Member, ReplicaGuid, Term, Time, VolumeId};

use crate::random::Random;
use crate::schedule::{MILLISECOND, SECOND, Schedule};
use crate::trace::Trace;
use crate::{Report, RunOptions, Stats, Violation};
use members::{Node, Pool};
use truth::Truth;

/// A node or pool that was not heard of for so long is offline.
const OFFLINE_AFTER: Duration = Duration::from_secs(3);
/// A node that nobody has heard of for so long is lost.
const NODE_TIMEOUT: Duration = Duration::from_secs(8);
const LEASE: u64 = 2 * SECOND;
/// Nodes, pools and reconcilers have a turn within.
const TURN: u64 = SECOND;
const HORIZON: u64 = 240 * SECOND;

/// A change of a record that somebody has decided on.
#[derive(Clone, Debug)]
enum Change {
    /// `lost`: the node that has the volume, of which nobody has heard.
    Publish {
        publish: Publish,
        lost: Option<String>,
    },
    Detach {
        node: String,
        by_force: bool,
    },
    /// The target of a shared volume leaves a node that is lost.
    MoveTarget {
        from: String,
        to: String,
    },
    Lend {
        owner: Option<String>,
        node: Option<String>,
    },
    LateReplay {
        node: String,
    },
    ConfirmReplay {
        node: String,
    },
    FenceNode {
        node: String,
    },
    ProveHolder {
        node: String,
        epoch: u64,
    },
    FenceStale {
        node: String,
    },
    LeftOver,
    Acquire(Acquire),
    AddReplica(ReplicaRecord),
    Leave(Member),
    TakeBack(ReplicaGuid),
    Swap(MembershipSwap),
    Delete,
}

#[derive(Debug)]
enum Event {
    Node(usize),
    Pool(usize),
    Orchestrator,
    Reconciler,
    Tokens,
    Fault,
    Change { volume: VolumeId, change: Change },
    Io { node: usize, volume: VolumeId },
    Backup,
    Restore,
    Recover,
}

/// Content of the records.
#[derive(Clone, Default)]
struct Records {
    volumes: BTreeMap<VolumeId, VolumeRecord>,
    tokens: BTreeMap<String, TokenRecord>,
}

/// Things that the controller has seen since it started.
#[derive(Default)]
struct Observed {
    started: u64,
    /// Last report, and the last word on the devices, by node.
    nodes: BTreeMap<String, Seen>,
    /// Last report, by pool.
    pools: BTreeMap<String, u64>,
    words: BTreeMap<(String, ReplicaGuid), Hearing>,
}

struct Seen {
    last: u64,
    devices: Option<(u64, Vec<quoin_cluster::ownership::devices::DeviceSeen>)>,
}

pub(crate) struct Cluster {
    seed: u64,
    random: Random,
    /// Decides what hostile pools say, whatever else happens.
    lies: Random,
    schedule: Schedule<Event>,
    trace: Trace,
    stats: Stats,
    records: Records,
    backup: Option<Records>,
    term: Term,
    /// The records do not rule, since they are known as an old copy.
    doubt: Option<RecoveryRecord>,
    observed: Observed,
    nodes: Vec<Node>,
    pools: Vec<Pool>,
    /// A node and a pool whose link is cut.
    cut: BTreeSet<(usize, usize)>,
    truth: Truth,
    violation: Option<Violation>,
}

fn time(at: u64) -> Time {
    // The times of the core begin before the run does.
    Time(at + 3600 * SECOND)
}

fn node_name(node: usize) -> String {
    format!("h{node}")
}

fn pool_name(pool: usize) -> String {
    format!("p{pool}")
}

impl Cluster {
    pub fn new(options: RunOptions) -> Self {
        let mut random = Random::new(options.seed ^ 0x636f_6e74_726f_6c21);
        let volumes = random.between(3, 9);
        let nodes = (0..random.between(2, 4)).map(|_| Node::default()).collect();
        let pools = (0..random.between(3, 5)).map(|_| Pool::default()).collect();
        let mut cluster = Self {
            seed: options.seed,
            random,
            lies: Random::new(options.seed ^ 0x6c69_6172_7321),
            schedule: Schedule::default(),
            trace: Trace::new(options.trace, options.keep),
            stats: Stats { seeds: 1, ..Stats::default() },
            records: Records::default(),
            backup: None,
            term: Term::default(),
            doubt: None,
            observed: Observed::default(),
            nodes,
            pools,
            cut: BTreeSet::new(),
            truth: Truth::default(),
            violation: None,
        };
        for number in 1..=volumes {
            cluster.create_volume(VolumeId(number.into()));
        }
        for node in 0..cluster.nodes.len() {
            cluster.schedule.at(node as u64 * 50 * MILLISECOND, Event::Node(node));
        }
        for pool in 0..cluster.pools.len() {
            cluster.schedule.at(pool as u64 * 70 * MILLISECOND, Event::Pool(pool));
        }
        let others =
            [Event::Orchestrator, Event::Reconciler, Event::Tokens, Event::Fault, Event::Backup];
        others.into_iter().for_each(|event| cluster.schedule.at(SECOND, event));
        cluster
    }

    pub fn run(&mut self) {
        while self.violation.is_none() && self.schedule.now() < HORIZON {
            let Some(event) = self.schedule.take() else { return };
            self.stats.events += 1;
            self.step(event);
        }
    }

    pub fn report(&self) -> Report {
        let mut stats = self.stats.clone();
        stats.simulated_ns = self.schedule.now();
        Report {
            stats,
            violation: self.violation.clone(),
            fingerprint: self.trace.fingerprint(),
            lines: self.trace.lines().to_vec(),
        }
    }

    fn now(&self) -> u64 {
        self.schedule.now()
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        self.trace.line(self.schedule.now(), text);
    }

    fn violate(&mut self, rule: &str, detail: String) {
        self.say(|| format!("VIOLATION {rule}: {detail}"));
        let (seed, rule) = (self.seed, rule.to_owned());
        self.violation.get_or_insert(Violation { seed, rule, detail });
    }

    fn step(&mut self, event: Event) {
        self.trace.mix(self.schedule.now(), self.records.volumes.len() as u64);
        match event {
            Event::Node(node) => {
                self.node_turn(node);
                let next = TURN / 2 + self.random.below(TURN);
                self.schedule.after(next, Event::Node(node));
            }
            Event::Pool(pool) => {
                self.pool_turn(pool);
                let next = TURN / 4 + self.random.below(TURN / 2);
                self.schedule.after(next, Event::Pool(pool));
            }
            Event::Orchestrator => {
                self.orchestrate();
                let next = self.random.between(50, 900) * MILLISECOND;
                self.schedule.after(next, Event::Orchestrator);
            }
            Event::Reconciler => {
                self.reconcile();
                self.schedule.after(TURN / 2, Event::Reconciler);
            }
            Event::Tokens => {
                self.use_tokens();
                let next = self.random.between(1, 4) * SECOND;
                self.schedule.after(next, Event::Tokens);
            }
            Event::Fault => {
                self.fault();
                let next = self.random.between(1, 6) * SECOND;
                self.schedule.after(next, Event::Fault);
            }
            Event::Change { volume, change } => self.change(volume, change),
            Event::Io { node, volume } => self.io(node, volume),
            Event::Backup => {
                if self.doubt.is_none() {
                    self.backup = Some(self.records.clone());
                }
                let next = self.random.between(5, 40) * SECOND;
                let restores = self.random.percent(40);
                self.schedule.after(next, if restores { Event::Restore } else { Event::Backup });
            }
            Event::Restore => {
                self.restore();
                self.schedule.after(self.random.between(2, 9) * SECOND, Event::Recover);
            }
            Event::Recover => {
                self.recover();
                self.schedule.after(SECOND, Event::Backup);
            }
        }
    }

    /// Plans a change that somebody has decided on now.
    fn plan(&mut self, volume: VolumeId, change: Change) {
        let delay = match self.random.percent(80) {
            true => self.random.between(1, 40) * MILLISECOND,
            false => self.random.between(40, 1500) * MILLISECOND,
        };
        self.schedule.after(delay, Event::Change { volume, change });
    }

    fn pick_volume(&mut self) -> Option<VolumeId> {
        let all: Vec<VolumeId> = self.records.volumes.keys().copied().collect();
        (!all.is_empty()).then(|| *self.random.pick(&all))
    }

    /// Links break and mend, nodes stop and go on, attach processes hang.
    fn fault(&mut self) {
        let (nodes, pools) = (self.nodes.len(), self.pools.len());
        let (node, pool) = (self.random.index(nodes), self.random.index(pools));
        let what = match self.random.below(9) {
            0 => {
                self.nodes[node].heard ^= true;
                format!("link of h{node} to the controller: {}", self.nodes[node].heard)
            }
            1 => {
                self.nodes[node].runs ^= true;
                format!("h{node} runs: {}", self.nodes[node].runs)
            }
            2 => {
                self.nodes[node].attach_answers ^= true;
                format!("attach of h{node} answers: {}", self.nodes[node].attach_answers)
            }
            3 => {
                self.pools[pool].heard ^= true;
                format!("link of p{pool} to the controller: {}", self.pools[pool].heard)
            }
            4 => {
                self.pools[pool].runs ^= true;
                format!("p{pool} runs: {}", self.pools[pool].runs)
            }
            5 => {
                self.nodes[node].restart_target();
                format!("the target of h{node} is started again")
            }
            6 => {
                if !self.cut.remove(&(node, pool)) {
                    self.cut.insert((node, pool));
                }
                format!("h{node} and p{pool} are cut: {}", self.cut.contains(&(node, pool)))
            }
            _ => {
                let well = |there: &mut Node| (there.heard, there.runs) = (true, true);
                self.nodes.iter_mut().for_each(well);
                self.nodes.iter_mut().for_each(|there| there.attach_answers = true);
                self.pools.iter_mut().for_each(|there| (there.heard, there.runs) = (true, true));
                self.cut.clear();
                "all is well".to_owned()
            }
        };
        self.say(|| format!("*** {what}"));
    }

    /// Discarded replicas of a record that a pool is to delete.
    fn is_ordered(volume: &VolumeRecord, pool: &str, guid: ReplicaGuid) -> bool {
        let is_it = |gone: &Discarded| gone.pool == pool && gone.guid.0 == guid;
        let is_going = |r: &ReplicaRecord| {
            r.guid.0 == guid && r.phase == quoin_cluster::records::ReplicaPhase::Delete
        };
        volume.discarded.iter().any(is_it) || volume.replicas.iter().any(is_going)
    }
}
