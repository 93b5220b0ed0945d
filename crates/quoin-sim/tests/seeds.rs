//! Seeds run as ordinary tests: a bounded number each time, and every seed that ever found
//! something.

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

/// What each seed must check; one that found something may have ended before.
fn checks_a_thousand_ios(seed: u64, report: &Report) {
    let checked = report.stats.ios_checked;
    assert!(report.violation.is_some() || checked >= 1_000, "seed {seed} checked {checked} IOs");
}

#[test]
fn no_seed_of_these_finds_anything_and_each_checks_a_thousand_ios() {
    let mut least = u64::MAX;
    let summary = run_many(1, 60, MODEL, |seed, report| {
        checks_a_thousand_ios(seed, report);
        least = least.min(report.stats.ios_checked);
    });
    assert!(summary.violations.is_empty(), "{summary}");
    assert_eq!(summary.ios_checked_least, Some(least));
    let shown = summary.to_string();
    let line = shown.lines().find(|line| line.starts_with("least of any seed")).unwrap();
    assert!(line.ends_with(&format!(" {least}")), "{line}");
    assert_eq!(summary.stats.undecided, 0, "blocks on which the checker gave up");
}

#[test]
fn the_real_store_on_simulated_disks_finds_nothing_either_and_checks_as_much() {
    let options = RunOptions { store: quoin_sim::StoreKind::Real, ..MODEL };
    let summary = run_many(1, 12, options, checks_a_thousand_ios);
    assert!(summary.violations.is_empty(), "{summary}");
}

/// Each of these once found the defect that is named beside it.
const FOUND: &[(u64, &str)] = &[
    (2, "pings and entries were sent after Close"),
    (18, "an increment began before the receiver's base; recovery repeated increments for ever"),
    (36, "an increment listed the boundary of another rebuild"),
    (75, "a member out of the window was rebuilt with entries still on their way to it"),
    (88, "as 75, refused by the receiver"),
    (122, "a lagging replica could not come back where stable could not move"),
    (159, "entries that the recovery had fetched were trimmed away again"),
    (187, "members that returned without their caches were never continuous again"),
    (347, "a swap under an epoch that the record had left behind was tried for ever"),
    (592, "a target that was overtaken and came back wrote what had waited since before"),
    (807, "a marked View did not say again that unflushed data may be lost"),
    (2524, "a View that waited for a rebuilding member blocked the View that would free it"),
    (2728, "a block was given up as lost while a member with a good copy was away"),
    (3267, "as 2524"),
    (2396, "the checker took a trim that was open at a cut for one after it"),
];

#[test]
fn seeds_that_once_found_something_find_nothing_now() {
    for (seed, what) in FOUND {
        let report = run(RunOptions { seed: *seed, ..MODEL });
        assert_eq!(report.violation, None, "seed {seed}: {what}");
    }
}

/// The same on the real store, whose bases move as they do in pools.
const FOUND_ON_THE_REAL_STORE: &[(u64, &str)] = &[
    (10, "a replica whose shadow waited for its flip could never be opened again over the wire"),
    (
        22488,
        "clean-up moved zeroes in the place of blocks that the disk refused to read for a while",
    ),
    (386, "only what is stable must survive under durability media"),
    (9319, "an authority whose base had moved on was taken for a broken one"),
    (9161, "recovery took a base that the entries at hand do not follow, again and again"),
    (249, "an open waited for a newcomer that had lost its cache in the joint moment"),
    (787, "as 249, with three replicas and CF on its way to 1"),
    (751, "a disk that refused to read for a second made a replica damaged for good"),
    (35, "a request behind the old end that waited for an open was refused"),
    (5108, "an open that was granted the membership of before a move waited for ever"),
    (920, "a parked rebuild asked for ever for a boundary that no source had any more"),
    (
        1727,
        "a rebuild that nobody waited for moved more than was stable while its sources were away",
    ),
    (1322, "an open waited for ever for entries that a full pool had no room for"),
    (587, "a shadow that its replica no longer needed kept its space for ever"),
];

