//! Counting: commit, stable, the lease, and the active View.

use std::collections::VecDeque;
use std::time::Duration;

use super::peer::{Link, Peer};
use crate::replica::CLOCK_SKEW_DIVISOR;
use quoin_types::entry::{Rule, View};
use quoin_types::ids::Lsn;
use quoin_types::membership::{Member, REPLICAS_MAX};
use quoin_types::mutant;
use quoin_types::time::Time;

/// The Views of this epoch: the active one and those that are pending.
#[derive(Default)]
pub(super) struct Views {
    pub active: Option<(Lsn, View)>,
    pub pending: VecDeque<(Lsn, View)>,
}

impl Views {
    pub fn newest(&self) -> Option<&View> {
        self.pending.back().or(self.active.as_ref()).map(|(_, v)| v)
    }

    /// LSN of the newest View.
    pub fn newest_at(&self) -> Lsn {
        self.pending.back().or(self.active.as_ref()).map_or(Lsn::ZERO, |(lsn, _)| *lsn)
    }

    /// Every View that is not over.
    pub fn all(&self) -> impl Iterator<Item = &View> {
        self.active.iter().chain(&self.pending).map(|(_, view)| view)
    }

    /// Returns true for a member of the in-sync set of the active View and of every pending one.
    pub fn counts(&self, member: Member) -> bool {
        let mut all = self.active.iter().chain(&self.pending).peekable();
        all.peek().is_some() && all.all(|(_, v)| v.in_sync.contains(&member))
    }

    /// The rules that entries are counted under now: those of every View that is not over.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.active.iter().chain(&self.pending).flat_map(|(_, v)| rules_of(v))
    }

    /// Activates the newest View that is durable on enough of its own in-sync set. Returns true if
    /// one became active.
    pub fn activate(&mut self, peers: &[Peer]) -> bool {
        let ready = self.pending.iter().rposition(|(lsn, view)| {
            rules_of(view).all(|rule| {
                let own = |p: &Peer| {
                    in_both(view, rule, p.member) || mutant::is("view-active-by-a-foreign-set")
                };
                count(peers, |p| p.is_live() && p.progress.durable >= *lsn && own(p))
                    >= usize::from(rule.cf)
            })
        });
        let Some(index) = ready else { return false };
        self.active = self.pending.drain(..=index).next_back();
        true
    }

    /// Returns true if a pending View can still become active with the present sessions. A member
    /// that waits for increments does not help: they may themselves wait for this View.
    pub fn can_activate(view: &View, peers: &[Peer]) -> bool {
        can_activate(view, peers, |p| p.link == Link::Fed)
    }

    /// Same as [`Self::can_activate`], including sessions that have answered but are not fed yet.
    pub fn may_activate(view: &View, peers: &[Peer]) -> bool {
        can_activate(view, peers, |p| {
            p.is_live() || matches!(p.link, Link::Answered | Link::Truncating)
        })
    }

    /// The largest CF that entries are counted under now.
    pub fn consistency_factor(&self) -> usize {
        self.rules().map(|rule| usize::from(rule.cf)).max().unwrap_or(1)
    }

    /// Returns true if some rule finds fewer than CF counted members that are fed: commit and
    /// stable cannot move before increments bring one back.
    pub fn short(&self, peers: &[Peer]) -> bool {
        let fed = |p: &Peer| p.link == Link::Fed && self.counts(p.member);
        self.rules().any(|rule| {
            count(peers, |p| fed(p) && rule.known.contains(&p.member)) < usize::from(rule.cf)
        })
    }
}

pub(super) fn rules_of(view: &View) -> impl Iterator<Item = &Rule> {
    std::iter::once(&view.rule).chain(&view.joint)
}

fn in_both(view: &View, rule: &Rule, member: Member) -> bool {
    view.in_sync.contains(&member) && rule.known.contains(&member)
}

fn can_activate(view: &View, peers: &[Peer], usable: impl Fn(&Peer) -> bool) -> bool {
    rules_of(view).all(|rule| {
        count(peers, |p| usable(p) && in_both(view, rule, p.member)) >= usize::from(rule.cf)
    })
}

pub(super) fn count(peers: &[Peer], what: impl Fn(&Peer) -> bool) -> usize {
    peers.iter().filter(|p| what(p)).count()
}

/// Returns the highest value that CF counted members have reached, under every rule. `None`: some
/// rule counts fewer than CF.
pub(super) fn reached<V: Ord + Copy + Default>(
    views: &Views,
    peers: &[Peer],
    value: impl Fn(&Peer) -> Option<V>,
) -> Option<V> {
    let mut lowest: Option<V> = None;
    let mut any_rule = false;
    for rule in views.rules() {
        any_rule = true;
        let mut values = [V::default(); REPLICAS_MAX * 2];
        let mut n = 0;
        for peer in peers {
            if peer.is_live()
                && rule.known.contains(&peer.member)
                && (views.counts(peer.member) || mutant::is("dropped-acks-counted"))
                && let Some(v) = value(peer)
                && n < values.len()
            {
                values[n] = v;
                n += 1;
            }
        }
        let cf = usize::from(rule.cf);
        if n < cf {
            return None;
        }
        values[..n].sort_unstable();
        let v = values[n - cf];
        lowest = Some(lowest.map_or(v, |l| l.min(v)));
    }
    lowest.filter(|_| any_rule)
}

