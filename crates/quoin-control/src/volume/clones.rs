//! New volumes that begin with the content of a snapshot, or of a volume at this moment.
//!
//! A clone's replicas are made in pools that hold the snapshot, and share its blocks there. They
//! count from their birth, as those of any new volume do; a pool makes none where it lacks the
//! snapshot. Replicas for which no such pool is left are rebuilt from the others.
//!
//! The snapshot's record names the volumes that were made from it, and is kept until the last of
//! them is gone, also where its user deletes it meanwhile. A volume is copied by a snapshot that is
//! made for that alone, is in no list, and goes with the copy.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, SnapshotRef, VolumeRef, VolumeSpec};
use quoin_api::volume::VolumeOption;
use quoin_cluster::records::{
    BaseUse, Cause, MemberRecord, Record, ReplicaPhase, ReplicaRecord, SnapshotPhase,
    SnapshotRecord, SourceRecord, Spec, Text, VolumePhase, VolumeRecord,
};
use quoin_types::{ReplicaGuid, ReplicaId, VolumeId};

use crate::snapshot::catalog::Snapshots;
use crate::state::events::Severity;
use crate::state::{State, about, random_id};
use crate::volume::placement::{self, Candidate};
use crate::volume::scale::in_sync_ids;
use crate::volume::topology::{self, Placed, Requirement};
use crate::{Error, text};

/// Volumes that may be made one from the other. A pool looks a block up in all of them.
pub const DEPTH_MAX: u32 = 14;

/// Interval of looks at what a request waits for.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The source of a new volume, as it was found.
pub struct Prepared {
    snapshot: Arc<SnapshotRecord>,
    volume: Arc<VolumeRecord>,
    of_volume: bool,
    /// Options that are not given are those of the source.
    as_source: bool,
}

/// Finds sources of new volumes, and makes the snapshots of those that are copied.
pub struct Clones {
    state: Arc<State>,
    snapshots: Arc<Snapshots>,
}

impl Clones {
    pub(crate) fn new(state: Arc<State>) -> Self {
        let snapshots = Arc::new(Snapshots::new(state.clone()));
        Self { state, snapshots }
    }

    /// Finds the source of the new volume `name`. A volume is cut for it, within the time.
    ///
    /// # Errors
    /// There is no such source, or it cannot be used now.
    pub async fn prepare(
        &self,
        name: &str,
        asked: &api::VolumeSource,
        within: Duration,
    ) -> Result<Prepared, Error> {
        self.state.check_ruling()?;
        let (snapshot, of_volume) = match (&asked.snapshot, &asked.volume) {
            (Some(reference), None) => (self.snapshots.get(Some(reference))?, false),
            (None, Some(reference)) => (self.cut(name, reference, within).await?, true),
            _ => {
                let rule = "name a snapshot or a volume, and not both";
                return Err(Error::invalid("source", rule));
            }
        };
        if snapshot.phase == SnapshotPhase::Wished {
            return Err(Error::Busy(format!(
                "the snapshot {:?} of volume {:?} is not cut yet: it waits for {}",
                snapshot.name,
                snapshot.volume_name,
                crate::snapshot::view::snapshot(&self.state, &snapshot).waiting_for
            )));
        }
        let volume = self.state.volumes.get(&snapshot.volume.0.to_string());
        let volume = volume.filter(|volume| volume.phase.is_kept());
        let gone = || Error::missing("snapshot", snapshot.name.clone());
        let (volume, as_source) = (volume.ok_or_else(gone)?, asked.as_source);
        self.wait_for_replicas(&volume, within).await;
        Ok(Prepared { snapshot, volume, of_volume, as_source })
    }

