//! The target of a node: serves every volume that is attached there.
//!
//! [`run`] receives the assigned volumes from the controller and gives each to one of its
//! **shards** ([`shard`]): threads with an epoll loop of their own, which own whole volumes and
//! drive `quoin_replication::primary::Primary` with them. Connections to replicas are made on
//! helper threads ([`dial`]); a volume's clients come over its socket ([`listen`], [`client`]) or,
//! where configured, over TCP ([`nbd_listener`]); so do other nodes that share a volume, while the
//! sockets of volumes that are served elsewhere lead there ([`relay`]). Exports of snapshots, and slots for
//! copies of volumes of another cluster, have a socket of their own ([`history`], [`feed`]). The control thread (tokio)
//! requests epochs and reports; no IO ever waits for it.

pub mod assignment;
pub mod client;
pub mod commands;
mod control;
pub mod dial;
mod epoch_requests;
pub mod feed;
pub mod fences;
pub mod history;
pub mod listen;
pub mod metrics;
pub mod nbd_listener;
mod notes;
mod openings;
mod relay;
mod requested_devices;
pub mod shard;
mod shares;
pub mod standing;
pub mod tokens;
mod verification;
pub mod volume_metrics;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quoin_encryption::DataKey;
use quoin_encryption::handing::{KeyHolder, Refusal};
use quoin_identity::{Contact, JoinRequest};
use quoin_telemetry::notices::Notices;
use quoin_wire::Mode;
use tokio::sync::{mpsc, watch};

use control::Control;
use dial::{Dials, Reach};
use metrics::Metrics;
use nbd_listener::NbdListener;
use relay::Relays;
use requested_devices::RequestedDevices;
use shard::{Input, Shard};

/// Options of a target.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node's name, as in its certificate.
    pub node: String,
    /// Directory of certificate and key, present or after joining: the node's own.
    pub identity: PathBuf,
    /// Join of a node that has no identity yet.
    pub join: Option<JoinRequest>,
    /// host:port of the controller's agent service.
    pub controller: String,
    /// Sockets are made in `nbd/` below it.
    pub run_dir: PathBuf,
    /// Threads that serve volumes; 0: one per two cores, at least one.
    pub shards: usize,
    /// Memory that all volumes together may use for replicas that are away or behind.
    pub catch_up_bytes: u64,
    /// Serve the volumes over TCP too.
    pub nbd: Option<nbd_listener::NbdOptions>,
    /// Where other nodes are let in that share a volume with this one: opened with the first such
    /// volume, unless `nbd` serves with TLS already.
    pub share_listen: SocketAddr,
    /// Metrics of the caller, who serves them.
    pub metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
    #[error(transparent)]
    NbdListener(#[from] nbd_listener::NbdListenerError),
    #[error(
        "the identity in {dir} is of {holder}, not of node {name}: give --state another directory, or the node its old name"
    )]
    OtherIdentity { dir: PathBuf, holder: String, name: String },
    #[error("cannot make the directory {path} for sockets: {source}")]
    RunDir { path: PathBuf, source: std::io::Error },
    #[error("another target serves in {path}: one node has one target")]
    Locked { path: PathBuf },
    /// The controller's statement, with the way back.
    #[error("{0}")]
    Removed(String),
    #[error("the system refused what a target needs: {0}")]
    System(#[from] std::io::Error),
}

