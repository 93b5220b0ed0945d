//! Pools that are full when a volume is opened: what others hold already is owed to them.

mod common;

use common::*;
use quoin_core::block::Operation;
use quoin_core::target::TargetEvent;
use std::time::Duration;

/// Two of two, one full pool: `written` blocks more reached the other one before the power went.
fn opened_with_a_full_pool(reserve_blocks: u64, written: u64) -> Cluster {
    let mut c = Cluster::new(2, config());
    c.write(0, 1);
    c.wait_in_sync(2);
    c.hosts[1].room = Some(0);
    let waiting: Vec<u64> = (1..=written).map(|n| c.submit(write_of(n, 2))).collect();
    c.run(Duration::from_secs(2));
    assert!(waiting.iter().all(|w| !c.replies.iter().any(|r| r.token == *w)), "not on both");
    c.hosts[1].reserve.0 = reserve_blocks;
    c.replace_target(config());
    c
}

fn write_of(block: u64, fill: u8) -> quoin_core::block::Operation {
    let data = bytes::Bytes::from(vec![fill; 4096]);
    quoin_core::block::Operation::Write { offset: block * 4096, data, fua: false }
}

/// Room could come only of what is stable; nothing is before the open is done, and that waits for
/// the entries. Found by the simulator, broad seed 1322.
#[test]
fn an_open_feeds_a_full_pool_what_the_others_hold_from_its_reserve() {
    let mut c = opened_with_a_full_pool(5, 5);
    assert_eq!(c.read(5 * 4096, 4096), vec![2; 4096], "the open is done");
    c.wait_in_sync(2);
    assert_eq!(c.hosts[0].position(), c.hosts[1].position());
    assert_eq!(c.hosts[1].reserve.0, 0, "one block each");
}

#[test]
fn what_is_new_takes_nothing_of_that_reserve() {
    let mut c = opened_with_a_full_pool(100, 5);
    assert_eq!(c.read(5 * 4096, 4096), vec![2; 4096]);
    let new = c.submit(write_of(9, 3));
    c.run(Duration::from_secs(20));
    assert!(!c.replies.iter().any(|r| r.token == new), "its pool is full");
    assert_eq!(c.hosts[1].reserve.0, 95);
    c.hosts[1].room = None;
    assert!(c.answer(new).expect("there is room").result.is_ok());
}

/// A write of a client that is gone must not land behind what another one did since.
#[test]
fn what_waits_without_an_lsn_goes_with_the_client_that_asked_for_it() {
    let token = |c: &mut Cluster, block, fill| c.submit(write_of(block, fill));
    let abandon = |c: &mut Cluster, tokens: Vec<u64>| {
        c.event(TargetEvent::Abandon(tokens));
        c.settle();
    };
    // For room, with a trim of the next client in between.
    let mut c = Cluster::new(2, config());
    c.write(5, 1);
    c.wait_in_sync(2);
    c.say_short(0..2, true);
    c.settle();
    let gone = token(&mut c, 5, 2);
    let stays = token(&mut c, 6, 3);
    c.settle();
    abandon(&mut c, vec![gone]);
    c.do_ok(Operation::Trim { offset: 5 * 4096, length: 4096, fua: false });
    c.say_short(0..2, false);
    assert!(c.answer(stays).expect("there is room").result.is_ok());
    assert_eq!(c.read(5 * 4096, 8192), [vec![0; 4096], vec![3; 4096]].concat());
    // For an open.
    let mut c = Cluster::new(2, config());
    c.hosts[1].cut = true;
    let gone = token(&mut c, 5, 2);
    let stays = token(&mut c, 6, 3);
    c.run(Duration::from_secs(1));
    abandon(&mut c, vec![gone, stays + 1]);
    c.hosts[1].cut = false;
    assert!(c.answer(stays).expect("it is open").result.is_ok());
    assert_eq!(c.read(5 * 4096, 8192), [vec![0; 4096], vec![3; 4096]].concat());
    // For the content of the blocks at its edges, with one behind it.
    let mut c = Cluster::new(2, config());
    c.write(5, 1);
    c.wait_in_sync(2);
    let half = Operation::Write { offset: 5 * 4096 + 512, data: vec![2; 512].into(), fua: false };
    let gone = c.submit(half);
    let stays = token(&mut c, 5, 3);
    abandon(&mut c, vec![gone]);
    assert!(c.answer(stays).expect("nothing is before it").result.is_ok());
    assert!(c.replies.iter().all(|reply| reply.token != gone || reply.result.is_err()));
    assert_eq!(c.read(5 * 4096, 4096), vec![3; 4096]);
}
