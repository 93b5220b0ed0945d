//! The store of one host: a redb file, every commit durable before it is answered.
//!
//! Two tables: `records` (key → revision and value in one) and `meta` (format, last revision).
//! redb itself locks the file against a second process.
//!
//! Whatever is to be written while a commit is under way goes into the next one together: records of
//! many volumes cost a few syncs and not one each.
//!
//! After a failed write redb refuses everything until the file is opened again. So that a disk that was
//! full for a moment does not end all writing, the next call opens it ([`Lid`]), at most once in
//! [`OPENED_EVERY`]. What the failed write was to change is then there as a whole or not at all, as after
//! a crash; whoever asked for it was told that its outcome is unknown.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redb::backends::FileBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError};
use redb::{Table, TableDefinition, TableError};
use tokio::sync::{broadcast, oneshot};

use super::{About, Change, Entry, Put, Store, StoreError, Swap};

const RECORDS: TableDefinition<&str, (u64, &[u8])> = TableDefinition::new("records");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const FORMAT: u64 = 1;
/// Changes that a slow follower may lag behind before it must list anew.
const WATCH_CHANGES: usize = 1024;
/// While the records cannot be opened again, one attempt in this time.
const OPENED_EVERY: Duration = Duration::from_secs(1);
/// Most writes of one commit.
const COMMITTED_MAX: usize = 256;
/// Written again in one piece.
const PIECE_BYTES: usize = 1 << 20;

/// Records in one redb file.
pub struct Embedded(Arc<Inner>);

struct Inner {
    path: PathBuf,
    medium: Box<dyn Medium>,
    lid: RwLock<Lid>,
    queue: Mutex<Queue>,
    /// How often they were opened again.
    opened_again: AtomicU64,
    changes: broadcast::Sender<Change>,
}

/// Writes that no commit has taken yet, in the order of their calls.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Write, oneshot::Sender<Result<Swap, StoreError>>)>,
    /// A thread takes them, until there are none.
    is_taken: bool,
}

enum Write {
    Swap { key: String, expected: u64, value: Option<Vec<u8>> },
    Puts(Vec<Put>),
}

enum Lid {
    /// With how often they had been opened again then.
    Open(Database, u64),
    /// Since a call failed; with the last attempt to open them again.
    Closed { why: String, tried: Option<Instant> },
}

/// Medium of the records.
trait Medium: Send + Sync {
    fn open(&self) -> Result<Database, DatabaseError>;

    /// Writes all bytes again as they are read, and syncs: a sync that failed may have left bytes that
    /// are read and are not on media, and no later sync would bring them there.
    fn write_again(&self) -> std::io::Result<()>;
}

/// Held open for good, so that what is opened again is the same file, whatever has its name by then.
struct FileMedium(std::fs::File);

impl Medium for FileMedium {
    fn open(&self) -> Result<Database, DatabaseError> {
        Database::builder().create_with_backend(FileBackend::new(self.0.try_clone()?)?)
    }

    fn write_again(&self) -> std::io::Result<()> {
        use std::os::unix::fs::FileExt;
        let length = self.0.metadata()?.len();
        let mut piece = vec![0; PIECE_BYTES];
        for offset in (0..length).step_by(PIECE_BYTES) {
            let bytes = PIECE_BYTES.min((length - offset) as usize);
            self.0.read_exact_at(&mut piece[..bytes], offset)?;
            self.0.write_all_at(&piece[..bytes], offset)?;
        }
        self.0.sync_all()
    }
}

