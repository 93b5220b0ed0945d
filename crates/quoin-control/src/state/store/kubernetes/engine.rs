//! The store itself.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use tokio::sync::broadcast;

use super::KubernetesStoreOptions;
use super::client::{Changed, Client, Event, Kind};
use super::lease::LeaseObject;
use super::objects::{Record, Secret, kind_of, record_name, revision, secret_name};
use crate::state::store::shared::Ruling;
use crate::state::store::{
    About, Change, Entry, LeaseTimes, Put, Rule, SharedStore, Store, StoreError, Swap,
};

/// Records that are written at the same time, where the order is free.
const PUTS_AT_ONCE: usize = 8;
/// A record that others keep changing is given up after so many tries.
const TRIES_MAX: u32 = 8;
/// The next controller looks so often whether the one that rules is gone.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pause before a watch that failed begins again.
const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// Records in Kubernetes.
pub struct Kubernetes {
    client: Client,
    cluster: String,
    lease: LeaseObject,
    ruling: Ruling,
    /// Objects that this controller deletes, by name, until the watch told of it.
    deleted: Mutex<BTreeMap<String, u32>>,
}

impl Kubernetes {
    /// Connects to nothing yet.
    ///
    /// # Errors
    /// An option breaks its rule.
    pub fn new(
        options: &KubernetesStoreOptions,
        times: LeaseTimes,
        controller: String,
    ) -> Result<Self, StoreError> {
        Ok(Self {
            client: Client::new(options, times)?,
            cluster: options.cluster.clone(),
            lease: LeaseObject::new(&options.cluster, times, &controller),
            ruling: Ruling::new(controller),
            deleted: Mutex::default(),
        })
    }

    fn rule_number(&self) -> i64 {
        self.ruling.rule().map_or(0, |rule| rule.number())
    }

    /// Notes that the watch told of a deletion of this controller, or that there was none. Returns false where
    /// this controller deletes no such object.
    fn was_deleted(&self, name: &str) -> bool {
        let mut deleted = self.deleted.lock().expect("no holder of this lock panics");
        let Some(times) = deleted.get_mut(name) else { return false };
        *times -= 1;
        if *times == 0 {
            deleted.remove(name);
        }
        true
    }

    async fn delete(&self, name: &str, expected: u64) -> Result<Changed<()>, StoreError> {
        {
            let mut deleted = self.deleted.lock().expect("no holder of this lock panics");
            *deleted.entry(name.to_owned()).or_default() += 1;
        }
        let outcome = self.client.delete(Kind::Record, name, expected).await;
        if matches!(outcome, Ok(Changed::Conflict | Changed::Missing)) {
            self.was_deleted(name);
        }
        outcome
    }

    /// Writes a record whatever it is; `None`: deletes it.
    async fn put(&self, key: &str, value: Option<&[u8]>) -> Result<u64, StoreError> {
        let name = record_name(&self.cluster, key);
        let mut expected = 0;
        for _ in 0..TRIES_MAX {
            let changed = match value {
                None => match self.delete(&name, 0).await? {
                    Changed::Done(()) | Changed::Missing => return Ok(1),
                    Changed::Conflict => Changed::Conflict,
                },
                Some(value) => {
                    let record =
                        Record::of(&self.cluster, key, expected, value, self.rule_number())?;
                    match expected {
                        0 => self.client.create(Kind::Record, &record).await?,
                        _ => self.client.replace(Kind::Record, &record).await?,
                    }
                }
            };
            if let Changed::Done(record) = changed {
                return record.metadata.revision();
            }
            let found: Option<Record> = self.client.get(Kind::Record, &name).await?;
            expected = found.map_or(Ok(0), |found| found.metadata.revision())?;
        }
        Err(StoreError::Contended { key: key.to_owned(), tries: TRIES_MAX })
    }

