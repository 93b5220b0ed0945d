//! `quoin target config`: the configuration of a volume's target, at its start and now.

use anyhow::Result;
use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};
use quoin_api::control::{GetTargetConfigRequest, Membership, TargetConfig};
use serde::Serialize;

use crate::client::{ClientOptions, refusal, volume_ref};
use crate::output::{self, Format, fields};
use crate::roles::TargetOptions;

/// `quoin target` runs a target; with a subcommand it queries those that run.
pub enum TargetCommand {
    Run(Box<TargetOptions>),
    Ask(Ask),
}

#[derive(Subcommand)]
pub enum Ask {
    /// Configuration that the target of a volume was given at its start and goes by now, in its own
    /// words.
    ///
    /// The replication factor (RF), how many replicas hold a write (CF), how many are desired (DRF)
    /// and the replicas it knows, with their pools. What is asked for and not so yet stands beside it.
    #[command(after_help = "Example:\n  quoin target config db\n\
        Only a volume that is attached, or opened for work on its replicas, has a target. What the\n\
        controller's records say of any volume: `quoin volume get`, `quoin replica list`.")]
    Config {
        /// The volume's name or id.
        volume: String,
    },
}

/// Implemented by hand: a derived one would require the flags of a target for a query too.
impl Args for TargetCommand {
    fn augment_args(command: Command) -> Command {
        Ask::augment_subcommands(TargetOptions::augment_args(command))
            .args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
            .subcommand_required(false)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for TargetCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        match matches.subcommand_name() {
            Some(_) => Ask::from_arg_matches(matches).map(Self::Ask),
            None => TargetOptions::from_arg_matches(matches).map(|o| Self::Run(Box::new(o))),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

pub async fn config(volume: &str, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let request = GetTargetConfigRequest { volume: Some(volume_ref(volume)) };
    let told = cluster.get_target_config(request).await.map_err(refusal)?.into_inner();
    let view = ConfigView::from(told);
    output::print_one(format, &view, || view.text())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ConfigView {
    volume: String,
    id: String,
    node: String,
    state: String,
    waiting_for: String,
    epoch: u64,
    /// Number of known replicas in sync.
    in_sync: usize,
    needed_to_open: u32,
    at_start: ListView,
    now: ListView,
    /// Absent: it is as it is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    asked_for: Option<DesiredView>,
}

/// The factors and the known list of one moment.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ListView {
    membership_version: u64,
    replication_factor: u32,
    consistency_factor: u32,
    desired_replication_factor: u32,
    replica_list: Vec<EntryView>,
}

#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct EntryView {
    replica_id: String,
    replica_guid: String,
    pool: String,
    /// State as the target sees it now; empty: the target does not use it any more.
    state: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DesiredView {
    replication_factor: u32,
    consistency_factor: u32,
    membership_version: u64,
    changing: String,
    /// True if the target has received it.
    told: bool,
}

impl From<TargetConfig> for ConfigView {
    fn from(told: TargetConfig) -> Self {
        let goes_by = told.goes_by.unwrap_or_default();
        let list = |membership: Membership, drf: Option<u32>| ListView {
            membership_version: membership.version,
            replication_factor: membership.rf,
            consistency_factor: membership.cf,
            desired_replication_factor: drf.unwrap_or(membership.drf),
            replica_list: membership
                .known
                .into_iter()
                .map(|member| {
                    let seen = told.replicas.iter().find(|seen| seen.guid == member.guid);
                    EntryView {
                        replica_id: member.replica_id,
                        replica_guid: member.guid,
                        pool: seen.map(|seen| seen.pool.clone()).unwrap_or_default(),
                        state: seen.map(|seen| seen.state.clone()).unwrap_or_default(),
                    }
                })
                .collect(),
        };
        let at_start = list(goes_by.granted.unwrap_or_default(), None);
        // DRF is sent to a running target, and is no part of its membership.
        let drf = Some(goes_by.desired_replication_factor).filter(|drf| *drf > 0);
        let now = list(goes_by.held.unwrap_or_default(), drf);
        Self {
            volume: told.volume_name,
            id: told.volume_id,
            node: told.node,
            state: told.state,
            waiting_for: told.waiting_for,
            epoch: told.epoch,
            in_sync: now.replica_list.iter().filter(|entry| entry.state == "in-sync").count(),
            needed_to_open: told.open_quorum,
            at_start,
            now,
            asked_for: told.asked.map(|asked| DesiredView {
                replication_factor: asked.rf,
                consistency_factor: asked.cf,
                membership_version: asked.membership_version,
                changing: asked.changing,
                told: asked.told,
            }),
        }
    }
}

impl ConfigView {
    fn text(&self) -> String {
        let (then, now) = (&self.at_start, &self.now);
        let both = |now: u64, then: u64| match now == then {
            true => now.to_string(),
            false => format!("{now} ({then} at its start)"),
        };
        let factor = |now: u32, then: u32| both(now.into(), then.into());
        let mut text = fields(&[
            ("volume", self.volume.clone()),
            ("id", self.id.clone()),
            ("target", format!("{}, {}", self.node, self.state)),
            ("waits for", self.waiting_for.clone()),
            ("epoch", quoin_types::Epoch(self.epoch).to_string()),
            ("list version", both(now.membership_version, then.membership_version)),
            ("RF", factor(now.replication_factor, then.replication_factor)),
            ("CF", factor(now.consistency_factor, then.consistency_factor)),
            ("DRF", factor(now.desired_replication_factor, then.desired_replication_factor)),
            (
                "quorum",
                format!(
                    "{} of {} known in sync; {} to write, {} to open",
                    self.in_sync,
                    now.replica_list.len(),
                    now.consistency_factor,
                    self.needed_to_open
                ),
            ),
            ("asked for", self.asked_for.as_ref().map(DesiredView::sentence).unwrap_or_default()),
        ]);
        let of = |list: &'_ ListView, entry: &EntryView| {
            list.replica_list.iter().any(|e| e.replica_guid == entry.replica_guid)
        };
        for entry in &now.replica_list {
            let since = if of(then, entry) { "" } else { ", since its start" };
            text += &format!("  known: {}{since}\n", entry.sentence());
        }
        for entry in then.replica_list.iter().filter(|entry| !of(now, entry)) {
            text += &format!("  known at its start alone: {}\n", entry.sentence());
        }
        text
    }
}

impl EntryView {
    fn sentence(&self) -> String {
        let pool = match self.pool.as_str() {
            "" => "a pool that the records have forgotten".to_owned(),
            pool => format!("pool {pool}"),
        };
        let state = if self.state.is_empty() { String::new() } else { format!(", {}", self.state) };
        format!("{} in {pool}, GUID {}{state}", self.replica_id, self.replica_guid)
    }
}

impl DesiredView {
    fn sentence(&self) -> String {
        let (rf, cf) = (self.replication_factor, self.consistency_factor);
        let changing = match self.changing.as_str() {
            "" => String::new(),
            changing => format!(": {changing}"),
        };
        let told = if self.told { "" } else { "; the target does not know it yet" };
        format!("{rf} replicas, {cf} of which hold a write{changing}{told}")
    }
}
