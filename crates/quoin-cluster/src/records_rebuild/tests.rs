use proptest::prelude::*;
use quoin_types::{Lsn, ReplicaId, TermId};

use super::*;
use crate::records::{AttachmentRecord, Grants, Opened};

mod hostile;

const VOLUME: VolumeId = VolumeId(7);
/// Term of the recovery; all epochs of these tests were granted before it.
const TERM: Term = Term { number: 1, id: TermId(1) };

fn member(n: u128) -> Member {
    Member { id: ReplicaId(n), guid: ReplicaGuid(n) }
}

fn rule(version: u64, known: &[u128]) -> Rule {
    let rf = known.len() as u8;
    let known = known.iter().copied().map(member).collect();
    Rule { membership_version: version, rf, cf: rf / 2 + 1, known }
}

fn complete(spec: &VolumeSpec) -> Option<Spec> {
    Some(Spec::plain(&spec.name, spec.replicas as u8, 2))
}

fn spec() -> VolumeSpec {
    VolumeSpec { name: "db".into(), size_bytes: 1 << 20, replicas: 3, ..VolumeSpec::default() }
}

/// The record of a volume with these replicas, replica n in pool n.
fn record(version: u64, known: &[u128], generation: u64) -> VolumeRecord {
    let spec = Spec::plain("db", 3, 2);
    let members =
        known.iter().map(|n| MemberRecord { id: Text(ReplicaId(*n)), guid: Text(ReplicaGuid(*n)) });
    let replicas = known.iter().map(|n| ReplicaRecord {
        id: Text(ReplicaId(*n)),
        guid: Text(ReplicaGuid(*n)),
        pool: format!("pool-{n}"),
        phase: ReplicaPhase::Keep,
        leaving: false,
        placed: false,
        cause: Cause::Asked,
    });
    let rf = known.len() as u8;
    VolumeRecord {
        id: Text(VOLUME),
        spec,
        size_bytes: 1 << 20,
        phase: VolumePhase::Ready,
        created_ms: 1,
        membership: MembershipRecord {
            version,
            rf,
            cf: rf / 2 + 1,
            drf: rf,
            known: members.collect(),
            retired: Vec::new(),
            formed: true,
        },
        replicas: replicas.collect(),
        discarded: Vec::new(),
        attachments: Vec::new(),
        opened: Opened { owner: None, epoch: 5, incarnation: Text(Incarnation(1)) },
        consistency_factor: 0,
        may_have_lost_ms: 0,
        generation,
        source: None,
        grants: Grants::default(),
        used: Default::default(),
        mirror: None,
    }
}

/// Replica n in pool n, opened in epoch 5 under this rule.
fn held(n: u128, rule: &Rule, note: Option<VolumeRecord>) -> Held {
    Held {
        pool: format!("pool-{n}"),
        trusted: true,
        volume: VOLUME,
        member: member(n),
        quorum: true,
        damaged: false,
        promised: Epoch(5),
        incarnation: Incarnation(1),
        position: Position { epoch: Epoch(5), lsn: Lsn(100) },
        blocks: 256,
        spec: Some(spec()),
        note: note.map(Box::new),
        membership: None,
        view: Some(rule.clone()),
        joint: None,
    }
}

fn judged(record: Option<&VolumeRecord>, held: Vec<Held>, deleted: &[u128]) -> Finding {
    judged_without(&[], record, held, deleted, false)
}

/// See [`judged`]; these pools are away.
fn judged_without(
    away: &[&str],
    record: Option<&VolumeRecord>,
    held: Vec<Held>,
    deleted: &[u128],
    discard_left_over: bool,
) -> Finding {
    let deleted = deleted.iter().copied().map(ReplicaGuid).collect();
    let away = away.iter().map(|pool| (*pool).to_owned()).collect();
    decide(&Evidence {
        volume: VOLUME,
        record,
        held,
        deleted: &deleted,
        away: &away,
        term: TERM,
        complete: &complete,
        discard_left_over,
        now_ms: 1,
    })
}

fn listed(finding: &Finding) -> Vec<u128> {
    let written = finding.write.as_ref().unwrap();
    let mut known: Vec<u128> = written.membership.known.iter().map(|m| m.guid.0.0).collect();
    known.sort_unstable();
    known
}

