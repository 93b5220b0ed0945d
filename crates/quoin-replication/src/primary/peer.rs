//! State of one replica, as its target knows it.

use std::time::Duration;

use super::bulk::Bulk;
use super::rebuild::Rebuild;
use super::rounds::Rounds;
use quoin_types::ids::Lsn;
use quoin_types::membership::Member;
use quoin_types::message::{OpenAck, RoomGrant, Takes};
use quoin_types::time::Time;

/// State of the session with a replica. Acknowledgements count in `Fed` and `Rebuilding` only:
/// those of this session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Down,
    Connecting,
    /// Open was sent.
    Opening,
    /// OpenAck was received; nothing is decided yet.
    Answered,
    /// Truncate was sent.
    Truncating,
    /// Receives every entry from `next` on.
    Fed,
    /// Receives increments until it can be fed.
    Rebuilding,
}

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);

/// Pings and their answers, which determine the lease.
#[derive(Default)]
pub(super) struct Lease {
    /// Time at which the newest answered ping was sent.
    pub answered: Option<Time>,
    pub ping_sent: Time,
    /// Time since which a ping waits for its answer.
    pub unanswered_since: Option<Time>,
    pub ping_due: bool,
}

impl Lease {
    /// Records a sent message that the replica answers with its ping.
    pub fn sent_ping(&mut self, now: Time) {
        self.ping_sent = now;
        self.unanswered_since.get_or_insert(now);
    }

    pub fn ping_answered(&mut self, sent: Time) {
        if self.answered.is_none_or(|a| a < sent) {
            self.answered = Some(sent);
        }
        self.unanswered_since = (sent < self.ping_sent).then_some(sent);
    }
}

/// Progress of a replica in the history, and of sending it.
#[derive(Default)]
pub(super) struct Progress {
    /// Next LSN to send in `Fed`.
    pub next: Lsn,
    pub applied: Lsn,
    pub durable: Lsn,
    /// End of the history when feeding began in this session.
    pub tip: Lsn,
    pub stable_told: Lsn,
    pub sync_asked: Lsn,
    /// Time since which the replica is behind without any progress.
    pub behind_since: Option<Time>,
}

/// Room in the pool of a replica.
#[derive(Default)]
pub(super) struct Room {
    /// What the pool grants in this session; `None`: it has not answered.
    pub granted: Option<RoomGrant>,
    /// Set while the pool accepts no entries.
    pub stuck: bool,
    /// Time at which entries that found no room are sent again.
    pub full_until: Option<Time>,
}

impl Room {
    /// Records what the pool grants.
    pub fn report(&mut self, granted: RoomGrant) {
        self.granted = Some(granted);
        if granted.takes == Takes::Writes {
            (self.stuck, self.full_until) = (false, None);
        }
    }

    /// The share of the replica, if its pool takes entries of this kind.
    pub fn share_of(&self, what: Takes) -> Option<u32> {
        let granted = self.granted.filter(|granted| granted.takes >= what && !self.stuck)?;
        Some(granted.share_blocks)
    }

    /// Records that the pool accepted no more entries; they are sent again at `again`.
    pub fn ran_out(&mut self, again: Time) {
        (self.stuck, self.full_until) = (true, Some(again));
    }
}

/// Reads sent to a replica.
#[derive(Default)]
pub(super) struct PeerReads {
    /// Number of reads without an answer.
    pub open: u32,
    /// Latency of the last read that it answered.
    pub took: Duration,
}

/// Time of the next session.
pub(super) struct Retry {
    pub at: Time,
    pause: Duration,
}

/// State of a replica that outlives its sessions.
#[derive(Clone, Copy, Default)]
pub(super) struct Lasting {
    /// Earliest return after a drop for slowness.
    pub return_at: Time,
    /// LSN above which the replica holds another history than the one that is served.
    pub parts_at: Option<Lsn>,
}

pub(super) struct Peer {
    pub member: Member,
    pub link: Link,
    pub nonce: u64,
    /// Time since which `link` waits for the other side.
    pub since: Time,
    pub retry: Retry,
    pub ack: Option<Box<OpenAck>>,
    pub progress: Progress,
    pub lease: Lease,
    pub reads: PeerReads,
    pub room: Room,
    pub lasting: Lasting,
    pub rebuild: Option<Rebuild>,
    pub rounds: Rounds,
    pub bulk: Bulk,
}

impl Peer {
    pub fn new(member: Member, now: Time) -> Self {
        Self {
            member,
            link: Link::Down,
            nonce: 0,
            since: now,
            retry: Retry { at: now, pause: RETRY_FIRST },
            ack: None,
            progress: Progress::default(),
            lease: Lease::default(),
            reads: PeerReads::default(),
            room: Room::default(),
            lasting: Lasting::default(),
            rebuild: None,
            rounds: Rounds::default(),
            bulk: Bulk::default(),
        }
    }

    /// Returns true if the replica has the entries up to `stable` and was not notified yet that
    /// they are stable.
    pub fn lacks_word_of(&self, stable: Lsn) -> bool {
        let progress = &self.progress;
        self.link == Link::Fed && progress.stable_told < stable && progress.next > stable
    }

