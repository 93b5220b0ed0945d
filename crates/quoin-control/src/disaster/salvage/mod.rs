//! The records made to agree with what the pools hold: the way out where they were lost, or where
//! an old copy of them came back.
//!
//! Such records *do not rule* ([`RecoveryRecord`]): no pool and no node is told anything by them,
//! what is served is served on, epochs are not given, and calls are answered "not now", never "no
//! such volume". [`Controller::recover_records`] asks every pool for all that it keeps, judges each
//! volume ([`decide`]), and writes what is decided; then the records rule. It may be run at any
//! time: a record is only changed where pools know of something newer, and only if it has not
//! changed since it was judged.
//!
//! Facts that the pools cannot know are lost with the records: events, cordons, and the members that were
//! removed from the cluster; their certificates are good again until they run out. Join tokens end with a recovery also
//! where there are records of them: an old copy does not know which were used or revoked. That a
//! pool's disk is an older state of itself is not seen either where its start counter is in no
//! record.

mod holdings;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_api::control as api;
use quoin_cluster::records_rebuild::{Evidence, Finding, Held, Outcome, decide};
use quoin_identity::Role;
use quoin_types::{Term, VolumeId};
use tokio::time::Instant;

use crate::Error;
use crate::membership::members::Members;
use crate::membership::term::Terms;
use crate::reconcile::lifecycle::Lifecycle;
use crate::state::census::Doubt;
use crate::state::events::{Object, Severity};
use crate::state::{State, about};
use crate::time::now_ms;
use crate::volume::spec;

pub use holdings::{Kept, Told};
use quoin_cluster::records::{
    Concerned, MemberOfCluster, NameRecord, RecoveryRecord, VolumePhase, VolumeRecord,
};

/// How long pools that are online are waited for.
const POOLS_TELL_WITHIN: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Where a recovery without a person is not possible yet it is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Request of a person.
#[derive(Clone, Debug, Default)]
pub struct RecoverRecords {
    pub dry_run: bool,
    /// Pools to go on without.
    pub without_pools: Vec<String>,
    pub discard_left_over: bool,
}

/// The findings, and whether the records rule now.
#[derive(Clone, Debug, Default)]
pub struct Recovered {
    /// With each, the record that there was.
    pub findings: Vec<(Finding, Option<Arc<VolumeRecord>>)>,
    pub pools: Vec<String>,
    pub missing_pools: Vec<String>,
    pub done: bool,
    /// Term in which the records rule.
    pub term: Term,
}

/// Answers of pools, gathered.
#[derive(Default)]
pub struct Salvage {
    asked: Mutex<Asked>,
    one_at_a_time: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Asked {
    /// 0: nothing was asked yet.
    request: u64,
    /// Answers are waited for.
    open: bool,
    told: BTreeMap<String, Told>,
    /// Answers that are coming in, each with the number of its stream.
    coming: BTreeMap<String, (u64, Told)>,
    streams: u64,
}

/// The answer of one pool, while it comes in.
#[derive(Debug)]
pub(crate) struct Answer {
    pool: String,
    request: u64,
    stream: u64,
}

impl Salvage {
    fn asked(&self) -> std::sync::MutexGuard<'_, Asked> {
        self.asked.lock().expect("no holder of this lock panics")
    }

    /// 0: no pool is asked.
    pub fn request(&self) -> u64 {
        let asked = self.asked();
        if asked.open { asked.request } else { 0 }
    }

    /// A number that no pool has answered yet, whatever controller asked before.
    fn begin(&self) {
        let mut asked = self.asked();
        let (request, streams) = (now_ms().max(asked.request + 1), asked.streams);
        *asked = Asked { request, streams, open: true, ..Asked::default() };
    }

    /// Returns the pools' answers. From now on no answer is accepted.
    fn end(&self) -> BTreeMap<String, Told> {
        let mut asked = self.asked();
        (asked.open, asked.coming) = (false, BTreeMap::new());
        std::mem::take(&mut asked.told)
    }

    /// Takes in all that a pool keeps, in answer to the request of this number.
    pub fn take(&self, pool: &str, request: u64, told: Told) {
        let mut asked = self.asked();
        if asked.open && asked.request == request {
            asked.told.insert(pool.to_owned(), told);
        }
    }

