//! The end of a device that is in use: all its IO fails, at once and from then on.
//!
//! A device waits for its target without a time limit, unless the wait is declared useless: another
//! node used the volume meanwhile, or an operator ended the device. The caller may be what others
//! wait for, so this must not block: it takes no lock of a volume's slot, and makes no call to the
//! kernel.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::fuse::server::AbortHandle;

/// Time that a volume which is detached here has to be attached again, before the IO of a device without
/// a server fails.
const DETACHED_FOR: Duration = Duration::from_secs(4);
/// Interval of attempts to remove a device of a detached volume that no mount holds: a program may
/// have it open.
const REMOVAL_EVERY: Duration = Duration::from_secs(10);

/// The existing devices, by volume. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct AbortHandles(Arc<Mutex<Handles>>);

#[derive(Default)]
struct Handles {
    of_volumes: BTreeMap<String, Entry>,
    /// Number of the last request to attach.
    asked: u64,
}

struct Entry {
    handle: AbortHandle,
    /// Number of the last request to attach this volume.
    asked: u64,
    /// Time since which the volume is known to be detached here.
    detached: Option<Instant>,
    tried: Option<Instant>,
}

/// Next step with a device whose volume is detached.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AfterDetaching {
    /// Its IO was failed just now.
    pub is_ended: bool,
    /// It may be removed, if nothing uses it.
    pub may_go: bool,
}

impl AbortHandles {
    pub(crate) fn add(&self, volume: &str, handle: AbortHandle) {
        let mut all = self.lock();
        let asked = all.next();
        let entry = Entry { handle, asked, detached: None, tried: None };
        all.of_volumes.insert(volume.to_owned(), entry);
    }

    pub(crate) fn forget(&self, volume: &str) {
        self.lock().of_volumes.remove(volume);
    }

    /// The volume is asked for: what was said of its device before does not count any more.
    pub(crate) fn is_asked_for(&self, volume: &str) {
        let mut all = self.lock();
        let asked = all.next();
        if let Some(entry) = all.of_volumes.get_mut(volume) {
            (entry.asked, entry.detached) = (asked, None);
        }
    }

    pub(crate) fn asked(&self, volume: &str) -> u64 {
        self.lock().of_volumes.get(volume).map_or(0, |entry| entry.asked)
    }

    /// Fails waiting and later IO on the volume's device.
    pub(crate) fn end(&self, volume: &str, why: &str) {
        let handle = self.lock().of_volumes.get(volume).map(|entry| entry.handle.clone());
        if let Some(handle) = handle {
            handle.end(why);
        }
    }

    /// Same as [`AbortHandles::end`], for a device that was made for a use before the one since
    /// this epoch. Returns true the first time.
    pub(crate) fn end_before(&self, volume: &str, since_epoch: u64, why: &str) -> bool {
        let handle = self.lock().of_volumes.get(volume).map(|entry| entry.handle.clone());
        handle.is_some_and(|handle| handle.since_epoch() < since_epoch && handle.end(why))
    }

    /// Notes that the volume is detached from this host. IO that has a server is answered; without one it
    /// fails after [`DETACHED_FOR`].
    pub(crate) fn detached(
        &self,
        volume: &str,
        asked: u64,
        why: &str,
        now: Instant,
    ) -> AfterDetaching {
        let mut all = self.lock();
        let Some(entry) = all.of_volumes.get_mut(volume).filter(|entry| entry.asked == asked)
        else {
            return AfterDetaching::default();
        };
        let since = *entry.detached.get_or_insert(now);
        let lasts = now.duration_since(since) >= DETACHED_FOR;
        let is_ended = lasts && !entry.handle.connected() && entry.handle.end(why);
        let tried = entry.tried.map(|tried| now.duration_since(tried));
        AfterDetaching { is_ended, may_go: tried.is_none_or(|tried| tried >= REMOVAL_EVERY) }
    }

