//! Orders of a brain, carried out by the records: what follows is the work of targets and of other parts.

use std::sync::Arc;

use quoin_api::control::{FeedOrder, MirrorSend};
use quoin_cluster::mirror::{Event, Keepsake, Order, Role, Stamp, Transfer};
use quoin_cluster::ownership::mirrored::{self, snapshot_of};
use quoin_cluster::records::{
    Cut, MirrorRecord, Record, RevertRecord, SnapshotName, SnapshotPhase, SnapshotRecord, Text,
    VolumeRecord,
};
use quoin_replication::group_point::PointVerdict;
use quoin_types::ids::{GroupId, PointId, SnapshotId};
use quoin_types::{BLOCK_SIZE, VolumeId};
use tokio::time::Instant;

use super::driver::{Live, Mirrors};
use super::observe;
use super::{LOST, leaving};
use crate::Error;
use crate::snapshot::reverts;
use crate::state::events::{Object, Severity};
use crate::state::{about, random_id};
use crate::time::now_ms;
use crate::volume::volumes;

/// Hold of a point over several members: their clients wait so long at most.
const HOLD_MS: u32 = 1000;

impl Mirrors {
    /// Takes down that a fence of the volume is over, where a target has opened it since.
    pub(super) async fn fenced(
        &self,
        volume: Arc<VolumeRecord>,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let waits = volume.mirror.as_ref().is_some_and(|m| m.fence.0.0 != 0 && !m.is_fenced);
        let Some(epoch) = observe::serving_epoch(&self.state, &volume).filter(|_| waits) else {
            return Ok(volume);
        };
        let change = |volume: &mut VolumeRecord| {
            mirrored::is_opened(volume, epoch);
            Ok(())
        };
        Ok(self.state.update_volume(volume.id.0, change).await?.0)
    }

    /// Carries out one order. All of them may come again.
    pub(super) async fn obey(
        &self,
        group: GroupId,
        id: VolumeId,
        stamp: Stamp,
        order: Order,
    ) -> Result<(), Error> {
        let missing = || Error::missing("volume", id.to_string());
        let volume = self.state.volumes.get(&id.to_string()).ok_or_else(missing)?;
        match order {
            Order::Fence(number) => self.fence(&volume, number).await,
            Order::Keep { is_primary, begun } => {
                let keepsake = Keepsake { is_primary, begun };
                let change = |volume: &mut VolumeRecord| {
                    mirrored::keep(volume, group, keepsake);
                    Ok(())
                };
                self.state.update_volume(id, change).await.map(drop)
            }
            Order::Cut(point) => self.cut(&volume, point, None).await,
            Order::Drop(point) => {
                leaving::drop_point(&self.state, id, snapshot_of(point, id)).await
            }
            Order::Revert(point) => self.revert(&volume, point).await,
            Order::Receive { transfer, token, from } => {
                self.order_feed(
                    id,
                    FeedOrder {
                        point_id: transfer.point.to_string(),
                        base_id: transfer.base.map(|base| base.to_string()).unwrap_or_default(),
                        token: PointId(token).to_string(),
                        from_block: from,
                        term: stamp.term,
                        version: stamp.version,
                    },
                );
                Ok(())
            }
            Order::Stop => {
                self.end_feed(id, stamp);
                Ok(())
            }
            Order::Grow(blocks) => {
                let room = volumes::candidates(&self.state);
                let size_bytes = blocks.saturating_mul(BLOCK_SIZE as u64);
                let change = |volume: &mut VolumeRecord| volumes::grow(volume, size_bytes, &room);
                self.state.update_volume(id, change).await.map(drop)
            }
            Order::KeepLost(point) => self.keep_lost(&volume, point).await,
        }
    }

    fn order_feed(&self, volume: VolumeId, order: FeedOrder) {
        if self.state.mirrored.order_feed(volume, order) {
            self.state.tell_target(volume);
            self.tell_mirrors();
        }
    }

    fn end_feed(&self, volume: VolumeId, stamp: Stamp) {
        let Stamp { term, version } = stamp;
        self.order_feed(volume, FeedOrder { term, version, ..FeedOrder::default() });
    }

