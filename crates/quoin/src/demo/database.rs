//! The database of `quoin demo dr`: a log, a table, and a journal of what was acknowledged when.
//!
//! Each record goes to the log and is flushed, then to its page of the table and is flushed. So the table of
//! one instant has all records of the log, or all but the last one; two volumes of two instants differ by more.

use anyhow::{Context, Result, bail};
use quoin_nbd::client::{Address, Client, ClientOptions};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use super::interrupt;
use super::surface::{PAGE_BYTES, fill};

/// Of each of the two volumes.
pub const VOLUME_BYTES: usize = 32 << 20;
const LOG_PAGES: usize = VOLUME_BYTES / PAGE_BYTES;
/// Few, so that most records change a page that has content.
const TABLE_PAGES: usize = 512;
const LOG_SEED: u64 = 1;
const TABLE_SEED: u64 = 2;
const READ_BYTES: usize = 1 << 20;
/// Between two records: the demo shows times, and needs no speed.
const PACE: Duration = Duration::from_millis(15);
const CONNECT_BUDGET: Duration = Duration::from_secs(30);

/// A record, and when each of its two writes was acknowledged.
#[derive(Clone, Copy)]
pub struct Record {
    /// Differs from that of every other record, also of one with the same number that was lost.
    version: u64,
    pub logged: Option<SystemTime>,
    pub stored: Option<SystemTime>,
}

/// The records in their order, with one at the end that may not be acknowledged.
#[derive(Clone, Default)]
pub struct Journal(pub Vec<Record>);

/// Numbers of records that the two volumes hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    pub in_log: usize,
    pub in_table: usize,
}

/// The wall clock, by which the mirror tells its times as well.
pub fn now() -> SystemTime {
    SystemTime::now()
}

/// Page of the table that a record changes.
fn place(number: usize) -> usize {
    number * 7919 % TABLE_PAGES
}

fn page(seed: u64, place: usize, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    fill(&mut bytes, seed, place as u64, version);
    bytes
}

impl Journal {
    /// Number of records of which both writes were acknowledged.
    pub fn acknowledged(&self) -> usize {
        self.0.iter().filter(|record| record.stored.is_some()).count()
    }

    fn log_page(&self, number: usize) -> Vec<u8> {
        page(LOG_SEED, number, self.0[number].version)
    }

    fn log_of(&self, count: usize) -> Vec<u8> {
        let mut image = vec![0; VOLUME_BYTES];
        for (number, bytes) in image.chunks_exact_mut(PAGE_BYTES).take(count).enumerate() {
            bytes.copy_from_slice(&self.log_page(number));
        }
        image
    }

    fn table_of(&self, count: usize) -> Vec<u8> {
        let mut image = vec![0; VOLUME_BYTES];
        for (number, record) in self.0.iter().enumerate().take(count) {
            let place = place(number);
            let bytes = &mut image[place * PAGE_BYTES..][..PAGE_BYTES];
            bytes.copy_from_slice(&page(TABLE_SEED, place, record.version));
        }
        image
    }

    /// Compares every byte of both volumes with the journal, and says how many of its records they hold.
    ///
    /// # Errors
    /// A byte that no record explains, or two volumes that are not of one instant.
    pub fn compare(&self, log: &[u8], table: &[u8]) -> Result<Found> {
        let pages = log.chunks_exact(PAGE_BYTES).zip(0..self.0.len());
        let in_log = pages.take_while(|(page, number)| *page == self.log_page(*number)).count();
        if let Some(at) = first_difference(log, &self.log_of(in_log)) {
            bail!("the log holds {in_log} records and, at byte {at}, what is none: it is torn");
        }
        let earlier = [in_log, in_log.saturating_sub(1)];
        let is_of = |count: &usize| first_difference(table, &self.table_of(*count)).is_none();
        match earlier.into_iter().find(is_of) {
            Some(in_table) => Ok(Found { in_log, in_table }),
            None => {
                let other = (0..=self.0.len()).rev().find(is_of);
                let has = other.map_or("what no number of records explains".to_owned(), |count| {
                    format!("the first {count}")
                });
                bail!(
                    "the log holds {in_log} records and the table {has}: they are not of one instant"
                )
            }
        }
    }

    /// Reads both volumes whole and compares them.
    ///
    /// # Errors
    /// As [`Self::compare`], and a failed read.
    pub fn check(&self, volumes: &Volumes) -> Result<Found> {
        self.compare(&read_all(&volumes.log)?, &read_all(&volumes.table)?)
    }

    /// Asserts that all of it is there, and nothing else.
    ///
    /// # Errors
    /// As [`Self::check`], and a record that is missing.
    pub fn check_whole(&self, volumes: &Volumes) -> Result<usize> {
        let (found, wanted) = (self.check(volumes)?, self.acknowledged());
        if found.in_table < wanted {
            bail!("{wanted} records were acknowledged, and {} are there", found.in_table);
        }
        Ok(found.in_table)
    }
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(one, other)| one != other).or(Some(one.len()))
}

fn read_all(client: &Client) -> Result<Vec<u8>> {
    let mut image = Vec::with_capacity(VOLUME_BYTES);
    while image.len() < VOLUME_BYTES {
        interrupt::check()?;
        let piece = client.read(image.len() as u64, READ_BYTES as u32).context("read")?;
        if piece.is_empty() {
            bail!("the volume ends at byte {}", image.len());
        }
        image.extend_from_slice(&piece);
    }
    Ok(image)
}

/// The two volumes where they are attached.
pub struct Volumes {
    log: Client,
    table: Client,
}

