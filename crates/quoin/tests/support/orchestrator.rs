//! An orchestrator of two clusters: calls of CSI and CSI-Addons over their sockets, and what its application wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use quoin_api::csi::controller_client::ControllerClient;
use quoin_api::csi::volume_capability::access_mode::Mode;
use quoin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use quoin_api::csi::*;
use quoin_api::csi_addons::replication::controller_client::ControllerClient as Replication;
use quoin_api::csi_addons::replication::get_volume_replication_info_response::Status as State;
use quoin_api::csi_addons::replication::replication_destination::Type as Destination;
use quoin_api::csi_addons::replication::replication_source::{
    Type, VolumeGroupSource, VolumeSource,
};
use quoin_api::csi_addons::replication::*;
use quoin_api::csi_addons::volumegroup::controller_client::ControllerClient as Groups;
use quoin_api::csi_addons::volumegroup::{
    CreateVolumeGroupRequest, DeleteVolumeGroupRequest, ModifyVolumeGroupMembershipRequest,
};
use quoin_identity::unix_channel;
use quoin_nbd::client::{Address, Client, ClientOptions};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::block;
use crate::common::dev::Dev;
use crate::common::{Place, Scratch};

pub const BLOCK: u64 = 4096;
pub const VOLUME_BYTES: u64 = 32 << 20;
/// Silence counts after 30 s, and a peer that comes back takes its time.
pub const BUDGET: Duration = Duration::from_secs(150);
/// Orchestrators ask again after a while.
pub const AGAIN: Duration = Duration::from_millis(200);

/// Newest version of each block that was written and acknowledged.
pub type Written = BTreeMap<u64, u64>;

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// The answer to ResyncVolume, with the presence of its field.
#[derive(Clone, PartialEq, prost::Message)]
struct ReadyOnTheWire {
    #[prost(bool, optional, tag = "1")]
    ready: Option<bool>,
}

/// One cluster, as orchestrators reach it.
pub struct Side<'a> {
    pub runtime: &'a tokio::runtime::Runtime,
    pub directory: PathBuf,
    node: String,
    addons: Channel,
    pub csi: ControllerClient<Channel>,
    replication: Replication<Channel>,
    groups: Groups<Channel>,
}

