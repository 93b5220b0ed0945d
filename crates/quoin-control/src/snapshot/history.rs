//! Parts of a snapshot's content, or of what changed in it, for users and backups.
//!
//! A caller asks for one part after the other. The volume's target is told by a command, reads the
//! part from a replica and answers by a call; nothing is recorded, and a caller that is gone takes its
//! request along. Each part is bounded, and so is the number of those that wait.

use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::{
    CommandRefused, MeasureSnapshotRequest, PullPart, PullSnapshotRequest, PulledPart,
    SnapshotMeasure, SnapshotPart, command_refused,
};
use quoin_cluster::records::{SnapshotPhase, SnapshotRecord};
use quoin_encryption::HASH_BYTES;
use quoin_types::ids::SnapshotId;
use quoin_types::{BLOCK_SIZE, VolumeId};
use tokio::time::Instant;

use super::catalog::Snapshots;
use super::measure::{Known, measured};
use crate::Error;
use crate::state::State;
use crate::state::pulls::Asked;

/// Time for which a part is waited for.
const PART_TIME: Duration = Duration::from_secs(20);
/// Pause before a part is requested again of a target that was too busy for it.
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// Parts of each view that one step of a measurement reads.
const MEASURED_PARTS: usize = 16;
/// Ranges of a part; a target sends some thousands at most.
const RANGES_MAX: usize = 1 << 15;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Blocks of a range that is hashed.
const RANGE_BLOCKS: u64 = (1 << 20) / BLOCK;

/// Content of snapshots, part by part.
pub struct History {
    state: Arc<State>,
    catalog: Arc<Snapshots>,
}

impl History {
    pub(crate) fn new(state: Arc<State>, catalog: Arc<Snapshots>) -> Self {
        Self { state, catalog }
    }

    /// A part of the content of a snapshot, or of what changed in it since another one.
    ///
    /// # Errors
    /// The snapshots are not two of one volume in their order, the offset is none of theirs, one of
    /// them is gone, a byte of them has no good copy, or no part came in time.
    pub async fn pull(&self, asked: &PullSnapshotRequest) -> Result<SnapshotPart, Error> {
        let snapshot = self.cut("snapshot", asked.snapshot.as_ref())?;
        let since = match &asked.since {
            Some(since) => Some(self.cut("since", Some(since))?),
            None => None,
        };
        let cut = snapshot.cut.unwrap_or_default();
        if let Some(since) = &since {
            check_order(since, &snapshot)?;
        }
        check_offset(asked.offset, cut.size_bytes)?;
        let volume = self.state.volumes.get(&snapshot.volume.0.to_string());
        let encrypted = volume.is_some_and(|volume| volume.spec.encryption.is_some());
        let size_bytes = cut.size_bytes;
        if asked.offset == size_bytes {
            return Ok(SnapshotPart { size_bytes, encrypted, ..SnapshotPart::default() });
        }
        let pull = PullPart {
            snapshot_id: snapshot.id.0.to_string(),
            since_snapshot_id: since.as_ref().map(|s| s.id.0.to_string()).unwrap_or_default(),
            cursor_block: asked.offset / BLOCK,
            want_data: asked.want_data,
            hash_ranges: 0,
        };
        let part = self.part(snapshot.volume.0, &snapshot.name, &pull).await?;
        check_part(&part, &pull, size_bytes)?;
        let next_offset = part.next_block.map(|block| block.saturating_mul(BLOCK));
        Ok(SnapshotPart { ranges: part.ranges, next_offset, size_bytes, encrypted })
    }

