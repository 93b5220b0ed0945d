//! The store of several controllers: records in an etcd cluster, and a lease that lets one controller rule.
//!
//! A record is the key `PREFIX/records/KEY`; its revision is etcd's own. The controller that rules holds the key
//! `PREFIX/leader` by a lease, and each change compares the revision at which that key was made: a controller
//! that lost the lease changes nothing any more, whatever its clock says. The cluster's authority, with its
//! private key, is `PREFIX/authority`: whoever reads etcd can become a member.

mod client;

use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use quoin_api::etcd::compare::{CompareResult, CompareTarget, TargetUnion};
use quoin_api::etcd::request_op::Request;
use quoin_api::etcd::response_op::Response;
use quoin_api::etcd::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest,
    TxnResponse,
};
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::shared::Ruling;
use super::{About, Change, Entry, LeaseTimes, Put, Rule, SharedStore, Store, StoreError, Swap};
use client::Client;

/// Records of one answer.
const PAGE_RECORDS: i64 = 256;
/// Changes of one transaction: etcd takes 128 by default.
const TRANSACTION_PUTS: usize = 100;
/// Longest prefix of keys.
const PREFIX_BYTES_MAX: usize = 128;
/// The next controller looks so often whether the one that rules is gone.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// Where the records lie in etcd, and how it is reached.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// `http://HOST:PORT` or `https://HOST:PORT` of each member.
    pub endpoints: Vec<String>,
    /// Begins each key: one etcd may serve several clusters.
    pub prefix: String,
    /// PEM file of the authority of etcd's certificates.
    pub ca: Option<PathBuf>,
    /// PEM files of this client's certificate and key.
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

/// Records in etcd.
pub struct Etcd {
    client: Client,
    prefix: String,
    times: LeaseTimes,
    ruling: Ruling,
    /// Lease of this controller in etcd; 0: it has none.
    lease: AtomicI64,
}

impl Etcd {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// An option breaks its rule.
    pub fn new(
        options: &EtcdOptions,
        times: LeaseTimes,
        controller: String,
    ) -> Result<Self, StoreError> {
        let prefix = options.prefix.trim_end_matches('/');
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"/-_.".contains(&b);
        let is_valid = prefix.starts_with('/') && prefix.len() <= PREFIX_BYTES_MAX;
        if !is_valid || !prefix.bytes().all(is_plain) {
            return Err(StoreError::Setting {
                name: "--etcd-prefix",
                rule: format!("a slash and up to {PREFIX_BYTES_MAX} letters, digits, / - _ ."),
            });
        }
        Ok(Self {
            client: Client::new(options)?,
            prefix: prefix.to_owned(),
            times,
            ruling: Ruling::new(controller),
            lease: AtomicI64::new(0),
        })
    }

    fn key_of(&self, key: &str) -> Vec<u8> {
        format!("{}/records/{key}", self.prefix).into_bytes()
    }

    fn leader_key(&self) -> Vec<u8> {
        format!("{}/leader", self.prefix).into_bytes()
    }

    fn authority_key(&self) -> Vec<u8> {
        format!("{}/authority", self.prefix).into_bytes()
    }

    fn entry(&self, found: &KeyValue) -> Result<Entry, StoreError> {
        let records = format!("{}/records/", self.prefix);
        let key = String::from_utf8_lossy(&found.key);
        let key = key.strip_prefix(&records).map(str::to_owned);
        let unexpected = || StoreError::Failed("etcd answered with a foreign key".to_owned());
        Ok(Entry {
            key: key.ok_or_else(unexpected)?,
            revision: found.mod_revision.max(0) as u64,
            value: found.value.clone(),
        })
    }

    /// The comparison of each change beside that of its record: this controller rules.
    fn fence(&self) -> Option<Compare> {
        self.ruling.rule().map(|rule| Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Create.into(),
            key: self.leader_key(),
            target_union: Some(TargetUnion::CreateRevision(rule.number())),
        })
    }

    /// # Errors
    /// Another controller rules: this one's rule ends.
    fn check_fence(&self, leader: Option<&KeyValue>) -> Result<(), StoreError> {
        let Some(rule) = self.ruling.rule() else { return Ok(()) };
        if leader.is_some_and(|leader| leader.create_revision == rule.number()) {
            return Ok(());
        }
        Err(rule.end())
    }

    async fn get_raw(&self, key: Vec<u8>) -> Result<Option<KeyValue>, StoreError> {
        let request = RangeRequest { key, ..RangeRequest::default() };
        Ok(self.client.range(request).await?.kvs.pop())
    }
}