/// The same in the small worlds in which operators change the membership all the while.
const FOUND_WITH_MEMBERS: &[(u64, &str)] = &[
    (20133, "as 5108: an old copy of the record had granted it"),
    (30313, "as 20133"),
    (30402, "as 20133"),
    (30495, "as 20133"),
    (20158, "as 20133, with a replica that had left"),
    (20407, "an open waited for ever for a newcomer that never had the joint View"),
    (30426, "two lost caches where CF is 3 were told as a lost tail, by a rule that never ruled"),
    (40629, "as 30426, with one lost cache where CF is 2"),
    (40835, "as 40629"),
    (40727, "the checker took a write that a living target restored for one that was lost"),
    (20432, "the checker took a newcomer for lost whose creation was not on media yet"),
    (20660, "as 20432"),
    (30394, "as 20432"),
    (30344, "the checker held a target to a swap that nobody had ever heard of"),
];

#[test]
fn seeds_that_once_found_something_as_the_membership_changes_find_nothing_now() {
    for (seed, what) in FOUND_WITH_MEMBERS {
        let swarm = quoin_sim::Swarm::Members;
        let report = run(RunOptions { seed: *seed, swarm, ..RunOptions::default() });
        assert_eq!(report.violation, None, "seed {seed}: {what}");
    }
}

/// The same in other small worlds.
const FOUND_IN_SWARMS: &[(quoin_sim::Swarm, u64, &str)] = &[
    (
        quoin_sim::Swarm::Churn,
        294,
        "an increment cut before its flip kept its replica from folding",
    ),
    (
        quoin_sim::Swarm::Closes,
        131,
        "the checker took a lease that its holder gave up for one owed",
    ),
    (
        quoin_sim::Swarm::PowerCuts,
        144,
        "clients filled the window faster than a member synced, and were meant to find it in sync",
    ),
];

/// `quoin volume recover`: what any of those that are left held is there after it, in all the
/// disorder that there is, and nobody who was given up serves again.
#[test]
fn what_is_left_of_a_volume_goes_on_with_all_that_it_holds_when_the_others_are_destroyed() {
    let options = RunOptions { swarm: quoin_sim::Swarm::Recoveries, ..RunOptions::default() };
    let summary = run_many(1, 60, options, |_, _| {});
    assert!(summary.violations.is_empty(), "{summary}");
    assert!(summary.stats.recoveries >= 30, "{summary}");
}

#[test]
fn seeds_that_once_found_something_in_a_swarm_find_nothing_now() {
    for (swarm, seed, what) in FOUND_IN_SWARMS {
        let report = run(RunOptions { seed: *seed, swarm: *swarm, ..RunOptions::default() });
        assert_eq!(report.violation, None, "{} seed {seed}: {what}", swarm.name());
    }
}

/// Where the checker was wrong, or the run's settings were.
const FALSE_ALARMS: &[(u64, &str)] = &[
    (20334, "a replica counted as whole again that was listed in a View and not yet fed"),
    (6125, "the lease of a replica that was lost was asked of the one made in its place"),
    (101, "the window was smaller than one request"),
    (3309, "operators asked for a replacement of a replica that they had told to leave"),
    (865, "a pool never looked again at what a passing read error had set aside"),
];

#[test]
fn what_the_checker_once_took_for_a_defect_is_none() {
    for (seed, what) in FALSE_ALARMS {
        let report = run(RunOptions { seed: *seed, ..RunOptions::default() });
        assert_eq!(report.violation, None, "seed {seed}: {what}");
    }
}

#[test]
fn seeds_that_once_found_something_on_the_real_store_find_nothing_now() {
    for (seed, what) in FOUND_ON_THE_REAL_STORE {
        let options = RunOptions { store: quoin_sim::StoreKind::Real, ..MODEL };
        let report = run(RunOptions { seed: *seed, ..options });
        assert_eq!(report.violation, None, "seed {seed}: {what}");
    }
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
