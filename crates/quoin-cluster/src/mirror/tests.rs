//! Rules of the brain that few steps come to; the swarms of the simulator have the others.

use std::time::Duration;

use quoin_types::ids::{GroupId, PointId, VolumeId};
use quoin_types::time::Time;

use super::answers::{Answer, Call};
use super::brain::Now;
use super::record::{Parameters, Points};
use super::session::Session;
use super::word::Message;
use super::*;
use crate::break_a_rule;

const GROUP: GroupId = GroupId(1);
const CLUSTERS: [ClusterId; 2] = [ClusterId(1), ClusterId(2)];
const VOLUME: VolumeId = VolumeId(5);
const POINT: PointId = PointId(9);

fn now(seconds: u64) -> Now {
    let time = Time::ZERO + Duration::from_secs(seconds);
    Now { time, wall_ms: seconds * 1000, draw: (77 << 64) + u128::from(seconds) + 1 }
}

fn primary() -> Record {
    let parameters = Parameters { interval_s: 10, may_take_over: true };
    Record { is_paired: true, ..Record::primary(GROUP, CLUSTERS, vec![VOLUME], parameters) }
}

/// A member whose pools keep the role of its record, and that holds these points.
fn seen(serial: u64, record: &Record, points: &[PointId]) -> Box<Observed> {
    Box::new(Observed {
        serial,
        seen_ms: 0,
        stamp: Stamp::default(),
        points: points.to_vec(),
        blocks: 0,
        at: None,
        fenced: 0,
        order: None,
        taken_to: 0,
        stable_to: 0,
        is_fed: false,
        keepsake: Some(record.keepsake()),
        lost: None,
        is_published: false,
    })
}

/// A word of a copy with the chain of this record.
fn word(record: &Record) -> Word {
    Word {
        role: Role::Secondary,
        chain: record.chain.clone(),
        members: record.members.clone(),
        held: Vec::new(),
        offer: None,
        want: None,
        complete: None,
        common: None,
        last: None,
        claim: None,
        yielded: None,
        asks_step_down: false,
        resync: None,
        heard_resync: None,
        parameters: record.parameters,
    }
}

/// Has a brain hear a word of the other side, after each told the other that it lives.
fn hear(brain: &mut Brain, peer: &mut Session, word: Word) -> Vec<Action> {
    let mut actions = Vec::new();
    for second in 0..4 {
        let message = Message { group: GROUP, header: peer.send(), word: Some(word.clone()) };
        let mut out = Vec::new();
        brain.on(now(second), Event::Message(message.encode()), &mut out);
        for action in &out {
            if let Action::Send(bytes) = action {
                peer.receive(Message::decode(bytes).unwrap().header, 3);
            }
        }
        actions.append(&mut out);
    }
    assert_eq!(brain.heard(), Some(&word));
    actions
}

fn stored(actions: &[Action]) -> Option<&Record> {
    actions.iter().find_map(|action| match action {
        Action::Store { record, .. } => Some(&**record),
        _ => None,
    })
}

fn is_dropped(actions: &[Action]) -> bool {
    let order = |action: &Action| match action {
        Action::Member { order, .. } => Some(*order),
        _ => None,
    };
    actions.iter().filter_map(order).any(|order| order == Order::Drop(POINT))
}

#[test]
fn the_other_side_is_silent_only_while_a_mirror_of_this_side_could_hear_it() {
    break_a_rule();
    let mut brain = Brain::new(now(0), primary(), 1);
    assert!(!brain.is_silent(now(1000).time), "nobody listens here");
    let mut on = |second, event| brain.on(now(second), event, &mut Vec::new());
    on(1000, Event::OwnMirror { is_running: true });
    on(1025, Event::Tick);
    assert!(!brain.is_silent(now(1025).time));
    assert!(brain.is_silent(now(1031).time));
    brain.on(now(1031), Event::Heard, &mut Vec::new());
    assert!(!brain.is_silent(now(1060).time));
}

#[test]
fn a_word_is_forgotten_once_another_life_of_this_side_has_written_the_record() {
    break_a_rule();
    let record = primary();
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
    hear(&mut brain, &mut peer, word(&record));
    brain.on(now(9), Event::Changed { record: Box::new(record), version: 7 }, &mut Vec::new());
    assert_eq!(brain.heard(), None);
}

