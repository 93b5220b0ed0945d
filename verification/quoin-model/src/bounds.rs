//! Sizes of worlds, and the worlds that are explored.

use crate::mutants::Mutant;
use crate::state::Budget;

/// World to explore.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    pub name: &'static str,
    pub rf: u8,
    pub cf: u8,
    /// Replicas that may become known by a change of membership.
    pub newcomers: u8,
    /// Attempts to open, each an epoch of its own; several are alive at once.
    pub attempts: u8,
    pub budget: Budget,
    pub durability_media: bool,
    /// Disks may lose what they called durable, so only named rules are checked, not survival.
    pub lying_disks: bool,
    /// Which changes of membership are tried.
    pub changes: Changes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    pub replace: bool,
    /// A newcomer beside the others: RF + 1, CF by the formula.
    pub add: bool,
    /// Two newcomers at once: RF + 2, CF by the formula.
    pub pair: bool,
    /// RF − 1, CF by the formula.
    pub remove: bool,
    /// Another CF for the same replicas.
    pub factor: bool,
}

const NOTHING: Budget = Budget {
    writes: 0,
    flushes: 0,
    power_cuts: 0,
    views: 0,
    changes: 0,
    closes: 0,
    rollbacks: 0,
    deaths: 0,
    damages: 0,
    sync_failures: 0,
    forced: 0,
    forced_consents: 0,
    drops: 0,
};

impl Bounds {
    /// RF 3, CF 2, three epochs, two writes, a flush, a power cut of any set of hosts.
    pub const GOAL: Bounds = Bounds {
        name: "goal",
        rf: 3,
        cf: 2,
        newcomers: 0,
        attempts: 3,
        budget: Budget { writes: 2, flushes: 1, power_cuts: 1, ..NOTHING },
        durability_media: false,
        lying_disks: false,
        changes: Changes { replace: false, add: false, pair: false, remove: false, factor: false },
    };

    pub const fn replicas(&self) -> usize {
        (self.rf + self.newcomers) as usize
    }

    pub const fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    pub const fn rf(mut self, rf: u8, cf: u8) -> Self {
        self.rf = rf;
        self.cf = cf;
        self
    }

    pub const fn attempts(mut self, attempts: u8) -> Self {
        self.attempts = attempts;
        self
    }

    pub const fn writes(mut self, writes: u8) -> Self {
        self.budget.writes = writes;
        self
    }

    pub const fn flushes(mut self, flushes: u8) -> Self {
        self.budget.flushes = flushes;
        self
    }

    pub const fn views(mut self, views: u8) -> Self {
        self.budget.views = views;
        self
    }

    pub const fn power_cuts(mut self, power_cuts: u8) -> Self {
        self.budget.power_cuts = power_cuts;
        self
    }

    pub const fn closes(mut self, closes: u8) -> Self {
        self.budget.closes = closes;
        self
    }

    pub const fn deaths(mut self, deaths: u8) -> Self {
        self.budget.deaths = deaths;
        self
    }

    pub const fn damages(mut self, damages: u8) -> Self {
        self.budget.damages = damages;
        self
    }

    pub const fn sync_failures(mut self, sync_failures: u8) -> Self {
        self.budget.sync_failures = sync_failures;
        self
    }

    pub const fn rollbacks(mut self, rollbacks: u8) -> Self {
        self.budget.rollbacks = rollbacks;
        self
    }

    pub const fn forced(mut self, forced: u8) -> Self {
        self.budget.forced = forced;
        self.budget.forced_consents = forced;
        self
    }

    pub const fn drops(mut self, drops: u8) -> Self {
        self.budget.drops = drops;
        self
    }

    pub const fn media(mut self) -> Self {
        self.durability_media = true;
        self
    }

    pub const fn lying(mut self) -> Self {
        self.lying_disks = true;
        self
    }

    pub const fn replace(mut self, changes: u8) -> Self {
        self.newcomers = 1;
        self.budget.changes = changes;
        self.changes.replace = true;
        self
    }

    pub const fn add(mut self, changes: u8) -> Self {
        self.newcomers = 1;
        self.budget.changes = changes;
        self.changes.add = true;
        self
    }

    pub const fn pair(mut self, changes: u8) -> Self {
        self.newcomers = 2;
        self.budget.changes = changes;
        self.changes.pair = true;
        self
    }

    pub const fn factor(mut self, changes: u8) -> Self {
        self.budget.changes = changes;
        self.changes.factor = true;
        self
    }

    pub const fn remove(mut self, changes: u8) -> Self {
        self.budget.changes = changes;
        self.changes.remove = true;
        self
    }
}

impl std::fmt::Display for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RF {} CF {}, {} epochs", self.rf, self.cf, self.attempts)?;
        let budget = &self.budget;
        for (n, what) in [
            (budget.writes, "writes"),
            (budget.flushes, "flushes"),
            (budget.power_cuts, "power cuts"),
            (budget.views, "drops/returns"),
            (budget.changes, "membership changes"),
            (budget.closes, "closes"),
            (budget.rollbacks, "control-plane rollbacks"),
            (budget.deaths, "deaths"),
            (budget.damages, if self.lying_disks { "disk rollbacks" } else { "damages" }),
            (budget.sync_failures, "failed syncs"),
            (budget.forced, "forced changes"),
            (budget.drops, "newcomers taken back"),
        ] {
            if n > 0 {
                write!(f, ", {n} {what}")?;
            }
        }
        let changes = self.changes;
        for (on, what) in [
            (changes.replace, "replace"),
            (changes.add, "add"),
            (changes.pair, "add two"),
            (changes.remove, "remove"),
            (changes.factor, "CF"),
        ] {
            if on {
                write!(f, " ({what})")?;
            }
        }
        if self.durability_media { write!(f, ", durability media") } else { Ok(()) }
    }
}

