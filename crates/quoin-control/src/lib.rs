//! The control plane: the desired state of the cluster, and the changes that reach it.
//!
//! * [`store`]: records under compare-and-swap; embedded on redb.
//! * [`records`]: Volume (with its membership, epoch, replicas and attachments), Pool, Node and
//!   a few others.
//! * [`Controller`]: the logic, apart from gRPC: creation and deletion of volumes, attachments,
//!   epochs and replacements, reports, assignments, reconcilers, events, members of the cluster.
//! * gRPC on the admin unix socket and over mutual TLS; the table of permissions of each role is
//!   in the module `service`.
//! * [`init`] makes a cluster, [`run`] serves it.
//!
//! IO goes on while the controller is down: no read and no write needs the control plane.

mod admission;
mod assignments;
mod attach;
pub mod backup;
mod balance;
mod changes;
mod controller;
mod cordon;
mod declare;
mod devices;
pub mod dying;
mod epochs;
mod error;
pub mod events;
mod fencing;
mod heal;
pub mod kept_backups;
mod member_records;
mod members;
mod metrics;
mod observed;
pub mod placement;
pub mod policy;
mod reach;
mod rebalance;
mod reconcile;
#[cfg(test)]
mod recorded;
pub mod records;
mod recovery;
mod removal;
mod reports;
mod run;
pub mod salvage;
mod scale;
mod scheduled_backup;
mod service;
pub mod spec;
mod status;
pub mod store;
mod table;
mod target_config;
mod tending;
mod term;
mod term_records;
mod text;
mod time;
mod verification;
mod volume_index;
mod volumes;

pub use attach::Publish;
pub use controller::{Controller, Settings};
pub use cordon::{Cordoning, Scope};
pub use epochs::{Granted, MembershipSwap};
pub use error::Error;
pub use heal::Healing;
pub use metrics::Metrics;
pub use rebalance::Balance;
pub use recovery::{LEASES_OVER_AFTER, Recovery};
pub use run::{
    HEALS_PER_POOL, InitReport, Options, REPORT_EVERY_MS, init, init_again, is_initialised, open,
    run, serve,
};
pub use scale::{Move, Scale, Which};
pub use scheduled_backup::BackupSchedule;
pub use term::let_recover;
