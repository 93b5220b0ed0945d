//! Comparison of both sides of a mirror, on request: ranges of 1 MiB of a point that both hold, by hashes that each
//! side's own target makes of what it reads. No content crosses the link.
//!
//! The side that was asked keeps the comparison in its record and goes on with it after a restart. The other one
//! answers and remembers nothing, so a question that got no answer is put again. A point that is dropped while it is
//! compared is followed by the next common one: what differed in the former and was not written since differs in it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{self as api, HashesAsked, HashesTold, peer_word};
use quoin_cluster::mirror::{Record as Brain, Role};
use quoin_cluster::ownership::mirrored::snapshot_of;
use quoin_cluster::records::{
    ComparisonState, Cut, DifferingRange, MirrorComparison, MirrorRecord, Record, Text,
};
use quoin_encryption::HASH_BYTES;
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::driver::Mirrors;
use super::memory::Asked;
use super::observe;
use crate::Error;
use crate::state::events::{Object, Severity};
use crate::state::random_id;
use crate::time::{now_ms, timestamp};

/// Size of a range, and the ranges of one question.
const RANGE_BYTES: u64 = 1 << 20;
const RANGES_ASKED: u32 = 16;
/// Groups that are compared at a time, and questions of peers that are answered at a time and that wait.
const COMPARING_MAX: usize = 4;
const ANSWERING_MAX: usize = 4;
const WAITING_MAX: usize = 64;
/// Time for an answer of the peer, and that without any progress after which a comparison ends.
const ANSWERED_WITHIN: Duration = Duration::from_secs(25);
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before a question is put again, and before a look where nothing is compared: records that did not rule may
/// name a comparison.
const AGAIN: Duration = Duration::from_millis(300);
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Bytes and time after which the place is recorded.
const RECORDED_BYTES: u64 = 256 << 20;
const RECORDED_WITHIN: Duration = Duration::from_secs(5);

/// Reason why ranges were not compared.
enum Unknown {
    /// It may pass: the point was dropped, or an answer was lost.
    Passes(String),
    Stays(String),
}

impl Mirrors {
    /// Begins a comparison, or finds the one that is under way.
    ///
    /// # Errors
    /// There is no point that both sides hold, or no mirror of the peer is heard.
    pub async fn verify(
        &self,
        reference: Option<&api::MirrorRef>,
    ) -> Result<Arc<MirrorRecord>, Error> {
        let record = self.get(reference)?;
        self.state.check_term()?;
        let (name, brain) = (&record.group_name, record.brain());
        if !matches!(brain.role, Role::Primary | Role::Secondary) {
            return Err(Error::Precondition(format!(
                "{name:?} is {} here: both sides are compared while one follows the other",
                super::view::role(brain.role)
            )));
        }
        if brain.points.common.is_none() {
            return Err(Error::Precondition(format!(
                "no point of {name:?} is on both sides yet: `quoin mirror status` says how far the first one is"
            )));
        }
        if self.is_silent(record.id.0) {
            return Err(Error::Precondition(format!(
                "no mirror of the peer is heard, so {name:?} cannot be compared with it: `quoin mirror \
                 peers` says why"
            )));
        }
        let id = PointId(random_id());
        let change = |record: &mut MirrorRecord| {
            let former = record.comparison.take();
            record.comparison = match former {
                Some(former) if former.state == ComparisonState::Comparing => Some(former),
                former => Some(MirrorComparison::begun(id, now_ms(), former.as_ref())),
            };
            Ok(())
        };
        let updated = self.state.mirrored.records.update(&record.name(), change).await?;
        let (record, ()) = updated.ok_or_else(|| Error::missing("mirror", &record.group_name))?;
        self.comparisons.news.notify_one();
        Ok(record)
    }

    fn is_silent(&self, group: GroupId) -> bool {
        self.state.mirrored.figures(group).is_some_and(|figures| figures.is_silent)
    }

