//! Conversion of control plane messages into the core's types, with checks, for several roles.
//!
//! Errors are sentences for an operator: they name the field and its value.

use quoin_api::control;
use quoin_types::{Member, Membership};

/// Parses an id as the control plane writes it: 32 hex digits. `what` names it in the error.
pub fn id<T: std::str::FromStr>(what: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{what} {text:?} is not 32 hex digits"))
}

/// Parses a volume's membership.
pub fn membership(message: &control::Membership) -> Result<Membership, String> {
    let small =
        |what: &str, n: u32| u8::try_from(n).map_err(|_| format!("{what} {n} is too large"));
    let members = message
        .known
        .iter()
        .map(|m| Ok(Member { id: id("replica", &m.replica_id)?, guid: id("guid", &m.guid)? }));
    let membership = Membership {
        version: message.version,
        rf: small("rf", message.rf)?,
        cf: small("cf", message.cf)?,
        drf: small("drf", message.drf)?,
        known: members.collect::<Result<_, String>>()?,
        retired: message.retired.iter().map(|g| id("guid", g)).collect::<Result<_, String>>()?,
        formed: message.formed,
    };
    membership.check().map_err(str::to_owned)?;
    Ok(membership)
}

/// Returns the messages for a volume's members.
pub fn member_messages(known: &[Member]) -> Vec<control::Member> {
    let member =
        |m: &Member| control::Member { replica_id: m.id.to_string(), guid: m.guid.to_string() };
    known.iter().map(member).collect()
}

/// Returns the message of a membership; [`membership`] reads it.
pub fn membership_message(membership: &Membership) -> control::Membership {
    control::Membership {
        version: membership.version,
        rf: membership.rf.into(),
        cf: membership.cf.into(),
        drf: membership.drf.into(),
        known: member_messages(&membership.known),
        retired: membership.retired.iter().map(ToString::to_string).collect(),
        formed: membership.formed,
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::{ReplicaGuid, ReplicaId};

    use super::*;

    fn message() -> control::Membership {
        control::Membership {
            version: 3,
            rf: 1,
            cf: 1,
            drf: 1,
            known: vec![control::Member {
                replica_id: ReplicaId(2).to_string(),
                guid: ReplicaGuid(3).to_string(),
            }],
            retired: vec![ReplicaGuid(9).to_string()],
            formed: true,
        }
    }

    #[test]
    fn a_membership_survives_its_message_form() {
        let read = membership(&message()).unwrap();
        assert_eq!((read.version, read.rf, read.cf, read.drf, read.formed), (3, 1, 1, 1, true));
        assert_eq!(read.known, [Member { id: ReplicaId(2), guid: ReplicaGuid(3) }]);
        assert_eq!(read.retired, [ReplicaGuid(9)]);
    }

    #[test]
    fn a_membership_that_breaks_a_rule_is_refused_by_name() {
        let large = control::Membership { rf: 300, ..message() };
        assert!(membership(&large).unwrap_err().contains("rf 300"));
        let odd = control::Membership { retired: vec!["xyz".into()], ..message() };
        assert!(membership(&odd).unwrap_err().contains("xyz"));
        let empty = control::Membership { rf: 0, ..message() };
        assert!(membership(&empty).is_err());
    }
}
