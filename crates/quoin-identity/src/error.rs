//! Errors of identities: the thing, the rule, the way out.

use std::path::PathBuf;

use quoin_types::Term;

use crate::{ClusterId, Role, clock};

/// An identity, a certificate, a token or a secured connection that violates a rule.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },

    #[error(
        "{dir} holds no identity: join the cluster first with a token \
         (`quoin token create`), then give it with --join"
    )]
    NotJoined { dir: PathBuf },

    #[error(
        "the certificate in {dir} has run out, so members refuse {role} {name}: make a token \
         with `quoin token create --role {role} --name {name}` and give it with --join"
    )]
    RunOut { dir: PathBuf, role: Role, name: String },

    #[error("{dir} already holds an identity ({holder}); remove the directory to join anew")]
    AlreadyJoined { dir: PathBuf, holder: String },

    #[error("{dir} already holds a cluster's authority; it is never overwritten")]
    AuthorityExists { dir: PathBuf },

    #[error("{path} is damaged: {reason}")]
    Damaged { path: PathBuf, reason: String },

    #[error("certificate refused: {0}")]
    Certificate(String),

    #[error("{name:?} is not a name for a {what}: {rule}")]
    Name { what: &'static str, name: String, rule: &'static str },

    #[error("{0:?} is not a role; roles are controller, pool, node, admin and mirror")]
    Role(String),

    #[error(
        "this is not a join token ({0}): copy the whole text, as `quoin token create` printed it, \
         or make another one"
    )]
    Token(&'static str),

    #[error("this is not what the controller says of its cluster's authority ({0})")]
    Pin(&'static str),

    #[error(
        "this is not a pair token ({0}): copy the whole text, as `quoin mirror invite` printed it, \
         or make another one"
    )]
    PairToken(&'static str),

    #[error(
        "a pair token has 1 to {addresses_max} addresses, each host:port in at most {bytes_max} bytes: \
         {reason}"
    )]
    PairAddresses { addresses_max: usize, bytes_max: usize, reason: String },

    #[error("cluster {cluster} is not trusted so: {reason}")]
    Trust { cluster: ClusterId, reason: String },

    #[error("no connection with the mirror at {address}: {reason}")]
    Mirror { address: String, reason: String },

    #[error("epoch grant refused: {0}")]
    Grant(String),

    #[error(
        "the controller is of term {term}, and {}: {}",
        if *rival { "another one began the same term".into() } else { format!("term {known} has begun") },
        if *rival { "end one of them, and run `quoin controller recover` at the other" }
        else { "its records were recovered elsewhere; its orders are not carried out" }
    )]
    Term { term: Term, known: Term, rival: bool },

    #[error(
        "the authority is already being rotated; the former one is trusted for {0} s more, \
         until every certificate that it signed has run out"
    )]
    RotationUnderWay(u64),

    #[error("{address} is not an address of the form host:port")]
    Address { address: String },

    #[error(
        "no controller is reached at {address} ({reason}): start it (`quoin controller run \
         --listen`), or correct the address"
    )]
    Unreachable { address: String, reason: String },

    #[error("the controller at {address} is not spoken to: {reason}")]
    Clock { address: String, reason: String },

    #[error("the controller refused: {0}")]
    Refused(String),

    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
}

/// Returns the first cause of an error: "transport error" alone is of no use.
pub(crate) fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// Says that a certificate is not valid by one of the two clocks, where that is among the causes.
pub(crate) fn wrong_time(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        // An I/O error shows the source of what it has within, and not that itself.
        let within = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let tls = match within {
            Some(within) => within.downcast_ref::<rustls::Error>(),
            None => error.downcast_ref::<rustls::Error>(),
        };
        if let Some(text) = tls.and_then(clock::wrong_time) {
            return Some(text);
        }
        cause = error.source();
    }
    None
}

impl Error {
    pub(crate) fn certificate(reason: impl std::fmt::Display) -> Self {
        Self::Certificate(reason.to_string())
    }

    pub(crate) fn unreachable(address: &str, error: &tonic::transport::Error) -> Self {
        let address = address.to_owned();
        match wrong_time(error) {
            Some(reason) => Self::Clock { address, reason },
            None => Self::Unreachable { address, reason: root(error) },
        }
    }
}
