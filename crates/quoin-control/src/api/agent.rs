//! The Agent service: pools, nodes, targets.

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use quoin_api::control::acquire_epoch_response::Outcome as Acquired;
use quoin_api::control::agent_server::Agent;
use quoin_api::control::swap_membership_response::Outcome as Swapped;
use quoin_api::control::{
    AcquireEpochRequest, AcquireEpochResponse, CommandOutcome, MirrorAssignment, MirrorReport,
    NodeAssignment, NodeReport, PoolAssignment, PoolHoldings, PoolReport, PulledPart, ReportAnswer,
    SwapMembershipRequest, SwapMembershipResponse, TargetCommand, TargetReport, VolumeReport,
    WatchCommandsRequest, WatchMirrorRequest, WatchNodeRequest, WatchPoolRequest,
};
use quoin_cluster::ownership::epochs::MembershipSwap;
use quoin_identity::convert::membership_message;
use quoin_identity::{Caller, NoSlot, Peer, Role, Slot};
use quoin_types::membership::REPLICAS_MAX;
use quoin_types::{Epoch, Member};
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming, async_trait};

use super::Services;
use crate::Error;
use crate::api::assignments::{NodeStream, PoolStream};
use crate::fields::id;
use crate::messages::spec;
use crate::state::changes::{Concern, News};

/// Between two looks at what a mirror is to do.
const MIRRORS_LOOK_EVERY: Duration = Duration::from_secs(1);
/// For all that a pool keeps: a little longer than a pool takes for it.
const ANSWERED_WITHIN: Duration = Duration::from_secs(40);

type Assignments<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Services {
    /// Sends what `next` gives at once, and again after each change that concerns the stream.
    fn follow<T: Send + 'static>(
        &self,
        caller: Caller,
        concern: Concern,
        mut next: impl FnMut(News) -> Option<T> + Send + 'static,
    ) -> Result<Response<Assignments<T>>, Status> {
        let place = self.stream_place(&caller)?;
        let services = self.clone();
        let mut shutdown = self.shutdown.clone();
        let stream = async_stream::stream! {
            let _place = place;
            let mut changes = services.controller.state.changes_of(concern);
            let mut news = News::All;
            loop {
                if let Err(error) = services.still(&caller) {
                    yield Err(error.into());
                    break;
                }
                if let Some(message) = next(news) {
                    yield Ok(message);
                }
                tokio::select! {
                    more = changes.news() => news = more,
                    _ = shutdown.wait_for(|down| *down) => break,
                }
            }
        };
        Ok(Response::new(Box::pin(stream)))
    }

    /// A place for one stream, of the share that a member has.
    pub(super) fn stream_place(&self, caller: &Caller) -> Result<Option<Slot<Peer>>, Error> {
        let Caller::Member(member) = caller else { return Ok(None) };
        let place = self.streams.take(member.peer.clone()).map_err(|why| {
            Error::Exhausted(match why {
                NoSlot::Full => "too many streams are open".to_owned(),
                NoSlot::ShareTaken => format!("{} has too many streams open", member.peer),
            })
        })?;
        Ok(Some(place))
    }
}

#[async_trait]
impl Agent for Services {
    type WatchPoolStream = Assignments<PoolAssignment>;
    type WatchNodeStream = Assignments<NodeAssignment>;
    type WatchCommandsStream = Assignments<TargetCommand>;
    type WatchMirrorStream = Assignments<MirrorAssignment>;

    async fn watch_pool(
        &self,
        request: Request<WatchPoolRequest>,
    ) -> Result<Response<Self::WatchPoolStream>, Status> {
        let name = request.get_ref().pool.clone();
        self.act(&request, Role::Pool, &name)?;
        let mut stream = PoolStream::new(self.controller.assignments.clone(), &name);
        let caller = self.caller(&request)?;
        self.follow(caller, Concern::Pool(name), move |news| stream.next(news))
    }

    async fn watch_node(
        &self,
        request: Request<WatchNodeRequest>,
    ) -> Result<Response<Self::WatchNodeStream>, Status> {
        let name = request.get_ref().node.clone();
        self.act(&request, Role::Node, &name)?;
        let assignments = self.controller.assignments.clone();
        let mut stream = NodeStream::new(assignments, &name);
        let caller = self.caller(&request)?;
        self.follow(caller, Concern::Node(name), move |news| stream.next(news))
    }

