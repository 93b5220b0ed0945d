//! Making a cluster, and serving it.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quoin_identity::{
    Authority, ClusterId, Identity, IncomingLimits, JoinToken, Lifetimes, Role, Shares,
    serve_incoming, unix_incoming,
};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::transport::Server;
use tower::Layer;
use tower::layer::layer_fn;

use crate::Error;
use crate::api::{Budgets, Gate, Services};
use crate::controller::Controller;
use crate::disaster::backup::doubted_records;
use crate::disaster::offline::{check_is_here, doubt};
use crate::disaster::scheduled_backup::BackupSchedule;
pub use crate::files::is_initialised;
use crate::files::{
    AUTHORITY_FILE, RECORDS_FILE, close_to_others, engine_file, mark_one_of_several, refuse_foreign,
};
use crate::membership::kubernetes::{Kubernetes, KubernetesOptions};
use crate::reconcile::dying::{DyingLimits, DyingPolicy};
use crate::reconcile::reach::Dialler;
use crate::reconcile::work;
use crate::settings::Settings;
use crate::state::events::{Object, Severity};
use crate::state::store::{
    Embedded, Records, Rule, SharedOptions, SharedStore, Store, StoreError, campaign, keep_ruling,
    release,
};
use crate::status::metrics::Metrics;
use crate::volume::policy::{RebalanceAt, ReplaceAfter};
use crate::volume::spec::{Defaults, REPLICAS_HARD_MAX, REPLICAS_MAX};
use crate::waiting::refuse_calls;
use quoin_api::volume::Spread;

/// Streams that agents and followers hold open, all together and each.
const STREAMS_MAX: usize = 6144;
const STREAMS_A_MEMBER_MAX: usize = 128;
/// Calls at a time on one connection.
const CALLS_MAX: u32 = 256;
/// Bytes of one stream and of one connection that are taken in before a call reads them, and of one
/// frame: no budget counts these, so the number of connections bounds them.
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
const FRAME_BYTES_MAX: u32 = 64 << 10;
/// Streams of members end by themselves in this time once they are to turn to another controller, or are cut.
const MEMBERS_CUT_AFTER: Duration = Duration::from_millis(200);
/// How often what is due by time is looked after.
const TICK: Duration = Duration::from_secs(1);

/// Options of `quoin controller run`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Holds `records.redb`, `authority.json` and `identity/`.
    pub dir: PathBuf,
    pub records: Records,
    /// The admin socket, mode 0600; made anew at each start.
    pub admin_socket: PathBuf,
    /// Where agents come in, over mutual TLS; `None`: only the admin socket is served.
    pub listen: Option<SocketAddr>,
    /// "authenticate" or "encrypt": what data connections do.
    pub data_security: String,
    /// Replicas and spread of a volume that does not say.
    pub defaults: Defaults,
    /// A volume is taken from its node where nobody has heard of the node for so long.
    pub node_timeout_ms: u64,
    /// When a replica that is gone is replaced, where a volume does not say.
    pub replace_after: ReplaceAfter,
    /// Most rebuilds without a request into one pool at a time.
    pub heals_per_pool: u32,
    /// Policy for pools whose disks are failing.
    pub dying_pools: DyingPolicy,
    /// When a pool's disk is taken to be failing.
    pub dying_limits: DyingLimits,
    /// How unevenly pools may fill before replicas move.
    pub rebalance_at: RebalanceAt,
    /// Replicas of one volume at most: up to [`crate::volume::spec::REPLICAS_HARD_MAX`].
    pub replicas_max: u32,
    pub lifetimes: Lifetimes,
    /// Backups that the controller makes by itself.
    pub backups: Option<BackupSchedule>,
    /// Admission of pods by their service accounts.
    pub kubernetes: Option<KubernetesOptions>,
    /// Source of `/metrics` and `/healthz`.
    pub metrics: Metrics,
}

/// Rebuilds into one pool at a time, unless told otherwise.
pub const HEALS_PER_POOL: u32 = 2;

/// Default of [`Options::node_timeout_ms`].
pub const NODE_TIMEOUT_MS: u64 = 10_000;

/// How often agents report at least, in milliseconds.
pub const REPORT_EVERY_MS: u64 = 2000;

/// A pool or node that has not reported for so long is offline.
const OFFLINE_AFTER_MS: u64 = 3 * REPORT_EVERY_MS + 1000;

