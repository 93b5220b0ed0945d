//! Calls of the kernel that wait for a volume.
//!
//! The device of a volume and the files on it answer when its target does, which may be never. The
//! threads of the runtime serve every volume of the host, so none of them may touch either: what
//! does takes a [`DeviceThread`], and only [`DeviceCalls`] has one to give.
//!
//! Promises: a caller waits for a bounded time and learns which call hangs since when; a call that
//! hangs goes on behind its caller, and no other change of its volume begins before it has ended; a
//! volume has at most two threads here, one that changes and one that looks.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use crate::error::Error;

/// Longest wait for a call that changes something: a mount, a check, a format. It goes on behind.
const CHANGE_MAX: Duration = Duration::from_secs(30);
/// Longest wait for a call that only looks.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// Proof that the present thread serves one volume alone and may wait for it.
pub(crate) struct DeviceThread(());

#[cfg(test)]
impl DeviceThread {
    /// Calls a function of a device on a test's own thread.
    pub fn of_test<T>(work: impl FnOnce(&Self) -> T) -> T {
        work(&Self(()))
    }
}

/// Effect of a call on its volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Change,
    Look,
}

/// A call under way.
#[derive(Clone)]
struct Pending {
    what: &'static str,
    since: Instant,
    /// Closed when it ends.
    ended: watch::Receiver<()>,
}

type Key = (String, Lane);

/// The calls of this process on devices and files of volumes. Clones share everything.
#[derive(Clone)]
pub(crate) struct DeviceCalls {
    pending: Arc<Mutex<BTreeMap<Key, Pending>>>,
    change_max: Duration,
    look_max: Duration,
}

impl Default for DeviceCalls {
    fn default() -> Self {
        Self { pending: Arc::default(), change_max: CHANGE_MAX, look_max: LOOK_MAX }
    }
}

/// The turn of one call; its end lets the next one begin.
struct Turn {
    calls: DeviceCalls,
    key: Key,
    /// Dropped after the entry is gone.
    _ended: watch::Sender<()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.calls.pending().remove(&self.key);
    }
}

impl DeviceCalls {
    fn pending(&self) -> MutexGuard<'_, BTreeMap<Key, Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a change of a volume on a thread of its own, after the change before it. `what` names it
    /// in messages.
    ///
    /// # Errors
    /// [`Error::Waiting`] after half a minute, or its own.
    pub async fn change<T: Send + 'static>(
        &self,
        volume: &str,
        what: &'static str,
        work: impl FnOnce(&DeviceThread) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.turn((volume.to_owned(), Lane::Change), what).await?;
        self.on_thread(turn, what, work).await
    }

    /// Runs a program of the host on a volume's device, as [`Self::change`] runs a system call.
    ///
    /// # Errors
    /// As [`Self::change`].
    pub async fn program<T: Send + 'static>(
        &self,
        volume: &str,
        what: &'static str,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.turn((volume.to_owned(), Lane::Change), what).await?;
        let key = turn.key.clone();
        let (sender, outcome) = oneshot::channel();
        tokio::spawn(async move {
            let result = work.await;
            drop(turn);
            let _ = sender.send(result);
        });
        self.answer(&key, what, outcome).await
    }

    /// Looks at a device or file of a volume on a thread of its own. While an earlier look hangs,
    /// none is begun.
    ///
    /// # Errors
    /// [`Error::Waiting`] after two seconds, or its own.
    pub async fn look<T: Send + 'static>(
        &self,
        volume: &str,
        what: &'static str,
        work: impl FnOnce(&DeviceThread) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let turn = self.turn((volume.to_owned(), Lane::Look), what).await?;
        self.on_thread(turn, what, work).await
    }

    fn bound(&self, lane: Lane) -> Duration {
        match lane {
            Lane::Change => self.change_max,
            Lane::Look => self.look_max,
        }
    }

    /// Waits until no other call of the volume in this lane is under way, and takes the turn.
    async fn turn(&self, key: Key, what: &'static str) -> Result<Turn, Error> {
        let bound = self.bound(key.1);
        let asked = Instant::now();
        let (ended, receiver) = watch::channel(());
        loop {
            let mut before = {
                let mut pending = self.pending();
                match pending.get(&key) {
                    Some(before) => before.clone(),
                    None => {
                        let own = Pending { what, since: Instant::now(), ended: receiver };
                        pending.insert(key.clone(), own);
                        return Ok(Turn { calls: self.clone(), key, _ended: ended });
                    }
                }
            };
            // A look that hangs is a finding by itself: the next one does not wait for it anew.
            let begun = if key.1 == Lane::Look { before.since } else { asked };
            let left = bound.saturating_sub(begun.elapsed());
            // The value never changes: the wait ends when the sender is dropped.
            if tokio::time::timeout(left, before.ended.changed()).await.is_err() {
                return Err(waiting(&key, before.what, before.since));
            }
        }
    }

    async fn on_thread<T: Send + 'static>(
        &self,
        turn: Turn,
        what: &'static str,
        work: impl FnOnce(&DeviceThread) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let key = turn.key.clone();
        let (sender, outcome) = oneshot::channel();
        std::thread::Builder::new()
            .name("device".to_owned())
            .spawn(move || {
                let result = work(&DeviceThread(()));
                drop(turn);
                let _ = sender.send(result);
            })
            .map_err(Error::io("starting a thread for", "the device of a volume"))?;
        self.answer(&key, what, outcome).await
    }

    async fn answer<T>(
        &self,
        key: &Key,
        what: &'static str,
        outcome: oneshot::Receiver<Result<T, Error>>,
    ) -> Result<T, Error> {
        let began = Instant::now();
        match tokio::time::timeout(self.bound(key.1), outcome).await {
            Ok(Ok(result)) => result,
            // The call panicked, and its message is on standard error.
            Ok(Err(_)) => panic!("{what} of volume {} panicked", key.0),
            Err(_) => Err(waiting(key, what, began)),
        }
    }
}

