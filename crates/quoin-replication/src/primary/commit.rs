//! Commit and stable, and the times since which they lag.
//!
//! An entry is committed once CF counted members have applied it and stable once they have it on
//! media, under every rule of every View that is not over ([`quorum`](super::quorum)). The syncs of
//! flushes are requested here; a write with FUA, and each under `durability: media`, is synced by
//! its replica unasked.

use std::time::Duration;

use super::peer::Peer;
use super::quorum::{self, Views};
use super::serve::PATIENCE;
use super::wait_reason::WaitReason;
use quoin_types::entry::Rule;
use quoin_types::ids::Lsn;
use quoin_types::message::Takes;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Delay before replicas are notified that everything is stable, if no entry follows. An entry that
/// follows carries stable itself. A frame to each replica after each of a series of single writes
/// would cost as much as the writes.
const TELL_AFTER: Duration = Duration::from_millis(20);

#[derive(Default)]
pub(super) struct Commit {
    pub views: Views,
    /// LSN of this epoch's first View.
    pub first_view: Lsn,
    /// Entries up to here are committed.
    pub lsn: Lsn,
    /// Entries up to here are stable.
    pub stable: Lsn,
    /// Set while commit is held by CF counted members (Held).
    pub held: bool,
    unstable_since: Option<Time>,
    settled_since: Option<Time>,
    /// LSN up to which a sync is requested.
    sync_wanted: Lsn,
    /// Time since which fewer than CF counted members hold commit.
    pub quorum_lost: Option<Time>,
}

impl Commit {
    /// Ends the epoch. Commit and stable are kept: the next epoch must not fall behind them.
    pub fn end_epoch(&mut self) {
        self.views = Views::default();
        self.held = false;
    }

    /// Called when the first View is active: everything before it is committed and stable.
    pub fn start(&mut self) {
        (self.lsn, self.stable) = (self.first_view, self.first_view);
    }

    /// Updates commit and stable from the progress of the replicas; `last`: the end of the history.
    ///
    /// # Panics
    /// If commit falls behind the first View, or stable runs ahead of commit.
    pub fn advance(&mut self, now: Time, peers: &[Peer], last: Lsn) {
        let applied = quorum::reached(&self.views, peers, |p| Some(p.progress.applied));
        let durable = quorum::reached(&self.views, peers, |p| Some(p.progress.durable));
        self.held = applied.is_some_and(|a| a >= self.lsn);
        if let Some(applied) = applied {
            self.lsn = self.lsn.max(applied);
        }
        if let Some(durable) = durable {
            self.stable = self.stable.max(durable.min(self.lsn));
        }
        if mutant::is("stable-told-at-commit") {
            self.stable = self.lsn;
        }
        assert!(self.lsn >= self.first_view, "CommitSurvives");
        assert!(self.stable <= self.lsn, "StableSurvives");
        if self.stable >= last {
            self.unstable_since = None;
            self.settled_since.get_or_insert(now);
        } else {
            self.unstable_since.get_or_insert(now);
            self.settled_since = None;
        }
    }

    pub fn lease_until(&self, peers: &[Peer], lease_ms: u32) -> Option<Time> {
        quorum::lease_until(&self.views, peers, lease_ms)
    }

    /// Returns true if the quorum has been lost for at least `long`.
    pub fn is_lost_for(&self, now: Time, long: Duration) -> bool {
        self.quorum_lost.is_some_and(|since| now >= since + long)
    }

    /// Returns the reason to wait if a rule counts fewer than its CF. Of several rules (a change of
    /// membership is under way) it is that of the one that lacks the most.
    pub fn short_of(&self, peers: &[Peer]) -> Option<WaitReason> {
        let counts = |p: &Peer| p.is_live() && self.views.counts(p.member);
        let counted =
            |rule: &Rule| quorum::count(peers, |p| counts(p) && rule.known.contains(&p.member));
        let short = self.views.rules().map(|rule| (counted(rule), rule));
        let short = short.filter(|(counted, rule)| *counted < usize::from(rule.cf));
        let (counted, Rule { rf, cf, known, .. }) =
            short.max_by_key(|(counted, rule)| usize::from(rule.cf) - counted)?;
        let changing = self.views.rules().any(|rule| rule.cf != *cf || rule.known != *known);
        Some(WaitReason::Quorum { counted, rf: *rf, cf: *cf, changing })
    }

