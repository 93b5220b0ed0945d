//! Parts of snapshots that targets are to read.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use quoin_api::control::target_command::What;
use quoin_api::control::{PullPart, PulledPart, TargetCommand};
use quoin_types::VolumeId;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::Error;
use crate::state::random_id;

/// Parts that wait at once: of all volumes, and of one.
const WAITING_MAX: usize = 32;
const WAITING_OF_VOLUME_MAX: usize = 8;
/// A target that was lent to a volume for its snapshots is kept so long after the last part.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// A part that a target is to read.
struct Waiting {
    volume: VolumeId,
    pull: PullPart,
    answer: oneshot::Sender<PulledPart>,
}

/// Parts that targets are to read, and the volumes of which parts were read lately.
#[derive(Default)]
pub(crate) struct Pulls {
    inner: Mutex<Inner>,
    /// Rises with each new one.
    begun: watch::Sender<u64>,
}

#[derive(Default)]
struct Inner {
    waiting: BTreeMap<u64, Waiting>,
    last: HashMap<VolumeId, Instant>,
}

impl Pulls {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock panics")
    }

    /// Counter that rises with each part that is to be read.
    pub fn begun(&self) -> watch::Receiver<u64> {
        self.begun.subscribe()
    }

    /// Parts of the volume are read, or were a moment ago.
    pub fn reads(&self, volume: VolumeId, now: Instant) -> bool {
        let mut inner = self.lock();
        inner.last.retain(|_, at| now.saturating_duration_since(*at) < KEPT_FOR);
        inner.last.contains_key(&volume)
            || inner.waiting.values().any(|waiting| waiting.volume == volume)
    }

    /// # Errors
    /// Too many parts wait.
    pub fn begin(
        &self,
        volume: VolumeId,
        pull: PullPart,
    ) -> Result<(u64, oneshot::Receiver<PulledPart>), Error> {
        let (answer, answered) = oneshot::channel();
        let id = {
            let mut inner = self.lock();
            let of_volume = inner.waiting.values().filter(|w| w.volume == volume).count();
            if inner.waiting.len() >= WAITING_MAX || of_volume >= WAITING_OF_VOLUME_MAX {
                let rule = "too many parts of snapshots are read at once; try again in a moment";
                return Err(Error::Exhausted(rule.to_owned()));
            }
            let free = |id: &u64| !inner.waiting.contains_key(id);
            let drawn = std::iter::repeat_with(|| random_id() as u64).find(free);
            let id = drawn.expect("an endless iterator");
            inner.last.insert(volume, Instant::now());
            inner.waiting.insert(id, Waiting { volume, pull, answer });
            id
        };
        self.begun.send_modify(|count| *count += 1);
        Ok((id, answered))
    }

    fn take(&self, id: u64) -> Option<Waiting> {
        self.lock().waiting.remove(&id)
    }

    /// Commands for the parts that wait of the volumes that `is_served`, by their numbers.
    pub fn commands(
        &self,
        term: &[u8],
        is_served: impl Fn(VolumeId) -> bool,
    ) -> Vec<(u64, TargetCommand)> {
        let inner = self.lock();
        let here = inner.waiting.iter().filter(|(_, waiting)| is_served(waiting.volume));
        let command = |(id, waiting): (&u64, &Waiting)| {
            let command = TargetCommand {
                id: format!("{id:016x}"),
                volume_id: waiting.volume.to_string(),
                term: term.to_vec(),
                what: Some(What::PullPart(waiting.pull.clone())),
            };
            (*id, command)
        };
        here.map(command).collect()
    }

    /// Hands a target's answer to the caller that waits for it, if there is one.
    pub fn answered(&self, volume: VolumeId, part: PulledPart) {
        let Ok(id) = u64::from_str_radix(&part.id, 16) else { return };
        let mut inner = self.lock();
        if inner.waiting.get(&id).is_none_or(|waiting| waiting.volume != volume) {
            return;
        }
        if let Some(waiting) = inner.waiting.remove(&id) {
            // The caller may have left just now.
            let _ = waiting.answer.send(part);
        }
    }
}

/// A request that is forgotten with its caller.
pub(crate) struct Asked<'a> {
    pub pulls: &'a Pulls,
    pub id: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.pulls.take(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pull() -> PullPart {
        PullPart { cursor_block: 2, ..PullPart::default() }
    }

    #[test]
    fn the_parts_that_wait_are_bounded_and_forgotten_with_their_callers() {
        let pulls = Pulls::default();
        let volume = VolumeId(7);
        let asked: Vec<_> = (0..WAITING_OF_VOLUME_MAX)
            .map(|_| pulls.begin(volume, pull()).map(|(id, _)| Asked { pulls: &pulls, id }))
            .collect();
        assert!(asked.iter().all(Result::is_ok));
        assert!(matches!(pulls.begin(volume, pull()), Err(Error::Exhausted(_))));
        assert!(pulls.begin(VolumeId(8), pull()).is_ok(), "another volume has its own share");
        assert_eq!(pulls.commands(b"", |id| id == volume).len(), WAITING_OF_VOLUME_MAX);
        drop(asked);
        assert!(pulls.commands(b"", |id| id == volume).is_empty());
        let now = Instant::now();
        assert!(pulls.reads(volume, now), "its target is kept for a moment");
        assert!(!pulls.reads(volume, now + KEPT_FOR));
    }

    #[test]
    fn an_answer_reaches_the_caller_that_asked_and_no_other_volume_s_target_gives_it() {
        let pulls = Pulls::default();
        let (id, mut answered) = pulls.begin(VolumeId(7), pull()).unwrap();
        let part = |id: u64| PulledPart { id: format!("{id:016x}"), ..PulledPart::default() };
        pulls.answered(VolumeId(8), part(id));
        pulls.answered(VolumeId(7), part(id ^ 1));
        pulls.answered(VolumeId(7), PulledPart { id: "no hex".into(), ..PulledPart::default() });
        assert!(answered.try_recv().is_err());
        pulls.answered(VolumeId(7), part(id));
        assert!(answered.try_recv().is_ok());
        pulls.answered(VolumeId(7), part(id));
    }
}
