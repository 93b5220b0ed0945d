//! Which defects there are, and what is known to catch each.

use crate::swarm::Swarm;

/// One rule, broken in one place.
#[derive(Clone, Copy, Debug)]
pub struct Defect {
    /// As [`quoin_types::mutant::is`] knows it.
    pub name: &'static str,
    /// Whose rule it breaks.
    pub book: Book,
    /// Where the simulator looks first.
    pub swarm: Swarm,
    /// The same rule in the model (`quoin_model::mutants`), where it can be said there.
    pub like: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Book {
    /// `docs/replication.md`
    Replication,
    /// `docs/store.md`
    Store,
    /// `docs/mirror.md`
    Mirror,
    /// `docs/replication.md`, of a way that the product never goes, as it is never the only one or
    /// a person is asked there: the model alone goes it.
    Model,
}

impl Defect {
    const fn like(self, like: &'static str) -> Self {
        Self { like: Some(like), ..self }
    }
}

const fn core(name: &'static str, swarm: Swarm) -> Defect {
    Defect { name, book: Book::Replication, swarm, like: None }
}

const fn store(name: &'static str, swarm: Swarm) -> Defect {
    Defect { name, book: Book::Store, swarm, like: None }
}

const fn mirror(name: &'static str, swarm: Swarm) -> Defect {
    Defect { name, book: Book::Mirror, swarm, like: None }
}

const fn model(name: &'static str) -> Defect {
    Defect { name, book: Book::Model, swarm: Swarm::Broad, like: Some(name) }
}

/// Every defect, in the order of the documents.
pub const ALL: &[Defect] = &[
    core("read-before-commit", Swarm::Few).like("read-not-held"),
    core("view-left-out-of-the-position", Swarm::Idle).like("view-out-of-position"),
    core("dropped-acks-counted", Swarm::Rebuilds).like("dropped-counted"),
    core("continuous-rule-left-out", Swarm::PowerCuts).like("no-continuous-rule"),
    core("always-continuous", Swarm::PowerCuts),
    core("equal-epoch-accepted", Swarm::Rollbacks).like("equal-epoch-accepted"),
    core("older-epoch-accepted", Swarm::Takeovers),
    core("epoch-reused", Swarm::Takeovers).like("epoch-reused"),
    core("lease-from-the-receipt", Swarm::Takeovers).like("lease-from-receipt"),
    core("lease-renewed-from-the-rounds-begin", Swarm::Hosts),
    core("lease-tested-at-the-rounds-begin", Swarm::Hosts),
    core("lease-forgotten-at-restart", Swarm::Takeovers).like("lease-forgotten-by-restart"),
    core("fence-not-promised", Swarm::Detaches),
    core("fenced-session-goes-on", Swarm::Detaches),
    core("opened-by-nobody", Swarm::Detaches),
    core("written-by-a-grant-that-reads", Swarm::Detaches),
    core("former-term-believed", Swarm::Controllers),
    core("rival-term-believed", Swarm::Controllers),
    core("term-not-remembered", Swarm::Controllers),
    core("term-not-in-the-epoch", Swarm::Controllers),
    core("detached-and-not-taken-back", Swarm::Control),
    core("epoch-of-a-fence-signed", Swarm::Control),
    core("use-begins-with-an-epoch-of-nobody", Swarm::Control),
    core("opened-use-forgotten-at-the-next", Swarm::Control),
    core("silent-node-detached", Swarm::Control),
    core("unsaid-devices-taken-for-none", Swarm::Control),
    core("node-that-was-cut-off-detached", Swarm::Control),
    core("devices-not-looked-at", Swarm::Control),
    core("one-silent-pool-is-enough", Swarm::Control),
    core("first-silence-taken-for-a-long-one", Swarm::Control),
    core("fenced-node-granted", Swarm::Detaches),
    core("one-promise-is-enough-for-a-fence", Swarm::Detaches),
    core("fence-holds-before-the-lease-is-over", Swarm::Detaches),
    core("former-holders-forgotten", Swarm::Detaches),
    core("silence-taken-for-a-session-s-end", Swarm::Detaches),
    core("one-pool-rules-over-others", Swarm::Control),
    core("numbers-of-one-pool-believed", Swarm::Control),
    core("holder-kept-over-a-recovery", Swarm::Control),
    core("grants-of-before-a-recovery-forgotten", Swarm::Control),
    core("grants-that-recovered-records-lack-not-fenced", Swarm::Control),
    core("use-of-recovered-records-believed", Swarm::Control),
    core("joint-rule-taken-for-knowledge-of-another", Swarm::Control),
    core("tokens-taken-in-doubt", Swarm::Control),
    core("tokens-kept-over-a-recovery", Swarm::Control),
    core("given-up-while-pools-are-away", Swarm::Control),
    core("copies-that-are-left-given-up", Swarm::Control),
    core("newcomer-taken-back-without-a-version", Swarm::Members),
    core("opened-for-another-claim", Swarm::Hosts),
    core("deleted-by-guid-alone", Swarm::Hosts),
    core("dials-not-shared-by-address", Swarm::Hosts),
    core("stale-dials-kept", Swarm::Hosts),
    core("oldest-chunk-has-no-turn", Swarm::Hosts),
    core("claims-left-to-the-next-process", Swarm::Hosts),
    core("claims-not-withdrawn", Swarm::Hosts),
    core("recognition-kept-over-a-failed-disk", Swarm::Hosts),
    core("connections-never-closed", Swarm::Takeovers),
    core("burst-without-a-bound", Swarm::Limits),
    core("limits-wake-for-nothing", Swarm::Limits),
    core("old-controller-goes-on", Swarm::Controllers),
    core("former-term-waited-out", Swarm::Controllers),
    core("record-not-asked-when-turned-away", Swarm::Controllers),
    core("lease-forgotten-at-open", Swarm::Takeovers).like("lease-forgotten-by-open"),
    core("answer-before-the-lease-ended", Swarm::Takeovers).like("lease-forgotten-by-open"),
    core("answer-before-the-promise-is-on-media", Swarm::PowerCuts),
    core("reply-without-a-lease", Swarm::Takeovers).like("ack-without-lease"),
    core("error-without-a-lease", Swarm::Damage),
    core("idle-lease-not-kept", Swarm::Idle),
    core("full-replica-not-synced", Swarm::Broad),
    core("refusals-always-followed", Swarm::Rollbacks),
    core("overtaken-only-where-it-served", Swarm::Churn),
    core("refused-reads-at-any-distance", Swarm::Hosts),
    core("chain-of-a-cut-not-compared", Swarm::Rollbacks),
    core("repeat-done-again", Swarm::Sharers),
    core("repeat-answered-before-commit", Swarm::Sharers),
    core("requests-forgotten-at-a-takeover", Swarm::Sharers),
    core("clients-left-out-of-the-open", Swarm::Sharers),
    core("clients-left-out-of-an-increment", Swarm::Sharers),
    store("clients-left-out-of-the-checkpoint", Swarm::Sharers),
    core("client-not-ended", Swarm::Sharers),
    core("client-used-after-its-end", Swarm::Sharers),
    core("clients-ended-by-an-older-assignment", Swarm::Sharers),
    core("cut-below-stable", Swarm::Damage).like("cut-below-stable"),
    core("stable-told-at-commit", Swarm::PowerCuts),
    core("swap-before-durable", Swarm::Replacements).like("swap-before-durable"),
    core("joint-dropped-on-unknown-outcome", Swarm::Replacements).like("joint-dropped"),
    core("joint-dropped-on-refusal", Swarm::Members),
    core("late-answer-to-a-swap-believed", Swarm::Members),
    core("joint-change-not-given-up", Swarm::Replacements).like("cannot-give-up"),
    core("retired-admitted", Swarm::Replacements).like("retired-admitted"),
    core("let-in-when-full", Swarm::UnexpectedPeers),
    core("let-in-unasked", Swarm::UnexpectedPeers),
    core("joint-rule-left-out", Swarm::Members),
    core("joint-not-judged", Swarm::Members).like("joint-not-judged"),
    core("record-not-asked-again", Swarm::Members),
    core("newcomer-kept-without-a-place", Swarm::Members),
    core("leaves-unhealthy-behind", Swarm::Members),
    core("removed-not-retired", Swarm::Members),
    core("recovery-opens-without-some", Swarm::Recoveries),
    core("more-known-than-rf", Swarm::Replacements).like("known-above-rf"),
    core("two-replicas-of-one-id", Swarm::Replacements),
    core("guid-born-twice", Swarm::Replacements).like("guid-born-twice"),
    core("sync-error-retried", Swarm::PowerCuts).like("sync-retried"),
    core("flush-at-applied", Swarm::PowerCuts).like("flush-at-applied"),
    core("durable-by-an-older-sync", Swarm::PowerCuts),
    core("view-applied-before-durable", Swarm::PowerCuts),
    core("media-acknowledged-at-commit", Swarm::PowerCuts),
    core("read-at-commit-under-media", Swarm::PowerCuts).like("read-at-commit-under-media"),
    core("cache-to-media-acknowledged-at-commit", Swarm::PowerCuts),
    core("shown-under-cache-not-owed", Swarm::Blackouts),
    core("snapshot-of-an-unstable-revert-deleted", Swarm::Snapshots),
    core("newest-view-of-an-append-alone", Swarm::Members),
    core("older-options-come-back", Swarm::Takeovers),
    core("options-in-force-while-opening", Swarm::Takeovers),
    core("copies-of-cut-entries-asked-for", Swarm::Hosts),
    core("repair-of-another-version", Swarm::Damage),
    core("page-changed-between-sends", Swarm::Few),
    core("dropped-below-cf", Swarm::Rebuilds).like("drop-below-cf"),
    core("close-makes-continuous", Swarm::Closes).like("close-makes-continuous"),
    core("closed-before-the-data", Swarm::Closes),
    core("stopped-without-its-word", Swarm::Closes),
    core("clean-stop-without-its-caches", Swarm::Closes),
    core("word-kept-over-an-open", Swarm::Closes),
    core("stuck-view-not-passed", Swarm::Churn).like("stuck-view"),
    core("control-plane-rollback-ignored", Swarm::Replacements).like("rollback-ignored"),
    core("view-active-by-a-foreign-set", Swarm::Churn).like("foreign-activation"),
    core("quorum-off-counted", Swarm::Damage).like("quorum-off-counted"),
    core("open-below-quorum", Swarm::Churn),
    core("old-view-teaches", Swarm::PowerCuts).like("old-view-teaches"),
    core("return-not-held", Swarm::Rebuilds),
    core("returned-never-continuous", Swarm::PowerCuts),
    core("overtaken-target-writes-again", Swarm::Churn),
    core("orphans-not-written-again", Swarm::Blackouts),
    core("reads-not-behind-the-reopen", Swarm::Blackouts),
    core("owed-forgotten-beside-a-full-pool", Swarm::FullPools),
    core("appends-joined-over-a-gap", Swarm::FullPools),
    core("sequenced-beyond-the-share", Swarm::FullPools),
    core("holes-behind-writes", Swarm::FullPools),
    core("lost-while-one-is-away", Swarm::Damage),
    core("boundary-not-stable", Swarm::Rebuilds),
    core("last-increment-without-room", Swarm::Memory),
    core("increment-from-above", Swarm::Rebuilds),
    core("boundaries-of-others-kept", Swarm::Members),
    core("grown-behind-the-backlog", Swarm::Churn),
    core("snapshot-missing-on-a-rebuilt-replica", Swarm::Snapshots),
    core("snapshots-behind-a-base-sent-with-it", Swarm::Snapshots),
    core("shadow-resumed-behind-a-cut", Swarm::Snapshots),
    core("cursor-of-a-skipped-view-believed", Swarm::Snapshots),
    core("cursor-of-a-moved-boundary-believed", Swarm::ManyVolumes),
    core("deleted-view-restarts-a-rebuild", Swarm::Snapshots),
    core("cut-without-its-head", Swarm::Snapshots),
    core("hidden-snapshots-all-deleted-at-an-open", Swarm::Snapshots),
    core("repair-without-its-view", Swarm::Snapshots),
    core("snapshot-answered-before-stable", Swarm::Snapshots),
    core("revert-done-again", Swarm::Snapshots),
    core("changes-before-stable", Swarm::Snapshots),
    core("changes-beyond-a-bad-block", Swarm::Snapshots),
    store("revert-without-a-version", Swarm::Snapshots),
    core("writes-answered-while-held", Swarm::Groups),
    core("reads-while-held", Swarm::Groups),
    core("held-without-end", Swarm::Groups),
    core("cut-without-a-hold", Swarm::Groups),
    core("hold-outlives-its-epoch", Swarm::Groups),
    core("broken-hold-counts", Swarm::Groups),
    core("released-before-all-are-cut", Swarm::Groups),
    core("bulk-failure-ends-the-session", Swarm::Rebuilds),
    core("former-bulk-connection-heard", Swarm::Rebuilds),
    core("flip-told-before-it-is-made", Swarm::Rebuilds),
    core("feed-swallowed", Swarm::Rebuilds),
    core("feeds-not-held-together", Swarm::Rebuilds),
    store("trim-without-version", Swarm::Rebuilds),
    store("moved-block-overwrites-a-newer-one", Swarm::Pressure),
    store("increment-visible-before-the-flip", Swarm::Rebuilds).like("increment-before-flip"),
    store("flip-before-the-shadow-is-on-media", Swarm::Rebuilds),
    store("cleaned-above-stable", Swarm::Pressure),
    store("base-folded-above-stable", Swarm::PowerCuts).like("fold-above-stable"),
    store("views-forgotten-by-clean-up", Swarm::Pressure),
    store("renewal-passes-over-views-of-its-version", Swarm::Pressure),
    store("freed-before-its-checkpoint", Swarm::Pressure),
    store("checkpoint-recorded-before-it-is-on-media", Swarm::Pressure),
    store("torn-tail-accepted-behind-a-hole", Swarm::PowerCuts),
    store("torn-data-accepted", Swarm::PowerCuts),
    store("stale-segment-replayed", Swarm::Pressure),
    store("rot-taken-for-a-torn-tail", Swarm::Damage),
    store("large-batches-not-looked-behind", Swarm::Damage),
    store("cut-not-recorded", Swarm::PowerCuts),
    store("block-checksum-not-checked", Swarm::Damage),
    store("node-checksum-not-checked", Swarm::Damage),
    store("reserve-given-to-clients", Swarm::Pressure),
    store("shares-not-kept", Swarm::Pressure),
    store("shares-not-enforced", Swarm::Pressure),
    store("trim-frees-nothing", Swarm::Pressure),
    store("log-counted-twice-at-a-start", Swarm::Pressure),
    store("space-given-back-in-one-step", Swarm::Pressure),
    store("flip-frees-by-an-older-sync", Swarm::Rebuilds),
    store("pinned-base-forgotten-by-clean-up", Swarm::Rebuilds),
    store("count-before-all-else", Swarm::Pressure),
    store("what-dies-beside-a-count-is-counted", Swarm::Pressure),
    store("log-folded-beside-a-count-is-counted", Swarm::Pressure),
    store("difference-without-the-view-behind", Swarm::Pressure),
    store("leaving-view-keeps-nothing", Swarm::Pressure),
    store("clean-up-follows-itself", Swarm::Pressure),
    store("count-forgotten-at-a-flip", Swarm::Pressure),
    store("open-segments-not-counted", Swarm::Pressure),
    store("moved-beside-a-count-is-counted", Swarm::ManyVolumes),
    store("failed-record-not-told", Swarm::PowerCuts),
    store("fold-in-one-step", Swarm::Pressure),
    store("fold-goes-on-behind-where-it-stopped", Swarm::Pressure),
    store("newer-half-of-the-ring-forgotten", Swarm::Damage),
    store("state-ahead-counts", Swarm::PowerCuts),
    store("records-behind-a-state-ahead-left-out", Swarm::PowerCuts),
    store("refused-copy-ends-the-ring", Swarm::Damage),
    store("holes-of-a-pull-not-counted", Swarm::Holes),
    store("increment-begun-in-one-step", Swarm::Rebuilds),
    store("feeds-of-any-length", Swarm::Rebuilds),
    store("older-copy-of-the-ring-believed", Swarm::Damage),
    store("rolled-back-disk-not-noticed", Swarm::Damage),
    store("mark-of-a-pool-not-compared", Swarm::Damage),
    store("cookie-without-its-mount", Swarm::PowerCuts),
    store("prefetch-of-another-generation", Swarm::Pressure),
    store("listed-read-outlives-its-use", Swarm::Pressure),
    store("moved-block-is-not-verified", Swarm::Damage),
    store("revert-folded-without-a-look-ahead", Swarm::Pressure),
    store("moved-blocks-learned-without-a-look-ahead", Swarm::Pressure),
    store("commit-without-a-look-ahead", Swarm::Pressure),
    store("switch-of-the-ring-not-noted", Swarm::Damage),
    store("note-of-a-switch-that-does-not-count-kept", Swarm::PowerCuts),
    store("generation-of-an-unfinished-state-used-again", Swarm::PowerCuts),
    store("table-of-a-flip-in-one-step", Swarm::Rebuilds),
    store("flip-forgets-what-its-table-lacks", Swarm::Rebuilds),
    store("candidate-forgotten-by-its-class", Swarm::Pressure),
    store("moved-blocks-without-their-names", Swarm::Pressure),
    store("names-not-merged-with-a-commit", Swarm::Pressure),
    store("folded-under-places-of-the-pool", Swarm::Pressure),
    store("base-not-looked-at", Swarm::Pressure),
    store("base-shows-where-a-clone-was-mended", Swarm::Damage),
    store("base-without-its-snapshot-not-scrubbed", Swarm::Damage),
    store("bases-forgotten-by-clean-up", Swarm::Pressure),
    store("bases-forgotten-at-a-flip", Swarm::Pressure),
    store("deleted-with-what-clones-show", Swarm::Pressure),
    store("bases-not-recorded-with-their-segments", Swarm::Pressure),
    store("base-forgotten-by-a-commit-under-way", Swarm::Pressure),
    store("base-recorded-apart-from-its-clone", Swarm::Pressure),
    store("base-given-up-before-its-clone-is-recorded", Swarm::Pressure),
    mirror("promoted-without-a-claim", Swarm::Mirrors).like("promoted-without-a-claim"),
    mirror("claim-not-recorded-by-the-yielder", Swarm::Mirrors)
        .like("claim-not-recorded-by-the-yielder"),
    mirror("own-claim-kept-while-yielding", Swarm::Mirrors).like("own-claim-kept-while-yielding"),
    mirror("claimed-point-not-compared", Swarm::Failovers).like("claimed-point-not-compared"),
    mirror("promoted-without-a-revert", Swarm::Failovers).like("promoted-without-a-revert"),
    mirror("in-flight-of-the-record-believed", Swarm::Restored)
        .like("in-flight-of-the-record-believed"),
    mirror("fed-under-an-old-epoch", Swarm::Failovers).like("fed-under-an-old-epoch"),
    mirror("fenced-after-the-final-point", Swarm::Failovers).like("fenced-after-the-final-point"),
    mirror("complete-before-all-members-are-cut", Swarm::Failovers)
        .like("complete-before-all-members-are-cut"),
    mirror("unpinned-before-the-peer-recorded", Swarm::Failovers)
        .like("unpinned-before-the-peer-recorded"),
    mirror("other-base-without-a-revert", Swarm::Failovers).like("other-base-without-a-revert"),
    mirror("reverted-under-an-order", Swarm::Failovers).like("reverted-under-an-order"),
    mirror("promoted-under-an-order", Swarm::Failovers).like("promoted-under-an-order"),
    mirror("role-of-restored-records-believed", Swarm::Restored)
        .like("role-of-restored-records-believed"),
    mirror("transfer-kept-over-a-recovery", Swarm::Restored).like("transfer-kept-over-a-recovery"),
    mirror("complete-of-restored-records-believed", Swarm::Restored)
        .like("complete-of-restored-records-believed"),
    mirror("generation-not-raised", Swarm::Failovers).like("generation-not-raised"),
    mirror("diverged-not-seen", Swarm::Failovers).like("diverged-not-seen"),
    mirror("resync-without-lost", Swarm::Failovers).like("resync-without-lost"),
    mirror("lost-kept-after-the-revert", Swarm::Failovers).like("lost-kept-after-the-revert"),
    mirror("role-told-before-its-pools-have-it", Swarm::Failovers)
        .like("role-told-before-its-pools-have-it"),
    mirror("generation-without-its-cluster", Swarm::Failovers),
    mirror("resync-beside-a-resync", Swarm::Failovers),
    mirror("two-resyncs-wait-for-each-other", Swarm::Failovers),
    mirror("late-orders-not-waited-for", Swarm::Failovers),
    mirror("fed-without-an-order", Swarm::Failovers),
    mirror("sum-not-checked-when-fed", Swarm::Failovers),
    mirror("cursor-above-stable", Swarm::Failovers),
    mirror("size-after-the-slots", Swarm::Failovers),
    mirror("cursor-of-another-point-used", Swarm::Failovers),
    mirror("delete-of-a-copy-deletes", Swarm::Failovers),
    mirror("disable-of-a-copy-ends-it", Swarm::Failovers),
    mirror("taken-over-before-its-final-point", Swarm::Failovers),
    mirror("sync-time-is-the-arrival", Swarm::Failovers),
    mirror("idle-by-the-bare-lsn", Swarm::Failovers),
    mirror("point-id-drawn-twice", Swarm::Failovers),
    mirror("diverged-without-a-final-point", Swarm::Failovers),
    mirror("diverged-before-it-is-sure", Swarm::Failovers),
    mirror("final-point-not-cut-again-where-it-is-ahead", Swarm::Failovers),
    mirror("former-final-point-believed", Swarm::Restored),
    mirror("dropped-point-waited-for", Swarm::Restored),
    mirror("dropped-before-its-pools-have-the-role", Swarm::Restored),
    mirror("resync-of-the-peer-waited-for", Swarm::Failovers),
    mirror("diverged-peer-waited-for", Swarm::Failovers),
    mirror("stream-begins-behind-what-its-target-has", Swarm::Restored),
    mirror("yield-of-another-claim-believed", Swarm::Mirrors),
    mirror("generation-without-its-claim", Swarm::Failovers),
    mirror("stream-without-a-token", Swarm::Mirrors),
    mirror("slots-taken-back-by-a-stream", Swarm::Failovers),
    mirror("silence-of-the-own-mirror-taken-for-the-peers", Swarm::Mirrors),
    mirror("dropped-before-it-is-given-up", Swarm::Failovers),
    mirror("word-of-before-another-life-believed", Swarm::Failovers),
    mirror("late-word-of-a-former-life-believed", Swarm::Failovers),
    mirror("cut-before-it-is-stable", Swarm::Failovers),
    mirror("flush-of-a-transfer-not-waited-for", Swarm::Copies),
    mirror("slots-written-under-an-ended-order", Swarm::Copies),
    mirror("place-of-another-transfer-kept", Swarm::Copies),
    mirror("copy-not-asked-again", Swarm::Copies),
    mirror("point-behind-the-final-one-kept", Swarm::Disasters),
    mirror("final-point-kept-over-a-recovery", Swarm::Restored),
    mirror("joiner-counted-complete", Swarm::Mirrors),
    mirror("orphan-emptied-before-it-is-settled", Swarm::Orchestrators),
    mirror("side-that-diverged-not-ended", Swarm::Orchestrators),
    // Where all that this forced change asks for has answered, a target can open without it.
    model("forced-without-old"),
    model("forced-without-quorum"),
    model("fenced-at-promise"),
    model("lease-not-waited-when-gone"),
    // The first known list is written whole by the control plane; no unexpected peer ever joins it.
    model("formation-open"),
];

/// Rules of the documents whose features do not exist yet.
pub const NOT_BUILT: &[(&str, &str)] = &[];

/// Seed or test that has caught a defect before. It is tried first, as it takes seconds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Known {
    Seed {
        swarm: Swarm,
        seed: u64,
    },
    /// A test of the crates themselves: module and test.
    Test {
        module: String,
        test: String,
    },
}

