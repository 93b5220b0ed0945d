//! Reachability of the controller: logged when it changes and not at every attempt. Also the loop
//! by which a member follows the controller through its absences.

use std::fmt::Display;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::Status;
use tonic::metadata::MetadataValue;

/// Interval of the log's warnings about a controller that stays away.
const AGAIN: Duration = Duration::from_secs(60);

/// Header of a refusal of a member that was removed, so that it ends and does not retry.
const REMOVED: &str = "quoin-member-removed";

/// Marks a controller's answer as the refusal of a member that was removed.
pub fn mark_removed(status: &mut Status) {
    status.metadata_mut().insert(REMOVED, MetadataValue::from_static("yes"));
}

/// Returns whether a controller refused its caller because that was removed.
pub fn is_member_removed(status: &Status) -> bool {
    status.metadata().contains_key(REMOVED)
}

/// One member's state of contact with its controller.
#[derive(Debug)]
pub struct Contact {
    controller: String,
    /// Some IO waits for the controller and cannot continue without it.
    io_waits: AtomicBool,
    /// Time of the last warning about its absence; `None` while it answers.
    last_warning: Mutex<Option<Instant>>,
}

impl Contact {
    pub fn new(controller: &str) -> Self {
        Self {
            controller: controller.to_owned(),
            io_waits: AtomicBool::new(false),
            last_warning: Mutex::new(None),
        }
    }

    /// Sets whether some IO waits for the controller, as that of a target which has just started
    /// and does not know its volumes.
    pub fn set_io_waits(&self, waits: bool) {
        self.io_waits.store(waits, Ordering::Relaxed);
    }

    /// Records an answer of the controller.
    pub fn reached(&self) {
        if self.last_warning().take().is_some() {
            tracing::info!(controller = self.controller, "the controller answers again");
        }
    }

    /// Records a missing answer or a refusal. Returns whether a warning was logged now.
    pub fn unreachable(&self, why: impl Display) -> bool {
        let mut last_warning = self.last_warning();
        if last_warning.is_some_and(|last_warning| last_warning.elapsed() < AGAIN) {
            return false;
        }
        *last_warning = Some(Instant::now());
        let controller = &self.controller;
        match self.io_waits.load(Ordering::Relaxed) {
            true => tracing::warn!(
                controller,
                %why,
                "no answer from the controller since this process started; the IO of its volumes \
                 waits until it answers; retrying"
            ),
            false => tracing::warn!(
                controller,
                %why,
                "no answer from the controller; IO continues; retrying"
            ),
        }
        true
    }

    /// Runs `follow_once`, which follows the controller until their connection ends, again and
    /// again until `shutdown`, with a pause of `retry`. `report` receives why the controller does
    /// not answer.
    ///
    /// # Errors
    /// The controller's statement that this member was removed from the cluster.
    pub async fn follow<F>(
        &self,
        mut shutdown: watch::Receiver<bool>,
        retry: Duration,
        mut follow_once: impl FnMut() -> F,
        report: impl Fn(String),
    ) -> Result<(), String>
    where
        F: Future<Output = Result<(), Status>>,
    {
        loop {
            tokio::select! {
                ended = follow_once() => report(match ended {
                    Ok(()) => "the connection ended".to_owned(),
                    Err(status) if is_member_removed(&status) => {
                        return Err(status.message().to_owned());
                    }
                    Err(status) => {
                        let clock = crate::error::wrong_time(&status);
                        let why = clock.as_deref().unwrap_or(status.message());
                        self.unreachable(why);
                        self.reason(why)
                    }
                }),
                _ = shutdown.wait_for(|down| *down) => return Ok(()),
            }
            tokio::time::sleep(retry).await;
        }
    }

    fn reason(&self, why: &str) -> String {
        match self.io_waits.load(Ordering::Relaxed) {
            true => format!(
                "out of reach ({why}) since this process was started, and the IO of its volumes waits \
                 for it"
            ),
            false => format!("out of reach ({why})"),
        }
    }

    fn last_warning(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.last_warning.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_controller_is_followed_through_its_absences_until_the_shutdown() {
        let contact = Contact::new("control:7400");
        let (stop, stopped) = watch::channel(false);
        let (attempts, reasons) = (Mutex::new(0), Mutex::new(Vec::new()));
        let once = || async {
            let attempt = std::mem::replace(&mut *attempts.lock().unwrap(), 1);
            match attempt {
                0 => Err(tonic::Status::unavailable("refused")),
                _ if reasons.lock().unwrap().len() < 3 => Ok(()),
                _ => {
                    stop.send_replace(true);
                    std::future::pending().await
                }
            }
        };
        let report = |why| reasons.lock().unwrap().push(why);
        contact.follow(stopped, Duration::from_millis(1), once, report).await.unwrap();
        let ended = "the connection ended";
        assert_eq!(*reasons.lock().unwrap(), ["out of reach (refused)", ended, ended]);
    }

    #[tokio::test]
    async fn a_removed_member_does_not_retry() {
        let contact = Contact::new("control:7400");
        let (_stop, stopped) = watch::channel(false);
        let once = || async {
            let mut status = Status::permission_denied("pool p was removed");
            mark_removed(&mut status);
            Err(status)
        };
        let ended = contact.follow(stopped, Duration::from_millis(1), once, |_| {}).await;
        assert_eq!(ended.unwrap_err(), "pool p was removed");
    }

    #[tokio::test]
    async fn the_reason_says_that_io_waits_for_the_controller() {
        let contact = Contact::new("control:7400");
        assert_eq!(contact.reason("refused"), "out of reach (refused)");
        contact.set_io_waits(true);
        assert!(contact.reason("refused").contains("the IO of its volumes waits"));
    }

    #[test]
    fn an_absence_is_logged_once_and_again_after_the_next_contact() {
        let contact = Contact::new("control:7400");
        assert!(contact.unreachable("refused"));
        assert!(!contact.unreachable("refused"));
        contact.reached();
        assert!(contact.unreachable("refused"));
    }
}
