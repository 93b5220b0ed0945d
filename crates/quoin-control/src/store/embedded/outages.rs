//! What was answered is there after the process was killed and after the power went.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Error, ErrorKind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use redb::StorageBackend;

use super::*;

/// What one write tears at, in bytes.
const SECTOR: usize = 512;

/// A disk with a cache that a power cut loses, in part.
#[derive(Debug, Default)]
struct Cached {
    /// As the process sees it.
    seen: Vec<u8>,
    media: Vec<u8>,
    /// Since the last sync.
    unsynced: Vec<Unsynced>,
    /// Operations that are left before the power goes; `None`: it stays.
    left: Option<usize>,
    operations: usize,
}

#[derive(Debug)]
enum Unsynced {
    Length(usize),
    Write(usize, Vec<u8>),
}

impl Cached {
    fn operation(&mut self) -> Result<(), Error> {
        self.operations += 1;
        match &mut self.left {
            Some(0) => Err(Error::other("the power is off")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// What the media hold after the cut: any part of what was not synced, in any order of its own.
    fn after_the_cut(&self, random: &mut StdRng) -> Vec<u8> {
        let mut media = self.media.clone();
        let all_of_it = random.random_bool(0.1);
        for unsynced in &self.unsynced {
            match unsynced {
                Unsynced::Length(length) if all_of_it || random.random_bool(0.5) => {
                    media.resize(*length, 0);
                }
                Unsynced::Length(_) => {}
                Unsynced::Write(offset, data) => {
                    for (n, sector) in data.chunks(SECTOR).enumerate() {
                        let at = offset + n * SECTOR;
                        if all_of_it || random.random_bool(0.5) {
                            let end = at + sector.len();
                            if media.len() < end {
                                media.resize(end, 0);
                            }
                            media[at..end].copy_from_slice(sector);
                        }
                    }
                }
            }
        }
        media
    }
}

#[derive(Clone, Debug, Default)]
struct CachedDisk(Arc<Mutex<Cached>>);

impl CachedDisk {
    fn of(media: Vec<u8>) -> Self {
        let cached = Cached { seen: media.clone(), media, ..Cached::default() };
        Self(Arc::new(Mutex::new(cached)))
    }
}

impl StorageBackend for CachedDisk {
    fn len(&self) -> Result<u64, Error> {
        Ok(self.0.lock().unwrap().seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let disk = self.0.lock().unwrap();
        let at = offset as usize;
        let found = disk.seen.get(at..at + out.len());
        out.copy_from_slice(found.ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn set_len(&self, length: u64) -> Result<(), Error> {
        let mut disk = self.0.lock().unwrap();
        disk.operation()?;
        disk.seen.resize(length as usize, 0);
        disk.unsynced.push(Unsynced::Length(length as usize));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), Error> {
        let mut disk = self.0.lock().unwrap();
        disk.operation()?;
        disk.media = disk.seen.clone();
        disk.unsynced.clear();
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let mut disk = self.0.lock().unwrap();
        disk.operation()?;
        let at = offset as usize;
        if disk.seen.len() < at + data.len() {
            disk.seen.resize(at + data.len(), 0);
        }
        disk.seen[at..at + data.len()].copy_from_slice(data);
        disk.unsynced.push(Unsynced::Write(at, data.to_vec()));
        Ok(())
    }
}

fn open(disk: CachedDisk) -> Result<Embedded, StoreError> {
    let database = Database::builder().create_with_backend(disk);
    let database = database.map_err(|error| StoreError::Failed(error.to_string()))?;
    Embedded::over(Path::new("memory"), database)
}

/// What was answered, by key, and the change whose answer never came.
#[derive(Default)]
struct Known {
    done: BTreeMap<String, (u64, Vec<u8>)>,
    unknown: Option<(String, Option<Vec<u8>>)>,
}

/// Makes, changes and removes records until the power goes.
fn work(store: &Embedded, known: &mut Known) {
    for n in 0..12u32 {
        let key = format!("volume/{}", n % 4);
        let before = known.done.get(&key).map_or(0, |(revision, _)| *revision);
        let value = (n % 7 != 6).then(|| vec![n as u8; 100 + 700 * n as usize]);
        known.unknown = Some((key.clone(), value.clone()));
        match store.0.swap(&key, before, value.as_deref()) {
            Ok(Swap::Done(revision)) => {
                match value {
                    Some(value) => drop(known.done.insert(key, (revision, value))),
                    None => drop(known.done.remove(&key)),
                }
                known.unknown = None;
            }
            Ok(Swap::Conflict(found)) => panic!("{key} is {found:?}"),
            Err(_) => return,
        }
    }
}

fn is_as_answered(store: &Embedded, known: &Known, what: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for n in 0..4 {
        let key = format!("volume/{n}");
        let found = runtime.block_on(store.get(&key)).unwrap();
        let answered = known.done.get(&key);
        let as_answered = match (&found, answered) {
            (Some(found), Some((revision, value))) => {
                (found.revision, &found.value) == (*revision, value)
            }
            (None, None) => true,
            _ => false,
        };
        let as_asked = known.unknown.as_ref().is_some_and(|(asked, value)| {
            *asked == key && found.as_ref().map(|found| &found.value) == value.as_ref()
        });
        assert!(as_answered || as_asked, "{what}: {key} is not what was answered");
    }
}

#[test]
fn every_answered_change_is_there_after_a_power_cut_at_any_write_whatever_the_cache_lost() {
    let whole = CachedDisk::default();
    let store = open(whole.clone()).unwrap();
    let made = whole.0.lock().unwrap().operations;
    work(&store, &mut Known::default());
    let all = whole.0.lock().unwrap().operations;
    drop(store);
    assert!(all > made + 24, "{made} operations to make it and {all} in all");
    for cut in made..=all {
        for seed in 0..3 {
            let disk = CachedDisk::default();
            let store = open(disk.clone()).unwrap();
            let mut known = Known::default();
            disk.0.lock().unwrap().left = Some(cut - made);
            work(&store, &mut known);
            let mut random = StdRng::seed_from_u64(seed + (cut * 3) as u64);
            let media = disk.0.lock().unwrap().after_the_cut(&mut random);
            drop(store);
            let what = format!("cut before operation {cut}, seed {seed}");
            let again =
                open(CachedDisk::of(media)).unwrap_or_else(|error| panic!("{what}: {error}"));
            is_as_answered(&again, &known, &what);
        }
    }
}

/// Where the process that is killed keeps its records; without it the test below has nothing to do.
const KILLED_STORE: &str = "QUOIN_TEST_KILLED_STORE";

#[test]
fn the_process_that_is_killed_writes_until_it_is() {
    let Some(path) = std::env::var_os(KILLED_STORE) else { return };
    let store = Embedded::open(Path::new(&path)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let last = runtime.block_on(store.get("counter")).unwrap().map_or(0, |entry| entry.revision);
    let mut revision = last;
    for n in 0u64.. {
        let value = (revision + n).to_le_bytes().repeat(1 + (n % 300) as usize);
        let Swap::Done(now) = store.0.swap("counter", revision, Some(&value)).unwrap() else {
            panic!("nobody else writes")
        };
        revision = now;
        println!("DONE {revision}");
    }
}

#[test]
fn every_answered_change_is_there_after_the_process_was_killed_in_the_middle_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.redb");
    let name = "the_process_that_is_killed_writes_until_it_is";
    let name = format!("store::embedded::outages::{name}");
    let mut random = StdRng::seed_from_u64(7);
    let mut answered = 0;
    for round in 0..8 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(KILLED_STORE, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told =
            |line: String| line.rsplit_once("DONE ").and_then(|(_, n)| n.parse::<u64>().ok());
        let mut wanted = random.random_range(1..60);
        let mut last = 0;
        for line in lines.by_ref().map_while(Result::ok) {
            last = told(line).unwrap_or(last);
            wanted -= i32::from(last > 0);
            if wanted <= 0 {
                break;
            }
        }
        std::thread::sleep(Duration::from_micros(random.random_range(0..3000)));
        child.kill().unwrap();
        child.wait().unwrap();
        // What it said before it died counts as well.
        last = lines.map_while(Result::ok).filter_map(told).last().unwrap_or(last);
        assert!(last > answered, "round {round}: nothing was written");
        let store = Embedded::open(&path).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(store.get("counter")).unwrap().unwrap();
        assert!(
            (last..=last + 1).contains(&found.revision),
            "round {round}: {last} was answered, {} is there",
            found.revision
        );
        answered = found.revision;
    }
}
