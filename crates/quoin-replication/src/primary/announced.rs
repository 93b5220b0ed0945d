//! Facts that a primary has told its driver and need not tell again.

use quoin_types::Time;

use super::wait_reason::WaitReason;

#[derive(Default)]
pub(super) struct Announced {
    /// The reason to wait that the last note reported.
    waits_for: Option<WaitReason>,
    timer: Option<Time>,
}

impl Announced {
    pub fn waits_for(&self) -> Option<WaitReason> {
        self.waits_for
    }

    /// Sets the reason to wait; true if it is another one than before.
    pub fn wait(&mut self, reason: WaitReason) -> bool {
        self.waits_for.replace(reason) != Some(reason)
    }

    /// Ends the wait; true if there was one.
    pub fn wait_no_longer(&mut self) -> bool {
        self.waits_for.take().is_some()
    }

    /// Sets the timer; false where an earlier one remains set: it costs one wake-up, not one system
    /// call for each batch.
    pub fn set_timer(&mut self, at: Time) -> bool {
        let is_earlier = self.timer.is_none_or(|before| before > at);
        if is_earlier {
            self.timer = Some(at);
        }
        is_earlier
    }

    pub fn timer_expired(&mut self) {
        self.timer = None;
    }
}
