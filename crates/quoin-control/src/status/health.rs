//! Faults of a volume: one judgement, which CSI, the command line and the metrics share.
//!
//! [`judge`] is pure: it looks at the record, at what its pools and its target report, and at what
//! is remembered of earlier looks. Each condition that holds is found by itself, so a worse one
//! hides no other. What cannot be judged yet is no health: [`Judgement::NotYet`].
//!
//! [`Conditions`] remembers since when each condition holds. It is told by the reconcilers, which
//! look at every volume again and again; who asks for a judgement changes nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use quoin_api::control::{self as api, volume_condition};
use quoin_cluster::mirror::Role;
use quoin_cluster::records::{VerifyState, VolumePhase, VolumeRecord};
use quoin_cluster::wall_clock::is_ahead;
use quoin_types::VolumeId;

use crate::state::State;
use crate::state::observed::VolumeSeen;
use crate::status::VolumeStatus;
use crate::time::{now_ms, timestamp};

/// Time that a target has for an opening before its volume counts as not opened.
const OPENING_MAX: Duration = Duration::from_secs(8);
/// Intervals for which a mirror may be degraded before that is a condition.
const BEHIND_INTERVALS: u32 = 3;
/// Time that a mirror has to be started beside a target.
const ALONE_MAX: Duration = Duration::from_secs(30);
/// Volumes with lost blocks that are remembered.
const LOST_MAX: usize = 4096;

/// How bad a condition is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Severity {
    /// IO is served, with less to spare than is wanted.
    Degraded,
    /// IO waits, or fails.
    Inaccessible,
    /// Some data is lost.
    DataLoss,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Degraded => "Degraded",
            Self::Inaccessible => "Inaccessible",
            Self::DataLoss => "DataLoss",
        }
    }
}

impl From<Severity> for volume_condition::Severity {
    fn from(severity: Severity) -> Self {
        match severity {
            Severity::Degraded => Self::Degraded,
            Severity::Inaccessible => Self::Inaccessible,
            Severity::DataLoss => Self::DataLoss,
        }
    }
}

/// A kind of condition, the worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reason {
    BlocksLost,
    NoQuorum,
    RecordsBehind,
    PoolsFull,
    NotOpened,
    BeingCreated,
    DeviceNotMade,
    MirrorSplitBrain,
    MirrorDiverged,
    ReplicaOffline,
    ReplicaMissing,
    ReplicaRebuilding,
    BadBlocks,
    ChangeBlocked,
    MirrorDiffers,
    MirrorBehind,
    MirrorProcessMissing,
    MirrorOrphan,
}

