//! The Container Storage Interface of Quoin: gRPC services over a unix socket.
//!
//! It checks requests, chooses codes and converts outcomes; volumes belong to the control plane
//! (called over the Cluster service), mounts to [`quoin_node`]. A [`Plugin`] serves Identity
//! always, and Controller and Node by its [`Mode`], all on one socket; every other method of the
//! interface is registered and answers 12. The services of CSI-Addons have a socket of their own
//! ([`addons`]), and the same rules for callers, secrets, limits and calls at the same time.
//!
//! Codes are chosen in [`refusal`]; [`limits`], [`capability`], [`capacity`], [`parameters`],
//! [`topology`] and [`context`] each hold one part of the rules, free of I/O. [`in_flight`] allows
//! one call a volume at a time and brings each to its end; [`deadline`] answers a caller whose time is
//! over with what the call waits for.

mod addons;
mod authority;
mod backend;
mod callers;
mod capability;
mod capacity;
mod context;
mod controller;
mod deadline;
mod edition;
mod encryption;
mod endpoint;
mod group_controller;
mod health;
mod identity;
mod in_flight;
mod left;
mod limits;
mod metadata;
mod metrics;
mod node;
mod parameters;
mod plugin;
mod process;
mod refusal;
mod secrets;
mod topology;

pub use backend::Backend;
pub use callers::{CALLER_TOKEN, Callers, CallersError};
pub use edition::Edition;
pub use encryption::SECRET as ENCRYPTION_KEY;
pub use endpoint::{
    EndpointError, Socket, listen, parse as parse_endpoint, parse_addons as parse_addons_endpoint,
};
pub use health::{CONTROLLER_UNREACHABLE, NO_POOL_REACHED};
pub use identity::is_driver_name;
pub use metrics::Metrics;
pub use parameters::{keys as parameter_keys, mutable_keys as mutable_parameter_keys};
pub use plugin::{ConfigError, Mode, NodeSide, Plugin, PluginOptions};
pub use process::{Error, Options, run, staged_at};

/// Name of the plugin for orchestrators, unless configured otherwise.
pub const DRIVER_NAME: &str = "csi.quoin.io";
