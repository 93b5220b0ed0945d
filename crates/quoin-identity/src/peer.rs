//! Roles, names, and the form in which a certificate names its holder.

use std::fmt;
use std::str::FromStr;

use rustls_pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

use crate::Error;

/// A cluster, chosen at random when its authority is made.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClusterId(pub u128);

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for ClusterId {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        if text.len() != 32 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(Error::certificate(format!(
                "{text:?} is not a cluster id (32 hex digits)"
            )));
        }
        u128::from_str_radix(text, 16).map(Self).map_err(Error::certificate)
    }
}

/// Role of a process in its cluster, which decides its rights.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// Holds the records, grants epochs, issues certificates.
    Controller,
    /// Holds replicas.
    Pool,
    /// Uses volumes: its target, its attach process and its CSI sockets share one identity.
    Node,
    /// A user or automation on another host.
    Admin,
    /// Copies volumes to and from another cluster.
    Mirror,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Controller => "controller",
            Role::Pool => "pool",
            Role::Node => "node",
            Role::Admin => "admin",
            Role::Mirror => "mirror",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "controller" => Ok(Role::Controller),
            "pool" => Ok(Role::Pool),
            "node" => Ok(Role::Node),
            "admin" => Ok(Role::Admin),
            "mirror" => Ok(Role::Mirror),
            other => Err(Error::Role(other.to_owned())),
        }
    }
}

/// Longest name of a pool or node, in bytes: that of a host name, which nodes usually have.
const NAME_BYTES_MAX: usize = 253;

/// Checks the name of a pool, node or other holder of a certificate.
pub fn check_name(what: &'static str, name: &str) -> Result<(), Error> {
    let bytes = name.as_bytes();
    let rule = if bytes.is_empty() || bytes.len() > NAME_BYTES_MAX {
        "it must have 1 to 253 characters"
    } else if !bytes.iter().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.')) {
        "only lower-case letters, digits, '-' and '.' are allowed"
    } else if !bytes[0].is_ascii_alphanumeric() || !bytes[bytes.len() - 1].is_ascii_alphanumeric() {
        "it must begin and end with a letter or a digit"
    } else {
        return Ok(());
    };
    // Input from the network is quoted in part only: an error must not be a megabyte.
    let name = name.chars().take(80).collect();
    Err(Error::Name { what, name, rule })
}

/// The holder of a certificate.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Peer {
    pub cluster: ClusterId,
    pub role: Role,
    pub name: String,
}

impl Peer {
    /// Returns the peer after a check of its name.
    pub fn new(cluster: ClusterId, role: Role, name: &str) -> Result<Self, Error> {
        check_name(role.as_str(), name)?;
        Ok(Self { cluster, role, name: name.to_owned() })
    }

    /// Returns the name in the certificate: `quoin://<cluster>/<role>/<name>`.
    pub fn uri(&self) -> String {
        format!("quoin://{}/{}/{}", self.cluster, self.role, self.name)
    }

    fn from_uri(uri: &str) -> Option<Result<Self, Error>> {
        let mut parts = uri.strip_prefix("quoin://")?.splitn(3, '/');
        let (cluster, role, name) = (parts.next()?, parts.next()?, parts.next()?);
        Some(cluster.parse().and_then(|cluster| Peer::new(cluster, role.parse()?, name)))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

/// Reads the holder that a certificate names. The name proves nothing by itself: the chain must
/// have been verified, as every TLS configuration of [`crate::Identity`] does.
pub fn peer_of(certificate: &CertificateDer<'_>) -> Result<Peer, Error> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(Error::certificate)?;
    let names = parsed
        .subject_alternative_name()
        .map_err(Error::certificate)?
        .ok_or_else(|| Error::certificate("it has no subject alternative name"))?;
    let mut peers = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Peer::from_uri(uri),
        _ => None,
    });
    match (peers.next(), peers.next()) {
        (Some(peer), None) => peer,
        (None, _) => Err(Error::certificate("it names no role of a cluster")),
        // With two names the reader would choose which one is meant.
        (Some(_), Some(_)) => Err(Error::certificate("it names more than one holder")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_uri_is_parsed_to_the_peer_it_was_made_from() {
        let peer = Peer::new(ClusterId(7), Role::Pool, "pool-1.rack-2").unwrap();
        assert_eq!(Peer::from_uri(&peer.uri()).unwrap().unwrap(), peer);
    }

    #[test]
    fn every_role_is_parsed_from_its_text_and_the_error_lists_them_all() {
        let roles = [Role::Controller, Role::Pool, Role::Node, Role::Admin, Role::Mirror];
        let error = "wizard".parse::<Role>().unwrap_err().to_string();
        for role in roles {
            assert_eq!(role.as_str().parse::<Role>().unwrap(), role);
            assert!(error.contains(role.as_str()), "{error}");
        }
    }

    #[test]
    fn ambiguous_names_are_refused_with_the_rule() {
        for bad in ["", "-a", "a-", "a/b", "A", "a b", "ä", "a\0", &"a".repeat(254)] {
            let error = check_name("pool", bad).unwrap_err().to_string();
            assert!(error.contains("is not a name for a pool"), "{error}");
        }
        for good in ["a", "1", "a.b-c", &"a".repeat(253)] {
            check_name("pool", good).unwrap();
        }
    }

    #[test]
    fn a_foreign_uri_is_not_a_holder() {
        for uri in ["spiffe://x/pool/a", "quoin://", "quoin://00/pool/a", "https://quoin/pool/a"] {
            assert!(Peer::from_uri(uri).is_none_or(|peer| peer.is_err()), "{uri}");
        }
        let id = ClusterId(1);
        for tail in ["root/a", "pool/", "pool/a/b", "pool/A", "/a"] {
            assert!(Peer::from_uri(&format!("quoin://{id}/{tail}")).is_none_or(|p| p.is_err()));
        }
    }

    proptest! {
        #[test]
        fn no_certificate_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = peer_of(&CertificateDer::from(bytes));
        }

        #[test]
        fn no_uri_text_makes_it_panic(text in ".*") {
            let _ = Peer::from_uri(&format!("quoin://{text}"));
        }
    }
}
