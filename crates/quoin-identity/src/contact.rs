//! Whether the controller is heard, told in the log when that turns and not at every attempt.

use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A controller that stays away is complained about this often.
const AGAIN: Duration = Duration::from_secs(60);

/// One member's memory of its controller.
#[derive(Debug)]
pub struct Contact {
    controller: String,
    /// When its absence was last told; `None` while it is heard.
    told: Mutex<Option<Instant>>,
}

impl Contact {
    pub fn new(controller: &str) -> Self {
        Self { controller: controller.to_owned(), told: Mutex::new(None) }
    }

    /// It has answered.
    pub fn heard(&self) {
        if self.told().take().is_some() {
            tracing::info!(controller = self.controller, "the controller answers again");
        }
    }

    /// It has not answered, or with a refusal. Whether that was told now.
    pub fn missed(&self, why: impl Display) -> bool {
        let mut told = self.told();
        if told.is_some_and(|told| told.elapsed() < AGAIN) {
            return false;
        }
        *told = Some(Instant::now());
        tracing::warn!(
            controller = self.controller,
            %why,
            "no word from the controller; IO goes on, and it is asked again"
        );
        true
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_is_told_once_and_anew_after_the_controller_was_heard() {
        let contact = Contact::new("control:7400");
        assert!(contact.missed("refused"));
        assert!(!contact.missed("refused"));
        contact.heard();
        assert!(contact.missed("refused"));
    }
}
