//! Steps of the calls that are under way. A call that waits for a device, a tool or the kernel may
//! not end for minutes: the log then names the step that it is at.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// Time between two reports of a call.
const REPORT: Duration = Duration::from_secs(10);

/// The present step of a call.
type Step = Arc<Mutex<&'static str>>;

tokio::task_local! {
    static STEP: Step;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that the call of this task has come to `step`.
pub(super) fn begin(step: &'static str) {
    // Not every call is reported.
    let _ = STEP.try_with(|current| *lock(current) = step);
}

/// The calls under way by volume: one each, as callers promise.
#[derive(Default)]
pub(super) struct Steps {
    under_way: Mutex<BTreeMap<String, (&'static str, Step)>>,
}

impl Steps {
    /// Returns the call that is under way on a volume, and its step.
    pub fn of(&self, volume: &str) -> Option<(&'static str, &'static str)> {
        let (what, step) = lock(&self.under_way).get(volume)?.clone();
        let step = *lock(&step);
        Some((what, step))
    }

    /// Runs a call on a volume, and logs its step for as long as it has not ended.
    pub async fn reported<T>(
        &self,
        volume: &str,
        what: &'static str,
        call: impl Future<Output = T>,
    ) -> T {
        let step = Step::new(Mutex::new("beginning"));
        lock(&self.under_way).insert(volume.to_owned(), (what, step.clone()));
        let ended = Ended { steps: self, volume };
        let outcome = watch(step, call, REPORT, |step, elapsed| {
            tracing::warn!(volume, what, step, elapsed_s = elapsed.as_secs(), "has not ended yet");
        })
        .await;
        drop(ended);
        outcome
    }
}

/// Forgets a call when it ends, also where it is given up.
struct Ended<'a> {
    steps: &'a Steps,
    volume: &'a str,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        lock(&self.steps.under_way).remove(self.volume);
    }
}

async fn watch<T>(
    step: Step,
    call: impl Future<Output = T>,
    every: Duration,
    mut report: impl FnMut(&'static str, Duration),
) -> T {
    let present = step.clone();
    let watched = async move {
        let began = Instant::now();
        let mut reports = interval_at(began + every, every);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut call = std::pin::pin!(call);
        loop {
            tokio::select! {
                outcome = &mut call => return outcome,
                _ = reports.tick() => {
                    let step = *lock(&present);
                    report(step, began.elapsed());
                }
            }
        }
    };
    STEP.scope(step, watched).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_call_that_does_not_end_is_reported_with_the_step_that_it_is_at() {
        let (sender, mut reported) = tokio::sync::mpsc::unbounded_channel();
        let call = async {
            let mut seen = Vec::new();
            for step in ["attaching", "formatting"] {
                begin(step);
                // A report of the former step may be on its way.
                while seen.last() != Some(&step) {
                    seen.extend(reported.recv().await);
                }
            }
            seen.dedup();
            seen
        };
        let report = move |step, _| sender.send(step).unwrap();
        let step = Step::new(Mutex::new("beginning"));
        let seen = watch(step, call, Duration::from_millis(1), report).await;
        assert_eq!(seen, ["attaching", "formatting"]);
    }

    #[tokio::test]
    async fn a_call_under_way_is_known_by_its_volume_until_it_ends_or_is_given_up() {
        let steps = Steps::default();
        let call = async {
            begin("mounting");
            steps.of("v")
        };
        assert_eq!(steps.reported("v", "staging", call).await, Some(("staging", "mounting")));
        assert_eq!(steps.of("v"), None);
        let never = steps.reported("v", "staging", std::future::pending::<()>());
        assert!(tokio::time::timeout(Duration::from_millis(1), never).await.is_err());
        assert_eq!(steps.of("v"), None);
    }
}
