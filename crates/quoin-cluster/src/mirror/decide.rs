//! The next change of the record. Each is one compare-and-swap, after which the group goes on from the record
//! alone.

use quoin_types::ids::PointId;
use quoin_types::mutant;

use std::time::Duration;

use super::brain::{Brain, Now};
use super::chain::{Begun, Generation, Relation};
use super::record::{Claim, Claims, Receiving, Record, Role};
use super::word::Word;

/// Blocks of 4 KiB after which a cursor is recorded, and the time after which it is.
const CURSOR_BLOCKS: u64 = (64 << 20) / 4096;
const CURSOR_WITHIN: Duration = Duration::from_secs(5);

impl Brain {
    pub(super) fn next_record(&self, now: Now) -> Option<Record> {
        let record = &self.record;
        let needs_fence = matches!(record.role, Role::Demoting | Role::Promoting | Role::Resyncing);
        if needs_fence && record.fence == 0 {
            return self.changed(|record| {
                record.fence = now.draw;
                // The final point of before a recovery may be older than what clients wrote since.
                let is_kept = mutant::is("final-point-kept-over-a-recovery");
                if record.role == Role::Demoting && !is_kept {
                    record.points.last = Some(PointId(now.draw));
                }
            });
        }
        match record.role {
            Role::Off | Role::Orphan => None,
            Role::Diverged => self.ended(),
            Role::Primary => self.sure().or_else(|| self.primary(now)),
            Role::Demoting => self.demoting(now),
            Role::Secondary => self.ended().or_else(|| self.sure()).or_else(|| self.secondary(now)),
            Role::Promoting => self.promoting(now),
            Role::Resyncing => self.ended().or_else(|| self.resyncing()),
        }
    }

    fn changed(&self, change: impl FnOnce(&mut Record)) -> Option<Record> {
        let mut record = self.record.clone();
        change(&mut record);
        Some(record)
    }

    /// The other side ended the mirror where it was primary.
    fn ended(&self) -> Option<Record> {
        let word = self.heard.as_ref().filter(|word| word.role == Role::Off)?;
        let record = &self.record;
        let (relation, points) = (record.chain.relation(&word.chain), &record.points);
        let is_copy = relation == Relation::Same && !record.is_own();
        let is_apart = match record.role {
            Role::Diverged | Role::Resyncing => {
                record.chain.all().iter().any(|begun| word.chain.has(begun.generation))
            }
            // The end was of an older generation than this side's: the only content of its own is here.
            Role::Secondary => {
                relation == Relation::Ahead && (!record.is_own() || points.last.is_some())
            }
            _ => false,
        };
        let is_apart = is_apart && !mutant::is("side-that-diverged-not-ended");
        let shown = match record.role {
            _ if !is_apart => points.complete.filter(|_| is_copy),
            // Writes of its own are discarded by force: once they are kept, the last common point is shown.
            Role::Resyncing if self.all(|member| member.lost == record.lost) => points.common,
            Role::Resyncing => return None,
            // Writes of its own stay: the view is the final point.
            _ if record.is_own() => points.last,
            _ => points.complete,
        };
        if !is_copy && !is_apart {
            return None;
        }
        self.changed(|record| {
            record.role = Role::Orphan;
            record.points.complete = shown;
            record.receiving = None;
            record.claims = Claims::default();
        })
    }

    /// After a recovery: the newest point that both sides hold is the last common one.
    fn sure(&self) -> Option<Record> {
        let word = self.heard.as_ref().filter(|word| word.role != Role::Off)?;
        if !self.record.is_unsure || !self.all(|_| true) {
            return None;
        }
        let common = self.held().into_iter().rev().find(|point| word.held.contains(point));
        self.changed(|record| {
            let is_copy = record.role == Role::Secondary && !record.is_own();
            let points = &mut record.points;
            // The other side may still count on the older one that it recorded as common.
            let pinned = word.common.filter(|point| is_copy && self.holds(*point)).or(common);
            if points.common != pinned {
                points.common = pinned;
                points.common_cut_ms = 0;
            }
            let complete = common.filter(|_| is_copy);
            if points.complete != complete {
                points.complete_cut_ms = 0;
            }
            points.complete = complete;
            if points.offered == common {
                points.offered = None;
            }
            // A final point of former times was dropped since, or the view was written behind it.
            points.last = points.last.filter(|last| {
                self.holds(*last) && self.is_at(*last) || mutant::is("former-final-point-believed")
            });
            if record.role == Role::Secondary
                && !is_copy
                && points.last.is_some()
                && points.last != common
            {
                points.offered = points.last;
                points.offered_cut_ms = 0;
            }
            record.is_unsure = false;
            for member in &mut record.members {
                let holds =
                    |point| self.members.get(&member.volume).is_some_and(|m| m.holds(point));
                let has_it = |other: &&super::Member| other.volume == member.volume;
                member.has_base |= if is_copy {
                    common.is_some_and(holds)
                } else {
                    word.members.iter().find(has_it).is_some_and(|other| other.has_base)
                };
            }
        })
    }

