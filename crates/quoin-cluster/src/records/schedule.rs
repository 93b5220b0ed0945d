//! The records of schedules that make snapshots.

use std::collections::{BTreeSet, HashMap};

use quoin_types::VolumeId;
use serde::{Deserialize, Serialize};

use crate::records::{Concerned, Index, Record, Text};
use crate::wall_clock::CORRECTION_MS;

/// Snapshots of one volume at intervals.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ScheduleRecord {
    pub name: String,
    pub volume: Text<VolumeId>,
    pub volume_name: String,
    pub every_ms: u64,
    /// Snapshots that are kept; 0: no limit.
    pub keep: u32,
    /// Time for which a snapshot is kept; 0: no limit.
    pub keep_for_ms: u64,
    /// The first run; the others follow it at the interval.
    pub created_ms: u64,
    /// Time of the last run that was carried out, as planned; 0: none was.
    pub last_ms: u64,
}

impl ScheduleRecord {
    /// The last run that was planned up to `now_ms`. Of several that were missed it is the only one
    /// that is made up for.
    pub fn planned_ms(&self, now_ms: u64) -> u64 {
        let every_ms = self.every_ms.max(1);
        // The interval that the runs keep to, also where the first run lies ahead.
        let phase_ms = self.created_ms % every_ms;
        let since = (now_ms % every_ms + every_ms - phase_ms) % every_ms;
        now_ms.saturating_sub(since)
    }

    /// Returns whether a time is so far ahead that a clock was wrong: it binds nothing.
    fn is_wrong(&self, at_ms: u64, now_ms: u64) -> bool {
        at_ms > now_ms.saturating_add(self.every_ms.min(CORRECTION_MS))
    }

    /// Time of the last run as it counts by this clock. A run that was carried out by a clock that was
    /// ahead leaves the present one due: it is made twice rather than not at all.
    pub fn last_by(&self, now_ms: u64) -> u64 {
        match self.is_wrong(self.last_ms, now_ms) {
            true => self.planned_ms(now_ms).saturating_sub(self.every_ms),
            false => self.last_ms,
        }
    }

    /// The planned run that is due; `None`: the last one was carried out.
    pub fn due_ms(&self, now_ms: u64) -> Option<u64> {
        let planned = self.planned_ms(now_ms);
        // A clock that was set back a little makes no run due that was carried out.
        let has_begun = now_ms >= self.created_ms || self.is_wrong(self.created_ms, now_ms);
        (has_begun && planned > self.last_by(now_ms)).then_some(planned)
    }

    /// Time of the next planned run.
    pub fn next_ms(&self, now_ms: u64) -> u64 {
        match self.due_ms(now_ms) {
            Some(due) => due,
            None if now_ms < self.created_ms && !self.is_wrong(self.created_ms, now_ms) => {
                self.created_ms
            }
            None => self.planned_ms(now_ms.max(self.last_by(now_ms))) + self.every_ms,
        }
    }
}

impl Record for ScheduleRecord {
    type Index = ScheduleIndex;
    const PREFIX: &'static str = "schedule/";
    fn name(&self) -> String {
        self.name.clone()
    }
    fn concerned(&self) -> Concerned {
        Concerned::Status
    }
    fn volume(&self) -> Option<VolumeId> {
        Some(self.volume.0)
    }
}

/// Names of schedules by their volumes.
#[derive(Debug, Default)]
pub struct ScheduleIndex {
    by_volume: HashMap<VolumeId, BTreeSet<String>>,
}

impl ScheduleIndex {
    pub fn of_volume(&self, volume: VolumeId) -> Option<&BTreeSet<String>> {
        self.by_volume.get(&volume)
    }
}

impl Index<ScheduleRecord> for ScheduleIndex {
    fn follow(&mut self, before: Option<&ScheduleRecord>, after: Option<&ScheduleRecord>) {
        if let Some(schedule) = before
            && let Some(names) = self.by_volume.get_mut(&schedule.volume.0)
        {
            names.remove(&schedule.name);
            if names.is_empty() {
                self.by_volume.remove(&schedule.volume.0);
            }
        }
        if let Some(schedule) = after {
            self.by_volume.entry(schedule.volume.0).or_default().insert(schedule.name.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_runs_that_were_missed_the_last_one_is_made_up_for_and_none_is_made_twice() {
        let mut hourly = ScheduleRecord {
            name: "db".into(),
            volume: Text(VolumeId(7)),
            volume_name: "db".into(),
            every_ms: 3600,
            keep: 2,
            keep_for_ms: 0,
            created_ms: 10_000,
            last_ms: 0,
        };
        assert_eq!((hourly.due_ms(9_999), hourly.due_ms(10_000)), (None, Some(10_000)));
        hourly.last_ms = 10_000;
        assert_eq!((hourly.due_ms(13_599), hourly.due_ms(13_600)), (None, Some(13_600)));
        assert_eq!(hourly.next_ms(11_000), 13_600);
        // The controller was away for ten intervals.
        assert_eq!(hourly.due_ms(10_000 + 36_500), Some(10_000 + 36_000));
        hourly.last_ms = 10_000 + 36_000;
        assert_eq!(hourly.due_ms(10_000 + 36_500), None);
        assert_eq!(hourly.next_ms(10_000 + 36_500), 10_000 + 39_600);
        // The clock was set back by less than an interval.
        assert_eq!((hourly.due_ms(45_000), hourly.next_ms(45_000)), (None, 10_000 + 39_600));
    }

    #[test]
    fn no_run_is_bound_by_a_time_that_lies_ahead() {
        let (day, now) = (86_400_000, 1_700_000_000_000);
        let minutely = ScheduleRecord {
            name: "m".into(),
            volume: Text(VolumeId(7)),
            volume_name: "db".into(),
            every_ms: 60_000,
            keep: 2,
            keep_for_ms: 0,
            created_ms: now - day,
            last_ms: now + 25 * day,
        };
        let due = minutely.due_ms(now).expect("a run of the future was carried out");
        assert!(due <= now && now - due < 60_000, "{due}");
        assert_eq!(minutely.next_ms(now), due);
        // The first run of all lies ahead: the clock was wrong as the schedule was made.
        let created = ScheduleRecord { created_ms: now + 25 * day, last_ms: 0, ..minutely.clone() };
        let due = created.due_ms(now).expect("a first run of the future");
        assert!(
            due <= now && now - due < 60_000 && (created.created_ms - due).is_multiple_of(60_000)
        );
        // Once it is carried out, the next one is an interval later.
        let carried_out = ScheduleRecord { last_ms: due, ..created };
        assert_eq!((carried_out.due_ms(now), carried_out.next_ms(now)), (None, due + 60_000));
        // A step back by seconds, across a run: nothing is made twice.
        let stepped = ScheduleRecord { created_ms: now - day, last_ms: now, ..minutely };
        assert_eq!(stepped.due_ms(now - 2_000), None);
    }
}