/// Compares the revision of a key; 0: there is none.
fn is_at(key: Vec<u8>, revision: i64) -> Compare {
    Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key,
        target_union: Some(TargetUnion::ModRevision(revision)),
    }
}

fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
    RequestOp { request: Some(Request::RequestPut(PutRequest { key, value, lease })) }
}

fn delete(key: Vec<u8>) -> RequestOp {
    let request = DeleteRangeRequest { key, range_end: Vec::new() };
    RequestOp { request: Some(Request::RequestDeleteRange(request)) }
}

fn read(key: Vec<u8>) -> RequestOp {
    let request = RangeRequest { key, ..RangeRequest::default() };
    RequestOp { request: Some(Request::RequestRange(request)) }
}

fn revision(answer: &TxnResponse) -> u64 {
    answer.header.as_ref().map_or(0, |header| header.revision.max(0) as u64)
}

/// The record that the read at this place of a transaction found.
fn found(answer: &mut TxnResponse, place: usize) -> Option<KeyValue> {
    let response = answer.responses.get_mut(place)?.response.as_mut()?;
    match response {
        Response::ResponseRange(range) => range.kvs.pop(),
        _ => None,
    }
}

#[async_trait]
impl Store for Etcd {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let found = self.get_raw(self.key_of(key)).await?;
        found.map(|found| self.entry(&found)).transpose()
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        let mut from = self.key_of(prefix);
        // The first key behind all that begin with it: keys are text, so no byte of it is 255.
        let mut end = from.clone();
        *end.last_mut().expect("it begins with a slash") += 1;
        let (mut entries, mut at) = (Vec::new(), 0);
        loop {
            let request = RangeRequest {
                key: from.clone(),
                range_end: end.clone(),
                limit: PAGE_RECORDS,
                // All pages are of one moment.
                revision: at,
            };
            let page = self.client.range(request).await?;
            at =
                page.header.as_ref().map_or(0, |header| if at == 0 { header.revision } else { at });
            for found in &page.kvs {
                entries.push(self.entry(found)?);
            }
            match page.kvs.last() {
                Some(last) if page.more => {
                    from = [&last.key[..], &[0]].concat();
                }
                _ => return Ok(entries),
            }
        }
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        self.check_rule()?;
        let full = self.key_of(key);
        let change = match value {
            Some(value) => put(full.clone(), value, 0),
            None => delete(full.clone()),
        };
        let compare = is_at(full.clone(), i64::try_from(expected).unwrap_or(i64::MAX));
        let request = TxnRequest {
            compare: [Some(compare), self.fence()].into_iter().flatten().collect(),
            success: vec![change],
            failure: vec![read(full), read(self.leader_key())],
        };
        let mut answer = self.client.transact(request).await?;
        if answer.succeeded {
            let revision = revision(&answer);
            self.ruling.tell(key, revision);
            return Ok(Swap::Done(revision));
        }
        self.check_fence(found(&mut answer, 1).as_ref())?;
        let found = found(&mut answer, 0);
        Ok(Swap::Conflict(found.map(|found| self.entry(&found)).transpose()?))
    }

    /// Up to 100 records are one commit. More are several commits, in the order of the records.
    async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError> {
        self.check_rule()?;
        // A transaction takes each key once, and the last word counts.
        let mut last = std::collections::BTreeMap::new();
        for (place, (key, _)) in records.iter().enumerate() {
            last.insert(key.clone(), place);
        }
        let kept = records.into_iter().enumerate().filter(|(place, (key, _))| last[key] == *place);
        let kept: Vec<Put> = kept.map(|(_, record)| record).collect();
        for chunk in kept.chunks(TRANSACTION_PUTS) {
            let change = |(key, value): &Put| match value {
                Some(value) => put(self.key_of(key), value.clone(), 0),
                None => delete(self.key_of(key)),
            };
            let request = TxnRequest {
                compare: self.fence().into_iter().collect(),
                success: chunk.iter().map(change).collect(),
                failure: vec![read(self.leader_key())],
            };
            let mut answer = self.client.transact(request).await?;
            if !answer.succeeded {
                self.check_fence(found(&mut answer, 0).as_ref())?;
                let why = "etcd refused a change without a reason".to_owned();
                return Err(StoreError::Failed(why));
            }
            let revision = revision(&answer);
            for (key, _) in chunk {
                self.ruling.tell(key, revision);
            }
        }
        Ok(())
    }

    fn watch(&self) -> broadcast::Receiver<Change> {
        self.ruling.follow()
    }

    fn about(&self) -> About {
        let place = self.client.member().to_owned();
        About { engine: "etcd", place, lease: self.ruling.lease() }
    }

    fn check_rule(&self) -> Result<(), StoreError> {
        self.ruling.check()
    }

    async fn keep_authority(&self, authority: Vec<u8>) -> Result<(), StoreError> {
        self.check_rule()?;
        let request = TxnRequest {
            compare: self.fence().into_iter().collect(),
            success: vec![put(self.authority_key(), authority, 0)],
            failure: vec![read(self.leader_key())],
        };
        let mut answer = self.client.transact(request).await?;
        match answer.succeeded {
            true => Ok(()),
            false => {
                self.check_fence(found(&mut answer, 0).as_ref())?;
                Err(StoreError::Failed("etcd refused the authority without a reason".to_owned()))
            }
        }
    }
}

