//! Holds of one volume for a point over several.

use std::time::Duration;

use crate::common::{Cluster, config};
use quoin_replication::primary::{
    HOLD_MS_MAX, OnQuorumLoss, PointOutcome, PointWish, PrimaryEvent, PrimaryNote, SnapshotOutcome,
    SnapshotWish, USER_SNAPSHOTS_MAX,
};
use quoin_types::block::Operation;
use quoin_types::ids::PointId;
use quoin_types::{Lsn, SnapshotId};

const SECOND: Duration = Duration::from_secs(1);
const POINT: u128 = 40;

/// A volume of three replicas that serves and has 20 blocks.
fn served() -> Cluster {
    let mut c = Cluster::new(3, config());
    for block in 0..20 {
        c.write(block, 1);
    }
    c.run(3 * SECOND);
    c
}

fn wish(c: &mut Cluster, point: u128, wish: PointWish) {
    c.event(PrimaryEvent::Point { point: PointId(point), wish });
    c.settle();
}

fn hold(c: &mut Cluster, for_ms: u32) {
    wish(c, POINT, PointWish::Hold { for_ms });
}

fn cut(c: &mut Cluster, snapshot: u128) {
    wish(c, POINT, PointWish::Cut { snapshot: SnapshotId(snapshot) });
}

fn release(c: &mut Cluster) {
    wish(c, POINT, PointWish::Release);
}

fn outcomes(c: &Cluster, point: u128) -> Vec<PointOutcome> {
    let of = |note: &PrimaryNote| match note {
        PrimaryNote::Point { point: of, outcome } if of.0 == point => Some(*outcome),
        _ => None,
    };
    c.notes.iter().filter_map(of).collect()
}

fn last(c: &Cluster) -> Option<PointOutcome> {
    outcomes(c, POINT).last().copied()
}

fn released(unbroken: bool) -> Option<PointOutcome> {
    Some(PointOutcome::Released { unbroken })
}

fn write(c: &mut Cluster, block: u64, fill: u8) -> u64 {
    let data = vec![fill; 4096].into();
    c.submit(Operation::Write { offset: block * 4096, data, fua: false })
}

fn read(c: &mut Cluster, block: u64) -> u64 {
    c.submit(Operation::Read { offset: block * 4096, length: 4096 })
}

fn is_answered(c: &mut Cluster, token: u64) -> bool {
    c.settle();
    c.replies.iter().any(|reply| reply.token == token)
}

#[test]
fn nothing_is_answered_from_the_hold_to_the_release_and_everything_after_it() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    assert_eq!(last(&c), Some(PointOutcome::Held));
    let early = write(&mut c, 3, 2);
    cut(&mut c, 7);
    let cut_at = c.target.status().last.lsn;
    let late = write(&mut c, 4, 2);
    let flush = c.submit(Operation::Flush);
    let wrong = c.submit(Operation::Read { offset: 1 << 40, length: 4096 });
    c.run(2 * SECOND);
    for token in [early, late, flush, wrong] {
        assert!(!is_answered(&mut c, token), "{token}");
    }
    let epoch = c.epoch;
    assert_eq!(last(&c), Some(PointOutcome::Cut { snapshot: SnapshotId(7), lsn: cut_at, epoch }));
    release(&mut c);
    assert_eq!(last(&c), released(true));
    for token in [early, late, flush, wrong] {
        assert!(is_answered(&mut c, token), "{token}");
    }
    // The snapshot has what was sequenced before the cut, answered or not.
    let info = c.target.snapshot(SnapshotId(7)).expect("it is there");
    assert_eq!(info.lsn, cut_at);
}