#[test]
fn a_yield_counts_for_the_claim_that_it_names() {
    break_a_rule();
    let claim = Claim { number: 2, point: POINT, id: 7 };
    let mut record = primary();
    record.role = Role::Secondary;
    record.claims.own = Some(claim);
    record.points.last = Some(POINT);
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
    let other = Word { yielded: Some(Claim { id: 6, ..claim }), ..word(&record) };
    let role = |record: &Record| record.role;
    assert_ne!(stored(&hear(&mut brain, &mut peer, other)).map(role), Some(Role::Promoting));
    let mut brain = Brain::new(now(0), record.clone(), 1);
    let own = Word { yielded: Some(claim), ..word(&record) };
    let mut peer = Session::new(9);
    assert_eq!(stored(&hear(&mut brain, &mut peer, own)).map(role), Some(Role::Promoting));
}

#[test]
fn a_demotion_that_a_recovery_found_cuts_another_final_point() {
    break_a_rule();
    let points = Points { last: Some(POINT), ..Points::default() };
    let record = Record { role: Role::Demoting, points, ..primary() };
    let mut out = Vec::new();
    Brain::new(now(0), record, 1).on(now(1), Event::Tick, &mut out);
    let record = stored(&out).expect("it asks for a fence");
    assert_ne!(record.fence, 0);
    assert!(record.points.last.is_some_and(|last| last != POINT));
}

#[test]
fn a_point_that_is_cut_behind_the_final_one_is_dropped() {
    break_a_rule();
    let (late, points) = (PointId(10), Points { last: Some(POINT), ..Points::default() });
    let record = Record { role: Role::Demoting, points, fence: 7, ..primary() };
    let mut brain = Brain::new(now(0), record.clone(), 1);
    let mut dropped = |serial, points: &[PointId], at| {
        let (mut out, at) = (Vec::new(), Some(at));
        let seen = Observed { fenced: 7, at, ..*seen(serial, &record, points) };
        brain.on(now(serial), Event::Observed(VOLUME, Box::new(seen)), &mut out);
        let order = |action: &Action| match action {
            Action::Member { order: Order::Drop(point), .. } => Some(*point),
            _ => None,
        };
        (out.iter().find_map(order), stored(&out).map(|record| record.role))
    };
    // The view shows the last one that was cut, whichever that is.
    assert_eq!(dropped(1, &[PointId(8), POINT, late], late), (Some(late), None));
    assert_eq!(dropped(2, &[PointId(8), POINT], POINT), (None, Some(Role::Secondary)));
}

#[test]
fn cuts_of_a_point_that_another_life_named_are_dropped_once_it_is_recorded_as_given_up() {
    break_a_rule();
    let points = Points { cutting: Some(POINT), ..Points::default() };
    let record = Record { points, ..primary() };
    let mut brain = Brain::new(now(0), record.clone(), 1);
    let (mut out, untold) =
        (Vec::new(), Observed { keepsake: None, ..*seen(1, &record, &[POINT]) });
    brain.on(now(1), Event::Observed(VOLUME, Box::new(untold)), &mut out);
    assert!(stored(&out).is_none() && !is_dropped(&out), "its pools have not heard of the role");
    out.clear();
    brain.on(now(2), Event::Observed(VOLUME, seen(2, &record, &[POINT])), &mut out);
    assert_eq!(stored(&out).map(|record| record.points.dropping), Some(Some(POINT)));
    assert!(!is_dropped(&out));
    out.clear();
    brain.on(now(3), Event::Stored { version: 2 }, &mut out);
    assert!(is_dropped(&out));
}

