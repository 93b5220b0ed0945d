//! Orders of calls of orchestrators of disaster recovery, over the sockets of two clusters.
//!
//! The manager of today enables and promotes what is to be primary and demotes the rest; that of the first edition
//! names volumes by `volume_id` and enables on every turn. After each move RamenDR cleans the old side up. Each byte of
//! each volume is compared with what was acknowledged.

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

use crate::common::Scratch;
use crate::common::dev::Dev;
use crate::mirrors::{LOST, hold_all};
use crate::support::block;

const BLOCK: u64 = 4096;
const VOLUME_BYTES: u64 = 32 << 20;
/// Silence counts after 30 s, and a peer that comes back takes its time.
const BUDGET: Duration = Duration::from_secs(150);
/// Orchestrators ask again after a while.
const AGAIN: Duration = Duration::from_millis(200);

/// Newest version of each block that was written and acknowledged.
type Written = BTreeMap<u64, u64>;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// The answer to ResyncVolume, with the presence of its field.
#[derive(Clone, PartialEq, prost::Message)]
struct ReadyOnTheWire {
    #[prost(bool, optional, tag = "1")]
    ready: Option<bool>,
}

/// One cluster, as orchestrators reach it.
struct Side<'a> {
    runtime: &'a tokio::runtime::Runtime,
    directory: PathBuf,
    node: String,
    addons: Channel,
    csi: ControllerClient<Channel>,
    replication: Replication<Channel>,
    groups: Groups<Channel>,
}

