//! The lease by which one controller rules.
//!
//! Its holder renews it each `retry`. Where that fails for `renew_within` the controller gives no order and grants
//! nothing, and goes on serving reads; it rules again once a renewal succeeds. The lease ends `lasts` after the
//! last renewal that etcd took, and the next controller rules then: from that time on the former one does not
//! rule again, also where etcd kept its lease for longer. Times are counted from before a renewal is sent, so
//! the holder stops before etcd lets another one begin, unless its clock is slower than etcd's by more than
//! `renew_within` is shorter than `lasts`. A change of records needs no clock: etcd compares who rules.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use quoin_api::etcd::TxnRequest;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Etcd, is_at, put, revision};
use crate::state::store::StoreError;

/// The next controller looks so often whether the one that rules is gone.
const LOOK_EVERY: Duration = Duration::from_millis(300);
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
    lease: i64,
    /// Revision of etcd at which this rule began: no other rule has it.
    revision: i64,
    times: LeaseTimes,
    /// Moment before the last renewal that succeeded was sent.
    renewed: Mutex<Instant>,
    has_ended: watch::Sender<bool>,
}

impl Rule {
    pub(super) fn revision(&self) -> i64 {
        self.0.revision
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

impl Etcd {
    /// Waits until this controller rules, under its name.
    ///
    /// # Errors
    /// Etcd refuses; where it is away that is logged, and waited for.
    pub async fn campaign(&self, name: &str, times: LeaseTimes) -> Result<Rule, StoreError> {
        let mut told = None;
        loop {
            match self.stand(name, times).await {
                Ok(Ok(rule)) => return Ok(rule),
                Ok(Err(other)) if told.as_ref() != Some(&other) => {
                    tracing::info!("controller {other} rules; this one waits for its turn");
                    told = Some(other);
                }
                Ok(Err(_)) => {}
                Err(StoreError::Away { why }) => {
                    tracing::warn!(%why, "the records cannot be reached");
                    told = None;
                }
                Err(error) => return Err(error),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Takes the rule where nobody has it. Returns the name of who has it otherwise.
    async fn stand(
        &self,
        name: &str,
        times: LeaseTimes,
    ) -> Result<Result<Rule, String>, StoreError> {
        let key = self.leader_key();
        if let Some(other) = self.get_raw(key.clone()).await? {
            return Ok(Err(String::from_utf8_lossy(&other.value).into_owned()));
        }
        let began = Instant::now();
        let seconds = times.lasts.as_secs_f64().ceil() as i64;
        let lease = self.client.grant_lease(seconds).await?;
        let request = TxnRequest {
            compare: vec![is_at(key.clone(), 0)],
            success: vec![put(key, name.as_bytes().to_vec(), lease)],
            failure: Vec::new(),
        };
        let answer = self.client.transact(request).await;
        let is_mine = answer.as_ref().is_ok_and(|answer| answer.succeeded);
        if !is_mine {
            // Where the answer was lost the key goes with its lease.
            self.client.revoke_lease(lease).await?;
            return answer.map(|_| Err("another one".to_owned()));
        }
        let rule = Rule(Arc::new(Inner {
            lease,
            revision: revision(&answer?) as i64,
            times,
            renewed: Mutex::new(began),
            has_ended: watch::channel(false).0,
        }));
        *self.rule.lock().expect("no holder of this lock panics") = Some(rule.clone());
        Ok(Ok(rule))
    }

    /// Renews the lease until it has ended.
    pub async fn keep_ruling(&self, rule: &Rule) {
        let inner = &rule.0;
        loop {
            tokio::time::sleep(inner.times.retry).await;
            let sent = Instant::now();
            let is_held = async {
                let is_alive = self.client.renew_lease(inner.lease).await?;
                // The key may be gone while its lease lives: a copy of etcd was restored.
                let leader = self.get_raw(self.leader_key()).await?;
                let is_mine = leader.is_some_and(|leader| leader.create_revision == inner.revision);
                Ok::<_, StoreError>(is_alive && is_mine)
            };
            match is_held.await {
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
    pub async fn release(&self, rule: &Rule) {
        rule.end();
        let released = tokio::time::timeout(RELEASE_TIME, self.client.revoke_lease(rule.0.lease));
        if !matches!(released.await, Ok(Ok(()))) {
            tracing::warn!("the lease could not be given up; it ends by itself");
        }
    }

    /// Member of etcd that is asked.
    #[must_use]
    pub fn member(&self) -> &str {
        self.client.member()
    }
}
