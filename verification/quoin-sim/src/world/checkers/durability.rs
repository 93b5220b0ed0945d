//! One writer, nothing acknowledged lost, nothing read ahead, right bytes, and every operation in
//! one order.

use std::collections::BTreeSet;

use bytes::Bytes;
use quoin_replication::primary::{OnFull, OnQuorumLoss, ReadMode, ReplicaStanding, ReplicaStatus};
use quoin_types::block::BlockError;
use quoin_types::{Durability as Promise, Epoch, Lsn, Member};

use super::{Broken, Checker, LostInBatch, Observation, Scene, broken};
use crate::content::{self, SECTOR, SECTORS, Tag};
use crate::history::{Op, blocks_of};
use crate::lineage::{Path, Seen};
use crate::map::FixedMap;
use crate::workload::Draft;
use crate::world::PoolHost;

#[derive(Default)]
pub(crate) struct Durability {
    /// Entries that must be in every later history: acknowledged, read, flushed.
    owed: FixedMap<Seen, Owed>,
    /// Acknowledged and not flushed: tag and instant.
    unflushed: Vec<(Tag, u64)>,
    /// Blocks of them that a permitted loss took.
    lost: BTreeSet<(Tag, u64)>,
    /// The newest epoch that ever served, and by which life of which target.
    served: (Epoch, usize, u32),
    /// The newest epoch that served after giving up unflushed data.
    last_loss: Epoch,
    /// Opens that reported that unflushed data may be lost.
    tails_lost: u64,
    /// Whom the target that acts drops further on in its batch.
    yet_to_drop: Vec<Member>,
    /// How far counted replicas were as sessions ended in the batch.
    lost_in_batch: Vec<LostInBatch>,
    /// The action of the batch that is done.
    action: usize,
}

/// Reasons for which an entry must be in every later history.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
struct Owed {
    acknowledged: bool,
    read: bool,
    flushed: bool,
}

impl Durability {
    /// The newest epoch that ever served.
    pub fn served_epoch(&self) -> Epoch {
        self.served.0
    }

    pub fn tails_lost(&self) -> u64 {
        self.tails_lost
    }
}

impl Checker for Durability {
    fn on(&mut self, scene: &mut Scene<'_>, seen: &Observation<'_>) -> Result<(), Broken> {
        match *seen {
            Observation::BatchBegins { ref dropped, ref lost } => {
                self.yet_to_drop.clone_from(dropped);
                self.lost_in_batch.clone_from(lost);
                Ok(())
            }
            Observation::ActionBegins { index } => {
                self.action = index;
                Ok(())
            }
            Observation::Dropped { member } => {
                self.yet_to_drop.retain(|other| *other != member);
                Ok(())
            }
            // Acknowledgements that were long on their way let a fenced target see its first View
            // active. It could do harm only if it could answer.
            Observation::StartsLate { target, epoch } if holds_lease(scene, target) => {
                let served = self.served.0;
                broken("OneWriter", format!("epoch {epoch} starts IO after epoch {served} did"))
            }
            Observation::StartsNewest { target, epoch } => {
                if epoch == self.served.0 && self.served.0 != Epoch::ZERO {
                    return broken("OneWriter", format!("epoch {epoch} starts IO twice"));
                }
                check_leases(scene, target, epoch)
            }
            Observation::HistoryServed { target, life, epoch, kept } => {
                self.check_history(scene, (target, life), epoch, kept)
            }
            Observation::Answers { target, life, tag, .. } => {
                self.check_answers(scene, target, life, tag)
            }
            Observation::Answered { target, tag, data } => {
                self.check_answer(scene, target, tag, data)
            }
            Observation::Reverted { target, life } => self.check_reverted(scene, (target, life)),
            Observation::Failed { tag, error, .. } => self.check_failure(scene, tag, error),
            Observation::BlockLost { lba } if !scene.may_be_unreadable() => {
                broken("NoSilentDamage", format!("no good copy of block {lba} is left"))
            }
            _ => Ok(()),
        }
    }

    fn at_end(&mut self, scene: &mut Scene<'_>) -> Result<(), Broken> {
        scene.history.check().or_else(|unlinear| broken("Linearizable", unlinear.story))
    }
}

