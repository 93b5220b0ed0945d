//! Every refusal of a call, with the code that the interface defines for it.
//!
//! Codes are chosen here and nowhere else. A status carries a message for users and neither details
//! nor a body: clients expect an error to be nothing but an error.

use std::time::Duration;

use tonic::{Code, Status};

/// Refuses an absent required field: 3.
pub fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is required and is empty"))
}

/// Refuses a value that is never valid: 3.
pub fn invalid(field: &str, why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{field} {why}"))
}

/// Refuses a capability that the volume does not offer, where the RPC's table has 3.
pub fn unsupported_capability(why: &str) -> Status {
    Status::invalid_argument(why)
}

/// Refuses a capability that the volume does not offer, where the RPC's table has 9 (stage,
/// publish).
pub fn exceeds_capabilities(why: &str) -> Status {
    Status::failed_precondition(why)
}

/// Refuses where a call that must come first did not, or a requirement of the plugin is missing: 9.
pub fn precondition(why: impl std::fmt::Display) -> Status {
    Status::failed_precondition(why.to_string())
}

/// Refuses the name of a volume that does not offer what is requested: 6.
pub fn exists_without(why: &str) -> Status {
    Status::already_exists(format!("a volume of that name exists and does not offer that: {why}"))
}

/// Refuses a path at which no volume of this node can be: 5.
pub fn not_at_path(volume_id: &str, why: &Status) -> Status {
    Status::not_found(format!("volume {volume_id:?} is not at that path: {}", why.message()))
}

/// Reports a fault of the plugin itself: 13.
pub fn internal(rpc: &str) -> Status {
    Status::internal(format!(
        "{rpc} failed because of an internal error; see the log of the plugin"
    ))
}

/// Refuses by 2 what has no row in the tables of CSI-Addons.
pub fn unclassified(status: Status) -> Status {
    match status.code() {
        Code::Internal | Code::DataLoss | Code::OutOfRange | Code::Cancelled => {
            Status::unknown(status.message())
        }
        _ => status,
    }
}

/// Reports a reclaim that goes on behind the call: 14.
pub fn still_reclaimed(volume_id: &str) -> Status {
    Status::unavailable(format!(
        "space of volume {volume_id} is being given back; that goes on, and a repeat of the call tells how it ended"
    ))
}

/// Reports a volume of which neither this node nor the controller says whether it exists: 14.
pub fn not_known(volume_id: &str, why: &str) -> Status {
    Status::unavailable(format!(
        "nothing of volume {volume_id} is on this node, and the controller does not say whether it exists: {why}"
    ))
}

/// Refuses where secrets are demanded and those sent do not authenticate: 16.
pub fn unauthenticated(why: impl Into<String>) -> Status {
    Status::unauthenticated(why)
}

/// Refuses a caller that is known and may not make the call: 7.
pub fn not_permitted(caller: &str, rpc: &str) -> Status {
    Status::permission_denied(format!("caller {caller:?} may not call {rpc}"))
}

/// Refuses an unknown volume: 5.
pub fn no_volume(volume_id: &str) -> Status {
    Status::not_found(format!("volume {volume_id:?} does not exist"))
}

/// Refuses to mount a file system while another node replays its journal: 14.
pub fn replays_elsewhere(volume_id: &str, node: &str) -> Status {
    Status::unavailable(format!(
        "node {node} is to replay the journal of volume {volume_id}; stage it there, or unpublish it \
         from there, and repeat this call"
    ))
}

/// Refuses to mount a file system on a node that was late with the replay of its journal: 9.
pub fn late_with_the_replay(volume_id: &str, node: &str) -> Status {
    precondition(format!(
        "node {node} has not replayed the journal of volume {volume_id} in time, and may not write it \
         any more; unpublish it from there and publish it again"
    ))
}

/// Refuses an unknown group of volumes: 5.
pub fn no_group(group_id: &str) -> Status {
    Status::not_found(format!("volume group {group_id:?} does not exist"))
}