    async fn fence(&self, volume: &VolumeRecord, number: u128) -> Result<(), Error> {
        let term = self.state.term();
        let change = |volume: &mut VolumeRecord| Ok(mirrored::fence_for(volume, number, term)?);
        let (volume, nodes) = self.state.update_volume(volume.id.0, change).await?;
        if !nodes.is_empty() {
            let message = format!("from {}: its mirror changes its role", nodes.join(", "));
            self.state.events.record(Severity::Warning, about(&volume), "VolumeDetached", message);
        }
        // It needs a target at once.
        self.state.tell_target(volume.id.0);
        Ok(())
    }

    /// Records that a volume is to have a point, unless it has.
    async fn cut(
        &self,
        volume: &VolumeRecord,
        point: PointId,
        group: Option<GroupId>,
    ) -> Result<(), Error> {
        let id = snapshot_of(point, volume.id.0);
        let snapshot = SnapshotRecord {
            id: Text(id),
            // In no list, and in no table of names.
            name: format!("point-{point}"),
            point: Some(Text(point)),
            group: group.map(Text),
            ..wished(volume)
        };
        if self.state.snapshots.records.create(snapshot).await?.is_ok() {
            self.state.tell_target(volume.id.0);
        }
        Ok(())
    }

    async fn revert(&self, volume: &VolumeRecord, point: PointId) -> Result<(), Error> {
        let id = snapshot_of(point, volume.id.0);
        if let Some(last) = self.state.snapshots.reverts.get(&volume.id.0.to_string())
            && last.is_under_way()
        {
            return Ok(());
        }
        let gone = || Error::Busy(format!("point {point} is not there yet"));
        let snapshot = self.state.snapshots.records.get(&id.to_string()).ok_or_else(gone)?;
        let attempt = SnapshotId(random_id());
        reverts::wish_by_mirror(&self.state, RevertRecord::wished(&snapshot, attempt, now_ms()))
            .await
    }

    /// Keeps the live view in a snapshot that is the user's from here on.
    async fn keep_lost(&self, volume: &VolumeRecord, lost: PointId) -> Result<(), Error> {
        let id = snapshot_of(lost, volume.id.0);
        if self.state.snapshots.records.get(&id.to_string()).is_some() {
            return Ok(());
        }
        let number = volume.mirror.as_ref().map_or(0, |mirror| mirror.number);
        let name = format!("{LOST}{number}-{}-{}", now_ms() / 1000, &volume.id.0.to_string()[..8]);
        let named = SnapshotName { snapshot_name: name.clone(), snapshot_id: Text(id) };
        let _ = self.state.snapshots.names.create(named).await?;
        let snapshot = SnapshotRecord { id: Text(id), name, ..wished(volume) };
        if self.state.snapshots.records.create(snapshot).await?.is_ok() {
            self.state.tell_target(volume.id.0);
        }
        Ok(())
    }

    /// Begins to cut a point over all members while their clients go on.
    pub(super) async fn make_point(
        &self,
        live: &mut Live,
        group: GroupId,
        point: PointId,
        members: &[VolumeId],
    ) -> Result<(), Error> {
        // The verdict may have come after the brain said it.
        if !live.brain.is_cutting(point) {
            return Ok(());
        }
        let attempt = (members.len() > 1).then_some(GroupId(point.0));
        for member in members {
            let volume = self.state.volumes.get(&member.to_string());
            let volume = volume.ok_or_else(|| Error::missing("volume", member.to_string()))?;
            self.cut(&volume, point, attempt).await?;
        }
        live.cutting = Some(point);
        let Some(attempt) = attempt.filter(|attempt| !self.points.is_running(*attempt)) else {
            return Ok(());
        };
        let is_served = |member: &VolumeId| {
            let volume = self.state.volumes.get(&member.to_string());
            volume.is_some_and(|volume| {
                let node = volume.opened.owner.as_deref();
                observe::serving_epoch(&self.state, &volume).is_some()
                    && node.is_some_and(|node| self.points.is_followed_by(node))
            })
        };
        if members.iter().all(is_served) {
            let of = members.iter().map(|member| (*member, snapshot_of(point, *member))).collect();
            if self.points.begin(Instant::now(), attempt, point, HOLD_MS, of) {
                tracing::debug!(%group, %point, "a point is cut");
                members.iter().for_each(|member| self.state.tell_target(*member));
            }
        }
        Ok(())
    }

