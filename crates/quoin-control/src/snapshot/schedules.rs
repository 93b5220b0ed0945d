//! Schedules: snapshots of a volume at an interval, of which the old ones are deleted.
//!
//! The times of the runs are fixed by the schedule's creation and its interval, and so are the names
//! of its snapshots: whoever does a run twice, as after a crash, finds the snapshot of the first
//! time. Of runs that were missed while no controller was there the last one is made up for. While
//! a snapshot of a schedule waits for its cut no other one is begun.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use quoin_api::control::{CreateScheduleRequest, VolumeRef};
use quoin_cluster::records::{
    ScheduleRecord, SnapshotPhase, SnapshotRecord, VolumePhase, VolumeRecord,
};
use quoin_cluster::wall_clock::is_ahead;
use quoin_types::VolumeId;
use tokio::time::Instant;

use super::catalog::Snapshots;
use crate::Error;
use crate::reconcile::{Next, Queue, Reconciler};
use crate::state::State;
use crate::state::events::{Object, Severity};
use crate::time::{now_ms, timestamp};
use crate::volume::spec;

/// Bounds of an interval and of the time for which snapshots are kept.
const EVERY_S_MIN: u64 = 60;
const EVERY_S_MAX: u64 = 366 * 24 * 3600;
const KEEP_FOR_S_MAX: u64 = 100 * 366 * 24 * 3600;
/// Snapshots that one schedule keeps at most: a part of those that a volume may have.
pub const KEEP_MAX: u32 = 400;
/// Longest name: a snapshot's has the time behind it.
const NAME_BYTES_MAX: usize = 100;
/// Most schedules of one volume.
pub const SCHEDULES_MAX: usize = 16;
/// Longest time until a schedule is looked at again: a clock may be set.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Time until a snapshot that waits for its cut is looked at again.
const WAITS: Duration = Duration::from_secs(2);
/// Schedules in the queue.
const QUEUE_MAX: usize = 1 << 16;

/// Schedules, and the reconciler that carries them out.
pub struct Schedules {
    state: Arc<State>,
    snapshots: Arc<Snapshots>,
    queue: Arc<Queue<String>>,
}

fn about(schedule: &ScheduleRecord) -> Object {
    Object::new("volume", schedule.volume.0, &schedule.volume_name)
}

#[async_trait]
impl Reconciler for Schedules {
    type Key = String;
    const NAME: &'static str = "make scheduled snapshots";

    fn queue(&self) -> &Queue<String> {
        &self.queue
    }

    async fn reconcile(&self, name: &String, _: Instant) -> Result<Next, Error> {
        if self.state.check_ruling().is_err() {
            return Ok(Next::After(LOOK_AGAIN));
        }
        self.run(name, now_ms()).await
    }
}

impl Schedules {
    pub(crate) fn new(state: Arc<State>, snapshots: Arc<Snapshots>) -> Self {
        let queue = Arc::new(Queue::new(QUEUE_MAX));
        for schedule in state.snapshots.schedules.list() {
            queue.add(schedule.name.clone(), Duration::ZERO);
        }
        Self { state, snapshots, queue }
    }

