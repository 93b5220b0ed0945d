//! The pool's side of the control plane: learns what to hold, tells what it holds.
//!
//! Nothing on the data path waits for any of this: while the controller is away, sessions go on
//! and new ones are opened, since a grant proves itself. Only a start is told to the controller
//! first, which may know that an older state of the disk came back ([`crate::shard::Recognition`]).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_core::recognition::PoolCounts;
use quoin_identity::{Contact, Identity, TermChannel};
use quoin_proto::control::agent_client::AgentClient;
use quoin_proto::control::{AgentEvent, PoolReport, Scrub, WatchPoolRequest};
use quoin_wire::Mode;
use quoin_wire::handshake::ServerSecurity;
use quoin_wire::notices::{Notice, Notices, Severity};
use tokio::sync::{Notify, oneshot, watch};
use tonic::Status;

use crate::address::Advertised;
use crate::assignment::{Assignment, PoolState, ReplicaState};
use crate::scrub::ScrubState;
use crate::shard::Input;
use crate::{Options, ShardHandle};

/// A pool that says nothing for several of these is offline to the controller.
const REPORT_EVERY: Duration = Duration::from_secs(2);
/// Between attempts to reach a controller that is away.
const RETRY: Duration = Duration::from_millis(500);
const CALL_MAX: Duration = Duration::from_secs(5);
/// An assignment of the most replicas that a pool may have, each with an ordinary record.
const ASSIGNMENT_BYTES_MAX: usize = 128 << 20;
/// For telling all that the pool keeps about thousands of replicas.
const HOLDINGS_MAX: Duration = Duration::from_secs(30);

pub(crate) struct Control {
    pub options: Options,
    pub identity: Identity,
    pub pool_id: String,
    pub address: Advertised,
    pub channel: TermChannel,
    pub contact: Contact,
    pub shard: ShardHandle,
    pub security: Arc<Mutex<ServerSecurity>>,
    pub notices: Notices,
    /// Something worth a report now.
    pub changed: Arc<Notify>,
    /// Why the pool is not served at this moment, if so.
    pub trouble: Arc<Mutex<Option<String>>>,
    /// The pool's counts when its shard ended.
    pub counts: Arc<Mutex<PoolCounts>>,
    /// The last request for all holdings that was answered.
    pub told_holdings: AtomicU64,
}

impl Control {
    /// Follows the assignments until `shutdown`; reconnects for ever.
    ///
    /// # Errors
    /// The controller's word that the pool was removed.
    pub async fn follow(&self, shutdown: watch::Receiver<bool>) -> Result<(), String> {
        let tell = |why| self.options.metrics.health.set("controller", Some(why));
        self.contact.follow(shutdown, RETRY, || self.follow_once(), tell).await
    }

