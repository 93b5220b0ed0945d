//! The Cluster service: people, automation, the CSI driver.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use quoin_api::control::cluster_server::Cluster;
use quoin_api::control::*;
use quoin_cluster::ownership::attachment::Publish;
use quoin_cluster::ownership::recovery::Recovery;
use quoin_cluster::records::{
    GroupClaim, GroupRecord, Sharing, TokenRecord, VolumePhase, VolumeRecord,
};
use quoin_identity::{Caller, Role};
use tonic::{Request, Response, Status, async_trait};

use super::Services;
use crate::Error;
use crate::disaster::salvage::RecoverRecords;
use crate::fields::id;
use crate::membership::members::token_id;
use crate::reconcile::cordon::{Cordoning, Scope};
use crate::snapshot::catalog::CUT_TIME;
use crate::snapshot::view;
use crate::state::events;
use crate::time::timestamp;
use crate::volume::scale::{Move, Scale, Which};
use crate::volume::spec::{self, REPLICAS_HARD_MAX};
use crate::volume::verification::Verifying;
use crate::volume::volumes::is_there;

/// How long a creation is waited for before the answer says "Pending".
const CREATION_TIME: Duration = Duration::from_secs(5);
/// Of a backup in one message.
const BACKUP_PIECE_BYTES: usize = 256 << 10;
/// Volumes in one answer of a list.
const LIST_MAX: u32 = 4096;

impl Services {
    fn attachment(
        &self,
        volume: &VolumeRecord,
        node: &str,
    ) -> Result<Response<Attachment>, Status> {
        let attachment = volume.attachments.iter().find(|a| a.node == node);
        let gone = || Error::Aborted("it was detached meanwhile; ask again".to_owned());
        Ok(Response::new(self.controller.status.attachment(volume, attachment.ok_or_else(gone)?)))
    }

    /// Pools create replicas in milliseconds, so nearly always the answer is a ready volume.
    async fn formed(&self, volume: Arc<VolumeRecord>) -> Arc<VolumeRecord> {
        let id = volume.id.0.to_string();
        let mut changes = self.controller.state.changes();
        let waiting = async {
            loop {
                match self.controller.state.volumes.get(&id) {
                    Some(volume) if volume.phase == VolumePhase::Pending => {}
                    Some(volume) => return volume,
                    None => return volume.clone(),
                }
                if changes.changed().await.is_err() {
                    return volume.clone();
                }
            }
        };
        tokio::time::timeout(CREATION_TIME, waiting).await.unwrap_or(volume)
    }
}

fn scope(pool: &str, node: &str) -> Result<Scope, Error> {
    match (pool, node) {
        (pool, "") if !pool.is_empty() => Ok(Scope::Pool(pool.to_owned())),
        ("", node) if !node.is_empty() => Ok(Scope::Node(node.to_owned())),
        _ => Err(Error::invalid("pool", "a pool or a node is needed, and not both")),
    }
}

/// The part of a token that people may know.
fn known(token: &TokenRecord) -> JoinTokenInfo {
    JoinTokenInfo {
        id: token_id(token).to_owned(),
        role: token.role.clone(),
        name: token.holder.clone(),
        expires_at: Some(timestamp(token.expires_ms)),
        used_by: token.used_by.as_ref().map(|(who, _)| who.clone()).unwrap_or_default(),
        manages_volumes: token.manages_volumes,
    }
}

#[async_trait]
impl Cluster for Services {
    async fn get_cluster_info(
        &self,
        request: Request<GetClusterInfoRequest>,
    ) -> Result<Response<ClusterInfo>, Status> {
        self.look(&request)?;
        Ok(Response::new(ClusterInfo {
            cluster_id: self.controller.state.identity().cluster().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            data_security: self.controller.state.settings.data_security.clone(),
            replace_after: self.controller.state.settings.replace_after.to_string(),
            recovery: self.controller.state.recovery_reason(),
            term: self.controller.state.term().number,
            clocks: self.controller.membership.clocks.all(),
            authority: self.controller.membership.members.fingerprint(),
            records: Some(self.controller.state.storage.shown()),
        }))
    }

    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let CreateVolumeRequest { spec, limit_bytes, any_size, source } = request.into_inner();
        let spec = spec.ok_or_else(|| Error::invalid("spec", "it is missing"))?;
        let required_bytes = if any_size { 0 } else { spec.size_bytes };
        let (catalog, clones) = (&self.controller.volumes.catalog, &self.controller.volumes.clones);
        let volume = match &source {
            None => catalog.create_within(&spec, required_bytes, limit_bytes).await?,
            // A repeat must not fail where its source was deleted since.
            Some(source) => match catalog.find_made_from(&spec.name, source)? {
                Some(volume) => catalog.check_made(&volume, &spec, required_bytes, limit_bytes)?,
                None => {
                    let source = clones.prepare(&spec.name, source, CUT_TIME).await?;
                    catalog.create_from(&spec, required_bytes, limit_bytes, &source).await?
                }
            },
        };
        let volume = self.formed(volume).await;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        self.manage(&request)?;
        self.controller.volumes.catalog.delete(request.get_ref().volume.as_ref()).await?;
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn get_volume(
        &self,
        request: Request<GetVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        let scope = self.look(&request)?;
        let volume = scope.volume(&self.controller, request.get_ref().volume.as_ref())?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let scope = self.look(&request)?;
        let ListVolumesRequest { max_entries, starting_token, include_deleting, ill_only } =
            request.into_inner();
        let max_entries = if max_entries == 0 { LIST_MAX } else { max_entries.min(LIST_MAX) };
        // Filtered before the page is made: the token names the last one of it.
        let is_listed =
            |volume: &VolumeRecord| scope.sees(volume) && (include_deleting || is_there(volume));
        let catalog = &self.controller.volumes.catalog;
        let (page, next_token) = match ill_only {
            true => catalog.list_where(max_entries, &starting_token, |volume| {
                scope.sees(volume) && self.controller.status.is_ill(volume)
            })?,
            false => catalog.list_with(max_entries, &starting_token, is_listed)?,
        };
        let volumes = page.iter().map(|volume| self.controller.status.volume(volume)).collect();
        Ok(Response::new(ListVolumesResponse { volumes, next_token }))
    }

