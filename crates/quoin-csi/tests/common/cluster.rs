//! A control plane in memory, by the contract of the control API: enough of it to test the
//! face alone. It also listens on the NBD sockets of published volumes, as targets would.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use std::sync::Arc;

use quoin_proto::control::cluster_server::{Cluster, ClusterServer};
use quoin_proto::control::*;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

pub const CLUSTER_ID: &str = "c1";
pub const POOL_BYTES: u64 = 100 << 30;
pub const SMALLEST: u64 = 1 << 20;
pub const LARGEST: u64 = 50 << 30;

#[derive(Default)]
struct State {
    volumes: BTreeMap<String, Volume>,
    created: u64,
    targets: BTreeMap<String, UnixListener>,
}

pub struct MemoryCluster {
    run_directory: PathBuf,
    state: Mutex<State>,
}

impl MemoryCluster {
    pub fn new(run_directory: PathBuf) -> Self {
        Self { run_directory, state: Mutex::default() }
    }

    pub fn serve(self: Arc<Self>, socket: &Path, mut stop: watch::Receiver<bool>) {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        tokio::spawn(async move {
            let stopped = async move {
                let _ = stop.wait_for(|stop| *stop).await;
            };
            tonic::transport::Server::builder()
                .add_service(ClusterServer::from_arc(self))
                .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stopped)
                .await
                .unwrap();
        });
    }

    pub fn volumes(&self) -> Vec<Volume> {
        self.state.lock().unwrap().volumes.values().cloned().collect()
    }

    pub fn set_health(&self, id: &str, health: &str) {
        self.state.lock().unwrap().volumes.get_mut(id).unwrap().health = health.to_owned();
    }
}

fn found<'a>(state: &'a mut State, volume: Option<&VolumeRef>) -> Result<&'a mut Volume, Status> {
    let id = volume.map(|volume| volume.id.clone()).unwrap_or_default();
    state.volumes.get_mut(&id).ok_or_else(|| Status::not_found(format!("no volume {id}")))
}

fn replicas(spec: &VolumeSpec) -> u64 {
    u64::from(if spec.replicas == 0 { 3 } else { spec.replicas })
}

#[tonic::async_trait]
impl Cluster for MemoryCluster {
    async fn get_cluster_info(
        &self,
        _: Request<GetClusterInfoRequest>,
    ) -> Result<Response<ClusterInfo>, Status> {
        Ok(Response::new(ClusterInfo { cluster_id: CLUSTER_ID.into(), ..Default::default() }))
    }

    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        let request = request.into_inner();
        let spec = request.spec.unwrap();
        let mut state = self.state.lock().unwrap();
        let same_name =
            state.volumes.values().find(|one| one.spec.as_ref().unwrap().name == spec.name);
        if let Some(present) = same_name {
            let own = present.spec.as_ref().unwrap();
            let fits = present.size_bytes >= spec.size_bytes
                && (request.limit_bytes == 0 || present.size_bytes <= request.limit_bytes);
            let others = VolumeSpec { size_bytes: own.size_bytes, ..spec.clone() };
            if !fits || others != *own {
                return Err(Status::already_exists(format!("{} exists, and differs", spec.name)));
            }
            return Ok(Response::new(present.clone()));
        }
        if !(SMALLEST..=LARGEST).contains(&spec.size_bytes) {
            return Err(Status::out_of_range("a volume has 1 MiB to 50 GiB"));
        }
        let elsewhere = |one: &Topology| one.segments.values().any(|zone| zone != "z1");
        if !spec.accessible_topology.is_empty() && spec.accessible_topology.iter().all(elsewhere) {
            return Err(Status::resource_exhausted("no pool there"));
        }
        state.created += 1;
        let volume = Volume {
            id: format!("{:032x}", state.created),
            size_bytes: spec.size_bytes,
            spec: Some(spec),
            phase: "Ready".into(),
            health: "Online".into(),
            contract: "survives the loss of one pool, not of one host".into(),
            ..Default::default()
        };
        state.volumes.insert(volume.id.clone(), volume.clone());
        Ok(Response::new(volume))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let mut state = self.state.lock().unwrap();
        let volume = found(&mut state, request.into_inner().volume.as_ref())?;
        if let Some(attachment) = volume.attachments.first() {
            return Err(Status::failed_precondition(format!("attached to {}", attachment.node)));
        }
        let id = volume.id.clone();
        state.volumes.remove(&id);
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn get_volume(
        &self,
        request: Request<GetVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        let mut state = self.state.lock().unwrap();
        found(&mut state, request.into_inner().volume.as_ref())
            .map(|volume| Response::new(volume.clone()))
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let request = request.into_inner();
        let state = self.state.lock().unwrap();
        let after = match request.starting_token.as_str() {
            "" => String::new(),
            token => token
                .strip_prefix("after-")
                .filter(|id| id.len() == 32)
                .ok_or_else(|| Status::aborted("no such token"))?
                .to_owned(),
        };
        // Pages of two at the most, so that a caller without a bound has to go on.
        let page = usize::try_from(request.max_entries).unwrap().clamp(1, 2);
        let page = if request.max_entries == 0 { 2 } else { page };
        let mut rest = state.volumes.range(after.clone()..).filter(|(id, _)| **id != after);
        let volumes: Vec<_> = rest.by_ref().take(page).map(|(_, one)| one.clone()).collect();
        let next_token = match (rest.next(), volumes.last()) {
            (Some(_), Some(last)) => format!("after-{}", last.id),
            _ => String::new(),
        };
        Ok(Response::new(ListVolumesResponse { volumes, next_token }))
    }