    async fn watch_commands(
        &self,
        request: Request<WatchCommandsRequest>,
    ) -> Result<Response<Self::WatchCommandsStream>, Status> {
        let WatchCommandsRequest { node: name } = request.get_ref().clone();
        self.act(&request, Role::Node, &name)?;
        let caller = self.caller(&request)?;
        let place = self.stream_place(&caller)?;
        let services = self.clone();
        let mut shutdown = self.shutdown.clone();
        let stream = async_stream::stream! {
            let _place = place;
            let controller = &services.controller;
            let mut changes = controller.state.changes_of(Concern::Node(name.clone()));
            let mut commands = controller.snapshots.commands.of_node(&name);
            let mut begun = commands.begun();
            loop {
                if let Err(error) = services.still(&caller) {
                    yield Err(error.into());
                    break;
                }
                let term = controller.membership.terms.proof();
                let (due, pause) = commands.next(Instant::now(), term.as_ref());
                for command in due {
                    yield Ok(command);
                }
                let again = async {
                    match pause {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    _ = changes.news() => {}
                    // The sender lives in the state, which is held here.
                    _ = begun.changed() => {}
                    () = again => {}
                    _ = shutdown.wait_for(|down| *down) => break,
                }
            }
        };
        Ok(Response::new(Box::pin(stream)))
    }

    async fn watch_mirror(
        &self,
        request: Request<WatchMirrorRequest>,
    ) -> Result<Response<Self::WatchMirrorStream>, Status> {
        let WatchMirrorRequest { mirror } = request.get_ref().clone();
        self.act(&request, Role::Mirror, &mirror)?;
        let caller = self.caller(&request)?;
        let place = self.stream_place(&caller)?;
        let services = self.clone();
        let mut shutdown = self.shutdown.clone();
        let stream = async_stream::stream! {
            let _place = place;
            let mut told = None;
            let mut news = services.controller.mirror.driver.news();
            loop {
                if let Err(error) = services.still(&caller) {
                    yield Err(error.into());
                    break;
                }
                let controller = &services.controller;
                let mut message = controller.membership.peers.assignment(&mirror);
                controller.mirror.driver.assign(&mirror, &mut message);
                message.term = controller.membership.terms.proof().to_vec();
                message.does_not_rule = !controller.membership.terms.claims();
                if told.as_ref() != Some(&message) {
                    told = Some(message.clone());
                    yield Ok(message);
                }
                // Messages are said once.
                if let Some(told) = &mut told {
                    told.messages.clear();
                }
                tokio::select! {
                    // Mirrors begin and end to run without a change of a record.
                    () = tokio::time::sleep(MIRRORS_LOOK_EVERY) => {}
                    // The sender lives in the controller, which is held here.
                    _ = news.changed() => {}
                    _ = shutdown.wait_for(|down| *down) => break,
                }
            }
        };
        Ok(Response::new(Box::pin(stream)))
    }

    async fn report_mirror(
        &self,
        request: Request<MirrorReport>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Mirror, &request.get_ref().mirror)?;
        let mut report = request.into_inner();
        let messages = std::mem::take(&mut report.messages);
        let sent = std::mem::take(&mut report.sent);
        let taken = self.controller.membership.peers.report(report).await;
        // A report that says a thing that is not taken has the words of peers all the same.
        self.controller.mirror.driver.reported(messages, sent).await;
        taken?;
        Ok(Response::new(ReportAnswer::default()))
    }

    async fn report_outcome(
        &self,
        request: Request<CommandOutcome>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        self.controller.snapshots.commands.ended(request.get_ref()).await?;
        Ok(Response::new(ReportAnswer::default()))
    }

    async fn report_part(
        &self,
        request: Request<PulledPart>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        self.controller.snapshots.commands.part(request.into_inner())?;
        Ok(Response::new(ReportAnswer::default()))
    }