/// Time within which a stopping target drains and closes its volumes.
const STOP_MAX: Duration = Duration::from_secs(15);

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
    let keys_directory = options.run_dir.join("nbd");
    let keys = quoin_encryption::handing::bind(&keys_directory)
        .map_err(|source| Error::RunDir { path: keys_directory, source })?;
    let history_socket = options.run_dir.join("nbd").join(quoin_wire::history::SOCKET);
    let history = listen::bind(&history_socket)
        .map_err(std::io::Error::other)
        .and_then(tokio::net::UnixListener::from_std)
        .map_err(|source| Error::RunDir { path: history_socket, source })?;
    let nbd_listener =
        options.nbd.as_ref().map(|nbd| NbdListener::open(nbd, &identity)).transpose()?;
    let notices = Notices::default();
    let (asks, asked) = mpsc::unbounded_channel();
    let (ends, mut ended) = mpsc::unbounded_channel();
    let mut shards = Vec::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let count = if options.shards == 0 { (cores / 2).max(1) } else { options.shards };
    let reach = Reach::Tls { identity: identity.clone(), mode: Mode::remembered(identity.dir()) };
    let dials = Dials::new(reach, options.metrics.dials.clone());
    for n in 0..count {
        let metrics = options.metrics.clone();
        let budget = usize::try_from(options.catch_up_bytes).unwrap_or(usize::MAX) / count;
        let (shard, handle) = Shard::new(&dials, budget, asks.clone(), notices.clone(), metrics)?;
        spawn_shard(n, ends.clone(), move || shard.run())?;
        shards.push(handle);
    }
    drop((asks, ends));
    tracing::info!(
        node = options.node,
        sockets = %options.run_dir.join("nbd").display(),
        controller = options.controller,
        "serving"
    );
    let (channel, source) = identity.controller_with_source(&options.controller)?;
    let changed = Arc::default();
    let control = Arc::new(Control {
        channel,
        source,
        devices: RequestedDevices::new(&options.run_dir, Arc::clone(&changed)),
        contact: Contact::new(&options.controller),
        options,
        identity: identity.clone(),
        shards: shards.clone(),
        dials,
        notices,
        served: Default::default(),
        changed,
        nbd_listener,
        fences_digest: Arc::default(),
        hashing: std::sync::Mutex::default(),
        relays: Arc::new(Relays::new(identity)),
        shares: Default::default(),
    });
    let mut tasks = tokio::task::JoinSet::new();
    let answering = tokio::spawn(control.clone().answer(asked));
    let (c, s) = (control.clone(), shutdown.clone());
    let mut following = tokio::spawn(async move { c.follow(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.report(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.live(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.obey(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move {
        c.identity.keep_renewed(c.options.controller.clone(), s).await;
    });

    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(quoin_encryption::handing::serve(keys, Keys(c), s));
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move {
        let Some(nbd_listener) = &c.nbd_listener else { return };
        if let Err(error) = nbd_listener.serve(standing::Port::All, c.clone(), s).await {
            tracing::error!(%error, "NBD is not served over TCP any more");
        }
    });

    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move { c.share(s).await });
    tasks.spawn(history::serve(history, control.clone()));

    let mut removed = None;
    let ended = tokio::select! {
        Some(why) = async { (&mut following).await.ok().and_then(Result::err) } => {
            removed = Some(why);
            for shard in &shards {
                shard.send(Input::Shutdown);
            }
            tokio::time::timeout(STOP_MAX, all_ended(&mut ended)).await.ok()
        }
        _ = shutdown.wait_for(|down| *down) => {
            for shard in &shards {
                shard.send(Input::Shutdown);
            }
            // Volumes that cannot be closed in time delay the next open by their lease.
            tokio::time::timeout(STOP_MAX, all_ended(&mut ended)).await.ok()
        }
        // The volumes of a shard that ended by itself are not served: a new process serves all.
        first = ended.recv() => Some(first.unwrap_or(Ok(())).and(Err(std::io::Error::other(
            "a shard ended by itself",
        )))),
    };
    if ended.is_none() {
        let volumes = control.unclosed().await.join(", ");
        tracing::warn!(volumes, "ends without closing these: their replicas wait out its lease");
    }
    tasks.shutdown().await;
    following.abort();
    answering.abort();
    if let Some(why) = removed {
        return Err(Error::Removed(why));
    }
    ended.unwrap_or(Ok(())).map_err(Error::System)
}

/// Keys of volumes in use here.
struct Keys(Arc<Control>);

impl KeyHolder for Keys {
    fn take(&self, volume: &str, key: DataKey) -> Result<(), Refusal> {
        self.0.unlock(volume, key)
    }

    fn key(&self, volume: &str) -> Result<DataKey, Refusal> {
        self.0.data_key(volume)
    }
}

type End = std::io::Result<()>;

/// Runs a shard on a thread of its own, which reports its end in every case. A shard ends by itself
/// only when the system refuses its event loop, or an assertion fails.
fn spawn_shard(
    n: usize,
    ends: mpsc::UnboundedSender<End>,
    run: impl FnOnce() -> End + Send + 'static,
) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name(format!("shard-{n}"));
    let watched = move || {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        // The receiver is gone where the process is at its end.
        let _ = ends.send(ended.unwrap_or_else(|_| Err(std::io::Error::other("a shard panicked"))));
    };
    thread.spawn(watched).map(drop)
}

/// Waits for the end of every shard; the first failure is the result.
async fn all_ended(ended: &mut mpsc::UnboundedReceiver<End>) -> End {
    while let Some(end) = ended.recv().await {
        end?;
    }
    Ok(())
}

/// Prepares the directory. One target serves a node: the lock is held as long as the process lives.
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
        Ok(()) => {
            name_host(options)?;
            Ok(lock)
        }
        Err(std::fs::TryLockError::WouldBlock) => Err(Error::Locked { path }),
        Err(std::fs::TryLockError::Error(source)) => Err(Error::RunDir { path, source }),
    }
}

/// File with the name of this host's node, in the directory of its sockets.
pub const NODE_FILE: &str = "node-name";

/// Writes the node's name for the commands on this host.
fn name_host(options: &Options) -> Result<(), Error> {
    let path = options.run_dir.join(NODE_FILE);
    std::fs::write(&path, &options.node).map_err(|source| Error::RunDir { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_any_shard_is_noticed_while_the_others_serve_on() {
        let (ends, mut ended) = mpsc::unbounded_channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        spawn_shard(0, ends.clone(), move || {
            let _ = stopped.recv();
            Ok(())
        })
        .unwrap();
        spawn_shard(1, ends.clone(), || panic!("an assertion of this test")).unwrap();
        drop(ends);
        let first = ended.recv().await.expect("it is noticed");
        assert_eq!(first.unwrap_err().to_string(), "a shard panicked");
        drop(stop);
        all_ended(&mut ended).await.expect("the other one ends well");
    }
}
