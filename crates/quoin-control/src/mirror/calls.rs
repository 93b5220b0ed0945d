//! Calls of users: a mirror begins, changes its role, and ends.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, MirrorRef, VolumeGroupRef, VolumeRef, call_mirror_request};
use quoin_cluster::mirror::answers::{Answer, Call, No};
use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{ClusterId, Record as Brain, Role, SILENT_AFTER};
use quoin_cluster::records::{
    MirrorRecord, MirrorSettings, Record, VolumeGroupRecord, VolumePhase, VolumeRecord,
};
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};

use super::driver::Mirrors;
use crate::Error;
use crate::state::events::{Object, Severity};
use crate::state::random_id;
use crate::time::now_ms;

/// Shortest and longest interval of points, in seconds, and that of a mirror that does not say.
const INTERVAL_S: std::ops::RangeInclusive<u64> = 10..=30 * 24 * 3600;
const INTERVAL_DEFAULT_S: u64 = 60;
/// Time in which a call is answered, whatever the peer does.
const ENABLED_WITHIN: Duration = Duration::from_secs(25);
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// Most groups of a cluster.
pub(crate) const GROUPS_MAX: usize = 1000;

/// Object of a mirror.
enum Of {
    Volume(Arc<VolumeRecord>),
    Group(Arc<VolumeGroupRecord>),
}

impl Of {
    fn id(&self) -> GroupId {
        match self {
            Self::Volume(volume) => GroupId(volume.id.0.0),
            Self::Group(group) => group.id.0,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Volume(volume) => &volume.spec.name,
            Self::Group(group) => &group.group_name,
        }
    }

    fn members(&self) -> Vec<VolumeId> {
        match self {
            Self::Volume(volume) => vec![volume.id.0],
            Self::Group(group) => group.members.iter().map(|member| member.0).collect(),
        }
    }
}

pub(super) fn check_interval(interval_s: u64) -> Result<(), Error> {
    match INTERVAL_S.contains(&interval_s) {
        true => Ok(()),
        false => Err(Error::invalid("every", "10 s to 30 days")),
    }
}

impl Mirrors {
    fn group_named(&self, reference: &VolumeGroupRef) -> Result<Arc<VolumeGroupRecord>, Error> {
        super::groups::VolumeGroups::new(self.state.clone()).get(Some(reference))
    }

    fn of(&self, reference: Option<&MirrorRef>) -> Result<Of, Error> {
        let needed = || Error::invalid("of", "name a volume or a group");
        let reference = reference.ok_or_else(needed)?;
        match (&reference.volume, &reference.group, reference.any.as_str()) {
            (Some(volume), None, "") => self.state.volume(Some(volume)).map(Of::Volume),
            (None, Some(group), "") => self.group_named(group).map(Of::Group),
            (None, None, any) if !any.is_empty() => {
                let either = (any.to_owned(), any.to_owned());
                let group = self.group_named(&VolumeGroupRef { id: either.0, name: either.1 });
                let volume =
                    self.state.volume(Some(&VolumeRef { id: any.into(), name: any.into() }));
                match (volume, group) {
                    (Ok(_), Ok(_)) => {
                        let rule =
                            format!("both a volume and a group are called {any:?}: give the id");
                        Err(Error::invalid("of", rule))
                    }
                    (Ok(volume), Err(_)) => Ok(Of::Volume(volume)),
                    (Err(_), Ok(group)) => Ok(Of::Group(group)),
                    (Err(Error::NotFound { .. }), Err(_)) => {
                        let shown = any.chars().take(160).collect::<String>();
                        Err(Error::missing("volume or group", shown))
                    }
                    (Err(error), Err(_)) => Err(error),
                }
            }
            _ => Err(needed()),
        }
    }

    /// The mirror of a volume or a group, and of the group that a volume is in.
    fn mirror(&self, reference: Option<&MirrorRef>) -> Result<Arc<MirrorRecord>, Error> {
        self.state.check_ruling()?;
        let of = self.of(reference)?;
        if let Some(record) = self.state.mirrored.group(of.id()) {
            return Ok(record);
        }
        let why = match &of {
            Of::Volume(volume) => match self.state.mirrored.of(volume) {
                Some(mirror) => format!(
                    "volume {:?} is mirrored with group {:?}: name that",
                    of.name(),
                    mirror.group_name
                ),
                None => format!(
                    "volume {:?} is not mirrored: `quoin mirror enable {0}` begins it",
                    of.name()
                ),
            },
            Of::Group(_) => {
                format!(
                    "group {:?} is not mirrored: `quoin mirror enable {0}` begins it",
                    of.name()
                )
            }
        };
        Err(Error::Precondition(why))
    }

