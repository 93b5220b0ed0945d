//! Access to calls, decided by the path before anything of a request's body is read.
//!
//! A message is decoded whole before a handler sees it, so a handler is too late to turn a stranger
//! away: the message would have taken its memory by then. Here the caller's role is held against the
//! path; what a request itself decides, such as in whose name it acts, is the handlers'
//! ([`super::authorize`]). A path that is not listed is nobody's.
//!
//! The headers of every call show the highest term that the member heard of, and those of every answer
//! the controller's own ([`crate::membership::term`]).

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use quoin_identity::{
    Caller, ClockDifference, Connection, Member, Peer, Role, mark_as_not_ruling, show_term,
    show_time, shown_term,
};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};

use super::authorize::denied;
use super::budgets::Budgets;
use super::counted::{Allowance, Counted, Limits};
use crate::controller::Controller;
use crate::time::timestamp;

/// The roles that a call is open to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OpenTo {
    /// Members that look at volumes and may have leave to manage them.
    Users,
    Governors,
    Pools,
    Nodes,
    Mirrors,
    Newcomers,
    /// Not the admin socket, which has no certificate to renew.
    Members,
}

impl OpenTo {
    fn admits(self, caller: &Caller) -> bool {
        let role = match caller {
            Caller::Newcomer => return self == OpenTo::Newcomers,
            Caller::Local => return !matches!(self, OpenTo::Newcomers | OpenTo::Members),
            Caller::Member(member) => member.peer.role,
        };
        match self {
            OpenTo::Users => matches!(role, Role::Admin | Role::Node),
            OpenTo::Governors => role == Role::Admin,
            OpenTo::Pools => role == Role::Pool,
            OpenTo::Nodes => role == Role::Node,
            OpenTo::Mirrors => role == Role::Mirror,
            OpenTo::Members => {
                matches!(role, Role::Admin | Role::Node | Role::Pool | Role::Mirror)
            }
            OpenTo::Newcomers => false,
        }
    }
}

const SMALL: Limits =
    Limits { message_bytes_max: 64 << 10, elements_max: 1024, nested_max: 0, messages_max: 1 };
const ASKED: Limits =
    Limits { message_bytes_max: 1 << 20, elements_max: 16 << 10, nested_max: 0, messages_max: 1 };
const TOLD: Limits =
    Limits { message_bytes_max: 4 << 20, elements_max: 64 << 10, nested_max: 0, messages_max: 1 };
/// Pieces with the records that pools keep. Each replica in them has lists of its own.
const HELD: Limits = Limits {
    message_bytes_max: 16 << 20,
    elements_max: 4 << 10,
    nested_max: 512 << 10,
    messages_max: u32::MAX,
};

/// The largest message of all, which the services themselves are given as their limit.
pub(super) const MESSAGE_BYTES_MAX: usize = HELD.message_bytes_max;