    /// Compares what is to be compared, and answers peers that do, for ever.
    pub(crate) async fn keep_comparing(self: &Arc<Self>) {
        let mut tasks = JoinSet::new();
        let (mut comparing, mut answering) = (BTreeSet::<GroupId>::new(), 0);
        loop {
            while let Some(ended) = tasks.try_join_next() {
                match ended {
                    Ok(Some(group)) => drop(comparing.remove(&group)),
                    Ok(None) => answering -= 1,
                    Err(error) => tracing::error!(%error, "a comparison of a mirror broke off"),
                }
            }
            let rules = self.state.check_ruling().is_ok() && self.state.check_term().is_ok();
            for record in self.state.mirrored.records.list().iter().filter(|_| rules) {
                let group = record.id.0;
                if comparing.len() < COMPARING_MAX
                    && is_comparing(record)
                    && comparing.insert(group)
                {
                    let mirrors = self.clone();
                    tasks.spawn(async move {
                        if let Err(error) = mirrors.compare(group).await {
                            tracing::warn!(%error, %group, "a comparison of a mirror waits");
                        }
                        Some(group)
                    });
                }
            }
            while rules && answering < ANSWERING_MAX {
                let Some(asked) = self.asked().pop_front() else { break };
                let mirrors = self.clone();
                answering += 1;
                tasks.spawn(async move {
                    mirrors.answer(asked).await;
                    None
                });
            }
            let pause = if tasks.is_empty() { LOOK_EVERY } else { AGAIN };
            let _ = timeout(pause, self.comparisons.news.notified()).await;
        }
    }

