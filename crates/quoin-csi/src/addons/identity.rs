//! The Identity service of CSI-Addons: the name of the driver, what this process serves, and whether it
//! can.

use std::time::Duration;

use quoin_api::csi_addons::identity::capability::Type;
use quoin_api::csi_addons::identity::identity_server::Identity;
use quoin_api::csi_addons::identity::{
    Capability, GetCapabilitiesRequest, GetCapabilitiesResponse, GetIdentityRequest,
    GetIdentityResponse, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

use crate::{Plugin, refusal};

/// Silence of the controller for which a process still counts as healthy: one that restarts is back
/// before.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Serves Identity in every mode.
pub(crate) struct IdentityService {
    pub plugin: Plugin,
    pub capabilities: Vec<Type>,
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_identity(
        &self,
        _: Request<GetIdentityRequest>,
    ) -> Result<Response<GetIdentityResponse>, Status> {
        Ok(Response::new(GetIdentityResponse {
            name: self.plugin.driver_name().to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: Default::default(),
        }))
    }

    async fn get_capabilities(
        &self,
        _: Request<GetCapabilitiesRequest>,
    ) -> Result<Response<GetCapabilitiesResponse>, Status> {
        // Capabilities of the process and not of the driver: callers go by them to the one that serves.
        let one = |kind: &Type| Capability { r#type: Some(*kind) };
        let capabilities = self.capabilities.iter().map(one).collect();
        Ok(Response::new(GetCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        self.plugin.check_node().await?;
        let backend = self.plugin.backend();
        // A process of the node does its part of each call without the controller, or says what it lacks.
        let ready =
            !self.plugin.mode().controller || is_ready(backend.ping().await, backend.silence())?;
        Ok(Response::new(ProbeResponse { ready: Some(ready) }))
    }
}

/// Judges by whether the controller answers now, and for how long it has not.
///
/// # Errors
/// 9 once it was silent for too long.
fn is_ready(answer: Result<(), Status>, silence: Option<Duration>) -> Result<bool, Status> {
    match (answer, silence) {
        (Ok(()), _) => Ok(true),
        // The process is still starting: the controller may start after it.
        (Err(_), None) => Ok(false),
        (Err(_), Some(silence)) if silence < SILENCE_MAX => Ok(true),
        (Err(why), Some(silence)) => Err(refusal::precondition(format!(
            "the controller was not reached for {} s: {}; IO of mounted volumes goes on",
            silence.as_secs(),
            why.message()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    /// Proves ADDONS-IDENTITY-08, ADDONS-IDENTITY-09: by the time for which the controller was silent.
    #[test]
    fn a_process_is_starting_until_the_controller_answered_and_ill_after_half_a_minute_without() {
        let away = || Err(Status::unavailable("connection refused"));
        let seconds = |number| Some(Duration::from_secs(number));
        assert!(!is_ready(away(), None).unwrap(), "starting");
        assert!(is_ready(Ok(()), seconds(0)).unwrap());
        assert!(is_ready(away(), seconds(29)).unwrap(), "a controller that restarts");
        let ill = is_ready(away(), seconds(30)).unwrap_err();
        assert_eq!(ill.code(), Code::FailedPrecondition);
        assert!(ill.message().contains("30 s") && ill.message().contains("refused"), "{ill}");
    }
}