#[test]
fn a_read_is_answered_while_held_unless_it_shows_a_write_of_that_time() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    write(&mut c, 3, 2);
    // The write is on every replica, and so are many others that drive it out of the memory.
    for _ in 0..50 {
        write(&mut c, 9, 3);
    }
    c.run(SECOND);
    let (old, new) = (read(&mut c, 5), read(&mut c, 3));
    let status = c.submit(Operation::Status { offset: 0, length: 8 * 4096 });
    c.run(SECOND);
    assert!(is_answered(&mut c, old));
    assert!(!is_answered(&mut c, new) && !is_answered(&mut c, status));
    release(&mut c);
    assert!(is_answered(&mut c, new) && is_answered(&mut c, status));
    assert_eq!(c.read(3 * 4096, 4096), vec![2; 4096]);
}

#[test]
fn a_hold_ends_by_itself_at_its_deadline_which_no_repeat_moves() {
    let mut c = served();
    hold(&mut c, 1000);
    cut(&mut c, 7);
    let token = write(&mut c, 3, 2);
    c.run(Duration::from_millis(900));
    hold(&mut c, HOLD_MS_MAX);
    assert!(!is_answered(&mut c, token));
    c.run(Duration::from_millis(200));
    assert!(is_answered(&mut c, token));
    assert_eq!(last(&c), released(false));
    release(&mut c);
    assert_eq!(last(&c), released(false), "it came too late");
    hold(&mut c, 1000);
    assert_eq!(last(&c), released(false), "a point is held once");
    assert!(is_answered(&mut c, token));
}

#[test]
fn no_wish_makes_a_hold_longer_than_the_longest() {
    let mut c = served();
    hold(&mut c, u32::MAX);
    let token = write(&mut c, 3, 2);
    c.run(Duration::from_millis(u64::from(HOLD_MS_MAX) - 10));
    assert!(!is_answered(&mut c, token));
    c.run(Duration::from_millis(20));
    assert!(is_answered(&mut c, token));
}

#[test]
fn repeats_are_answered_like_the_first_and_change_nothing() {
    let mut c = served();
    for _ in 0..2 {
        hold(&mut c, HOLD_MS_MAX);
    }
    for _ in 0..2 {
        cut(&mut c, 7);
    }
    let lsn = c.target.status().last.lsn;
    cut(&mut c, 8);
    assert_eq!(c.target.status().last.lsn, lsn, "one point is one cut");
    for _ in 0..2 {
        release(&mut c);
    }
    let told = PointOutcome::Cut { snapshot: SnapshotId(7), lsn, epoch: c.epoch };
    let (held, freed) = (PointOutcome::Held, PointOutcome::Released { unbroken: true });
    assert_eq!(outcomes(&c, POINT), [held, held, told, told, freed, freed]);
    cut(&mut c, 9);
    assert_eq!(last(&c), released(true), "no cut without a hold");
    assert_eq!(c.target.status().last.lsn, lsn);
}

#[test]
fn a_hold_without_a_cut_and_a_point_that_is_not_held_are_not_unbroken() {
    let mut c = served();
    release(&mut c);
    assert_eq!(last(&c), released(false));
    c.notes.clear();
    cut(&mut c, 7);
    assert_eq!(last(&c), released(false));
    assert!(c.target.snapshot(SnapshotId(7)).is_none());
    hold(&mut c, 1000);
    release(&mut c);
    assert_eq!(last(&c), released(false));
}

#[test]
fn another_point_waits_for_the_end_of_the_present_one() {
    let mut c = served();
    hold(&mut c, 1000);
    wish(&mut c, 41, PointWish::Hold { for_ms: 1000 });
    assert_eq!(outcomes(&c, 41), []);
    release(&mut c);
    wish(&mut c, 41, PointWish::Hold { for_ms: 1000 });
    assert_eq!(outcomes(&c, 41), [PointOutcome::Held]);
}

#[test]
fn a_hold_does_not_survive_its_target_and_the_next_one_says_so() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    c.replace_target(config());
    c.run(SECOND / 2);
    release(&mut c);
    c.run(3 * SECOND);
    assert_eq!(last(&c), released(false));
}

