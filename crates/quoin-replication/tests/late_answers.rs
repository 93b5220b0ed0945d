//! Answers of the control plane that arrive late, twice, or belong to an earlier change. The driver
//! sends each swap in a task of its own, so the answers are in no order.

use std::time::Duration;

use crate::common::filled::{check_data, filled};
use crate::common::{Cluster, SwapFate};
use quoin_replication::primary::{PrimaryEvent, PrimaryNote};
use quoin_types::*;

/// A volume whose first change is made, and whose second one is where `fates` have brought it; with
/// the record as it was before the first change.
fn in_the_second_change(fates: &[SwapFate]) -> (Cluster, Membership) {
    let mut c = filled(3);
    let before = c.membership.clone();
    c.want(|desired| desired.cf = 3);
    c.wait_for_version(2);
    c.run(Duration::from_secs(10));
    c.swaps.extend(fates);
    c.swaps.extend([SwapFate::Lost; 20]);
    let asked = c.swaps.len() - fates.len();
    c.want(|desired| desired.cf = 2);
    let mut steps = 0;
    while c.swaps.len() >= asked {
        c.run(Duration::from_millis(10));
        steps += 1;
        assert!(steps < 3000, "the second change is never asked for");
    }
    assert!(c.hosts[0].last_view().joint.is_some());
    (c, before)
}

/// Each answer that an earlier change may still get, or the present one twice without its outcome.
fn late_answers(before: &Membership, now: &Membership) -> Vec<(u64, Option<Membership>)> {
    let with = |version| Membership { version, ..now.clone() };
    vec![
        (before.version, Some(before.clone())),
        (before.version, Some(now.clone())),
        (before.version, Some(with(now.version + 1))),
        (before.version, None),
        (before.version - 1, Some(now.clone())),
        (now.version, Some(before.clone())),
        (now.version, None),
        (now.version + 1, Some(with(now.version + 1))),
    ]
}

#[test]
fn a_late_answer_to_an_earlier_swap_never_ends_the_present_change() {
    for fates in [&[][..], &[SwapFate::Refused]] {
        let (c, before) = in_the_second_change(fates);
        for (version, membership) in late_answers(&before, &c.membership) {
            let (mut c, _) = in_the_second_change(fates);
            let (epoch, notes) = (c.epoch, c.notes.len());
            for _ in 0..3 {
                c.event(PrimaryEvent::Swapped { version, membership: membership.clone() });
                c.run(Duration::from_millis(20));
            }
            let said = format!("{fates:?}: {version} {membership:?}");
            assert!(c.hosts[0].last_view().joint.is_some(), "both rules no longer rule: {said}");
            assert_eq!(c.target.status().membership.version, 2, "{said}");
            assert_eq!(c.epoch, epoch, "opened anew: {said}");
            let ended = |note: &PrimaryNote| {
                matches!(note, PrimaryNote::Changed { .. } | PrimaryNote::ChangeGivenUp { .. })
            };
            assert!(!c.notes[notes..].iter().any(ended), "{said}");
            c.swaps.clear();
            c.run(Duration::from_secs(30));
            assert_eq!((c.membership.cf, c.epoch), (2, epoch), "it is made all the same: {said}");
            assert_eq!(c.hosts[0].last_view().joint, None);
            check_data(&mut c);
        }
    }
}
