//! What is checked while a run goes on: one writer, nothing acknowledged lost, nothing read
//! ahead, right bytes.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use quoin_replication::primary::{ReadMode, ReplicaStanding, ReplicaStatus};
use quoin_types::block::BlockError;
use quoin_types::message::{Content, ReadView};
use quoin_types::{BLOCK_SIZE, Durability, Epoch, Lsn, Member};

use super::World;
use crate::content::{self, SECTOR, SECTORS, Tag, Tags};
use crate::faults::Profile;
use crate::history::{History, blocks_of};
use crate::lineage::{Lineage, Seen};
use crate::map::FixedMap;
use crate::stats::Violation;
use crate::workload::Draft;

/// What an entry is owed for: it must be in every later history.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Owed {
    pub acknowledged: bool,
    pub read: bool,
    pub flushed: bool,
}

/// What the run is held to. `history` and `lineage` are what clients and targets did; all else is of
/// the checks.
#[derive(Default)]
pub(crate) struct Checkers {
    pub violation: Option<Violation>,
    pub history: History,
    pub lineage: Lineage,
    /// What must be in every later history: acknowledged, read, flushed.
    pub owed: FixedMap<Seen, Owed>,
    /// Acknowledged and not flushed: tag and instant.
    pub unflushed: Vec<(Tag, u64)>,
    /// The newest epoch that ever served, and by which life of which target.
    pub served: (Epoch, usize, u32),
    /// The newest epoch that served after giving up unflushed data.
    pub last_claim: Epoch,
    /// The highest LSN that each replica ever called durable.
    pub durable_reported: BTreeMap<u128, Lsn>,
    /// Whom the target that acts drops further on in its batch.
    pub yet_to_drop: Vec<Member>,
    /// How far counted replicas were as sessions ended in the batch, and before which of its actions.
    pub lost_in_batch: Vec<(usize, Member, Lsn)>,
}

