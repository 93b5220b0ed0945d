//! gRPC: who may call what, and messages in and out. No logic of its own.
//!
//! Callers are who their connection says they are: the admin unix socket (whoever the file's
//! permissions let in), a certificate's role and name, or nobody.
//!
//! | | unix socket | admin | node | pool | newcomer |
//! |---|---|---|---|---|---|
//! | Cluster: get, list, capacity, events | yes | yes | yes | – | – |
//! | Cluster: create, delete, resize, scale, apply, publish, unpublish, cordon, drain | yes | yes | with leave to manage volumes (for CSI), else – | – | – |
//! | Cluster: join tokens, removals, rotation, recovery by hand and of records, backup without the key | yes | yes | – | – | – |
//! | Cluster: backup with the authority's key | yes | – | – | – | – |
//! | Agent: WatchPool, ReportPool, ReportHoldings | yes | – | – | its own name | – |
//! | Agent: WatchNode, ReportNode | yes | – | its own name | – | – |
//! | Agent: AcquireEpoch, ReplaceMember, ReportVolume | yes | – | its own name, and the record must name it as owner | – | – |
//! | Join.Join | – | – | – | – | with a token |
//! | Join.Renew | – | yes | yes | yes | – |
//!
//! A certificate whose holder was removed is worth as much as none.
//!
//! Without leave to manage volumes, which comes with its join token or from an admin, a node sees
//! the volumes attached to it and no others.

mod agent;
mod authorize;
mod cluster;
mod join;

use std::sync::Arc;

use quoin_proto::control::agent_server::AgentServer;
use quoin_proto::control::cluster_server::ClusterServer;
use quoin_proto::control::join_server::JoinServer;
use tokio::sync::watch;
use tonic::service::Routes;

use crate::controller::Controller;

/// Largest request and answer, in bytes: a report of a pool with very many replicas.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// What all services share.
#[derive(Clone)]
pub(crate) struct Services {
    pub controller: Arc<Controller>,
    /// Ends the streams, so that a shutdown waits for nobody.
    pub shutdown: watch::Receiver<bool>,
    /// Streams at a time; each costs memory on both sides.
    pub streams: Arc<tokio::sync::Semaphore>,
}

impl Services {
    pub fn routes(&self) -> Routes {
        let limit = MESSAGE_BYTES_MAX;
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
