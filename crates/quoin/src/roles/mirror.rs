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
        let mirror = quoin_mirror::Options {
            name: options.member.name_of(&options.state),
            join: options.member.join_request(Role::Mirror, &options.state)?,
            identity: options.state,
            controller: options.member.controller,
            listen: options.listen,
            advertise: options.advertise,
            metrics,
        };
        Ok(quoin_mirror::run(mirror, shutdown).await?)
    })
}