impl Options {
    /// Defaults for a controller in `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        let dir = dir.into();
        Self {
            admin_socket: dir.join("admin.sock"),
            dir,
            records: Records::Embedded,
            listen: None,
            data_security: "encrypt".to_owned(),
            defaults: Defaults { replicas: 3, spread: Spread::Host },
            node_timeout_ms: NODE_TIMEOUT_MS,
            replace_after: ReplaceAfter::DEFAULT,
            heals_per_pool: HEALS_PER_POOL,
            dying_pools: DyingPolicy::default(),
            dying_limits: DyingLimits::default(),
            rebalance_at: RebalanceAt::DEFAULT,
            replicas_max: REPLICAS_MAX,
            lifetimes: Lifetimes::default(),
            backups: None,
            kubernetes: None,
            metrics: Metrics::new(),
        }
    }

    fn check(&self) -> Result<(), Error> {
        if !["authenticate", "encrypt"].contains(&self.data_security.as_str()) {
            let given = &self.data_security;
            let rule = format!("{given:?} is neither authenticate nor encrypt");
            return Err(Error::invalid("data security", rule));
        }
        if self.heals_per_pool == 0 {
            return Err(Error::invalid(
                "heals per pool",
                "at least 1; to have none, replaceAfter: off",
            ));
        }
        self.dying_limits.check()?;
        self.backups.as_ref().map_or(Ok(()), BackupSchedule::check)?;
        if !(1..=REPLICAS_HARD_MAX).contains(&self.replicas_max) {
            let rule = format!("1 to {REPLICAS_HARD_MAX}");
            return Err(Error::invalid("most replicas", rule));
        }
        if !(1..=self.replicas_max).contains(&self.defaults.replicas.into()) {
            let rule = format!("1 to {}", self.replicas_max);
            return Err(Error::invalid("default replicas", rule));
        }
        Ok(())
    }

    fn settings(&self) -> Settings {
        Settings {
            defaults: self.defaults,
            data_security: self.data_security.clone(),
            offline_after: Duration::from_millis(OFFLINE_AFTER_MS),
            node_timeout: Duration::from_millis(self.node_timeout_ms),
            replace_after: self.replace_after,
            heals_per_pool: self.heals_per_pool,
            dying_pools: self.dying_pools,
            dying_limits: self.dying_limits,
            rebalance_at: self.rebalance_at,
            replicas_max: self.replicas_max,
        }
    }
}

/// Result of [`init`].
#[derive(Clone, Debug)]
pub struct InitReport {
    pub cluster_id: String,
    /// For the first pool or node; used once.
    pub join_token: JoinToken,
    /// Milliseconds since 1970.
    pub expires_ms: u64,
    /// The cluster was there and its records were not: they do not rule before they are recovered.
    pub records_lost: bool,
}

/// Result of [`join_controllers`].
#[derive(Clone, Debug)]
pub enum JoinedControllers {
    /// The cluster was made.
    Made(InitReport),
    /// The cluster was there, and this is another controller of it.
    Another(ClusterId),
}

fn identity_dir(dir: &Path) -> PathBuf {
    dir.join("identity")
}

/// Makes a cluster in `dir`: its id, its authority, the controller's certificate, empty records
/// and a first join token. Never overwrites one; one that a crash left half made is completed.
///
/// Where an authority is and its records are not, they were lost: the cluster is the same, its
/// records are empty and do not rule. Only an authority without the controller's own certificate
/// can be what a crash of this very function left; [`init_again`] says that it is not.
pub async fn init(dir: &Path, lifetimes: Lifetimes) -> Result<InitReport, Error> {
    make(dir, lifetimes, false).await
}

/// Makes the cluster again whose authority is in `dir`: with empty records, which do not rule
/// before they agree with what the pools hold.
pub async fn init_again(dir: &Path, lifetimes: Lifetimes) -> Result<InitReport, Error> {
    make(dir, lifetimes, true).await
}

