//! The end of a device that is in use: all its IO fails, at once and from then on.
//!
//! A device waits for its target without a time limit, unless the wait is declared useless: another
//! node used the volume meanwhile, or an operator ended the device. The caller may be what others
//! wait for, so this must not block: it takes no lock of a volume's slot, and makes no call to the
//! kernel.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::fuse::server::AbortHandle;

/// The existing devices, by volume. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct AbortHandles(Arc<Mutex<BTreeMap<String, AbortHandle>>>);

impl AbortHandles {
    pub(crate) fn add(&self, volume: &str, abort_handle: AbortHandle) {
        self.lock().insert(volume.to_owned(), abort_handle);
    }

    pub(crate) fn forget(&self, volume: &str) {
        self.lock().remove(volume);
    }

    /// Fails waiting and later IO on the volume's device.
    pub(crate) fn end(&self, volume: &str, why: &str) {
        let abort_handle = self.lock().get(volume).cloned();
        if let Some(abort_handle) = abort_handle {
            abort_handle.end(why);
        }
    }

    /// Same as [`AbortHandles::end`], for a device that was made for a use before the one since
    /// this epoch. Returns true the first time.
    pub(crate) fn end_before(&self, volume: &str, since_epoch: u64, why: &str) -> bool {
        let abort_handle = self.lock().get(volume).cloned();
        abort_handle.is_some_and(|abort_handle| {
            abort_handle.since_epoch() < since_epoch && abort_handle.end(why)
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, AbortHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Text for people about a device whose volume another node has.
pub(crate) fn served_elsewhere(node: &str, since_epoch: u64) -> String {
    format!("served by {node} since epoch {since_epoch}; mounts here are dead")
}
