//! The controller fails at any write to its store while the replicas of a volume are changed: the
//! write is carried out or not, and the process dies or continues with no answer. The operator's
//! command is then given once more, as by a caller without an answer.

use std::collections::BTreeSet;

use quoin_api::control::VolumeSpec;
use quoin_cluster::records::{ReplicaRecord, VolumeRecord};
use quoin_control::{Cordoning, Error, LEASES_OVER_AFTER, Move, Recovery, Scale, Scope};
use quoin_types::membership::{Desired, default_cf};
use quoin_types::{Epoch, Incarnation, Member, Membership, ReplicaId};
use tokio::time::Instant;

use crate::cluster::{Cluster, Memory, by_name, pools, spec};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Story {
    /// From so many replicas to so many, in one change.
    Grow(u32, u32),
    Move,
    /// Its pool is gone permanently.
    Replace,
    Remove,
    Factor,
    /// Two of three are lost permanently.
    Recover,
    DrainNode,
}

/// Outcome of a write to the store, and of the controller after it.
#[derive(Clone, Copy, Debug)]
struct Failure {
    at_write: i64,
    lands: bool,
    dies: bool,
}

struct Run {
    story: Story,
    cluster: Cluster,
    before: VolumeRecord,
    /// Epoch in which the target has it open.
    epoch: Epoch,
    incarnation: u128,
    retired: BTreeSet<String>,
}

impl Run {
    async fn new(story: Story) -> Self {
        let mut cluster = Cluster::with(Memory::new(), pools(1..=6)).await;
        let replicas = if let Story::Grow(from, _) = story { from } else { 3 };
        let asked = VolumeSpec { replicas, ..spec("db") };
        cluster.controller.volumes.catalog.create(&asked, 0).await.unwrap();
        cluster.settle().await.unwrap();
        cluster.attach("db", "n1").await.unwrap();
        let mut before = VolumeRecord::clone(&cluster.volume("db"));
        let epoch = cluster.open_volume(before.id.0, "n1", 1).await;
        before.opened.epoch = epoch.0;
        match story {
            Story::Replace => cluster.goes(&before.replicas[0].pool).await,
            Story::Recover => {
                cluster.goes(&before.replicas[2].pool).await;
                let wiped = &before.replicas[1].pool;
                cluster.pools.iter_mut().find(|p| p.name == *wiped).unwrap().wipe();
                cluster.settle().await.unwrap();
            }
            _ => {}
        }
        let retired = BTreeSet::new();
        Self { story, cluster, before, epoch, incarnation: 1, retired }
    }

    fn target_of_move(&self) -> String {
        let taken = |name: &String| self.before.replicas.iter().any(|r| r.pool == *name);
        self.cluster.pools.iter().map(|p| p.name.clone()).find(|name| !taken(name)).unwrap()
    }

    /// Runs the operator's command, the same each time.
    async fn command(&self) -> Result<(), Error> {
        let controller = &self.cluster.controller;
        let db = by_name("db");
        let first = self.before.replicas[0].id.0;
        match self.story {
            Story::Grow(_, replicas) => {
                let asked = Scale { replicas, ..Scale::default() };
                controller.volumes.replicas.scale(db.as_ref(), &asked).await?;
            }
            Story::Factor => {
                let asked = Scale { consistency_factor: Some(3), ..Scale::default() };
                controller.volumes.replicas.scale(db.as_ref(), &asked).await?;
            }
            Story::Move => {
                let asked = Move { pool: self.target_of_move(), ..Move::of(first) };
                controller.volumes.replicas.move_replica(db.as_ref(), &asked).await?;
            }
            Story::Replace => {
                let asked = Move { unless_in_sync: true, ..Move::of(first) };
                controller.volumes.replicas.move_replica(db.as_ref(), &asked).await?;
            }
            Story::Remove => {
                match controller.volumes.replicas.remove(db.as_ref(), &[first]).await {
                    // It has left: there is nothing of that name to remove.
                    Err(Error::NotFound { .. }) if self.known().len() == 2 => {}
                    answer => drop(answer?),
                }
            }
            Story::Recover => {
                let ids: Vec<ReplicaId> = self.before.replicas.iter().map(|r| r.id.0).collect();
                let accept_loss_of = "db".into();
                let keep = vec![ids[0]];
                let recovery = Recovery { keep, destroyed: vec![ids[2]], accept_loss_of };
                match controller.disaster.volumes.recover(db.as_ref(), &recovery).await {
                    // It is recovered: what was given up is no replica of it.
                    Err(Error::NotFound { .. } | Error::Precondition(_))
                        if self.cluster.volume("db").may_have_lost_ms > 0 => {}
                    answer => drop(answer?),
                }
            }
            Story::DrainNode => {
                let scope = Scope::Node(self.host());
                controller.work.cordons.set(&scope, Cordoning::Drain, false).await?;
            }
        }
        Ok(())
    }

