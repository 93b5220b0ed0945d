//! `quoin volume flatten`: a clone takes over the blocks that it shares with its source.

use anyhow::{Result, bail};
use clap::Args;
use quoin_api::control::{FlattenVolumeRequest, Volume};
use std::time::{Duration, Instant};

use super::VolumeView;
use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::output::{self, Format};

pub const HELP: &str = "Example:\n  quoin volume flatten test\n\
                        A clone that was never changed takes as much space afterwards as its source \
                        does. Interrupted, it goes\non by itself; the same command waits for it again.";

/// Interval between two looks at a volume, and between two lines about it.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const REPORT_INTERVAL: Duration = Duration::from_secs(3);

#[derive(Args)]
pub struct FlattenOptions {
    /// Its name or id.
    volume: String,
    /// Return at once instead of waiting until it shares nothing any more.
    #[arg(long)]
    no_wait: bool,
}

/// How many replicas share blocks still, in words.
fn progress(volume: &Volume) -> String {
    let sharing = volume.replicas.iter().filter(|replica| replica.is_clone).count();
    format!("{sharing} of {} replicas share blocks still", volume.replicas.len())
}

pub async fn flatten(
    cluster: &mut Cluster,
    options: FlattenOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let found = get_volume(cluster, &options.volume).await?;
    let name = output::plain(&options.volume).to_string();
    let request = FlattenVolumeRequest { volume: Some(id_ref(&found.id)) };
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let mut volume = cluster.flatten_volume(request).await.map_err(refusal)?.into_inner();
    let (began, mut reported) = (Instant::now(), None::<Instant>);
    let shares = |volume: &Volume| volume.made_from.as_ref().is_some_and(|m| !m.shares_nothing);
    while !options.no_wait && shares(&volume) {
        if reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            eprintln!("volume {name} is being flattened: {}", progress(&volume));
            reported = Some(Instant::now());
        }
        if began.elapsed() > client.timeout() {
            bail!(
                "volume {name} is not flattened after {} s: {}. It goes on by itself: watch it with \
                 `quoin volume get {}`",
                client.timeout,
                progress(&volume),
                output::quoted(&options.volume)
            );
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => bail!(crate::pace::Interrupted::new(format!(
                "volume {name} goes on being flattened: {}", progress(&volume)
            ))),
        }
        volume = get_volume(cluster, &found.id).await?;
    }
    let is_done = !shares(&volume);
    let view = VolumeView::from(volume);
    output::print_one(format, &view, || match is_done {
        true => format!("volume {} shares nothing with another one", view.name),
        false => format!("volume {} is being flattened", view.name),
    })
}
