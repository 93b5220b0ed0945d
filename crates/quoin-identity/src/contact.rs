//! Whether the controller is heard, told in the log when that turns and not at every attempt; and
//! how a member goes on following it while it comes and goes.

use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::watch;

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

    /// Runs `follow_once`, which hears the controller until their connection ends, again and again
    /// until `shutdown`, with a pause of `retry`. `tell` learns why it is not heard.
    pub async fn follow<F>(
        &self,
        mut shutdown: watch::Receiver<bool>,
        retry: Duration,
        mut follow_once: impl FnMut() -> F,
        tell: impl Fn(String),
    ) where
        F: Future<Output = Result<(), tonic::Status>>,
    {
        loop {
            tokio::select! {
                ended = follow_once() => tell(match ended {
                    Ok(()) => "the connection ended".to_owned(),
                    Err(status) => {
                        self.missed(status.message());
                        format!("out of reach ({})", status.message())
                    }
                }),
                _ = shutdown.wait_for(|down| *down) => return,
            }
            tokio::time::sleep(retry).await;
        }
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.told.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_controller_that_comes_and_goes_is_followed_until_the_shutdown() {
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
        let tell = |why| reasons.lock().unwrap().push(why);
        contact.follow(stopped, Duration::from_millis(1), once, tell).await;
        let ended = "the connection ended";
        assert_eq!(*reasons.lock().unwrap(), ["out of reach (refused)", ended, ended]);
    }

    #[test]
    fn an_absence_is_told_once_and_anew_after_the_controller_was_heard() {
        let contact = Contact::new("control:7400");
        assert!(contact.missed("refused"));
        assert!(!contact.missed("refused"));
        contact.heard();
        assert!(contact.missed("refused"));
    }
}
