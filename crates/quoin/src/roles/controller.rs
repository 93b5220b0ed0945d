//! `quoin controller init|run`; what is done about records that were lost is [`crate::salvage`]'s.

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use quoin_api::volume::Spread;
use quoin_control::policy::Within;
use quoin_control::{ApiOptions, BackupSchedule, JoinedControllers, KubernetesOptions, Records};
use quoin_identity::Lifetimes;
use quoin_telemetry::Source;
use serde::Serialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::RoleOptions;
use super::controller_records::RecordsOptions;
use super::healing::HealingOptions;
use crate::client::ClientOptions;
use crate::host::ports;
use crate::output::{self, Format};
use crate::salvage;
use crate::size::number_within;

#[derive(Subcommand)]
pub enum ControllerCommand {
    /// Make a cluster: its records, its certificate authority and a first join token. Where the records of
    /// one are in etcd or Kubernetes already, this host gets another controller of that cluster.
    #[command(
        after_help = "Examples:\n  quoin controller init --state /var/lib/quoin/controller\n  \
        quoin controller run --state /var/lib/quoin/controller\n\n  \
        On each host of several controllers:\n  \
        quoin controller init --state /var/lib/quoin/controller --store etcd \\\n      \
        --etcd-endpoints http://etcd-1:2379,http://etcd-2:2379,http://etcd-3:2379\n  \
        quoin controller run ...    with the same options"
    )]
    Init {
        /// An empty or missing directory; it will hold the authority's key, so keep it private. Or
        /// one whose records were lost: the cluster stays the same, and `recover` makes its
        /// records from what the pools hold.
        #[arg(long, value_name = "DIRECTORY")]
        state: PathBuf,
        /// Nothing is left of the former controller but its `authority.json`, which is in the
        /// directory.
        #[arg(long)]
        records_lost: bool,
        #[command(flatten)]
        records: Box<RecordsOptions>,
        #[command(flatten)]
        lifetime: LifetimeOptions,
    },
    /// Serve a cluster made by `init`.
    Run(Box<ControllerOptions>),
    /// Write all records, and the cluster's authority with its private key, into a file (mode
    /// 0600), while the controller serves. Keep it as you keep the key.
    #[command(
        after_help = concat!(
            "Examples:\n  quoin controller backup /backup/quoin-$(date +%F)\n",
            "  quoin controller backup --into /backup --keep 14"
        )
    )]
    Backup(salvage::BackupOptions),
    /// Make a controller's directory and its records from a backup, in any store. All controllers must be stopped;
    /// afterwards the records do not rule before `recover`.
    #[command(
        after_help = "Example:\n  quoin controller restore /backup/quoin-2026-11-20 --state \
        /var/lib/quoin/controller"
    )]
    Restore(Box<salvage::RestoreOptions>),
    /// Make the records agree with what the pools hold: after they were lost, after an old copy of
    /// them was restored, and wherever an event says ControlPlaneBehind or RecordsBehind.
    #[command(
        after_help = "Example:\n  quoin controller recover --dry-run    what each pool says, what \
        would be written\n  quoin controller recover"
    )]
    Recover(Box<salvage::RecoverOptions>),
    /// Move the records to another store, and the right to rule with them: they begin a term there, and the former
    /// copy rules no more. All controllers must be stopped; IO goes on meanwhile. Where it is cut short, repeat it.
    #[command(
        after_help = "Examples:\n  quoin controller move-store --state /var/lib/quoin/controller --to etcd \\\n      \
        --etcd-endpoints http://etcd-1:2379,http://etcd-2:2379,http://etcd-3:2379\n  \
        quoin controller move-store --state /var/lib/quoin/controller --store kubernetes --to embedded"
    )]
    MoveStore(Box<salvage::MoveStoreOptions>),
}

/// For trying out within seconds what otherwise takes weeks, so nobody is shown it.
#[derive(Args, Clone, Copy)]
pub struct LifetimeOptions {
    /// How long the certificates of members and of the controller live; they are renewed at two
    /// thirds of it. `init` and `run` must be told the same.
    #[arg(
        long,
        hide = true,
        value_name = "SECONDS",
        default_value_t = Lifetimes::default().holder.as_secs(),
        value_parser = number_within::<u64>(
            10..=31_536_000,
            "a certificate lives for 10 seconds to a year (31536000)"
        )
    )]
    certificate_lifetime_s: u64,
}