/// Verifies the basis of a reply by an independent count, member by member and rule by rule: commit
/// is with CF counted members, and so is a live lease.
///
/// # Panics
/// If it is not: the reply must not be sent.
pub(super) fn assert_answerable(
    views: &Views,
    peers: &[Peer],
    commit: Lsn,
    now: Time,
    lease_ms: u32,
) {
    let held = |p: &Peer| p.progress.applied >= commit;
    let leased = |p: &Peer| p.lease.answered.is_some_and(|sent| now < sent + held_lease(lease_ms));
    for rule in views.rules() {
        let counts =
            |p: &Peer| p.is_live() && rule.known.contains(&p.member) && views.counts(p.member);
        let cf = usize::from(rule.cf);
        let (mut holding, mut holding_leases, mut others_hold) = (0, 0, false);
        for peer in peers {
            let counts = counts(peer);
            holding += usize::from(counts && held(peer));
            holding_leases += usize::from(counts && leased(peer));
            others_hold |= !counts && held(peer);
        }
        // A member that is not counted made up the number, or a member that is counted again lacks
        // entries committed while it was away.
        assert!(holding >= cf || !others_hold, "DroppedNotCounted");
        assert!(holding >= cf, "Held");
        assert!(holding_leases >= cf, "LeaseExcludes");
    }
}

/// Duration of the lease from the sending of the oldest needed ping, shortened for skewed clocks.
pub(super) fn held_lease(lease_ms: u32) -> Duration {
    let lease = Duration::from_millis(lease_ms.into());
    lease - lease / CLOCK_SKEW_DIVISOR
}

