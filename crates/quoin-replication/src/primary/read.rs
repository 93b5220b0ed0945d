//! Reads of the volume: one in-sync replica answers, commit decides when the answer is delivered.
//!
//! This module chooses the replica, repeats requests at others, and holds answers.
//! [`gather`](super::gather) assembles a client's answer; [`repair`](super::repair) gives a member
//! a good block for its bad copy.

use std::collections::VecDeque;
use std::time::Duration;

use super::gather::{self, Group};
use super::pace::Kind;
use super::quorum::Views;
use super::slab::Slab;
use super::{Link, Peer, Primary, PrimaryAction, PrimaryNote};
use crate::primary::ReadMode;
use quoin_types::block::{BlockError, Token};
use quoin_types::ids::{Lsn, SnapshotId};
use quoin_types::membership::Member;
use quoin_types::message::{Content, Ping, ReadView, RequestId, Slot, ToReplica, covers};
use quoin_types::mutant;
use quoin_types::time::Time;
use quoin_types::{BLOCK_SIZE, WRITE_BLOCKS_MAX, crc32c};

pub(super) const BLOCK: u64 = BLOCK_SIZE as u64;
/// Latency after which a read is sent to another member too.
const HEDGE: Duration = Duration::from_millis(500);
/// Limit of open reads at one member; a replica accepts twice as many.
const READS_MAX: u32 = 2048;
/// Length of a run of small reads, and the limit of their blocks. Small reads go to one member for
/// a while before the next one is asked. So they wake only one process, and several share a frame:
/// with three replicas on one host this halves the cost of a read.
const RUN_READS: u32 = 1024;
const RUN_BLOCKS: u32 = 4;
/// Latency that ends a run. A member that reads from its disk answers one by one, and the load is
/// better spread over all.
const RUN_TOOK: Duration = Duration::from_millis(1);
const RUN_OPEN: u32 = 64;
/// Blocks of one status request to a replica.
const STATUS_BLOCKS: u64 = 1 << 15;

/// Purpose of a read from a replica.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// Part `part` of a client's read or status request.
    Client { group: usize, part: usize },
    /// An edge block of an unaligned write. It merges on *assigned* content, so it is not held
    /// until commit: in every history the merged entry follows the entries that it merged with.
    Merge { slot: usize, tail: bool },
    /// A good copy for a member that found its own to be bad.
    Repair { member: Member, whole_map: bool, snapshot: Option<SnapshotId> },
}

impl Purpose {
    /// The view that is read: only a repair is ever of a snapshot.
    fn view(&self) -> ReadView {
        match self {
            Purpose::Repair { snapshot: Some(id), .. } => ReadView::Snapshot(*id),
            _ => ReadView::Live,
        }
    }
}

pub(super) struct Read {
    pub purpose: Purpose,
    pub lba: u64,
    blocks: u32,
    want_data: bool,
    after: Lsn,
    /// The member asked now; `None` while no member can be asked.
    asked: Option<Member>,
    /// Members asked before it, which had a bad copy or took too long.
    pub tried: Vec<Member>,
    /// Members whose copy was bad, with the versions they hold.
    pub bad: Vec<(Member, u64, Lsn)>,
    sent: Time,
    generation: u32,
    /// The answer, held until it may be delivered.
    ready: Option<Ready>,
}

enum Ready {
    /// The slots, and the LSN at whose commit everything they show is committed.
    Slots(Lsn, Vec<Slot>),
    /// No good copy is left. A newer target may have written the block since, so this answer needs
    /// a lease as much as content does.
    Lost,
}

/// Result of the choice of a member for a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Peer(usize),
    /// The counted members were asked already, or have too many open reads.
    NobodyNow,
    /// No counted member is fed.
    Nobody,
}

#[derive(Default)]
pub(super) struct Reads {
    pub open: Slab<Read>,
    groups: Slab<Group>,
    generation: u32,
    /// Reads that no member has been asked for yet.
    unasked: Vec<usize>,
    /// Reads whose answer waits for commit or the lease.
    held: Vec<usize>,
    /// Requests with their times, oldest first; those answered since are skipped.
    asked: VecDeque<(Time, RequestId)>,
    /// The member of the present run of small reads, and the remaining length.
    run: Option<(Member, u32)>,
    /// LSN up to which answers to a client may have shown the history, in this epoch or in an older
    /// one of this target. After a loss of caches it is above commit for a while.
    pub owed: Lsn,
}