/// Refuses where a source is not replicated: 9.
pub fn not_replicated(id: &str) -> Status {
    precondition(format!("{id:?} is not replicated: EnableVolumeReplication begins it"))
}

/// Refuses a volume whose group is replicated: 9.
pub fn replicated_with_group(volume_id: &str, group_id: &str) -> Status {
    precondition(format!(
        "volume {volume_id:?} is replicated with its volume group: name {group_id:?} as a volumegroup \
         source"
    ))
}

/// Refuses what only a primary tells: 9.
pub fn not_primary(id: &str, role: &str) -> Status {
    precondition(format!(
        "{id:?} is {role} here; the side that is primary tells of its replication"
    ))
}

/// Refuses to tell of a replication of which the other side has nothing yet: 5.
pub fn nothing_synced(id: &str, why: &str) -> Status {
    let why = if why.is_empty() { "the first copy is under way" } else { why };
    Status::not_found(format!("nothing of {id:?} is complete on the other side yet: {why}"))
}

/// Reports that the other side is not known to have a volume yet: 14.
pub fn no_destination_yet(id: &str) -> Status {
    Status::unavailable(format!(
        "the other side has not recorded its copy of {id:?} yet; ask again"
    ))
}

/// Converts the refusal of a replication to begin: a cluster that has as many as it may is a precondition, as the
/// peer's room is.
pub fn not_enabled(why: Status) -> Status {
    match why.code() {
        Code::ResourceExhausted => precondition(why.message()),
        _ => why,
    }
}

/// Refuses an unknown snapshot: 5.
pub fn no_snapshot(snapshot_id: &str) -> Status {
    Status::not_found(format!("snapshot {snapshot_id:?} does not exist"))
}

/// Refuses an unknown group snapshot: 5.
pub fn no_group_snapshot(group_snapshot_id: &str) -> Status {
    Status::not_found(format!("group snapshot {group_snapshot_id:?} does not exist"))
}

/// Refuses a list of members that is not the group's: 3.
pub fn other_members(group_snapshot_id: &str) -> Status {
    let why = format!("is not the list of the snapshots of group {group_snapshot_id:?}");
    invalid("snapshot_ids", why)
}

/// Reports a group snapshot that is wanted and not cut yet: 14, as for one snapshot.
pub fn group_not_cut(name: &str, waiting_for: &str) -> Status {
    let what = format!("group snapshot {name:?} is not cut yet; it waits for {waiting_for}");
    Status::unavailable(what)
}

/// Reports a snapshot that is wanted and not cut yet: 14, so that the caller asks again.
pub fn not_cut(name: &str, waiting_for: &str) -> Status {
    Status::unavailable(format!("snapshot {name:?} is not cut yet; it waits for {waiting_for}"))
}

/// Refuses while another call works on the same volume: 10. The reason is what that call waits for.
pub fn pending(what: &str, since: Duration, reason: Option<&str>) -> Status {
    let since_s = since.as_secs();
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    Status::aborted(format!(
        "an operation on {what} has been in progress for {since_s} s{reason}; retry when it has ended"
    ))
}

/// Reports a call that goes on though its caller's time is over: 4. A status of the client library's
/// own making would have no reason.
pub fn not_in_time(rpc: &str, what: &str, time: Duration, reason: Option<&str>) -> Status {
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    Status::deadline_exceeded(format!(
        "{rpc} of {what} has not ended within {:.1} s and goes on{reason}; repeat the call",
        time.as_secs_f64()
    ))
}

/// Reports a change that the records have and that does not rule yet: 14, and a repeat completes it.
pub fn not_in_force(waiting_for: &str) -> Status {
    Status::unavailable(format!(
        "the change is recorded and not in force yet: it waits for {waiting_for}; repeat the call"
    ))
}

/// Reports a controller that does not answer: 14.
pub fn no_answer_in_time(time: Duration) -> Status {
    Status::unavailable(format!("the control plane did not answer within {} s", time.as_secs()))
}