async fn make(dir: &Path, lifetimes: Lifetimes, records_lost: bool) -> Result<InitReport, Error> {
    if is_initialised(dir) {
        return Err(Error::AlreadyInitialised(dir.to_owned()));
    }
    refuse_foreign(dir)?;
    let has_authority = dir.join(AUTHORITY_FILE).exists();
    if records_lost && !has_authority {
        return Err(Error::NoAuthority(dir.to_owned()));
    }
    let was_made = Identity::load(&identity_dir(dir)).is_ok();
    let was_restored = crate::disaster::backup::records_in_making(dir).exists();
    let records_lost = records_lost || (has_authority && (was_made || was_restored));
    let authority = match Authority::create(dir, lifetimes) {
        // Without records no member has joined: a crash came in between.
        Err(quoin_identity::Error::AuthorityExists { .. }) => Authority::load(dir, lifetimes)?,
        created => created?,
    };
    let identity = match Identity::load(&identity_dir(dir)) {
        Ok(identity) => identity,
        Err(_) => authority.issue_identity(&identity_dir(dir), Role::Controller, "controller")?,
    };
    if records_lost {
        let made = doubted_records(dir, &[], "they were lost").await?;
        let failed = |source| Error::File { path: dir.to_owned(), source };
        std::fs::rename(made, dir.join(RECORDS_FILE)).map_err(failed)?;
    }
    close_to_others(dir)?;
    let store = Arc::new(Embedded::open(&dir.join(RECORDS_FILE))?);
    let made = first_token(store, identity, authority, Options::new(dir).settings()).await?;
    Ok(InitReport { records_lost, ..made })
}

/// Makes a cluster whose records lie in an engine; where there is one already, `dir` becomes the directory of another
/// controller of it, and the answer has no token. Never overwrites one.
pub async fn join_controllers(
    dir: &Path,
    options: &SharedOptions,
    lifetimes: Lifetimes,
) -> Result<JoinedControllers, Error> {
    // A directory of before the records moved to this engine is made one of it.
    if engine_file(dir, options).exists() || dir.join(RECORDS_FILE).exists() {
        return Err(Error::AlreadyInitialised(dir.to_owned()));
    }
    refuse_foreign(dir)?;
    let store = options.open()?;
    let found = match store.authority().await? {
        Some(found) => found,
        None => {
            let authority = match Authority::create(dir, lifetimes) {
                // A former attempt ended before the engine had it.
                Err(quoin_identity::Error::AuthorityExists { .. }) => {
                    Authority::load(dir, lifetimes)?
                }
                created => created?,
            };
            let exported = authority.export()?.into_bytes();
            match store.create_authority(&exported).await? {
                true => return make_in(dir, store, authority, options).await,
                false => store.authority().await?.unwrap_or(exported),
            }
        }
    };
    if dir.join(AUTHORITY_FILE).exists() {
        let own = Authority::load(dir, lifetimes)?.cluster();
        let found = Authority::parse(&found, lifetimes)?.cluster();
        if own != found {
            return Err(Error::OtherCluster { dir: dir.to_owned(), own, found });
        }
    }
    let authority = Authority::import(dir, &found, lifetimes)?;
    let is_empty = store.list("").await?.is_empty();
    if is_empty {
        // The one who made it ended in the middle.
        return make_in(dir, store, authority, options).await;
    }
    identity_of(dir, &authority)?;
    close_to_others(dir)?;
    mark_one_of_several(dir, options)?;
    Ok(JoinedControllers::Another(authority.cluster()))
}

/// Makes the cluster again, in an engine that holds no records, whose authority is in `dir`; as [`init_again`].
pub async fn join_again(
    dir: &Path,
    options: &SharedOptions,
    lifetimes: Lifetimes,
) -> Result<ClusterId, Error> {
    refuse_foreign(dir)?;
    if !dir.join(AUTHORITY_FILE).exists() {
        return Err(Error::NoAuthority(dir.to_owned()));
    }
    let authority = Authority::load(dir, lifetimes)?;
    let (store, own) = (options.open()?, authority.cluster());
    let authority = match store.authority().await? {
        None => authority,
        // There it may have been rotated since.
        Some(kept) => {
            let found = Authority::parse(&kept, lifetimes)?.cluster();
            if own != found {
                return Err(Error::OtherCluster { dir: dir.to_owned(), own, found });
            }
            Authority::import(dir, &kept, lifetimes)?
        }
    };
    let doubt = doubt("they were lost");
    let records = store.list("").await?;
    if records.iter().any(|record| record.key != doubt.0) {
        let place = options.place();
        return Err(Error::Precondition(format!("{place} holds records: they are not lost")));
    }
    // The doubt first: without it the records would rule.
    store.put_all(vec![doubt]).await?;
    store.create_authority(authority.export()?.as_bytes()).await?;
    identity_of(dir, &authority)?;
    close_to_others(dir)?;
    mark_one_of_several(dir, options)?;
    Ok(own)
}

