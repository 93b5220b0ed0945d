//! `quoin pool scrub`: a pool reads all that it holds, now.

use anyhow::{Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use quoin_api::control::{ListPoolsRequest, Pool, Scrub, ScrubPoolRequest};
use serde::Serialize;
use std::time::Duration;

use crate::client::{ClientOptions, Cluster, refusal};
use crate::output::{self, Format, fields};
use crate::size::show_size;

/// Interval between two polls of the pool's progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct ScrubOptions {
    /// The pool's name, as in `quoin pool list`.
    pool: String,
    /// Follow it to its end, with progress and the time that is left.
    #[arg(long)]
    wait: bool,
}

/// The last reading of a pool's whole content.
#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
pub struct ScrubView {
    running: bool,
    began_at: String,
    ended_at: String,
    read_bytes: u64,
    total_bytes: u64,
    found: u64,
}

impl From<Scrub> for ScrubView {
    fn from(scrub: Scrub) -> Self {
        let time = |seconds: u64| match seconds {
            0 => String::new(),
            s => crate::events::show_time(&prost_types::Timestamp { seconds: s as i64, nanos: 0 }),
        };
        Self {
            running: scrub.running,
            began_at: time(scrub.began_s),
            // Without a begin, this is the time of the pool's first start.
            ended_at: if scrub.began_s == 0 { String::new() } else { time(scrub.ended_s) },
            read_bytes: scrub.read_bytes,
            total_bytes: scrub.total_bytes,
            found: scrub.found,
        }
    }
}

impl ScrubView {
    /// A table's cell.
    pub fn sentence(&self) -> String {
        let found = match self.found {
            0 => String::new(),
            n => format!(", {n} bad"),
        };
        if self.running {
            let percent = self.read_bytes.min(self.total_bytes) * 100 / self.total_bytes.max(1);
            return format!("{percent}%{found}");
        }
        if self.ended_at.is_empty() {
            "not yet".into()
        } else {
            format!("{}{found}", self.ended_at)
        }
    }
}

pub async fn run(options: ScrubOptions, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    let name = &options.pool;
    let request = ScrubPoolRequest { pool: name.clone() };
    let wanted = match cluster.scrub_pool(request).await {
        Ok(answer) => answer.into_inner().request,
        Err(status) if status.code() == tonic::Code::NotFound => {
            bail!(
                "there is no pool `{}`: `quoin pool list` shows those that exist",
                output::plain(name)
            )
        }
        Err(status) => return Err(refusal(status)),
    };
    if !options.wait {
        let pool = find(&mut cluster, name).await?;
        let view = ScrubView::from(pool.scrub.unwrap_or_default());
        return output::print_one(format, &view, || match pool.state.as_str() {
            "Offline" | "Failed" => format!("pool {name} is offline: it begins when it is back"),
            _ => format!(
                "pool {name} reads what it holds; `quoin pool list -o wide` shows how far it is, \
                 `quoin events` what it finds"
            ),
        });
    }
    let scrub = follow(&mut cluster, name, wanted, client).await?;
    let view = ScrubView::from(scrub);
    output::print_one(format, &view, || {
        fields(&[
            ("pool", name.clone()),
            ("read", show_size(view.read_bytes)),
            ("bad copies", view.found.to_string()),
            ("ended", view.ended_at.clone()),
        ])
    })
}

async fn find(cluster: &mut Cluster, name: &str) -> Result<Pool> {
    let pools = cluster.list_pools(ListPoolsRequest {}).await.map_err(refusal)?.into_inner().pools;
    match pools.into_iter().find(|pool| pool.name == name) {
        Some(pool) => Ok(pool),
        None => bail!("pool {name} is gone"),
    }
}

/// Waits for the end of the requested pass; a pool that reports nothing is not waited for.
async fn follow(
    cluster: &mut Cluster,
    name: &str,
    wanted: u64,
    client: &ClientOptions,
) -> Result<Scrub> {
    let style = "{spinner} {bytes} of {total_bytes} at {bytes_per_sec}, {eta} left";
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?);
    let mut heard = tokio::time::Instant::now();
    let mut last = Scrub::default();
    loop {
        let pool = find(cluster, name).await?;
        let scrub = pool.scrub.unwrap_or_default();
        if scrub.request >= wanted && !scrub.running {
            bar.finish_and_clear();
            return Ok(scrub);
        }
        if scrub != last {
            (last, heard) = (scrub, tokio::time::Instant::now());
        }
        if heard.elapsed() > client.timeout() {
            bar.finish_and_clear();
            bail!(
                "pool {name} has not reported its scrub for {} s ({}{}): the scrub continues when \
                 the pool does",
                client.timeout,
                pool.state.to_lowercase(),
                if pool.message.is_empty() { String::new() } else { format!(": {}", pool.message) },
            );
        }
        bar.set_length(scrub.total_bytes);
        bar.set_position(if scrub.request >= wanted { scrub.read_bytes } else { 0 });
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
