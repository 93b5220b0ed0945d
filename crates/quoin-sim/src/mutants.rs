//! Which defects there are, and the hunt for each: seeds until a checker names what it breaks.

use quoin_core::mutant;

use crate::world::StoreKind;
use crate::{RunOptions, Violation, run};

/// One rule, broken in one place.
#[derive(Clone, Copy, Debug)]
pub struct Defect {
    /// As [`quoin_core::mutant::is`] knows it.
    pub name: &'static str,
    /// Whose rule it breaks.
    pub book: Book,
    pub store: StoreKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Book {
    /// `docs/replication.md`
    Replication,
    /// `docs/store.md`
    Store,
}

const fn core(name: &'static str) -> Defect {
    Defect { name, book: Book::Replication, store: StoreKind::Real }
}

const fn store(name: &'static str) -> Defect {
    Defect { name, book: Book::Store, store: StoreKind::Real }
}

/// Every defect, in the order of the documents.
pub const ALL: &[Defect] = &[
    core("read-before-commit"),
    core("view-left-out-of-the-position"),
    core("dropped-acks-counted"),
    core("continuous-rule-left-out"),
    core("always-continuous"),
    core("equal-epoch-accepted"),
    core("older-epoch-accepted"),
    core("epoch-reused"),
    core("lease-from-the-receipt"),
    core("lease-forgotten-at-restart"),
    core("lease-forgotten-at-open"),
    core("answer-before-the-lease-ended"),
    core("answer-before-the-promise-is-on-media"),
    core("reply-without-a-lease"),
    core("cut-below-stable"),
    core("stable-told-at-commit"),
    core("swap-before-durable"),
    core("joint-dropped-on-unknown-outcome"),
    core("joint-change-not-given-up"),
    core("retired-admitted"),
    core("more-known-than-rf"),
    core("two-replicas-of-one-id"),
    core("guid-born-twice"),
    core("sync-error-retried"),
    core("flush-at-applied"),
    core("durable-by-an-older-sync"),
    core("view-applied-before-durable"),
    core("media-acknowledged-at-commit"),
    core("read-at-commit-under-media"),
    core("repair-of-another-version"),
    core("page-changed-between-sends"),
    core("dropped-below-cf"),
    core("close-makes-continuous"),
    core("closed-before-the-data"),
    core("stuck-view-not-passed"),
    core("control-plane-rollback-ignored"),
    core("view-active-by-a-foreign-set"),
    core("quorum-off-counted"),
    core("open-below-quorum"),
    core("old-view-teaches"),
    core("return-not-held"),
    core("returned-never-continuous"),
    core("overtaken-target-writes-again"),
    core("orphans-not-written-again"),
    core("reads-not-behind-the-reopen"),
    core("lost-while-one-is-away"),
    core("boundary-not-stable"),
    core("increment-from-above"),
    store("trim-without-version"),
    store("moved-block-overwrites-a-newer-one"),
    store("increment-visible-before-the-flip"),
    store("flip-before-the-shadow-is-on-media"),
    store("cleaned-above-stable"),
    store("base-folded-above-stable"),
    store("views-forgotten-by-clean-up"),
    store("freed-before-its-checkpoint"),
    store("checkpoint-recorded-before-it-is-on-media"),
    store("torn-tail-accepted-behind-a-hole"),
    store("torn-data-accepted"),
    store("stale-segment-replayed"),
    store("rot-taken-for-a-torn-tail"),
    store("cut-not-recorded"),
    store("block-checksum-not-checked"),
    store("node-checksum-not-checked"),
    store("reserve-given-to-clients"),
    store("trim-frees-nothing"),
    store("rolled-back-disk-not-noticed"),
];

/// Rules of the documents whose features do not exist yet.
pub const NOT_BUILT: &[(&str, &str)] = &[
    ("group snapshot with a broken hold", "group snapshots"),
    ("group hold that lets reads through", "group snapshots"),
    ("snapshot missing on a rebuilt replica", "snapshots that users make"),
    ("increment that skips a Revert", "reverting to a snapshot"),
    ("forced change without the old membership kept", "the forced change"),
    ("fenced taken at the promise", "the forced change"),
    ("lease not waited after \"proven gone\"", "the forced change"),
    ("formation branch left open", "admission beyond a replacement"),
];

/// What a hunt came to.
#[derive(Clone, Debug)]
pub struct Catch {
    pub runs: u64,
    /// Runs that came to the place of the defect.
    pub reached: u64,
    pub violation: Option<Violation>,
}

/// Runs seeds with the defect until a checker finds something, `runs_max` of them at most.
pub fn hunt(defect: &Defect, first_seed: u64, runs_max: u64) -> Catch {
    let mut reached = 0;
    for runs in 1..=runs_max {
        let seed = first_seed + runs - 1;
        mutant::set(Some(defect.name));
        let report = run(RunOptions { seed, store: defect.store, ..RunOptions::default() });
        reached += u64::from(mutant::was_reached());
        mutant::set(None);
        if report.violation.is_some() {
            return Catch { runs, reached, violation: report.violation };
        }
    }
    Catch { runs: runs_max, reached, violation: None }
}