impl Reason {
    pub const ALL: &[Self] = &[
        Self::BlocksLost,
        Self::NoQuorum,
        Self::RecordsBehind,
        Self::PoolsFull,
        Self::NotOpened,
        Self::BeingCreated,
        Self::DeviceNotMade,
        Self::MirrorSplitBrain,
        Self::MirrorDiverged,
        Self::ReplicaOffline,
        Self::ReplicaMissing,
        Self::ReplicaRebuilding,
        Self::BadBlocks,
        Self::ChangeBlocked,
        Self::MirrorDiffers,
        Self::MirrorBehind,
        Self::MirrorProcessMissing,
        Self::MirrorOrphan,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::BlocksLost => "BlocksLost",
            Self::NoQuorum => "NoQuorum",
            Self::RecordsBehind => "RecordsBehind",
            Self::PoolsFull => "PoolsFull",
            Self::NotOpened => "NotOpened",
            Self::BeingCreated => "BeingCreated",
            Self::DeviceNotMade => "DeviceNotMade",
            Self::ReplicaOffline => "ReplicaOffline",
            Self::ReplicaMissing => "ReplicaMissing",
            Self::ReplicaRebuilding => "ReplicaRebuilding",
            Self::BadBlocks => "BadBlocks",
            Self::ChangeBlocked => "ChangeBlocked",
            Self::MirrorSplitBrain => "MirrorSplitBrain",
            Self::MirrorDiverged => "MirrorDiverged",
            Self::MirrorDiffers => "MirrorDiffers",
            Self::MirrorBehind => "MirrorBehind",
            Self::MirrorProcessMissing => "MirrorProcessMissing",
            Self::MirrorOrphan => "MirrorOrphan",
        }
    }

    pub fn severity(self) -> Severity {
        match self {
            Self::BlocksLost => Severity::DataLoss,
            Self::NoQuorum
            | Self::RecordsBehind
            | Self::PoolsFull
            | Self::NotOpened
            | Self::BeingCreated
            | Self::DeviceNotMade => Severity::Inaccessible,
            Self::ReplicaOffline
            | Self::ReplicaMissing
            | Self::ReplicaRebuilding
            | Self::BadBlocks
            | Self::ChangeBlocked
            | Self::MirrorSplitBrain
            | Self::MirrorDiverged
            | Self::MirrorDiffers
            | Self::MirrorBehind
            | Self::MirrorProcessMissing
            | Self::MirrorOrphan => Severity::Degraded,
        }
    }

    /// Quoin's own action on it.
    fn action(self) -> &'static str {
        match self {
            Self::BlocksLost => {
                "reads of these blocks fail until they are written; all others work"
            }
            Self::NoQuorum => {
                "IO waits, or fails where onQuorumLoss is fail, and goes on by itself with the \
                 replicas"
            }
            Self::RecordsBehind => "nothing is served, so that nothing newer is overwritten",
            Self::PoolsFull => {
                "writes wait, or fail with ENOSPC where onFull says so; reads and trims go on, and \
                 clean-up makes room"
            }
            Self::NotOpened => "the volume is opened as soon as its node's target runs",
            Self::BeingCreated => "each pool is asked again until it has created its replica",
            Self::DeviceNotMade => "the device is tried again while the volume is attached",
            Self::ReplicaOffline => {
                "a replica that is away longer than replaceAfter is replaced in another pool"
            }
            Self::ReplicaMissing => "a place for the replica is looked for all the time",
            Self::ReplicaRebuilding => "it is brought up to date while IO goes on",
            Self::BadBlocks => "bad copies are replaced by good ones of other replicas",
            Self::ChangeBlocked => {
                "the change goes on once the pools have deleted what was replaced"
            }
            Self::MirrorSplitBrain => "IO goes on at both sides, and nothing is sent between them",
            Self::MirrorDiverged => "nothing is sent, and what each side wrote is kept",
            Self::MirrorDiffers => {
                "points go on, and what differs is sent where it is written again"
            }
            Self::MirrorBehind => "points are sent as soon as the peer takes them",
            Self::MirrorProcessMissing => "nothing of this volume is sent or taken until one runs",
            Self::MirrorOrphan => "the copy is kept as it is",
        }
    }

    /// Returns true for one of the mirror, whose steps name the mirrored volume or group.
    fn is_of_mirror(self) -> bool {
        matches!(
            self,
            Self::MirrorSplitBrain
                | Self::MirrorDiverged
                | Self::MirrorDiffers
                | Self::MirrorBehind
                | Self::MirrorProcessMissing
                | Self::MirrorOrphan
        )
    }

    /// Steps that a person can take; `name`: that of the volume, or of what is mirrored.
    fn way_out(self, name: &str) -> String {
        match self {
            Self::BlocksLost => format!(
                "restore what lay there from a copy; `quoin volume verify {name}` lists the blocks"
            ),
            Self::NoQuorum => format!(
                "start the pools that are away (`quoin replica list {name}`); where they are gone \
                 for good: `quoin volume recover {name} --help`"
            ),
            Self::RecordsBehind => "`quoin controller recover --help`".to_owned(),
            Self::PoolsFull => format!(
                "delete snapshots (`quoin snapshot list`) or volumes in these pools, trim what file \
                 systems have deleted (`fstrim`), or join a pool and move replicas to it \
                 (`quoin replica move {name} POOL`): `quoin pool list`"
            ),
            Self::NotOpened => {
                format!(
                    "start the target of that node (`quoin node list`), or detach the volume and \
                     attach it elsewhere: `quoin volume detach {name} --help`"
                )
            }
            Self::BeingCreated => "start the pools that it waits for: `quoin pool list`".to_owned(),
            Self::DeviceNotMade => format!(
                "the message says what its host lacks; \
                `quoin volume attach {name} --nbd` needs no device"
            ),
            Self::ReplicaOffline => {
                format!("start its pool, or replace it now: `quoin replica replace {name} POOL`")
            }
            Self::ReplicaMissing => {
                "add a pool on another host, or make room: `quoin pool list`".to_owned()
            }
            Self::ReplicaRebuilding => {
                format!("wait; `quoin replica list {name}` has the progress")
            }
            Self::BadBlocks => format!("attach the volume, or `quoin volume repair {name}`"),
            Self::ChangeBlocked => {
                "start these pools, or `quoin pool remove` those that are gone for good".to_owned()
            }
            Self::MirrorSplitBrain => format!(
                "on the side whose writes are to go: `quoin mirror demote {name}`, then \
                 `quoin mirror resync {name} --force`, which keeps them in a snapshot"
            ),
            Self::MirrorDiverged => format!(
                "on the side that diverged: `quoin mirror resync {name} --force` follows the other one \
                 and keeps what was written here in a snapshot, and `quoin mirror promote {name} \
                 --accept-diverged` takes this side for the truth"
            ),
            Self::MirrorDiffers => format!(
                "have all of it sent anew: on the primary's side `quoin mirror disable {name}`, then \
                 delete the orphan on the other side, then `quoin mirror enable {name}`; where the \
                 copy is the good one, move to it first (`quoin mirror demote {name}`, and promote it \
                 there); `quoin mirror verify {name}` compares again"
            ),
            Self::MirrorBehind => format!(
                "`quoin mirror status {name}` says what it waits for, and `quoin mirror peers` how \
                 the peer is reached"
            ),
            Self::MirrorProcessMissing => {
                "start `quoin mirror run` on the host of that node: `quoin mirror run --help`"
                    .to_owned()
            }
            Self::MirrorOrphan => format!(
                "`quoin mirror promote {name}` makes an ordinary volume or group of it; otherwise \
                 delete its volumes: `quoin volume delete --help`"
            ),
        }
    }
}