    /// Key of the first record that another writer changed, as the watch tells from the rule's begin on.
    async fn follow(&self, rule: &Rule, from: &mut String) -> Result<String, StoreError> {
        let events = self.client.watch::<Record>(Kind::Record, from).await?;
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            let (record, is_own) = match event? {
                Event::Added(record) | Event::Modified(record) => {
                    let is_own = record.content.spec.rule == rule.number();
                    (record, is_own)
                }
                Event::Deleted(record) => {
                    let is_own = self.was_deleted(&record.metadata.name);
                    (record, is_own)
                }
                Event::Bookmark(bookmark) => {
                    from.clone_from(&bookmark.metadata.resource_version);
                    continue;
                }
                Event::Error(status) if status.code == 410 => return Err(StoreError::Expired),
                Event::Error(status) => {
                    return Err(StoreError::Away { why: status.message });
                }
            };
            if !is_own {
                return Ok(record.key().to_owned());
            }
            from.clone_from(&record.metadata.resource_version);
        }
        Err(StoreError::Away { why: "Kubernetes ended a watch".to_owned() })
    }

    /// Looks at all records where their changes are not told any more; as [`Kubernetes::follow`].
    async fn look_at_all(
        &self,
        rule: &Rule,
        from: &mut String,
    ) -> Result<Option<String>, StoreError> {
        let since = revision(from)?;
        let (records, version) = self.client.list::<Record>(Kind::Record, None).await?;
        for record in records {
            let is_own = record.content.spec.rule == rule.number();
            if !is_own && record.metadata.revision()? > since {
                return Ok(Some(record.key().to_owned()));
            }
        }
        *from = version;
        Ok(None)
    }
}

#[async_trait]
impl Store for Kubernetes {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let name = record_name(&self.cluster, key);
        let found: Option<Record> = self.client.get(Kind::Record, &name).await?;
        found.map(|found| found.into_entry(&self.cluster)).transpose()
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        let (records, _) = self.client.list::<Record>(Kind::Record, kind_of(prefix)).await?;
        let mut entries = BTreeMap::new();
        for record in records {
            if record.key().starts_with(prefix) {
                let entry = record.into_entry(&self.cluster)?;
                entries.insert(entry.key.clone(), entry);
            }
        }
        Ok(entries.into_values().collect())
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        self.check_rule()?;
        let name = record_name(&self.cluster, key);
        let revision = match value {
            // Of what is not there a deletion without preconditions would delete what comes in between.
            None if expected == 0 => {
                let found: Option<Record> = self.client.get(Kind::Record, &name).await?;
                found.is_none().then_some(1)
            }
            None => match self.delete(&name, expected).await? {
                // The version of a deletion is not told; it is later than that of what was deleted.
                Changed::Done(()) => Some(expected + 1),
                Changed::Conflict | Changed::Missing => None,
            },
            Some(value) => {
                let record = Record::of(&self.cluster, key, expected, &value, self.rule_number())?;
                let changed = match expected {
                    0 => self.client.create(Kind::Record, &record).await?,
                    _ => self.client.replace(Kind::Record, &record).await?,
                };
                match changed {
                    Changed::Done(record) => Some(record.metadata.revision()?),
                    Changed::Conflict | Changed::Missing => None,
                }
            }
        };
        let Some(revision) = revision else { return Ok(Swap::Conflict(self.get(key).await?)) };
        self.ruling.tell(key, revision);
        Ok(Swap::Done(revision))
    }

    /// A commit each, several at a time.
    async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError> {
        self.check_rule()?;
        // The last word of each key counts.
        let last: BTreeMap<String, Option<Vec<u8>>> = records.into_iter().collect();
        let mut written = futures::stream::iter(last)
            .map(|(key, value)| async move {
                let revision = self.put(&key, value.as_deref()).await?;
                self.ruling.tell(&key, revision);
                Ok::<_, StoreError>(())
            })
            .buffer_unordered(PUTS_AT_ONCE);
        while let Some(outcome) = written.next().await {
            outcome?;
        }
        Ok(())
    }

    fn watch(&self) -> broadcast::Receiver<Change> {
        self.ruling.follow()
    }

    fn about(&self) -> About {
        let place = self.client.server().to_owned();
        About { engine: "kubernetes", place, lease: self.ruling.lease() }
    }

    fn check_rule(&self) -> Result<(), StoreError> {
        self.ruling.check()
    }

    async fn keep_authority(&self, authority: Vec<u8>) -> Result<(), StoreError> {
        self.check_rule()?;
        let name = secret_name(&self.cluster);
        let found: Option<Secret> = self.client.get(Kind::Secret, &name).await?;
        let mut secret = Secret::of(&self.cluster, &authority);
        let changed = match found {
            None => self.client.create(Kind::Secret, &secret).await?,
            Some(found) => {
                secret.metadata.resource_version = found.metadata.resource_version;
                self.client.replace(Kind::Secret, &secret).await?
            }
        };
        match changed {
            Changed::Done(_) => Ok(()),
            _ => Err(StoreError::Contended { key: name, tries: 1 }),
        }
    }
}