    /// Makes a schedule, whose first snapshot is made at once, or finds the equal one that is there.
    pub async fn create(
        &self,
        asked: &CreateScheduleRequest,
    ) -> Result<Arc<ScheduleRecord>, Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let _changing = self.state.snapshots.changing.lock().await;
        let volume = self.state.volume(asked.volume.as_ref())?;
        if !matches!(volume.phase, VolumePhase::Ready | VolumePhase::Pending) {
            return Err(crate::state::missing(asked.volume.as_ref()));
        }
        let fresh = new_schedule(asked, &volume)?;
        if let Some(found) = self.state.snapshots.schedules.get(&fresh.name) {
            return same(found, &fresh);
        }
        let of_volume = |index: &quoin_cluster::records::ScheduleIndex| {
            index.of_volume(volume.id.0).map_or(0, std::collections::BTreeSet::len)
        };
        if self.state.snapshots.schedules.index(of_volume) >= SCHEDULES_MAX {
            return Err(Error::Exhausted(format!(
                "volume {:?} has {SCHEDULES_MAX} schedules, the most that a volume can have: delete \
                 one (`quoin schedule list`, `quoin schedule delete`)",
                volume.spec.name
            )));
        }
        let schedule = match self.state.snapshots.schedules.create(fresh.clone()).await? {
            Ok(schedule) => schedule,
            Err(found) => return same(found, &fresh),
        };
        let message = format!("schedule {:?}: {}", schedule.name, in_words(&schedule));
        self.state.events.record(Severity::Normal, about(&schedule), "ScheduleCreated", message);
        self.queue.add(schedule.name.clone(), Duration::ZERO);
        Ok(schedule)
    }

    /// Deletes a schedule; its snapshots stay. One that does not exist is deleted already.
    pub async fn delete(&self, name: &str) -> Result<(), Error> {
        self.state.check_ruling()?;
        self.state.check_term()?;
        let _changing = self.state.snapshots.changing.lock().await;
        let Some(schedule) = self.state.snapshots.schedules.get(name) else { return Ok(()) };
        self.state.snapshots.schedules.remove(name, |_| true).await?;
        let message = format!("schedule {:?}; its snapshots stay", schedule.name);
        self.state.events.record(Severity::Normal, about(&schedule), "ScheduleDeleted", message);
        Ok(())
    }

    pub fn get(&self, name: &str) -> Result<Arc<ScheduleRecord>, Error> {
        self.state.check_ruling()?;
        let shown = || name.chars().take(160).collect::<String>();
        let found = self.state.snapshots.schedules.get(name);
        found.ok_or_else(|| Error::missing("schedule", shown()))
    }

    /// All schedules, or those of one volume.
    pub fn list(&self, volume: Option<&VolumeRef>) -> Result<Vec<Arc<ScheduleRecord>>, Error> {
        self.state.check_ruling()?;
        let schedules = &self.state.snapshots.schedules;
        let Some(volume) = volume else { return Ok(schedules.list()) };
        let volume: VolumeId = self.state.volume(Some(volume))?.id.0;
        Ok(schedules.indexed(|index| index.of_volume(volume)))
    }

    /// Does what is due of a schedule.
    pub async fn look(&self, name: &str, now_ms: u64) -> Result<(), Error> {
        self.run(name, now_ms).await.map(drop)
    }

    async fn run(&self, name: &str, now_ms: u64) -> Result<Next, Error> {
        let Some(schedule) = self.state.snapshots.schedules.get(name) else {
            return Ok(Next::Rest);
        };
        let made = self.state.snapshots.of_schedule(&schedule);
        self.delete_old(&schedule, &made, now_ms).await?;
        if made.iter().any(|snapshot| snapshot.phase == SnapshotPhase::Wished) {
            return Ok(Next::After(WAITS));
        }
        if let Some(due_ms) = schedule.due_ms(now_ms)
            && !self.make(&schedule, due_ms, now_ms).await?
        {
            return Ok(Next::After(LOOK_AGAIN));
        }
        let schedule = self.state.snapshots.schedules.get(name).unwrap_or(schedule);
        let pause = Duration::from_millis(schedule.next_ms(now_ms).saturating_sub(now_ms));
        Ok(Next::After(pause.clamp(WAITS, LOOK_AGAIN)))
    }

    /// Carries out a run; false: it is not possible now.
    async fn make(
        &self,
        schedule: &ScheduleRecord,
        due_ms: u64,
        now_ms: u64,
    ) -> Result<bool, Error> {
        let reference = VolumeRef { id: schedule.volume.0.to_string(), name: String::new() };
        let name = snapshot_name(&schedule.name, due_ms);
        match self.snapshots.create_by(Some(&reference), &name, &schedule.name).await {
            Ok(_) => {}
            // The next run may find a place: this one is given up.
            Err(error @ (Error::Exhausted(_) | Error::Exists { .. })) => {
                let message = format!("snapshot {name:?} of a schedule is left out: {error}");
                let object = about(schedule);
                self.state.events.record(Severity::Warning, object, "ScheduleMissed", message);
            }
            // The keeper removes the schedule of a volume that is gone.
            Err(Error::NotFound { .. } | Error::Busy(_)) => return Ok(false),
            Err(error) => return Err(error),
        }
        let ran = |schedule: &mut ScheduleRecord| {
            schedule.last_ms = schedule.last_by(now_ms).max(due_ms);
            Ok(())
        };
        self.state.snapshots.schedules.update(&schedule.name, ran).await?;
        Ok(true)
    }

    async fn delete_old(
        &self,
        schedule: &ScheduleRecord,
        made: &[Arc<SnapshotRecord>],
        now_ms: u64,
    ) -> Result<(), Error> {
        for old in surplus(schedule, made, now_ms) {
            self.snapshots.delete_by(old, &schedule.name).await?;
        }
        Ok(())
    }
}

