//! Notices of events for the controller: a bounded queue from a role's shards to its reports.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Limit of notices kept while the controller is away; the oldest are dropped first.
const NOTICES_MAX: usize = 256;

/// One event for an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Notice {
    pub severity: Severity,
    /// Ids as text; empty where there is none.
    pub volume: String,
    pub replica: String,
    /// Reason in CamelCase.
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Default)]
pub struct Notices(Arc<Mutex<VecDeque<Notice>>>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Severity {
    Normal,
    Warning,
    Error,
}

impl Severity {
    /// Returns the control plane's spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
            Severity::Error => "Error",
        }
    }
}

impl Notices {
    pub fn push(
        &self,
        severity: Severity,
        volume: impl ToString,
        replica: impl ToString,
        reason: &str,
        message: String,
    ) {
        let (volume, replica) = (volume.to_string(), replica.to_string());
        match severity {
            Severity::Normal => tracing::info!(reason, volume, replica, "{message}"),
            Severity::Warning => tracing::warn!(reason, volume, replica, "{message}"),
            Severity::Error => tracing::error!(reason, volume, replica, "{message}"),
        }
        let notice = Notice { severity, volume, replica, reason: reason.into(), message };
        let mut queue = self.0.lock().expect("never held across a panic");
        if queue.len() == NOTICES_MAX {
            queue.pop_front();
        }
        queue.push_back(notice);
    }

    pub fn take(&self) -> Vec<Notice> {
        self.0.lock().expect("never held across a panic").drain(..).collect()
    }

    /// Puts back notices that could not be reported.
    pub fn restore(&self, notices: Vec<Notice>) {
        let mut queue = self.0.lock().expect("never held across a panic");
        for notice in notices.into_iter().rev() {
            if queue.len() < NOTICES_MAX {
                queue.push_front(notice);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(notices: &Notices, n: usize) {
        notices.push(Severity::Normal, "", "", "Test", n.to_string());
    }

    #[test]
    fn the_oldest_notices_are_dropped_first_when_none_are_taken() {
        let notices = Notices::default();
        (0..NOTICES_MAX + 5).for_each(|n| push(&notices, n));
        let taken = notices.take();
        assert_eq!((taken.len(), taken[0].message.as_str()), (NOTICES_MAX, "5"));
    }

    #[test]
    fn notices_that_could_not_be_reported_come_before_newer_ones() {
        let notices = Notices::default();
        push(&notices, 1);
        push(&notices, 2);
        let taken = notices.take();
        push(&notices, 3);
        notices.restore(taken);
        let order: Vec<_> = notices.take().into_iter().map(|n| n.message).collect();
        assert_eq!(order, ["1", "2", "3"]);
    }
}
