//! The table of the module above, as code. Everything that is not allowed is refused.

use quoin_identity::{Caller, Peer, Role};
use tonic::Request;

use super::Services;
use crate::Error;
use crate::records::VolumeRecord;

/// How far a caller of the Cluster service may go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Scope {
    All,
    /// Only what is attached to this node, and only looking.
    Node(String),
}

/// Whoever no transport has named is nobody.
fn named<T>(request: &Request<T>) -> Caller {
    request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Newcomer)
}

fn denied(caller: &Caller, what: &str) -> Error {
    match caller {
        Caller::Newcomer => {
            Error::Unauthenticated(format!("{what} needs a certificate of this cluster; join it"))
        }
        Caller::Member(peer) => Error::Denied(format!("{what} is not for {peer}")),
        Caller::Local => Error::Denied(format!("{what} is not for a local caller")),
    }
}

impl Services {
    /// Who calls, if he is still a member.
    fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Error> {
        match named(request) {
            Caller::Member(peer) if !self.controller.is_member(peer.role, &peer.name) => {
                Err(Error::Denied(format!(
                    "{peer} was removed from the cluster: to come back, it joins with a new token \
                     and an empty --state directory"
                )))
            }
            caller => Ok(caller),
        }
    }

    pub(super) fn look<T>(&self, request: &Request<T>) -> Result<Scope, Error> {
        match self.caller(request)? {
            Caller::Local => Ok(Scope::All),
            Caller::Member(Peer { role: Role::Admin, .. }) => Ok(Scope::All),
            Caller::Member(Peer { role: Role::Node, name, .. }) => {
                Ok(if self.controller.manages_volumes(&name) {
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
            Caller::Local | Caller::Member(Peer { role: Role::Admin, .. }) => Ok(()),
            other => Err(denied(&other, "governing the cluster")),
        }
    }

    /// Who may open the admin socket, and nobody else.
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
            Caller::Member(peer) if peer.role == role && peer.name == name => Ok(()),
            other => {
                let shown: String = name.chars().take(80).collect();
                Err(denied(&other, &format!("acting as {role} {shown:?}")))
            }
        }
    }

    pub(super) fn newcomer<T>(&self, request: &Request<T>) -> Result<(), Error> {
        match self.caller(request)? {
            Caller::Newcomer => Ok(()),
            other => Err(denied(&other, "joining")),
        }
    }

    pub(super) fn member<T>(&self, request: &Request<T>) -> Result<Peer, Error> {
        match self.caller(request)? {
            Caller::Member(peer) => Ok(peer),
            other => Err(denied(&other, "renewing")),
        }
    }
}

impl Scope {
    pub(super) fn sees(&self, volume: &VolumeRecord) -> bool {
        match self {
            Scope::All => true,
            Scope::Node(name) => volume.attachments.iter().any(|a| a.node == *name),
        }
    }

    /// One that is out of sight does not exist.
    pub(super) fn check(&self, volume: &VolumeRecord) -> Result<(), Error> {
        match self.sees(volume) {
            true => Ok(()),
            false => Err(Error::missing("volume", volume.id.0.to_string())),
        }
    }
}