/// Snapshots of a schedule that are to go: those beyond the number, and those that are too old. The
/// newest one stays however old it is: the volume may be unused, or its runs may fail.
fn surplus<'a>(
    schedule: &ScheduleRecord,
    made: &'a [Arc<SnapshotRecord>],
    now_ms: u64,
) -> Vec<&'a SnapshotRecord> {
    let mut ready: Vec<&SnapshotRecord> = made
        .iter()
        .map(AsRef::as_ref)
        .filter(|snapshot| snapshot.phase == SnapshotPhase::Ready)
        .collect();
    // Cut by a clock that was ahead, a snapshot would be newer than all that follow it.
    ready.sort_by_key(|snapshot| {
        let cut_ms = snapshot.cut_ms();
        std::cmp::Reverse((!is_ahead(cut_ms, now_ms), cut_ms, snapshot.id))
    });
    let is_surplus = |(n, snapshot): &(usize, &SnapshotRecord)| {
        let age_ms = now_ms.saturating_sub(snapshot.cut_ms());
        let too_many = schedule.keep > 0 && *n >= schedule.keep as usize;
        let too_old = schedule.keep_for_ms > 0 && age_ms > schedule.keep_for_ms;
        *n > 0 && (too_many || too_old)
    };
    ready.into_iter().enumerate().filter(is_surplus).map(|(_, snapshot)| snapshot).collect()
}

fn new_schedule(
    asked: &CreateScheduleRequest,
    volume: &VolumeRecord,
) -> Result<ScheduleRecord, Error> {
    let name = if asked.name.is_empty() { &volume.spec.name } else { &asked.name };
    spec::check_name(name)?;
    if name.len() > NAME_BYTES_MAX {
        let rule = format!(
            "a schedule's has at most {NAME_BYTES_MAX} bytes, since its snapshots have the time \
             behind it; name it (--name)"
        );
        return Err(Error::invalid("name", rule));
    }
    if !(EVERY_S_MIN..=EVERY_S_MAX).contains(&asked.every_s) {
        return Err(Error::invalid("every", "a minute to a year"));
    }
    if asked.keep == 0 && asked.keep_for_s == 0 {
        let rule = "a number (--keep) or a time (--keep-for) is needed, or snapshots would pile up";
        return Err(Error::invalid("keep", rule));
    }
    if asked.keep > KEEP_MAX {
        let rule = format!("{} are more than a schedule can keep: {KEEP_MAX}", asked.keep);
        return Err(Error::invalid("keep", rule));
    }
    if asked.keep_for_s > KEEP_FOR_S_MAX {
        return Err(Error::invalid("keep for", "at most a hundred years"));
    }
    if asked.keep == 0 && asked.keep_for_s / asked.every_s >= u64::from(KEEP_MAX) {
        let rule = format!(
            "at this interval that are {} snapshots, more than the {KEEP_MAX} that a schedule can \
             keep: take a longer interval or a shorter time, or keep a number (--keep)",
            asked.keep_for_s / asked.every_s
        );
        return Err(Error::invalid("keep for", rule));
    }
    Ok(ScheduleRecord {
        name: name.clone(),
        volume: volume.id,
        volume_name: volume.spec.name.clone(),
        every_ms: asked.every_s * 1000,
        keep: asked.keep,
        keep_for_ms: asked.keep_for_s * 1000,
        created_ms: now_ms(),
        last_ms: 0,
    })
}

fn same(found: Arc<ScheduleRecord>, asked: &ScheduleRecord) -> Result<Arc<ScheduleRecord>, Error> {
    let told = |s: &ScheduleRecord| (s.volume, s.every_ms, s.keep, s.keep_for_ms);
    if told(&found) == told(asked) {
        return Ok(found);
    }
    Err(Error::Exists {
        what: "schedule",
        name: found.name.clone(),
        difference: format!(
            "settings: of volume {:?}, {}; delete it first (`quoin schedule delete`, its snapshots \
             stay), or choose another name",
            found.volume_name,
            in_words(&found)
        ),
    })
}

fn in_words(schedule: &ScheduleRecord) -> String {
    struct Time(u64);
    impl std::fmt::Display for Time {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            quoin_api::volume::write_time(Duration::from_millis(self.0), f)
        }
    }
    let mut words = format!("every {}", Time(schedule.every_ms));
    if schedule.keep > 0 {
        words += &format!(", keeps {}", schedule.keep);
    }
    if schedule.keep_for_ms > 0 {
        words += &format!(", for {}", Time(schedule.keep_for_ms));
    }
    words
}

