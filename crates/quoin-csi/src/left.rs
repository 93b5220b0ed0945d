//! Remains on this host of volumes that the records have there no more: the word of the controller on it, and
//! the mounts that are taken away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quoin_api::control as api;
use quoin_node::{NodeHost, Reported, StandingHere, Word};

use crate::{Plugin, health};

/// Volumes that the controller is asked for between two reports.
const ASKED_MAX: usize = 8;
/// Longest wait for the controller's word of one.
const WORD_MAX: Duration = Duration::from_secs(1);

/// Why the mounts of volumes stay, by volume, until they are taken away.
#[derive(Clone, Default)]
pub struct Left(Arc<Mutex<BTreeMap<String, String>>>);

impl Left {
    fn set(&self, volume: String, why: Option<String>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match why {
            Some(why) => all.insert(volume, why),
            None => all.remove(&volume),
        };
    }

    /// Returns what stays of these volumes, and forgets all others.
    fn of(&self, volumes: &[String]) -> Vec<(String, String)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|volume, _| volumes.contains(volume));
        all.iter().map(|(volume, why)| (volume.clone(), why.clone())).collect()
    }
}

impl Plugin {
    /// Asks the controller for volumes of which something is here and no device: some with each report, so
    /// that all have their turn. One that is not answered is not known.
    pub(crate) async fn learn_of(
        &self,
        reported: Option<&Reported>,
        turn: u64,
    ) -> BTreeMap<String, Word> {
        let mut learned = BTreeMap::new();
        let Some(node) = self.node() else { return learned };
        let volumes = reported.map(Reported::unspoken).unwrap_or_default();
        let begin = turn as usize * ASKED_MAX % volumes.len().max(1);
        for volume in volumes.iter().cycle().skip(begin).take(volumes.len().min(ASKED_MAX)) {
            let asked = self.backend().find_volume(volume);
            let Ok(Ok(found)) = tokio::time::timeout(WORD_MAX, asked).await else { break };
            learned.insert(volume.clone(), word(found.as_ref(), &node.name));
        }
        learned
    }

    /// Takes the mounts of these volumes away behind the caller, where no call works on them; returns
    /// why some stay.
    pub(crate) fn take_down_left(&self, volumes: Vec<String>) -> Vec<(String, String)> {
        let Some(node) = self.node() else { return Vec::new() };
        let left = self.left().of(&volumes);
        for volume in volumes {
            let Some(held) = self.try_begin_on_node(&volume) else { continue };
            let (host, left) = (node.host.clone(), self.left().clone());
            tokio::spawn(async move {
                let _held = held;
                let why = take_down(&host, &volume).await;
                left.set(volume, why);
            });
        }
        left
    }
}

async fn take_down(host: &NodeHost, volume: &str) -> Option<String> {
    let outcome = host.take_down_left(volume).await;
    let why = outcome.unwrap_or_else(|error| Some(error.to_string()));
    why.map(|why| format!("it is not attached to this host any more, and is still mounted: {why}"))
}

/// Returns what the records say of a volume on a node.
fn word(volume: Option<&api::Volume>, node: &str) -> Word {
    let Some(volume) = volume else {
        return Word { standing: StandingHere::Deleted, ..Word::default() };
    };
    let is_here = health::standing(volume, node).is_published;
    Word {
        name: volume.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default(),
        standing: if is_here {
            StandingHere::Here { size_bytes: 0 }
        } else {
            StandingHere::NotHere
        },
        served_elsewhere: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_on_a_volume_here_is_that_of_its_attachments() {
        let on = |node: &str, phase: &str| api::Attachment {
            node: node.into(),
            phase: phase.into(),
            ..Default::default()
        };
        let of = |attachments| {
            let volume = api::Volume { attachments, ..Default::default() };
            word(Some(&volume), "a").standing
        };
        assert_eq!(of(vec![on("a", "Attached")]), StandingHere::Here { size_bytes: 0 });
        assert_eq!(of(vec![on("b", "Attached")]), StandingHere::NotHere);
        assert_eq!(of(vec![on("a", "Detaching")]), StandingHere::NotHere);
        assert_eq!(word(None, "a").standing, StandingHere::Deleted);
    }

    #[test]
    fn what_stays_is_told_until_it_is_taken_away_or_wanted_again() {
        let left = Left::default();
        left.set("v".into(), Some("in use".into()));
        assert_eq!(left.of(&["v".into()]), [("v".to_owned(), "in use".to_owned())]);
        left.set("v".into(), None);
        assert_eq!(left.of(&["v".into()]), []);
        left.set("v".into(), Some("in use".into()));
        assert_eq!(left.of(&[]), []);
        assert_eq!(left.of(&["v".into()]), []);
    }
}