#[async_trait]
impl SharedStore for Etcd {
    async fn authority(&self) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.get_raw(self.authority_key()).await?.map(|found| found.value))
    }

    async fn create_authority(&self, authority: &[u8]) -> Result<bool, StoreError> {
        let key = self.authority_key();
        let request = TxnRequest {
            compare: vec![is_at(key.clone(), 0)],
            success: vec![put(key, authority.to_vec(), 0)],
            failure: Vec::new(),
        };
        Ok(self.client.transact(request).await?.succeeded)
    }

    async fn stand(&self) -> Result<Result<Rule, String>, StoreError> {
        let key = self.leader_key();
        if let Some(other) = self.get_raw(key.clone()).await? {
            return Ok(Err(String::from_utf8_lossy(&other.value).into_owned()));
        }
        let asked = Instant::now();
        let seconds = self.times.lasts.as_secs_f64().ceil() as i64;
        let lease = self.client.grant_lease(seconds).await?;
        let request = TxnRequest {
            compare: vec![is_at(key.clone(), 0)],
            success: vec![put(key, self.ruling.controller().as_bytes().to_vec(), lease)],
            failure: Vec::new(),
        };
        let answer = self.client.transact(request).await;
        let is_mine = answer.as_ref().is_ok_and(|answer| answer.succeeded);
        if !is_mine {
            // Where the answer was lost the key goes with its lease.
            self.client.revoke_lease(lease).await?;
            return answer.map(|_| Err("another one".to_owned()));
        }
        let rule = Rule::begin(revision(&answer?) as i64, self.times, asked);
        self.lease.store(lease, Ordering::Relaxed);
        self.ruling.begin(&rule);
        Ok(Ok(rule))
    }

    async fn renew(&self, rule: &Rule) -> Result<bool, StoreError> {
        let lease = self.lease.load(Ordering::Relaxed);
        let is_alive = self.client.renew_lease(lease).await?;
        // The key may be gone while its lease lives: a copy of etcd was restored.
        let leader = self.get_raw(self.leader_key()).await?;
        Ok(is_alive && leader.is_some_and(|leader| leader.create_revision == rule.number()))
    }

    async fn give_up(&self, _rule: &Rule) -> Result<(), StoreError> {
        match self.lease.load(Ordering::Relaxed) {
            0 => Ok(()),
            lease => self.client.revoke_lease(lease).await,
        }
    }

    fn look_every(&self) -> Duration {
        LOOK_EVERY
    }

    fn server(&self) -> String {
        self.client.member().to_owned()
    }
}
