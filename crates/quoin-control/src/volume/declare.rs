//! Applies a document that declares a volume: one check of it all, one change of the record.
//!
//! Fields that a document leaves out stay unchanged. A list of replicas says where they are to be.
//! A replica named by its id with another pool moves there; a named pool without a replica gets
//! one. Where the list names fewer than the desired replication factor, the cluster chooses pools
//! for the others. Where the volume is to have fewer replicas, the document must name all that
//! stay; the others leave.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, ApplyVolumeRequest, VolumeRef, VolumeSpec};
use quoin_cluster::ownership::replicas;
use quoin_cluster::records::VolumeRecord;
use quoin_types::ReplicaId;

use crate::fields;
use crate::snapshot::catalog::CUT_TIME;
use crate::state::events::Severity;
use crate::state::{State, about};
use crate::volume::clones::{self, Clones};
use crate::volume::placement::Candidate;
use crate::volume::scale::{self, Scale};
use crate::volume::spec::{REPLICAS_HARD_MAX, check_replicas};
use crate::volume::topology::{self, Requirement};
use crate::volume::volumes::Catalog;
use crate::volume::{modify, spec, volumes};
use crate::{Error, text};

/// Place where a replica is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Place {
    id: Option<ReplicaId>,
    pool: String,
}

/// Change that was made: reason of its event, and message for the user.
pub(super) type Said = (&'static str, String);

/// Volumes as documents declare them.
pub struct Declarations {
    state: Arc<State>,
    catalog: Arc<Catalog>,
    clones: Arc<Clones>,
}

impl Declarations {
    pub(crate) fn new(state: Arc<State>, catalog: Arc<Catalog>, clones: Arc<Clones>) -> Self {
        Self { state, catalog, clones }
    }

    /// Applies a document; with `dry_run` only returns the changes. The volume is `None` where a
    /// dry run would create it.
    pub async fn apply(
        &self,
        asked: &ApplyVolumeRequest,
    ) -> Result<(Option<Arc<VolumeRecord>>, Vec<String>), Error> {
        let declared = asked.spec.clone().unwrap_or_default();
        spec::check_name(&declared.name)?;
        let places = places(&asked.replicas)?;
        let most = self.state.settings.replicas_max;
        let named = declared.replicas.max(places.len() as u32);
        let reference = VolumeRef { id: String::new(), name: declared.name.clone() };
        let found = match self.state.volume(Some(&reference)) {
            Err(Error::NotFound { .. }) => None,
            found => Some(found?),
        };
        // A volume may keep its replicas also where the limit was lowered later.
        let has = found.as_ref().map_or(0, |found| found.membership.drf.into());
        if named > has {
            check_replicas("desiredReplicationFactor", named, most)?;
        }
        let Some(found) = found else { return self.make(asked, &declared, &places).await };
        if asked.source.is_some() && !clones::is_from(&self.state, &found, asked.source.as_ref()) {
            let rule = format!(
                "volume {:?} was made with {}, which stays its source",
                declared.name,
                clones::in_words(found.source.as_ref())
            );
            return Err(Error::invalid("source", rule));
        }
        let _one_at_a_time = self.state.creating.lock().await;
        let (revision, _) = self
            .state
            .volumes
            .versioned(&found.id.0.to_string())
            .ok_or_else(|| Error::missing("volume", &declared.name))?;
        if asked.resource_version != 0 && asked.resource_version != revision {
            return Err(Error::Aborted(format!(
                "volume {:?} was changed since it was read (version {}, now {revision}): read it \
                 again",
                declared.name, asked.resource_version
            )));
        }
        if declared.size_bytes > found.size_bytes {
            crate::mirror::rules::check_change(&self.state, &found)?;
        }
        let candidates = crate::volume::volumes::candidates(&self.state);
        let in_sync = crate::volume::scale::in_sync_ids(&self.state, &found);
        let change = |volume: &mut VolumeRecord| {
            let mut said = fields(volume, &declared, &candidates)?;
            said.extend(replicas(volume, asked, &declared, &places, &candidates, &in_sync)?);
            Ok(said)
        };
        let (volume, said) = if asked.dry_run {
            let mut trial = VolumeRecord::clone(&found);
            let said = change(&mut trial)?;
            (found, said)
        } else {
            self.state.update_volume(found.id.0, change).await?
        };
        for (reason, message) in said.iter().filter(|_| !asked.dry_run) {
            self.state.events.record(Severity::Normal, about(&volume), reason, message);
        }
        Ok((Some(volume), said.into_iter().map(|(_, message)| message).collect()))
    }

    async fn make(
        &self,
        asked: &ApplyVolumeRequest,
        declared: &VolumeSpec,
        places: &[Place],
    ) -> Result<(Option<Arc<VolumeRecord>>, Vec<String>), Error> {
        if let Some(id) = places.iter().find_map(|place| place.id) {
            let rule = format!("{id} is no replica of a volume that is yet to be made");
            return Err(Error::invalid("replicaId", rule));
        }
        if asked.resource_version != 0 {
            return Err(Error::missing("volume", &declared.name));
        }
        let mut declared = declared.clone();
        declared.consistency_factor = asked.consistency_factor.unwrap_or_default();
        if let Some(source) = &asked.source {
            return self.make_from(source, asked.dry_run, &declared, places).await;
        }
        if declared.replicas == 0 {
            let default = u32::from(self.state.settings.defaults.replicas);
            declared.replicas = default.max(places.len() as u32);
        }
        if places.len() > declared.replicas as usize {
            return Err(too_many(places.len(), declared.replicas));
        }
        let pools: Vec<String> = places.iter().map(|place| place.pool.clone()).collect();
        let size = text::bytes(spec::size(declared.size_bytes, 0)?);
        let said = format!("volume made: {size}, {} replicas", declared.replicas);
        if asked.dry_run {
            let spec = spec::complete(&declared, self.state.settings.defaults)?;
            let size_bytes = spec::size(declared.size_bytes, 0)?;
            spec::check_file_system(&spec, size_bytes)?;
            let wanted = Requirement::of(&declared, spec.options.local)?;
            let candidates = volumes::candidates(&self.state);
            topology::place(&spec, size_bytes, &candidates, &wanted, &pools)?;
            return Ok((None, vec![said]));
        }
        let volume = self.catalog.create_in(&declared, declared.size_bytes, 0, &pools).await?;
        Ok((Some(volume), vec![said]))
    }

    /// A volume that begins with the content of another one, or of a snapshot.
    async fn make_from(
        &self,
        source: &api::VolumeSource,
        dry_run: bool,
        declared: &VolumeSpec,
        places: &[Place],
    ) -> Result<(Option<Arc<VolumeRecord>>, Vec<String>), Error> {
        if !places.is_empty() {
            let rule = "replicas of a copy begin where its source is: leave the list out, and move \
                        them when the volume is made";
            return Err(Error::invalid("replicas", rule));
        }
        if dry_run {
            // A volume is not cut for a trial.
            let said = match &source.volume {
                Some(volume) => {
                    let volume = self.state.volume(Some(volume))?;
                    format!("volume made from volume {:?}", volume.spec.name)
                }
                None => {
                    let found = self.clones.prepare(&declared.name, source, Duration::ZERO).await?;
                    format!("volume made from {}", clones::in_words(Some(&found.record())))
                }
            };
            return Ok((None, vec![said]));
        }
        let source = api::VolumeSource { as_source: true, ..source.clone() };
        let prepared = self.clones.prepare(&declared.name, &source, CUT_TIME).await?;
        let volume = self.catalog.create_from(declared, declared.size_bytes, 0, &prepared).await?;
        let said = format!(
            "volume made from {}: {}, {} replicas",
            clones::in_words(volume.source.as_ref()),
            text::bytes(volume.size_bytes),
            volume.spec.replicas
        );
        Ok((Some(volume), vec![said]))
    }
}

fn places(declared: &[api::DeclaredReplica]) -> Result<Vec<Place>, Error> {
    if declared.len() > REPLICAS_HARD_MAX as usize {
        return Err(too_many(declared.len(), REPLICAS_HARD_MAX));
    }
    let mut places: Vec<Place> = Vec::new();
    for replica in declared {
        let id =
            (!replica.replica_id.is_empty()).then(|| fields::id("replicaId", &replica.replica_id));
        let place = Place { id: id.transpose()?, pool: replica.pool.clone() };
        if place.id.is_none() && place.pool.is_empty() {
            return Err(Error::invalid("spec.replicas", "each needs a replicaId or a pool"));
        }
        let twice = places.iter().any(|other| {
            (place.id.is_some() && other.id == place.id)
                || (!place.pool.is_empty() && other.pool == place.pool)
        });
        if twice {
            let rule = "a replica or a pool is named twice; no pool holds two replicas of a volume";
            return Err(Error::invalid("spec.replicas", rule));
        }
        places.push(place);
    }
    Ok(places)
}

fn too_many(named: usize, most: u32) -> Error {
    let rule = format!("{named} are named, more than the {most} that the volume is to have");
    Error::invalid("spec.replicas", rule)
}

/// Applies all fields but the replicas.
fn fields(
    volume: &mut VolumeRecord,
    declared: &VolumeSpec,
    candidates: &[Candidate],
) -> Result<Vec<Said>, Error> {
    modify::check_fixed(volume, declared)?;
    let mut said = Vec::new();
    if declared.size_bytes != 0 {
        let size = spec::size(declared.size_bytes, 0)?;
        if size < volume.size_bytes {
            let rule = format!(
                "volume {:?} has {}; volumes never shrink, since that would cut off data",
                declared.name,
                text::bytes(volume.size_bytes)
            );
            return Err(Error::invalid("size", rule));
        }
        if let Some(before) = volumes::grow(volume, size, candidates)? {
            let message = format!("{} to {}", text::bytes(before), text::bytes(size));
            said.push(("VolumeResized", message));
        }
    }
    said.extend(modify::change_options(volume, declared)?);
    Ok(said)
}

/// Ids of the replicas that stay, and the pool where each is to be.
fn present(volume: &VolumeRecord) -> Vec<(ReplicaId, String)> {
    let mut present: Vec<(ReplicaId, String)> = Vec::new();
    for replica in volume.replicas.iter().filter(|r| !r.leaving) {
        match present.iter_mut().find(|(id, _)| *id == replica.id.0) {
            // A replica that moves counts in its new pool.
            Some((_, pool)) if !volume.is_known(replica) => pool.clone_from(&replica.pool),
            Some(_) => {}
            None => present.push((replica.id.0, replica.pool.clone())),
        }
    }
    present
}

fn replicas(
    volume: &mut VolumeRecord,
    asked: &ApplyVolumeRequest,
    declared: &VolumeSpec,
    places: &[Place],
    candidates: &[Candidate],
    in_sync: &[ReplicaId],
) -> Result<Vec<Said>, Error> {
    let mut unmatched = present(volume);
    let wanted = match declared.replicas {
        0 => (unmatched.len().max(places.len())) as u32,
        n => n,
    };
    check_replicas("desiredReplicationFactor", wanted, REPLICAS_HARD_MAX)?;
    if places.len() > wanted as usize {
        return Err(too_many(places.len(), wanted));
    }
    let have = unmatched.len();
    let mut said = Vec::new();
    let mut new = Vec::new();
    let mut moves = Vec::new();
    for place in places {
        let at = match place.id {
            Some(id) => Some(unmatched.iter().position(|(i, _)| *i == id).ok_or_else(|| {
                Error::missing("replica", format!("{id} of volume {:?}", declared.name))
            })?),
            None => unmatched.iter().position(|(_, pool)| *pool == place.pool),
        };
        match at.map(|at| unmatched.remove(at)) {
            Some((id, pool)) if !place.pool.is_empty() && pool != place.pool => {
                moves.push((id, place.pool.clone()));
            }
            Some(_) => {}
            None => new.push(place.pool.clone()),
        }
    }
    let surplus = (have + new.len()).saturating_sub(wanted as usize);
    if surplus > 0 && surplus != unmatched.len() {
        let rule = format!(
            "volume {:?} has {have} replicas and is to have {wanted}: name in spec.replicas those \
             that stay, all of them",
            declared.name
        );
        return Err(Error::invalid("desiredReplicationFactor", rule));
    }
    if surplus > 0 {
        // A replica that leaves and a new one are together one move.
        while !new.is_empty() && !unmatched.is_empty() {
            let (id, _) = unmatched.remove(0);
            moves.push((id, new.remove(0)));
        }
    }
    for (id, pool) in moves {
        if let Some(message) = scale::move_to(volume, id, &pool, candidates)? {
            said.push(("ReplicaMoves", message));
        }
    }
    let leaving: Vec<ReplicaId> = match surplus {
        0 => Vec::new(),
        _ => unmatched.iter().map(|(id, _)| *id).collect(),
    };
    if !leaving.is_empty()
        && let Some(message) = replicas::leave(volume, &leaving, in_sync)?
    {
        said.push(("ReplicaLeaves", message));
    }
    let named = Scale {
        replicas: (have.saturating_sub(leaving.len()) + new.len()) as u32,
        pools: new.clone(),
        allow_loss_on_single_failure: declared.allow_loss_on_single_failure,
        ..Scale::default()
    };
    if !new.is_empty()
        && let Some(message) = scale::scale(volume, &named, candidates)?
    {
        said.push(("VolumeScaled", message));
    }
    let rest = Scale {
        // A decrease was handled above.
        replicas: if leaving.is_empty() { wanted } else { 0 },
        consistency_factor: asked
            .consistency_factor
            .filter(|factor| *factor != u32::from(volume.consistency_factor)),
        allow_loss_on_single_failure: declared.allow_loss_on_single_failure,
        pools: Vec::new(),
    };
    if let Some(message) = scale::scale(volume, &rest, candidates)? {
        said.push(("VolumeScaled", message));
    }
    Ok(said)
}
