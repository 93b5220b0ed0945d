//! Where records live: get, list, watch and compare-and-swap, all linearizable.
//!
//! A record is bytes under a key such as `volume/<id>`; each change gives it a new *revision*,
//! a number that grows over the whole store. Everything the control plane must never get wrong
//! is decided by a compare-and-swap of one record, so a store needs no transactions: an
//! embedded database ([`Embedded`]), etcd ([`Etcd`]), or custom resources ([`Kubernetes`]) can all be one.

mod embedded;
mod etcd;
mod kubernetes;
mod latency;
mod rule;
mod shared;
mod watched;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;

pub use embedded::Embedded;
pub use etcd::{Etcd, EtcdOptions};
pub use kubernetes::{Kubernetes, KubernetesStoreOptions};
pub use latency::Latency;
pub use rule::{LeaseTimes, Rule, campaign, keep_ruling, release};
pub use watched::{Watched, Writes};

/// One record as the store has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub key: String,
    /// Revision of the change that wrote this value; never 0.
    pub revision: u64,
    pub value: Vec<u8>,
}

/// Outcome of a compare-and-swap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    /// Written and durable, as this revision.
    Done(u64),
    /// The record is another one; here it is.
    Conflict(Option<Entry>),
}

/// A key, and what is to be under it.
pub type Put = (String, Option<Vec<u8>>);

/// A change that has happened: the key and the revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    pub key: String,
    pub revision: u64,
}

/// A store in words for people.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct About {
    /// `embedded`, `etcd` or `kubernetes`.
    pub engine: &'static str,
    /// The file, or the server that is asked.
    pub place: String,
    /// `None`: no controller rules by a lease.
    pub lease: Option<LeaseHeld>,
}

/// A lease of this controller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseHeld {
    /// Name of this controller.
    pub holder: String,
    pub lasts: Duration,
    pub since_renewal: Duration,
}

impl LeaseHeld {
    /// Time until it ends, unless it is renewed.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.lasts.saturating_sub(self.since_renewal)
    }
}

/// A linearizable store of records.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;

    /// Every record whose key begins with `prefix`, in the order of keys.
    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError>;

    /// Writes (`None`: deletes) the record if its revision is `expected` (0: if there is none).
    /// When this returns, the change is durable; after an error its outcome is unknown.
    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError>;

    /// Writes (`None`: deletes) all of these whatever they are, in one durable commit: for records
    /// that no other writer has, where a commit each would cost more than they are worth.
    async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError>;

    /// Changes from now on, in order. A follower that falls behind is told so by the channel
    /// and lists anew.
    fn watch(&self) -> broadcast::Receiver<Change>;

    /// How often the records were opened again after a call failed.
    fn opened_again(&self) -> u64 {
        0
    }

    fn about(&self) -> About {
        About::default()
    }

    /// # Errors
    /// Another controller may rule by these records: nothing is granted and nothing ordered by this one.
    fn check_rule(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Keeps the cluster's authority, as its file has it, for the controllers on other hosts. A store of one
    /// host has none: there the file is all.
    async fn keep_authority(&self, _authority: Vec<u8>) -> Result<(), StoreError> {
        Ok(())
    }
}

/// A store that several controllers share, of which one rules by a lease.
#[async_trait]
pub trait SharedStore: Store {
    /// The cluster's authority, as its file has it; `None`: no cluster was made here.
    async fn authority(&self) -> Result<Option<Vec<u8>>, StoreError>;

    /// Makes a cluster here, unless there is one. Returns true if it did; after an error a repeat tells.
    async fn create_authority(&self, authority: &[u8]) -> Result<bool, StoreError>;

    /// Takes the rule where nobody has it. Returns the name of who has it otherwise.
    async fn stand(&self) -> Result<Result<Rule, String>, StoreError>;

    /// Renews the lease. Returns false if it has passed to another controller.
    async fn renew(&self, rule: &Rule) -> Result<bool, StoreError>;

    /// Ends the lease now.
    async fn give_up(&self, rule: &Rule) -> Result<(), StoreError>;

