//! `quoin volume reclaim`: what is dead in a volume's replicas is given back to their pools.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use quoin_api::control::{ReclaimVolumeRequest, ReclaimVolumeResponse};
use serde::Serialize;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::output::{self, Format};
use crate::size::show_size;

pub const HELP: &str = "Pools give such space back by themselves, the sooner the less is free. This command is \
                        for those who\nneed it now. A file system that deleted files must have been \
                        trimmed first (`fstrim`), or mounted with\n`discard`. Nothing that can be \
                        read changes, and the volume stays in use.\n\nExample:\n  \
                        quoin volume reclaim db";

/// Longest wait of one call, and interval of lines about how far it is.
const STEP: Duration = Duration::from_secs(2);

#[derive(Args)]
pub struct ReclaimOptions {
    /// Its name or id.
    volume: String,
    /// Return at once instead of waiting until it is done.
    #[arg(long)]
    no_wait: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReclaimView {
    volume: String,
    done: bool,
    /// Bytes of its replicas.
    before_bytes: u64,
    bytes: u64,
}

fn progress(so_far: &ReclaimVolumeResponse) -> String {
    format!(
        "its replicas held {} and hold {}",
        show_size(so_far.before_bytes),
        show_size(so_far.bytes)
    )
}

pub async fn reclaim(
    cluster: &mut Cluster,
    options: ReclaimOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let found = get_volume(cluster, &options.volume).await?;
    let name = output::plain(&options.volume).to_string();
    let mut interrupts = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
    let began = Instant::now();
    let answer = loop {
        let left = client.timeout().saturating_sub(began.elapsed());
        let wait = if options.no_wait { Duration::ZERO } else { left.min(STEP) };
        let request = ReclaimVolumeRequest {
            volume: Some(id_ref(&found.id)),
            wait_ms: wait.as_millis() as u32,
        };
        let answer = tokio::select! {
            answer = cluster.reclaim_volume(request) => answer.map_err(refusal)?.into_inner(),
            _ = interrupts.recv() => bail!(crate::pace::Interrupted::new(format!(
                "space of volume {name} goes on being given back"
            ))),
        };
        if answer.done || options.no_wait {
            break answer;
        }
        if began.elapsed() >= client.timeout() {
            bail!(
                "space of volume {name} is still being given back after {} s: {}. It goes on by itself; \
                 the same command waits for it again",
                client.timeout,
                progress(&answer)
            );
        }
        eprintln!("space of volume {name} is being given back: {}", progress(&answer));
    };
    let ReclaimVolumeResponse { done, before_bytes, bytes } = answer;
    let view = ReclaimView { volume: name.clone(), done, before_bytes, bytes };
    output::print_one(format, &view, || match done {
        true => format!("volume {name}: {}", progress(&answer)),
        false => format!("space of volume {name} is being given back"),
    })
}
