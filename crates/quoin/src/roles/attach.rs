//! `quoin attach`: makes block devices of the volumes that this node's target serves.

use anyhow::{Result, bail};
use clap::Args;
use quoin_console::Source;
use std::path::PathBuf;
use std::time::Duration;

use super::RoleOptions;

#[derive(Args)]
pub struct AttachOptions {
    /// It is asked at DIRECTORY/attach/attach.sock, and mounts its FUSE files beside it.
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/quoin")]
    run: PathBuf,
    /// Seconds that a shutdown waits for devices in use.
    #[arg(long, default_value_t = 0)]
    drain: u64,
    #[command(flatten)]
    role: RoleOptions,
}

pub fn run(options: AttachOptions) -> Result<()> {
    // Said before anything is made, where the first volume's error would come too late.
    if let Err(reason) = crate::host::can_attach() {
        bail!("{reason}; without block devices, volumes are used over NBD");
    }
    super::check_run_directory(&options.run)?;
    let source = Source::new(String::new, || Ok(()));
    super::run(&options.role, source, |shutdown| async move {
        let mut attach = quoin_frontend::attach::Options::new(options.run.join("attach"));
        attach.drain_timeout = Duration::from_secs(options.drain);
        Ok(quoin_frontend::attach::run(attach, shutdown).await?)
    })
}
