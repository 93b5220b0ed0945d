//! Two clusters that mirror one group of two members: every order of writes, points, transfers, words that
//! are late or lost, promotions with and without force, demotions, resyncs, deaths of either brain and
//! restores of its records, within bounds. The rules are those of `docs/mirror.md`.
//!
//! A brain decides from its record, from what its targets say and from the last word of the other side. It
//! changes one record or gives one order a step, so a death between any two of them is a run that goes on
//! later. Content is the set of writes that a view has; a view that is being fed is marked with its transfer.
//!
//! | module | idea |
//! |---|---|
//! | `state` | records, volumes, words |
//! | `step` | what a brain, a target, the link, a caller and a fault do next |
//! | `search` | all states, and whether a mirror is complete again once faults stop |

mod search;
mod state;
mod step;

pub use search::{Explored, search};

macro_rules! broken {
    ($($name:ident, $text:literal, $breaks:literal;)*) => {
        /// A rule of the mirror that is broken.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Broken { $(#[doc = $breaks] $name,)* }

        impl Broken {
            pub const ALL: &'static [Broken] = &[$(Broken::$name,)*];

            /// The name on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Broken::$name => $text,)* }
            }

            /// Description of the broken rule, in a line.
            pub fn breaks(self) -> &'static str {
                match self { $(Broken::$name => $breaks,)* }
            }
        }
    };
}

broken! {
    PromotedWithoutAClaim, "promoted-without-a-claim", "the word \"demoted\" of the other side is enough to promote";
    YieldNotRecorded, "claim-not-recorded-by-the-yielder", "a side yields and does not record it";
    OwnClaimKept, "own-claim-kept-while-yielding", "a side yields though its own claim is the higher one, and goes on with that";
    ClaimedPointNotCompared, "claimed-point-not-compared", "a side yields to a claim that begins at another point than its final one";
    PromotedWithoutARevert, "promoted-without-a-revert", "a copy is promoted as it is";
    InFlightBelieved, "in-flight-of-the-record-believed", "the record alone says whether something was fed beyond the point";
    FedUnderAnOldEpoch, "fed-under-an-old-epoch", "slots of an order that was ended are taken";
    FencedAfterTheFinalPoint, "fenced-after-the-final-point", "a demotion cuts its final point before it fences";
    CompleteBeforeAllAreCut, "complete-before-all-members-are-cut", "a point counts once one member is cut";
    UnpinnedEarly, "unpinned-before-the-peer-recorded", "the primary drops the last common point as it offers the next one";
    OtherBaseWithoutARevert, "other-base-without-a-revert", "a transfer begins on whatever the view shows";
    RevertedUnderAnOrder, "reverted-under-an-order", "a transfer reverts while the former one may still be fed";
    PromotedUnderAnOrder, "promoted-under-an-order", "a promotion ends no order, which the targets that open next have too";
    RestoredRoleBelieved, "role-of-restored-records-believed", "a recovery takes the role of the records, not of the pools";
    TransferKeptOverARecovery, "transfer-kept-over-a-recovery", "a recovery goes on with the transfer of its records";
    CompleteOfRestoredBelieved, "complete-of-restored-records-believed", "a promotion takes the complete point of restored records for the last one";
    GenerationNotRaised, "generation-not-raised", "a promotion goes on in the generation of before";
    DivergedNotSeen, "diverged-not-seen", "a side that wrote behind the fork follows the other chain";
    ResyncWithoutLost, "resync-without-lost", "a resync keeps nothing of what it discards";
    LostKeptAfterTheRevert, "lost-kept-after-the-revert", "a resync reverts first";
    RoleToldBeforeItsPools, "role-told-before-its-pools-have-it", "the other side hears a role that no pool has yet";
}

/// How far a search goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub name: &'static str,
    pub writes: u8,
    /// Points that are cut beside the first one, which both sides hold.
    pub points: u8,
    /// Promotions without and with force.
    pub promotions: u8,
    pub forced: u8,
    pub demotions: u8,
    pub resyncs: u8,
    /// Deaths of either brain that lose what it heard.
    pub deaths: u8,
    /// Restores of the records of each side, followed by a recovery.
    pub restores: [u8; 2],
}