/// Time until which replies are allowed; `None` without CF answers.
pub(super) fn lease_until(views: &Views, peers: &[Peer], lease_ms: u32) -> Option<Time> {
    reached(views, peers, |p| p.lease.answered).map(|sent| sent + held_lease(lease_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};

    fn member(id: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(id) }
    }

    fn members(ids: &[u128]) -> Vec<Member> {
        ids.iter().copied().map(member).collect()
    }

    fn rule(cf: u8, known: &[u128]) -> Rule {
        let rf = known.len() as u8;
        Rule { membership_version: 1, rf, cf, known: members(known) }
    }

    fn view(cf: u8, known: &[u128], in_sync: &[u128]) -> View {
        View { in_sync: members(in_sync), rule: rule(cf, known), ..View::default() }
    }

    /// A fed peer with so many entries applied and durable.
    fn peer(id: u128, applied: u64, durable: u64) -> Peer {
        let mut peer = Peer::new(member(id), Time::ZERO);
        peer.link = Link::Fed;
        (peer.progress.applied, peer.progress.durable) = (Lsn(applied), Lsn(durable));
        peer
    }

    fn applied(views: &Views, peers: &[Peer]) -> Option<u64> {
        reached(views, peers, |p| Some(p.progress.applied)).map(|lsn| lsn.0)
    }

    fn active(view: View) -> Views {
        Views { active: Some((Lsn(1), view)), ..Views::default() }
    }

    #[test]
    fn the_reached_value_is_held_by_the_required_number_of_counted_members() {
        let views = active(view(2, &[1, 2, 3], &[1, 2, 3]));
        let mut peers = vec![peer(1, 30, 0), peer(2, 20, 0), peer(3, 10, 0)];
        assert_eq!(applied(&views, &peers), Some(20));
        assert_eq!(applied(&active(view(1, &[1, 2, 3], &[1, 2, 3])), &peers), Some(30));
        assert_eq!(applied(&active(view(3, &[1, 2, 3], &[1, 2, 3])), &peers), Some(10));
        assert_eq!(applied(&active(view(2, &[1, 2, 3], &[1, 3])), &peers), Some(10));
        assert_eq!(applied(&active(view(2, &[1, 3], &[1, 2, 3])), &peers), Some(10));
        assert_eq!(applied(&active(view(2, &[1, 2, 3], &[1])), &peers), None);
        assert_eq!(applied(&Views::default(), &peers), None, "there is no rule");
        peers[1].link = Link::Truncating;
        assert_eq!(applied(&views, &peers), Some(10), "it is not known where it stands");
        peers[2].link = Link::Down;
        assert_eq!(applied(&views, &peers), None);
    }

    #[test]
    fn every_rule_of_every_view_that_is_not_over_must_be_content() {
        let peers = [peer(1, 30, 0), peer(2, 20, 0), peer(3, 10, 0)];
        let mut joint = view(2, &[1, 2], &[1, 2, 3]);
        joint.joint = Some(rule(3, &[1, 2, 3]));
        assert_eq!(applied(&active(joint.clone()), &peers), Some(10));
        let mut views = active(view(2, &[1, 2], &[1, 2]));
        assert_eq!(applied(&views, &peers), Some(20));
        views.pending.push_back((Lsn(9), joint));
        assert_eq!(applied(&views, &peers), None, "3 is not counted before the View is active");
        assert_eq!(views.consistency_factor(), 3);
    }

    #[test]
    fn a_view_becomes_active_by_its_own_in_sync_set_on_media_and_ends_those_before_it() {
        let mut views = active(view(2, &[1, 2, 3], &[1, 2, 3]));
        views.pending.push_back((Lsn(5), view(2, &[1, 2, 3], &[1, 2])));
        views.pending.push_back((Lsn(7), view(2, &[1, 2, 3], &[1, 3])));
        let mut peers = [peer(1, 9, 9), peer(2, 9, 9), peer(3, 9, 6)];
        peers[1].link = Link::Down;
        assert!(!views.activate(&peers), "one of each is not enough");
        peers[2].progress.durable = Lsn(7);
        assert!(views.activate(&peers));
        assert_eq!((views.newest_at(), views.pending.len()), (Lsn(7), 0));
        assert!(views.counts(member(3)) && !views.counts(member(2)));
    }

    #[test]
    fn a_view_can_become_active_with_those_that_are_fed_and_may_with_those_that_will_be() {
        let wanted = view(2, &[1, 2, 3], &[1, 2]);
        let mut peers = [peer(1, 0, 0), peer(2, 0, 0), peer(3, 0, 0)];
        assert!(Views::can_activate(&wanted, &peers) && Views::may_activate(&wanted, &peers));
        for (link, may) in [
            (Link::Rebuilding, true),
            (Link::Truncating, true),
            (Link::Answered, true),
            (Link::Opening, false),
            (Link::Down, false),
        ] {
            peers[1].link = link;
            assert!(!Views::can_activate(&wanted, &peers), "{link:?}");
            assert_eq!(Views::may_activate(&wanted, &peers), may, "{link:?}");
        }
    }

    #[test]
    fn a_volume_is_short_where_some_rule_finds_too_few_fed_members_that_count() {
        let views = active(view(2, &[1, 2, 3], &[1, 2]));
        let mut peers = [peer(1, 0, 0), peer(2, 0, 0), peer(3, 0, 0)];
        assert!(!views.short(&peers));
        peers[1].link = Link::Rebuilding;
        assert!(views.short(&peers), "the third does not count");
        assert!(active(view(2, &[1, 3], &[1, 2, 3])).short(&peers[..2]), "nor one unknown");
    }

    #[test]
    fn a_lease_counts_from_the_oldest_needed_ping_less_the_skew_of_clocks() {
        let views = active(view(2, &[1, 2, 3], &[1, 2, 3]));
        let mut peers = [peer(1, 0, 0), peer(2, 0, 0), peer(3, 0, 0)];
        assert_eq!(lease_until(&views, &peers, 2000), None);
        peers[0].lease.ping_answered(Time::from_millis(500));
        assert_eq!(lease_until(&views, &peers, 2000), None);
        peers[1].lease.ping_answered(Time::from_millis(300));
        assert_eq!(lease_until(&views, &peers, 2000), Some(Time::from_millis(2200)));
        peers[1].lease.ping_answered(Time::from_millis(100));
        assert_eq!(lease_until(&views, &peers, 2000), Some(Time::from_millis(2200)), "older");
        peers[2].lease.ping_answered(Time::from_millis(400));
        assert_eq!(lease_until(&views, &peers, 2000), Some(Time::from_millis(2300)));
        peers[2].lease.ping_answered(Time::from_millis(600));
        assert_eq!(lease_until(&views, &peers, 2000), Some(Time::from_millis(2400)));
    }

    /// Message of the assertion before a reply, for two of three that count.
    fn refused(cf: u8, third_counts: bool, applied: [u64; 3], answered_ms: [u64; 3]) -> String {
        let in_sync: &[u128] = if third_counts { &[1, 2, 3] } else { &[1, 2] };
        let views = active(view(cf, &[1, 2, 3], in_sync));
        let mut peers = [0, 1, 2].map(|i| peer(i as u128 + 1, applied[i], 0));
        for (peer, ms) in peers.iter_mut().zip(answered_ms) {
            peer.lease.answered = Some(Time::from_millis(ms));
        }
        let now = Time::from_millis(10_000);
        let said = std::panic::catch_unwind(|| {
            assert_answerable(&views, &peers, Lsn(5), now, 4000);
        });
        said.err().map_or(String::new(), |said| (*said.downcast::<&str>().unwrap()).to_owned())
    }

    #[test]
    fn no_reply_goes_out_that_too_few_counted_members_hold_or_lease() {
        let fresh = [9_000; 3];
        assert_eq!(refused(2, true, [5, 5, 0], fresh), "");
        assert_eq!(refused(2, false, [5, 0, 5], fresh), "DroppedNotCounted");
        assert_eq!(refused(2, true, [5, 4, 4], fresh), "Held");
        assert_eq!(refused(2, true, [5, 5, 5], [9_000, 5_000, 5_000]), "LeaseExcludes");
        assert_eq!(refused(2, false, [5, 5, 5], [9_000, 5_000, 9_000]), "LeaseExcludes");
    }
}