    /// The other side recorded a newer point as complete.
    fn common(&self) -> Option<Record> {
        let word = self.heard.as_ref().filter(|word| word.role == Role::Secondary)?;
        let record = &self.record;
        let is_same = record.chain.relation(&word.chain) == Relation::Same;
        let point =
            word.complete.filter(|point| is_same && record.is_own() && self.holds(*point))?;
        if record.is_unsure || !self.is_newer(point, record.points.common) {
            return None;
        }
        self.changed(|record| {
            let points = &mut record.points;
            let is_offered = points.offered == Some(point);
            points.common = Some(point);
            points.common_cut_ms = if is_offered { points.offered_cut_ms } else { 0 };
            points.complete = None;
            if is_offered {
                points.offered = None;
            }
            for member in &mut record.members {
                let has_it = |other: &&super::Member| other.volume == member.volume;
                member.has_base |= word.members.iter().find(has_it).is_some_and(|m| m.has_base);
            }
        })
    }

    /// Returns true if a point was cut behind another one on this side.
    fn is_newer(&self, point: PointId, than: Option<PointId>) -> bool {
        let Some(than) = than.filter(|than| *than != point) else { return than.is_none() };
        let held = self.held();
        let place = |point| held.iter().position(|held| *held == point);
        place(point) > place(than)
    }

    fn primary(&self, now: Now) -> Option<Record> {
        if let Some(record) = self.common() {
            return Some(record);
        }
        let record = &self.record;
        if let Some(word) = &self.heard
            && record.chain.relation(&word.chain) == Relation::Same
            && word.role == Role::Secondary
        {
            if !record.is_paired {
                return self.changed(|record| record.is_paired = true);
            }
            if word.asks_step_down && record.parameters.may_take_over {
                return self.demoted(now);
            }
        }
        if record.is_unsure || !record.is_paired || !self.pools_have_it() {
            return None;
        }
        let points = &record.points;
        if let Some(cutting) = points.cutting {
            return match self.cut {
                Some((point, Some(cut_ms))) if point == cutting => {
                    let all = record.members.iter().all(|member| {
                        self.members.get(&member.volume).is_some_and(|seen| seen.holds(cutting))
                    });
                    if !all {
                        return None;
                    }
                    self.changed(|record| {
                        record.points.offered = Some(cutting);
                        record.points.offered_cut_ms = cut_ms;
                        record.points.cutting = None;
                    })
                }
                Some((point, None)) if point == cutting => None,
                // Another life named it, or its cuts do not count: that is recorded before anything is dropped.
                _ => self.changed(|record| {
                    record.points.dropping = record.points.cutting.take();
                }),
            };
        }
        if let Some(dropping) = points.dropping {
            let is_gone = record.members.iter().all(|member| {
                self.members.get(&member.volume).is_some_and(|seen| !seen.holds(dropping))
            });
            return if is_gone {
                self.changed(|record| record.points.dropping = None)
            } else {
                None
            };
        }
        let is_idle = self.is_idle() && !mutant::is("idle-by-the-bare-lsn");
        // 0: it is paused.
        let interval_s = record.parameters.interval_s;
        let due_ms = points.common_cut_ms.saturating_add(interval_s.saturating_mul(1000));
        // A clock that was ahead when the last one was cut holds up nothing.
        let is_ahead = points.common_cut_ms > now.wall_ms;
        let is_due = interval_s != 0 && (now.wall_ms >= due_ms || is_ahead);
        if points.offered.is_some() || is_idle || !is_due || !self.all(|_| true) {
            return None;
        }
        let mut point = PointId(now.draw);
        if mutant::is("point-id-drawn-twice") {
            point = PointId(7);
        }
        self.changed(|record| record.points.cutting = Some(point))
    }

    /// The record of a demotion that begins.
    pub(super) fn demoted(&self, now: Now) -> Option<Record> {
        self.changed(|record| {
            record.role = Role::Demoting;
            record.points.last = Some(PointId(now.draw));
            record.points.cutting = None;
            record.points.dropping = None;
            record.fence = now.draw;
            record.asks_step_down = false;
        })
    }

