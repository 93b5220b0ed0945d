//! Health as the interface has it (edition 1.13), from the judgements of the control plane, of the
//! node library, and of this node's way to the pools.
//!
//! Faults are judged elsewhere; here it becomes messages. A judgement that cannot be made is an
//! error: callers take an empty answer for a recovery.

use std::sync::Mutex;
use std::time::Duration;

use quoin_api::control::{self as api, WAITS_FOR_KEY, volume_condition};
use quoin_api::csi::node_get_storage_health_response::StorageBackendHealth;
use quoin_api::csi::volume_health::VolumeHealthEntry;
use quoin_api::csi::{StorageHealthErrorType, VolumeHealth, VolumeHealthErrorType};
use quoin_node::{Standing, VolumeFault};
use tokio::task::JoinSet;
use tonic::Status;

use crate::backend::Backend;
use crate::context;
use crate::controller::cut;
use crate::refusal::not_judged;

/// Time for a connection to a pool.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Pools that are tried; where none of so many is reached, the fault is this node's.
const POOLS_MAX: usize = 64;

/// Reasons of [`StorageBackendHealth`].
pub const CONTROLLER_UNREACHABLE: &str = "ControllerUnreachable";
pub const NO_POOL_REACHED: &str = "NoPoolReached";

/// Returns the health of a volume as the control plane sees it.
///
/// # Errors
/// 14 if it cannot be judged yet.
pub fn of_controller(volume: &api::Volume) -> Result<VolumeHealth, Status> {
    if !volume.not_judged.is_empty() {
        return Err(not_judged(&format!("volume {}", volume.id), &volume.not_judged));
    }
    let entry = |condition: &api::VolumeCondition| {
        let status = match condition.severity() {
            volume_condition::Severity::DataLoss => VolumeHealthErrorType::DataLoss,
            volume_condition::Severity::Inaccessible => VolumeHealthErrorType::Inaccessible,
            // A condition that only a newer control plane has is not hidden.
            _ => VolumeHealthErrorType::Degraded,
        };
        entry(status, &condition.reason, &condition.message)
    };
    Ok(VolumeHealth {
        volume_id: volume.id.clone(),
        health_statuses: volume.conditions.iter().map(entry).collect(),
    })
}

/// Returns the health of a volume as its node sees it.
pub fn of_node(volume_id: String, faults: &[VolumeFault]) -> VolumeHealth {
    let entry = |fault: &VolumeFault| {
        let status = match fault.kind.is_degraded() {
            true => VolumeHealthErrorType::Degraded,
            false => VolumeHealthErrorType::Inaccessible,
        };
        entry(status, fault.kind.as_str(), &fault.message)
    };
    VolumeHealth { volume_id, health_statuses: faults.iter().map(entry).collect() }
}

/// Returns the role of a volume that its mirror alone changes: a copy of another cluster's, or one whose role is on
/// its way.
pub fn copy_role(volume: &api::Volume) -> Option<&str> {
    const COPIES: [&str; 5] = ["demoting", "secondary", "promoting", "diverged", "resyncing"];
    let role = volume.mirror.as_ref().map(|mirror| mirror.role.as_str());
    role.filter(|role| COPIES.contains(role))
}

/// Returns what the records say of a volume's use on a node.
pub fn standing(volume: &api::Volume, node: &str) -> Standing {
    let is_here = |one: &&api::Attachment| one.node == node && one.phase != "Detaching";
    let here = volume.attachments.iter().find(is_here);
    let elsewhere = volume.attachments.iter().any(|one| one.replays && one.node != node);
    let is_encrypted = volume.spec.as_ref().is_some_and(|spec| spec.encryption.is_some());
    Standing {
        is_published: here.is_some(),
        copy: copy_role(volume).map(str::to_owned),
        waits_for_key: is_encrypted && volume.waiting_for.starts_with(WAITS_FOR_KEY),
        replay_is_due: elsewhere || here.is_some_and(|one| one.replays || one.replay_is_late),
        size_bytes: volume.size_bytes,
        block_size: context::block_size(volume),
    }
}

