//! State that a target keeps across its opens: pauses, deadlines, and what an older epoch left
//! behind.

use std::time::Duration;

use super::history::History;
use super::incarnations::Incarnations;
use super::past::Past;
use super::refusals::Refusals;
use quoin_types::client::Judged;
use quoin_types::entry::{EntryKind, SharedEntry};
use quoin_types::ids::{Epoch, Lsn, Position};
use quoin_types::membership::Membership;
use quoin_types::mutant;
use quoin_types::time::Time;

/// Time after which an open that cannot continue asks the record again, under a new epoch. The
/// grant may be older than a change (the record may have been an old copy), and the replicas that
/// it waits for may be gone permanently. The open waits longer if an answer is on its way: a
/// replica may wait out a lease of the longest kind.
const OPEN_PATIENCE: Duration = Duration::from_secs(20);
const OPEN_PATIENCE_MAX: Duration = Duration::from_secs(120);
const REST_FIRST_MS: u64 = 100;
const REST_LAST_MS: u64 = 10_000;
/// Number of attempts after which the pause is the longest one.
const ATTEMPTS_MAX: u32 = 7;

pub(super) struct Opening {
    /// The epoch of the last open that was granted one.
    pub epoch: Epoch,
    pub incarnations: Incarnations,
    pub refusals: Refusals,
    pub past: Past,
    attempts: u32,
    /// Time until which the control plane or the authority is waited for.
    pub answer_by: Time,
    /// The membership that was granted with the epoch, without the retired.
    pub granted: Membership,
    /// Entries after this LSN must be available before IO can start.
    pub fetch_floor: Lsn,
    /// The position of commit in the last epoch that served (CommitSurvives).
    committed: Position,
    /// Entries above stable when an epoch ended: those that did not survive are written again.
    orphans: Vec<SharedEntry>,
    pub unflushed_tail_lost: bool,
}

impl Opening {
    /// `seed` determines the incarnations; it must not repeat for a volume.
    pub fn new(now: Time, seed: u64) -> Self {
        Self {
            epoch: Epoch::ZERO,
            incarnations: Incarnations::new(seed),
            refusals: Refusals::default(),
            past: Past::default(),
            attempts: 0,
            answer_by: now,
            granted: Membership::default(),
            fetch_floor: Lsn::ZERO,
            committed: Position::default(),
            orphans: Vec::new(),
            unflushed_tail_lost: false,
        }
    }

    /// Pause before the next attempt. Half is fixed, half depends on `chance`, so that two targets
    /// do not stay in step.
    pub fn pause(&mut self, chance: u64) -> Duration {
        let ms = (REST_FIRST_MS << self.attempts.min(ATTEMPTS_MAX)).min(REST_LAST_MS);
        self.attempts += 1;
        Duration::from_millis(ms / 2 + chance % (ms / 2 + 1))
    }

    /// Sets the pause before the next attempt to the longest one.
    pub fn pause_longest(&mut self) {
        self.attempts = self.attempts.max(ATTEMPTS_MAX);
    }

    /// Begins the open with a grant.
    pub fn begin(&mut self, now: Time) {
        self.answer_by = now + OPEN_PATIENCE;
    }

    /// Time at which the record is asked again; `answers`: the answer of a replica is on its way.
    pub fn gives_up_at(&self, answers: bool) -> Time {
        let more = if answers { OPEN_PATIENCE_MAX - OPEN_PATIENCE } else { Duration::ZERO };
        self.answer_by + more
    }

    /// Resets the attempts when IO starts.
    pub fn succeeded(&mut self) {
        self.attempts = 0;
        self.unflushed_tail_lost = false;
    }

    /// Ends an epoch that served: entries above `stable` are kept, and those up to `owed` must
    /// survive.
    pub fn keep(&mut self, history: &History, stable: Lsn, owed: Lsn) {
        self.orphans = history.after(stable).cloned().collect();
        if let Some(epoch) = history.get(owed).map(|e| e.epoch) {
            self.committed = Position { epoch, lsn: owed };
        }
    }

    /// Returns true if a history lacks what was committed before.
    pub fn is_commit_missing(&self, history: &History) -> bool {
        !self.unflushed_tail_lost
            && history.knows(self.committed.epoch)
            && !history.holds(self.committed)
    }

    /// Sequences again, in their order, the entries of an older epoch that did not survive;
    /// requests that wait for them wait for the new LSNs. Entries that survived are committed. A
    /// primary that may not write leaves away those of a writer before it, which no request of its
    /// own waits for.
    pub fn rewrite_orphans(
        &mut self,
        epoch: Epoch,
        may_write: bool,
        history: &mut History,
    ) -> Rewritten {
        let mut orphans = std::mem::take(&mut self.orphans);
        if mutant::is("orphans-not-written-again") {
            orphans.clear();
        }
        let mut moved: Vec<(Lsn, Lsn)> = Vec::with_capacity(orphans.len());
        let mut last = history.last.lsn;
        for entry in orphans {
            if history.holds(entry.position()) {
                moved.push((entry.lsn, entry.lsn));
                continue;
            }
            let took_effect =
                entry.part.and_then(|part| match history.clients.judge(&part.origin) {
                    Judged::Executed(lsn) => Some(lsn),
                    Judged::New { from } if part.end <= from => Some(last),
                    _ => None,
                });
            if let Some(lsn) = took_effect {
                moved.push((entry.lsn, lsn));
                continue;
            }
            let is_wanted = match entry.kind {
                EntryKind::Write | EntryKind::Trim | EntryKind::Zero { .. } => may_write,
                EntryKind::BeginClient { .. } | EntryKind::EndClient { .. } => true,
                // Writes beyond the old end may follow it.
                EntryKind::Resize { blocks } => blocks > history.blocks,
                _ => false,
            };
            if is_wanted {
                let (kind, data) = (entry.kind.clone(), entry.data.clone());
                let (lba, blocks, fua) = (entry.lba, entry.blocks, entry.fua);
                let new = history.append_part(epoch, kind, lba, blocks, data, fua, entry.part);
                last = new.lsn;
            }
            moved.push((entry.lsn, last));
        }
        Rewritten { moved }
    }
}

