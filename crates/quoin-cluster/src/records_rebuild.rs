//! Judgement of what a volume's record must be, from what pools keep about its replicas and the
//! record that there is, if any. Pure: the same evidence is judged in the same way, dry run or not.
//!
//! **The newest membership that anybody knows of rules**: of the record, of what pools were told of
//! it, of what replicas learned when they were opened, of the Views in their logs; and the second
//! rule of a joint View that no later View took back. It never comes to serving by that alone: a
//! target opens a volume only where max(CF, RF−CF+1) of its list answer, those meet every set that
//! acknowledged a write or a further change, and whoever knows a newer membership says so
//! (`ControlPlaneBehind`). So a record that is written too early keeps the volume closed, and
//! another recovery, with more pools, puts it right.
//!
//! That does not hold for a joint View's second rule: its list can answer without a single one of
//! the old list, and the change may have been given up since, with writes acknowledged by the old
//! list alone. So it rules only where an open quorum of the old list is here and counts: one of
//! those would have the later View.
//!
//! A version that two sources tell differently is nobody's to choose: undecided.
//!
//! **One pool may be hostile.** What a single pool tells cannot be proven, so it is bounded: numbers far
//! beyond what everybody else tells, and epochs of terms that no controller proved, are not believed
//! ([`Evidence::sifted`]); a membership that one pool alone tells of does not rule against replicas that
//! are here and have not heard of it ([`Evidence::against`]); and copies are ordered deleted in no pool by
//! what another one keeps.

use std::collections::{BTreeSet, HashSet};

use quoin_api::control::VolumeSpec;
use quoin_types::entry::Rule;
use quoin_types::membership::{RETIRED_MAX, open_quorum};
use quoin_types::{
    BLOCK_SIZE, EPOCHS_AHEAD_MAX, Epoch, Incarnation, Member, Membership, Position, ReplicaGuid,
    Term, VolumeId, mutant,
};

use crate::records::{
    ANY_NODE, Cause, Discarded, MemberRecord, MembershipRecord, ReplicaPhase, ReplicaRecord, Spec,
    Text, VolumePhase, VolumeRecord,
};

/// Epochs that are left out after a record was made from pools: one may have been granted that no
/// pool has heard of, and no epoch is given twice.
const EPOCHS_SKIPPED: u64 = 1000;
/// No record changes so often while a pool is away, or while a backup grows old.
const CHANGES_AHEAD_MAX: u64 = 1 << 20;

/// One pool's account of one replica.
#[derive(Clone, PartialEq, Debug)]
pub struct Held {
    pub pool: String,
    /// The pool's disk is not known to be an older state of itself.
    pub trusted: bool,
    pub volume: VolumeId,
    pub member: Member,
    pub quorum: bool,
    pub damaged: bool,
    pub promised: Epoch,
    pub incarnation: Incarnation,
    pub position: Position,
    pub blocks: u64,
    pub spec: Option<VolumeSpec>,
    /// The record as the pool was told it last.
    pub note: Option<Box<VolumeRecord>>,
    pub membership: Option<Membership>,
    /// Of the last View in its log, and the second rule where that is joint.
    pub view: Option<Rule>,
    pub joint: Option<Rule>,
}

/// All that is known of one volume.
pub struct Evidence<'a> {
    pub volume: VolumeId,
    pub record: Option<&'a VolumeRecord>,
    pub held: Vec<Held>,
    /// GUIDs that pools deleted by order.
    pub deleted: &'a HashSet<ReplicaGuid>,
    /// Pools that are known and did not answer: each may hold a copy, of whatever volume.
    pub away: &'a BTreeSet<String>,
    /// The highest one that a controller proved.
    pub term: Term,
    /// Completes the parameters that replicas have kept.
    pub complete: &'a dyn Fn(&VolumeSpec) -> Option<Spec>,
    /// Orders the deletion of copies that count for nothing.
    pub discard_left_over: bool,
    pub now_ms: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    AsRecorded,
    Created,
    Updated,
    Deleted,
    /// Nothing is served of it until a person does what the message says.
    Undecided,
    LeftOver,
}

