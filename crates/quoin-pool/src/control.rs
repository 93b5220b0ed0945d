//! The pool's side of the control plane: learns what to hold, tells what it holds.
//!
//! Nothing on the data path waits for any of this: while the controller is away, sessions go on
//! and new ones are opened, since a grant proves itself. Only a start is told to the controller
//! first, which may know that an older state of the disk came back ([`crate::shard::Recognition`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::{
    AgentEvent, PoolAssignment, PoolReport, ReplicaReport, Scrub, WatchPoolRequest,
};
use quoin_identity::{Contact, Identity, TermChannel};
use quoin_replication::recognition::PoolCounts;
use quoin_telemetry::notices::{Notice, Notices, Severity};
use quoin_types::ReplicaGuid;
use quoin_wire::Mode;
use quoin_wire::handshake::ServerSecurity;
use tokio::sync::{Notify, oneshot, watch};
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use crate::address::Advertised;
use crate::assignment::{Assignment, AssignmentChange, PoolState, ReclaimOrder, ReplicaState};
use crate::scrub::ScrubState;
use crate::shard::Input;
use crate::{Options, ShardHandle};

/// A pool that says nothing for several of these is offline to the controller.
const REPORT_EVERY: Duration = Duration::from_secs(2);
/// Time in which most replicas are made, and are on media.
const MAKING: Duration = Duration::from_millis(20);
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
    /// Creations and deletions are on media.
    pub made: Arc<Notify>,
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
        let assignments = client.watch_pool(request).await?.into_inner();
        self.options.metrics.health.set("controller", None);
        self.obey(assignments).await
    }

    /// Does what is assigned until the assignments end.
    ///
    /// # Errors
    /// A lost connection, and the end of the controller's term.
    async fn obey(
        &self,
        mut assignments: impl Stream<Item = Result<PoolAssignment, Status>> + Unpin,
    ) -> Result<(), Status> {
        let mut terms = self.identity.terms().changes();
        let refused = |error: quoin_identity::Error| Status::unavailable(error.to_string());
        let (mut proof, mut rules) = (Vec::new(), false);
        loop {
            let message = tokio::select! {
                message = assignments.next() => message.transpose()?,
                // A target may have told of another controller's term: this one may be over.
                _ = terms.changed() => {
                    self.identity.accept_controller_term(&proof, rules).map_err(refused)?;
                    continue;
                }
            };
            let Some(message) = message else { return Ok(()) };
            self.contact.reached();
            (proof, rules) = (message.term.clone(), !message.does_not_rule);
            if !self.identity.accept_controller_term(&proof, rules).map_err(refused)? {
                self.tell_holdings(message.holdings_request).await?;
                continue;
            }
            if let Some(least) = Mode::from_name(&message.data_security) {
                self.protect(least);
            }
            let (input, refused) = if message.partial {
                let (change, refused) = AssignmentChange::from_message(&message);
                (Input::Reassign(change), refused)
            } else {
                let (assignment, refused) = Assignment::from_message(&message);
                (Input::Assign(assignment), refused)
            };
            for reason in refused {
                self.notices.push(Severity::Error, "", "", "AssignmentRefused", reason);
            }
            self.shard.send(input);
            self.shard.send(Input::Scrub { request: message.scrub_request });
            let reclaims = ReclaimOrder::all(&message);
            if !reclaims.is_empty() {
                self.shard.send(Input::Reclaim(reclaims));
            }
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
        // While the pool is opened anew no shard answers.
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

    /// Reports until `shutdown`, and once `ended` says that nothing is served any more, that the pool
    /// is leaving. These last words follow the answer to the last report: one that reached the
    /// controller behind them would have the pool online again.
    pub async fn report(&self, shutdown: watch::Receiver<bool>, ended: oneshot::Receiver<()>) {
        self.report_until(shutdown).await;
        if ended.await.is_ok() {
            self.leave().await;
        }
    }

    async fn report_until(&self, mut shutdown: watch::Receiver<bool>) {
        let mut told = Told::new();
        // A pool whose address is not known is of no use yet.
        tokio::select! {
            () = self.address.settle() => {}
            _ = shutdown.wait_for(|down| *down) => return,
        }
        loop {
            let asked_at = Instant::now();
            let all = told.all_at.is_none_or(|at| asked_at - at >= REPORT_EVERY);
            let answer = self.state(all).await;
            told.all_at = match &answer {
                Some(_) if all => Some(asked_at),
                Some(_) => told.all_at,
                None => None,
            };
            let state = answer.unwrap_or_default();
            if *shutdown.borrow() {
                return;
            }
            let changed = told.hear(&state);
            let unsettled = changed || state.scrub.running || state.mark_rises;
            let is_making = state.is_making;
            self.report_once(state, false, &mut told).await;
            let pause = match (is_making, unsettled) {
                (true, _) => MAKING,
                (false, true) => REPORT_EVERY / 8,
                (false, false) => REPORT_EVERY,
            };
            let since_all = told.all_at.map_or(Duration::ZERO, |at| at.elapsed());
            let pause = pause.min(REPORT_EVERY.saturating_sub(since_all).max(MAKING));
            let changed = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = self.made.notified() => false,
                () = self.changed.notified() => true,
                _ = shutdown.wait_for(|down| *down) => return,
            };
            if changed {
                // A creation is told when it is on media: a moment after it was asked for.
                let _ = tokio::time::timeout(MAKING, self.made.notified()).await;
            }
        }
    }

    /// `None`: no shard answers, as the pool is opened anew.
    async fn state(&self, all: bool) -> Option<PoolState> {
        let (answer, state) = oneshot::channel();
        self.shard.send(Input::State { all, answer });
        tokio::time::timeout(CALL_MAX, state).await.ok().and_then(Result::ok)
    }

    /// The last words of a pool that was shut down.
    async fn leave(&self) {
        let counts = *self.counts.lock().expect("never held across a panic");
        // Its replicas are told while it serves; so is the count of starts.
        let counts = PoolCounts { starts: 0, ..counts };
        let state = PoolState { counts, ..PoolState::default() };
        self.report_once(state, true, &mut Told::new()).await;
    }

    async fn report_once(&self, state: PoolState, leaving: bool, told: &mut Told) {
        let notices = self.notices.take();
        let trouble = self.trouble.lock().expect("never held across a panic").clone();
        // A pool that is opening tells nothing that the next report could build on.
        let is_open = state.counts.starts != 0 && !leaving;
        let (since, replicas, removed) = told.since_last(is_open);
        let report = PoolReport {
            number: told.number,
            since,
            removed,
            pool: self.options.name.clone(),
            pool_id: self.pool_id.clone(),
            node: self.options.node.clone(),
            address: self.address.known().unwrap_or_default(),
            capacity_bytes: state.space.capacity_bytes,
            used_bytes: state.space.used_bytes,
            live_bytes: state.live_bytes,
            free_bytes: state.space.free_bytes,
            warning: state.warning.to_owned(),
            ring_full: state.ring_full,
            start_counter: state.counts.starts,
            start_nonce: state.counts.nonce,
            mark: state.counts.mark,
            replicas,
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
            Ok(answer) if is_open => {
                let answer = answer.into_inner();
                told.taken(answer.taken);
                let rolled_back = answer.rolled_back;
                let (nonce, mark) = (state.counts.nonce, state.counts.mark);
                self.shard.send(Input::Judged { rolled_back, nonce, mark });
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a report did not reach the controller");
                self.notices.restore(notices);
            }
        }
    }
}

