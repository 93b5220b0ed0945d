//! The Identity service: name, capabilities and readiness of the plugin as a whole.

use quoin_api::csi::identity_server::Identity;
use quoin_api::csi::plugin_capability::{
    Service, Type, VolumeExpansion, service, volume_expansion,
};
use quoin_api::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, PluginCapability, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

use crate::Plugin;
use crate::edition::Edition;

/// Serves Identity in every mode.
pub(crate) struct IdentityService(pub Plugin);

/// Returns whether a name satisfies the interface and the strictest client: 63 characters of a
/// domain name that starts and ends with a letter.
pub fn is_driver_name(name: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        !bytes.is_empty()
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
            && bytes[0].is_ascii_alphanumeric()
            && bytes[bytes.len() - 1].is_ascii_alphanumeric()
    };
    (1..=63).contains(&name.len())
        && name.split('.').all(label)
        && name.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && name.ends_with(|letter: char| letter.is_ascii_alphabetic())
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.0.driver_name().to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        // The same on every host and in every mode: these are capabilities of the plugin, not of
        // the process.
        let service = |kind: service::Type| Type::Service(Service { r#type: kind.into() });
        let growth = Type::VolumeExpansion(VolumeExpansion {
            r#type: volume_expansion::Type::Online.into(),
        });
        let capabilities = self
            .0
            .of_edition(&[
                (Edition::OLDEST, service(service::Type::ControllerService)),
                (Edition::OLDEST, service(service::Type::VolumeAccessibilityConstraints)),
                (Edition::OLDEST, service(service::Type::GroupControllerService)),
                (Edition::V1_10, service(service::Type::SnapshotMetadataService)),
                (Edition::NEWEST, service(service::Type::SnapshotAccessibilityConstraints)),
                (Edition::OLDEST, growth),
            ])
            .into_iter()
            .map(|kind| PluginCapability { r#type: Some(kind) })
            .collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        self.0.check_node().await?;
        // An orchestrator restarts a plugin that is ill, on all nodes at once where each asked the
        // controller; its sidecars end at an error and wait while the plugin is not ready.
        let ready = !self.0.mode().controller || self.0.backend().ping().await.is_ok();
        Ok(Response::new(ProbeResponse { ready: Some(ready) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves CSI-PLUGININFO-02, CSI-PLUGININFO-04, CSI-PLUGININFO-05: for the name's form.
    #[test]
    fn a_driver_name_is_a_domain_name_that_starts_and_ends_with_a_letter() {
        assert!(is_driver_name(crate::DRIVER_NAME));
        assert!(is_driver_name(&"x".repeat(63)));
        for bad in
            ["", "-a", "a-", "a..b", "a.b.", "1.csi.io", "csi.io1", "a_b", "ü.io", &"x".repeat(64)]
        {
            assert!(!is_driver_name(bad), "{bad}");
        }
    }
}