impl Outcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AsRecorded => "as-recorded",
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Deleted => "deleted",
            Self::Undecided => "undecided",
            Self::LeftOver => "left-over",
        }
    }
}

/// Findings about one volume.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    pub volume: VolumeId,
    pub name: String,
    pub outcome: Outcome,
    /// The record to write; `None`: none.
    pub write: Option<Box<VolumeRecord>>,
    pub version: u64,
    pub rf: u8,
    pub needed: u8,
    pub answered: u8,
    pub message: String,
    /// Its user had deleted it, and it was kept for its snapshots.
    pub was_retained: bool,
    /// Each replica that a pool holds, and what it is.
    pub standings: Vec<(Held, &'static str)>,
}

impl Held {
    fn counts(&self) -> bool {
        self.trusted && self.quorum && !self.damaged
    }

    fn notes(held: &[Held]) -> impl Iterator<Item = &VolumeRecord> + Clone {
        held.iter().filter(|h| h.trusted).filter_map(|h| h.note.as_deref())
    }

    /// All memberships that it knows of.
    pub fn rules(&self) -> impl Iterator<Item = Rule> {
        let note = self.note.as_ref().map(|note| rule_of(&(&note.membership).into()));
        let own = self.membership.as_ref().map(rule_of);
        let views = self.view.iter().chain(&self.joint).cloned();
        views.chain(note).chain(own).filter(|rule| rule.rf > 0 && !rule.known.is_empty())
    }

    /// The newest membership that it knows of.
    pub fn version(&self) -> u64 {
        self.rules().map(|rule| rule.membership_version).max().unwrap_or(0)
    }
}

fn generation_of(held: &Held) -> u64 {
    held.note.as_ref().map_or(0, |note| note.generation)
}

fn rule_of(membership: &Membership) -> Rule {
    Rule {
        membership_version: membership.version,
        rf: membership.rf,
        cf: membership.cf,
        known: membership.known.clone(),
    }
}

fn sorted(mut rule: Rule) -> Rule {
    rule.known.sort_unstable();
    rule
}