    fn asked(&self) -> std::sync::MutexGuard<'_, VecDeque<Asked>> {
        self.comparisons.asked.lock().expect("no holder of this lock panics")
    }

    fn answers(&self) -> std::sync::MutexGuard<'_, HashMap<u128, oneshot::Sender<HashesTold>>> {
        self.comparisons.answers.lock().expect("no holder of this lock panics")
    }

    fn done(&self) -> std::sync::MutexGuard<'_, HashMap<GroupId, u64>> {
        self.comparisons.done.lock().expect("no holder of this lock panics")
    }

    /// A peer asks for hashes of its side of a mirror.
    pub(super) fn hashes_asked(&self, peer: &str, group: GroupId, question: HashesAsked) {
        let record = self.state.mirrored.group(group);
        if record.is_none_or(|record| record.brain().peer.to_string() != peer) {
            return;
        }
        let mut asked = self.asked();
        let is_there = asked.iter().any(|asked| asked.question.id == question.id);
        // A question that finds no room comes again.
        if !is_there && asked.len() < WAITING_MAX {
            asked.push_back(Asked { peer: peer.to_owned(), group, question });
        }
        drop(asked);
        self.comparisons.news.notify_one();
    }

    /// A peer answers.
    pub(super) fn hashes_told(&self, peer: &str, group: GroupId, told: HashesTold) {
        let record = self.state.mirrored.group(group);
        if record.is_none_or(|record| record.brain().peer.to_string() != peer) {
            return;
        }
        let Ok(PointId(id)) = told.id.parse() else { return };
        if let Some(answer) = self.answers().remove(&id) {
            // The question may have been given up.
            let _ = answer.send(told);
        }
    }

    async fn answer(&self, Asked { peer, group, question }: Asked) {
        let told = match self.own_hashes(group, &question).await {
            Ok((hashes, size_bytes)) => HashesTold { hashes, size_bytes, ..HashesTold::default() },
            Err(Error::NotFound { .. }) => HashesTold { no_point: true, ..HashesTold::default() },
            Err(error) => {
                let failure = error.to_string().chars().take(300).collect();
                HashesTold { failure, ..HashesTold::default() }
            }
        };
        let told = HashesTold { id: question.id, ..told };
        self.say(peer, group, peer_word::What::HashesTold(told));
    }

    /// Hashes of this side, and the size of the volume in the point.
    ///
    /// # Errors
    /// [`Error::NotFound`]: this side does not hold the point.
    async fn own_hashes(
        &self,
        group: GroupId,
        question: &HashesAsked,
    ) -> Result<(Vec<u8>, u64), Error> {
        let missing = || Error::missing("point", &question.point_id);
        let volume: VolumeId = crate::fields::id("volume_id", &question.volume_id)?;
        let point: PointId = crate::fields::id("point_id", &question.point_id)?;
        if question.ranges == 0 || question.ranges > RANGES_ASKED {
            return Err(Error::invalid("ranges", format!("1 to {RANGES_ASKED}")));
        }
        let record = self.state.mirrored.group(group).ok_or_else(missing)?;
        if !record.brain().members.iter().any(|member| member.volume == volume) {
            return Err(missing());
        }
        let cut = self.cut_of(volume, point).ok_or_else(missing)?;
        let of = (volume, snapshot_of(point, volume));
        let hashes = self.history.hashes(of, question.first_range, question.ranges).await?;
        Ok((hashes, cut.size_bytes))
    }

    fn cut_of(&self, volume: VolumeId, point: PointId) -> Option<Cut> {
        let held = observe::points(&self.state, volume);
        held.into_iter().find(|(held, _)| *held == point).map(|(_, cut)| cut)
    }

    /// Goes through a group until the comparison is over.
    ///
    /// # Errors
    /// The store fails; the comparison is begun again where it was.
    async fn compare(&self, group: GroupId) -> Result<(), Error> {
        let found = self.state.mirrored.group(group).and_then(|record| record.comparison.clone());
        let Some(mut at) = found else { return Ok(()) };
        let (id, mut moved, mut recorded) = (at.id, Instant::now(), Instant::now());
        let mut recorded_bytes = at.done_bytes;
        loop {
            self.state.check_ruling()?;
            self.state.check_term()?;
            let Some(record) = self.state.mirrored.group(group) else { return Ok(()) };
            let is_it = record.comparison.as_ref().is_some_and(|comparison| comparison.id == id);
            if !is_it || !is_comparing(&record) {
                return Ok(());
            }
            let Some(volume) = next_member(record.brain(), at.volume.0) else {
                at.state = match at.differing {
                    0 => ComparisonState::Equal,
                    _ => ComparisonState::Differs,
                };
                return self.conclude(&record, at).await;
            };
            if volume != at.volume.0 {
                (at.volume, at.range) = (Text(volume), 0);
            }
            match self.compare_next(&record, &mut at).await {
                Ok(()) => moved = Instant::now(),
                Err(Unknown::Passes(why)) if moved.elapsed() < PATIENCE => {
                    tracing::debug!(%group, why, "ranges of a mirror are compared again");
                    sleep(AGAIN).await;
                }
                Err(Unknown::Passes(why) | Unknown::Stays(why)) => {
                    (at.state, at.failure) = (ComparisonState::Failed, why);
                    return self.conclude(&record, at).await;
                }
            }
            self.done().insert(group, at.done_bytes);
            let is_new = at.done_bytes != recorded_bytes;
            if at.done_bytes - recorded_bytes >= RECORDED_BYTES
                || is_new && recorded.elapsed() >= RECORDED_WITHIN
            {
                self.record(&record, &at).await?;
                (recorded, recorded_bytes) = (Instant::now(), at.done_bytes);
            }
        }
    }

    /// Compares the next ranges at the point that both sides have in common now.
    async fn compare_next(
        &self,
        record: &MirrorRecord,
        at: &mut MirrorComparison,
    ) -> Result<(), Unknown> {
        let (brain, volume) = (record.brain(), at.volume.0);
        let passes = |why: &str| Unknown::Passes(why.to_owned());
        if !matches!(brain.role, Role::Primary | Role::Secondary) {
            let role = super::view::role(brain.role);
            return Err(Unknown::Stays(format!("it became {role} here while it was compared")));
        }
        if self.is_silent(record.id.0) {
            let why = "no mirror of the peer is heard any more: `quoin mirror peers` says why";
            return Err(Unknown::Stays(why.to_owned()));
        }
        let point = brain.points.common;
        let point = point.ok_or_else(|| passes("the sides have no point in common any more"))?;
        let cut = self.cut_of(volume, point);
        let cut = cut.ok_or_else(|| passes("this side has dropped the point"))?;
        let question = HashesAsked {
            id: PointId(random_id()).to_string(),
            volume_id: volume.to_string(),
            point_id: point.to_string(),
            first_range: at.range,
            ranges: RANGES_ASKED,
        };
        let (own, theirs) =
            tokio::join!(self.own_hashes(record.id.0, &question), self.ask(record, &question));
        let theirs = theirs?;
        let (own, _) = match own {
            Ok(own) => own,
            Err(Error::DataLoss(why)) => return Err(Unknown::Stays(why)),
            Err(error) => return Err(Unknown::Passes(format!("on this side: {error}"))),
        };
        let size_bytes = cut.size_bytes.max(theirs.size_bytes);
        let end = size_bytes.div_ceil(RANGE_BYTES);
        let pairs = own.chunks(HASH_BYTES).zip(theirs.hashes.chunks(HASH_BYTES));
        for (range, (own, theirs)) in (at.range..end).zip(pairs) {
            if own != theirs {
                at.note(DifferingRange { volume: Text(volume), range });
            }
        }
        at.point = Some(Text(point));
        let next = (at.range + u64::from(RANGES_ASKED)).min(end);
        at.done_bytes += next.saturating_sub(at.range).saturating_mul(RANGE_BYTES);
        at.range = next;
        if next >= end {
            // Ids are random: none is behind the last one.
            (at.volume, at.range) = (Text(VolumeId(volume.0.saturating_add(1))), 0);
        }
        Ok(())
    }

    async fn ask(
        &self,
        record: &MirrorRecord,
        question: &HashesAsked,
    ) -> Result<HashesTold, Unknown> {
        let passes = |why: &str| Unknown::Passes(why.to_owned());
        let Ok(PointId(id)) = question.id.parse() else { return Err(passes("it has no id")) };
        let (answer, answered) = oneshot::channel();
        self.answers().insert(id, answer);
        let what = peer_word::What::HashesAsked(question.clone());
        self.say(record.brain().peer.to_string(), record.id.0, what);
        let told = timeout(ANSWERED_WITHIN, answered).await;
        self.answers().remove(&id);
        let Ok(Ok(told)) = told else { return Err(passes("the peer does not answer")) };
        if told.no_point {
            return Err(passes("the peer does not hold the point: it has dropped it"));
        }
        if !told.failure.is_empty() {
            let why = crate::text::plain(&told.failure).chars().take(300).collect::<String>();
            return Err(Unknown::Passes(format!("on the peer: {why}")));
        }
        match told.hashes.len() == question.ranges as usize * HASH_BYTES {
            true => Ok(told),
            false => Err(passes("the peer's answer cannot be")),
        }
    }

    async fn record(&self, record: &MirrorRecord, at: &MirrorComparison) -> Result<(), Error> {
        let change = |found: &mut MirrorRecord| {
            if found.comparison.as_ref().is_some_and(|comparison| comparison.id == at.id) {
                found.comparison = Some(at.clone());
            }
            Ok(())
        };
        self.state.mirrored.records.update(&record.name(), change).await.map(drop)
    }

    async fn conclude(&self, record: &MirrorRecord, mut at: MirrorComparison) -> Result<(), Error> {
        at.ended_ms = now_ms();
        if at.state == ComparisonState::Equal {
            at.differed = false;
        }
        self.record(record, &at).await?;
        self.done().remove(&record.id.0);
        let name = crate::text::quoted(&record.group_name);
        let (severity, reason, message) = match at.state {
            ComparisonState::Comparing => return Ok(()),
            ComparisonState::Equal => {
                (Severity::Normal, "MirrorVerified", "both sides are equal".to_owned())
            }
            ComparisonState::Differs => (
                Severity::Error,
                "MirrorDiffers",
                format!(
                    "{} ranges of 1 MiB differ between both sides: `quoin mirror status {name}` \
                     names them, `quoin volume doctor` the way out",
                    at.differing
                ),
            ),
            ComparisonState::Failed => {
                (Severity::Warning, "MirrorNotVerified", format!("it ended early: {}", at.failure))
            }
        };
        let about = Object::new("mirror", record.id.0, &record.group_name);
        self.state.events.record(severity, about, reason, message);
        Ok(())
    }

    /// The comparison of a mirror, as users see it.
    pub(super) fn comparison(&self, record: &MirrorRecord) -> Option<api::MirrorComparison> {
        let at = record.comparison.as_ref()?;
        let size = |volume: VolumeId| {
            let volume = self.state.volumes.get(&volume.to_string());
            volume.map_or(0, |volume| volume.size_bytes.next_multiple_of(RANGE_BYTES))
        };
        let total_bytes = record.brain().members.iter().map(|member| size(member.volume)).sum();
        let done_bytes = match at.state {
            ComparisonState::Comparing => self.done().get(&record.id.0).copied(),
            _ => None,
        };
        let range = |found: &DifferingRange| {
            let volume = self.state.volumes.get(&found.volume.0.to_string());
            api::DifferingRange {
                volume_id: found.volume.0.to_string(),
                volume: volume.map(|volume| volume.spec.name.clone()).unwrap_or_default(),
                offset: found.range.saturating_mul(RANGE_BYTES),
                length: RANGE_BYTES,
            }
        };
        Some(api::MirrorComparison {
            state: match at.state {
                ComparisonState::Comparing => "comparing",
                ComparisonState::Equal => "equal",
                ComparisonState::Differs => "differs",
                ComparisonState::Failed => "failed",
            }
            .to_owned(),
            began_at: Some(timestamp(at.began_ms)),
            ended_at: (at.ended_ms != 0).then(|| timestamp(at.ended_ms)),
            point: at.point.map(|point| point.0.to_string()).unwrap_or_default(),
            done_bytes: done_bytes.unwrap_or(at.done_bytes),
            total_bytes,
            differing: at.differing,
            ranges: at.ranges.iter().map(range).collect(),
            failure: at.failure.clone(),
        })
    }
}

