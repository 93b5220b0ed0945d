//! The simulator can fail: each deliberate defect is found within a bounded number of seeds, by
//! the rule that it breaks.

use quoin_sim::{Mutant, RunOptions, StoreKind, run};

/// Runs seeds until one finds the defect by one of these rules.
fn is_found(mutant: Mutant, seeds: u64, rules: &[&str]) {
    let mut found = Vec::new();
    for seed in 1..=seeds {
        let store = StoreKind::Model;
        let report = run(RunOptions { seed, store, mutant: Some(mutant), ..RunOptions::default() });
        let Some(violation) = report.violation else { continue };
        if rules.contains(&violation.rule.as_str()) {
            return;
        }
        found.push(violation);
    }
    panic!("{mutant:?} was not found by any of {rules:?} in {seeds} seeds; found: {found:#?}");
}

#[test]
fn a_replica_that_acknowledges_before_it_holds_is_found() {
    is_found(
        Mutant::AcknowledgesBeforeHolding,
        60,
        &["CommitSurvives", "StableSurvives", "Linearizable", "ContinuousHolds", "DurableHolds"],
    );
}

#[test]
fn a_disk_that_lies_about_syncs_is_found() {
    is_found(Mutant::SyncLies, 60, &["DurableHolds", "StableSurvives"]);
}

#[test]
fn clocks_that_stop_under_leased_reads_are_found() {
    is_found(Mutant::ClocksStop, 400, &["LeaseExcludes", "Linearizable"]);
}

/// Not a defect that shows: a replica refuses an equal epoch of another incarnation, so the second
/// holder of an epoch asks for a higher one.
#[test]
fn an_epoch_that_is_granted_twice_harms_nothing() {
    for seed in 1..=40 {
        let mutant = Some(Mutant::EpochGrantedTwice);
        let store = StoreKind::Model;
        let report = run(RunOptions { seed, store, mutant, ..RunOptions::default() });
        assert_eq!(report.violation, None);
    }
}

#[test]
fn a_replica_that_forgets_silently_is_found() {
    is_found(Mutant::ForgetsSilently, 60, &["ContinuousHolds", "DurableHolds"]);
}
