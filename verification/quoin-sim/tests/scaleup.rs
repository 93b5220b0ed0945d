//! The rules of the scale-up document on the real core and store, in runs whose operators add,
//! move, remove and misname replicas while everything fails: every decision of every target is
//! held against a plain reading of the rules (`quoin_sim::scaleup`), and here each rule is asked
//! whether its situation ever arose.

use std::sync::OnceLock;

use quoin_sim::scaleup::Situation::{self, *};
use quoin_sim::{RunOptions, Summary, Swarm, run_many};

/// The swarms, with the first seed and how many: some ten seconds of CPU time. The last two have
/// situations of one run in hundreds.
const RUNS: [(Swarm, u64, u64); 4] = [
    (Swarm::UnexpectedPeers, 1, 50),
    (Swarm::Members, 1, 20),
    (Swarm::UnexpectedPeers, 146, 1),
    (Swarm::UnexpectedPeers, 478, 1),
];

fn runs() -> &'static Summary {
    static RUN: OnceLock<Summary> = OnceLock::new();
    RUN.get_or_init(|| {
        let mut all = Summary::default();
        for (swarm, first, count) in RUNS {
            let options = RunOptions { swarm, ..RunOptions::default() };
            all.merge(run_many(first, count, options, |_, _| {}));
        }
        all
    })
}

/// Each arose, and nothing that was looked at in it broke a rule.
fn held_in(situations: &[Situation]) {
    let summary = runs();
    assert!(summary.violations.is_empty(), "{summary}");
    let never: Vec<&Situation> =
        situations.iter().filter(|s| summary.stats.situations.of(**s) == 0).collect();
    assert!(never.is_empty(), "never arose: {never:?}");
}

/// Replicas that lose a seat have their quorum off here; that ones whose quorum is on come after
/// them is a matter of the core's tests.
///
/// Proves SCALE-ADMIT-03, SCALE-ADMIT-04, SCALE-ADMIT-05, SCALE-ADMIT-06.
#[test]
fn with_all_seats_taken_only_a_listed_replica_gets_one_from_an_unlisted_one_and_that_is_reported() {
    held_in(&[FullAndUnlisted, FullAndCopied, FullAndListed, SentAwayQuorumOff]);
    held_in(&[AllConnected, TooManyReported]);
}

/// Proves SCALE-ADMIT-07.
#[test]
fn a_replica_of_another_volume_never_answers_a_target_though_the_records_name_it() {
    held_in(&[Foreign]);
}

/// Proves SCALE-ADMIT-08, SCALE-ADMIT-09, SCALE-ADMIT-10, SCALE-ADMIT-11, SCALE-ADMIT-12,
/// SCALE-ADMIT-14, SCALE-ADMIT-15.
#[test]
fn who_is_let_in_is_known_or_takes_a_place_or_was_asked_for() {
    held_in(&[Known, Listed, ListedWithQuorum]);
    held_in(&[Addition, AdditionWithQuorum, ListShort, Unasked]);
}

/// Proves SCALE-LIST-01, SCALE-LIST-06, SCALE-LIST-07, SCALE-LIST-08.
#[test]
fn only_those_on_the_records_list_are_counted_and_all_others_are_kept_beside_it() {
    held_in(&[UnlistedBesideTheList, UnlistedFed, RuledOnceRecorded]);
}

/// Proves SCALE-QUORUM-03, SCALE-QUORUM-08, SCALE-QUORUM-09, SCALE-QUORUM-10.
#[test]
fn a_replica_whose_quorum_is_off_gets_every_entry_and_has_no_say() {
    held_in(&[ReadBesideQuorumOff, WriteBesideQuorumOff, QuorumOffLost, QuorumOffFedOn]);
    held_in(&[NoQuorumReported]);
}

/// Proves SCALE-IO-03.
#[test]
fn io_starts_with_as_many_known_replicas_as_it_needs_and_stops_below_cf() {
    held_in(&[StartedWithJustEnough, StoppedBelowCf, WentOnAtCf]);
}

/// Proves SCALE-KNOWN-04, SCALE-KNOWN-05, SCALE-KNOWN-06, SCALE-KNOWN-07, SCALE-KNOWN-09,
/// SCALE-KNOWN-11, SCALE-KNOWN-12, SCALE-SHORT-07, SCALE-VALID-02.
#[test]
fn the_list_changes_by_one_rule_at_a_time_and_what_was_acknowledged_meets_the_old_and_the_new() {
    held_in(&[TurnedOn, Replaced, ListFilled, LeftOut, Trimmed]);
    held_in(&[RaisedWithCfAsItWas, RaisedWithCf, HeldByTheNewRule, WriteWhileJoint]);
}

/// Proves SCALE-KNOWN-10, SCALE-KNOWN-13, SCALE-KNOWN-14, SCALE-KNOWN-15.
#[test]
fn the_record_is_told_before_a_list_rules_and_refused_or_late_swaps_are_tried_again() {
    held_in(&[SwapSent, RuledOnceRecorded, GivenUp, GivenUpAndMade, Refused, RefusedAndMade]);
}

/// The first half of it, before the list was ever complete, is on real processes
/// (`quoin/tests/known_list.rs`).
///
/// Proves SCALE-ADMIT-13.
#[test]
fn with_an_entry_missing_one_whose_quorum_is_on_is_let_in_only_where_more_are_desired() {
    held_in(&[ListShortWithQuorum]);
}

/// Proves SCALE-SHORT-06.
#[test]
fn two_of_five_known_ones_and_others_that_make_up_the_three_never_start_io() {
    held_in(&[SixthMadeThreeOfFive]);
}

/// Proves SCALE-SHORT-05.
#[test]
fn with_two_of_five_away_the_list_keeps_five_and_unlisted_ones_never_make_up_the_number() {
    held_in(&[Replaced, ThreeOfFive, UnlistedWereEnough, StartedWithJustEnough]);
}
