//! Conversion of a verification into the controller's message.

use quoin_api::control::{Verification, VerifiedReplica, VerifyFinding};
use quoin_replication::primary::{Copy, Finding, Found, VerifiedMember, VerifyReport};
use quoin_types::BLOCK_SIZE;

const BLOCK: u64 = BLOCK_SIZE as u64;

pub fn verification(report: &VerifyReport) -> Verification {
    let state = match report {
        VerifyReport { ended: false, .. } => "running",
        VerifyReport { failed: "", .. } => "ended",
        _ => "failed",
    };
    Verification {
        request: report.request,
        state: state.to_owned(),
        message: report.failed.to_owned(),
        checked_bytes: report.checked_blocks * BLOCK,
        total_bytes: report.total_blocks * BLOCK,
        read_bytes: report.read_bytes,
        bad: report.bad,
        lost: report.lost,
        differing: report.differing,
        repaired: report.repaired,
        unsettled: report.unsettled,
        replicas: report.members.iter().map(replica).collect(),
        findings: report.findings.iter().map(finding).collect(),
        ..Verification::default()
    }
}

fn replica(member: &VerifiedMember) -> VerifiedReplica {
    VerifiedReplica {
        replica_id: member.member.id.to_string(),
        guid: member.member.guid.to_string(),
        checked_bytes: member.checked_blocks * BLOCK,
        bad: member.bad,
        repaired: member.repaired,
        left_out: member.left_out.to_owned(),
        ..VerifiedReplica::default()
    }
}

fn finding(found: &Finding) -> VerifyFinding {
    let (what, replica_id, message) = match &found.what {
        Found::Bad(member) => ("bad", member.id.to_string(), String::new()),
        Found::Lost => ("lost", String::new(), String::new()),
        Found::Differs(copies) => ("differs", String::new(), differing(copies)),
    };
    VerifyFinding {
        offset: found.lba * BLOCK,
        length: found.blocks * BLOCK,
        what: what.to_owned(),
        replica_id,
        repaired: found.repaired,
        message,
        ..VerifyFinding::default()
    }
}

/// Returns a text of each copy with its version and checksum.
fn differing(copies: &[Copy]) -> String {
    let copy = |copy: &Copy| {
        let content = copy.crc.map_or("a hole".to_owned(), |crc| format!("checksum {crc:08x}"));
        format!("{}: version {}, {content}", copy.member.id, copy.version)
    };
    copies.iter().map(copy).collect::<Vec<_>>().join("; ")
}
