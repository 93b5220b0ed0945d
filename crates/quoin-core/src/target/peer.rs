//! What a target knows of one replica.

use std::time::Duration;

use super::bulk::Bulk;
use super::rebuild::Rebuild;
use super::rounds::Rounds;
use crate::ids::Lsn;
use crate::membership::Member;
use crate::message::OpenAck;
use crate::time::Time;

/// Where the session with a replica stands. Acknowledgements count in `Fed` and `Rebuilding`
/// only: those of this session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Down,
    Connecting,
    /// Open sent.
    Opening,
    /// OpenAck here, nothing decided yet.
    Answered,
    /// Truncate sent.
    Truncating,
    /// Receives every entry from `next` on.
    Fed,
    /// Receives increments until it can be fed.
    Rebuilding,
}

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);

pub(super) struct Peer {
    pub member: Member,
    pub link: Link,
    pub nonce: u64,
    pub ack: Option<Box<OpenAck>>,
    /// Next LSN to send in `Fed`.
    pub next: Lsn,
    pub applied: Lsn,
    pub durable: Lsn,
    /// The history's end when this session began to be fed.
    pub tip: Lsn,
    /// When the newest answered ping was sent.
    pub answered: Option<Time>,
    pub ping_sent: Time,
    /// Since when a ping has been waiting for its answer.
    pub unanswered_since: Option<Time>,
    /// When `link` began to wait for the other side.
    pub since: Time,
    pub ping_due: bool,
    pub stable_told: Lsn,
    pub sync_asked: Lsn,
    pub reads: u32,
    /// How long the last read that it answered took.
    pub read_took: Duration,
    pub retry_at: Time,
    retry: Duration,
    /// Since when it is behind without any progress.
    pub behind_since: Option<Time>,
    /// Dropped for slowness: no return before this.
    pub return_at: Time,
    /// Above this it holds another history than the one that is served.
    pub parts_at: Option<Lsn>,
    pub rebuild: Option<Rebuild>,
    pub rounds: Rounds,
    /// Its pool is short of room.
    pub short: bool,
    /// Its pool took no more, and nothing since.
    pub stuck: bool,
    /// Entries that found no room are offered again then.
    pub full_until: Option<Time>,
    /// It knows how to be verified.
    pub verifies: bool,
    pub bulk: Bulk,
}

impl Peer {
    /// Whether it has the entries up to `stable` and was not told yet that they are.
    pub fn lacks_word_of(&self, stable: Lsn) -> bool {
        self.link == Link::Fed && self.stable_told < stable && self.next > stable
    }

    pub fn new(member: Member, now: Time) -> Self {
        Self {
            member,
            link: Link::Down,
            nonce: 0,
            ack: None,
            next: Lsn::ZERO,
            applied: Lsn::ZERO,
            durable: Lsn::ZERO,
            tip: Lsn::ZERO,
            answered: None,
            ping_sent: Time::ZERO,
            unanswered_since: None,
            since: now,
            ping_due: false,
            stable_told: Lsn::ZERO,
            sync_asked: Lsn::ZERO,
            reads: 0,
            read_took: Duration::ZERO,
            retry_at: now,
            retry: RETRY_FIRST,
            behind_since: None,
            return_at: Time::ZERO,
            parts_at: None,
            rebuild: None,
            rounds: Rounds::default(),
            short: false,
            stuck: false,
            full_until: None,
            verifies: false,
            bulk: Bulk::new(false),
        }
    }

    /// Its acknowledgements belong to a session of this epoch that knows where it stands.
    pub fn is_live(&self) -> bool {
        matches!(self.link, Link::Fed | Link::Rebuilding)
    }

    /// A message that the replica answers with its ping was sent.
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

    /// The session is over; the next attempt waits longer than the last one did.
    pub fn down(&mut self, now: Time) {
        let fresh = Peer::new(self.member, now);
        let (retry, return_at, parts_at) = (self.retry, self.return_at, self.parts_at);
        let rounds = std::mem::take(&mut self.rounds);
        *self = fresh;
        self.rounds = rounds;
        self.parts_at = parts_at;
        self.retry_at = now + retry;
        self.retry = (retry * 2).min(RETRY_LAST);
        self.return_at = return_at;
    }

    /// Attempts follow each other quickly again: one that answers and then fails each time (a
    /// full pool does) is not worth a sync of its promise every few milliseconds.
    pub fn made_progress(&mut self) {
        self.retry = RETRY_FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ping_that_was_answered_late_leaves_the_newer_one_unanswered() {
        let at = Time::from_millis;
        let mut peer = Peer::new(Member::default(), at(0));
        peer.sent_ping(at(10));
        peer.sent_ping(at(20));
        assert_eq!(peer.unanswered_since, Some(at(10)));
        peer.ping_answered(at(10));
        assert_eq!((peer.answered, peer.unanswered_since), (Some(at(10)), Some(at(10))));
        peer.ping_answered(at(20));
        assert_eq!((peer.answered, peer.unanswered_since), (Some(at(20)), None));
        peer.ping_answered(at(10));
        assert_eq!(peer.answered, Some(at(20)), "an answer that was overtaken");
    }

    #[test]
    fn what_is_stable_is_told_once_and_only_to_those_that_have_it() {
        let mut peer = Peer::new(Member::default(), Time::ZERO);
        (peer.next, peer.stable_told) = (Lsn(11), Lsn(4));
        assert!(!peer.lacks_word_of(Lsn(10)), "it is not fed");
        peer.link = Link::Fed;
        assert!(peer.lacks_word_of(Lsn(10)));
        assert!(!peer.lacks_word_of(Lsn(11)), "it was not sent that");
        assert!(!peer.lacks_word_of(Lsn(4)), "it knows");
    }
}