    /// Waits, within the time, for the word that a replica of the source is in sync: of one that was
    /// just made or opened it comes a moment later.
    async fn wait_for_replicas(&self, volume: &VolumeRecord, within: Duration) {
        let until = tokio::time::Instant::now() + within;
        while in_sync_ids(&self.state, volume).is_empty() && tokio::time::Instant::now() < until {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Has a volume take over the blocks that it shares with its source. Its pools do that in the
    /// background; [`crate::reconcile`] ends it.
    pub async fn flatten(&self, reference: Option<&VolumeRef>) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        let change = |volume: &mut VolumeRecord| match volume.phase {
            VolumePhase::Pending => Err(Error::Busy(format!(
                "volume {:?} is being created; try again when it is ready",
                volume.spec.name
            ))),
            VolumePhase::Deleting | VolumePhase::Retained => Err(crate::state::missing(reference)),
            VolumePhase::Ready => {
                let begins = |source: &&mut SourceRecord| source.base == BaseUse::InUse;
                let source = volume.source.as_mut().filter(begins);
                Ok(source.map(|source| source.base = BaseUse::Flattening).is_some())
            }
        };
        let (volume, begins) = self.state.update_volume(volume.id.0, change).await?;
        if begins {
            let message = format!(
                "its replicas take over the blocks that they share with {}",
                in_words(volume.source.as_ref())
            );
            let object = about(&volume);
            self.state.events.record(Severity::Normal, object, "VolumeFlattens", message);
        }
        Ok(volume)
    }

    /// The snapshot for a copy of a volume: the one that an earlier request for the same copy made,
    /// where that was never answered or the snapshot was not cut yet.
    async fn cut(
        &self,
        name: &str,
        reference: &VolumeRef,
        within: Duration,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        let volume = self.state.volume(Some(reference))?;
        if let Some(point) = crate::mirror::rules::shown_point(&self.state, &volume)? {
            return Ok(point);
        }
        let snapshot = self.snapshots.create_for(Some(reference), name).await?;
        self.snapshots.cut(snapshot, within).await
    }
}

/// Returns true if a volume that exists was made from what is asked for.
pub(crate) fn is_from(
    state: &State,
    volume: &VolumeRecord,
    asked: Option<&api::VolumeSource>,
) -> bool {
    let (Some(asked), Some(source)) = (asked, &volume.source) else {
        return asked.is_none() && volume.source.is_none();
    };
    let is_snapshot = |reference: &SnapshotRef| {
        let id = source.snapshot.0.to_string();
        let named = || state.snapshots.named(&reference.name).map(|named| named.id);
        !source.of_volume && (reference.id == id || named() == Some(source.snapshot))
    };
    let is_volume = |reference: &VolumeRef| {
        let id = source.volume.0.to_string();
        let named = || state.names.get(&reference.name).map(|named| named.volume_id);
        source.of_volume && (reference.id == id || named() == Some(source.volume))
    };
    match (&asked.snapshot, &asked.volume) {
        (Some(reference), None) => is_snapshot(reference),
        (None, Some(reference)) => is_volume(reference),
        _ => false,
    }
}

/// Source of a volume, in words.
pub(crate) fn in_words(source: Option<&SourceRecord>) -> String {
    match source {
        None => "no source".to_owned(),
        Some(source) if source.of_volume => format!("volume {:?}", source.volume_name),
        Some(source) => {
            format!("snapshot {:?} of volume {:?}", source.snapshot_name, source.volume_name)
        }
    }
}

/// The message of what a volume was made from.
pub(crate) fn message(source: &SourceRecord) -> api::MadeFrom {
    api::MadeFrom {
        snapshot_id: source.snapshot.0.to_string(),
        snapshot_name: source.snapshot_name.clone(),
        volume_id: source.volume.0.to_string(),
        volume_name: source.volume_name.clone(),
        of_volume: source.of_volume,
        flattening: source.base == BaseUse::Flattening,
        shares_nothing: !source.is_needed(),
    }
}

/// Specification of a new volume, with what it takes over from its source.
pub(crate) fn filled_in(asked: &VolumeSpec, source: &Prepared) -> Result<VolumeSpec, Error> {
    match source.as_source {
        true => filled_from(asked, &VolumeSpec::from(&source.volume.spec)),
        false => Ok(asked.clone()),
    }
}

fn filled_from(asked: &VolumeSpec, own: &VolumeSpec) -> Result<VolumeSpec, Error> {
    let filled = VolumeOption::fill_in(asked, own);
    let mut filled = filled.map_err(|wrong| Error::invalid(wrong.key, wrong.rule))?;
    if asked.replicas == 0 {
        filled.replicas = own.replicas;
        // A factor goes with its number of replicas.
        if asked.consistency_factor == 0 {
            filled.consistency_factor = own.consistency_factor;
        }
    }
    filled.allow_loss_on_single_failure |= own.allow_loss_on_single_failure;
    if asked.encryption.is_none() {
        filled.encryption.clone_from(&own.encryption);
    }
    Ok(filled)
}

/// Request for a volume that exists, where the request left open what its source had: as the
/// volume was made.
pub(crate) fn as_made(asked: &VolumeSpec, volume: &VolumeRecord) -> Result<VolumeSpec, Error> {
    let made = VolumeSpec::from(&volume.spec.as_created());
    // Which of them were taken over is not known any more; a repeat differs where it says so.
    filled_from(asked, &made)
}

impl Prepared {
    /// Size of the source.
    pub fn size_bytes(&self) -> u64 {
        self.snapshot.cut.map_or(self.volume.size_bytes, |cut| cut.size_bytes)
    }