impl World {
    /// A target says that it serves: is its history one that holds all that is owed?
    pub(crate) fn check_serving(&mut self, target: usize, life: u32, epoch: Epoch) {
        self.stats.servings += 1;
        let claimed = self.targets[target].process.as_ref().is_some_and(|p| p.tail_lost);
        let mut kept = None;
        if epoch < self.checkers.served.0 {
            // Acknowledgements that were long on their way let a fenced target see its first View
            // active. It could do harm only if it could answer.
            let served = self.checkers.served.0;
            if self.holds_lease(target) {
                let detail = format!("epoch {epoch} starts IO after epoch {served} did");
                self.violate("OneWriter", detail);
            }
            return;
        }
        if epoch == self.checkers.served.0 && self.checkers.served.0 != Epoch::ZERO {
            self.violate("OneWriter", format!("epoch {epoch} starts IO twice"));
        }
        self.check_leases(target, epoch);
        self.check_record(target, epoch);
        self.check_serving_term(target, epoch);
        self.merge_fork(target);
        let served_before = self.checkers.served.0;
        // Nothing that this very process acknowledged since it served last is lost: what is not on
        // media is in its memory, and it writes that again before it answers anything.
        let lives_on = self.checkers.served == (served_before, target, life);
        self.checkers.served = (epoch, target, life);
        if let Some(forced) = self.operators.recovery.takes_effect(epoch) {
            kept = Some(self.held_by_kept(&forced));
        }
        if claimed {
            self.stats.tails_lost += 1;
            let lost = |p: &&super::PoolHost| !p.is_spare() && (p.cache_lost || p.gone);
            let lost = self.pools.iter().filter(lost).count();
            // Nothing was written since the last time that it was said: it is said again.
            let again = std::mem::replace(&mut self.checkers.last_claim, epoch) == served_before;
            // A joint View is judged under the rule that a change is on its way to as well.
            let desired = &self.control.record.desired;
            let cf = self.cf_in_force().min(desired.cf_of(desired.drf.max(1)).into());
            if lost < cf && !again && kept.is_none() {
                self.violate(
                    "CommitSurvives",
                    format!("epoch {epoch} gives up unflushed data after {lost} lost caches"),
                );
            }
        }
        let Some(path) = self.checkers.lineage.path(epoch) else {
            self.violate("PrefixAlways", format!("epoch {epoch} serves and never sent an entry"));
            return;
        };
        let mut missing: Vec<(Seen, Owed)> = Vec::new();
        for (seen, owed) in &self.checkers.owed {
            let is_held = |path| self.checkers.lineage.is_on(path, *seen);
            let is_due = match &kept {
                Some(kept) => kept.iter().any(is_held),
                None => owed.flushed || !claimed,
            };
            if is_due && !is_held(path) {
                missing.push((*seen, *owed));
            }
        }
        missing.sort_by_key(|(seen, _)| *seen);
        if let Some((seen, owed)) = missing.first() {
            let entry = self.checkers.lineage.entry(*seen);
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
            self.violate(rule, detail);
            return;
        }
        // Its first View is active, so it is on the media of CF: no later history is without it.
        if let Some(view) = self.checkers.lineage.first_of(path, epoch) {
            self.checkers.owed.entry(view).or_default().flushed = true;
        }
        let serving = (target, life);
        let lineage = &self.checkers.lineage;
        let holds = |tag: Tag, block: u64| lineage.carrier_on(path, tag, block).is_some();
        let targets = &self.targets;
        // What a target that had served before still had waiting is from before this epoch.
        let had_served = |(target, life): (usize, u32)| {
            let there = &targets[target];
            there.life != life || there.process.as_ref().is_none_or(|p| p.has_served)
        };
        let over = |op: &crate::history::Op| had_served(op.target) || lineage.was_sent(op.tag);
        if kept.is_none() && (!claimed || lives_on) {
            self.checkers.history.settle(serving, over, holds);
            self.checkers.owed.retain(|seen, _| lineage.is_on(path, *seen));
            return;
        }
        let image = lineage.image(self.setup.seed, path, Lsn(u64::MAX));
        let image = image.into_iter().map(|(block, (_, tags))| (block, tags)).collect();
        let result = self.checkers.history.cut(image, serving, over, holds);
        self.checkers.owed.retain(|seen, _| lineage.is_on(path, *seen));
        if let Err(unlinear) = result {
            self.violate("Linearizable", unlinear.story);
        }
        // What was lost is lost: only what this history holds can still be flushed.
        let history = &self.checkers.history;
        let Some(path) = self.checkers.lineage.path(epoch) else { return };
        let lineage = &self.checkers.lineage;
        self.checkers.unflushed.retain(|(tag, _)| match history.op(*tag).draft {
            Draft::Write { sector, sectors, .. } => {
                let (first, last) = blocks_of(sector, sectors);
                (first..=last).any(|b| lineage.carrier_on(path, *tag, b).is_some())
            }
            _ => false,
        });
    }

    /// Whether it may answer now, by its own clock.
    fn holds_lease(&self, target: usize) -> bool {
        let now = self.local(self.targets[target].host);
        let process = self.targets[target].process.as_ref();
        process.and_then(|p| p.target.lease()).is_some_and(|until| until > now)
    }

    /// When an epoch starts IO, no older target may still hold a lease, whether it uses it or not;
    /// one that has sent Close has given it up, and [`Self::check_reply`] holds it to that.
    fn check_leases(&mut self, target: usize, epoch: Epoch) {
        // Where clocks stop, leases do not end, and reads do not lean on them.
        if self.setup.config.reads == ReadMode::Confirmed {
            return;
        }
        for (index, other) in self.targets.iter().enumerate() {
            let Some(process) = other.process.as_ref().filter(|_| index != target) else {
                continue;
            };
            let live = self.holds_lease(index) && !process.closes;
            if let Some(older) = process.serving.filter(|e| live && *e < epoch) {
                let detail = format!(
                    "epoch {epoch} starts IO while target {index} holds a lease of {older}"
                );
                return self.violate("LeaseExcludes", detail);
            }
        }
    }

