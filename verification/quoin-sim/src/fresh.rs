//! Seeds that were never run before, over several swarms and all cores.
//!
//! A seed that was run before proves nothing new. The seeds follow from one base, which is drawn
//! by the operating system and printed, so that a run can be repeated whole.

use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::kept::KeptSeed;
use crate::random::Random;
use crate::{RunOptions, StoreKind, Summary, Swarm, run_many};

/// The seeds of one run.
#[derive(Clone, Debug)]
pub struct Fresh {
    pub base: u64,
    pub count: u64,
    /// The swarms take turns.
    pub swarms: Vec<Swarm>,
    pub store: StoreKind,
}

/// A base that the operating system drew.
pub fn draw_base() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

impl Fresh {
    /// The seed of one turn: 32 bits, so that it can be typed.
    fn drawn(&self, turn: u64) -> (Swarm, u64) {
        let swarms = self.swarms.len() as u64;
        let swarm = self.swarms[usize::try_from(turn % swarms).expect("an index of a list")];
        (swarm, Random::new(self.base.wrapping_add(turn)).draw() >> 32)
    }

    /// Runs all seeds on `threads` threads. `found` is called with each seed that found something,
    /// as soon as it did, and `ran` after each seed with the number of seeds that ran.
    pub fn run(
        &self,
        threads: usize,
        found: impl Fn(&KeptSeed) + Sync,
        ran: impl Fn(u64) + Sync,
    ) -> Summary {
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let all = Mutex::new(Summary::default());
        let work = || {
            loop {
                let turn = next.fetch_add(1, Ordering::Relaxed);
                if turn >= self.count {
                    return;
                }
                let (swarm, seed) = self.drawn(turn);
                let options = RunOptions { swarm, store: self.store, ..RunOptions::default() };
                let one = run_many(seed, 1, options, |_, report| {
                    let Some(violation) = &report.violation else { return };
                    let finding = format!("{}: {}", violation.rule, violation.detail);
                    found(&KeptSeed { store: self.store, swarm, seed, finding });
                });
                let mut all = all.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                // The CPU time of the process counts the other threads as well.
                all.merge(Summary { cpu: one.cpu / u32::try_from(threads).unwrap_or(1), ..one });
                ran(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh(base: u64, count: u64) -> Fresh {
        Fresh { base, count, swarms: Swarm::ALL.to_vec(), store: StoreKind::Model }
    }

    #[test]
    fn a_base_gives_the_same_seeds_again_and_another_base_gives_others() {
        let drawn =
            |base| -> Vec<_> { (0..100).map(|turn| fresh(base, 100).drawn(turn)).collect() };
        assert_eq!(drawn(7), drawn(7));
        let others = drawn(1 << 40);
        assert!(drawn(7).iter().all(|seed| !others.contains(seed)));
    }

    #[test]
    fn all_swarms_take_turns() {
        let turns = Swarm::ALL.len() as u64;
        let swarms: Vec<_> = (0..turns).map(|turn| fresh(1, turns).drawn(turn).0).collect();
        assert_eq!(swarms, Swarm::ALL);
    }

    #[test]
    fn as_many_seeds_run_as_were_asked_for_whatever_the_number_of_threads() {
        for threads in [1, 3] {
            let counts = Mutex::new(Vec::new());
            let run = fresh(5, 4).run(threads, |_| {}, |ran| counts.lock().unwrap().push(ran));
            let mut counts = counts.into_inner().unwrap();
            counts.sort_unstable();
            assert_eq!(counts, [1, 2, 3, 4]);
            assert_eq!(run.stats.seeds, 4);
        }
    }

    #[test]
    fn two_bases_of_the_operating_system_differ() {
        assert_ne!(draw_base().unwrap(), draw_base().unwrap());
    }
}
