//! Comparison of all in-sync members, block by block, while clients use the volume.
//!
//! Range by range, each counted member is asked for its content, read from its media; [`compare`]
//! decides on the answers. There is no boundary and nothing is pinned: a block that is being
//! written is asked for again. The default changes nothing. With `repair`, members request other
//! members' copies of what they found bad, by the usual repair and in the same version only; the
//! verification stays at the range until it was read again. If good copies differ, no rule can
//! choose between them: an operator names the replica whose copy is to be used everywhere. That
//! copy is then written like a client's data, in the order of the history.
//!
//! A verification takes a quarter of the time at most, so that clients hardly notice it. Its state
//! is in the target: a new target begins anew. Members that are not in sync are left out, and
//! reported.

mod compare;

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;

pub use compare::{Answer, Copy};
use compare::{Outcome, Stretch, compare};

use super::peer::Link;
use super::{Phase, Primary, PrimaryAction, PrimaryNote};
use quoin_types::entry::EntryKind;
use quoin_types::ids::{Epoch, Lsn, ReplicaId};
use quoin_types::membership::Member;
use quoin_types::message::{
    Content, Ping, ReadView, RequestId, Slot, ToReplica, VERIFY_BLOCKS_MAX, covers,
};
use quoin_types::time::Time;
use quoin_types::{BLOCK_SIZE, crc32c};

/// Data that each member reads for one answer: a client's request may wait for it.
const STEP_BYTES: u32 = 512 << 10;
/// Limit of the rate, in bytes a second of each member.
const RATE: u64 = 256 << 20;
/// Limit of findings that are kept; all are counted.
pub const FINDINGS_MAX: usize = 64;
/// Number of requests for a block that is being written, before it is skipped.
const FLUX_MAX: u32 = 40;
/// Time to wait for the repair of a bad copy, and the same after a repair that failed.
const PATIENCE: Duration = Duration::from_secs(20);
const NO_PATIENCE: Duration = Duration::from_secs(2);
/// Interval of checks for a repair, or for a member that is absent.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Interval of progress reports.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Low half of the request ids; no table of reads has this index.
const CHOICE: RequestId = u32::MAX as RequestId;

/// Order for a verification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VerifyOrder {
    /// Grows with every order; a lower one is over.
    pub request: u64,
    pub repair: bool,
    /// Replica whose copy wins where good copies differ.
    pub from: Option<ReplicaId>,
}

/// Finding, in blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub lba: u64,
    pub blocks: u64,
    pub what: Found,
    pub repaired: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Found {
    /// This member's copy fails its checksum, or cannot be read.
    Bad(Member),
    /// No member has a good copy.
    Lost,
    /// Good copies differ; the copies are those of the first block.
    Differs(Vec<Copy>),
}

/// Part of a member in the verification.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerifiedMember {
    pub member: Member,
    /// Blocks of the volume in which it was compared.
    pub checked_blocks: u64,
    pub bad: u64,
    pub repaired: u64,
    /// Reason for which it was not asked, at least once; empty: it always was.
    pub left_out: &'static str,
}

/// State of a verification. All counts are of blocks; those of bad and repaired ones, of copies.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VerifyReport {
    pub request: u64,
    pub ended: bool,
    /// Reason for an end before everything was compared; empty: the comparison is complete.
    pub failed: &'static str,
    pub checked_blocks: u64,
    pub total_blocks: u64,
    /// Data read by all members together.
    pub read_bytes: u64,
    pub bad: u64,
    pub lost: u64,
    pub differing: u64,
    pub repaired: u64,
    /// Blocks written so often that they could not be compared.
    pub unsettled: u64,
    pub members: Vec<VerifiedMember>,
    pub findings: Vec<Finding>,
}

/// One range that members are asked for.
struct Round {
    id: RequestId,
    epoch: Epoch,
    sent: Time,
    /// Members without an answer, with the session's nonce.
    waits_for: Vec<(Member, u64)>,
    answers: Vec<Answer>,
}