/// Knowledge of the replicas: the shard's, and the controller's by the reports that it took.
struct Told {
    /// Number of the report that is made next, or was made last.
    number: u64,
    /// All replicas as the shard told of them last.
    replicas: BTreeMap<ReplicaGuid, ReplicaState>,
    /// Replicas that changed since the last report; `None`: the controller took none to build on.
    changed: Option<BTreeSet<ReplicaGuid>>,
    /// When the shard was asked for all of them last: what changes without an event, as a lease that
    /// ends, shows then.
    all_at: Option<Instant>,
}

impl Told {
    fn new() -> Self {
        // Another process of the pool must not go on with the numbers of this one.
        let number = u64::from(rand::random::<u32>()) << 32;
        Self { number, replicas: BTreeMap::new(), changed: None, all_at: None }
    }

    /// Takes in what the shard tells. Returns true if a replica changed.
    fn hear(&mut self, state: &PoolState) -> bool {
        let mut changed = Vec::new();
        if !state.is_partial {
            let here: BTreeSet<_> = state.replicas.iter().map(|replica| replica.guid).collect();
            self.replicas.retain(|guid, _| {
                let is_here = here.contains(guid);
                changed.extend((!is_here).then_some(*guid));
                is_here
            });
        }
        for replica in &state.replicas {
            if self.replicas.get(&replica.guid) != Some(replica) {
                self.replicas.insert(replica.guid, replica.clone());
                changed.push(replica.guid);
            }
        }
        let has_changed = !changed.is_empty();
        if let Some(known) = &mut self.changed {
            known.extend(changed);
        }
        has_changed
    }

