//! Copies: the volumes that a peer's group has on this side, made as the peer's controller tells of them.
//!
//! A primary introduces its members and its group again and again until the peer says that it recorded them.
//! A copy has the id of its source, and its name as far as that is free.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{GroupIntroduction, Topology, VolumeIntroduction, VolumeSpec, peer_word};
use quoin_cluster::mirror::record::Parameters;
use quoin_cluster::mirror::{Keepsake, Member, Record as Brain, Role};
use quoin_cluster::ownership::mirrored;
use quoin_cluster::records::{
    MirrorRecord, MirrorSettings, PeerRecord, Record, Text, VolumeGroupRecord, VolumePhase,
    VolumeRecord,
};
use quoin_encryption::Encryption;
use quoin_types::VolumeId;
use quoin_types::ids::GroupId;
use tokio::time::Instant;

use super::driver::{Live, Mirrors};
use crate::Error;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;
use crate::volume::topology;

/// Between two introductions of copies that are not there yet, and of those that are: key slots travel.
const AGAIN: Duration = Duration::from_secs(1);
const NOW_AND_THEN: Duration = Duration::from_secs(30);

impl Mirrors {
    /// Tells the peer of the group and its members, until it has them.
    pub(super) fn introduce(&self, live: &mut Live, record: &MirrorRecord) {
        let brain = record.brain();
        let known = |volume: VolumeId| {
            let word = live.brain.heard();
            word.is_some_and(|word| word.members.iter().any(|member| member.volume == volume))
        };
        let is_known = brain.is_paired && brain.members.iter().all(|member| known(member.volume));
        let pause = if is_known { NOW_AND_THEN } else { AGAIN };
        let slots = brain.members.iter().map(|member| {
            let volume = self.state.volumes.get(&member.volume.to_string());
            volume.and_then(|volume| volume.spec.encryption.clone())
        });
        let slots: Vec<_> = slots.collect();
        let is_told = |(at, told): &(Instant, Vec<_>)| at.elapsed() < pause && *told == slots;
        if live.introduced.as_ref().is_some_and(is_told) {
            return;
        }
        live.introduced = Some((Instant::now(), slots));
        if is_known {
            live.refused.clear();
        }
        let (peer, group) = (brain.peer.to_string(), record.id.0);
        let introduction = GroupIntroduction {
            name: record.group_name.clone(),
            is_volume: record.is_volume,
            record: brain.encode(),
            interval_s: record.settings.interval_s,
            may_take_over: record.settings.may_take_over,
            compresses: record.settings.compresses,
            bandwidth_limit: record.settings.bandwidth_limit,
        };
        // Before the volumes too: a group that is there names a member that joins before its copy is made, which
        // would else count as one that left.
        self.say(peer.clone(), group, peer_word::What::Group(introduction.clone()));
        for member in &brain.members {
            let Some(volume) = self.state.volumes.get(&member.volume.to_string()) else { continue };
            let introduction = VolumeIntroduction {
                volume_id: member.volume.to_string(),
                // Places are of this cluster alone.
                spec: Some(VolumeSpec {
                    accessible_topology: Vec::new(),
                    ..VolumeSpec::from(&volume.spec)
                }),
                size_bytes: volume.size_bytes,
                record: brain.encode(),
                used_in: topologies(&volume),
            };
            self.say(peer.clone(), group, peer_word::What::Volume(introduction));
        }
        self.say(peer, group, peer_word::What::Group(introduction));
    }

    /// Records which members the other side has, so that it is known while that side is away.
    pub(super) async fn confirm(&self, live: &Live, record: &MirrorRecord) -> Result<(), Error> {
        let brain = record.brain();
        let Some(word) = live.brain.heard().filter(|_| brain.is_paired) else { return Ok(()) };
        let is_told = |volume| word.members.iter().any(|member| member.volume == volume);
        let is_new = |member: &&Member| !record.is_confirmed(member) && is_told(member.volume);
        let is_left = |volume: &Text<VolumeId>| !brain.members.iter().any(|m| m.volume == volume.0);
        if !brain.members.iter().any(|member| is_new(&member))
            && !record.confirmed.iter().any(is_left)
        {
            return Ok(());
        }
        let change = |record: &mut MirrorRecord| {
            record.confirmed.retain(|volume| !is_left(volume));
            let new = brain.members.iter().filter(|member| is_told(member.volume));
            for member in new.map(|member| Text(member.volume)) {
                if !record.confirmed.contains(&member) {
                    record.confirmed.push(member);
                }
            }
            Ok(())
        };
        self.state.mirrored.records.update(&record.name(), change).await.map(drop)
    }