impl Embedded {
    /// Opens the records at `path`, or begins new ones where there is no file.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        // redb takes any file for its own to fill when it is empty; an empty file that was
        // there before is what is left of somebody's records.
        if std::fs::metadata(path).is_ok_and(|meta| meta.len() == 0) {
            let reason = "it is empty".to_owned();
            return Err(StoreError::Damaged { path: path.to_owned(), reason });
        }
        let file = private_file(path)
            .map_err(|source| StoreError::File { path: path.to_owned(), source })?;
        Self::over(path, Box::new(FileMedium(file)))
    }

    fn over(path: &Path, medium: Box<dyn Medium>) -> Result<Self, StoreError> {
        let database = opened(path, &*medium)?;
        let inner = Inner {
            path: path.to_owned(),
            medium,
            lid: RwLock::new(Lid::Open(database, 0)),
            queue: Mutex::default(),
            opened_again: AtomicU64::new(0),
            changes: broadcast::channel(WATCH_CHANGES).0,
        };
        inner.check_format()?;
        Ok(Self(Arc::new(inner)))
    }

    /// Has something written, and waits until it is durable.
    async fn write(&self, write: Write) -> Result<Swap, StoreError> {
        let (answer, answered) = oneshot::channel();
        let is_taken = {
            let mut queue = self.0.queue();
            queue.waiting.push_back((write, answer));
            std::mem::replace(&mut queue.is_taken, true)
        };
        if !is_taken {
            let writer = Writer(Some(self.0.clone()));
            tokio::task::spawn_blocking(move || writer.run());
        }
        let ended = |_| StoreError::Failed("the thread that writes the records ended".to_owned());
        answered.await.map_err(ended)?
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = self.0.clone();
        tokio::task::spawn_blocking(move || work(&inner))
            .await
            .map_err(|error| StoreError::Failed(error.to_string()))?
    }
}

fn opened(path: &Path, medium: &dyn Medium) -> Result<Database, StoreError> {
    let failed = |error: DatabaseError| match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            StoreError::Locked { path: path.to_owned() }
        }
        DatabaseError::Storage(StorageError::Io(source))
            if source.kind() != std::io::ErrorKind::InvalidData =>
        {
            StoreError::File { path: path.to_owned(), source }
        }
        other => StoreError::Damaged { path: path.to_owned(), reason: other.to_string() },
    };
    // A damaged file must become an error here, whatever the library makes of it.
    let opening = std::panic::AssertUnwindSafe(|| medium.open());
    let opened = std::panic::catch_unwind(opening).map_err(|_| {
        let reason = "its structure makes no sense".to_owned();
        StoreError::Damaged { path: path.to_owned(), reason }
    })?;
    opened.map_err(failed)
}

fn failed(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Failed(error.into().to_string())
}

/// Opens or makes the file of the records, its owner's alone: they have the hashes of join tokens
/// and all that the cluster knows.
fn private_file(path: &Path) -> std::io::Result<std::fs::File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mut options = std::fs::File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path)?;
    let mode = file.metadata()?.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(mode & 0o700))?;
        let path = path.display();
        tracing::warn!("other users could open {path} (mode {mode:o}); they cannot any more");
    }
    Ok(file)
}

impl Inner {
    /// Does something with the records, which are opened again first where a call failed before.
    fn with<T>(
        &self,
        work: impl FnOnce(&Database) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.open_again()?;
        let (outcome, opened) = {
            let lid = self.lid.read().unwrap_or_else(PoisonError::into_inner);
            match &*lid {
                Lid::Open(database, opened) => (work(database), *opened),
                Lid::Closed { why, .. } => return Err(self.closed(why)),
            }
        };
        if let Err(StoreError::Failed(why)) = &outcome {
            let mut lid = self.lid.write().unwrap_or_else(PoisonError::into_inner);
            // Another call that failed with them may have had them opened again already.
            if matches!(&*lid, Lid::Open(_, since) if *since == opened) {
                *lid = Lid::Closed { why: why.clone(), tried: None };
            }
        }
        outcome
    }

    fn closed(&self, why: &str) -> StoreError {
        let path = self.path.display();
        StoreError::Failed(format!("{path} could not be written, and is to be opened again: {why}"))
    }

    fn open_again(&self) -> Result<(), StoreError> {
        if matches!(&*self.lid.read().unwrap_or_else(PoisonError::into_inner), Lid::Open(..)) {
            return Ok(());
        }
        let mut lid = self.lid.write().unwrap_or_else(PoisonError::into_inner);
        let Lid::Closed { why, tried } = &mut *lid else { return Ok(()) };
        if tried.is_some_and(|tried| tried.elapsed() < OPENED_EVERY) {
            return Err(self.closed(why));
        }
        let database = opened(&self.path, &*self.medium).and_then(|database| {
            // With the lock on the file: nobody else writes there meanwhile.
            let path = self.path.clone();
            self.medium.write_again().map_err(|source| StoreError::File { path, source })?;
            Ok(database)
        });
        match database {
            Ok(database) => {
                let opened = self.opened_again.fetch_add(1, Ordering::Relaxed) + 1;
                let path = self.path.display();
                tracing::warn!("{path} was opened again after a call failed: {why}");
                *lid = Lid::Open(database, opened);
                Ok(())
            }
            Err(error) => {
                *why = error.to_string();
                *tried = Some(Instant::now());
                Err(self.closed(why))
            }
        }
    }