impl Reads {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn id(&self, index: usize) -> Option<RequestId> {
        let read = self.open.get(index)?;
        Some(RequestId::from(read.generation) << 32 | index as u64)
    }

    /// The open read with this id.
    fn of(&self, id: RequestId) -> Option<(usize, &Read)> {
        let index = (id & u64::from(u32::MAX)) as usize;
        let read = self.open.get(index)?;
        (u64::from(read.generation) == id >> 32).then_some((index, read))
    }

    /// The member that has not answered the request sent then.
    fn waits_for(&self, sent: Time, id: RequestId) -> Option<(usize, Member)> {
        let (index, read) = self.of(id)?;
        if read.sent == sent { Some((index, read.asked?)) } else { None }
    }

    fn was_asked(&mut self, now: Time, id: RequestId) {
        self.asked.push_back((now, id));
        // Bound of the queue: answered requests behind a waiting one are at most a few times the
        // open ones.
        if self.asked.len() > 64 + 4 * self.open.len() {
            let mut asked = std::mem::take(&mut self.asked);
            asked.retain(|(sent, id)| self.waits_for(*sent, *id).is_some());
            self.asked = asked;
        }
    }

    /// Removes reads of such a purpose; later answers to them find no read.
    fn forget(&mut self, is_such: impl Fn(&Purpose) -> bool) {
        for index in self.open.indices() {
            if self.open.get(index).is_some_and(|read| is_such(&read.purpose)) {
                self.open.take(index);
            }
        }
    }

    /// Chooses the member: the rest of a run, or the one with the fewest open reads.
    fn choose(
        &self,
        read: &Read,
        now: Time,
        peers: &[Peer],
        views: &Views,
        local: Option<Member>,
    ) -> Asked {
        let mut best: Option<(usize, u32)> = None;
        let mut any = false;
        for (i, peer) in peers.iter().enumerate() {
            if peer.link != Link::Fed || !views.counts(peer.member) {
                continue;
            }
            any = true;
            if read.tried.contains(&peer.member) {
                continue;
            }
            if peer.room.stuck && peer.progress.applied < read.after {
                continue;
            }
            if peer.reads.open >= READS_MAX {
                continue;
            }
            let run = self.run.filter(|(member, _)| *member == peer.member);
            let at_once =
                peer.reads.took <= RUN_TOOK && peer.reads.open < RUN_OPEN && !is_slow(peer, now);
            if run.is_some_and(|(_, left)| left > 0) && at_once && read.blocks <= RUN_BLOCKS {
                return Asked::Peer(i);
            }
            // After its run another member has its turn.
            let busy = 64 * (u32::from(is_slow(peer, now)) + u32::from(run.is_some()));
            let is_local = local == Some(peer.member);
            let load = if is_local { 0 } else { 1 + peer.reads.open + busy };
            if best.is_none_or(|(_, b)| load < b) {
                best = Some((i, load));
            }
        }
        match best {
            Some((i, _)) => Asked::Peer(i),
            None if any => Asked::NobodyNow,
            None => Asked::Nobody,
        }
    }

    /// Continues or begins a run: the next small reads go to the same member.
    fn go_on_with(&mut self, member: Member, blocks: u32) {
        if blocks <= RUN_BLOCKS {
            let run = self.run.filter(|(m, left)| *m == member && *left > 0);
            self.run = Some((member, run.map_or(RUN_READS, |(_, left)| left - 1)));
        }
    }

    /// Takes back the reads sent to a member; others are asked.
    fn take_from(&mut self, member: Member) {
        for (index, read) in self.open.iter_mut() {
            if read.asked == Some(member) {
                read.asked = None;
                self.unasked.push(index);
            }
        }
    }
}

impl Primary {
    pub(super) fn read(&mut self, now: Time, token: Token, offset: u64, length: u32) {
        self.start_group(now, token, offset, length.into(), false);
    }

    pub(super) fn block_status(&mut self, now: Time, token: Token, offset: u64, length: u64) {
        self.start_group(now, token, offset, length, true);
    }

    fn start_group(&mut self, now: Time, token: Token, offset: u64, length: u64, is_status: bool) {
        let first = offset / BLOCK;
        let end = (offset + length).div_ceil(BLOCK);
        let step = if is_status { STATUS_BLOCKS } else { WRITE_BLOCKS_MAX.into() };
        let group = Group::new(now, token, offset, length, is_status);
        let group = self.reads.groups.insert(group);
        for lba in (first..end).step_by(step as usize) {
            let Some(open) = self.reads.groups.get_mut(group) else { return };
            let purpose = Purpose::Client { group, part: open.expect_part() };
            self.start_read(now, purpose, lba, (end - lba).min(step) as u32, !is_status);
        }
        if self.config.reads == ReadMode::Confirmed {
            for peer in &mut self.members.peers {
                peer.lease.ping_due = true;
            }
        }
    }