/// Returns true if it may answer now, by its own clock.
fn holds_lease(scene: &Scene<'_>, target: usize) -> bool {
    let now = scene.local(scene.targets[target].host);
    let process = scene.process(target);
    process.and_then(|p| p.target.lease()).is_some_and(|until| until > now)
}

/// When an epoch starts IO, no older target may still hold a lease, whether it uses it or not; one
/// that has sent Close has given it up, and [`Durability::check_answers`] holds it to that.
fn check_leases(scene: &Scene<'_>, target: usize, epoch: Epoch) -> Result<(), Broken> {
    // Where clocks stop, leases do not end, and reads do not lean on them.
    if scene.setup.config.reads == ReadMode::Confirmed {
        return Ok(());
    }
    for (index, other) in scene.targets.iter().enumerate() {
        let Some(process) = other.process.as_ref().filter(|_| index != target) else {
            continue;
        };
        let live = holds_lease(scene, index) && !process.closes;
        if let Some(older) = process.serving.filter(|e| live && *e < epoch) {
            let detail =
                format!("epoch {epoch} starts IO while target {index} holds a lease of {older}");
            return broken("LeaseExcludes", detail);
        }
    }
    Ok(())
}

/// The start of IO in an epoch.
impl Durability {
    /// A target serves: is its history one that holds all that is owed?
    fn check_history(
        &mut self,
        scene: &mut Scene<'_>,
        serving: (usize, u32),
        epoch: Epoch,
        kept: Option<&[Path]>,
    ) -> Result<(), Broken> {
        let (target, life) = serving;
        let is_tail_lost = scene.process(target).is_some_and(|p| p.tail_lost);
        let served_before = self.served.0;
        // Nothing that this very process acknowledged since it served last is lost: what is not on
        // media is in its memory, and it writes that again before it answers anything.
        let lives_on = self.served == (served_before, target, life);
        self.served = (epoch, target, life);
        if is_tail_lost {
            self.check_loss(scene, epoch, served_before, kept.is_some())?;
        }
        let lineage = scene.lineage;
        let Some(path) = lineage.path(epoch) else {
            let detail = format!("epoch {epoch} serves and never sent an entry");
            return broken("PrefixAlways", detail);
        };
        self.check_owed(scene, epoch, path, is_tail_lost, kept)?;
        // Its first View is active, so it is on the media of CF: no later history is without it.
        if let Some(view) = lineage.first_of(path, epoch) {
            self.owed.entry(view).or_default().flushed = true;
        }
        let holds = |tag: Tag, block: u64| lineage.carrier_on(path, tag, block).is_some();
        let targets = scene.targets;
        // A request that still waited at a target which had served before is from before this
        // epoch.
        let had_served = |(target, life): (usize, u32)| {
            let there = &targets[target];
            there.life != life || there.process.as_ref().is_none_or(|p| p.has_served)
        };
        let over = |op: &Op| {
            op.targets.iter().all(|target| had_served(*target)) || lineage.was_sent(op.tag)
        };
        if kept.is_none() && (!is_tail_lost || lives_on) {
            scene.history.settle(serving, over, holds);
            self.owed.retain(|seen, _| lineage.is_on(path, *seen));
            return Ok(());
        }
        let image = lineage.image(scene.setup.run, path, Lsn(u64::MAX));
        let image = image.into_iter().map(|(block, (_, tags))| (block, tags)).collect();
        let result = scene.history.cut(image, serving, over, holds);
        self.owed.retain(|seen, _| lineage.is_on(path, *seen));
        // Lost entries are lost: only the entries of this history can still be flushed.
        let (history, lost) = (&scene.history, &mut self.lost);
        self.unflushed.retain(|(tag, _)| {
            let Draft::Write { sector, sectors, .. } = history.op(*tag).draft else { return false };
            let (first, last) = blocks_of(sector, sectors);
            let is_lost = |block: &u64| lineage.carrier_on(path, *tag, *block).is_none();
            let gone: Vec<u64> = (first..=last).filter(is_lost).collect();
            let stays = (gone.len() as u64) < last - first + 1;
            // A long write is several entries, of which a part may be left.
            if stays {
                lost.extend(gone.into_iter().map(|block| (*tag, block)));
            }
            stays
        });
        result.or_else(|unlinear| broken("Linearizable", unlinear.story))
    }