    /// The epoch that an answer is of, if the serving target gives it.
    pub(crate) fn check_answers(&mut self, target: usize, life: u32, tag: Tag) -> Option<Epoch> {
        let serving = self.targets[target].process.as_ref().and_then(|p| p.serving);
        let Some(epoch) = serving else {
            self.violate("LeaseExcludes", format!("target {target} answers and does not serve"));
            return None;
        };
        if self.targets[target].process.as_ref().is_some_and(|p| p.closes) {
            let detail = format!("target {target} answers though it gave its lease up by a Close");
            self.violate("LeaseExcludes", detail);
            return None;
        }
        if (epoch, target, life) != self.checkers.served {
            let (newest, by, _) = self.checkers.served;
            self.violate(
                "LeaseExcludes",
                format!("op {tag} answered in epoch {epoch} after {newest} (target {by}) began IO"),
            );
            return None;
        }
        Some(epoch)
    }

    /// A good answer: is it the serving target's, and are a read's bytes what someone wrote?
    pub(crate) fn check_reply(&mut self, target: usize, life: u32, tag: Tag, data: &[Bytes]) {
        let Some(epoch) = self.check_answers(target, life, tag) else { return };
        self.check_known_connected(target);
        let op = self.checkers.history.op(tag);
        let (draft, invoked) = (op.draft, op.invoked);
        match draft {
            Draft::Read { sector, sectors } => match self.read_tags(sector, sectors, data) {
                Ok(tags) => {
                    self.owe_read(epoch, sector, &tags);
                    self.checkers.history.answer(tag, tags);
                }
                Err(detail) => self.violate("WrongBytes", format!("read op {tag}: {detail}")),
            },
            Draft::Write { sector, sectors, fua } => {
                self.checkers.history.answer(tag, Vec::new());
                let flushed = fua || self.setup.config.durability == Durability::Media;
                self.owe_write(epoch, tag, sector, sectors, flushed);
                if !flushed {
                    let answered = self.checkers.history.op(tag).answered;
                    self.checkers.unflushed.push((tag, answered));
                }
            }
            Draft::Trim { .. } | Draft::Zero { .. } => self.checkers.history.answer(tag, Vec::new()),
            Draft::Flush => {
                self.checkers.history.answer(tag, Vec::new());
                let flushed: Vec<Tag> = self
                    .checkers.unflushed
                    .iter()
                    .filter(|(_, answered)| *answered < invoked)
                    .map(|(tag, _)| *tag)
                    .collect();
                self.checkers.unflushed.retain(|(_, answered)| *answered >= invoked);
                for tag in flushed {
                    if let Draft::Write { sector, sectors, .. } = self.checkers.history.op(tag).draft {
                        self.owe_write(epoch, tag, sector, sectors, true);
                    }
                }
            }
        }
    }

    fn owe_write(&mut self, epoch: Epoch, tag: Tag, sector: u64, sectors: u64, flushed: bool) {
        let Some(path) = self.checkers.lineage.path(epoch) else { return };
        let (first, last) = blocks_of(sector, sectors);
        let mut highest = Lsn::ZERO;
        for block in first..=last {
            let Some(seen) = self.checkers.lineage.carrier_on(path, tag, block) else {
                let detail = format!("op {tag} was acknowledged: block {block} was never sent");
                self.violate("OnlyCounted", detail);
                return;
            };
            let lsn = self.checkers.lineage.entry(seen).lsn;
            let owed = self.checkers.owed.entry(seen).or_default();
            owed.acknowledged = true;
            owed.flushed |= flushed;
            highest = highest.max(lsn);
        }
        self.check_reach(tag, highest, flushed, epoch);
        self.check_held_by_known(self.checkers.served.1, highest);
    }

    /// How many must hold what is acknowledged, by the newest record.
    pub(crate) fn cf_in_force(&self) -> usize {
        let ruling = usize::from(self.control.record.membership.cf);
        let kept = self.control.backup.as_ref().map(|record| usize::from(record.membership.cf));
        let before = self.operators.recovery.cf_before();
        kept.into_iter().chain(before).fold(ruling, usize::min)
    }

