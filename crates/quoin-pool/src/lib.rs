//! A pool: the storage of one host and the replicas in it, served to targets.
//!
//! [`run`] joins the cluster, opens the pool and serves it until told to stop. Four kinds of
//! threads, and what is whose:
//!
//! * the **shard** ([`shard`]) owns the pool, its replicas and all sessions: one epoll loop,
//!   no lock, and no hand-over for an IO that the kernel's cache can serve;
//! * the **disk** thread ([`syncer`]) does nothing but sync, one group after the other;
//! * the **fetch** threads ([`fetcher`]) read what no cache has, many reads at once, where the system
//!   has no io_uring for the shard;
//! * **tokio** ([`control`]) talks to the controller; IO goes on while that one is away.
//!
//! A pool whose disk failed is opened anew ([`lives`]). What may be opened and made where is the
//! matter of [`place`].
//!
//! Connections are proven on short-lived helper threads ([`accept`]) before the shard sees them.

pub mod accept;
mod address;
pub mod assignment;
mod control;
pub mod facts;
pub mod fetcher;
pub mod held;
mod lives;
pub mod metrics;
mod place;
pub mod scrub;
pub mod shard;
pub mod syncer;
pub mod witness;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quoin_identity::{Contact, JoinRequest};
use quoin_reactor::{Reactor, Waker};
use quoin_replication::recognition::PoolCounts;
use quoin_store::ReplicaPool;
use quoin_store::disk::Syncer as SyncDisk;
use quoin_telemetry::notices::Notices;
use quoin_wire::Mode;
use quoin_wire::handshake::ServerSecurity;
use tokio::sync::{Notify, oneshot, watch};

use accept::{Acceptor, Belief};
use address::Advertised;
pub use address::check_advertised;
use control::Control;
use facts::PoolFacts;
use lives::Watch;
use metrics::Metrics;
use place::Place;
pub use place::{POOL_FILE, data_path};
use scrub::ScrubPlan;
use shard::{Input, Parts, Recognition};
use witness::Witness;

/// How a pool is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pool's name, as in its certificate.
    pub name: String,
    /// The host it is on: the failure domain `host`.
    pub node: String,
    /// A directory (the pool is a file in it), a file, or a raw block device.
    pub path: PathBuf,
    /// Size of a file that is to be made where there is none; `None`: it must exist.
    pub size_bytes: Option<u64>,
    /// A file that is made takes space only as it is written.
    pub sparse: bool,
    /// Make a pool on a device, or in a file that exists, if it is empty.
    pub format: bool,
    /// Serve another pool than the one that this identity served before.
    pub replace: bool,
    /// Where certificate and key are, or will be after joining.
    pub identity: PathBuf,
    /// How to join, for a pool that has no identity yet.
    pub join: Option<JoinRequest>,
    /// host:port of the controller's agent service.
    pub controller: String,
    /// Where targets connect to; port 0 takes any, and the same one at the next start.
    pub listen: SocketAddr,
    /// host:port that targets are told; `None`: what `listen` became, or where that is every address
    /// of the host, the one that the connection to the controller comes from.
    pub advertise: Option<String>,
    /// Targets of this host come by the network too.
    pub network_only: bool,
    pub topology: BTreeMap<String, String>,
    /// Memory for the maps of the replicas, in bytes.
    pub cache_bytes: u64,
    /// From the end of one scrub to the begin of the next; `None`: only when it is asked for.
    pub scrub_period: Option<Duration>,
    /// Made by the caller, who shows it.
    pub metrics: Metrics,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),
    #[error(
        "the identity in {dir} is of {holder}, not of pool {name}: give --state another directory, or the pool its old name"
    )]
    OtherIdentity { dir: PathBuf, holder: String, name: String },
    #[error(
        "cannot listen on {address} ({source}): choose another with --listen ADDRESS:PORT; each pool of a host has a port of its own"
    )]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("the pool at {path}: {reason}")]
    Open { path: PathBuf, reason: String },
    /// The controller's word, with the way back.
    #[error("{0}")]
    Removed(String),
    #[error("the system refused what a pool needs: {0}")]
    System(#[from] std::io::Error),
}