pub fn volume(id: &str) -> Option<ReplicationSource> {
    let source = VolumeSource { volume_id: id.to_owned() };
    Some(ReplicationSource { r#type: Some(Type::Volume(source)) })
}

pub fn group(id: &str) -> Option<ReplicationSource> {
    let source = VolumeGroupSource { volume_group_id: id.to_owned() };
    Some(ReplicationSource { r#type: Some(Type::Volumegroup(source)) })
}

pub fn class(on_live_peer: &str) -> std::collections::HashMap<String, String> {
    [("schedulingInterval", "10s"), ("onLivePeer", on_live_peer), ("mirroringMode", "snapshot")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

pub fn code<T>(answer: &Result<T, Status>) -> Code {
    answer.as_ref().err().map_or(Code::Ok, Status::code)
}

impl<'a> Side<'a> {
    pub fn of(runtime: &'a tokio::runtime::Runtime, directory: PathBuf, node: String) -> Self {
        let _context = runtime.enter();
        let csi = unix_channel(&directory.join("run/csi/csi.sock"));
        let addons = unix_channel(&directory.join("run/csi-addons/csi-addons.sock"));
        Self {
            runtime,
            directory,
            node,
            csi: ControllerClient::new(csi),
            replication: Replication::new(addons.clone()),
            groups: Groups::new(addons.clone()),
            addons,
        }
    }

    /// The epochs of the targets of the group's volumes.
    pub fn epochs(&self) -> [serde_json::Value; 2] {
        let person = crate::common::User {
            admin_socket: self.directory.join("run/admin.sock"),
            logs: self.directory.join("logs"),
        };
        ["a", "b"].map(|name| person.json(&["volume", "get", name])["epoch"].clone())
    }

    pub fn create(&self, name: &str, from: Option<&str>) -> String {
        let source = from.map(|id| VolumeContentSource {
            r#type: Some(volume_content_source::Type::Volume(
                volume_content_source::VolumeSource { volume_id: id.to_owned() },
            )),
        });
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange {
                required_bytes: VOLUME_BYTES as i64,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![capability()],
            parameters: [("replicas".to_owned(), "1".to_owned())].into(),
            volume_content_source: source,
            ..Default::default()
        };
        let made = retried("CreateVolume", || {
            self.runtime.block_on(self.csi.clone().create_volume(request.clone()))
        });
        made.into_inner().volume.unwrap().volume_id
    }

    pub fn publish(&self, id: &str) -> Result<(), Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: self.node.clone(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.runtime.block_on(self.csi.clone().controller_publish_volume(request)).map(drop)
    }

    pub fn unpublish(&self, id: &str) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: self.node.clone(),
            ..Default::default()
        };
        retried("ControllerUnpublishVolume", || {
            self.runtime.block_on(self.csi.clone().controller_unpublish_volume(request.clone()))
        });
    }

    pub fn delete(&self, id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        code(&self.runtime.block_on(self.csi.clone().delete_volume(request)))
    }

    /// Publishes a volume and connects as its application.
    pub fn open(&self, id: &str) -> Client {
        retried("ControllerPublishVolume", || self.publish(id));
        self.connect(id)
    }

    /// Connects to a volume that is published.
    pub fn connect(&self, id: &str) -> Client {
        let socket = self.directory.join(format!("run/nbd/{id}.sock"));
        let began = Instant::now();
        loop {
            match Client::connect(ClientOptions::new(Address::Unix(socket.clone()))) {
                Ok(client) => return client,
                Err(error) => assert!(began.elapsed() < BUDGET, "{id} is not served: {error}"),
            }
            std::thread::sleep(AGAIN);
        }
    }

    pub fn close(&self, id: &str, client: Client) {
        drop(client);
        self.unpublish(id);
    }

    pub fn enable(
        &self,
        source: &Option<ReplicationSource>,
        on_live_peer: &str,
    ) -> Result<(), Status> {
        self.enable_with(source, &class(on_live_peer))
    }

    pub fn enable_with(
        &self,
        source: &Option<ReplicationSource>,
        parameters: &std::collections::HashMap<String, String>,
    ) -> Result<(), Status> {
        let request = EnableVolumeReplicationRequest {
            replication_source: source.clone(),
            parameters: parameters.clone(),
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().enable_volume_replication(request)).map(drop)
    }

    pub fn promote(
        &self,
        source: &Option<ReplicationSource>,
        on_live_peer: &str,
        force: bool,
    ) -> Result<(), Status> {
        self.promote_with(source, &class(on_live_peer), force)
    }

    pub fn promote_with(
        &self,
        source: &Option<ReplicationSource>,
        parameters: &std::collections::HashMap<String, String>,
        force: bool,
    ) -> Result<(), Status> {
        let request = PromoteVolumeRequest {
            replication_source: source.clone(),
            parameters: parameters.clone(),
            force,
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().promote_volume(request)).map(drop)
    }

    /// One turn of the manager of today for what is to be primary.
    pub fn turn_primary(
        &self,
        source: &Option<ReplicationSource>,
        on_live_peer: &str,
    ) -> Result<(), Status> {
        self.enable(source, on_live_peer)?;
        match self.promote(source, on_live_peer, false) {
            // A failed precondition is answered by force in the same turn.
            Err(why) if why.code() == Code::FailedPrecondition => {
                self.promote(source, on_live_peer, true)
            }
            answer => answer,
        }
    }

    /// The same of the first edition, by `volume_id` alone.
    pub fn first_edition_turn_primary(&self, id: &str, on_live_peer: &str) -> Result<(), Status> {
        self.first_edition_enable(id, on_live_peer)?;
        let promote = |force| {
            let request = PromoteVolumeRequest {
                volume_id: id.to_owned(),
                parameters: class(on_live_peer),
                force,
                ..Default::default()
            };
            self.runtime.block_on(self.replication.clone().promote_volume(request)).map(drop)
        };
        match promote(false) {
            Err(why) if why.code() == Code::FailedPrecondition => promote(true),
            answer => answer,
        }
    }

    /// This call is made on every turn, in every state.
    pub fn first_edition_enable(&self, id: &str, on_live_peer: &str) -> Result<(), Status> {
        let request = EnableVolumeReplicationRequest {
            volume_id: id.to_owned(),
            parameters: class(on_live_peer),
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().enable_volume_replication(request)).map(drop)
    }

    pub fn demote(&self, source: &Option<ReplicationSource>, force: bool) -> Result<(), Status> {
        let request =
            DemoteVolumeRequest { replication_source: source.clone(), force, ..Default::default() };
        self.runtime.block_on(self.replication.clone().demote_volume(request)).map(drop)
    }

    /// Reads the answer as it is on the wire: a field that is absent there means that the copy is not ready.
    pub fn resync(&self, source: &Option<ReplicationSource>, force: bool) -> Result<bool, Status> {
        let request =
            ResyncVolumeRequest { replication_source: source.clone(), force, ..Default::default() };
        let mut wire = tonic::client::Grpc::new(self.addons.clone());
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(
            "/replication.Controller/ResyncVolume",
        );
        let codec = tonic_prost::ProstCodec::<ResyncVolumeRequest, ReadyOnTheWire>::default();
        let answer = self.runtime.block_on(async {
            wire.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            wire.unary(tonic::Request::new(request), path, codec).await
        })?;
        let ready = answer.into_inner().ready;
        assert_ne!(ready, Some(false), "what is not ready is not written");
        Ok(ready.unwrap_or(false))
    }

    /// Turns of the manager for what is to be secondary, until it is.
    pub fn turn_secondary(&self, source: &Option<ReplicationSource>, auto_resync: bool) {
        let began = Instant::now();
        loop {
            let demoted = self.demote(source, false);
            let ready = match &demoted {
                Ok(()) => self.resync(source, auto_resync),
                Err(why) => Err(why.clone()),
            };
            if ready.as_ref().is_ok_and(|ready| *ready) {
                return;
            }
            assert!(began.elapsed() < BUDGET, "{source:?} never follows: {ready:?}");
            std::thread::sleep(AGAIN);
        }
    }

    pub fn disable(&self, source: &Option<ReplicationSource>) -> Code {
        let request = DisableVolumeReplicationRequest {
            replication_source: source.clone(),
            ..Default::default()
        };
        code(&self.runtime.block_on(self.replication.clone().disable_volume_replication(request)))
    }

    pub fn info(
        &self,
        source: &Option<ReplicationSource>,
    ) -> Result<GetVolumeReplicationInfoResponse, Status> {
        let request = GetVolumeReplicationInfoRequest {
            replication_source: source.clone(),
            ..Default::default()
        };
        let answer =
            self.runtime.block_on(self.replication.clone().get_volume_replication_info(request));
        answer.map(tonic::Response::into_inner)
    }

    pub fn destination(&self, source: &Option<ReplicationSource>) -> Result<Destination, Status> {
        let request = GetReplicationDestinationInfoRequest {
            replication_source: source.clone(),
            ..Default::default()
        };
        let answer = self
            .runtime
            .block_on(self.replication.clone().get_replication_destination_info(request))?;
        Ok(answer.into_inner().replication_destination.unwrap().r#type.unwrap())
    }

    pub fn create_group(&self, name: &str, ids: &[&str]) -> String {
        let request = CreateVolumeGroupRequest {
            name: name.to_owned(),
            parameters: class("refuse"),
            volume_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        };
        let made = self.runtime.block_on(self.groups.clone().create_volume_group(request)).unwrap();
        made.into_inner().volume_group.unwrap().volume_group_id
    }

    /// Gives a group these members; returns how many it has then.
    pub fn modify_group(&self, id: &str, ids: &[&str]) -> Result<usize, Status> {
        let request = ModifyVolumeGroupMembershipRequest {
            volume_group_id: id.to_owned(),
            volume_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        };
        let answer =
            self.runtime.block_on(self.groups.clone().modify_volume_group_membership(request))?;
        Ok(answer.into_inner().volume_group.unwrap().volumes.len())
    }

    pub fn delete_group(&self, id: &str) -> Code {
        let request =
            DeleteVolumeGroupRequest { volume_group_id: id.to_owned(), ..Default::default() };
        code(&self.runtime.block_on(self.groups.clone().delete_volume_group(request)))
    }

    /// The clean-up of the old side after a move, in both orders; all of it again each time.
    pub fn clean_up(&self, group_id: &str, ids: &[&str]) {
        let source = group(group_id);
        for turn in 0..2 {
            if turn == 0 {
                assert_eq!(self.disable(&source), Code::Ok);
            }
            ids.iter().for_each(|id| assert_eq!(self.delete(id), Code::Ok));
            assert_eq!(self.modify_group(group_id, &[]).unwrap(), ids.len(), "all members stay");
            assert_eq!(self.delete_group(group_id), Code::Ok);
            assert_eq!(self.disable(&source), Code::Ok);
        }
        ids.iter().for_each(|id| {
            assert_eq!(code(&self.publish(id)), Code::FailedPrecondition, "it is a copy still");
        });
    }
}

pub fn capability() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
    }
}

/// Makes a call again while it is to be made again, as every orchestrator does.
pub fn retried<T>(what: &str, mut call: impl FnMut() -> Result<T, Status>) -> T {
    let began = Instant::now();
    loop {
        match call() {
            Ok(found) => return found,
            Err(why) => {
                let is_passing = matches!(
                    why.code(),
                    Code::Unavailable | Code::Aborted | Code::DeadlineExceeded
                );
                assert!(is_passing && began.elapsed() < BUDGET, "{what}: {why:?}");
            }
        }
        std::thread::sleep(AGAIN);
    }
}

/// Waits until a call has this code.
pub fn until<T: std::fmt::Debug>(
    what: &str,
    expected: Code,
    mut call: impl FnMut() -> Result<T, Status>,
) {
    let began = Instant::now();
    loop {
        let answer = call();
        if code(&answer) == expected {
            return;
        }
        assert!(began.elapsed() < BUDGET, "{what}: never {expected:?}, but {answer:?}");
        std::thread::sleep(AGAIN);
    }
}

pub fn write(client: &Client, written: &mut Written, from: u64, count: u64, version: u64) {
    for lba in (from..from + count).map(|at| at * 7 % (VOLUME_BYTES / BLOCK)) {
        client.write(lba * BLOCK, block(lba, version).into(), false).unwrap();
        written.insert(lba, version);
    }
    client.flush().unwrap();
}

/// Compares every byte; a block may have any of the versions that `may_have` gives for it.
#[track_caller]
pub fn assert_bytes(client: &Client, may_have: impl Fn(u64) -> Vec<Option<u64>>) {
    const PIECE: u64 = 1 << 20;
    for offset in (0..VOLUME_BYTES).step_by(PIECE as usize) {
        let found = client.read(offset, PIECE as u32).unwrap();
        for (at, found) in found.chunks(BLOCK as usize).enumerate() {
            let lba = offset / BLOCK + at as u64;
            let is_one = may_have(lba).into_iter().any(|version| match version {
                Some(version) => found == &block(lba, version)[..],
                None => found.iter().all(|byte| *byte == 0),
            });
            assert!(is_one, "block {lba} begins with {:?}", &found[..24]);
        }
    }
}

#[track_caller]
pub fn assert_holds(client: &Client, written: &Written) {
    assert_bytes(client, |lba| vec![written.get(&lba).copied()]);
}

pub fn now_s() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_secs() as i64
}