/// The volume may have gone to another node since the copy was made.
#[test]
fn an_epoch_that_the_record_did_not_know_is_nobodys_whom_it_names() {
    let mut old = record(2, &[1, 2], 4);
    old.grants.holder = "n1".to_owned();
    let told = |n| Held {
        promised: Epoch(8),
        incarnation: Incarnation(2),
        ..held(n, &rule(2, &[1, 2]), None)
    };
    let written = judged(Some(&old), vec![told(1), told(2)], &[]).write.expect("a newer epoch");
    assert_eq!((written.opened.epoch, written.grants.holder.as_str()), (8, ""));
}

#[test]
fn a_record_that_was_lost_is_made_whole_from_what_the_pools_were_told_of_it() {
    let mut told = record(2, &[1, 2, 3], 9);
    told.attachments.push(AttachmentRecord {
        node: "n1".into(),
        read_only: false,
        usage: "mount".into(),
        device: false,
        sharing: Default::default(),
        replay: Default::default(),
        client: 0,
    });
    let current = rule(2, &[1, 2, 3]);
    let mut all: Vec<Held> = (1..=3).map(|n| held(n, &current, Some(told.clone()))).collect();
    // One pool was away when the record changed last; another one promised most.
    all[0].note = Some(Box::new(record(2, &[1, 2, 3], 8)));
    all[2].promised = Epoch(6);
    all[2].incarnation = Incarnation(4);
    let finding = judged(None, all, &[]);
    assert_eq!((finding.outcome, finding.answered, finding.needed), (Outcome::Created, 3, 2));
    let written = *finding.write.clone().unwrap();
    assert_eq!((written.opened.epoch, written.opened.incarnation.0), (6, Incarnation(4)));
    assert_eq!((written.grants.epochs_skipped, written.generation), (EPOCHS_SKIPPED, 10));
    // The target that serves it serves on: the attachment is there, and the epoch is its own.
    assert_eq!(written.opened.owner.as_deref(), Some("n1"));
    let expected = VolumeRecord {
        opened: Opened { owner: Some("n1".into()), epoch: 6, incarnation: Text(Incarnation(4)) },
        grants: Grants {
            epochs_skipped: EPOCHS_SKIPPED,
            former: [(ANY_NODE.to_owned(), 5)].into(),
            ..told.grants.clone()
        },
        generation: 10,
        ..told
    };
    assert_eq!(written, expected);
}

/// Two controllers that began one term at once grant the same epochs.
#[test]
fn an_epoch_that_was_taken_back_is_not_the_one_that_a_rival_granted() {
    let current = rule(2, &[1, 2, 3]);
    let mut own = record(2, &[1, 2, 3], 9);
    (own.opened.epoch, own.opened.incarnation, own.grants.fenced) = (7, Text(Incarnation(0)), 7);
    let mut all: Vec<Held> = (1..=3).map(|n| held(n, &current, None)).collect();
    for one in &mut all {
        (one.promised, one.incarnation) = (Epoch(7), Incarnation(0));
    }
    let heeded = judged(Some(&own), all.clone(), &[]);
    assert_eq!(heeded.outcome, Outcome::AsRecorded, "{}", heeded.message);
    all[1].incarnation = Incarnation(4);
    let written = *judged(Some(&own), all, &[]).write.unwrap();
    assert_eq!((written.opened.epoch, written.opened.incarnation.0), (7, Incarnation(4)));
    assert!(
        written.is_granted(),
        "it is taken back by the next epoch where nobody owns the volume"
    );
}

#[test]
fn a_record_that_agrees_stays_as_it_is_even_where_a_pool_is_away() {
    let own = record(2, &[1, 2, 3], 9);
    let current = rule(2, &[1, 2, 3]);
    let all = |count| (1..=count).map(|n| held(n, &current, Some(own.clone()))).collect();
    for count in [3, 2, 1, 0] {
        let finding = judged(Some(&own), all(count), &[]);
        assert_eq!((finding.outcome, finding.write), (Outcome::AsRecorded, None), "{count}");
        assert_eq!(finding.message.is_empty(), count >= 2, "{}", finding.message);
    }
}

