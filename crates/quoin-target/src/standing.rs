//! Standing of those who come by TLS: whose keys count, and what each may open.
//!
//! A certificate proves a role, a name and a key. Whether the name still belongs to that key, only the
//! records say: its holder may have been removed, or another one may have joined under the name. So
//! the controller sends this target the keys that count, and a holder with another key is refused,
//! also one who is connected when that changes.

use std::collections::HashSet;
use std::sync::Arc;

use quoin_api::control::MemberKeys;
use quoin_identity::{Role, key_hash_of, peer_of};
use rustls::pki_types::CertificateDer;

/// Holder of a certificate that TLS has proven.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Holder {
    pub role: Role,
    pub name: String,
    pub key_hash: String,
}

impl Holder {
    /// Returns the holder of a certificate.
    ///
    /// # Errors
    /// It names no member.
    pub fn of(leaf: &CertificateDer<'_>) -> Result<Self, quoin_identity::Error> {
        let peer = peer_of(leaf)?;
        Ok(Self { role: peer.role, name: peer.name, key_hash: key_hash_of(leaf)? })
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.role, self.name)
    }
}

/// Members that may open all that this target serves, by their keys: the admins, and the node itself.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Openers(Arc<HashSet<Holder>>);

impl Openers {
    /// Reads the controller's list.
    pub fn of(members: &[MemberKeys]) -> Self {
        let mut openers = HashSet::new();
        for member in members {
            let Ok(role) = member.role.parse::<Role>() else { continue };
            let holder = |key_hash: &String| Holder {
                role,
                name: member.name.clone(),
                key_hash: key_hash.clone(),
            };
            openers.extend(member.key_hashes.iter().map(holder));
        }
        Self(Arc::new(openers))
    }

    pub fn admit(&self, holder: &Holder) -> bool {
        self.0.contains(holder)
    }
}

/// Clients that a port lets in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Port {
    /// Openers of all volumes, and nodes that share one, for that one.
    All,
    /// Nodes that share a volume, for that one.
    Sharers,
}

/// Proven rights of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    Unknown,
    /// It may open every volume; `None`: it came by a port without TLS.
    Opener(Option<Holder>),
    /// Another node, which may open what it shares, if its key counts there.
    Sharer(Holder),
    Forbidden(String),
}

impl Standing {
    /// Decides the rights of a holder. The volumes that this target serves are attached to `node`, so
    /// they are its own and an admin's, and those of other nodes that share them.
    pub fn of(holder: Holder, node: &str, port: Port, openers: &Openers) -> Self {
        let opens = holder.role == Role::Admin || holder.role == Role::Node && holder.name == node;
        if !opens && holder.role == Role::Node {
            return Self::Sharer(holder);
        }
        Self::Forbidden(match (opens, port) {
            (false, _) => format!(
                "{holder} may not use the volumes of node {node}: only that node, nodes that share \
                 them and admins may"
            ),
            (true, Port::Sharers) => format!(
                "{holder} may not use the volumes of node {node} by this port, which is for nodes \
                 that share them: start the node's target with --nbd-listen to use them over TCP"
            ),
            (true, Port::All) if openers.admit(&holder) => return Self::Opener(Some(holder)),
            (true, Port::All) => format!("{}, as far as node {node} knows", disowned(&holder)),
        })
    }
}

/// Says that a holder's key counts no more.
pub fn disowned(holder: &Holder) -> String {
    format!(
        "{holder} is no member by the key of this certificate: it was removed, or has joined again \
         with another key"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(role: Role, name: &str, key: &str) -> Holder {
        Holder { role, name: name.into(), key_hash: key.into() }
    }

    fn keys(role: &str, name: &str, keys: &[&str]) -> MemberKeys {
        let key_hashes = keys.iter().map(|key| (*key).to_owned()).collect();
        MemberKeys { role: role.into(), name: name.into(), key_hashes }
    }

    /// One row for each standing, at each port: what it may open.
    #[test]
    fn only_the_node_itself_admins_and_nodes_that_share_them_may_use_its_volumes_by_keys_that_count()
     {
        const OPENS: &str = "all";
        const SHARES: &str = "what it shares";
        const PORT: &str = "by this port";
        const KEY: &str = "no member by the key";
        const ROLE: &str = "only that node";
        let told = Openers::of(&[
            keys("admin", "ops", &["a", "next"]),
            keys("node", "n1", &["n"]),
            keys("wizard", "merlin", &["w"]),
        ]);
        let nobody = Openers::default();
        for (role, name, key, openers, by_all, by_shares) in [
            (Role::Admin, "ops", "a", &told, OPENS, PORT),
            (Role::Admin, "ops", "next", &told, OPENS, PORT),
            (Role::Admin, "ops", "former", &told, KEY, PORT),
            (Role::Admin, "removed", "r", &told, KEY, PORT),
            (Role::Admin, "n1", "n", &told, KEY, PORT),
            (Role::Node, "n1", "n", &told, OPENS, PORT),
            (Role::Node, "n1", "former", &told, KEY, PORT),
            (Role::Node, "n2", "m", &told, SHARES, SHARES),
            (Role::Pool, "n1", "n", &told, ROLE, ROLE),
            (Role::Controller, "n1", "n", &told, ROLE, ROLE),
            (Role::Mirror, "n1", "n", &told, ROLE, ROLE),
            // Before the controller has sent the list.
            (Role::Admin, "ops", "a", &nobody, KEY, PORT),
            (Role::Node, "n1", "n", &nobody, KEY, PORT),
        ] {
            for (port, expected) in [(Port::All, by_all), (Port::Sharers, by_shares)] {
                let holder = holder(role, name, key);
                let got = match Standing::of(holder.clone(), "n1", port, openers) {
                    Standing::Opener(Some(opener)) if opener == holder => OPENS.to_owned(),
                    Standing::Sharer(sharer) if sharer == holder => SHARES.to_owned(),
                    Standing::Forbidden(why) => why,
                    other => panic!("{other:?}"),
                };
                assert!(got.contains(expected), "{holder:?} at {port:?}: {got}");
                assert!(
                    expected == OPENS || expected == SHARES || got.contains("node n1"),
                    "{got}"
                );
            }
        }
    }
}