/// A condition that holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub reason: Reason,
    pub message: String,
}

/// Verdict on a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Judgement {
    /// Nothing can be said yet, for this reason.
    NotYet(String),
    /// All conditions, the worst first; none: it is well.
    Known(Vec<Found>),
}

impl Judgement {
    pub fn is_well(&self) -> bool {
        *self == Self::Known(Vec::new())
    }
}

/// Facts that a judgement is made of.
pub(crate) struct Evidence<'a> {
    pub volume: &'a VolumeRecord,
    pub status: &'a VolumeStatus,
    /// The report of the target that owns it.
    pub serving: Option<&'a VolumeSeen>,
    /// Time since which its owner has not opened it; `None`: it was not noticed before.
    pub unopened_for: Option<Duration>,
    /// Blocks that are lost; `Some(0)`: some, the number is not known.
    pub lost_blocks: Option<u64>,
    /// Pools of its replicas that take no writes.
    pub full_pools: Vec<String>,
    /// State of its mirror; `None`: it is not mirrored, or was not looked at yet.
    pub mirror: Option<MirrorEvidence>,
}

/// Facts of a mirrored volume.
pub(crate) struct MirrorEvidence {
    /// Name of the volume or the group that is mirrored.
    pub name: String,
    pub peer: String,
    pub role: Role,
    pub peer_role: Option<Role>,
    /// Time for which a primary has not been healthy.
    pub ill_for: Option<Duration>,
    pub interval: Duration,
    /// Age of what the other side has; `None`: it has no complete copy.
    pub lag: Option<Duration>,
    pub is_silent: bool,
    pub is_paused: bool,
    /// Ranges that the last comparison found to differ; 0: a former one found some.
    pub differing: Option<u64>,
    /// Node whose target has no mirror beside it, and for how long.
    pub alone: Option<(String, Duration)>,
}