fn entry(status: VolumeHealthErrorType, reason: &str, message: &str) -> VolumeHealthEntry {
    VolumeHealthEntry {
        status: status.into(),
        reason: reason.to_owned(),
        message: cut(message.to_owned()),
    }
}

/// This node's way to the pools.
#[derive(Default)]
pub struct Pools {
    /// Addresses, as the control plane told them last.
    addresses: Mutex<Vec<String>>,
}

impl Pools {
    /// Judges the storage as this node reaches it.
    ///
    /// # Errors
    /// 14 where the control plane is out of reach and the pools' addresses are not known.
    pub async fn health(&self, backend: &Backend) -> Result<Vec<StorageBackendHealth>, Status> {
        let told = self.learn(backend).await;
        let addresses = self.addresses.lock().expect("no holder of this lock panics").clone();
        if let Err(why) = &told
            && addresses.is_empty()
        {
            return Err(not_judged("the storage", why));
        }
        Ok(judge(told.as_ref().err().map(String::as_str), reached(&addresses).await))
    }

    /// Asks the control plane for the pools.
    ///
    /// # Errors
    /// Why it does not answer.
    pub async fn learn(&self, backend: &Backend) -> Result<(), String> {
        let addresses = backend.pool_addresses();
        let told = match tokio::time::timeout(5 * CONNECT_MAX, addresses).await {
            Ok(told) => told.map_err(|status| status.message().to_owned())?,
            Err(_) => return Err("the control plane does not answer".to_owned()),
        };
        *self.addresses.lock().expect("no holder of this lock panics") = told;
        Ok(())
    }
}

/// Succeeds if any pool is reached.
async fn reached(addresses: &[String]) -> Result<(), String> {
    let mut tries = JoinSet::new();
    for address in addresses.iter().take(POOLS_MAX) {
        let address = address.clone();
        tries.spawn(async move {
            let connecting = tokio::net::TcpStream::connect(&address);
            match tokio::time::timeout(CONNECT_MAX, connecting).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(format!("{address}: {error}")),
                Err(_) => Err(format!("{address}: no connection within {CONNECT_MAX:?}")),
            }
        });
    }
    let mut why = "the cluster has no pool".to_owned();
    while let Some(tried) = tries.join_next().await {
        match tried {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(refused)) => why = refused,
            Err(failed) => why = failed.to_string(),
        }
    }
    Err(why)
}

fn judge(controller: Option<&str>, pools: Result<(), String>) -> Vec<StorageBackendHealth> {
    let entry =
        |status: StorageHealthErrorType, reason: &str, message: String| StorageBackendHealth {
            status: status.into(),
            reason: reason.to_owned(),
            message: cut(message),
            volume_capability: None,
        };
    let mut found = Vec::new();
    if let Err(why) = pools {
        let message = format!("no pool is reached from here; {why}");
        found.push(entry(StorageHealthErrorType::StorageUnreachable, NO_POOL_REACHED, message));
    }
    if let Some(why) = controller {
        let message = format!("attached volumes work, and nothing can be changed: {why}");
        let status = StorageHealthErrorType::StorageDegraded;
        found.push(entry(status, CONTROLLER_UNREACHABLE, message));
    }
    found
}

#[cfg(test)]
mod tests {
    use quoin_node::FaultKind;
    use tonic::Code;

    use super::*;

    /// Proves CSIN-HEALTH-05, CSIN-HEALTH-14: each severity has its own status, and what cannot be
    /// judged is an error.
    #[test]
    fn every_condition_becomes_an_entry_and_what_is_not_judged_an_error() {
        use volume_condition::Severity;
        let condition = |reason: &str, severity: Severity| api::VolumeCondition {
            reason: reason.to_owned(),
            severity: severity.into(),
            message: "x".repeat(500),
            ..Default::default()
        };
        let mut volume = api::Volume {
            id: "v".into(),
            conditions: vec![
                condition("BlocksLost", Severity::DataLoss),
                condition("NoQuorum", Severity::Inaccessible),
                condition("ReplicaOffline", Severity::Degraded),
                condition("FromTheFuture", Severity::Unspecified),
            ],
            ..Default::default()
        };
        let health = of_controller(&volume).unwrap();
        let statuses: Vec<i32> = health.health_statuses.iter().map(|one| one.status).collect();
        assert_eq!(statuses, [3, 2, 1, 1]);
        assert!(health.health_statuses.iter().all(|one| one.message.len() <= 128));
        volume.not_judged = "silence".into();
        let refused = of_controller(&volume).unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(refused.message().contains("silence"));
    }

