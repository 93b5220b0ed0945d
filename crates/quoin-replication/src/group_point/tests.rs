//! Attempts at a point, by what their targets answer.

use proptest::prelude::*;

use super::*;
use quoin_types::entry::Chain;
use quoin_types::message::SnapshotHead;

const POINT: PointId = PointId(9);

fn at(ms: u64) -> Time {
    Time::from_millis(ms)
}

fn begin(volumes: u128) -> GroupPoint {
    let ids = (1..=volumes).map(|n| (VolumeId(n), SnapshotId(100 + n)));
    GroupPoint::begin(at(0), POINT, 1000, ids)
}

/// Answer of a well-behaved target of the volume to a command.
fn answer(volume: VolumeId, command: PointCommand) -> PointAnswer {
    let (lsn, epoch) = (Lsn(volume.0 as u64), Epoch(5));
    match command {
        PointCommand::Hold { .. } => PointAnswer::Step(PointOutcome::Held),
        PointCommand::Cut { snapshot } => {
            PointAnswer::Step(PointOutcome::Cut { snapshot, lsn, epoch })
        }
        PointCommand::Release => PointAnswer::Step(PointOutcome::Released { unbroken: true }),
        PointCommand::Confirm { snapshot: id } => {
            let head = Some(SnapshotHead { epoch, chain: Chain(7) });
            PointAnswer::Snapshot { id, outcome: SnapshotOutcome::Made { lsn, head } }
        }
    }
}

fn kinds(point: &GroupPoint) -> Vec<(u128, &'static str)> {
    let kind = |command| match command {
        PointCommand::Hold { .. } => "hold",
        PointCommand::Cut { .. } => "cut",
        PointCommand::Release => "release",
        PointCommand::Confirm { .. } => "confirm",
    };
    point.commands().into_iter().map(|(volume, command)| (volume.0, kind(command))).collect()
}

fn obey(point: &mut GroupPoint, volume: u128) {
    let told = point.commands().into_iter().find(|(of, _)| of.0 == volume);
    let (volume, command) = told.expect("it is told something");
    point.on(at(1), volume, answer(volume, command));
}

#[test]
fn each_step_begins_when_every_volume_is_through_with_the_one_before() {
    let mut point = begin(2);
    for step in ["hold", "cut", "release", "confirm"] {
        assert_eq!(kinds(&point), [(1, step), (2, step)]);
        obey(&mut point, 2);
        assert_eq!(kinds(&point), [(1, step)], "the other one waits");
        obey(&mut point, 1);
    }
    let Some(PointVerdict::Made(cuts)) = point.verdict() else { panic!("{point:?}") };
    let told: Vec<_> = cuts.iter().map(|cut| (cut.volume.0, cut.snapshot.0, cut.lsn)).collect();
    assert_eq!(told, [(1, 101, Lsn(1)), (2, 102, Lsn(2))]);
    assert!(point.commands().is_empty() && point.due().is_none());
}

#[test]
fn every_volume_of_the_largest_group_is_held_cut_and_confirmed() {
    let largest = POINT_VOLUMES_MAX as u128;
    let mut point = begin(largest);
    for step in ["hold", "cut", "release", "confirm"] {
        let told: Vec<_> = (1..=largest).map(|volume| (volume, step)).collect();
        assert_eq!(kinds(&point), told);
        (1..=largest).for_each(|volume| obey(&mut point, volume));
    }
    let Some(PointVerdict::Made(cuts)) = point.verdict() else { panic!("{point:?}") };
    let told: Vec<_> = cuts.iter().map(|cut| (cut.volume.0, cut.snapshot.0)).collect();
    assert_eq!(told, (1..=largest).map(|n| (n, 100 + n)).collect::<Vec<_>>());
}

#[test]
fn a_hold_that_ended_breaks_the_attempt_and_the_others_are_released_at_once() {
    for steps in 0..3 {
        let mut point = begin(2);
        for _ in 0..steps {
            obey(&mut point, 1);
            obey(&mut point, 2);
        }
        let ended = PointAnswer::Step(PointOutcome::Released { unbroken: false });
        point.on(at(2), VolumeId(1), ended);
        assert_eq!(kinds(&point), [(2, "release")], "after {steps}");
        obey(&mut point, 2);
        let broken = Broken::Hold(VolumeId(1));
        assert_eq!(point.verdict(), Some(PointVerdict::Broken(broken)), "after {steps}");
    }
}

