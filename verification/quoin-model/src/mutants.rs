//! The rules of the protocol, each as a switch that breaks it.

use crate::bounds::Bounds;
use crate::history::EMPTY;
use crate::state::{JOINT, REPLICAS, SWAP_DONE, State, count, members};

macro_rules! mutants {
    ($($name:ident, $text:literal, $breaks:literal;)*) => {
        /// A broken rule. The names are those of the list in `docs/proof.md`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Mutant { $(#[doc = $breaks] $name,)* }

        impl Mutant {
    /// Returns true if it lets an attempt do harm without CF promises.
    pub(crate) fn gives_power(self) -> bool {
        matches!(
            self,
            Mutant::ReadNotHeld
                | Mutant::DroppedCounted
                | Mutant::EqualEpochAccepted
                | Mutant::EpochReused
                | Mutant::LeaseFromReceipt
                | Mutant::LeaseForgottenByRestart
                | Mutant::LeaseForgottenByOpen
                | Mutant::AckWithoutLease
                | Mutant::DropBelowCf
                | Mutant::FencedAtPromise
                | Mutant::LeaseNotWaitedWhenGone
        )
    }

            /// Every mutant that the model can express.
            pub const ALL: &'static [Mutant] = &[$(Mutant::$name,)*];

            /// The name on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Mutant::$name => $text,)* }
            }

            /// Description of the broken rule, in a line.
            pub fn breaks(self) -> &'static str {
                match self { $(Mutant::$name => $breaks,)* }
            }
        }
    };
}

mutants! {
    ReadNotHeld, "read-not-held", "a read shows what commit has not reached";
    ViewOutOfPosition, "view-out-of-position", "Views are left out of the position";
    DroppedCounted, "dropped-counted", "acknowledgements of dropped and rebuilding replicas count";
    NoContinuousRule, "no-continuous-rule", "an open does not ask who kept its cache";
    OldViewTeaches, "old-view-teaches", "a View met while catching up counts as one of this session";
    EqualEpochAccepted, "equal-epoch-accepted", "an equal epoch of another incarnation is accepted";
    EpochReused, "epoch-reused", "a restarted target uses its old epoch again";
    LeaseFromReceipt, "lease-from-receipt", "the target counts its lease from the answer's receipt";
    LeaseForgottenByRestart, "lease-forgotten-by-restart", "a restarted replica waits out no lease";
    LeaseForgottenByOpen, "lease-forgotten-by-open", "a further Open forgets the lease of another";
    AckWithoutLease, "ack-without-lease", "replies are sent without a live lease";
    IncrementBeforeFlip, "increment-before-flip", "an increment is visible before the flip";
    CutBelowStable, "cut-below-stable", "a truncation below stable is executed";
    FoldAboveStable, "fold-above-stable", "the base is folded above stable";
    SwapBeforeDurable, "swap-before-durable", "the compare-and-swap is sent before the joint View is durable";
    JointDropped, "joint-dropped", "the joint rule ends on an unknown outcome";
    JointNotJudged, "joint-not-judged", "an open that finds a joint View judges by the record's rule alone";
    RetiredAdmitted, "retired-admitted", "a retired GUID is admitted as known";
    FormationOpen, "formation-open", "an empty stranger with quorum on is taken for known";
    KnownAboveRf, "known-above-rf", "the known list grows beyond RF";
    SyncRetried, "sync-retried", "a failed sync is tried again and believed";
    FlushAtApplied, "flush-at-applied", "a flush is answered when applied";
    DropBelowCf, "drop-below-cf", "the window drops members below CF";
    CloseMakesContinuous, "close-makes-continuous", "a close sets the continuous flag";
    ForcedWithoutOld, "forced-without-old", "a forced change keeps no old membership";
    ForcedWithoutQuorum, "forced-without-quorum", "a forced open judges by the old rule, but not by its quorum";
    FencedAtPromise, "fenced-at-promise", "a dropped member counts as fenced at its promise";
    LeaseNotWaitedWhenGone, "lease-not-waited-when-gone", "no lease is waited out after \"proven gone\"";
    CannotGiveUp, "cannot-give-up", "a joint change cannot be given up";
    StuckView, "stuck-view", "no second View can pass one that cannot become active";
    OldCopyChanged, "old-copy-changed", "a newcomer is taken off a record that is an old copy";
    RollbackIgnored, "rollback-ignored", "a newer membership on replicas is ignored";
    ReadAtCommitUnderMedia, "read-at-commit-under-media", "durability media reads at commit";
    ForeignActivation, "foreign-activation", "a View is activated by a set that is not its own";
    GuidBornTwice, "guid-born-twice", "a pool creates a known GUID a second time";
    QuorumOffCounted, "quorum-off-counted", "a quorum-off replica counts in an open";
}