/// The new LSNs of entries of an older epoch.
pub(super) struct Rewritten {
    /// Old and new LSN, in the order of the old ones.
    moved: Vec<(Lsn, Lsn)>,
}

impl Rewritten {
    pub fn find(&self, lsn: Lsn) -> Lsn {
        match self.moved.binary_search_by_key(&lsn, |(old, _)| *old) {
            Ok(i) => self.moved[i].1,
            // Committed before the epoch ended.
            Err(_) => lsn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn at(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    fn write(history: &mut History, epoch: u64, lba: u64) -> Lsn {
        let data = Bytes::from(vec![lba as u8; quoin_types::BLOCK_SIZE]);
        history.append(Epoch(epoch), EntryKind::Write, lba, 1, data, false).lsn
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_are_short_again_after_an_open_that_succeeded() {
        let mut opening = Opening::new(at(0), 1);
        let mut pauses: Vec<u64> = (0..9).map(|_| opening.pause(0).as_millis() as u64).collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(opening.pause(u64::MAX).as_millis() as u64, 5000 + u64::MAX % 5001);
        opening.succeeded();
        pauses = (0..2).map(|_| opening.pause(0).as_millis() as u64).collect();
        assert_eq!(pauses, [50, 100]);
        opening.pause_longest();
        assert_eq!(opening.pause(0).as_millis(), 5000);
    }

    #[test]
    fn an_open_is_given_up_later_while_a_replica_owes_an_answer() {
        let mut opening = Opening::new(at(0), 1);
        opening.begin(at(1000));
        let [answers, none] = [true, false].map(|answers| opening.gives_up_at(answers));
        assert_eq!((answers, none), (at(121_000), at(21_000)));
    }

    #[test]
    fn a_primary_that_may_not_write_writes_no_entry_of_a_writer_before_it_again() {
        let mut old = History::empty(64);
        let committed = write(&mut old, 1, 1);
        let orphan = write(&mut old, 1, 2);
        let mut opening = Opening::new(at(0), 1);
        opening.keep(&old, committed, committed);
        let mut new = History::empty(64);
        write(&mut new, 1, 1);
        let last = new.append_bare(Epoch(2), EntryKind::Resize { blocks: 64 }).lsn;
        let rewritten = opening.rewrite_orphans(Epoch(2), false, &mut new);
        assert_eq!((new.last.lsn, rewritten.find(orphan)), (last, last));
    }

    #[test]
    fn entries_that_did_not_survive_are_written_again_and_their_requests_find_them() {
        let mut old = History::empty(64);
        let committed = write(&mut old, 1, 1);
        let (survives, orphan) = (write(&mut old, 1, 2), write(&mut old, 1, 3));
        old.append_bare(Epoch(1), EntryKind::Resize { blocks: 8 });
        let behind = write(&mut old, 1, 4);
        let mut opening = Opening::new(at(0), 1);
        opening.keep(&old, committed, committed);

        let mut new = History::empty(64);
        write(&mut new, 1, 1);
        write(&mut new, 1, 2);
        new.append_bare(Epoch(2), EntryKind::Resize { blocks: 64 });
        let rewritten = opening.rewrite_orphans(Epoch(2), true, &mut new);
        assert_eq!(rewritten.find(committed), committed);
        assert_eq!(rewritten.find(survives), survives);
        let found = [orphan, behind].map(|lsn| new.get(rewritten.find(lsn)).unwrap().lba);
        assert_eq!(found, [3, 4]);
        assert_eq!(new.last.lsn, Lsn(5), "a size that is no larger is left out");
        assert_eq!(opening.rewrite_orphans(Epoch(2), true, &mut new).find(orphan), orphan, "once");
    }

    #[test]
    fn a_history_that_lacks_committed_entries_is_detected_unless_unflushed_data_was_lost() {
        let mut old = History::empty(64);
        let first = write(&mut old, 1, 1);
        let second = write(&mut old, 1, 2);
        let mut opening = Opening::new(at(0), 1);
        assert!(!opening.is_commit_missing(&History::empty(64)), "it has served nothing");
        opening.keep(&old, first, second);
        assert!(!opening.is_commit_missing(&old));
        let mut short = History::empty(64);
        write(&mut short, 1, 1);
        assert!(opening.is_commit_missing(&short));
        opening.unflushed_tail_lost = true;
        assert!(!opening.is_commit_missing(&short));
    }
}
