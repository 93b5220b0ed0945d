//! Hostile input for everything that reads a network, a disk or a record.
//!
//! A [`Target`] takes any bytes and must return: no panic, no memory without bound, no hang. It
//! asserts everything else that it can check. The same functions are run three ways: by the bounded
//! replay in this crate's tests (the corpus in `fuzz/corpus`, the seeds, some thousand mutations),
//! by `cargo xtask fuzz` (mutations for any length of time; an input that fails is written to a
//! file), and by libFuzzer through the crate in `fuzz/`, guided by coverage.
//!
//! Checksums would keep a fuzzer out of all code behind them, so the targets correct the checksums
//! of changed parts: a peer and a disk can have valid ones too.

mod csi;
mod export;
mod frames;
mod identity;
pub mod mutate;
mod nbd;
mod pool;
mod records;

/// One kind of input.
#[derive(Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    /// Code that reads it.
    pub about: &'static str,
    pub run: fn(&[u8]),
    /// Valid inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Mutations in a bounded replay.
    pub replayed: u32,
}

pub const TARGETS: [Target; 7] = [
    Target {
        name: "frames",
        about: "frames between target and pool, from both sides, the first one included, and of the history socket",
        run: frames::run,
        seeds: frames::seeds,
        replayed: 20_000,
    },
    Target {
        name: "nbd",
        about: "an NBD client's negotiation and requests",
        run: nbd::run,
        seeds: nbd::seeds,
        replayed: 10_000,
    },
    Target {
        name: "pool",
        about: "a pool's file: recovery, reads, clean-up, the offline check",
        run: pool::run,
        seeds: pool::seeds,
        replayed: 300,
    },
    Target {
        name: "records",
        about: "the controller's records, and volumes as they are asked for",
        run: records::run,
        seeds: records::seeds,
        replayed: 10_000,
    },
    Target {
        name: "identity",
        about: "join tokens, grants, certificates' names",
        run: identity::run,
        seeds: identity::seeds,
        replayed: 10_000,
    },
    Target {
        name: "export",
        about: "the file of an exported snapshot",
        run: export::run,
        seeds: export::seeds,
        replayed: 10_000,
    },
    Target {
        name: "csi",
        about: "every request of the CSI controller and identity services",
        run: csi::run,
        seeds: csi::seeds,
        replayed: 300,
    },
];

/// Returns the target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