/// Another target may have answered in an epoch between.
#[test]
fn a_hold_ends_with_its_epoch_though_the_same_target_opens_the_next_one() {
    let mut hand = crate::hand::Hand::new(crate::hand::config());
    hand.serve(&[crate::hand::row(5, 1, 10, 55)], 10);
    let wish = |wish| PrimaryEvent::Point { point: PointId(POINT), wish };
    hand.on(wish(PointWish::Hold { for_ms: HOLD_MS_MAX }));
    hand.on(wish(PointWish::Cut { snapshot: SnapshotId(7) }));
    for id in 1..=3 {
        hand.applied(id, true);
    }
    hand.overtaken(3);
    hand.on(wish(PointWish::Release));
    let note = hand.notes.iter().rev().find_map(|note| match note {
        PrimaryNote::Point { outcome, .. } => Some(*outcome),
        _ => None,
    });
    assert_eq!(note, released(false), "{:?}", hand.target.status());
}

#[test]
fn a_release_waits_for_the_lease_and_is_not_unbroken_without_it() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    for host in 1..3 {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.run(4 * SECOND);
    release(&mut c);
    assert!(matches!(last(&c), Some(PointOutcome::Cut { .. })), "{:?}", last(&c));
    c.run(2 * SECOND);
    assert_eq!(last(&c), released(false));
}

#[test]
fn an_idle_volume_is_held_and_released_under_a_lease_of_that_time() {
    let mut c = served();
    c.run(60 * SECOND);
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    c.run(2 * SECOND);
    release(&mut c);
    assert_eq!(last(&c), released(true));
}

#[test]
fn a_volume_that_fails_without_a_quorum_fails_nothing_while_held() {
    let mut c = Cluster::new(
        3,
        quoin_replication::primary::PrimaryConfig {
            on_quorum_loss: OnQuorumLoss::Fail,
            lease_ms: 1000,
            ..config()
        },
    );
    c.write(0, 1);
    hold(&mut c, 4000);
    let token = write(&mut c, 3, 2);
    for host in 1..3 {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.run(3 * SECOND);
    assert!(!is_answered(&mut c, token));
    c.run(2 * SECOND);
    let reply = c.replies.iter().find(|reply| reply.token == token).expect("it is over");
    assert!(reply.result.is_err());
}

#[test]
fn a_cut_that_cannot_be_made_is_refused_with_its_reason() {
    let mut c = served();
    for id in 0..USER_SNAPSHOTS_MAX as u128 {
        let wish = SnapshotWish::Make;
        c.event(PrimaryEvent::Snapshot { id: SnapshotId(100 + id), wish });
    }
    c.run(3 * SECOND);
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    assert_eq!(last(&c), Some(PointOutcome::TooManySnapshots));
}

#[test]
fn a_snapshot_is_confirmed_once_it_is_on_media_and_is_gone_where_it_was_never_made() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    cut(&mut c, 7);
    let lsn = c.target.status().last.lsn;
    release(&mut c);
    for id in [7, 8] {
        let wish = SnapshotWish::Confirm;
        c.event(PrimaryEvent::Snapshot { id: SnapshotId(id), wish });
    }
    c.run(3 * SECOND);
    let told = |id: u128| {
        c.notes.iter().find_map(|note| match note {
            PrimaryNote::Snapshot { id: of, outcome } if of.0 == id => Some(*outcome),
            _ => None,
        })
    };
    let Some(SnapshotOutcome::Made { lsn: at, head: Some(head) }) = told(7) else {
        panic!("{:?}", told(7))
    };
    assert_eq!((at, head.epoch), (lsn, c.epoch));
    assert_eq!(told(8), Some(SnapshotOutcome::Gone));
    assert!(at > Lsn(20));
}

#[test]
fn a_shutdown_ends_the_hold_and_finishes_what_waited() {
    let mut c = served();
    hold(&mut c, HOLD_MS_MAX);
    let token = write(&mut c, 3, 2);
    assert!(!is_answered(&mut c, token));
    c.event(PrimaryEvent::Shutdown);
    c.run(SECOND);
    assert_eq!(last(&c), released(false));
    assert!(is_answered(&mut c, token) && c.stopped);
}