/// The first records of a cluster in an engine.
async fn make_in(
    dir: &Path,
    store: Arc<dyn SharedStore>,
    authority: Authority,
    options: &SharedOptions,
) -> Result<JoinedControllers, Error> {
    let identity = identity_of(dir, &authority)?;
    close_to_others(dir)?;
    let settings = Options::new(dir).settings();
    let made = first_token(store, identity, authority, settings).await?;
    mark_one_of_several(dir, options)?;
    Ok(JoinedControllers::Made(made))
}

async fn first_token(
    store: Arc<dyn Store>,
    identity: Identity,
    authority: Authority,
    settings: Settings,
) -> Result<InitReport, Error> {
    let cluster_id = authority.cluster().to_string();
    let controller = Controller::open(store, identity, authority, settings).await?;
    let (join_token, expires_ms) =
        controller.membership.members.create_join_token("", 0, "", false).await?;
    controller.state.events().flush().await?;
    Ok(InitReport { cluster_id, join_token, expires_ms, records_lost: false })
}

/// The controller's certificate in its directory; one is issued where there is none.
fn identity_of(dir: &Path, authority: &Authority) -> Result<Identity, Error> {
    Ok(match Identity::load(&identity_dir(dir)) {
        Err(quoin_identity::Error::NotJoined { .. }) => {
            authority.issue_identity(&identity_dir(dir), Role::Controller, "controller")?
        }
        loaded => loaded?,
    })
}

/// Opens what [`init`] made.
pub async fn open(options: &Options) -> Result<Controller, Error> {
    options.check()?;
    let dir = &options.dir;
    if !dir.join(RECORDS_FILE).exists() {
        return Err(Error::NotInitialised(dir.clone()));
    }
    // The records first: a second controller must change nothing of the first one's.
    let store = Arc::new(Embedded::open(&dir.join(RECORDS_FILE))?);
    check_is_here(&*store).await?;
    close_to_others(dir)?;
    let authority = Authority::load(dir, options.lifetimes)?;
    open_with(options, store, authority).await
}

async fn open_with(
    options: &Options,
    store: Arc<dyn Store>,
    authority: Authority,
) -> Result<Controller, Error> {
    let identity = identity_of(&options.dir, &authority)?;
    let controller = Controller::open(store, identity, authority, options.settings()).await?;
    controller.state.check_term()?;
    // A controller that slept past its certificate's end gets itself a new one.
    controller.membership.members.tend_certificates().await?;
    Ok(controller)
}

/// Serves until `shutdown` becomes true.
pub async fn run(options: Options, shutdown: watch::Receiver<bool>) -> Result<(), Error> {
    match &options.records {
        Records::Embedded => {
            let controller = Arc::new(open(&options).await?);
            serve_on_sockets(&options, controller, shutdown.clone(), shutdown).await
        }
        Records::Shared(shared) => run_by_lease(&options, shared, shutdown).await,
    }
}

/// Waits for this controller's turn, and serves while it rules.
async fn run_by_lease(
    options: &Options,
    shared: &SharedOptions,
    shutdown: watch::Receiver<bool>,
) -> Result<(), Error> {
    options.check()?;
    if !engine_file(&options.dir, shared).exists() {
        return Err(Error::NotInitialised(options.dir.clone()));
    }
    let store = shared.open()?;
    let (ruler, named) = watch::channel(String::new());
    let admin = bind_admin(&options.admin_socket).await?;
    let mut down = shutdown.clone();
    let rule = tokio::select! {
        rule = campaign(&*store, &ruler) => rule?,
        () = refuse_calls(admin, named) => return Ok(()),
        _ = down.wait_for(|down| *down) => {
            let _ = std::fs::remove_file(&options.admin_socket);
            return Ok(());
        }
    };
    tracing::info!(server = store.server(), "this controller rules");
    let served = serve_while_ruling(options, shared, &store, &rule, shutdown);
    let outcome = tokio::select! {
        served = served => served,
        () = keep_ruling(&*store, &rule) => Err(StoreError::NotLeading.into()),
        key = store.changed_by_others(&rule) => Err(StoreError::ChangedByOthers { key }.into()),
    };
    release(&*store, &rule).await;
    outcome
}

