//! `quoin group …`: named sets of volumes, each of which is mirrored as one.

use anyhow::Result;
use clap::{Args, Subcommand};
use quoin_api::control::{
    CreateVolumeGroupRequest, DeleteVolumeGroupRequest, GetVolumeGroupRequest,
    ListVolumeGroupsRequest, ModifyVolumeGroupRequest, VolumeGroup, VolumeGroupRef, VolumeRef,
};
use serde::Serialize;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::events::show_time;
use crate::listing::RemovedView;
use crate::output::{self, Format, Row, fields};
use crate::volume::parse_name;

#[derive(Subcommand)]
pub enum GroupCommand {
    /// Make a group of volumes; again with the same ones, it finds the group.
    #[command(after_help = "Example:\n  quoin group create shop db log\n  \
                            quoin mirror enable shop --to west")]
    Create {
        /// The group's name.
        #[arg(value_parser = parse_name)]
        name: String,
        /// Names or ids of its volumes.
        volumes: Vec<String>,
    },
    /// One group whole.
    Get {
        /// Its name or id.
        group: String,
    },
    /// All groups.
    #[command(visible_alias = "ls")]
    List,
    /// Give a group other members. Those of a mirrored group join and leave its mirror.
    #[command(after_help = "Examples:\n  quoin group modify shop --add cache\n  \
                            quoin group modify shop --remove log")]
    Modify(ModifyOptions),
    /// Delete a group; its volumes stay.
    #[command(visible_alias = "rm", after_help = "Example:\n  quoin group delete shop")]
    Delete {
        /// Its name or id.
        group: String,
    },
}

#[derive(Args)]
#[group(required = true, multiple = true)]
pub struct ModifyOptions {
    /// The group's name or id.
    #[arg(group = "of")]
    group: String,
    /// A volume that joins it. Several times: several.
    #[arg(long = "add", value_name = "VOLUME")]
    add: Vec<String>,
    /// A volume that leaves it.
    #[arg(long = "remove", value_name = "VOLUME")]
    remove: Vec<String>,
}

/// A group by its name or its id.
pub fn group_ref(group: &str) -> VolumeGroupRef {
    VolumeGroupRef { id: group.to_owned(), name: group.to_owned() }
}

pub async fn run(command: GroupCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let group = match command {
        GroupCommand::Create { name, volumes } => {
            let volumes = references(&mut cluster, &volumes).await?;
            let request = CreateVolumeGroupRequest { name, volumes, ..Default::default() };
            cluster.create_volume_group(request).await.map_err(refusal)?.into_inner()
        }
        GroupCommand::Get { group } => get(&mut cluster, &group).await?,
        GroupCommand::List => {
            let answer = cluster.list_volume_groups(ListVolumeGroupsRequest::default()).await;
            let groups = answer.map_err(refusal)?.into_inner().groups;
            let rows: Vec<_> = groups.into_iter().map(GroupView::from).collect();
            let nothing = "no groups: `quoin group create` makes one";
            return output::print_list(format, &rows, nothing);
        }
        GroupCommand::Modify(options) => {
            let found = get(&mut cluster, &options.group).await?;
            let add = references(&mut cluster, &options.add).await?;
            let remove = references(&mut cluster, &options.remove).await?;
            let mut volumes = found.volumes.clone();
            volumes.retain(|volume| !remove.iter().any(|gone| gone.id == volume.id));
            for volume in add {
                if !volumes.iter().any(|has| has.id == volume.id) {
                    volumes.push(volume);
                }
            }
            let request = ModifyVolumeGroupRequest { group: Some(group_ref(&found.id)), volumes };
            cluster.modify_volume_group(request).await.map_err(refusal)?.into_inner()
        }
        GroupCommand::Delete { group } => {
            let request =
                DeleteVolumeGroupRequest { group: Some(group_ref(&group)), only_empty: false };
            cluster.delete_volume_group(request).await.map_err(refusal)?;
            let view = RemovedView { kind: "group", name: &group, state: "deleted" };
            return output::print_one(format, &view, || format!("group {group} is deleted"));
        }
    };
    let view = GroupView::from(group);
    output::print_one(format, &view, || view.text())
}

async fn get(cluster: &mut Cluster, group: &str) -> Result<VolumeGroup> {
    let request = GetVolumeGroupRequest { group: Some(group_ref(group)) };
    Ok(cluster.get_volume_group(request).await.map_err(refusal)?.into_inner())
}

async fn references(cluster: &mut Cluster, volumes: &[String]) -> Result<Vec<VolumeRef>> {
    let mut references = Vec::new();
    for volume in volumes {
        let found = get_volume(cluster, volume).await?;
        references.push(id_ref(&found.id));
    }
    Ok(references)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GroupView {
    name: String,
    id: String,
    volumes: Vec<String>,
    /// Empty: it is not mirrored.
    role: String,
    created_at: String,
}

impl GroupView {
    fn text(&self) -> String {
        fields(&[
            ("Name", self.name.clone()),
            ("Id", self.id.clone()),
            ("Volumes", self.volumes.join(", ")),
            ("Mirror", self.role.clone()),
            ("Created", self.created_at.clone()),
        ])
    }
}

impl From<VolumeGroup> for GroupView {
    fn from(group: VolumeGroup) -> Self {
        let name = |volume: VolumeRef| match volume.name.is_empty() {
            true => volume.id,
            false => volume.name,
        };
        Self {
            name: group.name,
            id: group.id,
            volumes: group.volumes.into_iter().map(name).collect(),
            role: group.role,
            created_at: group.created_at.as_ref().map(show_time).unwrap_or_default(),
        }
    }
}

impl Row for GroupView {
    const HEADER: &'static [&'static str] = &["NAME", "VOLUMES", "MIRROR", "ID", "CREATED"];
    const NARROW: usize = 3;

    fn cells(&self) -> Vec<String> {
        let role = if self.role.is_empty() { "-" } else { &self.role };
        let volumes = self.volumes.join(", ");
        let (id, created) = (self.id.clone(), self.created_at.clone());
        vec![self.name.clone(), volumes, role.to_owned(), id, created]
    }
}
