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

use std::path::Path;

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
use crate::state::store::{Put, Records, SharedStore};
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
        let filling = MoveRecord { state: MoveState::Filling, place: from.clone(), ..mark.clone() };
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
            Records::Embedded => {
                self.fill_file(cut_short.is_some(), &mark, &filling, arriving).await?
            }
            Records::Shared(options) => {
                let target = Offline::take(self.to, self.dir).await?;
                let is_over = cut_short.is_some();
                let outcome = self.fill_engine(&target, is_over, &mark, &filling, arriving).await;
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

    async fn fill_engine(
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
        let is_of_this = there.as_ref().is_some_and(|there| there.id == mark.id);
        match there {
            // A repeat of what was completed.
            None if is_over && kept.is_some() => Ok(()),
            _ if is_over && !is_of_this => Err(lost_at(to)),
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
            // The former one there may be older.
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

    async fn fill_file(
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
async fn is_of(path: &Path, mark: &MoveRecord) -> Result<bool, Error> {
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use quoin_testkit::kubernetes_api::KubernetesApi;

    use super::*;
    use crate::ApiOptions;
    use crate::disaster::offline::check_is_here;
    use crate::state::store::{Engine, KubernetesStoreOptions, LeaseTimes, SharedOptions};

    fn in_kubernetes(api: &KubernetesApi, cluster: &str, token: &Path) -> Records {
        let api = ApiOptions {
            server: api.address(),
            ca: PathBuf::new(),
            token: token.to_owned(),
            namespace: "quoin".to_owned(),
        };
        let cluster = cluster.to_owned();
        let ms = Duration::from_millis;
        let times = LeaseTimes { lasts: ms(8000), renew_within: ms(4000), retry: ms(100) };
        let engine = Engine::Kubernetes(KubernetesStoreOptions { cluster, api });
        Records::Shared(SharedOptions { engine, times, controller: "c-1".to_owned() })
    }

    /// Returns true if a controller would start there, and the records.
    async fn look(records: &Records, dir: &Path) -> (bool, Vec<(String, Vec<u8>)>) {
        if matches!(records, Records::Embedded) && !dir.join(RECORDS_FILE).exists() {
            return (false, Vec::new());
        }
        let held = Offline::take(records, dir).await.unwrap();
        let is_here = check_is_here(&*held.store).await.is_ok()
            && check_not_superseded(&*held.store).await.is_ok();
        let listed = held.store.list("").await.unwrap();
        let authority = match held.shared() {
            Some(shared) => shared.authority().await.unwrap().is_some(),
            None => true,
        };
        held.release().await;
        let changes = [TermRecord::PREFIX, MoveRecord::PREFIX, SupersededRecord::PREFIX];
        let listed: Vec<_> = listed
            .into_iter()
            .filter(|entry| !changes.iter().any(|prefix| entry.key.starts_with(prefix)))
            .map(|entry| (entry.key, entry.value))
            .collect();
        (is_here && authority && !listed.is_empty(), listed)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_move_that_is_cut_at_any_write_never_leaves_two_that_rule_and_its_repeat_completes_it()
     {
        let (scratch, api) = (tempfile::tempdir().unwrap(), KubernetesApi::start());
        let (dir, token) = (scratch.path().join("controller"), scratch.path().join("token"));
        std::fs::write(&token, "of.the.pod").unwrap();
        crate::init(&dir, Lifetimes::default()).await.unwrap();
        let mut ends = [Records::Embedded, in_kubernetes(&api, "quoin", &token)];
        {
            let source = Offline::take(&ends[0], &dir).await.unwrap();
            let some = (0..5).map(|n| (format!("cordon/p{n}"), Some(vec![n; 9]))).collect();
            source.store.put_all(some).await.unwrap();
        }
        let (_, records) = look(&ends[0], &dir).await;
        let (mut term, mut uncut) = (0, 0);
        // Back and forth: one cut after the other, until it comes behind the last write of both directions.
        for step in 0.. {
            api.refuse_changes_after(Some(step / 2));
            let cut = move_records(&dir, &ends[0], &ends[1], Lifetimes::default()).await;
            api.refuse_changes_after(None);
            uncut = if cut.is_ok() { uncut + 1 } else { 0 };
            let [from, to] = [look(&ends[0], &dir).await.0, look(&ends[1], &dir).await.0];
            assert!(!(from && to), "both rule after a cut at {step}: {cut:?}");
            let moved = move_records(&dir, &ends[0], &ends[1], Lifetimes::default()).await;
            let moved =
                moved.unwrap_or_else(|error| panic!("repeated after {step}: {error}, {cut:?}"));
            assert!(moved.term > term, "{moved:?}");
            term = moved.term;
            assert!(!look(&ends[0], &dir).await.0, "the former place rules after {step}");
            assert_eq!(look(&ends[1], &dir).await, (true, records.clone()), "after {step}");
            ends.reverse();
            if uncut == 2 {
                assert!(step > 20, "nothing was cut");
                return;
            }
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn records_move_over_no_others() {
        let (scratch, api) = (tempfile::tempdir().unwrap(), KubernetesApi::start());
        let token = scratch.path().join("token");
        std::fs::write(&token, "of.the.pod").unwrap();
        let [one, other] = ["one", "other"].map(|name| scratch.path().join(name));
        crate::init(&one, Lifetimes::default()).await.unwrap();
        crate::init(&other, Lifetimes::default()).await.unwrap();
        let engine = in_kubernetes(&api, "quoin", &token);
        move_records(&one, &Records::Embedded, &engine, Lifetimes::default()).await.unwrap();
        let over = move_records(&other, &Records::Embedded, &engine, Lifetimes::default()).await;
        assert!(matches!(over, Err(Error::OtherCluster { .. })), "{over:?}");
        assert!(
            look(&Records::Embedded, &other).await.0,
            "the other cluster's rule where they were"
        );
        // To where they have been they move back; over others of the same cluster they do not.
        let back = move_records(&one, &engine, &Records::Embedded, Lifetimes::default()).await;
        back.unwrap();
        let copied = in_kubernetes(&api, "copy", &token);
        move_records(&one, &Records::Embedded, &copied, Lifetimes::default()).await.unwrap();
        let mark = MoveRecord::key_of(MoveRecord::NAME);
        // As by a person who takes the mark away from the former place.
        let file = Offline::of_file(&one.join(RECORDS_FILE)).unwrap();
        let ended = SupersededRecord::key_of(SupersededRecord::NAME);
        file.store.put_all(vec![(mark, None), (ended, None)]).await.unwrap();
        drop(file);
        let over = move_records(&one, &Records::Embedded, &copied, Lifetimes::default()).await;
        assert!(over.unwrap_err().to_string().contains("other records"));
    }
}
