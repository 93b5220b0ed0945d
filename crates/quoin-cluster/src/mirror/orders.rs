//! Orders to members, as the record has it. Everything is said again until it is seen to be done.

use quoin_types::ids::PointId;
use quoin_types::mutant;

use super::brain::{Action, Brain, Order};
use super::observed::Observed;
use super::record::{Member, Receiving, Role, Stamp};

impl Brain {
    pub(super) fn stamp(&self) -> Stamp {
        Stamp { term: self.record.term, version: self.version }
    }

    pub(super) fn orders(&self, out: &mut Vec<Action>) {
        let record = &self.record;
        for member in &record.members {
            let Some(seen) = self.members.get(&member.volume) else { continue };
            let mut orders = Vec::new();
            self.keep_role(seen, &mut orders);
            match record.role {
                Role::Off => {}
                Role::Diverged => self.end_feed(seen, &mut orders),
                Role::Primary => self.drop_given_up(seen, &mut orders),
                Role::Demoting => self.cut_last(seen, &mut orders),
                Role::Secondary => self.receive_slots(member, seen, &mut orders),
                Role::Promoting => self.go_back(seen, &mut orders),
                Role::Resyncing => self.discard(seen, &mut orders),
                Role::Orphan => {
                    self.end_feed(seen, &mut orders);
                    if let Some(point) = self.unshown(seen)
                        && self.takes_no_slots(seen)
                    {
                        orders.push(Order::Revert(point));
                    }
                }
            }
            self.unpin(seen, &mut orders);
            let (volume, stamp) = (member.volume, self.stamp());
            out.extend(orders.into_iter().map(|order| Action::Member { volume, stamp, order }));
        }
        self.make_point(out);
        self.ship(out);
    }

    /// Returns true once no target of the member takes slots, and none that opens it later will: the end of its
    /// order stands, and every target hears it.
    pub(super) fn takes_no_slots(&self, seen: &Observed) -> bool {
        seen.order.is_none() && seen.stamp >= self.stamp() || mutant::is("promoted-under-an-order")
    }

    /// The last complete point, where a member of an orphan holds it and shows something else.
    fn unshown(&self, seen: &Observed) -> Option<PointId> {
        let complete = self.record.points.complete;
        complete.filter(|point| seen.holds(*point) && seen.at != complete)
    }

    /// Returns true once each member of an orphan that reported shows the last point, and takes no slots.
    pub(super) fn is_settled(&self) -> bool {
        let mut members = self.reported().peekable();
        members.peek().is_some()
            && members.all(|seen| self.takes_no_slots(seen) && self.unshown(seen).is_none())
    }

    fn end_feed(&self, seen: &Observed, orders: &mut Vec<Order>) {
        if !self.takes_no_slots(seen) {
            orders.push(Order::Stop);
        }
    }

    fn keep_role(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let keepsake = self.record.keepsake();
        let is_told = matches!(self.record.role, Role::Demoting | Role::Off);
        if seen.keepsake != Some(keepsake) && !is_told {
            orders.push(Order::Keep { is_primary: keepsake.is_primary, begun: keepsake.begun });
        }
    }

    fn drop_given_up(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let points = &self.record.points;
        let early = points
            .cutting
            .filter(|point| mutant::is("dropped-before-it-is-given-up") && !self.has_named(*point));
        if let Some(point) = points.dropping.or(early).filter(|point| seen.holds(*point)) {
            orders.push(Order::Drop(point));
        }
    }

    fn cut_last(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let Some(last) = self.record.points.last else { return };
        let is_fenced = self.all(|member| member.fenced == self.record.fence);
        let early = mutant::is("fenced-after-the-final-point");
        if early && !self.holds(last) {
            orders.push(Order::Cut(last));
        } else if seen.fenced != self.record.fence {
            orders.push(Order::Fence(self.record.fence));
        } else if is_fenced && !seen.holds(last) {
            orders.push(Order::Cut(last));
        } else if is_fenced && !mutant::is("point-behind-the-final-one-kept") {
            // A point that was named before may be cut late. The view would then show that one, and the demotion
            // would wait for ever.
            let behind = seen.points.iter().skip_while(|point| **point != last).skip(1);
            orders.extend(behind.map(|point| Order::Drop(*point)));
        }
    }

