//! Assignments that change in part.

use super::*;
use crate::assignment::{AssignmentChange, PoolState};

fn wanted(guid: u128, phase: Phase, blocks: u64) -> Wanted {
    Wanted {
        identity: ReplicaIdentity {
            volume: VolumeId(guid),
            replica: ReplicaId(guid),
            guid: ReplicaGuid(guid),
            volume_spec: Bytes::new(),
        },
        blocks,
        phase,
        source: None,
        flatten: false,
        fence: Default::default(),
        membership: Membership { formed: false, ..membership() },
    }
}

/// Returns the pool's report of each of its replicas.
fn told(process: &Process) -> Vec<(u128, &'static str)> {
    told_of(process, true)
}

fn state_of(process: &Process, all: bool) -> PoolState {
    let (answer, state) = tokio::sync::oneshot::channel();
    process.send(Input::State { all, answer });
    state.blocking_recv().unwrap()
}

fn told_of(process: &Process, all: bool) -> Vec<(u128, &'static str)> {
    let state = state_of(process, all);
    let mut told: Vec<_> = state.replicas.iter().map(|r| (r.guid.0, r.state)).collect();
    told.sort_unstable();
    told
}

fn change(process: &Process, wanted: Vec<Wanted>, removed: &[u128]) {
    let removed = removed.iter().map(|guid| ReplicaGuid(*guid)).collect();
    process.send(Input::Reassign(AssignmentChange { wanted, removed }));
}

#[test]
fn the_controller_is_told_of_a_creation_and_of_a_deletion_once_they_are_on_media() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), &dir.path().join(WITNESS_FILE));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let made = || {
        let told = async {
            tokio::time::timeout(std::time::Duration::from_secs(20), process.made.notified()).await
        };
        runtime.block_on(told).expect("it is told");
    };
    process.send(Input::Assign(Assignment(vec![wanted(1, Phase::Init, 64)])));
    made();
    assert_eq!(told(&process), [(1, "created")]);
    change(&process, vec![wanted(1, Phase::Delete, 64)], &[]);
    made();
    assert_eq!(told(&process), [(1, "gone")]);
    process.stop();
}

#[test]
fn a_record_that_a_replica_keeps_is_told_of_once_it_is_on_media_and_after_a_start() {
    use prost::Message as _;
    let dir = tempfile::tempdir().unwrap();
    let disk = new_disk();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    let keeps = |generation| {
        let keepsake =
            quoin_api::control::Keepsake { record: vec![generation as u8; 9], generation };
        let mut wanted = wanted(1, Phase::Init, 64);
        wanted.identity.volume_spec = keepsake.encode_to_vec().into();
        wanted
    };
    let told = |process: &Process, all| {
        let state = state_of(process, all);
        state.replicas.iter().map(|replica| replica.record_generation).collect::<Vec<u64>>()
    };
    process.send(Input::Assign(Assignment(vec![keeps(4)])));
    eventually("it is made", || (told(&process, true) == [4]).then_some(()));
    assert!(told(&process, false).is_empty());
    change(&process, vec![keeps(6)], &[]);
    eventually("the replica is told of", || (told(&process, false) == [6]).then_some(()));
    change(&process, vec![keeps(5)], &[]);
    assert_eq!(told(&process, true), [6], "an older record takes nothing away");
    process.stop();
    let process = Process::start(&disk, &dir.path().join(WITNESS_FILE));
    eventually("it is opened", || (told(&process, true) == [6]).then_some(()));
    process.stop();
}

#[test]
fn between_reports_of_all_replicas_those_that_were_used_are_told_of_alone() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), &dir.path().join(WITNESS_FILE));
    let first = state_of(&process, false);
    assert!(!first.is_partial && first.space.capacity_bytes > 0, "nothing was told before");
    process.create_replica();
    let (other, own) = ((1, "created"), MEMBER.guid.0);
    process.send(Input::Assign(Assignment(vec![wanted(1, Phase::Init, 64)])));
    eventually("both are there", || (told(&process) == [other, (own, "created")]).then_some(()));
    assert_eq!(told_of(&process, false), [], "neither was used since");
    let session = process.session(1);
    assert!(session.is_some());
    assert_eq!(told_of(&process, false).last(), Some(&(own, "open")));
    drop(session);
    assert_eq!(told(&process)[0], other);
    process.stop();
}

#[test]
fn a_change_is_done_and_failed_earlier_ones_are_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(&new_disk(), &dir.path().join(WITNESS_FILE));
    // The second one has no size that a pool can make.
    let first =
        vec![wanted(1, Phase::Init, 64), wanted(2, Phase::Recreate, 0), wanted(3, Phase::Keep, 64)];
    process.send(Input::Assign(Assignment(first)));
    eventually("the first is made", || {
        (told(&process) == [(1, "created"), (3, "gone")]).then_some(())
    });
    let refusals = || {
        let notices = process.notices.take();
        let refused = notices.iter().filter(|n| n.reason == "ReplicaNotCreated").count();
        process.notices.restore(notices);
        refused
    };
    let before = refusals();
    assert!(before > 0);
    change(&process, vec![wanted(4, Phase::Init, 64)], &[3]);
    eventually("the fourth is made", || {
        (told(&process) == [(1, "created"), (4, "created")]).then_some(())
    });
    assert!(refusals() > before, "it is tried again with a change of another one");
    change(&process, vec![wanted(2, Phase::Recreate, 64), wanted(4, Phase::Delete, 64)], &[]);
    let all = [(1, "created"), (2, "created"), (4, "gone")];
    eventually("the second is made, the fourth deleted", || (told(&process) == all).then_some(()));
    change(&process, vec![], &[1, 4]);
    eventually("what is not assigned is kept", || {
        (told(&process) == [(1, "created"), (2, "created")]).then_some(())
    });
    process.stop();
}