impl std::fmt::Display for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Bounds { writes, points, promotions, forced, demotions, resyncs, deaths, .. } = self;
        write!(
            f,
            "two clusters, writes {writes}, points {points}, promotions {promotions}, forced {forced}, demotions \
             {demotions}, resyncs {resyncs}, deaths {deaths}, restores {}+{}",
            self.restores[0], self.restores[1]
        )
    }
}

const NOTHING: Bounds = Bounds {
    name: "",
    writes: 0,
    points: 0,
    promotions: 0,
    forced: 0,
    demotions: 0,
    resyncs: 0,
    deaths: 0,
    restores: [0, 0],
};

const CYCLE: Bounds = Bounds { writes: 1, points: 3, ..NOTHING };
const PLANNED: Bounds = Bounds { writes: 1, points: 2, promotions: 2, demotions: 1, ..NOTHING };
const FORCED: Bounds =
    Bounds { writes: 1, points: 2, forced: 1, demotions: 1, resyncs: 1, ..NOTHING };

/// Worlds that are visited whole with every run of the model.
pub const WORLDS: &[Bounds] = &[
    Bounds { name: "mirror-cycle", writes: 2, deaths: 2, ..CYCLE },
    Bounds { name: "mirror-restored-copy", writes: 2, restores: [0, 1], ..CYCLE },
    Bounds { name: "mirror-restored-primary", restores: [2, 0], ..CYCLE },
    Bounds { name: "mirror-restored-both", restores: [1, 1], ..CYCLE },
    Bounds { name: "mirror-planned", deaths: 1, ..PLANNED },
    Bounds { name: "mirror-forced", writes: 2, ..FORCED },
    Bounds { name: "mirror-planned-restored-a", points: 1, restores: [1, 0], ..PLANNED },
    Bounds { name: "mirror-planned-restored-b", points: 1, restores: [0, 1], ..PLANNED },
    Bounds { name: "mirror-forced-restored-a", points: 1, restores: [1, 0], ..FORCED },
    Bounds { name: "mirror-forced-restored-b", points: 1, restores: [0, 1], ..FORCED },
];

/// Worlds of a full run.
pub const LARGE_WORLDS: &[Bounds] = &[
    Bounds { name: "mirror-forced-twice-restored-a", restores: [1, 0], ..FORCED },
    Bounds { name: "mirror-forced-twice-restored-b", restores: [0, 1], ..FORCED },
    Bounds { name: "mirror-planned-twice-restored-a", restores: [1, 0], ..PLANNED },
    Bounds { name: "mirror-planned-twice-restored-b", restores: [0, 1], ..PLANNED },
    Bounds { name: "mirror-planned-writes", writes: 2, deaths: 1, ..PLANNED },
    Bounds { name: "mirror-forced-writes", writes: 3, deaths: 1, ..FORCED },
    Bounds { name: "mirror-planned-restored", restores: [1, 1], ..PLANNED },
    Bounds { name: "mirror-forced-restored", restores: [1, 1], ..FORCED },
    Bounds {
        name: "mirror-all",
        forced: 1,
        resyncs: 1,
        writes: 2,
        points: 3,
        restores: [1, 0],
        ..PLANNED
    },
];

impl Bounds {
    /// Returns true for worlds without promotions.
    pub fn is_small(&self) -> bool {
        self.promotions + self.forced == 0
    }
}

impl Broken {
    /// The smallest world that is known to show it.
    pub fn bounds(self) -> Bounds {
        let name = match self {
            Broken::CompleteBeforeAllAreCut | Broken::UnpinnedEarly => "mirror-cycle",
            Broken::FedUnderAnOldEpoch
            | Broken::OtherBaseWithoutARevert
            | Broken::TransferKeptOverARecovery
            | Broken::RevertedUnderAnOrder => "mirror-restored-copy",
            Broken::PromotedWithoutARevert
            | Broken::DivergedNotSeen
            | Broken::ResyncWithoutLost
            | Broken::LostKeptAfterTheRevert => "mirror-forced",
            // These two need a point beside the one that a promotion begins at.
            Broken::InFlightBelieved | Broken::CompleteOfRestoredBelieved => {
                return Bounds { restores: [0, 1], demotions: 0, resyncs: 0, ..FORCED };
            }
            Broken::RestoredRoleBelieved | Broken::RoleToldBeforeItsPools => {
                "mirror-planned-restored-a"
            }
            _ => "mirror-planned",
        };
        let world = WORLDS.iter().find(|world| world.name == name);
        *world.unwrap_or(&WORLDS[0])
    }
}
