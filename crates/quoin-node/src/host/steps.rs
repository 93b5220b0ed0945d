//! Steps of the calls that are under way. A call that waits for a device, a tool or the kernel may
//! not end for minutes: the log then names the step that it is at.

use std::cell::Cell;
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// Time between two reports of a call.
const REPORT: Duration = Duration::from_secs(10);

tokio::task_local! {
    static STEP: Cell<&'static str>;
}

/// Records that the call of this task has come to `step`.
pub(super) fn begin(step: &'static str) {
    // Not every call is reported.
    let _ = STEP.try_with(|current| current.set(step));
}

/// Runs a call on a volume, and logs its step for as long as it has not ended.
pub(super) async fn reported<T>(volume: &str, what: &str, call: impl Future<Output = T>) -> T {
    watch(call, REPORT, |step, elapsed| {
        tracing::warn!(volume, what, step, elapsed_s = elapsed.as_secs(), "has not ended yet");
    })
    .await
}

async fn watch<T>(
    call: impl Future<Output = T>,
    every: Duration,
    mut report: impl FnMut(&'static str, Duration),
) -> T {
    let watched = async {
        let began = Instant::now();
        let mut reports = interval_at(began + every, every);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut call = std::pin::pin!(call);
        loop {
            tokio::select! {
                outcome = &mut call => return outcome,
                _ = reports.tick() => report(STEP.with(Cell::get), began.elapsed()),
            }
        }
    };
    STEP.scope(Cell::new("beginning"), watched).await
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
        let seen = watch(call, Duration::from_millis(1), report).await;
        assert_eq!(seen, ["attaching", "formatting"]);
    }
}