    async fn resize_volume(
        &self,
        request: Request<ResizeVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let ResizeVolumeRequest { volume, size_bytes, limit_bytes } = request.into_inner();
        let volume = self
            .controller
            .volumes
            .catalog
            .resize(volume.as_ref(), size_bytes, limit_bytes)
            .await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn scale_volume(
        &self,
        request: Request<ScaleVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let asked = request.into_inner();
        let scale = Scale {
            replicas: asked.replicas,
            consistency_factor: asked.consistency_factor,
            allow_loss_on_single_failure: asked.allow_loss_on_single_failure,
            pools: asked.pools,
        };
        let volume = self.controller.volumes.replicas.scale(asked.volume.as_ref(), &scale).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn move_replica(
        &self,
        request: Request<MoveReplicaRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let MoveReplicaRequest { volume, replica_id, pool, from_pool, unless_in_sync } =
            request.into_inner();
        let which = match (replica_id.as_str(), from_pool) {
            ("", from) if !from.is_empty() => Which::OfPool(from),
            (_, from) if !from.is_empty() => {
                let rule = "one of replica_id and from_pool is needed, and not both";
                return Err(Error::invalid("from_pool", rule).into());
            }
            (replica_id, _) => Which::Id(id("replica_id", replica_id)?),
        };
        let asked = Move { which, pool, unless_in_sync };
        let volume = self.controller.volumes.replicas.move_replica(volume.as_ref(), &asked).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn remove_replicas(
        &self,
        request: Request<RemoveReplicasRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let RemoveReplicasRequest { volume, replica_ids } = request.into_inner();
        if replica_ids.len() > REPLICAS_HARD_MAX as usize {
            return Err(
                Error::invalid("replica_ids", format!("at most {REPLICAS_HARD_MAX}")).into()
            );
        }
        let replicas: Vec<_> =
            replica_ids.iter().map(|text| id("replica_id", text)).collect::<Result<_, _>>()?;
        let volume = self.controller.volumes.replicas.remove(volume.as_ref(), &replicas).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn verify_volume(
        &self,
        request: Request<VerifyVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let asked = request.get_ref();
        let from = Some(asked.from_replica_id.as_str()).filter(|from| !from.is_empty());
        let from = from.map(|from| id("from_replica_id", from)).transpose()?;
        let what = match asked.action() {
            verify_volume_request::Action::Repair => Verifying::Repair { from },
            _ if from.is_some() => {
                return Err(Error::invalid("from_replica_id", "only with a repair").into());
            }
            verify_volume_request::Action::Verify => Verifying::Verify,
            verify_volume_request::Action::Stop => Verifying::Stop,
            verify_volume_request::Action::Unspecified => {
                return Err(Error::invalid("action", "verify, repair or stop").into());
            }
        };
        let volume = self.controller.volumes.verifier.verify(asked.volume.as_ref(), what).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn recover_volume(
        &self,
        request: Request<RecoverVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.govern(&request)?;
        let asked = request.into_inner();
        let ids = |texts: &[String]| -> Result<Vec<_>, Error> {
            if texts.len() > REPLICAS_HARD_MAX as usize {
                return Err(Error::invalid("replica_ids", format!("at most {REPLICAS_HARD_MAX}")));
            }
            texts.iter().map(|text| id("replica_id", text)).collect()
        };
        let recovery = Recovery {
            keep: ids(&asked.keep_replica_ids)?,
            destroyed: ids(&asked.destroyed_replica_ids)?,
            accept_loss_of: asked.accept_loss_of,
        };
        let volume =
            self.controller.disaster.volumes.recover(asked.volume.as_ref(), &recovery).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn modify_volume(
        &self,
        request: Request<ModifyVolumeRequest>,
    ) -> Result<Response<ModifyVolumeResponse>, Status> {
        self.manage(&request)?;
        let ModifyVolumeRequest { volume, spec, dry_run } = request.into_inner();
        let spec = spec.unwrap_or_default();
        let modifications = &self.controller.volumes.modifications;
        let (record, changes) = modifications.modify(volume.as_ref(), &spec, dry_run).await?;
        let waiting_for = match dry_run {
            true => String::new(),
            false => modifications.wait(&record).await,
        };
        let record = self.controller.state.volumes.get(&record.id.0.to_string()).unwrap_or(record);
        let volume = Some(self.controller.status.volume(&record));
        Ok(Response::new(ModifyVolumeResponse { volume, changes, waiting_for }))
    }

    async fn apply_volume(
        &self,
        request: Request<ApplyVolumeRequest>,
    ) -> Result<Response<ApplyVolumeResponse>, Status> {
        self.manage(&request)?;
        let (volume, changes) =
            self.controller.volumes.declarations.apply(request.get_ref()).await?;
        let volume = match volume {
            Some(volume) => {
                let volume = self.formed(volume).await;
                Some(self.controller.status.volume(&volume))
            }
            None => None,
        };
        Ok(Response::new(ApplyVolumeResponse { volume, changes }))
    }

    async fn flatten_volume(
        &self,
        request: Request<FlattenVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let volume = request.get_ref().volume.as_ref();
        let volume = self.controller.volumes.clones.flatten(volume).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn set_key_slots(
        &self,
        request: Request<SetKeySlotsRequest>,
    ) -> Result<Response<Volume>, Status> {
        self.manage(&request)?;
        let volume = self.controller.volumes.key_slots.set(request.get_ref()).await?;
        Ok(Response::new(self.controller.status.volume(&volume)))
    }

    async fn set_cordon(
        &self,
        request: Request<SetCordonRequest>,
    ) -> Result<Response<CordonStatus>, Status> {
        self.manage(&request)?;
        let asked = request.get_ref();
        let action = match asked.action() {
            set_cordon_request::Action::Uncordon => Cordoning::Uncordon,
            set_cordon_request::Action::Cordon => Cordoning::Cordon,
            set_cordon_request::Action::Drain => Cordoning::Drain,
            set_cordon_request::Action::Unspecified => {
                return Err(Error::invalid("action", "cordon, drain or uncordon").into());
            }
        };
        let scope = scope(&asked.pool, &asked.node)?;
        let status = self.controller.work.cordons.set(&scope, action, asked.dry_run).await?;
        Ok(Response::new(status))
    }

    async fn get_cordon(
        &self,
        request: Request<GetCordonRequest>,
    ) -> Result<Response<CordonStatus>, Status> {
        let sight = self.look(&request)?;
        let GetCordonRequest { pool, node } = request.get_ref();
        let mut status = self.controller.work.cordons.status(&scope(pool, node)?)?;
        let volumes = self.controller.state.volumes.list();
        let seen = volumes.iter().filter(|volume| sight.sees(volume));
        let (ids, names): (HashSet<_>, HashSet<_>) =
            seen.map(|volume| (volume.id.0.to_string(), volume.spec.name.as_str())).unzip();
        status.replicas.retain(|replica| ids.contains(&replica.volume_id));
        status.attached.retain(|name| names.contains(name.as_str()));
        Ok(Response::new(status))
    }

    async fn publish_volume(
        &self,
        request: Request<PublishVolumeRequest>,
    ) -> Result<Response<Attachment>, Status> {
        self.manage(&request)?;
        let asked = request.into_inner();
        let publish = Publish {
            node: asked.node,
            read_only: asked.read_only,
            sharing: Sharing::read(&asked.sharing).map_err(Error::from)?,
            usage: asked.usage,
            device: asked.device,
            replays: asked.replays,
        };
        let volume =
            self.controller.volumes.attachments.publish(asked.volume.as_ref(), &publish).await?;
        self.attachment(&volume, &publish.node)
    }

    async fn confirm_replay(
        &self,
        request: Request<ConfirmReplayRequest>,
    ) -> Result<Response<Attachment>, Status> {
        let ConfirmReplayRequest { volume, node } = request.get_ref();
        self.act(&request, Role::Node, node)?;
        let volume = self.look(&request)?.volume(&self.controller, volume.as_ref())?;
        let volume = self.controller.volumes.attachments.confirm_replay(&volume, node).await?;
        self.attachment(&volume, node)
    }

    async fn unpublish_volume(
        &self,
        request: Request<UnpublishVolumeRequest>,
    ) -> Result<Response<UnpublishVolumeResponse>, Status> {
        self.manage(&request)?;
        let who = match self.caller(&request)? {
            Caller::Member(member) => member.peer.to_string(),
            _ => "the admin socket".to_owned(),
        };
        let asked = request.into_inner();
        let UnpublishVolumeRequest { volume, node, at_once, unless_in_use, forced } = asked;
        let check = |volume: &VolumeRecord, on: &str| match unless_in_use {
            true => self.controller.volumes.devices.check_unused(volume, on),
            false => Ok(()),
        };
        let by_force = forced.then_some(who.as_str());
        self.controller
            .volumes
            .attachments
            .detach_by(volume.as_ref(), &node, at_once, by_force, check)
            .await?;
        Ok(Response::new(UnpublishVolumeResponse {}))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<Snapshot>, Status> {
        self.manage(&request)?;
        let CreateSnapshotRequest { volume, name, accessible_topology } = request.into_inner();
        let snapshots = &self.controller.snapshots.catalog;
        let snapshot =
            snapshots.create_within(volume.as_ref(), &name, &accessible_topology).await?;
        let snapshot = snapshots.cut(snapshot, CUT_TIME).await?;
        Ok(Response::new(view::snapshot(&self.controller.state, &snapshot)))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        self.manage(&request)?;
        let snapshot = request.get_ref().snapshot.as_ref();
        self.controller.snapshots.catalog.delete(snapshot).await?;
        Ok(Response::new(DeleteSnapshotResponse {}))
    }

    async fn get_snapshot(
        &self,
        request: Request<GetSnapshotRequest>,
    ) -> Result<Response<Snapshot>, Status> {
        let scope = self.look(&request)?;
        let reference = request.get_ref().snapshot.as_ref();
        let snapshot = self.controller.snapshots.catalog.get(reference)?;
        // One of a volume that is out of sight does not exist.
        if !scope.sees_volume(&self.controller, snapshot.volume.0) {
            let named = reference.map(|r| if r.id.is_empty() { &r.name } else { &r.id });
            return Err(Error::missing("snapshot", named.cloned().unwrap_or_default()).into());
        }
        Ok(Response::new(view::snapshot(&self.controller.state, &snapshot)))
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        let scope = self.look(&request)?;
        let ListSnapshotsRequest { volume, max_entries, starting_token, cut_only } =
            request.into_inner();
        let max_entries = if max_entries == 0 { LIST_MAX } else { max_entries.min(LIST_MAX) };
        let sight = scope.sight(&self.controller);
        let (page, next_token) = self.controller.snapshots.catalog.list(
            volume.as_ref(),
            max_entries,
            &starting_token,
            cut_only,
            |snapshot| sight.sees(snapshot.volume.0),
        )?;
        let snapshots = page.iter().map(|s| view::snapshot(&self.controller.state, s)).collect();
        Ok(Response::new(ListSnapshotsResponse { snapshots, next_token }))
    }

    async fn create_group_snapshot(
        &self,
        request: Request<CreateGroupSnapshotRequest>,
    ) -> Result<Response<GroupSnapshot>, Status> {
        self.manage(&request)?;
        let CreateGroupSnapshotRequest { name, volumes } = request.into_inner();
        let groups = &self.controller.snapshots.groups;
        let group = groups.create(&name, &volumes).await?;
        let group = groups.cut(group, CUT_TIME).await?;
        Ok(Response::new(view::group(&self.controller.state, &group)))
    }

    async fn delete_group_snapshot(
        &self,
        request: Request<DeleteGroupSnapshotRequest>,
    ) -> Result<Response<DeleteGroupSnapshotResponse>, Status> {
        self.manage(&request)?;
        let group = request.get_ref().group.as_ref();
        self.controller.snapshots.groups.delete(group).await?;
        Ok(Response::new(DeleteGroupSnapshotResponse {}))
    }

    async fn get_group_snapshot(
        &self,
        request: Request<GetGroupSnapshotRequest>,
    ) -> Result<Response<GroupSnapshot>, Status> {
        let scope = self.look(&request)?;
        let reference = request.get_ref().group.as_ref();
        let group = self.controller.snapshots.groups.get(reference)?;
        if !group.members.iter().all(|m| scope.sees_volume(&self.controller, m.volume.0)) {
            let named = reference.map(|r| if r.id.is_empty() { &r.name } else { &r.id });
            return Err(Error::missing("group snapshot", named.cloned().unwrap_or_default()).into());
        }
        Ok(Response::new(view::group(&self.controller.state, &group)))
    }

    async fn list_group_snapshots(
        &self,
        request: Request<ListGroupSnapshotsRequest>,
    ) -> Result<Response<ListGroupSnapshotsResponse>, Status> {
        let scope = self.look(&request)?;
        let ListGroupSnapshotsRequest { max_entries, after } = request.into_inner();
        let max_entries = if max_entries == 0 { LIST_MAX } else { max_entries.min(LIST_MAX) };
        let sight = scope.sight(&self.controller);
        let is_seen = |group: &GroupRecord| group.members.iter().all(|m| sight.sees(m.volume.0));
        let groups = &self.controller.snapshots.groups;
        let page = groups.list(&after, max_entries as usize, is_seen)?;
        let is_full = page.len() == max_entries as usize;
        let next = page.last().filter(|_| is_full).map(|group| group.id.0.to_string());
        let groups = page.iter().map(|group| view::group(&self.controller.state, group)).collect();
        Ok(Response::new(ListGroupSnapshotsResponse { groups, next: next.unwrap_or_default() }))
    }

    async fn revert_volume(
        &self,
        request: Request<RevertVolumeRequest>,
    ) -> Result<Response<Revert>, Status> {
        self.manage(&request)?;
        let RevertVolumeRequest { volume, snapshot, id, wait_only } = request.into_inner();
        let reverts = &self.controller.snapshots.reverts;
        let attempt = crate::snapshot::reverts::attempt(&id)?;
        let revert = match wait_only {
            false => reverts.begin(volume.as_ref(), snapshot.as_ref(), attempt).await?,
            true => reverts.get(volume.as_ref(), attempt)?,
        };
        let revert = reverts.ended(revert, CUT_TIME).await?;
        Ok(Response::new(crate::snapshot::reverts::view(&self.controller.state, &revert)))
    }

    async fn pull_snapshot(
        &self,
        request: Request<PullSnapshotRequest>,
    ) -> Result<Response<SnapshotPart>, Status> {
        // Of any volume, with its data: as much as who manages volumes may do.
        self.manage(&request)?;
        let part = self.controller.snapshots.history.pull(request.get_ref()).await?;
        Ok(Response::new(part))
    }

    async fn measure_snapshot(
        &self,
        request: Request<MeasureSnapshotRequest>,
    ) -> Result<Response<SnapshotMeasure>, Status> {
        self.manage(&request)?;
        let measure = self.controller.snapshots.history.measure(request.get_ref()).await?;
        Ok(Response::new(measure))
    }

    async fn create_schedule(
        &self,
        request: Request<CreateScheduleRequest>,
    ) -> Result<Response<Schedule>, Status> {
        self.manage(&request)?;
        let schedule = self.controller.snapshots.schedules.create(request.get_ref()).await?;
        Ok(Response::new(view::schedule(&self.controller.state, &schedule)))
    }

    async fn delete_schedule(
        &self,
        request: Request<DeleteScheduleRequest>,
    ) -> Result<Response<DeleteScheduleResponse>, Status> {
        self.manage(&request)?;
        self.controller.snapshots.schedules.delete(&request.get_ref().name).await?;
        Ok(Response::new(DeleteScheduleResponse {}))
    }

    async fn get_schedule(
        &self,
        request: Request<GetScheduleRequest>,
    ) -> Result<Response<Schedule>, Status> {
        self.manage(&request)?;
        let schedule = self.controller.snapshots.schedules.get(&request.get_ref().name)?;
        Ok(Response::new(view::schedule(&self.controller.state, &schedule)))
    }

    async fn list_schedules(
        &self,
        request: Request<ListSchedulesRequest>,
    ) -> Result<Response<ListSchedulesResponse>, Status> {
        let scope = self.look(&request)?;
        let volume = request.get_ref().volume.as_ref();
        if volume.is_some() {
            scope.volume(&self.controller, volume)?;
        }
        let listed = self.controller.snapshots.schedules.list(volume)?;
        let seen = listed.iter().filter(|s| scope.sees_volume(&self.controller, s.volume.0));
        let schedules = seen.map(|s| view::schedule(&self.controller.state, s)).collect();
        Ok(Response::new(ListSchedulesResponse { schedules }))
    }

    async fn list_pools(
        &self,
        request: Request<ListPoolsRequest>,
    ) -> Result<Response<ListPoolsResponse>, Status> {
        self.look(&request)?;
        Ok(Response::new(ListPoolsResponse { pools: self.controller.status.pools() }))
    }

    async fn scrub_pool(
        &self,
        request: Request<ScrubPoolRequest>,
    ) -> Result<Response<ScrubPoolResponse>, Status> {
        self.manage(&request)?;
        let request = self.controller.assignments.request_scrub(&request.get_ref().pool).await?;
        Ok(Response::new(ScrubPoolResponse { request }))
    }

    async fn reclaim_volume(
        &self,
        request: Request<ReclaimVolumeRequest>,
    ) -> Result<Response<ReclaimVolumeResponse>, Status> {
        self.manage(&request)?;
        let ReclaimVolumeRequest { volume, wait_ms } = request.into_inner();
        let wait = Duration::from_millis(wait_ms.into());
        let reclaimed = self.controller.volumes.reclaims.reclaim(volume.as_ref(), wait).await?;
        Ok(Response::new(reclaimed))
    }

    async fn add_fences(
        &self,
        request: Request<AddFencesRequest>,
    ) -> Result<Response<AddFencesResponse>, Status> {
        self.manage(&request)?;
        self.controller.volumes.network_fences.add(&request.get_ref().blocks).await?;
        Ok(Response::new(AddFencesResponse {}))
    }

    async fn remove_fences(
        &self,
        request: Request<RemoveFencesRequest>,
    ) -> Result<Response<RemoveFencesResponse>, Status> {
        self.manage(&request)?;
        self.controller.volumes.network_fences.remove(&request.get_ref().blocks).await?;
        Ok(Response::new(RemoveFencesResponse {}))
    }

    async fn list_fences(
        &self,
        request: Request<ListFencesRequest>,
    ) -> Result<Response<ListFencesResponse>, Status> {
        self.look(&request)?;
        let fences = self.controller.volumes.network_fences.list();
        Ok(Response::new(ListFencesResponse { fences }))
    }

    async fn list_nodes(
        &self,
        request: Request<ListNodesRequest>,
    ) -> Result<Response<ListNodesResponse>, Status> {
        self.look(&request)?;
        Ok(Response::new(ListNodesResponse { nodes: self.controller.status.nodes() }))
    }

    async fn list_replicas(
        &self,
        request: Request<ListReplicasRequest>,
    ) -> Result<Response<ListReplicasResponse>, Status> {
        let scope = self.look(&request)?;
        let volumes = match &request.get_ref().volume {
            Some(reference) => {
                vec![scope.volume(&self.controller, Some(reference))?]
            }
            None => self.controller.state.volumes.list(),
        };
        let seen = volumes.iter().filter(|volume| scope.sees(volume));
        let replicas = seen.flat_map(|volume| self.controller.status.replicas(volume)).collect();
        Ok(Response::new(ListReplicasResponse { replicas }))
    }

    async fn get_target_config(
        &self,
        request: Request<GetTargetConfigRequest>,
    ) -> Result<Response<TargetConfig>, Status> {
        let scope = self.look(&request)?;
        let volume = scope.volume(&self.controller, request.get_ref().volume.as_ref())?;
        Ok(Response::new(self.controller.status.target_config(&volume)?))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        self.look(&request)?;
        let (available_bytes, maximum_volume_bytes) =
            self.controller.volumes.catalog.capacity(request.get_ref().spec.as_ref())?;
        Ok(Response::new(GetCapacityResponse {
            available_bytes,
            maximum_volume_bytes,
            minimum_volume_bytes: spec::SIZE_BYTES_MIN,
        }))
    }

    type WatchEventsStream = Pin<Box<dyn Stream<Item = Result<Event, Status>> + Send>>;

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let scope = self.look(&request)?;
        let caller = self.caller(&request)?;
        let WatchEventsRequest { follow, after_sequence, volume } = request.into_inner();
        if scope != super::authorize::Scope::All {
            return Err(Error::Denied("events are for those who manage volumes".into()).into());
        }
        let only = match &volume {
            Some(reference) => Some(self.controller.volumes.catalog.get(Some(reference))?),
            None => None,
        };
        let place = self.stream_place(&caller)?;
        let services = self.clone();
        let (controller, mut shutdown) = (self.controller.clone(), self.shutdown.clone());
        let stream = async_stream::stream! {
            let _place = place;
            let mut latest = controller.state.events().latest();
            let mut after = after_sequence;
            loop {
                latest.mark_unchanged();
                if let Err(error) = services.still(&caller) {
                    yield Err(error.into());
                    break;
                }
                for event in controller.state.events().after(after) {
                    after = event.sequence;
                    let wanted = only.as_ref().is_none_or(|volume| {
                        let name = &volume.spec.name;
                        event.object_id == volume.id.0.to_string()
                            || (event.object_kind == "replica" && event.object_name == *name)
                    });
                    if wanted {
                        yield Ok(events::message(event));
                    }
                }
                if !follow {
                    break;
                }
                tokio::select! {
                    changed = latest.changed() => if changed.is_err() { break },
                    _ = shutdown.wait_for(|down| *down) => break,
                }
            }
        };
        Ok(Response::new(Box::pin(stream)))
    }

    async fn create_join_token(
        &self,
        request: Request<CreateJoinTokenRequest>,
    ) -> Result<Response<JoinToken>, Status> {
        self.govern(&request)?;
        let CreateJoinTokenRequest { role, ttl_s, name, manages_volumes } = request.into_inner();
        let (token, expires_ms) = self
            .controller
            .membership
            .members
            .create_join_token(&role, ttl_s, &name, manages_volumes)
            .await?;
        let expires_at = Some(timestamp(expires_ms));
        Ok(Response::new(JoinToken { token: token.to_string(), expires_at }))
    }

    async fn list_join_tokens(
        &self,
        request: Request<ListJoinTokensRequest>,
    ) -> Result<Response<ListJoinTokensResponse>, Status> {
        self.govern(&request)?;
        let tokens = self
            .controller
            .membership
            .members
            .join_tokens()
            .iter()
            .map(|token| known(token))
            .collect();
        Ok(Response::new(ListJoinTokensResponse { tokens }))
    }

    async fn revoke_join_token(
        &self,
        request: Request<RevokeJoinTokenRequest>,
    ) -> Result<Response<RevokeJoinTokenResponse>, Status> {
        self.govern(&request)?;
        let token =
            self.controller.membership.members.revoke_join_token(&request.get_ref().token).await?;
        Ok(Response::new(RevokeJoinTokenResponse { revoked: Some(known(&token)) }))
    }

    async fn remove_pool(
        &self,
        request: Request<RemovePoolRequest>,
    ) -> Result<Response<RemovePoolResponse>, Status> {
        self.govern(&request)?;
        let RemovePoolRequest { pool, force } = request.get_ref();
        self.controller.removals.pool(pool, *force).await?;
        Ok(Response::new(RemovePoolResponse {}))
    }

    async fn remove_node(
        &self,
        request: Request<RemoveNodeRequest>,
    ) -> Result<Response<RemoveNodeResponse>, Status> {
        self.govern(&request)?;
        let RemoveNodeRequest { node, force } = request.get_ref();
        self.controller.removals.node(node, *force).await?;
        Ok(Response::new(RemoveNodeResponse {}))
    }

    async fn list_admins(
        &self,
        request: Request<ListAdminsRequest>,
    ) -> Result<Response<ListAdminsResponse>, Status> {
        self.govern(&request)?;
        let admins = self.controller.membership.admission.admins();
        let admins = admins.iter().map(|admin| Admin {
            name: admin.holder.clone(),
            joined_at: Some(timestamp(admin.joined_ms)),
            key_hash: admin.key_hash.clone(),
        });
        Ok(Response::new(ListAdminsResponse { admins: admins.collect() }))
    }

    async fn remove_admin(
        &self,
        request: Request<RemoveAdminRequest>,
    ) -> Result<Response<RemoveAdminResponse>, Status> {
        self.govern(&request)?;
        self.controller.membership.admission.remove_admin(&request.get_ref().admin).await?;
        Ok(Response::new(RemoveAdminResponse {}))
    }

    async fn set_node(
        &self,
        request: Request<SetNodeRequest>,
    ) -> Result<Response<SetNodeResponse>, Status> {
        self.govern(&request)?;
        let SetNodeRequest { node, manages_volumes } = request.into_inner();
        self.controller.membership.admission.set_node(&node, manages_volumes).await?;
        Ok(Response::new(SetNodeResponse {}))
    }

    async fn invite_peer(
        &self,
        request: Request<InvitePeerRequest>,
    ) -> Result<Response<PeerInvitation>, Status> {
        self.govern(&request)?;
        let InvitePeerRequest { name, ttl_s, addresses } = request.get_ref();
        let (token, expires_ms) =
            self.controller.membership.peers.invite(name, *ttl_s, addresses).await?;
        let expires_at = Some(timestamp(expires_ms));
        Ok(Response::new(PeerInvitation { token: token.to_string(), expires_at }))
    }

    async fn pair_peer(&self, request: Request<PairPeerRequest>) -> Result<Response<Peer>, Status> {
        self.govern(&request)?;
        let PairPeerRequest { token, name } = request.get_ref();
        Ok(Response::new(self.controller.membership.peers.pair(token, name).await?))
    }

    async fn list_peers(
        &self,
        request: Request<ListPeersRequest>,
    ) -> Result<Response<ListPeersResponse>, Status> {
        self.govern(&request)?;
        Ok(Response::new(ListPeersResponse { peers: self.controller.membership.peers.list() }))
    }

    async fn modify_peer(
        &self,
        request: Request<ModifyPeerRequest>,
    ) -> Result<Response<Peer>, Status> {
        self.govern(&request)?;
        let peer = self.controller.membership.peers.modify(request.get_ref()).await?;
        Ok(Response::new(peer))
    }

    async fn unpair_peer(
        &self,
        request: Request<UnpairPeerRequest>,
    ) -> Result<Response<UnpairPeerResponse>, Status> {
        self.govern(&request)?;
        let peer = self.controller.membership.peers.unpair(&request.get_ref().peer).await?;
        Ok(Response::new(UnpairPeerResponse { peer: Some(peer) }))
    }

    async fn remove_mirror(
        &self,
        request: Request<RemoveMirrorRequest>,
    ) -> Result<Response<RemoveMirrorResponse>, Status> {
        self.govern(&request)?;
        self.controller.membership.peers.remove_mirror(&request.get_ref().mirror).await?;
        Ok(Response::new(RemoveMirrorResponse {}))
    }

    async fn create_volume_group(
        &self,
        request: Request<CreateVolumeGroupRequest>,
    ) -> Result<Response<VolumeGroup>, Status> {
        self.manage(&request)?;
        let CreateVolumeGroupRequest { name, volumes, claims, name_prefix } = request.get_ref();
        let groups = &self.controller.mirror.groups;
        let group = match claims {
            true => {
                let claim = GroupClaim { name: name.clone(), prefix: name_prefix.clone() };
                groups.claim(claim, volumes).await?
            }
            false => groups.create(name, volumes).await?,
        };
        Ok(Response::new(groups.view(&group)))
    }

    async fn get_volume_group(
        &self,
        request: Request<GetVolumeGroupRequest>,
    ) -> Result<Response<VolumeGroup>, Status> {
        self.look(&request)?;
        let groups = &self.controller.mirror.groups;
        let group = groups.get(request.get_ref().group.as_ref())?;
        Ok(Response::new(groups.view(&group)))
    }

    async fn list_volume_groups(
        &self,
        request: Request<ListVolumeGroupsRequest>,
    ) -> Result<Response<ListVolumeGroupsResponse>, Status> {
        self.look(&request)?;
        let groups = &self.controller.mirror.groups;
        let ListVolumeGroupsRequest { max_entries, starting_token, by_id } = request.get_ref();
        let (page, next_token) = match by_id {
            true => groups.page(*max_entries, starting_token)?,
            false => (groups.list()?, String::new()),
        };
        let groups = page.iter().map(|group| groups.view(group)).collect();
        Ok(Response::new(ListVolumeGroupsResponse { groups, next_token }))
    }

    async fn modify_volume_group(
        &self,
        request: Request<ModifyVolumeGroupRequest>,
    ) -> Result<Response<VolumeGroup>, Status> {
        self.manage(&request)?;
        let ModifyVolumeGroupRequest { group, volumes } = request.get_ref();
        let (groups, driver) = (&self.controller.mirror.groups, &self.controller.mirror.driver);
        let group = groups.modify(driver, group.as_ref(), volumes).await?;
        driver.look_at(group.id.0);
        Ok(Response::new(groups.view(&group)))
    }

    async fn delete_volume_group(
        &self,
        request: Request<DeleteVolumeGroupRequest>,
    ) -> Result<Response<DeleteVolumeGroupResponse>, Status> {
        self.manage(&request)?;
        let DeleteVolumeGroupRequest { group, only_empty } = request.get_ref();
        self.controller.mirror.groups.delete(group.as_ref(), *only_empty).await?;
        Ok(Response::new(DeleteVolumeGroupResponse {}))
    }

    async fn enable_mirror(
        &self,
        request: Request<EnableMirrorRequest>,
    ) -> Result<Response<Mirror>, Status> {
        self.manage(&request)?;
        let driver = &self.controller.mirror.driver;
        let record = driver.enable(request.get_ref()).await?;
        Ok(Response::new(driver.view(&record).await?))
    }

    async fn get_mirror(
        &self,
        request: Request<GetMirrorRequest>,
    ) -> Result<Response<Mirror>, Status> {
        self.look(&request)?;
        let driver = &self.controller.mirror.driver;
        let record = driver.get(request.get_ref().of.as_ref())?;
        Ok(Response::new(driver.view(&record).await?))
    }

    async fn verify_mirror(
        &self,
        request: Request<VerifyMirrorRequest>,
    ) -> Result<Response<Mirror>, Status> {
        self.manage(&request)?;
        let driver = &self.controller.mirror.driver;
        let record = driver.verify(request.get_ref().of.as_ref()).await?;
        Ok(Response::new(driver.view(&record).await?))
    }

    async fn list_mirrors(
        &self,
        request: Request<ListMirrorsRequest>,
    ) -> Result<Response<ListMirrorsResponse>, Status> {
        self.look(&request)?;
        let driver = &self.controller.mirror.driver;
        let mut mirrors = Vec::new();
        for record in driver.list()? {
            mirrors.push(driver.view(&record).await?);
        }
        Ok(Response::new(ListMirrorsResponse { mirrors }))
    }

    async fn call_mirror(
        &self,
        request: Request<CallMirrorRequest>,
    ) -> Result<Response<CallMirrorResponse>, Status> {
        self.manage(&request)?;
        let driver = &self.controller.mirror.driver;
        let (record, ready) = driver.change(request.get_ref()).await?;
        let mirror = Some(driver.view(&record).await?);
        Ok(Response::new(CallMirrorResponse { mirror, ready }))
    }

    async fn rotate_authority(
        &self,
        request: Request<RotateAuthorityRequest>,
    ) -> Result<Response<RotateAuthorityResponse>, Status> {
        self.govern(&request)?;
        let message = match request.get_ref().at_once.as_str() {
            "" => self.controller.membership.members.rotate_authority().await?,
            named => self.controller.membership.members.replace_authority(named).await?,
        };
        Ok(Response::new(RotateAuthorityResponse { message }))
    }

    type BackupStream = Pin<Box<dyn Stream<Item = Result<BackupPiece, Status>> + Send>>;

    async fn backup(
        &self,
        request: Request<BackupRequest>,
    ) -> Result<Response<Self::BackupStream>, Status> {
        self.govern(&request)?;
        let with_authority = !request.get_ref().without_authority;
        if with_authority {
            // The key must not be had for an admin's certificate.
            self.on_this_host(&request, "a backup with the authority's key")?;
        }
        let bytes = self.controller.disaster.backups.make(with_authority).await?;
        let pieces: Vec<_> = bytes
            .chunks(BACKUP_PIECE_BYTES)
            .map(|piece| Ok(BackupPiece { data: piece.to_vec() }))
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(pieces))))
    }

    async fn recover_records(
        &self,
        request: Request<RecoverRecordsRequest>,
    ) -> Result<Response<RecoverRecordsResponse>, Status> {
        self.govern(&request)?;
        let RecoverRecordsRequest { dry_run, without_pools, discard_left_over } =
            request.into_inner();
        let asked = RecoverRecords { dry_run, without_pools, discard_left_over };
        Ok(Response::new(self.controller.disaster.records.recover(&asked).await?.into()))
    }
}