/// Waits until all that was acknowledged before this call is told to be on the other side.
pub fn wait_for_sync(side: &Side, source: &Option<ReplicationSource>) {
    let after = now_s();
    let began = Instant::now();
    loop {
        let info = side.info(source);
        if let Ok(info) = &info {
            assert!(info.last_sync_bytes >= 0);
            if info.last_sync_time.unwrap().seconds > after && info.status() == State::Healthy {
                return;
            }
        }
        assert!(began.elapsed() < BUDGET, "{source:?} is not synced: {info:?}");
        std::thread::sleep(AGAIN);
    }
}

/// Starts two clusters that are paired, of one pool each.
pub fn start<'a>(scratch: &Scratch, runtime: &'a tokio::runtime::Runtime) -> (Dev, [Side<'a>; 2]) {
    start_at(&Place::here(), scratch, runtime)
}

/// The same, in a network of their own.
pub fn start_at<'a>(
    place: &Place,
    scratch: &Scratch,
    runtime: &'a tokio::runtime::Runtime,
) -> (Dev, [Side<'a>; 2]) {
    let directory = scratch.cluster();
    let flags = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "2GiB"];
    let command = place.command(env!("CARGO_BIN_EXE_quoin"));
    let dev = Dev::start_by(command, &directory, &flags);
    dev.wait_for_line("A second cluster is up");
    let sides = [directory.clone(), directory.join("peer")].map(|directory| {
        let user = crate::common::User {
            admin_socket: directory.join("run/admin.sock"),
            logs: directory.join("logs"),
        };
        let nodes = user.json(&["node", "list"]);
        let node = nodes[0]["name"].as_str().unwrap().to_owned();
        Side::of(runtime, directory, node)
    });
    (dev, sides)
}