    pub(super) fn read_for_merge(&mut self, now: Time, purpose: Purpose, lba: u64) {
        self.start_read(now, purpose, lba, 1, true);
    }

    pub(super) fn start_read(
        &mut self,
        now: Time,
        purpose: Purpose,
        lba: u64,
        blocks: u32,
        want_data: bool,
    ) -> usize {
        self.reads.generation = self.reads.generation.wrapping_add(1);
        let stuck = self.members.peers.iter().any(|p| p.room.stuck);
        let after = match purpose {
            Purpose::Client { .. } if stuck => self.owed_to_clients(),
            _ => self.history.last.lsn,
        };
        let read = Read {
            purpose,
            lba,
            blocks,
            want_data,
            after,
            asked: None,
            tried: Vec::new(),
            bad: Vec::new(),
            sent: now,
            generation: self.reads.generation,
            ready: None,
        };
        let index = self.reads.open.insert(read);
        self.reads.unasked.push(index);
        index
    }

    /// Sends the waiting reads to members. Entries up to `after` were sent before, on the same
    /// connection, so a member answers without waiting. Returns true if no good copy is left for
    /// one of them.
    pub(super) fn ask_reads(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) -> bool {
        let held = self.reads.held.len();
        let mut unasked = std::mem::take(&mut self.reads.unasked);
        unasked.retain(|&index| !self.ask(now, index, actions));
        unasked.append(&mut self.reads.unasked);
        self.reads.unasked = unasked;
        self.reads.held.len() > held
    }

    /// Returns true if the read needs no more requests.
    fn ask(&mut self, now: Time, index: usize, actions: &mut Vec<PrimaryAction>) -> bool {
        let Some(read) = self.reads.open.get(index) else { return true };
        if read.asked.is_some() || read.ready.is_some() {
            return true;
        }
        if let ReadView::Snapshot(id) = read.purpose.view()
            && self.history.snapshot(id).is_none()
        {
            // Its snapshot was deleted: nothing is left to repair.
            self.reads.open.take(index);
            return true;
        }
        let local = self.config.local;
        let asked = self.reads.choose(read, now, &self.members.peers, &self.commit.views, local);
        let any = asked != Asked::Nobody;
        let Asked::Peer(i) = asked else {
            // The data is lost only if no member has it: the read waits for a member that is away.
            let is_bad = |m: &Member| read.bad.iter().any(|(b, _, _)| b == m);
            let lost = self.commit.views.all().flat_map(|v| &v.in_sync).all(is_bad)
                || mutant::is("lost-while-one-is-away");
            if let Purpose::Repair { member, whole_map, .. } = read.purpose {
                // The member repeats its request for repair: nothing in the target waits for it.
                let (lba, blocks) = (read.lba, read.blocks);
                if any && lost {
                    actions.push(PrimaryAction::Note(match whole_map {
                        true => PrimaryNote::MapMended { member, lba, blocks, done: false },
                        false => PrimaryNote::BlockLost { lba },
                    }));
                }
                self.finish(now, index, Err(BlockError::Damaged), actions);
                return true;
            }
            if any && lost && !read.bad.is_empty() {
                let lba = read.bad[0].1;
                actions.push(PrimaryAction::Note(PrimaryNote::BlockLost { lba }));
                if mutant::is("error-without-a-lease") {
                    self.finish(now, index, Err(BlockError::Damaged), actions);
                    return true;
                }
                if let Some(read) = self.reads.open.get_mut(index) {
                    read.ready = Some(Ready::Lost);
                }
                self.reads.held.push(index);
                return true;
            }
            // All were asked and none answered in time: they are asked again.
            if any && let Some(read) = self.reads.open.get_mut(index) {
                read.tried.retain(|m| read.bad.iter().any(|(b, _, _)| b == m));
            }
            return false;
        };
        let Some(id) = self.reads.id(index) else { return true };
        let message = ToReplica::Read {
            id,
            view: read.purpose.view(),
            lba: read.lba,
            blocks: read.blocks,
            after: read.after,
            want_data: read.want_data,
            ping: Ping(now.0),
        };
        let peer = &mut self.members[i];
        peer.reads.open += 1;
        peer.lease.sent_ping(now);
        let member = peer.member;
        let blocks = read.blocks;
        self.reads.go_on_with(member, blocks);
        let read = self.reads.open.get_mut(index).expect("looked at above");
        read.asked = Some(member);
        read.sent = now;
        self.reads.was_asked(now, id);
        self.send(i, message, actions);
        true
    }