    /// The volume shows a snapshot again: from here on clients read what the history held there.
    fn check_reverted(
        &mut self,
        scene: &mut Scene<'_>,
        serving: (usize, u32),
    ) -> Result<(), Broken> {
        let lineage = scene.lineage;
        let Some(path) = lineage.path(self.served.0) else { return Ok(()) };
        let targets = scene.targets;
        let had_served = |(target, life): (usize, u32)| {
            let there = &targets[target];
            there.life != life || there.process.as_ref().is_none_or(|p| p.has_served)
        };
        let over = |op: &Op| {
            op.targets.iter().all(|target| had_served(*target)) || lineage.was_sent(op.tag)
        };
        let holds = |tag: Tag, block: u64| lineage.carrier_on(path, tag, block).is_some();
        let image = lineage.image(scene.setup.run, path, Lsn(u64::MAX));
        let image = image.into_iter().map(|(block, (_, tags))| (block, tags)).collect();
        let result = scene.history.cut(image, serving, over, holds);
        result.or_else(|unlinear| broken("Linearizable", unlinear.story))
    }

    /// An open gives up unflushed data: enough caches were lost for that.
    fn check_loss(
        &mut self,
        scene: &Scene<'_>,
        epoch: Epoch,
        served_before: Epoch,
        is_forced: bool,
    ) -> Result<(), Broken> {
        self.tails_lost += 1;
        let lost = |p: &&PoolHost| !p.is_spare() && (p.cache_lost || p.gone);
        let lost = scene.pools.iter().filter(lost).count();
        // Nothing was written since the last report of a loss: it is reported again.
        let again = std::mem::replace(&mut self.last_loss, epoch) == served_before;
        // A joint View is judged under the rule that a change is on its way to as well.
        let desired = &scene.control.record.desired;
        let cf = scene.cf_in_force().min(desired.cf_of(desired.drf.max(1)).into());
        if lost < cf && !again && !is_forced {
            let detail = format!("epoch {epoch} gives up unflushed data after {lost} lost caches");
            return broken("CommitSurvives", detail);
        }
        Ok(())
    }

    /// All that is owed is on the path that an epoch serves.
    fn check_owed(
        &self,
        scene: &Scene<'_>,
        epoch: Epoch,
        path: &Path,
        is_tail_lost: bool,
        kept: Option<&[Path]>,
    ) -> Result<(), Broken> {
        let mut missing: Vec<(Seen, Owed)> = Vec::new();
        for (seen, owed) in &self.owed {
            let is_held = |path| scene.lineage.is_on(path, *seen);
            let is_due = match kept {
                Some(kept) => kept.iter().any(is_held),
                None => owed.flushed || !is_tail_lost,
            };
            if is_due && !is_held(path) {
                missing.push((*seen, *owed));
            }
        }
        missing.sort_by_key(|(seen, _)| *seen);
        let Some((seen, owed)) = missing.first() else { return Ok(()) };
        let entry = scene.lineage.entry(*seen);
        let rule = if owed.flushed { "StableSurvives" } else { "CommitSurvives" };
        let detail = format!(
            "epoch {epoch} serves a history without entry {}/{} ({:?} of blocks {}+{}), {}; \
             {} entries are missing",
            entry.epoch,
            entry.lsn,
            entry.kind,
            entry.lba,
            entry.blocks,
            match owed {
                Owed { flushed: true, .. } => "which was flushed",
                Owed { acknowledged: true, .. } => "which was acknowledged",
                _ => "which was read",
            },
            missing.len(),
        );
        broken(rule, detail)
    }
}

/// Answers.
impl Durability {
    /// An answer is of the newest epoch, by a target that serves.
    fn check_answers(
        &self,
        scene: &Scene<'_>,
        target: usize,
        life: u32,
        tag: Tag,
    ) -> Result<(), Broken> {
        let process = scene.process(target);
        let Some(epoch) = process.and_then(|p| p.serving) else {
            let detail = format!("target {target} answers and does not serve");
            return broken("LeaseExcludes", detail);
        };
        if process.is_some_and(|p| p.closes) {
            let detail = format!("target {target} answers though it gave its lease up by a Close");
            return broken("LeaseExcludes", detail);
        }
        if (epoch, target, life) != self.served {
            let (newest, by, _) = self.served;
            let detail =
                format!("op {tag} answered in epoch {epoch} after {newest} (target {by}) began IO");
            return broken("LeaseExcludes", detail);
        }
        Ok(())
    }