/// The copy that an operator chose, being read.
struct Choice {
    id: RequestId,
    member: Member,
    nonce: u64,
    epoch: Epoch,
    lba: u64,
}

pub(super) struct Verify {
    order: VerifyOrder,
    report: VerifyReport,
    cursor: u64,
    round: Option<Round>,
    choice: Option<Choice>,
    next_at: Time,
    /// Number of times that the block at the cursor was in flux.
    flux: u32,
    /// Time since which the cursor waits for a repair.
    blocked_since: Option<Time>,
    patience: Duration,
    /// Bad copies, and blocks that differ, from the cursor on.
    seen_bad: BTreeSet<(u64, Member)>,
    seen_differing: BTreeSet<u64>,
    told: Time,
}

/// The verification of a volume that is under way, or the last one.
pub(super) struct Verification {
    current: Option<Verify>,
    /// Id of the next request.
    next_request: RequestId,
}

impl Verification {
    pub fn new() -> Self {
        Self { current: None, next_request: 1 }
    }

    fn request(&mut self) -> RequestId {
        let request = self.next_request;
        self.next_request += 1;
        request
    }
}

impl Verify {
    fn new(now: Time, order: VerifyOrder) -> Self {
        Self {
            order,
            report: VerifyReport { request: order.request, ..VerifyReport::default() },
            cursor: 0,
            round: None,
            choice: None,
            next_at: now,
            flux: 0,
            blocked_since: None,
            patience: PATIENCE,
            seen_bad: BTreeSet::new(),
            seen_differing: BTreeSet::new(),
            told: now,
        }
    }

    fn member(&mut self, member: Member) -> &mut VerifiedMember {
        let members = &mut self.report.members;
        let at = members.iter().position(|m| m.member == member).unwrap_or_else(|| {
            let (checked_blocks, bad, repaired) = (0, 0, 0);
            members.push(VerifiedMember { member, checked_blocks, bad, repaired, left_out: "" });
            members.len() - 1
        });
        &mut members[at]
    }

    fn find(&mut self, lba: u64, blocks: u64, what: Found) {
        let next_to = |f: &&mut Finding| f.lba + f.blocks == lba && f.what == what && !f.repaired;
        let findings = &mut self.report.findings;
        if let Some(before) = findings.iter_mut().rev().take(8).find(next_to) {
            before.blocks += blocks;
        } else if findings.len() < FINDINGS_MAX {
            findings.push(Finding { lba, blocks, what, repaired: false });
        }
    }

    /// Records bad copies, each once; returns true if there are any.
    fn note_bad(&mut self, stretch: &Stretch) -> bool {
        for member in &stretch.bad {
            for lba in stretch.lba..stretch.end() {
                if self.seen_bad.insert((lba, *member)) {
                    self.report.bad += 1;
                    self.member(*member).bad += 1;
                    self.find(lba, 1, Found::Bad(*member));
                }
            }
        }
        !stretch.bad.is_empty()
    }

    /// Moves the cursor past a stretch, and records its result.
    fn pass(&mut self, stretch: &Stretch) {
        match &stretch.outcome {
            Outcome::Same => {}
            Outcome::InFlux => self.report.unsettled += stretch.blocks,
            Outcome::Lost => {
                self.report.lost += stretch.blocks;
                self.find(stretch.lba, stretch.blocks, Found::Lost);
            }
            Outcome::Differs(copies) => self.note_differing(stretch, copies),
        }
        let range = stretch.lba..stretch.end();
        let bad = |lba: &u64, member: &Member| range.contains(lba) && stretch.bad.contains(member);
        let mended: Vec<_> = self
            .seen_bad
            .iter()
            .filter(|(lba, member)| range.contains(lba) && !bad(lba, member))
            .copied()
            .collect();
        for (lba, member) in mended {
            self.patience = PATIENCE;
            self.report.repaired += 1;
            self.member(member).repaired += 1;
            self.is_repaired(lba, |what| *what == Found::Bad(member));
        }
        if !matches!(stretch.outcome, Outcome::Differs(_)) {
            let settled: Vec<_> =
                self.seen_differing.iter().filter(|lba| range.contains(lba)).copied().collect();
            for lba in settled {
                self.report.repaired += 1;
                self.is_repaired(lba, |what| matches!(what, Found::Differs(_)));
            }
        }
        self.seen_bad.retain(|(lba, _)| *lba >= range.end);
        self.seen_differing.retain(|lba| *lba >= range.end);
    }