    /// A pool begins to answer the request of this number. It has one answer, so one that it had begun
    /// before is dropped.
    ///
    /// # Errors
    /// Where no recovery waits for that answer.
    pub(crate) fn begin_answer(&self, pool: &str, request: u64) -> Result<Answer, Error> {
        let mut asked = self.asked();
        if !asked.open || asked.request != request {
            return Err(not_asked(pool, request));
        }
        asked.streams += 1;
        let stream = asked.streams;
        asked.coming.insert(pool.to_owned(), (stream, Told::default()));
        Ok(Answer { pool: pool.to_owned(), request, stream })
    }

    /// One more piece of it.
    ///
    /// # Errors
    /// Where no recovery waits for it any more, or it is more than a pool may tell.
    pub(crate) fn add_to_answer(
        &self,
        answer: &Answer,
        piece: &api::PoolHoldings,
    ) -> Result<(), Error> {
        if piece.pool != answer.pool || piece.request != answer.request {
            return Err(Error::invalid("holdings", "pieces of several answers"));
        }
        let mut asked = self.asked();
        match asked.coming.get_mut(&answer.pool) {
            Some((stream, told)) if *stream == answer.stream => told.add(piece),
            _ => Err(not_asked(&answer.pool, answer.request)),
        }
    }

    /// Its last piece was added.
    ///
    /// # Errors
    /// Where no recovery waits for it any more.
    pub(crate) fn end_answer(&self, answer: &Answer) -> Result<(), Error> {
        let told = {
            let mut asked = self.asked();
            let coming = asked.coming.get(&answer.pool);
            match coming.is_some_and(|(stream, _)| *stream == answer.stream) {
                true => asked.coming.remove(&answer.pool),
                false => None,
            }
        };
        let Some((_, told)) = told else { return Err(not_asked(&answer.pool, answer.request)) };
        self.take(&answer.pool, answer.request, told);
        Ok(())
    }

    /// Drops the received part of an answer that failed.
    pub(crate) fn drop_answer(&self, answer: &Answer) {
        let mut asked = self.asked();
        asked.coming.retain(|_, (stream, _)| *stream != answer.stream);
    }
}

/// How often a record is judged again that changed before its finding was written.
const TRIES_MAX: u32 = 5;

/// Recoveries of the records from what the pools hold.
pub struct Recoveries {
    state: Arc<State>,
    lifecycle: Arc<Lifecycle>,
    terms: Arc<Terms>,
    members: Arc<Members>,
    salvage: Arc<Salvage>,
}

impl Recoveries {
    pub(crate) fn new(
        state: Arc<State>,
        lifecycle: Arc<Lifecycle>,
        terms: Arc<Terms>,
        members: Arc<Members>,
        salvage: Arc<Salvage>,
    ) -> Self {
        Self { state, lifecycle, terms, members, salvage }
    }

