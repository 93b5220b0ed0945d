//! Changes of a volume's replicas by people: how many, where, which leave, and the factor.
//!
//! Here the wish is checked and written down, in one update of the record: newcomers in the pools
//! that are to make them, those that leave marked, DRF and CF. Carrying it out is the target's:
//! it rebuilds newcomers and asks for one change of the known list after the other
//! ([`crate::volume::epochs`]), each of which must be one that was wished for here.

use std::sync::Arc;

use quoin_api::control::VolumeRef;
use quoin_cluster::ownership::replicas::{self, check_ready};
use quoin_cluster::records::{Cause, ReplicaRecord, VolumeRecord};
use quoin_types::membership::default_cf;
use quoin_types::{Member, ReplicaGuid, ReplicaId};

use crate::Error;
use crate::state::events::Severity;
use crate::state::{State, about, random_id};
use crate::volume::placement;
use crate::volume::spec::{REPLICAS_HARD_MAX, check_replicas};

/// How many replicas a volume is to have, and how many of them hold what is acknowledged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Scale {
    /// Desired replication factor; 0: as it is.
    pub replicas: u32,
    /// `Some(0)`: by the formula from now on; `None`: as it is.
    pub consistency_factor: Option<u32>,
    pub allow_loss_on_single_failure: bool,
    /// For the new replicas; empty: chosen.
    pub pools: Vec<String>,
}

/// A replica that is to be made anew, in another pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Move {
    pub which: Which,
    /// Where to; empty: chosen.
    pub pool: String,
    /// It is only to be replaced: one that is in sync stays, unless a pool is named.
    pub unless_in_sync: bool,
}

/// How a replica of a volume is named.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    Id(ReplicaId),
    /// The one that this pool holds, or held before it came to where it is to go.
    OfPool(String),
}

impl Move {
    /// To the best pool.
    pub fn of(replica: ReplicaId) -> Self {
        Self { which: Which::Id(replica), pool: String::new(), unless_in_sync: false }
    }

    pub fn to(self, pool: &str) -> Self {
        Self { pool: pool.to_owned(), ..self }
    }
}

fn newcomer(id: ReplicaId, pool: String, cause: Cause, placed: bool) -> ReplicaRecord {
    replicas::newcomer(Member { id, guid: ReplicaGuid(random_id()) }, pool, cause, placed)
}

/// How many replicas volumes have, and where.
pub struct Replicas {
    state: Arc<State>,
}

impl Replicas {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Raises DRF, and with it makes replicas; sets the consistency factor. RF follows as they
    /// are rebuilt.
    pub async fn scale(
        &self,
        reference: Option<&VolumeRef>,
        asked: &Scale,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let _one_at_a_time = self.state.creating.lock().await;
        let volume = self.state.volume(reference)?;
        let id = volume.id.0;
        if asked.replicas > volume.membership.drf.into() {
            check_replicas("replicas", asked.replicas, self.state.settings.replicas_max)?;
        }
        let candidates = crate::volume::volumes::candidates(&self.state);
        let change = |volume: &mut VolumeRecord| scale(volume, asked, &candidates);
        let (volume, said) = self.state.update_volume(id, change).await?;
        if let Some(message) = said {
            self.state.events.record(Severity::Normal, about(&volume), "VolumeScaled", message);
        }
        Ok(volume)
    }

    /// Makes a replica anew in another pool. The old one serves on until the new one is known.
    /// Nothing is changed where it is so already, or on its way.
    pub async fn move_replica(
        &self,
        reference: Option<&VolumeRef>,
        asked: &Move,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let _one_at_a_time = self.state.creating.lock().await;
        let volume = self.state.volume(reference)?;
        let candidates = crate::volume::volumes::candidates(&self.state);
        let in_sync = in_sync_ids(&self.state, &volume);
        let change = |volume: &mut VolumeRecord| {
            let Some(replica) = find(volume, asked, &candidates)? else { return Ok(None) };
            let of_it = volume.replicas.iter().filter(|r| r.id.0 == replica);
            let is_good = of_it.count() == 1 && in_sync.contains(&replica);
            match asked.unless_in_sync && asked.pool.is_empty() && is_good {
                true => Ok(None),
                false => move_to(volume, replica, &asked.pool, &candidates),
            }
        };
        let (volume, said) = self.state.update_volume(volume.id.0, change).await?;
        if let Some(message) = said {
            self.state.events.record(Severity::Normal, about(&volume), "ReplicaMoves", message);
        }
        Ok(volume)
    }

