//! The Lease object by which one controller rules.
//!
//! As with all controllers of Kubernetes no clock of another host is believed: one that waits takes the Lease once
//! it has seen it unchanged for as long as it lasts, by its own clock. A holder that ends leaves it to nobody.

use std::sync::Mutex;

use tokio::time::Instant;

use super::client::{Changed, Client, Kind};
use super::objects::{Lease, LeaseContent, LeaseSpec, Metadata};
use crate::state::store::{LeaseTimes, Rule, StoreError};
use crate::time::{now_ms, timestamp};

pub(super) struct LeaseObject {
    name: String,
    cluster: String,
    times: LeaseTimes,
    /// The controller's name, and what no other process of that name has.
    identity: String,
    seen: Mutex<Seen>,
}

/// The Lease as it was seen last.
#[derive(Default)]
struct Seen {
    version: String,
    /// When it was first seen like this.
    since: Option<Instant>,
    /// Begin of this controller's rule, and number of rules up to it, which a renewal keeps.
    begun: (Option<String>, Option<i32>),
}

impl LeaseObject {
    pub fn new(cluster: &str, times: LeaseTimes, controller: &str) -> Self {
        Self {
            name: format!("{cluster}-controller"),
            cluster: cluster.to_owned(),
            times,
            identity: format!("{controller}_{:08x}", rand::random::<u32>()),
            seen: Mutex::default(),
        }
    }

    /// Takes the Lease where nobody has it. Returns the name of who has it otherwise.
    pub async fn stand(&self, client: &Client) -> Result<Result<Rule, String>, StoreError> {
        let asked = Instant::now();
        let found: Option<Lease> = client.get(Kind::Lease, &self.name).await?;
        let (changed, former) = match found {
            None => (client.create(Kind::Lease, &self.held(None)).await?, String::new()),
            Some(found) => {
                let holder = found.content.spec.holder_identity.clone().unwrap_or_default();
                if !holder.is_empty() && !self.is_over(&found) {
                    return Ok(Err(name_of(&holder)));
                }
                (client.replace(Kind::Lease, &self.held(Some(found))).await?, holder)
            }
        };
        let Changed::Done(lease) = changed else { return Ok(Err("another one".to_owned())) };
        if !former.is_empty() {
            tracing::info!("the lease of controller {} is over", name_of(&former));
        }
        let number = i64::try_from(lease.metadata.revision()?).unwrap_or(i64::MAX);
        self.note(&lease);
        Ok(Ok(Rule::begin(number, self.times, asked)))
    }

    /// Renews the Lease. Returns false if another controller has it.
    pub async fn renew(&self, client: &Client) -> Result<bool, StoreError> {
        let mut version = self.seen().version.clone();
        // The second try is for a renewal of before whose answer was lost.
        for _ in 0..2 {
            let mut lease = self.held(None);
            lease.metadata.resource_version = version;
            let spec = &mut lease.content.spec;
            (spec.acquire_time, spec.lease_transitions) = self.seen().begun.clone();
            match client.replace(Kind::Lease, &lease).await? {
                Changed::Done(lease) => {
                    self.note(&lease);
                    return Ok(true);
                }
                Changed::Missing => return Ok(false),
                Changed::Conflict => {}
            }
            let found: Option<Lease> = client.get(Kind::Lease, &self.name).await?;
            let is_mine = |lease: &Lease| {
                lease.content.spec.holder_identity.as_deref() == Some(self.identity.as_str())
            };
            let Some(found) = found.filter(is_mine) else { return Ok(false) };
            version = found.metadata.resource_version;
        }
        Ok(false)
    }

    /// Leaves the Lease to nobody.
    pub async fn give_up(&self, client: &Client) -> Result<(), StoreError> {
        let mut lease = self.held(None);
        lease.metadata.resource_version.clone_from(&self.seen().version);
        lease.content.spec.holder_identity = Some(String::new());
        lease.content.spec.lease_duration_seconds = Some(1);
        // Where somebody else has it by now it is given up as well.
        client.replace(Kind::Lease, &lease).await.map(drop)
    }

    /// The Lease as held by this process from now on.
    fn held(&self, former: Option<Lease>) -> Lease {
        let now = Some(now());
        let transitions = former.as_ref().and_then(|former| former.content.spec.lease_transitions);
        let mut metadata = Metadata::new(self.name.clone(), &self.cluster);
        if let Some(former) = former {
            metadata.resource_version = former.metadata.resource_version;
        }
        let spec = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.times.lasts.as_secs_f64().ceil() as i32),
            acquire_time: now.clone(),
            renew_time: now,
            lease_transitions: Some(transitions.unwrap_or(0).saturating_add(1)),
        };
        Lease {
            api_version: "coordination.k8s.io/v1".to_owned(),
            kind: "Lease".to_owned(),
            metadata,
            content: LeaseContent { spec },
        }
    }

    /// Returns true once the Lease was seen like this for as long as it lasts.
    fn is_over(&self, lease: &Lease) -> bool {
        let lasts = lease.content.spec.lease_duration_seconds.unwrap_or(0).max(1);
        let lasts = self.times.lasts.max(std::time::Duration::from_secs(lasts as u64));
        let mut seen = self.seen();
        if seen.since.is_none() || seen.version != lease.metadata.resource_version {
            seen.version.clone_from(&lease.metadata.resource_version);
            seen.since = Some(Instant::now());
        }
        seen.since.is_some_and(|since| since.elapsed() >= lasts)
    }

    fn note(&self, lease: &Lease) {
        let spec = &lease.content.spec;
        let mut seen = self.seen();
        seen.version.clone_from(&lease.metadata.resource_version);
        seen.begun = (spec.acquire_time.clone(), spec.lease_transitions);
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().expect("no holder of this lock panics")
    }
}

/// The time as Kubernetes takes it in a Lease, with six digits behind the seconds. People read it; no controller of
/// Quoin does.
fn now() -> String {
    let ms = now_ms();
    let seconds = timestamp(ms - ms % 1000).to_string();
    format!("{}.{:03}000Z", seconds.trim_end_matches('Z'), ms % 1000)
}

/// Name of the controller in an identity.
fn name_of(identity: &str) -> String {
    identity.rsplit_once('_').map_or(identity, |(name, _)| name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_six_digits_behind_its_seconds() {
        let text = now();
        let (date, rest) = text.split_once('T').unwrap();
        let (time, micros) = rest.strip_suffix('Z').unwrap().split_once('.').unwrap();
        assert_eq!((date.len(), time.len(), micros.len()), (10, 8, 6), "{text}");
    }
}
