//! Counters of a run, or of many.

use std::fmt;
use std::time::Duration;

use crate::coverage::Coverage;
use crate::disk::DiskCounts;
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

/// A group of counters, which are added up over many runs.
macro_rules! counters {
    ($(#[$about:meta])* $group:ident { $($(#[$each:meta])* $name:ident,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $group {
            $($(#[$each])* pub $name: u64,)+
        }

        impl $group {
            pub fn merge(&mut self, other: &Self) {
                $(self.$name += other.$name;)+
            }
        }
    };
}

counters! {
    /// Counters of the network.
    MessageCounts {
        sent,
        /// Delivered after one that was sent later by the same process to another one.
        reordered,
        lost,
        /// Connections cut in the middle of a frame.
        frames_cut,
    }
}

counters! {
    /// Operations of clients.
    IoCounts {
        /// Answered operations that a checker has seen.
        checked,
        open,
        failed,
        /// Blocks whose history the checker could neither prove nor refute.
        undecided,
    }
}

counters! {
    OpenCounts {
        /// Epochs that were granted.
        epochs,
        servings,
        /// Opens that reported that unflushed data may be lost.
        tails_lost,
    }
}

counters! {
    /// Counters of the controllers.
    ControlCounts {
        /// Fences that were delivered to pools.
        fences,
        /// Fences of a host's network.
        network_fences,
        terms,
        /// Terms of a number that another controller began at the same time.
        rival_terms,
        terms_refused,
        controllers_ended,
    }
}

counters! {
    ReplicaCounts {
        rebuilds,
        drops,
        repairs,
        replacements,
    }
}

counters! {
    /// Changes that operators asked for.
    OperatorCounts {
        scale_ups,
        moves,
        removals,
        cf_changes,
        taken_back,
        /// Times that a person went on with the replicas that were left.
        recoveries,
        /// Times that a volume was grown.
        growths,
        snapshots,
        /// Blocks that were trimmed while a replica was away.
        holes,
        /// Times that the durability was changed.
        durability_changes,
        reverts,
        /// Points over several volumes that counted.
        points,
        /// Snapshots that were read part by part.
        pulls,
        /// Changes of membership that targets made, and gave up.
        changes_made,
        changes_given_up,
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub seeds: u64,
    pub simulated_ns: u64,
    pub events: u64,
    pub messages: MessageCounts,
    pub ios: IoCounts,
    pub opens: OpenCounts,
    pub control: ControlCounts,
    pub replicas: ReplicaCounts,
    pub operators: OperatorCounts,
    pub disks: DiskCounts,
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
        self.messages.merge(&other.messages);
        self.ios.merge(&other.ios);
        self.opens.merge(&other.opens);
        self.control.merge(&other.control);
        self.replicas.merge(&other.replicas);
        self.operators.merge(&other.operators);
        self.disks.merge(&other.disks);
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
        let rate = s.ios.checked as f64 / self.cpu.as_secs_f64().max(1e-9);
        let hours = s.simulated_ns as f64 / 3.6e12;
        writeln!(f, "seeds                        {:>12}", s.seeds)?;
        writeln!(f, "simulated hours              {hours:>12.2}")?;
        writeln!(f, "events                       {:>12}", s.events)?;
        writeln!(f, "IOs checked                  {:>12}", s.ios.checked)?;
        if let Some(least) = self.ios_checked_least {
            writeln!(f, "least of any seed            {least:>12}")?;
        }
        writeln!(f, "IOs left open / failed       {:>12} / {}", s.ios.open, s.ios.failed)?;
        writeln!(f, "checked IOs per CPU second   {rate:>12.0}")?;
        writeln!(f, "epochs granted / served      {:>12} / {}", s.opens.epochs, s.opens.servings)?;
        writeln!(f, "epochs taken back, as heard  {:>12}", s.control.fences)?;
        writeln!(f, "networks fenced              {:>12}", s.control.network_fences)?;
        writeln!(
            f,
            "terms begun / by two at once {:>12} / {}",
            s.control.terms, s.control.rival_terms
        )?;
        writeln!(f, "grants of former terms       {:>12}", s.control.terms_refused)?;
        writeln!(f, "former controllers ended     {:>12}", s.control.controllers_ended)?;
        writeln!(f, "unflushed tails lost         {:>12}", s.opens.tails_lost)?;
        writeln!(
            f,
            "drops / rebuilds / replaced  {:>12} / {} / {}",
            s.replicas.drops, s.replicas.rebuilds, s.replicas.replacements
        )?;
        writeln!(
            f,
            "scaled up / taken back / moved / removed / CF / grown  {:>7} / {} / {} / {} / {} / {}",
            s.operators.scale_ups,
            s.operators.taken_back,
            s.operators.moves,
            s.operators.removals,
            s.operators.cf_changes,
            s.operators.growths
        )?;
        writeln!(f, "recovered by hand            {:>12}", s.operators.recoveries)?;
        writeln!(f, "snapshots made or deleted    {:>12}", s.operators.snapshots)?;
        let durability_changes = s.operators.durability_changes;
        writeln!(f, "durability changed           {durability_changes:>12}")?;
        writeln!(f, "reverts                      {:>12}", s.operators.reverts)?;
        writeln!(f, "points over several volumes  {:>12}", s.operators.points)?;
        writeln!(f, "snapshots read in parts      {:>12}", s.operators.pulls)?;
        writeln!(
            f,
            "changes made / given up      {:>12} / {}",
            s.operators.changes_made, s.operators.changes_given_up
        )?;
        writeln!(f, "bad blocks repaired          {:>12}", s.replicas.repairs)?;
        writeln!(f, "messages                     {:>12}", s.messages.sent)?;
        writeln!(f, "connections cut in a frame   {:>12}", s.messages.frames_cut)?;
        writeln!(f, "faults injected:")?;
        for kind in FaultKind::ALL {
            writeln!(f, "  {:<40} {:>8}", kind.name(), s.faults.of(*kind))?;
        }
        writeln!(f, "  {:<26} {:>12}", "messages out of order", s.messages.reordered)?;
        writeln!(f, "  {:<26} {:>12}", "messages lost", s.messages.lost)?;
        writeln!(f, "  {:<26} {:>12}", "unsynced writes lost", s.disks.sectors_lost)?;
        writeln!(f, "  {:<26} {:>12}", "pages torn", s.disks.pages_torn)?;
        writeln!(f, "  {:<26} {:>12}", "reads that were waited for", s.disks.reads_waited_for)?;
        let waited = s.disks.changes_waited;
        writeln!(f, "  {:<26} {waited:>12}", "increments that waited")?;
        writeln!(f, "  {:<26} {:>12}", "disk errors returned", s.disks.errors)?;
        if s.ios.undecided > 0 {
            writeln!(f, "blocks undecided             {:>12}", s.ios.undecided)?;
        }
        writeln!(f, "violations                   {:>12}", self.violations.len())?;
        for violation in self.violations.iter().take(10) {
            let first = violation.detail.lines().next().unwrap_or_default();
            writeln!(f, "  seed {}: {}: {first}", violation.seed, violation.rule)?;
        }
        Ok(())
    }
}