    /// Waits until somebody else has changed the records under this rule, for an engine that cannot refuse
    /// such a change.
    async fn changed_by_others(&self, _rule: &Rule) -> String {
        std::future::pending().await
    }

    /// How often a controller that waits for its turn looks.
    fn look_every(&self) -> Duration;

    /// Server that is asked, for the log.
    fn server(&self) -> String;
}

/// Where the records lie.
#[derive(Clone, Debug, Default)]
pub enum Records {
    /// In the controller's directory: it is the only controller.
    #[default]
    Embedded,
    /// In an engine that several controllers share, of which one rules.
    Shared(SharedOptions),
}

/// Where controllers share their records, and under which lease one of them rules.
#[derive(Clone, Debug)]
pub struct SharedOptions {
    pub engine: Engine,
    pub times: LeaseTimes,
    /// Name of this controller, which tells others who rules.
    pub controller: String,
}

/// An engine that holds records for several controllers.
#[derive(Clone, Debug)]
pub enum Engine {
    Etcd(EtcdOptions),
    Kubernetes(KubernetesStoreOptions),
}

impl Engine {
    /// Its name in options and file names.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Etcd(_) => "etcd",
            Engine::Kubernetes(_) => "kubernetes",
        }
    }

    /// Place of this cluster's records in it.
    #[must_use]
    pub fn place(&self) -> &str {
        match self {
            Engine::Etcd(options) => &options.prefix,
            Engine::Kubernetes(options) => &options.cluster,
        }
    }
}

impl SharedOptions {
    /// In words.
    #[must_use]
    pub fn place(&self) -> String {
        let at = self.engine.place();
        match &self.engine {
            Engine::Etcd(_) => format!("etcd below {at}"),
            Engine::Kubernetes(_) => format!("kubernetes as {at}"),
        }
    }

    /// Opens the store; nothing need answer yet.
    ///
    /// # Errors
    /// An option breaks its rule.
    pub fn open(&self) -> Result<Arc<dyn SharedStore>, StoreError> {
        self.times.check()?;
        let controller = self.controller.clone();
        Ok(match &self.engine {
            Engine::Etcd(options) => Arc::new(Etcd::new(options, self.times, controller)?),
            Engine::Kubernetes(options) => {
                Arc::new(Kubernetes::new(options, self.times, controller)?)
            }
        })
    }
}

/// Why the records cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{path}: another process has the records open; stop that controller first")]
    Locked { path: PathBuf },

    #[error(
        "{path} is damaged ({reason}); put a backup in its place (`quoin controller restore`), or \
         move it away and make the records again from what the pools hold (`quoin controller init \
         --records-lost`, then `quoin controller recover`)"
    )]
    Damaged { path: PathBuf, reason: String },

    #[error(
        "{path} is of format {found}, this Quoin knows up to {known}; start the newer Quoin \
         that wrote it"
    )]
    Newer { path: PathBuf, found: u64, known: u64 },

    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },

    #[error("the store failed: {0}")]
    Failed(String),

    /// An option about the store breaks its rule.
    #[error("{name}: {rule}")]
    Setting { name: &'static str, rule: String },

    /// Nobody answered; whether a change was made is unknown.
    #[error("the records cannot be reached: {why}")]
    Away { why: String },

    /// A page or a watch is of a version that the engine has no more.
    #[error("the records of that version are gone")]
    Expired,

    #[error("another controller rules by these records: ask that one")]
    NotLeading,

    #[error(
        "this controller could not renew its lease for {seconds} s, so another one may rule: it answers \
         questions and changes nothing until the records are reached again"
    )]
    NotRenewed { seconds: u64 },

    #[error(
        "record {key} was changed by somebody else while this controller rules: it ends, and the next one \
         reads all records anew"
    )]
    ChangedByOthers { key: String },

    #[error("record {key} cannot be read: {reason}")]
    Record { key: String, reason: String },

    #[error("record {key} kept changing under {tries} attempts; try again")]
    Contended { key: String, tries: u32 },
}
