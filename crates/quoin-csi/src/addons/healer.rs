//! NodeHealer: the health of a volume on this node, and its healing.
//!
//! Served on the socket of CSI and on that of CSI-Addons. A heal that is not possible is no error: the
//! answer says what is wrong, why it is not healed and the way out. Judgement and healing are the node
//! library's; the replicas are the controller's to judge, and its conditions are in the answer too.

use quoin_api::control as api;
use quoin_api::csi_addons::healer::healer_node_server::HealerNode;
use quoin_api::csi_addons::healer::{NodeHealerRequest, NodeHealerResponse};
use quoin_node::{HealRequest, Healed};
use tonic::{Request, Response, Status};

use crate::capability::{Capability, CapabilityError};
use crate::refusal::{from_node, invalid, not_at_any_path};
use crate::{Plugin, addons, context, encryption, health, limits};

/// Serves the healer in the modes that have the node.
pub(crate) struct HealerService(pub Plugin);

#[tonic::async_trait]
impl HealerNode for HealerService {
    async fn node_healer(
        &self,
        request: Request<NodeHealerRequest>,
    ) -> Result<Response<NodeHealerResponse>, Status> {
        let (backend, node) = self.0.served_by_node("NodeHealer")?;
        let mut request = request.into_inner();
        limits::required("volume_id", &request.volume_id)?;
        let path = limits::path("volume_path", &request.volume_path)?;
        let staging = limits::optional_path("staging_target_path", &request.staging_target_path)?;
        if request.volume_capability.is_some() {
            Capability::read("volume_capability", request.volume_capability.as_ref())
                .map_err(CapabilityError::invalid)?;
        }
        let secrets = self.0.admit("NodeHealer", &mut request.secrets)?;
        limits::map("volume_context", &request.volume_context)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let (host, name) = (node.host.clone(), node.name.clone());
        let plugin = self.0.clone();
        addons::run("NodeHealer", async move {
            let _held = held;
            let volume_id = request.volume_id;
            let volume = addons::known(&backend, &host, &volume_id).await?;
            let mut key = None;
            if let Some(volume) = &volume {
                context::compare(&request.volume_context, &context::of_volume(volume))
                    .map_err(|why| invalid("volume_context", why))?;
                if secrets.contains_key(encryption::SECRET) {
                    key = encryption::of_stage(volume, &secrets).await?;
                }
            }
            for place in std::iter::once(&path).chain(&staging) {
                host.check_place(&volume_id, place).map_err(|error| from_node(&error))?;
            }
            let standing = volume.as_ref().map(|volume| health::standing(volume, &name));
            let wanted = HealRequest { volume: volume_id.clone(), standing, key };
            let healed = host.heal(&wanted).await.map_err(|error| from_node(&error))?;
            let healed = healed.ok_or_else(|| not_at_any_path(&volume_id))?;
            plugin.note_heal(&volume_id, &name, &healed);
            Ok(Response::new(answer(&healed, volume.as_ref())))
        })
        .await
    }
}

/// Puts the state into words: what is wrong, why it is not healed, what was done.
fn answer(healed: &Healed, volume: Option<&api::Volume>) -> NodeHealerResponse {
    let mut words: Vec<String> = healed
        .faults
        .iter()
        .map(|fault| format!("{}: {}", fault.kind.as_str(), fault.message))
        .collect();
    if let Some(why) = healed.why_not.as_ref().filter(|_| !words.is_empty()) {
        words.push(format!("not healed: {why}"));
    }
    for condition in volume.iter().flat_map(|volume| &volume.conditions) {
        let api::VolumeCondition { reason, message, way_out, .. } = condition;
        let way_out = if way_out.is_empty() { String::new() } else { format!(" ({way_out})") };
        words.push(format!("{reason}: {message}{way_out}"));
    }
    let abnormal = !words.is_empty();
    if !abnormal {
        words.push("present and usable on this node".to_owned());
    }
    let unknown = match volume.map(|volume| volume.not_judged.as_str()) {
        None => Some("the controller does not answer"),
        Some("") => None,
        Some(why) => Some(why),
    };
    if let Some(why) = unknown {
        words.push(format!("nothing is said of its replicas yet: {why}"));
    }
    if !healed.did.is_empty() {
        words.push(format!("this call: {}", healed.did.join(", ")));
    }
    NodeHealerResponse { abnormal, message: words.join("; ") }
}

#[cfg(test)]
mod tests {
    use quoin_node::{FaultKind, VolumeFault};

    use super::*;

    /// Proves HEAL-RESP-01, HEAL-RESP-02: in words, whatever is known.
    #[test]
    fn a_volume_is_normal_only_where_neither_the_node_nor_the_controller_finds_a_fault() {
        let told = answer(&Healed::default(), Some(&api::Volume::default()));
        assert!(!told.abnormal && told.message.contains("usable"), "{told:?}");
        let away = answer(&Healed::default(), None);
        assert!(!away.abnormal && away.message.contains("controller does not answer"), "{away:?}");
        let fault = VolumeFault { kind: FaultKind::SessionLost, message: "its IO waits".into() };
        let healed = Healed {
            faults: vec![fault],
            did: vec!["waited"],
            why_not: Some("the target is away".into()),
        };
        let told = answer(&healed, None);
        assert!(told.abnormal);
        for words in ["SessionLost: its IO waits", "not healed: the target is away", "waited"] {
            assert!(told.message.contains(words), "{told:?}");
        }
        let condition = api::VolumeCondition {
            reason: "ReplicaOffline".into(),
            message: "on pool a".into(),
            way_out: "start it".into(),
            ..Default::default()
        };
        let degraded = api::Volume { conditions: vec![condition], ..Default::default() };
        let told = answer(&Healed::default(), Some(&degraded));
        assert!(
            told.abnormal && told.message == "ReplicaOffline: on pool a (start it)",
            "{told:?}"
        );
        let unknown = api::Volume { not_judged: "pools are silent".into(), ..Default::default() };
        let told = answer(&Healed::default(), Some(&unknown));
        assert!(!told.abnormal && told.message.contains("yet: pools are silent"), "{told:?}");
    }
}
