//! Parts that the engines of several controllers have in common: the rule of this controller, and the followers of
//! its changes.

use std::sync::Mutex;

use tokio::sync::broadcast;

use super::{Change, LeaseHeld, Rule, StoreError};

/// Changes that a slow follower may lag behind before it must list anew.
const WATCH_CHANGES: usize = 1024;

/// Rule of this controller, and those who follow its changes.
pub(super) struct Ruling {
    controller: String,
    /// `None`: no controller rules by this store, and all changes are free.
    rule: Mutex<Option<Rule>>,
    changes: broadcast::Sender<Change>,
}

impl Ruling {
    /// `controller`: name of this one.
    pub fn new(controller: String) -> Self {
        Self { controller, rule: Mutex::default(), changes: broadcast::channel(WATCH_CHANGES).0 }
    }

    pub fn controller(&self) -> &str {
        &self.controller
    }

    pub fn rule(&self) -> Option<Rule> {
        self.rule.lock().expect("no holder of this lock panics").clone()
    }

    pub fn begin(&self, rule: &Rule) {
        *self.rule.lock().expect("no holder of this lock panics") = Some(rule.clone());
    }

    /// # Errors
    /// Another controller may rule.
    pub fn check(&self) -> Result<(), StoreError> {
        self.rule().map_or(Ok(()), |rule| rule.check())
    }

    pub fn lease(&self) -> Option<LeaseHeld> {
        self.rule().map(|rule| LeaseHeld {
            holder: self.controller.clone(),
            lasts: rule.lasts(),
            since_renewal: rule.since_renewal(),
        })
    }

    /// Sends a change to the followers; an empty list of them is no failure.
    pub fn tell(&self, key: &str, revision: u64) {
        let _ = self.changes.send(Change { key: key.to_owned(), revision });
    }

    pub fn follow(&self) -> broadcast::Receiver<Change> {
        self.changes.subscribe()
    }
}
