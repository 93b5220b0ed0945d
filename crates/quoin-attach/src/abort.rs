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