/// Every call that is served.
const CALLS: &[(&str, OpenTo, Limits)] = &[
    ("Cluster/GetClusterInfo", OpenTo::Users, ASKED),
    ("Cluster/CreateVolume", OpenTo::Users, ASKED),
    ("Cluster/DeleteVolume", OpenTo::Users, ASKED),
    ("Cluster/GetVolume", OpenTo::Users, ASKED),
    ("Cluster/ListVolumes", OpenTo::Users, ASKED),
    ("Cluster/ResizeVolume", OpenTo::Users, ASKED),
    ("Cluster/ScaleVolume", OpenTo::Users, ASKED),
    ("Cluster/FlattenVolume", OpenTo::Users, ASKED),
    ("Cluster/MoveReplica", OpenTo::Users, ASKED),
    ("Cluster/RemoveReplicas", OpenTo::Users, ASKED),
    ("Cluster/ModifyVolume", OpenTo::Users, ASKED),
    ("Cluster/ApplyVolume", OpenTo::Users, ASKED),
    ("Cluster/RecoverVolume", OpenTo::Governors, ASKED),
    ("Cluster/VerifyVolume", OpenTo::Users, ASKED),
    ("Cluster/ReclaimVolume", OpenTo::Users, SMALL),
    ("Cluster/SetKeySlots", OpenTo::Users, SMALL),
    ("Cluster/PublishVolume", OpenTo::Users, ASKED),
    ("Cluster/ConfirmReplay", OpenTo::Users, SMALL),
    ("Cluster/UnpublishVolume", OpenTo::Users, ASKED),
    ("Cluster/CreateSnapshot", OpenTo::Users, ASKED),
    ("Cluster/DeleteSnapshot", OpenTo::Users, ASKED),
    ("Cluster/GetSnapshot", OpenTo::Users, ASKED),
    ("Cluster/ListSnapshots", OpenTo::Users, ASKED),
    ("Cluster/CreateGroupSnapshot", OpenTo::Users, ASKED),
    ("Cluster/DeleteGroupSnapshot", OpenTo::Users, ASKED),
    ("Cluster/GetGroupSnapshot", OpenTo::Users, ASKED),
    ("Cluster/ListGroupSnapshots", OpenTo::Users, ASKED),
    ("Cluster/RevertVolume", OpenTo::Users, SMALL),
    ("Cluster/PullSnapshot", OpenTo::Users, SMALL),
    ("Cluster/MeasureSnapshot", OpenTo::Users, SMALL),
    ("Cluster/CreateSchedule", OpenTo::Users, ASKED),
    ("Cluster/DeleteSchedule", OpenTo::Users, ASKED),
    ("Cluster/GetSchedule", OpenTo::Users, ASKED),
    ("Cluster/ListSchedules", OpenTo::Users, ASKED),
    ("Cluster/ListPools", OpenTo::Users, ASKED),
    ("Cluster/ScrubPool", OpenTo::Users, ASKED),
    ("Cluster/ListNodes", OpenTo::Users, ASKED),
    ("Cluster/SetCordon", OpenTo::Users, ASKED),
    ("Cluster/GetCordon", OpenTo::Users, ASKED),
    ("Cluster/ListReplicas", OpenTo::Users, ASKED),
    ("Cluster/GetTargetConfig", OpenTo::Users, ASKED),
    ("Cluster/GetCapacity", OpenTo::Users, ASKED),
    ("Cluster/WatchEvents", OpenTo::Users, ASKED),
    ("Cluster/RemovePool", OpenTo::Governors, ASKED),
    ("Cluster/RemoveNode", OpenTo::Governors, ASKED),
    ("Cluster/ListAdmins", OpenTo::Governors, ASKED),
    ("Cluster/RemoveAdmin", OpenTo::Governors, ASKED),
    ("Cluster/SetNode", OpenTo::Governors, ASKED),
    ("Cluster/CreateJoinToken", OpenTo::Governors, ASKED),
    ("Cluster/ListJoinTokens", OpenTo::Governors, ASKED),
    ("Cluster/RevokeJoinToken", OpenTo::Governors, ASKED),
    ("Cluster/RotateAuthority", OpenTo::Governors, ASKED),
    ("Cluster/InvitePeer", OpenTo::Governors, SMALL),
    ("Cluster/PairPeer", OpenTo::Governors, SMALL),
    ("Cluster/ListPeers", OpenTo::Governors, SMALL),
    ("Cluster/ModifyPeer", OpenTo::Governors, SMALL),
    ("Cluster/UnpairPeer", OpenTo::Governors, SMALL),
    ("Cluster/RemoveMirror", OpenTo::Governors, SMALL),
    ("Cluster/CreateVolumeGroup", OpenTo::Users, ASKED),
    ("Cluster/GetVolumeGroup", OpenTo::Users, SMALL),
    ("Cluster/ListVolumeGroups", OpenTo::Users, SMALL),
    ("Cluster/ModifyVolumeGroup", OpenTo::Users, ASKED),
    ("Cluster/DeleteVolumeGroup", OpenTo::Users, SMALL),
    ("Cluster/EnableMirror", OpenTo::Users, SMALL),
    ("Cluster/GetMirror", OpenTo::Users, SMALL),
    ("Cluster/ListMirrors", OpenTo::Users, SMALL),
    ("Cluster/CallMirror", OpenTo::Users, SMALL),
    ("Cluster/VerifyMirror", OpenTo::Users, SMALL),
    ("Cluster/AddFences", OpenTo::Users, SMALL),
    ("Cluster/RemoveFences", OpenTo::Users, SMALL),
    ("Cluster/ListFences", OpenTo::Users, SMALL),
    ("Cluster/Backup", OpenTo::Governors, ASKED),
    ("Cluster/RecoverRecords", OpenTo::Governors, ASKED),
    ("Agent/WatchPool", OpenTo::Pools, SMALL),
    ("Agent/ReportPool", OpenTo::Pools, TOLD),
    ("Agent/ReportHoldings", OpenTo::Pools, HELD),
    ("Agent/WatchNode", OpenTo::Nodes, SMALL),
    ("Agent/ReportNode", OpenTo::Nodes, TOLD),
    ("Agent/ReportTarget", OpenTo::Nodes, SMALL),
    ("Agent/AcquireEpoch", OpenTo::Nodes, SMALL),
    ("Agent/SwapMembership", OpenTo::Nodes, SMALL),
    ("Agent/ReportVolume", OpenTo::Nodes, TOLD),
    ("Agent/WatchCommands", OpenTo::Nodes, SMALL),
    ("Agent/ReportOutcome", OpenTo::Nodes, SMALL),
    ("Agent/ReportPart", OpenTo::Nodes, TOLD),
    ("Agent/WatchMirror", OpenTo::Mirrors, SMALL),
    ("Agent/ReportMirror", OpenTo::Mirrors, TOLD),
    ("Join/Introduce", OpenTo::Newcomers, SMALL),
    ("Join/Join", OpenTo::Newcomers, SMALL),
    ("Join/Pair", OpenTo::Newcomers, SMALL),
    ("Join/Renew", OpenTo::Members, SMALL),
];