    /// Counts the bytes of a snapshot from an offset on, as far as one step goes.
    ///
    /// # Errors
    /// As [`Self::pull`].
    pub async fn measure(&self, asked: &MeasureSnapshotRequest) -> Result<SnapshotMeasure, Error> {
        let snapshot = self.cut("snapshot", asked.snapshot.as_ref())?;
        let size_bytes = snapshot.cut.unwrap_or_default().size_bytes;
        check_offset(asked.offset, size_bytes)?;
        if asked.offset == size_bytes {
            return Ok(SnapshotMeasure { size_bytes, ..SnapshotMeasure::default() });
        }
        let (older, newer) = self.neighbours(&snapshot);
        let (first, id) = (asked.offset / BLOCK, snapshot.id.0.to_string());
        let pull = |since: Option<&SnapshotRecord>, to: String| PullPart {
            snapshot_id: to,
            since_snapshot_id: since.map(|since| since.id.0.to_string()).unwrap_or_default(),
            cursor_block: first,
            ..PullPart::default()
        };
        let all = pull(None, id.clone());
        let held = self.known(&snapshot, all, size_bytes, |_| false).await?;
        let is_short = |known: &Known| known.end < held.end;
        let new = match older.as_deref() {
            Some(older) => {
                Some(self.known(&snapshot, pull(Some(older), id), size_bytes, is_short).await?)
            }
            // All that it has is new in the oldest one.
            None => None,
        };
        // The volume itself may have grown.
        let size_of = |newer: &SnapshotRecord| newer.cut.unwrap_or_default().size_bytes;
        let newer_size = newer.as_deref().map_or(u64::MAX, size_of);
        let newer = newer.map(|newer| newer.id.0.to_string()).unwrap_or_default();
        let gone = pull(Some(&snapshot), newer);
        let gone = self.known(&snapshot, gone, newer_size, is_short).await?;
        let found = measured(first, &held, new.as_ref().unwrap_or(&held), &gone);
        let next_offset = found.end.saturating_mul(BLOCK);
        Ok(SnapshotMeasure {
            data_bytes: found.data_bytes,
            exclusive_bytes: found.exclusive_bytes,
            next_offset: (next_offset < size_bytes).then_some(next_offset),
            size_bytes,
        })
    }

    /// Snapshots of the same volume before and after one, users' or not, as long as they are kept.
    fn neighbours(
        &self,
        snapshot: &SnapshotRecord,
    ) -> (Option<Arc<SnapshotRecord>>, Option<Arc<SnapshotRecord>>) {
        let lsn = |snapshot: &SnapshotRecord| snapshot.cut.map_or(0, |cut| cut.lsn);
        let others = self.state.snapshots.of_volume(snapshot.volume.0);
        let others = || others.iter().filter(|other| other.is_kept() && other.id != snapshot.id);
        let older = others().filter(|other| lsn(other) < lsn(snapshot)).max_by_key(|o| lsn(o));
        let newer = others().filter(|other| lsn(other) > lsn(snapshot)).min_by_key(|o| lsn(o));
        (older.cloned(), newer.cloned())
    }

    /// Reads a view from a part on, and more parts while it `is_short`.
    async fn known(
        &self,
        snapshot: &SnapshotRecord,
        pull: PullPart,
        size_bytes: u64,
        is_short: impl Fn(&Known) -> bool,
    ) -> Result<Known, Error> {
        let mut known = Known::from(pull.cursor_block);
        for _ in 0..MEASURED_PARTS {
            let pull = PullPart { cursor_block: known.end, ..pull.clone() };
            let part = self.part(snapshot.volume.0, &snapshot.name, &pull).await?;
            check_part(&part, &pull, size_bytes)?;
            known.add(&part);
            if !is_short(&known) {
                break;
            }
        }
        Ok(known)
    }

    fn cut(
        &self,
        field: &'static str,
        reference: Option<&quoin_api::control::SnapshotRef>,
    ) -> Result<Arc<SnapshotRecord>, Error> {
        if reference.is_none() {
            return Err(Error::invalid(field, "an id or a name is needed"));
        }
        let found = self.catalog.get(reference)?;
        match found.phase {
            SnapshotPhase::Wished => {
                Err(Error::Busy(format!("snapshot {:?} is not cut yet", found.name)))
            }
            _ => Ok(found),
        }
    }

