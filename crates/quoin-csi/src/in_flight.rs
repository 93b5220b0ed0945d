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
use std::time::Instant;

use tonic::{Code, Status};

use crate::refusal;

/// The keys (volume ids, names) that calls are working on.
#[derive(Clone, Default)]
pub struct InFlight {
    /// With the moment at which each began.
    keys: Arc<Mutex<HashMap<String, Instant>>>,
}

/// Holds one key until it is dropped.
pub struct Guard {
    keys: Arc<Mutex<HashMap<String, Instant>>>,
    key: String,
}

impl InFlight {
    /// Takes the key, or refuses if it is taken.
    ///
    /// # Errors
    /// 10 ABORTED.
    pub fn begin(&self, what: &str, key: &str) -> Result<Guard, Status> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let key_of_call = format!("{what} {key}");
        if let Some(began) = keys.get(&key_of_call) {
            return Err(refusal::pending(&format!("{what} {key:?}"), began.elapsed()));
        }
        keys.insert(key_of_call.clone(), Instant::now());
        Ok(Guard { keys: self.keys.clone(), key: key_of_call })
    }

    /// Returns whether no call holds a key.
    pub fn is_idle(&self) -> bool {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
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

    /// Proves CSI-ERR-12: for a call that panics, too.
    #[tokio::test]
    async fn a_second_call_is_aborted_and_works_once_the_first_has_ended() {
        let calls = InFlight::default();
        let first = calls.begin("volume", "v").unwrap();
        assert_eq!(calls.begin("volume", "v").err().unwrap().code(), Code::Aborted);
        let _other = calls.begin("volume", "w").unwrap();
        drop(first);
        let held = calls.begin("volume", "v").unwrap();
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
        calls.begin("volume", "v").unwrap();
    }

    #[tokio::test]
    async fn a_call_without_its_caller_continues_and_keeps_its_lock() {
        let calls = InFlight::default();
        let (done, ended) = tokio::sync::oneshot::channel();
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let held = calls.begin("volume", "v").unwrap();
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
        assert!(calls.begin("volume", "v").is_err());
        go.send(()).unwrap();
        ended.await.unwrap();
    }
}