impl Evidence<'_> {
    /// The newest membership; `Ok(None)`: nobody has heard of one.
    fn newest(&self) -> Result<Option<Rule>, String> {
        let trusted = || self.held.iter().filter(|held| held.trusted);
        let recorded = self.record.into_iter().chain(Held::notes(&self.held));
        // A list that a recovery left open is made anew with those that are there now.
        let is_open = |r: &VolumeRecord| r.phase == VolumePhase::Ready && !r.membership.formed;
        let recorded = recorded.filter(|record| !is_open(record));
        let recorded = recorded.map(|record| rule_of(&(&record.membership).into()));
        let opened = trusted().filter_map(|h| h.membership.as_ref()).map(rule_of);
        // These rules have been served under, whatever records say by now.
        let served: Vec<Rule> = opened.chain(trusted().filter_map(|h| h.view.clone())).collect();
        let all: Vec<Rule> = recorded.chain(served.iter().cloned()).collect();
        let real = |rule: &&Rule| rule.rf > 0 && !rule.known.is_empty();
        let Some(version) = all.iter().filter(real).map(|rule| rule.membership_version).max()
        else {
            return Ok(None);
        };
        let at = |rules: &[Rule]| {
            let mut found: Vec<Rule> = Vec::new();
            let newest = rules.iter().filter(real).filter(|r| r.membership_version == version);
            for rule in newest.cloned().map(sorted) {
                if !found.contains(&rule) {
                    found.push(rule);
                }
            }
            found
        };
        let rule = match (at(&all).as_slice(), at(&served).as_slice()) {
            ([rule], _) | (_, [rule]) => rule.clone(),
            _ => {
                return Err(format!(
                    "version {version} of its membership is told in several ways: an old copy of \
                     the records has ruled meanwhile"
                ));
            }
        };
        let joint = trusted().filter_map(|h| Some((h, h.joint.as_ref()?)));
        let joint = joint.filter(|(holder, joint)| {
            joint.membership_version > version
                && !trusted().any(|other| {
                    other.position > holder.position
                        && other.joint.is_none()
                        && other.view == holder.view
                        && rule.known.contains(&other.member)
                })
        });
        // A joint rule may have been given up before its swap, and writes acknowledged since by
        // the old list alone: so many of that must be here that one of them would show it.
        let old_ones = rule
            .known
            .iter()
            .filter(|member| self.held.iter().any(|held| held.member == **member && held.counts()));
        let would_show = old_ones.count() >= usize::from(open_quorum(rule.rf, rule.cf));
        let joint = joint.filter(|_| would_show);
        let joint = joint.map(|(_, joint)| sorted(joint.clone()));
        Ok(Some(joint.max_by_key(|joint| joint.membership_version).unwrap_or(rule)))
    }

    /// Of a volume without a known list: those that count and are furthest, until RF are listed.
    fn first_list(&self, rf: u8, cf: u8) -> Rule {
        let mut counting: Vec<&Held> = self.held.iter().filter(|held| held.counts()).collect();
        counting.sort_by_key(|held| std::cmp::Reverse((held.position, held.member)));
        let mut known: Vec<Member> = Vec::new();
        for held in counting {
            let twice = known.iter().any(|m| m.id == held.member.id || m.guid == held.member.guid);
            if known.len() < usize::from(rf) && !twice {
                known.push(held.member);
            }
        }
        Rule { membership_version: 1, rf, cf, known }
    }

    /// The record as it was, or as near as anybody knows it. Of copies that are all older than the
    /// newest membership, the one with the newest: what is written must never go back.
    fn base(&self, version: u64) -> Option<VolumeRecord> {
        let recorded = self.record.into_iter().map(|r| (r, true));
        let is_going = |note: &VolumeRecord| note.phase == VolumePhase::Deleting;
        // One pool's word deletes nothing that others hold and were not told to delete.
        let mut counting = self.held.iter().filter(|held| held.trusted && held.quorum);
        let all_go = counting.all(|held| held.note.as_deref().is_some_and(is_going));
        let notes = Held::notes(&self.held).filter(|note| all_go || !is_going(note));
        let newest = recorded.chain(notes.map(|note| (note, false)));
        let newest = newest.max_by_key(|(record, own)| {
            let membership = record.membership.version;
            (membership == version, membership, record.generation, *own)
        });
        let mut base = newest?.0.clone();
        // Nor does it order anything deleted in another pool: but for what the own record names, each
        // tells of its own.
        let own = self.record.map_or(&[][..], |record| &record.discarded);
        base.discarded.retain(|discarded| {
            let is_told = |h: &Held| h.member.guid == discarded.guid.0 && h.pool == discarded.pool;
            own.contains(discarded) || self.held.iter().any(is_told)
        });
        Some(base)
    }

    /// Returns true if its user had deleted it. Nothing makes such a volume a user's again, so an
    /// old copy of the record does not count; and all replicas that count say so, since one pool's
    /// word hides no volume from its user.
    fn was_retained(&self) -> bool {
        let is_retained = |record: &VolumeRecord| record.phase == VolumePhase::Retained;
        let counting = self.held.iter().filter(|held| held.trusted && held.quorum);
        let notes: Vec<_> = counting.map(|held| held.note.as_deref()).collect();
        let told = !notes.is_empty() && notes.iter().all(|note| note.is_some_and(is_retained));
        told || self.record.is_some_and(is_retained)
    }

    /// The replicas whose pools are believed, and the others with what they cannot have seen.
    fn sifted(&self) -> (Vec<Held>, Vec<(Held, String)>) {
        let own = |number: fn(&VolumeRecord) -> u64| self.record.map_or(0, number);
        let recorded = own(|record| record.opened.epoch);
        let granted_max = recorded.max(self.term.floor().0).saturating_add(EPOCHS_AHEAD_MAX);
        let is_granted = |epoch: Epoch| match epoch.term_number().cmp(&self.term.number) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => epoch.0 <= granted_max,
            std::cmp::Ordering::Greater => false,
        };
        let why_not = |held: &Held| {
            if let Some(epoch) =
                [held.promised, held.position.epoch].iter().find(|e| !is_granted(**e))
            {
                return Some(format!("epoch {epoch}, which no controller can have granted"));
            }
            let others = || self.held.iter().filter(|other| other.pool != held.pool);
            let highest = |told: fn(&Held) -> u64, own: u64| others().map(told).fold(own, u64::max);
            let alone = self.record.is_none() && others().next().is_none();
            let version = (held.version(), highest(Held::version, own(|r| r.membership.version)));
            let generation = (generation_of(held), highest(generation_of, own(|r| r.generation)));
            for (what, (told, known)) in
                [("membership version", version), ("generation", generation)]
            {
                if !alone && told > known.saturating_add(CHANGES_AHEAD_MAX) {
                    return Some(format!("{what} {told}, where others know {known}"));
                }
            }
            None
        };
        let mut believed = Vec::new();
        let mut others = Vec::new();
        for held in &self.held {
            match why_not(held).filter(|_| !mutant::is("numbers-of-one-pool-believed")) {
                None => believed.push(held.clone()),
                Some(why) => others.push((held.clone(), why)),
            }
        }
        (believed, others)
    }

    /// The objection to a rule that one pool alone tells of.
    ///
    /// Before a membership is recorded, CF replicas of the list before it have the View that names both.
    /// So where a replica that it leaves out is here and has not heard of it, or so many are that no CF
    /// can have, somebody else than that pool is to know it as well.
    fn against(&self, rule: &Rule) -> Option<String> {
        if mutant::is("one-pool-rules-over-others") {
            return None;
        }
        let rule = sorted(rule.clone());
        let is_same = |other: Rule| sorted(other) == rule;
        if self.record.is_some_and(|record| is_same(rule_of(&(&record.membership).into()))) {
            return None;
        }
        let tellers = self.held.iter().filter(|held| held.trusted && held.rules().any(is_same));
        let tellers: BTreeSet<&str> = tellers.map(|held| held.pool.as_str()).collect();
        let [teller] = tellers.into_iter().collect::<Vec<_>>()[..] else { return None };
        // With the list that each of them counts under.
        let mut unaware: Vec<(&Held, Rule)> = Vec::new();
        for held in self.held.iter().filter(|held| held.counts() && held.pool != teller) {
            // A joint rule of the same version that was given up says nothing of this one.
            let before = |known: &Rule| {
                known.membership_version < rule.membership_version
                    || mutant::is("joint-rule-taken-for-knowledge-of-another")
            };
            let newest = held.rules().filter(before).max_by_key(|known| known.membership_version);
            let Some(newest) = newest.filter(|known| known.known.contains(&held.member)) else {
                continue;
            };
            let differs = (&rule.known, rule.rf, rule.cf)
                != (&sorted(newest.clone()).known, newest.rf, newest.cf);
            if newest.membership_version < rule.membership_version
                && differs
                && !held.rules().any(is_same)
            {
                unaware.push((held, newest));
            }
        }
        let no_cf_can_have = |list: &Rule| {
            let of_list = unaware.iter().filter(|(held, _)| list.known.contains(&held.member));
            of_list.count() > usize::from(list.rf - list.cf)
        };
        let leaves_out = |held: &Held| !rule.known.contains(&held.member);
        if !unaware.iter().any(|(held, list)| leaves_out(held) || no_cf_can_have(list)) {
            return None;
        }
        let pools: BTreeSet<&str> = unaware.iter().map(|(held, _)| held.pool.as_str()).collect();
        let pools = pools.into_iter().collect::<Vec<_>>().join(", ");
        Some(format!(
            "pool {teller} alone tells of membership version {}, and replicas in pools {pools} have not \
             heard of it: start the other pools and recover again. Where it was forced by `quoin volume \
             recover`, take those pools away (--without); where pool {teller} is not to be believed, take \
             that one away",
            rule.membership_version
        ))
    }

    /// Later than that of every copy of the record.
    fn next_generation(&self) -> u64 {
        let all = self.record.into_iter().chain(Held::notes(&self.held));
        all.map(|record| record.generation).max().unwrap_or(0) + 1
    }

    /// A record from the parameters alone that every replica has kept since its creation.
    fn by_spec(&self) -> Option<VolumeRecord> {
        let furthest = self.held.iter().filter(|h| h.spec.is_some()).max_by_key(|h| h.position)?;
        let message = furthest.spec.as_ref()?;
        let spec = (self.complete)(message)?;
        let size_bytes = message.size_bytes.max(furthest.blocks * BLOCK_SIZE as u64);
        let record = VolumeRecord::new(self.volume, spec, size_bytes, self.now_ms);
        Some(VolumeRecord { phase: VolumePhase::Ready, ..record })
    }

    fn finding(&self, outcome: Outcome, message: String) -> Finding {
        let name = match (self.record, Held::notes(&self.held).max_by_key(|n| n.generation)) {
            (Some(record), _) | (None, Some(record)) => record.spec.name.clone(),
            (None, None) => {
                let told = self.held.iter().find_map(|h| h.spec.as_ref());
                told.map(|spec| spec.name.clone()).unwrap_or_default()
            }
        };
        Finding {
            volume: self.volume,
            name,
            outcome,
            write: None,
            version: self.record.map_or(0, |record| record.membership.version),
            rf: 0,
            needed: 0,
            answered: 0,
            message,
            was_retained: self.was_retained(),
            standings: self.held.iter().map(|held| (held.clone(), "left-over")).collect(),
        }
    }
}