    /// Size of a new volume: of the source at least.
    ///
    /// # Errors
    /// The limit is lower.
    pub fn size_within(&self, required_bytes: u64, limit_bytes: u64) -> Result<u64, Error> {
        let source = self.size_bytes();
        if limit_bytes != 0 && limit_bytes < source {
            return Err(Error::OutOfRange(format!(
                "size: at most {} are asked for, and {} has {}; a copy is never smaller",
                text::bytes(limit_bytes),
                in_words(Some(&self.record())),
                text::bytes(source)
            )));
        }
        Ok(required_bytes.max(source))
    }

    pub fn record(&self) -> SourceRecord {
        let below = self.volume.source.as_ref().filter(|source| source.is_needed());
        SourceRecord {
            volume: self.volume.id,
            snapshot: self.snapshot.id,
            volume_name: self.snapshot.volume_name.clone(),
            snapshot_name: self.snapshot.name.clone(),
            of_volume: self.of_volume,
            depth: below.map_or(0, |source| source.depth) + 1,
            base: BaseUse::InUse,
        }
    }

    /// Checks what a clone cannot change, and takes over how its source is encrypted.
    pub fn settle(&self, spec: &mut Spec) -> Result<(), Error> {
        let source = &self.volume.spec;
        if self.record().depth > DEPTH_MAX {
            return Err(Error::Precondition(format!(
                "{} is a copy of a copy and so on, {DEPTH_MAX} deep, the most that there can be: \
                 flatten it (`quoin volume flatten`), or make the new volume from an earlier one",
                in_words(Some(&self.record()))
            )));
        }
        if spec.options.block_size != source.options.block_size {
            let rule = format!(
                "{} is asked for, and the source has {}; a copy has the blocks of its source",
                spec.options.block_size.bytes(),
                source.options.block_size.bytes()
            );
            return Err(Error::invalid("blockSize", rule));
        }
        match (&source.encryption, spec.encryption.is_some()) {
            (Some(_), false) => {
                let rule =
                    "the source is encrypted, and so is every copy of it: ask for encryption";
                Err(Error::invalid("encryption", rule))
            }
            (None, true) => {
                let rule =
                    "the source is not encrypted, and a copy shares its blocks: leave it out";
                Err(Error::invalid("encryption", rule))
            }
            (own, _) => {
                // Its blocks are encrypted with the source's data key.
                spec.encryption.clone_from(own);
                Ok(())
            }
        }
    }

    /// Pools for the replicas that begin with the snapshot, and for those that are rebuilt from them.
    pub fn choose(
        &self,
        state: &State,
        spec: &Spec,
        size_bytes: u64,
        candidates: &[Candidate],
        wanted: &Requirement,
    ) -> Result<(Placed, Vec<String>), Error> {
        let holding = pools_in_sync(state, &self.volume);
        let with_source = with_source(candidates, &holding);
        // As if nothing were to be shared: the volume can be had at all.
        let anywhere = topology::place(spec, size_bytes, candidates, wanted, &[])?;
        if holding.is_empty() {
            return Err(Error::Busy(format!(
                "{}: no pool holds it in sync now; `quoin volume get {}` shows its replicas",
                in_words(Some(&self.record())),
                self.volume.spec.name
            )));
        }
        let mut refusal = None;
        for count in (1..=spec.replicas).rev() {
            let fewer = Spec { replicas: count, ..spec.clone() };
            let placed = topology::place(&fewer, size_bytes, &with_source, wanted, &[]);
            let mut placed = match placed {
                Ok(placed) => placed,
                Err(refused) => {
                    refusal = Some(refused);
                    continue;
                }
            };
            if count == spec.replicas {
                return Ok((placed, Vec::new()));
            }
            for one in &anywhere.topology {
                if !placed.topology.contains(one) {
                    placed.topology.push(one.clone());
                }
            }
            let named: Vec<&str> = placed.pools.iter().map(String::as_str).collect();
            let taken = placement::Taken { pools: &named, hosts_of: &named };
            let spec = Spec { accessible_topology: placed.topology.clone(), ..spec.clone() };
            let rest = usize::from(spec.replicas - count);
            let others = placement::place_beside(&spec, size_bytes, candidates, &taken, rest, &[])?;
            topology::bind(&spec, &mut placed, &others, candidates)?;
            return Ok((placed, others));
        }
        // None of the pools that hold it has room, or is where the volume is to be used.
        Err(refusal.expect("a volume has a replica at least"))
    }