    fn demoting(&self, now: Now) -> Option<Record> {
        let record = &self.record;
        let last = record.points.last?;
        let is_cut =
            self.holds(last) && (self.is_at(last) || mutant::is("fenced-after-the-final-point"));
        if !is_cut || !self.all(|member| member.fenced == record.fence) {
            return None;
        }
        self.changed(|record| {
            record.role = Role::Secondary;
            record.points.offered = Some(last);
            record.points.offered_cut_ms = now.wall_ms;
            record.points.cutting = None;
            record.points.complete = None;
            record.claims = Claims::default();
        })
    }

    fn secondary(&self, now: Now) -> Option<Record> {
        if let Some(record) = self.common() {
            return Some(record);
        }
        let record = &self.record;
        let word = self.heard.as_ref()?;
        let own = if record.is_own() { self.final_again(now) } else { None };
        match record.chain.relation(&word.chain) {
            Relation::Ahead if mutant::is("final-point-not-cut-again-where-it-is-ahead") => None,
            Relation::Ahead => own,
            Relation::Same => own
                .or_else(|| self.yields(word))
                .or_else(|| self.granted(now, word))
                .or_else(|| self.copy(now, word)),
            // Only a side that is sure knows whether it has a final point.
            Relation::Forked
                if record.is_unsure
                    && word.role != Role::Off
                    && !mutant::is("diverged-before-it-is-sure") =>
            {
                None
            }
            Relation::Forked => self.diverged(now),
            Relation::Behind { fork } => self.behind(now, word, fork),
        }
    }

    /// A recovery forgot the final point. Nobody has written since, so another one is the same.
    fn final_again(&self, now: Now) -> Option<Record> {
        let is_forgotten = self.record.points.last.is_none() && !self.record.is_unsure;
        if is_forgotten { self.demoted(now) } else { None }
    }

    /// With its final point, so that a person may take this side for the truth.
    fn diverged(&self, now: Now) -> Option<Record> {
        if self.record.is_own()
            && !mutant::is("diverged-without-a-final-point")
            && let Some(record) = self.final_again(now)
        {
            return Some(record);
        }
        self.changed(|record| {
            record.role = Role::Diverged;
            record.claims.own = None;
        })
    }

    /// The other chain goes on where this one ends: it is followed, unless this side wrote behind the fork.
    fn behind(&self, now: Now, word: &Word, fork: Option<PointId>) -> Option<Record> {
        if !self.all(|_| true) {
            return None;
        }
        let is_own = self.record.is_own();
        let is_unchanged = fork.is_some_and(|fork| self.holds(fork) && self.is_at(fork));
        if is_own && !is_unchanged && !mutant::is("diverged-not-seen") {
            return self.diverged(now);
        }
        self.changed(|record| {
            record.chain = word.chain.clone();
            let points = &mut record.points;
            if is_own {
                points.complete = fork;
                points.complete_cut_ms = match fork {
                    _ if points.common == fork => points.common_cut_ms,
                    _ if points.offered == fork => points.offered_cut_ms,
                    _ => 0,
                };
            }
            record.points.last = None;
            record.points.offered = None;
            record.claims = Claims::default();
            record.asks_step_down = false;
        })
    }

    fn yields(&self, word: &Word) -> Option<Record> {
        let record = &self.record;
        let claim = word.claim.filter(|claim| record.claims.yielded != Some(*claim))?;
        let top = record.chain.top().generation.number;
        let is_final = !record.is_own()
            || record.points.last == Some(claim.point)
            || mutant::is("claimed-point-not-compared");
        let wins = record
            .claims
            .own
            .is_some_and(|own| (own.number, record.peer) > (claim.number, record.cluster));
        let is_kept = mutant::is("own-claim-kept-while-yielding");
        let may = is_final && claim.number > top && !record.is_unsure && self.pools_have_it();
        if !may || wins && !is_kept || mutant::is("claim-not-recorded-by-the-yielder") {
            return None;
        }
        self.changed(|record| {
            record.claims.yielded = Some(claim);
            if !is_kept {
                record.claims.own = None;
            }
        })
    }

    /// The other side recorded that it yields.
    fn granted(&self, now: Now, word: &Word) -> Option<Record> {
        let claim = self.record.claims.own?;
        let yielded = word.yielded?;
        let is_it = claim == yielded
            || mutant::is("yield-of-another-claim-believed") && claim.number == yielded.number;
        if is_it { self.begun(now, claim, false) } else { None }
    }

