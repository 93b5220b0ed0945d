//! `quoin target`: serves the volumes that this node uses.

use anyhow::Result;
use clap::Args;
use quoin_identity::Role;
use quoin_target::metrics::Metrics;
use quoin_target::nbd_listener::NbdOptions;
use quoin_telemetry::Source;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::data_path::Part;
use super::{MemberOptions, RoleOptions};
use crate::size::{number_within, parse_memory};

#[derive(Args)]
pub struct TargetOptions {
    /// The node's identity directory; target and node of one host share it.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Volumes are served at DIRECTORY/nbd/<volume id>.sock.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Threads that serve volumes [default: one per two cores].
    #[arg(long, env = "QUOIN_TARGET_SHARDS", default_value_t = 0, hide_default_value = true,
          allow_hyphen_values = true, value_parser = number_within::<usize>(0..=64,
          "a target runs 1 to 64 threads; 0 lets it choose by the machine's cores"))]
    shards: usize,
    /// Memory for what volumes were written while a replica was away or behind. Beyond it those
    /// replicas are brought back by copying.
    #[arg(long, value_name = "SIZE", env = "QUOIN_TARGET_CATCH_UP_MEMORY", default_value = "1GiB",
          allow_hyphen_values = true, value_parser = parse_memory)]
    catch_up_memory: u64,
    /// Serve the volumes over TCP too, by name, to clients with a certificate of this cluster:
    /// this node's or an admin's (`quoin cluster join`).
    #[arg(long, value_name = "ADDRESS:PORT")]
    nbd_listen: Option<SocketAddr>,
    /// HOST:PORT in the addresses that users are shown [default: the node's name and the port].
    #[arg(long, value_name = "HOST:PORT", requires = "nbd_listen")]
    nbd_advertise: Option<String>,
    /// No TLS and no certificates on that port; only on loopback, where every user of this host
    /// may then read and write every volume.
    #[arg(long, requires = "nbd_listen")]
    nbd_plain: bool,
    /// Where other nodes are let in that share a volume with this one, each with its certificate and to
    /// that volume alone. The port is opened with the first such volume; with --nbd-listen and TLS that
    /// port is used.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:10809")]
    share_listen: SocketAddr,
    /// No metrics by volume, only those of all volumes together. Each volume has some 50 series, of 500
    /// volumes at most.
    #[arg(long)]
    no_volume_metrics: bool,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: TargetOptions) -> Result<()> {
    super::start_logs(options.role.log_json);
    super::data_path::prepare(Part::Other);
    super::check_run_directory(&options.run)?;
    let metrics = Metrics::new(!options.no_volume_metrics);
    let shown = metrics.clone();
    let health = metrics.health.clone();
    let source = Source::new(move || shown.render(), move || health.check());
    super::run(&options.role, source, |shutdown| async move {
        let target = quoin_target::Options {
            node: options.member.name_of(&options.state),
            join: options
                .member
                .request_of_member(Role::Node, &options.state, shutdown.clone())
                .await?,
            identity: options.state,
            controller: options.member.controller,
            run_dir: options.run,
            shards: options.shards,
            catch_up_bytes: options.catch_up_memory,
            nbd: options.nbd_listen.map(|listen| NbdOptions {
                listen,
                advertise: options.nbd_advertise,
                plain: options.nbd_plain,
            }),
            share_listen: options.share_listen,
            metrics,
        };
        Ok(quoin_target::run(target, shutdown).await?)
    })
}