    /// Notes the new volume at its snapshot. The caller holds the lock of changes of snapshots.
    ///
    /// # Errors
    /// The snapshot was deleted meanwhile.
    pub async fn begin_use(&self, state: &State, volume: Text<VolumeId>) -> Result<(), Error> {
        let gone = || Error::missing("snapshot", self.snapshot.name.clone());
        let change = |snapshot: &mut SnapshotRecord| {
            if snapshot.phase != SnapshotPhase::Ready {
                return Err(gone());
            }
            snapshot.begin_use(volume);
            Ok(())
        };
        let updated = state.snapshots.records.update(&self.snapshot.name(), change).await?;
        updated.map(drop).ok_or_else(gone)
    }

    /// Gives up the snapshot that was made for a copy, of which the requester hears that it is not made:
    /// the next request is for the content of its own time. A request without an answer leaves it for
    /// its repeat.
    pub async fn give_up(&self, state: &State) -> Result<(), Error> {
        if !self.of_volume {
            return Ok(());
        }
        let _changing = state.snapshots.changing.lock().await;
        // Another request for the same copy may have made it.
        let change =
            |snapshot: &mut SnapshotRecord| Ok(snapshot.used_by.is_empty() && snapshot.remove());
        let updated = state.snapshots.records.update(&self.snapshot.name(), change).await?;
        if updated.is_some_and(|(_, removed)| removed) {
            state.tell_target(self.volume.id.0);
        }
        Ok(())
    }
}

/// Pools that hold a source in sync, and are to hold it.
pub(crate) fn pools_in_sync(state: &State, source: &VolumeRecord) -> HashSet<String> {
    let in_sync = in_sync_ids(state, source);
    let holds = |replica: &&ReplicaRecord| {
        source.is_known(replica) && in_sync.contains(&replica.id.0) && !replica.leaving
    };
    source.replicas.iter().filter(holds).map(|replica| replica.pool.clone()).collect()
}

/// The pools as those see them that begin with a snapshot which these hold.
pub(crate) fn with_source(candidates: &[Candidate], holding: &HashSet<String>) -> Vec<Candidate> {
    let mut with_source = candidates.to_vec();
    for candidate in &mut with_source {
        if candidate.unusable.is_empty() && !holding.contains(&candidate.name) {
            "it does not hold the source in sync".clone_into(&mut candidate.unusable);
        }
    }
    with_source
}

/// The record of a volume that begins with a snapshot in these pools.
pub(crate) fn new_clone(
    volume: VolumeRecord,
    source: SourceRecord,
    pools: Vec<String>,
    others: Vec<String>,
) -> VolumeRecord {
    let replica = |pool, phase| ReplicaRecord {
        id: Text(ReplicaId(random_id())),
        guid: Text(ReplicaGuid(random_id())),
        pool,
        phase,
        leaving: false,
        placed: false,
        cause: Cause::Asked,
    };
    let begun = pools.into_iter().map(|pool| replica(pool, ReplicaPhase::Clone));
    let mut replicas: Vec<ReplicaRecord> = begun.collect();
    let mut membership = volume.membership.clone();
    membership.version = 1;
    membership.known = replicas.iter().map(|r| MemberRecord { id: r.id, guid: r.guid }).collect();
    if !others.is_empty() {
        // The others come in as they are rebuilt, each by a change of the membership.
        membership.rf = replicas.len() as u8;
        membership.cf = quoin_types::membership::default_cf(membership.rf);
    }
    replicas.extend(others.into_iter().map(|pool| replica(pool, ReplicaPhase::Recreate)));
    VolumeRecord { replicas, membership, source: Some(source), ..volume }
}

/// Volumes that are being made from a snapshot.
pub(crate) fn being_made(state: &State, snapshot: &SnapshotRecord) -> Option<Arc<VolumeRecord>> {
    let mut users = snapshot.used_by.iter();
    users.find_map(|user| {
        let volume = state.volumes.get(&user.0.to_string());
        volume.filter(|volume| volume.phase == VolumePhase::Pending)
    })
}

/// Ends the uses of a volume's snapshots by volumes that have no record any more, which nothing else
/// brings up.
async fn end_lost_uses(state: &State, id: VolumeId) -> Result<(), Error> {
    let is_lost = |user: &Text<VolumeId>| state.volumes.get(&user.0.to_string()).is_none();
    for snapshot in state.snapshots.of_volume(id) {
        for user in snapshot.used_by.iter().filter(|user| is_lost(user)) {
            end_use(state, &snapshot, *user).await?;
        }
    }
    Ok(())
}

/// One volume does not need a snapshot any more.
async fn end_use(
    state: &State,
    snapshot: &SnapshotRecord,
    user: Text<VolumeId>,
) -> Result<(), Error> {
    let change = |snapshot: &mut SnapshotRecord| {
        let before = snapshot.phase;
        snapshot.end_use(user);
        Ok(before != snapshot.phase)
    };
    let updated = state.snapshots.records.update(&snapshot.name(), change).await?;
    if updated.is_some_and(|(_, is_going)| is_going) {
        state.tell_target(snapshot.volume.0);
    }
    Ok(())
}

/// Makes the record of a snapshot agree with the volumes that were made from it. The caller holds the
/// lock of changes of snapshots.
pub(crate) async fn keep_users(state: &State, id: VolumeId) -> Result<(), Error> {
    let volume = state.volumes.get(&id.to_string());
    let source = volume.as_ref().and_then(|volume| volume.source.as_ref());
    let source = source.filter(|source| source.is_needed());
    let source = source.map(|source| source.snapshot.0.to_string());
    for snapshot in state.snapshots.used_by(id) {
        if Some(snapshot.name()) == source {
            continue;
        }
        end_use(state, &snapshot, Text(id)).await?;
    }
    end_lost_uses(state, id).await?;
    // Records that were restored may lack it.
    let Some(known) = source.and_then(|name| state.snapshots.records.get(&name)) else {
        return Ok(());
    };
    if known.is_kept() && !known.used_by.contains(&Text(id)) {
        let change = |snapshot: &mut SnapshotRecord| {
            if snapshot.is_kept() {
                snapshot.begin_use(Text(id));
            }
            Ok(())
        };
        state.snapshots.records.update(&known.name(), change).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_api::volume::{OPTIONS, Values};

    use super::*;

    /// A request that gives each option of the table a value that is not its default.
    fn other_than_default() -> VolumeSpec {
        let mut spec = VolumeSpec::default();
        for option in &OPTIONS {
            let value = match option.values {
                Values::Words(words) => words.rsplit(" | ").next().unwrap(),
                Values::Rate { .. } => "50000",
                Values::Time => "90s",
            };
            option.set(&mut spec, value).unwrap();
        }
        // Its words are listed with the default last.
        spec.block_size = 512;
        spec
    }

    #[test]
    fn a_clone_takes_over_every_option_of_its_source_that_its_request_leaves_open() {
        let own = other_than_default();
        let taken = filled_from(&VolumeSpec::default(), &own).unwrap();
        for option in &OPTIONS {
            assert!(option.given(&own).is_some(), "{}", option.key);
            assert_eq!(option.given(&taken), option.given(&own), "{}", option.key);
        }
    }

    #[test]
    fn a_request_for_a_clone_may_ask_for_another_value_of_each_option() {
        let (own, mut asked) = (other_than_default(), VolumeSpec::default());
        for option in &OPTIONS {
            let value = match option.values {
                Values::Words(words) => words.split(" | ").next().unwrap(),
                Values::Rate { .. } | Values::Time => "off",
            };
            option.set(&mut asked, value).unwrap();
        }
        asked.block_size = 4096;
        let filled = filled_from(&asked, &own).unwrap();
        for option in &OPTIONS {
            assert_ne!(option.given(&filled), option.given(&own), "{}", option.key);
            assert_eq!(option.given(&filled), option.given(&asked), "{}", option.key);
        }
    }
}
