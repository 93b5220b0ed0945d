//! What a run, or many, amounted to.

use std::fmt;
use std::time::Duration;

use crate::coverage::Coverage;
use crate::faults::{FaultCounts, FaultKind};
use crate::scaleup::Situations;

/// Why a run is not what the contract promises.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    pub seed: u64,
    /// The invariant or checker.
    pub rule: String,
    pub detail: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub seeds: u64,
    pub simulated_ns: u64,
    pub events: u64,
    pub messages: u64,
    pub messages_reordered: u64,
    pub messages_lost: u64,
    /// Answered operations that a checker has looked at.
    pub ios_checked: u64,
    pub ios_open: u64,
    pub ios_failed: u64,
    pub epochs: u64,
    /// Words of the control plane that epochs were taken back, as pools heard them.
    pub fences: u64,
    pub terms: u64,
    /// Terms of a number that another controller began at the same time.
    pub rival_terms: u64,
    pub terms_refused: u64,
    pub controllers_ended: u64,
    pub servings: u64,
    /// Opens that said that unflushed data may be lost.
    pub tails_lost: u64,
    pub rebuilds: u64,
    pub drops: u64,
    pub repairs: u64,
    pub replacements: u64,
    /// Changes that operators asked for, and changes of membership that were made and given up.
    pub scale_ups: u64,
    pub moves: u64,
    pub removals: u64,
    pub cf_changes: u64,
    pub taken_back: u64,
    /// Times that a person went on with the replicas that were left.
    pub recoveries: u64,
    /// Times that a volume was grown.
    pub growths: u64,
    pub snapshots: u64,
    pub changes: u64,
    pub given_up: u64,
    pub sectors_lost: u64,
    pub pages_torn: u64,
    pub disk_errors: u64,
    /// Blocks whose history the checker could neither prove nor refute.
    pub undecided: u64,
    pub frames_cut: u64,
    pub faults: FaultCounts,
    pub coverage: Coverage,
    /// Situations in which the rules of the scale-up document were held.
    pub situations: Situations,
}

impl Stats {
    pub fn merge(&mut self, other: &Stats) {
        self.seeds += other.seeds;
        self.simulated_ns += other.simulated_ns;
        self.events += other.events;
        self.messages += other.messages;
        self.messages_reordered += other.messages_reordered;
        self.messages_lost += other.messages_lost;
        self.ios_checked += other.ios_checked;
        self.ios_open += other.ios_open;
        self.ios_failed += other.ios_failed;
        self.epochs += other.epochs;
        self.fences += other.fences;
        self.terms += other.terms;
        self.rival_terms += other.rival_terms;
        self.terms_refused += other.terms_refused;
        self.controllers_ended += other.controllers_ended;
        self.servings += other.servings;
        self.tails_lost += other.tails_lost;
        self.rebuilds += other.rebuilds;
        self.drops += other.drops;
        self.repairs += other.repairs;
        self.replacements += other.replacements;
        self.scale_ups += other.scale_ups;
        self.taken_back += other.taken_back;
        self.recoveries += other.recoveries;
        self.moves += other.moves;
        self.removals += other.removals;
        self.cf_changes += other.cf_changes;
        self.growths += other.growths;
        self.snapshots += other.snapshots;
        self.changes += other.changes;
        self.given_up += other.given_up;
        self.sectors_lost += other.sectors_lost;
        self.pages_torn += other.pages_torn;
        self.disk_errors += other.disk_errors;
        self.undecided += other.undecided;
        self.frames_cut += other.frames_cut;
        self.faults.merge(&other.faults);
        self.coverage.merge(&other.coverage);
        self.situations.merge(&other.situations);
    }
}

/// Many runs, with what a person wants to know at the end.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    pub stats: Stats,
    /// The least that any of the seeds checked: a sum hides a seed that hardly ran.
    pub ios_checked_least: Option<u64>,
    pub violations: Vec<Violation>,
    /// CPU time of this process for all of it.
    pub cpu: Duration,
}

impl Summary {
    pub fn merge(&mut self, other: Summary) {
        self.stats.merge(&other.stats);
        let both = self.ios_checked_least.into_iter().chain(other.ios_checked_least);
        self.ios_checked_least = both.min();
        self.violations.extend(other.violations);
        self.cpu += other.cpu;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.stats;
        let rate = s.ios_checked as f64 / self.cpu.as_secs_f64().max(1e-9);
        let hours = s.simulated_ns as f64 / 3.6e12;
        writeln!(f, "seeds                        {:>12}", s.seeds)?;
        writeln!(f, "simulated hours              {hours:>12.2}")?;
        writeln!(f, "events                       {:>12}", s.events)?;
        writeln!(f, "IOs checked                  {:>12}", s.ios_checked)?;
        if let Some(least) = self.ios_checked_least {
            writeln!(f, "least of any seed            {least:>12}")?;
        }
        writeln!(f, "IOs left open / failed       {:>12} / {}", s.ios_open, s.ios_failed)?;
        writeln!(f, "checked IOs per CPU second   {rate:>12.0}")?;
        writeln!(f, "epochs granted / served      {:>12} / {}", s.epochs, s.servings)?;
        writeln!(f, "epochs taken back, as heard  {:>12}", s.fences)?;
        writeln!(f, "terms begun / by two at once {:>12} / {}", s.terms, s.rival_terms)?;
        writeln!(f, "grants of former terms       {:>12}", s.terms_refused)?;
        writeln!(f, "former controllers ended     {:>12}", s.controllers_ended)?;
        writeln!(f, "unflushed tails lost         {:>12}", s.tails_lost)?;
        writeln!(
            f,
            "drops / rebuilds / replaced  {:>12} / {} / {}",
            s.drops, s.rebuilds, s.replacements
        )?;
        writeln!(
            f,
            "scaled up / taken back / moved / removed / CF / grown  {:>7} / {} / {} / {} / {} / {}",
            s.scale_ups, s.taken_back, s.moves, s.removals, s.cf_changes, s.growths
        )?;
        writeln!(f, "recovered by hand            {:>12}", s.recoveries)?;
        writeln!(f, "snapshots made or deleted    {:>12}", s.snapshots)?;
        writeln!(f, "changes made / given up      {:>12} / {}", s.changes, s.given_up)?;
        writeln!(f, "bad blocks repaired          {:>12}", s.repairs)?;
        writeln!(f, "messages                     {:>12}", s.messages)?;
        writeln!(f, "connections cut in a frame   {:>12}", s.frames_cut)?;
        writeln!(f, "faults injected:")?;
        for kind in FaultKind::ALL {
            writeln!(f, "  {:<40} {:>8}", kind.name(), s.faults.of(*kind))?;
        }
        writeln!(f, "  {:<26} {:>12}", "messages out of order", s.messages_reordered)?;
        writeln!(f, "  {:<26} {:>12}", "messages lost", s.messages_lost)?;
        writeln!(f, "  {:<26} {:>12}", "unsynced writes lost", s.sectors_lost)?;
        writeln!(f, "  {:<26} {:>12}", "pages torn", s.pages_torn)?;
        writeln!(f, "  {:<26} {:>12}", "disk errors returned", s.disk_errors)?;
        if s.undecided > 0 {
            writeln!(f, "blocks undecided             {:>12}", s.undecided)?;
        }
        writeln!(f, "violations                   {:>12}", self.violations.len())?;
        for violation in self.violations.iter().take(10) {
            let first = violation.detail.lines().next().unwrap_or_default();
            writeln!(f, "  seed {}: {}: {first}", violation.seed, violation.rule)?;
        }
        Ok(())
    }
}
