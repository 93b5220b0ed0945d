//! Keys of encrypted volumes: from a call's secrets to key slots, and to the data key of a node.
//!
//! One secret is looked at, [`SECRET`], and only where the volume is encrypted. A key of 256 bits
//! is written in hex digits, so every value is text. No message repeats a secret.

use std::collections::HashMap;

use quoin_api::control::{self as api, VolumeSpec};
use quoin_encryption::{DataKey, Encryption, Error, KeySlot, UserKey};
use quoin_node::NodeHost;
use tonic::Status;

use crate::refusal::{from_node, internal, invalid, precondition, unauthenticated};

/// The secret with the key of a volume.
pub const SECRET: &str = "encryptionKey";
/// Parameter of a storage class that asks for encryption.
pub const PARAMETER: &str = "encrypted";
/// Name of the slot of a volume that CSI made.
const SLOT: &str = "csi";

/// Returns the key of a volume that is to be made; `None`: it is not to be encrypted.
///
/// # Errors
/// 16 without the secret, 3 where it breaks its rule.
pub fn of_new_volume(
    spec: &VolumeSpec,
    secrets: &HashMap<String, String>,
) -> Result<Option<UserKey>, Status> {
    let is_asked = spec.parameters.get(PARAMETER).is_some_and(|value| value == "true");
    if is_asked { user_key(secrets).map(Some) } else { Ok(None) }
}

/// Draws a data key for a new volume.
///
/// # Errors
/// 13 where the system refuses.
pub async fn create(user: UserKey) -> Result<api::Encryption, Status> {
    let made = blocking(move || Encryption::create(&user, SLOT)).await?;
    made.map(|encryption| api::Encryption::from(&encryption)).map_err(|error| refused(&error))
}

/// Checks that a volume which exists has this key.
///
/// # Errors
/// 16 where it has another.
pub async fn check(volume: &api::Volume, user: UserKey) -> Result<(), Status> {
    unlock(volume, user).await.map(drop)
}

/// Returns the data key of a volume that is to be staged; `None`: it is not encrypted.
///
/// # Errors
/// 16 without the secret or with a wrong one, 3 where it breaks its rule.
pub async fn of_stage(
    volume: &api::Volume,
    secrets: &HashMap<String, String>,
) -> Result<Option<DataKey>, Status> {
    if volume.spec.as_ref().is_none_or(|spec| spec.encryption.is_none()) {
        return Ok(None);
    }
    let user = user_key(secrets)?;
    unlock(volume, user).await.map(Some)
}

/// Keys of a rotation: the new one, and one that may open the volume, where it came too.
pub struct RotationKeys {
    new: UserKey,
    former: Option<UserKey>,
}

/// Returns the keys of a rotation. `given`: the new key; where it is empty, it is among the secrets.
///
/// # Errors
/// 16 without a new key, 3 where one breaks its rule.
pub fn keys_of_rotation(
    given: &str,
    secrets: &HashMap<String, String>,
) -> Result<RotationKeys, Status> {
    if given.is_empty() {
        return Ok(RotationKeys { new: user_key(secrets)?, former: None });
    }
    let new = UserKey::parse(given.as_bytes());
    let new = new.map_err(|rule| invalid("encryption_key", format!("is no key: {rule}")))?;
    let has_former = secrets.get(SECRET).is_some_and(|text| !text.is_empty());
    let former = if has_former { Some(user_key(secrets)?) } else { None };
    Ok(RotationKeys { new, former })
}

/// Returns the key slots of a volume after a rotation; `None`: the new key is in force already. The data key
/// is wrapped by the target of this node, if it has that, and else here, with a key that opens the volume.
///
/// # Errors
/// 16 where nothing here opens the volume; 9 where it has no room for another slot.
pub async fn rotate(
    volume: &api::Volume,
    keys: &RotationKeys,
    host: &NodeHost,
) -> Result<Option<api::Encryption>, Status> {
    let slots = volume.spec.as_ref().and_then(|spec| spec.encryption.as_ref());
    let slots = slots.ok_or_else(|| refused(&Error::WrongKey))?;
    let encryption = Encryption::try_from(slots).map_err(|error| refused(&error))?;
    let opened = unlock_with(&encryption, &keys.new).await?;
    let names = encryption.slot_names();
    if opened.as_ref().is_some_and(|opened| opened.slot == SLOT || names.len() == 1) {
        return Ok(None);
    }
    let slot = match opened {
        Some(opened) => slot_here(&encryption, opened.key, &keys.new).await?,
        None => {
            let wrapped = host.wrap_key(&volume.id, &keys.new, SLOT).await;
            match (wrapped.map_err(|error| from_node(&error))?, &keys.former) {
                (Some(slot), _) => slot,
                (None, Some(former)) => {
                    let opened = unlock_with(&encryption, former).await?;
                    let opened = opened.ok_or_else(|| refused(&Error::WrongKey))?;
                    slot_here(&encryption, opened.key, &keys.new).await?
                }
                (None, None) => {
                    return Err(unauthenticated(format!(
                        "volume {:?} is not in use on this node with its key, and no key came that opens \
                         it: rotate the key where it is used, or send the present one too (secret \
                         {SECRET:?}, with the new one as encryption_key)",
                        volume.id
                    )));
                }
            }
        }
    };
    let new = keys.new.clone();
    let next = blocking(move || encryption.with_slot(slot, &new)).await?;
    match next {
        Ok(next) => Ok(Some(api::Encryption::from(&next))),
        Err(Error::SlotsFull) => Err(precondition(
            "the volume has as many key slots as it may: remove one (`quoin volume key remove`)",
        )),
        Err(error) => Err(refused(&error)),
    }
}