    /// What a reply promises is where the target must have it at that moment.
    fn check_reach(&mut self, tag: Tag, lsn: Lsn, flushed: bool, epoch: Epoch) {
        let serving = |p: &&super::targets::Process| p.serving == Some(epoch);
        let mut processes = self.targets.iter().filter_map(|t| t.process.as_ref());
        let Some(process) = processes.find(serving) else { return };
        let (commit, stable) = process.target.reach();
        // Who is dropped after a reply, in the same batch, was counted for it.
        let replicas = process.target.status().replicas;
        let held = |r: &&ReplicaStatus| self.checkers.yet_to_drop.contains(&r.member) && r.applied >= lsn;
        // So was one whose session ends later in the batch.
        let is_counted = |m: &Member| {
            replicas.iter().any(|r| r.member == *m && r.standing == ReplicaStanding::InSync)
        };
        let lost = self.checkers.lost_in_batch.iter().filter(|(_, member, applied)| {
            *applied >= lsn && !is_counted(member) && !self.checkers.yet_to_drop.contains(member)
        });
        let lost: BTreeSet<Member> = lost.map(|(_, member, _)| *member).collect();
        let holders =
            process.target.holders(lsn) + replicas.iter().filter(held).count() + lost.len();
        let cf = self.cf_in_force();
        if flushed && lsn > stable {
            let detail = format!("op {tag} is at {lsn}, which is not stable: stable is {stable}");
            self.violate("FlushIsStable", detail);
        } else if !flushed && lsn > commit {
            let detail =
                format!("op {tag} shows {lsn}, which is not committed: commit is {commit}");
            self.violate("NoReadAhead", detail);
        } else if holders < cf {
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
            let detail = format!("op {tag} is at {lsn}, which {holders} counted replicas hold");
            self.violate(rule, detail);
        }
    }

    fn owe_read(&mut self, epoch: Epoch, sector: u64, tags: &[Tag]) {
        let Some(path) = self.checkers.lineage.path(epoch) else { return };
        let mut before = (0, u64::MAX);
        let mut highest = (Lsn::ZERO, 0);
        for (i, tag) in tags.iter().enumerate() {
            let block = (sector + i as u64) / SECTORS as u64;
            if *tag == 0 || (*tag, block) == before {
                continue;
            }
            before = (*tag, block);
            let Some(seen) = self.checkers.lineage.carrier_on(path, *tag, block) else {
                let detail = format!("block {block} was read as op {tag}'s, which has no entry");
                self.violate("NoReadAhead", detail);
                return;
            };
            self.checkers.owed.entry(seen).or_default().read = true;
            highest = highest.max((self.checkers.lineage.entry(seen).lsn, *tag));
        }
        let media = self.setup.config.durability == Durability::Media;
        self.check_reach(highest.1, highest.0, media, epoch);
    }

    fn read_tags(&self, sector: u64, sectors: u64, data: &[Bytes]) -> Result<Vec<Tag>, String> {
        let total: usize = data.iter().map(Bytes::len).sum();
        if total as u64 != sectors * SECTOR as u64 {
            return Err(format!("{total} bytes instead of {} sectors", sectors));
        }
        let mut tags = Vec::with_capacity(sectors as usize);
        for (at, piece) in (sector..).zip(data.iter().flat_map(|chunk| chunk.chunks(SECTOR))) {
            let tag = content::tag_of(self.setup.seed, at, piece)
                .map_err(|wrong| format!("wrong bytes: {wrong:?}"))?;
            if !self.checkers.history.wrote(tag, at) {
                return Err(format!("sector {at} names op {tag}, which never wrote it"));
            }
            tags.push(tag);
        }
        Ok(tags)
    }

    /// An error: is it one that a client may be told in this run?
    pub(crate) fn check_failed(&mut self, tag: Tag, error: BlockError) {
        let config = &self.setup.config;
        let allowed = match error {
            BlockError::Stopped => true,
            BlockError::NoQuorum => {
                config.on_quorum_loss == quoin_replication::primary::OnQuorumLoss::Fail
            }
            BlockError::NoSpace => config.on_full == quoin_replication::primary::OnFull::NoSpace,
            // The flush after an allowed loss says so, once.
            BlockError::Damaged if self.checkers.history.op(tag).draft == Draft::Flush => {
                self.stats.tails_lost > 0
            }
            BlockError::Damaged => self.may_be_unreadable(),
            BlockError::OutOfRange | BlockError::Misaligned | BlockError::ReadOnly => false,
        };
        if !allowed {
            self.violate("NoQuorumNoLies", format!("op {tag} failed without a cause: {error}"));
        }
    }

