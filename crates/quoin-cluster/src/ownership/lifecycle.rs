//! A volume's record follows what its pools answer: replicas are made, lost, deleted and turn up again.

use std::collections::HashMap;

use quoin_types::{ReplicaGuid, ReplicaId};

use crate::records::{
    BaseUse, Discarded, ReplicaPhase, SourceRecord, Text, VolumePhase, VolumeRecord,
};

/// A pool's word on a replica.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplicaState {
    /// Exists (created, open or closed).
    Present,
    Gone,
    Damaged,
}

/// Answers of pools, by pool and replica. Silence is none.
pub type Answers = HashMap<(String, ReplicaGuid), ReplicaState>;

/// Event of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum News {
    /// Every pool has created its replica.
    Ready,
    /// It shares nothing with its source any more.
    Flattened,
    /// The pool has the known replica again.
    Returned { replica: ReplicaId, pool: String, guid: ReplicaGuid },
    /// The pool has lost the replica, and one of another GUID is made in its place.
    Gone { replica: ReplicaId, pool: String, guid: ReplicaGuid, new: ReplicaGuid },
}

/// One step of one volume, from its record and the pools' answers alone. `are_own`: all its replicas said
/// that they share no block with its source any more. `new_guid`: draws one that was never used.
pub fn step(
    volume: &mut VolumeRecord,
    answers: &Answers,
    are_own: bool,
    new_guid: &mut dyn FnMut() -> ReplicaGuid,
    news: &mut Vec<News>,
) {
    let answer = |pool: &str, guid: ReplicaGuid| answers.get(&(pool.to_owned(), guid)).copied();
    let present = |pool: &str, guid| answer(pool, guid) == Some(ReplicaState::Present);
    let gone = |pool: &str, guid| answer(pool, guid) == Some(ReplicaState::Gone);
    let discarded = |d: &Discarded| !gone(&d.pool, d.guid.0);
    volume.discarded.retain(discarded);
    match volume.phase {
        VolumePhase::Deleting => {
            volume.replicas.retain(|replica| !gone(&replica.pool, replica.guid.0));
        }
        VolumePhase::Pending => {
            if volume.replicas.iter().all(|r| present(&r.pool, r.guid.0)) {
                // From here on no pool creates anything under these GUIDs again.
                volume.phase = VolumePhase::Ready;
                volume.membership.formed = true;
                volume.membership.version += 1;
                volume.replicas.iter_mut().for_each(|r| r.phase = ReplicaPhase::Keep);
                news.push(News::Ready);
            }
        }
        VolumePhase::Ready | VolumePhase::Retained => {
            discard_retired(volume, answers);
            let is_flattened = |s: &&mut SourceRecord| are_own && s.base == BaseUse::Flattening;
            if let Some(source) = volume.source.as_mut().filter(is_flattened) {
                source.base = BaseUse::Flattened;
                news.push(News::Flattened);
            }
            let known = volume.membership.known.clone();
            // Replicas whose place another record takes are not made anew where they were.
            let followed: Vec<_> = volume
                .replicas
                .iter()
                .filter(|r| r.leaving || volume.is_followed(r))
                .map(|r| r.guid)
                .collect();
            let mut surplus = Vec::new();
            for replica in &mut volume.replicas {
                let known = known.iter().find(|member| member.id == replica.id).map(|m| m.guid);
                let returned =
                    known.filter(|known| *known != replica.guid && present(&replica.pool, known.0));
                if let Some(known) = returned {
                    let pool = replica.pool.clone();
                    news.push(News::Returned { replica: replica.id.0, pool, guid: known.0 });
                    let (id, pool) = (replica.id, replica.pool.clone());
                    let guid = std::mem::replace(&mut replica.guid, known);
                    surplus.push(Discarded { id, guid, pool });
                    replica.phase = ReplicaPhase::Keep;
                } else if followed.contains(&replica.guid) {
                    continue;
                } else if replica.phase == ReplicaPhase::Keep && gone(&replica.pool, replica.guid.0)
                {
                    // A GUID is born once: what comes in its place has another one.
                    let new = Text(new_guid());
                    news.push(News::Gone {
                        replica: replica.id.0,
                        pool: replica.pool.clone(),
                        guid: replica.guid.0,
                        new: new.0,
                    });
                    replica.guid = new;
                    replica.phase = ReplicaPhase::Recreate;
                } else if replica.phase == ReplicaPhase::Recreate
                    && present(&replica.pool, replica.guid.0)
                {
                    replica.phase = ReplicaPhase::Keep;
                }
            }
            volume.discarded.extend(surplus);
        }
    }
}

/// Retired incarnations that turn up in their pools (a disk came back) are never used again,
/// so they may go.
fn discard_retired(volume: &mut VolumeRecord, answers: &Answers) {
    for ((pool, guid), state) in answers {
        let guid = Text(*guid);
        if *state == ReplicaState::Gone
            || !volume.membership.retired.contains(&guid)
            || volume.discarded.iter().any(|d| d.guid == guid && d.pool == *pool)
        {
            continue;
        }
        let id = volume.replicas.iter().find(|replica| replica.pool == *pool).map(|r| r.id);
        let id = id.unwrap_or_default();
        volume.discarded.push(Discarded { id, guid, pool: pool.clone() });
    }
    volume.discarded.sort_by(|a, b| (&a.pool, a.guid).cmp(&(&b.pool, b.guid)));
}
