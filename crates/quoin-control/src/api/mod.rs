//! gRPC: who may call what, and messages in and out. No logic of its own.
//!
//! A caller's identity is that of its connection: the admin unix socket (all users that the file's
//! permissions admit), a certificate's role and name, or none.
//!
//! | | unix socket | admin | node | pool | newcomer |
//! |---|---|---|---|---|---|
//! | Cluster: get, list, capacity, events | yes | yes | yes | – | – |
//! | Cluster: create, delete, resize, scale, apply, publish, unpublish, snapshots, schedules, cordon, drain | yes | yes | with leave to manage volumes (for CSI), else – | – | – |
//! | Cluster: join tokens, admins, removals, rotation, recovery by hand and of records, backup without the key | yes | yes | – | – | – |
//! | Cluster: backup with the authority's key | yes | – | – | – | – |
//! | Agent: WatchPool, ReportPool, ReportHoldings | yes | – | – | its own name | – |
//! | Agent: WatchNode, WatchCommands, ReportNode, ReportTarget, ReportOutcome | yes | – | its own name | – | – |
//! | Agent: AcquireEpoch, SwapMembership, ReportVolume | yes | – | its own name, and the record must name it as owner | – | – |
//! | Join.Join | – | – | – | – | with a token |
//! | Join.Introduce | – | – | – | – | with a service account's token |
//! | Join.Renew | – | yes | yes | yes | – |
//!
//! Roles are held against paths before a body is read ([`gate`]), and bodies against limits while
//! they come in ([`counted`]), with a budget for each caller and for all ([`budgets`]). A certificate whose holder was removed, or whose name belongs to another
//! key, is worth as much as none.
//!
//! Without leave to manage volumes, which comes with its join token or from an admin, a node sees
//! the volumes attached to it and no others.

mod agent;
pub(crate) mod assignments;
mod authorize;
mod budgets;
mod cluster;
mod counted;
mod gate;
mod join;
pub(crate) mod reports;

use std::sync::Arc;

use quoin_api::control::agent_server::AgentServer;
use quoin_api::control::cluster_server::ClusterServer;
use quoin_api::control::join_server::JoinServer;
use quoin_identity::{Peer, Shares};
use tokio::sync::watch;
use tonic::service::Routes;

use crate::controller::Controller;

pub(crate) use budgets::Budgets;
pub(crate) use gate::Gate;

/// State that all services share.
#[derive(Clone)]
pub(crate) struct Services {
    pub controller: Arc<Controller>,
    /// Ends the streams, so that a shutdown waits for no member.
    pub shutdown: watch::Receiver<bool>,
    /// Streams of members at a time. Each costs memory on both sides.
    pub streams: Shares<Peer>,
}

impl Services {
    pub fn routes(&self) -> Routes {
        // Each call has a limit of its own before these.
        let limit = gate::MESSAGE_BYTES_MAX;
        let cluster = ClusterServer::new(self.clone())
            .max_decoding_message_size(1 << 20)
            .max_encoding_message_size(usize::MAX);
        let agent = AgentServer::new(self.clone())
            .max_decoding_message_size(limit)
            .max_encoding_message_size(usize::MAX);
        let join = JoinServer::new(self.clone()).max_decoding_message_size(64 << 10);
        Routes::new(cluster).add_service(agent).add_service(join)
    }
}
