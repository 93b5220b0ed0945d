//! The real store does what the model does, through crashes at any step.

use crate::common::World;
use quoin_replication::replica::store::StoreError;
use quoin_store::ReplicaPool;
use rand::Rng;

fn seeds() -> std::ops::Range<u64> {
    let count = std::env::var("QUOIN_STORE_SEEDS").ok().and_then(|n| n.parse().ok());
    let first = std::env::var("QUOIN_STORE_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    first..first + count.unwrap_or(40)
}

fn run(seed: u64, steps: u32, pool_bytes: u64) -> World {
    let mut world = World::new(seed, pool_bytes);
    for _ in 0..steps {
        match world.rng.random_range(0..100) {
            0..40 => world.append(),
            40..55 => world.set_stable(),
            55..60 => world.truncate(),
            60..70 => world.begin_sync(),
            70..78 => world.finish_sync(),
            78..90 => {
                let budget = world.rng.random_range(0..4 << 20);
                if world.begun.is_none() || world.rng.random() {
                    match world.pool().background(budget) {
                        Ok(_) | Err(StoreError::Full) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            90..93 => world.check_fetch(),
            93..95 => world.check_pull(),
            95..97 => world.process_crash(),
            97..99 => world.power_cut(),
            _ => world.check(),
        }
    }
    world.check();
    world
}

/// Proves: acknowledged and flushed data survive crashes of processes and of power.
#[test]
fn the_store_equals_the_model_through_crashes_at_any_step() {
    for seed in seeds() {
        println!("seed {seed}");
        run(seed, 400, 32 << 20);
    }
}

#[test]
fn a_pool_that_is_nearly_full_cleans_up_and_never_lies() {
    let mut full = 0;
    for seed in seeds() {
        println!("seed {seed}");
        full += run(seed, 800, 8 << 20).full;
    }
    assert!(full > 0, "the pool was never full: the test is too easy");
}
