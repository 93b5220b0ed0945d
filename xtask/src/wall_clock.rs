//! Uses of the wall clock. A clock may be ahead, and right again: a time that was recorded then lies ahead
//! of the present, and must bind nothing for as long. So every file that reads the wall clock is listed
//! with its purpose, and a new one is a decision and no accident.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::run::{CODE_DIRECTORIES, workspace_root};
use crate::trace::collect_files;

/// Purpose of reading the wall clock in one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    /// A time is only recorded or shown, and nothing follows from it.
    Stamps,
    /// A recorded time decides something. The test of this name shows one that lies ahead.
    Compares(&'static str),
}

use Purpose::{Compares, Stamps};

const USES: [(&str, Purpose); 56] = [
    ("crates/quoin-control/src/api/gate.rs", Stamps),
    ("crates/quoin-control/src/api/reports.rs", Stamps),
    ("crates/quoin-control/src/disaster/backup.rs", Stamps),
    ("crates/quoin-control/src/disaster/moving.rs", Stamps),
    ("crates/quoin-control/src/disaster/offline.rs", Stamps),
    ("crates/quoin-control/src/disaster/recovery.rs", Stamps),
    ("crates/quoin-control/src/disaster/salvage/mod.rs", Stamps),
    (
        "crates/quoin-control/src/disaster/scheduled_backup.rs",
        Compares("a_backup_made_after_one_of_a_clock_that_was_ahead_is_the_last_by_name_and_stays"),
    ),
    ("crates/quoin-control/src/membership/admission.rs", Stamps),
    (
        "crates/quoin-control/src/membership/members.rs",
        Compares("a_token_is_good_from_when_it_was_made_until_it_expires"),
    ),
    ("crates/quoin-control/src/membership/peers.rs", Stamps),
    ("crates/quoin-control/src/membership/term.rs", Stamps),
    ("crates/quoin-control/src/mirror/calls.rs", Stamps),
    ("crates/quoin-control/src/mirror/comparing.rs", Stamps),
    ("crates/quoin-control/src/mirror/copies.rs", Stamps),
    (
        "crates/quoin-control/src/mirror/driver.rs",
        Compares(
            "a_point_is_due_and_no_time_is_told_where_the_last_one_was_cut_by_a_clock_that_was_ahead",
        ),
    ),
    ("crates/quoin-control/src/mirror/groups.rs", Stamps),
    ("crates/quoin-control/src/mirror/lag.rs", Stamps),
    ("crates/quoin-control/src/mirror/observe.rs", Stamps),
    ("crates/quoin-control/src/mirror/orders.rs", Stamps),
    ("crates/quoin-control/src/mirror/recovery.rs", Stamps),
    (
        "crates/quoin-control/src/mirror/rules.rs",
        Compares("a_time_is_ahead_where_no_correction_of_a_clock_explains_it"),
    ),
    ("crates/quoin-control/src/mirror/view.rs", Stamps),
    ("crates/quoin-control/src/reconcile/cordon.rs", Stamps),
    ("crates/quoin-control/src/reconcile/dying.rs", Stamps),
    ("crates/quoin-control/src/snapshot/catalog.rs", Stamps),
    (
        "crates/quoin-control/src/snapshot/commands.rs",
        Compares("what_a_target_cannot_have_cut_is_refused_and_its_clock_is_bounded"),
    ),
    ("crates/quoin-control/src/snapshot/groups.rs", Stamps),
    (
        "crates/quoin-control/src/snapshot/keeper.rs",
        Compares("a_time_is_ahead_where_no_correction_of_a_clock_explains_it"),
    ),
    ("crates/quoin-control/src/snapshot/points.rs", Stamps),
    ("crates/quoin-control/src/snapshot/recovery.rs", Stamps),
    ("crates/quoin-control/src/snapshot/reverts.rs", Stamps),
    (
        "crates/quoin-control/src/snapshot/schedules.rs",
        Compares("no_run_is_bound_by_a_time_that_lies_ahead"),
    ),
    (
        "crates/quoin-control/src/snapshot/view.rs",
        Compares("a_snapshot_cut_by_a_clock_that_was_ahead_does_not_push_out_those_that_follow"),
    ),
    ("crates/quoin-control/src/state/events.rs", Stamps),
    ("crates/quoin-control/src/state/store/kubernetes/lease.rs", Stamps),
    (
        "crates/quoin-control/src/status/health.rs",
        Compares("a_time_is_ahead_where_no_correction_of_a_clock_explains_it"),
    ),
    ("crates/quoin-control/src/time.rs", Stamps),
    ("crates/quoin-control/src/volume/network_fences.rs", Stamps),
    ("crates/quoin-control/src/volume/verification.rs", Stamps),
    ("crates/quoin-control/src/volume/volumes.rs", Stamps),
    (
        "crates/quoin-identity/src/authority.rs",
        Compares("an_authority_whose_clock_was_ahead_as_it_was_rotated_is_believed_by_a_right_one"),
    ),
    (
        "crates/quoin-identity/src/clock.rs",
        Compares("a_certificate_is_due_near_its_end_and_before_its_beginning"),
    ),
    (
        "crates/quoin-identity/src/clock_difference.rs",
        Compares("half_of_the_round_trip_is_taken_into_account_and_a_long_one_measures_nothing"),
    ),
    (
        "crates/quoin-identity/src/identity.rs",
        Compares("a_certificate_that_is_not_valid_yet_is_refused_on_either_side_and_is_due"),
    ),
    (
        "crates/quoin-identity/src/incoming.rs",
        Compares(
            "a_member_whose_certificate_is_not_valid_yet_gets_another_and_does_nothing_else_before",
        ),
    ),
    (
        "crates/quoin-identity/src/tls.rs",
        Compares("a_certificate_that_is_not_valid_yet_is_refused_on_either_side_and_is_due"),
    ),
    (
        "crates/quoin-pool/src/scrub.rs",
        Compares(
            "a_pass_that_ended_by_a_clock_that_was_ahead_puts_the_next_one_off_by_no_more_than_a_period",
        ),
    ),
    // The handshake has held both ends of the certificate against the clock.
    (
        "crates/quoin-target/src/nbd_listener.rs",
        Compares("a_certificate_that_is_not_valid_yet_is_refused_on_either_side_and_is_due"),
    ),
    ("crates/quoin-target/src/shard/snapshots.rs", Stamps),
    ("crates/quoin/src/contexts/mod.rs", Stamps),
    ("crates/quoin/src/demo/database.rs", Stamps),
    ("crates/quoin/src/roles/join.rs", Stamps),
    (
        "crates/quoin/src/salvage.rs",
        Compares("a_backup_made_after_one_of_a_clock_that_was_ahead_is_the_last_by_name_and_stays"),
    ),
    ("crates/quoin/src/snapshot.rs", Stamps),
    ("crates/quoin/src/support_bundle.rs", Stamps),
];

