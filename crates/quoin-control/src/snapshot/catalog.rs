//! Snapshots come and go.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, SnapshotRef, VolumeRef};
use quoin_cluster::records::{
    Record, SnapshotName, SnapshotPhase, SnapshotRecord, Text, VolumePhase, VolumeRecord,
};
use quoin_replication::primary::USER_SNAPSHOTS_MAX;
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, SnapshotId};

use crate::Error;
use crate::state::events::{Object, Severity};
use crate::state::{State, random_id};
use crate::time::now_ms;
use crate::volume::spec;
use crate::volume::topology::Requirement;

/// Time for the cut of a snapshot, after which the answer says "Wished".
pub(crate) const CUT_TIME: Duration = Duration::from_secs(10);

/// Creation, deletion and lists of snapshots.
pub struct Snapshots {
    state: Arc<State>,
}

/// Events of a snapshot are its volume's, which users follow; their messages name the snapshot.
pub(crate) fn about(snapshot: &SnapshotRecord) -> Object {
    Object::new("volume", snapshot.volume.0, &snapshot.volume_name)
}

fn shown(reference: &SnapshotRef) -> String {
    let text = if reference.name.is_empty() { &reference.id } else { &reference.name };
    text.chars().take(160).collect()
}

impl Snapshots {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state }
    }

    /// Records that a snapshot is wanted, or finds the one that the same request made before. It is
    /// not cut yet when this returns: see [`Self::cut`].
    pub async fn create(
        &self,
        reference: Option<&VolumeRef>,
        name: &str,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.create_by(reference, name, "").await
    }

    /// As [`Self::create`]; the volume must be usable in one of these topologies, where any are given.
    pub(crate) async fn create_within(
        &self,
        reference: Option<&VolumeRef>,
        name: &str,
        requisite: &[api::Topology],
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.make(reference, name, "", requisite).await
    }

    /// As [`Self::create`], for a schedule; an empty one stands for a user.
    pub(crate) async fn create_by(
        &self,
        reference: Option<&VolumeRef>,
        name: &str,
        schedule: &str,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.make(reference, name, schedule, &[]).await
    }

    async fn make(
        &self,
        reference: Option<&VolumeRef>,
        name: &str,
        schedule: &str,
        requisite: &[api::Topology],
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        check_name(name)?;
        let _changing = self.state.snapshots.changing.lock().await;
        if let Some(found) = self.state.snapshots.named(name) {
            let found = self.same(found, reference)?;
            let volume = self.state.volume(reference)?;
            if !Requirement::allows(requisite, &volume.spec)? {
                let difference = "topology: its volume is not where it is asked for; choose another \
                                  name, or ask for the volume's own topology";
                let (what, name) = ("snapshot", found.name.clone());
                return Err(Error::Exists { what, name, difference: difference.to_owned() });
            }
            return Ok(found);
        }
        let volume = self.ready_volume(reference)?;
        if !Requirement::allows(requisite, &volume.spec)? {
            return Err(Error::Exhausted(format!(
                "snapshot {name:?}: a snapshot lies where its volume does, and volume {:?} is in none \
                 of the asked topologies; ask for its own",
                volume.spec.name
            )));
        }
        let count = self.state.snapshots.of_volume(volume.id.0).len();
        if count >= USER_SNAPSHOTS_MAX {
            return Err(too_many(&volume.spec.name));
        }
        self.record(&volume, name, schedule, None).await
    }

    /// The volume of a new snapshot.
    fn ready_volume(&self, reference: Option<&VolumeRef>) -> Result<Arc<VolumeRecord>, Error> {
        let volume = self.state.volume(reference)?;
        crate::mirror::rules::check_change(&self.state, &volume)?;
        match volume.phase {
            VolumePhase::Ready => Ok(volume),
            VolumePhase::Pending => {
                Err(Error::Busy(format!("volume {:?} is not ready", volume.spec.name)))
            }
            VolumePhase::Deleting | VolumePhase::Retained => Err(crate::state::missing(reference)),
        }
    }

    /// Records that a snapshot is wanted for a copy of the volume under this name, or finds the one
    /// that the same request made before. It is in no list and has no name of its own.
    pub(crate) async fn create_for(
        &self,
        reference: Option<&VolumeRef>,
        copy: &str,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let _changing = self.state.snapshots.changing.lock().await;
        let volume = self.ready_volume(reference)?;
        let all = self.state.snapshots.of_volume(volume.id.0);
        let is_it = |s: &&Arc<SnapshotRecord>| {
            s.made_for == copy
                && s.used_by.is_empty()
                && matches!(s.phase, SnapshotPhase::Wished | SnapshotPhase::Ready)
        };
        if let Some(found) = all.iter().find(is_it) {
            return Ok(found.clone());
        }
        if all.len() >= USER_SNAPSHOTS_MAX {
            return Err(too_many(&volume.spec.name));
        }
        let snapshot =
            SnapshotRecord { made_for: copy.to_owned(), ..wished(&volume, String::new(), "") };
        self.wish(snapshot).await
    }

    /// Records an attempt. The caller holds the lock of changes.
    pub(super) async fn record(
        &self,
        volume: &VolumeRecord,
        name: &str,
        schedule: &str,
        group: Option<Text<GroupId>>,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        let snapshot = SnapshotRecord { group, ..wished(volume, name.to_owned(), schedule) };
        let tables = &self.state.snapshots;
        let named = SnapshotName { snapshot_name: name.to_owned(), snapshot_id: snapshot.id };
        let taken = tables.names.create(named.clone()).await?.is_err();
        if taken {
            // Left by a snapshot that is gone: no listed one has the name.
            let take = |record: &mut SnapshotName| {
                record.clone_from(&named);
                Ok(())
            };
            tables.names.update(name, take).await?;
        }
        self.wish(snapshot).await
    }

    async fn wish(&self, snapshot: SnapshotRecord) -> Result<Arc<SnapshotRecord>, Error> {
        match self.state.snapshots.records.create(snapshot).await? {
            Ok(snapshot) => {
                self.state.tell_target(snapshot.volume.0);
                Ok(snapshot)
            }
            Err(_) => Err(Error::Busy("a snapshot id was drawn twice; try again".to_owned())),
        }
    }

    /// A snapshot that has the name is the one that is asked for, if it is of the same volume.
    fn same(
        &self,
        found: Arc<SnapshotRecord>,
        reference: Option<&VolumeRef>,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        let is_of_it = match self.state.volume(reference) {
            Ok(volume) => volume.id == found.volume,
            Err(Error::NotFound { .. }) => false,
            Err(error) => return Err(error),
        };
        if is_of_it {
            return Ok(found);
        }
        Err(Error::Exists {
            what: "snapshot",
            name: found.name.clone(),
            difference: format!(
                "source: it is of volume {:?}; choose another name, or delete it (`quoin snapshot \
                 delete`)",
                found.volume_name
            ),
        })
    }

    /// Waits until a snapshot is cut, at most so long; returns it as it is then.
    ///
    /// # Errors
    /// The attempt was given up, with its reason.
    pub async fn cut(
        &self,
        snapshot: Arc<SnapshotRecord>,
        within: Duration,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        let id = snapshot.name();
        let mut changes = self.state.changes();
        let waiting = async {
            loop {
                match self.state.snapshots.records.get(&id) {
                    Some(found) if found.phase == SnapshotPhase::Wished => {}
                    Some(found) if found.is_kept() => return Ok(found),
                    Some(found) if !found.failure.is_empty() => {
                        return Err(Error::Exhausted(found.failure.clone()));
                    }
                    _ => {
                        let name = &snapshot.name;
                        let what = format!("snapshot {name:?} was deleted before it was cut");
                        return Err(Error::Aborted(what));
                    }
                }
                if changes.changed().await.is_err() {
                    return Ok(snapshot.clone());
                }
            }
        };
        match tokio::time::timeout(within, waiting).await {
            Ok(ended) => ended,
            Err(_) => Ok(self.state.snapshots.records.get(&id).unwrap_or(snapshot)),
        }
    }

    /// Deletes a snapshot; its name is free at once, its space some time later. One that does not
    /// exist is deleted already.
    pub async fn delete(&self, reference: Option<&SnapshotRef>) -> Result<(), Error> {
        let _changing = self.state.snapshots.changing.lock().await;
        match self.get(reference) {
            Ok(snapshot) => {
                self.refuse_member(&snapshot)?;
                self.remove(&snapshot, "").await
            }
            Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A member of a group is deleted with all the others: alone it would leave a group that is none.
    fn refuse_member(&self, snapshot: &SnapshotRecord) -> Result<(), Error> {
        let group = snapshot.group.and_then(|id| self.state.snapshots.group(id.0));
        match group.filter(|group| group.is_listed()) {
            None => Ok(()),
            Some(group) => {
                let rule = format!(
                    "{:?} belongs to group snapshot {:?}, whose snapshots are deleted together: \
                     `quoin snapshot group delete`",
                    snapshot.name, group.name
                );
                Err(Error::invalid("snapshot", rule))
            }
        }
    }

    /// As [`Self::delete`], for a schedule, whose name the event has.
    pub(crate) async fn delete_by(
        &self,
        snapshot: &SnapshotRecord,
        schedule: &str,
    ) -> Result<(), Error> {
        let _changing = self.state.snapshots.changing.lock().await;
        self.remove(snapshot, schedule).await
    }

    async fn remove(&self, snapshot: &SnapshotRecord, schedule: &str) -> Result<(), Error> {
        self.state.check_term()?;
        if let Some(volume) = crate::volume::clones::being_made(&self.state, snapshot) {
            return Err(Error::Precondition(format!(
                "volume {:?} is being made from snapshot {:?}; delete the snapshot when that is \
                 done, or delete the volume",
                volume.spec.name, snapshot.name
            )));
        }
        let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.remove());
        let Some((snapshot, removed)) =
            self.state.snapshots.records.update(&snapshot.name(), change).await?
        else {
            return Ok(());
        };
        self.state.snapshots.free_name(&snapshot).await?;
        if removed {
            let by = match schedule {
                "" => String::new(),
                schedule => format!(", by schedule {schedule:?}"),
            };
            let message = format!("snapshot {:?}{by}", snapshot.name);
            let object = about(&snapshot);
            self.state.events.record(Severity::Normal, object, "SnapshotDeleted", message);
            self.state.tell_target(snapshot.volume.0);
        }
        Ok(())
    }

    /// Finds the snapshot of a reference: by id or, where the id is empty or unknown, by name.
    pub fn get(&self, reference: Option<&SnapshotRef>) -> Result<Arc<SnapshotRecord>, Error> {
        let needed = || Error::invalid("snapshot", "an id or a name is needed");
        let reference = reference.ok_or_else(needed)?;
        // A snapshot that records which do not rule lack may still exist.
        self.state.check_ruling()?;
        let tables = &self.state.snapshots;
        let by_id = tables.records.get(&reference.id).filter(|snapshot| snapshot.is_listed());
        let found = by_id.or_else(|| tables.named(&reference.name));
        if reference.id.is_empty() && reference.name.is_empty() {
            return Err(needed());
        }
        found.ok_or_else(|| Error::missing("snapshot", shown(reference)))
    }

    /// A page of snapshots in the order of their ids, and the token of the next one. Snapshots that
    /// come and go between two pages leave out none that was there all the time, and list none
    /// twice.
    pub fn list(
        &self,
        volume: Option<&VolumeRef>,
        max_entries: u32,
        starting_token: &str,
        cut_only: bool,
        is_seen: impl Fn(&SnapshotRecord) -> bool,
    ) -> Result<(Vec<Arc<SnapshotRecord>>, String), Error> {
        self.state.check_ruling()?;
        let volume = volume.map(|volume| self.volume_id(volume)).transpose()?;
        let after = starting_token.get(..32).unwrap_or_default();
        if !starting_token.is_empty() && starting_token != self.token_after(after) {
            let rule = "starting token: not one that this cluster gave; list from the start";
            return Err(Error::Aborted(rule.to_owned()));
        }
        let count = match max_entries {
            0 => usize::MAX,
            n => n as usize,
        };
        let is_listed = |s: &SnapshotRecord| {
            s.is_listed() && !(cut_only && s.phase == SnapshotPhase::Wished) && is_seen(s)
        };
        let page = |after: &str, count: usize| match volume {
            // The index is in the order of the ids too.
            Some(Some(volume)) => {
                let all = self.state.snapshots.of_volume(volume).into_iter();
                let rest = all.filter(|s| s.name().as_str() > after && is_listed(s));
                rest.take(count).collect()
            }
            Some(None) => Vec::new(),
            None => self.state.snapshots.records.page_of(after, count, is_listed),
        };
        let listed = page(after, count);
        let last = listed.last().map(|snapshot| snapshot.name()).unwrap_or_default();
        let more = !last.is_empty() && !page(&last, 1).is_empty();
        Ok((listed, if more { self.token_after(&last) } else { String::new() }))
    }

    /// The volume of a filter; `None`: there is none of that name or id, which is no error, as its
    /// snapshots may be listed by the id of a volume that is deleted.
    fn volume_id(&self, reference: &VolumeRef) -> Result<Option<VolumeId>, Error> {
        match self.state.volume(Some(reference)) {
            Ok(volume) => Ok(Some(volume.id.0)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The token of the page after a snapshot, which may be gone when it is used.
    fn token_after(&self, id: &str) -> String {
        let text = format!("snapshots of {} after {id}", self.state.identity.cluster());
        let sum = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
        format!("{id}{}", hex::encode(&sum.as_ref()[..8]))
    }
}

/// An attempt that begins now.
fn wished(volume: &VolumeRecord, name: String, schedule: &str) -> SnapshotRecord {
    SnapshotRecord {
        id: Text(SnapshotId(random_id())),
        name,
        volume: volume.id,
        volume_name: volume.spec.name.clone(),
        phase: SnapshotPhase::Wished,
        wished_ms: now_ms(),
        cut: None,
        schedule: schedule.to_owned(),
        group: None,
        failure: String::new(),
        used_by: Vec::new(),
        made_for: String::new(),
        point: None,
    }
}

pub(crate) fn too_many(volume: &str) -> Error {
    Error::Exhausted(format!(
        "volume {volume:?} has {USER_SNAPSHOTS_MAX} snapshots, the most that a volume can have: \
         delete some (`quoin snapshot list {volume}`, `quoin snapshot delete`), or let a schedule \
         keep fewer (`quoin schedule list`)"
    ))
}

/// # Errors
/// The rule of names that it breaks.
fn check_name(name: &str) -> Result<(), Error> {
    if name.is_empty() {
        return Err(Error::invalid("name", "a snapshot needs one"));
    }
    spec::check_name(name)
}

/// Gives up all attempts that are under way. After a restore of the records nobody knows whether an
/// attempt was made, and deleted, since: wished again it would name another content.
pub(crate) async fn give_up_attempts(state: &State) -> Result<usize, Error> {
    let _changing = state.snapshots.changing.lock().await;
    let mut given_up = 0;
    for attempt in state.snapshots.records.list() {
        // A group that counts has its cuts in its own record.
        let group = attempt.group.and_then(|id| state.snapshots.group(id.0));
        let is_cut = group.is_some_and(|group| group.cut_of(attempt.id.0).is_some());
        if attempt.phase != SnapshotPhase::Wished || is_cut {
            continue;
        }
        let give_up = |snapshot: &mut SnapshotRecord| {
            if snapshot.phase == SnapshotPhase::Wished {
                snapshot.failure = "the records were restored while it was made".to_owned();
                snapshot.remove();
            }
            Ok(())
        };
        if let Some((snapshot, ())) =
            state.snapshots.records.update(&attempt.name(), give_up).await?
        {
            state.snapshots.free_name(&snapshot).await?;
            let message = format!(
                "snapshot {:?}: the records were restored while it was made; make another one",
                snapshot.name
            );
            let object = about(&snapshot);
            state.events.record(Severity::Warning, object, "SnapshotGivenUp", message);
            given_up += 1;
        }
    }
    Ok(given_up)
}