    fn host(&self) -> String {
        let pool = &self.before.replicas[0].pool;
        self.cluster.pools.iter().find(|p| p.name == *pool).unwrap().node.clone()
    }

    fn known(&self) -> Vec<Member> {
        Membership::from(&self.cluster.volume("db").membership).known
    }

    /// Returns RF, CF and DRF that the command declares.
    fn declared(&self) -> (u8, u8, u8) {
        match self.story {
            Story::Grow(_, to) => (to as u8, default_cf(to as u8), to as u8),
            Story::Remove => (2, 2, 2),
            Story::Factor => (3, 3, 3),
            _ => (3, 2, 3),
        }
    }

    /// Returns the numbers of entries that the list may have at any moment.
    fn sizes(&self) -> Vec<usize> {
        match self.story {
            Story::Grow(from, to) => vec![from as usize, to as usize],
            Story::Remove => vec![3, 2],
            Story::Recover => vec![3, 1],
            _ => vec![3],
        }
    }

    /// Requests the next change of its list as the target, by its assignment.
    async fn target(&mut self) -> Result<(), Error> {
        let volume = self.cluster.volume("db");
        if volume.opened.owner.as_deref() != Some("n1") {
            return Ok(());
        }
        if volume.epoch() != self.epoch
            || volume.opened.incarnation.0 != Incarnation(self.incarnation)
        {
            self.incarnation += 1;
            let (id, who) = (volume.id.0, Incarnation(self.incarnation));
            let asked =
                self.cluster.controller.volumes.epochs.acquire(id, "n1", who, Epoch(0)).await?;
            let Ok(granted) = asked else { return Ok(()) };
            assert!(granted.epoch > self.epoch, "an epoch was granted twice");
            self.epoch = granted.epoch;
        }
        let told = self.cluster.controller.assignments.of_node("n1").targets;
        let Some(told) = told.into_iter().next() else { return Ok(()) };
        let member = |r: &quoin_api::control::ReplicaAddress| Member {
            id: r.replica_id.parse().unwrap(),
            guid: r.guid.parse().unwrap(),
        };
        let new: Vec<Member> = told.replicas.iter().filter(|r| r.candidate).map(member).collect();
        let gone: Vec<Member> =
            told.replicas.iter().filter(|r| r.leaving && !r.candidate).map(member).collect();
        let drf = told.desired_replication_factor as u8;
        let desired = Desired { cf: told.consistency_factor as u8, ..Desired::default() };
        let before = Membership::from(&volume.membership);
        let mut next = before.clone();
        let room = usize::from(drf).saturating_sub(next.known.len());
        let added: Vec<Member> =
            new.iter().filter(|m| next.known.iter().all(|k| k.id != m.id)).copied().collect();
        let placed = |m: &&Member| next.known.iter().any(|k| k.id == m.id);
        if let Some(one) = new.iter().find(placed).copied() {
            next.known.iter_mut().filter(|k| k.id == one.id).for_each(|k| *k = one);
        } else if room > 0 && added.len() == room {
            next.known.extend(added);
        } else if !gone.is_empty() {
            next.known.retain(|m| !gone.contains(m));
        }
        next.rf = next.known.len() as u8;
        if next.rf != before.rf || desired.cf != 0 {
            next.cf = desired.cf_of(next.rf);
        }
        if (&next.known, next.rf, next.cf) == (&before.known, before.rf, before.cf) {
            return Ok(());
        }
        let mut asked = self.cluster.swap("db", self.epoch, self.incarnation, |_| {});
        (asked.known, asked.rf, asked.cf) = (next.known, next.rf, next.cf);
        // Refused where the record went on meanwhile; it is looked at anew.
        self.cluster.controller.volumes.epochs.swap_membership(&asked).await.map(drop)
    }