    pub(crate) fn block_lost(&mut self, lba: u64) {
        if !self.may_be_unreadable() {
            self.violate("NoSilentDamage", format!("no good copy of block {lba} is left"));
        }
    }

    /// Whether the disks of a whole in-sync set have failed reads. Rot spoils one replica only,
    /// and others hold the block.
    pub(crate) fn may_be_unreadable(&self) -> bool {
        self.targets.iter().filter_map(|t| t.process.as_ref()).any(|process| {
            process
                .in_sync
                .iter()
                .all(|member| self.pools.iter().any(|p| p.member == *member && p.reads_failed))
        })
    }

    /// A replica in the in-sync set that calls itself continuous again holds all that it should.
    /// One that is listed and has not been fed since its outage does not.
    pub(crate) fn note_in_sync(&mut self, members: &[Member]) {
        for pool in &mut self.pools {
            let continuous =
                pool.process.as_ref().is_some_and(super::pools::Process::is_continuous);
            if members.contains(&pool.member) && continuous {
                pool.cache_lost = false;
            }
        }
    }

    pub(crate) fn may_be_damaged(&self, pool: usize) -> bool {
        self.setup.profile == Profile::Media { victim: pool }
            || self.setup.profile == Profile::Liar { victim: pool }
    }

    /// All replicas that are in sync hold the same slots, and those of the one history.
    pub(crate) fn check_identical(&mut self) {
        let (epoch, ..) = self.checkers.served;
        let Some(path) = self.checkers.lineage.path(epoch) else { return };
        let image = self.checkers.lineage.image(self.setup.seed, path, Lsn(u64::MAX));
        for pool in self.known_pools() {
            if !self.check_held(pool, ReadView::Live, &image) {
                return;
            }
        }
    }

    /// Compares what a pool at rest holds of a view with what the history had then.
    pub(crate) fn check_held(
        &mut self,
        pool: usize,
        view: ReadView,
        image: &BTreeMap<u64, (Lsn, Tags)>,
    ) -> bool {
        let blocks = self.setup.volume_blocks;
        let guid = self.pools[pool].member.guid;
        let mut slots = Vec::new();
        let mut result = Ok(());
        let mut lost = Vec::new();
        self.pools[pool].storage.with(guid, &mut |store| {
            let mut lba = 0;
            while lba < blocks && result.is_ok() {
                let count = (blocks - lba).min(256) as u32;
                result = store.read(view, lba, count, true, &mut slots);
                lba += u64::from(count);
            }
        });
        if let Err(error) = result {
            let detail = format!("{view:?} of pool {pool} cannot be read at rest: {error}");
            self.violate("Identical", detail);
            return false;
        }
        for slot in slots {
            for block in slot.lba..slot.lba + u64::from(slot.blocks) {
                let expected = image.get(&block).copied().unwrap_or_default();
                let found = match &slot.content {
                    Content::Hole => Ok(content::ZERO),
                    Content::Data { data, .. } => {
                        debug_assert_eq!(data.len(), BLOCK_SIZE);
                        content::tags_of_block(self.setup.seed, block, data).map_err(Some)
                    }
                    Content::Bad => Err(None),
                };
                // Rot that nobody read since is found by the next read or scrub.
                if found == Err(None) && self.may_be_damaged(pool) {
                    continue;
                }
                if found != Ok(expected.1) || slot.version != expected.0 {
                    let rule = match found == Ok(expected.1) && slot.content == Content::Hole {
                        true => "HolesHaveVersions",
                        false => "Identical",
                    };
                    let what = format!(
                        "block {block}: {found:?} of LSN {} instead of {:?} of LSN {}",
                        slot.version, expected.1, expected.0
                    );
                    lost.push((rule, what));
                }
            }
        }
        let Some((rule, first)) = lost.first() else { return true };
        let count = lost.len();
        let detail = format!("{view:?} of pool {pool} at rest, {count} blocks differ: {first}");
        self.violate(rule, detail);
        false
    }
}
