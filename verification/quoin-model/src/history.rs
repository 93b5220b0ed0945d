//! Arithmetic on the tree of histories.

use crate::state::{Attempt, Entry, MARKED_VIEW, Place, State, WRITE};

pub const EMPTY: Place = Place { attempt: 0, count: 0 };

impl State {
    /// Length of a history: the LSN of its last entry.
    pub fn lsn(&self, at: Place) -> u8 {
        if at.attempt == 0 { 0 } else { self.attempt(at.attempt).start + at.count }
    }

    /// The first `lsn` entries of a history that has at least as many.
    pub fn prefix(&self, mut of: Place, lsn: u8) -> Place {
        while of.attempt != 0 {
            let attempt = self.attempt(of.attempt);
            if lsn > attempt.start {
                return Place { attempt: of.attempt, count: lsn - attempt.start };
            }
            of = attempt.base;
        }
        EMPTY
    }

    /// Returns true if `history` begins with all of `part`.
    pub fn contains(&self, history: Place, part: Place) -> bool {
        let lsn = self.lsn(part);
        lsn <= self.lsn(history) && self.prefix(history, lsn) == part
    }

    /// How many entries two histories have in common.
    pub fn common(&self, one: Place, other: Place) -> u8 {
        let mut lsn = self.lsn(one).min(self.lsn(other));
        while self.prefix(one, lsn) != self.prefix(other, lsn) {
            lsn -= 1;
        }
        lsn
    }

    /// The last entry of a history that is not empty.
    pub fn entry(&self, at: Place) -> &Entry {
        &self.attempt(at.attempt).entries[usize::from(at.count) - 1]
    }

    /// The place without the entries after `drop`'s last match: walks back while `skip` holds.
    fn walk_back(&self, mut at: Place, skip: impl Fn(&Entry) -> bool) -> Place {
        while at.attempt != 0 && skip(self.entry(at)) {
            at = self.prefix(at, self.lsn(at) - 1);
        }
        at
    }

    /// Up to the last write: what a client can know of a history.
    pub fn last_write(&self, at: Place) -> Place {
        self.walk_back(at, |entry| entry.kind != WRITE)
    }

    pub fn last_view(&self, at: Place) -> Option<(Place, Entry)> {
        let at = self.walk_back(at, |entry| !entry.is_view());
        (at.attempt != 0).then(|| (at, *self.entry(at)))
    }

    /// Returns true if the history ends in a marked View: an epoch that lost a tail and had no IO.
    pub fn ends_marked(&self, at: Place) -> bool {
        at.attempt != 0 && self.entry(at).kind == MARKED_VIEW
    }

    /// Returns true if this attempt, or one before it under which no client could be answered,
    /// opened with a marked View: neither owes what CF caches lost at once.
    pub fn tail_may_be_lost(&self, mut history: Place) -> bool {
        while history.attempt != 0 {
            let attempt = self.attempt(history.attempt);
            if attempt.io.served == 1 {
                return false;
            }
            if attempt.entries[0].kind == MARKED_VIEW {
                return true;
            }
            history = attempt.base;
        }
        false
    }

    /// Position that the protocol compares: the epoch and LSN of the last entry.
    pub fn position(&self, at: Place) -> (u8, u8) {
        if at.attempt == 0 { (0, 0) } else { (self.attempt(at.attempt).epoch, self.lsn(at)) }
    }
}

impl Attempt {
    pub fn last(&self) -> u8 {
        self.start + self.length
    }

    pub fn views(&self) -> impl Iterator<Item = (u8, &Entry)> {
        let entries = self.entries[..usize::from(self.length)].iter();
        (1..).zip(entries).filter(|(_, entry)| entry.is_view())
    }

    /// The active View and those that wait to become so, oldest first.
    pub fn open_views(&self) -> impl Iterator<Item = (u8, &Entry)> {
        self.views().filter(|(index, _)| *index >= self.active)
    }

    pub fn pending_views(&self) -> impl Iterator<Item = (u8, &Entry)> {
        self.views().filter(|(index, _)| *index > self.active)
    }

    pub fn newest_view(&self) -> Option<&Entry> {
        self.views().last().map(|(_, view)| view)
    }
}
