//! Lists of replicas after an operator gave up some of them.

use crate::broken;
use quoin_types::*;

/// Each of those that are left may hold more than the others.
#[test]
fn the_first_open_after_replicas_were_given_up_hears_all_that_are_left() {
    broken::break_a_rule();
    for (rf, cf) in (1..=7u8).flat_map(|rf| (1..=rf).map(move |cf| (rf, cf))) {
        let member =
            |id: u8| Member { id: ReplicaId(id.into()), guid: ReplicaGuid(100 + u128::from(id)) };
        let known = (1..=rf).map(member).collect();
        let list = Membership { version: 4, rf, cf, known, ..Membership::default() };
        for left in 1..=rf {
            let next = list.reduced_to(|m| m.id.0 <= left.into(), &[]);
            assert_eq!(next.open_quorum(), usize::from(left), "{left} of RF {rf} CF {cf}");
            assert_eq!(next.check(), Ok(()));
            assert_eq!(next.retired.len(), usize::from(rf - left));
            assert!(next.version > list.version);
        }
    }
}