impl LifetimeOptions {
    /// Arguments of `controller run`.
    pub fn flags(&self) -> [(&'static str, String); 1] {
        [("--certificate-lifetime-s", self.certificate_lifetime_s.to_string())]
    }
}

impl From<LifetimeOptions> for Lifetimes {
    fn from(options: LifetimeOptions) -> Self {
        let holder = Duration::from_secs(options.certificate_lifetime_s);
        Self { holder, ..Self::default() }
    }
}

#[derive(Args)]
pub struct ControllerOptions {
    /// The directory that `init` made.
    #[arg(long, value_name = "DIRECTORY")]
    state: PathBuf,
    /// The admin socket; who may open it may do everything.
    #[arg(long, value_name = "PATH", default_value = "/run/quoin/admin.sock")]
    admin_socket: PathBuf,
    /// Where pools, nodes and admins connect (mutual TLS); `none`: the admin socket only.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7400",
          value_parser = parse_listen)]
    listen: Listen,
    /// Protection of data connections beside the proof of who is there: `encrypt` hides what they
    /// carry and costs little more than `authenticate`, which is for those who must look into the
    /// traffic. Neither is needed within a host, where a unix socket takes TCP's place.
    #[arg(long, value_parser = ["authenticate", "encrypt"], default_value = "encrypt")]
    data_security: String,
    /// Replicas of a volume that does not say.
    #[arg(long, default_value_t = 3, allow_hyphen_values = true,
          value_parser = number_within::<u8>(1..=8, "a volume has 1 to 8 replicas"))]
    default_replicas: u8,
    /// Replicas of one volume at most, up to 8.
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = quoin_control::spec::REPLICAS_MAX,
        allow_hyphen_values = true,
        value_parser = number_within::<u32>(1..=8, "a volume has 1 to 8 replicas")
    )]
    max_replicas: u32,
    /// Place that the replicas of a volume never share, where the volume does not say.
    #[arg(long, value_enum, default_value = "host")]
    default_spread: SpreadDefault,
    #[command(flatten)]
    records: RecordsOptions,
    #[command(flatten)]
    backups: BackupScheduleOptions,
    #[command(flatten)]
    healing: HealingOptions,
    /// Admit pods of this pod's namespace by the tokens of their service accounts: PREFIXpool as pools of
    /// their node, PREFIXnode as nodes, PREFIXcsi-controller as what may manage volumes, PREFIXmirror as
    /// mirrors. The ConfigMap PREFIXauthority is kept, by which they know the cluster. Events are told at the
    /// claims, persistent volumes and nodes that they concern.
    #[arg(long, value_name = "PREFIX")]
    admit_service_accounts: Option<String>,
    /// No metrics by volume, only those of all volumes together. Each volume has four, of 5,000 volumes at
    /// most.
    #[arg(long)]
    no_volume_metrics: bool,
    #[command(flatten)]
    lifetime: LifetimeOptions,
    #[command(flatten)]
    role: RoleOptions,
}

/// `None`: on no port.
#[derive(Clone, Copy, Debug)]
struct Listen(Option<SocketAddr>);

fn parse_listen(text: &str) -> Result<Listen, String> {
    if text == "none" {
        return Ok(Listen(None));
    }
    let address = text.parse().map(|address| Listen(Some(address)));
    address.map_err(|_| "write ADDRESS:PORT as in 0.0.0.0:7400, or `none`".into())
}

/// Backups of the records that the controller makes by itself.
#[derive(Args)]
struct BackupScheduleOptions {
    /// Write a backup of the records into this directory every --backup-every, with the authority's
    /// private key in it. An event tells of one that fails.
    #[arg(long, value_name = "DIRECTORY", env = "QUOIN_BACKUP_INTO")]
    backup_into: Option<PathBuf>,
    /// From one backup to the next, as in 30m, 6h or 1d.
    #[arg(long, value_name = "TIME", env = "QUOIN_BACKUP_EVERY", default_value = "6h")]
    backup_every: Within,
    /// Keep so many of them, the newest.
    #[arg(long, value_name = "NUMBER", env = "QUOIN_BACKUPS_KEPT", default_value_t = 60,
          allow_hyphen_values = true,
          value_parser = number_within::<usize>(1..=100_000, "1 to 100000 backups are kept"))]
    backups_kept: usize,
}