impl Mutant {
    /// The smallest world that is known to show it.
    pub fn bounds(self) -> Bounds {
        let small = Bounds::GOAL.attempts(2).writes(1).flushes(0).power_cuts(0).views(0);
        match self {
            Mutant::ViewOutOfPosition => small.attempts(3),
            Mutant::DroppedCounted => small.views(1).power_cuts(1),
            Mutant::RetiredAdmitted => small.replace(1),
            Mutant::FormationOpen => small.replace(1),
            Mutant::KnownAboveRf | Mutant::SwapBeforeDurable => small.attempts(1).add(1),
            Mutant::JointDropped => small.replace(1).views(1),
            Mutant::RollbackIgnored | Mutant::JointNotJudged => {
                small.attempts(2).replace(1).rollbacks(1)
            }
            Mutant::OldCopyChanged => small.rf(1, 1).replace(1).rollbacks(1).drops(1),
            Mutant::ForcedWithoutQuorum => small.attempts(3).forced(1),
            Mutant::ForcedWithoutOld => small.attempts(3).forced(1),
            Mutant::FencedAtPromise | Mutant::LeaseNotWaitedWhenGone => small.attempts(3).forced(1),
            Mutant::DropBelowCf | Mutant::ForeignActivation => small.views(1),
            Mutant::IncrementBeforeFlip => small.views(1),
            Mutant::NoContinuousRule | Mutant::LeaseForgottenByRestart => small.power_cuts(1),
            Mutant::EqualEpochAccepted => small.attempts(3).rollbacks(1),
            Mutant::CutBelowStable => small.flushes(1).damages(1).lying(),
            Mutant::SyncRetried => small.flushes(1).power_cuts(1).sync_failures(1),
            Mutant::FlushAtApplied => small.flushes(1).power_cuts(1),
            Mutant::CloseMakesContinuous => small.power_cuts(1).closes(1),
            Mutant::OldViewTeaches | Mutant::QuorumOffCounted => small.damages(1),
            Mutant::GuidBornTwice => small.deaths(1),
            Mutant::ReadAtCommitUnderMedia => small.power_cuts(1).media(),
            Mutant::CannotGiveUp => small.attempts(1).add(1).deaths(1),
            Mutant::StuckView => small.attempts(1).views(2).deaths(1),
            _ => small,
        }
    }

    /// For rules of progress: a state from which a write must be able to be acknowledged.
    pub fn stuck(self) -> Option<fn(&State) -> bool> {
        match self {
            // The newcomer without which CF is not found is gone.
            Mutant::CannotGiveUp => Some(|s| {
                let first = &s.attempts[0];
                let view = first.newest_view().copied().unwrap_or_default();
                let gone = members(view.in_sync).any(|r| s.replicas[r].gone == 1);
                first.change.stage == JOINT && count(view.in_sync) == 3 && gone && s.owed == EMPTY
            }),
            // A member without which the pending View cannot become active is gone.
            Mutant::StuckView => Some(|s| {
                let first = &s.attempts[0];
                let view = first.newest_view().copied().unwrap_or_default();
                let lacks =
                    |r: usize| s.replicas[r].gone == 1 && first.links[r].durable < first.last();
                let gone = members(view.in_sync).any(lacks);
                let pending = first.pending_views().next().is_some();
                pending && first.length == 2 && count(view.in_sync) == 2 && gone
            }),
            _ => None,
        }
    }

    /// A state on the way to the harm, for mutants whose harm lies deep: the search goes to the
    /// nearest such state first and on from there.
    pub fn way_point(self) -> Option<fn(&State) -> bool> {
        match self {
            Mutant::JointDropped => Some(|s| s.attempts[0].change.stage == SWAP_DONE),
            Mutant::RetiredAdmitted => Some(|s| s.record.retired != 0),
            Mutant::RollbackIgnored => Some(|s| s.record.retired != 0 && s.attempts[0].active == 3),
            Mutant::JointNotJudged => Some(|s| {
                let first = &s.attempts[0];
                let newest = |r: &usize| first.links[*r].applied == 3;
                let mut newcomers = (0..REPLICAS).filter(|r| s.replicas[*r].newcomer == 1);
                s.record.retired != 0 && first.active == 2 && newcomers.any(|r| newest(&r))
            }),
            Mutant::DroppedCounted => Some(|s| {
                let first = &s.attempts[0];
                first.active == 2 && count(first.entries[1].in_sync) == 2
            }),
            _ => None,
        }
    }

    pub fn named(name: &str) -> Option<Mutant> {
        Mutant::ALL.iter().copied().find(|mutant| mutant.name() == name)
    }
}
