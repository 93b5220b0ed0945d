//! All replicas of a volume compared with each other: asked for here, done by the volume's target,
//! remembered with what was found.
//!
//! The record says whether one is wanted; the target is told with its assignment, and tells how
//! far it is with its reports, which are kept in memory. What it found at the end goes into the
//! record, and the order is over. A target that is replaced begins anew. A volume that is
//! attached nowhere is opened for it as for other work ([`crate::reconcile::tending`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use quoin_api::control::{self as api, VolumeRef};
use quoin_types::{ReplicaId, VolumeId};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::state::changes::Concerned;
use crate::state::events::Severity;
use crate::state::records::{Record, Text, VolumeRecord};
use crate::state::{State, about};
use crate::text;
use crate::text::plain;
use crate::time::{now_ms, timestamp};

/// Findings and replicas in one report.
const LISTED_MAX: usize = 64;
const TEXT_BYTES_MAX: usize = 1024;

/// Kind of a verification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verifying {
    Verify,
    /// Bad copies are replaced; where good copies differ, by this replica's.
    Repair {
        from: Option<ReplicaId>,
    },
    Stop,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum VerifyState {
    /// Wanted.
    #[default]
    Open,
    Ended,
    Failed,
    Stopped,
}

/// The last verification of a volume, wanted or done.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VerifyRecord {
    pub volume: Text<VolumeId>,
    pub request: u64,
    pub repair: bool,
    pub from: Option<Text<ReplicaId>>,
    pub state: VerifyState,
    pub began_ms: u64,
    pub ended_ms: u64,
    pub message: String,
    #[serde(flatten)]
    pub found: VerifyCounts,
    pub replicas: Vec<ReplicaResult>,
    pub findings: Vec<FindingRecord>,
}