    /// Returns true if some rule has fewer than CF counted members whose pools take entries of this
    /// kind.
    pub fn is_short_of(&self, what: Takes, peers: &[Peer]) -> bool {
        let counted = quorum::reached(&self.views, peers, |_| Some(()));
        let roomy = |p: &Peer| p.room.share_of(what).map(drop);
        counted.is_some() && quorum::reached(&self.views, peers, roomy).is_none()
    }

    /// Requests that entries up to `lsn` be on media.
    pub fn want_sync(&mut self, lsn: Lsn) {
        self.sync_wanted = self.sync_wanted.max(lsn);
    }

    /// Replaces the requests of an older epoch when IO starts.
    pub fn want_sync_only(&mut self, lsn: Lsn) {
        self.sync_wanted = lsn;
    }

    /// Returns the LSN up to which replicas are to sync. A sync starts by itself after the time
    /// `after`, or if `is_much` (enough bytes are not on media).
    pub fn sync_due(
        &mut self,
        now: Time,
        last: Lsn,
        after: Duration,
        is_much: bool,
    ) -> Option<Lsn> {
        let due = self.unstable_since.is_some_and(|since| now >= since + after) || is_much;
        if self.stable < last && due && self.sync_wanted <= self.stable {
            self.sync_wanted = last;
        }
        (self.sync_wanted > self.stable).then_some(self.sync_wanted)
    }

    /// Time of the next action if no event occurs.
    pub fn due(&self, now: Time, peers: &[Peer], sync_after: Duration) -> Option<Time> {
        let lost = self.quorum_lost.map(|since| (since + PATIENCE).max(now + PATIENCE / 2));
        [self.sync_at(sync_after), self.tell_at(peers), lost].into_iter().flatten().min()
    }

    /// Time at which a sync starts by itself.
    fn sync_at(&self, after: Duration) -> Option<Time> {
        let none_wanted = self.sync_wanted <= self.stable;
        self.unstable_since.filter(|_| none_wanted).map(|since| since + after)
    }