/// A pool as it was opened, and how to sync it from another thread.
pub struct Opened<P> {
    pub pool: P,
    /// The pool's own id, for the records.
    pub id: String,
    pub syncer: SyncDisk,
}

/// Talks to the shard.
#[derive(Clone)]
pub struct ShardHandle {
    inputs: Sender<Input>,
    waker: Waker,
}

impl ShardHandle {
    pub fn send(&self, input: Input) {
        // Fails only after the shard ended.
        let _ = self.inputs.send(input);
        self.waker.wake();
    }
}

/// Serves the pool at `options.path` until `shutdown`; makes it first where that was asked for.
pub async fn run(options: Options, shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    let place = Place {
        path: options.path.clone(),
        size_bytes: options.size_bytes,
        sparse: options.sparse,
        format: options.format,
        replace: options.replace,
        cache_bytes: options.cache_bytes,
        identity: options.identity.clone(),
    };
    // The check may wait for a device that the host's tools look at.
    let (place, checked) = tokio::task::spawn_blocking(move || {
        let checked = place.check();
        (place, checked)
    })
    .await
    .map_err(std::io::Error::other)?;
    let checked = Mutex::new(checked?);
    let take = move || checked.lock().unwrap_or_else(PoisonError::into_inner).take();
    serve(options, move || place.open(take()), shutdown).await
}

