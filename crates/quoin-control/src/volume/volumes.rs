//! Volumes come, grow and go.

use std::sync::Arc;

use quoin_api::control::{VolumeRef, VolumeSource, VolumeSpec};
use quoin_api::volume::OPTIONS;
use quoin_cluster::records::{
    Cause, MemberRecord, NameRecord, PoolRecord, ReplicaPhase, ReplicaRecord, Spec, Text,
    VolumePhase, VolumeRecord,
};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};

use crate::mirror::rules;
use crate::state::events::Severity;
use crate::state::{State, about, random_id};
use crate::time::now_ms;
use crate::volume::clones::{self, Prepared};
use crate::volume::placement::{self, Candidate};
use crate::volume::spec;
use crate::volume::topology::{self, Requirement};
use crate::{Error, text};

/// Creation, growth, deletion and lists of volumes.
pub struct Catalog {
    state: Arc<State>,
}

impl Catalog {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Creates a volume, or finds the one that was created by the same request before. Its
    /// replicas are being made when this returns: see the phase.
    pub async fn create(
        &self,
        asked: &VolumeSpec,
        limit_bytes: u64,
    ) -> Result<Arc<VolumeRecord>, Error> {
        self.create_within(asked, asked.size_bytes, limit_bytes).await
    }

    /// See [`Self::create`]. A volume that exists needs `required_bytes` at least: less than a new one
    /// gets if the caller named no size.
    pub(crate) async fn create_within(
        &self,
        asked: &VolumeSpec,
        required_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Arc<VolumeRecord>, Error> {
        self.create_in(asked, required_bytes, limit_bytes, &[]).await
    }

    /// The volume of this name, if it was made from the source that is asked for: as a repeated
    /// creation finds it. `None`: there is no volume of this name.
    pub fn find_made_from(
        &self,
        name: &str,
        source: &VolumeSource,
    ) -> Result<Option<Arc<VolumeRecord>>, Error> {
        self.state.check_ruling()?;
        let named = self.state.names.get(name);
        let found = named.and_then(|name| self.state.volumes.get(&name.volume_id.0.to_string()));
        match found {
            Some(volume) if !clones::is_from(&self.state, &volume, Some(source)) => {
                Err(differs_in_source(&volume))
            }
            found => Ok(found),
        }
    }

    /// A volume that was made by the same request before, checked against it.
    pub fn check_made(
        &self,
        volume: &Arc<VolumeRecord>,
        asked: &VolumeSpec,
        required_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let asked = clones::as_made(asked, volume)?;
        let spec = spec::complete(&asked, self.state.settings.defaults)?;
        let wanted = Requirement::of(&asked, spec.options.local)?;
        self.check_same(volume, &spec, &wanted, required_bytes, limit_bytes)?;
        Ok(volume.clone())
    }

    /// See [`Self::create_within`]; the volume begins with the content of a source, and is as large
    /// at least.
    pub async fn create_from(
        &self,
        asked: &VolumeSpec,
        required_bytes: u64,
        limit_bytes: u64,
        source: &Prepared,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let made = async {
            let asked = clones::filled_in(asked, source)?;
            let size_bytes = source.size_within(required_bytes, limit_bytes)?;
            let asked = VolumeSpec { size_bytes, ..asked };
            self.create_with(&asked, required_bytes, limit_bytes, &[], Some(source)).await
        };
        let made = made.await;
        if made.is_err() {
            source.give_up(&self.state).await?;
        }
        made
    }

    /// See [`Self::create_within`]; the replicas are in the named pools.
    pub(crate) async fn create_in(
        &self,
        asked: &VolumeSpec,
        required_bytes: u64,
        limit_bytes: u64,
        named: &[String],
    ) -> Result<Arc<VolumeRecord>, Error> {
        self.create_with(asked, required_bytes, limit_bytes, named, None).await
    }

    async fn create_with(
        &self,
        asked: &VolumeSpec,
        required_bytes: u64,
        limit_bytes: u64,
        named: &[String],
        source: Option<&Prepared>,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let limits = (required_bytes, limit_bytes);
        self.create_as(VolumeId(random_id()), asked, limits, named, source, |_| {}).await
    }

    /// Creates the copy of a volume of another cluster under its id. Where its name is taken, it gets the
    /// beginning of the id too. `made` completes its record.
    pub(crate) async fn create_copy(
        &self,
        id: VolumeId,
        mut asked: VolumeSpec,
        made: impl Fn(&mut VolumeRecord) + Send + Sync,
    ) -> Result<Arc<VolumeRecord>, Error> {
        if self.state.names.get(&asked.name).is_some() {
            let id = id.to_string();
            let room = spec::NAME_BYTES_MAX.saturating_sub(9);
            while asked.name.len() > room {
                asked.name.pop();
            }
            asked.name = format!("{}-{}", asked.name, &id[..8]);
        }
        let size_bytes = asked.size_bytes;
        self.create_as(id, &asked, (size_bytes, 0), &[], None, made).await
    }

    async fn create_as(
        &self,
        id: VolumeId,
        asked: &VolumeSpec,
        (required_bytes, limit_bytes): (u64, u64),
        named: &[String],
        source: Option<&Prepared>,
        made: impl Fn(&mut VolumeRecord) + Send + Sync,
    ) -> Result<Arc<VolumeRecord>, Error> {
        self.state.check_ruling()?;
        let mut spec = spec::complete(asked, self.state.settings.defaults)?;
        let wanted = Requirement::of(asked, spec.options.local)?;
        spec::check_replicas("replicas", spec.replicas.into(), self.state.settings.replicas_max)?;
        let size_bytes = spec::size(asked.size_bytes, limit_bytes)?;
        let _one_at_a_time = self.state.creating.lock().await;
        let found = self.state.names.get(&spec.name);
        if let Some(name) = &found
            && let Some(volume) = self.state.volumes.get(&name.volume_id.0.to_string())
        {
            if volume.source.as_ref().map(|s| (s.snapshot, s.of_volume))
                != source.map(|s| (s.record().snapshot, s.record().of_volume))
            {
                return Err(differs_in_source(&volume));
            }
            self.check_same(&volume, &spec, &wanted, required_bytes, limit_bytes)?;
            return Ok(volume);
        }
        if let Some(source) = source {
            source.settle(&mut spec)?;
        }
        if let Some(other) = self.state.volumes.get(&spec.name) {
            let rule = format!("it is the id of volume {:?}: choose another", other.spec.name);
            return Err(Error::invalid("name", rule));
        }
        spec::check_file_system(&spec, size_bytes)?;
        // Placement first, so that a refusal leaves nothing behind.
        let candidates = candidates(&self.state);
        let placed = match source {
            None => topology::place(&spec, size_bytes, &candidates, &wanted, named)
                .map(|placed| (placed, Vec::new())),
            Some(source) => source.choose(&self.state, &spec, size_bytes, &candidates, &wanted),
        };
        let (placed, others) = match placed {
            // Not having heard of a pool yet says nothing about its room.
            Err(refusal) if self.pools_unheard() => {
                let wait = "the controller has just started and waits for its pools to report";
                return Err(Error::Busy(format!("{wait} ({refusal})")));
            }
            Err(refusal) => {
                placement::check_possible(&spec, size_bytes, &candidates)?;
                return Err(refusal);
            }
            Ok(placed) => placed,
        };
        spec.accessible_topology = placed.topology;
        // No snapshot is deleted between the look at it and the record that keeps it.
        let _changing = match source {
            Some(_) => Some(self.state.snapshots.changing.lock().await),
            None => None,
        };
        if let Some(source) = source {
            source.begin_use(&self.state, Text(id)).await?;
        }
        let name = NameRecord { volume_name: spec.name.clone(), volume_id: Text(id) };
        match found {
            // Left by a creation that failed; that id is not used again.
            Some(_) => {
                let take = |record: &mut NameRecord| {
                    *record = name.clone();
                    Ok(())
                };
                self.state.names.update(&spec.name, take).await?;
            }
            None => {
                if self.state.names.create(name).await?.is_err() {
                    return Err(Error::Busy(format!("volume {:?} is being created", spec.name)));
                }
            }
        }
        let mut volume = match source {
            None => new_volume(id, spec, size_bytes, placed.pools),
            Some(source) => {
                let volume = VolumeRecord::new(id, spec, size_bytes, now_ms());
                clones::new_clone(volume, source.record(), placed.pools, others)
            }
        };
        volume.replicas.iter_mut().for_each(|replica| {
            replica.placed = named.contains(&replica.pool) || placed.kept.contains(&replica.pool);
        });
        made(&mut volume);
        match self.state.volumes.create(volume).await? {
            Ok(volume) => {
                let pools: Vec<_> = volume.replicas.iter().map(|r| r.pool.as_str()).collect();
                let (size, pools) = (text::bytes(size_bytes), pools.join(", "));
                // A reader of the events alone must not take pools of one host for hosts.
                let from = match &volume.source {
                    None => String::new(),
                    source => format!(", made from {}", clones::in_words(source.as_ref())),
                };
                let message = format!(
                    "{size} on pools {pools}{from}: {}",
                    crate::status::contract(&self.state, &volume)
                );
                self.state.events.record(
                    Severity::Normal,
                    about(&volume),
                    "VolumeCreated",
                    message,
                );
                Ok(volume)
            }
            Err(_) => Err(Error::Busy("a volume id was drawn twice; try again".to_owned())),
        }
    }

    fn pools_unheard(&self) -> bool {
        let observed = self.state.observed();
        let unheard = |pool: &Arc<PoolRecord>| !observed.pools.contains_key(&pool.name);
        observed.starting(self.state.settings.offline_after)
            && self.state.pools.list().iter().any(unheard)
    }

    fn check_same(
        &self,
        volume: &VolumeRecord,
        asked: &Spec,
        wanted: &Requirement,
        size_bytes: u64,
        limit_bytes: u64,
    ) -> Result<(), Error> {
        let size = volume.size_bytes;
        let mut differences = Vec::new();
        if size < size_bytes {
            let (has, least) = (text::bytes(size), text::bytes(size_bytes));
            differences.push(format!("size: it has {has}, {least} are asked for"));
        } else if limit_bytes != 0 && size > limit_bytes {
            let (has, most) = (text::bytes(size), text::bytes(limit_bytes));
            differences.push(format!("size: it has {has}, at most {most} are asked for"));
        }
        let (has, wants) = (in_words(&volume.spec.as_created()), in_words(asked));
        for ((field, has), (_, wants)) in has.into_iter().zip(wants) {
            if has != wants {
                differences.push(format!("{field}: it was made with {has}, {wants} is asked for"));
            }
        }
        if volume.spec.parameters != asked.parameters {
            differences.push("parameters: it was made with others".to_owned());
        }
        if volume.spec.mutable_parameters != asked.mutable_parameters {
            differences.push("mutable parameters: it was made with others".to_owned());
        }
        if !wanted.is_met_by(&self.state, volume) {
            differences.push("topology: it is not where it is asked for".into());
        }
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::Differs { name: asked.name.clone(), difference: differences.join(", ") })
    }

