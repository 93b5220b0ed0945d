//! Changes of membership, step by step: with the volume in use, with answers lost, and with targets
//! and replicas that die in the middle.

use std::time::Duration;

use crate::common::filled::{FILL, check_data, filled, member};
use crate::common::{Cluster, SwapFate, config};
use quoin_replication::primary::{PrimaryNote, ReplicaStanding};
use quoin_types::*;

/// Checks the data that each of these hosts can serve with the least number that CF requires.
fn check_each(c: &mut Cluster, hosts: &[usize]) {
    for host in hosts {
        c.crash_replica(*host);
        check_data(c);
        c.start_replica(*host);
        c.wait_in_sync(usize::from(c.membership.rf));
    }
}

/// Proves SCALE-STORY-03, SCALE-LIST-05, SCALE-TEST-04, SCALE-TEST-05, SCALE-GOAL-03.
#[test]
fn a_volume_of_one_replica_becomes_one_of_three_in_one_change() {
    let mut c = filled(1);
    c.want(|desired| desired.drf = 3);
    let first = c.add_newcomer(member(2, 202), false);
    c.run(Duration::from_secs(5));
    assert_eq!(c.membership.version, 1, "it waits for the other one that is desired");
    let second = c.add_newcomer(member(3, 203), false);
    c.wait_for_version(2);
    assert_eq!((c.membership.rf, c.membership.cf), (3, 2));
    assert_eq!(c.membership.known.len(), 3);
    c.wait_in_sync(3);
    assert!(c.hosts[first].meta().quorum && c.hosts[second].meta().quorum);
    check_each(&mut c, &[0, first, second]);
}

/// The largest number of replicas that a cluster allows: all are replaced in one change, so that
/// the in-sync set holds the old and the new ones together.
#[test]
fn eight_replicas_serve_and_are_all_replaced() {
    let mut c = filled(1);
    c.want(|desired| desired.drf = 8);
    for n in 2..=8 {
        c.add_newcomer(member(n, 200 + n), false);
    }
    c.wait_for_version(2);
    assert_eq!((c.membership.rf, c.membership.cf), (8, 5));
    c.wait_in_sync(8);
    let old: Vec<Member> = c.membership.known.clone();
    for m in &old {
        c.add_newcomer(member(m.id.0, 300 + m.id.0), true);
    }
    for _ in 0..200 {
        c.run(Duration::from_millis(500));
        if c.membership.known.iter().all(|m| !old.contains(m)) {
            break;
        }
    }
    assert!(c.membership.known.iter().all(|m| !old.contains(m)), "{:?}", c.membership);
    c.wait_in_sync(8);
    check_data(&mut c);
}

#[test]
fn a_lone_addition_joins_alone_after_a_while() {
    let mut c = filled(1);
    c.want(|desired| desired.drf = 3);
    c.add_newcomer(member(2, 202), false);
    c.wait_for_version(2);
    assert_eq!((c.membership.rf, c.membership.cf, c.membership.drf), (2, 2, 3));
    check_data(&mut c);
    c.add_newcomer(member(3, 203), false);
    c.wait_for_version(3);
    assert_eq!((c.membership.rf, c.membership.cf), (3, 2));
}

/// A change that goes joint before its newcomer is fed would only be given up again.
#[test]
fn no_change_is_begun_for_a_newcomer_that_is_not_there() {
    let mut c = filled(2);
    let newcomer = c.add_newcomer(member(3, 203), false);
    c.hosts[newcomer].cut = true;
    c.disconnect(newcomer);
    c.want(|desired| desired.drf = 3);
    c.run(Duration::from_secs(20));
    let given_up = |n: &PrimaryNote| matches!(n, PrimaryNote::ChangeGivenUp { .. });
    assert!(!c.notes.iter().any(given_up), "{:?}", c.notes);
    assert_eq!(c.membership.version, 1);
    c.hosts[newcomer].cut = false;
    c.wait_for_version(2);
}

