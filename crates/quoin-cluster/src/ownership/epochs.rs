//! The compare-and-swaps that targets request: epochs, which fence, and changes of membership.

use quoin_types::membership::RETIRED_MAX;
use quoin_types::{
    EPOCHS_AHEAD_MAX, Epoch, Incarnation, Member, Membership, ReplicaId, Term, VolumeId, mutant,
};

use crate::Refusal;
use crate::ownership::grants::use_up_epoch;
use crate::records::{
    Discarded, MembershipRecord, ReplicaPhase, ReplicaRecord, Text, VolumeRecord,
};

/// Request of a target for an epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acquire {
    pub node: String,
    pub incarnation: Incarnation,
    /// The highest epoch that its replicas have promised.
    pub at_least: Epoch,
}

/// Complete known list and factors that a target requests.
#[derive(Clone, PartialEq, Eq, Debug)]
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

/// Sets epoch := max(record, `at_least`) + 1, only while the node owns the volume. The inner error says
/// why the node does not own it (any more): that target must stop.
///
/// # Errors
/// The request breaks a rule, or no epoch is left in this term.
pub fn acquire(
    volume: &mut VolumeRecord,
    asked: &Acquire,
    term: Term,
) -> Result<Result<(), String>, Refusal> {
    if asked.incarnation == Incarnation(0) {
        let rule = "it must not be zero, which stands for no target";
        return Err(Refusal::invalid("incarnation", rule));
    }
    if let Err(why) = owned(volume, &asked.node) {
        return Ok(Err(why));
    }
    let at_least = asked.at_least;
    if at_least.0 > volume.epoch().max(term.floor()).0.saturating_add(EPOCHS_AHEAD_MAX) {
        let rule = format!("{at_least} is far above the record's {}", volume.epoch());
        return Err(Refusal::invalid("at_least", rule));
    }
    let again = volume.opened.incarnation.0 == asked.incarnation && at_least <= volume.epoch();
    if again && mutant::is("epoch-reused") {
        volume.opened.epoch -= 1;
    }
    if volume.opened.incarnation.0 == asked.incarnation {
        volume.used.prove(&asked.node);
    }
    let before = volume.opened.epoch;
    use_up_epoch(volume, at_least, term)?;
    if volume.used.unproven {
        volume.used.begin_anew(volume.opened.epoch, before);
    }
    volume.opened.incarnation = Text(asked.incarnation);
    volume.grants.hand_over(&asked.node, before);
    volume.forget_retired();
    Ok(Ok(()))
}

/// Returns true if the grant of this epoch may be signed once more for the node. An epoch that a fence
/// used up was granted to no node, also where the volume has an owner again.
pub fn is_granted_to(volume: &VolumeRecord, node: &str, epoch: u64) -> bool {
    let was_acquired = volume.may_be_held_by(node) && volume.opened.incarnation.0 != Incarnation(0);
    volume.opened.owner.as_deref() == Some(node)
        && volume.opened.epoch == epoch
        && (was_acquired || mutant::is("epoch-of-a-fence-signed"))
}

/// A node's target reports the last epoch, and recovered records do not name its holder.
pub fn prove_holder(volume: &mut VolumeRecord, node: &str, epoch: u64) {
    if needs_proof(volume, node, epoch) {
        node.clone_into(&mut volume.grants.holder);
        volume.used.prove(node);
    }
}

/// Returns true if [`prove_holder`] changes the record.
pub fn needs_proof(volume: &VolumeRecord, node: &str, epoch: u64) -> bool {
    volume.grants.holder.is_empty() && is_granted_to(volume, node, epoch)
}

