//! Changes of a volume by mutable parameters.

use std::collections::HashMap;

use quoin_api::control as api;
use tonic::{Code, Status};

use crate::backend::Backend;
use crate::parameters;
use crate::refusal::not_in_force;

/// Changes a volume; `None`: the request has no parameter, and the volume must only exist.
///
/// # Errors
/// 14 where the records have the change and the volume's target has not reported it in force: a
/// repeat completes it.
pub async fn modify(
    backend: &Backend,
    volume_id: &str,
    change: Option<api::VolumeSpec>,
) -> Result<(), Status> {
    let Some(change) = change else { return backend.volume(volume_id).await.map(drop) };
    let answer = backend.modify_volume(volume_id, change, false).await?;
    match answer.waiting_for.as_str() {
        "" => Ok(()),
        waiting_for => Err(not_in_force(waiting_for)),
    }
}

/// Returns whether a volume could take these parameters now; the inner error says which it could
/// not.
///
/// # Errors
/// If that cannot be found out.
pub async fn is_possible(
    backend: &Backend,
    volume: &api::Volume,
    given: &HashMap<String, String>,
) -> Result<Result<(), String>, Status> {
    let change = match parameters::read_change(given) {
        Ok(None) => return Ok(Ok(())),
        Ok(Some(change)) => change,
        Err(refused) => return Ok(Err(refused.message().to_owned())),
    };
    match backend.modify_volume(&volume.id, change, true).await {
        Ok(_) => Ok(Ok(())),
        Err(refused) => match refused.code() {
            Code::InvalidArgument | Code::FailedPrecondition | Code::ResourceExhausted => {
                Ok(Err(refused.message().to_owned()))
            }
            _ => Err(refused),
        },
    }
}

/// Returns the parameters that were checked: all but those of sidecars.
pub fn checked(mut given: HashMap<String, String>) -> HashMap<String, String> {
    given.retain(|key, _| !parameters::is_foreign(key));
    given
}
