//! `quoin volume doctor`: what is wrong with a volume, since when, what Quoin does about it, and
//! what a person can do.

use anyhow::{Result, bail};
use quoin_api::control::{Volume, VolumeCondition, volume_condition};
use serde::Serialize;

use super::view::claim_in_words;
use crate::client::{Cluster, get_volume};
use crate::output::{self, Format};

/// Exit code where something is wrong.
pub const ILL: i32 = 3;

pub const HELP: &str = "Ends with 0 where all is well, 3 where something is wrong, 1 where that \
    cannot be said.\n\nExample:\n  quoin volume doctor db -o json | jq '.conditions[].reason'\n\n\
    docs/health.md lists every reason. CSI reports the same conditions.";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DoctorView {
    name: String,
    id: String,
    health: String,
    well: bool,
    /// The worst first.
    conditions: Vec<ConditionView>,
    /// Facts that are worth knowing and no condition of the volume.
    notes: Vec<String>,
    contract: String,
    /// The claim of Kubernetes that has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    claim: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ConditionView {
    reason: String,
    /// Degraded | Inaccessible | DataLoss
    severity: &'static str,
    message: String,
    /// First observation by the present controller; empty: just now.
    since: String,
    /// Action of Quoin about it.
    action: String,
    /// Steps that a person can take.
    way_out: String,
}

impl From<VolumeCondition> for ConditionView {
    fn from(condition: VolumeCondition) -> Self {
        Self {
            severity: match condition.severity() {
                volume_condition::Severity::DataLoss => "DataLoss",
                volume_condition::Severity::Inaccessible => "Inaccessible",
                _ => "Degraded",
            },
            since: condition.since.as_ref().map(crate::events::show_time).unwrap_or_default(),
            reason: condition.reason,
            message: condition.message,
            action: condition.action,
            way_out: condition.way_out,
        }
    }
}

impl ConditionView {
    fn text(&self) -> String {
        let since = if self.since.is_empty() { "just now" } else { &self.since };
        let mut text = format!("{} ({}), since {since}\n", self.reason, self.severity);
        for (name, value) in
            [("what", &self.message), ("Quoin", &self.action), ("you", &self.way_out)]
        {
            if !value.is_empty() {
                text += &format!("  {name:<6} {value}\n");
            }
        }
        text
    }
}

impl From<Volume> for DoctorView {
    fn from(volume: Volume) -> Self {
        let mut notes = Vec::new();
        let is_here = |node: &str| volume.attachments.iter().any(|on| on.node == node);
        for device in volume.devices.iter().filter(|device| device.dead.is_empty()) {
            if !is_here(&device.node) {
                notes.push(format!(
                    "node {} still has the device {} of it, though it is not attached there: it goes \
                     by itself once nothing uses it",
                    device.node, device.device
                ));
            }
        }
        for device in volume.devices.iter().filter(|device| !device.dead.is_empty()) {
            notes.push(format!(
                "a device on node {} is dead ({}); its users there must unmount it, and `quoin volume \
                 heal` there makes a new one where CSI staged it",
                device.node, device.dead
            ));
        }
        for replica in volume.replicas.iter().filter(|replica| replica.slow) {
            notes.push(format!(
                "the replica on pool {} takes writes after {:.1} ms, much later than the others",
                replica.pool,
                replica.write_us as f64 / 1000.0
            ));
        }
        if !volume.changing.is_empty() {
            notes.push(format!("under way: {}", volume.changing));
        }
        let spec = volume.spec.unwrap_or_default();
        Self {
            claim: claim_in_words(&spec.claim.into_iter().collect()),
            name: spec.name,
            id: volume.id,
            health: volume.health,
            well: volume.conditions.is_empty(),
            conditions: volume.conditions.into_iter().map(ConditionView::from).collect(),
            notes,
            contract: volume.contract,
        }
    }
}

impl DoctorView {
    fn text(&self) -> String {
        let name = match self.claim.as_str() {
            "" => self.name.clone(),
            claim => format!("{} (claim {claim})", self.name),
        };
        let mut text = match self.conditions.len() {
            0 => format!("volume {name} is well: {}\n", self.contract),
            1 => format!("volume {name}: 1 thing is wrong\n\n"),
            n => format!("volume {name}: {n} things are wrong\n\n"),
        };
        let conditions: Vec<_> = self.conditions.iter().map(ConditionView::text).collect();
        text += &conditions.join("\n");
        for note in &self.notes {
            text += &format!("note: {note}\n");
        }
        text
    }
}

pub async fn doctor(cluster: &mut Cluster, name: &str, format: Format) -> Result<()> {
    let volume = get_volume(cluster, name).await?;
    if !volume.not_judged.is_empty() {
        bail!("volume {name} cannot be judged yet: {}; try again in a moment", volume.not_judged);
    }
    let view = DoctorView::from(volume);
    output::print_one(format, &view, || view.text())?;
    if !view.well {
        std::process::exit(ILL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_condition_says_what_since_when_and_what_is_and_can_be_done() {
        let condition = VolumeCondition {
            reason: "ReplicaOffline".into(),
            severity: volume_condition::Severity::Degraded.into(),
            message: "on pool a: its pool is offline".into(),
            since: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            action: "it is replaced".into(),
            way_out: "start it".into(),
        };
        let volume = Volume { conditions: vec![condition], ..Volume::default() };
        let text = DoctorView::from(volume).text();
        for words in [
            "1 thing is wrong",
            "ReplicaOffline (Degraded), since 2023-11-14T22:13:20Z",
            "what   on pool a: its pool is offline",
            "Quoin  it is replaced",
            "you    start it",
        ] {
            assert!(text.contains(words), "{text}");
        }
        let well = DoctorView::from(Volume { contract: "survives".into(), ..Volume::default() });
        assert!(well.well && well.text().contains("is well: survives"));
        let claim = [("pvc/namespace", "shop"), ("pvc/name", "orders"), ("pv/name", "pvc-1")];
        let claim = claim.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let spec = quoin_api::control::VolumeSpec { claim: claim.into(), ..Default::default() };
        let claimed = DoctorView::from(Volume { spec: Some(spec), ..Volume::default() });
        assert!(claimed.text().contains("(claim shop/orders) is well"), "{}", claimed.text());
    }
}