fn is_comparing(record: &MirrorRecord) -> bool {
    record.comparison.as_ref().is_some_and(|at| at.state == ComparisonState::Comparing)
}

/// The member whose turn it is: the one with this id, or the next one. Those without a base have no common point.
fn next_member(brain: &Brain, from: VolumeId) -> Option<VolumeId> {
    let members = brain.members.iter().filter(|member| member.has_base);
    members.map(|member| member.volume).filter(|volume| *volume >= from).min()
}

#[cfg(test)]
mod tests {
    use quoin_cluster::mirror::{ClusterId, Member};

    use super::*;

    #[test]
    fn members_are_gone_through_by_their_ids_and_one_that_joins_is_left_out() {
        let parameters =
            quoin_cluster::mirror::record::Parameters { interval_s: 10, may_take_over: false };
        let clusters = [ClusterId(1), ClusterId(2)];
        let mut brain = Brain::primary(GroupId(9), clusters, Vec::new(), parameters);
        let member = |id, has_base| Member { volume: VolumeId(id), has_base };
        brain.members = vec![member(7, true), member(3, true), member(5, false)];
        assert_eq!(next_member(&brain, VolumeId(0)), Some(VolumeId(3)));
        assert_eq!(next_member(&brain, VolumeId(4)), Some(VolumeId(7)));
        assert_eq!(next_member(&brain, VolumeId(8)), None);
    }

    #[test]
    fn a_difference_holds_until_a_comparison_finds_none() {
        let mut first = MirrorComparison::begun(PointId(1), 5, None);
        assert!(!first.differs());
        first.note(DifferingRange { volume: Text(VolumeId(3)), range: 1 });
        first.state = ComparisonState::Differs;
        assert!(first.differs());
        let mut second = MirrorComparison::begun(PointId(2), 6, Some(&first));
        assert!(second.differs(), "while the next one runs");
        second.state = ComparisonState::Failed;
        assert!(second.differs(), "and where that one fails");
        second.state = ComparisonState::Equal;
        assert!(!second.differs());
    }
}