async fn serve_while_ruling(
    options: &Options,
    shared: &SharedOptions,
    store: &Arc<dyn SharedStore>,
    rule: &Rule,
    shutdown: watch::Receiver<bool>,
) -> Result<(), Error> {
    check_is_here(&**store).await?;
    let Some(exported) = store.authority().await? else {
        return Err(Error::NotInitialised(options.dir.clone()));
    };
    // Another controller may have rotated it.
    let authority = Authority::import(&options.dir, &exported, options.lifetimes)?;
    close_to_others(&options.dir)?;
    let controller = Arc::new(open_with(options, store.clone(), authority).await?);
    // Members take no order of a former controller from the first word of this one on.
    controller.membership.terms.begin().await?;
    let message = format!("controller {} rules", shared.controller);
    let cluster = Object::new("cluster", "", "");
    controller.state.events().record(Severity::Normal, cluster, "ControllerRules", message);
    // Members turn to the next controller once it may rule, while people can ask this one still.
    let (end_members, members_end) = watch::channel(false);
    let ending = async {
        let mut down = shutdown.clone();
        tokio::select! {
            () = rule.ended() => {}
            () = rule.expired() => {}
            _ = down.wait_for(|down| *down) => {}
        }
        end_members.send_replace(true);
        std::future::pending::<()>().await
    };
    let served = serve_on_sockets(options, controller, shutdown.clone(), members_end);
    tokio::select! {
        served = served => served,
        () = rule.ended() => Err(StoreError::NotLeading.into()),
        () = ending => Ok(()),
    }
}

/// Serves people until `shutdown` becomes true, and members until `members_end` does.
async fn serve_on_sockets(
    options: &Options,
    controller: Arc<Controller>,
    shutdown: watch::Receiver<bool>,
    members_end: watch::Receiver<bool>,
) -> Result<(), Error> {
    let admin = bind_admin(&options.admin_socket).await?;
    let agents = match options.listen {
        Some(address) => {
            let listening = TcpListener::bind(address).await;
            let failed = |source| Error::Listen { address: address.to_string(), source };
            Some(listening.map_err(failed)?)
        }
        None => None,
    };
    options.metrics.watch(&controller);
    controller.state.begin_census();
    if let Some(kubernetes) = &options.kubernetes {
        let api = kubernetes.api.clone();
        let membership = &controller.membership;
        let new = || Arc::new(Kubernetes::new(kubernetes.clone()));
        let kubernetes = membership.kubernetes.get_or_init(new).clone();
        tokio::spawn(kubernetes.keep_published(membership.members.clone(), shutdown.clone()));
        tokio::spawn(controller.tell_events_to_kubernetes(api, shutdown.clone()));
    }
    if let Some(schedule) = &options.backups {
        let record = options.metrics.backups();
        tokio::spawn(schedule.clone().keep(controller.clone(), record, shutdown.clone()));
    }
    tracing::info!(
        cluster = %controller.state.identity().cluster(),
        admin_socket = %options.admin_socket.display(),
        agents = agents.as_ref().and_then(|agents| agents.local_addr().ok()).map(tracing::field::display),
        "serving; pools and nodes connect to the address `agents`, if there is one"
    );
    let dialler = Dialler::new(controller.state.clone(), controller.work.lifecycle.clone());
    let dialling = tokio::spawn(Arc::new(dialler).keep_dialling(shutdown.clone()));
    let served =
        serve_members_until(controller.clone(), admin, agents, shutdown, members_end).await;
    dialling.abort();
    let _ = std::fs::remove_file(&options.admin_socket);
    controller.state.events().flush().await?;
    served
}

/// Serves a controller on sockets that are bound already.
pub async fn serve(
    controller: Arc<Controller>,
    admin: UnixListener,
    agents: Option<TcpListener>,
    shutdown: watch::Receiver<bool>,
) -> Result<(), Error> {
    serve_members_until(controller, admin, agents, shutdown.clone(), shutdown).await
}

