//! Rotation of the key of an encrypted volume: another key of its user opens it, and the former one no more.
//!
//! The data key stays, so no block is written anew. The caller has the new key alone; the data key is in the
//! target of the node that uses the volume, which wraps it for the new key. Where none has it here, a key
//! among the secrets must open the volume.

use quoin_api::control as api;
use quoin_api::csi_addons::encryptionkeyrotation::encryption_key_rotation_controller_server::EncryptionKeyRotationController;
use quoin_api::csi_addons::encryptionkeyrotation::{
    EncryptionKeyRotateRequest, EncryptionKeyRotateResponse,
};
use tonic::{Code, Request, Response, Status};
use zeroize::Zeroizing;

use crate::refusal::precondition;
use crate::{Plugin, addons, encryption, health, limits};

/// Attempts where the record of the volume changes meanwhile.
const TRIES_MAX: u32 = 5;

/// Serves the call in the modes that have the node.
pub(crate) struct RotationService(pub Plugin);

#[tonic::async_trait]
impl EncryptionKeyRotationController for RotationService {
    async fn encryption_key_rotate(
        &self,
        request: Request<EncryptionKeyRotateRequest>,
    ) -> Result<Response<EncryptionKeyRotateResponse>, Status> {
        let (backend, node) = self.0.served_by_node("EncryptionKeyRotate")?;
        let mut request = request.into_inner();
        let given = Zeroizing::new(std::mem::take(&mut request.encryption_key));
        limits::required("volume_id", &request.volume_id)?;
        // A path names a volume that its id names already; parameters and the capability say nothing of keys.
        limits::optional_path("volume_path", &request.volume_path)?;
        let secrets = self.0.admit("EncryptionKeyRotate", &mut request.secrets)?;
        let held = self.0.begin_on_node(&request.volume_id).await?;
        let host = node.host.clone();
        addons::run("EncryptionKeyRotate", async move {
            let _held = held;
            let mut tries = 0;
            loop {
                let volume = backend.volume(&request.volume_id).await?;
                check(&volume)?;
                let keys = encryption::keys_of_rotation(&given, &secrets)?;
                let rotated = encryption::rotate(&volume, &keys, &host).await?;
                let Some(slots) = rotated else { break };
                tries += 1;
                match backend.set_key_slots(&volume, slots).await {
                    Err(status) if status.code() == Code::Aborted && tries < TRIES_MAX => {}
                    done => break done?,
                }
            }
            Ok(Response::new(EncryptionKeyRotateResponse {}))
        })
        .await
    }
}

/// Checks that a volume has a key that may be rotated here.
fn check(volume: &api::Volume) -> Result<(), Status> {
    if volume.spec.as_ref().is_none_or(|spec| spec.encryption.is_none()) {
        return Err(precondition(format_args!(
            "volume {:?} is not encrypted, so it has no key to be rotated",
            volume.id
        )));
    }
    match health::copy_role(volume) {
        Some(role) => Err(precondition(format_args!(
            "volume {:?} is {role}, a copy of a volume of another cluster: its key is rotated there, and \
             comes with the next exchange",
            volume.id
        ))),
        None => Ok(()),
    }
}
