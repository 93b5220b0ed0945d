//! Bad blocks of one replica, which wait for another member's copy.
//!
//! Good copies come only through a target that feeds the replica; without one they wait. A
//! target answers at most a few requests at a time and none that it cannot serve, so what is not
//! answered is asked again, ever less often.

use std::collections::BTreeMap;
use std::time::Duration;

use quoin_types::SnapshotId;
use quoin_types::message::BadCopy;
use quoin_types::time::Time;

pub use crate::replica::Repaired;

/// Bad copies remembered of one replica; the next scrub finds the others.
const WANTED_MAX: usize = 4096;
/// Requests under way at a time; a target takes twice as many.
const ASKED_MAX: usize = 8;
/// A target that said nothing for so long could not serve it just then: it is asked again, and
/// what it has under way by then it takes no second time.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Between requests for what cannot be had now.
const ASK_AGAIN_MAX: Duration = Duration::from_secs(600);
/// A stretch that could not be mended this moment (a fold is under way) is tried again soon.
const NOT_NOW: Duration = Duration::from_secs(2);
/// Answers of "not now" before it is left to the next scrub.
const NOT_NOW_MAX: u32 = 30;

/// View, first block, and whether the map of a stretch is wanted.
type Key = (Option<SnapshotId>, u64, bool);

#[derive(Debug)]
struct Wanted {
    copy: BadCopy,
    ask_at: Time,
    /// Asked and not answered.
    under_way: bool,
    tries: u32,
}

/// Blocks found and mended since the last report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct News {
    pub found: u32,
    /// The first that was found.
    pub first_lba: u64,
    pub mended: u32,
}

#[derive(Debug, Default)]
pub struct Repairs {
    wanted: BTreeMap<Key, Wanted>,
    news: News,
    mended: u64,
}

impl Repairs {
    /// Blocks that are bad, as far as known; of a stretch of the map all of them.
    pub fn bad_blocks(&self) -> u64 {
        self.wanted.values().map(|w| u64::from(w.copy.blocks)).sum()
    }

    /// Copies that were replaced since the pool was opened.
    pub fn mended(&self) -> u64 {
        self.mended
    }

    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// True if it was not known.
    pub fn found(&mut self, now: Time, copy: BadCopy) -> bool {
        let key = (copy.snapshot, copy.lba, copy.blocks > 1);
        if self.wanted.contains_key(&key) || self.wanted.len() >= WANTED_MAX {
            return false;
        }
        self.wanted.insert(key, Wanted { copy, ask_at: now, under_way: false, tries: 0 });
        if self.news.found == 0 {
            self.news.first_lba = copy.lba;
        }
        self.news.found += 1;
        true
    }

    /// A target feeds the replica from now on: everything may be asked at once.
    pub fn opened(&mut self, now: Time) {
        for wanted in self.wanted.values_mut() {
            *wanted = Wanted { ask_at: now, under_way: false, tries: 0, ..*wanted };
        }
    }

    /// Takes the next copy to ask for now.
    pub fn next(&mut self, now: Time) -> Option<BadCopy> {
        let under_way = self.wanted.values().filter(|w| w.under_way && w.ask_at > now).count();
        if under_way >= ASKED_MAX {
            return None;
        }
        let wanted = self.wanted.values_mut().find(|w| w.ask_at <= now)?;
        wanted.under_way = true;
        let pause = ANSWER_MAX * 2u32.saturating_pow(wanted.tries.min(10));
        wanted.ask_at = now + pause.min(ASK_AGAIN_MAX);
        wanted.tries += 1;
        Some(wanted.copy)
    }

    /// When there is something to ask for.
    pub fn due(&self) -> Option<Time> {
        self.wanted.values().map(|w| w.ask_at).min()
    }

    /// True if a copy was replaced.
    pub fn answered(&mut self, now: Time, repaired: Repaired) -> bool {
        let Repaired { snapshot, lba, whole_map, done } = repaired;
        let key = (snapshot, lba, whole_map);
        if done {
            self.wanted.remove(&key);
            self.mended += 1;
            self.news.mended += 1;
            return true;
        }
        let Some(wanted) = self.wanted.get_mut(&key) else { return false };
        if !whole_map || wanted.tries >= NOT_NOW_MAX {
            // A block that is overwritten is no longer bad.
            self.wanted.remove(&key);
        } else {
            wanted.under_way = false;
            wanted.ask_at = now + NOT_NOW;
        }
        false
    }