#[async_trait]
impl SharedStore for Kubernetes {
    async fn authority(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let found: Option<Secret> =
            self.client.get(Kind::Secret, &secret_name(&self.cluster)).await?;
        found.map(|secret| secret.authority()).transpose()
    }

    async fn create_authority(&self, authority: &[u8]) -> Result<bool, StoreError> {
        let secret = Secret::of(&self.cluster, authority);
        Ok(matches!(self.client.create(Kind::Secret, &secret).await?, Changed::Done(_)))
    }

    async fn stand(&self) -> Result<Result<Rule, String>, StoreError> {
        let stood = self.lease.stand(&self.client).await?;
        if let Ok(rule) = &stood {
            self.ruling.begin(rule);
        }
        Ok(stood)
    }

    async fn renew(&self, _rule: &Rule) -> Result<bool, StoreError> {
        self.lease.renew(&self.client).await
    }

    async fn give_up(&self, _rule: &Rule) -> Result<(), StoreError> {
        self.lease.give_up(&self.client).await
    }

    async fn changed_by_others(&self, rule: &Rule) -> String {
        let mut from = rule.number().to_string();
        loop {
            let looked = match self.follow(rule, &mut from).await {
                Ok(key) => return key,
                Err(StoreError::Expired) => self.look_at_all(rule, &mut from).await,
                Err(error) => Err(error),
            };
            match looked {
                Ok(Some(key)) => return key,
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "changes of the records are not told now"),
            }
            tokio::time::sleep(WATCH_PAUSE).await;
        }
    }

    fn look_every(&self) -> Duration {
        LOOK_EVERY
    }

    fn server(&self) -> String {
        self.client.server().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use quoin_testkit::kubernetes_api::KubernetesApi;
    use tempfile::TempDir;
    use tokio::time::timeout;

    use super::*;
    use crate::kubernetes_api::ApiOptions;
    use crate::state::store::{Embedded, keep_ruling, release, rule};

    const TIMES: LeaseTimes = LeaseTimes {
        lasts: Duration::from_secs(3),
        renew_within: Duration::from_millis(1500),
        retry: Duration::from_millis(200),
    };

    struct World {
        api: KubernetesApi,
        directory: TempDir,
    }

    impl World {
        fn new() -> Self {
            let (api, directory) = (KubernetesApi::start(), TempDir::new().unwrap());
            std::fs::write(directory.path().join("token"), "of.the.pod").unwrap();
            Self { api, directory }
        }

        fn store(&self, controller: &str) -> Arc<Kubernetes> {
            let file = |name: &str| self.directory.path().join(name);
            let (server, namespace) = (self.api.address(), "quoin".to_owned());
            let api = ApiOptions { server, ca: file("ca"), token: file("token"), namespace };
            let options = KubernetesStoreOptions { cluster: "quoin".to_owned(), api };
            Arc::new(Kubernetes::new(&options, TIMES, controller.to_owned()).unwrap())
        }
    }

    async fn campaign(store: &Kubernetes) -> Result<Rule, StoreError> {
        rule::campaign(store, &tokio::sync::watch::channel(String::new()).0).await
    }

    fn block_on<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Swap { key: u8, is_known: bool, value: Option<u8> },
        PutAll(Vec<(u8, Option<u8>)>),
        Get(u8),
        List(bool),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        let value = || proptest::option::weighted(0.7, any::<u8>());
        prop_oneof![
            4 => (0..4u8, proptest::bool::weighted(0.8), value())
                .prop_map(|(key, is_known, value)| Operation::Swap { key, is_known, value }),
            1 => proptest::collection::vec((0..4u8, value()), 0..4).prop_map(Operation::PutAll),
            1 => (0..4u8).prop_map(Operation::Get),
            1 => any::<bool>().prop_map(Operation::List),
        ]
    }

    fn key(number: u8) -> String {
        format!("{}/{number}", if number < 2 { "volume" } else { "event" })
    }

    /// Does the same with a store, and tells what came of it, without the revisions, which are each store's own.
    async fn carry_out(store: &dyn Store, operations: &[Operation]) -> Vec<String> {
        let mut told = Vec::new();
        let shown = |entry: &Entry| format!("{}={:?}", entry.key, entry.value);
        for operation in operations {
            told.push(match operation {
                Operation::Swap { key: number, is_known, value } => {
                    let key = key(*number);
                    let found = store.get(&key).await.unwrap();
                    let known = found.map_or(0, |found| found.revision);
                    // A revision that no record has, or none where there is one.
                    let other = if known > 0 { 0 } else { 1_000_000 };
                    let expected = if *is_known { known } else { other };
                    let value = value.map(|value| vec![value]);
                    match store.compare_and_swap(&key, expected, value).await.unwrap() {
                        Swap::Done(revision) => {
                            assert!(revision > known, "{revision} after {known}");
                            "done".to_owned()
                        }
                        Swap::Conflict(found) => {
                            format!("conflict {:?}", found.as_ref().map(shown))
                        }
                    }
                }
                Operation::PutAll(puts) => {
                    let puts = puts.iter().map(|(k, v)| (key(*k), v.map(|value| vec![value])));
                    store.put_all(puts.collect()).await.unwrap();
                    String::new()
                }
                Operation::Get(number) => {
                    format!("{:?}", store.get(&key(*number)).await.unwrap().as_ref().map(shown))
                }
                Operation::List(all) => {
                    let prefix = if *all { "" } else { "volume/" };
                    let listed = store.list(prefix).await.unwrap();
                    format!("{:?}", listed.iter().map(shown).collect::<Vec<_>>())
                }
            });
        }
        told
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
        #[test]
        fn records_are_the_same_as_in_the_embedded_store(
            operations in proptest::collection::vec(operation(), 1..20)
        ) {
            block_on(async {
                let world = World::new();
                let embedded = Embedded::open(&world.directory.path().join("records")).unwrap();
                let store = world.store("a");
                let wanted = carry_out(&embedded, &operations).await;
                assert_eq!(carry_out(&*store, &operations).await, wanted);
            });
        }
    }

    #[test]
    fn a_list_of_many_pages_is_of_one_moment_also_where_its_version_is_compacted_away() {
        block_on(async {
            let world = World::new();
            let store = world.store("a");
            let puts = (0..1201).map(|n| (format!("volume/{n:04}"), Some(vec![0])));
            store.put_all(puts.collect()).await.unwrap();
            assert_eq!(store.list("volume/").await.unwrap().len(), 1201);
            // Compactions come between pages.
            let compacts = async {
                for _ in 0..5 {
                    world.api.compact();
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            let listed = async { store.list("").await.unwrap() };
            assert_eq!(futures::join!(listed, compacts).0.len(), 1201);
        });
    }

    #[test]
    fn a_change_whose_answer_is_lost_is_known_after_the_next_look_and_is_not_made_twice() {
        block_on(async {
            let world = World::new();
            let store = world.store("a");
            world.api.lose_answers(1);
            let lost = store.compare_and_swap("volume/1", 0, Some(vec![1])).await;
            assert!(matches!(lost, Err(StoreError::Away { .. })), "{lost:?}");
            let again = store.compare_and_swap("volume/1", 0, Some(vec![2])).await.unwrap();
            let Swap::Conflict(Some(found)) = again else { panic!("{again:?}") };
            assert_eq!(found.value, [1]);
            world.api.set_away(true);
            let away = store.get("volume/1").await;
            assert!(matches!(away, Err(StoreError::Away { .. })), "{away:?}");
            world.api.set_away(false);
            assert_eq!(store.get("volume/1").await.unwrap(), Some(found));
        });
    }

    #[test]
    fn one_controller_rules_and_the_next_one_once_it_ended_or_fell_silent() {
        block_on(async {
            let world = World::new();
            let (a, b) = (world.store("a"), world.store("b"));
            let first = campaign(&a).await.unwrap();
            assert_eq!(b.stand().await.unwrap().unwrap_err(), "a");
            assert!(matches!(
                a.compare_and_swap("volume/1", 0, Some(vec![1])).await,
                Ok(Swap::Done(_))
            ));
            // The lease outlasts its time while it is renewed.
            let waits = timeout(Duration::from_secs(3), campaign(&b));
            tokio::select! {
                () = keep_ruling(&*a, &first) => panic!("it rules"),
                waited = waits => assert!(waited.is_err(), "one rules"),
            }
            // Its holder is silent from here on, and knows it.
            let began = std::time::Instant::now();
            let second = campaign(&b).await.unwrap();
            let took = began.elapsed();
            assert!(took > Duration::from_millis(1000), "the lease lasted: {took:?}");
            assert!(second.number() > first.number());
            let refused = a.compare_and_swap("volume/1", 0, Some(vec![2])).await;
            assert!(matches!(refused, Err(StoreError::NotRenewed { .. })), "{refused:?}");
            assert!(!a.renew(&first).await.unwrap(), "it has passed on");
            // The lease of a controller that ends is free at once.
            release(&*b, &second).await;
            let began = std::time::Instant::now();
            let third = campaign(&a).await.unwrap();
            assert!(began.elapsed() < Duration::from_secs(1));
            assert!(third.number() > second.number());
            assert!(matches!(b.check_rule(), Err(StoreError::NotLeading)));
        });
    }

    #[test]
    fn a_renewal_whose_answer_was_lost_is_made_again() {
        block_on(async {
            let world = World::new();
            let store = world.store("a");
            let rule = campaign(&store).await.unwrap();
            world.api.lose_answers(1);
            assert!(store.renew(&rule).await.is_err());
            assert!(store.renew(&rule).await.unwrap(), "it is the holder still");
            let spec = || world.api.object("leases", "quoin-controller").unwrap()["spec"].clone();
            let begun = |spec: &serde_json::Value| {
                [spec["acquireTime"].clone(), spec["leaseTransitions"].clone()]
            };
            let first = spec();
            assert!(store.renew(&rule).await.unwrap());
            assert_eq!(begun(&spec()), begun(&first), "the rule began once");
        });
    }

    #[test]
    fn a_change_that_somebody_else_makes_is_noticed_by_the_controller_that_rules() {
        let change = |world: &World, is_deletion: bool| {
            let name = world.api.names("records").remove(0);
            let mut object = world.api.object("records", &name).unwrap();
            object["spec"]["rule"] = serde_json::json!(1_000_000);
            world.api.change("records", &name, (!is_deletion).then_some(object));
        };
        for (is_deletion, is_compacted) in [(false, false), (true, false), (false, true)] {
            block_on(async {
                let world = World::new();
                let store = world.store("a");
                let rule = campaign(&store).await.unwrap();
                let noticed = store.changed_by_others(&rule);
                let happens = async {
                    // Its own changes are no others'.
                    let Swap::Done(first) =
                        store.compare_and_swap("volume/1", 0, Some(vec![1])).await.unwrap()
                    else {
                        panic!("nothing is there")
                    };
                    store.compare_and_swap("volume/1", first, None).await.unwrap();
                    store.put_all(vec![("event/1".to_owned(), Some(vec![1]))]).await.unwrap();
                    tokio::time::sleep(Duration::from_millis(700)).await;
                    if is_compacted {
                        world.api.set_away(true);
                        change(&world, is_deletion);
                        world.api.compact();
                        world.api.set_away(false);
                    } else {
                        change(&world, is_deletion);
                    }
                    std::future::pending::<()>().await;
                };
                let key = tokio::select! {
                    key = timeout(Duration::from_secs(10), noticed) => key.expect("it is noticed"),
                    () = happens => unreachable!(),
                };
                assert_eq!(key, "event/1");
            });
        }
    }

    #[test]
    fn a_cluster_is_made_once_and_its_authority_is_a_secret() {
        block_on(async {
            let world = World::new();
            let (a, b) = (world.store("a"), world.store("b"));
            assert_eq!(a.authority().await.unwrap(), None);
            assert!(a.create_authority(b"first").await.unwrap());
            assert!(!b.create_authority(b"second").await.unwrap());
            assert_eq!(b.authority().await.unwrap().as_deref(), Some(&b"first"[..]));
            a.keep_authority(b"rotated".to_vec()).await.unwrap();
            assert_eq!(b.authority().await.unwrap().as_deref(), Some(&b"rotated"[..]));
            assert_eq!(world.api.names("secrets"), ["quoin-authority"]);
        });
    }

    #[test]
    fn a_change_that_the_server_holds_up_is_not_made_once_another_controller_may_rule() {
        let world = World::new();
        block_on(async {
            let (first, second) = (world.store("c-1"), world.store("c-2"));
            campaign(&first).await.unwrap();
            let next = tokio::spawn(async move { campaign(&second).await.map(|_| second) });
            // Its renewal is nearly overdue, and the change arrives within three seconds.
            tokio::time::sleep(Duration::from_millis(1400)).await;
            world.api.delay_changes(Duration::from_millis(2500));
            let late = first.compare_and_swap("volume/1", 0, Some(b"late".to_vec())).await;
            assert!(matches!(late, Err(StoreError::Away { .. })), "{late:?}");
            let second = next.await.unwrap().unwrap();
            tokio::time::sleep(Duration::from_millis(1500)).await;
            world.api.delay_changes(Duration::ZERO);
            assert_eq!(second.get("volume/1").await.unwrap(), None);
        });
    }

    /// A recorded volume's record, as of another volume.
    fn volume(number: usize) -> Put {
        const RECORDED: &str =
            include_str!("../../../../../quoin-cluster/tests/formats/records/2/volume.json");
        let id = format!("{number:032x}");
        let value = RECORDED.replace("00000000000000000000000000000f01", &id);
        (format!("volume/{id}"), Some(value.into_bytes()))
    }

    #[test]
    fn a_thousand_volumes_are_read_in_some_pages_and_no_kind_of_record_costs_more_for_another() {
        let world = World::new();
        block_on(async {
            let store = world.store("c-1");
            store.put_all((0..1000).map(volume).collect()).await.unwrap();
            let before = world.api.calls();
            let began = std::time::Instant::now();
            assert_eq!(store.list("volume/").await.unwrap().len(), 1000);
            println!("a thousand volumes in {:?}", began.elapsed());
            assert_eq!(world.api.calls() - before, 2, "pages of {} records", 500);
            let before = world.api.calls();
            assert_eq!(store.list("pool/").await.unwrap().len(), 0);
            assert_eq!(world.api.calls() - before, 1);
        });
    }
}
