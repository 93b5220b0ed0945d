//! `quoin controller init|run`.

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use quoin_console::Source;
use quoin_control::policy::ReplaceAfter;
use quoin_control::records::Spread;
use quoin_identity::Lifetimes;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::RoleOptions;
use crate::output;

#[derive(Subcommand)]
pub enum ControllerCommand {
    /// Make a cluster: its records, its certificate authority and a first join token.
    #[command(
        after_help = "Example:\n  quoin controller init --state /var/lib/quoin/controller\n  \
        quoin controller run --state /var/lib/quoin/controller --listen 0.0.0.0:7400"
    )]
    Init {
        /// An empty or missing directory; it will hold the authority's key, so keep it private.
        #[arg(long, value_name = "DIRECTORY")]
        state: PathBuf,
    },
    /// Serve a cluster made by `init`.
    Run(Box<ControllerOptions>),
}

#[derive(Args)]
pub struct ControllerOptions {
    /// The directory that `init` made.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// The admin socket; who may open it may do everything.
    #[arg(long, value_name = "PATH", default_value = "/run/quoin/admin.sock")]
    admin_socket: PathBuf,
    /// Where pools and nodes connect (mutual TLS) [default: nowhere, the admin socket only].
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// What data connections do beside proving who is there: `encrypt` hides what they carry and
    /// costs little more than `authenticate`, which is for those who must look into the traffic.
    /// Neither is needed within a host, where a unix socket takes TCP's place.
    #[arg(long, value_parser = ["authenticate", "encrypt"], default_value = "encrypt")]
    data_security: String,
    /// Replicas of a volume that does not say.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=5))]
    default_replicas: u8,
    /// What the replicas of a volume that does not say never share.
    #[arg(long, value_enum, default_value = "host")]
    default_spread: SpreadDefault,
    /// Replace a replica that is gone for so long (as in 90s, 10m, 2h), or `off`: only what people
    /// ask for changes anything. A volume may say otherwise.
    #[arg(long, value_name = "TIME", default_value_t = ReplaceAfter::DEFAULT)]
    replace_after: ReplaceAfter,
    /// Replicas rebuilt into one pool at a time, of those that self-healing and drains begin.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = quoin_control::HEALS_PER_POOL,
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    heals_per_pool: u32,
    #[command(flatten)]
    role: RoleOptions,
}

#[derive(Clone, Copy, ValueEnum)]
enum SpreadDefault {
    Host,
    Pool,
}

pub fn run(command: ControllerCommand) -> Result<()> {
    match command {
        ControllerCommand::Init { state } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let made = runtime
                .block_on(quoin_control::init(&state, Lifetimes::default()))
                .with_context(|| format!("make a cluster in {}", state.display()))?;
            output::print_line(&format!(
                "cluster {} is made in {}\nThe first pool or node joins with this token, once, within \
                 the hour:\n{}",
                made.cluster_id,
                state.display(),
                made.join_token
            ))
        }
        ControllerCommand::Run(options) => {
            let mut control = quoin_control::Options::new(&options.state);
            control.admin_socket = options.admin_socket;
            control.listen = options.listen;
            control.data_security = options.data_security;
            control.default_replicas = options.default_replicas;
            control.default_spread = match options.default_spread {
                SpreadDefault::Host => Spread::Host,
                SpreadDefault::Pool => Spread::Pool,
            };
            control.replace_after = options.replace_after;
            control.heals_per_pool = options.heals_per_pool;
            let metrics = control.metrics.clone();
            let health = control.metrics.clone();
            let source = Source::new(move || metrics.render(), move || health.health());
            super::run(&options.role, source, |shutdown| async {
                Ok(quoin_control::run(control, shutdown).await?)
            })
        }
    }
}
