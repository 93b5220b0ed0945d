//! Notes of a volume's state machine, in an operator's words.

use quoin_replication::primary::PrimaryNote;
use quoin_telemetry::notices::{Notices, Severity};
use quoin_types::VolumeId;

/// Reports each note as an event, with its cause and, where there is one, the next step. State that
/// changes with every step of a rebuild is left to the status report.
///
/// A volume that is being opened waits for its replicas each time, so only one that `served` before
/// makes waiting a warning; if an opening lasts, the volume's health reports it.
pub fn tell(notices: &Notices, volume: VolumeId, note: PrimaryNote, served: bool) {
    use Severity::{Error, Normal, Warning};
    let mut replica = String::new();
    let (severity, reason, message) = match note {
        PrimaryNote::Opening { epoch } => {
            tracing::info!(%volume, %epoch, "opening");
            return;
        }
        // The controller reports the end, with all findings.
        PrimaryNote::Rebuilding { .. } | PrimaryNote::Verifying { .. } => return,
        PrimaryNote::Stopped => {
            tracing::info!(%volume, "stopped");
            return;
        }
        PrimaryNote::Serving { epoch, at } => {
            (Normal, "Serving", format!("IO is served under epoch {epoch}, from LSN {} on", at.lsn))
        }
        PrimaryNote::Waiting(what) if what.is_empty() => {
            (Normal, "WaitingOver", "goes on".to_owned())
        }
        PrimaryNote::Waiting(what) if !served => (Normal, "Opening", format!("waits for {what}")),
        PrimaryNote::Waiting(what) => (Warning, "Waiting", format!("waits for {what}")),
        PrimaryNote::UnflushedTailMayBeLost => (
            Error,
            "UnflushedTailMayBeLost",
            "most replicas lost their caches at once: acknowledged writes that were never flushed \
             may be missing; what was flushed is there"
                .to_owned(),
        ),
        PrimaryNote::InSync { members } => {
            (Normal, "InSync", format!("{} replicas are in sync", members.len()))
        }
        PrimaryNote::Dropped { member, reason } => {
            replica = member.id.to_string();
            (Warning, "ReplicaDropped", format!("out of sync: {reason}"))
        }
        PrimaryNote::Slow { member, took, others } => {
            replica = member.id.to_string();
            let message = format!(
                "it takes writes after {} on average, the others after {}: look at the network and \
                 the disk of its host",
                milliseconds(took),
                milliseconds(others)
            );
            (Warning, "ReplicaSlow", message)
        }
        PrimaryNote::NoLongerSlow { member, took } => {
            replica = member.id.to_string();
            let message = format!("it takes writes after {}, as the others do", milliseconds(took));
            (Normal, "ReplicaNoLongerSlow", message)
        }
        PrimaryNote::Rebuilt { member, moved_bytes, rounds } => {
            replica = member.id.to_string();
            let mib = moved_bytes.div_ceil(1 << 20);
            let rounds = match rounds {
                1 => String::new(),
                n => format!(" in {n} rounds"),
            };
            (Normal, "ReplicaRebuilt", format!("complete again; {mib} MiB were copied{rounds}"))
        }
        // The controller knows its name, and announces the outcome.
        PrimaryNote::Snapshot { id, outcome } => {
            tracing::info!(%volume, %id, ?outcome, "a snapshot is answered");
            return;
        }
        PrimaryNote::Point { point, outcome } => {
            tracing::debug!(%volume, %point, ?outcome, "a step of a point is answered");
            return;
        }
        PrimaryNote::Reverted { attempt, outcome } => {
            tracing::info!(%volume, %attempt, ?outcome, "a Revert is answered");
            return;
        }
        PrimaryNote::BadBlock { member, lba, repaired } => {
            replica = member.id.to_string();
            let outcome =
                if repaired { "repaired from another replica" } else { "not repaired yet" };
            (Warning, "BadBlock", format!("a bad copy of block {lba} was found, {outcome}"))
        }
        PrimaryNote::MapMended { member, lba, blocks, done: true } => {
            replica = member.id.to_string();
            let what = format!("the map of {blocks} blocks from block {lba} on was bad");
            (Warning, "MapRepaired", format!("{what}, repaired from another replica"))
        }
        // Tried again, or whole since: the pool reports blocks that stay bad.
        PrimaryNote::MapMended { done: false, .. } => return,
        PrimaryNote::BlockLost { lba } => (
            Error,
            "BlockLost",
            format!("no good copy of block {lba} is left: reads of it fail until it is written"),
        ),
        PrimaryNote::Fenced { by } => {
            (Normal, "Fenced", format!("epoch {by} was granted elsewhere: this target stopped"))
        }
        PrimaryNote::ControlPlaneBehind { durable_version } => (
            Error,
            "ControlPlaneBehind",
            format!(
                "replicas know membership version {durable_version}, the control plane an older \
                 one: it was restored from an old copy; nothing is served before `quoin controller \
                 recover`"
            ),
        ),
        PrimaryNote::NotAdmitted { member, refusal } if refusal.is_too_many() => {
            replica = member.id.to_string();
            (Warning, "TooManyReplicas", format!("it was turned away: {refusal}"))
        }
        PrimaryNote::NotAdmitted { member, refusal } => {
            replica = member.id.to_string();
            (Warning, "ReplicaRefused", format!("it was turned away: {refusal}"))
        }
        PrimaryNote::Changed { membership } => (
            Normal,
            "MembershipChanged",
            format!(
                "version {}: {} replicas are known, {} of them hold what is acknowledged",
                membership.version, membership.rf, membership.cf
            ),
        ),
        PrimaryNote::ChangeGivenUp { .. } => (
            Warning,
            "ChangeGivenUp",
            "a replica that it needs went away before the records had it; it is tried again"
                .to_owned(),
        ),
        PrimaryNote::ClientRefused { client } => (
            Warning,
            "ClientRefused",
            format!(
                "client {client} does not begin to change the volume: its attachment is over, or as \
                 many hosts change the volume as may"
            ),
        ),
        PrimaryNote::InvariantRefused { member, invariant } => {
            replica = member.id.to_string();
            (Error, "InvariantRefused", format!("said what {invariant} forbids and was shut out"))
        }
    };
    notices.push(severity, volume, replica, reason, message);
}

fn milliseconds(time: std::time::Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_a_warning_only_of_a_volume_that_served_before() {
        let severity = |served| {
            let notices = Notices::default();
            tell(&notices, VolumeId(7), PrimaryNote::Waiting("a majority".into()), served);
            notices.take().first().map(|notice| notice.severity.as_str().to_owned())
        };
        assert_eq!(severity(false).as_deref(), Some("Normal"));
        assert_eq!(severity(true).as_deref(), Some("Warning"));
    }
}