/// Refuses a volume that is not staged on this node: 5.
pub fn not_at_any_path(volume_id: &str) -> Status {
    Status::not_found(format!("volume {volume_id:?} is not staged on this node"))
}

/// Refuses to judge without evidence: 14. An empty answer would be taken for health.
pub fn not_judged(what: &str, why: &str) -> Status {
    Status::unavailable(format!("the health of {what} cannot be judged: {why}"))
}

/// Refuses an impossible size: 11.
pub fn out_of_range(why: impl Into<String>) -> Status {
    Status::out_of_range(why)
}

/// Refuses a token that was not issued, or is no longer valid: 10.
pub fn bad_token() -> Status {
    Status::aborted("starting_token is unknown; start without one")
}

/// Refuses an RPC that is not served, or not in this mode: 12, before any argument is read.
pub fn not_served(rpc: &str, why: &str) -> Status {
    Status::unimplemented(format!("{rpc} is not served: {why}"))
}

/// Reports a host without any address that others could know: 14.
pub fn no_address(node: &str) -> Status {
    Status::unavailable(format!("node {node} has no address yet that another host could know"))
}

/// Converts an error of the node library into the interface's code.
pub fn from_node(error: &quoin_node::Error) -> Status {
    use quoin_node::Kind;
    let code = match error.kind() {
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::AlreadyExists => Code::AlreadyExists,
        Kind::FailedPrecondition => Code::FailedPrecondition,
        Kind::NotFound => Code::NotFound,
        Kind::OutOfRange => Code::OutOfRange,
        Kind::Unauthenticated => Code::Unauthenticated,
        Kind::Unavailable => Code::Unavailable,
        Kind::Unsupported => Code::Unimplemented,
        Kind::Internal => Code::Internal,
    };
    Status::new(code, error.to_string())
}

