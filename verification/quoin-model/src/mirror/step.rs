//! Steps: each changes one record, gives one order, or is something that happens outside.

use super::state::{
    Begun, Claim, Generation, Live, MEMBERS, OF_MEMBER, Record, Role, Side, State, Transfer, Word,
    bit, newest,
};
use super::{Bounds, Broken};

pub type Step = (&'static str, usize, State);

pub struct World {
    pub bounds: Bounds,
    pub broken: Option<Broken>,
}

impl World {
    pub fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    pub fn steps(&self, state: &State, next: &mut Vec<Step>) {
        for x in 0..2 {
            self.goes_on(state, x, next);
            self.calls(state, x, next);
            self.client(state, x, next);
            self.faults(state, x, next);
        }
    }

    /// Everything that happens without callers and faults.
    pub fn goes_on(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        self.link(state, x, next);
        self.pools(state, x, next);
        self.targets(state, x, next);
        match state.sides[x].record.role {
            Role::Primary => self.primary(state, x, next),
            Role::Demoting => self.demoting(state, x, next),
            Role::Secondary => self.secondary(state, x, next),
            Role::Promoting => self.promoting(state, x, next),
            Role::Resyncing => self.resyncing(state, x, next),
            Role::Diverged => {}
        }
        self.unpins(state, x, next);
    }

    fn client(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        if state.writes < self.bounds.writes && side.is_writable {
            let mut after = *state;
            let write = 1 << state.writes;
            let member = usize::from(OF_MEMBER[1] & write != 0);
            let live = &mut after.sides[x].volumes[member].live;
            match live {
                Live::Whole(writes) => *writes |= write,
                Live::Fed(_) | Live::Mixed => after.broken = Some("PromoteShowsCompletePoint"),
            }
            after.writes += 1;
            next.push(("a client's write is acknowledged", x, after));
        }
    }

    /// The pools hear of role and generation; a primary that all of them know is published.
    fn pools(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let is_primary = side.record.role == Role::Primary;
        if !side.pools_have_it() && side.record.role != Role::Demoting {
            let mut after = *state;
            after.sides[x].pools_primary = is_primary;
            after.sides[x].pools = side.record.chain.top();
            next.push(("the pools hear of the role", x, after));
        }
        if is_primary && side.pools_have_it() && !side.is_writable {
            let mut after = *state;
            after.sides[x].is_writable = true;
            next.push(("the group is published", x, after));
        }
    }

    /// Slots arrive; what ended, ended.
    fn targets(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let (side, peer) = (&state.sides[x], &state.sides[1 - x]);
        for m in 0..MEMBERS {
            if let Some(ended) = side.ended_order.filter(|_| self.is(Broken::FedUnderAnOldEpoch)) {
                let mut after = *state;
                after.sides[x].ended_order = None;
                after.sides[x].volumes[m].live =
                    if side.order == Some(ended) { Live::Fed(ended) } else { Live::Mixed };
                next.push(("a slot of an order that was ended is taken", x, after));
            }
            let Some(order) = side.order else { continue };
            let sent = bit(order.point) | bit(order.base);
            if side.volumes[m].is_fed || peer.volumes[m].held & sent != sent {
                continue;
            }
            let mut after = *state;
            let volume = &mut after.sides[x].volumes[m];
            let how = if volume.live == Live::Fed(order) {
                volume.live = state.of_point(order.point, m);
                volume.is_fed = true;
                "the last slot is taken"
            } else {
                let fits = order.base == 0 || volume.live == state.of_point(order.base, m);
                // Slots on a view that is not their base make one that is no point's.
                let is_mixed = !fits && volume.live == Live::Mixed;
                volume.live = if fits { Live::Fed(order) } else { Live::Mixed };
                volume.is_fed = is_mixed;
                "slots are taken"
            };
            if side.is_writable {
                after.broken = Some("FeedOnlyWhileSecondary");
            }
            next.push((how, x, after));
        }
    }

    fn link(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let y = 1 - x;
        let side = &state.sides[x];
        if let Some(word) = side.coming {
            let mut after = *state;
            after.sides[x].heard = Some(word);
            after.sides[x].coming = None;
            next.push(("a word is heard", x, after));
            let mut after = *state;
            after.sides[x].coming = None;
            next.push(("a word is lost", x, after));
        }
        let role = side.record.role;
        let is_between = matches!(role, Role::Demoting | Role::Promoting | Role::Resyncing);
        let is_told = side.pools_have_it() || self.is(Broken::RoleToldBeforeItsPools);
        let word = self.word(side);
        let to = &state.sides[y];
        if to.coming.is_none() && to.heard != Some(word) && is_told && !is_between {
            let mut after = *state;
            after.sides[y].coming = Some(word);
            let generation = word.chain.top().generation;
            let told = (generation, u8::from(role != Role::Primary));
            let (before, rank) = side.told;
            let is_back = generation.number < before.number
                || generation == before && told.1 < rank && role == Role::Primary;
            if is_back {
                after.broken = Some("RoleNeverGoesBack");
            }
            after.sides[x].told = told;
            next.push(("a word is sent", x, after));
        }
    }

    fn word(&self, side: &Side) -> Word {
        let record = &side.record;
        let is_sure = !record.is_unsure;
        let base =
            side.heard.map_or(0, |word| newest(word.held & side.held() & !bit(record.offered)));
        let point = record.offered;
        let offer =
            (point != 0 && is_sure && side.heard.is_some()).then_some(Transfer { point, base });
        Word {
            role: record.role,
            chain: record.chain,
            held: side.held(),
            offer,
            complete: record.complete,
            common: record.common,
            last: record.last,
            claim: record.claim,
            yielded: record.yielded.or(side.unrecorded),
        }
    }

    /// After a recovery: the newest point that both sides hold is the last common one.
    fn becomes_sure(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        if let Some(word) = side.heard.filter(|_| side.record.is_unsure) {
            let mut after = *state;
            let common = newest(word.held & side.held());
            let is_copy = side.record.role == Role::Secondary && !side.is_own(x);
            // The other side may still count on the older one that it recorded as common.
            let pinned = if is_copy && side.holds(word.common) { word.common } else { common };
            let record = &mut after.sides[x].record;
            record.common = pinned;
            record.complete = if is_copy { common } else { 0 };
            record.is_unsure = false;
            if record.offered == common {
                record.offered = 0;
            }
            if record.role == Role::Secondary && !is_copy && record.last != common {
                record.offered = record.last;
            }
            if is_copy && common < side.completed {
                after.broken = Some("PromoteShowsCompletePoint");
            }
            if is_copy {
                after.sides[x].completed = common;
            }
            next.push(("the last common point is found again", x, after));
        }
    }

    /// The other side recorded a newer point as complete.
    fn common(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let Some(word) = side.heard.filter(|_| side.is_own(x) && !side.record.is_unsure) else {
            return;
        };
        let is_same = word.chain.top() == side.record.chain.top();
        let point = word.complete;
        if is_same
            && word.role == Role::Secondary
            && side.holds(point)
            && point > side.record.common
        {
            let mut after = *state;
            let record = &mut after.sides[x].record;
            record.common = point;
            record.complete = 0;
            if record.offered == point {
                record.offered = 0;
            }
            if side.record.role == Role::Primary && !state.sides[1 - x].holds(point) {
                after.broken = Some("SyncTimeIsTrue");
            }
            next.push(("a point is recorded as common", x, after));
        }
    }

    fn primary(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        self.becomes_sure(state, x, next);
        self.common(state, x, next);
        let side = &state.sides[x];
        let record = &side.record;
        if record.is_unsure || !side.pools_have_it() {
            return;
        }
        if record.cutting == 0 && record.offered == 0 {
            let is_idle = record.common != 0 && state.shows(x, record.common);
            if !is_idle && state.points <= self.bounds.points {
                let mut after = *state;
                after.points += 1;
                after.sides[x].record.cutting = after.points;
                next.push(("a point is named", x, after));
            }
        } else if record.cutting != 0 {
            let mut after = *state;
            if side.holds(record.cutting) {
                let record = &mut after.sides[x].record;
                record.offered = record.cutting;
                record.cutting = 0;
                next.push(("the cuts are recorded", x, after));
            } else {
                cut_all(&mut after, x, record.cutting);
                next.push(("a point is cut", x, after));
            }
        }
    }

    fn demoting(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let (is_cut, early) =
            (side.holds(side.record.last), self.is(Broken::FencedAfterTheFinalPoint));
        let mut after = *state;
        if !side.is_fenced && (!early || is_cut) {
            fence(&mut after.sides[x]);
            next.push(("all members are fenced", x, after));
        } else if !is_cut {
            cut_all(&mut after, x, side.record.last);
            next.push(("the final point is cut", x, after));
        } else {
            let record = &mut after.sides[x].record;
            record.role = Role::Secondary;
            record.offered = record.last;
            record.cutting = 0;
            record.complete = 0;
            next.push(("the demotion is recorded", x, after));
        }
    }

    fn secondary(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        self.becomes_sure(state, x, next);
        self.common(state, x, next);
        let side = &state.sides[x];
        let record = &side.record;
        // A recovery forgot the final point: nobody has written since, so another one is the same.
        let forgot = side.is_own(x) && record.last == 0 && !record.is_unsure;
        if forgot && usize::from(state.points) < super::state::POINTS {
            let mut after = *state;
            after.points += 1;
            let record = &mut after.sides[x].record;
            record.role = Role::Demoting;
            record.last = after.points;
            after.sides[x].is_fenced = false;
            next.push(("the final point is named again", x, after));
        }
        let Some(word) = side.heard else { return };
        if word.chain.top() != record.chain.top() {
            return self.other_chain(state, x, &word, next);
        }
        self.claims(state, x, &word, next);
        if !side.is_own(x) && !record.is_unsure && side.pools_have_it() {
            self.copy(state, x, &word, next);
        }
    }

    /// The chain of the other side is another one: it is followed, or the two diverged.
    fn other_chain(&self, state: &State, x: usize, word: &Word, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        let (own, other) = (record.chain.top().generation, word.chain.top().generation);
        if record.chain.place(other).is_some() {
            return;
        }
        let place = word.chain.place(own);
        let fork = place.and_then(|place| word.chain.all().get(place + 1));
        let wrote = |at: u8| side.is_own(x) && !(side.holds(at) && state.shows(x, at));
        let mut after = *state;
        match fork {
            Some(fork) if !wrote(fork.at) || self.is(Broken::DivergedNotSeen) => {
                let is_own = side.is_own(x);
                let record = &mut after.sides[x].record;
                record.chain = word.chain;
                if is_own {
                    record.complete = if side.holds(fork.at) { fork.at } else { 0 };
                }
                record.last = 0;
                record.offered = 0;
                record.claim = None;
                record.yielded = None;
                after.sides[x].completed = after.sides[x].record.complete;
                next.push(("the longer chain is followed", x, after));
            }
            _ => {
                after.sides[x].record.role = Role::Diverged;
                after.sides[x].record.claim = None;
                next.push(("the chains diverged", x, after));
            }
        }
    }

    fn claims(&self, state: &State, x: usize, word: &Word, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        if let Some(claim) = word.claim.filter(|claim| record.yielded != Some(*claim)) {
            let is_final = !side.is_own(x)
                || claim.point == record.last
                || self.is(Broken::ClaimedPointNotCompared);
            let wins = record.claim.is_some_and(|own| (own.number, 1 - x) > (claim.number, x))
                && !self.is(Broken::OwnClaimKept);
            if is_final && !wins && !record.is_unsure {
                let mut after = *state;
                if self.is(Broken::YieldNotRecorded) {
                    after.sides[x].unrecorded = Some(claim);
                } else {
                    after.sides[x].record.yielded = Some(claim);
                    if !self.is(Broken::OwnClaimKept) {
                        after.sides[x].record.claim = None;
                    }
                }
                next.push(("a claim is yielded to", x, after));
            }
        }
        if let (Some(claim), Some(yielded)) = (record.claim, word.yielded)
            && claim == yielded
        {
            let mut after = *state;
            begin_promotion(&mut after.sides[x], claim, false);
            next.push(("the claim is granted: a promotion is recorded", x, after));
        }
    }

    fn copy(&self, state: &State, x: usize, word: &Word, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        if word.common == record.complete
            && record.complete != 0
            && record.common != record.complete
        {
            let mut after = *state;
            after.sides[x].record.common = record.complete;
            next.push(("the copy hears that its point is common", x, after));
        }
        let is_whole = record.receiving.is_some_and(|transfer| side.holds(transfer.point));
        if let Some(offer) = word.offer.filter(|offer| offer.point != record.complete)
            && record.receiving != Some(offer)
            && !is_whole
        {
            let mut after = *state;
            if side.holds(offer.point) {
                after.sides[x].record.complete = offer.point;
                after.sides[x].completed = offer.point;
                after.sides[x].record.receiving = None;
                next.push(("the offered point is there already", x, after));
            } else if offer.base == 0 || side.holds(offer.base) {
                after.sides[x].record.receiving = Some(offer);
                after.sides[x].record.is_begun = false;
                next.push(("a transfer is recorded", x, after));
            }
        }
        let Some(transfer) = record.receiving else { return };
        let at_base = transfer.base == 0
            || state.shows(x, transfer.base)
            || self.is(Broken::OtherBaseWithoutARevert);
        let stopped = side.order.is_none();
        let mut after = *state;
        if !record.is_begun {
            if stopped || self.is(Broken::RevertedUnderAnOrder) {
                if at_base {
                    after.sides[x].record.is_begun = true;
                    next.push(("the transfer begins", x, after));
                } else {
                    self.revert(state, x, transfer.base, next);
                }
            }
            if !stopped {
                let mut after = *state;
                end_order(&mut after.sides[x]);
                next.push(("the former order is ended", x, after));
            }
            return;
        }
        if side.order != Some(transfer) {
            after.sides[x].order = Some(transfer);
            after.sides[x].volumes.iter_mut().for_each(|volume| volume.is_fed = false);
            return next.push(("the targets are ordered to take slots", x, after));
        }
        if side.volumes.iter().all(|volume| volume.is_fed) {
            for m in 0..MEMBERS {
                if side.volumes[m].held & bit(transfer.point) == 0 {
                    let mut after = *state;
                    let volume = &mut after.sides[x].volumes[m];
                    volume.held |= bit(transfer.point);
                    if volume.live != state.of_point(transfer.point, m) {
                        after.broken = Some("DigestMatches");
                    }
                    next.push(("a member of the copy is cut", x, after));
                }
            }
        }
        let any = side.volumes.iter().any(|volume| volume.held & bit(transfer.point) != 0);
        let early = self.is(Broken::CompleteBeforeAllAreCut) && any;
        if side.holds(transfer.point) || early {
            let record = &mut after.sides[x].record;
            record.complete = transfer.point;
            record.receiving = None;
            record.is_begun = false;
            after.sides[x].completed = transfer.point;
            if !side.holds(transfer.point) {
                after.broken = Some("PointMeansAllMembers");
            }
            next.push(("the point is recorded as complete", x, after));
        }
    }

    fn revert(&self, state: &State, x: usize, point: u8, next: &mut Vec<Step>) {
        for m in 0..MEMBERS {
            let volume = state.sides[x].volumes[m];
            let goal = state.of_point(point, m);
            if volume.live != goal && volume.held & bit(point) != 0 {
                let mut after = *state;
                after.sides[x].volumes[m].live = goal;
                next.push(("a member is reverted", x, after));
            }
        }
    }

    fn promoting(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let Some(claim) = side.record.promoting else { return };
        let mut after = *state;
        if !side.is_fenced {
            fence(&mut after.sides[x]);
            return next.push(("all members are fenced", x, after));
        }
        if side.order.is_some() && !self.is(Broken::PromotedUnderAnOrder) {
            end_order(&mut after.sides[x]);
            return next.push(("the order of the promoted side is ended", x, after));
        }
        let believes = self.is(Broken::InFlightBelieved) && side.record.receiving.is_none();
        let goes_on = believes || self.is(Broken::PromotedWithoutARevert);
        if !state.shows(x, claim.point) && !goes_on {
            return self.revert(state, x, claim.point, next);
        }
        if !state.shows(x, claim.point) {
            after.broken = Some("PromoteShowsCompletePoint");
        }
        if !side.record.is_forced && !state.was_forced {
            let shown = state.content[usize::from(claim.point)];
            if shown != state.acknowledged() {
                after.broken = Some("PlannedMoveLosesNothing");
            }
        }
        let mut number = claim.number;
        if self.is(Broken::GenerationNotRaised) {
            number = side.record.chain.top().generation.number;
        }
        let generation = Generation { number, cluster: x as u8 };
        let record = &mut after.sides[x].record;
        let begun = Begun { generation, at: claim.point };
        if self.is(Broken::GenerationNotRaised) && record.chain.place(generation).is_some() {
            after.broken = Some("OnePrimaryPerG");
            return next.push(("a generation begins a second time", x, after));
        }
        record.chain.push(begun);
        record.role = Role::Primary;
        record.complete = claim.point;
        record.receiving = None;
        record.is_begun = false;
        record.promoting = None;
        record.yielded = None;
        record.claim = None;
        // The other side may not have it yet.
        record.offered = if record.common == claim.point { 0 } else { claim.point };
        record.last = 0;
        next.push(("the promotion is recorded", x, after));
    }

    fn resyncing(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let Some(word) = side.heard else { return };
        let base = newest(word.held & side.held());
        let mut after = *state;
        if side.order.is_some() && !self.is(Broken::PromotedUnderAnOrder) {
            end_order(&mut after.sides[x]);
            return next.push(("the order of the resynced side is ended", x, after));
        }
        let content = side.volumes.iter().fold(0, |all, volume| match volume.live {
            Live::Whole(writes) => all | writes,
            Live::Fed(_) | Live::Mixed => all,
        });
        let late = self.is(Broken::LostKeptAfterTheRevert) && !state.shows(x, base);
        if side.lost & content != content && !late && !self.is(Broken::ResyncWithoutLost) {
            after.sides[x].lost |= content;
            return next.push(("what is discarded is kept", x, after));
        }
        if base != 0 && !state.shows(x, base) {
            return self.revert(state, x, base, next);
        }
        let record = &mut after.sides[x].record;
        record.role = Role::Secondary;
        record.chain = word.chain;
        record.common = base;
        record.complete = base;
        record.last = 0;
        record.offered = 0;
        record.cutting = 0;
        record.yielded = None;
        after.sides[x].completed = base;
        next.push(("the resync is recorded", x, after));
    }

    fn unpins(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        let settled = matches!(record.role, Role::Primary | Role::Secondary) && !record.is_unsure;
        // Nothing that is newer than the common point, whatever the record says of it.
        let mut kept = side.kept() | !(bit(record.common).max(1) - 1);
        if self.is(Broken::UnpinnedEarly) && record.offered != 0 {
            kept &= !bit(record.common);
        }
        let any = side.volumes.iter().any(|volume| volume.held & !kept != 0);
        if settled && any {
            let mut after = *state;
            after.sides[x].volumes.iter_mut().for_each(|volume| volume.held &= kept);
            next.push(("points are dropped that no rule keeps", x, after));
        }
    }

    fn calls(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        let has_points = state.points <= self.bounds.points;
        if record.role == Role::Primary && state.demotions > 0 && has_points {
            let mut after = *state;
            after.demotions -= 1;
            after.points += 1;
            after.sides[x].is_fenced = false;
            let record = &mut after.sides[x].record;
            record.role = Role::Demoting;
            record.last = after.points;
            next.push(("Demote: it is recorded", x, after));
        }
        if record.role == Role::Secondary {
            self.promote(state, x, next);
        }
        // Only a primary is followed: of two sides that diverged a person promotes one first.
        let is_beside = side.heard.is_some_and(|word| word.role == Role::Primary);
        if record.role == Role::Diverged && state.resyncs > 0 && is_beside {
            let mut after = *state;
            after.resyncs -= 1;
            after.sides[x].record.role = Role::Resyncing;
            next.push(("Resync with force: it is recorded", x, after));
        }
    }

    fn promote(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let record = &side.record;
        let top = record.chain.top().generation.number;
        let heard = side.heard.map_or(0, |word| word.chain.top().generation.number);
        let yielded = record.yielded.map_or(0, |claim| claim.number);
        let number = top.max(heard).max(yielded) + 1;
        // A point that every member has is complete, though that is not recorded yet.
        let fed = record.receiving.map(|t| t.point).filter(|point| side.holds(*point));
        let own = if side.is_own(x) { record.last } else { fed.unwrap_or(record.complete) };
        let id = state.claims + 1;
        let claim = Claim { number, point: own, id };
        let is_there = side.holds(own) && !record.chain.is_full();
        let demoted = side.heard.filter(|word| {
            let is_same = word.chain.top() == record.chain.top() && word.role == Role::Secondary;
            is_same
                && (side.is_own(x) || word.last == own || self.is(Broken::ClaimedPointNotCompared))
        });
        let may = is_there && demoted.is_some() && yielded <= top && !record.is_unsure;
        if state.promotions > 0 && may && record.claim.is_none() {
            let mut after = *state;
            after.promotions -= 1;
            after.claims += 1;
            if self.is(Broken::PromotedWithoutAClaim) {
                begin_promotion(&mut after.sides[x], claim, false);
            } else {
                after.sides[x].record.claim = Some(claim);
            }
            next.push(("Promote: a claim is recorded", x, after));
        }
        let is_sure = !record.is_unsure || self.is(Broken::CompleteOfRestoredBelieved);
        if state.forced > 0 && is_there && is_sure {
            let mut after = *state;
            after.forced -= 1;
            after.claims += 1;
            after.was_forced = true;
            if !side.is_own(x) && own < side.completed {
                after.broken = Some("PromoteShowsCompletePoint");
            }
            begin_promotion(&mut after.sides[x], claim, true);
            next.push(("Promote with force: it is recorded", x, after));
        }
    }

    fn faults(&self, state: &State, x: usize, next: &mut Vec<Step>) {
        let side = &state.sides[x];
        let mut dead = *side;
        dead.heard = None;
        dead.coming = None;
        dead.unrecorded = None;
        if state.deaths > 0 && dead != *side {
            let mut after = *state;
            after.deaths -= 1;
            after.sides[x] = dead;
            next.push(("the brain dies", x, after));
        }
        if side.restores >= self.bounds.restores[x] {
            return;
        }
        match side.backup {
            None => {
                let mut after = *state;
                after.sides[x].backup = Some(side.record);
                next.push(("the records are copied", x, after));
            }
            Some(backup) if backup != side.record => {
                let mut after = *state;
                dead.restores += 1;
                dead.backup = None;
                dead.is_fenced = false;
                dead.record = self.recovered(&backup, side);
                after.sides[x] = dead;
                next.push(("older records are restored and recovered", x, after));
            }
            Some(_) => {}
        }
    }

    /// The record that a recovery makes of an older one: role and generation are those of the pools, and nothing
    /// that says what the live view is counts any more.
    fn recovered(&self, backup: &Record, side: &Side) -> Record {
        let mut record = Record { is_unsure: true, cutting: 0, offered: 0, claim: None, ..*backup };
        if !self.is(Broken::TransferKeptOverARecovery) {
            record.receiving = None;
            record.is_begun = false;
        }
        if self.is(Broken::RestoredRoleBelieved) {
            return record;
        }
        let is_newer = record.chain.place(side.pools.generation).is_none();
        if is_newer {
            record.chain.push(side.pools);
        }
        let is_top = record.chain.top() == side.pools;
        let was_primary = matches!(record.role, Role::Primary | Role::Demoting);
        // Within one generation a side is Primary first and Secondary after it.
        if is_newer || is_top && was_primary && !side.pools_primary {
            record.role = if side.pools_primary { Role::Primary } else { Role::Secondary };
            record.promoting = None;
            record.last = 0;
            record.yielded = None;
        }
        record
    }
}

fn cut_all(state: &mut State, x: usize, point: u8) {
    let mut content = 0;
    for volume in &mut state.sides[x].volumes {
        match volume.live {
            Live::Whole(writes) => content |= writes,
            Live::Fed(_) | Live::Mixed => state.broken = Some("PromoteShowsCompletePoint"),
        }
        volume.held |= bit(point);
    }
    state.content[usize::from(point)] = content;
}

fn end_order(side: &mut Side) {
    if side.order.is_some() && side.volumes.iter().any(|volume| !volume.is_fed) {
        side.ended_order = side.order;
    }
    side.order = None;
    side.volumes.iter_mut().for_each(|volume| volume.is_fed = false);
}

/// A higher epoch: clients of before end. The order stands: targets that open the members next have it too.
fn fence(side: &mut Side) {
    // It begins anew there.
    side.volumes.iter_mut().for_each(|volume| volume.is_fed = false);
    side.is_fenced = true;
    side.is_writable = false;
}

fn begin_promotion(side: &mut Side, claim: Claim, is_forced: bool) {
    side.is_fenced = false;
    side.record.role = Role::Promoting;
    side.record.promoting = Some(claim);
    side.record.claim = None;
    side.record.is_forced = is_forced;
}
