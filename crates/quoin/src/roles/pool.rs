//! `quoin pool run`: serves the replicas in one pool.

use anyhow::Result;
use clap::Args;
use quoin_console::Source;
use quoin_identity::Role;
use quoin_pool::MetricsHandle;
use quoin_pool::metrics::Metrics;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::{MemberOptions, RoleOptions};
use crate::size::parse_size;

#[derive(Args)]
pub struct PoolOptions {
    /// The pool's identity directory.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// A directory (the pool is a file in it), a file, or a raw block device.
    #[arg(long, value_name = "PATH")]
    data: PathBuf,
    /// Make a sparse pool file that may grow to this size, where there is none yet.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    capacity: Option<u64>,
    /// Take the whole capacity from the disk at once.
    #[arg(long, requires = "capacity")]
    preallocate: bool,
    /// Make a pool on a block device, or in a file that exists, if it is blank.
    #[arg(long)]
    format: bool,
    /// Serve another pool than this identity served before: that one's replicas are taken for
    /// lost and are rebuilt.
    #[arg(long)]
    replace: bool,
    /// The host that the pool is on: replicas spread over hosts never share one.
    #[arg(long, default_value_t = super::host_name())]
    node: String,
    /// Where targets connect; port 0 takes any.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:0")]
    listen: SocketAddr,
    /// `host:port` that targets are told [default: what --listen became].
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Memory for the maps of the replicas.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "128MiB")]
    cache: u64,
    /// Where the pool stands, as in quoin.io/zone=west; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = super::parse_pair)]
    topology: Vec<(String, String)>,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: PoolOptions) -> Result<()> {
    let name = options.member.name_of(&options.state);
    let metrics = Metrics::new(&name);
    let shown = metrics.clone();
    let health = metrics.health.clone();
    let source = Source::new(move || shown.render(), move || health.check());
    super::run(&options.role, source, |shutdown| async move {
        let pool = quoin_pool::Options {
            name,
            node: options.node,
            path: options.data,
            size_bytes: options.capacity,
            sparse: !options.preallocate,
            format: options.format,
            replace: options.replace,
            identity: options.state,
            join: options.member.join_request(Role::Pool)?,
            controller: options.member.controller,
            listen: options.listen,
            advertise: options.advertise,
            topology: options.topology.into_iter().collect(),
            cache_bytes: options.cache,
            metrics: MetricsHandle(metrics),
        };
        Ok(quoin_pool::run(pool, shutdown).await?)
    })
}