    #[test]
    fn the_standing_of_a_volume_here_is_told_by_its_attachments_its_mirror_and_its_target() {
        let on = |node: &str, phase: &str| api::Attachment {
            node: node.into(),
            phase: phase.into(),
            ..Default::default()
        };
        let volume = |attachments| api::Volume { attachments, ..Default::default() };
        assert!(standing(&volume(vec![on("a", "Attached")]), "a").is_published);
        assert!(standing(&volume(vec![on("a", "Attaching")]), "a").is_published);
        for other in [vec![], vec![on("b", "Attached")], vec![on("a", "Detaching")]] {
            assert!(!standing(&volume(other), "a").is_published);
        }
        let replays = api::Attachment { replays: true, ..on("b", "Attached") };
        assert!(standing(&volume(vec![on("a", "Attached"), replays]), "a").replay_is_due);
        for (role, is_copy) in
            [("off", false), ("primary", false), ("", false), ("secondary", true)]
        {
            let mirror = api::MirrorOfVolume { role: role.into(), ..Default::default() };
            let mirrored = api::Volume { mirror: Some(mirror), ..Default::default() };
            assert_eq!(standing(&mirrored, "a").copy.is_some(), is_copy, "{role}");
        }
        let spec = api::VolumeSpec { encryption: Some(Default::default()), ..Default::default() };
        let waiting_for = format!("{WAITS_FOR_KEY} (hint)");
        let locked = api::Volume { spec: Some(spec), waiting_for, ..Default::default() };
        assert!(standing(&locked, "a").waits_for_key);
        assert!(!standing(&api::Volume { spec: None, ..locked }, "a").waits_for_key);
    }

    /// Proves CSIN-HEALTH-10: the statuses of a node.
    #[test]
    fn a_read_only_file_system_is_degraded_and_any_other_fault_of_a_node_inaccessible() {
        for kind in FaultKind::ALL {
            let fault = VolumeFault { kind: *kind, message: "why".into() };
            let health = of_node("v".into(), &[fault]);
            let expected = if *kind == FaultKind::TurnedReadOnly { 1 } else { 2 };
            assert_eq!(health.health_statuses[0].status, expected, "{kind:?}");
        }
    }

    /// Proves CSIN-HEALTH-22, CSIN-HEALTH-23.
    #[tokio::test]
    async fn a_node_without_a_pool_is_cut_off_and_one_without_the_controller_is_degraded() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = listener.local_addr().unwrap().to_string();
        let gone = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().to_string()
        };
        assert_eq!(reached(&[gone.clone(), there]).await, Ok(()), "one is enough");
        let none = reached(std::slice::from_ref(&gone)).await;
        assert!(none.as_ref().unwrap_err().contains(&gone));
        assert!(reached(&[]).await.unwrap_err().contains("no pool"));
        assert_eq!(judge(None, Ok(())), []);
        let statuses = |found: Vec<StorageBackendHealth>| {
            found.into_iter().map(|one| (one.status, one.reason)).collect::<Vec<_>>()
        };
        let lost = (1, CONTROLLER_UNREACHABLE.to_owned());
        let cut_off = (2, NO_POOL_REACHED.to_owned());
        assert_eq!(statuses(judge(Some("silence"), Ok(()))), std::slice::from_ref(&lost));
        assert_eq!(statuses(judge(None, none.clone())), std::slice::from_ref(&cut_off));
        assert_eq!(statuses(judge(Some("silence"), none)), [cut_off, lost]);
    }
}
