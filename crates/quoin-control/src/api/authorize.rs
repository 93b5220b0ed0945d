//! The table of the module above, as code. Everything that is not allowed is refused.
//!
//! [`super::gate`] has let the caller's role through before; here is what a request itself decides.

use std::collections::BTreeSet;
use std::sync::Arc;

use quoin_api::control::VolumeRef;
use quoin_cluster::records::VolumeRecord;
use quoin_identity::{Caller, Member, Peer, Role};
use quoin_types::VolumeId;
use tonic::{Extensions, Request};

use super::Services;
use crate::Error;
use crate::controller::Controller;
use crate::state::missing;

/// How far a caller of the Cluster service may go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Scope {
    All,
    /// Only what is attached to this node, and only looking.
    Node(String),
}

/// Volumes that a caller may see.
pub(super) enum Sight {
    All,
    These(BTreeSet<VolumeId>),
}

impl Sight {
    pub(super) fn sees(&self, volume: VolumeId) -> bool {
        match self {
            Sight::All => true,
            Sight::These(volumes) => volumes.contains(&volume),
        }
    }
}

/// A caller without a name from its transport has no rights.
fn named(extensions: &Extensions) -> Caller {
    extensions.get::<Caller>().cloned().unwrap_or(Caller::Newcomer)
}

pub(super) fn denied(caller: &Caller, what: &str) -> Error {
    match caller {
        Caller::Newcomer => {
            Error::Unauthenticated(format!("{what} needs a certificate of this cluster; join it"))
        }
        Caller::Member(member) => Error::Denied(format!("{what} is not for {}", member.peer)),
        Caller::Local => Error::Denied(format!("{what} is not for a local caller")),
    }
}

impl Services {
    /// The caller, if it is still a member.
    pub(super) fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Error> {
        let caller = named(request.extensions());
        self.still(&caller)?;
        Ok(caller)
    }

    /// Also asked while a stream goes on.
    pub(super) fn still(&self, caller: &Caller) -> Result<(), Error> {
        match caller {
            Caller::Member(member) => self.controller.membership.admission.check_member(member),
            Caller::Local | Caller::Newcomer => Ok(()),
        }
    }

    pub(super) fn look<T>(&self, request: &Request<T>) -> Result<Scope, Error> {
        match self.caller(request)? {
            Caller::Local => Ok(Scope::All),
            Caller::Member(Member { peer: Peer { role: Role::Admin, .. }, .. }) => Ok(Scope::All),
            Caller::Member(Member { peer: Peer { role: Role::Node, name, .. }, .. }) => {
                Ok(if self.controller.membership.admission.manages_volumes(&name) {
                    Scope::All
                } else {
                    Scope::Node(name)
                })
            }
            other => Err(denied(&other, "the Cluster service")),
        }
    }

    pub(super) fn manage<T>(&self, request: &Request<T>) -> Result<(), Error> {
        match self.look(request)? {
            Scope::All => Ok(()),
            Scope::Node(name) => Err(Error::Denied(format!(
                "managing volumes is not for node {name}: where it serves CSI's controller service, \
                 let it with `quoin node set {name} --manages-volumes true`"
            ))),
        }
    }

    /// Tokens and authorities make members, so no member but an admin may.
    pub(super) fn govern<T>(&self, request: &Request<T>) -> Result<(), Error> {
        match self.caller(request)? {
            Caller::Local => Ok(()),
            Caller::Member(member) if member.peer.role == Role::Admin => Ok(()),
            other => Err(denied(&other, "governing the cluster")),
        }
    }

    /// Lets in those that may open the admin socket, and nobody else.
    pub(super) fn on_this_host<T>(&self, request: &Request<T>, what: &str) -> Result<(), Error> {
        match self.caller(request)? {
            Caller::Local => Ok(()),
            other => Err(denied(&other, what)),
        }
    }

    /// An agent of `role` that acts in its own name.
    pub(super) fn act<T>(&self, request: &Request<T>, role: Role, name: &str) -> Result<(), Error> {
        match self.caller(request)? {
            Caller::Local => Ok(()),
            Caller::Member(member) if member.peer.role == role && member.peer.name == name => {
                Ok(())
            }
            other => {
                let shown: String = name.chars().take(80).collect();
                Err(denied(&other, &format!("acting as {role} {shown:?}")))
            }
        }
    }

    /// The pool that calls; `None`: somebody on this host, for any pool.
    pub(super) fn pool<T>(&self, request: &Request<T>) -> Result<Option<String>, Error> {
        match self.caller(request)? {
            Caller::Local => Ok(None),
            Caller::Member(member) if member.peer.role == Role::Pool => Ok(Some(member.peer.name)),
            other => Err(denied(&other, "acting as a pool")),
        }
    }

    pub(super) fn newcomer<T>(&self, request: &Request<T>) -> Result<(), Error> {
        match self.caller(request)? {
            Caller::Newcomer => Ok(()),
            other => Err(denied(&other, "joining")),
        }
    }

    pub(super) fn member<T>(&self, request: &Request<T>) -> Result<Member, Error> {
        match self.caller(request)? {
            Caller::Member(member) => Ok(member),
            other => Err(denied(&other, "renewing")),
        }
    }
}

impl Scope {
    /// Returns true if the volume of this id exists and the caller may see it.
    pub(super) fn sees_volume(&self, controller: &Controller, volume: VolumeId) -> bool {
        let found = || controller.state.volumes.get(&volume.to_string());
        *self == Scope::All || found().is_some_and(|volume| self.sees(&volume))
    }

    /// The volumes that the caller may see at this moment, for a look at other records while their
    /// table is locked.
    pub(super) fn sight(&self, controller: &Controller) -> Sight {
        match self {
            Scope::All => Sight::All,
            Scope::Node(name) => {
                let volumes = controller.state.volumes_of_node(name);
                let seen = volumes.iter().filter(|volume| self.sees(volume));
                Sight::These(seen.map(|volume| volume.id.0).collect())
            }
        }
    }

    pub(super) fn sees(&self, volume: &VolumeRecord) -> bool {
        match self {
            Scope::All => true,
            Scope::Node(name) => volume.attachments.iter().any(|a| a.node == *name),
        }
    }

    /// The volume of a reference. One that is out of sight does not exist: it is answered as a name
    /// that is nobody's is, so that nothing is told of it.
    pub(super) fn volume(
        &self,
        controller: &Controller,
        reference: Option<&VolumeRef>,
    ) -> Result<Arc<VolumeRecord>, Error> {
        let volume = controller.volumes.catalog.get(reference)?;
        if self.sees(&volume) {
            return Ok(volume);
        }
        Err(missing(reference))
    }
}