/// The conditions of a mirror, with their messages.
fn of_mirror(mirror: &MirrorEvidence) -> Vec<(Reason, String)> {
    let MirrorEvidence { name, peer, role, .. } = mirror;
    let mut found = Vec::new();
    match (role, mirror.peer_role) {
        (Role::Primary, Some(Role::Primary)) => found.push((
            Reason::MirrorSplitBrain,
            format!("{name:?} is primary in this cluster and in {peer}"),
        )),
        (Role::Primary, Some(Role::Diverged)) => found.push((
            Reason::MirrorDiverged,
            format!("the copy of {name:?} in {peer} was written to since the last common point"),
        )),
        (Role::Diverged, _) => found.push((
            Reason::MirrorDiverged,
            format!("both this cluster and {peer} wrote to {name:?} since the last common point"),
        )),
        (Role::Orphan, _) => found.push((
            Reason::MirrorOrphan,
            format!("{peer} ended the mirror of {name:?}: this is a copy without a primary"),
        )),
        _ => {}
    }
    if let Some(differing) = mirror.differing {
        let ranges = match differing {
            0 => "ranges".to_owned(),
            count => format!("{count} ranges"),
        };
        found.push((
            Reason::MirrorDiffers,
            format!("{ranges} of 1 MiB of {name:?} are not the same here and in {peer}"),
        ));
    }
    let is_behind = mirror.ill_for.is_some_and(|time| time > BEHIND_INTERVALS * mirror.interval);
    let explains = |reason| matches!(reason, Reason::MirrorSplitBrain | Reason::MirrorDiverged);
    if *role == Role::Primary && is_behind && !found.iter().any(|(reason, _)| explains(*reason)) {
        let lag = match mirror.lag {
            Some(lag) => format!("what {peer} has of {name:?} is {} s old", lag.as_secs()),
            None => format!("{peer} has no complete copy of {name:?} yet"),
        };
        let why = match (mirror.is_paused, mirror.is_silent) {
            (true, _) => "; it is paused: `quoin mirror resume`",
            (false, true) => "; the peer is silent",
            (false, false) => "",
        };
        found.push((Reason::MirrorBehind, format!("{lag}{why}")));
    }
    if let Some((node, time)) = &mirror.alone
        && *time >= ALONE_MAX
    {
        let message = format!("no mirror runs beside the target on node {node}");
        found.push((Reason::MirrorProcessMissing, message));
    }
    found
}

/// The condition that follows from what a target waits for.
fn of_wait(kind: &str) -> Option<Reason> {
    match kind {
        "records" => Some(Reason::RecordsBehind),
        "room" => Some(Reason::PoolsFull),
        _ => None,
    }
}

/// Returns true if what the target waits for keeps the volume's users from it.
pub(crate) fn is_inaccessible(serving: Option<&VolumeSeen>) -> bool {
    let waits = serving.filter(|seen| !seen.waiting_for.is_empty());
    let reason = waits.and_then(|seen| of_wait(&seen.waiting_kind));
    reason.is_some_and(|reason| reason.severity() >= Severity::Inaccessible)
}

/// Judges a volume.
pub(crate) fn judge(evidence: &Evidence<'_>) -> Judgement {
    let Evidence { volume, status, serving, .. } = *evidence;
    let mut found: BTreeMap<Reason, Vec<String>> = BTreeMap::new();
    let mut say = |reason, message: String| found.entry(reason).or_default().push(message);
    if volume.phase == VolumePhase::Pending {
        say(Reason::BeingCreated, format!("it waits for {}", status.waiting_for));
        return known(found);
    }
    if volume.phase == VolumePhase::Ready && status.health == "Unknown" {
        return Judgement::NotYet("not all of its pools have reported yet".to_owned());
    }
    if let Some(blocks) = evidence.lost_blocks {
        say(
            Reason::BlocksLost,
            match blocks {
                0 => "some blocks have no good copy on any replica".to_owned(),
                1 => "1 block has no good copy on any replica".to_owned(),
                n => format!("{n} blocks have no good copy on any replica"),
            },
        );
    }
    let waits = serving.filter(|seen| !seen.waiting_for.is_empty());
    let kind = waits.map_or("", |seen| seen.waiting_kind.as_str());
    let text =
        || waits.map(|seen| format!("it waits for {}", seen.waiting_for)).unwrap_or_default();
    match (of_wait(kind), kind) {
        (Some(Reason::PoolsFull), _) => {
            let pools = match evidence.full_pools.as_slice() {
                [] => String::new(),
                [pool] => format!("; pool {pool} is full"),
                pools => format!("; pools {} are full", pools.join(", ")),
            };
            say(Reason::PoolsFull, format!("{}{pools}", text()));
        }
        (Some(reason), _) => say(reason, text()),
        (None, "quorum" | "replicas") if status.health != "Opening" => {
            say(Reason::NoQuorum, text());
        }
        _ if status.health == "Faulted" => say(
            Reason::NoQuorum,
            match waits {
                Some(_) => text(),
                None => "too few of its replicas are there to open it".to_owned(),
            },
        ),
        _ => {}
    }
    if evidence.unopened_for.is_some_and(|time| time >= OPENING_MAX) && is_unopened(volume, serving)
    {
        let node = volume.opened.owner.as_deref().unwrap_or_default();
        say(
            Reason::NotOpened,
            match waits {
                Some(_) => text(),
                None => format!("the target on node {node} has not opened it"),
            },
        );
    }
    let refused = serving.filter(|seen| seen.device.refused);
    if let Some(seen) = refused.filter(|_| volume.attachments.iter().any(|a| a.device)) {
        say(Reason::DeviceNotMade, format!("on node {}: {}", seen.node, seen.device.message));
    }
    for (replica, status) in volume.replicas.iter().zip(&status.replicas) {
        let pool = &replica.pool;
        match status.phase {
            _ if replica.leaving => {}
            "Offline" | "Gone" => {
                say(Reason::ReplicaOffline, format!("on pool {pool}: {}", status.message));
            }
            "Creating" => say(Reason::ReplicaRebuilding, format!("pool {pool} creates it")),
            "CatchingUp" => say(Reason::ReplicaRebuilding, format!("pool {pool} catches up")),
            "Rebuilding" => say(Reason::ReplicaRebuilding, format!("pool {pool} is rebuilt")),
            _ => {}
        }
        if status.bad_blocks > 0 {
            say(Reason::BadBlocks, format!("{} on pool {pool}", status.bad_blocks));
        }
    }
    let mut present: Vec<_> = volume.replicas.iter().filter(|r| !r.leaving).map(|r| r.id).collect();
    present.sort_unstable();
    present.dedup();
    let wanted = usize::from(volume.membership.drf);
    if present.len() < wanted {
        say(Reason::ReplicaMissing, format!("there are {} of {wanted}", present.len()));
    }
    if let Some(pools) = volume.is_full_of_retired() {
        say(Reason::ChangeBlocked, format!("it waits for {pools}"));
    }
    for (reason, message) in evidence.mirror.iter().flat_map(of_mirror) {
        say(reason, message);
    }
    known(found)
}