    fn note_differing(&mut self, stretch: &Stretch, copies: &[Copy]) {
        for lba in stretch.lba..stretch.end() {
            if self.seen_differing.insert(lba) {
                self.report.differing += 1;
                self.find(lba, 1, Found::Differs(copies.to_vec()));
            }
        }
    }

    /// Counts a finding as repaired once the last of its blocks is.
    fn is_repaired(&mut self, lba: u64, of: impl Fn(&Found) -> bool) {
        let last = |f: &&mut Finding| of(&f.what) && f.lba + f.blocks == lba + 1;
        if let Some(finding) = self.report.findings.iter_mut().rev().find(last) {
            finding.repaired = true;
        }
    }
}

impl Primary {
    /// Begins what was ordered, or ends it.
    pub(super) fn order_verify(&mut self, now: Time, order: Option<VerifyOrder>) {
        let news = |order: &VerifyOrder| {
            self.verification
                .current
                .as_ref()
                .is_none_or(|verify| verify.order.request < order.request)
        };
        match order {
            None => self.verification.current = None,
            Some(order) if news(&order) => {
                self.verification.current = Some(Verify::new(now, order))
            }
            Some(_) => {}
        }
    }

    pub(super) fn verify_report(&self) -> Option<VerifyReport> {
        self.verification.current.as_ref().map(|verify| verify.report.clone())
    }

    pub(super) fn verify_due(&self) -> Option<Time> {
        let verify = self.verification.current.as_ref().filter(|_| self.phase == Phase::Serving)?;
        let waits = verify.report.ended || verify.round.is_some() || verify.choice.is_some();
        (!waits).then_some(verify.next_at)
    }

    pub(super) fn step_verify(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        let Some(mut verify) = self.verification.current.take() else { return };
        if !verify.report.ended && self.phase == Phase::Serving {
            self.step(now, &mut verify, actions);
            let ended = verify.report.ended;
            if ended || now >= verify.told + TELL_EVERY {
                verify.told = now;
                actions.push(PrimaryAction::Note(PrimaryNote::Verifying { ended }));
            }
        }
        self.verification.current = Some(verify);
    }

    fn step(&mut self, now: Time, verify: &mut Verify, actions: &mut Vec<PrimaryAction>) {
        verify.report.total_blocks = self.history.blocks;
        let epoch = self.opening.epoch;
        let is_here = |member: Member, nonce: u64| {
            let same = |p: &&super::Peer| p.member == member && p.nonce == nonce;
            self.members.peers.iter().find(same).is_some_and(|p| p.link == Link::Fed)
        };
        if verify.choice.as_ref().is_some_and(|c| c.epoch != epoch || !is_here(c.member, c.nonce)) {
            verify.choice = None;
            verify.next_at = now + LOOK_AGAIN;
        }
        if let Some(round) = &mut verify.round {
            // Members that are not in sync any more are not waited for, and their answers do not
            // count.
            let counts = |m: Member| self.commit.views.counts(m);
            round.waits_for.retain(|(m, nonce)| counts(*m) && is_here(*m, *nonce));
            round.answers.retain(|answer| counts(answer.member));
            if round.epoch != epoch || (round.waits_for.is_empty() && round.answers.is_empty()) {
                verify.round = None;
                verify.next_at = now + LOOK_AGAIN;
            } else if round.waits_for.is_empty()
                && let Some(round) = verify.round.take()
            {
                self.judge(now, verify, round, actions);
            }
        }
        if verify.cursor >= self.history.blocks {
            verify.report.checked_blocks = self.history.blocks;
            verify.report.ended = true;
        } else if verify.round.is_none() && verify.choice.is_none() && now >= verify.next_at {
            self.ask_round(now, verify, actions);
        }
    }

