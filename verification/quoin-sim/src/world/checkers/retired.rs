//! Retired replicas are never connected to again.

use std::collections::BTreeMap;

use quoin_types::Epoch;

use super::{Broken, Checker, Observation, Scene, broken};

#[derive(Default)]
pub(crate) struct Retired {
    /// The epoch under which each GUID was retired.
    under: BTreeMap<u128, Epoch>,
}

impl Checker for Retired {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            // Where an old copy has ruled for a while, the epochs are not known.
            Observation::RecordExecuted { .. } if scene.control.rolled_back => self.under.clear(),
            Observation::RecordExecuted { .. } => {
                let record = &scene.control.record;
                for guid in &record.membership.retired {
                    self.under.entry(guid.0).or_insert(record.epoch);
                }
            }
            Observation::RecordForced { retired, epoch } => {
                for guid in retired {
                    self.under.entry(guid.0).or_insert(epoch);
                }
            }
            Observation::Dialled { target, member, session, .. } => {
                if let Some(since) = self.under.get(&member.guid.0)
                    && session.epoch > *since
                {
                    let detail =
                        format!("target {target} connects to {member:?}, retired under {since}");
                    return broken("RetiredNeverBack", detail);
                }
            }
            _ => {}
        }
        Ok(())
    }
}