/// Returns true if the target of a volume has to change its content: for a node that has it for
/// writing, or to take it back to a snapshot. A target that is lent for other work reads.
pub fn is_written(volume: &VolumeRecord, goes_back: bool) -> bool {
    match volume.attachments.is_empty() {
        true => goes_back,
        false => volume.has_writers(),
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

/// Event of a change: its reason, the replica, and words.
pub type News = (&'static str, ReplicaId, String);

/// Swaps the membership in the record. Returns the events of the change, none where the swap was
/// made before.
///
/// # Errors
/// The reason of a refusal.
pub fn swap(volume: &mut VolumeRecord, asked: &MembershipSwap) -> Result<Vec<News>, String> {
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
    // A list that lacks an entry may go on without it.
    let lacking = usize::from(now.rf).saturating_sub(now.known.len());
    let listed = asked.known.len()..=asked.known.len() + lacking;
    if !listed.contains(&usize::from(asked.rf)) || asked.rf > now.drf.max(now.rf) {
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
    use crate::records::RETIRED_KEPT_MAX;
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
        let MembershipRecord { rf, cf, .. } = volume.membership;
        let asked = asked(volume, rf, cf, known);
        swap(volume, &asked).map(|_| old)
    }

    /// Swap that the volume's target asks for.
    fn asked(volume: &VolumeRecord, rf: u8, cf: u8, known: Vec<Member>) -> MembershipSwap {
        MembershipSwap {
            volume: volume.id.0,
            node: "node-1".to_owned(),
            epoch: Epoch(volume.opened.epoch),
            incarnation: Incarnation(volume.opened.incarnation.0.0),
            version: volume.membership.version,
            rf,
            cf,
            known,
        }
    }

    /// Volume of recovered records, attached to `node-1`. An epoch was granted since the copy was made.
    fn recovered() -> VolumeRecord {
        let mut volume = crate::records::recorded::volume();
        (volume.opened.epoch, volume.grants) = (7, crate::records::Grants::default());
        volume.opened.owner = Some("node-1".to_owned());
        volume.opened.incarnation = Text(Incarnation(70));
        volume.used.begin("node-1", 5, 4);
        volume.used.doubt();
        volume
    }

    #[test]
    fn an_epoch_begins_a_use_anew_unless_its_node_has_the_last_one() {
        let acquired = |volume: &VolumeRecord, incarnation| {
            let mut volume = volume.clone();
            let node = "node-1".to_owned();
            let asked = Acquire { node, incarnation: Incarnation(incarnation), at_least: Epoch(7) };
            assert_eq!(acquire(&mut volume, &asked, Term::default()), Ok(Ok(())));
            assert!(!volume.used.unproven);
            volume.used.since_of("node-1")
        };
        let volume = recovered();
        assert_eq!(acquired(&volume, 71), 8, "its device is of before another node's use");
        assert_eq!(acquired(&volume, 70), 5, "the very target that has it");
        // A target that serves under the last epoch proves the same.
        let mut proven = volume.clone();
        for (node, epoch) in [("node-2", 7), ("node-1", 6)] {
            prove_holder(&mut proven, node, epoch);
            assert_eq!(proven, volume);
        }
        prove_holder(&mut proven, "node-1", 7);
        assert_eq!(proven.grants.holder, "node-1");
        assert_eq!(acquired(&proven, 71), 5);
    }

    /// A follower has no place after the removal, and no other rule would discard it.
    #[test]
    fn what_was_to_follow_a_replica_goes_with_it_when_that_leaves_for_good() {
        let mut volume = crate::records::recorded::volume();
        let known = Membership::from(&volume.membership).known;
        let at = volume.replicas.iter().position(|r| r.id.0 == known[2].id).unwrap();
        let mut follower = volume.replicas[at].clone();
        (follower.guid, follower.phase) = (Text(ReplicaGuid(0x333)), ReplicaPhase::Keep);
        volume.replicas[at].leaving = true;
        volume.replicas.push(follower);
        let asked = asked(&volume, 2, 2, known[..2].to_vec());
        swap(&mut volume, &asked).unwrap();
        assert!(volume.replicas.iter().all(|r| r.id.0 != known[2].id), "{:?}", volume.replicas);
        for guid in [known[2].guid, ReplicaGuid(0x333)] {
            assert!(volume.discarded.iter().any(|gone| gone.guid.0 == guid), "its pool deletes it");
        }
    }

    #[test]
    fn a_volume_is_replaced_without_end_and_forgets_only_what_is_deleted() {
        let mut volume = crate::records::recorded::volume();
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
        let mut volume = crate::records::recorded::volume();
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