fn known(found: BTreeMap<Reason, Vec<String>>) -> Judgement {
    let condition =
        |(reason, messages): (Reason, Vec<String>)| Found { reason, message: messages.join("; ") };
    let mut conditions: Vec<Found> = found.into_iter().map(condition).collect();
    conditions.sort_by_key(|found| (std::cmp::Reverse(found.reason.severity()), found.reason));
    Judgement::Known(conditions)
}

/// Returns true if users wait for a target to open the volume.
fn is_unopened(volume: &VolumeRecord, serving: Option<&VolumeSeen>) -> bool {
    let opens = |seen: &VolumeSeen| {
        seen.state == "opening" || (seen.state == "waiting" && seen.waiting_kind == "grant")
    };
    volume.phase == VolumePhase::Ready
        && volume.opened.owner.is_some()
        && !volume.attachments.is_empty()
        && serving.is_none_or(opens)
}

/// Memory of a volume between two looks.
#[derive(Default)]
struct Memory {
    /// First look, in a row of looks, that found the condition.
    since_ms: BTreeMap<Reason, u64>,
    unopened_since: Option<Instant>,
}

/// Conditions of all volumes, and since when they hold.
pub struct Conditions {
    state: Arc<State>,
    memory: Mutex<HashMap<VolumeId, Memory>>,
    /// Volumes with blocks that no replica has a good copy of, and when that was seen last.
    lost: Mutex<HashMap<VolumeId, Instant>>,
}