/// The catch of each defect at the last `cargo xtask mutants --record`. A defect whose catch fails is
/// hunted anew.
const CATCHES: &str = include_str!("../mutants.txt");

/// The known catches of a defect.
pub fn known(name: &str) -> Vec<Known> {
    parse(CATCHES).filter(|(of, _)| *of == name).map(|(_, known)| known).collect()
}

fn parse(text: &str) -> impl Iterator<Item = (&str, Known)> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut words = line.split_whitespace();
        let (name, how, place, what) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let known = match how {
            "seed" => Known::Seed { swarm: Swarm::named(place)?, seed: what.parse().ok()? },
            "test" => Known::Test { module: place.into(), test: what.into() },
            _ => return None,
        };
        Some((name, known))
    })
}

/// The line that [`known`] reads.
pub fn line(name: &str, known: &Known) -> String {
    match known {
        Known::Seed { swarm, seed } => format!("{name} seed {} {seed}", swarm.name()),
        Known::Test { module, test } => format!("{name} test {module} {test}"),
    }
}

/// The first row of the table that `docs/proof.md` has of the named mutants.
const TABLE: &str = "| mutant | caught by | invariant |\n";
/// Characters of a test's name that its row has at least: long names are cut.
const SHOWN_CHARACTERS: usize = 30;