    /// Begins an attempt to remove the device that was last asked for by this number.
    pub(crate) fn tries_removal(&self, volume: &str, asked: u64, now: Instant) -> bool {
        let mut all = self.lock();
        let entry = all.of_volumes.get_mut(volume).filter(|entry| entry.asked == asked);
        entry.map(|entry| entry.tried = Some(now)).is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Handles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handles {
    /// A number that no other process of this host has given before, as far as process numbers tell.
    fn next(&mut self) -> u64 {
        self.asked += 1;
        (u64::from(std::process::id()) << 32) | self.asked
    }
}

/// Text for people about a device whose volume another node has.
#[must_use]
pub fn served_elsewhere(node: &str, since_epoch: u64) -> String {
    let since_epoch = quoin_types::Epoch(since_epoch);
    format!("served by {node} since epoch {since_epoch}; mounts here are dead")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::server::Unmounted;

    const MOMENT: Duration = Duration::from_millis(1);

    /// The handles of one device, with the number by which it was asked for.
    fn handles(device: &Unmounted) -> (AbortHandles, u64) {
        let handles = AbortHandles::default();
        handles.add("17", device.abort_handle());
        let asked = handles.asked("17");
        (handles, asked)
    }

    #[test]
    fn a_detached_device_without_a_server_ends_at_its_time_and_neither_before_nor_twice() {
        let device = Unmounted::new(false, 3);
        let (handles, asked) = handles(&device);
        let start = Instant::now();
        let at = |after| handles.detached("17", asked, "detached", start + after);
        for after in [Duration::ZERO, MOMENT, DETACHED_FOR - MOMENT] {
            assert!(!at(after).is_ended && device.dead().is_none(), "{after:?}");
        }
        assert!(at(DETACHED_FOR).is_ended);
        assert_eq!(device.dead(), Some("detached"));
        assert!(!at(DETACHED_FOR + MOMENT).is_ended, "it was ended before");
    }

    #[test]
    fn a_detached_device_with_a_server_ends_once_it_has_none() {
        let device = Unmounted::new(true, 3);
        let (handles, asked) = handles(&device);
        let start = Instant::now();
        let at = |after| handles.detached("17", asked, "detached", start + after);
        assert!(!at(Duration::ZERO).is_ended && !at(2 * DETACHED_FOR).is_ended);
        device.is_connected(false);
        assert!(at(2 * DETACHED_FOR + MOMENT).is_ended);
    }

    #[test]
    fn a_device_that_is_asked_for_again_has_all_its_time_anew() {
        let device = Unmounted::new(false, 3);
        let (handles, former) = handles(&device);
        let start = Instant::now();
        handles.detached("17", former, "detached", start);
        handles.is_asked_for("17");
        let asked = handles.asked("17");
        assert!(asked > former);
        let late = start + DETACHED_FOR;
        let of_former = handles.detached("17", former, "detached", late);
        assert_eq!(of_former, AfterDetaching::default(), "what was said of the former use");
        assert!(!handles.tries_removal("17", former, late));
        assert!(!handles.detached("17", asked, "detached", late).is_ended);
        let later = late + DETACHED_FOR;
        assert!(!handles.detached("17", asked, "detached", later - MOMENT).is_ended);
        assert!(handles.detached("17", asked, "detached", later).is_ended);
    }

    #[test]
    fn a_removal_is_tried_at_once_and_again_after_its_interval() {
        let device = Unmounted::new(true, 3);
        let (handles, asked) = handles(&device);
        let start = Instant::now();
        let may_go = |after| handles.detached("17", asked, "detached", start + after).may_go;
        assert!(may_go(Duration::ZERO) && handles.tries_removal("17", asked, start));
        for (after, may) in [
            (Duration::ZERO, false),
            (REMOVAL_EVERY - MOMENT, false),
            (REMOVAL_EVERY, true),
            (REMOVAL_EVERY + MOMENT, true),
        ] {
            assert_eq!(may_go(after), may, "{after:?}");
        }
    }

    #[test]
    fn a_device_of_a_use_before_another_nodes_ends_and_one_of_that_use_or_later_goes_on() {
        for (since_epoch, ends) in [(2, true), (3, false), (4, false)] {
            let device = Unmounted::new(true, since_epoch);
            let (handles, _) = handles(&device);
            assert_eq!(handles.end_before("17", 3, "another's"), ends, "{since_epoch}");
            assert_eq!(device.dead().is_some(), ends);
            assert!(!handles.end_before("17", 3, "again"), "the first time alone");
        }
        let device = Unmounted::new(true, 2);
        let (handles, asked) = handles(&device);
        handles.end("18", "of another volume");
        assert_eq!((device.dead(), handles.asked("18")), (None, 0));
        handles.end("17", "ended");
        handles.end("17", "once more");
        assert_eq!(device.dead(), Some("ended"), "the first reason names the cause");
        handles.forget("17");
        let nothing = handles.detached("17", asked, "detached", Instant::now());
        assert_eq!(nothing, AfterDetaching::default());
        assert!(!handles.end_before("17", 3, "gone"));
    }
}
