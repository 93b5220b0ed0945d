//! The end of a device that is in use: all its IO fails, at once and from then on.
//!
//! A device waits for its target however long that is away, unless it is said here that waiting is
//! in vain: another node used the volume meanwhile, or a person ended the device. This is said from
//! outside of whatever waits for the device, so it must not wait for that: no lock of a volume's
//! slot is taken, and no call to the kernel is made.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::fuse::server::Ending;

/// The devices that there are, by volume. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Fates(Arc<Mutex<BTreeMap<String, Ending>>>);

impl Fates {
    pub(crate) fn add(&self, volume: &str, ending: Ending) {
        self.lock().insert(volume.to_owned(), ending);
    }

    pub(crate) fn forget(&self, volume: &str) {
        self.lock().remove(volume);
    }

    /// Fails what waits on the volume's device and all that comes.
    pub(crate) fn end(&self, volume: &str, why: &str) {
        let ending = self.lock().get(volume).cloned();
        if let Some(ending) = ending {
            ending.end(why);
        }
    }

    /// As [`Fates::end`], of a device that was made for a use before the one since this epoch.
    /// Whether that is news.
    pub(crate) fn end_before(&self, volume: &str, since_epoch: u64, why: &str) -> bool {
        let ending = self.lock().get(volume).cloned();
        ending.is_some_and(|ending| ending.since_epoch() < since_epoch && ending.end(why))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Ending>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Words for people about a device whose volume another node has.
pub(crate) fn served_elsewhere(node: &str, since_epoch: u64) -> String {
    format!("served by {node} since epoch {since_epoch}; mounts here are dead")
}