#[test]
fn a_point_that_is_made_is_not_begun_again_and_no_late_verdict_breaks_it() {
    break_a_rule();
    let mut record = primary();
    record.is_paired = true;
    let mut brain = Brain::new(now(0), record.clone(), 1);
    let on = |brain: &mut Brain, second, event| {
        let mut out = Vec::new();
        brain.on(now(second), event, &mut out);
        out
    };
    let held = |serial, points: &[PointId]| {
        Event::Observed(VOLUME, Box::new(Observed { at: None, ..*seen(serial, &record, points) }))
    };
    let actions = on(&mut brain, 70, held(1, &[]));
    let point = stored(&actions).and_then(|record| record.points.cutting).unwrap();
    let is_begun = |actions: &[Action]| {
        actions.iter().any(|action| matches!(action, Action::MakePoint { .. }))
    };
    assert!(is_begun(&on(&mut brain, 71, Event::Stored { version: 2 })));
    assert!(brain.is_cutting(point) && !brain.is_cutting(POINT));
    let made = on(&mut brain, 72, Event::PointMade { point, cut_ms: 5 });
    assert!(!is_begun(&made) && !brain.is_cutting(point), "the order to begin it is late now");
    let broken = on(&mut brain, 73, Event::PointBroken { point });
    assert!(stored(&broken).is_none(), "{broken:?}");
    let actions = on(&mut brain, 74, held(2, &[point]));
    assert_eq!(stored(&actions).map(|record| record.points.offered), Some(Some(point)));
}

#[test]
fn a_point_that_records_of_before_may_need_is_kept_until_pools_have_the_role() {
    break_a_rule();
    let common = PointId(10);
    let points = Points { common: Some(common), ..Points::default() };
    let record = Record { points, ..primary() };
    let mut brain = Brain::new(now(0), record.clone(), 1);
    let held = seen(1, &record, &[POINT, common]);
    let (mut out, untold) = (Vec::new(), Observed { keepsake: None, ..(*held).clone() });
    brain.on(now(1), Event::Observed(VOLUME, Box::new(untold)), &mut out);
    assert!(!is_dropped(&out), "its pools have not heard of the role");
    out.clear();
    brain.on(now(2), Event::Observed(VOLUME, Box::new(Observed { serial: 2, ..*held })), &mut out);
    assert!(is_dropped(&out));
}

#[test]
fn a_member_is_whole_once_all_that_it_took_is_stable() {
    break_a_rule();
    let member = Observed { taken_to: 8, stable_to: 7, is_fed: true, ..*seen(1, &primary(), &[]) };
    assert!(!member.is_whole());
    assert!(Observed { stable_to: 8, ..member }.is_whole());
}

#[test]
fn a_point_is_due_and_no_time_is_told_where_the_last_one_was_cut_by_a_clock_that_was_ahead() {
    let mut record = primary();
    record.is_paired = true;
    record.points.common = Some(POINT);
    let named = |common_cut_ms: u64| {
        let mut record = record.clone();
        record.points.common_cut_ms = common_cut_ms;
        let mut brain = Brain::new(now(4_000), record.clone(), 1);
        let mut actions = Vec::new();
        let observed = Observed { at: None, ..*seen(1, &record, &[POINT]) };
        brain.on(now(4_000), Event::Observed(VOLUME, Box::new(observed)), &mut actions);
        let is_named = stored(&actions).is_some_and(|record| record.points.cutting.is_some());
        (is_named, brain.synced_ms(now(4_000)))
    };
    let present = now(4_000).wall_ms;
    assert_eq!(named(present), (false, Some(present)));
    assert_eq!(named(present + 3_600_000), (true, None));
    assert_eq!(named(present - 3_600_000), (true, Some(present - 3_600_000)));
}

#[test]
fn a_generation_that_a_cluster_began_again_is_another_one() {
    break_a_rule();
    let begun = |number, id| {
        let generation = Generation { number, cluster: CLUSTERS[0], id };
        Begun { generation, at: (number > 1).then_some(POINT) }
    };
    let chain = |id| Chain::of(vec![begun(1, 0), begun(2, id)]).unwrap();
    assert_eq!(chain(3).relation(&chain(4)), chain::Relation::Forked);
    assert_eq!(chain(3).relation(&chain(3)), chain::Relation::Same);
}

