//! The VolumeGroup service over a real controller.

use std::collections::BTreeSet;

use quoin_api::csi::{DeleteVolumeRequest, GetCapacityRequest};
use quoin_api::csi_addons::volumegroup::controller_client::ControllerClient as Client;
use quoin_api::csi_addons::volumegroup::*;
use quoin_csi::{Callers, Mode};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::common::*;

/// A group with so many volumes is the largest.
const MEMBERS_MAX: usize = 128;

struct Groups {
    world: World,
    client: Client<Channel>,
}

impl Groups {
    async fn start() -> Self {
        let world = World::start().await;
        let client = Client::new(world.addons.clone());
        Self { world, client }
    }

    async fn volume(&mut self, name: &str) -> String {
        self.world.create(name, 64 * MIB).await.volume_id
    }

    async fn create(
        &mut self,
        name: &str,
        volume_ids: &[&str],
        parameters: &[(&str, &str)],
    ) -> Result<Response<CreateVolumeGroupResponse>, Status> {
        let request = CreateVolumeGroupRequest {
            name: name.to_owned(),
            volume_ids: texts(volume_ids),
            parameters: map(parameters),
            ..Default::default()
        };
        self.client.create_volume_group(request).await
    }

    async fn made(&mut self, name: &str, volume_ids: &[&str]) -> VolumeGroup {
        self.create(name, volume_ids, &[]).await.unwrap().into_inner().volume_group.unwrap()
    }

    async fn modify(
        &mut self,
        id: &str,
        volume_ids: &[&str],
    ) -> Result<Response<ModifyVolumeGroupMembershipResponse>, Status> {
        let request = ModifyVolumeGroupMembershipRequest {
            volume_group_id: id.to_owned(),
            volume_ids: texts(volume_ids),
            ..Default::default()
        };
        self.client.modify_volume_group_membership(request).await
    }

    async fn delete(&mut self, id: &str) -> Code {
        let request =
            DeleteVolumeGroupRequest { volume_group_id: id.to_owned(), ..Default::default() };
        code(&self.client.delete_volume_group(request).await)
    }

    async fn get(
        &mut self,
        id: &str,
    ) -> Result<Response<ControllerGetVolumeGroupResponse>, Status> {
        let request = ControllerGetVolumeGroupRequest {
            volume_group_id: id.to_owned(),
            ..Default::default()
        };
        self.client.controller_get_volume_group(request).await
    }

    async fn found(&mut self, id: &str) -> VolumeGroup {
        self.get(id).await.unwrap().into_inner().volume_group.unwrap()
    }

    async fn page(
        &mut self,
        max_entries: i32,
        token: &str,
    ) -> Result<(Vec<VolumeGroup>, String), Status> {
        let request = ListVolumeGroupsRequest {
            max_entries,
            starting_token: token.to_owned(),
            ..Default::default()
        };
        let page = self.client.list_volume_groups(request).await?.into_inner();
        let groups = page.entries.into_iter().map(|entry| entry.volume_group.unwrap());
        Ok((groups.collect(), page.next_token))
    }

    async fn delete_volume(&mut self, id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        code(&self.world.controller.delete_volume(request).await)
    }
}