    /// The record of a promotion that begins.
    pub(super) fn begun(&self, now: Now, claim: Claim, is_forced: bool) -> Option<Record> {
        self.changed(|record| {
            record.role = Role::Promoting;
            record.claims = Claims { promoting: Some(claim), is_forced, ..Claims::default() };
            record.fence = now.draw;
            record.asks_step_down = false;
        })
    }

    fn copy(&self, now: Now, word: &Word) -> Option<Record> {
        let record = &self.record;
        if record.is_own() || record.is_unsure || !self.pools_have_it() {
            return None;
        }
        if let Some(point) = self.fed() {
            return self.complete(point, record.receiving.as_ref().map_or(0, |r| r.cut_ms));
        }
        let points = &record.points;
        if points.complete.is_some()
            && word.common == points.complete
            && points.common != points.complete
        {
            return self.changed(|record| record.points.common = record.points.complete);
        }
        let offered =
            word.offer.as_ref().filter(|offer| points.complete != Some(offer.transfer.point));
        let current = record.receiving.as_ref();
        if let Some(offer) = offered
            && current.is_none_or(|receiving| receiving.transfer != offer.transfer)
        {
            if self.holds(offer.transfer.point) {
                return self.complete(offer.transfer.point, offer.cut_ms);
            }
            let is_known = |base| record.members.iter().all(|m| !m.has_base) || self.holds(base);
            return if offer.transfer.base.is_none_or(is_known) {
                self.receive_from(now, word)
            } else {
                None
            };
        }
        let receiving = current?;
        if !receiving.is_begun {
            let is_ready = |member: &super::Member| {
                let Some(seen) = self.members.get(&member.volume) else { return false };
                // An older order that is still on its way would change what was seen.
                let is_heard =
                    seen.stamp >= self.stamp() || mutant::is("late-orders-not-waited-for");
                let is_stopped = seen.order.is_none() && is_heard;
                let base = receiving.transfer.base.filter(|base| seen.holds(*base));
                let is_at = base.is_none_or(|base| seen.at == Some(base));
                let needed = self.needed(member, receiving).unwrap_or(0);
                let is_large = seen.blocks >= needed || mutant::is("size-after-the-slots");
                is_stopped && is_large && (is_at || mutant::is("other-base-without-a-revert"))
            };
            let is_ready = record.members.iter().all(is_ready);
            return if is_ready { self.changed(begin) } else { None };
        }
        self.cursors(now, receiving)
    }

    fn receive_from(&self, now: Now, word: &Word) -> Option<Record> {
        let offer = word.offer.as_ref()?;
        self.changed(|record| {
            for other in &word.members {
                let is_known = record.members.iter().any(|member| member.volume == other.volume);
                // A member whose copy could not be made holds no other one up.
                let is_there = self.members.contains_key(&other.volume);
                if !is_known && is_there {
                    record.members.push(super::Member { volume: other.volume, has_base: false });
                }
            }
            record.members.retain(|member| word.members.iter().any(|o| o.volume == member.volume));
            let cursors = match &record.receiving {
                Some(former) if mutant::is("cursor-of-another-point-used") => {
                    former.cursors.clone()
                }
                _ => vec![0; record.members.len()],
            };
            let size = |member: &super::Member| {
                let mut sizes = word.members.iter().zip(&offer.blocks);
                let size = sizes.find(|(other, _)| other.volume == member.volume);
                size.map_or(0, |(_, blocks)| *blocks)
            };
            record.receiving = Some(Receiving {
                transfer: offer.transfer,
                is_begun: false,
                cursors,
                token: now.draw,
                cut_ms: offer.cut_ms,
                blocks: record.members.iter().map(size).collect(),
            });
        })
    }

    /// The point of the transfer under way, once every counted member holds it.
    pub(super) fn fed(&self) -> Option<PointId> {
        let point = self.record.receiving.as_ref()?.transfer.point;
        let any = || self.counted().any(|v| self.members.get(&v).is_some_and(|m| m.holds(point)));
        let early = mutant::is("complete-before-all-members-are-cut") && any();
        (self.every(|member| member.holds(point)) || early).then_some(point)
    }

    fn complete(&self, point: PointId, cut_ms: u64) -> Option<Record> {
        self.changed(|record| {
            record.points.complete = Some(point);
            record.points.complete_cut_ms = cut_ms;
            record.receiving = None;
            for member in &mut record.members {
                let has_it = self.members.get(&member.volume).is_some_and(|seen| seen.holds(point));
                member.has_base |= has_it || mutant::is("joiner-counted-complete");
            }
        })
    }