    /// Nobody asks for the verdict on the point that is being cut any more.
    pub(super) fn leave_cut(&self, live: &mut Live) {
        if let Some(point) = live.cutting.take() {
            self.points.leave(Instant::now(), GroupId(point.0));
        }
    }

    /// The verdict on the point that is being cut, once there is one.
    pub(super) async fn verdict(
        &self,
        live: &mut Live,
        record: &MirrorRecord,
    ) -> Result<Option<Event>, Error> {
        let Some(point) = live.cutting else { return Ok(None) };
        let brain = record.brain();
        if !live.brain.is_cutting(point) {
            // The brain has gone on: its verdict counts no more, and the point may be made.
            self.leave_cut(live);
            return Ok(None);
        }
        let members: Vec<VolumeId> = brain.members.iter().map(|member| member.volume).collect();
        let cuts =
            |points: &mut dyn Iterator<Item = Option<Cut>>| points.collect::<Option<Vec<Cut>>>();
        let attempt = GroupId(point.0);
        if let Some(ended) = self.points.ended(Instant::now(), attempt) {
            let event = match &ended.verdict {
                PointVerdict::Made(made) => {
                    for cut in made {
                        let size_bytes = ended.sizes.get(&cut.snapshot).copied().unwrap_or(0);
                        let cut_of = Cut {
                            lsn: cut.lsn.0,
                            epoch: cut.epoch.0,
                            chain: cut.chain,
                            at_ms: ended.cut_ms,
                            size_bytes,
                        };
                        let id = cut.snapshot.to_string();
                        let change = |snapshot: &mut SnapshotRecord| Ok(snapshot.made(cut_of));
                        self.state.snapshots.records.update(&id, change).await?;
                    }
                    Event::PointMade { point, cut_ms: ended.cut_ms }
                }
                PointVerdict::Broken(why) => {
                    tracing::info!(group = record.group_name, %why, "a point is not one, cut again");
                    for member in &members {
                        leaving::drop_point(&self.state, *member, snapshot_of(point, *member))
                            .await?;
                    }
                    Event::PointBroken { point }
                }
            };
            self.points.forget(attempt);
            live.cutting = None;
            return Ok(Some(event));
        }
        if members.len() > 1 || self.points.is_running(attempt) {
            members.iter().for_each(|member| self.state.tell_target(*member));
            return Ok(None);
        }
        let mut held = members.iter().map(|member| {
            let held = observe::points(&self.state, *member);
            held.into_iter().find(|(held, _)| *held == point).map(|(_, cut)| cut)
        });
        Ok(cuts(&mut held).map(|cuts| {
            live.cutting = None;
            let cut_ms = cuts.iter().map(|cut| cut.at_ms).min().unwrap_or_default();
            Event::PointMade { point, cut_ms }
        }))
    }

    /// Snapshots of a primary that a recovery found, and that the peer holds as points, are points.
    pub(super) async fn adopt_points(
        &self,
        record: &MirrorRecord,
        held: &[PointId],
    ) -> Result<(), Error> {
        for member in &record.brain().members {
            for point in held {
                let id = snapshot_of(*point, member.volume).to_string();
                let found = self.state.snapshots.records.get(&id);
                let Some(found) = found.filter(|s| s.point.is_none() && s.is_kept()) else {
                    continue;
                };
                self.state.snapshots.free_name(&found).await?;
                let change = |snapshot: &mut SnapshotRecord| {
                    snapshot.point = Some(Text(*point));
                    Ok(())
                };
                self.state.snapshots.records.update(&id, change).await?;
            }
        }
        Ok(())
    }