    /// Takes replicas away by name: RF and DRF fall by each. A newcomer that is not known yet is
    /// given up at once.
    pub async fn remove(
        &self,
        reference: Option<&VolumeRef>,
        named: &[ReplicaId],
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        if named.is_empty() {
            return Err(Error::invalid("replicas", "name those that are to leave"));
        }
        let in_sync = in_sync_ids(&self.state, &volume);
        let change = |volume: &mut VolumeRecord| Ok(replicas::leave(volume, named, &in_sync)?);
        let (volume, said) = self.state.update_volume(volume.id.0, change).await?;
        if let Some(message) = said {
            self.state.events.record(Severity::Normal, about(&volume), "ReplicaLeaves", message);
        }
        Ok(volume)
    }
}

/// Ids of the known replicas that have everything.
pub(crate) fn in_sync_ids(state: &State, volume: &VolumeRecord) -> Vec<ReplicaId> {
    let status = crate::status::of(state, volume);
    let pairs = volume.replicas.iter().zip(&status.replicas);
    pairs
        .filter(|(replica, status)| volume.is_known(replica) && status.phase == "InSync")
        .map(|(replica, _)| replica.id.0)
        .collect()
}

/// The replica that is meant; `None` where it is where it is to go, and has left the pool that it is
/// named by.
fn find(
    volume: &VolumeRecord,
    asked: &Move,
    candidates: &[placement::Candidate],
) -> Result<Option<ReplicaId>, Error> {
    let from = match &asked.which {
        Which::Id(id) => return Ok(Some(*id)),
        Which::OfPool(from) => from,
    };
    if let Some(held) = volume.replicas.iter().find(|r| r.pool == *from) {
        return Ok(Some(held.id.0));
    }
    let settled = |r: &&ReplicaRecord| {
        r.pool == asked.pool
            && volume.is_known(r)
            && !r.leaving
            && volume.replicas.iter().filter(|other| other.id == r.id).count() == 1
    };
    if candidates.iter().all(|candidate| candidate.name != *from) {
        return Err(Error::missing("pool", from));
    }
    if volume.replicas.iter().any(|r| settled(&r)) {
        return Ok(None);
    }
    let what = format!("on pool {from} of volume {}", volume.spec.name);
    Err(Error::missing("replica", what))
}