    /// A good answer: is it durable as promised, and are a read's bytes what was written?
    fn check_answer(
        &mut self,
        scene: &mut Scene<'_>,
        target: usize,
        tag: Tag,
        data: &[Bytes],
    ) -> Result<(), Broken> {
        let Some(epoch) = scene.process(target).and_then(|p| p.serving) else { return Ok(()) };
        let op = scene.history.op(tag);
        let (draft, invoked) = (op.draft, op.invoked);
        match draft {
            Draft::Read { sector, sectors } => match read_tags(scene, sector, sectors, data) {
                Ok(tags) => {
                    let owed = self.owe_read(scene, epoch, sector, &tags);
                    scene.history.answer(tag, tags);
                    owed
                }
                Err(detail) => broken("WrongBytes", format!("read op {tag}: {detail}")),
            },
            Draft::Write { sector, sectors, fua } => {
                scene.history.answer(tag, Vec::new());
                let flushed = fua || scene.operators.durability.promised == Promise::Media;
                self.owe_write(scene, epoch, tag, (sector, sectors), flushed)?;
                if !flushed {
                    let answered = scene.history.op(tag).answered;
                    self.unflushed.push((tag, answered));
                }
                Ok(())
            }
            Draft::Trim { .. } | Draft::Zero { .. } => {
                scene.history.answer(tag, Vec::new());
                Ok(())
            }
            Draft::Flush => {
                scene.history.answer(tag, Vec::new());
                let before = |(_, answered): &&(Tag, u64)| *answered < invoked;
                let flushed: Vec<Tag> =
                    self.unflushed.iter().filter(before).map(|(tag, _)| *tag).collect();
                self.unflushed.retain(|(_, answered)| *answered >= invoked);
                for tag in flushed {
                    if let Draft::Write { sector, sectors, .. } = scene.history.op(tag).draft {
                        self.owe_write(scene, epoch, tag, (sector, sectors), true)?;
                    }
                }
                Ok(())
            }
        }
    }

    fn owe_write(
        &mut self,
        scene: &mut Scene<'_>,
        epoch: Epoch,
        tag: Tag,
        (sector, sectors): (u64, u64),
        flushed: bool,
    ) -> Result<(), Broken> {
        let Some(path) = scene.lineage.path(epoch) else { return Ok(()) };
        let (first, last) = blocks_of(sector, sectors);
        let mut highest = Lsn::ZERO;
        for block in first..=last {
            let Some(seen) = scene.lineage.carrier_on(path, tag, block) else {
                if self.lost.remove(&(tag, block)) {
                    continue;
                }
                let detail = format!("op {tag} was acknowledged: block {block} was never sent");
                return broken("OnlyCounted", detail);
            };
            let lsn = scene.lineage.entry(seen).lsn;
            let owed = self.owed.entry(seen).or_default();
            owed.acknowledged = true;
            owed.flushed |= flushed;
            highest = highest.max(lsn);
        }
        self.check_reach(scene, tag, highest, flushed, epoch)?;
        let target = self.served.1;
        scene.follows.push(Observation::Acknowledged { target, lsn: highest });
        Ok(())
    }

    fn owe_read(
        &mut self,
        scene: &Scene<'_>,
        epoch: Epoch,
        sector: u64,
        tags: &[Tag],
    ) -> Result<(), Broken> {
        let Some(path) = scene.lineage.path(epoch) else { return Ok(()) };
        let mut before = (0, u64::MAX);
        let mut highest = (Lsn::ZERO, 0);
        for (i, tag) in tags.iter().enumerate() {
            let block = (sector + i as u64) / SECTORS as u64;
            if *tag == 0 || (*tag, block) == before {
                continue;
            }
            before = (*tag, block);
            let Some(seen) = scene.lineage.carrier_on(path, *tag, block) else {
                let detail = format!("block {block} was read as op {tag}'s, which has no entry");
                return broken("NoReadAhead", detail);
            };
            self.owed.entry(seen).or_default().read = true;
            highest = highest.max((scene.lineage.entry(seen).lsn, *tag));
        }
        let media = scene.operators.durability.promised == Promise::Media;
        self.check_reach(scene, highest.1, highest.0, media, epoch)
    }