    /// Has a volume's slots sent by the mirror beside its target. `ordered`: the base that the peer's order
    /// names, also for a member that is sent whole.
    pub(super) fn ship(
        &self,
        (group, volume): (GroupId, VolumeId),
        (transfer, ordered): (Transfer, Option<PointId>),
        token: u128,
        from: u64,
    ) -> Result<(), Error> {
        let Some(record) = self.state.mirrored.group(group) else { return Ok(()) };
        let id = |point: PointId| snapshot_of(point, volume).to_string();
        let cut = self.state.snapshots.records.get(&id(transfer.point)).and_then(|s| s.cut);
        let send = MirrorSend {
            peer_cluster_id: record.brain().peer.to_string(),
            group_id: group.to_string(),
            volume_id: volume.to_string(),
            point_id: transfer.point.to_string(),
            base_id: ordered.map(|base| base.to_string()).unwrap_or_default(),
            snapshot_id: id(transfer.point),
            since_snapshot_id: transfer.base.map(id).unwrap_or_default(),
            token: PointId(token).to_string(),
            from_block: from,
            compress: record.settings.compresses,
            bandwidth_limit: record.settings.bandwidth_limit,
            size_blocks: cut.map_or(0, |cut| cut.size_bytes.div_ceil(BLOCK_SIZE as u64)),
        };
        if self.state.mirrored.order_send(volume, send) {
            self.state.tell_target(volume);
            self.tell_mirrors();
        }
        Ok(())
    }

    /// Does what no order names: removes what a former life left, tells of copies, ends what is over.
    pub(super) async fn tend(&self, live: &mut Live, record: &MirrorRecord) -> Result<(), Error> {
        let brain = record.brain();
        let named = [brain.points.cutting, brain.points.last].into_iter().flatten();
        let named: Vec<PointId> =
            named.chain(brain.receiving.as_ref().map(|r| r.transfer.point)).collect();
        for member in &brain.members {
            for snapshot in self.state.snapshots.open_of(member.volume) {
                let is_left = snapshot.phase == SnapshotPhase::Wished
                    && snapshot.point.is_some_and(|point| !named.contains(&point.0));
                if is_left {
                    leaving::drop_point(&self.state, member.volume, snapshot.id.0).await?;
                }
            }
        }
        match brain.role {
            Role::Primary => {
                self.introduce(live, record);
                self.confirm(live, record).await?;
                self.end_left(record).await?;
            }
            Role::Secondary => self.end_left(record).await?,
            Role::Off => self.end_mirror(live, record).await?,
            Role::Orphan => self.end_orphan(record).await?,
            _ => {}
        }
        Ok(())
    }

    /// A mirror that was ended: its points go. The record stays until the peer knows, if there is a copy.
    async fn end_mirror(&self, live: &Live, record: &MirrorRecord) -> Result<(), Error> {
        let brain = record.brain();
        self.release(record).await?;
        let peer = self.state.joined.peers.get(&brain.peer.to_string());
        let word = live.brain.heard().map(|word| word.role);
        if brain.is_over(word) || peer.is_none() {
            self.state.mirrored.records.remove(&record.name(), |r| r.role() == Role::Off).await?;
        }
        Ok(())
    }

    /// The peer has no record of a group: it was told of the end, and forgot the orphan since.
    pub(super) async fn peer_has_none(&self, peer: &str, group: GroupId) -> Result<(), Error> {
        let record = self.state.mirrored.group(group);
        let is_over = |record: &Arc<MirrorRecord>| {
            record.role() == Role::Off && record.brain().peer.to_string() == peer
        };
        let Some(record) = record.filter(is_over) else { return Ok(()) };
        self.release(&record).await?;
        let is_off = |record: &MirrorRecord| record.role() == Role::Off;
        self.state.mirrored.records.remove(&record.name(), is_off).await.map(drop)
    }

    /// The volumes of an orphan may be deleted; with the last one it is over.
    async fn end_orphan(&self, record: &MirrorRecord) -> Result<(), Error> {
        let is_there = |member: &quoin_cluster::mirror::Member| {
            let volume = self.state.volumes.get(&member.volume.to_string());
            volume.is_some_and(|volume| volumes::is_there(&volume))
        };
        if !record.brain().members.iter().any(is_there) {
            self.release(record).await?;
            let is_orphan = |r: &MirrorRecord| r.role() == Role::Orphan;
            self.state.mirrored.records.remove(&record.name(), is_orphan).await?;
            self.orphans.forget(record.id.0);
            return Ok(());
        }
        self.expire(record).await
    }

    async fn release(&self, record: &MirrorRecord) -> Result<(), Error> {
        for member in &record.brain().members {
            leaving::release(&self.state, record.id.0, member.volume).await?;
        }
        Ok(())
    }