/// Proves SCALE-KNOWN-07, SCALE-KNOWN-12, SCALE-SHORT-02.
#[test]
fn while_a_change_is_joint_a_write_needs_both_rules() {
    let mut c = filled(2);
    // RF 2 and CF 2 become RF 3 and CF 2: with the swap's answer lost both rules stay.
    c.swaps.extend([SwapFate::Lost; 1000]);
    c.want(|desired| desired.drf = 3);
    let newcomer = c.add_newcomer(member(3, 203), false);
    c.run(Duration::from_secs(20));
    assert_eq!(c.membership.version, 1);
    c.write(0, 1);
    // Two of the new three are there: enough for the new rule, not for the old one.
    c.hosts[1].cut = true;
    c.disconnect(1);
    let token = c.submit(quoin_types::block::Operation::Write {
        offset: 4096,
        data: vec![9; 4096].into(),
        fua: false,
    });
    c.run(Duration::from_secs(20));
    assert!(c.replies.iter().all(|r| r.token != token), "{:?}", c.target.status());
    let waits = "quorum: 1 of 2 replicas are connected and in sync, 2 are needed while the \
                 membership changes";
    assert_eq!(c.target.status().waiting, waits, "by the rule that is not met");
    assert!(c.hosts[newcomer].meta().quorum);
    // The swap succeeds: the new rule alone remains.
    c.swaps.clear();
    c.wait_for_version(2);
    assert!(c.answer(token).expect("an answer").result.is_ok());
}

/// Proves SCALE-STORY-06, SCALE-ID-04.
#[test]
fn a_replica_moves_while_the_one_whose_place_it_takes_goes_on_serving() {
    for rf in 1..=3 {
        let mut c = filled(rf);
        let old = c.hosts[0].member;
        let new = member(old.id.0, 500);
        let host = c.add_newcomer(new, true);
        c.write(0, 1);
        c.wait_for_version(2);
        assert_eq!(c.membership.rf, rf);
        assert!(c.membership.contains(new) && !c.membership.contains(old));
        assert!(c.membership.retired.contains(&old.guid));
        c.run(Duration::from_secs(1));
        assert!(c.target.status().replicas.iter().all(|r| r.member != old));
        c.wait_in_sync(rf.into());
        c.crash_replica(0);
        check_data(&mut c);
        let dropped = |n: &PrimaryNote| matches!(n, PrimaryNote::Dropped { .. });
        assert!(!c.notes.iter().any(dropped), "no copy was missed: {:?}", c.notes);
        // A new target knows only the new replica.
        c.replace_target(config());
        check_data(&mut c);
        assert!(c.hosts[host].meta().quorum);
    }
}

/// Proves SCALE-VALID-02, SCALE-VALID-03.
#[test]
fn replicas_that_are_named_leave_and_never_come_back() {
    let mut c = filled(3);
    let leaving = [c.hosts[1].member, c.hosts[2].member];
    c.want(|desired| {
        desired.drf = 1;
        desired.leaving = leaving.to_vec();
    });
    c.wait_for_version(2);
    assert_eq!((c.membership.rf, c.membership.cf), (1, 1));
    assert_eq!(c.membership.known, [c.hosts[0].member]);
    assert_eq!(c.membership.retired, leaving.map(|m| m.guid));
    check_data(&mut c);
    c.write(0, 1);
    // Neither a running target nor a new one readmits them, whatever is requested.
    for guid in [leaving[0], leaving[1]] {
        let newcomer = Newcomer { member: guid, beside: false };
        c.want(|desired| {
            desired.drf = 3;
            desired.newcomers.push(newcomer);
        });
    }
    c.run(Duration::from_secs(30));
    c.replace_target(config());
    c.run(Duration::from_secs(30));
    assert_eq!(c.membership.rf, 1);
    assert_eq!(c.target.status().replicas.len(), 1);
    check_data(&mut c);
}