    async fn report_pool(
        &self,
        request: Request<PoolReport>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Pool, &request.get_ref().pool)?;
        let report = request.get_ref();
        let taken = self.controller.reports.pool(report).await?;
        let rolled_back = self.controller.state.is_rolled_back(&report.pool);
        Ok(Response::new(ReportAnswer { rolled_back, taken, ..ReportAnswer::default() }))
    }

    async fn report_holdings(
        &self,
        request: Request<Streaming<PoolHoldings>>,
    ) -> Result<Response<ReportAnswer>, Status> {
        let (metadata, extensions, mut pieces) = request.into_parts();
        let caller = Request::from_parts(metadata, extensions, ());
        // Before any piece is read: a member that is no pool has nothing to tell.
        let of_pool = self.pool(&caller)?;
        let first = pieces.message().await?;
        let first = first.ok_or_else(|| Error::invalid("holdings", "there is no piece"))?;
        if of_pool.is_some_and(|pool| pool != first.pool) {
            self.act(&caller, Role::Pool, &first.pool)?;
        }
        let answer = self.controller.disaster.salvage.begin_answer(&first.pool, first.request)?;
        let told = async {
            let mut piece = Some(first);
            while let Some(next) = piece {
                self.controller.disaster.salvage.add_to_answer(&answer, &next)?;
                piece = pieces.message().await?;
            }
            Ok(self.controller.disaster.salvage.end_answer(&answer)?)
        };
        let late = || Err(Status::deadline_exceeded("the whole answer takes too long"));
        let told = tokio::time::timeout(ANSWERED_WITHIN, told).await.unwrap_or_else(|_| late());
        // A call that is dropped leaves what came of it to the end of the request.
        if let Err(error) = told {
            self.controller.disaster.salvage.drop_answer(&answer);
            return Err(error);
        }
        Ok(Response::new(ReportAnswer::default()))
    }

    async fn report_node(
        &self,
        request: Request<NodeReport>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        let answer = self.controller.reports.node(request.get_ref()).await?;
        Ok(Response::new(answer.into()))
    }

    async fn report_target(
        &self,
        request: Request<TargetReport>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        let answer = self.controller.reports.target(request.get_ref()).await?;
        Ok(Response::new(answer.into()))
    }

    async fn acquire_epoch(
        &self,
        request: Request<AcquireEpochRequest>,
    ) -> Result<Response<AcquireEpochResponse>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        let asked = request.into_inner();
        let volume = id("volume_id", &asked.volume_id)?;
        let incarnation = id("incarnation", &asked.incarnation)?;
        let at_least = Epoch(asked.at_least);
        let acquired = self
            .controller
            .volumes
            .epochs
            .acquire_behind(asked.fences_digest, volume, &asked.node, incarnation, at_least)
            .await?;
        let mut answer = AcquireEpochResponse::default();
        match acquired {
            Ok(granted) => {
                answer.set_outcome(Acquired::Granted);
                answer.epoch = granted.epoch.0;
                answer.membership = Some(membership_message(&granted.membership));
                answer.grant = granted.grant;
                answer.spec = Some(spec(&granted.record));
                let term = self.controller.state.term();
                answer.options_version = term.version_of(granted.record.generation);
            }
            Err(why) => {
                answer.set_outcome(Acquired::NotOwner);
                answer.message = why;
            }
        }
        Ok(Response::new(answer))
    }

    async fn swap_membership(
        &self,
        request: Request<SwapMembershipRequest>,
    ) -> Result<Response<SwapMembershipResponse>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        let asked = request.into_inner();
        if asked.known.len() > REPLICAS_MAX {
            return Err(Error::invalid("known", format!("at most {REPLICAS_MAX}")).into());
        }
        let factor = |field, n: u32| {
            u8::try_from(n).map_err(|_| Error::invalid(field, format!("{n} is out of range")))
        };
        let known = asked.known.iter().map(|m| {
            Ok(Member { id: id("replica_id", &m.replica_id)?, guid: id("guid", &m.guid)? })
        });
        let swap = MembershipSwap {
            volume: id("volume_id", &asked.volume_id)?,
            node: asked.node,
            epoch: Epoch(asked.epoch),
            incarnation: id("incarnation", &asked.incarnation)?,
            version: asked.version,
            rf: factor("rf", asked.rf)?,
            cf: factor("cf", asked.cf)?,
            known: known.collect::<Result<_, Error>>()?,
        };
        let (membership, outcome) = self.controller.volumes.epochs.swap_membership(&swap).await?;
        let membership = Some(membership_message(&membership));
        let mut answer = SwapMembershipResponse { membership, ..Default::default() };
        match outcome {
            Ok(()) => answer.set_outcome(Swapped::Swapped),
            Err(why) => {
                answer.set_outcome(Swapped::Refused);
                answer.message = why;
            }
        }
        Ok(Response::new(answer))
    }

    async fn report_volume(
        &self,
        request: Request<VolumeReport>,
    ) -> Result<Response<ReportAnswer>, Status> {
        self.act(&request, Role::Node, &request.get_ref().node)?;
        let grant = self.controller.reports.volume(request.get_ref()).await?;
        Ok(Response::new(ReportAnswer { grant, ..ReportAnswer::default() }))
    }
}