    /// Deletes a volume; its name is free at once, its record stays until every pool has
    /// answered that the replica is gone. One that does not exist is deleted already.
    pub async fn delete(&self, reference: Option<&VolumeRef>) -> Result<(), Error> {
        let volume = match self.state.volume(reference) {
            Err(Error::NotFound { .. }) => return Ok(()),
            found => found?,
        };
        if rules::keeps_all(&self.state, &volume)? {
            return rules::release(&self.state, &volume).await;
        }
        rules::check_member(&self.state, &volume)?;
        // Until the volume's phase is recorded no snapshot of it is begun, and the last one not deleted.
        let changing = self.state.snapshots.changing.lock().await;
        let is_retained = self.state.snapshots.keeps(volume.id.0);
        let updated = self
            .state
            .update_volume(volume.id.0, |volume| {
                if let Some(attachment) = volume.attachments.first() {
                    return Err(Error::Precondition(format!(
                        "volume {:?} is attached to node {}; detach it first",
                        volume.spec.name, attachment.node
                    )));
                }
                let deleted = matches!(volume.phase, VolumePhase::Ready | VolumePhase::Pending);
                match is_retained && volume.phase != VolumePhase::Deleting {
                    true => volume.phase = VolumePhase::Retained,
                    false => volume.begin_deletion(),
                }
                Ok(deleted)
            })
            .await;
        drop(changing);
        match updated {
            // Somebody else was faster, through to the end.
            Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
            Ok((volume, deleted)) => {
                if deleted {
                    let message = match volume.phase {
                        VolumePhase::Retained => "its replicas are kept for its snapshots",
                        _ => "its replicas are being removed",
                    };
                    self.state.events.record(
                        Severity::Normal,
                        about(&volume),
                        "VolumeDeleted",
                        message,
                    );
                }
                free_name(&self.state, &volume).await
            }
        }
    }

