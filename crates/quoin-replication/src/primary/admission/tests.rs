//! One test for each line of the decision list, named after the line.

use super::*;
use Admission::*;
use quoin_types::membership::default_cf;
use quoin_types::{ReplicaGuid, ReplicaId};

const VOLUME: VolumeId = VolumeId(7);

fn member(id: u128, guid: u128) -> Member {
    Member { id: ReplicaId(id), guid: ReplicaGuid(guid) }
}

fn membership(rf: u8) -> Membership {
    let known = (1..=u128::from(rf)).map(|i| member(i, 100 + i)).collect();
    let cf = default_cf(rf);
    let retired = vec![ReplicaGuid(666)];
    Membership { version: 5, rf, cf, drf: rf, known, retired, formed: true }
}

fn applicant(member: Member) -> Applicant {
    Applicant { volume: VOLUME, member, quorum: false, empty: true, membership_version: 5 }
}

fn on(member: Member) -> Connected {
    Connected { member, quorum: true }
}

fn off(member: Member) -> Connected {
    Connected { member, quorum: false }
}

fn decide(membership: &Membership, drf: u8, connected: &[Connected], who: Applicant) -> Admission {
    admit(&Seats { volume: VOLUME, membership, drf, connected, moving: &[] }, &who)
}

const KNOWN: Admission = Known { displaces: None };
const UNKNOWN: Admission = Unknown { displaces: None };

/// Proves SCALE-ADMIT-07.
#[test]
fn a_replica_of_another_volume_is_rejected_before_it_could_displace_another() {
    let three = membership(3);
    let connected = [on(member(1, 101)), on(member(2, 102)), off(member(9, 900))];
    let foreign = Applicant { volume: VolumeId(8), ..applicant(three.known[2]) };
    assert_eq!(decide(&three, 3, &connected, foreign), Rejected(Refusal::Foreign));
}

/// Proves SCALE-ADMIT-16, SCALE-SHORT-01, SCALE-SHORT-04.
#[test]
fn a_retired_replica_is_rejected_with_any_id_or_quorum() {
    let three = membership(3);
    for id in [2, 9] {
        for quorum in [false, true] {
            let retired = Applicant { quorum, empty: false, ..applicant(member(id, 666)) };
            assert_eq!(decide(&three, 5, &[], retired), Rejected(Refusal::Retired));
        }
    }
}

#[test]
fn a_replica_of_a_membership_that_this_record_has_not_reached_is_rejected() {
    let three = membership(3);
    let newer = Applicant { membership_version: 6, ..applicant(three.known[0]) };
    assert_eq!(decide(&three, 3, &[], newer), Rejected(Refusal::NewerMembership));
}

/// Proves SCALE-ID-08.
#[test]
fn an_exact_match_takes_the_place_of_a_connected_one_with_its_id_that_is_none() {
    let three = membership(3);
    let stand_in = member(3, 203);
    let connected = [on(member(1, 101)), on(member(2, 102)), off(stand_in)];
    let back = decide(&three, 3, &connected, applicant(three.known[2]));
    assert_eq!(back, Known { displaces: Some(stand_in) });
}

#[test]
fn any_other_second_replica_of_an_id_is_refused() {
    let three = membership(3);
    let connected = [off(member(3, 203))];
    let second = applicant(member(3, 204));
    assert_eq!(decide(&three, 4, &connected, second), Rejected(Refusal::SameReplica));
    let connected = [on(three.known[2])];
    assert_eq!(decide(&three, 4, &connected, second), Rejected(Refusal::SameReplica));
}

#[test]
fn a_reconnect_of_the_same_replica_replaces_its_own_session() {
    let three = membership(3);
    let connected: Vec<_> = three.known.iter().map(|m| on(*m)).collect();
    assert_eq!(decide(&three, 3, &connected, applicant(three.known[1])), KNOWN);
}