const PACKAGE: &str = "/quoin.control.v1.";

/// The callers of a path, and the limits of what they may carry.
fn call(path: &str) -> Option<(OpenTo, Limits)> {
    let call = path.strip_prefix(PACKAGE)?;
    CALLS.iter().find(|(name, ..)| *name == call).map(|(_, open_to, limits)| (*open_to, *limits))
}

/// The one call of a member whose certificate is not valid yet.
const RENEWAL: &str = "/quoin.control.v1.Join/Renew";

fn early(member: &Member) -> Status {
    let seconds = |time: SystemTime| {
        timestamp(
            time.duration_since(UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
        )
    };
    let (now, from) = (SystemTime::now(), member.valid_from.unwrap_or(UNIX_EPOCH));
    Status::unauthenticated(format!(
        "the certificate of {} is not valid before {}, and by the controller's clock it is {}: it \
         renews it by itself; where this stays, check the clocks of both hosts",
        member.peer,
        seconds(from),
        seconds(now)
    ))
}

/// Stands in front of all services of a port.
#[derive(Clone)]
pub(crate) struct Gate<S> {
    pub controller: Arc<Controller>,
    pub budgets: Budgets,
    pub inner: S,
}

/// Time in which a message comes whole, of a member and of a caller without a certificate.
const MESSAGE_WITHIN: Duration = Duration::from_secs(30);
const NEWCOMERS_MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// The place of a call among those that are not answered yet.
enum Place {
    Local,
    Newcomer { _call: tokio::sync::OwnedSemaphorePermit },
    Member { _call: quoin_identity::Slot<Peer> },
}

fn place(
    budgets: &Budgets,
    caller: &Caller,
    connection: Option<&Connection>,
) -> Result<Place, Status> {
    match (caller, connection) {
        (Caller::Local, _) => Ok(Place::Local),
        (Caller::Member(member), _) => match budgets.calls.take(member.peer.clone()) {
            Ok(call) => Ok(Place::Member { _call: call }),
            Err(_) => Err(Status::resource_exhausted(format!(
                "{} has too many calls under way: it calls again once others are answered",
                member.peer
            ))),
        },
        (Caller::Newcomer, connection) => {
            let call = connection.and_then(Connection::begin_call);
            let call = call.map(|call| Place::Newcomer { _call: call });
            call.ok_or_else(|| {
                Status::resource_exhausted("without a certificate, one call after the other")
            })
        }
    }
}

impl<S> Service<Request<Body>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The one that said it is ready is the one to be called.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let controller = self.controller.clone();
        let budgets = self.budgets.clone();
        // A request of which no transport has said whose it is comes from nobody.
        let connection = request.extensions().get::<Connection>().cloned();
        let caller = match &connection {
            Some(connection) => connection.caller.clone(),
            None => request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Newcomer),
        };
        let mut request = request;
        request.extensions_mut().insert(caller.clone());
        let path = request.uri().path().to_owned();
        let heard = shown_term(request.headers());
        let clock = ClockDifference::shown(request.headers());
        Box::pin(async move {
            // Until the answer: so long a call takes its place, and its message its bytes.
            let placed = place(&budgets, &caller, connection.as_ref());
            let let_in = match &placed {
                Ok(_) => let_through(&controller, &caller, &heard, &path).await,
                Err(status) => Err(status.clone()),
            };
            let mut answer = match let_in {
                Ok(limits) => {
                    if let (Caller::Member(member), Some(clock)) = (&caller, clock) {
                        controller.membership.clocks.heard(&member.peer, clock);
                    }
                    let allowance = match &caller {
                        Caller::Member(member) => Allowance {
                            budget: Some((budgets.bytes.clone(), member.peer.clone())),
                            message_within: MESSAGE_WITHIN,
                        },
                        Caller::Local => Allowance { budget: None, message_within: MESSAGE_WITHIN },
                        Caller::Newcomer => {
                            Allowance { budget: None, message_within: NEWCOMERS_MESSAGE_WITHIN }
                        }
                    };
                    let (head, body) = request.into_parts();
                    let (body, _held) = Counted::over(body, limits, allowance);
                    inner.call(Request::from_parts(head, body)).await?
                }
                // The body is dropped unread, which tells the peer to stop sending it.
                Err(status) => status.into_http(),
            };
            drop(placed);
            show_time(answer.headers_mut());
            show_term(answer.headers_mut(), &controller.membership.terms.proof());
            if !controller.membership.terms.claims() {
                mark_as_not_ruling(answer.headers_mut());
            }
            Ok(answer)
        })
    }
}

