//! `quoin node run`: the CSI plugin of this host.

use anyhow::Result;
use clap::Args;
use quoin_csi::Mode;
use quoin_identity::Role;
use quoin_telemetry::Source;
use std::path::PathBuf;

use super::{MemberOptions, RoleOptions};

#[derive(Args)]
pub struct NodeOptions {
    /// The node's identity and its records of what is staged.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// Where the target serves volumes and the attach process listens.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Where CSI is served.
    #[arg(long, env = "CSI_ENDPOINT", value_name = "unix:///PATH.sock")]
    csi_endpoint: String,
    /// Where CSI-Addons are served (healer, fencing, replication and others, see docs/csi-addons.md): a
    /// socket in another directory than that of CSI. Without it they are not served.
    #[arg(long, value_name = "unix:///PATH.sock")]
    csi_addons_endpoint: Option<String>,
    /// Which CSI services do their work: all, controller or node.
    #[arg(long, default_value = "all")]
    mode: Mode,
    /// The driver name that orchestrators know.
    #[arg(long, default_value = quoin_csi::DRIVER_NAME)]
    driver_name: String,
    /// Volumes that may be attached here; 0: no limit of its own.
    #[arg(long, default_value_t = 0)]
    volumes_max: u32,
    /// Callers that are known by the secret `callerToken`, and the calls that each may make (YAML, see
    /// docs/csi.md). Without it no token is needed, and the permissions of the socket decide.
    #[arg(long, value_name = "FILE")]
    callers: Option<PathBuf>,
    /// The newest edition of CSI whose capabilities are advertised, 1.8 to 1.13; calls of later ones are
    /// refused as not served. 1.13 adds health of volumes and topology of snapshots.
    #[arg(long, value_name = "EDITION", default_value_t = quoin_csi::Edition::default())]
    csi_edition: quoin_csi::Edition,
    /// Advertise VOLUME_MOUNT_GROUP and give the files of a volume to the group that its publication
    /// names. For orchestrators that do not do it themselves; Kubernetes does, by `fsGroup`.
    #[arg(long)]
    volume_mount_group: bool,
    #[command(flatten)]
    topology: super::topology::TopologyOptions,
    #[command(flatten)]
    member: MemberOptions,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: NodeOptions) -> Result<()> {
    super::data_path::keep_secrets();
    let metrics = quoin_csi::Metrics::default();
    let (shown, health) = (metrics.clone(), metrics.health.clone());
    let source = Source::new(move || shown.render(), move || health.check());
    super::run(&options.role, source, |shutdown| async move {
        let member = &options.member;
        member.identity_of_member(Role::Node, &options.state, shutdown.clone()).await?;
        let controller = options.member.controller;
        let mut node =
            quoin_csi::Options::new(options.state, options.run, controller, options.csi_endpoint);
        node.csi_addons_endpoint = options.csi_addons_endpoint;
        node.metrics = metrics;
        node.mode = options.mode;
        node.driver_name = options.driver_name;
        node.volumes_max = options.volumes_max;
        node.callers = options.callers;
        node.edition = options.csi_edition;
        node.volume_mount_group = options.volume_mount_group;
        node.topology = options.topology.segments()?;
        Ok(quoin_csi::run(node, shutdown).await?)
    })
}