/// Proves SCALE-ADMIT-06, SCALE-TEST-03.
#[test]
fn with_all_desired_replicas_known_and_connected_all_others_are_rejected_with_an_alarm() {
    let three = membership(3);
    let connected: Vec<_> = three.known.iter().map(|m| on(*m)).collect();
    for stranger in [member(9, 900), member(3, 203)] {
        for quorum in [false, true] {
            let who = Applicant { quorum, ..applicant(stranger) };
            let Rejected(refusal) = decide(&three, 3, &connected, who) else { panic!() };
            let expected =
                if stranger.id.0 == 3 { Refusal::SameReplica } else { Refusal::AllConnected };
            assert_eq!(refusal, expected);
        }
    }
    assert!(Refusal::AllConnected.is_too_many() && Refusal::Full.is_too_many());
    assert!(Refusal::AllConnected.to_string().contains("too many replicas are connecting"));
    assert!(!Refusal::Retired.is_too_many());
}

/// Proves SCALE-ADMIT-02, SCALE-ADMIT-05, SCALE-TEST-02.
#[test]
fn when_full_a_replica_whose_id_is_not_listed_is_rejected_with_an_alarm() {
    let three = membership(3);
    let connected =
        [on(member(1, 101)), on(member(2, 102)), off(member(9, 900)), off(member(10, 901))];
    for quorum in [false, true] {
        let who = Applicant { quorum, ..applicant(member(11, 903)) };
        assert_eq!(decide(&three, 4, &connected, who), Rejected(Refusal::Full));
    }
    assert!(Refusal::Full.to_string().contains("too many replicas are connecting"));
}

/// Proves SCALE-ADMIT-03.
#[test]
fn when_full_a_listed_replica_displaces_an_unlisted_one() {
    let three = membership(3);
    let connected = [on(member(1, 101)), on(member(2, 102)), off(member(9, 900))];
    let place = Some(member(9, 900));
    let back = decide(&three, 3, &connected, applicant(three.known[2]));
    assert_eq!(back, Known { displaces: place });
    let replacement = decide(&three, 3, &connected, applicant(member(3, 203)));
    assert_eq!(replacement, Unknown { displaces: place });
}

/// Proves SCALE-ADMIT-04.
#[test]
fn unlisted_replicas_with_quorum_off_are_displaced_first_and_listed_ones_never() {
    let three = membership(3);
    let connected = [on(member(1, 101)), on(member(9, 900)), off(member(10, 901))];
    let who = applicant(three.known[2]);
    assert_eq!(decide(&three, 3, &connected, who), Known { displaces: Some(member(10, 901)) });
    let connected = [on(member(1, 101)), off(member(2, 202)), on(member(9, 900))];
    assert_eq!(decide(&three, 3, &connected, who), Known { displaces: Some(member(9, 900)) });
    let connected = [on(member(1, 101)), off(member(2, 202)), off(member(2, 203))];
    assert_eq!(decide(&three, 3, &connected, who), Rejected(Refusal::Full));
}

/// Proves SCALE-ADMIT-03.
#[test]
fn a_match_by_guid_alone_is_unlisted() {
    let three = membership(3);
    let copied = member(9, 103);
    assert_eq!(decide(&three, 3, &[], applicant(copied)), Rejected(Refusal::NotDesired));
}

/// Proves SCALE-ADMIT-08, SCALE-TEST-07.
#[test]
fn a_replica_on_the_list_is_known() {
    let three = membership(3);
    for quorum in [false, true] {
        let who = Applicant { quorum, empty: false, ..applicant(three.known[0]) };
        assert_eq!(decide(&three, 3, &[on(three.known[1])], who), KNOWN);
    }
}

/// Proves SCALE-ADMIT-09, SCALE-ADMIT-10.
#[test]
fn a_listed_id_with_another_guid_is_unknown_with_quorum_off_or_on() {
    let three = membership(3);
    for quorum in [false, true] {
        let who = Applicant { quorum, empty: false, ..applicant(member(3, 203)) };
        assert_eq!(decide(&three, 3, &[on(three.known[1])], who), UNKNOWN);
    }
}

