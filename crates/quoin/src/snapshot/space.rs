//! `quoin snapshot space`: bytes that snapshots have, and that only one of them has.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use quoin_api::control::{MeasureSnapshotRequest, Snapshot, SnapshotMeasure};
use serde::Serialize;

use super::pull::{by_id, patiently};
use super::{get, get_of, list};
use crate::client::{ClientOptions, Cluster, get_volume, id_ref};
use crate::output::{self, Format, Row};
use crate::size::show_size;

pub const HELP: &str = "Examples:\n  quoin snapshot space db\n  quoin snapshot space db monday\n\
                        DATA is what a snapshot has, EXCLUSIVE the part that no other snapshot has, \
                        nor the volume itself: its deletion gives that back in each replica, once no \
                        clone needs it. \
                        SHARED is the rest. Maps are read for it and no data.";

const REPORT_INTERVAL: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub struct SpaceOptions {
    /// The volume's name or id.
    volume: String,
    /// Names or ids of snapshots [default: all of the volume].
    snapshots: Vec<String>,
}

/// A snapshot's space as `-o json` has it; in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpaceView {
    snapshot: String,
    id: String,
    size_bytes: u64,
    data_bytes: u64,
    exclusive_bytes: u64,
    shared_bytes: u64,
}

impl SpaceView {
    fn add(&mut self, step: &SnapshotMeasure) {
        self.size_bytes = step.size_bytes;
        self.data_bytes = self.data_bytes.saturating_add(step.data_bytes);
        self.exclusive_bytes = self.exclusive_bytes.saturating_add(step.exclusive_bytes);
        self.shared_bytes = self.data_bytes.saturating_sub(self.exclusive_bytes);
    }
}

impl Row for SpaceView {
    const HEADER: &'static [&'static str] = &["NAME", "SIZE", "DATA", "EXCLUSIVE", "SHARED", "ID"];
    const NARROW: usize = 5;

    fn cells(&self) -> Vec<String> {
        vec![
            self.snapshot.clone(),
            show_size(self.size_bytes),
            show_size(self.data_bytes),
            show_size(self.exclusive_bytes),
            show_size(self.shared_bytes),
            self.id.clone(),
        ]
    }
}

pub async fn run(
    cluster: &mut Cluster,
    options: &SpaceOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let volume = get_volume(cluster, &options.volume).await?;
    let mut snapshots = Vec::new();
    if options.snapshots.is_empty() {
        snapshots = list(cluster, Some(id_ref(&volume.id))).await?;
        snapshots.retain(|snapshot| snapshot.phase == "Ready");
        snapshots.sort_by_key(|snapshot| snapshot.lsn);
    }
    for name in &options.snapshots {
        snapshots.push(get_of(cluster, &volume, name).await?);
    }
    let mut rows = Vec::new();
    for (number, snapshot) in snapshots.iter().enumerate() {
        let place = format!("{} of {}", number + 1, snapshots.len());
        match measure(cluster, client, snapshot, &place).await {
            Ok(row) => rows.push(row),
            // A schedule may delete one of all while they are counted.
            Err(_) if options.snapshots.is_empty() && get(cluster, &snapshot.id).await.is_err() => {
                eprintln!("snapshot {} was deleted meanwhile", output::plain(&snapshot.name));
            }
            Err(error) => return Err(error),
        }
    }
    let volume = output::plain(&options.volume);
    output::print_list(format, &rows, &format!("no snapshots of volume {volume} are cut"))
}

async fn measure(
    cluster: &mut Cluster,
    client: &ClientOptions,
    snapshot: &Snapshot,
    place: &str,
) -> Result<SpaceView> {
    let (name, id) = (snapshot.name.clone(), snapshot.id.clone());
    let mut view = SpaceView { snapshot: name, id, ..SpaceView::default() };
    let (mut next, mut reported) = (Some(0), Instant::now());
    while let Some(offset) = next {
        let step = patiently(client, async || {
            let request = MeasureSnapshotRequest { snapshot: Some(by_id(snapshot)), offset };
            cluster.measure_snapshot(request).await
        })
        .await?;
        if step.next_offset.is_some_and(|next| next <= offset) {
            bail!("the controller's answer cannot be: a step that does not end behind its begin");
        }
        view.add(&step);
        next = step.next_offset;
        if reported.elapsed() >= REPORT_INTERVAL {
            let done = next.unwrap_or(step.size_bytes);
            let size = show_size(step.size_bytes);
            eprintln!("snapshot {place}: {} of {size} counted", show_size(done));
            reported = Instant::now();
        }
    }
    Ok(view)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_added_up_and_shared_is_what_is_not_exclusive() {
        let step = |data_bytes, exclusive_bytes| SnapshotMeasure {
            data_bytes,
            exclusive_bytes,
            next_offset: None,
            size_bytes: 9000,
        };
        let mut view = SpaceView::default();
        view.add(&step(4096, 4096));
        view.add(&step(8192, 0));
        assert_eq!((view.size_bytes, view.data_bytes), (9000, 12288));
        assert_eq!((view.exclusive_bytes, view.shared_bytes), (4096, 8192));
        assert_eq!(view.cells().len(), SpaceView::HEADER.len());
    }
}