/// Serves a pool that `open` opens (again, after its disk failed) until `shutdown`.
pub async fn serve<P, F>(
    options: Options,
    open: F,
    mut shutdown: watch::Receiver<bool>,
) -> Result<(), Error>
where
    P: ReplicaPool + PoolFacts + Send + 'static,
    F: Fn() -> Result<Opened<P>, Error> + Send + Sync + 'static,
{
    let identity = quoin_identity::load_or_join(&options.identity, options.join.as_ref()).await?;
    if identity.peer().role != quoin_identity::Role::Pool || identity.peer().name != options.name {
        return Err(Error::OtherIdentity {
            dir: options.identity.clone(),
            holder: identity.peer().to_string(),
            name: options.name.clone(),
        });
    }
    let listener = address::listen(options.listen, identity.dir())?;
    let bound = listener.local_addr()?;
    let open = Arc::new(open);
    let mut witness = Witness::of(identity.dir());
    let first = {
        let open = open.clone();
        tokio::task::spawn_blocking(move || open()).await.map_err(std::io::Error::other)?
    };
    let first = first.inspect_err(|_| {
        if let Err(refused) = witness.disk_failed() {
            tracing::error!("the next process will not know that the pool did not open: {refused}");
        }
    })?;
    let pool_id = first.id.clone();
    tracing::info!(
        pool = options.name,
        data = %options.path.display(),
        listen = %bound,
        controller = options.controller,
        "serving"
    );

    let reactor = Reactor::new()?;
    let (sender, inputs) = channel();
    let handle = ShardHandle { inputs: sender.clone(), waker: reactor.waker() };
    let security = Arc::new(Mutex::new(ServerSecurity::Tls {
        config: identity.server_config()?,
        least: Mode::remembered(identity.dir()),
    }));
    let metrics = options.metrics.clone();
    let notices = Notices::default();
    let acceptor = Acceptor::new(
        listener,
        (!options.network_only).then_some(&*options.name),
        security.clone(),
        Belief::Grants(identity.clone()),
        sender.clone(),
        reactor.waker(),
        metrics.clone(),
    )?;
    let scrub = ScrubPlan {
        period: options.scrub_period,
        file: Some(identity.dir().join(scrub::STATE_FILE)),
    };
    let counts = Arc::new(Mutex::new(PoolCounts::default()));
    let made = Arc::new(Notify::new());
    let parts = Parts {
        reactor,
        acceptor,
        inputs,
        notices: notices.clone(),
        metrics,
        scrub,
        recognition: Recognition::Awaited,
        counts: counts.clone(),
        assignment: assignment::Assignment::default(),
        witness,
        made: made.clone(),
    };
    let trouble = Arc::new(Mutex::new(None));
    let shard_thread = {
        let watch = Watch {
            trouble: trouble.clone(),
            health: options.metrics.health.clone(),
            stop: shutdown.clone(),
        };
        std::thread::Builder::new()
            .name("shard".into())
            .spawn(move || lives::keep_serving(first, &*open, parts, &sender, &watch))?
    };

    let (channel, source) = identity.controller_with_source(&options.controller)?;
    let control = Arc::new(Control {
        channel,
        contact: Contact::new(&options.controller),
        address: Advertised::new(options.advertise.clone(), bound, source),
        options,
        identity,
        pool_id,
        shard: handle.clone(),
        security,
        notices,
        changed: Arc::new(Notify::new()),
        made,
        trouble,
        counts,
        told_holdings: AtomicU64::new(0),
    });
    let mut tasks = tokio::task::JoinSet::new();
    let (c, s) = (control.clone(), shutdown.clone());
    let mut following = tokio::spawn(async move { c.follow(s).await });
    let (c, s) = (control.clone(), shutdown.clone());
    let (shard_ended, ended) = oneshot::channel();
    let reporting = tokio::spawn(async move { c.report(s, ended).await });
    let (c, s) = (control.clone(), shutdown.clone());
    tasks.spawn(async move {
        c.identity.keep_renewed(c.options.controller.clone(), s).await;
    });

    let removed = tokio::select! {
        followed = &mut following => followed.ok().and_then(Result::err),
        // An error means that the sender is gone, and no shutdown can be asked for any more.
        _ = shutdown.wait_for(|down| *down) => None,
    };
    handle.send(Input::Shutdown);
    let ended = tokio::task::spawn_blocking(move || shard_thread.join()).await;
    following.abort();
    tasks.shutdown().await;
    if let Some(why) = removed {
        reporting.abort();
        return Err(Error::Removed(why));
    }
    // The receiver is gone only where the reporting task panicked.
    let _ = shard_ended.send(());
    let _ = reporting.await;
    match ended {
        Ok(Ok(result)) => result,
        _ => Err(Error::System(std::io::Error::other("the pool's shard panicked"))),
    }
}

#[cfg(test)]
mod tests {
    use quoin_identity::{Authority, Lifetimes, Role};
    use quoin_store::{MemoryDisk, Pool};

    use super::*;

    #[tokio::test]
    async fn a_pool_is_not_served_by_the_identity_of_another_holder() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(dir.path(), Lifetimes::default()).unwrap();
        for (role, name) in [(Role::Pool, "p2"), (Role::Node, "p1"), (Role::Node, "p2")] {
            let state = dir.path().join(format!("{role}-{name}"));
            authority.issue_identity(&state, role, name).unwrap();
            let options = Options {
                name: "p1".into(),
                node: "h1".into(),
                path: dir.path().join("data"),
                size_bytes: None,
                sparse: true,
                format: false,
                replace: false,
                identity: state.clone(),
                join: None,
                controller: "127.0.0.1:1".into(),
                listen: "127.0.0.1:0".parse().unwrap(),
                advertise: None,
                network_only: true,
                topology: BTreeMap::new(),
                cache_bytes: 1 << 20,
                scrub_period: None,
                metrics: Metrics::new("p1"),
            };
            let open = || -> Result<Opened<Pool<MemoryDisk>>, Error> { panic!("it was opened") };
            let (_stop, stopped) = watch::channel(false);
            match serve(options, open, stopped).await {
                Err(Error::OtherIdentity { dir, holder, name: asked }) => {
                    assert_eq!((dir, asked.as_str()), (state, "p1"));
                    assert!(holder.contains(name), "{holder}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