fn volume(id: &str) -> Option<ReplicationSource> {
    let source = VolumeSource { volume_id: id.to_owned() };
    Some(ReplicationSource { r#type: Some(Type::Volume(source)) })
}

fn group(id: &str) -> Option<ReplicationSource> {
    let source = VolumeGroupSource { volume_group_id: id.to_owned() };
    Some(ReplicationSource { r#type: Some(Type::Volumegroup(source)) })
}

fn class(on_live_peer: &str) -> std::collections::HashMap<String, String> {
    [("schedulingInterval", "10s"), ("onLivePeer", on_live_peer), ("mirroringMode", "snapshot")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into()
}

fn code<T>(answer: &Result<T, Status>) -> Code {
    answer.as_ref().err().map_or(Code::Ok, Status::code)
}

impl<'a> Side<'a> {
    fn of(runtime: &'a tokio::runtime::Runtime, directory: PathBuf, node: String) -> Self {
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
    fn epochs(&self) -> [serde_json::Value; 2] {
        let person = crate::common::User {
            admin_socket: self.directory.join("run/admin.sock"),
            logs: self.directory.join("logs"),
        };
        ["a", "b"].map(|name| person.json(&["volume", "get", name])["epoch"].clone())
    }

    fn create(&self, name: &str, from: Option<&str>) -> String {
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

    fn publish(&self, id: &str) -> Result<(), Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: self.node.clone(),
            volume_capability: Some(capability()),
            ..Default::default()
        };
        self.runtime.block_on(self.csi.clone().controller_publish_volume(request)).map(drop)
    }

    fn unpublish(&self, id: &str) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: self.node.clone(),
            ..Default::default()
        };
        retried("ControllerUnpublishVolume", || {
            self.runtime.block_on(self.csi.clone().controller_unpublish_volume(request.clone()))
        });
    }

    fn delete(&self, id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        code(&self.runtime.block_on(self.csi.clone().delete_volume(request)))
    }

    /// Publishes a volume and connects as its application.
    fn open(&self, id: &str) -> Client {
        retried("ControllerPublishVolume", || self.publish(id));
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

    fn close(&self, id: &str, client: Client) {
        drop(client);
        self.unpublish(id);
    }

    fn enable(&self, source: &Option<ReplicationSource>, on_live_peer: &str) -> Result<(), Status> {
        let request = EnableVolumeReplicationRequest {
            replication_source: source.clone(),
            parameters: class(on_live_peer),
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().enable_volume_replication(request)).map(drop)
    }

    fn promote(
        &self,
        source: &Option<ReplicationSource>,
        on_live_peer: &str,
        force: bool,
    ) -> Result<(), Status> {
        let request = PromoteVolumeRequest {
            replication_source: source.clone(),
            parameters: class(on_live_peer),
            force,
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().promote_volume(request)).map(drop)
    }

    /// One turn of the manager of today for what is to be primary.
    fn turn_primary(
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
    fn first_edition_turn_primary(&self, id: &str, on_live_peer: &str) -> Result<(), Status> {
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
    fn first_edition_enable(&self, id: &str, on_live_peer: &str) -> Result<(), Status> {
        let request = EnableVolumeReplicationRequest {
            volume_id: id.to_owned(),
            parameters: class(on_live_peer),
            ..Default::default()
        };
        self.runtime.block_on(self.replication.clone().enable_volume_replication(request)).map(drop)
    }

    fn demote(&self, source: &Option<ReplicationSource>, force: bool) -> Result<(), Status> {
        let request =
            DemoteVolumeRequest { replication_source: source.clone(), force, ..Default::default() };
        self.runtime.block_on(self.replication.clone().demote_volume(request)).map(drop)
    }

    /// Reads the answer as it is on the wire: a field that is absent there means that the copy is not ready.
    fn resync(&self, source: &Option<ReplicationSource>, force: bool) -> Result<bool, Status> {
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
    fn turn_secondary(&self, source: &Option<ReplicationSource>, auto_resync: bool) {
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

    fn disable(&self, source: &Option<ReplicationSource>) -> Code {
        let request = DisableVolumeReplicationRequest {
            replication_source: source.clone(),
            ..Default::default()
        };
        code(&self.runtime.block_on(self.replication.clone().disable_volume_replication(request)))
    }

    fn info(
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

    fn destination(&self, source: &Option<ReplicationSource>) -> Result<Destination, Status> {
        let request = GetReplicationDestinationInfoRequest {
            replication_source: source.clone(),
            ..Default::default()
        };
        let answer = self
            .runtime
            .block_on(self.replication.clone().get_replication_destination_info(request))?;
        Ok(answer.into_inner().replication_destination.unwrap().r#type.unwrap())
    }

    fn create_group(&self, name: &str, ids: &[&str]) -> String {
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
    fn modify_group(&self, id: &str, ids: &[&str]) -> Result<usize, Status> {
        let request = ModifyVolumeGroupMembershipRequest {
            volume_group_id: id.to_owned(),
            volume_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..Default::default()
        };
        let answer =
            self.runtime.block_on(self.groups.clone().modify_volume_group_membership(request))?;
        Ok(answer.into_inner().volume_group.unwrap().volumes.len())
    }

    fn delete_group(&self, id: &str) -> Code {
        let request =
            DeleteVolumeGroupRequest { volume_group_id: id.to_owned(), ..Default::default() };
        code(&self.runtime.block_on(self.groups.clone().delete_volume_group(request)))
    }

    /// The clean-up of the old side after a move, in both orders; all of it again each time.
    fn clean_up(&self, group_id: &str, ids: &[&str]) {
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

fn capability() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
    }
}

/// Makes a call again while it is to be made again, as every orchestrator does.
fn retried<T>(what: &str, mut call: impl FnMut() -> Result<T, Status>) -> T {
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
fn until<T: std::fmt::Debug>(
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

fn write(client: &Client, written: &mut Written, from: u64, count: u64, version: u64) {
    for lba in (from..from + count).map(|at| at * 7 % (VOLUME_BYTES / BLOCK)) {
        client.write(lba * BLOCK, block(lba, version).into(), false).unwrap();
        written.insert(lba, version);
    }
    client.flush().unwrap();
}

/// Compares every byte; a block may have any of the versions that `may_have` gives for it.
#[track_caller]
fn assert_bytes(client: &Client, may_have: impl Fn(u64) -> Vec<Option<u64>>) {
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
fn assert_holds(client: &Client, written: &Written) {
    assert_bytes(client, |lba| vec![written.get(&lba).copied()]);
}

fn now_s() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_secs() as i64
}

/// Waits until all that was acknowledged before this call is told to be on the other side.
fn wait_for_sync(side: &Side, source: &Option<ReplicationSource>) {
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

/// Application over a group of two volumes and one volume alone.
struct Application {
    a: String,
    b: String,
    group: String,
    alone: String,
    written: BTreeMap<String, Written>,
}

impl Application {
    fn ids(&self) -> [&str; 2] {
        [&self.a, &self.b]
    }

    fn write(&mut self, id: &str, client: &Client, from: u64, version: u64) {
        write(client, self.written.entry(id.to_owned()).or_default(), from, 200, version);
    }
}

/// Proves REPL-ENABLE-18, REPL-PROMOTE-20, REPL-PROMOTE-22, REPL-PROMOTE-23, REPL-DEMOTE-19, REPL-RESYNC-12,
/// REPL-INFO-09, REPL-INFO-22, REPL-DEST-09, REPL-COPY-01, REPL-COPY-02, REPL-COPY-05, REPL1-PROMOTE-01,
/// REPL1-RESYNC-13, ADDONS-GROUP-11, ADDONS-GROUP-22.
#[test]
fn orchestrators_deploy_fail_over_clean_up_and_come_back_and_every_byte_is_there() {
    let scratch = Scratch::new("orchestrators");
    let directory = scratch.cluster();
    let flags = ["--peer", "--no-attach", "--pools", "1", "--pool-size", "2GiB"];
    let dev = Dev::start(&directory, &flags);
    dev.wait_for_line("A second cluster is up");
    let runtime = runtime();
    let node = |side: &Path| {
        let nodes = crate::common::User {
            admin_socket: side.join("run/admin.sock"),
            logs: side.join("logs"),
        }
        .json(&["node", "list"]);
        nodes[0]["name"].as_str().unwrap().to_owned()
    };
    let first = Side::of(&runtime, directory.clone(), node(&directory));
    let there = directory.join("peer");
    let second = Side::of(&runtime, there.clone(), node(&there));
    let began = Instant::now();
    let step = |what: &str| println!("{:5.1} s  {what}", began.elapsed().as_secs_f64());

    step("deployed");
    let mut application = deploy(&first, &second);
    step("a volume alone moves while both live");
    take_over_and_relocate(&first, &second, &mut application);
    step("the first cluster is lost");
    let more = fail_over(&first, &second, &mut application);
    step("it is back");
    old_side_comes_back(&first, &second, &application, &more);
    step("failback");
    fail_back(&first, &second, &mut application);
    step("the application is deleted");
    delete_application(&first, &second, &application);
    step("done");
    dev.stop();
}

fn deploy(first: &Side, second: &Side) -> Application {
    let [a, b, alone] = ["a", "b", "alone"].map(|name| first.create(name, None));
    let group_id = first.create_group("vgr-1", &[&a, &b]);
    let source = group(&group_id);
    let mut application = Application { a, b, group: group_id, alone, written: BTreeMap::new() };
    let Application { a, b, alone, .. } = &application;
    let (a, b, alone) = (a.clone(), b.clone(), alone.clone());
    for id in [&a, &b, &alone] {
        let client = first.open(id);
        application.write(id, &client, 0, 1);
        first.close(id, client);
    }
    // Asked for right after the group is made, before anything is enabled.
    assert_eq!(code(&first.destination(&source)), Code::FailedPrecondition);
    retried("turn", || first.turn_primary(&source, "refuse"));
    let Destination::Volumegroup(found) = first.destination(&source).unwrap() else {
        panic!("it is no group")
    };
    assert_eq!(found.volume_group_id, application.group);
    assert_eq!(found.volume_ids, [&a, &b].map(|id| (id.clone(), id.clone())).into());
    for _ in 0..3 {
        retried("turn", || first.first_edition_turn_primary(&alone, "takeOver"));
    }
    // The id is the same one, which the driver of the other side accepts.
    for id in [&a, &b, &alone] {
        let request = ControllerGetVolumeRequest { volume_id: id.clone() };
        let found = second.runtime.block_on(second.csi.clone().controller_get_volume(request));
        assert_eq!(&found.unwrap().into_inner().volume.unwrap().volume_id, id);
    }
    wait_for_sync(first, &source);
    wait_for_sync(first, &volume(&alone));
    give_the_present_members_again(first, &mut application);
    assert_eq!(code(&second.info(&source)), Code::FailedPrecondition, "it is a copy");
    assert_eq!(second.destination(&source).unwrap(), Destination::Volumegroup(found));

    // A drill: a clone of a copy has its last complete point.
    let drill = second.create("drill", Some(&a));
    let client = second.open(&drill);
    assert_holds(&client, &application.written[&a]);
    second.close(&drill, client);
    assert_eq!(second.delete(&drill), Code::Ok);

    // An idle group is known to be in sync at later moments.
    let before = first.info(&source).unwrap().last_sync_time.unwrap();
    let began = Instant::now();
    while first.info(&source).unwrap().last_sync_time.unwrap().seconds <= before.seconds {
        assert!(began.elapsed() < Duration::from_secs(20), "two intervals are over");
        std::thread::sleep(AGAIN);
    }
    // A copy is not promoted beside a primary, and force does not help.
    assert_eq!(code(&second.promote(&source, "refuse", false)), Code::Aborted);
    assert_eq!(code(&second.promote(&source, "refuse", true)), Code::Aborted);
    application
}

/// The members that a group has are asked for again and again, beside writes and exchanges.
fn give_the_present_members_again(first: &Side, application: &mut Application) {
    let source = group(&application.group);
    let [a, b] = application.ids().map(str::to_owned);
    let client = first.open(&a);
    let before = first.epochs();
    let destination = first.destination(&source).unwrap();
    let synced = first.info(&source).unwrap().last_sync_time.unwrap();
    let (mut version, mut longest) = (10, Duration::ZERO);
    let began = Instant::now();
    // Longer than an interval of the exchanges.
    while began.elapsed() < Duration::from_secs(12) {
        let order = if version % 2 == 0 { [a.as_str(), &b] } else { [b.as_str(), &a] };
        let answer = std::thread::scope(|scope| {
            let call = scope.spawn(|| first.modify_group(&application.group, &order));
            while !call.is_finished() {
                let began = Instant::now();
                client.write(0, block(0, version).into(), true).unwrap();
                longest = longest.max(began.elapsed());
            }
            call.join().unwrap()
        });
        assert_eq!(answer.unwrap(), 2);
        let info = first.info(&source).unwrap();
        assert_ne!(info.status(), State::Error, "{info:?}");
        application.written.get_mut(&a).unwrap().insert(0, version);
        version += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("the longest write beside {} calls took {longest:?}", version - 10);
    wait_for_sync(first, &source);
    let info = first.info(&source).unwrap();
    assert!(info.last_sync_time.unwrap().seconds > synced.seconds, "the exchanges go on");
    assert!(info.last_sync_bytes < VOLUME_BYTES as i64 / 8, "with what changed alone: {info:?}");
    assert_eq!(first.epochs(), before, "no target opened a volume again");
    assert_eq!(first.destination(&source).unwrap(), destination);
    first.close(&a, client);
}

/// With `takeOver` a failover beside a primary that lives loses nothing; then the volume is relocated.
fn take_over_and_relocate(first: &Side, second: &Side, application: &mut Application) {
    let id = application.alone.clone();
    let source = volume(&id);
    let client = first.open(&id);
    application.write(&id, &client, 100, 2);
    assert_eq!(code(&first.demote(&source, false)), Code::FailedPrecondition, "it is published");
    assert_eq!(code(&second.promote(&source, "takeOver", false)), Code::FailedPrecondition);
    retried("turn", || second.first_edition_turn_primary(&id, "takeOver"));
    drop(client);
    let there = second.open(&id);
    assert_holds(&there, &application.written[&id]);
    // The old side is cleaned up, and follows.
    first.unpublish(&id);
    assert_eq!(first.disable(&source), Code::Ok);
    assert_eq!(first.delete(&id), Code::Ok);
    assert_eq!(code(&first.publish(&id)), Code::FailedPrecondition);
    application.write(&id, &there, 250, 3);
    second.close(&id, there);

    first.turn_secondary(&source, true);
    retried("DemoteVolume", || second.demote(&source, false));
    assert_eq!(code(&second.demote(&source, false)), Code::Ok, "again");
    retried("turn", || first.first_edition_turn_primary(&id, "takeOver"));
    let here = first.open(&id);
    assert_holds(&here, &application.written[&id]);
    first.close(&id, here);
    second.turn_secondary(&source, true);
    assert_eq!(second.disable(&source), Code::Ok);
    assert_eq!(second.delete(&id), Code::Ok);
    // A demotion is forced on a volume that is published, and loses nothing.
    let here = first.open(&id);
    application.write(&id, &here, 300, 4);
    retried("DemoteVolume", || first.demote(&source, true));
    drop(here);
    retried("turn", || second.turn_primary(&source, "takeOver"));
    let there = second.open(&id);
    assert_holds(&there, &application.written[&id]);
    second.close(&id, there);
    first.turn_secondary(&source, true);
}

/// Returns what was acknowledged on the first side before it was lost.
fn fail_over(
    first: &Side,
    second: &Side,
    application: &mut Application,
) -> BTreeMap<String, Written> {
    let source = group(&application.group);
    let ids = application.ids().map(str::to_owned);
    let clients = ids.clone().map(|id| (first.open(&id), id));
    for (client, id) in &clients {
        application.write(id, client, 400, 5);
    }
    wait_for_sync(first, &source);
    let synced = application.written.clone();
    for (client, id) in &clients {
        application.write(id, client, 500, 6);
    }
    let more = application.written.clone();
    hold_all(&first.directory, &LOST, true);
    drop(clients);
    let refused = second.promote(&source, "refuse", true);
    assert!(matches!(code(&refused), Code::Aborted | Code::Unavailable), "{refused:?}");
    until("it is silent", Code::FailedPrecondition, || second.promote(&source, "refuse", false));
    retried("turn", || second.turn_primary(&source, "refuse"));
    assert_eq!(code(&second.promote(&source, "refuse", false)), Code::Ok, "again");
    assert_eq!(code(&second.enable(&source, "refuse")), Code::Ok, "with the peer away");
    assert!(second.destination(&source).is_ok(), "with the peer away");
    for id in &ids {
        let there = second.open(id);
        let (before, after) = (&synced[id], &more[id]);
        assert_bytes(&there, |lba| vec![before.get(&lba).copied(), after.get(&lba).copied()]);
        // Writes that were not shipped are not there.
        let written = application.written.get_mut(id).unwrap();
        for (lba, version) in after {
            let found = there.read(lba * BLOCK, BLOCK as u32).unwrap();
            if found[..] != block(*lba, *version)[..] {
                match before.get(lba) {
                    Some(version) => drop(written.insert(*lba, *version)),
                    None => drop(written.remove(lba)),
                }
            }
        }
        write(&there, written, 600, 200, 7);
        assert_holds(&there, written);
        second.close(id, there);
    }
    more
}

fn old_side_comes_back(
    first: &Side,
    second: &Side,
    application: &Application,
    more: &BTreeMap<String, Written>,
) {
    let source = group(&application.group);
    hold_all(&first.directory, &LOST, false);
    let ids = application.ids().map(str::to_owned);
    // Both are primary, and both say so. The one that was promoted has no sync of its own to tell of.
    let began = Instant::now();
    loop {
        let told = [first, second].map(|side| match side.info(&source) {
            Ok(info) => info.status() == State::Error,
            Err(why) => why.code() == Code::NotFound && why.message().contains("split brain"),
        });
        if told == [true, true] {
            break;
        }
        assert!(began.elapsed() < BUDGET, "{:?} {:?}", first.info(&source), second.info(&source));
        std::thread::sleep(AGAIN);
    }
    // The old side has what its applications were told, until it is demoted.
    for id in &ids {
        let here = first.open(id);
        assert_holds(&here, &more[id]);
        write(&here, &mut more[id].clone(), 0, 100, 9);
        first.close(id, here);
        // Nothing of the old side reaches the one that was promoted.
        let there = second.open(id);
        assert_holds(&there, &application.written[id]);
        second.close(id, there);
    }
    retried("DemoteVolume", || first.demote(&source, false));
    // Diverged: nothing is discarded without force.
    let began = Instant::now();
    loop {
        assert!(!first.resync(&source, false).unwrap_or(false));
        if code(&first.promote(&source, "refuse", true)) == Code::Aborted {
            break;
        }
        assert!(began.elapsed() < BUDGET, "it has not diverged");
        std::thread::sleep(AGAIN);
    }
    first.clean_up(&application.group, &application.ids());
    assert!(!first.resync(&source, false).unwrap(), "its data stay");
    assert_eq!(code(&first.demote(&source, false)), Code::Ok);
    first.turn_secondary(&source, true);
    first.clean_up(&application.group, &application.ids());
    // Again: what is sent meanwhile is waited for.
    first.turn_secondary(&source, true);
    wait_for_sync(second, &source);
}

fn fail_back(first: &Side, second: &Side, application: &mut Application) {
    let source = group(&application.group);
    let ids = application.ids().map(str::to_owned);
    for id in &ids {
        let there = second.open(id);
        application.write(id, &there, 700, 8);
        second.close(id, there);
    }
    retried("DemoteVolume", || second.demote(&source, false));
    retried("turn", || first.turn_primary(&source, "refuse"));
    // The orchestrator of this side asks for the members that it restored.
    let restored = first.modify_group(&application.group, &application.ids()).unwrap();
    assert_eq!(restored, 2);
    for id in &ids {
        let here = first.open(id);
        assert_holds(&here, &application.written[id]);
        first.close(id, here);
    }
    second.turn_secondary(&source, true);
    second.clean_up(&application.group, &application.ids());
}

fn delete_application(first: &Side, second: &Side, application: &Application) {
    let source = group(&application.group);
    assert_eq!(first.delete(&application.a), Code::FailedPrecondition, "it is replicated");
    assert_eq!(first.delete_group(&application.group), Code::FailedPrecondition);
    for _ in 0..2 {
        assert_eq!(first.disable(&source), Code::Ok);
    }
    assert_eq!(first.modify_group(&application.group, &[]).unwrap(), 0);
    assert_eq!(first.delete_group(&application.group), Code::Ok);
    for id in application.ids() {
        let here = first.open(id);
        assert_holds(&here, &application.written[id]);
        first.close(id, here);
        assert_eq!(first.delete(id), Code::Ok);
    }
    // The copies are orphans, which only a person or this cluster's own orchestrator deletes.
    until("it is an orphan", Code::FailedPrecondition, || second.enable(&source, "refuse"));
    retried("PromoteVolume", || second.promote(&source, "refuse", false));
    for id in application.ids() {
        let there = second.open(id);
        assert_holds(&there, &application.written[id]);
        second.close(id, there);
    }
    assert_eq!(second.modify_group(&application.group, &[]).unwrap(), 0);
    assert_eq!(second.delete_group(&application.group), Code::Ok);
    application.ids().iter().for_each(|id| assert_eq!(second.delete(id), Code::Ok));
}