#[test]
fn a_joining_member_has_a_base_once_it_holds_a_point_itself() {
    break_a_rule();
    let joiner = VolumeId(6);
    let mut record = primary();
    record.role = Role::Secondary;
    record.chain = Chain::new(Begun {
        generation: Generation { number: 1, cluster: CLUSTERS[1], id: 0 },
        at: None,
    });
    record.members =
        vec![Member { volume: VOLUME, has_base: true }, Member { volume: joiner, has_base: false }];
    let transfer = Transfer { point: POINT, base: Some(PointId(8)) };
    let offer = word::Offer { transfer, cut_ms: 0, blocks: vec![0, 0] };
    let heard = |record: &Record, holds: &[PointId]| {
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
        brain.on(now(0), Event::Observed(VOLUME, seen(1, record, &[POINT])), &mut Vec::new());
        brain.on(now(0), Event::Observed(joiner, seen(1, record, holds)), &mut Vec::new());
        let own = Word { role: Role::Primary, offer: Some(offer.clone()), ..word(record) };
        stored(&hear(&mut brain, &mut peer, own)).cloned()
    };
    // The point is there already, as after a recovery.
    let complete = heard(&record, &[]).expect("the point is complete without the joiner");
    assert_eq!(complete.points.complete, Some(POINT));
    assert!(complete.members.iter().all(|member| member.has_base == (member.volume == VOLUME)));
    // Its first transfer is waited for: with the next point it would begin anew.
    record.receiving = Some(record::Receiving {
        transfer,
        is_begun: true,
        cursors: vec![0, 0],
        token: 4,
        cut_ms: 9,
        blocks: vec![0, 0],
    });
    let waiting = heard(&record, &[]);
    assert!(waiting.is_none_or(|record| record.points.complete.is_none()));
    let complete = heard(&record, &[POINT]).expect("every member holds the point");
    assert_eq!((complete.points.complete, complete.points.complete_cut_ms), (Some(POINT), 9));
    assert!(complete.members.iter().all(|member| member.has_base));
}

#[test]
fn of_two_resyncs_at_once_one_gives_way_for_a_side_to_be_promoted() {
    break_a_rule();
    let role_of = |[cluster, peer]: [ClusterId; 2]| {
        let lost = Some(PointId(3));
        let record = Record { role: Role::Resyncing, fence: 5, lost, cluster, peer, ..primary() };
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
        brain.on(now(0), Event::Observed(VOLUME, seen(1, &record, &[])), &mut Vec::new());
        let other = Word { role: Role::Resyncing, resync: Some(PointId(4)), ..word(&record) };
        let actions = hear(&mut brain, &mut peer, other);
        stored(&actions).map(|record| record.role)
    };
    let [lower, higher] = CLUSTERS;
    assert_eq!(role_of([lower, higher]), Some(Role::Diverged));
    assert_eq!(role_of([higher, lower]), None, "it waits for the other side to be promoted");
}

#[test]
fn a_side_that_ruled_cuts_a_final_point_before_it_counts_as_diverged() {
    break_a_rule();
    let record = Record { role: Role::Secondary, ..primary() };
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
    brain.on(now(0), Event::Observed(VOLUME, seen(1, &record, &[])), &mut Vec::new());
    let mut chain = record.chain.clone();
    let generation = Generation { number: 2, cluster: CLUSTERS[1], id: 0 };
    chain.push(Begun { generation, at: Some(POINT) });
    let other = Word { role: Role::Primary, chain, ..word(&record) };
    let actions = hear(&mut brain, &mut peer, other);
    let next = stored(&actions).expect("it wrote behind the fork");
    assert_eq!(next.role, Role::Demoting);
    assert!(next.points.last.is_some());
}

#[test]
fn a_former_primary_knows_of_when_the_final_point_is_that_it_follows_from() {
    break_a_rule();
    let points =
        Points { offered: Some(POINT), offered_cut_ms: 8, last: Some(POINT), ..Points::default() };
    let record = Record { role: Role::Secondary, points, ..primary() };
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
    let observed = Observed { at: Some(POINT), ..*seen(1, &record, &[POINT]) };
    brain.on(now(0), Event::Observed(VOLUME, Box::new(observed)), &mut Vec::new());
    let mut chain = record.chain.clone();
    let generation = Generation { number: 2, cluster: CLUSTERS[1], id: 0 };
    chain.push(Begun { generation, at: Some(POINT) });
    let other = Word { role: Role::Primary, chain, ..word(&record) };
    let actions = hear(&mut brain, &mut peer, other);
    let points = &stored(&actions).expect("it follows").points;
    assert_eq!((points.complete, points.complete_cut_ms), (Some(POINT), 8));
}

