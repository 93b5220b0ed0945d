//! What happened, on its way to the controller: a bounded queue from the shard to the reports.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use quoin_proto::control::AgentEvent;

/// Events kept while the controller is away; the oldest go first.
const EVENTS_MAX: usize = 256;

#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<VecDeque<AgentEvent>>>);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Severity {
    Normal,
    Warning,
    Error,
}

impl Severity {
    fn as_str(self) -> &'static str {
        match self {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
            Severity::Error => "Error",
        }
    }
}

impl Events {
    pub fn push(
        &self,
        severity: Severity,
        volume: impl ToString,
        replica: impl ToString,
        reason: &str,
        message: String,
    ) {
        let (volume_id, replica_id) = (volume.to_string(), replica.to_string());
        tracing::info!(reason, volume = volume_id, replica = replica_id, "{message}");
        let event = AgentEvent {
            severity: severity.as_str().into(),
            volume_id,
            replica_id,
            reason: reason.into(),
            message,
        };
        let mut queue = self.0.lock().expect("never held across a panic");
        if queue.len() == EVENTS_MAX {
            queue.pop_front();
        }
        queue.push_back(event);
    }

    pub fn take(&self) -> Vec<AgentEvent> {
        self.0.lock().expect("never held across a panic").drain(..).collect()
    }

    /// Puts back what could not be reported.
    pub fn restore(&self, events: Vec<AgentEvent>) {
        let mut queue = self.0.lock().expect("never held across a panic");
        for event in events.into_iter().rev() {
            if queue.len() < EVENTS_MAX {
                queue.push_front(event);
            }
        }
    }
}