/// Proves SCALE-ADMIT-12.
#[test]
fn while_the_list_is_short_an_unlisted_quorum_off_replica_is_unknown() {
    let mut forming = membership(3);
    forming.known.pop();
    for formed in [false, true] {
        forming.formed = formed;
        assert_eq!(decide(&forming, 3, &[], applicant(member(9, 900))), UNKNOWN);
    }
}

/// Proves SCALE-ADMIT-13.
#[test]
fn while_the_list_was_never_complete_an_empty_quorum_on_replica_becomes_known_and_never_after() {
    let mut forming = membership(3);
    forming.known.pop();
    forming.formed = false;
    let first = Applicant { quorum: true, ..applicant(member(9, 900)) };
    assert_eq!(decide(&forming, 3, &[], first), Forming);
    let with_data = Applicant { empty: false, ..first };
    assert_eq!(decide(&forming, 3, &[], with_data), Rejected(Refusal::NotDesired));
    forming.formed = true;
    assert_eq!(decide(&forming, 3, &[], first), Rejected(Refusal::NotDesired));
    assert_eq!(decide(&forming, 4, &[], first), UNKNOWN);
}

/// Proves SCALE-ADMIT-11, SCALE-ADMIT-14, SCALE-LIST-04.
#[test]
fn an_unlisted_replica_is_unknown_while_more_are_desired_than_there_are() {
    let three = membership(3);
    for quorum in [false, true] {
        let who = Applicant { quorum, ..applicant(member(9, 900)) };
        assert_eq!(decide(&three, 4, &[on(three.known[1])], who), UNKNOWN);
    }
}

/// Proves SCALE-ADMIT-15, SCALE-TEST-08.
#[test]
fn any_other_replica_is_rejected() {
    let three = membership(3);
    let who = Applicant { quorum: true, ..applicant(member(9, 900)) };
    assert_eq!(decide(&three, 3, &[on(three.known[1])], who), Rejected(Refusal::NotDesired));
}

#[test]
fn a_move_has_a_seat_of_its_own_beside_the_replica_whose_place_it_takes() {
    let three = membership(3);
    let connected: Vec<_> = three.known.iter().map(|m| on(*m)).collect();
    let moving = [member(3, 203)];
    let seats = Seats {
        volume: VOLUME,
        membership: &three,
        drf: 3,
        connected: &connected,
        moving: &moving,
    };
    assert_eq!(admit(&seats, &applicant(moving[0])), UNKNOWN);
    // The newcomer does not displace the replica that it follows, nor does that replica displace
    // it.
    let connected = [on(three.known[0]), on(three.known[1]), off(moving[0])];
    let seats = Seats { connected: &connected, ..seats };
    assert_eq!(admit(&seats, &applicant(three.known[2])), KNOWN);
}

/// In any order of connections: never more than DRF (beside those that move), never two of one
/// ReplicaId, and no retired replica.
mod any_order {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_more_than_desired_never_an_id_twice_never_a_retired_one(
            rf in 1u8..5, more in 0u8..3,
            arrivals in prop::collection::vec((1u128..8, 0u128..3, any::<bool>()), 0..40),
        ) {
            let membership = membership(rf);
            let drf = rf + more;
            let mut connected: Vec<Connected> = Vec::new();
            for (id, turn, quorum) in arrivals {
                let guid = match turn { 0 => 100 + id, 1 => 200 + id, _ => 666 };
                let who = Applicant { quorum, ..applicant(member(id, guid)) };
                let displaces = match decide(&membership, drf, &connected, who) {
                    Known { displaces } | Unknown { displaces } => displaces,
                    Forming => None,
                    Rejected(_) => continue,
                };
                connected.retain(|c| Some(c.member) != displaces && c.member != who.member);
                connected.push(Connected { member: who.member, quorum });
                prop_assert!(connected.len() <= usize::from(drf));
                for (i, a) in connected.iter().enumerate() {
                    prop_assert!(a.member.guid != ReplicaGuid(666));
                    prop_assert!(connected[..i].iter().all(|b| b.member.id != a.member.id));
                }
            }
        }
    }
}
