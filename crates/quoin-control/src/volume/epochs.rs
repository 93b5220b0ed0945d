//! The compare-and-swaps that targets request: epochs, which fence, and changes of membership.

use std::sync::Arc;

use quoin_identity::Grant;
use quoin_types::membership::RETIRED_MAX;
use quoin_types::{EPOCHS_AHEAD_MAX, Epoch, Incarnation, Member, Membership, ReplicaId, VolumeId};

use crate::Error;
use crate::membership::term::Terms;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::state::records::{
    Discarded, MembershipRecord, ReplicaPhase, ReplicaRecord, Text, VolumeRecord,
};

/// Permission to open a volume.
#[derive(Clone, Debug)]
pub struct Granted {
    pub epoch: Epoch,
    /// Membership in the record after the swap that set the epoch.
    pub membership: Membership,
    /// Grant with the controller's signature, which pools verify.
    pub grant: Vec<u8>,
    /// Record that granted it: the target opens with no older options.
    pub record: Arc<VolumeRecord>,
}

/// Complete known list and factors that a target requests.
#[derive(Clone, Debug)]
pub struct MembershipSwap {
    pub volume: VolumeId,
    pub node: String,
    pub epoch: Epoch,
    pub incarnation: Incarnation,
    /// Version of the membership that is to be replaced.
    pub version: u64,
    pub rf: u8,
    pub cf: u8,
    pub known: Vec<Member>,
}

/// Requests of targets to the records.
pub struct Epochs {
    state: Arc<State>,
    terms: Arc<Terms>,
}

impl Epochs {
    pub(crate) fn new(state: Arc<State>, terms: Arc<Terms>) -> Self {
        Self { state, terms }
    }

    /// Sets epoch := max(record, `at_least`) + 1, only while `node` owns the volume. Returns
    /// `Ok(Err(why))` where the node does not own it (any more): that target must stop.
    pub async fn acquire(
        &self,
        volume: VolumeId,
        node: &str,
        incarnation: Incarnation,
        at_least: Epoch,
    ) -> Result<Result<Granted, String>, Error> {
        if incarnation == Incarnation(0) {
            let rule = "it must not be zero, which stands for no target";
            return Err(Error::invalid("incarnation", rule));
        }
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| {
            if let Err(why) = owned(volume, node) {
                return Ok(Err(why));
            }
            if at_least.0 > volume.epoch().max(term.floor()).0.saturating_add(EPOCHS_AHEAD_MAX) {
                let rule = format!("{at_least} is far above the record's {}", volume.epoch());
                return Err(Error::invalid("at_least", rule));
            }
            volume.use_up_epoch(at_least, term)?;
            volume.opened.incarnation = Text(incarnation);
            node.clone_into(&mut volume.grants.holder);
            volume.forget_retired();
            Ok(Ok(()))
        };
        let (record, outcome) = match self.state.update_volume(volume, change).await {
            Err(Error::NotFound { .. }) => return Ok(Err("the volume does not exist".to_owned())),
            other => other?,
        };
        if let Err(why) = outcome {
            return Ok(Err(why));
        }
        crate::status::opening_begins(&self.state, volume);
        let node = node.to_owned();
        let writes = self.state.is_written(&record);
        let grant = Grant { volume, epoch: record.epoch(), incarnation, node, writes, term };
        Ok(Ok(Granted {
            epoch: record.epoch(),
            membership: (&record.membership).into(),
            grant: self.state.identity.sign_grant(&grant)?,
            record,
        }))
    }

    /// Signs the record's current grant anew, if this node holds it. An epoch that a fence used up
    /// was granted to no node, also where the volume has an owner again.
    pub(crate) fn fresh_grant(&self, record: &VolumeRecord, node: &str, epoch: u64) -> Vec<u8> {
        let is_holder = record.opened.owner.as_deref() == Some(node) && record.may_be_held_by(node);
        if !is_holder
            || record.opened.epoch != epoch
            || record.opened.incarnation.0 == Incarnation(0)
        {
            return Vec::new();
        }
        // Records that do not rule grant nothing.
        if !self.terms.claims() || self.state.check_term().is_err() {
            return Vec::new();
        }
        let grant = Grant {
            volume: record.id.0,
            epoch: record.epoch(),
            incarnation: record.opened.incarnation.0,
            node: node.to_owned(),
            writes: self.state.is_written(record),
            term: self.state.term(),
        };
        self.state.identity.sign_grant(&grant).unwrap_or_default()
    }