    /// Cursors of the transfer, never above what its members have on stable media.
    fn cursors(&self, now: Now, receiving: &Receiving) -> Option<Record> {
        let own = Some(receiving.order());
        let stable: Vec<u64> = self
            .record
            .members
            .iter()
            .zip(&receiving.cursors)
            .map(|(member, cursor)| {
                let seen = self.members.get(&member.volume).filter(|seen| seen.order == own);
                let early = mutant::is("cursor-above-stable");
                let to =
                    |seen: &super::Observed| if early { seen.taken_to } else { seen.stable_to };
                seen.map_or(*cursor, |seen| to(seen).max(*cursor))
            })
            .collect();
        let most = stable.iter().zip(&receiving.cursors).map(|(new, old)| new - old).max()?;
        let is_time = now.time.since(self.cursors_at) >= CURSOR_WITHIN && most > 0;
        if most < CURSOR_BLOCKS && !is_time {
            return None;
        }
        self.changed(|record| {
            if let Some(receiving) = &mut record.receiving {
                receiving.cursors = stable;
            }
        })
    }

    /// No member that reported takes slots, one that joins neither.
    fn are_stopped(&self) -> bool {
        self.reported().all(|seen| self.takes_no_slots(seen))
    }

    fn promoting(&self, now: Now) -> Option<Record> {
        let record = &self.record;
        let claim = record.claims.promoting?;
        let is_forced = record.claims.is_forced;
        // Records of before a recovery may name a point that was dropped since: nothing brings it back.
        let is_gone = self.all(|_| true) && !self.holds(claim.point);
        if is_gone && !mutant::is("dropped-point-waited-for") {
            return self.changed(|record| {
                record.role = Role::Secondary;
                record.claims = Claims::default();
                record.is_unsure = true;
            });
        }
        let is_there = self.is_at(claim.point)
            || mutant::is("promoted-without-a-revert")
            || mutant::is("in-flight-of-the-record-believed") && record.receiving.is_none();
        let is_fenced = self.all(|member| member.fenced == record.fence);
        if !is_there || !is_fenced || !self.are_stopped() {
            return None;
        }
        let mut number = claim.number;
        if mutant::is("generation-not-raised") {
            number = record.chain.top().generation.number;
        }
        self.changed(|record| {
            let generation = Generation { number, cluster: record.cluster, id: claim.id };
            record.chain.push(Begun { generation, at: Some(claim.point) });
            record.role = Role::Primary;
            record.claims = Claims::default();
            record.receiving = None;
            record.is_paired = true;
            let points = &mut record.points;
            points.complete = Some(claim.point);
            points.last = None;
            points.cutting = None;
            // The other side may not have it yet.
            points.offered = (points.common != Some(claim.point)).then_some(claim.point);
            points.offered_cut_ms = 0;
            // Nobody has written here yet: all that was before is in the point that both have.
            let is_planned = points.common == Some(claim.point) && !is_forced;
            points.common_cut_ms = if is_planned { now.wall_ms } else { 0 };
        })
    }

    fn resyncing(&self) -> Option<Record> {
        let word = self.heard.as_ref()?;
        let record = &self.record;
        // Both were asked for at once, and each waits for the other to be primary. Neither has discarded
        // anything: a primary that says that it knows of a resync begins none.
        let gives_way = word.role == Role::Resyncing && record.cluster < record.peer;
        if gives_way && !mutant::is("two-resyncs-wait-for-each-other") {
            return self.changed(|record| record.role = Role::Diverged);
        }
        let base = self.newest_of_both();
        let is_kept =
            self.all(|member| member.lost == record.lost) || mutant::is("resync-without-lost");
        let is_back = base.is_none_or(|base| self.is_at(base));
        let is_fenced = self.all(|member| member.fenced == record.fence);
        if !is_kept || !is_back || !is_fenced || !self.are_stopped() || !self.may_discard() {
            return None;
        }
        self.changed(|record| {
            record.role = Role::Secondary;
            record.chain = word.chain.clone();
            record.points =
                super::record::Points { common: base, complete: base, ..Default::default() };
            record.claims = Claims::default();
            record.receiving = None;
            record.is_unsure = false;
        })
    }
}

fn begin(record: &mut Record) {
    if let Some(receiving) = &mut record.receiving {
        receiving.is_begun = true;
    }
}