/// Judges one volume.
pub fn decide(evidence: &Evidence<'_>) -> Finding {
    let (held, doubted) = evidence.sifted();
    if doubted.is_empty() {
        return decide_by(evidence);
    }
    // The replicas of a pool that is not believed are not known.
    let mut away = evidence.away.clone();
    away.extend(doubted.iter().map(|(held, _)| held.pool.clone()));
    let mut finding = decide_by(&Evidence { held, away: &away, ..*evidence });
    for (held, why) in doubted {
        let stop = if finding.message.is_empty() { "" } else { "; " };
        let pool = &held.pool;
        finding.message =
            format!("{}{stop}pool {pool} is not believed: it tells of {why}", finding.message);
        finding.standings.push((held, "not-believed"));
    }
    finding
}

fn decide_by(evidence: &Evidence<'_>) -> Finding {
    let undecided = |message: String| evidence.finding(Outcome::Undecided, message);
    let newest = match evidence.newest() {
        Ok(newest) => newest,
        Err(why) => return undecided(format!("{why}; `quoin pool export` takes its data out")),
    };
    if let Some(why) = newest.as_ref().and_then(|rule| evidence.against(rule)) {
        return undecided(why);
    }
    let listed = newest.is_some();
    let version = newest.as_ref().map_or(0, |rule| rule.membership_version);
    let Some(base) = evidence.base(version).or_else(|| evidence.by_spec()) else {
        return undecided(
            "no pool has kept its name and parameters; `quoin pool export` takes its data out"
                .to_owned(),
        );
    };
    let rule = newest.unwrap_or_else(|| {
        let wanted = &base.membership;
        evidence.first_list(wanted.rf, wanted.cf)
    });
    let needed = if listed { open_quorum(rule.rf, rule.cf) } else { rule.rf };
    let holders = |member: &Member| {
        let member = *member;
        evidence.held.iter().filter(move |h| h.member == member)
    };
    if let Some(member) = rule.known.iter().find(|member| holders(member).count() > 1) {
        let pools: Vec<_> = holders(member).map(|held| held.pool.as_str()).collect();
        let (guid, pools) = (member.guid, pools.join(", "));
        return undecided(format!(
            "pools {pools} hold the same replica {guid}: one disk is a copy of another; take one \
             of them away"
        ));
    }
    let answered = rule.known.iter().filter(|m| holders(m).any(Held::counts)).count() as u8;
    let was_deleted =
        |m: &&Member| holders(m).next().is_none() && evidence.deleted.contains(&m.guid);
    let deleted = rule.known.iter().filter(was_deleted).count() as u8;
    let mut finding = Finding {
        version: rule.membership_version,
        rf: rule.rf,
        needed,
        answered,
        ..evidence.finding(Outcome::AsRecorded, String::new())
    };
    // With so many deleted by order nobody can serve under this list any more.
    let gone = deleted > rule.rf - rule.cf;
    if gone || base.phase == VolumePhase::Deleting {
        return deletion(evidence, base, finding);
    }
    let record = build(evidence, base, &rule, listed);
    for (held, standing) in &mut finding.standings {
        let guid = Text(held.member.guid);
        *standing = match record.replicas.iter().find(|replica| replica.guid == guid) {
            Some(replica) if record.is_known(replica) => "known",
            Some(_) => "newcomer",
            None if record.membership.retired.contains(&guid) => "retired",
            None => "left-over",
        };
    }
    if let Err(broken) = Membership::from(&record.membership).check() {
        finding.outcome = Outcome::Undecided;
        finding.message = format!("{broken}; `quoin pool export` takes its data out");
        return finding;
    }
    finding.name.clone_from(&record.spec.name);
    let enough = answered >= needed || record.phase == VolumePhase::Pending;
    if !enough {
        finding.message = format!(
            "{answered} of {} replicas are there, {needed} are needed: start the other pools, or go \
             on with what is left by `quoin volume recover`",
            rule.rf
        );
    }
    let news = evidence.record.is_none_or(|old| {
        record.opened.epoch > old.opened.epoch
            || record.grants.fenced != old.grants.fenced
            || record.membership.version > old.membership.version
            || record.generation > old.generation + 1
            || !lists_the_same(&record, old)
            || record.discarded.len() > old.discarded.len()
    });
    if news {
        finding.outcome = match (enough, evidence.record) {
            (false, _) => Outcome::Undecided,
            (true, None) => Outcome::Created,
            (true, Some(_)) => Outcome::Updated,
        };
        finding.write = Some(Box::new(record));
    }
    finding
}

