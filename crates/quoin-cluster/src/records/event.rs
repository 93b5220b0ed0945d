//! The records of events.

use serde::{Deserialize, Serialize};

use crate::records::Record;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EventRecord {
    pub sequence: u64,
    pub time_ms: u64,
    pub severity: String,
    pub object_kind: String,
    pub object_id: String,
    pub object_name: String,
    pub reason: String,
    pub message: String,
    pub count: u32,
    /// Member whose words or doings it is of, such as "pool/p1"; empty: the controller's own.
    pub reporter: String,
}

impl Record for EventRecord {
    type Index = ();
    const PREFIX: &'static str = "event/";
    fn name(&self) -> String {
        Self::name_at(self.sequence)
    }
}

impl EventRecord {
    fn name_at(sequence: u64) -> String {
        format!("{sequence:016x}")
    }

    pub fn key_at(sequence: u64) -> String {
        Self::key_of(&Self::name_at(sequence))
    }
}
