//! `quoin snapshot create --group …` and `quoin snapshot group …`: snapshots of several volumes at one
//! point.

use anyhow::{Result, bail};
use clap::Subcommand;
use quoin_api::control::{
    CreateGroupSnapshotRequest, DeleteGroupSnapshotRequest, GetGroupSnapshotRequest, GroupSnapshot,
    GroupSnapshotRef, ListGroupSnapshotsRequest, VolumeRef,
};
use serde::Serialize;
use std::io::{BufRead, IsTerminal, Write};
use std::time::Instant;

use super::{POLL_INTERVAL, REPORT_INTERVAL, SnapshotView};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal, volume_ref};
use crate::events::show_time;
use crate::output::{self, Format, Row, fields};

#[derive(Subcommand)]
pub enum GroupCommand {
    /// One group snapshot whole: when it was cut, its members, what it waits for.
    Get {
        /// Its name or id.
        group: String,
    },
    /// All group snapshots, the oldest first.
    #[command(visible_alias = "ls")]
    List,
    /// Delete a group snapshot with the snapshots of all its volumes. A member cannot be deleted
    /// alone: the rest would be no group.
    #[command(
        visible_alias = "rm",
        after_help = "Example:\n  quoin snapshot group delete before-upgrade"
    )]
    Delete {
        /// Its name or id.
        group: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
}

/// A group snapshot as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupView {
    pub name: String,
    pub id: String,
    pub phase: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub waiting_for: String,
    /// Empty: not cut yet.
    pub cut_at: String,
    pub members: Vec<MemberView>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberView {
    pub volume: String,
    pub volume_id: String,
    /// Null: there is none yet, or it is gone.
    pub snapshot: Option<SnapshotView>,
}

impl From<GroupSnapshot> for GroupView {
    fn from(group: GroupSnapshot) -> Self {
        let members = group.members.into_iter().map(|member| MemberView {
            volume: member.volume_name,
            volume_id: member.volume_id,
            snapshot: member.snapshot.map(SnapshotView::from),
        });
        Self {
            name: group.name,
            id: group.id,
            phase: group.phase,
            waiting_for: group.waiting_for,
            cut_at: group.cut_at.as_ref().map(show_time).unwrap_or_default(),
            members: members.collect(),
        }
    }
}

impl GroupView {
    fn volumes(&self) -> String {
        let names: Vec<&str> = self.members.iter().map(|member| member.volume.as_str()).collect();
        names.join(", ")
    }

    fn text(&self) -> String {
        let member = |member: &MemberView| match &member.snapshot {
            Some(snapshot) => format!("{}: {}", member.volume, snapshot.name),
            None => format!("{}: no snapshot", member.volume),
        };
        let members: Vec<String> = self.members.iter().map(member).collect();
        fields(&[
            ("name", self.name.clone()),
            ("id", self.id.clone()),
            ("phase", self.phase.clone()),
            ("waits for", self.waiting_for.clone()),
            ("cut", self.cut_at.clone()),
            ("members", members.join(", ")),
        ])
    }
}

impl Row for GroupView {
    const HEADER: &'static [&'static str] = &["NAME", "VOLUMES", "CUT", "PHASE", "WAITS FOR", "ID"];
    const NARROW: usize = 5;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.volumes(),
            self.cut_at.clone(),
            self.phase.clone(),
            self.waiting_for.clone(),
            self.id.clone(),
        ]
    }
}

/// A group snapshot that is gone.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeletedView {
    group: String,
    id: String,
    state: &'static str,
}

pub async fn run(command: GroupCommand, cluster: &mut Cluster, format: Format) -> Result<()> {
    match command {
        GroupCommand::Get { group } => {
            let view = GroupView::from(get(cluster, &group).await?);
            output::print_one(format, &view, || view.text())
        }
        GroupCommand::List => {
            let mut rows: Vec<_> = list(cluster).await?.into_iter().map(GroupView::from).collect();
            // A group that is not cut yet is the newest.
            rows.sort_by_key(|row| (row.cut_at.is_empty(), row.cut_at.clone(), row.name.clone()));
            let nothing = "no group snapshots: make one with `quoin snapshot create --group NAME \
                           VOLUME VOLUME`";
            output::print_list(format, &rows, nothing)
        }
        GroupCommand::Delete { group, yes } => {
            let found = get(cluster, &group).await?;
            if !yes {
                confirm_delete(&found)?;
            }
            let group = Some(GroupSnapshotRef { id: found.id.clone(), name: String::new() });
            let request = DeleteGroupSnapshotRequest { group };
            cluster.delete_group_snapshot(request).await.map_err(refusal)?;
            let view = DeletedView { group: found.name, id: found.id, state: "deleted" };
            output::print_one(format, &view, || {
                format!(
                    "group snapshot {} is deleted with its snapshots; their space becomes free by \
                     itself",
                    view.group
                )
            })
        }
    }
}