/// Ids of the replicas that the volume has or is to have.
fn staying(volume: &VolumeRecord) -> Vec<ReplicaId> {
    let mut ids: Vec<_> = volume.replicas.iter().filter(|r| !r.leaving).map(|r| r.id.0).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

pub(crate) fn scale(
    volume: &mut VolumeRecord,
    asked: &Scale,
    candidates: &[placement::Candidate],
) -> Result<Option<String>, Error> {
    check_ready(volume)?;
    let (name, rf, drf) = (volume.spec.name.clone(), volume.membership.rf, volume.membership.drf);
    let replicas = if asked.replicas == 0 { drf.into() } else { asked.replicas };
    check_replicas("replicas", replicas, REPLICAS_HARD_MAX)?;
    // Replicas that are on their way out were named.
    let leaving = volume.replicas.iter().filter(|r| r.leaving && volume.is_known(r)).count();
    if replicas as usize + leaving < usize::from(rf) {
        let rule = format!(
            "volume {name:?} has {rf} replicas; fewer are asked for by naming those that leave: \
             `quoin replica remove`"
        );
        return Err(Error::invalid("replicas", rule));
    }
    if replicas < drf.into() {
        let rule = format!(
            "volume {name:?} is on its way to {drf} replicas; take back the newcomers by name: \
             `quoin replica remove`"
        );
        return Err(Error::Precondition(format!("replicas: {rule}")));
    }
    let wanted = replicas as u8;
    let before = volume.clone();
    if let Some(factor) = asked.consistency_factor {
        if factor > replicas {
            let rule = format!("{factor} is more than the {replicas} replicas (1 to replicas)");
            return Err(Error::invalid("consistencyFactor", rule));
        }
        volume.consistency_factor = factor as u8;
    }
    let factor = volume.cf_of(wanted);
    let accepted = asked.allow_loss_on_single_failure
        || (volume.spec.allow_loss_on_single_failure && asked.consistency_factor.is_none());
    if factor < default_cf(wanted) && !accepted {
        let rule = format!(
            "{factor} of {wanted} is below a majority ({}): acknowledged data can be lost with \
             {factor} of them, and the volume restarts only with all of them; accept that with \
             allowLossOnSingleFailure",
            default_cf(wanted)
        );
        return Err(Error::invalid("consistencyFactor", rule));
    }
    volume.spec.allow_loss_on_single_failure |= asked.allow_loss_on_single_failure;
    let have = staying(volume).len();
    let missing = usize::from(wanted).saturating_sub(have);
    if !asked.pools.is_empty() && asked.pools.len() != missing {
        let rule = format!("{} are named, {missing} are needed", asked.pools.len());
        return Err(Error::invalid("pools", rule));
    }
    let beside: Vec<_> =
        volume.replicas.iter().filter(|r| !r.leaving).map(|r| r.pool.as_str()).collect();
    let pools = placement::place_beside(
        &volume.spec,
        volume.size_bytes,
        candidates,
        &placement::Taken { pools: &beside, hosts_of: &beside },
        missing,
        &asked.pools,
    )?;
    volume.membership.drf = wanted;
    for pool in &pools {
        let (id, placed) = (ReplicaId(random_id()), !asked.pools.is_empty());
        volume.replicas.push(newcomer(id, pool.clone(), Cause::Asked, placed));
    }
    if *volume == before {
        return Ok(None);
    }
    let mut message = format!("to {wanted} replicas, of which {factor} hold what is acknowledged");
    if !pools.is_empty() {
        message += &format!("; new ones in pools {}", pools.join(", "));
    }
    Ok(Some(message))
}

pub(crate) fn move_to(
    volume: &mut VolumeRecord,
    id: ReplicaId,
    pool: &str,
    candidates: &[placement::Candidate],
) -> Result<Option<String>, Error> {
    check_ready(volume)?;
    let name = volume.spec.name.clone();
    let here: Vec<&ReplicaRecord> = volume.replicas.iter().filter(|r| r.id.0 == id).collect();
    let Some(first) = here.first() else {
        return Err(Error::missing("replica", format!("{id} of volume {name:?}")));
    };
    if here.iter().any(|r| r.leaving) {
        return Err(Error::Precondition(format!("replica {id} of volume {name:?} is leaving it")));
    }
    let guid = first.guid.0;
    if let [old, newcomer] = here.as_slice() {
        if pool.is_empty() || newcomer.pool == pool {
            return Ok(None);
        }
        // A move without a request, one that goes back, and one that cannot make progress give way
        // to a person's request.
        let goes_back = old.pool == pool;
        let may_arrive =
            candidates.iter().any(|c| c.name == newcomer.pool && c.unusable.is_empty());
        if !goes_back && newcomer.cause != Cause::Balance && may_arrive {
            return Err(Error::Precondition(format!(
                "replica {id} of volume {name:?} is already on its way to pool {}",
                newcomer.pool
            )));
        }
        let newcomer = newcomer.member();
        replicas::discard(volume, newcomer);
        if goes_back {
            return Ok(Some(format!("replica {id} stays on pool {pool}")));
        }
    } else if first.pool == pool {
        return Ok(None);
    }
    let (old, pool) = relocate(volume, guid, pool, candidates, Cause::Asked)?;
    Ok(Some(format!("replica {id} from pool {} to pool {pool}", old.pool)))
}

/// Has a replica made anew in another pool, the one named or the best; the old record and the
/// new pool.
pub(crate) fn relocate(
    volume: &mut VolumeRecord,
    guid: ReplicaGuid,
    pool: &str,
    candidates: &[placement::Candidate],
    cause: Cause,
) -> Result<(ReplicaRecord, String), Error> {
    let Some(first) = volume.replicas.iter().find(|r| r.guid.0 == guid).cloned() else {
        return Err(Error::missing("replica", format!("{guid} of volume {:?}", volume.spec.name)));
    };
    let taken: Vec<&str> = volume.replicas.iter().map(|r| r.pool.as_str()).collect();
    // It leaves its own host.
    let hosts_of: Vec<&str> =
        volume.replicas.iter().filter(|r| r.id != first.id).map(|r| r.pool.as_str()).collect();
    let named: Vec<String> = Some(pool.to_owned()).filter(|p| !p.is_empty()).into_iter().collect();
    let chosen = placement::place_beside(
        &volume.spec,
        volume.size_bytes,
        candidates,
        &placement::Taken { pools: &taken, hosts_of: &hosts_of },
        1,
        &named,
    )?;
    let pool = chosen.into_iter().next().unwrap_or_default();
    if !volume.is_known(&first) {
        // A replica that counts nowhere yet is simply made elsewhere.
        replicas::discard(volume, first.member());
    }
    let placed = cause == Cause::Asked && !named.is_empty();
    volume.replicas.push(newcomer(first.id.0, pool.clone(), cause, placed));
    Ok((first, pool))
}
