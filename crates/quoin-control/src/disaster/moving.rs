//! Moving of the records from one store to another, with no controller running.
//!
//! The steps, of which each may be the last one before a crash:
//!
//! 1. The target is marked as being filled, so no controller starts on it, and gets the authority and all records,
//!    with a term some numbers above that of the source. Until the next step the source rules: a repeat copies anew.
//! 2. The source is marked as moved, and superseded by that term. No controller starts on either: a repeat goes on.
//! 3. The mark of the target is removed: it rules.
//!
//! A copy of the source of before the move, which is brought back later, is of a former term: members end it.

use std::path::{Path, PathBuf};

use quoin_cluster::records::{
    MoveRecord, MoveState, Record, SupersededRecord, TermRecord, Text, VolumeRecord, encode,
};
use quoin_identity::{Authority, ClusterId, Lifetimes, make_dir};
use quoin_types::TermId;
use quoin_types::term::TERM_MAX;

use crate::Error;
use crate::disaster::backup::records_in_making;
use crate::disaster::offline::{Offline, check_not_superseded, mark_of, read_one, refusal};
use crate::files::{
    RECORDS_FILE, close_to_others, is_initialised, mark_one_of_several, refuse_foreign,
};
use crate::state::random_id;
use crate::state::store::{Put, Records, SharedStore, Store};
use crate::time::now_ms;

/// Terms that a move skips: controllers on an old copy of the source begin terms of their own with each start, and
/// stay below that of the target until a member has told them of it.
const TERMS_SKIPPED: u64 = 16;

/// Result of a move.
#[derive(Clone, Debug)]
pub struct MovedRecords {
    pub cluster: ClusterId,
    /// In words.
    pub from: String,
    pub to: String,
    pub volumes: usize,
    /// Term of the records in their new place.
    pub term: u64,
}

fn place(records: &Records, dir: &Path) -> String {
    match records {
        Records::Embedded => format!("the embedded store in {}", dir.display()),
        Records::Shared(options) => options.place(),
    }
}

/// Moves the records of the controller whose directory is `dir`. A move that was cut short is completed by a repeat.
///
/// # Errors
/// A controller rules by the records of either store, or the target holds others. Nothing is changed then.
pub async fn move_records(
    dir: &Path,
    from: &Records,
    to: &Records,
    lifetimes: Lifetimes,
) -> Result<MovedRecords, Error> {
    if matches!(
        (from, to),
        (Records::Embedded, Records::Embedded) | (Records::Shared(_), Records::Shared(_))
    ) && place(from, dir) == place(to, dir)
    {
        return Err(Error::invalid("to", "the records are there already"));
    }
    match from {
        Records::Embedded if !dir.join(RECORDS_FILE).exists() => {
            return Err(Error::NotInitialised(dir.to_owned()));
        }
        Records::Shared(_) if !is_initialised(dir) => refuse_foreign(dir)?,
        _ => {}
    }
    let source = Offline::take(from, dir).await?;
    let moving = Moving { dir, from, to, lifetimes, source: &source };
    let moved = moving.run().await;
    source.release().await;
    moved
}

struct Moving<'a> {
    dir: &'a Path,
    from: &'a Records,
    to: &'a Records,
    lifetimes: Lifetimes,
    source: &'a Offline,
}

/// All that is to arrive.
struct Arriving {
    cluster: ClusterId,
    authority: Vec<u8>,
    records: Vec<Put>,
    volumes: usize,
}

