//! `quoin volume reclaim`: what is dead in a volume's replicas is given back to their pools.

use anyhow::Result;
use clap::Args;
use quoin_api::control::{ReclaimVolumeRequest, ReclaimVolumeResponse};
use serde::Serialize;

use crate::client::{ClientOptions, Cluster, get_volume, id_ref, refusal};
use crate::output::{self, Format};
use crate::pace::{self, Part, UnderWay};
use crate::size::show_size;

pub const HELP: &str = "Pools give such space back by themselves, the sooner the less is free. This command is \
                        for those who\nneed it now. A file system that deleted files must have been \
                        trimmed first (`fstrim`), or mounted with\n`discard`. Nothing that can be \
                        read changes, and the volume stays in use.\n\nExample:\n  \
                        quoin volume reclaim db";

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

/// The order as it was answered last.
struct Reclaim {
    name: String,
    answer: ReclaimVolumeResponse,
    freed_bytes: u64,
    /// How much is dead is not known before it is over.
    total_bytes: u64,
}

impl Reclaim {
    fn of(name: &str, answer: ReclaimVolumeResponse) -> Self {
        let freed_bytes = answer.before_bytes.saturating_sub(answer.bytes);
        Self { name: name.to_owned(), answer, freed_bytes, total_bytes: 0 }
    }

    fn figures(&self) -> String {
        let ReclaimVolumeResponse { before_bytes, bytes, .. } = self.answer;
        format!("its replicas held {} and hold {}", show_size(before_bytes), show_size(bytes))
    }
}

impl UnderWay for Reclaim {
    fn is_done(&self) -> bool {
        self.answer.done
    }

    fn state_text(&self) -> String {
        self.figures()
    }

    fn parts(&mut self) -> Vec<Part<'_>> {
        let (done_bytes, total_bytes) = (&mut self.freed_bytes, &mut self.total_bytes);
        vec![Part { name: self.name.clone(), done_bytes, total_bytes }]
    }

    fn left_bytes(&self) -> u64 {
        0
    }

    fn progress(&self, _: &str) -> String {
        format!("space of volume {} is being given back: {}", self.name, self.figures())
    }
}

pub async fn reclaim(
    cluster: &mut Cluster,
    options: ReclaimOptions,
    client: &ClientOptions,
    format: Format,
) -> Result<()> {
    let found = get_volume(cluster, &options.volume).await?;
    let name = output::plain(&options.volume).to_string();
    // The order is given once; another call of it tells how far it is.
    let mut ask = async || {
        let request = ReclaimVolumeRequest { volume: Some(id_ref(&found.id)), wait_ms: 0 };
        let answer = cluster.reclaim_volume(request).await.map_err(refusal)?.into_inner();
        Ok(Reclaim::of(&name, answer))
    };
    let mut last = ask().await?;
    if !options.no_wait {
        last = pace::follow(last, client, ask).await?;
    }
    let ReclaimVolumeResponse { done, before_bytes, bytes } = last.answer;
    let view = ReclaimView { volume: name.clone(), done, before_bytes, bytes };
    output::print_one(format, &view, || match done {
        true => format!("volume {name}: {}", last.figures()),
        false => format!("space of volume {name} is being given back"),
    })
}
