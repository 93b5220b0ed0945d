//! Going on with the replicas that are left, where too few are for any target to open a volume.
//!
//! This is the forced change of membership (`docs/replication.md`) in the form that a person
//! consents to: in one compare-and-swap the epoch and the version grow, the known list becomes
//! those that are left, RF its length, and the others are retired for good. Nobody can prove that
//! those that are left hold all that was acknowledged, so the volume's name is typed and the
//! record says from then on that something may have been lost. CF is as high as RF until the first
//! open has heard all that are left: what any of them holds is not lost. DRF stays as it was: the
//! target raises RF again with new replicas.
//!
//! The others must not serve on anywhere: each must be proven gone, by its pool
//! that is there without it, or declared destroyed. A lease that one of them granted before is
//! waited out before the swap.
//!
//! The same ends the wait for a change of membership that only replicas know of which do not answer
//! (an old copy of the record ruled, or a newcomer was lost as the change was under way): though
//! enough of the known ones are there. A newcomer that the record still names must not be there
//! then, and none of those waited for comes back.

use quoin_types::membership::open_quorum;
use quoin_types::{Membership, ReplicaGuid, ReplicaId, Term};

use crate::Refusal;
use crate::ownership::grants::fence;
use crate::records::{Discarded, MembershipRecord, VolumeRecord};

/// Decision of a person.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recovery {
    /// All replicas that are left.
    pub keep: Vec<ReplicaId>,
    /// Replicas that will never be started again with what they hold.
    pub destroyed: Vec<ReplicaId>,
    /// The volume's name, typed.
    pub accept_loss_of: String,
}

/// A pool's word on a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Word {
    /// It exists, created, open or closed.
    Present,
    Gone,
    Damaged,
    /// An older state of the pool's disk came back, and what it holds counts for nothing.
    RolledBack,
}

/// The volume as it is observed.
pub struct Seen<'a> {
    /// Its target serves it under the record's epoch.
    pub serves: bool,
    /// Replicas that its target waits for, since they may know of a change that the record lacks.
    pub silent: &'a [ReplicaGuid],
    /// The word of a pool that is there on a replica; `None`: it says nothing of it.
    pub word: &'a dyn Fn(&str, ReplicaGuid) -> Option<Word>,
    /// Replicas that are on their way in and hold more than those that are kept, in words.
    pub further: &'a dyn Fn() -> String,
}

/// Checks that the volume may go on with the replicas that are left.
///
/// # Errors
/// Where a target could open it, where one that is there is not kept, where one that is not
/// kept may live, and where the loss was not accepted.
pub fn check(volume: &VolumeRecord, asked: &Recovery, seen: &Seen<'_>) -> Result<(), Refusal> {
    let name = &volume.spec.name;
    let refuse = |why: String| Err(Refusal::Precondition(format!("volume {name:?}: {why}")));
    if !volume.phase.is_kept() {
        return refuse("it is not ready".to_owned());
    }
    if asked.keep.is_empty() {
        return Err(Refusal::invalid("keep", "name the replicas that are left, all of them"));
    }
    let known = |id: &ReplicaId| volume.known_guid(*id).is_some();
    if let Some(other) = asked.keep.iter().chain(&asked.destroyed).find(|id| !known(id)) {
        return Err(Refusal::missing("known replica", format!("{other} of volume {name:?}")));
    }
    let newcomers = volume.replicas.iter().filter(|r| !volume.is_known(r));
    for newcomer in newcomers.filter(|r| seen.silent.contains(&r.guid.0)) {
        if (seen.word)(&newcomer.pool, newcomer.guid.0).is_some() {
            return refuse(format!(
                "replica {} on pool {} is there and may know of the change that is waited for: \
                 let the target reach that pool",
                newcomer.id.0, newcomer.pool
            ));
        }
    }
    let (rf, cf) = (volume.membership.rf, volume.membership.cf);
    let needed = usize::from(open_quorum(rf, cf));
    let mut there = 0;
    for member in &volume.membership.known {
        let id = member.id.0;
        let record = volume.replicas.iter().find(|r| r.guid == member.guid);
        let pool = record.or_else(|| volume.replicas.iter().find(|r| r.id.0 == id));
        let pool = pool.map(|r| r.pool.as_str()).unwrap_or_default();
        let word = (seen.word)(pool, member.guid.0);
        // Its pool says so, or said so: then the record of it has another GUID since. That a
        // pool does not mention it proves nothing, for it may only just have started.
        let proven = word == Some(Word::Gone) || record.is_none();
        let present = word == Some(Word::Present);
        there += usize::from(present);
        match (asked.keep.contains(&id), present) {
            (true, true) => {}
            (true, false) => {
                return refuse(format!("replica {id} on pool {pool} is not there to be kept"));
            }
            (false, true) => {
                return refuse(format!(
                    "replica {id} on pool {pool} is there and may hold what the others lack: \
                     keep it too"
                ));
            }
            (false, false) if proven || asked.destroyed.contains(&id) => {}
            (false, false) => {
                return refuse(format!(
                    "replica {id} on pool {pool} may live on where nobody sees it: start the \
                     pool, or declare the replica destroyed if it never will be again"
                ));
            }
        }
    }
    if seen.serves || (there >= needed && seen.silent.is_empty()) {
        return refuse(format!(
            "{there} of {rf} replicas are there, {needed} are needed to open it: nothing must \
             be given up; to have fewer, `quoin replica remove`"
        ));
    }
    if asked.accept_loss_of != *name && there >= needed {
        return refuse(format!(
            "{} replicas that do not answer may know of a change, and may serve on where nobody \
             sees it: what was written there is lost for good; accept that by the volume's name \
             (--accept-loss-of {name:?})",
            seen.silent.len()
        ));
    }
    if asked.accept_loss_of != *name {
        let further = (seen.further)();
        return refuse(format!(
            "{there} of {rf} replicas are left, which may lack acknowledged writes: those are \
             lost for good{further}; accept that by the volume's name (--accept-loss-of {name:?})"
        ));
    }
    Ok(())
}

/// Makes the replicas that are kept the whole volume ([`Membership::reduced_to`]). What the others hold
/// is deleted should it turn up.
///
/// # Errors
/// As those of [`fence`].
pub fn reduce(
    volume: &mut VolumeRecord,
    keep: &[ReplicaId],
    silent: &[ReplicaGuid],
    now_ms: u64,
    term: Term,
) -> Result<(), Refusal> {
    let next =
        Membership::from(&volume.membership).reduced_to(|member| keep.contains(&member.id), silent);
    let (gone, stay): (Vec<_>, Vec<_>) = std::mem::take(&mut volume.replicas)
        .into_iter()
        .partition(|replica| next.retired.contains(&replica.guid.0));
    volume.replicas = stay;
    volume.discarded.extend(gone.into_iter().map(Discarded::from));
    volume.membership = MembershipRecord::from(&next);
    volume.forget_retired();
    fence(volume, false, term)?;
    // A target that has it open finds that it is not its own any more, and opens it anew.
    volume.opened.owner = None;
    volume.may_have_lost_ms = now_ms;
    Ok(())
}