    /// Grows a volume; a smaller size than it has is no change, as long as the limit allows
    /// the size that it has.
    pub async fn resize(
        &self,
        reference: Option<&VolumeRef>,
        size_bytes: u64,
        limit_bytes: u64,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        rules::check_change(&self.state, &volume)?;
        let size = spec::size(size_bytes, limit_bytes)?;
        if limit_bytes != 0 && limit_bytes < volume.size_bytes {
            return Err(Error::OutOfRange(format!(
                "volume {:?} has {}, more than the limit of {}, and never shrinks",
                volume.spec.name,
                text::bytes(volume.size_bytes),
                text::bytes(limit_bytes)
            )));
        }
        let room = candidates(&self.state);
        if size > volume.size_bytes {
            placement::check_possible(&volume.spec, size, &room)?;
        }
        let change = |volume: &mut VolumeRecord| grow(volume, size, &room);
        let (volume, before) = self.state.update_volume(volume.id.0, change).await?;
        if let Some(before) = before {
            let message = format!("{} to {}", text::bytes(before), text::bytes(size));
            self.state.events.record(Severity::Normal, about(&volume), "VolumeResized", message);
        }
        Ok(volume)
    }

    pub fn get(&self, reference: Option<&VolumeRef>) -> Result<Arc<VolumeRecord>, Error> {
        self.state.volume(reference)
    }