impl BackupScheduleOptions {
    fn schedule(self) -> Option<BackupSchedule> {
        // A configuration file turns them off by an empty name.
        let into = self.backup_into.filter(|into| !into.as_os_str().is_empty())?;
        Some(BackupSchedule { into, every: self.backup_every.0, keep: self.backups_kept })
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum SpreadDefault {
    Host,
    Pool,
    Rack,
    Zone,
}

/// A cluster that was made, as `-o json` has it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MadeView {
    cluster_id: String,
    state: String,
    records_lost: bool,
    /// The cluster was there, and this is another controller of it.
    is_another: bool,
    /// Lets the first pool or node join; empty where the records were lost, or the cluster was there.
    join_token: String,
}

/// Names the process that has the requested port.
fn in_flags(error: quoin_control::Error) -> anyhow::Error {
    match &error {
        quoin_control::Error::Listen { address, source }
            if source.kind() == std::io::ErrorKind::AddrInUse =>
        {
            let who = address.parse().ok().and_then(ports::listener);
            anyhow::anyhow!(
                "{address} is in use by {}: end that, or choose another port with --listen",
                who.as_deref().unwrap_or("another program")
            )
        }
        _ => error.into(),
    }
}

/// Makes a cluster, or another controller of one.
async fn made(
    state: &Path,
    records_lost: bool,
    records: Records,
    lifetime: LifetimeOptions,
) -> Result<MadeView> {
    let lifetimes = lifetime.into();
    let view = |cluster_id| MadeView {
        cluster_id,
        state: state.display().to_string(),
        records_lost: false,
        is_another: false,
        join_token: String::new(),
    };
    let made = match (records, records_lost) {
        (Records::Embedded, true) => quoin_control::init_again(state, lifetimes).await?,
        (Records::Embedded, false) => quoin_control::init(state, lifetimes).await?,
        (Records::Shared(shared), true) => {
            let cluster = quoin_control::join_again(state, &shared, lifetimes).await?;
            return Ok(MadeView { records_lost: true, ..view(cluster.to_string()) });
        }
        (Records::Shared(shared), false) => {
            match quoin_control::join_controllers(state, &shared, lifetimes).await? {
                JoinedControllers::Made(made) => made,
                JoinedControllers::Another(cluster) => {
                    return Ok(MadeView { is_another: true, ..view(cluster.to_string()) });
                }
            }
        }
    };
    let join_token = match made.records_lost {
        true => String::new(),
        false => made.join_token.to_string(),
    };
    Ok(MadeView { records_lost: made.records_lost, join_token, ..view(made.cluster_id) })
}

pub fn run(command: ControllerCommand, client: &ClientOptions, format: Format) -> Result<()> {
    let one_thread = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    match command {
        ControllerCommand::Backup(options) => {
            one_thread()?.block_on(salvage::backup(&options, client, format))
        }
        ControllerCommand::Restore(options) => {
            one_thread()?.block_on(salvage::restore(*options, format))
        }
        ControllerCommand::Recover(options) => {
            one_thread()?.block_on(salvage::recover(*options, client, format))
        }
        ControllerCommand::MoveStore(options) => {
            one_thread()?.block_on(salvage::move_store(*options, format))
        }
        ControllerCommand::Init { state, records_lost, records, lifetime } => {
            let view =
                one_thread()?.block_on(made(&state, records_lost, records.records()?, lifetime));
            let view = view.with_context(|| format!("make a cluster in {}", state.display()))?;
            output::print_one(format, &view, || {
                let MadeView { cluster_id, state, join_token, .. } = &view;
                match view.records_lost {
                    _ if view.is_another => format!(
                        "cluster {cluster_id} is there already, and {state} is of another controller of it\n\
                         next: start the controller; it takes its turn when the one that rules ends"
                    ),
                    true => format!(
                        "cluster {cluster_id} has its authority in {state} and no records: they were \
                         lost\nnext: start the controller, then quoin controller recover --dry-run\n\
                         Until then nobody is told anything by the empty records, and what is served \
                         is served on"
                    ),
                    false => format!(
                        "cluster {cluster_id} is made in {state}\nThe first pool or node joins with \
                         this token, once, within the hour:\n{join_token}"
                    ),
                }
            })
        }
        ControllerCommand::Run(options) => {
            let mut control = quoin_control::Options::new(&options.state);
            control.admin_socket = options.admin_socket;
            control.records = options.records.records()?;
            control.listen = options.listen.0;
            control.data_security = options.data_security;
            control.defaults.replicas = options.default_replicas;
            control.defaults.spread = match options.default_spread {
                SpreadDefault::Host => Spread::Host,
                SpreadDefault::Pool => Spread::Pool,
                SpreadDefault::Rack => Spread::Rack,
                SpreadDefault::Zone => Spread::Zone,
            };
            control.replicas_max = options.max_replicas;
            control.lifetimes = options.lifetime.into();
            control.backups = options.backups.schedule();
            if let Some(prefix) = options.admit_service_accounts {
                let api = ApiOptions::of_pod().context("--admit-service-accounts")?;
                control.kubernetes = Some(KubernetesOptions { api, prefix });
            }
            options.healing.apply_to(&mut control);
            if options.no_volume_metrics {
                control.metrics = control.metrics.without_volumes();
            }
            let metrics = control.metrics.clone();
            let health = control.metrics.clone();
            let source = Source::new(move || metrics.render(), move || health.health());
            super::run(&options.role, source, |shutdown| async {
                quoin_control::run(control, shutdown).await.map_err(in_flags)
            })
        }
    }
}
