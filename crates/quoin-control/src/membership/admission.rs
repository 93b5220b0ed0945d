//! Admission: whether a certificate still belongs to a member.
//!
//! A certificate proves a role, a name and a key while it is valid. The member's record says which
//! key the name belongs to now. A certificate with another key is refused: its holder was removed,
//! or was replaced through a token for the same name. It stays refused when the name is used again.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use quoin_cluster::records::{Concerned, MemberOfCluster, TokenRecord};
use quoin_identity::{Member, Role};

use crate::Error;
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::now_ms;

/// Time at which the authority was replaced without a transition time for its members.
#[derive(Default)]
pub(crate) struct Replaced(Mutex<Option<Instant>>);

impl Replaced {
    fn now(&self) {
        *self.0.lock().expect("no holder of this lock panics") = Some(Instant::now());
    }

    /// Returns true if a connection began before the replacement: the former authority verified it.
    fn is_after(&self, connected: Instant) -> bool {
        self.0.lock().expect("no holder of this lock panics").is_some_and(|at| connected <= at)
    }
}

/// State of a member's certificate according to the member's record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Worth {
    /// The key is the member's.
    Good,
    /// No record or key exists yet, or the record names this key as the next one.
    News,
    Removed,
    /// The name belongs to another key.
    OtherKey,
}

fn worth(record: Option<&MemberOfCluster>, key_hash: &str) -> Worth {
    match record {
        // The member joined after the backup from which the records were restored.
        None => Worth::News,
        Some(record) if record.removed => Worth::Removed,
        Some(record) if record.key_hash == key_hash => Worth::Good,
        Some(record) if record.key_hash.is_empty() => Worth::News,
        Some(record) if record.next_key_hash == key_hash => Worth::News,
        Some(_) => Worth::OtherKey,
    }
}

fn name_of(role: Role, holder: &str) -> String {
    format!("{role}/{holder}")
}

/// Members, by their keys.
pub struct Admission {
    state: Arc<State>,
    replaced: Replaced,
}

impl Admission {
    pub(crate) fn new(state: Arc<State>) -> Self {
        Self { state, replaced: Replaced::default() }
    }

    /// Checks that the holder of a valid certificate is a member. Stores a key that the member's
    /// record does not contain yet.
    pub(crate) async fn admit(&self, member: &Member) -> Result<(), Error> {
        let peer = &member.peer;
        let name = name_of(peer.role, &peer.name);
        if self.worth_of(member)? == Worth::Good {
            return Ok(());
        }
        let first = MemberOfCluster {
            role: peer.role.to_string(),
            holder: peer.name.clone(),
            key_hash: member.key_hash.clone(),
            next_key_hash: String::new(),
            joined_ms: now_ms(),
            removed: false,
            manages_volumes: false,
        };
        if self.state.joined.members.get(&name).is_none()
            && self.state.joined.members.create(first).await?.is_ok()
        {
            return Ok(());
        }
        let learn = |record: &mut MemberOfCluster| {
            if worth(Some(record), &member.key_hash) == Worth::News {
                record.key_hash.clone_from(&member.key_hash);
                record.next_key_hash.clear();
            }
            Ok(())
        };
        self.state.joined.members.update(&name, learn).await?;
        self.check_member(member)
    }

    /// Checks like [`Self::admit`], and stores nothing.
    pub(crate) fn check_member(&self, member: &Member) -> Result<(), Error> {
        self.worth_of(member).map(drop)
    }

    fn worth_of(&self, member: &Member) -> Result<Worth, Error> {
        let peer = &member.peer;
        if self.replaced.is_after(member.connected) {
            return Err(Error::Denied(format!(
                "the certificate of {peer} is of an authority that was replaced: it joins with a new \
                 token"
            )));
        }
        let record = self.state.joined.members.get(&name_of(peer.role, &peer.name));
        match worth(record.as_deref(), &member.key_hash) {
            Worth::Removed => Err(Error::Removed(format!(
                "{peer} was removed from the cluster: to come back, it joins with a new token and an \
                 empty --state directory"
            ))),
            Worth::OtherKey => Err(Error::Denied(format!(
                "{peer} is known by another key than this certificate's: to be it again, it joins \
                 with a token for this very name (`quoin token create --role {} --name {}`)",
                peer.role, peer.name
            ))),
            worth => Ok(worth),
        }
    }

    /// Stores the key for which a member's certificate is renewed.
    pub(crate) async fn expect_key(&self, member: &Member, key_hash: &str) -> Result<(), Error> {
        if member.key_hash == key_hash {
            return Ok(());
        }
        let expect = |record: &mut MemberOfCluster| {
            if worth(Some(record), &member.key_hash) == Worth::Good {
                record.next_key_hash = key_hash.to_owned();
            }
            Ok(())
        };
        self.state
            .joined
            .members
            .update(&name_of(member.peer.role, &member.peer.name), expect)
            .await?;
        self.check_member(member)
    }