async fn serve_members_until(
    controller: Arc<Controller>,
    admin: UnixListener,
    agents: Option<TcpListener>,
    shutdown: watch::Receiver<bool>,
    members_end: watch::Receiver<bool>,
) -> Result<(), Error> {
    let services = Services {
        controller: controller.clone(),
        shutdown: shutdown.clone(),
        streams: Shares::new(STREAMS_MAX, STREAMS_A_MEMBER_MAX),
    };
    let down = |mut shutdown: watch::Receiver<bool>| async move {
        let _ = shutdown.wait_for(|down| *down).await;
    };
    let budgets = Budgets::new();
    let local = server(&controller, &budgets)
        .add_routes(services.routes())
        .serve_with_incoming_shutdown(unix_incoming(admin), down(shutdown.clone()));
    let remote = async {
        let Some(listener) = agents else {
            down(shutdown.clone()).await;
            return Ok(());
        };
        let config = controller.state.identity().controller_config()?;
        let incoming = serve_incoming(listener, config, IncomingLimits::default());
        let served = server(&controller, &budgets)
            .add_routes(services.routes())
            .serve_with_incoming_shutdown(incoming, down(members_end.clone()));
        let cut = async {
            down(members_end.clone()).await;
            tokio::time::sleep(MEMBERS_CUT_AFTER).await;
        };
        tokio::select! {
            served = served => served.map_err(Error::from)?,
            () = cut => {}
        }
        // People are served until the end.
        down(shutdown.clone()).await;
        Ok(())
    };
    let local = async { local.await.map_err(Error::from) };
    let mut superseded = controller.membership.terms.superseded();
    tokio::select! {
        // The borrowed word is given back first: reading it again beside a writer would wait for ever.
        () = async { drop(superseded.wait_for(Option::is_some).await) } => controller.state.check_term(),
        served = async { tokio::try_join!(local, remote) } => served.map(drop),
        () = tend(controller.clone()) => Ok(()),
        // A client that holds a connection open does not hold up a shutdown.
        () = async { down(shutdown.clone()).await; tokio::time::sleep(Duration::from_secs(3)).await } => Ok(()),
    }
}

fn server(
    controller: &Arc<Controller>,
    budgets: &Budgets,
) -> Server<impl Layer<Routes, Service = Gate<Routes>> + Clone> {
    let (controller, budgets) = (controller.clone(), budgets.clone());
    let gate = layer_fn(move |inner| Gate {
        controller: controller.clone(),
        budgets: budgets.clone(),
        inner,
    });
    Server::builder()
        .layer(gate)
        .concurrency_limit_per_connection(CALLS_MAX as usize)
        .max_concurrent_streams(CALLS_MAX)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
}

/// Work on what changes, and what is due by time alone. Never ends by itself. Nothing of it waits for
/// anything else of it.
async fn tend(controller: Arc<Controller>) {
    let mut working = controller.work.spawn(&controller.state);
    working.spawn(work(controller.snapshots.keeper.clone()));
    working.spawn(work(controller.snapshots.groups.clone()));
    working.spawn(work(controller.snapshots.schedules.clone()));
    working.spawn(work(controller.mirror.driver.clone()));
    let certificates =
        every_tick("certificates", || controller.membership.members.tend_certificates());
    let events = every_tick("events", || controller.state.events().flush());
    let records = every_tick("records", || controller.state.read_unanswered());
    let absence = every_tick("absence", || {
        controller.work.announce_absent();
        std::future::ready(Ok(()))
    });
    let failover = every_tick("failover", || controller.work.failover.look());
    let peers = every_tick("peers", || {
        controller.membership.peers.watch();
        std::future::ready(Ok(()))
    });
    let lags = controller.mirror.driver.keep_counting();
    let comparisons = controller.mirror.driver.keep_comparing();
    let census = controller.state.end_census();
    let old_records = controller.disaster.records.keep_recovering();
    tokio::join!(
        certificates,
        events,
        records,
        absence,
        failover,
        peers,
        lags,
        comparisons,
        census,
        old_records
    );
}

/// Does it at each tick, for ever; one that takes longer than a tick skips some.
async fn every_tick<F: Future<Output = Result<(), Error>>>(what: &str, work: impl Fn() -> F) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if let Err(error) = work().await {
            tracing::error!(%error, what, "not done this time, trying again");
        }
    }
}

/// The path may hold a socket of a process that died; a live one is left alone.
async fn bind_admin(path: &Path) -> Result<UnixListener, Error> {
    let address = path.display().to_string();
    let failed = |source| Error::Listen { address: address.clone(), source };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    if UnixStream::connect(path).await.is_ok() {
        return Err(Error::SocketServed(path.to_owned()));
    }
    if std::fs::symlink_metadata(path).is_ok() {
        use std::os::unix::fs::FileTypeExt;
        let meta = std::fs::symlink_metadata(path).map_err(failed)?;
        if !meta.file_type().is_socket() {
            return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
        }
        std::fs::remove_file(path).map_err(failed)?;
    }
    // Bound under another name first: there is no moment at which others may connect.
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&beside);
    let listener = UnixListener::bind(&beside).map_err(failed)?;
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)?;
    Ok(listener)
}