#[test]
fn nobody_leaves_while_one_that_stays_is_away() {
    // Of three, the two that stay could not agree without the absent one; of five they could.
    for rf in [3, 5] {
        let mut c = filled(rf);
        let leaving = c.hosts[2].member;
        c.crash_replica(0);
        c.want(|desired| {
            desired.drf = rf - 1;
            desired.leaving = vec![leaving];
        });
        c.run(Duration::from_secs(60));
        assert_eq!(c.membership.version, 1, "of {rf}");
        c.start_replica(0);
        c.wait_for_version(2);
        assert!(!c.membership.contains(leaving));
        check_data(&mut c);
    }
}

#[test]
fn the_consistency_factor_changes_under_both_rules() {
    let mut c = filled(3);
    for (version, cf) in [(2, 3), (3, 1), (4, 2)] {
        c.want(|desired| desired.cf = cf);
        c.wait_for_version(version);
        assert_eq!((c.membership.rf, c.membership.cf), (3, cf));
        c.write(0, 1);
        check_data(&mut c);
    }
    // 3 of 3: without one nothing is acknowledged.
    c.want(|desired| desired.cf = 3);
    c.wait_for_version(5);
    c.crash_replica(1);
    let token = c.submit(quoin_types::block::Operation::Write {
        offset: 0,
        data: vec![1; 4096].into(),
        fua: false,
    });
    c.run(Duration::from_secs(20));
    assert!(c.replies.iter().all(|r| r.token != token));
    c.start_replica(1);
    assert!(c.answer(token).expect("an answer").result.is_ok());
}

/// Proves SCALE-TEST-06, SCALE-CONF-13, SCALE-KNOWN-13, SCALE-KNOWN-14, SCALE-KNOWN-15.
#[test]
fn whatever_becomes_of_the_swap_the_change_is_made_once_and_nothing_is_lost() {
    use SwapFate::*;
    let fates: [&[SwapFate]; 5] =
        [&[LandsUnheard], &[Lost], &[Lost, Lost, LandsUnheard], &[Refused], &[LandsUnheard, Lost]];
    for fate in fates {
        let mut c = filled(3);
        c.swaps.extend(fate);
        c.want(|desired| desired.drf = 4);
        c.add_newcomer(member(4, 204), false);
        c.write(0, 1);
        c.wait_for_version(2);
        c.wait_in_sync(4);
        assert_eq!((c.membership.rf, c.membership.cf), (4, 3), "{fate:?}");
        c.run(Duration::from_secs(10));
        let once = if fate.contains(&Refused) { 3 } else { 2 };
        assert_eq!(c.membership.version, once, "once: {fate:?}");
        check_data(&mut c);
    }
}

/// Nothing is paused: the joint View follows everything that was pending, and a newcomer that holds
/// it durably holds that too. Data acknowledged around the swap survives the loss of any two of the
/// new five.
///
/// Proves SCALE-KNOWN-08, SCALE-KNOWN-09, SCALE-KNOWN-11.
#[test]
fn while_cf_rises_io_is_answered_within_the_bound_and_what_was_acknowledged_meets_the_new_cf() {
    for lost in [0, 3] {
        let mut c = filled(3);
        c.swaps.extend([SwapFate::Lost; 3].into_iter().take(lost));
        c.want(|desired| desired.drf = 5);
        let new = [4, 5].map(|n| c.add_newcomer(member(n, 200 + n), false));
        let mut fill = 0;
        for round in 0u32.. {
            assert!(round < 3000, "the change is never made");
            let began = c.now;
            fill = fill % 250 + 1;
            c.write(0, fill);
            assert!(c.now < began + Duration::from_secs(5), "held for too long");
            if c.membership.version == 2 {
                break;
            }
            c.run(Duration::from_millis(20));
        }
        assert_eq!((c.membership.rf, c.membership.cf), (5, 3));
        // Of the old three, which held it under the old rule, one is left with the newcomers.
        for host in [0, 1] {
            c.hosts[host].cut = true;
            c.disconnect(host);
        }
        c.replace_target(config());
        assert_eq!(c.read(0, 4096), vec![fill; 4096], "{lost} answers lost");
        assert_eq!(c.read(4096, 4096), vec![2; 4096]);
        assert!(new.iter().all(|host| c.hosts[*host].meta().quorum));
    }
}

