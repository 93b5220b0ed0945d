//! `quoin schedule …`: snapshots at intervals.

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use quoin_api::control::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListSchedulesRequest,
    Schedule,
};
use quoin_api::volume::{parse_time, write_time};
use serde::Serialize;
use std::time::Duration;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::events::show_time;
use crate::output::{self, Format, Row, fields};
use crate::size::number_within;
use crate::snapshot::{SnapshotView, parse_own_name};

#[derive(Subcommand)]
pub enum ScheduleCommand {
    /// Make snapshots of a volume at an interval, the first one now, and delete the old ones.
    #[command(
        after_help = "Examples:\n  quoin schedule create db --every 1h --keep 24 --keep-for 7d\n  \
                            quoin schedule create db --name db-daily --every 1d --keep 30\n\
                            A snapshot is deleted once there are --keep newer ones, or once it is \
                            older than --keep-for;\nthe newest one stays. Of runs that were missed \
                            the last one is made up for."
    )]
    Create(CreateOptions),
    /// One schedule whole: its interval, what it keeps, its newest snapshot, its next run.
    Get {
        /// Its name.
        schedule: String,
    },
    /// All schedules, or those of one volume.
    #[command(visible_alias = "ls")]
    List {
        /// The volume's name or id.
        volume: Option<String>,
    },
    /// Delete a schedule. Its snapshots stay, and nobody deletes the old ones any more.
    #[command(visible_alias = "rm", after_help = "Example:\n  quoin schedule delete db-daily")]
    Delete {
        /// Its name.
        schedule: String,
    },
}

#[derive(Args)]
pub struct CreateOptions {
    /// The volume's name or id.
    volume: String,
    /// The schedule's name, which its snapshots begin with [default: the volume's].
    #[arg(long, value_parser = parse_own_name)]
    name: Option<String>,
    /// Time between two snapshots, as in 15m, 1h or 1d: a minute to a year.
    #[arg(long, value_parser = parse_interval)]
    every: Duration,
    /// Number of its snapshots that are kept.
    #[arg(long, allow_hyphen_values = true, value_parser = number_within::<u32>(1..=400,
          "a schedule keeps 1 to 400 snapshots"), required_unless_present = "keep_for")]
    keep: Option<u32>,
    /// Time for which a snapshot is kept, as in 7d.
    #[arg(long, value_parser = parse_interval)]
    keep_for: Option<Duration>,
}

/// A time of a minute or longer, in whole seconds.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    let time = parse_time(text).filter(|time| *time >= Duration::from_secs(60));
    let time = time.filter(|time| time.subsec_millis() == 0);
    time.ok_or_else(|| "not a time of at least a minute, as in 15m, 1h or 7d".to_owned())
}

/// A time in seconds, as it is typed.
pub struct Time(pub u64);

impl std::fmt::Display for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write_time(Duration::from_secs(self.0), f)
    }
}

/// A schedule as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ScheduleView {
    name: String,
    volume: String,
    volume_id: String,
    every_seconds: u64,
    /// 0: no limit by their number.
    keep: u32,
    /// 0: no limit by their age.
    keep_for_seconds: u64,
    snapshots: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    newest: Option<SnapshotView>,
    next_at: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    waiting_for: String,
    created_at: String,
}

impl From<Schedule> for ScheduleView {
    fn from(schedule: Schedule) -> Self {
        let shown =
            |time: Option<prost_types::Timestamp>| time.as_ref().map(show_time).unwrap_or_default();
        Self {
            name: schedule.name,
            volume: schedule.volume_name,
            volume_id: schedule.volume_id,
            every_seconds: schedule.every_s,
            keep: schedule.keep,
            keep_for_seconds: schedule.keep_for_s,
            snapshots: schedule.snapshots,
            newest: schedule.newest_snapshot.map(SnapshotView::from),
            next_at: shown(schedule.next_at),
            waiting_for: schedule.waiting_for,
            created_at: shown(schedule.created_at),
        }
    }
}

impl ScheduleView {
    fn every(&self) -> String {
        Time(self.every_seconds).to_string()
    }

    fn keeps(&self) -> String {
        let age = Time(self.keep_for_seconds);
        match (self.keep, self.keep_for_seconds) {
            (0, _) => format!("those of {age}"),
            (count, 0) => count.to_string(),
            (count, _) => format!("{count}, those of {age}"),
        }
    }

    fn newest(&self) -> String {
        self.newest.as_ref().map(|newest| newest.cut_at.clone()).unwrap_or_default()
    }