fn lists_the_same(one: &VolumeRecord, other: &VolumeRecord) -> bool {
    let rule = |record: &VolumeRecord| sorted(rule_of(&(&record.membership).into()));
    rule(one) == rule(other)
}

/// The volume was deleted, or was about to be.
///
/// A replica is deleted by order when it has been moved too, and then the last copy may be in a pool
/// that is away. So a deletion is concluded only where every known pool has answered, and only copies
/// that a pool told of are ordered deleted.
fn deletion(evidence: &Evidence<'_>, base: VolumeRecord, mut finding: Finding) -> Finding {
    let held = !evidence.held.is_empty();
    let was_ordered = base.phase == VolumePhase::Deleting;
    let done = evidence.record.is_some_and(|record| record.phase == VolumePhase::Deleting);
    // It may have moved to a pool that nobody here has heard of: what is left may be the last copy.
    // (One that never counted was made for an old copy of the record, and holds nothing.)
    let may_have_moved = (evidence.record.is_none() || evidence.held.iter().any(|h| h.quorum))
        && !mutant::is("copies-that-are-left-given-up");
    if may_have_moved && !was_ordered && !evidence.discard_left_over {
        finding.outcome = Outcome::LeftOver;
        finding.message = "deleted, or moved to pools that are away; --discard-left-over deletes \
                           what is left, `quoin pool export` takes its data out"
            .to_owned();
        return finding;
    }
    let are_away = !evidence.away.is_empty() && !mutant::is("given-up-while-pools-are-away");
    if !done && !evidence.discard_left_over && are_away {
        let away: Vec<_> = evidence.away.iter().map(String::as_str).collect();
        finding.outcome = Outcome::Undecided;
        finding.message = format!(
            "its replicas were deleted by order, as those of a volume are that was deleted or moved, \
             and pools are away that may hold copies ({}): start them and recover again, or delete it \
             (`quoin volume delete`)",
            away.join(", ")
        );
        return finding;
    }
    finding.message = "its replicas were deleted by order".to_owned();
    if held {
        finding.message += "; what is left of them is deleted now";
    }
    finding.outcome = if done { Outcome::AsRecorded } else { Outcome::Deleted };
    let mut record = VolumeRecord { phase: VolumePhase::Deleting, ..base };
    record.attachments.clear();
    record.opened.owner = None;
    record.generation = evidence.next_generation();
    record.opened.epoch = evidence.record.map_or(0, |old| old.opened.epoch);
    let is_held = |guid: Text<ReplicaGuid>| evidence.held.iter().any(|h| h.member.guid == guid.0);
    record.replicas.retain(|replica| evidence.record.is_some() && is_held(replica.guid));
    for held in &evidence.held {
        let (id, guid) = (Text(held.member.id), Text(held.member.guid));
        if !record.replicas.iter().any(|replica| replica.guid == guid) {
            record.discarded.push(Discarded { id, guid, pool: held.pool.clone() });
        }
    }
    record.replicas.iter_mut().for_each(|replica| replica.phase = ReplicaPhase::Delete);
    finding.write = (!done).then(|| Box::new(record));
    finding
}

