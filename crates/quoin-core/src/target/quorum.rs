//! Counting: commit, stable, the lease, and which View is active.

use std::collections::VecDeque;
use std::time::Duration;

use super::peer::{Link, Peer};
use crate::entry::{Rule, View};
use crate::ids::Lsn;
use crate::membership::{Member, REPLICAS_MAX};
use crate::mutant;
use crate::replica::CLOCK_SKEW_DIVISOR;
use crate::time::Time;

/// The Views of this epoch: the active one and those that wait to become so.
#[derive(Default)]
pub(super) struct Views {
    pub active: Option<(Lsn, View)>,
    pub pending: VecDeque<(Lsn, View)>,
}

impl Views {
    pub fn newest(&self) -> Option<&View> {
        self.pending.back().or(self.active.as_ref()).map(|(_, v)| v)
    }

    /// Where the newest View is.
    pub fn newest_at(&self) -> Lsn {
        self.pending.back().or(self.active.as_ref()).map_or(Lsn::ZERO, |(lsn, _)| *lsn)
    }

    /// Every View that is not over.
    pub fn all(&self) -> impl Iterator<Item = &View> {
        self.active.iter().chain(&self.pending).map(|(_, view)| view)
    }

    /// In the in-sync set of the active View and of every pending one.
    pub fn counts(&self, member: Member) -> bool {
        let mut all = self.active.iter().chain(&self.pending).peekable();
        all.peek().is_some() && all.all(|(_, v)| v.in_sync.contains(&member))
    }

    /// The rules that entries are counted under now: those of every View that is not over.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.active.iter().chain(&self.pending).flat_map(|(_, v)| rules_of(v))
    }

    /// Moves every View on that is durable on enough of its own in-sync set. True if one did.
    pub fn activate(&mut self, peers: &[Peer]) -> bool {
        let ready = self.pending.iter().rposition(|(lsn, view)| {
            rules_of(view).all(|rule| {
                let own = |p: &Peer| {
                    in_both(view, rule, p.member) || mutant::is("view-active-by-a-foreign-set")
                };
                count(peers, |p| p.is_live() && p.durable >= *lsn && own(p)) >= usize::from(rule.cf)
            })
        });
        let Some(index) = ready else { return false };
        self.active = self.pending.drain(..=index).next_back();
        true
    }

    /// Whether a pending View can still become active with the sessions there are. A member that
    /// waits for increments does not help: they may themselves wait for this View.
    pub fn can_activate(view: &View, peers: &[Peer]) -> bool {
        can_activate(view, peers, |p| p.link == Link::Fed)
    }

    /// The same, with sessions that have answered but are not fed yet.
    pub fn may_activate(view: &View, peers: &[Peer]) -> bool {
        can_activate(view, peers, |p| {
            p.is_live() || matches!(p.link, Link::Answered | Link::Truncating)
        })
    }

    /// Whether some rule finds fewer than CF counted members that are fed: commit and stable
    /// cannot move before one is brought back by increments.
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

/// The highest value that CF counted members have reached, under every rule. `None`: fewer than
/// CF are counted under some rule.
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

/// From the sending of the oldest needed ping, shortened for skewed clocks.
pub(super) fn held_lease(lease_ms: u32) -> Duration {
    let lease = Duration::from_millis(lease_ms.into());
    lease - lease / CLOCK_SKEW_DIVISOR
}

/// Until when replies are allowed; `None` without CF answers.
pub(super) fn lease_until(views: &Views, peers: &[Peer], lease_ms: u32) -> Option<Time> {
    reached(views, peers, |p| p.answered).map(|sent| sent + held_lease(lease_ms))
}