fn waiting((volume, _): &Key, what: &'static str, since: Instant) -> Error {
    Error::Waiting {
        what: format!("volume {volume}: {what} is still under way"),
        waited_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
        way_out: "it ends when the volume's IO does, and this call may be repeated; \
                  `quoin volume doctor` says what its IO waits for",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Kind;

    /// Calls that are given up soon, and the same calls with time enough on a busy machine.
    fn calls() -> (DeviceCalls, DeviceCalls) {
        let of =
            |change_max, look_max| DeviceCalls { pending: Arc::default(), change_max, look_max };
        let hasty = of(Duration::from_millis(80), Duration::from_secs(1));
        let patient = of(Duration::from_secs(120), Duration::from_secs(120));
        (hasty.clone(), DeviceCalls { pending: hasty.pending, ..patient })
    }

    /// A call that hangs until the sender is dropped.
    fn hanging() -> (mpsc::Sender<()>, impl FnOnce(&DeviceThread) -> Result<(), Error> + Send) {
        let (sender, receiver) = mpsc::channel::<()>();
        (sender, move |_: &DeviceThread| {
            let _ = receiver.recv();
            Ok(())
        })
    }

    #[tokio::test]
    async fn a_call_that_hangs_is_answered_with_its_reason_and_holds_up_no_other_volume() {
        let (calls, patient) = calls();
        let (release, work) = hanging();
        let error = calls.change("v", "mounting", work).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("volume v: mounting is still under way"), "{text}");
        // The runtime has one thread here, and it is free.
        assert_eq!(patient.change("w", "mounting", |_| Ok(7)).await.unwrap(), 7);
        drop(release);
    }

    #[tokio::test]
    async fn no_change_begins_while_an_earlier_one_of_its_volume_hangs() {
        let (calls, patient) = calls();
        let (release, work) = hanging();
        calls.change("v", "mounting", work).await.unwrap_err();
        let second = calls.change("v", "unmounting", |_| -> Result<(), Error> {
            panic!("two changes at once");
        });
        let text = second.await.unwrap_err().to_string();
        assert!(text.contains("mounting is still under way"), "{text}");
        // Looks have a lane of their own.
        patient.look("v", "measuring", |_| Ok(())).await.unwrap();
        drop(release);
        patient.change("v", "unmounting", |_| Ok(())).await.unwrap();
        assert!(calls.pending().is_empty());
    }

    #[tokio::test]
    async fn a_look_that_hangs_is_reported_at_once_to_those_that_look_after_it() {
        let (calls, _) = calls();
        let (release, work) = hanging();
        calls.look("v", "measuring", work).await.unwrap_err();
        let began = Instant::now();
        for _ in 0..50 {
            calls.look("v", "measuring", |_| Ok(())).await.unwrap_err();
        }
        assert!(began.elapsed() < calls.look_max * 25, "none waited for its own bound");
        drop(release);
    }

    #[tokio::test]
    async fn a_program_that_hangs_goes_on_behind_its_caller_and_keeps_its_turn() {
        let (calls, patient) = calls();
        let (release, gone) = oneshot::channel::<()>();
        let program = async move {
            let _ = gone.await;
            Ok(())
        };
        let text = calls.program("v", "checking", program).await.unwrap_err().to_string();
        assert!(text.contains("checking is still under way"), "{text}");
        calls.change("v", "mounting", |_| Ok(())).await.unwrap_err();
        drop(release);
        patient.change("v", "mounting", |_| Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn a_call_that_panics_leaves_its_turn_to_the_next() {
        let (_, patient) = calls();
        let own = patient.clone();
        let failed = tokio::spawn(async move {
            own.change("v", "mounting", |_| -> Result<(), Error> { panic!("by a defect") }).await
        });
        assert!(failed.await.unwrap_err().is_panic());
        patient.change("v", "mounting", |_| Ok(())).await.unwrap();
    }
}
