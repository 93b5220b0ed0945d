//! A bounded share of the fuzzing: the corpus, the seeds and some thousand mutations of each.

use std::path::Path;

use quoin_fuzz::mutate::mutate;
use quoin_fuzz::{TARGETS, target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Limit of address space: a process that needs more for some kilobytes of input is aborted.
const MEMORY_BYTES_MAX: u64 = 8 << 30;

fn replay(name: &str) {
    let limit = Rlimit { current: Some(MEMORY_BYTES_MAX), maximum: Some(MEMORY_BYTES_MAX) };
    setrlimit(Resource::As, limit).expect("a lower limit is always allowed");
    let target = target(name).expect("a target of this name");
    let mut inputs = (target.seeds)();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    if let Ok(files) = std::fs::read_dir(corpus) {
        let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        paths.sort();
        inputs.extend(paths.iter().map(|path| std::fs::read(path).unwrap()));
    }
    for input in &inputs {
        (target.run)(input);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(2026);
    for _ in 0..target.replayed {
        let (from, other) = (rng.random_range(0..inputs.len()), rng.random_range(0..inputs.len()));
        let input = mutate(&mut rng, &inputs[from], &inputs[other]);
        (target.run)(&input);
    }
}

#[test]
fn no_frame_makes_a_peer_panic_or_swell() {
    replay("frames");
}

#[test]
fn no_nbd_client_makes_the_server_panic_swell_or_leave_the_volume() {
    replay("nbd");
}

#[test]
fn no_pool_file_makes_recovery_reads_or_the_offline_check_panic() {
    replay("pool");
}

#[test]
fn no_record_and_no_asked_volume_makes_the_controller_panic() {
    replay("records");
}

#[test]
fn no_token_or_certificate_makes_its_reader_panic() {
    replay("identity");
}

/// Proves CSI-ERR-01, CSI-ERR-02: of hostile requests, by a gRPC client that knows these codes alone.
#[test]
fn no_csi_request_is_answered_by_an_internal_error() {
    replay("csi");
}

#[test]
fn no_exported_file_makes_its_reader_panic() {
    replay("export");
}

#[test]
fn every_target_is_replayed_here() {
    let here = include_str!("replay.rs");
    for target in TARGETS {
        assert!(here.contains(&format!("replay(\"{}\")", target.name)), "{}", target.name);
    }
}