async fn unlock_with(
    encryption: &Encryption,
    user: &UserKey,
) -> Result<Option<quoin_encryption::Unlocked>, Status> {
    let (encryption, user) = (encryption.clone(), user.clone());
    match blocking(move || encryption.unlock(&user)).await? {
        Ok(unlocked) => Ok(Some(unlocked)),
        Err(Error::WrongKey) => Ok(None),
        Err(error) => Err(refused(&error)),
    }
}

async fn slot_here(
    encryption: &Encryption,
    key: DataKey,
    new: &UserKey,
) -> Result<KeySlot, Status> {
    let (encryption, new) = (encryption.clone(), new.clone());
    let slot = blocking(move || encryption.slot_of(&key, &new, SLOT)).await?;
    slot.map_err(|error| refused(&error))
}

async fn unlock(volume: &api::Volume, user: UserKey) -> Result<DataKey, Status> {
    let slots = volume.spec.as_ref().and_then(|spec| spec.encryption.as_ref());
    let slots = slots.ok_or_else(|| refused(&Error::WrongKey))?;
    let encryption = Encryption::try_from(slots).map_err(|error| refused(&error))?;
    let unlocked = blocking(move || encryption.unlock(&user)).await?;
    unlocked.map(|unlocked| unlocked.key).map_err(|error| refused(&error))
}

fn user_key(secrets: &HashMap<String, String>) -> Result<UserKey, Status> {
    let text = secrets.get(SECRET).filter(|text| !text.is_empty()).ok_or_else(|| {
        unauthenticated(format!("the volume is encrypted: its key is missing (secret {SECRET:?})"))
    })?;
    let parsed = UserKey::parse(text.as_bytes());
    parsed.map_err(|rule| invalid("secrets", format!("has a wrong {SECRET:?}: {rule}")))
}

fn refused(error: &Error) -> Status {
    match error {
        Error::WrongKey => unauthenticated(error.to_string()),
        _ => {
            tracing::error!(%error, "a volume's key slots cannot be used");
            internal("the use of a key")
        }
    }
}

/// The derivation of a key takes some tenths of a second.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| internal("the use of a key"))
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn of(value: &str) -> HashMap<String, String> {
        HashMap::from([(SECRET.to_owned(), value.to_owned())])
    }

    fn spec(encrypted: &str) -> VolumeSpec {
        let parameters = [(PARAMETER.to_owned(), encrypted.to_owned())].into();
        VolumeSpec { parameters, ..VolumeSpec::default() }
    }

    /// Proves CSI-ERR-11: for a new volume and for one that is staged.
    #[tokio::test]
    async fn an_absent_or_wrong_key_is_not_authenticated_and_one_that_is_none_is_invalid() {
        let code = |secrets| of_new_volume(&spec("true"), &secrets).unwrap_err().code();
        assert_eq!(code(HashMap::new()), Code::Unauthenticated);
        assert_eq!(code(of("")), Code::Unauthenticated);
        assert_eq!(code(of("hunter2")), Code::InvalidArgument);
        let user = of_new_volume(&spec("true"), &of("correct horse")).unwrap().unwrap();
        let encryption = Some(create(user).await.unwrap());
        let spec = Some(VolumeSpec { encryption, ..VolumeSpec::default() });
        let volume = api::Volume { spec, ..api::Volume::default() };
        assert!(of_stage(&volume, &of("correct horse")).await.unwrap().is_some());
        for (secrets, expected) in [
            (HashMap::new(), Code::Unauthenticated),
            (of("correct house"), Code::Unauthenticated),
            (of("hunter2"), Code::InvalidArgument),
        ] {
            let refused = of_stage(&volume, &secrets).await.unwrap_err();
            assert_eq!(refused.code(), expected);
            assert!(!refused.message().contains("house") && !refused.message().contains("hunter"));
        }
    }

    #[tokio::test]
    async fn secrets_of_a_volume_that_is_not_encrypted_are_not_looked_at() {
        assert!(of_new_volume(&spec("false"), &of("hunter2")).unwrap().is_none());
        assert!(of_new_volume(&VolumeSpec::default(), &of("hunter2")).unwrap().is_none());
        assert!(of_stage(&api::Volume::default(), &of("hunter2")).await.unwrap().is_none());
    }
}