    fn refuse(&self, peer: &PeerRecord, group: GroupId, why: &str) {
        tracing::info!(peer = peer.name, %group, why, "a copy is refused");
        let why = why.chars().take(400).collect();
        self.say(peer.cluster.clone(), group, peer_word::What::Refused(why));
    }

    /// A peer tells of a volume that this side is to have a copy of.
    pub(super) async fn copy_volume(
        &self,
        peer: &Arc<PeerRecord>,
        group: GroupId,
        said: VolumeIntroduction,
    ) {
        match self.make_copy(peer, group, said).await {
            Ok(()) => {}
            // The peer tells it again.
            Err(Error::Busy(why)) => tracing::debug!(why, "a copy is not made yet"),
            Err(error) => self.refuse(peer, group, &error.to_string()),
        }
    }

    async fn make_copy(
        &self,
        peer: &PeerRecord,
        group: GroupId,
        said: VolumeIntroduction,
    ) -> Result<(), Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let id: VolumeId = crate::fields::id("volume_id", &said.volume_id)?;
        let theirs = of_peer(peer, group, &said.record)?;
        let spec = said.spec.unwrap_or_default();
        if let Some(found) = self.state.volumes.get(&id.to_string()) {
            let is_of_group = found.mirror.as_ref().is_some_and(|m| m.group.0 == group);
            return match is_of_group {
                true => self.take_slots(peer, &found, &spec).await,
                false => Err(Error::Precondition(format!(
                    "volume {:?} there has the id {id} already: delete it, or the orphan that it is",
                    found.spec.name
                ))),
            };
        }
        self.check_used_in(&said.used_in)?;
        let (copies, bytes) = self.state.mirrored.copies_of(&self.state, &peer.cluster);
        check_quota(peer, (copies, bytes), said.size_bytes)?;
        let keepsake = Keepsake { is_primary: false, begun: theirs.chain.top() };
        let made = |volume: &mut VolumeRecord| mirrored::keep(volume, group, keepsake);
        let spec = VolumeSpec { size_bytes: said.size_bytes, ..spec };
        let volume = self.catalog.create_copy(id, spec, made).await?;
        let message = format!("a copy of what {} has", peer.name);
        let about = crate::state::about(&volume);
        self.state.events.record(Severity::Normal, about, "CopyMade", message);
        Ok(())
    }

    /// # Errors
    /// No node of this cluster is where users of the volume are bound to.
    fn check_used_in(&self, used_in: &[Topology]) -> Result<(), Error> {
        let wanted = topology::read("usedIn", used_in)?;
        let nodes = self.state.nodes.list();
        let is_there = nodes.iter().any(|node| topology::accessible(&wanted, &node.topology));
        if is_there || wanted.is_empty() {
            return Ok(());
        }
        let named = |one: &topology::Segments| {
            let all: Vec<String> =
                one.iter().map(|(key, value)| format!("{key}={value}")).collect();
            all.join(",")
        };
        let named: Vec<String> = wanted.iter().map(named).collect();
        Err(Error::Precondition(format!(
            "users of the volume are bound to {}, and no node there is in it: give a node there these \
             segments (`quoin node run --topology`)",
            named.join(" or ")
        )))
    }

    /// The key slots of a copy are those of its source: a rotation there counts here.
    async fn take_slots(
        &self,
        peer: &PeerRecord,
        volume: &VolumeRecord,
        spec: &VolumeSpec,
    ) -> Result<(), Error> {
        let is_copy = self.state.mirrored.of(volume).is_some_and(|mirror| {
            mirror.role() == Role::Secondary && mirror.brain().peer.to_string() == peer.cluster
        });
        let given = spec.encryption.as_ref().map(Encryption::try_from).transpose();
        let given = given.map_err(|rule| Error::invalid("encryption", rule.to_string()))?;
        let (Some(given), Some(has)) = (given, &volume.spec.encryption) else { return Ok(()) };
        if !is_copy || *has == given || !has.is_of_same_key(&given) {
            return Ok(());
        }
        let change = |volume: &mut VolumeRecord| {
            volume.spec.encryption = Some(given.clone());
            Ok(())
        };
        self.state.update_volume(volume.id.0, change).await.map(drop)
    }

    /// A peer tells of a group that it mirrors to this side.
    pub(super) async fn copy_group(
        &self,
        peer: &Arc<PeerRecord>,
        group: GroupId,
        said: GroupIntroduction,
    ) {
        match self.make_group(peer, group, said).await {
            Ok(()) => {}
            Err(Error::Busy(why)) => tracing::debug!(why, "a group is not recorded yet"),
            Err(error) => self.refuse(peer, group, &error.to_string()),
        }
    }

    async fn make_group(
        &self,
        peer: &PeerRecord,
        group: GroupId,
        said: GroupIntroduction,
    ) -> Result<(), Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let theirs = of_peer(peer, group, &said.record)?;
        let _one = self.state.mirrored.changing.lock().await;
        if self.state.joined.peers.get(&peer.cluster).is_none() {
            return Err(Error::Busy("it is no peer any more".to_owned()));
        }
        if let Some(known) = self.state.mirrored.group(group) {
            if known.brain().peer != theirs.cluster {
                let why = format!("{:?} is mirrored with another cluster", known.group_name);
                return Err(Error::Precondition(why));
            }
            if known.role() == Role::Secondary && known.brain().is_another(&theirs) {
                self.end_copy(&known).await?;
            }
            return match known.role() {
                Role::Off | Role::Orphan => Err(Error::Precondition(format!(
                    "{:?} is there already, a copy of a mirror that was ended: promote or delete it",
                    known.group_name
                ))),
                _ => self.join(&known, &theirs, said).await,
            };
        }
        for member in &theirs.members {
            let volume = self.state.volumes.get(&member.volume.to_string());
            let is_ready = volume.is_some_and(|volume| {
                volume.phase == VolumePhase::Ready
                    && volume.mirror.as_ref().is_some_and(|m| m.group.0 == group)
            });
            if !is_ready {
                return Err(Error::Busy(format!("volume {} is not ready yet", member.volume)));
            }
        }
        if self.state.mirrored.records.count() >= super::calls::GROUPS_MAX {
            return Err(Error::Exhausted(
                "the cluster has as many mirrored groups as it may".into(),
            ));
        }
        crate::volume::spec::check_name(&said.name)?;
        let settings = settings(&said)?;
        let members = theirs.members.iter().map(|member| member.volume).collect();
        let parameters =
            Parameters { interval_s: settings.interval_s, may_take_over: settings.may_take_over };
        let clusters = [theirs.peer, theirs.cluster];
        let mut brain = Brain::secondary(group, clusters, members, theirs.chain, parameters);
        brain.term = self.state.term().number;
        if !said.is_volume {
            self.record_group(group, &said.name, &brain).await?;
        }
        let name = (said.name, said.is_volume);
        let record = MirrorRecord::new(brain, name, settings, now_ms());
        if let Ok(made) = self.state.mirrored.records.create(record).await? {
            let message = format!("{} mirrors it to this cluster", peer.name);
            let about = Object::new("mirror", made.id.0, &made.group_name);
            self.state.events.record(Severity::Normal, about, "MirrorMade", message);
        }
        self.look_at(group);
        Ok(())
    }

    /// Makes an orphan of a copy whose peer ended the mirror in silence, and begins another one.
    async fn end_copy(&self, known: &MirrorRecord) -> Result<(), Error> {
        let change = |found: &mut MirrorRecord| {
            let mut brain = found.brain().clone();
            if brain.role == Role::Secondary {
                (brain.role, brain.receiving) = (Role::Orphan, None);
                let version = found.version;
                found.change(version, brain);
            }
            Ok(())
        };
        self.state.mirrored.records.update(&known.name(), change).await?;
        self.look_at(known.id.0);
        Err(Error::Precondition(format!(
            "{:?} is there already, a copy of a mirror that was ended: promote or delete it",
            known.group_name
        )))
    }

    /// The group of the same name here, which has the copies.
    async fn record_group(&self, id: GroupId, name: &str, brain: &Brain) -> Result<(), Error> {
        let members = brain.members.iter().map(|member| Text(member.volume)).collect();
        let group = VolumeGroupRecord::new(id, self.free_name(id, name), members, now_ms());
        // It may be there: a crash came between.
        self.state.mirrored.groups.create(group).await.map(drop)
    }

    /// The name that the peer's group has, or one like it where that one is taken here.
    fn free_name(&self, id: GroupId, name: &str) -> String {
        let taken = self.state.mirrored.groups.indexed(|index| index.named(name));
        match taken.iter().any(|group| group.id.0 != id) {
            true => format!("{name}-{}", &id.to_string()[..8]),
            false => name.to_owned(),
        }
    }

    /// Members that joined, and settings that were changed there. A name that a recovery gave goes: the pools keep none.
    async fn join(
        &self,
        known: &MirrorRecord,
        theirs: &Brain,
        said: GroupIntroduction,
    ) -> Result<(), Error> {
        if known.is_volume || known.role() != Role::Secondary || known.brain().is_own() {
            return Ok(());
        }
        let settings = settings(&said)?;
        let members: Vec<Text<VolumeId>> =
            theirs.members.iter().map(|member| Text(member.volume)).collect();
        crate::volume::spec::check_name(&said.name)?;
        // A name that an orchestrator of this side gave stays.
        let is_nameless = |group: &VolumeGroupRecord| {
            group.claim.is_none() && group.group_name == super::recovery::name_of(known.id.0)
        };
        let group = self.state.mirrored.groups.get(&known.name());
        let name = group.filter(|group| is_nameless(group));
        let name = name.map(|_| self.free_name(known.id.0, &said.name));
        let change = |group: &mut VolumeGroupRecord| {
            group.members.clone_from(&members);
            group.group_name = name.clone().unwrap_or_else(|| group.group_name.clone());
            Ok(())
        };
        self.state.mirrored.groups.update(&known.name(), change).await?;
        let change = |record: &mut MirrorRecord| {
            record.group_name = name.clone().unwrap_or_else(|| record.group_name.clone());
            // Settings that were asked for here count more.
            if record.given.is_none() {
                record.settings =
                    MirrorSettings { is_paused: record.settings.is_paused, ..settings.clone() };
            }
            Ok(())
        };
        self.state.mirrored.records.update(&known.name(), change).await.map(drop)
    }
}