    /// A page of volumes in the order of their ids, and the token of the next one.
    pub fn list(
        &self,
        max_entries: u32,
        starting_token: &str,
    ) -> Result<(Vec<Arc<VolumeRecord>>, String), Error> {
        self.list_with(max_entries, starting_token, is_there)
    }

    /// As [`Self::list`], of those volumes for which `is_wanted` is true. It is asked while no lock
    /// is held, so it may look at other records.
    pub(crate) fn list_where(
        &self,
        max_entries: u32,
        starting_token: &str,
        is_wanted: impl Fn(&VolumeRecord) -> bool,
    ) -> Result<(Vec<Arc<VolumeRecord>>, String), Error> {
        const LOOK_AT: u32 = 256;
        let (mut wanted, mut token) = (Vec::new(), starting_token.to_owned());
        loop {
            let (page, next) = self.list(LOOK_AT, &token)?;
            for volume in page.into_iter().filter(|volume| is_wanted(volume)) {
                if max_entries != 0 && wanted.len() == max_entries as usize {
                    let last = wanted.last().map(|v: &Arc<VolumeRecord>| v.id.0.to_string());
                    return Ok((wanted, self.token_after(&last.unwrap_or_default())));
                }
                wanted.push(volume);
            }
            if next.is_empty() {
                return Ok((wanted, next));
            }
            token = next;
        }
    }