/// Converts an error of the control plane: its codes are the interface's, without its metadata.
pub fn from_control(status: &Status) -> Status {
    let code = match status.code() {
        // OK as an error is a contradiction; in any case the call did not succeed.
        Code::Ok => Code::Internal,
        // The client library reports a broken connection as unknown or cancelled.
        Code::Unknown | Code::Cancelled => Code::Unavailable,
        code => code,
    };
    // The client library attaches a cause to statuses of its own making.
    let never_arrived = std::error::Error::source(status).is_some();
    let message = match (code, status.message()) {
        (Code::Unavailable, text) if never_arrived => {
            format!("the control plane cannot be reached: {text}")
        }
        (_, "") => format!("the control plane refused: {}", code.description()),
        (_, text) => text.to_owned(),
    };
    Status::new(code, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves CSI-ERR-12, CSI-ERR-14: for answers of the control plane.
    #[test]
    fn an_error_of_the_control_plane_keeps_its_code_and_loses_its_details() {
        let rich = Status::with_details(
            Code::ResourceExhausted,
            "no room",
            bytes::Bytes::from_static(b"details"),
        );
        let plain = from_control(&rich);
        assert_eq!((plain.code(), plain.message()), (Code::ResourceExhausted, "no room"));
        assert!(plain.details().is_empty());
        for code in 0..17 {
            let status = from_control(&Status::new(Code::from_i32(code), ""));
            assert_ne!(status.code(), Code::Ok);
            assert!(!status.message().is_empty());
        }
    }

    /// The whole table: a code that the interface does not have for an answer is another one's.
    #[test]
    fn every_code_of_the_control_plane_and_of_the_node_has_its_own_in_the_interface() {
        for number in 0..17 {
            let given = Code::from_i32(number);
            let expected = match given {
                Code::Ok => Code::Internal,
                Code::Unknown | Code::Cancelled => Code::Unavailable,
                code => code,
            };
            assert_eq!(from_control(&Status::new(given, "why")).code(), expected, "{given:?}");
            let told = match given {
                Code::Internal | Code::DataLoss | Code::OutOfRange | Code::Cancelled => {
                    Code::Unknown
                }
                code => code,
            };
            let found = unclassified(Status::new(given, "why"));
            assert_eq!((found.code(), found.message()), (told, "why"), "{given:?}");
            let enabled = match given {
                Code::ResourceExhausted => Code::FailedPrecondition,
                code => code,
            };
            let found = not_enabled(Status::new(given, "why"));
            assert_eq!((found.code(), found.message()), (enabled, "why"), "{given:?}");
        }
        let own = Status::new(Code::NotFound, "own");
        let status = |code, status: Status| assert_eq!(status.code(), code, "{status}");
        status(Code::InvalidArgument, missing("f"));
        status(Code::InvalidArgument, invalid("f", "why"));
        status(Code::InvalidArgument, unsupported_capability("why"));
        status(Code::InvalidArgument, other_members("g"));
        status(Code::FailedPrecondition, exceeds_capabilities("why"));
        status(Code::FailedPrecondition, precondition("why"));
        status(Code::FailedPrecondition, late_with_the_replay("v", "n"));
        status(Code::FailedPrecondition, not_replicated("v"));
        status(Code::FailedPrecondition, replicated_with_group("v", "g"));
        status(Code::FailedPrecondition, not_primary("v", "secondary"));
        status(Code::AlreadyExists, exists_without("why"));
        status(Code::NotFound, not_at_path("v", &own));
        status(Code::NotFound, no_volume("v"));
        status(Code::NotFound, no_group("g"));
        status(Code::NotFound, no_snapshot("s"));
        status(Code::NotFound, no_group_snapshot("g"));
        status(Code::NotFound, nothing_synced("v", ""));
        status(Code::NotFound, not_at_any_path("v"));
        status(Code::Unavailable, still_reclaimed("v"));
        status(Code::Unavailable, not_known("v", "why"));
        status(Code::Unavailable, replays_elsewhere("v", "n"));
        status(Code::Unavailable, no_destination_yet("v"));
        status(Code::Unavailable, group_not_cut("g", "why"));
        status(Code::Unavailable, not_cut("s", "why"));
        status(Code::Unavailable, not_in_force("why"));
        status(Code::Unavailable, no_answer_in_time(Duration::from_secs(1)));
        status(Code::Unavailable, not_judged("v", "why"));
        status(Code::Unavailable, no_address("n"));
        status(Code::Unauthenticated, unauthenticated("why"));
        status(Code::PermissionDenied, not_permitted("c", "Rpc"));
        status(Code::Aborted, pending("v", Duration::ZERO, None));
        status(Code::Aborted, bad_token());
        status(Code::DeadlineExceeded, not_in_time("Rpc", "v", Duration::ZERO, None));
        status(Code::OutOfRange, out_of_range("why"));
        status(Code::Unimplemented, not_served("Rpc", "why"));
        status(Code::Internal, internal("Rpc"));
    }

    /// Errors of the node, one of each kind.
    #[test]
    fn every_kind_of_error_of_the_node_has_its_code() {
        use quoin_node::Error;
        let (volume, path) = (|| "v".to_owned(), || std::path::PathBuf::from("/x"));
        let text = String::new;
        for (error, code) in [
            (Error::Path { path: path(), why: "is none" }, Code::InvalidArgument),
            (Error::StagedDifferently { volume: volume(), path: path() }, Code::AlreadyExists),
            (Error::NotStaged { volume: volume(), path: path() }, Code::FailedPrecondition),
            (Error::NotPresent { volume: volume(), path: path() }, Code::NotFound),
            (
                Error::AboveLimit { volume: volume(), has_bytes: 2, limit_bytes: 1 },
                Code::OutOfRange,
            ),
            (Error::WrongKey { volume: volume() }, Code::Unauthenticated),
            (Error::Busy { path: path() }, Code::Unavailable),
            (Error::NotTrimmed { volume: volume(), path: path() }, Code::Unimplemented),
            (Error::Tool { tool: "mkfs", volume: volume(), output: text() }, Code::Internal),
        ] {
            let status = from_node(&error);
            assert_eq!((status.code(), status.message()), (code, error.to_string().as_str()));
        }
    }
}
