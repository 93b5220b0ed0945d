//! Lag of a mirror in bytes: what was written on the primary since the last common point, as its targets count it.
//! A delta would carry that, and a failover in this moment would lose it. The copy's side is told of each count.

use std::collections::HashMap;
use std::time::Duration;

use quoin_api::control::{MirrorLag, peer_word};
use quoin_cluster::mirror::Role;
use quoin_cluster::ownership::mirrored::snapshot_of;
use quoin_cluster::records::MirrorRecord;
use quoin_types::VolumeId;
use quoin_types::ids::{GroupId, PointId};
use tokio::time::{Instant, timeout_at};

use super::driver::Mirrors;
use crate::Error;
use crate::state::mirrored::LagBytes;
use crate::time::now_ms;

/// Interval of counts of one group, and that in which the copy's side is told of one again.
const COUNTED_EVERY: Duration = Duration::from_secs(3);
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// Time for one count. A bound is told where it was too short.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);
/// Pause after a count: so many times as long as it took.
const PAUSE_TIMES: u32 = 20;
/// A count that a peer tells of is no older.
const AGE_MAX: Duration = Duration::from_secs(3600);

/// Times of one group, as the counts of this life left them.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// The next count.
    due: Option<Instant>,
    told: Option<Instant>,
}

impl Mirrors {
    /// Counts, for ever.
    pub(crate) async fn keep_counting(&self) {
        let mut counts = HashMap::<GroupId, Counted>::new();
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.state.check_ruling().is_err() || self.state.check_term().is_err() {
                continue;
            }
            counts.retain(|group, _| self.state.mirrored.group(*group).is_some());
            let all = self.state.mirrored.records.list();
            for record in all.iter().filter(|record| record.role() == Role::Primary) {
                self.count(record, counts.entry(record.id.0).or_default()).await;
            }
        }
    }

    async fn count(&self, record: &MirrorRecord, times: &mut Counted) {
        let group = record.id.0;
        let Some(figures) = self.state.mirrored.figures(group) else { return };
        let since = record.brain().points.common;
        let now = Instant::now();
        let known = self
            .state
            .mirrored
            .lag_bytes(group)
            .filter(|known| known.since == since && known.told.is_none());
        let lag = match figures.is_idle {
            true => {
                LagBytes { since, bytes: 0, is_least: false, counted: figures.looked, told: None }
            }
            false => {
                let is_due = times.due.is_none_or(|due| now >= due);
                if !is_due && known.is_some() {
                    return;
                }
                let until = now + COUNTED_WITHIN;
                let lag = self.counted(record, until).await;
                let pause = COUNTED_EVERY.max(now.elapsed() * PAUSE_TIMES);
                times.due = Some(Instant::now() + pause);
                // Where no target answers now, as much as before at least: nothing takes it back.
                let Some(lag) =
                    lag.ok().or(known.map(|known| LagBytes { is_least: true, ..known }))
                else {
                    return;
                };
                lag
            }
        };
        let is_new = self.state.mirrored.note_lag(group, lag);
        let is_told = times.told.is_some_and(|told| told.elapsed() < TOLD_EVERY);
        if !is_new && is_told {
            return;
        }
        let Some(point) = since else { return };
        times.told = Some(Instant::now());
        let told = MirrorLag {
            point_id: point.to_string(),
            bytes: lag.bytes,
            is_least: lag.is_least,
            counted_ms: u64::try_from(lag.counted.elapsed().as_millis()).unwrap_or(u64::MAX),
            now_ms: now_ms(),
        };
        self.say(record.brain().peer.to_string(), group, peer_word::What::Lag(told));
    }

    /// Counts all members of a group.
    ///
    /// # Errors
    /// A member that was written to is served nowhere, or its target does not answer.
    async fn counted(&self, record: &MirrorRecord, until: Instant) -> Result<LagBytes, Error> {
        let brain = record.brain();
        let since = brain.points.common;
        let counted = Instant::now();
        let mut lag = LagBytes { since, bytes: 0, is_least: false, counted, told: None };
        for member in &brain.members {
            let base = since.filter(|_| member.has_base);
            let (bytes, is_whole) = self.counted_of(member.volume, base, until).await?;
            lag.bytes = lag.bytes.saturating_add(bytes);
            lag.is_least |= !is_whole;
        }
        Ok(lag)
    }

    async fn counted_of(
        &self,
        volume: VolumeId,
        since: Option<PointId>,
        until: Instant,
    ) -> Result<(u64, bool), Error> {
        let served = self.state.volumes.get(&volume.to_string());
        // No target is lent for a figure.
        if served.is_none_or(|volume| volume.opened.owner.is_none()) {
            return Err(Error::Busy("no target serves it".to_owned()));
        }
        let since = since.map(|point| snapshot_of(point, volume));
        let counted = self.history.written_since(volume, since, until);
        match timeout_at(until, counted).await {
            Ok(counted) => counted,
            Err(_) => Err(Error::Busy("its target does not answer".to_owned())),
        }
    }

    /// The primary's side tells of a count.
    pub(super) fn told_lag(&self, peer: &str, group: GroupId, told: &MirrorLag) {
        let record = self.state.mirrored.group(group);
        let is_of_copy = record.is_some_and(|record| {
            record.role() != Role::Primary && record.brain().peer.to_string() == peer
        });
        let Some(since) = told.point_id.parse().ok().filter(|_| is_of_copy) else { return };
        let age = Duration::from_millis(told.counted_ms).min(AGE_MAX);
        let counted = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
        let lag = LagBytes {
            since: Some(since),
            bytes: told.bytes,
            is_least: told.is_least,
            counted,
            told: (told.now_ms != 0).then(|| (told.now_ms, Instant::now())),
        };
        self.state.mirrored.note_lag(group, lag);
    }

    /// The wall clock by which a copy's points were cut, as far as its primary told; else that of this side. The two may
    /// be apart.
    pub(super) fn clock_of_points(&self, record: &MirrorRecord) -> u64 {
        let told = self.state.mirrored.lag_bytes(record.id.0);
        let told = told.filter(|_| !record.brain().is_own());
        told.and_then(|lag| lag.their_now_ms()).unwrap_or_else(now_ms)
    }

    /// The last count, where it is from the point that a failover now would show.
    pub(super) fn lag_bytes(&self, record: &MirrorRecord) -> Option<LagBytes> {
        let brain = record.brain();
        let shown = match brain.role {
            Role::Primary => brain.points.common,
            Role::Secondary if !brain.is_own() => Some(brain.points.complete?),
            _ => return None,
        };
        let is_told = brain.role != Role::Primary;
        let lag = self.state.mirrored.lag_bytes(record.id.0);
        lag.filter(|lag| lag.since == shown && lag.told.is_some() == is_told)
    }
}