/// The target dies with the swap under way, before or after it succeeded; the next one finds the
/// joint View and the record as it is.
#[test]
fn a_target_that_dies_in_the_middle_of_a_change_leaves_a_volume_that_opens_and_changes() {
    for landed in [SwapFate::Lost, SwapFate::LandsUnheard] {
        for rf in 1..=3 {
            let mut c = filled(rf);
            c.swaps.push_back(landed);
            let moved = c.hosts[0].member;
            let new = member(moved.id.0, 500);
            c.add_newcomer(new, true);
            let mut steps = 0;
            while !c.swaps.is_empty() {
                c.run(Duration::from_millis(100));
                steps += 1;
                assert!(steps < 300, "the swap is never asked for");
            }
            c.replace_target(config());
            c.wait_for_version(2);
            assert!(c.membership.contains(new) && !c.membership.contains(moved));
            c.wait_in_sync(rf.into());
            check_data(&mut c);
            c.write(0, 1);
        }
    }
}

/// Proves SCALE-KNOWN-10.
#[test]
fn a_newcomer_that_dies_before_the_swap_is_given_up_and_the_old_rule_goes_on() {
    let mut c = filled(3);
    c.want(|desired| desired.drf = 5);
    let first = c.add_newcomer(member(4, 204), false);
    let second = c.add_newcomer(member(5, 205), false);
    c.run(Duration::from_millis(1));
    let mut rounds = 0;
    while c.membership.version == 1 && rounds < 40 {
        // The newcomers come and go; a third of the time they are joint.
        c.crash_replica(first);
        c.write(0, 1);
        c.run(Duration::from_millis(rounds * 37 % 700));
        c.start_replica(first);
        c.run(Duration::from_millis(rounds * 53 % 900));
        c.crash_replica(second);
        c.write(1, 2);
        c.start_replica(second);
        rounds += 1;
    }
    c.wait_for_version(2);
    c.wait_in_sync(usize::from(c.membership.rf));
    check_data(&mut c);
}

/// Proves SCALE-SHORT-06.
#[test]
fn with_all_desired_replicas_connected_a_stranger_is_not_even_dialled() {
    let mut c = filled(3);
    c.add_newcomer(member(9, 900), false);
    c.run(Duration::from_secs(20));
    assert_eq!(c.target.status().replicas.len(), 3);
    let told = c
        .notes
        .iter()
        .filter(|n| matches!(n, PrimaryNote::NotAdmitted { refusal, .. } if refusal.is_too_many()));
    assert_eq!(told.count(), 1, "told, and told once: {:?}", c.notes);
}

/// Proves SCALE-ID-08.
#[test]
fn a_known_replica_that_returns_displaces_the_one_that_was_to_take_its_place() {
    let mut c = filled(3);
    let known = c.hosts[2].member;
    c.hosts[2].cut = true;
    c.disconnect(2);
    c.hosts[2].pool.restart();
    let stand_in = member(known.id.0, 900);
    let host = c.add_newcomer(stand_in, false);
    c.hosts[host].cut = true;
    c.run(Duration::from_secs(3));
    let connected = |c: &Cluster, m: Member| {
        let status = c.target.status();
        let standing = status.replicas.iter().find(|r| r.member == m).map(|r| r.standing);
        standing.is_some_and(|s| s != ReplicaStanding::Disconnected)
    };
    c.hosts[2].cut = false;
    c.start_replica(2);
    c.run(Duration::from_secs(10));
    assert!(connected(&c, known));
    assert!(c.target.status().replicas.iter().all(|r| r.member != stand_in));
    c.wait_in_sync(3);
    assert_eq!(c.membership.version, 1);
    check_data(&mut c);
}

