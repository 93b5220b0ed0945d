//! Guard of one call a volume at a time.
//!
//! Callers promise that, and break the promise when they restart. A second call is refused at once
//! with 10 ABORTED and without effect, and all callers know how to repeat it; queueing would let
//! calls pile up behind a slow one.
//!
//! A call is also finished when its caller has gone: a mount or a format that has begun must not
//! stop at a random step because a deadline passed, and its lock must not be released while it
//! still works. So calls run as tasks of their own that hold their lock.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::{Code, Status};

use crate::plugin::Subject;
use crate::refusal;

/// The volumes, snapshots and names that calls are working on, with the moment at which each began.
type Subjects = Arc<Mutex<HashMap<Subject, Instant>>>;

/// The calls under way.
#[derive(Clone, Default)]
pub struct InFlight {
    subjects: Subjects,
}

/// Holds one subject until it is dropped.
pub struct Guard {
    subjects: Subjects,
    subject: Subject,
}

impl InFlight {
    /// Takes the subject.
    ///
    /// # Errors
    /// The time for which another call has had it.
    pub(crate) fn begin(&self, subject: &Subject) -> Result<Guard, Duration> {
        let mut subjects = self.subjects.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(began) = subjects.get(subject) {
            return Err(began.elapsed());
        }
        subjects.insert(subject.clone(), Instant::now());
        Ok(Guard { subjects: self.subjects.clone(), subject: subject.clone() })
    }

    /// Returns whether no call holds a subject.
    pub fn is_idle(&self) -> bool {
        self.subjects.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.subjects.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.subject);
    }
}

/// Runs a call to its end, even if its caller has gone, and logs its result. Nothing of the request
/// is logged: it may hold secrets.
///
/// # Errors
/// The call's own error; 13 if it panicked.
pub async fn run_to_completion<T: Send + 'static>(
    rpc: &'static str,
    call: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    let logged = async move {
        let started = Instant::now();
        let outcome = call.await;
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        match &outcome {
            Ok(_) => tracing::debug!(rpc, elapsed_ms, "answered"),
            Err(status) if matches!(status.code(), Code::Internal | Code::Unknown) => {
                tracing::error!(rpc, elapsed_ms, code = ?status.code(), message = status.message());
            }
            Err(status) => {
                tracing::info!(rpc, elapsed_ms, code = ?status.code(), message = status.message());
            }
        }
        outcome
    };
    match tokio::spawn(logged).await {
        Ok(outcome) => outcome,
        Err(_) => Err(refusal::internal(rpc)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(key: &str) -> Subject {
        Subject { what: "volume", key: key.to_owned() }
    }

    /// Proves CSI-ERR-12: for a call that panics, too.
    #[tokio::test]
    async fn a_second_call_is_aborted_and_works_once_the_first_has_ended() {
        let calls = InFlight::default();
        let first = calls.begin(&volume("v")).unwrap();
        let since = calls.begin(&volume("v")).err().unwrap();
        assert_eq!(refusal::pending("v", since, None).code(), Code::Aborted);
        let _other = calls.begin(&volume("w")).unwrap();
        drop(first);
        let held = calls.begin(&volume("v")).unwrap();
        let failed = run_to_completion("Test", async move {
            let _held = held;
            if true {
                panic!("internal detail");
            }
            Ok(())
        })
        .await
        .unwrap_err();
        assert_eq!(failed.code(), Code::Internal);
        assert!(!failed.message().contains("internal detail"));
        calls.begin(&volume("v")).unwrap();
    }

    #[tokio::test]
    async fn a_call_without_its_caller_continues_and_keeps_its_lock() {
        let calls = InFlight::default();
        let (done, ended) = tokio::sync::oneshot::channel();
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let held = calls.begin(&volume("v")).unwrap();
        let call = run_to_completion("Test", async move {
            let _held = held;
            let _ = gone.await;
            let _ = done.send(());
            Ok(())
        });
        tokio::select! {
            biased;
            _ = call => unreachable!("the call waits"),
            () = tokio::task::yield_now() => {}
        }
        assert!(calls.begin(&volume("v")).is_err());
        go.send(()).unwrap();
        ended.await.unwrap();
    }
}