    /// Carries out once everything that happens without the operator.
    async fn go_on(&mut self) -> Result<(), Error> {
        self.cluster.settle().await?;
        let now = Instant::now();
        self.cluster.controller.work.tender.look_at_all(now).await?;
        self.cluster.controller.work.tender.look_at_all(now + LEASES_OVER_AFTER * 2).await?;
        self.check();
        self.target().await?;
        self.check();
        self.cluster.settle().await?;
        self.cluster.controller.work.healer.look_at_all(tokio::time::Instant::now()).await?;
        self.check();
        Ok(())
    }

    /// Asserts the invariants of every moment.
    fn check(&mut self) {
        let volume = self.cluster.volume("db");
        let membership = Membership::from(&volume.membership);
        membership.check().expect("the membership keeps its rules");
        let (entries, sizes) = (membership.known.len(), self.sizes());
        assert!(sizes.contains(&entries), "{entries} entries, allowed are {sizes:?}");
        assert_eq!(entries, usize::from(membership.rf));
        let retired: BTreeSet<String> =
            membership.retired.iter().map(ToString::to_string).collect();
        assert!(self.retired.is_subset(&retired), "a retired GUID was forgotten");
        self.retired = retired;
        let is_retired = |r: &&ReplicaRecord| self.retired.contains(&r.guid.0.to_string());
        assert_eq!(volume.replicas.iter().find(is_retired), None, "a retired GUID is used again");
        // One beside each entry at the most, and as many more as are desired.
        let desired = usize::from(membership.drf.max(membership.rf));
        assert!(volume.replicas.len() <= desired + 1, "{:?}", volume.replicas);
        let mut born: Vec<&String> = self.cluster.pools.iter().flat_map(|p| p.born()).collect();
        let count = born.len();
        born.sort_unstable();
        born.dedup();
        assert_eq!(born.len(), count, "a GUID was born twice");
    }

    fn is_declared(&self) -> bool {
        let volume = self.cluster.volume("db");
        let membership = &volume.membership;
        let drained = || match self.story {
            Story::DrainNode => {
                let scope = Scope::Node(self.host());
                self.cluster.controller.work.cordons.status(&scope).unwrap().state == "drained"
            }
            _ => true,
        };
        // The volume itself shows no change before the operation has begun.
        let begun = match self.story {
            Story::Move | Story::Replace | Story::DrainNode => !membership.retired.is_empty(),
            Story::Recover => volume.may_have_lost_ms > 0,
            _ => true,
        };
        begun
            && volume.changing().is_empty()
            && (membership.rf, membership.cf, membership.drf) == self.declared()
            && membership.known.len() == usize::from(membership.rf)
            && drained()
    }

    /// Asserts the declared state, and nothing beside it.
    async fn check_end(&mut self) {
        self.cluster.pools.iter_mut().for_each(|pool| pool.online = true);
        for _ in 0..2 {
            self.cluster.settle().await.unwrap();
        }
        self.check();
        assert!(self.is_declared(), "{:?}", self.cluster.volume("db"));
        let volume = self.cluster.volume("db");
        let known: BTreeSet<String> = self.known().iter().map(|m| m.guid.to_string()).collect();
        let named: BTreeSet<String> =
            volume.replicas.iter().map(|r| r.guid.0.to_string()).collect();
        let held = self.cluster.pools.iter().flat_map(|pool| pool.holds.keys().cloned());
        assert_eq!(held.collect::<BTreeSet<_>>(), known, "a replica without an owner");
        assert_eq!(named, known);
        assert!(volume.discarded.is_empty(), "{:?}", volume.discarded);
        let old: Vec<Member> = Membership::from(&self.before.membership).known;
        let now = self.known();
        let kept = old.iter().filter(|m| now.contains(m)).count();
        let (stay, gone) = match self.story {
            Story::Grow(from, _) => (from as usize, 0),
            Story::Factor => (3, 0),
            Story::Recover => (1, 2),
            Story::Move | Story::Replace | Story::Remove | Story::DrainNode => (2, 1),
        };
        assert_eq!((kept, self.retired.len()), (stay, gone));
        let first = volume.replicas.iter().find(|r| r.id == self.before.replicas[0].id);
        let was = &self.before.replicas[0].pool;
        match self.story {
            Story::Move => assert_eq!(first.unwrap().pool, self.target_of_move()),
            Story::Replace | Story::DrainNode => assert_ne!(first.unwrap().pool, *was),
            Story::Remove => assert_eq!(first, None),
            _ => assert_eq!(first.unwrap().pool, *was),
        }
    }
}