    /// Checks that the data a reply promises is held where it must be at that moment.
    fn check_reach(
        &self,
        scene: &Scene<'_>,
        tag: Tag,
        lsn: Lsn,
        flushed: bool,
        epoch: Epoch,
    ) -> Result<(), Broken> {
        let mut processes = scene.targets.iter().filter_map(|t| t.process.as_ref());
        let Some(process) = processes.find(|p| p.serving == Some(epoch)) else { return Ok(()) };
        let (commit, stable) = process.target.reach();
        // A member that is dropped after a reply, in the same batch, was counted for it.
        let replicas = process.target.status().replicas;
        let held = |r: &&ReplicaStatus| self.yet_to_drop.contains(&r.member) && r.applied >= lsn;
        // So was one whose session ends later in the batch, and one whose session ended after the
        // entry was committed: what a batch commits is answered at its end.
        let is_counted = |m: &Member| {
            replicas.iter().any(|r| r.member == *m && r.standing == ReplicaStanding::InSync)
        };
        let lost = self.lost_in_batch.iter().filter(|lost| {
            (self.action < lost.before || lsn <= lost.committed)
                && lost.applied >= lsn
                && !is_counted(&lost.member)
                && !self.yet_to_drop.contains(&lost.member)
        });
        let lost: BTreeSet<Member> = lost.map(|lost| lost.member).collect();
        let holders =
            process.target.holders(lsn) + replicas.iter().filter(held).count() + lost.len();
        if flushed && lsn > stable {
            let detail = format!("op {tag} is at {lsn}, which is not stable: stable is {stable}");
            return broken("FlushIsStable", detail);
        }
        if !flushed && lsn > commit {
            let detail =
                format!("op {tag} shows {lsn}, which is not committed: commit is {commit}");
            return broken("NoReadAhead", detail);
        }
        if holders >= scene.cf_in_force() {
            return Ok(());
        }
        // Which rule let it pass: one that is not counted made up the number, or one that is
        // counted again lacks what was committed while it was away.
        let is_there = |counted: bool, holds: bool| {
            let is_counted = |r: &ReplicaStatus| r.standing == ReplicaStanding::InSync;
            replicas.iter().any(|r| is_counted(r) == counted && (r.applied >= lsn) == holds)
        };
        let rule = match () {
            () if is_there(false, true) => "DroppedNotCounted",
            () if is_there(true, false) => "Held",
            () => "OnlyCounted",
        };
        broken(rule, format!("op {tag} is at {lsn}, which {holders} counted replicas hold"))
    }

    /// An error: is it one that a client may be given in this run?
    fn check_failure(&self, scene: &Scene<'_>, tag: Tag, error: BlockError) -> Result<(), Broken> {
        let config = &scene.setup.config;
        let is_allowed = match error {
            BlockError::Stopped => true,
            BlockError::NoQuorum => config.on_quorum_loss == OnQuorumLoss::Fail,
            BlockError::NoSpace => config.on_full == OnFull::NoSpace,
            // The flush after an allowed loss reports it, once.
            BlockError::Damaged if scene.history.op(tag).draft == Draft::Flush => {
                self.tails_lost > 0
            }
            BlockError::Damaged => scene.may_be_unreadable(),
            BlockError::OutOfRange
            | BlockError::Misaligned
            | BlockError::ReadOnly
            | BlockError::NoClient
            | BlockError::OutOfWindow => false,
        };
        if !is_allowed {
            return broken("NoQuorumNoLies", format!("op {tag} failed without a cause: {error}"));
        }
        Ok(())
    }
}

fn read_tags(
    scene: &Scene<'_>,
    sector: u64,
    sectors: u64,
    data: &[Bytes],
) -> Result<Vec<Tag>, String> {
    let total: usize = data.iter().map(Bytes::len).sum();
    if total as u64 != sectors * SECTOR as u64 {
        return Err(format!("{total} bytes instead of {} sectors", sectors));
    }
    let mut tags = Vec::with_capacity(sectors as usize);
    for (at, piece) in (sector..).zip(data.iter().flat_map(|chunk| chunk.chunks(SECTOR))) {
        let tag = content::tag_of(scene.setup.run, at, piece)
            .map_err(|wrong| format!("wrong bytes: {wrong:?}"))?;
        if !scene.history.wrote(tag, at) {
            return Err(format!("sector {at} names op {tag}, which never wrote it"));
        }
        tags.push(tag);
    }
    Ok(tags)
}
