//! `quoin attach`: makes block devices of the volumes that this node's target serves.

use anyhow::{Result, bail};
use clap::Args;
use quoin_attach::{AtShutdown, Metrics};
use quoin_telemetry::Source;
use std::path::PathBuf;
use std::time::Duration;

use super::RoleOptions;
use super::data_path::Part;

#[derive(Args)]
pub struct AttachOptions {
    /// It is asked at DIRECTORY/attach/attach.sock, and mounts its FUSE files beside it.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Seconds that a shutdown waits for devices in use. Then it leaves them to the next `quoin
    /// attach` and only pauses their IO, which needs `quoin attach-holder` beside it and Linux
    /// 6.9; otherwise their IO fails.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    drain: u64,
    /// A shutdown leaves devices that are not in use as well, instead of detaching them.
    #[arg(long, conflicts_with = "detach")]
    keep: bool,
    /// A shutdown detaches devices in use as well: their IO fails, and it says so.
    #[arg(long)]
    detach: bool,
    /// Refuse to start where the run directory is on no shared mount. In a container its mounts would
    /// end with it, and the next one could not grow volumes that are in use.
    #[arg(long)]
    expect_shared_mounts: bool,
    #[command(flatten)]
    role: RoleOptions,
}

#[derive(Args)]
pub struct HolderOptions {
    /// The attach process finds it at DIRECTORY/attach/holder.sock.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Write logs as JSON, one object a line.
    #[arg(long)]
    log_json: bool,
}

/// Holds until it is ended; nothing is lost then while the attach process runs.
pub fn hold(options: &HolderOptions) -> Result<()> {
    super::start_logs(options.log_json);
    super::data_path::prepare(Part::Other);
    super::raise_open_files();
    let directory = options.run.join("attach");
    match quoin_attach::holder::serve(&directory.join("holder.sock"))? {}
}

pub fn run(options: AttachOptions) -> Result<()> {
    // Refused before anything is made: the first volume's error would come too late.
    if let Err(reason) = crate::host::can_attach() {
        bail!("{reason}; without block devices, volumes are used over NBD");
    }
    super::start_logs(options.role.log_json);
    super::data_path::prepare(Part::Attach);
    super::check_run_directory(&options.run)?;
    let metrics = Metrics::default();
    let (shown, health) = (metrics.clone(), metrics.clone());
    let source = Source::new(move || shown.render(), move || health.health());
    let within = super::shutdown::WITHIN + Duration::from_secs(options.drain);
    super::run_ending_within(within, &options.role, source, |shutdown| async move {
        let mut attach = quoin_attach::Options::new(options.run.join("attach"));
        attach.drain_timeout = Duration::from_secs(options.drain);
        attach.at_shutdown = match (options.keep, options.detach) {
            (true, _) => AtShutdown::LeaveAll,
            (_, true) => AtShutdown::DetachAll,
            _ => AtShutdown::LeaveInUse,
        };
        attach.metrics = metrics;
        attach.expects_shared_mounts = options.expect_shared_mounts;
        Ok(quoin_attach::run(attach, shutdown).await?)
    })
}
