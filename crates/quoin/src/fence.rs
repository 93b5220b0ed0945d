//! `quoin fence add|remove|list`: blocks of addresses from which no volume is written any more.

use anyhow::Result;
use clap::Subcommand;
use quoin_api::control::{AddFencesRequest, Fence, ListFencesRequest, RemoveFencesRequest};
use serde::Serialize;

use crate::client::{ClientOptions, refusal};
use crate::events::show_time;
use crate::output::{self, Format, Row};

#[derive(Subcommand)]
pub enum FenceCommand {
    /// Shut out nodes with an address in these blocks, and clients that come from one: once this has
    /// ended well, they write no volume any more, whether or not they can be reached.
    #[command(
        after_help = "A fence needs nothing of the node: pools refuse it, and its lease ends. Replicas \
        in its pools stay in service.\nUntil the fence is removed the node gets no volume and no epoch.\n\
        While too few pools can be asked, the command says so and ends with an error; the fence stays \
        all\nthe same, and a repeat waits on.\n\nExamples:\n  \
        quoin fence add 192.0.2.7/32                  one address\n  \
        quoin fence add 192.0.2.0/24 2001:db8::/64    all that begin alike"
    )]
    Add {
        /// Blocks, as ADDRESS/LENGTH.
        #[arg(required = true)]
        blocks: Vec<String>,
    },
    /// Lift the fences of exactly these blocks: an address that another fenced block covers stays fenced.
    #[command(after_help = "Example:\n  quoin fence remove 192.0.2.7/32")]
    Remove {
        /// Blocks, as `quoin fence list` shows them.
        #[arg(required = true, value_name = "FENCED")]
        blocks: Vec<String>,
    },
    /// The blocks that are fenced, since when, and the nodes that they cover.
    #[command(visible_alias = "ls")]
    List,
}

pub async fn run(command: FenceCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let mut cluster = client.connect().await?;
    match command {
        FenceCommand::Add { blocks } => {
            let request = AddFencesRequest { blocks: blocks.clone() };
            cluster.add_fences(request).await.map_err(refusal)?;
            output::print_one(format, &Blocks { blocks: &blocks }, || fenced(&blocks, "fenced"))
        }
        FenceCommand::Remove { blocks } => {
            let request = RemoveFencesRequest { blocks: blocks.clone() };
            cluster.remove_fences(request).await.map_err(refusal)?;
            let lifted = || fenced(&blocks, "not fenced any more");
            output::print_one(format, &Blocks { blocks: &blocks }, lifted)
        }
        FenceCommand::List => {
            let fences = cluster.list_fences(ListFencesRequest {}).await.map_err(refusal)?;
            let rows: Vec<_> =
                fences.into_inner().fences.into_iter().map(FenceView::from).collect();
            output::print_list(format, &rows, "no block is fenced")
        }
    }
}

fn fenced(blocks: &[String], what: &str) -> String {
    let is = if blocks.len() == 1 { "block" } else { "blocks" };
    format!("{is} {}: {what}", blocks.join(", "))
}

#[derive(Serialize)]
struct Blocks<'a> {
    blocks: &'a [String],
}

#[derive(Serialize)]
struct FenceView {
    block: String,
    since: String,
    nodes: Vec<String>,
}

impl From<Fence> for FenceView {
    fn from(fence: Fence) -> Self {
        let since = fence.since.as_ref().map(show_time).unwrap_or_default();
        Self { block: fence.block, since, nodes: fence.nodes }
    }
}

impl Row for FenceView {
    const HEADER: &'static [&'static str] = &["BLOCK", "SINCE", "NODES"];
    const NARROW: usize = 3;

    fn cells(&self) -> Vec<String> {
        let nodes = match self.nodes.is_empty() {
            true => "none".to_owned(),
            false => self.nodes.join(", "),
        };
        vec![self.block.clone(), self.since.clone(), nodes]
    }
}