/// The record under this rule.
fn build(evidence: &Evidence<'_>, base: VolumeRecord, rule: &Rule, listed: bool) -> VolumeRecord {
    let held = &evidence.held;
    let mut record = base;
    let as_it_was = record.membership.version == rule.membership_version;
    // A volume of which a replica was ever opened had all its replicas then.
    let opened = held.iter().any(|h| h.promised > Epoch::ZERO);
    let formed = match listed {
        true => record.membership.formed || !as_it_was || opened,
        false => rule.known.len() == usize::from(rule.rf),
    };
    let newcomers = record.replicas.iter().filter(|replica| {
        let known = rule.known.iter().any(|m| m.guid == replica.guid.0);
        let there = held.iter().any(|h| h.member.guid == replica.guid.0 && !h.quorum);
        !known && (as_it_was || there) && replica.phase != ReplicaPhase::Delete
    });
    let newcomers: Vec<ReplicaRecord> = newcomers.cloned().collect();
    let listed_or_coming = |guid: ReplicaGuid| {
        rule.known.iter().any(|m| m.guid == guid) || newcomers.iter().any(|r| r.guid.0 == guid)
    };
    // A replica that counted once and is not listed any more has been replaced, moved or given up.
    let once = held.iter().filter(|h| h.quorum).map(|h| h.member.guid);
    let told = held.iter().filter_map(|h| h.membership.as_ref()).flat_map(|m| m.retired.clone());
    let noted = Held::notes(held).chain(evidence.record).flat_map(|r| r.membership.retired.clone());
    let retired = told.chain(noted.map(|guid| guid.0)).chain(once);
    let retired: BTreeSet<ReplicaGuid> = retired.filter(|guid| !listed_or_coming(*guid)).collect();
    let place = |member: &Member| {
        let holder = held.iter().find(|h| h.member == *member).map(|h| h.pool.clone());
        let records = || evidence.record.into_iter().chain(Held::notes(held));
        let of = |same: &dyn Fn(&ReplicaRecord) -> bool| {
            records().flat_map(|r| &r.replicas).find(|r| same(r)).map(|r| r.pool.clone())
        };
        holder
            .or_else(|| of(&|r| r.guid.0 == member.guid))
            .or_else(|| of(&|r| r.id.0 == member.id))
            .unwrap_or_default()
    };
    let pending = record.phase == VolumePhase::Pending && !formed;
    let replica = |member: &Member| {
        let was = record.replicas.iter().find(|r| r.guid.0 == member.guid);
        ReplicaRecord {
            id: Text(member.id),
            guid: Text(member.guid),
            pool: place(member),
            phase: match (pending, &record.source) {
                (true, None) => ReplicaPhase::Init,
                (true, Some(_)) => ReplicaPhase::Clone,
                (false, _) => ReplicaPhase::Keep,
            },
            leaving: as_it_was && was.is_some_and(|was| was.leaving),
            placed: was.is_some_and(|was| was.placed),
            cause: was.map_or(Cause::Asked, |was| was.cause),
        }
    };
    let mut replicas: Vec<ReplicaRecord> = rule.known.iter().map(replica).collect();
    replicas.extend(newcomers);
    if evidence.discard_left_over {
        for h in held {
            let (id, guid) = (Text(h.member.id), Text(h.member.guid));
            let told = record.discarded.iter().any(|d| d.guid == guid && d.pool == h.pool);
            if !told && !replicas.iter().any(|replica| replica.guid == guid) {
                record.discarded.push(Discarded { id, guid, pool: h.pool.clone() });
            }
        }
    }
    let member = |m: &Member| MemberRecord { id: Text(m.id), guid: Text(m.guid) };
    record.discarded.retain(|d| !replicas.iter().any(|replica| replica.guid == d.guid));
    record.replicas = replicas;
    record.membership = MembershipRecord {
        // A list that is made here has been in no record before.
        version: rule.membership_version + u64::from(!listed && formed),
        rf: rule.rf,
        cf: rule.cf,
        drf: record.membership.drf.max(rule.rf),
        known: rule.known.iter().map(member).collect(),
        retired: retired.into_iter().rev().take(RETIRED_MAX).map(Text).collect(),
        formed,
    };
    // Without records of its snapshots nothing would keep a volume that is Retained. Where those were
    // lost too, `snapshot::recovery` takes it out of sight once they are there again.
    let retained = evidence.record.is_some_and(|record| record.phase == VolumePhase::Retained);
    record.phase = match (pending, retained) {
        (true, _) => VolumePhase::Pending,
        (false, true) => VolumePhase::Retained,
        (false, false) => VolumePhase::Ready,
    };
    let blocks = rule.known.iter().flat_map(|m| held.iter().filter(move |h| h.member == *m));
    let blocks = blocks.map(|h| h.blocks).max().unwrap_or(0);
    record.size_bytes = record.size_bytes.max(blocks.saturating_mul(BLOCK_SIZE as u64));
    let own = evidence.record.map(|r| (r.epoch(), r.opened.incarnation.0));
    let promised = held.iter().map(|h| (h.promised, h.incarnation));
    let (epoch, incarnation) = own.into_iter().chain(promised).max().unwrap_or_default();
    let written = held.iter().map(|h| h.position.epoch).max().unwrap_or_default();
    record.opened.epoch = epoch.max(written).0;
    record.opened.incarnation = Text(if epoch >= written { incarnation } else { Incarnation(0) });
    if record.grants.fenced == record.opened.epoch && record.opened.incarnation.0 != Incarnation(0)
    {
        // The record took back an epoch of this number that another controller of the term granted.
        record.grants.fenced = 0;
    }
    // Another node may have acquired it than the one that the copy of the record names.
    let is_own = own == Some((record.epoch(), record.opened.incarnation.0));
    if !is_own && !mutant::is("holder-kept-over-a-recovery") {
        record.grants.holder.clear();
        record.grants.former.insert(ANY_NODE.to_owned(), record.opened.epoch.saturating_sub(1));
        record.used.doubt();
    }
    let behind = evidence.record.is_none_or(|r| r.opened.epoch < record.opened.epoch);
    // Another controller may have given leave to write since.
    record.grants.written = None;
    record.grants.epochs_skipped = if behind { EPOCHS_SKIPPED } else { 0 };
    record.opened.owner = match evidence.record {
        Some(old) if old.attachments == record.attachments => old.opened.owner.clone(),
        _ => record.attachments.first().map(|attachment| attachment.node.clone()),
    };
    record.generation = evidence.next_generation();
    record
}

#[cfg(test)]
mod tests;