    /// Time at which the remaining replicas are notified that everything is stable.
    pub fn tell_at(&self, peers: &[Peer]) -> Option<Time> {
        let at = self.settled_since? + TELL_AFTER;
        peers.iter().any(|peer| peer.lacks_word_of(self.stable)).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::primary::peer::Link;
    use quoin_types::entry::View;
    use quoin_types::ids::{ReplicaGuid, ReplicaId};
    use quoin_types::membership::Member;
    use quoin_types::message::RoomGrant;

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    fn member(id: u128) -> Member {
        Member { id: ReplicaId(id), guid: ReplicaGuid(id) }
    }

    /// Commit for two of three replicas, with the first View at 3.
    fn commit() -> Commit {
        let known = vec![member(1), member(2), member(3)];
        let rule = Rule { membership_version: 1, rf: 3, cf: 2, known: known.clone() };
        let view = View { in_sync: known, rule, ..View::default() };
        let views = Views { active: Some((Lsn(3), view)), ..Views::default() };
        let mut commit = Commit { views, first_view: Lsn(3), ..Commit::default() };
        commit.start();
        commit
    }

    fn peers(reached: [(u64, u64); 3]) -> Vec<Peer> {
        let peers = reached.into_iter().zip(1..).map(|((applied, durable), id)| {
            let mut peer = Peer::new(member(id), at(0));
            peer.link = Link::Fed;
            (peer.progress.applied, peer.progress.durable) = (Lsn(applied), Lsn(durable));
            peer.progress.next = Lsn(applied + 1);
            peer
        });
        peers.collect()
    }

    #[test]
    fn commit_and_stable_follow_the_quorum_and_never_go_back() {
        let mut commit = commit();
        commit.advance(at(1), &peers([(9, 7), (8, 8), (4, 4)]), Lsn(9));
        assert_eq!((commit.lsn, commit.stable, commit.held), (Lsn(8), Lsn(7), true));
        commit.advance(at(2), &peers([(9, 9), (5, 5), (4, 4)]), Lsn(9));
        assert_eq!((commit.lsn, commit.stable, commit.held), (Lsn(8), Lsn(7), false));
        commit.end_epoch();
        assert_eq!((commit.lsn, commit.stable, commit.held), (Lsn(8), Lsn(7), false));
    }

    #[test]
    fn a_sync_is_due_when_it_is_wanted_or_entries_were_unstable_for_long_or_are_many() {
        let after = Duration::from_millis(10);
        let mut commit = commit();
        commit.advance(at(5), &peers([(9, 3), (9, 3), (3, 3)]), Lsn(9));
        assert_eq!(commit.sync_due(at(14), Lsn(9), after, false), None);
        assert_eq!(commit.sync_at(after), Some(at(15)));
        commit.want_sync(Lsn(6));
        commit.want_sync(Lsn(5));
        assert_eq!(commit.sync_due(at(14), Lsn(9), after, false), Some(Lsn(6)));
        assert_eq!(commit.sync_at(after), None, "one is under way");
        commit.advance(at(15), &peers([(9, 6), (9, 6), (3, 3)]), Lsn(9));
        assert_eq!(commit.sync_due(at(15), Lsn(9), after, false), Some(Lsn(9)));
        commit.advance(at(16), &peers([(9, 9), (9, 9), (3, 3)]), Lsn(9));
        assert_eq!(commit.sync_due(at(99), Lsn(9), after, true), None, "all is stable");
        commit.advance(at(20), &peers([(9, 9), (9, 9), (3, 3)]), Lsn(11));
        assert_eq!(commit.sync_due(at(20), Lsn(11), after, true), Some(Lsn(11)));
    }

    #[test]
    fn replicas_are_notified_some_time_after_everything_is_stable() {
        let mut commit = commit();
        let mut all = peers([(9, 9), (9, 9), (9, 9)]);
        commit.advance(at(1), &all, Lsn(10));
        assert_eq!(commit.tell_at(&all), None, "an entry has followed");
        commit.advance(at(2), &all, Lsn(9));
        commit.advance(at(7), &all, Lsn(9));
        assert_eq!(commit.tell_at(&all), Some(at(2) + TELL_AFTER));
        for peer in &mut all {
            peer.progress.stable_told = Lsn(9);
        }
        assert_eq!(commit.tell_at(&all), None);
    }

    #[test]
    fn a_volume_is_short_of_replicas_or_of_room_where_fewer_than_a_quorum_are_left() {
        let commit = commit();
        let mut peers = peers([(9, 9); 3]);
        peers[0].link = Link::Down;
        assert_eq!(commit.short_of(&peers), None);
        for peer in &mut peers {
            peer.room.report(RoomGrant::UNBOUNDED);
        }
        peers[1].room.report(RoomGrant { takes: Takes::Holes, ..RoomGrant::UNBOUNDED });
        assert!(commit.is_short_of(Takes::Writes, &peers));
        peers[0].link = Link::Fed;
        assert!(!commit.is_short_of(Takes::Writes, &peers), "two have room");
        peers[0].room.stuck = true;
        assert!(commit.is_short_of(Takes::Writes, &peers));
        (peers[0].link, peers[1].link) = (Link::Down, Link::Truncating);
        let short = WaitReason::Quorum { counted: 1, rf: 3, cf: 2, changing: false };
        assert_eq!(commit.short_of(&peers), Some(short));
        assert!(!commit.is_short_of(Takes::Writes, &peers), "it is short of replicas");
    }

    #[test]
    fn a_quorum_counts_as_lost_for_long_only_after_that_time() {
        let mut commit = commit();
        assert!(!commit.is_lost_for(at(99), Duration::ZERO));
        commit.quorum_lost = Some(at(10));
        assert_eq!(commit.due(at(11), &[], Duration::ZERO), Some(at(10) + PATIENCE));
        let late = at(10) + PATIENCE;
        assert_eq!(commit.due(late, &[], Duration::ZERO), Some(late + PATIENCE / 2));
        let long = Duration::from_millis(5);
        assert!(!commit.is_lost_for(at(14), long) && commit.is_lost_for(at(15), long));
    }
}
