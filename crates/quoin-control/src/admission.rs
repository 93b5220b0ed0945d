//! Which certificates still speak for a member.
//!
//! A certificate proves a role, a name and a key, for as long as it lives. The record of the member
//! says which key the name belongs to now. A certificate of another key is worth as much as none: its
//! holder was removed, or replaced by a token for this very name, and stays so when the name is used
//! again.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use quoin_identity::{Member, Role};

use crate::Error;
use crate::changes::Concerned;
use crate::controller::Controller;
use crate::events::{Object, Severity};
use crate::records::MemberOfCluster;
use crate::time::now_ms;

/// When the authority was replaced with no time for its members to come over.
#[derive(Default)]
pub(crate) struct Replaced(Mutex<Option<Instant>>);

impl Replaced {
    fn now(&self) {
        *self.0.lock().expect("no holder of this lock panics") = Some(Instant::now());
    }

    /// A connection that began before was verified by the former authority.
    fn is_after(&self, connected: Instant) -> bool {
        self.0.lock().expect("no holder of this lock panics").is_some_and(|at| connected <= at)
    }
}

/// Standing of a member's certificate by its record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Worth {
    /// It is the member's.
    Good,
    /// The record does not know the key yet, or awaits this one.
    News,
    Removed,
    /// The name belongs to another key.
    OtherKey,
}

fn worth(record: Option<&MemberOfCluster>, key_hash: &str) -> Worth {
    match record {
        // Joined after the backup that the records were restored from.
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

impl Controller {
    /// Whether the holder of a valid certificate is a member. A key that its record does not know
    /// yet is remembered.
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
        if self.members.get(&name).is_none() && self.members.create(first).await?.is_ok() {
            return Ok(());
        }
        let learn = |record: &mut MemberOfCluster| {
            if worth(Some(record), &member.key_hash) == Worth::News {
                record.key_hash.clone_from(&member.key_hash);
                record.next_key_hash.clear();
            }
            Ok(())
        };
        self.members.update(&name, learn).await?;
        self.check_member(member)
    }

    /// As [`Self::admit`], with nothing learned.
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
        let record = self.members.get(&name_of(peer.role, &peer.name));
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

    /// Remembers the key that a member's certificate is renewed for.
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
        self.members.update(&name_of(member.peer.role, &member.peer.name), expect).await?;
        self.check_member(member)
    }

    /// Ends what the former authority signed, also on connections that stand.
    pub(crate) fn authority_was_replaced(&self) {
        self.replaced.now();
        self.announce(&Concerned::Everybody);
    }

    /// Remembered rather than forgotten: a member that the records do not know may have joined
    /// after the backup that they were restored from.
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
        if self.members.create(record).await?.is_ok() {
            return Ok(());
        }
        let remove = |record: &mut MemberOfCluster| {
            (record.removed, record.manages_volumes) = (true, false);
            Ok(())
        };
        self.members.update(&name_of(role, name), remove).await.map(drop)
    }

    /// Whether this node may manage volumes that are not attached to it.
    pub(crate) fn manages_volumes(&self, node: &str) -> bool {
        let member = self.members.get(&name_of(Role::Node, node));
        member.is_some_and(|member| member.manages_volumes && !member.removed)
    }

    /// The admins that have joined and were not removed.
    pub fn admins(&self) -> Vec<Arc<MemberOfCluster>> {
        let mut members = self.members.list();
        members.retain(|member| member.role == Role::Admin.as_str() && !member.removed);
        members
    }

    /// Takes its certificate's worth from an admin.
    pub async fn remove_admin(&self, name: &str) -> Result<(), Error> {
        if !self.admins().iter().any(|admin| admin.holder == name) {
            let shown: String = name.chars().take(160).collect();
            return Err(Error::missing("admin", shown));
        }
        self.expel(Role::Admin, name).await?;
        let about = Object::new("admin", name, name);
        self.events.record(Severity::Normal, about, "AdminRemoved", "it is no member any more");
        self.announce(&Concerned::Everybody);
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