    fn text(&self) -> String {
        fields(&[
            ("name", self.name.clone()),
            ("volume", self.volume.clone()),
            ("every", self.every()),
            ("keeps", self.keeps()),
            ("snapshots", self.snapshots.to_string()),
            (
                "newest",
                self.newest
                    .as_ref()
                    .map(|newest| format!("{} of {}", newest.name, newest.cut_at))
                    .unwrap_or_default(),
            ),
            ("next", self.next_at.clone()),
            ("waits for", self.waiting_for.clone()),
            ("created", self.created_at.clone()),
        ])
    }
}

impl Row for ScheduleView {
    const HEADER: &'static [&'static str] = &[
        "NAME",
        "VOLUME",
        "EVERY",
        "KEEPS",
        "SNAPSHOTS",
        "NEWEST",
        "NEXT",
        "WAITS FOR",
        "CREATED",
    ];
    const NARROW: usize = 8;

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.volume.clone(),
            self.every(),
            self.keeps(),
            self.snapshots.to_string(),
            self.newest(),
            self.next_at.clone(),
            self.waiting_for.clone(),
            self.created_at.clone(),
        ]
    }
}

pub async fn run(command: ScheduleCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    match command {
        ScheduleCommand::Create(options) => create(&mut cluster, options, format).await,
        ScheduleCommand::Get { schedule } => {
            let view = ScheduleView::from(get(&mut cluster, &schedule).await?);
            output::print_one(format, &view, || view.text())
        }
        ScheduleCommand::List { volume } => {
            let of = match &volume {
                Some(volume) => Some(id_ref(&get_volume(&mut cluster, volume).await?.id)),
                None => None,
            };
            let request = ListSchedulesRequest { volume: of };
            let found = cluster.list_schedules(request).await.map_err(refusal)?.into_inner();
            let rows: Vec<_> = found.schedules.into_iter().map(ScheduleView::from).collect();
            let nothing = "no schedules: make one with `quoin schedule create VOLUME --every 1h \
                           --keep 24`";
            output::print_list(format, &rows, nothing)
        }
        ScheduleCommand::Delete { schedule } => {
            let found = get(&mut cluster, &schedule).await?;
            let request = DeleteScheduleRequest { name: found.name.clone() };
            cluster.delete_schedule(request).await.map_err(refusal)?;
            let view = crate::listing::RemovedView {
                kind: "schedule",
                name: &found.name,
                state: "deleted",
            };
            output::print_one(format, &view, || match found.snapshots {
                0 => format!("schedule {} is deleted", found.name),
                count => format!(
                    "schedule {} is deleted; its snapshots stay ({count}): `quoin snapshot list {}`",
                    found.name,
                    output::quoted(&found.volume_name)
                ),
            })
        }
    }
}

async fn create(cluster: &mut Cluster, options: CreateOptions, format: Format) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let request = CreateScheduleRequest {
        volume: Some(id_ref(&volume.id)),
        name: options.name.unwrap_or_default(),
        every_s: options.every.as_secs(),
        keep: options.keep.unwrap_or(0),
        keep_for_s: options.keep_for.map_or(0, |time| time.as_secs()),
    };
    let schedule = cluster.create_schedule(request).await.map_err(refusal)?.into_inner();
    let view = ScheduleView::from(schedule);
    output::print_one(format, &view, || {
        format!(
            "schedule {} makes a snapshot of volume {} every {}, and keeps {}\n\
             next: quoin schedule get {}",
            view.name,
            view.volume,
            view.every(),
            view.keeps(),
            output::quoted(&view.name)
        )
    })
}

async fn get(cluster: &mut Cluster, name: &str) -> Result<Schedule> {
    match cluster.get_schedule(GetScheduleRequest { name: name.to_owned() }).await {
        Ok(schedule) => Ok(schedule.into_inner()),
        Err(status) if status.code() == tonic::Code::NotFound => bail!(
            "there is no schedule `{}`: `quoin schedule list` shows those that exist",
            output::plain(name)
        ),
        Err(status) => Err(refusal(status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_has_a_unit_and_at_least_a_minute() {
        assert_eq!(parse_interval("15m"), Ok(Duration::from_secs(900)));
        assert_eq!(parse_interval("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for wrong in ["", "1", "59s", "60500ms", "-1h", "1 h", "1y"] {
            assert!(parse_interval(wrong).unwrap_err().contains("as in 15m"), "{wrong}");
        }
    }

    #[test]
    fn what_a_schedule_keeps_is_said_in_words() {
        let keeps = |keep, keep_for_s| {
            ScheduleView::from(Schedule { keep, keep_for_s, ..Schedule::default() }).keeps()
        };
        assert_eq!(keeps(24, 7 * 86_400), "24, those of 7d");
        assert_eq!(keeps(24, 0), "24");
        assert_eq!(keeps(0, 7 * 86_400), "those of 7d");
    }
}
