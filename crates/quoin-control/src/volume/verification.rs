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
use quoin_cluster::records::{
    FindingRecord, Record, ReplicaResult, Text, VerifyCounts, VerifyRecord, VerifyState,
    VolumeRecord,
};
use quoin_types::{ReplicaId, VolumeId};

use crate::Error;
use crate::state::events::Severity;
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

fn wanted(volume: VolumeId, request: u64, repair: bool, from: Option<ReplicaId>) -> VerifyRecord {
    VerifyRecord {
        volume: Text(volume),
        request,
        repair,
        from: from.map(Text),
        began_ms: now_ms(),
        ..VerifyRecord::default()
    }
}

/// Takes over how far it is and what was found.
fn take(record: &mut VerifyRecord, report: &api::Verification) {
    let short = |text: &str| plain(text).chars().take(TEXT_BYTES_MAX).collect::<String>();
    record.found = VerifyCounts {
        checked_bytes: report.checked_bytes,
        total_bytes: report.total_bytes,
        read_bytes: report.read_bytes,
        bad: report.bad,
        lost: report.lost,
        differing: report.differing,
        repaired: report.repaired,
        unsettled: report.unsettled,
    };
    record.message = short(&report.message);
    let replica = |replica: &api::VerifiedReplica| ReplicaResult {
        replica_id: short(&replica.replica_id),
        guid: short(&replica.guid),
        pool: short(&replica.pool),
        checked_bytes: replica.checked_bytes,
        bad: replica.bad,
        repaired: replica.repaired,
        left_out: short(&replica.left_out),
    };
    record.replicas = report.replicas.iter().take(LISTED_MAX).map(replica).collect();
    let finding = |finding: &api::VerifyFinding| FindingRecord {
        offset: finding.offset,
        length: finding.length,
        what: short(&finding.what),
        replica_id: short(&finding.replica_id),
        pool: short(&finding.pool),
        repaired: finding.repaired,
        message: short(&finding.message),
    };
    record.findings = report.findings.iter().take(LISTED_MAX).map(finding).collect();
}

fn message(record: &VerifyRecord) -> api::Verification {
    api::Verification {
        request: record.request,
        repair: record.repair,
        from_replica_id: record.from.map(|from| from.0.to_string()).unwrap_or_default(),
        state: match record.state {
            VerifyState::Open => "waiting",
            VerifyState::Ended => "ended",
            VerifyState::Failed => "failed",
            VerifyState::Stopped => "stopped",
        }
        .to_owned(),
        message: record.message.clone(),
        began_at: Some(timestamp(record.began_ms)),
        ended_at: (record.ended_ms > 0).then(|| timestamp(record.ended_ms)),
        checked_bytes: record.found.checked_bytes,
        total_bytes: record.found.total_bytes,
        read_bytes: record.found.read_bytes,
        bad: record.found.bad,
        lost: record.found.lost,
        differing: record.found.differing,
        repaired: record.found.repaired,
        unsettled: record.found.unsettled,
        replicas: record
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
        findings: record
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
fn news(record: &VerifyRecord) -> (Severity, String) {
    if record.state == VerifyState::Failed {
        return (Severity::Warning, format!("could not be verified: {}", record.message));
    }
    let mut found = Vec::new();
    if record.found.bad > 0 {
        let bad = record.replicas.iter().filter(|replica| replica.bad > 0);
        let pools: Vec<_> = bad.map(|r| format!("pool {}: {}", r.pool, r.bad)).collect();
        found.push(format!("bad copies of blocks: {} ({})", record.found.bad, pools.join(", ")));
    }
    if record.found.lost > 0 {
        found.push(format!("blocks without any good copy: {}", record.found.lost));
    }
    if record.found.differing > 0 {
        found.push(format!("blocks whose good copies differ: {}", record.found.differing));
    }
    let looked = format!(
        "{} of {} replicas compared",
        text::bytes(record.found.checked_bytes),
        record.replicas.iter().filter(|replica| replica.checked_bytes > 0).count()
    );
    let left: Vec<_> = record
        .replicas
        .iter()
        .filter(|replica| !replica.left_out.is_empty())
        .map(|r| format!("; not throughout that on pool {} ({})", r.pool, r.left_out))
        .collect();
    let left = left.concat();
    if found.is_empty() {
        return (Severity::Normal, format!("{looked}{left}: all are the same and good"));
    }
    let wrong = record.found.bad + record.found.differing;
    let severity = match record.found.lost == 0 && record.found.repaired >= wrong {
        true => Severity::Warning,
        false => Severity::Error,
    };
    let repaired = format!("{} of {wrong} repaired", record.found.repaired);
    (severity, format!("{looked}{left}: {}; {repaired}", found.join(", ")))
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
            let (severity, message) = news(&record);
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
        let fresh = wanted(volume.id.0, 1, repair, from);
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
            return Some(message(&record));
        }
        let told = self.running().get(&volume.id.0).cloned();
        if let Some(told) = told.filter(|told| told.request == record.request) {
            take(&mut record, &told);
            return Some(api::Verification { state: "running".to_owned(), ..message(&record) });
        }
        record.message = match &volume.opened.owner {
            None => "for a node that opens the volume".to_owned(),
            Some(node) => format!("for the target of node {node}"),
        };
        Some(message(&record))
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
            take(record, &told);
            record.state = state;
            record.ended_ms = now_ms();
            Ok(true)
        };
        let updated = self.state.verifications.update(&volume.id.0.to_string(), end).await?;
        self.running().remove(&volume.id.0);
        if let Some((record, true)) = updated {
            let (severity, message) = news(&record);
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
