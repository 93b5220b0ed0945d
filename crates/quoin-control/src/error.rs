//! What the control plane refuses or fails at, and the one place where that becomes a gRPC code.

use std::path::PathBuf;

use quoin_types::Term;
use tonic::{Code, Status};

use crate::store::StoreError;

/// Each message names the thing, the rule and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of a request breaks its rule.
    #[error("{field}: {rule}")]
    Invalid { field: &'static str, rule: String },

    #[error("{what} {name:?} does not exist{}", shown_by(what))]
    NotFound { what: &'static str, name: String },

    /// The name is taken by something that differs.
    #[error("{what} {name:?} exists already with other {difference}")]
    Exists { what: &'static str, name: String, difference: String },

    /// A volume of this name was asked for with other parameters than it has.
    #[error(
        "volume {name:?} exists already and differs: {difference}; choose another name, ask for what \
         it has, or change it (`quoin volume resize`, `quoin volume scale`, `quoin apply`)"
    )]
    Differs { name: String, difference: String },

    /// The state forbids it until somebody does something.
    #[error("{0}")]
    Precondition(String),

    #[error("{0}")]
    OutOfRange(String),

    /// No room, or too few hosts or pools.
    #[error("{0}")]
    Exhausted(String),

    /// It will pass by itself; ask again.
    #[error("{0}")]
    Busy(String),

    #[error("{0}")]
    Aborted(String),

    #[error("{0}")]
    Denied(String),

    /// The caller was a member once and is to end.
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
        "{0} holds no authority, so nobody would believe a controller made there; put authority.json \
         of the former one there, or restore a backup (`quoin controller restore`)"
    )]
    NoAuthority(PathBuf),

    #[error(
        "this controller is of term {term}, and term {by} has begun: the cluster's records were \
         recovered elsewhere, and what this one says is refused. Remove its directory; or, where it \
         is to rule again, end the other one and run `quoin controller recover --state` with this \
         directory"
    )]
    Superseded { term: Term, by: Term },

    #[error("gRPC server: {0}")]
    Serve(#[from] tonic::transport::Error),
}

/// Where a person finds the names that there are.
fn shown_by(what: &str) -> &'static str {
    match what {
        "volume" => ": `quoin volume list` shows those that do",
        "pool" => ": `quoin pool list` shows those that do",
        "node" => ": `quoin node list` shows those that do",
        "admin" => ": `quoin admin list` shows those that do",
        "replica" | "known replica" => ": `quoin replica list` shows those that do",
        "join token" => ": `quoin token list` shows those that do",
        _ => "",
    }
}

impl Error {
    pub(crate) fn invalid(field: &'static str, rule: impl Into<String>) -> Self {
        Self::Invalid { field, rule: rule.into() }
    }

    pub(crate) fn missing(what: &'static str, name: impl Into<String>) -> Self {
        Self::NotFound { what, name: name.into() }
    }

    /// The gRPC code of this error; decided here and nowhere else.
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NotFound { .. } => Code::NotFound,
            Self::Exists { .. } | Self::Differs { .. } => Code::AlreadyExists,
            Self::Precondition(_) => Code::FailedPrecondition,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::Exhausted(_) => Code::ResourceExhausted,
            // The controller that took its place answers.
            Self::Busy(_) | Self::Superseded { .. } => Code::Unavailable,
            Self::Aborted(_) => Code::Aborted,
            Self::Denied(_) | Self::Removed(_) => Code::PermissionDenied,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::Identity(error) => match error {
                quoin_identity::Error::RotationUnderWay(_) => Code::FailedPrecondition,
                quoin_identity::Error::Name { .. }
                | quoin_identity::Error::Role(_)
                | quoin_identity::Error::Token(_)
                | quoin_identity::Error::Certificate(_) => Code::InvalidArgument,
                _ => Code::Internal,
            },
            // The records are untouched or the outcome is unknown; asking again is right.
            Self::Store(_) => Code::Unavailable,
            Self::File { .. }
            | Self::Listen { .. }
            | Self::SocketServed(_)
            | Self::NotInitialised(_)
            | Self::AlreadyInitialised(_)
            | Self::NoAuthority(_)
            | Self::Foreign { .. }
            | Self::Serve(_) => Code::Internal,
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