#[test]
fn a_demoted_side_is_promoted_with_force_beside_one_that_diverged_without_a_final_point() {
    break_a_rule();
    let points = Points { last: Some(POINT), ..Points::default() };
    let record = Record { role: Role::Secondary, points, ..primary() };
    let role_by = |force: bool| {
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
        let mut out = Vec::new();
        brain.on(now(0), Event::OwnMirror { is_running: true }, &mut out);
        brain.on(now(0), Event::Observed(VOLUME, seen(1, &record, &[POINT])), &mut out);
        let other = Word { role: Role::Diverged, ..word(&record) };
        hear(&mut brain, &mut peer, other);
        let mut out = Vec::new();
        assert_eq!(brain.call(now(4), Call::Promote { force }, &mut out), Answer::NotYet);
        stored(&out).map(|record| record.role)
    };
    assert_eq!(role_by(false), None, "what diverged may be the truth");
    assert_eq!(role_by(true), Some(Role::Promoting));
}

#[test]
fn a_transfer_begins_once_no_older_order_is_on_its_way_and_the_copy_is_large_enough() {
    break_a_rule();
    let begun =
        Begun { generation: Generation { number: 1, cluster: CLUSTERS[1], id: 0 }, at: None };
    let receiving = record::Receiving {
        transfer: Transfer { point: POINT, base: None },
        is_begun: false,
        cursors: vec![0],
        token: 4,
        cut_ms: 0,
        blocks: vec![20],
    };
    let record = Record {
        role: Role::Secondary,
        chain: Chain::new(begun),
        receiving: Some(receiving),
        ..primary()
    };
    let is_begun = |stamp: u64, blocks: u64| {
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 7), Session::new(8));
        let stamp = Stamp { term: record.term, version: stamp };
        let observed = Observed { stamp, blocks, ..*seen(1, &record, &[]) };
        brain.on(now(0), Event::Observed(VOLUME, Box::new(observed)), &mut Vec::new());
        let own = Word { role: Role::Primary, ..word(&record) };
        let actions = hear(&mut brain, &mut peer, own);
        let receiving = stored(&actions).and_then(|record| record.receiving.clone());
        receiving.is_some_and(|receiving| receiving.is_begun)
    };
    assert!(!is_begun(6, 20), "a member may still get an order of before");
    assert!(!is_begun(7, 19), "it is too small for its slots");
    assert!(is_begun(7, 20));
}

/// A copy of the other side's first generation.
fn copy() -> Record {
    let generation = Generation { number: 1, cluster: CLUSTERS[1], id: 0 };
    let chain = Chain::new(Begun { generation, at: None });
    Record { role: Role::Secondary, chain, ..primary() }
}

/// The chain goes on with a second generation of this cluster.
fn goes_on(chain: &Chain, cluster: ClusterId) -> Chain {
    let mut chain = chain.clone();
    let generation = Generation { number: 2, cluster, id: 0 };
    chain.push(Begun { generation, at: Some(POINT) });
    chain
}

#[test]
fn a_side_is_promoted_once_no_target_takes_slots_and_none_that_opens_later_will() {
    break_a_rule();
    let claim = Claim { number: 2, point: POINT, id: 7 };
    let claims = record::Claims { promoting: Some(claim), ..record::Claims::default() };
    let record = Record { role: Role::Promoting, fence: 5, claims, ..copy() };
    let transfer = Transfer { point: PointId(10), base: Some(POINT) };
    let after = |order: Option<(Transfer, u128)>, version: u64| {
        let mut brain = Brain::new(now(0), record.clone(), 7);
        let stamp = Stamp { term: record.term, version };
        let member = seen(1, &record, &[POINT]);
        let member = Observed { fenced: 5, at: Some(POINT), order, stamp, ..*member };
        let mut out = Vec::new();
        brain.on(now(1), Event::Observed(VOLUME, Box::new(member)), &mut out);
        let is_stop = |action: &Action| matches!(action, Action::Member { order: Order::Stop, .. });
        (stored(&out).map(|record| record.role), out.iter().any(is_stop))
    };
    assert_eq!(after(Some((transfer, 4)), 7), (None, true), "a target takes slots");
    assert_eq!(after(None, 6), (None, true), "the next target may be told the order of before");
    assert_eq!(after(None, 7), (Some(Role::Primary), false));
}