/// Returns where the table of mutants in `docs/proof.md` does not say what is recorded. The program asks it
/// itself: tests of this crate are built without the feature that has mutants.
pub fn disagreements() -> Vec<String> {
    let document = include_str!("../../../docs/proof.md");
    let table = document.split_once(TABLE).map_or("", |(_, table)| table);
    let row = |line: &'static str| line.strip_prefix("| `")?.split_once("` | ");
    let rows: Vec<(&str, &str)> = table.lines().skip(1).map_while(row).collect();
    let built: Vec<&Defect> = ALL.iter().filter(|defect| defect.book != Book::Model).collect();
    let mut found = Vec::new();
    for defect in &built {
        let name = defect.name;
        let Some((_, caught)) = rows.iter().find(|(row, _)| *row == name) else {
            found.push(format!("{name} has no row"));
            continue;
        };
        let recorded = known(name).into_iter().map(|known| match known {
            Known::Seed { swarm, seed } => format!("`--swarm {} --seed {seed}`", swarm.name()),
            Known::Test { module, test } => {
                let shown: String = test.chars().take(SHOWN_CHARACTERS).collect();
                format!("test `{module}`: {shown}")
            }
        });
        let said = recorded.chain(defect.like.map(|like| format!("`model --mutant {like}`")));
        let missing = said.filter(|said| !caught.contains(said));
        found.extend(missing.map(|said| format!("{name}: {said} is not in its row: {caught}")));
    }
    if rows.len() != built.len() {
        found.push(format!("{} rows for {} mutants", rows.len(), built.len()));
    }
    let unknown = rows.iter().filter(|(row, _)| !built.iter().any(|defect| defect.name == *row));
    found.extend(unknown.map(|(row, _)| format!("{row} is no mutant")));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_catches_are_understood_and_name_defects_of_the_list() {
        let lines = CATCHES.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
        assert_eq!(lines.clone().count(), parse(CATCHES).count());
        for (written, (name, known)) in lines.zip(parse(CATCHES)) {
            assert_eq!(written, line(name, &known));
            assert!(ALL.iter().any(|defect| defect.name == name), "{name}");
        }
    }

    #[test]
    fn each_like_is_a_mutant_of_the_model() {
        for like in ALL.iter().filter_map(|defect| defect.like) {
            assert!(quoin_model::mutant_names().any(|name| name == like), "{like}");
        }
    }
}