impl Volumes {
    /// Connects to the sockets of both. IO fails once their target is gone: a database has no life beyond its
    /// site.
    ///
    /// # Errors
    /// No target serves them in time.
    pub fn connect(log: &Path, table: &Path) -> Result<Self> {
        Ok(Self { log: connect(log)?, table: connect(table)? })
    }
}

fn connect(socket: &Path) -> Result<Client> {
    let began = Instant::now();
    let address = Address::Unix(socket.to_owned());
    let options = ClientOptions { reconnect: false, ..ClientOptions::new(address) };
    loop {
        interrupt::check()?;
        match Client::connect(options.clone()) {
            Ok(client) => return Ok(client),
            Err(error) if began.elapsed() > CONNECT_BUDGET => return Err(error.into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// A database in use; dropping it has it end after its present record.
pub struct Database {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
}

struct Shared {
    is_stopped: AtomicBool,
    journal: Mutex<Journal>,
}

impl Shared {
    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Database {
    /// Goes on behind these records: the table gets the last one of the log where it lacks that, as a database
    /// recovers. `reign` differs at each start.
    ///
    /// # Errors
    /// A refused write.
    pub fn start(volumes: Volumes, journal: Journal, found: Found, reign: u64) -> Result<Self> {
        let mut journal = journal;
        journal.0.truncate(found.in_log);
        for number in found.in_table..found.in_log {
            store(&volumes, number, journal.0[number].version)?;
        }
        let recovered = Some(now());
        for record in &mut journal.0 {
            record.logged = record.logged.or(recovered);
            record.stored = record.stored.or(recovered);
        }
        let (is_stopped, journal) = (AtomicBool::new(false), Mutex::new(journal));
        let shared = Arc::new(Shared { is_stopped, journal });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::spawn(move || write(&volumes, &theirs, reign));
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The records so far.
    pub fn journal(&self) -> Journal {
        self.shared.journal().clone()
    }

    /// # Errors
    /// The database ended by itself.
    pub fn check(&self) -> Result<()> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            bail!("the database got an error in the middle of its work");
        }
        Ok(())
    }

    /// Ends it after its present record.
    ///
    /// # Errors
    /// The error that it got.
    pub fn finish(mut self) -> Result<Journal> {
        self.shared.is_stopped.store(true, Ordering::SeqCst);
        self.join()?;
        Ok(self.journal())
    }

    /// Waits for its end, once its volumes are gone.
    ///
    /// # Errors
    /// It does not end by an error of its volumes.
    pub fn lost(mut self) -> Result<Journal> {
        let began = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            interrupt::check()?;
            if began.elapsed() > CONNECT_BUDGET {
                bail!("the database goes on, though its cluster is gone");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        match self.join() {
            Ok(()) => bail!("the database ended by itself"),
            Err(_) => Ok(self.journal()),
        }
    }

    fn join(&mut self) -> Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome.context("the database got an error"),
            Some(Err(_)) => bail!("the database panicked"),
            None => Ok(()),
        }
    }
}

impl Drop for Database {
    /// Its thread is not waited for: a request of it may end only with the cluster.
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, Ordering::SeqCst);
    }
}

fn store(volumes: &Volumes, number: usize, version: u64) -> Result<()> {
    let place = place(number);
    let bytes = page(TABLE_SEED, place, version);
    volumes.table.write((place * PAGE_BYTES) as u64, bytes.into(), false).context("write")?;
    volumes.table.flush().context("flush")
}

fn write(volumes: &Volumes, shared: &Shared, reign: u64) -> Result<()> {
    while !shared.is_stopped.load(Ordering::SeqCst) {
        let number = shared.journal().0.len();
        if number == LOG_PAGES {
            bail!("the log is full");
        }
        let version = reign << 32 | number as u64;
        shared.journal().0.push(Record { version, logged: None, stored: None });
        let bytes = page(LOG_SEED, number, version);
        volumes.log.write((number * PAGE_BYTES) as u64, bytes.into(), false).context("write")?;
        volumes.log.flush().context("flush")?;
        shared.journal().0[number].logged = Some(now());
        store(volumes, number, version)?;
        shared.journal().0[number].stored = Some(now());
        std::thread::sleep(PACE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(count: u64) -> Journal {
        let now = Some(now());
        let record = |number| Record { version: 1 << 32 | number, logged: now, stored: now };
        Journal((0..count).map(record).collect())
    }

    #[test]
    fn a_log_and_a_table_of_one_instant_are_told_from_others() {
        let journal = journal(1000);
        let found = |log, table| journal.compare(&journal.log_of(log), &journal.table_of(table));
        assert_eq!(found(700, 700).unwrap(), Found { in_log: 700, in_table: 700 });
        assert_eq!(found(700, 699).unwrap(), Found { in_log: 700, in_table: 699 });
        assert_eq!(found(0, 0).unwrap(), Found { in_log: 0, in_table: 0 });
        for (log, table) in [(700, 698), (700, 701), (0, 1)] {
            let message = found(log, table).unwrap_err().to_string();
            assert!(message.contains(&format!("the first {table}: they are not of one instant")));
        }
    }

    #[test]
    fn a_torn_record_and_one_of_another_reign_are_found() {
        let journal = journal(100);
        let table = journal.table_of(50);
        let mut torn = journal.log_of(50);
        torn[50 * PAGE_BYTES + 7] = 1;
        assert!(journal.compare(&torn, &table).unwrap_err().to_string().contains("torn"));
        let mut other = journal.clone();
        other.0[20].version = 2 << 32;
        let message = journal.compare(&other.log_of(50), &table).unwrap_err().to_string();
        assert!(message.contains("torn"), "{message}");
        let message = journal.compare(&journal.log_of(50), &other.table_of(50)).unwrap_err();
        assert!(message.to_string().contains("no number of records"), "{message}");
    }
}