/// Makes snapshots of all these volumes at one point.
pub async fn create(
    cluster: &mut Cluster,
    name: String,
    volumes: &[String],
    no_wait: bool,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let mut references: Vec<VolumeRef> = Vec::new();
    for volume in volumes {
        references.push(id_ref(&get_volume(cluster, volume).await?.id));
    }
    let request = CreateGroupSnapshotRequest { name: name.clone(), volumes: references };
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let mut group = cluster.create_group_snapshot(request).await.map_err(refusal)?.into_inner();
    let began = Instant::now();
    let mut reported = None::<Instant>;
    while !no_wait && group.phase == "Wished" {
        if reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            eprintln!("group snapshot {name} waits for {}", group.waiting_for);
            reported = Some(Instant::now());
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "group snapshot {name} is not cut after {} s; it waits for {}. It is made as soon as \
                 that is there: watch it with `quoin snapshot group get {}`, or give it up with \
                 `quoin snapshot group delete {}`",
                client.timeout,
                group.waiting_for,
                output::quoted(&name),
                output::quoted(&name)
            );
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => bail!(crate::pace::Interrupted::new(format!(
                "group snapshot {name} waits for {}", group.waiting_for
            ))),
        }
        group = match get(cluster, &group.id).await {
            Ok(group) => group,
            Err(_) => bail!("group snapshot {name} was given up: `quoin events` has the reason"),
        };
    }
    let view = GroupView::from(group);
    output::print_one(format, &view, || match view.phase.as_str() {
        "Wished" => {
            format!("group snapshot {} is asked for, and waits for {}", view.name, view.waiting_for)
        }
        _ => format!(
            "group snapshot {} of volumes {} is made: all of them as of {}",
            view.name,
            view.volumes(),
            view.cut_at
        ),
    })
}

async fn get(cluster: &mut Cluster, name: &str) -> Result<GroupSnapshot> {
    let VolumeRef { id, name: text } = volume_ref(name);
    let request = GetGroupSnapshotRequest { group: Some(GroupSnapshotRef { id, name: text }) };
    match cluster.get_group_snapshot(request).await {
        Ok(group) => Ok(group.into_inner()),
        Err(status) if status.code() == tonic::Code::NotFound => bail!(
            "there is no group snapshot `{}`: `quoin snapshot group list` shows those that exist",
            output::plain(name)
        ),
        Err(status) => Err(refusal(status)),
    }
}

/// Every group snapshot, page by page.
async fn list(cluster: &mut Cluster) -> Result<Vec<GroupSnapshot>> {
    let (mut groups, mut after) = (Vec::new(), String::new());
    loop {
        let request = ListGroupSnapshotsRequest { max_entries: 0, after };
        let page = cluster.list_group_snapshots(request).await.map_err(refusal)?.into_inner();
        groups.extend(page.groups);
        if page.next.is_empty() {
            return Ok(groups);
        }
        after = page.next;
    }
}

/// A group is lost only after its name was typed, or with --yes in a script.
fn confirm_delete(group: &GroupSnapshot) -> Result<()> {
    let name = output::plain(&group.name);
    if !std::io::stdin().is_terminal() {
        bail!(
            "deleting destroys what only the snapshots of group `{name}` have: add --yes to do it \
             without the question"
        );
    }
    let count = group.members.len();
    print!("This destroys {count} snapshots of group {name}. Type its name to continue: ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    if answer.trim() != group.name {
        bail!("not deleted: that was not its name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_api::control::{GroupSnapshotMember, Snapshot};

    use super::*;

    #[test]
    fn a_group_names_all_its_volumes_and_says_which_lacks_its_snapshot() {
        let member = |volume: &str, snapshot: Option<&str>| GroupSnapshotMember {
            volume_name: volume.into(),
            snapshot: snapshot.map(|name| Snapshot { name: name.into(), ..Snapshot::default() }),
            ..GroupSnapshotMember::default()
        };
        let view = GroupView::from(GroupSnapshot {
            name: "nightly".into(),
            phase: "Incomplete".into(),
            members: vec![member("db", Some("nightly-db")), member("log", None)],
            ..GroupSnapshot::default()
        });
        assert_eq!(view.volumes(), "db, log");
        assert!(view.text().contains("db: nightly-db, log: no snapshot"), "{}", view.text());
        assert_eq!(view.cells().len(), GroupView::HEADER.len());
    }
}