const ROUNDS_MAX: usize = 12;

/// Returns the number of writes that were tried; with a failure, one more than before it.
async fn live(story: Story, failure: Option<Failure>) -> i64 {
    let mut run = Run::new(story).await;
    let writes = i64::MAX / 2;
    match failure {
        None => run.cluster.store.fail_at(writes, false, true),
        Some(f) => run.cluster.store.fail_at(f.at_write, f.lands, f.dies),
    }
    let (mut failed, mut asked) = (false, false);
    for _ in 0..ROUNDS_MAX {
        let done = match asked {
            true => run.go_on().await,
            false => run.command().await,
        };
        match done {
            Ok(()) => asked = true,
            Err(error) => assert!(run.cluster.store.failed(), "{story:?}, {failure:?}: {error}"),
        }
        if run.cluster.store.failed() && !failed {
            failed = true;
            // The caller is not sure, and repeats the command.
            asked = false;
            if failure.unwrap().dies {
                run.cluster.restart().await;
                run.cluster.settle().await.unwrap();
            }
            run.check();
        } else if asked && run.is_declared() {
            break;
        }
    }
    let tried = writes - run.cluster.store.writes_left();
    run.cluster.store.recover();
    run.check_end().await;
    assert_eq!(failed, failure.is_some());
    tried
}

/// Tries all kinds of failures at all writes of a story.
async fn at_every_write(story: Story) {
    let writes = live(story, None).await;
    assert!(writes >= 2, "{story:?}: only {writes} writes were seen");
    let failures = (0..writes).flat_map(|at_write| {
        let ways = [(false, false), (false, true), (true, false), (true, true)];
        ways.map(|(lands, dies)| Failure { at_write, lands, dies })
    });
    // All at the same time: a recovery waits for leases to be over.
    futures::future::join_all(failures.map(|failure| live(story, Some(failure)))).await;
}

/// Proves SCALE-TEST-06, SCALE-STORY-09.
#[tokio::test]
async fn a_failure_at_any_write_of_a_scale_up_ends_as_declared_once_it_is_asked_for_again() {
    at_every_write(Story::Grow(3, 5)).await;
    at_every_write(Story::Grow(1, 3)).await;
}

/// Proves SCALE-TEST-06, SCALE-ADMIT-16.
#[tokio::test]
async fn a_failure_at_any_write_of_a_move_or_a_replacement_ends_with_one_replica_in_its_place() {
    at_every_write(Story::Move).await;
    at_every_write(Story::Replace).await;
}

/// Proves SCALE-TEST-06, SCALE-VALID-03.
#[tokio::test]
async fn a_failure_at_any_write_of_a_removal_or_of_a_change_of_the_factor_ends_as_declared() {
    at_every_write(Story::Remove).await;
    at_every_write(Story::Factor).await;
}

/// Proves SCALE-TEST-06, SCALE-VALID-03.
#[tokio::test]
async fn a_failure_at_any_write_of_a_recovery_ends_with_what_was_kept_made_whole_again() {
    at_every_write(Story::Recover).await;
}

/// Proves SCALE-TEST-06.
#[tokio::test]
async fn a_failure_at_any_write_of_a_drain_of_a_node_ends_with_its_pools_empty() {
    at_every_write(Story::DrainNode).await;
}