    fn check_format(&self) -> Result<(), StoreError> {
        self.with(|database| self.check_format_of(database))
    }

    fn check_format_of(&self, database: &Database) -> Result<(), StoreError> {
        let write = database.begin_write().map_err(failed)?;
        let found = {
            let mut meta = write.open_table(META).map_err(|error| self.table(error))?;
            let found = meta.get("format").map_err(failed)?.map(|value| value.value());
            if found.is_none() {
                meta.insert("format", FORMAT).map_err(failed)?;
            }
            write.open_table(RECORDS).map_err(|error| self.table(error))?;
            found
        };
        match found {
            Some(found) if found > FORMAT => {
                Err(StoreError::Newer { path: self.path.clone(), found, known: FORMAT })
            }
            Some(_) => Ok(()),
            None => write.commit().map_err(failed),
        }
    }

    fn table(&self, error: TableError) -> StoreError {
        if let TableError::Storage(error) = error {
            return failed(error);
        }
        StoreError::Damaged { path: self.path.clone(), reason: error.to_string() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does all writes in one durable commit, each one after those before it. Returns their outcomes.
    fn commit(&self, database: &Database, writes: &[Write]) -> Result<Vec<Swap>, StoreError> {
        let write = database.begin_write().map_err(failed)?;
        let (mut outcomes, mut changes) = (Vec::with_capacity(writes.len()), Vec::new());
        {
            let mut records = write.open_table(RECORDS).map_err(|error| self.table(error))?;
            let mut meta = write.open_table(META).map_err(|error| self.table(error))?;
            let mut revision = meta.get("revision").map_err(failed)?.map_or(0, |last| last.value());
            let mut put = |records: &mut Table<'_, &str, (u64, &[u8])>,
                           key: &String,
                           value: Option<&[u8]>| {
                revision += 1;
                match value {
                    Some(value) => records.insert(key.as_str(), (revision, value)),
                    None => records.remove(key.as_str()),
                }
                .map_err(failed)?;
                changes.push(Change { key: key.clone(), revision });
                Ok(revision)
            };
            for write in writes {
                outcomes.push(match write {
                    Write::Swap { key, expected, value } => {
                        let found = records.get(key.as_str()).map_err(failed)?;
                        let found = found.map(|found| entry(key, found.value()));
                        match found.as_ref().map_or(0, |entry| entry.revision) == *expected {
                            true => Swap::Done(put(&mut records, key, value.as_deref())?),
                            false => Swap::Conflict(found),
                        }
                    }
                    Write::Puts(puts) => {
                        let mut last = 0;
                        for (key, value) in puts {
                            last = put(&mut records, key, value.as_deref())?;
                        }
                        Swap::Done(last)
                    }
                });
            }
            if !changes.is_empty() {
                meta.insert("revision", revision).map_err(failed)?;
            }
        }
        if changes.is_empty() {
            return Ok(outcomes);
        }
        write.commit().map_err(failed)?;
        for change in changes {
            // Nobody listening is no failure.
            let _ = self.changes.send(change);
        }
        Ok(outcomes)
    }

    fn get_in(&self, database: &Database, key: &str) -> Result<Option<Entry>, StoreError> {
        let read = database.begin_read().map_err(failed)?;
        let records = read.open_table(RECORDS).map_err(|error| self.table(error))?;
        let found = records.get(key).map_err(failed)?;
        Ok(found.map(|found| entry(key, found.value())))
    }

    fn list_in(&self, database: &Database, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        let read = database.begin_read().map_err(failed)?;
        let records = read.open_table(RECORDS).map_err(|error| self.table(error))?;
        let mut list = Vec::new();
        for record in records.range(prefix..).map_err(failed)? {
            let (key, value) = record.map_err(failed)?;
            if !key.value().starts_with(prefix) {
                break;
            }
            list.push(entry(key.value(), value.value()));
        }
        Ok(list)
    }
}

/// Writer of what waits, on a thread of its own. The file is closed with the last owner of the records,
/// so this is none any more when the last answer is given.
struct Writer(Option<Arc<Inner>>);

impl Writer {
    /// Writes commit by commit until nothing waits.
    fn run(mut self) {
        while let Some(inner) = &self.0 {
            let (writes, answers): (Vec<_>, Vec<_>) = {
                let mut queue = inner.queue();
                let count = queue.waiting.len().min(COMMITTED_MAX);
                queue.waiting.drain(..count).unzip()
            };
            let outcomes = inner.with(|database| inner.commit(database, &writes));
            let goes_on = {
                let mut queue = inner.queue();
                queue.is_taken = !queue.waiting.is_empty();
                queue.is_taken
            };
            if !goes_on {
                self.0 = None;
            }
            let mut outcomes = outcomes.map(Vec::into_iter);
            for answer in answers {
                let outcome = match &mut outcomes {
                    Ok(outcomes) => Ok(outcomes.next().expect("an outcome of each write")),
                    // Of none of them it is known whether it is there.
                    Err(StoreError::Failed(why)) => Err(StoreError::Failed(why.clone())),
                    Err(error) => Err(StoreError::Failed(error.to_string())),
                };
                // A caller that has left is not told.
                let _ = answer.send(outcome);
            }
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take()
            && std::thread::panicking()
        {
            // Waiting callers learn it by losing their answers, and the next write has a new thread.
            *inner.queue() = Queue::default();
        }
    }
}

fn entry(key: &str, (revision, value): (u64, &[u8])) -> Entry {
    Entry { key: key.to_owned(), revision, value: value.to_vec() }
}

#[async_trait]
impl Store for Embedded {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let key = key.to_owned();
        self.blocking(move |inner| inner.with(|database| inner.get_in(database, &key))).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Entry>, StoreError> {
        let prefix = prefix.to_owned();
        self.blocking(move |inner| inner.with(|database| inner.list_in(database, &prefix))).await
    }

    async fn compare_and_swap(
        &self,
        key: &str,
        expected: u64,
        value: Option<Vec<u8>>,
    ) -> Result<Swap, StoreError> {
        self.write(Write::Swap { key: key.to_owned(), expected, value }).await
    }

    async fn put_all(&self, records: Vec<Put>) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        self.write(Write::Puts(records)).await.map(drop)
    }

    fn watch(&self) -> broadcast::Receiver<Change> {
        self.0.changes.subscribe()
    }

    fn about(&self) -> About {
        About { engine: "embedded", place: self.0.path.display().to_string(), lease: None }
    }

    fn opened_again(&self) -> u64 {
        self.0.opened_again.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod outages;

#[cfg(test)]
mod tests {
    use quoin_cluster::records::{self, Record, VolumeRecord, decode, encode};
    use quoin_recorded::Recorded;

    use super::*;

    fn path(dir: &tempfile::TempDir) -> PathBuf {
        dir.path().join("records.redb")
    }

    #[tokio::test]
    async fn many_are_put_in_one_go_whatever_was_there_and_a_swap_goes_by_their_revisions() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        store.compare_and_swap("event/1", 0, Some(b"old".to_vec())).await.unwrap();
        store.compare_and_swap("event/2", 0, Some(b"goes".to_vec())).await.unwrap();
        let mut watch = store.watch();
        let put = |key: &str, value: Option<&[u8]>| (key.to_owned(), value.map(<[u8]>::to_vec));
        let puts = vec![
            put("event/1", Some(b"new")),
            put("event/2", None),
            put("event/3", Some(b"more")),
            put("event/none", None),
        ];
        store.put_all(puts).await.unwrap();
        store.put_all(Vec::new()).await.unwrap();
        drop(store);
        let store = Embedded::open(&path(&dir)).unwrap();
        let all = store.list("event/").await.unwrap();
        let shown: Vec<_> = all.iter().map(|e| (&*e.key, e.revision, &*e.value)).collect();
        assert_eq!(shown, [("event/1", 3, &b"new"[..]), ("event/3", 5, b"more")]);
        assert_eq!(watch.recv().await.unwrap().revision, 3);
        let stale = store.compare_and_swap("event/1", 1, None).await.unwrap();
        assert!(matches!(stale, Swap::Conflict(Some(_))));
        assert_eq!(
            store.compare_and_swap("event/4", 0, Some(vec![])).await.unwrap(),
            Swap::Done(7)
        );
    }

    #[test]
    fn the_records_are_their_owners_alone_and_those_of_before_are_closed_to_others() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = || std::fs::metadata(path(&dir)).unwrap().permissions().mode() & 0o777;
        drop(Embedded::open(&path(&dir)).unwrap());
        assert_eq!(mode(), 0o600);
        let wide = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(path(&dir), wide).unwrap();
        drop(Embedded::open(&path(&dir)).unwrap());
        assert_eq!(mode(), 0o600);
    }

    #[tokio::test]
    async fn a_swap_is_done_only_on_the_expected_revision_and_outlives_a_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        let Swap::Done(first) = store.compare_and_swap("a", 0, Some(b"1".into())).await.unwrap()
        else {
            panic!("there was no record")
        };
        let conflict = store.compare_and_swap("a", 0, Some(b"2".into())).await.unwrap();
        let found = Entry { key: "a".into(), revision: first, value: b"1".into() };
        assert_eq!(conflict, Swap::Conflict(Some(found.clone())));
        drop(store);
        let store = Embedded::open(&path(&dir)).unwrap();
        assert_eq!(store.get("a").await.unwrap(), Some(found));
        let Swap::Done(second) = store.compare_and_swap("a", first, None).await.unwrap() else {
            panic!("the revision was right")
        };
        assert!(second > first);
        assert_eq!(store.get("a").await.unwrap(), None);
        assert_eq!(
            store.compare_and_swap("a", first, Some(b"3".into())).await.unwrap(),
            Swap::Conflict(None)
        );
    }

    #[tokio::test]
    async fn of_many_swaps_at_once_exactly_one_is_done_and_a_watcher_sees_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Embedded::open(&path(&dir)).unwrap());
        let mut watch = store.watch();
        let swaps = (0..16u8).map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.compare_and_swap("k", 0, Some(vec![n])).await })
        });
        let outcomes = futures::future::join_all(swaps).await;
        let done = outcomes.iter().filter(|o| matches!(o, Ok(Ok(Swap::Done(_))))).count();
        assert_eq!(done, 1);
        assert_eq!(watch.recv().await.unwrap().key, "k");
        assert!(watch.try_recv().is_err());
    }

    /// Writes that wait while a commit is under way are in the next one together.
    #[tokio::test]
    async fn writes_that_wait_are_one_commit_each_after_those_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        let swap = |key: &str, expected, value: &[u8]| {
            let value = Some(value.to_vec());
            Write::Swap { key: key.into(), expected, value }
        };
        let writes = [
            swap("a", 0, b"1"),
            swap("a", 1, b"2"),
            swap("a", 1, b"3"),
            Write::Puts(vec![("b".into(), Some(b"4".into())), ("a".into(), None)]),
            swap("a", 0, b"5"),
        ];
        let mut watch = store.watch();
        let outcomes = store.0.with(|database| store.0.commit(database, &writes)).unwrap();
        let second = Entry { key: "a".into(), revision: 2, value: b"2".into() };
        let conflict = Swap::Conflict(Some(second));
        assert_eq!(
            outcomes,
            [Swap::Done(1), Swap::Done(2), conflict, Swap::Done(4), Swap::Done(5)]
        );
        let told: Vec<_> = (0..5).map(|_| watch.try_recv().unwrap().revision).collect();
        assert_eq!(told, [1, 2, 3, 4, 5]);
        let all = store.list("").await.unwrap();
        let shown: Vec<_> = all.iter().map(|e| (&*e.key, e.revision, &*e.value)).collect();
        assert_eq!(shown, [("a", 5, &b"5"[..]), ("b", 3, b"4")]);
    }

    #[tokio::test]
    async fn many_writers_at_once_all_get_their_own_outcome_and_the_file_is_free_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..3u64 {
            let store = Arc::new(Embedded::open(&path(&dir)).unwrap());
            let swaps = (0..2 * COMMITTED_MAX).map(|number| {
                let store = store.clone();
                tokio::spawn(async move {
                    let (key, value) = (format!("k/{round}/{}", number / 2), vec![number as u8]);
                    store.compare_and_swap(&key, 0, Some(value)).await.unwrap()
                })
            });
            let outcomes = futures::future::join_all(swaps).await;
            let done = outcomes.iter().filter(|o| matches!(o, Ok(Swap::Done(_)))).count();
            assert_eq!(done, COMMITTED_MAX, "one of each two");
            assert_eq!(store.list("k/").await.unwrap().len(), COMMITTED_MAX * (round + 1) as usize);
        }
    }

    #[tokio::test]
    async fn a_list_has_what_begins_with_the_prefix_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        for key in ["b/2", "a/1", "b/1", "c/1"] {
            store.compare_and_swap(key, 0, Some(vec![])).await.unwrap();
        }
        let keys: Vec<_> = store.list("b/").await.unwrap().into_iter().map(|e| e.key).collect();
        assert_eq!(keys, ["b/1", "b/2"]);
    }

    #[test]
    fn a_store_that_is_open_elsewhere_empty_foreign_or_cut_off_is_refused_with_the_way_out() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        let error = Embedded::open(&path(&dir)).map(drop).unwrap_err().to_string();
        assert!(error.contains("another process"), "{error}");
        drop(store);
        let good = std::fs::read(path(&dir)).unwrap();
        for bad in [Vec::new(), b"not records at all".repeat(400), good[..good.len() / 2].to_vec()]
        {
            std::fs::write(path(&dir), &bad).unwrap();
            let error = Embedded::open(&path(&dir)).map(drop).unwrap_err().to_string();
            assert!(error.contains("damaged") && error.contains("backup"), "{error}");
        }
        let error = Embedded::open(&dir.path().join("no/records")).map(drop).unwrap_err();
        assert!(matches!(error, StoreError::File { .. }), "{error}");
    }

    #[test]
    fn a_store_of_a_newer_format_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let store = Embedded::open(&path(&dir)).unwrap();
        let newer = |database: &Database| {
            let write = database.begin_write().unwrap();
            write.open_table(META).unwrap().insert("format", FORMAT + 1).unwrap();
            write.commit().map_err(failed)
        };
        store.0.with(newer).unwrap();
        drop(store);
        let error = Embedded::open(&path(&dir)).map(drop).unwrap_err().to_string();
        assert!(error.contains("newer Quoin"), "{error}");
    }

    /// The file of the controller's store, as redb wrote it.
    #[tokio::test]
    async fn a_store_that_was_recorded_is_opened_with_all_its_records() {
        const CRATE: &str = env!("CARGO_MANIFEST_DIR");
        const RAISE: &str = "FORMAT in quoin-cluster/src/records/mod.rs";
        const RECORDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../quoin-cluster");
        let recorded = Recorded::current(CRATE, "records", records::FORMAT.into(), RAISE);
        let volume = Recorded::current(RECORDS, "records", records::FORMAT.into(), RAISE);
        let volume = decode::<VolumeRecord>(volume.read_text("volume.json").as_bytes());
        let volume = volume.expect("a record");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("records.redb");
        // Where redb puts what is its own affair: a file is recorded once and never compared.
        if !recorded.names(".hex").contains(&"store".to_owned()) {
            let store = Embedded::open(&path).expect("a new store");
            let value = Some(encode(&volume));
            store.compare_and_swap(&volume.key(), 0, value).await.expect("a write");
            drop(store);
            recorded.holds("store", &std::fs::read(&path).expect("its file"));
        }
        for version in Recorded::all(CRATE, "records", RAISE) {
            std::fs::write(&path, version.read("store")).expect("a file");
            let store = Embedded::open(&path).expect("a store of an earlier version");
            let found = store.get(&volume.key()).await.expect("a read").expect("the record");
            assert_eq!(decode::<VolumeRecord>(&found.value).expect("a record"), volume);
            let swapped = store.compare_and_swap(&found.key, found.revision, None).await;
            assert!(matches!(swapped, Ok(Swap::Done(_))), "{swapped:?}");
        }
    }
}