    /// Counts the bytes that were written to a volume since one of its snapshots, and holes are none; `None`: all that
    /// it has. False: `until` came before the end of the volume.
    ///
    /// # Errors
    /// The snapshot is gone, or no part came in time.
    pub(crate) async fn written_since(
        &self,
        volume: VolumeId,
        since: Option<SnapshotId>,
        until: Instant,
    ) -> Result<(u64, bool), Error> {
        let (mut bytes, mut cursor_block) = (0u64, 0);
        while Instant::now() < until {
            let pull = PullPart {
                snapshot_id: String::new(),
                since_snapshot_id: since.map(|since| since.to_string()).unwrap_or_default(),
                cursor_block,
                ..PullPart::default()
            };
            let part = self.part(volume, "of the mirror", &pull).await?;
            // The volume itself may have grown.
            check_part(&part, &pull, u64::MAX)?;
            let written = part.ranges.iter().filter(|range| !range.hole);
            bytes = bytes.saturating_add(written.map(|range| range.length).sum());
            match part.next_block {
                Some(next) => cursor_block = next,
                None => return Ok((bytes, true)),
            }
        }
        Ok((bytes, false))
    }

    /// Hashes of ranges of 1 MiB of a snapshot, as its target reads it.
    ///
    /// # Errors
    /// The snapshot is gone, a byte of it has no good copy, or the target does not answer.
    pub(crate) async fn hashes(
        &self,
        (volume, snapshot): (VolumeId, SnapshotId),
        first_range: u64,
        hash_ranges: u32,
    ) -> Result<Vec<u8>, Error> {
        let pull = PullPart {
            snapshot_id: snapshot.to_string(),
            cursor_block: first_range.saturating_mul(RANGE_BLOCKS),
            hash_ranges,
            ..PullPart::default()
        };
        let hashes = self.part(volume, "of the mirror", &pull).await?.hashes;
        match hashes.len() == hash_ranges as usize * HASH_BYTES {
            true => Ok(hashes),
            false => Err(Error::Precondition(
                "the volume's target hashes no ranges: update the target".to_owned(),
            )),
        }
    }

