//! The key slots of encrypted volumes. The controller stores them and never sees a key: slots are
//! made where the user's key is, and only their form is checked here.

use std::sync::Arc;

use quoin_api::control::SetKeySlotsRequest;
use quoin_cluster::records::VolumeRecord;
use quoin_encryption::Encryption;

use crate::Error;
use crate::state::events::Severity;
use crate::state::{State, about};

/// Changes of key slots.
pub struct KeySlots {
    state: Arc<State>,
}

impl KeySlots {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Replaces the slots of a volume. The data key stays: with another one the data would be lost.
    pub async fn set(&self, asked: &SetKeySlotsRequest) -> Result<Arc<VolumeRecord>, Error> {
        let invalid = |rule: String| Error::invalid("encryption", rule);
        let given = asked.encryption.as_ref();
        let given = given.ok_or_else(|| invalid("it is missing".to_owned()))?;
        let given = Encryption::try_from(given).map_err(|rule| invalid(rule.to_string()))?;
        if asked.resource_version == 0 {
            let rule = "the version of the volume whose slots were read and changed is needed: slots that \
                        another one changed since would be lost";
            return Err(Error::invalid("resourceVersion", rule));
        }
        let volume = self.state.volume(asked.volume.as_ref())?;
        let name = volume.spec.name.clone();
        let found = self.state.volumes.versioned(&volume.id.0.to_string());
        let (revision, volume) = found.ok_or_else(|| Error::missing("volume", &name))?;
        let read = volume.spec.encryption.clone();
        if asked.resource_version != revision {
            return Err(changed(&name));
        }
        let change = |volume: &mut VolumeRecord| {
            // It may have been demoted meanwhile.
            crate::mirror::rules::check_change(&self.state, volume)?;
            let Some(present) = &volume.spec.encryption else {
                return Err(Error::Precondition(format!(
                    "volume {name:?} is not encrypted; encryption is chosen when a volume is made"
                )));
            };
            if !present.is_of_same_key(&given) {
                return Err(invalid(format!("the slots are not of volume {name:?}'s data key")));
            }
            // The change is of the slots that were read, whatever else of the record changed.
            if volume.spec.encryption != read {
                return Err(changed(&name));
            }
            let is_news = *present != given;
            volume.spec.encryption = Some(given.clone());
            Ok(is_news)
        };
        let (volume, is_news) = self.state.update_volume(volume.id.0, change).await?;
        if is_news {
            let message = format!("key slots: {}", given.slot_names().join(", "));
            self.state.events.record(Severity::Normal, about(&volume), "KeySlotsChanged", message);
        }
        Ok(volume)
    }
}

fn changed(name: &str) -> Error {
    Error::Aborted(format!("volume {name:?} was changed since it was read: read it again"))
}
