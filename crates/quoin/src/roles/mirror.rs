//! `quoin mirror run`: links this cluster to its peers.

use anyhow::Result;
use clap::Args;
use quoin_identity::Role;
use quoin_mirror::metrics::Metrics;
use quoin_telemetry::Source;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::{MemberOptions, RoleOptions};

#[derive(Args)]
pub struct MirrorOptions {
    /// The mirror's identity; a directory of its own.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Where mirrors of peers are let in, each with a certificate of its own cluster.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:10810")]
    listen: SocketAddr,
    /// HOST:PORT that peers are told [default: the listening one; where that is every address, the one by
    /// which the controller is reached].
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// The node whose target runs on this host [default: the mirror's own name].
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Run directory of that target: volumes are read and written by its sockets there.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: MirrorOptions) -> Result<()> {
    let metrics = Metrics::default();
    let (shown, health) = (metrics.clone(), metrics.health.clone());
    let source = Source::new(move || shown.render(), move || health.check());
    super::run(&options.role, source, |shutdown| async move {
        let name = options.member.name_of(&options.state);
        let mirror = quoin_mirror::Options {
            node: options.node.unwrap_or_else(|| name.clone()),
            name,
            join: options
                .member
                .request_of_member(Role::Mirror, &options.state, shutdown.clone())
                .await?,
            identity: options.state,
            controller: options.member.controller,
            listen: options.listen,
            advertise: options.advertise,
            run_dir: options.run,
            metrics,
        };
        Ok(quoin_mirror::run(mirror, shutdown).await?)
    })
}