    /// Returns true if there is something to tell of.
    pub fn has_news(&self) -> bool {
        self.news != News::default()
    }

    pub fn take_news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }
}

#[cfg(test)]
mod tests {
    use quoin_types::Lsn;

    use super::*;

    fn block(lba: u64) -> BadCopy {
        BadCopy { lba, blocks: 1, version: Lsn(7), snapshot: None }
    }

    fn stretch(lba: u64) -> BadCopy {
        BadCopy { blocks: 256, ..block(lba) }
    }

    fn of(copy: BadCopy, done: bool) -> Repaired {
        let BadCopy { lba, blocks, snapshot, .. } = copy;
        Repaired { snapshot, lba, whole_map: blocks > 1, done }
    }

    #[test]
    fn each_bad_copy_is_asked_for_once_a_few_at_a_time_and_again_when_nobody_answers() {
        let (mut repairs, start) = (Repairs::default(), Time::from_millis(1000));
        for lba in 0..20 {
            assert!(repairs.found(start, block(lba)));
            assert!(!repairs.found(start, block(lba)), "it is known");
        }
        let asked: Vec<BadCopy> = std::iter::from_fn(|| repairs.next(start)).collect();
        assert_eq!(asked.len(), ASKED_MAX);
        assert!(repairs.answered(start, of(block(0), true)));
        assert!(!repairs.answered(start, of(block(1), false)), "it was overwritten");
        assert_eq!(repairs.bad_blocks(), 18);
        assert_eq!(repairs.next(start).map(|c| c.lba), Some(8));
        let later = start + ANSWER_MAX;
        let again: Vec<u64> = std::iter::from_fn(|| repairs.next(later)).map(|c| c.lba).collect();
        assert_eq!(again.len(), ASKED_MAX);
        assert_eq!(repairs.take_news(), News { found: 20, first_lba: 0, mended: 1 });
        assert_eq!(repairs.take_news(), News::default());
    }

    #[test]
    fn what_waits_to_be_asked_again_takes_no_place_of_what_is_asked() {
        let (mut repairs, now) = (Repairs::default(), Time::from_millis(1000));
        for at in 0..ASKED_MAX as u64 {
            repairs.found(now, stretch(at * 256));
            assert!(repairs.next(now).is_some());
            assert!(!repairs.answered(now, of(stretch(at * 256), false)));
        }
        repairs.found(now, block(100_000));
        assert_eq!(repairs.next(now).map(|copy| copy.lba), Some(100_000));
        assert_eq!(repairs.next(now), None);
    }

    #[test]
    fn a_stretch_that_cannot_be_mended_now_is_tried_again_and_a_new_session_asks_at_once() {
        let (mut repairs, now) = (Repairs::default(), Time::from_millis(1000));
        repairs.found(now, stretch(256));
        assert!(repairs.next(now).is_some() && repairs.next(now).is_none());
        assert!(!repairs.answered(now, of(stretch(256), false)));
        assert_eq!(repairs.due(), Some(now + NOT_NOW));
        repairs.next(now + NOT_NOW);
        repairs.opened(now + NOT_NOW);
        assert!(repairs.next(now + NOT_NOW).is_some());
        assert!(repairs.answered(now, of(stretch(256), true)) && repairs.is_empty());
    }

    #[test]
    fn a_block_is_asked_for_in_each_view_that_shows_a_bad_copy_of_its_own() {
        let (mut repairs, now) = (Repairs::default(), Time::from_millis(1000));
        let kept = BadCopy { snapshot: Some(SnapshotId(3)), ..block(5) };
        assert!(repairs.found(now, block(5)) && repairs.found(now, kept));
        assert!(!repairs.found(now, kept), "it is known");
        assert!(repairs.answered(now, of(block(5), true)));
        assert_eq!(repairs.next(now), Some(kept), "the other copy is bad still");
        assert!(repairs.answered(now, of(kept, true)) && repairs.is_empty());
    }
}