#[test]
fn the_newest_membership_that_anybody_knows_rules_over_an_old_copy_of_the_record() {
    let old = record(2, &[1, 2, 3], 4);
    // Replica 3 was replaced by 4, and the record of that reached only one pool.
    let (before, after) = (rule(2, &[1, 2, 3]), rule(3, &[1, 2, 4]));
    let mut told = record(3, &[1, 2, 4], 7);
    told.membership.retired.push(Text(ReplicaGuid(3)));
    let back = held(3, &before, Some(old.clone()));
    let all =
        vec![held(1, &after, None), held(2, &before, None), back, held(4, &after, Some(told))];
    let finding = judged(Some(&old), all, &[]);
    assert_eq!((finding.outcome, finding.version), (Outcome::Updated, 3));
    assert_eq!(listed(&finding), [1, 2, 4]);
    let written = finding.write.as_ref().unwrap();
    assert_eq!(written.membership.retired, [Text(ReplicaGuid(3))]);
    let standing = |n: usize| finding.standings[n].1;
    assert_eq!([0, 1, 2, 3].map(standing), ["known", "known", "retired", "known"]);
    assert!(written.discarded.is_empty(), "nothing is deleted unless that is asked for");
}

#[test]
fn a_replica_that_counted_once_and_is_not_listed_any_more_is_retired_without_a_record() {
    let (before, after) = (rule(2, &[1, 2, 3]), rule(3, &[1, 2, 4]));
    let all = vec![held(1, &after, None), held(4, &after, None), held(3, &before, None)];
    let finding = judged(None, all, &[]);
    assert_eq!(listed(&finding), [1, 2, 4]);
    assert_eq!(finding.write.unwrap().membership.retired, [Text(ReplicaGuid(3))]);
}

