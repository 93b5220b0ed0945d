//! Writes whose edges are parts of blocks, requests that overlap, and requests that a shutdown
//! completes.

use crate::common;
use std::time::Duration;

use crate::common::{Cluster, config};
use bytes::Bytes;
use quoin_replication::primary::{OnFull, PrimaryEvent, PrimaryNote, ReplicaStanding};
use quoin_replication::step::Step;
use quoin_types::block::{BlockError, Operation, Payload};

const BLOCK: u64 = 4096;

fn filled(blocks: u64) -> Cluster {
    let mut cluster = Cluster::new(3, config());
    cluster.wait_in_sync(3);
    for lba in 0..blocks {
        cluster.write(lba, lba as u8 + 1);
    }
    cluster
}

fn write(offset: u64, length: usize, fill: u8) -> Operation {
    Operation::Write { offset, data: Bytes::from(vec![fill; length]), fua: false }
}

/// The volume's first blocks, and a plain array with the same content.
struct Mirror {
    cluster: Cluster,
    plain: Vec<u8>,
}

impl Mirror {
    fn new(blocks: u64) -> Self {
        let plain = (0..blocks * BLOCK).map(|at| (at / BLOCK) as u8 + 1).collect();
        Self { cluster: filled(blocks), plain }
    }

    fn change(&mut self, offset: u64, length: usize, fill: Option<u8>) {
        self.plain[offset as usize..offset as usize + length].fill(fill.unwrap_or(0));
        let operation = match fill {
            Some(fill) => write(offset, length, fill),
            None => {
                let length = length as u64;
                Operation::WriteZeroes { offset, length, fua: false, no_hole: false }
            }
        };
        self.cluster.do_ok(operation);
    }

    fn check(mut self) {
        let read = self.cluster.read(0, self.plain.len() as u32);
        let differs = read.iter().zip(&self.plain).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the first byte that is not what was written");
    }
}

#[test]
fn a_write_within_blocks_changes_its_own_bytes_and_no_others() {
    for (offset, length) in [(5 * BLOCK + 512, 512), (5 * BLOCK + 512, 8192), (6 * BLOCK, 512)] {
        let mut mirror = Mirror::new(12);
        mirror.change(offset, length, Some(99));
        mirror.check();
    }
}

#[test]
fn zeroes_within_blocks_clear_their_own_bytes_and_no_others() {
    for (offset, length) in
        [(5 * BLOCK + 512, 512), (5 * BLOCK + 512, 16384), (6 * BLOCK, 8704), (4096, 512)]
    {
        let mut mirror = Mirror::new(12);
        mirror.change(offset, length, None);
        mirror.check();
    }
}

#[test]
fn requests_that_overlap_take_effect_in_the_order_in_which_they_came() {
    let mut cluster = filled(4);
    let tokens = [
        cluster.submit(write(BLOCK + 512, 512, 50)),
        cluster.submit(write(BLOCK, 4096, 60)),
        cluster.submit(write(BLOCK + 1024, 512, 70)),
    ];
    for token in tokens {
        assert!(cluster.answer(token).expect("a write is answered").result.is_ok());
    }
    let block = cluster.read(BLOCK, 4096);
    let mut wanted = vec![60; 4096];
    wanted[1024..1536].fill(70);
    assert!(block == wanted, "{:?}", &block[500..1600]);
}

/// The cleaner gains nothing from parts of blocks: they become blocks with data.
#[test]
fn where_pools_are_full_zeroes_within_blocks_are_refused_and_whole_ones_are_not() {
    let mut config = config();
    config.on_full = OnFull::NoSpace;
    let mut cluster = Cluster::new(3, config);
    cluster.wait_in_sync(3);
    cluster.write(1, 1);
    cluster.say_short(0..3, true);
    cluster.run(Duration::from_secs(5));
    let zeroes =
        |offset, length| Operation::WriteZeroes { offset, length, fua: false, no_hole: false };
    cluster.do_ok(zeroes(0, 3 * BLOCK));
    let token = cluster.submit(zeroes(512, BLOCK));
    let refused = cluster.answer(token).expect("it is refused");
    assert_eq!(refused.result.err(), Some(BlockError::NoSpace));
}

#[test]
fn a_replica_that_says_nothing_any_more_is_hung_up_on_and_the_volume_goes_on() {
    let mut cluster = filled(2);
    // Its connection stays open, as in a partition.
    cluster.hosts[2].replica = None;
    cluster.write(1, 9);
    cluster.run(Duration::from_secs(60));
    assert_eq!(cluster.read(BLOCK, 4096), vec![9; 4096]);
    let status = cluster.target.status();
    assert_eq!(status.replicas[2].standing, ReplicaStanding::Disconnected);
    assert!(status.silent.is_empty(), "nobody is asked whom the membership could concern");
}

