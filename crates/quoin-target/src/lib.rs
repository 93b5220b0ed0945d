//! The target of a node: serves every volume that is attached there.
//!
//! [`run`] learns from the controller which volumes to serve and gives each to one of its
//! **shards** ([`shard`]): threads with an epoll loop of their own, which own whole volumes and
//! drive `quoin_core::target::Target` with them. Connections to replicas are made on helper
//! threads ([`dial`]); a volume's clients come over its socket ([`listen`], [`client`]) or, where
//! it is asked for, over TCP ([`door`]). The
//! control thread (tokio) asks for epochs and reports; no IO ever waits for it.

pub mod assignment;
pub mod client;
mod control;
pub mod dial;
pub mod door;
pub mod listen;
pub mod metrics;
mod notes;
pub mod shard;
mod throttle;
pub mod tokens;
mod verification;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quoin_identity::{Contact, JoinRequest};
use quoin_wire::Mode;
use quoin_wire::notices::Notices;
use tokio::sync::{mpsc, watch};

use control::Control;
use dial::Reach;
use door::Door;
use metrics::Metrics;
use shard::{Input, Shard};

/// How a target is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node's name, as in its certificate.
    pub node: String,
    /// Where certificate and key are, or will be after joining: the node's own.
    pub identity: PathBuf,
    /// How to join, for a node that has no identity yet.
    pub join: Option<JoinRequest>,
    /// host:port of the controller's agent service.
    pub controller: String,
    /// Sockets are made in `nbd/` below it.
    pub run_dir: PathBuf,
    /// Threads that serve volumes; 0: one per two cores, at least one.
    pub shards: usize,
    /// Serve the volumes over TCP too.
    pub nbd: Option<door::NbdOptions>,
    /// Made by the caller, who shows it.
    pub metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
    #[error(transparent)]
    Door(#[from] door::DoorError),
    #[error(
        "the identity in {dir} is of {holder}, not of node {name}: give --state another directory, or the node its old name"
    )]
    OtherIdentity { dir: PathBuf, holder: String, name: String },
    #[error("cannot make the directory {path} for sockets: {source}")]
    RunDir { path: PathBuf, source: std::io::Error },
    #[error("another target serves in {path}: one node has one target")]
    Locked { path: PathBuf },
    #[error("the system refused what a target needs: {0}")]
    System(#[from] std::io::Error),
}

/// How long a stopping target may take to drain and close its volumes.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Serves until `shutdown`, then drains, syncs and closes every volume.
pub async fn run(options: Options, mut shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    let identity = quoin_identity::load_or_join(&options.identity, options.join.as_ref()).await?;
    if identity.peer().role != quoin_identity::Role::Node || identity.peer().name != options.node {
        return Err(Error::OtherIdentity {
            dir: options.identity.clone(),
            holder: identity.peer().to_string(),
            name: options.node.clone(),
        });
    }
    let _lock = prepare_run_dir(&options)?;
    let door = options.nbd.as_ref().map(|nbd| Door::open(nbd, &identity)).transpose()?;
    let notices = Notices::default();
    let (asks, asked) = mpsc::unbounded_channel();
    let mut threads = Vec::new();
    let mut shards = Vec::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let count = if options.shards == 0 { (cores / 2).max(1) } else { options.shards };
    for n in 0..count {
        let reach =
            Reach::Tls { identity: identity.clone(), mode: Mode::remembered(identity.dir()) };
        let metrics = options.metrics.clone();
        let (shard, handle) = Shard::new(reach, asks.clone(), notices.clone(), metrics)?;
        let thread =
            std::thread::Builder::new().name(format!("shard-{n}")).spawn(move || shard.run())?;
        threads.push(thread);
        shards.push(handle);
    }
    drop(asks);
    tracing::info!(
        node = options.node,
        sockets = %options.run_dir.join("nbd").display(),
        controller = options.controller,
        "serving"
    );
    let control = Arc::new(Control {
        channel: identity.channel(&options.controller)?,
        contact: Contact::new(&options.controller),
        options,
        identity,
        shards: shards.clone(),
        notices,
        served: Default::default(),
        changed: Arc::default(),
        door,
    });
    let mut tasks = tokio::task::JoinSet::new();
    let answering = tokio::spawn(control.clone().answer(asked));
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.follow(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.report(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move {
        c.identity.keep_renewed(c.options.controller.clone(), s).await;
    });

    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move {
        let Some(door) = &c.door else { return };
        if let Err(error) = door.serve(c.clone(), s).await {
            tracing::error!(%error, "NBD is not served over TCP any more");
        }
    });

    // A shard ends by itself only when the system refuses its event loop.
    let watched = tokio::task::spawn_blocking(move || {
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a shard panicked")))
        })
    });
    tokio::pin!(watched);
    let ended = tokio::select! {
        _ = shutdown.wait_for(|down| *down) => {
            for shard in &shards {
                shard.send(Input::Shutdown);
            }
            // Volumes that cannot be closed in time are waited out by the next open's lease.
            tokio::time::timeout(STOP_MAX, &mut watched).await.ok()
        }
        ended = &mut watched => Some(ended),
    };
    tasks.shutdown().await;
    answering.abort();
    match ended {
        Some(Ok(result)) => result.map_err(Error::System),
        Some(Err(error)) => Err(Error::System(std::io::Error::other(error))),
        None => {
            tracing::warn!("not every volume could be closed in time");
            Ok(())
        }
    }
}

/// One target serves a node: the lock is held as long as the process lives.
fn prepare_run_dir(options: &Options) -> Result<std::fs::File, Error> {
    use std::os::unix::fs::DirBuilderExt;
    let path = options.run_dir.join("nbd");
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&path)
        .map_err(|source| Error::RunDir { path: path.clone(), source })?;
    let lock_path = path.join("lock");
    let lock = std::fs::File::create(&lock_path)
        .map_err(|source| Error::RunDir { path: path.clone(), source })?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked { path }),
        Err(std::fs::TryLockError::Error(source)) => Err(Error::RunDir { path, source }),
    }
}
