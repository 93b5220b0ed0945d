//! Errors of the control plane, and the only place where they become gRPC codes.

use std::path::PathBuf;

use quoin_cluster::Refusal;
use quoin_cluster::refusal::shown_by;
use quoin_identity::ClusterId;
use quoin_types::Term;
use tonic::{Code, Status};

use crate::state::store::StoreError;

/// Error of the control plane. Each message names the object, the rule and, if there is one, the
/// remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of a request breaks its rule.
    #[error("{field}: {rule}")]
    Invalid { field: &'static str, rule: String },

    #[error("{what} {name:?} does not exist{}", shown_by(what))]
    NotFound { what: &'static str, name: String },

    /// An object that differs has the name already.
    #[error("{what} {name:?} exists already with other {difference}")]
    Exists { what: &'static str, name: String, difference: String },

    /// A volume was requested with the name of one that has other parameters.
    #[error(
        "volume {name:?} exists already and differs: {difference}; choose another name, ask for what \
         it has, or change it (`quoin volume resize`, `quoin volume scale`, `quoin apply`)"
    )]
    Differs { name: String, difference: String },

    /// The state does not allow the request until a user changes it.
    #[error("{0}")]
    Precondition(String),

    #[error("{0}")]
    OutOfRange(String),

    /// No room, or too few hosts or pools.
    #[error("{0}")]
    Exhausted(String),

    /// The state will change by itself; the caller may try again.
    #[error("{0}")]
    Busy(String),

    #[error("{0}")]
    Aborted(String),

    /// Bytes have no good copy.
    #[error("{0}")]
    DataLoss(String),

    #[error("{0}")]
    Denied(String),

    /// The caller was a member once and has to stop.
    #[error("{0}")]
    Removed(String),

    #[error("{0}")]
    Unauthenticated(String),

    #[error(transparent)]
    Store(#[from] StoreError),

    #[error(transparent)]
    Identity(#[from] quoin_identity::Error),

    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },

    #[error(
        "address {address} cannot be used: {source}; stop what else serves it, or choose another \
         address"
    )]
    Listen { address: String, source: std::io::Error },

    #[error(
        "another controller serves the admin socket {0}: stop that one, or give this one a socket \
         of its own with --admin-socket"
    )]
    SocketServed(PathBuf),

    #[error("{0} holds no cluster; make one with `quoin controller init`")]
    NotInitialised(PathBuf),

    #[error("{path} holds other files ({entry}): choose an empty or a missing directory")]
    Foreign { path: PathBuf, entry: String },

    #[error("{0} holds a cluster already; it is never overwritten")]
    AlreadyInitialised(PathBuf),

    #[error(
        "{dir} holds the authority of cluster {own}, and the records are of cluster {found}: choose an \
         empty directory, or another --etcd-prefix or --kubernetes-cluster for a cluster of its own"
    )]
    OtherCluster { dir: PathBuf, own: ClusterId, found: ClusterId },

    #[error(
        "{0} holds no authority, so nobody would believe a controller made there; put authority.json \
         of the former one there, or restore a backup (`quoin controller restore`)"
    )]
    NoAuthority(PathBuf),

    #[error(
        "this controller is of term {term}, and term {by} has begun: the cluster's records were \
         recovered elsewhere, and what this one says is refused. Remove its directory; or, where it \
         is to rule again, end the other one and run `quoin controller recover --state` with this \
         directory, and with --store as `run` has it"
    )]
    Superseded { term: Term, by: Term },

    #[error(
        "the records of this cluster have moved to {to}, in term {term}, and this copy of them rules no more: \
         start the controller there (--store), or bring them back with `quoin controller move-store`"
    )]
    RecordsMoved { to: String, term: u64 },

    #[error(
        "the records here are not all there: they were being made from {from}, and that was cut short. Repeat \
         the same `quoin controller move-store` or `quoin controller restore`"
    )]
    RecordsUnfinished { from: String },

    #[error("gRPC server: {0}")]
    Serve(#[from] tonic::transport::Error),
}

impl Error {
    pub(crate) fn invalid(field: &'static str, rule: impl Into<String>) -> Self {
        Self::Invalid { field, rule: rule.into() }
    }

    pub(crate) fn missing(what: &'static str, name: impl Into<String>) -> Self {
        Self::NotFound { what, name: name.into() }
    }

    /// Returns the gRPC code of this error; only this function assigns codes.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NotFound { .. } => Code::NotFound,
            Self::Exists { .. } | Self::Differs { .. } => Code::AlreadyExists,
            Self::Precondition(_) => Code::FailedPrecondition,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::Exhausted(_) => Code::ResourceExhausted,
            // A superseded controller: the one that took its place answers.
            Self::Busy(_) | Self::Superseded { .. } => Code::Unavailable,
            Self::Aborted(_) => Code::Aborted,
            Self::DataLoss(_) => Code::DataLoss,
            Self::Denied(_) | Self::Removed(_) => Code::PermissionDenied,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::Identity(error) => match error {
                quoin_identity::Error::RotationUnderWay(_) => Code::FailedPrecondition,
                quoin_identity::Error::Name { .. }
                | quoin_identity::Error::Role(_)
                | quoin_identity::Error::Token(_)
                | quoin_identity::Error::PairToken(_)
                | quoin_identity::Error::PairAddresses { .. }
                | quoin_identity::Error::Trust { .. }
                | quoin_identity::Error::Certificate(_) => Code::InvalidArgument,
                _ => Code::Internal,
            },
            // The records are unchanged or the outcome is unknown; the caller should try again.
            Self::Store(_) => Code::Unavailable,
            Self::File { .. }
            | Self::Listen { .. }
            | Self::SocketServed(_)
            | Self::NotInitialised(_)
            | Self::AlreadyInitialised(_)
            | Self::NoAuthority(_)
            | Self::OtherCluster { .. }
            | Self::RecordsMoved { .. }
            | Self::RecordsUnfinished { .. }
            | Self::Foreign { .. }
            | Self::Serve(_) => Code::Internal,
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid { field, rule } => Self::Invalid { field, rule },
            Refusal::NotFound { what, name } => Self::NotFound { what, name },
            Refusal::Exists { what, name, difference } => Self::Exists { what, name, difference },
            Refusal::Precondition(why) => Self::Precondition(why),
            Refusal::Busy(why) => Self::Busy(why),
            Refusal::Aborted(why) => Self::Aborted(why),
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut status = Status::new(error.code(), error.to_string());
        if let Error::Removed(_) = error {
            quoin_identity::mark_removed(&mut status);
        }
        status
    }
}