    /// Makes the records agree with what the pools hold, or says how it would.
    ///
    /// # Errors
    /// Where a pool that is known does not answer and was not named to be gone on without.
    pub async fn recover(&self, asked: &RecoverRecords) -> Result<Recovered, Error> {
        let _one = self.salvage.one_at_a_time.lock().await;
        let _recovering = self.terms.begin_recovering();
        let told = self.ask_pools().await;
        let missing = self.pools_away(&told);
        if let Some(there) = asked.without_pools.iter().find(|pool| told.contains_key(*pool)) {
            return Err(Error::invalid("without", format!("pool {there} is there")));
        }
        if let Some(unknown) = asked.without_pools.iter().find(|pool| !missing.contains(*pool)) {
            let away: Vec<_> = missing.iter().map(String::as_str).collect();
            let away = if away.is_empty() { "none".to_owned() } else { away.join(", ") };
            let rule = format!(
                "no pool {unknown} is known to the records or to other pools; those that do not \
                 answer: {away}"
            );
            return Err(Error::invalid("without", rule));
        }
        let unexpected: Vec<_> =
            missing.iter().filter(|pool| !asked.without_pools.contains(pool)).cloned().collect();
        if !asked.dry_run && !unexpected.is_empty() {
            return Err(Error::Precondition(format!(
                "pools that do not answer: {}. Start them, or go on without them by naming each \
                 (--without): what only they hold is found by another recovery once they are back",
                unexpected.join(", ")
            )));
        }
        let mut recovered = Recovered {
            pools: told.keys().cloned().collect(),
            missing_pools: missing.into_iter().collect(),
            ..Recovered::default()
        };
        recovered.findings = self.judge(&told, asked.discard_left_over);
        if asked.dry_run {
            return Ok(recovered);
        }
        let told = self.begin_term_at(&told).await?;
        recovered.findings = self.judge(&told, asked.discard_left_over);
        // Nobody takes a name in between, or makes a volume of one that is taken for free here.
        let no_other = self.state.creating.lock().await;
        self.carry_out_all(&mut recovered.findings, &told, asked.discard_left_over).await?;
        drop(no_other);
        self.remember_members().await?;
        self.members.end_recovered_tokens().await?;
        crate::snapshot::catalog::give_up_attempts(&self.state).await?;
        crate::snapshot::reverts::give_up_all(&self.state).await?;
        crate::volume::verification::give_up_all(&self.state).await?;
        let judged = recovered.findings.iter().map(|(finding, _)| finding);
        crate::snapshot::recovery::agree(&self.state, judged, &told).await?;
        crate::mirror::recovery::agree(&self.state).await?;
        let ruled = self.state.check_ruling().is_ok();
        self.state.term.recovery.remove(RecoveryRecord::NAME, |_| true).await?;
        self.state.term.census.clear();
        if !ruled {
            let count = recovered.findings.len();
            let message = format!("{count} volumes were compared with what the pools hold");
            let cluster = Object::new("cluster", "", "");
            self.state.events.record(Severity::Normal, cluster, "RecordsRule", message);
        }
        recovered.term = self.state.term();
        let message = format!(
            "term {} began: what a controller of a former term grants or orders is refused",
            recovered.term
        );
        self.state.events.record(
            Severity::Normal,
            Object::new("cluster", "", ""),
            "TermBegan",
            message,
        );
        recovered.done = true;
        self.state.announce(&Concerned::Everybody);
        self.lifecycle.reconcile_all().await?;
        Ok(recovered)
    }