/// How far a verification is, and blocks that it found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VerifyCounts {
    pub checked_bytes: u64,
    pub total_bytes: u64,
    pub read_bytes: u64,
    pub bad: u64,
    pub lost: u64,
    pub differing: u64,
    pub repaired: u64,
    pub unsettled: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReplicaResult {
    pub replica_id: String,
    pub guid: String,
    pub pool: String,
    pub checked_bytes: u64,
    pub bad: u64,
    pub repaired: u64,
    pub left_out: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FindingRecord {
    pub offset: u64,
    pub length: u64,
    pub what: String,
    pub replica_id: String,
    pub pool: String,
    pub repaired: bool,
    pub message: String,
}

impl Record for VerifyRecord {
    type Index = ();
    const PREFIX: &'static str = "verify/";
    fn name(&self) -> String {
        self.volume.0.to_string()
    }
    fn concerned(&self) -> Concerned {
        Concerned::all_nodes()
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
    }
}

impl VerifyRecord {
    fn wanted(volume: VolumeId, request: u64, repair: bool, from: Option<ReplicaId>) -> Self {
        Self {
            volume: Text(volume),
            request,
            repair,
            from: from.map(Text),
            began_ms: now_ms(),
            ..Self::default()
        }
    }

    /// Takes over how far it is and what was found.
    fn take(&mut self, report: &api::Verification) {
        let short = |text: &str| plain(text).chars().take(TEXT_BYTES_MAX).collect::<String>();
        self.found = VerifyCounts {
            checked_bytes: report.checked_bytes,
            total_bytes: report.total_bytes,
            read_bytes: report.read_bytes,
            bad: report.bad,
            lost: report.lost,
            differing: report.differing,
            repaired: report.repaired,
            unsettled: report.unsettled,
        };
        self.message = short(&report.message);
        let replica = |replica: &api::VerifiedReplica| ReplicaResult {
            replica_id: short(&replica.replica_id),
            guid: short(&replica.guid),
            pool: short(&replica.pool),
            checked_bytes: replica.checked_bytes,
            bad: replica.bad,
            repaired: replica.repaired,
            left_out: short(&replica.left_out),
        };
        self.replicas = report.replicas.iter().take(LISTED_MAX).map(replica).collect();
        let finding = |finding: &api::VerifyFinding| FindingRecord {
            offset: finding.offset,
            length: finding.length,
            what: short(&finding.what),
            replica_id: short(&finding.replica_id),
            pool: short(&finding.pool),
            repaired: finding.repaired,
            message: short(&finding.message),
        };
        self.findings = report.findings.iter().take(LISTED_MAX).map(finding).collect();
    }

    fn message(&self) -> api::Verification {
        api::Verification {
            request: self.request,
            repair: self.repair,
            from_replica_id: self.from.map(|from| from.0.to_string()).unwrap_or_default(),
            state: match self.state {
                VerifyState::Open => "waiting",
                VerifyState::Ended => "ended",
                VerifyState::Failed => "failed",
                VerifyState::Stopped => "stopped",
            }
            .to_owned(),
            message: self.message.clone(),
            began_at: Some(timestamp(self.began_ms)),
            ended_at: (self.ended_ms > 0).then(|| timestamp(self.ended_ms)),
            checked_bytes: self.found.checked_bytes,
            total_bytes: self.found.total_bytes,
            read_bytes: self.found.read_bytes,
            bad: self.found.bad,
            lost: self.found.lost,
            differing: self.found.differing,
            repaired: self.found.repaired,
            unsettled: self.found.unsettled,
            replicas: self
                .replicas
                .iter()
                .map(|r| api::VerifiedReplica {
                    replica_id: r.replica_id.clone(),
                    guid: r.guid.clone(),
                    pool: r.pool.clone(),
                    checked_bytes: r.checked_bytes,
                    bad: r.bad,
                    repaired: r.repaired,
                    left_out: r.left_out.clone(),
                })
                .collect(),
            findings: self
                .findings
                .iter()
                .map(|f| api::VerifyFinding {
                    offset: f.offset,
                    length: f.length,
                    what: f.what.clone(),
                    replica_id: f.replica_id.clone(),
                    pool: f.pool.clone(),
                    repaired: f.repaired,
                    message: f.message.clone(),
                })
                .collect(),
        }
    }

    /// How it ended, as an event.
    fn news(&self) -> (Severity, String) {
        if self.state == VerifyState::Failed {
            return (Severity::Warning, format!("could not be verified: {}", self.message));
        }
        let mut found = Vec::new();
        if self.found.bad > 0 {
            let bad = self.replicas.iter().filter(|replica| replica.bad > 0);
            let pools: Vec<_> = bad.map(|r| format!("pool {}: {}", r.pool, r.bad)).collect();
            found.push(format!("bad copies of blocks: {} ({})", self.found.bad, pools.join(", ")));
        }
        if self.found.lost > 0 {
            found.push(format!("blocks without any good copy: {}", self.found.lost));
        }
        if self.found.differing > 0 {
            found.push(format!("blocks whose good copies differ: {}", self.found.differing));
        }
        let looked = format!(
            "{} of {} replicas compared",
            text::bytes(self.found.checked_bytes),
            self.replicas.iter().filter(|replica| replica.checked_bytes > 0).count()
        );
        let left: Vec<_> = self
            .replicas
            .iter()
            .filter(|replica| !replica.left_out.is_empty())
            .map(|r| format!("; not throughout that on pool {} ({})", r.pool, r.left_out))
            .collect();
        let left = left.concat();
        if found.is_empty() {
            return (Severity::Normal, format!("{looked}{left}: all are the same and good"));
        }
        let wrong = self.found.bad + self.found.differing;
        let severity = match self.found.lost == 0 && self.found.repaired >= wrong {
            true => Severity::Warning,
            false => Severity::Error,
        };
        let repaired = format!("{} of {wrong} repaired", self.found.repaired);
        (severity, format!("{looked}{left}: {}; {repaired}", found.join(", ")))
    }
}

/// Gives up all verifications and repairs that are wanted, after the records were restored: each may
/// have ended since, and what was written after it is not to be repaired from a replica of before.
pub(crate) async fn give_up_all(state: &State) -> Result<(), Error> {
    for record in state.verifications.list() {
        let give_up = |record: &mut VerifyRecord| {
            let gives_up = record.state == VerifyState::Open;
            if gives_up {
                (record.state, record.ended_ms) = (VerifyState::Failed, now_ms());
                record.message =
                    "the records were restored while it was under way, and whether it \
                                  ended since is not known: ask for it again where it is wanted"
                        .to_owned();
            }
            Ok(gives_up)
        };
        let updated = state.verifications.update(&record.name(), give_up).await?;
        if let Some((record, true)) = updated
            && let Some(volume) = state.volumes.get(&record.name())
        {
            let (severity, message) = record.news();
            state.events.record(severity, about(&volume), "VerificationGivenUp", message);
        }
    }
    Ok(())
}

/// Verifications that are wanted, and how far their targets are.
pub struct Verifier {
    state: Arc<State>,
    /// Progress as the targets report it.
    running: Mutex<HashMap<VolumeId, api::Verification>>,
}

impl Verifier {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, running: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<VolumeId, api::Verification>> {
        self.running.lock().expect("no holder of this lock panics")
    }

    /// Has all replicas of a volume compared, or what is under way ended. Asked for again, the
    /// same is the one under way.
    ///
    /// # Errors
    /// While another kind is under way, and for a volume that is not ready.
    pub async fn verify(
        &self,
        reference: Option<&VolumeRef>,
        what: Verifying,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        let name = volume.id.0.to_string();
        let (repair, from) = match what {
            Verifying::Verify => (false, None),
            Verifying::Repair { from } => (true, from),
            Verifying::Stop => {
                let stop = |record: &mut VerifyRecord| {
                    if record.state == VerifyState::Open {
                        record.state = VerifyState::Stopped;
                        record.ended_ms = now_ms();
                    }
                    Ok(())
                };
                self.state.verifications.update(&name, stop).await?;
                return Ok(volume);
            }
        };
        if !volume.phase.is_kept() {
            let what = format!("volume {:?} is not ready", volume.spec.name);
            return Err(Error::Precondition(what));
        }
        if let Some(from) = from
            && volume.known_guid(from).is_none()
        {
            return Err(Error::missing("replica", from.to_string()));
        }
        let fresh = VerifyRecord::wanted(volume.id.0, 1, repair, from);
        if self.state.verifications.get(&name).is_none()
            && self.state.verifications.create(fresh.clone()).await?.is_ok()
        {
            return Ok(volume);
        }
        let again = |record: &mut VerifyRecord| {
            if record.state == VerifyState::Open {
                if (record.repair, record.from) == (repair, from.map(Text)) {
                    return Ok(());
                }
                let what = if record.repair { "repaired" } else { "verified" };
                return Err(Error::Precondition(format!(
                    "volume {:?} is being {what}: wait until that has ended, or end it with \
                     `quoin volume verify --stop`",
                    volume.spec.name
                )));
            }
            *record = VerifyRecord { request: record.request + 1, ..fresh.clone() };
            Ok(())
        };
        self.state.verifications.update(&name, again).await?;
        Ok(volume)
    }

    fn open(&self, volume: VolumeId) -> Option<Arc<VerifyRecord>> {
        let record = self.state.verifications.get(&volume.to_string());
        record.filter(|record| record.state == VerifyState::Open)
    }

    /// Returns the work of a target for the volume's verification, in words.
    pub(crate) fn work(&self, volume: &VolumeRecord) -> Option<String> {
        let record = self.open(volume.id.0)?;
        let what = if record.repair { "repaired" } else { "verified" };
        Some(format!("its replicas are {what}"))
    }

    pub(crate) fn order(&self, volume: VolumeId) -> Option<api::VerifyOrder> {
        let record = self.open(volume)?;
        let from_replica_id = record.from.map(|from| from.0.to_string()).unwrap_or_default();
        Some(api::VerifyOrder { request: record.request, repair: record.repair, from_replica_id })
    }

    /// The one under way, as far as its target has told, or the last one.
    pub(crate) fn message(&self, volume: &VolumeRecord) -> Option<api::Verification> {
        let mut record =
            VerifyRecord::clone(&*self.state.verifications.get(&volume.id.0.to_string())?);
        if record.state != VerifyState::Open {
            return Some(record.message());
        }
        let told = self.running().get(&volume.id.0).cloned();
        if let Some(told) = told.filter(|told| told.request == record.request) {
            record.take(&told);
            return Some(api::Verification { state: "running".to_owned(), ..record.message() });
        }
        record.message = match &volume.opened.owner {
            None => "for a node that opens the volume".to_owned(),
            Some(node) => format!("for the target of node {node}"),
        };
        Some(record.message())
    }

    /// Takes in what the target of the volume tells.
    pub(crate) async fn reported(
        &self,
        volume: &VolumeRecord,
        report: &api::Verification,
    ) -> Result<(), Error> {
        let open = self.open(volume.id.0);
        let Some(open) = open.filter(|record| record.request == report.request) else {
            self.running().remove(&volume.id.0);
            return Ok(());
        };
        let mut told = report.clone();
        told.replicas.truncate(LISTED_MAX);
        told.findings.truncate(LISTED_MAX);
        let pool_of = |id: &str| {
            let replica = volume.replicas.iter().find(|r| r.id.0.to_string() == id);
            replica.map(|replica| replica.pool.clone()).unwrap_or_default()
        };
        for replica in &mut told.replicas {
            replica.pool = pool_of(&replica.replica_id);
        }
        for finding in &mut told.findings {
            finding.pool = pool_of(&finding.replica_id);
        }
        let state = match told.state.as_str() {
            "ended" => VerifyState::Ended,
            "failed" => VerifyState::Failed,
            _ => {
                self.running().insert(volume.id.0, told);
                return Ok(());
            }
        };
        let end = |record: &mut VerifyRecord| {
            if record.state != VerifyState::Open || record.request != open.request {
                return Ok(false);
            }
            record.take(&told);
            record.state = state;
            record.ended_ms = now_ms();
            Ok(true)
        };
        let updated = self.state.verifications.update(&volume.id.0.to_string(), end).await?;
        self.running().remove(&volume.id.0);
        if let Some((record, true)) = updated {
            let (severity, message) = record.news();
            let reason = if record.repair { "VolumeRepaired" } else { "VolumeVerified" };
            self.state.events.record(severity, about(volume), reason, message);
        }
        Ok(())
    }

    /// The volume is gone.
    pub(crate) async fn forget(&self, volume: VolumeId) -> Result<(), Error> {
        self.running().remove(&volume);
        if self.state.verifications.get(&volume.to_string()).is_some() {
            self.state.verifications.remove(&volume.to_string(), |_| true).await?;
        }
        Ok(())
    }
}