    pub(super) fn on_data(
        &mut self,
        now: Time,
        from: usize,
        id: RequestId,
        at: Lsn,
        slots: Vec<Slot>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let member = self.members[from].member;
        self.members[from].reads.open = self.members[from].reads.open.saturating_sub(1);
        let Some((index, read)) = self.reads.of(id) else { return };
        if read.ready.is_some() {
            return;
        }
        if at < read.after || at > self.history.last.lsn {
            return self.shut_out(now, from, "NoReadAhead", actions);
        }
        if !covers(&slots, read.lba, read.blocks) {
            return self.shut_out(now, from, "a read answered for other blocks", actions);
        }
        if read.asked == Some(member) {
            self.members[from].reads.took = now.since(read.sent);
        }
        let bad = first_bad(&slots, at, read.want_data);
        let read = self.reads.open.get_mut(index).expect("looked at above");
        read.asked = None;
        if let Some((lba, version)) = bad {
            read.bad.push((member, lba, version));
            read.tried.push(member);
            self.reads.unasked.push(index);
            return;
        }
        // A member that wants the map of a range gets that, and no single blocks besides.
        let (mended, snapshot) = match read.purpose {
            Purpose::Repair { member, whole_map: true, snapshot } => (Some(member), snapshot),
            Purpose::Repair { snapshot, .. } => (None, snapshot),
            _ => (None, None),
        };
        let others = read.bad.iter().filter(|(member, ..)| Some(*member) != mended);
        let repairs: Vec<(Member, u64)> = others.map(|(m, lba, _)| (*m, *lba)).collect();
        for (member, lba) in repairs {
            self.repair(member, snapshot, lba, &slots, actions);
        }
        let Some(read) = self.reads.open.get(index) else { return };
        match read.purpose {
            Purpose::Client { .. } => {}
            Purpose::Merge { .. } => return self.finish(now, index, Ok(slots), actions),
            Purpose::Repair { member, whole_map, .. } => {
                if whole_map {
                    let (lba, blocks) = (read.lba, read.blocks);
                    let message = ToReplica::Mend { lba, blocks, at, slots, snapshot };
                    self.mend(member, message, actions);
                }
                return self.finish(now, index, Ok(Vec::new()), actions);
            }
        }
        let (lba, blocks) = (read.lba, u64::from(read.blocks));
        let settled = self.holds.shown(self.settled());
        // Everything the slots show must be committed before delivery (NoReadAhead).
        let need = self
            .history
            .after(settled)
            .take_while(|e| e.lsn <= at)
            .filter(|e| e.overlaps(lba, blocks))
            .map(|e| e.lsn)
            .last()
            .filter(|_| !mutant::is("read-before-commit"))
            .unwrap_or_default();
        if let Some(read) = self.reads.open.get_mut(index) {
            read.ready = Some(Ready::Slots(need, slots));
        }
        self.reads.held.push(index);
    }

    /// LSN up to which the history may be shown.
    fn settled(&self) -> Lsn {
        let media = self.is_media() && !mutant::is("read-at-commit-under-media");
        if media { self.commit.stable } else { self.commit.lsn }
    }

    /// Delivers what is committed; called only with a live lease while commit is held.
    pub(super) fn release_reads(
        &mut self,
        now: Time,
        confirmed: Option<Time>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if self.reads.held.is_empty() {
            return;
        }
        let settled = self.holds.shown(self.settled());
        let confirm = self.config.reads == ReadMode::Confirmed;
        let mut held = std::mem::take(&mut self.reads.held);
        held.retain(|&index| {
            let Some(read) = self.reads.open.get_mut(index) else { return false };
            let Some(ready) = &read.ready else { return false };
            if matches!(ready, Ready::Slots(need, _) if *need > settled) {
                return true;
            }
            if confirm && let Purpose::Client { group, .. } = read.purpose {
                let arrived = self.reads.groups.get(group).map(|g| g.arrived);
                if arrived > confirmed {
                    return true;
                }
            }
            let result = match read.ready.take().expect("looked at above") {
                Ready::Slots(_, slots) => Ok(slots),
                Ready::Lost => Err(BlockError::Damaged),
            };
            self.finish(now, index, result, actions);
            false
        });
        held.append(&mut self.reads.held);
        self.reads.held = held;
    }