    /// Recovers records that pools know to be an old copy, wherever a dry run has no doubt. Never ends by itself.
    pub(crate) async fn keep_recovering(&self) {
        let mut doubts = self.state.term.census.doubt();
        let mut told = String::new();
        loop {
            // The borrowed word is given back at once.
            drop(doubts.wait_for(|doubt| *doubt != Doubt::None).await);
            match self.recover_old().await {
                Ok(None) => told.clear(),
                Ok(Some(why)) => {
                    if told != why {
                        let message = format!(
                            "the records are an old copy, and cannot be recovered without you: {why}. `quoin \
                             controller recover --dry-run` tells; `quoin controller recover` makes them rule, \
                             with --without POOL for each pool that is lost"
                        );
                        let cluster = Object::new("cluster", "", "");
                        self.state.events.record(
                            Severity::Error,
                            cluster,
                            "RecordsBehind",
                            message,
                        );
                        told = why;
                    }
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "the old records are not recovered yet");
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
    }

    /// Returns why a person has to decide; `None`: there is no doubt any more.
    async fn recover_old(&self) -> Result<Option<String>, Error> {
        let planned = self.recover(&RecoverRecords { dry_run: true, ..Default::default() }).await?;
        let missing = planned.missing_pools.iter();
        let missing = missing.map(|pool| format!("pool {pool} does not answer"));
        let undecided = planned.findings.iter().map(|(finding, _)| finding);
        let undecided = undecided.filter(|finding| finding.outcome == Outcome::Undecided);
        let undecided =
            undecided.map(|finding| format!("volume {}: {}", finding.name, finding.message));
        let doubts: Vec<String> = missing.chain(undecided).collect();
        let is_news =
            |outcome| matches!(outcome, Outcome::Created | Outcome::Updated | Outcome::Deleted);
        let has_news = planned.findings.iter().any(|(finding, _)| is_news(finding.outcome));
        let is_known = matches!(*self.state.term.census.doubt().borrow(), Doubt::Behind(_));
        match doubts.is_empty() {
            false if is_known => return Ok(Some(doubts.join("; "))),
            // Left-overs of a volume are no reason to stop.
            false => self.state.clear_doubt(),
            true if has_news || self.terms.is_overtaken() => {
                drop(self.recover(&RecoverRecords::default()).await?)
            }
            true => self.state.clear_doubt(),
        }
        Ok(None)
    }

    /// Begins a term above all that the pools have heard of, and asks them again: each hears of the
    /// term before it tells, and from then on opens nothing by the grants of a former controller. So
    /// what it tells now is the last that one brought about there.
    async fn begin_term_at(
        &self,
        before: &BTreeMap<String, Told>,
    ) -> Result<BTreeMap<String, Told>, Error> {
        for _ in 0..TRIES_MAX {
            self.terms.begin().await?;
            let told = self.ask_pools().await;
            if let Some(gone) = before.keys().find(|pool| !told.contains_key(*pool)) {
                return Err(Error::Busy(format!(
                    "pool {gone} does not answer any more: recover again, or name it (--without)"
                )));
            }
            // Another recovery may have begun a term elsewhere at the same time.
            if !self.terms.is_overtaken() {
                return Ok(told);
            }
        }
        Err(Error::Busy(
            "another controller begins terms all the while: end it, and recover again".to_owned(),
        ))
    }

    /// Writes what was found, each finding against the record that it was judged with; where a
    /// record changed meanwhile it is judged again.
    async fn carry_out_all(
        &self,
        findings: &mut [(Finding, Option<Arc<VolumeRecord>>)],
        told: &BTreeMap<String, Told>,
        discard_left_over: bool,
    ) -> Result<(), Error> {
        let mut open: BTreeSet<VolumeId> =
            findings.iter().map(|(finding, _)| finding.volume).collect();
        for _ in 0..TRIES_MAX {
            // First those that give names free, and last those that nobody uses under theirs any more.
            let turn = |finding: &Finding| match finding.outcome {
                Outcome::Deleted => 0,
                _ if !finding.was_retained => 1,
                _ => 2,
            };
            for now in 0..3 {
                for (finding, before) in findings.iter() {
                    if turn(finding) == now
                        && open.contains(&finding.volume)
                        && self.carry_out(finding, before.as_ref()).await?
                    {
                        open.remove(&finding.volume);
                    }
                }
            }
            if open.is_empty() {
                return Ok(());
            }
            // Old records that were not known as old ruled meanwhile, and changed themselves.
            let again = self.judge(told, discard_left_over);
            // A volume without a record that no pool holds is gone.
            open.retain(|volume| again.iter().any(|(finding, _)| finding.volume == *volume));
            for judged in again.into_iter().filter(|(finding, _)| open.contains(&finding.volume)) {
                let is_same = |(finding, _): &&mut (Finding, _)| finding.volume == judged.0.volume;
                if let Some(place) = findings.iter_mut().find(is_same) {
                    *place = judged;
                }
            }
        }
        match open.first() {
            None => Ok(()),
            Some(volume) => Err(Error::Busy(format!(
                "the record of volume {volume} changed all the while it was compared with what the \
                 pools hold: recover again"
            ))),
        }
    }

    /// Returns what each present pool keeps. Soon after a start, pools are waited for.
    async fn ask_pools(&self) -> BTreeMap<String, Told> {
        self.salvage.begin();
        self.state.announce(&Concerned::Everybody);
        let deadline = Instant::now() + POOLS_TELL_WITHIN.max(self.state.settings.offline_after);
        loop {
            let known = self.pools_of_records();
            let (all, starting) = {
                let observed = self.state.observed();
                let after = self.state.settings.offline_after;
                let asked = self.salvage.asked();
                let told = |pool: &String| asked.told.contains_key(pool);
                let here = |pool: &&String| observed.heard_pool(pool, after).is_some();
                let starting = observed.starting(after);
                let all = match starting {
                    true => known.iter().all(told),
                    false => known.iter().filter(here).all(told),
                };
                // Pools that are not known yet come within that time.
                (all, starting && (known.is_empty() || self.state.check_ruling().is_err()))
            };
            if (all && !starting) || Instant::now() >= deadline {
                let told = self.salvage.end();
                self.state.announce(&Concerned::Everybody);
                return told;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn pools_of_records(&self) -> BTreeSet<String> {
        let pools = self.state.pools.list().into_iter().map(|pool| pool.name.clone());
        let volumes = self.state.volumes.list();
        let held = volumes.iter().flat_map(|volume| &volume.replicas).map(|r| r.pool.clone());
        pools.chain(held).filter(|pool| !pool.is_empty()).collect()
    }

    /// Pools that the records or other pools name and that did not answer.
    fn pools_away(&self, told: &BTreeMap<String, Told>) -> BTreeSet<String> {
        let mut away = self.pools_of_records();
        away.extend(told.values().flat_map(|told| &told.replicas).flat_map(pools_of_note));
        away.retain(|pool| !told.contains_key(pool));
        away
    }

    fn judge(
        &self,
        told: &BTreeMap<String, Told>,
        discard_left_over: bool,
    ) -> Vec<(Finding, Option<Arc<VolumeRecord>>)> {
        let mut deleted = HashSet::new();
        let mut held: BTreeMap<VolumeId, Vec<Held>> = BTreeMap::new();
        for (pool, told) in told {
            let rolled_back = self.state.is_rolled_back(pool);
            deleted.extend(&told.deleted);
            for replica in &told.replicas {
                let replica = Held { trusted: !rolled_back, ..replica.clone() };
                held.entry(replica.volume).or_default().push(replica);
            }
        }
        for volume in self.state.volumes.list() {
            held.entry(volume.id.0).or_default();
        }
        let away = self.pools_away(told);
        let defaults = self.state.settings.defaults;
        let complete = |spec: &api::VolumeSpec| spec::complete(spec, defaults).ok();
        let judged = held.into_iter().map(|(volume, held)| {
            let record = self.state.volumes.get(&volume.to_string());
            let finding = decide(&Evidence {
                volume,
                record: record.as_deref(),
                held,
                deleted: &deleted,
                away: &away,
                term: self.terms.highest(),
                complete: &complete,
                discard_left_over,
                now_ms: now_ms(),
            });
            (finding, record)
        });
        judged.collect()
    }

    /// False: the record is not the one any more that was judged, and nothing was written.
    async fn carry_out(
        &self,
        finding: &Finding,
        before: Option<&Arc<VolumeRecord>>,
    ) -> Result<bool, Error> {
        let Some(record) = finding.write.as_deref() else { return Ok(true) };
        let mut record = record.clone();
        if record.phase == VolumePhase::Deleting {
            if let Some(before) = before {
                crate::volume::volumes::free_name(&self.state, before).await?;
            }
        } else if record.phase != VolumePhase::Retained {
            self.take_name_of(&mut record, before).await?;
        }
        let written = match before {
            None => self.state.volumes.create(record.clone()).await?.is_ok(),
            Some(before) => {
                let change = |volume: &mut VolumeRecord| {
                    let as_judged = *volume == **before;
                    if as_judged {
                        *volume = record.clone();
                    }
                    Ok(as_judged)
                };
                let updated = self.state.volumes.update(&record.id.0.to_string(), change).await?;
                updated.is_some_and(|(_, written)| written)
            }
        };
        if !written {
            return Ok(false);
        }
        {
            let mut observed = self.state.observed();
            observed.behind.remove(&record.id.0);
            observed.confirmed.remove(&record.id.0);
        }
        let (severity, reason) = match finding.outcome {
            Outcome::Undecided => (Severity::Error, "VolumeUndecided"),
            Outcome::Deleted => (Severity::Warning, "VolumeFoundDeleted"),
            _ => (Severity::Warning, "VolumeFound"),
        };
        let mut message = format!(
            "its record was {} from what the pools hold: membership version {}, {} of {} replicas \
             said so",
            if before.is_some() { "brought up to date" } else { "made" },
            finding.version,
            finding.answered,
            finding.rf
        );
        if !finding.message.is_empty() {
            message = format!("{message}; {}", finding.message);
        }
        self.state.events.record(severity, about(&record), reason, message);
        Ok(true)
    }

    /// A name that another volume has by now is not taken from it: this one's gets an ending.
    async fn take_name_of(
        &self,
        record: &mut VolumeRecord,
        before: Option<&Arc<VolumeRecord>>,
    ) -> Result<(), Error> {
        if before.is_some_and(|before| before.spec.name == record.spec.name) {
            return Ok(());
        }
        for _ in 0..2 {
            let name = record.spec.name.clone();
            let wanted = NameRecord { volume_name: name.clone(), volume_id: record.id };
            let free = |found: &NameRecord| {
                let holder = self.state.volumes.get(&found.volume_id.0.to_string());
                found.volume_id == record.id
                    || holder.is_none_or(|holder| holder.phase == VolumePhase::Deleting)
            };
            self.state.names.remove(&name, free).await?;
            if self.state.names.create(wanted).await?.is_ok() {
                return Ok(());
            }
            let id = record.id.0.to_string();
            record.spec.name = format!("{name}-{}", &id[..8]);
        }
        Err(Error::Exists {
            what: "volume",
            name: record.spec.name.clone(),
            difference: "data, and so has one of its name without the ending; rename one".into(),
        })
    }

    /// Present members keep their names against newcomers.
    async fn remember_members(&self) -> Result<(), Error> {
        let pools = self.state.pools.list().into_iter().map(|pool| (Role::Pool, pool.name.clone()));
        let nodes = self.state.nodes.list().into_iter().map(|node| (Role::Node, node.name.clone()));
        for (role, holder) in pools.chain(nodes) {
            let member = MemberOfCluster {
                role: role.to_string(),
                holder,
                key_hash: String::new(),
                next_key_hash: String::new(),
                joined_ms: now_ms(),
                removed: false,
                // The nodes that could are not known any more; a person has to say.
                manages_volumes: false,
            };
            drop(self.state.joined.members.create(member).await?);
        }
        Ok(())
    }
}

fn not_asked(pool: &str, request: u64) -> Error {
    Error::Precondition(format!(
        "pool {pool} was not asked for request {request}, or has answered it"
    ))
}

fn pools_of_note(held: &Held) -> Vec<String> {
    let replicas = held.note.iter().flat_map(|note| &note.replicas);
    replicas.map(|replica| replica.pool.clone()).filter(|pool| !pool.is_empty()).collect()
}

impl From<Recovered> for api::RecoverRecordsResponse {
    fn from(recovered: Recovered) -> Self {
        let volumes = recovered.findings.into_iter().map(|(finding, before)| {
            let written = finding.write.as_deref().or(before.as_deref());
            let replicas = finding.standings.iter().map(|(held, standing)| api::FoundReplica {
                pool: held.pool.clone(),
                replica_id: held.member.id.to_string(),
                guid: held.member.guid.to_string(),
                promised_epoch: held.promised.0,
                position_epoch: held.position.epoch.0,
                position_lsn: held.position.lsn.0,
                membership_version: held.version(),
                standing: (*standing).to_owned(),
                message: match held {
                    Held { trusted: false, .. } => "an older state of its disk came back",
                    Held { damaged: true, .. } => "damaged",
                    Held { quorum: false, .. } => "being built",
                    _ => "",
                }
                .to_owned(),
            });
            api::RecoveredVolume {
                volume_id: finding.volume.to_string(),
                name: finding.name.clone(),
                outcome: finding.outcome.as_str().to_owned(),
                epoch_before: before.as_ref().map_or(0, |record| record.opened.epoch),
                version_before: before.as_ref().map_or(0, |record| record.membership.version),
                epoch: written.map_or(0, |record| record.opened.epoch),
                membership_version: finding.version,
                rf: finding.rf.into(),
                needed: finding.needed.into(),
                answered: finding.answered.into(),
                message: finding.message.clone(),
                replicas: replicas.collect(),
            }
        });
        Self {
            volumes: volumes.collect(),
            pools: recovered.pools,
            missing_pools: recovered.missing_pools,
            done: recovered.done,
            term: recovered.term.number,
        }
    }
}