    /// Makes the change of the known list and its factors that a target requests, if the record
    /// allows it. The inner error is the reason of a refusal; the returned membership is the
    /// record's in either case. A repeat of a swap that was made succeeds.
    pub async fn swap_membership(
        &self,
        asked: &MembershipSwap,
    ) -> Result<(Membership, Result<(), String>), Error> {
        let change = |volume: &mut VolumeRecord| Ok(swap(volume, asked));
        let (record, outcome) = self.state.update_volume(asked.volume, change).await?;
        if let Ok(news) = &outcome {
            for (reason, replica, message) in news {
                let replica = Object::new("replica", replica, &record.spec.name);
                self.state.events.record(Severity::Normal, replica, reason, message.clone());
            }
        }
        Ok(((&record.membership).into(), outcome.map(drop)))
    }
}

fn owned(volume: &VolumeRecord, node: &str) -> Result<(), String> {
    if !volume.phase.is_kept() || !volume.membership.formed {
        return Err("the volume is not ready".to_owned());
    }
    match volume.opened.owner.as_deref() {
        Some(owner) if owner == node => Ok(()),
        Some(owner) => Err(format!("node {owner} owns the volume")),
        None => Err("the volume is attached to no node".to_owned()),
    }
}

type News = (&'static str, ReplicaId, String);

/// Swaps the membership in the record. Returns the events of the change, none where the swap was
/// made before, or the reason of a refusal.
fn swap(volume: &mut VolumeRecord, asked: &MembershipSwap) -> Result<Vec<News>, String> {
    owned(volume, &asked.node)?;
    if (volume.epoch(), volume.opened.incarnation.0) != (asked.epoch, asked.incarnation) {
        return Err(format!("epoch {} is over, the record has {}", asked.epoch, volume.epoch()));
    }
    let now = Membership::from(&volume.membership);
    let same = now.known == asked.known && (now.rf, now.cf) == (asked.rf, asked.cf);
    if same && now.version == asked.version.saturating_add(1) {
        return Ok(Vec::new());
    }
    if now.version != asked.version {
        let has = now.version;
        return Err(format!("membership version {} is over, the record has {has}", asked.version));
    }
    let added: Vec<Member> = asked.known.iter().copied().filter(|m| !now.contains(*m)).collect();
    let removed: Vec<Member> =
        now.known.iter().copied().filter(|m| !asked.known.contains(m)).collect();
    let factor = volume.cf_of(asked.rf);
    if usize::from(asked.rf) != asked.known.len() || asked.rf > now.drf.max(now.rf) {
        return Err(format!(
            "{} replicas under RF {} are not what is desired, which is {}",
            asked.known.len(),
            asked.rf,
            now.drf
        ));
    }
    if asked.cf != factor && (asked.rf, asked.cf) != (now.rf, now.cf) {
        return Err(format!("a consistency factor of {} is not {factor}", asked.cf));
    }
    for member in &added {
        let chosen = volume.replicas.iter().any(|replica| {
            (replica.id.0, replica.guid.0) == (member.id, member.guid)
                && replica.phase == ReplicaPhase::Keep
        });
        if !chosen || now.retired.contains(&member.guid) {
            return Err(format!("{} is no newcomer that the records name", member.guid));
        }
    }
    for member in &removed {
        let followed = added.iter().any(|m| m.id == member.id);
        let leaves = volume.replicas.iter().any(|r| r.id.0 == member.id && r.leaving);
        if !followed && !leaves {
            return Err(format!("replica {} was not named to leave", member.id));
        }
    }
    let mut next = Membership {
        version: now.version + 1,
        rf: asked.rf,
        cf: asked.cf,
        known: asked.known.clone(),
        ..now.clone()
    };
    next.retired.extend(removed.iter().map(|m| m.guid));
    if next.retired.len() > RETIRED_MAX
        && let Some(full) = volume.is_full_of_retired()
    {
        return Err(format!("it waits for {full}"));
    }
    next.check().map_err(str::to_owned)?;
    volume.membership = MembershipRecord::from(&next);
    let mut news: Vec<News> = Vec::new();
    for member in &added {
        let pool = |m: &Member| {
            let held = volume.replicas.iter().find(|r| r.guid.0 == m.guid);
            held.map_or("?", |replica| replica.pool.as_str()).to_owned()
        };
        let on = pool(member);
        news.push(match removed.iter().find(|m| m.id == member.id) {
            Some(old) => {
                let message = format!("rebuilt on pool {on} as {}, was {}", member.guid, old.guid);
                ("ReplicaReplaced", member.id, message)
            }
            None => {
                let message =
                    format!("rebuilt on pool {on}; {} replicas, CF {}", asked.rf, asked.cf);
                ("ReplicaAdded", member.id, message)
            }
        });
    }
    for member in &removed {
        if !added.iter().any(|m| m.id == member.id) {
            let message = format!("{} replicas stay, CF {}", asked.rf, asked.cf);
            news.push(("ReplicaRemoved", member.id, message));
        }
    }
    // The removed replicas are not needed any more, nor the newcomers that were to follow them.
    let (gone, stay) = std::mem::take(&mut volume.replicas).into_iter().partition(|replica| {
        let member = Member { id: replica.id.0, guid: replica.guid.0 };
        removed.contains(&member) || now.withdraws(&next, member)
    });
    volume.replicas = stay;
    let gone: Vec<ReplicaRecord> = gone;
    volume.discarded.extend(gone.into_iter().map(Discarded::from));
    volume.forget_retired();
    Ok(news)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::records::RETIRED_KEPT_MAX;
    use quoin_types::{Epoch, Incarnation, ReplicaGuid};

    /// Replaces the first known replica by one with this GUID. Returns the old GUID.
    fn replace(volume: &mut VolumeRecord, guid: u128) -> Result<ReplicaGuid, String> {
        let mut known = Membership::from(&volume.membership).known;
        let held = volume.replicas.iter().find(|r| r.guid.0 == known[0].guid).unwrap();
        let mut newcomer = held.clone();
        newcomer.guid = Text(ReplicaGuid(guid));
        newcomer.phase = ReplicaPhase::Keep;
        volume.replicas.push(newcomer);
        let old = std::mem::replace(&mut known[0].guid, ReplicaGuid(guid));
        let MembershipRecord { version, rf, cf, .. } = volume.membership;
        let asked = MembershipSwap {
            volume: volume.id.0,
            node: "node-1".to_owned(),
            epoch: Epoch(volume.opened.epoch),
            incarnation: Incarnation(volume.opened.incarnation.0.0),
            version,
            rf,
            cf,
            known,
        };
        swap(volume, &asked).map(|_| old)
    }

    /// A follower has no place after the removal, and no other rule would discard it.
    #[test]
    fn what_was_to_follow_a_replica_goes_with_it_when_that_leaves_for_good() {
        let mut volume = crate::state::recorded::volume();
        let known = Membership::from(&volume.membership).known;
        let at = volume.replicas.iter().position(|r| r.id.0 == known[2].id).unwrap();
        let mut follower = volume.replicas[at].clone();
        (follower.guid, follower.phase) = (Text(ReplicaGuid(0x333)), ReplicaPhase::Keep);
        volume.replicas[at].leaving = true;
        volume.replicas.push(follower);
        let MembershipRecord { version, .. } = volume.membership;
        let asked = MembershipSwap {
            volume: volume.id.0,
            node: "node-1".to_owned(),
            epoch: Epoch(volume.opened.epoch),
            incarnation: Incarnation(volume.opened.incarnation.0.0),
            version,
            rf: 2,
            cf: 2,
            known: known[..2].to_vec(),
        };
        swap(&mut volume, &asked).unwrap();
        assert!(volume.replicas.iter().all(|r| r.id.0 != known[2].id), "{:?}", volume.replicas);
        for guid in [known[2].guid, ReplicaGuid(0x333)] {
            assert!(volume.discarded.iter().any(|gone| gone.guid.0 == guid), "its pool deletes it");
        }
    }

    #[test]
    fn a_volume_is_replaced_without_end_and_forgets_only_what_is_deleted() {
        let mut volume = crate::state::recorded::volume();
        volume.discarded.clear();
        let kept = replace(&mut volume, 0x1_0000).unwrap();
        let held = volume.discarded.clone();
        let mut old = kept;
        for guid in 0x1_0001..0x1_0001 + 4200 {
            old = replace(&mut volume, guid).unwrap();
            // All pools but one delete their discarded replicas.
            volume.discarded.clone_from(&held);
        }
        let retired = &volume.membership.retired;
        assert_eq!(retired.len(), RETIRED_KEPT_MAX);
        assert!(retired.contains(&Text(kept)), "its pool may still have it");
        assert!(retired.contains(&Text(old)) && !retired.contains(&Text(ReplicaGuid(0x1_0001))));
        assert_eq!(volume.is_full_of_retired(), None);
    }

    #[test]
    fn where_pools_that_are_away_keep_what_was_replaced_it_is_said_which() {
        let mut volume = crate::state::recorded::volume();
        let replaced = (0x1_0000..0x1_0000 + 4200).map(|guid| replace(&mut volume, guid));
        let refusal = replaced.last().unwrap().unwrap_err();
        let pool = &volume.discarded[0].pool;
        assert!(refusal.contains(&**pool) && refusal.contains("quoin pool remove"), "{refusal}");
        assert_eq!(volume.membership.retired.len(), quoin_types::membership::RETIRED_MAX);
        // After the pools have deleted them there is room, at the next change or the next opening.
        volume.discarded.clear();
        volume.forget_retired();
        volume.replicas.retain(|r| r.guid.0.0 < 0x1_0000 + 4096);
        assert_eq!(volume.is_full_of_retired(), None);
        replace(&mut volume, 0x2_0000).unwrap();
    }
}