    fn ask_round(&mut self, now: Time, verify: &mut Verify, actions: &mut Vec<PrimaryAction>) {
        let (lba, left) = (verify.cursor, self.history.blocks - verify.cursor);
        let most = u64::from(VERIFY_BLOCKS_MAX) >> (2 * verify.flux).min(16);
        let blocks = left.min(most.max(1)) as u32;
        let (id, after, repair) =
            (self.verification.request(), self.history.last.lsn, verify.order.repair);
        let mut waits_for = Vec::new();
        let mut asked = Vec::new();
        for member in self.members.membership.known.clone() {
            let at = self.members.position(member);
            let peer = at.map(|at| &self.members[at]);
            let left_out = match peer {
                Some(p) if p.link != Link::Fed || !self.commit.views.counts(member) => {
                    "it is not in sync"
                }
                None => "it is not in sync",
                Some(p) if p.room.stuck => "its pool is full",
                Some(p) => {
                    waits_for.push((member, p.nonce));
                    asked.extend(at);
                    ""
                }
            };
            let member = verify.member(member);
            if member.left_out.is_empty() {
                member.left_out = left_out;
            }
        }
        if waits_for.is_empty() {
            verify.next_at = now + LOOK_AGAIN * 5;
            return;
        }
        for index in asked {
            self.members[index].lease.sent_ping(now);
            let (bytes_max, ping) = (STEP_BYTES, Ping(now.0));
            let snapshot = None;
            let message =
                ToReplica::Verify { id, lba, blocks, bytes_max, after, repair, ping, snapshot };
            self.send(index, message, actions);
        }
        let (epoch, sent, answers) = (self.opening.epoch, now, Vec::new());
        verify.round = Some(Round { id, epoch, sent, waits_for, answers });
    }

    pub(super) fn on_verified(
        &mut self,
        now: Time,
        from: usize,
        id: RequestId,
        at: Lsn,
        slots: Vec<Slot>,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let (member, nonce) = (self.members[from].member, self.members[from].nonce);
        let last = self.history.last.lsn;
        let Some(verify) = &mut self.verification.current else { return };
        let cursor = verify.cursor;
        let Some(round) = verify.round.as_mut().filter(|round| round.id == id) else { return };
        let Some(place) = round.waits_for.iter().position(|w| *w == (member, nonce)) else {
            return;
        };
        let blocks: u64 = slots.iter().map(|slot| u64::from(slot.blocks)).sum();
        let possible = (1..=u64::from(VERIFY_BLOCKS_MAX)).contains(&blocks)
            && covers(&slots, cursor, blocks as u32)
            && slots.iter().all(|slot| match &slot.content {
                Content::Data { data, .. } => data.is_empty(),
                Content::Hole | Content::Bad => true,
            });
        if !possible || at > last {
            return self.shut_out(now, from, "a verification answered for other blocks", actions);
        }
        round.waits_for.swap_remove(place);
        round.answers.push(Answer { member, at, slots });
    }