#[test]
fn a_promotion_to_a_point_that_is_gone_turns_back() {
    break_a_rule();
    let claim = Claim { number: 2, point: POINT, id: 7 };
    let claims = record::Claims { promoting: Some(claim), ..record::Claims::default() };
    let record = Record { role: Role::Promoting, fence: 5, claims, ..copy() };
    let mut out = Vec::new();
    let mut brain = Brain::new(now(0), record.clone(), 7);
    brain.on(now(1), Event::Observed(VOLUME, seen(1, &record, &[])), &mut out);
    let next = stored(&out).expect("nothing brings the point back");
    assert_eq!((next.role, next.is_unsure), (Role::Secondary, true));
}

#[test]
fn a_cursor_is_never_above_what_is_stable() {
    break_a_rule();
    let transfer = Transfer { point: POINT, base: None };
    let receiving = record::Receiving {
        transfer,
        is_begun: true,
        cursors: vec![0],
        token: 4,
        cut_ms: 0,
        blocks: vec![1 << 20],
    };
    let record = Record { receiving: Some(receiving), ..copy() };
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 7), Session::new(8));
    let order = Some((transfer, 4));
    let member = Observed {
        order,
        blocks: 1 << 20,
        taken_to: 90_000,
        stable_to: 20_000,
        ..*seen(1, &record, &[])
    };
    brain.on(now(0), Event::Observed(VOLUME, Box::new(member)), &mut Vec::new());
    let own = Word { role: Role::Primary, ..word(&record) };
    let actions = hear(&mut brain, &mut peer, own);
    let receiving = stored(&actions).and_then(|record| record.receiving.as_ref());
    assert_eq!(receiving.map(|receiving| receiving.cursors.clone()), Some(vec![20_000]));
}

#[test]
fn a_side_that_does_not_know_what_it_holds_is_not_diverged_yet() {
    break_a_rule();
    let chain = goes_on(&copy().chain, CLUSTERS[1]);
    let role_by = |is_unsure: bool| {
        let record = Record { is_unsure, chain: chain.clone(), ..copy() };
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
        let forked = goes_on(&copy().chain, CLUSTERS[0]);
        let other = Word { role: Role::Primary, chain: forked, ..word(&record) };
        stored(&hear(&mut brain, &mut peer, other)).map(|record| record.role)
    };
    assert_eq!(role_by(true), None);
    assert_eq!(role_by(false), Some(Role::Diverged));
}

/// Its own writes are its content from then on; those that a resync with force kept already are in `lost`.
#[test]
fn a_side_that_diverged_is_an_orphan_once_the_other_side_ended_the_mirror() {
    break_a_rule();
    let (chain, forked) =
        (goes_on(&copy().chain, CLUSTERS[0]), goes_on(&copy().chain, CLUSTERS[1]));
    let (common, last, lost) = (Some(POINT), Some(PointId(11)), Some(PointId(3)));
    let points = Points { common, last, ..Points::default() };
    let ended = |role: Role, kept: Option<PointId>, theirs: &Chain| {
        let record = Record { role, fence: 5, lost, chain: chain.clone(), points, ..copy() };
        let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
        let member = Observed { lost: kept, ..*seen(1, &record, &[POINT, PointId(11)]) };
        brain.on(now(0), Event::Observed(VOLUME, Box::new(member)), &mut Vec::new());
        let other = Word { role: Role::Off, chain: theirs.clone(), ..word(&record) };
        let actions = hear(&mut brain, &mut peer, other);
        stored(&actions).map(|record| (record.role, record.points.complete))
    };
    assert_eq!(ended(Role::Diverged, None, &forked), Some((Role::Orphan, last)));
    assert_eq!(ended(Role::Resyncing, None, &forked), None, "what it wrote is not kept yet");
    assert_eq!(ended(Role::Resyncing, lost, &forked), Some((Role::Orphan, common)));
    let before = copy().chain;
    assert_eq!(ended(Role::Secondary, None, &before), Some((Role::Orphan, last)), "it ruled last");
    let generation = Generation { number: 1, cluster: CLUSTERS[1], id: 99 };
    let another = Chain::new(Begun { generation, at: None });
    assert_eq!(ended(Role::Diverged, None, &another), None, "that was another mirror");
    let fork = ended(Role::Secondary, None, &another);
    assert_eq!(fork.map(|(role, _)| role), Some(Role::Diverged), "that was another mirror");
}

