//! The processes of a cluster: flags to a role crate's `Options`, signals to its shutdown.
//!
//! All roles are run alike: logs on stderr, SIGTERM or SIGINT is a clean shutdown that ends within a
//! bound ([`ending`]), `--http` serves the role's metrics and health.

mod attach;
mod controller;
mod controller_records;
mod data_path;
mod healing;
mod join;
mod mirror;
mod node;
mod pool;
mod shutdown;
mod target;
mod topology;

pub use attach::{AttachOptions, HolderOptions, hold, run as attach};
pub use controller::{ControllerCommand, LifetimeOptions, run as controller};
pub use controller_records::{RecordsOptions, StoreKind};
pub use healing::HealingOptions;
pub use join::{JoinOptions, join};
pub use mirror::{MirrorOptions, run as mirror};
pub use node::{NodeOptions, run as node};
pub use pool::{PoolOptions, run as pool};
pub use target::{TargetOptions, run as target};

use anyhow::{Context, Result};
use clap::Args;
use quoin_identity::{Identity, JoinRequest, Role, load_or_join};
use quoin_telemetry::Source;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

/// Options of every role.
#[derive(Args, Clone, Debug)]
pub struct RoleOptions {
    /// Serve /metrics and /healthz on this address. There is no authentication: keep it on
    /// loopback or behind something that has.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http: Option<SocketAddr>,
    /// Write logs as JSON, one object a line.
    #[arg(long)]
    pub log_json: bool,
}

/// Runs a role until it ends or a signal asks it to, and then for [`shutdown::WITHIN`] at most.
pub fn run<F>(
    options: &RoleOptions,
    source: Source,
    role: impl FnOnce(watch::Receiver<bool>) -> F,
) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    run_ending_within(shutdown::WITHIN, options, source, role)
}

/// Like [`run`], for a role that may need longer for its end.
pub fn run_ending_within<F>(
    within: Duration,
    options: &RoleOptions,
    source: Source,
    role: impl FnOnce(watch::Receiver<bool>) -> F,
) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    start_logs(options.log_json);
    raise_open_files();
    let shutdown = shutdown::on_signal(within)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the control threads")?;
    let outcome = runtime.block_on(async {
        if let Some(address) = options.http {
            let listener = quoin_telemetry::listen(address).await?;
            tokio::spawn(quoin_telemetry::serve(listener, source, shutdown.clone()));
        }
        role(shutdown).await
    });
    shutdown::shut_down_runtime(runtime);
    outcome
}

/// A pool needs a descriptor for each session, a target some for each volume.
fn raise_open_files() {
    match quoin_reactor::descriptors::raise_limit() {
        Ok(limit) => tracing::debug!(?limit, "open files"),
        Err(error) => tracing::warn!(%error, "the limit of open files is unchanged"),
    }
}