    fn finish(
        &mut self,
        now: Time,
        index: usize,
        result: Result<Vec<Slot>, BlockError>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(read) = self.reads.open.take(index) else { return };
        match read.purpose {
            Purpose::Merge { slot, tail } => {
                let block = result.map(|slots| gather::block(&slots));
                self.merge_read(now, slot, tail, block, actions);
            }
            Purpose::Repair { .. } => {}
            Purpose::Client { group, part } => {
                let Some(g) = self.reads.groups.get_mut(group) else { return };
                if g.take_part(part, result)
                    && let Some(group) = self.reads.groups.take(group)
                {
                    if group.is_read() {
                        let (arrived, bytes) = (group.arrived, group.length());
                        self.rebuilds.pace.answered(now, arrived, Kind::Read, bytes);
                    }
                    let (token, result) = group.answer();
                    self.reply(token, result, actions);
                }
            }
        }
    }

    /// Lower bound of the history that a client's answer must show: everything acknowledged or
    /// read. That includes entries that an older epoch acknowledged and its replicas lost, which
    /// are sequenced again above commit.
    fn owed_to_clients(&self) -> Lsn {
        if mutant::is("owed-forgotten-beside-a-full-pool") {
            return self.commit.lsn;
        }
        self.commit.lsn.max(self.reads.owed)
    }

    /// Handles a member whose pool is full: reads sent to it for a position beyond its own are sent
    /// to others. If no member can apply the entries sequenced last, a client is owed what was
    /// acknowledged.
    pub(super) fn read_from_others(&mut self, from: usize) {
        let owed = self.owed_to_clients();
        for (_, read) in self.reads.open.iter_mut() {
            if let Purpose::Client { .. } = read.purpose {
                read.after = read.after.min(owed);
            }
        }
        self.reads.take_from(self.members[from].member);
    }

    /// Ends the reads of a session that is over: they are sent to others.
    pub(super) fn reissue_reads(&mut self, from: usize) {
        let gone = self.members[from].member;
        self.changes.lost(gone);
        // A member that still needs its repair requests it again.
        let for_it = |p: &Purpose| matches!(p, Purpose::Repair { member, .. } if *member == gone);
        self.reads.forget(for_it);
        self.reads.take_from(gone);
    }

    /// Resets the reads at the end of an epoch: each is asked anew in the next one, after its first
    /// View.
    pub(super) fn reads_wait_for_reopen(&mut self) {
        self.reads.held.clear();
        self.reads.unasked.clear();
        self.reads.asked.clear();
        self.reads.forget(|purpose| matches!(purpose, Purpose::Repair { .. }));
        for (index, read) in self.reads.open.iter_mut() {
            self.reads.generation = self.reads.generation.wrapping_add(1);
            read.generation = self.reads.generation;
            read.asked = None;
            read.tried.clear();
            read.bad.clear();
            read.ready = None;
            self.reads.unasked.push(index);
        }
    }

    /// Raises open reads of an older epoch to everything that is sequenced when IO starts again.
    pub(super) fn reads_after_reopen(&mut self) {
        let last = self.history.last.lsn;
        if mutant::is("reads-not-behind-the-reopen") {
            return;
        }
        for (_, read) in self.reads.open.iter_mut() {
            read.after = last;
        }
    }

    pub(super) fn forget_merge_reads(&mut self, gone: usize) {
        let for_it = |p: &Purpose| matches!(p, Purpose::Merge { slot, .. } if *slot == gone);
        self.reads.forget(for_it);
    }

    /// Fails every open client read (`onQuorumLoss: fail`).
    pub(super) fn fail_reads(
        &mut self,
        now: Time,
        error: BlockError,
        actions: &mut Vec<PrimaryAction>,
    ) {
        for index in self.reads.open.indices() {
            self.finish(now, index, Err(error), actions);
        }
    }