/// World in which the membership of three changes and no host loses its power.
const STEADY: Bounds = Bounds::GOAL.attempts(2).writes(1).flushes(0).power_cuts(0);

/// Worlds of an ordinary run, those first that end soonest.
pub const WORLDS: &[Bounds] = &[
    Bounds::GOAL.attempts(2).writes(1).named("two-epochs"),
    Bounds::GOAL,
    Bounds::GOAL.rf(2, 2).named("rf2"),
    Bounds::GOAL.rf(2, 1).named("rf2-cf1"),
    Bounds::GOAL.rf(3, 1).attempts(2).named("rf3-cf1"),
    Bounds::GOAL.rf(4, 3).attempts(2).writes(1).named("rf4"),
    Bounds::GOAL.attempts(2).media().named("media"),
    Bounds::GOAL.attempts(2).writes(1).power_cuts(2).named("two-cuts"),
    Bounds::GOAL.attempts(3).writes(1).flushes(0).forced(1).named("forced"),
    STEADY.replace(1).rollbacks(1).named("rollback"),
    Bounds::GOAL.rf(1, 1).attempts(2).writes(1).flushes(0).replace(1).named("move-one"),
    Bounds::GOAL.rf(1, 1).attempts(2).writes(1).flushes(0).pair(1).named("one-to-three"),
    Bounds::GOAL
        .rf(2, 2)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .replace(1)
        .rollbacks(1)
        .named("move-two"),
    Bounds::GOAL
        .rf(2, 2)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .remove(1)
        .rollbacks(1)
        .named("leave-two"),
    Bounds::GOAL
        .rf(1, 1)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .pair(1)
        .rollbacks(1)
        .named("one-to-three-rollback"),
    Bounds::GOAL
        .rf(1, 1)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .replace(1)
        .drops(1)
        .deaths(1)
        .named("move-one-taken-back"),
    Bounds::GOAL
        .rf(1, 1)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .power_cuts(0)
        .pair(2)
        .drops(1)
        .rollbacks(1)
        .named("one-to-three-taken-back"),
    Bounds::GOAL
        .rf(2, 2)
        .attempts(2)
        .writes(1)
        .flushes(0)
        .power_cuts(0)
        .replace(1)
        .drops(1)
        .rollbacks(1)
        .named("move-two-taken-back"),
    Bounds::GOAL.attempts(2).writes(1).flushes(0).factor(1).named("factor"),
    STEADY.factor(1).rollbacks(1).named("factor-rollback"),
    STEADY.rf(2, 2).add(2).remove(2).named("add-and-remove"),
    STEADY.add(1).rollbacks(1).named("add-rollback"),
    STEADY.add(1).flushes(1).named("add-flushed"),
    STEADY.add(1).deaths(1).named("add-death"),
    STEADY.add(1).writes(2).named("add-two-writes"),
    STEADY.replace(1).flushes(1).named("replace-flushed"),
    STEADY.replace(1).deaths(1).named("replace-death"),
    Bounds::GOAL.attempts(2).writes(1).damages(1).named("damage"),
    Bounds::GOAL.attempts(2).writes(1).sync_failures(1).named("sync-failure"),
    Bounds::GOAL.attempts(2).writes(1).deaths(1).views(1).named("death"),
    Bounds::GOAL.attempts(2).writes(1).flushes(0).remove(1).named("remove"),
    Bounds::GOAL.attempts(2).writes(1).flushes(0).add(1).named("add"),
    Bounds::GOAL.attempts(2).writes(1).flushes(0).replace(1).named("replace"),
    Bounds::GOAL.attempts(2).views(1).named("two-epochs-views"),
    Bounds::GOAL.attempts(2).closes(1).named("close"),
];

/// Worlds for `--full`, and for random walks.
pub const LARGE_WORLDS: &[Bounds] = &[
    Bounds::GOAL
        .attempts(2)
        .writes(1)
        .flushes(0)
        .factor(1)
        .rollbacks(1)
        .named("factor-rollback-cut"),
    STEADY.add(1).attempts(3).named("add-three-epochs"),
    STEADY.replace(1).attempts(3).named("replace-three-epochs"),
    STEADY.replace(1).drops(1).named("replace-taken-back"),
    STEADY.replace(1).writes(2).named("replace-two-writes"),
    STEADY.add(2).remove(2).named("three-four-three"),
    Bounds::GOAL.views(1).named("goal-views"),
    Bounds::GOAL.rf(4, 3).named("rf4-goal"),
    Bounds::GOAL.rf(4, 2).power_cuts(2).views(2).named("rf4-cf2"),
    Bounds::GOAL.rf(3, 1).views(1).named("rf3-cf1-goal"),
    Bounds::GOAL.attempts(4).writes(3).flushes(2).power_cuts(2).views(3).closes(1).named("walk"),
];

/// The rules to explore: a world and, perhaps, one rule broken.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub bounds: Bounds,
    pub mutant: Option<Mutant>,
}

impl Model {
    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}