#[test]
fn a_joint_view_rules_unless_it_was_taken_back() {
    let (before, after) = (rule(2, &[1, 2, 3]), rule(3, &[1, 2, 4]));
    let told = record(2, &[1, 2, 3], 4);
    let joint = |n| Held { joint: Some(after.clone()), ..held(n, &before, Some(told.clone())) };
    // Its swap may have been made, and one pool's word retires no replica that is here.
    let finding = judged(None, vec![joint(1), held(3, &before, Some(told.clone()))], &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    assert!(finding.message.contains("pool-1 alone"), "{}", finding.message);
    // Only then no target can have written without the two others.
    let finding = judged(None, vec![joint(1), joint(3)], &[]);
    assert_eq!((finding.outcome, finding.version), (Outcome::Undecided, 3));
    assert_eq!(listed(&finding), [1, 2, 4]);
    assert!(finding.message.contains("1 of 3") && finding.message.contains("2 are needed"));
    let finding = judged(None, vec![joint(1), joint(3), joint(4)], &[]);
    assert_eq!((finding.outcome, finding.version), (Outcome::Created, 3));
    // Replicas 2 and 3 may have taken it back and acknowledged writes that no replica here has.
    let finding = judged(None, vec![joint(1), joint(4)], &[]);
    assert_eq!((finding.outcome, finding.version), (Outcome::Undecided, 2));
    assert_eq!(listed(&finding), [1, 2, 3]);
    // A later View without it: it was given up before the swap was sent.
    let mut later = held(2, &before, Some(told.clone()));
    later.position.lsn = Lsn(101);
    let finding = judged(None, vec![joint(1), later], &[]);
    assert_eq!((finding.outcome, finding.version), (Outcome::Created, 2));
    assert_eq!(listed(&finding), [1, 2, 3]);
}

#[test]
fn a_volume_with_too_few_replicas_names_them_and_stays_closed() {
    let current = rule(2, &[1, 2, 3]);
    let told = record(2, &[1, 2, 3], 4);
    let one = || held(1, &current, Some(told.clone()));
    let harmed = [
        Held { trusted: false, ..held(2, &current, None) },
        Held { damaged: true, ..held(2, &current, None) },
        Held { quorum: false, ..held(2, &current, None) },
    ];
    for harmed in harmed {
        let finding = judged(None, vec![one(), harmed], &[]);
        assert_eq!((finding.outcome, finding.answered), (Outcome::Undecided, 1));
        assert!(finding.message.contains("quoin volume recover"), "{}", finding.message);
        let written = finding.write.unwrap();
        assert_eq!(written.replicas[2].pool, "pool-3", "where the missing one was is known");
        assert!(written.membership.formed && written.membership.rf == 3);
    }
}

#[test]
fn two_accounts_of_one_version_and_one_replica_in_two_pools_are_left_undecided() {
    let (one, other) = (rule(3, &[1, 2, 4]), rule(3, &[1, 2, 5]));
    let all = vec![held(1, &one, None), held(2, &other, None)];
    let finding = judged(None, all, &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    assert!(finding.message.contains("several ways"), "{}", finding.message);
    // An old copy that ruled meanwhile is not what replicas were served under.
    let stray = record(3, &[1, 2, 5], 9);
    let all = vec![held(1, &one, None), held(2, &one, None)];
    assert_eq!(listed(&judged(Some(&stray), all, &[])), [1, 2, 4]);
    let copied = Held { pool: "copy".into(), ..held(1, &one, None) };
    let finding = judged(None, vec![held(1, &one, None), copied, held(2, &one, None)], &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    assert!(finding.message.contains("copy of another"), "{}", finding.message);
}

#[test]
fn a_volume_that_was_deleted_does_not_come_back_with_an_old_record_or_a_pool_that_was_away() {
    let old = record(2, &[1, 2, 3], 4);
    let left = || held(3, &rule(2, &[1, 2, 3]), Some(old.clone()));
    let made_anew = Held { quorum: false, ..left() };
    // Every pool has answered, and none has one that counts.
    for (held, ordered) in [(vec![], vec![]), (vec![made_anew], vec![3])] {
        let finding = judged(Some(&old), held, &[1, 2]);
        assert_eq!(finding.outcome, Outcome::Deleted);
        let written = finding.write.unwrap();
        assert_eq!(written.phase, VolumePhase::Deleting);
        assert!(written.replicas.iter().all(|replica| replica.phase == ReplicaPhase::Delete));
        let guids: Vec<u128> = written.replicas.iter().map(|replica| replica.guid.0.0).collect();
        assert_eq!(guids, ordered, "what no pool told of is not ordered deleted");
    }
    // The rest of it is told and kept: the others may have been moved, and been lost there.
    for record in [None, Some(&old)] {
        let finding = judged(record, vec![left()], &[1, 2]);
        assert_eq!((finding.outcome, finding.write), (Outcome::LeftOver, None));
        assert!(finding.message.contains("quoin pool export"));
    }
    // A minority that was wiped by order proves nothing.
    let current = rule(2, &[1, 2, 3]);
    let all = vec![held(2, &current, None), held(3, &current, Some(old))];
    assert_eq!(judged(None, all, &[1]).outcome, Outcome::Created);
    // Told to be deleted, and cut off by the loss.
    let mut going = record(2, &[1, 2, 3], 5);
    going.phase = VolumePhase::Deleting;
    let finding = judged(None, vec![held(3, &current, Some(going))], &[]);
    assert_eq!(finding.outcome, Outcome::Deleted);
    assert_eq!(finding.write.unwrap().discarded.len(), 1);
}

/// One pool's word hides no volume from its user, and an old copy of the record shows none again.
#[test]
fn a_volume_was_deleted_and_kept_where_all_its_replicas_were_told_so() {
    let current = rule(2, &[1, 2, 3]);
    let told = |phase: VolumePhase| VolumeRecord { phase, ..record(2, &[1, 2, 3], 9) };
    let holders = |phases: [VolumePhase; 3]| -> Vec<Held> {
        (1..).zip(phases).map(|(n, phase)| held(n, &current, Some(told(phase)))).collect()
    };
    let (gone, there) = (VolumePhase::Retained, VolumePhase::Ready);
    let old = record(2, &[1, 2, 3], 4);
    for own in [None, Some(&old)] {
        let finding = judged(own, holders([gone; 3]), &[]);
        assert!(finding.was_retained);
        // Until the records of its snapshots are there, nothing would keep it.
        assert_eq!(finding.write.unwrap().phase, VolumePhase::Ready);
        assert!(!judged(own, holders([gone, there, there]), &[]).was_retained);
    }
    assert!(!judged(None, Vec::new(), &[]).was_retained);
    let recorded = VolumeRecord { phase: gone, ..old };
    let finding = judged(Some(&recorded), holders([gone; 3]), &[]);
    assert!(finding.was_retained);
    assert_eq!(finding.write.unwrap().phase, VolumePhase::Retained);
}

/// A replica that was moved is deleted by order as well, and the last copy may be in a pool that does not answer.
#[test]
fn no_deletion_is_concluded_while_a_pool_is_away_that_may_hold_a_copy() {
    let old = record(2, &[1, 2], 4);
    let left = |quorum| Held { quorum, ..held(2, &rule(2, &[1, 2]), Some(old.clone())) };
    // The pool of the other replica is away, or another one, to which the first may have moved.
    for (away, held) in [
        (&["pool-2"][..], vec![]),
        (&["pool-2", "pool-4"], vec![]),
        (&["pool-4"], vec![]),
        (&["pool-4"], vec![left(false)]),
    ] {
        let finding = judged_without(away, Some(&old), held, &[1], false);
        assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None), "{away:?}");
        assert!(finding.message.contains(&away.join(", ")), "{}", finding.message);
        assert!(finding.message.contains("quoin volume delete"), "{}", finding.message);
    }
    // A person gives up what is here, and never what is away.
    let given_up = judged_without(&["pool-4"], Some(&old), vec![left(true)], &[1], true);
    let none_here = judged_without(&["pool-2"], Some(&old), vec![], &[1], true);
    for (finding, ordered) in [(given_up, vec![2]), (none_here, vec![])] {
        assert_eq!(finding.outcome, Outcome::Deleted);
        let written = finding.write.unwrap();
        let guids: Vec<u128> = written.replicas.iter().map(|replica| replica.guid.0.0).collect();
        assert_eq!((guids, written.discarded.len()), (ordered, 0));
    }
    // An ordered deletion continues, whichever pools are away.
    let mut going = old;
    going.phase = VolumePhase::Deleting;
    let finding = judged_without(&["pool-2"], Some(&going), vec![], &[1], false);
    assert_eq!((finding.outcome, finding.write), (Outcome::AsRecorded, None));
}

/// Proves SCALE-TEST-09.
#[test]
fn a_volume_made_without_a_known_list_lists_those_that_count_and_are_furthest_until_rf_entries_exist()
 {
    let bare = |n: u128, lsn: u64| Held {
        view: None,
        position: Position { epoch: Epoch(5), lsn: Lsn(lsn) },
        ..held(n, &rule(0, &[]), None)
    };
    let off = Held { quorum: false, ..bare(9, 900) };
    // By what they hold, never by the order in which they come.
    let all = [bare(1, 10), bare(2, 40), bare(3, 30), bare(4, 20), off.clone()];
    let finding = judged(None, all.to_vec(), &[]);
    assert_eq!(finding.outcome, Outcome::Created);
    assert_eq!(listed(&finding), [2, 3, 4]);
    let mut turned = all.to_vec();
    turned.reverse();
    assert_eq!(listed(&judged(None, turned, &[])), [2, 3, 4]);
    let written = finding.write.unwrap();
    assert_eq!((written.membership.rf, written.membership.drf, written.membership.cf), (3, 3, 2));
    assert!(written.membership.formed, "RF entries exist");
    assert_eq!(written.membership.retired, [Text(ReplicaGuid(1))], "it is behind and not listed");
    // Fewer: the list stays open, and no target opens the volume.
    let finding = judged(None, vec![bare(1, 10), bare(2, 40), off], &[]);
    assert_eq!((finding.outcome, finding.answered, finding.needed), (Outcome::Undecided, 2, 3));
    let open = *finding.write.unwrap();
    assert!(!open.membership.formed && open.membership.known.len() == 2);
    // The third is back: now they are all listed.
    let all = vec![bare(1, 10), bare(2, 40), bare(3, 30)];
    let finding = judged(Some(&open), all, &[]);
    assert_eq!((finding.outcome, listed(&finding)), (Outcome::Updated, vec![1, 2, 3]));
    assert!(finding.write.unwrap().membership.formed);
}

/// A pool may keep a younger copy of an older membership: one that an old store wrote when it was
/// restored.
#[test]
fn a_deletion_is_written_under_the_newest_membership_that_a_record_has() {
    let own = record(2, &[2, 3, 4], 1);
    let younger = Held { quorum: false, ..held(1, &rule(1, &[1, 2, 3]), Some(record(1, &[1], 9))) };
    let newest = Held { quorum: false, ..held(6, &rule(3, &[3, 4, 5]), None) };
    let finding = judged(Some(&own), vec![younger, newest], &[3, 4]);
    assert_eq!(finding.outcome, Outcome::Deleted);
    let written = finding.write.unwrap();
    assert_eq!(written.membership.version, 2);
    assert_eq!(written.generation, 10, "later than every copy");
}

#[test]
fn who_keeps_no_name_or_parameters_is_undecided_and_its_data_can_be_taken_out() {
    let bare = Held { spec: None, ..held(1, &rule(2, &[1]), None) };
    let finding = judged(None, vec![bare], &[]);
    assert_eq!((finding.outcome, finding.write), (Outcome::Undecided, None));
    assert!(finding.message.contains("quoin pool export"));
}

#[test]
fn a_newcomer_that_is_being_built_goes_on_and_one_of_an_older_record_is_forgotten() {
    let current = rule(2, &[1, 2, 3]);
    let mut told = record(2, &[1, 2, 3], 4);
    told.membership.drf = 4;
    told.replicas.push(ReplicaRecord {
        id: Text(ReplicaId(4)),
        guid: Text(ReplicaGuid(4)),
        pool: "pool-4".into(),
        phase: ReplicaPhase::Recreate,
        leaving: false,
        placed: false,
        cause: Cause::Healing,
    });
    let building = Held { quorum: false, ..held(4, &current, None) };
    let all = vec![held(1, &current, Some(told.clone())), held(2, &current, None), building];
    let finding = judged(None, all, &[]);
    let written = finding.write.unwrap();
    assert_eq!(written.replicas.len(), 4);
    assert_eq!((written.membership.rf, written.membership.drf), (3, 4));
    assert_eq!(finding.standings[2].1, "newcomer");
    // The same newcomer, where the membership has moved on without it.
    let after = rule(3, &[1, 2, 5]);
    let all = vec![held(1, &after, Some(told)), held(2, &after, None), held(5, &after, None)];
    assert_eq!(judged(None, all, &[]).write.unwrap().replicas.len(), 3);
}

proptest! {
    /// Whatever pools say, what is written is sound, retires for good, never goes back, and is
    /// found to agree when it is judged again.
    #[test]
    fn what_is_written_is_sound_never_goes_back_and_is_agreed_with_afterwards(
        versions in prop::collection::vec((1u64..6, 0u64..3, 0u8..16, 1u64..9), 0..6),
        own in prop::option::of((1u64..6, 0u64..9)),
        deleted in prop::collection::vec(1u128..8, 0..5),
        is_away in any::<bool>(),
        discard_left_over in any::<bool>(),
    ) {
        // Version v lists v, v+1, v+2: each change replaces the oldest one.
        let at = |v: u64| rule(v, &[v.into(), u128::from(v) + 1, u128::from(v) + 2]);
        let noted = |v: u64, generation| {
            record(v, &[v.into(), u128::from(v) + 1, u128::from(v) + 2], generation)
        };
        let own = own.map(|(v, generation)| noted(v, generation));
        let all = versions.iter().enumerate().map(|(n, (v, note, flags, epoch))| Held {
            quorum: flags & 1 == 0,
            damaged: flags & 6 == 6,
            trusted: flags & 9 != 9,
            promised: Epoch(*epoch),
            joint: (flags & 8 != 0).then(|| at(v + 1)),
            ..held(n as u128 + 1, &at(*v), (*note > 0).then(|| noted(*v, *note)))
        });
        let all: Vec<Held> = all.collect();
        let deleted: HashSet<ReplicaGuid> = deleted.into_iter().map(ReplicaGuid).collect();
        let away = is_away.then(|| "pool-9".to_owned()).into_iter().collect();
        let judge = |record: Option<&VolumeRecord>| decide(&Evidence {
            volume: VOLUME,
            record,
            held: all.clone(),
            deleted: &deleted,
            away: &away,
            term: TERM,
            complete: &complete,
            discard_left_over,
            now_ms: 1,
        });
        let finding = judge(own.as_ref());
        if let Some(written) = finding.write.as_deref() {
            let membership = Membership::from(&written.membership);
            prop_assert!(membership.check().is_ok());
            if let Some(own) = &own {
                prop_assert!(written.opened.epoch >= own.opened.epoch && written.generation > own.generation);
                prop_assert!(written.membership.version >= own.membership.version);
            }
            let highest = all.iter().map(|h| h.promised.0).max().unwrap_or(0);
            prop_assert!(written.phase == VolumePhase::Deleting || written.opened.epoch >= highest);
            // Only what a pool told of is ordered deleted.
            let ordered = written.replicas.iter().filter(|r| r.phase == ReplicaPhase::Delete);
            for guid in ordered.map(|r| r.guid.0).chain(written.discarded.iter().map(|d| d.guid.0)) {
                prop_assert!(all.iter().any(|held| held.member.guid == guid));
            }
            let again = judge(Some(written));
            prop_assert_eq!(again.write, None, "{:?}", again.outcome);
        } else {
            prop_assert!(own.is_some() || all.is_empty() || matches!(
                finding.outcome, Outcome::Undecided | Outcome::LeftOver
            ));
        }
    }
}