    /// Volumes that left the group become ordinary ones. The first side's are so at once, unless it died in
    /// between; a copy goes to its newest point first.
    async fn end_left(&self, record: &MirrorRecord) -> Result<(), Error> {
        if record.is_volume {
            return Ok(());
        }
        let (group, brain) = (record.id.0, record.brain());
        let named = self.state.mirrored.groups.get(&record.name());
        let is_left = |volume: &Arc<VolumeRecord>| {
            !brain.members.iter().any(|member| member.volume == volume.id.0)
                && !named.as_ref().is_some_and(|named| named.members.contains(&volume.id))
        };
        let mirrored = self.state.volumes.indexed(|index| index.of_mirror(group));
        for volume in mirrored.iter().filter(|volume| is_left(volume)) {
            let id = volume.id.0;
            if brain.role.is_primary() {
                leaving::release(&self.state, group, id).await?;
                continue;
            }
            let order = self.state.mirrored.feed(id).filter(|order| order.token.is_empty());
            let ended = order.map(|order| Stamp { term: order.term, version: order.version });
            let now = Stamp { term: brain.term, version: record.version };
            // The event is told once: the record goes on, and with it the stamp.
            let stamp = ended.filter(|ended| ended.term == now.term).unwrap_or(now);
            self.end_feed(id, stamp);
            let seen = observe::observe(&self.state, group, volume, (0, stamp));
            if seen.order.is_some() || seen.stamp < stamp {
                continue;
            }
            let message = match seen.points.last() {
                Some(newest) if seen.at != Some(*newest) && volume.attachments.is_empty() => {
                    // The view is on its way to a point that never comes.
                    self.revert(volume, *newest).await?;
                    continue;
                }
                Some(_) => "it is a volume of this cluster now",
                None => {
                    "it is a volume of this cluster now, without the whole content: no point of it was \
                         complete"
                }
            };
            leaving::release(&self.state, group, id).await?;
            let message = format!("it left the mirrored group on the other side: {message}");
            self.state.events.record(Severity::Warning, about(volume), "CopyLeft", message);
        }
        Ok(())
    }

    /// Tells of a change of the role.
    pub(super) fn announce(&self, record: &MirrorRecord, before: Role) {
        let (role, brain) = (record.role(), record.brain());
        if role == before {
            return;
        }
        let peer = self.state.joined.peers.get(&brain.peer.to_string());
        let peer = peer.map_or_else(|| brain.peer.to_string(), |peer| peer.name.clone());
        let number = brain.chain.top().generation.number;
        let (severity, reason, message) = match role {
            Role::Primary => (
                Severity::Normal,
                "MirrorPromoted",
                format!("it is primary here, in generation {number}; {peer} has the copy"),
            ),
            Role::Secondary => {
                (Severity::Normal, "MirrorSecondary", format!("it is a copy of what {peer} has"))
            }
            Role::Diverged => (
                Severity::Error,
                "MirrorDiverged",
                format!(
                    "both this cluster and {peer} wrote since the last common point: `quoin mirror \
                     resync --force` keeps what this one wrote in a snapshot and follows {peer}, and \
                     `quoin mirror promote --accept-diverged` takes this one for the truth"
                ),
            ),
            Role::Orphan => (
                Severity::Warning,
                "MirrorOrphan",
                format!("{peer} ended the mirror: promote the copy, or delete it"),
            ),
            Role::Off => (Severity::Normal, "MirrorDisabled", "its points are removed".to_owned()),
            Role::Demoting | Role::Promoting | Role::Resyncing => {
                (Severity::Normal, "MirrorChanges", format!("it is {}", super::view::role(role)))
            }
        };
        let about = Object::new("mirror", record.id.0, &record.group_name);
        self.state.events.record(severity, about, reason, message);
    }
}

/// A snapshot that is to be made.
fn wished(volume: &VolumeRecord) -> SnapshotRecord {
    SnapshotRecord {
        id: Text(SnapshotId(0)),
        name: String::new(),
        volume: volume.id,
        volume_name: volume.spec.name.clone(),
        phase: SnapshotPhase::Wished,
        wished_ms: now_ms(),
        cut: None,
        schedule: String::new(),
        group: None,
        failure: String::new(),
        used_by: Vec::new(),
        made_for: String::new(),
        point: None,
    }
}
