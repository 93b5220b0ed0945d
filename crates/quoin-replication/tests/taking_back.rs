//! Changes that are refused, and newcomers that are removed from the record again: neither delays
//! others, and no older request comes to rule.

use std::time::Duration;

use crate::common::filled::{check_data, filled, member};
use crate::common::{SwapFate, config};
use quoin_types::*;

/// A refusal does not settle earlier requests: the same membership under the next version is
/// requested, which excludes them, and the volume is not opened anew for it.
#[test]
fn a_swap_that_is_refused_is_shut_out_and_the_volume_goes_on_under_its_epoch() {
    let mut c = filled(3);
    let epoch = c.epoch;
    c.swaps.push_back(SwapFate::Refused);
    c.want(|desired| desired.cf = 3);
    let mut steps = 0;
    while c.membership.version == 1 {
        c.run(Duration::from_millis(10));
        steps += 1;
        assert!(steps < 300, "nothing is asked for after the refusal");
    }
    assert_eq!((c.membership.rf, c.membership.cf), (3, 2), "as it is, and later");
    // Refused because it is not desired any more.
    c.want(|desired| (desired.cf, desired.version) = (2, 2));
    c.run(Duration::from_secs(20));
    assert_eq!((c.membership.version, c.membership.cf), (2, 2));
    assert_eq!(c.epoch, epoch, "nobody opened it anew");
    let view = c.hosts[0].last_view();
    assert_eq!((view.rule.membership_version, view.joint), (2, None));
    check_data(&mut c);
}

/// The controller removes a newcomer from the record and sends the next version with it: while the
/// newcomer is fed, while the change is joint, and while swaps are on their way.
#[test]
fn a_newcomer_that_is_taken_back_costs_no_new_epoch_whenever_that_is() {
    let mut swapping = 0;
    for after_ms in (0..).step_by(20) {
        let mut c = filled(3);
        let epoch = c.epoch;
        c.swaps.extend([SwapFate::Lost; 2]);
        c.want(|desired| desired.drf = 4);
        let host = c.add_newcomer(member(4, 204), false);
        c.run(Duration::from_millis(after_ms));
        if c.membership.rf == 4 {
            break;
        }
        swapping += usize::from(c.swaps.len() < 2);
        c.membership.version += 1;
        let version = c.membership.version;
        c.hosts[host].cut = true;
        c.disconnect(host);
        c.want(|desired| *desired = Desired { drf: 3, version, ..Desired::default() });
        c.write(0, 1);
        c.run(Duration::from_secs(10));
        assert_eq!(c.epoch, epoch, "opened anew, taken back after {after_ms} ms");
        assert_eq!((c.membership.rf, c.membership.cf), (3, 2));
        c.want(|desired| desired.drf = 4);
        c.add_newcomer(member(5, 205), false);
        c.wait_in_sync(4);
        assert_eq!((c.membership.rf, c.epoch), (4, epoch), "after {after_ms} ms");
        check_data(&mut c);
    }
    assert!(swapping > 10, "{swapping}");
}

/// RF 1 moves, the joint View is on the media of both, and the target dies before the swap: only
/// the newcomer could report that its rule did not come to rule, and the newcomer is lost.
#[test]
fn a_newcomer_that_only_a_joint_view_names_holds_nobody_up_once_it_is_off_the_record() {
    let mut c = filled(1);
    c.swaps.extend([SwapFate::Lost; 3]);
    let moved = c.hosts[0].member;
    let host = c.add_newcomer(member(moved.id.0, 500), true);
    let mut steps = 0;
    while c.swaps.len() == 3 {
        c.run(Duration::from_millis(10));
        steps += 1;
        assert!(steps < 300, "the swap is never asked for");
    }
    c.hosts[host].cut = true;
    c.disconnect(host);
    c.swaps.clear();
    c.replace_target(config());
    c.run(Duration::from_secs(60));
    let waits = c.target.status().waiting;
    assert!(waits.contains("change of membership"), "{waits:?}");
    // The record drops it, and reports it by its version.
    c.membership.version += 1;
    let version = c.membership.version;
    c.want(|desired| *desired = Desired { drf: 1, version, ..Desired::default() });
    c.run(Duration::from_secs(20));
    check_data(&mut c);
    c.write(0, 1);
    assert_eq!(c.membership.known, [moved]);
}