    async fn resize_volume(
        &self,
        request: Request<ResizeVolumeRequest>,
    ) -> Result<Response<Volume>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let volume = found(&mut state, request.volume.as_ref())?;
        if request.size_bytes > LARGEST {
            return Err(Status::out_of_range("a volume has 50 GiB at the most"));
        }
        volume.size_bytes = volume.size_bytes.max(request.size_bytes);
        Ok(Response::new(volume.clone()))
    }

    async fn publish_volume(
        &self,
        request: Request<PublishVolumeRequest>,
    ) -> Result<Response<Attachment>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let on_node = |volume: &&Volume| {
            volume.attachments.iter().any(|attachment| attachment.node == request.node)
        };
        let attached = state.volumes.values().filter(on_node).count();
        let socket = self.run_directory.join("nbd");
        let volume = found(&mut state, request.volume.as_ref())?;
        if !["node-a", "node-b"].contains(&request.node.as_str()) {
            return Err(Status::not_found(format!("no node {}", request.node)));
        }
        if let Some(present) = volume.attachments.first() {
            if present.node != request.node {
                return Err(Status::failed_precondition(format!("attached to {}", present.node)));
            }
            if present.usage != request.usage || present.read_only != request.read_only {
                return Err(Status::already_exists("attached for other use"));
            }
            return Ok(Response::new(present.clone()));
        }
        if attached >= 2 {
            return Err(Status::resource_exhausted("the node has its 2 volumes"));
        }
        let attachment = Attachment {
            volume_id: volume.id.clone(),
            node: request.node,
            read_only: request.read_only,
            phase: "Attached".into(),
            usage: request.usage,
            ..Default::default()
        };
        volume.attachments.push(attachment.clone());
        let socket = socket.join(format!("{}.sock", volume.id));
        let _ = std::fs::remove_file(&socket);
        let id = volume.id.clone();
        state.targets.insert(id, UnixListener::bind(socket).unwrap());
        Ok(Response::new(attachment))
    }

    async fn unpublish_volume(
        &self,
        request: Request<UnpublishVolumeRequest>,
    ) -> Result<Response<UnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let volume = found(&mut state, request.volume.as_ref())?;
        volume.attachments.retain(|one| !request.node.is_empty() && one.node != request.node);
        Ok(Response::new(UnpublishVolumeResponse {}))
    }

    async fn get_capacity(
        &self,
        request: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        let spec = request.into_inner().spec.unwrap_or_default();
        let state = self.state.lock().unwrap();
        let used: u64 = state
            .volumes
            .values()
            .map(|one| one.size_bytes * replicas(one.spec.as_ref().unwrap()))
            .sum();
        let elsewhere = |one: &Topology| one.segments.values().any(|zone| zone != "z1");
        let none =
            !spec.accessible_topology.is_empty() && spec.accessible_topology.iter().all(elsewhere);
        let available_bytes = if none { 0 } else { (POOL_BYTES - used) / replicas(&spec) };
        Ok(Response::new(GetCapacityResponse {
            available_bytes,
            maximum_volume_bytes: LARGEST,
            minimum_volume_bytes: SMALLEST,
        }))
    }

    async fn list_pools(
        &self,
        _: Request<ListPoolsRequest>,
    ) -> Result<Response<ListPoolsResponse>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
    async fn list_nodes(
        &self,
        _: Request<ListNodesRequest>,
    ) -> Result<Response<ListNodesResponse>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
    async fn list_replicas(
        &self,
        _: Request<ListReplicasRequest>,
    ) -> Result<Response<ListReplicasResponse>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
    type WatchEventsStream = tokio_stream::Empty<Result<Event, Status>>;
    async fn watch_events(
        &self,
        _: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
    async fn create_join_token(
        &self,
        _: Request<CreateJoinTokenRequest>,
    ) -> Result<Response<JoinToken>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
    async fn rotate_authority(
        &self,
        _: Request<RotateAuthorityRequest>,
    ) -> Result<Response<RotateAuthorityResponse>, Status> {
        Err(Status::unimplemented("not asked for by the face"))
    }
}