    /// As [`Self::list`], of the volumes for which `is_listed` is true by their record alone.
    pub(crate) fn list_with(
        &self,
        max_entries: u32,
        starting_token: &str,
        is_listed: impl Fn(&VolumeRecord) -> bool,
    ) -> Result<(Vec<Arc<VolumeRecord>>, String), Error> {
        // A list that lacks volumes would be taken for their absence.
        self.state.check_ruling()?;
        let after = starting_token.get(..32).unwrap_or_default();
        if !starting_token.is_empty() && starting_token != self.token_after(after) {
            let rule = "starting token: not one that this cluster gave; list from the start";
            return Err(Error::Aborted(rule.to_owned()));
        }
        let count = match max_entries {
            0 => usize::MAX,
            n => n as usize,
        };
        let page = self.state.volumes.page_of(after, count, &is_listed);
        let last = page.last().map(|volume| volume.id.0.to_string()).unwrap_or_default();
        let more = !last.is_empty() && !self.state.volumes.page_of(&last, 1, &is_listed).is_empty();
        Ok((page, if more { self.token_after(&last) } else { String::new() }))
    }

    /// The token of the page after a volume. The volume may be gone by then, so it is told by
    /// a checksum over the cluster's id, and not by the volume, that the token was given here.
    fn token_after(&self, id: &str) -> String {
        let text = format!("volumes of {} after {id}", self.state.identity.cluster());
        let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
        format!("{id}{}", hex::encode(&sum.as_ref()[..8]))
    }

    /// The sum of what volumes of this spec could still be promised, and the largest that one
    /// can have now. Volumes are thin, so more than the sum may be given out.
    pub fn capacity(&self, asked: Option<&VolumeSpec>) -> Result<(u64, u64), Error> {
        let mut asked = asked.cloned().unwrap_or_default();
        if asked.name.is_empty() {
            asked.name = "capacity".to_owned();
        }
        let spec = spec::complete(&asked, self.state.settings.defaults)?;
        let wanted = Requirement::of(&asked, spec.options.local)?;
        let (left, largest) = topology::capacity(&spec, &candidates(&self.state), &wanted);
        Ok((left, largest.min(spec::SIZE_BYTES_MAX)))
    }
}

fn differs_in_source(volume: &VolumeRecord) -> Error {
    let source = clones::in_words(volume.source.as_ref());
    let difference = format!("source: it was made with {source}, another one is asked for");
    Error::Differs { name: volume.spec.name.clone(), difference }
}

/// Its user has not deleted it.
pub(crate) fn is_there(volume: &VolumeRecord) -> bool {
    matches!(volume.phase, VolumePhase::Pending | VolumePhase::Ready)
}

pub(crate) async fn free_name(state: &State, volume: &VolumeRecord) -> Result<(), Error> {
    let ours = |name: &NameRecord| name.volume_id == volume.id;
    state.names.remove(&volume.spec.name, ours).await.map(drop)
}

/// Every pool as placement sees it now.
pub(crate) fn candidates(state: &State) -> Vec<Candidate> {
    let observed = state.observed();
    let after = state.settings.offline_after;
    let candidate = |pool: &Arc<PoolRecord>| {
        let seen = observed.pools.get(&pool.name);
        let cordon = crate::reconcile::cordon::of_pool(state, &observed, pool);
        let unusable = match (seen, observed.online_pool(&pool.name, after)) {
            _ if pool.rolled_back => "an older state of its disk came back".to_owned(),
            (_, Some(_)) => cordon.to_owned(),
            (Some(seen), None) if !seen.error.is_empty() => format!("failed: {}", seen.error),
            (Some(_), None) if observed.unreachable(&pool.name, after).is_some() => {
                format!("unreachable: {}", observed.unreachable(&pool.name, after).unwrap_or(""))
            }
            _ => "offline".to_owned(),
        };
        // A pool that is opening has told nothing of its room yet.
        let full = seen.filter(|seen| seen.capacity_bytes > 0 && seen.free_bytes == 0);
        let full = full.map(|seen| match seen.warning.as_str() {
            "" => "no bytes are free".to_owned(),
            warning => warning.to_owned(),
        });
        Candidate {
            full: full.unwrap_or_default(),
            name: pool.name.clone(),
            host: pool.node.clone(),
            topology: topology::of_pool(state, pool),
            capacity_bytes: seen.map_or(0, |seen| seen.capacity_bytes),
            used_bytes: seen.map_or(0, |seen| seen.used_bytes),
            promised_bytes: state.volumes.index(|index| index.promised_bytes(&pool.name)),
            unusable,
            ring_full: seen.is_some_and(|seen| seen.ring_full),
            silent: seen.is_some_and(|seen| seen.last.elapsed() > after / 2),
        }
    };
    state.pools.list().iter().map(candidate).collect()
}