impl Moving<'_> {
    async fn run(&self) -> Result<MovedRecords, Error> {
        let (from, to) = (place(self.from, self.dir), place(self.to, self.dir));
        let cut_short = match mark_of(&*self.source.store).await? {
            // It was cut short behind its second step.
            Some(mark) if mark.state == MoveState::Moved && mark.place == to => Some(mark),
            Some(mark) => return Err(refusal(mark)),
            None => None,
        };
        if cut_short.is_none() {
            check_not_superseded(&*self.source.store).await?;
        }
        let mut arriving = self.arriving().await?;
        let mark = match &cut_short {
            Some(mark) => mark.clone(),
            None => {
                let before: Option<TermRecord> =
                    read_one(&*self.source.store, TermRecord::NAME).await?;
                let number = before.map_or(0, |term| term.number) + TERMS_SKIPPED;
                if number > TERM_MAX {
                    return Err(Error::Precondition("no term is left for a move".to_owned()));
                }
                let id = Text(TermId(random_id()));
                let (state, since_ms) = (MoveState::Moved, now_ms());
                MoveRecord { state, id, number, place: to.clone(), since_ms }
            }
        };
        let filling =
            MoveRecord { state: MoveState::Filling, place: from.clone(), ..mark.clone() };
        let term = TermRecord { number: mark.number, id: mark.id, since_ms: mark.since_ms };
        arriving.records.push((term.key(), Some(encode(&term))));
        let moved = MovedRecords {
            cluster: arriving.cluster,
            volumes: arriving.volumes,
            term: mark.number,
            from,
            to,
        };
        match self.to {
            Records::Embedded => self.into_file(cut_short.is_some(), &mark, &filling, arriving).await?,
            Records::Shared(options) => {
                let target = Offline::take(self.to, self.dir).await?;
                let is_over = cut_short.is_some();
                let outcome = self.into_engine(&target, is_over, &mark, &filling, arriving).await;
                target.release().await;
                outcome?;
                close_to_others(self.dir)?;
                mark_one_of_several(self.dir, options)?;
            }
        }
        Ok(moved)
    }

    async fn arriving(&self) -> Result<Arriving, Error> {
        let authority = match self.source.shared() {
            None => Authority::load(self.dir, self.lifetimes)?.export()?.into_bytes(),
            Some(shared) => {
                let kept = shared.authority().await?;
                kept.ok_or_else(|| Error::NotInitialised(self.dir.to_owned()))?
            }
        };
        let cluster = Authority::parse(&authority, self.lifetimes)?.cluster();
        let stays = [MoveRecord::PREFIX, SupersededRecord::PREFIX, TermRecord::PREFIX];
        let found = self.source.store.list("").await?.into_iter();
        let found = found.filter(|entry| !stays.iter().any(|one| entry.key.starts_with(one)));
        let records: Vec<Put> = found.map(|entry| (entry.key, Some(entry.value))).collect();
        let is_volume = |(key, _): &&Put| key.starts_with(VolumeRecord::PREFIX);
        let volumes = records.iter().filter(is_volume).count();
        Ok(Arriving { cluster, authority, records, volumes })
    }

    /// The second step.
    async fn mark_source(&self, mark: &MoveRecord) -> Result<(), Error> {
        let ended = SupersededRecord {
            number: mark.number,
            id: mark.id,
            told_by: "the move of the records".to_owned(),
            since_ms: mark.since_ms,
        };
        let store = &self.source.store;
        // One after the other: a move that was cut short is known by its mark.
        store.put_all(vec![(mark.key(), Some(encode(mark)))]).await?;
        Ok(store.put_all(vec![(ended.key(), Some(encode(&ended)))]).await?)
    }

    async fn into_engine(
        &self,
        target: &Offline,
        is_over: bool,
        mark: &MoveRecord,
        filling: &MoveRecord,
        arriving: Arriving,
    ) -> Result<(), Error> {
        let shared = target.shared().expect("an engine that controllers share");
        let to = &mark.place;
        let there = mark_of(&*target.store).await?;
        let kept = shared.authority().await?;
        if let Some(kept) = &kept {
            self.check_cluster(kept, arriving.cluster)?;
        }
        if !is_over {
            if there.is_none() && !target.store.list("").await?.is_empty() {
                return Err(holds_others(to));
            }
            target.store.put_all(vec![(filling.key(), Some(encode(filling)))]).await?;
            self.give_authority(&**shared, target, kept.is_some(), &arriving).await?;
            target.replace_all(arriving.records, &[filling.key()]).await?;
        }
        self.mark_source(mark).await?;
        match there {
            // A repeat of what was completed.
            None if is_over && kept.is_some() => Ok(()),
            there if is_over && there.is_none_or(|there| there.id != mark.id) => Err(lost_at(to)),
            _ => Ok(target.store.put_all(vec![(filling.key(), None)]).await?),
        }
    }

    async fn give_authority(
        &self,
        shared: &dyn SharedStore,
        target: &Offline,
        is_there: bool,
        arriving: &Arriving,
    ) -> Result<(), Error> {
        if is_there {
            // One that was there before may be older.
            return Ok(target.store.keep_authority(arriving.authority.clone()).await?);
        }
        if shared.create_authority(&arriving.authority).await? {
            return Ok(());
        }
        let made = shared.authority().await?.unwrap_or_default();
        let checked = self.check_cluster(&made, arriving.cluster);
        if checked.is_err() {
            // Somebody made another cluster here meanwhile: it is not to be marked.
            let mark = MoveRecord::key_of(MoveRecord::NAME);
            target.store.put_all(vec![(mark, None)]).await?;
        }
        checked
    }

    fn check_cluster(&self, kept: &[u8], own: ClusterId) -> Result<(), Error> {
        let found = Authority::parse(kept, self.lifetimes)?.cluster();
        match own == found {
            true => Ok(()),
            false => Err(Error::OtherCluster { dir: self.dir.to_owned(), own, found }),
        }
    }

    async fn into_file(
        &self,
        is_over: bool,
        mark: &MoveRecord,
        filling: &MoveRecord,
        mut arriving: Arriving,
    ) -> Result<(), Error> {
        let (making, records) = (records_in_making(self.dir), self.dir.join(RECORDS_FILE));
        let failed = |source| Error::File { path: self.dir.to_owned(), source };
        if !is_over {
            refuse_foreign(self.dir)?;
            if records.exists() {
                let there = Offline::of_file(&records)?;
                if mark_of(&*there.store).await?.is_none() {
                    return Err(holds_others(&mark.place));
                }
            }
            if self.dir.join(crate::files::AUTHORITY_FILE).exists() {
                let own = Authority::load(self.dir, self.lifetimes)?.export()?;
                self.check_cluster(own.as_bytes(), arriving.cluster)?;
            }
            make_dir(self.dir)?;
            Authority::import(self.dir, &arriving.authority, self.lifetimes)?;
            let _ = std::fs::remove_file(&making);
            let target = Offline::of_file(&making)?;
            arriving.records.push((filling.key(), Some(encode(filling))));
            target.store.put_all(arriving.records).await?;
            drop(target);
            std::fs::File::open(self.dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        }
        self.mark_source(mark).await?;
        if is_of(&making, mark).await? {
            if records.exists() {
                let aside = self.dir.join(format!("{RECORDS_FILE}.replaced-{}", now_ms()));
                std::fs::rename(&records, aside).map_err(failed)?;
            }
            std::fs::rename(&making, &records).map_err(failed)?;
            std::fs::File::open(self.dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        }
        if !records.exists() {
            return Err(lost_at(&mark.place));
        }
        let target = Offline::of_file(&records)?;
        match mark_of(&*target.store).await? {
            None => {}
            Some(there) if there.state == MoveState::Filling && there.id == mark.id => {
                target.store.put_all(vec![(filling.key(), None)]).await?;
            }
            Some(_) => return Err(lost_at(&mark.place)),
        }
        close_to_others(self.dir)
    }
}

/// Returns true if the file holds the records of this move.
async fn is_of(path: &PathBuf, mark: &MoveRecord) -> Result<bool, Error> {
    if !path.exists() {
        return Ok(false);
    }
    let there = Offline::of_file(path)?;
    Ok(mark_of(&*there.store).await?.is_some_and(|there| there.id == mark.id))
}

fn holds_others(to: &str) -> Error {
    Error::Precondition(format!(
        "there are other records in {to} already: nothing is ever put over them. Choose another place, or \
         delete them first"
    ))
}

fn lost_at(to: &str) -> Error {
    Error::Precondition(format!(
        "the records have moved to {to}, and are not there: restore a backup (`quoin controller restore`)"
    ))
}