    /// Ends all certificates of the former authority, also on open connections.
    pub(crate) fn authority_was_replaced(&self) {
        self.replaced.now();
        self.state.announce(&Concerned::Everybody);
    }

    /// Marks a member as removed. The record is kept, because a member without one is admitted: it
    /// may have joined after the backup from which the records were restored. The tokens that it used
    /// end with it.
    pub(crate) async fn expel(&self, role: Role, name: &str) -> Result<(), Error> {
        let record = MemberOfCluster {
            role: role.to_string(),
            holder: name.to_owned(),
            key_hash: String::new(),
            next_key_hash: String::new(),
            joined_ms: now_ms(),
            removed: true,
            manages_volumes: false,
        };
        let member = name_of(role, name);
        if self.state.joined.members.create(record).await?.is_err() {
            let remove = |record: &mut MemberOfCluster| {
                (record.removed, record.manages_volumes) = (true, false);
                Ok(())
            };
            self.state.joined.members.update(&member, remove).await?;
        }
        let used = |token: &TokenRecord| token.used_by.as_ref().is_some_and(|by| by.0 == member);
        for token in self.state.joined.tokens.list().iter().filter(|token| used(token)) {
            self.state.joined.tokens.remove(&token.secret_hash, |found| used(found)).await?;
        }
        Ok(())
    }

    /// Returns true if this node may manage volumes that are not attached to it.
    pub(crate) fn manages_volumes(&self, node: &str) -> bool {
        let member = self.state.joined.members.get(&name_of(Role::Node, node));
        member.is_some_and(|member| member.manages_volumes && !member.removed)
    }

    /// Admins that have joined and were not removed.
    pub fn admins(&self) -> Vec<Arc<MemberOfCluster>> {
        let mut members = self.state.joined.members.list();
        members.retain(|member| member.role == Role::Admin.as_str() && !member.removed);
        members
    }

    /// Removes an admin: its certificate is refused from now on.
    pub async fn remove_admin(&self, name: &str) -> Result<(), Error> {
        if !self.admins().iter().any(|admin| admin.holder == name) {
            let shown: String = name.chars().take(160).collect();
            return Err(Error::missing("admin", shown));
        }
        self.expel(Role::Admin, name).await?;
        let about = Object::new("admin", name, name);
        self.state.events.record(
            Severity::Normal,
            about,
            "AdminRemoved",
            "it is no member any more",
        );
        self.state.announce(&Concerned::Everybody);
        Ok(())
    }

    /// Lets a node manage volumes, or no more; it counts from its next call on.
    pub async fn set_node(&self, name: &str, manages_volumes: bool) -> Result<(), Error> {
        let set = |record: &mut MemberOfCluster| {
            if record.removed {
                return Err(Error::missing("node", name));
            }
            record.manages_volumes = manages_volumes;
            Ok(())
        };
        let member = format!("{}/{name}", Role::Node);
        self.state
            .joined
            .members
            .update(&member, set)
            .await?
            .ok_or_else(|| Error::missing("node", name))?;
        let message = match manages_volumes {
            true => "it may create, delete and publish volumes",
            false => "it sees the volumes that are attached to it, and no others",
        };
        let about = Object::new("node", name, name);
        self.state.events.record(Severity::Normal, about, "NodeSet", message);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key_hash: &str, next_key_hash: &str, removed: bool) -> MemberOfCluster {
        MemberOfCluster {
            role: "node".into(),
            holder: "n1".into(),
            key_hash: key_hash.into(),
            next_key_hash: next_key_hash.into(),
            joined_ms: 1,
            removed,
            manages_volumes: false,
        }
    }

    #[test]
    fn a_certificate_is_worth_what_the_record_of_its_key_says() {
        let table = [
            (None, Worth::News),
            (Some(record("a", "", false)), Worth::Good),
            (Some(record("b", "", false)), Worth::OtherKey),
            (Some(record("b", "a", false)), Worth::News),
            (Some(record("a", "b", false)), Worth::Good),
            (Some(record("", "", false)), Worth::News),
            (Some(record("a", "", true)), Worth::Removed),
            (Some(record("", "", true)), Worth::Removed),
            (Some(record("b", "a", true)), Worth::Removed),
        ];
        for (record, expected) in table {
            assert_eq!(worth(record.as_ref(), "a"), expected, "{record:?}");
        }
    }
}