impl Conditions {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, memory: Mutex::default(), lost: Mutex::default() }
    }

    fn memory(&self) -> MutexGuard<'_, HashMap<VolumeId, Memory>> {
        self.memory.lock().expect("no holder of this lock panics")
    }

    fn lost(&self) -> MutexGuard<'_, HashMap<VolumeId, Instant>> {
        self.lost.lock().expect("no holder of this lock panics")
    }

    /// Takes in that the target of a volume found a block without any good copy.
    pub(crate) fn block_lost(&self, volume: VolumeId) {
        let mut lost = self.lost();
        if lost.len() < LOST_MAX || lost.contains_key(&volume) {
            lost.insert(volume, Instant::now());
        }
    }

    /// Looks at a volume and remembers what is found.
    pub(crate) fn look(&self, volume: &VolumeRecord) {
        let now = now_ms();
        let unopened = {
            let observed = self.state.observed();
            // A controller that has just started knows of no target yet.
            let starting = observed.starting(self.state.settings.offline_after);
            let serving = crate::status::serving(&self.state, &observed, volume);
            !starting && is_unopened(volume, serving)
        };
        {
            let mut memory = self.memory();
            let memory = memory.entry(volume.id.0).or_default();
            memory.unopened_since = match unopened {
                true => Some(memory.unopened_since.unwrap_or_else(Instant::now)),
                false => None,
            };
        }
        let Judgement::Known(found) = self.judge(volume) else { return };
        let mut memory = self.memory();
        let memory = memory.entry(volume.id.0).or_default();
        let since = |found: &Found| {
            (found.reason, memory.since_ms.get(&found.reason).copied().unwrap_or(now))
        };
        memory.since_ms = found.iter().map(since).collect();
    }

    pub(crate) fn forget(&self, volume: VolumeId) {
        self.memory().remove(&volume);
        self.lost().remove(&volume);
    }

    /// Judges a volume by what is known now.
    pub fn judge(&self, volume: &VolumeRecord) -> Judgement {
        let status = crate::status::shown(&self.state, volume);
        let lost_blocks = self.lost_blocks(volume);
        let unopened_since = self.memory().get(&volume.id.0).and_then(|m| m.unopened_since);
        let unopened_for = unopened_since.map(|since| since.elapsed());
        let observed = self.state.observed();
        let serving = crate::status::serving(&self.state, &observed, volume);
        let is_full = |pool: &String| {
            let seen = observed.pools.get(pool);
            seen.is_some_and(|seen| seen.capacity_bytes > 0 && seen.free_bytes == 0)
        };
        let pools = volume.replicas.iter().map(|replica| replica.pool.clone());
        let full_pools = pools.filter(is_full).collect();
        let (status, mirror) = (&status, self.mirror(volume));
        judge(&Evidence { volume, status, serving, unopened_for, lost_blocks, full_pools, mirror })
    }

    /// State of the volume's mirror, as its last look saw it.
    fn mirror(&self, volume: &VolumeRecord) -> Option<MirrorEvidence> {
        let record = self.state.mirrored.of(volume)?;
        let figures = self.state.mirrored.figures(record.id.0)?;
        let peer_id = record.brain().peer.to_string();
        let peer = self.state.joined.peers.get(&peer_id);
        let role = record.role();
        let alone = figures.alone.get(&volume.id.0);
        Some(MirrorEvidence {
            name: record.group_name.clone(),
            peer: peer.map_or(peer_id, |peer| peer.name.clone()),
            role,
            peer_role: figures.peer_role,
            ill_for: figures.ill_since.map(|since| since.elapsed()),
            interval: Duration::from_secs(record.settings.interval_s),
            lag: figures.lag(),
            is_silent: figures.is_silent,
            is_paused: record.settings.is_paused,
            differing: record.comparison.as_ref().filter(|at| at.differs()).map(|at| at.differing),
            alone: alone.map(|(since, node)| (node.clone(), since.elapsed())),
        })
    }

    /// Blocks that are lost, as the last verification counted them or a read found them. A
    /// verification that ended after that and found none ends the condition.
    fn lost_blocks(&self, volume: &VolumeRecord) -> Option<u64> {
        let verified = self.state.verifications.get(&volume.id.0.to_string());
        let counted = verified.as_ref().map_or(0, |record| record.found.lost);
        if counted > 0 {
            return Some(counted);
        }
        // By the present clock, whatever it was as the block was seen.
        let seen = self.lost().get(&volume.id.0).copied()?;
        let seen_ms = now_ms().saturating_sub(seen.elapsed().as_millis() as u64);
        let is_over = verified.is_some_and(|record| {
            let began = record.began_ms > seen_ms && !is_ahead(record.began_ms, now_ms());
            record.state == VerifyState::Ended && began
        });
        (!is_over).then_some(0)
    }

    /// The conditions of a volume for a message, and why it cannot be judged.
    pub(crate) fn messages(&self, volume: &VolumeRecord) -> (Vec<api::VolumeCondition>, String) {
        let found = match self.judge(volume) {
            Judgement::NotYet(why) => return (Vec::new(), why),
            Judgement::Known(found) => found,
        };
        let memory = self.memory();
        let since =
            |reason| memory.get(&volume.id.0).and_then(|m| m.since_ms.get(&reason).copied());
        let name = crate::text::quoted(&volume.spec.name);
        let mirror = self.state.mirrored.of(volume);
        let mirrored = mirror.map_or_else(|| name.clone(), |m| crate::text::quoted(&m.group_name));
        let message = |found: Found| {
            let named = if found.reason.is_of_mirror() { &mirrored } else { &name };
            let severity: volume_condition::Severity = found.reason.severity().into();
            api::VolumeCondition {
                reason: found.reason.as_str().to_owned(),
                severity: severity.into(),
                message: found.message,
                since: since(found.reason).map(timestamp),
                action: found.reason.action().to_owned(),
                way_out: found.reason.way_out(named),
            }
        };
        (found.into_iter().map(message).collect(), String::new())
    }

    /// Returns true if a volume has a condition, or cannot be judged.
    pub(crate) fn is_ill(&self, volume: &VolumeRecord) -> bool {
        !self.judge(volume).is_well()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves CSIN-HEALTH-06: for the controller's reasons.
    #[test]
    fn the_document_lists_every_reason_with_its_severity() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/health.md");
        let text = std::fs::read_to_string(path).unwrap();
        for reason in Reason::ALL {
            let severity = match reason.severity() {
                Severity::Degraded => "degraded",
                Severity::Inaccessible => "inaccessible",
                Severity::DataLoss => "data loss",
            };
            let row = format!("| `{}` | {severity} | ", reason.as_str());
            assert!(text.contains(&row), "{row}");
            assert!(!reason.action().is_empty() && !reason.way_out("db").is_empty());
        }
    }

    #[test]
    fn conditions_are_ordered_by_severity_and_each_reason_is_there_once() {
        let all: Vec<Found> = Reason::ALL
            .iter()
            .map(|reason| Found { reason: *reason, message: String::new() })
            .collect();
        let found = all.iter().rev().map(|found| (found.reason, vec![String::new()])).collect();
        assert_eq!(known(found), Judgement::Known(all));
    }

    #[test]
    fn each_fault_of_a_mirror_has_its_condition_and_a_healthy_one_has_none() {
        let healthy = || MirrorEvidence {
            name: "db".to_owned(),
            peer: "west".to_owned(),
            role: Role::Primary,
            peer_role: Some(Role::Secondary),
            ill_for: None,
            interval: Duration::from_secs(60),
            lag: Some(Duration::from_secs(200)),
            is_silent: false,
            is_paused: false,
            differing: None,
            alone: None,
        };
        let reasons = |mirror: MirrorEvidence| {
            of_mirror(&mirror).into_iter().map(|(reason, _)| reason).collect::<Vec<_>>()
        };
        assert_eq!(reasons(healthy()), []);
        let ill =
            |seconds| MirrorEvidence { ill_for: Some(Duration::from_secs(seconds)), ..healthy() };
        assert_eq!(reasons(ill(180)), [], "for three intervals");
        assert_eq!(reasons(ill(181)), [Reason::MirrorBehind]);
        let silent = MirrorEvidence { is_silent: true, ..ill(181) };
        assert!(of_mirror(&silent)[0].1.contains("200 s old; the peer is silent"));
        let paused = MirrorEvidence { is_paused: true, ..ill(181) };
        assert!(of_mirror(&paused)[0].1.contains("`quoin mirror resume`"));
        let with = |role, peer_role| MirrorEvidence { role, peer_role, ..ill(181) };
        let split = with(Role::Primary, Some(Role::Primary));
        assert_eq!(reasons(split), [Reason::MirrorSplitBrain], "which is why it is behind");
        for diverged in [
            with(Role::Primary, Some(Role::Diverged)),
            with(Role::Diverged, Some(Role::Primary)),
            with(Role::Diverged, None),
        ] {
            assert_eq!(reasons(diverged), [Reason::MirrorDiverged]);
        }
        assert_eq!(reasons(with(Role::Orphan, None)), [Reason::MirrorOrphan]);
        assert_eq!(reasons(with(Role::Secondary, Some(Role::Primary))), []);
        let differs = MirrorEvidence { differing: Some(3), ..healthy() };
        assert_eq!(reasons(differs), [Reason::MirrorDiffers]);
        let alone = |seconds| {
            let alone = Some(("n1".to_owned(), Duration::from_secs(seconds)));
            MirrorEvidence { role: Role::Secondary, alone, ..healthy() }
        };
        assert_eq!(reasons(alone(29)), []);
        assert_eq!(reasons(alone(30)), [Reason::MirrorProcessMissing]);
    }
}
