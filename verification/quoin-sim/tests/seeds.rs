//! Seeds run as ordinary tests: a bounded number each time, and every seed that ever found
//! something.

use quoin_sim::faults::FaultKind;
use quoin_sim::kept::KeptSeed;
use quoin_sim::{Report, RunOptions, run, run_many};

const MODEL: RunOptions = RunOptions {
    seed: 0,
    store: quoin_sim::StoreKind::Model,
    trace: false,
    keep: false,
    dropped: 0,
    clients_max: 0,
    mutant: None,
    swarm: quoin_sim::Swarm::Broad,
};

/// Checks the number of IOs of a seed; one that found a violation may have ended before.
fn checks_a_thousand_ios(seed: u64, report: &Report) {
    let checked = report.stats.ios.checked;
    assert!(report.violation.is_some() || checked >= 1_000, "seed {seed} checked {checked} IOs");
}

#[test]
fn no_seed_of_these_finds_anything_and_each_checks_a_thousand_ios() {
    let mut least = u64::MAX;
    let summary = run_many(1, 60, MODEL, |seed, report| {
        checks_a_thousand_ios(seed, report);
        least = least.min(report.stats.ios.checked);
    });
    assert!(summary.violations.is_empty(), "{summary}");
    assert_eq!(summary.ios_checked_least, Some(least));
    let shown = summary.to_string();
    let line = shown.lines().find(|line| line.starts_with("least of any seed")).unwrap();
    assert!(line.ends_with(&format!(" {least}")), "{line}");
    assert_eq!(summary.stats.ios.undecided, 0, "blocks on which the checker gave up");
}

#[test]
fn the_real_store_on_simulated_disks_finds_nothing_either_and_checks_as_much() {
    let options = RunOptions { store: quoin_sim::StoreKind::Real, ..MODEL };
    let summary = run_many(1, 12, options, checks_a_thousand_ios);
    assert!(summary.violations.is_empty(), "{summary}");
}

/// `quoin volume recover`: all that any remaining replica held is there after it, under all faults,
/// and no replica that was given up serves again.
#[test]
fn a_volume_goes_on_with_all_that_its_remaining_replicas_hold_when_the_others_are_destroyed() {
    let options = RunOptions { swarm: quoin_sim::Swarm::Recoveries, ..RunOptions::default() };
    let summary = run_many(1, 60, options, |_, _| {});
    assert!(summary.violations.is_empty(), "{summary}");
    assert!(summary.stats.operators.recoveries >= 30, "{summary}");
}

/// Rounds that stand still, dials of hundreds of volumes to a dead host, read errors weeks apart,
/// orders for another volume.
#[test]
fn decisions_of_a_process_for_many_volumes_at_once_harm_none_of_them() {
    let options = RunOptions { swarm: quoin_sim::Swarm::Hosts, ..RunOptions::default() };
    let summary = run_many(1, 40, options, |_, _| {});
    assert!(summary.violations.is_empty(), "{summary}");
    let kinds = [
        FaultKind::PoolStalls,
        FaultKind::TargetStalls,
        FaultKind::BlackHole,
        FaultKind::ReadErrorsApart,
        FaultKind::OrderForAnother,
    ];
    for kind in kinds {
        assert!(summary.stats.faults.of(kind) > 0, "{} was never injected", kind.name());
    }
}

/// In these seeds four reads of ten have to wait for the disk, and their bytes come late.
#[test]
fn reads_that_wait_for_the_disk_show_what_was_written_as_those_do_that_need_not() {
    for swarm in [quoin_sim::Swarm::Broad, quoin_sim::Swarm::Pressure, quoin_sim::Swarm::Rebuilds] {
        let (mut waited, mut changes) = (0, 0);
        for seed in [7, 15, 39, 55] {
            let report = run(RunOptions { seed, swarm, ..RunOptions::default() });
            assert_eq!(report.violation, None, "{} {seed}", swarm.name());
            waited += report.stats.disks.reads_waited_for;
            changes += report.stats.disks.changes_waited;
        }
        assert!(waited > 100, "{}: {waited} reads", swarm.name());
        // Worlds under pressure rebuild from nothing, over no map.
        let is_rebuilt = !matches!(swarm, quoin_sim::Swarm::Pressure);
        assert!(!is_rebuilt || changes > 0, "{}: no increment waited", swarm.name());
    }
}

/// Runs the kept seeds whose place in the list leaves `part` of three, so that they share cores.
fn run_kept_seeds(part: usize) {
    let seeds = KeptSeed::parse(quoin_sim::kept::LIST).unwrap();
    assert!(seeds.len() >= 51, "{} kept seeds", seeds.len());
    for seed in seeds.iter().skip(part).step_by(3) {
        assert_eq!(seed.run().violation, None, "{seed}");
    }
}

#[test]
fn seeds_that_once_found_something_find_nothing_now_first_third() {
    run_kept_seeds(0);
}

#[test]
fn seeds_that_once_found_something_find_nothing_now_second_third() {
    run_kept_seeds(1);
}

#[test]
fn seeds_that_once_found_something_find_nothing_now_last_third() {
    run_kept_seeds(2);
}

#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 7, 11] {
        let (a, b) = (run(RunOptions { seed, ..MODEL }), run(RunOptions { seed, ..MODEL }));
        assert_eq!(a.fingerprint, b.fingerprint);
        assert_eq!(a.stats, b.stats);
        let other = run(RunOptions { seed: seed + 1, ..MODEL });
        assert_ne!(a.fingerprint, other.fingerprint);
    }
}