    /// Returns true if acknowledgements of the replica belong to a session of this epoch whose
    /// state is known.
    pub fn is_live(&self) -> bool {
        matches!(self.link, Link::Fed | Link::Rebuilding)
    }

    /// Updates the positions that the replica reports; `last`: the end of the history.
    pub fn has_reached(&mut self, now: Time, applied: Lsn, durable: Lsn, last: Lsn) {
        let progress = &mut self.progress;
        progress.durable = progress.durable.max(durable);
        if applied > progress.applied {
            progress.applied = applied;
            progress.behind_since = (applied < last).then_some(now);
            self.room.stuck = false;
            // Progress resets the pause between attempts. A replica that answers and then fails
            // each time (with a full pool, for example) does not: each attempt costs a sync of its
            // promise.
            self.retry.pause = RETRY_FIRST;
        }
    }

    /// Ends the session; the next attempt waits longer than the last one did.
    pub fn down(&mut self, now: Time) {
        let pause = self.retry.pause;
        let fresh = Peer::new(self.member, now);
        let retry = Retry { at: now + pause, pause: (pause * 2).min(RETRY_LAST) };
        let rounds = std::mem::take(&mut self.rounds);
        *self = Peer { retry, lasting: self.lasting, rounds, ..fresh };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ping_that_was_answered_late_leaves_the_newer_one_unanswered() {
        let at = Time::from_millis;
        let mut lease = Lease::default();
        lease.sent_ping(at(10));
        lease.sent_ping(at(20));
        assert_eq!(lease.unanswered_since, Some(at(10)));
        lease.ping_answered(at(10));
        assert_eq!((lease.answered, lease.unanswered_since), (Some(at(10)), Some(at(10))));
        lease.ping_answered(at(20));
        assert_eq!((lease.answered, lease.unanswered_since), (Some(at(20)), None));
        lease.ping_answered(at(10));
        assert_eq!(lease.answered, Some(at(20)), "an answer that was overtaken");
    }

    #[test]
    fn sessions_that_end_without_progress_follow_each_other_ever_more_slowly() {
        let at = Time::from_millis;
        let mut peer = Peer::new(Member::default(), at(0));
        let mut pauses = Vec::new();
        for n in 0..9 {
            if n == 8 {
                peer.has_reached(at(0), Lsn(5), Lsn(4), Lsn(5));
            }
            peer.down(at(0));
            pauses.push(peer.retry.at);
        }
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 5000, 50].map(at));
        assert_eq!(peer.progress.applied, Lsn::ZERO, "where it stands is for it to say anew");
    }

    #[test]
    fn a_replica_that_applied_more_has_room_and_is_behind_since_then_if_it_lacks_more() {
        let at = Time::from_millis;
        let mut peer = Peer::new(Member::default(), at(0));
        peer.progress.behind_since = Some(at(1));
        peer.room.ran_out(at(500));
        peer.has_reached(at(2), Lsn(0), Lsn(0), Lsn(9));
        assert_eq!((peer.progress.behind_since, peer.room.stuck), (Some(at(1)), true));
        peer.has_reached(at(3), Lsn(5), Lsn(4), Lsn(9));
        assert_eq!((peer.progress.applied, peer.progress.durable), (Lsn(5), Lsn(4)));
        assert_eq!((peer.progress.behind_since, peer.room.stuck), (Some(at(3)), false));
        assert_eq!(peer.room.full_until, Some(at(500)), "they are offered when that was said");
        peer.has_reached(at(4), Lsn(9), Lsn(3), Lsn(9));
        assert_eq!((peer.progress.behind_since, peer.progress.durable), (None, Lsn(4)));
        assert_eq!(peer.room.share_of(Takes::Holes), None, "its pool has not told any room yet");
        let holes = RoomGrant { takes: Takes::Holes, share_blocks: 9 };
        peer.room.report(holes);
        assert!(peer.room.full_until.is_some());
        assert_eq!(peer.room.share_of(Takes::Holes), Some(9));
        assert_eq!(peer.room.share_of(Takes::Writes), None);
        peer.room.report(RoomGrant { takes: Takes::Writes, ..holes });
        assert!(peer.room.full_until.is_none());
        assert_eq!(peer.room.share_of(Takes::Writes), Some(9));
        peer.room.ran_out(at(900));
        assert_eq!(peer.room.share_of(Takes::Holes), None, "it takes nothing");
    }

    #[test]
    fn stable_is_sent_once_and_only_to_replicas_that_have_the_entries() {
        let mut peer = Peer::new(Member::default(), Time::ZERO);
        (peer.progress.next, peer.progress.stable_told) = (Lsn(11), Lsn(4));
        assert!(!peer.lacks_word_of(Lsn(10)), "it is not fed");
        peer.link = Link::Fed;
        assert!(peer.lacks_word_of(Lsn(10)));
        assert!(!peer.lacks_word_of(Lsn(11)), "it was not sent that");
        assert!(!peer.lacks_word_of(Lsn(4)), "it knows");
    }
}