    pub fn get(&self, reference: Option<&MirrorRef>) -> Result<Arc<MirrorRecord>, Error> {
        self.mirror(reference)
    }

    pub fn list(&self) -> Result<Vec<Arc<MirrorRecord>>, Error> {
        self.state.check_ruling()?;
        let mut all = self.state.mirrored.records.list();
        all.sort_by(|one, other| one.group_name.cmp(&other.group_name));
        Ok(all)
    }

    /// Begins a mirror, and waits until the peer recorded its copy.
    ///
    /// # Errors
    /// The parameters are none, or others than before; the peer is away, or makes no copy; a member cannot be
    /// mirrored.
    pub async fn enable(
        &self,
        asked: &api::EnableMirrorRequest,
    ) -> Result<Arc<MirrorRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let of = self.of(asked.of.as_ref())?;
        let settings = settings(asked)?;
        let peer = self.peers.the(&asked.peer).map_err(|error| match error {
            Error::NotFound { .. } => Error::Precondition(format!(
                "{error}: it is not paired (`quoin mirror invite`, `quoin mirror pair`)"
            )),
            error => error,
        })?;
        let cluster: ClusterId = crate::fields::id("peer", &peer.cluster)?;
        let (record, is_new) = self.begin(&of, &peer.cluster, cluster, &settings).await?;
        let ended = self.call(record.id.0, Call::Enable, ENABLED_WITHIN);
        let outcome = tokio::select! {
            outcome = ended => outcome,
            why = self.refusal(record.id.0) => Err(Error::Precondition(format!(
                "{} makes no copy: {why}", peer.name
            ))),
        };
        match outcome {
            Ok((record, Answer::Ok)) => Ok(record),
            Ok((_, Answer::Precondition(why) | Answer::Aborted(why))) => {
                Err(Error::Precondition(format!("{:?}: {why}", of.name())))
            }
            Ok(_) => Err(Error::Busy(format!(
                "{} has not recorded its copy of {:?} yet; it goes on, ask again",
                peer.name,
                of.name()
            ))),
            Err(error) => {
                if is_new {
                    // A refusal leaves nothing behind, and its words count for more than those of the end.
                    let _ = self.call(record.id.0, Call::Disable, Duration::from_secs(2)).await;
                }
                Err(error)
            }
        }
    }

    /// Waits for the peer's reason to make no copy.
    async fn refusal(&self, group: GroupId) -> String {
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let refused = self.look(group, |live, _, _| live.refused.clone()).await;
            if let Ok(Some((_, why))) = refused
                && !why.is_empty()
            {
                return why;
            }
        }
    }

    /// Records a mirror, or finds it. True: it is new.
    async fn begin(
        &self,
        of: &Of,
        peer: &str,
        cluster: ClusterId,
        settings: &MirrorSettings,
    ) -> Result<(Arc<MirrorRecord>, bool), Error> {
        let _one = self.state.mirrored.changing.lock().await;
        let heard = self.peers.heard_at(peer).is_some_and(|at| at.elapsed() < SILENT_AFTER);
        if let Some(found) = self.state.mirrored.group(of.id()) {
            return match found.role() {
                Role::Off if !heard => Err(silent()),
                Role::Off => Err(Error::Busy(format!(
                    "the mirror of {:?} that was ended is not told to its peer yet; try again",
                    of.name()
                ))),
                Role::Orphan => Err(Error::Precondition(format!(
                    "{:?} is a copy without a primary: promote or delete it first",
                    of.name()
                ))),
                _ if found.brain().peer != cluster => {
                    Err(Error::invalid("peer", "it is mirrored to another peer"))
                }
                _ => Ok((self.take_over_settings(found, settings).await?, false)),
            };
        }
        if self.state.mirrored.records.count() >= GROUPS_MAX {
            return Err(Error::Exhausted(format!("{GROUPS_MAX} groups are mirrored")));
        }
        let members = of.members();
        if members.is_empty() {
            return Err(Error::Precondition(format!("group {:?} has no volume", of.name())));
        }
        for member in &members {
            self.check_member(of, *member)?;
        }
        if !heard {
            return Err(silent());
        }
        let own: ClusterId =
            crate::fields::id("cluster", &self.state.identity.cluster().to_string())?;
        let parameters =
            Parameters { interval_s: settings.interval_s, may_take_over: settings.may_take_over };
        let drawn = (random_id(), self.state.term().number);
        let brain = Brain::begun(of.id(), [own, cluster], members, parameters, drawn);
        let name = (of.name().to_owned(), matches!(of, Of::Volume(_)));
        let mut record = MirrorRecord::new(brain, name, settings.clone(), now_ms());
        record.given = Some(settings.clone());
        let made = self.state.mirrored.records.create(record).await?;
        let made = made.map_err(|_| Error::Busy("it is being mirrored; try again".to_owned()))?;
        let about = Object::new("mirror", made.id.0, &made.group_name);
        let message = format!("every {} s", settings.interval_s);
        self.state.events.record(Severity::Normal, about, "MirrorEnabled", message);
        self.look_at(of.id());
        Ok((made, true))
    }

    /// Compares what is asked for with what was asked for first on this side. A copy came with the settings of
    /// the other side, and takes those of this one.
    async fn take_over_settings(
        &self,
        found: Arc<MirrorRecord>,
        settings: &MirrorSettings,
    ) -> Result<Arc<MirrorRecord>, Error> {
        match &found.given {
            Some(given) if given != settings => {
                let rule = "it was enabled with other parameters on this side: disable it first, or \
                            repeat those (`quoin mirror status` shows them)";
                return Err(Error::invalid("parameters", rule));
            }
            Some(_) if found.released.is_empty() => return Ok(found),
            _ => {}
        }
        let change = |record: &mut MirrorRecord| {
            let is_paused = record.settings.is_paused;
            record.given = Some(settings.clone());
            record.settings = MirrorSettings { is_paused, ..settings.clone() };
            record.released.clear();
            let mut brain = record.brain().clone();
            brain.parameters = Parameters {
                interval_s: if is_paused { 0 } else { settings.interval_s },
                may_take_over: settings.may_take_over,
            };
            if brain != *record.brain() {
                let version = record.version;
                record.change(version, brain);
            }
            Ok(())
        };
        let updated = self.state.mirrored.records.update(&found.name(), change).await?;
        let (record, ()) = updated.ok_or_else(|| Error::missing("mirror", &found.group_name))?;
        self.look_at(record.id.0);
        Ok(record)
    }

    fn check_member(&self, of: &Of, member: VolumeId) -> Result<(), Error> {
        let volume = self.state.volumes.get(&member.to_string());
        let volume = volume.ok_or_else(|| Error::missing("volume", member.to_string()))?;
        let name = &volume.spec.name;
        if volume.phase != VolumePhase::Ready {
            return Err(Error::Busy(format!("volume {name:?} is not ready; try again")));
        }
        super::rules::check_mirrored(&volume)?;
        if volume.mirror.is_some() {
            return Err(Error::Precondition(format!(
                "volume {name:?} is mirrored already, by itself or with another group"
            )));
        }
        if let Of::Volume(_) = of {
            let groups = self.state.mirrored.groups.indexed(|index| index.of_volume(member));
            if let Some(group) = groups.first() {
                return Err(Error::Precondition(format!(
                    "volume {name:?} is in group {:?}: mirror that, or take it out first",
                    group.group_name
                )));
            }
        }
        Ok(())
    }

    /// Changes the role of this side, pauses, or ends the mirror. Returns whether a copy is ready.
    ///
    /// # Errors
    /// Refusal of the brain; [`Error::Busy`] where the change goes on, and the call is to be made again.
    pub async fn change(
        &self,
        asked: &api::CallMirrorRequest,
    ) -> Result<(Arc<MirrorRecord>, bool), Error> {
        use call_mirror_request::Call as Asked;
        let record = self.mirror(asked.of.as_ref())?;
        let force = asked.force;
        let call = match asked.call() {
            Asked::Promote if asked.accept_diverged => Call::AcceptDiverged,
            Asked::Promote if !asked.at_point.is_empty() => {
                Call::PromoteAt(crate::fields::id::<PointId>("at", &asked.at_point)?)
            }
            Asked::Promote => Call::Promote { force },
            Asked::Demote => Call::Demote { force },
            Asked::Resync => Call::Resync { force },
            Asked::Disable => Call::Disable,
            Asked::Pause => return self.pause(&record, true).await.map(|record| (record, false)),
            Asked::Resume => return self.pause(&record, false).await.map(|record| (record, false)),
            Asked::Unspecified => return Err(Error::invalid("call", "it is missing")),
        };
        let is_promotion =
            matches!(call, Call::Promote { .. } | Call::PromoteAt(_) | Call::AcceptDiverged);
        // A call that the brain answers OK once the role is there is asked with Promote then.
        let (record, answer) = self.until_there(&record, call, is_promotion).await?;
        let name = &record.group_name;
        match answer {
            Answer::Ok if is_promotion && !record.released.is_empty() => {
                self.take_back(&record).await.map(|record| (record, false))
            }
            Answer::Ok => Ok((record, false)),
            Answer::Ready(ready) => Ok((record, ready)),
            Answer::Precondition(why) => Err(Error::Precondition(self.words(name, why))),
            Answer::Aborted(No::PeerPrimary) if record.brain().asks_step_down => {
                Err(Error::Aborted(format!(
                    "{name:?}: the other cluster is asked to step down; it goes on, and this side is \
                     promoted once everything is here: ask again"
                )))
            }
            Answer::Aborted(why) => Err(Error::Aborted(self.words(name, why))),
            Answer::NotYet => Err(Error::Busy(format!(
                "{name:?}: {}; it goes on, ask again",
                self.waits_for(&record).await
            ))),
        }
    }

    /// Copies that an orchestrator deleted are its again once they are promoted.
    async fn take_back(&self, record: &MirrorRecord) -> Result<Arc<MirrorRecord>, Error> {
        let change = |record: &mut MirrorRecord| {
            record.released.clear();
            Ok(())
        };
        let updated = self.state.mirrored.records.update(&record.name(), change).await?;
        Ok(updated.map_or_else(|| Arc::new(record.clone()), |(record, ())| record))
    }

    async fn until_there(
        &self,
        record: &MirrorRecord,
        call: Call,
        is_promotion: bool,
    ) -> Result<(Arc<MirrorRecord>, Answer), Error> {
        let group = record.id.0;
        let first = self.call(group, call, Duration::ZERO).await?;
        if first.1 != Answer::NotYet {
            return Ok(first);
        }
        let rest = match call {
            Call::PromoteAt(_) | Call::AcceptDiverged if is_promotion => {
                Call::Promote { force: false }
            }
            call => call,
        };
        match self.call(group, rest, ANSWERED_WITHIN).await {
            // Its record is removed with the end of it.
            Err(Error::NotFound { .. }) if matches!(call, Call::Disable | Call::Promote { .. }) => {
                Ok((Arc::new(record.clone()), Answer::Ok))
            }
            other => other,
        }
    }

    fn words(&self, name: &str, why: No) -> String {
        let way_out = match why {
            No::Silent => {
                " (`quoin mirror promote --force`; `quoin mirror status` says what it loses)"
            }
            No::PeerStepsDownOnlyByForce => " (`quoin mirror promote --force`)",
            No::PeerPrimary => " (`quoin mirror demote` there)",
            No::Diverged => {
                " (`quoin mirror resync --force`, or `quoin mirror promote --accept-diverged` where this \
                 side is the truth)"
            }
            No::Published => " (`quoin volume detach`; with --force it is taken from its node)",
            No::IsPrimary => " (`quoin mirror demote` first)",
            _ => "",
        };
        format!("{name:?}: {why}{way_out}")
    }

    async fn pause(
        &self,
        record: &MirrorRecord,
        is_paused: bool,
    ) -> Result<Arc<MirrorRecord>, Error> {
        if !record.role().is_primary() {
            return Err(Error::Precondition(format!(
                "{:?} is not primary here: points are cut on the other side",
                record.group_name
            )));
        }
        let change = |found: &mut MirrorRecord| {
            found.settings.is_paused = is_paused;
            let mut brain = found.brain().clone();
            brain.parameters.interval_s = if is_paused { 0 } else { found.settings.interval_s };
            let version = found.version;
            found.change(version, brain);
            Ok(())
        };
        let updated = self.state.mirrored.records.update(&record.name(), change).await?;
        let (record, ()) = updated.ok_or_else(|| Error::missing("mirror", &record.group_name))?;
        self.look_at(record.id.0);
        Ok(record)
    }
}

fn silent() -> Error {
    Error::Precondition(
        "no mirror of the peer was heard within 30 s, so nobody makes a copy there: `quoin mirror peers` \
         says why"
            .to_owned(),
    )
}

fn settings(asked: &api::EnableMirrorRequest) -> Result<MirrorSettings, Error> {
    let interval_s = if asked.interval_s == 0 { INTERVAL_DEFAULT_S } else { asked.interval_s };
    check_interval(interval_s)?;
    let compresses = match asked.compression.as_str() {
        "" | "zstd" => true,
        "none" => false,
        _ => return Err(Error::invalid("compression", "zstd or none")),
    };
    if asked.bandwidth_limit != 0 && asked.bandwidth_limit < 64 << 10 {
        return Err(Error::invalid("bandwidthLimit", "64 KiB in a second at least, or 0"));
    }
    Ok(MirrorSettings {
        interval_s,
        may_take_over: asked.may_take_over,
        compresses,
        bandwidth_limit: asked.bandwidth_limit,
        is_paused: false,
    })
}