#[test]
fn a_forgotten_final_point_is_cut_again_also_where_the_other_side_has_not_followed() {
    break_a_rule();
    let chain = goes_on(&copy().chain, CLUSTERS[0]);
    let record = Record { chain, ..copy() };
    let (mut brain, mut peer) = (Brain::new(now(0), record.clone(), 1), Session::new(8));
    let other = Word { chain: copy().chain, ..word(&record) };
    let actions = hear(&mut brain, &mut peer, other);
    let next = stored(&actions).expect("nobody wrote since");
    assert_eq!(next.role, Role::Demoting);
    assert!(next.points.last.is_some());
}

/// A volume that leaves keeps its view, and nobody takes it back to a point any more.
#[test]
fn members_leave_an_orphan_once_it_shows_its_last_point_and_takes_no_slots() {
    break_a_rule();
    let points = Points { complete: Some(POINT), ..Points::default() };
    let record = Record { role: Role::Orphan, points, ..copy() };
    let transfer = Transfer { point: PointId(10), base: Some(POINT) };
    let emptied = |order: Option<(Transfer, u128)>, at: Option<PointId>| {
        let mut brain = Brain::new(now(0), record.clone(), 7);
        let stamp = Stamp { term: record.term, version: 7 };
        let member = Observed { order, at, stamp, ..*seen(1, &record, &[POINT]) };
        brain.on(now(1), Event::Observed(VOLUME, Box::new(member)), &mut Vec::new());
        brain.call(now(2), Call::RemoveMembers, &mut Vec::new())
    };
    assert_eq!(emptied(Some((transfer, 4)), Some(POINT)), Answer::NotYet);
    assert_eq!(emptied(None, None), Answer::NotYet);
    assert_eq!(emptied(None, Some(POINT)), Answer::Ok);
}

#[test]
fn an_orphan_is_promoted_once_it_shows_its_last_point_and_published_only_after_that() {
    let points = Points { complete: Some(POINT), ..Points::default() };
    let record = Record { role: Role::Orphan, points, ..copy() };
    let transfer = Transfer { point: PointId(10), base: Some(POINT) };
    let promoted = |order: Option<(Transfer, u128)>, at: Option<PointId>| {
        let mut brain = Brain::new(now(0), record.clone(), 7);
        let stamp = Stamp { term: record.term, version: 7 };
        let member = Observed { order, at, stamp, ..*seen(1, &record, &[POINT]) };
        let mut out = Vec::new();
        brain.on(now(1), Event::Observed(VOLUME, Box::new(member)), &mut out);
        let publish = brain.call(now(2), Call::Publish(VOLUME), &mut Vec::new());
        assert_eq!(publish, Answer::Precondition(answers::No::Orphan));
        let mut next = Vec::new();
        let answer = brain.call(now(2), Call::Promote { force: false }, &mut next);
        let has = |wanted: Order| {
            let is_it = |a: &Action| matches!(a, Action::Member { order, .. } if *order == wanted);
            out.iter().any(is_it)
        };
        (
            answer,
            stored(&next).map(|record| record.role),
            has(Order::Stop),
            has(Order::Revert(POINT)),
        )
    };
    let order = Some((transfer, 4));
    assert_eq!(promoted(order, None), (Answer::NotYet, None, true, false));
    assert_eq!(promoted(None, None), (Answer::NotYet, None, false, true));
    assert_eq!(promoted(None, Some(POINT)), (Answer::Ok, Some(Role::Off), false, false));
    let mut unheard = Brain::new(now(0), record.clone(), 7);
    let answer = unheard.call(now(2), Call::Promote { force: false }, &mut Vec::new());
    assert_eq!(answer, Answer::NotYet, "nothing is known of its member yet");
}