    /// Begins the next report: the number of the report that it builds on, the replicas that changed
    /// since, and those that are not there any more. 0: it builds on none, and lists all.
    fn since_last(&mut self, is_open: bool) -> (u64, Vec<ReplicaReport>, Vec<String>) {
        let since = self.number;
        self.number += 1;
        let Some(changed) = self.changed.take().filter(|_| is_open) else {
            let all = self.replicas.values().map(ReplicaState::to_message).collect();
            return (0, all, Vec::new());
        };
        let is_here = |guid: &ReplicaGuid| self.replicas.contains_key(guid);
        let (here, removed): (Vec<_>, Vec<_>) = changed.into_iter().partition(is_here);
        let here = here.iter().map(|guid| self.replicas[guid].to_message()).collect();
        (since, here, removed.iter().map(ToString::to_string).collect())
    }

    /// The report was answered. `taken`: 0 where the controller knows nothing to build on.
    fn taken(&mut self, taken: u64) {
        self.changed = (taken == self.number).then(BTreeSet::new);
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use quoin_identity::{Authority, Lifetimes, Role};
    use quoin_reactor::Reactor;
    use quoin_types::{Term, TermId};
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use super::*;
    use crate::metrics::Metrics;

    fn control(identity: Identity, reactor: &Reactor) -> (Control, Receiver<Input>) {
        let (inputs, taken) = channel();
        let listen = "127.0.0.1:0".parse().unwrap();
        let options = Options {
            name: "p".into(),
            node: "host".into(),
            path: "/nonexistent".into(),
            size_bytes: None,
            sparse: true,
            format: false,
            replace: false,
            identity: identity.dir().into(),
            join: None,
            controller: "127.0.0.1:1".into(),
            listen,
            advertise: None,
            network_only: true,
            topology: Default::default(),
            cache_bytes: 0,
            scrub_period: None,
            metrics: Metrics::new("p"),
        };
        let (channel, source) = identity.controller_with_source(&options.controller).unwrap();
        let config = identity.server_config().unwrap();
        let control = Control {
            pool_id: "1".repeat(32),
            address: Advertised::new(None, listen, source),
            channel,
            contact: Contact::new(&options.controller),
            shard: ShardHandle { inputs, waker: reactor.waker() },
            security: Arc::new(Mutex::new(ServerSecurity::Tls {
                config,
                least: Mode::remembered(identity.dir()),
            })),
            notices: Notices::default(),
            changed: Arc::default(),
            made: Arc::default(),
            trouble: Arc::default(),
            counts: Arc::default(),
            told_holdings: AtomicU64::new(0),
            options,
            identity,
        };
        (control, taken)
    }

    /// Numbers of the scrubs that the shard was given orders for.
    fn ordered(taken: &Receiver<Input>) -> Vec<u64> {
        let number = |input| match input {
            Input::Scrub { request } => Some(request),
            _ => None,
        };
        taken.try_iter().filter_map(number).collect()
    }

    #[test]
    fn a_report_says_what_changed_since_the_last_one_that_was_taken_and_all_where_none_was() {
        let replica = |guid: u128, state: &'static str| ReplicaState {
            volume: quoin_types::VolumeId(1),
            replica: quoin_types::ReplicaId(1),
            guid: ReplicaGuid(guid),
            state,
            quorum: true,
            position: Default::default(),
            stable: 0,
            used_bytes: 0,
            bad_blocks: 0,
            repaired: 0,
            is_clone: false,
            hears_target: false,
            record_generation: 0,
            promised: Default::default(),
            reclaimed: 0,
        };
        let mut told = Told::new();
        let mut report = |(now, is_partial): (&[ReplicaState], bool), is_open: bool, is_taken| {
            told.hear(&PoolState { replicas: now.to_vec(), is_partial, ..PoolState::default() });
            let before = told.number;
            let (since, replicas, removed) = told.since_last(is_open);
            told.taken(if is_taken { told.number } else { 0 });
            assert!(since == 0 || since == before);
            (since != 0, replicas.len(), removed.len())
        };
        let (first, second) = (replica(1, "open"), replica(2, "open"));
        let both = [first.clone(), second.clone()];
        let closed = [replica(2, "closed")];
        let one = (std::slice::from_ref(&first), false);
        assert_eq!(report((&both, false), true, true), (false, 2, 0));
        assert_eq!(report((&both, false), true, true), (true, 0, 0));
        assert_eq!(report((&closed, true), true, true), (true, 1, 0), "the other is as it was");
        assert_eq!(report((&closed, true), true, true), (true, 0, 0));
        let other = [first.clone(), replica(3, "created")];
        assert_eq!(report((&other, false), true, false), (true, 1, 1));
        assert_eq!(report(one, true, true), (false, 1, 0), "the last was not taken");
        assert_eq!(report(one, false, true), (false, 1, 0), "it opens");
        assert_eq!(report((&closed, true), false, true), (false, 2, 0), "it opens still");
        let recorded = [ReplicaState { record_generation: 4, ..replica(2, "closed") }];
        assert_eq!(
            report((&recorded, true), true, true),
            (true, 1, 0),
            "another record is on media"
        );
    }

