//! Answered changes survive a kill of the process and a power cut.

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

/// Unit at which a write tears, in bytes.
const SECTOR: usize = 512;

/// A disk with a cache that a power cut loses, in part.
#[derive(Debug, Default)]
struct Cached {
    /// Contents as the process sees them.
    seen: Vec<u8>,
    media: Vec<u8>,
    /// Since the last sync.
    unsynced: Vec<Unsynced>,
    /// Operations that are left before the power goes; `None`: it stays.
    left: Option<usize>,
    /// Operations that are left before some are refused, and how many are then.
    refused: Option<(usize, usize)>,
    /// A refused sync leaves what it was to sync to be read, and never brings it to the media.
    forgets: bool,
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
        match &mut self.refused {
            None => {}
            Some((0, 0)) => self.refused = None,
            Some((0, more)) => {
                *more -= 1;
                return Err(ErrorKind::StorageFull.into());
            }
            Some((before, _)) => *before -= 1,
        }
        match &mut self.left {
            Some(0) => Err(Error::other("the power is off")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns the media after the cut: with any part of the unsynced writes, in any order.
    fn after_the_cut(&self, random: &mut StdRng) -> Vec<u8> {
        let all_of_it = random.random_bool(0.1);
        Self::written(&self.media, &self.unsynced, |_| all_of_it || random.random_bool(0.5))
    }

    /// The media with those changes, sector by sector, that are kept.
    fn written(
        media: &[u8],
        unsynced: &[Unsynced],
        mut is_kept: impl FnMut(&Unsynced) -> bool,
    ) -> Vec<u8> {
        let mut media = media.to_vec();
        for change in unsynced {
            match change {
                Unsynced::Length(length) => {
                    if is_kept(change) {
                        media.resize(*length, 0);
                    }
                }
                Unsynced::Write(offset, data) => {
                    for (n, sector) in data.chunks(SECTOR).enumerate() {
                        let at = offset + n * SECTOR;
                        if is_kept(change) {
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
        if let Err(error) = disk.operation() {
            if disk.forgets {
                disk.unsynced.clear();
            }
            return Err(error);
        }
        if disk.forgets {
            let unsynced = std::mem::take(&mut disk.unsynced);
            disk.media = Cached::written(&disk.media, &unsynced, |_| true);
            return Ok(());
        }
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

impl Medium for CachedDisk {
    fn open(&self) -> Result<Database, DatabaseError> {
        Database::builder().create_with_backend(self.clone())
    }

    fn write_again(&self) -> Result<(), Error> {
        let seen = self.0.lock().unwrap().seen.clone();
        StorageBackend::write(self, 0, &seen)?;
        self.sync_data()
    }
}

fn open(disk: CachedDisk) -> Result<Embedded, StoreError> {
    Embedded::over(Path::new("memory"), Box::new(disk))
}

/// Answered changes by key, and the change whose answer never came.
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
        match swap(store, &key, before, value.as_deref()) {
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

/// Swaps a record in a commit of its own.
fn swap(
    store: &Embedded,
    key: &str,
    expected: u64,
    value: Option<&[u8]>,
) -> Result<Swap, StoreError> {
    let value = value.map(<[u8]>::to_vec);
    let writes = [Write::Swap { key: key.to_owned(), expected, value }];
    let outcomes = store.0.with(|database| store.0.commit(database, &writes));
    Ok(outcomes?.pop().expect("one outcome"))
}

fn read(store: &Embedded, key: &str) -> Result<Option<Entry>, StoreError> {
    store.0.with(|database| store.0.get_in(database, key))
}

fn is_as_answered(store: &Embedded, known: &Known, what: &str) {
    for n in 0..4 {
        let key = format!("volume/{n}");
        let found = read(store, &key).unwrap_or_else(|error| panic!("{what}: {error}"));
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

/// Reads what the change without an answer has come to.
fn settle(store: &Embedded, known: &mut Known) {
    let Some((key, _)) = known.unknown.take() else { return };
    match read(store, &key).unwrap() {
        Some(found) => drop(known.done.insert(key, (found.revision, found.value))),
        None => drop(known.done.remove(&key)),
    }
}

#[test]
fn records_are_written_again_after_a_disk_was_full_for_a_moment_and_nothing_that_was_answered_is_lost()
 {
    let whole = CachedDisk::default();
    let store = open(whole.clone()).unwrap();
    let made = whole.0.lock().unwrap().operations;
    work(&store, &mut Known::default());
    let all = whole.0.lock().unwrap().operations;
    let (mut landed, mut lost) = (0, 0);
    for refused in made..all {
        for forgets in [false, true] {
            let what = format!("operation {refused} is refused, forgets: {forgets}");
            let disk = CachedDisk::default();
            let store = open(disk.clone()).unwrap();
            let mut known = Known::default();
            {
                let mut disk = disk.0.lock().unwrap();
                (disk.refused, disk.forgets) = (Some((refused - made, 1)), forgets);
            }
            work(&store, &mut known);
            // A refusal that redb can do without shows nowhere.
            let failed = known.unknown.is_some();
            is_as_answered(&store, &known, &what);
            assert_eq!(store.opened_again(), u64::from(failed), "{what}");
            if let Some((key, value)) = &known.unknown {
                let found = read(&store, key).unwrap();
                let as_asked = found.as_ref().map(|found| &found.value) == value.as_ref();
                *if as_asked { &mut landed } else { &mut lost } += 1;
            }
            settle(&store, &mut known);
            // Other pages than those that the failed call wrote, and a sync.
            let Ok(Swap::Done(_)) = swap(&store, "zone", 0, Some(b"later")) else {
                panic!("{what}: it is not written again")
            };
            for seed in 0..2 {
                let mut random = StdRng::seed_from_u64(seed + (refused * 2) as u64);
                let media = disk.0.lock().unwrap().after_the_cut(&mut random);
                let again = open(CachedDisk::of(media))
                    .unwrap_or_else(|error| panic!("{what}, then a power cut: {error}"));
                is_as_answered(&again, &known, &format!("{what}, then a power cut"));
                assert!(read(&again, "zone").unwrap().is_some(), "{what}, then a power cut");
            }
            work(&store, &mut known);
            assert!(known.unknown.is_none(), "{what}: it is not written again");
            is_as_answered(&store, &known, &what);
        }
    }
    assert!(landed > 0 && lost > 0, "{landed} landed and {lost} did not");
}

#[test]
fn records_on_a_disk_that_stays_full_are_tried_once_in_a_while_and_are_there_once_it_has_room() {
    let disk = CachedDisk::default();
    let store = open(disk.clone()).unwrap();
    let Ok(Swap::Done(first)) = swap(&store, "a", 0, Some(b"before")) else { panic!("no room") };
    disk.0.lock().unwrap().refused = Some((0, usize::MAX));
    swap(&store, "a", first, Some(b"after")).unwrap_err();
    let error = read(&store, "a").unwrap_err().to_string();
    assert!(error.contains("to be opened again"), "{error}");
    let operations = disk.0.lock().unwrap().operations;
    swap(&store, "a", first, Some(b"after")).unwrap_err();
    assert_eq!(disk.0.lock().unwrap().operations, operations, "it was tried a moment ago");
    disk.0.lock().unwrap().refused = None;
    std::thread::sleep(OPENED_EVERY);
    assert_eq!(read(&store, "a").unwrap().unwrap().value, b"before");
    assert!(matches!(swap(&store, "a", first, Some(b"after")), Ok(Swap::Done(_))));
    assert_eq!(store.opened_again(), 1);
}

/// Where the file system is that becomes full; without it the test below has nothing to do.
const FULL_STORE: &str = "QUOIN_TEST_FULL_STORE";

#[test]
fn the_process_whose_file_system_is_full_writes_once_it_has_room() {
    let Some(dir) = std::env::var_os(FULL_STORE) else { return };
    let dir = Path::new(&dir);
    let store = Embedded::open(&dir.join("records.redb")).unwrap();
    let mut known: BTreeMap<String, u64> = BTreeMap::new();
    let ballast = dir.join("ballast");
    for round in 0..3 {
        // Something else takes all the room that is left.
        let mut file = std::fs::File::create(&ballast).unwrap();
        while std::io::Write::write_all(&mut file, &[7; 4096]).is_ok() {}
        let failed = (0..1000).find_map(|n| {
            let key = format!("volume/{round}-{n}");
            match swap(&store, &key, 0, Some(&[n as u8; 20_000])) {
                Ok(Swap::Done(revision)) => drop(known.insert(key, revision)),
                Ok(Swap::Conflict(found)) => panic!("{key} is {found:?}"),
                Err(error) => return Some((key, error)),
            }
            None
        });
        let (key, error) = failed.expect("the file system is never full");
        drop(file);
        std::fs::remove_file(&ballast).unwrap();
        let landed = loop {
            match read(&store, &key) {
                Ok(found) => break found,
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let revision = landed.map_or(0, |found| found.revision);
        let Ok(Swap::Done(revision)) = swap(&store, &key, revision, Some(b"again")) else {
            panic!("round {round}: not written after {error}")
        };
        known.insert(key, revision);
        for (key, revision) in &known {
            assert_eq!(read(&store, key).unwrap().unwrap().revision, *revision, "{key}");
        }
        println!("WRITTEN {}", known.len());
    }
    assert!(store.opened_again() >= 3);
}

#[test]
fn a_file_system_that_was_full_takes_records_again_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let name = "the_process_whose_file_system_is_full_writes_once_it_has_room";
    let name = format!("state::store::embedded::outages::{name}");
    // A user namespace of its own: this needs no root.
    let script = "mount -t tmpfs -o size=6m none \"$QUOIN_TEST_FULL_STORE\" && exec \"$0\" \"$@\"";
    let told = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &name, "--nocapture"])
        .env(FULL_STORE, dir.path())
        .output()
        .unwrap();
    let (said, errors) = (told.stdout, String::from_utf8_lossy(&told.stderr).into_owned());
    let said = String::from_utf8_lossy(&said);
    assert!(told.status.success() && said.matches("WRITTEN").count() == 3, "{said}\n{errors}");
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
        let Swap::Done(now) = swap(&store, "counter", revision, Some(&value)).unwrap() else {
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
    let name = format!("state::store::embedded::outages::{name}");
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
        // Its words before it died count as well.
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