/// # Errors
/// One more copy of this size would be more than the peer may have. The words are read on the other side.
fn check_quota(
    peer: &PeerRecord,
    (copies, bytes): (u64, u64),
    size_bytes: u64,
) -> Result<(), Error> {
    let (limits, name) = (&peer.limits, crate::text::quoted(&peer.name));
    let orphans = "or delete orphans there";
    if copies >= limits.copies_max() {
        return Err(Error::Exhausted(format!(
            "the quota of this cluster's copies there is used up: it has {copies} of {} copies; raise it \
             there (`quoin mirror quota {name} --copies {}`), {orphans}",
            limits.copies_max(),
            copies + 1
        )));
    }
    let needed = bytes.saturating_add(size_bytes);
    if needed > limits.bytes_max() {
        return Err(Error::Exhausted(format!(
            "the quota of this cluster's copies there is used up: with this one they have {needed} of {} \
             bytes; raise it there (`quoin mirror quota {name} --bytes {needed}`), {orphans}",
            limits.bytes_max()
        )));
    }
    Ok(())
}

/// Topologies that users of a volume are bound to, without those of single nodes: any node reaches any replica.
fn topologies(volume: &VolumeRecord) -> Vec<Topology> {
    let all = volume.spec.accessible_topology.iter().map(topology::without_node);
    let all: Vec<_> = all.collect();
    if all.iter().any(|segments| segments.is_empty()) {
        return Vec::new();
    }
    all.into_iter().map(|segments| Topology { segments: segments.into_iter().collect() }).collect()
}

fn settings(said: &GroupIntroduction) -> Result<MirrorSettings, Error> {
    super::calls::check_interval(said.interval_s)?;
    Ok(MirrorSettings {
        interval_s: said.interval_s,
        may_take_over: said.may_take_over,
        compresses: said.compresses,
        bandwidth_limit: said.bandwidth_limit,
        is_paused: false,
    })
}

/// The record of a peer's brain.
///
/// # Errors
/// It is of another group, or another cluster's.
fn of_peer(peer: &PeerRecord, group: GroupId, bytes: &[u8]) -> Result<Brain, Error> {
    let wrong = || Error::invalid("record", "it is not that of a group of the peer");
    let brain = Brain::decode(bytes).map_err(|_| wrong())?;
    let is_it = brain.group == group && brain.cluster.to_string() == peer.cluster;
    (is_it && brain.role == Role::Primary).then_some(brain).ok_or_else(wrong)
}