/// Name of the snapshot of a planned run: the schedule's with the time in UTC.
fn snapshot_name(schedule: &str, due_ms: u64) -> String {
    let second = timestamp(due_ms - due_ms % 1000);
    format!("{schedule}-{}", second.to_string().replace(['-', ':'], ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::examples::{cut, snapshot, volume};

    const DAY_MS: u64 = 86_400_000;

    #[test]
    fn the_name_of_a_run_has_its_planned_time_in_utc() {
        assert_eq!(snapshot_name("db", 0), "db-19700101T000000Z");
        assert_eq!(snapshot_name("db", 1_709_164_799_999), "db-20240228T235959Z");
        assert_eq!(snapshot_name("db", 1_709_164_800_000), "db-20240229T000000Z");
        assert_eq!(snapshot_name("db", 1_767_225_599_000), "db-20251231T235959Z");
        assert_eq!(snapshot_name("db", 4_102_444_800_000), "db-21000101T000000Z");
    }

    fn of(keep: u32, keep_for_ms: u64) -> ScheduleRecord {
        ScheduleRecord {
            name: "hourly".into(),
            volume: quoin_cluster::records::Text(VolumeId(7)),
            volume_name: "db".into(),
            every_ms: 3_600_000,
            keep,
            keep_for_ms,
            created_ms: 0,
            last_ms: 0,
        }
    }

    fn ready(id: u128, at_ms: u64) -> Arc<SnapshotRecord> {
        let mut ready = snapshot(id, 7);
        ready.made(cut(at_ms));
        Arc::new(ready)
    }

    #[test]
    fn snapshots_beyond_the_number_or_too_old_go_and_the_newest_and_waiting_ones_stay() {
        let day = |n: u64| n * DAY_MS;
        let made = [ready(1, day(1)), ready(2, day(2)), ready(3, day(3)), Arc::new(snapshot(4, 7))];
        let going = |schedule: &ScheduleRecord, now_ms| {
            let mut ids: Vec<u128> =
                surplus(schedule, &made, now_ms).iter().map(|s| s.id.0.0).collect();
            ids.sort_unstable();
            ids
        };
        assert_eq!(going(&of(3, 0), day(100)), [0; 0]);
        assert_eq!(going(&of(1, 0), day(3)), [1, 2]);
        assert_eq!(going(&of(0, day(1)), day(3)), [1]);
        assert_eq!(going(&of(0, day(1)), day(100)), [1, 2], "the newest one stays");
        assert_eq!(going(&of(2, day(1)), day(4)), [1, 2]);
    }

    #[test]
    fn a_snapshot_cut_by_a_clock_that_was_ahead_does_not_push_out_those_that_follow() {
        let day = |n: u64| n * DAY_MS;
        let made = [ready(1, day(125)), ready(2, day(126)), ready(3, day(99)), ready(4, day(100))];
        let schedule = of(2, 0);
        let going: Vec<u128> =
            surplus(&schedule, &made, day(100)).iter().map(|s| s.id.0.0).collect();
        assert_eq!(going, [2, 1], "of four, the two that are new by this clock stay");
    }

    #[test]
    fn a_schedule_that_keeps_everything_or_too_much_is_refused_with_the_way_out() {
        let volume = volume();
        let refused = |asked: CreateScheduleRequest| new_schedule(&asked, &volume).unwrap_err();
        let asked = |every_s, keep, keep_for_s| CreateScheduleRequest {
            every_s,
            keep,
            keep_for_s,
            ..Default::default()
        };
        assert!(refused(asked(3600, 0, 0)).to_string().contains("--keep"));
        assert!(refused(asked(59, 1, 0)).to_string().contains("a minute to a year"));
        assert!(refused(asked(3600, KEEP_MAX + 1, 0)).to_string().contains("400"));
        assert!(refused(asked(60, 0, 7 * 86_400)).to_string().contains("longer interval"));
        let long = CreateScheduleRequest { name: "x".repeat(101), ..asked(3600, 1, 0) };
        assert!(refused(long).to_string().contains("--name"));
        let taken = new_schedule(&asked(3600, 24, 7 * 86_400), &volume).unwrap();
        assert_eq!((taken.name.as_str(), taken.every_ms), ("db", 3_600_000));
        assert_eq!(in_words(&taken), "every 1h, keeps 24, for 7d");
    }
}
