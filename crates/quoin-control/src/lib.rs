//! The control plane: the desired state of the cluster, and the changes that reach it.
//!
//! * [`store`]: records under compare-and-swap; embedded on redb, or for several controllers in etcd or Kubernetes.
//! * The records and the decisions about ownership are those of `quoin-cluster`.
//! * [`Controller`]: the logic, apart from gRPC: creation and deletion of volumes, attachments,
//!   epochs and replacements, reports, assignments, reconcilers, events, members of the cluster.
//! * gRPC on the admin unix socket and over mutual TLS; the table of permissions of each role is
//!   in the module `api`.
//! * [`init`] makes a cluster, [`run`] serves it.
//!
//! IO goes on while the controller is down: no read and no write needs the control plane.

pub use quoin_cluster::ownership::attachment::Publish;
pub use quoin_cluster::ownership::epochs::MembershipSwap;
pub use quoin_cluster::ownership::recovery::Recovery;

mod api;
mod controller;
mod disaster;
mod error;
mod fields;
mod files;
mod kubernetes_api;
mod kubernetes_events;
mod membership;
mod messages;
mod mirror;
mod reconcile;
mod run;
mod settings;
mod snapshot;
mod state;
mod status;
mod text;
mod time;
mod volume;
mod waiting;

pub use controller::Controller;
pub use disaster::moving::{MovedRecords, move_records};
pub use disaster::recovery::LEASES_OVER_AFTER;
pub use disaster::scheduled_backup::BackupSchedule;
pub use disaster::{backup, kept_backups, salvage};
pub use error::Error;
pub use kubernetes_api::{ApiError, ApiOptions};
pub use membership::kubernetes::{AUDIENCE, KubernetesOptions};
pub use membership::term::let_recover;
pub use reconcile::cordon::{Cordoning, Scope};
pub use reconcile::dying;
pub use reconcile::heal::Healing;
pub use reconcile::rebalance::Balance;
pub use run::{
    HEALS_PER_POOL, InitReport, JoinedControllers, Options, REPORT_EVERY_MS, init, init_again,
    is_initialised, join_again, join_controllers, open, run, serve,
};
pub use settings::Settings;
pub use snapshot::history::check_part;
pub use state::store::Records;
pub use state::{events, store};
pub use status::health;
pub use status::metrics::Metrics;
pub use volume::epochs::Granted;
pub use volume::scale::{Move, Scale, Which};
pub use volume::verification::Verifying;
pub use volume::{placement, policy, spec};