/// The fields of a spec that a volume is made with, each in words.
fn in_words(spec: &Spec) -> Vec<(&'static str, String)> {
    let message = VolumeSpec::from(spec);
    let encrypted = if spec.encryption.is_some() { "encryption" } else { "no encryption" };
    let factors = [
        // Slots differ with each request; whether the key is the volume's own is for its holder.
        ("encryption", encrypted.to_owned()),
        ("replicas", spec.replicas.to_string()),
        ("consistencyFactor", spec.consistency_factor.to_string()),
    ];
    let options = OPTIONS.iter().map(|option| {
        (option.key, option.given(&message).unwrap_or_else(|| option.absent.to_owned()))
    });
    factors.into_iter().chain(options).collect()
}

/// Makes a volume larger where its pools have the room; the size that it had.
pub(crate) fn grow(
    volume: &mut VolumeRecord,
    size: u64,
    pools: &[Candidate],
) -> Result<Option<u64>, Error> {
    if size <= volume.size_bytes {
        return Ok(None);
    }
    if !is_there(volume) {
        return Err(Error::missing("volume", volume.id.0.to_string()));
    }
    let more = size - volume.size_bytes;
    let small = pools.iter().find(|pool| {
        // The room of an offline pool is not known; growing is thin, so it is let through.
        pool.unusable.is_empty()
            && pool.room_bytes() < more
            && volume.replicas.iter().any(|replica| replica.pool == pool.name)
    });
    if let Some(pool) = small {
        return Err(Error::Exhausted(format!(
            "volume {:?} cannot grow by {}: pool {} {}",
            volume.spec.name,
            text::bytes(more),
            pool.name,
            match pool.full.as_str() {
                "" => format!(
                    "has room for {} (a fifth of it is kept free)",
                    text::bytes(pool.room_bytes())
                ),
                why => format!("is full: {why}"),
            }
        )));
    }
    Ok(Some(std::mem::replace(&mut volume.size_bytes, size)))
}

/// A pool for each replica of a new volume: those that are named, and the best for the others.
pub(crate) fn choose(
    spec: &Spec,
    size_bytes: u64,
    candidates: &[Candidate],
    named: &[String],
) -> Result<Vec<String>, Error> {
    if named.is_empty() {
        return placement::place(spec, size_bytes, candidates);
    }
    let beside = |taken: &[&str], count, named: &[String]| {
        let taken = placement::Taken { pools: taken, hosts_of: taken };
        placement::place_beside(spec, size_bytes, candidates, &taken, count, named)
    };
    let mut pools = beside(&[], named.len(), named)?;
    let taken: Vec<&str> = named.iter().map(String::as_str).collect();
    pools.extend(beside(&taken, usize::from(spec.replicas).saturating_sub(named.len()), &[])?);
    Ok(pools)
}

fn new_volume(id: VolumeId, spec: Spec, size_bytes: u64, pools: Vec<String>) -> VolumeRecord {
    let replica = |pool| ReplicaRecord {
        id: Text(ReplicaId(random_id())),
        guid: Text(ReplicaGuid(random_id())),
        pool,
        phase: ReplicaPhase::Init,
        leaving: false,
        placed: false,
        cause: Cause::Asked,
    };
    let replicas: Vec<_> = pools.into_iter().map(replica).collect();
    let mut record = VolumeRecord::new(id, spec, size_bytes, now_ms());
    record.membership.version = 1;
    record.membership.known =
        replicas.iter().map(|r| MemberRecord { id: r.id, guid: r.guid }).collect();
    VolumeRecord { replicas, ..record }
}