    /// Sends reads of slow members to others; returns the time of the next check.
    pub(super) fn hedge_reads(&mut self, now: Time) -> Option<Time> {
        let mut next: Option<Time> = None;
        while let Some((sent, id)) = self.reads.asked.front().copied() {
            if let Some((index, member)) = self.reads.waits_for(sent, id) {
                if sent + HEDGE > now {
                    next = Some(sent + HEDGE);
                    break;
                }
                // The first good answer wins; a late one finds no read.
                let read = self.reads.open.get_mut(index).expect("looked at above");
                read.asked = None;
                read.tried.push(member);
                self.reads.unasked.push(index);
            }
            self.reads.asked.pop_front();
        }
        if self.reads.unasked.is_empty() { next } else { Some(now + HEDGE) }
    }
}

fn is_slow(peer: &super::Peer, now: Time) -> bool {
    peer.progress.behind_since.is_some_and(|since| now.since(since) > Duration::from_millis(50))
}

/// Returns the first block whose copy is bad: by the replica's report, by its checksum, or by a
/// version that the replica cannot have.
fn first_bad(slots: &[Slot], at: Lsn, want_data: bool) -> Option<(u64, Lsn)> {
    slots.iter().find_map(|slot| {
        let good = match &slot.content {
            Content::Hole => true,
            Content::Bad => false,
            Content::Data { data, .. } if !want_data => data.is_empty(),
            Content::Data { crc, data } => data.len() == BLOCK_SIZE && crc32c(data) == *crc,
        };
        (!good || slot.version > at).then_some((slot.lba, slot.version))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::entry::{Rule, View};
    use quoin_types::ids::{ReplicaGuid, ReplicaId};

    fn member(id: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(id) }
    }

    /// Three fed replicas in sync, and a small read.
    fn volume() -> (Reads, Vec<Peer>, Views, Read) {
        let known: Vec<Member> = [1, 2, 3].map(member).to_vec();
        let rule = Rule { membership_version: 1, rf: 3, cf: 2, known: known.clone() };
        let view = View { in_sync: known.clone(), rule, ..View::default() };
        let views = Views { active: Some((Lsn(1), view)), ..Views::default() };
        let peers = known.into_iter().map(|member| {
            let mut peer = Peer::new(member, Time::ZERO);
            peer.link = Link::Fed;
            peer
        });
        let read = Read {
            purpose: Purpose::Client { group: 0, part: 0 },
            lba: 0,
            blocks: 1,
            want_data: true,
            after: Lsn(5),
            asked: None,
            tried: Vec::new(),
            bad: Vec::new(),
            sent: Time::ZERO,
            generation: 1,
            ready: None,
        };
        (Reads::default(), peers.collect(), views, read)
    }

    #[test]
    fn small_reads_stay_with_one_member_while_it_answers_at_once_and_then_change() {
        let (mut reads, mut peers, views, read) = volume();
        let choose =
            |reads: &Reads, peers: &[Peer]| reads.choose(&read, Time::ZERO, peers, &views, None);
        peers[0].reads.open = 1;
        assert_eq!(choose(&reads, &peers), Asked::Peer(1), "it has less to do");
        reads.go_on_with(member(1), 1);
        assert_eq!(choose(&reads, &peers), Asked::Peer(0));
        reads.go_on_with(member(1), RUN_BLOCKS + 1);
        assert_eq!(reads.run, Some((member(1), RUN_READS)), "a large read is no part of it");
        peers[0].reads.took = RUN_TOOK * 2;
        assert_eq!(choose(&reads, &peers), Asked::Peer(1), "it has to go to its disk");
        peers[0].reads.took = RUN_TOOK;
        for _ in 0..RUN_READS {
            reads.go_on_with(member(1), 1);
        }
        assert_eq!(choose(&reads, &peers), Asked::Peer(1), "the run is over");
    }

    #[test]
    fn a_read_is_asked_of_a_fed_member_in_sync_that_can_answer_it_and_preferably_of_the_local_one()
    {
        let (reads, mut peers, views, mut read) = volume();
        peers[2].reads.open = 9;
        let local = reads.choose(&read, Time::ZERO, &peers, &views, Some(member(3)));
        assert_eq!(local, Asked::Peer(2));
        read.tried.push(member(1));
        (peers[1].room.stuck, peers[1].progress.applied) = (true, Lsn(4));
        let choose = |peers: &[Peer]| reads.choose(&read, Time::ZERO, peers, &views, None);
        assert_eq!(choose(&peers), Asked::Peer(2), "the second lacks an entry");
        peers[2].reads.open = READS_MAX;
        assert_eq!(choose(&peers), Asked::NobodyNow);
        for peer in &mut peers {
            peer.link = Link::Rebuilding;
        }
        assert_eq!(choose(&peers), Asked::Nobody);
    }
}
