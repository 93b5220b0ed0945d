//! The lease by which one of several controllers rules.
//!
//! Its holder renews it each `retry`. Where that fails for `renew_within` the controller gives no order and grants
//! nothing, and goes on serving reads; it rules again once a renewal succeeds. The lease ends `lasts` after the
//! last renewal that the engine took, and the next controller rules then: from that time on the former one does not
//! rule again, also where the engine kept its lease for longer. Times are counted from before a renewal is sent, so
//! the holder stops before another one may begin, unless its clock is slower than the other's by more than
//! `renew_within` is shorter than `lasts`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::{SharedStore, StoreError};

/// A release at the end takes no longer.
const RELEASE_TIME: Duration = Duration::from_secs(2);

/// Times of a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTimes {
    pub lasts: Duration,
    pub renew_within: Duration,
    pub retry: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { lasts: seconds(15), renew_within: seconds(10), retry: seconds(2) }
    }
}

impl LeaseTimes {
    /// Time for a change in an engine that cannot refuse it later: one that is sent when the renewal is all but
    /// overdue ends before the lease passes on, with a quarter of the time between for clocks that differ.
    #[must_use]
    pub(super) fn change_time(&self) -> Duration {
        (self.lasts - self.renew_within) * 3 / 4
    }

    /// # Errors
    /// They do not fit each other.
    pub fn check(&self) -> Result<(), StoreError> {
        let is_ordered = self.retry * 2 <= self.renew_within && self.renew_within < self.lasts;
        let is_bounded = self.lasts >= Duration::from_secs(2)
            && self.lasts <= Duration::from_secs(3600)
            && self.retry >= Duration::from_millis(100);
        match is_ordered && is_bounded {
            true => Ok(()),
            false => Err(StoreError::Setting {
                name: "--lease",
                rule: "LASTS/RENEW/RETRY: 2s to 1h, less than that, and at most half of the second (at \
                       least 100ms), as in 15s/10s/2s"
                    .to_owned(),
            }),
        }
    }
}

/// Rule of this controller over the records, by a lease.
#[derive(Clone, Debug)]
pub struct Rule(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    number: i64,
    times: LeaseTimes,
    /// Moment before the last renewal that succeeded was sent.
    renewed: Mutex<Instant>,
    has_ended: watch::Sender<bool>,
}

impl Rule {
    /// `number`: no other rule over these records has it. `asked`: moment before the lease was asked for.
    pub(super) fn begin(number: i64, times: LeaseTimes, asked: Instant) -> Self {
        let has_ended = watch::channel(false).0;
        Self(Arc::new(Inner { number, times, renewed: Mutex::new(asked), has_ended }))
    }

    pub(super) fn number(&self) -> i64 {
        self.0.number
    }

    pub(super) fn lasts(&self) -> Duration {
        self.0.times.lasts
    }

    /// Time since the last renewal.
    #[must_use]
    pub fn since_renewal(&self) -> Duration {
        self.0.renewed.lock().expect("no holder of this lock panics").elapsed()
    }

    /// # Errors
    /// The lease has ended, or its renewal is overdue.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        if *self.0.has_ended.borrow() {
            return Err(StoreError::NotLeading);
        }
        let since = self.since_renewal();
        match since < self.0.times.renew_within {
            true => Ok(()),
            false => Err(StoreError::NotRenewed { seconds: since.as_secs() }),
        }
    }

    /// Ends this rule, and returns why: another controller rules.
    pub(super) fn end(&self) -> StoreError {
        self.0.has_ended.send_replace(true);
        StoreError::NotLeading
    }

    /// Waits until another controller rules, or may.
    pub async fn ended(&self) {
        let mut ended = self.0.has_ended.subscribe();
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Waits until the lease may have passed to another controller, for lack of a renewal.
    pub async fn expired(&self) {
        loop {
            let since = self.since_renewal();
            if since >= self.0.times.lasts {
                return;
            }
            tokio::time::sleep(self.0.times.lasts - since).await;
        }
    }
}

/// Waits until this controller rules. `ruler` is told who does meanwhile; empty: that is unknown.
///
/// # Errors
/// The engine refuses; where it is away that is logged, and waited for.
pub async fn campaign(
    store: &dyn SharedStore,
    ruler: &watch::Sender<String>,
) -> Result<Rule, StoreError> {
    loop {
        match store.stand().await {
            Ok(Ok(rule)) => return Ok(rule),
            Ok(Err(other)) => {
                if *ruler.borrow() != other {
                    tracing::info!("controller {other} rules; this one waits for its turn");
                    ruler.send_replace(other);
                }
            }
            Err(StoreError::Away { why }) => {
                tracing::warn!(%why, "the records cannot be reached");
                ruler.send_replace(String::new());
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(store.look_every()).await;
    }
}

/// Renews the lease until it has ended.
pub async fn keep_ruling(store: &dyn SharedStore, rule: &Rule) {
    let inner = &rule.0;
    loop {
        tokio::time::sleep(inner.times.retry).await;
        let sent = Instant::now();
        match store.renew(rule).await {
            // Members were sent to the next controller, which may not have come to it: let it rule now.
            Ok(true) if rule.since_renewal() >= inner.times.lasts => {
                rule.end();
                return;
            }
            Ok(true) => {
                *inner.renewed.lock().expect("no holder of this lock panics") = sent;
            }
            Ok(false) => {
                rule.end();
                return;
            }
            Err(error) => tracing::warn!(%error, "the lease could not be renewed"),
        }
    }
}

/// Gives the rule up, so that the next controller need not wait for the lease to end.
pub async fn release(store: &dyn SharedStore, rule: &Rule) {
    rule.end();
    let released = tokio::time::timeout(RELEASE_TIME, store.give_up(rule));
    if !matches!(released.await, Ok(Ok(()))) {
        tracing::warn!("the lease could not be given up; it ends by itself");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last change of a holder is over before another one may rule, where its clock is slower and the other's
    /// faster by this share.
    fn is_over(times: &LeaseTimes, change_time: Duration, drift: f64) -> bool {
        let last = times.renew_within.as_secs_f64() / (1.0 - drift) + change_time.as_secs_f64();
        last <= times.lasts.as_secs_f64() / (1.0 + drift)
    }

    #[test]
    fn the_last_change_ends_before_the_lease_passes_on_by_clocks_that_differ_within_bounds() {
        let times = |lasts, renew_within| {
            let [lasts, renew_within] = [lasts, renew_within].map(Duration::from_millis);
            LeaseTimes { lasts, renew_within, retry: Duration::from_millis(500) }
        };
        for times in [LeaseTimes::default(), times(4000, 3000), times(60_000, 40_000)] {
            times.check().unwrap();
            assert!(is_over(&times, times.change_time(), 0.03), "{times:?}");
            assert!(!is_over(&times, times.change_time(), 0.25), "{times:?}: the bound is none");
            let whole = times.lasts - times.renew_within;
            assert!(
                !is_over(&times, whole, 0.01),
                "{times:?}: without a margin no clock may differ"
            );
        }
        // Nearer to each other, clocks may differ by less.
        assert!(is_over(&times(20_000, 19_000), times(20_000, 19_000).change_time(), 0.005));
    }
}