#[test]
fn a_cut_that_is_another_one_on_media_or_none_does_not_count() {
    let head = |epoch| Some(SnapshotHead { epoch: Epoch(epoch), chain: Chain(7) });
    for outcome in [
        SnapshotOutcome::Gone,
        SnapshotOutcome::Made { lsn: Lsn(1), head: head(6) },
        SnapshotOutcome::Made { lsn: Lsn(2), head: head(5) },
        SnapshotOutcome::Made { lsn: Lsn(1), head: None },
    ] {
        let mut point = begin(1);
        (0..3).for_each(|_| obey(&mut point, 1));
        let id = SnapshotId(101);
        point.on(at(2), VolumeId(1), PointAnswer::Snapshot { id, outcome });
        point.tick(at(60_000));
        let broken = Broken::Lost(VolumeId(1));
        assert_eq!(point.verdict(), Some(PointVerdict::Broken(broken)), "{outcome:?}");
    }
}

#[test]
fn a_silent_target_ends_the_attempt_and_is_named() {
    for steps in 0..4 {
        let mut point = begin(2);
        for _ in 0..steps {
            obey(&mut point, 1);
            obey(&mut point, 2);
        }
        obey(&mut point, 1);
        point.tick(at(1_000));
        assert!(point.verdict().is_none(), "after {steps}");
        point.tick(at(60_000));
        point.tick(at(120_000));
        let broken = Broken::Silent(VolumeId(2));
        assert_eq!(point.verdict(), Some(PointVerdict::Broken(broken)), "after {steps}");
    }
}

#[test]
fn a_refusal_ends_the_attempt_for_good() {
    let mut point = begin(1);
    obey(&mut point, 1);
    point.on(at(1), VolumeId(1), PointAnswer::Step(PointOutcome::TooManySnapshots));
    obey(&mut point, 1);
    let Some(PointVerdict::Broken(broken)) = point.verdict() else { panic!("{point:?}") };
    assert_eq!(broken, Broken::TooManySnapshots(VolumeId(1)));
    assert!(!broken.may_pass());
}

fn any_answer() -> impl Strategy<Value = PointAnswer> {
    let cut = (100..104u128, 0..4u64).prop_map(|(id, lsn)| {
        let (snapshot, lsn, epoch) = (SnapshotId(id), Lsn(lsn), Epoch(5));
        PointAnswer::Step(PointOutcome::Cut { snapshot, lsn, epoch })
    });
    let made = (100..104u128, 0..4u64).prop_map(|(id, lsn)| {
        let head = Some(SnapshotHead { epoch: Epoch(5), chain: Chain(7) });
        let outcome = SnapshotOutcome::Made { lsn: Lsn(lsn), head };
        PointAnswer::Snapshot { id: SnapshotId(id), outcome }
    });
    prop_oneof![
        3 => Just(PointAnswer::Step(PointOutcome::Held)),
        3 => cut,
        3 => any::<bool>().prop_map(|unbroken| {
            PointAnswer::Step(PointOutcome::Released { unbroken })
        }),
        3 => made,
        1 => Just(PointAnswer::Step(PointOutcome::TooManySnapshots)),
    ]
}

proptest! {
    /// Answers that are late, early, repeated, of other volumes or invented.
    #[test]
    fn whatever_is_answered_a_point_counts_only_with_every_hold_cut_and_release(
        answers in prop::collection::vec((1..5u128, any_answer(), 0..400u64), 0..60)
    ) {
        let mut point = begin(3);
        let mut now = at(0);
        let mut unbroken = std::collections::BTreeSet::new();
        for (volume, answer, ms) in answers {
            now = now + Duration::from_millis(ms);
            point.on(now, VolumeId(volume), answer);
            if answer == PointAnswer::Step(PointOutcome::Released { unbroken: true }) {
                unbroken.insert(volume);
            }
            prop_assert!(point.commands().len() <= 3);
        }
        if let Some(PointVerdict::Made(cuts)) = point.verdict() {
            prop_assert_eq!(cuts.len(), 3);
            prop_assert!((1..=3).all(|volume| unbroken.contains(&volume)));
        }
        // It ends in any case.
        for _ in 0..3 {
            now = now + Duration::from_secs(60);
            point.tick(now);
        }
        prop_assert!(point.verdict().is_some());
    }
}