    fn receive_slots(&self, member: &Member, seen: &Observed, orders: &mut Vec<Order>) {
        let Some(receiving) = &self.record.receiving else { return };
        if !self.pools_have_it() {
            return;
        }
        let base = receiving.transfer.base.filter(|base| seen.holds(*base));
        let own = Some(receiving.order());
        if !receiving.is_begun {
            let is_ordered = seen.order.is_some();
            if is_ordered || seen.stamp < self.stamp() {
                orders.push(Order::Stop);
            }
            if let Some(blocks) = self.needed(member, receiving).filter(|n| seen.blocks < *n) {
                orders.push(Order::Grow(blocks));
            }
            if let Some(base) = base
                && seen.at != Some(base)
                && !mutant::is("other-base-without-a-revert")
                && (!is_ordered || mutant::is("reverted-under-an-order"))
            {
                orders.push(Order::Revert(base));
            }
        } else if seen.order != own {
            orders.push(self.receive_order(member, receiving));
        } else if self.every(|member| member.is_whole() && member.order == own) {
            let point = receiving.transfer.point;
            if !seen.holds(point) {
                orders.push(Order::Cut(point));
            }
        }
    }

    fn receive_order(&self, member: &Member, receiving: &Receiving) -> Order {
        let from = self.of_member(member, &receiving.cursors).unwrap_or(0);
        Order::Receive { transfer: receiving.transfer, token: receiving.token, from }
    }

    /// The size that a member needs before a slot comes.
    pub(super) fn needed(&self, member: &Member, receiving: &Receiving) -> Option<u64> {
        self.of_member(member, &receiving.blocks)
    }

    /// Entry of one member in a list that is in the order of the members.
    fn of_member(&self, member: &Member, list: &[u64]) -> Option<u64> {
        let place = self.record.members.iter().position(|other| other == member);
        place.and_then(|place| list.get(place)).copied()
    }

    fn go_back(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let Some(claim) = self.record.claims.promoting else { return };
        // A fence ends what was granted, and no order: a target that opens the member next goes on with that.
        self.end_feed(seen, orders);
        if seen.fenced != self.record.fence {
            orders.push(Order::Fence(self.record.fence));
        } else if self.all(|member| member.fenced == self.record.fence)
            && self.takes_no_slots(seen)
            && seen.holds(claim.point)
            && seen.at != Some(claim.point)
        {
            orders.push(Order::Revert(claim.point));
        }
    }

    fn discard(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let record = &self.record;
        self.end_feed(seen, orders);
        if seen.fenced != record.fence {
            return orders.push(Order::Fence(record.fence));
        }
        if !self.takes_no_slots(seen) {
            return;
        }
        let all_fenced = self.all(|member| member.fenced == record.fence);
        let base = self.newest_of_both();
        let is_back = base.is_none_or(|base| seen.at == Some(base));
        let late = mutant::is("lost-kept-after-the-revert") && !is_back;
        let skips = late || mutant::is("resync-without-lost");
        if let Some(lost) = record.lost.filter(|lost| seen.lost != Some(*lost) && !skips) {
            return orders.push(Order::KeepLost(lost));
        }
        let all_kept = self.all(|member| member.lost == record.lost) || skips;
        if let Some(base) =
            base.filter(|_| all_fenced && all_kept && !is_back && self.may_discard())
        {
            orders.push(Order::Revert(base));
        }
    }

    /// Drops what was cut before the last common point. Nothing that is newer, whatever the record says of it, and
    /// nothing before pools have the role: a record of before that a recovery finds with theirs may need it.
    fn unpin(&self, seen: &Observed, orders: &mut Vec<Order>) {
        let record = &self.record;
        let is_at_rest = matches!(record.role, Role::Primary | Role::Secondary);
        let offered =
            record.points.offered.filter(|_| mutant::is("unpinned-before-the-peer-recorded"));
        let common = offered.or(record.points.common);
        let place = seen.points.iter().position(|point| Some(*point) == common);
        let is_kept = self.pools_have_it() || mutant::is("dropped-before-its-pools-have-the-role");
        let Some(place) = place.filter(|_| is_at_rest && is_kept && !record.is_unsure) else {
            return;
        };
        for point in &seen.points[..place] {
            let is_kept = record.kept().any(|kept| kept == *point) && offered.is_none();
            if !is_kept {
                orders.push(Order::Drop(*point));
            }
        }
    }

    fn make_point(&self, out: &mut Vec<Action>) {
        if let (Some(point), Some((named, None))) = (self.record.points.cutting, self.cut)
            && named == point
            && self.record.role == Role::Primary
        {
            let members = self.record.members.iter().map(|member| member.volume).collect();
            out.push(Action::MakePoint { stamp: self.stamp(), point, members });
        }
    }

    /// Sends what the other side is ready to take.
    fn ship(&self, out: &mut Vec<Action>) {
        let record = &self.record;
        let Some(word) = &self.heard else { return };
        let Some(want) = word.want.as_ref().filter(|_| record.is_own()) else { return };
        if record.points.offered != Some(want.transfer.point) {
            return;
        }
        for (member, from) in word.members.iter().zip(&want.cursors) {
            let mut transfer = want.transfer;
            transfer.base = transfer.base.filter(|_| member.has_base);
            out.push(Action::Ship {
                volume: member.volume,
                transfer,
                token: want.token,
                from: *from,
            });
        }
    }
}