#[test]
fn an_open_that_waits_for_its_quorum_suspects_nobody_of_an_unknown_membership() {
    let mut cluster = filled(2);
    for host in [1, 2] {
        cluster.hosts[host].cut = true;
        cluster.disconnect(host);
    }
    cluster.replace_target(config());
    cluster.run(Duration::from_millis(500));
    let status = cluster.target.status();
    assert!(!status.serving);
    assert_eq!(status.silent, []);
}

#[test]
fn a_rebuild_beside_clients_tells_how_far_it_is() {
    let mut cluster = filled(0);
    cluster.hosts[2].cut = true;
    cluster.disconnect(2);
    for lba in 0..common::BLOCKS {
        cluster.write(lba, 1);
    }
    cluster.hosts[2].cut = false;
    let mut seen = Vec::new();
    for round in 0..3000u64 {
        cluster.submit(write(round % 8 * BLOCK, 4096, 3));
        cluster.run(Duration::from_millis(1));
        let status = cluster.target.status();
        let replica = &status.replicas[2];
        if replica.standing == ReplicaStanding::Rebuilding {
            seen.push((replica.rebuilt_bytes, replica.rebuild_total_bytes));
        }
    }
    let total = common::BLOCKS * BLOCK;
    assert!(seen.iter().all(|(done, of)| done <= of && *of == total), "{seen:?}");
    let between = seen.iter().filter(|(done, _)| (1..total).contains(done)).count();
    assert!(between > 2, "{seen:?}");
}

/// The shadow records its progress; data that it has is not copied again.
#[test]
fn a_rebuild_whose_receiver_returns_soon_goes_on_where_it_was() {
    let mut cluster = filled(0);
    cluster.hosts[2].cut = true;
    cluster.disconnect(2);
    for lba in 0..common::BLOCKS {
        cluster.write(lba, 1);
    }
    cluster.hosts[2].cut = false;
    let total = common::BLOCKS * BLOCK;
    let mut before = 0;
    // Readers slow it down.
    for round in 0..3000u64 {
        cluster.submit(Operation::Read { offset: round % 8 * BLOCK, length: 4096 });
        cluster.run(Duration::from_millis(1));
        before = cluster.target.status().replicas[2].rebuilt_bytes;
        if before > total / 2 {
            break;
        }
    }
    assert!(before > total / 2 && before < total, "{before}");
    cluster.disconnect(2);
    cluster.wait_in_sync(3);
    let moved = cluster.notes.iter().filter_map(|note| match note {
        PrimaryNote::Rebuilt { moved_bytes, .. } => Some(*moved_bytes),
        _ => None,
    });
    let moved: u64 = moved.sum();
    assert!(moved >= total && moved < total + total / 3, "{moved} of {total}, {before} at first");
    for lba in (0..common::BLOCKS).step_by(97) {
        assert_eq!(cluster.hosts[2].look(lba), cluster.hosts[0].look(lba), "block {lba}");
    }
}

#[test]
fn at_rest_nothing_is_under_way() {
    let mut cluster = filled(2);
    cluster.run(Duration::from_secs(5));
    let steps = cluster.target.steps();
    let busy = [
        Step::Recovering,
        Step::RecoveringByBase,
        Step::Writing,
        Step::Reading,
        Step::Merging,
        Step::ViewPending,
        Step::CatchingUp,
        Step::RebuildMoving,
    ];
    let wrong: Vec<_> = steps.iter().filter(|step| busy.contains(step)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn a_shutdown_answers_what_was_taken_before_it() {
    let mut cluster = filled(3);
    let written = cluster.submit(write(0, 4096, 77));
    let merged = cluster.submit(write(BLOCK + 512, 512, 78));
    let read = cluster.submit(Operation::Read { offset: 2 * BLOCK, length: 4096 });
    cluster.event(PrimaryEvent::Shutdown);
    cluster.run(Duration::from_secs(20));
    assert!(cluster.stopped);
    for token in [written, merged, read] {
        let reply = cluster.replies.iter().find(|reply| reply.token == token);
        let reply = reply.unwrap_or_else(|| panic!("{token} was never answered"));
        match (&reply.result, token == read) {
            (Ok(Payload::Data(data)), true) => assert_eq!(data.concat(), vec![3; 4096]),
            (result, false) => assert!(result.is_ok(), "{result:?}"),
            other => panic!("{other:?}"),
        }
    }
    assert!(cluster.hosts.iter_mut().all(|host| host.meta().closed_continuous));
}