    #[tokio::test]
    async fn an_order_of_a_controller_whose_term_is_over_is_refused_in_the_middle_of_its_stream() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("ca"), Lifetimes::default()).unwrap();
        let issue = |role, name: &str| authority.issue_identity(&dir.path().join(name), role, name);
        let controller = issue(Role::Controller, "c").unwrap();
        let proof = |number| {
            let term = Term { number, id: TermId(u128::from(number)) };
            controller.sign_term(term).unwrap()
        };
        let reactor = Reactor::new().unwrap();
        let (control, taken) = control(issue(Role::Pool, "p").unwrap(), &reactor);
        // The order is there before the newer term, beside it, or not at all: which of two that are
        // ready is looked at first is drawn.
        for number in (1..=60).step_by(2) {
            let (orders, stream) = tokio::sync::mpsc::unbounded_channel();
            let order = |scrub_request| {
                let term = proof(number).into();
                Ok(PoolAssignment { term, scrub_request, ..PoolAssignment::default() })
            };
            let hear = async {
                let former = order(2 * number);
                orders.send(order(2 * number - 1)).unwrap();
                tokio::task::yield_now().await;
                // A target showed its grant.
                control.identity.accept_term(&proof(number + 1)).unwrap();
                if number % 3 != 0 {
                    orders.send(former).unwrap();
                }
                std::future::pending::<()>().await;
            };
            let refused = tokio::select! {
                biased;
                () = hear => unreachable!(),
                outcome = control.obey(UnboundedReceiverStream::new(stream)) => outcome.unwrap_err(),
            };
            let why = format!("term {} has begun", number + 1);
            assert!(refused.message().contains(&why), "{refused}");
            assert_eq!(ordered(&taken), [2 * number - 1]);
        }
    }
}