/// Logs go to stderr; QUOIN_LOG sets what is logged, as in `QUOIN_LOG=debug`.
fn start_logs(json: bool) {
    let filter = EnvFilter::try_from_env("QUOIN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Where the disk under the log is full, a line is lost; reporting that on stderr would panic.
    let logs = logs.log_internal_errors(false);
    // Set once a process; a second call has nothing to add.
    let _ = if json { logs.json().try_init() } else { logs.with_ansi(false).try_init() };
}

/// How a newcomer becomes a member, and finds the controller later.
#[derive(Args, Clone, Debug)]
pub struct MemberOptions {
    /// `host:port` of the controller; where there are several, all of them, separated by commas.
    #[arg(long, value_name = "HOST:PORT,…")]
    pub controller: String,
    /// A join token (`quoin token create`); needed only the first time. Better in the
    /// environment than on the command line, which everybody can read.
    #[arg(
        long,
        visible_alias = "token",
        env = "QUOIN_JOIN_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    pub join: Option<String>,
    /// Join by the token of this pod's service account in this file, where there is no identity and no
    /// join token; needs --authority, and a controller with --admit-service-accounts.
    #[arg(long, value_name = "FILE", env = "QUOIN_SERVICE_ACCOUNT_TOKEN", requires = "authority")]
    pub service_account_token: Option<PathBuf>,
    /// The controller's word of the cluster's authority: `authority` of the ConfigMap that it keeps.
    #[arg(long, value_name = "FILE", env = "QUOIN_AUTHORITY")]
    pub authority: Option<PathBuf>,
    /// The member's name: letters, digits, `-` and `.` [default: the host's].
    #[arg(long)]
    pub name: Option<String>,
}

/// Interval of attempts of a pod to get a join token.
const INTRODUCE_EVERY: Duration = Duration::from_secs(3);

impl MemberOptions {
    /// The member's name: the flag, else whose identity lies in `directory`, else the host's.
    pub fn name_of(&self, directory: &Path) -> String {
        let of_identity = || Some(Identity::load(directory).ok()?.peer().name.clone());
        self.name.clone().or_else(of_identity).unwrap_or_else(host_name)
    }

    /// Request to join, or to join again, with the identity in `directory`; `None` without a token.
    pub fn join_request(&self, role: Role, directory: &Path) -> Result<Option<JoinRequest>> {
        // A configuration file leaves an empty token where the token was taken out.
        let Some(token) = self.join.as_deref().filter(|token| !token.is_empty()) else {
            return Ok(None);
        };
        Ok(Some(JoinRequest {
            controller: self.controller.clone(),
            token: token.parse().context("the join token")?,
            role,
            name: self.name_of(directory),
        }))
    }

    /// Request to join as [`Self::join_request`] has it; where there is no token and a pod's service account
    /// is to be used, with one that the controller gives. It asks until it gets one: a pod that is started
    /// before the controller waits for it, and a refusal stands in its log.
    pub async fn request_of_member(
        &self,
        role: Role,
        directory: &Path,
        mut shutdown: watch::Receiver<bool>,
    ) -> Result<Option<JoinRequest>> {
        let request = self.join_request(role, directory)?;
        let is_member = Identity::load(directory).is_ok_and(|identity| !identity.has_run_out());
        let (Some(file), Some(authority)) = (&self.service_account_token, &self.authority) else {
            return Ok(request);
        };
        if request.is_some() || is_member {
            return Ok(request);
        }
        let (name, controller) = (self.name_of(directory), self.controller.clone());
        loop {
            let introduced = async {
                // Both files are replaced while the pod runs.
                let read = |path: &Path| {
                    std::fs::read_to_string(path).with_context(|| path.display().to_string())
                };
                let (pin, own) = (read(authority)?.parse()?, read(file)?);
                let token =
                    quoin_identity::introduce(&controller, &pin, own.trim(), role, &name).await?;
                anyhow::Ok(token)
            };
            match introduced.await {
                Ok(token) => return Ok(Some(JoinRequest { controller, token, role, name })),
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "cannot join yet; asking again");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(INTRODUCE_EVERY) => {}
                _ = shutdown.wait_for(|stop| *stop) => return Ok(None),
            }
        }
    }

    /// Loads the identity in `directory`, or joins for it.
    pub async fn identity(&self, role: Role, directory: &Path) -> Result<Identity> {
        Ok(load_or_join(directory, self.join_request(role, directory)?.as_ref()).await?)
    }

    /// Does as [`Self::identity`], also by a pod's service account.
    pub async fn identity_of_member(
        &self,
        role: Role,
        directory: &Path,
        shutdown: watch::Receiver<bool>,
    ) -> Result<Identity> {
        let request = self.request_of_member(role, directory, shutdown).await?;
        Ok(load_or_join(directory, request.as_ref()).await?)
    }
}

/// Makes the directory of sockets, but not a tree above it: that would be a typing error.
pub fn check_run_directory(run: &Path) -> Result<()> {
    let run = std::path::absolute(run)?;
    match run.parent() {
        Some(parent) if !parent.is_dir() => anyhow::bail!(
            "there is no directory {} to create {} in: correct --run",
            parent.display(),
            run.display()
        ),
        _ => Ok(()),
    }
}

/// The host's name, cut to what a certificate may carry.
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().to_ascii_lowercase();
    let plain = name.chars().filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-');
    let name: String = plain.take(40).collect();
    let name = name.trim_matches('-');
    if name.is_empty() { "localhost".into() } else { name.into() }
}