/// Proves SCALE-SHORT-03.
#[test]
fn replaced_copies_that_come_back_without_their_successors_are_refused_and_nothing_is_served() {
    let mut c = filled(3);
    let (second, third) = (c.hosts[1].member, c.hosts[2].member);
    c.hosts[2].cut = true;
    c.disconnect(2);
    let fourth = c.add_newcomer(member(third.id.0, 404), true);
    c.wait_for_version(2);
    c.hosts[1].cut = true;
    c.disconnect(1);
    let fifth = c.add_newcomer(member(second.id.0, 405), true);
    c.wait_for_version(3);
    c.write(0, 77);
    for host in [0, fourth, fifth] {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.hosts[1].cut = false;
    c.hosts[2].cut = false;
    c.replace_target(config());
    c.run(Duration::from_secs(60));
    assert!(!c.target.status().serving);
    for host in [0, fourth] {
        c.hosts[host].cut = false;
    }
    assert_eq!(c.read(0, 4096), vec![77; 4096]);
}

fn write_of(block: u64, fill: u8) -> quoin_types::block::Operation {
    let data = vec![fill; 4096].into();
    quoin_types::block::Operation::Write { offset: block * 4096, data, fua: false }
}

fn is_answered(c: &Cluster, token: u64) -> bool {
    c.replies.iter().any(|r| r.token == token)
}

/// Proves SCALE-QUORUM-03, SCALE-QUORUM-08, SCALE-QUORUM-09, SCALE-QUORUM-10, SCALE-LIST-06,
/// SCALE-LIST-07, SCALE-LIST-08.
#[test]
fn a_newcomer_gets_every_write_and_does_not_count_before_it_is_known() {
    let mut c = filled(3);
    c.hosts[2].cut = true;
    c.disconnect(2);
    c.run(Duration::from_secs(5));
    // The newcomer is fed, and not made known yet: another newcomer is desired beside it.
    c.want(|desired| desired.drf = 5);
    let newcomer = c.add_newcomer(member(4, 204), false);
    c.write(0, 1);
    c.run(Duration::from_millis(500));
    assert_eq!(c.membership.version, 1);
    let status = c.target.status();
    let known = |r: &&quoin_replication::primary::ReplicaStatus| c.membership.contains(r.member);
    assert_eq!(status.replicas.iter().filter(known).count(), 3, "the others are beside the list");
    let (last, fed) = (status.last, c.hosts[newcomer].position());
    assert_eq!(fed, last, "it has all that was written");
    // With one of the two known replicas gone, the newcomer does not make up the number.
    c.hosts[1].cut = true;
    c.disconnect(1);
    let token = c.submit(write_of(1, 2));
    c.run(Duration::from_secs(4));
    assert!(!is_answered(&c, token), "{:?}", c.target.status());
    // Its failure has no effect.
    c.hosts[newcomer].cut = true;
    c.disconnect(newcomer);
    c.hosts[1].cut = false;
    assert!(c.answer(token).expect("an answer").result.is_ok());
    check_data_but(&mut c, 1);
}

fn check_data_but(c: &mut Cluster, changed: u64) {
    for block in (0..FILL).filter(|block| *block != changed) {
        assert_eq!(c.read(block * 4096, 4096), vec![block as u8 + 1; 4096], "block {block}");
    }
}

/// Proves SCALE-IO-01, SCALE-IO-03.
#[test]
fn io_starts_with_as_many_known_replicas_as_meet_every_acknowledgement_whichever_they_are() {
    for (rf, cf, needed) in [(1, 1, 1), (2, 2, 2), (3, 2, 2), (3, 1, 3), (4, 3, 3), (5, 3, 3)] {
        for first in 0..usize::from(rf) {
            let mut c = filled(rf);
            if cf != c.membership.cf {
                c.want(|desired| desired.cf = cf);
                c.wait_for_version(2);
                c.wait_in_sync(rf.into());
            }
            let order: Vec<usize> =
                (0..usize::from(rf)).map(|n| (first + n) % usize::from(rf)).collect();
            for host in &order[needed - 1..] {
                c.hosts[*host].cut = true;
                c.disconnect(*host);
            }
            c.replace_target(config());
            c.run(Duration::from_secs(30));
            assert!(!c.target.status().serving, "RF {rf} CF {cf} served with {}", needed - 1);
            c.hosts[order[needed - 1]].cut = false;
            check_data(&mut c);
            // Below CF IO stops again, and continues when one replica is back.
            for host in &order[usize::from(cf) - 1..needed] {
                c.hosts[*host].cut = true;
                c.disconnect(*host);
            }
            let token = c.submit(write_of(0, 1));
            c.run(Duration::from_secs(15));
            assert!(!is_answered(&c, token), "RF {rf} CF {cf}");
            for host in &order[..needed] {
                c.hosts[*host].cut = false;
            }
            assert!(c.answer(token).expect("an answer").result.is_ok());
        }
    }
}

/// Proves SCALE-IO-02, SCALE-ADMIT-10.
#[test]
fn a_replica_that_is_not_known_does_not_help_to_open_though_its_quorum_is_on() {
    let mut c = filled(3);
    c.want(|desired| desired.drf = 4);
    c.swaps.push_back(SwapFate::Lost);
    let newcomer = c.add_newcomer(member(4, 204), false);
    let mut steps = 0;
    while !c.swaps.is_empty() {
        c.run(Duration::from_millis(100));
        steps += 1;
        assert!(steps < 300);
    }
    assert!(c.hosts[newcomer].meta().quorum, "the joint View has turned it on");
    assert_eq!(c.membership.version, 1);
    for host in [1, 2] {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.replace_target(config());
    c.run(Duration::from_secs(60));
    assert!(!c.target.status().serving, "one known replica and a stranger are not two");
    c.hosts[1].cut = false;
    check_data(&mut c);
}

/// Proves SCALE-LIST-02, SCALE-LIST-03, SCALE-SHORT-05, SCALE-KNOWN-01, SCALE-KNOWN-04,
/// SCALE-KNOWN-05.
#[test]
fn with_two_of_five_away_a_newcomer_takes_one_entry_and_the_list_keeps_five() {
    let mut c = filled(5);
    let away: Vec<Member> = [3, 4].map(|host: usize| c.hosts[host].member).to_vec();
    for host in [3, 4] {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.write(0, 1);
    let stranger = c.add_newcomer(member(6, 206), false);
    c.run(Duration::from_secs(20));
    assert_eq!((c.membership.version, c.membership.known.len()), (1, 5), "RF = DRF");
    let sixth = member(away[0].id.0, 306);
    let host = c.add_newcomer(sixth, true);
    c.wait_for_version(2);
    assert_eq!((c.membership.rf, c.membership.known.len()), (5, 5));
    assert!(c.membership.contains(sixth) && c.membership.contains(away[1]));
    c.run(Duration::from_secs(2));
    assert!(c.hosts[host].meta().quorum && !c.hosts[stranger].meta().quorum);
    c.write(1, 2);
    // The three that were always connected leave; the returned one and the newcomer are no quorum.
    for host in 0..3 {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.hosts[3].cut = false;
    c.hosts[4].cut = false;
    c.replace_target(config());
    c.run(Duration::from_secs(60));
    assert!(!c.target.status().serving);
    c.hosts[0].cut = false;
    assert_eq!(c.read(4096, 4096), vec![2; 4096]);
}

/// The control plane's record was an old copy for a moment: the grant names a replica that is gone
/// permanently, and no replica is left that could report it.
#[test]
fn an_open_that_nobody_answers_asks_the_record_again_and_goes_on_with_what_it_says() {
    let mut c = filled(1);
    let old_record = c.membership.clone();
    c.add_newcomer(member(1, 201), true);
    c.wait_for_version(2);
    c.run(Duration::from_secs(2));
    c.hosts[0].cut = true;
    c.disconnect(0);
    let new_record = std::mem::replace(&mut c.membership, old_record);
    c.replace_target(config());
    c.run(Duration::from_secs(5));
    assert!(!c.target.status().serving);
    c.membership = new_record;
    c.run(Duration::from_secs(60));
    check_data(&mut c);
}

#[test]
fn an_open_that_waits_for_days_asks_the_record_a_few_times_a_minute() {
    let mut c = filled(2);
    c.hosts[0].cut = true;
    c.disconnect(0);
    c.replace_target(config());
    let before = c.epoch.0;
    c.run(Duration::from_secs(3600));
    assert!((60..240).contains(&(c.epoch.0 - before)), "{} epochs", c.epoch.0 - before);
    c.hosts[0].cut = false;
    check_data(&mut c);
}

/// Returns true if the last View that a host holds has two rules.
fn holds_joint_view(c: &mut Cluster, host: usize) -> bool {
    let state = c.hosts[host].state();
    state.last_view.is_some_and(|(_, view)| view.joint.is_some())
}

/// Stops these processes without closing their connections.
fn silence(c: &mut Cluster, hosts: &[usize]) {
    for host in hosts {
        c.hosts[*host].replica = None;
    }
}

/// A newcomer does not count before it is known; but it can report that no swap was sent.
#[test]
fn a_joint_view_that_no_newcomer_has_does_not_keep_the_old_rule_from_opening() {
    let mut c = filled(1);
    c.want(|desired| desired.drf = 4);
    let newcomers = [2, 3].map(|id| c.add_newcomer(member(id, 200 + id), false));
    // Both are ready, and wait for a third.
    c.run(Duration::from_secs(5));
    silence(&mut c, &newcomers);
    for _ in 0..100 {
        c.run(Duration::from_millis(100));
        if holds_joint_view(&mut c, 0) {
            break;
        }
    }
    assert!(holds_joint_view(&mut c, 0) && !holds_joint_view(&mut c, newcomers[0]));
    c.replace_target(config());
    // One is enough to report it.
    c.start_replica(newcomers[1]);
    check_data(&mut c);
}

/// An operator has lowered the list to the one that is left, in the middle of a change.
#[test]
fn a_forced_change_ends_a_joint_view_whose_replicas_are_gone() {
    let mut c = filled(1);
    c.want(|desired| desired.drf = 3);
    c.swaps.push_back(SwapFate::Lost);
    let newcomers = [2, 3].map(|id| c.add_newcomer(member(id, 200 + id), false));
    while !c.swaps.is_empty() {
        c.run(Duration::from_millis(100));
    }
    assert!(holds_joint_view(&mut c, 0) && holds_joint_view(&mut c, newcomers[0]));
    for host in newcomers {
        c.hosts[host].cut = true;
        c.disconnect(host);
    }
    c.replace_target(config());
    c.run(Duration::from_secs(60));
    assert!(!c.target.status().serving, "they may know of a change that the record does not");
    c.membership.version += 1;
    check_data(&mut c);
}

/// Two caches are lost where CF is 3: the third has everything that was answered.
#[test]
fn caches_lost_around_a_joint_view_that_never_ruled_are_judged_by_the_old_rule() {
    let mut c = filled(4);
    silence(&mut c, &[2, 3]);
    let leaving = c.hosts[0].member;
    c.want(|desired| {
        desired.drf = 3;
        desired.leaving.push(leaving);
    });
    c.settle();
    assert!(holds_joint_view(&mut c, 1) && !holds_joint_view(&mut c, 2));
    for host in [2, 3] {
        c.hosts[host].pool.power_cut(|_| 0);
    }
    c.replace_target(config());
    for host in [2, 3] {
        c.start_replica(host);
    }
    check_data(&mut c);
    assert!(!c.notes.contains(&PrimaryNote::UnflushedTailMayBeLost), "nothing was lost");
}
