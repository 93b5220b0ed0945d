//! The compare-and-swaps that targets ask for: epochs, which fence, and replacements.

use quoin_core::membership::RETIRED_MAX;
use quoin_core::{Epoch, Incarnation, Membership, ReplicaGuid, ReplicaId, VolumeId};
use quoin_identity::Grant;

use crate::Error;
use crate::controller::Controller;
use crate::events::{Object, Severity};
use crate::records::{ReplicaPhase, Text, VolumePhase, VolumeRecord};

/// Promises that replicas have seen can be ahead of records restored from a backup, but never
/// by more openings than anybody made; a hostile node must not use up the numbers.
const EPOCHS_AHEAD_MAX: u64 = 1 << 20;

/// Leave to open a volume.
#[derive(Clone, Debug)]
pub struct Granted {
    pub epoch: Epoch,
    /// Of the same swap as the epoch.
    pub membership: Membership,
    /// Signed; pools believe it.
    pub grant: Vec<u8>,
}

/// What a target asks to be swapped.
#[derive(Clone, Debug)]
pub struct Replacement {
    pub volume: VolumeId,
    pub node: String,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    pub version: u64,
    pub replica: ReplicaId,
    pub old: ReplicaGuid,
    pub new: ReplicaGuid,
}

impl Controller {
    /// epoch := max(record, `at_least`) + 1, only while `node` owns the volume. `Ok(Err(why))`
    /// where it does not (any more): that target must stop.
    pub async fn acquire_epoch(
        &self,
        volume: VolumeId,
        node: &str,
        incarnation: Incarnation,
        at_least: Epoch,
    ) -> Result<Result<Granted, String>, Error> {
        let change = |volume: &mut VolumeRecord| {
            if let Err(why) = owned(volume, node) {
                return Ok(Err(why));
            }
            if at_least.0 > volume.epoch.saturating_add(EPOCHS_AHEAD_MAX) {
                let rule = format!("{} is far above the record's {}", at_least.0, volume.epoch);
                return Err(Error::invalid("at_least", rule));
            }
            volume.epoch = volume.epoch.max(at_least.0) + 1;
            volume.incarnation = Text(incarnation);
            Ok(Ok(()))
        };
        let (record, outcome) = match self.update_volume(volume, change).await {
            Err(Error::NotFound { .. }) => return Ok(Err("the volume does not exist".to_owned())),
            other => other?,
        };
        if let Err(why) = outcome {
            return Ok(Err(why));
        }
        let grant = Grant { volume, epoch: record.epoch(), incarnation, node: node.to_owned() };
        Ok(Ok(Granted {
            epoch: record.epoch(),
            membership: (&record.membership).into(),
            grant: self.identity.sign_grant(&grant)?,
        }))
    }

    /// The grant of the record as it is, signed anew, if this node holds it.
    pub(crate) fn fresh_grant(&self, record: &VolumeRecord, node: &str, epoch: u64) -> Vec<u8> {
        if record.owner.as_deref() != Some(node) || record.epoch != epoch || epoch == 0 {
            return Vec::new();
        }
        let grant = Grant {
            volume: record.id.0,
            epoch: record.epoch(),
            incarnation: record.incarnation.0,
            node: node.to_owned(),
        };
        self.identity.sign_grant(&grant).unwrap_or_default()
    }

    /// Puts a rebuilt newcomer in the place of the known replica whose data is gone. The inner
    /// error says why it was refused; in either case the membership is the record's. A repeat
    /// of a swap that happened is done.
    pub async fn replace_member(
        &self,
        asked: &Replacement,
    ) -> Result<(Membership, Result<(), String>), Error> {
        let change = |volume: &mut VolumeRecord| Ok(replace(volume, asked));
        let (record, outcome) = self.update_volume(asked.volume, change).await?;
        if outcome == Ok(true) {
            let replica = record.replicas.iter().find(|r| r.id.0 == asked.replica);
            let pool = replica.map_or("?", |replica| replica.pool.as_str());
            let message = format!("rebuilt on pool {pool} as {}, was {}", asked.new, asked.old);
            let replica = Object::new("replica", asked.replica, &record.spec.name);
            self.events.record(Severity::Normal, replica, "ReplicaReplaced", message);
        }
        Ok(((&record.membership).into(), outcome.map(drop)))
    }
}

fn owned(volume: &VolumeRecord, node: &str) -> Result<(), String> {
    if volume.phase != VolumePhase::Ready || !volume.membership.formed {
        return Err("the volume is not ready".to_owned());
    }
    match volume.owner.as_deref() {
        Some(owner) if owner == node => Ok(()),
        Some(owner) => Err(format!("node {owner} owns the volume")),
        None => Err("the volume is attached to no node".to_owned()),
    }
}

/// Swaps in the record, or says why not; false where it is swapped already.
fn replace(volume: &mut VolumeRecord, asked: &Replacement) -> Result<bool, String> {
    owned(volume, &asked.node)?;
    if (volume.epoch(), volume.incarnation.0) != (asked.epoch, asked.incarnation) {
        return Err(format!("epoch {} is over, the record has {}", asked.epoch, volume.epoch));
    }
    let membership = &volume.membership;
    let (old, new) = (Text(asked.old), Text(asked.new));
    if volume.known_guid(asked.replica) == Some(asked.new) && membership.retired.contains(&old) {
        return Ok(false);
    }
    if membership.version != asked.version {
        let has = membership.version;
        return Err(format!("membership version {} is over, the record has {has}", asked.version));
    }
    if volume.known_guid(asked.replica) != Some(asked.old) {
        return Err("the old incarnation is not known under this replica id".to_owned());
    }
    let chosen = volume.replicas.iter().any(|replica| {
        replica.id.0 == asked.replica && replica.guid == new && replica.phase == ReplicaPhase::Keep
    });
    if !chosen {
        return Err("the new incarnation is not the one that the records name".to_owned());
    }
    if membership.retired.len() >= RETIRED_MAX {
        return Err(format!("{RETIRED_MAX} incarnations are retired already"));
    }
    let membership = &mut volume.membership;
    membership.version += 1;
    membership.retired.push(old);
    for member in membership.known.iter_mut().filter(|member| member.id.0 == asked.replica) {
        member.guid = new;
    }
    Ok(true)
}
