//! `quoin target`: serves the volumes that this node uses.

use anyhow::Result;
use clap::Args;
use quoin_console::Source;
use quoin_identity::Role;
use quoin_target::MetricsHandle;
use quoin_target::metrics::Metrics;
use std::path::PathBuf;

use super::{MemberOptions, RoleOptions};

#[derive(Args)]
pub struct TargetOptions {
    /// The node's identity directory; target and node of one host share it.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Volumes are served at DIRECTORY/nbd/<volume id>.sock.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Threads that serve volumes [default: one per two cores].
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    shards: usize,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: TargetOptions) -> Result<()> {
    let metrics = Metrics::new();
    let shown = metrics.clone();
    let source = Source::new(move || shown.render(), || Ok(()));
    super::run(&options.role, source, |shutdown| async move {
        let target = quoin_target::Options {
            node: options.member.name_of(&options.state),
            identity: options.state,
            join: options.member.join_request(Role::Node)?,
            controller: options.member.controller,
            run_dir: options.run,
            shards: options.shards,
            metrics: MetricsHandle(metrics),
        };
        Ok(quoin_target::run(target, shutdown).await?)
    })
}