    fn judge(
        &mut self,
        now: Time,
        verify: &mut Verify,
        round: Round,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let stretches = compare(verify.cursor, &round.answers);
        let is_data = |slot: &&Slot| matches!(slot.content, Content::Data { .. });
        let read = |answer: &Answer| answer.slots.iter().filter(is_data).count() * BLOCK_SIZE;
        let most = round.answers.iter().map(read).max().unwrap_or(0) as u64;
        verify.report.read_bytes += round.answers.iter().map(read).sum::<usize>() as u64;
        // Clients have three quarters of the time at least.
        let at_rate = Duration::from_nanos(most.saturating_mul(1_000_000_000) / RATE);
        verify.next_at = now + (now.since(round.sent) * 3).max(at_rate);

        let start = verify.cursor;
        let mut waits = false;
        for stretch in &stretches {
            if stretch.outcome == Outcome::InFlux && verify.flux < FLUX_MAX {
                if verify.cursor == stretch.lba {
                    verify.flux += 1;
                }
                break;
            }
            let is_bad = stretch.outcome != Outcome::InFlux && verify.note_bad(stretch);
            let hopeful = verify.order.repair && is_bad && stretch.outcome == Outcome::Same;
            let chosen = match &stretch.outcome {
                Outcome::Differs(copies) => {
                    verify.note_differing(stretch, copies);
                    let wins = |copy: &&Copy| Some(copy.member.id) == verify.order.from;
                    copies.iter().find(wins).map(|copy| copy.member)
                }
                _ => None,
            };
            if (hopeful || chosen.is_some()) && !waits {
                let since = *verify.blocked_since.get_or_insert(now);
                let given_up = verify.cursor == stretch.lba && now >= since + verify.patience;
                if given_up {
                    verify.patience = NO_PATIENCE;
                } else {
                    waits = true;
                    if let Some(member) = chosen.filter(|_| verify.cursor == stretch.lba) {
                        self.choose(now, verify, member, stretch.lba, actions);
                    }
                }
            }
            if !waits {
                verify.pass(stretch);
                verify.cursor = stretch.end();
                verify.flux = 0;
                verify.blocked_since = None;
            }
        }
        if waits {
            verify.next_at = verify.next_at.max(now + LOOK_AGAIN);
        }
        let done = verify.cursor - start;
        for answer in &round.answers {
            verify.member(answer.member).checked_blocks += done;
        }
        verify.report.checked_blocks = verify.cursor;
    }

    /// Reads the copy that is to be used everywhere.
    fn choose(
        &mut self,
        now: Time,
        verify: &mut Verify,
        member: Member,
        lba: u64,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let Some(index) = self.members.position(member) else { return };
        let id = self.verification.request() << 32 | CHOICE;
        let (view, blocks, after, want_data) = (ReadView::Live, 1, self.history.last.lsn, true);
        let ping = Ping(now.0);
        self.members[index].lease.sent_ping(now);
        let message = ToReplica::Read { id, view, lba, blocks, after, want_data, ping };
        self.send(index, message, actions);
        let (nonce, epoch) = (self.members[index].nonce, self.opening.epoch);
        verify.choice = Some(Choice { id, member, nonce, epoch, lba });
    }

    /// Handles the chosen copy: it is written to all, unless the block was written meanwhile.
    /// Returns true if the read was such a one.
    pub(super) fn on_choice(
        &mut self,
        from: usize,
        id: RequestId,
        at: Lsn,
        slots: &[Slot],
    ) -> bool {
        if id & CHOICE != CHOICE {
            return false;
        }
        let (member, nonce) = (self.members[from].member, self.members[from].nonce);
        let Some(verify) = &mut self.verification.current else { return true };
        // Only the member that was asked may answer.
        let asked = |c: &mut Choice| (c.id, c.member, c.nonce) == (id, member, nonce);
        let Some(choice) = verify.choice.take_if(asked) else { return true };
        let lba = choice.lba;
        let [slot] = slots else { return true };
        let written = self.history.after(at).any(|e| e.overlaps(lba, 1));
        let known = at.next() >= self.history.first() && at <= self.history.last.lsn;
        // A merge under way has read the content that this would replace, and follows it.
        let merged = self.requests.touches(lba);
        if written || merged || !known || slot.lba != lba || self.phase != Phase::Serving {
            return true;
        }
        let (kind, data) = match &slot.content {
            Content::Data { crc, data } if data.len() == BLOCK_SIZE && crc32c(data) == *crc => {
                (EntryKind::Write, data.clone())
            }
            Content::Hole => (EntryKind::Trim, Bytes::new()),
            Content::Data { .. } | Content::Bad => return true,
        };
        self.history.append(self.opening.epoch, kind, lba, 1, data, false);
        true
    }
}