    async fn follow_once(&self) -> Result<(), Status> {
        let client = AgentClient::new(self.channel.clone());
        // The first one has the record of every volume of which a replica is here.
        let mut client = client.max_decoding_message_size(ASSIGNMENT_BYTES_MAX);
        let request = WatchPoolRequest { pool: self.options.name.clone() };
        let mut assignments = client.watch_pool(request).await?.into_inner();
        self.options.metrics.health.set("controller", None);
        let mut terms = self.identity.terms().changes();
        let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
        let (mut proof, mut rules) = (Vec::new(), false);
        loop {
            let message = tokio::select! {
                message = assignments.message() => message?,
                // A target may have told of another controller's term: this one may be over.
                _ = terms.changed() => {
                    self.identity.hear_controller(&proof, rules).map_err(refused)?;
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            self.contact.heard();
            (proof, rules) = (message.term.clone(), !message.does_not_rule);
            if !self.identity.hear_controller(&proof, rules).map_err(refused)? {
                self.tell_holdings(message.holdings_request).await?;
                continue;
            }
            if let Some(least) = Mode::from_name(&message.data_security) {
                self.protect(least);
            }
            let (assignment, refused) = Assignment::from_message(&message);
            for reason in refused {
                self.notices.push(Severity::Error, "", "", "AssignmentRefused", reason);
            }
            self.shard.send(Input::Assign(assignment));
            self.shard.send(Input::Scrub { request: message.scrub_request });
            self.changed.notify_one();
            self.tell_holdings(message.holdings_request).await?;
        }
    }

    /// Answers a request for all that the pool keeps, once. An error ends the following of the
    /// assignments, which begins anew, and the request with it.
    async fn tell_holdings(&self, request: u64) -> Result<(), Status> {
        if request == 0 || request == self.told_holdings.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (answer, holdings) = oneshot::channel();
        self.shard.send(Input::Holdings(answer));
        let holdings = tokio::time::timeout(CALL_MAX, holdings).await.ok().and_then(Result::ok);
        // While the pool is opened anew there is nobody to ask.
        let holdings = holdings.ok_or_else(|| Status::unavailable("the pool is opening"))?;
        let pieces = holdings.pieces(&self.options.name, &self.pool_id, request);
        let mut told = tonic::Request::new(tokio_stream::iter(pieces));
        told.set_timeout(HOLDINGS_MAX);
        AgentClient::new(self.channel.clone()).report_holdings(told).await?;
        self.told_holdings.store(request, Ordering::Relaxed);
        Ok(())
    }

    /// From now on data connections are taken only in this mode or a stronger one.
    fn protect(&self, least: Mode) {
        match self.identity.server_config() {
            Ok(config) => {
                let security = ServerSecurity::Tls { config, least };
                *self.security.lock().expect("never held across a panic") = security;
            }
            Err(error) => tracing::error!(%error, "cannot take the new data security"),
        }
        least.remember(self.identity.dir());
    }

    /// Reports until `shutdown`, then once more that the pool is leaving.
    pub async fn report(&self, mut shutdown: watch::Receiver<bool>) {
        let mut last = Vec::new();
        // A pool whose address is not known is of no use yet.
        tokio::select! {
            () = self.address.settle() => {}
            _ = shutdown.wait_for(|down| *down) => return,
        }
        loop {
            let state = self.state().await;
            let unsettled = state.replicas != last || state.scrub.running || state.mark_rises;
            last.clone_from(&state.replicas);
            self.report_once(state, false).await;
            let pause = if unsettled { REPORT_EVERY / 8 } else { REPORT_EVERY };
            let changed = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = self.changed.notified() => true,
                _ = shutdown.wait_for(|down| *down) => return,
            };
            if changed {
                // A creation is told when it is on media: a moment after it was asked for.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    async fn state(&self) -> PoolState {
        let (answer, state) = oneshot::channel();
        self.shard.send(Input::State(answer));
        // No answer: the shard is opening the pool anew.
        tokio::time::timeout(CALL_MAX, state).await.ok().and_then(Result::ok).unwrap_or_default()
    }

    /// The last words of a pool that was shut down.
    pub async fn leave(&self) {
        let counts = *self.counts.lock().expect("never held across a panic");
        // What it holds is told while it serves; so is the count of starts.
        let counts = PoolCounts { starts: 0, ..counts };
        self.report_once(PoolState { counts, ..PoolState::default() }, true).await;
    }

    async fn report_once(&self, state: PoolState, leaving: bool) {
        let notices = self.notices.take();
        let trouble = self.trouble.lock().expect("never held across a panic").clone();
        let report = PoolReport {
            pool: self.options.name.clone(),
            pool_id: self.pool_id.clone(),
            node: self.options.node.clone(),
            address: self.address.known().unwrap_or_default(),
            capacity_bytes: state.space.capacity_bytes,
            used_bytes: state.space.used_bytes,
            free_bytes: state.space.free_bytes,
            warning: state.warning.to_owned(),
            start_counter: state.counts.starts,
            start_nonce: state.counts.nonce,
            mark: state.counts.mark,
            replicas: state.replicas.iter().map(ReplicaState::to_message).collect(),
            topology: self.options.topology.clone().into_iter().collect(),
            error: trouble.unwrap_or_default(),
            leaving,
            events: notices.iter().map(event).collect(),
            scrub: Some(scrub(&state.scrub)),
            wear: Some(self.options.metrics.wear()),
        };
        let mut request = tonic::Request::new(report);
        request.set_timeout(CALL_MAX);
        let mut client = AgentClient::new(self.channel.clone());
        match client.report_pool(request).await {
            // A pool that is opening has told no start that could be judged.
            Ok(answer) if state.counts.starts != 0 && !leaving => {
                let rolled_back = answer.into_inner().rolled_back;
                self.shard.send(Input::Judged { rolled_back, mark: state.counts.mark });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a report did not reach the controller");
                self.notices.restore(notices);
            }
        }
    }
}

fn scrub(state: &ScrubState) -> Scrub {
    Scrub {
        request: state.request,
        running: state.running,
        began_s: state.began_s,
        ended_s: state.ended_s,
        read_bytes: state.read_bytes,
        total_bytes: state.total_bytes,
        found: state.found,
    }
}

fn event(notice: &Notice) -> AgentEvent {
    AgentEvent {
        severity: notice.severity.as_str().into(),
        volume_id: notice.volume.clone(),
        replica_id: notice.replica.clone(),
        reason: notice.reason.clone(),
        message: notice.message.clone(),
    }
}