fn texts(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

fn members(group: &VolumeGroup) -> BTreeSet<String> {
    let ids: Vec<String> = group.volumes.iter().map(|volume| volume.volume_id.clone()).collect();
    let set: BTreeSet<String> = ids.iter().cloned().collect();
    assert_eq!(ids.len(), set.len(), "a member is named twice");
    set
}

fn set(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

/// Proves ADDONS-GROUP-02, ADDONS-GROUP-03, ADDONS-GROUP-04, ADDONS-GROUP-05, ADDONS-GROUP-06, ADDONS-GROUP-07,
/// ADDONS-GROUP-08.
#[tokio::test]
async fn a_group_is_made_once_of_exactly_the_members_that_are_asked_for() {
    let mut groups = Groups::start().await;
    let (a, b, c) = (groups.volume("a").await, groups.volume("b").await, groups.volume("c").await);
    for name in ["", &"x".repeat(129)] {
        assert_eq!(code(&groups.create(name, &[], &[]).await), Code::InvalidArgument);
    }
    for parameters in
        [("unheardOf", "x"), ("schedulingInterval", "0m"), ("mirroringMode", "journal")]
    {
        let refused = groups.create("g", &[&a], &[parameters]).await;
        assert_eq!(code(&refused), Code::InvalidArgument, "{parameters:?}");
    }
    let strange = "0123456789abcdef0123456789abcdef";
    for unknown in [UNKNOWN, strange] {
        assert_eq!(code(&groups.create("g", &[&a, unknown], &[]).await), Code::NotFound);
    }
    assert_eq!(groups.page(0, "").await.unwrap().0.len(), 0, "no group is made");

    let empty = groups.made("empty", &[]).await;
    assert!(empty.volumes.is_empty() && !empty.volume_group_id.is_empty());
    let class = [("schedulingInterval", "1m"), ("peer", "west"), ("clusterID", "x")];
    let made = groups.create("shop", &[&b, &a, &b], &class).await.unwrap().into_inner();
    let made = made.volume_group.unwrap();
    assert_eq!(members(&made), set(&[&a, &b]));
    // Of the same name: as it is, whatever is asked for.
    for (ids, class) in [
        (vec![a.as_str(), &b], vec![]),
        (vec![&c], vec![("schedulingInterval", "5m")]),
        (vec![], vec![]),
    ] {
        let again = groups.create("shop", &ids, &class).await.unwrap().into_inner();
        assert_eq!(again.volume_group.unwrap(), made);
    }
    let other = groups.create("shop", &[&a], &[("volumeGroupNamePrefix", "dr-")]).await;
    assert_eq!(code(&other), Code::AlreadyExists);
    let named = groups.create("named", &[&c], &[("volumeGroupNamePrefix", "dr-")]).await.unwrap();
    let named = named.into_inner().volume_group.unwrap();
    let again = groups.create("named", &[], &[("volumeGroupNamePrefix", "dr-")]).await.unwrap();
    assert_eq!(again.into_inner().volume_group.unwrap(), named);

    let taken = groups.create("third", &[&c, &a], &[]).await;
    assert_eq!(code(&taken), Code::FailedPrecondition);
    assert_eq!(groups.page(0, "").await.unwrap().0.len(), 3);
    assert_eq!(members(&groups.found(&made.volume_group_id).await), set(&[&a, &b]));
}

/// Proves ADDONS-GROUP-09, ADDONS-GROUP-10, ADDONS-GROUP-12, ADDONS-GROUP-13, ADDONS-GROUP-14,
/// ADDONS-GROUP-15, ADDONS-GROUP-16, ADDONS-GROUP-17, ADDONS-GROUP-18, ADDONS-GROUP-19.
#[tokio::test]
async fn members_are_changed_as_a_whole_and_no_call_of_a_group_deletes_a_volume() {
    let mut groups = Groups::start().await;
    let (a, b, c) = (groups.volume("a").await, groups.volume("b").await, groups.volume("c").await);
    let id = groups.made("shop", &[&a, &b]).await.volume_group_id;
    let other = groups.made("other", &[&c]).await.volume_group_id;
    let strange = "0123456789abcdef0123456789abcdef";

    assert_eq!(code(&groups.modify("", &[&a]).await), Code::InvalidArgument);
    assert_eq!(groups.delete("").await, Code::InvalidArgument);
    assert_eq!(code(&groups.get("").await), Code::InvalidArgument);
    for unknown in [UNKNOWN, strange] {
        assert_eq!(code(&groups.modify(unknown, &[&a]).await), Code::NotFound);
        assert_eq!(code(&groups.modify(&id, &[&a, unknown]).await), Code::NotFound);
        assert_eq!(code(&groups.get(unknown).await), Code::NotFound);
        assert_eq!(groups.delete(unknown).await, Code::Ok);
    }
    assert_eq!(code(&groups.modify(&id, &[&a, &c]).await), Code::InvalidArgument);
    assert_eq!(members(&groups.found(&id).await), set(&[&a, &b]));

    let found = groups.found(&id).await;
    let again = groups.modify(&id, &[&b, &a, &a]).await.unwrap().into_inner();
    assert_eq!(members(&again.volume_group.unwrap()), members(&found));
    for volume in &found.volumes {
        assert_eq!(volume.capacity_bytes, 64 * MIB);
        assert!(!volume.volume_context.is_empty(), "it is the whole message");
    }
    // A member is deleted once it is out.
    assert_eq!(groups.delete_volume(&a).await, Code::FailedPrecondition);
    assert_eq!(groups.delete(&id).await, Code::FailedPrecondition, "it has members");
    assert_eq!(members(&groups.found(&id).await), set(&[&a, &b]));
    let fewer = groups.modify(&id, &[&b]).await.unwrap().into_inner();
    assert_eq!(members(&fewer.volume_group.unwrap()), set(&[&b]));
    assert_eq!(groups.world.cluster.volumes().await.len(), 3, "it lives on");
    assert_eq!(groups.delete_volume(&a).await, Code::Ok);
    let none = groups.modify(&id, &[]).await.unwrap().into_inner();
    assert!(none.volume_group.unwrap().volumes.is_empty());
    let moved = groups.modify(&other, &[&b, &c]).await.unwrap().into_inner();
    assert_eq!(members(&moved.volume_group.unwrap()), set(&[&b, &c]));
    for _ in 0..2 {
        assert_eq!(groups.delete(&id).await, Code::Ok);
    }
    assert_eq!(code(&groups.get(&id).await), Code::NotFound);
    assert_eq!(groups.world.cluster.volumes().await.len(), 2);

    // The largest group.
    let mut ids = vec![b.clone(), c.clone()];
    while ids.len() <= MEMBERS_MAX {
        ids.push(groups.volume(&format!("v{}", ids.len())).await);
    }
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    assert_eq!(code(&groups.modify(&other, &ids).await), Code::ResourceExhausted);
    assert_eq!(members(&groups.found(&other).await), set(&[&b, &c]));
    let most = groups.modify(&other, &ids[..MEMBERS_MAX]).await.unwrap().into_inner();
    assert_eq!(most.volume_group.unwrap().volumes.len(), MEMBERS_MAX);
}

/// Proves ADDONS-GROUP-20, ADDONS-GROUP-21.
#[tokio::test]
async fn groups_are_listed_in_pages_and_keep_their_ids_over_a_restart() {
    let mut groups = Groups::start().await;
    let a = groups.volume("a").await;
    let mut made = Vec::new();
    for number in 0..9 {
        let members: &[&str] = if number == 4 { &[&a] } else { &[] };
        made.push(groups.made(&format!("g{number}"), members).await);
    }
    let ids: BTreeSet<&String> = made.iter().map(|group| &group.volume_group_id).collect();
    assert_eq!(ids.len(), 9, "each has its own");
    assert_eq!(groups.page(-1, "").await.unwrap_err().code(), Code::InvalidArgument);
    let foreign = format!("{}{}", made[0].volume_group_id, "0".repeat(16));
    for token in ["x", made[0].volume_group_id.as_str(), &foreign] {
        assert_eq!(groups.page(2, token).await.unwrap_err().code(), Code::Aborted);
    }
    for round in 0..2 {
        let (all, next) = groups.page(0, "").await.unwrap();
        assert_eq!((all.len(), next.as_str()), (9, ""));
        let (mut paged, mut token) = (Vec::new(), String::new());
        loop {
            let (page, next) = groups.page(4, &token).await.unwrap();
            assert!(page.len() <= 4);
            paged.extend(page);
            if next.is_empty() {
                break;
            }
            token = next;
        }
        assert_eq!(paged, all);
        for group in &made {
            assert!(all.contains(group), "{group:?}");
        }
        if round == 0 {
            groups.world.stop_control().await;
            groups.world.start_control().await;
            while groups.world.controller.get_capacity(GetCapacityRequest::default()).await.is_err()
            {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
    }
}

/// Proves ADDONS-GROUP-01.
#[tokio::test]
async fn groups_are_of_the_controller_and_their_callers_are_known() {
    let node_only = World::start_in(Mode::NODE).await;
    let mut groups = Groups { client: Client::new(node_only.addons.clone()), world: node_only };
    let codes = [
        code(&groups.create("", &[], &[]).await),
        code(&groups.modify("", &[]).await),
        groups.delete("").await,
        code(&groups.get("").await),
        groups.page(-1, "").await.unwrap_err().code(),
    ];
    assert_eq!(codes, [Code::Unimplemented; 5]);

    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("callers.yaml");
    std::fs::write(&list, "callers: []").unwrap();
    let world = World::start_with(Mode::CONTROLLER, Callers::read(&list).unwrap()).await;
    let told = crate::addons::capabilities(&world.addons).await;
    for kind in [
        "VOLUME_GROUP",
        "LIMIT_VOLUME_TO_ONE_VOLUME_GROUP",
        "DO_NOT_ALLOW_VG_TO_DELETE_VOLUMES",
        "MODIFY_VOLUME_GROUP",
        "GET_VOLUME_GROUP",
        "LIST_VOLUME_GROUPS",
    ] {
        assert!(told.iter().any(|one| one == kind), "{told:?}");
    }
    let mut groups = Groups { client: Client::new(world.addons.clone()), world };
    let codes = [
        code(&groups.create("g", &[], &[]).await),
        code(&groups.modify("g", &[]).await),
        groups.delete("g").await,
        code(&groups.get("g").await),
        groups.page(0, "").await.unwrap_err().code(),
    ];
    assert_eq!(codes, [Code::Unauthenticated; 5]);
}