/// Ways to read the wall clock, without white space.
const READS: [&str; 6] = [
    "SystemTime::now(",
    "SystemTime::UNIX_EPOCH.elapsed(",
    "UNIX_EPOCH.elapsed(",
    "UnixTime::now(",
    "now_ms()",
    "Utc::now(",
];

/// Returns every violation as a message.
pub fn violations() -> Result<Vec<String>> {
    let root = workspace_root();
    let mut files = Vec::new();
    for directory in CODE_DIRECTORIES {
        collect_files(&root.join(directory), &mut files)?;
    }
    let (mut reading, mut tests) = (BTreeSet::new(), String::new());
    for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "rs")) {
        let text = std::fs::read_to_string(path)?;
        let shown = path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned();
        let is_product = shown.contains("/src/") && !shown.ends_with("/tests.rs");
        if shown.starts_with("crates/") && is_product && reads_wall_clock(&text) {
            reading.insert(shown);
        }
        tests.push_str(&text);
    }
    Ok(compared(&reading, &tests))
}

fn compared(reading: &BTreeSet<String>, tests: &str) -> Vec<String> {
    let listed: BTreeSet<&str> = USES.iter().map(|(file, _)| *file).collect();
    let mut violations: Vec<String> = reading
        .iter()
        .filter(|file| !listed.contains(file.as_str()))
        .map(|file| {
            format!(
                "{file}: it reads the wall clock: say for what in xtask/src/wall_clock.rs, and show by \
                 a test that a time which lies ahead binds nothing"
            )
        })
        .collect();
    for (file, purpose) in USES {
        if !reading.contains(file) {
            violations.push(format!("{file}: it reads no wall clock: take it from the list"));
        }
        if let Compares(test) = purpose
            && !tests.contains(&format!("fn {test}("))
        {
            violations.push(format!("{file}: there is no test {test}"));
        }
    }
    violations
}

/// Returns whether code outside of a file's tests reads the wall clock.
fn reads_wall_clock(text: &str) -> bool {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let dense: String = lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect();
    READS.iter().any(|read| dense.contains(read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_found_across_lines_and_not_in_comments_or_tests() {
        assert!(reads_wall_clock("let a = SystemTime::now();"));
        assert!(reads_wall_clock("SystemTime::UNIX_EPOCH\n    .elapsed()"));
        assert!(!reads_wall_clock("// SystemTime::now()\nInstant::now()"));
        assert!(!reads_wall_clock("fn a() {}\n#[cfg(test)]\nmod tests {\n now_ms(); }"));
    }

    #[test]
    fn a_file_that_is_not_listed_and_one_that_reads_none_are_told() {
        let all: BTreeSet<String> = USES.iter().map(|(file, _)| (*file).to_owned()).collect();
        let tests: String = USES
            .iter()
            .filter_map(|(_, purpose)| match purpose {
                Compares(test) => Some(format!("fn {test}() {{}}\n")),
                Stamps => None,
            })
            .collect();
        assert_eq!(compared(&all, &tests), Vec::<String>::new());
        let mut other = all.clone();
        other.insert("crates/quoin/src/new.rs".to_owned());
        assert_eq!(compared(&other, &tests).len(), 1);
        other.remove("crates/quoin/src/new.rs");
        other.remove("crates/quoin/src/snapshot.rs");
        assert!(compared(&other, &tests)[0].contains("take it from the list"));
        assert!(compared(&all, "").iter().any(|told| told.contains("there is no test")));
    }

    #[test]
    fn the_list_is_that_of_the_tree() {
        assert_eq!(violations().unwrap(), Vec::<String>::new());
    }
}