    /// Waits for a part of the volume's target.
    async fn part(
        &self,
        volume: VolumeId,
        name: &str,
        pull: &PullPart,
    ) -> Result<PulledPart, Error> {
        let pulls = &self.state.snapshots.pulls;
        let until = Instant::now() + PART_TIME;
        loop {
            let (id, answered) = pulls.begin(volume, pull.clone())?;
            let _asked = Asked { pulls, id };
            let served = self.state.volumes.get(&volume.to_string());
            if served.is_none_or(|volume| volume.opened.owner.is_none()) {
                // A target is lent to it.
                self.state.tell_target(volume);
            }
            let Ok(Ok(part)) = tokio::time::timeout_at(until, answered).await else {
                let volume = self.state.volumes.get(&volume.to_string());
                let waiting = super::view::waiting_for(&self.state, volume.as_deref());
                return Err(Error::Busy(format!(
                    "snapshot {name:?} is not read yet; that waits for {waiting}"
                )));
            };
            let Some(refused) = &part.refused else { return Ok(part) };
            if refused.reason() != command_refused::Reason::Busy {
                return Err(refusal(refused, name));
            }
            if Instant::now() + BUSY_PAUSE >= until {
                let rule = "its target reads too many parts of snapshots at once; try again";
                return Err(Error::Busy(rule.to_owned()));
            }
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }
}

/// # Errors
/// It is no place of a snapshot of this size.
fn check_offset(offset: u64, size_bytes: u64) -> Result<(), Error> {
    match offset.is_multiple_of(BLOCK) && offset <= size_bytes {
        true => Ok(()),
        false => Err(Error::OutOfRange(format!(
            "offset: {offset} is no multiple of {BLOCK} up to the snapshot's size, {size_bytes}"
        ))),
    }
}

/// # Errors
/// The older snapshot is of another volume, or not older.
fn check_order(since: &SnapshotRecord, snapshot: &SnapshotRecord) -> Result<(), Error> {
    if since.volume != snapshot.volume {
        return Err(Error::invalid(
            "since",
            format!(
                "{:?} is of volume {:?}, and {:?} of volume {:?}; two snapshots of one volume are \
                 compared",
                since.name, since.volume_name, snapshot.name, snapshot.volume_name
            ),
        ));
    }
    let lsn = |snapshot: &SnapshotRecord| snapshot.cut.map_or(0, |cut| cut.lsn);
    if lsn(since) >= lsn(snapshot) {
        return Err(Error::invalid(
            "since",
            format!("{:?} was not cut before {:?}", since.name, snapshot.name),
        ));
    }
    Ok(())
}

fn refusal(refused: &CommandRefused, snapshot: &str) -> Error {
    let shown: String = refused.message.chars().take(160).collect();
    match refused.reason() {
        command_refused::Reason::NoSnapshot => Error::missing("snapshot", snapshot),
        command_refused::Reason::Damaged => Error::DataLoss(format!(
            "snapshot {snapshot:?}: no replica that is there has a good copy of {shown}; start the \
             pools of those that are away, or look at `quoin volume verify`"
        )),
        _ => Error::Busy(shown),
    }
}

/// A target's part, as far as a controller can check it: it is passed on to others.
///
/// # Errors
/// An answer that cannot be.
pub fn check_part(part: &PulledPart, pull: &PullPart, size_bytes: u64) -> Result<(), Error> {
    let wrong = |why: &str| Err(Error::Busy(format!("the target's answer cannot be: {why}")));
    let from = pull.cursor_block.saturating_mul(BLOCK);
    let end = match part.next_block {
        Some(next) if next <= pull.cursor_block => return wrong("no progress"),
        Some(next) => next.saturating_mul(BLOCK).min(size_bytes),
        None => size_bytes,
    };
    if part.ranges.len() > RANGES_MAX {
        return wrong("too many ranges");
    }
    let mut at = from;
    for range in &part.ranges {
        let until = range.offset.saturating_add(range.length);
        if range.offset < at || range.length == 0 || until > end {
            return wrong("ranges out of order");
        }
        let bytes = if pull.want_data && !range.hole { range.length } else { 0 };
        if range.data.len() as u64 != bytes {
            return wrong("data that does not fit its range");
        }
        at = until;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use quoin_api::control::SnapshotRange;

    use super::*;

    fn pull() -> PullPart {
        PullPart { cursor_block: 2, ..PullPart::default() }
    }

    #[test]
    fn a_part_that_cannot_be_is_not_passed_on() {
        let range = |offset: u64, length: u64| SnapshotRange {
            offset: offset * BLOCK,
            length: length * BLOCK,
            ..SnapshotRange::default()
        };
        let of = |ranges: Vec<SnapshotRange>, next_block| {
            let part = PulledPart { ranges, next_block, ..PulledPart::default() };
            check_part(&part, &pull(), 10 * BLOCK).is_ok()
        };
        assert!(of(vec![range(2, 3), range(5, 5)], None));
        assert!(of(vec![range(2, 3)], Some(5)));
        assert!(!of(vec![range(1, 3)], None), "before its beginning");
        assert!(!of(vec![range(2, 3), range(4, 1)], None), "out of order");
        assert!(!of(vec![range(2, 3)], Some(4)), "beyond its end");
        assert!(!of(vec![range(9, 2)], None), "beyond the snapshot");
        assert!(!of(vec![range(u64::MAX / BLOCK, 9)], None));
        assert!(!of(vec![range(3, 0)], None), "nothing");
        assert!(!of(vec![], Some(2)), "no progress");
        let data = SnapshotRange { data: vec![0; BLOCK_SIZE], ..range(2, 1) };
        assert!(!of(vec![data.clone()], None), "data that nobody wanted");
        let wanted = PullPart { want_data: true, ..pull() };
        let part = |ranges| PulledPart { ranges, ..PulledPart::default() };
        assert!(check_part(&part(vec![data]), &wanted, 10 * BLOCK).is_ok());
        assert!(
            check_part(&part(vec![range(2, 1)]), &wanted, 10 * BLOCK).is_err(),
            "without its data"
        );
    }
}