async fn let_through(
    controller: &Controller,
    caller: &Caller,
    term: &[u8],
    path: &str,
) -> Result<Limits, Status> {
    let found = call(path);
    if *caller == Caller::Newcomer && !found.is_some_and(|(open_to, _)| open_to.admits(caller)) {
        return Err(denied(caller, "everything but joining").into());
    }
    let Some((open_to, limits)) = found else {
        let shown: String = path.chars().take(80).collect();
        return Err(Status::unimplemented(format!("{shown} is no call of this version")));
    };
    if let Caller::Member(member) = caller {
        if member.is_early() && path != RENEWAL {
            return Err(early(member));
        }
        controller.membership.admission.admit(member).await?;
        controller.membership.terms.hear(term, &member.peer).await?;
    }
    controller.state.check_term()?;
    if !open_to.admits(caller) {
        let call = path.strip_prefix(PACKAGE).unwrap_or_default();
        return Err(denied(caller, &format!("the call {call}")).into());
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_the_protocol_is_listed_once_and_no_other_is() {
        let proto = include_str!("../../../quoin-api/proto/control.proto");
        let mut service = "";
        let mut served = Vec::new();
        for line in proto.lines() {
            let mut words =
                line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
            match (words.next(), words.next()) {
                (Some("service"), Some(name)) => service = name,
                (Some("rpc"), Some(name)) => served.push(format!("{service}/{name}")),
                _ => {}
            }
        }
        let mut listed: Vec<_> = CALLS.iter().map(|(name, ..)| (*name).to_owned()).collect();
        served.sort();
        listed.sort();
        assert_eq!(listed, served);
    }

    #[test]
    fn a_newcomer_may_join_or_pair_and_do_nothing_else() {
        for (name, open_to, _) in CALLS {
            let is_theirs = ["Join/Introduce", "Join/Join", "Join/Pair"].contains(name);
            assert_eq!(open_to.admits(&Caller::Newcomer), is_theirs, "{name}");
        }
    }
}
